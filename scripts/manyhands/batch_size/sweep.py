"""One training of a sweep over batch sizes and learning rates: a small model, plain SGD.

    batch 1, 2, 4, ... x rate 0.05, 0.1, ... x seed 1, 2, 3      each of them a training of its own

What is trained on what data is a `Problem`. There is no momentum and no schedule, so that the
learning rate is all there is to tune. Price of a step: 6 operations per weight and sample; where a
convolution or a Transformer uses a weight at many positions, as often as it is used.
Source: Shallue et al. 2019, https://arxiv.org/abs/1811.03600 (how to compare batch sizes).
"""

from collections.abc import Iterator, Sequence
from statistics import fmean

import torch
from torch import Tensor, nn

from manyhands.batch_size.problem import Labelled, Problem
from manyhands.batch_size.scaling import steps_to_target

__all__ = ["PATIENCE", "Labelled", "Training", "squares_on_the_way", "tune"]
PATIENCE = 2


class Training:
    """A network on its way: `step` trains on the next batch, `accuracy` says how good it is."""

    def __init__(self, data: Problem, batch: int, rate: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = data.build().to(data.train_inputs.device)
        self.data = data
        self.rate = rate
        self.parameters = list(self.model.parameters())
        self.batches = self._batches(batch)

    def step(self) -> None:
        """Train on the next batch."""
        chosen = next(self.batches)
        self.descend(self.gradient(self.data.train_inputs[chosen], self.data.train_labels[chosen]))

    def gradient(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The gradient of the mean loss of these samples, as one vector. (P,)"""
        scores = self.model(inputs)
        loss = nn.functional.cross_entropy(scores.flatten(0, -2), labels.flatten())
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, self.parameters)])

    @torch.no_grad()
    def descend(self, gradient: Tensor) -> None:
        """Step against a gradient (P,)."""
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, part in zip(self.parameters, gradient.split(sizes), strict=True):
            parameter.sub_(part.view_as(parameter), alpha=self.rate)

    def accuracy(self) -> float:
        """The share of the validation labels that have the highest score."""
        return self.accuracy_on(self.data.valid_inputs, self.data.valid_labels)

    @torch.no_grad()
    def accuracy_on(self, inputs: Tensor, labels: Tensor) -> float:
        """The share of these labels that have the highest score."""
        return (self.model(inputs).argmax(dim=-1) == labels).float().mean().item()

    def _batches(self, batch: int) -> Iterator[Tensor]:
        """Whole batches without an end, each epoch in a new order."""
        num_samples = len(self.data.train_inputs)
        while True:
            for chosen in torch.randperm(num_samples).split(batch):
                if len(chosen) == batch:  # what an epoch leaves over would be a smaller batch
                    yield chosen


def steps_between(data: Problem, batch: int) -> int:
    """Steps from one evaluation to the next: more with small batches, which take more of them."""
    return data.every * max(1, 16 // batch)


def tune(
    data: Problem,
    batch: int,
    rates: Sequence[float],
    seeds: Sequence[int],
    target: float,
    max_steps: int,
) -> dict[float, list[int | None]]:
    """Steps to the target accuracy for each rate and seed; None where it was missed.

    A rate is given up once one of its seeds takes more than twice the mean steps of the best rate
    so far: it cannot become the best by much, and most of a sweep's time would go there.
    """
    steps: dict[float, list[int | None]] = {}
    for rate in rates:
        steps[rate] = []
        for seed in seeds:
            training = Training(data, batch, rate, seed)
            every = steps_between(data, batch)
            ways = (training.step, training.accuracy, target, PATIENCE, every, max_steps)
            steps[rate].append(steps_to_target(*ways))
            if steps[rate][-1] is None:
                break
        else:
            max_steps = min(max_steps, round(2 * fmean(steps[rate])))
    return steps


def squares_on_the_way(
    data: Problem,
    small: int,
    large: int,
    rate: float,
    seed: int,
    target: float,
    max_steps: int,
) -> tuple[list[float], list[float]]:
    """Train at batch size `large` up to the target, and look at the gradients of each step.

    Each batch is cut into large / small pieces, as that many replicas would have them. Their mean
    gradient is that of the whole batch.

    Returns:
        For each step the mean squared length of the pieces' gradients, and that of their mean.
    """
    training = Training(data, large, rate, seed)
    small_squares, large_squares = [], []

    def step() -> None:
        pieces = next(training.batches).split(small)
        gradients = torch.stack(
            [training.gradient(data.train_inputs[p], data.train_labels[p]) for p in pieces]
        )
        mean = gradients.mean(dim=0)
        small_squares.append(gradients.square().sum(dim=1).mean().item())
        large_squares.append(mean.square().sum().item())
        training.descend(mean)

    every = steps_between(data, large)
    steps_to_target(step, training.accuracy, target, PATIENCE, every, max_steps)
    return small_squares, large_squares
