"""7.8: which differences are more than chance, and classes of names that tie."""

import random
from typing import NamedTuple

from manyhands.checks.engine.answer import Pair
from manyhands.checks.engine.spec import Spec
from manyhands.checks.engine.values import boolean, listing, show, text
from manyhands.large_batch import ties


class Two(NamedTuple):
    """The arguments of one call of `is_tie`."""

    some: list[float]
    others: tuple[float, ...]


class Many(NamedTuple):
    """The arguments of one call of `ranked`."""

    values: dict[str, list[float]]
    best: str = "highest"


FEW = [-0.5, 0.5]
MANY = [-1.4, -1.0, -0.6, -0.2, 0.2, 0.6, 1.0, 1.4]
THREE = [-1.0, 0.0, 1.0]  # two of them tie if their means are at most 2.27 apart
CHAIN = {"ghost norm": 0.0, "root rule": -1.7, "warm-up": -3.4, "noise": -4.2, "linear rule": -7.0}
LUCKY = {"steady": [0.0, 0.1, 0.2], "lucky": [-6.0, 0.4, 0.5]}  # its median is lucky, too
UNLUCKY = {"unlucky": [6.0, 3.0, -0.5], "steady": [0.2, 0.0, 0.1]}


def seeds() -> list[Two | Many]:
    """Differences of two means from none to large; then one name, chains of ties, and no name.

    The limits of the mistakes lie between these differences: for FEW and MANY that is 1.40 for
    2.306 standard errors, 1.22 for two, 0.61 for one, 1.11 with variances that divide by the
    number, 0.88 for a common number, 1.95 for the sum of two standard errors, 2.79 for the
    standard deviation; for FEW twice 3.04, and 2.25 or 8.98 with one degree more or less. The last
    pair has no spread and no difference, which is a tie.
    """
    chain = {name: [mean + one for one in THREE] for name, mean in CHAIN.items()}
    pairs = [
        (FEW, MANY, 0.1),
        (FEW, MANY, 2.3),
        (MANY, FEW, 0.76),
        (FEW, MANY, -0.99),
        (FEW, MANY, 1.16),
        (MANY, FEW, -1.31),
        (MANY, FEW, -1.7),
        (FEW, MANY, 1.7),
        (FEW, FEW, -2.6),
        (FEW, FEW, 4.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
    ]
    return [
        *(_moved(*pair) for pair in pairs),
        Many(_drawn({"steady": THREE})),
        Many(_drawn(LUCKY)),
        Many(_drawn(UNLUCKY), "lowest"),
        Many(_drawn(chain)),
        Many(_drawn(chain), "lowest"),
        Many({}),
    ]


def _drawn(named: dict[str, list[float]]) -> dict[str, list[float]]:
    """The same seen from afar: in another order, stretched and moved."""
    stretch, shift = random.uniform(0.002, 0.01), random.uniform(0.6, 0.9)
    names = random.sample(list(named), len(named))
    moved = {name: [round(shift + stretch * one, 6) for one in named[name]] for name in names}
    return {name: random.sample(values, len(values)) for name, values in moved.items()}


def _moved(some: list[float], others: list[float], by: float) -> Two:
    found = _drawn({"some": [one + by for one in some], "others": others})
    return Two(found["some"], tuple(found["others"]))


def as_classes(value: object) -> list[list[str]]:
    """The classes; behind its first name, the order in a class is free."""
    names = listing(text, "a list of names for each class")
    classes = listing(names, "a list of classes")(value)
    return [[*one[:1], *sorted(one[1:])] for one in classes]


def one_of(answer: Pair, case: Two | Many) -> bool | list:
    """Is it a tie, or the classes."""
    is_tie, ranked = answer.parts
    if isinstance(case, Two):
        return boolean(is_tie(case.some, case.others))
    best = {} if case.best == "highest" else {"best": case.best}
    return as_classes(ranked(case.values, **best))


def tell_one(case: Two | Many) -> str:
    """The call."""
    if isinstance(case, Two):
        return f"is_tie({show(case.some, 4)}, {show(case.others, 4)})"
    best = "" if case.best == "highest" else f", best={case.best!r}"
    values = ", ".join(f"{name!r}: {show(one, 4)}" for name, one in case.values.items())
    return f"ranked({{{values}}}{best})"


ERROR = "variance(some) / len(some) + variance(others) / len(others)"
SIGN = '-1 if best == "highest" else 1'
FIRST = "is_tie(values[classes[-1][0]], values[name])"
LIMIT = "student(len(some) + len(others) - 2)"
STANDARD = (
    "Add variance / number of both lists, take the root, and multiply it by student(degrees)."
)
DEGREES = "There are len(some) + len(others) - 2 degrees of freedom."
IN_ORDER = "Go through the names in the order of their means, the best one first."
CLASSES = "A name joins the last class if it ties with that class's first name."
ranked = Spec(
    todo="7.8",
    truth=Pair(ties.is_tie, ties.ranked),
    cases=seeds,
    observe=one_of,
    tell=tell_one,
    say=lambda found, wanted: f"gives {found}, not {wanted}",
    advice={"": f"For is_tie: {STANDARD} {DEGREES} For ranked: {IN_ORDER} {CLASSES}"},
    reasons="""
        list index out of range :: At the first name there is no class yet. | Ask `if classes and
            is_tie(...)`, or begin with a class of the first name.
        requires at least one data point :: There may be no names at all, and then there are no
            classes. | Return an empty list for an empty mapping.
        unsupported operand type(s) for -: 'list' ::
            Lists cannot be subtracted, but their means can. | Use fmean(some) - fmean(others).
    """,
    hints=(
        "is_tie: statistics.variance divides by one less than the number of values. Divide it by "
        "that number once more, and you have the squared standard error of the mean.",
        "is_tie: the squared standard error of the difference is the sum of both. Compare the "
        f"absolute difference of the means with its root times student(degrees). {DEGREES}",
        f"ranked: sort the names by their means. {CLASSES} Otherwise it begins a class of its own.",
    ),
    mistakes="""
        {ERROR} => variance(some) + variance(others) :: is_tie: this is the standard deviation of
            single values, but means vary less. | {STANDARD}
        {ERROR} => variance(some) * (1 - 1 / len(some)) / len(some) + variance(others) * (1 - 1 /
            len(others)) / len(others) :: is_tie: the variance divides by the number of values, and
            not by one less. | Use statistics.variance, or correction=1.
        ({ERROR}) ** 0.5 => (variance(some) / len(some)) ** 0.5 + (variance(others) / len(others))
            ** 0.5 :: is_tie: the two standard errors are added, but only their squares add up. |
            Add the squared errors, and take the root of the sum.
        {LIMIT} => 2 :: is_tie: the difference is compared with two standard errors, however few
            values there are. | {STANDARD} {DEGREES}
        {LIMIT} => student(len(some) - 1) ::
            is_tie: the degrees of freedom are those of the first list alone. | {DEGREES}
        return abs(fmean(some) - fmean(others)) <= limit * error => return min(some) <= max(others)
            and min(others) <= max(some) :: is_tie: the ranges of the values are compared, which
            depend on the luckiest seeds. | {STANDARD}
        abs(fmean(some) - fmean(others)) => fmean(some) - fmean(others) :: is_tie: without abs(), a
            large negative difference counts as a tie. | Take the absolute value of the difference.
        <= limit * error => < limit * error ::
            is_tie: a difference of exactly the limit is refused, so equal means without any spread
            do not tie. | Write <=, because the difference may be at most the limit.
        {SIGN} => 1 if best == "highest" else -1 ::
            ranked: the worst class comes first. | {IN_ORDER}
        {SIGN} => -1 :: ranked: the highest mean comes first, whatever `best` says. | With
            best="lowest" sort the other way round.
        sorted(values, key=lambda name: sign * fmean(values[name])) => list(values) ::
            ranked: the names are taken in the order in which they are given. | {IN_ORDER}
        sign * fmean(values[name]) => min(sign * one for one in values[name]) ::
            ranked: the names are sorted by their single best value, and not by their means.
        fmean(values[name]) => sorted(values[name])[len(values[name]) // 2] ::
            ranked: the names are sorted by their medians, and not by their means.
        {FIRST} => is_tie(values[classes[-1][-1]], values[name]) :: ranked: each name is compared
            with another one of its class than the first, so a chain of ties becomes a single class.
            | {CLASSES}
        {FIRST} => is_tie(values[order[0]], values[name]) ::
            ranked: each name is compared with the best of all, so later names never tie.
    """,
    module=globals(),
)
