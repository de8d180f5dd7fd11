"""Whole files or none: what a run keeps on disk, and how it comes back.

    status.json  ---written, fsync--->  status.json.partial  ---os.replace--->  status.json

Whatever is written goes to a name that ends in `.partial`, and gets its own name when all of it is
on the disk. A process may be killed at any moment: a name without `.partial` is whole.
Source: https://man7.org/linux/man-pages/man2/rename.2.html
"""

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import first_line
from manyhands.training import lock, places
from manyhands.training.process import this_process

FORMAT = "manyhands run 1"
DATA = ("data", "data_sha256")  # of a run's identity

# ---- files -------------------------------------------------------------------------------------


def partial_name(path: Path) -> Path:
    """The name of `path` while it is being written."""
    return path.with_name(path.name + ".partial")


def replace_file(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file so that readers see the old or the new one, never half of it.

    Args:
        mode: who may read and write a new file, less what the umask takes away.
    """
    partial = partial_name(path)
    with naming(path):
        with open(partial, "wb", opener=lambda name, how: os.open(name, how, mode)) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have an error of the disk name the file: "No space left on device" alone helps nobody."""
    try:
        yield
    except OSError as problem:
        if problem.filename is None:
            problem.filename = str(path)
        raise


def write_json(path: Path, value: dict) -> None:
    """Write `value` as indented JSON, whole or not at all."""
    replace_file(path, (json.dumps(value, indent=2) + "\n").encode())


def read_json(path: Path) -> dict:
    """Read a JSON object; BadInput where `path` holds something else."""
    try:
        value = json.loads(path.read_text())
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise BadInput(f"{path} cannot be read as JSON: name a new folder, or delete this one")
    return value


def stored(lesson: str, name: str) -> dict:
    """What a run of a lesson's job gave, kept in its room; prints how to make it anew."""
    found = read_json(Path(__file__).resolve().parents[1] / lesson / f"stored_{name}.json")
    print(f"stored run, not from here: {found['remake']}")
    where = f"torch {found['torch']}, {found['ranks']} ranks on {found['device']}"
    print(f"made on {found['date']} with {where}")
    return found


def read_lines(path: Path) -> list[dict]:
    """The JSON objects of a file, one a line; a half-written last line is left out."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return []
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise BadInput(f"{path}, line {number}, is not JSON: delete that line") from None
    return rows


def write_state(state: dict, path: Path) -> None:
    """Save with torch and wait for the disk; a disk that refuses is an OSError."""
    with naming(path), open(path, "wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as problem:
            # torch hides the disk's own words behind an error about its zip writer.
            disk = problem.__context__
            if not isinstance(disk, OSError):
                raise
            raise OSError(disk.errno, disk.strerror) from None
        file.flush()
        os.fsync(file.fileno())


def read_state(path: Path, names: set[str]) -> dict:
    """Load a file of a checkpoint on the CPU; BadInput where it does not hold `names`."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as problem:  # bytes that were damaged can raise anything in torch's unpickler
        reason = first_line(problem).partition(". ")[0] or type(problem).__name__
        raise BadInput(f"{path} cannot be read ({reason})") from None
    if not isinstance(state, dict) or not names <= state.keys():
        raise BadInput(f"{path} cannot be read (it is not a checkpoint of a run)")
    return state


# ---- the folder of a run -----------------------------------------------------------------------


def open_folder(
    out: str, name: str, about: dict, inside: Sequence[str] = ("checkpoints", "ranks")
) -> Path:
    """Make the folder of a run, or accept the one that is there, and write `config.json` into it.

    Args:
        out: the folder; empty takes the next free one, runs/`name`-001 and so on.
        about: what `config.json` says. Its "identity" has to be equal for a run to go on.
        inside: folders to make in it.

    Raises:
        BadInput: `out` holds something else, another run, or a finished one, or another process
            writes into it.
    """
    folder = Path(out) if out else next_free(places.runs(), name)
    if "::" in str(folder) or "://" in out:
        raise BadInput(f"--out {folder}: name a folder of this machine, without :: in its name")
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"--out {folder} is a file: name a folder")
    if (folder / "config.json").exists():
        _accept(folder, about)
    elif folder.exists() and any(
        path.suffix != ".partial" and path.name != lock.NAME for path in folder.iterdir()
    ):
        raise BadInput(f"--out {folder} holds files but no run: name a new or empty folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.hold(folder)
        for name in inside:
            (folder / name).mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", about)
    except OSError as problem:
        lock.release(folder)
        raise BadInput(
            f"cannot write {problem.filename}: {problem.strerror}; free some space, or name "
            "another folder with --out"
        ) from None
    return folder


def job_before(out: str) -> dict:
    """What `meters.job` said when the run in folder `out` was started last; {} without a run."""
    config = Path(out) / "config.json"
    about = read_json(config) if out and config.exists() else {}
    return about.get("job", {}) if about.get("format") == FORMAT else {}


def data_before(out: str) -> str | None:
    """The SHA-256 of the data on which the run in folder `out` has trained last, where known."""
    config = Path(out) / "config.json"
    return read_json(config).get("data_sha256") if out and config.exists() else None


def write_status(folder: Path, status: dict) -> None:
    """Write how a run stands; `status` holds at least its "state".

    A loss that is not finite is null there, since JSON has no word for it.
    """
    status = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in status.items()
    }
    added = {"time_s": time.time(), "process": this_process()}
    write_json(folder / "status.json", {**status, **added})


