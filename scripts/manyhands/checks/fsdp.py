"""Checks of lesson 10. 10.1 to 10.4 stand in _flat.py, 10.6 to 10.10 in _wrapping.py.

10.5 looks at the learner's FSDP from inside: which units have memory after each call of its four
methods? The course's own FSDP makes the same walk first, in the same ranks. A rank stops at the
first call that leaves something else behind, before a layer computes with memory that is gone.
"""

import random
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.checks import Lesson, _flat, _wrapping
from manyhands.checks._flat import (  # noqa: F401
    Flat,
    ShardedFlat,
    ShardedOptimizer,
    reduce_during_backward,
)
from manyhands.checks._wrapping import (  # noqa: F401
    Seen,
    calls_per_step,
    in_ranks,
    make_mesh,
    options_of,
    torch_fsdp,
    train_sharded,
)
from manyhands.checks.shared import Reasons, build, run_backward, token_batch, waits
from manyhands.fsdp import units as truth
from manyhands.instruments.ledger import Ledger, calls
from manyhands.memory.savings import checkpointed

lesson = Lesson("fsdp")
hint, summary, ready, keep = lesson.hint, lesson.summary, lesson.ready, lesson.keep

# ---- 10.5 -----------------------------------------------------------------------------------

METHODS = ("before_forward", "after_forward", "before_backward", "after_backward")
NUM_STEPS, RATE = 3, 0.5
Label = tuple[int, bool]  # of a flat: the number of its unit; is it trainable?
HALF_FROZEN = 2  # the unit of a `Units` that has two flats
STANDS = (
    "it was right in step 1: self.is_backward still stands from the last backward",
    "set it to False before the root's forward",
)
ENDED = (
    "a layer computed with weights whose memory was gone",
    "wait for a unit before it computes; free it when nothing of it is still to be computed",
)
LAST_UNIT = (
    "the last unit has no next one",
    "in forward ask index + 1 < len(self.units); in backward the next one is index - 1",
)
FULLY: Reasons = {
    "list index out of range": LAST_UNIT,
    "SIGSEGV": ENDED,
    "SIGBUS": ENDED,
    "out of bounds for storage": ENDED,
    "has no attribute 'start'": ("a unit is a list of flats", "for flat in self.units[index]: ..."),
    "has no attribute 'wait'": ("a unit is a list of flats", "for flat in self.units[index]: ..."),
    "has no attribute 'free'": ("a unit is a list of flats", "for flat in self.units[index]: ..."),
    "has no attribute 'reduce'": ("a unit is a list of flats", "for flat in self.units[index]:"),
}


class Units(nn.Module):
    """Four units, one of them half frozen and one wholly; head and embedding are one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.units = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)),
                nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)),
                nn.Linear(6, 6),
                nn.Linear(6, 6),
            ]
        )
        self.units[1][0].requires_grad_(False)
        self.units[2].requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.through: Callable = lambda unit, x: unit(x)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for unit in self.units:
            x = x + self.through(unit, x)
        return self.head(x)  # (B, 11)


class Case(NamedTuple):
    """One way to train a `Units`."""

    name: str
    reshard: bool = True
    recomputes: bool = False


CASES = (
    Case("reshard=True"),
    Case("reshard=False", reshard=False),
    Case("units that run again in backward", recomputes=True),
)


class Event(NamedTuple):
    """What one call of the four methods left behind."""

    step: int
    method: str
    index: int
    whole: frozenset[Label]  # the flats that have memory
    in_backward: bool
    before: frozenset[Label]  # those that had memory before the call
    brought: frozenset[int]  # units that the call began to gather
    flag: object  # is_backward before the call


@lesson.exercise(
    "10.5",
    "A unit is a list of flats. wait() brings a flat and returns when it is there, start() only "
    "starts to bring it, free() gives its memory back, reduce() makes shard.grad.",
    "before_forward: for index 0 free every flat of every unit first, and set is_backward to "
    "False. Then wait for unit index, and start unit index + 1 if there is one. after_forward: "
    "free, except the root, and except where reshard is False.",
    "before_backward: set is_backward to True, wait for unit index, start unit index - 1, and free "
    "the frozen flats of the units behind (for the root: none, its backward is the first). "
    "after_backward: reduce and free what is trainable. "
    "While is_backward is True before_forward starts no next unit, and after_forward frees none.",
)
def FSDP(answer) -> None:
    """Three steps, and an evaluation in between, in three ways, beside the course's and alone."""
    in_ranks(_walks, 2, answer, random.randrange(10_000), reasons=FULLY)


