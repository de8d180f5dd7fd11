"""Answers to lesson 04 as students give them: RIGHT ones differ from the course's own, and WRONG
ones come with words that the verdict must hold. A name is the exercise, then what is done."""

import math

import torch
import torch.distributed as dist

from manyhands.collectives import alpha_beta, ring, trees
from manyhands.collectives.ring import (
    all_gather_ring,
    exchange,
    exchange_and_combine,
    reduce_scatter_ring,
)
from manyhands.collectives.trees import combine, flat

RIGHT: dict[str, list] = {
    "4.2": [trees.broadcast_naive],
    "4.3": [trees.broadcast_tree],
    "4.4": [trees.reduce_tree],
    "4.5": [trees.gather],
    "4.6": [ring.start_exchange],
    "4.7": [ring.all_gather_ring],
    "4.8": [ring.exchange_in_pieces],
    "4.9": [ring.reduce_scatter_ring],
    "4.10": [ring.all_reduce_ring],
    "4.11": [alpha_beta.fit_alpha_beta],
    "4.12": [alpha_beta.rounds_and_message],
}
WRONG: dict[str, list] = {todo: [] for todo in RIGHT}


def right(todo):
    return lambda answer: RIGHT[todo].append(answer) or answer


def wrong(todo, words):
    return lambda answer: WRONG[todo].append((answer, words)) or answer


def me(group):
    return dist.get_rank(group), dist.get_world_size(group)


# ---- 4.2 broadcast_naive --------------------------------------------------------------------


@right("4.2")
def naive_all_at_once(tensor, root=0, group=None):
    rank, n = me(group)
    with flat(tensor) as vector:
        if rank == root:
            others = [other for other in range(n) if other != root]
            for work in [dist.isend(vector, group=group, group_dst=other) for other in others]:
                work.wait()
        else:
            dist.irecv(vector, group=group, group_src=root).wait()


@right("4.2")
def naive_by_global_ranks(tensor, root=0, group=None):
    ranks = dist.get_process_group_ranks(group)
    buffer = tensor.clone(memory_format=torch.contiguous_format)
    if dist.get_rank() != ranks[root]:
        dist.recv(buffer, ranks[root], group)
        tensor.copy_(buffer)
        return
    for other in reversed(ranks):
        if other != dist.get_rank():
            dist.send(buffer, other, group)


@wrong("4.2", "it calls dist.broadcast")
def naive_calls_broadcast(tensor, root=0, group=None):
    dist.broadcast(tensor, group=group, group_src=root)


@wrong("4.2", "still on its way")
def naive_does_not_wait(tensor, root=0, group=None):
    rank, n = me(group)
    with flat(tensor) as vector:
        for other in range(n) if rank == root else ():
            if other != root:
                dist.isend(vector, group=group, group_dst=other)
        if rank != root:
            dist.irecv(vector, group=group, group_src=root)


@wrong("4.2", "receives from itself")
def naive_root_receives_too(tensor, root=0, group=None):
    with flat(tensor) as vector:
        if dist.get_rank(group) == root:
            for other in set(range(dist.get_world_size(group))) - {root}:
                dist.send(vector, group=group, group_dst=other)
        dist.recv(vector, group=group, group_src=root)


# ---- 4.3 broadcast_tree ---------------------------------------------------------------------


@right("4.3")
def tree_recursive(tensor, root=0, group=None):
    rank, n = me(group)
    place = (rank - root) % n

    def give(vector, first, last):  # place `first` has it; the places up to `last` want it
        if last - first < 2:
            return
        middle = (first + last + 1) // 2
        if place == first:
            dist.send(vector, group=group, group_dst=(middle + root) % n)
        elif place == middle:
            dist.recv(vector, group=group, group_src=(first + root) % n)
        give(vector, *((first, middle) if place < middle else (middle, last)))

    with flat(tensor) as vector:
        give(vector, 0, n)


