"""Measures saves of lesson 11: how long the training stands still, and the index of many ranks."""

import statistics
import tempfile
import time
from functools import partial

import torch
import torch.distributed as dist

from manyhands.checkpoint.asynchronous import AsyncSaver
from manyhands.instruments.benchmark import (
    Measure,
    Measured,
    Row,
    milliseconds,
    ratios,
    spread,
)
from manyhands.instruments.timing import in_turn, slowest_rank
from manyhands.ranks import lab
from manyhands.saving.fits import check_whole
from manyhands.saving.pieces import Box, Piece
from manyhands.saving.sharded import save_sharded

NUM_PARAMETERS = 100_000_000
PARTS = ("weight", "exp_avg", "exp_avg_sq")  # of AdamW's training, float32


def stall_ratio() -> list[Measured]:
    """The stall of an asynchronous save over that of one that waits for the disk."""
    with tempfile.TemporaryDirectory(prefix="manyhands-bench-") as folder:
        times_s = lab.run_ranks(measure_stalls, 2, folder, 10, timeout_s=1200)
    _, copies, _, waits, _ = slowest_rank(times_s)
    values = ratios(copies, waits)
    gigabytes = 4 * len(PARTS) * NUM_PARAMETERS / 1e9
    note = (
        f"{spread(values)}; asynchronous {milliseconds(copies)}, with fsync {milliseconds(waits)}; "
        f"2 ranks x 1 thread, weights and AdamW's moments in shards, {gigabytes:.1f} GB in all; "
        "buffers were made by a save before"
    )
    return [(statistics.median(values), note)]


def measure_stalls(folder: str, num_rounds: int) -> list[list[float]]:
    """On a rank: seconds of a wait for the thread, AsyncSaver.save, a wait, save_sharded, a wait.

    The waits stand between, so that neither save shares the disk with the other.
    """
    rank, share = dist.get_rank(), NUM_PARAMETERS // dist.get_world_size()
    state = {
        name: Piece(torch.full((share,), float(rank)), (rank * share,), (NUM_PARAMETERS,))
        for name in PARTS
    }
    saver = AsyncSaver()
    saver.save(state, f"{folder}/asynchronous")  # makes the buffers
    works = [
        saver.wait,
        partial(saver.save, state, f"{folder}/asynchronous"),
        saver.wait,
        partial(save_sharded, state, f"{folder}/waits"),
        saver.wait,
    ]
    return in_turn(works, num_rounds)


def index_check() -> list[Measured]:
    """Rank 0's check that the parts of many ranks make whole tensors, each cut by rows."""
    ranks, tensors, rows, width = 512, 870, 4096, 64
    share = rows // ranks
    boxes = [Box((rank * share, 0), (share, width)) for rank in range(ranks)]
    names = [f"tensor {number}" for number in range(tensors)]
    writers = {(name, box): rank for name in names for rank, box in enumerate(boxes)}
    shapes = dict.fromkeys(names, (rows, width))
    times_s = []
    for _ in range(3):
        start_s = time.process_time()
        check_whole(writers, shapes)
        times_s.append(time.process_time() - start_s)
    note = f"{spread(times_s)}; {len(writers):,} boxes, processor time of one thread"
    return [(statistics.median(times_s), note)]


MEASURES = (
    Measure(
        stall_ratio,
        (
            Row(
                "stall of an asynchronous save / of one that waits, 100 M parameters",
                "<= 0.20",
                "time / time",
            ),
        ),
        (
            "checkpoint/asynchronous.py",
            "saving/sharded.py",
            "saving/fits.py",
            "saving/index.py",
            "saving/names.py",
            "saving/store.py",
            "saving/pieces.py",
            "checkpoint/bench.py",
        ),
    ),
    Measure(
        index_check,
        (Row("check of the index of 512 ranks x 870 tensors", "< 5", "s"),),
        ("saving/fits.py", "saving/pieces.py", "checkpoint/bench.py"),
    ),
)
