"""Verdicts on a learner's function: done, not started, or not yet with the reason.

    check.place(place)  ->  run on real ranks, compare with the truth  ->  a card and one plain line

Not started is an amber card and the notebook runs on; wrong is a red card and a one-line error, so
that "Run all", nbval and nbgrader stop at the mistake. A check never hangs: the learner's code runs
in ranks with a limit, also where one rank would do.
"""

import html
import inspect
import os
import re
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from manyhands.jobs import mine
from manyhands.ranks.failures import (
    Failure,
    OneLine,
    RankFailed,
    RanksHung,
    is_echo,
    name_ranks,
    where,
)
from manyhands.ranks.lab import run_ranks

LIMIT_S = 6.0
PACKAGE = str(Path(__file__).parents[1])
COLOURS = {
    "done": "0,158,115",
    "not started": "230,159,0",
    "not yet": "213,94,0",
    "not judged": "128,128,128",
}


class Wrong(Exception):
    """What a check saw, the misconception it smells of, and a hint."""

    def __init__(self, seen: str, smell: str = "", hint: str = "") -> None:
        super().__init__(seen)
        self.seen, self.smell, self.hint = seen, smell, hint


class NotJudged(Exception):
    """The machine did not let a check finish, so nothing is known about the answer."""


class NotYet(OneLine, Exception):
    """Stops "Run all" at the mistake, with one line."""


@dataclass(frozen=True)
class Verdict:
    """The answer to a learner: a card in a browser, one plain line in a log."""

    todo: str
    name: str
    state: str  # done, not started, not yet, not judged
    seen: str = ""
    smell: str = ""
    hint: str = ""

    def __repr__(self) -> str:
        reasons = " - ".join(part for part in (self.seen, self.smell, self.hint) if part)
        return f"TODO {self.todo} {self.state}" + (f": {reasons}" if reasons else "")

    def _repr_html_(self) -> str:
        colour = COLOURS[self.state]
        parts = [f"<b>TODO {self.todo} {self.state}</b> <code>{html.escape(self.name)}</code>"]
        if self.state == "not started":
            parts.append(
                f"Write it in the cell above. Stuck? <code>check.hint('{self.todo}')</code>"
            )
        for label, text in (("Seen", self.seen), ("Why", self.smell), ("Try", self.hint)):
            if text:
                parts.append(f"<b>{label}:</b> {html.escape(text)}")
        style = f"border-left:6px solid rgb({colour});background:rgba({colour},.14)"
        return f'<div style="{style};padding:.5em .8em;margin:.3em 0">{"<br>".join(parts)}</div>'


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
    spec: object = None  # of the engine; the check itself where there is none yet


