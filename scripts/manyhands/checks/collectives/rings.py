"""The ring collectives: 4.7, 4.9 and 4.10."""

import operator

import torch
import torch.distributed as dist

from manyhands.checks.collectives import calls
from manyhands.checks.collectives.calls import (
    ADVICE,
    BESIDE,
    FACTS_TABLE,
    OF_FOUR,
    ON_SAME_LIST,
    OPERATIONS,
    REASONS,
    RESULT,
    SAME_LIST,
    UNTOUCHED,
    Call,
    call_of,
    in_chunks,
    is_beside_unchanged,
    stated,
    tell_chunks,
    tell_tensor,
)
from manyhands.checks.collectives.tape import Tape
from manyhands.checks.engine.spec import Place, Spec
from manyhands.collectives import ring, trees

# ---- what all right rings share -------------------------------------------------------------

NEIGHBOURS = "it talks to its two neighbours only"
NO_RING = "A rank also talks to others than its two neighbours, so this is no ring."
NEXT = "Send to (rank + 1) % n and receive from (rank - 1) % n, in every step."
PAPER = "Follow 3 ranks on paper: who sends which chunk in which step?"
ONE_CHUNK = "There are n-1 steps, and in each of them a rank sends one chunk and receives one."
WAITED = "An exchange of the next step may start only when that of the last step is through."
RING_FACTS = FACTS_TABLE | {NEIGHBOURS: NO_RING}
RING_ADVICE = ADVICE | {
    "": PAPER,
    SAME_LIST: ON_SAME_LIST,
    NEIGHBOURS: NEXT,
    "bytes sent": ONE_CHUNK,
    "bytes received": ONE_CHUNK,
    UNTOUCHED: WAITED,
}
NO_OP = ("`op` is None where two tensors are combined.", "Pass op on: ..., source, op, group)")
RING_REASONS = REASONS | {
    "index out of range": (
        "An index is too large for the list of chunks.",
        "Take indices modulo n, and cut with vector.tensor_split(n): it always gives n chunks.",
    ),
    "op is None": NO_OP,
    "KeyError: None": NO_OP,
}


def ring_seen(tape: Tape, place: Place, counted: tuple[str, ...], num_messages: int) -> dict:
    """What is judged of a rank's messages; it may go round the ring both ways.

    Args:
        counted: the messages whose bytes are the same in all right answers.
        num_messages: of each kind at most; halves of chunks, one each way, may be twice as many.
    """
    steps = {*tape.steps("send"), *tape.steps("recv")}
    return {
        NEIGHBOURS: steps <= {1, place.n - 1},
        "bytes sent": tape.nbytes("send") if "send" in counted else None,
        "bytes received": tape.nbytes("recv") if "recv" in counted else None,
        FEW: max(map(len, map(tape.messages, OPERATIONS))) <= 2 * num_messages,
    }


FEW = "it sends no more messages than a ring needs"


def chunks_seen(answer, case: Call, place: Place, only_own: bool = False) -> dict:
    """What a call leaves in all chunks, or in the rank's own one, and what it sends."""
    tensor, memory = case.draw(place.job_rank)
    before = memory.clone()
    chunks = case.chunks(tensor)
    given = list(chunks)
    tape = Tape(place)
    options = {"op": case.op} if only_own and case.op != "sum" else {}
    with tape:
        answer(tuple(given) if case.is_tuple else given, **options, **place.options)
    left = [chunk.clone() for chunk in case.chunks(case.tensor_in(memory))]
    name, value = ("its own chunk", left[place.rank]) if only_own else ("its chunks", left)
    return {
        UNTOUCHED: not tape.is_touched,
        name: value,
        SAME_LIST: len(given) == len(chunks) and all(map(operator.is_, given, chunks)),
        BESIDE: is_beside_unchanged(case, memory, before),
        **ring_seen(tape, place, ("send",) if only_own else ("recv",), place.n - 1),
    }


# ---- 4.7 ------------------------------------------------------------------------------------


def to_everybody(chunks, group=None):
    """Every rank sends its own chunk to every other rank itself."""
    rank = dist.get_rank(group)
    n = dist.get_world_size(group)
    for step in range(1, n):
        source = (rank - step) % n
        ring.exchange(chunks[rank], (rank + step) % n, chunks[source], source, group)


def everything_round(chunks, group=None):
    """Every message has all chunks."""
    rank = dist.get_rank(group)
    n = dist.get_world_size(group)
    for step in range(n - 1):
        whole = torch.cat(list(chunks))
        other = torch.empty_like(whole)
        ring.exchange(whole, (rank + 1) % n, other, (rank - 1) % n, group)
        index = (rank - step - 1) % n
        chunks[index].copy_(other.split([len(chunk) for chunk in chunks])[index])