@right("4.3")
def tree_by_bits(tensor, root=0, group=None):
    rank, n = me(group)
    place, mask, works = (rank - root) % n, 1, []
    buffer = tensor.contiguous()
    while mask < n and not place & mask:
        mask *= 2
    if place:
        dist.recv(buffer, group=group, group_src=(rank - mask) % n)
        tensor.copy_(buffer)
    while mask := mask // 2:
        if place + mask < n:
            works.append(dist.isend(buffer, group=group, group_dst=(rank + mask) % n))
    for work in works:
        work.wait()


@right("4.3")
def tree_in_batches(tensor, root=0, group=None):
    rank, n = me(group)
    place = (rank - root) % n
    with flat(tensor) as vector:
        for step in [2**k for k in range(math.ceil(math.log2(n)))]:
            messages = []
            if place < step and place + step < n:
                messages = [(dist.isend, (rank + step) % n)]
            elif place in range(step, 2 * step):
                messages = [(dist.irecv, (rank - step) % n)]
            ops = [dist.P2POp(op, vector, group=group, group_peer=peer) for op, peer in messages]
            for work in dist.batch_isend_irecv(ops) if ops else ():
                work.wait()


# ---- 4.4 reduce_tree ------------------------------------------------------------------------


@right("4.4")
def reduce_small_steps_first(tensor, op="sum", root=0, group=None):
    rank, n = me(group)
    place, step = (rank - root) % n, 1
    with flat(tensor) as vector:
        while step < n:
            if place % (2 * step):
                dist.send(vector, group=group, group_dst=(rank - step) % n)
                return
            if place + step < n:
                other = torch.empty_like(vector)
                dist.recv(other, group=group, group_src=(rank + step) % n)
                combine(vector, other, op)
            step *= 2
        if op == "avg":
            vector.div_(n)


@right("4.4")
def reduce_recursive(tensor, op="sum", root=0, group=None):
    rank, n = me(group)
    place = (rank - root) % n
    result = tensor.clone(memory_format=torch.contiguous_format)
    if op == "avg":
        result /= n

    def take(first, last):
        if last - first < 2:
            return
        middle = (first + last + 1) // 2
        take(first, middle)
        take(middle, last)
        if place == middle:
            dist.isend(result, group=group, group_dst=(first + root) % n).wait()
        elif place == first:
            other = torch.empty_like(result)
            dist.recv(other, group=group, group_src=(middle + root) % n)
            combine(result, other, op)

    take(0, n)
    tensor.copy_(result)


def divide(vector, n, op):
    if op == "avg":
        vector /= n


@wrong("4.4", "")
def reduce_receives_and_adds_it_twice(tensor, op="sum", root=0, group=None):
    rank, n = me(group)
    place, step = (rank - root) % n, 1 << (n - 1).bit_length()
    with flat(tensor) as vector:
        while step := step // 2:
            if step <= place < 2 * step:
                dist.send(vector, group=group, group_dst=(rank - step) % n)
            elif place < step and place + step < n:
                dist.recv(vector, group=group, group_src=(rank + step) % n)
                combine(vector, vector, op)
        divide(vector, n, op)


@wrong("4.4", "")
def reduce_maximum_from_zero(tensor, op="sum", root=0, group=None):
    if op == "max":
        tensor.clamp_(min=0)
    trees.reduce_tree(tensor, op, root, group)


# ---- 4.5 gather -----------------------------------------------------------------------------


@right("4.5")
def gather_all_at_once(chunks, root=0, group=None):
    rank = dist.get_rank(group)
    if rank != root:
        return dist.isend(chunks[rank].contiguous(), group=group, group_dst=root).wait()
    arrived = [torch.empty_like(chunk) for chunk in chunks]
    works = [
        dist.irecv(chunk, group=group, group_src=source)
        for source, chunk in enumerate(arrived)
        if source != root
    ]
    for work in works:
        work.wait()
    for source in set(range(len(chunks))) - {root}:
        chunks[source].copy_(arrived[source])


@right("4.5")
def gather_by_copies_and_no_empty_ones(chunks, root=0, group=None):
    rank, n = me(group)
    if rank == root:
        for step in range(1, n):
            source = (root + step) % n
            if chunks[source].numel():
                arrived = torch.empty_like(chunks[source])
                dist.recv(arrived, group=group, group_src=source)
                chunks[source].copy_(arrived)
    elif chunks[rank].numel():
        dist.send(chunks[rank].clone(), group=group, group_dst=root)


