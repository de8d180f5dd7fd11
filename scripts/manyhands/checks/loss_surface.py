"""Checks of lesson 02. The loss writes down where the parameters are whenever it is called.

So a check sees which points an answer visited, on which rank, and what it left behind; the truth
is the height of a small landscape at those points, or a Hessian whose eigenvalues were chosen.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Generator, Tensor, nn

from manyhands.checks import Lesson, Wrong, ranks, told
from manyhands.checks.shared import Reasons, alone, because, number
from manyhands.loss_surface import surface as truth
from manyhands.ranks.failures import RankFailed, RanksHung, is_echo

lesson = Lesson("loss_surface")
hint, summary, ready, keep = lesson.hint, lesson.summary, lesson.ready, lesson.keep

Mistakes = Iterable[tuple[object, str, str]]  # what it would give, what it smells of, what to try

# ---- a landscape, and what is seen of a walk in it -------------------------------------------


class NoWay(ValueError):
    """What the loss raises where it shall fail."""


class Hill:
    """A loss of four small tensors, above and below 0, that remembers where it was asked for."""

    def __init__(self, seed: int, fails: bool = False) -> None:
        self.draw, self.fails = Generator().manual_seed(seed), fails
        self.parameters = [nn.Parameter(part) for part in self.parts()]
        self.x, self.y = self.normal(7, 3), self.normal(7, 2)
        self.places: list[Tensor] = []
        self.writes: list[int] = []  # at each place: how often a parameter was changed in place

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.draw, dtype=torch.float64)

    def parts(self) -> list[Tensor]:
        """Random tensors of the parameters' shapes: a direction, or another solution."""
        return [self.normal(*shape) for shape in ((4, 3), (4,), (2, 4), (2,))]

    def loss(self) -> Tensor:
        self.places.append(flat(self.parameters))
        self.writes.append(max(part._version for part in self.parameters))
        if self.fails:
            raise NoWay("this loss cannot be computed")
        w1, b1, w2, b2 = self.parameters
        return ((self.x @ w1.T + b1).tanh() @ w2.T + b2 - self.y).square().mean() - 3

    def height(self, place: Tensor) -> float:
        """The loss at any point."""
        with torch.no_grad():
            nn.utils.vector_to_parameters(place, self.parameters)
            return self.loss().item()


class Walk(NamedTuple):
    """What an answer did: its value, where it asked for the loss, and what it left behind."""

    value: object
    places: list[Tensor]
    end: Tensor  # the parameters afterwards
    others: Tensor  # the directions, or the other solution, afterwards
    trains: bool  # do the parameters still want gradients, and does torch record them?
    writes: list[int]  # how often a parameter had been changed in place, at each of the places


def watch(hill: Hill, others: list[list[Tensor]], call: Callable) -> Walk:
    """Call, with the hill's own parameters, and bring home what was seen."""
    try:
        value = _plain(call(hill.loss, list(hill.parameters)))
    except NoWay:
        value = "raised"
    trains = torch.is_grad_enabled() and all(part.requires_grad for part in hill.parameters)
    torch.set_grad_enabled(True)
    end, others_end = flat(hill.parameters), flat(sum(others, []))
    return Walk(value, hill.places, end, others_end, trains, hill.writes)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of all numbers, one after the other."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _plain(value: object) -> object:
    """What can be sent home: tensors without their graph, numbers, lists of them, or words."""
    if isinstance(value, Tensor):
        plain = value.detach().clone()
        return plain.requires_grad_() if value.requires_grad else plain
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    is_number = value is None or isinstance(value, int | float)
    return value if is_number else f"a {type(value).__name__}"


def _close(one: Tensor, other: Tensor) -> bool:
    """Equal but for rounding."""
    return one.shape == other.shape and torch.allclose(
        one.double(), other.double(), rtol=1e-5, atol=1e-6
    )


def _named(found: Tensor, mistakes: Mistakes, *otherwise: str) -> tuple[str, ...]:
    """Smell and hint of the mistake that gives this value."""
    return next(
        (why for wrong, *why in mistakes if _close(found, torch.as_tensor(wrong))), otherwise
    )


def _row(values: Sequence | Tensor) -> str:
    rounded = (round(value, 6) + 0.0 for value in torch.as_tensor(values).tolist())  # no -0
    return "[" + ", ".join(f"{value:.4g}" for value in rounded) + "]"


def _seed() -> int:
    return random.randrange(10**6)


def _compare_kept(walk: Walk, start: Tensor, others: Tensor, case: str, what: str) -> None:
    """Are the parameters and all other tensors what they were?"""
    if not torch.equal(walk.others, others):
        raise Wrong(
            f"after {case} the {what} is another one",
            f"the {what} was changed in place, and is still needed",
            "a - b and a * b make a new tensor; a -= b, a.mul_(b) and the like change the old one",
        )
    if not torch.equal(walk.end, start):
        gap = (walk.end - start).abs().max()
        raise Wrong(
            f"after {case} the parameters are off by up to {gap:.2g}", *_why_left(walk, start)
        )
    if not walk.trains:
        raise Wrong(
            f"after {case} torch records no gradients any more",
            "requires_grad_(False) and set_grad_enabled(False) last until they are undone",
            "torch.no_grad() ends by itself, as `with` or as @torch.no_grad()",
        )


def _why_left(walk: Walk, start: Tensor) -> tuple[str, str]:
    if _close(walk.end, start):
        return (
            "rounding: adding and then subtracting does not give the same bits",
            "keep clones, and copy them back",
        )
    if walk.value == "raised":
        return (
            "there `loss` failed, and an error skips the lines that put back",
            "put back in `finally:`",
        )
    return (
        "they are not put back; or what was kept is no copy: list(parameters), .data and .detach() "
        "are still the same memory, and move as well",
        "before: [p.clone() for p in parameters]; after: p.copy_(old)",
    )


# ---- 2.1 ------------------------------------------------------------------------------------

IN_PLACE = "parameter.add_(part, alpha=distance) moves the model's own tensor"
BARE = "`loss` takes no arguments: it looks at the model's own tensors", "loss()"
LEAF = (
    "torch guards tensors that require a gradient against changes in place",
    "put `with torch.no_grad():` around the move, or @torch.no_grad() above the function",
)
MOVE_REASONS: Reasons = {
    "loss() takes 1 positional": BARE,
    "leaf Variable that requires grad": LEAF,
    "a view of a leaf Variable": LEAF,
    "zip() argument": (
        "a direction has one tensor for each parameter, and a distance one number a direction",
        "for direction, distance in zip(...): for parameter, part in zip(parameters, direction)",
    ),
    "must match the size": (
        "tensors of two shapes: a direction is a list, one tensor for each parameter",
        "for direction, distance in zip(...): for parameter, part in zip(parameters, direction)",
    ),
    "argument 'alpha' must be Number": ("a distance is one number", "zip(directions, distances)"),
    "must be Tensor, not list": (
        "a direction is a list of tensors, one for each parameter",
        "for direction, distance in zip(...): for parameter, part in zip(parameters, direction)",
    ),
    "can't multiply sequence": (
        "a direction is a list of tensors, and a list times a number is no tensor",
        "go through parameters and direction together, with zip",
    ),
    "Only Tensors created explicitly": (
        "no copy of the model can help: `loss` looks at the tensors that are given",
        IN_PLACE,
    ),
}


