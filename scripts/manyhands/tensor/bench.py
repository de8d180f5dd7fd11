"""Measures a Transformer block that is cut by hand against DTensor's, and against a whole one."""

import copy
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from manyhands.instruments.benchmark import Measure, Measured, Row, by_hand_over_native, fresh
from manyhands.instruments.timing import in_turn
from manyhands.models.transformer import Block
from manyhands.tensor import dtensor, model


def tensor_ratio() -> list[Measured]:
    """Forward and backward of a block that is cut by hand over DTensor's, on the same two ranks."""
    return by_hand_over_native(time_tensor, [(512, 8), (128, 8)], "heads")


def time_tensor(width: int, heads: int, num_rounds: int) -> list[list[float]]:
    """On a rank: times of forward and backward of a block (4, 64, width), both ways."""
    x, steps = torch.randn(4, 64, width), []
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    styles = {
        name.removeprefix("blocks.0."): style
        for name, style in dtensor.plan(1).items()
        if name.startswith("blocks.0.")
    }
    for native in (False, True):
        block = Block(width, heads, 0.0)
        if native:
            block = parallelize_module(block, mesh, styles)
        else:
            model.cut_block(block)
        steps.append(partial(fresh, block, partial(forward_and_backward, block, x)))
    in_turn(steps, 3)
    return in_turn(steps, num_rounds)


def time_cut(cut: Callable, width: int, num_rounds: int) -> list[list[float]]:
    """On a rank: times of forward and backward of a whole block, and of one over all ranks.

    The whole block runs on rank 0, while the others wait. Their times of it mean nothing.

    Args:
        cut: cuts a block over the ranks in place.
    """
    torch.manual_seed(0)
    x = torch.randn(4, 32, width)
    block = Block(width, 4, 0.0)
    whole = copy.deepcopy(block) if dist.get_rank() == 0 else nn.Identity()
    cut(block)
    steps = [partial(forward_and_backward, one, x) for one in (whole, block)]
    in_turn(steps, 2)
    return in_turn(steps, num_rounds)


def forward_and_backward(block: nn.Module, x: torch.Tensor) -> None:
    """Also the gradient of x: it is what travels to the layer before."""
    block(x.requires_grad_()).sum().backward()


MEASURES = (
    Measure(
        tensor_ratio,
        (
            Row(
                "a tensor-parallel block by hand / DTensor's, forward and backward, width 512, "
                "2 ranks",
                "<= 1.05",
                "time / time",
            ),
        ),
        ("tensor/*.py", "models/transformer.py"),
    ),
)
