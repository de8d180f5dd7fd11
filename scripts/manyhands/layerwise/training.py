"""One training of lesson 08's comparison: a network of four layers, an optimizer, a batch.

    rate |  ,-.                 the same schedule for all: a warm-up over the first tenth of the
         | /   `-.              steps, then a straight fall to 0; the peak is each optimizer's own
         |/       `-.
         +------------> step

Price: that of the network, and two norms for each of its eight parameters in each step.
Source: You et al. 2020, https://arxiv.org/abs/1904.00962 (tuned rates, warm-up, a fixed budget).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyhands.batch_size.problem import Labelled, of_images
from manyhands.first_job.power_law import error_rate
from manyhands.layerwise import optimizers

HIDDEN = 64
LAYERS = 3
WARM_UP = 0.1  # of the steps


class Parts(NamedTuple):
    """The optimizers of lesson 08."""

    LARS: type = optimizers.LARS
    LARC: type = optimizers.LARC
    LAMB: type = optimizers.LAMB
    NovoGrad: type = optimizers.NovoGrad


class Way(NamedTuple):
    """An optimizer with its settings, and the rates at which the search for its best one begins."""

    optimizer: Callable
    options: dict
    first: tuple[float, float] = (1.0, 1.0)  # with a small batch, and with a large one


def ways(parts: Parts) -> dict[str, Way]:
    """All that are compared."""
    return {
        "SGD": Way(torch.optim.SGD, {"momentum": 0.9}, (0.2, 0.4)),
        "AdamW": Way(torch.optim.AdamW, {}, (0.02, 0.02)),
        "LARS": Way(parts.LARS, {"trust": 0.02}, (1.0, 3.0)),
        "LARC": Way(parts.LARC, {}, (0.2, 2.0)),
        "LAMB": Way(parts.LAMB, {}, (0.04, 0.1)),
        "NovoGrad": Way(parts.NovoGrad, {}, (0.04, 0.02)),
    }


class Split(NamedTuple):
    """Images in three parts: to train on, to choose learning rates on, and to judge on."""

    train_inputs: Tensor  # (N, 1, height, width)
    train_labels: Tensor  # (N,), int64
    valid_inputs: Tensor
    valid_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor
    num_classes: int
    note: str


def split(data: Labelled) -> Split:
    """Keep the last of the training images for validation, as lesson 03 does."""
    parts = of_images(data)
    _, _, height, width = data.test_inputs.shape
    note = (
        f"data: {data.name}, {len(parts.train_inputs):,} images to train on, "
        f"{len(parts.valid_inputs):,} for validation and {len(data.test_inputs):,} to test on, "
        f"{height} x {width} pixels, {data.num_classes} classes"
    )
    return Split(*parts[:4], data.test_inputs, data.test_labels, data.num_classes, note)


class Scores(NamedTuple):
    """Accuracies at the end of a training."""

    valid: float
    test: float


def network(data: Split, seed: int) -> nn.Module:
    """An MLP; the seed decides its weights. (B, 1, H, W) to (B, classes)"""
    torch.manual_seed(seed)
    width = data.train_inputs[0].numel()
    layers: list[nn.Module] = [nn.Flatten()]
    for _ in range(LAYERS):
        layers += [nn.Linear(width, HIDDEN), nn.ReLU()]
        width = HIDDEN
    return nn.Sequential(*layers, nn.Linear(width, data.num_classes)).to(data.train_inputs.device)


def rate_at(step: int, num_steps: int, peak: float) -> float:
    """The learning rate of a step; the first is number 0."""
    risen = min(1.0, (step + 1) / max(1.0, WARM_UP * num_steps))
    return peak * risen * (1 - step / num_steps)


def train(
    data: Split,
    way: Way,
    batch: int,
    rate: float,
    num_steps: int,
    seed: int,
    look: Callable[[nn.Module, torch.optim.Optimizer], object] = lambda model, optimizer: None,
) -> Scores:
    """Train, and return the accuracies on the validation images and on the test images.

    Args:
        look: is called after each step.
    """
    model = network(data, seed)
    optimizer = way.optimizer(model.parameters(), lr=rate, **way.options)
    chosen = torch.empty(0, dtype=torch.int64)
    for step in range(num_steps):
        if len(chosen) < batch:  # what an epoch leaves over is left out
            chosen = torch.randperm(len(data.train_inputs))
        own = chosen[:batch]
        chosen = chosen[batch:]
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, num_steps, rate)
        optimizer.zero_grad()
        loss_of(model, data.train_inputs[own], data.train_labels[own]).backward()
        optimizer.step()
        look(model, optimizer)
    return Scores(
        1 - error_rate(model, data.valid_inputs, data.valid_labels),
        1 - error_rate(model, data.test_inputs, data.test_labels),
    )


def loss_of(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of a batch."""
    return nn.functional.cross_entropy(model(inputs), labels)
