"""Exercises 5.10 and 5.11: buckets sent during backward, by the order of what happens.

A message arrives when it is waited for, and never before: what is read too early is always wrong.
How much of the messages an answer hides is measured elsewhere (hidden.py), and costs no points.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.checks.data_parallel.buckets import Crossed
from manyhands.checks.engine import cases
from manyhands.checks.engine.spec import Place, Spec
from manyhands.checks.engine.tables import reasons
from manyhands.checks.engine.values import first_difference, malformed
from manyhands.data_parallel import replicas
from manyhands.instruments.ledger import Ledger


class Backwards(NamedTuple):
    """Some backwards of one wrapped model; the last but one may be inside no_sync()."""

    kind: type[nn.Module]
    bucket_mb: float
    seed: int
    no_sync: bool = False
    dtype: torch.dtype = torch.float32


TOUCHED = "a tensor was changed while its message was on its way"


class Late(dist.Work):
    """An all_reduce whose result is there once somebody has waited for it."""

    def __init__(self, work: dist.Work, tensor: Tensor, result: Tensor, log: list[str]) -> None:
        super().__init__()
        self.work = work
        self.tensor = tensor
        self.result = result
        self.log = log
        self.sent = tensor.clone()
        self.num_polls = 0

    def wait(self, *args: object) -> bool:
        """Bring the result."""
        self.log.append("wait")
        if self.work is not None:
            self.work.wait()
            if not torch.equal(self.tensor, self.sent):
                self.log.append(TOUCHED)
            self.tensor.copy_(self.result)
            self.work = None
        return True

    def is_completed(self) -> bool:
        """Not at once: who asks has to ask again."""
        self.num_polls += 1
        return self.work is None or (self.num_polls > 2 and self.wait())

    def get_future(self) -> torch.futures.Future:
        """One whose result is there."""
        self.wait()
        future = torch.futures.Future()
        future.set_result([self.tensor])
        return future


class Log(Ledger):
    """Writes each message into a list, in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # torch's own signature
        before = len(self.entries)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for entry in self.entries[before:]:
            self.events.append(f"{entry.op} of {entry.nbytes} bytes")
        return result


@contextmanager
def late_messages(log: list[str]) -> Iterator[list[Late]]:
    """Let each all_reduce arrive when it is waited for; one without async_op waits at once.

    Yields a list to which each message that was started without waiting is appended.
    """
    real = dist.all_reduce
    started: list[Late] = []
    signature = inspect.signature(inspect.unwrap(dist.distributed_c10d.all_reduce))

    def all_reduce(*args: object, **named: object) -> Late | None:
        given = signature.bind(*args, **named)
        given.apply_defaults()
        tensor = given.arguments["tensor"]
        if not given.arguments["async_op"]:
            log_length = len(log)
            real(*args, **named)
            if len(log) > log_length:
                log.append("wait")
            return None
        result = tensor.detach().clone()
        given.arguments["tensor"] = result
        started.append(Late(real(*given.args, **given.kwargs), tensor.detach(), result, log))
        return started[-1]

    with mock.patch.object(dist, "all_reduce", all_reduce):
        yield started


def backwards(n: int) -> list[Backwards]:
    """One bucket, many, and gradients that come in another order; with and without no_sync."""
    return [
        Backwards(cases.Probe, 25, cases.draw_seed()),
        Backwards(cases.Probe, 1e-4, cases.draw_seed()),
        Backwards(Crossed, 1e-4, cases.draw_seed(), no_sync=True),
        Backwards(Crossed, 25, cases.draw_seed(), dtype=torch.bfloat16),
    ]


def refuse_torch_s(answer: object) -> None:
    """torch's own class is no answer."""
    torch_s = nn.parallel.DistributedDataParallel
    if isinstance(answer, type) and issubclass(answer, torch_s):
        raise malformed(answer, "a class of your own", "Write the methods that are asked for.")


def note_gradients(module: nn.Module, log: list[str]) -> None:
    """Log each gradient as it becomes ready. Called before the wrapper's hooks, it logs first."""
    for param in module.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(lambda _: log.append("a gradient is ready"))


