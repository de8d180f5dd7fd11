"""Gradient noise: the average over ranks with its squares, and the noise scale."""

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from manyhands.batch_size import scaling
from manyhands.checks.engine import cases
from manyhands.checks.engine.spec import Call, Place, Spec
from manyhands.checks.engine.values import malformed, number, same, show, tensor

# ---- 3.5 ------------------------------------------------------------------------------------


class Gradient(NamedTuple):
    """A call of `average_over_ranks`; each rank draws its own gradient."""

    form: str
    size: int
    seed: int
    dtype: torch.dtype = torch.float32


def gradients(n: int) -> list[Gradient]:
    """One number; some; numbers that do not lie side by side; float64."""
    return [
        Gradient("vector", 1, cases.draw_seed()),
        Gradient("vector", 5, cases.draw_seed()),
        Gradient("column", random.randint(6, 9), cases.draw_seed()),
        Gradient("vector", 40, cases.draw_seed(), torch.float64),
    ]


def average_seen(answer: Callable, case: Gradient, place: Place) -> dict:
    """Both results, and is the gradient as it was?"""
    draw = cases.generator(case.seed, place.job_rank)
    gradient, memory = cases.shaped(case.form, case.size, draw, case.dtype)
    before = memory.clone()
    found = answer(gradient, **place.options)
    if not isinstance(found, list | tuple) or len(found) != 2:
        raise malformed(found, "a pair: the mean gradient, and the mean of the squared lengths")
    mean, square = found
    return {
        "the mean gradient": tensor(mean).float(),
        "the mean of the squared lengths": torch.tensor(float(number(square))),
        "`gradient` is unchanged": torch.equal(memory, before),
    }


MEANS = "both /= dist.get_world_size(group)"
SUM = "dist.all_reduce(both, group=group)"
BOTH = "both = torch.cat([gradient, gradient.square().sum()[None]])"
SQUARES = "Send |gradient|^2 of every rank as well: all_reduce, and divide by N."
average_over_ranks = Spec(
    todo="3.5",
    truth=scaling.average_over_ranks,
    layouts=cases.THREE,
    cases=gradients,
    observe=average_seen,
    tell=lambda case: f"average_over_ranks(a gradient of {case.size} numbers)",
    same=lambda found, wanted, case: same(found, wanted, 1e-5),
    advice={
        "": "Both results are sums over the ranks, divided by their number.",
        "the mean of the squared lengths": SQUARES,
        "`gradient` is unchanged": "Call all_reduce with a copy.",
    },
    reasons="""
        unsupported operand type(s) for /: 'NoneType' :: all_reduce works in place, and returns
            None. | Call it on a line of its own, and use the tensor afterwards.
    """,
    hints=(
        "The large batch's gradient is the mean of the ranks' gradients. Each rank's squared "
        "length has to be computed before the gradients are averaged.",
        f"{BOTH} puts the squared length behind the gradient, so that one message carries both.",
        f"{SUM}, then {MEANS}; return both[:-1] and both[-1].item().",
    ),
    mistakes="""
        {MEANS} => pass ::
            These are sums over the ranks. | Divide both by dist.get_world_size(group).
        {BOTH} => square = gradient.square().sum()[None]
        {SUM} => dist.all_reduce(gradient, group=group); dist.all_reduce(square, group=group)
        {MEANS} => both = torch.cat([gradient, square]) / dist.get_world_size(group) ::
            The given gradient is summed in place. | Call all_reduce with a copy.
        both[-1].item() => both[:-1].square().sum().item() ::
            The square is that of the averaged gradient. | {SQUARES}
        both[-1].item() => (both[:-1] * dist.get_world_size(group)).square().sum().item() ::
            The square is that of the summed gradient.
        both[-1].item() => gradient.square().sum().item() ::
            The square is that of this rank's own gradient.
        {SUM} => pass
        {MEANS} => pass ::
            Both results are of this rank's own gradient alone. | Call {SUM} on every rank.
        {SUM} => pass ::
            Both results are of this rank's own gradient, divided by the number of ranks.
        gradient.square().sum()[None] => gradient.norm()[None] ::
            The lengths are not squared. | {SQUARES}
        gradient.square().sum()[None] => gradient.norm()[None]
        both[-1].item() => both[-1].item() ** 2 :: The mean length is squared, and not each length.
        both[-1].item() => both[-1].sqrt().item() :: The root of the mean square is taken.
        gradient.square().sum() => gradient.square().mean() ::
            The squares are divided by the number of entries. | A squared length is a sum.
        gradient.square().sum() => gradient.sum().square() ::
            The entries are added and then squared. | A squared length is a sum of squares.
        {SUM} => dist.reduce(both, group_dst=0, group=group) ::
            Only the first rank of the group has the results. | Every rank needs them: all_reduce.
    """,
    module=globals(),
)

