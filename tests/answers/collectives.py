"""Answers to lesson 04 as students give them: RIGHT ones differ from the course's own, and WRONG
ones come with words that the verdict must hold. A name is the exercise, then what is done."""

import itertools
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
    "4.1": [trees.combine],
    "4.2": [trees.broadcast_naive],
    "4.3": [trees.broadcast_tree],
    "4.4": [trees.reduce_tree],
    "4.5": [trees.gather],
    "4.6": [ring.start_exchange],
    "4.7": [ring.all_gather_ring],
    "4.8": [ring.exchange_and_combine],
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


# ---- 4.1 combine ----------------------------------------------------------------------------


@right("4.1")
def combine_by_copy(total, other, op):
    two = torch.stack([total, other])
    table = {"sum": two.sum, "avg": two.sum, "min": two.amin, "max": two.amax}
    total.copy_(table[op](0))


@right("4.1")
def combine_by_index(total, other, op):
    if op == "min":
        total[...] = torch.where(other < total, other, total)
    elif op == "max":
        total[other > total] = other[other > total]
    else:
        total.add_(other)
    return total


@wrong("4.1", "a new tensor was made")
def combine_rebinds(total, other, op):
    if op in ("sum", "avg"):
        total = total + other
    else:
        total = torch.minimum(total, other) if op == "min" else torch.maximum(total, other)


@wrong("4.1", "you return the result, but")
def combine_returns(total, other, op):
    fn = {"min": torch.minimum, "max": torch.maximum}.get(op, torch.add)
    return fn(total, other)


@wrong("4.1", "that is the sum")
def combine_only_adds(total, other, op):
    total += other


@wrong("4.1", "an average of averages")
def combine_averages_pairs(total, other, op):
    if op == "avg":
        total.add_(other).div_(2)
    else:
        combine(total, other, op)


@wrong("4.1", "that is the maximum")
def combine_swaps_min_and_max(total, other, op):
    combine(total, other, {"min": "max", "max": "min"}.get(op, op))


@wrong("4.1", "reduced to a single number")
def combine_reduces_one_tensor(total, other, op):
    if op in ("min", "max"):
        total.fill_(min(total.min(), other.min()) if op == "min" else total.max())
    else:
        total += other


@wrong("4.1", 'or "avg" left out')
def combine_forgets_avg(total, other, op):
    if op != "avg":
        combine(total, other, op)


@wrong("4.1", "the last digits are lost")
def combine_in_float(total, other, op):
    wide = total.double()
    combine(wide, other.double(), op)
    total.copy_(wide)


@wrong("4.1", "`other` has changed")
def combine_into_other(total, other, op):
    combine(other, total, op)
    total.copy_(other)


@wrong("4.1", "a new tensor was made")
def combine_new_memory(total, other, op):
    result = total.clone()
    combine(result, other, op)
    total.data = result


@wrong("4.1", "Boolean value of Tensor")
def combine_with_pythons_min(total, other, op):
    if op in ("min", "max"):
        total.copy_((min if op == "min" else max)(total, other))
    else:
        total += other


@right("4.1")
def combine_with_out(total, other, op):
    table = {"sum": torch.add, "avg": torch.add, "min": torch.minimum, "max": torch.maximum}
    table[op](total, other, out=total)


@wrong("4.1", "that of a loss has none")
def combine_element_by_element(total, other, op):
    for i in range(len(total)):
        if op in ("sum", "avg"):
            total[i] += other[i]
        else:
            total[i] = (min if op == "min" else max)(total[i], other[i])


@wrong("4.1", 'for "avg", too, it only adds')
def combine_asks_for_the_ranks(total, other, op):
    combine(total, other, op)
    if op == "avg":
        total /= dist.get_world_size()


@wrong("4.1", "your table has no such entry")
def combine_with_a_short_table(total, other, op):
    total.copy_({"sum": torch.add, "min": torch.minimum, "max": torch.maximum}[op](total, other))


@wrong("4.1", "a loop without an end")
def combine_never_ends(total, other, op):
    while True:
        pass


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


@wrong("4.2", "rank 0 was taken for the root")
def naive_root_0(tensor, root=0, group=None):
    trees.broadcast_naive(tensor, 0, group)


@wrong("4.2", "received into a copy")
def naive_into_a_copy(tensor, root=0, group=None):
    trees.broadcast_naive(tensor.clone(), root, group)


@wrong("4.2", "went through the group of all ranks")
def naive_without_group(tensor, root=0, group=None):
    trees.broadcast_naive(tensor, root)


@wrong("4.2", "with group = ranks 2, 3 and 4")
def naive_job_ranks(tensor, root=0, group=None):
    rank, n = me(group)
    with flat(tensor) as vector:
        for other in range(n) if rank == root else ():
            if other != root:
                dist.send(vector, dst=other, group=group)
        if rank != root:
            dist.recv(vector, src=root, group=group)


@wrong("4.2", "a rank sends to itself")
def naive_sends_to_itself(tensor, root=0, group=None):
    rank, n = me(group)
    with flat(tensor) as vector:
        for other in range(n) if rank == root else ():
            dist.send(vector, group=group, group_dst=other)
        if rank != root:
            dist.recv(vector, group=group, group_src=root)


@wrong("4.2", "a message with one end only")
def naive_leaves_out_the_last(tensor, root=0, group=None):
    rank, n = me(group)
    with flat(tensor) as vector:
        if rank == root:
            for other in range(n - 1):
                if other != root:
                    dist.send(vector, group=group, group_dst=other)
        else:
            dist.recv(vector, group=group, group_src=root)


@wrong("4.2", "rank 0 sends 1 message (to 1), not 3")
def naive_chain(tensor, root=0, group=None):
    rank, n = me(group)
    place = (rank - root) % n
    with flat(tensor) as vector:
        if place > 0:
            dist.recv(vector, group=group, group_src=(rank - 1) % n)
        if place < n - 1:
            dist.send(vector, group=group, group_dst=(rank + 1) % n)


@wrong("4.2", "you called dist.broadcast")
def naive_calls_broadcast(tensor, root=0, group=None):
    dist.broadcast(tensor, group=group, group_src=root)


@wrong("4.2", "name the sender")
def naive_from_anybody(tensor, root=0, group=None):  # right but for empty tensors
    rank, n = me(group)
    with flat(tensor) as vector:
        if rank != root:
            dist.recv(vector, group=group)
        for step in range(1, n if rank == root else 1):
            dist.send(vector, group=group, group_dst=(root + step) % n)


@wrong("4.2", "never waited for")
def naive_does_not_wait(tensor, root=0, group=None):
    rank, n = me(group)
    with flat(tensor) as vector:
        for other in range(n) if rank == root else ():
            if other != root:
                dist.isend(vector, group=group, group_dst=other)
        if rank != root:
            dist.irecv(vector, group=group, group_src=root)


@wrong("4.2", "not one piece of memory")
def naive_without_flat(tensor, root=0, group=None):
    rank, n = me(group)
    if rank == root:
        for other in set(range(n)) - {root}:
            dist.send(tensor, group=group, group_dst=other)
    else:
        dist.recv(tensor, group=group, group_src=root)


@wrong("4.2", "they all wait for a message that nobody sends")
def naive_everybody_receives(tensor, root=0, group=None):
    rank, n = me(group)
    with flat(tensor) as vector:
        dist.recv(vector, group=group, group_src=(root + (rank == root)) % n)


