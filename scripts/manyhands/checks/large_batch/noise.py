"""7.1 and 7.4: the variance of a step, and the noise that a large batch is given back."""

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from manyhands.checks.engine import cases
from manyhands.checks.engine.answer import Pair
from manyhands.checks.engine.spec import Call, Spec
from manyhands.checks.engine.values import Malformed, malformed, number, show
from manyhands.large_batch import noise


def as_digits(value: object) -> Tensor:
    """A number as float32: answers may compute with the digits of their tensors."""
    return torch.tensor(float(number(value)), dtype=torch.float32)


# ---- 7.1 ------------------------------------------------------------------------------------


def steps() -> list[Call]:
    """More draws than samples, as many, and fewer; a transposed matrix; one weight; one sample."""
    draw = cases.generator(cases.draw_seed())
    short, long = torch.float32, torch.float64
    found = []
    for shape, dtype, batch in (
        ((3, 2), short, 2),
        ((4, 1), long, 3),
        ((5, 4), short, random.randint(12, 20)),
        ((6, 3), long, 6),
        ((40, 3), short, 1),
        ((1, 4), short, 3),
    ):
        gradients = cases.values(shape, draw, dtype) + cases.values(shape[1:], draw, dtype) + 0.5
        if shape == (6, 3):
            gradients = gradients.t().contiguous().t()
        found.append((gradients, batch, random.choice((0.3, 0.05, 1.7))))
    return found


VAR = "gradients.var(dim=0, correction=0).sum()"
OF_ONE = "Take the variance of each weight over the samples (dim=0), and add these variances up."
step_variance = Spec(
    todo="7.1",
    truth=noise.step_variance,
    cases=steps,
    form=as_digits,
    say=lambda found, wanted: f"gives {show(found.item())}, not {show(wanted.item())}",
    advice={"": f"Multiply the variance of a single draw by rate**2 / batch. {OF_ONE}"},
    reasons="""
        unexpected keyword argument :: Some versions of this function do not know that argument. |
            In torch, gradients.var(dim=0, correction=0) divides by the number of samples.
    """,
    hints=(
        "The batch is a mean of `batch` independent draws, so start with the variance of a "
        "single draw and ask what the mean does to it.",
        "Each weight has a variance over the samples, in which the squared differences from the "
        "mean are divided by the number of samples. Add these variances up over the weights.",
        f"{VAR} is the variance of a single draw. Divide it by the batch, and multiply it by the "
        "square of the rate.",
    ),
    mistakes="""
        rate**2 => rate :: The learning rate is not squared. | A step is rate * mean, so its
            variance is rate**2 times that of the mean.
        rate**2 * variance => variance ::
            The learning rate is left out: this is the variance of the mean gradient.
        variance / batch => variance :: This is the variance of a step with a single sample. |
            Averaging `batch` independent samples divides the variance by `batch`.
        variance / batch => variance / batch**2 ::
            The variance is divided by the square of the batch.
        variance / batch => variance / batch**0.5 ::
            The variance is divided by the root of the batch, as a standard deviation would be.
        variance / batch => variance / len(gradients) ::
            The variance is divided by the number of all samples, and not by the batch.
        return rate**2 * variance / batch => return (rate**2 * variance / batch) ** 0.5 ::
            This is a standard deviation. | Return the variance itself, without a root.
        variance / batch => variance / batch * (len(gradients) - batch) / max(1, len(gradients) - 1)
            :: This holds for a batch that is drawn without replacement. | Here a sample may be
            drawn several times, so the draws are independent.
        correction=0 => correction=1 ::
            The squares are divided by samples - 1, which estimates the variance of a larger set. |
            The batch is drawn from exactly these samples, so pass correction=0.
        .sum().item() => .mean().item() :: The variances are averaged over the weights. | {OF_ONE}
        {VAR} => gradients.var(correction=0) ::
            This is the variance of all entries together, whatever weight they belong to.
        dim=0 => dim=1 :: The variance is taken over the weights of each sample.
        {VAR} => gradients.square().mean(dim=0).sum() ::
            The mean gradient is not subtracted: this is the mean of the squared lengths.
        {VAR} => gradients.std(dim=0, correction=0).sum() ::
            Standard deviations are added up, but only variances may be added.
        {VAR} => gradients.norm(dim=1).var(correction=0) ::
            This uses the variance of the gradients' lengths, which does not see their directions.
    """,
    module=globals(),
)

