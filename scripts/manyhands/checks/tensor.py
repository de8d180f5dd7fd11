"""Checks of lesson 13: 13.1 to 13.4, 13.11 and 13.12; the others stand in _vocabulary.py
and _split_model.py.

Every rank draws the whole layer from one seed, so it knows what all of them should hold. It stops
at the first thing that differs, before a later call would hang on it.
"""

import copy
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from manyhands.checks import Lesson, Wrong, _split_model, _vocabulary
from manyhands.checks._split_model import TensorParallel  # noqa: F401
from manyhands.checks._vocabulary import (  # noqa: F401
    GatherSequence,
    OwnRandom,
    VocabEmbedding,
    plan,
    sum_gradients,
    vocab_cross_entropy,
)
from manyhands.checks._wrapping import Seen, _as_dict, in_ranks
from manyhands.checks.shared import Reasons, alone
from manyhands.collectives.trees import Group
from manyhands.models.transformer import Block
from manyhands.tensor import layers, model

lesson = Lesson("tensor")
hint, summary, ready, keep = lesson.hint, lesson.summary, lesson.ready, lesson.keep

Why = tuple[str, str]  # what it smells of, what to try
Mistakes = Sequence[tuple[object, str, str]]  # what it would give, its smell, its hint


def stop(*words: str) -> None:
    """End this rank with seen, smell and hint."""
    raise Seen("\n".join(words))


def equal(one: object, other: object) -> bool:
    """Are these tensors the same, but for rounding? Or both None?"""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return one is None and other is None
    return one.shape == other.shape and torch.allclose(one.double(), other.double(), atol=1e-6)


def compare(what: str, found: object, wanted: object, mistakes: Mistakes, *otherwise: str) -> None:
    """Stop at what is not as wanted, with the reason of the mistake that gives the same."""
    if equal(found, wanted):
        return
    if isinstance(found, Tensor) and isinstance(wanted, Tensor):
        seen = f"{what} has shape {tuple(found.shape)}, not {tuple(wanted.shape)}"
        if found.shape == wanted.shape:
            off = (found.detach().double() - wanted.detach().double()).abs().max().item()
            seen = f"{what} is up to {off:.2g} off"
    else:
        kind = "None" if found is None else f"a {type(found).__name__}"
        seen = f"{what} is {kind}, not {'None' if wanted is None else 'a tensor'}"
    named = [why for wrong, *why in mistakes if equal(found, wrong)]
    stop(seen, *(named[0] if named else otherwise))


class Place(NamedTuple):
    """This rank among those of a group."""

    group: Group
    members: list[int]
    rank: int  # in the job
    told: str


def places() -> list[Place]:
    """All three ranks; then rank 0 by itself, and ranks 1 and 2."""
    rank = dist.get_rank()
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    members = [1, 2] if rank else [0]
    return [
        Place(None, [0, 1, 2], rank, f"rank {rank} of 3"),
        Place(groups[rank > 0], members, rank, f"rank {rank} with group = ranks {members}"),
    ]


GROUP = ("`group` is not passed on, so all ranks of the job take part", "group=group in the call")
NO_SUM = (
    "nothing of the other ranks is in it: not summed, not waited for, or on some ranks only",
    "all_reduce a copy of it on every rank (no `if rank == 0`), and wait for that",
)
MEAN = ("a mean: it is the ranks' parts that are added up", "a sum; divide by nothing")

# ---- 13.1 -----------------------------------------------------------------------------------

RETURNS_NONE = (
    "all_reduce writes into the tensor that it is given, and returns None",
    "first a copy, then all_reduce of the copy, then return the copy",
)
REGIONS: Reasons = {
    "returned an incorrect number of gradients": (
        "backward returns a gradient for each argument of forward after ctx: x, and the group",
        "return the gradient of x, and None",
    ),
    "save_for_backward": (
        "save_for_backward is for tensors only, and a group is none",
        "keep it as an attribute: ctx.group = group",
    ),
    "has no attribute 'group'": (
        "backward asks for what forward did not keep",
        "in forward: ctx.group = group",
    ),
    "no attribute 'saved_group'": ("forward did not keep it", "in forward: ctx.group = group"),
    "must be contiguous": ("a gradient may be a view, such as a transposed one", "clone it first"),
}


@lesson.exercise(
    "13.1",
    "f and g are each other's backward: where one sends nothing, the other one sums over the "
    "ranks. f is CopyToRanks, g is SumOverRanks.",
    "all_reduce works in place. The tensor that you were given belongs to somebody else: make a "
    "copy, and sum into that.",
    "CopyToRanks: forward keeps ctx.group and returns x; backward clones grad, calls "
    "dist.all_reduce(total, group=ctx.group) and returns total, None. SumOverRanks is the same the "
    "other way round.",
    num_answers=2,
)
def CopyToRanks(answer) -> None:
    """Both regions on 3 ranks, and in groups of 1 and 2; also for a transposed x."""
    in_ranks(_regions_seen, 3, answer.parts, random.randrange(10_000), reasons=REGIONS)


def _regions_seen(pair: tuple, seed: int) -> bool:
    names = ("CopyToRanks", "SumOverRanks")
    for place in places():
        for is_copy, name, kind in zip((True, False), names, pair, strict=True):
            for turned in (False, True):
                _look_at_region(_apply_of(kind, name), is_copy, name, place, seed, turned)
    return True


def _apply_of(kind: object, name: str) -> Callable:
    if isinstance(kind, type) and not issubclass(kind, Function):
        smell = "only an autograd Function has a backward that you write"
        stop(f"{name} is a class of the kind {kind.__mro__[1].__name__}", smell, "keep its line")
    return getattr(kind, "apply", kind)