@wrong("4.2", "torch.float32, 4 bytes an element; torch.int64 has 8")
def naive_into_float32(tensor, root=0, group=None):
    if dist.get_rank(group) == root:
        return trees.broadcast_naive(tensor, root, group)
    arrived = torch.zeros(tensor.shape)
    dist.recv(arrived, group=group, group_src=root)
    tensor.copy_(arrived)


@wrong("4.2", "a rank receives from itself")
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


@wrong("4.3", "the root sends 3 message(s), not 2")
def tree_is_naive(tensor, root=0, group=None):
    trees.broadcast_naive(tensor, root, group)


@wrong("4.3", "on 4 ranks it works")
def tree_for_powers_of_two(tensor, root=0, group=None):
    rank, n = me(group)
    place, step = (rank - root) % n, 1
    with flat(tensor) as vector:
        while step < n:
            if place < step:
                dist.send(vector, group=group, group_dst=(rank + step) % n)
            elif place < 2 * step:
                dist.recv(vector, group=group, group_src=(rank - step) % n)
            step *= 2


@wrong("4.3", "rank 0 was taken for the root")
def tree_root_0(tensor, root=0, group=None):
    trees.broadcast_tree(tensor, 0, group)


@wrong("4.3", "receives 2 messages")
def tree_everybody_exchanges(tensor, root=0, group=None):
    rank, n = me(group)
    step = 1
    with flat(tensor) as vector:
        while step < n:
            place = (rank - root) % n
            coming = torch.empty_like(vector)
            exchange(vector, (rank + step) % n, coming, (rank - step) % n, group)
            if step <= place < 2 * step:
                vector.copy_(coming)
            step *= 2


@wrong("4.3", "still holds what it held before")
def tree_a_round_short(tensor, root=0, group=None):
    rank, n = me(group)
    place, step = (rank - root) % n, 1
    with flat(tensor) as vector:
        while step <= n // 2 and 2 * step <= n - 1:
            if place < step and place + step < n:
                dist.send(vector, group=group, group_dst=(rank + step) % n)
            elif step <= place < 2 * step:
                dist.recv(vector, group=group, group_src=(rank - step) % n)
            step *= 2


@wrong("4.3", "a chain, not a tree")
def tree_is_a_chain(tensor, root=0, group=None):
    naive_chain(tensor, root, group)


@wrong("4.3", "take 3 rounds, not 2")
def tree_smallest_branch_first(tensor, root=0, group=None):
    rank, n = me(group)
    place, step = (rank - root) % n, 1
    low = place & -place if place else 8
    with flat(tensor) as vector:
        if place:
            dist.recv(vector, group=group, group_src=(rank - low) % n)
        while step < low:
            if place + step < n:
                dist.send(vector, group=group, group_dst=(rank + step) % n)
            step *= 2


@wrong("4.3", "with group = ranks 2, 3 and 4")
def tree_rank_of_the_job(tensor, root=0, group=None):
    rank, n = dist.get_rank(), dist.get_world_size(group)
    place, step = (rank - root) % n, 1
    with flat(tensor) as vector:
        while step < n:
            if place < step and place + step < n:
                dist.send(vector, group=group, group_dst=(rank + step) % n)
            elif step <= place < 2 * step:
                dist.recv(vector, group=group, group_src=(rank - step) % n)
            step *= 2


def tree_with(tensor, root, group, peer=lambda rank, step, n: (rank + step) % n, grow=2, stop=None):
    """The tree, with the parts in which students' answers differ."""
    rank, n = me(group)
    place, step = (rank - root) % n, 1
    with flat(tensor) as vector:
        while step < (stop(n) if stop else n):
            if place < step and place + step < n:
                dist.send(vector, group=group, group_dst=peer(rank, step, n))
            elif step <= place < 2 * step:
                dist.recv(vector, group=group, group_src=peer(rank, -step, n))
            step *= grow


@wrong("4.3", "but the ranks of the group are 0 to 3")
def tree_without_modulo(tensor, root=0, group=None):
    tree_with(tensor, root, group, lambda rank, step, n: rank + step)


@wrong("4.3", "is no rank: (place + root) % n")
def tree_takes_places_for_ranks(tensor, root=0, group=None):
    tree_with(tensor, root, group, lambda rank, step, n: ((rank - root) % n + step) % n)


@wrong("4.3", "messages so far, and goes on")
def tree_never_doubles(tensor, root=0, group=None):
    tree_with(tensor, root, group, grow=1)


@wrong("4.3", "the last round is missing")
def tree_with_rounds_cut_off(tensor, root=0, group=None):
    tree_with(tensor, root, group, stop=lambda n: 2 ** int(math.log2(n)))


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


@right("4.4")
def reduce_receives_posted_early(tensor, op="sum", root=0, group=None):
    rank, n = me(group)
    place = (rank - root) % n
    with flat(tensor) as vector:
        steps = [1 << k for k in range(n.bit_length())]
        children = []
        for step in steps:
            if place & step or place + step >= n:
                break
            children.append(place + step)
        if place == 0:
            children = [step for step in steps if step < n]
        parts = [torch.empty_like(vector) for _ in children]
        works = [
            dist.irecv(part, group=group, group_src=(child + root) % n)
            for part, child in zip(parts, children, strict=True)
        ]
        for work, part in zip(works, parts, strict=True):
            work.wait()
            combine(vector, part, op)
        if place:
            parent = place - (place & -place)
            dist.send(vector, group=group, group_dst=(parent + root) % n)
        elif op == "avg":
            vector /= n


def reduce_with(
    tensor, op, root, group, take=combine, final=lambda v, n, op: None, start=None, early=False
):
    """The tree, with the parts in which students' answers differ."""
    rank, n = me(group)
    place = (rank - root) % n
    step = start(n) if start else 1 << (n - 1).bit_length()
    with flat(tensor) as vector:
        while step := step // 2:
            if step <= place < 2 * step:
                dist.send(vector, group=group, group_dst=(rank - step) % n)
            elif place < step and place + step < n:
                other = torch.zeros_like(vector)
                work = dist.irecv(other, group=group, group_src=(rank + step) % n)
                if early:
                    take(vector, other, op)
                work.wait()
                if not early:
                    take(vector, other, op)
        final(vector, n, op)


def divide(vector, n, op):
    if op == "avg":
        vector /= n


@wrong("4.4", "rank 0 was taken for the root")
def reduce_to_0(tensor, op="sum", root=0, group=None):
    trees.reduce_tree(tensor, op, 0, group)


@wrong("4.4", "at every hop")
def reduce_halves_at_every_hop(tensor, op="sum", root=0, group=None):
    def take(vector, other, op):
        combine(vector, other, op)
        if op == "avg":
            vector /= 2

    reduce_with(tensor, op, root, group, take)


@wrong("4.4", "the division happens more than once")
def reduce_divides_twice(tensor, op="sum", root=0, group=None):
    if op == "avg":
        tensor /= dist.get_world_size(group)
    trees.reduce_tree(tensor, op, root, group)


@wrong("4.4", 'for "avg", combine only adds')
def reduce_does_not_divide(tensor, op="sum", root=0, group=None):
    reduce_with(tensor, op, root, group)


@wrong("4.4", "overwrote what was there")
def reduce_receives_over_its_own(tensor, op="sum", root=0, group=None):
    reduce_with(tensor, op, root, group, lambda v, other, op: v.copy_(other), divide)


