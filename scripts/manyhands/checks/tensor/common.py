"""What the checks of this lesson share: forms, memory that is kept, results that come late."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from manyhands.checks.engine.spec import Place
from manyhands.checks.engine.values import malformed, same, tensor
from manyhands.collectives.trees import Group

RETURNS_NONE = (
    "all_reduce writes into the tensor that it is given, and returns None. Return the tensor."
)


def as_result(value: object) -> Tensor:
    """The tensor that a forward gives."""
    if value is None:
        raise malformed(value, "a tensor", RETURNS_NONE)
    return tensor(value)


def as_module(value: object) -> nn.Module:
    """What a class of the exercise makes."""
    if not isinstance(value, nn.Module):
        raise malformed(value, "an nn.Module", "Keep the line `class ...(nn.Module)`.")
    return value


def doubled(region: object, place: Place, calls: list[bool]) -> object:
    """A region that doubles x as well, and writes down whether it was given the group."""

    def enter_or_leave(x: Tensor, group: Group) -> Tensor:
        calls.append(group is place.group)
        return 2 * region(x, group)

    return enter_or_leave


def lets_go(whole: weakref.ref, place: Place) -> bool:
    """Is the whole matrix gone? A group of one rank may keep it."""
    if whole() is not None:
        gc.collect(1)  # what is young; all of it would take long
    return whole() is None or place.n == 1


def own_memory(layer: nn.Module, part: object) -> bool:
    """Does a layer keep no tensor that takes more memory than the elements of its part need?"""
    if not isinstance(part, Tensor):
        return True
    kept = [one for one in tree_leaves([part, vars(layer)]) if isinstance(one, Tensor)]
    return all(one.untyped_storage().nbytes() <= part.nbytes for one in kept)


CALLS = (" in the first call, of all ranks", " in the second call")


def two_calls(place: Place) -> dict[str, dict]:
    """Calls that are made one after the other, and their options: only the second has the group."""
    return dict(zip(CALLS, ({}, place.options), strict=True))


def costs_no_more(*costs: str, tolerance: float | None = None) -> Callable:
    """Are two dicts the same, but that these parts may also be less than wanted?"""

    def compare(found: dict, wanted: dict, case: object) -> bool:
        others = [{n: v for n, v in data.items() if n not in costs} for data in (found, wanted)]
        is_cheap = all(found.get(name, 0) <= wanted[name] for name in costs if name in wanted)
        return is_cheap and same(*others, tolerance)

    return compare


# ---- collectives that fill their tensors only when somebody waits for them ------------------

FILLS = ("all_reduce", "all_gather", "all_gather_single", "all_gather_into_tensor")


class LateWork:
    """A work whose result comes when it is asked for."""

    def __init__(self, work: dist.Work, scratch: list[Tensor], given: list[Tensor]) -> None:
        self.work = work
        self.scratch = scratch
        self.given = given

    def __getattr__(self, name: str) -> object:
        """Everything that a work has; whatever is asked of it, its result is there after that."""
        self.work.wait()
        for mine, filled in zip(self.given, self.scratch, strict=True):
            mine.detach().copy_(filled)
        return getattr(self.work, name)


def _late(call: Callable) -> Callable:
    def start(output: Tensor | list[Tensor], *args: object, **named: object) -> object:
        if not named.get("async_op"):
            return call(output, *args, **named)
        given = [output] if isinstance(output, Tensor) else list(output)
        scratch = [tensor.detach().clone() for tensor in given]
        work = call(scratch[0] if isinstance(output, Tensor) else scratch, *args, **named)
        if work is None:
            return None
        for mine in given:
            mine.detach().fill_(float("nan"))
        return LateWork(work, scratch, given)

    return start


@contextmanager
def late_results() -> Iterator[None]:
    """What an asynchronous call fills holds nan until somebody waits for it.

    A tensor that is read too early is then wrong each time, and not only on a busy machine.
    """
    real = {name: getattr(dist, name) for name in FILLS if hasattr(dist, name)}
    for name, call in real.items():
        setattr(dist, name, _late(call))
    try:
        yield
    finally:
        for name, call in real.items():
            setattr(dist, name, call)
