"""10.5: which units are whole or on their way after each call of the four methods of FSDP."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.checks.engine import cases
from manyhands.checks.engine.card import Wrong
from manyhands.checks.engine.spec import Place, Spec
from manyhands.checks.engine.values import kind
from manyhands.checks.fsdp.flat import messages, waiting
from manyhands.fsdp import units as course

METHODS = ("before_forward", "after_forward", "before_backward", "after_backward")


class Units(nn.Module):
    """Units of which one is half frozen and one wholly; head and embedding are one weight."""

    def __init__(self, num_more: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        half = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))
        half[0].requires_grad_(False)
        frozen = nn.Linear(6, 6).requires_grad_(False)
        more = [nn.Linear(6, 6) for _ in range(num_more)]
        self.units = nn.ModuleList([nn.Linear(6, 6), half, frozen, *more])
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Token numbers (B) to scores (B, 11)."""
        x = self.embedding(tokens)
        for unit in self.units:
            x = x + unit(x)
        return self.head(x)


class Walk(NamedTuple):
    """One way to train."""

    seed: int
    num_more: int  # units
    reshard: bool
    is_root_frozen: bool = False


def walks(n: int) -> list[Walk]:
    """Units that are freed after forward, and units that are kept."""
    seed = cases.draw_seed()
    return [Walk(seed, 1, True), Walk(seed, 2, False, is_root_frozen=True)]


class Watch:
    """Stands behind the four methods, and writes down which flats have memory or are coming."""

    def __init__(self, model: nn.Module, waited: list) -> None:
        self.model = model
        self.waited = waited
        self.log: list[str] = []
        self.works: dict[int, dist.Work] = {}
        for flat in self.flats():
            flat.gather = partial(self.gather, flat, flat.gather)
            flat.reduce = partial(self.reduce, flat, flat.reduce)
        for name in METHODS:
            setattr(model, name, partial(self.call, name, getattr(model, name)))

    def flats(self) -> list:
        """All flats, in the order of the units."""
        return [flat for unit in self.model.units for flat in unit]

    def gather(self, flat: object, real: Callable) -> dist.Work:
        """Keep the work."""
        self.works[id(flat)] = real()
        return self.works[id(flat)]

    def reduce(self, flat: object, real: Callable) -> None:
        """Write down whether the reduction finds the room that the whole weights had."""
        number = next(n for n, unit in enumerate(self.model.units) if any(flat is f for f in unit))
        weights = "are still whole" if flat.is_whole else "have been freed"
        self.log.append(f"when unit {number} is reduced, its trainable weights {weights}")
        real()

    def words(self, holds: Callable) -> str:
        """The units of which this holds; of a unit with two flats which of them."""
        found = []
        for number, unit in enumerate(self.model.units):
            own = ["trainable" if f.shard.requires_grad else "frozen" for f in unit if holds(f)]
            more = f" ({own[0]} part)" if 0 < len(own) < len(unit) else ""
            found += [f"{number}{more}"] if own else []
        return ", ".join(found) or "none"

    def is_coming(self, flat: object) -> bool:
        """Has nobody waited for its last gather?"""
        work = self.works.get(id(flat))
        return work is not None and not any(work is one for one in self.waited)

    def call(self, name: str, real: Callable, index: int) -> None:
        """One of the four methods; raises Wrong where a layer would compute without memory."""
        before = [flat.is_whole for flat in self.model.units[index]]
        real(index)
        self.log.append(
            f"after {name}({index}) units {self.words(lambda flat: flat.is_whole)} are whole"
            f" and {self.words(self.is_coming)} on their way"
        )
        for flat, was in zip(self.model.units[index], before, strict=True):
            if name.startswith("before") and not flat.is_whole:
                raise Wrong(
                    f"{self.log[-1]}",
                    f"Unit {index} needs all of its weights: a layer of it computes next.",
                    "wait() for a unit before it computes, and free it when that is over.",
                )
            is_frozen = not flat.shard.requires_grad
            if name == "after_backward" and is_frozen and was and not flat.is_whole:
                raise Wrong(
                    f"{self.log[-1]}",
                    f"A frozen flat of unit {index} was freed: the unit has all its gradients, but "
                    "an earlier layer of it may still need frozen weights.",
                    "Free and reduce the flats of self.trainable[index] only.",
                )
            if name.startswith("before") and self.is_coming(flat):
                raise Wrong(
                    f"{self.log[-1]}",
                    f"Unit {index} computes next, and nobody has waited for it.",
                    "start() returns at once: wait() for the unit that computes now.",
                )


