"""Answers to lesson 02 as students give them: RIGHT ones differ from the course's own, and WRONG
ones come with words that the verdict must hold."""

import copy

import torch
import torch.distributed as dist
from torch import nn

from manyhands.first_job.planning import my_share
from manyhands.loss_surface import surface
from manyhands.loss_surface.surface import loss_at

RIGHT: dict[str, list] = {
    "2.1": [surface.loss_at],
    "2.2": [surface.slice_between],
    "2.3": [surface.random_direction],
    "2.4": [surface.surface],
    "2.5": [surface.roughness],
    "2.6": [surface.sharpness],
}
WRONG: dict[str, list] = {todo: [] for todo in RIGHT}


def right(todo):
    return lambda answer: RIGHT[todo].append(answer) or answer


def wrong(todo, words):
    return lambda answer: WRONG[todo].append((answer, words)) or answer


# ---- 2.1 loss_at ----------------------------------------------------------------------------


@right("2.1")
def at_by_data(loss, parameters, directions, distances):
    kept = [p.data for p in parameters]
    try:
        for i, p in enumerate(parameters):
            for direction, distance in zip(directions, distances, strict=False):
                p.data = p.data + torch.tensor(distance) * direction[i]
        return loss().detach()
    finally:
        for p, old in zip(parameters, kept, strict=False):
            p.data = old


@right("2.1")
def at_by_one_vector(loss, parameters, directions, distances):
    before = nn.utils.parameters_to_vector(parameters).detach().clone()
    moved = before.clone()
    for direction, distance in zip(directions, distances, strict=False):
        moved += distance * torch.cat([part.flatten() for part in direction])
    try:
        nn.utils.vector_to_parameters(moved, parameters)
        with torch.no_grad():
            return float(loss())
    except Exception as error:
        raise error
    finally:
        nn.utils.vector_to_parameters(before, parameters)


def at_with(move=None, save=None, put_back=None, tell=None, anyway=True):
    """A loss_at made of parts: what is kept, how to move, what is returned, how to put back."""
    if move is None:

        def move(parameters, directions, distances):
            for direction, distance in zip(directions, distances, strict=False):
                for p, part in zip(parameters, direction, strict=False):
                    p += distance * part

    @torch.no_grad()
    def answer(loss, parameters, directions, distances):
        kept = save(parameters) if save else [p.clone() for p in parameters]
        done = False
        try:
            move(parameters, directions, distances)
            value = tell(loss) if tell else loss().item()
            done = True
            return value
        finally:
            if put_back and (anyway or done):
                put_back(parameters, directions, distances)
            elif anyway or done:
                for p, old in zip(parameters, kept, strict=False):
                    p.copy_(old)

    return answer


def moving(step):
    """One step for each direction."""

    def move(parameters, directions, distances):
        for direction, distance in zip(directions, distances, strict=False):
            step(parameters, direction, distance)

    return move


def add_to(parameters, direction, distance):
    for p, part in zip(parameters, direction, strict=False):
        p.add_(part, alpha=distance)


def add_with_the_direction_changed(parameters, direction, distance):
    for p, part in zip(parameters, direction, strict=False):
        p.add_(part.mul_(distance))


def new_names(parameters, direction, distance):
    for p, part in zip(parameters, direction, strict=False):
        p = p + distance * part


def move_first_tensor(parameters, direction, distance):
    parameters[0].add_(direction[0], alpha=distance)


def move_matrices(parameters, direction, distance):
    for p, part in zip(parameters, direction, strict=False):
        if p.dim() > 1:
            p.add_(part, alpha=distance)


def move_by_unit_vectors(parameters, direction, distance):
    length = torch.cat([part.flatten() for part in direction]).norm()
    add_to(parameters, direction, distance / length)


def replace_by_direction(parameters, direction, distance):
    for p, part in zip(parameters, direction, strict=False):
        p.copy_(distance * part)


def step_back(parameters, directions, distances):
    for direction, distance in zip(directions, distances, strict=False):
        add_to(parameters, direction, -distance)


def nothing(*_):
    pass


RIGHT["2.1"] += [at_with()]
WRONG["2.1"] += [
    (at_with(put_back=nothing), "they are not put back"),
    (at_with(save=list), "list(parameters), .data and .detach()"),
    (at_with(save=lambda ps: [p.detach() for p in ps]), "are still the same memory"),
    (at_with(put_back=step_back), "does not give the same bits"),
    (at_with(anyway=False), "an error skips the lines that put back"),
    (at_with(lambda ps, ds, xs: add_to(ps, ds[0], xs[0])), "only the first direction"),
    (at_with(lambda ps, ds, xs: add_to(ps, ds[-1], xs[-1])), "only the last direction"),
    (at_with(moving(lambda ps, d, x: add_to(ps, d, 1))), "the distances are left out"),
    (at_with(moving(lambda ps, d, x: add_to(ps, d, -x))), "the way leads backwards"),
    (at_with(lambda ps, ds, xs: moving(add_to)(ps, ds, xs[::-1])), "have changed places"),
    (at_with(moving(add_with_the_direction_changed)), "the direction was changed in place"),
    (at_with(moving(new_names)), "`loss` knows only the old ones"),
    (at_with(moving(move_first_tensor)), "have not moved"),
    (at_with(moving(move_matrices)), "6 of 26 numbers have not moved"),
    (at_with(moving(move_by_unit_vectors)), "directions are scaled to length 1"),
    (at_with(moving(replace_by_direction)), "do not copy over them"),
    (at_with(lambda ps, ds, xs: ps[0].add_(xs[0] * ds[0])), "a list times a number"),
    (at_with(lambda ps, ds, xs: add_to(ps, ds, xs[0])), "one for each parameter"),
    (at_with(tell=lambda loss: round(loss().item())), "not"),
    (at_with(tell=nothing), "never calls `loss`"),
    (at_with(tell=lambda loss: loss), "never calls `loss`"),
    (at_with(tell=lambda loss: loss([])), "`loss` takes no arguments"),
    (at_with(tell=lambda loss: nothing(loss())), "nothing is returned"),
]


