"""Exercises 5.8 and 5.9: which parameters share a bucket, and when their gradients arrive."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyhands.checks.engine import cases
from manyhands.checks.engine.spec import Call, Spec
from manyhands.checks.engine.values import malformed
from manyhands.data_parallel import replicas

# ---- 5.8 ------------------------------------------------------------------------------------

TYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
BUCKETS = "[[...], ...], lists of the parameters that were given"


def plain(*sizes: int) -> tuple:
    """Trainable parameters in fp32, of 4 bytes per number."""
    return tuple((size, "fp32", False) for size in sizes)


def packings(n: int = 1) -> list[Call]:
    """Full to the last byte, one too large, several types, frozen ones, none, and drawn ones."""
    draw = cases.generator(cases.draw_seed())
    drawn = torch.randint(1, 12, (9,), generator=draw).tolist()
    return [
        (plain(4, 4, 4), 32),
        (plain(2, 3, 7, 9), 48),  # the 2 and 3 would fit behind the 9, and open a new one
        (plain(2, 30, 3, 1), 40),
        (((3, "fp32", False), (2, "fp32", True), (4, "fp32", False)), 36),
        (((2, "fp32", False), (2, "bf16", False), (3, "fp32", False)), 100),
        (((6, "bf16", False), (6, "bf16", False), (3, "fp64", False)), 24),
        (plain(*drawn), 64),
        ((), 100),
        (((3, "fp32", True),), 100),
    ]


def packed(answer, case: Call) -> list[list[int]]:
    """The buckets, each parameter by its place in the model."""
    params = [
        nn.Parameter(torch.zeros(size, dtype=TYPES[kind]), not frozen)
        for size, kind, frozen in case.params
    ]
    buckets = answer(cases.read_once(params), case.bucket_bytes)
    places = {id(param): place for place, param in enumerate(params)}
    if not isinstance(buckets, list | tuple):
        raise malformed(buckets, BUCKETS, "Start with buckets = [], and return it at the end.")
    found = []
    for bucket in buckets:
        if not isinstance(bucket, list | tuple) or not all(id(p) in places for p in bucket):
            raise malformed(buckets, BUCKETS, "A bucket is a list of parameters.")
        found.append([places[id(param)] for param in bucket])
    return found


def say_packing(case: Call) -> str:
    """The parameters in words."""
    words = []
    for number, (size, kind, frozen) in enumerate(case.params):
        told = f"{number}: {size * TYPES[kind].itemsize} bytes"
        told += f" of {kind}" if any(other != kind for _, other, _ in case.params) else ""
        words.append(told + " frozen" * frozen)
    return f"make_buckets of parameters {{{', '.join(words)}}} in {case.bucket_bytes} bytes"


TRAINED = "[param for param in params if param.requires_grad]"
FITS = "fits = buckets and sum(p.nbytes for p in buckets[-1]) + param.nbytes <= bucket_bytes"
OPENS = "if not fits or buckets[-1][0].dtype != param.dtype:"
PUTS = "buckets[-1].append(param)"
LAST = "Go through the list of trainable parameters in reverse, and only look at the last bucket."

make_buckets = Spec(
    todo="5.8",
    truth=replicas.make_buckets,
    cases=packings,
    observe=packed,
    tell=say_packing,
    advice={"": LAST},
    hints=(
        "Go through the trainable parameters from the last to the first. A generator has no end to "
        "start from, so make a list of it.",
        "Look only at the last bucket: does this parameter fit in as well, and is it of its type?",
        "If it does not, append a new bucket, []. In either case put the parameter into the last "
        "bucket.",
    ),
    mistakes="""
        reversed({TRAINED}) => {TRAINED} :: The buckets are filled from the first layer on, and
            backward reaches the last one first. | {LAST}
        {TRAINED} => [*params] :: Frozen parameters are packed as well, and no gradient ever comes
            for them. | Keep only those with requires_grad.
        <= bucket_bytes => < bucket_bytes ::
            A bucket that would be full to the last byte is refused. | "At most" is <=.
        + param.nbytes <= bucket_bytes => <= bucket_bytes ::
            A bucket takes parameters until it is too large: the new one's own bytes are not
            counted. | Add param.nbytes before you compare.
        {FITS} => fits = buckets and sum(p.numel() for p in [*buckets[-1], param]) <= bucket_bytes
            :: Numbers are counted, not bytes. | param.nbytes
        {FITS} => fits = buckets and 4 * sum(p.numel() for p in [*buckets[-1], param]) <=
            bucket_bytes :: Every number is taken to have 4 bytes, and not every type has.
        {OPENS} => if not fits: :: Parameters of different types share a bucket, and one vector has
            one type. | Compare param.dtype with that of the bucket.
        {FITS} => room = [b for b in buckets if b[0].dtype == param.dtype and sum(p.nbytes for p in
            b) + param.nbytes <= bucket_bytes]
        {OPENS} => if not room:
        {PUTS} => (room[0] if room else buckets[-1]).append(param) ::
            A parameter goes into an earlier bucket that still has room, so that bucket has to wait
            for a gradient that comes later. | {LAST}
        return buckets => return buckets[::-1] :: The buckets are returned in reverse, the one with
            the first layer at the front. | Bucket 0 holds the last layer: it is ready first.
        return buckets => return [bucket[::-1] for bucket in buckets] ::
            Inside a bucket the parameters stand in the model's order. | Append each at the end.
        {OPENS} => if True: :: Every parameter has a bucket of its own. | {LAST}
        {PUTS} => {PUTS} if param.nbytes <= bucket_bytes else buckets.pop() ::
            A parameter that is larger than a bucket is left out, so it would never be averaged. |
            It gets a bucket of its own.
    """,
    reasons="""
        argument to reversed() must be a sequence :: The parameters may come from a generator, and
            that has no end to start from. | Make a list first: reversed([...]).
        'generator' object is not :: The parameters may come from a generator, which can only be
            gone through once. | Make a list first: list(params).
        list index out of range :: There is no bucket yet when the first parameter comes. | Open a
            bucket where there is none: `if not buckets or ...`.
    """,
    module=globals(),
)

# ---- 5.9 ------------------------------------------------------------------------------------


class Crossed(nn.Module):
    """Uses its layers in another order than it defines them, so gradients come in that order."""

    def __init__(self) -> None:
        super().__init__()
        self.used_first = nn.Embedding(11, 6)
        self.used_last = nn.Linear(6, 11)
        self.used_between = nn.Linear(6, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token numbers (B) to scores (B, 11)."""
        return self.used_last(self.used_between(self.used_first(tokens)))


