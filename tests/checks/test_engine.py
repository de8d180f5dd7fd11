"""The engine of checks, on exercises of its own: what it sees, names, and leaves unsaid."""

import os
import random
import sys
import textwrap
import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from audit import Audit
from manyhands.checks.engine import attempt, cases, mistakes, naming, tables, trial, verdict, words
from manyhands.checks.engine.card import NotJudged, Wrong
from manyhands.checks.engine.exercise import judge
from manyhands.checks.engine.lesson import Lesson
from manyhands.checks.engine.mistakes import Mistake, after, instead
from manyhands.checks.engine.spec import Place, Spec
from manyhands.checks.engine.values import (
    Malformed,
    boolean,
    difference,
    integer,
    listing,
    number,
    record,
    same,
)
from manyhands.checks.engine.words import NO_CAUSE, NO_TIME
from manyhands.collectives import ring
from manyhands.ranks.failures import Failure, MachineFault, RankFailed

# ---- an exercise without ranks --------------------------------------------------------------


def mean(numbers: list[float], skip: int = 0) -> float:
    """The mean without the first `skip` numbers."""
    if len(numbers) <= skip:
        raise ValueError(f"{len(numbers)} numbers, of which {skip} are skipped")
    kept = numbers[skip:]
    return sum(kept) / len(kept)


class Numbers(NamedTuple):
    numbers: list[float]
    skip: int


def some_numbers() -> list[Numbers]:
    drawn = [random.uniform(-9, 9) for _ in range(6)]
    return [Numbers(drawn[:1], 0), Numbers(drawn[:3], 1), Numbers(drawn, 2), Numbers(drawn, 6)]


MEAN = Spec(
    todo="90.1",
    truth=mean,
    cases=some_numbers,
    form=number,
    hints=("Add them up.", "Divide."),
    mistakes="""
        / len(kept) => / len(numbers) ::
            The skipped numbers are counted. | Divide by the number of those that are kept.
        numbers[skip:] => numbers[: len(numbers) - skip] ::
            The last numbers are skipped, not the first.
        numbers[skip:] => numbers :: `skip` is ignored.
    """,
    module=globals(),
)

# ---- an exercise on ranks -------------------------------------------------------------------


