"""Where what a person makes lies: beside the notebook or in the home, never in the course.

    runs/        the runs of jobs                       in the current folder, a notebook's own;
    mine/        the learner's functions, for jobs      in ~/manyhands-work where it is read-only
    progress/    what was tried and what is done        in ~/manyhands-work

MANYHANDS_HOME is a folder for all three, and MANYHANDS_RUNS, MANYHANDS_MINE and MANYHANDS_PROGRESS
each name one of them alone. So one installed course serves many people, who only read it.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from manyhands.ranks.failures import BadInput, OneLine

HOME = "MANYHANDS_HOME"
WORK = "manyhands-work"


class NoPlace(OneLine, BadInput):
    """What a person makes cannot be written there."""

    def __init__(self, path: Path, problem: OSError) -> None:
        super().__init__(
            f"cannot write {path}: {problem.strerror}; free some space, or set {HOME} to another "
            "folder of yours"
        )


def home() -> Path:
    """This person's folder. NoPlace where there is no home to put it in."""
    try:
        return Path(os.environ.get(HOME) or f"~/{WORK}").expanduser()
    except RuntimeError:  # no HOME, and a user that the machine has no name for
        nobody = OSError(0, f"user {os.getuid()} has no home folder")
        raise NoPlace(Path("~") / WORK, nobody) from None


def beside() -> Path:
    """The folder for runs/ and mine/: the current one, unless another is set or it is read-only."""
    return home() if os.environ.get(HOME) or not os.access(".", os.W_OK) else Path()


def runs() -> Path:
    """The folder in which jobs make their runs' folders."""
    return Path(os.environ.get("MANYHANDS_RUNS") or beside() / "runs")


def mine() -> Path:
    """The folder to which check.keep() writes the learner's functions."""
    return Path(os.environ.get("MANYHANDS_MINE") or beside() / "mine")


def with_mine() -> Iterator[Path]:
    """Where a job looks for them: there; from the course's folder also beside its notebooks."""
    yield mine()
    if not (os.environ.get("MANYHANDS_MINE") or os.environ.get(HOME)):
        yield Path("notebooks/mine")
        with suppress(NoPlace):  # who has no home has none there
            yield home() / "mine"


def progress() -> Path:
    """The folder of what was tried and what is done."""
    return Path(os.environ.get("MANYHANDS_PROGRESS") or home() / "progress")


def make(folder: Path) -> Path:
    """Make one of these folders where it is not there. NoPlace where that cannot be.

    Whatever the umask, nobody else can put files into it: this person's jobs run what mine/ holds.
    """
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as problem:
        raise NoPlace(folder, problem) from None
    return folder
