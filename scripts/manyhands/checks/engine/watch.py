"""A model that writes down what an answer does with it; its facts are the same in every lesson."""

import weakref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from manyhands.checks.engine.card import Wrong


class Box:
    """One tensor that autograd keeps; it dies with what keeps it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


class Watched(nn.Module):
    """Calls `inner`, and notes how it was called and what autograd keeps of each call.

    Args:
        mode: train or eval, in which it is given.
        filled: do its parameters have gradients from before? See `fill`.
        most_calls: beyond which an answer is ended, as a call of itself has no end.

    Attributes:
        sizes: of each call, how many elements its last argument has.
        alive: of each call, how many graphs of earlier calls lived when it began.
        recorded: of each call, whether autograd recorded it.
        draws: of each call, the state of torch's random numbers when it began.
    """

    def __init__(
        self, inner: nn.Module, mode: bool = True, filled: bool = False, most_calls: int = 100
    ) -> None:
        super().__init__()
        self.inner = inner
        self.train(mode)
        self.filled = filled
        self.most_calls = most_calls
        self.modes: set[bool] = {mode}
        self.sizes: list[int] = []
        self.alive: list[int] = []
        self.recorded: list[bool] = []
        self.draws: list[Tensor] = []
        self.kept: list[weakref.WeakSet] = []

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that have a gradient."""
        return {name: p for name, p in self.inner.named_parameters() if p.requires_grad}

    def fill(self) -> None:
        """Give the parameters their gradients from before; a copy of a model has none."""
        for number, param in enumerate(self.trainable.values() if self.filled else ()):
            param.grad = torch.full_like(param, 0.7 + number)

    def forward(self, *given: Tensor) -> Tensor:
        """The inner model's output."""
        if len(self.sizes) == self.most_calls:
            seen = f"the function ran {self.most_calls} times, and was called once more"
            hint = "Call what you were given, and not what you are writing."
            raise Wrong(seen, "A call ends in the same call again, without end.", hint)
        self.modes.add(self.training)
        self.sizes.append(given[-1].numel())
        self.alive.append(self.num_alive())
        self.recorded.append(torch.is_grad_enabled())
        self.draws.append(torch.get_rng_state())
        self.kept.append(boxes := weakref.WeakSet())

        def pack(tensor: Tensor) -> Box:
            box = Box(tensor)
            boxes.add(box)
            return box

        with saved_tensors_hooks(pack, lambda box: box.tensor):
            return self.inner(*given)

    def num_alive(self) -> int:
        """Of how many calls autograd still keeps something."""
        return sum(bool(len(boxes)) for boxes in self.kept)

    def facts(self) -> dict[str, object]:
        """What is judged of its use. The engine sees itself whether weights and mode changed."""
        params = self.inner.parameters()
        return {
            "calls of the model, by the size of the last argument": sorted(self.sizes),
            "graphs of earlier calls that are alive when a forward begins": self.alive,
            "the model is called in the mode in which it was given": len(self.modes) == 1,
            **{f"the gradient of {name}": p.grad for name, p in self.trainable.items()},
            "frozen parameters have no gradient": all(
                p.requires_grad or p.grad is None for p in params
            ),
            "besides": self.num_alive(),
        }