@wrong("4.5", "")
def gather_takes_chunks_for_equal(chunks, root=0, group=None):
    rank, n = me(group)
    if rank != root:
        dist.send(chunks[rank], group=group, group_dst=root)
        return
    for source in set(range(n)) - {root}:
        arrived = torch.empty_like(chunks[root])
        dist.recv(arrived, group=group, group_src=source)
        chunks[source].copy_(arrived[: len(chunks[source])])


@wrong("4.5", "names no sender")
def gather_from_anybody(chunks, root=0, group=None):
    rank, n = me(group)
    for source in set(range(n)) - {root}:
        with flat(chunks[source]) as vector:
            if rank == root:
                dist.recv(vector, group=group)
            elif rank == source:
                dist.send(vector, group=group, group_dst=root)


@wrong("4.5", "The list itself was changed")
def gather_rotates_the_list(chunks, root=0, group=None):
    trees.gather(chunks, root, group)
    chunks.append(chunks.pop(0))


# ---- 4.6 start_exchange ---------------------------------------------------------------------


@right("4.6")
def start_receive_first(outgoing, to, incoming, source, group=None):
    receive = dist.irecv(incoming, group=group, group_src=source)
    return [receive, dist.isend(outgoing, group=group, group_dst=to)]


@right("4.6")
def start_by_global_ranks(outgoing, to, incoming, source, group=None):
    ranks = dist.get_process_group_ranks(group)
    return (dist.isend(outgoing, ranks[to], group), dist.irecv(incoming, ranks[source], group))


@wrong("4.6", "it waits for a message")
def start_waits_for_both(outgoing, to, incoming, source, group=None):
    works = ring.start_exchange(outgoing, to, incoming, source, group)
    for work in works:
        work.wait()
    return works


@wrong("4.6", "gives None")
def start_returns_nothing(outgoing, to, incoming, source, group=None):
    ring.start_exchange(outgoing, to, incoming, source, group)


@wrong("4.6", "starts nothing")
def start_returns_orders(outgoing, to, incoming, source, group=None):
    return [
        dist.P2POp(dist.isend, outgoing, group=group, group_peer=to),
        dist.P2POp(dist.irecv, incoming, group=group, group_peer=source),
    ]


# ---- 4.7 all_gather_ring --------------------------------------------------------------------


@right("4.7")
def gather_ring_by_carrying(chunks, group=None):
    rank, n = me(group)
    carried = chunks[rank].contiguous()
    for step in range(n - 1):
        send = dist.isend(carried, group=group, group_dst=(rank + 1) % n)
        arrived = torch.empty_like(chunks[rank - step - 1])
        dist.recv(arrived, group=group, group_src=(rank + n - 1) % n)
        send.wait()
        chunks[rank - step - 1].copy_(arrived)
        carried = arrived


@right("4.7")
def gather_ring_the_other_way(chunks, group=None):
    rank, n = me(group)
    for step in range(n - 1):
        newest, coming = chunks[(rank + step) % n], chunks[(rank + step + 1) % n]
        exchange(newest, (rank - 1) % n, coming, (rank + 1) % n, group)


@right("4.7")
def gather_ring_without_empty_ones(chunks, group=None):
    rank, n = me(group)
    for step in range(1, n):
        ops = []
        with flat(chunks[rank - step + 1]) as out, flat(chunks[rank - step]) as into:
            if out.numel():
                ops.append(dist.P2POp(dist.isend, out, group=group, group_peer=(rank + 1) % n))
            if into.numel():
                ops.append(dist.P2POp(dist.irecv, into, group=group, group_peer=(rank - 1) % n))
            for work in dist.batch_isend_irecv(ops) if ops else []:
                work.wait()


