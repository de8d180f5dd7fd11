"""Checks of lesson 03. A device of the check's own does the work that is timed; the accuracies of a
training are written down beforehand; and a mistake in a formula is known by what it gives."""

import math
import operator
import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from numbers import Real
from statistics import fmean, median, pvariance, variance
from types import EllipsisType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Generator, Tensor

from manyhands.batch_size import scaling as truth
from manyhands.checks import Lesson, Wrong, ranks, told
from manyhands.checks.shared import Reasons, alone, because, log_all_reduces, number
from manyhands.ranks.failures import RankFailed, where

lesson = Lesson("batch_size")
hint, summary, ready, keep = lesson.hint, lesson.summary, lesson.ready, lesson.keep

Value = float | tuple | str | EllipsisType | None
Mistakes = Iterable[tuple[Value, str, str]]  # what it would give, what it smells of, what to try


# ---- what an answer gives -------------------------------------------------------------------


def _plain(value: object) -> Value:
    """A number, or some numbers, of Python, NumPy or torch; of all else its form in words."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if value is None or (isinstance(value, Real) and not isinstance(value, bool)):
        return value if value is None else float(value)
    items = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(items, list | tuple):
        parts = [_plain(item) for item in items]
        if all(part is None or isinstance(part, float) for part in parts):
            return tuple(parts)
    return repr(value) if isinstance(value, bool) else f"a {type(value).__name__}"


def _same(found: Value, wanted: Value, within: float = 1e-4) -> bool:
    """Equal but for rounding; ... stands for anything."""
    if isinstance(wanted, tuple) and isinstance(found, tuple):
        pairs = zip(found, wanted, strict=False)
        return len(found) == len(wanted) and all(_same(*pair, within) for pair in pairs)
    if isinstance(wanted, float | int) and isinstance(found, float):
        return found == wanted or abs(found - wanted) <= within * abs(wanted)
    return wanted is ... or (wanted is None and found is None)


def _rounded(found: list[Value], wanted: list[Value]) -> bool:
    """Are these the right numbers, all to as many decimals? One of them at least is another."""
    pairs = [
        pair
        for one, other in zip(found, wanted, strict=False)
        for pair in zip(_numbers(one), _numbers(other), strict=True)
    ]
    if any(not isinstance(number, float) for pair in pairs for number in pair):
        return False
    whole = all(one.is_integer() and abs(one - other) < 1 for one, other in pairs)
    return whole or any(
        all(abs(one - round(other, n)) < 1e-9 for one, other in pairs) for n in range(1, 5)
    )


def _numbers(value: Value) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def _size(value: Value) -> int:
    """How many numbers; none in words."""
    return len(value) if isinstance(value, tuple) else int(isinstance(value, float | int))


def _alike(one: Value, other: Value) -> bool:
    """As many numbers?"""
    return _size(one) == _size(other) > 0


def _text(value: Value) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    return f"{value:.5g}" if isinstance(value, float | int) else str(value)


def _all(
    answer, cases: list[tuple], tell: Callable, run: Callable, reasons: Reasons
) -> tuple[list[object], Wrong | None]:
    """What the answer gives for the cases, and why it stopped before the last."""
    found = []
    try:
        for value in alone(answer, cases, tell, reasons, run):
            found.append(value)
    except Wrong as wrong:
        return found, wrong
    return found, None


def _compare(
    found: list[Value],
    cases: list[tuple],
    tell: Callable,
    right: Callable,
    mistakes: Callable[..., Mistakes],
    advice: str,
    within: float = 1e-4,
) -> None:
    """Name the mistake that gives all that was seen: fewer numbers can agree by chance."""
    every = [list(mistakes(*case)) for case in cases[: len(found)]]
    truths = [_plain(right(*case)) for case in cases[: len(found)]]
    off = [i for i, value in enumerate(found) if not _same(value, truths[i], within)]
    for index in off[:1]:
        value, wanted, case = found[index], truths[index], cases[index]
        why = "", advice
        if value is None:
            why = "nothing is returned, or None", advice
        elif wanted is not None and _size(value) != _size(wanted):
            why = f"{_size(wanted)} number{'s' * (_size(wanted) > 1)} asked for", advice
        elif all(map(_alike, found, truths)) and _rounded(found, truths):
            why = "a rounded result", "return the number as it is: no round, no int and no //"
            raise Wrong(f"{tell(*case)} gives {_text(value)}, not {_text(wanted)}", *why)
        for alike in zip(*every, strict=True):
            if all(_same(one, of[0], within) for one, of in zip(found, alike, strict=True)):
                why = alike[index][1:]
                break
        raise Wrong(f"{tell(*case)} gives {_text(value)}, not {_text(wanted)}", *why)


def _judge(
    answer,
    cases: list[tuple],
    tell: Callable,
    right: Callable,
    mistakes: Callable[..., Mistakes],
    advice: str,
    within: float = 1e-4,
    reasons: Reasons | None = None,
) -> None:
    """Run and compare a function of numbers alone."""

    def run(answer, *case: object) -> Value:
        return _plain(answer(*case))

    found, stopped = _all(answer, cases, tell, run, reasons or {})
    _compare(found, cases, tell, right, mistakes, advice, within)
    if stopped:
        raise stopped


# ---- 3.1 ------------------------------------------------------------------------------------


class Device:
    """Works on after `step` has returned, as a GPU does, and writes down when it was asked what."""

    def __init__(self, times_s: Sequence[float]) -> None:
        self.times_s, self.free_at_s = times_s, 0.0
        self.log: list[tuple[str, float, float]] = []  # what, when it was called, when it returned

    def step(self) -> float:
        """Start work; gives a loss, as steps do, and no time."""
        now_s = time.perf_counter()
        done = sum(what == "step" for what, *_ in self.log)
        self.free_at_s = max(now_s, self.free_at_s) + self.times_s[min(done, len(self.times_s) - 1)]
        self.log.append(("step", now_s, now_s))
        return LOSS

    def synchronize(self) -> None:
        """Wait until all work is done."""
        asked_s = time.perf_counter()
        while (left_s := self.free_at_s - time.perf_counter()) > 0:
            time.sleep(left_s)
        self.log.append(("synchronize", asked_s, time.perf_counter()))


LOSS = 0.7321
SLOW_S = 0.025
SYNCHRONIZE = "synchronize(), with brackets, before each look at the clock"
CLOCK_REASONS: Reasons = {
    words: ("the device need not be CUDA's", "call the argument: synchronize()")
    for words in ("CUDA enabled", "NVIDIA driver", "no CUDA", "device is not available")
}


@lesson.exercise(
    "3.1",
    "First warm_up steps that nobody times. Then a loop over repeats, with a list of times.",
    "In the loop: wait, look at the clock, step, wait, look at the clock. The first wait is for "
    "the work that was started before.",
    "time.perf_counter() is the clock, statistics.median(times) the middle one; the result is "
    "batch divided by it.",
)
def throughput(answer) -> None:
    """An odd and an even number of repeats, with one slow step each; and one repeat alone."""
    cases = []
    for warm_up, times_s in ((2, [1.5, 3, 5, 7]), (1, [2, 4, 5]), (1, [4])):
        measured = [t * random.uniform(0.95, 1.05) / 1000 for t in times_s] + [SLOW_S] * (
            len(times_s) > 1
        )
        random.shuffle(measured)
        case = random.randrange(20, 90), warm_up, len(measured)
        cases.append((*case, [SLOW_S] * warm_up + measured))

    def tell(batch: int, warm_up: int, repeats: int, times_s: list[float]) -> str:
        return f"throughput(batch={batch}, warm_up={warm_up}, repeats={repeats})"

    for case, (value, log) in zip(
        cases, alone(answer, cases, tell, CLOCK_REASONS, _run_timed), strict=True
    ):
        _check_calls(log, tell(*case), *case)
        found = number(value, tell(*case))
        if not _is_rate(found, log, *case):
            low, high = _rates(log, *case)
            wanted = f"{low:.0f}" if high < 1.02 * low else f"{low:.0f} to {high:.0f}"
            raise Wrong(f"{tell(*case)} gives {found:.5g}, not {wanted}", *_why(found, log, *case))


def _run_timed(answer, batch: int, warm_up: int, repeats: int, times_s: list[float]) -> tuple:
    """Other work of the computer can spoil times, also so that a wrong answer looks right.

    So it is tried again until the steps took the time they should; at most five times.
    """
    for _ in range(5):
        device = Device(times_s)
        value = answer(device.step, batch, warm_up, repeats, device.synchronize)
        value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        value = value if isinstance(value, Real) or value is None else f"a {type(value).__name__}"
        if not isinstance(value, Real):
            break
        took_s, calm_s = _times_s(device.log, repeats)[0], times_s[-repeats:]
        is_calm = all(a < 1.2 * b + 3e-4 for a, b in zip(took_s, calm_s, strict=False))
        if is_calm and _is_rate(value, device.log, batch, warm_up, repeats):
            break
    return value, device.log


def _times_s(log: list, repeats: int) -> tuple[list[float], float]:
    """Of the last steps: from each one's start until a synchronize after it has returned.

    Also how long the synchronize before the first of them had to wait.
    """
    times_s, start_s, waited_s = [], None, 0.0
    first = [at for at, (what, *_) in enumerate(log) if what == "step"][-repeats:][:1]
    for at, (what, called_s, returned_s) in enumerate(log):
        if first and at < first[0]:
            waited_s = returned_s - called_s if what == "synchronize" else 0.0
        elif what == "step":
            start_s = called_s
        elif start_s is not None:
            times_s.append(returned_s - start_s)
            start_s = None
    return times_s, waited_s


def _rates(log: list, batch: int, warm_up: int, repeats: int, *_: object) -> tuple[float, float]:
    """Of an even number of times either of the two in the middle will do."""
    times_s = sorted(_times_s(log, repeats)[0])
    if not times_s:
        return math.nan, math.nan
    return batch / times_s[len(times_s) // 2], batch / times_s[(len(times_s) - 1) // 2]


def _is_rate(found: float, log: list, *case: object) -> bool:
    low, high = _rates(log, *case)
    return 0.9 * low <= found <= 1.1 * high


def _check_calls(log: list, case: str, batch: int, warm_up: int, repeats: int, *_: object) -> None:
    """Were there as many steps as asked for, and was the device waited for in between?"""
    calls = [what for what, *_ in log]
    num_steps, total = calls.count("step"), warm_up + repeats
    if num_steps != total:
        smells = {
            repeats: "the warm-up is missing, or counted as repeats: it comes before them",
            total - 1: "one step too few: range(n) has n numbers",
            total + 1: "one step too many: range(n) has n numbers",
            2 * total: "each step is done twice",
        }
        seen = f"{case} does {num_steps} steps, not {total}"
        raise Wrong(seen, smells.get(num_steps, ""), "warm_up steps, and then repeats steps")
    if "synchronize" not in calls:
        seen = f"{case} never calls synchronize"
        smell = "`step` returns at once, so what is timed is the start of the work, not the work"
        raise Wrong(seen, smell, SYNCHRONIZE)
    steps = [at for at, what in enumerate(calls) if what == "step"][-repeats:]
    ends = [*steps[1:], len(calls)]
    waits = ["synchronize" in calls[at:end] for at, end in zip(steps, ends, strict=True)]
    if repeats > 1 and not any(waits[:-1]):
        seen = f"{case} does not wait between its {repeats} steps"
        smell = "one time for all repeats together is a mean, which one slow step moves"
        raise Wrong(seen, smell, "time the steps one by one, and take the median")
    if not waits[-1]:
        seen = f"{case} does not wait after its last step"
        raise Wrong(seen, "the clock stops before the work is done", SYNCHRONIZE)
    if steps[0] > 0 and calls[steps[0] - 1] != "synchronize":
        seen = f"{case} does not wait between the warm-up and the first step that counts"
        raise Wrong(seen, "the clock starts while the device still works", SYNCHRONIZE)


def _why(found: float, log: list, batch: int, warm_up: int, repeats: int, *_: object) -> tuple:
    """Smell and hint of a wrong rate."""
    times_s, waited_s = _times_s(log, repeats)
    every = _times_s(log, warm_up + repeats)[0]
    middle, mean = median(times_s), fmean(times_s)
    a_median, upside = "statistics.median(times)", "batch / median: samples a second"
    late = [times_s[0] + waited_s, *times_s[1:]]
    mistakes = [
        (batch / LOSS, "that is what `step` returns: a loss, no time", "two looks at the clock"),
        (batch / median(late), "the clock starts before synchronize", "wait, then start it"),
        (batch / mean, "a mean, which one slow step moves", a_median),
        (batch * fmean(1 / t for t in times_s), "a mean of rates", a_median),
        (
            batch / median(accumulate(times_s)),
            "all times are counted from one start",
            "look at the clock anew before each step",
        ),
        (batch / min(times_s), "the fastest step", a_median),
        (batch / max(times_s), "the slowest step", a_median),
        (batch / median(every), "the warm-up is among the times", "warm up before the first time"),
        (batch / fmean(every), "the warm-up is among the times", "warm up before the first time"),
        (batch / sum(times_s), "the samples of one step, the time of all", upside),
        (batch * repeats / middle, "the samples of all steps, the time of one", upside),
        (batch / middle / 1000, "samples a millisecond, or the time in ms", "seconds"),
    ]
    for time_s in (middle, mean):
        mistakes += [
            (1 / time_s, "steps a second: the batch is forgotten", upside),
            (time_s / batch, "seconds a sample", f"upside down: {upside}"),
            (time_s, "seconds a step", upside),
        ]
    value, *why = min(mistakes, key=lambda mistake: abs(found / mistake[0] - 1))
    if _same(float(found), value, 0.08):
        return tuple(why)
    if found > 5 * batch / middle:
        smell = "the clock stops before the work is done, or counts no waiting as process_time does"
        return smell, "step, synchronize, and then look at time.perf_counter()"
    return "", "batch / the median of the times"


# ---- 3.2 ------------------------------------------------------------------------------------


class Overrun(Exception):
    """A step beyond max_steps: it ends a training that has no end."""


class Scripted(NamedTuple):
    """The arguments of one call of `steps_to_target`, with the accuracy after each step."""

    accuracies: list[float]
    target: float
    patience: int
    every: int
    max_steps: int

    def __str__(self) -> str:
        seen = self.accuracies[self.every : self.max_steps + 1 : self.every]
        return (
            f"steps_to_target(target={self.target}, patience={self.patience}, every={self.every}, "
            f"max_steps={self.max_steps}) with accuracies {', '.join(f'{a:.3g}' for a in seen)}"
        )


def _script(pattern: str, patience: int, every: int, max_steps: int) -> tuple:
    """Each letter is an evaluation: b below the target, n by little, = just there, g above, h high.

    All others are g.
    """
    target = round(random.uniform(0.6, 0.8), 2)
    ways = {"b": (-0.3, -0.02), "=": (0, 0), "g": (0.02, 0.15)}
    ways |= {"n": (-0.04, -0.02), "h": (0.12, 0.15)}
    letters = ["g"] * (max_steps + 99)
    letters[every : every * len(pattern) + 1 : every] = pattern
    accuracies = [round(target + random.uniform(*ways[letter]), 3) for letter in letters]
    return Scripted(accuracies, target, patience, every, max_steps)


def _walk(
    case: Scripted,
    above: Callable = operator.ge,
    patience: int = 0,
    reset: bool = True,
    late: int = 0,
    tell: Callable = lambda end, case: end - (case.patience - 1) * case.every,
) -> float | None:
    """What steps_to_target gives if a part of it is another's."""
    in_a_row = 0
    for end in range(case.every, case.max_steps + late + 1, case.every):
        good = above(case.accuracies[end], case.target)
        in_a_row = in_a_row + 1 if good else in_a_row * (not reset)
        if in_a_row == (patience or case.patience):
            return float(tell(end, case))
    return None


