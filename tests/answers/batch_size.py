"""Answers to lesson 03 as students give them: RIGHT ones differ from the course's own, and WRONG
ones come with words that the verdict must hold. A name is the exercise, then what is done."""

import math
import statistics
import time
from statistics import fmean, median

import numpy as np
import torch
import torch.distributed as dist

from manyhands.batch_size import scaling

RIGHT: dict[str, list] = {
    "3.1": [scaling.throughput],
    "3.2": [scaling.steps_to_target],
    "3.3": [scaling.best_rate],
    "3.4": [scaling.fit_steps],
    "3.5": [scaling.average_over_ranks],
    "3.6": [scaling.noise_scale],
}
WRONG: dict[str, list] = {todo: [] for todo in RIGHT}


def right(todo):
    return lambda answer: RIGHT[todo].append(answer) or answer


def wrong(todo, words):
    return lambda answer: WRONG[todo].append((answer, words)) or answer


# ---- 3.1 throughput -------------------------------------------------------------------------


@right("3.1")
def throughput_in_one_loop(step, batch, warm_up, repeats, synchronize):
    times = []
    synchronize()
    for number in range(warm_up + repeats):
        start = time.time()
        step()
        synchronize()
        if number >= warm_up:
            times.append(time.time() - start)
    return batch / sorted(times)[len(times) // 2]


@right("3.1")
def throughput_of_torch(step, batch, warm_up, repeats, synchronize):
    for _ in range(warm_up):
        step()
        synchronize()
    times = torch.zeros(repeats, dtype=torch.float64)
    for number in range(repeats):
        synchronize()
        start = time.monotonic()
        step()
        synchronize()
        times[number] = time.monotonic() - start
    return (batch / times).median()


def rate_with(
    tell=lambda times, batch: batch / median(times),
    before=True,
    after=True,
    warm=lambda warm_up: warm_up,
    count=lambda repeats, warm_up: repeats,
    clock=time.perf_counter,
    early=False,
    late=False,
):
    """A throughput made of parts: what it tells, where it waits, how many steps of each kind."""

    def answer(step, batch, warm_up, repeats, synchronize):
        for _ in range(warm(warm_up)):
            step()
        times = []
        for _ in range(count(repeats, warm_up)):
            start = clock()
            if before:
                synchronize()
            start = start if early else clock()
            step()
            end = clock()
            if after:
                synchronize()
            times.append((end if late else clock()) - start)
        return tell(times, batch)

    return answer


def all_in_one(step, batch, warm_up, repeats, synchronize):
    for _ in range(warm_up):
        step()
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    synchronize()
    return batch * repeats / (time.perf_counter() - start)


def without_brackets(step, batch, warm_up, repeats, synchronize):
    return rate_with()(step, batch, warm_up, repeats, lambda: synchronize)


def of_cuda(step, batch, warm_up, repeats, synchronize):
    def elsewhere():
        raise RuntimeError("Found no NVIDIA driver on your system.")  # as torch.cuda.synchronize

    return rate_with()(step, batch, warm_up, repeats, elsewhere)


def of_the_loss(step, batch, warm_up, repeats, synchronize):
    value = rate_with(lambda times, batch: 1)(step, batch, warm_up, repeats - 1, synchronize)
    synchronize()
    value = step()
    synchronize()
    return batch / value


def from_one_start(step, batch, warm_up, repeats, synchronize):
    for _ in range(warm_up):
        step()
    times = []
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
        synchronize()
        times.append(time.perf_counter() - start)
    return batch / median(times)


def without_warm_up(warm_up):
    return 0


WRONG["3.1"] += [
    (rate_with(warm=without_warm_up), "the warm-up is missing"),
    (
        rate_with(warm=without_warm_up, count=lambda repeats, warm_up: repeats + warm_up),
        "the warm-up is among the times",
    ),
    (rate_with(lambda times, batch: batch / fmean(times)), "a mean, which one slow step moves"),
    (rate_with(lambda times, batch: fmean(batch / t for t in times)), "a mean of rates"),
    (rate_with(lambda times, batch: batch / min(times)), "the fastest step"),
    (rate_with(lambda times, batch: batch / max(times)), "the slowest step"),
    (rate_with(before=False, after=False), "never calls synchronize"),
    (without_brackets, "never calls synchronize"),
    (rate_with(before=False), "does not wait between the warm-up and the first step"),
    (rate_with(after=False), "the clock stops before the work is done"),
    (rate_with(late=True), "the clock stops before the work is done"),
    (rate_with(clock=time.process_time), "counts no waiting as process_time does"),
    (rate_with(early=True), "the clock starts before synchronize"),
    (all_in_one, "one time for all repeats together"),
    (rate_with(lambda times, batch: median(times) / batch), "seconds a sample"),
    (rate_with(lambda times, batch: median(times)), "seconds a step"),
    (rate_with(lambda times, batch: 1 / median(times)), "the batch is forgotten"),
    (rate_with(lambda times, batch: batch / sum(times)), "the time of all"),
    (rate_with(lambda times, batch: batch * len(times) / median(times)), "the time of one"),
    (rate_with(lambda times, batch: batch / median(times) / 1000), "the time in ms"),
    (rate_with(count=lambda repeats, warm_up: repeats + 1), "one step too many"),
    (rate_with(count=lambda repeats, warm_up: repeats - 1), "one step too few"),
    (rate_with(lambda times, batch: print(batch / median(times))), "nothing is returned"),
    (rate_with(lambda times, batch: [batch / t for t in times]), "that is no number"),
    (of_cuda, "the device need not be CUDA's"),
    (of_the_loss, "that is what `step` returns"),
    (from_one_start, "all times are counted from one start"),
]


# ---- 3.2 steps_to_target --------------------------------------------------------------------


@right("3.2")
def steps_with_a_history(step, evaluate, target, patience, every, max_steps):
    history, done = [], 0
    while done + every <= max_steps:
        for _ in range(every):
            step()
        done += every
        history.append((done, evaluate()))
        row = history[-patience:]
        if len(row) == patience and min(accuracy for _, accuracy in row) >= target:
            return row[0][0]


@right("3.2")
def steps_with_the_first(step, evaluate, target, patience, every, max_steps):
    first, count = None, 0
    for index in range(max_steps):
        step()
        if (index + 1) % every:
            continue
        if not evaluate() >= target:
            first, count = None, 0
            continue
        first, count = index + 1 if first is None else first, count + 1
        if count >= patience:
            return torch.tensor(first)
    return None


def steps_with(
    good=lambda accuracy, target: accuracy >= target,
    reset=True,
    tell=lambda end, patience, every: end - (patience - 1) * every,
    missed=lambda max_steps: None,
    row=lambda patience: patience,
    loop=lambda max_steps: range(1, max_steps + 1),
    due=lambda number, every: number % every == 0,
    look=lambda evaluate: evaluate(),
):
    """A steps_to_target made of parts."""

    def answer(step, evaluate, target, patience, every, max_steps):
        in_a_row = 0
        for number in loop(max_steps):
            step()
            if due(number, every):
                if good(look(evaluate), target):
                    in_a_row += 1
                elif reset:
                    in_a_row = 0
                if in_a_row == row(patience):
                    return tell(number, patience, every)
        return missed(max_steps)

    return answer


def evaluated_twice(evaluate):
    evaluate()
    return evaluate()


@wrong("3.2", "before the first step: an untrained model may count")
def steps_that_begin_with_a_look(step, evaluate, target, patience, every, max_steps):
    in_a_row = 0
    for number in range(max_steps + 1):
        if number % every == 0:
            in_a_row = in_a_row + 1 if evaluate() >= target else 0
            if in_a_row == patience:
                return number - (patience - 1) * every
        step()


@wrong("3.2", "max_steps is left out, or overrun")
def steps_without_an_end(step, evaluate, target, patience, every, max_steps):
    number = in_a_row = 0
    while in_a_row < patience:
        step()
        number += 1
        if number % every == 0:
            in_a_row = in_a_row + 1 if evaluate() >= target else 0
    return number - (patience - 1) * every


@wrong("3.2", "though it is sure after")
def steps_that_go_on(step, evaluate, target, patience, every, max_steps):
    found, in_a_row = None, 0
    for number in range(1, max_steps + 1):
        step()
        if number % every == 0:
            in_a_row = in_a_row + 1 if evaluate() >= target else 0
            if in_a_row == patience and found is None:
                found = number - (patience - 1) * every
    return found


@wrong("3.2", "again and again, and no step is done")
def steps_never_done(step, evaluate, target, patience, every, max_steps):
    while evaluate() < 2:
        pass


def overrun(step, evaluate, target, patience, every, max_steps):
    in_a_row = 0
    for block in range(0, max_steps, every):
        for _ in range(every):
            step()
        in_a_row = in_a_row + 1 if evaluate() >= target else 0
        if in_a_row == patience:
            return block + every - (patience - 1) * every


def end(end, patience, every):
    return end


def steps_by_first(
    count_falls=True, first_falls=True, otherwise=lambda first: None, row=lambda patience: patience
):
    """With a variable for the first of the row, and what a miss does to it and to the count."""

    def answer(step, evaluate, target, patience, every, max_steps):
        count, first = 0, None
        for number in range(1, max_steps + 1):
            step()
            if number % every == 0:
                if evaluate() >= target:
                    count += 1
                    first = first or number
                    if count == row(patience):
                        return first
                else:
                    count = 0 if count_falls else count
                    first = None if first_falls else first
        return otherwise(first)

    return answer


def unsure(first):
    return first


def never(patience):
    return math.inf


@wrong("3.2", "a mean of accuracies")
def steps_of_a_mean(step, evaluate, target, patience, every, max_steps):
    seen = []
    for number in range(1, max_steps + 1):
        step()
        if number % every == 0:
            seen.append(evaluate())
            if len(seen) >= patience and fmean(seen[-patience:]) >= target:
                return number - (patience - 1) * every


@wrong("3.2", "`patience` counts misses here")
def steps_given_up(step, evaluate, target, patience, every, max_steps):
    misses = 0
    for number in range(1, max_steps + 1):
        step()
        if number % every == 0:
            if evaluate() >= target:
                return number
            misses += 1
            if misses == patience:
                return None


@wrong("3.2", "`step` is never called")
def steps_without_a_step(step, evaluate, target, patience, every, max_steps):
    return steps_with()(lambda: None, evaluate, target, patience, every, max_steps)


WRONG["3.2"] += [
    (steps_with(row=lambda patience: 1, tell=end), "one good evaluation may be luck"),
    (steps_with(good=lambda accuracy, target: accuracy > target), "equal to the target counts"),
    (steps_with(good=lambda accuracy, target: accuracy < target), "turned round"),
    (steps_with(tell=end), "the last evaluation of the row, not the first"),
    (steps_with(tell=lambda end, patience, every: end // every), "a number of evaluations"),
    (
        steps_with(tell=lambda end, patience, every: end // every - patience + 1),
        "a number of evaluations",
    ),
    (steps_with(tell=lambda end, patience, every: end - patience * every), "one evaluation too"),
    (steps_with(tell=lambda end, patience, every: end - patience + 1), "between two evaluations"),
    (
        steps_with(tell=lambda end, patience, every: end - (patience - 1) * every - 1),
        "numbered from 0",
    ),
    (steps_with(reset=False), "a miss does not set the row back"),
    (steps_with(reset=False, tell=end), "a miss does not set the row back"),
    (steps_with(due=lambda number, every: True), "`every` is left out"),
    (steps_with(loop=range, due=lambda number, every: number % every == 0), "`every` is left out"),
    (steps_with(loop=lambda max_steps: range(1, max_steps)), "the last step allowed is not done"),
    (steps_with(loop=lambda max_steps: range(1, max_steps + 2)), "more than"),
    (overrun, "max_steps is left out, or overrun"),
    (steps_with(missed=lambda max_steps: max_steps), "it was not reached"),
    (steps_with(missed=lambda max_steps: -1), "it was not reached"),
    (steps_with(missed=lambda max_steps: math.inf), "it was not reached"),
    (steps_with(missed=lambda max_steps: False), "it was not reached"),
    (steps_with(look=evaluated_twice), "twice at the same step"),
    (steps_with(tell=lambda end, patience, every: print(end)), "nothing is returned"),
    (steps_with(tell=lambda end, patience, every: True), "1 number asked for"),
    (steps_by_first(otherwise=unsure), "ended in a row shorter than `patience`"),
    (steps_by_first(count_falls=False, first_falls=False), "a miss does not set the row back"),
    (steps_by_first(count_falls=False), "a miss does not set the count back"),
    (steps_by_first(first_falls=False), "the first evaluation is still one of an older row"),
    (steps_by_first(otherwise=unsure, row=never), "`patience` is not used"),
    (steps_with(look=lambda evaluate: evaluate), "evaluate(), in brackets"),
]


# ---- 3.3 best_rate --------------------------------------------------------------------------


@right("3.3")
def best_rate_in_a_loop(steps):
    best = None
    for rate, counts in steps.items():
        if any(count is None for count in counts):
            continue
        mean = sum(counts) / len(counts)
        if best is None or mean < best[1]:
            best = [rate, mean]
    return best


@right("3.3")
def best_rate_of_numpy(steps):
    means = {rate: np.mean([np.inf if c is None else c for c in steps[rate]]) for rate in steps}
    rate = sorted(means, key=means.get)[0]
    return (rate, means[rate]) if np.isfinite(means[rate]) else None


def rate_by(
    value=fmean,
    whole=lambda counts: None not in counts,
    pick=min,
    tell=lambda rate, mean: (rate, mean),
    otherwise=None,
):
    """A best_rate made of parts."""

    def answer(steps):
        values = {rate: value(counts) for rate, counts in steps.items() if whole(counts)}
        if not values:
            return otherwise
        rate = pick(values, key=values.get)
        return tell(rate, values[rate])

    return answer


@wrong("3.3", "the lists have unequal lengths")
def best_rate_of_a_tensor(steps):
    table = torch.tensor([[math.inf if n is None else n for n in row] for row in steps.values()])
    means = table.mean(dim=1)
    return list(steps)[means.argmin()], means.min().item()


@wrong("3.3", "the lists have unequal lengths")
def best_rate_of_an_array(steps):
    means = np.array(list(steps.values()), dtype=float).mean(axis=1)
    return list(steps)[np.nanargmin(means)], np.nanmin(means)


@wrong("3.3", "the smallest rate, not that of the fewest steps")
def best_rate_that_comes_first(steps):
    for rate, counts in sorted(steps.items()):
        if None not in counts:
            return rate, fmean(counts)


@wrong("3.3", "steps.items()")
def best_rate_without_items(steps):
    means = {rate: fmean(counts) for rate, counts in steps if None not in counts}
    return min(means.items(), key=lambda item: item[1], default=None)


def hits(counts):
    return [count for count in counts if count is not None]


@wrong("3.3", "the mean over all rates")
def best_rate_with_one_mean(steps):
    whole = {rate: counts for rate, counts in steps.items() if None not in counts}
    if not whole:
        return None
    return min(whole, key=lambda rate: fmean(whole[rate])), fmean(sum(whole.values(), start=[]))


@wrong("3.3", "the caller's dict was changed")
def best_rate_that_deletes(steps):
    for rate in list(steps):
        if None in steps[rate]:
            del steps[rate]
    return scaling.best_rate(steps)


@wrong("3.3", "nothing is left to choose from")
def best_rate_of_nothing(steps):
    means = {rate: fmean(counts) for rate, counts in steps.items() if None not in counts}
    return min(means.items(), key=lambda item: item[1])


@wrong("3.3", "a seed that missed the target, is among the numbers")
def best_rate_with_none(steps):
    return min(((rate, fmean(counts)) for rate, counts in steps.items()), key=lambda item: item[1])


@wrong("3.3", "min compares what comes first in a pair")
def best_rate_without_a_key(steps):
    means = {rate: fmean(counts) for rate, counts in steps.items() if None not in counts}
    return min(means.items(), default=None)


WRONG["3.3"] += [
    (rate_by(lambda c: fmean(hits(c)), lambda c: hits(c)), "with the seeds that did not miss"),
    (rate_by(lambda c: fmean(n or 0 for n in c), lambda c: True), "None counts as 0 steps"),
    (rate_by(lambda c: sum(hits(c)) / len(c), lambda c: hits(c)), "seeds that missed are in it"),
    (rate_by(min), "the best single seed"),
    (rate_by(lambda c: min(hits(c)), lambda c: hits(c)), "the best single seed"),
    (rate_by(max), "the worst single seed"),
    (rate_by(median), "a median"),
    (rate_by(sum), "a sum over the seeds"),
    (rate_by(pick=max), "the most steps, not the fewest"),
    (rate_by(tell=lambda rate, mean: rate), "the rate alone"),
    (rate_by(tell=lambda rate, mean: mean), "the mean alone"),
    (rate_by(tell=lambda rate, mean: (mean, rate)), "the steps come first"),
    (rate_by(lambda c: sum(c) // len(c)), "a rounded mean"),
    (rate_by(lambda c: round(fmean(c))), "a rounded mean"),
    (rate_by(otherwise=(None, None)), "a pair of None"),
    (
        rate_by(lambda c: fmean(math.inf if n is None else n for n in c), lambda c: True),
        "a seed missed the target with each rate",
    ),
    (
        rate_by(lambda c: fmean(n or 4000 for n in c), lambda c: True),
        "a seed missed the target with each rate",
    ),
    (rate_by(lambda c: sum(c) / 3), "divided by 3, whatever the number of seeds"),
    (rate_by(tell=lambda rate, mean: {rate: mean}), "gives a dict"),
]


# ---- 3.4 fit_steps --------------------------------------------------------------------------


@right("3.4")
def fit_of_numpy(batches, steps):
    x, y = 1 / np.asarray(batches), np.asarray(steps)
    slope, least = np.polyfit(x, y, 1, w=1 / y)
    return least, slope / least


@right("3.4")
def fit_of_normal_equations(batches, steps):
    a = [(1 / n, 1 / (b * n)) for b, n in zip(batches, steps, strict=True)]
    p, q, r = sum(u * u for u, _ in a), sum(u * v for u, v in a), sum(v * v for _, v in a)
    s, t = sum(u for u, _ in a), sum(v for _, v in a)
    determinant = p * r - q * q
    least, slope = (s * r - t * q) / determinant, (p * t - q * s) / determinant
    return torch.tensor([least, slope / least])


@right("3.4")
def fit_by_a_long_search(batches, steps):
    return fit_by_search(lambda ratio: ratio - 1)(batches, steps)


def fit_with(tell=lambda least, slope: (least, slope / least), power=1.0, by=-1.0):
    """A fit made of parts: of least + slope * batch^by, with weights 1 / steps^power."""

    def answer(batches, steps):
        x, y = np.asarray(batches, dtype=float) ** by, np.asarray(steps)
        slope, least = np.polyfit(x, y, 1, w=y**-power)
        return tell(least, slope)

    return answer


def fit_of_logs(batches, steps):
    slope, intercept = np.polyfit(np.log(batches), np.log(steps), 1)
    return math.exp(intercept), -slope


def fit_of_the_fewest(batches, steps):
    least = min(steps)
    ratios = [batch * (n / least - 1) for batch, n in zip(batches, steps, strict=True)]
    return least, fmean(ratios)


def fit_rounded(digits):
    def answer(batches, steps):
        least, critical = fit_of_numpy(batches, steps)
        return round(least, digits), round(critical, digits)

    return answer


def fit_by_search(error, rate=None):
    """Least squares of error(fitted / steps), with LBFGS, or with a few steps of SGD."""

    def answer(batches, steps):
        b, y = (torch.tensor(v, dtype=torch.float64) for v in (batches, steps))
        start = torch.tensor([min(steps), 10.0], dtype=torch.float64).log()
        logs = start.requires_grad_()
        searches = {
            True: lambda: torch.optim.LBFGS([logs], max_iter=500, line_search_fn="strong_wolfe"),
            False: lambda: torch.optim.SGD([logs], lr=rate),
        }
        search = searches[rate is None]()

        def loss():
            search.zero_grad()
            total = error(logs[0].exp() * (1 + logs[1].exp() / b) / y).square().sum()
            total.backward()
            return total

        for _ in range(5):
            search.step(loss)
        return tuple(logs.exp().tolist())

    return answer


def fit_of_two_points(batches, steps):
    rise = steps[-1] * batches[-1] - steps[0] * batches[0]
    least = rise / (batches[-1] - batches[0])
    return least, (steps[0] - least) * batches[0] / least


def fit_of_lists(batches, steps):
    slope, least = np.polyfit(1 / batches, steps, 1, w=1 / steps)
    return least, slope / least


def fit_in_order(batches, steps):
    steps.sort(reverse=True)
    batches.sort()
    return fit_of_numpy(batches, steps)


WRONG["3.4"] += [
    (fit_with(power=0), "absolute errors: the smallest batch"),
    (fit_with(lambda least, slope: (least, slope), power=0), "critical = slope / least"),
    (fit_with(power=2), "divided by the steps twice"),
    (fit_with(power=0.5), "divided by the root of the steps"),
    (fit_of_logs, "a straight line of logarithms"),
    (fit_with(lambda least, slope: (least, slope)), "the slope, least * critical"),
    (fit_with(lambda least, slope: (least, least / slope)), "1 / the critical batch"),
    (fit_with(lambda least, slope: (least, least * slope)), "slope times least"),
    (fit_with(lambda least, slope: (slope / least, least)), "the critical batch comes first"),
    (fit_with(lambda least, slope: (slope, least / slope)), "have changed places"),
    (fit_of_the_fewest, "the fewest steps measured"),
    (fit_with(by=1), "a line over the batch"),
    (fit_with(power=0, by=1), "a line over the batch"),
    (fit_with(lambda least, slope: least), "2 numbers asked for"),
    (fit_with(lambda least, slope: (least, slope / least, slope)), "2 numbers asked for"),
    (fit_with(lambda least, slope: {"least": least}), "gives a dict"),
    (fit_with(lambda least, slope: print(least, slope)), "nothing is returned"),
    (fit_in_order, "the caller's list was changed"),
    (fit_rounded(None), "a rounded result"),
    (fit_rounded(1), "a rounded result"),
    (fit_by_search(lambda ratio: ratio - 1, rate=1e-3), "search stops too early"),
    (fit_by_search(lambda ratio: 1 / ratio - 1), "relative to the fitted steps"),
    (fit_by_search(torch.log), "differences of logarithms"),
    (fit_of_two_points, "the first and the last batch alone"),
    (fit_of_lists, "a list cannot be used as a vector"),
]


# ---- 3.5 average_over_ranks -----------------------------------------------------------------


@right("3.5")
def average_by_gathering(gradient, group=None):
    gradients = [torch.empty_like(gradient) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gradients, gradient, group=group)
    stacked = torch.stack(gradients).double()
    return stacked.mean(0), fmean(stacked.norm(dim=1).square().tolist())


@right("3.5")
def average_in_two_messages(gradient, group=None):
    mean, square = gradient.clone(), gradient @ gradient
    works = [dist.all_reduce(t, group=group, async_op=True) for t in (mean, square)]
    for work in works:
        work.wait()
    count = dist.get_world_size(group)
    return mean / count, square / count


def average_with(
    square=lambda gradient: gradient.square().sum(),
    reduce=lambda tensor, group: dist.all_reduce(tensor, group=group),
    divide=lambda group: dist.get_world_size(group),
    copy=torch.Tensor.clone,
    own=False,
    tell=lambda mean, square: (mean, square.item()),
):
    """An average_over_ranks made of parts; own: the square is not sent."""

    def answer(gradient, group=None):
        size = square(gradient).clone()
        mean = copy(gradient)
        reduce(mean, group)
        if not own:
            reduce(size, group)
            size = size / divide(group)
        return tell(mean.div_(divide(group)), size)

    return answer


def to_the_first(tensor, group):
    root = dist.get_process_group_ranks(group or dist.group.WORLD)[0]
    dist.reduce(tensor, root, group=group)


def without_a_wait(tensor, group):
    dist.all_reduce(tensor, group=group, async_op=True)


def job_reduce(tensor, group):
    dist.all_reduce(tensor)


def no_reduce(tensor, group):
    pass


def job_size(group):
    return dist.get_world_size()


def vector_too_long(gradient, group=None):
    both = torch.cat([gradient, gradient.square().sum()[None]])
    dist.all_reduce(both, group=group)
    both /= dist.get_world_size(group)
    return both, both[-1].item()


def of_the_sum(gradient, group=None):
    mean = average_with()(gradient, group)[0]
    dist.barrier(group=group)
    return mean, (mean * dist.get_world_size(group)).square().sum()


def of_a_number(gradient, group=None):
    dist.all_reduce(gradient.square().sum().item(), group=group)


@wrong("3.5", "ranks 1, 2 and 3 have left the function) - a hang: not every rank makes the same")
def of_the_first_alone(gradient, group=None):
    mean = average_with(own=True)(gradient, group)[0]
    square = gradient.square().sum()
    if dist.get_rank() == 0:
        dist.all_reduce(square, group=group)
    return mean, square.item() / dist.get_world_size(group)


@wrong("3.5", "a loop without an end")
def without_an_end(gradient, group=None):
    total = 0
    while True:
        total += 1
        total -= 1


@wrong("3.5", "reduce brings the sum to one rank only")
def reduced_to_0(gradient, group=None):
    mean = gradient.clone()
    dist.reduce(mean, 0, group=group)
    return mean / dist.get_world_size(group), gradient.square().sum().item()


@wrong("3.5", "and returns None")
def of_what_is_returned(gradient, group=None):
    mean = dist.all_reduce(gradient.clone(), group=group) / dist.get_world_size(group)
    return mean, 0.0


WRONG["3.5"] += [
    (average_with(divide=lambda group: 1), "a sum: large batches"),
    (average_with(copy=lambda gradient: gradient), "which the caller still needs"),
    (
        average_with(tell=lambda mean, square: (mean, mean.square().sum().item())),
        "the square of the averaged gradient",
    ),
    (of_the_sum, "the square of the summed gradient"),
    (average_with(torch.linalg.vector_norm), "lengths, not squared"),
    (
        average_with(torch.linalg.vector_norm, tell=lambda mean, size: (mean, size**2)),
        "the square of the mean length",
    ),
    (average_with(tell=lambda mean, square: (mean, square.sqrt())), "the root was taken"),
    (average_with(lambda gradient: gradient.square().mean()), "divided by the number of entries"),
    (average_with(lambda gradient: gradient.sum().square()), "the sum of the entries"),
    (average_with(reduce=job_reduce, divide=job_size), "`group` is not passed on"),
    (average_with(reduce=job_reduce), "`group` is not passed on to all_reduce"),
    (average_with(divide=job_size), "divided by the number of ranks in the whole job"),
    (average_with(own=True), "this rank's own square"),
    (average_with(reduce=no_reduce), "this rank's own gradient"),
    (average_with(reduce=no_reduce, divide=lambda group: 1), "this rank's own gradient: nothing"),
    (average_with(reduce=to_the_first), "only the first rank of the group"),
    (average_with(reduce=without_a_wait), "does not wait for an all_reduce"),
    (average_with(tell=lambda mean, square: mean), "a pair is asked for"),
    (average_with(tell=lambda mean, square: (square, mean)), "the gradient (P,) comes first"),
    (average_with(tell=lambda mean, square: (mean, None)), "nothing is returned"),
    (vector_too_long, "(8,), not (7,) - the gradient (P,) comes first"),
    (of_a_number, "a collective takes a tensor"),
]


# ---- 3.6 noise_scale ------------------------------------------------------------------------


@right("3.6")
def noise_of_two_equations(small_squares, large_squares, small, large):
    system = torch.tensor([[1, 1 / small], [1, 1 / large]], dtype=torch.float64)
    means = torch.tensor([fmean(small_squares), fmean(large_squares)], dtype=torch.float64)
    true, variance = torch.linalg.solve(system, means)
    return variance / true


@right("3.6")
def noise_of_numpy(small_squares, large_squares, small, large):
    s, b = np.mean(small_squares), np.mean(large_squares)
    variance = small * large * (s - b) / (large - small)
    return variance / (b - variance / large)


def noise_with(
    pick=fmean,
    variance=lambda s, b, small, large: (s - b) / (1 / small - 1 / large),
    true=lambda s, b, small, large: (large * b - small * s) / (large - small),
    tell=lambda variance, true: variance / true,
):
    """A noise_scale made of parts."""

    def answer(small_squares, large_squares, small, large):
        sizes = pick(small_squares), pick(large_squares), small, large
        return tell(variance(*sizes), true(*sizes))

    return answer


def noise_by_hand(tell):
    """Of the right V, and of the two mean squares."""

    def answer(small_squares, large_squares, small, large):
        s, b = fmean(small_squares), fmean(large_squares)
        return tell(s, b, (s - b) / (1 / small - 1 / large), small, large)

    return answer


def mean_of_ratios(small_squares, large_squares, small, large):
    pairs = zip(small_squares, large_squares, strict=False)
    return fmean(noise_with()([s], [b], small, large) for s, b in pairs)


def in_place(small_squares, large_squares, small, large):
    small_squares[:] = [square * small for square in small_squares]
    return 1.0


WRONG["3.6"] += [
    (mean_of_ratios, "a mean of ratios: the true square of a single pair is noise"),
    (noise_with(lambda values: fmean(map(math.sqrt, values))), "lengths, not squared"),
    (noise_with(lambda values: fmean(map(math.sqrt, values)) ** 2), "the square of the mean"),
    (noise_with(lambda values: fmean(v * v for v in values)), "squared again"),
    (noise_with(median), "a median: squares are skewed"),
    (noise_with(sum), "the two lists need not be equally long"),
    (noise_with(lambda values: values[0]), "the first measurement alone"),
    (lambda s, b, n, m: noise_with()(b, s, n, m), "the squares are swapped"),
    (noise_with(true=lambda s, b, n, m: (m * s - n * b) / (m - n)), "changed places in the true"),
    (noise_with(tell=lambda variance, true: variance), "V alone"),
    (noise_with(tell=lambda variance, true: true), "the true square alone"),
    (noise_with(tell=lambda variance, true: true / variance), "upside down"),
    (noise_with(tell=lambda variance, true: math.sqrt(variance / true)), "a root"),
    (noise_with(tell=lambda variance, true: variance / true**2), "square of the true square"),
    (noise_with(lambda values: -fmean(values), tell=lambda v, g: -v / g), "a sign is turned"),
    (noise_with(variance=lambda s, b, n, m: (s - b) / (1 / n + 1 / m)), "1 / small + 1 / large"),
    (noise_with(variance=lambda s, b, n, m: (s - b) / (m - n)), "V / batch, not V * batch"),
    (noise_with(variance=lambda s, b, n, m: s - b), "not divided by 1 / small"),
    (noise_with(variance=lambda s, b, n, m: (s - b) * (1 / n - 1 / m)), "multiplied by 1 / small"),
    (noise_with(true=lambda s, b, n, m: b), "noise is left in it"),
    (noise_with(true=lambda s, b, n, m: s), "it is mostly noise"),
    (noise_with(true=lambda s, b, n, m: m * b - n * s), "not divided by large - small"),
    (noise_with(true=lambda s, b, n, m: (m * b - n * s) / (m + n)), "divided by large + small"),
    (noise_with(tell=lambda variance, true: print(variance / true)), "nothing is returned"),
    (noise_with(tell=lambda variance, true: (variance, true)), "1 number asked for"),
    (lambda s, b, n, m: statistics.pvariance(s) / fmean(b), "variance of the squared lengths"),
    (lambda s, b, n, m: 3.3 * n, "solve for V, true"),
    (in_place, "the caller's list was changed"),
    (lambda s, b, n, m: noise_with()(s, b, 8, 32), "the sizes 8 and 32 are written into it"),
    (lambda s, b, n, m: int(noise_with()(s, b, n, m)), "a rounded result"),
    (lambda s, b, n, m: round(noise_with()(s, b, n, m), 1), "a rounded result"),
    (noise_by_hand(lambda s, b, v, n, m: -v / (s + v / n)), "V comes out negative"),
    (noise_by_hand(lambda s, b, v, n, m: v / (s + v / n)), "the noise is added"),
    (noise_by_hand(lambda s, b, v, n, m: v / (b - v / n)), "from the square of the other batch"),
    (lambda s, b, n, m: statistics.variance(s) * n / fmean(b), "variance of the squared lengths"),
]
