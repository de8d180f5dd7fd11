"""The time machine: what a few ranks did, replayed by a clock on hundreds, and on any machine.

    programs of 8 ranks  -->  512 ranks, C FLOP/s, a link for each axis  -->  when each does what

A program is what a rank did, in its order: FLOPs, bytes, and whom it waits for (events.py). None of
that depends on the machine. The clock puts one under it, and tells when each rank would do what:
computing takes FLOPs / C, a message what its link takes (traffic.py), an asynchronous message goes
on beside the computing, and a wait waits for its end.

On a larger mesh each rank runs the program of the recorded rank at its place, counted modulo the
recorded sizes. So a larger data-parallel axis is weak scaling: as many tokens per rank, more in
all. What FSDP gathers and reduces is the whole, whose size stays; but shards that are averaged over
replicas keep the size that they were recorded with.

Left out: memory traffic, so norms, activations and the optimizer take no time; jitter; what ranks
of one node share, but for what the links' bandwidths say; and trees for sums, which real libraries
take on many ranks for short messages.

Price: 512 ranks with 300 events each take half a second to a second of Python.
Source: Hoefler, Schneider, Lumsdaine 2010, "LogGOPSim", https://doi.org/10.1145/1851476.1851564
(replays recorded programs, and extrapolates them to more ranks).
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from heapq import heappop
from typing import NamedTuple

from manyhands.simulator.events import (
    Collective,
    Compute,
    Event,
    Message,
    Program,
    Wait,
    recorded_rank,
)
from manyhands.simulator.traffic import Flight, Machine, Span, Traffic


class Replay(NamedTuple):
    """When every rank did what, and what it waited for."""

    spans: list[list[Span]]  # of each rank: "compute", "communication" and, while it waits, "idle"
    stop_s: list[float]  # when each rank was through
    computing_s: list[float]
    exposed_s: list[dict[str, float]]  # by axis: it waited while the message was on its way


class Summary(NamedTuple):
    """A step, split up; means over the ranks, which add up to `step_s`."""

    step_s: float  # until the last rank is through
    computing_s: float
    exposed_s: dict[str, float]  # by axis: waiting for messages that are on their way
    idle_s: float  # waiting for other ranks


def replay(
    programs: Sequence[Program],
    sizes: Mapping[str, int],
    machine: Machine,
    larger: Mapping[str, int] | None = None,
    stragglers: Mapping[int, float] | None = None,
) -> Replay:
    """Run recorded programs on a machine that need not exist.

    Args:
        programs: of every recorded rank.
        sizes: the recorded mesh, outermost axis first: for {"pp": 2, "dp": 2, "tp": 2} a rank is
            (pp * 2 + dp) * 2 + tp.
        larger: the mesh to run on, with the same axes, such as {"pp": 2, "dp": 128, "tp": 2}.
        stragglers: rank -> how many times as long its computing takes.

    Raises:
        ValueError: a deadlock; the message says who waits for whom. Or calls that do not match.
    """
    larger = larger or sizes
    if math.prod(sizes.values()) != len(programs) or list(sizes) != list(larger):
        raise ValueError(
            f"{len(programs)} programs of a mesh {dict(sizes)} cannot run on {dict(larger)}: give "
            "one for each recorded rank, and the same axes in the same order"
        )
    for event in (event for program in programs for event in program):
        grown = larger != sizes and isinstance(event, Message) and event.axis.split("+")
        if grown and any(larger[axis] != sizes[axis] for axis in grown):
            raise ValueError(
                f"a {event.op} on axis {event.axis}, recorded on {dict(sizes)}, cannot run on "
                f"{dict(larger)}: of single messages nobody knows whom more ranks would send to"
            )
    ranks = range(math.prod(larger.values()))
    mine = [programs[recorded_rank(rank, larger, sizes)] for rank in ranks]
    clock = Clock(mine, larger, machine, stragglers or {})
    clock.run()
    return Replay(clock.spans, clock.stop_s, clock.computing_s, clock.exposed_s)


def summary(replayed: Replay) -> Summary:
    """Where the time of a step went, on average over the ranks."""
    num_ranks, step_s = len(replayed.stop_s), max(replayed.stop_s)
    computing_s = sum(replayed.computing_s) / num_ranks
    exposed_s: dict[str, float] = defaultdict(float)
    for mine in replayed.exposed_s:
        for axis, seconds in mine.items():
            exposed_s[axis] += seconds / num_ranks
    idle_s = step_s - computing_s - sum(exposed_s.values())
    return Summary(step_s, computing_s, dict(exposed_s), idle_s)


# ---- the clock -----------------------------------------------------------------------------


class Clock(Traffic):
    """Takes always the rank whose time is the earliest, and does its next event."""

    def __init__(
        self,
        programs: Sequence[Program],
        sizes: Mapping[str, int],
        machine: Machine,
        stragglers: Mapping[int, float],
    ) -> None:
        super().__init__(len(programs), sizes, machine)
        ranks = range(len(programs))
        self.programs = programs
        self.factors = [stragglers.get(rank, 1.0) for rank in ranks]
        self.handles: list[dict[int, Flight]] = [{} for _ in ranks]
        self.stop_s = [0.0] * len(ranks)
        self.computing_s = [0.0] * len(ranks)

    def run(self) -> None:
        """Until all are through."""
        while self.ready:
            now_s, place, rank = heappop(self.ready)
            program = self.programs[rank]
            if place == len(program):
                self.stop_s[rank] = now_s
                continue
            self.next[rank] = place + 1
            self.act(rank, program[place], now_s)
        if self.stuck:
            raise ValueError("deadlock: " + self.who_waits_for_whom())

    def act(self, rank: int, event: Event, now_s: float) -> None:
        """Do a rank's next event, and say when it goes on."""
        if isinstance(event, Compute):
            stop_s = now_s + self.seconds(event) * self.factors[rank]
            self.note(rank, "compute", now_s, stop_s)
            self.computing_s[rank] += stop_s - now_s
            self.go_on(rank, stop_s)
        elif isinstance(event, Wait):
            self.wait(rank, self.handles[rank].pop(event.handle), now_s)
        else:
            start = self.collective if isinstance(event, Collective) else self.message
            flight = start(rank, event, now_s)
            if event.handle is None:
                self.wait(rank, flight, now_s)
            else:
                self.handles[rank][event.handle] = flight
                self.go_on(rank, now_s)

    def seconds(self, event: Compute) -> float:
        """How long a rank computes."""
        if self.machine.flops_per_s is None:
            return event.seconds * self.machine.slower
        return event.flops / self.machine.flops_per_s

    def who_waits_for_whom(self) -> str:
        """In words, from the first stuck rank on, until a rank comes again or has ended."""
        words, rank, seen = [], min(self.stuck), set()
        while rank in self.stuck and rank not in seen:
            seen.add(rank)
            flight = self.stuck[rank]
            other = min(flight.missing)
            op, axis = flight.event.op, flight.event.axis
            place = self.next[rank] - 1
            words.append(f"rank {rank} waits in event {place}, {op} on {axis}, for rank {other}")
            rank = other
        if rank not in self.stuck:
            words.append(f"rank {rank} has ended")
        return "; ".join(words)