def _look_at_region(
    apply: Callable, is_copy: bool, name: str, place: Place, seed: int, turned: bool
) -> None:
    """One forward and one backward. `turned`: with transposed views."""
    draw = torch.Generator().manual_seed(seed)
    xs, grads = torch.randn(2, 3, 2, 4, dtype=torch.float64, generator=draw)
    leaf, grad = xs[place.rank].clone().requires_grad_(), grads[place.rank].clone()
    given = (leaf * 1).t() if turned else leaf * 1  # no leaf, as between two layers
    grad = grad.t() if turned else grad
    before = given.detach().clone(), grad.clone()
    turn = (lambda x: x.t()) if turned else (lambda x: x)
    who = f"{name}, {place.told}"
    time.sleep(0.02 * (place.rank == 0))  # who does not wait for it reads too early
    found = apply(given, place.group)
    if not isinstance(found, Tensor):
        kind = type(found).__name__
        stop(f"{who}: forward returned {kind}", *(RETURNS_NONE if found is None else ("", "")))
    _look_forward(who, is_copy, found.detach(), [turn(x) for x in xs], place)
    if not equal(given.detach(), before[0]):
        smell = "x was summed in place, and other layers still read it"
        stop(f"{who}: forward changed x itself", smell, "sum into a copy: x.clone()")
    if not found.requires_grad:
        stop(f"{who}: the result wants no gradient", "it is cut off from x", "use apply")
    time.sleep(0.02 * (place.rank == 0))
    found.backward(grad)
    _look_backward(who, is_copy, leaf.grad, list(grads), place)
    if not equal(grad, before[1]):
        stop(
            f"{who}: backward changed the gradient that it was given",
            "autograd may still hand the same tensor to another branch, which then gets the sum; "
            "contiguous() makes no copy of what is contiguous",
            "sum into a copy: grad.clone()",
        )


def _sums(parts: list[Tensor], place: Place) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """This rank's own part, the sum over the group, the mean of it, and the sum over the job."""
    total = sum(parts[member] for member in place.members)
    return parts[place.rank], total, total / len(place.members), sum(parts)


def _look_forward(who: str, is_copy: bool, found: Tensor, xs: list, place: Place) -> None:
    own, total, mean, of_all = _sums(xs, place)
    what = f"{who}: the result of forward"
    if is_copy:
        smell = "f sums forward: its input is the same on all ranks already, so this is N times x"
        hint = "forward returns x as it is; it is backward that sums"
        compare(what, found, own, [(total, smell, hint), (of_all, smell, hint)], "f copies", hint)
        return
    mistakes = [(own, *NO_SUM), (mean, *MEAN), (of_all, *GROUP)]
    smell = "it is not the sum of all ranks' x, or it was not waited for"
    compare(what, found, total, mistakes, smell, "all_reduce, and wait() where it is async_op")


def _look_backward(who: str, is_copy: bool, found: object, grads: list, place: Place) -> None:
    own, total, mean, of_all = _sums(grads, place)
    what, n = f"{who}: the gradient of x", len(place.members)
    if found is None:
        smell = "backward returns no gradient for x; all_reduce itself returns None"
        stop(f"{what} is None", smell, "return the summed copy, or grad, first, then None")
    if is_copy:
        part = "each rank computed only its own part of the gradient, and the parts have to be "
        mistakes = [
            (
                own,
                f"{part}added: f copies backward, too, on this rank",
                "all_reduce in backward, on every rank (no `if rank == 0`)",
            ),
            (mean, *MEAN),
            (of_all, *GROUP),
            (own * n, "it is the sum that is asked for, not N times the own one", "all_reduce"),
        ]
        compare(what, found, total, mistakes, "it is not the sum of all ranks' grads", "all_reduce")
        return
    smell = f"g sums backward, too: all ranks have the whole gradient already, so this is {n} times"
    mistakes = [
        (total, f"{smell} too large", "backward of g copies: return grad, None"),
        (of_all, f"{smell} too large", "backward of g copies: return grad, None"),
        (own * n, "multiplied by the number of ranks", "return grad, None"),
        (own / n, "divided by the number of ranks, as for a mean", "return grad, None"),
        (mean, *MEAN),
    ]
    compare(what, found, own, mistakes, "backward of g copies", "return grad, None")


# ---- 13.2 -----------------------------------------------------------------------------------


class Cut(NamedTuple):
    """One call of my_range. `small`: in a group, which is rank 0, or ranks 1 to 3."""

    size: int
    unit: int = 1
    small: bool = False

    def told(self) -> str:
        """The call in words."""
        return f"my_range({self.size}, unit={self.unit})"


JUST = Cut(4)  # a unit for each of 4 ranks
TOO_FEW = (Cut(3), Cut(6, 2), Cut(2, 1, small=True))


@lesson.exercise(
    "13.2",
    "Count in units first: units = size // unit. Every rank has units // N of them, and the first "
    "units % N ranks have one more.",
    "A rank's first unit is rank * share, and one more for each rank before it that has one more: "
    "min(rank, rest) of them. Multiply by unit at the end.",
    "rank = dist.get_rank(group), N = dist.get_world_size(group); raise ValueError if units < N.",
)
def my_range(answer) -> None:
    """Sizes that divide and others, units, groups, and too few units, on 4 ranks."""
    unit = random.randint(2, 5)
    cuts = [Cut(12), JUST, Cut(10), Cut(9), Cut(7)]
    cuts += [Cut(8 * unit, unit), Cut(6 * unit, unit), Cut(8, 1, True), Cut(5 * unit, unit, True)]
    cuts += TOO_FEW
    results = in_ranks(_ranges_seen, 4, answer, cuts, reasons={})
    for cut, *found in zip(cuts, *results, strict=True):
        if cut in TOO_FEW:
            members = [1, 2, 3] if cut.small else [0, 1, 2, 3]
            _compare_refusals(cut, [found[rank] for rank in members], len(members))
        elif cut.small:
            _compare_ranges(cut, found[:1], [0], found)
            _compare_ranges(cut, found[1:], [1, 2, 3], found)
        else:
            _compare_ranges(cut, found, [0, 1, 2, 3], found)


