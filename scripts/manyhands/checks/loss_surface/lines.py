"""Lines through a loss: the loss some way off, a slice between two solutions, random directions."""

import random
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from manyhands.checks.engine import cases
from manyhands.checks.engine.spec import Spec
from manyhands.checks.engine.values import Malformed, kind, listing, same, show
from manyhands.checks.loss_surface.hill import Hill, NoWay, equal, loss_number
from manyhands.loss_surface import surface

# ---- 2.1 ------------------------------------------------------------------------------------


class Point(NamedTuple):
    """A call of `loss_at` on a hill; `fails`: its loss raises an error."""

    distances: tuple[float, ...]
    seed: int
    fails: bool = False


def points() -> list[Point]:
    """One direction, none, two, three with a long way; and a loss that fails."""

    def a_little_above(*least: float) -> tuple[float, ...]:
        return tuple(x + random.randint(1, 9) / 32 for x in least)

    ways = [
        a_little_above(0.25),
        (),
        a_little_above(-1.0, 0.5),
        a_little_above(2.5, -1.5, 0.0),
        (4.0, 0.0),
    ]
    failing = Point(a_little_above(0.5, -1.0), cases.draw_seed(), True)
    return [*(Point(way, cases.draw_seed()) for way in ways), failing]


def tell_point(case: Point) -> str:
    """The call with its distances."""
    fails = ", with a loss that raises an error" if case.fails else ""
    return f"loss_at(loss, parameters, directions, {show(list(case.distances))}){fails}"


def point_seen(answer: Callable, case: Point) -> dict:
    """The loss, and what was left behind."""
    hill = Hill(case.seed, case.fails)
    directions = [hill.direction() for _ in case.distances]
    copies = [[part.clone() for part in direction] for direction in directions]
    seen = {}
    try:
        value = answer(hill.loss, list(hill.parameters), directions, list(case.distances))
    except NoWay:
        value = 0.0
        seen["the error of `loss` comes out of loss_at"] = True
    else:
        wants = isinstance(value, Tensor) and value.requires_grad
        if case.fails:
            seen["the error of `loss` comes out of loss_at"] = False
        else:
            seen["the loss"] = loss_number(value)
            seen["the result is a number without a graph"] = not wants
    unchanged = all(equal(*both) for both in zip(directions, copies, strict=True))
    return {**seen, **hill.left_behind(), "the directions are unchanged": unchanged}


@torch.no_grad()
def move(parameters: Sequence, directions: Sequence, distances: Sequence) -> None:
    """Goes along each direction by its distance."""
    for direction, distance in zip(directions, distances, strict=True):
        for parameter, part in zip(parameters, direction, strict=True):
            parameter.add_(part, alpha=distance)


def back_by_steps(
    loss: Callable, parameters: Sequence, directions: Sequence, distances: Sequence
) -> float:
    """Goes there and back by the same steps."""
    move(parameters, directions, distances)
    try:
        return loss().item()
    finally:
        move(parameters, directions, [-distance for distance in distances])


def back_if_all_goes_well(
    loss: Callable, parameters: Sequence, directions: Sequence, distances: Sequence
) -> float:
    """Goes back by the same steps, but not where `loss` raises an error."""
    move(parameters, directions, distances)
    value = loss().item()
    move(parameters, directions, [-distance for distance in distances])
    return value


