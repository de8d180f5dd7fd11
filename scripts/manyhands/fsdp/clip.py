"""Gradient clipping where a rank holds only a part of the gradients: one norm for all ranks.

    norm = sqrt( |shard 0|^2 + |shard 1|^2 + ... )      each rank knows one term of the sum

torch.nn.utils.clip_grad_norm_ of a rank's own shards would take the norm of these alone, which is
smaller, and another one on every rank: the shards would be scaled differently, in silence. Of
DTensors, which fully_shard makes, it takes the norm of the whole.

Price: one all-reduce of a single number for each group.
Source: Pascanu et al. 2013, https://arxiv.org/abs/1211.5063, section 3.2 (clipping by the norm).
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.collectives.trees import Group, device_of


def clip_grad_norm(
    parts: Iterable[nn.Parameter],
    max_norm: float,
    groups: Sequence[Group] = (None,),
    copies: Iterable[nn.Parameter] = (),
) -> Tensor:
    """Scale the gradients in place, so that the norm of all of them is at most `max_norm`.

    Args:
        parts: parameters whose gradients this rank alone holds, among the ranks of `groups`:
            shards of FSDP, a stage of a pipeline, the parts of tensor parallelism. May be empty, as
            for a stage of activations only.
        groups: over which the parts are spread, such as the shards' group and the pipeline.
        copies: parameters with the same gradient on all these ranks; they count once.

    Returns:
        The norm before it was clipped, a scalar, the same on every rank.
    """
    mine = [*parts]
    shared = [*copies]
    device = device_of([*mine, *shared], groups[0] if groups else None)
    total = sum_of_squares(mine, device)
    for group in groups:
        dist.all_reduce(total, group=group)
    norm = total.add_(sum_of_squares(shared, device)).sqrt() if shared else total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for param in [*mine, *shared]:
        if param.grad is not None:
            param.grad *= scale
    return norm


def sum_of_squares(params: Iterable[nn.Parameter], device: torch.device) -> Tensor:
    """The sum of the squares of all gradients, a scalar in float64; 0 where there is none.

    vector_norm reads numbers of 32 bits and adds up in float64, without a copy in 64 bits.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for param in params:
        if param.grad is not None:
            total += torch.linalg.vector_norm(param.grad, dtype=torch.float64).square()
    return total
