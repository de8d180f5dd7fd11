"""Records what a rank does in a step, for the time machine: FLOPs, bytes, and whom it waits for.

    groups = {"pp": ..., "dp": ..., "tp": ...}        a rank's groups along the axes of the mesh
    with Recorder(groups) as recorder:                recorder.events
        step()                                          Compute(flops=1.2e9, seconds=0.03)
                                                        Message("send", "pp", peer=1, nbytes=8192)

Between two calls of torch.distributed a rank computes. The FLOPs are those of matrix products,
convolutions and attention, by torch's formulas; what attention's backward computes again does not
count, by custom. The seconds are processor time of this thread, so other ranks on the same cores do
not make them longer; but counting FLOPs does, by some microseconds for each operation.

Seen are the calls that the program makes from Python. Not seen are those of DDP's reducer, which is
C++, functional collectives, which fully_shard and DTensor make, and calls of other threads: enter a
SlowNetwork before the recorder. A wait by another way than work.wait() is not seen either.
"""

import math
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from manyhands.ranks.rules import COLLECTIVES, MESSAGES, SIGNATURES, replace_in_dist
from manyhands.simulator.events import Collective, Compute, Event, Message, Wait

OPS = {
    "isend": "send",
    "irecv": "recv",
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


def attention_flops(query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs) -> int:
    """Two products of each head; what a causal mask hides counts, by custom."""
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def attention_backward_flops(grad: Tensor, *inputs: object, **kwargs: object) -> int:
    """Two products for each one of forward."""
    return 2 * attention_flops(*inputs)


ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# torch 2.13 has no formula for attention on a CPU.
FLOPS = {
    **flop_registry,
    ATTENTION: attention_flops,
    ATTENTION_BACKWARD: attention_backward_flops,
}


class FlopCounter(TorchDispatchMode):
    """Adds up the FLOPs of every operation. torch's own counter also keeps track of modules, which
    takes longer than many a small operation."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # torch's own signature
        result = func(*args, **(kwargs or {}))
        formula = FLOPS.get(func.overloadpacket)
        if formula:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


class Recorder:
    """Write down this rank's program while the block runs.

    Args:
        groups: name of an axis -> the group along it of which this rank is a member, outermost axis
            first. A name "dp+tp" says that a group is along two axes. A group of the same ranks is
            on the same axis; that of all ranks is along all axes, where they make up the whole job.
        count_flops: False leaves the FLOPs out, and lets the seconds be those of the program alone.
    """

    def __init__(self, groups: Mapping[str, dist.ProcessGroup], count_flops: bool = True) -> None:
        self.count_flops = count_flops
        self.events: list[Event] = []
        self.axes = {axis: dist.get_process_group_ranks(group) for axis, group in groups.items()}
        self.names = {group.group_name: axis for axis, group in groups.items()}
        single = [axis for axis in self.axes if "+" not in axis]
        num_ranks = math.prod(len(self.axes[axis]) for axis in single)
        everybody = dist.get_process_group_ranks(dist.group.WORLD)
        if num_ranks == len(everybody) and everybody not in self.axes.values():
            self.axes["+".join(single)] = everybody
        self.num_handles = 0
        self.inside = False  # a call of torch's: what that calls in turn is not the program's

    def __enter__(self) -> "Recorder":
        self.counter = FlopCounter()
        if self.count_flops:
            self.counter.__enter__()
        self.real = replace_in_dist(
            {
                name: partial(self._call, name)
                for name in SIGNATURES
                if name in MESSAGES or name in COLLECTIVES
            }
        )
        self._goes_on()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stops()
        replace_in_dist(self.real)
        if self.count_flops:
            self.counter.__exit__(*exc)

    def _goes_on(self) -> None:
        """From here on the rank computes."""
        self.since = self.counter.total, time.thread_time()

    def _stops(self) -> None:
        """Write down what it has computed."""
        flops, seconds = self.since
        found = Compute(self.counter.total - flops, time.thread_time() - seconds)
        self.events.append(found)

    def _call(self, name: str, *args: object, **kwargs: object) -> object:
        """Make the program's call, and write it down."""
        if self.inside:
            return self.real[name](*args, **kwargs)
        self._stops()
        given = SIGNATURES[name].bind(*args, **kwargs)
        given.apply_defaults()
        given = given.arguments
        group = given["group"] or dist.group.WORLD
        self.inside = True
        try:
            work = self.real[name](*args, **kwargs)
        finally:
            self.inside = False
        if not dist.distributed_c10d._rank_not_in_group(group) and self._axis_of(group):
            is_async = name[0] == "i" if name in MESSAGES else given["async_op"]
            handle = self._new_handle() if is_async else None
            self.events.append(self._event(name, given, group, handle))
            work = RecordedWork(work, self, handle) if is_async else work
        self._goes_on()
        return work

    def _event(
        self, name: str, given: Mapping, group: dist.ProcessGroup, handle: int | None
    ) -> Event:
        op, axis, channel = OPS.get(name, name), self._axis_of(group), group.group_name
        if name not in MESSAGES:
            ins, outs, _ = (_nbytes(given.get(word)) for word in COLLECTIVES[name])
            return Collective(op, axis, max(ins, outs), handle, channel)
        inner = given.get("group_dst", given.get("group_src"))
        peer = given.get("dst", given.get("src"))
        if inner is not None:
            peer = dist.get_global_rank(group, inner)
        if peer is None:
            raise ValueError(f"{name} from anybody cannot be replayed: name the rank that sends")
        place = self.axes[axis].index(peer)
        return Message(op, axis, place, given["tensor"].nbytes, handle, channel, given["tag"])

    def _axis_of(self, group: dist.ProcessGroup) -> str:
        """Its axis; "" for a rank that is alone in a group on none of them, and sends nothing."""
        ranks = dist.get_process_group_ranks(group)
        if group.group_name in self.names:
            return self.names[group.group_name]
        found = [axis for axis, others in self.axes.items() if others == ranks]
        if len(ranks) == 1:
            return ""
        if len(found) != 1:
            raise ValueError(
                f"a group of ranks {ranks} is on {len(found)} of the axes {self.axes}: name its "
                "axis in Recorder(groups), as in {'dp+tp': group} for one along two axes"
            )
        return found[0]

    def _new_handle(self) -> int:
        self.num_handles += 1
        return self.num_handles

    def wait(self, work: dist.Work, handle: int | None, *args: object) -> object:
        """Wait, and write it down; `handle` is None where that has been done before."""
        self._stops()
        result = work.wait(*args)
        if handle is not None:
            self.events.append(Wait(handle))
        self._goes_on()
        return result


class RecordedWork:
    """What an asynchronous call returns, with a wait that is written down."""

    def __init__(self, work: dist.Work, recorder: Recorder, handle: int) -> None:
        """Stand for `work`."""
        self._work, self._recorder, self._handle = work, recorder, handle

    __class__ = property(lambda self: type(self._work))  # for isinstance(work, dist.Work)

    def wait(self, *args: object) -> object:
        """Wait for the work."""
        handle, self._handle = self._handle, None
        return self._recorder.wait(self._work, handle, *args)

    def __getattr__(self, name: str) -> object:
        return getattr(self._work, name)


def _nbytes(given: Tensor | list[Tensor] | None) -> int:
    tensors = [given] if isinstance(given, Tensor) else given or []
    return sum(tensor.nbytes for tensor in tensors)


def calls(events: list[Event]) -> Counter[str]:
    """How often each operation was called, as the ledger counts them."""
    return Counter(event.op for event in events if isinstance(event, Message | Collective))