DIRECTIONS = "zip(directions, distances, strict=True)"
MOVE = "parameter.add_(part, alpha=distance)"
BACK = "Keep clones, and copy each one back with parameter.copy_(old) in `finally:`."
EACH = f"For each direction and its distance: {MOVE} for each parameter and its part."
loss_at = Spec(
    todo="2.1",
    truth=surface.loss_at,
    cases=points,
    observe=point_seen,
    tell=tell_point,
    advice={
        "": EACH,
        "the parameters are where they were": BACK,
        "the parameters are what they were, bit for bit": BACK,
        "the parameters lie in the memory in which they were": (
            "Other tensors may share the parameters' memory, so put the numbers back in place: "
            "parameter.copy_(old)."
        ),
    },
    reasons="""
        a leaf Variable that requires grad ::
            torch does not let a tensor that wants a gradient be changed in place while it records
            gradients. | Write @torch.no_grad() above the function.
    """,
    hints=(
        "There are three parts: keep clones of the parameters, move them and compute the loss, and "
        "put the clones back.",
        f"Move in place, under torch.no_grad(): for each direction and its distance, {MOVE} for "
        "each parameter and its part of the direction.",
        "Moving and computing stand in `try:`, and `finally:` does parameter.copy_(old) for each "
        "parameter. loss().item() is a plain number.",
    ),
    mistakes=r"""
        parameter.copy_(old) => pass ::
            The parameters stay where the loss was computed: they are not put back, or what was kept
            is no clone, as with .data, .detach() and list(parameters). | {BACK}
        return loss().item() => value = loss().item()
        try: => if True:
        finally: => if True:
        parameter.copy_(old) => parameter.copy_(old)\n    return value ::
            Where `loss` raises an error, the parameters are not put back.
        {DIRECTIONS} => zip(directions[:1], distances[:1]) ::
            Only the first direction is gone. | {EACH}
        {DIRECTIONS} => zip(directions[-1:], distances[-1:]) :: Only the last direction is gone.
        {DIRECTIONS} => zip(directions, distances[::-1]) ::
            The distances are paired with the directions in reverse order.
        alpha=distance => alpha=1 :: Every direction is gone by 1, whatever its distance is.
        alpha=distance => alpha=-distance :: Every direction is gone backwards.
        {MOVE} => parameter.add_(part.mul_(distance)) ::
            The directions are multiplied in place. | Leave them as they are: {MOVE}.
        {MOVE} => parameter = parameter + distance * part ::
            This is the loss at the start. The model's own tensors have not moved when `loss` is
            called, and `loss` knows no copies and no new tensors. | Move in place: {MOVE}.
        {MOVE} => parameter.add_(part, alpha=distance) if parameter.dim() > 1 else 0 ::
            Only tensors with two or more dimensions are moved. | {EACH}
        {MOVE} => parameter.add_(part / torch.cat([p.flatten() for p in direction]).norm(),
            alpha=distance) ::
            Each direction is scaled to length 1 first. | A direction is gone as it is.
        {MOVE} => parameter.copy_(distance * part) ::
            The direction replaces the parameters. | It is added to them: {MOVE}.
        instead back_by_steps :: Going back by the same steps gives other bits. | {BACK}
        instead back_if_all_goes_well :: Going back by the same steps gives other bits, and where
            `loss` raises an error the parameters are not put back.
        around lambda truth: lambda loss, *rest: truth(loss, *rest) - loss().item() :: The result is
            the rise from the start, and not the loss itself. | Return the loss at the point.
    """,
    module=globals(),
)

# ---- 2.2 ------------------------------------------------------------------------------------


class Slice(NamedTuple):
    """A call of `slice_between` on a hill. `trained`: the end is made of Parameters."""

    shares: tuple[float, ...]
    seed: int
    trained: bool = False


def slices() -> list[Slice]:
    """One share; the two ends and beyond them, in any order; one share twice."""
    shares = [0.0, *(x + random.randint(1, 12) / 32 for x in (-0.75, 0.125, 0.5, 1.5, -2.5))]
    random.shuffle(shares)
    return [
        Slice((random.randint(6, 13) / 32,), cases.draw_seed()),
        Slice((*shares, 1.0), cases.draw_seed()),
        Slice((0.5, 0.25, 0.5), cases.draw_seed(), True),
    ]


