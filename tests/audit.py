"""The test of an exercise: its mistakes are named, right answers accepted, wrong ones told.

The mistakes that a check knows are at the same time its wrong answers, so they stand nowhere else.
The cases are drawn once for an exercise, and what the truth and the mistakes show in them is shared
by all answers. These are tried in one set of ranks, and so are the mistakes; only what hangs or
ends the ranks is tried by itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import repeat

from manyhands.checks.engine import naming, trial, verdict
from manyhands.checks.engine.answer import Pair, parts_of
from manyhands.checks.engine.attempt import Candidates, Trial, is_a_fault
from manyhands.checks.engine.card import Verdict, Wrong
from manyhands.checks.engine.exercise import Exercise, judge
from manyhands.checks.engine.mistakes import TOGETHER, Mistake
from manyhands.checks.engine.spec import Spec
from manyhands.checks.engine.words import NO_CAUSE
from manyhands.ranks.failures import RankFailed, RanksHung

LIMIT_S = 180  # for naming; far more than in a verdict: a busy machine tries every mistake
HANG_S = 2.0  # after which a mistake that ends the ranks is said to hang
MISTAKE_S = 30.0  # for one call of a listed mistake: a busy machine makes none hang
SLIP_S = 4.0  # for one of a slip, of which some do hang


# What an answer shows, and the failure that it ended in.
Shown = tuple[list[trial.StepOutcomes], RankFailed | None]


def untouched(*args: object, **named: object) -> None:
    """An answer that says when it is called."""
    raise AssertionError("the answer was called")


class Audit:
    """An exercise and answers to it, tried on one draw of its cases."""

    def __init__(self, exercise: Exercise, answers: Sequence[object] = ()) -> None:
        self.exercise = exercise
        self.spec = exercise.spec
        self.answers = answers
        self.cases = self.spec.draw()
        self.steps = self.spec.steps(self.cases)
        self.candidates = Candidates(self._patient(SLIP_S), self.cases, LIMIT_S)
        runnable = [one for one in answers if all(map(callable, parts_of(one)))]
        (self.wanted, _), *shown = self._all_shown([self.spec.truth, *runnable])
        self.shown = dict(zip(map(id, runnable), shown, strict=True))

    def of_mistakes(self) -> list[str]:
        """What is wrong with the exercise's own list of mistakes."""
        complaints = [words for m in self.spec.mistakes if (words := unwritable(self.spec, m))]
        if complaints:
            return complaints
        if len(self.wanted) < len(self.steps):
            return ["the truth does not end"]
        if all(outcome.kind == "raised" for row in self.wanted for outcome in row):
            return [f"the truth raises in every case: {self.wanted[0][0].data}"]
        if words := self._too_early():
            return [words]
        self.candidates.begin()
        self.candidates.spec = self._patient(MISTAKE_S)
        listed = self.candidates.listed
        every = self.candidates.outcomes(listed, range(len(self.steps)))
        self.candidates.spec = self._patient(SLIP_S)
        for mistake, outcomes in zip(listed, every, strict=True):
            tried = self._trial(None, (outcomes, None), slips=False)
            if words := _complaint(tried, mistake, listed, every):
                complaints.append(f"{mistake.why!r} {words}")
        ending = [mistake for mistake in self.spec.mistakes if mistake.ends]
        return complaints + [words for mistake in ending if (words := self._unseen(mistake))]

    def _too_early(self) -> str:
        """An error that cases or observe raise before they have called the answer, or "".

        Every answer shows it, so all would be as good as the truth.
        """
        if all(outcome.kind != "raised" for row in self.wanted for outcome in row):
            return ""
        parts = [untouched for _ in parts_of(self.spec.truth)]
        rows, _ = self._look([Pair(*parts) if len(parts) > 1 else untouched], LIMIT_S)
        for wanted, found in zip(self.wanted, rows, strict=False):
            for right, other in zip(wanted, found, strict=True):
                if right.kind == other.kind == "raised" and right.data == other.data:
                    names, message = right.data
                    return f"observe raises {names[0]} before it calls the answer: {message}"
        return ""

    def verdicts(self, slips: Sequence[bool] | None = None) -> Iterator[Verdict]:
        """The verdicts on all answers, as a learner gets them.

        Args:
            slips: of each answer, whether slips are tried on it as well; by default on all.
        """
        for answer, with_slips in zip(self.answers, slips or repeat(True), strict=False):
            shown = self.shown.get(id(answer))
            if shown is None or len(self.wanted) < len(self.steps) or is_a_fault(shown[1]):
                yield judge(self.exercise, answer)
                continue
            tried = self._trial(answer, shown, with_slips)
            yield judge(replace(self.exercise, check=lambda _, t=tried: verdict.tell(t)), answer)

    def is_of_slips(self, words: str) -> bool:
        """Can a verdict hold these words only after slips have been tried?"""
        said = [NO_CAUSE, TOGETHER]
        said += [text for slip in self.candidates.slips for text in (slip.why, slip.hint)]
        return bool(words) and any(words in text for text in said)

    def _patient(self, mistake_s: float) -> Spec:
        """The exercise, where a mistake has more time than in a verdict."""
        return replace(self.spec, mistake_s=max(mistake_s, self.spec.mistake_s))

    def _trial(self, answer: object, shown: Shown, slips: bool) -> Trial:
        return Trial(self.spec, answer, self.candidates, self.wanted, *shown, slips=slips)

    def _all_shown(self, answers: list) -> list[Shown]:
        """What each answer shows; one that hangs or ends the ranks leaves the others their turn."""
        n = len(self.steps)
        found: list[Shown] = []
        again = False  # is the next one tried again, and now has the whole limit?
        while len(found) < len(answers):
            limit_s = self.spec.limit_s / (1 if again else 2)
            if again and not found:
                limit_s = LIMIT_S  # the truth ends at last
            rows, failed = self._look(answers[len(found) :], limit_s)
            whole = [(rows[at : at + n], None) for at in range(0, len(rows) - n + 1, n)]
            found += whole
            if len(found) == len(answers):
                break
            own = rows[n * len(whole) :]
            # Those before had a part of the limit, or the last of them may have ended the ranks.
            is_open = isinstance(failed, RanksHung) or is_a_fault(failed)
            again = (is_open or not (own or failed)) and not (again and not whole)
            if not again:
                found.append((own, failed))
        return found

    def _look(self, answers: list, limit_s: float) -> Shown:
        return trial.try_answers(self.spec, answers, self.steps, self.cases, limit_s)

    def _unseen(self, mistake: Mistake) -> str:
        """What is wrong with a mistake that ends the ranks, or ""."""
        answer = mistake.change.make(self.spec.truth)
        for _ in range(2):  # once more where the machine was at fault
            shown = self._look([answer], min(HANG_S, self.spec.limit_s))
            if not is_a_fault(shown[1]):
                break
        else:
            return f"{mistake.why!r} is not judged: {shown[1]}"
        try:
            verdict.tell(self._trial(answer, shown, slips=False))
        except Wrong:
            return ""
        return f"{mistake.why!r} is not seen"


def unwritable(spec: Spec, mistake: Mistake) -> str:
    """Why the change of a mistake cannot be made, or ""."""
    try:
        mistake.change.make(spec.truth)
    except (LookupError, SyntaxError) as error:
        return f"{mistake.why!r} cannot be made: {error}"
    return ""


def _complaint(tried: Trial, mistake: Mistake, listed: list[Mistake], shown: list) -> str:
    if len(tried.found) < len(tried.steps) and tried.first_wrong(tried.found) is None:
        return "ends or hangs the ranks: mark it with !"
    first = tried.first_wrong(tried.found)
    if first is None:
        return "is not told from the truth"
    index, rank = first
    if tried.found[index][rank].kind == "explained" or tried.found[index][rank].changed:
        return ""  # that is told by itself, whatever it comes from
    indexes = range(len(tried.found))
    named = [
        other.why
        for other, outcomes in zip(listed, shown, strict=True)
        if naming.matches(tried, other, outcomes, indexes)
    ]
    return "" if named[:1] == [mistake.why] else f"is named {named[:1]}"
