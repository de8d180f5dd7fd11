"""12.3, 12.10 and 12.11: tied weights, PyTorch's own pipelines, and groups of ranks."""

import itertools
from datetime import timedelta
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.checks.engine import cases
from manyhands.checks.engine.card import Wrong
from manyhands.checks.engine.spec import Call, Place, Spec
from manyhands.checks.engine.values import difference, malformed
from manyhands.pipeline import wiring

# ---- 12.3 -----------------------------------------------------------------------------------


class Tied(NamedTuple):
    """One call of sum_tied: who uses each parameter, counted in the group."""

    seed: int
    users: list[list[int]]


def tied_lists(n: int) -> list[Tied]:
    """Nothing tied; two users; two, three and all, where 0 is not always the first."""
    seed = cases.draw_seed()
    two = {1: [], 3: [[0, 2]], 4: [[0, 3]]}[n]
    many = {1: [], 3: [[0, 2], [1, 2], [0, 1, 2]], 4: [[1, 3], [1, 2], [0, 1, 3], [0, 1, 2, 3]]}[n]
    return [Tied(seed, []), Tied(seed + 1, two), Tied(seed + 2, many)]


SHAPES = ((3, 2), (5,), (2, 2), ())


def gradients_seen(answer: object, case: Tied, place: Place) -> dict:
    """The gradient of each parameter, and what may not change."""
    weights = cases.generator(case.seed)
    params = [nn.Parameter(cases.values(shape, weights)) for shape in SHAPES[: len(case.users)]]
    before = [param.detach().clone() for param in params]
    own = cases.generator(case.seed, place.job_rank)
    for param, ranks in zip(params, case.users, strict=True):
        part = cases.values(param.shape, own)
        found_one = place.rank in ranks and not (len(ranks) > 2 and place.rank == ranks[1])
        param.grad = part if found_one else None  # one of many users has none
    tied = [(param, list(ranks)) for param, ranks in zip(params, case.users, strict=True)]
    answer(tied, *place.options.values())
    same_lists = [ranks for _, ranks in tied] == case.users
    seen = {
        f"the gradient of the parameter of ranks {ranks}": copied(param.grad)
        for param, ranks in zip(params, case.users, strict=True)
    }
    pairs = zip(params, before, strict=True)
    weights_are = all(torch.equal(param, was) for param, was in pairs)
    return seen | {"the weights are unchanged": weights_are, "`tied` is unchanged": same_lists}


def copied(grad: Tensor | None) -> Tensor | None:
    """A copy, or None."""
    return None if grad is None else grad.detach().clone()


GROUPED = "The ranks in `tied` count inside the group: use group_src= and group_dst=."
ADD = "param.grad += part"
ANSWER = "dist.recv(param.grad, group=group, group_src=first)"
TOTAL = "part = torch.empty_like(param.grad); dist.recv(part, group=group, group_src=first)"
FOR = "for other in others:\n"
LOOP = "param.grad += part\n            for other in others:\n"
NO_USE = (
    "A rank that does not use a parameter, or has found no gradient for it, has .grad None.",
    "Only the ranks listed in `tied` take part, and one of them that has no gradient adds zeros.",
)
sum_tied = Spec(
    todo="12.3",
    truth=wiring.sum_tied,
    layouts=(((0, 1, 2, 3),), ((0,), (1, 2, 3))),
    cases=tied_lists,
    observe=gradients_seen,
    operations=("send", "recv"),
    tell=lambda case: f"sum_tied of parameters that ranks {case.users or 'none'} use",
    say=lambda found, wanted: difference(found, wanted),
    advice={"": "Follow one parameter: who sends its part to whom, and who gets the sum?"},
    hints=(
        "For each parameter: is this rank the first of its ranks, another one of them, or none?",
        "The first receives from each of the others into an empty tensor, adds that to param.grad, "
        "and then sends param.grad to each of them.",
        "The others send param.grad to the first, and then receive the sum into param.grad. The "
        "ranks count inside the group, so use group_src= and group_dst=.",
    ),
    mistakes=r"""
        {LOOP} => param.grad += part\n            param.grad /= 1 + len(others)\n            {FOR}
            :: The gradients are averaged, but each use has a part of its own, and parts add up. |
            Divide by nothing.
        {ADD} => param.grad.copy_(part) ::
            A part that comes replaces the gradient of the first rank. | Use param.grad += part.
        {ADD} => param.data += part ::
            The parts are added to the weights, and what is summed is the gradient.
        {ANSWER} => {TOTAL}; {ADD} :: The others add the sum to their own part, which is in it
            already. | The sum replaces their gradient.
        dist.send(param.grad, group=group, group_dst=other) => pass
        {ANSWER} => pass :: The sum never comes back: only the first rank has it. | The first rank
            takes all parts before it sends the sum back.
        {LOOP} => param.grad += part\n :: The sum is sent back to a rank before all parts have come.
        (first, *others) in tied: => (first, *others) in tied[:1]: ::
            Only the first parameter is summed. | Go through all of `tied`.
        (first, *others) in tied: => (first, *others) in tied:\n        others = others[:1] ::
            Only two ranks of each parameter take part. | Several ranks may use a parameter.
        dist.send(param.grad, group=group, group_dst=first) => dist.send(param.detach(),
            group=group, group_dst=first) ::
            The others send their weights, and their gradients are asked for. | Send param.grad.
    """,
    reasons={
        "'NoneType' object has no attribute": NO_USE,
        "Expected parameter `tensor`": NO_USE,
        "must be Tensor, not NoneType": NO_USE,
        "Invalid function argument": NO_USE,
        "is not part of group": ("src and dst count over the whole job.", GROUPED),
        "requires grad is being used in an in-place": (
            "The parameter itself was to be changed.",
            "What is added up is its gradient, param.grad.",
        ),
    },
    module=globals(),
)

