"""Checks of lesson 09. Its answers are sums, and a wrong sum says which part of it was wrong.

So each number that is asked for is written down once with all the ways to get a part of it wrong:
how a vector is cut, from which stage on, what counts besides. The fewest wrong parts that give all
the numbers that were seen are the mistake. 9.5 to 9.7 stand in _savings.py.
"""

import inspect
import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from numbers import Integral, Real
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyhands.checks import Lesson, Wrong, _savings
from manyhands.checks._savings import Checkpoint, MasterWeights, accumulate  # noqa: F401
from manyhands.checks.shared import Reasons, alone, build
from manyhands.memory.accounting import Recipe
from manyhands.models.transformer import Transformer

lesson = Lesson("memory")
hint, summary, ready, keep = lesson.hint, lesson.summary, lesson.ready, lesson.keep

Options = Sequence[
    tuple[object, str, str]
]  # a way, what it smells of, what to try; the right first
Value = float | str  # a number, or the form of what is no number, in words


# ---- what an answer gives, and which mistakes give the same -----------------------------------


def _plain(value: object) -> Value:
    """A number of Python, NumPy or torch as int or float; of all else its form, in words."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, Real) and not isinstance(value, bool):
        return int(value) if isinstance(value, Integral) else float(value)
    return "None" if value is None else f"a {type(value).__name__}"


def _text(value: Value) -> str:
    return value if isinstance(value, str) else f"{value:,.10g}"


def _collect(
    answer, cases: list[tuple], tell: Callable, run: Callable, reasons: Reasons | None = None
) -> tuple[list, Wrong | None]:
    """What the answer gives for the cases, and why it stopped before the last."""
    found = []
    try:
        for value in alone(answer, cases, tell, reasons or {}, run):
            found.append(value)
    except Wrong as wrong:
        return found, wrong
    return found, None


def _compare(
    what: str,
    found: Sequence[Value],
    cases: Sequence[tuple],
    tell: Callable,
    options: Sequence[Options],
    value: Callable,
    advice: str,
) -> None:
    """Refuse what is not `value(case, *ways)` with the right ways, and name those that give it."""

    def same(case: tuple, seen: Value, ways: Sequence) -> bool:
        truth = value(case, *(way for way, *_ in ways))
        if isinstance(seen, str):
            return False
        # Where a wrong way gives a fraction, an answer may have rounded it at last.
        return math.isclose(seen, truth, rel_tol=1e-9) or seen in (int(truth), math.ceil(truth))

    right = [kinds[0] for kinds in options]
    pairs = list(zip(cases, found, strict=False))
    off = next(((case, seen) for case, seen in pairs if not same(case, seen, right)), None)
    if off is None:
        return
    case, seen = off
    truth = value(case, *(way for way, *_ in right))
    said = f"{tell(*case)} gives {what}{_text(seen)}, not {_text(truth)}"
    if isinstance(seen, str):
        raise Wrong(said, "nothing is returned" * (seen == "None"), advice)

    def num_wrong(ways: tuple) -> int:
        return sum(way is not kinds[0] for way, kinds in zip(ways, options, strict=True))

    # The fewest mistakes that explain all that was seen.
    for ways in sorted(itertools.product(*options), key=num_wrong):
        if all(same(case, seen, ways) for case, seen in pairs):
            why = next(way[1:] for way, truth in zip(ways, right, strict=True) if way is not truth)
            raise Wrong(said, *why)
    raise Wrong(said, "", advice)


# ---- three numbers --------------------------------------------------------------------------

PARTS = Recipe._fields


def _plain_recipe(value: object) -> dict[str, Value] | Value:
    """The three numbers of a Recipe by name; of all else its form."""
    if all(hasattr(value, name) for name in (*PARTS, "_asdict")):
        return {part: _plain(getattr(value, part)) for part in PARTS}
    if isinstance(value, list | tuple):
        return f"a plain {type(value).__name__} of {len(value)}"
    return _plain(value)


def _compare_recipes(
    found: list[dict[str, Value] | Value],
    cases: list[tuple],
    tell: Callable,
    options: Mapping[str, Sequence[Options]],
    value: Callable,
) -> None:
    """Compare the three numbers one after the other; `value(part)` is how one is computed."""
    for seen, case in zip(found, cases, strict=False):
        truths = [value(part)(case, *(kinds[0][0] for kinds in options[part])) for part in PARTS]
        given = list(seen.values()) if isinstance(seen, dict) else []
        others = [list(order) for order in itertools.permutations(truths)][1:]
        if given and (given == truths or given not in others):
            continue
        smell = "the notebook takes the three numbers by their names"
        if seen == "None":
            smell = "nothing is returned"
        if given:
            smell = "the right numbers in another order"
            seen = f"({', '.join(map(_text, given))}), not ({', '.join(map(_text, truths))})"
        if seen == sum(truths):
            smell = "the sum of all three: on how many ranks a part is cut depends on the part"
        told = f"{tell(*case)} gives {_text(seen)}"
        raise Wrong(told, smell, "return Recipe(weights, gradients, optimizer), in bytes")
    for part in PARTS:
        numbers = [seen[part] for seen in found]
        advice = "write down which numbers there are, how many, and the bytes of each"
        _compare(f"{part} ", numbers, cases, tell, options[part], value(part), advice)
        for case, seen in zip(cases, numbers, strict=False):
            if isinstance(seen, float):
                smell = "the value is right, but a float: bytes are whole numbers"
                raise Wrong(f"{tell(*case)} gives {part} {seen}", smell, "// gives an int, / none")


# ---- 9.1 ------------------------------------------------------------------------------------


class Types(NamedTuple):
    """A case of 9.1."""

    weights: torch.dtype
    gradients: torch.dtype
    states: list[torch.dtype]
    master: torch.dtype | None


ITEMSIZE = "dtype.itemsize, of each of the types given"
ANY_TYPE = "2 and 4 bytes are those of two types, but any type may come", ITEMSIZE
BYTES_OF: Options = [
    (lambda dtype: dtype.itemsize, "", ""),
    (lambda dtype: 8 * dtype.itemsize, "those are bits, and 8 bits are one byte", ITEMSIZE),
    (lambda dtype: 4, "4 bytes whatever the type: a tensor made without dtype=?", ITEMSIZE),
    (lambda dtype: 1, "numbers were counted, not their bytes", ITEMSIZE),
    (lambda dtype: 2 if dtype is torch.bfloat16 else 4, *ANY_TYPE),
    (lambda dtype: 4 if dtype is torch.float32 else 2, *ANY_TYPE),
]
OWN_COPY = "the master copy of the weights is the optimizer's", "count it there, and there only"
ADD_UP = "add up the itemsize of every dtype in `states`"
EACH_STATE = "each state takes the bytes of its own type, and they may differ", ADD_UP
ADAM = "two moments in fp32 are those of Adam: other optimizers keep more, less or nothing"
FP32_SUMS = "gradients need not have the type of the weights: sums are often kept in fp32"
NO_COPY = "a copy of the weights is counted where there is none", "master may be None"
LONGER = "the copy has a type of its own, mostly a longer one than the weights"
TYPES_OF: dict[str, Options] = {  # of weights, gradients, states, and of the copies: one or none
    "weights": [
        (lambda w, g, s, m: [w], "", ""),
        (lambda w, g, s, m: [w, *m], *OWN_COPY),
        (lambda w, g, s, m: m or [w], *OWN_COPY),
        (lambda w, g, s, m: [g], "that is the type of the gradients", "weights.itemsize"),
    ],
    "gradients": [
        (lambda w, g, s, m: [g], "", ""),
        (lambda w, g, s, m: [w], FP32_SUMS, "gradients.itemsize"),
        (lambda w, g, s, m: [g, *m], *OWN_COPY),
        (lambda w, g, s, m: m or [g], *OWN_COPY),
    ],
    "optimizer": [
        (lambda w, g, s, m: [*s, *m], "", ""),
        (lambda w, g, s, m: s, "the optimizer's own copy of the weights is left out", "add master"),
        (lambda w, g, s, m: m, "the states are left out", ADD_UP),
        (lambda w, g, s, m: [*s[:1], *m], "not more than 1 of the states is counted", ADD_UP),
        (lambda w, g, s, m: [*s[:2], *m], "not more than 2 of the states are counted", ADD_UP),
        (lambda w, g, s, m: [*set(s), *m], "two states of one type are counted once", ADD_UP),
        (lambda w, g, s, m: s[:1] * len(s) + m, *EACH_STATE),
        (lambda w, g, s, m: s[:1] * 2 + m, "the first state was counted twice, for all", ADD_UP),
        (lambda w, g, s, m: [w] * len(s) + m, *EACH_STATE),
        (lambda w, g, s, m: [torch.float32] * 2 + m, ADAM, ADD_UP),
        (lambda w, g, s, m: s + [w] * len(m), LONGER, "master.itemsize"),
        (lambda w, g, s, m: s + (m or [torch.float32]), *NO_COPY),
        (lambda w, g, s, m: s + (m or [w]), *NO_COPY),
    ],
}
NO_MASTER = "master is None where the optimizer has no copy of its own", "add it only `if master`"
RECIPE_REASONS: Reasons = {
    "'NoneType' object has no attribute": NO_MASTER,
    "'NoneType' object is not iterable": NO_MASTER,
    "not NoneType": NO_MASTER,
    "list index out of range": ("`states` may be empty: plain SGD keeps nothing", "use a loop"),
    "'list' object has no attribute 'itemsize'": EACH_STATE,
    "KeyError: torch.": ("a table of some types, but any type may come", ITEMSIZE),
}


def _listed(weights, gradients, states, master) -> tuple:
    """The same, the copy as a list of one or none."""
    return weights, gradients, states, [master] if master else []


def _tell_types(*types: object) -> str:
    """The call, with types as one reads them."""
    return "recipe({}, {}, {}, master={})".format(*types).replace("torch.", "")


@lesson.exercise(
    "9.1",
    "A dtype knows its bytes: torch.bfloat16.itemsize is 2.",
    "Three numbers: the weight, its gradient, and all that the optimizer keeps for it: every "
    "state, and the master copy where there is one.",
    "kept = list(states), and master behind it unless it is None; the optimizer's number is the "
    "sum of the itemsizes of kept.",
)
def recipe(answer) -> None:
    """Types of 1 to 8 bytes, no state to three of them, with and without a copy."""
    short, middle, long = random.sample([torch.float8_e5m2, torch.bfloat16, torch.float64], 3)
    fp32 = torch.float32
    cases = [
        Types(short, middle, [fp32, fp32], None),
        Types(short, middle, [long, fp32], fp32),
        Types(fp32, short, [middle, long, middle], long),
        Types(middle, fp32, [], short),
        Types(long, fp32, [], None),
    ]
    found, stopped = _collect(
        answer, cases, _tell_types, lambda answer, *c: _plain_recipe(answer(*c)), RECIPE_REASONS
    )

    def value(_: str) -> Callable:
        return lambda case, bytes_of, types: sum(map(bytes_of, types(*_listed(*case))))

    options = {part: [BYTES_OF, types] for part, types in TYPES_OF.items()}
    _compare_recipes(found, cases, _tell_types, options, value)
    if stopped:
        raise stopped


# ---- 9.2 ------------------------------------------------------------------------------------


class Cut(NamedTuple):
    """A case of 9.2."""

    sizes: list[int]
    recipe: Recipe
    stage: int
    world_size: int


ROUND_UP = "-(-size // world_size), for each of the sizes"
NO_PADDING = "cut without padding: each vector is padded to full shards first", ROUND_UP


def _each(cut: Callable) -> Callable:
    """The numbers of a shard and of the whole, where each vector is cut by itself."""

    def numbers(sizes: list[int], n: int, nbytes: int) -> tuple[float, float]:
        shard = sum(cut(size, n, nbytes) for size in sizes)
        return shard, shard * n

    return numbers


_each_padded = _each(lambda size, n, _: -(-size // n))
SHARDS: Options = [
    (_each_padded, "", ""),
    (lambda sizes, n, _: (sum(sizes) / n, sum(sizes)), *NO_PADDING),
    (lambda sizes, n, _: (sum(sizes) // n, sum(sizes)), *NO_PADDING),
    (_each(lambda size, n, _: size // n), "rounded down: padding is lost", ROUND_UP),
    (_each(lambda size, n, _: round(size / n)), "rounded to the nearest", ROUND_UP),
    (lambda sizes, n, b: _each_padded([sum(sizes)], n, b), "the sum of all was padded", ROUND_UP),
    (_each(lambda size, n, _: size // n + 1), "what divides evenly needs no padding", ROUND_UP),
    (_each(lambda size, n, _: -(-size // n) * n), "padded, but not cut", ROUND_UP),
    (
        _each(lambda size, n, nbytes: -(-size * nbytes // n) / max(nbytes, 1)),
        "bytes were padded, but a vector is padded in numbers",
        ROUND_UP,
    ),
]
WHOLE = {
    "bare": lambda sizes, stage, whole: sum(sizes),
    "padded": lambda sizes, stage, whole: whole if stage else sum(sizes),
    "padded in stage 0": lambda sizes, stage, whole: whole,
}
STAGE_0 = "in stage 0 nothing is cut, so nothing is padded", "stage 0 has sum(sizes) numbers"
IN_VECTORS = (
    "in stages 1 and 2 the weights are whole, but lie in the padded vectors",
    "world_size shards, where a shard was rounded up",
)
NOT_PADDED = (
    "whole gradients are the parameters' own .grad: nobody pads them",
    "sum(sizes), as long as the gradients are not cut",
)
WHOLES: dict[str, Options] = {
    "weights": [
        (WHOLE["padded"], "", ""),
        (WHOLE["bare"], *IN_VECTORS),
        (WHOLE["padded in stage 0"], *STAGE_0),
    ],
    "gradients": [
        (WHOLE["bare"], "", ""),
        (WHOLE["padded"], *NOT_PADDED),
        (WHOLE["padded in stage 0"], *STAGE_0),
    ],
    "optimizer": [(WHOLE["padded"], "", ""), (WHOLE["padded in stage 0"], *STAGE_0)],
}
OF_RANKS: Options = [
    (lambda case: 1, "", ""),
    (lambda case: case.world_size, "of all ranks, but one is asked for", "no times world_size"),
]
CUT_FROM = {"weights": 3, "gradients": 2, "optimizer": 1}
SHARED = "a counter is not cut: every rank has one for each of its shards", "4 * len(sizes)"
FOUR = "a counter takes 4 bytes", "4 * len(sizes)"
ALL_RANKS = "the counters of all ranks, but the bytes of one are asked for", "4 * len(sizes)"
COUNTERS: Options = [
    (lambda case: 4 * len(case.sizes), "", ""),
    (lambda case: 0, "the counters are left out", "4 bytes for each vector, on every rank"),
    (lambda case: 4, "one counter in all", "one for each vector"),
    (lambda case: 4 * len(case.sizes) / case.world_size, *SHARED),
    (lambda case: 4 * len(case.sizes) / (case.world_size if case.stage else 1), *SHARED),
    (lambda case: 4 * len(case.sizes) * case.world_size, *ALL_RANKS),
    (
        lambda case: 4 * _each_padded(case.sizes, case.world_size if case.stage else 1, 1)[0],
        "a counter for each number",
        "one for each vector",
    ),
    (lambda case: len(case.sizes), *FOUR),
    (lambda case: 8 * len(case.sizes), *FOUR),
]
ONLY_IF = "4 * len(sizes) wherever recipe.optimizer is not 0"
COUNTED_IF: Options = [
    (lambda case: case.recipe.optimizer > 0, "", ""),
    (lambda case: True, "an optimizer that keeps nothing has no counters either", ONLY_IF),
    (
        lambda case: case.recipe.optimizer > 0 and case.stage > 0,
        "stage 0 has counters, too: one for each parameter",
        ONLY_IF,
    ),
    (
        lambda case: case.recipe.optimizer > 0 and case.stage == 0,
        "stages 1 to 3 have counters, too: one for each vector, on every rank",
        ONLY_IF,
    ),
]
NOT_THE_OPTIMIZER_S: Options = [
    (lambda case: 0, "", ""),
    (COUNTERS[0][0], "the counters are the optimizer's", "add them to its number alone"),
]


def _cuts(part: str) -> Options:
    """The stages in which a part is cut."""
    first = CUT_FROM[part]
    named = "the optimizer's state is" if part == "optimizer" else f"the {part} are"

    def why(stages: tuple[int, ...]) -> tuple[str, str]:
        seen = f"here in stage {' and '.join(map(str, stages))} alone: a later stage cuts it, too"
        if stages == tuple(range(4 - len(stages), 4)):
            seen = f"here from stage {stages[0]}" if stages else "here never"
        seen = "stage 0 has everything on every rank" if 0 in stages else seen
        return f"{named} cut from stage {first} on, {seen}", f"stage >= {first}"

    right = tuple(range(first, 4))
    subsets = [tuple(range(at, 4)) for at in range(5)]
    subsets += [(stage,) for stage in (1, 2)] + [(1, 2)]
    return [(right, "", ""), *((cut, *why(cut)) for cut in subsets if cut != right)]


def _bytes_used(part: str) -> Options:
    """Which of the recipe's numbers is taken for a part."""
    others = [
        (lambda recipe, other=other: getattr(recipe, other), f"those are the {other}' bytes", own)
        for other in PARTS
        if other != part
        for own in [f"recipe.{part}"]
    ]
    counted = (lambda recipe: 1, "numbers were counted, not their bytes", f"times recipe.{part}")
    return [(lambda recipe: getattr(recipe, part), "", ""), counted, *others]