@wrong("4.4", "before the others' had come in")
def reduce_small_steps_of_a_broadcast(tensor, op="sum", root=0, group=None):
    rank, n = me(group)
    place, step = (rank - root) % n, 1
    with flat(tensor) as vector:
        other = torch.empty_like(vector)
        while step < n:
            if step <= place < 2 * step:
                dist.send(vector, group=group, group_dst=(rank - step) % n)
            elif place < step and place + step < n:
                dist.recv(other, group=group, group_src=(rank + step) % n)
                combine(vector, other, op)
            step *= 2
        if op == "avg":
            vector /= n


@wrong("4.4", "without rank 4's")
def reduce_for_powers_of_two(tensor, op="sum", root=0, group=None):
    start = lambda n: 2 ** int(math.log2(n))  # noqa: E731
    reduce_with(tensor, op, root, group, final=divide, start=start)


@wrong("4.4", "the root receives 3 message(s), not 2")
def reduce_all_to_the_root(tensor, op="sum", root=0, group=None):
    rank, n = me(group)
    with flat(tensor) as vector:
        if rank != root:
            dist.send(vector, group=group, group_dst=root)
            return
        other = torch.empty_like(vector)
        for source in set(range(n)) - {root}:
            dist.recv(other, group=group, group_src=source)
            combine(vector, other, op)
        divide(vector, n, op)


@wrong("4.4", "a chain, not a tree")
def reduce_chain(tensor, op="sum", root=0, group=None):
    rank, n = me(group)
    place = (rank - root) % n
    with flat(tensor) as vector:
        if place < n - 1:
            other = torch.empty_like(vector)
            dist.recv(other, group=group, group_src=(rank + 1) % n)
            combine(vector, other, op)
        if place:
            dist.send(vector, group=group, group_dst=(rank - 1) % n)
        else:
            divide(vector, n, op)


@wrong("4.4", "`op` is not looked at")
def reduce_always_adds(tensor, op="sum", root=0, group=None):
    def take(vector, other, op):
        vector += other

    reduce_with(tensor, op, root, group, take, divide)


@wrong("4.4", "a name bound to a new one")
def reduce_loses_in_place(tensor, op="sum", root=0, group=None):
    def take(vector, other, op):
        vector = vector + other

    reduce_with(tensor, op, root, group, take, divide)


@wrong("4.4", "not the sum of all")
def reduce_uses_it_too_early(tensor, op="sum", root=0, group=None):
    reduce_with(tensor, op, root, group, final=divide, early=True)


@wrong("4.4", "has then done its part")
def reduce_down_again(tensor, op="sum", root=0, group=None):
    trees.reduce_tree(tensor, op, root, group)
    trees.broadcast_tree(tensor, root, group)


@wrong("4.4", "a rank is a whole number")
def reduce_with_half_ranks(tensor, op="sum", root=0, group=None):
    rank, n = me(group)
    step = 2 ** math.ceil(math.log2(n)) / 2
    with flat(tensor) as vector:
        while step >= 1:
            if step <= rank < 2 * step:
                dist.send(vector, group=group, group_dst=rank - step)
            elif rank < step and rank + step < n:
                dist.recv(torch.empty_like(vector), group=group, group_src=rank + step)
            step /= 2


@wrong("4.4", "received over it")
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


@wrong("4.4", "combine was not called")
def reduce_combines_nothing(tensor, op="sum", root=0, group=None):
    reduce_with(tensor, op, root, group, lambda v, other, op: None, divide)


@wrong("4.4", "both sides of a message must have one type")
def reduce_into_float32(tensor, op="sum", root=0, group=None):
    rank, n = me(group)
    place, step = (rank - root) % n, 1 << (n - 1).bit_length()
    with flat(tensor) as vector:
        while step := step // 2:
            other = torch.zeros(vector.shape)
            if step <= place < 2 * step:
                dist.send(vector, group=group, group_dst=(rank - step) % n)
            elif place < step and place + step < n:
                dist.recv(other, group=group, group_src=(rank + step) % n)
                combine(vector, other, op)
        divide(vector, n, op)


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


@wrong("4.5", "rank 0 was taken for the root")
def gather_to_0(chunks, root=0, group=None):
    trees.gather(chunks, 0, group)


@wrong("4.5", "the list got a new tensor")
def gather_into_the_list(chunks, root=0, group=None):
    rank, n = me(group)
    if rank != root:
        dist.send(chunks[rank], group=group, group_dst=root)
        return
    for source in set(range(n)) - {root}:
        arrived = torch.empty_like(chunks[source])
        dist.recv(arrived, group=group, group_src=source)
        chunks[source] = arrived


@wrong("4.5", "went to the wrong place")
def gather_sends_the_roots_chunk(chunks, root=0, group=None):
    rank, n = me(group)
    if rank != root:
        dist.send(chunks[root], group=group, group_dst=root)
        return
    for source in set(range(n)) - {root}:
        dist.recv(chunks[source], group=group, group_src=source)


@wrong("4.5", "rank 0's own chunks[0] has changed")
def gather_counts_from_the_front(chunks, root=0, group=None):
    rank, n = me(group)
    if rank != root:
        dist.send(chunks[rank], group=group, group_dst=root)
        return
    others = [source for source in range(n) if source != root]
    for index, source in enumerate(others):
        dist.recv(chunks[index], group=group, group_src=source)


@wrong("4.5", "both sides of a message take the same number of elements")
def gather_takes_chunks_for_equal(chunks, root=0, group=None):
    rank, n = me(group)
    if rank != root:
        dist.send(chunks[rank], group=group, group_dst=root)
        return
    for source in set(range(n)) - {root}:
        arrived = torch.empty_like(chunks[root])
        dist.recv(arrived, group=group, group_src=source)
        chunks[source].copy_(arrived[: len(chunks[source])])


@wrong("4.5", "a rank receives from itself")
def gather_from_itself(chunks, root=0, group=None):
    rank, n = me(group)
    if rank == root:
        for source in range(n):
            dist.recv(chunks[source], group=group, group_src=source)
    else:
        dist.send(chunks[rank], group=group, group_dst=root)


@wrong("4.5", "the others need no chunk of anybody")
def gather_to_everybody(chunks, root=0, group=None):
    all_gather_ring(chunks, group)


@wrong("4.5", "sends a message of 112 bytes, not 28")
def gather_sends_everything(chunks, root=0, group=None):
    rank, n = me(group)
    whole = torch.cat(list(chunks))
    if rank != root:
        dist.send(whole, group=group, group_dst=root)
        return
    other = torch.empty_like(whole)
    for source in set(range(n)) - {root}:
        dist.recv(other, group=group, group_src=source)
        chunks[source].copy_(other.split([len(chunk) for chunk in chunks])[source])


@wrong("4.5", "never waited for")
def gather_does_not_wait(chunks, root=0, group=None):
    rank, n = me(group)
    if rank != root:
        dist.send(chunks[rank], group=group, group_dst=root)
        return
    for source in set(range(n)) - {root}:
        dist.irecv(chunks[source], group=group, group_src=source)


@wrong("4.5", "with group = ranks")
def gather_job_ranks(chunks, root=0, group=None):
    rank, n = me(group)
    for source in set(range(n)) - {root}:
        with flat(chunks[source]) as vector:
            if rank == root:
                dist.recv(vector, source, group)
            elif rank == source:
                dist.send(vector, root, group)


@wrong("4.5", "a message is - inside")
def gather_without_flat(chunks, root=0, group=None):
    rank, n = me(group)
    if rank != root:
        dist.send(chunks[rank], group=group, group_dst=root)
        return
    for source in set(range(n)) - {root}:
        dist.recv(chunks[source], group=group, group_src=source)


