"""Name the mistake behind a wrong answer: one that shows on every rank in every step what it shows.

the exercise's own mistakes, then slips of any function, then two of them at once:
    alike at the first difference --> alike in all steps --> named
"""

import itertools
import time
from collections.abc import Sequence

from manyhands.checks.engine.attempt import Trial, judged
from manyhands.checks.engine.mistakes import Mistake, instead
from manyhands.checks.engine.trial import Outcome, StepOutcomes
from manyhands.checks.engine.values import same

SURE_S = 1.0  # more, for one that shows the same at the first difference, to be tried in all steps
CONSTANT = Mistake(
    instead(lambda *args, **named: None),
    "The result is the same in every case, although what is given differs.",
    "Compute the result from the arguments.",
)
FEW = 3  # with fewer cases one result may be the same by chance


def name(trial: Trial, index: int) -> Mistake | None:
    """The mistake that shows what the answer shows, everywhere; else two at once that do.

    Slips are tried only where no mistake of the exercise's own fits, and pairs after them. On an
    answer that gives one value always they say nothing: half of 1, rounded down, is 0 as well.
    """
    candidates = trial.candidates
    candidates.begin()
    is_constant = _is_constant(trial)
    seen: list[bool | None] = []
    for tried in candidates.rounds(trial.slips and not is_constant):
        heads = candidates.outcomes(tried, [index])
        if named := best(trial, _near(trial, tried, heads, index)):
            return named
        seen += [_is_seen(trial, outcomes, index) for outcomes in heads]
    if is_constant:
        return CONSTANT
    is_value = all(outcome.kind == "value" for outcome in trial.found[index])
    if not is_value or trial.spec.layouts or not trial.slips:
        return None
    pairs = candidates.pairs(index, seen)
    near = _near(trial, pairs, candidates.outcomes(pairs, [index]), index)
    return best(trial, near, by_part=False)


def _is_constant(trial: Trial) -> bool:
    """Is the answer's value the same in many cases in which the right ones differ?"""
    rows = zip(itertools.chain(*trial.found), itertools.chain(*trial.wanted), strict=False)
    values = [(one, right) for one, right in rows if right.kind == "value"]
    if len(values) < FEW or any(one.kind != "value" for one, _ in values):
        return False
    (first, right), *others = values
    return all(same(one.data, first.data) for one, _ in others) and not all(
        same(other.data, right.data) for _, other in others
    )


def _near(trial: Trial, tried: list[Mistake], heads: list, index: int) -> list[Mistake]:
    """Those of the mistakes that show in this step what the answer shows."""
    return [
        m for m, outcomes in zip(tried, heads, strict=True) if matches(trial, m, outcomes, [index])
    ]


def best(trial: Trial, near: list[Mistake], by_part: bool = True) -> Mistake | None:
    """The first that shows the same in all steps; or, where parts are independent, in one part.

    Args:
        by_part: two mistakes at once explain all that is seen, or they are a guess.
    """
    indexes = range(len(trial.found))
    if near:
        trial.candidates.until_s = max(trial.candidates.until_s, time.monotonic() + SURE_S)
    full = trial.candidates.outcomes(near[:20], indexes)
    parts = [None]
    if trial.spec.independent and by_part:
        parts.append(wrong_part(trial))
    for part in parts:
        for mistake, outcomes in zip(near, full, strict=False):
            if matches(trial, mistake, outcomes, indexes, part):
                return mistake
    return None


def matches(
    trial: Trial,
    mistake: Mistake,
    outcomes: list[StepOutcomes],
    indexes: Sequence[int],
    part: str | None = None,
) -> bool:
    """Does the mistake show what the answer shows in these steps, and not what is right?

    Args:
        part: of a dict; None compares the whole, and with independent parts in a single step it is
            enough that the first wrong part is the same.
    """
    if len(outcomes) < len(indexes):
        return False
    pairs = list(zip(indexes, outcomes, strict=False))
    if mistake.fits:
        return all(_fits(trial, mistake, index) for index in indexes)
    if all(_is_right_row(trial, row, index) for index, row in pairs):
        return False
    if part is None and len(indexes) == 1 and trial.spec.independent:
        first = wrong_part(trial)
        if any(_alike_row(trial, i, row, None) for i, row in pairs):
            return True
        part = first
    if part is not None and not all(_adds_no_fault(trial, i, row) for i, row in pairs):
        return False
    return all(_alike_row(trial, index, row, part) for index, row in pairs)


def _adds_no_fault(trial: Trial, index: int, shown: StepOutcomes) -> bool:
    """Is every part that is wrong by a mistake wrong in the answer, too?"""
    rows = zip(trial.found[index], shown, trial.wanted[index], strict=True)
    for found, other, wanted in rows:
        if not found.kind == other.kind == wanted.kind == "value":
            if not alike(found, other, wanted):
                return False
            continue
        for part, value in judged(wanted.data).items():
            by_mistake = not same(_at(other, part), value)
            if by_mistake and same(_at(found, part), value):
                return False
    return True


def _fits(trial: Trial, mistake: Mistake, index: int) -> bool:
    for rank, outcome in enumerate(trial.found[index]):
        is_of_this_way = outcome.kind == "value" and mistake.fits(
            outcome.data, trial.case(index, rank)
        )
        if not is_of_this_way and not trial.is_right(outcome, index, rank):
            return False
    return True


def _is_right_row(trial: Trial, row: StepOutcomes, index: int) -> bool:
    return all(trial.is_right(outcome, index, rank) for rank, outcome in enumerate(row))


def _is_seen(trial: Trial, outcomes: list[StepOutcomes], index: int) -> bool | None:
    return not _is_right_row(trial, outcomes[0], index) if outcomes else None


def _alike_row(trial: Trial, index: int, shown: StepOutcomes, part: str | None) -> bool:
    rows = zip(trial.found[index], shown, trial.wanted[index], strict=True)
    return all(alike(found, other, wanted, part) for found, other, wanted in rows)


def alike(one: Outcome, other: Outcome, wanted: Outcome, part: str | None = None) -> bool:
    """Do two outcomes show the same? Of an error that is asked for the message does not count."""
    if one.kind != other.kind:
        return False
    if one.kind == "raised":
        names, message = one.data
        other_names, other_message = other.data
        return names[0] == other_names[0] and (wanted.kind == "raised" or message == other_message)
    if part is not None:
        if one.kind == "value" and part not in one.data and part not in other.data:
            return True  # this step does not show that part
        if one.kind != "value" or part not in one.data or part not in other.data:
            return False
        return same(one.data[part], other.data[part])
    return same(one.data, other.data)


def wrong_part(trial: Trial) -> str | None:
    """The first part that is wrong, where values are dicts."""
    first = trial.first_wrong(trial.found)
    if first is None:
        return None
    index, rank = first
    found = trial.found[index][rank]
    wanted = trial.wanted[index][rank]
    if found.kind != "value" or wanted.kind != "value" or not isinstance(wanted.data, dict):
        return None
    for part, value in judged(wanted.data).items():
        if not same(_at(found, part), value):
            return part
    return None


def _at(outcome: Outcome, part: str) -> object:
    """A part of a value; None where the value is no dict, but a word for it."""
    return outcome.data.get(part) if isinstance(outcome.data, dict) else None
