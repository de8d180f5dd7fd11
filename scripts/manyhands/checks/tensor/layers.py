"""Specs of 13.1, 13.3 and 13.4: the two regions, layers cut by columns and by rows, a block."""

import random
import weakref
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd import Function

from manyhands.checks.engine import cases
from manyhands.checks.engine.answer import Pair
from manyhands.checks.engine.spec import Place, Spec
from manyhands.checks.engine.values import malformed, tensor
from manyhands.checks.tensor.common import (
    as_module,
    as_result,
    doubled,
    late_results,
    lets_go,
    own_memory,
    two_calls,
)
from manyhands.models.transformer import Block
from manyhands.tensor import layers, model

# ---- 13.1 -----------------------------------------------------------------------------------

F_COPY = "total = grad.clone(memory_format=torch.contiguous_format)"
G_COPY = "total = x.clone(memory_format=torch.contiguous_format)"
COPY = "Make a copy, call all_reduce with the copy, then return the copy."
MEAN = "This is a mean, and the ranks' parts have to be added up."
F_SUM = "dist.all_reduce(total, group=ctx.group)"
G_SUM = "dist.all_reduce(total, group=group)"
F_END = f"{F_SUM}\n        return total, None"
G_END = f"{G_SUM}\n        return total\n"
N = "dist.get_world_size(ctx.group)"


class Region(NamedTuple):
    """One call of both. `turned`: transposed views on no rank, on all of them, or on one."""

    seed: int
    turned: str


def regions_seen(answer: Pair, case: Region, place: Place) -> dict:
    """Of two calls, both forward and then both backward, what they give and leave unchanged.

    In the first all ranks of the job take part, in the second the group.
    """
    seen = {}
    for name, part in zip(("CopyToRanks", "SumOverRanks"), answer.parts, strict=True):
        if isinstance(part, type) and not issubclass(part, Function):
            raise malformed(part, "a torch.autograd.Function")
        calls = []
        for call, options in two_calls(place).items():
            draw = cases.generator(case.seed, place.job_rank, len(call))
            leaf, grad = torch.randn(2, 2, 4, dtype=torch.float64, generator=draw)
            leaf.requires_grad_()
            given = leaf * 1  # no leaf, as between two layers
            if case.turned == "all":
                given = given.t()
                grad = grad.t()
            if case.turned == "one" and place.job_rank == 0:  # the same numbers, in other memory
                given = given.t().contiguous().t()
                grad = grad.t().contiguous().t()
            before = given.detach().clone()
            with late_results():
                found = getattr(part, "apply", part)(given, *options.values())
            seen[f"{name}, the result of forward{call}"] = as_result(found)
            seen[f"{name}, x is unchanged{call}"] = torch.equal(given.detach(), before)
            seen[f"{name}, the result wants a gradient{call}"] = found.requires_grad
            calls.append((call, leaf, grad, found))
        for call, leaf, grad, found in calls:
            before = grad.clone()
            if found.requires_grad:
                with late_results():
                    found.backward(grad)
            seen[f"{name}, the gradient of x{call}"] = leaf.grad
            seen[f"{name}, the given gradient is unchanged{call}"] = torch.equal(grad, before)
    return seen


