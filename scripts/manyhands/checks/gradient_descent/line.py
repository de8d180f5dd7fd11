"""A straight line: its gradient, descent with all samples, and the largest learning rate."""

import random
from typing import NamedTuple

import torch
from torch import Tensor

from manyhands.checks.engine import cases
from manyhands.checks.engine.mistakes import Mistake, mistakes, patch
from manyhands.checks.engine.spec import Spec
from manyhands.checks.engine.values import Malformed, malformed, number, same, show, tensor
from manyhands.gradient_descent import descent

TOLERANCE = 1e-4  # float32, and sums in another order


def decimals(value: object) -> Tensor:
    """A tensor of floating-point numbers, as float32."""
    found = tensor(value)
    if not found.is_floating_point():
        said = f"a tensor of {found.dtype}"
        raise Malformed(said, "The exercise asks for a tensor of floating-point numbers.")
    return found.float()


def close(found: object, wanted: object, case: object) -> bool:
    """The same, but for the rounding of float32."""
    return same(found, wanted, TOLERANCE)


def point(values: Tensor) -> str:
    """A point in a few digits."""
    return f"[{', '.join(f'{value:.4g}' for value in values.tolist())}]"


def samples(size: int) -> tuple[Tensor, Tensor]:
    """Samples near a line, in steps of 1/8, so that few sums are rounded; x on both sides of 0.

    A single sample lies at 3/8, away from 0 and 1.
    """
    draw = cases.generator(cases.draw_seed())
    x = torch.randint(-8, 17, (size,), generator=draw) / 8
    if size == 1:
        x[0] = 3 / 8
    elif x.std() < 0.3:
        x[:2] = torch.tensor([-1.0, 1.5])
    y = random.choice([-1.5, 1.25, 2]) * x + random.choice([-2, 1, 1.5])
    return x, y + torch.randint(-3, 4, (size,), generator=draw) / 8


def far() -> Tensor:
    """Parameters away from the minimum, w and b by different lengths."""
    return torch.tensor([random.randint(-24, -17) / 8, random.randint(36, 48) / 8])


# ---- 1.1 ------------------------------------------------------------------------------------


class Slope(NamedTuple):
    """The arguments of one call of `gradient`."""

    parameters: Tensor
    x: Tensor
    y: Tensor


def slopes() -> list[Slope]:
    """One sample, three, many; x that do not lie side by side; large numbers below 0."""
    x, y = samples(26)
    return [
        Slope(far(), *samples(1)),
        Slope(far(), *samples(3)),
        Slope(-far(), x[::2], y[::2]),
        Slope(100 * far(), -16 - x, y),
    ]


def tell_slope(case: Slope) -> str:
    """The call, with the sample where there is one."""
    count = f"{len(case.x)} samples"
    if len(case.x) == 1:
        count = f"x = {point(case.x)}, y = {point(case.y)}"
    return f"gradient({point(case.parameters)}, {count})"