@wrong("2.1", "torch guards tensors")
def at_without_no_grad(loss, parameters, directions, distances):
    for direction, distance in zip(directions, distances, strict=False):
        for p, part in zip(parameters, direction, strict=False):
            p += distance * part


@wrong("2.1", "still wants a gradient")
def at_with_a_graph(loss, parameters, directions, distances):
    kept = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        moving(add_to)(parameters, directions, distances)
    try:
        return loss()
    finally:
        for p, old in zip(parameters, kept, strict=False):
            p.data.copy_(old)


@wrong("2.1", "that is the loss before the move")
def at_too_early(loss, parameters, directions, distances):
    value = loss().item()
    at_with()(loss, parameters, directions, distances)
    return value


@wrong("2.1", "the loss at the start is subtracted")
def rise_only(loss, parameters, directions, distances):
    return at_with()(loss, parameters, directions, distances) - loss().item()


@wrong("2.1", "all directions lead to one point")
def at_each_alone(loss, parameters, directions, distances):
    found = [
        at_with()(loss, parameters, [d], [x]) for d, x in zip(directions, distances, strict=False)
    ]
    return sum(found) / len(found)


@wrong("2.1", "copies make new tensors")
def at_on_a_copy(loss, parameters, directions, distances):
    return at_with()(loss, copy.deepcopy(parameters), directions, distances) * loss().item() ** 0


@wrong("2.1", "torch records no gradients any more")
def at_with_gradients_off(loss, parameters, directions, distances):
    torch.set_grad_enabled(False)
    return at_with()(loss, parameters, directions, distances)


@wrong("2.1", "torch records no gradients any more")
def at_with_frozen_parameters(loss, parameters, directions, distances):
    for p in parameters:
        p.requires_grad_(False)
    return at_with()(loss, parameters, directions, distances)


@wrong("2.1", "the error of `loss` is swallowed")
def at_without_errors(loss, parameters, directions, distances):
    try:
        return at_with()(loss, parameters, directions, distances)
    except ValueError:
        return float("nan")


def moved_and_back(change):
    """The way back stands before the call of loss(), not after it."""

    @torch.no_grad()
    def answer(loss, parameters, directions, distances):
        old = [p.clone() for p in parameters]
        change(parameters, directions, distances)
        for p, before in zip(parameters, old, strict=False):
            p.copy_(before)
        return loss().item()

    return answer


WRONG["2.1"] += [
    (moved_and_back(moving(add_to)), "put back before loss() is called"),
    (moved_and_back(moving(new_names)), "`loss` knows only the old ones"),
]


# ---- 2.2 slice_between ----------------------------------------------------------------------


@right("2.2")
def slice_from_the_end(loss, parameters, end, shares):
    back = [p.detach() - e.detach() for p, e in zip(parameters, end, strict=False)]
    return torch.tensor([loss_at(loss, parameters, [back], [-s]) for s in shares])


@right("2.2")
@torch.no_grad()
def slice_by_mixing(loss, parameters, end, shares):
    before, losses = [p.clone() for p in parameters], []
    for share in shares:
        for p, own, other in zip(parameters, before, end, strict=False):
            p.copy_(torch.lerp(own, other, share))
        losses.append(loss())
    for p, own in zip(parameters, before, strict=False):
        p.copy_(own)
    return losses


def slice_with(direction=lambda p, e: e - p, share=lambda s: s, order=list):
    def answer(loss, parameters, end, shares):
        line = [direction(p.detach(), e.detach()) for p, e in zip(parameters, end, strict=False)]
        return order([loss_at(loss, parameters, [line], [share(s)]) for s in shares])

    return answer


WRONG["2.2"] += [
    (slice_with(lambda p, e: p - e), "the way leads backwards"),
    (slice_with(lambda p, e: e), "`end` was taken for the direction"),
    (slice_with(lambda p, e: e + p), "end + parameters is no way"),
    (slice_with(share=lambda s: 1 - s), "share 0 is at the parameters"),
    (slice_with(share=lambda s: min(max(s, 0), 1)), "do not cut them off"),
    (slice_with(share=lambda s: max(s, 0)), "shares below 0"),
    (slice_with(order=lambda losses: losses[::-1]), "the opposite order"),
    (slice_with(order=lambda losses: sum(losses) / len(losses)), "one loss for each share"),
    (slice_with(order=nothing), "nothing is returned"),
    (lambda loss, ps, end, shares: [0.0 for share in shares], "never calls `loss`"),
    (slice_with(share=lambda s: [s]), "a distance is one number"),
    (lambda loss, ps, end, shares: loss_at(loss, ps, [end], shares), "one number for each"),
    (slice_with(order=lambda losses: dict(enumerate(losses))), "gives a dict"),
    (slice_with(order=lambda losses: (x for x in losses)), "gives a generator"),
    (lambda loss, ps, end, shares: [loss_at(loss, ps, [end - ps], [s]) for s in shares], "zip"),
]


