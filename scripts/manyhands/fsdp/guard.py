"""Parameters whose memory comes and goes: to use one while it is away is an error, not a crash.

Many operations of PyTorch read a tensor whose storage was resized to 0 bytes as if its numbers were
there, and the process ends by a segmentation fault. A guarded parameter looks at its storage first.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

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


class Guarded(nn.Parameter):
    """A parameter that can be used while its storage has memory, and only then."""

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        with torch._C.DisableTorchFunctionSubclass():  # as PyTorch's notes on subclasses do it
            given = [*args, *(kwargs or {}).values()]
            if not is_harmless(function) and any(is_away(param) for param in guarded(given)):
                raise RuntimeError(
                    "a sharded weight was used while it was freed: between forward and backward a "
                    "rank holds only its shard; full_state(model) returns the whole weights"
                )
            return function(*args, **(kwargs or {}))


def guard(params: Iterable[nn.Parameter]) -> None:
    """Make parameters guarded in place; they stay the same objects, with their hooks."""
    for param in params:
        if type(param) is nn.Parameter:
            param.__class__ = Guarded


def guarded(values: Iterable[object]) -> Iterator[Guarded]:
    """The guarded parameters among the arguments of a call, and in its lists."""
    for value in values:
        if isinstance(value, Guarded):
            yield value
        elif isinstance(value, list | tuple):
            yield from guarded(value)


def is_away(param: Guarded) -> bool:
    """Is the memory given back?"""
    return param.numel() > 0 and param.untyped_storage().nbytes() == 0


def is_harmless(function: Callable) -> bool:
    """Does the call leave the numbers alone? Attributes do, but for views of the numbers."""
    name = getattr(function, "__name__", "")
    if name == "__set__":
        return True
    if name == "__get__":
        return function.__self__.__name__ not in VIEWS
    return function in HARMLESS
