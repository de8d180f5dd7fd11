"""The whole weights of a model that is spread over a mesh: to compare with others, and to save.

    shards --all-gather over dp--> parts of matrices --gather on rank 0--> put together over tp

Price: 4P bytes through rank 0, which needs room for all of them.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.fsdp.flat import all_gather
from manyhands.fsdp.model import ShardedModel
from manyhands.mesh.grid import DATA_AXES
from manyhands.mesh.training import OnMesh


def whole_state(training: OnMesh, like: nn.Module) -> dict[str, Tensor]:
    """The whole weights by the names of `like`, a Transformer of this size, on the CPU of rank 0.

    {} on other ranks. Every rank calls it. Tensor ranks are the last axis of the mesh.
    """
    unsharded = without_shards(training.model)
    groups = training.groups
    is_first = all(dist.get_rank(groups[axis]) == 0 for axis in DATA_AXES if axis in groups)
    mine = {}
    with quiet():
        for name, param in training.named_weights().items():
            # All ranks that hold parts of a DTensor put it together.
            is_dtensor = hasattr(param, "full_tensor")
            part = param.full_tensor() if is_dtensor else unsharded.get(param, param)
            mine[name] = part.detach().cpu()
    every = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine if is_first else {}, every)
    return put_together(every, like) if every else {}


def without_shards(model: nn.Module) -> dict[nn.Parameter, Tensor]:
    """What FSDP holds in shards as whole tensors, by parameter; {} for any other model."""
    whole = {}
    for unit in model.units if isinstance(model, ShardedModel) else []:
        for flat in unit:
            vector = flat.shard.detach().new_empty(flat.whole.shape)
            all_gather(vector, flat.shard.detach(), flat.group).wait()
            whole |= zip(flat.params, flat.views(vector), strict=True)
    return whole


def put_together(every: list[dict[str, Tensor]], like: nn.Module) -> dict[str, Tensor]:
    """Whole weights from each rank's parts by name, in the order of the ranks.

    Of two stages that have the tied matrix, the first one calls it tokens.weight.
    """
    state = {}
    for name, whole in like.named_parameters():
        parts = [found[name] for found in every if name in found]
        sizes = zip(parts[0].shape, whole.shape, strict=True)
        cut = [dim for dim, (part, all_) in enumerate(sizes) if part != all_]
        state[name] = torch.cat(parts, cut[0]) if cut else parts[0]
    return state | {"head.weight": state["tokens.weight"]}


@contextmanager
def quiet() -> Iterator[None]:
    """Without DTensor's warnings that a sum over two axes of a mesh takes two messages."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
