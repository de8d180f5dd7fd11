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
from torch.distributed.tensor import DTensor

from manyhands.layerwise.norms import added_up, whole_norms
from manyhands.layerwise.options import refuse_flats, refuse_options

ZeroNorm = Literal["one", "no_decay", "stay"]


class Layerwise(torch.optim.Optimizer):
    """What the four have in common: the step over all layers, and norms that count over shards.

    A subclass gives `direction`, whose norm its ratio needs, and `update`, which changes a weight.
    Parameters may be sharded by `fully_shard` (DTensors), or by hand over `group`: then each rank
    hands over its parts, and every rank has a gradient for the same parameters. Each parameter is
    one layer, or a part of one: the shards of lesson 10's FSDP are parts of several.
    """

    def __init__(
        self, params: Iterable, defaults: dict, group: dist.ProcessGroup | None = None
    ) -> None:
        self.shard_group = group
        self.ratios: list[Tensor] = []  # of the last step, one for each parameter with a gradient
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict) -> None:
        """Add parameters with options of their own; the constructor calls it for each group.

        Raises:
            ValueError: an option that cannot be, or a parameter that is a part of several layers.
        """
        refuse_options(type(self), self.defaults | param_group)
        super().add_param_group(param_group)
        refuse_flats(self.param_groups[-1]["params"])

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
            for weight in weights:
                weight.grad = added_up(weight.grad)
            for some in self._in_one_message(weights):
                directions = [self.direction(weight, options) for weight in some]
                norms = whole_norms([*some, *directions], self.shard_group)
                pairs = zip(norms[: len(some)], norms[len(some) :], strict=True)
                for weight, direction, (size, length) in zip(some, directions, pairs, strict=True):
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

    def _in_one_message(self, weights: list[Tensor]) -> list[list[Tensor]]:
        """All weights together where norms have to travel, and else one by one.

        One by one no direction outlives its update; LAMB makes one as large as the weight.
        """
        if self.shard_group is None and not any(isinstance(one, DTensor) for one in weights):
            return [[weight] for weight in weights]
        return [weights]

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