ERROR = "parameters[0] * x + parameters[1] - y"
ROOT = "error.square().mean().sqrt()"
PARTS = "2 * (error * x).mean(), 2 * error.mean()"
gradient = Spec(
    todo="1.1",
    truth=descent.gradient,
    cases=slopes,
    form=decimals,
    same=close,
    tell=tell_slope,
    advice={"": "dL/dw is the mean of 2 * error * x, and dL/db is the mean of 2 * error."},
    hints=(
        "The error of a sample is w x + b - y, and the loss is the mean of its square.",
        "The derivative of error^2 is 2 * error times the derivative of the error, which is x for "
        "w and 1 for b.",
        "dL/dw is the mean of 2 * error * x, and dL/db is the mean of 2 * error. torch.stack makes "
        "one tensor of shape (2,) of two scalars.",
    ),
    mistakes=mistakes(
        """
        {PARTS} => (error * x).mean(), error.mean()
            The factor 2 is missing. | The derivative of error^2 is 2 * error times that of error.
        {PARTS} => 2 * (error * x).sum(), 2 * error.sum()
            This is the sum over the samples. | The loss is a mean, so its gradient is one, too.
        {PARTS} => (error * x).sum(), error.sum()
            This is the sum over the samples, and without the factor 2.
        {PARTS} => 2 * (error * x).mean() / len(x), 2 * error.mean() / len(x)
            This is divided by the number of samples twice. | .mean() has divided already.
        {ERROR} => y - parameters[0] * x - parameters[1]
            The sign is turned, as with an error of y - (w x + b). | The error is w x + b - y.
        {PARTS} => 2 * error.mean(), 2 * (error * x).mean()
            The two derivatives have changed places. | The parameters are [w, b], so dL/dw is first.
        {PARTS} => 2 * error.mean(), 2 * error.mean()
            The factor x is missing in dL/dw. | dL/dw is the mean of 2 * error * x.
        {PARTS} => 2 * (error * x).mean(), 2 * (error * x).mean()
            The factor x is in dL/db as well. | The derivative of the error by b is 1.
        {PARTS} => 2 * error.mean() * x.mean(), 2 * error.mean()
            dL/dw is mean(error) * mean(x). | Multiply first, and take the mean of the products.
        {ERROR} => parameters[0] * x - y
            The error is taken without b. | The error is w x + b - y.
        {ERROR} => parameters[0] * x + parameters[1]
            The error is taken without y.
        {ERROR} => (parameters[0] * x + parameters[1] - y).sign() / 2
            This is the gradient of the mean absolute error. | The loss squares the error.
        {PARTS} => (error * x).mean() / {ROOT}, error.mean() / {ROOT}
            This is the gradient of the root of the loss. | The loss is the mean without a root.
        {ERROR} => parameters[1] * x + parameters[0] - y
            The parameters are read as [b, w]. | w is parameters[0], and b is parameters[1].
        """,
        globals(),
    ),
)

# ---- 1.2 ------------------------------------------------------------------------------------


class Descent(NamedTuple):
    """The arguments of one call of `descend`."""

    start: Tensor
    x: Tensor
    y: Tensor
    rate: float
    tolerance: float
    max_steps: int


def descents() -> list[Descent]:
    """No step needed; ended by max_steps and by the tolerance; a rising loss; none allowed."""
    draw = cases.generator(cases.draw_seed())
    x = torch.randn(13, generator=draw)
    x = 0.4 + 0.9 * (x - x.mean()) / x.std(correction=0)  # the valley lies at 45 degrees
    y = 1.5 * x + 1.25 + 0.1 * torch.randn(13, generator=draw)
    start = far()
    rate = round(random.uniform(0.17, 0.21), 3)
    path = descent.descend(start, x, y, rate, 0, 30)
    lengths = [descent.gradient(here, x, y).norm().item() for here in path]
    few = random.randint(2, 4)
    many = next(step for step, length in enumerate(lengths) if length < 0.3) + random.randint(0, 3)
    large, small = ((lengths[at - 1] * lengths[at]) ** 0.5 for at in (few, many))
    fast = 1.3 * descent.largest_rate(x)
    return [
        Descent(start, x, y, rate, 2 * lengths[0], 20),
        Descent(start, x, y, rate, 0.0, random.randint(2, 3)),
        Descent(start, x, y, rate, large, 60),
        Descent(start, x, y, rate, small, 60),
        Descent(3 - start, x, y, rate, small / 20, 60),
        Descent(start, x, y, fast, small, 7),
        Descent(start, x, y, rate, small, 0),
    ]


def tell_descent(case: Descent) -> str:
    """The call, with the numbers that decide where it ends."""
    return (
        f"descend(start={point(case.start)}, {len(case.x)} samples, rate={case.rate:.3g}, "
        f"tolerance={case.tolerance:.3g}, max_steps={case.max_steps})"
    )


def say_path(found: Tensor, wanted: Tensor) -> str:
    """The number of steps, or the first point that differs."""
    if found.dim() != 2 or found.shape[1] != 2 or not len(found):
        return f"gives a tensor of shape {tuple(found.shape)}, not {tuple(wanted.shape)}"
    for index, (one, other) in enumerate(zip(found, wanted, strict=False)):
        if not same(one, other, TOLERANCE):
            return f"gives {point(one)} as point {index}, not {point(other)}"
    return f"gives {len(found)} points, not {len(wanted)}"


