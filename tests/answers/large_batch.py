"""Lesson 07: right answers of another shape than the course's, and wrong ones that are no slip."""

import bisect
import itertools
import math
import statistics

import numpy as np
import scipy.stats
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import Function

from manyhands.checks.engine.answer import Pair
from manyhands.large_batch import noise, norms, ties
from manyhands.large_batch.rates import Setting

# ---- 7.1 ------------------------------------------------------------------------------------


def variance_of_numpy(gradients, batch, rate):
    """The trace of the covariance matrix, scaled before it is taken."""
    covariance = np.cov((rate * gradients).numpy(), rowvar=False, bias=True)
    return np.trace(np.atleast_2d(covariance)) / batch


def variance_of_lengths(gradients, batch, rate):
    """The mean squared distance from the mean gradient."""
    away = gradients - gradients.mean(0, keepdim=True)
    return (rate / batch**0.5) ** 2 * away.square().sum(1).mean()


def variance_of_drawn_batches(gradients, batch, rate):
    draw = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(gradients), (500, batch), generator=draw)
    return (rate * gradients[chosen].mean(1)).var(dim=0).sum().item()


def variance_of_an_estimate(gradients, batch, rate):
    covariance = np.cov(rate * gradients.numpy(), rowvar=False)
    return np.trace(np.atleast_2d(covariance)) / batch


# ---- 7.2 ------------------------------------------------------------------------------------


def rate_by_branches(rate, factor, rule):
    if rule == "linear":
        return factor * rate
    if rule == "root":
        return math.sqrt(factor) * rate
    return rate


def rate_of_functions(rate, factor, rule):
    return rate * {"none": lambda _: 1, "root": np.sqrt, "linear": lambda k: k}[rule](factor)


def rate_of_torch(rate, factor, rule):
    """In float32, as torch computes it."""
    power = {"none": 0.0, "root": 0.5, "linear": 1.0}[rule]
    return (rate * torch.tensor(factor).pow(power)).item()


def rate_of_two_rules(rate, factor, rule):
    if rule == "linear":
        return factor * rate
    if rule == "root":
        return math.sqrt(factor) * rate
    return None


def rate_for_less_noise(rate, factor, rule):
    """As if a larger batch took a smaller rate."""
    return {"none": rate, "root": rate / math.sqrt(factor), "linear": rate / factor}[rule]


def rate_that_doubles(rate, factor, rule):
    doublings = int(math.log2(factor))
    return rate * {"none": 1, "root": 2 ** (doublings / 2), "linear": 2**doublings}[rule]


# ---- 7.3 ------------------------------------------------------------------------------------


def warm_up_of_a_table(epoch, low, high, warm_up, milestones, fall):
    """numpy.interp also treats a line of no length."""
    if milestones and epoch >= max(warm_up, milestones[0]):
        return high * fall ** bisect.bisect_right(milestones, epoch)
    return np.interp(epoch, [0, warm_up], [low, high])


def warm_up_in_a_loop(epoch, low, high, warm_up, milestones, fall):
    if epoch < warm_up:
        done = epoch / warm_up
        return (1 - done) * low + done * high
    rate = high
    for milestone in milestones:
        if epoch < milestone:
            break
        rate *= fall
    return rate


def warm_up_times_falls(epoch, low, high, warm_up, milestones, fall):
    """Two factors that know nothing of each other."""
    reached = bisect.bisect_right(milestones, epoch)
    up = min(1.0, epoch / warm_up) if warm_up else 1.0
    return (low + up * (high - low)) * fall**reached


def warm_up_before_the_schedule(epoch, low, high, warm_up, milestones, fall):
    """As SequentialLR of torch, whose schedules begin at 0 when their turn comes."""
    if epoch < warm_up:
        return low + epoch * (high - low) / warm_up
    return high * math.prod(fall for one in milestones if epoch - warm_up >= one)


def warm_up_without_a_question(epoch, low, high, warm_up, milestones, fall):
    reached = bisect.bisect_right(milestones, epoch)
    return min(high, low + (high - low) * epoch / warm_up) * fall**reached


def warm_up_of_a_cosine(epoch, low, high, warm_up, milestones, fall):
    if epoch < warm_up:
        return low + (high - low) * (1 - math.cos(math.pi * epoch / warm_up)) / 2
    return high * fall ** bisect.bisect_right(milestones, epoch)


# ---- 7.4 ------------------------------------------------------------------------------------


