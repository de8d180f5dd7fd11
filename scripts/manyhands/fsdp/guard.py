"""Parameters whose memory comes and goes: to use one while it is away is an error, not a crash.

Many operations of PyTorch read a tensor whose storage was resized to 0 bytes as if its numbers were
there, and the process ends by a segmentation fault. While a gather is still on its way, the memory
is there and holds anything. So a guarded parameter first asks whether its numbers have arrived.

PyTorch tells a parameter of most calls, but not of all. What it does not tell is not guarded:

    views and detached copies    that were made while the weight was whole, and are read later
    torch.tensor(weight)         also torch.Tensor(weight) and other.new_tensor(weight)
    torch.vmap, torch.func       such as torch.func.grad(f)(weight)
    torch.jit.script             a compiled function that is given the weight
    Tensor._make_subclass        and other private ways to make a tensor of another class
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from manyhands.fsdp.flat import ShardedFlat

# What asks for no number of a tensor.
HARMLESS = {
    Tensor.size,
    Tensor.__len__,
    Tensor.dim,
    Tensor.numel,
    Tensor.nelement,
    Tensor.element_size,
    Tensor.stride,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.requires_grad_,
    Tensor.register_hook,
    Tensor.register_post_accumulate_grad_hook,
    Tensor.untyped_storage,
    torch.zeros_like,
    torch.ones_like,
    torch.empty_like,
}
VIEWS = {"data", "T", "H", "mT", "mH", "real", "imag"}  # attributes that lead to the numbers


AWAY = (
    "a sharded weight was used while it was freed: between forward and backward a rank holds only "
    "its shard; full_state(model) returns the whole weights"
)
COMING = (
    "a sharded weight was used while its gather is still on its way: it can be read in the forward "
    "of its own unit; full_state(model) returns the whole weights"
)


class Guarded(nn.Parameter):
    """A parameter that can be used while its numbers are in its memory, and only then.

    `flat` is the ShardedFlat that it is a view of.
    """

    flat: "ShardedFlat"

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        with torch._C.DisableTorchFunctionSubclass():  # as PyTorch's notes on subclasses do it
            given = [*args, *(kwargs or {}).values()]
            if not is_harmless(function):
                for param in guarded(given):
                    check(param)
            return function(*args, **(kwargs or {}))

    def as_subclass(self, cls: type[Tensor]) -> Tensor:
        """PyTorch tells nobody of this call, so it is checked here."""
        check(self)
        return super().as_subclass(cls)


def guard(params: Iterable[nn.Parameter], flat: "ShardedFlat") -> None:
    """Make parameters guarded in place; they stay the same objects, with their hooks."""
    for param in params:
        if type(param) is nn.Parameter:
            param.__class__ = Guarded
            param.flat = flat


def check(param: Guarded) -> None:
    """Raise RuntimeError where the numbers of a parameter are not in its memory."""
    with torch._C.DisableTorchFunctionSubclass():
        if param.numel() == 0:
            return
        if param.untyped_storage().nbytes() == 0:
            raise RuntimeError(AWAY)
        coming = param.flat.coming
        if coming is not None and not coming.is_completed():
            raise RuntimeError(COMING)


def guarded(values: Iterable[object]) -> Iterator[Guarded]:
    """The guarded parameters among the arguments of a call, and in its lists."""
    for value in values:
        if isinstance(value, Guarded):
            yield value
        elif isinstance(value, list | tuple):
            yield from guarded(value)


def is_harmless(function: Callable) -> bool:
    """Does the call leave the numbers alone? Attributes do, but for views of the numbers."""
    name = getattr(function, "__name__", "")
    if name == "__set__":
        return True
    if name == "__get__":
        return function.__self__.__name__ not in VIEWS
    return function in HARMLESS
