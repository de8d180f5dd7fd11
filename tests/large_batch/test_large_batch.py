"""Lesson 07: norms over ranks equal one process, noise and rates do what they promise, ties."""

import copy
import operator
import statistics

import pytest
import scipy.stats
import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.data import images
from manyhands.instruments.ledger import Ledger
from manyhands.large_batch import noise, norms, rates, remedies, ties
from manyhands.large_batch.rates import Setting
from manyhands.large_batch.remedies import REMEDIES, Remedy, Task
from manyhands.ranks.lab import run_ranks

# ---------------------------------------------------------------- norms


def whole_batch(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A batch far from 0, and the weights of its outputs in the loss."""
    draw = torch.Generator().manual_seed(4)
    x = 3 * torch.randn(shape, generator=draw, dtype=torch.float64) + 1000
    return x, torch.randn(shape, generator=draw, dtype=torch.float64)


def step(norm: nn.Module, x: Tensor, weight: Tensor) -> list[Tensor]:
    """Outputs, gradients and running statistics of two steps, and outputs in eval mode."""
    seen = []
    for _ in range(2):
        own = x.clone().requires_grad_()
        out = norm(own)
        norm.zero_grad()
        (out * weight).sum().backward()
        seen += [out, own.grad, *(one.grad for one in norm.parameters())]
    norm.eval()
    return [*(one.detach() for one in [*seen, norm(x)]), *norm.buffers()]


def on_a_rank(sizes: list[int], shape: tuple[int, ...], options: dict) -> list[Tensor]:
    rank = dist.get_rank()
    x, weight = (one.split(sizes)[rank] for one in whole_batch(shape))
    return step(norms.SyncBatchNorm(shape[1], **options).double(), x, weight)


@pytest.mark.parametrize("sizes", [[4, 4], [7, 1], [8, 0], [3, 1, 4]], ids=str)
@pytest.mark.parametrize("shape", [(8, 5), (8, 3, 2, 4)], ids=str)
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"momentum": None}], ids=str)
def test_a_synchronised_norm_equals_one_process(sizes, shape, options) -> None:
    one = nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d
    x, weight = whole_batch(shape)
    wanted = step(one(shape[1], **options).double(), x, weight)
    parts = run_ranks(on_a_rank, len(sizes), sizes, shape, options)
    for index, value in enumerate(wanted):
        found = [part[index] for part in parts]
        if value.shape == shape:
            torch.testing.assert_close(torch.cat(found), value, rtol=1e-6, atol=1e-6)
        elif value.dim() and index < len(wanted) - 3:  # gradients of weight and bias add up
            torch.testing.assert_close(torch.stack(found).sum(0), value, rtol=1e-6, atol=1e-6)
        else:
            for one in found:
                torch.testing.assert_close(one, value, rtol=1e-6, atol=1e-6)


def in_half(dtype: torch.dtype, cast: bool) -> tuple[Tensor, ...]:
    """Of this rank's half of a batch of 16-bit numbers: output, gradients, statistics."""
    x, weight = (one.chunk(2)[dist.get_rank()].to(dtype) for one in half_batch())
    norm = norms.SyncBatchNorm(3)
    if not cast:
        norm = norm.to(dtype)
    return seen_in_half(norm, x, weight, cast)


def half_batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(4)
    x, weight = torch.randn(2, 16, 3, 9, 9, generator=draw)
    return x + 3, weight


def seen_in_half(norm: nn.Module, x: Tensor, weight: Tensor, cast: bool) -> tuple[Tensor, ...]:
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        out = norm(x)
    (out * weight).sum().backward()
    return out.detach(), x.grad, norm.weight.grad, norm.running_mean, norm.running_var


@pytest.mark.parametrize(
    "dtype, cast",
    [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, False)],
    ids=["autocast", "bfloat16", "float16"],
)
def test_16_bit_batches_are_normalised_as_in_one_process(dtype: torch.dtype, cast: bool) -> None:
    x, weight = (one.to(dtype) for one in half_batch())
    norm = nn.BatchNorm2d(3) if cast else nn.BatchNorm2d(3).to(dtype)
    out, of_x, of_weight, *running = seen_in_half(norm, x, weight, cast)
    parts = run_ranks(in_half, 2, dtype, cast)
    step = torch.finfo(dtype).eps
    for index, wanted in enumerate((out, of_x)):
        found = torch.cat([part[index] for part in parts])
        assert found.dtype == wanted.dtype == dtype
        torch.testing.assert_close(found, wanted, rtol=2 * step, atol=2 * step)
    torch.testing.assert_close(parts[0][2] + parts[1][2], of_weight, rtol=4 * step, atol=0.5)
    for part in parts:
        for found, wanted in zip(part[3:], running, strict=True):
            torch.testing.assert_close(found, wanted, rtol=step, atol=0)