def _value_of_part(part: str) -> Callable:
    """Bytes of one part on a rank, in the given ways."""

    def value(case: Cut, shard, whole, cut, of, counters, counted_if, ranks) -> float:
        sizes, recipe, stage, n = case
        mine, every = shard(sizes, n, of(recipe))
        numbers = mine if stage in cut else whole(sizes, stage, every)
        return of(recipe) * numbers * ranks(case) + counters(case) * counted_if(case)

    return value


CUT_REASONS: Reasons = {"'list'": ("`sizes` is a list of sizes", ROUND_UP)}


def _tell_cut(sizes: list[int], recipe: Recipe, stage: int, world_size: int) -> str:
    return f"bytes_per_rank({sizes}, {tuple(recipe)}, stage={stage}, world_size={world_size})"


@lesson.exercise(
    "9.2",
    "How many numbers has a shard? Round up for each vector, then add: that is the padding.",
    "Stage 1 cuts the optimizer's state, 2 the gradients as well, 3 the weights as well. What is "
    "not cut is whole: sum(sizes) numbers, or the padded vectors.",
    "weights: shard if stage >= 3, else whole; gradients: shard if stage >= 2, else sum(sizes); "
    "optimizer: shard if stage >= 1, else whole; whole = shard * world_size, in stage 0 "
    "sum(sizes). Then the counters.",
)
def bytes_per_rank(answer) -> None:
    """Every stage on 3 to 5 ranks, one rank, and an optimizer that keeps nothing."""
    n = random.choice([3, 5])  # no part of 4, 8 or 16: padded bytes differ from padded numbers
    rows = random.sample(range(2, 9), 4)
    sizes = [n * k + rest for k, rest in zip(rows, (0, 1, 1, n - 1), strict=True)]
    random.shuffle(sizes)
    bytes_of = Recipe(*random.sample([4, 8], 2), random.choice([6, 10, 16]))
    cases = [Cut(sizes, bytes_of, stage, n) for stage in range(4)]
    cases += [Cut(sizes[:3], bytes_of, 3, 1)]
    cases += [Cut(sizes, bytes_of._replace(optimizer=0), stage, n) for stage in (0, 2)]
    found, stopped = _collect(
        answer, cases, _tell_cut, lambda answer, *case: _plain_recipe(answer(*case)), CUT_REASONS
    )
    options = {part: [SHARDS, WHOLES[part], _cuts(part), _bytes_used(part)] for part in PARTS}
    for part, kinds in options.items():
        counters = COUNTERS if part == "optimizer" else NOT_THE_OPTIMIZER_S
        kinds += [counters, COUNTED_IF, OF_RANKS]
    _compare_recipes(found, cases, _tell_cut, options, _value_of_part)
    if stopped:
        raise stopped


