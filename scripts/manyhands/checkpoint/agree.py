"""Ranks that agree: on a value, or that all of them have succeeded.

Price: one exchange of small objects each.
"""

from collections.abc import Callable

import torch.distributed as dist

from manyhands.collectives.trees import Group


def rank_of(group: Group = None) -> int:
    """This rank in `group`; 0 where there is no process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def gather(value: object, group: Group = None) -> list:
    """Every rank's value, on every rank."""
    if not dist.is_initialized():
        return [value]
    every = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, value, group=group)
    return every


def together(action: Callable[[], object], group: Group = None) -> object:
    """This rank's result of an action that every rank tries.

    Raises:
        ValueError: on every rank, when it fails on one: nobody then waits for somebody who left.
    """
    result, problem = None, ""
    try:
        result = action()
    except (ValueError, OSError) as found:
        problem = str(found)
    every = gather(problem, group)
    for rank, told in enumerate(every):
        if told:
            raise ValueError(f"rank {rank}: {told}" if len(every) > 1 else told)
    return result
