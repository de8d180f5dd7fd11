"""Answers to lesson 02: right ones of other shapes, and wrong ones that are no slip."""

import torch
import torch.distributed as dist
from torch import nn

from manyhands.first_job.planning import my_share
from manyhands.loss_surface import surface
from manyhands.loss_surface.surface import loss_at

# ---- 2.1 ------------------------------------------------------------------------------------


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


def at_by_one_vector(loss, parameters, directions, distances):
    """In memory of their own the parameters are moved, and copied back in place."""
    before = nn.utils.parameters_to_vector(parameters).detach().clone()
    moved = before.clone()
    for direction, distance in zip(directions, distances, strict=False):
        moved += distance * torch.cat([part.flatten() for part in direction])
    sizes = [p.numel() for p in parameters]
    with torch.no_grad():
        try:
            for p, part in zip(parameters, moved.split(sizes), strict=True):
                p.copy_(part.view_as(p))
            return float(loss())
        finally:
            for p, part in zip(parameters, before.split(sizes), strict=True):
                p.copy_(part.view_as(p))


def at_in_other_memory(loss, parameters, directions, distances):
    before = nn.utils.parameters_to_vector(parameters).detach().clone()
    moved = before.clone()
    for direction, distance in zip(directions, distances, strict=False):
        moved += distance * torch.cat([part.flatten() for part in direction])
    try:
        nn.utils.vector_to_parameters(moved, parameters)
        return loss().item()
    finally:
        nn.utils.vector_to_parameters(before, parameters)


def at_with_frozen_parameters(loss, parameters, directions, distances):
    for p in parameters:
        p.requires_grad_(False)
    return loss_at(loss, parameters, directions, distances)


def at_without_errors(loss, parameters, directions, distances):
    try:
        return loss_at(loss, parameters, directions, distances)
    except ValueError:
        return float("nan")


@torch.no_grad()
def at_and_back_without_finally(loss, parameters, directions, distances):
    def move(sign):
        for direction, distance in zip(directions, distances, strict=False):
            for p, part in zip(parameters, direction, strict=False):
                p += sign * distance * part

    move(1)
    value = loss().item()
    move(-1)
    return value


def at_without_no_grad(loss, parameters, directions, distances):
    for direction, distance in zip(directions, distances, strict=False):
        for p, part in zip(parameters, direction, strict=False):
            p += distance * part
    return loss().item()


# ---- 2.2 ------------------------------------------------------------------------------------


def slice_from_the_end(loss, parameters, end, shares):
    back = [p.detach() - e.detach() for p, e in zip(parameters, end, strict=False)]
    return torch.tensor([loss_at(loss, parameters, [back], [-s]) for s in shares])


@torch.no_grad()
def slice_by_mixing(loss, parameters, end, shares):
    before = [p.clone() for p in parameters]
    losses = []
    for share in shares:
        for p, own, other in zip(parameters, before, end, strict=False):
            p.copy_(torch.lerp(own, other, share))
        losses.append(loss())
    for p, own in zip(parameters, before, strict=False):
        p.copy_(own)
    return losses


def slice_lazily(loss, parameters, end, shares):
    line = [e.detach() - p.detach() for p, e in zip(parameters, end, strict=False)]
    return (loss_at(loss, parameters, [line], [s]) for s in shares)


def slice_without_the_list(loss, parameters, end, shares):
    line = [e.detach() - p.detach() for p, e in zip(parameters, end, strict=True)]
    return [loss_at(loss, parameters, line, [share]) for share in shares]


@torch.no_grad()
def slice_left_at_the_last_share(loss, parameters, end, shares):
    before = [p.clone() for p in parameters]
    losses = []
    for share in shares:
        for p, own, other in zip(parameters, before, end, strict=False):
            p.copy_(own + share * (other - own))
        losses.append(loss().item())
    return losses


# ---- 2.3 ------------------------------------------------------------------------------------


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


def direction_of_matrices_only(parameters, generator):
    return surface.random_direction([p for p in parameters if p.dim() > 1], generator)