@wrong("4.5", "brings it back when its block ends")
def gather_waits_outside_of_flat(chunks, root=0, group=None):
    rank, n = me(group)
    works = []
    for source in set(range(n)) - {root}:
        if rank == root:
            with flat(chunks[source]) as vector:
                works.append(dist.irecv(vector, group=group, group_src=source))
        elif rank == source:
            with flat(chunks[rank]) as vector:
                works.append(dist.isend(vector, group=group, group_dst=root))
    for work in works:
        work.wait()


@wrong("4.5", "the root, rank 0, sends 3 messages and receives none")
def gather_with_roles_swapped(chunks, root=0, group=None):
    rank, n = me(group)
    if rank != root:
        with flat(chunks[rank]) as vector:
            dist.recv(vector, group=group, group_src=root)
        return
    for other in set(range(n)) - {root}:
        with flat(chunks[other]) as vector:
            dist.send(vector, group=group, group_dst=other)


@wrong("4.5", "a recv names no sender")
def gather_from_anybody(chunks, root=0, group=None):
    rank, n = me(group)
    for source in set(range(n)) - {root}:
        with flat(chunks[source]) as vector:
            if rank == root:
                dist.recv(vector, group=group)
            elif rank == source:
                dist.send(vector, group=group, group_dst=root)


# ---- 4.6 start_exchange ---------------------------------------------------------------------


@right("4.6")
def start_receive_first(outgoing, to, incoming, source, group=None):
    receive = dist.irecv(incoming, group=group, group_src=source)
    return [receive, dist.isend(outgoing, group=group, group_dst=to)]


@right("4.6")
def start_by_global_ranks(outgoing, to, incoming, source, group=None):
    ranks = dist.get_process_group_ranks(group)
    return (dist.isend(outgoing, ranks[to], group), dist.irecv(incoming, ranks[source], group))


@wrong("4.6", "for partners that wait here as well")
def start_sends_first(outgoing, to, incoming, source, group=None):
    dist.send(outgoing, group=group, group_dst=to)
    dist.recv(incoming, group=group, group_src=source)
    return []


@wrong("4.6", "it waits for a message")
def start_even_ranks_send_first(outgoing, to, incoming, source, group=None):
    if dist.get_rank(group) % 2 == 0:
        dist.send(outgoing, group=group, group_dst=to)
    dist.recv(incoming, group=group, group_src=source)
    if dist.get_rank(group) % 2:
        dist.send(outgoing, group=group, group_dst=to)
    return []


@wrong("4.6", "isend and irecv only start, and the caller waits")
def start_waits_for_the_receive(outgoing, to, incoming, source, group=None):
    work = dist.isend(outgoing, group=group, group_dst=to)
    dist.recv(incoming, group=group, group_src=source)
    return [work]


@wrong("4.6", "it shall return at once")
def start_waits_for_both(outgoing, to, incoming, source, group=None):
    works = ring.start_exchange(outgoing, to, incoming, source, group)
    for work in works:
        work.wait()
    return works


@wrong("4.6", "returned a NoneType")
def start_returns_nothing(outgoing, to, incoming, source, group=None):
    ring.start_exchange(outgoing, to, incoming, source, group)


@wrong("4.6", "returned 1 of the 2 works")
def start_returns_the_receive(outgoing, to, incoming, source, group=None):
    return ring.start_exchange(outgoing, to, incoming, source, group)[1:]


@wrong("4.6", "returned a Work")
def start_returns_one_work(outgoing, to, incoming, source, group=None):
    return ring.start_exchange(outgoing, to, incoming, source, group)[0]


@wrong("4.6", "an exchange is one message out and one in")
def start_mixes_up_to_and_source(outgoing, to, incoming, source, group=None):
    return [
        dist.isend(outgoing, group=group, group_dst=to),
        dist.irecv(incoming, group=group, group_src=to),
    ]


@wrong("4.6", "received into another tensor")
def start_receives_a_copy(outgoing, to, incoming, source, group=None):
    return ring.start_exchange(outgoing, to, incoming.clone(), source, group)


@wrong("4.6", "went through the group of all ranks")
def start_without_group(outgoing, to, incoming, source, group=None):
    return [dist.isend(outgoing, to), dist.irecv(incoming, source)]


@wrong("4.6", "a P2POp is only an order form")
def start_returns_orders(outgoing, to, incoming, source, group=None):
    return [
        dist.P2POp(dist.isend, outgoing, group=group, group_peer=to),
        dist.P2POp(dist.irecv, incoming, group=group, group_peer=source),
    ]


@wrong("4.6", "a function with `yield` has not run yet")
def start_yields(outgoing, to, incoming, source, group=None):
    yield dist.isend(outgoing, group=group, group_dst=to)
    yield dist.irecv(incoming, group=group, group_src=source)


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


@right("4.7")
def gather_ring_by_odd_and_even(chunks, group=None):
    rank, n = me(group)
    for step in range(n - 1):

        def send(step=step):
            with flat(chunks[(rank - step) % n]) as vector:
                dist.send(vector, group=group, group_dst=(rank + 1) % n)

        if rank % 2 == 0:
            send()
        with flat(chunks[(rank - step - 1) % n]) as vector:
            dist.recv(vector, group=group, group_src=(rank - 1) % n)
        if rank % 2:
            send()


@wrong("4.7", "every step sends the rank's own chunk again")
def gather_ring_always_its_own(chunks, group=None):
    rank, n = me(group)
    for _ in range(n - 1):
        exchange(chunks[rank], (rank + 1) % n, chunks[(rank - 1) % n], (rank - 1) % n, group)


@wrong("4.7", "in step 0 rank 0 sends its chunks[0], and rank 1 takes it in as chunks[2]")
def gather_ring_places_off_by_one(chunks, group=None):
    rank, n = me(group)
    for step in range(n - 1):
        newest, coming = chunks[(rank - step) % n], chunks[(rank + step + 1) % n]
        exchange(newest, (rank + 1) % n, coming, (rank - 1) % n, group)


@wrong("4.7", "in step 0 rank 0 sends its chunks[3], and rank 1 takes it in as chunks[1]")
def gather_ring_into_its_own(chunks, group=None):
    rank, n = me(group)
    for step in range(n - 1):
        newest, coming = chunks[(rank - step - 1) % n], chunks[(rank - step) % n]
        exchange(newest, (rank + 1) % n, coming, (rank - 1) % n, group)


@wrong("4.7", "one step too many")
def gather_ring_n_steps(chunks, group=None):
    rank, n = me(group)
    for step in range(n if n > 1 else 0):
        newest, coming = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        exchange(newest, (rank + 1) % n, coming, (rank - 1) % n, group)


@wrong("4.7", "a hang: they all send")
def gather_ring_sends_first(chunks, group=None):
    rank, n = me(group)
    for step in range(n - 1):
        dist.send(chunks[(rank - step) % n], group=group, group_dst=(rank + 1) % n)
        dist.recv(chunks[(rank - step - 1) % n], group=group, group_src=(rank - 1) % n)


@wrong("4.7", "that is no ring")
def gather_ring_to_everybody(chunks, group=None):
    rank, n = me(group)
    for step in range(1, n):
        exchange(
            chunks[rank], (rank + step) % n, chunks[(rank - step) % n], (rank - step) % n, group
        )