def _walks(answer, seed: int) -> bool:
    sent, waited = _gathers(), waits()
    for case in CASES:
        course = _walk(truth.FSDP, case, seed, Watch(case, seed, sent, waited))
        _walk(answer, case, seed, Watch(case, seed, sent, waited, course))
    return True


def _walk(make: Callable, case: Case, seed: int, watch: "Watch") -> "Watch":
    """Train a model, and look at it after each call."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module = build(seed + rank, Units)
    units = list(module.units)
    if case.recomputes:
        module.through = checkpointed
    model = make(module, units, reshard=case.reshard)
    if not isinstance(model, nn.Module) or not hasattr(model, "shards"):
        _stop(f"FSDP(...) gives a {type(model).__name__}", "that is no FSDP", "keep the class")
    watch.follow(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(NUM_STEPS):
        watch.step = step
        batch = token_batch(seed + step)[:, rank::size]
        with Ledger() as ledger:
            run_backward(model, batch)
        watch.count(ledger)
        if step == 1:  # what it gathers is old after the next line
            _evaluate(model, batch)
        optimizer.step()
        optimizer.zero_grad()
        watch.num_updates += 1
    watch.step = NUM_STEPS
    _evaluate(model, batch)
    return watch


@torch.no_grad()
def _evaluate(model: nn.Module, batch: Tensor) -> None:
    model(batch[0])


def _alone(seed: int) -> list[dict[str, Tensor]]:
    """The weights of one process before the first step and after each."""
    model = build(seed, Units)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    weights = []
    for step in range(NUM_STEPS + 1):
        weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
        optimizer.zero_grad()
        run_backward(model, token_batch(seed + step))
        optimizer.step()
    return weights


def _gathers() -> dict[int, dist.Work]:
    """From now on: the last all-gather into each vector, by the vector's storage."""
    sent: dict[int, dist.Work] = {}

    def recorded(original: Callable) -> Callable:
        def call(*args, **kwargs):
            work = original(*args, **kwargs)
            if work is not None:
                sent[_key(next(iter([*args, *kwargs.values()])))] = work
            return work

        return call

    for name in ("all_gather_single", "all_gather_into_tensor"):
        if hasattr(dist, name):
            setattr(dist, name, recorded(getattr(dist, name)))
    return sent


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _stop(*words: str) -> None:
    raise Seen("\n".join(words))