def far_from_zero(sizes: list[int]) -> list[Tensor]:
    norm = norms.SyncBatchNorm(5, momentum=None)
    for x in batches_far_from_zero():
        norm(x.split(sizes)[dist.get_rank()])
    return list(norm.buffers())


def batches_far_from_zero() -> Tensor:
    return torch.randn(7, 8, 5, generator=torch.Generator().manual_seed(3)) + 1000


def test_an_average_over_all_batches_is_exact_to_rounding() -> None:
    norm = nn.BatchNorm1d(5, momentum=None)
    for x in batches_far_from_zero():
        norm(x)
    for found in run_ranks(far_from_zero, 2, [5, 3]):
        torch.testing.assert_close(found, list(norm.buffers()), rtol=3e-7, atol=0)


def empty_everywhere(momentum: float | None) -> tuple[bool, list[Tensor]]:
    norm = norms.SyncBatchNorm(3, momentum=momentum)
    kept = [one.clone() for one in norm.buffers()]
    x = torch.empty(0, 3, 2, 2, requires_grad=True)
    norm(x).sum().backward()
    unmoved = all(map(torch.equal, norm.buffers(), kept))
    return unmoved, [one.grad for one in norm.parameters()]


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_batch_that_is_empty_on_all_ranks_moves_nothing(momentum: float | None) -> None:
    for unmoved, gradients in run_ranks(empty_everywhere, 2, momentum):
        assert unmoved and not any(one.any() for one in gradients)


def evaluated_on_rank_0() -> Tensor | None:
    norm = norms.SyncBatchNorm(3, track_running_stats=False).eval()
    with Ledger() as ledger:
        out = norm(whole_batch((4, 3))[0].float()) if dist.get_rank() == 0 else None
    assert not ledger.entries
    return out


def test_eval_without_running_statistics_sends_nothing() -> None:
    wanted = nn.BatchNorm1d(3, track_running_stats=False).eval()(whole_batch((4, 3))[0].float())
    torch.testing.assert_close(run_ranks(evaluated_on_rank_0, 2)[0], wanted)


def gradient_of_a_gradient() -> str:
    x = torch.randn(4, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(norms.SyncBatchNorm(3)(x).pow(3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError) as refusal:
        grad.square().sum().backward()
    return str(refusal.value)


def test_the_gradient_of_a_gradient_is_refused() -> None:
    """Autograd would differentiate the backward as if its all-reduce were not there."""
    for words in run_ranks(gradient_of_a_gradient, 2):
        assert "differentiate twice" in words and "once_differentiable" in words


def converted() -> None:
    torch.manual_seed(1)
    inner = nn.BatchNorm2d(2, momentum=None)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2, affine=False).eval(),
        nn.Sequential(inner),
        inner,
        nn.BatchNorm2d(2).requires_grad_(False),
    )
    calls = []
    inner.register_forward_hook(lambda *_: calls.append(1))
    params, state = list(model.parameters()), copy.deepcopy(model.state_dict())
    after = norms.convert(model, dist.group.WORLD)
    assert after is model and after[2][0] is after[3] is inner
    assert [type(after[index]) for index in (1, 3, 4)] == [norms.SyncBatchNorm] * 3
    assert all(after[index].group is dist.group.WORLD for index in (1, 3, 4))
    assert all(map(operator.is_, after.parameters(), params))
    torch.testing.assert_close(after.state_dict(), state, rtol=0, atol=0)
    assert [after[index].training for index in (1, 3, 4)] == [False, True, True]
    assert [param.requires_grad for param in after.parameters()] == [True] * 4 + [False] * 2
    after(torch.randn(2, 1, 5, 5))
    assert len(calls) == 2


