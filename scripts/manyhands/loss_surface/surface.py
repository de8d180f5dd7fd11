"""Pictures of a loss: cuts through it along lines and planes, computed by many ranks.

          ^ direction 2                     A point of the plane is a whole network:
          |  0 1 0 1 0                      parameters + a * direction 1 + b * direction 2.
          |  1 0 1 0 1                      The points are dealt out to the ranks (here two),
          |  0 1 0 1 0 --> direction 1      and the ranks put their losses together.

Parameters are a list of tensors, and a direction is a list of tensors of the same shapes. `loss` is
a function without arguments that computes the loss of the parameters as they are at the moment.
Price: a picture of G x G points costs G^2 / N forward passes per rank, and one all-reduce of 8 G^2
bytes. Sources: Li et al. 2018, https://arxiv.org/abs/1712.09913; Goodfellow et al. 2015,
https://arxiv.org/abs/1412.6544 (lines); Keskar et al. 2017, https://arxiv.org/abs/1609.04836.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Generator, Tensor

from manyhands.first_job.planning import my_share

Loss = Callable[[], Tensor]
Direction = Sequence[Tensor]


@torch.no_grad()
def loss_at(
    loss: Loss,
    parameters: Sequence[Tensor],
    directions: Sequence[Direction],
    distances: Sequence[float],
) -> float:
    """The loss at some distance: move along each direction by its distance, and evaluate.

    Afterwards the parameters are what they were, bit for bit, even if `loss` raises an error.

    Args:
        parameters: the model's own tensors; they are moved and put back in place.
        directions: D of them, left as they are.
        distances: one for each direction. (D,)
    """
    before = [parameter.clone() for parameter in parameters]
    try:
        for direction, distance in zip(directions, distances, strict=True):
            for parameter, part in zip(parameters, direction, strict=True):
                parameter.add_(part, alpha=distance)
        return loss().item()
    finally:
        for parameter, old in zip(parameters, before, strict=True):
            parameter.copy_(old)


def slice_between(
    loss: Loss, parameters: Sequence[Tensor], end: Sequence[Tensor], shares: Sequence[float]
) -> list[float]:
    """Losses at shares of the straight line from the parameters (0) to `end` (1), and beyond.

    Args:
        end: the parameters of another solution, of the same shapes.
        shares: in the order of the losses; 0.5 is half way, 2 is as far again beyond `end`.
    """
    line = [other - own.detach() for own, other in zip(parameters, end, strict=True)]
    return [loss_at(loss, parameters, [line], [share]) for share in shares]


@torch.no_grad()
def random_direction(parameters: Sequence[Tensor], generator: Generator) -> list[Tensor]:
    """A random direction in which each filter has the same norm as that filter of the parameters.

    A filter is the part of a tensor that makes one output: tensor[i], where the tensor has two or
    more dimensions. Tensors with fewer (biases, weights of norms) stay: their direction is 0.

    Returns:
        Normally distributed numbers from `generator`, scaled filter by filter to that norm; shapes
        as in `parameters`. A filter of zeros gives zeros. They require no gradient.
    """
    direction = []
    for parameter in parameters:
        part = torch.zeros_like(parameter)
        if parameter.dim() > 1:
            part = torch.randn(parameter.shape, generator=generator)
            inside = tuple(range(1, parameter.dim()))  # all dimensions within a filter
            lengths = [
                torch.linalg.vector_norm(t, dim=inside, keepdim=True) for t in (parameter, part)
            ]
            part *= lengths[0] / lengths[1]
        direction.append(part)
    return direction


def surface(
    loss: Loss,
    parameters: Sequence[Tensor],
    directions: tuple[Direction, Direction],
    grid: Sequence[float],
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Losses on a plane: [i, j] is at grid[i] along the first direction, grid[j] along the other.

    Each rank computes its share of the points, and one all-reduce brings all of them to all ranks.

    Args:
        parameters, directions: the same on all ranks.
        grid: G distances.

    Returns:
        (G, G) float64, the same on all ranks.
    """
    losses = torch.zeros(len(grid) ** 2, dtype=torch.float64)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    for point in my_share(range(len(losses)), rank, world_size):
        i, j = divmod(point, len(grid))
        losses[point] = loss_at(loss, parameters, directions, (grid[i], grid[j]))
    dist.all_reduce(losses, group=group)  # to each point one rank adds its loss, all others 0
    return losses.view(len(grid), len(grid))


def roughness(losses: Tensor) -> float:
    """How much more a walk over the surface climbs and descends than in a single valley.

    Walk along each row and each column, and add up all that you climb and descend. In a single
    valley that is the descent from the first point to the lowest and the climb from there to the
    last. Roughness is the sum over all walks, divided by what the sum would be if each of them
    crossed a single valley, minus 1. A smooth bowl has roughness 0.

    Args:
        losses: (G, G), G >= 3, not all equal.
    """
    walks = torch.cat([losses, losses.T])  # (2 G, G)
    walked = walks.diff(dim=1).abs().sum()
    lowest = walks.min(dim=1).values
    return (walked / (walks[:, 0] + walks[:, -1] - 2 * lowest).sum()).item() - 1


def sharpness(loss: Loss, parameters: Sequence[Tensor], steps: int, generator: Generator) -> float:
    """The strongest curvature of the loss: the Hessian's eigenvalue of largest absolute value.

    The Hessian H of P parameters has P x P numbers, too many to write down. But H times a vector v
    is the gradient of (gradient . v). Power iteration draws a random v (P,) and repeats `steps`
    times: scale v to length 1, then multiply it by H. Step by step v turns towards the eigenvector
    of that eigenvalue, which may be negative. The result is v . H v of the last step, where v has
    length 1. No .grad is changed.
    """
    gradients = torch.autograd.grad(loss(), parameters, create_graph=True)
    slope = torch.cat([gradient.flatten() for gradient in gradients])  # (P,)
    v = torch.randn(slope.shape, generator=generator)
    for _ in range(steps):
        unit = v / v.norm()
        rows = torch.autograd.grad(slope @ unit, parameters, retain_graph=True)
        v = torch.cat([row.flatten() for row in rows])  # H times unit
    return (unit @ v).item()
