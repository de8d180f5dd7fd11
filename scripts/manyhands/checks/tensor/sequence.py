"""Specs of 13.7 to 13.9: positions cut over ranks, sums of gradients, random numbers."""

import itertools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.checks.engine import cases
from manyhands.checks.engine.answer import Pair
from manyhands.checks.engine.mistakes import Change, Mistake, around
from manyhands.checks.engine.spec import Place, Spec
from manyhands.checks.engine.tables import mistakes
from manyhands.checks.tensor.common import CALLS, as_result, costs_no_more, late_results, two_calls
from manyhands.instruments.ledger import Ledger, calls
from manyhands.tensor import sequence

# ---- 13.7 -----------------------------------------------------------------------------------

G_SUM = "return sum_positions(grad, ctx.group)"
G_BACK = f"{G_SUM}, None"
S_FORWARD = "return sum_positions(x, group)"
N = "dist.get_world_size({})"
MINE = "chunk(dist.get_world_size({0}), dim=1)[dist.get_rank({0})]"
GRAD_MINE = "grad." + MINE.format("ctx.group")
X_MINE = "x." + MINE.format("group")
N_CTX = N.format("ctx.group")
N_GROUP = N.format("group")
NO_DIVISION = "Divide by nothing."
ARGUMENTS = (
    "all_gather(whole, shard, group) fills `whole` and returns a work; "
    "reduce_scatter(shard, whole, group) fills `shard` and returns None.",
    "Make the tensor that is filled with x.new_empty(...), and give it first.",
)


class Positions(NamedTuple):
    """Positions of a rank, sequences, and whether the numbers lie in another order in memory."""

    share: int
    num_sequences: int
    turned: bool
    dtype: torch.dtype
    uneven: bool
    seed: int


def positions(n: int) -> list[Positions]:
    """One position each, several sequences, views; positions that cannot be cut evenly."""
    seeds = [cases.draw_seed() for _ in range(4)]
    return [
        Positions(1, 1, False, torch.float32, False, seeds[0]),
        Positions(3, 2, False, torch.float32, False, seeds[1]),
        Positions(2, 3, True, torch.float64, False, seeds[2]),
        Positions(2, 2, False, torch.float32, True, seeds[3]),
    ]


def part_of_sequence(case: Positions, length: int, *numbers: int) -> Tensor:
    """Numbers (B, length, 3); thirds in float64, which a sum in float32 would round."""
    draw = cases.generator(case.seed, *numbers)
    if case.turned:
        shape = (length, case.num_sequences, 3)
        return (cases.values(shape, draw, case.dtype) / 3).transpose(0, 1)
    return cases.values((case.num_sequences, length, 3), draw, case.dtype)


def positions_seen(answer: Pair, case: Positions, place: Place) -> dict:
    """Of two calls of each class, both forward and then both backward, values and messages.

    In the first all ranks of the job take part, in the second the group.
    """
    seen = {}
    parts = dict(zip(("GatherSequence", "ScatterSequence"), answer.parts, strict=True))
    if case.uneven:
        uneven = part_of_sequence(case, 2 * place.n + 1)
        scatter = parts["ScatterSequence"]
        found = getattr(scatter, "apply", scatter)(uneven, *place.options.values())
        return {"the result of ScatterSequence forward": as_result(found)}
    for name, part in parts.items():
        done = []
        for call, options in two_calls(place).items():
            n = place.n if options else dist.get_world_size()
            lengths = [case.share, n * case.share]
            if name == "ScatterSequence":
                lengths.reverse()
            x, grad = (part_of_sequence(case, size, place.job_rank, len(call)) for size in lengths)
            leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
            label = f"{name} forward{call}"
            with late_results(), Ledger() as ledger, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = getattr(part, "apply", part)(leaf, *options.values())
            seen[f"the result of {label}"] = as_result(found)
            seen[f"{label}: x is unchanged"] = torch.equal(leaf.detach(), x)
            seen[f"{label}: the result wants a gradient"] = found.requires_grad
            seen |= messages_of(ledger, label)
            done.append((call, leaf, found, grad))
        for call, leaf, found, grad in done:
            label = f"{name} backward{call}"
            before = grad.clone()
            with late_results(), Ledger() as ledger:
                if found.requires_grad:
                    found.backward(grad)
            seen[f"the gradient of {label}"] = leaf.grad
            seen[f"{label}: the given gradient is unchanged"] = torch.equal(grad, before)
            seen |= messages_of(ledger, label)
    return seen