class Unused(Crossed):
    """The same, with a layer that forward leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)


class Arrivals(NamedTuple):
    """Two backwards of a model."""

    kind: type[nn.Module]
    seed: int


def arrivals(n: int = 1) -> list[Arrivals]:
    """Layers used in another order, a tied and a frozen parameter, and one that is not used."""
    kinds = (Crossed, cases.Probe, Unused, Crossed)
    return [Arrivals(kind, cases.draw_seed()) for kind in kinds]


def watched(answer, case: Arrivals) -> dict:
    """The list after each backward, and how long it was as each gradient became ready."""
    model = cases.build(case.seed, case.kind)
    lengths: list[int] = []
    names: list = []
    for param in model.parameters():  # before the answer's hooks, so these run first
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(lambda _: lengths.append(len(names)))
    other = answer(cases.build(case.seed, case.kind))
    names = answer(model)
    if not isinstance(names, list):
        raise malformed(names, "a list", "Return the list that the hooks append to.")
    seen = {"the list before any backward": as_names(names)}
    for step in ("first", "second"):
        lengths.clear()
        cases.run_backward(model, cases.token_batch(case.seed + len(step)))
        seen[f"the list after the {step} backward"] = as_names(names)
        seen[f"its length as each gradient of the {step} backward becomes ready"] = [*lengths]
    seen["the list of another model, which has run no backward"] = as_names(other)
    hooks = [(p._backward_hooks, p._post_accumulate_grad_hooks) for p in model.parameters()]
    seen["besides"] = [sum(len(kind or ()) for kind in both) for both in hooks]
    return {**seen, **{f"the gradient of {n}": g for n, g in cases.gradients_of(model).items()}}


def as_names(names: Iterable) -> list[str]:
    """What the list holds, which is names."""
    for name in names:
        if not isinstance(name, str):
            raise malformed(name, "names of parameters", "Go through module.named_parameters().")
    return [*names]


HOOK = "lambda _, name=name: arrived.append(name)"
EACH = "module.named_parameters()"
SKIPS = "if param.requires_grad:"
FIXED = "Fix the name when the hook is made: lambda _, name=name: ..."

watch_arrivals = Spec(
    todo="5.9",
    truth=replicas.watch_arrivals,
    cases=arrivals,
    observe=watched,
    tell=lambda case: f"watch_arrivals of {case.kind.__name__}",
    advice={"": "Append a parameter's name inside its hook, and return that same list."},
    hints=(
        "Make an empty list, register a hook on each trainable parameter, and return the list.",
        "param.register_post_accumulate_grad_hook(fn) calls fn(param). The hook does not know the "
        "parameter's name, so make one function for each name.",
        "lambda _, name=name: arrived.append(name) keeps the name of its own turn of the loop.",
    ),
    mistakes="""
        {HOOK} => lambda _: arrived.append(name) ::
            All hooks append the same name, that of the loop's last turn: a function looks `name` up
            when it is called, and by then the loop is over. | {FIXED}
        register_post_accumulate_grad_hook => register_hook :: The name is there before the
            gradient: register_hook calls its hook before .grad is written. |
            register_post_accumulate_grad_hook calls its hook when .grad has been written.
        {HOOK} => lambda _, name=name: arrived.insert(0, name) ::
            The last one to arrive stands first. | Append at the end.
        {EACH} => module.named_parameters(remove_duplicate=False) ::
            A tied parameter has two hooks, and arrives twice. | {EACH} names each parameter once.
        {SKIPS} => if True: ::
            torch refuses a hook on a frozen parameter, which never gets a gradient. | {SKIPS}
        {SKIPS} => if param.requires_grad and param.dim() > 1: ::
            Only matrices are watched, and vectors such as biases have gradients as well.
        {HOOK} => lambda _, name=name: None if name in arrived else arrived.append(name) ::
            Only the first backward is recorded. | Append each time.
        return arrived => return list(arrived) :: The list that comes back is a copy, and the hooks
            append to another one. | Return the list itself.
        return arrived => return [name for name, param in {EACH} if param.requires_grad] ::
            The list holds the names in the model's order, before any gradient is there. | Append
            each name inside a hook.
        {HOOK} => lambda param: arrived.append(param) ::
            The list holds parameters, and names were asked for. | {FIXED}
    """,
    reasons="""
        cannot register a hook on a tensor that doesn't require gradient ::
            A frozen parameter never gets a gradient, so torch refuses a hook on it. | {SKIPS}
        post accumulate grad hooks cannot be registered on non-leaf tensors ::
            A hook of this kind is for parameters. | Go through module.named_parameters().
        positional argument ::
            A hook is called with one argument, the parameter. | lambda _, name=name: ...
    """,
    module=globals(),
)
