"""Lesson 01: its functions against autograd, torch.optim, and the arithmetic of a parabola."""

import functools
import statistics

import pytest
import torch

from manyhands.gradient_descent.descent import (
    Momentum,
    descend,
    descend_in_batches,
    gradient,
    gradient_variance,
    largest_rate,
    mean_squared_error,
    mini_batches,
)


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """31 samples near the line 2 x - 1, in 64 bits."""
    x = torch.randn(31, generator=generator(), dtype=torch.float64) + 0.5
    return x, 2 * x - 1 + 0.3 * torch.randn(31, generator=generator(2), dtype=torch.float64)


START = torch.tensor([-2.0, 3.0], dtype=torch.float64)


def least_squares(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The minimum, without any descent. (2,)"""
    return torch.linalg.lstsq(torch.stack([x, torch.ones_like(x)], dim=1), y[:, None]).solution[
        :, 0
    ]


def test_the_loss_of_many_lines_at_once(samples):
    x, y = samples
    lines = torch.randn(4, 5, 2, generator=generator(3), dtype=torch.float64)
    losses = mean_squared_error(lines, x, y)
    assert losses.shape == (4, 5) and mean_squared_error(START, x, y).shape == ()
    w, b = lines[2, 3].tolist()
    by_hand = sum((w * p + b - q) ** 2 for p, q in zip(x.tolist(), y.tolist(), strict=True)) / 31
    assert losses[2, 3].item() == pytest.approx(by_hand)


@pytest.mark.parametrize("num_samples", [1, 2, 31])
def test_the_gradient_is_autograd_s(samples, num_samples):
    x, y = (part[:num_samples] for part in samples)
    parameters = START.clone().requires_grad_()
    mean_squared_error(parameters, x, y).backward()
    torch.testing.assert_close(gradient(START, x, y), parameters.grad)


def test_a_descent_ends_at_the_minimum_and_by_the_tolerance(samples):
    x, y = samples
    path = descend(START, x, y, rate=0.2, tolerance=1e-6, max_steps=1000)
    assert 10 < len(path) < 1000 and torch.equal(path[0], START)
    torch.testing.assert_close(path[-1], least_squares(x, y), atol=1e-5, rtol=0)
    lengths = [gradient(point, x, y).norm() for point in path]
    assert lengths[-1] < 1e-6 <= min(lengths[:-1])


def test_a_descent_ends_by_max_steps(samples):
    assert descend(START, *samples, rate=0.1, tolerance=0, max_steps=7).shape == (8, 2)
    assert descend(START, *samples, rate=0.1, tolerance=0, max_steps=0).tolist() == [[-2, 3]]


@pytest.mark.parametrize("middle", [-2.0, 0.0, 0.5, 5.0])
def test_just_below_the_largest_rate_it_converges_and_just_above_it_diverges(samples, middle):
    x, y = samples[0] + middle, samples[1]
    far = (START - least_squares(x, y)).norm()
    for factor, is_below in [(0.98, True), (1.02, False)]:
        path = descend(START, x, y, factor * largest_rate(x), tolerance=0, max_steps=2000)
        distance = (path[-1] - least_squares(x, y)).norm()
        assert (distance < far) == is_below, (factor, distance)
        assert is_below or distance > 1e6 * far


@pytest.mark.parametrize(
    ("num_samples", "batch", "sizes"),
    [(7, 3, [3, 3, 1]), (6, 3, [3, 3]), (4, 9, [4]), (3, 1, [1, 1, 1])],
)
def test_an_epoch_holds_each_sample_once(num_samples, batch, sizes):
    draw = generator()
    for _ in range(3):
        batches = list(mini_batches(num_samples, batch, draw))
        assert [len(chosen) for chosen in batches] == sizes
        assert sorted(torch.cat(batches).tolist()) == list(range(num_samples))
    assert all(chosen.dtype == torch.int64 for chosen in batches)


def test_epochs_have_orders_of_their_own_and_come_again_with_the_seed():
    draw = generator()
    epochs = [torch.cat(list(mini_batches(50, 8, draw))).tolist() for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert torch.cat(list(mini_batches(50, 8, generator()))).tolist() == epochs[0]


def sgd(rate: float):
    return lambda parameters, slope: parameters - rate * slope


def test_one_batch_of_all_samples_is_gradient_descent(samples):
    path = descend_in_batches(START, *samples, 31, 12, sgd(0.1), generator())
    torch.testing.assert_close(path, descend(START, *samples, 0.1, 0, 12))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_batches_with_momentum_are_torch_s_sgd(samples, momentum):
    x, y = samples
    path = descend_in_batches(START, x, y, 8, 11, Momentum(0.05, momentum), generator())
    here = START.clone().requires_grad_()
    optimizer = torch.optim.SGD([here], lr=0.05, momentum=momentum)
    draw, rows = generator(), [START]
    while len(rows) < 12:
        for chosen in mini_batches(31, 8, draw):
            optimizer.zero_grad()
            mean_squared_error(here, x[chosen], y[chosen]).backward()
            optimizer.step()
            rows.append(here.detach().clone())
    torch.testing.assert_close(path, torch.stack(rows)[:12])


@pytest.mark.parametrize("num_steps", [0, 1, 4, 5])
def test_batches_stop_in_the_middle_of_an_epoch(samples, num_steps):
    calls = []

    def step(parameters, slope):
        calls.append(slope)
        return parameters - 0.1 * slope

    path = descend_in_batches(START, *samples, 10, num_steps, step, generator())
    assert path.shape == (num_steps + 1, 2) and len(calls) == num_steps


def test_two_momentums_do_not_meet_and_leave_the_old_parameters():
    one, other = Momentum(0.1, 0.5), Momentum(0.1, 0.5)
    old, slope = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    assert one(old, slope).tolist() == [0.0, 0.0]
    assert one(old, slope).tolist() == [-0.5, -1.0]
    assert other(old, slope).tolist() == [0.0, 0.0]
    assert old.tolist() == [1, 2] and slope.tolist() == [10, 20]


@functools.cache
def variance(batch: int) -> float:
    x = torch.randn(64, generator=generator(5))
    y = 2 * x - 1 + torch.randn(64, generator=generator(6))
    return gradient_variance(torch.tensor([0.0, 0.0]), x, y, batch, 3000, generator(batch))


def test_the_variance_of_one_sample_is_that_of_the_samples_gradients():
    x = torch.randn(64, generator=generator(5))
    y = 2 * x - 1 + torch.randn(64, generator=generator(6))
    pairs = zip(x[:, None], y[:, None], strict=True)
    each = torch.stack([gradient(torch.zeros(2), *pair) for pair in pairs])
    assert variance(1) == pytest.approx(each.var(dim=0, correction=0).sum().item(), rel=0.15)


def test_the_variance_falls_as_one_over_the_batch():
    batches = [1, 2, 4, 8, 16, 32, 64, 128]  # beyond 64 samples as well: with replacement
    log2 = [torch.tensor(variance(batch)).log2().item() for batch in batches]
    slope, _ = statistics.linear_regression(range(len(batches)), log2)
    # 3000 repeats know a variance to about 3 %; over 8 batches the slope to 0.01.
    assert slope == pytest.approx(-1, abs=0.04)
