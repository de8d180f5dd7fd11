"""14.6 to 14.8: the spread of a sum, and two numbers that follow from C/W."""

import math
import random
from collections.abc import Callable
from typing import NamedTuple

import torch

from manyhands.checks.engine.spec import Call, Spec
from manyhands.checks.engine.values import number, pair, same, show
from manyhands.checks.mesh.calls import called, in_words
from manyhands.mesh import ratio, spread


def times_too_large(of_one: str) -> Callable:
    """By which factor a number is too large or too small; `of_one` says why it should be 0."""

    def fact(found: float, wanted: float, case: NamedTuple) -> str:
        if wanted == 0:
            return of_one
        return f"The result is {show(found / wanted, 4)} times the right one."

    return fact


# ---- 14.6 -----------------------------------------------------------------------------------

SCALE = 1e20  # spreads of float64 are as small as what passes for rounding elsewhere


def sums() -> list[Call]:
    """Few terms and many, in both orders; powers of two and others; one term; four types."""
    odd = 2 * random.randint(200, 900) + 1
    return [
        (4, torch.float32, None),
        (4, torch.float32, True),
        (1, torch.float32, None),
        (2 ** random.randint(10, 14), torch.float32, True),
        (odd, torch.bfloat16, False),
        (odd, torch.float16, True),
        (1, torch.bfloat16, True),
        (2, torch.float64, None),
        (random.randint(10**6, 10**7), torch.float64, True),
        (random.randint(10**6, 10**7), torch.float32, None),
    ]


def is_spread(found: float, wanted: float, case: Call) -> bool:
    """The lesson's value, or that of its sums without an approximation, in 32 bits."""
    n = case.num_terms
    right = [wanted]
    if n > 1 and case.in_pairs:  # whole levels
        right.append(wanted * math.sqrt(math.ceil(math.log2(n)) / math.log2(n)))
    elif n > 1:  # 1 + 2 + ... + n, with and without the 1, which is no addition
        right += [wanted * math.sqrt(k / n**2) for k in (n * n + n, n * n + n - 2)]
    return any(same(found, one, 1e-6) for one in right)


ROUNDINGS = "math.log2(num_terms) / 12 if in_pairs else num_terms / 24"
EPS = "torch.finfo(dtype).eps"
RESULT = "return eps * math.sqrt(roundings)"
ONE_BY_ONE = "One by one, the relative spread is eps sqrt(n / 24)."
PAIRS = "In pairs, the relative spread is eps sqrt(log2(n) / 12)."
BOTH = f"{ONE_BY_ONE} {PAIRS}"
spread_of_sum = Spec(
    todo="14.6",
    truth=spread.spread_of_sum,
    cases=sums,
    observe=called,
    form=lambda value: SCALE * float(number(value)),
    same=is_spread,
    say=lambda found, wanted: f"gives {pair(found / SCALE, wanted / SCALE)}",
    facts=times_too_large("A sum of one term has no error."),
    tell=in_words("spread_of_sum"),
    advice={"": BOTH},
    reasons="""
        has no attribute 'eps' :: A type has no eps of its own. | It is torch.finfo(dtype).eps
        must be Tensor :: This function of torch takes a tensor. | math.sqrt takes a number.
        must be real number :: math.sqrt takes a number. | It is torch.finfo(dtype).eps
    """,
    hints=(
        "Random errors add up by their squares. Write down the sum of the squares for both orders, "
        "take its square root, and divide it by the usual size of the sum, r sqrt(n).",
        "Both r and one factor of n cancel. torch.finfo(dtype).eps is the distance from 1 to the "
        "next number, and a sum of one term has no error.",
        f"{BOTH} For n = 1 return 0.0.",
    ),
    mistakes="""
        if num_terms == 1: => if False: :: A single term is given a rounding error, but nothing is
            added there. | For one term return 0.0.
        {RESULT} => return eps * roundings :: The square root is missing: the squares of the errors
            were added up, and a spread is the root of that sum. | Take the square root of n / 24 or
            log2(n) / 12, and multiply it by eps.
        {RESULT} => return math.sqrt(eps * roundings) :: The square root is taken of eps as well. |
            eps is already the size of an error, and not its square.
        {RESULT} => return eps * math.sqrt(num_terms * roundings) ::
            The error is not divided by the usual size of the sum. | With terms of size r the sum
            has a size of about r sqrt(n): divide by it.
        {RESULT} => return eps * math.sqrt(12 * roundings) ::
            The spread of a single rounding is taken for eps. | An error that is uniform between
            -eps / 2 and eps / 2 has a standard deviation of eps / sqrt(12).
        num_terms / 24 => num_terms / 12 :: One by one, every partial sum is given the size of the
            last one. | The k-th has a size of r sqrt(k) only, and 1 + 2 + ... + n is about n^2 / 2.
        num_terms / 24 => (num_terms - 1) / 24 :: n - 1 stands in place of n. | {ONE_BY_ONE}
        / 12 if in_pairs => / 24 if in_pairs ::
            In pairs, the levels are given half of their squares. | Every level contributes r^2
            eps^2 n / 12 in full, because all terms are added on every level.
        math.log2(num_terms) => math.log(num_terms) :: The number of levels is a natural logarithm.
            | Every level halves the number of terms, so there are log2(n) levels.
        math.log2(num_terms) => int(math.log2(num_terms)) ::
            The number of levels is rounded down. | {PAIRS}
        {ROUNDINGS} => num_terms / 24 ::
            `in_pairs` is not used: the terms are always added one by one.
        {ROUNDINGS} => num_terms / 24 if in_pairs else math.log2(num_terms) / 12 ::
            The two orders have changed places. | {BOTH}
        {EPS} => torch.finfo(torch.float32).eps ::
            `dtype` is not used: this is the eps of float32. | torch.finfo(dtype).eps
        {EPS} => {EPS} / 2 ::
            Half of eps is taken, which is the largest error of a rounding. | {BOTH}
        {EPS} => torch.finfo(dtype).resolution ::
            This is the resolution in decimal digits, and not eps. | torch.finfo(dtype).eps
    """,
    module=globals(),
)

