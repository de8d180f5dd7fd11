"""10.2 and 10.3: an optimizer of shards, and gradients that are reduced during backward."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from manyhands.checks.engine import cases
from manyhands.checks.engine.spec import Place, Spec
from manyhands.checks.fsdp.flat import draw_params, messages
from manyhands.fsdp import flat as course
from manyhands.fsdp import zero

# ---- 10.2 -----------------------------------------------------------------------------------

THREE = (((0, 1, 2),), ((0,), (1, 2)))


class Stages(NamedTuple):
    """Steps; for each, when the first and the second flat are reduced: in it, before it, both."""

    seed: int
    turns: list[tuple[str, str]]


def stages(n: int) -> list[Stages]:
    """Whole gradients; one that is missing; reduced before; both, for one flat or the other."""
    seed = cases.draw_seed()
    mixed = [("before", "both"), ("in", "before"), ("one missing", "before"), ("in", "in")]
    return [Stages(seed, [("in", "in")] * 2), Stages(seed + 1, mixed)]


def give(flat: course.Flat, draw: torch.Generator, turn: str) -> None:
    """Gradients for every parameter, or for all but the first."""
    for index, param in enumerate(flat.params):
        grad = torch.randn(param.shape, generator=draw).to(param.dtype)
        param.grad = None if index == 0 and turn == "one missing" else grad


def steps_seen(answer: Callable, case: Stages, place: Place) -> dict:
    """Weights, gradients that are left, and messages of every step."""
    shapes = {"first": [(3, 4), (5,)], "second": [(2, 2), (3,)], "frozen": [(4,)]}
    kinds = {"second": torch.float64}
    flats = {
        name: course.Flat(
            draw_params(case.seed, some, kinds.get(name, torch.float32), name != "frozen"),
            **place.options,
        )
        for name, some in shapes.items()
    }
    calls: list = []
    made: list = []

    def make(shards: list) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(shards, lr=0.1, momentum=0.9))
        made[-1].register_step_post_hook(lambda *_: calls.append(1))
        return made[-1]

    optimizer = answer(list(flats.values()), make)
    seen = {}
    for number, turns in enumerate(case.turns, 1):
        draw = cases.generator(case.seed, place.job_rank, number)
        for flat, turn in zip(flats.values(), turns, strict=False):
            give(flat, draw, turn)
            if turn in ("before", "both"):
                flat.reduce()
            if turn == "both":
                give(flat, draw, turn)
        calls.clear()
        with messages() as sent:
            optimizer.step()
        at = f"in step {number}: "
        seen[f"{at}calls of the optimizer's step"] = len(calls)
        seen[f"{at}messages"] = dict(sent)
        for name, flat in flats.items():
            seen[f"{at}the weights of the {name} flat"] = flat.whole.detach().clone()
            seen[f"{at}the {name} flat keeps no shard.grad"] = flat.shard.grad is None
            seen[f"{at}the parameters of the {name} flat keep no .grad"] = all(
                param.grad is None for param in flat.params
            )
    return seen


def tell_stages(case: Stages) -> str:
    """How many steps, and which flats were reduced before."""
    if len(case.turns) == 2:
        return "two steps with whole gradients"
    return "four steps, before which some flats were reduced"


ASK = "any(param.grad is not None for param in flat.params)"
ORDER = "Reduce, step, zero_grad, gather: in this order."
GATHER = "for work in [flat.gather() for flat in self.flats]:"
STEP = "self.optimizer.step()"
sharded_optimizer = Spec(
    todo="10.2",
    truth=zero.ShardedOptimizer,
    layouts=THREE,
    cases=stages,
    observe=steps_seen,
    tell=tell_stages,
    advice={"": ORDER},
    reasons="""
        'NoneType' object has no attribute 'wait' ::
            flat.gather() returns the work, and only that can be waited for. | work = flat.gather()
        'list' object has no attribute :: self.flats is a list. | for flat in self.flats:
    """,
    hints=(
        "Four things come in this order: reduce, step, zero_grad, gather.",
        "A flat still has whole gradients where a parameter of it, any of them, has a .grad. Stage "
        "2 has reduced its flats by then.",
        "Start all gathers, keep their works in a list, and then wait for each of them.",
    ),
    mistakes=r"""
        {ASK} => True :: Flats that were reduced before are reduced again, which sends zeros. |
            Reduce a flat only where a parameter of it has a .grad.
        {ASK} => all(param.grad is not None for param in flat.params) :: A flat with a gradient for
            only some of its parameters is not reduced. | Reduce where any parameter has a .grad.
        {ASK} => flat.shard.grad is None ::
            A flat is not reduced where shard.grad is there from before and gradients came on top. |
            Ask for the .grad of the parameters, not of the shard.
        {ASK} => False :: Nothing is reduced.
        self.optimizer.zero_grad() => pass ::
            The shards keep their gradients, so the next step takes the sum. | {ORDER}
        self.optimizer.zero_grad() => self.optimizer.zero_grad(set_to_none=False) ::
            The shards keep gradients of zeros, which take memory.
        {STEP}\n        self.optimizer.zero_grad() => self.optimizer.zero_grad()\n        {STEP} ::
            The gradients are cleared before the optimizer steps.
        {GATHER} => for work in []: ::
            Nothing is gathered, so a rank has new weights only in its own part.
        {GATHER} => for work in [flat.gather() for flat in self.flats[:1]]: ::
            Only the first flat is gathered.
        {STEP} => [flat.gather().wait() for flat in self.flats]; {STEP}
        {GATHER} => for work in []: :: The weights are gathered before the optimizer steps.
        {STEP} => [flat.shard.grad.div_(flat.num_ranks) for flat in self.flats]; {STEP} ::
            The gradients are divided by the number of ranks once more. | reduce() has divided.
        {STEP} => [{STEP} for _ in self.flats] ::
            The optimizer steps once for each flat. | Step once: it has the shards of all flats.
        flat.reduce() => torch.distributed.all_reduce(flat.params[0].grad.new_zeros(1));
            flat.reduce() ::
            ! A message goes through other ranks than those of the flat. | flat.reduce() is enough.
    """,
    module=globals(),
)

# ---- 10.3 -----------------------------------------------------------------------------------


class Told(course.Flat):
    """The course's Flat, which writes down when it is reduced."""

    def __init__(self, params: list, name: str, log: list, place: Place) -> None:
        super().__init__(params, place.group)
        self.name = name
        self.log = log

    def reduce(self) -> None:
        """Reduce, and say with how many gradients."""
        there = sum(param.grad is not None for param in self.params)
        self.log.append(f"{self.name} reduced with {there} of {len(self.params)} gradients")
        super().reduce()


