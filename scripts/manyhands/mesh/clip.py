"""Gradient clipping over a mesh: one norm of the whole gradient, in which each number counts once.

    rank 0   shard of A0 | shard of norms     A: cut over tp, each number is on one rank
    rank 1   shard of A1 | shard of norms     norms: whole, the same numbers on both tensor ranks

    norm^2 = sum over ranks of ( |A part|^2 / 1 + |norms part|^2 / 2 )

A rank's own norm would be too small, and another one on every rank; the plain sum over ranks would
count norms, positions, replicas, and a matrix that two stages share, too often. By its own norm
each rank would scale differently, by the plain sum all would scale too much; neither is an error.

Price: one all-reduce of one number over all ranks, and one reading of the gradients.
Sources: Pascanu et al. 2013, https://arxiv.org/abs/1211.5063, section 3.2;
https://github.com/pytorch/torchtitan, clip_grad_norm_ of distributed/utils.py.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.collectives.trees import Group, device_of
from manyhands.mesh.training import MeshTraining

Parts = Sequence[tuple[Tensor, int]]


def mesh_norm(parts: Parts, group: Group = None) -> Tensor:
    """The norm of the whole gradient, of which each rank holds parts; the same on every rank.

    It is the root of the sum of the squares of all numbers, each counted once. Squares are added up
    in float64, without a copy of the gradient in it, and one all-reduce sends one number.

    Args:
        parts: of this rank, (gradient, holders): how many ranks of `group`, this one among them,
            hold the very same numbers. May be empty, and differ in number from rank to rank.

    Returns:
        A scalar in float64.
    """
    device = parts[0][0].device if parts else None
    total = torch.zeros((), dtype=torch.float64, device=device)
    for grad, holders in parts:
        total += torch.linalg.vector_norm(grad, dtype=torch.float64).square() / holders
    dist.all_reduce(total, group=group)
    return total.sqrt()


def clip_on_mesh(
    training: MeshTraining, max_norm: float, mesh_norm: Callable[[Parts], Tensor] = mesh_norm
) -> Tensor:
    """Scale all gradients in place, so that the norm of the whole is at most `max_norm`.

    After `training.finish()`; the mesh has to be all ranks. Returns the norm before it was clipped.
    """
    parts = training.gradients()
    if not parts:  # a rank without gradients takes part as well, on its own device
        nothing = torch.zeros((), device=device_of(training.parameters()))
        parts = [(nothing, 1)]
    norm = mesh_norm(parts)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad, _ in parts:
        grad *= scale
    return norm