def _by_first(
    case: Scripted, count_falls: bool, first_falls: bool, sure: bool = True, patience: float = 0
) -> float | None:
    """The same with a variable for the first of the row; does a miss set the two back?"""
    first, count = None, 0
    for end in range(case.every, case.max_steps + 1, case.every):
        if case.accuracies[end] >= case.target:
            first, count = first or float(end), count + 1
            if count == (patience or case.patience):
                return first
        else:
            first, count = None if first_falls else first, 0 if count_falls else count
    return None if sure else first


def _by_mean(case: Scripted) -> float | None:
    seen: list[float] = []
    for end in range(case.every, case.max_steps + 1, case.every):
        seen.append(case.accuracies[end])
        if len(seen) >= case.patience and fmean(seen[-case.patience :]) >= case.target:
            return float(end - (case.patience - 1) * case.every)
    return None


def _given_up(case: Scripted) -> float | None:
    """Stops after `patience` misses."""
    ends = range(case.every, case.max_steps + 1, case.every)
    misses = 0
    for end in ends:
        if case.accuracies[end] >= case.target:
            return float(end)
        misses += 1
        if misses == case.patience:
            break
    return None


FIRST = "the steps at the first evaluation of the row"
STEP_REASONS: Reasons = {
    f"'{kind}' and 'float'": (
        "a function is compared, not what it gives",
        "evaluate(), in brackets",
    )
    for kind in ("function", "method")
}