@dataclass
class Lesson:
    """The exercises of one lesson, in order. `module` holds the course's own answers."""

    module: str
    exercises: dict[str, Exercise] = field(default_factory=dict)

    def exercise(self, todo: str, *hints: str, num_answers: int = 1) -> Callable:
        """Make a check of the function below: it takes the learner's answer and raises Wrong.

        With two answers it takes a Pair.
        """

        def register(check: Callable) -> Callable:
            name = check.__name__
            verdict = Verdict(todo, name, "not started")
            return self._add(Exercise(todo, name, check, hints, verdict, num_answers))

        return register

    def add(self, spec: object, name: str = "") -> Callable:
        """Make the check of an exercise that the engine judges; `spec` is an engine's Spec.

        Its name is that of the first answer, where no other is given.
        """
        from manyhands.checks.engine import verdict

        name = name or spec.names[0]
        exercise = Exercise(
            spec.todo,
            name,
            check=lambda answer: verdict.check(spec, answer),
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

    def keep(self, folder: Path = mine.FOLDER) -> None:
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


class Pair:
    """Two functions or classes that are one exercise."""

    def __init__(self, first: object, second: object) -> None:
        self.parts = [first, second]

    def __call__(self, *args: object) -> list:
        """Return what both make of the arguments."""
        return [part(*args) for part in self.parts]


def parts_of(answer: object) -> list:
    """The answers of an exercise: two for a pair, else one."""
    return answer.parts if isinstance(answer, Pair) else [answer]


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


def as_written(value: object) -> object:
    """What two functions or classes have in common when their cell ran twice, unchanged."""
    if isinstance(value, type):
        # An autograd.Function holds a class that holds the Function again.
        names = vars(value).keys() - {"_backward_cls"}
        parts = {name: as_written(vars(value)[name]) for name in names}
        return [kind.__name__ for kind in value.__mro__], parts
    if isinstance(value, property):
        return [as_written(part) for part in (value.fget, value.fset, value.fdel)]
    value = getattr(value, "__func__", value)
    if not inspect.isfunction(value):
        return repr(value)
    decorated = [
        as_written(cell.cell_contents)
        for cell in value.__closure__ or ()
        if inspect.isfunction(cell.cell_contents) and cell.cell_contents is not value
    ]
    return value.__code__, repr((value.__defaults__, value.__kwdefaults__)), decorated


def score(
    what: str, predicted: float | None, formula: float, measured: float, unit: str = ""
) -> None:
    """Print the learner's prediction, what the formula says, and the measurement side by side."""

    def text(value: float) -> str:
        return f"{value:,.0f}" if float(value).is_integer() else f"{value:.3g}"

    try:
        yours = "no prediction" if predicted is None else f"you said {text(float(predicted))}"
    except (TypeError, ValueError):
        yours = f"you said {predicted!r}, which is no number"
    print(f"{what}: {yours}, expected {text(formula)}, measured {text(measured)} {unit}".rstrip())


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
        words = [" ".join(text.split()) for text in (wrong.seen, wrong.smell, wrong.hint)]
        return Verdict(todo, name, "not yet", *words)
    except NotJudged as fault:
        why = "This says nothing about your answer."
        return Verdict(todo, name, "not judged", str(fault), why, "Run the check again.")
    except RankFailed as failed:
        if failed.failure.error == "NotImplementedError":
            other = _stub_of_another(failed.failure, todo)
            if other and not _unwritten(answer):
                return Verdict(
                    todo, name, "not yet", f"`{name}` calls {other}", "", "do that first"
                )
            return Verdict(todo, name, "not started", _unwritten(answer))
        return Verdict(todo, name, "not yet", *told(failed, answer))
    except Exception as error:  # an answer of a form that the check did not think of
        seen = f"the check cannot use what {name} gives: {type(error).__name__}: {error}"
        return Verdict(
            todo, name, "not yet", " ".join(seen.split()), "", "read the docstring again"
        )
    return Verdict(todo, name, "done")


def _stub_of_another(failure: Failure, todo: str) -> str:
    """Words for a learner's function of an earlier TODO, if its stub ended the call."""
    other = re.fullmatch(r"TODO (\d+\.\d+)", failure.message)
    if not other or other[1] == todo or not failure.frames:
        return ""
    return f"your `{failure.frames[-1][2]}`, TODO {other[1]}, which is not written yet"


def _unwritten(answer: object) -> str:
    """What still raises NotImplementedError: methods of a class, or a function with more in it."""
    if isinstance(answer, Pair):
        left = [(getattr(part, "__name__", ""), _unwritten(part)) for part in answer.parts]
        return "; ".join(f"{name}: {words}" for name, words in left if words)
    parts = vars(answer) if isinstance(answer, type) else {}
    if inspect.isfunction(answer) and "NotImplementedError" in answer.__code__.co_names:
        code, given = answer.__code__, len(inspect.signature(answer).parameters)
        if len(code.co_names) > 1 or code.co_nlocals > given:
            return "the line `raise NotImplementedError` still stands there: delete it"
    codes = {name: getattr(_plain(part), "__code__", None) for name, part in parts.items()}
    left = [n for n, c in codes.items() if c and "NotImplementedError" in c.co_names]
    if not left:
        return ""
    return f"{', '.join(left)} {'is' if len(left) == 1 else 'are'} still to be written"


def _plain(part: object) -> object:
    """The function behind a static method; anything else as it is."""
    return getattr(part, "__func__", part)


SAME_CALLS = "look for a collective inside an `if`, or a loop, that only some ranks enter"
KNOWN_ERRORS = {  # words of an error -> what it smells of, what to try
    "incompatible function arguments": (
        "an argument of a collective is of the wrong kind; the second one of all_reduce is `op`",
        "give the group by its name: group=group",
    ),
    "'NoneType' object has no attribute 'wait'": (
        "without async_op=True a collective returns None, since it has waited itself",
        "pass async_op=True where you keep the work",
    ),
    "object is not an iterator": (
        "a function with @contextmanager has to yield",
        "write `yield` where the body of the `with` shall run",
    ),
    "returned non-iterator": ("__iter__ has to return an iterator", "return iter(...), or yield"),
    "not part of group": (
        "src counts over the whole job, and that rank is not in the group",
        "group_src=0 names the group's first rank",
    ),
    "process group has not been initialized": (
        "there may be no process group at all: then the one process is rank 0",
        "ask dist.is_initialized() first",
    ),
    "BdbQuit": ("a debugger cannot ask you anything from inside a rank", "use print instead"),
}


def place(failure: Failure, answer: object = None) -> str:
    """Where it went wrong: in the answer itself, or else in what it calls."""
    own = _lines_of(answer)
    frames = [frame for frame in failure.frames if frame[:2] in own]
    frames = frames or [frame for frame in failure.frames if not frame[0].startswith(PACKAGE)]
    return f" in{where(frames[-1]).replace('  line', ' line', 1)}" if frames else ""


def _lines_of(answer: object) -> set[tuple[str, int]]:
    """File and number of every line of a function, or of a class's methods."""
    if isinstance(answer, Pair):
        return set().union(*map(_lines_of, answer.parts))
    kinds = answer.__mro__ if isinstance(answer, type) else ()
    parts = [_plain(part) for kind in kinds for part in vars(kind).values()] or [answer]
    codes = [inspect.unwrap(part).__code__ for part in parts if inspect.isfunction(part)]
    lines = set()
    while codes:
        code = codes.pop()
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        lines |= {(code.co_filename, line) for *_, line in code.co_lines()}
    return lines


def told(failed: RankFailed, answer: object = None) -> tuple[str, str, str]:
    """A failure on a rank as seen, smell, hint; the line named is one of the answer's own."""
    if isinstance(failed, RanksHung):
        return _told_of_a_hang(failed)
    if is_echo(failed.failure):
        at = place(failed.failure, answer)
        return (
            f"rank {failed.rank} waited{at} for a partner that had already finished",
            "not every rank makes the same calls",
            SAME_CALLS,
        )
    return raised(f"rank {failed.rank}", failed.failure, answer)


def raised(who: str, failure: Failure, answer: object = None) -> tuple[str, str, str]:
    """An exception, or a death, of a rank or of a call as seen, smell, hint."""
    message = re.sub(r" <\S+ object at 0x\w+>", "", " ".join(failure.message.split()))[:300]
    said = f"{failure.error}: {message}"
    smell, hint = next((known for words, known in KNOWN_ERRORS.items() if words in said), ("", ""))
    did = "died" if failure.error == "died" else f"raised {failure.error}"
    return f"{who} {did}: {message}{place(failure, answer)}", smell, hint


def _told_of_a_hang(failed: RanksHung) -> tuple[str, str, str]:
    """Ranks that stand at one line hang for other reasons than ranks that stand apart."""
    if len(failed.stacks) + len(failed.finished) == 1:
        lines = [f": it is still in{where(s[-1])[1:]}" for s in failed.stacks.values() if s]
        seen = f"a call never ended{''.join(lines)}"
        return seen, "a loop without an end", "see that its condition becomes false at some time"
    inside = {rank: where(stack[-1])[1:] for rank, stack in failed.stacks.items() if stack}
    lines = [
        f"rank {rank} {'computes' if rank in failed.computing else 'waits'} in{line}"
        for rank, line in inside.items()
    ]
    left = sorted({*failed.stacks, *failed.finished} - set(inside))
    if inside and left:  # also where it waits for the check's next case
        lines.append(f"{name_ranks(left)} {'has' if len(left) == 1 else 'have'} left the function")
    seen = f"the ranks never ended ({'; '.join(lines) or 'no line of yours is waiting'})"
    if any(rank in failed.computing for rank in inside):
        return (
            seen,
            "a loop without an end",
            "see that its condition becomes false at some time, on every rank",
        )
    if inside and left:
        return seen, "a hang: not every rank makes the same calls", SAME_CALLS
    if len({stack[-1][:2] for stack in failed.stacks.values() if stack}) <= 1:
        return (
            seen,
            "a hang, with every rank at the same line: a root (src) that is not the same on all "
            "ranks, or a message that nobody sends",
            "ask for that line what would have to happen for it to go on",
        )
    return seen, "a hang: not every rank makes the same calls in the same order", SAME_CALLS


def ranks(fn: Callable, world_size: int, *args: object, **options: object) -> list:
    """`run_ranks` with the limit of a check. A rank shows what the learner's code prints."""
    return run_ranks(fn, world_size, *args, **{"timeout_s": LIMIT_S, **options})


def show(verdict: Verdict) -> None:
    """Display the card in a notebook; print the line elsewhere."""
    if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
        sys.modules["IPython"].display.display(verdict)
    else:
        print(verdict)


def refuse_the_course_s_own(answer: object, name: str) -> None:
    """Raise Wrong when a graded answer is, or just calls, the course's own function."""
    if any(_is_ours(value, name) for value in [answer, *_globals_used(answer)]):
        raise Wrong(
            f"{name} comes from the manyhands package",
            "graded work has to be written in the notebook",
            "write the body in the TODO cell; looking at the package to learn is fine",
        )


def _is_ours(value: object, name: str) -> bool:
    """Is this the package's function of that name, or a module of the package that holds it?"""
    if isinstance(value, types.ModuleType):
        return value.__name__.startswith("manyhands") and hasattr(value, name)
    module = getattr(value, "__module__", "") or ""
    return module.startswith("manyhands") and getattr(value, "__name__", "") == name


def _globals_used(answer: object) -> list[object]:
    """Every global, and every module imported inside, that the answer's code names."""
    functions = (
        [f for f in map(_plain, vars(answer).values()) if inspect.isfunction(f)]
        if isinstance(answer, type)
        else [inspect.unwrap(answer)]
    )
    found: list[object] = []
    for function in functions:
        codes = [function.__code__]
        while codes:
            code = codes.pop()
            codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
            names = [function.__globals__.get(name) for name in code.co_names]
            imported = [sys.modules.get(name) for name in code.co_names if "manyhands" in name]
            found += [value for value in [*names, *imported] if value is not None]
    return found
