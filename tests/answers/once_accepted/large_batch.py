"""Wrong answers to lesson 07 that its checks once took for right."""

from statistics import fmean, median, variance

import torch.distributed as dist
from torch import Tensor

from manyhands.checks.engine.answer import Pair
from manyhands.large_batch import norms, ties
from manyhands.large_batch.rates import Setting


class TwoSums(norms.NormOverRanks):
    """backward sends each of its two sums by itself."""

    @staticmethod
    def backward(ctx, grad, *_):
        x_hat, scale, count = ctx.saved_tensors
        axes = [axis for axis in range(grad.dim()) if axis != 1]

        def mean(values: Tensor) -> Tensor:
            total = values.sum(axes)
            dist.all_reduce(total, group=ctx.group)
            return total.div(count).view(1, -1, *[1] * (grad.dim() - 2))

        scale = scale.view(1, -1, *[1] * (grad.dim() - 2))
        return (grad - mean(grad) - x_hat * mean(grad * x_hat)) * scale, None, None


def error_of(some, others):
    return (variance(some) / len(some) + variance(others) / len(others)) ** 0.5


def tie_of_a_quotient(some, others):
    """Where nothing is spread, this is 0 / 0."""
    distance = abs(fmean(some) - fmean(others)) / error_of(some, others)
    return distance <= ties.student(len(some) + len(others) - 2)


def tie_of_many_values(some, others):
    """1.96 standard errors would do for very many values."""
    return abs(fmean(some) - fmean(others)) <= 1.96 * error_of(some, others)


def ranked_by(centre, joins):
    """ranked, with another mean and another rule for who joins a class."""

    def ranked(values, best="highest"):
        sign = -1 if best == "highest" else 1
        classes = []
        for name in sorted(values, key=lambda one: sign * centre(values[one])):
            if classes and joins(classes[-1], name, values):
                classes[-1].append(name)
            else:
                classes.append([name])
        return classes

    return ranked


def with_the_first(names, name, values):
    return ties.is_tie(values[names[0]], values[name])


def with_any(names, name, values):
    return any(ties.is_tie(values[one], values[name]) for one in names)


def batch_cut_down(epoch, start, largest, milestones, fall):
    """4 / (1 / 93) is a little below 372, and int() cuts it down."""
    batch, rate = start
    for _ in range(sum(epoch >= milestone for milestone in milestones)):
        if int(batch / fall) <= largest:
            batch = int(batch / fall)
        else:
            rate *= fall
    return Setting(batch, rate)


WRONG = {
    "7.6": [(TwoSums, "backward makes no more than one all-reduce")],
    "7.7": [(batch_cut_down, "gives batch")],
    "7.8": [
        (Pair(tie_of_a_quotient, ties.ranked), "ZeroDivisionError"),
        (Pair(tie_of_many_values, ties.ranked), ""),
        (Pair(ties.is_tie, ranked_by(median, with_the_first)), "by their medians"),
        (Pair(ties.is_tie, ranked_by(fmean, with_any)), "with another one of its class"),
    ],
}
