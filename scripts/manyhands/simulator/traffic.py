"""Messages in the time machine: who meets whom, what a message takes, and who waits for it.

    rank 0   posts    |#### on its card ####|arrives
    rank 1                  ... takes it            goes on when it has arrived

    message        leaves when it is sent; whoever sends waits until it has arrived and is taken
    collective     begins when the last of its group has come, and takes the time of a ring; of a
                   tree if it is a broadcast, a reduction to one rank or a barrier
    network card   each rank has one for each link, and it sends one message at a time; a collective
                   needs those of all its ranks

Source of a collective's time: collectives/alpha_beta.py.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from heapq import heappush
from typing import NamedTuple

from manyhands.collectives.alpha_beta import predicted_s
from manyhands.simulator.events import Collective, Message, groups_along
from manyhands.tensor.cost import Link

Span = tuple[int, str, float, float]  # rank, role, start_s, stop_s: as in the time lines
ALGORITHMS = {
    "all_reduce": "all_reduce_ring",
    "all_gather": "all_gather_ring",
    "reduce_scatter": "reduce_scatter_ring",
    "broadcast": "broadcast_tree",
    "reduce": "reduce_tree",
    "barrier": "all_reduce_tree",
    "gather": "gather",
    "scatter": "gather",
    "all_to_all": "gather",  # n - 1 rounds of 1/n of the bytes, too
}


class Machine(NamedTuple):
    """What the programs run on."""

    flops_per_s: float | None  # of a rank; None: computing takes its recorded seconds
    links: Mapping[str, Link]  # by axis; axes with equal links share a rank's card
    slower: float = 1.0  # the recorded seconds count so many times


class Flight:
    """A message or a collective between its call and its end."""

    def __init__(self, event: Message | Collective, partners: Sequence[int]) -> None:
        self.event = event
        self.missing = set(partners)  # who have not made their call
        self.ready_s = 0.0  # when it could leave, if the card was free
        self.arrives_s = 0.0
        self.stop_s: float | None = None  # when a wait for it ends; None: nobody knows yet
        self.waiting: list[tuple[int, float]] = []  # ranks, and since when


class Traffic:
    """All messages of a replay."""

    def __init__(self, num_ranks: int, sizes: Mapping[str, int], machine: Machine) -> None:
        ranks = range(num_ranks)
        self.sizes, self.machine = sizes, machine
        self.next = [0] * num_ranks  # which event of its program a rank does next
        # A heap: when a rank goes on, with which event. At one time earlier events come first, so
        # ranks that are equally far start their messages in the order of their programs.
        self.ready = [(0.0, 0, rank) for rank in ranks]
        self.groups: dict[str, list[tuple[int, ...]]] = {}
        self.counts: dict[tuple, int] = defaultdict(int)  # a rank's calls in a group
        self.open: dict[tuple, Flight] = {}  # collectives for which some have not come
        self.posted: dict[tuple, deque[Flight]] = defaultdict(deque)  # messages with one end
        self.card_free_s: dict[tuple[int, Link], float] = defaultdict(float)
        self.stuck: dict[int, Flight] = {}  # what a rank waits for, while no end is in sight
        self.spans: list[list[Span]] = [[] for _ in ranks]
        self.exposed_s: list[dict[str, float]] = [defaultdict(float) for _ in ranks]

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks along an axis through this rank."""
        if axis not in self.groups:
            self.groups[axis] = groups_along(axis, self.sizes)
        return self.groups[axis][rank]

    def link(self, axis: str) -> Link:
        """Of several axes together the narrowest one, which holds up the ring."""
        links = self.machine.links
        parts = [axis] if axis in links else axis.split("+")
        return min((links[part] for part in parts), key=lambda link: link.bytes_per_s)

    def collective(self, rank: int, event: Collective, now_s: float) -> Flight:
        """Come to a collective; the last one of the group starts it."""
        ranks = self.group(event.axis, rank)
        queue = (event.axis, ranks[0], event.channel)
        number = self.counts[rank, queue] = self.counts[rank, queue] + 1
        flight = self.open.get((queue, number))
        if flight is None:
            flight = self.open[queue, number] = Flight(event, ranks)
        if flight.event.op != event.op:
            raise ValueError(
                f"call {number} of {event.axis} is {event.op} on rank {rank}, and "
                f"{flight.event.op} on another one: all have to make the same calls in one order"
            )
        flight.missing.remove(rank)
        if flight.missing:
            return flight
        del self.open[queue, number]
        if len(ranks) > 1:
            link = self.link(event.axis)
            about = len(ranks), event.nbytes, link.latency_s, 1 / link.bytes_per_s
            self.carry(flight, ranks, link, now_s, predicted_s(ALGORITHMS[event.op], *about))
        self.land(flight, flight.arrives_s)
        return flight

    def message(self, rank: int, event: Message, now_s: float) -> Flight:
        """Send or receive; what comes second of the two ends finds the first one."""
        peer, link = self.group(event.axis, rank)[event.peer], self.link(event.axis)
        flight, is_send = Flight(event, [peer]), event.op == "send"
        if is_send:
            taken_s = link.latency_s + event.nbytes / link.bytes_per_s
            self.carry(flight, [rank], link, now_s, taken_s)
        ends = (rank, peer) if is_send else (peer, rank)
        posted = self.posted[ends, event.axis, event.channel, event.tag]
        if not posted or posted[0].event.op == event.op:
            posted.append(flight)
            return flight
        other = posted.popleft()
        sent, taken = (flight, other) if is_send else (other, flight)
        taken.ready_s, taken.arrives_s = sent.ready_s, sent.arrives_s
        self.land(sent, max(sent.arrives_s, now_s))
        self.land(taken, sent.arrives_s)
        return flight

    def carry(
        self, flight: Flight, ranks: Sequence[int], link: Link, now_s: float, taken_s: float
    ) -> None:
        """Give a message that is ready now to the cards of `ranks`, behind what they carry."""
        start_s = max([now_s, *(self.card_free_s[rank, link] for rank in ranks)])
        flight.ready_s, flight.arrives_s = now_s, start_s + taken_s
        for rank in ranks:
            self.card_free_s[rank, link] = flight.arrives_s
            self.note(rank, "communication", start_s, flight.arrives_s)

    def land(self, flight: Flight, stop_s: float) -> None:
        """The end is known: those who wait for it go on then."""
        flight.stop_s = stop_s
        for rank, since_s in flight.waiting:
            del self.stuck[rank]
            self.wait(rank, flight, since_s)

    def wait(self, rank: int, flight: Flight, since_s: float) -> None:
        """A rank goes on when the message is through."""
        if flight.stop_s is None:
            flight.waiting.append((rank, since_s))
            self.stuck[rank] = flight
            return
        stop_s = max(since_s, flight.stop_s)
        exposed_s = flight.arrives_s - max(since_s, flight.ready_s)
        if exposed_s > 0:
            self.exposed_s[rank][flight.event.axis] += exposed_s
        self.note(rank, "idle", since_s, stop_s)
        self.go_on(rank, stop_s)

    def go_on(self, rank: int, at_s: float) -> None:
        """A rank does its next event then."""
        heappush(self.ready, (at_s, self.next[rank], rank))

    def note(self, rank: int, role: str, start_s: float, stop_s: float) -> None:
        """Add a span, unless it is empty."""
        if stop_s > start_s:
            self.spans[rank].append((rank, role, start_s, stop_s))