@lesson.exercise(
    "2.1",
    "Three parts: keep clones of the parameters, move and compute the loss, put the clones back.",
    "Move in place, under torch.no_grad(): for each direction and its distance, "
    "parameter.add_(part, alpha=distance) for each parameter and its part of the direction.",
    "The middle stands in `try:`, and `finally:` does parameter.copy_(old) for each parameter. "
    "loss().item() is a plain number.",
)
def loss_at(answer) -> None:
    """One to three directions; a way that is long; and a loss that fails."""

    def some(*limits: float) -> tuple[float, ...]:
        return tuple(round(random.uniform(x, x + 0.3), 3) for x in limits)

    cases = [
        (_seed(), some(0.4, -1.5), False),
        (_seed(), some(9.0), False),
        (_seed(), some(-0.8, 0.3, 1.2), False),
        (_seed(), some(0.4, -1.5), True),
    ]
    walks = alone(answer, cases, _tell_at, MOVE_REASONS, _run_at)
    for (seed, distances, fails), walk in zip(cases, walks, strict=True):
        case, hill = _tell_at(seed, distances, fails), Hill(seed)
        directions = [hill.parts() for _ in distances]
        start, basis = flat(hill.parameters), torch.stack([flat(d) for d in directions], dim=1)
        wanted = start + basis @ torch.tensor(distances, dtype=torch.float64)
        _compare_place(walk, start, basis, distances, case)
        _compare_kept(walk, start, flat(sum(directions, [])), case, "direction")
        if not fails:
            _compare_height(walk.value, hill.height(wanted), hill.height(start), case)
        elif walk.value != "raised":
            seen = f"{case} gives {walk.value!r}"
            raise Wrong(
                seen, "the error of `loss` is swallowed", "try: ... finally: ... has no except"
            )


def _tell_at(seed: int, distances: tuple[float, ...], fails: bool) -> str:
    plural = "s" * (len(distances) > 1)
    failing = ", with a loss that raises ValueError" * fails
    return f"loss_at({len(distances)} direction{plural}, distances={_row(distances)}){failing}"


def _run_at(answer, seed: int, distances: tuple[float, ...], fails: bool) -> Walk:
    hill = Hill(seed, fails)
    directions = [hill.parts() for _ in distances]
    return watch(hill, directions, lambda *given: answer(*given, directions, distances))


def _compare_place(
    walk: Walk, start: Tensor, basis: Tensor, distances: tuple[float, ...], case: str
) -> None:
    """Was the loss asked for at the point that is meant?"""
    places = walk.places
    if not places:
        raise Wrong(f"{case} never calls `loss`", "", "loss() takes no arguments")
    wanted = torch.tensor(distances, dtype=torch.float64)
    if any(_close(place, start + basis @ wanted) for place in places):
        return
    moves = torch.stack(places) - start  # (calls, P)
    gone = torch.linalg.lstsq(basis, moves.T).solution.T  # (calls, D)
    if len(wanted) > 1 and _close(gone, wanted.diag()):
        seen = f"{case} computes {len(gone)} losses, each with one direction alone"
        raise Wrong(seen, "all directions lead to one point", "call loss() once, after all moves")
    if not _close(gone @ basis.T, moves):
        raise Wrong(
            f"{case}: the loss is taken off the plane", *_why_off(moves[-1], start, basis, wanted)
        )
    seen = f"{case}: the loss is taken at distances {_row(gone[-1])}"
    if walk.writes[-1] > 1 and torch.equal(places[-1], start):
        smell = "the parameters have been moved, and put back before loss() is called"
        raise Wrong(seen, smell, "loss() stands between the move and the way back")
    advice = "parameters + sum of distance * direction"
    raise Wrong(seen, *_named(gone[-1], _wrong_place(wanted, basis), "", advice))


def _wrong_place(wanted: Tensor, basis: Tensor) -> Mistakes:
    """The distances that are gone, for each mistake."""
    first, last = torch.zeros_like(wanted), torch.zeros_like(wanted)
    first[0], last[-1] = wanted[0], wanted[-1]
    yield (
        0 * wanted,
        "nothing has moved by then: `parameter = parameter + ...` and copies make new tensors, and "
        "`loss` knows only the old ones",
        f"{IN_PLACE}; loss() comes after it",
    )
    yield wanted.flip(0), "the distances have changed places", "zip(directions, distances)"
    yield first, "only the first direction is gone", "a loop over all directions"
    yield last, "only the last direction is gone", "move on from where the parameters are"
    yield torch.ones_like(wanted), "the distances are left out", "alpha=distance"
    yield -wanted, "the way leads backwards", "add distance * direction"
    yield wanted / basis.norm(dim=0), "directions are scaled to length 1", "take them as they are"
    yield wanted.sum().expand(len(wanted)), "every direction is gone by the sum", "zip them"


def _why_off(move: Tensor, start: Tensor, basis: Tensor, wanted: Tensor) -> tuple[str, str]:
    still = (move == 0) & (basis @ wanted != 0)
    if still.any() and _close(move[~still], (basis @ wanted)[~still]):
        num_still, total = int(still.sum()), len(move)
        return f"{num_still} of {total} numbers have not moved", "move every tensor of the list"
    if any(_close(move, way - start) for way in (basis @ wanted, basis[:, -1] * wanted[-1])):
        return "the parameters were replaced by the direction", "add to them; do not copy over them"
    return "", "parameters + sum of distance * direction, for each of the tensors"


def _compare_height(value: object, wanted: float, home: float, case: str) -> None:
    if isinstance(value, Tensor) and value.requires_grad:
        seen = f"{case} gives a tensor that still wants a gradient"
        raise Wrong(seen, "it keeps the whole graph in memory", "return loss().item()")
    value = number(value, case)
    mistakes = [
        (home, "that is the loss before the move", "call loss() after it"),
        (wanted - home, "the loss at the start is subtracted", "the loss itself is asked for"),
        (int(wanted), "it was rounded", "return loss().item()"),
    ]
    if not _close(torch.tensor(value), torch.tensor(wanted)):
        seen = f"{case} gives {value:.6g}, not {wanted:.6g}"
        raise Wrong(seen, *_named(torch.tensor(value), mistakes, "", "return loss().item()"))


# ---- 2.2 ------------------------------------------------------------------------------------

LISTS = (
    "loss_at wants a list of directions, and a list with one number for each direction",
    "for one direction and one share these are lists of one: [line] and [share]",
)
SLICE_REASONS: Reasons = {
    **MOVE_REASONS,
    "zip() argument": LISTS,
    "must match the size": LISTS,
    "for -: 'list' and 'list'": (
        "both are lists of tensors, and lists cannot be subtracted",
        "go through both with zip, and subtract tensor from tensor",
    ),
}