def facts_of_a_path(found: Tensor, wanted: Tensor, case: Descent) -> str:
    """What can be seen of a path of another shape."""
    if found.shape == (2,) and same(found, wanted[-1], TOLERANCE):
        return "This is the last point alone."
    if found.dim() != 2 or found.shape[1] != 2:
        return "Each row of the result is one point [w, b]."
    if len(found) > case.max_steps + 1:
        return f"max_steps={case.max_steps} allows no more points, the start not counted."
    return ""


STEP = "path.append(path[-1] - rate * slope)"
STOP = "if slope.norm() < tolerance:\n            break\n"
LENGTH = "slope.norm() <"
LOSS = "mean_squared_error(path[-1], x, y)"
RISES = f"len(path) > 1 and {LOSS} > {LOSS.replace('-1', '-2')}"
COMPARE = "Compare slope.norm() with the tolerance."
descend = Spec(
    todo="1.2",
    truth=descent.descend,
    cases=descents,
    form=decimals,
    same=close,
    tell=tell_descent,
    say=say_path,
    facts=facts_of_a_path,
    advice={"": "Each new point is path[-1] - rate * gradient(path[-1], x, y)."},
    hints=(
        "Begin with path = [start]. Each step appends new parameters, which are made from path[-1] "
        "without changing it.",
        "A step is slope = gradient(path[-1], x, y), and then path[-1] - rate * slope. Do not "
        "write -= there, because it would change the old point.",
        "Before the step comes: if slope.norm() < tolerance: break. The loop is for _ in "
        "range(max_steps), and at the end stands return torch.stack(path).",
    ),
    mistakes=mistakes(
        r"""
        path[-1] - rate => path[-1] + rate
            The step goes up, because the gradient is added. | Subtract rate * gradient.
        rate * slope => slope
            The step is the gradient itself, without the rate. | Subtract rate * gradient.
        rate * slope => rate * slope / slope.norm()
            The gradient is scaled to length 1 before the step. | Subtract rate * gradient.
        gradient(path[-1], => gradient(start,
            Every step uses the gradient at the start. | Call gradient(path[-1], x, y) each time.
        gradient(path[-1], x, y) => gradient(path[-1], x, y) + (slope if len(path) > 1 else 0)
            The gradients of all steps add up, as they do in .grad. | Use the newest gradient alone.
        path = [start] => path = [start.clone()]
        {STEP} => path.append(path[-1].sub_(rate * slope))
            All points of the path are one tensor, which was changed in place.
            | Make a new tensor in each step: path[-1] - rate * slope.
        {LENGTH} => {LOSS} <
            The loss is compared with the tolerance. | {COMPARE}
        {LENGTH} => rate * slope.norm() <
            The length of the step, rate * gradient, is compared with the tolerance.
        {LENGTH} => slope.abs().max() <
            A component, such as the largest, is compared with the tolerance, and not the length.
        {LENGTH} => slope.square().sum() <
            The square of the length is compared with the tolerance.
        {LENGTH} => slope.sum() <
            The sum of the components is compared with the tolerance, and signs cancel in it.
        if slope.norm() < tolerance => if False
            The tolerance never ends the descent. | {COMPARE}
        {STOP}        {STEP} => {STEP}\n        {STOP}
            The gradient is compared with the tolerance after the step, and not before it.
            | Compute the gradient, compare it, and step only then.
        {STEP} => {STEP}\n        return torch.stack(path)
            The descent ends with the first step. | `return` belongs behind the loop.
        if slope.norm() < tolerance => if slope.norm() < tolerance or {RISES}
            The descent also ends when the loss rises. | Only the gradient and max_steps end it.
        """,
        globals(),
    ),
)

# ---- 1.3 ------------------------------------------------------------------------------------


class Samples(NamedTuple):
    """The argument of one call of `largest_rate`."""

    x: Tensor


def sample_sets() -> list[Samples]:
    """Close together; around 0; all below 0; wide apart; large numbers; a single sample."""
    sizes = [random.randint(9, 19) for _ in range(4)]
    return [
        Samples(samples(sizes[0])[0] / 4),
        Samples(samples(sizes[3])[0] - 0.5),
        Samples(-samples(sizes[1])[0] - 1.5),
        Samples(4 * samples(sizes[2])[0] + 1),
        Samples((30 * samples(sizes[3] * 2)[0])[::2]),
        Samples(torch.tensor([0.3])),
    ]