def slice_seen(answer: Callable, case: Slice) -> dict:
    """The losses, and what was left behind."""
    hill = Hill(case.seed)
    copies = hill.direction()
    end = [part.clone() for part in copies]
    if case.trained:
        end = [nn.Parameter(part) for part in end]
    losses = answer(hill.loss, list(hill.parameters), end, list(case.shares))
    if isinstance(losses, float | int):
        raise Malformed(kind(losses), "The exercise asks for a list with one loss for each share.")
    form = listing(loss_number, "a list of losses")
    left = hill.left_behind()
    unchanged = equal(end, copies)
    return {"the losses": torch.tensor(form(losses)), **left, "`end` is unchanged": unchanged}


def in_steps(loss: Callable, parameters: Sequence, end: Sequence, shares: Sequence) -> list:
    """Each step begins where the last one ended."""
    line = [other - own.detach() for own, other in zip(parameters, end, strict=True)]
    at = [sum(shares[: number + 1]) for number in range(len(shares))]
    return [surface.loss_at(loss, parameters, [line], [way]) for way in at]


def between_losses(loss: Callable, parameters: Sequence, end: Sequence, shares: Sequence) -> list:
    """The losses of both ends are mixed."""
    first, last = surface.slice_between(loss, parameters, end, [0, 1])
    return [(1 - share) * first + share * last for share in shares]


LINE = "other - own.detach()"
AT = "loss_at(loss, parameters, [line], [share])"
BY_LOSS_AT = "loss_at moves the parameters for you, and puts them back."
TO_END = "The direction of the line is, for each parameter, end - parameter."
slice_between = Spec(
    todo="2.2",
    truth=surface.slice_between,
    cases=slices,
    observe=slice_seen,
    tell=lambda case: f"slice_between(loss, parameters, end, {show(list(case.shares))})",
    same=lambda found, wanted, case: same(found, wanted, 1e-5),
    advice={"": TO_END, "the parameters are where they were": BY_LOSS_AT},
    reasons="""
        a leaf Variable that requires grad :: torch does not let a tensor that wants a gradient be
            changed in place while it records gradients. | {BY_LOSS_AT}
        must match the size of tensor ::
            A direction is a list of tensors, and loss_at takes a list of directions. Without the
            list around it, each tensor of the line counts as a direction. | Write {AT}.
    """,
    hints=(
        "The line is a direction: for each parameter it is end - parameter.",
        "Each share is a distance along that one direction. loss_at takes a list of directions and "
        "a list of distances.",
        "line = [other - own.detach() for own, other in zip(parameters, end)], and then "
        f"{AT} for each share.",
    ),
    mistakes="""
        {LINE} => own.detach() - other :: The line leads away from `end`. | {TO_END}
        {LINE} => other :: `end` itself is used as the direction.
        {LINE} => other + own.detach() :: end + parameters is used as the direction.
        [share]) => [1 - share]) ::
            The line begins at `end`. | Share 0 is at the parameters, and 1 at `end`.
        [share]) => [min(max(share, 0), 1)]) ::
            Shares below 0 and above 1 are cut off. | The line goes on beyond both ends.
        [share]) => [max(share, 0)]) :: Shares below 0 are cut off.
        in shares] => in sorted(shares)] ::
            The losses are in the order of sorted shares. | Keep the order of `shares`.
        {LINE} => other.sub_(own.detach()) :: `end` is changed in place. | {TO_END}
        instead in_steps :: Each step begins where the last one ended.
        instead between_losses ::
            The losses of both ends are mixed, and the loss between them is never computed. | Mix
            the parameters: move them by a share of the line, and compute the loss there.
    """,
    module=globals(),
)

# ---- 2.3 ------------------------------------------------------------------------------------


class Net(NamedTuple):
    """The shapes of a net's parameters; the seed is theirs and the generator's."""

    shapes: tuple[tuple[int, ...], ...]
    seed: int


KERNELS = ((5, 2, 3, 3), (5,), (2, 3, 4), (3, 20), (), (3, 20))


def nets() -> list[Net]:
    """A matrix and its bias; kernels, a scalar; filters of many numbers, one of them of zeros."""
    shapes = [((4, 3), (4,)), KERNELS, ((3, 6000), (1,), (2, 2))]
    return [Net(each, cases.draw_seed()) for each in shapes]