def waits_at_the_end(chunks, group=None):
    """All exchanges are started at once."""
    rank = dist.get_rank(group)
    n = dist.get_world_size(group)
    works = []
    vectors = [chunk.contiguous() for chunk in chunks]
    for step in range(n - 1):
        newest, coming = vectors[(rank - step) % n], vectors[(rank - step - 1) % n]
        works += ring.start_exchange(newest, (rank + 1) % n, coming, (rank - 1) % n, group)
    for work in works:
        work.wait()
    for chunk, vector in zip(chunks, vectors, strict=True):
        chunk.copy_(vector)


NEWEST = "chunks[(rank - step) % n]"
COMING = "chunks[(rank - step - 1) % n]"
GATHERED = "exchange(newest, (rank + 1) % n, coming, (rank - 1) % n, group)"
INTO_LIST = (
    "chunks[(rank - step - 1) % n] = coming = torch.empty(len(coming), dtype=coming.dtype); "
    + GATHERED
)
all_gather_ring = Spec(
    todo="4.7",
    truth=ring.all_gather_ring,
    layouts=OF_FOUR,
    operations=OPERATIONS,
    cases=lambda n: in_chunks(n, rooted=False),
    observe=chunks_seen,
    tell=tell_chunks("all_gather_ring"),
    facts=stated(RING_FACTS),
    advice=RING_ADVICE,
    reasons=RING_REASONS,
    hints=(
        "Follow chunk 0 on paper: in step 0 rank 0 sends it to rank 1, in step 1 rank 1 sends it "
        "to rank 2, and so on.",
        "So in step k rank r sends chunk r - k, and what comes in is chunk r - k - 1; all of it "
        "modulo n.",
        "for step in range(n - 1): exchange(chunks[(rank - step) % n], (rank + 1) % n, "
        "chunks[...], (rank - 1) % n, group)",
    ),
    mistakes="""
        {NEWEST}, {COMING} => chunks[rank], chunks[(rank - 1) % n] :: Every step sends the rank's
            own chunk again. | In every later step, send on the chunk that came last.
        {COMING} => chunks[(rank + step + 1) % n] ::
            What comes in is written to chunk r + k + 1, and its sender sends chunk r - k - 1. |
            What a rank receives in a step is what its partner sends in that step.
        {NEWEST}, {COMING} => chunks[(rank + step) % n], chunks[(rank + step + 1) % n] ::
            The indices grow, as if the chunks came from rank r + 1.
        {NEWEST}, {COMING} => chunks[(rank - step - 1) % n], chunks[(rank - step) % n] ::
            The two indices have changed places: a rank sends the chunk that it should receive. | In
            step 0 a rank sends its own chunk.
        range(n - 1) => range(n if n > 1 else 0) ::
            There is one step too many. | After n-1 steps every chunk has been everywhere.
        range(n - 1) => range(n - 2) :: There is one step too few. | {ONE_CHUNK}
        range(n - 1) => range(1, n - 1) ::
            The first step is missing, in which a rank sends its own chunk.
        {GATHERED} => {INTO_LIST} :: The list gets a new tensor, and the memory of the old one stays
            as it was. | {ON_SAME_LIST}
        {GATHERED} => exchange(newest, (rank + 1) % n, coming.contiguous(), (rank - 1) % n, group)
            :: {IN_A_COPY} | `exchange` takes a tensor in any form: give it the chunk itself.
        (rank + 1) % n => rank + 1
        (rank - 1) % n => rank - 1 :: ! After the last rank comes rank 0 again. | {NEXT}
        instead to_everybody :: Every rank sends its own chunk to all others.
        instead everything_round :: Every message has all chunks. | {ONE_CHUNK}
        instead waits_at_the_end :: All exchanges are started at once, so a rank sends chunks that
            have not come yet. | {WAITED}
    """,
    module=vars(calls) | globals(),
)

# ---- 4.9 ------------------------------------------------------------------------------------


def straight_to_the_owner(chunks, op="sum", group=None):
    """Every rank sends each chunk to its owner itself."""
    rank = dist.get_rank(group)
    n = dist.get_world_size(group)
    for step in range(1, n):
        to = (rank + step) % n
        ring.exchange_and_combine(chunks[to], to, chunks[rank], (rank - step) % n, op, group)
    if op == "avg":
        chunks[rank].div_(n)


