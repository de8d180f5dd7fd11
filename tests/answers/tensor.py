"""Answers to 13.1 to 13.4, 13.11 and 13.12 as students give them: RIGHT ones differ from the
course's own, and WRONG ones come with words that the verdict must hold. The others stand in
_vocabulary.py."""

import copy
import math
from collections import Counter

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function

from manyhands.checks import Pair
from manyhands.tensor import layers, model
from manyhands.tensor.layers import ColumnLinear, CopyToRanks, RowLinear, SumOverRanks, my_part

from . import _split_model, _vocabulary

RIGHT: dict[str, list] = {
    "13.1": [Pair(CopyToRanks, SumOverRanks)],
    "13.2": [layers.my_range],
    "13.3": [Pair(ColumnLinear, RowLinear)],
    "13.4": [model.cut_block],
    "13.11": [model.data_place],
    "13.12": [model.calls_per_step],
}
WRONG: dict[str, list] = {todo: [] for todo in RIGHT}


def right(todo):
    return lambda answer: RIGHT[todo].append(answer) or answer


def wrong(todo, words):
    return lambda answer: WRONG[todo].append((answer, words)) or answer


# ---- 13.1 CopyToRanks, SumOverRanks ---------------------------------------------------------


def summed(x, group):
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total


def region(forward, backward, keep=True):
    """A Function; forward(x, group) and backward(grad, group)."""

    class Region(Function):
        @staticmethod
        def forward(ctx, x, group=None):
            if keep:
                ctx.group = group
            return forward(x, group)

        @staticmethod
        def backward(ctx, grad):
            return backward(grad, ctx.group if keep else None)

    return Region


def same(x, group):
    return x


def back(grad, group):
    return grad, None


def summed_back(grad, group):
    return summed(grad, group), None


def f(forward=same, backward=summed_back, **options):
    return Pair(region(forward, backward, **options), SumOverRanks)


def g(forward=summed, backward=back, **options):
    return Pair(CopyToRanks, region(forward, backward, **options))


def gathered(x, group):
    parts = [torch.empty_like(x.contiguous()) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.stack(parts).sum(0)


def in_two_steps(grad, group):
    total = grad.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group, async_op=True).wait()
    return total, None


RIGHT["13.1"] += [
    Pair(region(same, in_two_steps), region(gathered, back)),
    Pair(
        region(lambda x, group: x.detach(), lambda grad, group: (gathered(grad, group), None)),
        region(summed, lambda grad, group: (grad.clone(), None)),
    ),
]


def in_place(x, group):
    dist.all_reduce(x, group=group)
    return x


def contiguous_in_place(grad, group):
    grad = grad.contiguous()
    dist.all_reduce(grad, group=group)
    return grad, None


def not_waited(x, group):
    total = x.clone()
    dist.all_reduce(total, group=group, async_op=True)
    return total


def only_rank_0(grad, group):
    total = grad.clone()
    if dist.get_rank(group) == 0:
        dist.all_reduce(total, group=group)
    return total, None


def mean_of(x, group):
    return summed(x, group) / dist.get_world_size(group)


def in_group(summing):
    """Ignores the group in one of the two."""
    return lambda x, group: summing(x, None)


class SavesTheGroup(Function):
    @staticmethod
    def forward(ctx, x, group=None):
        ctx.save_for_backward(group)
        return x

    @staticmethod
    def backward(ctx, grad):
        (group,) = ctx.saved_tensors
        return summed(grad, group), None


class KeepsNoGroup(Function):
    @staticmethod
    def forward(ctx, x, group=None):
        return x

    @staticmethod
    def backward(ctx, grad):
        return summed(grad, ctx.group), None


