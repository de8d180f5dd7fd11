"""What went wrong on a rank, told in the learner's own lines.

A rank sends its failure as plain text and frames; the caller adds the source lines, because only a
notebook kernel knows the text of its cells. Frames of torch, of Python and of this course's own
machinery are left out.
"""

import importlib.util
import linecache
import os
import re
import signal
import sysconfig
import time
import traceback
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

Frame = tuple[str, int, str]  # file, line number, function

PACKAGE = Path(__file__).resolve().parents[1]
MACHINERY = (
    *(
        str(PACKAGE / "ranks" / name)
        for name in (
            "lab failures forkserver runtime streams private peers network rules flights notes "
            "matching deadlocks"
        ).split()
    ),
    str(PACKAGE / "instruments" / "ledger"),
    str(PACKAGE / "checks"),
    *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(importlib.util.find_spec("torch").origin).parent),  # to import it takes seconds
    "<frozen",
    "<string>",
)
# How gloo says that the other side of a connection is gone.
ECHOES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "pair closure")
HANG = (
    "A hang usually means that not all ranks called the same collective in the same order, or that "
    "two ranks both wait for the other to send or receive first."
)


@dataclass(frozen=True)
class Failure:
    """One rank's failure, as it travels from the rank to the caller."""

    error: str  # the exception's class name, or "died"
    message: str
    frames: list[Frame]  # the learner's, innermost last
    time_s: float

    @staticmethod
    def from_exception(error: BaseException) -> "Failure":
        """The failure that an exception caught on a rank stands for."""
        if isinstance(error, SystemExit):
            message = f"called sys.exit({error.code!r}) before the end"
        else:
            message = str(error).split("Exception raised from")[0].strip()
        frames = [(f.filename, f.lineno, f.name) for f in traceback.extract_tb(error.__traceback__)]
        if isinstance(error, SyntaxError) and error.filename:
            frames.append((error.filename, error.lineno or 0, "<module>"))
        return Failure(type(error).__name__, message, learner_frames(frames), time.time())

    @staticmethod
    def of_death(exit_code: int | None, last_lines: list[str]) -> "Failure":
        """The failure of a rank that ended without a word."""
        enforced = [
            line for line in last_lines if "EnforceNotMet" in line or "enforce fail" in line
        ]
        if enforced:
            sizes = re.search(r"(\d+) vs (\d+)", " ".join(last_lines))
            numbers = f" (pieces of {sizes[1]} against {sizes[2]} bytes)" if sizes else ""
            why = (
                "two ranks called the same collective with tensors of different size or type"
                f"{numbers}; gloo ends the process when that happens"
            )
        elif exit_code is not None and exit_code < 0:
            name = signal.Signals(-exit_code).name
            why = f"the process was ended by {name}"
            if name == "SIGKILL":
                why += " (the system does that to a process that takes too much memory)"
        else:
            why = f"the process ended with exit code {exit_code} without returning"
        return Failure("died", why, [], time.time())


class BadInput(ValueError):
    """What a person gave cannot be used. The message is one line: the numbers and the remedy."""


class OneLine:
    """What an exception inherits to be shown in a notebook without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class RankFailed(RuntimeError):
    """A rank failed first; the others were stopped."""

    def __init__(self, rank: int, world_size: int, failure: Failure, finished: list[int]) -> None:
        self.rank, self.world_size, self.failure, self.finished = (
            rank,
            world_size,
            failure,
            finished,
        )
        super().__init__(self._text())

    def _text(self) -> str:
        lines = [where(frame) for frame in self.failure.frames]
        others = sorted(set(range(self.world_size)) - {self.rank})
        told = f"rank {self.rank} of {self.world_size} failed first"
        if others:
            told += f"; {name_ranks(others)} stopped with it"
        what = f"{self.failure.error}: {self.failure.message}"
        if is_echo(self.failure):
            told = f"rank {self.rank} of {self.world_size} lost its partner"
            what = "The other side of the connection is gone."
            if self.finished:
                what = (
                    f"It still waited for a message, but {name_ranks(self.finished)} had already "
                    "finished: every rank must make the same calls, with tensors of the same size."
                )
        return "\n".join([told + ":", *lines, what])

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]  # a notebook shows this, not the course's frames


class RuleBroken(RankFailed):
    """A call broke a rule of NCCL's: one line with the lines of the program."""

    def _text(self) -> str:
        places = (" ".join(where(frame).split()) for frame in self.failure.frames)
        return self.failure.message.format(*places)