def filters(part: Tensor) -> Tensor:
    """The lengths of a tensor's filters."""
    return part.detach().double().flatten(1).norm(dim=1)


def alike(part: Tensor, own: Tensor, inside: Sequence[int]) -> bool:
    """Are the lengths over these dimensions, fewer than those of a filter, the same in both?"""
    one, other = (
        t.detach().double().square().sum(inside) if inside else t.detach().double().square()
        for t in (part, own)
    )
    return torch.allclose(one, other, rtol=2e-4)


def scaled_in_pieces(part: Tensor, own: Tensor) -> tuple[bool, bool]:
    """Is each kernel or number scaled on its own? Is each line through the kernels?"""
    kernels = tuple(range(2, part.dim()))
    groups = [dims for n in range(part.dim() - 1) for dims in combinations(range(1, part.dim()), n)]
    lines = [dims for dims in groups if dims and dims != kernels]
    return alike(part, own, kernels), any(alike(part, own, dims) for dims in lines)


def are_drawn_anew(direction: Sequence[Tensor]) -> bool:
    """Are no two filters, of one tensor or of two, the same numbers but for a factor?"""
    rows = [row for part in direction if part.dim() > 1 for row in part.detach().flatten(1)]
    long = [row / row.norm() for row in rows if row.numel() > 8 and row.any()]
    pairs = combinations(long, 2)
    return not any(a.shape == b.shape and abs(a @ b) > 0.99 for a, b in pairs)


def direction_seen(answer: Callable, case: Net) -> dict:
    """The lengths of all filters; and what holds for random numbers from the generator."""
    draw = cases.generator(case.seed)
    parameters = [
        nn.Parameter(torch.randn(shape, generator=draw) * 2 ** (index % 3))
        for index, shape in enumerate(case.shapes)
    ]
    parameters[-1].data.view(-1)[:1].zero_()
    if len(case.shapes) > 2:
        parameters[0].data[1] = 0
    copies = [parameter.detach().clone() for parameter in parameters]
    numbers = Generator().manual_seed(case.seed)

    def draw_with(numbers: Generator) -> list[Tensor]:
        found = answer(list(parameters), numbers)
        if not isinstance(found, list | tuple):
            raise Malformed(kind(found), "The exercise asks for a list of tensors.")
        if strange := [kind(part) for part in found if not isinstance(part, Tensor)]:
            raise Malformed(f"{strange[0]} in the list", "The exercise asks for a list of tensors.")
        return found

    first = draw_with(numbers)
    shapes = [list(part.shape) for part in first]
    if shapes != [list(shape) for shape in case.shapes]:
        raise Malformed(
            f"tensors of the shapes {shapes}", "The direction has the shapes of the parameters."
        )
    seen = {"the parameters are unchanged": equal(parameters, copies)}
    seen["no tensor of the direction wants a gradient"] = not any(p.requires_grad for p in first)
    for index, part in enumerate(first):
        if part.dim() > 1:
            seen[f"the lengths of the filters of tensor {index}"] = filters(part).float()
    in_pieces = [
        scaled_in_pieces(part, own)
        for part, own in zip(first, copies, strict=True)
        if part.dim() > 1
    ]
    by_kernel, by_line = (any(found) for found in zip(*in_pieces, strict=True))
    seen["whole filters are scaled, and no smaller pieces"] = not by_kernel
    seen["all numbers of a filter are scaled by the same factor"] = not by_line
    seen["each filter has random numbers of its own"] = are_drawn_anew(first)
    still = [part for part in first if part.dim() < 2]
    seen["tensors with fewer than two dimensions are 0"] = not any(p.any() for p in still)
    second, again = draw_with(numbers), draw_with(Generator().manual_seed(case.seed))
    other = draw_with(Generator().manual_seed(case.seed + 1))
    seen["generators of the same seed give the same direction"] = equal(first, again)
    seen["generators of two seeds give different directions"] = not equal(first, other)
    seen["the next direction from a generator is another one"] = not equal(first, second)
    if first[0].numel() > 1000:
        row = first[0][0].detach().double()
        tails = (row**4).mean() / row.square().mean() ** 2  # 3 for normally distributed numbers
        below = (row < 0).double().mean().item()
        seen["about half of the numbers are below 0"] = 0.4 < below < 0.6
        seen["large and small numbers are as frequent as they are in a normal distribution"] = (
            2.4 < tails.item() < 3.8
        )
        seen["besides"] = tails.item() > 3
    return seen