@lesson.exercise(
    "2.2",
    "The line is a direction: for each parameter what `end` has more than it, end - parameter.",
    "Each share is a distance along that one direction; loss_at wants a list of directions.",
    "line = [other - own.detach() for own, other in zip(parameters, end)], then "
    "loss_at(loss, parameters, [line], [share]) for each share.",
)
def slice_between(answer) -> None:
    """Shares in any order: the two ends, between them, and beyond them."""
    shares = [0.0, *(round(random.uniform(x, x + 0.4), 3) for x in (-0.7, 0.1, 0.55, 1.5))]
    random.shuffle(shares)
    shares.append(1.0)
    cases = [(_seed(), shares), (_seed(), [round(random.uniform(0.2, 0.4), 3)])]
    walks = alone(answer, cases, _tell_slice, SLICE_REASONS, _run_slice)
    for (seed, shares), walk in zip(cases, walks, strict=True):
        case, hill = _tell_slice(seed, shares), Hill(seed)
        start, end = flat(hill.parameters), flat(hill.parts())
        _compare_line(walk, start, end, shares, case)
        _compare_kept(walk, start, end, case, "end")
        wanted = [hill.height(start + share * (end - start)) for share in shares]
        _compare_losses(walk.value, wanted, shares, case)


def _tell_slice(seed: int, shares: list[float]) -> str:
    return f"slice_between(shares={_row(shares)})"


def _run_slice(answer, seed: int, shares: list[float]) -> Walk:
    hill = Hill(seed)
    end = [nn.Parameter(part) for part in hill.parts()]
    return watch(hill, [end], lambda *given: answer(*given, list(end), list(shares)))


def _compare_line(walk: Walk, start: Tensor, end: Tensor, shares: list[float], case: str) -> None:
    """Was the loss asked for at each share of the line?"""
    line, s = end - start, torch.tensor(shares, dtype=torch.float64)
    if not walk.places:
        if walk.value in ("a generator", "a map"):
            smell = "nothing is computed before somebody goes through it"
            advice = "a list is asked for: [... for share in shares], not (...)"
            raise Wrong(f"{case} gives {walk.value}", smell, advice)
        raise Wrong(f"{case} never calls `loss`", "", "one call of loss_at for each share")
    places = torch.stack(walk.places)
    missing = [x for x in shares if not any(_close(p, start + x * line) for p in places)]
    if not missing:
        return
    gone = (places - start) @ line / (line @ line)  # the share of each call, if it is on the line
    seen = f"{case}: the loss is taken at shares {_row(gone)}"
    if set(gone.round(decimals=4).tolist()) <= {0.0, 1.0}:
        raise Wrong(
            seen,
            "losses cannot be interpolated: what lies between two networks has to be computed",
            "move the parameters to each share, and call the loss there",
        )
    if not _close(places, start + gone[:, None] * line):
        mistakes = [
            (start + s[:, None] * end, "`end` was taken for the direction", "end - parameters"),
            (s[:, None] * end, "the way begins at 0", "parameters + share * (end - parameters)"),
            (start + s[:, None] * (end + start), "end + parameters is no way", "end - parameters"),
        ]
        seen = f"{case}: the loss is taken at points off the line"
        raise Wrong(seen, *_named(places, mistakes, "", "the direction is end - parameters"))
    advice = "one loss for each share, in their order"
    raise Wrong(seen, *_named(gone, _wrong_shares(s), "", advice))


def _wrong_shares(s: Tensor) -> Mistakes:
    """The shares that are gone, for each mistake."""
    onward = list(itertools.accumulate(s.tolist(), lambda at, share: at + share * (1 - at)))
    return [
        (1 - s, "share 0 is at the parameters, and share 1 at `end`", "turn the shares round"),
        (-s, "the way leads backwards", "the direction is end - parameters"),
        (s.clamp(0, 1), "shares below 0 and above 1 lie on the line, too", "do not cut them off"),
        (s.clamp(0), "shares below 0 lie on the line, too", "do not cut them off"),
        (s.cumsum(0), "each step begins where the last one ended", "put back; is 2.1 green?"),
        (onward, "the direction is taken anew from moved parameters", "put back after each loss"),
        (
            s.sum().view(1),
            "one call goes all shares one after the other, to one point",
            "one call of loss_at for each share",
        ),
    ]


def _compare_losses(value: object, wanted: list[float], shares: list[float], case: str) -> None:
    if isinstance(value, Tensor):
        value = (
            value.tolist() if value.dim() == 1 else value.item() if value.numel() == 1 else value
        )
    if not isinstance(value, list) or len(value) != len(shares):
        size = f" of {len(value)}" if isinstance(value, list) else ""
        is_told = value is None or isinstance(value, str)
        seen = f"{case} gives {value if is_told else 'a ' + type(value).__name__}{size}"
        smell = "nothing is returned" if value is None else "one loss for each share is asked for"
        raise Wrong(seen, smell, "[loss_at(...) for share in shares]")
    graph = any(isinstance(part, Tensor) and part.requires_grad for part in value)
    if graph:
        seen = f"{case} gives tensors that still want a gradient"
        raise Wrong(seen, "they keep their graphs in memory", "loss().item()")
    found = torch.tensor([number(part, f"an element of {case}") for part in value])
    right = torch.tensor(wanted)
    if not _close(found, right):
        by_share = [loss for _, loss in sorted(zip(shares, wanted, strict=True))]
        mistakes = [
            (by_share, "the losses come in the order of sorted shares", "keep the given order"),
            (right.flip(0), "the losses come in the opposite order", "append each at the end"),
        ]
        seen = f"{case} gives {_row(found)}, not {_row(right)}"
        raise Wrong(seen, *_named(found, mistakes, "", "the loss at each share; is 2.1 green?"))


# ---- 2.3 ------------------------------------------------------------------------------------

SHAPES = ((4, 3), (4,), (5, 2, 3, 3), (5,), (), (4, 4000), (3, 6, 2))
NO_FILTER = (
    "biases have one dimension and scalars none: there is no filter inside",
    "look at parameter.dim() first",
)
DRAW_REASONS: Reasons = {
    "leaf Variable that requires grad": LEAF,
    "unexpected keyword argument 'generator'": (
        "torch.randn_like takes no generator in this version of torch",
        "torch.randn(parameter.shape, generator=generator)",
    ),
    "invalid combination of arguments": (
        "torch.randn and the like take the generator by its name",
        "torch.randn(parameter.shape, generator=generator)",
    ),
    "Dimension out of range": NO_FILTER,
    " a 0-d tensor": NO_FILTER,
}


