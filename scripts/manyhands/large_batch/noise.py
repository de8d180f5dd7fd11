"""The noise of a step, and how to put back what a large batch has taken away.

    batch B:   step = rate * mean of B gradients      its covariance: rate^2 / B * V
    batch kB:                                         k times less, so multiply the rate by root k
    or: weigh each loss by z ~ N(1, sigma^2)          the mean stays, the covariance is 1 + sigma^2
                                                      times as large, where noise dominates

V is the covariance of the gradients of single samples. Price: one random number per sample.
Source: Hoffer et al. 2017, https://arxiv.org/abs/1705.08741 (section 4: the root, and the noise).
"""

import torch
from torch import Tensor


def step_variance(gradients: Tensor, batch: int, rate: float) -> float:
    """The variance of one step of stochastic gradient descent, summed over all weights.

    The batch is drawn from these samples with replacement. Nothing is drawn here: the number
    follows from the gradients.

    Args:
        gradients: of each single sample's loss. (samples, P)
        batch: samples per step.
        rate: the learning rate.
    """
    variance = gradients.var(dim=0, correction=0).sum().item()  # of a single sample's gradient
    return rate**2 * variance / batch


def noise_size(batch: int, small: int) -> float:
    """The sigma that gives a large batch the gradient noise of a small one.

    The noise of a batch is that of one sample divided by the batch. A weight with variance sigma^2
    on each sample multiplies it by 1 + sigma^2.

    Args:
        batch: at least `small`.
    """
    return (batch / small - 1) ** 0.5


def noisy_mean(losses: Tensor, sigma: float, draw: torch.Generator | None = None) -> Tensor:
    """The mean of the losses, each multiplied by a random number z ~ N(1, sigma^2) of its own.

    Args:
        losses: of the samples of a batch. (B,)
        draw: where the random numbers come from; none given: torch's own.

    Returns: a number without dimensions, whose gradient has the mean of the plain one's.
    """
    z = 1 + sigma * torch.randn(
        losses.shape, generator=draw, dtype=losses.dtype, device=losses.device
    )
    return (z * losses).mean()