def messages_of(ledger: Ledger, label: str) -> dict:
    """What a call sends: an all-reduce sends twice as much as one of its halves."""
    return {
        f"{label}: no all-reduce is called": "all_reduce" not in calls(ledger.entries),
        f"{label}: bytes of its messages": sum(entry.nbytes for entry in ledger.entries),
    }


COSTS = [
    f"{name} {way}{call}: bytes of its messages"
    for name in ("GatherSequence", "ScatterSequence")
    for way in ("forward", "backward")
    for call in CALLS
]


def tell_positions(case: Positions) -> str:
    """A case in words."""
    if case.uneven:
        return "2N + 1 positions"
    views = ", as views" if case.turned else ""
    return f"B = {case.num_sequences}, T/N = {case.share}{views}"


def in_helpers(found: list[Mistake]) -> list[Mistake]:
    """Mistakes whose patches may stand in the two functions as well that the classes call."""
    whole = Pair(None, None)
    whole.parts = [
        sequence.gather_positions,
        sequence.sum_positions,
        sequence.GatherSequence,
        sequence.ScatterSequence,
    ]

    def patched(change: Change) -> Change:
        def build(truth: Pair) -> Pair:
            space = dict(vars(sequence))
            for source in change.sources(whole):
                exec(source, space)
            return Pair(*(space[part.__name__] for part in truth.parts))

        return around(build)

    return [replace(mistake, change=patched(mistake.change)) for mistake in found]


def has_nan(found: object, wanted: object, case: object) -> str:
    """Does a result hold nan? In this check that stands where nothing has arrived yet."""
    for value in found.values() if isinstance(found, dict) else ():
        if isinstance(value, Tensor) and value.isnan().any():
            return "In this check a tensor holds nan until its message was waited for."
    return ""


positions_of_ranks = Spec(
    todo="13.7",
    truth=Pair(sequence.GatherSequence, sequence.ScatterSequence),
    layouts=cases.THREE,
    cases=positions,
    observe=positions_seen,
    same=costs_no_more(*COSTS),
    guards_group=False,
    tell=tell_positions,
    facts=has_nan,
    refusal=(
        "Positions that cannot be cut evenly must be refused.",
        "Raise ValueError with both numbers before any message if T % N.",
    ),
    hints=(
        "Read gather_positions: all_gather puts the ranks one behind the other along dimension 0, "
        "and chunk and cat bring them side by side along dimension 1. reduce_scatter(shard, whole, "
        "group) fills `shard`, and is done when it returns.",
        "sum_positions is the way back: cut x into N chunks along dimension 1, put them one behind "
        "the other along dimension 0, and reduce_scatter. Look at T % N first.",
        "Backward of the one is forward of the other: each position went to all ranks, so its "
        "gradient is a sum; each rank's x went into all positions, so its gradient is gathered.",
    ),
    mistakes=in_helpers(
        mistakes(
            r"""
            torch.cat(x.chunk(n, dim=1)) => x.contiguous() :: x is cut by its first dimension, the
                batch. | torch.cat(x.chunk(n, dim=1)) puts what each rank gets one behind the other.
            {G_BACK} => return {GRAD_MINE}.clone(), None :: backward of GatherSequence returns this
                rank's own slice, without a sum. | sum_positions sums over the ranks.
            {G_BACK} => {G_SUM} / {N_CTX}, None ::
                backward of GatherSequence gives a mean. | {NO_DIVISION}
            {S_FORWARD} => return {X_MINE}.clone() :: ScatterSequence returns this rank's own slice,
                without a sum. | sum_positions sums over the ranks.
            {S_FORWARD} => {S_FORWARD} / {N_GROUP} :: ScatterSequence gives a mean. | {NO_DIVISION}
            {S_FORWARD} => x = x.clone()\n        dist.all_reduce(x, group=group)\n        return x
                :: ScatterSequence returns all positions. | Each rank keeps its own ones.
            {S_FORWARD} => dist.all_reduce(x := x.clone(), group=group); return {X_MINE} ::
                ScatterSequence sums with an all-reduce, which sends twice as much. | Use all_gather
                to gather, and reduce_scatter to sum.
            return gather_positions(grad, ctx.group), None => return torch.cat([grad] * {N_CTX},
                dim=1), None :: backward of ScatterSequence puts this rank's gradient into every
                position. | Gather all ranks' gradients: gather_positions.
            if num % n => if False :: ! Positions that cannot be cut evenly must be refused. | Raise
                ValueError with both numbers before any message if T % N.
        """,
            globals(),
        )
    ),
    reasons={
        "incorrect number of gradients": (
            "backward has to return a gradient for each argument of forward after ctx.",
            "Return the gradient of x, and None for the group.",
        ),
        "save_for_backward": (
            "save_for_backward takes only tensors, and a group is none.",
            "Keep the group as an attribute: ctx.group = group.",
        ),
        "Backward' object has no attribute": (
            "backward asks ctx for something that forward did not keep there.",
            "Write ctx.group = group in forward.",
        ),
        "all_gather() missing": ARGUMENTS,
        "reduce_scatter() missing": ARGUMENTS,
        "Work' object": ARGUMENTS,
        "'bool' object has no attribute": (
            "wait() returns True, and not the tensor that has arrived.",
            "Use the tensor that you gave to all_gather.",
        ),
    },
)