def write_end(folder: Path, status: dict) -> None:
    """Write how a run ended, and unlock its folder; one that still counts as running has failed."""
    try:
        if status["state"] != "running":
            write_status(folder, status)
            return
        with suppress(OSError):  # a full disk may be the very reason, and has been told
            write_status(folder, {**status, "state": "failed"})
    finally:
        lock.release(folder)


def next_free(runs: Path, name: str) -> Path:
    """Make and return the first of `name`-001, `name`-002, ... that is not there yet.

    Raises:
        NoPlace: it cannot be made.
    """
    places.make(runs)
    number = 1
    while True:
        folder = runs / f"{name}-{number:03d}"
        try:
            folder.mkdir()
            return folder
        except FileExistsError:  # also when another job was quicker
            number += 1
        except OSError as problem:
            raise places.NoPlace(folder, problem) from None


def _accept(folder: Path, about: dict) -> None:
    """Check that the run in `folder` is the one that `about` tells of, and unfinished."""
    theirs = read_json(folder / "config.json")
    status = folder / "status.json"
    if theirs.get("format") != about["format"]:
        raise BadInput(f"--out {folder} holds another kind of run: name a new folder")
    before, now = theirs.get("identity"), about["identity"]
    if found := differences(without_data(before), without_data(now)):
        raise BadInput(
            f"--out {folder} holds a run with {found}: take its settings, or name a new folder"
        )
    if differences(before, now):
        regardless = (
            ", or go on regardless with --other-data" if "other_data" in about["config"] else ""
        )
        raise BadInput(
            f"--out {folder} holds a run on other data, {data_words(before)}, and this is "
            f"{data_words(now)}: give it that data again, name a new folder{regardless}"
        )
    if status.exists() and read_json(status).get("state") == "finished":
        raise BadInput(
            f"--out {folder} holds a finished run of {about['config']['steps']} steps: name a new "
            "folder, or delete this one"
        )


def with_data_of(out: str, identity: dict, regardless: bool) -> dict:
    """`identity`, with the data of the run in folder `out` where they are equal to ours.

    What is equal may lie at another place by now. With `regardless` all data count as equal.
    """
    config = Path(out) / "config.json"
    before = read_json(config).get("identity") if out and config.exists() else None
    if not isinstance(before, dict):
        return identity
    if regardless or before.get("data_sha256") == identity["data_sha256"]:
        return {
            name: before[name] if name in DATA else value
            for name, value in identity.items()
            if name not in DATA or name in before
        }
    return identity


def without_data(identity: object) -> object:
    """An identity without what says which data it is about."""
    if not isinstance(identity, dict):
        return identity
    return {name: value for name, value in identity.items() if name not in DATA}


def data_words(identity: dict) -> str:
    """Which data an identity is about: "wikitext-2 (SHA-256 0123456789abcdef...)"."""
    sha256 = identity.get("data_sha256")
    return f"{identity.get('data')} (SHA-256 {f'{sha256[:16]}...' if sha256 else 'not known'})"


def differences(theirs: object, ours: dict) -> str:
    """What differs, in words: "layers=4, not 2". Empty when nothing does."""
    if not isinstance(theirs, dict):
        return "settings that cannot be read"
    names = [name for name in {**ours, **theirs} if not is_same(theirs.get(name), ours.get(name))]
    words = [f"{name}={theirs.get(name)}, not {ours.get(name)}" for name in names[:3]]
    return "; ".join(words) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def is_same(one: object, other: object) -> bool:
    """Are two settings equal? A number that is NaN equals NaN here: both say the same."""
    return one == other or (one != one and other != other)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module that `model` wraps, as DDP does; `model` itself where it is no wrapper.

    A wrapper is an average of a module's weights, or has one part, called `module`, and no tensors
    of its own. A model that calls one of its parts so has others beside it, which would be lost.
    """
    own = [*model.parameters(recurse=False), *model.buffers(recurse=False)]
    is_wrapper = [name for name, _ in model.named_children()] == ["module"] and not own
    return model.module if is_wrapper or isinstance(model, AveragedModel) else model
