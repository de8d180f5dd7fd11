"""Training whose number of ranks changes: who takes which samples, and were all of them used once?

    order of an epoch    7 2 9 4 | 0 5 1 8 | 3 6        steps of 4 samples; the tail is left out
    step 1 on 2 ranks    rank 0: 0 1   rank 1: 5 8
    step 1 on 3 ranks    rank 0: 0 8   rank 1: 5    rank 2: 1

The samples of a step depend on its number only, never on how many ranks share them. So a run that
goes on with fewer or more ranks takes the same batches as one that nothing has happened to. How
far it has come is a single number, and the place in the data is found without reading any.

Steps that were taken and then lost with their ranks are taken again. The history that survives
has, of each step, the last time that it was taken.

Price: one shuffled list of num_samples numbers per epoch and rank; a line per step and rank on the
disk, where the samples are written down.
Source: https://docs.pytorch.org/docs/stable/elastic/run.html (membership changes)
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch


def samples_of_step(
    step: int, rank: int, world_size: int, num_samples: int, batch: int, seed: int = 0
) -> list[int]:
    """The sample numbers that one rank takes in a step, whatever the number of ranks.

    An epoch has num_samples // batch steps; samples that fill no batch are left out of it. All
    ranks shuffle the numbers 0 .. num_samples-1 in the same way: by torch.randperm with a
    torch.Generator, seeded with seed + the number of the epoch. Step 0 of an epoch has the first
    `batch` numbers, step 1 the next, and so on. Of a step's numbers, rank r of n takes every n-th,
    beginning with the r-th. Where n does not divide the batch, the first ranks have one more.

    Args:
        step: from 0, over all epochs.
        batch: samples of a step over all ranks together.
    """
    epoch, place = divmod(step, num_samples // batch)
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(num_samples, generator=generator)
    shared = order[place * batch : (place + 1) * batch]
    return shared[rank::world_size].tolist()


class PlacedBatches:
    """The batches of one rank in an epoch, for a DataLoader; begins anywhere, at no cost.

    Args:
        batch: samples of a step over all ranks together.
        choose: samples_of_step, or a learner's own.
    """

    def __init__(
        self,
        num_samples: int,
        batch: int,
        rank: int,
        world_size: int,
        seed: int = 0,
        choose: Callable[..., list[int]] = samples_of_step,
    ) -> None:
        self.choose = choose
        self.num_samples, self.batch, self.seed = num_samples, batch, seed
        self.rank, self.world_size = rank, world_size
        self.epoch = self.first = 0
        self.taken: list[int] = []  # sample numbers of the batch that was handed out last

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose batches the next iteration yields."""
        self.epoch, self.first = epoch, 0

    def begin_at(self, number: int) -> None:
        """Begin the next iteration with this batch of the epoch."""
        self.first = number

    def __len__(self) -> int:
        return self.num_samples // self.batch

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(self.first, len(self)):
            step = self.epoch * len(self) + number
            self.taken = self.choose(
                step, self.rank, self.world_size, self.num_samples, self.batch, self.seed
            )
            yield self.taken


# ---- what was taken ------------------------------------------------------------------------------


class Notes:
    """One rank's list of what it has taken in one life of the run: a file of JSON lines."""

    def __init__(self, folder: Path, life: int, rank: int, world_size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"life-{life:03d}-rank-{rank:05d}.jsonl"
        self.about = {"life": life, "rank": rank, "ranks": world_size}
        self.file = open(path, "ab", buffering=0)  # a killed process loses no line

    def write(self, step: int, samples: Sequence[int]) -> None:
        """Note what this rank has taken in a step; before its checkpoint is saved."""
        line = {**self.about, "step": step, "samples": list(samples)}
        self.file.write((json.dumps(line) + "\n").encode())


def num_lives(folder: Path) -> int:
    """How many lives of a run have left notes in `folder`."""
    lives = {path.name[5:8] for path in folder.glob("life-*.jsonl")}
    return max(map(int, lives), default=-1) + 1


def read_notes(folder: Path) -> list[dict]:
    """The lines of all lives and ranks. One that was cut off by a kill is left out."""
    texts = [path.read_text() for path in sorted(folder.glob("life-*.jsonl"))]
    whole = [line for text in texts for line in text.splitlines(keepends=True) if line[-1] == "\n"]
    return [json.loads(line) for line in whole]


def surviving_history(lines: Iterable[Mapping]) -> dict[int, list[int]]:
    """Step -> the samples that all ranks together have taken, as the finished run holds them.

    Args:
        lines: {"life", "rank", "step", "samples"}, in any order. A step that was taken in several
            lives counts in the last one: what the earlier ones had learnt in it is lost.
    """
    last: dict[int, int] = {}
    lines = list(lines)
    for line in lines:
        last[line["step"]] = max(line["life"], last.get(line["step"], 0))
    history: dict[int, list[int]] = {step: [] for step in sorted(last)}
    for line in sorted(lines, key=lambda line: line["rank"]):
        if line["life"] == last[line["step"]]:
            history[line["step"]] += line["samples"]
    return history


def misused(history: Mapping[int, Sequence[int]], num_steps: int, steps_per_epoch: int) -> str:
    """What is wrong with a history, in words, or "": each sample is used at most once per epoch.

    A step that is missing is wrong as well, and so is one with more or fewer samples than others.
    """
    missing = [step for step in range(num_steps) if step not in history]
    if missing:
        return f"step {missing[0]} is missing, and {len(missing) - 1} more"
    if len(sizes := {len(samples) for samples in history.values()}) > 1:
        return f"steps have {sorted(sizes)} samples"
    for start in range(0, num_steps, steps_per_epoch):
        steps = range(start, min(start + steps_per_epoch, num_steps))
        counts = Counter(sample for step in steps for sample in history[step])
        if again := [sample for sample, count in counts.items() if count > 1]:
            return f"sample {again[0]} was used {counts[again[0]]} times in one epoch"
    return ""
