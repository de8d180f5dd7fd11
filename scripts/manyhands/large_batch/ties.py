"""Rank ways to train by several seeds each, and call a tie what the seeds cannot tell apart.

    accuracy   A  o-o-o        A and B differ by more than chance would move their means: two ranks
               B     o--o-o    B and C do not: a tie
               C   o---o--o

Price: every way is trained once for each seed.
Sources: https://arxiv.org/abs/2103.03098 (Bouthillier et al. 2021, on variance in benchmarks);
https://www.itl.nist.gov/div898/handbook/eda/section3/eda3672.htm (the table of Student's t).
"""

from collections.abc import Mapping, Sequence
from statistics import fmean, variance

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def student(degrees: int) -> float:
    """How many standard errors a difference that is due to chance exceeds in 5 of 100 comparisons.

    Args:
        degrees: of freedom, at least 1: the number of all values less that of the means. Above 10,
            the limit of 10 is taken, which is a little too wide (1.96 would do for very many).
    """
    return STUDENT[min(degrees, len(STUDENT)) - 1]


def is_tie(some: Sequence[float], others: Sequence[float]) -> bool:
    """Is the difference of two means at most `student(degrees)` times its standard error?

    The squared standard error of a mean is the variance of the values (which divides by one less
    than their number), divided by their number. That of a difference is the sum of both. The
    degrees of freedom are the number of all values less 2.

    Args:
        some, others: a value for each seed; at least two each, not always equally many.
    """
    error = (variance(some) / len(some) + variance(others) / len(others)) ** 0.5
    limit = student(len(some) + len(others) - 2)
    return abs(fmean(some) - fmean(others)) <= limit * error


def ranked(values: Mapping[str, Sequence[float]], best: str = "highest") -> list[list[str]]:
    """Names in classes, the best class first; inside a class all tie with its first.

    A class is a piece of the order by means: behind the first name that does not tie, even one that
    would tie begins or joins the next class.

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
