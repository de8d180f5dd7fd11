"""Spec of 14.5: which ranks draw the same random numbers, for what."""

import builtins
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations, product
from math import prod
from typing import NamedTuple

import torch

from manyhands.checks.engine.card import Wrong
from manyhands.checks.engine.spec import Spec
from manyhands.checks.engine.values import integer
from manyhands.mesh import seeds as course
from manyhands.mesh.grid import coordinates

OTHERS = ("data", "dropout", "own dropout")
MANY = 60_000  # ranks, with which random numbers of 32 bits meet by chance
BITS = 1 << 32  # what PyTorch's generator on the CPU keeps of a seed


class Training(NamedTuple):
    """A mesh and the seed of the training on it."""

    seed: int
    sizes: dict[str, int]


def trainings() -> list[Training]:
    """Small meshes with each name and an unknown one, a thousand ranks and a million; any seed."""
    any_seed = random.randrange(1, 1023)
    return [
        Training(0, {"dp": 2, "tp": 2}),
        Training(any_seed, {"pp": 2, "dp": 2, "tp": 2}),
        Training(1, {"tp": 3, "shard": 2, "replicate": 3}),
        Training(any_seed, {"replicate": 2, "pp": 3, "shard": 2, "tp": 1}),
        Training(3, {"cp": 3, "dp": 4, "tp": 2}),
        Training(7, {"pp": 4, "dp": 150, "tp": 8}),
        Training(1023, {"pp": 16, "replicate": 32, "shard": 256, "tp": 8}),
        Training(0, {"pp": 3, "dp": 1 << 16, "tp": 4}),
        Training(random.randrange(1024), {"dp": MANY}),
    ]


def places_in(case: Training) -> list[dict[str, int]]:
    """All places of a small mesh; of a large one corners, lines along the axes, and some others."""
    sizes = case.sizes
    if prod(sizes.values()) <= 100 or sizes == {"dp": MANY}:
        return [dict(zip(sizes, at, strict=True)) for at in product(*map(range, sizes.values()))]
    draw = random.Random(case.seed)
    ends = [sorted({0, 1, size - 2, size - 1} & set(range(size))) for size in sizes.values()]
    found = [tuple(at) for at in product(*ends)]
    for axis, size in sizes.items():  # this one alone
        lines = sorted({*range(min(size, 300)), *(draw.randrange(size) for _ in range(50))})
        found += [tuple(n if other == axis else 0 for other in sizes) for n in lines]
    total = prod(sizes.values())
    found += [tuple(coordinates(draw.randrange(total), sizes).values()) for _ in range(300)]
    return [dict(zip(sizes, at, strict=True)) for at in dict.fromkeys(found)]


def seeds_seen(answer: Callable, case: Training) -> dict:
    """Which places have equal seeds, for each purpose; never the seeds themselves but weights'."""
    places = places_in(case)
    with no_hash_of_text():
        seeds = {
            what: [seed_for(answer, what, case.seed, place, case.sizes) for place in places]
            for what in course.PURPOSES
        }
        last = places[-1]
        again = {
            what: [seed_for(answer, what, case.seed + more, last, case.sizes) for more in (0, 1)]
            for what in OTHERS
        }
    seen: dict = {"the seeds of weights": sorted(set(seeds["weights"]))}
    for what in OTHERS:
        for axis, size in case.sizes.items():
            if size > 1:
                name = f"seeds of {what} along {axis}"
                seen[name] = along(axis, places, seeds[what])
    for what in OTHERS:
        seen[f"different seeds of {what} on {len(places)} ranks"] = len(set(seeds[what]))
    seen |= in_common(seeds, "seeds that {} and {} have in common")
    seen["the same call gives the same seed"] = all(
        first == seeds[what][-1] for what, (first, _) in again.items()
    )
    for what, (first, other) in again.items():
        seen[f"the seed of {what} changes with that of the training"] = first != other
        name = f"the last 32 bits of the seed of {what} change with that of the training"
        seen[name] = first % BITS != other % BITS
        seen[f"seeds of {what} below 0"] = sum(one < 0 for one in seeds[what])
    short = {what: [one % BITS for one in found] for what, found in seeds.items()}
    for what in OTHERS:
        name = f"different last 32 bits in the seeds of {what} on {len(places)} ranks"
        seen[name] = len(set(short[what]))
    return seen | in_common(short, "seeds of {} and {} with the same last 32 bits")


