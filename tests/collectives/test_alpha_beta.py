"""The latency-bandwidth model: what is put in comes out, and the prices are those of the papers."""

import math

import pytest

from manyhands.collectives.alpha_beta import (
    fit_alpha_beta,
    predicted_s,
    ring_beats_tree_bytes,
    rounds_and_message,
)

SIZES = [0, 1000, 4000, 64_000, 1_000_000, 16_000_000]
LINKS = [(5e-6, 1 / 300e9), (50e-6, 1 / 1e9), (2e-3, 1e-8), (0.1, 1e-12)]  # GPU, local, slow


@pytest.mark.parametrize(("alpha_s", "beta_s"), LINKS)
def test_the_fit_finds_the_line_that_times_lie_on(alpha_s, beta_s):
    times_s = [alpha_s + beta_s * size for size in SIZES]
    assert fit_alpha_beta(SIZES, times_s) == pytest.approx((alpha_s, beta_s), rel=1e-6)
    assert all(isinstance(value, float) for value in fit_alpha_beta(SIZES, times_s))
    assert fit_alpha_beta(SIZES[::5], times_s[::5]) == pytest.approx((alpha_s, beta_s), rel=1e-6)


def squared_error(sizes, times_s, alpha_s, beta_s):
    pairs = zip(sizes, times_s, strict=True)
    return sum(((alpha_s + beta_s * size) / time_s - 1) ** 2 for size, time_s in pairs)


def test_errors_count_relative_to_the_time():
    """The large message took 20 ms more than the line says; the small ones must not pay for it."""
    times_s = [1e-4 + 1e-9 * size for size in SIZES]
    times_s[-1] += 0.02
    alpha_s, beta_s = fit_alpha_beta(SIZES, times_s)
    assert alpha_s == pytest.approx(1e-4, rel=0.2)  # without weights it is below zero
    best = squared_error(SIZES, times_s, alpha_s, beta_s)
    for factor in (0.99, 1.01):
        assert squared_error(SIZES, times_s, alpha_s * factor, beta_s) > best
        assert squared_error(SIZES, times_s, alpha_s, beta_s * factor) > best


# name -> rounds and bytes of a message on 4 ranks and on 5, for 400 bytes
PRICES = {
    "broadcast_naive": ((3, 400), (4, 400)),
    "broadcast_tree": ((2, 400), (3, 400)),
    "reduce_tree": ((2, 400), (3, 400)),
    "gather": ((3, 100), (4, 80)),
    "all_gather_ring": ((3, 100), (4, 80)),
    "reduce_scatter_ring": ((3, 100), (4, 80)),
    "all_reduce_naive": ((6, 400), (8, 400)),
    "all_reduce_tree": ((4, 400), (6, 400)),
    "all_reduce_ring": ((6, 100), (8, 80)),
}


@pytest.mark.parametrize("name", PRICES)
def test_rounds_and_message(name):
    """tests/collectives/test_collectives.py holds them against the ledger for 1 to 8 ranks."""
    on_four, on_five = PRICES[name]
    assert rounds_and_message(name, 4, 400) == on_four
    assert rounds_and_message(name, 5, 400) == on_five
    assert rounds_and_message(name, 1, 400)[0] == 0
    rounds, message_bytes = on_five
    assert predicted_s(name, 5, 400, 2.0, 0.5) == pytest.approx(rounds * (2 + message_bytes / 2))


@pytest.mark.parametrize("world_size", [4, 5, 8, 16, 100])
@pytest.mark.parametrize(("alpha_s", "beta_s"), LINKS)
def test_ring_beats_tree_where_the_predictions_cross(world_size, alpha_s, beta_s):
    def both(nbytes):
        return [
            predicted_s(f"all_reduce_{kind}", world_size, nbytes, alpha_s, beta_s)
            for kind in ("ring", "tree")
        ]

    crossing_bytes = ring_beats_tree_bytes(world_size, alpha_s, beta_s)
    ring_s, tree_s = both(crossing_bytes)
    assert ring_s == pytest.approx(tree_s, rel=1e-9) and 0 < crossing_bytes < math.inf
    ring_s, tree_s = both(crossing_bytes * 1.01)
    assert ring_s < tree_s
    ring_s, tree_s = both(crossing_bytes * 0.99)
    assert ring_s > tree_s


@pytest.mark.parametrize("world_size", [2, 3])
def test_on_two_or_three_ranks_the_ring_has_no_more_rounds(world_size):
    assert ring_beats_tree_bytes(world_size, 1e-3, 1e-9) == 0
    for nbytes in (4, 1e6):
        ring_s = predicted_s("all_reduce_ring", world_size, nbytes, 1e-3, 1e-9)
        assert ring_s < predicted_s("all_reduce_tree", world_size, nbytes, 1e-3, 1e-9)