def _wrong_walks(*arguments: object) -> Mistakes:
    case = Scripted(*arguments)
    patience, every = case.patience, case.every

    def walk(shift: Callable | None = None, **options: object) -> float | None:
        return _walk(case, **options, **({"tell": lambda end, _: shift(end)} if shift else {}))

    yield walk(above=operator.gt), "an accuracy equal to the target counts as well", ">=, not >"
    yield walk(lambda end: end, patience=1), "one good evaluation may be luck", "use `patience`"
    no_reset = "a miss does not set the row back", "in_a_row = 0 where it is below the target"
    for shift in (None, lambda end: end):
        yield walk(shift, reset=False), *no_reset
    yield walk(lambda end: end), "the last evaluation of the row, not the first", FIRST
    yield walk(lambda end: end - patience * every), "one evaluation too early", FIRST
    apart = "between two evaluations lie `every` steps"
    yield walk(lambda end: end - patience + 1), apart, FIRST
    counted = "a number of evaluations, not of steps"
    for more in (0, 1):
        yield walk(lambda end, more=more: end / every - (patience - 1) * more), counted, FIRST
    from_0 = "the steps are numbered from 0", "after the first step num_steps is 1"
    yield walk(lambda end: end - (patience - 1) * every - 1), *from_0
    yield walk(late=-1), "the last step allowed is not done", "range(1, max_steps + 1)"
    yield walk(above=operator.lt), "the comparison is turned round", "evaluate() >= target"
    yield from _wrong_rows(case)