def _ranges_seen(answer, cuts: list[Cut]) -> list:
    """What came back, or the name of the ValueError that was raised."""
    groups = [dist.new_group([0]), dist.new_group([1, 2, 3])]
    seen = []
    for cut in cuts:
        group = groups[dist.get_rank() > 0] if cut.small else None
        try:
            seen.append(answer(cut.size, cut.unit, group))
        except Exception as error:
            just = cut == JUST and isinstance(error, ValueError)
            if not just and cut not in TOO_FEW or isinstance(error, NotImplementedError):
                raise
            seen.append(type(error).__name__)
    return [found if isinstance(found, str | range) else _in_words(found) for found in seen]


def _in_words(found: object) -> tuple[str, str]:
    return type(found).__name__, repr(found)[:80]


def _compare_refusals(cut: Cut, found: list, n: int) -> None:
    for value in found:
        if value != "ValueError":
            gave = f"raised {value}" if isinstance(value, str) else f"gave {value}"
            seen = f"{cut.told()} on {n} ranks: {cut.size // cut.unit} unit(s), and it {gave}"
            raise Wrong(seen, "then some rank has nothing to do", "raise ValueError if units < N")


def _compare_ranges(cut: Cut, found: list, members: list[int], of_all: list) -> None:
    n, said = len(members), f"{cut.told()} on ranks {members}"
    for rank, value in zip(members, found, strict=True):
        if isinstance(value, str):
            seen = f"{said}: {n} units, and rank {rank} raised {value}"
            raise Wrong(seen, "one unit for each rank is enough", "units < N, not units <= N")
        if not isinstance(value, range):
            kind, text = value
            smell = "nothing is returned" if kind == "NoneType" else "a range is asked for"
            raise Wrong(f"{said}: rank {rank} gave {text}", smell, "return range(first, last)")
        if value.step != 1:
            seen = f"{said}: rank {rank} gave {value}"
            smell = (
                f"a range with a step of {value.step}: only each {value.step}th element is in it"
            )
            raise Wrong(seen, smell, "range(first, last): no third argument")
    wanted = _share_all(cut, n)
    if found != wanted:
        seen = f"{said} gave {_told_ranges(found)}, not {_told_ranges(wanted)}"
        raise Wrong(seen, *_why_ranges(cut, found, n))


def _told_ranges(ranges: list[range]) -> str:
    return ", ".join(f"{part.start}:{part.stop}" for part in ranges)