def size_of_math(batch, small):
    return math.sqrt((batch - small) / small)


def size_of_torch(batch, small):
    return torch.tensor(batch / small - 1).sqrt()


def mean_of_normal(losses, sigma, draw=None):
    z = torch.normal(torch.ones_like(losses), sigma, generator=draw)
    return losses @ z / len(losses)


def mean_and_noise(losses, sigma, draw=None):
    with torch.no_grad():
        extra = torch.empty_like(losses).normal_(0, 1, generator=draw)
    return losses.mean() + sigma * (extra * losses).mean()


def mean_as_a_number(losses, sigma, draw=None):
    return noise.noisy_mean(losses, sigma, draw).item()


def mean_of_detached_losses(losses, sigma, draw=None):
    noisy = torch.tensor([loss.item() for loss in losses], requires_grad=True)
    return noise.noisy_mean(noisy, sigma, draw).to(losses.dtype)


def mean_with_a_seed(losses, sigma, draw=None):
    torch.manual_seed(0)
    return noise.noisy_mean(losses, sigma)


def mean_of_means(losses, sigma, draw=None):
    z = 1 + sigma * torch.randn(losses.shape, generator=draw, dtype=losses.dtype)
    return z.mean() * losses.mean()


def mean_of_coins(losses, sigma, draw=None):
    """1 + sigma or 1 - sigma: the right mean and variance, but not normal."""
    coins = torch.randint(2, losses.shape, generator=draw) * 2 - 1
    return ((1 + sigma * coins) * losses).mean()


# ---- 7.5 ------------------------------------------------------------------------------------


class GhostInALoop(norms.AnyBatchNorm):
    """Parts by their first samples."""

    def __init__(self, num_features, ghost, **named):
        super().__init__(num_features, **named)
        self.ghost = ghost

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        out = torch.empty_like(x)
        for first in range(0, len(x), self.ghost):
            out[first : first + self.ghost] = super().forward(x[first : first + self.ghost])
        return out


class GhostByHand(GhostInALoop):
    """Means and variances are computed here, and the statistics moved here."""

    correction = 0

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        return torch.cat([self.normalised(part) for part in torch.split(x, self.ghost)])

    def normalised(self, part):
        axes = [0, *range(2, part.dim())]
        shape = [1, -1] + [1] * (part.dim() - 2)
        mean, var = part.mean(axes), part.var(axes, correction=self.correction)
        if self.track_running_stats:
            self.num_batches_tracked += 1
            share = self.momentum or 1 / self.num_batches_tracked.item()
            self.running_mean += share * (mean.detach() - self.running_mean)
            self.running_var += share * (part.detach().var(axes) - self.running_var)
        out = (part - mean.view(shape)) / (var.view(shape) + self.eps).sqrt()
        return out * self.weight.view(shape) + self.bias.view(shape) if self.affine else out


class GhostWithAnEstimate(GhostByHand):
    """The norm itself divides by one less than the count, as x.var() does."""

    correction = 1


class GhostOfItself(GhostInALoop):
    def forward(self, x):
        return torch.cat([self(part) for part in x.split(self.ghost)])


class GhostOfSuper(GhostInALoop):
    def forward(self, x):
        return torch.cat(list(super().forward(part) for part in x.split(self.ghost)))


class GhostThatMovesAsOften(GhostInALoop):
    """The momentum is divided by the number of parts, so as not to move too far."""

    def forward(self, x):
        before, num_parts = self.momentum, -(-len(x) // self.ghost)
        if self.training and self.momentum:
            self.momentum /= num_parts
        out = super().forward(x)
        self.momentum = before
        return out


# ---- 7.6 ------------------------------------------------------------------------------------


def per_channel(values, x):
    return values.reshape(1, -1, *[1] * (x.dim() - 2))


def flat(x):
    """(B, C, ...) as (B * ..., C)."""
    return x.movedim(1, -1).flatten(0, -2)


class Merged(Function):
    """Count, mean and squares of every rank are gathered once and merged."""

    @staticmethod
    def forward(ctx, x, eps, group):
        rows = flat(x)
        count = torch.tensor([len(rows)]).to(x)
        own = rows.sum(0) / max(1, len(rows))
        line = torch.cat([count, own, (rows - own).square().sum(0)])
        lines = [torch.empty_like(line) for _ in range(dist.get_world_size(group))]
        dist.all_gather(lines, line, group=group)
        lines = torch.stack(lines)
        counts, means, squares = lines.split([1, len(own), len(own)], dim=1)
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        variance = (squares + counts * (means - mean).square()).sum(0) / total
        ctx.scale, ctx.total, ctx.group = (variance + eps).pow(-0.5), total, group
        x_hat = (x - per_channel(mean, x)) * per_channel(ctx.scale, x)
        ctx.save_for_backward(x_hat)
        return x_hat, mean, variance, total

    @staticmethod
    def backward(ctx, grad, *others):
        (x_hat,) = ctx.saved_tensors
        sums = [flat(grad).sum(0), flat(grad * x_hat).sum(0)]
        sums = torch.stack(sums)
        dist.all_reduce(sums, group=ctx.group, async_op=True).wait()
        of_grad, of_product = (per_channel(one, grad) / ctx.total for one in sums)
        return per_channel(ctx.scale, grad) * (grad - of_grad - x_hat * of_product), None, None


def gathered(x, group):
    """The batches of all ranks, and where this rank's own begins."""
    parts = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, x, group=group)
    return torch.cat(parts), sum(map(len, parts[: dist.get_rank(group)]))