@lesson.exercise(
    "2.3",
    "Go through the parameters. One with fewer than two dimensions gets torch.zeros_like; the "
    "others torch.randn(parameter.shape, generator=generator).",
    "A filter is tensor[i], so its length is the norm over all dimensions but the first. "
    "keepdim=True keeps the shape ready for a multiplication.",
    "part * |parameter's filter| / |part's filter|, where both lengths come from "
    "torch.linalg.vector_norm(t, dim=tuple(range(1, t.dim())), keepdim=True).",
)
def random_direction(answer) -> None:
    """Matrices, kernels, biases, a scalar, a filter of zeros; one generator twice, and anew."""
    seed = _seed()
    ((found, kept),) = alone(answer, [(seed,)], lambda seed: DRAWN, DRAW_REASONS, _run_directions)
    parameters = _drawn_parameters(seed)
    for direction in found:
        _compare_form(direction, parameters)
    if not kept:
        raise Wrong(f"after {DRAWN} the parameters are others", "", "scale the direction, not them")
    for direction in found:
        for index in sorted(range(len(SHAPES)), key=lambda i: -parameters[i].numel()):
            _compare_part(parameters[index], direction[index])
    _compare_draws(*(flat(direction) for direction in found))


DRAWN = "random_direction(parameters, generator)"


def _drawn_parameters(seed: int) -> list[nn.Parameter]:
    draw = Generator().manual_seed(seed)
    parameters = [torch.randn(shape, generator=draw) for shape in SHAPES]
    for parameter in parameters:
        if parameter.dim() > 1:  # filters of quite other lengths, and one of zeros
            for part in parameter:
                part *= torch.rand((), generator=draw) + 0.2
    parameters[5] *= 0.25
    parameters[2][1] = 0
    return [nn.Parameter(parameter) for parameter in parameters]


def _run_directions(answer, seed: int) -> tuple[list, bool]:
    """Two directions from one generator, and the first once more from a new one."""
    parameters, generator = _drawn_parameters(seed), Generator().manual_seed(seed + 1)
    before = flat(parameters)
    found = [_plain(answer(list(parameters), generator)) for _ in range(2)]
    found.append(_plain(answer(list(parameters), Generator().manual_seed(seed + 1))))
    return found, torch.equal(before, flat(parameters))


def _compare_form(direction: object, parameters: list[nn.Parameter]) -> None:
    if not isinstance(direction, list):
        shown = (
            "None" if direction is None else direction if isinstance(direction, str) else "a tensor"
        )
        smell = "nothing is returned" if direction is None else "a list of tensors is asked for"
        raise Wrong(f"{DRAWN} gives {shown}", smell, "one tensor for each parameter, in a list")
    if len(direction) != len(parameters):
        seen = f"{DRAWN} gives {len(direction)} tensors for {len(parameters)} parameters"
        raise Wrong(seen, "tensors that are not moved belong to a direction, too", "zeros for them")
    for parameter, part in zip(parameters, direction, strict=True):
        shape = tuple(parameter.shape)
        if not isinstance(part, Tensor) or part.shape != parameter.shape:
            gives = f"shape {tuple(part.shape)}" if isinstance(part, Tensor) else repr(part)[:60]
            raise Wrong(f"for shape {shape} it gives {gives}", "", "the shapes of the parameters")
        if part.requires_grad:
            raise Wrong(
                f"the direction for shape {shape} wants a gradient",
                "it was computed from parameters that do, and keeps their graph",
                "@torch.no_grad() above the function, or parameter.detach()",
            )
        if not part.isfinite().all():
            seen = f"for shape {shape} the direction holds {part[~part.isfinite()][0]}"
            smell = "a filter of zeros has length 0, and nothing may be divided by that"
            raise Wrong(seen, smell, "divide by the length of the random filter")


def _compare_part(parameter: Tensor, part: Tensor) -> None:
    shape = tuple(parameter.shape)
    if len(shape) < 2:
        if part.any():
            seen = f"the direction of a parameter of shape {shape} is not 0"
            raise Wrong(seen, "biases and norms are not moved", "zeros where dim() is below 2")
        return
    inside = tuple(range(1, len(shape)))
    own, found = _lengths(parameter, inside), _lengths(part, inside)
    if not _close(found, own):
        seen = f"shape {shape}: filters as long as {_row(found[:3])}, not {_row(own[:3])}"
        raise Wrong(seen, *_why_length(parameter, part, own, found))
    for size in range(len(inside)):
        for fewer in itertools.combinations(inside, size):
            if _close(_lengths(parameter, fewer), _lengths(part, fewer)):
                seen = (
                    f"shape {shape}: norms over the dimensions {fewer} are those of the parameter"
                )
                smell = "a filter is all of tensor[i], and smaller pieces were scaled"
                raise Wrong(seen, smell, f"the length of a filter is its norm over {inside}")
    if part.numel() > 10_000:
        _compare_numbers(part / found[:, None] * shape[1] ** 0.5, parameter / own[:, None])


def _lengths(tensor: Tensor, dims: tuple[int, ...]) -> Tensor:
    tensor = tensor.detach().double()
    return torch.linalg.vector_norm(tensor, dim=dims) if dims else tensor.abs()


def _why_length(parameter: Tensor, part: Tensor, own: Tensor, found: Tensor) -> tuple[str, ...]:
    """The mistake behind filters of another length."""
    size = parameter[0].numel()
    filters = "scale each filter, tensor[i], by itself"
    if not found.any():
        return "it does not move at all", "torch.randn, where dim() is 2 or more"
    if _close(found.norm(), own.norm()):
        columns = tuple(dim for dim in range(parameter.dim()) if dim != 1)
        across = (0,), columns
        if any(_close(_lengths(parameter, d), _lengths(part, d)) for d in across):
            return "filters lie along the first dimension there, not across it", "tensor[i]"
    if size > 1000 and ((found / own - 1).abs() < 0.05).all():
        smell = "nearly that length: std() or the root of a mean square is no length"
        return smell, "the norm of the parameter's filter / the norm of the random filter"
    if _close(found.norm(), own.norm()):
        return "one scale for the whole tensor", filters
    mistakes = [
        (torch.ones_like(found), "every filter has length 1", "times the parameter's length"),
        (own.square(), "the length is in it twice", "|parameter's filter| / |random filter|"),
        (own.norm().expand(len(own)), "each has the whole tensor's length", filters),
    ]
    for wrong, *why in mistakes:
        if _close(found, wrong):
            return tuple(why)
    typical = found / size**0.5  # a random filter of n numbers is about sqrt(n) long
    if (typical - 1).abs().mean() < 0.2:
        return "the random numbers were not scaled", filters
    if (found * own / size - 1).abs().mean() < 0.2:
        return "the ratio is upside down", "|parameter's filter| / |random filter|"
    if (typical / own - 1).abs().mean() < 0.2:
        return "the random filter's own length is still in it", "divide by it"
    return "", filters


def _compare_numbers(numbers: Tensor, own: Tensor) -> None:
    """Are these 16,000 numbers of mean square 1 normal ones?"""
    negative, size = (numbers < 0).float().mean(), numbers.abs().mean()
    if not 0.4 < negative < 0.6:
        seen = f"{negative:.0%} of the numbers are negative, not about half"
        raise Wrong(seen, "torch.rand and .abs() give no number below 0", "torch.randn")
    if abs(size - (2 / torch.pi) ** 0.5) > 0.03:
        ratio = numbers / own.detach()  # of independent numbers: a few are huge
        if ratio.abs().mean() > 0.7 * ratio.square().mean().sqrt():
            raise Wrong(
                "each random number is as large as the parameter's own number there makes it",
                "the random numbers were multiplied by the parameter's numbers",
                "the parameter gives a length for each filter, and nothing else",
            )
        seen = f"the mean size of a number is {size:.2f} of the root mean square, not 0.80"
        raise Wrong(
            seen, "these are no normally distributed numbers", "torch.randn, not torch.rand"
        )