# ---- 12.10 ----------------------------------------------------------------------------------

D = 4


class Torch(NamedTuple):
    """One schedule of torch, and whether a layer is frozen."""

    seed: int
    kind: str
    num_stages: int
    m: int
    is_frozen: bool = False
    device: str = "cpu"


def torch_kinds(n: int) -> list[Torch]:
    """All four kinds; a frozen layer; another device, whose tensors have no numbers."""
    seed = cases.draw_seed()
    one = [Torch(seed, "gpipe", n, n + 1, True), Torch(seed + 1, "1f1b", n, n + 1, device="meta")]
    several = [("interleaved", 2 * n), ("zero-bubble", 2 * n)]
    return [*one, *(Torch(seed + 2, kind, 2 * n, m) for kind, m in several)]


def lopsided_loss(out: Tensor, targets: Tensor) -> Tensor:
    """A mean that changes when its arguments do."""
    return (out * out - out * targets + 3 * targets).mean()


def torch_seen(answer: object, case: Torch, place: Place) -> dict:
    """How the schedule is set up; torch does the rest, so no step is run."""
    torch.manual_seed(case.seed)
    layers = [nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(case.num_stages)]
    if case.is_frozen:
        layers[-1][0].bias.requires_grad_(False)
    mine = {
        index: layers[index].to(case.device) for index in range(place.rank, len(layers), place.n)
    }
    schedule = answer(mine, case.num_stages, case.m, lopsided_loss, case.kind, place.group)
    if isinstance(schedule, type) or not hasattr(schedule, "step"):
        raise malformed(schedule, "torch's schedule object", "Make it by calling its class.")
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    groups = [tuple(dist.get_process_group_ranks(stage.group)) for stage in stages]
    seen = {
        "the class of the schedule": type(schedule).__name__,
        "the numbers of the stages": sorted(stage.stage_index for stage in stages),
        "num_stages": sorted({stage.num_stages for stage in stages}),
        "the group of the stages is the one that was given": set(groups) == {place.members},
        "the number of micro-batches": schedule._n_microbatches,
        "the schedule has a loss_fn": schedule._loss_fn is not None,
        "the modules are those of `stages`": all(s.submod in mine.values() for s in stages),
        "the modules are in training mode": all(stage.submod.training for stage in stages),
        "the devices of the stages": sorted({str(stage.device) for stage in stages}),
    }
    out, targets = torch.randn(2, 3, D, generator=cases.generator(case.seed))
    loss_fn = schedule._loss_fn
    seen["the loss of one micro-batch"] = loss_fn(out, targets) if loss_fn else None
    seen["gradients are those of the mean over micro-batches"] = schedule.scale_grads
    frozen = [not param.requires_grad for layer in layers for param in layer.parameters()]
    return seen | {"the same parameters are frozen as before": sum(frozen) == case.is_frozen}


