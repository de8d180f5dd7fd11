"""What happened in a collective, round by round, worked out from the messages that were sent.

    rank 0 starts with  [0 in chunk 0, 0 in chunk 1, ...]      every number carries two marks:
    rank 1 starts with  [1 in chunk 0, 1 in chunk 1, ...]      its rank and its chunk
    rank 0's chunk 1 later reads "0+1": the sum of both ranks' numbers

The inputs are marked so that every sum tells what is in it. So nothing needs to be known of the
algorithm, and a figure made from the result shows what the program did, not what it should do.

    results = run_ranks(record, 4, all_reduce_ring)
    rounds = replay(*zip(*results))
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.instruments.ledger import Entry, Ledger, rounds
from manyhands.ranks.failures import BadInput

MAX_RANKS = 8
COUNT_BITS = 4  # a mark counts how often each rank's number is in the sum
CHUNK_SHIFT = MAX_RANKS * COUNT_BITS

Held = dict[int, frozenset[int]]  # chunk -> the ranks whose numbers are in it


class Message(NamedTuple):
    """One chunk on its way; `ranks` are those whose numbers are in it."""

    sender: int
    receiver: int
    chunk: int
    ranks: frozenset[int]


class Round(NamedTuple):
    """The messages of one round, and what each rank holds after it."""

    messages: list[Message]
    held: dict[int, Held]


class _Event(NamedTuple):
    round: int
    is_send: bool
    parts: Held


def marked_input(rank: int, num_ranks: int) -> Tensor:
    """What `rank` starts with: `num_ranks` integers of type int64, one for each chunk."""
    if not 0 <= rank < num_ranks <= MAX_RANKS:
        raise BadInput(f"rank {rank} of {num_ranks}: marks are for 1 to {MAX_RANKS} ranks")
    return (1 << COUNT_BITS * rank) + (torch.arange(num_ranks) << CHUNK_SHIFT)


def record(collective: Callable[[Tensor], object]) -> tuple[list[Entry], list[int]]:
    """Call `collective` on this rank's marked input; return its messages and what came of it."""
    tensor = marked_input(dist.get_rank(), dist.get_world_size())
    with Ledger(keep=True) as ledger:
        collective(tensor)
    return ledger.entries, tensor.tolist()


def replay(
    entries_by_rank: Sequence[Sequence[Entry]], results: Sequence[Sequence[int]] | None = None
) -> list[Round]:
    """What every rank sent and held in each round; first comes the start, without messages.

    Args:
        entries_by_rank: of Ledger(keep=True), from ranks that started with `marked_input`.
        results: each rank's tensor at the end. What a rank makes of a message shows when it sends
            that chunk again, or in here; where neither tells, it is taken to add.

    Raises:
        BadInput: a number is no sum of marked inputs, or has a rank's number in it twice.
    """
    n = len(entries_by_rank)
    sends = [{e.rank: (e.peer, _parts_of(e, n)) for e in one} for one in rounds(entries_by_rank)]
    states = []
    for rank, events in enumerate(_events(entries_by_rank, sends)):
        final = _read(enumerate(results[rank]), n, f"rank {rank} ends with") if results else {}
        states.append(_states(rank, n, events, final, len(sends)))
    found = [Round([], {rank: state[0] for rank, state in enumerate(states)})]
    for number, by_sender in enumerate(sends, 1):
        messages = [
            Message(sender, receiver, chunk, ranks)
            for sender, (receiver, parts) in by_sender.items()
            for chunk, ranks in parts.items()
        ]
        found.append(Round(messages, {rank: state[number] for rank, state in enumerate(states)}))
    return found


def _parts_of(entry: Entry, num_ranks: int) -> Held:
    """The chunks that a send carries."""
    if entry.content is None:
        raise BadInput("the messages were recorded without their content: use Ledger(keep=True)")
    return _read(((None, value) for value in entry.content), num_ranks, f"rank {entry.rank} sends")


def _read(values, num_ranks: int, where: str) -> Held:
    """Read marks, given as (chunk, value); the chunk is None where any may come. 0 is no mark."""
    parts: Held = {}
    for place, value in values:
        if value == 0:
            parts |= {} if place is None else {place: frozenset()}
            continue
        mark = value if isinstance(value, int) else -1  # -1 is no sum either
        counts = [mark >> COUNT_BITS * rank & 15 for rank in range(MAX_RANKS)]
        chunk, rest = divmod(mark >> CHUNK_SHIFT, sum(counts) or 1)
        expected = range(num_ranks) if place is None else [place]
        if not any(counts) or any(counts[num_ranks:]) or rest or chunk not in expected:
            of_chunk = "" if place is None else f" of chunk {place}"
            raise BadInput(
                f"{where} {value}, which is no sum of marked inputs{of_chunk}: start every rank "
                "with marked_input, and add up"
            )
        if max(counts) > 1:
            twice = counts.index(max(counts))
            raise BadInput(
                f"{where} a chunk {chunk} that has rank {twice}'s number in it "
                f"{max(counts)} times: add each rank's number once"
            )
        parts[chunk] = frozenset(rank for rank, count in enumerate(counts) if count)
    return parts


def _events(entries_by_rank: Sequence[Sequence[Entry]], sends: list[dict]) -> list[list[_Event]]:
    """Each rank's sends and receives in the order of its program, with their rounds."""
    coming = defaultdict(deque)
    for number, by_sender in enumerate(sends, 1):
        for sender, (receiver, parts) in by_sender.items():
            coming[sender, receiver].append((number, parts))
    found = []
    for rank, mine in enumerate(entries_by_rank):
        going = deque((number, one[rank][1]) for number, one in enumerate(sends, 1) if rank in one)
        events: list[_Event] = []
        for entry in mine:
            if entry.op in ("send", "recv"):
                queue = going if entry.op == "send" else _queue(coming, entry)
                number, parts = queue.popleft()
                number = max(number, events[-1].round if events else 0)
                events.append(_Event(number, entry.op == "send", parts))
        found.append(events)
    return found


def _queue(coming: dict[tuple[int, int], deque], entry: Entry) -> deque:
    """The messages of which a recv takes the first; from anybody, those of who was first."""
    if entry.peer is not None:
        return coming[entry.peer, entry.rank]
    mine = [queue for (_, receiver), queue in coming.items() if receiver == entry.rank and queue]
    return min(mine, key=lambda queue: queue[0][0])


def _states(
    rank: int, num_ranks: int, events: list[_Event], final: Held, num_rounds: int
) -> list[Held]:
    """What a rank holds at the start and after each round."""
    held = {chunk: frozenset({rank}) for chunk in range(num_ranks)}
    after = {0: dict(held)}
    for place, event in enumerate(events):
        for chunk, ranks in event.parts.items():
            later = (
                one.parts[chunk]
                for one in events[place + 1 :]
                if one.is_send and chunk in one.parts
            )
            shown = next(later, final.get(chunk))
            held[chunk] = ranks if event.is_send else _received(held[chunk], ranks, shown)
        after[event.round] = dict(held)
    after[num_rounds] = held | final
    return [after[max(n for n in after if n <= number)] for number in range(num_rounds + 1)]


def _received(own: frozenset, coming: frozenset, shown: frozenset | None) -> frozenset:
    """What a chunk holds after a message: both, only what came, or what was there before.

    Args:
        shown: what is in it when it is seen next; None if it is not.
    """
    choices = (own | coming, coming)
    return next((one for one in choices if shown is None or one <= shown), own)
