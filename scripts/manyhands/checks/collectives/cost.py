"""The cost of messages: 4.11 and 4.12."""

import random
from collections.abc import Sequence
from typing import NamedTuple

from manyhands.checks.engine.spec import Call, Spec
from manyhands.checks.engine.values import listing, number, show
from manyhands.collectives import alpha_beta

# ---- 4.11 -----------------------------------------------------------------------------------


def on_a_line(sizes: Sequence[float], errors: Sequence[float], slow: float = 1.0) -> Call:
    """Times alpha + beta * size, each multiplied by an error; alpha and beta are drawn."""
    alpha_s = slow * random.uniform(2e-5, 2e-4)
    beta_s = slow / random.uniform(5e8, 5e9)
    pairs = zip(sizes, errors, strict=True)
    return (sizes, [(alpha_s + beta_s * size) * error for size, error in pairs])


def drawn_times() -> list[Call]:
    """Exact times; then noisy ones, in which the weights decide; also in another order."""
    sizes = [0, 8, 256, 4096, 65_536, 1 << 20, 1 << 23, 1 << 26]
    noise = [random.choice((0.8, 0.9, 1.1, 1.2)) for _ in sizes]
    noise[:2] = 1.3, 0.8
    noise[-2:] = 0.85, 1.25
    mixed = list(zip(sizes[1:], noise[1:], strict=True))
    random.shuffle(mixed)
    return [
        on_a_line([1000, 3_000_000], [1, 1]),
        on_a_line(sizes, [1] * len(sizes)),
        on_a_line(sizes, noise),
        on_a_line(*zip(*mixed, strict=True)),
        on_a_line(sizes, noise, slow=1e4),
        ([1000, 1 << 26], [4e-3 + 1e-10 * size for size in (1000, 1 << 26)]),
        ([2000, 4000, 8000], [1e-8 * size - 1e-5 for size in (2000, 4000, 8000)]),  # alpha < 0
    ]


def squares(fit: Sequence[float], case: Call) -> float:
    """The sum of the squared relative errors of a line."""
    pairs = zip(case.sizes_bytes, case.times_s, strict=True)
    return sum(((fit[0] + fit[1] * size) / time - 1) ** 2 for size, time in pairs)


def fits(found: Sequence[float], wanted: Sequence[float], case: Call) -> bool:
    """Is the sum of squares as small, but for the rounding of float32 or the end of a search?"""
    return len(found) == 2 and squares(found, case) <= 1.001 * squares(wanted, case) + 1e-5


def line(fit: Sequence[float]) -> str:
    """A fit in words."""
    return f"alpha = {show(fit[0])} s, beta = {show(fit[1])} s/byte"


def say_fit(found: Sequence[float], wanted: Sequence[float]) -> str:
    """Both fits."""
    if len(found) != 2:
        return f"gives {len(found)} numbers, not 2"
    return f"gives {line(found)}; the best fit is {line(wanted)}"


COLUMNS = "torch.stack([1 / times, sizes / times], dim=1)"
ONES = "torch.ones_like(times)"
SIZES = "sizes, times = "
KEPT = "[p for p in zip(sizes_bytes, times_s)"
RESULT = "return alpha_s, beta_s_per_byte"
fit_alpha_beta = Spec(
    todo="4.11",
    truth=alpha_beta.fit_alpha_beta,
    cases=drawn_times,
    form=listing(number, "two numbers: alpha_s and beta_s_per_byte"),
    same=fits,
    tell=lambda case: (
        f"fit_alpha_beta({len(case.times_s)} messages of {case.sizes_bytes[0]:,} to "
        f"{case.sizes_bytes[-1]:,} bytes)"
    ),
    say=say_fit,
    advice={"": "Make the sum of ((alpha + beta * size) / time - 1) ** 2 as small as possible."},
    hints=(
        "The model says alpha + beta * size = time. Divide that line by the time: alpha * (1 / "
        "time) + beta * (size / time) = 1. Every message gives one such line, and there are two "
        "unknowns.",
        "That is ordinary least squares with the columns 1 / time and size / time, and 1 on the "
        "right-hand side.",
        "torch.linalg.lstsq(columns, ones).solution, where columns is (messages, 2) in float64.",
    ),
    mistakes="""
        {ONES} => times
        {COLUMNS} => torch.stack([torch.ones_like(times), sizes], dim=1) ::
            The errors are counted in seconds, so the largest message decides alone. | Divide each
            message's line by its time, so that every message counts alike.
        {ONES} => 1 / times
        {COLUMNS} => torch.stack([1 / times, sizes / times], dim=1) / times[:, None] ::
            Each error is divided by the square of the time. | The error itself is divided by the
            time, so its square is divided by time ** 2.
        {ONES} => times**0.5
        {COLUMNS} => torch.stack([1 / times, sizes / times], dim=1) * times[:, None] ** 0.5 ::
            Each error is divided by the square root of the time.
        {RESULT} => return beta_s_per_byte, alpha_s ::
            alpha and beta have changed places. | alpha, the time of an empty message, comes first.
        {RESULT} => return alpha_s, 1 / beta_s_per_byte ::
            The second number is the bandwidth in bytes per second. | beta is seconds per byte.
        {RESULT} => return 1e3 * alpha_s, 1e3 * beta_s_per_byte ::
            Both numbers are in milliseconds. | Times come in seconds and leave in seconds.
        {RESULT} => return 1e6 * alpha_s, 1e6 * beta_s_per_byte :: Both numbers are in microseconds.
        {RESULT} => return 1e6 * alpha_s, beta_s_per_byte :: alpha is in microseconds.
        {RESULT} => return (f := (times[-1] - times[0]) / (sizes[-1] - sizes[0])) and times[0] - f *
            sizes[0], f :: This is the line through the first and the last message. | Use all
            messages, each with its own line of the least squares.
        {RESULT} => return times.min(), beta_s_per_byte ::
            alpha is the smallest measured time. | alpha is the time at size 0, not a measured one.
        {SIZES} => {SIZES}torch.tensor({KEPT} if p[0]], dtype=torch.float64).T # ::
            The message of 0 bytes is left out. | An empty message is the best sign of alpha.
        {SIZES} => {SIZES}torch.tensor({KEPT}][1:], dtype=torch.float64).T # ::
            The first message is left out. | Use all messages.
    """,
    reasons="""
        LinAlgError :: The equations have no solution, as where a number is infinite. | The first
            size is 0, so no logarithm of it can be taken, and nothing divided by it.
        for /: 'int' and 'list' ::
            A list cannot be divided. | times = torch.tensor(times_s, dtype=torch.float64)
    """,
    module=globals(),
)

