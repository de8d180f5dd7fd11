"""Positions cut over ranks: two operations that are each other's transposes, sums of gradients, and
random numbers that differ where they should."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from manyhands.instruments.ledger import Ledger, calls
from manyhands.ranks.lab import run_ranks
from manyhands.tensor.sequence import GatherSequence, OwnRandom, ScatterSequence, sum_gradients

B, D = 3, 2


def part_of(rank, positions, dtype=torch.float64, strided=False):
    """Rank's numbers, (B, positions, D); strided ones lie in memory in another order."""
    generator = torch.Generator().manual_seed(10 * positions + rank)
    if strided:
        return torch.randn(D, positions, B, generator=generator, dtype=dtype).permute(2, 1, 0)
    return torch.randn(B, positions, D, generator=generator, dtype=dtype)


def both_ways(cls, x, grad, group=None):
    leaf = x.detach().requires_grad_()
    before, grad_before = x.clone(), grad.clone()
    with Ledger() as ledger:
        out = cls.apply(leaf, group)
        out.backward(grad)
    assert torch.equal(leaf, before) and torch.equal(grad, grad_before)
    return out.detach(), leaf.grad, dict(calls(ledger.entries))


def in_group(with_group):
    """The group and this rank's number in it; None for a rank that takes no part."""
    group = dist.new_group([1, 2]) if with_group else None
    if with_group and dist.get_rank() == 0:
        return None
    return group, dist.get_rank(group), dist.get_world_size(group)


def gathered(dtype, strided, with_group):
    if (place := in_group(with_group)) is None:
        return None
    group, rank, n = place
    x, y = part_of(rank, 2, dtype, strided), part_of(rank, 2 * n, dtype, strided)
    return [both_ways(GatherSequence, x, y, group), both_ways(ScatterSequence, y, x, group)]


@pytest.mark.parametrize(
    ("world_size", "dtype", "strided", "with_group"),
    [
        (1, torch.float32, False, False),
        (2, torch.float32, False, False),
        (3, torch.float64, True, False),
        (3, torch.float32, True, True),
    ],
)
def test_positions_are_gathered_and_summed(world_size, dtype, strided, with_group):
    results = [r for r in run_ranks(gathered, world_size, dtype, strided, with_group) if r]
    n = len(results)
    parts = [part_of(rank, 2, dtype, strided) for rank in range(n)]
    wholes = [part_of(rank, 2 * n, dtype, strided) for rank in range(n)]
    together, totals = torch.cat(parts, dim=1), sum(wholes).chunk(n, dim=1)
    for rank, (gather, scatter) in enumerate(results):
        torch.testing.assert_close(gather[0], together)
        torch.testing.assert_close(gather[1], totals[rank])
        torch.testing.assert_close(scatter[0], totals[rank])
        torch.testing.assert_close(scatter[1], together)
        assert gather[2] == scatter[2] == {"all_gather": 1, "reduce_scatter": 1}


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_is_the_transpose_of_the_other(world_size):
    """<A x, y> = <x, A' y>, summed over ranks, for both operations and their backwards."""

    def products():
        rank, n = dist.get_rank(), dist.get_world_size()
        x, y = part_of(rank, 2), part_of(rank, 2 * n)
        gather, gather_back, _ = both_ways(GatherSequence, x, y)
        scatter, scatter_back, _ = both_ways(ScatterSequence, y, x)
        pairs = [(gather, y), (x, gather_back), (scatter, x), (y, scatter_back)]
        return torch.stack([(one * other).sum() for one, other in pairs])

    total = sum(run_ranks(products, world_size))
    torch.testing.assert_close(total, total[0].expand(4))


def test_positions_that_are_no_multiple_of_the_ranks_are_refused_before_any_message():
    def run():
        with Ledger() as ledger, pytest.raises(ValueError, match="5 positions .* over 2 ranks"):
            ScatterSequence.apply(torch.zeros(1, 5, 2), None)
        return ledger.entries

    assert run_ranks(run, 2) == [[], []]


def summed(dtype, with_group):
    if (place := in_group(with_group)) is None:
        return None
    group, rank, _ = place
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in [(2, 3), (4,), (1, 2)]]
    params[1].requires_grad_(False)
    for param in (params[0], params[2]):
        param.grad = torch.full_like(param, 10.0**rank)
    kept = params[0].grad
    with Ledger() as ledger:
        sum_gradients(iter(params), group)
        sum_gradients([params[1]], group)
    assert params[0].grad is kept and params[1].grad is None
    assert not any(param.detach().any() for param in params)
    return params[0].grad, params[2].grad, dict(calls(ledger.entries))


@pytest.mark.parametrize(
    ("dtype", "with_group"), [(torch.float32, False), (torch.float64, False), (torch.float32, True)]
)
def test_gradients_are_summed_in_one_message_and_frozen_ones_skipped(dtype, with_group):
    total = 11.0 if with_group else 111.0
    for first, last, made in filter(None, run_ranks(summed, 3, dtype, with_group)):
        assert torch.equal(first, torch.full((2, 3), total, dtype=dtype))
        assert torch.equal(last, torch.full((1, 2), total, dtype=dtype))
        assert made == {"all_reduce": 1}


def masks(seed, num_blocks=2, fails=False):
    """Dropout masks of blocks, and of what comes after each of them."""
    torch.manual_seed(1)
    own, ones = OwnRandom(seed), torch.ones(64)
    inside, outside = [], [F.dropout(ones)]
    for _ in range(num_blocks):
        try:
            with own.use():
                inside.append(F.dropout(ones))
                if fails:
                    raise KeyError
        except KeyError:
            assert fails
        outside.append(F.dropout(ones))
    return torch.stack(inside), torch.stack(outside)


def common(num):
    torch.manual_seed(1)
    return torch.stack([F.dropout(torch.ones(64)) for _ in range(num)])


@pytest.mark.parametrize("fails", [False, True])
def test_masks_differ_inside_and_are_equal_outside(fails):
    results = run_ranks(masks, 3, 7, fails=fails)
    blocks = [mask for inside, _ in results for mask in inside]
    for number, mask in enumerate(blocks):
        assert not any(torch.equal(mask, other) for other in blocks[:number])
    for _, outside in results:
        assert torch.equal(outside, common(3))


def test_the_same_seed_gives_the_same_and_another_seed_others():
    def run():
        return masks(7)[0], masks(7)[0], masks(70)[0]

    for once, again, other in run_ranks(run, 2):
        assert torch.equal(once, again) and not torch.equal(once, other)


def test_ranks_of_a_group_count_in_the_group():
    """The numbers are those that the same ranks would draw if the group were the whole job."""

    def run():
        group = dist.new_group([1, 2])
        rank = dist.get_rank()
        with OwnRandom(7).use():
            of_job = torch.rand(8)
        if rank == 0:
            return of_job, None
        with OwnRandom(7, group=group).use():
            return of_job, torch.rand(8)

    (first, _), (second, of_second), (_, of_third) = run_ranks(run, 3)
    assert torch.equal(of_second, first) and torch.equal(of_third, second)