def total(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum of all ranks' x; x stays as it is."""
    result = x.clone()
    dist.all_reduce(result, group=group)
    return result


class Draw(NamedTuple):
    seed: int
    dtype: torch.dtype


def total_seen(answer, case: Draw, place: Place) -> dict:
    x = cases.values(3, cases.generator(case.seed, place.job_rank), case.dtype)
    before = x.clone()
    result = answer(x, **place.options)
    return {"the sum": result.clone(), "x is unchanged": torch.equal(x, before)}


TOTAL = Spec(
    todo="90.2",
    truth=total,
    cases=lambda n: [Draw(cases.draw_seed(), kind) for kind in (torch.float32, torch.int64)],
    observe=total_seen,
    layouts=cases.THREE,
    hints=("Use all_reduce.", "On a copy."),
    limit_s=3.0,
    mistakes="""
        x.clone() => x :: x itself is summed, and the caller still needs it.
        return result => return result / dist.get_world_size(group) :: This is the mean.
        return result => dist.all_reduce(result, group=group); return result ::
            The sum is summed once more.
    """,
    module=globals(),
)

LESSON = Lesson("demo")
LESSON.add(MEAN)
LESSON.add(TOTAL)


@pytest.fixture(autouse=True)
def time_to_name(monkeypatch):
    """A busy machine tries every mistake, too."""
    monkeypatch.setattr(attempt, "NAMING_S", 120.0)


def words_for(spec: Spec, answer: object) -> str:
    random.seed(7)
    try:
        verdict.check(spec, answer)
    except Wrong as wrong:
        return " - ".join((wrong.seen, wrong.why, wrong.hint))
    return "done"


def audit(spec: Spec, *answers: object) -> Audit:
    return Audit(Lesson("demo").add(spec).exercise, answers)


def test_a_table_of_mistakes_is_read_as_its_grammar_says():
    names = {"HINT": "Look.", "OLD": "x", "both": mean}
    one, two, three, four = tables.mistakes(
        r"""
        {OLD} => y :: One line. | {HINT}
        a =>
        b => c\n  d :: A sentence that
            goes on.
        instead both :: ! It ends. |
        after lambda v: v + 1
        fits lambda found, case: found > 1 :: The last.
        """,
        names,
    )
    assert one.change.patches == (("x", "y"),) and (one.why, one.hint) == ("One line.", "Look.")
    assert two.change.patches == (("a", ""), ("b", "c\n  d"))
    assert (two.why, two.hint) == ("A sentence that goes on.", "Look.")
    assert three.ends and three.change.make(None) is mean and not three.hint
    assert four.change.make(lambda: 1)() == 2 and four.fits(2, None) and not two.fits
    text = "not part of group :: It is no member. | {HINT}"
    assert tables.reasons(text, names) == {"not part of group": ("It is no member.", "Look.")}


@pytest.mark.parametrize(
    "table",
    (
        "a => b",  # no sentence
        "a => b ::",
        "a -> b :: A sentence.",
        "=> b :: A sentence.",
        "a => b => c :: A sentence.",
        "a => b :: A sentence. :: Another.",
        "a => b :: A sentence. | A hint. | Another.",
        "a => b :: A sentence.\n  | Indented by 2.",
        "a => b :: A sentence.\n\nc => d :: Another.",
        "instead 1 +",
    ),
)
def test_what_is_not_of_the_grammar_is_refused(table):
    with pytest.raises((ValueError, SyntaxError)):
        tables.mistakes(table, {})


@pytest.mark.parametrize("spec", (MEAN, TOTAL), ids=lambda spec: spec.todo)
def test_the_lists_of_both_hold(spec):
    assert audit(spec).of_mistakes() == []


def test_a_list_that_does_not_hold_is_named(monkeypatch):
    monkeypatch.setattr("audit.MISTAKE_S", 1.0)

    def with_mistakes(*listed: Mistake) -> list[str]:
        spec = Spec("90.3", mean, some_numbers, list(listed), ("", ""), form=number)
        return audit(spec).of_mistakes()

    right = Mistake(instead(mean), "Right.")
    one = Mistake(after(lambda value: value + 1), "One.")
    other = Mistake(after(lambda value: 1 + value), "Other.")
    gone = Mistake(mistakes.patch("no such text", ""), "Gone.")
    endless = Mistake(mistakes.patch("kept = numbers[skip:]", "\n    while True: pass"), "Endless.")
    assert "is not told from the truth" in with_mistakes(right)[0]
    assert "is named ['One.']" in with_mistakes(one, other)[0]
    assert "does not stand once" in with_mistakes(gone)[0]
    assert "mark it with !" in with_mistakes(endless)[0]


def test_an_error_that_comes_before_the_answer_is_named():
    """Else every answer would be as good as the truth, which shows the same error."""

    def observe(answer, case):
        if case.skip == 1:
            raise RuntimeError("no room")
        return answer(*case)

    said = "observe raises RuntimeError before it calls the answer: no room"
    assert audit(replace(MEAN, observe=observe)).of_mistakes() == [said]


def never_ends(numbers, skip=0):
    while True:
        pass


def test_answers_that_are_tried_together_get_verdicts_of_their_own():
    answers = [mean, mean_of_all, never_ends, 5, median, mean]
    tried = audit(replace(MEAN, limit_s=2.0), *answers)
    told = list(tried.verdicts())
    assert [one.state for one in told] == ["done", *["not yet"] * 4, "done"]
    alone = [judge(tried.exercise, answer) for answer in answers]
    assert [one.why for one in told] == [one.why for one in alone]
    assert told[1].why and "never ended" in told[2].seen and "is 5, not a function" in told[3].seen


# ---- naming ---------------------------------------------------------------------------------


def mean_of_all(numbers, skip=0):
    if skip >= len(numbers):
        raise ValueError
    return float(np.mean(numbers))


def two_mistakes(numbers, skip=0):
    if skip >= len(numbers):
        raise ValueError
    return sum(numbers) / len(numbers) + 1


def median(numbers, skip=0):
    if skip >= len(numbers):
        raise ValueError
    return sorted(numbers[skip:])[0]


def test_a_mistake_is_named_only_if_it_shows_the_same():
    assert "`skip` is ignored." in words_for(MEAN, mean_of_all)
    assert "Two mistakes together show this." in words_for(MEAN, two_mistakes)
    words = words_for(MEAN, median)
    assert NO_CAUSE in words and "check.hint('90.1')" in words


def spoils_x(x, group=None):
    dist.all_reduce(x, group=group)
    x += 1
    return x - 1


def fails_in_what_it_calls(x, group=None):
    lines = ["all", "reduce"]
    return textwrap.fill(lines)  # wants a text


def test_dicts_too_long_to_be_shown_differ_in_a_name_and_nested_elements_read_well():
    long = {f"{number} messages of some kind between two ranks": number for number in range(4)}
    less = {name: number for name, number in long.items() if number != 2}
    name = next(name for name, number in long.items() if number == 2)
    assert difference(less, long) == f"{name!r} is missing, which should be 2"
    assert difference(long, less) == f"{name!r} is 2, and should not be there"
    assert difference({"a": 1}, {"b": 1}) == "{'a': 1}, not {'b': 1}"
    one, other = [torch.zeros(2)], [torch.tensor([0.0, 1.0])]
    assert difference(one, other).startswith("element 0: element [1] is 0, not 1")


def odd_seen(answer, case: Draw, place: Place) -> dict:
    seen = total_seen(answer, case, place)
    if not seen["x is unchanged"]:
        raise Wrong("that looks odd", "It does.")
    return seen


def test_words_for_a_call_that_end_in_a_comma():
    spec = replace(MEAN, tell=lambda case: "mean of some numbers,")
    assert "mean of some numbers, gives" in words_for(spec, median)
    spec = replace(TOTAL, tell=lambda case: "total of some numbers,", observe=odd_seen)
    assert "total of some numbers: that looks odd" in words_for(spec, spoils_x)


def test_a_statement_that_does_not_hold_is_said_as_such():
    assert "breaks this rule: x is unchanged" in words_for(TOTAL, spoils_x)


def test_an_error_in_what_an_answer_calls_is_told_with_the_answer_s_own_line():
    line = fails_in_what_it_calls.__code__.co_firstlineno + 2
    assert f"line {line} of test_engine.py" in words_for(TOTAL, fails_in_what_it_calls)
    frames = [("/elsewhere/x.py", 3, "f"), (words.PACKAGE + "/data/y.py", 9, "g")]
    assert words.own_frame(frames) == frames[0] and words.own_frame(frames[1:]) is None


def test_mistakes_that_there_was_no_time_for_are_not_denied():
    tried = attempt.attempt(MEAN, median)
    tried.candidates.limit_s = 0.0
    with pytest.raises(Wrong) as caught:
        verdict.tell(tried)
    assert caught.value.why == NO_TIME


def test_a_match_ends_the_search_for_a_mistake(monkeypatch):
    """One at a time here; no slip is tried where a mistake of the exercise's own fits."""
    sizes = []
    outcomes = attempt.Candidates.outcomes
    monkeypatch.setattr(
        attempt.Candidates,
        "outcomes",
        lambda candidates, tried, at: sizes.append(len(tried)) or outcomes(candidates, tried, at),
    )
    monkeypatch.setattr(attempt, "generic", lambda *given, **named: pytest.fail("slips are tried"))
    assert "`skip` is ignored." in words_for(replace(MEAN, at_once=1), mean_of_all)
    assert max(sizes) == 1


def test_right_answers_of_another_shape_pass():
    def by_numpy(numbers, skip=0):
        if len(numbers) <= skip:
            raise ValueError("too few")
        return np.float64(np.mean(numbers[skip:]))

    assert words_for(MEAN, by_numpy) == "done"


def test_the_first_difference_is_that_of_the_smallest_case():
    def wrong_from_the_second_case_on(numbers, skip=0):
        if skip >= len(numbers):
            raise ValueError
        return mean(numbers, skip) if skip == 0 else 12345.0

    words = words_for(MEAN, wrong_from_the_second_case_on)
    assert "skip=1) gives 12345, not" in words


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda numbers, skip=0: None, "gives None - The exercise asks for a number."),
        (lambda numbers, skip=0: "3", "gives a str, '3'"),
        (lambda numbers, skip=0: 1 / 0, "raised ZeroDivisionError: division by zero in line"),
        (lambda numbers, skip=0: numbers.sort() or mean(numbers, skip), "has changed"),
        (lambda numbers, skip=0: random.random() and mean(numbers, skip), "Python's random numb"),
        (lambda numbers, skip=0: os.environ.update(A="1") or mean(numbers, skip), "environment"),
        (lambda numbers, skip=0: mean(numbers, min(skip, 5)), "raises nothing and gives"),
        (lambda numbers, skip=0: sys.exit(), "did not return"),
        (lambda numbers, skip=0: os._exit(3), "exit code 3"),
    ],
)
def test_what_speaks_for_itself_is_told(answer, words):
    assert words in words_for(MEAN, answer)


