"""Measures how fast ranks start."""

import statistics

import torch
import torch.distributed as dist

from manyhands.instruments.benchmark import Measure, Measured, Row, spread
from manyhands.instruments.timing import in_turn, time_s
from manyhands.ranks import lab


def start_ranks() -> list[Measured]:
    """Seconds of `run_ranks` with four ranks that exchange one number."""
    first_s = time_s(lambda: lab.run_ranks(add_ranks, 4))
    (times_s,) = in_turn([lambda: lab.run_ranks(add_ranks, 4)], 9)
    return [(statistics.median(times_s), f"{spread(times_s)}; first call {first_s:.2f} s")]


def add_ranks() -> float:
    """On a rank: the sum of all ranks' numbers."""
    number = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(number)
    return number.item()


MEASURES = (
    Measure(
        start_ranks,
        (Row("starting 4 ranks from a notebook, warm", "< 0.5", "s"),),
        ("ranks/lab.py",),
    ),
)