@wrong("2.2", "not (...)")
def slice_lazily(loss, parameters, end, shares):
    line = [e.detach() - p.detach() for p, e in zip(parameters, end, strict=False)]
    return (loss_at(loss, parameters, [line], [s]) for s in shares)


@wrong("2.2", "[line] and [share]")
def slice_without_a_list(loss, parameters, end, shares):
    line = [e.detach() - p.detach() for p, e in zip(parameters, end, strict=False)]
    return [loss_at(loss, parameters, line, [s]) for s in shares]


@wrong("2.2", "[line] and [share]")
def slice_without_a_list_and_strict_zip(loss, parameters, end, shares):
    line = [e.detach() - p.detach() for p, e in zip(parameters, end, strict=False)]
    return [at_with()(loss, parameters, line, [s]) for s in shares]


@wrong("2.2", "all shares one after the other, to one point")
def slice_in_one_call(loss, parameters, end, shares):
    line = [e.detach() - p.detach() for p, e in zip(parameters, end, strict=False)]
    return loss_at(loss, parameters, [line] * len(shares), shares)


@wrong("2.2", "the direction is taken anew from moved parameters")
@torch.no_grad()
def slice_that_never_puts_back(loss, parameters, end, shares):
    losses = []
    for share in shares:
        for p, e in zip(parameters, end, strict=False):
            p += share * (e - p)
        losses.append(loss().item())
    return losses


@wrong("2.2", "each step begins where the last one ended")
@torch.no_grad()
def slice_in_steps(loss, parameters, end, shares):
    line, losses = [e - p for p, e in zip(parameters, end, strict=False)], []
    for share in shares:
        add_to(parameters, line, share)
        losses.append(loss().item())
    return losses


@wrong("2.2", "losses cannot be interpolated")
def slice_of_losses(loss, parameters, end, shares):
    line = [e - p for p, e in zip(parameters, end, strict=False)]
    first, last = (loss_at(loss, parameters, [line], [s]) for s in (0, 1))
    return [(1 - s) * first + s * last for s in shares]


@wrong("2.2", "losses cannot be interpolated")
def slice_of_a_mixture(loss, parameters, end, shares):
    mixed = [[p + s * (e - p) for p, e in zip(parameters, end, strict=False)] for s in shares]
    return [loss().item() for parameters in mixed]


@wrong("2.2", "the end was changed in place")
@torch.no_grad()
def slice_with_end_moved(loss, parameters, end, shares):
    line = [e.sub_(p) for p, e in zip(parameters, end, strict=False)]
    return [loss_at(loss, parameters, [line], [s]) for s in shares]


@wrong("2.2", "the way begins at 0")
@torch.no_grad()
def slice_from_zero(loss, parameters, end, shares):
    before, losses = [p.clone() for p in parameters], []
    for share in shares:
        for p, e in zip(parameters, end, strict=False):
            p.copy_(share * e)
        losses.append(loss().item())
    for p, own in zip(parameters, before, strict=False):
        p.copy_(own)
    return losses


@wrong("2.2", "the order of sorted shares")
def slice_sorted(loss, parameters, end, shares):
    return surface.slice_between(loss, parameters, end, sorted(shares))


@wrong("2.2", "they are not put back")
@torch.no_grad()
def slice_left_at_the_last_share(loss, parameters, end, shares):
    before, losses = [p.clone() for p in parameters], []
    for share in shares:
        for p, own, other in zip(parameters, before, end, strict=False):
            p.copy_(own + share * (other - own))
        losses.append(loss().item())
    return losses


@wrong("2.2", "torch guards tensors")
def slice_without_no_grad(loss, parameters, end, shares):
    for p, e in zip(parameters, end, strict=False):
        p.add_(e)


# ---- 2.3 random_direction -------------------------------------------------------------------


@right("2.3")
def direction_in_a_loop(parameters, generator):
    direction = []
    for p in parameters:
        part = torch.zeros(p.shape)
        if p.ndim >= 2:
            for i in range(len(p)):
                numbers = torch.empty(p[i].shape).normal_(generator=generator)
                part[i] = numbers * (p[i].detach().norm() / (numbers.norm() + 1e-10))
        direction.append(part)
    return direction


@right("2.3")
def direction_that_draws_all(parameters, generator):
    direction = []
    for p in parameters:
        part = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        if p.dim() <= 1:
            direction.append(part * 0)
            continue
        rows = part.flatten(1)
        lengths = p.detach().flatten(1).norm(dim=1, keepdim=True)
        direction.append((rows / rows.norm(dim=1, keepdim=True) * lengths).view(p.shape))
    return tuple(direction)


def lengths_of(t, dims):
    return torch.linalg.vector_norm(t, dim=dims, keepdim=True)


def inside(t):
    return tuple(range(1, t.dim()))


