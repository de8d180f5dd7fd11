"""Measures collectives: the ring by hand against the backend's own, and races on a slow network.

    race({"A": all_reduce_naive, "B": all_reduce_ring}, [2, 4, 8], 8_000_000)
        {"A": [s on 2 ranks, on 4, on 8], "B": [...]}

In a race the messages are real; the time that each of them takes is a model, that of
`manyhands.ranks.network`.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from manyhands.collectives import ring, trees
from manyhands.instruments.benchmark import Measure, Measured, Row, milliseconds, ratios, spread
from manyhands.instruments.timing import in_turn, slowest_rank, time_s
from manyhands.ranks import lab
from manyhands.ranks.network import SlowNetwork

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


# ---- races on a slow network -------------------------------------------------------------------


class Network(NamedTuple):
    """What a message costs: the latency (s), and how many bytes follow in a second."""

    latency_s: float
    bytes_per_s: float

    def message_s(self, nbytes: float) -> float:
        """The time of one message (s)."""
        return self.latency_s + nbytes / self.bytes_per_s


SLOW = Network(latency_s=4e-3, bytes_per_s=100e6)
PROGRAMS = {"A": trees.all_reduce_naive, "B": ring.all_reduce_ring}  # of the riddle in lesson 04


def race(
    functions: Mapping[str, Callable],
    world_sizes: Sequence[int],
    nbytes: int,
    network: Network = SLOW,
    repeats: int = 1,
) -> dict[str, list[float]]:
    """Name -> the time (s) of an all-reduce of `nbytes` on each number of ranks."""
    times_s: dict[str, list[float]] = {name: [] for name in functions}
    for world_size in world_sizes:
        args = functions, [nbytes], network, repeats
        found = lab.run_ranks(time_collectives, world_size, *args)[0]
        for name in functions:
            times_s[name].append(found[name, nbytes])
    return times_s


def time_collectives(
    functions: Mapping[str, Callable],
    sizes_bytes: Sequence[int],
    network: Network | None = None,
    repeats: int = 3,
    in_chunks: Sequence[str] = (),
) -> dict[tuple[str, int], float]:
    """On a rank: (name, bytes) -> the time (s) of the slowest rank in the quickest of the repeats.

    A busy machine makes a collective slower and never quicker, so the quickest says most.

    Args:
        network: None lets the messages go as fast as this machine can.
        in_chunks: the functions that are given the tensor as a chunk for each rank.
    """
    found = {}
    with SlowNetwork(*network) if network else nullcontext():
        for name, function in functions.items():
            for nbytes in sizes_bytes:
                given = torch.zeros(nbytes // 4)
                if name in in_chunks:
                    given = given.tensor_split(dist.get_world_size())
                work = partial(function, given)
                found[name, nbytes] = min(_slowest_s(work) for _ in range(repeats))
    return found


def _slowest_s(work: Callable) -> float:
    """The time of one call (s) on the rank that took longest."""
    dist.barrier()
    slowest = torch.tensor(time_s(work))
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


MEASURES = (
    Measure(
        ring_ratio,
        (Row("ring all-reduce by hand / gloo's, 64 MB, 4 ranks", "<= 1.25", "time / time"),),
        ("collectives/ring.py", "collectives/trees.py"),
    ),
)
