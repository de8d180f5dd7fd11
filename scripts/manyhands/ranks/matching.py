"""Do two ranks' calls fit each other by NCCL's rules? What is wrong is said in one line.

NCCL knows no tags and no names. The k-th operation of two ranks in a group meets the other's k-th,
and the k-th collective of a group that of every other rank, whatever they are. Sizes and types are
not compared there: a mistake is a hang, or wrong numbers. Here they are.

Sources: https://docs.pytorch.org/docs/stable/distributed.html, "Point-to-point communication";
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/p2p.html.
"""

import ast
from collections.abc import Iterable
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from manyhands.ranks.failures import BadInput, Frame, where

# ProcessGroupNCCL's table of types, without the 8-bit floats.
TYPES = "float32 float64 float16 bfloat16 int8 int32 int64 uint8 bool".split()


class Breach(BadInput):
    """A rule that was broken: one line with a place {} for each source line."""

    def __init__(self, told: str, frames: Iterable[Frame]) -> None:
        """`frames` are those of the places."""
        self.told, self.frames = told, list(frames)
        super().__init__(tell(told, self.frames))


def tell(told: str, frames: Iterable[Frame]) -> str:
    """Put source lines into their places. In a notebook only the kernel knows their text."""
    return told.format(*(" ".join(where(frame).split()) for frame in frames))


@dataclass(frozen=True)
class Call:
    """One rank's side of a message or a collective."""

    rank: int
    op: str  # isend, all_reduce, ...
    number: int  # 1 for the first in its queue
    frame: Frame
    peer: int = -1  # of a message
    tag: int = 0
    sizes: tuple[int, ...] = ()  # numbers of elements that all ranks must agree on
    dtype: str = ""
    details: str = ""  # of a collective: its root, its reduction, the ranks of a new group

    def __str__(self) -> str:
        """For people; a place is left for the line."""
        details = f" {self.details}" if self.details else ""
        return f"{self.words}{details} ({{}})"

    @property
    def words(self) -> str:
        """What it is and with whom: isend to rank 1."""
        whom = f" {'to' if self.is_send else 'from'} rank {self.peer}" if self.peer >= 0 else ""
        return self.op + whom

    @property
    def is_send(self) -> bool:
        """Does it send a message?"""
        return self.op.endswith("send")

    @property
    def size(self) -> str:
        """How much it carries."""
        return f"{' + '.join(map(str, self.sizes))} numbers of type {self.dtype}"

    def pack(self) -> str:
        """As text, for the store; `unpack` is the way back."""
        return repr(astuple(self))


def unpack(text: str) -> Call:
    """The call that `pack` wrote."""
    return Call(*ast.literal_eval(text))


def compare(one: Call, other: Call) -> None:
    """Raise Breach unless two calls that NCCL would bring together belong together."""
    one, other = sorted((one, other), key=lambda call: call.rank)
    both = f"rank {one.rank} calls {one}, and rank {other.rank} calls {other}"
    frames = [one.frame, other.frame]
    if one.peer >= 0:
        _compare_messages(one, other, both, frames)
    elif (one.op, one.details) != (other.op, other.details):
        rule = "collective" if one.op != "new_group" or other.op != "new_group" else "new_group"
        told = f"number {one.number} of their group"
        if rule == "new_group":
            told = f"new group number {one.number}"
        remedy = "every rank has to make the same calls, with the same arguments, in the same order"
        raise Breach(f"{rule}: as {told}, {both}: {remedy}", frames)
    if one.dtype != other.dtype:
        types = f"here {one.dtype} meets {other.dtype}"
        raise Breach(f"type: {both}: both ends need one type, but {types}: convert one", frames)
    if one.sizes != other.sizes:
        told = f"{one.size} and {other.size}"
        remedy = "NCCL would not notice: give both ends tensors of one size"
        raise Breach(f"size: {both}, with {told}: {remedy}", frames)


def _compare_messages(one: Call, other: Call, both: str, frames: list[Frame]) -> None:
    if one.is_send == other.is_send:
        does = "send" if one.is_send else "receive"
        raise Breach(
            f"order: as operation {one.number} of these two ranks in their group, {both}: both "
            f"{does}, and each would wait for the other: let one of them {does} second, put both "
            "messages into one batch_isend_irecv, or give one direction a group of its own",
            frames,
        )
    if one.tag != other.tag:
        raise Breach(
            f"tags: as operation {one.number} of these two ranks in their group, {both}, with tags "
            f"{one.tag} and {other.tag}: NCCL knows no tags, so the message would land there: "
            "receive in the order of the sends",
            frames,
        )


def check_tensors(op: str, tensors: Iterable[Tensor], frame: Frame, rank: int) -> None:
    """Raise Breach for a tensor that NCCL cannot carry as it lies in memory."""
    for tensor in tensors:
        if not _is_whole(tensor):
            told = f"has shape {tuple(tensor.shape)} and strides {tensor.stride()}"
            raise Breach(
                f"memory: a tensor that rank {rank} gives to {op} ({{}}) {told}: NCCL needs one "
                "contiguous piece of memory: pass tensor.contiguous(), and copy a result back",
                [frame],
            )
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in TYPES and "float8" not in dtype and not tensor.is_complex():
            raise Breach(
                f"type: rank {rank} gives {dtype} to {op} ({{}}): NCCL carries only "
                f"{', '.join(TYPES)}: convert it before",
                [frame],
            )


def _is_whole(tensor: Tensor) -> bool:
    """Does it lie in one piece, in the order of its elements, or of an image's channels?"""
    if tensor.is_contiguous():
        return True
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def check_reduction(name: str, op: object, frame: Frame, rank: int) -> None:
    """Raise Breach for a reduction that NCCL does not know."""
    if any(str(op).endswith(word) for word in (".BAND", ".BOR", ".BXOR")):
        told = f"rank {rank} calls {name} with {op} ({{}})"
        raise Breach(f"type: {told}: NCCL has no reduction by bits: use MIN or MAX", [frame])


def type_of(tensors: Iterable[Tensor]) -> str:
    """The type of the first tensor, as text."""
    first = next(iter(tensors), torch.empty(0))
    return str(first.dtype).removeprefix("torch.")