class RanksHung(RankFailed):
    """Ranks were still running at the limit; each is named with the line it is in."""

    def __init__(
        self,
        stacks: dict[int, list[Frame]],
        world_size: int,
        finished: list[int],
        limit_s: float,
        computing: Container[int] = (),
        after: str = "",
        still: bool = False,
        starved: bool = False,
    ) -> None:
        """Ranks in `computing` used a processor at the end; the others waited.

        Args:
            after: how long the ranks ran, in words; `limit_s` where not given.
            still: nobody computed for a good while, so the ranks wait for one another.
            starved: they could compute and mostly got no processor, so they may not hang at all.
        """
        self.starved = starved
        self.stacks, self.limit_s, self.computing = stacks, limit_s, computing
        self.after, self.still = after or f"{limit_s:g} s", still
        rank = min(stacks)
        frames = [frame for stack in stacks.values() for frame in stack]
        failure = Failure("hung", HANG if still else "", frames, time.time())
        super().__init__(rank, world_size, failure, finished)

    def _text(self) -> str:
        running = list(self.stacks)
        run = "runs" if len(running) == 1 else "run"
        ended = f"; {name_ranks(self.finished)} finished" if self.finished else ""
        lines = [f"no end after {self.after}: {name_ranks(running)} still {run}{ended}"]
        for rank, stack in self.stacks.items():
            place = where(stack[-1]).strip() if stack else "a place outside your code"
            does = "computes" if rank in self.computing else "waits"
            lines.append(f"  rank {rank} {does} in {place}")
        if self.still and self.world_size > 1:
            lines.append(HANG)
        return "\n".join(lines)


class RanksInterrupted(KeyboardInterrupt):
    """The person at the keyboard stopped the ranks."""

    def _render_traceback_(self) -> list[str]:
        return ["Interrupted: all processes were ended."]


def is_echo(failure: Failure) -> bool:
    """Did this rank fail only because another one went away?"""
    return any(words in failure.message for words in ECHOES)


def first_to_fail(failures: Mapping[int, Failure], joined: Container[int]) -> int:
    """The rank whose failure is the cause; the others went down with it.

    A rank that lost its partner is an echo of the partner's fault, however early it spoke; and so
    is one that could not join it. A broken rule is the cause of whatever else went wrong.

    Args:
        failures: of each rank that failed.
        joined: the ranks that were in the process group.
    """

    def order(rank: int) -> tuple:
        failure = failures[rank]
        return rank not in joined, is_echo(failure), failure.error != "Breach", failure.time_s

    return min(failures, key=order)


def learner_frames(frames: list[Frame]) -> list[Frame]:
    """Only the frames of code that a learner wrote or may want to read."""
    return [frame for frame in frames if not frame[0].startswith(MACHINERY)]


def parse_stack(text: str) -> list[Frame]:
    """The frames in what `faulthandler` wrote (innermost first), turned innermost last."""
    found = re.findall(r'File "(.+?)", line (\d+) in (.+)', text)
    return [(file, int(line), name) for file, line, name in reversed(found)]


def where(frame: Frame) -> str:
    """One line: the place, and the source there."""
    file, line, name = frame
    source = linecache.getline(file, line).strip()
    place = "" if "ipykernel_" in file else f" of {os.path.basename(file)}"
    inside = "" if name == "<module>" else f" in {name}"
    return f"  line {line}{place}{inside}:  {source}".rstrip(": ")


def name_ranks(ranks: list[int]) -> str:
    """'rank 1', or 'ranks 0, 2 and 3'."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


class MachineFault(RankFailed):
    """This machine could not start or keep the ranks, whatever their code is."""

    def __init__(self, problem: str, world_size: int) -> None:
        """Tell `problem`, the system's own words."""
        super().__init__(0, world_size, Failure("machine", problem, [], time.time()), [])

    def _text(self) -> str:
        problem = " ".join(self.failure.message.split()).rstrip(".")
        return (
            f"this machine could not run the {self.world_size} rank(s): {problem}. "
            "This says nothing about the code that they were to run; run it again"
        )