# ---- 5.10 -----------------------------------------------------------------------------------


def sent(answer, case: Backwards, place: Place) -> dict:
    """What happens in a backward, in order, and what travels; before it one with sync False."""
    refuse_torch_s(answer)
    inner = cases.build(case.seed + place.job_rank, case.kind).to(case.dtype)
    seen = {}
    with Log() as wire, late_messages(wire.events) as started:
        note_gradients(inner, wire.events)
        model = answer(inner, case.bucket_mb, **place.options)
        model._finish = lambda: wire.events.append("_finish is called")
        weights = [param.detach().clone() for param in inner.parameters()]
        for name in ("backward while self.sync is False", "backward")[not case.no_sync :]:
            wire.events.clear()
            model.sync = name == "backward"
            cases.run_backward(model, cases.token_batch(case.seed + place.job_rank))
            seen[f"in order, the {name}"] = wire.events[:]
            if not model.sync:
                seen["nothing is counted while self.sync is False"] = not any(model.num_ready)
                model.num_ready = [0] * len(model.buckets)
                model.in_flight.clear()
        given = [late.sent for late in started]
        seen |= _travelled(started, wire.events)
        seen["what the messages carry"] = given
        sent_from = [late.tensor.data_ptr() for late in started]
        seen["bucket number i is sent from self.flats[i]"] = sent_from == [
            flat.data_ptr() for flat in model.flats
        ]
        seen["how many messages in_flight holds"] = len(model.in_flight)
    seen["the weights are as they were"] = all(map(torch.equal, weights, inner.parameters()))
    return seen


def _travelled(started: list[Late], log: list[str]) -> dict:
    """Wait for all messages: none was changed on its way, and none shares its memory."""
    for late in started:
        late.wait()
    places = {late.tensor.data_ptr() for late in started}
    return {
        "no tensor is changed while its message is on its way": TOUCHED not in log,
        "every message has a flat of its own": len(places) == len(started),
    }


# ---- 5.11 -----------------------------------------------------------------------------------


def overlapped(answer, case: Backwards, place: Place) -> dict:
    """What happens in three backwards, in order, and the gradients after each."""
    refuse_torch_s(answer)
    inner = cases.build(case.seed + place.job_rank, case.kind).to(case.dtype)
    with Log() as wire, late_messages(wire.events):
        note_gradients(inner, wire.events)
        model = answer(inner, case.bucket_mb, **place.options)
        weights = [param.detach().clone() for param in inner.parameters()]
        seen = {}
        for step, name in enumerate(("first", "second", "third")):
            if step != 1:  # the second one adds to the gradients of the first
                inner.zero_grad(set_to_none=step == 0)
            batch = cases.token_batch(case.seed + 10 * step + place.job_rank)
            wire.events.clear()
            if case.no_sync and step == 0:
                name = "first backward, inside no_sync()"
                with model.no_sync():
                    cases.run_backward(model, batch)
            else:
                name = f"{name} backward"
                cases.run_backward(model, batch)
            seen.update(_seen(wire.events, inner, name))
    same = all(map(torch.equal, weights, inner.parameters()))
    return {**seen, "the weights are as they were": same}


def _seen(events: list[str], inner: nn.Module, name: str) -> dict:
    sent = [what for what in events if what != "wait"]
    first_wait = events.index("wait") if "wait" in events else len(events)
    return {
        f"in order, the {name}": sent,
        f"it waits for no message while one is still to be sent, in the {name}": (
            not set(events[first_wait:]) - {"wait"}
        ),
        f"the gradients after the {name}": cases.gradients_of(inner),
    }


def say_events(found: dict, wanted: dict) -> str:
    """The first difference; of events the place where they part."""
    for name, value in wanted.items():
        mine = found[name]
        if not name.startswith("in order") or mine == value:
            continue
        at = next(i for i in range(len(mine) + 1) if mine[: i + 1] != value[: i + 1])
        said = [what[at] if at < len(what) else "nothing more" for what in (mine, value)]
        before = f"after {at} event(s)" if at else "at first"
        where = name.removeprefix("in order, the ")
        return f"shows in the {where}, {before}: {said[0]}, not {said[1]}"
    return first_difference(found, wanted)


