"""Learning rates for a batch that is k times as large: how high, how to get there, when to fall.

    rate
    k eta |      ,------.                  warm-up from eta to k eta, then the schedule
          |    ,'        |                 of the small batch, k times as high
      eta |  ,'          '------.
          +-----------------------> epoch

    or: keep the rate, and let the batch grow where the rate would have fallen

Sources: Goyal et al. 2017, https://arxiv.org/abs/1706.02677 (linear rule, warm-up);
Hoffer et al. 2017, https://arxiv.org/abs/1705.08741 (root); Smith et al. 2018,
https://arxiv.org/abs/1711.00489 (growing the batch).
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple


class Setting(NamedTuple):
    """The batch and the learning rate of an epoch."""

    batch: int
    rate: float


def scaled_rate(rate: float, factor: float, rule: Literal["none", "root", "linear"]) -> float:
    """The learning rate for a batch that is `factor` times as large.

    Args:
        rule: "none" keeps the rate, "root" multiplies it by the square root of the factor, which
            keeps the covariance of a step, "linear" by the factor, which keeps the distance that is
            covered per sample.
    """
    powers = {"none": 0.0, "root": 0.5, "linear": 1.0}
    return rate * factor ** powers[rule]


def warmed_up_rate(
    epoch: float, low: float, high: float, warm_up: float, milestones: Sequence[float], fall: float
) -> float:
    """The learning rate at a time of the training, with a gradual warm-up.

    In the first `warm_up` epochs it rises along a straight line from `low` to `high`. After that it
    is `high`, multiplied by `fall` for every milestone that is reached.

    Args:
        epoch: epochs done so far; 2.5 is in the middle of the third.
        warm_up: epochs; 0 begins with `high`.
        milestones: epochs at which the rate falls; one that lies in the warm-up counts from the
            warm-up's end on.
        fall: below 1, such as 0.1.
    """
    if epoch < warm_up:
        return low + (high - low) * epoch / warm_up
    return high * fall ** sum(epoch >= milestone for milestone in milestones)


def grown_batch(
    epoch: float, start: Setting, largest: int, milestones: Sequence[float], fall: float
) -> Setting:
    """Let the batch grow where the rate would fall, so that the noise falls alike.

    Meant is the noise per distance that the weights travel, which goes with rate / batch; that of
    one step goes with rate^2 / batch. At each milestone the batch is divided by `fall` as
    long as it stays at most `largest`; from the first milestone on at which it would not, the rate
    is multiplied by `fall` instead.

    Args:
        start: at epoch 0.
        fall: 1 / fall is a whole number.
    """
    batch, rate = start
    for _ in range(sum(epoch >= milestone for milestone in milestones)):
        if round(batch / fall) <= largest:
            batch = round(batch / fall)
        else:
            rate *= fall
    return Setting(batch, rate)
