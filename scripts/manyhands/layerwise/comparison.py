"""Compare optimizers fairly: each is tuned on validation images and judged on test images.

    rate       first / 2   first   2 first   4 first
    accuracy      0.88      0.93    *0.95*     0.91     validation images, mean of the tuning seeds
                                      |
                                      '--> other seeds --> accuracy on the test images

The search extends the grid until the best rate has a worse one on both sides of it, so no optimizer
is judged by the end of a grid. The seeds and the images that choose the rate do not judge it.
Price: for each rate a training with each tuning seed, and then one with each seed.
Source: https://arxiv.org/abs/2103.03098 (Bouthillier et al. 2021, on variance in benchmarks).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from manyhands.layerwise.training import Split, Way, train

FACTOR = 2.0  # from one rate to the next
TUNING_SEED = 1000  # the first one; the seeds that judge are smaller


class Outcome(NamedTuple):
    """The rate that an optimizer was given, and what it reached with it."""

    rate: float
    tried: list[tuple[float, float]]  # rates in rising order, and their validation accuracies
    accuracies: list[float]  # on the test images, one for each seed


def compared(
    data: Split,
    way: Way,
    batch: int,
    first: float,
    num_steps: int,
    tuning: int,
    seeds: Iterable[int],
) -> Outcome:
    """Find the best learning rate of an optimizer, and train with it.

    Args:
        first: the rate at which the search begins.
        tuning: the number of trainings with each rate of the search.
        seeds: of the trainings with the best rate.
    """

    def of_valid(rate: float) -> float:
        chosen_by = range(TUNING_SEED, TUNING_SEED + tuning)
        return fmean(train(data, way, batch, rate, num_steps, seed).valid for seed in chosen_by)

    tried = climb(of_valid, first)
    rate = max(tried, key=tried.__getitem__)
    accuracies = [train(data, way, batch, rate, num_steps, seed).test for seed in seeds]
    return Outcome(rate, sorted(tried.items()), accuracies)


def climb(accuracy_at: Callable[[float], float], first: float) -> dict[float, float]:
    """Try rates until neither neighbour of the best one is better; returns all that were tried.

    Of equal rates the one that was tried first counts as the best.
    """
    tried = {first: accuracy_at(first)}
    place = 0
    while True:
        for rate in (first * FACTOR ** (place - 1), first * FACTOR ** (place + 1)):
            if rate not in tried:
                tried[rate] = accuracy_at(rate)
        best = max(tried, key=tried.__getitem__)
        if best == first * FACTOR**place:
            return tried
        place += 1 if best > first * FACTOR**place else -1


def is_inside(outcome: Outcome) -> bool:
    """Was at least one rate tried on each side of the best?"""
    rates = [rate for rate, _ in outcome.tried]
    return min(rates) < outcome.rate < max(rates)


def table(outcomes: Mapping[str, Outcome], classes: Sequence[Sequence[str]]) -> Iterator[str]:
    """A line for each optimizer, the best class first: its accuracies, and its rate."""
    for number, group in enumerate(classes, 1):
        for name in group:
            values = outcomes[name].accuracies
            spread = f"{fmean(values):.1%} ({min(values):.1%} to {max(values):.1%})"
            rates = [rate for rate, _ in outcomes[name].tried]
            grid = f"{outcomes[name].rate:g} (tried {min(rates):g} to {max(rates):g})"
            yield f"rank {number}: {name:8} {spread} at learning rate {grid}"
