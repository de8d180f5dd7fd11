"""Checks of lesson 01. Truth is the lesson's own arithmetic; mistakes are known by what they give.

The answers run in one process. Where numbers are drawn, the check reads from the results which
samples were drawn, so any right way to draw them passes.
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from manyhands.checks import Lesson, Wrong
from manyhands.checks.shared import alone, number
from manyhands.gradient_descent import descent as truth

lesson = Lesson("gradient_descent")
hint, summary, ready, keep = lesson.hint, lesson.summary, lesson.ready, lesson.keep

Mistakes = Iterable[tuple[object, str, str]]  # what it would give, what it smells of, what to try


# ---- what an answer gives -------------------------------------------------------------------


def _close(one: Tensor, other: Tensor) -> bool:
    """Equal but for rounding, which 32 bits and another order of operations change."""
    if one.shape != other.shape or not other.isfinite().all():
        return False
    return bool((one.double() - other.double()).norm() <= 1e-4 * (0.1 + other.double().norm()))


def _named(found: Tensor, mistakes: Mistakes, smell: str, advice: str) -> tuple[str, str]:
    """Smell and hint of the mistake that gives this value."""
    for wrong, *why in mistakes:
        if _close(found, torch.as_tensor(wrong)):
            return why[0], why[1]
    return smell, advice


def _plain(value: object) -> object:
    """A tensor of decimals without its graph; of all else its form in words."""
    if isinstance(value, Tensor):
        return value.detach().clone() if value.is_floating_point() else f"a {value.dtype} tensor"
    if value is None:
        return "None"
    size = f" of {len(value)}" if hasattr(value, "__len__") else ""
    return f"a {type(value).__name__}{size}"


def _tensor(value: object, shape: tuple[int, ...], case: str, advice: str) -> Tensor:
    """The value, if it is a tensor of this shape; -1 stands for any length."""
    if not isinstance(value, Tensor):
        smell = "nothing is returned" if value == "None" else "a tensor of decimals is asked for"
        raise Wrong(f"{case} gives {value}", smell, advice)
    fits = len(value.shape) == len(shape) and all(
        wanted in (-1, size) for size, wanted in zip(value.shape, shape, strict=True)
    )
    if not fits:
        wanted = str(shape).replace("-1", "steps + 1")
        raise Wrong(f"{case} has shape {tuple(value.shape)}, not {wanted}", "", advice)
    if not value.isfinite().all():
        raise Wrong(f"{case} gives {_row(value)}", "that is no finite number", advice)
    return value


def _row(values: Tensor) -> str:
    return "[" + ", ".join(f"{value:.4g}" for value in values.flatten()[:6].tolist()) + "]"


def _samples(num_samples: int) -> tuple[Tensor, Tensor]:
    """Samples near a line. The valley of their loss lies at 45 degrees, its bottom above 0."""
    x = torch.randn(num_samples, generator=_generator(random.randrange(10**6)))
    if num_samples > 1:
        x = 0.4 + 0.9 * (x - x.mean()) / x.std(correction=0)
    noise = torch.randn(num_samples, generator=_generator(random.randrange(10**6)))
    return x, random.uniform(1, 2) * x + random.uniform(1, 2) + 0.1 * noise


def _far() -> Tensor:
    """Parameters away from the minimum, w and b by different lengths."""
    return torch.tensor([random.uniform(-3, -2), random.uniform(4, 6)])


def _generator(seed: int) -> Generator:
    return Generator().manual_seed(seed)


# ---- 1.1 ------------------------------------------------------------------------------------


class Slope(NamedTuple):
    """The arguments of one call of `gradient`."""

    parameters: Tensor
    x: Tensor
    y: Tensor


@lesson.exercise(
    "1.1",
    "The error of a sample is w x + b - y. The loss is the mean of its square.",
    "The derivative of error^2 is 2 error times the derivative of the error: x for w, 1 for b.",
    "dL/dw is the mean of 2 * error * x, and dL/db the mean of 2 * error. torch.stack joins two "
    "scalar tensors to one of shape (2,).",
)
def gradient(answer) -> None:
    """Some samples, and one alone."""
    cases = [Slope(_far(), *_samples(size)) for size in (random.randrange(7, 20), 3, 1)]

    def tell(parameters: Tensor, x: Tensor, y: Tensor) -> str:
        return f"gradient({_row(parameters)}, {len(x)} sample{'s' * (len(x) > 1)})"

    advice = "return torch.stack([dw, db]): two numbers in one tensor"
    seen = alone(answer, cases, tell, {}, lambda answer, *case: _plain(answer(*case)))
    for case, found in zip(cases, seen, strict=True):
        found = _tensor(found, (2,), tell(*case), advice)
        wanted = truth.gradient(*case)
        if not _close(found, wanted):
            why = _named(found, _wrong_gradients(*case), "", "the mean of 2 * error * [x, 1]")
            raise Wrong(f"{tell(*case)} gives {_row(found)}, not {_row(wanted)}", *why)


def _wrong_gradients(parameters: Tensor, x: Tensor, y: Tensor) -> Iterable:
    (w, b), n, ones = parameters, len(x), torch.ones(len(x))
    right, error = truth.gradient(parameters, x, y), w * x + b - y
    yield right / 2, "the factor 2 is missing", "the derivative of error^2 is 2 * error * ..."
    yield right * n, "the sum over the samples", "the loss is the mean: .mean(), not .sum()"
    yield right * n / 2, "the sum over the samples, without the 2", "the mean of 2 * error * ..."
    yield right / n, "divided by the number of samples twice", ".mean() has divided already"
    yield -right, "the sign is turned: that is y minus the line", "error = w x + b - y"
    yield right.flip(0), "w and b have changed places", "dL/dw first: parameters are [w, b]"

    def slope(error: Tensor, x: Tensor) -> Tensor:
        return torch.stack([(error * x).mean(), (error * ones).mean()])

    yield 2 * slope(error, ones), "x is missing in dL/dw", "dw is the mean of 2 * error * x"
    yield 2 * slope(x * error, ones), "x is in both parts", "the derivative of b is 1, not x"
    root = error.square().mean().sqrt()
    yield right / (2 * root), "the root of the loss", "the loss is the mean of error^2, no root"
    for factor in (1, 2):
        absolute = factor * slope(error.sign(), x), factor * slope(error.abs(), x)
        for wrong in absolute:
            yield wrong, "that is of an absolute error", "the loss squares the error"
        apart = torch.stack([factor * error.mean() * x.mean(), factor * error.mean()])
        yield apart, "mean(error) * mean(x)", "multiply first, then take the mean"
        yield factor * slope(error - b, x), "b is left out of the error", "error = w x + b - y"
        yield factor * slope(error + y, x), "y is left out of the error", "error = w x + b - y"


# ---- 1.2 ------------------------------------------------------------------------------------


class Descent(NamedTuple):
    """The arguments of one call of `descend`."""

    start: Tensor
    x: Tensor
    y: Tensor
    rate: float
    tolerance: float
    max_steps: int

    def __str__(self) -> str:
        numbers = f"rate={self.rate:g}, tolerance={self.tolerance:.3g}, max_steps={self.max_steps}"
        return f"descend(start={_row(self.start)}, {len(self.x)} samples, {numbers})"


STACK = "collect the parameters in a list, and return torch.stack(path)"


@lesson.exercise(
    "1.2",
    "Begin with path = [start]. Each step appends new parameters, made from path[-1].",
    "A step: slope = gradient(path[-1], x, y), then path[-1] - rate * slope. Write no -= there.",
    "Before the step: if slope.norm() < tolerance, break. The loop is for _ in range(max_steps); "
    "at the end torch.stack(path).",
)
def descend(answer) -> None:
    """It ends by max_steps, by the tolerance, at once, and with no step allowed."""
    x, y = _samples(random.randrange(9, 20))
    start, rate = _far(), round(random.uniform(0.17, 0.21), 3)
    lengths = [
        truth.gradient(p, x, y).norm().item() for p in truth.descend(start, x, y, rate, 0, 30)
    ]
    first = next(step for step, length in enumerate(lengths) if length < 0.3)
    early, stop = random.randrange(2, 5), first + random.randrange(4)
    small, large = (math.sqrt(lengths[at - 1] * lengths[at]) for at in (stop, early))
    cases = [
        Descent(start, x, y, rate, small, random.randrange(2, 4)),
        Descent(start, x, y, rate, 2 * lengths[0], 20),
        Descent(start, x, y, rate, small, 60),
        Descent(3 - start, x, y, rate, small, 60),
        Descent(start, x, y, rate, large, 60),
        Descent(start, x, y, rate, small / 20, 60),
        Descent(start, x, y, rate, small, 0),
    ]

    def tell(*case: object) -> str:
        return str(Descent(*case))

    seen = alone(answer, cases, tell, {}, lambda answer, *case: _plain(answer(*case)))
    paths, failure = [], None
    try:
        paths += seen
    except Wrong as wrong:
        failure = wrong  # it may be the mistake that the paths before it show, too
    _compare_paths(paths, cases[: len(paths)])
    if failure:
        raise failure


def _compare_paths(seen: list, cases: list[Descent]) -> None:
    for case, found in zip(cases, seen, strict=True):
        found, wanted = _path(found, case.start, str(case)), truth.descend(*case)
        for row in range(min(len(found), len(wanted))):
            if not _close(found[row], wanted[row]):
                raise _wrong_row(found, wanted, row, case)
        steps, right = len(found) - 1, len(wanted) - 1
        if steps == right:
            continue
        at = f"{case} takes {steps} step{'s' * (steps != 1)}, not {right}"
        if right < case.max_steps:
            length = truth.gradient(wanted[-1], case.x, case.y).norm()
            at += f": there the gradient's length, {length:.3g}, is first below the tolerance"
        pairs = [(f, c) for f, c in zip(seen, cases, strict=True) if isinstance(f, Tensor)]
        for same_mistake in zip(*(_wrong_stops(case) for _, case in pairs), strict=True):
            ends = [end for end, *_ in same_mistake]
            if ends == [len(path) - 1 for path, _ in pairs]:
                raise Wrong(at, *same_mistake[0][1:])
        raise Wrong(at, "", "before each step: if slope.norm() < tolerance, break")


def _path(found: object, start: Tensor, case: str) -> Tensor:
    """A path in the right form that begins at the start."""
    if isinstance(found, Tensor) and found.shape == (2,):
        raise Wrong(f"{case} gives {_row(found)}", "one point; the whole path is asked for", STACK)
    if isinstance(found, Tensor) and found.dim() == 2 and found.shape[0] == 2 != found.shape[1]:
        seen = f"{case} has shape {tuple(found.shape)}"
        raise Wrong(seen, "each row is one point of the path", "torch.stack(path) has dim=0")
    found = _tensor(found, (-1, 2), case, STACK)
    if len(found) > 1 and (found == found[0]).all():
        why = "one tensor, changed in place, stands in the list often", "a = a - b makes a new one"
        if _close(found[0], start):
            why = "no step moves: the new parameters are thrown away", "here = the new parameters"
        raise Wrong(f"all {len(found)} rows of the path from {case} are {_row(found[0])}", *why)
    if len(found) == 0 or not _close(found[0], start):
        begins = f"begins at {_row(found[0])}" if len(found) else "is empty"
        seen = f"the path from {case} {begins}"
        raise Wrong(seen, "the start is missing: it is the first point", "path = [start]")
    return found


def _wrong_row(found: Tensor, wanted: Tensor, row: int, case: Descent) -> Wrong:
    seen = f"{case}: point {row} is {_row(found[row])}, not {_row(wanted[row])}"
    step, right = found[row] - found[row - 1], wanted[row] - wanted[row - 1]
    slope = -right / case.rate
    first = wanted[1] - wanted[0]
    mistakes = [
        (-right, "the step goes up: the gradient was added", "subtract rate * gradient"),
        (right + first, "gradients of all steps add up in .grad", "set it to None each time"),
        (first, "the gradient of the start, again and again", "gradient(path[-1], ...) each time"),
        (-slope, "the rate is left out", "subtract rate * gradient"),
        (-case.rate * slope / slope.norm(), "the gradient's length is taken out", "do not divide"),
        (torch.zeros(2), "the step does not move", "take the step from path[-1]"),
    ]
    otherwise = "", "each point is path[-1] - rate * gradient(path[-1], x, y); is 1.1 green?"
    return Wrong(seen, *_named(step, mistakes, *otherwise))


def _wrong_stops(case: Descent) -> Iterable[tuple[int, str, str]]:
    """After how many steps a mistaken condition ends, what it smells of, what to try."""
    path = truth.descend(*case._replace(tolerance=0, max_steps=200))
    slopes = torch.stack([truth.gradient(parameters, case.x, case.y) for parameters in path])
    lengths, losses = slopes.norm(dim=1), truth.mean_squared_error(path, case.x, case.y)
    most, compare = case.max_steps, "compare slope.norm() with the tolerance"
    parts = "each component, or one of them, was"

    def end(values: Tensor, most: int = most) -> int:
        return min([*(values < case.tolerance).tolist(), True].index(True), most)

    right, before = end(lengths), "compute the gradient, compare it, and only then step"
    yield most, "the tolerance never ends it", "break where slope.norm() < tolerance"
    yield end(lengths, 10**6), "max_steps is left out", "for _ in range(max_steps)"
    yield end(lengths, most + 1), "one step too many", "range(max_steps)"
    yield end(lengths, max(most, 1) - 1), "one step too few", "range(1, n) has n - 1 numbers"
    yield right - 1, "one step too few: the last point is missing", "append after every step"
    yield min(right + 1, most), "the condition is looked at after a step, not before it", before
    yield min(right, 1), "it ends with the first step", "return behind the loop, not in it"
    moved = min(end(case.rate * lengths, 10**6) + 1, most)
    yield moved, "the distance from the last point was compared", compare
    above = min([*(lengths > case.tolerance).tolist(), True].index(True), most)
    yield above, "it ends where the gradient is large", "< tolerance, not >"
    for values, smell in [
        (losses, "the loss was compared with the tolerance"),
        (lengths * case.rate, "the step's length, rate * gradient, was compared"),
        (slopes.abs().amax(1), f"{parts} compared; the length takes both"),
        (slopes.abs()[:, 0], f"{parts} compared; the length takes both"),
        (slopes.abs()[:, 1], f"{parts} compared; the length takes both"),
        (slopes.sum(1), "the components' sum was compared; signs cancel in it"),
        (slopes.abs().sum(1), "the sum |dw| + |db| was compared"),
        (lengths.square(), "the square of the length was compared; it has a root"),
        ((losses[:-1] - losses[1:]).abs(), "the change of the loss was compared"),
    ]:
        yield end(values), smell, compare


# ---- 1.3 ------------------------------------------------------------------------------------


@lesson.exercise(
    "1.3",
    "The Hessian H needs the mean of x and the mean of x^2, and no y. Write it as a 2x2 tensor.",
    "torch.linalg.eigvalsh(H) gives the eigenvalues. The steepest direction diverges first.",
    "It diverges where rate * h > 2, so the largest rate is 2 / (the largest eigenvalue). "
    ".item() makes a float of it.",
)
def largest_rate(answer) -> None:
    """Samples close together, wide apart on either side of 0, and one alone."""
    cases = [
        (torch.linspace(-1, 1, size) * spread + middle + 0.1 * torch.rand(size),)
        for size, spread, middle in [
            (random.randrange(5, 9), 0.3, random.uniform(0.2, 0.3)),
            (random.randrange(9, 20), 1.3, 0.7),
            (random.randrange(9, 20), random.uniform(2, 4), -random.uniform(0.5, 1)),
            (1, 0.0, random.uniform(0.4, 0.6)),
        ]
    ]

    def tell(x: Tensor) -> str:
        means = f"mean(x) = {x.mean():.3f}, mean(x^2) = {x.square().mean():.3f}"
        return f"largest_rate({len(x)} sample{'s' * (len(x) > 1)} with {means})"

    reasons = {"for 'Complex": ("eigvals gives complex numbers", "H is symmetric: eigvalsh")}
    seen = alone(answer, cases, tell, reasons, _number_seen)
    for (x,), found in zip(cases, seen, strict=True):
        if isinstance(found, Tensor) and found.numel() == 2:
            raise Wrong(f"{tell(x)} is {_row(found)}", "both eigenvalues", "the largest: .max()")
        if isinstance(found, complex):
            raise Wrong(f"{tell(x)} is {found}", *reasons["for 'Complex"])
        found = torch.tensor(number(found, tell(x))).double()
        wanted = truth.largest_rate(x)
        if abs(found - wanted) > 1e-3 * wanted:
            mean, square = 2 * x.mean(), 2 * x.square().mean()
            right = f"H is [[{square:.3f}, {mean:.3f}], [{mean:.3f}, 2]]"
            why = _named(found, _wrong_rates(x), "", f"2 / the largest eigenvalue of H; {right}")
            raise Wrong(f"{tell(x)} is {found:.5g}, not {wanted:.5g}", *why)


def _number_seen(answer, *case: object) -> object:
    value = answer(*case)
    return value.detach() if isinstance(value, Tensor) else value


def _wrong_rates(x: Tensor) -> Iterable:
    x = x.double()
    mean, square, n = x.mean(), x.square().mean(), len(x)

    def eigenvalues(square: Tensor, mean: Tensor, one: float = 1.0) -> Tensor:
        return torch.linalg.eigvalsh(2 * torch.tensor([[square, mean], [mean, one]]).double())

    small, large = eigenvalues(square, mean)
    yield 2 / small, "the smallest eigenvalue", "the steepest direction diverges first: the largest"
    yield 1 / large, "1 / h is where one step reaches the bottom", "it diverges above 2 / h"
    yield 4 / large, "the Hessian without its factor 2", "H = 2 * [[...]], as in the docstring"
    yield large, "that is the eigenvalue itself", "the rate is 2 divided by it"
    yield 2 / (small + large), "the trace, the sum of both eigenvalues", "the largest of them"
    yield 4 / (small + large), "the mean of the eigenvalues", "take the largest"
    yield 2 / (small**2 + large**2).sqrt(), "the norm of H", "torch.linalg.eigvalsh(H).max()"
    yield 2 / (small * large), "the determinant of H", "torch.linalg.eigvalsh(H).max()"
    yield 1 / square, "w alone; b is a parameter as well", "a 2x2 Hessian and its eigenvalues"
    yield min(1 / square, torch.ones(())), "mean(x) beside the diagonal is left out", "all of H"
    without_root = eigenvalues(mean**2, mean)[1]
    yield 2 / without_root, "mean(x)^2 is not mean(x^2)", "square first: x.square().mean()"
    yield 2 / eigenvalues(square - mean**2, mean)[1], "the variance of x", "x.square().mean()"
    sums = eigenvalues(square * n, mean * n, n)[1]
    yield 2 / sums, "sums over the samples", "means, since the loss is a mean"
    yield 2 / eigenvalues(square * n, mean * n)[1], "sums over the samples", "take the means"


# ---- 1.4 ------------------------------------------------------------------------------------

ORDER = "torch.randperm(num_samples, generator=generator)"


@lesson.exercise(
    "1.4",
    f"{ORDER} gives all numbers in a random order.",
    "Then cut it: elements 0 to batch - 1, batch to 2 * batch - 1, and so on. A slice may go "
    "beyond the end.",
    "order.split(batch) gives the pieces; `yield from` hands them out one by one.",
)
def mini_batches(answer) -> None:
    """Sizes that divide, that do not, a batch of one, of all, and larger than all."""
    sizes = [(random.choice([17, 20, 23]), 6), (12, 4), (5, 1), (6, 6), (4, 9), (1, 1)]
    cases = [(*size, random.randrange(10**6)) for size in sizes]
    reasons = {
        "randperm() received": ("the generator is given by its name", "generator=generator"),
        "'NoneType' object is not iterable": ("nothing is handed out", "yield each batch"),
    }

    def tell(num_samples: int, batch: int, seed: int) -> str:
        return f"mini_batches({num_samples}, {batch}, generator)"

    for (size, batch, seed), found in zip(
        cases, alone(answer, cases, tell, reasons, _epochs_seen), strict=True
    ):
        case = tell(size, batch, seed)
        if isinstance(found, str):
            smell = "each batch is one tensor of sample numbers, handed out by `yield`"
            raise Wrong(f"{case} {found}"[:200], smell, "order[first : first + batch]")
        for epoch in found:
            _compare_epoch(epoch, size, batch, case)
        if size > 10:
            _compare_draws(*found, case)


def _epochs_seen(answer, num_samples: int, batch: int, seed: int) -> list | str:
    """Two epochs from one generator; one of the same seed; one of another seed. Or its form."""

    def epoch(generator: Generator) -> list:
        return list(itertools.islice(answer(num_samples, batch, generator), num_samples + 5))

    torch.manual_seed(1)
    random.seed(1)
    generator = _generator(seed)
    first = epoch(generator), epoch(generator)
    torch.manual_seed(2)
    random.seed(2)
    epochs = [*first, epoch(_generator(seed)), epoch(_generator(seed + 1))]
    for part in itertools.chain(*epochs):
        if not isinstance(part, Tensor):
            kind = type(part).__name__
            more = ": all batches at once" if _holds_tensors(part) else ""
            return f"yields a {kind}, not a tensor{more}"
        if part.dim() != 1:
            return f"yields a tensor of shape {tuple(part.shape)}: that is no batch"
        if part.dtype.is_floating_point or part.dtype == torch.bool:
            return f"yields {part.dtype} numbers; sample numbers are integers"
    return [[part.tolist() for part in one] for one in epochs]


def _holds_tensors(part: object) -> bool:
    return isinstance(part, list | tuple) and any(isinstance(one, Tensor) for one in part)


def _compare_epoch(epoch: list, num_samples: int, batch: int, case: str) -> None:
    numbers, sizes = Counter(itertools.chain(*epoch)), [len(part) for part in epoch]
    left, rest = sorted(set(range(num_samples)) - set(numbers)), num_samples % batch
    wanted = [batch] * (num_samples // batch) + [rest] * (rest > 0)
    if len(epoch) == num_samples + 5:
        smell, advice = "one epoch is asked for", "each number comes once"
        if len(epoch) > 1 and all(part == epoch[0] for part in epoch):
            smell, advice = "the same batch again and again", "go on to the next slice"
        raise Wrong(f"{case} never ends", smell, advice)
    if num_samples in numbers and 0 in left:
        raise Wrong(f"{case} yields {num_samples}", "numbers from 1", "the first sample is 0")
    if strange := sorted(set(numbers) - set(range(num_samples))):
        raise Wrong(f"{case} yields {strange[0]}", "there is no such sample", ORDER)
    twice = [one for one, times in numbers.items() if times > 1]
    if twice:
        seen = f"{case} yields sample {twice[0]} {numbers[twice[0]]} times, {len(left)} never"
        raise Wrong(seen, *_why_twice(epoch, num_samples, batch))
    if left:
        smell = "the last, smaller batch was dropped" if len(left) == rest else "some are left out"
        raise Wrong(f"{case} leaves out {len(left)} of {num_samples}", smell, "yield the rest too")
    if sizes != wanted:
        smell = f"{sizes.count(0)} batches are empty" if 0 in sizes else ""
        if sorted(sizes) == sorted(wanted):
            smell = "the last one is the smaller one; the batches were shuffled, not the samples"
        if sizes == [len(part) for part in torch.arange(num_samples).chunk(batch)]:
            smell = "`batch` is the size of a batch, not the number of batches"
        seen = f"{case} yields batches of {sizes}, not {wanted}"
        raise Wrong(seen, smell, "order.split(batch) cuts pieces of this size")


def _why_twice(epoch: list, num_samples: int, batch: int) -> tuple[str, str]:
    """Smell and hint where a sample comes more than once in an epoch."""
    order, pairs = list(itertools.chain(*epoch)), list(itertools.pairwise(epoch))
    each_once = "each number comes once"
    if batch > 1 and all(one[1:] == two[: len(one) - 1] for one, two in pairs):
        return "batches overlap: the next one begins only one number later", "a step of `batch`"
    if set(order[:num_samples]) == set(range(num_samples)):
        if len(order) == 2 * num_samples and len(epoch[-1]) == len(epoch[len(epoch) // 2 - 1]):
            return "two epochs are yielded; one is asked for", each_once
        return "the last batch was filled up; it may be smaller", each_once
    if any(len(set(part)) < len(part) for part in epoch):
        return "drawn with replacement", f"{each_once}: {ORDER}"
    smell = "no number is twice in a batch: drawn with replacement, or a new order for each batch"
    return smell, "one order for the whole epoch, made before the loop"


def _compare_draws(first: list, second: list, again: list, other: list, case: str) -> None:
    """Is the order random, new in each epoch, and from the generator?"""
    order = list(itertools.chain(*first))
    if order == sorted(order):
        raise Wrong(f"{case} yields 0, 1, 2, ...", "the order is not random", ORDER)
    if all(part == list(range(part[0], part[0] + len(part))) for part in first):
        smell = "the batches were shuffled, not the samples"
        raise Wrong(f"a batch of {case} is {first[0]}", smell, f"shuffle, then cut: {ORDER}")
    if [sorted(part) for part in first] == sorted(sorted(part) for part in first):
        if all(max(one) < min(two) for one, two in itertools.pairwise(first)):
            smell = "each batch was shuffled within itself"
            raise Wrong(f"a batch of {case} is {first[0]}", smell, f"shuffle, then cut: {ORDER}")
    if first != again:
        seen = f"{case} gives two orders for two generators with the same seed"
        smell = "numbers come from the global generator, or an order is kept from call to call"
        raise Wrong(seen, smell, ORDER)
    if first == second:
        seen = f"{case} gives the same order in two epochs: {order[:4]}..."
        raise Wrong(seen, "the random numbers begin anew in each call", "use `generator` as it is")
    if first == other:
        smell = "a seed of its own, whatever the generator"
        raise Wrong(f"{case} gives one order for generators of two seeds", smell, ORDER)


# ---- 1.5 ------------------------------------------------------------------------------------


class Batched(NamedTuple):
    """A call of `descend_in_batches`, without its step; the seed is its generator's."""

    start: Tensor
    x: Tensor
    y: Tensor
    batch: int
    num_steps: int
    seed: int

    def __str__(self) -> str:
        return f"{len(self.x)} samples, batch={self.batch}, num_steps={self.num_steps}"