def direction_with(
    scale=lambda p, part: part * lengths_of(p, inside(p)) / lengths_of(part, inside(part)),
    numbers=lambda shape, generator: torch.randn(shape, generator=generator),
    still=lambda p, part: part * 0,
    graph=False,
):
    """A direction made of parts: random numbers, how a filter is scaled, what biases get."""

    def answer(parameters, generator):
        direction = []
        for p in parameters:
            p = p if graph else p.detach()
            part = numbers(p.shape, generator)
            direction.append(scale(p, part) if p.dim() > 1 else still(p, part))
        return direction

    return answer


def mine_and_torchs(shape, generator):
    torch.randn(3, generator=generator)
    return torch.randn(shape)


def seeded(shape, generator):
    return torch.randn(shape, generator=generator.manual_seed(0))


def all_dims_but(dim):
    def scale(p, part):
        dims = tuple(d for d in range(p.dim()) if d != dim)
        return part * lengths_of(p, dims) / lengths_of(part, dims).clamp(min=1e-9)

    return scale


def over_kernels(p, part):
    dims = inside(p)[1:] or inside(p)
    return part * lengths_of(p, dims) / lengths_of(part, dims)


def over_columns(p, part):
    return part * lengths_of(p, 0) / lengths_of(part, 0)


def signs(shape, generator):
    return torch.randint(2, shape, generator=generator) * 2.0 - 1


def uniform(shape, generator):
    return torch.rand(shape, generator=generator) * 2 - 1


WRONG["2.3"] += [
    (direction_with(lambda p, part: part * p.norm() / part.norm()), "one scale for the whole"),
    (direction_with(lambda p, part: part), "the random numbers were not scaled"),
    (
        direction_with(
            lambda p, part: part * lengths_of(part, inside(p)) / lengths_of(p, inside(p))
        ),
        "a filter of zeros has length 0",
    ),
    (
        direction_with(
            lambda p, part: (
                part * lengths_of(part, inside(p)) / lengths_of(p, inside(p)).clamp(min=1e-9)
            )
        ),
        "upside down",
    ),
    (
        direction_with(lambda p, part: part / lengths_of(part, inside(p))),
        "every filter has length 1",
    ),
    (direction_with(lambda p, part: part * lengths_of(p, inside(p))), "own length is still in it"),
    (direction_with(lambda p, part: part * 0), "it does not move at all"),
    (direction_with(still=lambda p, part: part), "biases and norms are not moved"),
    (direction_with(still=lambda p, part: p * part), "biases and norms are not moved"),
    (direction_with(still=lambda p, part: None), "gives None"),
    (direction_with(numbers=lambda s, g: torch.rand(s, generator=g)), "give no number below 0"),
    (direction_with(numbers=lambda s, g: torch.randn(s, generator=g).abs()), "number below 0"),
    (direction_with(numbers=uniform), "no normally distributed numbers"),
    (direction_with(numbers=signs), "no normally distributed numbers"),
    (direction_with(all_dims_but(1)), "along the first dimension"),
    (direction_with(over_columns), "along the first dimension"),
    (direction_with(over_kernels), "smaller pieces were scaled"),
    (direction_with(lambda p, part: part.sign() * p.abs()), "smaller pieces were scaled"),
    (direction_with(numbers=lambda s, g: torch.randn(s)), "torch's own generator"),
    (direction_with(numbers=mine_and_torchs), "torch's own generator"),
    (direction_with(numbers=seeded), "or it is seeded inside"),
    (direction_with(graph=True), "wants a gradient"),
    (direction_with(numbers=lambda s, g: torch.randn(s, g)), "take the generator by its name"),
    (lambda ps, g: direction_with()([p for p in ps if p.dim() > 1], g), "belong to a direction"),
    (lambda ps, g: (part for part in direction_with()(ps, g)), "a list of tensors is asked for"),
    (lambda ps, g: torch.cat([p.flatten() for p in direction_with()(ps, g)]), "a list of tensors"),
]


@wrong("2.3", "there is no filter inside")
@torch.no_grad()
def direction_of_biases_too(parameters, generator):
    parts = [torch.randn(p.shape, generator=generator) for p in parameters]
    return [
        part * lengths_of(p, 1) / lengths_of(part, 1)
        for p, part in zip(parameters, parts, strict=False)
    ]


@wrong("2.3", "scale the direction, not them")
@torch.no_grad()
def direction_from_scaled_parameters(parameters, generator):
    direction = direction_with()(parameters, generator)
    for p in parameters:
        p /= p.norm()
    return direction


def times_own(scale):
    """A direction whose random numbers are multiplied by the parameter's own."""
    return lambda p, part: scale(p, p * part)


def to_own_length(p, part):
    return part * lengths_of(p, inside(p)) / lengths_of(part, inside(p)).clamp(min=1e-12)


def std_of(t):
    return t.std(dim=inside(t), keepdim=True)


WRONG["2.3"] += [
    (direction_with(times_own(to_own_length)), "multiplied by the parameter's numbers"),
    (direction_with(lambda p, part: part * std_of(p)), "nearly that length"),
    (direction_with(lambda p, part: part * std_of(p) / std_of(part)), "nearly that length"),
]


@wrong("2.3", "there is no filter inside")
@torch.no_grad()
def direction_of_all_by_filter(parameters, generator):
    parts = [torch.randn(p.shape, generator=generator) for p in parameters]
    return [
        torch.stack([x * w.norm() / x.norm() for x, w in zip(part, p, strict=False)])
        for part, p in zip(parts, parameters, strict=False)
    ]