def walk_seen(answer: Callable, case: Walk, place: Place) -> dict:
    """Two steps, of which one adds up two backwards, evaluations between and after."""
    torch.manual_seed(case.seed)
    module = Units(case.num_more)
    module.embedding.weight.requires_grad_(not case.is_root_frozen)
    model = answer(module, list(module.units), reshard=case.reshard, group=place.group)
    if not isinstance(model, nn.Module) or not hasattr(model, "shards"):
        raise Wrong(f"FSDP(...) gives {kind(model)} without shards", "", "Keep __init__ as it is.")
    seen: dict = {}
    with waiting() as waited:
        watch = Watch(model, waited)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for at, num_backwards in (("step 1", 1), ("step 2", 2)):
            optimizer.zero_grad()
            for number in range(num_backwards):
                watch.log.clear()
                batch = cases.token_batch(case.seed + 10 * num_backwards + number, 8)
                with messages() as sent:
                    cases.run_backward(model, batch[:, place.job_rank % 2 :: 2])
                said = f"{at}, backward {number + 1}"
                seen[said] = list(watch.log)
                seen[f"messages of {said}"] = dict(sent)
            seen[f"the gradients of the shards in {at}"] = [
                None if flat.shard.grad is None else flat.shard.grad.clone()
                for flat in watch.flats()
            ]
            watch.log.clear()
            model.eval()
            with torch.no_grad():
                seen[f"the scores of an evaluation after {at}"] = model(batch[0]).clone()
            seen[f"an evaluation after {at}"] = list(watch.log)
            model.train()
            optimizer.step()  # so the weights that the evaluation has gathered are old
        for flat in watch.flats():
            flat.free()  # so that nothing is on its way
    return seen


def tell_walk(case: Walk) -> str:
    """How the units are treated."""
    more = ", with a root of which nothing is trained" if case.is_root_frozen else ""
    return f"FSDP with {4 + case.num_more} units, reshard={case.reshard}{more},"


FREE = "if index > 0 and self.reshard:"
BEFORE = "for flat in self.units[index - 1]:"
REDUCE = "flat.free()\n            flat.reduce()"
LAST = "After the root's backward comes that of the last unit, which is units[-1]."
fsdp = Spec(
    todo="10.5",
    truth=course.FSDP,
    layouts=(((0, 1),),),  # a group is the flats' own matter, and these have been made
    cases=walks,
    observe=walk_seen,
    tell=tell_walk,
    advice={"": "For this call: which units compute next, and which one comes after them?"},
    reasons="""
        list index out of range :: The last unit has no next one. | In forward ask index + 1 <
            len(self.units); in backward the next one is index - 1.
        'list' object has no attribute ::
            A unit is a list of flats. | for flat in self.units[index]:
    """,
    hints=(
        "A unit is a list of flats. wait() brings a flat and returns when it is there, start() "
        "only starts to bring it, free() gives its memory back, reduce() makes shard.grad.",
        "before_forward: for index 0 free every flat of every unit first. Then wait for unit "
        "index, and start unit index + 1 if there is one. after_forward: free the unit, except "
        "the root, and except where reshard is False.",
        "before_backward: wait for unit index, and start unit index - 1; for the root that is "
        "units[-1], the last one, whose backward comes next, and unit 1 need not start the root. "
        "after_backward: free and reduce each flat of self.trainable[index].",
    ),
    mistakes=r"""
        if index + 1 < len(self.units): => if False: ::
            Nothing brings the next unit while one computes forward. | start() unit index + 1.
        for flat in chain(*self.units):\n                flat.free() => pass ::
            Nothing is freed before the root's forward, so weights may be older than the last step.
            | Before the root's forward free every flat of every unit.
        for flat in chain(*self.units): => for flat in chain(*self.units[1:]): ::
            The root is not freed before its forward, so it may be older than the last step.
        {FREE} => if self.reshard: ::
            The root is freed after forward, and backward begins with the root. | Ask index > 0.
        {FREE} => if index > 0: ::
            Units are freed after forward although reshard is False. | Ask self.reshard.
        {FREE} => if index > 0 and self.reshard and self.training: ::
            Units are freed only in training.
        {FREE} => if False: :: No unit is freed after forward, so all of them are whole at once.
        {BEFORE}\n                flat.start() => pass ::
            Nothing brings the next unit in backward. | start() unit index - 1.
        {BEFORE} => for flat in self.units[(index + 1) % len(self.units)]: ::
            Backward brings the unit after this one, which it has left behind. | index - 1
        if index != 1: => if index > 1: :: The backward of the root brings no unit. | {LAST}
        {REDUCE} => flat.reduce() ::
            Units stay whole after backward. | free() each trainable flat, and reduce() it.
        {REDUCE} => flat.reduce()\n            flat.free() ::
            A unit is reduced while its weights are whole, so the reduction needs room beside them.
            | free() first, and then reduce(): the gradients stay until then.
        {REDUCE} => flat.free() ::
            The gradients are never reduced. | reduce() turns them into shard.grad.
        {REDUCE} => flat.shard.grad = None; flat.reduce(); flat.free() ::
            What was in shard.grad before is lost. | reduce() adds to it.
    """,
    module=globals(),
)