# ---- 7.4 ------------------------------------------------------------------------------------


class Noise(NamedTuple):
    """A call of `noise_size`, and calls of `noisy_mean`."""

    batch: int
    small: int
    num_losses: int
    sigma: float
    has_draw: bool
    seed: int
    dtype: torch.dtype = torch.float32
    num_calls: int = 2


def noises() -> list[Noise]:
    """With a generator and without; equal sizes and one loss; a ratio that is not whole; many."""
    seeds = [cases.draw_seed() for _ in range(4)]
    large = random.randint(40, 47)
    return [
        Noise(10, 2, 5, 0.5, True, seeds[0]),
        Noise(16, 16, 1, 0.5, False, seeds[1]),
        Noise(large, 16, 6, 0.5, False, seeds[2], torch.float64),
        Noise(4096, 32, 2500, 2.0, True, seeds[3], num_calls=40),
    ]


def one_mean(answer: Callable, losses: Tensor, sigma: float, draw: Generator | None) -> tuple:
    """What a call returns, and z: the gradient of each loss, times the number of losses."""
    found = answer(losses, sigma, *([draw] if draw else []))
    if not isinstance(found, Tensor):
        hint = "Return the tensor itself: a number of Python has no gradient."
        raise malformed(found, "a tensor without dimensions", hint)
    if found.dim():
        seen = f"a tensor of shape {tuple(found.shape)}"
        raise Malformed(seen, "The exercise asks for one number.", "Average over all samples.")
    grad = None
    if found.requires_grad:
        (grad,) = torch.autograd.grad(found, losses, allow_unused=True)
    z = torch.full_like(losses, torch.nan) if grad is None else grad * len(losses)
    return found.detach(), z.detach()


def noise_seen(answer: Pair, case: Noise) -> dict:
    """The size; what must hold of the random numbers in every draw; and how they are spread."""
    noise_size, noisy_mean = answer.parts
    size = as_digits(noise_size(case.batch, case.small))
    losses = cases.values(case.num_losses, cases.generator(case.seed), case.dtype) + 60
    draw = cases.generator(case.seed, 1) if case.has_draw else None
    before = losses.clone()
    losses.requires_grad_()
    plain, _ = one_mean(noisy_mean, losses, 0.0, draw)
    states = [_state(draw)]
    means, zs = [], []
    for _ in range(case.num_calls):
        mean, z = one_mean(noisy_mean, losses, case.sigma, draw)
        means.append(mean.double())
        zs.append(z.double())
        states.append(_state(draw))
    every = torch.stack(zs)
    explained = (every * before.double()).mean(1)
    have_own = case.num_losses == 1 or bool((every.std(1) > 1e-6).all())
    are_new = not torch.equal(zs[0], zs[1])
    seen = {
        "noise_size": size,
        "noisy_mean with sigma = 0": as_digits(plain),
        "the gradient reaches the losses": not every.isnan().any().item(),
        "the result is the mean of z * losses, if z / B is the gradient of each loss": (
            torch.allclose(torch.stack(means), explained, rtol=1e-4, atol=1e-2)
        ),
        "each sample has a random number of its own": have_own,
        "a second call draws other numbers": are_new,
        "the random numbers come from `draw`, or from torch's own if none is given": all(
            not torch.equal(*pair) for pair in zip(states[1:], states[:-1], strict=True)
        ),
        "the mean of z within a batch differs from 1, as chance has it": (
            (every.mean(1) - 1).abs().max().item() > 1e-5
        ),
        "the type of the result": str(mean.dtype),
        "`losses` are unchanged": torch.equal(losses.detach(), before) and losses.grad is None,
    }
    return seen | (_spread(every, case.sigma, have_own and are_new) if case.num_calls > 2 else {})


def _state(draw: Generator | None) -> Tensor:
    return draw.get_state() if draw else torch.get_rng_state()


def _spread(every: Tensor, sigma: float, is_random: bool) -> dict:
    """How z is spread, in digits that chance does not move."""
    inside = ((every - 1).abs() < sigma).double().mean().item()
    numbers = {
        "the mean of z": every.mean().item(),
        "the standard deviation of z, divided by sigma": every.std().item() / sigma,
        "the share of z between 1 - sigma and 1 + sigma": inside,
    }
    return {name: round(value, 1) if is_random else None for name, value in numbers.items()}


