"""Tensor parallelism: every rank holds 1/n of every matrix, and sees all samples."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from manyhands.models.transformer import Transformer
from manyhands.tensor import dtensor, sequence
from manyhands.tensor import model as by_hand
from manyhands.ways.ready import Ready, Setting, adamw, backward_of


class Parts(NamedTuple):
    """The exercises of lesson 13 that a job can use."""

    TensorParallel: Callable = by_hand.TensorParallel
    TensorSequenceParallel: Callable = sequence.TensorSequenceParallel
    data_place: Callable = by_hand.data_place


class Native(nn.Module):
    """PyTorch's cut model, called like TensorParallel."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss as a plain scalar."""
        return self.module(inputs, targets).full_tensor()

    def finish_gradients(self) -> None:
        """Do nothing: DTensor sums the gradients of norms when the optimizer's step reads them."""


def cut(
    model: Transformer,
    native: bool = False,
    with_sequence: bool = False,
    mesh: DeviceMesh | None = None,
    seed: int = 1,
    parts: Parts | None = None,
) -> nn.Module:
    """The model with each matrix cut over ranks; call finish_gradients after its backward.

    Args:
        native: by PyTorch's plan; train it inside `loss_parallel()`.
        with_sequence: between the cut layers, keep only this rank's positions.
        mesh: one row of ranks; None takes all.
        seed: of the dropout by hand, where each rank has its own positions.
    """
    parts = parts or Parts()
    if native:
        device = model.head.weight.device
        mesh = mesh or init_device_mesh(device.type, (dist.get_world_size(),))
        return Native(dtensor.torch_tensor_parallel(model, mesh, with_sequence))
    group = mesh.get_group() if mesh else None
    if with_sequence:
        return parts.TensorSequenceParallel(model, seed, group=group)
    return parts.TensorParallel(model, group=group)


def tensor_parallel(
    model: Transformer,
    setting: Setting,
    native: bool = False,
    with_sequence: bool = False,
    parts: Parts | None = None,
) -> Ready:
    part = cut(model, native, with_sequence, seed=setting.seed, parts=parts)
    inside = loss_parallel if native else nullcontext
    forward_backward = backward_of(part, part.finish_gradients, inside)
    return Ready(part, adamw(part.parameters(), is_mixed=native), forward_backward)
