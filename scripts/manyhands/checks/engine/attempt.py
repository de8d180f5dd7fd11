"""An answer tried beside the truth, and beside mistakes made in the truth, in the same cases.

Trial         what the answer and the truth show
Candidates    the mistakes that may be named, each tried once, however many answers there are

Faults of the machine are tried once more in new ranks; after that the answer is not judged.
"""

import functools
import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from manyhands.checks.engine.card import NotJudged
from manyhands.checks.engine.mistakes import Mistake, generic
from manyhands.checks.engine.spec import Spec, Step
from manyhands.checks.engine.trial import Outcome, StepOutcomes, try_answers, try_changes
from manyhands.ranks.failures import MachineFault, RankFailed, RanksHung

VERDICT_S = 4.0  # for a verdict, of which trying mistakes takes what is left
NAMING_S = 2.5  # at the least
MOST_PAIRS = 200  # of mistakes, that are tried together


class Candidates:
    """The mistakes that may be named, and what each shows in the same cases: it is tried once.

    Args:
        limit_s: for all mistakes that are tried for one answer.

    Attributes:
        ran_out: was there a mistake that could not be tried in that time?
    """

    def __init__(self, spec: Spec, cases: dict, limit_s: float) -> None:
        self.spec = spec
        self.cases = cases
        self.limit_s = limit_s
        self.begin()
        self.steps = spec.steps(cases)
        self._pairs: dict[int, list[Mistake]] = {}
        # Mistake -> step -> outcomes, or None where it ended before that step.
        self._known: dict[int, dict[int, StepOutcomes | None]] = {}

    def begin(self) -> None:
        """An answer's time begins here."""
        self.until_s = time.monotonic() + self.limit_s
        self.ran_out = False

    @functools.cached_property
    def listed(self) -> list[Mistake]:
        """The exercise's own mistakes that can be tried."""
        return [mistake for mistake in self.spec.mistakes if not mistake.ends]

    @functools.cached_property
    def slips(self) -> list[Mistake]:
        """Slips of any function that can be tried."""
        slips = generic(self.spec.truth, talks=bool(self.spec.layouts))
        return [mistake for mistake in slips if not mistake.ends]

    def rounds(self, slips: bool) -> Iterator[list[Mistake]]:
        """A few mistakes at a time, those of any function last, if at all, and not made before."""
        yield from self._few(self.listed)
        if slips:
            yield from self._few(self.slips)

    def _few(self, mistakes: list[Mistake]) -> Iterator[list[Mistake]]:
        for first in range(0, len(mistakes), self.spec.at_once):
            yield mistakes[first : first + self.spec.at_once]

    def pairs(self, index: int, seen: list[bool | None]) -> list[Mistake]:
        """Two mistakes at once, of which at least one is `seen` in this step by itself.

        None stands for one that hangs, which two at once would do as well.
        """
        if index not in self._pairs:
            found = self._together(seen)
            self._pairs[index] = list(itertools.islice(found, MOST_PAIRS))
        return self._pairs[index]

    def _together(self, seen: list[bool | None]) -> Iterator[Mistake]:
        singles = [*self.listed, *self.slips]
        for one, other in itertools.combinations(range(len(seen)), 2):
            if None not in (seen[one], seen[other]) and (seen[one] or seen[other]):
                with suppress(LookupError):  # both change the same text
                    both = singles[one] + singles[other]
                    both.change.sources(self.spec.truth)
                    yield both

    def outcomes(self, mistakes: list[Mistake], indexes: Iterable[int]) -> list[list[StepOutcomes]]:
        """What each mistake shows in these steps.

        Fewer where it ends or hangs the ranks, or where there was no time to try it.
        """
        indexes = tuple(indexes)
        lacking: dict[tuple[int, ...], list[Mistake]] = {}
        for mistake in mistakes:
            known = self._known.setdefault(id(mistake), {})
            lacking.setdefault(tuple(i for i in indexes if i not in known), []).append(mistake)
        for missing, new in lacking.items():
            steps = [self.steps[index] for index in missing]
            changes = [mistake.change for mistake in new] if steps else []
            left_s = max(0.0, self.until_s - time.monotonic())
            found = try_changes(self.spec, changes, steps, self.cases, left_s)
            self.ran_out |= len(found) < len(changes)
            for mistake, shown in zip(new, found, strict=False):
                rows = itertools.chain(shown, itertools.repeat(None))
                self._known[id(mistake)] |= zip(missing, rows, strict=False)
        every = [[self._known[id(mistake)].get(i) for i in indexes] for mistake in mistakes]
        return [list(itertools.takewhile(bool, shown)) for shown in every]