def _wrong_rows(case: Scripted) -> Mistakes:
    """Other ideas of what a row is."""
    yield _by_first(case, False, False), "a miss does not set the row back", "count and first anew"
    yield _by_first(case, False, True), "a miss does not set the count back", "count from 0 again"
    old = "a miss sets the count back, but the first evaluation is still one of an older row"
    yield _by_first(case, True, False), old, "forget the first one as well"
    unfinished = "the training ended in a row shorter than `patience`: that is not sure"
    yield _by_first(case, True, True, sure=False), unfinished, "None after the loop"
    to_the_end = "`patience` is not used: a row counts only if it lasts to the end of the training"
    lasting = _by_first(case, True, True, sure=False, patience=math.inf)
    yield lasting, to_the_end, "a row of `patience` is enough: return at once"
    yield _by_mean(case), "a mean of accuracies: each one has to reach the target", "count a row"
    misses = "`patience` counts misses here; it is for good evaluations in a row"
    yield _given_up(case), misses, "go on after a miss, up to max_steps"


@lesson.exercise(
    "3.2",
    "Count the steps from 1 to max_steps; num_steps % every == 0 says when to evaluate.",
    "Keep a number in_a_row: one more where the accuracy is at least the target, else 0.",
    "Where in_a_row == patience, the first of them was (patience - 1) * every steps ago.",
)
def steps_to_target(answer) -> None:
    """Luck, a hit just at the target, never sure, not sure yet, sure at last, no evaluation."""
    early = "b" * random.randrange(3)
    last = early + "bbgg="
    cases = [
        _script(early + "nnhhh", 3, 3, 3 * len(early) + 17),  # the mean of n, n and h is above
        _script(early + "bgb=ggg", 2, 3, 3 * len(early) + 22),
        _script(early + "b=bg", 1, 2, 20),
        _script(early + "gbggbg=bggb", 3, 4, 4 * (len(early) + 11) + 2),
        _script(last, 3, 5, 5 * len(last)),
        _script(early + "bgg", 3, 2, 2 * len(early) + 7),
        _script("", 1, 5, 3),
        _script("gg", 2, 1, 9),
    ]

    def tell(*case: object) -> str:
        return str(Scripted(*case))

    found, stopped = _all(answer, cases, tell, _run_scripted, STEP_REASONS)
    for case, (_, *log) in zip(cases, found, strict=False):
        _check_evaluations(*log, case)
    values = [value for value, *_ in found]
    for value, case in zip(values, cases, strict=False):
        if _walk(case) is None and value in (case.max_steps, -1.0, 0.0, math.inf, "False"):
            seen = f"{case} gives {_text(value)}"
            raise Wrong(seen, "that looks like a number of steps; it was not reached", "None")
    _compare(values, cases, tell, lambda *case: _walk(Scripted(*case)), _wrong_walks, FIRST, 1e-9)
    for case, (value, num_steps, _) in zip(cases, found, strict=False):
        end = value and value + (case.patience - 1) * case.every
        if end and num_steps > end:
            seen = f"{case} does {num_steps} steps, though it is sure after {end:g}"
            raise Wrong(seen, "the training goes on", "return at once")
    if stopped:
        raise stopped


def _run_scripted(answer, *case: object) -> tuple[Value, int, list[int]]:
    """The result, the number of steps, and after how many steps it was evaluated."""
    case, evaluated, num_steps = Scripted(*case), [], 0

    def step() -> float:
        nonlocal num_steps
        num_steps += 1
        if num_steps > case.max_steps:
            evaluated.append(num_steps)
            raise Overrun
        return 0.1  # a loss

    def evaluate() -> float:
        evaluated.append(num_steps)
        if len(evaluated) > 3 * case.max_steps + 9:
            raise RuntimeError("evaluate is called again and again, and no step is done")
        return case.accuracies[num_steps]

    try:
        return _plain(answer(step, evaluate, *case[1:])), num_steps, evaluated
    except Overrun:
        return None, num_steps, evaluated


def _check_evaluations(num_steps: int, evaluated: list[int], case: Scripted) -> None:
    """Is it evaluated where it should be? Says nothing on how often."""
    at = f"after {', '.join(map(str, evaluated[:8]))}{', ...' * (len(evaluated) > 8)} steps"
    seen = f"{case} evaluates {at}"
    if num_steps > case.max_steps:
        seen = f"{case} does more than {case.max_steps} steps"
        raise Wrong(seen, "max_steps is left out, or overrun", "range(1, max_steps + 1)")
    if evaluated and not num_steps:
        raise Wrong(seen, "`step` is never called", "step(), with brackets, once in every round")
    if 0 in evaluated:
        smell = "before the first step: an untrained model may count"
        raise Wrong(seen, smell, "step first, then look at num_steps % every")
    if any(steps % case.every for steps in evaluated):
        raise Wrong(seen, "`every` is left out, or counted from 0", "num_steps % every == 0")
    if len(set(evaluated)) < len(evaluated):
        smell = "twice at the same step, which costs time"
        raise Wrong(seen, smell, "call evaluate once, and keep its value in a variable")


# ---- 3.3 ------------------------------------------------------------------------------------


def _hits(counts: Sequence[int | None]) -> list[int]:
    return [count for count in counts if count is not None]


MEANS = "the mean over the seeds of each rate, and then the smallest of these"
SURVIVORS = "a rate counts with the seeds that did not miss: it looks better than it is"


RATE_REASONS: Reasons = {
    words: ("nothing is left to choose from", "default=None, or first look whether there is any")
    for words in ("empty sequence", "iterable argument is empty", "at least one data point")
}
RATE_REASONS |= {
    words: (
        "the lists have unequal lengths: a rate is given up after a miss, so its list is shorter",
        "take the mean of one list at a time",
    )
    for words in ("expected sequence of length", "inhomogeneous", "stack expects each tensor")
}
RATE_REASONS |= {
    "NoneType": (
        "a None, of a seed that missed the target, is among the numbers",
        "leave such a rate out: `if None not in counts`",
    ),
    "cannot unpack non-iterable": ("a loop over a dict gives its keys alone", "steps.items()"),
}


def _best(counts: dict, value: Callable = fmean, pick: Callable = min) -> tuple | None:
    values = {rate: float(value(of_rate)) for rate, of_rate in counts.items()}
    return pick(values.items(), key=lambda item: item[1], default=None)


