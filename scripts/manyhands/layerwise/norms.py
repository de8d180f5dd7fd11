"""Norms of whole tensors of which every rank holds a part.

    rank 0: [a . . .] [b .]   --> squares of its parts --+
    rank 1: [. . . a] [. . b] --> squares of its parts --+--> sum, root: |a| and |b| on all ranks

A layer-wise optimizer scales each layer by the norm of the whole layer. A rank that used the norm
of its own part would take a step of another length than its neighbours, so the layer would be
pulled apart along the edges of the shards. Price: one all-reduce of 8 bytes per tensor.
Source: https://arxiv.org/abs/1910.02054 (ZeRO: what is sharded). DTensor computes the same norms,
with a message for each tensor.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


def shard_norms(
    shards: Sequence[Tensor], group: dist.ProcessGroup | None = None, order: float = 2.0
) -> Tensor:
    """The norm of every tensor of which each rank of the group holds a part.

    Parts may be uneven, and empty. All norms travel in one message.

    Args:
        shards: this rank's part of each tensor, in the same order on every rank; left as they are.
        order: 2 for the root of the sum of squares, math.inf for the largest absolute value.

    Returns: one norm for each tensor, the same on all ranks, in float64. (len(shards),)
    """
    largest = order == math.inf
    if largest:
        parts = [shard.abs().max() if shard.numel() else shard.new_zeros(()) for shard in shards]
    else:
        parts = [torch.linalg.vector_norm(shard, dtype=torch.float64).square() for shard in shards]
    norms = torch.stack(parts).double()
    dist.all_reduce(norms, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    return norms if largest else norms.sqrt()


def whole_norms(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """The norm of every tensor, whichever way it is stored: whole, sharded by hand, or a DTensor.

    Args:
        tensors: plain ones are parts over `group`, or whole where there is none; a DTensor knows
            over which ranks it is sharded, along one dimension of its mesh or along several.

    Returns: numbers of float64 without dimensions.

    Raises:
        ValueError: a DTensor whose parts still have to be added up ("Partial") has no norm yet.
    """
    by_groups: dict[tuple, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_groups.setdefault(_sharded_over(tensor, group), []).append(index)
    norms: dict[int, Tensor] = {}
    for groups, indices in by_groups.items():
        parts = [_local(tensors[index]) for index in indices]
        found = torch.stack([torch.linalg.vector_norm(p, dtype=torch.float64) for p in parts])
        for one in groups:  # the norm of the parts' norms is the norm of the whole
            found = shard_norms(list(found), one)
        norms |= zip(indices, found.unbind(), strict=True)
    return [norms[index] for index in range(len(tensors))]


def added_up(tensor: Tensor) -> Tensor:
    """A DTensor whose parts still have to be added up ("Partial") as their sum; others unchanged.

    Such are the gradients of a norm under torch's SequenceParallel. Price: an all-reduce of it.
    """
    if not isinstance(tensor, DTensor) or not any(one.is_partial() for one in tensor.placements):
        return tensor
    places = [Replicate() if one.is_partial() else one for one in tensor.placements]
    return tensor.redistribute(placements=places)


def _sharded_over(tensor: Tensor, group: dist.ProcessGroup | None) -> tuple:
    """The process groups over which the tensor is divided: all but those that hold copies of it.

    Under tensor parallelism `fully_shard` gives its own kind of placement, which is no `Shard`.
    """
    if not isinstance(tensor, DTensor):
        return (group,) if group is not None else ()
    if any(place.is_partial() for place in tensor.placements):
        raise ValueError(
            f"a DTensor with placements {tensor.placements} has no norm: reduce it first"
        )
    mesh = tensor.device_mesh
    places = enumerate(tensor.placements)
    return tuple(mesh.get_group(number) for number, place in places if not place.is_replicate())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
