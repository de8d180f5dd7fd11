"""Two messages at once, whole and in pieces: 4.6 and 4.8."""

import torch
import torch.distributed as dist

from manyhands.checks.collectives import calls
from manyhands.checks.collectives.calls import (
    ADVICE,
    BESIDE,
    FACTS_TABLE,
    OPERATIONS,
    REASONS,
    UNTOUCHED,
    Call,
    call_of,
    is_beside_unchanged,
    stated,
)
from manyhands.checks.collectives.tape import Tape
from manyhands.checks.engine import cases
from manyhands.checks.engine.card import Wrong
from manyhands.checks.engine.spec import Place, Spec
from manyhands.checks.engine.values import Malformed, malformed
from manyhands.collectives import ring, trees

# In a pair both partners are one rank; among 4 they are two, and a rank 2 away is no neighbour.
PAIRS = (((0, 1, 2, 3),), ((0, 1), (2, 3)))
OUTGOING = "`outgoing` is unchanged"

# ---- 4.6 ------------------------------------------------------------------------------------


def exchanges(n: int) -> list[Call]:
    """Both directions, a rank farther away, messages of different sizes, and large ones."""
    uneven = tuple(range(3, 3 + n))
    return [
        call_of("vector", *(3,) * n),
        call_of("vector", *(3,) * n, shift=n - 1),
        call_of("vector", *uneven, shift=2 if n > 2 else 1, dtype=torch.int64),
        call_of("vector", *(1 << 14,) * n, dtype=torch.bfloat16),
    ]


def partners(case: Call, place: Place) -> tuple[int, int]:
    """To whom a rank sends, and from whom it receives."""
    return (place.rank + case.shift) % place.n, (place.rank - case.shift) % place.n


def tell_exchange(name: str):
    """Words for a call."""

    def tell(case: Call) -> str:
        sizes = ", ".join(map(str, case.sizes)) if len(set(case.sizes)) > 1 else case.sizes[0]
        kind = "" if case.dtype is torch.float32 else f" {str(case.dtype)[6:]}"
        form = " of a column" if case.form == "column" else ""
        pieces = f", piece_bytes={case.piece_bytes}" if case.piece_bytes else ""
        op = f', op "{case.op}"' if name == "exchange_in_pieces" else ""
        far = case.shift if case.shift <= len(case.sizes) // 2 else case.shift - len(case.sizes)
        return (
            f"{name} (rank r sends to r {'+' if far > 0 else '-'} {abs(far)}, messages of {sizes}"
            f"{kind} elements{form}{op}{pieces})"
        )

    return tell


def started_seen(answer, case: Call, place: Place) -> dict:
    """What is started, what is returned, and what has come when all that is waited for."""
    to, source = partners(case, place)
    outgoing = cases.values(
        case.sizes[place.rank], cases.generator(case.seed, place.job_rank), case.dtype
    )
    incoming = torch.full((case.sizes[source],), -60, dtype=case.dtype)
    before = outgoing.clone()
    tape = Tape(place, may_wait=False)
    with tape:
        works = answer(outgoing, to, incoming, source, **place.options)
        tape.may_wait = True
        judge_what_is_started(tape, to, source)
        if isinstance(works, list | tuple) and all(hasattr(work, "wait") for work in works):
            for work in works:
                work.wait()
        left = [name for _, name, _ in tape.on_their_way.values()]
        tape.wait_for_the_rest()
    return {
        "what it returns": as_works(works),
        IN_LIST["send"]: "send 0" not in left,
        IN_LIST["recv"]: "recv 0" not in left,
        "incoming": incoming,
        OUTGOING: torch.equal(outgoing, before),
        UNTOUCHED: not tape.is_touched,
    }


def judge_what_is_started(tape: Tape, to: int, source: int) -> None:
    """Raise Wrong where the ranks would wait for messages for ever."""
    sent, taken = tape.peers("send"), tape.peers("recv")
    if sent == [to] and taken == [source]:
        return
    listed = [f"a send to rank {peer}" for peer in sent]
    listed += [f"a recv from rank {peer}" for peer in taken]
    raise Wrong(
        f"called with to={to} and source={source}, it starts {', '.join(listed) or 'nothing'}",
        "An exchange is one message out and one message in.",
        "isend to `to`, irecv from `source`. A P2POp starts nothing before batch_isend_irecv, and "
        "a function with `yield` starts nothing before its result is read.",
    )


def as_works(value: object) -> str:
    """Raise Malformed for anything else than a list of works."""
    hint = "Return the list of all works: that of isend and that of irecv."
    if not isinstance(value, list | tuple):
        raise malformed(value, "a list of works", hint)
    for work in value:
        if not hasattr(work, "wait"):
            raise Malformed(
                f"a list with a {type(work).__name__}",
                "The exercise asks for a list of works.",
                hint,
            )
    return "a list of works"