def _wrong_rates(steps: dict) -> Mistakes:
    whole = {rate: counts for rate, counts in steps.items() if None not in counts}
    some = {rate: _hits(counts) for rate, counts in steps.items() if _hits(counts)}
    yield _best(some), SURVIVORS, "if None not in counts"
    zeros = {rate: [n or 0 for n in counts] for rate, counts in steps.items()}
    yield _best(zeros), "None counts as 0 steps", "leave such a rate out"
    shares = {rate: [sum(hits) / len(steps[rate])] for rate, hits in some.items()}
    yield (
        _best(shares),
        "a mean with too large a count: seeds that missed are in it",
        "leave it out",
    )
    for counts in (whole, some):
        yield _best(counts, min), "the best single seed, which is luck", MEANS
        yield _best(counts, max), "the worst single seed", MEANS
        yield _best(counts, median), "a median; the mean is asked for", MEANS
        yield _best(counts, sum), "a sum over the seeds", MEANS
    yield _best(whole, pick=max), "the most steps, not the fewest", MEANS
    three = "divided by 3, whatever the number of seeds"
    yield _best(whole, lambda counts: sum(counts) / 3), three, "len(counts)"
    yield from _wrong_pairs(whole, some)
    missed = "a seed missed the target with each rate, so no rate counts"
    yield _best(whole) or (..., ...), missed, "None where no rate is left"


def _wrong_pairs(whole: dict, some: dict) -> Mistakes:
    """Of the rates without a miss, and of those with a hit."""
    rate, mean = _best(whole) or (None, None)
    yield rate, "the rate alone", "return the rate and its mean"
    yield mean, "the mean alone", "return the rate and its mean"
    yield mean and (mean, rate), "the steps come first", "the rate comes first"
    for rounded in (round, int):
        yield mean and (rate, float(rounded(mean))), "a rounded mean", "fmean, no round and no //"
    smallest = min(whole, default=None)
    smell = "the smallest rate, not that of the fewest steps"
    by_key = "key=lambda item: item[1], since min compares what comes first in a pair"
    yield whole and (smallest, fmean(whole[smallest])) or None, smell, by_key
    for counts in (whole, some):
        total = [n for of_rate in counts.values() for n in of_rate]
        yield mean and (rate, fmean(total)), "the mean over all rates", "of the best rate alone"
    yield (
        (None, None) if rate is None else (rate, mean),
        "a pair of None",
        "None alone where no rate counts",
    )


@lesson.exercise(
    "3.3",
    "Make a dictionary from each rate to its mean, only of rates with no None in their list.",
    "`if None not in counts` leaves a rate out that some seed missed the target with.",
    "min(means.items(), key=lambda item: item[1], default=None) does the rest; default is for an "
    "empty dictionary.",
)
def best_rate(answer) -> None:
    """Rates that are best by another measure; none that reaches it; one rate; tuples."""
    # The best one lies between the first two others, so it is never the smallest or the largest.
    pairs = zip(random.sample([0.025, 0.05], 2), random.sample([0.4, 0.8], 2), strict=True)
    others = [rate for pair in pairs for rate in random.sample(pair, 2)]
    best, tight = random.sample([0.1, 0.2], 2)
    first = {
        others[0]: [90, 400, 300],  # one lucky seed
        others[1]: [180, 190, 500],  # the lowest median
        best: [190, 240, 213],
        others[2]: [120, None, 130],
        tight: [225, 226, 224],
        others[3]: [None],
    }
    first = {
        rate: [n if n is None else n + random.randrange(5) for n in counts]
        for rate, counts in first.items()
    }
    first[best][0] += (1 - sum(first[best])) % 3  # so that the mean is no whole number
    seed = random.randrange(50, 150)
    cases = [
        (first,),
        ({0.3: [seed, None, seed + 9], 0.6: [None]},),
        ({0.5: [seed]},),
        ({0.8: (seed + 21,), 0.4: (seed, seed + 11), 0.2: (None,)},),
    ]

    def tell(steps: dict) -> str:
        return f"best_rate({steps})"

    _judge(answer, cases, tell, truth.best_rate, _wrong_rates, MEANS, 1e-5, RATE_REASONS)


# ---- 3.4 ------------------------------------------------------------------------------------


def _fit(batches: Sequence[float], steps: Sequence[float], power: float = 1, by: float = -1):
    """Least squares of least + slope * batch^by, with errors divided by steps^power."""
    sizes, counts = (torch.tensor(list(v), dtype=torch.float64) for v in (batches, steps))
    columns = torch.stack([torch.ones_like(sizes), sizes**by], dim=1) / counts[:, None] ** power
    return tuple(torch.linalg.lstsq(columns, counts ** (1 - power)).solution.tolist())