class Layers(NamedTuple):
    """Numbers of layers in each flat; layer 1 is frozen."""

    seed: int
    flats: list[list[int]]


def layers(n: int) -> list[Layers]:
    """One flat; several; several whose gradients mix; all parameters of every layer."""
    seed = cases.draw_seed()
    ways = [[[0]], [[0], [1], [2, 3]], [[3, 0], [1], [2]]]
    return [Layers(seed, way) for way in ways]


def hooks_seen(answer: Callable, case: Layers, place: Place) -> dict:
    """In which order gradients and reductions come, in three backwards, and what they leave."""
    draw = cases.generator(case.seed)
    modules = [nn.Linear(3, 3, bias=index != 2) for index in range(1 + max(map(max, case.flats)))]
    for index, module in enumerate(modules):
        for param in module.parameters():
            param.data = torch.randn(param.shape, generator=draw)
        module.requires_grad_(index != 1)
    log: list[str] = []
    flats = []
    for number, own in enumerate(case.flats):
        params = [param for index in own for param in modules[index].parameters()]
        flats.append(Told(params, f"flat {number}", log, place))
        for param in params:
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(
                    lambda _, number=number: log.append(f"gradient of flat {number}")
                )
    answer(iter(flats))
    seen = {"before any backward": list(log)}
    for turn in ("the first backward", "the second backward", "a backward after zero_grad"):
        log.clear()
        if turn.endswith("zero_grad"):
            for flat in flats:
                flat.shard.grad = None
        mine = torch.randn(5, 3, generator=cases.generator(case.seed, place.job_rank, len(turn)))
        with messages() as sent:
            nn.Sequential(*modules)(mine).square().sum().backward()
        seen[f"in {turn}"] = list(log)
        seen[f"after {turn}, shard.grad of each flat"] = [
            None if flat.shard.grad is None else flat.shard.grad.clone() for flat in flats
        ]
        seen[f"after {turn}, no parameter keeps a .grad"] = all(
            param.grad is None for flat in flats for param in flat.params
        )
        seen[f"messages of {turn}"] = dict(sent)
    return seen