SYNC = "if not self.sync:\n            return"
COUNT = "self.num_ready[self.bucket_of[param]] += 1"
BOUND = "while len(self.in_flight) < len(self.buckets):"
ALL_AT_ONCE = """if sum(self.num_ready) < len(self.bucket_of):
            return
        for index in range(len(self.buckets)):
            self._start(index)
        self._finish()
        return"""
WHEN_FULL = """index = self.bucket_of[param]
        if self.num_ready[index] == len(self.buckets[index]):
            self._start(index)
        if len(self.in_flight) == len(self.buckets):
            self._finish()
        return"""
DONE = "type('Done', (), {'wait': lambda self: True})()"
SYNCED = f"dist.all_reduce(flat, group=self.group)\n        self.in_flight.append({DONE})"
SENT = "self.in_flight.append(dist.all_reduce(flat, group=self.group, async_op=True))"
PACKED = "flat = pack([param.grad for param in self.buckets[index]], out=self.flats[index])"
LATER = "Keep the work in self.in_flight, and leave the waiting to _finish."
COUNTS = "Return from _on_grad_ready before anything is counted when self.sync is False."
IN_ORDER = "Each time, start buckets in order as long as the next one is full."
ONCE = "Call self._finish() after the loop that starts buckets."
REASONS = reasons(
    """
    zip() argument :: What is zipped has different lengths, as where a bucket has no work yet. |
        Call _finish when len(self.in_flight) == len(self.buckets).
    'NoneType' object has no attribute 'detach' :: A gradient that is packed is not there yet: its
        .grad is None. | Start a bucket when num_ready[index] == len(buckets[index]).
    Boolean value of Tensor ::
        `in` compares the numbers in tensors. | self.bucket_of[param] is the number of its bucket.
    converted to an index ::
        num_ready counts by bucket, not by parameter. | self.num_ready[self.bucket_of[param]]
    the last backward gave no gradient to ::
        Counts still stand after a backward, as if gradients were missing. | While self.sync is
        False nothing is counted, and _finish sets the counts to 0.
""",
    globals(),
)


def say_backwards(case: Backwards) -> str:
    """The words for a case."""
    without = ", with self.sync False at first" if case.no_sync else ""
    short = " in bfloat16" if case.dtype is torch.bfloat16 else ""
    return f"{case.kind.__name__}{short} in buckets of {case.bucket_mb:g} MB{without}"


bucket_sender = Spec(
    todo="5.10",
    truth=replicas.BucketSender,
    layouts=cases.TWO,
    max_messages=80,
    cases=backwards,
    observe=sent,
    independent=True,
    tell=say_backwards,
    say=say_events,
    advice={"": "Write down which gradient comes when, and which bucket is full then."},
    hints=(
        "_on_grad_ready: count the parameter in. As long as the next bucket in order is full, "
        "start it. When all have started, call self._finish().",
        "The next bucket to start is number len(self.in_flight). It is full when num_ready of it "
        "is the number of its parameters.",
        "_start: pack(the bucket's gradients, out=self.flats[index]), then all-reduce that with "
        "async_op=True, and append the work to self.in_flight.",
    ),
    mistakes=r"""
        {SYNC} => pass :: Gradients are counted and sent while self.sync is False. | {COUNTS}
        {SYNC} => if not self.sync:\n            {COUNT}\n            return ::
            Gradients are counted while self.sync is False.
        {SENT} => {SENT}\n        self.in_flight[-1].wait() :: Each bucket is waited for at once, so
            nothing is hidden behind the computation. | {LATER}
        {SENT} => {SYNCED} :: Each bucket is waited for at once, so nothing is hidden behind the
            computation. | Pass async_op=True. {LATER}
        out=self.flats[index] => out=max(self.flats, key=len)[: len(self.flats[index])] ::
            All buckets are packed into one flat, which is overwritten while its message is on its
            way. | Each bucket has a flat of its own: self.flats[index].
        {PACKED} => flat = pack(self.buckets[index], out=self.flats[index]) ::
            The weights are packed, not the gradients. | {PACKED}
        out=self.flats[index] => out=None ::
            A bucket is packed into a new tensor, and _finish looks for the sums in self.flats. |
            Pack into the flat that is there: pack(gradients, out=self.flats[index]).
        {BOUND} => {ALL_AT_ONCE}\n        {BOUND} ::
            The first bucket is sent after the last gradient is ready, so no message travels while
            backward still computes. | Start a bucket as soon as its own last gradient is ready.
        {BOUND} => {WHEN_FULL}\n        {BOUND} :: The buckets are started in the order in which
            they are full, which is not 0, 1, 2, ... | {IN_ORDER}
        self._finish() => pass ::
            _finish is never called, so nobody would wait for the messages. | {ONCE}
        self._start(index) => self._start(index)\n            self._finish() ::
            _finish is called after every bucket, and it has to wait for all of them.
        {BOUND} => if len(self.in_flight) < len(self.buckets): :: At most one bucket is started for
            each gradient, so one that was full too early is left behind. | {IN_ORDER}
    """,
    reasons=REASONS,
    module=globals(),
)

