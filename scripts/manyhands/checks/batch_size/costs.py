"""The decision: the fewest processors that reach the target in time."""

import math
import random

from manyhands.batch_size import scaling
from manyhands.checks.engine.spec import Call, Spec
from manyhands.checks.engine.values import number, show

# ---- 3.7 ------------------------------------------------------------------------------------


def deadlines() -> list[Call]:
    """Just in time; too late with any number; one is enough; some; many; the limit itself."""
    found = [(40.0, 24.0, 8, 0.5, 50.0)]  # two processors need 50 s
    least = float(random.randint(40, 90))
    found.append((least, 30.0, 4, 0.25, 0.25 * least - 2))
    numbers = 1, random.randint(3, 7), random.randint(40, 80), random.randint(20_000, 40_000)
    for num, spare in zip(numbers, (0.3, 0.6, 0.4, 0.6), strict=True):
        batch = random.choice([2, 4, 16])
        critical = random.randint(30, 60) + 0.5
        enough = num - spare  # of a processor, the last one would be
        limit_s = 0.125 * least * (1 + critical / (enough * batch))
        found.append((least, critical, batch, 0.125, round(limit_s, 9)))
    return [*found, (64.0, 30.0, 4, 0.5, 32.0)]


def whole_or_none(value: object) -> int | float | None:
    """None, or a number."""
    return None if value is None else float(number(value))


def in_powers_of_two(
    least: float, critical: float, batch: int, step_s: float, limit_s: float
) -> int | None:
    """Only 1, 2, 4, 8 ... are tried."""
    exact = scaling.fewest_processors(least, critical, batch, step_s, limit_s)
    return None if exact is None else 2 ** math.ceil(math.log2(exact))


RETURN = "return math.ceil(least * critical * step_s / (batch * spare_s))"
SPARE = "spare_s = limit_s - least * step_s"
SOLVE = (
    "n processors need least * (1 + critical / (n * batch)) * step_s seconds: "
    "solve that for n at limit_s."
)
fewest_processors = Spec(
    todo="3.7",
    truth=scaling.fewest_processors,
    cases=deadlines,
    form=whole_or_none,
    tell=lambda case: (
        f"fewest_processors(least={show(case.least)}, critical={show(case.critical)}, "
        f"batch={case.batch}, step_s={show(case.step_s)}, limit_s={show(case.limit_s, 8)})"
    ),
    advice={"": SOLVE},
    reasons="""
        division by zero :: The time of the least steps leaves nothing to spare. | Even without
            noise it takes least * step_s seconds: return None where that is too long.
    """,
    hints=(
        "What is the global batch of n processors? How many steps does the formula give for it, "
        "and how long do they take?",
        f"{SOLVE} The last step is to round up. Or count n up from 1 until the time fits, once you "
        "know that some n will do.",
        f"{SPARE} is what is left when the least steps are paid for. Where it is 0 or less, no "
        "number is enough. Otherwise least * critical * step_s / (n * batch) must fit into it.",
    ),
    mistakes="""
        {RETURN} => return round(least * critical * step_s / (batch * spare_s)) ::
            The number is rounded to the nearest, so some trainings come too late. | Round up.
        {RETURN} => return int(least * critical * step_s / (batch * spare_s)) ::
            The number is rounded down, so trainings come too late.
        {RETURN} => return int(least * critical * step_s / (batch * spare_s)) + 1 ::
            A training that takes exactly limit_s is refused. | Round up with math.ceil.
        {RETURN} => return math.ceil(least * critical * step_s / spare_s) ::
            This is the global batch. | Each processor takes `batch` samples of it.
        {RETURN} => return batch * math.ceil(least * critical * step_s / (batch * spare_s)) ::
            This is the global batch, in whole processors. | Return their number.
        {RETURN} => return math.ceil(critical * step_s / (batch * spare_s)) ::
            `least` is left out of the steps that noise costs. | {SOLVE}
        {RETURN} => return math.ceil(least * critical / (batch * spare_s)) ::
            Steps are divided by seconds.
        {RETURN} => return math.ceil(least * (1 + critical / batch) * step_s / limit_s) ::
            This takes scaling to be perfect: n processors, a share of 1/n of the steps.
        {SPARE} => spare_s = limit_s :: The least steps take time as well.
        {SPARE} => spare_s = limit_s - least ::
            Steps are subtracted from seconds. | The least steps take least * step_s seconds.
        return None => return 0 ::
            0 processors are returned where no number is enough. | Return None there.
        instead in_powers_of_two ::
            Only powers of two are taken. | Any whole number of processors can be taken.
    """,
    module=globals(),
)
