"""Shards as an optimizer gets them: what it cannot know of them, they say themselves.

    num_layers    a shard holds parts of so many layers, of which an optimizer of lesson 08 would
                  take the one norm of all: it refuses where there are several
    GradScaler    of PyTorch looks for overflows in the gradients of its own rank only. One rank
                  would skip a step that the others take, and their weights would be of two steps

The gradient of a shard takes part in that search: what a rank has found is sent to all others that
have parts of the same vector. Price: a message of one number for each type of gradient and step.
Source: DTensor does the same for fully_shard; ShardedGradScaler of torch.distributed.fsdp does it
for shards that do not.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.collectives.trees import Group

SEARCH = torch._amp_foreach_non_finite_check_and_unscale_  # (gradients, found, 1 / scale)


class Shard(nn.Parameter):
    """A parameter whose .grad is a ShardGradient; `group` are the ranks that have its vector."""

    group: Group

    @property
    def grad(self) -> Tensor | None:
        found = Tensor.grad.__get__(self)
        if type(found) is not Tensor or "group" not in vars(self):  # none, or that of a copy
            return found
        found = found.as_subclass(ShardGradient)
        found.group = self.group
        return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        Tensor.grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        Tensor.grad.__delete__(self)


class ShardGradient(Tensor):
    """A tensor as any other, but that overflows are looked for on all ranks of `group`."""

    group: Group

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
            if function is SEARCH:
                grads, found = args[:2]
                for group in {grad.group for grad in grads if isinstance(grad, ShardGradient)}:
                    dist.all_reduce(found, dist.ReduceOp.MAX, group)
        return result


def mark_shard(shard: nn.Parameter, num_layers: int, group: Group) -> None:
    """Make this a Shard, in place: it stays the same object, with its hooks."""
    shard.num_layers = num_layers
    if type(shard) is nn.Parameter:
        shard.__class__ = Shard
        shard.group = group