def seed_for(answer: Callable, what: str, seed: int, place: dict, sizes: dict) -> int:
    """One seed, which torch has to take."""
    own = dict(place), dict(sizes)
    found = integer(answer(what, seed, *own))
    for name, now, before in zip(("place", "sizes"), own, (place, sizes), strict=True):
        if now != before:
            why = "The caller goes on with it, also for the next purpose."
            raise Wrong(f"it changes `{name}`", why, f"Work on dict({name}), or only read it.")
    if not -(1 << 63) <= found < 1 << 64:
        torch.Generator().manual_seed(found)  # raises
    return found


def along(axis: str, places: list[dict], seeds: list[int]) -> str:
    """Are the seeds the same on ranks that differ in this axis only?"""
    lines: dict[tuple, list[int]] = {}
    for place, seed in zip(places, seeds, strict=True):
        lines.setdefault(tuple(n for a, n in place.items() if a != axis), []).append(seed)
    lines = {key: found for key, found in lines.items() if len(found) > 1}
    if all(len(set(found)) == 1 for found in lines.values()):
        return "the same"
    if all(len(set(found)) == len(found) for found in lines.values()):
        return "all different"
    return "some the same, some different"


def in_common(seeds: dict[str, list[int]], words: str) -> dict[str, int]:
    """How many seeds two purposes share."""
    return {
        words.format(one, other): len({*seeds[one]} & {*seeds[other]})
        for one, other in combinations(seeds, 2)
    }


@contextmanager
def no_hash_of_text() -> Iterator[None]:
    """Refuse hash() of a text, which differs from process to process, and so from rank to rank."""
    real = builtins.hash

    def guarded(value: object) -> int:
        if has_text(value):
            raise Wrong(
                "it calls hash() of a text",
                "In another process hash() of the same text is another number, so ranks that need "
                "one seed would have several.",
                "Use the number of the purpose, such as PURPOSES.index(what).",
            )
        return real(value)

    builtins.hash = guarded
    try:
        yield
    finally:
        builtins.hash = real


def has_text(value: object) -> bool:
    """Is there a text in it?"""
    if isinstance(value, tuple | frozenset):
        return any(map(has_text, value))
    return isinstance(value, str | bytes)


def facts_of(found: dict, wanted: dict, case: Training) -> str:
    """Do a few of very many seeds meet?"""
    counts = [found[name] / many for name, many in wanted.items() if name.startswith("different")]
    if case.sizes == {"dp": MANY} and min(counts) > 0.99:
        return "A few of very many seeds are equal, as hashes and random numbers are by chance."
    return ""