# ---- 9.3 ------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """A case of 9.3."""

    tokens: int
    width: int
    heads: int
    nbytes: int = 4


def _times(width: int, heads: int = 0, more: int = 0, square: int = 0, scores: int = 0) -> Callable:
    """So many numbers a token: `square` x D x D weights, `scores` x H x T scores besides."""
    return lambda case: (
        (width + square * case.width / case.tokens) * case.width
        + (heads + scores * case.tokens) * case.heads
        + more
    )


WEIGHTS = "the weights were counted: they would be there without autograd", "count what tokens add"
NO_OUTPUT = "its output is the next operation's input, and is counted there if that needs it"
INPUT = "that is its output; its gradient needs its input"
MEANS = "a norm keeps two numbers of each token besides: its mean, and its scale", "width + 2"
NOT_KEPT_YET = "nobody has kept this: the norm before keeps its own input, not its output"
THREE = "queries, keys and values are three, each of the width"
SCORES = "a score for each pair of tokens: fused attention never keeps those"
ATTENTION = "4 width + heads"
OTHER_TENSOR = "gelu keeps its input, and down gelu's output, which is another tensor"
EACH_TOKEN = "a mean and a scale were counted for each norm, but every token has its own"
FOUR_BYTES = "4 bytes were taken for some numbers, whatever `nbytes` says"
PARTED = "heads share the width: each has width / heads of it, and together they have it once"
NORM: Options = [
    (_times(1, 0, 2), "", ""),
    (lambda case: case.width + 2 / case.tokens, EACH_TOKEN, "width + 2"),
    (lambda case: case.width + 8 / case.nbytes, FOUR_BYTES, "(width + 2), all times nbytes"),
    (_times(1), *MEANS),
    (_times(0, 0, 2), "a norm's gradient needs its input, too", "width + 2"),
    (_times(2, 0, 2), NO_OUTPUT, "width + 2"),
]
KEPT: dict[str, Options] = {
    "norm1": NORM,
    "qkv": [
        (_times(1), "", ""),
        (_times(3), INPUT, "width"),
        (_times(4), "queries, keys and values are counted where attention keeps them", "width"),
        (_times(0), NOT_KEPT_YET, "width"),
        (_times(1, square=3), *WEIGHTS),
    ],
    "attention": [
        (_times(4, 1), "", ""),
        (_times(3, 1), "its own output is left out: its gradient needs it", ATTENTION),
        (_times(3), "its own output is left out, and one number a head", ATTENTION),
        (_times(4), "one number a head and token is left out", ATTENTION),
        (lambda case: 4 * case.width + 4 * case.heads / case.nbytes, FOUR_BYTES, ATTENTION),
        (lambda case: 4 * case.width * case.heads, PARTED, ATTENTION),
        (_times(4, 0, 1), "one number a token, but each head has its own", ATTENTION),
        (_times(1, 1), THREE, ATTENTION),
        (_times(2, 1), THREE, ATTENTION),
        (_times(5, 1), "queries, keys and values are its input: not once more", ATTENTION),
        (_times(7, 1), "queries, keys and values were counted twice", ATTENTION),
        *(
            (_times(width, heads, scores=scores), SCORES, ATTENTION)
            for width in (3, 4)
            for heads in (0, 1)
            for scores in (1, 2)
        ),
    ],
    "out": [
        (_times(0), "", ""),
        (_times(1), "its input is attention's output, which attention has kept", "0"),
        (_times(0, square=1), *WEIGHTS),
    ],
    "norm2": NORM,
    "up": [
        (_times(1), "", ""),
        (_times(4), INPUT, "width"),
        (_times(5), NO_OUTPUT, "width"),
        (_times(0), NOT_KEPT_YET, "width"),
        (_times(1, square=4), *WEIGHTS),
    ],
    "gelu": [
        (_times(4), "", ""),
        (_times(1), "between up and down there are 4 times the width", "4 width"),
        (_times(0), "gelu's slope depends on its input; up has kept only its own", "4 width"),
        (_times(8), NO_OUTPUT, "4 width"),
    ],
    "down": [
        (_times(4), "", ""),
        (_times(1), INPUT, "4 width"),
        (_times(0), OTHER_TENSOR, "4 width"),
        (_times(5), "its output is only added to x, and a sum keeps nothing", "4 width"),
        (_times(4, square=4), *WEIGHTS),
    ],
}
SCALES: Options = [
    (lambda case: case.tokens * case.nbytes, "", ""),
    (lambda case: case.tokens, "numbers were counted, not their bytes", "times nbytes"),
    (lambda case: case.nbytes, "that is for one token", "times tokens"),
    (lambda case: 1, "numbers of one token", "times tokens, times nbytes"),
    (lambda case: 4 * case.tokens, "4 bytes whatever `nbytes` says", "times nbytes"),
    (lambda case: 2 * case.tokens, "2 bytes whatever `nbytes` says", "times nbytes"),
    (lambda case: 8 * case.tokens * case.nbytes, "those are bits", "nbytes is in bytes"),
]
KEYS = f"a dict with the keys {', '.join(KEPT)}"


