"""Lesson 03: its functions against exact gradients, exact laws, and one process with all data."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.batch_size.figures import throughput_curve, trade_off
from manyhands.batch_size.scaling import (
    average_over_ranks,
    best_rate,
    fewest_processors,
    fit_steps,
    noise_scale,
    steps_to_target,
    throughput,
)
from manyhands.instruments import figures
from manyhands.ranks.lab import run_ranks
from manyhands.training import storage


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- time ----------------------------------------------------------------------------------------


def test_the_throughput_of_a_step_that_sleeps():
    slow = [0.2] + 5 * [0.01]
    times_s = iter([0.2, 0.2] + 6 * [0.01] + slow + 6 * [0.01])  # two for the warm-up
    calls = []

    def step():
        calls.append("step")
        time.sleep(next(times_s))

    found = throughput(step, 30, 2, 3, 6, lambda: calls.append("wait"))
    assert 180 / 0.12 < found <= 180 / 0.06  # with the mean it would be 180 / 0.123 at the most
    assert calls == ["step"] * 2 + ["wait", *["step"] * 6, "wait"] * 3


# ---- steps ---------------------------------------------------------------------------------------


def training(accuracies: list[float]) -> tuple:
    """A step, and an evaluation that looks up the accuracy after so many steps."""
    done = []
    return lambda: done.append(1), lambda: accuracies[len(done)]


@pytest.mark.parametrize(
    ("accuracies", "patience", "every", "max_steps", "wanted"),
    [
        ([0.9, 0.1, 0.8, 0.8], 1, 1, 3, 2),  # before the first step nothing counts
        ([0, 0.8, 0.1, 0.8, 0.9], 2, 1, 4, 3),
        ([0, 0.8, 0.1, 0.8, 0.9], 2, 1, 3, None),
        ([0, 0.9, 0.1, 0.9, 0.8, 0.1, 0.9], 2, 2, 6, 4),
        ([0, 0.9, 0.9, 0.9], 1, 4, 3, None),
        ([0, 0.1, 0.9, 0.9], 3, 1, 3, None),  # good at the end, in a row that is too short
    ],
)
def test_steps_of_hand_made_trainings(accuracies, patience, every, max_steps, wanted):
    step, evaluate = training(accuracies)
    assert steps_to_target(step, evaluate, 0.8, patience, every, max_steps) == wanted


def test_the_best_rate_of_hand_made_sweeps():
    sweep = {0.4: [10, None], 0.1: [100, 141], 0.2: [30, 300]}
    assert best_rate(sweep) == (0.1, 120.5)
    assert best_rate({0.4: [None], 0.2: [5, None]}) is None and best_rate({}) is None


# ---- the law -------------------------------------------------------------------------------------


def test_the_fit_finds_an_exact_law():
    batches = [1, 2, 3, 10, 64, 1000]
    for least, critical in ((20, 50), (300, 4), (7.5, 900.0)):
        steps = [least * (1 + critical / batch) for batch in batches]
        assert fit_steps(batches, steps) == pytest.approx((least, critical), rel=1e-8)
        assert fit_steps([2, 500], [steps[1], least * (1 + critical / 500)]) == pytest.approx(
            (least, critical), rel=1e-8
        )


def test_no_other_curve_is_nearer():
    batches = [1, 4, 16, 64, 256]
    steps = [1000.0, 330.0, 70.0, 48.0, 20.0]

    def distance(least: float, critical: float) -> float:
        fitted = [least * (1 + critical / batch) for batch in batches]
        return sum((f / n - 1) ** 2 for f, n in zip(fitted, steps, strict=True))

    least, critical = fit_steps(batches, steps)
    for factor in (0.99, 1.01):
        assert distance(least, critical) < distance(least * factor, critical)
        assert distance(least, critical) < distance(least, critical * factor)


# ---- gradients -----------------------------------------------------------------------------------


def samples(number: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A small model, inputs, and classes; all in 64 bits."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    inputs = torch.randn(number, 5, generator=generator(1), dtype=torch.float64)
    return model, inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 1).long()


def gradient(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(model(inputs), labels)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def ranks_and_whole(num_ranks: int, batch: int) -> tuple[Tensor, Tensor, float, float]:
    """On a rank: the averages and the truth, from the whole batch and from each rank's part."""
    model, inputs, labels = samples(num_ranks * batch)
    parts = list(zip(inputs.split(batch), labels.split(batch), strict=True))
    own = gradient(model, *parts[dist.get_rank()])
    before = own.clone()
    mean, square = average_over_ranks(own)
    assert torch.equal(own, before)
    squares = [gradient(model, *part).square().sum().item() for part in parts]
    return mean, gradient(model, inputs, labels), square, sum(squares) / num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_ranks_gradient_is_that_of_the_global_batch(num_ranks):
    for mean, whole, square, wanted in run_ranks(ranks_and_whole, num_ranks, num_ranks, 6):
        assert torch.allclose(mean, whole, rtol=0, atol=1e-6 * whole.norm().item())
        assert square == pytest.approx(wanted, rel=1e-6)


