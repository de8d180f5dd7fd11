"""Exercise 6.6: one file, written by one rank, whole at every moment."""

import contextlib
import io
import itertools
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.checks.engine import cases
from manyhands.checks.engine.spec import Place, Spec
from manyhands.checks.engine.values import kind
from manyhands.data_parallel.replicas import BucketedDDP
from manyhands.instruments.ledger import Ledger
from manyhands.ranks import private
from manyhands.training import run

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
MEET_S = 3.0  # how long a rank waits for the others to have returned as well
NUMBERS = itertools.count()  # a call of an answer has the same on all ranks

ONCE = "One rank saves: if not dist.is_initialized() or dist.get_rank(group) == 0."
SWAP = "Write to a second name in the same folder, then call os.replace(partial, path) alone."
STATE = "Save unwrapped(model).state_dict()."
LINE = "Rank 0 prints one line with the path and the size in bytes."
WRITTEN = "what happens to the file at `path`"
MOVED = "a file of its folder is moved there"


class Save(NamedTuple):
    """One call of save_once.

    `situation` is "new", "older file", or one without a process group: "alone", "full disk".
    """

    situation: str
    seed: int
    is_wrapped: bool
    is_text: bool  # the path


class Weights(nn.Module):
    """Parameters and buffers of several types and forms."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2)
        self.small = nn.Parameter(torch.randn(4).bfloat16())
        self.turned = nn.Parameter(torch.randn(2, 3).t())
        self.register_buffer("count", torch.randint(1000, ()))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


class Wrapper(BucketedDDP):
    """Holds the model as BucketedDDP does, and needs no process group for it."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


def saves(n: int) -> list[Save]:
    """Wrapped and bare models, over an older file, without a process group, on a full disk."""
    return [
        Save("new", cases.draw_seed(), True, False),
        Save("older file", cases.draw_seed(), False, True),
        Save("alone", cases.draw_seed(), False, True),
        Save("full disk", cases.draw_seed(), True, False),
    ]


class Log:
    """What one rank does, in order: with `path`, with messages, with torch.save."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.events: list[str] = []

    def audit(self, event: str, args: tuple) -> None:
        """A hook of Python's for each file that is opened, moved or removed."""
        if event == "open" and self._is(args[0]):
            if isinstance(args[2], int) and args[2] & WRITES:
                self.events.append("it is opened for writing")
        elif event == "os.rename" and self._is(args[1]):
            is_near = os.path.dirname(os.fspath(args[0])) == os.path.dirname(self.path)
            self.events.append(MOVED if is_near else "a file of another folder is moved there")
        elif event in ("os.rename", "os.remove", "os.truncate") and self._is(args[0]):
            done = {"os.rename": "moved away", "os.remove": "removed", "os.truncate": "cut off"}
            self.events.append(f"it is {done[event]}")

    def _is(self, path: object) -> bool:
        return isinstance(path, str | os.PathLike) and os.fspath(path) == self.path


AUDITED: list[Log] = []  # the log of the call that runs; a hook cannot be taken away again


def _hook(event: str, args: tuple) -> None:
    if AUDITED:
        AUDITED[-1].audit(event, args)


