"""The stages of a pipeline: a model as a list of layers, cut where the slowest part is fastest.

    layers   [embedding] [block] [block] [block] [block] [block] [block] [norm, head]
    cost         0.3        1       1       1       1       1       1        2.7
    stages   |------- 0: 4.3 ---------------------| |------- 1: 4.7 ----------------|

A pipeline runs at the pace of its slowest stage, so stages are cut by measured cost, not by the
number of layers: head and embedding are layers, too, and with a large vocabulary the head takes
long.

Price: measuring runs each layer a few times; cutting L layers into p stages is instant.
Source: Harlap et al. 2018, "PipeDream", https://arxiv.org/abs/1806.03377 (stages balanced by a
profile).
"""

import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx


class Embed(nn.Module):
    """The Transformer's beginning: tokens (B, T) to activations (B, T, D)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.tokens = model.tokens
        self.positions = model.positions
        self.dropout = model.dropout

    def forward(self, inputs: Tensor) -> Tensor:
        return self.dropout(self.tokens(inputs) + self.positions.weight[: inputs.shape[1]])


class Head(nn.Module):
    """The Transformer's end: activations (B, T, D) to the scores of each next token (B, T, V)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.norm = model.norm
        self.head = model.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def layers_of(model: nn.Module) -> list[nn.Module]:
    """A Transformer as layers that run one after the other; they share its parameters."""
    return [Embed(model), *model.blocks, Head(model)]


def finish(device: torch.device) -> None:
    """Wait for a GPU, which computes while the program goes on."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(layers: Sequence[nn.Module], inputs: Tensor, repeats: int = 3) -> list[float]:
    """Seconds that forward and backward of each layer take: the median over `repeats`.

    One more round comes before them and does not count: in it memory is new and code is loaded.
    """
    times: list[list[float]] = [[] for _ in layers]
    for _ in range(1 + repeats):
        out = inputs
        for layer, mine in zip(layers, times, strict=True):
            x = out.detach().requires_grad_(out.is_floating_point())
            finish(x.device)
            start_s = time.perf_counter()
            out = layer(x)
            out.backward(torch.ones_like(out))
            finish(x.device)
            mine.append(time.perf_counter() - start_s)
            layer.zero_grad()
    return [statistics.median(mine[1:]) for mine in times]


def partition(costs: Sequence[float], num_stages: int) -> list[int]:
    """Cut layers into stages of neighbours so that the slowest stage takes as little as possible.

    Args:
        costs: time of each layer, in order; at least one for each stage.

    Returns:
        The stages' bounds, num_stages + 1 numbers from 0 to len(costs): stage s has the layers
        bounds[s] to bounds[s + 1] - 1, at least one.

    Raises:
        ValueError: fewer layers than stages.
    """
    if len(costs) < num_stages:
        raise ValueError(f"{len(costs)} layers cannot make {num_stages} stages: take fewer stages")
    # best[k]: slowest stage and bounds for the first k layers, here in one stage
    best = {k: (sum(costs[:k]), [0, k]) for k in range(1, len(costs) + 1)}
    for stage in range(1, num_stages):
        best = {
            k: min(
                (max(slowest, sum(costs[cut:k])), [*bounds, k])
                for cut, (slowest, bounds) in best.items()
                if cut < k
            )
            for k in range(stage + 1, len(costs) + 1)
        }
    return best[len(costs)][1]


def cut(layers: Sequence[nn.Module], bounds: Sequence[int]) -> list[nn.Sequential]:
    """The stages between `bounds`, each as one module."""
    pairs = zip(bounds, bounds[1:], strict=False)
    return [nn.Sequential(*layers[start:stop]) for start, stop in pairs]


class Sleep(torch.autograd.Function):
    """Wait in forward and in backward, and pass on what comes."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, weight: Tensor, forward_s: float, backward_s: float
    ) -> Tensor:
        ctx.backward_s = backward_s
        ctx.shape = weight.shape
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        time.sleep(ctx.backward_s)
        return grad, grad.new_zeros(ctx.shape), None, None


class Waiting(nn.Module):
    """A stage that computes nothing and only waits: many ranks can share few cores and not slow
    each other down, so the time line shows the schedule itself.

    Its weight has `size` numbers: without one it would have no backward, and no gradient to send.
    """

    def __init__(self, forward_s: float, backward_s: float, size: int = 1) -> None:
        super().__init__()
        self.seconds = forward_s, backward_s
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x, self.weight, *self.seconds)
