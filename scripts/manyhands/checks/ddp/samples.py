"""Exercise 6.3: which rank reads which samples."""

import random
from typing import NamedTuple

import torch
from torch.utils.data import RandomSampler

from manyhands.checks.engine.spec import Spec
from manyhands.checks.engine.values import Malformed, kind
from manyhands.data import corpus

ORDER = "one process reads what RandomSampler does, seeded with seed + epoch, in epoch"


class Reading(NamedTuple):
    """So many samples on so many ranks."""

    num_samples: int
    world_size: int
    seed: int


class Numbers:
    """Sample numbers that should not be there; which ones depends on the order that was drawn."""

    def __init__(self, numbers: set[int]) -> None:
        self.numbers = sorted(numbers)

    def __eq__(self, other: object) -> bool:
        return bool(self.numbers) == bool(other.numbers)

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.numbers[:5]))
        return f"{shown}{', ...' if len(self.numbers) > 5 else ''}" or "none"


def readings() -> list[Reading]:
    """More ranks than samples; sizes that the ranks divide and others; one rank; seed 0."""
    sizes = [(n, n * random.randint(14, 20) + rest) for n, rest in ((2, 0), (3, 2), (5, 1))]
    drawn = [Reading(num, n, random.randint(1, 1000)) for n, num in sizes]
    return [Reading(4, 5, 1), Reading(random.randint(40, 60), 1, 3), *drawn, Reading(45, 2, 0)]


def is_shuffled(order: list[int]) -> bool:
    """Is no step from one number to the next frequent, as it is in a range or a rotated one?"""
    steps = [(b - a) % len(order) for a, b in zip(order, order[1:], strict=False)]
    return max(map(steps.count, steps), default=0) <= len(order) / 3


def what_is_read(answer, case: Reading) -> dict:
    """The shares of all ranks, made in one process, in several epochs and with several seeds."""
    num, size, seed = case

    def samplers(n: int = size, seed: int = seed) -> list:
        return [answer(num, rank, n, seed=seed) for rank in range(n)]

    def read(made: list, epoch: int) -> list[list[int]]:
        for sampler in made:
            sampler.set_epoch(epoch)
        return [_plain(list(sampler)) for sampler in made]

    ours = samplers()
    lengths = [len(sampler) for sampler in ours]
    shares = read(ours, 0)
    (one,) = read(samplers(1), 0)
    flat = [index for share in shares for index in share]
    seen = {
        "numbers that no sample has": Numbers(set(flat) - set(range(num))),
        "samples that several ranks read, or one rank twice": Numbers(
            {index for index in flat if flat.count(index) > 1}
        ),
        "samples that no rank reads": Numbers(set(range(num)) - set(flat)),
        "len() is what each rank reads": lengths == [len(share) for share in shares],
        "the ranks' counts differ by one at most": max(lengths) - min(lengths) <= 1,
        "besides": _about(shares, one, num),
    }
    if num < 20:
        return seen
    later = read(ours, 1)
    woven = [share[i] for i in range(num) for share in shares if i < len(share)]
    return {
        **seen,
        "the samples are shuffled": all(map(is_shuffled, [one, read(samplers(1), 1)[0]])),
        "reading an epoch again gives the same order": read(samplers(), 0) == shares,
        "one object can be read twice": (
            shares == read(ours, 0) == [list(sampler) for sampler in ours]
        ),
        "two epochs have different orders": later != shares,
        "two epochs of one object and of another have the same orders": (
            read(samplers(), 1) == later
        ),
        "two seeds have different orders in epoch 0": read(samplers(seed=seed + 3), 0) != shares,
        "two seeds have different orders in epoch 1": read(samplers(seed=seed + 3), 1) != later,
        "in two epochs a rank reads different samples": (
            size == 1 or [set(share) for share in shares] != [set(share) for share in later]
        ),
        "dealt out like cards, the order of one process gives the ranks' shares": woven == one,
        f"{ORDER} 0": one == _drawn(num, seed),
        f"{ORDER} 1": read(samplers(1), 1)[0] == _drawn(num, seed + 1),
    }


def _drawn(num: int, seed: int) -> list[int]:
    """The order that torch's own sampler gives."""
    return list(RandomSampler(range(num), generator=torch.Generator().manual_seed(seed)))


def _plain(share: list) -> list[int]:
    for index in share:
        if type(index) is not int:
            why = "A Dataset is asked for a sample with a plain integer."
            raise Malformed(
                f"{kind(index)}, {index!r}", why, "Turn a tensor into a list: .tolist()"
            )
    return share


