"""8.1: the learning-rate range test."""

import math
import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from manyhands.checks.engine.spec import Spec
from manyhands.checks.engine.values import difference, listing, malformed, number, same
from manyhands.layerwise import rates


class Sweep(NamedTuple):
    """A call of `range_test`; its step gives these losses, one after the other."""

    losses: list[float]
    lowest: float
    highest: float
    num_rates: int
    worse: float = 2.0


def sweeps() -> list[Sweep]:
    """Losses that fall, rise, explode or are no numbers; thresholds that are just reached."""
    first = random.randint(17, 40) / 8
    low = random.randint(2, 9) * 10.0 ** -random.randint(3, 6)
    most = low * random.randint(2000, 9000)
    fall = [first * share for share in (1, 0.9, 0.7, 0.3)]
    wave = [*fall, first * 0.9, first * 1.9]
    return [
        Sweep(fall[:3], 0.1, 0.9, 3),
        Sweep(fall[:2], low, most, 2),
        Sweep([*fall, first], low, most, 5),
        Sweep([*wave, first * 2.1, first, first], low, most, 9),
        Sweep([*fall[:2], math.nan, first, first], low, most, 5),
        Sweep([*fall[:3], math.inf, first, first], low, most, 6),
        Sweep([math.inf, first, first], low, most, 3),
        Sweep([math.nan, first], low, most, 2),
        Sweep([first, 2 * first, 1.5 * first, 2.01 * first, first], low, most, 5),
        Sweep([*wave, first * 3.9, first * 4.1, first], low, most, 9, 4.0),
        Sweep([first, first * 1.2, first * 1.4, first], low, most, 4, 1.25),
        Sweep([0.25, 0.2, 0.1, 0.3, 0.6], low, most, 5),
    ]


class Trainer:
    """A step that writes down the learning rates that it is given."""

    def __init__(self, losses: list[float]) -> None:
        self.losses = losses
        self.rates: list[Tensor] = []

    def __call__(self, rate: float) -> float:
        """Return the next loss."""
        if len(self.rates) > len(self.losses):
            raise RuntimeError(f"step was called more than {len(self.losses) + 1} times")
        self.rates.append(digits(rate))
        return [*self.losses, self.losses[-1]][len(self.rates) - 1]


def digits(value: object) -> Tensor:
    """A number in float32: it is compared with a tolerance relative to itself."""
    return torch.tensor(float(number(value)), dtype=torch.float32)


def sweep_seen(answer: Callable, case: Sweep) -> dict:
    """The learning rates and losses that are returned, and the rates that the step was given."""
    step = Trainer(case.losses)
    more = {} if case.worse == 2 else {"worse": case.worse}
    found = answer(step, case.lowest, case.highest, case.num_rates, **more)
    wanted = "two lists, the learning rates and the losses"
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise malformed(found, wanted, "Return rates, losses.")
    tried, losses = map(listing(digits, wanted), found)
    return {
        "the learning rates": tried,
        "the losses": losses,
        GIVEN: step.rates,
    }


GIVEN = "the learning rates that step was given"


def say(found: dict, wanted: dict) -> str:
    """The first list that differs, as a whole."""
    name = next(name for name in wanted if not same(found[name], wanted[name]))
    lists = [[one.item() for one in part[name]] for part in (found, wanted)]
    rounded = [[float(f"{one:.6g}") for one in numbers] for numbers in lists]
    of_step = "step the learning rates" if name == GIVEN else name
    return f"gives {of_step} {difference(*(rounded if rounded[0] != rounded[1] else lists))}"


def facts(found: dict, wanted: dict, case: Sweep) -> str:
    """What can be seen of the numbers of elements."""
    sizes = [len(found[name]) for name in ("the learning rates", "the losses")]
    if sizes[0] != sizes[1]:
        return f"There are {sizes[0]} learning rates and {sizes[1]} losses."
    if sizes[0] != len(wanted["the losses"]):
        early = "early" if sizes[0] < len(wanted["the losses"]) else "late"
        return f"The test ends too {early}."
    return ""


FACTOR = "(highest / lowest) ** (1 / (num_rates - 1))"
RATE = "lowest * factor**number"
FIRST = "worse * losses[0]"
NOT_FINITE = "not math.isfinite(losses[-1]) or "
TOO_LARGE = f" or losses[-1] > {FIRST}"
GROW = f"The factor from one learning rate to the next is {FACTOR}."
END = f"The test ends where the loss is not finite, or where it is above {FIRST}."
range_test = Spec(
    todo="8.1",
    truth=rates.range_test,
    cases=sweeps,
    observe=sweep_seen,
    tell=lambda case: (
        f"range_test(step, {case.lowest:.3g}, {case.highest:.3g}, {case.num_rates}"
        f"{'' if case.worse == 2 else f', worse={case.worse}'}) with a step that gives the losses "
        f"{', '.join(f'{loss:.4g}' for loss in case.losses[: case.num_rates])}"
    ),
    say=say,
    facts=facts,
    advice={"the learning rates": GROW, "the losses": END, "": "Call step once for each rate."},
    reasons="""
        step was called more :: The test calls step more often than there are learning rates. | Call
            step once for each of the num_rates learning rates.
    """,
    hints=(
        "The learning rates are lowest, lowest * factor, lowest * factor**2, and so on, and after "
        "num_rates - 1 multiplications they arrive at highest. Which factor does that?",
        f"{GROW} In a loop, append the next learning rate, call step with it, and append the loss.",
        "After that, leave the loop if the newest loss is not finite (math.isfinite) or is larger "
        f"than {FIRST}. At the end, return both lists.",
    ),
    mistakes="""
        1 / (num_rates - 1) => 1 / num_rates ::
            The factor is computed for one learning rate too many, so the last one stays below
            `highest`. | Between num_rates numbers there are num_rates - 1 steps.
        {RATE} => lowest + (highest - lowest) * number / (num_rates - 1) ::
            The learning rates grow by equal amounts, and not by one factor. | {GROW}
        {RATE} => lowest * factor**(number + 1) ::
            The first learning rate is already multiplied by the factor. | Begin with `lowest`.
        break => rates.pop(); losses.pop(); break :: The loss that ends the test is left out. |
            Append the learning rate and the loss first, and ask then whether the test ends.
        break => losses.pop(); break ::
            The learning rate that ends the test is returned, but its loss is not.
        {FIRST} => worse * min(losses) ::
            The loss is compared with the smallest one so far. | Compare it with losses[0].
        {FIRST} => worse * losses[max(len(losses) - 2, 0)] ::
            The loss is compared with the one just before it.
        {FIRST} => worse :: The loss is compared with `worse` itself, and not with a multiple of the
            first loss. | Compare it with {FIRST}.
        {FIRST} => 2.0 * losses[0] ::
            The argument `worse` is not used. | Compare the loss with {FIRST}.
        {NOT_FINITE} => :: The test goes on after a loss that is not finite: a comparison with nan
            is always False. | Ask math.isfinite.
        not math.isfinite(losses[-1]) => math.isnan(losses[-1]) ::
            An infinite first loss does not end the test. | Ask math.isfinite, not math.isnan.
        {TOO_LARGE} => ::
            The test does not end at a loss that is finite, however large it is. | {END}
        break => pass :: The test never ends early.
        step(rates[-1]) => step(lowest) ::
            Every step is trained with the lowest learning rate. | Give step the newest one.
        return rates, losses => return [math.log10(rate) for rate in rates], losses ::
            These are the logarithms of the learning rates. | Return the learning rates themselves.
    """,
    module=globals(),
)
