"""Measures verdicts, the first card of a fresh kernel, and imports."""

import io
import statistics
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import manyhands
from manyhands.checks.engine.exercise import Exercise, judge
from manyhands.checks.engine.lesson import Lesson
from manyhands.instruments.benchmark import (
    CannotMeasure,
    Measure,
    Measured,
    Row,
    run_python,
    spread,
)
from manyhands.instruments.timing import in_turn, time_s

IMPORT_ROUNDS = 8
FIRST_CARDS = 3
FIRST_CARD = """
from manyhands.checks import collectives as check
from manyhands.collectives.alpha_beta import fit_alpha_beta
check.fit_alpha_beta(fit_alpha_beta)
"""


def lessons() -> dict[str, Lesson]:
    """Every lesson's checks, by its word."""
    folder = Path(__file__).parents[1]
    words = {path.stem for path in folder.glob("[a-z]*.py")} - {"shared"}
    words |= {path.parent.name for path in folder.glob("*/__init__.py")} - {"engine"}
    return {word: import_module(f"manyhands.checks.{word}").lesson for word in sorted(words)}


def exercises() -> Iterator[Exercise]:
    """Every exercise of the course."""
    for lesson in lessons().values():
        yield from lesson.exercises.values()


def verdicts() -> list[Measured]:
    """Seconds until the course's own answer is done, and until its first mistake is told."""
    every = list(exercises())
    rights = [(one, one.spec.truth, "done") for one in every]
    wrongs = [(one, _first_mistake(one), "not yet") for one in every]
    surprises: list[str] = []

    def judged(exercise: Exercise, answer: object, state: str) -> None:
        with redirect_stdout(io.StringIO()):  # what the answer prints on its ranks
            verdict = judge(exercise, answer)
        if verdict.state != state:
            surprises.append(f"{exercise.todo} is {verdict.state} where {state} is expected")

    judged(*rights[0])  # the fork server starts
    measured = []
    for cases in (rights, wrongs):
        works = [partial(judged, *case) for case in cases]
        medians_s = [statistics.median(times_s) for times_s in in_turn(works, 3)]
        pairs = zip(medians_s, (one.todo for one in every), strict=True)
        slowest = ", ".join(f"{todo} {s:.2f} s" for s, todo in sorted(pairs, reverse=True)[:3])
        note = f"{spread(medians_s)} of 3 rounds each; slowest: {slowest}"
        measured.append((statistics.median(medians_s), note))
    if surprises:
        raise CannotMeasure("; ".join(sorted(set(surprises))))
    return measured


def _first_mistake(exercise: Exercise) -> object:
    mistake = next(one for one in exercise.spec.mistakes if not one.ends)
    return mistake.change.make(exercise.spec.truth)


def first_card() -> list[Measured]:
    """Seconds from the start of a fresh interpreter to its first green card."""
    times_s = [time_s(partial(run_python, "-c", FIRST_CARD)) for _ in range(FIRST_CARDS)]
    return [(statistics.median(times_s), spread(times_s))]


def modules() -> list[str]:
    """The dotted names of all modules of the lessons' rooms, and those that start ranks."""
    found = walk_packages(manyhands.__path__, "manyhands.")
    names = [one.name for one in found if not one.ispkg and not one.name.endswith(".bench")]
    rooms = {f"manyhands.{word}" for word in lessons()}
    of_lessons = [name for name in names if name.rpartition(".")[0] in rooms]
    return [*sorted(of_lessons), "manyhands.ranks.lab", "manyhands.ranks.runtime"]


def imports() -> list[Measured]:
    """Seconds to import all lessons and what starts ranks, beyond those of torch."""
    bare = "torch, torch.distributed"
    ours = f"{bare}, {', '.join(modules())}"
    loaded: dict[str, tuple[float, int]] = {}
    beyond_s = []
    for number in range(IMPORT_ROUNDS):
        for names in (bare, ours)[:: -1 if number % 2 else 1]:
            loaded[names] = import_once(names)
        beyond_s.append(loaded[ours][0] - loaded[bare][0])
    beyond_s = beyond_s[1:]  # the first reads the disk
    more = loaded[ours][1] - loaded[bare][1]
    note = f"{spread(beyond_s)}; {len(modules())} modules; they load {more} more modules of torch"
    return [(statistics.median(beyond_s), note)]


def import_once(names: str) -> tuple[float, int]:
    """Import in a fresh interpreter: seconds, and how many modules of torch that loads."""
    code = (
        f"import sys, time; start_s = time.perf_counter(); import {names}; "
        "print(time.perf_counter() - start_s, sum(m.startswith('torch') for m in sys.modules))"
    )
    seconds, num_modules = run_python("-c", code).split()
    return float(seconds), int(num_modules)


ENGINE = ("checks/engine/*.py", "ranks/lab.py")
MEASURES = (
    Measure(
        verdicts,
        (
            Row("a right answer's verdict, median of all checks, warm", "< 0.7", "s"),
            Row("a wrong answer's verdict, median of all checks, warm", "< 1.2", "s"),
        ),
        (*ENGINE, "checks/*.py", "checks/*/*.py"),
    ),
    Measure(
        first_card,
        (Row("the first green card of a fresh interpreter", "< 12", "s"),),
        ENGINE,
    ),
    Measure(
        imports,
        (Row("importing all lessons, beyond torch's own time", "< 0.5", "s"),),
        ("*/*.py",),
    ),
)
