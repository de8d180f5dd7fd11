"""A landscape that remembers where its loss was computed, and what a walk in it left behind."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from manyhands.checks.engine import cases
from manyhands.checks.engine.values import number


class NoWay(ValueError):
    """What the loss raises where it fails."""


class Hill:
    """A loss of four small tensors, above and below 0. One is frozen, and two have gradients."""

    def __init__(self, seed: int, fails: bool = False) -> None:
        self.draw = cases.generator(seed)
        self.fails = fails
        self.parameters = [nn.Parameter(part) for part in self.direction()]
        self.parameters[1].requires_grad_(False)
        for parameter in self.parameters[2:]:
            parameter.grad = torch.ones_like(parameter)
        self.x = self.normal(7, 3)
        self.y = self.normal(7, 2)
        self.before = [parameter.detach().clone() for parameter in self.parameters]
        self.memory = [parameter.data_ptr() for parameter in self.parameters]

    def normal(self, *shape: int) -> Tensor:
        """Random numbers; float64, so that rounding does not matter."""
        return torch.randn(shape, generator=self.draw, dtype=torch.float64)

    def direction(self) -> list[Tensor]:
        """Random tensors of the parameters' shapes: a direction, or another solution."""
        return [self.normal(*shape) for shape in ((4, 3), (4,), (2, 4), (2,))]

    def loss(self) -> Tensor:
        """The height at the parameters as they are."""
        if self.fails:
            raise NoWay("this loss cannot be computed")
        w1, b1, w2, b2 = self.parameters
        return ((self.x @ w1.T + b1).tanh() @ w2.T + b2 - self.y).square().mean() - 12

    def left_behind(self) -> dict[str, bool]:
        """What holds after a walk."""
        now = self.parameters
        wants = [parameter.requires_grad for parameter in now]
        grads = [parameter.grad for parameter in now]
        ones = all(grad is not None and bool((grad == 1).all()) for grad in grads[2:])
        near = all(torch.allclose(one, old) for one, old in zip(now, self.before, strict=True))
        return {
            "the parameters are where they were": near,
            "the parameters are what they were, bit for bit": equal(now, self.before),
            "the parameters lie in the memory in which they were": self.memory
            == [parameter.data_ptr() for parameter in now],
            "the parameters want gradients as before": wants == [True, False, True, True],
            "the parameters' .grad are as before": grads[:2] == [None, None] and ones,
        }


def equal(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Are all tensors equal, bit for bit?"""
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def loss_number(value: object) -> Tensor:
    """A number as float32, which is what answers that make a tensor of losses keep of it."""
    return torch.tensor(number(value), dtype=torch.float32)
