"""Checks of lesson 10, first part: 10.1 to 10.4, from one vector to shards that come and go.

Each check looks on the ranks themselves, step by step, and a rank stops at the first mistake. So a
mistake is named before a later line would hang on it, or crash. Truth is drawn from a seed that all
ranks know, so each of them can compute what the others hold.
"""

import random
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.checks import SAME_CALLS, Lesson, Wrong, ranks, told
from manyhands.checks.shared import Reasons, because, waits
from manyhands.collectives.trees import Group
from manyhands.data_parallel.replicas import pack
from manyhands.fsdp import flat as course
from manyhands.instruments.ledger import NAMES, NO_CALLS, Entry, Ledger, calls
from manyhands.ranks.failures import RankFailed, name_ranks

part = Lesson("fsdp")

Mistakes = Iterable[tuple[Tensor, str, str]]  # what it would give, what it is, what to try


class Refused(Exception):
    """Stops a rank at a mistake; holds seen, smell and hint."""

    def __init__(self, *words: str) -> None:
        super().__init__(" | ".join(words))


def _run(fn: Callable, world_size: int, answer, reasons: Reasons) -> None:
    """Call `fn(answer, seed)` on ranks, and tell what stopped one of them."""
    try:
        results = ranks(fn, world_size, answer, random.randrange(10_000))
    except RankFailed as failed:
        failure = failed.failure
        if failure.error == "NotImplementedError" and "implemented for" not in failure.message:
            raise
        if failure.error == "Refused":
            raise Wrong(*failure.message.split(" | ")) from None
        raise because(failure, {**reasons, **REASONS}, *told(failed, answer)) from None
    if None in results:
        raise Wrong("a rank left by sys.exit()", "", "let the method end, or return")


class Watch(Ledger):
    """A ledger that stops a call before it is made with a wrong group or sizes that do not fit.

    Calls are noted in the job's store: a rank that waits in one can tell the others nothing else.
    """

    def __init__(self, *groups: Group) -> None:
        super().__init__()
        self.allowed = [tuple(dist.get_process_group_ranks(group)) for group in groups]
        self.rank, self.store = dist.get_rank(), dist.distributed_c10d._get_default_store()
        self.number, self.num_noted = self.store.add(f"watches of {self.rank}", 1), 0

    def _note(self, what: str) -> None:
        self.store.set(f"{self.number} {self.rank} {self.num_noted}", what)
        self.num_noted += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # torch's own signature
        name = func.name().split("::")[1].split(".")[0].rstrip("_")
        if func.namespace == "c10d" and name not in NO_CALLS:
            entry = self._entry(NAMES.get(name, name), args, None)
            if entry.ranks not in self.allowed:
                groups = f"{list(entry.ranks)}, but its group is {list(self.allowed[0])}"
                seen = f"rank {entry.rank} calls ranks {groups}"
                raise Refused(seen, "`group` is not passed on", "hand self.group to every call")
            _look_at_sizes(entry, *args[:2])
            self._note(entry.op)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def together(self, case: str) -> None:
        """Refuse calls that only some of the ranks have made."""
        every = range(dist.get_world_size())
        keys = [f"{self.number} {rank} {self.num_noted}" for rank in every]
        self._note("")
        with suppress(dist.DistStoreError):  # a rank hangs elsewhere: the limit tells that
            self.store.wait(keys, timedelta(seconds=2))
            ops = [self.store.get(key).decode() for key in keys]
            more, rest = ([r for r in every if bool(ops[r]) == made] for made in (True, False))
            if more:
                what = f"{name_ranks(more)} call{'s' * (len(more) == 1)} {ops[more[0]]}"
                seen = f"{case}: {what}, and {name_ranks(rest)} not"
                raise Refused(seen, "not every rank makes the same calls", SAME_CALLS)


def _look_at_sizes(entry: Entry, out: object, given: object) -> None:
    """gloo would end the process, with words of its own."""
    if not (isinstance(out, Tensor) and isinstance(given, Tensor)):
        return
    n, is_gather = len(entry.ranks), entry.op == "all_gather"
    whole, shard = (out.numel(), given.numel())[:: 1 if is_gather else -1]
    if whole == n * shard or entry.op not in ("all_gather", "reduce_scatter"):
        return
    smell, hint = "`whole` has N times as many numbers as a shard", "what does each of the two hold"
    if n * whole == shard:
        smell, hint = "they are swapped", "the tensor that is filled comes first"
    elif not is_gather:
        smell = "the padding, or the zeros of a parameter that has no .grad, are left out"
        hint = "one part for each parameter, torch.zeros_like(param) if need be; self.padding last"
    seen = f"{entry.op} gets a whole of {whole} numbers and a shard of {shard}"
    raise Refused(f"rank {entry.rank} of {n} ranks: {seen}", smell, hint)


class Place(NamedTuple):
    """This rank among those that share one vector."""

    group: Group
    ranks: list[int]  # of the job
    rank: int  # in the group
    told: str


