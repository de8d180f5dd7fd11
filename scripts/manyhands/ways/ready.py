"""What every way to train comes to: a model, its optimizer, and a step, set up on this rank.

ready = way(model, setting)                the model is used up
ready.step(inputs, targets)                the global batch, the same on all ranks
ready.forward_backward(inputs, targets)    this rank's part of it, without the optimizer
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.models.transformer import Transformer
from manyhands.ranks.failures import BadInput


@dataclass(frozen=True)
class Setting:
    """The one model and the one global batch that all ways train with.

    `batch` counts the sequences of a step over all ranks together; a pipeline cuts them into
    `micro_batches`.
    """

    layers: int = 4
    vocab: int = 256
    block: int = 32
    batch: int = 16
    micro_batches: int = 4
    seed: int = 1

    def check(self, ranks: int) -> None:
        """Refuse what some way could not train on so many ranks."""
        if min(self.layers, self.vocab, self.block, self.batch, self.micro_batches) < 1:
            raise BadInput(f"{self}: all sizes must be at least 1")
        if self.batch % ranks or self.batch % self.micro_batches:
            raise BadInput(
                f"--batch {self.batch} is shared by {ranks} rank(s) and cut into "
                f"{self.micro_batches} micro-batches: take a multiple of both numbers"
            )
        if self.block % ranks:
            raise BadInput(
                f"{self.block} positions cannot be shared by {ranks} ranks: take a multiple of "
                f"{ranks} as --block"
            )
        if self.layers < ranks:
            raise BadInput(
                f"{self.layers} heads cannot be shared by {ranks} ranks: take --layers {ranks} (it "
                "gives as many heads) or more"
            )
        if has_mesh(ranks) and self.batch % (ranks // 2 * self.micro_batches):
            raise BadInput(
                f"--batch {self.batch} is shared by {ranks // 2} pipelines of 2 ranks and cut into "
                f"{self.micro_batches} micro-batches: take a multiple of "
                f"{ranks // 2 * self.micro_batches}"
            )

    def build(self, device: torch.device) -> Transformer:
        """The same model with the same first weights on every rank."""
        torch.manual_seed(self.seed)
        return Transformer(self.vocab, self.block, self.layers).to(device)


def has_mesh(ranks: int) -> bool:
    """Can so many ranks be a mesh of two axes, of which one has 2?"""
    return ranks >= 4 and ranks % 2 == 0


# ---- what a way returns ------------------------------------------------------------------------


def all_samples(batch: Tensor) -> Tensor:
    return batch


def own_samples(batch: Tensor) -> Tensor:
    """This rank's share of the global batch: (B, T) -> (B/n, T)."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


class Ready(NamedTuple):
    """A way to train, set up on this rank."""

    model: nn.Module  # with this rank's parameters
    optimizer: object
    # This rank's part of the batch -> its mean loss; then .grad is what the optimizer needs.
    forward_backward: Callable[[Tensor, Tensor], Tensor] | None  # None: an idle rank
    share: Callable[[Tensor], Tensor] = all_samples  # the global batch -> this rank's part

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """A training step with the global batch (B, T); returns the loss of this rank's part."""
        loss = self.forward_backward(self.share(inputs), self.share(targets))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


Make = Callable[[Transformer, Setting], Ready]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adamw(
    params: Iterable[nn.Parameter], lr: float = 1e-3, is_mixed: bool = False
) -> torch.optim.Optimizer:
    """The same optimizer for all ways.

    `is_mixed`: some parameters are DTensors of other meshes, or plain tensors, which one fused step
    does not take together.
    """
    how = {"foreach": False} if is_mixed else {"fused": True}
    return torch.optim.AdamW(params, lr=lr, **how)


def backward_of(
    model: Callable[[Tensor, Tensor], Tensor],
    finish: Callable[[], None] | None = None,
    inside: Callable[[], AbstractContextManager] = nullcontext,
) -> Callable[[Tensor, Tensor], Tensor]:
    """Forward and backward of a model whose forward returns the mean loss.

    Args:
        finish: what is left to do with the gradients after backward.
        inside: makes the context of forward and backward.
    """

    def forward_backward(inputs: Tensor, targets: Tensor) -> Tensor:
        with inside():
            loss = model(inputs, targets)
            loss.backward()
        if finish:
            finish()
        return loss.detach()

    return forward_backward


def one_process(model: Transformer, setting: Setting) -> Ready:
    """Everything on rank 0; the others do nothing."""
    is_first = dist.get_rank() == 0
    return Ready(model, adamw(model.parameters()), backward_of(model) if is_first else None)


def with_products_in(model: nn.Module, dtype: torch.dtype | None) -> Callable:
    """What calls the model with matrix products of this type, by autocast; None leaves them."""
    device = next(model.parameters()).device
    return torch.autocast(device.type, dtype, enabled=dtype is not None)(model.__call__)
