"""Wrong answers to lesson 14 that its checks once took for right, or told something false of."""

from math import prod

import torch.distributed as dist

from manyhands.mesh import combine, grid


def refused_by_rank_0(sizes):
    if prod(sizes.values()) == dist.get_world_size():
        return grid.make_groups(sizes)
    if dist.get_rank() == 0:
        raise ValueError(f"the mesh {sizes} does not fit {dist.get_world_size()} ranks")
    return {}


def shared_out_first(model, groups):
    """All ranks have the same model already."""
    for param in model.parameters():
        dist.broadcast(param.data, 0)
    return combine.shard_and_cut(model, groups)


WRONG = {
    "14.2": [(refused_by_rank_0, "")],
    "14.3": [(shared_out_first, "messages while it is made")],
}
