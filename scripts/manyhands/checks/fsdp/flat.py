"""10.1 and 10.4: parameters as one vector, in shards, that comes and goes."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.checks.engine import cases
from manyhands.checks.engine.card import Wrong
from manyhands.checks.engine.spec import Place, Spec
from manyhands.checks.engine.values import kind
from manyhands.fsdp import flat as course
from manyhands.instruments.ledger import NAMES, Ledger

# 0 3 and 1 2: neither the rank in the job nor its remainder is the rank in the group.
FOUR = (((0, 1, 2, 3),), ((0, 3), (1, 2)))
SWAPPED = "What is filled comes first: all_gather(whole, shard), reduce_scatter(shard, whole)."


class Fits(Ledger):
    """A ledger that refuses sizes that do not fit: gloo would end the process."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # torch's own signature
        op = NAMES.get(func.name().split("::")[1].split(".")[0].rstrip("_"))
        sides = [side for side in args[:2] if isinstance(side, Tensor)]
        if op in ("all_gather", "reduce_scatter") and len(sides) == 2:
            entry = self._entry(op, args, None)
            whole, shard = sides if op == "all_gather" else sides[::-1]
            if whole.numel() != len(entry.ranks) * shard.numel():
                raise Wrong(
                    f"{op} on {len(entry.ranks)} ranks gets {whole.numel()} numbers for the whole "
                    f"and {shard.numel()} for a shard",
                    "The whole has N times as many numbers as a shard.",
                    SWAPPED,
                )
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextlib.contextmanager
def messages() -> Iterator[Counter]:
    """Count what is sent: operation, bytes, and the ranks that take part."""
    found: Counter = Counter()
    with Fits() as ledger:
        yield found
    found.update(f"{e.op} of {e.nbytes} bytes by ranks {list(e.ranks)}" for e in ledger.entries)


@contextlib.contextmanager
def waiting() -> Iterator[list]:
    """The works that are waited for."""
    seen: list = []
    real = dist.Work.wait
    dist.Work.wait = lambda work, *args: seen.append(work) or real(work, *args)
    try:
        yield seen
    finally:
        dist.Work.wait = real