def _compare_draws(first: Tensor, second: Tensor, again: Tensor) -> None:
    if torch.equal(first, second):
        raise Wrong(
            "two directions drawn one after the other are the same",
            "the numbers do not come from `generator`, or it is seeded inside",
            "draw with generator=generator, and seed nothing",
        )
    if not torch.equal(first, again):
        raise Wrong(
            "two generators of one seed give two directions",
            "the numbers come from torch's own generator: each rank would get other directions",
            "torch.randn(..., generator=generator)",
        )


# ---- 2.4 ------------------------------------------------------------------------------------

Groups = list[list[int]]
NESTED = (
    "loss_at takes the two directions as they came, and one distance for each",
    "no brackets around `directions`",
)
SURFACE_REASONS: Reasons = {
    **MOVE_REASONS,
    "my_share() missing": (
        "my_share has to know whose share: which rank, and of how many",
        "dist.get_rank(group) and dist.get_world_size(group)",
    ),
    "'NoneType' object has no attribute": (
        "group=None stands for the whole job, and has no methods",
        "dist.get_rank(group) and dist.get_world_size(group) understand None, too",
    ),
    "valid indices (got float)": (
        "grid[i] is a distance, and no row of the table",
        "the table wants i and j, and loss_at wants grid[i] and grid[j]",
    ),
    "not part of group": (
        "a root is one rank of the whole job, and that one is not in this group",
        "all ranks get all losses, so no root is needed: dist.all_reduce(table, group=group)",
    ),
    "must be Tensor, not list": NESTED,
    "can't multiply sequence": NESTED,
    "but got <class 'float'>": (
        "a collective takes a tensor, no single number; and all_reduce returns None",
        "fill a table of zeros, and all_reduce the table after the loop",
    ),
    "ReduceOp.AVG": (
        "a mean over the ranks: each point has been computed by one rank only",
        "sum: all others add 0",
    ),
    "slice step cannot be zero": ("my_share takes the rank before the world size", "in that order"),
    "tensors of different size": (
        "the ranks do not have equally many points, and a collective wants equal sizes",
        "each rank fills its own points into a table of zeros for all",
    ),
    "of type torch.Tensor": ("a collective takes a tensor, no list", "a table of zeros to fill"),
}


@lesson.exercise(
    "2.4",
    "Number the points 0 to G^2 - 1; divmod(point, G) gives its row i and its column j.",
    "my_share(range(G^2), rank, world_size), both of `group`, are this rank's points. It writes "
    "their losses into a table of G^2 zeros.",
    "dist.all_reduce(table, group=group) adds the tables of all ranks up. Call it once, outside of "
    "loops, also on a rank without points; then .view(G, G).",
)
def surface(answer) -> None:
    """Four ranks; two pairs with a surface each; one rank and three; fewer points than ranks."""
    first = [-0.75, 0.125, 0.5]
    jobs = [
        ([[0, 1, 2, 3]], first),
        ([[0, 1], [2, 3]], first),
        ([[0], [1, 2, 3]], [-1.5, -0.25, 0.5, 1.0]),
        ([[0, 1, 2, 3]], [0.375]),
    ]
    seed = next(s for s in iter(_seed, None) if _true_surface(s, first)[3].min() < 0)
    try:
        results = ranks(_run_surfaces, 4, answer, seed, jobs)
    except RankFailed as failed:
        raise _why_stopped(failed, answer) from None
    if None in results:
        raise Wrong("a rank left by sys.exit()", "", "let the function end, or return")
    for number_of_job, (groups, grid) in enumerate(jobs):
        for index, group in enumerate(groups):
            walks = [results[rank][number_of_job] for rank in group]
            _compare_surface(walks, seed, index, groups, grid)


def _why_stopped(failed: RankFailed, answer) -> Exception:
    if failed.failure.error == "NotImplementedError":
        return failed
    seen, *why = told(failed, answer)
    if is_echo(failed.failure) or isinstance(failed, RanksHung) and failed.finished:
        return Wrong(
            seen,
            "not all make the same calls: of 4 ranks with 1 point, those without a point must "
            "call the collective, too",
            "no `return`, no `if` and no loop over points around it",
        )
    return because(failed.failure, SURFACE_REASONS, seen, *why)


def _run_surfaces(answer, seed: int, jobs: list[tuple[Groups, list[float]]]) -> list[Walk]:
    walks = []
    for groups, grid in jobs:
        made = [dist.new_group(group) for group in groups]
        index = next(i for i, group in enumerate(groups) if dist.get_rank() in group)
        hill = Hill(seed + index)
        directions = hill.parts(), hill.parts()
        options = {"group": made[index]} if len(groups) > 1 else {}

        def call(*given: object, directions=directions, grid=grid, options=options) -> object:
            return answer(*given, directions, list(grid), **options)

        walks.append(watch(hill, list(directions), call))
    return walks