class WholeBatch(Function):
    """Every rank normalises the whole batch, and keeps its own part."""

    @staticmethod
    def forward(ctx, x, eps, group):
        whole, first = gathered(x.detach(), group)
        ctx.kept = whole, first, len(x), eps, group
        rows = flat(whole)
        x_hat = F.batch_norm(whole, None, None, None, None, True, 0.0, eps)
        count = torch.tensor(float(len(rows)))
        return x_hat[first : first + len(x)], rows.mean(0), rows.var(0, correction=0), count

    @staticmethod
    def backward(ctx, grad, *others):
        whole, first, size, eps, group = ctx.kept
        grads, _ = gathered(grad, group)
        with torch.enable_grad():
            leaf = whole.clone().requires_grad_()
            x_hat = F.batch_norm(leaf, None, None, None, None, True, 0.0, eps)
        return torch.autograd.grad(x_hat, leaf, grads)[0][first : first + size], None, None


class OwnBatch(Function):
    """torch's own batch norm of what this rank has."""

    @staticmethod
    def forward(ctx, x, eps, group):
        with torch.enable_grad():
            ctx.leaf = x.detach().requires_grad_()
            ctx.x_hat = F.batch_norm(ctx.leaf, None, None, training=True, eps=eps)
        rows = flat(x)
        count = x.new_tensor(len(rows))
        return ctx.x_hat.detach(), rows.mean(0), rows.var(0, correction=0), count

    @staticmethod
    def backward(ctx, grad, *others):
        return torch.autograd.grad(ctx.x_hat, ctx.leaf, grad)[0], None, None


class AveragedStatistics(Merged):
    """The ranks' means and variances are averaged, whatever the size of their batches."""

    @staticmethod
    def forward(ctx, x, eps, group):
        rows = flat(x)
        both = torch.stack([rows.mean(0), rows.var(0, correction=0)])
        dist.all_reduce(both, group=group)
        mean, variance = both / dist.get_world_size(group)
        ctx.total = x.new_tensor(len(rows))
        dist.all_reduce(ctx.total, group=group)
        ctx.scale, ctx.group = (variance + eps).pow(-0.5), group
        x_hat = (x - per_channel(mean, x)) * per_channel(ctx.scale, x)
        ctx.save_for_backward(x_hat)
        return x_hat, mean, variance, ctx.total


class MeanOfMeans(Merged):
    """The ranks' means are averaged, and the squares are summed around that mean."""

    @staticmethod
    def forward(ctx, x, eps, group):
        rows = flat(x)
        mean = rows.mean(0)
        dist.all_reduce(mean, group=group)
        mean /= dist.get_world_size(group)
        total, squares = x.new_tensor(len(rows)), (rows - mean).square().sum(0)
        for one in (total, squares):
            dist.all_reduce(one, group=group)
        ctx.scale, ctx.total, ctx.group = (squares / total + eps).rsqrt(), total, group
        x_hat = (x - per_channel(mean, x)) * per_channel(ctx.scale, x)
        ctx.save_for_backward(x_hat)
        return x_hat, mean, squares / total, total


