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
from torch.autograd.function import FunctionCtx, once_differentiable

from manyhands.collectives.trees import Group
from manyhands.fsdp.flat import all_gather
from manyhands.tensor.replaced import refuse_extras

Region = Callable[[Tensor, Group], Tensor]  # enter(x, group) or leave(part, group)


class CopyToRanks(Function):
    """f: every rank uses the same input, so its gradient is the sum of what comes back."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: Group = None) -> Tensor:
        """Return x as it is."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
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
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient as it is, and None for the group."""
        return grad, None


def part_of(rank: int, n: int, size: int, unit: int = 1) -> range:
    """One rank's part of 0 ... size - 1; the parts of all n ranks follow one another.

    Args:
        unit: what must stay together, such as the rows of one head; `size` is a multiple of it.
            The parts are as equal as whole units allow: the first ones have one more.

    Raises:
        ValueError: fewer units than ranks.
    """
    units = size // unit
    if units < n:
        raise ValueError(f"{units} units of {unit} cannot be cut over {n} ranks: take fewer ranks")
    share, rest = divmod(units, n)
    first = rank * share + min(rank, rest)
    return range(first * unit, (first + share + (rank < rest)) * unit)


def my_range(size: int, unit: int = 1, group: Group = None) -> range:
    """This rank's part, as `part_of` gives it."""
    return part_of(dist.get_rank(group), dist.get_world_size(group), size, unit)


def my_part(weight: Tensor, dim: int, unit: int = 1, group: Group = None) -> nn.Parameter:
    """This rank's part of `weight` along `dim`, as a parameter with memory of its own."""
    mine = my_range(weight.shape[dim], unit, group)
    part = weight.detach().narrow(dim, mine.start, len(mine)).clone()
    return nn.Parameter(part, requires_grad=weight.requires_grad)


class GatherFeatures(Function):
    """Every rank gets all features, and all do the same with them: each keeps its part's gradient.

    Price: an all-gather forward, nothing backward. Uneven parts travel in the size of the largest.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, part: Tensor, parts: list[range], group: Group = None) -> Tensor:
        """Return the whole (B, T, F) of parts (B, T, F/N); `parts` are those of all ranks."""
        ctx.mine = parts[dist.get_rank(group)]
        padded = F.pad(part, (0, len(parts[0]) - len(ctx.mine)))
        everything = padded.new_empty(len(parts) * len(padded), *padded.shape[1:])
        all_gather(everything, padded.contiguous(), group).wait()
        pairs = zip(everything.chunk(len(parts)), parts, strict=True)
        return torch.cat([values[..., : len(one)] for values, one in pairs], dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of this rank's part, (B, T, F/N), and None for the rest."""
        return grad[..., ctx.mine.start : ctx.mine.stop], None, None


class ColumnLinear(nn.Module):
    """A linear layer cut by output features: x (B, T, D) to this rank's part (B, T, F/N)."""

    def __init__(
        self,
        linear: nn.Linear,
        unit: int = 1,
        enter: Region = CopyToRanks.apply,
        group: Group = None,
        gather_output: bool = False,
    ) -> None:
        """Take this rank's part of weight (F, D) and bias (F,); `unit` rows stay together.

        With `gather_output` what forward returns is gathered: (B, T, F) on every rank.
        """
        super().__init__()
        refuse_extras(linear, nn.Linear)
        self.enter, self.group = enter, group
        self.weight = my_part(linear.weight, 0, unit, group)
        self.bias = None if linear.bias is None else my_part(linear.bias, 0, unit, group)
        if gather_output:
            n = dist.get_world_size(group)
            parts = [part_of(rank, n, linear.out_features, unit) for rank in range(n)]
            self.register_forward_hook(lambda _, __, y: GatherFeatures.apply(y, parts, group))

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
        refuse_extras(linear, nn.Linear)
        self.leave, self.group = leave, group
        self.weight = my_part(linear.weight, 1, unit, group)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, (B, T, D), on every rank; the bias is added once."""
        total = self.leave(F.linear(x, self.weight), self.group)
        return total if self.bias is None else total + self.bias