@contextlib.contextmanager
def nan_in_empty() -> Iterator[None]:
    """torch.empty() holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def draw_params(
    seed: int, shapes: list[tuple], dtype: torch.dtype = torch.float32, trains: bool = True
) -> list[nn.Parameter]:
    """Parameters of these shapes, the same on all ranks."""
    draw = cases.generator(seed)
    drawn = [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]
    return [nn.Parameter(one, requires_grad=trains) for one in drawn]


@functools.cache
def rows() -> list[dist.ProcessGroup]:
    """Groups of the ranks that have the same number in the pairs 0 3 and 1 2."""
    return [dist.new_group([0, 1]), dist.new_group([2, 3])]


# ---- 10.1 -----------------------------------------------------------------------------------


class Vector(NamedTuple):
    """One Flat, and what is done with it."""

    seed: int
    shapes: list[tuple]
    dtype: torch.dtype = torch.float32
    trains: bool = True
    short: bool = False  # is the whole in bfloat16, as layers compute with it?
    replicas: bool = False  # where the group is a pair


def vectors(n: int) -> list[Vector]:
    """Fewer numbers than ranks, none that is missing, uneven parts, frozen, replicas, types."""
    odd = [(5, 4), (3,), (2, 1)]
    seed = cases.draw_seed()
    return [
        Vector(seed, [(1,)]),
        Vector(seed, [(3, 12), (12,)], torch.bfloat16, trains=False),
        Vector(seed, odd, replicas=True),
        Vector(seed, odd, short=True),
    ]


def starts_at(tensor: Tensor, whole: Tensor, start: int) -> bool:
    """Does the tensor begin at this number of the memory of `whole`?"""
    return tensor.data_ptr() == whole.data_ptr() + start * whole.element_size()


def flat_seen(answer: Callable, case: Vector, place: Place) -> dict:
    """What is made, and what gather() and reduce() make of it."""
    params = draw_params(case.seed, case.shapes, case.dtype, case.trains)
    with nan_in_empty():
        flat = answer(cases.read_once(params), group=place.group)
        seen = made_seen(flat, params, case, place)
        if case.short:
            flat.shard.data = flat.shard.data.clone()
            flat.show(flat.whole.bfloat16())
        seen |= gather_seen(flat, case, place)
        if case.replicas and place.members in FOUR[1]:
            flat.replicas = rows()[dist.get_rank() // 2]
        for turn in (1, 2) if case.trains else ():
            seen |= reduce_seen(flat, params, case, place, turn)
    return seen


def made_seen(flat: object, params: list, case: Vector, place: Place) -> dict:
    """What __init__ sets."""
    for name in ("whole", "shard", "params", "padding", "replicas"):
        if not hasattr(flat, name):
            raise Wrong(f"the {type(flat).__name__} has no `{name}`", "", f"Set self.{name}.")
    starts = [sum(p.numel() for p in params[:i]) for i in range(len(params))]
    pairs = list(zip(params, starts, case.shapes, strict=True))
    return {
        "whole": flat.whole.detach().clone(),
        "padding": flat.padding.detach().clone(),
        "whole wants no gradient": not flat.whole.requires_grad,
        "each parameter is a view of whole": all(
            starts_at(param, flat.whole, start) and tuple(param.shape) == shape
            for param, start, shape in pairs
        ),
        "shard": flat.shard.detach().clone(),
        "shard is an nn.Parameter": isinstance(flat.shard, nn.Parameter),
        "shard is this rank's part of the memory of whole": starts_at(
            flat.shard, flat.whole, place.rank * flat.shard.numel()
        ),
        "shard requires a gradient only if the parameters do": flat.shard.requires_grad
        == case.trains,
        "replicas is None": flat.replicas is None,
    }


def gather_seen(flat: object, case: Vector, place: Place) -> dict:
    """Other shards, as optimizers have written them, come from all ranks."""
    whole = flat.whole
    new = torch.randn(flat.shard.shape, generator=cases.generator(case.seed, place.job_rank))
    with torch.no_grad():
        whole.fill_(-99)
        flat.shard.copy_(new)
    with messages() as sent, waiting() as waited:
        work = flat.gather()
        num_waits = len(waited)
    if not hasattr(work, "wait"):
        raise Wrong(
            f"gather() returns {kind(work)}",
            "The caller has to wait for what is on its way.",
            "Return the work that all_gather returns.",
        )
    work.wait()
    return {
        "gather() leaves the waiting to the caller": num_waits == 0,
        "gather() fills the whole that is there": starts_at(flat.whole, whole, 0),
        "whole after gather()": flat.whole.detach().clone(),
        "messages of gather()": dict(sent),
    }


def reduce_seen(flat: object, params: list, case: Vector, place: Place, turn: int) -> dict:
    """In turn 1 the first parameter has no gradient; in turn 2 none has on the group's rank 1."""
    draw = cases.generator(case.seed, place.job_rank, turn)
    whole = flat.whole
    before = whole.clone()
    for index, param in enumerate(params):
        grad = torch.randn(param.shape[::-1], generator=draw).permute(*range(param.ndim)[::-1])
        is_missing = index == 0 if turn == 1 else place.rank == 1
        param.grad = None if is_missing else grad.to(param.dtype)
    with messages() as sent:
        flat.reduce()
    grad = flat.shard.grad
    at = "" if turn == 1 else ", called again,"
    return {
        f"messages of reduce(){at}": dict(sent),
        f"shard.grad after reduce(){at}": None if grad is None else grad.clone(),
        f"reduce(){at} leaves no .grad in parameters": all(p.grad is None for p in params),
        f"reduce(){at} leaves whole as it was": flat.whole is whole and torch.equal(whole, before),
        f"shard.grad after reduce(){at} keeps no memory but its own": grad is None
        or grad.untyped_storage().nbytes() <= grad.nbytes,
    }


def tell_vector(case: Vector) -> str:
    """The numbers and types."""
    total = sum(torch.Size(shape).numel() for shape in case.shapes)
    more = "" if case.trains else ", frozen, in bfloat16"
    more += ", whole in bfloat16" if case.short else ""
    return f"a Flat of {total} numbers{more}"


