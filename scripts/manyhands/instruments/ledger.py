"""The ledger: who sent how many bytes to whom, and which collectives a program called.

    with Ledger() as ledger:            rank 0   send  -> 1   400 bytes
        all_reduce_ring(tensor)         rank 0   recv  <- 3   400 bytes
    ledger.entries                      ...

It stands where every call into torch.distributed passes, in torch's dispatcher. So it sees your
own sends, and also the calls that DDP and FSDP make for themselves. It does not see inside a
collective: an all_reduce is one entry, whatever messages its backend makes of it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = {  # of torch's operators, where they differ from those in torch.distributed
    "recv_any_source": "recv",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "monitored_barrier": "barrier",
}
NO_CALLS = {"wait_tensor", "_wrap_tensor_autograd"}


@dataclass(frozen=True)
class Entry:
    """One call of one rank. Ranks are those of the whole job, also in a subgroup.

    `nbytes` counts the tensors given to the call: those that go in or those that come out,
    whichever are more. For an all_gather that is the gathered whole, for a reduce_scatter the whole
    that is summed up.
    """

    op: str
    rank: int
    peer: int | None  # send: who receives; recv: who sends; None for the rest and for "anybody"
    nbytes: int
    ranks: tuple[int, ...]  # of the group
    content: tuple[int | float, ...] | None  # of a send, where the ledger keeps it


class Ledger(TorchDispatchMode):
    """Write down every message and collective of this rank while the block runs.

    Args:
        keep: keep what a `send` carries as well.
    """

    def __init__(self, keep: bool = False) -> None:
        super().__init__()
        self.keep = keep
        self.entries: list[Entry] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # torch's own signature
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.name().split("::")[1].split(".")[0].rstrip("_")
            if name not in NO_CALLS:
                self.entries.append(self._entry(NAMES.get(name, name), args, result))
        return result

    def _entry(self, op: str, args: tuple, result: object) -> Entry:
        # The group's name comes after that of the reduction.
        group = next(filter(None, map(_as_group, reversed(args))))
        ranks = tuple(dist.get_process_group_ranks(group))
        # send and recv: ([tensor], group, rank in the group, tag); from anybody: no such rank.
        peer = ranks[args[2]] if op in ("send", "recv") and len(args) == 4 else None
        sides = [list(_tensors(side)) for side in (*args, result)]
        nbytes = max(sum(tensor.nbytes for tensor in side) for side in sides)
        content = tuple(sides[0][0].flatten().tolist()) if self.keep and op == "send" else None
        return Entry(op, dist.get_rank(), peer, nbytes, ranks, content)


def _as_group(arg: object) -> dist.ProcessGroup | None:
    """The process group behind an argument of an operator, if it is one."""
    if isinstance(arg, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(arg)
        except RuntimeError:  # the kind of reduction is such an object as well
            return None
    if isinstance(arg, str):
        return dist.distributed_c10d._resolve_process_group(arg)
    return None


def _tensors(arg: object) -> Iterable[Tensor]:
    if isinstance(arg, Tensor):
        yield arg
    elif isinstance(arg, list | tuple):
        for part in arg:
            yield from _tensors(part)


def calls(entries: Iterable[Entry]) -> Counter[str]:
    """How often each operation was called."""
    return Counter(entry.op for entry in entries)


def traffic(entries: Iterable[Entry]) -> Counter[tuple[int, int]]:
    """Bytes by (sender, receiver), over the sends of all ranks' entries."""
    total: Counter[tuple[int, int]] = Counter()
    for entry in entries:
        if entry.op == "send":
            total[entry.rank, entry.peer] += entry.nbytes
    return total


def rounds(entries_by_rank: Sequence[Sequence[Entry]]) -> list[list[Entry]]:
    """The sends of all ranks in rounds: in a round a rank sends and receives one message at most.

    A rank sends when all that it asked for before has come, and takes what several send to it in
    the order in which it asks. This is the order that the program forces, not the one in which the
    machine happened to do it.
    """
    left = {
        mine[0].rank: [e for e in mine if e.op in ("send", "recv")]
        for mine in entries_by_rank
        if mine
    }
    found: list[list[Entry]] = []
    while any(left.values()):
        ready = [mine[0] for mine in left.values() if mine and mine[0].op == "send"]
        if not ready:  # everybody receives first: such a recv is still open while the rank sends
            firsts = [next((e for e in mine if e.op == "send"), None) for mine in left.values()]
            ready = [send for send in firsts if send]
        if not ready:
            raise ValueError("a rank receives a message that nobody sends")
        ready.sort(key=lambda send: _turn(send, left.get(send.peer, [])))
        going = {send.peer: send for send in reversed(ready)}  # of each receiver the first stays
        for send in going.values():
            left[send.rank].remove(send)
            theirs = left.get(send.peer, [])
            turn = _turn(send, theirs)
            del theirs[turn : turn + 1]
        found.append(sorted(going.values(), key=lambda send: send.rank))
    return found


def _turn(send: Entry, theirs: Sequence[Entry]) -> int:
    """The place of the recv that takes `send` among the receiver's entries; the end without one."""
    takers = (i for i, e in enumerate(theirs) if e.op == "recv" and e.peer in (send.rank, None))
    return next(takers, len(theirs))