def direction_by_signs(parameters, generator):
    signs = [torch.randint(2, p.shape, generator=generator) * 2 - 1 for p in parameters]
    return [p.detach() * s * (p.dim() > 1) for p, s in zip(parameters, signs, strict=True)]


def direction_by_columns(parameters, generator):
    direction = []
    for p in parameters:
        part = torch.zeros(p.shape)
        if p.dim() > 1:
            part = torch.randn(p.shape, generator=generator)
            own, other = p.detach().norm(dim=1, keepdim=True), part.norm(dim=1, keepdim=True)
            part = part * own / other
        direction.append(part)
    return direction


# ---- 2.4 ------------------------------------------------------------------------------------


def surface_in_blocks(loss, parameters, directions, grid, group=None):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    points = [(i, j) for i in range(len(grid)) for j in range(len(grid))]
    each = -(-len(points) // size)
    table = torch.full((len(grid), len(grid)), -torch.inf, dtype=torch.float64)
    for i, j in points[rank * each : (rank + 1) * each]:
        table[i, j] = loss_at(loss, parameters, directions, [grid[i], grid[j]])
    dist.all_reduce(table, op=dist.ReduceOp.MAX, group=group)
    return table


def surface_by_objects(loss, parameters, directions, grid, group=None):
    size = dist.get_world_size(group)
    points = my_share([(a, b) for a in grid for b in grid], dist.get_rank(group), size)
    parts = [None] * size
    mine = [loss_at(loss, parameters, directions, point) for point in points]
    dist.all_gather_object(parts, mine, group=group)
    losses = [parts[n % size][n // size] for n in range(len(grid) ** 2)]
    return torch.tensor(losses, dtype=torch.float64).reshape(len(grid), -1)


def surface_by_rows(loss, parameters, directions, grid, group=None):
    table = torch.zeros(len(grid), len(grid), dtype=torch.float64)
    for i in my_share(range(len(grid)), dist.get_rank(group), dist.get_world_size(group)):
        for j, across in enumerate(grid):
            table[i, j] = loss_at(loss, parameters, directions, (grid[i], across))
    dist.all_reduce(table, group=group)
    return table


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


def surface_that_stays_away(loss, parameters, directions, grid, group=None):
    table = surface.surface(loss, parameters, directions, grid, group)
    with torch.no_grad():
        for p, part in zip(parameters, directions[0], strict=True):
            p += part
    return table


def not_written_yet(loss, parameters, directions, distances):
    raise NotImplementedError("TODO 2.1")


def surface_before_its_loss_at(loss, parameters, directions, grid, group=None):
    return torch.tensor([[not_written_yet(loss, parameters, directions, (grid[0], grid[0]))]])


# ---- 2.5 ------------------------------------------------------------------------------------


def roughness_in_loops(losses):
    walked = single = 0.0
    for walk in [*losses.tolist(), *losses.T.tolist()]:
        walked += sum(abs(b - a) for a, b in zip(walk, walk[1:], strict=False))
        single += walk[0] - min(walk) + walk[-1] - min(walk)
    return walked / single - 1


def roughness_as_a_tensor(losses):
    walks = torch.stack([losses, losses.t()]).double()
    walked = (walks[..., 1:] - walks[..., :-1]).abs().sum()
    single = (walks[..., 0] + walks[..., -1] - 2 * walks.amin(-1)).sum()
    return (walked - single) / single


def roughness_from_zero(losses):
    losses -= losses.min()
    return surface.roughness(losses)


def roughness_of_one_walk(losses):
    flat = losses.flatten()
    return (flat.diff().abs().sum() / (flat[0] + flat[-1] - 2 * flat.min()) - 1).item()


# ---- 2.6 ------------------------------------------------------------------------------------


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


def sharpness_by_products(loss, parameters, steps, generator):
    slopes = torch.autograd.grad(loss(), parameters, create_graph=True)
    slope = torch.cat([part.flatten() for part in slopes])
    hv = torch.rand(len(slope), generator=generator) - 0.5
    for _ in range(steps):
        v = torch.nn.functional.normalize(hv, dim=0)
        rows = torch.autograd.grad(slope, parameters, grad_outputs=v, retain_graph=True)
        hv = torch.cat([part.flatten() for part in rows])
    return float(v @ hv)


def flatten(parts):
    return torch.cat([part.flatten() for part in parts])


def whole_hessian(loss, parameters):
    slope = flatten(torch.autograd.grad(loss(), parameters, create_graph=True))
    rows = [flatten(torch.autograd.grad(s, parameters, retain_graph=True)) for s in slope]
    return torch.stack(rows)


def sharpness_of_the_whole_hessian(loss, parameters, steps, generator):
    return torch.linalg.eigvalsh(whole_hessian(loss, parameters)).max().item()


def sharpness_without_create_graph(loss, parameters, steps, generator):
    slope = flatten(torch.autograd.grad(loss(), parameters))
    v = torch.randn(len(slope), generator=generator)
    return torch.autograd.grad(slope @ v, parameters)


def sharpness_by_backward(loss, parameters, steps, generator):
    loss().backward(create_graph=True)
    slope = flatten([p.grad for p in parameters])
    v = torch.randn(len(slope), generator=generator)
    for _ in range(steps):
        v = v / v.norm()
        hv = flatten(torch.autograd.grad(slope @ v, parameters, retain_graph=True))
        value, v = v @ hv, hv
    return value


@torch.no_grad()
def direction_of_one_filter(parameters, generator):
    """All filters of a tensor get the same random numbers."""
    direction = []
    for parameter in parameters:
        part = torch.zeros_like(parameter)
        if parameter.dim() > 1:
            inside = tuple(range(1, parameter.dim()))
            part += torch.randn(parameter.shape[1:], generator=generator)
            part *= torch.linalg.vector_norm(parameter, dim=inside, keepdim=True)
            part /= torch.linalg.vector_norm(part[0] * 0 + 1)
            own = torch.linalg.vector_norm(part, dim=inside, keepdim=True).clamp(min=1e-12)
            part *= torch.linalg.vector_norm(parameter, dim=inside, keepdim=True) / own
        direction.append(part)
    return direction


RIGHT = {
    "2.1": [at_by_data, at_by_one_vector],
    "2.2": [slice_from_the_end, slice_by_mixing],
    "2.3": [direction_in_a_loop, direction_that_draws_all],
    "2.4": [surface_in_blocks, surface_by_objects, surface_by_rows],
    "2.5": [roughness_in_loops, roughness_as_a_tensor],
    "2.6": [sharpness_in_lists, sharpness_by_products],
}
WRONG = {
    "2.1": [
        (at_in_other_memory, "the parameters lie in the memory in which they were"),
        (at_with_frozen_parameters, "the parameters want gradients as before"),
        (at_without_errors, "the error of `loss` comes out of loss_at"),
        (
            at_and_back_without_finally,
            "by the same steps gives other bits, and where `loss` raises",
        ),
        (at_without_no_grad, "torch does not let a tensor that wants a gradient"),
    ],
    "2.2": [
        (slice_lazily, "a generator"),
        (slice_left_at_the_last_share, "loss_at moves the parameters for you"),
        (slice_without_the_list, "loss_at takes a list of directions"),
    ],
    "2.3": [
        (direction_of_matrices_only, "the shapes of the parameters"),
        (direction_by_signs, "whole filters are scaled, and no smaller pieces"),
        (direction_by_columns, "this scales each place of the kernels on its own"),
        (direction_of_one_filter, "each filter has random numbers of its own"),
    ],
    "2.4": [
        (surface_with_an_early_return, "All ranks that are left wait."),
        (surface_that_stays_away, "the parameters are where they were"),
        (surface_before_its_loss_at, "calls your `not_written_yet`, TODO 2.1"),
    ],
    "2.5": [(roughness_from_zero, "`losses` has changed"), (roughness_of_one_walk, "")],
    "2.6": [
        (sharpness_of_the_whole_hessian, "one step does not reach the largest eigenvalue"),
        (sharpness_without_create_graph, "create_graph=True"),
        (sharpness_by_backward, ""),
    ],
}