def _line_of_logs(batches: Sequence[float], steps: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope of log steps over log batch."""
    x = torch.tensor(list(batches), dtype=torch.float64).log()
    y = torch.tensor(list(steps), dtype=torch.float64).log()
    slope = (((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()).item()
    return (y.mean() - slope * x.mean()).item(), slope


def _fit_curve(
    batches: Sequence[float], steps: Sequence[float], error: Callable[[Tensor], Tensor]
) -> tuple[float, float]:
    """Least squares of another error, of fitted / measured steps; Gauss-Newton from the line's."""
    sizes, counts = (torch.tensor(list(v), dtype=torch.float64) for v in (batches, steps))
    columns = torch.stack([1 / counts, 1 / (sizes * counts)], dim=1)
    found = torch.tensor(_fit(batches, steps), dtype=torch.float64)
    for _ in range(30):
        ratio = (columns @ found).requires_grad_()
        errors = error(ratio)
        (slopes,) = torch.autograd.grad(errors.sum(), ratio)
        found = found - torch.linalg.lstsq(slopes[:, None] * columns, errors.detach()).solution
    return tuple(found.tolist())


def _fit_of_ends(batches: Sequence[float], steps: Sequence[float]) -> tuple[float, float]:
    """Through the first and the last measurement alone."""
    one, other = 1 / batches[0], 1 / batches[-1]
    slope = (steps[0] - steps[-1]) / (one - other)
    return steps[0] - slope * one, slope


LISTS = "a list cannot be used as a vector", "np.asarray(batches), or torch.tensor(batches)"
FIT_REASONS: Reasons = {
    words: LISTS for words in ("'int' and 'list'", "'float' and 'list'", "'list' and '")
}
RELATIVE = "errors relative to the steps: divide both sides by the steps"
INVERSE = "the steps are a straight line over 1 / batch"
BIG = "absolute errors: the smallest batch, with the most steps, decides alone"
LEVEL = "the plateau lies below every measurement"
FITTED = "errors relative to the fitted steps, not to the measured ones"
LOGS = "differences of logarithms: near to relative errors, but not the same"
EXACT = "these steps lie on the curve exactly, so it is not the weights: a formula is wrong, or a "


def _wrong_fits(batches: Sequence[float], steps: Sequence[float]) -> Mistakes:
    least, slope = _fit(batches, steps)
    critical = slope / least
    divide = "critical = slope / least"
    for (a, b), *why in (
        (_fit(batches, steps, 0), BIG, RELATIVE),
        (_fit(batches, steps, 2), "divided by the steps twice", RELATIVE),
        (_fit(batches, steps, 0.5), "divided by the root of the steps", "polyfit: w = 1 / steps"),
        (_fit_curve(batches, steps, lambda ratio: 1 / ratio - 1), FITTED, RELATIVE),
        (_fit_curve(batches, steps, torch.log), LOGS, "fitted / steps - 1, without logarithms"),
        (_fit_of_ends(batches, steps), "the first and the last batch alone", "use all of them"),
    ):
        yield (a, b / a), *why
        yield (a, b), f"the second is the slope, and {why[0]}", divide
    yield (least, slope), "the second is the slope, least * critical", divide
    yield (least, 1 / critical), "1 / the critical batch", divide
    yield (least, least * slope), "slope times least", divide
    yield (critical, least), "the critical batch comes first", "the least steps come first"
    for second in (slope, 1 / critical, critical):
        yield (slope, second), "slope and intercept have changed places", "polyfit: slope first"
    for power in (0, 1):
        a, b = _fit(batches, steps, power, by=1)
        for value in ((a, b / a), (a, ...), (b, ...)):
            yield value, "a line over the batch", INVERSE
    intercept, _ = _line_of_logs(batches, steps)
    for level in (math.exp(intercept), intercept):
        yield (level, ...), "a straight line of logarithms has no plateau", INVERSE
    yield (min(steps), ...), f"the fewest steps measured; {LEVEL}", INVERSE
    yield (steps[-1], ...), f"the steps of the last batch; {LEVEL}", INVERSE
    yield (least, ...), "the least steps are right, the critical batch is not", divide
    yield (..., critical), "the critical batch is right, the least steps are not", INVERSE
    misfit = max(abs(least + slope / b - n) / n for b, n in zip(batches, steps, strict=True))
    why = ("", RELATIVE) if misfit > 1e-6 else (f"{EXACT}search stops too early", INVERSE)
    yield (..., ...), *why


@lesson.exercise(
    "3.4",
    "With slope = least * critical it is a straight line over 1 / batch: least + slope / batch.",
    "A relative error is (least + slope / batch) / steps - 1: two columns, 1 / steps and "
    "1 / (batch * steps), that shall give 1.",
    "torch.linalg.lstsq(columns, ones) finds both, or np.polyfit(1 / batches, steps, 1, "
    "w=1 / steps), which gives the slope first. critical = slope / least.",
)
def fit_steps(answer) -> None:
    """Exact data, noisy data in no order with a size twice, and two batches."""
    cases = []
    sweeps = ([1, 2, 4, 8, 32, 128], 0), ([64, 1, 16, 4, 512, 4, 128], 0.2), ([3, 40], 0)
    for sizes, noise in sweeps:
        least = random.randrange(15, 35) + 0.44  # so that rounding to a digit shows every time
        critical = random.uniform(20, 60)
        signs = random.sample([1, -1] * len(sizes), len(sizes))
        steps = [
            least * (1 + critical / size) * (1 + sign * noise * random.uniform(0.5, 1))
            for size, sign in zip(sizes, signs, strict=True)
        ]
        cases.append((sizes, steps))

    def tell(batches: list, steps: list) -> str:
        return f"fit_steps({batches}, [{', '.join(f'{n:.4g}' for n in steps)}])"

    _judge(answer, cases, tell, truth.fit_steps, _wrong_fits, RELATIVE, 1e-3, FIT_REASONS)


# ---- 3.5 ------------------------------------------------------------------------------------

Groups = list[list[int]]


class Averaged(NamedTuple):
    """What a call gave on one rank, and what it left behind."""

    mean: object
    square: Value
    kept: bool
    pending: int


IN_PLACE = (
    "a collective changes the tensor that it is given, and returns None",
    "call it on a line of its own, and then use the tensor",
)
AVERAGE_REASONS: Reasons = {
    "'NoneType' and '": IN_PLACE,
    "'NoneType' object is not subscriptable": IN_PLACE,
    "NoneType found": IN_PLACE,
    "ReduceOp.AVG": ("this backend knows no mean", "sum, then divide by the number of ranks"),
    "must be Tensor": ("a collective takes a tensor, no number", "torch.cat or torch.tensor"),
    "of type torch.Tensor": ("a collective takes a tensor, no number", "torch.cat or torch.tensor"),
    "zero-dimensional tensor": ("torch.cat joins vectors", "square[None] is a vector of one"),
    "expanded size": ("the vector with the square is longer by one", "[:-1] and [-1]"),
}


@lesson.exercise(
    "3.5",
    "Both are means over ranks: of the gradients, and of gradient.square().sum(). Take the square "
    "before the all-reduce.",
    "all_reduce changes its argument, so hand over a copy; torch.cat([gradient, square[None]]) is "
    "a copy that holds both.",
    "dist.all_reduce(both, group=group), divided by dist.get_world_size(group); then both[:-1] and "
    "both[-1].item().",
)
def average_over_ranks(answer) -> None:
    """Four ranks; two pairs; one rank and three."""
    jobs = [([[0, 1, 2, 3]], 7), ([[0, 1], [2, 3]], 12), ([[0], [1, 2, 3]], 5)]
    seed = random.randrange(10**6)
    try:
        results = ranks(_run_averages, 4, answer, seed, jobs)
    except RankFailed as failed:
        if failed.failure.error == "NotImplementedError":
            raise
        raise _why_failed(failed, answer) from None
    if None in results:
        raise Wrong("a rank left by sys.exit()", "", "let the function end, or return")
    for job, (groups, size) in enumerate(jobs):
        gradients = torch.stack([_own(seed + job, rank, size) for rank in range(4)])
        for group in groups:
            _compare_averages([results[rank][job] for rank in group], gradients, group)


def _why_failed(failed: RankFailed, answer) -> Wrong:
    seen, *why = told(failed, answer)
    frames = failed.failure.frames
    line = where(frames[-1]) if frames else ""
    if "not part of group" in failed.failure.message and re.search(r"(?<!all_)\breduce\(", line):
        return Wrong(seen, "reduce brings the sum to one rank only", "all_reduce brings it to all")
    return because(failed.failure, AVERAGE_REASONS, seen, *why)


def _own(seed: int, rank: int, size: int) -> Tensor:
    """A rank's gradient. (size,)"""
    return 0.5 + torch.randn(size, generator=Generator().manual_seed(10 * seed + rank))


def _run_averages(answer, seed: int, jobs: list[tuple[Groups, int]]) -> list[Averaged]:
    log: list[str] = []
    log_all_reduces(log)
    results = []
    for job, (groups, size) in enumerate(jobs):
        made = [dist.new_group(group) for group in groups]
        rank = dist.get_rank()
        mine = next(made[i] for i, group in enumerate(groups) if rank in group)
        gradient = _own(seed + job, rank, size)
        given = gradient.clone()
        log.clear()
        value = answer(given, **({"group": mine} if len(groups) > 1 else {}))
        pending = log.count("sent") - log.count("waited")
        pair = value if isinstance(value, tuple | list) and len(value) == 2 else (value, value)
        mean = pair[0].detach().clone() if isinstance(pair[0], Tensor) else _plain(pair[0])
        mean = mean if pair is value or mean is None else f"one {type(value).__name__}"
        results.append(Averaged(mean, _plain(pair[1]), torch.equal(given, gradient), pending))
    return results


def _compare_averages(results: list[Averaged], gradients: Tensor, group: list[int]) -> None:
    where = "" if len(group) == 4 else f" of group {group}"
    mean, squares = gradients[group].mean(0), gradients[group].square().sum(1)
    for rank, found in zip(group, results, strict=True):
        case = f"rank {rank}{where}"
        if found.pending > 0:
            smell = "the message may still be on its way when its result is used"
            raise Wrong(f"{case} does not wait for an all_reduce", smell, "work.wait()")
        if not found.kept:
            smell = "all_reduce and /= change their tensor, which the caller still needs"
            raise Wrong(f"{case}: the gradient that was given is another one", smell, "a copy")
        if not isinstance(found.mean, Tensor):
            smell = "nothing is returned" if found.mean is None else "a pair is asked for"
            raise Wrong(f"{case} returns {found.mean}", smell, "return mean, square")
        if found.mean.shape != mean.shape:
            seen = f"{case} returns shape {tuple(found.mean.shape)}, not {tuple(mean.shape)}"
            raise Wrong(seen, "", "the gradient (P,) comes first, without the square: both[:-1]")
        if not torch.allclose(found.mean.double(), mean.double(), atol=1e-5):
            seen = f"{case} has {_row(found.mean)} as mean gradient, not {_row(mean)}"
            raise Wrong(seen, *_why_mean(found.mean, gradients, group, rank, results))
        if not _same(found.square, squares.mean().item()):
            seen = f"{case} has {_text(found.square)} as mean square, not {squares.mean():.5g}"
            raise Wrong(seen, *_why_square(found.square, gradients, group, rank))


def _row(values: Tensor) -> str:
    return f"[{', '.join(f'{value:.4g}' for value in values.flatten()[:4].tolist())}, ...]"


PASS_ON = "all_reduce(..., group=group), dist.get_world_size(group)"


def _why_mean(
    found: Tensor, gradients: Tensor, group: list[int], rank: int, results: list[Averaged]
) -> tuple[str, str]:
    inside, count = gradients[group], len(group)
    first = results[0].mean
    if rank != group[0] and isinstance(first, Tensor) and torch.allclose(first, inside.mean(0)):
        return "only the first rank of the group has it", "all_reduce brings it to all"
    mistakes = [
        (gradients.mean(0), "`group` is not passed on", PASS_ON),
        (gradients.sum(0) / count, "`group` is not passed on to all_reduce", PASS_ON),
        (inside.sum(0) / 4, "divided by the number of ranks in the whole job", PASS_ON),
        (gradients[rank], "this rank's own gradient: nothing is averaged", "all_reduce"),
        (gradients[rank] / count, "this rank's own gradient, divided", "all_reduce"),
        (inside.sum(0), "a sum: large batches would take longer steps", "divide by the ranks"),
        (inside.mean(0) / count, "divided by the ranks twice", "once"),
        (inside.amax(0), "a maximum", "ReduceOp.SUM"),
        (inside.median(0).values, "a median", "the mean"),
    ]
    for value, *why in mistakes:
        if torch.allclose(found.double(), value.double(), atol=1e-5):
            return tuple(why)
    return "", "the sum over the ranks of `group`, divided by their number"


def _why_square(found: Value, gradients: Tensor, group: list[int], rank: int) -> tuple[str, str]:
    inside, count = gradients[group], len(group)
    every, squares = gradients.square().sum(1), inside.square().sum(1)
    before = "each rank's own square first, then the mean of these"
    of_mean = inside.mean(0).square().sum()
    mistakes = [
        (of_mean, "the square of the averaged gradient: the noise has gone from it", before),
        (of_mean.sqrt(), "the length of the averaged gradient", before),
        (every[rank], "this rank's own square: it is not averaged", "send it with the gradient"),
        (every[rank] / count, "this rank's own square, divided", "send it with the gradient"),
        (squares.sum(), "a sum over the ranks", "divide it by their number as well"),
        (squares.mean() / count, "divided by the ranks twice", "once"),
        (squares.sqrt().mean(), "lengths, not squared", "gradient.square().sum(), no root"),
        (squares.mean().sqrt(), "the root was taken", "squared lengths have no root"),
        (squares.sqrt().mean() ** 2, "the square of the mean length", before),
        (squares.sqrt().sum(), "lengths, not squared, and their sum", before),
        (inside.square().mean(), "divided by the number of entries as well", ".sum(), not .mean()"),
        (inside.sum(1).square().mean(), "the square of the sum of the entries", "square, then sum"),
        (inside.sum(0).square().sum(), "the square of the summed gradient", before),
        (every.mean(), "`group` is not passed on", PASS_ON),
        (every.sum() / count, "`group` is not passed on to all_reduce", PASS_ON),
        (squares.sum() / 4, "divided by the number of ranks in the whole job", PASS_ON),
        (squares.max(), "a maximum", "the mean"),
    ]
    for value, *why in mistakes:
        if _same(found, value.item()):
            return tuple(why)
    return ("nothing is returned" if found is None else ""), before


# ---- 3.6 ------------------------------------------------------------------------------------


EQUATIONS = "small_square = true + V / small, large_square = true + V / large: solve for V, true"
FIRST_MEANS = "average the squares first, then solve and divide once"
RATIO = "V / true square"


def _solve(s: float, b: float, small: int, large: int) -> tuple[float, float]:
    """Variance and true square, of the mean squares at a small and at a big batch."""
    return (s - b) / (1 / small - 1 / large), (large * b - small * s) / (large - small)


def _wrong_means(
    small_squares: list[float], large_squares: list[float], small: int, large: int
) -> Mistakes:
    """The right formula, with other means."""

    def scale(s: float, b: float) -> float:
        variance, true = _solve(s, b, small, large)
        return variance / true

    ratios = list(map(scale, small_squares, large_squares))
    negative = "the true square of a single pair is noise, it can even be negative"
    yield fmean(ratios), f"a mean of ratios: {negative}", FIRST_MEANS
    yield median(ratios), f"a median of ratios: {negative}", FIRST_MEANS
    for pick, *why in (
        (_mean_length, "lengths, not squared: noise adds up in squares", "they are squared"),
        (lambda values: _mean_length(values) ** 2, "the square of the mean length", FIRST_MEANS),
        (lambda values: fmean(v * v for v in values), "squared again", "they are squares"),
        (median, "a median: squares are skewed, and the equations hold for means", "fmean"),
        (sum, "sums: the two lists need not be equally long", "fmean"),
        (lambda values: values[0], "the first measurement alone", "fmean"),
        (lambda values: values[-1], "the last measurement alone", "fmean"),
    ):
        yield scale(pick(small_squares), pick(large_squares)), *why
    yield scale(fmean(large_squares), fmean(small_squares)), "the squares are swapped", EQUATIONS


def _mean_length(squares: list[float]) -> float:
    return fmean(map(math.sqrt, squares))


def _wrong_noises(
    small_squares: list[float], large_squares: list[float], small: int, large: int
) -> Mistakes:
    yield from _wrong_means(small_squares, large_squares, small, large)
    s, b = fmean(small_squares), fmean(large_squares)
    yield from _wrong_ratios(s, b, small, large)
    yield from _wrong_signs(s, b, small, large)
    spread = "the variance of the squared lengths; V is the variance of the gradients"
    for of in (variance, pvariance):
        found = of(small_squares) if len(small_squares) > 1 or of is pvariance else math.nan
        for below in (1, s, b, _solve(s, b, small, large)[1]):
            for factor in (1, small):
                yield found * factor / below, spread, EQUATIONS


def _wrong_signs(s: float, b: float, small: int, large: int) -> Mistakes:
    """Signs, sizes and squares that belong to other ones."""
    variance, true = _solve(s, b, small, large)
    v, t = _solve(s, b, 8, 32)
    yield v / t, "the sizes 8 and 32 are written into it", "use `small` and `large`"
    turned = "V comes out negative: a square at the small batch is the larger one"
    added = "the noise is added to the true square once more: V / batch has to go from it"
    for square, size in ((s, small), (b, large)):
        yield -variance / (square + variance / size), turned, EQUATIONS
        yield variance / (square + variance / size), added, EQUATIONS
    of_other = "V / batch is taken from the square of the other batch"
    yield variance / (b - variance / small), of_other, EQUATIONS
    yield variance / (s - variance / large), of_other, EQUATIONS


def _wrong_ratios(s: float, b: float, small: int, large: int) -> Mistakes:
    variance, true = _solve(s, b, small, large)
    right = variance / true
    yield variance, "V alone", RATIO
    yield true, "the true square alone", RATIO
    yield 1 / right, "upside down", RATIO
    yield -right, "a sign is turned in one of the two", EQUATIONS
    yield variance / b, "large_square for the true square: noise is left in it", EQUATIONS
    yield variance / s, "small_square for the true square: it is mostly noise", EQUATIONS
    swapped = (large * s - small * b) / (large - small)
    why = "small and large have changed places in the true square", EQUATIONS
    yield variance / swapped, *why
    yield -variance / swapped, *why
    for below in (b, true):
        yield small * (s - b) / below, "as if the large batch had no noise", EQUATIONS
    inverse = "1 / small - 1 / large"
    yield (s - b) / (1 / small + 1 / large) / true, "1 / small + 1 / large", f"{inverse}: minus"
    yield (s - b) / (large - small) / true, "V / batch, not V * batch", inverse
    yield (s - b) * (1 / small - 1 / large) / true, f"multiplied by {inverse}", "divide by it"
    yield (s - b) / true, f"not divided by {inverse}", EQUATIONS
    yield right / (large - small), "the true square is not divided by large - small", EQUATIONS
    yield right * (large + small) / (large - small), "divided by large + small", "large - small"
    yield right / true, "divided by the square of the true square", "it is a square already"
    yield variance / math.sqrt(true), "divided by the length, not by its square", RATIO
    yield math.sqrt(right), "a root", RATIO


@lesson.exercise(
    "3.6",
    "Take the mean of each list first. Then there are two equations with two unknowns.",
    "Subtract the two equations: the true square goes, and V is left, times 1/small - 1/large.",
    "Multiply each by its batch size and subtract: V goes, and the true square is left, times "
    "large - small. The result is V / true square.",
)
def noise_scale(answer) -> None:
    """Lists of one length, of two lengths, and single measurements."""
    cases = []
    for counts in ((6, 6), (5, 3), (1, 1)):
        small = random.randrange(3, 17)
        large = small * random.randrange(3, 7) + random.randrange(3)
        true, variance = random.uniform(1, 2), random.uniform(30, 60)
        lists = []
        for count, size in zip(counts, (small, large), strict=True):
            scatter = [random.uniform(0.5, 1.5) for _ in range(count)]
            lists.append([(true + variance / size) * way / fmean(scatter) for way in scatter])
        cases.append((*lists, small, large))

    def tell(small_squares: list, large_squares: list, small: int, large: int) -> str:
        lists = (", ".join(f"{v:.3g}" for v in values) for values in (small_squares, large_squares))
        return f"noise_scale([{']; ['.join(lists)}]; {small}, {large})"

    _judge(answer, cases, tell, truth.noise_scale, _wrong_noises, EQUATIONS)
