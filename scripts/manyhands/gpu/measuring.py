"""What every part of `make gpu` uses: times of the slowest rank, memory, one line for a failure."""

import time
from collections.abc import Callable

import torch

from manyhands.instruments.live import Live
from manyhands.instruments.meters import memory_bytes, reset_peaks
from manyhands.ranks.runtime import first_line, wait_for

Rows = list[dict[str, object]]


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
        wait_for(self.device)
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
            reset_peaks(self.device)

    def peak(self) -> int:
        """The most bytes at a time since `begin_peak`."""
        if self.live is not None:
            return self.live.total
        return memory_bytes(self.device) - self.before


def run_for(work: Callable[[], object], least_s: float) -> None:
    """Call `work` again and again for a while, so that a GPU leaves the clock of its idle state."""
    end_s = time.perf_counter() + least_s
    while time.perf_counter() < end_s:
        work()