regions = Spec(
    todo="13.1",
    truth=Pair(layers.CopyToRanks, layers.SumOverRanks),
    layouts=cases.THREE,
    cases=lambda n: [Region(cases.draw_seed(), turned) for turned in ("no", "all", "one")],
    observe=regions_seen,
    guards_group=False,
    tell=lambda case: {
        "no": "with matrices",
        "all": "with transposed views",
        "one": "with a transposed view on one rank",
    }[case.turned],
    hints=(
        "f and g are each other's backward: where one sends nothing, the other sums over the "
        "ranks. f is CopyToRanks, g is SumOverRanks.",
        "all_reduce works in place, and the tensor that you were given belongs to somebody else. "
        "Make a copy, and sum into that. all_reduce adds up memory in its order, so the copy must "
        "be contiguous: tensor.clone(memory_format=torch.contiguous_format).",
        "CopyToRanks: forward keeps ctx.group and returns x; backward clones grad, calls "
        "dist.all_reduce(total, group=ctx.group) and returns total, None. SumOverRanks is the "
        "same the other way round.",
    ),
    mistakes=r"""
        return x.view_as(x) => dist.all_reduce(x := x.clone(), group=group); return x ::
            f sums in forward, although its input is the same on all ranks. | forward returns x as
            it is; backward sums.
        {F_COPY} => return grad, None ::
            f only copies in backward. | Call all_reduce in backward, on every rank.
        {F_END} => {F_SUM}\n        return total / {N}, None :: f: {MEAN} | Divide by nothing.
        {F_COPY} => total = grad :: f sums into the gradient that it was given. | {COPY}
        {F_COPY} => total = grad.contiguous() ::
            f sums into the given gradient: contiguous() copies only what is not contiguous.
        {F_END} => return None, None :: backward of f returns no gradient for x.
        ctx.group = group => CopyToRanks.group = group
        group=ctx.group => group=CopyToRanks.group :: The group is kept on the class, where a later
            call replaces it. | Keep it in ctx, which belongs to one call.
        return grad, None => dist.all_reduce(g := grad.clone(), group=ctx.g); return g, None
        {G_SUM} => ctx.g = group; {G_SUM} :: g sums in backward as well, although every rank has the
            whole gradient already. | backward of g returns grad, None.
        {G_END} => ctx.n = dist.get_world_size(group); {G_END}
        return grad, None => return grad / ctx.n, None ::
            g divides the gradient by the number of ranks.
        {G_END} => {G_SUM}\n        return total / dist.get_world_size(group) ::
            g: {MEAN} | Divide by nothing.
        {G_COPY} => total = x :: g sums into x, which other layers may still read. | {COPY}
        {F_COPY} => total = grad.clone()
        {G_COPY} => total = x.clone() ::
            clone() keeps a transposed view transposed, and all_reduce adds up memory, so numbers of
            different places are added. | Clone with memory_format=torch.contiguous_format.
        {G_SUM} => pass ::
            g does not sum in forward. | Call all_reduce on every rank, outside any `if`.
        {F_END} => {F_SUM}\n        return total :: ! backward has to return a gradient for each
            argument of forward after ctx. | Return the gradient of x, and None for the group.
        instead Pair(layers.SumOverRanks, layers.CopyToRanks) :: f and g have changed places. |
    """,
    reasons="""
        returned an incorrect number of gradients :: backward has to return a gradient for each
            argument of forward after ctx. | Return the gradient of x, and None for the group.
        save_for_backward :: save_for_backward takes only tensors, and a group is none. | Keep the
            group as an attribute: ctx.group = group.
        Backward' object has no attribute :: backward asks ctx for something that forward did not
            keep there. | Write ctx.group = group in forward.
        must be contiguous :: A gradient may be a view, such as a transposed one. | {COPY}
    """,
    module=globals(),
)

# ---- 13.3 -----------------------------------------------------------------------------------

SUM_OF_PARTS = "self.leave(F.linear(x, self.weight), self.group)"
TOTAL = "total = "
PLUS_BIAS = "total if self.bias is None else total + self.bias"


class Linears(NamedTuple):
    """Two layers, 5 to `hidden` and `hidden` to 4 features, and how they are cut.

    Args:
        called: are the layers called as well, and not only made?
        regions: are they given regions other than the usual ones?
    """

    hidden: int
    unit: int
    bias: bool
    called: bool
    regions: bool
    seed: int


def linears(n: int) -> list[Linears]:
    """Parts that are equal and others, units, no bias, regions that double."""
    seeds = [cases.draw_seed() for _ in range(6)]
    unit = random.randint(2, 3)
    return [
        Linears(2 * n, 1, True, False, False, seeds[0]),
        Linears((n + 1) * unit, unit, True, False, False, seeds[1]),
        Linears(2 * n, 1, True, True, False, seeds[2]),
        Linears(2 * n + 1, 1, False, True, False, seeds[3]),
        Linears((n + 1) * unit, unit, True, True, True, seeds[4]),
    ]