def tell_noise(case: Noise) -> str:
    """Both calls, in words."""
    draw = ", draw" if case.has_draw else ""
    losses = f"{case.num_losses} losses" if case.num_losses > 1 else "one loss"
    return (
        f"noise_size({case.batch}, {case.small}), and noisy_mean(losses, {case.sigma:g}{draw}) "
        f"with {losses},"
    )


SIGMA = "Solve 1 + sigma**2 = batch / small for sigma."
Z = "Draw z = 1 + sigma * randn with the shape of the losses."
MEAN = "Return the mean of z * losses."
FROM_DRAW = "Pass generator=draw to torch.randn, where None means torch's own generator."
noisy_mean = Spec(
    todo="7.4",
    truth=Pair(noise.noise_size, noise.noisy_mean),
    cases=noises,
    observe=noise_seen,
    tell=tell_noise,
    advice={
        "": Z,
        "noise_size": SIGMA,
        "noisy_mean with sigma = 0": "With sigma = 0, every z is 1, so this is the plain mean.",
        "the gradient reaches the losses": "Do not detach the losses: only z has no gradient.",
        "the random numbers come from `draw`, or from torch's own if none is given": FROM_DRAW,
        "the type of the result": "Draw z with dtype=losses.dtype.",
    },
    reasons="""
        Expected a 'Generator' :: torch expects a generator of its own kind, or None. | {FROM_DRAW}
        'NoneType' object has no attribute :: `draw` is None when the caller gives no generator.
        randn(): received an invalid combination ::
            torch.randn takes a shape, and draws with mean 0 and standard deviation 1. | Write
            torch.randn(losses.shape, generator=draw), then scale and shift the numbers.
    """,
    hints=(
        "noise_size: a batch of `batch` has batch / small times less variance than one of `small`, "
        "and the random weights multiply it by 1 + sigma**2. The two have to cancel.",
        "noisy_mean: torch.randn draws numbers with mean 0 and standard deviation 1. Multiply "
        "them by sigma and add 1, one number for each loss.",
        "noise_size is (batch / small - 1) ** 0.5. In noisy_mean, draw torch.randn(losses.shape, "
        "generator=draw, dtype=losses.dtype, device=losses.device), and return "
        "(z * losses).mean().",
    ),
    mistakes="""
        batch / small - 1 => batch / small :: noise_size: the 1 is not subtracted, so equal batches
            would still be given noise. | {SIGMA}
        (batch / small - 1) ** 0.5 => batch / small - 1 :: noise_size: this is the square of sigma.
        (batch / small - 1) ** 0.5 => (batch / small) ** 0.5 - 1 ::
            noise_size: the 1 is subtracted after the root is taken, and not before.
        batch / small - 1 => 1 - small / batch ::
            noise_size: the ratio of the two batches is upside down.
        batch / small - 1 => batch - small ::
            noise_size: the difference of the batches is taken instead of their ratio.
        1 + sigma * torch.randn( => 1 + sigma**2 * torch.randn( ::
            The standard deviation of the random numbers is sigma**2, but it should be sigma. | {Z}
        1 + sigma * torch.randn( => sigma * torch.randn( ::
            The random numbers have mean 0, so the gradient is noise and nothing else.
        losses.shape, generator => (), generator ::
            All samples of a batch share one random number, as if the learning rate were noisy.
        torch.randn( => torch.rand( ::
            torch.rand draws uniform numbers between 0 and 1, and not normal ones.
        (z * losses).mean() => (losses + z - 1).mean() ::
            The noise is added to the losses, where it does not change their gradients. | {MEAN}
        (z * losses).mean() => (z * losses).sum() ::
            The weighted losses are added up and not averaged.
        (z * losses).mean() => (z * losses).sum() / z.sum() :: The sum is divided by the sum of z,
            which takes out part of the noise. | Divide by the number of samples, as mean() does.
        (z * losses).mean() => (z.clamp(min=0) * losses).mean() ::
            Negative random numbers are cut off, which moves the mean above 1. | Keep negative
            numbers: if sigma is large, there are many of them.
        generator=draw,  => :: `draw` is not used, although the caller has given one. | {FROM_DRAW}
        generator=draw => generator=draw or torch.Generator() ::
            Without `draw`, every call gets the same numbers, as from a fixed seed.
    """,
    module=globals(),
)