PARTS = "PipelineStage(module, index, num_stages, device, group=group) for each entry of `stages`."
STAGE = "module, index, num_stages, device"
GIVEN = "parts if several else parts[0], m, loss_fn=loss_fn"
COUNTS = "num_stages counts the stages of the whole model; take the argument."
MEAN = "torch takes the mean over micro-batches itself: give it loss_fn as it is."
torch_pipeline = Spec(
    todo="12.10",
    truth=wiring.torch_pipeline,
    layouts=(((0, 1, 2, 3),), ((0, 1), (2, 3))),
    cases=torch_kinds,
    observe=torch_seen,
    guards_group=False,
    tell=lambda case: (
        f'torch_pipeline of "{case.kind}", {case.num_stages} stages on {case.device}, m = {case.m}:'
    ),
    say=lambda found, wanted: difference(found, wanted),
    advice={"": PARTS},
    hints=(
        "Make pipelining.PipelineStage(module, index, num_stages, device, group=group) for each "
        "entry of `stages`; its index is the number of the stage.",
        "ScheduleGPipe and Schedule1F1B take one PipelineStage, ScheduleInterleaved1F1B and "
        "ScheduleInterleavedZeroBubble a list.",
        "Call schedule(stage or list, m, loss_fn=loss_fn). The device is that of the parameters.",
    ),
    mistakes=r"""
        {STAGE} => module, dist.get_rank(group), num_stages, device ::
            A stage has the number of its rank, and a rank may have several stages. | {PARTS}
        {STAGE} => module, index, dist.get_world_size(group), device ::
            num_stages is the number of ranks here. | {COUNTS}
        {GIVEN} => parts, m, loss_fn=loss_fn ::
            gpipe and 1f1b take one PipelineStage, not a list. | Give them parts[0].
        {GIVEN} => parts[0], m, loss_fn=loss_fn ::
            interleaved and zero-bubble take a list of PipelineStages. | Give them all parts.
        schedules[kind]( => schedules["1f1b" if kind == "gpipe" else kind]( ::
            The schedule for "gpipe" is another one. | Each of the four kinds has its class.
        {GIVEN} => parts if several else parts[0], 2 * m, loss_fn=loss_fn ::
            There are twice as many micro-batches as asked for. | Hand over m.
        {GIVEN} => parts if several else parts[0], m ::
            The schedule has no loss, so nothing starts a backward. | loss_fn=loss_fn
        {GIVEN} => parts if several else parts[0], m, loss_fn=lambda out, y: loss_fn(out, y) / m ::
            The loss is divided by m twice. | {MEAN}
        {GIVEN} => {GIVEN}, scale_grads=False ::
            The gradients are those of the sum over micro-batches. | Leave scale_grads on.
        {GIVEN} => parts if several else parts[0], m, loss_fn=lambda out, y: loss_fn(y, out) ::
            loss_fn gets the targets first, and it takes the output first. | {MEAN}
        parts = [ => [module.eval() for module in stages.values()]\n    parts = [ ::
            The modules are switched to eval mode. | Training needs dropout: leave the mode alone.
    """,
    reasons="""
        is out of range of :: A stage's number is not below num_stages. | {COUNTS}
        CUDA :: The device is not that of the parameters. | next(module.parameters()).device
        NVIDIA :: The device is not that of the parameters.
        'n_microbatches' :: The schedule needs the number of micro-batches. | Give it m.
        no attribute 'parameters' :: A PipelineStage takes one module. | {PARTS}
    """,
    module=globals(),
)

# ---- 12.11 ----------------------------------------------------------------------------------

RAISE_FIRST = "Raise ValueError on every rank, before any group is made."
PLACES = "Rank r has stage r // d of replica r % d, with d = N // num_stages."
NUMBERS = itertools.count()  # a call of an answer has the same on all ranks


class Calls:
    """Compare each call of dist.new_group with that of the other ranks, before it is made."""

    def __init__(self) -> None:
        self.number = next(NUMBERS)
        self.num_calls = 0
        self.rank = dist.get_rank()
        self.store = dist.distributed_c10d._get_default_store()
        self.real = dist.new_group

    def new_group(self, ranks: list[int] | None = None, *args: object, **named: object) -> object:
        """In place of dist.new_group."""
        if not named.get("use_local_synchronization"):
            self.compare(f"makes the group {'of all' if ranks is None else sorted(ranks)}")
        return self.real(ranks, *args, **named)

    def compare(self, mine: str) -> None:
        """Raise Wrong on all ranks where one does something else now."""
        every = range(dist.get_world_size())
        keys = [f"grid {self.number} {rank} {self.num_calls}" for rank in every]
        self.num_calls += 1
        self.store.set(keys[self.rank], mine)
        try:
            self.store.wait(keys, timedelta(seconds=3))
        except RuntimeError:  # a rank is elsewhere: the limit of the check tells where
            return
        theirs = [self.store.get(key).decode() for key in keys]
        other = next((rank for rank in every if theirs[rank] != theirs[0]), None)
        if other is not None:
            raise Wrong(
                f"call {self.num_calls}: rank 0 {theirs[0]}, rank {other} {theirs[other]}",
                "All ranks have to do the same here: new_group waits for all of them.",
                "Make every group on every rank, in the same order, and keep two of them.",
            )