def _places() -> tuple[Place, Place, Group]:
    """Rank 0 to 3 of all; rank 0 or 1 of a group; and the group of those with the same shard."""
    rank = dist.get_rank()
    # 0 3 and 1 2: neither the rank in the job nor its remainder is the rank in the group.
    lines = [dist.new_group(pair) for pair in ([0, 3], [1, 2])]
    rows = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    line = lines[0] if rank in (0, 3) else lines[1]
    four = Place(None, [0, 1, 2, 3], rank, f"rank {rank} of 4")
    two = dist.get_process_group_ranks(line)
    words = f"rank {rank} of the job in a group of ranks {two[0]} and {two[1]}"
    return four, Place(line, two, dist.get_rank(line), words), rows[rank // 2]


def _draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _params(
    seed: int, shapes: list[tuple], dtype: torch.dtype = torch.float32, trains: bool = True
) -> list[nn.Parameter]:
    return [
        nn.Parameter(_draw(seed + index, *shape).to(dtype), requires_grad=trains)
        for index, shape in enumerate(shapes)
    ]


def _padded(params: list[nn.Parameter], num_ranks: int) -> Tensor:
    """What `whole` should hold. (padded P,)"""
    vector = pack(params)
    return torch.cat([vector, vector.new_zeros(-len(vector) % num_ranks)])


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return torch.allclose(one.double(), other.double(), atol=1e-5, rtol=1e-4)


def _row(vector: Tensor) -> str:
    """The first numbers of a tensor, for people."""
    dots = ", ..." if vector.numel() > 3 else ""
    return f"[{', '.join(f'{x:.4g}' for x in vector.flatten()[:3].tolist())}{dots}]"


def _versus(found: Tensor, wanted: Tensor) -> str:
    """The first number that is another one, for people."""
    one, other = found.detach().double().flatten(), wanted.detach().double().flatten()
    far = (~torch.isclose(one, other, atol=1e-5, rtol=1e-4)).nonzero()
    index = int(far[0]) if len(far) else 0
    return f"{one[index]:.4g} at index {index}, not {other[index]:.4g}"


def _named(found: Tensor, mistakes: Mistakes, *otherwise: str) -> tuple[str, ...]:
    return next((why for value, *why in mistakes if _close(found, value)), otherwise)


def _is_view(tensor: Tensor, whole: Tensor, start: int) -> bool:
    """Does `tensor` begin at number `start` of the memory of `whole`?"""
    return tensor.data_ptr() == whole.data_ptr() + start * whole.element_size()


ONCE = (
    "there was nothing to pack: what goes through an iterator once finds it empty the second time",
    "self.params = list(params), and use that",
)
RANK_OF_GROUP = (
    "dist.get_rank() counts over the whole job, the parts over the group",
    "dist.get_rank(group)",
)
NO_MEMORY = (
    "the whole has 0 bytes: memory has to be taken before anything can be written into it",
    "self.whole.untyped_storage().resize_(self.whole.nbytes) comes first",
)
PADDING = (
    "padding is a tensor of zeros: pack() takes tensors, and `views` asks for its len",
    "self.params[0].detach().new_zeros(number)",
)
REASONS: Reasons = {
    "'int' has no len()": PADDING,
    "' object has no attribute 'detach'": PADDING,
    "a leaf Variable that requires grad": (
        "the result was to be written into the shard, which holds the weights",
        "a tensor of its own: torch.empty_like(self.shard)",
    ),
    "expected a non-empty list of Tensors": ONCE,
    "has no len()": ("params may be an iterator", ONCE[1]),
    "iterator' object": ("params may be an iterator", ONCE[1]),
    "has no attribute 'padding'": ("`show` cuts the padding off", "self.padding = zeros"),
    "has no attribute 'params'": ("`show` goes through self.params", "self.params = list(params)"),
    "out of bounds for storage of size 0": NO_MEMORY,
    "are out of bounds for storage of size": (
        "too few bytes for `whole`: numel() counts numbers, and a shard is only one part of it",
        "resize_(self.whole.nbytes)",
    ),
}

# ---- 10.1 -----------------------------------------------------------------------------------

TYPES = (
    "the whole may have a shorter type than the shard, and both sides of a message have one type",
    "send self.shard.detach().to(self.whole.dtype)",
)
FLAT_REASONS: Reasons = {
    "index out of range": RANK_OF_GROUP,
    "unexpected end of sequence": ("there are fewer parts than ranks", "pad before you cut"),
    "split_with_sizes": ("`show` wants parameters and padding, no more", "show(self.whole)"),
    "must have the same type": TYPES,
    "invalid tensor type": TYPES,
    "same dtype": TYPES,
    "Tensors must have same": TYPES,
    "different type": (
        "gradients may have a shorter type than the shard, and .grad has to have the shard's",
        "pack(...).to(self.shard.dtype) before you reduce",
    ),
    "'NoneType' object has no attribute": (
        "a parameter that took no part in the loss has .grad None",
        "torch.zeros_like(param) counts for it",
    ),
    "for +=: 'NoneType'": ("shard.grad is None at first", "set it then; add to it afterwards"),
    "for +: 'NoneType'": ("shard.grad is None at first", "set it then; add to it afterwards"),
    "Only Tensors of floating point": ("", "pack takes the tensors, not the padding's length"),
}


@part.exercise(
    "10.1",
    "__init__: padding is -P % N zeros, in the type of the parameters. pack all, and the padding "
    "last; show(whole); the shard is one of N equal chunks of the whole, without a copy.",
    "gather: one line, with the `all_gather` above. Nothing waits in it.",
    "reduce: pack the gradients and the padding, set each .grad to None, reduce_scatter into an "
    "empty tensor as large as the shard, divide, and add it to shard.grad. Where self.replicas is "
    "a group, all-reduce over that as well, and divide by its size, too.",
)
def Flat(answer) -> None:
    """13 to 25 numbers on 4 ranks and in pairs; frozen ones in bfloat16; no padding; one number."""
    _run(_look_at_flat, 4, answer, FLAT_REASONS)


def _look_at_flat(answer, seed: int) -> bool:
    torch.use_deterministic_algorithms(True, warn_only=True)  # then torch.empty() holds NaN
    four, two, replicas = _places()
    waited, k = waits(), 2 + seed % 4
    odd, frozen = [(k, 4), (3,), (2, 1)], _params(seed, [(k, 4), (3,)], torch.bfloat16, False)
    _make(answer, frozen, four)
    for place, shapes in ((four, odd), (two, odd), (four, [(k, 4), (4,)]), (four, [(1,)])):
        params = _params(seed, shapes)
        flat = _make(answer, params, place)
        _gather(flat, place, seed, waited)
        _reduce(flat, params, place, seed)
        _reduce(flat, params, place, seed + 50)  # adds to what is there
        flat.shard.grad = None
        if place is two:
            flat.replicas = replicas
            _reduce(flat, params, place, seed + 90)
    params = _params(seed, odd)
    flat = answer(iter(params), group=None)
    flat.shard.data = flat.shard.data.clone()
    flat.show(flat.whole.bfloat16())
    words = f"{four.told}, whole in bfloat16, shard in float32"
    _gather(flat, four._replace(told=words), seed, waited)
    _reduce(flat, params, four._replace(told=words), seed)
    return True


def _make(answer, params: list[nn.Parameter], place: Place):
    before, shapes = [param.detach().clone() for param in params], [p.shape for p in params]
    wanted = _padded(params, len(place.ranks))
    flat = answer(iter(params), group=place.group)
    case = f"{place.told}: {len(pack(before))} numbers"
    for name in ("whole", "shard", "params", "replicas"):
        if not hasattr(flat, name):
            seen = f"{case}: a {type(flat).__name__} has no `{name}`"
            raise Refused(seen, "", f"__init__ sets self.{name}{' = None' * (name == 'replicas')}")
    _look_at_whole(flat.whole, wanted, len(pack(before)), place, case)
    start = 0
    for param, shape in zip(params, shapes, strict=True):
        if param.shape != shape or not _is_view(param, flat.whole, start):
            seen = f"{case}: the parameter of shape {tuple(shape)} does not look into `whole`"
            smell = "it keeps memory of its own: what is gathered does not reach the model"
            raise Refused(seen, smell, "self.show(self.whole) makes views of the same parameters")
        start += shape.numel()
    _look_at_shard(flat, wanted, place, case, params[0].requires_grad)
    return flat


def _look_at_whole(whole: Tensor, wanted: Tensor, num_params: int, place: Place, case: str) -> None:
    num_ranks, num_all = len(place.ranks), dist.get_world_size()
    sizes = {  # numbers in the whole -> why
        num_params + num_ranks - num_params % num_ranks: (
            f"{num_params} is a multiple of {num_ranks} already",
            "-P % N is 0 there, and N - P % N is N",
        ),
        num_params + -num_params % num_all: (
            f"padded for the {num_all} ranks of the job, but {num_ranks} share this vector",
            "dist.get_world_size(group)",
        ),
        num_params + num_params % num_ranks: ("P % N is left over, not missing", "-P % N"),
        num_params: (f"that does not make {num_ranks} equal shards", "pad with -P % N zeros"),
    }
    if whole.shape != wanted.shape:
        seen = f"{case}; `whole` has shape {tuple(whole.shape)}, not ({len(wanted)},)"
        raise Refused(seen, *sizes.get(whole.numel(), ("", "a multiple of the number of ranks")))
    if whole.dtype != wanted.dtype:
        seen = f"{case} of {wanted.dtype}; `whole` is {whole.dtype}"
        smell = "padding of another type changes the type of all of them"
        raise Refused(seen, smell, PADDING[1] + " has the right type, and the right device")
    if whole.requires_grad:
        seen, smell = f"{case}; `whole` wants a gradient", "autograd keeps the graph of the packing"
        raise Refused(seen, smell, "pack detaches; so does .detach()")
    if not torch.equal(whole[:num_params], wanted[:num_params]):
        seen = f"{case}; `whole` holds {_versus(whole, wanted)}"
        raise Refused(seen, "", "the parameters in their order, the padding last")
    if not torch.equal(whole, wanted):
        seen = f"{case}; the padding is {_row(whole[num_params:])}"
        raise Refused(seen, "torch.empty holds anything; zeros are wanted", "new_zeros(...)")


def _look_at_shard(flat, wanted: Tensor, place: Place, case: str, trains: bool) -> None:
    shard, whole, size = flat.shard, flat.whole, len(wanted) // len(place.ranks)
    if not isinstance(shard, nn.Parameter):
        smell = f"the shard is a {type(shard).__name__}"
        raise Refused(f"{case}; {smell}", "an optimizer wants a parameter", "nn.Parameter(...)")
    if shard.shape != (size,):
        seen = f"{case}; the shard has shape {tuple(shard.shape)}, not ({size},)"
        smell = "that is all of it" if shard.numel() == len(wanted) else "shards must be equal"
        raise Refused(seen, smell, "cut the padded whole in N equal chunks, and take one")
    if shard.requires_grad != trains:
        seen = f"{case}, requires_grad={trains}; the shard has requires_grad={shard.requires_grad}"
        smell = "nn.Parameter wants gradients where nothing else is said"
        raise Refused(seen, smell, "requires_grad=self.params[0].requires_grad")
    if _is_view(shard, whole, place.rank * size):
        return
    parts, mine = wanted.view(-1, size), wanted.view(-1, size)[place.rank]
    if torch.equal(shard.detach(), mine):
        seen = f"{case}; the shard has memory of its own"
        smell = "a copy: what the optimizer writes into it is not seen in `whole`"
        raise Refused(seen, smell, "a chunk is a view; leave out clone() and the like")
    seen = f"{case}; the shard holds {_versus(shard, mine)}"
    mistakes = [
        (other, f"that is the part of the group's rank {number}", RANK_OF_GROUP[1])
        for number, other in enumerate(parts)
    ]
    raise Refused(seen, *_named(shard.detach(), mistakes, "", "chunk number dist.get_rank(group)"))


def _gather(flat, place: Place, seed: int, waited: dict) -> None:
    size, num_ranks = flat.shard.numel(), len(place.ranks)
    news = _draw(seed + 9, num_ranks, size)  # what the optimizers of all ranks have written
    with torch.no_grad():
        flat.whole.fill_(-99)
        flat.shard.copy_(news[place.rank])
    whole, case = flat.whole, f"{place.told}: gather()"
    waited.clear()
    time.sleep(0.01 * (place.rank == 0))  # a late partner
    with Watch(place.group) as watch:
        work = flat.gather()
    watch.together(case)
    if not hasattr(work, "wait"):
        smell = "the caller cannot wait for what is still on its way"
        raise Refused(f"{case} returns {work!r}"[:150], smell, "return what all_gather returns")
    if waited:
        smell = "nothing can be computed while the parts are on their way"
        raise Refused(f"{case} waits itself", smell, "only return the work; the caller waits")
    work.wait()
    if flat.whole.data_ptr() != whole.data_ptr():
        smell = "the parameters, and autograd, still look into the old one"
        raise Refused(f"{case} makes a new tensor of `whole`", smell, "fill the one that is there")
    wanted = news.flatten().to(whole.dtype)
    if not _close(flat.whole, wanted):
        missing = [r for r, part in enumerate(whole.view(num_ranks, -1)) if (part == -99).any()]
        seen = f"{case}; `whole` holds {_versus(flat.whole, wanted)}"
        if missing:
            seen = f"{case}; the parts of ranks {missing} of the group have not come into `whole`"
        raise Refused(seen, "another tensor was filled, or sent", "fill self.whole from the shards")


def _reduce(flat, params: list[nn.Parameter], place: Place, seed: int) -> None:
    """Gradients that differ by rank; the second of 3 has none, and the last has none on rank 1."""

    def gradients(rank: int) -> list[Tensor]:
        # Far from the weights' seed: no gradient is a weight.
        drawn = [_draw(seed + 20_000 + 7 * rank + i, *p.shape) for i, p in enumerate(params)]
        if len(params) > 1:
            drawn[1] *= len(params) == 2
            drawn[-1] *= rank != 1
        return [one.to(param.dtype) for one, param in zip(drawn, params, strict=True)]

    for param, gradient in zip(params, gradients(dist.get_rank()), strict=True):
        param.grad = gradient if len(params) == 1 or gradient.any() else None
    vectors = torch.stack([_padded(gradients(rank), len(place.ranks)) for rank in range(4)])
    before, old, weights = flat.whole.clone(), flat.shard.grad, flat.whole
    old = torch.zeros_like(flat.shard) if old is None else old.detach().clone()
    groups = [place.group] if flat.replicas is None else [place.group, flat.replicas]
    with Watch(*groups) as watch:
        flat.reduce()
    case = f"{place.told}: reduce()" + " with replicas" * (flat.replicas is not None)
    case += " with a shard.grad before it" * bool(old.any())
    watch.together(case)
    if not torch.equal(weights, before) or flat.whole is not weights:
        raise Refused(f"{case} changes `whole`", "weights stay", "gradients go into shard.grad")
    if flat.shard.grad is None:
        raise Refused(f"{case} leaves shard.grad at None", "", "self.shard.grad = the mean")
    _look_at_mean(flat, vectors, old, place, case)
    left = [param for param in params if param.grad is not None]
    if left:
        seen = f"{case} leaves .grad in {len(left)} of {len(params)} parameters"
        smell = "they would be counted again, and they take memory"
        if not any(param.grad.any() for param in left):
            smell = "zeros take as much memory"
        raise Refused(seen, smell, "set param.grad = None")
    _look_at_messages(watch, flat, case)


def _look_at_mean(flat, vectors: Tensor, old: Tensor, place: Place, case: str) -> None:
    grad, n = flat.shard.grad, len(place.ranks)
    mine = slice(place.rank * len(old), (place.rank + 1) * len(old))
    if grad.shape != old.shape:
        seen = f"{case}: shard.grad has shape {tuple(grad.shape)}, not {tuple(old.shape)}"
        raise Refused(seen, "", "reduce_scatter fills a tensor as large as the shard")
    num_all = n * (1 if flat.replicas is None else dist.get_world_size(flat.replicas))
    total = vectors.to(flat.shard.dtype)[place.ranks if num_all == n else slice(None)].sum(0)
    if not _close(grad, old + total[mine] / num_all):
        own = vectors[dist.get_rank()][mine]
        inside = vectors[place.ranks].to(grad.dtype).sum(0)[mine]
        mistakes = list(_wrong_means(old, own, inside, total[mine], n, num_all))
        mistakes += [
            (old + other / num_all, "the part of another rank", "part r belongs to rank r")
            for other in total.view(n, -1)
        ]
        weights = _padded(flat.params, n)[mine]
        mistakes.append((old + weights, "these are the weights", "pack param.grad, not param"))
        if vectors.dtype != grad.dtype:
            smell = f"summed up in {vectors.dtype}, that is rounded: {grad.dtype} is asked for"
            mistakes.append((grad, smell, "pack(...).to(self.shard.dtype) before you reduce"))
        seen = f"{case} gives {_versus(grad, old + total[mine] / num_all)}"
        raise Refused(seen, *_named(grad, mistakes, "", "the mean of all ranks' gradients"))
    if (size := grad.untyped_storage().nbytes()) > grad.nbytes:
        seen = f"{case}: shard.grad has {grad.nbytes} bytes, and keeps {size} alive"
        smell = "it is a part of a larger vector, and the whole of that stays in memory"
        raise Refused(seen, smell, "reduce into a tensor of its own: torch.empty_like(self.shard)")


def _wrong_means(
    old: Tensor, own: Tensor, inside: Tensor, total: Tensor, n: int, num_all: int
) -> Mistakes:
    """What comes out for each mistake; `inside` is the sum over the group, without replicas."""
    divide = f"divide by {num_all}" if num_all == n else f"divide by {n} x {num_all // n}"
    adds = "reduce_scatter adds up all ranks'"
    yield old + total, "that is the sum over the ranks", divide
    yield total / num_all, "what was in shard.grad before is lost", "add to it"
    yield old, "nothing was added to it", "pack the gradients before you drop them; add the mean"
    yield old + total / 4, "divided by all ranks of the job", divide
    yield old + total / num_all**2, "it is divided twice", f"{divide}, once"
    if num_all > n:
        yield old + inside / n, "self.replicas is not looked at", "all-reduce over it as well"
        yield old + inside / num_all, "replicas are divided by, but not added", "all-reduce them"
        yield old + total / n, "the replicas' sum is not divided", divide
    yield old + own, "these are this rank's own gradients", adds
    yield old + own / n, "this rank's own gradients, divided", adds
    yield 2 * old + total / num_all, "the old shard.grad counts twice", "add it once"


def _look_at_messages(watch: Watch, flat, case: str) -> None:
    found, size = calls(watch.entries), flat.shard.nbytes
    sent = ", ".join(f"{entry.op} of {entry.nbytes} bytes" for entry in watch.entries)
    wanted = {"reduce_scatter": 1} | ({} if flat.replicas is None else {"all_reduce": 1})
    too_large = any(e.op == "all_reduce" and e.nbytes > size for e in watch.entries)
    if found == wanted and not too_large:
        return
    seen = f"{case} calls {sent or 'nothing'}"
    if "reduce_scatter" not in found:
        smell = f"the numbers are right, but a rank needs the sum of {size} bytes, not of all"
        raise Refused(seen, smell, "one reduce_scatter, which sends half as much as an all_reduce")
    raise Refused(seen, f"{size} bytes a rank are left after the reduce_scatter", f"only {wanted}")


# ---- 10.2 -----------------------------------------------------------------------------------


class Told(course.Flat):
    """The course's Flat, which writes down what is asked of it."""

    def __init__(self, params: list, number: int, log: list) -> None:
        super().__init__(params)
        self.number, self.log, self.works, self.is_probed = number, log, [], False

    def gather(self) -> dist.Work:
        self.log.append(("gather", self.number))
        self.works.append(super().gather())
        return self.works[-1]

    def reduce(self) -> None:
        missing = sum(param.grad is None for param in self.params)
        self.log.append(("reduce", self.number, missing))
        if not self.is_probed:
            super().reduce()


@part.exercise(
    "10.2",
    "Four things in this order: reduce, step, zero_grad, gather.",
    "A flat is still whole where a parameter of it, any of them, has a .grad. Stage 2 has reduced "
    "its flats by then.",
    "Start all gathers, keep their works in a list, and then wait for each.",
)
def ShardedOptimizer(answer) -> None:
    """Three steps of SGD with momentum on 3 ranks: three flats, one frozen, some reduced before."""
    _run(_look_at_steps, 3, answer, STEP_REASONS)


GATHERED = "gather() fills flat.whole itself; what it returns is the work", "work.wait(), no more"
STEP_REASONS: Reasons = {
    "'NoneType' object has no attribute 'wait'": ("", "flat.gather() returns the work"),
    "'list' object has no attribute": ("self.flats is a list", "for flat in self.flats"),
    "Work' object is not subscriptable": GATHERED,
    "'Told' object has no attribute 'grad'": ("a gradient is in a parameter", "flat.shard.grad"),
}


def _look_at_steps(answer, seed: int) -> bool:
    log, waited = [], waits()
    groups = [_params(seed, [(3, 4), (5,)]), _params(seed + 5, [(2, 2), (3,)], torch.float64)]
    frozen = _params(seed + 8, [(4,)], trains=False)
    flats = [Told(params, index, log) for index, params in enumerate([*groups, frozen])]
    vectors = [nn.Parameter(flat.whole.clone()) for flat in flats[:2]]
    truth = torch.optim.SGD(vectors, lr=0.1, momentum=0.9)

    def make(shards: list) -> torch.optim.Optimizer:
        made = torch.optim.SGD(shards, lr=0.1, momentum=0.9)
        made.register_step_pre_hook(lambda *_: log.append(("step",)))
        return made

    optimizer = answer(flats, make)
    if not hasattr(optimizer, "step"):
        raise Refused(f"it gives {optimizer!r}, which has no step()", "", "leave __init__ as it is")
    last = [torch.zeros_like(vector) for vector in vectors]
    for number in range(4):
        means = [_give_gradients(flat, seed + 100 * number, number) for flat in flats[:2]]
        before = [flat.whole.clone() for flat in flats]
        for vector, mean in zip(vectors, means, strict=True):
            vector.grad = mean
        truth.step()
        log.clear()
        waited.clear()
        time.sleep(0.01 * (dist.get_rank() == 0))  # a late partner
        with Watch(None) as watch:
            optimizer.step()
        watch.together(f"step {number + 1}")
        case = f"rank {dist.get_rank()} of 3, step {number + 1}"
        _look_at_weights(flats, vectors, before, last, log, waited, case, number)
        last = means
    return True


def _give_gradients(flat: Told, seed: int, number: int) -> Tensor:
    """Give the flat this step's gradients; returns their mean. (padded P,)

    Steps 1 and 2: whole gradients, in step 2 none for the first parameter. Step 3: reduced before.
    Step 4: reduced before, and for the second flat whole gradients on top.
    """

    def drawn(rank: int, offset: int) -> list[Tensor]:
        parts = [
            _draw(seed + 7 * rank + i + offset, *p.shape).to(p.dtype)
            for i, p in enumerate(flat.params)
        ]
        return [parts[0] * 0, *parts[1:]] if number == 1 else parts

    mean = torch.zeros_like(flat.whole)
    for offset in (0, 50) if number == 3 and flat.number == 1 else (0,):
        for param, gradient in zip(flat.params, drawn(dist.get_rank(), offset), strict=True):
            param.grad = gradient if gradient.any() else None
        mean += sum(_padded(drawn(rank, offset), 3) for rank in range(3)) / 3
        if number == 2 or (number == 3 and offset == 0):
            flat.reduce()
    return mean


def _look_at_weights(
    flats: list, vectors: list, before: list, last: list, log: list, waited: dict, case: str, number
) -> None:
    num_steps, rank = log.count(("step",)), dist.get_rank()
    if num_steps != 1:
        seen = f"{case}: the optimizer's step ran {num_steps} times"
        raise Refused(seen, "", "self.optimizer.step() once: it has the shards of all flats")
    at = log.index(("step",))
    for index, (flat, vector) in enumerate(zip(flats[:2], vectors, strict=True)):
        mine = slice(rank * len(flat.shard), (rank + 1) * len(flat.shard))
        found, wanted, told_flat = flat.whole, vector.detach(), f"{case}, flat {index}"
        if not _close(found[mine], wanted[mine]):
            seen = f"{told_flat}: its shard holds {_versus(found[mine], wanted[mine])}"
            why = _why_shard(flat, vector, before[index], last[index], mine, log, at)
            raise Refused(seen, *why)
        _look_at_reduces(log, index, int(number < 2 or (number, index) == (3, 1)), told_flat)
        if any(id(work) not in waited for work in flat.works):
            smell = "the next forward may compute with weights that have not come yet"
            seen = f"{told_flat}: step() returns before a gather was waited for"
            raise Refused(seen, smell, "gather() gives a work for each flat: wait for all of them")
        if not _close(found, wanted):
            gathered = [i for i, what in enumerate(log) if what == ("gather", index)]
            seen = f"{told_flat}: its own part is new, those of other ranks are the old ones"
            if gathered and max(gathered) < at:
                raise Refused(seen, "what was gathered is older than the step", "gather after it")
            raise Refused(seen, "this flat is not gathered", "gather every flat after the step")
        if flat.shard.grad is not None:
            smell = "the next step would take the sum of its own gradient and this one"
            if not flat.shard.grad.any():
                smell = "zeros take as much memory as a gradient: .grad is None again afterwards"
            raise Refused(f"{told_flat}: shard.grad is left", smell, "self.optimizer.zero_grad()")
        if any(param.grad is not None for param in flat.params):
            seen = f"{told_flat}: the parameters' gradients are left"
            raise Refused(seen, "they would be reduced again", "flat.reduce() drops them")
        flat.works.clear()


def _look_at_reduces(log: list, index: int, wanted: int, case: str) -> None:
    if (found := sum(what[:2] == ("reduce", index) for what in log)) != wanted:
        smell = "once is enough" if wanted else "stage 2 has reduced it before"
        smell += ": a reduce_scatter of zeros costs as much as any"
        seen = f"{case}: step() has called its reduce() {found} times, not {wanted}"
        raise Refused(seen, smell, "reduce a flat only where a parameter of it has a .grad")


def _why_shard(
    flat, vector: nn.Parameter, before: Tensor, last: Tensor, mine: slice, log: list, at: int
) -> tuple[str, ...]:
    """Of a shard that is not what it should be, by what went on before and in the step."""
    found, mean = flat.whole[mine], vector.grad[mine]
    done = [i for i, what in enumerate(log) if what[:2] == ("reduce", flat.number)]
    moved = not torch.equal(found, before[mine])
    wanted = vector.detach()[mine]
    if done and min(done) > at:
        return "the step is made before the gradients are reduced", "reduce first"
    if not done and any(param.grad is not None for param in flat.params):
        there = sum(param.grad is not None for param in flat.params)
        if there < len(flat.params):
            smell = f"{there} of its {len(flat.params)} parameters have a gradient: that is enough"
            return smell, "reduce where any parameter has a .grad"
        if moved:
            smell = "shard.grad is there from an earlier backward, and whole gradients came on top"
            return smell, "ask the parameters' .grad whether to reduce, not shard.grad"
        return "it has whole gradients, and was not reduced: shard.grad is None", "flat.reduce()"
    if not done and not moved:
        smell = "stage 2 has reduced it before, and that gradient is lost"
        return smell, "zero_grad() comes after the step"
    mistakes = [
        (before[mine], "nothing has moved", "reduce, then self.optimizer.step()"),
        (wanted - 0.1 * last[mine], "the last step's gradient is still in it", "zero_grad()"),
        (wanted - 0.1 * 2 * mean, "the gradient is three times too large", "reduce has divided"),
        (wanted + 0.1 * mean * 2 / 3, "divided by the ranks once more", "reduce has divided"),
        (wanted + 0.1 * mean, "this step's gradient is lost", "zero_grad() comes after the step"),
        (wanted - 0.1 * mean, "the gradient counts twice", "reduce each flat once"),
    ]
    return _named(found, mistakes, "", "reduce, step, zero_grad, gather: in this order")


# ---- 10.3 -----------------------------------------------------------------------------------

FROZEN = "a frozen parameter gets no gradient, and no hook", "look at param.requires_grad first"
HOOK_REASONS: Reasons = {
    "hook on a tensor that doesn't require": FROZEN,
    "can't register a post accumulate": FROZEN,
    "'Parameter' object has no attribute": (
        "a hook is called with the parameter, as its first argument",
        "def hook(param, flat=flat, ...)",
    ),
    "reduce() takes 1 positional argument but 2": (
        "a hook is called with the parameter, and flat.reduce takes none",
        "write a function of `param` that counts, and calls flat.reduce() at the last",
    ),
    "takes 0 positional arguments but 1": (
        "a hook is called with the parameter",
        "def hook(param)",
    ),
    "object is not callable": ("", "hand over the function itself, without brackets"),
}


@part.exercise(
    "10.3",
    "param.register_post_accumulate_grad_hook(hook) calls hook(param) when param.grad is written.",
    "Each flat needs a counter of its own. At len(flat.params): set it back, and flat.reduce().",
    "A Flat may be frozen: param.requires_grad is False, and there is no hook to register. "
    "A function that is defined in a loop sees the loop's variables as they are when it is called. "
    "A default argument, flat=flat, keeps the one of this turn.",
)
def reduce_during_backward(answer) -> None:
    """Flats that come one after the other, flats whose gradients mix, a frozen one; twice."""
    _run(_look_at_hooks, 2, answer, HOOK_REASONS)


def _look_at_hooks(answer, seed: int) -> bool:
    early, hooked = [], {}
    _note(nn.Parameter, "register_hook", lambda param, _: early.append(param))
    _note(nn.Parameter, "register_post_accumulate_grad_hook", hooked.__setitem__)
    # Layer 1 is frozen. In the first case, flat 2 is ready before flat 0 has begun.
    for mixed, layout in enumerate(([[0], [1], [2, 3]], [[3, 0], [1], [2]])):
        log: list[tuple] = []
        torch.manual_seed(seed)
        layers = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
        layers[1].requires_grad_(False)
        flats = [
            Told([p for i in own for p in layers[i].parameters()], index, log)
            for index, own in enumerate(layout)
        ]
        for flat in (flats[0], flats[2]):
            for param in flat.params:
                param.register_post_accumulate_grad_hook(
                    lambda _, index=flat.number, log=log: log.append(("gradient", index))
                )
        hooked.clear()
        answer(iter(flats))
        if log:
            smell = "flat.reduce() with brackets calls it at once"
            raise Refused("reduce() ran before any backward", smell, "a hook calls it later")
        for turn in (1, 2):
            loss = layers(_draw(seed + 10 * turn + dist.get_rank(), 5, 3)).square().sum()
            case = f"backward {turn}" + ", flats whose gradients come mixed" * mixed
            with Watch(None) as watch:
                loss.backward()
            watch.together(case)
            _look_at_log(log, flats, case, early, hooked)
            log.clear()
    return True


def _note(kind: type, name: str, note: Callable) -> None:
    """Tell `note` the object and argument of every call of this method from now on."""
    original = getattr(kind, name)
    setattr(kind, name, lambda self, hook: note(self, hook) or original(self, hook))


def _probe(flat: Told, flats: list, hooked: dict) -> list[set[int]]:
    """Which flats the hook of each of this flat's parameters reduces, if it is called often."""
    found = []
    for param in flat.params:
        flat.log.clear()
        for one in flats:
            one.is_probed = True
        with suppress(Exception):  # this is no backward: a hook may well fail in it
            for _ in range(10):
                hooked[param](param)
        found.append({what[1] for what in flat.log if what[0] == "reduce"})
    return found


def _why_hooks(flats: list, early: list, hooked: dict, case: str) -> tuple[str, str] | None:
    """Why a flat is reduced too early, or not once; None where the hooks do not tell."""
    if early:
        smell = "a hook of register_hook runs before the gradient is written into param.grad"
        return smell, "register_post_accumulate_grad_hook"
    for flat in (flats[0], flats[2]):
        num_hooks, size = sum(p in hooked for p in flat.params), len(flat.params)
        if num_hooks < size:
            smell = f"{num_hooks} of its {size} parameters have a hook; gradients come in any order"
            return smell, "register a hook for each, and count up to len(flat.params)"
    first, last = [_probe(flat, flats, hooked) for flat in (flats[0], flats[2])]
    if set().union(*first) == {2}:
        smell = "a function made in a loop sees the loop's variables as they are when it runs: all "
        hint = "def hook(param, flat=flat, ...), or make the hook in a function of its own"
        return smell + "hooks reduce the last flat", hint
    if case == "backward 1" and not any([*first, *last]):
        smell = "no hook ever reduces, even if called ten times more: its count does not last; an "
        hint = "keep the count in what the hook changes in place: a list, a dict, a Counter"
        return smell + "int that is a default argument starts anew in every call", hint
    if any(0 < sum(map(bool, own)) < len(own) for own in (first, last)):
        smell = "it is reduced at one chosen parameter, whatever has come; the order is not known"
        return smell, "every hook counts, and the one that comes last reduces"
    if "backward 2" in case:
        return "the counter goes on where the last backward left it", "set it back at the last one"
    return ("one counter counts for several flats", "each has its own") if "mixed" in case else None


def _look_at_log(log: list, flats: list, case: str, early: list, hooked: dict) -> None:
    reduced = [what for what in log if what[0] == "reduce"]
    times = [sum(what[1] == index for what in reduced) for index in range(3)]
    seen, why = "", ("the others are still to come", "count, and reduce at the last")
    if missed := next((what for what in reduced if what[2]), None):
        size = len(flats[missed[1]].params)
        seen = f"{case}: flat {missed[1]} is reduced with {size - missed[2]} of {size} gradients"
        if missed[2] == size:
            why = "it is reduced once more, or by the hooks of another flat", "once for each flat"
    elif times != [1, 0, 1]:
        seen = f"{case} reduces its flats {times} times, not [1, 0, 1] (flat 1 is frozen)"
        late = "the hooks reduce, but not at the last gradient: the count misses its end"
        why = late, "count this gradient, then compare with == len(flat.params)"
    if seen:
        raise Refused(seen, *(_why_hooks(flats, early, hooked, case) or why))
    if "mixed" not in case and log.index(("reduce", 2, 0)) > log.index(("gradient", 0)):
        seen = f"{case}: flat 2 is reduced after flat 0's first gradient is there"
        smell = "all gradients are whole at the same time, as in stage 1"
        raise Refused(seen, smell, "reduce in the hook of a flat's own last gradient")


# ---- 10.4 -----------------------------------------------------------------------------------

COMING_REASONS: Reasons = {
    "SIGSEGV": ("memory was used that is not there: the whole had 0 bytes", NO_MEMORY[1]),
    "'NoneType' object has no attribute 'wait'": (
        "self.coming is None where nothing is on its way",
        "self.start() first; then look whether self.coming is None",
    ),
}


@part.exercise(
    "10.4",
    "free: the storage of `whole` gets 0 bytes, and the tensor stays, as do the views of it: "
    "self.whole.untyped_storage().resize_(0).",
    "start: only where self.is_whole is False. First resize_ the storage to self.whole.nbytes, "
    "then keep the work of self.gather() in self.coming.",
    "wait: self.start() first. Then, if self.coming is not None, wait for it and set it to None.",
)
def ShardedFlat(answer) -> None:
    """Three rounds of start, wait and free on 4 ranks, and in pairs in bfloat16; and a backward."""
    _run(_look_at_sharded, 4, answer, COMING_REASONS)


def _look_at_sharded(answer, seed: int) -> bool:
    four, two, _ = _places()
    waited = waits()
    for place, dtype in ((four, None), (two, torch.bfloat16)):
        params = _params(seed, [(4, 3), (5,)])
        wanted = _padded(params, len(place.ranks))
        flat = answer(iter(params), dtype=dtype, group=place.group)
        case = f"{place.told}: after "
        _look_free(flat, params, wanted, [], f"{case}__init__, which calls free(),")
        for turn, steps in enumerate((("start", "start", "wait", "wait", "start"), ("wait",))):
            with torch.no_grad():  # as an optimizer does
                flat.shard += turn
            wanted += turn
            _come(flat, params, wanted, steps, place, waited)
            views = [flat.whole, *(param.detach() for param in params)]  # as autograd keeps them
            flat.free()
            _look_free(flat, params, wanted, views, f"{case}free()")
        with Watch(place.group) as watch:
            flat.free()
        for entry in watch.entries:
            seen = f"{place.told}: free() of what is free calls {entry.op} of {entry.nbytes} bytes"
            smell = "wait() starts a gather where nothing is there, only to free it again"
            raise Refused(seen, smell, "wait only where self.coming is not None; then set it None")
        _look_at_early_free(flat, place, waited)
        _look_backward(flat, params, wanted, place, waited)
    return True


def _look_at_early_free(flat, place: Place, waited: dict) -> None:
    """A unit that was prefetched and not used is freed while its gather may be on its way."""
    flat.start()
    dist.barrier(place.group)
    time.sleep(0.02)  # what is not waited for has come all the same, and writes nowhere else
    waited.clear()
    flat.free()
    if not waited:
        seen = f"{place.told}: after start(), free() waited for nothing"
        smell = "a gather that is on its way would write into memory that is given back"
        raise Refused(seen, smell, "in free, wait first where self.coming is not None")


def _look_free(flat, params: list, wanted: Tensor, views: list, case: str) -> None:
    """No memory but that of the shard; everything else is as it was."""
    if not all(hasattr(flat, name) for name in ("whole", "shard", "is_whole")):
        smell = "the rest of the class is given, and needs its attributes"
        raise Refused(f"{case} a {type(flat).__name__} has no `whole` or `shard`", smell, "keep it")
    if flat.shard is None or flat.shard.untyped_storage().nbytes() < flat.shard.nbytes:
        smell = "the shard is all that this rank keeps of the weights"
        raise Refused(f"{case} the shard is gone", smell, "free the memory of `whole` only")
    if any(param.shape != shape for param, shape in zip(params, [(4, 3), (5,)], strict=True)):
        shapes = [tuple(param.shape) for param in params]
        smell = "the parameters were given other data: they no longer look into `whole`"
        raise Refused(f"{case} the parameters have shapes {shapes}", smell, "resize the storage")
    tensors = [one for one in (*views, *params, flat.whole) if isinstance(one, Tensor)]
    stores = {store._cdata: store.nbytes() for store in (one.untyped_storage() for one in tensors)}
    held = sum(stores.values())  # several tensors may look into one memory
    if not isinstance(flat.whole, Tensor) or flat.whole.shape != wanted.shape:
        shape = tuple(flat.whole.shape) if isinstance(flat.whole, Tensor) else flat.whole
        seen = f"{case} `whole` is {shape}, and {held} bytes are still held"
        smell = (
            "another tensor frees nothing: the parameters and autograd still hold the old memory"
        )
        raise Refused(seen, smell, "keep the tensor, and resize its storage to 0 bytes")
    if held:
        smell = "the memory goes back only when its storage has 0 bytes; a flag, `del` or a new "
        seen = f"{case} {held} bytes of the whole are still held"
        raise Refused(seen, smell + "tensor does not do that", "untyped_storage().resize_(0)")


def _come(flat, params: list, wanted: Tensor, steps: tuple, place: Place, waited: dict) -> None:
    waited.clear()
    done, whole = [], flat.whole
    with Watch(place.group) as watch:
        for step in steps:
            time.sleep(0.01 * (place.rank == 0))  # a late partner
            getattr(flat, step)()
            done.append(f"{step}()")
            watch.together(f"after {', '.join(done)}")
            case = f"{place.told}: after {', '.join(done)}"
            _look_come(flat, whole, calls(watch.entries)["all_gather"], done, waited, case)
    address, start = flat.whole.data_ptr(), 0
    for param in params:
        if not _is_view(param, flat.whole, start):
            smell = "they still look into the old memory"
            seen = f"{case} the parameters do not look into `whole` at {address:#x}"
            raise Refused(seen, smell, "resize the storage that is there; make no new tensor")
        start += param.numel()
    wanted = wanted.to(flat.whole.dtype)
    if not _close(flat.whole, wanted):
        seen = f"{case} `whole` holds {_versus(flat.whole, wanted)}"
        raise Refused(seen, "these are no weights, or old ones", "gather after taking the memory")


def _look_come(flat, whole: Tensor, num_gathers: int, done: list, waited: dict, case: str) -> None:
    if flat.whole is not whole:
        smell = "the parameters, and what autograd saved of them, look into the old one"
        hint = "resize the storage of the one that is there, to self.whole.nbytes"
        raise Refused(f"{case} `whole` is a new tensor", smell, hint)
    if (size := whole.untyped_storage().nbytes()) != whole.nbytes:
        seen = f"{case} `whole` has {size} bytes, not {whole.nbytes}"
        raise Refused(seen, *_why_size(flat, size, num_gathers, done))
    if num_gathers != 1:
        seen = f"{case} there were {num_gathers} all-gathers, not 1"
        smell = "" if num_gathers == 0 else "what is there, or coming, is gathered once more"
        raise Refused(seen, smell, "gather only where self.is_whole is False")
    if "wait()" in done and not waited:
        smell = "forward would compute with what has not come yet"
        if flat.coming is None:
            smell = "self.coming is None: the work was not kept, or is dropped"
        hint = "self.coming = self.gather() in start; self.coming.wait() in wait"
        raise Refused(f"{case} nothing was waited for", smell, hint)
    if "wait()" not in done and waited:
        smell = "nothing can be computed while the weights are on their way"
        raise Refused(f"{case} the gather was waited for", smell, "start only starts; wait waits")


def _why_size(flat, size: int, num_gathers: int, done: list) -> tuple[str, str]:
    if size:
        kinds = f"{flat.shard.dtype} in the shard, {flat.whole.dtype} in the whole"
        return f"numbers may be of two types: {kinds}", "resize_(self.whole.nbytes)"
    if num_gathers:
        return "memory was taken, and given back again", "only free() frees"
    if done == ["wait()"]:
        smell = "wait() has to start where nobody has"
        return smell, "self.start() in it does nothing where the whole is there"
    smell = "start() has done nothing, though is_whole was False: is the condition the other way?"
    return smell, "start works where is_whole is False, on every rank"


def _look_backward(flat, params: list, wanted: Tensor, place: Place, waited: dict) -> None:
    """What autograd saved in a forward is used after the memory went and came again."""
    weight = wanted[:12].view(4, 3).to(flat.whole.dtype)
    x = _draw(3, 2, 3).to(weight.dtype).requires_grad_()
    _come(flat, params, wanted, ("start", "wait"), place, waited)
    y = x @ params[0].T
    flat.free()
    _come(flat, params, wanted, ("wait",), place, waited)
    y.backward(torch.ones_like(y))
    if not _close(x.grad, torch.ones_like(y) @ weight):
        seen = f"{place.told}: backward after free() and wait() gives {_row(x.grad)}"
        raise Refused(seen, "autograd saved views of the old memory", "resize that storage")
