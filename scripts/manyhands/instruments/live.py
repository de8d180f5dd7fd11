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

from manyhands.ranks.failures import BadInput

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
            self._see(_storage(tensor))
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
            found[name] = 0
            for tensor in tensors:
                storage = _storage(tensor)
                if storage._cdata not in seen and self._see(storage):
                    seen.add(storage._cdata)
                    found[name] += storage.nbytes()
        others = [ref() for key, ref in list(self.storages.items()) if key not in seen]
        found[OTHER] = sum(storage.nbytes() for storage in others if storage is not None)
        return found

    def in_words(self) -> str:
        """One line: the most bytes at a time, and what they were."""
        parts = ", ".join(f"{name} {nbytes:,}" for name, nbytes in self.peak.items())
        return f"memory: at most {self.total:,} bytes of tensors at a time ({parts})"

    def _see(self, storage: torch.UntypedStorage) -> bool:
        """Note a storage until it is gone; False if it lies on a device that does not count."""
        # A rank has one GPU at most, so the kind of the device says which one.
        if self.kind is not None and storage.device.type != self.kind:
            return False
        key = storage._cdata  # the key may come again when this storage is gone
        if key not in self.storages:
            self.storages[key] = weakref.ref(storage, lambda _: self.storages.pop(key, None))
        return True

    def _count(self) -> None:
        found = self.now()
        total = sum(found.values())
        if self.keep:
            self.history.append(found)
        if total <= self.total:
            return
        self.total = total
        self.peak = found
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
    # Parameters may be exchanged for others at any time, modules not. Asked after each operator,
    # model.parameters(), which walks all modules anew, would take most of the time.
    modules = list(dict.fromkeys([*model.modules(), *inner.modules()]))

    def parts() -> Parts:
        groups = optimizer.param_groups if optimizer is not None else ()
        shards = [param for group in groups for param in group["params"]]
        own = [param for module in modules for param in module._parameters.values()]
        params = {id(param): param for param in [*own, *shards] if param is not None}.values()
        buffers = [buffer for module in modules for buffer in module._buffers.values()]
        states = optimizer.state.values() if optimizer is not None else ()
        return {
            "weights": [*first, *params, *(one for one in buffers if one is not None)],
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