def test_a_model_is_converted_and_keeps_all_it_has() -> None:
    run_ranks(converted, 1)


def test_a_norm_is_converted_as_a_model() -> None:
    norm = nn.BatchNorm1d(2)
    assert norms.convert(norm) is norm and type(norm) is norms.SyncBatchNorm
    assert norms.convert(norm) is norm


class WithReLU(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


@pytest.mark.parametrize(
    "make", [lambda: WithReLU(3), nn.LazyBatchNorm2d, lambda: norms.GhostBatchNorm(3, 2)]
)
def test_a_norm_that_may_do_more_is_not_converted(make) -> None:
    odd = make()
    model = nn.Sequential(nn.BatchNorm2d(3), odd)
    words = f"the batch norm '1' is a {type(odd).__name__}, which may do more"
    with pytest.raises(ValueError, match=words):
        norms.convert(model)
    assert type(model[0]) is nn.BatchNorm2d


@pytest.mark.gpu
def test_torch_s_own_synchronised_norm_gives_the_same() -> None:
    x, weight = (one.float().cuda() for one in whole_batch((8, 3, 2, 4)))
    ours = step(norms.SyncBatchNorm(3).cuda(), x, weight)
    theirs = step(nn.SyncBatchNorm(3).cuda(), x, weight)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_ghost_batches_are_normalised_one_by_one() -> None:
    x = whole_batch((7, 3, 2, 2))[0]
    ghost, plain = norms.GhostBatchNorm(3, 3).double(), nn.BatchNorm2d(3).double()
    wanted = torch.cat([plain(part) for part in (x[:3], x[3:6], x[6:])])
    torch.testing.assert_close(ghost(x), wanted)
    for one, other in zip(ghost.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(ghost.eval()(x), plain.eval()(x))


def test_an_input_without_channels_is_refused() -> None:
    with pytest.raises(ValueError, match=r"takes \(B, C, ...\), and was given \(4,\)"):
        norms.GhostBatchNorm(3, 2)(torch.ones(4))


# ---------------------------------------------------------------- noise


def gradients() -> Tensor:
    return torch.randn(400, 6, generator=torch.Generator().manual_seed(2)) + 0.1


def variance_of(steps: list[Tensor]) -> float:
    return torch.stack(steps).var(dim=0).sum().item()


def test_the_variance_of_a_step_is_that_of_drawn_batches() -> None:
    single, draw = gradients(), torch.Generator().manual_seed(3)
    steps = []
    for _ in range(4000):
        chosen = torch.randint(400, (20,), generator=draw)
        steps.append(0.3 * single[chosen].mean(0))
    assert noise.step_variance(single, 20, 0.3) == pytest.approx(variance_of(steps), rel=0.05)


def test_the_root_keeps_the_variance_of_a_step() -> None:
    small = noise.step_variance(gradients(), 16, 0.2)
    large = noise.step_variance(gradients(), 256, rates.scaled_rate(0.2, 16, "root"))
    assert large == pytest.approx(small, rel=1e-12)
    assert noise.step_variance(gradients(), 256, 0.2) == pytest.approx(small / 16, rel=1e-12)


def test_noise_keeps_the_mean_and_restores_the_variance() -> None:
    """The loss of a sample is its gradient times the weights."""
    single, draw = gradients(), torch.Generator().manual_seed(3)
    sigma = noise.noise_size(64, 4)
    assert sigma**2 == pytest.approx(15)
    found = []
    for _ in range(4000):
        weights = torch.zeros(6, requires_grad=True)
        chosen = torch.randint(400, (64,), generator=draw)
        noise.noisy_mean(single[chosen] @ weights, sigma, draw).backward()
        found.append(weights.grad)
    mean = torch.stack(found).mean(0)
    assert (mean - single.mean(0)).abs().max() < 0.04
    restored = variance_of(found) / noise.step_variance(single, 4, 1.0)
    assert restored == pytest.approx(1, rel=0.06)


def test_without_sigma_it_is_the_mean() -> None:
    losses = torch.tensor([1.0, 2.0, 6.0])
    assert noise.noisy_mean(losses, 0.0).item() == 3.0


# ---------------------------------------------------------------- rates


def test_the_three_rules() -> None:
    found = [rates.scaled_rate(0.1, 16, rule) for rule in ("none", "root", "linear")]
    assert found == pytest.approx([0.1, 0.4, 1.6])


def test_a_warm_up_rises_and_then_the_schedule_falls() -> None:
    epochs = [0, 1, 2, 4, 5.9, 6, 8, 9]
    found = [rates.warmed_up_rate(one, 0.1, 0.9, 4, (6, 8), 0.1) for one in epochs]
    assert found == pytest.approx([0.1, 0.3, 0.5, 0.9, 0.9, 0.09, 0.009, 0.009])
    assert rates.warmed_up_rate(0, 0.1, 0.9, 0, (), 0.1) == 0.9


def test_a_batch_grows_up_to_the_largest_and_then_the_rate_falls() -> None:
    found = [rates.grown_batch(epoch, Setting(8, 0.4), 128, (1, 2, 3), 0.25) for epoch in range(5)]
    assert found == [(8, 0.4), (32, 0.4), (128, 0.4), (128, 0.1), (128, 0.1)]


# ---------------------------------------------------------------- remedies and their ranks


def test_every_remedy_sees_as_many_images() -> None:
    task, num_images = Task(epochs=4), 1000
    for remedy in REMEDIES.values():
        steps = list(remedies.settings(remedy, task, num_images, remedies.COURSE))
        seen = sum(setting.batch for setting in steps)
        assert 0 <= seen - 4 * num_images * remedy.longer < task.large


def test_a_tuned_rate_is_counted_in_rates_of_the_reference() -> None:
    task = Task(rate=0.1, tuned=3.0)
    for name in ("tuned rate", "longer training"):
        first = next(remedies.settings(REMEDIES[name], task, 1000, remedies.COURSE))
        assert first == (task.large, pytest.approx(0.3))


def test_a_training_is_the_same_again_and_reaches_its_target() -> None:
    data = images.load("embedded")
    task = Task(epochs=3, target=0.6)
    once, again = (remedies.train(data, Remedy(is_small=True), task, 1) for _ in range(2))
    assert once[:3] == again[:3] and once.steps is not None
    assert once.images == 16 * once.steps and once.accuracy > 0.6
    never = remedies.train(data, Remedy(), Task(epochs=1, target=1.0), 1)
    assert never[1:] == (None, None, None)


def test_what_seeds_cannot_tell_apart_is_a_tie() -> None:
    sure, near, far = [0.90, 0.91, 0.92], [0.92, 0.90, 0.93], [0.80, 0.81, 0.79]
    assert ties.is_tie(sure, near) and not ties.is_tie(sure, far)
    assert statistics.fmean(near) > statistics.fmean(sure)
    values = {"sure": sure, "far": far, "near": near}
    assert ties.ranked(values) == [["near", "sure"], ["far"]]
    assert ties.ranked(values, "lowest") == [["far"], ["sure", "near"]]
    assert ties.is_tie([0.9, 0.9], [0.9, 0.9])


def test_the_limits_are_those_of_students_t() -> None:
    found = [ties.student(degrees) for degrees in range(1, 11)]
    assert found == pytest.approx(scipy.stats.t.ppf(0.975, range(1, 11)), abs=0.0005)
    assert ties.student(40) == ties.student(10) > scipy.stats.t.ppf(0.975, 40)


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_of_two_ways_that_do_not_differ_chance_tells_five_percent_apart(seeds) -> None:
    draw = torch.Generator().manual_seed(1)
    pairs = torch.randn(4000, 2, seeds, generator=draw, dtype=torch.float64).tolist()
    wrong = sum(not ties.is_tie(*pair) for pair in pairs) / len(pairs)
    assert 0.04 < wrong < 0.06