class OwnVariance(Merged):
    """The mean is that of all ranks, and the variance that of this rank."""

    @staticmethod
    def forward(ctx, x, eps, group):
        _, mean, _, total = Merged.forward(ctx, x, eps, group)
        variance = flat(x).var(0, correction=0)
        ctx.scale, ctx.total, ctx.group = (variance + eps).rsqrt(), total, group
        x_hat = (x - per_channel(mean, x)) * per_channel(ctx.scale, x)
        ctx.save_for_backward(x_hat)
        return x_hat, mean, variance, total


class WithoutMessagesOfNothing(Merged):
    """A rank without samples takes no part."""

    @staticmethod
    def forward(ctx, x, eps, group):
        ctx.is_empty = not len(x)
        if ctx.is_empty:
            zero = x.new_zeros(x.shape[1])
            return x.clone(), zero, zero.clone(), x.new_tensor(0.0)
        return Merged.forward(ctx, x, eps, group)

    @staticmethod
    def backward(ctx, grad, *others):
        return (grad, None, None) if ctx.is_empty else Merged.backward(ctx, grad)


class ThreeResults(Merged):
    @staticmethod
    def forward(ctx, x, eps, group):
        return Merged.forward(ctx, x, eps, group)[:3]


# ---- 7.7 ------------------------------------------------------------------------------------


def growth_in_powers(epoch, start, largest, milestones, fall):
    """How often may the batch grow, and how often has it to?"""
    times, reached = round(1 / fall), bisect.bisect_right(milestones, epoch)
    sizes = itertools.takewhile(
        lambda size: size <= largest, (start.batch * times**power for power in itertools.count(1))
    )
    grown = min(reached, len(list(sizes)))
    return Setting(start.batch * times**grown, start.rate * fall ** (reached - grown))


def growth_step_by_step(epoch, start, largest, milestones, fall):
    setting = start
    for milestone in milestones:
        if epoch < milestone:
            return setting
        larger = math.floor(setting.batch / fall + 0.5)
        if larger > largest:
            setting = setting._replace(rate=setting.rate * fall)
        else:
            setting = setting._replace(batch=larger)
    return setting


def growth_as_a_pair(epoch, start, largest, milestones, fall):
    return tuple(growth_step_by_step(epoch, start, largest, milestones, fall))


def growth_of_floats(epoch, start, largest, milestones, fall):
    batch, rate = growth_step_by_step(epoch, start, largest, milestones, fall)
    return Setting(float(batch), rate)


def growth_in_place(epoch, start, largest, milestones, fall):
    start.batch = round(start.batch / fall)
    return start


def growth_that_keeps_the_noise(epoch, start, largest, milestones, fall):
    """rate / batch is as it should be, but the batch is as large as it may be."""
    noise_of_one = fall ** bisect.bisect_right(milestones, epoch)
    batch = max(start.batch, min(largest, round(start.batch / noise_of_one)))
    return Setting(batch, start.rate * noise_of_one * batch / start.batch)


# ---- 7.8 ------------------------------------------------------------------------------------


def tie_of_numpy(some, others):
    squares = [np.var(one, ddof=1) / len(one) for one in (some, others)]
    limit = ties.student(len(some) + len(others) - 2) * np.sqrt(sum(squares))
    return np.abs(np.mean(some) - np.mean(others)) <= limit


def tie_below_the_limit(some, others):
    """Of two means that are equal, and have no spread, none is the better one."""
    return tie_of_numpy(some, others) and some != list(others)


def tie_of_two_errors(some, others):
    squares = statistics.variance(some) / len(some) + statistics.variance(others) / len(others)
    return abs(statistics.fmean(some) - statistics.fmean(others)) <= 2 * squares**0.5


def tie_of_squares(some, others):
    def mean_and_error(values):
        mean = sum(values) / len(values)
        squares = sum((value - mean) ** 2 for value in values)
        return mean, squares / (len(values) - 1) / len(values)

    (one, first), (other, second) = mean_and_error(some), mean_and_error(others)
    limit = scipy.stats.t.ppf(0.975, len(some) + len(others) - 2)
    return (one - other) ** 2 <= limit**2 * (first + second)


def tie_of_ranges(some, others):
    return min(some) <= max(others) and min(others) <= max(some)


def tie_without_words(some, others):
    return "tie" if tie_of_numpy(some, others) else "no tie"


def ranked_with(is_tie):
    """Classes that are taken off the sorted names."""

    def ranked(values, best="highest"):
        left = sorted(values, key=lambda name: np.mean(values[name]), reverse=best == "highest")
        classes = []
        while left:
            first = left[0]
            tied = [name for name in left if name == first or is_tie(values[first], values[name])]
            classes.append(tied)
            left = [name for name in left if name not in tied]
        return classes

    return ranked