class Watch:
    """Stand behind the four methods of one FSDP.

    Args:
        sent: the last all-gather into each vector.
        waited: all messages that were waited for, by id.
        course: the same walk of the course's FSDP; without one, nothing is compared.
    """

    def __init__(
        self, case: Case, seed: int, sent: dict, waited: dict, course: "Watch | None" = None
    ) -> None:
        self.case, self.sent, self.waited, self.course = case, sent, waited, course
        self.alone = _alone(seed)
        self.step = self.num_updates = 0
        self.in_backward = False
        self.events: list[Event] = []
        self.counts: list[dict] = []

    def follow(self, model: nn.Module) -> None:
        """Put this watch around the model's methods."""
        self.model = model
        self.names = {id(param): name for name, param in model.module.named_parameters()}
        for name in METHODS:
            setattr(model, name, partial(self._call, name, getattr(model, name)))

    def _call(self, name: str, method: Callable, index: int) -> None:
        if (name, index) in (("before_backward", 0), ("before_forward", 0)):
            self.in_backward = name == "before_backward"
        before, had_memory, reduced = dict(self.sent), self._whole(), self._reduced()
        flag = getattr(self.model, "is_backward", None)
        method(index)
        new = {key for key, work in self.sent.items() if work is not before.get(key)}
        brought = self._labels(lambda flat: _key(flat.whole) in new)
        about = had_memory, frozenset(_numbers(brought)), flag
        event = Event(self.step, name, index, self._whole(), self.in_backward, *about)
        self.events.append(event)
        if self.course is not None:
            if name != "after_backward" and self._reduced() - reduced:
                smell = "gradients of a unit are all there when after_backward is called"
                self._stop(event, "calls reduce()", smell, "reduce() in after_backward only")
            self._look(event, before)

    def _labels(self, holds: Callable) -> frozenset[Label]:
        """The flats of which this holds."""
        flats = [(number, flat) for number, unit in enumerate(self.model.units) for flat in unit]
        return frozenset((number, f.shard.requires_grad) for number, f in flats if holds(f))

    def _whole(self) -> frozenset[Label]:
        return self._labels(lambda flat: flat.whole.untyped_storage().nbytes() > 0)

    def _reduced(self) -> frozenset[Label]:
        return self._labels(lambda flat: flat.shard.grad is not None)

    def _look(self, event: Event, before: dict) -> None:
        """Stop this rank at what the course's FSDP does not do."""
        number = len(self.events) - 1
        wanted = self.course.events[number] if number < len(self.course.events) else None
        if wanted is None or wanted[:3] != event[:3]:
            self._stop(event, "is called out of turn", "the calls around a unit are given", "")
        if event.method == "after_backward":
            self._look_at_gradients(event)
        if event.whole != wanted.whole:
            reason = REASONS_OF[event.method](event, wanted.whole, self.case.reshard)
            units = f"leaves {_said(event.whole)} whole; right is {_said(wanted.whole)}"
            self._stop(event, units, *reason)
        if event.method.startswith("before"):
            self._look_at_waits(event, before)
            self._look_at_weights(event)

    def _stop(self, event: Event, *words: str) -> None:
        step = f"step {event.step + 1}" if event.step < NUM_STEPS else "after the last step"
        where = f"{self.case.name}, {step}, rank {dist.get_rank()}: {event.method}({event.index})"
        _stop(f"{where} {words[0]}", *words[1:])

    def _look_at_gradients(self, event: Event) -> None:
        for flat in self.model.units[event.index]:
            if not flat.shard.requires_grad and flat.shard.grad is not None:
                self._stop(
                    event,
                    "reduces frozen parameters",
                    "zeros travel for nothing, and an optimizer may step what is frozen",
                    "only where flat.shard.requires_grad",
                )
            left = any(param.grad is not None for param in flat.params)
            if flat.shard.requires_grad and (left or flat.shard.grad is None):
                self._stop(
                    event,
                    "leaves the shard without a gradient",
                    "what this rank computed reaches no shard, so the optimizer moves nothing",
                    "flat.reduce() for every trainable flat",
                )

    def _look_at_waits(self, event: Event, before: dict) -> None:
        for number, unit in enumerate(self.model.units):
            for flat in unit:
                work = self.sent.get(_key(flat.whole))
                waits = work is not None and id(work) in self.waited
                if number == event.index and work is not None and not waits:
                    self._stop(
                        event,
                        "returns before the unit has come",
                        "start() returns at once; the numbers may still be on their way",
                        "wait() for the unit that computes now",
                    )
                is_new = work is not before.get(_key(flat.whole))
                if number != event.index and is_new and waits:
                    self._stop(
                        event,
                        f"waits for unit {number} as well",
                        "no message travels while a unit computes: nothing is hidden",
                        "only start() the next unit, and see that start() does not wait",
                    )

    def _look_at_weights(self, event: Event) -> None:
        new, old = self.alone[self.num_updates], self.alone[max(self.num_updates - 1, 0)]
        params = [param for flat in self.model.units[event.index] for param in flat.params]
        pairs = [(self.names[id(param)], param.detach()) for param in params]
        off = max(((param - new[name]).abs().max().item() for name, param in pairs), default=0.0)
        if off < 1e-4:
            return
        seen = f"computes with weights that are up to {off:.2g} off"
        if all(torch.allclose(param, old[name], atol=1e-4) for name, param in pairs):
            self._stop(
                event,
                f"{seen}: they are those from before the optimizer's last step",
                "the unit stayed whole over the step, and so it is not gathered again",
                "before the root's forward, free every flat of every unit",
            )
        smell = "a gradient before was not the mean over the ranks, or weights were written to"
        self._stop(event, seen, smell, "reduce() once for each flat, when all gradients are there")

    def count(self, ledger: Ledger) -> None:
        """Keep what one step called, and compare it."""
        self.counts.append(calls(ledger.entries))
        if self.course is None:
            return
        found, wanted = self.counts[-1], self.course.counts[self.step]
        where = f"{self.case.name}, step {self.step + 1}, rank {dist.get_rank()}"
        if len(self.events) < self.course.num_events(self.step):
            _stop(f"{where}: not all four methods are called", "", "keep __init__ and _watch")
        for op in wanted | found:
            if found[op] != wanted[op]:
                _stop(
                    f"{where}: {found[op]} calls of {op}, not {wanted[op]}",
                    "what is there already is sent once more"
                    if found[op] > wanted[op]
                    else "something is not sent",
                    "each unit: gathered before forward, and again before backward if it was "
                    "freed; reduced once",
                )

    def num_events(self, step: int) -> int:
        """Calls in forward and backward of all steps up to this one, and what came between."""
        last = max(i for i, e in enumerate(self.events) if e.step == step and e.in_backward)
        return last + 1


