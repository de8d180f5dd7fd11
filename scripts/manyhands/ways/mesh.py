"""Several techniques on a mesh of ranks: shards or replicas, pipelines and cut matrices."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from manyhands.mesh import clip, combine, grid, seeds
from manyhands.mesh import native as by_torch
from manyhands.mesh.training import MeshTraining, OnMesh
from manyhands.models.transformer import Transformer
from manyhands.ways.ready import Ready, Setting, adamw

Sizes = Mapping[str, int]  # of the axes of a mesh: pp, replicate, dp and tp, as far as it has them


class Parts(NamedTuple):
    """The exercises of lesson 14 that a job can use."""

    coordinates: Callable = grid.coordinates
    make_groups: Callable = grid.make_groups
    shard_and_cut: Callable = combine.shard_and_cut
    mesh_norm: Callable = clip.mesh_norm
    seed_of: Callable = seeds.seed_of


def spread(
    model: Transformer,
    sizes: Sizes,
    m: int,
    native: bool = False,
    parts: Parts | None = None,
) -> OnMesh:
    """The model on the mesh, by hand or by PyTorch; every rank has built the whole of it.

    Args:
        m: micro-batches of a rank's share of the batch.
    """
    if native:
        mesh = grid.torch_mesh(sizes, model.head.weight.device.type)
        return by_torch.TorchMeshTraining(model, mesh, m)
    parts = parts or Parts()
    return MeshTraining(model, parts.make_groups(sizes), m, parts.shard_and_cut)


def on_mesh(
    model: Transformer, setting: Setting, sizes: Sizes, m: int, native: bool = False
) -> Ready:
    """Techniques on a mesh of these axes; each rank's share of the samples in m micro-batches."""
    training = spread(model, sizes, m, native)
    share, num_shares = grid.share_of_data(grid.coordinates(dist.get_rank(), sizes), sizes)

    def forward_backward(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = training.step(inputs, targets)
        training.finish()
        return loss

    optimizer = adamw(training.parameters(), is_mixed=native)
    own = partial(share_of, number=share, num_shares=num_shares)
    return Ready(training.model, optimizer, forward_backward, own)


def share_of(batch: Tensor, number: int, num_shares: int) -> Tensor:
    return batch.chunk(num_shares)[number]


def fsdp_and_tensor(model: Transformer, setting: Setting, native: bool = False) -> Ready:
    return on_mesh(model, setting, {"dp": dist.get_world_size() // 2, "tp": 2}, 1, native)


def pipeline_and_replicas(model: Transformer, setting: Setting, native: bool = False) -> Ready:
    sizes = {"pp": 2, "replicate": dist.get_world_size() // 2}
    return on_mesh(model, setting, sizes, setting.micro_batches, native)
