"""Collectives from send and recv: message patterns in which all ranks take part.

    naive, 3 messages in a row:  0 -> 1   0 -> 2   0 -> 3      the root does everything
    tree, 2 rounds:              0 -> 1 | 0 -> 2, 1 -> 3       whoever has it passes it on

Cost on n ranks for S bytes (all chunks together); alpha_beta.py turns it into seconds:

                        messages in a row     bytes through the busiest rank
    broadcast_naive     n-1                   (n-1) S out
    broadcast_tree      ceil(log2 n)          ceil(log2 n) S out
    reduce_tree         ceil(log2 n)          ceil(log2 n) S in
    gather              n-1                   (n-1)/n S in
    all_reduce_naive    2 (n-1)               (n-1) S in, then (n-1) S out
    all_reduce_tree     2 ceil(log2 n)        ceil(log2 n) S in, then as much out

All work in place, `root` counts inside the group, and an `op` is "sum", "avg", "min" or "max".
ring.py has the ones in which no rank is the busiest. PyTorch's own: dist.broadcast, dist.reduce,
dist.gather, dist.all_reduce.
Source: Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in
MPICH", https://doi.org/10.1177/1094342005051521, sections 3 and 4.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup | None  # None means all ranks


def device_of(tensors: Iterable[Tensor], group: Group = None) -> torch.device:
    """Where this rank's messages have to be: where its tensors are, and without any, by `group`.

    NCCL sends only what is on a GPU, and a rank's GPU is its current device.
    """
    for tensor in tensors:
        return tensor.device
    return torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")


@contextmanager
def flat(tensor: Tensor) -> Iterator[Tensor]:
    """Yield `tensor` as a vector that can be sent; what is written there ends up in `tensor`.

    A message is one piece of memory. A column of a matrix is not one: its vector is a copy.
    """
    vector = tensor.detach().contiguous().view(-1)
    yield vector
    if vector.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(vector.view_as(tensor))


def combine(total: Tensor, other: Tensor, op: str) -> None:
    """Combine `other` into `total`, in place. For "avg" add only: divide once, at the end."""
    if op in ("sum", "avg"):
        total += other
    elif op in ("min", "max"):
        (torch.minimum if op == "min" else torch.maximum)(total, other, out=total)
    else:
        raise ValueError(f'op is {op!r}; there are "sum", "avg", "min" and "max"')


def broadcast_naive(tensor: Tensor, root: int = 0, group: Group = None) -> None:
    """Overwrite `tensor` on every rank with the root's. The root sends to each of the others."""
    with flat(tensor) as vector:
        if dist.get_rank(group) != root:
            dist.recv(vector, group=group, group_src=root)
        else:
            for other in range(dist.get_world_size(group)):
                if other != root:
                    dist.send(vector, group=group, group_dst=other)


def broadcast_tree(tensor: Tensor, root: int = 0, group: Group = None) -> None:
    """Overwrite `tensor` on every rank with the root's. Whoever has it passes it on.

    Count places from the root, which is place 0. In the rounds with step 1, 2, 4, ... each place
    below `step` has the tensor and sends it to place + step, where there is such a place.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    place, step = (rank - root) % n, 1
    with flat(tensor) as vector:
        while step < n:
            if place < step and place + step < n:
                dist.send(vector, group=group, group_dst=(rank + step) % n)
            elif step <= place < 2 * step:
                dist.recv(vector, group=group, group_src=(rank - step) % n)
            step *= 2


def reduce_tree(tensor: Tensor, op: str = "sum", root: int = 0, group: Group = None) -> None:
    """Combine all ranks' tensors into the root's: the tree of the broadcast, backwards.

    The first step is the largest power of 2 below n. In each round every place p with
    step <= p < 2 step, where there is one, sends its tensor to place p - step and is done; then the
    step is halved. If `op` is "avg", the root divides by n in the end. Afterwards only the root's
    tensor is of use.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    place, step = (rank - root) % n, 1 << (n - 1).bit_length()
    with flat(tensor) as vector:
        other = torch.empty_like(vector)
        while step := step // 2:
            if step <= place < 2 * step:
                dist.send(vector, group=group, group_dst=(rank - step) % n)
            elif place < step and place + step < n:
                dist.recv(other, group=group, group_src=(rank + step) % n)
                combine(vector, other, op)
        if op == "avg":
            vector /= n


def gather(chunks: Sequence[Tensor], root: int = 0, group: Group = None) -> None:
    """Fill the root's chunks[r] with rank r's chunks[r], for all r.

    Chunks may differ in size, and need not be in one piece of memory. `chunks` may be a tuple: fill
    its tensors.
    """
    rank = dist.get_rank(group)
    for source, chunk in enumerate(chunks):
        with flat(chunk) as vector:
            if source == rank != root:
                dist.send(vector, group=group, group_dst=root)
            elif rank == root != source:
                dist.recv(vector, group=group, group_src=source)


def all_reduce_naive(tensor: Tensor, op: str = "sum", group: Group = None) -> None:
    """Combine all ranks' tensors, on every rank: all send to rank 0, and rank 0 sends back."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    with flat(tensor) as vector:
        if rank != 0:
            dist.send(vector, group=group, group_dst=0)
        else:
            other = torch.empty_like(vector)
            for source in range(1, n):
                dist.recv(other, group=group, group_src=source)
                combine(vector, other, op)
        if op == "avg":
            vector /= n  # rank 0's is the sum; what the others hold is overwritten next
        broadcast_naive(vector, 0, group)


def all_reduce_tree(tensor: Tensor, op: str = "sum", group: Group = None) -> None:
    """Combine all ranks' tensors, on every rank: up the tree to rank 0, and down again."""
    reduce_tree(tensor, op, 0, group)
    broadcast_tree(tensor, 0, group)
