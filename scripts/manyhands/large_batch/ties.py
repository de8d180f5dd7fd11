"""Rank ways to train by several seeds each, and call a tie what the seeds cannot tell apart.

    accuracy   A  o-o-o        A and B differ by more than chance would move their means: two ranks
               B     o--o-o    B and C do not: a tie
               C   o---o--o

Price: every way is trained once for each seed.
Source: https://arxiv.org/abs/2103.03098 (Bouthillier et al. 2021, on variance in benchmarks).
"""

from collections.abc import Mapping, Sequence
from statistics import fmean, variance


def is_tie(some: Sequence[float], others: Sequence[float]) -> bool:
    """Is the difference of two means at most twice its standard error?

    The squared standard error of a mean is the variance of the values (which divides by one less
    than their number), divided by their number. That of a difference is the sum of both.

    Args:
        some, others: a value for each seed; at least two each, not always equally many.
    """
    error = (variance(some) / len(some) + variance(others) / len(others)) ** 0.5
    return abs(fmean(some) - fmean(others)) <= 2 * error


def ranked(values: Mapping[str, Sequence[float]], best: str = "highest") -> list[list[str]]:
    """Names in classes, the best class first; inside a class all tie with its first.

    Args:
        values: for each name a value of each seed.
        best: "highest" or "lowest" mean comes first.
    """
    sign = -1 if best == "highest" else 1
    order = sorted(values, key=lambda name: sign * fmean(values[name]))
    classes: list[list[str]] = []
    for name in order:
        if classes and is_tie(values[classes[-1][0]], values[name]):
            classes[-1].append(name)
        else:
            classes.append([name])
    return classes
