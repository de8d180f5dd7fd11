"""What goes up and down a tree, or from a rank to all others: 4.2 to 4.5."""

import operator

import torch
import torch.distributed as dist

from manyhands.checks.collectives import calls
from manyhands.checks.collectives.calls import (
    ADVICE,
    BESIDE,
    FACTS,
    FACTS_TABLE,
    OF_FIVE,
    OF_FOUR,
    ON_SAME_LIST,
    OPERATIONS,
    REASONS,
    RESULT,
    ROUNDS,
    SAME_LIST,
    UNTOUCHED,
    Call,
    in_chunks,
    is_beside_unchanged,
    messages_seen,
    rooted,
    stated,
    tell_chunks,
    tell_tensor,
    tensor_seen,
)
from manyhands.checks.collectives.tape import Tape
from manyhands.checks.engine.spec import Place, Spec
from manyhands.collectives import ring, trees

# ---- 4.2 ------------------------------------------------------------------------------------


def chain(tensor, root=0, group=None):
    """Every rank passes the tensor on to the next one."""
    rank = dist.get_rank(group)
    n = dist.get_world_size(group)
    place = (rank - root) % n
    with trees.flat(tensor) as vector:
        if place > 0:
            dist.recv(vector, group=group, group_src=(rank - 1) % n)
        if place < n - 1:
            dist.send(vector, group=group, group_dst=(rank + 1) % n)


CHAIN = "This is a chain: every rank passes the tensor on to the next one."

ROOT_SENDS = "The root itself sends to each of the other ranks, and they only receive."
broadcast_naive = Spec(
    todo="4.2",
    truth=trees.broadcast_naive,
    layouts=OF_FIVE,
    operations=OPERATIONS,
    cases=rooted,
    observe=lambda answer, case, place: tensor_seen(answer, case, place, is_tree=False),
    tell=tell_tensor("broadcast_naive"),
    facts=FACTS,
    advice=ADVICE,
    reasons=REASONS,
    hints=(
        "There are two roles: the root sends n-1 times, and every other rank receives once.",
        "Inside `with flat(tensor) as vector:` send and receive `vector`, so that a column of a "
        "matrix works as well.",
        "The root: dist.send(vector, group=group, group_dst=other) for every other rank of "
        "range(n). The others: dist.recv(vector, group=group, group_src=root).",
    ),
    mistakes=r"""
        {WITH} => root = 0\n    {WITH} :: {ROOT_0}
        {WITH} => {COPY} :: {IN_A_COPY} | {FLAT}
        {WITH} => {BARE} :: ! {COLUMN}
        vector, group=group, group_dst => vector.double(), group=group, group_dst ::
            ! The root sends another type than the tensor has. | Send `vector` itself.
        if other != root => if other > root ::
            ! The ranks before the root are left out. | {ROOT_SENDS}
        instead chain :: {CHAIN}
        instead trees.broadcast_tree :: This is the tree of the next exercise.
    """,
    module=vars(calls) | globals(),
)

# ---- 4.3 ------------------------------------------------------------------------------------


def small_branches_first(tensor, root=0, group=None):
    """The same tree, in which every rank serves its nearest place first."""
    rank = dist.get_rank(group)
    n = dist.get_world_size(group)
    place = (rank - root) % n
    low = place & -place if place else 1 << n
    step = 1
    with trees.flat(tensor) as vector:
        if place:
            dist.recv(vector, group=group, group_src=(rank - low) % n)
        while step < min(low, n):
            if place + step < n:
                dist.send(vector, group=group, group_dst=(rank + step) % n)
            step *= 2


