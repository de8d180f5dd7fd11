"""Judge an answer by what it does, beside the course's own function and beside mistakes made in it.

    cases --> truth    --> wanted --+
          --> answer   --> found  --+--> the same: done
          --> mistakes --> shown  --+--> one shows the same as the answer: that one is named
                                         none does: the first difference is told, and no cause

attempt.py tries them, naming.py finds the mistake, and words.py says what was seen.
"""

from manyhands.checks.engine.attempt import Trial, attempt
from manyhands.checks.engine.card import Wrong
from manyhands.checks.engine.spec import Spec
from manyhands.checks.engine.words import words_of, words_of_an_end


def check(spec: Spec, answer: object) -> None:
    """Return if the answer is right.

    Raises:
        Wrong: with what was seen, the mistake that shows the same, and what to try.
        NotJudged: the machine was at fault, twice.
    """
    tell(attempt(spec, answer))


def tell(trial: Trial) -> None:
    """Return if the answer of a trial is right; raises as `check` does."""
    if trial.failed and trial.failed.failure.error == "NotImplementedError":
        raise trial.failed
    first = trial.first_wrong(trial.found)
    if first is not None:
        raise Wrong(*words_of(trial, *first))
    if trial.failed:
        raise Wrong(*words_of_an_end(trial))
    if len(trial.found) < len(trial.steps):
        said = trial.said(len(trial.found), 0)
        raise Wrong(f"{said} did not return", "A process left early, as sys.exit() makes it do.")