def sends_everything(chunks, op="sum", group=None):
    """Every message has all chunks."""
    rank = dist.get_rank(group)
    n = dist.get_world_size(group)
    total = torch.cat(list(chunks))
    carried = total.clone()
    for _ in range(n - 1):
        arrived = torch.empty_like(total)
        ring.exchange(carried, (rank + 1) % n, arrived, (rank - 1) % n, group)
        trees.combine(total, arrived, op)
        carried = arrived
    mine = total.split([len(chunk) for chunk in chunks])[rank]
    chunks[rank].copy_(mine / n if op == "avg" else mine)


SENT = "(rank - step - 1) % n"
TAKEN = "(rank - step - 2) % n"
STEP = "exchange_and_combine(newest, (rank + 1) % n, coming, (rank - 1) % n, op, group)"
DIVIDED = "chunks[rank].div_(n)"
OFF = "Nothing was ever combined into chunks[rank]: all n-1 steps went to the other chunks."
LAST = "The last chunk that comes in, in step n-2, has to be combined into chunks[rank]."
AT_THE_END = "Add up as for a sum, and divide chunks[rank] by n once, at the end."
reduce_scatter_ring = Spec(
    todo="4.9",
    truth=ring.reduce_scatter_ring,
    layouts=OF_FOUR,
    operations=OPERATIONS,
    cases=lambda n: in_chunks(n, rooted=False, with_op=True),
    observe=lambda answer, case, place: chunks_seen(answer, case, place, only_own=True),
    tell=tell_chunks("reduce_scatter_ring"),
    facts=stated(RING_FACTS),
    advice=RING_ADVICE,
    reasons=RING_REASONS,
    hints=(
        "The sum for rank r ends at rank r, so it started n-1 steps earlier at rank r + 1: in step "
        "0 rank r sends chunk r - 1.",
        "In step k rank r sends chunk r - k - 1, and takes what comes in into chunk r - k - 2; all "
        "of it modulo n.",
        "for step in range(n - 1): exchange_and_combine(chunks[(rank - step - 1) % n], "
        '(rank + 1) % n, chunks[...], (rank - 1) % n, op, group). Then, for "avg", divide.',
    ),
    mistakes=r"""
        {SENT} => (rank - step) % n
        {TAKEN} => (rank - step - 1) % n
        chunks[rank].div_ => chunks[(rank + 1) % n].div_ :: {OFF} | {LAST}
        {SENT} => (rank - step) % n
        {TAKEN} => (rank - step - 1) % n :: {OFF}
        {STEP} => exchange(newest, (rank + 1) % n, coming, (rank - 1) % n, group) ::
            What comes in overwrites what was there. | Combine it with what this rank holds:
            exchange_and_combine does both.
        {STEP} => {STEP}\n        coming /= n if op == "avg" else 1 ::
            The sum is divided at every hop, and once more at the end. | {AT_THE_END}
        {STEP} => {STEP}\n        coming /= n if op == "avg" else 1
        {DIVIDED} => ... :: The sum is divided at every hop.
        {DIVIDED} => chunks[rank].div_(max(1, n - 1)) ::
            The sum is divided by n-1. | The rank's own part counts as well: divide by n.
        {DIVIDED} => chunks[rank].copy_(chunks[rank] // n) ::
            The average is rounded down. | Divide with /, not with //.
        {DIVIDED} => ... :: The average is not divided. | {AT_THE_END}
        range(n - 1) => range(n if n > 1 else 0) ::
            There is one step too many. | After n-1 steps every sum is complete.
        range(n - 1) => range(n - 2) :: There is one step too few. | {ONE_CHUNK}
        (rank - 1) % n, op => (rank - 1) % n, "sum" ::
            `op` is not looked at: everything is added. | Pass `op` on.
        chunks[{TAKEN}] => chunks[rank] ::
            What comes in is always combined into the rank's own chunk. | {LAST}
        instead straight_to_the_owner :: Every rank sends straight to the owners. | {NEXT}
        instead sends_everything :: Every message has all chunks. | {ONE_CHUNK}
    """,
    module=vars(calls) | globals(),
)

# ---- 4.10 -----------------------------------------------------------------------------------


def tensors(n: int) -> list[Call]:
    """Sizes that n divides, or not, or that are smaller than n; all forms and types."""
    return [
        call_of("vector", 2 * n),
        call_of("vector", 6 * n + 1, op="avg"),
        call_of("vector", n + 1, dtype=torch.int64, op="min"),
        call_of("column", 2 * n + 1, dtype=torch.bfloat16, op="max"),
        call_of("transposed", 2 * n + 2, dtype=torch.float64),
        call_of("scalar", 1),
    ]