WRONG["13.1"] += [
    (f(forward=summed), "f sums forward: its input is the same on all ranks already"),
    (f(forward=in_place), "f sums forward: its input is the same on all ranks already"),
    (f(backward=back), "f copies backward, too"),
    (f(backward=lambda grad, group: (mean_of(grad, group), None)), "a mean: it is the ranks'"),
    (f(backward=lambda grad, group: (in_place(grad, group), None)), "the gradient that it was"),
    (f(backward=contiguous_in_place), "contiguous() makes no copy of what is contiguous"),
    (f(backward=lambda grad, group: (summed(grad, None), None)), "`group` is not passed on"),
    (f(keep=False), "`group` is not passed on"),
    (f(backward=summed), "backward returns a gradient for each argument of forward"),
    (f(backward=lambda grad, group: (None, None)), "backward returns no gradient for x"),
    (
        f(backward=lambda grad, group: (dist.all_reduce(grad.clone(), group=group), None)),
        "all_reduce itself returns None",
    ),
    (f(backward=only_rank_0), "on every rank (no `if rank == 0`)"),
    (g(forward=lambda x, group: only_rank_0(x, group)[0]), "on every rank (no `if rank == 0`)"),
    (Pair(SavesTheGroup, SumOverRanks), "save_for_backward is for tensors only"),
    (Pair(KeepsNoGroup, SumOverRanks), "backward asks for what forward did not keep"),
    (Pair(SumOverRanks, CopyToRanks), "f sums forward"),
    (g(backward=summed_back), "so this is 3 times too large"),
    (g(backward=lambda grad, group: (grad / dist.get_world_size(group), None)), "divided by"),
    (g(forward=mean_of), "a mean: it is the ranks' parts that are added up"),
    (g(forward=in_place), "forward changed x itself"),
    (g(forward=not_waited), "not waited for"),  # a part of the sum may have come already
    (g(forward=same), "nothing of the other ranks is in it"),
    (g(forward=in_group(summed)), "`group` is not passed on"),
    (
        g(forward=lambda x, group: dist.all_reduce(x.clone(), group=group)),
        "all_reduce writes into the tensor that it is given, and returns None",
    ),
    (Pair(nn.Identity, nn.Identity), "only an autograd Function has a backward"),
]


# ---- 13.2 my_range --------------------------------------------------------------------------