def tell_linears(case: Linears) -> str:
    """A case in words."""
    bias = "" if case.bias else ", without a bias"
    with_regions = ", with regions that double" if case.regions else ""
    does = "called" if case.called else "made"
    return f"layers with {case.hidden} features in units of {case.unit}{bias}{with_regions}, {does}"


def made(kind: object, name: str, case: Linears, place: Place, region: dict) -> tuple:
    """A layer of a kind, and what it holds. The whole layer is gone after that."""
    sizes = (5, case.hidden) if name == "ColumnLinear" else (case.hidden, 4)
    whole = partial(nn.Linear, *sizes, bias=case.bias, dtype=torch.float64)
    linear = cases.build(case.seed + place.members[0], whole)
    before = linear.weight.detach().clone()
    layer = as_module(kind(linear, case.unit, **region, **place.options))
    weight = getattr(layer, "weight", None)
    bias = getattr(layer, "bias", None)
    parts = [part for part in (weight, bias) if part is not None]
    matrix = weakref.ref(linear.weight)
    is_unchanged = torch.equal(linear.weight, before)
    del linear
    seen = {
        f"{name}.weight": None if weight is None else tensor(weight),
        f"{name}.bias": None if bias is None else tensor(bias),
        f"{name}.weight and .bias want a gradient": [part.requires_grad for part in parts],
        f"its weight and bias are the parameters of {name}": (
            {id(param) for param in layer.parameters()} == set(map(id, parts))
        ),
        f"{name} keeps no memory but that of its part": own_memory(layer, weight),
        f"{name} lets go of the whole weight": lets_go(matrix, place),
        f"the layer that is given to {name} is unchanged": is_unchanged,
    }
    return layer, seen


def linears_seen(answer: Pair, case: Linears, place: Place) -> dict:
    """Both layers: their parts, results and all gradients."""
    seen = {}
    mine = layers.my_range(case.hidden, case.unit, place.group)
    draw = cases.generator(case.seed, place.members[0])
    for name, kind in zip(("ColumnLinear", "RowLinear"), answer.parts, strict=True):
        is_column = name == "ColumnLinear"
        calls: list[bool] = []
        word = "enter" if is_column else "leave"
        usual = layers.CopyToRanks.apply if is_column else layers.SumOverRanks.apply
        region = {word: doubled(usual, place, calls)} if case.regions else {}
        layer, found = made(kind, name, case, place, region)
        seen |= found
        if not case.called:
            continue
        x = cases.values((2, 3, 5 if is_column else case.hidden), draw, torch.float64)
        leaf = (x if is_column else x[..., mine.start : mine.stop]).requires_grad_()
        result = layer(leaf)
        seen[f"the result of {name}"] = as_result(result)
        seen[f"{name}'s calls of `{word}`; True: with the group"] = calls
        ends = (place.job_rank,) if is_column else ()
        back = cases.generator(case.seed, place.members[0], *ends)
        if result.requires_grad:
            result.backward(cases.values(result.shape, back, torch.float64))
        seen[f"the gradient of {name}'s x"] = leaf.grad
        for param, value in layer.named_parameters():
            seen[f"the gradient of {name}.{param}"] = value.grad
    return seen