def test_numbers_show_their_difference():
    assert difference(0.1 + 2e-8, 0.1) == "0.10000002, not 0.1"
    assert difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])).startswith("element [1]")
    assert difference({"a": 1, "x is kept": False}, {"a": 1, "x is kept": True}) == (
        "this does not hold: x is kept"
    )
    assert difference([1, 2], [1, 3]) == "[1, 2], not [1, 3]"
    assert difference([[1], [2]], [[1], [3]]) == "element 1 is [2], not [3]"


def test_values_are_the_same_but_for_rounding():
    x = torch.tensor([1e6, 1.0])
    assert same(x + 0.5, x) and not same(x.double(), x) and not same(x[:1], x)
    assert same(float("nan"), float("nan")) and not same(True, 1) and not same(2, 3)
    assert not same(x.double() + torch.tensor([0.0, 0.1]), x.double())


def test_kinds_of_values():
    assert number(np.float32(2)) == 2.0 and integer(np.int64(3)) == 3 and boolean(np.bool_(True))
    assert listing(integer)(torch.tensor([1, 2])) == [1, 2]
    assert record(("a", "b"))({"a": 1, "b": 2.5, "c": 0}) == {"a": 1, "b": 2.5}
    for form, value in (
        (number, True),
        (integer, 2.0),
        (boolean, 1),
        (listing(), iter([1])),
        (record(("a",)), {"b": 1}),
        (record(("a",)), {"a": 1, "b": 1}),
    ):
        with pytest.raises(Malformed):
            form(value)


