"""Ranks that agree: on a value, or that all of them have succeeded.

Price: one exchange of small objects each.
"""

from collections.abc import Callable

import torch.distributed as dist

Group = dist.ProcessGroup | None  # None means all ranks


def first_line(problem: Exception) -> str:
    """What an error says, without the lines that torch adds."""
    return str(problem).strip().partition("\n")[0]


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


def to_first(value: object, group: Group = None) -> list:
    """Every rank's value, on the group's first rank; [] on all others."""
    if not dist.is_initialized():
        return [value]
    every = [None] * dist.get_world_size(group) if rank_of(group) == 0 else None
    dist.gather_object(value, every, group=group, group_dst=0)
    return every or []


def from_first(values: list, group: Group = None) -> object:
    """This rank's one of the values, one for each, that the group's first rank has."""
    if not dist.is_initialized():
        return values[0]
    mine = [None]
    dist.scatter_object_list(mine, values or None, group=group, group_src=0)
    return mine[0]


def together(action: Callable[[], object], group: Group = None) -> object:
    """This rank's result of an action that every rank tries.

    Raises:
        ValueError: on every rank, when it fails on one, in whatever way: nobody then waits for
            somebody who left. It is told in one line.
    """
    result, problem = None, ""
    try:
        result = action()
    except (ValueError, OSError) as found:
        problem = str(found) or type(found).__name__
    except Exception as found:  # of torch, for example, which cannot write every kind of tensor
        problem = f"{type(found).__name__}: {first_line(found)}"
    every = gather(problem, group)
    for rank, told in enumerate(every):
        if told:
            raise ValueError(f"rank {rank}: {told}" if len(every) > 1 else told)
    return result
