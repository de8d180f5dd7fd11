"""What a rank sends in one call, and a guard before each message.

    with Wire(place, spec) as wire:      sends and collectives pass through torch's dispatcher
        answer(...)                      wire.entries, wire.unwaited

The guard refuses what gloo would answer with a hang or with the end of the process: a message to
the rank itself, to a rank that does not exist, through another group; and operations that an
exercise rules out.
"""

from collections.abc import Callable

import numpy as np
import torch.distributed as dist

from manyhands.checks import Wrong
from manyhands.checks.engine.mistakes import NO_GROUP, USE_GROUP
from manyhands.checks.engine.spec import Place, Spec
from manyhands.instruments.ledger import NAMES, Ledger, _as_group

SINGLE = ("c10d::send", "c10d::recv_", "c10d::recv_any_source_")
STARTS = (  # calls that may return before their message has arrived
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
)
ASKS = ("wait", "is_completed", "synchronize", "get_future")

End = tuple[str, int, int]  # "send" or "recv", from, to: ranks of the job


class Wire(Ledger):
    """A ledger that knows which messages were waited for, and refuses those that would hang."""

    def __init__(self, place: Place, spec: Spec) -> None:
        super().__init__()
        self.place = place
        self.spec = spec
        self.works: dict[int, dist.Work] = {}  # those started and not asked about yet

    @property
    def unwaited(self) -> int:
        """How many messages were started that nobody has waited for."""
        return len(self.works)

    @property
    def ends(self) -> list[End]:
        """Both ends of single messages, as far as this rank has them."""
        me = dist.get_rank()
        sends = [("send", me, e.peer) for e in self.entries if e.op == "send" and e.nbytes]
        return sends + [("recv", e.peer, me) for e in self.entries if e.op == "recv" and e.nbytes]

    def __enter__(self) -> "Wire":
        self.real_starts = {name: getattr(dist, name) for name in STARTS if hasattr(dist, name)}
        self.real_asks = {name: getattr(dist.Work, name) for name in ASKS}
        for name, call in self.real_starts.items():
            setattr(dist, name, self._starting(call))
        for name, call in self.real_asks.items():
            setattr(dist.Work, name, self._asking(call))
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        for name, call in self.real_starts.items():
            setattr(dist, name, call)
        for name, call in self.real_asks.items():
            setattr(dist.Work, name, call)

    def _starting(self, call: Callable) -> Callable:
        def start(*args: object, **named: object) -> object:
            work = call(*args, **named)
            if named.get("async_op", False) and work is not None:
                self.works[id(work)] = work
            return work

        return start

    def _asking(self, call: Callable) -> Callable:
        def ask(work: dist.Work, *args: object) -> object:
            self.works.pop(id(work), None)
            return call(work, *args)

        return ask

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # torch's own signature
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.name().split("::")[1].split(".")[0].rstrip("_")
            group = next(filter(None, map(_as_group, reversed(args))), None)
            if group is not None:
                self._judge(NAMES.get(name, name), group, args)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.name() in SINGLE:  # here, since P2POp takes only torch's own isend and irecv
            work = dist.Work.unbox(result)
            self.works[id(work)] = work
        return result

    def _judge(self, op: str, group: dist.ProcessGroup, args: tuple) -> None:
        """Refuse a call before it is made."""
        allowed = self.spec.operations
        if allowed and op not in allowed:
            can = ", ".join(allowed)
            raise Wrong(
                f"it calls dist.{op}",
                "In this exercise you build such an operation yourself.",
                f"Use only {can} and their asynchronous versions.",
            )
        if len(self.entries) >= self.spec.max_messages:
            raise Wrong(
                f"it has started {len(self.entries)} messages and goes on",
                "One call needs far fewer messages.",
                "Look at what ends the loop that sends.",
            )
        ranks = tuple(dist.get_process_group_ranks(group))
        if self.spec.guards_group and ranks != self.place.members:
            raise Wrong(
                f"dist.{op} went through ranks {list(ranks)}, not through the group "
                f"{list(self.place.members)} that was given",
                NO_GROUP,
                USE_GROUP,
            )
        if op in ("send", "recv"):
            self._judge_peer(op, ranks, args)

    def _judge_peer(self, op: str, ranks: tuple[int, ...], args: tuple) -> None:
        verb = "sends to" if op == "send" else "receives from"
        if len(args) < 4:
            raise Wrong(
                "a recv names no sender, so it takes whatever comes first",
                "Messages of two ranks can then change places.",
                "Name the sender: group_src=.",
            )
        peer = args[2]
        if not 0 <= peer < len(ranks):
            raise Wrong(
                f"it {verb} rank {peer}, but the ranks of the group are 0 to {len(ranks) - 1}",
                "There is no such rank in the group.",
                "On a ring, take the number modulo n; elsewhere leave out ranks that do not exist.",
            )
        if ranks[peer] == dist.get_rank():
            raise Wrong(
                f"a rank {verb} itself",
                "A rank holds its own data already, and such a message never ends.",
                "Leave out the rank's own number.",
            )


def lost(balance: np.ndarray) -> str:
    """Words for a message that has only one end, or "".

    Args:
        balance: for each sender and each receiver the sends less the recvs. (n, n)
    """
    for source, target in np.argwhere(balance).tolist():
        if balance[source, target] > 0:
            return f"rank {source} sends a message to rank {target} that is never received"
        return f"rank {target} receives from rank {source}, which sends no such message"
    return ""
