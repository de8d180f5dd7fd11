"""Sweeps over batch sizes: the time of a step, steps to a target, the best rate, and the law."""

import random
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from types import BuiltinFunctionType
from typing import NamedTuple

import torch
from torch import Tensor

from manyhands.batch_size import scaling
from manyhands.checks.engine.spec import Call, Spec
from manyhands.checks.engine.values import integer, malformed, number, same, show

# ---- 3.1 ------------------------------------------------------------------------------------


class Timing(NamedTuple):
    """A call of `throughput`, and how long the device works on each step."""

    batch: int
    warm_up: int
    blocks: int
    steps: int
    times_s: tuple[float, ...]


SLOW_S = 0.5
LAUNCH_S = 2**-10  # for which `step` keeps the processor; then the device begins
LOSS = 0.7321
CLOCKS = ("perf_counter", "monotonic", "time", "process_time", "thread_time")


def timings() -> list[Timing]:
    """Blocks of one step; an odd and an even number, with one slow step; one block; no warm-up."""
    found = []
    for warm_up, blocks, steps in ((1, 3, 1), (1, 5, 4), (3, 4, 3), (2, 1, 5), (0, 3, 6)):
        shares = [random.randint(2, 9) for _ in range(blocks * steps)]
        times_s = [(64 * share + random.randint(0, 31)) / 2**14 for share in shares]
        times_s[random.randrange(steps)] = SLOW_S if blocks > 1 else times_s[0]
        batch = random.randint(20, 90)
        found.append(Timing(batch, warm_up, blocks, steps, (SLOW_S,) * warm_up + (*times_s,)))
    return found


class Device:
    """Works on after `step` has returned, as a GPU does. Its time is made up: nobody waits."""

    def __init__(self, times_s: Sequence[float]) -> None:
        self.times_s = times_s
        self.now_s = 100.0
        self.busy_s = 0.0  # of the processor
        self.free_at_s = 0.0
        self.num_steps = 0
        self.num_looks = 0
        self.num_waits = 0

    def step(self) -> float:
        """Start work, and return a loss."""
        took_s = self.times_s[min(self.num_steps, len(self.times_s) - 1)]
        self.now_s += LAUNCH_S
        self.free_at_s = max(self.now_s, self.free_at_s) + took_s
        self.busy_s += LAUNCH_S
        self.num_steps += 1
        return LOSS

    def synchronize(self) -> None:
        """Wait until all work is done."""
        self.num_waits += 1
        self.now_s = max(self.now_s, self.free_at_s)

    def clock(self, name: str) -> Callable:
        """A clock of the module time that shows this device's time."""

        def read() -> float:
            counts_waiting = not name.startswith(("process", "thread"))
            self.num_looks += counts_waiting
            seconds = self.now_s if counts_waiting else self.busy_s
            return round(seconds * 10**9) if name.endswith("_ns") else seconds

        return read


@contextmanager
def clocks_of(device: Device, answer: object) -> Iterator[None]:
    """All clocks show the device's time: those of `time`, and those that an answer has imported."""
    fakes = {
        getattr(time, name): device.clock(name)
        for clock in CLOCKS
        for name in (clock, f"{clock}_ns")
    }
    places = [vars(time), vars(timeit), getattr(answer, "__globals__", {})]
    kept = []
    for space in places:
        for name, value in list(space.items()):
            if isinstance(value, BuiltinFunctionType) and value in fakes:
                kept.append((space, name, value))
                space[name] = fakes[value]
    cells = [cell for cell in getattr(answer, "__closure__", None) or () if _is_clock(cell, fakes)]
    clocks = [cell.cell_contents for cell in cells]
    for cell in cells:
        cell.cell_contents = fakes[cell.cell_contents]
    try:
        yield
    finally:
        for space, name, value in kept:
            space[name] = value
        for cell, clock in zip(cells, clocks, strict=True):
            cell.cell_contents = clock


def _is_clock(cell: object, fakes: dict) -> bool:
    try:
        return isinstance(cell.cell_contents, BuiltinFunctionType) and cell.cell_contents in fakes
    except ValueError:  # an empty cell
        return False


