"""NCCL's rules enforced on gloo: what would hang or go wrong on GPUs is an error on a laptop.

    with watching("nccl"):                      run_ranks(function, 2, rules="nccl")
        ...                                     MANYHANDS_RULES=nccl torchrun script.py

gloo forgives much: it matches messages by tag, cuts one that is too long, and lets a program start
with a send on both sides. NCCL has communicators, each with one queue: one for a group, and one
for each two of its ranks that exchange single messages. Here each rank notes its calls in a store
(notes.py). A call is compared with its partners' when it is made (matching.py), a blocking one
waits until they are there, and the programs of all ranks are simulated when a rank waits for long,
and at the end (deadlocks.py). A breach is one line.

Only calls from Python are seen, not those of DDP's reducer or of functional collectives. That a
tensor in flight is written or freed is noticed, but not that it is read; nor that an output is
written which torch fills by copies, as in all_gather.

Sources: https://docs.pytorch.org/docs/stable/distributed.html; ProcessGroupNCCL.cpp, pointToPoint.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from manyhands.ranks.failures import BadInput, Frame
from manyhands.ranks.flights import Flight, WatchedWork, line_of_program
from manyhands.ranks.matching import Breach, Call, check_reduction, check_tensors, type_of
from manyhands.ranks.notes import Notes

KINDS = ("nccl", "nccl-serial")
MESSAGES = ("send", "recv", "isend", "irecv")
# Of each collective: its tensors that go in, those that come out, and those that all ranks must
# have in the same sizes.
COLLECTIVES = {
    "all_reduce": ("tensor", "tensor", "tensor"),
    "broadcast": ("tensor", "tensor", "tensor"),
    "reduce": ("tensor", "tensor", "tensor"),
    "all_gather": ("tensor", "tensor_list", "tensor_list"),
    "all_gather_into_tensor": ("input_tensor", "output_tensor", "input_tensor"),
    "all_gather_single": ("input_tensor", "output_tensor", "input_tensor"),
    "reduce_scatter": ("input_list", "output", "input_list"),
    "reduce_scatter_tensor": ("input", "output", "output"),
    "reduce_scatter_single": ("input", "output", "output"),
    "all_to_all": ("input_tensor_list", "output_tensor_list", ""),
    "all_to_all_single": ("input", "output", ""),
    "gather": ("tensor", "gather_list", "tensor"),
    "scatter": ("scatter_list", "tensor", "tensor"),
    "barrier": ("", "", ""),
}
IN_PLACE = ("all_reduce", "broadcast", "reduce")
NAMES = (*MESSAGES, *COLLECTIVES, "batch_isend_irecv", "new_group")
SIGNATURES = {name: inspect.signature(getattr(dist, name)) for name in NAMES if hasattr(dist, name)}


@contextmanager
def watching(kind: str) -> Iterator[None]:
    """Hold the calls of this block to NCCL's rules; every rank enters it, within a process group.

    Args:
        kind: nccl; or nccl-serial for devices that run one communication at a time, whose launched
            operations are tried in every order at the end (deadlocks.explore has its limits). With
            "" nothing is watched.

    Raises:
        Breach: in the call that breaks a rule, or at the end of the block.
    """
    if not kind:
        yield
        return
    if kind not in KINDS:
        raise BadInput(f"rules is {kind!r}: choose {' or '.join(KINDS)}")
    watch = Watch(Notes(is_serial=kind == "nccl-serial"))
    originals = {name: getattr(dist, name) for name in SIGNATURES}
    watched = {name: watch.wrap(name, real) for name, real in originals.items()}
    try:
        _install(watched)
        yield
        watch.notes.end()
    finally:
        _install(originals)
    watch.notes.linger()


def replace_in_dist(functions: Mapping[str, Callable]) -> dict[str, Callable]:
    """Have `functions` do what some of torch.distributed's do, below the watch if there is one.

    The rules then still see the calls of the program, in its order and with its lines, and none
    that the functions make in turn.

    Returns:
        Those that did it before, by name: for the functions to call, and to put back.
    """
    before = {}
    for name, function in functions.items():
        now = getattr(dist, name)
        if hasattr(now, "carrier"):
            before[name], now.carrier = now.carrier, function
        else:
            before[name] = now
            _install({name: function})
    return before


def _install(functions: Mapping[str, Callable]) -> None:
    for name, function in functions.items():
        setattr(dist, name, function)
        setattr(dist.distributed_c10d, name, function)  # P2POp asks for isend by identity there


class Watch:
    """Translates calls of torch.distributed into notes."""

    def __init__(self, notes: Notes) -> None:
        """Note everything there."""
        self.notes, self.rank = notes, notes.rank
        self.inside = False  # a call of torch's: what that calls in turn is not the program's

    def wrap(self, name: str, real: Callable) -> Callable:
        """`real`, which is torch.distributed's function of that name, watched."""

        @functools.wraps(real)
        def watched(*args: object, **kwargs: object) -> object:
            if self.inside:
                return watched.carrier(*args, **kwargs)
            given = SIGNATURES[name].bind(*args, **kwargs)
            given.apply_defaults()
            given = given.arguments
            call = functools.partial(self._pass_on, watched.carrier, args, kwargs)
            if name == "new_group":
                return self._new_group(given, call)
            if name == "batch_isend_irecv":
                return self._batch(given["p2p_op_list"], call)
            if dist.distributed_c10d._rank_not_in_group(given["group"]):
                return call()
            if name in MESSAGES:
                return self._message(name, given, call)
            return self._collective(name, given, call)

        watched.carrier = real  # which replace_in_dist can replace
        return watched

    def _pass_on(self, carrier: Callable, args: tuple, kwargs: dict) -> object:
        self.inside = True
        try:
            return carrier(*args, **kwargs)
        finally:
            self.inside = False

    def _message(self, name: str, given: Mapping, call: Callable) -> object:
        """A message that is no part of a batch: it has a queue for the two ranks of its group."""
        frame, group = line_of_program(), given["group"] or dist.group.WORLD
        peer = _global_rank(group, given.get("dst", given.get("src")), given, name)
        if peer is None:
            told = f"rank {self.rank} calls {name} without a source ({{}})"
            remedy = "NCCL cannot receive from anybody: name the rank that sends"
            raise Breach(f"source: {told}: {remedy}", [frame])
        pair = (min(self.rank, peer), max(self.rank, peer))
        queue = f"{group.group_name}/{pair[0]}-{pair[1]}"
        side = self._side(name, given["tensor"], peer, given["tag"], queue, frame)
        key = f"{queue}/{side.number}"
        launched = self.notes.launch(queue, pair, {key: (side, pair)}, side.words)
        flight = self._flight(side, [given["tensor"]])
        return self._finish(call, launched, [flight], [[key]], is_async=name[0] == "i")

    def _batch(self, ops: Sequence[dist.P2POp], call: Callable) -> object:
        """Messages in one batch: one operation in the queue of the whole group."""
        frame, sides, flights = line_of_program(), {}, []
        group = ops[0].group or dist.group.WORLD
        for op in ops:
            name = "isend" if op.op is dist.isend else "irecv"
            ends = (self.rank, op.peer) if name == "isend" else (op.peer, self.rank)
            queue = f"{group.group_name}/batch {ends[0]}-{ends[1]}"
            side = self._side(name, op.tensor, op.peer, op.tag, queue, frame)
            sides[f"{queue}/{side.number}"] = side, ends
            flights.append(self._flight(side, [op.tensor]))
        words = f"a batch of {' and '.join(side.words for side, _ in sides.values())}"
        members = dist.get_process_group_ranks(group)
        launched = self.notes.launch(group.group_name, members, sides, words)
        return self._finish(call, launched, flights, [[key] for key in sides], is_async=True)

    def _side(
        self, name: str, tensor: Tensor, peer: int, tag: int, queue: str, frame: Frame
    ) -> Call:
        check_tensors(name, [tensor], frame, self.rank)
        number = self.notes.next_number(queue)
        sizes = (tensor.numel(),)
        return Call(self.rank, name, number, frame, peer, tag, sizes, type_of([tensor]))

    def _collective(self, name: str, given: Mapping, call: Callable) -> object:
        frame, group = line_of_program(), given["group"] or dist.group.WORLD
        ranks = dist.get_process_group_ranks(group)
        ins, outs, same = (_tensors(given.get(word)) for word in COLLECTIVES[name])
        check_tensors(name, [*ins, *outs], frame, self.rank)
        check_reduction(name, given.get("op"), frame, self.rank)
        root = _global_rank(group, given.get("dst", given.get("src")), given, name)
        details = [] if root is None else [f"root {root}"]
        details += [str(given["op"]).rpartition(".")[2]] if "op" in given else []
        number = self.notes.next_number(group.group_name)
        sizes, dtype = tuple(tensor.numel() for tensor in same), type_of([*outs, *ins])
        side = Call(self.rank, name, number, frame, -1, 0, sizes, dtype, ", ".join(details))
        key = f"{group.group_name}/{number}"
        launched = self.notes.launch(group.group_name, ranks, {key: (side, ranks)}, side.words)
        if name in IN_PLACE:
            sends_only = name == "broadcast" and root == self.rank
            ins, outs = (ins, []) if sends_only else ([], outs)
        by_copies = name not in IN_PLACE
        flight = Flight(self.rank, side.words, frame, ins, outs, by_copies)
        keys = [key] if len(ranks) > 1 else []
        return self._finish(call, launched, [flight], [keys], is_async=given["async_op"])

    def _new_group(self, given: Mapping, call: Callable) -> object:
        everybody = tuple(range(self.notes.world_size))
        ranks = tuple(given["ranks"] or everybody)
        callers = ranks if given["use_local_synchronization"] else everybody
        frame, queue = line_of_program(), f"new_group {callers}"
        number, details = self.notes.next_number(queue), f"of ranks {list(ranks)}"
        side = Call(self.rank, "new_group", number, frame, details=details)
        key = f"{queue}/{number}"
        if self.rank in callers and len(callers) > 1:
            launched = self.notes.launch(queue, (self.rank,), {key: (side, callers)}, side.words)
            self.notes.wait(launched, side.words, frame, [key])
        return call()

    def _flight(self, side: Call, tensors: list[Tensor]) -> Flight:
        ins, outs = (tensors, []) if side.is_send else ([], tensors)
        return Flight(self.rank, side.words, side.frame, ins, outs)

    def _finish(
        self,
        call: Callable,
        launched: int,
        flights: list[Flight],
        keys: list[list[str]],
        is_async: bool,
    ) -> object:
        """Make the call: at once if it returns works to wait for, else when the partners are there.

        Within torch's _coalescing_manager an asynchronous call returns no work of its own.
        """
        result = call() if is_async else None
        if result:
            works = result if isinstance(result, list) else [result]
            pairs = zip(works, flights, keys, strict=True)
            watched = [WatchedWork(work, self.notes, launched, *pair) for work, *pair in pairs]
            return watched if isinstance(result, list) else watched[0]
        self.notes.wait(launched, flights[0].words, flights[0].frame, sum(keys, []))
        return result if is_async else call()


def _global_rank(
    group: dist.ProcessGroup, rank: int | None, given: Mapping, name: str
) -> int | None:
    """The other end or root, counted in the whole job; None where the call has none."""
    inner = given.get("group_dst", given.get("group_src"))
    if inner is not None:
        return dist.get_global_rank(group, inner)
    if rank is None and name in ("gather", "scatter"):
        return dist.get_global_rank(group, 0)
    return rank


def _tensors(given: object) -> list[Tensor]:
    return [given] if isinstance(given, Tensor) else list(given or ())
