"""What a person has tried and done: it outlasts kernels, and lies with the person (places.py).

    progress/ddp.jsonl    {"exercise": "place", "state": "not yet", "why": "...", "time_s": 1.8e9}

A try is a line at the end of its lesson's file. The exercise has its name there and not its number,
for numbers change when a lesson gets another exercise. Once it is done, no more is written.
"""

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from manyhands.training import places

KEPT = ("not yet", "done", "given")  # "not started" and "not judged" are no tries


@dataclass
class Standing:
    """How far somebody has come with an exercise."""

    tries: int = 0  # verdicts up to the first green one
    is_done: bool = False
    is_given: bool = False  # the course's answer was taken


def standings(lesson: str) -> dict[str, Standing]:
    """Exercise -> its standing; those that nobody tried are missing.

    A line that cannot be read, such as one that a full disk cut, is passed over.
    """
    found: dict[str, Standing] = {}
    for line in _lines(places.progress() / f"{lesson}.jsonl"):
        try:
            entry = json.loads(line)
            one, state = found.setdefault(entry["exercise"], Standing()), entry["state"]
        except (ValueError, TypeError, KeyError):
            continue
        one.tries += state in ("not yet", "done")
        one.is_done |= state == "done"
        one.is_given |= state == "given"
    return found


def is_kept() -> bool:
    """Is what somebody does here written down? Not in marking, nor in the folder of solutions."""
    return "NBGRADER_EXECUTION" not in os.environ and Path.cwd().name != "solutions"


def note(lesson: str, exercise: str, state: str, why: str = "") -> str:
    """Add a try; what keeps it from being written down is returned in words, and is no error."""
    if state not in KEPT or not is_kept():
        return ""
    try:
        before = standings(lesson).get(exercise, Standing())
        if before.is_done or (before.is_given and state == "given"):
            return ""
        entry = {"exercise": exercise, "state": state, "why": why[:300], "time_s": time.time()}
        path = places.make(places.progress()) / f"{lesson}.jsonl"
        _append(path, (json.dumps(entry) + "\n").encode())
        return ""
    except places.NoPlace as problem:
        reason = problem
    except OSError as problem:
        reason = places.NoPlace(places.progress(), problem)
    return f"what you have done cannot be kept: {reason}"


def _append(path: Path, line: bytes) -> None:
    """One call of write(), so that two notebooks at once do not mix their lines."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, line)
    finally:
        os.close(file)


def _lines(path: Path) -> Iterable[str]:
    try:
        return path.read_text("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