# ---- 4.12 -----------------------------------------------------------------------------------

NAMES = (
    "broadcast_naive",
    "broadcast_tree",
    "reduce_tree",
    "gather",
    "all_gather_ring",
    "reduce_scatter_ring",
    "all_reduce_naive",
    "all_reduce_tree",
    "all_reduce_ring",
)


class Job(NamedTuple):
    """All nine collectives on this many ranks."""

    world_size: int
    nbytes: int


def jobs() -> list[Job]:
    """Powers of 2 and others, more than any small bound, and one rank; bytes that leave a rest."""
    sizes = (2, 3, 4, 5, 8, 9, random.randint(10, 15), 64, random.randint(1025, 2000), 1)
    return [Job(n, n * random.randint(100, 999) + (n > 1)) for n in sizes]


def prices(answer, case: Job) -> dict:
    """Rounds and bytes by name; without rounds no message has a size."""
    seen = {}
    for name in NAMES:
        price = as_price(answer(name, case.world_size, case.nbytes))
        seen[name] = price[:1] if case.world_size == 1 and len(price) == 2 else price
    return seen


as_price = listing(number, "two numbers: how many rounds, and the bytes of one message")


def say_price(found: dict, wanted: dict) -> str:
    """The first name that is priced wrongly."""
    name = next(name for name in NAMES if found[name] != wanted[name])
    if len(found[name]) != len(wanted[name]):
        return f"gives {len(found[name])} numbers for {name}, not 2"
    return f"gives {in_words(found[name])} for {name}, not {in_words(wanted[name])}"


def in_words(price: list) -> str:
    """A price: rounds and bytes."""
    size = f" of {show(price[1], 9)} bytes" if len(price) > 1 else ""
    return f"{show(price[0])} rounds{size}"


CEIL = "math.ceil(math.log2(n))"
BYTES = "nbytes / n if in_chunks else nbytes"
TREE = "A tree needs ceil(log2 n) rounds."
rounds_and_message = Spec(
    todo="4.12",
    truth=alpha_beta.rounds_and_message,
    cases=jobs,
    observe=prices,
    tell=lambda case: f"with world_size={case.world_size}, nbytes={case.nbytes:,} the function",
    say=say_price,
    advice={"": "Draw this collective for these ranks, and count its messages in a row."},
    independent=True,
    hints=(
        "Ask three questions for each name. How many messages come one after the other in one "
        "half: n-1, or ceil(log2 n)? Is it one half, or two? And how large is each message: the "
        "whole tensor, or a chunk?",
        "An all-reduce has two halves: up a tree to rank 0 and down again, or a reduce-scatter and "
        "an all-gather.",
        "n-1 for names that end in naive, ring or gather, else math.ceil(math.log2(n)); times 2 "
        "where the name starts with all_reduce; nbytes / n for ring and gather, else nbytes.",
    ),
    mistakes="""
        {CEIL} => math.log2(n) ::
            log2(n) is not always whole, and a round is. | Round up: math.ceil(math.log2(n)).
        {CEIL} => int(math.log2(n)) ::
            log2(n) is rounded down, so the ranks that are left over have no round. | {TREE}
        {CEIL} => n.bit_length() :: n.bit_length() is one more than log2(n) where n is a power of 2.
            | (n - 1).bit_length(), or math.ceil(math.log2(n)).
        {CEIL} => n - 1 ::
            In a tree many ranks send at the same time. | Count rounds, not messages. {TREE}
        2 if name.startswith("all_reduce") else 1 => 1 :: Only one half of the all-reduce is
            counted. | An all-reduce gathers the sum and gives it out again.
        base = n - 1 => base = n ::
            Nobody sends to itself, so it takes n-1 messages. | n-1 messages, not n.
        base = n - 1 => base = n * (n > 1) :: Nobody sends to itself, so it takes n-1 messages.
        name.endswith(("naive", "ring", "gather")) => name.endswith(("naive", "ring")) ::
            The rounds of a gather are those of a tree. | Here the root takes one after the other.
        {BYTES} => nbytes :: A ring, and a gather, send chunks, not the whole tensor. | A message of
            a ring, or of a gather, is one of n chunks; elsewhere it is the whole tensor.
        {BYTES} => nbytes / n :: Every message is counted as a chunk.
        {BYTES} => halves * base * (nbytes / n if in_chunks else nbytes) ::
            These are the bytes of all rounds together. | Give those of one message.
        {BYTES} => nbytes // n if in_chunks else nbytes ::
            The rest of the division is lost. | Divide with /, since a mean may have a fraction.
    """,
    reasons="""
        KeyError :: The function knows no such name. | The docstring lists all nine names.
    """,
    module=globals(),
)
