"""What every part of `make gpu` uses: times of the slowest rank, memory, one line for a failure."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from manyhands.instruments.live import Live
from manyhands.instruments.timing import in_turn, slowest_rank
from manyhands.ranks.runtime import first_line

Rows = list[dict[str, object]]
NUM_WARM = 2  # calls before the first that counts: memory is new then, and kernels are chosen


def finished(work: Callable[[], object], device: torch.device) -> None:
    """Call `work` and wait until a GPU has done it, too: the call returns before that."""
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_s(
    works: Sequence[Callable[[], object]], repeats: int, device: torch.device
) -> list[float]:
    """The median time (s) of each of `works`, taken in turn.

    Where ranks are joined, all call this together, and a time is that of the slowest of them.
    """
    waited = [partial(finished, work, device) for work in works]
    in_turn(waited, NUM_WARM)
    times_s = [in_turn(waited, repeats)]
    if dist.is_initialized():
        times_s *= dist.get_world_size()
        dist.all_gather_object(times_s, times_s[0])
    return [median(one) for one in slowest_rank(times_s)]


def one_line(problem: BaseException) -> str:
    """What went wrong, without the lines of C++ behind it."""
    return f"{type(problem).__name__}: {first_line(problem)}"[:300]


class Memory:
    """Bytes of tensors that are made while the block runs, now and at their peak.

    On a GPU they are those of the allocator, which also counts what kernels take for themselves; on
    a CPU `Live` counts them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self.live = None if self.is_cuda else Live(dict, device=device)
        self.before = 0

    def __enter__(self) -> "Memory":
        if self.live is not None:
            self.live.__enter__()
            return self
        torch.cuda.synchronize(self.device)
        self.before = torch.cuda.memory_allocated(self.device)
        self.begin_peak()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live is not None:
            self.live.__exit__(*error)

    def now(self) -> int:
        """Bytes that live now."""
        if self.live is not None:
            return sum(self.live.now().values())
        return torch.cuda.memory_allocated(self.device) - self.before

    def begin_peak(self) -> None:
        """Forget the peak so far."""
        if self.live is not None:
            self.live.total = 0
        else:
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        """The most bytes at a time since `begin_peak`."""
        if self.live is not None:
            return self.live.total
        return torch.cuda.max_memory_allocated(self.device) - self.before


def run_for(work: Callable[[], object], least_s: float) -> None:
    """Call `work` again and again for a while, so that a GPU leaves the clock of its idle state."""
    end_s = time.perf_counter() + least_s
    while time.perf_counter() < end_s:
        work()