def _true_surface(seed: int, grid: list[float]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The start, the two directions as columns, each point's place, and the losses."""
    hill = Hill(seed)
    start, basis = flat(hill.parameters), torch.stack([flat(hill.parts()) for _ in "12"], dim=1)
    points = torch.tensor(list(itertools.product(grid, grid)), dtype=torch.float64)
    places = start + points @ basis.T
    losses = torch.tensor([hill.height(place) for place in places], dtype=torch.float64)
    return start, basis, places, losses.view(len(grid), len(grid))


def _compare_surface(walks: list[Walk], seed: int, index: int, groups: Groups, grid: list) -> None:
    """What the ranks of one group did and returned, against the truth."""
    group, total = groups[index], len(grid) ** 2
    start, basis, places, losses = _true_surface(seed + index, grid)
    case = f"{total} point{'s' * (total > 1)} on {len(group)} rank{'s' * (len(group) > 1)}"
    if len(groups) > 1:
        case += f" (group = ranks {', '.join(map(str, group))})"
    done = [
        [point for place in walk.places for point in range(total) if _close(place, places[point])]
        for walk in walks
    ]
    if len(groups) > 1:
        _compare_group(done, group, case, total)
    if len(group) > 1 and total > 1 and all(len(set(mine)) == total for mine in done):
        seen = f"{case}: each rank computes all {total}"
        raise Wrong(
            seen, "nothing is shared out: as slow as one rank", "my_share(points, rank, ...)"
        )
    missing = sorted(set(range(total)).difference(*done))
    if missing:
        coordinates = [
            torch.linalg.lstsq(basis, place - start).solution
            for walk in walks
            for place in walk.places
        ]
        raise Wrong(
            f"{case}: nobody computes the points {missing}",
            *_why_missing(coordinates, done, missing, len(grid)),
        )
    shared = [p for p in range(total) if sum(p in mine for mine in done) > 1]
    if shared:
        seen = f"{case}: the points {shared} are computed by several ranks"
        raise Wrong(seen, "the shares overlap", "deal out the points with my_share")
    others = [_true_surface(seed + i, grid)[3] for i in range(len(groups)) if i != index]
    _compare_tables([walk.value for walk in walks], losses, done, others, case)
    for walk in walks:
        _compare_kept(walk, start, basis.T.reshape(-1), case, "direction")


def _compare_group(done: list[list[int]], group: list[int], case: str, total: int) -> None:
    """Are the shares those of the whole job?"""
    for rank, mine in zip(group, done, strict=True):
        shares = [list(range(rank, total, size)) for size in (4, len(group))]
        right = list(range(group.index(rank), total, len(group)))
        if mine == right or mine not in shares:
            continue
        smell = "rank and world size are those of the whole job"
        if mine == shares[1]:
            smell = (
                f"{rank} is the rank in the whole job, and {group.index(rank)} that in the group"
            )
        seen = f"{case}: rank {rank} computes the points {mine}"
        raise Wrong(seen, smell, "dist.get_rank(group), dist.get_world_size(group)")


def _why_missing(
    coordinates: list[Tensor], done: list[list[int]], missing: list[int], size: int
) -> tuple[str, str]:
    total = size * size
    if not coordinates:
        return "`loss` is never called", "loss_at at each point of this rank's share"
    if len(missing) < total and missing == list(range(missing[0], total)):
        return "the rest of the division was dropped", "my_share deals out all of them"
    at = torch.stack(coordinates)  # (calls, 2)
    if _close(at, at.round()) and at.min() > -0.5 and at.max() < size - 0.5:
        return (
            "the loss is taken at distances 0, 1, 2, ...: i and j are places in `grid`",
            "the distances of the point [i, j] are grid[i] and grid[j]",
        )
    own = [range(rank, size, len(done)) for rank in range(len(done))]
    if done == [[i * size + j for i in mine for j in mine] for mine in own]:
        return (
            "each rank computes only some of the columns of its rows",
            "share out the points, or only the rows, with all the columns of a row",
        )
    return "", "the point [i, j] is at distances (grid[i], grid[j]); is 2.1 green?"


def _compare_tables(
    tables: list, losses: Tensor, done: list[list[int]], others: list[Tensor], case: str
) -> None:
    right = [isinstance(t, Tensor) and _close(t, losses) for t in tables]
    if right[0] and not any(right[1:]) and len(right) > 1:
        seen = f"{case}: only the first rank has the surface"
        raise Wrong(seen, "reduce and gather bring it to one rank", "all ranks: all_reduce")
    for at, table in enumerate(tables):
        case_here = f"{case}: the group's rank {at}"
        if not isinstance(table, Tensor):
            shown = "None" if table is None else f"a {type(table).__name__}"
            shown = table if isinstance(table, str) else shown
            smell = "all_reduce changes its argument, and returns None" if table is None else ""
            raise Wrong(f"{case_here} returns {shown}", smell, "return the table, a tensor")
        if table.shape != losses.shape:
            seen = f"{case_here} returns shape {tuple(table.shape)}, not {tuple(losses.shape)}"
            raise Wrong(seen, "", "losses.view(len(grid), len(grid))")
        if not right[at]:
            row = next(i for i, wanted in enumerate(losses) if not _close(table[i], wanted))
            raise Wrong(
                f"{case_here} has {_row(table[row])} in row {row}, not {_row(losses[row])}",
                *_why_table(table.double(), losses, done[at], len(tables), others),
            )
        if table.dtype != torch.float64:
            seen = f"{case_here} returns {table.dtype}"
            smell = "torch.zeros makes 32 bits, which round what loss_at gives"
            raise Wrong(seen, smell, "dtype=torch.float64")


def _why_table(
    table: Tensor, losses: Tensor, mine: list[int], num_ranks: int, others: list[Tensor]
) -> tuple[str, ...]:
    own = torch.zeros(losses.numel(), dtype=torch.float64)
    own[mine] = losses.flatten()[mine]
    own = own.view_as(losses)
    whole = "whole numbers: the table has an integer dtype", "dtype=torch.float64"
    mistakes = [
        (own, "only this rank's own points are there", "all_reduce adds up the tables of all"),
        (losses.T, "i and j have changed places", "row i: grid[i] along the first direction"),
        (losses / num_ranks, "a mean over the ranks", "one rank adds its loss, all others 0: sum"),
        (losses * num_ranks, "all ranks add the same table", "fill in this rank's points only"),
        (losses.clamp(min=0), "a maximum with 0: losses below 0 are lost", "add up, ReduceOp.SUM"),
        (losses.trunc(), *whole),
        (losses.floor(), *whole),
    ]
    for other in others:
        smell = "the tables of two groups are added up"
        mistakes.append((losses + other, smell, "all_reduce(..., group=group)"))
    if _close(table.flatten().sort().values, losses.flatten().sort().values):
        mistakes.append((table, "the right losses at other points", "table[i * G + j]"))
    return _named(table, mistakes, "", "each point's loss from one rank, 0 from all others")


# ---- 2.5 ------------------------------------------------------------------------------------


@lesson.exercise(
    "2.5",
    "A walk climbs and descends the absolute differences of neighbours: losses.diff(dim=1).abs().",
    "A single valley goes down from the first to the lowest, and up to the last: first - lowest + "
    "last - lowest, with the lowest of that walk.",
    "Do it for rows and columns, torch.cat([losses, losses.T]); sum of all walks / sum of all "
    "valleys - 1.",
)
def roughness(answer) -> None:
    """Random surfaces of several sizes, one with a level row, and a bowl."""
    draw = Generator().manual_seed(_seed())
    level, line = torch.randn(5, 5, generator=draw), torch.linspace(-1, 1, 7).double()
    level[2] = 0.5
    bowl = (line - 0.3).square() + (line[:, None] + 0.2).square()
    sizes = (6, 3)
    cases = [(torch.randn(n, n, generator=draw).double().exp(),) for n in sizes]
    cases += [(level,), (bowl,)]

    def tell(losses: Tensor) -> str:
        kind = " bowl" if losses is bowl else " surface"
        return f"roughness of a {len(losses)} x {len(losses)}{kind}"

    values = alone(answer, cases, tell, ROUGH_REASONS, lambda answer, *case: _plain(answer(*case)))
    for (losses,), value in zip(cases, values, strict=True):
        found, wanted = number(value, tell(losses)), truth.roughness(losses)
        if not _close(torch.tensor(found), torch.tensor(wanted)):
            smells = _named(torch.tensor(found), _wrong_roughness(losses), "", WALKS)
            raise Wrong(f"{tell(losses)} is {found:.5g}, not {wanted:.5g}", *smells)


WALKS = "the sum of all walks / the sum of all single valleys - 1"
TWO_THINGS = (
    "of one dimension, min gives two things: the lowest values, and where they are",
    "losses.min(dim=1).values",
)
ROUGH_REASONS: Reasons = {"'tuple'": TWO_THINGS, "return_types.min": TWO_THINGS}


def _wrong_roughness(losses: Tensor) -> Mistakes:
    walks = torch.cat([losses, losses.T])
    steps = walks.diff(dim=1)
    walked, sides = steps.abs().sum(dim=1), walks[:, 0] + walks[:, -1]
    low, high = walks.min(dim=1).values, walks.max(dim=1).values
    valleys, n = sides - 2 * low, len(losses)
    right = walked.sum() / valleys.sum()
    yield right, "the 1 is not subtracted", "a bowl has 0"
    yield valleys.sum() / walked.sum(), "the ratio is upside down", WALKS
    yield valleys.sum() / walked.sum() - 1, "the ratio is upside down", WALKS
    yield walked.sum() / (valleys.sum() - 1), "1 is subtracted too early", "divide first"
    yield 1 - valleys.sum() / walked.sum(), "divided by the walks", "divide by the single valleys"
    yield walked.sum() - valleys.sum(), "the difference, no ratio", WALKS
    yield (
        (walked / valleys).mean() - 1,
        "a mean of ratios: flat walks count as much",
        "sum, then divide",
    )
    yield (walked / valleys).sum() - 1, "a sum of ratios", "sum both first, and then divide"
    yield walked[:n].sum() / valleys[:n].sum() - 1, "rows alone", "the columns, too: losses.T"
    yield walked[n:].sum() / valleys[n:].sum() - 1, "columns alone", "the rows, too"
    lowest = (sides - 2 * losses.min()).sum()
    yield walked.sum() / lowest - 1, "the lowest point of the whole surface", "of each walk"
    yield walked.sum() / (high - low).sum() - 1, "highest - lowest is one side only", WALKS
    ends = (walks[:, 0] - walks[:, -1]).abs().sum()
    yield walked.sum() / ends - 1, "from the first point straight to the last", "by the lowest"
    yield walked.sum() / (2 * (high - low)).sum() - 1, "the sides need not be the highest", WALKS
    yield walked.sum() / (2 * high - sides).sum() - 1, "the highest, for the lowest", ".min(dim=1)"
    yield walked.sum() / (sides - low).sum() - 1, "down counts, up again does not", "2 * lowest"
    yield steps.sum() / valleys.sum() - 1, "up and down cancel out", ".abs()"
    middle = (sides - 2 * walks[:, n // 2]).sum()
    yield walked.sum() / middle - 1, "the middle need not be the lowest", ".min(dim=1)"
    yield from _wrong_walks(losses, walks, valleys.sum())
    yield steps.square().sum() / valleys.sum() - 1, "squares of the steps", ".abs()"
    for count in (n, n * n, 2 * n, 2 * n * n, 2 * n * (n - 1)):
        yield walked.sum() / count, f"divided by {count}, a number of points", WALKS
        yield right / count - 1, f"divided by {count} once more", WALKS


def _wrong_walks(losses: Tensor, walks: Tensor, valleys: Tensor) -> Mistakes:
    """Values of quite other ways over the surface."""
    flattened = losses.flatten()
    once = flattened.diff().abs().sum() / (flattened[0] + flattened[-1] - 2 * flattened.min())
    jumps = "one long walk jumps from the end of each row to the next", "a walk for each row"
    yield once - 1, *jumps
    logs = walks.log()
    log_valleys = logs[:, 0] + logs[:, -1] - 2 * logs.min(dim=1).values
    logged = logs.diff(dim=1).abs().sum() / log_valleys.sum()
    yield logged - 1, "the logarithm is only for the picture", "take the losses as they are"
    bends = walks.diff(n=2, dim=1).abs().sum()
    yield bends / valleys - 1, "differences of differences: how much it bends", "diff once"
    spread = "a spread says how high it is, not how often it goes up and down"
    for correction in (0, 1):
        yield losses.std(correction=correction), spread, WALKS
        yield losses.var(correction=correction), spread, WALKS
    yield losses.max() - losses.min(), spread, WALKS


# ---- 2.6 ------------------------------------------------------------------------------------

AGAIN = (
    "the gradient has no graph of its own, so it cannot be differentiated again",
    "torch.autograd.grad(loss(), parameters, create_graph=True), outside of no_grad",
)
SHARP_REASONS: Reasons = {
    "loss() takes 1 positional": BARE,
    "does not require grad": AGAIN,
    "second time": (
        "torch frees a graph after its first use",
        "retain_graph=True in the second torch.autograd.grad",
    ),
    "can be implicitly created only for scalar": (
        "the second gradient is of one number, gradient . v",
        "(gradient * v).sum(), and then its gradient",
    ),
    "Mismatch in shape: grad_output": ("the vector has another shape than the gradient", "one v"),
    "at least 1D": (
        "zip over v gives single numbers, and a gradient has a whole tensor for each parameter",
        "flatten the gradients to one vector, as long as v",
    ),
    "1D tensors expected": ("two vectors of P numbers each are multiplied", "flatten both"),
}


class Curved:
    """A loss whose Hessian at the start has the eigenvalues given; its gradient there is not 0."""

    def __init__(self, seed: int, eigenvalues: Sequence[float]) -> None:
        draw = Generator().manual_seed(seed)
        self.eigenvalues, size = torch.tensor(eigenvalues), len(eigenvalues)
        turn = torch.linalg.qr(torch.randn(size, size, generator=draw))[0]
        self.hessian = turn * self.eigenvalues @ turn.T
        self.slope, self.start = torch.randn(2, size, generator=draw)
        self.parameters = [nn.Parameter(self.start[:6].view(3, 2).clone())]
        self.parameters.append(nn.Parameter(self.start[6:].clone()))
        self.stays = True  # was the loss asked for at the start only?

    def loss(self) -> Tensor:
        self.stays = self.stays and torch.equal(flat(self.parameters), self.start)
        way = torch.cat([part.reshape(-1) for part in self.parameters]) - self.start
        return self.slope @ way + way @ self.hessian @ way / 2 + way.sum() ** 3


class Sharp(NamedTuple):
    """What a call of `sharpness` gave, and what it left behind."""

    value: object
    stays: bool
    kept: bool
    grads: bool


@lesson.exercise(
    "2.6",
    "Once: the gradient with create_graph=True, flattened to one vector. v is a random vector of "
    "the same length, from `generator`.",
    "H v is torch.autograd.grad(gradient @ v, parameters, retain_graph=True), flattened.",
    "In the loop: v = v / v.norm(), then Hv; the result is v @ Hv of the last turn, and the next v "
    "is Hv. nn.utils.parameters_to_vector flattens a list of tensors.",
)
def sharpness(answer) -> None:
    """Eigenvalues of both signs, many steps; one step, from several generators and losses."""
    top, rest = random.uniform(6, 9), [2.0, 1.5, 1.0, 0.5, 0.25, -0.5, -1.0]
    high = random.uniform(6, 9)
    spread = [high, *(high * share for share in (0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2))]
    seed = _seed()
    cases = [(_seed(), [top, *rest], 40, 1), (_seed(), [*rest, -top], 40, 2)]
    cases += [(seed, spread, 1, start) for start in (3, 3, 4)]
    cases += [(_seed(), [high, *[0.0] * 7], 1, 5) for _ in range(4)]
    seen = list(alone(answer, cases, _tell_sharp, SHARP_REASONS, _run_sharp))
    _compare_left(seen, cases)
    for left, case in zip(seen[:2], cases, strict=False):
        _compare_sharp(number(left.value, _tell_sharp(*case)), case)
    _compare_no_step(seen[2].value, _tell_sharp(*cases[2]))
    values = [
        number(s.value, _tell_sharp(*case)) for s, case in zip(seen[2:], cases[2:], strict=True)
    ]
    _compare_one_step(values[:3], spread)
    if min(values[3:]) > 0.6 * high:  # of a random v, one of 8 directions is a small part
        raise Wrong(
            f"{_tell_sharp(*cases[-1])} gives {_row(values[3:])} from 4 random v",
            "so near to the largest after one multiplication by H? There is at least one more",
            "v . Hv with the v of the last step, from before its multiplication",
        )


UNSET = "a variable that only the loop sets"


def _tell_sharp(seed: int, eigenvalues: list[float], steps: int, start: int) -> str:
    low, high = min(eigenvalues), max(eigenvalues)
    plural = "s" * (steps > 1)
    return f"sharpness(eigenvalues from {low:.4g} to {high:.4g}, {steps} step{plural})"


def _run_sharp(answer, seed: int, eigenvalues: list[float], steps: int, start: int) -> Sharp:
    hill = Curved(seed, eigenvalues)
    generator = Generator().manual_seed(seed + start)
    try:
        value = _plain(answer(hill.loss, list(hill.parameters), steps, generator))
    except UnboundLocalError:
        if steps > 1:
            raise
        value = UNSET  # with more steps it is set
    kept = torch.equal(flat(hill.parameters), hill.start)
    grads = all(part.grad is None for part in hill.parameters)
    return Sharp(value, hill.stays, kept, grads)


def _compare_left(seen: list[Sharp], cases: list[tuple]) -> None:
    """Are the parameters where they were, at the end and whenever the loss was asked for?"""
    for left, case in zip(seen, cases, strict=True):
        if not left.stays:
            raise Wrong(
                f"in {_tell_sharp(*case)} the loss is taken at other points, too",
                "a difference of two gradients is only about H v, and moving there and back rounds",
                "H v is a gradient itself, of (gradient . v): the parameters stay where they are",
            )
        if not left.kept:
            raise Wrong(f"after {_tell_sharp(*case)} the parameters are others", "", "move nothing")
        if not left.grads:
            raise Wrong(
                f"after {_tell_sharp(*case)} the parameters have a .grad",
                "backward() adds to .grad, and the next step of a training would use it",
                "torch.autograd.grad returns gradients, and leaves .grad alone",
            )


def _compare_no_step(value: object, case: str) -> None:
    """Is the value of one step what stood there before the loop?"""
    is_zero = isinstance(value, int | float | Tensor) and number(value, case) == 0
    if is_zero or value in (None, UNSET):
        seen = f"{case} gives {0 if is_zero else value}"
        smell = "one step too few: with 1 step nothing is multiplied by H"
        raise Wrong(seen, smell, "for _ in range(steps)")


def _compare_sharp(value: float, case: tuple) -> None:
    seed, eigenvalues, steps, start = case
    hill = Curved(seed, eigenvalues)
    wanted = max(eigenvalues, key=abs)
    if abs(value - wanted) <= 2e-3 * abs(wanted):
        return
    seen = f"{_tell_sharp(*case)} gives {value:.6g}, not {wanted:.6g}"
    if value != value or abs(value) > 1e4:
        advice = "v = v / v.norm() at the beginning of every step"
        raise Wrong(seen, "v is not scaled to length 1, and grows with every step", advice)
    v = torch.randn(8, generator=Generator().manual_seed(seed + start))
    raise Wrong(seen, *_named(torch.tensor(value), _wrong_sharpness(hill, v, wanted), "", SHARP))


SHARP = "v @ Hv, with v of length 1 and after all the steps"


def _wrong_sharpness(hill: Curved, v: Tensor, wanted: float) -> Mistakes:
    h, eigenvalues = hill.hessian, hill.eigenvalues
    yield -wanted, "the length of Hv has no sign", "v @ Hv keeps it"
    yield max(eigenvalues), "the largest of all; power iteration finds the largest in size", SHARP
    yield wanted**2, "Hv . Hv", "v . Hv, with the v from before the multiplication"
    yield wanted / 2, "the half of it", SHARP
    yield hill.slope.norm(), "the length of the gradient, a first derivative", "differentiate again"
    yield hill.slope @ hill.slope, "the squared gradient, a first derivative", "differentiate again"
    yield eigenvalues.sum(), "the trace: the sum of all eigenvalues", SHARP
    yield h.diagonal().max(), "the largest entry of the diagonal", "a direction is any mix of axes"
    yield h.norm(), "the norm of H: the root of the sum of all eigenvalues squared", SHARP
    for part in (slice(0, 6), slice(6, 8)):
        block = torch.linalg.eigvalsh(h[part, part])
        yield max(block, key=abs), "one of the two tensors is left out", "one v for all parameters"
    column, way = h.sum(dim=1), v
    for _ in range(40):
        way = way / way.norm()
        each, way = way @ (column * way), column * way
    advice = "first gradient . v, and then the gradient of that"
    yield each, "the gradient of the gradient's sum, times v, is not H v", advice
    for step in range(1, 6):
        v = v / v.norm()
        yield v @ h @ v, f"that is after step {step} of 40", "v = Hv for the next step"
        v = h @ v
    for _ in range(60):
        v = torch.cat([part / part.norm() for part in (v[:6], v[6:])])
        each, v = v @ h @ v, h @ v
    yield each, "each tensor was scaled to length 1", "the length is that of the whole vector"


def _compare_one_step(values: list[float], eigenvalues: list[float]) -> None:
    one, again, other = values
    case = _tell_sharp(0, eigenvalues, 1, 0)
    low, high = min(eigenvalues), max(eigenvalues)
    if not low * 0.999 <= one <= high * 1.001:
        seen = f"{case} gives {one:.6g}, and v . Hv is from {low:.4g} to {high:.4g}"
        raise Wrong(seen, "is v of length 1 also in the first step?", SHARP)
    if abs(one - high) < 1e-3 * high:
        seen = f"{case} gives {one:.6g}, the eigenvalue itself"
        raise Wrong(seen, "`steps` is left out", "for _ in range(steps)")
    if abs(one - again) > 1e-5 * high:
        seen = f"{case} gives {one:.6g} and {again:.6g} from generators of one seed"
        raise Wrong(seen, "the random vector is not from `generator`", "generator=generator")
    if one == other:
        raise Wrong(
            f"{case} gives {one:.6g} from two generators",
            "v is not random: a fixed v, such as ones, may have nothing of the eigenvector in it",
            "torch.randn(..., generator=generator)",
        )