# ---- 14.7 -----------------------------------------------------------------------------------


def a_ratio() -> float:
    """FLOPs per byte, of few digits, not whole."""
    return random.randint(1000, 9000) / 4 + 0.125


def hidings() -> list[Call]:
    """Two ranks, one and many, odd numbers; numbers of 1 to 8 bytes; whole and fractional C/W."""
    odd = random.choice((5, 7, 9, 11))
    return [
        (2 * random.randint(300, 900) + 1, 2, None, None),
        (2 * random.randint(300, 900) + 1, 2, 2, True),
        (a_ratio(), odd, None, None),
        (a_ratio(), 3, 4, None),
        (a_ratio(), odd + 1, 1, False),
        (a_ratio(), 1, None, None),
        (a_ratio(), 1, 4, True),
        (a_ratio(), odd + 2, 1, True),
        (a_ratio(), 3, 8, True),
        (random.randint(2, 9) / 8, random.randint(500, 999), 4, None),
        (a_ratio(), random.randint(500, 999), None, True),
    ]


RING = "(num_ranks - 1) / num_ranks * bytes_per_number"
REPLICAS = "(2 * ring_bytes, 4)"
SHARDS = "[(ring_bytes, 2), (ring_bytes + ring_bytes, 4)]"
TAKE_MAX = "return max(nbytes / flops for nbytes, flops in passes) * flops_per_byte"
GATHERS = (
    "With FSDP, forward has 2 FLOPs for one gather, and backward 4 for a gather and a "
    "reduce-scatter."
)
OF_RING = (
    "A ring sends (n - 1) / n b bytes per parameter in a gather, and twice that in an all-reduce."
)
ADDED_UP = TAKE_MAX.replace("max(", "sum(")
tokens_to_hide = Spec(
    todo="14.7",
    truth=ratio.tokens_to_hide,
    cases=hidings,
    observe=called,
    form=lambda value: float(number(value)),
    same=lambda found, wanted, case: same(found, wanted, 1e-6),  # 32 bits will do
    facts=times_too_large("A single rank sends no messages, so no tokens have to hide any."),
    tell=in_words("tokens_to_hide"),
    advice={"": "Write an equation for each pass: seconds of its messages = seconds of its FLOPs."},
    hints=(
        "Messages of s bytes per parameter take s N / W seconds. Computing f FLOPs per parameter "
        "and token takes f N tokens / C seconds. Set both equal, and solve for the tokens.",
        "N cancels: tokens = s / f * C / W. Replicas have one pass with messages: s = "
        "2 (n - 1) / n b and f = 4. FSDP has two passes, and the slower one decides.",
        "Every pass leads to the same number: (n - 1) / n * b / 2 * flops_per_byte.",
    ),
    mistakes="""
        {RING} => bytes_per_number :: A rank is thought to send all bytes, but 1/n of them are
            already where they have to be. | {OF_RING}
        {RING} => (num_ranks - 1) * bytes_per_number :: The division by the number of ranks is
            missing. | {OF_RING} The tokens per rank are asked for.
        {RING} => bytes_per_number / num_ranks :: Only one chunk of the ring is counted. | A ring
            has n - 1 steps, and sends 1/n of the bytes in each of them.
        {RING} => num_ranks / (num_ranks + 1) * bytes_per_number ::
            n / (n + 1) stands in place of (n - 1) / n. | {OF_RING}
        {RING} => (num_ranks - 1) / num_ranks * 2 ::
            `bytes_per_number` is not used: every number is given 2 bytes.
        {RING} => (num_ranks - 1) / num_ranks * 8 * bytes_per_number ::
            These are bits. | W is in bytes per second, so count bytes.
        {REPLICAS} => (ring_bytes, 4) ::
            The all-reduce of the replicas is counted as a single trip around the ring. | It is a
            reduce-scatter and a gather, so it sends 2 (n - 1) / n b bytes per parameter.
        {REPLICAS} => (2 * ring_bytes, 6) :: The gradients of the replicas are hidden behind forward
            as well, but there are none before backward. | Behind backward, 4 FLOPs per parameter
            and token have to last as long as 2 (n - 1) / n b bytes per parameter.
        {REPLICAS} => (2 * ring_bytes, 2) ::
            The backward of the replicas is given 2 FLOPs, which are those of forward.
        {SHARDS} => [(3 * ring_bytes, 4)] :: All three messages of FSDP are hidden behind backward,
            but one of them is hidden behind forward. | {GATHERS}
        {SHARDS} => [(ring_bytes, 4)] :: Of the messages of FSDP only one counts.
        {TAKE_MAX} => {ADDED_UP} :: The tokens of the two passes of FSDP are added up, but every
            pass computes with all tokens. | {GATHERS} Take the larger one of the two results.
        * flops_per_byte => / flops_per_byte :: The result is divided by C/W, but a slower network
            needs more tokens. | The bytes come first: bytes / W = FLOPs / C.
    """,
    module=globals(),
)

