"""Who runs where, and who prepares the data.

    rank            0      1      2      3       world size 4: processes in the job
    node            node1  node1  node2  node2
    local rank      0      1      0      1       place on its node
    device          cuda:0 cuda:1 cuda:0 cuda:1

    prepares        *                            into a folder that all nodes share
                    *             *              onto the disk of each node

Price: one all-gather of about 100 bytes per rank for each of the two functions.
Source: https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch.distributed as dist


class Place(NamedTuple):
    """Where one rank runs."""

    rank: int
    host: str
    local_rank: int
    device: str


def device_map(environ: Mapping[str, str], num_gpus: int, host: str) -> list[Place]:
    """Find out where every rank runs. Every rank gets the same list, in the order of the ranks.

    Args:
        environ: this process's RANK, LOCAL_RANK and LOCAL_WORLD_SIZE (processes on this node), as
            text.
        num_gpus: GPUs of this node. A rank's device is "cuda:<local rank>" where the node has a
            GPU for each of its processes, else "cpu".
        host: the name of this node.

    `dist.all_gather_object(places, mine)` sends `mine` to all ranks and fills the list `places`,
    which must have one element for each of the `dist.get_world_size()` ranks.
    """
    local_rank = int(environ["LOCAL_RANK"])
    has_gpu = num_gpus >= int(environ["LOCAL_WORLD_SIZE"])
    device = f"cuda:{local_rank}" if has_gpu else "cpu"
    mine = Place(int(environ["RANK"]), host, local_rank, device)
    places = [None] * dist.get_world_size()
    dist.all_gather_object(places, mine)
    return places


def prepare_once(
    prepare: Callable[[], None], read: Callable[[], object], place: Place, is_shared: bool
) -> object:
    """Prepare the data once in each folder, then read it on every rank; returns what was read.

    Args:
        prepare: downloads or unpacks the data. Where the folder `is_shared` by all nodes, rank 0
            alone calls it; where every node has a folder of its own, one rank of each node does.
        read: returns the data. Every rank calls it itself, once, after every prepare() has ended.
        place: where this rank runs.

    Raises:
        An exception on every rank if a prepare() raised one: otherwise the others would wait for a
        rank that does not come, or lose it without knowing why. On the rank where it happened, the
        message contains what that says.
    """
    prepares = place.rank == 0 if is_shared else place.local_rank == 0
    problem = ""
    if prepares:
        try:
            prepare()
        except Exception as error:
            problem = f"rank {place.rank} could not prepare the data: {error!r}"
    problems = [""] * dist.get_world_size()
    dist.all_gather_object(problems, problem)  # ends only when every rank has called it
    for told in problems:
        if told:
            raise RuntimeError(problem or told)  # each rank its own problem, where it has one
    return read()
