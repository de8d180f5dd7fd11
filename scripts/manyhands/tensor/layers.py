"""Tensor parallelism: every layer's matrix is cut over ranks, and every rank sees every token.

    y = gelu(x A) B       A is cut by columns, B by rows: A = [A0 A1], B = [B0; B1]

    x --f--> gelu(x A0) B0 --+        f: copy forward, all-reduce backward
                             g--> y   g: all-reduce forward, copy backward
    x --f--> gelu(x A1) B1 --+

What follows a cut by columns works on its own columns, so gelu and whole heads of attention need no
message. Price: a rank holds 1/N of the matrices and of what is between them; an MLP or an attention
all-reduces x once forward and once backward: 2 x 2 (N-1)/N x 4BTD bytes sent by each rank.

B sequences, T positions, D width, F inner width, N ranks. nn.Linear keeps its matrix the other way
round, (out, in): its columns are the rows of `weight`.
Source: Shoeybi et al. 2019, "Megatron-LM", https://arxiv.org/abs/1909.08053, section 3.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from manyhands.collectives.trees import Group

Region = Callable[[Tensor, Group], Tensor]  # enter(x, group) or leave(part, group)


class CopyToRanks(Function):
    """f: every rank uses the same input, so its gradient is the sum of what comes back."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: Group = None) -> Tensor:
        """Return x as it is."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        """Return the sum of all ranks' gradients, and None for the group.

        `grad` stays as it is. It may be a transposed view on one rank and contiguous on another,
        and a sum of copies needs the same order of elements in memory on all of them.
        """
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class SumOverRanks(Function):
    """g: each rank has one term of a sum that all use alike; each term has the sum's gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: Group = None) -> Tensor:
        """Return the sum of all ranks' x, which stays as it is.

        As in backward of f, x may be a transposed view on one rank only.
        """
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient as it is, and None for the group."""
        return grad, None


def my_range(size: int, unit: int = 1, group: Group = None) -> range:
    """This rank's part of 0 ... size - 1; the parts of all ranks follow one another.

    Args:
        unit: what must stay together, such as the rows of one head; `size` is a multiple of it.
            The parts are as equal as whole units allow: the first ones have one more.

    Raises:
        ValueError: fewer units than ranks.
    """
    rank, n, units = dist.get_rank(group), dist.get_world_size(group), size // unit
    if units < n:
        raise ValueError(f"{units} units of {unit} cannot be cut over {n} ranks: take fewer ranks")
    share, rest = divmod(units, n)
    first = rank * share + min(rank, rest)
    return range(first * unit, (first + share + (rank < rest)) * unit)


def my_part(weight: Tensor, dim: int, unit: int = 1, group: Group = None) -> nn.Parameter:
    """This rank's part of `weight` along `dim`, as a parameter with memory of its own."""
    mine = my_range(weight.shape[dim], unit, group)
    part = weight.detach().narrow(dim, mine.start, len(mine)).clone()
    return nn.Parameter(part, requires_grad=weight.requires_grad)


class ColumnLinear(nn.Module):
    """A linear layer cut by output features: x (B, T, D) to this rank's part (B, T, F/N)."""

    def __init__(
        self,
        linear: nn.Linear,
        unit: int = 1,
        enter: Region = CopyToRanks.apply,
        group: Group = None,
    ) -> None:
        """Take this rank's part of weight (F, D) and bias (F,); `unit` rows stay together."""
        super().__init__()
        self.enter, self.group = enter, group
        self.weight = my_part(linear.weight, 0, unit, group)
        self.bias = None if linear.bias is None else my_part(linear.bias, 0, unit, group)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's part of the output, (B, T, F/N)."""
        return F.linear(self.enter(x, self.group), self.weight, self.bias)


class RowLinear(nn.Module):
    """A linear layer cut by input features: this rank's x (B, T, F/N) to the whole (B, T, D)."""

    def __init__(
        self,
        linear: nn.Linear,
        unit: int = 1,
        leave: Region = SumOverRanks.apply,
        group: Group = None,
    ) -> None:
        """Take this rank's part of weight (D, F), whose units are columns, and the whole bias (D,).

        Sets self.leave, group, weight (D, F/N) and bias, which is that of `linear`: None where it
        has none.
        """
        super().__init__()
        self.leave, self.group = leave, group
        self.weight = my_part(linear.weight, 1, unit, group)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, (B, T, D), on every rank; the bias is added once."""
        total = self.leave(F.linear(x, self.weight), self.group)
        return total if self.bias is None else total + self.bias