# ---- on ranks -------------------------------------------------------------------------------


def forgets_the_group(x, group=None):
    result = x.clone()
    dist.all_reduce(result)
    return result


def does_not_wait(x, group=None):
    result = x.clone()
    dist.all_reduce(result, group=group, async_op=True)
    return result


def only_rank_0(x, group=None):
    result = x.clone()
    if dist.get_rank(group) == 0:
        dist.all_reduce(result, group=group)
    return result


def one_end(x, group=None):
    if dist.get_rank(group) == 0 < dist.get_world_size(group) - 1:
        dist.isend(x, group=group, group_dst=1).is_completed()
    return total(x, group)


def to_itself(x, group=None):
    dist.send(x, group=group, group_dst=dist.get_rank(group))
    return x


def to_nobody(x, group=None):
    dist.isend(x, group=group, group_dst=dist.get_world_size(group))
    return x


def fails_on_rank_1(x, group=None):
    if dist.get_rank(group) == 1:
        raise KeyError("x")
    return total(x, group)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (forgets_the_group, mistakes.NO_GROUP),
        (does_not_wait, "while a message of its own was still on its way"),
        (only_rank_0, "rank 0 waits in"),
        (one_end, "rank 0 sends a message to rank 1 that is never received"),
        (to_itself, "rank should not be the same as the rank of the current process"),
        (to_nobody, "it sends to rank 3, but the ranks of the group are 0 to 2"),
        (fails_on_rank_1, "raised KeyError: 'x' in line"),
    ],
)
def test_what_ranks_do_is_told(answer, words):
    start_s = time.monotonic()
    assert words in words_for(TOTAL, answer)
    assert time.monotonic() - start_s < 60


def waits_in_a_helper(x, group=None):
    if dist.get_rank(group) == 0:
        ring.exchange(x, 1, x.clone(), 1, group)  # nobody answers
    return x


def test_a_hang_is_told_in_the_line_of_the_answer():
    words = words_for(TOTAL, waits_in_a_helper)
    assert "in waits_in_a_helper:  ring.exchange(x, 1" in words and "ring.py" not in words


def waits_for_none(x, group=None):
    result = x.clone()
    dist.all_reduce(result, group=group).wait()
    return result


