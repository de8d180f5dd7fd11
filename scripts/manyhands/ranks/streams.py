"""What a process prints: a copy for the folder of its run, and readers that may go away.

    print --> _Copied --> standard output or error, as long as somebody reads it
                 '-----> logs/rank-00000.log

A terminal is closed, `| head` has seen enough, a scheduler starts a job with closed descriptors:
none of that is a reason to end a training of hours.
"""

import os
import sys
from collections import deque
from pathlib import Path
from typing import BinaryIO, TextIO


def guard() -> None:
    """Have this process and its children go on when nobody reads what they print any more."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed; the next file to be opened would take its place
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout, sys.stderr = _Stream(sys.stdout), _Stream(sys.stderr)


def copy() -> None:
    """Keep what is printed from now on, for the file that `keep_output` names."""
    log = _Log()
    sys.stdout, sys.stderr = _Copied(sys.stdout, log), _Copied(sys.stderr, log)


def keep_output(path: Path) -> None:
    """Write to `path` what this process prints, and has printed so far; a run goes on in its file.

    Only where `command_line` has started the process and its standard error is not a terminal. The
    output stays where it was; `path` has a copy. Libraries that print from C are not in it.
    """
    if isinstance(sys.stderr, _Copied):
        sys.stderr.log.open(path)


class _Stream:
    """A stream until its reader is gone; what is written later is dropped."""

    def __init__(self, stream: TextIO | None) -> None:
        """Write to `stream`; None, where its descriptor was closed, drops all."""
        self.is_read = stream is not None
        self.stream = stream or open(os.devnull, "w")

    def write(self, text: str) -> int:
        if self.is_read:
            try:
                self.stream.write(text)
            except OSError:  # EIO from a terminal, EPIPE from a pipe
                self.is_read = False
        return len(text)

    def flush(self) -> None:
        if self.is_read:
            try:
                self.stream.flush()
            except OSError:
                self.is_read = False

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


class _Log:
    """A file of all that is printed; what came before it was opened is kept till then."""

    def __init__(self) -> None:
        self.file: BinaryIO | None = None
        self.early: deque[str] | None = deque(maxlen=1000)

    def open(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(path, "ab", buffering=0)  # a killed rank loses nothing
        early, self.early = self.early or (), None
        for text in early:
            self.write(text)

    def write(self, text: str) -> None:
        if self.early is not None:
            self.early.append(text)
        elif self.file:
            try:
                self.file.write(text.encode(errors="replace"))
            except OSError as problem:
                path, self.file = self.file.name, None
                print(f"cannot write {path}: {problem}; it ends here", file=sys.__stderr__)


class _Copied:
    """A stream, of which a log gets a copy. Lines pass whole: those of several ranks do not mix."""

    def __init__(self, stream: _Stream, log: _Log) -> None:
        self.stream, self.log, self.unfinished = stream, log, ""

    def write(self, text: str) -> int:
        self.log.write(text)
        lines, end, self.unfinished = (self.unfinished + text).rpartition("\n")
        if end:
            self.stream.write(lines + end)
        return len(text)

    def flush(self) -> None:
        rest, self.unfinished = self.unfinished, ""
        self.stream.write(rest)
        self.stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)