# ---- 3.6 ------------------------------------------------------------------------------------


def squares() -> list[Call]:
    """One measurement each; lists of unequal length; large sizes; a true square below 0."""
    found = []
    for counts, small, large in (((1, 1), 4, 16), ((5, 3), 6, 50), ((4, 9), 128, 4096)):
        true, variance = random.uniform(2, 5), random.uniform(20, 60) * small / 4
        lists = [
            [(true + variance / size) * random.uniform(0.7, 1.6) for _ in range(count)]
            for count, size in zip(counts, (small, large), strict=True)
        ]
        found.append((*lists, small, large))
    return [*found, ([9.0, 7.5, 6.0], [0.5, 0.75], 2, 32)]


def one_number(value: object) -> Tensor:
    """A number as float32, in which differences of squares have lost some digits."""
    return torch.tensor(float(number(value)), dtype=torch.float32)


def of_pairs(
    small_squares: list[float], large_squares: list[float], small: int, large: int
) -> float:
    """A noise scale of each pair, and the mean of them."""
    pairs = zip(small_squares, large_squares, strict=False)
    scales = [scaling.noise_scale([one], [other], small, large) for one, other in pairs]
    return sum(scales) / len(scales)


VARIANCE = "(small_square - large_square) / (1 / small - 1 / large)"
TRUE = "(large * large_square - small * small_square) / (large - small)"
SOLVE = (
    "What is the average squared length of a batch's gradient, in terms of V and the true square? "
    "One such equation for each batch size gives both."
)
SMALL = "fmean(small_squares)"
LARGE = "fmean(large_squares)"
noise_scale = Spec(
    todo="3.6",
    truth=scaling.noise_scale,
    cases=squares,
    form=one_number,
    tell=lambda case: (
        f"noise_scale({show(case.small_squares, 4)}, {show(case.large_squares, 4)}, {case.small}, "
        f"{case.large})"
    ),
    same=lambda found, wanted, case: same(found, wanted, 1e-4),
    say=lambda found, wanted: f"gives {show(found.item())}, not {show(wanted.item())}",
    advice={"": SOLVE},
    hints=(
        "A batch's gradient is the true gradient plus noise. The noise is 0 on average, and its "
        "squared length is V / batch on average. What is then the average squared length of the "
        "sum? Write this down for both batch sizes: two equations, with the two unknowns V and "
        "|true gradient|^2.",
        "The mean of each list stands for its average: small_square = true + V / small, and "
        "large_square = true + V / large. Subtract the equations, and `true` drops out.",
        "V is (small_square - large_square) / (1 / small - 1 / large). Likewise the true square is "
        "(large * large_square - small * small_square) / (large - small). The noise scale is V "
        "divided by it.",
    ),
    mistakes="""
        small_square = {SMALL} => large_square = {SMALL}
        large_square = {LARGE} => small_square = {LARGE} ::
            The squares of the two batch sizes have changed places. | {SOLVE}
        {VARIANCE} => (small_square - large_square) / (large - small) ::
            V is computed as if the noise were V * batch. | The noise is V / batch.
        {VARIANCE} => small_square - large_square ::
            The difference of the squares is not divided by 1 / small - 1 / large. | {SOLVE}
        {VARIANCE} => (small_square - large_square) * (1 / small - 1 / large) ::
            The difference is multiplied by 1 / small - 1 / large.
        {TRUE} => large_square ::
            The square at the large batch is taken for the true one: noise is left in it.
        {TRUE} => small_square ::
            The square at the small batch is taken for the true one: it is mostly noise.
        {TRUE} => large * large_square - small * small_square ::
            The true square is not divided by large - small.
        {TRUE} => (large * small_square - small * large_square) / (large - small) ::
            The squares have changed places in the true square.
        return variance / true_square => return variance ::
            This is V alone. | The noise scale is V / |true gradient|^2.
        return variance / true_square => return true_square :: This is the true square alone.
        {SMALL} => median(small_squares)
        {LARGE} => median(large_squares) ::
            Medians are taken, and the squares are skewed. | The equations hold for means.
        {SMALL} => small_squares[0]
        {LARGE} => large_squares[0] ::
            Only the first measurement of each list is used. | Take the means.
        {SMALL} => sum(small_squares)
        {LARGE} => sum(large_squares) ::
            The squares are added up, and the lists need not be equally long.
        instead of_pairs :: This is a mean of ratios: the true square of a single pair is mostly
            noise. | Take the mean of each list first.
    """,
    module=globals(),
)