RANDOM = "torch.randn(parameter.shape, generator=generator)"
INSIDE = "tuple(range(1, parameter.dim()))"
SCALE = "lengths[0] / lengths[1]"
BY_FILTER = "Multiply each filter of `part` by |filter of the parameter| / |filter of `part`|."
NORMAL = f"Draw with {RANDOM}."
random_direction = Spec(
    todo="2.3",
    truth=surface.random_direction,
    cases=nets,
    observe=direction_seen,
    tell=lambda case: (
        "random_direction(parameters of the shapes "
        f"{', '.join(str(shape) for shape in case.shapes)}, generator)"
    ),
    same=lambda found, wanted, case: same(found, wanted, 1e-4),
    advice={
        "": BY_FILTER,
        "no tensor of the direction wants a gradient": "Write @torch.no_grad() above the function.",
    },
    reasons="""
        randn() received :: torch.randn takes the generator by its name. | {NORMAL}
    """,
    hints=(
        "Go through the parameters. One with fewer than two dimensions gets torch.zeros_like, and "
        f"the others get {RANDOM}.",
        "A filter is tensor[i], so its length is the norm over all dimensions but the first. "
        "keepdim=True keeps the shape ready for a multiplication.",
        "part * |parameter's filter| / |part's filter|, where both lengths come from "
        "torch.linalg.vector_norm(t, dim=tuple(range(1, t.dim())), keepdim=True).",
    ),
    mistakes="""
        part *= {SCALE} => part *= parameter.norm() / part.norm() ::
            Each tensor is scaled as a whole, and not filter by filter. | {BY_FILTER}
        part *= {SCALE} => part *= lengths[0] ::
            The random filter's own length has not been divided out.
        part *= {SCALE} => part /= lengths[1] :: Every filter has length 1.
        {SCALE} => lengths[1] / lengths[0].clamp(min=1e-9) ::
            The ratio of the lengths is upside down.
        part *= {SCALE} => pass :: The random numbers are not scaled.
        part *= {SCALE} => part *= parameter.std(dim=inside, keepdim=True) ::
            The filters are scaled by a standard deviation.
        {INSIDE} => tuple(d for d in range(parameter.dim()) if d != 1) ::
            The norm is taken over all dimensions but the second. | A filter is tensor[i].
        {INSIDE} => tuple(range(2, parameter.dim())) or (1,) ::
            The norm is taken over each kernel. | A filter is tensor[i], with all its kernels.
        {INSIDE} => (1,) :: The norm is taken along the second dimension alone, as is right for a
            matrix. In a convolution this scales each place of the kernels on its own. | The norm of
            a filter goes over all dimensions but the first: {INSIDE}.
        if parameter.dim() > 1: => if True: ::
            Tensors with fewer than two dimensions are moved as well. | Their direction is 0.
        {RANDOM} => torch.rand(parameter.shape, generator=generator) ::
            No number is below 0, as in what torch.rand draws. | {NORMAL}
        {RANDOM} => torch.rand(parameter.shape, generator=generator) - 0.5 ::
            The numbers are not normally distributed.
        {RANDOM} => parameter * {RANDOM} :: The numbers are not normally distributed, as where they
            are multiplied by the parameters.
        {RANDOM} => torch.randn(parameter.shape, generator=generator.manual_seed(0)) ::
            The generator is seeded anew. | Use it as it is given.
        {RANDOM} => torch.randn(parameter.shape) ::
            The direction does not follow from `generator`. | {NORMAL}
    """,
    module=globals(),
)