def heap(tensor, root=0, group=None):
    """Place p has its tensor from place (p - 1) // 2."""
    rank = dist.get_rank(group)
    n = dist.get_world_size(group)
    place = (rank - root) % n
    with trees.flat(tensor) as vector:
        if place:
            dist.recv(vector, group=group, group_src=((place - 1) // 2 + root) % n)
        for child in (2 * place + 1, 2 * place + 2):
            if child < n:
                dist.send(vector, group=group, group_dst=(child + root) % n)


DOUBLE = "In each round everybody who has the tensor sends it to a rank that does not have it yet."
broadcast_tree = Spec(
    todo="4.3",
    truth=trees.broadcast_tree,
    layouts=OF_FIVE,
    operations=OPERATIONS,
    cases=rooted,
    observe=tensor_seen,
    tell=tell_tensor("broadcast_tree"),
    facts=FACTS,
    advice=ADVICE | {ROUNDS: DOUBLE},
    reasons=REASONS,
    hints=(
        "place = (rank - root) % n makes any root place 0, and place p is rank (p + root) % n.",
        "In each round a place does one of three things: it sends to place + step, it receives "
        "from place - step, or it does nothing. Which one follows from place, step and n.",
        "While step < n: if place < step, send, but only where place + step < n; else if "
        "place < 2 * step, receive. Then double step.",
    ),
    mistakes=r"""
        {WITH} => root = 0; place = rank\n    {WITH} :: {ROOT_0}
        {WITH} => {COPY} :: {IN_A_COPY} | {FLAT}
        while step < n => while 2 * step <= n :: The last round is missing: on 5 ranks there are
            three. | The steps are 1, 2, 4, ..., as long as they are smaller than n.
        and place + step < n => ::
            ! A rank sends to a place that does not exist. | Send only where place + step < n.
        (rank + step) % n => (place + step) % n
        (rank - step) % n => (place - step) % n ::
            ! A place is taken for a rank. | Place p is rank (p + root) % n.
        instead chain :: {CHAIN} | {DOUBLE}
        instead trees.broadcast_naive :: The root sends to every other rank itself.
        instead small_branches_first ::
            A rank that has many others behind it gets the tensor late, so it takes more rounds. |
            First send to the place that is farthest away: it has the most others behind it.
        instead heap :: Place p gets the tensor from place (p - 1) // 2, so a rank is idle after two
            sends. | {DOUBLE}
    """,
    module=vars(calls) | globals(),
)

# ---- 4.4 ------------------------------------------------------------------------------------


def all_to_the_root(tensor, op="sum", root=0, group=None):
    """The root receives from every other rank itself."""
    rank = dist.get_rank(group)
    n = dist.get_world_size(group)
    with trees.flat(tensor) as vector:
        if rank != root:
            dist.send(vector, group=group, group_dst=root)
            return
        other = torch.empty_like(vector)
        for source in set(range(n)) - {root}:
            dist.recv(other, group=group, group_src=source)
            trees.combine(vector, other, op)
        if op == "avg":
            vector /= n


def chain_up(tensor, op="sum", root=0, group=None):
    """The sum grows from one rank to the next, as far as the root."""
    rank = dist.get_rank(group)
    n = dist.get_world_size(group)
    place = (rank - root) % n
    with trees.flat(tensor) as vector:
        if place < n - 1:
            other = torch.empty_like(vector)
            dist.recv(other, group=group, group_src=(rank + 1) % n)
            trees.combine(vector, other, op)
        if place:
            dist.send(vector, group=group, group_dst=(rank - 1) % n)
        elif op == "avg":
            vector /= n


def down_again(truth):
    """Everybody gets the result."""

    def reduce_tree(tensor, op="sum", root=0, group=None):
        truth(tensor, op, root, group)
        trees.broadcast_tree(tensor, root, group)

    return reduce_tree


TAKE = "combine(vector, other, op)"
START = "1 << (n - 1).bit_length()"
ONCE = "Add up as for a sum, and divide the root's result by n, once, at the end."
BY_HAND = "Follow three ranks' tensors by hand: what does each rank hold after each round?"
HALF = "In each round, half of the places that are left send what they have and are done."
reduce_tree = Spec(
    todo="4.4",
    truth=trees.reduce_tree,
    layouts=OF_FIVE,
    operations=OPERATIONS,
    cases=lambda n: rooted(n, with_op=True),
    observe=lambda answer, case, place: tensor_seen(answer, case, place, only_root=True),
    tell=tell_tensor("reduce_tree"),
    facts=FACTS,
    advice=ADVICE | {ROUNDS: HALF, RESULT: BY_HAND},
    reasons=REASONS,
    hints=(
        "It is broadcast_tree run backwards: the largest step comes first, and whoever received "
        "there sends here, and has then done its part.",
        "What comes in needs memory of its own: other = torch.empty_like(vector). Then call "
        "combine(vector, other, op).",
        "Start at step = 1 << (n - 1).bit_length() and halve it at the beginning of each round; "
        "step <= place < 2 * step sends, place < step receives where place + step < n. After the "
        'rounds divide once, for "avg".',
    ),
    mistakes=r"""
        {WITH} => root = 0; place = rank\n    {WITH} :: {ROOT_0}
        {WITH} => {COPY} :: {IN_A_COPY} | {FLAT}
        if op == "avg" => if False :: The average is not divided. | {ONCE}
        vector /= n => vector /= max(1, n - 1) ::
            The sum is divided by n-1. | The root's own tensor counts as well: divide by n.
        vector /= n => vector //= n :: The average is rounded down. | Divide with /, not with //.
        {TAKE} => {TAKE}; vector.div_(2) if op == "avg" else None
        vector /= n => ... :: At every hop the result is divided by 2. | {ONCE}
        {WITH} => tensor /= n if op == "avg" else 1\n    {WITH} :: The average is divided twice.
        {TAKE} => vector.copy_(other) ::
            What comes in overwrites what was there. | Use combine(vector, other, op).
        {TAKE} => vector += other :: `op` is not looked at: everything is added. | {TAKE}
        {TAKE} => ... ::
            Nothing is combined: a rank that has received something goes on with its own part.
        while step := step // 2 => for step in [1 << k for k in range((n - 1).bit_length())] ::
            The small steps come first, so a rank passes its part on before it has the others'. |
            Begin with the largest step.
        {START} => 1 << (n.bit_length() - 1) ::
            Where n is no power of 2, the largest step is missing. | Begin below {START}.
        instead all_to_the_root :: The root receives from every other rank itself. | {HALF}
        instead chain_up :: This is a chain: the sum goes from rank to rank.
        around down_again :: The result is also sent back to all ranks.
    """,
    module=vars(calls) | globals(),
)

# ---- 4.5 ------------------------------------------------------------------------------------


def chunks_seen(answer, case: Call, place: Place) -> dict:
    """What a call leaves in the chunks, and what it sends."""
    tensor, memory = case.draw(place.job_rank)
    before = memory.clone()
    chunks = case.chunks(tensor)
    given = list(chunks)
    tape = Tape(place)
    with tape:
        answer(tuple(given) if case.is_tuple else given, **case.options, **place.options)
    is_root = place.rank == case.root
    own = case.chunks(case.tensor_in(before))[place.rank]
    is_sent = all(case.sizes)
    return {
        UNTOUCHED: not tape.is_touched,
        OWN: torch.equal(chunks[place.rank], own),
        FILLED: [c.clone() for c in case.chunks(case.tensor_in(memory))] if is_root else [],
        SAME_LIST: len(given) == len(chunks) and all(map(operator.is_, given, chunks)),
        BESIDE: is_beside_unchanged(case, memory, before),
        **messages_seen(tape, {"send": is_sent, "recv": is_sent}, own.nbytes),
    }


def all_gather(chunks, root=0, group=None):
    """Every rank gets all chunks."""
    ring.all_gather_ring(chunks, group)


def sends_everything(chunks, root=0, group=None):
    """A message has all chunks of its sender."""
    rank = dist.get_rank(group)
    whole = torch.cat(list(chunks))
    if rank != root:
        dist.send(whole, group=group, group_dst=root)
        return
    other = torch.empty_like(whole)
    for source in set(range(len(chunks))) - {root}:
        dist.recv(other, group=group, group_src=source)
        chunks[source].copy_(other.split([len(chunk) for chunk in chunks])[source])


def waits_outside_of_flat(chunks, root=0, group=None):
    """The blocks of `flat` end before the messages are through."""
    rank = dist.get_rank(group)
    works = []
    for source in set(range(len(chunks))) - {root}:
        with trees.flat(chunks[source]) as vector:
            if rank == root:
                works.append(dist.irecv(vector, group=group, group_src=source))
            elif rank == source:
                works.append(dist.isend(vector, group=group, group_dst=root))
    for work in works:
        work.wait()


OWN = "its own chunk is unchanged"
FILLED = "the root's chunks"
GIVES = "Rank r's own chunk has the number r: send that one, and fill the others."
CHUNK_WITH = "with flat(chunk) as vector:"
CHUNK_COPY = "vector = chunk.contiguous()\n        if True:"
CHUNK_BARE = "vector = chunk\n        if True:"
CHUNK_FLAT = "Inside `with flat(chunk) as vector:` send and receive `vector`, and wait there."
SEND = "dist.send(vector, group=group, group_dst=root)"
RECV = "dist.recv(vector, group=group, group_src=source)"
CHUNK_FACTS = FACTS_TABLE | {
    OWN: "A rank's own chunk is what it has to give, and here it was written to.",
}
CHUNK_ADVICE = ADVICE | {OWN: GIVES, SAME_LIST: ON_SAME_LIST}
gather = Spec(
    todo="4.5",
    truth=trees.gather,
    layouts=OF_FOUR,
    operations=OPERATIONS,
    cases=in_chunks,
    observe=chunks_seen,
    tell=tell_chunks("gather"),
    facts=stated(CHUNK_FACTS),
    advice=CHUNK_ADVICE,
    reasons=REASONS,
    hints=(
        "There are two roles again: the root receives n-1 times, and every other rank sends once.",
        "A rank sends chunks[rank]. The root receives from rank r straight into chunks[r].",
        "Root: for source, chunk in enumerate(chunks), leave out source == root, "
        "dist.recv(chunk, group=group, group_src=source). Others: "
        "dist.send(chunks[rank], group=group, group_dst=root).",
    ),
    mistakes="""
        rank = dist.get_rank(group) => rank = dist.get_rank(group); root = 0 :: {ROOT_0}
        {CHUNK_WITH} => {CHUNK_COPY} :: {IN_A_COPY} | {CHUNK_FLAT}
        {CHUNK_WITH} => {CHUNK_BARE} :: ! {COLUMN}
        {RECV} => chunks[source] = torch.empty_like(vector); dist.recv(chunks[source], group=group,
            group_src=source) :: The list gets a new tensor, and the memory of the old one stays as
            it was. | Receive into chunks[source] itself, or copy_() into it.
        {SEND} => dist.send(chunks[root].contiguous(), group=group, group_dst=root) ::
            Every rank sends chunks[root] instead of its own chunk. | {GIVES}
        {SEND} => dist.recv(vector, group=group, group_src=root)
        {RECV} => dist.send(vector, group=group, group_dst=source) ::
            The roles have changed places: the root sends, and the others receive. | The root
            receives from every other rank; the others send chunks[rank] to the root.
        instead all_gather :: Every rank gets all chunks, not only the root.
        instead sends_everything :: Every message holds all chunks of its sender. | {GIVES}
        instead waits_outside_of_flat ::
            A message is waited for after the block of `flat` has ended. | {CHUNK_FLAT}
    """,
    module=vars(calls) | globals(),
)