def _tell_sizes(*case: int) -> str:
    return f"block_activations({', '.join(map(str, case))})"


def _plain_dict(value: object) -> dict[str, Value] | Value:
    if isinstance(value, Mapping):
        return {str(name): _plain(number) for name, number in value.items()}
    return _plain(value)


@lesson.exercise(
    "9.3",
    "Go through the block line by line. A matrix multiplication needs its input for the gradient "
    "of its weights; a sum needs nothing.",
    "Write down numbers a token: norm1 D + 2, qkv D, attention 4 D + H, and so on; D is the width.",
    "out keeps nothing new, norm2 is like norm1, up keeps D, gelu and down 4 D each. All times "
    "tokens, times nbytes.",
)
def block_activations(answer) -> None:
    """Three blocks, two with numbers of 4 bytes: each operation by itself."""
    # The default has to be tried as well, so one case is shorter.
    shapes = []
    for _ in range(3):
        heads = random.choice([2, 3, 5])
        shapes.append((random.randrange(101, 140), heads * random.randrange(8, 20), heads))
    given = [shapes[0], (*shapes[1], 2), (*shapes[2], 4)]
    cases = [Sizes(*case) for case in given]
    found, stopped = _collect(
        answer, given, _tell_sizes, lambda answer, *case: _plain_dict(answer(*case))
    )
    for case, seen in zip(given, found, strict=False):
        _refuse_form(seen, Sizes(*case), _tell_sizes(*case))

    def value(case: Sizes, numbers: Callable, scale: Callable) -> float:
        return numbers(case) * scale(case)

    advice = "which tensor does the gradient of this operation need, and does one hold it already?"
    for name, kinds in KEPT.items():
        numbers = [seen[name] for seen in found]
        _compare(f"{name} ", numbers, cases, _tell_sizes, [kinds, SCALES], value, advice)
    if stopped:
        raise stopped