COUNTS = "Each flat needs a counter of its own, which starts again after the last parameter."
HOOK = "register_post_accumulate_grad_hook"
LAST = "if len(ready) == len(flat.params):"
reduce_during_backward = Spec(
    todo="10.3",
    truth=zero.reduce_during_backward,
    layouts=cases.TWO,
    cases=layers,
    observe=hooks_seen,
    tell=lambda case: f"reduce_during_backward of {len(case.flats)} flats",
    advice={"": COUNTS, "before any backward": "Only register hooks: backward calls them."},
    reasons="""
        hook on a tensor that doesn't require ::
            A frozen parameter gets no gradient, and no hook. | Look at param.requires_grad first.
        can't register a post accumulate :: A frozen parameter gets no gradient, and no hook.
        takes 1 positional argument but 2 were :: A hook is called with the parameter. | Write a
            function of `param` that calls flat.reduce().
        takes 0 positional arguments but 1 :: A hook is called with the parameter. | def hook(param)
        object is not callable :: A hook is a function. | Pass it without brackets.
    """,
    hints=(
        "param.register_post_accumulate_grad_hook(hook) calls hook(param) when param.grad is "
        "written.",
        "Each flat needs a counter of its own. At len(flat.params), set it back and call "
        "flat.reduce().",
        "A Flat may be frozen: then param.requires_grad is False, and it needs no hook. "
        "A function that is defined in a loop sees the loop's variables as they are when it is "
        "called. A default argument, flat=flat, keeps the one of this turn.",
    ),
    mistakes=r"""
        , flat: Flat = flat, ready: list = ready => ::
            The hooks see the loop's variables as they are when they run: those of the last flat. |
            def hook(param, flat=flat, ready=ready) keeps those of this turn.
        for flat in flats: => ready = []\n    for flat in flats:
        ready: list[nn.Parameter] = [] => pass :: One counter counts for several flats. | {COUNTS}
        ready.clear() => pass ::
            Only the first backward is reduced, as if the counter were never set back.
        {LAST} => if len(ready) >= len(flat.params):
        ready.clear() => pass :: The counter is not set back, so later backwards reduce too early.
        {LAST} => if len(ready) == 1: ::
            A flat is reduced at its first gradient, and the others are lost.
        {LAST} => if True: :: A flat is reduced at each of its gradients.
        {LAST} => if len(ready) == sum(p.numel() for p in flat.params): ::
            Numbers are counted, not parameters. | Compare with len(flat.params).
        {LAST} => if len(ready) > len(flat.params): :: The count misses its end.
        param.{HOOK}(count) => param.register_hook(lambda _, param=param, count=count: count(param))
            :: The hook runs before the gradient is written into param.grad. | Use {HOOK}.
        {LAST} => if param is flat.params[0]: ::
            A flat is reduced at one parameter, whose gradient need not be the last. | {COUNTS}
        for param in flat.params: => for param in flat.params[:1]: ::
            Only the first parameter of a flat has a hook. | Register one for each parameter.
        if param.requires_grad: => if True: ::
            A frozen parameter is given a hook. | Look at param.requires_grad first.
        param.{HOOK}(count) => flat.reduce() ::
            reduce() runs at once, before any backward. | Only register hooks.
        flat.reduce() => flat.shard.grad = None; flat.reduce() ::
            What was in shard.grad before is lost. | reduce() adds to it.
    """,
    module=globals(),
)