def tensor_seen(answer, case: Call, place: Place) -> dict:
    """What a call leaves in the tensor, and what it sends."""
    tensor, memory = case.draw(place.job_rank)
    before = memory.clone()
    tape = Tape(place)
    options = {"op": case.op} if case.op != "sum" else {}
    with tape:
        answer(tensor, **options, **place.options)
    divides = sum(case.sizes) % place.n == 0 and case.form == "vector"
    counted = ("send",) if divides and case.dtype is torch.float32 else ()
    return {
        UNTOUCHED: not tape.is_touched,
        RESULT: case.tensor_in(memory).clone(),
        BESIDE: is_beside_unchanged(case, memory, before),
        **ring_seen(tape, place, counted, 2 * (place.n - 1)),
    }


def whole_tensors(sum_so_far: bool, num_rounds: int):
    """Whole tensors go round the ring, as often as `num_rounds`."""

    def all_reduce_ring(tensor, op="sum", group=None):
        rank = dist.get_rank(group)
        n = dist.get_world_size(group)
        with trees.flat(tensor) as vector:
            carried = vector.clone()
            total = vector.clone()
            for step in range(num_rounds * (n - 1)):
                arrived = torch.empty_like(vector)
                out = total if sum_so_far else carried
                ring.exchange(out, (rank + 1) % n, arrived, (rank - 1) % n, group)
                if step < n - 1:
                    trees.combine(total, arrived, op)
                carried = arrived
            vector.copy_(total / n if op == "avg" else total)

    return all_reduce_ring


def in_float64(truth):
    """The ring of a wider copy."""

    def all_reduce_ring(tensor, op="sum", group=None):
        wide = tensor.double()
        truth(wide, op, group)
        tensor.copy_(wide)

    return all_reduce_ring


SCATTER = "reduce_scatter_ring(chunks, op, group)"
GATHER = "all_gather_ring(chunks, group)"
WITH = "with flat(tensor) as vector:"
FIRST = "First reduce_scatter_ring, then all_gather_ring, with the same chunks."
CHUNKS = "Cut the vector into n chunks, and let one chunk travel in each step."
all_reduce_ring = Spec(
    todo="4.10",
    truth=ring.all_reduce_ring,
    layouts=OF_FOUR,
    operations=OPERATIONS,
    cases=tensors,
    observe=tensor_seen,
    tell=tell_tensor("all_reduce_ring"),
    facts=stated(RING_FACTS),
    advice=RING_ADVICE,
    reasons=RING_REASONS,
    hints=(
        "Two calls do it: the ring that leaves every rank one finished chunk, then the ring that "
        "gives all chunks to all ranks.",
        "vector.tensor_split(n) cuts into exactly n views, also where n does not divide the "
        "length.",
        "with flat(tensor) as vector: chunks = vector.tensor_split(n); reduce_scatter_ring(chunks, "
        "op, group); all_gather_ring(chunks, group)",
    ),
    mistakes=r"""
        {GATHER} => ... ::
            This is a reduce-scatter: the finished chunks have not gone round. | {FIRST}
        {SCATTER} => reduce_scatter_ring(chunks[1:] + chunks[:1], op, group) ::
            Chunks that are not finished go round. | The all-gather starts with the chunk that the
            reduce-scatter has finished.
        {SCATTER}\n        {GATHER} => {GATHER}\n        {SCATTER} ::
            The all-gather comes first, and then the ranks add up what is the same on all. | {FIRST}
        vector.tensor_split => vector.chunk :: ! chunk(n) may give fewer than n chunks. |
            vector.tensor_split(n) makes exactly n chunks, also where n does not divide the length.
        vector.tensor_split => vector.split :: ! split(n) makes pieces of n elements, not n pieces.
        {WITH} => vector = tensor.view(-1)\n    if True: :: ! {COLUMN} | {FLAT}
        {WITH} => vector = tensor.flatten()\n    if True: :: {IN_A_COPY}
        {GATHER} => {GATHER}\n        vector /= len(chunks) if op == "avg" else 1 ::
            The average is divided twice. | reduce_scatter_ring has divided already.
        {SCATTER} => reduce_scatter_ring(chunks, group=group) ::
            `op` is not passed on, so everything is added. | {SCATTER}
        {SCATTER} => reduce_scatter_ring(chunks, "avg" if op == "avg" else "sum", group) ::
            "min" and "max" add.
        instead trees.all_reduce_naive :: All ranks send to rank 0, and it sends back. | {NEXT}
        instead whole_tensors(False, 1) :: Whole tensors go round the ring. | {CHUNKS}
        instead whole_tensors(False, 2) :: Whole tensors go round the ring, and twice.
        instead whole_tensors(True, 1) ::
            Every rank sends the sum so far, so parts of it are added more than once. | Pass on what
            came last, or a chunk of the sum that only this rank completes.
        around in_float64 :: Everything is sent in float64. | Send the type of `tensor`.
    """,
    module=vars(calls) | globals(),
)