@dataclass
class Trial:
    """An answer tried beside the truth. `found` ends early where the ranks did.

    Args:
        slips: may slips of any function, and two mistakes at once, be named as well? A test of
            answers that are none of these saves their time.
    """

    spec: Spec
    answer: object
    candidates: Candidates
    wanted: list[StepOutcomes]
    found: list[StepOutcomes]
    failed: RankFailed | None
    slips: bool = True

    @property
    def steps(self) -> list[Step]:
        """Every case in every layout."""
        return self.candidates.steps

    def case(self, index: int, rank: int) -> object:
        """What a rank was given in a step."""
        return self.spec.case(self.candidates.cases, self.steps[index], rank)

    def said(self, index: int, rank: int) -> str:
        """The call of a rank in a step, in words."""
        return self.spec.words(self.steps[index], rank, self.case(index, rank))

    def is_right(self, found: Outcome, index: int, rank: int) -> bool:
        """Is this outcome as good as the truth's?"""
        wanted = self.wanted[index][rank]
        if found.kind != wanted.kind:
            return False
        if found.kind == "raised":
            return wanted.data[0][0] in found.data[0]
        if found.kind != "value" or not set(found.changed) <= set(wanted.changed):
            return False
        return self.spec.same(judged(found.data), judged(wanted.data), self.case(index, rank))

    def first_wrong(self, outcomes: list[StepOutcomes]) -> tuple[int, int] | None:
        """The first step and rank in which these outcomes show something else than the truth."""
        for index, row in enumerate(outcomes):
            for rank, outcome in enumerate(row):
                if not self.is_right(outcome, index, rank):
                    return index, rank
        return None


def judged(data: object) -> object:
    """Without what is seen besides: it tells mistakes apart, and right answers may differ in it."""
    if isinstance(data, dict):
        return {name: value for name, value in data.items() if name != "besides"}
    return data


def attempt(spec: Spec, answer: object) -> Trial:
    """Try an answer beside the truth; a second time where the machine was at fault."""
    begin_s = time.monotonic()
    reasons = []
    for _ in range(2):
        cases = spec.draw()
        steps = spec.steps(cases)
        rows, failed = try_answers(
            spec, [spec.truth, answer], steps, cases, spec.limit_s, quiet=False
        )
        wanted = rows[: len(steps)]
        if len(wanted) == len(steps) and not is_a_fault(failed):
            found = rows[len(steps) :]
            left_s = VERDICT_S - (time.monotonic() - begin_s)
            candidates = Candidates(spec, cases, max(NAMING_S, left_s))
            return Trial(spec, answer, candidates, wanted, found, failed)
        reasons.append(" ".join(str(failed or "the ranks ended early").split()))
    remedy = "Run the check again."
    if reasons[0] == reasons[1]:
        remedy = "It was the same at a second try: mend that first, then run the check again."
    raise NotJudged(f"the machine did not let the check finish ({reasons[1]})", remedy)


def is_a_fault(failed: RankFailed | None) -> bool:
    """Did the machine end the ranks, so that nothing is known about the answer?"""
    if isinstance(failed, RanksHung):
        return failed.starved
    return isinstance(failed, MachineFault) or "SIGKILL" in str(failed and failed.failure.message)
