"""Data parallelism: every rank holds the model, and trains on its share of the samples."""

from collections.abc import Callable

import torch
from torch import nn

from manyhands.data_parallel import replicas
from manyhands.ddp import wrapping
from manyhands.models.transformer import Transformer
from manyhands.ways.ready import Ready, Setting, adamw, backward_of, own_samples, with_products_in


def replica(
    model: nn.Module,
    native: bool = False,
    by_hand: Callable[..., nn.Module] = replicas.BucketedDDP,
    **options: object,
) -> nn.Module:
    """The model with the mean of all ranks' gradients after backward; all begin with rank 0's.

    Args:
        native: by PyTorch's DDP.
        by_hand: the class that does it otherwise.
        options: of the one that wraps it, such as bucket_mb.
    """
    return wrapping.torch_ddp(model, **options) if native else by_hand(model, **options)


def ddp(
    model: Transformer, setting: Setting, native: bool = False, dtype: torch.dtype | None = None
) -> Ready:
    """`dtype`: to multiply matrices in, by autocast."""
    wrapped = replica(model, native)
    forward_backward = backward_of(with_products_in(wrapped, dtype))
    return Ready(wrapped, adamw(wrapped.parameters()), forward_backward, own_samples)
