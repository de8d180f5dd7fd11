"""Measures the ring by hand against the backend's own all-reduce."""

import statistics
from functools import partial

import torch
import torch.distributed as dist

from manyhands.collectives import ring
from manyhands.instruments.benchmark import Measure, Measured, Row, milliseconds, ratios, spread
from manyhands.instruments.timing import in_turn, slowest_rank
from manyhands.ranks import lab

RING_BYTES = 64_000_000


def ring_ratio() -> list[Measured]:
    """An all-reduce by hand over gloo's own, on the same four ranks."""
    times_s = lab.run_ranks(time_ring, 4, RING_BYTES, 40, timeout_s=400)
    by_hand, native = slowest_rank(times_s)
    values = ratios(by_hand, native)
    note = f"4 ranks x 1 thread, {RING_BYTES / 1e6:.0f} MB of fp32, the slowest rank's time"
    times = f"by hand {milliseconds(by_hand)}, gloo {milliseconds(native)}"
    return [(statistics.median(values), f"{spread(values)}; {times}; {note}")]


def time_ring(nbytes: int, num_rounds: int) -> list[list[float]]:
    """On a rank: times of the ring by hand and of torch's all-reduce."""
    tensor = torch.zeros(nbytes // 4)  # a sum of zeros stays a number, however often it is taken
    works = [partial(ring.all_reduce_ring, tensor), partial(dist.all_reduce, tensor)]
    in_turn(works, 3)
    return in_turn(works, num_rounds)


MEASURES = (
    Measure(
        ring_ratio,
        (Row("ring all-reduce by hand / gloo's, 64 MB, 4 ranks", "<= 1.25", "time / time"),),
        ("collectives/ring.py", "collectives/trees.py"),
    ),
)