def ranked_by_first(values, best="highest"):
    """The first of a class is kept beside it; the classes are tuples."""
    means = {name: statistics.fmean(one) for name, one in values.items()}
    classes, first = [], None
    while means:
        name = (max if best == "highest" else min)(means, key=means.get)
        del means[name]
        if first is not None and tie_of_squares(values[first], values[name]):
            classes[-1] += (name,)
        else:
            classes.append((name,))
            first = name
    return tuple(classes)


def ranked_flat(values, best="highest"):
    return [name for one in ranked_with(tie_of_numpy)(values, best) for name in one]


def ranked_in_pairs(values, best="highest"):
    """A name joins a class if it ties with any name in it."""
    classes = []
    for name in sorted(values, key=lambda n: statistics.fmean(values[n]), reverse=best != "lowest"):
        for one in classes:
            if any(tie_of_numpy(values[other], values[name]) for other in one):
                one.append(name)
                break
        else:
            classes.append([name])
    return classes


RIGHT = {
    "7.1": [variance_of_numpy, variance_of_lengths],
    "7.2": [rate_by_branches, rate_of_functions, rate_of_torch],
    "7.3": [warm_up_of_a_table, warm_up_in_a_loop],
    "7.4": [Pair(size_of_math, mean_of_normal), Pair(size_of_torch, mean_and_noise)],
    "7.5": [GhostInALoop, GhostByHand],
    "7.6": [Merged, WholeBatch],
    "7.7": [growth_in_powers, growth_step_by_step],
    "7.8": [
        Pair(tie_of_numpy, ranked_with(tie_of_numpy)),
        Pair(tie_of_squares, ranked_by_first),
    ],
}
WRONG = {
    "7.1": [
        (variance_of_drawn_batches, "matches none of the mistakes"),
        (variance_of_an_estimate, "divided by samples - 1"),
    ],
    "7.2": [
        (rate_of_two_rules, "gives None"),
        (rate_for_less_noise, "The rate is divided"),
        (rate_that_doubles, ""),
    ],
    "7.3": [
        (warm_up_times_falls, "Milestones inside the warm-up lower the rate at once"),
        (warm_up_before_the_schedule, "counted from the end of the warm-up"),
        (warm_up_without_a_question, "may be 0 epochs long"),
        (warm_up_of_a_cosine, "matches none of the mistakes"),
    ],
    "7.4": [
        (Pair(size_of_math, mean_as_a_number), "a number of Python has no gradient"),
        (Pair(size_of_math, mean_of_detached_losses), "the gradient reaches the losses"),
        (Pair(size_of_math, mean_with_a_seed), ""),
        (Pair(size_of_math, mean_of_means), "each sample has a random number of its own"),
        (Pair(size_of_math, mean_of_coins), "the share of z"),
    ],
    "7.5": [
        (GhostWithAnEstimate, ""),
        (GhostOfItself, "calls itself again"),
        (GhostOfSuper, "A comprehension is a function of its own"),
        (GhostThatMovesAsOften, "running_mean"),
    ],
    "7.6": [
        (OwnBatch, "the statistics of its own batch"),
        (AveragedStatistics, "means and variances are averaged"),
        (MeanOfMeans, "weighed by their counts"),
        (OwnVariance, "this rank's batch alone"),
        (WithoutMessagesOfNothing, "never ended"),
        (ThreeResults, "the four tensors"),
    ],
    "7.7": [
        (growth_as_a_pair, "asks for a Setting"),
        (growth_of_floats, "A batch is a whole number of samples"),
        (growth_in_place, "A Setting is a tuple"),
        (growth_that_keeps_the_noise, "filled up to `largest`"),
    ],
    "7.8": [
        (Pair(tie_of_ranges, ranked_with(tie_of_ranges)), "the ranges of the values"),
        (Pair(tie_below_the_limit, ranked_with(tie_of_numpy)), "equal means without any spread"),
        (Pair(tie_of_two_errors, ranked_with(tie_of_two_errors)), "two standard errors, however"),
        (Pair(tie_without_words, ranked_by_first), "True or False"),
        (Pair(tie_of_numpy, ranked_flat), "a list of names for each class"),
        (Pair(tie_of_numpy, ranked_in_pairs), ""),
    ],
}
