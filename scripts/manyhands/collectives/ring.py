"""Ring collectives from send and recv: every rank sends as much as any other, all the time.

    n ranks, S bytes in n chunks.              rank 0 --> rank 1
    In every step each rank sends one chunk      ^          |
    to the next rank and receives one from       |          v
    the rank before it, all at the same time   rank 3 <-- rank 2

    step 0   0 sends chunk 3, 1 sends 0, ...   reduce-scatter: after n-1 steps rank r's
    step 1   0 sends chunk 2, 1 sends 3, ...   chunk r holds the sum of all
    step 3   0 sends chunk 0, 1 sends 1, ...   all-gather: after n-1 more steps all have all

Cost: a rank sends n-1 chunks, (n-1)/n S bytes, and receives as many, in either half; 2 (n-1)
chunks, 2 (n-1)/n S bytes in an all-reduce. No all-reduce in which only ranks add can send less from
its busiest rank. Memory: one more chunk.

All work in place, and an `op` is "sum", "avg", "min" or "max". PyTorch's own:
dist.all_gather, dist.reduce_scatter, dist.all_reduce. `exchange_in_pieces` can take the place of
`exchange_and_combine`: it adds one piece of a chunk while the next ones travel.
Source: Patarasuk, Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", https://doi.org/10.1016/j.jpdc.2008.09.002.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.collectives.trees import Group, combine, flat


def start_exchange(
    outgoing: Tensor, to: int, incoming: Tensor, source: int, group: Group = None
) -> list[dist.Work]:
    """Start to send `outgoing` to rank `to` of the group and to fill `incoming` from rank `source`.

    Both tensors are in one piece. Returns at once; both messages are complete once every work in
    the list has been waited for.
    """
    # As one batch: NCCL would carry two separate messages one after the other.
    send = dist.P2POp(dist.isend, outgoing, group=group, group_peer=to)
    receive = dist.P2POp(dist.irecv, incoming, group=group, group_peer=source)
    return dist.batch_isend_irecv([send, receive])


def exchange(outgoing: Tensor, to: int, incoming: Tensor, source: int, group: Group = None) -> None:
    """Send `outgoing` to rank `to` and, at the same time, fill `incoming` from rank `source`."""
    with flat(outgoing) as leaving, flat(incoming) as coming:
        for work in start_exchange(leaving, to, coming, source, group):
            work.wait()


def exchange_and_combine(
    outgoing: Tensor, to: int, total: Tensor, source: int, op: str, group: Group = None
) -> None:
    """Send `outgoing` to rank `to`, and combine what rank `source` sends into `total`."""
    with flat(total) as sums:
        arrived = torch.empty_like(sums)  # `total` itself must not be overwritten
        exchange(outgoing, to, arrived, source, group)
        combine(sums, arrived, op)


def all_gather_ring(chunks: Sequence[Tensor], group: Group = None) -> None:
    """Fill chunks[r] with rank r's chunks[r], for all r, on every rank.

    Chunks may differ in size, and need not be in one piece of memory. `chunks` may be a tuple: fill
    its tensors. In step k rank r sends chunk (r - k) % n on: first its own, then always the one
    that came last.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    for step in range(n - 1):
        newest, coming = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        exchange(newest, (rank + 1) % n, coming, (rank - 1) % n, group)


def reduce_scatter_ring(chunks: Sequence[Tensor], op: str = "sum", group: Group = None) -> None:
    """Combine all ranks' chunks[r] into rank r's chunks[r], for all r.

    Chunks may differ in size, and need not be in one piece of memory. `chunks` may be a tuple:
    change its tensors. In step k rank r sends chunk (r - k - 1) % n: a sum that grows by one rank
    per step and comes to its owner last. If `op` is "avg", the owner then divides it by n.
    Afterwards the other chunks hold partial sums, which are of no use.
    """
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    for step in range(n - 1):
        newest, coming = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        exchange_and_combine(newest, (rank + 1) % n, coming, (rank - 1) % n, op, group)
    if op == "avg":
        chunks[rank].div_(n)


def all_reduce_ring(tensor: Tensor, op: str = "sum", group: Group = None) -> None:
    """Combine all ranks' tensors, on every rank: reduce-scatter n chunks, then all-gather them."""
    with flat(tensor) as vector:
        chunks = vector.tensor_split(dist.get_world_size(group))  # sizes differ by at most 1
        reduce_scatter_ring(chunks, op, group)
        all_gather_ring(chunks, group)


def exchange_in_pieces(
    outgoing: Tensor,
    to: int,
    total: Tensor,
    source: int,
    op: str,
    group: Group = None,
    piece_bytes: int = 2 << 20,
) -> None:
    """Send `outgoing` to rank `to`, and combine what rank `source` sends into `total`, piecewise.

    A piece is as many whole numbers as `piece_bytes` holds, but at least one. All pieces are
    started first; then, in their order, each is waited for and combined while the next ones still
    travel. The two tensors may differ in size, and so in their number of pieces, and need not be in
    one piece of memory.
    """
    with flat(outgoing) as leaving, flat(total) as sums:
        arrived = torch.empty_like(sums)
        size = max(1, piece_bytes // sums.element_size())  # elements of a piece
        receives = [
            dist.P2POp(dist.irecv, piece, group=group, group_peer=source)
            for piece in arrived.split(size)
        ]
        sends = [
            dist.P2POp(dist.isend, piece, group=group, group_peer=to)
            for piece in leaving.split(size)
        ]
        works = iter(dist.batch_isend_irecv(receives + sends))
        for part, other in zip(sums.split(size), arrived.split(size), strict=True):
            if work := next(works, None):  # NCCL makes one work of them all
                work.wait()
            combine(part, other, op)
        for work in works:
            work.wait()