def _refuse_form(seen: dict[str, Value] | Value, case: Sizes, told: str) -> None:
    """No dict, or other keys than the eight."""
    if not isinstance(seen, dict):
        smell = "nothing is returned" * (seen == "None")
        smell = smell or "one number" * (not isinstance(seen, str))
        raise Wrong(f"{told} gives {_text(seen)}", smell, f"return {KEYS}")
    extra = ", ".join(repr(name) for name in seen if name not in KEPT)
    if missing := [name for name in KEPT if name not in seen]:
        smell = "an operation that keeps nothing new is there, too, with 0"
        smell = f"you have {extra}: is it misspelt?" if extra else smell
        raise Wrong(f"{told} has no key {', '.join(missing)}", smell, KEYS)
    more = {name: value for name, value in seen.items() if name not in KEPT and value != 0}
    for name, value in more.items():
        smell = "sums, transposes and a dropout of 0 keep nothing that is not counted already"
        if name in ("total", "sum"):
            smell = "the sum of all is no operation, and whoever adds up counts it twice"
        raise Wrong(f"{told} has {_text(value)} under {name!r}", smell, KEYS)


# ---- 9.4 ------------------------------------------------------------------------------------


class Saved(NamedTuple):
    """One tensor that autograd saved."""

    storage: int  # where its memory begins
    at: int  # where its own numbers begin
    memory: int  # bytes that it keeps alive
    nbytes: int
    numel: int
    of_params: bool  # is it memory of `params`?
    is_param: bool  # is it one of them itself?
    is_parameter: bool  # is it an nn.Parameter, of `params` or not?


