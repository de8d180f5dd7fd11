"""A training that is killed again and again, goes on from its newest checkpoint, and keeps a log.

    resumed 0 | step 1 .. step 20 | saved 20 | step 21 .. step 33 | killed | resumed 20 | step 21 ..

The model is a table of TABLE numbers; the prediction for a sample is the sum of the few that it
names. Each rank holds 1/N of the table and of its momentum, and the ranks add up their parts of a
prediction, so messages are small and checkpoints large. The samples of a step follow from its
number, which therefore is the position in the data.

Price: a save writes 8 TABLE bytes, 1/N of them on each rank, and waits for the disk.
"""

import hashlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.checkpoint.interval import Event
from manyhands.collectives.trees import Group
from manyhands.saving.folder import clear, complete, name_of, newest_intact, remove, to_remove
from manyhands.saving.pieces import Piece
from manyhands.saving.sharded import load_sharded, save_sharded

TABLE = 1 << 18
LOG = "events.txt"


class Plan(NamedTuple):
    """What a training does, and when it is killed."""

    folder: str  # for its checkpoints and its log; a folder of this machine
    num_steps: int
    interval: int  # steps between two saves
    step_s: float = 0.0  # a step that is done sooner sleeps for the rest, as a larger one computes
    lifetimes_s: tuple[float, ...] = ()  # from a "resumed" to the next kill, in this order


def lifetimes(mtbf_s: float, count: int, seed: int) -> tuple[float, ...]:
    """Times between failures in seconds: exponential with mean `mtbf_s`, drawn from a seed."""
    draw = random.Random(seed)
    return tuple(draw.expovariate(1 / mtbf_s) for _ in range(count))


def train(plan: Plan, life: int, group: Group = None) -> str:
    """Train to the end, or until this life is over; returns the SHA-256 of this rank's state.

    Every rank of `group` calls it, again after each kill, with `life` = 0, 1, 2, ...
    """
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    size = TABLE // num_ranks
    first = rank * size
    table, momentum = torch.zeros(size), torch.zeros(size)
    state = {
        "table": Piece(table, (first,), (TABLE,)),
        "momentum": Piece(momentum, (first,), (TABLE,)),
        "step": 0,
    }
    newest, _ = newest_intact(plan.folder, group)
    clear(plan.folder, group)
    if newest:
        state = load_sharded(state, f"{plan.folder}/{newest}", group)
    if rank == 0:
        note(plan.folder, "resumed", state["step"])
    end = doom(plan, life) if life % num_ranks == rank else threading.Timer(0, int)
    for step in range(state["step"] + 1, plan.num_steps + 1):
        start_s = time.monotonic()
        update(table, momentum, step, first, group)
        time.sleep(max(0.0, start_s + plan.step_s - time.monotonic()))
        if rank == 0:
            note(plan.folder, "step", step)
        if step % plan.interval == 0 or step == plan.num_steps:
            save_sharded(state | {"step": step}, f"{plan.folder}/{name_of(step)}", group)
            if rank == 0:
                for old in to_remove(complete(plan.folder), {}, num_kept=2):
                    remove(plan.folder, old)
                note(plan.folder, "saved", step)
    end.cancel()
    return hashlib.sha256(torch.cat([table, momentum]).numpy().tobytes()).hexdigest()


def update(table: Tensor, momentum: Tensor, step: int, first: int, group: Group) -> None:
    """One step of SGD with momentum on 32 samples, each of which names 8 numbers of the table.

    Args:
        table, momentum: this rank's part. (TABLE/N)
        first: the place of its first number in the whole table.
    """
    draw = torch.Generator().manual_seed(step)
    rows = torch.randint(TABLE, (32, 8), generator=draw)
    targets = torch.sin(rows.float()).sum(1)  # what the table should hold is sin(place)
    is_mine = (rows >= first) & (rows < first + len(table))
    mine = torch.where(is_mine, rows - first, 0)
    predictions = (table[mine] * is_mine).sum(1)
    dist.all_reduce(predictions, group=group)
    errors = (predictions - targets)[:, None] * is_mine / 8
    momentum.mul_(0.9).index_add_(0, mine.flatten(), errors.flatten())
    table.sub_(momentum, alpha=0.1)


# ---- the end of a life, and the log -------------------------------------------------------------


def doom(plan: Plan, life: int) -> threading.Timer:
    """Have the system kill this process, in the midst of whatever it does, when its time is up."""

    def kill() -> None:
        note(plan.folder, "killed", 0)
        os.kill(os.getpid(), signal.SIGKILL)

    is_last = life >= len(plan.lifetimes_s)
    timer = threading.Timer(0 if is_last else plan.lifetimes_s[life], kill)
    timer.daemon = True
    if not is_last:
        timer.start()
    return timer


def note(folder: str, kind: str, step: int) -> None:
    """Append an event to the log; one write, which a kill cannot halve."""
    line = f"{kind} {step} {time.monotonic()!r}\n"  # one clock for all processes of a machine
    descriptor = os.open(Path(folder) / LOG, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def events_of(folder: str) -> list[Event]:
    """The log in order of time, without what other ranks still wrote down after a kill."""
    lines = (line.split() for line in (Path(folder) / LOG).read_text().splitlines())
    noted = sorted(
        (Event(kind, int(step), float(s)) for kind, step, s in lines), key=lambda e: e[2]
    )
    events: list[Event] = []
    for event in noted:
        if not events or events[-1].kind != "killed" or event.kind in ("killed", "resumed"):
            events.append(event)
    return events