# ---- 13.8 -----------------------------------------------------------------------------------

REDUCED = "dist.all_reduce(vector, group=group)"
WRITTEN = "unpack(vector, gradients)"
ONE_LIST = "Make one list of the gradients, and pack and unpack that list."
IN_PLACE = "Write into the gradients that are there, as unpack does."


class Parameters(NamedTuple):
    """The kinds of the parameters, and their type."""

    kinds: tuple[str, ...]
    dtype: torch.dtype
    seed: int

    def make(self) -> list[nn.Parameter]:
        """The parameters, equal on all ranks, without gradients."""
        draw = cases.generator(self.seed)
        shapes = {"vector": (5,), "empty": (0,)}
        params = []
        for kind in self.kinds:
            values = cases.values(shapes.get(kind, (2, 3)), draw, self.dtype)
            params.append(nn.Parameter(values, requires_grad=not kind.startswith("frozen")))
        return params


def parameters(n: int) -> list[Parameters]:
    """Some without a gradient, also the first; frozen ones, also with an old gradient; views."""
    kinds = (
        ("matrix", "vector"),
        ("unused", "matrix", "frozen", "vector"),
        ("transposed", "empty", "matrix"),
        ("matrix", "frozen with a gradient", "vector"),
        ("frozen", "unused"),
    )
    types = (torch.float32, torch.float64, torch.float32, torch.float64, torch.float32)
    return [Parameters(*pair, cases.draw_seed()) for pair in zip(kinds, types, strict=True)]