def test_the_noise_scale_is_that_of_the_gradients_of_single_samples():
    model, inputs, labels = samples(400)
    pairs = zip(inputs.split(1), labels.split(1), strict=True)
    singles = torch.stack([gradient(model, *pair) for pair in pairs])
    true = singles.mean(0)
    exact = (singles.var(0, correction=0).sum() / true.square().sum()).item()
    small, large, squares = 2, 32, {}
    for size in (small, large):
        chosen = torch.randint(400, (4000, size), generator=generator(size))  # with replacement
        squares[size] = singles[chosen].mean(1).square().sum(1).tolist()
    found = noise_scale(squares[small], squares[large], small, large)
    assert found == pytest.approx(exact, rel=0.05)
    plain = (sum(squares[small]) / 4000 - true.square().sum().item()) * small
    assert plain == pytest.approx(singles.var(0, correction=0).sum().item(), rel=0.05)


def test_the_noise_scale_of_exact_expectations():
    true, variance = 0.25, 40.0
    at = {size: [true + variance / size] for size in (8, 72)}
    assert noise_scale(at[8], at[72], 8, 72) == pytest.approx(variance / true)
    spread = [at[8][0] - 1, at[8][0] + 1]
    assert noise_scale(spread, at[72] * 3, 8, 72) == pytest.approx(variance / true)


# ---- cost ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "step_s"), [(1, 0.25), (8, 2.0), (64, 0.125)])
def test_one_processor_fewer_would_be_too_late(batch, step_s):
    least, critical = 50.0, 90.0

    def time_s(num: int) -> float:
        return least * (1 + critical / (num * batch)) * step_s

    for limit in (1.01, 1.5, 3, 10, 1000):
        limit_s = limit * least * step_s
        found = fewest_processors(least, critical, batch, step_s, limit_s)
        assert time_s(found) <= limit_s * (1 + 1e-9)
        assert found == 1 or time_s(found - 1) > limit_s
    for limit in (1, 0.5):
        assert fewest_processors(least, critical, batch, step_s, limit * least * step_s) is None


def test_waiting_a_times_the_least_costs_a_by_a_minus_1_times_the_least():
    for a in (1.25, 2, 3):
        num = fewest_processors(100.0, 6000.0, 1, 1.0, a * 100.0)
        images = 100 * (num + 6000)
        assert images == pytest.approx(a / (a - 1) * 100 * 6000, rel=1e-3)


# ---- the stored sweeps ---------------------------------------------------------------------------

STORED = ("transformer", "digits", "mnist", "cnn")  # in the order of their critical batches


def test_what_the_lesson_says_of_the_stored_sweeps():
    runs = [storage.stored("batch_size", name) for name in STORED]
    critical = [run["critical_batch"] for run in runs]
    noise = [run["noise_scale"] for run in runs]
    assert critical == sorted(critical) and noise == sorted(noise)
    assert all(1 / 2 < n / c < 2 for n, c in zip(noise, critical, strict=True))
    assert 4 < critical[0] < 6 and 20 < critical[1] < 25 and 40 < critical[2]
    first = [run["batches"][0]["batch"] for run in runs]
    assert first == [1, 1, 2, 4]
    for run in runs[1:]:
        assert run["batches"][0]["rate"] == min(rate for _, rate, _ in run["all"])
    largest = max(rate for _, rate, _ in runs[0]["all"])
    ends = [one["batch"] for one in runs[0]["batches"] if one["rate"] == largest]
    assert ends == [4, 64]
    for run in runs:
        rates = [one["rate"] for one in run["batches"][1:]]
        assert run is runs[0] or max(rates) < max(rate for _, rate, _ in run["all"])


# ---- figures -------------------------------------------------------------------------------------


def draw_trade_off(ax):
    results = [{"batch": 2**k, "mean": 46 * (1 + 23 / 2**k)} for k in range(9)]
    trade_off(ax, results, 46.4, 22.7)


def draw_throughput(ax):
    throughput_curve(ax, {1: 4000.0, 2: 10_000.0, 4: 20_000.0}, 0.0002)


@pytest.mark.parametrize("draw", [draw_trade_off, draw_throughput])
def test_the_legend_lies_within_the_figure(draw):
    figure, ax = figures.new_figure(7, 4.4)
    draw(ax)
    figure.draw_without_rendering()
    box = ax.get_legend().get_window_extent()
    assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