PAD = "There are -P % N zeros of padding: self.params[0].detach().new_zeros(number)."
CHUNK = "self.whole.chunk(self.num_ranks)[rank]"
GROUPS = "num_ranks *= dist.get_world_size(self.replicas)"
flat = Spec(
    todo="10.1",
    truth=course.Flat,
    layouts=FOUR,
    cases=vectors,
    observe=flat_seen,
    tell=tell_vector,
    guards_group=False,
    advice={"": "Write down for two ranks which numbers each of them holds before and after."},
    reasons="""
        iterator' object :: `params` may be an iterator. | self.params = list(params)
        has no len() :: A tensor or a list is asked for here. | {PAD}
        must have the same type :: Both sides of a message have one type. | Use .to(dtype).
        invalid tensor type :: Both sides of a message have one type.
        of a different type :: .grad has the type of its tensor. | pack(...).to(shard.dtype)
        'NoneType' object has no attribute :: A parameter that took no part in the loss has .grad
            None. | torch.zeros_like(param) counts for it.
        a leaf Variable that requires grad :: The shard holds the weights, and autograd watches it.
            | Reduce into torch.empty_like(self.shard).
    """,
    hints=(
        "__init__: padding is -P % N zeros, in the type of the parameters. Pack all parameters, "
        "and the padding last; call show(whole); the shard is one of N equal chunks of the whole, "
        "without a copy.",
        "reduce: pack the gradients and the padding, set each .grad to None, reduce_scatter into "
        "an empty tensor as large as the shard, divide, and add it to shard.grad. Where "
        "self.replicas is a group, all-reduce over it as well, and divide by its size, too.",
    ),
    mistakes="""
        {CHUNK} => {CHUNK}.clone() :: The shard is a copy, so what the optimizer writes into it is
            not seen in `whole`. | A chunk is a view: leave out clone() and the like.
        padding = -sum => padding = self.num_ranks - sum ::
            Where nothing is missing, a full N zeros are added. | {PAD}
        self.show(self.whole) => pass ::
            The parameters keep memory of their own, so what is gathered does not reach the model. |
            self.show(self.whole) makes views of the same parameters.
        , requires_grad=self.params[0].requires_grad => , requires_grad=True ::
            The shard of frozen parameters requires a gradient. | Ask self.params[0].requires_grad.
        mine /= num_ranks => pass :: This is the sum over the ranks, not the mean. | shard.grad
            becomes the mean over the ranks, added to what was in it.
        mine /= num_ranks => mine /= num_ranks**2 :: The sum is divided twice.
        mine /= num_ranks => mine /= dist.get_world_size() ::
            The sum is divided by all ranks of the job.
        mine if self.shard.grad is None else self.shard.grad + mine => mine ::
            What was in shard.grad before is lost. | Add to it.
        if self.replicas is not None => if False ::
            The other replicas are left out. | All-reduce over self.replicas, and divide.
        {GROUPS} => pass :: The sum over the replicas is not divided by their number.
        {GROUPS} => {GROUPS}; self.shard.grad = None ::
            With replicas what was in shard.grad before is lost. | Add to it.
        param.grad = None => pass ::
            The parameters keep their gradients, so they count again. | param.grad = None
        reduce_scatter(mine, whole, self.group) => dist.all_reduce(whole, group=self.group);
            mine.copy_(whole.chunk(self.num_ranks)[dist.get_rank(self.group)]) ::
            An all_reduce sends the whole sum, and a rank needs a part. | Use reduce_scatter.
        del grads => if self.params[0].grad is None: return ::
            ! reduce() does nothing where the first parameter has no gradient. | Others may.
    """,
    module=globals(),
)

# ---- 10.4 -----------------------------------------------------------------------------------


class Comes(NamedTuple):
    """One ShardedFlat."""

    seed: int
    shapes: list[tuple]
    dtype: torch.dtype | None = None


def comes(n: int) -> list[Comes]:
    """A few numbers; more; two types."""
    shapes = [(2, 3), (5,)]
    seed = cases.draw_seed()
    return [Comes(seed, [(3,)]), Comes(seed, shapes), Comes(seed, shapes, torch.bfloat16)]


def sharded_seen(answer: Callable, case: Comes, place: Place) -> dict:
    """Memory, messages and numbers after each call of start, wait and free."""
    params = draw_params(case.seed, case.shapes)
    flat = answer(params, case.dtype, **place.options)
    whole = flat.whole
    size = whole.numel() * whole.element_size()
    new = torch.randn(flat.shard.shape, generator=cases.generator(case.seed, place.job_rank))
    with torch.no_grad():
        flat.shard.copy_(new)
    seen: dict = {}

    def bytes_held() -> int:
        return whole.untyped_storage().nbytes()

    def call(name: str, at: str) -> None:
        with messages() as sent, waiting() as waited:
            getattr(flat, name)()
            num_waits = len(waited)
        seen[f"messages of {at}"] = dict(sent)
        seen[f"bytes of the whole after {at}"] = bytes_held()
        if name == "start":
            seen[f"{at} does not wait"] = num_waits == 0
        if flat.whole is not whole and not starts_at(flat.whole, whole, 0):
            raise Wrong(
                f"{at} makes a new tensor of `whole`",
                "The parameters, and autograd, still use the old one.",
                "Resize the storage of the tensor that is there.",
            )
        if name == "wait" and bytes_held() >= size:
            seen[f"whole after {at}"] = whole.detach().clone()
            seen[f"each parameter is a view of whole after {at}"] = all(
                param.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
                for param in params
            )
        if name == "wait" and bytes_held() < size:
            raise Wrong(
                f"after {at} the whole has {bytes_held()} bytes, and its numbers take {size}",
                "A layer would compute with memory that is not there.",
                "wait() returns when all of the whole is there.",
            )

    call("start", "start()")
    call("start", "a second start()")
    call("wait", "wait()")
    call("wait", "a second wait()")
    x = torch.ones((), requires_grad=True)
    y = sum((x * param).sum() for param in params)
    for param in params:
        param.grad = torch.ones_like(param)
    flat.shard.grad = torch.ones_like(flat.shard)
    call("free", "free()")
    call("free", "a second free()")
    seen["the shard after free()"] = flat.shard.detach().clone()
    seen["shard.grad after free()"] = flat.shard.grad
    seen["free() leaves the .grad of the parameters"] = all(p.grad is not None for p in params)
    seen["the parameters keep their shapes after free()"] = [list(p.shape) for p in params] == [
        list(shape) for shape in case.shapes
    ]
    call("wait", "wait() without a start")
    y.backward()
    seen["a gradient that needs the weights"] = x.grad
    call("free", "free() after backward")
    call("start", "start() after backward")
    call("free", "free() while a gather is on its way")
    call("wait", "wait() after that")
    return seen