class Recorder:
    """A step that writes down what it is given. It is not gradient descent: it has to be called."""

    def __init__(self, limit: int) -> None:
        self.limit, self.calls = limit, []

    def __call__(self, parameters: Tensor, slope: Tensor) -> Tensor:
        if len(self.calls) >= self.limit:
            raise RuntimeError(f"step was called more than {self.limit} times")
        new = 0.7 * parameters.detach() - 0.1 * slope.detach() + 0.3
        self.calls.append((parameters.detach().clone(), slope.detach().clone(), new.clone()))
        return new


@lesson.exercise(
    "1.5",
    "Two loops: the outer one over epochs, the inner mini_batches(len(x), batch, generator).",
    "In the inner loop: gradient(path[-1], x[chosen], y[chosen]), and path.append(step(path[-1], "
    "that gradient)).",
    "while len(path) <= num_steps is the outer loop. In the inner one the same condition ends an "
    "epoch early.",
)
def descend_in_batches(answer) -> None:
    """Four epochs and a part of one, single samples, less than an epoch, all samples, no step."""
    cases = [
        Batched(_far(), *_samples(size), batch, num_steps, random.randrange(10**6))
        for size, batch, num_steps in [(7, 3, 13), (5, 1, 17), (7, 3, 2), (4, 4, 3), (6, 2, 0)]
    ]
    reasons = {
        "step was called more": ("num_steps counts steps, not epochs", "end at num_steps steps"),
        "StopIteration": ("the batches of an epoch are used up", "then call mini_batches again"),
    }

    def tell(*case: object) -> str:
        return f"descend_in_batches({Batched(*case)})"

    seen = alone(answer, cases, tell, reasons, _steps_seen)
    for case, (path, calls, again, other) in zip(cases, seen, strict=True):
        _compare_calls(path, calls, case, f"descend_in_batches({case})")
        if case.num_steps > 10:
            _compare_seeds(path, again, other, f"descend_in_batches({case})")