def throughput_seen(answer: Callable, case: Timing) -> dict:
    """The rate, and how many steps were done; on a device with a clock of its own."""
    device = Device(case.times_s)
    with clocks_of(device, answer):
        rate = answer(device.step, *case[:4], device.synchronize)
    return {
        "a clock of the module time that counts waiting is read": device.num_looks > 0,
        "synchronize is called": device.num_waits > 0,
        "steps done": device.num_steps,
        "samples per second": float(number(rate)),
    }


def block_times(case: Timing) -> list[float]:
    """The seconds of each block, the shortest first."""
    device = Device(case.times_s[case.warm_up :])
    times_s = []
    for _ in range(case.blocks):
        start_s = device.now_s
        for _ in range(case.steps):
            device.step()
        device.synchronize()
        times_s.append(device.now_s - start_s)
    return sorted(times_s)


def is_rate(found: dict, wanted: dict, case: Timing) -> bool:
    """Of an even number of times, any between the two in the middle will do."""
    times_s = block_times(case)
    low = case.batch * case.steps / times_s[case.blocks // 2]
    high = case.batch * case.steps / times_s[(case.blocks - 1) // 2]
    rate = found["samples per second"]
    return low * 0.9999 <= rate <= high * 1.0001 and same(
        {**found, "samples per second": 0},
        {
            **wanted,
            "samples per second": 0,
        },
    )


def of_all_blocks(
    step: Callable, batch: int, warm_up: int, blocks: int, steps: int, synchronize: Callable
) -> float:
    """The clock is read before the first block and after the last."""
    for _ in range(warm_up):
        step()
    synchronize()
    start_s = time.perf_counter()
    for _ in range(blocks * steps):
        step()
    synchronize()
    return batch * blocks * steps / (time.perf_counter() - start_s)


START = "start_s = time.perf_counter()"
STEPS = "for _ in range(steps):\\n            step()\\n"
RATE = "A block has batch * steps samples: divide them by median(times)."
throughput = Spec(
    todo="3.1",
    truth=scaling.throughput,
    cases=timings,
    observe=throughput_seen,
    same=is_rate,
    tell=lambda case: (
        f"throughput(batch={case.batch}, warm_up={case.warm_up}, blocks={case.blocks}, "
        f"steps={case.steps}), where the device works for "
        f"{show([1000 * t for t in case.times_s[case.warm_up :]], 3)} ms on the steps that count,"
    ),
    advice={
        "": RATE,
        "a clock of the module time that counts waiting is read": "Use time.perf_counter().",
        "steps done": "There are warm_up steps, and then `blocks` times `steps` steps.",
    },
    reasons={
        words: ("The device need not be CUDA's.", "Call the argument: synchronize().")
        for words in ("CUDA enabled", "NVIDIA driver", "no CUDA", "device is not available")
    },
    hints=(
        "First come warm_up steps that nobody times. Then comes a loop over the blocks, with a "
        "list of times.",
        "For each block: wait, look at the clock, do all its steps, wait, look at the clock. The "
        "first wait is for the work that was started before.",
        "time.perf_counter() is the clock, and statistics.median(times) is the time in the middle. "
        "The result is batch * steps divided by it.",
    ),
    mistakes=r"""
        range(warm_up) => range(0) ::
            The warm-up is missing. | There are warm_up steps, and then the blocks.
        range(warm_up) => range(0)
        in range(blocks) => in range(warm_up + blocks) ::
            The warm-up is counted in blocks and timed. | It is warm_up steps, before the clock.
        {STEPS}        synchronize()\n => {STEPS} :: The clock stops before the device has done the
            work. | Call synchronize() before each look at the clock.
        synchronize()\n        {START} => {START} ::
            The clock starts while the device still works on earlier steps.
        synchronize()\n        {START} => {START}
        {STEPS}        synchronize()\n => {STEPS} ::
            `synchronize` is never called, so what is timed is the start of the work.
        {STEPS} => for _ in range(steps):\n            step()\n            synchronize()\n ::
            Every step is waited for, so the processor cannot prepare the next one meanwhile. | Call
            synchronize() only before and after a block.
        median(times_s) => fmean(times_s) :: This is the mean of the blocks, which one slow step
            moves. | Use statistics.median(times).
        median(times_s) => min(times_s) :: This is the rate of the fastest block.
        median(times_s) => max(times_s) :: This is the rate of the slowest block.
        batch * steps / median(times_s) => batch / median(times_s) ::
            The samples of one step are divided by the time of a block. | {RATE}
        batch * steps / median(times_s) => median(times_s) / (batch * steps) ::
            These are seconds per sample.
        batch * steps / median(times_s) => steps / median(times_s) ::
            These are steps per second: the batch is left out.
        batch * steps / median(times_s) => batch * steps / sum(times_s) ::
            The samples of one block are divided by the time of all blocks.
        {START} => start_s = time.process_time()
        append(time.perf_counter() - start_s) => append(time.process_time() - start_s) ::
            This clock counts the processor's work, and no waiting. | Use time.perf_counter().
        instead of_all_blocks :: All blocks are timed as one, so a single slow step moves the
            result. | Time each block by itself, and take the median.
    """,
    module=globals(),
)

# ---- 3.2 ------------------------------------------------------------------------------------


class Training(NamedTuple):
    """A call of `steps_to_target`; the accuracies after 0, 1, 2, ... steps are known."""

    accuracies: tuple[float, ...]
    target: float
    patience: int
    every: int
    max_steps: int


def trainings() -> list[Training]:
    """By luck once; just below the target, equal to it; no evaluation; a short row at the end."""
    good, bad, near = 0.9, 0.25, 0.7999
    at = 0.8
    by_luck = [good, bad, bad, good, bad, at, good, good, bad, good]
    by_twos = [good, good, good, bad, bad, good, at, bad, near, good, good, bad, good, good, good]
    long = [bad] * 40 + [good] * 8 + [bad] * 2 + [good] * 40
    below = [-3.0, -2.0, -0.5, -1.0, 0.0, 0.0, 0.0, 1.0]
    return [
        Training((good, bad, at, bad), 0.8, 1, 1, 3),
        Training((*by_luck, good), 0.8, 2, 1, 10),
        Training((*by_twos, good), 0.8, 2, 2, 15),
        Training((*by_luck[:5], good, good), 0.8, 3, 1, 6),
        Training((good,) * 4, 0.8, 1, 4, 3),
        Training((bad, good, bad, good, good, good, 0.7999999, good), 0.8, 2, 3, 7),
        Training(tuple(below), 0.0, 3, 1, 7),
        Training(tuple(long), 0.8, 3, 5, 90),
        Training(tuple([bad] * 6 + [0.79, 0.81, 0.79, 0.81, 0.796, good, good]), 0.8, 2, 1, 10),
    ]


def training_seen(answer: Callable, case: Training) -> dict:
    """The result, after which steps the model was evaluated, and whether max_steps was kept."""
    done = 0
    looks: list[int] = []

    def step() -> None:
        nonlocal done
        done += 1
        if done > case.max_steps + 60:
            raise RuntimeError(f"step was called {done} times, and max_steps is {case.max_steps}")

    def evaluate() -> float:
        looks.append(done)
        if len(looks) > 3 * case.max_steps + 60:
            raise RuntimeError(f"evaluate was called {len(looks)} times")
        return case.accuracies[min(done, len(case.accuracies) - 1)]

    found = answer(step, evaluate, case.target, case.patience, case.every, case.max_steps)
    return {
        "the result": found if found is None else integer(found),
        "the steps after which the model is evaluated": looks,
        "no more than max_steps steps are done": done <= case.max_steps,
    }


def tell_training(case: Training) -> str:
    """The call, with the accuracies at the evaluations."""
    at = range(case.every, case.max_steps + 1, case.every)
    seen = show([case.accuracies[index] for index in at], 8)
    return (
        f"steps_to_target(target={case.target:g}, patience={case.patience}, every={case.every}, "
        f"max_steps={case.max_steps}), with the accuracies {seen} at the evaluations,"
    )


def of_a_mean(
    step: Callable, evaluate: Callable, target: float, patience: int, every: int, max_steps: int
) -> int | None:
    """The mean of `patience` accuracies is compared."""
    seen = []
    for num_steps in range(1, max_steps + 1):
        step()
        if num_steps % every == 0:
            seen.append(evaluate())
            if len(seen) >= patience and fmean(seen[-patience:]) >= target:
                return num_steps - (patience - 1) * every
    return None


FIRST = "num_steps - (patience - 1) * every"
ROW = "in_a_row + 1 if evaluate() >= target else 0"
FIRST_OF_ROW = f"The first evaluation of the row was after {FIRST} steps."
steps_to_target = Spec(
    todo="3.2",
    truth=scaling.steps_to_target,
    cases=trainings,
    observe=training_seen,
    tell=tell_training,
    advice={
        "": "Count the good evaluations in a row, and begin at 0 again after a miss.",
        "the steps after which the model is evaluated": (
            "Evaluate after every `every` steps, and return as soon as the row is long enough."
        ),
    },
    reasons="""
        step was called :: max_steps limits the number of steps. | End the loop there.
        evaluate was called :: The model does not change between steps. | Call step() first.
        '>=' not supported between instances of 'function' ::
            evaluate is a function, and its value is needed. | Write evaluate(), with brackets.
    """,
    hints=(
        "Count how many evaluations in a row were good. A miss sets the count back to 0.",
        "for num_steps in range(1, max_steps + 1): call step(), and where num_steps % every == 0 "
        "also evaluate().",
        f"When the count is `patience`, the first of the row was after {FIRST} steps. Behind the "
        "loop stands return None.",
    ),
    mistakes="""
        {ROW} => 1 if evaluate() >= target else 0
        in_a_row == patience => in_a_row
        return {FIRST} => return num_steps ::
            A single good evaluation is taken for the target. | It has to stay reached.
        evaluate() >= target => evaluate() > target ::
            An accuracy equal to the target is not counted. | "At least" is >=.
        return {FIRST} => return num_steps ::
            This is the last evaluation of the row, and not the first. | {FIRST_OF_ROW}
        return {FIRST} => return num_steps // every ::
            This is a number of evaluations. | Count steps.
        return {FIRST} => return num_steps - patience * every ::
            This is one evaluation before the first of the row. | {FIRST_OF_ROW}
        return {FIRST} => return num_steps - patience + 1 ::
            `every` is left out of the way back to the first of the row.
        {ROW} => in_a_row + 1 if evaluate() >= target else in_a_row ::
            A miss does not set the row back. | The evaluations have to be good in a row.
        num_steps % every == 0 => True
        return {FIRST} => return num_steps - (patience - 1) ::
            The model is evaluated after each step, and `every` is not used. | num_steps % every
        num_steps % every == 0 => num_steps % every == 0 or num_steps == max_steps ::
            The model is also evaluated after max_steps. | Only every `every` steps.
        range(1, max_steps + 1) => range(1, max_steps) ::
            The last step that is allowed is not done. | range(1, max_steps + 1)
        return None => return max_steps ::
            max_steps is returned where the target was not reached. | Return None there.
        return None => return num_steps - (in_a_row - 1) * every if in_a_row else None ::
            A row that is shorter than `patience` counts at the end.
        evaluate() >= target => round(evaluate(), 2) >= target :: An accuracy just below the target
            counts, as it does after rounding. | Compare it as it is.
        instead of_a_mean :: The mean of the row is compared, and not each accuracy. |
    """,
    module=globals(),
)

# ---- 3.3 ------------------------------------------------------------------------------------


def sweeps() -> list[Call]:
    """One rate; misses; lists of unequal length; a miss with every rate; 0 steps; many seeds."""
    a, b, c = (random.randint(20, 30) for _ in range(3))
    return [
        ({0.5: [a, b + 40, c + 1]},),
        ({0.1: [90, 110, 131], 0.2: [a, None, b], 0.4: [70, 45, 60], 0.8: [1, 300, 90]},),
        ({0.05: [None, None], 0.1: [12, None]},),
        ({0.4: [50, 64], 0.1: [10, 20, 61, 110], 0.2: [57, 58, 57], 0.3: [3, None, 3]},),
        ({1: [None], 2: [9, 9, 0, 9, 9, 9], 3: [0, 15, 16, 1, 12, 2], 4: [5, 5, None]},),
        ({4.0: (31, 32), 2.0: (40, 21), 1.0: (70, 71, 72), 8.0: (None, 2)},),
    ]


def rate_and_mean(value: object) -> list | None:
    """None, or two numbers."""
    if value is None:
        return None
    pair = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(pair, list | tuple) or len(pair) != 2 or None in pair:
        raise malformed(value, "a pair (rate, mean number of steps), or None")
    return [float(number(one)) for one in pair]


ITEMS = "{rate: fmean(counts) for rate, counts in steps.items() if None not in counts}"
HITS = "[n for n in counts if n is not None]"
ALL_HIT = "A rate counts only if no seed missed the target."
best_rate = Spec(
    todo="3.3",
    truth=scaling.best_rate,
    cases=sweeps,
    form=rate_and_mean,
    advice={"": f"{ALL_HIT} Of those, take the one with the smallest mean."},
    reasons="""
        min() iterable argument is empty :: Where a seed missed the target with every rate, nothing
            is left to choose from. | Return None there; min takes default=None.
        min() arg is an empty sequence ::
            Where a seed missed the target with every rate, nothing is left to choose from.
        NoneType :: None, for a seed that missed the target, is among the numbers. | {ALL_HIT}
    """,
    hints=(
        "Leave out every rate with a None among its seeds.",
        "{rate: fmean(counts) for rate, counts in steps.items() if None not in counts} are the "
        "means of the rates that count.",
        "min(means.items(), key=lambda item: item[1], default=None) is the pair with the smallest "
        "mean, or None.",
    ),
    mistakes="""
        fmean(counts) for rate, counts in steps.items() if None not in counts => fmean({HITS}) for
            rate, counts in steps.items() if {HITS} ::
            The seeds that missed are left out, and the rate still counts. | {ALL_HIT}
        fmean(counts) for rate, counts in steps.items() if None not in counts => fmean(n or 0 for n
            in counts) for rate, counts in steps.items() :: A seed that missed counts as 0 steps.
        if None not in counts => if all(counts) ::
            A rate with a seed of 0 steps is left out. | Only None is a miss.
        if None not in counts => if counts[-1] is not None and counts[0] is not None ::
            Only the first and the last seed are asked for a miss. | {ALL_HIT}
        fmean(counts) => min(counts) ::
            Each rate is judged by its best seed. | Take the mean over the seeds.
        fmean(counts) => max(counts) :: Each rate is judged by its worst seed.
        fmean(counts) => median(counts) :: Each rate is judged by a median.
        fmean(counts) => sum(counts) :: The steps of all seeds are added up.
        fmean(counts) => round(fmean(counts)) :: The means are rounded. | Return the mean as it is.
        return min(means.items() => return max(means.items() ::
            This is the rate with the most steps. | Take the fewest.
        return min(means.items(), key=lambda item: item[1], default=None) => return
            min(means.items(), default=None) ::
            This is the smallest rate, and not that of the fewest steps. | min takes key=.
        return min(means.items(), key=lambda item: item[1], default=None) => return
            next(iter(means.items()), None) ::
            This is the first rate that no seed missed. | Take the one with the fewest steps.
        return min(means.items(), key=lambda item: item[1], default=None) => return min(((m, r) for
            r, m in means.items()), default=None) ::
            The mean comes first, and the rate second. | Return (rate, mean).
    """,
    module=globals(),
)

# ---- 3.4 ------------------------------------------------------------------------------------


def fits() -> list[Call]:
    """Two sizes; some, off the law and in no order; many and large ones."""
    least, critical = random.randint(30, 60), random.randint(12, 40)

    def steps_of(batches: list[int], off: float) -> list[float]:
        return [
            round(least * (1 + critical / batch) * (1 + off * (-1) ** index * (index % 3)), 1)
            for index, batch in enumerate(batches)
        ]

    some, many = [16, 2, 64, 4, 32, 8], [2**index for index in range(1, 13)]
    return [
        ([4, 64], steps_of([4, 64], 0)),
        (some, steps_of(some, 0.1)),
        (many, [100 * n for n in steps_of(many, 0.15)]),
    ]


def two_numbers(value: object) -> Tensor:
    """Two numbers as float32, which is as much as an answer's tensor may keep."""
    pair = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise malformed(value, "two numbers (least steps, critical batch)")
    return torch.tensor([float(number(one)) for one in pair])


def straight_in_logs(batches: Sequence[float], steps: Sequence[float]) -> tuple[float, float]:
    """A power law: a straight line through the logarithms."""
    x, y = (torch.tensor(list(v), dtype=torch.float64).log() for v in (batches, steps))
    columns = torch.stack([torch.ones_like(x), x], dim=1)
    constant, slope = torch.linalg.lstsq(columns, y).solution.tolist()
    return 2.718281828459045**constant, -slope


COLUMNS = "[1 / counts, 1 / (sizes * counts)]"
ONES = "torch.ones_like(counts)"
RELATIVE = "Divide each equation by its number of steps: least / n + slope / (batch * n) = 1."
fit_steps = Spec(
    todo="3.4",
    truth=scaling.fit_steps,
    cases=fits,
    form=two_numbers,
    limit_s=15.0,  # an answer may import torch.optim
    tell=lambda case: f"fit_steps({show(case.batches)}, {show(case.steps, 5)})",
    same=lambda found, wanted, case: bool(torch.isclose(found, wanted, rtol=1e-3).all()),
    say=lambda found, wanted: f"gives {show(found.tolist(), 5)}, not {show(wanted.tolist(), 5)}",
    advice={"": RELATIVE},
    reasons="""
        unsupported operand type(s) for /: 'int' and 'list' ::
            A list cannot be divided like a vector. | Make tensors or arrays of the lists first.
    """,
    hints=(
        "steps = least + slope / batch is linear in two unknowns: least, and slope = least * "
        "critical. So least squares solves it without a search.",
        RELATIVE,
        "torch.linalg.lstsq(columns, ones).solution gives least and slope, where the columns are "
        "1 / n and 1 / (batch * n). The critical batch is slope / least.",
    ),
    mistakes=r"""
        {COLUMNS} => [torch.ones_like(counts), 1 / sizes]
        columns, {ONES} => columns, counts ::
            The errors are absolute, so the smallest batches decide. | {RELATIVE}
        {COLUMNS} => [1 / counts**2, 1 / (sizes * counts**2)]
        columns, {ONES} => columns, 1 / counts :: The errors are divided by the steps twice.
        {COLUMNS} => [1 / counts**0.5, 1 / (sizes * counts**0.5)]
        columns, {ONES} => columns, counts**0.5 :: The errors are divided by the root of the steps.
        return least, slope / least => return least, slope :: The second number is least * critical.
            | slope is least * critical, so the result is (least, slope / least).
        return least, slope / least => return least, least / slope ::
            The second number is 1 divided by the critical batch.
        return least, slope / least => return slope / least, least ::
            The two results have changed places.
        return least, slope / least => return slope, least / slope ::
            The two unknowns have changed places.
        1 / (sizes * counts)] => sizes / counts] ::
            The fit is a straight line over the batch. | The steps fall with 1 / batch.
        list(batches) => list(batches[:: len(batches) - 1])
        list(steps) => list(steps[:: len(steps) - 1]) ::
            Only the first and the last batch size are used. | Use all of them.
        return least, slope / least => least = counts.min().item()\n    return least, (sizes *
            (counts / least - 1)).mean().item() ::
            The fewest steps that were measured are taken for the least. | {RELATIVE}
        instead straight_in_logs :: This is a power law, a straight line through logarithms. | The
            law levels off at the least steps.
        after lambda pair: tuple(map(round, pair)) :: The results are rounded. |
    """,
    module=globals(),
)
