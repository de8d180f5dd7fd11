"""The checkpoints of a run: the newest intact one, the last few, and the best.

    step-00000100/    complete: it has its index
    step-00000200/    complete, but rank-00001.pt is damaged  --> step-00000200.broken/
    step-00000300/    without an index: the run was killed while it saved; cleared away

Price: to find the newest intact one reads it once, each rank its share of the files; the disk holds
the k newest, the best, and one that is being written.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from manyhands.saving.agree import Group, gather, rank_of, together
from manyhands.saving.index import INDEX, damage
from manyhands.saving.store import Store

BROKEN = ".broken"


def name_of(step: int) -> str:
    """The folder of the checkpoint of a step."""
    return f"step-{step:08d}"


def step_of(name: str) -> int:
    """The step of a checkpoint's folder."""
    return int(name.removeprefix("step-"))


def complete(folder: str | Path) -> list[str]:
    """Names of the complete checkpoints in `folder`, oldest first."""
    store = Store(folder)
    return [name for name in _named(store) if store.has(f"{name}/{INDEX}")]


def incomplete(folder: str | Path) -> list[str]:
    """Names of the checkpoints in `folder` that have no index: the run ended while it saved them,
    or it is saving them now, or the index got lost."""
    store = Store(folder)
    return [name for name in _named(store) if not store.has(f"{name}/{INDEX}")]


def _named(store: Store) -> list[str]:
    return [name for name in store.folders() if name[:5] == "step-" and name[5:].isdigit()]


def newest_intact(folder: str | Path, group: Group = None) -> tuple[str | None, list[str]]:
    """The newest checkpoint of which every file is as it was written; None where there is none.

    Every rank of `group` calls it. Newer ones that are damaged stay where they are.

    Returns:
        Its name, and for each newer complete one what is wrong with it, the newest first.

    Raises:
        ValueError: on every rank, when an object store is out of reach; nothing is damaged then.
    """
    store, problems, rank = Store(folder), [], rank_of(group)
    found = gather(together(lambda: [] if rank else complete(folder), group), group)
    for name in reversed(found[0]):
        mine = together(partial(damage, store.below(name), rank, len(found)), group)
        every = gather(mine, group)
        told = [problem for problem in every if problem]
        if not told:
            return name, problems
        problems.append(told[0])
    return None, problems


def to_remove(names: list[str], losses: Mapping[int, float], num_kept: int) -> list[str]:
    """Which checkpoints can go: all but the `num_kept` newest and the best.

    Args:
        names: of complete checkpoints, oldest first.
        losses: validation loss by step; not every checkpoint has one, and of steps whose checkpoint
            is gone there may be one, too. A loss that is not a number is never the best.
    """
    known = [name for name in names if losses.get(step_of(name), float("nan")) < float("inf")]
    best = min(known, key=lambda name: losses[step_of(name)], default=None)
    newest = names[-num_kept:] if num_kept > 0 else []
    return [name for name in names if name not in newest and name != best]


def remove(folder: str | Path, name: str) -> None:
    """Remove a checkpoint, its index first: half of one must not count as one."""
    store = Store(folder)
    store.remove(f"{name}/{INDEX}")
    store.remove(name)


def set_aside(folder: str | Path, name: str) -> str:
    """Give a damaged checkpoint another name, so that its step can be saved again; returns it."""
    store, kept, number = Store(folder), name + BROKEN, 2
    while kept in store.folders():
        kept, number = f"{name}{BROKEN}{number}", number + 1
    store.move(name, kept)
    return kept


def clear(folder: str | Path, group: Group = None) -> list[str]:
    """Clear away what a killed run has left incomplete, before the run goes on; returns the names.

    Raises:
        ValueError: on every rank, when nothing can be removed or written in `folder`.
    """

    def remove_incomplete() -> list[str]:
        store, names = Store(folder), incomplete(folder)
        for name in names:
            store.remove(name)
        store.try_out()
        return names

    return gather(together(lambda: [] if rank_of(group) else remove_incomplete(), group), group)[0]