# ---- 14.8 -----------------------------------------------------------------------------------


def a_degree(more: int, part: float, nbytes: int | None = None, width: int = 0) -> Call:
    """A machine where the formula gives 1 + more, and a fraction that is rounded down."""
    width = width or 64 * random.randint(20, 200)
    exact = 9 * width / ((nbytes or 2) * (more + part))
    return (width, round(exact, 3), nbytes)


def degrees() -> list[Call]:
    """Small and large fractions, not even one more rank, equal times, other types of numbers."""
    width = 2 ** random.randint(9, 13)
    return [
        a_degree(4, 0.3),
        a_degree(6, 0.8),
        a_degree(0, 0.6),
        a_degree(0, 0.02, 4),
        # As long as the products, and no longer; exact, in whichever order this is computed.
        (width, width / 4, None),
        (width, width // 8, 4),
        a_degree(random.randint(9, 40), 0.7, 4),
        a_degree(random.randint(9, 40), 0.2, 1),
        a_degree(random.randint(200, 300), 0.4, 2),
        a_degree(12, 0.4, None, 10),  # C/W is 3.629
    ]


def ratio_of_times(found: float, wanted: int, case: Call) -> str:
    """How long messages take with the ranks that were found, and with one more."""
    if found < 1:
        return "One rank is always possible, because it sends nothing."
    nbytes = case.bytes_per_number or 2
    ranks = [found, found + 1] if found < wanted else [found]
    times = [(n - 1) * nbytes * case.flops_per_byte / (9 * case.width) for n in ranks]
    parts = [
        f"{show(share, 4)} times as long as products with {show(n)} {'rank' if n == 1 else 'ranks'}"
        for n, share in zip(ranks, times, strict=True)
    ]
    return f"Messages take {', and '.join(parts)}."


QUOTIENT = "9 * width / (bytes_per_number * flops_per_byte)"
FLOOR = f"1 + math.floor({QUOTIENT})"
SOLVED = "(N - 1) b C/W / (9 D) = 1 holds for N = 1 + 9 D / (b C/W)."
DOWN = "Round down: math.floor, or int."
largest_tensor_degree = Spec(
    todo="14.8",
    truth=ratio.largest_tensor_degree,
    cases=degrees,
    observe=called,
    form=number,
    facts=ratio_of_times,
    tell=in_words("largest_tensor_degree"),
    advice={"": "Solve (N - 1) b C / (9 D W) = 1 for N, and round the result down."},
    hints=(
        "flops_per_byte is C/W, so the ratio of the two times is (N - 1) * bytes_per_number * "
        "flops_per_byte / (9 * width). For which N is it 1?",
        f"{SOLVED} {DOWN}",
    ),
    mistakes="""
        {FLOOR} => math.floor({QUOTIENT}) ::
            This is N - 1, the number of the other ranks, rounded down. | {SOLVED}
        {FLOOR} => max(1, math.floor({QUOTIENT})) :: This is N - 1, and 1 where that would be 0.
        {FLOOR} => 1 + {QUOTIENT} :: The number of ranks is not rounded. | {DOWN}
        math.floor( => math.ceil( ::
            The number of ranks is rounded up, so messages take longer than products.
        math.floor( => round( :: The number of ranks is rounded to the nearest one.
        {FLOOR} => math.ceil({QUOTIENT}) :: Where messages take exactly as long as products, one
            rank is missing. | That number of ranks is still allowed: round down before you add 1.
        bytes_per_number * => 2 * ::
            `bytes_per_number` is not used: every number is given 2 bytes. | {SOLVED}
        bytes_per_number * => 8 * bytes_per_number * ::
            These are bits. | C/W is in FLOPs per byte, so count bytes.
        {QUOTIENT} => 9 * width * bytes_per_number / flops_per_byte ::
            More bytes per number allow more ranks here, but they make messages longer. | {SOLVED}
        9 * width => width :: The 9 of lesson 13's formula is missing.
        {FLOOR} => 2 ** math.floor(math.log2(1 + {QUOTIENT})) ::
            The number of ranks is rounded down to a power of two. | Any whole number is allowed.
        {FLOOR} => min(8, 1 + math.floor({QUOTIENT})) ::
            There are never more than 8 ranks. | The formula knows no nodes: leave out this limit.
    """,
    module=globals(),
)