def _steps_seen(answer, *given: object) -> tuple:
    """The path and the calls of step; and paths of the same seed, and of another one."""
    case, paths, calls = Batched(*given), [], []
    for global_seed, seed in enumerate([case.seed, case.seed, case.seed + 1]):
        torch.manual_seed(global_seed)
        random.seed(global_seed)
        step = Recorder(6 * case.num_steps + 20)
        paths.append(_plain(answer(*case[:5], step, _generator(seed))))
        calls.append(step.calls)
    return paths[0], calls[0], *paths[1:]


def _compare_seeds(path: Tensor, again: object, other: object, case: str) -> None:
    if not isinstance(again, Tensor) or not torch.equal(path, again):
        smell = "the generator is not used: numbers come from the global one"
        seen = f"{case} gives two paths for two generators with the same seed"
        raise Wrong(seen, smell, "mini_batches(len(x), batch, generator)")
    if isinstance(other, Tensor) and torch.equal(path, other):
        seen = f"{case} gives one path for generators of two seeds"
        raise Wrong(seen, "the generator is not used", "mini_batches(len(x), batch, generator)")


def _compare_calls(path: object, calls: list[tuple], case: Batched, told: str) -> None:
    """What step was given and what became of its results; then the samples behind it."""
    if case.num_steps and not calls:
        smell = "step is never called; it is what makes the new parameters"
        raise Wrong(told, smell, "path.append(step(path[-1], slope))")
    path = _path(path, case.start, told)
    steps = len(path) - 1
    if steps != case.num_steps or len(calls) != case.num_steps:
        seen = f"{told} takes {steps} step{'s' * (steps != 1)}, with {len(calls)} calls of step"
        raise Wrong(seen, *_why_count(steps, len(calls), case))
    points = [case.start, *(new for _, _, new in calls)]
    if not _close(path, torch.stack(points)):
        smell = "what step returns is not what stands in the path"
        raise Wrong(told, smell, "path.append(step(path[-1], slope))")
    for index, (parameters, slope, _) in enumerate(calls):
        if not _close(parameters, points[index]):
            smell = "step is not given the newest parameters"
            if _close(slope, points[index]):
                smell = "step takes the parameters first, then the gradient"
            elif index and _close(parameters, case.start):
                smell = "each step begins at the start"
            seen = (
                f"{told}: step {index + 1} is given {_row(parameters)}, not {_row(points[index])}"
            )
            raise Wrong(seen, smell, "step(path[-1], slope)")
    chosen = [_samples_of(call, case, n, told) for n, call in enumerate(calls)]
    _compare_chosen(chosen, case, told)


