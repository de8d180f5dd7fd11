"""Sequence parallelism: between the cut layers, each rank has its part of the positions only.

              norm | attention |  dropout, norm  |   MLP   | dropout
    x (B, T/N, D) --> all-gather --> (B, T, D) --> reduce-scatter --> (B, T/N, D)

Tensor parallelism alone computes norms and dropouts N times over and keeps N copies of what they
need. Here an all-reduce is taken apart into its halves: the reduce-scatter leaves each rank its
positions, and the all-gather comes only when the next cut layer needs all of them.

Price: as many bytes on the wire as the all-reduces, in twice as many calls; the activations between
the layers are 1/N. (gloo makes a reduce-scatter from a whole all-reduce, so with it half as many
bytes again.) Weights that every rank uses on its own positions, such as norms, get only a part of
their gradient: they have to be summed, once a step.
Source: Korthikanti et al. 2022, "Reducing activation recomputation in large Transformer models",
https://arxiv.org/abs/2205.05198, section 4.2.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable

from manyhands.collectives.trees import Group
from manyhands.data_parallel.replicas import pack, unpack
from manyhands.fsdp.flat import all_gather, reduce_scatter
from manyhands.memory.savings import rng_states, set_rng_states
from manyhands.tensor.model import TensorParallel


def gather_positions(x: Tensor, group: Group = None) -> Tensor:
    """All ranks' positions, in their order: (B, T/N, D) to (B, T, D)."""
    n = dist.get_world_size(group)
    whole = x.new_empty((n * len(x), *x.shape[1:]))
    all_gather(whole, x.contiguous(), group).wait()
    return torch.cat(whole.chunk(n), dim=1)


def sum_positions(x: Tensor, group: Group = None) -> Tensor:
    """The sum of all ranks' x, of which each rank gets its positions: (B, T, D) to (B, T/N, D).

    Raises:
        ValueError: T is no multiple of the number of ranks.
    """
    n, num = dist.get_world_size(group), x.shape[1]
    if num % n:
        raise ValueError(f"{num} positions cannot be cut evenly over {n} ranks")
    whole = torch.cat(x.chunk(n, dim=1))
    part = whole.new_empty((len(x), num // n, *x.shape[2:]))
    reduce_scatter(part, whole, group)
    return part


class GatherSequence(Function):
    """Into the cut layers: every rank gets all positions."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: Group = None) -> Tensor:
        """Return all ranks' positions: (B, T/N, D) to (B, T, D)."""
        ctx.group = group
        return gather_positions(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of this rank's positions, (B, T/N, D), and None for the group."""
        return sum_positions(grad, ctx.group), None


class ScatterSequence(Function):
    """Out of the cut layers: the parts are summed, and each rank keeps its positions."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: Group = None) -> Tensor:
        """Return this rank's positions of the sum of all ranks' x: (B, T, D) to (B, T/N, D)."""
        ctx.group = group
        return sum_positions(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of this rank's x, (B, T, D), and None for the group."""
        return gather_positions(grad, ctx.group), None


def sum_gradients(params: Iterable[nn.Parameter], group: Group = None) -> None:
    """Replace the gradients by their sums over the ranks, in place, with one all-reduce.

    For parameters of which every rank has a copy that saw only its own positions. Those without a
    gradient (frozen ones) are skipped; if none has one, nothing is sent. `params` may be an
    iterator, such as model.parameters(), which can be read once.
    """
    gradients = [param.grad for param in params if param.grad is not None]
    if gradients:
        vector = pack(gradients)
        dist.all_reduce(vector, group=group)
        unpack(vector, gradients)


class OwnRandom:
    """Random numbers of this rank's own, beside those that all ranks draw in step.

    Of what every rank has a copy, all must drop the same elements; of parts, each rank its own.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu", group: Group = None) -> None:
        """Seed this rank's own numbers by `seed` and its rank in the group.

        They differ from rank to rank, and on every rank from those that torch.manual_seed(seed)
        gives, with which the common ones often begin. The common ones stay as they are. The same
        seed gives the same numbers again. rng_states and set_rng_states take a torch.device, not a
        str.
        """
        self.device = torch.device(device)
        common = rng_states(self.device)
        torch.manual_seed(seed + 1 + dist.get_rank(group))
        self.states = rng_states(self.device)
        set_rng_states(common, self.device)

    @contextmanager
    def use(self) -> Iterator[None]:
        """Draw from this rank's own numbers in the block, and go on with the common ones after it.

        The next block goes on where this one ended. The common ones go on after an error, too.
        """
        common = rng_states(self.device)
        set_rng_states(self.states, self.device)
        try:
            yield
        finally:
            self.states = rng_states(self.device)
            set_rng_states(common, self.device)


class TensorSequenceParallel(TensorParallel):
    """A TensorParallel that keeps only this rank's positions between the cut layers.

    T has to be a multiple of the number of ranks.
    """

    def __init__(self, model: nn.Module, seed: int = 0, group: Group = None) -> None:
        super().__init__(model, GatherSequence.apply, ScatterSequence.apply, group)
        self.random = OwnRandom(seed, self.tokens.weight.device, group)

    def through_blocks(self, inputs: Tensor) -> Tensor:
        """Return what the last block gives for this rank's positions, a tensor (B, T/N, D).

        self.tokens(inputs) has these positions only, so the same part of the position embeddings is
        added. What is drawn, up to the last block, comes from self.random.
        """
        n, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        places = self.positions.weight[: inputs.shape[1]].chunk(n)[rank]  # (T/N, D)
        with self.random.use():
            x = self.dropout(self.tokens(inputs) + places)
            for block in self.blocks:
                x = block(x)
        return x

    def finish_gradients(self) -> None:
        """Call after backward: sum the gradients of norms and positions over the ranks.

        Each rank saw its own positions only. (A Transformer's RowLinears have no bias; it would
        belong here, too.)
        """
        norms = [module for module in self.modules() if isinstance(module, nn.LayerNorm)]
        whole = [self.positions.weight] + [p for norm in norms for p in norm.parameters()]
        sum_gradients(whole, self.group)