IN_LIST = {
    "send": "the work of the send is in the list",
    "recv": "the work of the receive is in the list",
}
ONLY_WORKS = "The caller has to wait for both messages, and can do so only with their works."
STARTED = "dist.batch_isend_irecv([send, receive])"
start_exchange = Spec(
    todo="4.6",
    truth=ring.start_exchange,
    layouts=PAIRS,
    operations=OPERATIONS,
    cases=exchanges,
    observe=started_seen,
    tell=tell_exchange("start_exchange"),
    facts=stated(
        FACTS_TABLE
        | {
            IN_LIST["send"]: ONLY_WORKS,
            IN_LIST["recv"]: ONLY_WORKS,
            OUTGOING: "`outgoing` is only sent, and belongs to the caller.",
        }
    ),
    advice=ADVICE
    | {"": "Send `outgoing`, receive into `incoming` itself, and return both works in a list."},
    reasons=REASONS,
    hints=(
        "dist.isend and dist.irecv start a message and return a work at once. dist.send and "
        "dist.recv wait until the message is through.",
        "Both of them take group= together with group_dst= or group_src=.",
        "dist.batch_isend_irecv takes a list of dist.P2POp(dist.isend, outgoing, group=group, "
        "group_peer=to) and the like, and returns the list of works.",
    ),
    mistakes="""
        {STARTED} => {STARTED}[1:] :: The list lacks the work of the send. | Return both works.
        {STARTED} => {STARTED}[:1] :: The list lacks the work of the receive.
        dist.irecv, incoming => dist.irecv, torch.empty_like(incoming) ::
            What comes in is received into another tensor. | Receive into `incoming` itself.
        dist.isend, outgoing => dist.isend, torch.zeros_like(outgoing) ::
            Something else than `outgoing` is sent. | Send `outgoing` itself.
        return {STARTED} => {STARTED}; return [] ::
            Both messages are started, and no work is returned. | Return both works.
        outgoing, group=group, group_peer=to => outgoing, group=group, group_peer=source ::
            ! It sends to `source`. | Send to `to`.
    """,
    module=vars(calls) | globals(),
)

# ---- 4.8 ------------------------------------------------------------------------------------


def in_pieces(n: int) -> list[Call]:
    """One piece, several, uneven ones, pieces smaller than an element, nothing at all."""
    uneven = tuple(8 + rank % 2 for rank in range(n))  # 2 pieces of 4, or 3
    return [
        call_of("vector", *(3,) * n),
        call_of("vector", *(12,) * n, op="avg", piece_bytes=16),
        call_of("vector", *uneven, piece_bytes=18, shift=n - 1),
        call_of("vector", *(7,) * n, op="min", dtype=torch.int64, piece_bytes=20),
        call_of("column", *uneven, op="max", dtype=torch.bfloat16, piece_bytes=8),
        call_of("vector", *(5,) * n, op="max", piece_bytes=1, shift=2 if n > 2 else 1),
        call_of("empty", *(0,) * n),
    ]


