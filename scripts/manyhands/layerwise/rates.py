"""The learning-rate range test: one short training in which the rate grows until the loss explodes.

    loss |----.                    too low    the loss hardly moves
         |     `.            |     good       it falls fastest, here and a little further right
         |       `-.______  |      too high   it rises, and the test ends
         +-----------------------> rate (log)

Price: as many steps as rates are tried, and one copy of the weights to go back to.
Sources: Smith 2017, https://arxiv.org/abs/1506.01186 (section 3.3; his rate grows linearly, and he
plots the accuracy), and https://docs.fast.ai/callback.schedule.html (constant factor, early stop).
"""

import math
from collections.abc import Callable


def range_test(
    step: Callable[[float], float],
    lowest: float,
    highest: float,
    num_rates: int,
    worse: float = 2.0,
) -> tuple[list[float], list[float]]:
    """Train one step with each of a row of growing rates, and write down the losses.

    The rates grow by one factor from step to step, so they are evenly spaced on a log axis. The
    test ends early at a loss that is not finite, or that is above `worse` times the first one; that
    loss still belongs to the result.

    Args:
        step: trains one step with a rate; gives the loss before the step.
        lowest, highest: the first rate, and the last one.
        num_rates: at least 2.

    Returns: the rates that were tried, and the losses.
    """
    factor = (highest / lowest) ** (1 / (num_rates - 1))
    rates: list[float] = []
    losses: list[float] = []
    for number in range(num_rates):
        rates.append(lowest * factor**number)
        losses.append(step(rates[-1]))
        if not math.isfinite(losses[-1]) or losses[-1] > worse * losses[0]:
            break
    return rates, losses