def _about(shares: list[list[int]], one: list[int], num: int) -> dict[str, bool]:
    """What tells mistakes apart."""
    text = ",".join(map(str, one)) + ","
    return {
        "every rank reads all": all(sorted(share) == list(range(num)) for share in shares),
        "equally many": len(set(map(len, shares))) == 1,
        "one rank reads a sample twice": any(len(set(share)) < len(share) for share in shares),
        "pieces": all(",".join(map(str, share)) in text for share in shares),
        "own numbers": all(
            sorted(share) == list(range(rank, num, len(shares)))
            for rank, share in enumerate(shares)
        ),
    }


DRAW = "torch.randperm(self.num_samples, generator=generator)"
N = "self.world_size"
PART = "order[self.rank :: self.world_size]"
LEN = "len(range(self.rank, self.num_samples, self.world_size))"
SEED = "self.seed + self.epoch"
EACH = "self.num_samples // self.world_size"
DEAL = "Deal the order out like cards: order[rank::world_size]."

sampler = Spec(
    todo="6.3",
    truth=corpus.ShardedSampler,
    cases=readings,
    observe=what_is_read,
    tell=lambda case: (
        f"Reading {case.num_samples} samples on {case.world_size} ranks with seed {case.seed}"
    ),
    say=lambda found, wanted: _say(found, wanted),
    advice={"": "Read an epoch on two or three ranks, and print the shares side by side."},
    hints=(
        "First shuffle all numbers in the same way on every rank, and then take this rank's part.",
        "A generator of your own, `torch.Generator().manual_seed(self.seed + self.epoch)`, makes "
        "the same order on every rank and leaves torch's own random numbers alone.",
        "The part is a slice with a step: order[self.rank :: self.world_size]. `__iter__` returns "
        "an iterator over its .tolist(), and `__len__` counts the numbers without reading them.",
    ),
    mistakes="""
        {PART} => order
        {LEN} => self.num_samples :: Every rank reads all samples: they are not divided. | Keep only
            every world_size-th number.
        {DRAW} => torch.randint(self.num_samples, (self.num_samples,), generator=generator) ::
            The numbers are drawn with repetition: one rank reads a sample twice, and others are
            never read. | torch.randperm gives every number once.
        {PART} => {PART}[: {EACH}]
        {LEN} => {EACH} :: The rest of the division is dropped, so some samples are never read. | A
            slice with a step keeps the rest.
        {PART} => torch.cat([order, order[: -len(order) % {N}]])[self.rank::{N}]
        {LEN} => -(-self.num_samples // self.world_size) ::
            All ranks read equally many samples, and some samples are read twice to make that so. |
            Do not pad: the ranks' counts may differ by one.
        {SEED} => {SEED} + self.rank :: The ranks' shares overlap, and the rest is read by none:
            they are not parts of one and the same order. | Shuffle with seed + epoch on every rank.
        {DRAW} => torch.arange(self.num_samples) ::
            The samples are not shuffled. | torch.randperm shuffles.
        {SEED} => self.seed :: The order does not depend on the epoch. | Seed the generator with
            self.seed + self.epoch.
        {SEED} => self.epoch :: The order does not depend on self.seed.
        {SEED} => self.seed * self.epoch ::
            In epoch 0 the order does not depend on self.seed, and with seed 0 not on the epoch.
        {SEED} => self.seed * (self.epoch + 1) :: With seed 0 all epochs have one order.
        {DRAW} => torch.arange(self.rank, self.num_samples,
            self.world_size)[torch.randperm(len(self), generator=generator)]
        {PART} => order :: The samples are divided first and shuffled afterwards, so a rank reads
            the same ones in every epoch. | Shuffle all of them, then divide.
        {PART} => order[self.rank * len(order) // {N} : (self.rank + 1) * len(order) // {N}]
        {LEN} => len(list(iter(self))) :: Each rank reads one solid piece of the order. | {DEAL}
        {LEN} => {EACH} :: len() is not what every rank reads where the ranks do not divide the
            samples. | Count the numbers rank, rank + world_size, ... below num_samples.
    """,
    reasons="""
        returned non-iterator ::
            __iter__ has to return an iterator. | Return iter(...), or write yield in __iter__.
    """,
    module=globals(),
)


def _say(found: dict, wanted: dict) -> str:
    """The first thing that is wrong."""
    for name, value in wanted.items():
        if found.get(name) != value:
            is_list = isinstance(value, Numbers)
            shown = f"{name}: {found[name]}"
            return f"shows {shown if is_list else f'that this does not hold: {name}'}"
    return "shows other orders"