def pieces_seen(answer, case: Call, place: Place) -> dict:
    """What a call leaves in `total`, its messages, and whether they travel while it combines."""
    to, source = partners(case, place)
    outgoing, _ = case._replace(sizes=(case.sizes[place.rank],)).draw(place.job_rank)
    mine = case._replace(sizes=(case.sizes[source],), seed=case.seed + 1)
    total, memory = mine.draw(place.job_rank)
    before = outgoing.clone(), memory.clone()
    options = {"piece_bytes": case.piece_bytes} if case.piece_bytes else {}
    tape = Tape(place, may_be_empty=case.form == "empty")
    with tape:
        answer(outgoing, to, total, source, case.op, **place.options, **options)
    size = max(1, case.piece_bytes // total.element_size()) if case.piece_bytes else total.numel()
    sent = tape.messages("send")
    can_overlap = case.form == "vector" and min(outgoing.numel(), total.numel()) > size
    return {
        UNTOUCHED: not tape.is_touched,
        "total": case.tensor_in(memory).clone(),
        OUTGOING: torch.equal(outgoing, before[0]),
        BESIDE: is_beside_unchanged(case, memory, before[1]),
        "pieces sent": len(sent),
        "pieces received": len(tape.messages("recv")),
        SMALL: all(entry.nbytes <= size * total.element_size() for entry in sent),
        **(overlapping(tape.events) if can_overlap else {}),
    }


def overlapping(events: list[str]) -> dict:
    """Is something on its way while a piece is combined?"""
    uses = [index for index, event in enumerate(events) if event.startswith("use")]
    first = uses[0] if uses else len(events)
    before, after = events[:first], events[first:]
    waits = [int(event.split()[-1]) for event in events if event.startswith("wait recv")]
    num_started = [sum(e.startswith(op) for e in before) for op in OPERATIONS]
    return {
        UNDER_WAY: min(num_started) >= 2,
        IN_TURN: any(event.startswith("wait recv") for event in after),
        IN_ORDER: waits == sorted(waits),
    }


def one_by_one(outgoing, to, total, source, op, group=None, piece_bytes=2 << 20):
    """A piece is started when the one before it has been combined."""
    with trees.flat(outgoing) as leaving, trees.flat(total) as sums:
        size = max(1, piece_bytes // sums.element_size())
        outs = leaving.split(size)
        parts = sums.split(size)
        for index in range(max(len(outs), len(parts))):
            works = []
            if index < len(parts):
                arrived = torch.empty_like(parts[index])
                works.append(dist.irecv(arrived, group=group, group_src=source))
            if index < len(outs):
                works.append(dist.isend(outs[index], group=group, group_dst=to))
            for work in works:
                work.wait()
            if index < len(parts):
                trees.combine(parts[index], arrived, op)


SMALL = "no piece is larger than piece_bytes, in whole elements"
UNDER_WAY = "the second piece is under way before the first is combined"
IN_TURN = "the first piece is combined before the last one is waited for"
IN_ORDER = "the pieces are waited for in the order in which they come"
SIZE = "max(1, piece_bytes // sums.element_size())"
TAKE = "combine(part, other, op)"
STARTS = "works = iter(dist.batch_isend_irecv(receives + sends))"
PAIRED = "zip(sums.split(size), arrived.split(size), strict=True)"
ARRIVED = "arrived = torch.empty_like(sums)"
NUMBER = "piece_bytes // element_size() elements make a piece, and at least one."
TURNS = "Start everything first; then wait for one piece, combine it, and wait for the next."
EACH_LIST = (
    "Two lists that are walked together have different lengths.",
    "What is sent and what is received may have different numbers of pieces, so start the receives "
    "and the sends each in a list of its own.",
)
exchange_in_pieces = Spec(
    todo="4.8",
    truth=ring.exchange_in_pieces,
    layouts=PAIRS,
    operations=OPERATIONS,
    cases=in_pieces,
    observe=pieces_seen,
    tell=tell_exchange("exchange_in_pieces"),
    facts=stated(
        FACTS_TABLE
        | {
            OUTGOING: "`outgoing` is only sent, and belongs to the caller.",
            UNDER_WAY: "While the first piece is combined, nothing else travels.",
            IN_TURN: "All pieces have come before the first is combined, so that nothing travels "
            "meanwhile.",
            IN_ORDER: "The first piece to come has to wait until a later one has been combined.",
            SMALL: "A piece has at most piece_bytes bytes, in whole elements.",
        }
    ),
    advice=ADVICE
    | {
        "": "combine(part, other, op) for every piece, with `part` a view of `total`.",
        "pieces sent": NUMBER,
        "pieces received": NUMBER,
        SMALL: NUMBER,
        UNDER_WAY: TURNS,
        IN_TURN: TURNS,
        IN_ORDER: TURNS,
    },
    reasons=REASONS
    | {
        "zip() argument": EACH_LIST,
        "split_size can only be 0": (
            "The size of a piece is 0 elements.",
            "A piece has at least one element, also where piece_bytes is less than that.",
        ),
    },
    hints=(
        "size = max(1, piece_bytes // total.element_size()) elements make a piece, and "
        "tensor.split(size) gives the pieces as views.",
        "First start to receive all pieces, into a tensor as large as `total`, and to send all "
        "pieces of `outgoing`, and keep the works. There may be more of one than of the other.",
        "Then go through the pieces in order: wait for the receive of one, combine it into its "
        "part of `total`, and go on. The later ones travel meanwhile. At the end wait for the "
        "sends.",
    ),
    mistakes="""
        {ARRIVED} => arrived = sums
        {TAKE} => ... :: It is received straight into `total`, whose own numbers are lost. | Receive
            into a tensor of its own, as large as `total`, and combine that.
        {ARRIVED} => arrived = sums ::
            It is received straight into `total`, and then combined with itself.
        {SIZE} => max(1, leaving.numel(), sums.numel()) ::
            Everything travels in one piece. | {NUMBER}
        {SIZE} => max(1, piece_bytes) :: piece_bytes is taken for a number of elements.
        {SIZE} => max(1, -(-piece_bytes // sums.element_size())) ::
            The size of a piece is rounded up, so that it is larger than piece_bytes.
        {SIZE} => max(1, piece_bytes // 2 // sums.element_size()) ::
            The pieces are half as large as they may be.
        {STARTS} => {STARTS}; works = iter([work.wait() for work in works][:0]) ::
            All pieces are waited for before the first is combined. | {TURNS}
        {PAIRED} => list({PAIRED})[:1] :: Only the first piece is combined. | Go through all pieces.
        {TAKE} => combine(part, other, "sum") ::
            `op` is not looked at: everything is added. | Pass `op` on.
        {TAKE} => {TAKE}; part.div_(2) if op == "avg" else None ::
            "avg" is divided here already. | Only add: whoever has the sum of all ranks divides.
        {TAKE} => part.copy_(other) :: What comes in overwrites `total`. | {TAKE}
        instead one_by_one ::
            A piece is started only when the one before it has been combined. | {TURNS}
    """,
    module=vars(calls) | globals(),
)
