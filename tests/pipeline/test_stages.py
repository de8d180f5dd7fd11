"""Stages of a pipeline: the layers are the model, cuts are as good as any, Waiting only waits."""

import itertools
import random
import time

import pytest
import torch
from torch import nn

from manyhands.models.transformer import Transformer
from manyhands.pipeline import stages

VOCAB, BLOCK = 13, 8


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(1)
    return Transformer(VOCAB, BLOCK, 3, heads=2, width=16)


def tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (2, BLOCK), generator=torch.Generator().manual_seed(2))


def test_the_layers_one_after_the_other_are_the_model(model):
    layers = stages.layers_of(model)
    assert len(layers) == 5
    assert torch.equal(torch.nn.Sequential(*layers)(tokens()), model(tokens()))
    shared = {id(param) for layer in layers for param in layer.parameters()}
    assert shared == {id(param) for param in model.parameters()}


def test_stages_between_bounds_are_the_model(model):
    cut = stages.cut(stages.layers_of(model), [0, 1, 4, 5])
    assert [len(stage) for stage in cut] == [1, 3, 1]
    assert torch.equal(torch.nn.Sequential(*cut)(tokens()), model(tokens()))


def test_measured_costs_are_positive_and_leave_no_gradients(model):
    inputs = tokens()
    costs = stages.measure(stages.layers_of(model), inputs, repeats=2)
    assert len(costs) == 5 and all(cost > 0 for cost in costs)
    assert all(param.grad is None for param in model.parameters())
    assert torch.equal(inputs, tokens())


def test_a_slow_layer_is_measured_as_slow():
    layers = [stages.Waiting(0.0, 0.0), stages.Waiting(0.01, 0.02)]
    fast, slow = stages.measure(layers, torch.zeros(2, 3))
    assert slow > 0.03 and fast < slow


@pytest.mark.parametrize("seed", range(20))
def test_a_partition_is_as_fast_as_the_best_of_all_cuts(seed):
    draw = random.Random(seed)
    num = draw.randint(1, 9)
    costs = [draw.choice((draw.uniform(0, 5), draw.randint(0, 3))) for _ in range(num)]
    for num_stages in range(1, num + 1):
        bounds = stages.partition(costs, num_stages)
        assert len(bounds) == num_stages + 1 and (bounds[0], bounds[-1]) == (0, num)
        assert all(start < stop for start, stop in itertools.pairwise(bounds))
        every = ((0, *cuts, num) for cuts in itertools.combinations(range(1, num), num_stages - 1))
        assert slowest(costs, bounds) == pytest.approx(min(slowest(costs, b) for b in every))


def slowest(costs, bounds) -> float:
    return max(sum(costs[start:stop]) for start, stop in itertools.pairwise(bounds))


def test_the_example_at_the_top_of_the_file():
    costs = [0.3, *[1.0] * 6, 2.7]
    bounds = stages.partition(costs, 2)
    assert bounds == [0, 5, 8]
    sums = [sum(costs[start:stop]) for start, stop in itertools.pairwise(bounds)]
    assert sums == pytest.approx([4.3, 4.7])


def test_too_few_layers_are_refused():
    with pytest.raises(ValueError, match="2 layers cannot make 3 stages"):
        stages.partition([1.0, 2.0], 3)


class SlowAtFirst(nn.Linear):
    """Takes 300 ms longer the first two times, as where memory is new."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        time.sleep(0.3 * (self.calls <= 2))
        return super().forward(x)


def test_a_slow_beginning_is_not_measured():
    layers = [SlowAtFirst(4, 4), nn.Linear(4, 4)]
    assert max(stages.measure(layers, torch.ones(2, 4))) < 0.25
    assert all(param.grad is None for layer in layers for param in layer.parameters())


def test_a_waiting_stage_waits_in_forward_and_in_backward():
    stage = stages.Waiting(0.02, 0.05)
    x = torch.randn(2, 3, requires_grad=True)
    before_s = time.perf_counter()
    out = stage(x)
    between_s = time.perf_counter()
    out.backward(torch.full_like(x, 3.0))
    after_s = time.perf_counter()
    assert between_s - before_s >= 0.02 and after_s - between_s >= 0.05
    assert torch.equal(out, x) and torch.equal(x.grad, torch.full_like(x, 3.0))
    assert torch.equal(stage.weight.grad, torch.zeros(1))
