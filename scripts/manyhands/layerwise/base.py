"""What layer-wise optimizers have in common: the step over all layers, and norms over shards.

    directions of all weights --> norms of weights and directions --> update each weight
    (momentum, Adam, ...)         (one message where sharded)         (its own ratio)

Source: https://docs.pytorch.org/docs/stable/optim.html (what an optimizer has to offer).
"""

from collections.abc import Callable, Iterable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.layerwise.norms import whole_norms

ZeroNorm = Literal["one", "no_decay", "stay"]


class Layerwise(torch.optim.Optimizer):
    """What the four have in common: the step over all layers, and norms that count over shards.

    A subclass gives `direction`, whose norm its ratio needs, and `update`, which changes a weight.
    Parameters may be sharded by `fully_shard` (DTensors), or by hand over `group`: then each rank
    hands over its parts, and every rank has a gradient for the same parameters.
    """

    def __init__(
        self, params: Iterable, defaults: dict, group: dist.ProcessGroup | None = None
    ) -> None:
        for name in ("lr", "weight_decay", "eps"):
            if defaults[name] < 0:
                raise ValueError(f"{name} is {defaults[name]}: it must not be negative")
        self.shard_group = group
        self.ratios: list[Tensor] = []  # of the last step, one for each parameter with a gradient
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters; `closure`, if given, computes the loss and its gradients first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.ratios = []
        self._refuse_others()
        for options in self.param_groups:
            weights = [weight for weight in options["params"] if weight.grad is not None]
            directions = [self.direction(weight, options) for weight in weights]
            norms = whole_norms([*weights, *directions], self.shard_group) if weights else []
            pairs = zip(norms[: len(weights)], norms[len(weights) :], strict=True)
            for weight, direction, (size, length) in zip(weights, directions, pairs, strict=True):
                self.ratios.append(self.update(weight, direction, size, length, options))
        return loss

    def direction(self, weight: Tensor, options: dict) -> Tensor:
        """The tensor whose norm the ratio needs; shaped as the weight."""
        raise NotImplementedError

    def update(
        self, weight: Tensor, direction: Tensor, size: Tensor, length: Tensor, options: dict
    ) -> Tensor:
        """Change one weight in place; `size` and `length` are the norms of it and its direction.

        The gradient is left as it is.

        Returns: the ratio that was used, for those who want to look at it.
        """
        raise NotImplementedError

    def _refuse_others(self) -> None:
        """Before any weight is changed."""
        weights = [weight for options in self.param_groups for weight in options["params"]]
        for gradient in (weight.grad for weight in weights if weight.grad is not None):
            if gradient.is_sparse or gradient.is_complex():
                kind = "sparse" if gradient.is_sparse else "complex"
                name = type(self).__name__
                raise ValueError(f"{name} got a {kind} gradient; it takes dense, real ones")


def where_not_zero(ratio: Tensor, size: Tensor, length: Tensor, options: dict) -> Tensor:
    """The ratio, or where a norm is 0 what the option `zero_norm` says."""
    otherwise = 0.0 if options["zero_norm"] == "stay" else 1.0
    return torch.where((size > 0) & (length > 0), ratio, otherwise)


def decay_of(size: Tensor, length: Tensor, options: dict) -> Tensor | float:
    """The weight decay of this layer: none where a norm is 0, if the option says so."""
    if options["zero_norm"] != "no_decay":
        return options["weight_decay"]
    both = ((size > 0) & (length > 0)).to(size.dtype)  # torch.where of two numbers is float32
    return options["weight_decay"] * both