@wrong("4.7", "the list got a new tensor")
def gather_ring_into_the_list(chunks, group=None):
    rank, n = me(group)
    for step in range(n - 1):
        coming = torch.empty_like(chunks[(rank - step - 1) % n])
        exchange(chunks[(rank - step) % n], (rank + 1) % n, coming, (rank - 1) % n, group)
        chunks[(rank - step - 1) % n] = coming


@wrong("4.7", "bytes, not 84")
def gather_ring_sends_everything(chunks, group=None):
    rank, n = me(group)
    for step in range(n - 1):
        whole = torch.cat(list(chunks))
        other = torch.empty_like(whole)
        exchange(whole, (rank + 1) % n, other, (rank - 1) % n, group)
        index = (rank - step - 1) % n
        chunks[index].copy_(other.split([len(chunk) for chunk in chunks])[index])


@wrong("4.7", "never waited for")
def gather_ring_waits_for_the_receive_only(chunks, group=None):
    rank, n = me(group)
    for step in range(n - 1):
        dist.isend(chunks[(rank - step) % n], group=group, group_dst=(rank + 1) % n)
        dist.recv(chunks[(rank - step - 1) % n], group=group, group_src=(rank - 1) % n)


@wrong("4.7", "index that is not taken modulo n")
def gather_ring_without_modulo(chunks, group=None):
    rank, n = me(group)
    for step in range(n - 1):
        newest, coming = chunks[rank + step], chunks[rank + step + 1]
        exchange(newest, (rank - 1) % n, coming, (rank + 1) % n, group)


@wrong("4.7", "with group = ranks 2, 3 and 4")
def gather_ring_rank_of_the_job(chunks, group=None):
    rank, n = dist.get_rank(), len(chunks)
    for step in range(n - 1):
        newest, coming = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        exchange(newest, (rank + 1) % n, coming, (rank - 1) % n, group)


@wrong("4.7", "or leave out those that do not exist")
def gather_ring_without_modulo_of_ranks(chunks, group=None):
    rank, n = me(group)
    for step in range(n - 1):
        exchange(chunks[rank - step], rank + 1, chunks[rank - step - 1], rank - 1, group)


@wrong("4.7", "in step 0 rank 0 sends its chunks[0], and rank 1 takes it in as chunks[2]")
def gather_ring_counts_up(chunks, group=None):
    rank, n = me(group)
    for step in range(n - 1):
        newest, coming = chunks[(rank + step) % n], chunks[(rank + step + 1) % n]
        exchange(newest, (rank + 1) % n, coming, (rank - 1) % n, group)


@wrong("4.7", "sends chunks[3], before it has waited for it")
def gather_ring_waits_at_the_end(chunks, group=None):
    rank, n = me(group)
    works = []
    for step in range(n - 1):
        newest, coming = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        works += ring.start_exchange(newest, (rank + 1) % n, coming, (rank - 1) % n, group)
    for work in works:
        work.wait()


@wrong("4.7", "in step 0 rank 0 sends chunks[3], which never came")
def gather_ring_leaves_out_the_first_step(chunks, group=None):
    rank, n = me(group)
    for step in range(1, n - 1):
        newest, coming = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        exchange(newest, (rank + 1) % n, coming, (rank - 1) % n, group)


@wrong("4.7", "a message is - inside")
def gather_ring_without_flat(chunks, group=None):
    rank, n = me(group)
    for step in range(n - 1):
        send = dist.isend(chunks[(rank - step) % n], group=group, group_dst=(rank + 1) % n)
        dist.recv(chunks[(rank - step - 1) % n], group=group, group_src=(rank - 1) % n)
        send.wait()


@wrong("4.7", "in gather_ring_passes_no_group_on:  exchange(")
def gather_ring_passes_no_group_on(chunks, group=None):
    rank, n = me(group)
    for step in range(n - 1):
        newest, coming = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        exchange(newest, (rank + 1) % n, coming, (rank - 1) % n)


# ---- 4.8 exchange_and_combine ---------------------------------------------------------------