RESIZE = "self.whole.untyped_storage().resize_(self.whole.nbytes)"
FREE = "self.whole.untyped_storage().resize_(0)"
RESIZE_MORE = RESIZE.replace("self.whole.nbytes", "self.whole.nbytes + 64")
BOTH = "start() takes memory and starts to gather, only if the whole is not there."
sharded_flat = Spec(
    todo="10.4",
    truth=course.ShardedFlat,
    layouts=cases.THREE,
    cases=comes,
    observe=sharded_seen,
    tell=lambda case: f"a ShardedFlat of {len(case.shapes)} parameters, dtype={case.dtype}",
    advice={"": BOTH, "a gradient that needs the weights": "Keep the storage, with 0 bytes."},
    reasons="""
        out of bounds for storage of size :: The storage has too few bytes for what is written into
            it. | self.whole.untyped_storage().resize_(self.whole.nbytes) comes first.
        'NoneType' object has no attribute 'wait' :: Here nothing is on its way. | wait() starts
            what nobody has started, and waits for what is on its way.
        has no attribute 'whole' :: The tensor itself has to stay. | {FREE}
    """,
    hints=(
        "The storage of the whole is resized: resize_(self.whole.nbytes) takes memory, resize_(0) "
        "gives it back. The tensors on it stay what they are.",
        "start: nothing where the memory is there. Else take it, call self.gather(), and keep the "
        "work in self.coming.",
        "wait: start, then wait for self.coming if there is one, and set it to None. free: wait "
        "for what is on its way, because it is written into the memory; then resize_(0).",
    ),
    mistakes=r"""
        if not self.is_whole: => if True: ::
            The whole is gathered once more, although it is there or on its way. | {BOTH}
        if not self.is_whole: => if self.coming is None: ::
            The whole is gathered once more when it is there already.
        self.coming = self.gather() => self.gather().wait() ::
            start() waits, so nothing can be computed meanwhile. | Keep the work in self.coming.
        self.start() => pass ::
            wait() brings nothing where nobody has called start(). | wait() calls start() first.
        {FREE} => pass :: free() does not give the memory back. | {FREE}
        {RESIZE} => {RESIZE_MORE} :: start() takes more memory than the whole needs. | {RESIZE}
        {RESIZE} => self.whole.untyped_storage().resize_(self.whole.numel()) ::
            start() takes a byte for each number, and numbers take more.
        {RESIZE} => pass :: start() takes no memory, so there is nothing to write into.
        if self.coming is not None:\n            self.wait() => self.wait() ::
            free() gathers what is not there. | Wait only for what is on its way.
        {FREE} => {FREE}; self.shard.grad = None :: free() drops shard.grad. | Only the whole goes.
        {FREE} => {FREE}; [setattr(param, "grad", None) for param in self.params] ::
            free() drops the gradients of the parameters.
        {FREE} => self.show(torch.empty_like(self.whole)); {FREE} ::
            free() makes a new tensor of the whole. | Resize the storage that is there.
        self.coming.wait() => self.coming.wait(); dist.barrier(self.group) ::
            wait() has a barrier, which is a message more. | The work's wait() is enough.
        self.coming.wait() => self.coming.wait(); self.coming = None; self.free() ::
            wait() gives the memory back again. | free() does that.
    """,
    module=globals(),
)