@right("13.2")
def range_by_counting(size, unit=1, group=None):
    units, n = size // unit, dist.get_world_size(group)
    sizes = [units // n + (1 if rank < units % n else 0) for rank in range(n)]
    if min(sizes) == 0:
        raise ValueError("a rank has nothing")
    rank = dist.get_rank(group)
    return range(sum(sizes[:rank]) * unit, sum(sizes[: rank + 1]) * unit)


@right("13.2")
def range_by_numpy(size, unit=1, group=None):
    if size // unit < dist.get_world_size(group):
        raise ValueError
    mine = np.array_split(np.arange(size // unit), dist.get_world_size(group))
    mine = mine[dist.get_rank(group)]
    return range(int(mine[0]) * unit, (int(mine[-1]) + 1) * unit)


def ranged(first, last, in_units=True, whole=False, refuse=ValueError):
    """A my_range; `first` and `last` take (rank, n, units)."""

    def my_range(size, unit=1, group=None):
        group = None if whole else group
        rank, n, units = dist.get_rank(group), dist.get_world_size(group), size // unit
        if not in_units:
            unit, units = 1, size
        if refuse and units < n:
            raise refuse(f"{units} units for {n} ranks")
        return range(first(rank, n, units) * unit, last(rank, n, units) * unit)

    return my_range


def begins(rank, n, units):
    return rank * (units // n) + min(rank, units % n)


def ends(rank, n, units):
    return begins(rank + 1, n, units)


def as_counts(size, unit=1, group=None):
    part = layers.my_range(size, unit, group)
    return range(part.start // unit, part.stop // unit)


def job_rank(size, unit=1, group=None):
    rank, n, units = dist.get_rank(), dist.get_world_size(group), size // unit
    if units < n:
        raise ValueError
    return range(begins(rank, n, units) * unit, ends(rank, n, units) * unit)


def in_steps(size, unit=1, group=None):
    part = layers.my_range(size, unit, group)
    return range(part.start, part.stop, unit)


def refuses_one_each(size, unit=1, group=None):
    if size // unit <= dist.get_world_size(group):
        raise ValueError("too few")
    return layers.my_range(size, unit, group)


WRONG["13.2"] += [
    (ranged(lambda r, n, u: r * (u // n), lambda r, n, u: (r + 1) * (u // n)), "is nobody's"),
    (
        ranged(
            lambda r, n, u: r * (u // n), lambda r, n, u: (r + 1) * (u // n) if r < n - 1 else u
        ),
        "the last rank takes all of the rest",
    ),
    (
        ranged(lambda r, n, u: r * (u // n), lambda r, n, u: (r + 1) * (u // n) + (r < u % n)),
        "later parts start too early",
    ),
    (ranged(begins, ends, in_units=False), "`unit` is ignored"),
    (as_counts, "these are units"),
    (in_steps, "a range with a step of"),
    (refuses_one_each, "raised ValueError - one unit for each rank is enough"),
    (
        ranged(
            lambda r, n, u: min(r * math.ceil(u / n), u),
            lambda r, n, u: min((r + 1) * math.ceil(u / n), u),
        ),
        "shares are rounded up",
    ),
    (ranged(lambda r, n, u: r * u // n, lambda r, n, u: (r + 1) * u // n), "others than the first"),
    (ranged(begins, lambda r, n, u: ends(r, n, u) - 1), "a range stops before its end"),
    (ranged(begins, ends, refuse=None), "raise ValueError if units < N"),
    (ranged(begins, ends, refuse=AssertionError), "raised AssertionError"),
    (job_rank, "the rank or the size of the job"),
    (ranged(begins, ends, whole=True), "the rank or the size of the job"),
    (
        lambda *args: (lambda part: (part.start, part.stop))(layers.my_range(*args)),
        "a range is asked for",
    ),
    (lambda *args: slice(0, len(layers.my_range(*args))), "a range is asked for"),
    (lambda *args: list(layers.my_range(*args)), "a range is asked for"),
    (lambda *args: range(len(layers.my_range(*args))), "all of them start at 0"),
]

# ---- 13.3 ColumnLinear, RowLinear -----------------------------------------------------------


class ColumnsByEinsum(nn.Module):
    """Cuts by hand, and computes without F.linear."""

    def __init__(self, linear, unit=1, enter=CopyToRanks.apply, group=None):
        super().__init__()
        mine = layers.my_range(linear.out_features, unit, group)
        rows = slice(mine.start, mine.stop)
        self.enter, self.group = enter, group
        self.weight = nn.Parameter(linear.weight[rows].detach().clone())
        bias = None if linear.bias is None else nn.Parameter(linear.bias[rows].detach().clone())
        self.register_parameter("bias", bias)

    def forward(self, x):
        found = torch.einsum("btd,fd->btf", self.enter(x, self.group), self.weight)
        return found if self.bias is None else found + self.bias


class RowsByMatmul(nn.Module):
    def __init__(self, linear, unit=1, leave=SumOverRanks.apply, group=None):
        super().__init__()
        mine = layers.my_range(linear.in_features, unit, group)
        self.leave, self.group = leave, group
        self.weight = nn.Parameter(linear.weight.data[:, mine.start : mine.stop].clone())
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())

    def forward(self, x):
        found = self.leave(x @ self.weight.t(), self.group)
        if self.bias is not None:
            found = found + self.bias
        return found


class ColumnsOfALinear(nn.Linear):
    """A layer of torch's, filled with the part."""

    def __init__(self, linear, unit=1, enter=CopyToRanks.apply, group=None):
        mine = layers.my_range(linear.out_features, unit, group)
        has_bias, rows = linear.bias is not None, slice(mine.start, mine.stop)
        super().__init__(linear.in_features, len(mine), has_bias, dtype=linear.weight.dtype)
        self.enter, self.group = enter, group
        with torch.no_grad():
            self.weight.copy_(linear.weight[rows])
            if has_bias:
                self.bias.copy_(linear.bias[rows])

    def forward(self, x):
        return super().forward(self.enter(x, self.group))


RIGHT["13.3"] += [Pair(ColumnsByEinsum, RowsByMatmul), Pair(ColumnsOfALinear, RowLinear)]


def columns(forward=None, **changes):
    """A ColumnLinear with another forward, or with attributes made in another way."""
    return Pair(changed(ColumnLinear, forward, changes), RowLinear)


def rows(forward=None, **changes):
    return Pair(ColumnLinear, changed(RowLinear, forward, changes))


def changed(kind, forward, changes):
    class Changed(kind):
        def __init__(self, linear, unit=1, region=None, group=None, **named):
            region = {"enter": region} if kind is ColumnLinear and region else named
            super().__init__(linear, unit, group=group, **region)
            for name, make in changes.items():
                delattr(self, name)
                setattr(self, name, make(linear, unit, group))

    if forward:
        Changed.forward = forward
    return Changed


def mine_of(linear, dim, unit, group):
    mine = layers.my_range(linear.weight.shape[dim], unit, group)
    return linear.weight.detach().narrow(dim, mine.start, len(mine))


def drawn_anew(linear, unit, group):
    return nn.Linear(5, len(mine_of(linear, 0, unit, group)), dtype=torch.float64).weight


def bias_early(self, x):
    return self.leave(F.linear(x, self.weight, self.bias), self.group)


def bias_shared(self, x):
    if self.bias is None:
        return self.leave(F.linear(x, self.weight), self.group)
    n = dist.get_world_size(self.group)
    return self.leave(F.linear(x, self.weight, self.bias / n), self.group)


def bias_on_rank_0(self, x):
    bias = self.bias if dist.get_rank(self.group) == 0 else None
    return self.leave(F.linear(x, self.weight, bias), self.group)


def plus_bias(self, total):
    return total if self.bias is None else total + self.bias


def leaves_early(self, x):
    return plus_bias(self, F.linear(self.leave(x, self.group), self.weight))


def enters_rows(self, x):
    x = CopyToRanks.apply(x, self.group)
    return plus_bias(self, self.leave(F.linear(x, self.weight), self.group))


def leaves_by(call):
    return lambda self, x: plus_bias(self, call(self, F.linear(x, self.weight)))


def enters_by(call):
    return lambda self, x: F.linear(call(self, x), self.weight, self.bias)


class NeedsABias(RowLinear):
    def forward(self, x):
        return self.leave(F.linear(x, self.weight), self.group) + self.bias


class CutsNoneBias(ColumnLinear):
    def __init__(self, linear, unit=1, enter=CopyToRanks.apply, group=None):
        super().__init__(linear, unit, enter, group)
        self.bias = my_part(linear.bias, 0, unit, group)


class WithoutSuper(ColumnLinear):
    def __init__(self, linear, unit=1, enter=CopyToRanks.apply, group=None):
        self.weight = my_part(linear.weight, 0, unit, group)


def own_range(size, unit=1, group=None):
    """As a learner may write it: with an error of other words."""
    if size // unit < dist.get_world_size(group):
        raise ValueError("too few")
    return layers.my_range(size, unit, group)


class InLargeUnits(ColumnLinear):
    def __init__(self, linear, unit=1, enter=CopyToRanks.apply, group=None):
        own_range(linear.out_features, linear.out_features, group)
        super().__init__(linear, unit, enter, group)


WRONG["13.3"] += [
    (columns(enters_by(lambda self, x: x)), "each rank's gradient of x is a part"),
    (columns(weight=lambda linear, unit, group: linear.weight), "the whole, on every rank"),
    (
        columns(weight=lambda linear, unit, group: my_part(linear.weight, 1, 1, group)),
        "cut along the wrong dim: nn.Linear keeps (out, in)",
    ),
    (
        columns(weight=lambda linear, unit, group: nn.Parameter(mine_of(linear, 0, unit, group))),
        "a view keeps the whole alive",
    ),
    (
        columns(weight=lambda linear, unit, group: mine_of(linear, 0, unit, group).clone()),
        "no optimizer would find it",
    ),
    (
        columns(
            weight=lambda linear, unit, group: nn.Parameter(
                mine_of(linear, 0, unit, group).t().clone()
            )
        ),
        "turned round",
    ),
    (columns(weight=drawn_anew), "is it drawn anew?"),
    (
        columns(weight=lambda linear, unit, group: my_part(linear.weight, 0, 1, group)),
        "`unit` is ignored",
    ),
    (
        columns(weight=lambda linear, unit, group: my_part(linear.weight, 0, unit)),
        "`group` is not passed on",
    ),
    (columns(bias=lambda linear, unit, group: linear.bias), "the whole, on every rank"),
    (columns(lambda self, x: F.linear(self.enter(x, self.group), self.weight)), "bias is left out"),
    (columns(enters_by(lambda self, x: self.enter(x))), "`enter` and `leave` take two arguments"),
    (
        columns(enters_by(lambda self, x: CopyToRanks.apply(x, self.group))),
        "the `enter` that is given is not used",
    ),
    (columns(enters_by(lambda self, x: self.enter(x, None))), "`group` is not passed on"),
    (Pair(CutsNoneBias, RowLinear), "a layer may have no bias"),
    (Pair(WithoutSuper, RowLinear), "the parameters have no home yet"),
    (rows(bias_early), "the bias is added 3 times"),
    (rows(bias_shared), "1/3: the bias was divided by the ranks"),
    (rows(bias_on_rank_0), "the bias reaches the result on some ranks only"),
    (
        rows(
            bias=lambda linear, unit, group: (
                linear.bias if linear.bias is None else my_part(linear.bias, 0, 1, group)
            )
        ),
        "every rank has the whole bias",
    ),
    (rows(leaves_by(lambda self, part: part)), "`leave` is forgotten"),
    (rows(leaves_early), "`leave` before the product"),
    (rows(enters_rows), "nothing of this gradient is to be summed"),
    (
        rows(weight=lambda linear, unit, group: my_part(linear.weight, 0, 1, group)),
        "cut along the wrong dim: nn.Linear keeps (out, in)",
    ),
    (rows(weight=lambda linear, unit, group: linear.weight), "the whole, on every rank"),
    (
        rows(
            leaves_by(
                lambda self, part: self.leave(part, self.group) / dist.get_world_size(self.group)
            )
        ),
        "a mean: it is the ranks' parts",
    ),
    (rows(leaves_by(lambda self, part: SumOverRanks.apply(part, self.group))), "`leave` that is"),
    (Pair(ColumnLinear, NeedsABias), "a layer may have no bias"),
    (Pair(RowLinear, ColumnLinear), "cut along the wrong dim"),
    (Pair(InLargeUnits, RowLinear), "does my_range find fewer units than ranks?"),
]


# ---- 13.4 cut_block -------------------------------------------------------------------------

f_, g_ = CopyToRanks.apply, SumOverRanks.apply


@right("13.4")
def cut_by_names(block, enter=f_, leave=g_, group=None):
    width = block.attention.head_width
    cuts = {
        "attention.qkv": lambda linear: ColumnLinear(linear, 3 * width, enter, group),
        "attention.out": lambda linear: RowLinear(linear, unit=width, leave=leave, group=group),
        "mlp.up": lambda linear: ColumnLinear(linear, enter=enter, group=group),
        "mlp.down": lambda linear: RowLinear(linear, leave=leave, group=group),
    }
    for name, cut in cuts.items():
        parent, child = name.split(".")
        setattr(block.get_submodule(parent), child, cut(block.get_submodule(name)))


@right("13.4")
def cut_and_return(block, enter=f_, leave=g_, group=None):
    model.cut_block(block, enter, leave, group)
    return block


def cut(qkv=None, out=None, up=None, down=None):
    """A cut_block; each layer may be made in another way: of linear, width, enter, leave, group."""

    def cut_block(block, enter=f_, leave=g_, group=None):
        attention, mlp, w = block.attention, block.mlp, block.attention.head_width
        given = w, enter, leave, group
        attention.qkv = (qkv or columns_of(3))(attention.qkv, *given)
        attention.out = (out or rows_of(1))(attention.out, *given)
        mlp.up = (up or (lambda m, w, e, v, g: ColumnLinear(m, 1, e, g)))(mlp.up, *given)
        mlp.down = (down or (lambda m, w, e, v, g: RowLinear(m, 1, v, g)))(mlp.down, *given)

    return cut_block


def columns_of(times):
    return lambda m, w, e, v, g: ColumnLinear(m, times * w, e, g)


def rows_of(times):
    return lambda m, w, e, v, g: RowLinear(m, times * w, v, g)


def uncut(linear, *given):
    return linear


def cut_a_copy(block, enter=f_, leave=g_, group=None):
    block = copy.deepcopy(block)
    model.cut_block(block, enter, leave, group)
    return block


def cut_norms(block, enter=f_, leave=g_, group=None):
    model.cut_block(block, enter, leave, group)
    block.norm1.weight = my_part(block.norm1.weight, 0, 1, group)


def cut_without_regions(block, enter=f_, leave=g_, group=None):
    model.cut_block(block, group=group)


def cut_without_group(block, enter=f_, leave=g_, group=None):
    model.cut_block(block, enter, leave)


def width_by(read):
    """A cut_block that asks the block for the width of a head in another way."""

    def cut_block(block, enter=f_, leave=g_, group=None):
        width = read(block)
        model.cut_block(block, enter, leave, group)
        return width

    return cut_block


def cut_the_width(block, enter=f_, leave=g_, group=None):
    model.cut_block(block, enter, leave, group)
    block.attention.head_width = block.attention.head_width // dist.get_world_size(group)


def cut_the_width_first(block, enter=f_, leave=g_, group=None):
    cut_the_width(block, enter, leave, group)
    block.attention.head_width = max(1, block.attention.head_width)


def refuses_units(linear, width, enter, leave, group):
    own_range(linear.out_features, linear.out_features, group)
    return ColumnLinear(linear, 1, enter, group)


def mlp_columns(unit):
    return lambda m, w, e, v, g: ColumnLinear(m, unit * w, e, g)


WRONG["13.4"] += [
    (cut(qkv=columns_of(1)), "cut in units of 2: a head is 6 rows here, and its width is 2, so q"),
    (cut(qkv=lambda m, w, e, v, g: ColumnLinear(m, 1, e, g)), "cut in units of 1: a head is 6"),
    (cut_the_width, "attention.head_width is now"),
    (cut_the_width_first, "a rank has fewer heads, not narrower ones"),
    (cut(up=mlp_columns(4), down=rows_of(4)), "cut in units of 8: the MLP's unit is 1"),
    (cut(up=lambda m, w, e, v, g: ColumnLinear(m, e, g)), "is the unit forgotten?"),
    (cut(down=lambda m, w, e, v, g: RowLinear(m, v, g)), "is the unit forgotten?"),
    (width_by(lambda block: block.attention.heads), "a head's width is block.attention.head_width"),
    (width_by(lambda block: block.attention.head_dim), "a head's width is block.attention.head_w"),
    (width_by(lambda block: block.head_width), "block.attention has qkv, out and head_width"),
    (width_by(lambda block: block.mlp.head_width), "an mlp has up and down"),
    (cut(up=refuses_units), "a unit is one head, and there are as many units as heads"),
    (
        cut(out=lambda m, w, e, v, g: RowLinear(m, 1, v, g)),
        "cut in units of 1: a head is 2 columns",
    ),
    (cut(out=rows_of(3)), "a unit is one head, and there are as many units as heads"),
    (cut(out=lambda m, w, e, v, g: ColumnLinear(m, w, e, g)), "cut along the wrong dim"),
    (cut(up=lambda m, w, e, v, g: RowLinear(m, 1, v, g)), "cut along the wrong dim"),
    (cut(up=uncut, down=uncut), "mlp.up.weight is whole - this layer is not cut"),
    (cut(qkv=uncut, out=uncut), "attention.qkv.weight is whole - this layer is not cut"),
    (cut(out=lambda m, w, e, v, g: RowLinear(m, w, e, g)), "called `enter` 3 time(s), not 2"),
    (cut(down=lambda m, w, e, v, g: RowLinear(m, 1, group=g)), "called `leave` 1 time(s), not 2"),
    (cut(up=lambda m, w, e, v, g: ColumnLinear(m, 1, g)), "`group` is not passed on"),
    (cut_a_copy, "another block was cut; the model keeps its own"),
    (cut_norms, "leave the norms alone"),
    (cut_without_regions, "the `enter` that is given is not used"),
    (cut_without_group, "`group` is not passed on"),
]

# ---- 13.11 data_place -----------------------------------------------------------------------


@right("13.11")
def place_by_divmod(rank, world_size, tensor_ranks):
    shares, left = divmod(world_size, tensor_ranks)
    if left:
        raise ValueError("some ranks are left")
    return divmod(rank, tensor_ranks)[0], shares


@right("13.11")
def place_by_table(rank, world_size, tensor_ranks):
    if world_size % tensor_ranks != 0:
        raise ValueError(f"{world_size} / {tensor_ranks}")
    groups = torch.arange(world_size).view(-1, tensor_ranks).tolist()
    return [next(i for i, ranks in enumerate(groups) if rank in ranks), len(groups)]


def placed(value, refuse=ValueError):
    """A data_place; `value` takes rank, world_size, tensor_ranks."""

    def data_place(rank, world_size, tensor_ranks):
        if refuse and world_size % tensor_ranks:
            raise refuse("ranks are left")
        return value(rank, world_size, tensor_ranks)

    return data_place


WRONG["13.11"] += [
    (placed(lambda r, n, t: (r, n)), "each rank of a group gets other data"),
    (placed(lambda r, n, t: (r % t, n // t)), "rank % tensor_ranks is the place inside"),
    (placed(lambda r, n, t: (r % t, t)), "that is the place inside the group"),
    (placed(lambda r, n, t: (r % (n // t), n // t)), "models are on consecutive ranks"),
    (placed(lambda r, n, t: (r // t, n)), "there are fewer shares than ranks"),
    (placed(lambda r, n, t: (r // t, t)), "the size of a group, not the number"),
    (placed(lambda r, n, t: (r // (n // t), n // t)), "the divisor is a group's size"),
    (placed(lambda r, n, t: (n // t, r // t)), "the two are swapped"),
    (placed(lambda r, n, t: (r // t + 1, n // t)), "shares count from 0"),
    (placed(lambda r, n, t: (r / t, n / t)), "a number of a share is a whole number"),
    (placed(lambda r, n, t: (r // t, n / t)), "use // in place of /"),
    (placed(lambda r, n, t: r // t), "two whole numbers are asked for"),
    (placed(lambda r, n, t: (r // t, n // t), refuse=None), "some ranks are left without a group"),
    (placed(lambda r, n, t: (r // t, n // t), refuse=AssertionError), "'AssertionError'"),
    (lambda r, n, t: (dist.get_rank() // t, n // t), "the arguments hold all"),
]

# ---- 13.12 calls_per_step -------------------------------------------------------------------


@right("13.12")
def calls_counted_one_by_one(num_blocks, sequence=False):
    found = Counter(all_reduce=2 + sequence)
    for _ in range(2 * num_blocks + 1):
        for _way in ("forward", "backward"):
            found.update(["all_gather", "reduce_scatter"] if sequence else ["all_reduce"])
    return found


@right("13.12")
def calls_by_formula(num_blocks, sequence=False):
    n = 4 * num_blocks + 2
    return {
        "reduce_scatter": n * sequence,
        "all_gather": n * sequence,
        "all_reduce": 3 if sequence else n + 2,
    }


def counted(reduces=None, sequence_reduces=3, gathers=None, plain=0):
    """A calls_per_step in which one count can be another; they take the number of blocks."""
    reduces = reduces or (lambda L: 4 * L + 4)
    gathers = gathers or (lambda L: 4 * L + 2)

    def calls_per_step(num_blocks, sequence=False):
        if not sequence:
            return {"all_reduce": reduces(num_blocks), "all_gather": plain, "reduce_scatter": plain}
        found = sequence_reduces(num_blocks) if callable(sequence_reduces) else sequence_reduces
        num = gathers(num_blocks)
        return {"all_reduce": found, "all_gather": num, "reduce_scatter": num}

    return calls_per_step


WRONG["13.12"] += [
    (counted(lambda L: 2 * L + 3), "one way only"),
    (counted(lambda L: 2 * L + 1), "forward only, and without the loss's two"),
    (counted(lambda L: 2 * L), "one way, and blocks only"),
    (counted(lambda L: 4 * L + 2), "the loss sums twice"),
    (counted(lambda L: 4 * L + 3), "one of embedding, head"),
    (counted(lambda L: 4 * L), "blocks only"),
    (counted(lambda L: 8 * L + 4), "one for each linear layer"),
    (counted(lambda L: 4 * L + 5), "finish_gradients sums nothing without"),
    (counted(lambda L: 4 * L + 5, 4), "travel in one message"),
    (counted(sequence_reduces=4), "travel in one message"),
    (lambda num_blocks, sequence=False: {}, "what is never called stands there as well, as a 0"),
    (counted(lambda L: 4 * L + 6), "embedding and head sum once each"),
    (counted(sequence_reduces=2), "finish_gradients sums the norms'"),
    (counted(sequence_reduces=1), "the loss sums twice"),
    (counted(sequence_reduces=0), "the loss's two, and that of finish_gradients"),
    (counted(sequence_reduces=lambda L: 4 * L + 4), "take the place of these"),
    (counted(gathers=lambda L: 2 * L + 1), "one way only"),
    (counted(gathers=lambda L: 4 * L), "the embedding sums forward and the head backward"),
    (counted(gathers=lambda L: 0), "each all-reduce became"),
    (counted(plain=2), "there are only all-reduces"),
    (counted(lambda L: str(4 * L + 4)), "a number of calls is a whole number"),
    (lambda num_blocks, sequence=False: {"all_reduce": 4 * num_blocks + 4}, "as a 0"),
    (lambda num_blocks, sequence=False: {"allreduce": 4 * num_blocks + 4}, "has the keys"),
    (lambda num_blocks, sequence=False: 4 * num_blocks + 4, "the answer is a dict"),
]

RIGHT |= _vocabulary.RIGHT | _split_model.RIGHT
WRONG |= _vocabulary.WRONG | _split_model.WRONG
