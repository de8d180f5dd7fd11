"""How the error falls with more data: small networks trained on parts of a set, and a power law.

    log error |  .
              |     .            error = a * size ** -b
              |        .         a straight line of slope -b on two logarithmic axes
              |           .
              '--------------- log size

Price: training is 6 FLOPs for each parameter and image; a network here has 4,810 parameters.
Source: Hestness et al. 2017, "Deep Learning Scaling is Predictable, Empirically", arXiv 1712.00409.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

BATCH = 64


def error_rate(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """The share of images that `model` classifies wrongly."""
    with torch.no_grad():
        return (model(inputs).argmax(dim=1) != labels).float().mean().item()


def num_steps(num_images: int) -> int:
    """Steps of a training: 200, and on many images four epochs, so that it lacks data, not time."""
    return max(200, num_images * 4 // BATCH)


def train_on(inputs: Tensor, labels: Tensor, num_classes: int) -> nn.Module:
    """Train a small network on images (N, 1, height, width), in batches of 64, and return it."""
    pixels = inputs[0].numel()
    peak_rate = 0.02
    steps = num_steps(len(inputs))
    layers = (nn.Flatten(), nn.Linear(pixels, 64), nn.ReLU(), nn.Linear(64, num_classes))
    model = nn.Sequential(*layers).to(inputs.device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = peak_rate * (1 - step / steps)
        batch = torch.randint(len(inputs), (BATCH,), device=inputs.device)
        nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def fit_power_law(sizes: Sequence[float], errors: Sequence[float]) -> tuple[float, float]:
    """Find a and b of the curve error = a * size ** -b.

    On two logarithmic axes this curve is a straight line: log(error) = log(a) - b log(size). The
    line is the one with the least sum of squared distances in log(error).

    Args:
        sizes: at least two different numbers above 0; a size may come more than once.
        errors: one for each size, above 0. Where they grow with the size, b is below 0.
    """
    x, y = (torch.tensor(values, dtype=torch.float64).log() for values in (sizes, errors))
    slope = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
    return math.exp(y.mean() - slope * x.mean()), -slope.item()
