"""What a rank does in one call, as plain data; and the tensors that it is given.

    with Tape(place) as tape:   tape.events  ["send 0", "recv 0", "wait recv 0", "use recv 0", ...]
        answer(...)             tape.messages("send")

Only what all right answers share is judged: values, partners, numbers of messages and bytes, and
the order of events where it matters. Which algorithm makes them is not.
"""

import json
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from manyhands.checks.engine.card import Wrong
from manyhands.checks.engine.spec import Place
from manyhands.instruments.ledger import Entry, Ledger, rounds


class Tape(Ledger):
    """A ledger that also sees waits, and which tensors are used when.

    Args:
        may_wait: may this call wait for a message? Otherwise a wait is told at once, because all
            ranks would wait for one another.
        may_be_empty: may a message have no elements? Otherwise such a one is told at once, because
            its partner does not expect it.
    """

    def __init__(self, place: Place, may_wait: bool = True, may_be_empty: bool = True) -> None:
        super().__init__()
        self.place = place
        self.may_wait = may_wait
        self.may_be_empty = may_be_empty
        self.events: list[str] = []
        self.numbers = {"send": 0, "recv": 0}  # how many were started so far
        self.on_their_way: dict[int, tuple] = {}  # id -> work, "recv 3", its memory
        self.arrived: dict[str, tuple] = {}  # what came and was not used yet: "recv 3" -> memory
        self.is_touched = False  # a tensor was read or written before its message was through

    def messages(self, op: str) -> list[Entry]:
        """The messages of one kind, without empty ones: an answer may leave those out."""
        return [entry for entry in self.entries if entry.op == op and entry.nbytes]

    def peers(self, op: str) -> list[int]:
        """The partners of the messages of one kind: ranks in the group."""
        return [self.place.members.index(entry.peer) for entry in self.messages(op)]

    def steps(self, op: str) -> list[int]:
        """How far away the partners are on the ring of the group, upwards."""
        return [(peer - self.place.rank) % self.place.n for peer in self.peers(op)]

    def nbytes(self, op: str) -> int:
        """The bytes of all messages of one kind."""
        return sum(entry.nbytes for entry in self.messages(op))

    def __enter__(self) -> "Tape":
        self.real = {name: getattr(dist.Work, name) for name in ("wait", "is_completed")}
        for name, call in self.real.items():
            setattr(dist.Work, name, self._asking(call))
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        for name, call in self.real.items():
            setattr(dist.Work, name, call)
        super().__exit__(*exc)

    def _asking(self, call: Callable) -> Callable:
        def ask(work: dist.Work, *args: object) -> object:
            if not self.may_wait:
                raise Wrong(
                    "it waits for a message",
                    "The function has to return at once, and its caller waits.",
                    "isend and irecv only start a message; dist.send and dist.recv also wait.",
                )
            is_through = call(work, *args)
            if is_through and id(work) in self.on_their_way:
                _, name, memory = self.on_their_way.pop(id(work))
                self.events.append(f"wait {name}")
                if name.startswith("recv"):
                    self.arrived[name] = memory
            return is_through

        return ask

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # torch's own signature
        num_entries = len(self.entries)
        self._look_at(func, args, kwargs or {})
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.entries) > num_entries and self.entries[-1].op in ("send", "recv"):
            op = self.entries[-1].op
            name = f"{op} {self.numbers[op]}"
            self.numbers[op] += 1
            self.events.append(name)
            work = dist.Work.unbox(result)
            self.on_their_way[id(work)] = work, name, span(args[0][0])
        return result

    def wait_for_the_rest(self) -> None:
        """Wait for what the answer has not waited for."""
        for work, _, _ in list(self.on_their_way.values()):
            work.wait()

    def _look_at(self, func, args: tuple, kwargs: dict) -> None:
        """Note which tensors are used."""
        if func.is_view or func.name() in ONLY_SHAPES:
            return
        is_message = func.name().startswith(("c10d::send", "c10d::recv"))
        if is_message and not self.may_be_empty and not args[0][0].numel():
            raise Wrong(
                f"a {func.name()[6:10]} has an empty piece",
                "The partner cuts its own tensors, and none of its pieces is empty.",
                "Start the receives and the sends each in a list of its own.",
            )
        pairs = zip((a.name for a in func._schema.arguments), args, strict=False)
        named = dict(pairs) | kwargs
        for argument in func._schema.arguments:
            given = named.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if func.name().startswith("c10d::recv"):
                writes = True
            for tensor in given if isinstance(given, list | tuple) else [given]:
                if isinstance(tensor, Tensor) and tensor.numel():
                    self._use(tensor, writes)

    def _use(self, tensor: Tensor, writes: bool) -> None:
        """Is the message of this tensor still on its way? Or is this the first use after that?"""
        mine = span(tensor)
        for _, name, memory in self.on_their_way.values():
            if overlap(mine, memory) and (writes or name.startswith("recv")):
                self.is_touched = True
        for name in [name for name, memory in self.arrived.items() if overlap(mine, memory)]:
            del self.arrived[name]
            self.events.append(f"use {name}")


ONLY_SHAPES = ("aten::empty_like", "aten::new_empty", "aten::new_zeros", "aten::zeros_like")


def span(tensor: Tensor) -> tuple[int, int]:
    """From where to where a tensor lies in memory."""
    if not tensor.numel():
        return 0, 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in pairs)
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Have two parts of the memory something in common?"""
    return one[0] < other[1] and other[0] < one[1]


# ---- what ranks tell one another beside the messages that are judged ------------------------

_num_calls = 0  # so far; the same on every rank


def together(place: Place, tape: Tape, call: Callable) -> list[list[Entry]]:
    """Make a call on every rank of the group while it is taped; the messages of all of them."""
    global _num_calls
    _num_calls += 1
    key = f"tape {_num_calls} "
    store = dist.distributed_c10d._get_default_store()
    try:
        with tape:
            call()
    finally:  # also where it fails, since the others wait for it
        store.set(key + str(place.job_rank), json.dumps([vars(entry) for entry in tape.entries]))
    taped = [json.loads(store.get(key + str(member))) for member in place.members]
    return [[Entry(**entry) for entry in entries if entry["nbytes"]] for entries in taped]


def rounds_down(entries: list[list[Entry]]) -> int:
    """How many rounds these messages take; -1 where one has one end only."""
    try:
        return len(rounds(entries))
    except ValueError:
        return -1


def rounds_up(entries: list[list[Entry]], place: Place, root: int) -> int:
    """How many messages in a row reach the root, where every rank takes the earliest first."""
    parents = {e.rank: e.peer for mine in entries for e in mine if e.op == "send"}

    def ready(rank: int, depth: int = 0) -> int:
        children = [child for child, parent in parents.items() if parent == rank]
        if depth > place.n:  # a circle
            return 0
        num_rounds = 0
        for child in sorted(ready(child, depth + 1) for child in children):
            num_rounds = max(num_rounds, child) + 1
        return num_rounds

    return ready(place.members[root])
