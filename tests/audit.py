"""The test of an exercise's own lists: each mistake differs from the truth, and is named.

The mistakes that a check knows are at the same time its wrong answers, so they stand nowhere else.
Everything that does not end the ranks is tried in one set of ranks.
"""

from dataclasses import replace

from manyhands.checks.engine import trial, verdict
from manyhands.checks.engine.card import NotJudged, Wrong
from manyhands.checks.engine.mistakes import Change, Mistake
from manyhands.checks.engine.spec import Spec
from manyhands.checks.engine.verdict import Trial

LIMIT_S = 180
MISTAKE_S = 4.0  # longer than in a verdict: a busy machine makes no mistake hang


def audit(spec: Spec) -> list[str]:
    """What is wrong with an exercise's own list of mistakes."""
    complaints = [words for mistake in spec.mistakes if (words := unwritable(spec, mistake))]
    if complaints:
        return complaints
    spec = replace(spec, mistake_s=max(MISTAKE_S, spec.mistake_s))
    cases = spec.draw()
    steps = spec.steps(cases)
    listed = [mistake for mistake in spec.mistakes if not mistake.ends]
    changes = [Change(), *(mistake.change for mistake in listed)]
    wanted, *shown = trial.faces(spec, changes, steps, cases, LIMIT_S)
    if len(wanted) < len(steps):
        return ["the truth does not end"]
    if all(sight.kind == "raised" for row in wanted for sight in row):
        return [f"the truth raises in every case: {wanted[0][0].data}"]
    for mistake, face in zip(listed, shown, strict=True):
        tried = Trial(spec, None, cases, steps, wanted, face, None)
        if words := _complaint(tried, mistake, listed, shown):
            complaints.append(f"{mistake.why!r} {words}")
    return complaints + [words for m in spec.mistakes if m.ends and (words := _unseen(spec, m))]


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


def refused(spec: Spec, answers: list) -> list[str]:
    """Those of these right answers that the check does not accept, with what it says."""
    cases = spec.draw()
    steps = spec.steps(cases)
    rows, failed = trial.look(spec, [spec.truth, *answers], steps, cases, LIMIT_S)
    n = len(steps)
    complaints = []
    for number, answer in enumerate(answers, 1):
        found = rows[number * n : (number + 1) * n]
        tried = Trial(spec, answer, cases, steps, rows[:n], found, failed)
        if len(found) < n or tried.first_wrong(found) is not None:
            try:
                verdict.check(spec, answer)
            except (Wrong, NotJudged) as error:
                name = getattr(answer, "__name__", answer)
                complaints.append(f"{name} is refused: {error}")
    return complaints


def unseen(spec: Spec, answers: list) -> list:
    """Those of these wrong answers that do not differ from the truth when all are tried at once.

    An answer behind one that ends the ranks is among them: it has to be tried by itself.
    """
    cases = spec.draw()
    steps = spec.steps(cases)
    rows, failed = trial.look(spec, [spec.truth, *answers], steps, cases, LIMIT_S)
    n = len(steps)
    left = []
    for number, answer in enumerate(answers, 1):
        tried = Trial(spec, answer, cases, steps, rows[:n], rows[number * n :][:n], failed)
        if tried.first_wrong(tried.found) is None:
            left.append(answer)
    return left
