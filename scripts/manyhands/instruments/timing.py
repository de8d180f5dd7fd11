"""Pieces of work timed against each other: in turn, so that a slow minute hits each of them."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from manyhands.ranks.runtime import wait_for

NUM_WARM = 2  # calls before the first that counts


def time_s(work: Callable[[], object]) -> float:
    """Call `work` once and return the seconds that it took."""
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def in_turn(works: Sequence[Callable[[], object]], num_rounds: int) -> list[list[float]]:
    """Time each of `works` once a round, every other round backwards; seconds, by work.

    Where ranks are joined they start each piece of work together.
    """
    times_s: list[list[float]] = [[] for _ in works]
    for number in range(num_rounds):
        for index in range(len(works))[:: -1 if number % 2 else 1]:
            if dist.is_initialized():
                dist.barrier()
            times_s[index].append(time_s(works[index]))
    return times_s


def slowest_rank(times_s: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """From `in_turn` of each rank: the time of the slowest rank, by work and round."""
    return [
        [max(ranks) for ranks in zip(*work, strict=True)] for work in zip(*times_s, strict=True)
    ]


def median_s(
    works: Sequence[Callable[[], object]], repeats: int, device: torch.device
) -> list[float]:
    """The median time (s) of each of `works`, taken in turn, until the device has done it.

    Where ranks are joined, all call this together, and a time is that of the slowest of them. Some
    calls come before the first that counts: connections are made then, and memory is taken.
    """
    waited = [partial(finished, work, device) for work in works]
    in_turn(waited, NUM_WARM)
    times_s = [in_turn(waited, repeats)]
    if dist.is_initialized():
        times_s *= dist.get_world_size()
        dist.all_gather_object(times_s, times_s[0])
    return [median(one) for one in slowest_rank(times_s)]


def finished(work: Callable[[], object], device: torch.device) -> None:
    """Call `work` and wait until a GPU has done it, too."""
    work()
    wait_for(device)