PLACES = "Count the places like digits, number = number * size + place[axis], and leave out axes "
LEAVE_OUT = PLACES + "along which the seed is the same."
APART = "Give every purpose room for all ranks: (4 * seed + number of the purpose) * 2**20 + ..."
TABLE = "Leave out the axes along which ranks have to draw the same numbers, and no other axis."
NUMBER = "(0 if is_same[what] else place[axis])"
SCALED = "(len(PURPOSES) * seed + PURPOSES.index(what)) * MOST_RANKS + number"
FOR_WEIGHTS = 'if what == "weights":\n        return seed\n'
NEW = "Every seed but that of weights is made from `seed` as well."
LOW = "Add `seed` below the 32nd bit: PyTorch's generator on the CPU drops those above."
LIKE_PP = "An axis that nobody names counts like pp."
seed_of = Spec(
    todo="14.5",
    truth=course.seed_of,
    cases=trainings,
    observe=seeds_seen,
    tell=lambda case: f"with seed {case.seed} on a mesh of {case.sizes}, seed_of",
    independent=True,
    facts=facts_of,
    advice={
        "": f"{LEAVE_OUT} {APART}",
        "the seeds of weights": "Return `seed` itself for weights.",
        "the same call gives the same seed": "Compute it from nothing but the arguments.",
        **{f"the seed of {what} changes with that of the training": NEW for what in OTHERS},
        **{
            f"the last 32 bits of the seed of {what} change with that of the training": LOW
            for what in OTHERS
        },
        **{f"seeds of {what} below 0": "Seeds are at least 0." for what in OTHERS},
        **{f"seeds of {what} along cp": LIKE_PP for what in OTHERS},
    },
    reasons="""
        process group has not been initialized :: The seed of any rank is asked, not of this one:
            `place` says where the rank stands. | Use `place`.
        Overflow when unpacking long ::
            torch.manual_seed takes no number that large. | Stay below 2**32.
    """,
    hints=(
        "For each purpose, write down along which axes ranks have to draw the same numbers. Ranks "
        "that differ in other axes as well need different seeds: give each place a number.",
        "Go through the axes as in a number with digits: number = number * size + the place in "
        "this axis, or 0 where the purpose has the same numbers along it.",
        "Purposes need seeds apart, also on 2**20 ranks and in the last 32 bits: with `seed` below "
        "1024 and four purposes, (4 * seed + number of the purpose) * 2**20 + number just fits.",
    ),
    mistakes=r"""
        {FOR_WEIGHTS} => if what == "weights":\n        return 1000 * seed\n ::
            The seed of weights is another one than in one process. | Return `seed` itself.
        {FOR_WEIGHTS} => if what == "weights":\n        return seed + sum(place.values())\n ::
            Ranks build different weights. | Every rank builds the whole one: return `seed` itself.
        "data": axis not in DATA_AXES => "data": False ::
            Ranks that work on the same samples draw different ones. | {TABLE}
        "data": axis not in DATA_AXES => "data": axis != "dp" ::
            Only dp is taken for an axis with samples of its own. | Ask `axis in DATA_AXES`.
        "data": axis not in DATA_AXES => "data": axis == "tp" ::
            Stages of one pipeline draw different samples. | {TABLE}
        "data": axis not in DATA_AXES => "data": axis in DATA_AXES ::
            The data axes are left out for data, and all others for which they should be.
        "dropout": axis == "tp" => "dropout": False ::
            Tensor ranks hold copies of one activation, and drop different elements of them.
        "dropout": axis == "tp" => "dropout": axis in ("tp", "pp") ::
            All stages drop the same places of each layer.
        "dropout": axis == "tp" => "dropout": axis not in DATA_AXES ::
            Dropout differs along the data axes only, so ranks along the other ones drop the same.
        "own dropout": False => "own dropout": axis == "tp" ::
            Tensor ranks drop the same places of different parts of an activation.
        number = number * size + {NUMBER} => number = number + {NUMBER} ::
            The places are added up, so ranks (0, 1) and (1, 0) have one seed. | {LEAVE_OUT}
        number = number * size + {NUMBER} => number = number * 10 + {NUMBER} ::
            Each axis has room for 10 ranks only, so longer ones overlap. | Multiply by its size.
        {SCALED} => seed * MOST_RANKS + number :: Two purposes have seeds in common. | {APART}
        {SCALED} => (len(PURPOSES) * seed + PURPOSES.index(what)) * 1000 + number ::
            A purpose has room for 1,000 ranks only, and with more it runs into the next.
        {SCALED} => (PURPOSES.index(what) << 40) + seed * MOST_RANKS + number ::
            Purposes differ above the last 32 bits only, and PyTorch's CPU generator drops those.
    """,
    module=globals(),
)