def pieces_of(tensor, piece_bytes):
    return tensor.split(max(1, piece_bytes // tensor.element_size()))


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


@wrong("4.8", "alone")
def pieces_over_its_own(outgoing, to, total, source, op, group=None, piece_bytes=4 << 20):
    for out, into in zip(
        pieces_of(outgoing, piece_bytes), pieces_of(total, piece_bytes), strict=True
    ):
        exchange(out, to, into, source, group)


@wrong("4.8", "a message of 48 bytes")
def pieces_only_one(outgoing, to, total, source, op, group=None, piece_bytes=4 << 20):
    arrived = torch.empty_like(total)
    exchange(outgoing, to, arrived, source, group)
    combine(total, arrived, op)


@wrong("4.8", "before the second is under way")
def pieces_one_by_one(outgoing, to, total, source, op, group=None, piece_bytes=4 << 20):
    for out, part in zip(
        pieces_of(outgoing, piece_bytes), pieces_of(total, piece_bytes), strict=True
    ):
        arrived = torch.empty_like(part)
        exchange(out, to, arrived, source, group)
        combine(part, arrived, op)


def pieces_started(outgoing, to, total, source, group, piece_bytes):
    arrived = torch.empty_like(total)
    outs, ins = pieces_of(outgoing, piece_bytes), pieces_of(arrived, piece_bytes)
    works = [dist.irecv(piece, group=group, group_src=source) for piece in ins]
    works += [dist.isend(piece, group=group, group_dst=to) for piece in outs]
    return arrived, works


@wrong("4.8", "different numbers of pieces")
def pieces_in_pairs(outgoing, to, total, source, op, group=None, piece_bytes=4 << 20):
    arrived = torch.empty_like(total)
    outs, ins = pieces_of(outgoing, piece_bytes), pieces_of(arrived, piece_bytes)
    works = [ring.start_exchange(o, to, i, source, group) for o, i in zip(outs, ins, strict=True)]
    for pair, part, other in zip(works, pieces_of(total, piece_bytes), ins, strict=True):
        for work in pair:
            work.wait()
        combine(part, other, op)


@wrong("4.8", "zip ends with the shorter list")
def pieces_in_pairs_not_strict(outgoing, to, total, source, op, group=None, piece_bytes=4 << 20):
    arrived = torch.empty_like(total)
    outs, ins = pieces_of(outgoing, piece_bytes), pieces_of(arrived, piece_bytes)
    works = [ring.start_exchange(o, to, i, source, group) for o, i in zip(outs, ins, strict=False)]
    for pair, part, other in zip(works, pieces_of(total, piece_bytes), ins, strict=False):
        for work in pair:
            work.wait()
        combine(part, other, op)


@wrong("4.8", "waits for all pieces before it adds the first")
def pieces_all_waited_for(outgoing, to, total, source, op, group=None, piece_bytes=4 << 20):
    arrived, works = pieces_started(outgoing, to, total, source, group, piece_bytes)
    for work in works:
        work.wait()
    combine(total, arrived, op)


@wrong("4.8", "combines before it has waited")
def pieces_not_waited_for(outgoing, to, total, source, op, group=None, piece_bytes=4 << 20):
    arrived, works = pieces_started(outgoing, to, total, source, group, piece_bytes)
    combine(total, arrived, op)
    for work in works:
        work.wait()


@wrong("4.8", "counted in elements")
def pieces_in_elements(outgoing, to, total, source, op, group=None, piece_bytes=4 << 20):
    item = total.element_size()
    ring.exchange_and_combine(outgoing, to, total, source, op, group, piece_bytes * item)


@wrong("4.8", "some pieces are missing")
def pieces_in_one_memory(outgoing, to, total, source, op, group=None, piece_bytes=4 << 20):
    size = max(1, piece_bytes // total.element_size())
    arrived = torch.empty_like(total[:size])
    works = []
    for out, part in zip(outgoing.split(size), total.split(size), strict=True):
        works.append(ring.start_exchange(out, to, arrived[: len(part)], source, group))
    for pair in works:
        for work in pair:
            work.wait()
    for part in total.split(size):
        combine(part, arrived[: len(part)], op)


@wrong("4.8", "`op` is not passed on")
def pieces_always_added(outgoing, to, total, source, op, group=None, piece_bytes=4 << 20):
    ring.exchange_and_combine(outgoing, to, total, source, "sum", group, piece_bytes)


@wrong("4.8", "every hop only adds")
def pieces_averaged(outgoing, to, total, source, op, group=None, piece_bytes=4 << 20):
    ring.exchange_and_combine(outgoing, to, total, source, op, group, piece_bytes)
    if op == "avg":
        total /= 2


@wrong("4.8", "`total` is as it was")
def pieces_into_a_new_total(outgoing, to, total, source, op, group=None, piece_bytes=4 << 20):
    arrived, works = pieces_started(outgoing, to, total, source, group, piece_bytes)
    for work in works:
        work.wait()
    total = total + arrived


@wrong("4.8", "sends 6 pieces, not 3")
def pieces_half_as_large(outgoing, to, total, source, op, group=None, piece_bytes=4 << 20):
    ring.exchange_and_combine(outgoing, to, total, source, op, group, piece_bytes // 2)


@wrong("4.8", "split")
def pieces_smaller_than_an_element(
    outgoing, to, total, source, op, group=None, piece_bytes=4 << 20
):
    size = piece_bytes // total.element_size()
    outs, parts = outgoing.split(size), total.split(size)
    arrived = [torch.empty_like(part) for part in parts]
    receives = [dist.irecv(piece, group=group, group_src=source) for piece in arrived]
    sends = [dist.isend(piece, group=group, group_dst=to) for piece in outs]
    for work, part, other in zip(receives, parts, arrived, strict=True):
        work.wait()
        combine(part, other, op)
    for work in sends:
        work.wait()


@wrong("4.8", "went through the group of all ranks")
def pieces_without_group(outgoing, to, total, source, op, group=None, piece_bytes=4 << 20):
    ring.exchange_and_combine(outgoing, to, total, source, op, None, piece_bytes)


@wrong("4.8", "zip ends with the shorter list")
def pieces_zipped_to_the_shorter(outgoing, to, total, source, op, group=None, piece_bytes=4 << 20):
    with flat(outgoing) as leaving, flat(total) as sums:
        outs, ins = pieces_of(leaving, piece_bytes), pieces_of(sums, piece_bytes)
        buffers = [torch.empty_like(piece) for piece in ins]
        works = [
            ring.start_exchange(out, to, buffer, source, group)
            for out, buffer in zip(outs, buffers, strict=False)
        ]
        for pair, buffer, piece in zip(works, buffers, ins, strict=False):
            for work in pair:
                work.wait()
            combine(piece, buffer, op)


@wrong("4.8", "has an empty piece")
def pieces_zipped_to_the_longer(outgoing, to, total, source, op, group=None, piece_bytes=4 << 20):
    with flat(outgoing) as leaving, flat(total) as sums:
        outs, ins = pieces_of(leaving, piece_bytes), pieces_of(sums, piece_bytes)
        buffers = [torch.empty_like(piece) for piece in ins]
        works = [
            ring.start_exchange(out, to, buffer, source, group)
            for out, buffer in itertools.zip_longest(outs, buffers, fillvalue=leaving[:0])
        ]
        for pair, buffer, piece in zip(works, buffers, ins, strict=False):
            for work in pair:
                work.wait()
            combine(piece, buffer, op)
        for pair in works[len(ins) :]:
            for work in pair:
                work.wait()


@wrong("4.8", "a message is - inside")
def pieces_reshaped(outgoing, to, total, source, op, group=None, piece_bytes=4 << 20):
    outgoing, total = outgoing.reshape(-1), total.reshape(-1)
    arrived = torch.empty_like(total)
    ins = pieces_of(arrived, piece_bytes)
    works = [dist.irecv(piece, group=group, group_src=source) for piece in ins]
    works += [dist.isend(o, group=group, group_dst=to) for o in pieces_of(outgoing, piece_bytes)]
    for work, part, other in zip(works, pieces_of(total, piece_bytes), ins, strict=False):
        work.wait()
        combine(part, other, op)
    for work in works[len(ins) :]:
        work.wait()


@wrong("4.8", "alone or with itself")
def pieces_over_its_own_and_added(outgoing, to, total, source, op, group=None, piece_bytes=4 << 20):
    for out, into in zip(
        pieces_of(outgoing, piece_bytes), pieces_of(total, piece_bytes), strict=True
    ):
        exchange(out, to, into, source, group)
        combine(into, into, op)


# ---- 4.9 reduce_scatter_ring ----------------------------------------------------------------


@right("4.9")
def scatter_ring_by_counting_down(chunks, op="sum", group=None):
    rank, n = me(group)
    index = rank
    for _ in range(n - 1):
        index -= 1
        arrived = torch.empty_like(chunks[index - 1])
        exchange(chunks[index], (rank + 1) % n, arrived, (rank - 1) % n, group)
        combine(chunks[index - 1], arrived, op)
    if op == "avg":
        for chunk in chunks:
            chunk /= n


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


@wrong("4.9", "ends with chunks[1] complete, not with chunks[0]")
def scatter_ring_starts_with_its_own(chunks, op="sum", group=None):
    rank, n = me(group)
    for step in range(n - 1):
        newest, coming = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        exchange_and_combine(newest, (rank + 1) % n, coming, (rank - 1) % n, op, group)
    if op == "avg":
        chunks[(rank + 1) % n].div_(n)


@wrong("4.9", "their part got lost")
def scatter_ring_overwrites(chunks, op="sum", group=None):
    rank, n = me(group)
    for step in range(n - 1):
        newest, coming = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        exchange(newest, (rank + 1) % n, coming, (rank - 1) % n, group)
    if op == "avg":
        chunks[rank].div_(n)


@wrong("4.9", "divide by n once, at the end")
def scatter_ring_divides_at_every_hop(chunks, op="sum", group=None):
    rank, n = me(group)
    for step in range(n - 1):
        newest, coming = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        exchange_and_combine(newest, (rank + 1) % n, coming, (rank - 1) % n, op, group)
        if op == "avg":
            coming /= n


@wrong("4.9", 'for "avg", combine only adds')
def scatter_ring_does_not_divide(chunks, op="sum", group=None):
    rank, n = me(group)
    for step in range(n - 1):
        newest, coming = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        exchange_and_combine(newest, (rank + 1) % n, coming, (rank - 1) % n, op, group)


@wrong("4.9", "one step too many")
def scatter_ring_n_steps(chunks, op="sum", group=None):
    rank, n = me(group)
    for step in range(n if n > 1 else 0):
        newest, coming = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        exchange_and_combine(newest, (rank + 1) % n, coming, (rank - 1) % n, op, group)
    if op == "avg":
        chunks[rank].div_(n)


@wrong("4.9", "`op` is not looked at")
def scatter_ring_always_adds(chunks, op="sum", group=None):
    rank, n = me(group)
    reduce_scatter_ring(chunks, "sum", group)
    if op == "avg":
        chunks[rank].div_(n)


@wrong("4.9", "that is no ring")
def scatter_ring_straight_to_the_owner(chunks, op="sum", group=None):
    rank, n = me(group)
    for step in range(1, n):
        exchange_and_combine(
            chunks[(rank + step) % n], (rank + step) % n, chunks[rank], (rank - step) % n, op, group
        )
    if op == "avg":
        chunks[rank].div_(n)


@wrong("4.9", "more than one chunk travels in a step")
def scatter_ring_sends_everything(chunks, op="sum", group=None):
    rank, n = me(group)
    total = torch.cat(list(chunks))
    carried = total.clone()
    for _ in range(n - 1):
        arrived = torch.empty_like(total)
        exchange(carried, (rank + 1) % n, arrived, (rank - 1) % n, group)
        combine(total, arrived, op)
        carried = arrived
    if op == "avg":
        total /= n
    chunks[rank].copy_(total.split([len(chunk) for chunk in chunks])[rank])


@wrong("4.9", "of all")
def scatter_ring_adds_to_the_wrong_chunk(chunks, op="sum", group=None):
    rank, n = me(group)
    for step in range(n - 1):
        newest = chunks[(rank - step - 1) % n]
        arrived = torch.empty(len(chunks[(rank - step - 2) % n]), dtype=newest.dtype)
        exchange(newest, (rank + 1) % n, arrived, (rank - 1) % n, group)
        combine(chunks[rank], arrived, op)
    if op == "avg":
        chunks[rank].div_(n)


@wrong("4.9", "with group = ranks 2, 3 and 4")
def scatter_ring_size_of_the_job(chunks, op="sum", group=None):
    rank, n = dist.get_rank(group), dist.get_world_size()
    for step in range(n - 1):
        newest, coming = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        exchange_and_combine(newest, (rank + 1) % n, coming, (rank - 1) % n, op, group)
    if op == "avg":
        chunks[rank].div_(n)


@wrong("4.9", "`group` stands where `op` belongs")
def scatter_ring_without_op(chunks, op="sum", group=None):
    rank, n = me(group)
    for step in range(n - 1):
        newest, coming = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        exchange_and_combine(newest, (rank + 1) % n, coming, (rank - 1) % n, group)


@wrong("4.9", "another chunk")
def scatter_ring_into_the_chunk_it_sends(chunks, op="sum", group=None):
    rank, n = me(group)
    for step in range(n - 1):
        newest = chunks[(rank - step - 1) % n]
        exchange_and_combine(newest, (rank + 1) % n, newest, (rank - 1) % n, op, group)


@wrong("4.9", "but the ranks of the group are 0 to 3")
def scatter_ring_without_modulo(chunks, op="sum", group=None):
    rank, n = me(group)
    for step in range(n - 1):
        newest, coming = chunks[(rank - step - 1) % n], chunks[(rank - step - 2) % n]
        exchange_and_combine(newest, rank + 1, coming, rank - 1, op, group)


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


@wrong("4.10", "that is no ring")
def ring_by_rank_0(tensor, op="sum", group=None):
    trees.all_reduce_naive(tensor, op, group)


@wrong("4.10", "rank 0 sends 3 messages, not 6")
def ring_of_whole_tensors(tensor, op="sum", group=None):
    rank, n = me(group)
    with flat(tensor) as vector:
        carried = vector.clone()
        for _ in range(n - 1):
            arrived = torch.empty_like(vector)
            exchange(carried, (rank + 1) % n, arrived, (rank - 1) % n, group)
            combine(vector, arrived, op)
            carried = arrived
        if op == "avg":
            vector /= n


@wrong("4.10", "more than one chunk travels in a step")
def ring_of_whole_tensors_twice(tensor, op="sum", group=None):
    rank, n = me(group)
    with flat(tensor) as vector:
        carried, total = vector.clone(), vector.clone()
        for step in range(2 * (n - 1)):
            arrived = torch.empty_like(vector)
            exchange(carried, (rank + 1) % n, arrived, (rank - 1) % n, group)
            if step < n - 1:
                combine(total, arrived, op)
            carried = arrived
        vector.copy_(total / n if op == "avg" else total)


@wrong("4.10", "taken in more than once")
def ring_adds_what_was_added(tensor, op="sum", group=None):
    rank, n = me(group)
    with flat(tensor) as vector:
        for _ in range(n - 1):  # sends the sum so far, not what came last
            arrived = torch.empty_like(vector)
            exchange(vector, (rank + 1) % n, arrived, (rank - 1) % n, group)
            combine(vector, arrived, op)
        if op == "avg":
            vector /= n


@wrong("4.10", "that is a reduce-scatter")
def ring_half_done(tensor, op="sum", group=None):
    with flat(tensor) as vector:
        reduce_scatter_ring(vector.tensor_split(dist.get_world_size(group)), op, group)


@wrong("4.10", "chunks that were not finished have gone round")
def ring_gathers_from_the_wrong_chunk(tensor, op="sum", group=None):
    with flat(tensor) as vector:
        chunks = vector.tensor_split(dist.get_world_size(group))
        scatter_ring_starts_with_its_own(chunks, op, group)
        all_gather_ring(chunks, group)


@wrong("4.10", "index out of range")
def ring_with_chunk(tensor, op="sum", group=None):
    with flat(tensor) as vector:
        ring_on(vector, op, group, vector.chunk(dist.get_world_size(group)))


@wrong("4.10", "not one piece of memory")
def ring_without_flat(tensor, op="sum", group=None):
    rank, n = me(group)
    chunks = tensor.view(-1).tensor_split(n)
    for step in range(2 * n - 2):
        out, into = chunks[(rank - step) % n], chunks[(rank - step - 1) % n]
        arrived = torch.empty_like(into)
        send = dist.isend(out, group=group, group_dst=(rank + 1) % n)
        dist.recv(arrived, group=group, group_src=(rank - 1) % n)
        send.wait()
        combine(into, arrived, op) if step < n - 1 else into.copy_(arrived)
    if op == "avg":
        tensor /= n


@wrong("4.10", "a name bound to a new one, a copy")
def ring_on_a_copy(tensor, op="sum", group=None):
    vector = tensor.clone().flatten()
    ring_on(vector, op, group)
    return vector.view_as(tensor)


@wrong("4.10", "the division happens more than once")
def ring_divides_twice(tensor, op="sum", group=None):
    with flat(tensor) as vector:
        ring_on(vector, op, group)
        if op == "avg":
            vector /= dist.get_world_size(group)


@wrong("4.10", "`op` is not looked at")
def ring_always_adds(tensor, op="sum", group=None):
    with flat(tensor) as vector:
        ring_on(vector, "avg" if op == "avg" else "sum", group)


@wrong("4.10", "with group = ranks 2, 3 and 4")
def ring_without_group(tensor, op="sum", group=None):
    with flat(tensor) as vector:
        chunks = vector.tensor_split(dist.get_world_size(group))
        reduce_scatter_ring(chunks, op)
        all_gather_ring(chunks)


@wrong("4.10", "you called dist.all_reduce")
def ring_calls_all_reduce(tensor, op="sum", group=None):
    dist.all_reduce(tensor, group=group)


@right("4.10")
def ring_sums_in_float32(tensor, op="sum", group=None):
    wide = tensor.float() if tensor.dtype is torch.bfloat16 else tensor.contiguous()
    ring_on(wide.view(-1), op, group)
    tensor.copy_(wide)


@wrong("4.10", "a copy")
def ring_flattens(tensor, op="sum", group=None):
    ring_on(tensor.flatten(), op, group)


@wrong("4.10", "that of a loss has none")
def ring_of_vectors_only(tensor, op="sum", group=None):
    if tensor.dim() == 2:
        return ring_both_ways(tensor, op, group)
    ring_on(tensor, op, group)


@wrong("4.10", "`op` is not looked at")
def ring_passes_no_op_on(tensor, op="sum", group=None):
    with flat(tensor) as vector:
        chunks = vector.tensor_split(dist.get_world_size(group))
        reduce_scatter_ring(chunks, group=group)
        all_gather_ring(chunks, group)


@wrong("4.10", "split(4) makes pieces of 4")
def ring_with_split(tensor, op="sum", group=None):
    with flat(tensor) as vector:
        ring_on(vector, op, group, vector.split(dist.get_world_size(group)))


@wrong("4.10", "first reduce_scatter_ring, then all_gather_ring")
def ring_halves_swapped(tensor, op="sum", group=None):
    with flat(tensor) as vector:
        chunks = vector.tensor_split(dist.get_world_size(group))
        all_gather_ring(chunks, group)
        reduce_scatter_ring(chunks, op, group)


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


def line(sizes, times, weights):
    rows = torch.tensor([sizes, times, weights], dtype=torch.float64)
    columns = torch.stack([rows[2], rows[0] * rows[2]], dim=1)
    return tuple(torch.linalg.lstsq(columns, rows[1] * rows[2]).solution.tolist())


@wrong("4.11", "the largest message decides alone")
def fit_without_weights(sizes_bytes, times_s):
    return line(sizes_bytes, times_s, [1.0] * len(times_s))


@wrong("4.11", "the two are swapped")
def fit_swapped(sizes_bytes, times_s):
    return alpha_beta.fit_alpha_beta(sizes_bytes, times_s)[::-1]


@wrong("4.11", "that is the bandwidth")
def fit_bandwidth(sizes_bytes, times_s):
    alpha, beta = alpha_beta.fit_alpha_beta(sizes_bytes, times_s)
    return alpha, 1 / beta


@wrong("4.11", "microseconds")
def fit_in_microseconds(sizes_bytes, times_s):
    return alpha_beta.fit_alpha_beta(sizes_bytes, [time * 1e6 for time in times_s])


@wrong("4.11", "the wrong power of the time")
def fit_weights_squared(sizes_bytes, times_s):
    return line(sizes_bytes, times_s, [1 / time**2 for time in times_s])


@wrong("4.11", "through two of the points")
def fit_two_points(sizes_bytes, times_s):
    beta = (times_s[-1] - times_s[0]) / (sizes_bytes[-1] - sizes_bytes[0])
    return times_s[0] - beta * sizes_bytes[0], beta


@wrong("4.11", "ZeroDivisionError")
def fit_weights_by_size(sizes_bytes, times_s):
    return line(sizes_bytes, times_s, [1 / size for size in sizes_bytes])


@wrong("4.11", "return two numbers")
def fit_returns_a_table(sizes_bytes, times_s):
    alpha, beta = alpha_beta.fit_alpha_beta(sizes_bytes, times_s)
    return {"alpha": alpha, "beta": beta}


@wrong("4.11", "the line does not go through the points")
def fit_without_alpha(sizes_bytes, times_s):
    pairs = list(zip(sizes_bytes, times_s, strict=True))
    return 0.0, sum(s / t for s, t in pairs) / sum(s * s / t**2 for s, t in pairs) * 3


@wrong("4.11", "close, but not the smallest")
def fit_not_to_the_end(sizes_bytes, times_s):
    alpha, beta = alpha_beta.fit_alpha_beta(sizes_bytes, times_s)
    exact = sizes_bytes[-1] and abs((alpha + beta * sizes_bytes[1]) / times_s[1] - 1) < 1e-6
    return (alpha if exact else 1.08 * alpha), beta


@wrong("4.11", "log(0) is no number")
def fit_of_logarithms(sizes_bytes, times_s):
    import numpy as np

    with np.errstate(divide="ignore"):
        slope, constant = np.polyfit(np.log(sizes_bytes), np.log(times_s), 1)
    return constant, slope


@wrong("4.11", "a list cannot be divided")
def fit_divides_a_list(sizes_bytes, times_s):
    return 1 / times_s, 0


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
    return rounds, nbytes // world_size if "ring" in name or name == "gather" else nbytes


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


@wrong("4.12", "a round is whole")
def price_log2_as_it_is(name, world_size, nbytes):
    return price(name, world_size, nbytes, tree=math.log2(world_size))


@wrong("4.12", "the ranks that are left over need one more")
def price_log2_cut_off(name, world_size, nbytes):
    return price(name, world_size, nbytes, tree=int(math.log2(world_size)))


@wrong("4.12", "bit_length() is one more")
def price_bit_length(name, world_size, nbytes):
    return price(name, world_size, nbytes, tree=world_size.bit_length())


@wrong("4.12", "send chunks")
def price_ring_of_whole_tensors(name, world_size, nbytes):
    return price(name, world_size, nbytes, message=nbytes)


@wrong("4.12", "every message is the whole tensor")
def price_all_in_chunks(name, world_size, nbytes):
    return price(name, world_size, nbytes, message=nbytes / world_size)


@wrong("4.12", "that is one half")
def price_all_reduce_once(name, world_size, nbytes):
    rounds, message = price(name, world_size, nbytes)
    return (rounds // 2 if name.startswith("all_reduce") else rounds), message


@wrong("4.12", "nobody sends to itself")
def price_n_steps(name, world_size, nbytes):
    rounds, message = price(name, world_size, nbytes)
    if not name.endswith("tree"):
        rounds = rounds // (world_size - 1) * world_size if world_size > 1 else 0
    return rounds, message


@wrong("4.12", "that is the bytes of all rounds")
def price_of_all_messages(name, world_size, nbytes):
    rounds, message = price(name, world_size, nbytes)
    return rounds, rounds * message


@wrong("4.12", "in a tree many send at the same time")
def price_counts_messages(name, world_size, nbytes):
    return price(name, world_size, nbytes, tree=world_size - 1)


@wrong("4.12", "return two numbers")
def price_only_rounds(name, world_size, nbytes):
    return price(name, world_size, nbytes)[0]


@wrong("4.12", "that is a tree")
def price_gather_as_a_tree(name, world_size, nbytes):
    if name == "gather":
        return math.ceil(math.log2(world_size)), nbytes / world_size
    return price(name, world_size, nbytes)


@wrong("4.12", "a message of broadcast_tree is the whole tensor")
def price_of_half_messages(name, world_size, nbytes):
    rounds, message = price(name, world_size, nbytes)
    return rounds, message / 2 if name == "broadcast_tree" else message


@wrong("4.12", "the two are swapped")
def price_swapped(name, world_size, nbytes):
    return price(name, world_size, nbytes)[::-1]


@wrong("4.12", "your table has no such entry")
def price_without_gather(name, world_size, nbytes):
    table = {name: price(name, world_size, nbytes)} if name != "gather" else {}
    return table[name]


@wrong("4.12", "nobody sends to itself")
def price_of_all_reduce_naive_is_n(name, world_size, nbytes):
    rounds, message = price(name, world_size, nbytes)
    return world_size if name == "all_reduce_naive" else rounds, message
