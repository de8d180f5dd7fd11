"""A mesh: all ranks of a job in a grid, an axis for each technique, and groups along each axis.

    sizes = {"pp": 2, "dp": 2, "tp": 2}        dp 0      dp 1
                                        pp 0   0  1      2  3     tp along each row
                                        pp 1   4  5      6  7

    rank 5: pp 1, dp 0, tp 1            its groups: pp [1, 5]   dp [5, 7]   tp [4, 5]

The last axis is the innermost: its ranks have consecutive numbers, so they are on one node where a
node holds them all. Tensor parallelism, which sends most and computes nothing meanwhile, is placed
there; then come the shards and replicas, whose messages hide behind the computation; a pipeline,
which sends least, goes across nodes.

Price: a group is made once, by all ranks together; with NCCL it takes some memory of each GPU when
it is first used.
Sources: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 3 (where which axis goes);
https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.device_mesh.DeviceMesh.
"""

from collections.abc import Mapping
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

Sizes = Mapping[str, int]  # an axis's name -> its size, outermost first
Groups = Mapping[str, dist.ProcessGroup]  # an axis's name -> the group along it of this rank

DATA_AXES = ("replicate", "dp", "shard")  # along these, each rank trains on samples of its own


def coordinates(rank: int, sizes: Sizes) -> dict[str, int]:
    """Where a rank stands in the grid: an axis's name -> its number there, in the order of `sizes`.

    Ranks are counted like the digits of a number, the last axis first: with {"pp": 2, "dp": 2,
    "tp": 2}, rank = (pp * 2 + dp) * 2 + tp. Any number of axes, of any size from 1 on.
    """
    place = {}
    for axis in reversed(list(sizes)):
        rank, place[axis] = divmod(rank, sizes[axis])
    return {axis: place[axis] for axis in sizes}


def ranks_along(axis: str, rank: int, sizes: Sizes) -> list[int]:
    """The ranks that differ from `rank` in this axis only, or in nothing: in the axis's order."""
    axes = list(sizes)
    step = prod(sizes[inner] for inner in axes[axes.index(axis) + 1 :])
    first = rank - step * coordinates(rank, sizes)[axis]
    return [first + step * number for number in range(sizes[axis])]


def make_groups(sizes: Sizes) -> dict[str, dist.ProcessGroup]:
    """Make the groups of a mesh of all ranks; every rank calls it.

    Along each axis every rank belongs to one group, whose members are its ranks_along, and all
    members hold the same group. Every rank has to call dist.new_group for every group, in the same
    order, also for the groups that it does not belong to. If a rank leaves one out, or makes its
    own groups only, some ranks wait in dist.new_group, or in a group's first message, until the
    job's time limit.

    Returns:
        An axis's name -> this rank's group along it, in the order of `sizes`.

    Raises:
        ValueError: the mesh has more or fewer places than there are ranks.
    """
    rank, world_size, places = dist.get_rank(), dist.get_world_size(), prod(sizes.values())
    if places != world_size:
        raise ValueError(
            f"the mesh {dict(sizes)} has {places} places, but there are {world_size} ranks: take "
            "sizes whose product is the number of ranks"
        )
    mine = {}
    for axis in sizes:
        for ranks in sorted({tuple(ranks_along(axis, other, sizes)) for other in range(places)}):
            group = dist.new_group(list(ranks))
            if rank in ranks:
                mine[axis] = group
    return mine


def share_of_data(place: Mapping[str, int], sizes: Sizes) -> tuple[int, int]:
    """Which share of the samples a rank trains on: (number of the share, number of shares).

    Only the axes of data parallelism cut the batch: the ranks of one pipeline, and those that hold
    parts of one matrix, have to see the same samples.
    """
    axes = [axis for axis in sizes if axis in DATA_AXES]
    number = 0
    for axis in axes:
        number = number * sizes[axis] + place[axis]
    return number, prod(sizes[axis] for axis in axes)


def drawn(sizes: Sizes) -> str:
    """The grid as text: the last axis along each row, the one before it from block to block."""
    *rows, blocks, inner = ["", "", *sizes][-max(2, len(sizes)) :]
    per_block, num = sizes[inner], prod(sizes.values())
    per_line = per_block * sizes.get(blocks, 1)
    cell = len(str(num - 1)) + 2
    gap = max(cell * per_block, len(f"{blocks} {sizes.get(blocks, 1)}")) + 2
    lines = {}
    if blocks:
        lines[""] = "".join(f"{blocks} {number}".ljust(gap) for number in range(sizes[blocks]))
    for first in range(0, num, per_line):
        place = coordinates(first, sizes)
        ranks = [f"{rank:<{cell}}" for rank in range(first, first + per_line)]
        starts = range(0, per_line, per_block)
        text = ["".join(ranks[start : start + per_block]).ljust(gap) for start in starts]
        lines[" ".join(f"{axis} {place[axis]}" for axis in rows) or "ranks"] = "".join(text)
    side = max(map(len, lines)) + 2
    drawn_lines = [f"{name.ljust(side)}{text}".rstrip() for name, text in lines.items()]
    return "\n".join([*drawn_lines, f"{inner} along each row"])


# ---- The same thing in PyTorch -------------------------------------------------------------------


def torch_mesh(sizes: Sizes, device_type: str = "cpu") -> DeviceMesh:
    """PyTorch's mesh of all ranks, with the same ranks at the same places."""
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def groups_of(mesh: DeviceMesh) -> dict[str, dist.ProcessGroup]:
    """This rank's group along each axis of PyTorch's mesh, as make_groups returns them."""
    return {axis: mesh.get_group(axis) for axis in mesh.mesh_dim_names}