def tell_samples(case: Samples) -> str:
    """The two means on which the result depends."""
    count = f"{len(case.x)} sample{'s' * (len(case.x) > 1)}"
    means = f"mean(x) = {case.x.mean():.4g} and mean(x^2) = {case.x.square().mean():.4g}"
    return f"largest_rate({count} with {means})"


def one_number(value: object) -> Tensor:
    """A number as float32, which is the precision of the samples."""
    if isinstance(value, Tensor) and value.is_complex():
        raise malformed(value, "a real number", "H is symmetric, so use eigvalsh.")
    return torch.tensor(number(value), dtype=torch.float32)


def is_of_the_smallest(found: Tensor, case: Samples) -> bool:
    """Is it 2 divided by the smallest eigenvalue, where this one is not 0?"""
    x = case.x.double()
    hessian = torch.stack([x.square().mean(), x.mean(), x.mean(), x.mean() ** 0]).view(2, 2)
    smallest = 2 / torch.linalg.eigvalsh(2 * hessian).min()
    return len(x) == 1 or same(found, smallest.float(), 1e-3)


H_REAL = "H is symmetric, so torch.linalg.eigvalsh gives its real eigenvalues."
ROWS = "[[mean_square, mean], [mean, 1.0]]"
LARGEST = "torch.linalg.eigvalsh(hessian).max()"
largest_rate = Spec(
    todo="1.3",
    truth=descent.largest_rate,
    cases=sample_sets,
    form=one_number,
    same=lambda found, wanted, case: same(found, wanted, 1e-3),
    tell=tell_samples,
    say=lambda found, wanted: f"gives {show(found.item())}, not {show(wanted.item())}",
    advice={"": "It is 2 divided by the largest eigenvalue of the Hessian in the docstring."},
    reasons={"for 'Complex": ("eigvals gives complex numbers, which have no largest.", H_REAL)},
    hints=(
        "The Hessian H needs the mean of x and the mean of x^2, and no y. Write it as a tensor of "
        "shape (2, 2).",
        "torch.linalg.eigvalsh(H) gives the eigenvalues. In which of their two directions does the "
        "descent diverge first?",
        "It diverges where rate * h > 2, so the largest rate is 2 divided by the largest "
        "eigenvalue. .item() makes a float of it.",
    ),
    mistakes=[
        Mistake(
            patch("max()", "min().clamp(min=1e-12)"),
            "This is 2 divided by the smallest eigenvalue.",
            "The steepest direction, with the largest eigenvalue, diverges first.",
            fits=is_of_the_smallest,
        ),
        *mistakes(
            """
            return 2 / => return 1 /
                This is 1 divided by the largest eigenvalue, at which one step reaches the bottom.
                | The descent diverges above 2 / h.
            hessian = 2 * => hessian =
                The Hessian is taken without its factor 2. | H is 2 * [[...]], as in the docstring.
            return 2 / => return
                This is the largest eigenvalue itself. | The rate is 2 divided by it.
            {LARGEST} => torch.trace(hessian)
                This is 2 divided by the sum of both eigenvalues. | Take the largest of the two.
            {LARGEST} => hessian.norm()
                This is 2 divided by the root of the sum of the squares of H.
                | Take the largest eigenvalue: torch.linalg.eigvalsh(H).max().
            {ROWS} => [[mean_square, 0.0], [0.0, 1.0]]
                mean(x), which stands beside the diagonal of H, is left out. | Use all of H.
            return 2 / {LARGEST} => return 1 / mean_square + 0 * hessian.max()
                This is the limit for w alone, and b is a parameter as well. | Use all of H.
            x.square().mean() => x.mean().square()
                The square of mean(x) stands in the place of mean(x^2). | Square first.
            x.square().mean() => x.var(correction=0)
                The variance of x stands in the place of mean(x^2). | Use x.square().mean().
            x.mean().item(), x.square().mean().item() => x.sum().item(), x.square().sum().item()
            1.0]] => len(x)]]
                These are sums over the samples. | The loss is a mean, so H holds means.
            x.mean().item(), x.square().mean().item() => x.sum().item(), x.square().sum().item()
                These are sums over the samples beside the number 1. | H holds means.
            """,
            globals(),
        ),
    ],
)