def _share_all(cut: Cut, n: int, moved: bool = True, unit: int | None = None) -> list[range]:
    """The parts of all ranks. `moved`: does a part start later for each longer one before it?"""
    unit = cut.unit if unit is None else unit
    share, rest = divmod(cut.size // unit, n)
    first = [rank * share + (min(rank, rest) if moved else 0) for rank in range(n)]
    return [range(f * unit, (f + share + (r < rest)) * unit) for r, f in enumerate(first)]


def _wrong_ranges(cut: Cut, n: int) -> Mistakes:
    unit, units, right = cut.unit, cut.size // cut.unit, _share_all(cut, n)
    share, up = units // n, -(-units // n)
    floor = [range(r * share * unit, (r + 1) * share * unit) for r in range(n)]
    to_last = [*floor[:-1], range(floor[-1].start, cut.size)]
    ceil = [range(min(r * up, units) * unit, min((r + 1) * up, units) * unit) for r in range(n)]
    too_early = _share_all(cut, n, moved=False)
    in_units = [range(p.start // unit, p.stop // unit) for p in right]
    shorter = [range(p.start, p.stop - 1) for p in right]
    rest = "units // N, and one more for the first units % N"
    return [
        (floor, "units // N only: the rest at the end is nobody's", rest),
        (to_last, "the last rank takes all of the rest", rest),
        (too_early, "later parts start too early: they overlap", "+ min(rank, rest)"),
        (_share_all(cut, n, unit=1), "`unit` is ignored: a head is cut through", "count in units"),
        (in_units, "these are units, not elements", "both ends times unit"),
        (shorter, "a range stops before its end", "the stop itself is not in a range"),
        ([range(len(p)) for p in right], "all of them start at 0", "begin after the ranks before"),
        (ceil, "shares are rounded up, so the last ranks have less, or nothing", rest),
    ]


def _why_ranges(cut: Cut, found: list[range], n: int) -> Why:
    """Smell and hint of the mistake that gives these parts."""
    named = [why for wrong, *why in _wrong_ranges(cut, n) if found == wrong]
    if named:
        return tuple(named[0])
    if cut.small:
        return "the rank or the size of the job, not of the group", "get_rank(group), and so on"
    units = cut.size // cut.unit
    later = [range(r * units // n * cut.unit, (r + 1) * units // n * cut.unit) for r in range(n)]
    if found == later:
        return "as equal, but others than the first ranks have one more", "the first `rest` ranks"
    if any(a.stop != b.start for a, b in zip(found, found[1:], strict=False)):
        return "the parts leave a gap, or overlap", "each begins where the last one ends"
    return "not those of the docstring", "share, rest = divmod(units, N)"


# ---- 13.3 -----------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """Two layers, of 5 to `hidden` and of `hidden` to 4 features, and how they are cut."""

    hidden: int
    unit: int
    bias: bool
    small: bool  # in a group of some ranks
    watched: bool  # with an enter and a leave that write down their calls


SIZES = (
    Sizes(6, 1, True, False, False),
    Sizes(7, 1, True, False, True),
    Sizes(10, 2, False, True, True),
)
LINEAR: Reasons = {
    "mat1 and mat2 shapes": (
        "the part does not fit: cut along the wrong dimension, or a part meets a whole",
        "nn.Linear keeps (out, in): columns of A are rows of weight",
    ),
    "missing 1 required positional argument: 'group'": (
        "`enter` and `leave` take two arguments",
        "self.enter(x, self.group), and so for leave",
    ),
    "takes no keyword arguments": ("apply takes no names", "self.enter(x, self.group)"),
    "'NoneType' object has no attribute": ("a layer may have no bias", "ask linear.bias is None"),
    "before Module.__init__": ("the parameters have no home yet", "first super().__init__()"),
    "cannot assign": ("nn.Module wants a parameter there", "my_part gives one"),
    "and 'NoneType'": ("a layer may have no bias", "ask self.bias is None"),
    "must match the size of tensor": ("a part meets a whole", "who has the whole bias?"),
    "ValueError:": (
        "does my_range find fewer units than ranks? Then the size or the unit is another one",
        "out_features of a column layer, in_features of a row layer, and the unit that is given",
    ),
}


@lesson.exercise(
    "13.3",
    "my_part(tensor, dim, unit, group) makes a parameter of a rank's part. nn.Linear keeps its "
    "weight as (out, in).",
    "ColumnLinear: weight and bias are cut along 0, and x goes through self.enter first. "
    "RowLinear: weight is cut along 1, and the bias is whole.",
    "RowLinear.forward: product without a bias, then self.leave(part, self.group), and the bias "
    "last, or it is added N times. In both, the bias may be None.",
    num_answers=2,
)
def ColumnLinear(answer) -> None:
    """Two layers in a row: parts, outputs and all gradients, on 3 ranks and in groups."""
    in_ranks(_linears_seen, 3, answer.parts, random.randrange(10_000), reasons=LINEAR)


def _linears_seen(pair: tuple, seed: int) -> bool:
    every, small = places()
    for sizes in SIZES:
        _look_at_layers(pair, sizes, small if sizes.small else every, seed)
    return True


def watched(calls: list) -> dict[str, Callable]:
    """The course's two regions, which write down their name and group."""

    def enter(x: Tensor, group: Group) -> Tensor:
        calls.append(("enter", group))
        return layers.CopyToRanks.apply(x, group)

    def leave(x: Tensor, group: Group) -> Tensor:
        calls.append(("leave", group))
        return layers.SumOverRanks.apply(x, group)

    return {"enter": enter, "leave": leave}


def _look_at_layers(pair: tuple, sizes: Sizes, place: Place, seed: int) -> None:
    torch.manual_seed(seed)
    options = {"bias": sizes.bias, "dtype": torch.float64}
    first, second = nn.Linear(5, sizes.hidden, **options), nn.Linear(sizes.hidden, 4, **options)
    given = copy.deepcopy(first), copy.deepcopy(second)
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    back = torch.randn(2, 3, 4, dtype=torch.float64)
    calls: list[tuple[str, Group]] = []
    regions = watched(calls) if sizes.watched else {}
    parts = []
    for kind, linear, name in zip(pair, given, ("enter", "leave"), strict=True):
        region = {name: regions[name]} if regions else {}
        parts.append(kind(linear, sizes.unit, group=place.group, **region))
    for number, (layer, linear) in enumerate(zip(parts, (first, second), strict=True)):
        _look_at_weights(layer, linear, number, sizes, place)
    hidden = parts[0](x)
    if sizes.watched:
        look_at_calls(calls, {"enter": 1}, place, "ColumnLinear")
    whole = first(x).detach()
    mine = layers.my_range(sizes.hidden, sizes.unit, place.group)
    of_mine = whole[..., mine.start : mine.stop]
    no_bias = of_mine - (first.bias[mine.start : mine.stop] if sizes.bias else 0)
    mistakes = [(no_bias, "the bias is left out", "give F.linear the bias as well")]
    what = f"{place.told}: the output of ColumnLinear"
    compare(what, hidden, of_mine, mistakes, "enter, then F.linear", "a part of the features")
    hidden.retain_grad()
    calls.clear()
    result = parts[1](torch.tanh(hidden))
    if sizes.watched:
        look_at_calls(calls, {"leave": 1}, place, "RowLinear")
    _look_at_result(result, torch.tanh(whole), second, sizes, place)
    result.backward(back)
    _look_at_gradients(parts, hidden, x, back, (first, second), sizes, place)


def look_at_calls(calls: list, wanted: dict[str, int], place: Place, who: str) -> None:
    """Stop at a region that is not called as often as wanted, or in another group."""
    for name in ("enter", "leave"):
        num = sum(called == name for called, _ in calls)
        if num != wanted.get(name, 0):
            seen = f"{place.told}: {who} called `{name}` {num} time(s), not {wanted.get(name, 0)}"
            smell = f"the `{name}` that is given is not used: sequence parallelism gives another"
            if num:
                smell = "columns are entered, and rows are left, once each"
            stop(seen, smell, f"use `{name}` where the layer needs it, and only there")
    if any(group is not place.group for _, group in calls):
        stop(f"{place.told}: {who} called a region with another group", *GROUP)


def part_mistakes(whole: Tensor, dim: int, unit: int, group: Group) -> Mistakes:
    """What a rank holds who cuts `whole` in another way."""
    other = "nn.Linear keeps (out, in)"
    wide = whole.dim() == 2
    cuts = [(dim, 1, group, "`unit` is ignored, so what belongs together is cut through", "unit")]
    cuts += [(dim, unit, None, *GROUP)]
    cuts += [(1 - dim, u, group, f"cut along the wrong dim: {other}", "dim") for u in (unit, 1)]
    found = [(whole, "the whole, on every rank: nothing is cut", "my_part")]
    for along, units, among, smell, hint in cuts if wide else cuts[:2]:
        if whole.shape[along] // units >= dist.get_world_size(among):
            part = layers.my_part(whole, along, units, among).detach()
            hint = {"unit": "hand `unit` to my_part", "dim": "the other dim"}.get(hint, hint)
            found.append((part, smell, hint))
    right = layers.my_part(whole, dim, unit, group).detach()
    return [*found, (right.t(), "turned round: F.linear wants (out, in)", "keep nn.Linear's form")]


def _look_at_weights(
    layer: nn.Module, linear: nn.Linear, number: int, sizes: Sizes, place: Place
) -> None:
    """The rank's part, as a parameter of its own."""
    kind = ("ColumnLinear", "RowLinear")[number]
    unit, group, who = sizes.unit, place.group, f"{place.told}: {kind}"
    if not isinstance(layer, nn.Module):
        stop(f"{who} gives a {type(layer).__name__}", "that is no layer", "keep the class")
    whole = linear.weight.detach()
    wanted = layers.my_part(whole, number, unit, group).detach()
    mistakes = part_mistakes(whole, number, unit, group)
    anew = ("same shape, other numbers: is it drawn anew?", "take a part of the layer's own weight")
    compare(f"{who}.weight", getattr(layer, "weight", None), wanted, mistakes, *anew)
    bias, whole = getattr(layer, "bias", None), None if not sizes.bias else linear.bias.detach()
    if whole is None or number == 1:
        mistakes, n = [], len(place.members)
        if whole is not None:
            mistakes = [
                (whole / n, f"1/{n} of the bias: so its gradient is 1/{n}", "keep it whole")
            ]
        smell = "every rank has the whole bias, and adds it after the sum" if sizes.bias else ""
        compare(f"{who}.bias", bias, whole, mistakes, smell, "self.bias = linear.bias")
    else:
        wanted = layers.my_part(whole, 0, unit, group).detach()
        compare(f"{who}.bias", bias, wanted, part_mistakes(whole, 0, unit, group), *anew)
    own = {id(param) for param in layer.parameters()}
    for name in ("weight", "bias"):
        param = getattr(layer, name)
        if param is not None and id(param) not in own:
            stop(f"{who}.{name} is no parameter", "no optimizer would find it", "my_part gives one")
    held = layer.weight.untyped_storage().nbytes()
    if held > layer.weight.nbytes:
        seen = f"{who}.weight of {layer.weight.nbytes} bytes keeps {held} bytes of memory"
        stop(seen, "a view keeps the whole alive: nothing is saved", "clone the part, or my_part")


def _look_at_result(
    result: Tensor, inner: Tensor, linear: nn.Linear, sizes: Sizes, place: Place
) -> None:
    """What RowLinear gives, or a mistake with a name."""
    with torch.no_grad():
        n, mine = len(place.members), layers.my_range(sizes.hidden, sizes.unit, place.group)
        weight, bias = linear.weight, linear.bias if sizes.bias else torch.zeros(4)
        wanted, own_x = linear(inner), inner[..., mine.start : mine.stop]
        own = own_x @ weight[:, mine.start : mine.stop].T
        left = ("`leave` is forgotten: this is the own part", "leave(part, group), then the bias")
        times = f"the bias is added {n} times: by each rank, before the sum"
        mistakes = [
            (own, *left),
            (own + bias, *left),
            (wanted + (n - 1) * bias, times, "add it after leave"),
            (wanted - bias, "the bias is left out", "add it after leave"),
            ((wanted - bias) / n + bias, *MEAN),
        ]
        if len(mine) * n == sizes.hidden:
            total = sum(inner.chunk(n, dim=-1)) @ weight[:, mine.start : mine.stop].T + bias
            early = "`leave` before the product: it sums x, and features of other ranks are others"
            mistakes.append((total, early, "first the product, then leave"))
    why = ("product, leave, bias: in this order", "compare with the formula by hand")
    compare(f"{place.told}: the output of RowLinear", result, wanted, mistakes, *why)


def _look_at_gradients(
    parts: list[nn.Module],
    hidden: Tensor,
    x: Tensor,
    back: Tensor,
    linears: tuple[nn.Linear, nn.Linear],
    sizes: Sizes,
    place: Place,
) -> None:
    """Gradients of all that goes in; those of one process, or their parts."""
    alone_x, n = x.detach().clone().requires_grad_(), len(place.members)
    middle = linears[0](alone_x)
    middle.retain_grad()
    linears[1](torch.tanh(middle)).backward(back)
    mine = layers.my_range(sizes.hidden, sizes.unit, place.group)
    rows = slice(mine.start, mine.stop)
    own = middle.grad[..., rows] @ linears[0].weight[rows].detach()
    who = f"{place.told}: the gradient of"
    row, column = parts[1], parts[0]
    if sizes.bias:
        _look_at_bias(row.bias.grad, linears[1].bias.grad, n, f"{who} RowLinear.bias")
    compare(
        f"{who} RowLinear's input", hidden.grad, middle.grad[..., rows], [],
        "its ranks have other features: nothing of this gradient is to be summed",
        "enter is for ColumnLinear only",
    )  # fmt: skip
    smell = "each rank's gradient of x is a part, and nobody adds them: x did not go through enter"
    mistakes = [(own, smell, "F.linear(self.enter(x, self.group), ...)")]
    compare(f"{who} ColumnLinear's x", x.grad, alone_x.grad, mistakes, "enter sums it", "once")
    for name, found, wanted in (
        ("RowLinear.weight", row.weight.grad, linears[1].weight.grad[:, rows]),
        ("ColumnLinear.weight", column.weight.grad, linears[0].weight.grad[rows]),
        ("ColumnLinear.bias", column.bias, linears[0].bias if sizes.bias else None),
    ):
        if name.endswith("bias") and sizes.bias:
            found, wanted = found.grad, wanted.grad[rows]
        compare(f"{who} {name}", found, wanted, [], "a parameter has a part of its own", "")


def _look_at_bias(found: object, whole: Tensor, n: int, what: str) -> None:
    """The gradient of RowLinear's bias, which is the same on every rank."""
    some = "the bias reaches the result on some ranks only: its copies go apart"
    divided = f"1/{n}: the bias was divided by the ranks, so it learns slower"
    mistakes = [
        (whole / n, divided, "add the whole bias once, after leave"),
        (whole * n, f"{n} times too large", "add it once, after leave"),
        (None, some, "all ranks add it, after leave"),
        (torch.zeros_like(whole), some, "all ranks add it, after leave"),
    ]
    compare(what, found, whole, mistakes, "", "add it after leave")


# ---- 13.4 -----------------------------------------------------------------------------------

LAYERS = {  # of a block -> dim that is cut
    "attention.qkv": 0,
    "attention.out": 1,
    "mlp.up": 0,
    "mlp.down": 1,
}
HEADS = "3 * head_width rows of qkv, head_width columns of out"
A_UNIT = (
    "a unit is one head, and there are as many units as heads",
    f"a head has {HEADS}; the MLP's unit is 1",
)
CUTTING: Reasons = {
    "cannot be cut over": A_UNIT,
    "'Attention' object has no attribute": (
        "an attention has qkv, out and head_width",
        "a head's width is block.attention.head_width",
    ),
    "'Block' object has no attribute": (
        "a block has norm1, attention, norm2, mlp and dropout",
        "block.attention has qkv, out and head_width; block.mlp has up and down",
    ),
    "'MLP' object has no attribute": ("an mlp has up and down", "block.mlp.up, block.mlp.down"),
    "and 'function'": (
        "a region stands where the unit belongs: is the unit forgotten?",
        "the order is linear, unit, enter or leave, group; the MLP's unit is 1",
    ),
    "is invalid for input of size": ("a head is cut through: the view finds no whole heads", HEADS),
    "mat1 and mat2 shapes": (
        "cut along the wrong dimension, or one of two layers is whole",
        "qkv and up by columns, out and down by rows",
    ),
    "ValueError:": A_UNIT,  # the learner's own my_range has words of its own
}


@lesson.exercise(
    "13.4",
    "Two layers in a row: the first one by columns, the second one by rows. This holds for the "
    "attention (qkv, out) and for the MLP (up, down).",
    "A head must not be cut: it has 3 * head_width rows of qkv, head_width columns of out.",
    "attention.qkv = ColumnLinear(attention.qkv, 3 * width, enter, group), and so on, in place; "
    "RowLinear takes leave.",
)
def cut_block(answer) -> None:
    """5 heads on ranks 1 and 2, and 4 heads on all 3 ranks, against a whole block."""
    in_ranks(_blocks_seen, 3, answer, random.randrange(10_000), reasons=CUTTING)


def _blocks_seen(answer, seed: int) -> bool:
    every, small = places()
    for heads, place in ((5, small), (4, every)):
        dist.barrier()  # a fault of the first case is told before the second one begins
        if len(place.members) == 1:
            continue  # one rank by itself cannot tell most faults
        torch.manual_seed(seed)
        whole = Block(2 * heads, heads, dropout=0.0).double()
        x = torch.randn(2, 5, 2 * heads, dtype=torch.float64)
        block, calls = copy.deepcopy(whole), []
        returned = answer(block, group=place.group, **watched(calls))
        _look_at_block(block, whole, heads, returned, place)
        xs = [x.clone().requires_grad_() for _ in range(2)]
        results = [part(x) for part, x in zip((block, whole), xs, strict=True)]
        look_at_calls(calls, {"enter": 2, "leave": 2}, place, "a cut block")
        torch.manual_seed(seed + 1)
        back = torch.randn_like(x)
        for result in results:
            result.backward(back)
        who = f"{heads} heads, {place.told}:"
        why = ("the parts are right, but what passes between them is not", "enter, leave, group")
        compare(f"{who} the output of the block", *results, [], *why)
        compare(f"{who} the gradient of x", *(x.grad for x in xs), [], *why)
    return True


def _look_at_block(
    block: nn.Module, whole: nn.Module, heads: int, returned: object, place: Place
) -> None:
    """Every matrix is this rank's part, and the norms and the width of a head are whole."""
    width, wanted = block.attention.head_width, whole.attention.head_width
    if width != wanted:
        seen = f"{heads} heads, {place.told}: attention.head_width is now {width}, not {wanted}"
        smell = "a rank has fewer heads, not narrower ones"
        stop(seen, smell, "leave head_width as it is: attention counts the heads by itself")
    for name, dim in LAYERS.items():
        who = f"{heads} heads, {place.told}: {name}.weight"
        layer, matrix = block.get_submodule(name), whole.get_submodule(name).weight.detach()
        found = getattr(layer, "weight", None)
        if equal(found, matrix):
            smell, hint = "this layer is not cut", "four layers: qkv, out, up, down"
            if returned is not None and returned is not block:
                smell, hint = "another block was cut; the model keeps its own", "cut it in place"
            stop(f"{who} is whole", smell, hint)
        unit, hint = {"qkv": (6, HEADS), "out": (2, HEADS)}.get(
            name.split(".")[1],
            (1, "unit 1 for up and for down: any cut of the MLP's middle will do"),
        )
        wanted = layers.my_part(matrix, dim, unit, place.group).detach()
        mistakes = [
            *_other_units(matrix, dim, unit, place, hint),
            *part_mistakes(matrix, dim, unit, place.group),
        ]
        compare(who, found, wanted, mistakes, "another part than my_range says", hint)
    for name in ("norm1", "norm2"):
        found, wanted = (b.get_submodule(name).weight.detach() for b in (block, whole))
        smell = "every rank normalises the whole width"
        compare(f"{place.told}: {name}.weight", found, wanted, [], smell, "leave the norms alone")


def _other_units(matrix: Tensor, dim: int, unit: int, place: Place, hint: str) -> Mistakes:
    """What a rank holds of a block's matrix that is cut in other units; a head is 2 wide."""
    found = []
    for other in (1, 2, 6, 8):
        if other == unit or matrix.shape[dim] // other < len(place.members):
            continue
        smell = f"cut in units of {other}: "
        if unit == 1:
            smell += "the MLP's unit is 1, it has no heads"
        else:
            what = "rows" if unit == 6 else "columns"
            smell += f"a head is {unit} {what} here, and its width is 2"
        if unit == 6:
            smell += ", so q, k and v of different heads are mixed"
        found.append((layers.my_part(matrix, dim, other, place.group).detach(), smell, hint))
    return found


# ---- 13.11 ----------------------------------------------------------------------------------

WORLDS = ((8, 2), (12, 3), (6, 6), (5, 1))
UNEVEN = ((0, 8, 3), (1, 2, 4))


@lesson.exercise(
    "13.11",
    "With 2 ranks a model, ranks 0 and 1 hold one model, ranks 2 and 3 the next. How many models "
    "are there? Of which one is this rank a part?",
    "Number of the share: rank // tensor_ranks. Number of shares: world_size // tensor_ranks.",
)
def data_place(answer) -> None:
    """Every rank of four jobs, and jobs that cannot be cut so."""
    cases = [(rank, size, group) for size, group in WORLDS for rank in range(size)]
    found = iter(alone(answer, [*cases, *UNEVEN], _said_place, {}, _place_seen))
    for size, group in WORLDS:
        said, pairs = f"{size} ranks, {group} hold one model", []
        for rank in range(size):
            value = next(found)
            if not isinstance(value, list) or len(value) != 2:
                smell = (
                    "nothing is returned" if value is None else "two whole numbers are asked for"
                )
                raise Wrong(f"{_said_place(rank, size, group)} = {value!r}"[:99], smell, "a, b")
            pairs.append(tuple(value))
        wanted = [model.data_place(rank, size, group) for rank in range(size)]
        wrong = [pairs[r] != wanted[r] or _has_floats(pairs[r]) for r in range(size)]
        if any(wrong):
            at = wrong.index(True)
            seen = f"{said}: rank {at} gets {pairs[at]}, not {wanted[at]}"
            raise Wrong(seen, *_why_place(pairs, wanted, size, group))
    for case, value in zip(UNEVEN, found, strict=True):
        if value != "ValueError":
            seen = f"{_said_place(*case)} = {value!r}"
            raise Wrong(seen, "some ranks are left without a group", "raise ValueError")


def _said_place(rank: int, size: int, group: int) -> str:
    return f"data_place({rank}, {size}, {group})"


def _has_floats(pair: tuple) -> bool:
    return any(isinstance(value, float) for value in pair)


def _place_seen(answer, *case: int) -> object:
    try:
        found = answer(*case)
    except Exception as error:
        if case not in UNEVEN or isinstance(error, NotImplementedError):
            raise
        return type(error).__name__
    return list(found) if isinstance(found, list | tuple) else found


def _why_place(pairs: list, wanted: list, size: int, group: int) -> Why:
    if any(map(_has_floats, pairs)):
        return "a number of a share is a whole number; / gives a float", "use // in place of /"
    ranks, shares = range(size), size // group
    known = [
        (
            [(r, size) for r in ranks],
            "each rank of a group gets other data: their parts of a layer then belong to different "
            "samples, and the sum over the ranks is of no sample",
            "ranks of one model see the same batch: rank // tensor_ranks",
        ),
        ([(r % group, group) for r in ranks], "that is the place inside the group", "use //"),
        ([(r % group, shares) for r in ranks], "rank % tensor_ranks is the place inside", "use //"),
        ([(r % shares, shares) for r in ranks], "models are on consecutive ranks", "rank // ..."),
        ([(r // group, size) for r in ranks], "there are fewer shares than ranks", "// as well"),
        (
            [(r // group, group) for r in ranks],
            "the size of a group, not the number",
            "size // ...",
        ),
        ([(r // shares, shares) for r in ranks], "the divisor is a group's size", "rank // ..."),
        ([(b, a) for a, b in wanted], "the two are swapped", "first the number of the share"),
        ([(a + 1, b) for a, b in wanted], "shares count from 0", "without the + 1"),
    ]
    named = [why for wrong, *why in known if pairs == wrong]
    return tuple(named[0]) if named else ("ranks of one model have one share", "rank // ...")


# ---- 13.12 ----------------------------------------------------------------------------------

OPS = ("all_reduce", "all_gather", "reduce_scatter")


@lesson.exercise(
    "13.12",
    "Forward, what is left by rows sums: the embedding, and in each block the attention and the "
    "MLP. Backward, what is entered sums: in each block two, and the head.",
    "Each way that is 2L + 1. The loss has 2 more all-reduces, forward only.",
    "With sequence parallelism each of these all-reduces is one all_gather and one reduce_scatter, "
    "of forward and backward; the loss keeps its 2, and finish_gradients has 1.",
)
def calls_per_step(answer) -> None:
    """Four numbers of blocks, with and without sequence parallelism."""
    blocks = [0, *random.sample(range(2, 20), 3)]
    cases = [(num, sequence) for sequence in (False, True) for num in blocks[::-1]]
    counts = [
        _counts(found, _said_calls(*case))
        for case, found in zip(cases, alone(answer, cases, _said_calls, {}), strict=True)
    ]
    finished = all(found["all_reduce"] == 3 for found in counts[len(blocks) :])
    for case, found in zip(cases, counts, strict=True):
        wanted = model.calls_per_step(*case)
        for op in OPS:
            if found[op] != wanted[op]:
                seen = f"{_said_calls(*case)}: {op} {found[op]!r} times, not {wanted[op]}"
                raise Wrong(seen, *_why_calls(op, found[op], *case, finished))


def _counts(found: object, said: str) -> Mapping:
    """`found`, if it is a dict of the three names."""
    if isinstance(found, Mapping) and not isinstance(found, Counter) and set(found) < set(OPS):
        left = ", ".join(repr(op) for op in OPS if op not in found)
        smell = "what is never called stands there as well, as a 0"
        raise Wrong(f"{said} has no key {left}", smell, f"use {', '.join(map(repr, OPS))}")
    return _as_dict(found, OPS, said)


def _said_calls(num_blocks: int, sequence: bool) -> str:
    return f"calls_per_step({num_blocks}, sequence={sequence})"


ENDS = ("the embedding sums forward and the head backward: one more each way", "2L + 1")
LOSS = ("the loss sums twice: the maximum, and two numbers a token", "2 more")
ONCE = ("one way only", "forward and backward: 2 (2L + 1)")
EACH_LAYER = ("one for each linear layer: only out and down sum forward", "2 a block")
STACKED = (
    "the loss's two sums, of exp and of the target's score, travel in one message: it has 2 "
    "all-reduces, the maximum and this one",
    "stack the two sums in vocab_cross_entropy, and count one for both",
)
FINISH = ("finish_gradients sums nothing without sequence parallelism", "2 + ...")
IN_PLACE = ("all_gather and reduce_scatter take the place of these", "2 + 1")


def _plain_reduces(L: int, finished: bool) -> Mistakes:
    """What common mistakes count as all-reduces without sequence parallelism."""
    way, both = 2 * L + 1, 2 * (2 * L + 1)
    return [
        (way, "forward only, and without the loss's two", ONCE[1]),
        (way + 2, *ONCE),
        (both, f"{LOSS[0]}; or are embedding and head left out?", LOSS[1]),
        (both + 1, "one of embedding, head, and the loss's two is left out", LOSS[1]),
        (2 * L, "one way, and blocks only", "2L + 1 each way, and the loss"),
        (2 * L + 2, "one way, and without the embedding", ONCE[1]),
        (4 * L, "blocks only", "embedding, head, and the loss's two"),
        (both + 3, *(FINISH if finished else STACKED)),
        (both + 4, "embedding and head sum once each: one forward, one backward", "2L + 1"),
        (8 * L + 4, *EACH_LAYER),
        (8 * L + 2, *EACH_LAYER),
    ]


def _miscounts(op: str, L: int, sequence: bool, finished: bool) -> list[tuple]:
    """Wrong numbers of calls, each with its smell and its hint."""
    way, both = 2 * L + 1, 2 * (2 * L + 1)
    if op != "all_reduce":
        return [
            (way, *ONCE),
            (4 * L, *ENDS),
            (2 * L, "one way, and blocks only", "2 (2L + 1)"),
            (0, "each all-reduce became an all_gather and a reduce_scatter", "2 (2L + 1) of each"),
            (both + 1, "finish_gradients uses an all_reduce", "2 (2L + 1)"),
            (both + 2, "the loss keeps its all-reduces", "2 (2L + 1)"),
        ]
    if sequence:
        return [
            (2, "finish_gradients sums the norms' and positions' gradients", "1 more"),
            (4, *STACKED),
            (1, *LOSS),
            (0, "the loss's two, and that of finish_gradients, stay", "2 + 1"),
            (both + 2, *IN_PLACE),
            (both + 3, *IN_PLACE),
        ]
    return _plain_reduces(L, finished)


def _why_calls(op: str, found: object, L: int, sequence: bool, finished: bool) -> Why:
    """Smell and hint of the mistake that gives this number of calls.

    Args:
        finished: with sequence parallelism finish_gradients and the loss are counted right.
    """
    if isinstance(found, bool) or not isinstance(found, int):
        return "a number of calls is a whole number", "return three whole numbers"
    if not sequence and op != "all_reduce":
        return "without sequence parallelism there are only all-reduces", "0"
    known = _miscounts(op, L, sequence, finished)
    named = [why for wrong, *why in known if found == wrong]
    return tuple(named[0]) if named else ("count by the picture: what sums, and when?", ENDS[1])


# In the order of the numbers, which is that of the summary.
lesson.exercises = dict(
    sorted(
        (lesson.exercises | _vocabulary.part.exercises | _split_model.part.exercises).items(),
        key=lambda pair: int(pair[0].split(".")[1]),
    )
)
