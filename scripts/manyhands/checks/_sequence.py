"""Checks of 13.7 to 13.9: positions cut over ranks, sums of gradients, random numbers.

Every rank draws the same numbers from a seed, so each knows what one process would compute, and
what the common mistakes would give instead. A rank stops at the first thing that is wrong.
"""

import random
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.checks import Lesson, Wrong
from manyhands.checks._wrapping import Seen, in_ranks
from manyhands.checks.shared import Reasons, waits
from manyhands.collectives.trees import Group
from manyhands.instruments.ledger import NAMES, NO_CALLS, Ledger, calls

part = Lesson("tensor")

Mistakes = Iterable[tuple[Tensor, str, str]]  # what it would give, what it is, what to try
NUM_RANKS = 3


def refuse(seen: str, smell: str = "", hint: str = "") -> None:
    raise Seen("\n".join(" ".join(words.split()) for words in (seen, smell, hint)))


def quiet() -> None:
    """Leave out what torch says of right answers: of names, and of all_reduce under autograd."""
    warnings.filterwarnings("ignore", "(?s).*autograd kernel was not registered")
    warnings.filterwarnings("ignore", category=FutureWarning)


class Place(NamedTuple):
    """This rank among those that hold one model."""

    group: Group
    ranks: tuple[int, ...]  # of the job
    rank: int  # in the group
    told: str


def places() -> list[Place]:
    """All ranks; and for ranks 1 and 2 a group of their own."""
    rank, pair = dist.get_rank(), dist.new_group([1, 2])
    places = [Place(None, (0, 1, 2), rank, f"rank {rank} of {NUM_RANKS}")]
    words = f"rank {rank} of the job in a group of ranks 1 and 2"
    return places + ([Place(pair, (1, 2), rank - 1, words)] if rank else [])


