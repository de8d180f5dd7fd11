"""ZeRO stages 1 and 2: every rank holds all weights, but only its share of what comes with them.

    stage 1   backward: whole gradients -> step: reduce-scatter -> AdamW on the shard -> all-gather
    stage 2   backward: each Flat's gradients are reduce-scattered as soon as they are there

Price for P parameters in fp32 with AdamW: 4P + 4P + 8P/n bytes a rank in stage 1; 4P + 4P/n + 8P/n
in stage 2, and the gradients of one Flat. On the wire as much as an all-reduce: (n-1)/n x 4P bytes
for the reduce-scatters, and as many for the all-gathers. PyTorch has ZeroRedundancyOptimizer for
the optimizer's share of stage 1.
Source: Rajbhandari et al. 2020, "ZeRO", https://arxiv.org/abs/1910.02054, section 5.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from manyhands.fsdp.flat import Flat
from manyhands.fsdp.shards import mark_shard


class ShardedOptimizer:
    """ZeRO stage 1: an optimizer that keeps the state of this rank's shards only.

    Args:
        flats: of all the model's parameters; those that are frozen now are never stepped.
        make_optimizer: gets the shards; its optimizer works number by number, as AdamW does,
            because a shard does not know which rows belong to one matrix. A parameter without a
            gradient counts as zeros beside others of its Flat, so AdamW still decays it. To decay
            matrices only, give them Flats of their own: p.dim() >= 2 is true of no shard.

    With gradients that are scaled for float16, reduce() each of `flats` before the scaler's step.
    """

    def __init__(
        self, flats: Sequence[Flat], make_optimizer: Callable[[list], torch.optim.Optimizer]
    ) -> None:
        self.flats = [flat for flat in flats if flat.shard.requires_grad]
        for flat in self.flats:
            mark_shard(flat.shard, len(flat.params), flat.group)  # for a scaler: see shards.py
        self.optimizer = make_optimizer([flat.shard for flat in self.flats])

    @property
    def param_groups(self) -> list[dict]:
        return self.optimizer.param_groups

    @property
    def state(self) -> dict:
        return self.optimizer.state

    def step(self) -> None:
        """Reduce gradients that are still whole, step this rank's shards, gather the new weights.

        What stage 2 has reduced before is not reduced again: that would cost a message of zeros.
        Afterwards every rank's parameters are the new ones, and every .grad is None.
        """
        for flat in self.flats:
            if any(param.grad is not None for param in flat.params):
                flat.reduce()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for work in [flat.gather() for flat in self.flats]:
            work.wait()

    def zero_grad(self) -> None:
        """Drop all gradients; model.zero_grad() would leave those that stage 2 has reduced."""
        for flat in self.flats:
            flat.shard.grad = None
            for param in flat.params:
                param.grad = None


def reduce_during_backward(flats: Iterable[Flat]) -> None:
    """ZeRO stage 2: reduce each Flat in backward, as soon as its last gradient is there.

    From then on every backward does so. All the parameters of a Flat must take part in it, or the
    Flat is frozen: then it has no gradients, and nothing to reduce.
    """
    for flat in flats:
        ready: list[nn.Parameter] = []

        def count(param: nn.Parameter, flat: Flat = flat, ready: list = ready) -> None:
            ready.append(param)
            if len(ready) == len(flat.params):
                ready.clear()
                flat.reduce()

        for param in flat.params:
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(count)
