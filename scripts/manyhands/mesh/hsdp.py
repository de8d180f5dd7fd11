"""Hybrid sharding: FSDP inside a node, replicas of that across nodes; what it sends and keeps.

    replicate 0   shard 0  shard 1  shard 2  shard 3      along a row: weights come, gradients go
    replicate 1   shard 0  shard 1  shard 2  shard 3      along a column: the shards' gradients

A row is a whole copy of the model, so the gathers, which are most of the bytes, stay inside a row.
Between rows only gradients travel, and of these each rank has only its shard. More rows: memory as
before, and a little more between the rows. Longer rows: less memory, and more bytes on slow links
as soon as a row is longer than a node.

Price for P parameters, a multiple of s, on r x s ranks in fp32: 3 (s-1)/s x 4P bytes sent in the
row and 2 (r-1)/r x 4P/s in the column; 16 P/s bytes kept with AdamW, whatever r is.
Source: Zhao et al. 2023, "PyTorch FSDP", https://arxiv.org/abs/2304.11277, section 3.2.2.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from manyhands.fsdp.fully_shard import make_mesh, torch_fsdp


def hsdp_bytes(
    num_params: int, replicas: int, shards: int, bytes_per_number: int = 4
) -> dict[str, int]:
    """What a rank sends in a step of FSDP with replicas, and what it keeps between steps, in bytes.

    All parameters are in units that are gathered twice and reduced once, as one vector that is
    padded to a multiple of `shards`. A ring of n ranks sends (n-1)/n of the whole for a gather or a
    reduction, and twice that for an all-reduce. AdamW has two numbers for each parameter.

    Args:
        replicas, shards: sizes of the two axes.
        bytes_per_number: of weights, gradients and the optimizer's state alike.

    Returns:
        {"shard": sent in the group of the shards, "replicate": sent in that of the replicas
        (rounded down), "kept": weights, gradients and optimizer state of a rank}.
    """
    mine = -(-num_params // shards) * bytes_per_number
    return {
        "shard": 3 * (shards - 1) * mine,
        "replicate": 2 * (replicas - 1) * mine // replicas,
        "kept": (1 + 1 + 2) * mine,
    }


# ---- The same thing in PyTorch, on more ranks than there are -------------------------------------


def torch_hsdp_on_fake_ranks(
    make: Callable[[], tuple[nn.Module, list[nn.Module]]],
    inputs: Tensor,
    replicas: int,
    shards: int,
    counting: Callable[[], AbstractContextManager],
) -> object:
    """A step of PyTorch's fully_shard as rank 0 of a mesh of any size, of which nobody else exists.

    torch's fake process group takes every message and sends none: the numbers are wrong, but which
    messages there are, of how many bytes and in which groups, is right. For a process that has
    joined no group yet.

    Args:
        make: makes a model and its units.
        counting: a context that notes the messages of its block, such as the Ledger.

    Returns:
        What `counting` gives for the second step, which is like all that follow.
    """
    size = replicas * shards
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        model, units = make()
        sharded = torch_fsdp(model, units, make_mesh(replicas, shards))
        for _ in range(2):
            with counting() as counted:
                sharded(inputs).sum().backward()
            sharded.zero_grad()
        return counted
    finally:
        dist.destroy_process_group()
