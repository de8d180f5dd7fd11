"""Four optimizers that give every layer a step length of its own, each by its paper.

    w <- w - rate * ratio * direction           one ratio for each layer (each parameter tensor)

               direction                        ratio
    LARS       gradient, with momentum          trust * |w| / (|g| + decay * |w|)
    LARC       the same                         the same, but rate * ratio is at most the rate
    LAMB       Adam's                           |w| / |direction|
    NovoGrad   gradient / its average norm,     1
               with momentum

Implementations disagree on small choices that move the weights. Each choice has a name here, and
its default is what the paper says. Price: two norms per layer and step; over shards one message.
Over shards LAMB also holds the directions of all weights during a step, which is once more the
size of its shards, because the norms of all of them travel in that one message. LAMB's averages
have the type of the weights, as those of torch's AdamW have: in bfloat16, 0.999 of a number is
rounded to that number, so its average of squares never falls. Train a float32 copy of such weights.
Sources: LARS https://arxiv.org/abs/1708.03888, LARC https://github.com/NVIDIA/caffe (larc_policy)
and https://github.com/NVIDIA/apex (parallel/LARC), LAMB https://arxiv.org/abs/1904.00962, NovoGrad
https://arxiv.org/abs/1905.11286.
"""

from collections.abc import Iterable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.layerwise.base import Layerwise, ZeroNorm, decay_of, where_not_zero


class LARS(Layerwise):
    """SGD with momentum in which every layer moves by about the same share of its own norm.

    Choices on which implementations differ; the first of each is Algorithm 1 of the paper, but for
    norms of 0, on which it is silent:
        lr_inside: True multiplies by the rate before the momentum buffer, False after it, as
            torch's SGD does. The two are equal while the rate is constant.
        decay_in_ratio: the ratio divides by |g| + decay |w| ("sum"), by |g + decay w| ("joint",
            as optax), or by |g| ("none").
        zero_norm: where |w| or |g| (with "joint" |g + decay w|) is 0, the ratio is 1 ("one"), or 1
            without weight decay ("no_decay", as apex), or 0 ("stay": weights at 0 stay there).
    `eps` is added to what the ratio divides by.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0005,
        trust: float = 0.001,
        eps: float = 0.0,
        *,
        lr_inside: bool = True,
        decay_in_ratio: Literal["sum", "joint", "none"] = "sum",
        zero_norm: ZeroNorm = "one",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        defaults |= {"eps": eps, "lr_inside": lr_inside, "zero_norm": zero_norm}
        super().__init__(params, defaults | {"decay_in_ratio": decay_in_ratio}, group)

    def direction(self, weight: Tensor, options: dict) -> Tensor:
        """The gradient; with "joint" the decay stands in it."""
        if options["decay_in_ratio"] == "joint":
            return weight.grad.add(weight, alpha=options["weight_decay"])
        return weight.grad

    def ratio(self, size: Tensor, length: Tensor, options: dict) -> Tensor:
        """The layer's trust ratio."""
        decay = options["weight_decay"] if options["decay_in_ratio"] == "sum" else 0.0
        ratio = options["trust"] * size / (length + decay * size + options["eps"])
        return where_not_zero(ratio, size, length, options)

    def update(
        self, weight: Tensor, direction: Tensor, size: Tensor, length: Tensor, options: dict
    ) -> Tensor:
        """v <- momentum v + rate ratio (g + decay w); w <- w - v"""
        ratio = self.ratio(size, length, options)
        decay = decay_of(size, length, options)
        scaled = weight.grad.add(weight * decay).mul(ratio)
        state = self.state[weight]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(weight)
        buffer = state["momentum"]
        inside = options["lr_inside"]
        buffer.mul_(options["momentum"]).add_(scaled * options["lr"] if inside else scaled)
        weight.sub_(buffer if inside else buffer * options["lr"])
        return ratio


