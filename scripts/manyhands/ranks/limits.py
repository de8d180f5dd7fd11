"""How long ranks may go on: waiting counts by the clock, computing by the processor.

    every 0.25 s: does some rank compute?  no  -> waited_s   += the time that has passed
                                           yes -> computed_s += what the busiest rank computed

A hang is a wait in which nobody computes; it gets the limit by the clock. Code that computes gets
as much processor time, however busy the machine is, up to a cap by the clock. Ranks that were
ready most of that time and did not get a processor are starved, and nobody knows whether they hang.
"""

import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

SAMPLE_S = 0.25
SECOND_LOOK_S = 0.003
LOOK_BELOW_S = 1.0  # from one look at the ranks' own children to the next: it reads all of /proc
RECENT = 4  # samples by which a rank is said to compute or to wait
CAP = 10  # times the limit, by the clock: then it is up, whatever the ranks do
COMPUTING = 0.05  # share of a processor above which a process does more than wait
RUNNABLE = (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)  # also where it gets no processor


class Clock:
    """Counts what the time of some ranks is spent on, and says when it is up."""

    def __init__(self, pids: dict[int, int], limit_s: float) -> None:
        """Start to count for the processes `pids`, by rank."""
        self.limit_s = limit_s
        self.waited_s = 0.0  # in which no rank computed
        self.still_s = 0.0  # the part of it since some rank last computed
        self.computed_s = 0.0  # processor time of the rank that was busiest in each sample
        self.lost_s = 0.0  # in which a rank was ready and got no processor
        self._recent = {rank: deque(maxlen=RECENT) for rank in pids}  # did it compute?
        self._processes: dict[int, psutil.Process] = {}
        for rank, pid in pids.items():
            with suppress(psutil.Error):
                self._processes[rank] = psutil.Process(pid)
        self._used_s = {rank: self._use(rank) for rank in pids}
        self._below_s = dict.fromkeys(pids, 0.0)  # processor time of a rank's own children
        self._below_share = dict.fromkeys(pids, 0.0)  # of a processor, at the last look
        self._start_s = time.monotonic()
        self._sampled_s = self._start_s
        self._looked_s = self._start_s

    @property
    def wall_s(self) -> float:
        """Seconds since the start, by the clock."""
        return time.monotonic() - self._start_s

    @property
    def computing(self) -> set[int]:
        """Ranks that computed in most of the last samples; a thread of one that waits may wake."""
        return {rank for rank, seen in self._recent.items() if 2 * sum(seen) > len(seen)}

    @property
    def is_starved(self) -> bool:
        """Did others have the processors for most of the time in which the ranks could compute?"""
        return self.lost_s > max(self.limit_s, 2 * self.computed_s)

    def is_up(self, running: Iterable[int]) -> bool:
        """Have the ranks in `running` had their time? Takes a sample when one is due."""
        now = time.monotonic()
        if now - self._sampled_s >= SAMPLE_S:
            self._sample(list(running), now)
        return max(self.waited_s, self.computed_s, self.wall_s / CAP) >= self.limit_s

    def _sample(self, running: list[int], now: float) -> None:
        passed_s = now - self._sampled_s
        self._sampled_s = now
        if now - self._looked_s >= LOOK_BELOW_S:
            self._look_below(running, now)
        spent_s = {}
        computing = set()
        for rank in running:
            used_s = self._use(rank)
            spent_s[rank] = used_s - self._used_s[rank] + self._below_share[rank] * passed_s
            self._used_s[rank] = used_s
            if spent_s[rank] > COMPUTING * passed_s:
                computing.add(rank)
        computing |= self._ready({*running} - computing)
        for rank in running:
            self._recent[rank].append(rank in computing)
        if computing:
            busiest_s = max(spent_s[rank] for rank in computing)
            self.computed_s += min(passed_s, busiest_s)  # threads count once
            if any(map(self._can_run, computing)):
                self.lost_s += max(0.0, passed_s - busiest_s)
            self.still_s = 0.0
        else:
            # A caller that comes late for its sample is on a machine too busy to tell.
            self.waited_s += min(passed_s, 2 * SAMPLE_S)
            self.still_s += min(passed_s, 2 * SAMPLE_S)

    def _look_below(self, running: list[int], now: float) -> None:
        """See how much of a processor the children of each rank use, such as loaders of data."""
        passed_s = now - self._looked_s
        self._looked_s = now
        for rank in running:
            used_s = 0.0
            with suppress(psutil.Error):
                process = self._processes[rank]
                used_s = sum(process.cpu_times()[2:4])  # of those that have ended
                for child in process.children(recursive=True):
                    with suppress(psutil.Error):
                        used_s += sum(child.cpu_times()[:4])
            spent_s = used_s - self._below_s[rank]
            self._below_s[rank] = used_s
            self._below_share[rank] = max(0.0, spent_s) / passed_s

    def _use(self, rank: int) -> float:
        """Processor time of a rank so far in seconds."""
        with suppress(psutil.Error, KeyError):
            return sum(self._processes[rank].cpu_times()[:2])
        return 0.0  # it has ended

    def _ready(self, ranks: set[int]) -> set[int]:
        """Those that could run, and get no processor: at a second look they still do not wait.

        A thread of gloo's wakes now and then for some microseconds.
        """
        found = {rank for rank in ranks if self._can_run(rank)}
        if found:
            time.sleep(SECOND_LOOK_S)
        return {rank for rank in found if self._can_run(rank)}

    def _can_run(self, rank: int) -> bool:
        with suppress(psutil.Error, KeyError):
            return _can_run(self._processes[rank])
        return False


def _can_run(process: psutil.Process) -> bool:
    """Does one of its threads run, or wait only for a processor or a disk?"""
    if process.status() in RUNNABLE:
        return True
    with suppress(OSError, IndexError):  # a thread may have ended; not all systems have /proc
        for thread in Path(f"/proc/{process.pid}/task").iterdir():
            state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
            if state in ("R", "D"):
                return True
    return False
