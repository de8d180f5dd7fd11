"""Gradient descent on a straight line: with all samples, with one, and with some of them.

    b ^   ( ( ( x ) ) )          The loss over (w, b) is a valley. Its contours are ellipses.
      |     ( ( . ) )            All samples: a smooth path, each step looks at all N samples.
      |   .-'                    One sample:  a ragged path, each step looks at one.
      +----------------> w       A batch of M: in between; a step's variance falls as 1 / M.

The model is w x + b and the loss is the mean of (w x + b - y)^2. Parameters are a tensor [w, b].
Price: a step on M samples takes about 6 M operations; a path keeps 8 bytes for each step.
Source: Bottou, Curtis, Nocedal 2018, https://arxiv.org/abs/1606.04838; Polyak 1964 (momentum).
"""

from collections.abc import Callable, Iterator

import torch
from torch import Generator, Tensor


def mean_squared_error(parameters: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The loss: the mean of (w x + b - y)^2 over the samples.

    Args:
        parameters: [w, b]. (2,), or (..., 2) for the losses of many lines at once.
        x, y: the samples. (N,)

    Returns:
        The loss of each line, a scalar for one. (...)
    """
    w, b = parameters[..., :1], parameters[..., 1:]
    return ((w * x + b - y) ** 2).mean(dim=-1)


def gradient(parameters: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of the mean squared error by hand: [dL/dw, dL/db]. (2,)

    Args:
        parameters: [w, b]. (2,)
        x, y: the samples, any number of them. (N,)
    """
    error = parameters[0] * x + parameters[1] - y  # (N,)
    return torch.stack([2 * (error * x).mean(), 2 * error.mean()])


def descend(
    start: Tensor, x: Tensor, y: Tensor, rate: float, tolerance: float, max_steps: int
) -> Tensor:
    """Gradient descent with all samples: step against the gradient until it is small.

    It ends before a step when the gradient's norm is below `tolerance`, or after `max_steps`.

    Args:
        start: [w, b]; left as it is. (2,)
        rate: the learning rate; a step subtracts rate times the gradient.

    Returns:
        The parameters at the start and after every step. (steps + 1, 2)
    """
    path = [start]
    for _ in range(max_steps):
        slope = gradient(path[-1], x, y)
        if slope.norm() < tolerance:
            break
        path.append(path[-1] - rate * slope)
    return torch.stack(path)


def largest_rate(x: Tensor) -> float:
    """The learning rate above which gradient descent on these samples diverges.

    The loss is a parabola in every direction. The Hessian holds its second derivatives:

        H = 2 * [[mean(x^2), mean(x)],
                 [mean(x),   1      ]]

    Along an eigenvector of H with eigenvalue h, each step multiplies the distance to the minimum by
    1 - rate * h. The distance grows where rate * h is above 2: first for the largest h.

    Args:
        x: the samples. (N,)
    """
    mean, mean_square = x.mean().item(), x.square().mean().item()
    hessian = 2 * torch.tensor([[mean_square, mean], [mean, 1.0]], dtype=torch.float64)
    return 2 / torch.linalg.eigvalsh(hessian).max().item()


def mini_batches(num_samples: int, batch: int, generator: Generator) -> Iterator[Tensor]:
    """One epoch: all sample numbers in a random order, `batch` of them at a time.

    Each number from 0 to num_samples - 1 comes once. The last batch may be smaller.

    Yields:
        Numbers of samples. (batch,) int64
    """
    yield from torch.randperm(num_samples, generator=generator).split(batch)


def descend_in_batches(
    start: Tensor,
    x: Tensor,
    y: Tensor,
    batch: int,
    num_steps: int,
    step: Callable[[Tensor, Tensor], Tensor],
    generator: Generator,
) -> Tensor:
    """Stochastic gradient descent: each step looks at one batch, and epochs follow one another.

    Args:
        start: [w, b]; left as it is. (2,)
        step: step(parameters, gradient of a batch) gives the new parameters; one call per step.

    Returns:
        The parameters at the start and after every step. (num_steps + 1, 2)
    """
    path = [start]
    while len(path) <= num_steps:
        for chosen in mini_batches(len(x), batch, generator):
            if len(path) <= num_steps:
                path.append(step(path[-1], gradient(path[-1], x[chosen], y[chosen])))
    return torch.stack(path)


def gradient_variance(
    parameters: Tensor, x: Tensor, y: Tensor, batch: int, repeats: int, generator: Generator
) -> float:
    """How far a batch's gradient lies from that of all samples: the mean of the squared distance.

    Each of the `repeats` batches is drawn with replacement: a sample may come twice in it.
    """
    whole, squares = gradient(parameters, x, y), []
    for _ in range(repeats):
        chosen = torch.randint(len(x), (batch,), generator=generator)
        squares.append((gradient(parameters, x[chosen], y[chosen]) - whole).square().sum())
    return torch.stack(squares).mean().item()


class Momentum:
    """A step that remembers: velocity = momentum * velocity + gradient.

    The older a gradient is, the less it counts. The step subtracts rate * velocity, where `rate` is
    the learning rate. With momentum 0 this is plain gradient descent.
    """

    def __init__(self, rate: float, momentum: float) -> None:
        """Keep the learning rate and the momentum, and begin with a velocity of 0."""
        self.rate, self.momentum, self.velocity = rate, momentum, 0.0

    def __call__(self, parameters: Tensor, slope: Tensor) -> Tensor:
        """Return the new parameters; the old ones are left as they are. (2,)"""
        self.velocity = self.momentum * self.velocity + slope
        return parameters - self.rate * self.velocity