WAITS = "work.wait()"
BACK = "unpack(flat, [param.grad for param in bucket], world_size)"
WAIT = "Call wait() on each work in self.in_flight, and unpack after it."
DIVIDE = "unpack(flat, gradients, world_size) divides by the number of ranks."
AGAIN = "At the end clear in_flight, and set the counts to 0."
CLEARS = "self.in_flight.clear()"
VIEWS = """parts = flat.div_(world_size).split([param.numel() for param in bucket])
            for param, part in zip(bucket, parts, strict=True):
                param.grad = part.view_as(param)"""

bucketed_ddp = Spec(
    todo="5.11",
    truth=replicas.BucketedDDP,
    layouts=cases.TWO,
    max_messages=80,
    cases=backwards,
    observe=overlapped,
    independent=True,
    tell=say_backwards,
    say=say_events,
    advice={"": WAIT},
    hints=(
        "For each bucket: wait for its work, then write its flat back into the gradients.",
        "work.wait() first, then unpack(flat, [param.grad for param in bucket], world_size), which "
        "divides as well.",
        "At the end self.in_flight.clear(), and self.num_ready = [0] * len(self.buckets).",
    ),
    mistakes=r"""
        {WAITS} => pass :: A message is not waited for before its flat is read. | {WAIT}
        {WAITS} => work.wait() if work is self.in_flight[-1] else None ::
            Only the last message is waited for.
        {WAITS} => work.wait() if work is self.in_flight[0] else None ::
            Only the first message is waited for.
        {WAITS} => pass
        {BACK} => {BACK}\n            {WAITS} ::
            The flat is read first, and its message is waited for after that.
        {BACK} => unpack(flat, [param.grad for param in bucket]) ::
            The gradients are sums over the ranks, not means. | {DIVIDE}
        {BACK} => unpack(flat, [param.grad for param in bucket], len(self.buckets)) ::
            The sums are divided by the number of buckets.
        {BACK} => unpack(flat, [param.grad for param in bucket], world_size**2) ::
            The sums are divided by the number of ranks twice.
        dist.get_world_size(self.group) => dist.get_world_size() :: The sums are divided by the size
            of the whole job, not by that of the group. | dist.get_world_size(self.group)
        {BACK} => pass :: The means never reach the gradients. | unpack(flat, gradients, world_size)
        {BACK} => unpack(flat, bucket, world_size) ::
            The means are written into the weights. | unpack into [param.grad for param in bucket].
        {BACK} => {VIEWS} ::
            A gradient is a view of the flat, and the next backward adds to it in there: what is
            sent then is packed onto itself. | Copy the means into the gradients that are there.
        {CLEARS} => pass :: The works of the last backward are still in in_flight. | {AGAIN}
        self.num_ready = [0] * len(self.buckets) => pass ::
            The counts of the last backward still stand.
    """,
    reasons=REASONS,
    module=globals(),
)