class Guard(Ledger):
    """A ledger that stops a call to a wrong group, or of sizes that do not fit, before it is made.

    Args:
        silent: the reason why no message at all may be sent: seen, smell, hint.
    """

    def __init__(self, place: Place, silent: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.place, self.silent = place, silent

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # torch's own signature
        name = func.name().split("::")[1].split(".")[0].rstrip("_")
        if func.namespace == "c10d" and name not in NO_CALLS:
            self._look(NAMES.get(name, name), args)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _look(self, op: str, args: tuple) -> None:
        place, ranks = self.place, self._entry(op, args, None).ranks
        if self.silent:
            refuse(*self.silent)
        if ranks != place.ranks:
            smell = "`group` is not passed on, so ranks of other groups take part"
            seen = f"{place.told}: {op} over ranks {list(ranks)}, not {list(place.ranks)}"
            refuse(seen, smell, "hand the group to every call")
        sizes = [arg.numel() for arg in args[:2] if isinstance(arg, Tensor)]
        n = len(place.ranks)
        if op in ("all_gather", "reduce_scatter") and len(sizes) == 2:
            if max(sizes) != n * min(sizes) or (sizes[0] > sizes[1]) != (op == "all_gather"):
                seen = f"{place.told}: {op} gets tensors of {sizes[0]} and {sizes[1]} numbers"
                smell = f"{n} ranks share this: the whole has {n} times as many as a part"
                refuse(seen, smell, "count with dist.get_world_size(group); what is filled first")


class Arrivals(Guard):
    """A guard that stops a read of what an all-gather may not have filled yet.

    Args:
        started: works with what they fill, as `started_gathers` writes them down.
        waited: works that somebody waited for, by id.
    """

    def __init__(self, place: Place, started: list, waited: Mapping) -> None:
        super().__init__(place)
        self.started, self.waited = started, waited

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # torch's own signature
        if func.namespace == "aten" and not func.is_view:
            inner = [item for arg in args if isinstance(arg, list | tuple) for item in arg]
            given = [item for item in [*args, *inner] if isinstance(item, Tensor)]
            self.look_for({tensor.untyped_storage().data_ptr() for tensor in given})
        return super().__torch_dispatch__(func, types, args, kwargs)

    def look_for(self, addresses: set[int] | None = None) -> None:
        """Refuse if a work is not waited for that fills one of these, or any at all."""
        for work, whole in self.started:
            is_read = addresses is None or whole.untyped_storage().data_ptr() in addresses
            if is_read and id(work) not in self.waited:
                seen = f"{self.place.told}: the whole is read before the all-gather was waited for"
                refuse(seen, *NOT_WAITED)


def started_gathers() -> list[tuple[dist.Work, Tensor]]:
    """The all-gathers that this rank starts from now on, and what each of them fills."""
    found = []

    def watched(original: Callable) -> Callable:
        def call(*args, **kwargs):
            work = original(*args, **kwargs)
            if work is not None:  # it was started only
                found.append((work, (args or list(kwargs.values()))[0]))
            return work

        return call

    for name in ("all_gather_single", "all_gather_into_tensor"):
        if hasattr(dist, name):
            setattr(dist, name, watched(getattr(dist, name)))
    return found


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return torch.allclose(one.double(), other.double(), atol=1e-5, rtol=1e-4)


def compare(found: object, wanted: Tensor, what: str, mistakes: Mistakes, *otherwise: str) -> None:
    """Refuse another tensor than the one wanted; a known mistake is named."""
    if not isinstance(found, Tensor):
        shown = "None" if found is None else f"a {type(found).__name__}"
        smell = "nothing is returned" if found is None else "a tensor is asked for"
        refuse(f"{what} is {shown}", smell, "return the tensor")
    if _close(found, wanted):
        return
    named = next((why for value, *why in mistakes if _close(found.detach(), value)), otherwise)
    if found.shape != wanted.shape:
        shapes = f"{tuple(found.shape)}, not {tuple(wanted.shape)}"
        refuse(f"{what} has shape {shapes}", *named)
    one, other = found.detach().double().flatten(), wanted.detach().double().flatten()
    index = int((~torch.isclose(one, other, atol=1e-5, rtol=1e-4)).nonzero()[0])
    refuse(f"{what} has {one[index]:.4g} at index {index}, not {other[index]:.4g}", *named)


# ---- 13.7 -----------------------------------------------------------------------------------

CUT_EVENLY = (
    "with parts of different lengths a reduce-scatter hangs, crashes or gives wrong numbers",
    "raise ValueError with both numbers before any message, if num % n",
)
DIM_0 = (
    "ranks were put together along dimension 0, which is the batch",
    "whole.chunk(n), and torch.cat(..., dim=1)",
)
FLAT = (
    "a view of the same numbers: with B > 1 the positions of a sequence are not neighbours there",
    "whole.chunk(n) has one rank's (B, T/N, D) each; torch.cat(..., dim=1)",
)
FLAT_SUM = (
    "reduce_scatter cuts memory into N parts, which is a cut by dimension 0, the batch",
    "torch.cat(x.chunk(n, dim=1)) puts what each rank gets one behind the other",
)
NOT_SUMMED = (
    "this rank's own slice: each rank has only a part of the sum",
    "sum over ranks: sum_positions",
)
NOT_GATHERED = (
    "the other ranks' positions are missing: every rank's x went into every position",
    "all ranks' gradients: gather_positions",
)
NO_MEAN = ("a sum is asked for, not a mean", "no division by the ranks")
NOT_WAITED = (
    "all_gather only starts a message, and returns a work: until that is done, the whole holds "
    "whatever was in its memory",
    "all_gather(whole, shard, group).wait()",
)
ARGUMENTS = (
    "all_gather(whole, shard, group) fills `whole`, and starts only: it returns a work; "
    "reduce_scatter(shard, whole, group) fills `shard`, and returns None",
    "make the tensor that is filled with x.new_empty(...), and give it first",
)
SEQUENCE: Reasons = {
    "Expected parameter": ARGUMENTS,
    "all_gather() missing": ARGUMENTS,
    "reduce_scatter() missing": ARGUMENTS,
    "Work' object": ARGUMENTS,
    "'bool' object has no attribute": ARGUMENTS,
    "'NoneType' object has no attribute": ARGUMENTS,
    "incorrect number of gradients": (
        "forward had two arguments, x and the group, and each wants a gradient",
        "return the gradient, None",
    ),
    "invalid gradient at index 0": (
        "a gradient has the shape of x: backward goes the other way than forward",
        "backward of the one is forward of the other",
    ),
    "has no attribute 'group'": ("backward needs the group as well", "ctx.group = group"),
    "must be contiguous": ("messages carry memory as it lies", "x.contiguous()"),
    "view size is not compatible": ("x need not be contiguous", "x.contiguous(), or reshape"),
    "Sizes of tensors must match": CUT_EVENLY,
    "outputShape[0]": FLAT_SUM,
    "save_for_backward": ("that is for tensors", "ctx.group = group"),
}


@part.exercise(
    "13.7",
    "all_gather(whole, shard, group) of lesson 10 fills `whole`: it starts, and returns a work to "
    "wait() for. reduce_scatter(shard, whole, group) fills `shard`, and is done when it returns.",
    "gather_positions: all_gather puts the ranks one behind the other along dimension 0, so that "
    "`whole` is (N x B, T/N, D). Its N chunks belong side by side along dimension 1.",
    "sum_positions is the way back: cut x into N chunks along dimension 1, put them one behind the "
    "other along dimension 0, and reduce_scatter. Look at T % N first.",
    "Backward of the one is forward of the other: each position went to all ranks, so its gradient "
    "is a sum; each rank's x went into all positions, so its gradient is gathered.",
    num_answers=2,
)
def GatherSequence(answer) -> None:
    """Both classes: B = 2 on 3 ranks, and on ranks 1 and 2 of 3 with tensors that are views."""
    seed = random.randrange(10_000)
    in_ranks(_look_at_sequence, NUM_RANKS, answer.parts, seed, reasons=SEQUENCE)


def _look_at_sequence(answers: tuple, seed: int) -> bool:
    quiet()
    gather, scatter = (getattr(answer, "apply", answer) for answer in answers)
    works = started_gathers(), waits()
    for place in places():
        dtype = torch.float32 if place.group is None else torch.float64
        n, shape = len(place.ranks), (2, 2, 3)
        whole_shape = (2, 2 * n, 3)
        parts = [_strided(seed + r, shape, dtype, place) for r in range(n)]
        wholes = [_strided(seed + 9 + r, whole_shape, dtype, place) for r in range(n)]
        _look_at_gather(gather, parts, wholes, place, works)
        _look_at_scatter(scatter, parts, wholes, place, works)
        _look_at_uneven(scatter, place)
    return True


def _strided(seed: int, shape: tuple, dtype: torch.dtype, place: Place) -> Tensor:
    """Numbers of this shape; in the small group they do not lie in order."""
    if place.group is None:
        return draw(seed, *shape, dtype=dtype)
    return draw(seed, shape[1], shape[0], shape[2], dtype=dtype).transpose(0, 1)


def _through(
    apply: Callable, x: Tensor, grad: Tensor, ledgers: list[Arrivals], name: str, tables: tuple
) -> None:
    """Forward and backward of one class; `tables` holds what is wanted and the mistakes of each."""
    (wanted, mistakes), (wanted_grad, grad_mistakes) = tables
    leaf = x.detach().requires_grad_()
    before, grad_before, place = x.clone(), grad.clone(), ledgers[0].place
    with ledgers[0]:
        found = apply(leaf, place.group)
    ledgers[0].look_for()
    said = f"{place.told}, x of shape {tuple(x.shape)}: {name}"
    compare(found, wanted, f"{said} forward", mistakes, *DIM_0)
    if not found.requires_grad:
        refuse(f"{said} has no gradient", "it is no autograd Function", "call its .apply")
    with ledgers[1]:
        found.backward(grad)
    ledgers[1].look_for()
    compare(leaf.grad, wanted_grad, f"{said} backward", grad_mistakes, *NOT_SUMMED)
    if not (torch.equal(leaf, before) and torch.equal(grad, grad_before)):
        refuse(f"{said}: the caller's tensors were changed", "", "work on a copy")
    for way, ledger in zip(("forward", "backward"), ledgers, strict=True):
        sent, limit = sum(entry.nbytes for entry in ledger.entries), max(x.nbytes, grad.nbytes)
        if "all_reduce" in calls(ledger.entries) or sent > limit:
            _refuse_bytes(f"{said} {way} calls {', '.join(calls(ledger.entries))}", sent, limit)


def _refuse_bytes(seen: str, sent: int, limit: int) -> None:
    smell = "right, but a reduce-scatter or an all-gather sends half of an all-reduce"
    more = f"with {sent} bytes, where {limit} do"
    if sent <= limit:
        more = f"of {sent} bytes: they travel twice, to be summed and to come to every rank"
    refuse(f"{seen} {more}", smell, "all_gather to gather, reduce_scatter to sum")


def _look_at_gather(
    apply: Callable, parts: list[Tensor], wholes: list[Tensor], place: Place, works: tuple
) -> None:
    n, rank, x = len(place.ranks), place.rank, parts[place.rank]
    total, behind = sum(wholes), torch.cat(parts)
    wanted = torch.cat(parts, dim=1)
    forward: Mistakes = [
        (behind, *DIM_0),
        (behind.reshape(wanted.shape), *FLAT),
        (x, "that is this rank's part only", "all_gather comes first"),
        (torch.cat(parts[::-1], dim=1), "the ranks stand in the wrong order", "rank 0 first"),
        (
            torch.stack(parts, dim=2).reshape(wanted.shape),
            "positions of the ranks alternate",
            FLAT[1],
        ),
    ]
    own = _sums(total, n, rank)
    backward: Mistakes = [
        (wholes[rank].chunk(n, 1)[rank], *NOT_SUMMED),
        (own / n, *NO_MEAN),
        (total.reshape(n, *x.shape)[rank], *FLAT_SUM),
        (_sums(total, n, 0), "these are rank 0's positions", "each rank gets its own"),
    ]
    ledgers = [Arrivals(place, *works) for _ in range(2)]
    _through(apply, x, wholes[rank], ledgers, "gather", ((wanted, forward), (own, backward)))


def _sums(total: Tensor, n: int, rank: int) -> Tensor:
    return total.chunk(n, dim=1)[rank]


def _look_at_scatter(
    apply: Callable, parts: list[Tensor], wholes: list[Tensor], place: Place, works: tuple
) -> None:
    n, rank, x = len(place.ranks), place.rank, wholes[place.rank]
    total, behind = sum(wholes), torch.cat(parts)
    own, gathered = _sums(total, n, rank), torch.cat(parts, dim=1)
    forward: Mistakes = [
        (_sums(x, n, rank), *NOT_SUMMED),
        (own / n, *NO_MEAN),
        (total.reshape(n, *own.shape)[rank], *FLAT_SUM),
        (total, "all positions are there still", "each rank keeps its own"),
        (_sums(total, n, 0), "these are rank 0's positions", "each rank gets its own"),
    ]
    padded = torch.zeros_like(x)
    padded.chunk(n, dim=1)[rank].copy_(parts[rank])
    backward: Mistakes = [
        (padded, *NOT_GATHERED),
        (torch.cat([parts[rank]] * n, dim=1), *NOT_GATHERED),
        (gathered / n, *NO_MEAN),
        (behind.reshape(gathered.shape), *FLAT),
    ]
    ledgers = [Arrivals(place, *works) for _ in range(2)]
    _through(apply, x, parts[rank], ledgers, "scatter", ((own, forward), (gathered, backward)))


def _look_at_uneven(scatter: Callable, place: Place) -> None:
    n = len(place.ranks)
    said = f"{place.told}: {2 * n + 1} positions cannot be cut evenly over {n} ranks"
    try:
        with Guard(place, silent=(f"{said}, and yet a message is sent", *CUT_EVENLY)):
            scatter(torch.zeros(2, 2 * n + 1, 3), place.group)
    except ValueError:
        return
    except Seen:
        raise
    except Exception as error:
        refuse(f"{said}: {type(error).__name__} in place of ValueError", *CUT_EVENLY)
    refuse(f"{said}, and no error is raised", *CUT_EVENLY)


# ---- 13.8 -----------------------------------------------------------------------------------

SHAPES = [(2, 3), (4,), (1, 2), (5,)]
READ_TWICE = (
    "`params` is an iterator: it was read to its end, and the second reading finds nothing",
    "make one list of the gradients first, and use that list only",
)
OTHER_LIST = (
    "the vector is cut by another list than the one that was packed",
    "pack and unpack one list, that of the gradients",
)
NO_GRADIENT = ("a parameter that is frozen, or unused, has .grad None", "skip those")
SUMS: Reasons = {
    "'NoneType' object has no attribute": NO_GRADIENT,
    "NoneType": NO_GRADIENT,
    "split_with_sizes expects": OTHER_LIST,
    "expected a non-empty list": (
        "none of the parameters may have a gradient: then there is nothing to send",
        "ask `if gradients:`",
    ),
    "has no len()": ("params may be an iterator", "a list comprehension over it"),
    "not subscriptable": ("params may be an iterator", "a list comprehension over it"),
    "a leaf Variable that requires grad": (
        "the weights were to be changed, not the gradients",
        "param.grad",
    ),
}


@part.exercise(
    "13.8",
    "Collect the gradients that are not None, in a list.",
    "`pack` makes one vector of them, one all_reduce sums it, and `unpack` writes it back.",
)
def sum_gradients(answer) -> None:
    """Four parameters, one frozen; an iterator; float64 in a group; none with a gradient."""
    in_ranks(_look_at_gradients, NUM_RANKS, answer, random.randrange(10_000), reasons=SUMS)


class OneReading:
    """An iterator that counts how often its end was reached."""

    def __init__(self, items: Iterable) -> None:
        self.items, self.num_ends = iter(items), 0

    def __iter__(self) -> "OneReading":
        return self

    def __next__(self) -> object:
        try:
            return next(self.items)
        except StopIteration:
            self.num_ends += 1
            raise


def _call_on_iterator(answer, params: list[nn.Parameter], place: Place) -> Guard:
    """Call the answer; what goes wrong after a second reading comes from that."""
    reading = OneReading(params)
    before = [None if p.grad is None else p.grad.clone() for p in params]
    with Guard(place) as ledger:
        try:
            answer(reading, place.group)
        except (Seen, NotImplementedError):
            raise
        except Exception as error:
            if reading.num_ends > 1:
                said = f"{type(error).__name__}: {error}".split("\n")[0][:120]
                refuse(f"{place.told}: {said}", *READ_TWICE)
            raise
    pairs = [(p.grad, b) for p, b in zip(params, before, strict=True) if b is not None]
    if reading.num_ends > 1 and all(g is not None and torch.equal(g, b) for g, b in pairs):
        refuse(f"{place.told}: no gradient has changed", *READ_TWICE)
    return ledger


def _look_at_weights(
    params: list[nn.Parameter], before: list[Tensor], totals: dict[int, Tensor], place: Place
) -> None:
    n = len(place.ranks)
    for index, (param, old) in enumerate(zip(params, before, strict=True)):
        if torch.equal(param, old):
            continue
        seen = f"{place.told}: a weight was changed"
        if _close(param.detach(), n * old):
            refuse(seen, f"it is {n} times as large: weights were summed, not gradients", "p.grad")
        if index in totals and _close(param.detach(), totals[index]):
            smell = "the sums of the gradients were written into the weights"
            refuse(seen, smell, "unpack(vector, gradients), not params")
        refuse(seen, "weights are equal already", "param.grad")


def _look_at_gradients(answer, seed: int) -> bool:
    for place in places():
        dtype = torch.float32 if place.group is None else torch.float64
        params = [nn.Parameter(draw(seed, *shape, dtype=dtype)) for shape in SHAPES]
        params[1].requires_grad_(False)
        named = [index for index in range(len(params)) if index != 1]
        of_ranks = [
            [draw(seed + 10 + 7 * r + index, *SHAPES[index], dtype=dtype) for index in named]
            for r in range(len(place.ranks))
        ]
        before = [param.detach().clone() for param in params]
        for index, grad in zip(named, of_ranks[place.rank], strict=True):
            params[index].grad = grad.clone()
        addresses = [params[index].grad.data_ptr() for index in named]
        ledger = _call_on_iterator(answer, params, place)
        totals = {index: sum(grads) for index, *grads in zip(named, *of_ranks, strict=True)}
        _look_at_weights(params, before, totals, place)
        _look_at_sums(params, named, of_ranks, place)
        if addresses != [params[index].grad.data_ptr() for index in named]:
            smell = "param.grad is another tensor now, and who holds the old one sees no sum"
            refuse(f"{place.told}: the sums are right", smell, "write in place, as unpack does")
        _look_at_count(calls(ledger.entries), place)
        with Guard(place):
            answer(iter([params[1], nn.Parameter(torch.ones(2))]), place.group)
    return True


def _look_at_sums(
    params: list[nn.Parameter], named: list[int], of_ranks: list[list[Tensor]], place: Place
) -> None:
    if params[1].grad is not None:
        smell = "with zeros in .grad, an optimizer would let the frozen weight decay"
        refuse(f"{place.told}: the frozen parameter has a gradient now", smell, "skip it")
    for number, index in enumerate(named):
        grads = [grads[number] for grads in of_ranks]
        total = sum(grads)
        unread = "the sums were not written back: pack and detach().clone() copy"
        mistakes: Mistakes = [
            (total / len(grads), "each rank has a part of one gradient: that is no mean", "sum"),
            (grads[place.rank], unread, "unpack writes a vector into the gradients"),
            (params[index].detach(), "that is the weight", "the gradients are summed"),
        ]
        what = f"{place.told}: the gradient of shape {SHAPES[index]}"
        order = "are the parts written back in the order in which they were packed?"
        compare(params[index].grad, total, what, mistakes, order, "pack and unpack one list")


def _look_at_count(made: Mapping[str, int], place: Place) -> None:
    if dict(made) == {"all_reduce": 1}:
        return
    seen = ", ".join(f"{number} {op}" for op, number in made.items())
    smell = "each message has a latency of its own; one vector is one message"
    refuse(f"{place.told}: {seen} for 3 gradients, not 1 all_reduce", smell, "pack them first")


# ---- 13.9 -----------------------------------------------------------------------------------

RANDOM: Reasons = {
    "context manager protocol": ("`use` has lost its decorator", "@contextmanager above it"),
    "is not an iterator": ("a function with @contextmanager has to yield", "yield in try"),
    "generator didn't stop": ("a second yield was reached", "one yield only"),
    "has no attribute 'states'": ("`use` goes on where the last block ended", "set in __init__"),
    "RNG state must be": ("a state is a list with one tensor for each device", "set_rng_states"),
    "has no attribute 'type'": ("rng_states wants a torch.device", "torch.device(device)"),
}
FORGOTTEN = (
    "after the block the common numbers do not go on where they stood: the ranks draw apart",
    "keep rng_states before the block, and set them again in `finally`",
)

SAME_SEED = ("the seed is the same on all ranks", "add dist.get_rank(group), and 1")
NOT_OWN = (
    "a program that seeds its common numbers alike has them twice: seed + rank is `seed` on rank 0",
    "seed + 1 + rank",
)


class Drawn(NamedTuple):
    """What came out of one rank's numbers, four at a time."""

    told: str
    common: list[list[float]]  # the first six of the common numbers
    outside: list[list[float]]  # after __init__, and after each of three blocks
    inside: list[list[float]]  # in four blocks; the third ends with an error
    again: list[list[float]]  # the same four from a second object of the same seed
    other: list[float]  # with another seed
    plain: list[float]  # after torch.manual_seed(seed)
    swallowed: bool


@part.exercise(
    "13.9",
    "Both methods borrow the random numbers: keep where the common ones stand with rng_states, do "
    "something, and set them back with set_rng_states.",
    "__init__: torch.manual_seed(a number that differs by rank, and is `seed` on no rank), and "
    "self.states = rng_states(self.device) after it; self.device = torch.device(device), since "
    "`device` may be a str. use: set self.states, yield, keep the new ones in self.states.",
    "What comes after `yield` has to happen after an error as well: try ... finally.",
)
def OwnRandom(answer) -> None:
    """Four blocks, one with an error in it, and common numbers between them; on 3 ranks and 2."""
    seed = random.randrange(1, 10_000)  # of 0, also 1000 * seed is 0
    results = in_ranks(_draw_on_rank, NUM_RANKS, answer, seed, reasons=RANDOM)
    all_drawn = [drawn for result in results for drawn in result]
    for drawn in all_drawn:
        _look_at_drawn(drawn)
    _look_at_seeds(all_drawn)
    firsts = [result[0].inside[0] for result in results]
    for first, other in ((0, 1), (1, 2), (0, 2)):
        if firsts[first] == firsts[other]:
            seen = f"ranks {first} and {other} draw the same numbers in their blocks"
            raise Wrong(seen, *SAME_SEED)
    if results[1][1].inside[0] == results[2][1].inside[0]:
        seen = "ranks 1 and 2 draw the same numbers in their group"
        raise Wrong(seen, *SAME_SEED)
    if results[1][0].inside[0] == results[1][1].inside[0]:
        seen = "rank 1 of the job draws the same as rank 0 of its group"
        smell = "dist.get_rank() counts over the whole job, so a run depends on which ranks it gets"
        raise Wrong(seen.replace("same as", "same numbers as"), smell, "dist.get_rank(group)")
    for drawn in all_drawn:
        if drawn.inside[0] == drawn.plain:
            seen = f"{drawn.told}: its own numbers are those after torch.manual_seed(seed)"
            raise Wrong(seen, *NOT_OWN)


def _look_at_seeds(all_drawn: list[Drawn]) -> None:
    same = [drawn for drawn in all_drawn if drawn.other == drawn.inside[0]]
    if not same:
        return
    smell, hint = "`seed` is not used", "seed + 1 + rank"
    if len(same) < len(all_drawn):
        smell = "a product with the rank is 0 on rank 0, whatever the seed"
        hint = "add the rank to the seed, do not multiply"
    raise Wrong(f"{same[0].told}: another seed gives the same numbers", smell, hint)


def _draw_on_rank(answer, seed: int) -> list[Drawn]:
    def four() -> list[float]:
        return torch.rand(4).tolist()

    def block(own, fails: bool = False) -> list[float]:
        with own.use():
            numbers.append(four())
            if fails:
                raise KeyError("in the block")
        return numbers[-1]

    found = []
    for place in places():
        numbers: list[list[float]] = []
        torch.manual_seed(seed + 100)
        common = [four() for _ in range(6)]
        torch.manual_seed(seed + 100)
        own = answer(seed, group=place.group)
        outside = [four(), *(block(own) and four() for _ in range(2))]
        swallowed = True
        try:
            block(own, fails=True)
        except KeyError:
            swallowed = False
        outside.append(four())
        block(own)
        inside, numbers = numbers, []
        same = answer(seed, torch.device("cpu"), place.group)
        for _ in range(4):
            block(same)
        other = block(answer(seed + 50, "cpu", group=place.group))
        torch.manual_seed(seed)
        found.append(
            Drawn(place.told, common, outside, inside, numbers[:4], other, four(), swallowed)
        )
    return found


def _look_at_drawn(drawn: Drawn) -> None:
    told, common, outside, inside = drawn[:4]
    if outside[0] != common[0]:
        smell = "__init__ leaves its own seed behind: from there on the ranks draw apart"
        seen = f"{told}: after OwnRandom(seed) the common numbers are others"
        raise Wrong(seen, smell, "rng_states before manual_seed, set_rng_states after it")
    if inside[0] in common:
        smell = "a dropout takes torch's own numbers, whatever generator object stands beside them"
        seen = f"{told}: in the block the common numbers are drawn"
        raise Wrong(seen, smell, "set_rng_states(self.states, self.device) before the yield")
    for number, words in ((1, "after a block"), (2, "after the second block")):
        if outside[number] != common[number]:
            raise Wrong(f"{told}: {words} the common numbers are others", *FORGOTTEN)
    if drawn.swallowed:
        smell = "an error of the program would be lost"
        raise Wrong(f"{told}: a KeyError in the block disappears", smell, "finally, not except")
    if outside[3] != common[3]:
        raise Wrong(
            f"{told}: after an error in the block the common numbers are others", *FORGOTTEN
        )
    for number in (1, 2, 3):
        if inside[number] in inside[:number]:
            smell = "each block starts at the same place, so each layer drops the same"
            if number == 3:
                smell = "after an error the next block starts where that one had started"
            seen = f"{told}: block {number + 1} draws the numbers of an earlier one"
            raise Wrong(seen, smell, "self.states = rng_states(self.device) in `finally`")
    if drawn.again != inside:
        smell = "they depend on the time, or on the common numbers: no run could be repeated"
        raise Wrong(f"{told}: the same seed gives others the second time", smell, "manual_seed")