def _why_count(steps: int, calls: int, case: Batched) -> tuple[str, str]:
    """Smell and hint of a wrong number of steps, or of calls of step."""
    wanted, per_epoch = case.num_steps, math.ceil(len(case.x) / case.batch)
    if steps == calls == wanted * per_epoch:
        return "num_steps counts steps, not epochs", "look at len(path) in both loops"
    if steps == calls == per_epoch:
        return "it ends after one epoch", "a new epoch follows: while ... around it"
    if steps == calls == wanted + 1:
        return "one step too many", "len(path) counts the start as well"
    if steps == calls == math.ceil(wanted / per_epoch) * per_epoch:
        return "the last epoch runs to its end", "leave the inner loop at num_steps"
    if steps == wanted - 1:
        return "len(path) counts the start as well", "while len(path) <= num_steps"
    if calls == 2 * steps:
        return "step is called twice for each point", "call it once, keep its result"
    if steps == wanted:
        return "a result of step is not in the path", "look before you call it"
    return "", "exactly num_steps steps"


def _samples_of(call: tuple, case: Batched, index: int, told: str) -> tuple[int, ...]:
    """The samples whose gradient a step was given, found by trying all batches there can be."""
    parameters, slope, _ = call
    n, most = len(case.x), min(case.batch, len(case.x))
    tries = [itertools.combinations_with_replacement(range(n), k) for k in range(1, most + 1)]
    batches = [*itertools.chain(*tries), tuple(range(n))]
    # The batch (2, 2) has the gradient of the batch (2,): only the shortest of such stays.
    batches = [batch for batch in batches if math.gcd(*Counter(batch).values()) == 1]
    kept = [list(batch) for batch in batches]

    def nearest(parameters: Tensor, x: Tensor = case.x, summed: bool = False) -> tuple | None:
        slopes = torch.stack([truth.gradient(parameters, x[k], case.y[k]) for k in kept])
        if summed:
            slopes *= torch.tensor([len(k) for k in kept])[:, None]
        distances = (slopes - slope).norm(dim=1)
        best = distances.argmin().item()
        return batches[best] if _close(slope, slopes[best]) else None

    found = nearest(parameters)
    at = f"{told}: step {index + 1} is given {_row(slope)}"
    pair, smell = "gradient(path[-1], x[chosen], y[chosen])", "the gradient of no batch of samples"
    if found is None:
        if index and nearest(case.start):
            smell = "the gradient is taken at the start"
        elif nearest(parameters, torch.arange(n) + 0.0):
            smell = "the numbers of the samples stand in the place of x"
        elif nearest(parameters, summed=True):
            smell = "the batch's gradient times its size: a sum, not a mean"
        elif _is_of_strangers(slope, parameters, case):
            smell = "x and y come from different samples"
        else:
            pair += "; is 1.1 green?"
        raise Wrong(at, smell, pair)
    if len(found) == n > case.batch:
        raise Wrong(at, "the gradient of all samples", pair)
    return found