def test_of_two_reasons_the_one_that_quotes_more_of_the_error_counts(monkeypatch):
    monkeypatch.setattr(TOTAL, "reasons", {"'NoneType' object": ("A gradient is None.", "")})
    assert "Without async_op=True a collective waits itself" in words_for(TOTAL, waits_for_none)
    monkeypatch.setattr(TOTAL, "reasons", {"has no attribute 'wait'": ("Short.", "")})
    assert "Short." not in words_for(TOTAL, waits_for_none)
    whole = "AttributeError: 'NoneType' object has no attribute 'wait'"
    monkeypatch.setattr(TOTAL, "reasons", {whole: ("Long.", "")})
    assert "Long." in words_for(TOTAL, waits_for_none)


def test_no_word_of_a_hang_accuses():
    words = words_for(TOTAL, only_rank_0)
    assert "All ranks that are left wait." in words and "if dist.get_rank" not in words.lower()


def test_slips_that_any_function_can_have_are_named():
    assert "The result is twice the right one." in words_for(
        MEAN, lambda n, skip=0: 2 * mean(n, skip)
    )
    assert "reciprocal" in words_for(MEAN, lambda n, skip=0: 1 / mean(n, skip))
    found = [mistake.why for mistake in mistakes.generic(total, talks=True)]
    assert found.count(mistakes.NO_GROUP) >= 2


def test_an_answer_that_is_always_the_same_is_no_slip_of_the_right_one():
    for value in (0, 1, 2.5):
        assert naming.CONSTANT.why in words_for(MEAN, lambda n, skip=0, v=value: v)
    assert naming.CONSTANT.why not in words_for(MEAN, lambda n, skip=0: 1 / mean(n, skip))


def test_an_audit_tries_slips_only_where_it_is_told_to():
    tried = audit(MEAN, lambda n, skip=0: 2 * mean(n, skip), two_mistakes)
    slip = "The result is twice the right one."
    assert [one.why for one in tried.verdicts([False, False])] == [NO_CAUSE] * 2
    once, both = [one.why for one in tried.verdicts()]
    assert once == slip and both.startswith(mistakes.TOGETHER)
    assert all(map(tried.is_of_slips, (slip, "twice", NO_CAUSE, mistakes.TOGETHER)))
    assert not any(map(tried.is_of_slips, ("", "`skip` is ignored.", "raised ValueError")))


def test_a_group_is_dropped_in_all_calls_or_in_one():
    changes = [m.change for m in mistakes.generic(total, talks=True) if m.why == mistakes.NO_GROUP]
    drawn = TOTAL.draw()
    steps = TOTAL.steps(drawn)
    for outcomes in trial.try_changes(TOTAL, changes, steps, drawn, 60):
        assert outcomes[-1][0].kind == "explained", outcomes


# ---- faults of the machine ------------------------------------------------------------------


def test_a_fault_of_the_machine_is_tried_once_more_and_then_not_judged(monkeypatch):
    real = trial.run_ranks
    calls = []

    def broken_once(*args, **named):
        calls.append(1)
        if len(calls) == 1:
            raise MachineFault("the server is gone", 1)
        return real(*args, **named)

    monkeypatch.setattr(trial, "run_ranks", broken_once)
    assert words_for(MEAN, mean) == "done"

    def broken(*args, **named):
        raise MachineFault(problems.pop(), 1)

    monkeypatch.setattr(trial, "run_ranks", broken)
    problems = ["the server is gone", "the room is gone"]
    with pytest.raises(NotJudged) as fault:
        verdict.check(MEAN, mean)
    assert fault.value.remedy == "Run the check again."
    problems += 2 * ["the server is gone"]
    with pytest.raises(NotJudged) as fault:
        verdict.check(MEAN, mean)
    assert "It was the same at a second try: mend that first" in fault.value.remedy


def test_not_judged_is_grey_and_stops_only_graded_work(monkeypatch, capsys):
    def broken(*args, **named):
        raise RankFailed(0, 1, Failure("died", "the process was ended by SIGKILL", [], 0.0), [])

    monkeypatch.setattr(trial, "run_ranks", broken)
    exercise = LESSON.exercises["90.1"]
    check = LESSON._add(exercise)
    check(mean)
    assert "TODO 90.1 not judged: " in capsys.readouterr().out
    assert "128,128,128" in exercise.verdict._repr_html_()
    monkeypatch.setenv("NBGRADER_EXECUTION", "autograde")
    with pytest.raises(Exception, match="TODO 90.1 not judged"):
        check(median)