def large(case: Parameters, shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    """Whole numbers that bfloat16 cannot hold."""
    return 1001 * cases.values(shape, draw, case.dtype)


def sums_seen(answer: Callable, case: Parameters, place: Place) -> dict:
    """All gradients, and what else became of the parameters, which can be read once."""
    params = case.make()
    draw = cases.generator(case.seed, place.job_rank)
    for param, kind in zip(params, case.kinds, strict=True):
        if kind == "transposed":
            param.grad = large(case, (3, 2), draw).t()
        elif kind not in ("frozen", "unused"):
            param.grad = large(case, param.shape, draw)
    before = [param.detach().clone() for param in params]
    gradients = [param.grad for param in params]
    with Ledger() as ledger:
        answer(cases.read_once(params), **place.options)
    same_weights = all(torch.equal(*pair) for pair in zip(params, before, strict=True))
    pairs = zip(params, gradients, strict=True)
    return {
        "the gradients": [None if p.grad is None else p.grad.clone() for p in params],
        "the weights are unchanged": same_weights,
        "each .grad is the tensor that it was": all(p.grad is old for p, old in pairs),
        "messages": len(ledger.entries),
    }


def new_gradients(params: object, group: object = None) -> None:
    """Puts other tensors into .grad."""
    params = [param for param in params if param.grad is not None]
    if not params:
        return
    vector = sequence.pack([param.grad for param in params])
    dist.all_reduce(vector, group=group)
    sizes = [param.numel() for param in params]
    for param, part in zip(params, vector.split(sizes), strict=True):
        param.grad = part.view_as(param)


gradient_sums = Spec(
    todo="13.8",
    truth=sequence.sum_gradients,
    layouts=cases.THREE,
    cases=parameters,
    observe=sums_seen,
    same=costs_no_more("messages"),
    tell=lambda case: f"an iterator over parameters that are {', '.join(case.kinds)}",
    advice={"messages": "Pack the gradients first: one vector is one message."},
    hints=(
        "Collect the gradients that are not None, in a list.",
        "`pack` makes one vector of them, one all_reduce sums it, and `unpack` writes it back.",
    ),
    mistakes=r"""
        {WRITTEN} => unpack(vector, gradients, dist.get_world_size(group)) ::
            This is a mean, and each rank has a part of one gradient. | Divide by nothing.
        {WRITTEN} => pass :: The sums are not written back: pack copies. | {IN_PLACE}
        {WRITTEN} => unpack(vector, gradients[::-1]) ::
            The parts are not written back in the order in which they were packed. | {ONE_LIST}
        {REDUCED} => [dist.all_reduce(grad, group=group) for grad in gradients]
        {WRITTEN} => pass :: Each gradient is sent by itself, and each message has a latency of its
            own. | Pack them first: one vector is one message.
        {REDUCED} => dist.all_reduce(vector, op=dist.ReduceOp.MAX, group=group) ::
            This is the largest value of the ranks, and not the sum. | all_reduce sums.
        {REDUCED} => dist.reduce(vector, group_dst=0, group=group) ::
            Only rank 0 gets the sum. | all_reduce gives it to all ranks.
        if param.grad is not None] => if param.requires_grad] :: Trainable parameters are asked for,
            and not those with a gradient. | Ask whether param.grad is None.
        if param.grad is not None] => if param.requires_grad and param.grad is not None] ::
            A frozen parameter's gradient is left out. | Ask only whether param.grad is None.
        gradients = => if (params := list(params))[0].grad is None: return\n    gradients = ::
            Nothing is done where the first parameter has no gradient. | Skip only that one.
        gradients = => list(params)\n    gradients = ::
            `params` is read twice, and an iterator can be read only once. | {ONE_LIST}
        [param.grad for param in params if param.grad is not None] => [p.grad if p.grad is not None
            else torch.zeros_like(p) for p in params] ::
            Parameters without a gradient are sent as zeros. | Skip those.
        if gradients => if True :: None of the parameters may have a gradient, and there is then
            nothing to send. | Ask `if gradients:`.
        instead new_gradients :: param.grad is another tensor after that. | {IN_PLACE}
    """,
    reasons="""
        'NoneType' object has no attribute ::
            A parameter that is frozen or unused has .grad None. | Skip those.
        expected a non-empty list :: Nothing was found to pack: no parameter has a gradient, or
            `params` was at its end. | Ask `if gradients:`, and read `params` once. {ONE_LIST}
        view size is not compatible :: The elements of a gradient need not lie side by side, and
            view() needs that. | Use pack, or reshape(-1).
        has no len() :: `params` may be an iterator, which has no length. | {ONE_LIST}
        not subscriptable :: `params` may be an iterator, which has no index.
    """,
    module=globals(),
)

# ---- 13.9 -----------------------------------------------------------------------------------

SEED = "torch.manual_seed(seed + 1 + dist.get_rank(group))"
SET_OWN = "set_rng_states(self.states, self.device)"
KEEP_OWN = "self.states = rng_states(self.device)\n            "
KEEP_FIRST = "self.states = rng_states(self.device)\n        set_rng_states(common"
ON_CLASS = "OwnRandom.states = rng_states(self.device)\n        "


def randoms_seen(answer: Callable, case: tuple[int], place: Place) -> dict:
    """Statements about the numbers in the blocks of some objects, and between these blocks."""
    (seed,) = case
    torch.manual_seed(seed + 100)
    common = [four() for _ in range(8)]
    torch.manual_seed(seed + 100)
    own = answer(seed, **place.options)
    outside = [four()]
    inside = []
    for _ in range(2):
        inside.append(block(own))
        outside.append(four())
    error = None
    try:
        with own.use():
            inside.append(four())
            raise KeyError("in the block")
    except KeyError as raised:
        error = raised
    outside.append(four())
    inside.append(block(own))
    same = answer(seed, torch.device("cpu"), **place.options)
    between = answer(seed + 50, "cpu", **place.options)
    again = []
    others = []
    for _ in range(4):
        again.append(block(same))
        others.append(block(between))
    end = [four() for _ in range(2)]
    torch.manual_seed(seed)
    plain = [number for _ in range(8) for number in four()]
    seen = {
        "the common numbers go on after __init__": outside[0] == common[0],
        "a block does not draw the common numbers": inside[0] not in common,
        "the common numbers go on after a block": outside[:3] == common[:3],
        "an error in a block comes out of it": error is not None,
        "the common numbers go on after an error": outside == common[:4],
        "a block goes on where the last one ended": inside[1] != inside[0] != inside[2],
        "this holds after an error as well": inside[3] not in inside[:3],
        "the same seed gives the same numbers, also beside another object": again == inside,
        "another seed gives other numbers": others[0] != inside[0],
        "they are not those after torch.manual_seed(seed)": inside[0] != plain[:4],
        "the common numbers go on after several objects": end == common[4:6],
    }
    ranks: list = [None] * dist.get_world_size()
    own_row = [number for numbers in inside for number in numbers]
    dist.all_gather_object(ranks, (place.rank, own_row))
    mine = [numbers for rank, numbers in ranks if rank == place.rank]
    apart = [numbers for rank, numbers in ranks if rank != place.rank]
    seen["ranks of a group draw different numbers"] = own_row not in apart
    seen["the rank in the group counts, not that in the job"] = all(n == mine[0] for n in mine)
    seen["no rank draws what another one draws some numbers later"] = not any(
        overlap(own_row, other) for other in apart
    )
    seen[
        "no rank draws the common numbers after torch.manual_seed(seed), some later"
    ] = not overlap(own_row, plain)
    return seen


def overlap(one: list[float], other: list[float]) -> bool:
    """Do two numbers that follow one another in one list do so in the other one as well?"""
    return not set(itertools.pairwise(one)).isdisjoint(itertools.pairwise(other))


def four() -> list[float]:
    """Four of torch's random numbers."""
    return torch.rand(4).tolist()


def block(own: object) -> list[float]:
    """Four numbers in a block."""
    with own.use():
        return four()


own_random = Spec(
    todo="13.9",
    truth=sequence.OwnRandom,
    layouts=cases.THREE,
    cases=lambda n: [(7,), (cases.draw_seed() % 10_000 + 2,)],
    observe=randoms_seen,
    guards_group=False,
    may_change=("torch's random numbers",),
    tell=lambda case: f"OwnRandom({case[0]}, ...)",
    hints=(
        "Both methods borrow the random numbers: keep where the common ones stand with rng_states, "
        "do something, and set them back with set_rng_states.",
        "__init__: torch.manual_seed(a number that differs by rank, and is `seed` on no rank), and "
        "self.states = rng_states(self.device) after it; self.device = torch.device(device), since "
        "`device` may be a str. use: set self.states, yield, keep the new ones in self.states.",
        "What comes after `yield` has to happen after an error as well: try ... finally.",
    ),
    mistakes=r"""
        {SEED} => torch.manual_seed(seed) ::
            The seed is the same on all ranks. | Add the rank in the group to the seed, and 1.
        {SEED} => torch.manual_seed(seed + dist.get_rank(group)) ::
            On rank 0 the seed is `seed` itself, with which the common numbers often begin.
        {SEED} => torch.manual_seed(dist.get_rank(group)) :: `seed` is not used.
        {SEED} => torch.manual_seed(seed * dist.get_rank(group)) ::
            The seed is multiplied by the rank, which is 0 on rank 0.
        {SEED} => torch.manual_seed(seed); torch.rand(dist.get_rank(group) + 1) ::
            All ranks draw from one row of numbers, which each of them enters a little later.
        {SEED} => torch.seed() ::
            The numbers are others each time, so no run could be repeated. | torch.manual_seed
        set_rng_states(common, self.device)\n\n => \n ::
            __init__ leaves its own seed behind, so from there on the ranks draw apart. | Call
            rng_states before manual_seed, and set_rng_states after it.
        {SET_OWN} => pass :: The block draws the common numbers. | Call {SET_OWN} before the yield.
        {KEEP_OWN} => ::
            Each block starts at the same place. | Keep the new states in self.states in `finally`.
        {KEEP_OWN}set_rng_states(common, self.device) => {KEEP_OWN}pass ::
            After a block the common numbers do not go on where they stood. | Keep rng_states before
            the block, and set them again in `finally`.
        try: => if True:
        finally: => if True: ::
            After an error nothing is put back. | What has to happen always stands in `finally`.
        yield => yield\n            self.states = rng_states(self.device)
        {KEEP_OWN} => :: After an error the next block starts where that one had started. | Keep the
            new states in `finally`.
        finally: => except KeyError: pass\n        if True: ::
            An error in the block is lost. | Write finally, and not except.
        {KEEP_FIRST} => {ON_CLASS}set_rng_states(common
        {KEEP_OWN} => {ON_CLASS}     :: Objects disturb one another, as when their states are kept
            on the class. | Keep them in self.
    """,
    reasons="""
        context manager protocol :: `use` has lost its decorator. | Keep @contextmanager.
        is not an iterator :: A function with @contextmanager has to yield. | yield in try.
        generator didn't stop :: A second yield was reached. | There may be one yield only.
        has no attribute 'type' :: rng_states and set_rng_states take a torch.device, and were given
            something else. | self.device = torch.device(device)
    """,
    module=globals(),
)