def _is_of_strangers(slope: Tensor, parameters: Tensor, case: Batched) -> bool:
    """Is this the gradient of a batch in which the x and y are of different samples?"""
    n, size = len(case.x), min(case.batch, len(case.x))
    x = case.x[torch.tensor(list(itertools.combinations(range(n), size)))][:, None]
    y = case.y[torch.tensor(list(itertools.permutations(range(n), size)))]
    error = parameters[0] * x + parameters[1] - y  # (batches of x, batches of y, size)
    slopes = 2 * torch.stack([(error * x).mean(dim=-1), error.mean(dim=-1)], dim=-1)
    distances = (slopes - slope).norm(dim=-1).flatten()
    return _close(slope, slopes.reshape(-1, 2)[distances.argmin()])


def _compare_chosen(chosen: list[tuple], case: Batched, told: str) -> None:
    """Each epoch takes every sample once, and has an order of its own."""
    n, per_epoch = len(case.x), math.ceil(len(case.x) / case.batch)
    epochs = [chosen[at : at + per_epoch] for at in range(0, len(chosen), per_epoch)]
    new_epoch = "for chosen in mini_batches(...): one call an epoch"
    first, sizes = f"{told}: the first batches are {chosen[:per_epoch]}", set(map(len, chosen))
    if case.batch > 1 and sizes == {1} and per_epoch > 1 and len(chosen) > per_epoch:
        raise Wrong(first, "one sample a step, not one batch", "x[chosen]: no loop over chosen")
    if (
        chosen
        and n > case.batch > 1
        and all(set(batch) == set(range(case.batch)) for batch in chosen)
    ):
        smell = "batch and the number of samples have changed places"
        raise Wrong(first, smell, "mini_batches(len(x), batch, generator)")
    if any(len(set(batch)) < len(batch) for batch in chosen):
        raise Wrong(first, "drawn with replacement", "in an epoch each sample comes once")
    if n % case.batch and all(len(batch) == case.batch for batch in chosen[:per_epoch]):
        full = [chosen[at : at + n // case.batch] for at in range(0, len(chosen), n // case.batch)]
        dropped = all(max(Counter(itertools.chain(*part)).values()) == 1 for part in full)
        if dropped and len(chosen) >= per_epoch:
            raise Wrong(first, "the last, smaller batch is dropped", "each epoch takes all samples")
    for index, epoch in enumerate(epochs, 1):
        times = Counter(itertools.chain(*epoch))
        if max(times.values()) > 1 or (len(epoch) == per_epoch and len(times) < n):
            seen = f"{told}: the batches of epoch {index} are {epoch}"
            raise Wrong(seen, "each step draws a new order", new_epoch)
    whole = [epoch for epoch in epochs if len(epoch) == per_epoch > 1]
    if len(whole) > 2 and all(epoch == whole[0] for epoch in whole):
        seen = f"{told}: all epochs take the batches {whole[0]}"
        in_order = list(itertools.chain(*whole[0])) == list(range(n))
        smell = "drawn once, or by a new generator each time"
        advice = "call mini_batches again for each epoch, with the same generator"
        if in_order:
            smell, advice = "the order is not shuffled", "mini_batches does that; is 1.4 green?"
        raise Wrong(seen, smell, advice)


# ---- 1.6 ------------------------------------------------------------------------------------


class Spread(NamedTuple):
    """A call of `gradient_variance`; the seed is its generator's."""

    parameters: Tensor
    x: Tensor
    y: Tensor
    batch: int
    repeats: int
    seed: int

    def __str__(self) -> str:
        size = f"{len(self.x)} samples, batch={self.batch}, repeats={self.repeats}"
        return f"gradient_variance({size})"


DRAW = "torch.randint(len(x), (batch,), generator=generator)"
CALLS = 150  # that one of 6 samples is in none of these comes once in 10^12 times


@lesson.exercise(
    "1.6",
    "A batch with replacement: torch.randint(len(x), (batch,), generator=generator).",
    "The gradient of the batch minus that of all samples is a vector; its squared length is the "
    "sum of the squares of both parts.",
    "Collect this squared length for each repeat, and return the mean of them as a float.",
)
def gradient_variance(answer) -> None:
    """Few draws, so that each value tells what was drawn; then a mean over many."""
    samples = _telling_samples()
    sizes = [(1, 1), (2, 1), (1, 2), (4, 1000), (12, 1000)]
    seed = random.randrange(10**6)
    cases = [Spread(*samples, batch, repeats, seed) for batch, repeats in sizes]
    reasons = {"randint() received": ("the size is a tuple, also of one number", DRAW)}

    def tell(*case: object) -> str:
        return str(Spread(*case))

    found = []
    for case, values in zip(
        cases, alone(answer, cases, tell, reasons, _variances_seen), strict=True
    ):
        if isinstance(values[0], Tensor) and values[0].numel() == 2:
            seen = f"{case} gives {_row(values[0])}"
            raise Wrong(seen, "the squared length of a vector is one number", ".square().sum()")
        found.append(torch.tensor([number(value, str(case)) for value in values]).double())
    _compare_seeds_of(found[2], cases[2])
    _compare_few(found[:3], cases[:3])
    for case, values in zip(cases[3:], found[3:], strict=True):
        wanted = _all_draws(case, 1, 1)[0].square().sum(-1).mean().item() / case.batch
        if not abs(values[0] - wanted) <= 0.25 * wanted:  # 1000 repeats know it to 5 %
            seen = f"{case} is {values[0]:.4g}; the samples' own spread gives {wanted:.4g}"
            raise Wrong(seen, "", f"each repeat draws a batch: {DRAW}")


def _telling_samples() -> tuple[Tensor, Tensor, Tensor]:
    """Parameters, x and y for which each batch of one or two gives a value of its own."""
    x = torch.tensor([0.5, 0.62, 0.8, 0.97, 1.1, 1.24])
    while True:
        parameters = torch.tensor([random.uniform(10, 15), random.uniform(4, 6)])
        error = torch.tensor([-2.3, 2.1, 0.2, 3.1, -1.0, 2.7]) + 0.3 * torch.rand(6)
        y = parameters[0] * x + parameters[1] - error
        pairs = _squares(None, *_all_draws(Spread(parameters, x, y, 2, 1, 0), 2, 1))
        values = pairs.view(6, 6)[torch.triu(torch.ones(6, 6)) > 0].sort().values
        if values[0] > 0.01 and (values[1:] / values[:-1]).min() > 1.005:
            return parameters, x, y


def _variances_seen(answer, *given: object) -> list:
    """Values of few repeats from many seeds, then again from the first seed; or one value."""
    case, values = Spread(*given), []
    calls = CALLS if case.repeats < 10 else 1
    for index in range(calls + 1 if calls > 1 else 1):
        torch.manual_seed(index)
        random.seed(index)
        generator = _generator(case.seed + index % calls)
        values.append(_number_seen(answer, *case[:5], generator))
    return values


def _compare_seeds_of(values: Tensor, case: Spread) -> None:
    if values[0] != 0 and (values == values[0]).all():
        smell = "nothing is drawn, or not from the generator that is given"
        raise Wrong(f"{case} is {values[0]:.4g} for {CALLS} seeds of the generator", smell, DRAW)
    if values[0] != values[-1]:
        seen = f"{case} is {values[0]:.4g} and {values[-1]:.4g} for generators of one seed"
        raise Wrong(seen, "the batches do not follow from the generator", DRAW)


def _all_draws(case: Spread, batch: int, repeats: int) -> tuple[Tensor, Tensor]:
    """For all draws there can be: the gradients minus the whole, and themselves. (D, R, 2)"""
    pairs = zip(case.x[:, None], case.y[:, None], strict=True)
    each = torch.stack([truth.gradient(case.parameters, *pair) for pair in pairs]).double()
    drawn = list(itertools.product(range(len(each)), repeat=batch * repeats))
    slopes = each[torch.tensor(drawn)].unflatten(1, (repeats, batch)).mean(dim=2)
    return slopes - each.mean(dim=0), slopes


def _all_in(values: Tensor, others: Tensor) -> bool:
    """Is each of the values one of the others, but for rounding?"""
    if not values.isfinite().all():
        return bool((values.isnan() & others.isnan().all()).all())
    gaps = (values[:, None] - others).abs().amin(dim=1)
    return bool((gaps <= 1e-3 * values.abs() + 1e-6).all())


def _squares(case: Spread, d: Tensor, s: Tensor) -> Tensor:
    return d.square().sum(-1).mean(-1)


def _compare_few(found: list[Tensor], cases: list[Spread]) -> None:
    """Each value has to be one that a draw gives; and all draws have to come."""
    draws = [_all_draws(case, case.batch, case.repeats) for case in cases]
    rights = [_squares(case, *draw) for case, draw in zip(cases, draws, strict=True)]

    def fits(rule: Callable) -> bool:
        given = zip(found, cases, draws, strict=True)
        return all(_all_in(values, rule(case, *draw)) for values, case, draw in given)

    def around_their_mean(case: Spread, d: Tensor, s: Tensor, less: int) -> Tensor:
        return (d - d.mean(1, True)).square().sum((1, 2)) / (case.repeats - less)

    if any(fits(partial(around_their_mean, less=less)) for less in (0, 1)):
        return  # the repeats' own variance: for many of them it is the same
    for case, values, right in zip(cases, found, rights, strict=True):
        strange = [value for value in values if not _all_in(value[None], right)]
        if strange:
            seen = f"{case} is {strange[0]:.4g}, which no draw of samples gives"
            if case is cases[0]:
                seen += f": they give {_row(right)}"
            why = next((why for rule, *why in _wrong_rules() if fits(rule)), None)
            raise Wrong(seen, *(why or _why_draws(found[0], case)))
    _compare_drawn(found, rights[0], cases)


def _compare_drawn(found: list[Tensor], singles: Tensor, cases: list[Spread]) -> None:
    """Every sample has to be drawn; `batch` of them, one maybe twice; and for each repeat."""
    for index, single in enumerate(singles):
        if not (found[0] - single).abs().amin() <= 1e-3 * single:
            which = {0: "the first sample", 5: "the last sample"}.get(index, "one sample")
            seen = f"in {CALLS} calls of {cases[0]} sample {index} is in no batch"
            raise Wrong(seen, f"{which} is never drawn", "randint(n, ...) gives 0 to n - 1")
    if not any(_all_in(value[None], singles) for value in found[1]):
        seen = f"in {CALLS} calls of {cases[1]} no sample comes twice in a batch"
        raise Wrong(seen, "drawn without replacement", "torch.randint draws with replacement")
    if _all_in(found[1], singles):
        raise Wrong(f"{cases[1]} has one sample in a batch", "`batch` does not count", DRAW)
    if _all_in(found[2], singles):
        seen = f"{cases[2]} is always the value of one batch alone"
        raise Wrong(seen, "one batch, again and again", f"{DRAW} in the loop")


def _why_draws(values: Tensor, case: Spread) -> tuple[str, str]:
    """Smell and hint where other samples were drawn than those that were asked for."""
    pairs = itertools.product(case.x[:, None], case.y[:, None])
    torn = torch.stack([truth.gradient(case.parameters, *pair) for pair in pairs])[:, None]
    whole = truth.gradient(case.parameters, case.x, case.y)
    if _all_in(values, _squares(case, torn - whole, torn).double()):
        return "x and y come from different samples", "one draw: x[chosen], y[chosen]"
    if _all_in(values, _squares(case, *_all_draws(case, 2, 1))):
        return "two samples in a batch of one", DRAW
    return "", "the mean over the repeats of (batch gradient - whole).square().sum()"


def _wrong_rules() -> list[tuple[Callable, str, str]]:
    """What a mistake makes of deviations d and gradients s, both (draws, repeats, 2)."""
    sum_it, right = "the squared length: .square().sum()", _squares
    own = "the gradient's own square is in it", "subtract the gradient of all first"
    over = "the mean over the repeats comes last"
    return [
        (lambda c, d, s: right(c, s, s), *own),
        (lambda c, d, s: right(c, d, s).sqrt(), "the standard deviation, a root of it", "no root"),
        (lambda c, d, s: d.norm(dim=-1).mean(-1), "the length is not squared", sum_it),
        (lambda c, d, s: d[..., 0].square().mean(-1), "the part of w alone", sum_it),
        (lambda c, d, s: d[..., 1].square().mean(-1), "the part of b alone", sum_it),
        (lambda c, d, s: right(c, d, s) / 2, "the mean of both parts, not their sum", sum_it),
        (lambda c, d, s: d.sum(-1).square().mean(-1), "the parts are added, then squared", sum_it),
        (lambda c, d, s: d.abs().sum(-1).mean(-1), "absolute values, not squares", sum_it),
        (lambda c, d, s: d.sum(-1).mean(-1), "the parts are not squared", sum_it),
        (lambda c, d, s: right(c, d.mean(1, True), s), "repeats are averaged, then squared", over),
        (lambda c, d, s: right(c, d, s) / c.batch, "divided by the batch size again", "no / batch"),
        (lambda c, d, s: right(c, d, s) * c.batch, "times the batch size", "no * batch"),
        (lambda c, d, s: right(c, d, s) * c.repeats, "the sum over the repeats", "/ repeats"),
        (
            lambda c, d, s: right(c, d[:, :1], s) / c.repeats,
            "one repeat alone",
            "return at the end",
        ),
        (lambda c, d, s: right(c, d, s) / c.repeats, "divided by repeats twice", "one mean"),
        (lambda c, d, s: 0 * right(c, d, s), "0: no batch differs from the whole", DRAW),
    ]


# ---- 1.7 ------------------------------------------------------------------------------------


@lesson.exercise(
    "1.7",
    "__init__ keeps the rate, the momentum and a velocity of 0 in self.",
    "__call__ first makes the new velocity from the old one and the gradient, then the parameters.",
    "self.velocity = self.momentum * self.velocity + slope; return parameters - self.rate * "
    "self.velocity. Write no += and no -=.",
)
def Momentum(answer) -> None:
    """Six steps; without momentum; and two at the same time."""
    rate, momentum = round(random.uniform(0.05, 0.3), 3), round(random.uniform(0.6, 0.9), 3)
    seed = random.randrange(10**6)
    cases = [(rate, momentum, 1, seed), (rate, momentum, 2, seed), (rate, 0.0, 1, seed)]
    if not isinstance(answer, type) and type(answer).__name__ == "Momentum":
        raise Wrong("Momentum is an object of the class", "", "hand over the class, no brackets")
    reasons = {
        "object is not callable": ("an instance is called like a function", "write __call__"),
        "takes no arguments": ("Momentum(rate, momentum) makes one", "write __init__"),
    }

    def tell(rate: float, momentum: float, num_steppers: int, seed: int) -> str:
        turns = "" if num_steppers == 1 else f", {num_steppers} of them in turn"
        return f"Momentum(rate={rate}, momentum={momentum}){turns}"

    for case, (found, changed) in zip(
        cases, alone(answer, cases, tell, reasons, _moves), strict=True
    ):
        for index, (new, right) in enumerate(
            zip(found, _moves(truth.Momentum, *case)[0], strict=False)
        ):
            at = f"{tell(*case)}: call {index + 1}"
            new = _tensor(new, (2,), at, "return the new parameters")
            if not _close(new, right):
                raise Wrong(f"{at} gives {_row(new)}, not {_row(right)}", *_why_move(found, case))
        if changed:
            smell = "the tensors that it was given were changed in place"
            raise Wrong(
                tell(*case), smell, "a = a - b makes a new tensor; a -= b and a += b do not"
            )


def _moves(answer, rate: float, momentum: float, num_steppers: int, seed: int) -> tuple:
    """The points after each step along random gradients; and were arguments changed?"""
    draw, found, given = _generator(seed), [], []
    steppers = [answer(rate, momentum) for _ in range(num_steppers)]
    points = [torch.randn(2, generator=draw) for _ in steppers]
    for turn in range(6 * num_steppers):
        slope, which = torch.randn(2, generator=draw), turn % num_steppers
        given += [(part, part.clone()) for part in (points[which], slope)]
        new = steppers[which](points[which], slope)
        found.append(_plain(new))
        if not isinstance(new, Tensor) or new.shape != (2,):
            break
        points[which] = new.detach().clone()
    return found, not all(torch.equal(now, before) for now, before in given)


class Mistaken:
    """Momentum by a rule: rate r, momentum m, velocity v, slope g -> new velocity and move."""

    def __init__(self, rate: float, momentum: float, rule: Callable) -> None:
        self.rate, self.momentum, self.rule, self.velocity = rate, momentum, rule, torch.zeros(2)

    def __call__(self, parameters: Tensor, slope: Tensor) -> Tensor:
        """Step by the rule."""
        self.velocity, move = self.rule(self.rate, self.momentum, self.velocity, slope)
        return parameters + move


def _why_move(found: list, case: tuple) -> tuple[str, str]:
    """Smell and hint of the mistaken rule that makes these steps."""
    if case[2] > 1:
        return "the instances share one velocity", "keep it in self, made in __init__"
    for rule, smell, advice in _rules():
        steps, _ = _moves(lambda rate, momentum, rule=rule: Mistaken(rate, momentum, rule), *case)
        pairs = zip(found, steps, strict=False)
        if all(_close(one, two) for one, two in pairs if isinstance(one, Tensor)):
            return smell, advice
    return "", "velocity = momentum * velocity + gradient; then parameters - rate * velocity"


def _rules() -> list[tuple[Callable, str, str]]:
    def by(new: Callable) -> Callable:
        """The rule that makes another velocity, and then steps as it should."""
        return lambda r, m, v, g: (new(m, v, g), -r * new(m, v, g))

    mean, plain = "a running mean, with 1 - momentum in it", "here momentum * velocity + gradient"
    lost = "plain gradient descent: the velocity is not kept from call to call"
    return [
        (lambda r, m, v, g: (v, -r * g), lost, "keep it in self.velocity"),
        (lambda r, m, v, g: (m * v + g, r * (m * v + g)), "it goes up", "a sign is turned"),
        (lambda r, m, v, g: (m * v + g, -r * v), "the old velocity", "first make the new one"),
        (lambda r, m, v, g: (m * v + g, -m * v - g), "the rate is left out", "rate * velocity"),
        (lambda r, m, v, g: (m * v + g, -r * (g + m * (m * v + g))), "Nesterov's momentum", plain),
        (by(lambda m, v, g: m * v + (1 - m) * g), mean, plain),
        (by(lambda m, v, g: (1 - m) * v + m * g), mean, plain),
        (by(lambda m, v, g: (1 - m) * v + g), "1 - momentum times the old velocity", plain),
        (by(lambda m, v, g: v + g), "nothing fades: momentum is left out", plain),
        (by(lambda m, v, g: v + m * g), "momentum times the gradient, not the velocity", plain),
        (by(lambda m, v, g: m * (v + g)), "momentum times both", plain),
    ]