# ---- 10.5: why a call leaves other units whole ----------------------------------------------


def _said(whole: frozenset[Label]) -> str:
    """Words for units; of the half frozen one, the flat that is meant if it is not both."""
    flats = {2: " (its frozen flat)", 3: " (its trainable flat)", 5: ""}
    half = flats.get(sum(2 + trains for unit, trains in whole if unit == HALF_FROZEN))
    units = [f"{unit}{half if unit == HALF_FROZEN else ''}" for unit in sorted(_numbers(whole))]
    return f"unit{'s' * (len(units) > 1)} {', '.join(units)}" if units else "no unit"


def _count(whole: frozenset[Label]) -> str:
    count = len(_numbers(whole))
    return f"{count} units are" if count > 1 else "1 unit is"


def _in_backward(event: Event, because: str, otherwise: str) -> tuple[str, str]:
    """A unit that is run again in backward; did the learner's class know that it is backward?"""
    if event.flag is False:
        return (
            "this is backward, where the unit is run again, but self.is_backward is False",
            "set it to True in before_backward, and to False before the root's forward only",
        )
    return f"this unit is run again in backward, {because}", otherwise


def _numbers(labels: frozenset[Label]) -> set[int]:
    return {unit for unit, _ in labels}


def _why_before_forward(event: Event, wanted: frozenset[Label], reshard: bool) -> tuple[str, str]:
    index = event.index
    missing, extra = _numbers(wanted - event.whole), _numbers(event.whole - wanted)
    if index in missing:
        return "this unit computes now, with memory that is not there", "wait() for its flats"
    if missing & event.brought:
        unit = min(missing & event.brought)
        smell = f"this call began to bring unit {unit}, and then freed it again"
        return smell, "first free, then wait and start"
    if index + 1 in missing and event.step > 0:
        return STANDS
    if index + 1 in missing:
        smell = "nothing brings the next unit while this one computes"
        return smell, "start() the flats of unit index + 1"
    if missing:
        return "a unit was freed that is still needed", "free all only before the root (index 0)"
    if event.in_backward:
        because = "where the next unit is the one before it"
        return _in_backward(event, because, "start none while self.is_backward is True")
    if max(extra) > index + 1 and extra & event.brought:
        smell = f"{_count(event.whole)} whole at once: memory as without shards"
        return smell, "start() only the unit that comes next, index + 1"
    smell = "what was left whole by the calls before may be older than the last step"
    return smell, "for index 0 free every flat of every unit"