class Run(NamedTuple):
    """What an answer gave, and what it was given."""

    value: Value
    saved: list[Saved]
    result: int  # bytes of what run() returned
    params: int  # bytes of all of `params`
    num_calls: int
    reads_late: bool  # were `params` gone through for the first time in a hook?
    backward: str  # an error, or a gradient that is another one
    is_active: bool  # are the answer's hooks still called afterwards?


class Halves(nn.Module):
    """Keeps two small parts of a large tensor, one of them twice; the biases are not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(5, 48)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.wide(x)[:, 4:12], self.wide(x)[:, 8:16]
        c = (a * b + b) * a  # (N, 8)
        return self.last(self.norm(c).tanh())


class Language(Transformer):
    """A Transformer of two blocks, whose targets are its inputs."""

    def __init__(self) -> None:
        super().__init__(11, 6, 2, heads=2, width=16)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs, inputs)


KINDS = {
    "a small Transformer": Language,
    "a model that uses parts of a wide tensor": Halves,
    "the same model, params empty": Halves,
    "a model without autograd": Halves,
}


def _inputs(kind: str, num: int) -> Tensor:
    if KINDS[kind] is Language:
        return torch.randint(11, (num, 6))
    return torch.randn(num, 5, dtype=torch.float64)


def _run_saved(answer, kind: str, seed: int, num: int) -> Run:
    """Count by hand first, then let the answer count, then go backward through what it ran."""
    model = build(seed, KINDS[kind])
    params = [] if kind.endswith("empty") else list(model.parameters())
    inputs, results, states = _inputs(kind, num), [], []

    def again() -> Tensor:
        with torch.no_grad() if "without" in kind else nullcontext():
            return model(inputs)

    def run() -> Tensor:
        states.append(inspect.getgeneratorstate(given))
        results.append(again())
        states.append(inspect.getgeneratorstate(given))
        return results[-1]

    saved = _saved(again, params)
    truth = again()
    given = (param for param in params)
    value, is_active = _left_active(lambda: answer(run, given))
    reads_late = bool(saved) and states[:1] == [inspect.GEN_CREATED] and states[1] != states[0]
    backward = _go_back(results[-1], truth, model) if results else ""
    total = sum(param.nbytes for param in params)
    return Run(value, saved, truth.nbytes, total, len(results), reads_late, backward, is_active)


def _left_active(call: Callable[[], object]) -> tuple[Value, bool]:
    """What the call gives; and has it left hooks that are called in place of the ones before?"""
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(1) or t, lambda t: t):
        value = _plain(call())
        seen.clear()
        with torch.enable_grad():
            torch.ones(1, requires_grad=True).exp()
    return value, not seen


def _saved(run: Callable[[], Tensor], params: list[Tensor]) -> list[Saved]:
    """Every tensor that autograd saves."""
    own = {param.untyped_storage().data_ptr() for param in params}
    seen = []

    def look(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        place, itself = storage.data_ptr(), any(tensor is param for param in params)
        sizes = storage.nbytes(), tensor.nbytes, tensor.numel()
        of_params, is_parameter = place in own, isinstance(tensor, nn.Parameter)
        seen.append(Saved(place, tensor.data_ptr(), *sizes, of_params, itself, is_parameter))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
        result = run()
    del result
    return seen


def _go_back(result: Tensor, truth: Tensor, model: nn.Module) -> str:
    """Is a backward through what the answer ran what it is without?"""
    if not truth.requires_grad:
        return ""
    if not result.requires_grad:
        return "run() was called without autograd, as under torch.no_grad()"
    params = [param for param in model.parameters() if param.requires_grad]
    wanted = torch.autograd.grad(truth.sum(), params, allow_unused=True)
    try:
        grads = torch.autograd.grad(result.sum(), params, allow_unused=True)
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split()).split(". ")[0][:150]
    pairs = [(a, b) for a, b in zip(grads, wanted, strict=True) if b is not None]
    same = all(a is not None and torch.allclose(a, b) for a, b in pairs)
    return "" if same else "the gradients are other ones"


def _sum_by(key: str, size: str) -> Callable:
    """Add up one attribute, once for each value of another."""
    return lambda saved: sum({getattr(s, key): getattr(s, size) for s in saved}.values())


def _sum_all(size: str) -> Callable:
    return lambda saved: sum(getattr(s, size) for s in saved)


ONCE = (
    "memory that several tensors share was counted more than once: queries, keys and values are "
    "views of one tensor",
    "remember it by tensor.untyped_storage().data_ptr()",
)
VIEW = (
    "a part keeps alive all the memory that it is a part of",
    "tensor.untyped_storage().nbytes()",
)
NUMBERS = "numbers were counted, not bytes", "tensor.untyped_storage().nbytes()"
TWO_OF_A_SIZE = (
    "two tensors of one size were counted as one: a set holds a number once",
    "a dict from each storage's data_ptr() to its bytes",
)
NOTHING = (
    "nothing was counted: the pack hook sees what is saved while run() runs, the unpack hook only "
    "a backward",
    "with saved_tensors_hooks(pack, unpack): run(); add up after it",
)
COUNTED: Options = [
    (_sum_by("storage", "memory"), "", ""),
    (_sum_all("memory"), *ONCE),
    (_sum_by("at", "memory"), *ONCE),
    (
        _sum_all("nbytes"),
        "each tensor was counted as if it had memory of its own: several are views of one, and a "
        "clone() hides that",
        "no clone(); remember memory by tensor.untyped_storage().data_ptr()",
    ),
    (_sum_by("storage", "nbytes"), *VIEW),
    (_sum_by("at", "nbytes"), *VIEW),
    (lambda saved: sum({s.memory for s in saved}), *TWO_OF_A_SIZE),
    (_sum_all("numel"), *NUMBERS),
    (_sum_by("storage", "numel"), *NUMBERS),
    (lambda saved: len(saved), "tensors were counted", "add up their bytes"),
    (lambda saved: len({s.storage for s in saved}), "storages were counted", "add up their bytes"),
    (lambda saved: 0, *NOTHING),
]
TRANSPOSED = (
    "weights are saved as transposed views, which are other tensors on the same memory",
    "compare data_ptr() of storages, with those of `params`",
)
WITHOUT: Options = [
    (lambda run: [s for s in run.saved if not s.of_params], "", ""),
    (
        lambda run: run.saved,
        "the weights were counted, too: saved as transposed views, they are other tensors on the "
        "same memory",
        "leave out every storage that is one of the params'",
    ),
    (lambda run: [s for s in run.saved if not s.is_param], *TRANSPOSED),
    (lambda run: [s for s in run.saved if not s.is_parameter], *TRANSPOSED),
]
BESIDES: Options = [
    (lambda run: 0, "", ""),
    (lambda run: run.result, "the result of run() was counted, too", "only what was saved counts"),
    (
        lambda run: -run.params,
        "all params were subtracted, but autograd has not kept every one of them",
        "leave out what was kept, storage by storage",
    ),
]
BACK = (
    "what the pack hook returns is what backward finds in place of the tensor",
    "pack and unpack both return the tensor",
)
TWICE = "your code ran backward, and that frees the graph", "only run(); backward is the caller's"
NO_GRAD = "without autograd nothing is kept, so nothing can be counted", "leave torch.no_grad() out"
RUN_ONCE = "run is a function: it has to be called", "run()"
SAVED_REASONS: Reasons = {
    "run() takes": ("run is a function without arguments", "run()"),
    "Boolean value of Tensor": (
        "`in` compares the numbers in tensors",
        "compare tensor.untyped_storage().data_ptr() instead",
    ),
    "must match the size of tensor": (
        "`in` and == compare the numbers in tensors",
        "compare tensor.untyped_storage().data_ptr() instead",
    ),
    "'unpack_hook'": ("saved_tensors_hooks takes two functions: pack and unpack", "both return it"),
    "positional argument": ("a hook is called with one argument, the tensor", "def pack(tensor)"),
}


def _tell_saved(kind: str, seed: int, num: int) -> str:
    return f"saved_bytes of {kind} with a batch of {num}"


@lesson.exercise(
    "9.4",
    "torch.autograd.graph.saved_tensors_hooks(pack, unpack) is a context: pack gets each tensor as "
    "it is saved, and returns what shall be kept; unpack gets that back in backward.",
    "In pack: storage = tensor.untyped_storage(); remember storage.nbytes() under "
    "storage.data_ptr(), and return the tensor. Two views of one storage are then one entry.",
    "After run(): the data_ptr() of each param's storage does not count; add up the rest.",
)
def saved_bytes(answer) -> None:
    """A Transformer, parts of a tensor, no params, and nothing to keep."""
    cases = [(kind, random.randrange(10**6), random.randrange(3, 9)) for kind in KINDS]
    found, stopped = _collect(answer, cases, _tell_saved, _run_saved, SAVED_REASONS)
    told = dict(zip(cases, found, strict=False))
    for case, run in told.items():
        if run.num_calls == 0:
            raise Wrong(f"{_tell_saved(*case)}: run was never called", *RUN_ONCE)
        if run.backward:
            why = NO_GRAD if "torch.no_grad()" in run.backward else BACK
            why = TWICE if "a second time" in run.backward else why
            raise Wrong(f"after {_tell_saved(*case)} no backward is right: {run.backward}", *why)
    try:
        _compare_saved(told)
    except Wrong as wrong:
        raise _better_named(wrong, [run for run in found if run.saved]) from None
    if any(run.is_active for run in found):
        raise Wrong(
            f"after {_tell_saved(*cases[0])} its hooks are still called for all that is computed",
            "they were entered, and never left",
            "leave the with block before you return",
        )
    if stopped:
        raise stopped


def _better_named(wrong: Wrong, runs: list[Run]) -> Wrong:
    """What the numbers alone do not tell."""
    why = wrong.smell, wrong.hint
    if any(run.num_calls > 1 for run in runs):
        why = (
            "run() was called more than once, and each call keeps memory of its own",
            "call it once, inside the hooks",
        )
    elif all(run.reads_late for run in runs):
        why = (
            "`params` can be gone through only once, and a hook is called often",
            "collect what you need of them outside of the hook",
        )
    elif not wrong.smell and all(
        not isinstance(run.value, str) and run.value >= COUNTED[0][0](WITHOUT[0][0](run))
        for run in runs
    ):
        why = ONCE
    return Wrong(wrong.seen, *why)


def _compare_saved(told: dict[tuple, Run]) -> None:
    """The number of bytes of every case."""

    def value(case: tuple, count: Callable, besides: Callable, without: Callable) -> float:
        return count(without(told[case])) + besides(told[case])

    options = [COUNTED, BESIDES, WITHOUT]
    numbers = [run.value for run in told.values()]
    advice = "add up the storages that pack saw, each once, without those of params"
    _compare("", numbers, list(told), _tell_saved, options, value, advice)


lesson.exercises |= _savings.part.exercises
