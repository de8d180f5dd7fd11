"""What one rank notes of its calls, where the others can read it; and the verdict on all ranks.

    rank 0  store["world 0-1/1"] = isend to rank 1, 4 numbers, line 7     compared by whoever
    rank 1  finds it there, and compares its own first call with it       comes second

The store is the one that the ranks met in. A rank that waits for long puts its whole program there,
and simulates what it finds there of the others'; the last one to end does so in any case.
"""

import json
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import torch.distributed as dist

from manyhands.ranks.deadlocks import Machine, Step, deadlock, explore, story
from manyhands.ranks.failures import Frame
from manyhands.ranks.matching import Breach, Call, compare, unpack

LOOK_S = 0.5  # how long a rank waits before it looks whether it waits for ever
PATIENCE_S = 60  # how long it waits for partners before it leaves that to torch
LEAVE_S = 5  # how long a rank that has ended stays for those that may still read its notes


class Notes:
    """The program of this rank so far, and its calls in the store."""

    def __init__(self, is_serial: bool) -> None:
        """Begin with the next call."""
        self.is_serial = is_serial
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.store = dist.PrefixStore("manyhands/rules", dist.distributed_c10d._get_default_store())
        self.program: list[Step] = []
        self.published = -1  # how much of it the others can read
        self.num_launches = 0
        self.counts: Counter[str] = Counter()  # operations of each queue
        self.joined: set[str] = set()  # communicators that have been used
        self.unawaited: dict[int, Step] = {}

    def next_number(self, queue: str) -> int:
        """1 for the first operation in a queue, 2 for the second ..."""
        self.counts[queue] += 1
        return self.counts[queue]

    def launch(
        self,
        queue: str,
        members: Sequence[int],
        calls: Mapping[str, tuple[Call, Sequence[int]]],
        words: str,
    ) -> int:
        """Note that an operation is launched, and compare it with what partners have noted.

        Args:
            queue: the communicator; `members` are its ranks.
            calls: name of each message or collective in it -> this rank's side, and its ranks.

        Returns:
            The number of the launch, which `wait` takes.
        """
        frame = next(iter(calls.values()))[0].frame
        members = tuple(members)
        if queue not in self.joined and len(members) > 1:
            self.joined.add(queue)
            told = f"{words}, the first operation of a new communicator"
            self.program.append(Step("join", told, frame, queue, ((f"join {queue}", members),)))
        parts = tuple((name, tuple(ranks)) for name, (_, ranks) in calls.items())
        step = Step("launch", words, frame, queue, parts)
        self.program.append(step)
        self.unawaited[self.num_launches] = step
        self.num_launches += 1
        for name, (call, ranks) in calls.items():
            self._meet(name, call, len(ranks))
        return self.num_launches - 1

    def _meet(self, name: str, call: Call, num_ranks: int) -> None:
        """Compare a call with that of whoever came first; the last to come says that all are there.

        Who comes second finds the first call there before it makes its own, so of two that do not
        fit at most one reaches gloo, which might end the process.
        """
        if num_ranks == 1:
            return
        first = unpack(self.store.compare_set(name, "", call.pack()).decode())
        if first.rank != self.rank:
            compare(first, call)
        if self.store.add(f"{name}/count", 1) == num_ranks:
            self.store.set(f"{name}/all", "1")

    def wait(self, launched: int, words: str, frame: Frame, names: Iterable[str] = ()) -> None:
        """Note that the program waits for a launch; return when the partners have launched theirs.

        Raises:
            Breach: they never will.
        """
        self.program.append(Step("wait", words, frame, launched=launched))
        self.unawaited.pop(launched, None)
        names = [f"{name}/all" for name in names]
        began_s = looked_s = time.monotonic()
        pause_s = 0.0002
        while not self.store.check(names):
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 0.005)
            now_s = time.monotonic()
            if now_s - began_s > PATIENCE_S:
                return
            if now_s - looked_s > LOOK_S:
                looked_s = now_s
                self._publish()
                self._judge(self._read())

    def end(self) -> None:
        """The program ends here. The last rank to end gives the verdict on all.

        Raises:
            Breach: an operation was never waited for, or the programs could hang.
        """
        for step in self.unawaited.values():
            if step.words.startswith("all_gather"):
                continue  # ahead of a need that did not come, as FSDP does: nothing is lost
            raise Breach(
                f"never waited for: rank {self.rank} starts {step.words} ({{}}) and never waits "
                "for it: its buffers may be used too early: call wait() on what it returns",
                [step.frame],
            )
        self._publish(has_ended=True)
        if self.store.add("ended", 1) == self.world_size:
            programs = self._read()
            self._judge(programs)
            if self.is_serial:
                self._judge_orders(programs)
            self.store.set("judged", "1")

    def linger(self) -> None:
        """Stay a moment for those that have not ended, since this rank may hold the store."""
        end_s = time.monotonic() + LEAVE_S
        with suppress(RuntimeError):  # a store says this or a kind of it
            while not self.store.check(["judged"]) and time.monotonic() < end_s:
                time.sleep(0.005)

    def _publish(self, has_ended: bool = False) -> None:
        if has_ended or self.published < len(self.program):
            self.store.set(f"program {self.rank}", _packed(self.program, has_ended))
            self.published = len(self.program)

    def _read(self) -> dict[int, tuple[list[Step], bool]]:
        """The programs that are in the store, and whether they are known to the end."""
        names = {rank: f"program {rank}" for rank in range(self.world_size)}
        there = [rank for rank, name in names.items() if self.store.check([name])]
        return {rank: _unpacked(self.store.get(names[rank])) for rank in there}

    def _judge(self, found: Mapping[int, tuple[list[Step], bool]]) -> None:
        programs = {rank: program for rank, (program, _) in found.items()}
        machine = deadlock(programs, {rank for rank, (_, ended) in found.items() if ended})
        if machine is None:
            return
        told, frames = story(machine)
        if "has ended" in told:
            remedy = "every rank has to make the same calls, and each send needs a receive"
        else:
            remedy = (
                "on GPUs an operation waits for its other end, and the next one in the same queue "
                "for it: let one side begin with the receive, or put both into a batch_isend_irecv"
            )
        raise Breach(f"deadlock: {told}: {remedy}", frames)

    def _judge_orders(self, found: Mapping[int, tuple[list[Step], bool]]) -> None:
        machine: Machine | None = explore({rank: program for rank, (program, _) in found.items()})
        if machine is not None:
            told, frames = story(machine)
            raise Breach(
                f"deadlock in one order: {told}: a device that runs one of them at a time may take "
                "them so: wait for one before the other is launched, or use one batch_isend_irecv",
                frames,
            )


def _packed(program: list[Step], has_ended: bool) -> bytes:
    """As text: others may write into the store of a job on several nodes, and a pickle runs."""
    return zlib.compress(json.dumps([[vars(step) for step in program], has_ended]).encode(), 1)


def _unpacked(content: bytes) -> tuple[list[Step], bool]:
    steps, has_ended = json.loads(zlib.decompress(content))
    for step in steps:
        step["frame"] = tuple(step["frame"])
        step["parts"] = tuple((name, tuple(ranks)) for name, ranks in step["parts"])
    return [Step(**step) for step in steps], has_ended
