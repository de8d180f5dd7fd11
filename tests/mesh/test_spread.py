"""How equal is equal: the predicted spread of sums against sums, and what a tolerance lets pass."""

import math

import pytest
import torch

from manyhands.mesh.spread import add_pairs, add_up, measured_spread, spread_of_sum, tolerance

BOTH = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("in_pairs", [False, True])
@pytest.mark.parametrize("dtype", BOTH)
def test_the_spread_of_real_sums_is_a_little_below_the_predicted_one(dtype, in_pairs):
    """eps times the size is the largest gap between numbers; the mean one is about 3/4 of it."""
    for num_terms in (4, 64, 1024):
        seen = measured_spread(num_terms, dtype, in_pairs, columns=2048)
        assert 0.6 < seen / spread_of_sum(num_terms, dtype, in_pairs) < 1.0


def test_by_hand():
    eps = 2**-23
    assert spread_of_sum(24, torch.float32) == eps
    assert spread_of_sum(4096, torch.float32, True) == eps  # twelve levels
    assert spread_of_sum(24, torch.bfloat16) == 2**-7
    assert spread_of_sum(6, torch.float64) == 2**-53  # half of eps
    assert spread_of_sum(1, torch.float32) == spread_of_sum(1, torch.bfloat16, True) == 0
    assert measured_spread(1, torch.bfloat16) == measured_spread(1, torch.bfloat16, True) == 0


def test_the_two_orders_are_equal_for_two_terms_and_then_part():
    """One by one the spread doubles with four times as many terms; in pairs it hardly grows."""
    spread = [spread_of_sum(4**k, torch.float32) for k in range(1, 8)]
    assert [b / a for a, b in zip(spread, spread[1:], strict=False)] == pytest.approx([2] * 6)
    one, pairs = (spread_of_sum(2, torch.float32, p) for p in (False, True))
    assert one == pytest.approx(pairs, rel=1e-12)
    pairs = [spread_of_sum(2**k, torch.float32, True) for k in (4, 16)]
    assert pairs[1] == pytest.approx(2 * pairs[0], rel=1e-12)


def test_sums_are_added_in_their_order():
    """2^24 takes up no 1 in float32, but two of them."""
    terms = torch.tensor([[2.0**24], [1.0], [1.0], [1.0]])
    assert add_up(terms).tolist() == [2**24] and add_pairs(terms).tolist() == [2**24 + 2]
    assert add_up(terms.flip(0)).tolist() == [2**24 + 4]  # 3 + 2^24, and halves go to even
    for add in (add_up, add_pairs):
        assert add(torch.ones(8, 3, dtype=torch.bfloat16)).tolist() == [8, 8, 8]
        assert add(torch.ones(8, 3, dtype=torch.bfloat16)).dtype is torch.bfloat16


@pytest.mark.parametrize("in_pairs", [False, True])
@pytest.mark.parametrize("dtype", BOTH)
def test_a_tolerance_lets_every_reordering_pass_and_uses_much_of_its_room(dtype, in_pairs):
    n = 256
    draws = torch.Generator().manual_seed(3)
    terms = torch.randn(n, generator=draws).to(dtype)
    orders = torch.stack([terms[torch.randperm(n, generator=draws)] for _ in range(1000)], 1)
    sums = (add_pairs if in_pairs else add_up)(orders).double()
    largest = (sums - sums[0]).abs().max().item()
    limit = tolerance(math.sqrt(n), n, dtype, in_pairs)
    assert limit / 12 < largest < limit


def test_a_tolerance_of_float32_catches_a_term_left_out_of_4096_and_one_of_bfloat16_does_not():
    n = 4096
    terms = torch.randn(n, generator=torch.Generator().manual_seed(5))[:, None]
    whole = add_up(terms)
    missed = {torch.float32: 0, torch.bfloat16: 0}
    for left_out in range(0, n, 64):
        rest = torch.cat([terms[:left_out], terms[left_out + 1 :]])
        off = (add_up(rest) - whole).abs().item()
        for dtype in missed:
            missed[dtype] += off <= tolerance(math.sqrt(n), n, dtype)
    # Only a term that is itself about as small as rounding could be missed.
    assert missed == {torch.float32: 0, torch.bfloat16: n // 64}


def test_a_tolerance_is_six_spreads_of_a_difference():
    spread = spread_of_sum(24, torch.float32)
    assert tolerance(3.0, 24, torch.float32) == pytest.approx(18 * math.sqrt(2) * spread, rel=1e-12)
    assert tolerance(3.0, 1, torch.float32) == 0
