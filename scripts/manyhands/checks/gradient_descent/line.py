"""A straight line: samples near it, and the largest learning rate."""

import random

import torch
from torch import Tensor

from manyhands.checks.engine import cases
from manyhands.checks.engine.spec import Call, Spec
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


# ---- 1.3 ------------------------------------------------------------------------------------


def sample_sets() -> list[Call]:
    """Close together; around 0; all below 0; wide apart; large numbers; a single sample."""
    sizes = [random.randint(9, 19) for _ in range(4)]
    return [
        (samples(sizes[0])[0] / 4,),
        (samples(sizes[3])[0] - 0.5,),
        (-samples(sizes[1])[0] - 1.5,),
        (4 * samples(sizes[2])[0] + 1,),
        ((30 * samples(sizes[3] * 2)[0])[::2],),
        (torch.tensor([0.3]),),
    ]


def tell_samples(case: Call) -> str:
    """The two means on which the result depends."""
    count = f"{len(case.x)} sample{'s' * (len(case.x) > 1)}"
    means = f"mean(x) = {case.x.mean():.4g} and mean(x^2) = {case.x.square().mean():.4g}"
    return f"largest_rate({count} with {means})"


def one_number(value: object) -> Tensor:
    """A number as float32, which is the precision of the samples."""
    if isinstance(value, Tensor) and value.is_complex():
        raise malformed(value, "a real number", "H is symmetric, so use eigvalsh.")
    return torch.tensor(number(value), dtype=torch.float32)


def is_of_the_smallest(found: Tensor, case: Call) -> bool:
    """Is it 2 divided by the smallest eigenvalue, where this one is not 0?"""
    x = case.x.double()
    hessian = torch.stack([x.square().mean(), x.mean(), x.mean(), x.mean() ** 0]).view(2, 2)
    smallest = 2 / torch.linalg.eigvalsh(2 * hessian).min()
    return len(x) == 1 or same(found, smallest.float(), 1e-3)


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
    reasons="""
        for 'Complex :: eigvals gives complex numbers, which have no largest. | H is symmetric, so
            torch.linalg.eigvalsh gives its real eigenvalues.
    """,
    hints=(
        "The Hessian H needs the mean of x and the mean of x^2, and no y. Write it as a tensor of "
        "shape (2, 2).",
        "torch.linalg.eigvalsh(H) gives the eigenvalues. In which of their two directions does the "
        "descent diverge first?",
        "It diverges where rate * h > 2, so the largest learning rate is 2 divided by the "
        "largest eigenvalue. .item() makes a float of it.",
    ),
    mistakes="""
        max() => min().clamp(min=1e-12)
        fits is_of_the_smallest :: This is 2 divided by the smallest eigenvalue. | The steepest
            direction, with the largest eigenvalue, diverges first.
        return 2 / => return 1 / :: This is 1 divided by the largest eigenvalue, at which one step
            reaches the bottom. | The descent diverges above 2 / h.
        hessian = 2 * => hessian = ::
            The Hessian is taken without its factor 2. | H is 2 * [[...]], as in the docstring.
        return 2 / => return ::
            This is the largest eigenvalue itself. | The learning rate is 2 divided by it.
        {LARGEST} => torch.trace(hessian) ::
            This is 2 divided by the sum of both eigenvalues. | Take the largest of the two.
        {LARGEST} => hessian.norm() :: This is 2 divided by the root of the sum of the squares of H.
            | Take the largest eigenvalue: torch.linalg.eigvalsh(H).max().
        [[mean_square, mean], [mean, 1.0]] => [[mean_square, 0.0], [0.0, 1.0]] ::
            mean(x), which stands beside the diagonal of H, is left out. | Use all of H.
        return 2 / {LARGEST} => return 1 / mean_square + 0 * hessian.max() ::
            This is the limit for w alone, and b is a parameter as well.
        x.square().mean() => x.mean().square() ::
            The square of mean(x) stands in the place of mean(x^2). | Square first.
        x.square().mean() => x.var(correction=0) ::
            The variance of x stands in the place of mean(x^2). | Use x.square().mean().
        x.mean().item(), x.square().mean().item() => x.sum().item(), x.square().sum().item()
        1.0]] => len(x)]] ::
            These are sums over the samples. | The loss is a mean, so H holds means.
        x.mean().item(), x.square().mean().item() => x.sum().item(), x.square().sum().item() ::
            These are sums over the samples beside the number 1. | H holds means.
    """,
    module=globals(),
)