linear_layers = Spec(
    todo="13.3",
    truth=Pair(layers.ColumnLinear, layers.RowLinear),
    layouts=cases.THREE,
    cases=linears,
    observe=linears_seen,
    tell=tell_linears,
    hints=(
        "my_part(tensor, dim, unit, group) makes a parameter of a rank's part, as the __init__ of "
        "ColumnLinear does. nn.Linear keeps its weight as (out, in).",
        "ColumnLinear.forward: x goes through self.enter first. RowLinear.__init__: the weight is "
        "cut along 1, and the bias is whole.",
        "RowLinear.forward: the product without a bias, then self.leave(part, self.group), and the "
        "bias last, or it is added N times. In both layers the bias may be None.",
    ),
    mistakes=r"""
        self.enter(x, self.group) => x :: x does not go through `enter`, so nobody adds up the
            ranks' gradients of x. | F.linear(self.enter(x, self.group), self.weight, self.bias)
        self.weight, self.bias) => self.weight) ::
            ColumnLinear leaves out the bias. | Give F.linear the bias as well.
        my_part(linear.weight, 1, unit, group) => linear.weight ::
            RowLinear keeps the whole weight: nothing is cut. | Take my_part of it.
        my_part(linear.weight, 1, unit => my_part(linear.weight, 1, 1 :: RowLinear ignores `unit`,
            so what belongs together is cut through. | Hand `unit` and `group` to my_part.
        my_part(linear.weight, 1, unit => my_part(linear.weight, 0, 1 ::
            RowLinear is cut along its output features. | nn.Linear keeps its weight as (out, in).
        self.bias = linear.bias\n => self.bias = None if linear.bias is None else
            my_part(linear.bias, 0, 1, group)\n ::
            The bias of RowLinear is cut. | Every rank has the whole bias: the sum has all features.
        F.linear(x, self.weight), => F.linear(x, self.weight, self.bias),
        return {PLUS_BIAS} => return total :: Every rank adds the bias before the sum, so it counts
            N times. | Add the whole bias after `leave`, on every rank.
        return {PLUS_BIAS} => return total :: RowLinear leaves out the bias.
        {SUM_OF_PARTS} => F.linear(x, self.weight) ::
            The ranks' parts are not summed. | self.leave(part, self.group), and then the bias.
        {SUM_OF_PARTS} => {SUM_OF_PARTS} / len(dist.get_process_group_ranks(self.group)) ::
            {MEAN} | Divide by nothing.
        {SUM_OF_PARTS} => SumOverRanks.apply(F.linear(x, self.weight), self.group) ::
            RowLinear does not use the `leave` that it is given. | self.leave(part, self.group)
        self.enter(x, self.group) => CopyToRanks.apply(x, self.group) ::
            ColumnLinear does not use the `enter` that it is given. | self.enter(x, self.group)
    """,
    reasons="""
        missing 1 required positional argument: 'group' :: `enter` and `leave` take two arguments,
            and were given one. | Call self.enter(x, self.group), and self.leave likewise.
        before Module.__init__ ::
            A parameter was set before nn.Module was set up. | Call super().__init__() first.
        'NoneType' object has no attribute :: Something that may be None is used like a tensor; a
            layer may have no bias. | Ask linear.bias is None.
    """,
    module=globals(),
)

# ---- 13.4 -----------------------------------------------------------------------------------

CUT_LAYERS = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
HEADS = "A head has 3 * head_width rows of qkv and head_width columns of out."
MLP_END = "mlp.down = RowLinear(mlp.down, 1, leave, group)"
MLP_CUT = f"mlp.up = ColumnLinear(mlp.up, 1, enter, group)\n    {MLP_END}"
OUT_CUT = "attention.out = RowLinear(attention.out, width, leave, group)"


class Heads(NamedTuple):
    """A block, and what is done with it."""

    heads: int
    called: bool
    training: bool
    seed: int


def heads_of_blocks(n: int) -> list[Heads]:
    """As many heads as ranks, and one more; in eval, and in train with dropout."""
    seeds = [cases.draw_seed() for _ in range(4)]
    return [
        Heads(n, False, True, seeds[0]),
        Heads(n + 1, False, False, seeds[1]),
        Heads(n, True, False, seeds[2]),
        Heads(n + 1, True, True, seeds[3]),
    ]


