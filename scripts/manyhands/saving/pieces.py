"""Pieces: where the part of a tensor that a rank holds lies in the whole.

    w, shape (6, 4)    rank 0 holds the box at offset (0, 0) of size (3, 4)
                       rank 1 holds the box at offset (3, 0) of size (3, 4)

A tensor that every rank holds whole is one box, held by all. Whatever shards a tensor, the disk
needs to know of it only where each rank's box lies. So a state can be saved by four ranks and
loaded by three: each copies what its own boxes have in common with the stored ones.

Price: no bytes; a Piece refers to the memory that the training uses.
Source: PyTorch's Distributed Checkpoint does the same (ChunkStorageMetadata),
https://docs.pytorch.org/docs/stable/distributed.checkpoint.html.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


class Box(NamedTuple):
    """A part of a tensor with straight sides: where it begins and how long each side is."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    def within(self, offset: Sequence[int]) -> tuple[slice, ...]:
        """The slices that cut this box out of a tensor that itself begins at `offset`."""
        starts = [mine - theirs for mine, theirs in zip(self.offset, offset, strict=True)]
        return tuple(
            slice(start, start + length) for start, length in zip(starts, self.size, strict=True)
        )


@dataclass(frozen=True)
class Piece:
    """This rank's part of a larger tensor.

    Args:
        tensor: the part itself, in the memory that the training uses; loading writes into it.
        offset: where it begins in the whole, a number for each dimension.
        shape: of the whole.
    """

    tensor: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        return Box(self.offset, tuple(self.tensor.shape))


class Parts(tuple):
    """Several Pieces of one tensor, all those that this rank holds; there may be none."""


def overlap(first: Box, second: Box) -> Box | None:
    """The box that two boxes of one tensor have in common; None where they share no number.

    Boxes that only touch have nothing in common. Boxes of a scalar, which has no dimensions, have
    the scalar in common.
    """
    sides = list(zip(*first, *second, strict=True))
    starts = tuple(max(offset, other) for offset, _, other, _ in sides)
    ends = tuple(min(offset + size, other + length) for offset, size, other, length in sides)
    size = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return None if any(length <= 0 for length in size) else Box(starts, size)


# ---- what is held in parts, as pieces ------------------------------------------------------------


@runtime_checkable
class ShardedVector(Protocol):
    """Parameters as one vector, of which each of N ranks owns an equal part; FSDP has such."""

    whole: Tensor  # (padded P,), on all ranks; its memory may be given back
    shard: nn.Parameter  # (padded P/N,), what this rank owns of it
    padding: Tensor  # the zeros at its end
    group: torch.distributed.ProcessGroup | None


def vectors_of(model: nn.Module) -> list[ShardedVector]:
    """The sharded vectors of a model that keeps its parameters so: its `units`, lists of them.

    A module may have `units` of another kind: they count only if all are vectors whose shards are
    its parameters.
    """
    units = getattr(model, "units", None)
    if not isinstance(units, list) or not all(isinstance(unit, list) for unit in units):
        return []
    found = list(chain(*units))
    own = set(model.parameters())
    is_sharded = all(isinstance(one, ShardedVector) and one.shard in own for one in found)
    return found if is_sharded else []


def of_replica(tensor: Tensor) -> Piece:
    """A tensor that this rank holds all of."""
    return Piece(tensor, (0,) * tensor.dim(), tuple(tensor.shape))


def of_vector(vector: ShardedVector, part: Tensor) -> Piece:
    """`part`, (padded P/N,), of this rank's shard, or of what an optimizer keeps for that.

    The padding at the end depends on the number of ranks, so it is no part of the state.
    """
    numel = vector.whole.numel() - len(vector.padding)
    offset = min(torch.distributed.get_rank(vector.group) * len(part), numel)
    return Piece(part[: min(len(part), numel - offset)], (offset,), (numel,))


def of_dtensor(tensor: Tensor) -> Piece:
    """This rank's part of a DTensor, as fully_shard and parallelize_module make them.

    Two dimensions of a mesh may cut the same dimension of the tensor, one after the other: first as
    the mesh has them, and then those that are marked as strided. With FSDP of what tensor
    parallelism has cut, the mark is on the first one, because the second has cut before it.

    Raises:
        ValueError: what the rank holds is not one box, or is a term of a sum.
    """
    local, mesh = tensor.to_local(), tensor.device_mesh
    cuts = [(i, place) for i, place in enumerate(tensor.placements) if not place.is_replicate()]
    strided = [cut for cut in cuts if hasattr(cut[1], "split_factor")]
    offset, size = [0] * tensor.dim(), list(tensor.shape)
    for mesh_dim, place in [cut for cut in cuts if cut not in strided] + strided[::-1]:
        dim = getattr(place, "dim", None)
        if dim is None:
            break
        share = -(-size[dim] // mesh.size(mesh_dim))
        before = min(mesh.get_local_rank(mesh_dim) * share, size[dim])
        offset[dim] += before
        size[dim] = min(share, size[dim] - before)
    if tuple(size) != tuple(local.shape):
        raise ValueError(f"a tensor with placements {tensor.placements} is not one box a rank")
    return Piece(local, tuple(offset), tuple(tensor.shape))


def is_dtensor(tensor: Tensor) -> bool:
    """Is it a tensor of which every rank holds a part?"""
    return hasattr(tensor, "to_local")  # to import the class takes 0.6 s


def model_state(
    model: nn.Module, vectors: Sequence[ShardedVector] = (), is_own: bool = False
) -> dict[str, Piece]:
    """The weights and buffers of a model by name, those in `vectors` as this rank's parts.

    Where they are the rank's own, its part of a DTensor counts as a whole.
    """
    params = dict(model.named_parameters(remove_duplicate=False))
    cut = {vector.shard: vector for vector in vectors}
    return {
        name: piece_of(tensor.detach(), cut.get(params.get(name)), is_own)
        for name, tensor in model.state_dict().items()
    }


def piece_of(tensor: Tensor, vector: ShardedVector | None = None, is_own: bool = False) -> Piece:
    """This rank's piece of a tensor: of a vector's, of a DTensor, or of one that it holds whole."""
    if vector is not None:
        return of_vector(vector, tensor)
    if is_dtensor(tensor):
        return of_replica(tensor.to_local()) if is_own else of_dtensor(tensor)
    return of_replica(tensor)