def _why_after_forward(event: Event, wanted: frozenset[Label], reshard: bool) -> tuple[str, str]:
    missing, extra = _numbers(wanted - event.whole), _numbers(event.whole - wanted)
    if event.index == 0 and 0 in missing:
        smell = "backward begins with the root, so it would be gathered again at once"
        return smell, "free only where index > 0"
    if event.in_backward and event.index in missing:
        because = "and its gradients are still to be computed"
        return _in_backward(event, because, "free nothing while self.is_backward is True")
    if not reshard and event.index in missing:
        return "reshard=False keeps a unit whole until its backward", "ask self.reshard"
    if event.index in extra and event.step > 0:
        smell = (
            "self.is_backward still stands from the last backward, and nothing is freed any more"
        )
        return smell, "set it to False before the root's forward"
    if event.index in extra:
        smell = f"{_count(event.whole)} whole, and each forward adds one: memory as without shards"
        return smell, "where self.reshard is True, free() every flat of the unit"
    return "another unit was freed than the one that has computed", "self.units[index]"


def _why_before_backward(event: Event, wanted: frozenset[Label], reshard: bool) -> tuple[str, str]:
    missing, extra = wanted - event.whole, event.whole - wanted
    index, lost = event.index, _numbers(missing)
    if index in lost:
        smell = "backward of this unit begins now, with memory that is not there"
        return smell, "wait() for its flats; free them in after_backward"
    if index + 1 in _numbers(extra) and lost:
        return "backward goes from the last unit to the first", "the next one is index - 1"
    if index == 0 and lost and max(_numbers(wanted)) not in lost:
        smell = "the root's backward is the first: all the other units are still needed"
        return smell, "free the frozen flats of the units behind only where index > 0"
    if index == 0 and lost:
        smell = "after the root comes the last unit, and nothing brings it"
        return smell, "units[index - 1] is the last unit for index 0"
    if index - 1 in lost:
        smell = "nothing brings the unit that comes next; backward goes from the last to the first"
        return smell, "start() the flats of unit index - 1"
    if lost:
        return "a unit was freed that is still needed", "free only frozen flats of units behind"
    if all(not trains for _, trains in extra) and min(_numbers(extra)) > index:
        smell = "the frozen parameters of units behind are done with, and nothing else frees them"
        return smell, "free the flats of units[index + 1:] that want no gradient"
    smell = f"{_count(event.whole)} whole at once: memory as without shards"
    return smell, "start() only unit index - 1"


def _why_after_backward(event: Event, wanted: frozenset[Label], reshard: bool) -> tuple[str, str]:
    missing, extra = wanted - event.whole, event.whole - wanted
    if (event.index, False) in missing:
        return (
            "gradients of this unit's weights are all there, but an earlier layer of the unit may "
            "still need the frozen weights",
            "free only what is trainable; before_backward frees the frozen flats of units behind",
        )
    if event.index in _numbers(extra):
        smell = f"{_count(event.whole)} whole: after backward all weights would be there again"
        return smell, "free() each trainable flat, as well as reduce() it"
    if missing:
        return "another unit was freed than the one that is done", "self.units[index]"
    return "another unit was brought; before_backward does that", "reduce and free only"


REASONS_OF: dict[str, Callable] = dict(
    zip(
        METHODS,
        (_why_before_forward, _why_after_forward, _why_before_backward, _why_after_backward),
        strict=True,
    )
)

# In the order of the numbers, which is that of the summary.
lesson.exercises = _flat.part.exercises | lesson.exercises | _wrapping.part.exercises