# ---- 2.4 surface ----------------------------------------------------------------------------


@right("2.4")
def surface_in_blocks(loss, parameters, directions, grid, group=None):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    points = [(i, j) for i in range(len(grid)) for j in range(len(grid))]
    each = -(-len(points) // size)
    table = torch.full((len(grid), len(grid)), -torch.inf, dtype=torch.float64)
    for i, j in points[rank * each : (rank + 1) * each]:
        table[i, j] = loss_at(loss, parameters, directions, [grid[i], grid[j]])
    dist.all_reduce(table, op=dist.ReduceOp.MAX, group=group)
    return table


@right("2.4")
def surface_by_objects(loss, parameters, directions, grid, group=None):
    size = dist.get_world_size(group)
    points = my_share([(a, b) for a in grid for b in grid], dist.get_rank(group), size)
    parts = [None] * size
    mine = [loss_at(loss, parameters, directions, point) for point in points]
    dist.all_gather_object(parts, mine, group=group)
    losses = [parts[n % size][n // size] for n in range(len(grid) ** 2)]
    return torch.tensor(losses, dtype=torch.float64).reshape(len(grid), -1)


def surface_with(
    share=lambda n, group: range(dist.get_rank(group), n, dist.get_world_size(group)),
    place=lambda point, size: divmod(point, size),
    reduce=lambda table, group: dist.all_reduce(table, group=group),
    tell=lambda table, size: table.view(size, size),
    **kind,
):
    """A surface made of parts: the share, a point's row and column, the collective, the result."""

    def answer(loss, parameters, directions, grid, group=None):
        size = len(grid)
        table = torch.zeros(size * size, **{"dtype": torch.float64, **kind})
        for point in share(size * size, group):
            i, j = place(point, size)
            table[point] = loss_at(loss, parameters, directions, (grid[i], grid[j]))
        reduce(table, group)
        return tell(table, size)

    return answer


def add_and_divide(table, group):
    dist.all_reduce(table, group=group)
    table /= dist.get_world_size(group)


def in_whole_pieces(n, group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return range(rank * (n // size), (rank + 1) * (n // size))


def overlapping(n, group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    each = -(-n // size)
    return [point % n for point in range(rank * each, (rank + 1) * each)]


def gather_pieces(table, group):
    mine = table[: 3 - (dist.get_rank(group) > 0)]
    parts = [torch.zeros_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)


def on_first_rank_only(table, group):
    dist.all_reduce(table, group=group)
    if dist.get_rank(group):
        table.zero_()


WRONG["2.4"] += [
    (surface_with(lambda n, g: range(n)), "nothing is shared out"),
    (surface_with(lambda n, g: range(n), reduce=nothing), "nothing is shared out"),
    (surface_with(reduce=nothing), "only this rank's own points"),
    (surface_with(reduce=add_and_divide), "a mean over the ranks"),
    (
        surface_with(reduce=lambda t, g: dist.all_reduce(t, dist.ReduceOp.AVG, group=g)),
        "a mean over the ranks",
    ),
    (
        surface_with(reduce=lambda t, g: dist.all_reduce(t, dist.ReduceOp.MAX, group=g)),
        "losses below 0 are lost",
    ),
    (surface_with(place=lambda point, n: divmod(point, n)[::-1]), "i and j have changed places"),
    (surface_with(in_whole_pieces), "the rest of the division was dropped"),
    (surface_with(overlapping), "the shares overlap"),
    (surface_with(lambda n, g: range(dist.get_rank(), n, dist.get_world_size())), "whole job"),
    (surface_with(lambda n, g: range(dist.get_rank(), n, dist.get_world_size(g))), "whole job"),
    (surface_with(reduce=lambda t, g: dist.all_reduce(t)), "tables of two groups are added up"),
    (surface_with(dtype=torch.float32), "which round what loss_at gives"),
    (surface_with(dtype=torch.long), "whole numbers"),
    (surface_with(tell=lambda table, n: table), "losses.view"),
    (surface_with(tell=lambda table, n: table.view(n, n).tolist()), "returns a list"),
    (surface_with(tell=nothing), "returns None"),
    (surface_with(reduce=on_first_rank_only), "only the first rank has the surface"),
    (surface_with(reduce=gather_pieces), "equally many points"),
    (
        surface_with(reduce=lambda t, g: dist.reduce(t, group_dst=0, group=g)),
        "reduce and gather bring it to one rank",
    ),
    (
        surface_with(lambda n, g: my_share(range(n), dist.get_world_size(g), dist.get_rank(g))),
        "my_share takes the rank before the world size",
    ),
    (surface_with(reduce=lambda t, g: dist.all_reduce(t.tolist(), group=g)), "no list"),
    (surface_with(place=lambda point, n: (point % n, point % n)), "nobody computes"),
]


@wrong("2.4", "those without a point must call the collective")
def surface_with_an_early_return(loss, parameters, directions, grid, group=None):
    size = len(grid)
    mine = my_share(range(size * size), dist.get_rank(group), dist.get_world_size(group))
    table = torch.zeros(size * size, dtype=torch.float64)
    if not mine:
        return table.view(size, size)
    for point in mine:
        place = (grid[point // size], grid[point % size])
        table[point] = loss_at(loss, parameters, directions, place)
    dist.all_reduce(table, group=group)
    return table.view(size, size)


@wrong("2.4", "they are not put back")
def surface_that_stays_away(loss, parameters, directions, grid, group=None):
    table = surface.surface(loss, parameters, directions, grid, group)
    with torch.no_grad():
        add_to(parameters, directions[0], grid[-1])
    return table


def surface_in_loops(
    rows, columns, at=lambda grid, i, j: (grid[i], grid[j]), place=None, nest=False
):
    """A surface of two loops: which rows and columns, at which distances, to which place."""

    def answer(loss, parameters, directions, grid, group=None):
        table = torch.zeros(len(grid), len(grid), dtype=torch.float64)
        for i in rows(range(len(grid)), group):
            for j in columns(range(len(grid)), group):
                goal = at(grid, i, j)
                given = ([directions], [goal]) if nest else (directions, goal)
                table[place(grid, i, j) if place else (i, j)] = loss_at(loss, parameters, *given)
        dist.all_reduce(table, group=group)
        return table

    return answer


def own_share(tasks, group):
    return my_share(tasks, dist.get_rank(group), dist.get_world_size(group))


def every(tasks, group):
    return tasks


def to_and_from_rank_0(table, group):
    dist.reduce(table, 0, group=group)
    dist.broadcast(table, 0, group=group)


def not_written_yet(loss, parameters, directions, distances):
    raise NotImplementedError("TODO 2.1")


RIGHT["2.4"] += [surface_in_loops(own_share, every)]
WRONG["2.4"] += [
    (surface_with(reduce=lambda t, g: dist.reduce(t, 0, group=g)), "no root is needed"),
    (surface_with(reduce=lambda t, g: dist.broadcast(t, src=0, group=g)), "no root is needed"),
    (surface_with(reduce=to_and_from_rank_0), "no root is needed"),
    (surface_with(reduce=lambda t, g: dist.broadcast(t, group_src=0, group=g)), "all_reduce"),
    (surface_in_loops(own_share, own_share), "only some of the columns of its rows"),
    (surface_in_loops(own_share, every, lambda grid, i, j: (i, j)), "i and j are places"),
    (
        surface_in_loops(own_share, every, place=lambda grid, i, j: (grid[i], grid[j])),
        "grid[i] is a distance, and no row",
    ),
    (surface_in_loops(own_share, every, nest=True), "no brackets around"),
    (surface_with(lambda n, g: my_share(range(n))), "my_share has to know whose share"),
    (surface_with(lambda n, g: my_share(range(n), g.rank(), g.size())), "group=None stands for"),
    (surface_with(reduce=lambda t, g: dist.all_reduce(t[0].item(), group=g)), "no single number"),
]


@wrong("2.4", "calls your `not_written_yet`, TODO 2.1, which is not written yet")
def surface_before_its_loss_at(loss, parameters, directions, grid, group=None):
    return torch.tensor([[not_written_yet(loss, parameters, directions, (grid[0], grid[0]))]])


# ---- 2.5 roughness --------------------------------------------------------------------------


@right("2.5")
def roughness_in_loops(losses):
    walked = single = 0.0
    for walk in [*losses.tolist(), *losses.T.tolist()]:
        walked += sum(abs(b - a) for a, b in zip(walk, walk[1:], strict=False))
        single += walk[0] - min(walk) + walk[-1] - min(walk)
    return walked / single - 1


@right("2.5")
def roughness_as_a_tensor(losses):
    walks = torch.stack([losses, losses.t()]).double()
    walked = (walks[..., 1:] - walks[..., :-1]).abs().sum()
    single = (walks[..., 0] + walks[..., -1] - 2 * walks.amin(-1)).sum()
    return (walked - single) / single


def rough(make):
    """A roughness that `make` computes from the walks."""
    return lambda losses: make(torch.cat([losses, losses.T])).item()


def climbed(w):
    return w.diff(dim=1).abs().sum(dim=1)


def valley(w):
    return w[:, 0] + w[:, -1] - 2 * w.amin(1)


@wrong("2.5", "was changed")
def roughness_from_zero(losses):
    losses -= losses.min()
    return surface.roughness(losses)


WRONG["2.5"] += [
    (rough(lambda w: w.max() - w.min()), "a spread says how high"),
    (lambda losses: losses.std().item(), "a spread says how high"),
    (lambda losses: losses.std(correction=0).item(), "a spread says how high"),
    (rough(lambda w: climbed(w).sum() / len(w)), "a number of points"),
    (rough(lambda w: climbed(w).sum() / w.numel()), "a number of points"),
    (rough(lambda w: climbed(w).sum() / valley(w).sum()), "the 1 is not subtracted"),
    (rough(lambda w: climbed(w).sum() - valley(w).sum()), "the difference, no ratio"),
    (rough(lambda w: valley(w).sum() / climbed(w).sum()), "upside down"),
    (rough(lambda w: (climbed(w) / valley(w)).mean() - 1), "a mean of ratios"),
    (rough(lambda w: (climbed(w) / valley(w) - 1).mean()), "a mean of ratios"),
    (rough(lambda w: (lambda r: climbed(r).sum() / valley(r).sum() - 1)(w[: len(w) // 2])), "rows"),
    (
        rough(lambda w: (lambda r: climbed(r).sum() / valley(r).sum() - 1)(w[len(w) // 2 :])),
        "columns",
    ),
    (
        rough(lambda w: climbed(w).sum() / (w[:, 0] + w[:, -1] - 2 * w.min()).sum() - 1),
        "the lowest point of the whole surface",
    ),
    (rough(lambda w: climbed(w).sum() / (w.amax(1) - w.amin(1)).sum() - 1), "one side only"),
    (
        rough(lambda w: climbed(w).sum() / (2 * w.amax(1) - w[:, 0] - w[:, -1]).sum() - 1),
        "the highest, for the lowest",
    ),
    (rough(lambda w: climbed(w).sum() / (w[:, 0] - w[:, -1]).abs().sum() - 1), "straight to the"),
    (rough(lambda w: w.diff(dim=1).sum() / valley(w).sum() - 1), "cancel out"),
    (rough(lambda w: w.diff(dim=1).square().sum() / valley(w).sum() - 1), "squares of the steps"),
    (lambda losses: str(surface.roughness(losses)), "that is no number"),
]


def rough_by(walked=climbed, single=valley, of=lambda losses: losses):
    """A roughness made of parts: how a walk and a single valley are measured, and of what."""
    return rough(lambda w: walked(of(w)).sum() / single(of(w)).sum() - 1)


def both_of_min(w):
    return w[:, 0] + w[:, -1] - 2 * w.min(dim=1)


WRONG["2.5"] += [
    (rough(lambda w: valley(w).sum() / climbed(w).sum() - 1), "upside down"),
    (rough(lambda w: climbed(w).sum() / (valley(w).sum() - 1)), "1 is subtracted too early"),
    (
        rough_by(single=lambda w: w[:, 0] + w[:, -1] - 2 * w[:, w.shape[1] // 2]),
        "the middle need not be the lowest",
    ),
    (rough_by(of=torch.log), "the logarithm is only for the picture"),
    (rough_by(lambda w: w.diff(n=2, dim=1).abs()), "differences of differences"),
    (rough_by(single=both_of_min), "losses.min(dim=1).values"),
    (rough_by(single=lambda w: w[:, 0] + w[:, -1] - w.min(dim=1)), "losses.min(dim=1).values"),
]


@wrong("2.5", "one long walk jumps")
def roughness_of_one_walk(losses):
    flat = losses.flatten()
    return (flat.diff().abs().sum() / (flat[0] + flat[-1] - 2 * flat.min()) - 1).item()


# ---- 2.6 sharpness --------------------------------------------------------------------------


@right("2.6")
def sharpness_in_lists(loss, parameters, steps, generator):
    vs = [torch.randn(p.shape, generator=generator) for p in parameters]
    for _ in range(steps):
        length = sum(v.square().sum() for v in vs).sqrt()
        vs = [v / length for v in vs]
        slopes = torch.autograd.grad(loss(), parameters, create_graph=True)
        rows = torch.autograd.grad(slopes, parameters, grad_outputs=vs)
        value = sum((v * row).sum() for v, row in zip(vs, rows, strict=False))
        vs = rows
    return value


@right("2.6")
def sharpness_by_products(loss, parameters, steps, generator):
    slopes = torch.autograd.grad(loss(), parameters, create_graph=True)
    slope = torch.cat([part.flatten() for part in slopes])
    hv = torch.rand(len(slope), generator=generator) - 0.5
    for _ in range(steps):
        v = torch.nn.functional.normalize(hv, dim=0)
        rows = torch.autograd.grad(slope, parameters, grad_outputs=v, retain_graph=True)
        hv = torch.cat([part.flatten() for part in rows])
    return float(v @ hv)


@right("2.6")
def sharpness_of_numbers_above_0(loss, parameters, steps, generator):
    return sharp_with(start=lambda n, g: torch.rand(n, generator=g))(
        loss, parameters, steps, generator
    )


def flatten(parts):
    return torch.cat([part.flatten() for part in parts])


def sharp_with(
    scale=lambda v, step: v / v.norm(),
    value=lambda v, hv, slope: v @ hv,
    start=lambda size, generator: torch.randn(size, generator=generator),
    count=lambda steps: steps,
    keep=True,
    onward=lambda v, hv: hv,
):
    """A sharpness made of parts: how v is scaled, the result, the first v, the number of steps."""

    def answer(loss, parameters, steps, generator):
        slope = flatten(torch.autograd.grad(loss(), parameters, create_graph=True))
        v = start(len(slope), generator)
        for step in range(count(steps)):
            v = scale(v, step)
            hv = flatten(torch.autograd.grad(slope @ v, parameters, retain_graph=keep))
            result, v = value(v, hv, slope), onward(v, hv)
        return result.item()

    return answer


def of_one_tensor(v, step):
    v = torch.cat([v[:6], 0 * v[6:]])
    return v / v.norm()


def each_by_itself(v, step):
    return torch.cat([v[:6] / v[:6].norm(), v[6:] / v[6:].norm()])


def whole_hessian(loss, parameters):
    slope = flatten(torch.autograd.grad(loss(), parameters, create_graph=True))
    rows = [flatten(torch.autograd.grad(s, parameters, retain_graph=True)) for s in slope]
    return torch.stack(rows)


WRONG["2.6"] += [
    (sharp_with(lambda v, step: v), "v is not scaled to length 1"),
    (sharp_with(lambda v, step: v if step else v / v.norm()), "v is not scaled"),
    (sharp_with(value=lambda v, hv, slope: hv.norm()), "the length of Hv has no sign"),
    (sharp_with(value=lambda v, hv, slope: hv @ hv), "Hv . Hv"),
    (sharp_with(value=lambda v, hv, slope: slope.norm()), "the length of the gradient"),
    (sharp_with(value=lambda v, hv, slope: v @ hv / 2), "the half of it"),
    (sharp_with(count=lambda steps: 1), "after step 1 of 40"),
    (sharp_with(onward=lambda v, hv: v), "after step 1 of 40"),
    (sharp_with(count=lambda steps: 60), "`steps` is left out"),
    (sharp_with(start=lambda n, g: torch.ones(n)), "v is not random"),
    (sharp_with(start=lambda n, g: torch.zeros(n)), "v is not scaled to length 1"),
    (sharp_with(start=lambda n, g: torch.randn(n)), "not from `generator`"),
    (sharp_with(start=lambda n, g: torch.randn(n, generator=g.manual_seed(1))), "not random"),
    (sharp_with(of_one_tensor), "one of the two tensors is left out"),
    (sharp_with(each_by_itself), "each tensor was scaled to length 1"),
    (sharp_with(keep=False), "retain_graph=True"),
    (lambda loss, ps, steps, g: whole_hessian(loss, ps).trace().item(), "the trace"),
    (
        lambda loss, ps, steps, g: torch.linalg.eigvalsh(whole_hessian(loss, ps)).max().item(),
        "finds the largest in size",
    ),
    (lambda loss, ps, steps, g: whole_hessian(loss, ps).diag().max().item(), "the diagonal"),
    (torch.no_grad()(sharp_with()), "has no graph of its own"),
    (lambda loss, ps, steps, g: flatten(torch.autograd.grad(loss(), ps)).norm(), "a first deriv"),
]


@wrong("2.6", "has no graph of its own")
def sharpness_without_create_graph(loss, parameters, steps, generator):
    slope = flatten(torch.autograd.grad(loss(), parameters))
    v = torch.randn(len(slope), generator=generator)
    return torch.autograd.grad(slope @ v, parameters)


@wrong("2.6", "backward() adds to .grad")
def sharpness_by_backward(loss, parameters, steps, generator):
    loss().backward(create_graph=True)
    slope = flatten([p.grad for p in parameters])
    v = torch.randn(len(slope), generator=generator)
    for _ in range(steps):
        v = v / v.norm()
        hv = flatten(torch.autograd.grad(slope @ v, parameters, retain_graph=True))
        value, v = v @ hv, hv
    return value


@wrong("2.6", "move nothing")
def sharpness_after_a_step(loss, parameters, steps, generator):
    value = sharp_with()(loss, parameters, steps, generator)
    with torch.no_grad():
        parameters[0] -= 0.1
    return value


@wrong("2.6", "There is at least one more")
def sharpness_with_one_more_product(loss, parameters, steps, generator):
    hessian = whole_hessian(loss, parameters)
    v = torch.randn(len(hessian), generator=generator)
    for _ in range(steps):
        v = torch.nn.functional.normalize(hessian @ v, dim=0)
    return float(v @ hessian @ v)


@wrong("2.6", "one step too few")
def sharpness_with_a_step_too_few(loss, parameters, steps, generator):
    return sharp_with()(loss, parameters, steps - 1, generator)


@wrong("2.6", "one step too few")
def sharpness_from_zero(loss, parameters, steps, generator):
    return sharp_with()(loss, parameters, steps - 1, generator) if steps > 1 else torch.zeros(())


@wrong("2.6", "raised UnboundLocalError")
def sharpness_that_sets_nothing(loss, parameters, steps, generator):
    if steps < 0:
        value = 0
    return value


@wrong("2.6", "is not H v")
def sharpness_of_the_sum(loss, parameters, steps, generator):
    slope = flatten(torch.autograd.grad(loss(), parameters, create_graph=True))
    column = flatten(torch.autograd.grad(slope.sum(), parameters))
    hv = torch.randn(len(slope), generator=generator)
    for _ in range(steps):
        v = hv / hv.norm()
        hv = column * v
    return v @ hv


@wrong("2.6", "flatten the gradients to one vector")
def sharpness_of_parts(loss, parameters, steps, generator):
    slopes = torch.autograd.grad(loss(), parameters, create_graph=True)
    v = torch.randn(sum(p.numel() for p in parameters), generator=generator)
    return torch.autograd.grad(sum(a @ b for a, b in zip(slopes, v, strict=False)), parameters)


@wrong("2.6", "a difference of two gradients")
def sharpness_by_differences(loss, parameters, steps, generator):
    def slope():
        return flatten(torch.autograd.grad(loss(), parameters))

    def move(v, distance):
        way = v.split([p.numel() for p in parameters])
        with torch.no_grad():
            for p, part in zip(parameters, way, strict=False):
                p.add_(part.view_as(p), alpha=distance)

    hv = torch.randn(sum(p.numel() for p in parameters), generator=generator)
    for _ in range(steps):
        v, before = hv / hv.norm(), slope()
        move(v, 1e-4)
        hv = (slope() - before) / 1e-4
        move(v, -1e-4)
    return v @ hv
