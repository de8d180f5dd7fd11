"""PyTorch's own tensor parallelism: a plan says how each module's matrix is cut, DTensor does it.

    parallelize_module(model, mesh, {"blocks.0.mlp.up": ColwiseParallel(), ...})

A parameter becomes a DTensor: it looks whole, and each rank holds its part. An operation on
DTensors works out which messages it needs. The plan also says how activations go in and out of a
module: Replicate() is whole on every rank, Shard(1) is cut by positions, Shard(-1) by the last
dimension.

Price: nearly the messages of the version by hand (with `sequence` the embedding is all-reduced
whole), and Python that works out each operation: some ms a block.
Source: https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from manyhands.tensor.replaced import refuse_untied


def plan(num_blocks: int, sequence: bool = False) -> dict[str, ParallelStyle]:
    """How each module of a Transformer is cut: its name -> a style.

    The scores stay cut by the vocabulary, for `loss_parallel`.

    Args:
        sequence: between the cut layers, keep only this rank's positions.
    """
    between = Shard(1) if sequence else Replicate()
    styles: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    for block in (f"blocks.{i}" for i in range(num_blocks)):
        styles |= {
            f"{block}.attention.qkv": ColwiseParallel(input_layouts=between),
            f"{block}.attention.out": RowwiseParallel(output_layouts=between),
            f"{block}.mlp.up": ColwiseParallel(input_layouts=between),
            f"{block}.mlp.down": RowwiseParallel(output_layouts=between),
        }
    if sequence:
        norms = [f"blocks.{i}.norm{k}" for i in range(num_blocks) for k in (1, 2)]
        styles |= {name: SequenceParallel() for name in [*norms, "norm"]}
        styles["dropout"] = PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Shard(1)
        )
    return styles


def torch_tensor_parallel(model: nn.Module, mesh: DeviceMesh, sequence: bool = False) -> nn.Module:
    """Cut a Transformer in place by `plan`; returns it. Train it inside `loss_parallel()`.

    Weights have to be equal on all ranks. Every size that is cut is a multiple of the ranks.
    """
    refuse_untied(model)
    model = parallelize_module(model, mesh, plan(len(model.blocks), sequence))
    model.head.weight = model.tokens.weight  # each was made a parameter of its own
    return model
