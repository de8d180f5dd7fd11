"""Every check of every lesson: right answers pass, and each wrong one is named."""

import importlib
from pathlib import Path

import pytest

from manyhands.checks import judge

ROOT = Path(__file__).resolve().parents[1]
LESSONS = sorted(path.stem for path in (ROOT / "tests" / "answers").glob("[a-z]*.py"))


def answers(kind: str) -> list:
    found = []
    for word in LESSONS:
        table = getattr(importlib.import_module(f"answers.{word}"), kind)
        for todo, listed in table.items():
            for index, entry in enumerate(listed):
                answer = entry if kind == "RIGHT" else entry[0]
                name = f"{todo}-{getattr(answer, '__name__', 'answer')}-{index}"
                found.append(pytest.param(word, todo, entry, id=name))
    return found


def verdict(word: str, todo: str, answer: object):
    lesson = importlib.import_module(f"manyhands.checks.{word}").lesson
    return judge(lesson.exercises[todo], answer)


def test_every_lesson_has_answers():
    lessons = {path.stem for path in (ROOT / "scripts/manyhands/checks").glob("[a-z]*.py")}
    assert lessons == set(LESSONS)


@pytest.mark.parametrize("word", LESSONS)
def test_every_exercise_has_four_wrong_and_two_right_answers(word):
    table = importlib.import_module(f"answers.{word}")
    lesson = importlib.import_module(f"manyhands.checks.{word}").lesson
    assert set(table.RIGHT) == set(table.WRONG) == set(lesson.exercises)
    for todo, exercise in lesson.exercises.items():
        assert len(table.WRONG[todo]) >= 4, todo
        assert len(table.RIGHT[todo]) >= 2, todo
        assert len(exercise.hints) >= 2, todo


@pytest.mark.parametrize(("word", "todo", "answer"), answers("RIGHT"))
def test_a_right_answer_is_done(word, todo, answer):
    assert repr(verdict(word, todo, answer)) == f"TODO {todo} done"


@pytest.mark.parametrize(("word", "todo", "entry"), answers("WRONG"))
def test_a_wrong_answer_is_named(word, todo, entry):
    answer, words = entry
    told = verdict(word, todo, answer)
    assert told.state == "not yet"
    assert words in repr(told), repr(told)
    assert "\n" not in repr(told) and "checks/" not in repr(told) and "Traceback" not in repr(told)


def every_exercise() -> list:
    return [
        pytest.param(word, todo, id=todo)
        for word in LESSONS
        for todo in importlib.import_module(f"manyhands.checks.{word}").lesson.exercises
    ]


@pytest.mark.parametrize(("word", "todo"), every_exercise())
def test_the_stub_is_not_started(word, todo):
    def stub(*args, **kwargs):
        raise NotImplementedError(f"TODO {todo}")

    assert repr(verdict(word, todo, stub)) == f"TODO {todo} not started"


@pytest.mark.parametrize(("word", "todo"), every_exercise())
def test_half_answers_and_nonsense_are_named(word, todo):
    def returns_none(*args, **kwargs):
        return None

    def misspelt(*args, **kwargs):
        return no_such_name  # noqa: F821

    for answer in (returns_none, misspelt, 5, None, int):
        told = verdict(word, todo, answer)
        assert told.state == "not yet" and told.seen, (answer, told)
        assert "checks/" not in repr(told), told
    assert "NameError" in repr(verdict(word, todo, misspelt))


def test_an_endless_loop_ends():
    def forever(*args, **kwargs):
        while True:
            pass

    told = verdict("ddp", "6.1", forever)
    assert "never ended" in repr(told) and "forever" in repr(told)
