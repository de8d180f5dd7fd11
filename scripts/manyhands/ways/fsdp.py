"""Sharded training: optimizer state, gradients and weights in 1/n each (ZeRO-1 to 3, FSDP)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from manyhands.data_parallel.replicas import broadcast_state
from manyhands.fsdp import flat, fully_shard, meta, units, zero
from manyhands.models.transformer import Transformer
from manyhands.ways.ready import MakeOptimizer, Ready, Setting, adamw, backward_of, own_samples


class Parts(NamedTuple):
    """The exercises of lesson 10 that a job can use."""

    Flat: Callable = flat.Flat
    ShardedOptimizer: Callable = zero.ShardedOptimizer
    reduce_during_backward: Callable = zero.reduce_during_backward
    ShardedFlat: Callable = flat.ShardedFlat  # which FSDP makes for itself
    FSDP: Callable = units.FSDP
    torch_fsdp: Callable = fully_shard.torch_fsdp
    make_mesh: Callable = fully_shard.make_mesh


def shard_optimizer(
    model: Transformer, stage: int, make_optimizer: MakeOptimizer, parts: Parts | None = None
) -> object:
    """ZeRO stage 1 or 2 of a model that stays whole: every block is a Flat, and so is the rest."""
    parts = parts or Parts()
    broadcast_state(model)
    flats = [parts.Flat(params) for params in flat.units_of(model)]
    if stage == 2:
        parts.reduce_during_backward(flats)
    return parts.ShardedOptimizer(flats, make_optimizer)


def shard(
    model: Transformer,
    native: bool = False,
    mesh: DeviceMesh | None = None,
    dtype: torch.dtype | None = None,
    offload: bool = False,
    draw: meta.Draw | None = None,
    device: torch.device | None = None,
    parts: Parts | None = None,
) -> nn.Module:
    """ZeRO stage 3: the model in shards, block by block, by hand or by PyTorch's fully_shard.

    Args:
        mesh: replicas x shards, of make_mesh; None shards over all ranks.
        dtype: to send weights and to compute in.
        offload: keep shards in the CPU's memory; native only.
        draw: of a model without memory: draws its weights, on `device`.
    """
    parts = parts or Parts()
    blocks = list(model.blocks)
    device = device or model.head.weight.device
    if native:
        # Without a mesh PyTorch would take GPUs wherever a node has some, also with --device cpu.
        where = mesh or init_device_mesh(device.type, (dist.get_world_size(),))
        sharded = parts.torch_fsdp(model, blocks, where, dtype=dtype, offload=offload)
        if draw is not None:
            meta.fill(sharded, draw, "cpu" if offload else device)
        return sharded
    groups = {}
    if mesh is not None:
        groups = {"replicas": mesh.get_group("replicate"), "group": mesh.get_group("shard")}
    return parts.FSDP(model, blocks, dtype=dtype, draw=draw, **groups)


def sharded_optimizer(model: Transformer, setting: Setting, stage: int) -> Ready:
    """ZeRO-1 or ZeRO-2."""
    optimizer = shard_optimizer(model, stage, adamw)
    return Ready(model, optimizer, backward_of(model), own_samples)


def fsdp(
    model: Transformer,
    setting: Setting,
    native: bool = False,
    dtype: torch.dtype | None = None,
    offload: bool = False,
) -> Ready:
    """ZeRO-3."""
    sharded = shard(model, native, dtype=dtype, offload=offload)
    return Ready(sharded, adamw(sharded.parameters()), backward_of(sharded), own_samples)
