"""One training of the comparison: a small network, a batch, and a remedy for its size.

    remedy --> batch and rate of every step (rates.py), noise (noise.py), norm (norms.py)
           --> accuracy in the end, and steps, images and seconds to the target

All remedies have the same network, data, target and budget of images; only longer training is
allowed more of them, and is charged for it. Price: 6 operations per weight and image.
Source: Hoffer et al. 2017, https://arxiv.org/abs/1705.08741 (the remedies, side by side).
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from manyhands.batch_size.sweep import PATIENCE, Labelled
from manyhands.large_batch import noise, norms, rates, ties
from manyhands.large_batch.rates import Setting

HIDDEN = 64
LAYERS = 2
LOOKS = 4  # at the accuracy, in each epoch
MILESTONES = (0.5, 0.75)  # of the epochs, where the rate falls
FALL = 0.25


@dataclass(frozen=True)
class Task:
    """What all remedies have in common."""

    small: int = 16  # images in a step of the reference
    large: int = 256  # images in a step of the others
    rate: float = 0.4  # of the reference, the best of a sweep
    epochs: int = 12  # the budget: how often each image is seen
    target: float = 0.95  # accuracy on the test images
    tuned: float = 2.0  # the large batch's own best rate of a sweep, in rates of the reference


@dataclass(frozen=True)
class Remedy:
    """How a batch is trained with; the defaults are the large batch and nothing against it."""

    is_small: bool = False
    rule: Literal["none", "root", "linear", "tuned"] = "none"
    warm_up: float = 0.0  # epochs
    norm: Literal["none", "batch", "ghost"] = "none"
    dropout: float = 0.0
    noise: bool = False
    longer: float = 1.0  # times the budget of images
    grows: bool = False


LINEAR = {"rule": "linear", "warm_up": 3.0}
ROOT = {"rule": "root", "warm_up": 1.0}
TUNED = {"rule": "tuned"}
REMEDIES = {
    "small batch": Remedy(is_small=True),
    "large batch": Remedy(),
    "tuned rate": Remedy(**TUNED),
    "root rule": Remedy(rule="root"),
    "linear rule": Remedy(rule="linear"),
    "root rule, warm-up": Remedy(**ROOT),
    "linear rule, warm-up": Remedy(**LINEAR),
    "gradient noise": Remedy(noise=True),
    "growing batch": Remedy(grows=True),
    "longer training": Remedy(**TUNED, longer=4.0),
    "small batch, batch norm": Remedy(is_small=True, norm="batch"),
    "large batch, batch norm": Remedy(norm="batch"),
    "root rule, warm-up, batch norm": Remedy(**ROOT, norm="batch"),
    "root rule, warm-up, ghost batch norm": Remedy(**ROOT, norm="ghost"),
}


class Parts(NamedTuple):
    """What the trainings and their ranking are made of: the exercises of lesson 07."""

    scaled_rate: Callable = rates.scaled_rate
    warmed_up_rate: Callable = rates.warmed_up_rate
    grown_batch: Callable = rates.grown_batch
    noise_size: Callable = noise.noise_size
    noisy_mean: Callable = noise.noisy_mean
    GhostBatchNorm: type[nn.Module] = norms.GhostBatchNorm
    is_tie: Callable = ties.is_tie
    ranked: Callable = ties.ranked


COURSE = Parts()


class Outcome(NamedTuple):
    """What a training came to; None where the target was missed."""

    accuracy: float
    steps: int | None  # to the target
    images: int | None
    seconds: float | None


def network(data: Labelled, remedy: Remedy, task: Task, parts: Parts) -> nn.Module:
    """An MLP with a norm before each ReLU, if the remedy has one. (B, 1, H, W) to (B, classes)"""
    width = data.train_inputs[0].numel()
    layers: list[nn.Module] = [nn.Flatten()]
    for _ in range(LAYERS):
        layers.append(nn.Linear(width, HIDDEN))
        if remedy.norm == "ghost":
            layers.append(parts.GhostBatchNorm(HIDDEN, task.small))
        elif remedy.norm == "batch":
            layers.append(nn.BatchNorm1d(HIDDEN))
        layers += [nn.ReLU(), nn.Dropout(remedy.dropout)]
        width = HIDDEN
    return nn.Sequential(*layers, nn.Linear(width, data.num_classes)).to(data.train_inputs.device)


def settings(remedy: Remedy, task: Task, num_images: int, parts: Parts) -> Iterator[Setting]:
    """The batch and the rate of every step of a training."""
    epochs = task.epochs * remedy.longer
    milestones = [share * epochs for share in MILESTONES]
    batch = task.small if remedy.is_small or remedy.grows else task.large
    if remedy.rule == "tuned":
        high = task.rate * task.tuned
    else:
        high = parts.scaled_rate(task.rate, batch / task.small, remedy.rule)
    low = min(task.rate, high)
    seen = 0
    while (epoch := seen / num_images) < epochs:
        if remedy.grows:
            start = Setting(batch, high)
            setting = parts.grown_batch(epoch, start, task.large, milestones, FALL)
        else:
            rate = parts.warmed_up_rate(epoch, low, high, remedy.warm_up, milestones, FALL)
            setting = Setting(batch, rate)
        yield setting
        seen += setting[0]


def train(
    data: Labelled,
    remedy: Remedy,
    task: Task,
    seed: int,
    parts: Parts = COURSE,
    look: Callable[[int, float, nn.Module], object] = lambda images, accuracy, model: None,
) -> Outcome:
    """Train once.

    Args:
        look: is called `LOOKS` times in an epoch, with the images seen so far, the accuracy, and
            the model.
    """
    torch.manual_seed(seed)
    model = network(data, remedy, task, parts)
    sigma = parts.noise_size(task.large, task.small) if remedy.noise else 0.0
    num_images = len(data.train_inputs)
    order = _indices(num_images)
    target = _Target(task.target)
    seen = looks = 0
    for step, (batch, rate) in enumerate(settings(remedy, task, num_images, parts), 1):
        chosen = torch.tensor([next(order) for _ in range(batch)])
        logits = model(data.train_inputs[chosen])
        losses = nn.functional.cross_entropy(logits, data.train_labels[chosen], reduction="none")
        descend(model, parts.noisy_mean(losses, sigma), rate)
        seen += batch
        if seen * LOOKS // num_images > looks:
            looks = seen * LOOKS // num_images
            now = accuracy(model, data)
            target.record(now, step, seen)
            look(seen, now, model)
    return Outcome(accuracy(model, data), *target.reached())


def descend(model: nn.Module, loss: Tensor, rate: float) -> None:
    """One step of plain stochastic gradient descent."""
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.sub_(gradient, alpha=rate)


@torch.no_grad()
def accuracy(model: nn.Module, data: Labelled) -> float:
    """The share of test images that are classified correctly."""
    model.eval()
    guesses = model(data.test_inputs).argmax(dim=1)
    model.train()
    return (guesses == data.test_labels).float().mean().item()


class _Target:
    """Steps, images and seconds at the first of `PATIENCE` good looks in a row."""

    def __init__(self, accuracy: float) -> None:
        self.accuracy = accuracy
        self.start_s = time.perf_counter()
        self.row: list[tuple[int, int, float]] = []

    def record(self, accuracy: float, step: int, seen: int) -> None:
        """Count a look, until the row is long enough."""
        if len(self.row) < PATIENCE:
            now = (step, seen, time.perf_counter() - self.start_s)
            self.row = [*self.row, now] if accuracy >= self.accuracy else []

    def reached(self) -> tuple[int | None, int | None, float | None]:
        """None three times where the target was missed."""
        return self.row[0] if len(self.row) == PATIENCE else (None, None, None)


def _indices(num_images: int) -> Iterator[int]:
    """Every image once, in a new order each epoch, without an end."""
    while True:
        yield from torch.randperm(num_images).tolist()