@wrong("4.7", "still on its way")
def gather_ring_waits_for_the_receive_only(chunks, group=None):
    rank, n = me(group)
    for step in range(n - 1):
        dist.isend(chunks[(rank - step) % n], group=group, group_dst=(rank + 1) % n)
        dist.recv(chunks[(rank - step - 1) % n], group=group, group_src=(rank - 1) % n)


@wrong("4.7", "An index is too large")
def gather_ring_without_modulo(chunks, group=None):
    rank, n = me(group)
    for step in range(n - 1):
        newest, coming = chunks[rank + step], chunks[rank + step + 1]
        exchange(newest, (rank - 1) % n, coming, (rank + 1) % n, group)


@wrong("4.7", "The list itself was changed")
def gather_ring_rotates_the_list(chunks, group=None):
    rank, n = me(group)
    chunks[:] = chunks[rank:] + chunks[:rank]  # its own first
    for step in range(n - 1):
        exchange(chunks[-step % n], (rank + 1) % n, chunks[-step - 1], (rank - 1) % n, group)


def pieces_of(tensor, piece_bytes):
    return tensor.split(max(1, piece_bytes // tensor.element_size()))


@right("4.7")
def gather_ring_both_ways(chunks, group=None):
    rank, n = me(group)
    after, before = (rank + 1) % n, (rank - 1) % n
    for step in range(n // 2):
        exchange(chunks[(rank - step) % n], after, chunks[(rank - step - 1) % n], before, group)
        if step < (n - 1) // 2:
            exchange(chunks[(rank + step) % n], before, chunks[(rank + step + 1) % n], after, group)


# ---- 4.8 exchange_in_pieces -----------------------------------------------------------------


@right("4.8")
def pieces_two_at_a_time(outgoing, to, total, source, op, group=None, piece_bytes=4 << 20):
    outs, ins = pieces_of(outgoing.contiguous(), piece_bytes), pieces_of(total, piece_bytes)
    arrived = [torch.empty_like(piece) for piece in ins]
    sends = [dist.isend(piece, group=group, group_dst=to) for piece in outs]
    receives = [dist.irecv(arrived[0], group=group, group_src=source)]
    for index, piece in enumerate(ins):
        if index + 1 < len(ins):
            receives.append(dist.irecv(arrived[index + 1], group=group, group_src=source))
        receives[index].wait()
        combine(piece, arrived[index], op)
    for send in sends:
        send.wait()


@right("4.8")
def pieces_of_equal_size(outgoing, to, total, source, op, group=None, piece_bytes=4 << 20):
    def cut(tensor):
        size = max(1, piece_bytes // tensor.element_size())
        return tensor.tensor_split(max(1, math.ceil(len(tensor) / size)))

    arrived = torch.empty_like(total)
    receives = [dist.irecv(piece, group=group, group_src=source) for piece in cut(arrived)]
    sends = [dist.isend(piece, group=group, group_dst=to) for piece in cut(outgoing.contiguous())]
    for work, part, other in zip(receives, cut(total), cut(arrived), strict=True):
        while not work.is_completed():
            work.wait()
        part.copy_(torch.stack([part, other]).amin(0)) if op == "min" else combine(part, other, op)
    for send in sends:
        send.wait()


def pieces_started(outgoing, to, total, source, group, piece_bytes):
    arrived = torch.empty_like(total)
    outs, ins = pieces_of(outgoing, piece_bytes), pieces_of(arrived, piece_bytes)
    works = [dist.irecv(piece, group=group, group_src=source) for piece in ins]
    works += [dist.isend(piece, group=group, group_dst=to) for piece in outs]
    return arrived, works


@wrong("4.8", "")
def pieces_not_waited_for(outgoing, to, total, source, op, group=None, piece_bytes=4 << 20):
    arrived, works = pieces_started(outgoing, to, total, source, group, piece_bytes)
    combine(total, arrived, op)
    for work in works:
        work.wait()


@wrong("4.8", "has to wait until a later one has been combined")
def pieces_last_first(outgoing, to, total, source, op, group=None, piece_bytes=4 << 20):
    outs, parts = pieces_of(outgoing.contiguous(), piece_bytes), pieces_of(total, piece_bytes)
    arrived = [torch.empty_like(part) for part in parts]
    receives = [dist.irecv(one, group=group, group_src=source) for one in arrived]
    sends = [dist.isend(piece, group=group, group_dst=to) for piece in outs]
    for work, part, other in list(zip(receives, parts, arrived, strict=True))[::-1]:
        work.wait()
        combine(part, other, op)
    for send in sends:
        send.wait()


# ---- 4.9 reduce_scatter_ring ----------------------------------------------------------------


@right("4.9")
def scatter_ring_the_other_way(chunks, op="sum", group=None):
    rank, n = me(group)
    if op == "avg":
        for chunk in chunks:
            chunk.div_(n)
    for step in range(1, n):
        newest, coming = chunks[(rank + step) % n], chunks[(rank + step + 1) % n]
        exchange_and_combine(newest, (rank - 1) % n, coming, (rank + 1) % n, op, group)


@right("4.9")
def scatter_ring_carries_the_sum(chunks, op="sum", group=None):
    rank, n = me(group)
    carried = chunks[rank - 1].clone()
    for step in range(n - 1):
        mine = chunks[(rank - step - 2) % n]
        arrived = torch.empty_like(mine)
        works = [
            dist.irecv(arrived, group=group, group_src=(rank - 1) % n),
            dist.isend(carried, group=group, group_dst=(rank + 1) % n),
        ]
        for work in works:
            work.wait()
        combine(arrived, mine, op)
        carried = arrived
    chunks[rank].copy_(carried / n if op == "avg" else carried)


@wrong("4.9", "")
def scatter_ring_adds_to_the_wrong_chunk(chunks, op="sum", group=None):
    rank, n = me(group)
    for step in range(n - 1):
        newest = chunks[(rank - step - 1) % n]
        arrived = torch.empty(len(chunks[(rank - step - 2) % n]), dtype=newest.dtype)
        exchange(newest, (rank + 1) % n, arrived, (rank - 1) % n, group)
        combine(chunks[rank], arrived, op)
    if op == "avg":
        chunks[rank].div_(n)


@wrong("4.9", "`op` is None")
def scatter_ring_without_op(chunks, op="sum", group=None):
    rank, n = me(group)
    for step in range(n - 1):
        newest, coming = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        exchange_and_combine(newest, (rank + 1) % n, coming, (rank - 1) % n, group)


@wrong("4.9", "may be a tuple")
def scatter_ring_assigns_its_chunk(chunks, op="sum", group=None):
    rank, n = me(group)
    ring.reduce_scatter_ring(chunks, "sum" if op == "avg" else op, group)
    if op == "avg":
        chunks[rank] /= n  # changes the tensor, and then puts it into the list or tuple


# ---- 4.10 all_reduce_ring -------------------------------------------------------------------


@right("4.10")
def ring_in_one_loop(tensor, op="sum", group=None):
    rank, n = me(group)
    right, left = (rank + 1) % n, (rank - 1) % n
    with flat(tensor) as vector:
        chunks = vector.tensor_split(n)
        for step in range(2 * n - 2):  # starts with its own, as Baidu's and NCCL's does
            out, into = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
            arrived = torch.empty_like(into)
            exchange(out, right, arrived, left, group)
            if step < n - 1:
                combine(into, arrived, op)
            else:
                into.copy_(arrived)
        if op == "avg":
            vector /= n


@right("4.10")
def ring_with_padding(tensor, op="sum", group=None):
    n = dist.get_world_size(group)
    size = math.ceil(tensor.numel() / n)
    padded = torch.zeros(size * n, dtype=tensor.dtype)
    padded[: tensor.numel()] = tensor.flatten()
    chunks = list(padded.view(n, size))
    reduce_scatter_ring(chunks, op, group)
    all_gather_ring(chunks, group)
    tensor.copy_(padded[: tensor.numel()].view_as(tensor))
    return tensor


@right("4.10")
def ring_both_ways(tensor, op="sum", group=None):
    buffer = tensor.clone(memory_format=torch.contiguous_format).view(-1)
    chunks = buffer.tensor_split(dist.get_world_size(group))
    scatter_ring_the_other_way(chunks, op, group)
    gather_ring_by_carrying(chunks, group)
    tensor.copy_(buffer.view_as(tensor))


def ring_on(vector, op, group, chunks=None):
    chunks = chunks or vector.tensor_split(dist.get_world_size(group))
    reduce_scatter_ring(chunks, op, group)
    all_gather_ring(chunks, group)


@wrong("4.10", "it calls dist.all_reduce")
def ring_calls_all_reduce(tensor, op="sum", group=None):
    dist.all_reduce(tensor, group=group)


@right("4.10")
def ring_sums_in_float32(tensor, op="sum", group=None):
    wide = tensor.float() if tensor.dtype is torch.bfloat16 else tensor.contiguous()
    ring_on(wide.view(-1), op, group)
    tensor.copy_(wide)


# ---- 4.11 fit_alpha_beta --------------------------------------------------------------------


@right("4.11")
def fit_by_normal_equations(sizes_bytes, times_s):
    pairs = list(zip(sizes_bytes, times_s, strict=True))
    aa = sum(1 / t**2 for s, t in pairs)
    ab = sum(s / t**2 for s, t in pairs)
    bb = sum(s * s / t**2 for s, t in pairs)
    a, b = sum(1 / t for s, t in pairs), sum(s / t for s, t in pairs)
    below = aa * bb - ab * ab
    return (a * bb - b * ab) / below, (b * aa - a * ab) / below


@right("4.11")
def fit_with_polyfit(sizes_bytes, times_s):
    import numpy as np

    times = np.array(times_s)
    slope, constant = np.polyfit(np.array(sizes_bytes, dtype=float), times, 1, w=1 / times)
    return torch.tensor([constant, slope], dtype=torch.float64)


@wrong("4.11", "two numbers")
def fit_returns_a_table(sizes_bytes, times_s):
    alpha, beta = alpha_beta.fit_alpha_beta(sizes_bytes, times_s)
    return {"alpha": alpha, "beta": beta}


@wrong("4.11", "")
def fit_of_logarithms(sizes_bytes, times_s):
    import numpy as np

    with np.errstate(divide="ignore"):
        slope, constant = np.polyfit(np.log(sizes_bytes), np.log(times_s), 1)
    return constant, slope


# ---- 4.12 rounds_and_message ----------------------------------------------------------------


@right("4.12")
def price_by_table(name, world_size, nbytes):
    tree = (world_size - 1).bit_length()
    rounds = {
        "broadcast_tree": tree,
        "reduce_tree": tree,
        "all_reduce_naive": 2 * (world_size - 1),
        "all_reduce_tree": 2 * tree,
        "all_reduce_ring": 2 * (world_size - 1),
    }.get(name, world_size - 1)
    return rounds, nbytes / world_size if "ring" in name or name == "gather" else nbytes


@right("4.12")
def price_by_match(name, world_size, nbytes):
    match name.rsplit("_", 1):
        case [first, "tree"]:
            rounds, message = 0, nbytes
            while 2**rounds < world_size:
                rounds += 1
        case [first, "naive"]:
            rounds, message = world_size - 1, nbytes
        case [first, *_]:
            rounds, message = world_size - 1, nbytes / world_size
    return torch.tensor(rounds * (2 if first == "all_reduce" else 1)), message


def price(name, n, nbytes, tree=None, half=None, message=None):
    """The price, with a part in which students' answers differ."""
    rounds, right_message = alpha_beta.rounds_and_message(name, n, nbytes)
    halves = 2 if name.startswith("all_reduce") else 1
    if name.endswith("tree") and tree is not None:
        rounds = halves * tree
    if half is not None:
        rounds = half
    return rounds, right_message if message is None else message


@wrong("4.12", "")
def price_of_half_messages(name, world_size, nbytes):
    rounds, message = price(name, world_size, nbytes)
    return rounds, message / 2 if name == "broadcast_tree" else message


@wrong("4.12", "knows no such name")
def price_without_gather(name, world_size, nbytes):
    table = {name: price(name, world_size, nbytes)} if name != "gather" else {}
    return table[name]
