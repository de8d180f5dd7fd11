"""Would these calls hang on GPUs? A simulation of what each rank asks of NCCL.

    rank 0's program: launch, wait, ...   --> host: goes through the program, waits where it says so
                                          --> communicators: a queue each; the first operation of a
                                              queue runs as soon as its partners' run as well

A launch returns at once and puts an operation into the queue of its communicator. A wait lasts
until the operation is done. The first use of a communicator needs all its ranks, and on each of
them everything that was launched before must be done, because NCCL allocates memory there, which
may wait for the whole device. With room for all operations the outcome depends on the programs
alone. With room for one, a device may take launched operations of several communicators in any
order: `explore` tries each.

Source: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html, "Using
multiple NCCL communicators concurrently".
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from manyhands.ranks.failures import Frame

MAX_RANKS, MAX_OPERATIONS, LIMIT_S = 3, 8, 2.0  # of `explore`
Part = tuple[str, tuple[int, ...]]  # a message or collective: its name, and the ranks that it needs


@dataclass(frozen=True)
class Step:
    """One step of a rank's program: it joins a communicator, launches, or waits."""

    kind: str  # join, launch or wait
    words: str  # "send to rank 1"
    frame: Frame
    queue: str = ""  # join, launch: the communicator
    parts: tuple[Part, ...] = ()  # launch: done when all are done; join: its ranks
    launched: int = -1  # wait: which of this rank's launches


class Machine:
    """The ranks of a job amid their programs."""

    def __init__(
        self, programs: Mapping[int, Sequence[Step]], ended: set[int], room: int | None = None
    ) -> None:
        """Start all programs.

        Args:
            programs: of each rank, as far as they are known.
            ended: ranks whose program is known to its end.
            room: how many operations a device can run at the same time; None for any number.
        """
        self.programs, self.ended, self.room = programs, ended, room
        self.at = dict.fromkeys(programs, 0)  # the step of each rank
        self.launches: dict[int, list[Step]] = {rank: [] for rank in programs}
        self.queues: dict[int, dict[str, list[int]]] = {rank: {} for rank in programs}
        self.running: dict[int, list[int]] = {rank: [] for rank in programs}
        self.present: dict[str, frozenset[int]] = {}  # of each part: ranks that have come to it

    def copy(self) -> "Machine":
        """The same machine, to go on in another way."""
        twin = Machine(self.programs, self.ended, self.room)
        twin.at = dict(self.at)
        twin.launches = {rank: list(steps) for rank, steps in self.launches.items()}
        twin.running = {rank: list(numbers) for rank, numbers in self.running.items()}
        twin.present = dict(self.present)
        for rank, queues in self.queues.items():
            twin.queues[rank] = {name: list(queue) for name, queue in queues.items()}
        return twin

    def step(self, rank: int) -> Step | None:
        """Where a rank is; None behind the end of its program."""
        program, at = self.programs[rank], self.at[rank]
        return program[at] if at < len(program) else None

    def is_pending(self, rank: int, number: int) -> bool:
        """Is this launch not done yet?"""
        return number in self.queues[rank].get(self.launches[rank][number].queue, ())

    def lacking(self, parts: Sequence[Part]) -> set[int]:
        """The ranks that have not come to one of `parts`."""
        return {
            rank
            for name, ranks in parts
            for rank in ranks
            if rank not in self.present.get(name, ())
        }

    def come(self, rank: int, parts: Sequence[Part]) -> None:
        """Note that a rank has come to `parts`."""
        for name, _ in parts:
            self.present[name] = self.present.get(name, frozenset()) | {rank}

    def settle(self) -> None:
        """Do all that must happen: finish what is complete, take every host as far as it goes."""
        moved = True
        while moved:
            moved = False
            for rank in self.programs:
                for number in list(self.running[rank]):
                    step = self.launches[rank][number]
                    if not self.lacking(step.parts):
                        self.running[rank].remove(number)
                        self.queues[rank][step.queue].remove(number)
                        moved = True
                while (step := self.step(rank)) and self._passes(rank, step):
                    self.at[rank] += 1
                    moved = True

    def _passes(self, rank: int, step: Step) -> bool:
        """Can the host go beyond this step?"""
        if step.kind == "wait":
            return not self.is_pending(rank, step.launched)
        if step.kind == "join":
            if not any(self.queues[rank].values()):
                self.come(rank, step.parts)
            return not self.lacking(step.parts)
        self.queues[rank].setdefault(step.queue, []).append(len(self.launches[rank]))
        self.launches[rank].append(step)
        return True

    def startable(self) -> list[tuple[int, int]]:
        """(rank, launch) of the operations that a device could begin now."""
        return [
            (rank, queue[0])
            for rank, queues in self.queues.items()
            for queue in queues.values()
            if queue and queue[0] not in self.running[rank]
            if self.room is None or len(self.running[rank]) < self.room
        ]

    def start(self, rank: int, number: int) -> None:
        """Let a device begin an operation."""
        self.running[rank].append(number)
        self.come(rank, self.launches[rank][number].parts)

    def run(self) -> None:
        """Go on until nothing can happen any more, starting whatever can start."""
        self.settle()
        while ready := self.startable():
            for rank, number in ready:
                self.start(rank, number)
            self.settle()

    def stuck(self) -> list[int]:
        """The ranks that can never go on, whatever the others still do."""
        waiting = {rank: self._waits_for(rank) for rank in self.programs if self.step(rank)}
        doomed = set(waiting)
        while True:
            # Whoever waits for a rank that may still do something may still be saved by it.
            saved = {rank for rank in doomed if waiting[rank] - doomed - self.ended}
            if not saved:
                return sorted(doomed)
            doomed -= saved

    def _waits_for(self, rank: int) -> set[int]:
        """The ranks that have to do something before this one can go on."""
        step = self.step(rank)
        queues = self.queues[rank]
        if step.kind == "join":
            numbers, ranks = sum(queues.values(), []), self.lacking(step.parts)
        else:
            queue = queues[self.launches[rank][step.launched].queue]
            numbers, ranks = queue[: queue.index(step.launched) + 1], set()
        if self.room is not None:
            numbers = numbers + self.running[rank]
        for number in numbers:
            ranks |= self.lacking(self.launches[rank][number].parts)
        return ranks - {rank}


