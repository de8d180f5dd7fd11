"""The test of an exercise: its mistakes are named, right answers accepted, wrong ones told.

The mistakes that a check knows are at the same time its wrong answers, so they stand nowhere else.
All answers of an exercise are tried on the same cases in one set of ranks, and so are all mistakes;
only what ends the ranks is tried by itself.
"""

from collections.abc import Iterator
from dataclasses import replace

from manyhands.checks.engine import trial, verdict
from manyhands.checks.engine.answer import parts_of
from manyhands.checks.engine.card import NotJudged, Verdict, Wrong
from manyhands.checks.engine.lesson import Exercise, judge
from manyhands.checks.engine.mistakes import Mistake
from manyhands.checks.engine.spec import Spec
from manyhands.checks.engine.verdict import Faces, Trial

LIMIT_S = 180
NAMING_S = 30  # more than in a verdict: a busy machine finds every mistake
HANG_S = 2.0  # after which a mistake that ends the ranks is said to hang
MISTAKE_S = 4.0  # longer than in a verdict: a busy machine makes no mistake hang


class Audit:
    """An exercise, tried on one draw of its cases."""

    def __init__(self, exercise: Exercise) -> None:
        self.exercise = exercise
        self.spec = exercise.spec
        self.cases = self.spec.draw()
        self.steps = self.spec.steps(self.cases)

    def of_mistakes(self) -> list[str]:
        """What is wrong with the exercise's own list of mistakes."""
        patient = replace(self.spec, mistake_s=max(MISTAKE_S, self.spec.mistake_s))
        complaints = [words for m in self.spec.mistakes if (words := unwritable(self.spec, m))]
        if complaints:
            return complaints
        faces = Faces(patient, self.cases, LIMIT_S)
        rows, _ = trial.look(self.spec, [self.spec.truth], self.steps, self.cases, LIMIT_S)
        if len(rows) < len(self.steps):
            return ["the truth does not end"]
        if all(sight.kind == "raised" for row in rows for sight in row):
            return [f"the truth raises in every case: {rows[0][0].data}"]
        listed = faces.listed
        shown = faces.of(listed, range(len(self.steps)))
        for mistake, face in zip(listed, shown, strict=True):
            tried = Trial(self.spec, None, faces, rows, face, None)
            if words := _complaint(tried, mistake, listed, shown):
                complaints.append(f"{mistake.why!r} {words}")
        ending = [mistake for mistake in self.spec.mistakes if mistake.ends]
        quick = replace(self.spec, limit_s=min(HANG_S, self.spec.limit_s))
        return complaints + [words for m in ending if (words := _unseen(quick, m))]

    def verdicts(self, answers: list) -> Iterator[Verdict]:
        """The verdicts on all these answers, as a learner gets them."""
        faces = Faces(self.spec, self.cases, NAMING_S)
        runnable = [one for one in answers if all(map(callable, parts_of(one)))]
        wanted, *found = self._rows([self.spec.truth, *runnable])
        rows = {id(one): face for one, face in zip(runnable, found, strict=True)}
        for answer in answers:
            if wanted and rows.get(id(answer)):
                tried = Trial(self.spec, answer, faces, wanted, rows[id(answer)], None)
                yield judge(
                    replace(self.exercise, check=lambda _, t=tried: verdict.tell(t)), answer
                )
            else:
                yield judge(self.exercise, answer)

    def _rows(self, answers: list) -> list[list[trial.Row]]:
        """What each answer shows in all steps; [] for those that end the ranks."""
        n = len(self.steps)
        limit_s = self.spec.limit_s / 2  # a hang is tried again by itself
        found: list[list[trial.Row]] = []
        while len(found) < len(answers):
            left = answers[len(found) :]
            rows, _ = trial.look(self.spec, left, self.steps, self.cases, limit_s)
            found += [rows[at : at + n] for at in range(0, len(rows) - n + 1, n)]
            found += [[]] if len(found) < len(answers) else []
        return found


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
    if tried.found[index][rank].kind == "told" or tried.found[index][rank].changed:
        return ""  # that is told by itself, whatever it comes from
    indexes = range(len(tried.found))
    named = [
        other.why
        for other, face in zip(listed, shown, strict=True)
        if verdict.matches(tried, other, face, indexes)
    ]
    return "" if named[:1] == [mistake.why] else f"is named {named[:1]}"


def _unseen(spec: Spec, mistake: Mistake) -> str:
    try:
        verdict.check(spec, mistake.change.make(spec.truth))
    except Wrong:
        return ""
    except NotJudged as fault:
        return f"{mistake.why!r} is not judged: {fault}"
    return f"{mistake.why!r} is not seen"