class Messages(Ledger):
    """Writes messages into the log."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # torch's own signature
        if func.namespace == "c10d":
            self.log.events.append("message")
        return super().__torch_dispatch__(func, types, args, kwargs)


def saved(answer, case: Save, place: Place) -> dict:
    """What rank 0 does with the file, what is in it when the call returns, who prints what."""
    without_group = case.situation in ("alone", "full disk")
    if without_group and place.group is not None:
        return {}  # seen once is enough
    members = (place.job_rank,) if without_group else place.members
    folder = private.room() / f"save-{next(NUMBERS)}-{members[0]}"  # of this call and this group
    marks = folder.with_name(f"{folder.name}-marks")
    for made in (folder, marks):
        made.mkdir(exist_ok=True)
    path = folder / "model.v1.pt"
    if place.job_rank == members[0] and case.situation != "new":
        torch.save({"older": torch.ones(1)}, path)
    _meet(marks, "before", len(members))
    try:
        with _no_group() if without_group else contextlib.nullcontext():
            seen = _call(answer, case, place, path)
        _meet(marks, "after", len(members))
        left = sorted(file.name for file in folder.iterdir() if file != path)
        if case.situation != "full disk":
            seen["besides the file nothing is left in its folder"] = not left
    finally:
        _mark(marks, "after")
    return seen


def _mark(marks: Path, what: str) -> None:
    (marks / f"{what}{os.getpid()}").touch()


def _meet(marks: Path, what: str, num: int) -> None:
    """Wait for the other ranks of the group, without a message, but not for ever."""
    _mark(marks, what)
    until_s = time.monotonic() + MEET_S
    while len(list(marks.glob(f"{what}*"))) < num and time.monotonic() < until_s:
        time.sleep(0.002)


@contextlib.contextmanager
def _no_group() -> Iterator[None]:
    """As in a process that has joined no group."""
    whole = dist.distributed_c10d._get_default_group()
    dist.distributed_c10d._update_default_pg(None)
    try:
        yield
    finally:
        dist.distributed_c10d._update_default_pg(whole)


def _call(answer, case: Save, place: Place, path: Path) -> dict:
    """Call the answer; a slow disk, so that a rank that does not wait finds no file."""
    if _hook not in HOOKED:
        sys.addaudithook(_hook)
        HOOKED.append(_hook)
    log = Log(path)
    real_save = torch.save

    def save(state: object, target: object, *args: object, **named: object) -> None:
        log.events.append("torch.save")
        if log._is(target):
            log.events.append("torch.save writes into it")
        if case.situation == "full disk":
            half = target if hasattr(target, "write") else open(target, "wb")
            half.write(b"half a file")
            half.flush()
            raise OSError(28, "No space left on device")
        time.sleep(0.02)
        real_save(state, target, *args, **named)

    def quiet(move):  # of several writers with one second name, one finds it gone
        def moved(*args: object, **named: object) -> None:
            with contextlib.suppress(FileNotFoundError):
                move(*args, **named)

        return moved

    torch.manual_seed(case.seed + place.job_rank)
    model = Weights()
    model.small.requires_grad_(False)
    printed = io.StringIO()
    error = None
    given = str(path) if case.is_text else path
    options = place.options if case.situation in ("new", "older file") else {}
    AUDITED.append(log)
    try:
        with (
            mock.patch.object(torch, "save", save),
            mock.patch.multiple(os, replace=quiet(os.replace), rename=quiet(os.rename)),
            # Two nodes: the first rank of each has this number.
            mock.patch.dict(os.environ, LOCAL_RANK=str(place.rank % 2)),
            contextlib.redirect_stdout(printed),
            Messages(log),
        ):
            answer(Wrapper(model) if case.is_wrapped else model, given, **options)
    except OSError as raised:
        if raised.errno != 28:
            raise
        error = raised
    finally:
        AUDITED.pop()
    content = _content(path)
    if case.situation == "full disk":
        return {
            "when the disk is full, the error comes out": error is not None,
            "when the disk is full, the older file stays": "older" in content,
        }
    return {
        **_file_seen(log.events, content, case, place),
        **_print_seen(printed, path, place, case),
    }


HOOKED: list = []


def _content(path: Path) -> dict:
    """What is in the file now, or a word for why nothing is."""
    if not path.exists():
        return {"there is": "no file"}
    try:
        state = torch.load(path, weights_only=True)
    except Exception as error:
        return {"a file that torch.load cannot read with weights_only": type(error).__name__}
    return state if isinstance(state, dict) else {"there is": kind(state)}


def _file_seen(events: list[str], content: dict, case: Save, place: Place) -> dict:
    alone = case.situation == "alone"
    writer = alone or place.rank == 0
    of_path = [what for what in events if what not in ("torch.save", "message")]
    is_met = "message" in events
    if writer and MOVED in events:
        is_met = "message" in events[events.index(MOVED) :]
    plain = {
        name: value.detach() if isinstance(value, Tensor) else value
        for name, value in content.items()
    }
    return {
        "how often torch.save is called": events.count("torch.save"),
        WRITTEN: ", then ".join(of_path) or "nothing",
        "names in the file": ", ".join(plain),
        "the file": plain,
        "rank 0 and the others meet in a message once the file is there": (
            alone or place.n == 1 or is_met
        ),
    }


def _print_seen(printed: io.StringIO, path: Path, place: Place, case: Save) -> dict:
    text = printed.getvalue()
    digits = re.sub(r"(?<=\d)[,_' ](?=\d)", "", text)
    named = re.escape(str(path)) + r"(?![\w-]|\.\w)"  # and not a longer name
    size = str(path.stat().st_size) if path.exists() else "no file"
    writer = case.situation == "alone" or place.rank == 0
    return {
        "how many lines it prints": len(text.splitlines()),
        "rank 0's line has the path": not writer or bool(re.search(named, text)),
        "rank 0's line has the size in bytes": not writer or size in digits,
    }


def say_save(case: Save) -> str:
    """A call of save_once in words."""
    where = {
        "new": "",
        "older file": " over an older file",
        "alone": " in a process without a group",
        "full disk": " in a process without a group, on a full disk,",
    }[case.situation]
    return f"save_once of a {'wrapped' if case.is_wrapped else 'bare'} model{where}"


CONDITION = "if not dist.is_initialized() or dist.get_rank(group) == 0:"
REPLACE = "os.replace(partial, path)"
BARRIER = "if dist.is_initialized():\n        dist.barrier(group)"
PRINT = 'print(f"saved {path} ({path.stat().st_size:,} bytes)")'
MODULE = "unwrapped(model).state_dict()"

ALONE = "No message tells the other ranks that the file is there, so they do not wait for it."
HALF = "The file at `path` is opened for writing, so that for a time half a file stands there."

save_once = Spec(
    todo="6.6",
    truth=run.save_once,
    layouts=cases.THREE,
    cases=saves,
    observe=saved,
    tell=say_save,
    independent=True,
    advice={
        "how often torch.save is called": ONCE,
        WRITTEN: SWAP,
        "names in the file": STATE,
        "the file": STATE,
        "how many lines it prints": LINE,
        "": "Go through the docstring, one sentence after the other.",
    },
    hints=(
        "Only rank 0 writes and prints. Every rank waits at a barrier after the `if`, not inside "
        "it.",
        "Write to another name first, and then call os.replace(partial, path): the file is the "
        "old one or the new one, and never half of one.",
        "A DDP model keeps yours in `.module`: save unwrapped(model).state_dict(). "
        "Without a process group there is nobody to wait for: ask dist.is_initialized().",
    ),
    mistakes="""
        {CONDITION} => if True: :: Every rank writes the same file, and two writers at once can
            leave a broken one. | {ONCE}
        {CONDITION} => if int(os.environ["LOCAL_RANK"]) == 0: ::
            The first rank of each node writes, so two ranks write the same file.
        {BARRIER} => pass :: {ALONE} | Every rank calls dist.barrier(group) after the `if`.
        {BARRIER} => time.sleep(0.1) :: {ALONE}
        {BARRIER} => if dist.is_initialized() and dist.get_rank(group) == 0: dist.barrier(group) ::
            ! Only rank 0 comes to the barrier.
        {MODULE} => model.state_dict() :: The names of a wrapped model begin with 'module.', so that
            a program without DDP cannot load them. | {STATE}
        {MODULE} => unwrapped(model) ::
            A whole model is pickled, which torch.load reads only with weights_only=False.
        {MODULE} => {n: v for n, v in unwrapped(model).named_parameters()} ::
            The buffers are missing from the file.
        {REPLACE} => path.write_bytes(partial.read_bytes()); os.remove(partial) :: {HALF} | {SWAP}
        partial = path.with_name(path.name + ".partial") => partial = path
        {REPLACE} => pass :: {HALF}
        {REPLACE} => path.unlink(missing_ok=True); partial.rename(path) ::
            The older file is removed before the new one has its name.
        {PRINT} => pass :: Nothing is printed. | {LINE}
        {PRINT} => print("ok") :: The line says neither the path nor the size in bytes.
    """,
    module=globals(),
)
