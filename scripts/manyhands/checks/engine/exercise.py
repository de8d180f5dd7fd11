"""One TODO: its check, its hints, its answer, and the verdict on it."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from manyhands.checks.engine.answer import (
    Pair,
    parts_of,
    refuse_the_course_s_own,
    stub_of_another,
    unwritten,
)
from manyhands.checks.engine.card import NotJudged, Verdict, Wrong
from manyhands.checks.engine.spec import Spec
from manyhands.jobs.alike import difference
from manyhands.ranks.failures import RankFailed


@dataclass
class Exercise:
    """One TODO: its check, its hints, and how far the learner has come."""

    todo: str
    name: str
    check: Callable
    hints: tuple[str, ...]
    verdict: Verdict
    num_answers: int = 1  # or 2, which are handed over together
    answer: object = None
    hints_shown: int = 0
    spec: Spec | None = None


def named_parts(exercise: Exercise) -> dict[str, object]:
    """The answers of an exercise by their names in the notebook."""
    if not isinstance(exercise.answer, Pair):
        return {exercise.name: exercise.answer}
    return {part.__name__: part for part in exercise.answer.parts}


def changed(exercise: Exercise) -> bool:
    """Does the notebook hold another function under this name than the one that passed?"""
    ipython = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if exercise.verdict.state not in ("done", "given") or ipython is None:
        return False
    now = {name: ipython.user_ns.get(name) for name in named_parts(exercise)}
    return any(
        now[name] is not None and difference(name, now[name], part)
        for name, part in named_parts(exercise).items()
    )


def judge(exercise: Exercise, answer: object) -> Verdict:
    """Run one check and turn whatever happens into a verdict."""
    todo, name = exercise.todo, exercise.name
    try:
        for part in parts_of(answer):
            if not callable(part):
                raise Wrong(
                    f"{name} is {part!r}, not a function or class",
                    "",
                    f"run the cell that defines it, and hand over {name} itself, without brackets",
                )
            if "NBGRADER_EXECUTION" in os.environ:
                for known in {name, getattr(part, "__name__", name)}:
                    refuse_the_course_s_own(part, known)
        exercise.check(answer)
    except Wrong as wrong:
        words = [" ".join(text.split()) for text in (wrong.seen, wrong.why, wrong.hint)]
        return Verdict(todo, name, "not yet", *words)
    except NotJudged as fault:
        why = "This says nothing about your answer."
        return Verdict(todo, name, "not judged", str(fault), why, fault.remedy)
    except RankFailed as failed:
        if failed.failure.error == "NotImplementedError":
            other = stub_of_another(failed.failure, todo)
            if other and not unwritten(answer):
                return Verdict(
                    todo, name, "not yet", f"`{name}` calls {other}", "", "do that first"
                )
            return Verdict(todo, name, "not started", unwritten(answer))
        return Verdict(todo, name, "not judged", " ".join(str(failed).split()))
    except Exception as error:  # an answer of a form that the check did not think of
        seen = f"the check cannot use what {name} gives: {type(error).__name__}: {error}"
        return Verdict(
            todo, name, "not yet", " ".join(seen.split()), "", "read the docstring again"
        )
    return Verdict(todo, name, "done")


def put_in_notebook(name: str, value: object) -> None:
    """Give a name of the notebook another value."""
    ipython = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if ipython is not None:
        ipython.user_ns[name] = value


def show(verdict: object) -> None:
    """Display the card in a notebook; print the line elsewhere."""
    if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
        sys.modules["IPython"].display.display(verdict)
    else:
        print(verdict)
