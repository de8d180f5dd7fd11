"""PyTorch's own sharding, fully_shard: its units, its options, and the messages to expect.

    fully_shard(block) for every block, then fully_shard(model)

    one call makes one unit: all parameters below it that no earlier call has taken
    one unit: one all-gather before its forward, one before its backward (if it was freed),
              one reduce-scatter after its backward

Price: as in units.py, and a copy of each unit: it cuts every parameter by its first dimension, so
what was gathered has to be sorted into parameters. With replicas on a 2-D mesh each unit's gradient
shards are all-reduced as well: 2 (r-1)/r x 4P/n bytes for r replicas.
Sources: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html; Zhao et al. 2023,
"PyTorch FSDP", https://arxiv.org/abs/2304.11277.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)

from manyhands.data_parallel.replicas import broadcast_state
from manyhands.fsdp.flat import all_gather


def torch_fsdp(
    module: nn.Module,
    units: Sequence[nn.Module],
    mesh: DeviceMesh | None = None,
    reshard: bool | None = None,
    dtype: torch.dtype | None = None,
    offload: bool = False,
) -> nn.Module:
    """Shard `module` in place with fully_shard: each of `units` first, then the root; returns it.

    Rank 0's weights count: fully_shard itself takes each rank's own as they are.

    Args:
        mesh: 1-D to shard over all its ranks, or 2-D to shard over its last dimension and hold a
            replica for each row; None means all ranks.
        reshard: reshard_after_forward of the units; None leaves it to PyTorch, which frees all but
            the root.
        dtype: to send weights and to compute in; gradients are summed in fp32.
        offload: keep shards and optimizer in the memory of the CPU, and bring a unit when needed.
    """
    if not any(param.is_meta for param in module.parameters()):  # these have no weights to send
        broadcast_state(module)
    options: dict[str, object] = {"mesh": mesh}
    if dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if offload:  # pinned memory is a matter of GPUs
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    for unit in units:
        fully_shard(unit, reshard_after_forward=reshard, **options)
    return fully_shard(module, **options)


def make_mesh(replicas: int, shards: int, device_type: str = "cpu") -> DeviceMesh:
    """A 2-D mesh for fully_shard: `replicas` rows of `shards` ranks, named replicate and shard.

    Ranks of one row, which share one copy of the model, have consecutive numbers, so they are on
    one node where a node holds them all.
    """
    names = ("replicate", "shard")
    return init_device_mesh(device_type, (replicas, shards), mesh_dim_names=names)


def options_of(strategy: str) -> dict[str, object]:
    """What became of a sharding strategy of the first FSDP: {"reshard": ..., "mesh_dims": ...}.

    Args:
        strategy: FULL_SHARD, SHARD_GRAD_OP, HYBRID_SHARD or _HYBRID_SHARD_ZERO2.

    Returns:
        `reshard_after_forward` of fully_shard, and the number of dimensions of its mesh.
    """
    keeps = strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
    return {"reshard": not keeps, "mesh_dims": 2 if "HYBRID" in strategy else 1}


def calls_per_step(num_blocks: int, reshard: bool = True, replicas: int = 1) -> dict[str, int]:
    """Collectives that each rank calls in one forward and backward of a sharded model.

    Args:
        num_blocks: blocks that were sharded before the root; 0 where only the root was.
        reshard: the blocks are freed after forward; the root never is.

    Returns:
        Calls of all_gather, reduce_scatter and all_reduce.
    """
    units = num_blocks + 1
    again = num_blocks if reshard else 0
    return {
        "all_gather": units + again,
        "reduce_scatter": units,
        "all_reduce": units if replicas > 1 else 0,
    }


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """The whole weights of a sharded model under the names that they had, on the CPU of rank 0.

    On the other ranks it returns {}, but every rank has to call it, because it gathers. It works
    for torch_fsdp and, unit by unit, for FSDP.
    """
    if isinstance(model, FSDPModule):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(model, options=options)
    whole = {}
    for flat in chain(*model.units):
        vector = flat.shard.detach().new_empty(flat.whole.shape)
        all_gather(vector, flat.shard.detach(), flat.group).wait()
        if dist.get_rank() == 0:
            views = flat.views(vector.cpu())
            whole |= {id(param): view for param, view in zip(flat.params, views, strict=True)}
    if not whole:
        return {}
    state = model.module.state_dict(keep_vars=True)
    return {
        name: whole[id(value)] if id(value) in whole else value.detach().cpu()
        for name, value in state.items()
    }


def train_sharded(
    model: nn.Module,
    units: Sequence[nn.Module],
    batches: Iterable[tuple[Tensor, Tensor]],
    learning_rate: float,
) -> dict[str, Tensor]:
    """Train with torch_fsdp and AdamW; return the whole weights on rank 0, {} on the others.

    `batches` are the same on all ranks. Of each (inputs, targets) with B samples, a multiple of N,
    a rank takes B/N, no two ranks the same. `model(inputs, targets)` returns their mean loss.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sharded = torch_fsdp(model, units)
    optimizer = torch.optim.AdamW(sharded.parameters(), learning_rate)
    for inputs, targets in batches:
        sharded(inputs[rank::world_size], targets[rank::world_size]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_state(sharded)