def groups_seen(answer: object, case: Call, place: Place) -> dict:
    """The ranks of both groups, and a sum over each."""
    calls = Calls()
    try:
        with mock.patch.object(dist, "new_group", calls.new_group):
            found = answer(case.num_stages)
    except Wrong:
        raise
    except Exception as error:
        calls.compare(f"raises {type(error).__name__}")
        raise
    calls.compare("returns")
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise malformed(found, "two groups", "Return this rank's pipeline, and the replicas.")
    are_groups = [isinstance(group, dist.ProcessGroup) for group in found]
    everywhere = [None] * place.n
    dist.all_gather_object(everywhere, all(are_groups))
    if not all(are_groups):
        hint = "new_group gives a rank that is not in the group something else than a group."
        raise malformed(found[are_groups.index(False)], "a group that this rank is in", hint)
    names = ("the pipeline", "the replicas of the stage")
    lists = [dist.get_process_group_ranks(group) for group in found]
    seen = {f"{name}: the ranks": ranks for name, ranks in zip(names, lists, strict=True)}
    for name, group in zip(names, found, strict=True):
        total = torch.tensor([2.0**place.rank])
        if all(everywhere):
            dist.all_reduce(total, group=group)
        seen[f"{name}: the sum of 2 ** rank"] = total
    return seen


RETURN = "return pipelines[rank % d], rows[rank // d]"
make_grid = Spec(
    todo="12.11",
    truth=wiring.make_grid,
    layouts=(((0, 1, 2, 3),),),
    cases=lambda n: [(num_stages,) for num_stages in (2, 4, 1, 3, 8)],
    observe=groups_seen,
    guards_group=False,
    advice={"": PLACES},
    refusal=("4 ranks are no multiple of that many stages.", RAISE_FIRST),
    hints=(
        "Write down the ranks of each pipeline for 4 ranks and 2 stages: 0 2 and 1 3. The replicas "
        "of a stage are 0 1 and 2 3.",
        "dist.new_group is called by all ranks for every group, in the same order, also for those "
        "that a rank is not in. Make all, and keep two.",
        "With d = N // num_stages, pipeline k has the ranks k, k + d, k + 2d, ...; stage s has "
        "s * d to (s + 1) * d - 1. Rank r is in pipeline r % d, and has stage r // d.",
    ),
    mistakes="""
        {RETURN} => return rows[rank // d], pipelines[rank % d] ::
            The two groups have changed places. | The pipeline comes first.
        pipelines = [dist.new_group(list(range(first, world_size, d))) for first in range(d)] =>
            pipelines = [dist.new_group(list(range(k * num_stages, (k + 1) * num_stages))) for k in
            range(d)]
        rows = [dist.new_group(list(range(s * d, (s + 1) * d))) for s in range(num_stages)] => rows
            = [dist.new_group(list(range(s, world_size, num_stages))) for s in range(num_stages)]
        {RETURN} => return pipelines[rank // num_stages], rows[rank % num_stages] :: Neighbouring
            ranks make a pipeline here, and they should be replicas of a stage. | {PLACES}
        if world_size % num_stages: => if False: ::
            4 ranks are no multiple of that many stages. | {RAISE_FIRST}
        {RETURN} => return pipelines[rank % d], pipelines[rank % d] ::
            The second group is the pipeline once more. | {PLACES}
        {RETURN} => return pipelines[rank % d], dist.group.WORLD ::
            The second group is the whole job.
        {RETURN} => return pipelines[0], rows[0] ::
            Every rank returns the first groups, also where it is in others.
        world_size // num_stages => world_size / num_stages ::
            d is a float here, also where it is whole. | N // num_stages
    """,
    reasons="""
        not part of group :: This rank is not in that group. | {PLACES}
        is out of range :: The ranks of the job are 0 to N - 1, and a group lists others. | d = N //
            num_stages is the number of replicas.
        list index out of range :: There are d pipelines, and num_stages rows. | {PLACES}
        'float' object cannot be :: a / b is a float, also where it is whole. | N // num_stages
    """,
    module=globals(),
)
