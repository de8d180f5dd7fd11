"""The exercises of a lesson: their checks in a notebook, their hints, and what is done.

Not started is an amber card and the notebook runs on; wrong is a red card and a one-line error, so
that "Run all", nbval and nbgrader stop at the mistake; what the machine did not let finish is grey.
"""

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from manyhands.checks.engine import verdict as verdicts
from manyhands.checks.engine.answer import (
    Pair,
    as_written,
    parts_of,
    refuse_the_course_s_own,
    stub_of_another,
    unwritten,
)
from manyhands.checks.engine.card import NotJudged, NotYet, Verdict, Wrong
from manyhands.checks.engine.spec import Spec
from manyhands.jobs import mine
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


@dataclass
class Lesson:
    """The exercises of one lesson, in order. `module` holds the course's own answers."""

    module: str
    exercises: dict[str, Exercise] = field(default_factory=dict)

    def add(self, spec: Spec, name: str = "") -> Callable:
        """Make the check of an exercise; its name is that of the first answer, if none is given."""
        name = name or spec.names[0]
        exercise = Exercise(
            spec.todo,
            name,
            check=lambda answer: verdicts.check(spec, answer),
            hints=spec.hints,
            verdict=Verdict(spec.todo, name, "not started"),
            num_answers=len(spec.names),
            spec=spec,
        )
        return self._add(exercise)

    def _add(self, exercise: Exercise) -> Callable:
        """What a notebook calls with the learner's answer, or answers."""
        self.exercises[exercise.todo] = exercise

        def run(*answers: object) -> None:
            num_answers = exercise.num_answers
            if answers and len(answers) != num_answers:
                wanted = {1: "one answer", 2: "two answers, in the order of their cell"}
                seen = f"TODO {exercise.todo}: this check takes {wanted[num_answers]}"
                raise NotYet(f"{seen}, and was given {len(answers)}")
            answers = answers or (None,) * num_answers
            exercise.answer = answers[0] if num_answers == 1 else Pair(*answers)
            exercise.verdict = judge(exercise, exercise.answer)
            show(exercise.verdict)
            strict = "NBGRADER_EXECUTION" in os.environ
            if exercise.verdict.state == "not yet" or (strict and not self.done(exercise.todo)):
                raise NotYet(repr(exercise.verdict))

        run.__name__ = exercise.name
        run.exercise = exercise
        return run

    def done(self, todo: str) -> bool:
        """Is this one done, and still what was checked?"""
        exercise = self.exercises.get(todo)
        return exercise is not None and exercise.verdict.state == "done" and not changed(exercise)

    def ready(self, *todos: str) -> bool:
        """Are all of these done? Says in one line which ones an experiment still waits for."""
        wanted = sorted(map(str, todos), key=lambda todo: [int(n) for n in todo.split(".")])
        waits = [todo for todo in wanted if not self.done(todo)]
        if waits:
            print(f"This cell waits for TODO {', '.join(waits)}: it runs once the check is green.")
        self.tell_changed(waits)
        return not waits

    def tell_changed(self, todos: Iterable[str]) -> None:
        """Name those of the exercises that were green, and were written anew after that."""
        again = [t for t in todos if t in self.exercises and changed(self.exercises[t])]
        if again:
            have = "has" if len(again) == 1 else "have"
            print(f"TODO {', '.join(again)} {have} changed since its check: run the check again.")

    def hint(self, todo: str | None = None) -> None:
        """Print one more hint for a TODO; by default for the first that is not done."""
        if todo is None:
            todo = next((todo for todo in self.exercises if not self.done(todo)), "")
        exercise = self.exercises.get(todo := str(todo))
        if exercise is None:
            print(f"There is no TODO {todo} here; there are {', '.join(self.exercises)}.")
            return
        exercise.hints_shown = min(exercise.hints_shown + 1, len(exercise.hints))
        for number, text in enumerate(exercise.hints[: exercise.hints_shown], 1):
            print(f"Hint {number} of {len(exercise.hints)} for TODO {todo}: {text}")
        if exercise.hints_shown == len(exercise.hints):
            print("That was the last hint. The solution notebook is in the folder solutions/.")

    def keep(self, folder: Path | None = None) -> None:
        """Write the answers that passed to mine/<lesson>.py, so that a job can use them."""
        done = [exercise for todo, exercise in self.exercises.items() if self.done(todo)]
        passed = {name: part for e in done for name, part in named_parts(e).items()}
        self.tell_changed(self.exercises)
        if not passed:
            print("No check is green, so there is nothing to write.")
            return
        try:
            path = mine.write(self.module, passed, folder)
        except ValueError as error:
            raise NotYet(str(error)) from None
        print(f"wrote {path.parent.name}/{path.name} in the course's folder: {', '.join(passed)}")

    def summary(self) -> None:
        """Print what is done, one line."""
        self.tell_changed(self.exercises)
        marks = {"done": "[x]", "not started": "[ ]", "not yet": "[!]", "not judged": "[?]"}
        states = [exercise.verdict.state for exercise in self.exercises.values()]
        line = " ".join(
            f"{marks[e.verdict.state]} {todo} {e.name}" for todo, e in self.exercises.items()
        )
        print(f"{states.count('done')} of {len(states)} done: {line}")


def named_parts(exercise: Exercise) -> dict[str, object]:
    """The answers of an exercise by their names in the notebook."""
    if not isinstance(exercise.answer, Pair):
        return {exercise.name: exercise.answer}
    return {part.__name__: part for part in exercise.answer.parts}


def changed(exercise: Exercise) -> bool:
    """Does the notebook hold another function under this name than the one that passed?"""
    ipython = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if exercise.verdict.state != "done" or ipython is None:
        return False
    now = {name: ipython.user_ns.get(name) for name in named_parts(exercise)}
    return any(
        now[name] is not None
        and now[name] is not part
        and as_written(now[name]) != as_written(part)
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
        return Verdict(todo, name, "not judged", str(fault), why, "Run the check again.")
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


def show(verdict: Verdict) -> None:
    """Display the card in a notebook; print the line elsewhere."""
    if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
        sys.modules["IPython"].display.display(verdict)
    else:
        print(verdict)
