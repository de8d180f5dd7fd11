"""The two regions and the two cut layers equal whole layers: values and all gradients, float64; and
the times that the calculator of section 7 gives."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from manyhands.instruments.ledger import Ledger
from manyhands.models.transformer import Block
from manyhands.ranks.lab import run_ranks
from manyhands.tensor import bench
from manyhands.tensor.cost import Link, messages_s, narrowest, products_s
from manyhands.tensor.layers import (
    ColumnLinear,
    CopyToRanks,
    RowLinear,
    SumOverRanks,
    my_part,
    my_range,
)
from manyhands.tensor.model import cut_block
from manyhands.tensor.sequence import GatherSequence, ScatterSequence

DOUBLE = {"dtype": torch.float64}


def whole_mlp(hidden, bias=True):
    torch.manual_seed(0)
    layers = nn.Linear(5, hidden, bias, **DOUBLE), nn.Linear(hidden, 4, bias, **DOUBLE)
    x, back = torch.randn(2, 3, 5, **DOUBLE), torch.randn(2, 3, 4, **DOUBLE)
    return *layers, x.requires_grad_(), back


def assert_same(found, wanted):
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)


# ---- the regions ---------------------------------------------------------------------------


def loss_of(x, first, second, back):
    """An MLP by hand, each rank with its own columns and rows: (f, product, tanh, product, g)."""
    mine = my_range(first.out_features)
    rows = slice(mine.start, mine.stop)
    inner = torch.tanh(CopyToRanks.apply(x, None) @ first.weight[rows].T)
    return (SumOverRanks.apply(inner @ second.weight[:, rows].T, None) * back).sum()


def mlp_by_hand():
    first, second, x, back = whole_mlp(7)
    loss_of(x, first, second, back).backward()
    step, differences = 1e-6, torch.zeros_like(x)
    with torch.no_grad():
        for index in range(x.numel()):  # every rank makes the same calls
            there = torch.zeros_like(x).view(-1)
            there[index] = step
            there = there.view_as(x)
            higher, lower = (loss_of(x + s * there, first, second, back) for s in (1, -1))
            differences.view(-1)[index] = (higher - lower) / (2 * step)
    dense, x_dense = (torch.tanh(x @ first.weight.T) @ second.weight.T * back).sum(), x.grad
    (grad,) = torch.autograd.grad(dense, x)
    return x_dense, differences, grad


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_regions_give_the_gradient_of_finite_differences_and_of_the_dense_layer(world_size):
    for found, differences, dense in run_ranks(mlp_by_hand, world_size):
        assert_same(found, dense)
        torch.testing.assert_close(found, differences, atol=1e-7, rtol=0)


def regions_seen():
    rank = dist.get_rank()
    groups = [dist.new_group(ranks) for ranks in ([0], [1, 2])]
    seen = []
    for group in (None, groups[rank > 0]):
        for region in (CopyToRanks, SumOverRanks):
            leaf = torch.full((2, 3), float(rank + 1), requires_grad=True)
            given, grad = (leaf * 1).t(), torch.full((3, 2), 10.0 ** (rank + 1))
            with Ledger() as forward:
                result = region.apply(given, group)
            with Ledger() as backward:
                result.backward(grad)
            assert (given == rank + 1).all() and (grad == 10.0 ** (rank + 1)).all()
            sent = [[(e.op, e.nbytes) for e in ledger.entries] for ledger in (forward, backward)]
            seen.append((result[0, 0].item(), leaf.grad[0, 0].item(), *sent))
    return seen


def test_the_regions_sum_on_one_way_only_and_in_their_group():
    message = [("all_reduce", 6 * 4)]
    for rank, seen in enumerate(run_ranks(regions_seen, 3)):
        own = float(rank + 1)
        assert seen[0] == (own, 1110.0, [], message)
        assert seen[1] == (6.0, 10.0**own, message, [])
        assert seen[2] == (own, 10.0 if rank == 0 else 1100.0, [], message)
        assert seen[3] == (1.0 if rank == 0 else 5.0, 10.0**own, message, [])


def two_ways(region):
    """A gradient that goes two ways: into the region, and past it."""
    x = torch.ones(2, requires_grad=True)
    inner = x * 1
    y = region.apply(inner, None) + inner
    y.backward(torch.full((2,), float(dist.get_rank() + 1)))
    return x.grad.tolist()


def test_the_gradient_that_comes_in_stays_as_it_is():
    assert run_ranks(two_ways, 2, CopyToRanks) == [[4.0] * 2, [5.0] * 2]  # own + 3
    assert run_ranks(two_ways, 2, SumOverRanks) == [[2.0] * 2, [4.0] * 2]  # own + own


# ---- parts ---------------------------------------------------------------------------------


def ranges(cases):
    found = []
    for size, unit in cases:
        try:
            found.append(my_range(size, unit))
        except ValueError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_parts_follow_one_another_and_are_as_equal_as_units_allow(world_size):
    cases = [(units * unit, unit) for unit in (1, 3) for units in range(world_size, 14)]
    results = run_ranks(ranges, world_size, cases)
    for (size, unit), *parts in zip(cases, *results, strict=True):
        assert [i for part in parts for i in part] == list(range(size))
        lengths = [len(part) // unit for part in parts]
        assert all(len(part) % unit == 0 for part in parts)
        assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1


def test_fewer_units_than_ranks_are_refused_with_the_numbers():
    for found in run_ranks(ranges, 3, [(2, 1), (8, 4)]):
        assert found[0] == "2 units of 1 cannot be cut over 3 ranks: take fewer ranks"
        assert found[1].startswith("2 units of 4 cannot be cut")


def parts_seen():
    weight = nn.Linear(4, 6).weight
    parts = [my_part(weight, 0), my_part(weight.detach(), 1)]
    return [
        (type(p) is nn.Parameter, p.is_contiguous(), p.untyped_storage().nbytes(), p.requires_grad)
        for p in parts
    ]


def test_a_part_is_a_parameter_with_memory_of_its_own():
    for found in run_ranks(parts_seen, 2):
        assert found == [(True, True, 48, True), (True, True, 48, False)]


# ---- the layers ----------------------------------------------------------------------------


def cut_mlp(hidden, unit, bias):
    first, second, x, back = whole_mlp(hidden, bias)
    column, row = ColumnLinear(copy.deepcopy(first), unit), RowLinear(copy.deepcopy(second), unit)
    y = row(torch.tanh(column(x)))
    y.backward(back)
    grads = [param.grad for param in (column.weight, column.bias, row.weight, row.bias) if bias]
    return y.detach(), x.grad, grads or [column.weight.grad, row.weight.grad]


@pytest.mark.parametrize(("hidden", "unit", "bias"), [(7, 1, True), (10, 2, True), (9, 3, False)])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_columns_then_rows_equal_two_linear_layers(world_size, hidden, unit, bias):
    first, second, x, back = whole_mlp(hidden, bias)
    y = second(torch.tanh(first(x)))
    y.backward(back)
    results = run_ranks(cut_mlp, world_size, hidden, unit, bias)
    for found, x_grad, grads in results:
        assert_same(found, y.detach())
        assert_same(x_grad, x.grad)
        if bias:
            assert_same(grads[3], second.bias.grad)
    parts = list(zip(*(grads for _, _, grads in results), strict=True))
    assert_same(torch.cat(parts[0]), first.weight.grad)
    assert_same(torch.cat(parts[2 if bias else 1], dim=1), second.weight.grad)
    if bias:
        assert_same(torch.cat(parts[1]), first.bias.grad)


def sum_what_is_transposed_on_one_rank():
    """f's gradient and g's sum where rank 0 keeps the same matrix in another order of memory."""
    matrix = torch.arange(6.0).view(2, 3)
    if dist.get_rank() == 0:
        matrix = matrix.t().contiguous().t()
    x = torch.zeros(2, 3, requires_grad=True)
    CopyToRanks.apply(x).backward(matrix)
    return x.grad, SumOverRanks.apply(matrix)


def test_the_sum_is_over_places_not_over_memory():
    for found in run_ranks(sum_what_is_transposed_on_one_rank, 2):
        for total in found:
            assert torch.equal(total, 2 * torch.arange(6.0).view(2, 3))


def gathered(features, unit):
    """A column layer whose output is whole again, on ranks that all go on with it alike."""
    torch.manual_seed(0)
    layer, x = nn.Linear(5, features, **DOUBLE), torch.randn(2, 3, 5, **DOUBLE, requires_grad=True)
    cut = ColumnLinear(copy.deepcopy(layer), unit, gather_output=True)
    back = torch.randn(2, 3, features, **DOUBLE)
    found = []
    for module in (cut, layer):
        x.grad = None
        y = module(x)
        y.backward(back)
        found.append((y.detach(), x.grad, module.weight.grad, module.bias.grad))
    assert_same(found[0][0], found[1][0])
    assert_same(found[0][1], found[1][1])
    mine = my_range(features, unit)
    for part, whole in zip(found[0][2:], found[1][2:], strict=True):
        assert_same(part, whole[mine.start : mine.stop])


@pytest.mark.parametrize(("features", "unit"), [(6, 1), (7, 1), (10, 2)])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_column_layer_whose_output_is_gathered_equals_the_whole_one(world_size, features, unit):
    run_ranks(gathered, world_size, features, unit)


def refused_gradients():
    words = []
    for region in (CopyToRanks, SumOverRanks, GatherSequence, ScatterSequence):
        x = torch.randn(1, 2, 2, requires_grad=True)
        loss = region.apply(x, None).pow(3).sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        try:
            grad.square().sum().backward()
        except RuntimeError as problem:
            words.append(str(problem))
    return words


def test_the_gradient_of_a_gradient_is_refused():
    """Autograd would differentiate each backward as if it sent nothing."""
    for words in run_ranks(refused_gradients, 2):
        assert len(words) == 4 and all("differentiate twice" in one for one in words)


class WithScale(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def hooked():
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda *_: None)
    return layer


REFUSED = [
    (lambda: WithScale(4, 4), "a WithScale cannot be cut like an nn.Linear: give a plain one"),
    (lambda: ColumnLinear(nn.Linear(4, 4)), "a ColumnLinear cannot be cut like an nn.Linear"),
    (hooked, "hooks and parametrizations are lost when an nn.Linear is cut"),
    (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "hooks and parametrizations"),
]


def refusals_of_layers():
    words = []
    for make, _ in REFUSED:
        for kind in (ColumnLinear, RowLinear):
            with pytest.raises(ValueError) as refusal:
                kind(make())
            words.append(str(refusal.value))
    return words


def test_a_layer_that_does_more_than_linear_is_refused():
    (words,) = run_ranks(refusals_of_layers, 1)
    for number, (_, start) in enumerate(REFUSED):
        assert all(one.startswith(start) for one in words[2 * number : 2 * number + 2])
    assert not any("\n" in one for one in words)


# ---- what a cut costs ----------------------------------------------------------------------

WIRE = Link("a wire", bytes_per_s=1e9, latency_s=0.0)
LATE = Link("a long wire", bytes_per_s=1e9, latency_s=1e-5)


def bytes_of_a_block(width):
    torch.manual_seed(0)
    block, x = Block(width, 2, 0.0), torch.randn(3, 5, width)
    cut_block(block)
    with Ledger() as ledger:
        bench.forward_and_backward(block, x)
    return [entry.nbytes for entry in ledger.entries]


def test_messages_are_those_of_a_block_and_products_those_of_its_matrices():
    for sent in run_ranks(bytes_of_a_block, 2, 8):
        assert len(sent) == 4
        # a ring of two sends each tensor once
        assert messages_s(8, 15, 2, WIRE, bytes_per_number=4) == pytest.approx(sum(sent) / 1e9)
    weights = sum(p.numel() for p in Block(8, 2, 0.0).parameters() if p.dim() == 2)
    assert products_s(8, 15, 4, 1e6) == pytest.approx(6 * weights * 15 / 4 / 1e6)


@pytest.mark.parametrize("num_ranks", [2, 8, 64])
def test_the_tokens_cancel_where_nothing_is_late(num_ranks):
    shares = [
        messages_s(512, tokens, num_ranks, WIRE) / products_s(512, tokens, num_ranks, 1e12)
        for tokens in (1, 1000)
    ]
    assert shares == pytest.approx([(num_ranks - 1) * 2 * 1e12 / (9 * 512 * 1e9)] * 2)


@pytest.mark.parametrize("link", [WIRE, LATE])
def test_at_the_narrowest_width_both_take_equally_long(link):
    width = narrowest(100, 8, 1e12, link)
    assert messages_s(width, 100, 8, link) == pytest.approx(products_s(width, 100, 8, 1e12))
    assert messages_s(2 * width, 100, 8, link) < products_s(2 * width, 100, 8, 1e12)


def test_a_cut_block_is_timed_beside_a_whole_one():
    for times_s in run_ranks(bench.time_cut, 2, cut_block, 16, 3):
        assert [len(rounds) for rounds in times_s] == [3, 3] and min(map(min, times_s)) > 0