def blocks_seen(answer: object, case: Heads, place: Place) -> dict:
    """The matrices, what has to stay as it is, the regions' calls, the result, the gradients."""
    seed = case.seed + place.members[0]
    width = 2 * case.heads
    block = cases.build(seed, lambda: Block(width, case.heads, dropout=0.25)).double()
    block.train(case.training)
    with torch.no_grad():
        block.norm1.weight.uniform_(0.5, 1.5)
        block.norm2.weight.uniform_(0.5, 1.5)
    calls: dict[str, list[bool]] = {"enter": [], "leave": []}
    usual = {"enter": layers.CopyToRanks.apply, "leave": layers.SumOverRanks.apply}
    given = {name: doubled(usual[name], place, calls[name]) for name in usual}
    answer(block, **given, **place.options)
    kept = [
        (name, module) for name, module in block.named_modules() if not name.startswith(CUT_LAYERS)
    ]
    seen = {
        f"{name}.weight": tensor(getattr(block.get_submodule(name), "weight", None))
        for name in CUT_LAYERS
    }
    seen |= {
        "attention.head_width": block.attention.head_width,
        "norm1.weight": tensor(block.norm1.weight),
        "norm2.weight": tensor(block.norm2.weight),
        "the other modules": [f"{name} {type(module).__name__}" for name, module in kept],
        "the other modules' modes (True: train)": [module.training for _, module in kept],
        "the share that is dropped": getattr(block.dropout, "p", None),
        "every parameter wants a gradient": all(p.requires_grad for p in block.parameters()),
    }
    if not case.called:
        return seen
    draw = cases.generator(seed)
    leaf = torch.randn(2, 5, width, dtype=torch.float64, generator=draw).requires_grad_()
    torch.manual_seed(seed)  # all ranks drop the same
    result = block(leaf)
    seen["the result of the block"] = as_result(result)
    result.backward(cases.values(result.shape, draw, torch.float64))
    for name, found in calls.items():
        seen[f"the calls of `{name}`; True: with the group"] = found
    seen["the gradient of x"] = leaf.grad
    return seen


cut_block = Spec(
    todo="13.4",
    truth=model.cut_block,
    layouts=cases.THREE,
    cases=heads_of_blocks,
    observe=blocks_seen,
    tell=lambda case: f"cut_block of a block with {case.heads} heads that are 2 wide",
    advice={name + ".weight": HEADS for name in CUT_LAYERS},
    hints=(
        "Two layers in a row: the first one is cut by columns, the second one by rows. This holds "
        "for the attention (qkv, out) and for the MLP (up, down).",
        "A head must not be cut: it has 3 * head_width rows of qkv and head_width columns of out.",
        "attention.qkv = ColumnLinear(attention.qkv, 3 * width, enter, group), and so on, in "
        "place; RowLinear takes leave.",
    ),
    mistakes=r"""
        3 * width, => width, :: qkv is cut in units of head_width rows, so q, k and v of different
            heads are mixed. | {HEADS}
        3 * width, => 1, :: qkv is cut in units of one row, so a head can be cut through.
        attention.out, width, => attention.out, 1, ::
            out is cut in units of one column, so a head can be cut through.
        attention.out, width, => attention.out, 3 * width, ::
            out is cut in units of 3 * head_width columns.
        mlp.up, 1, => mlp.up, 4 * width,
        mlp.down, 1, => mlp.down, 4 * width, ::
            The MLP is cut in units of 4 * head_width, and it has no heads. | Its unit is 1.
        {OUT_CUT} => attention.out = ColumnLinear(attention.out, width, enter, group) ::
            attention.out is cut by columns. | The second of two layers is cut by rows.
        mlp.up = ColumnLinear(mlp.up, 1, enter => mlp.up = RowLinear(mlp.up, 1, leave ::
            mlp.up is cut by rows. | The first of two layers is cut by columns.
        {MLP_CUT} => pass :: The MLP is not cut. | Cut four layers: qkv, out, up and down.
        attention.qkv = ColumnLinear(attention.qkv, 3 * width, enter, group)\n    {OUT_CUT} => pass
            :: The attention is not cut.
        {MLP_END} => {MLP_END}\n    attention.head_width //= dist.get_world_size(group) ::
            head_width is divided, and a rank has fewer heads, not narrower ones. | Leave head_width
            as it is: the attention counts the heads by itself.
        attention.out, width, leave => attention.out, width, enter ::
            attention.out is given `enter` in place of `leave`. | RowLinear takes `leave`.
        {MLP_END} => {MLP_END}\n    block.dropout = nn.Identity() ::
            The block's dropout is removed. | Only the four matrices change.
        instead lambda block, enter=None, leave=None, group=None: model.cut_block(block,
            group=group) :: The `enter` and `leave` that are given are not used. | Hand enter to
            each ColumnLinear, and leave to each RowLinear.
    """,
    module=globals(),
)
