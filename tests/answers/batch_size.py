"""Answers to lesson 03: right ones of other shapes, and wrong ones that are no slip."""

import time
from statistics import fmean
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist

from manyhands.batch_size import scaling

# ---- 3.1 ------------------------------------------------------------------------------------


def throughput_in_one_loop(step, batch, warm_up, blocks, steps, synchronize):
    for _ in range(warm_up):
        step()
    synchronize()
    looks = [time.time()]
    for number in range(1, blocks * steps + 1):
        step()
        if number % steps == 0:
            synchronize()
            looks.append(time.time())
    times = sorted(after - before for before, after in zip(looks, looks[1:], strict=False))
    return batch / (times[len(times) // 2] / steps)


def throughput_of_torch(step, batch, warm_up, blocks, steps, synchronize):
    for _ in range(warm_up):
        step()
        synchronize()
    times = torch.zeros(blocks, dtype=torch.float64)
    for number in range(blocks):
        synchronize()
        start = time.monotonic()
        for _ in range(steps):
            step()
        synchronize()
        times[number] = time.monotonic() - start
    return (batch * steps / times).median()


def throughput_of_an_imported_clock(step, batch, warm_up, blocks, steps, synchronize):
    for _ in range(warm_up):
        step()
    looks = []
    for _ in range(blocks):
        synchronize()
        looks.append(perf_counter())
        for _ in range(steps):
            step()
        synchronize()
        looks.append(perf_counter())
    return batch * steps / np.median(np.diff(looks)[::2])


def throughput_of_cuda(step, batch, warm_up, blocks, steps, synchronize):
    def elsewhere():
        raise RuntimeError("Found no NVIDIA driver on your system.")  # as torch.cuda.synchronize

    return scaling.throughput(step, batch, warm_up, blocks, steps, elsewhere)


def throughput_without_a_clock(step, batch, warm_up, blocks, steps, synchronize):
    for _ in range(warm_up + blocks * steps):
        value = step()
    return batch / value


# ---- 3.2 ------------------------------------------------------------------------------------


def steps_with_a_history(step, evaluate, target, patience, every, max_steps):
    history = []
    done = 0
    while done + every <= max_steps:
        for _ in range(every):
            step()
        done += every
        history.append((done, evaluate()))
        row = history[-patience:]
        if len(row) == patience and min(accuracy for _, accuracy in row) >= target:
            return row[0][0]
    return None


def steps_with_the_first(step, evaluate, target, patience, every, max_steps):
    first = None
    count = 0
    for index in range(max_steps):
        step()
        if (index + 1) % every:
            continue
        if not evaluate() >= target:
            first = None
            count = 0
            continue
        first = index + 1 if first is None else first
        count += 1
        if count >= patience:
            return torch.tensor(first)
    return None


def steps_that_begin_with_a_look(step, evaluate, target, patience, every, max_steps):
    in_a_row = 0
    for number in range(max_steps + 1):
        if number % every == 0:
            in_a_row = in_a_row + 1 if evaluate() >= target else 0
            if in_a_row == patience:
                return number - (patience - 1) * every
        step()
    return None


def steps_never_done(step, evaluate, target, patience, every, max_steps):
    while evaluate() < 2:
        pass


def steps_nearly_there(step, evaluate, target, patience, every, max_steps):
    return scaling.steps_to_target(step, evaluate, target - 0.01, patience, every, max_steps)


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
    return None


# ---- 3.3 ------------------------------------------------------------------------------------


def best_rate_in_a_loop(steps):
    best = None
    for rate, counts in steps.items():
        if any(count is None for count in counts):
            continue
        mean = sum(counts) / len(counts)
        if best is None or mean < best[1]:
            best = [rate, mean]
    return best


def best_rate_of_numpy(steps):
    means = {rate: np.mean([np.inf if c is None else c for c in steps[rate]]) for rate in steps}
    rate = sorted(means, key=means.get)[0]
    return (rate, means[rate]) if np.isfinite(means[rate]) else None


def best_rate_that_deletes(steps):
    for rate in list(steps):
        if None in steps[rate]:
            del steps[rate]
    return scaling.best_rate(steps)


def best_rate_of_nothing(steps):
    means = {rate: fmean(counts) for rate, counts in steps.items() if None not in counts}
    return min(means.items(), key=lambda item: item[1])


def best_rate_with_one_mean(steps):
    hits = {rate: counts for rate, counts in steps.items() if None not in counts}
    if not hits:
        return None
    every = [count for counts in hits.values() for count in counts]
    return min(hits, key=lambda rate: fmean(hits[rate])), fmean(every)


# ---- 3.4 ------------------------------------------------------------------------------------


def fit_of_numpy(batches, steps):
    x = 1 / np.asarray(batches)
    y = np.asarray(steps)
    slope, least = np.polyfit(x, y, 1, w=1 / y)
    return least, slope / least


def fit_of_normal_equations(batches, steps):
    a = [(1 / n, 1 / (b * n)) for b, n in zip(batches, steps, strict=True)]
    p, q, r = sum(u * u for u, _ in a), sum(u * v for u, v in a), sum(v * v for _, v in a)
    s, t = sum(u for u, _ in a), sum(v for _, v in a)
    determinant = p * r - q * q
    least, slope = (s * r - t * q) / determinant, (p * t - q * s) / determinant
    return torch.tensor([least, slope / least])


def fit_of_lists(batches, steps):
    slope, least = np.polyfit(1 / batches, steps, 1, w=1 / steps)
    return least, slope / least


def fit_in_order(batches, steps):
    steps.sort(reverse=True)
    batches.sort()
    return fit_of_numpy(batches, steps)


# ---- 3.5 ------------------------------------------------------------------------------------


def average_by_gathering(gradient, group=None):
    gradients = [torch.empty_like(gradient) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gradients, gradient.contiguous(), group=group)
    stacked = torch.stack(gradients).double()
    return stacked.mean(0), fmean(stacked.norm(dim=1).square().tolist())


def average_in_two_messages(gradient, group=None):
    mean = gradient.clone()
    square = gradient @ gradient
    works = [dist.all_reduce(t, group=group, async_op=True) for t in (mean, square)]
    for work in works:
        work.wait()
    count = dist.get_world_size(group)
    return mean / count, square / count


def average_of_what_is_returned(gradient, group=None):
    mean = dist.all_reduce(gradient.clone(), group=group) / dist.get_world_size(group)
    return mean, 0.0


def average_of_the_first_alone(gradient, group=None):
    mean, square = scaling.average_over_ranks(gradient, group)
    if dist.get_rank() == 0:
        dist.all_reduce(mean, group=group)
    return mean, square


# ---- 3.6 ------------------------------------------------------------------------------------


def noise_of_two_equations(small_squares, large_squares, small, large):
    system = torch.tensor([[1, 1 / small], [1, 1 / large]], dtype=torch.float64)
    means = torch.tensor([fmean(small_squares), fmean(large_squares)], dtype=torch.float64)
    true, variance = torch.linalg.solve(system, means)
    return variance / true


def noise_of_numpy(small_squares, large_squares, small, large):
    s = np.mean(small_squares)
    b = np.mean(large_squares)
    variance = small * large * (s - b) / (large - small)
    return variance / (b - variance / large)


def noise_of_two_sizes(small_squares, large_squares, small, large):
    return scaling.noise_scale(small_squares, large_squares, 8, 32)


def noise_in_place(small_squares, large_squares, small, large):
    found = scaling.noise_scale(small_squares, large_squares, small, large)
    small_squares[:] = [square * small for square in small_squares]
    return found


# ---- 3.7 ------------------------------------------------------------------------------------


def processors_counted_up(least, critical, batch, step_s, limit_s):
    if least * step_s >= limit_s:
        return None
    number = 1
    while least * (1 + critical / (number * batch)) * step_s > limit_s:
        number += 1
    return number


def processors_of_a_global_batch(least, critical, batch, step_s, limit_s):
    num_steps = limit_s / step_s
    if num_steps <= least:
        return None
    global_batch = critical / (num_steps / least - 1)
    return np.ceil(global_batch / batch)


def processors_of_a_node(least, critical, batch, step_s, limit_s):
    for number in range(1, 9):
        if least * (1 + critical / (number * batch)) * step_s <= limit_s:
            return number
    return None


def processors_without_an_end(least, critical, batch, step_s, limit_s):
    number = 1
    while least * (1 + critical / (number * batch)) * step_s > limit_s:
        number += 1
    return number


def processors_up_to_a_cap(least, critical, batch, step_s, limit_s):
    for number in range(1, 10_001):
        if least * (1 + critical / (number * batch)) * step_s <= limit_s:
            return number
    return None


RIGHT = {
    "3.1": [throughput_in_one_loop, throughput_of_torch, throughput_of_an_imported_clock],
    "3.2": [steps_with_a_history, steps_with_the_first],
    "3.3": [best_rate_in_a_loop, best_rate_of_numpy],
    "3.4": [fit_of_numpy, fit_of_normal_equations],
    "3.5": [average_by_gathering, average_in_two_messages],
    "3.6": [noise_of_two_equations, noise_of_numpy],
    "3.7": [processors_counted_up, processors_of_a_global_batch],
}
WRONG = {
    "3.1": [
        (throughput_of_cuda, "The device need not be CUDA's"),
        (throughput_without_a_clock, "a clock of the module time that counts waiting is read"),
    ],
    "3.2": [
        (steps_that_begin_with_a_look, "gives the result: 0, not 2"),
        (steps_never_done, "The model does not change between steps"),
        (steps_nearly_there, ""),
        (steps_given_up, ""),
    ],
    "3.3": [
        (best_rate_that_deletes, "`steps` has changed"),
        (best_rate_of_nothing, "nothing is left to choose from"),
        (best_rate_with_one_mean, ""),
    ],
    "3.4": [(fit_of_lists, "A list cannot be divided"), (fit_in_order, "has changed")],
    "3.5": [
        (average_of_what_is_returned, "returns None"),
        (average_of_the_first_alone, ""),
    ],
    "3.6": [(noise_of_two_sizes, ""), (noise_in_place, "`small_squares` has changed")],
    "3.7": [
        (processors_of_a_node, ""),
        (processors_without_an_end, ""),
        (processors_up_to_a_cap, "gives None, not"),
    ],
}