def deadlock(programs: Mapping[int, Sequence[Step]], ended: set[int]) -> Machine | None:
    """Where ranks can never go on, the machine in that state; else None.

    Programs need not be complete: only what no later call could mend counts.
    """
    machine = Machine(programs, ended)
    machine.run()
    return machine if machine.stuck() else None


def explore(programs: Mapping[int, Sequence[Step]], limit_s: float = LIMIT_S) -> Machine | None:
    """The shortest deadlock of complete programs on devices that run one operation at a time.

    Tries every order in which the devices can take launched operations, shortest first; None where
    all go well, where there are more ranks or operations than the limits, or the time is up.
    """
    launches = [sum(step.kind == "launch" for step in steps) for steps in programs.values()]
    if len(programs) > MAX_RANKS or max(launches, default=0) > MAX_OPERATIONS:
        return None
    end_s = time.monotonic() + limit_s
    first = Machine(programs, set(programs), room=1)
    first.settle()
    states, known = [first], set()
    while states and time.monotonic() < end_s:
        later = []
        for machine in states:
            if machine.stuck() and not machine.startable():
                return machine
            for rank, number in machine.startable():
                twin = machine.copy()
                twin.start(rank, number)
                twin.settle()
                name = repr((twin.at, twin.queues, twin.running))
                if name not in known:
                    known.add(name)
                    later.append(twin)
        states = later
    return None


def story(machine: Machine) -> tuple[str, list[Frame]]:
    """What each stuck rank waits for, with a place {} for the line of each, and these lines."""
    told, frames = [], []
    stuck = machine.stuck()
    for rank in stuck:
        step = machine.step(rank)
        told.append(f"rank {rank} waits in {step.words} ({{}})")
        frames.append(step.frame)
        if machine.room is not None:
            for number in machine.running[rank]:
                other = machine.launches[rank][number]
                told[-1] += f", while its device runs {other.words} ({{}})"
                frames.append(other.frame)
    gone = sorted(set().union(*(machine._waits_for(rank) for rank in stuck)) - set(stuck))
    told += [f"rank {rank} has ended" for rank in gone]
    return "; ".join(told), frames