class LARC(LARS):
    """LARS that never takes a longer step than the rate alone: rate * min(ratio / rate, 1).

    At a rate of 0, where a schedule may end, that factor is 1 as well.

    The rate, which multiplies the ratio in LARS, is a ceiling here, so rate and trust are chosen
    anew. LARC has no paper. NVIDIA's Caffe has it in two variants, `larc_policy: "clip"` with the
    ceiling and `"scale"` without it, and so has NVIDIA's apex, by its argument `clip`. This is the
    variant with the ceiling. Trust and eps are those of apex, which multiplies by the rate after
    the momentum; where a norm is 0 it has a ratio of 1 and no decay.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.02,
        eps: float = 1e-8,
        *,
        lr_inside: bool = False,
        decay_in_ratio: Literal["sum", "joint", "none"] = "sum",
        zero_norm: ZeroNorm = "no_decay",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        choices = {"lr_inside": lr_inside, "decay_in_ratio": decay_in_ratio}
        choices |= {"zero_norm": zero_norm, "group": group}
        super().__init__(params, lr, momentum, weight_decay, trust, eps, **choices)

    def ratio(self, size: Tensor, length: Tensor, options: dict) -> Tensor:
        """The trust ratio over the rate, at most 1; the rate multiplies it afterwards."""
        decay = options["weight_decay"] if options["decay_in_ratio"] == "sum" else 0.0
        wanted = options["trust"] * size / (length + decay * size + options["eps"])
        clipped = (wanted / options["lr"]).clamp(max=1.0)
        return where_not_zero(clipped, size, length, options)


class LAMB(Layerwise):
    """Adam in which every layer moves by the rate times its own norm.

    Choices on which implementations differ; the first of each is Algorithm 2 of the paper, but for
    norms of 0, on which it is silent:
        bias_correction: True divides both averages by 1 - beta^t, False leaves that out.
        clamp: None takes |w| as it is; a number, often 10, is an upper limit for |w| in the ratio.
        decay_in_ratio: weight decay is part of the direction whose norm counts ("joint"), or is
            added after it was scaled ("none": decoupled, as in AdamW).
        zero_norm: where a norm is 0, the ratio is 1 ("one") or 0 ("stay"), as in LARS.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.01,
        eps: float = 1e-6,
        *,
        bias_correction: bool = True,
        clamp: float | None = None,
        decay_in_ratio: Literal["joint", "none"] = "joint",
        zero_norm: Literal["one", "stay"] = "one",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps}
        defaults |= {"bias_correction": bias_correction, "clamp": clamp, "zero_norm": zero_norm}
        super().__init__(params, defaults | {"decay_in_ratio": decay_in_ratio}, group)

    def direction(self, weight: Tensor, options: dict) -> Tensor:
        """Adam's direction, from both averages."""
        beta1, beta2 = options["betas"]
        state = self.state[weight]
        if "mean" not in state:
            state["mean"] = torch.zeros_like(weight)
            state["square"] = torch.zeros_like(weight)
        mean = state["mean"]
        square = state["square"]
        step = state.setdefault("step", torch.zeros(()))
        step += 1
        mean.lerp_(weight.grad, 1 - beta1)
        square.mul_(beta2).addcmul_(weight.grad, weight.grad, value=1 - beta2)
        is_corrected = options["bias_correction"]
        of_mean = 1 - beta1 ** step.item() if is_corrected else 1.0
        of_square = 1 - beta2 ** step.item() if is_corrected else 1.0
        direction = (mean / of_mean) / ((square / of_square).sqrt() + options["eps"])
        if options["decay_in_ratio"] == "joint":
            direction.add_(weight, alpha=options["weight_decay"])
        return direction

    def update(
        self, weight: Tensor, direction: Tensor, size: Tensor, length: Tensor, options: dict
    ) -> Tensor:
        """w <- w - rate |w| / |direction| direction"""
        counted = size if options["clamp"] is None else size.clamp(max=options["clamp"])
        ratio = where_not_zero(counted / length, size, length, options)
        if options["decay_in_ratio"] == "none":
            weight.mul_(1 - options["lr"] * options["weight_decay"])
        weight.sub_(direction * ratio * options["lr"])
        return ratio


class NovoGrad(Layerwise):
    """SGD with momentum on gradients that are divided by an average of their layer's norm.

    Choices on which implementations differ; the first of each is Algorithm 1 of the paper:
        first_square: the average of squared norms begins with |g|^2 of the first gradient that is
            not 0 ("whole"), or with 0, so that its first value is (1 - beta2) |g|^2 ("average").
        averaging: False adds each scaled gradient and its decay to the momentum, True only
            1 - beta1 of both.
    `eps` counts in every step; the paper's first step has none. There is no bias correction. The
    average is a single number for each layer, and float32 at least: in bfloat16, 0.98 of it plus a
    share of 0.02 would often be rounded back to the old value.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float,
        betas: tuple[float, float] = (0.95, 0.98),
        weight_decay: float = 0.001,
        eps: float = 1e-8,
        *,
        first_square: Literal["whole", "average"] = "whole",
        averaging: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps}
        defaults |= {"first_square": first_square, "averaging": averaging}
        super().__init__(params, defaults, group)

    def direction(self, weight: Tensor, options: dict) -> Tensor:
        """The gradient."""
        return weight.grad

    def update(
        self, weight: Tensor, direction: Tensor, size: Tensor, length: Tensor, options: dict
    ) -> Tensor:
        """v <- beta2 v + (1 - beta2) |g|^2; m <- beta1 m + g / |v|^0.5 + decay w; w <- w - lr m

        Returns the ratio, by which the gradient is multiplied.
        """
        beta1, beta2 = options["betas"]
        state = self.state[weight]
        new = length.square().to(torch.promote_types(weight.dtype, torch.float32))
        old = state.get("square", torch.zeros_like(new))
        starts_whole = options["first_square"] == "whole" and old == 0
        state["square"] = new if starts_whole else beta2 * old + (1 - beta2) * new
        ratio = 1 / (state["square"].sqrt() + options["eps"])
        scaled = (direction * ratio).add(weight, alpha=options["weight_decay"])
        if "mean" not in state:
            state["mean"] = torch.zeros_like(weight)
        mean = state["mean"]
        mean.mul_(beta1).add_(scaled, alpha=1 - beta1 if options["averaging"] else 1.0)
        weight.sub_(mean * options["lr"])
        return ratio
