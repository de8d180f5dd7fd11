"""The exercises of a lesson: their checks in a notebook, their hints, and what is done.

Not started is an amber card and the notebook runs on; wrong is a red card and a one-line error, so
that "Run all", nbval and nbgrader stop at the mistake; what the machine did not let finish is grey.
"""

import inspect
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from manyhands.checks.engine import progress
from manyhands.checks.engine import verdict as verdicts
from manyhands.checks.engine.answer import Pair, parts_of
from manyhands.checks.engine.card import NotYet, SideBySide, Verdict
from manyhands.checks.engine.exercise import (
    Exercise,
    changed,
    judge,
    named_parts,
    put_in_notebook,
    show,
)
from manyhands.checks.engine.spec import Spec
from manyhands.jobs import mine, written
from manyhands.training import places

TRIES_BEFORE_GIVEN = 2


@dataclass
class Lesson:
    """The exercises of one lesson, in order. `module` holds the course's own answers."""

    module: str
    exercises: dict[str, Exercise] = field(default_factory=dict)
    said: set[str] = field(default_factory=set)

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
            state, why = exercise.verdict.state, exercise.verdict.why or exercise.verdict.seen
            self.say_once(progress.note(self.module, exercise.name, state, why))
            is_marked = "NBGRADER_EXECUTION" in os.environ
            stops = state == "not yet" and not self.standing(exercise).is_given
            if stops or (is_marked and not self.done(exercise.todo)):
                short = f"TODO {exercise.todo} {state}: the card above says why"
                raise NotYet(repr(exercise.verdict), short)

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
        waits = [todo for todo in wanted if not (self.done(todo) or self.given(todo))]
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
        exercise = self._exercise(todo)
        if exercise is None:
            return
        todo = exercise.todo
        exercise.hints_shown = min(exercise.hints_shown + 1, len(exercise.hints))
        for number, text in enumerate(exercise.hints[: exercise.hints_shown], 1):
            print(f"Hint {number} of {len(exercise.hints)} for TODO {todo}: {text}")
        if exercise.hints_shown == len(exercise.hints):
            print(f"That was the last hint. {self.next_help(exercise)}")

    def next_help(self, exercise: Exercise) -> str:
        """What is left to somebody who has read all hints."""
        tries = self.standing(exercise).tries
        if tries < TRIES_BEFORE_GIVEN:
            return (
                f"After {TRIES_BEFORE_GIVEN} tries check.give({exercise.todo!r}) shows an answer."
            )
        return f"check.give({exercise.todo!r}) shows the course's answer and goes on with it."

    def give(self, todo: str) -> None:
        """Show the course's answer and go on with it; after two tries."""
        exercise = self._exercise(todo)
        if exercise is None:
            return
        if self.done(exercise.todo):
            print(f"TODO {todo} is done: check.compare({exercise.todo!r}) shows both answers.")
            return
        standing = self.standing(exercise)
        may_see = standing.is_given or standing.is_done  # done before, in another kernel
        if standing.tries < TRIES_BEFORE_GIVEN and not may_see:
            print(
                f"Tries of TODO {todo} so far: {standing.tries}; give it {TRIES_BEFORE_GIVEN} "
                f"tries. check.hint({exercise.todo!r}) helps with them."
            )
            return
        exercise.answer = exercise.spec.truth
        exercise.verdict = Verdict(exercise.todo, exercise.name, "given")
        for name, part in named_parts(exercise).items():
            put_in_notebook(name, part)
        self.say_once(progress.note(self.module, exercise.name, "given"))
        show(exercise.verdict)
        print("\n\n".join(inspect.getsource(part) for part in parts_of(exercise.answer)))

    def compare(self, todo: str) -> None:
        """Show the learner's answer beside the course's, once it is done."""
        exercise = self._exercise(todo)
        if exercise is None:
            return
        if not self.done(exercise.todo):
            print(f"TODO {todo} is not done here: check.compare shows the answers after that.")
            return
        theirs = [inspect.getsource(part) for part in parts_of(exercise.spec.truth)]
        try:
            yours = [written.source_of(*pair) for pair in named_parts(exercise).items()]
        except ValueError as error:
            print(error)
            return
        show(SideBySide("\n\n".join(yours), "\n\n".join(theirs)))

    def given(self, todo: str) -> bool:
        """Does the notebook go on with the course's answer?"""
        exercise = self.exercises.get(todo)
        return exercise is not None and exercise.verdict.state == "given" and not changed(exercise)

    def standing(self, exercise: Exercise) -> progress.Standing:
        """What this person's file says of an exercise; nothing where it cannot be read."""
        try:
            return progress.standings(self.module).get(exercise.name, progress.Standing())
        except (OSError, places.NoPlace):
            return progress.Standing()

    def say_once(self, words: str) -> None:
        """Print a line, the first time only."""
        if words and words not in self.said:
            self.said.add(words)
            print(words)

    def _exercise(self, todo: str) -> Exercise | None:
        exercise = self.exercises.get(str(todo))
        if exercise is None:
            print(f"There is no TODO {todo} here; there are {', '.join(self.exercises)}.")
        return exercise

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
        print(f"wrote {path}: {', '.join(passed)}")

    def summary(self) -> None:
        """Print what is done, one line."""
        self.tell_changed(self.exercises)
        marks = {"done": "[x]", "not started": "[ ]", "not yet": "[!]", "not judged": "[?]"}
        marks["given"] = "[given]"
        states = [exercise.verdict.state for exercise in self.exercises.values()]
        line = " ".join(
            f"{marks[e.verdict.state]} {todo} {e.name}" for todo, e in self.exercises.items()
        )
        print(f"{states.count('done')} of {len(states)} done: {line}")
