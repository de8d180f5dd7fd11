"""The bytes of all tensors that live on this rank: what they are, how many, and the most ever.

    with Live(parts_of(model, optimizer)) as live:
        loss = model(inputs, targets)       live.now()    {"weights": 64, ..., "other": 1,210}
        loss.backward()
    live.peak                               the same, at the moment when the sum was highest

It stands in torch's dispatcher and sees every tensor that an operator returns, until its memory is
given back. It counts tensors, not what the allocator or the process holds on to, so the same
program gives the same bytes on every machine. A rank that computes on a GPU names this device, and
then tensors in the memory of the CPU, such as offloaded shards, do not count. It does not see what
an operator, a collective or a compiled kernel needs inside. Tensors from before the block count
once an operator returns them, or if `parts` names them.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from manyhands.ranks.runtime import BadInput

Parts = Mapping[str, Iterable[Tensor]]
OTHER = "other"
NUM_FIRST = 2  # steps; the optimizer has its whole state from the second on


class OverLimit(BadInput):
    """More bytes of tensors than this rank may have."""


class Live(TorchDispatchMode):
    """Count the bytes of tensors while the block runs.

    Args:
        parts: called again and again; says which tensors are weights, gradients and so on. Memory
            that several tensors share counts for the first part that names it; what no part names
            is "other": activations and temporary values.
        limit: raise OverLimit as soon as there are more bytes than this.
        keep: keep in `history` what `now` would say after each operator.
        device: count only tensors on devices of its kind, "cuda" or "cpu"; all where not given.
    """

    def __init__(
        self,
        parts: Callable[[], Parts],
        limit: int | None = None,
        keep: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.kind = None if device is None else torch.device(device).type
        self.parts = parts
        self.limit = limit
        self.keep = keep
        self.num_steps = 0  # that have asked `at_first`
        self.history: list[dict[str, int]] = []
        self.storages: dict[int, weakref.ref] = {}
        self.total = 0  # bytes, at the highest
        self.peak: dict[str, int] = {}
        self._count()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # torch's own signature
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._see(tensor)
        self._count()
        return result

    def at_first(self) -> AbstractContextManager:
        """What to run a training step in: this in the first two steps, later nothing.

        To count takes time, and later steps are like the second. With a limit, all are counted.
        """
        self.num_steps += 1
        if self.limit is not None or self.num_steps <= NUM_FIRST:
            return self
        return nullcontext()

    def now(self) -> dict[str, int]:
        """Bytes that live now, by part."""
        found: dict[str, int] = {}
        seen: set[int] = set()
        for name, tensors in self.parts().items():
            watched = filter(self._is_watched, map(_storage, tensors))
            storages = {storage._cdata: storage.nbytes() for storage in watched}
            found[name] = sum(storages[key] for key in storages.keys() - seen)
            seen |= storages.keys()
        alive = {key: ref() for key, ref in list(self.storages.items()) if key not in seen}
        found[OTHER] = sum(storage.nbytes() for storage in alive.values() if storage is not None)
        return found

    def in_words(self) -> str:
        """One line: the most bytes at a time, and what they were."""
        parts = ", ".join(f"{name} {nbytes:,}" for name, nbytes in self.peak.items())
        return f"memory: at most {self.total:,} bytes of tensors at a time ({parts})"

    def _see(self, tensor: Tensor) -> None:
        storage = _storage(tensor)
        key = storage._cdata
        if key not in self.storages and self._is_watched(
            storage
        ):  # the key may come again when this storage is gone
            self.storages[key] = weakref.ref(storage, lambda _: self.storages.pop(key, None))

    def _is_watched(self, storage: torch.UntypedStorage) -> bool:
        # A rank has one GPU at most, so the kind of the device says which one.
        return self.kind is None or storage.device.type == self.kind

    def _count(self) -> None:
        for tensors in self.parts().values():
            for tensor in tensors:
                self._see(tensor)
        alive = [ref() for ref in list(self.storages.values())]
        total = sum(storage.nbytes() for storage in alive if storage is not None)
        if self.keep:
            self.history.append(self.now())
        if total <= self.total:
            return
        self.total = total
        self.peak = self.now()
        if self.limit is not None and total > self.limit:
            parts = ", ".join(f"{name} {nbytes:,}" for name, nbytes in self.peak.items())
            raise OverLimit(
                f"{total:,} bytes of tensors, {total - self.limit:,} more than the limit of "
                f"{self.limit:,} ({parts}): take more ranks, a smaller model or a smaller batch"
            )


def parts_of(model: nn.Module, optimizer: object = None) -> Callable[[], Parts]:
    """Which tensors are the weights, gradients and optimizer state of a training, for `Live`.

    `model` may be sharded: its shards count, and whole weights while they are there.
    """
    inner = getattr(model, "module", model)
    first = [_local(param) for param in [*model.parameters(), *inner.parameters()]]

    def parts() -> Parts:
        groups = optimizer.param_groups if optimizer is not None else ()
        shards = [param for group in groups for param in group["params"]]
        params = [*model.parameters(), *inner.parameters(), *shards]
        states = optimizer.state.values() if optimizer is not None else ()
        return {
            "weights": [*first, *params, *inner.buffers()],
            "gradients": [param.grad for param in params if param.grad is not None],
            "optimizer": [value for state in states for value in _tensors(state.values())],
        }

    return parts


def _local(tensor: Tensor) -> Tensor:
    """This rank's own part of a DTensor; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return _local(tensor).untyped_storage()


def _tensors(result: object) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, Iterable) and not isinstance(result, str):
        for part in result:
            yield from _tensors(part)
