"""11.3: a file that is at every moment the old one or the new one, and at the end on the disk."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, nullcontext
from pathlib import Path
from typing import IO, NamedTuple
from unittest import mock

from manyhands.checks.engine import cases
from manyhands.checks.engine.spec import Spec
from manyhands.saving import store as course

OLD = b"the old file"
SECOND = b"{}"
STOP = "the disk is full"
TORN = "a file without all of its bytes"


class Writing(NamedTuple):
    """One call: what stands there before, how much is written, and whether `fill` fails."""

    seed: int
    has_old: bool
    num_bytes: int
    fails: type[BaseException] | None
    is_bare: bool = False  # the path is a name in the working folder
    has_second: bool = False  # while `fill` writes, weights.json is written in the same way
    has_half: bool = False  # an earlier process was killed while it wrote
    is_full: bool = False  # the disk says so only at fsync


def writings() -> list[Writing]:
    """A new name, an older file, one block and many, a disk that fills up, a stop, a name alone,
    two files at once, what a kill has left, a bug in `fill`, and a disk that fills up late."""
    seed = cases.draw_seed()
    return [
        Writing(seed, False, 10, None),
        Writing(seed + 1, True, 300_000, None),
        Writing(seed + 2, True, 50, OSError),
        Writing(seed + 3, False, 50, KeyboardInterrupt),
        Writing(seed + 4, True, 20, None, is_bare=True),
        Writing(seed + 5, True, 20, None, has_second=True),
        Writing(seed + 6, True, 20, None, has_half=True),
        Writing(seed + 7, False, 50, ValueError),
        Writing(seed + 8, True, 50, None, is_full=True),
    ]


class Disk:
    """What a folder would hold if the machine lost its power now.

    A file's bytes are on the disk up to where it was when fsync was called on it. A name, and what
    it stands for, is on the disk when fsync was called on the folder.
    """

    def __init__(self, path: Path, is_full: bool) -> None:
        self.path = path
        self.is_full = is_full
        self.synced: dict[int, int] = {}  # number of the file -> its bytes on the disk
        self.is_named = False
        self.is_gap = False  # an older file was gone before the new one came
        self.is_whole = True  # were all bytes on the disk when the name came?
        self.is_from_here = True  # what was moved to the name came from the same folder
        self.has_old = path.exists()
        self.real = {name: getattr(os, name) for name in ("fsync", "replace", "rename")}

    def fsync(self, file: int | IO) -> None:
        """Called instead of the system's, which takes an open file as well."""
        descriptor = file if isinstance(file, int) else file.fileno()
        if self.is_full:
            raise OSError(28, STOP)
        self.real["fsync"](descriptor)
        found = os.fstat(descriptor)
        if found.st_ino == os.stat(self.path.parent).st_ino:
            self.is_named = True
        else:
            self.synced[found.st_ino] = found.st_size

    def moved(self, name: str) -> Callable:
        """Called instead of os.replace or os.rename."""

        def move(source: object, target: object, **named: object) -> None:
            self.is_gap |= self.has_old and not self.path.exists()
            folder = self.path.parent.resolve()
            is_ours = Path(target).resolve() == folder / self.path.name
            if is_ours:
                self.is_from_here &= Path(source).resolve().is_relative_to(folder)
            self.real[name](source, target, **named)
            self.is_named = False
            self.is_whole &= not is_ours or self.state() != TORN

        return move

    def state(self) -> str:
        """What a power cut would leave under the name."""
        number = os.stat(self.path).st_ino if self.path.exists() else 0
        if number == 0:
            return "no file"
        if self.synced.get(number, 0) < os.stat(self.path).st_size:
            return TORN
        return "the new file" if self.is_named else "perhaps the new file"

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Write down what is called."""
        with (
            mock.patch.object(os, "fsync", self.fsync),
            mock.patch.object(os, "replace", self.moved("replace")),
            mock.patch.object(os, "rename", self.moved("rename")),
        ):
            yield


def writing_seen(answer: Callable, case: Writing) -> dict:
    """What a reader finds before, while and after, and what a power cut would leave."""
    folder = Path(tempfile.mkdtemp(prefix=f"manyhands-{case.seed}-"))
    try:
        with chdir(folder) if case.is_bare else nullcontext():
            return _seen(answer, case, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _seen(answer: Callable, case: Writing, folder: Path) -> dict:
    path = folder / "weights.pt"
    given = path.name if case.is_bare else path
    second = folder / "weights.json"
    if case.has_old:
        path.write_bytes(OLD)
    half = path.with_name(path.name + course.PARTIAL)
    if case.has_half:
        half.write_bytes(OLD)
    new = bytes(case.seed % 200 + 20 for _ in range(case.num_bytes))
    readers = []
    calls = []

    def fill(file) -> int:
        calls.append(file)
        readers.append(words_of(path, new))
        for start in range(0, len(new), 4096):
            file.write(new[start : start + 4096])
            readers.append(words_of(path, new))
        if case.has_second:
            answer(second, lambda other: other.write(SECOND))
        if case.fails:
            file.flush()
            raise case.fails(28, STOP)
        return len(new)

    disk, error, returned = Disk(path, case.is_full), "", None
    with disk.watched():
        try:
            returned = answer(Path(given) if case.seed % 2 else str(given), fill)
        except (OSError, ValueError, KeyboardInterrupt) as raised:
            if raised.args[0] != 28 and not case.has_second:
                raise
            error = raised.args[1]
    known = [path.name, *[second.name] * case.has_second, *[half.name] * case.has_half]
    left = sorted(file.name for file in folder.iterdir() if file.name not in known)
    seen = {
        "what a reader finds while `fill` writes": ", then ".join(dict.fromkeys(readers)),
        "what a reader finds afterwards": words_of(path, new),
        "the error that comes out": error or "none",
        "calls of `fill`": len(calls),
        "the old file stands there until the new one does": not disk.is_gap,
        "the bytes are on the disk before the file has its name": disk.is_whole,
        "nothing is left beside the file": not left,
        "what takes the name comes from the same folder": disk.is_from_here,
    }
    if case.has_second:
        seen["the second file"] = second.read_bytes() if second.exists() else "is not there"
    if not (case.fails or case.is_full):
        seen["what is returned"] = returned
        seen["what a power cut would leave after the call"] = disk.state()
    return seen


def words_of(path: Path, new: bytes) -> str:
    """What stands under the name."""
    if not path.exists():
        return "no file"
    content = path.read_bytes()
    return {OLD: "the old file", new: "the new file"}.get(content, "a part of the new file")


def tell_writing(case: Writing) -> str:
    """The call in words."""
    where = "over an older file" if case.has_old else "under a new name"
    ends = {
        None: "",
        OSError: ", whose `fill` finds the disk full in the middle,",
        KeyboardInterrupt: ", whose `fill` is stopped by Ctrl-C in the middle,",
        ValueError: ", whose `fill` raises a ValueError in the middle,",
    }[case.fails]
    ends = ", where the disk finds out at fsync that it is full," if case.is_full else ends
    ends = ", where a killed process has left half of a file," if case.has_half else ends
    ends = ", while weights.json is written in the same way" if case.has_second else ends
    name = "weights.pt, a name alone," if case.is_bare else "weights.pt,"
    return f"write_whole of {name} {case.num_bytes:,} bytes {where}{ends}"


SWAP = "Write to another name in the same folder, and os.replace it to `path` at the end."
ELSEWHERE = (
    "Another folder may lie on another disk, to which os.replace cannot move a file. Write beside "
    "the file."
)
SYNC = "file.flush() hands Python's buffer to the system, os.fsync(file.fileno()) to the disk."
FOLDER = "sync_folder(os.path.dirname(path)) after os.replace."
CLEAN = "On any exception remove the partial file, and raise the exception again."
REPLACE = "os.replace(partial, path)"
UNSAFE = (
    "The file that has the name at the end is not on the disk with all of its bytes: it got no "
    "fsync, or one while its last bytes were still in Python's buffer."
)
UNLINK = "Path(partial).unlink(missing_ok=True)"
write_whole = Spec(
    todo="11.3",
    truth=course.write_whole,
    cases=writings,
    observe=writing_seen,
    tell=tell_writing,
    independent=True,
    advice={
        "what a reader finds while `fill` writes": SWAP,
        "what a power cut would leave after the call": f"{SYNC} Then: {FOLDER}",
        "the bytes are on the disk before the file has its name": f"{SYNC} os.replace comes next.",
        "calls of `fill`": "`fill` is called once, and its error goes to the caller.",
        "nothing is left beside the file": CLEAN,
        "what takes the name comes from the same folder": ELSEWHERE,
        "": "Go through the docstring, one sentence after the other.",
    },
    reasons="""
        Is a directory :: A folder is opened like a file. | Use sync_folder for the folder.
    """,
    hints=(
        "A reader sees a file by its name. So the bytes come first, under another name, and the "
        "name last.",
        "The order is: write, file.flush(), os.fsync(file.fileno()), os.replace(partial, path), "
        "sync_folder(os.path.dirname(path)). Each step makes the next one safe.",
        "Put it into try, and in `except BaseException:` remove the partial file, then `raise`. "
        "Return what fill(file) returned.",
    ),
    mistakes="""
        partial = f"{path}{PARTIAL}" => partial = path ::
            The file at `path` itself is opened for writing, and that empties it first. | {SWAP}
        partial = f"{path}{PARTIAL}" => partial = Path(path).with_suffix(PARTIAL) ::
            weights.pt and weights.json are written under the same other name. | Make the other name
            from the whole name of the file: append PARTIAL to it.
        partial = f"{path}{PARTIAL}" => partial = Path(path).resolve().parents[1] / f"one{PARTIAL}"
            :: The file is written in another folder, and moved from there. | {ELSEWHERE}
        os.fsync(file.fileno()) => pass :: {UNSAFE} | {SYNC}
        file.flush() => pass :: {UNSAFE}
        {REPLACE} => Path(path).write_bytes(Path(partial).read_bytes()); os.remove(partial) ::
            {UNSAFE}
        sync_folder(os.path.dirname(path)) => pass ::
            The bytes are on the disk, and the new name may not be. | {FOLDER}
        {REPLACE} => Path(path).unlink(missing_ok=True); {REPLACE} ::
            Between the two calls there is neither the old file nor the new one. | os.replace takes
            the place of the old file in a single operation.
        open(partial, "wb") => open(partial, "ab") ::
            What a killed process has left stays at the beginning of the file. | Open it with "wb".
        except BaseException: => except OSError: ::
            Half a file stays where `fill` raises another error, or is stopped. | {CLEAN}
        except BaseException: => except Exception: ::
            Half a file stays where `fill` is stopped by Ctrl-C. | {CLEAN}
        {UNLINK} => pass :: Half a file stays on the disk that is full.
        {UNLINK} => Path(partial).unlink(missing_ok=True); Path(path).unlink(missing_ok=True) ::
            When `fill` fails, the old file is removed with the new one.
        return result => return None ::
            What `fill` returned is lost. | Keep it, and return it at the end.
    """,
    module=globals() | {"PARTIAL": "{PARTIAL}"},
)
