"""What a rank did, as data: events in the order of its program; and whose program a rank runs.

    program of rank 0   | 3 GFLOP | send 2 MB to 1 |  2 GFLOP  | all-reduce 8 MB on dp |
    program of rank 1   | recv from 0 |    3 GFLOP   |           all-reduce 8 MB on dp |

Nothing in it depends on the machine, nor on how many ranks an axis of the mesh has. recorder.py
writes programs down, and clock.py runs them.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Compute(NamedTuple):
    """Work of a rank between two calls."""

    flops: float
    seconds: float = 0.0  # of the processor, where it was recorded


class Message(NamedTuple):
    """Sent to one rank, or received from it."""

    op: str  # send or recv
    axis: str
    peer: int  # its place on the axis
    nbytes: float
    handle: int | None = None  # of an asynchronous one, for its Wait
    channel: str = ""  # messages are matched in their order within one
    tag: int = 0


class Collective(NamedTuple):
    """A call of all ranks along an axis, or along several: "dp+tp"."""

    op: str  # all_reduce, all_gather, reduce_scatter, broadcast, barrier, ...
    axis: str
    nbytes: float  # of the whole: what a gather ends with, what a reduce-scatter begins with
    handle: int | None = None
    channel: str = ""


class Wait(NamedTuple):
    """Until an asynchronous message or collective is through."""

    handle: int


Event = Compute | Message | Collective | Wait
Program = Sequence[Event]


def scaled(program: Program, flops: float, nbytes: Mapping[str, float]) -> list[Event]:
    """The program of a larger model: so many times the FLOPs, and the bytes on each axis.

    In a Transformer of w times the width with t times the sequences, products take w^2 t times the
    FLOPs, parameters are w^2 times the bytes, and activations w t times. Attention, a few percent,
    has only w t times the FLOPs.
    """
    found = []
    for event in program:
        if isinstance(event, Compute):
            found.append(Compute(event.flops * flops, event.seconds * flops))
        elif isinstance(event, Wait):
            found.append(event)
        else:
            found.append(event._replace(nbytes=event.nbytes * nbytes.get(event.axis, 1.0)))
    return found


# ---- places on a mesh ----------------------------------------------------------------------


def recorded_rank(rank: int, larger: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    """Whose program a rank of the larger mesh runs: that at its place, modulo the sizes."""
    found, stride = 0, 1
    for axis in reversed(sizes):
        rank, place = divmod(rank, larger[axis])
        found, stride = found + stride * (place % sizes[axis]), stride * sizes[axis]
    return found


def groups_along(axis: str, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
    """For each rank the ranks of its group along an axis, or along several: "dp+tp"."""
    names = axis.split("+")
    fixed: dict[tuple, list[int]] = defaultdict(list)
    keys = []
    for rank in range(math.prod(sizes.values())):
        rest, key = rank, []
        for name in reversed(sizes):
            rest, place = divmod(rest, sizes[name])
            key.append(0 if name in names else place)
        keys.append(tuple(key))
        fixed[keys[-1]].append(rank)
    groups = {key: tuple(ranks) for key, ranks in fixed.items()}
    return [groups[key] for key in keys]
