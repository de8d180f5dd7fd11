"""Exercises 6.4 and 6.5: PyTorch's DDP, and a mean over ranks with unequal numbers of items."""

import inspect
import math
import os
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from manyhands.checks.engine import cases
from manyhands.checks.engine.mistakes import Mistake, mistakes, patch
from manyhands.checks.engine.spec import Place, Spec
from manyhands.checks.engine.values import Malformed, kind, malformed
from manyhands.ddp import wrapping

DDP = nn.parallel.DistributedDataParallel

# ---- 6.4 ------------------------------------------------------------------------------------

GPU = 3  # the module's own; LOCAL_RANK says 5, and the ranks are 0 and 1
IDS = "device_ids is [device.index] where the module's device.type is 'cuda', and None on the CPU."
CAP = "Pass bucket_cap_mb=bucket_mb."
ELSE = "Give device_ids and bucket_cap_mb, and leave all else as torch has it."
OWN = '[device.index] if device.type == "cuda" else None'
MADE = "return DistributedDataParallel(module, device_ids=ids, bucket_cap_mb=bucket_mb)"


class Wrap(NamedTuple):
    """One module to be wrapped. `is_recorded`: only what torch is asked for is looked at."""

    device: str
    bucket_mb: float | None  # None: not given
    is_recorded: bool = True
    training: bool = True
    seed: int = 0


class OnGpu(nn.Module):
    """A module whose one parameter says that it is on a GPU, also where there is none."""

    def __init__(self) -> None:
        super().__init__()
        with FakeTensorMode():
            self.weight = nn.Parameter(torch.empty(2, 2, device=f"cuda:{GPU}"))


def wraps(n: int) -> list[Wrap]:
    """On the CPU and on a GPU that is not the rank's number; then two real steps on the CPU."""
    return [
        Wrap("cpu", None),
        Wrap("cpu", 0.5, training=False),
        Wrap("cuda", 7.5),
        Wrap("cpu", 1e-4, is_recorded=False, seed=cases.draw_seed()),
    ]


def wrapped(answer, case: Wrap, place: Place) -> dict:
    """What torch is asked for, and what became of the module; or the gradients of two steps."""
    given = () if case.bucket_mb is None else (case.bucket_mb,)
    if not case.is_recorded:
        return _trained(answer, case, given, place)
    module = OnGpu() if case.device == "cuda" else nn.Linear(2, 2)
    module.train(case.training)
    made: list[dict] = []
    signature = inspect.signature(DDP.__init__)

    def init(self, *args: object, **named: object) -> None:
        nn.Module.__init__(self)
        bound = signature.bind(self, *args, **named)
        bound.apply_defaults()
        made.append(bound.arguments)
        self.module = made[-1]["module"]
        self.train(self.module.training)

    def stay(self: nn.Module, *args: object, **named: object) -> nn.Module:
        return self

    with (  # a node with GPUs whose process has said which is its own
        mock.patch.dict(os.environ, LOCAL_RANK="5"),
        mock.patch.object(DDP, "__init__", init),
        mock.patch.object(
            nn.DataParallel, "__init__", lambda self, *_, **__: nn.Module.__init__(self)
        ),
        mock.patch.multiple(nn.Module, to=stay, cuda=stay),
        mock.patch.multiple(
            torch.cuda,
            is_available=lambda: True,
            device_count=lambda: 8,
            current_device=lambda: GPU,
            set_device=lambda *_: None,
        ),
    ):
        result = answer(module, *given)
    if not isinstance(result, DDP):
        what = "the module itself" if result is module else kind(result)
        raise Malformed(what, "The exercise asks for torch's DistributedDataParallel.", MADE)
    return {**_options(made[-1]), **_kept(module, result, case, made)}


def _options(call: dict) -> dict:
    """What torch was asked for; and the names of what differs from torch's own."""
    defaults = inspect.signature(DDP.__init__).parameters
    ids = call["device_ids"]
    if isinstance(ids, list | tuple):
        ids = [i if isinstance(i, int) else torch.device(i).index for i in ids]
    others = [
        f"{name}={value}"
        for name, value in call.items()
        if name not in ("self", "module", "device_ids", "output_device", "bucket_cap_mb")
        and value != defaults[name].default
        and not (name == "process_group" and value is dist.group.WORLD)
    ]
    cap = call["bucket_cap_mb"]
    return {
        "device_ids": ids or None,
        "bucket_cap_mb": 25.0 if cap is None else float(cap),
        "other options": others,
    }


def _kept(module: nn.Module, result: nn.Module, case: Wrap, made: list[dict]) -> dict:
    return {
        "DistributedDataParallel is made once": len(made) == 1,
        "it wraps the module that was given": result.module is module,
        "the module and its wrapper are in the mode that it had, train or eval": (
            module.training == result.training == case.training
        ),
        "the module's parameters want a gradient as before": all(
            param.requires_grad for param in module.parameters()
        ),
    }


def _trained(answer, case: Wrap, given: tuple, place: Place) -> dict:
    """Two backwards on this rank's share, from models that start different."""
    model = cases.build(case.seed + place.rank)
    wrapper = answer(model, *given)
    seen = {}
    for step in range(2):
        batch = cases.token_batch(case.seed + step)[:, place.rank :: place.n]
        model.zero_grad()
        cases.run_backward(wrapper, batch)
        seen[f"the gradients of step {step + 1}"] = cases.gradients_of(model)
    return seen


def say_wrap(case: Wrap) -> str:
    """A call of torch_ddp in words."""
    given = "" if case.bucket_mb is None else f", {case.bucket_mb:g}"
    where = f"cuda:{GPU}" if case.device == "cuda" else "the CPU"
    training = "" if case.training else " in eval mode"
    return f"torch_ddp(a module on {where}{training}{given})"


torch_ddp = Spec(
    todo="6.4",
    truth=wrapping.torch_ddp,
    layouts=cases.TWO[:1],
    cases=wraps,
    observe=wrapped,
    tell=say_wrap,
    independent=True,
    advice={"device_ids": IDS, "bucket_cap_mb": CAP, "": ELSE},
    hints=(
        "Call torch's DistributedDataParallel with the module, device_ids=... and "
        "bucket_cap_mb=...",
        "The module's own device says what to do: next(module.parameters()).device.",
        "device_ids is [device.index] where device.type is 'cuda', and None on the CPU; "
        "bucket_cap_mb is in MiB, as bucket_mb is.",
    ),
    mistakes=mistakes(
        """
        [device.index] if => [dist.get_rank()] if
            device_ids holds this rank's number. A rank counts over the whole job, and GPUs are
            counted on each node. | {IDS}
        [device.index] if => [int(__import__("os").environ["LOCAL_RANK"])] if
            device_ids holds LOCAL_RANK, and the module is on another GPU. | {IDS}
        [device.index] if => list(range(torch.cuda.device_count())) if
            device_ids holds several GPUs, and a process of DDP drives one. | {IDS}
        [device.index] if => device.index if
            device_ids is a number, and torch asks for a list. | {IDS}
        {OWN} => [torch.cuda.current_device()] if torch.cuda.is_available() else None
            device_ids follows from what the machine has, and not from where the module is. | {IDS}
        {OWN} => [device.index or 0]
            device_ids holds a number also for a module on the CPU. | {IDS}
        device_ids=ids, =>
            device_ids is left out, so a batch on the CPU would not be copied to the GPU. | {IDS}
        , bucket_cap_mb=bucket_mb =>
            bucket_mb is not passed on, and torch then takes 25 MiB. | {CAP}
        bucket_cap_mb=bucket_mb => bucket_cap_mb=bucket_mb * 1e6
            bucket_cap_mb is given in bytes, and torch counts in MiB. | {CAP}
        bucket_mb) => bucket_mb, find_unused_parameters=True)
            torch is asked to look for unused parameters, which costs time in every step. | {ELSE}
        bucket_mb) => bucket_mb, static_graph=True)
            torch is told that the graph never changes, which need not be so. | {ELSE}
        bucket_mb) => bucket_mb, init_sync=False)
            The replicas do not start equal. | {ELSE}
        """,
        globals(),
    ),
)

# ---- 6.5 ------------------------------------------------------------------------------------

BOTH = "Put the sum and the count into one float64 tensor, and all-reduce that."
REDUCE = "dist.all_reduce(both, group=group)"
DOUBLE = "torch.stack([total.double(), torch.full_like(total, count, dtype=torch.float64)])"
FLOAT = "torch.stack([total.float(), torch.full_like(total, count, dtype=torch.float32)])"
DIVIDE = "Divide by the number of all items."
MEAN = "(both[0] / both[1]).item()"


class Losses(NamedTuple):
    """One evaluation: the number of items of each rank, and what the losses look like."""

    counts: tuple[int, ...]
    seed: int
    scale: float = 1.0
    dtype: torch.dtype = torch.float64


def losses(n: int) -> list[Losses]:
    """Equal counts, uneven ones, none, very many; negative sums, and sums that need 15 digits."""
    uneven = tuple(2 + 37 * rank for rank in range(n))
    empty = (*uneven[:-1], 0) if n > 1 else (5,)
    many = tuple(20_000_001 + 2 * rank for rank in range(n))
    return [
        Losses((4,) * n, cases.draw_seed()),
        Losses(uneven, cases.draw_seed(), -1e-4, torch.float32),
        Losses(empty, cases.draw_seed(), 40.0, torch.bfloat16),
        Losses(uneven, cases.draw_seed(), 1e8),
        Losses(many, cases.draw_seed(), 1e8),
    ]


def means(answer, case: Losses, place: Place) -> dict:
    """The mean, of two calls with other sums; and whether `total` is as it was."""
    seen: dict = {}
    near: list[set[str]] = []
    for call in ("", " of a second call"):
        totals = [_total(case, rank, member, call) for rank, member in enumerate(place.members)]
        total = totals[place.rank].clone()
        value = answer(total, case.counts[place.rank], **place.options)
        seen[f"the mean{call}"] = value
        seen[f"`total` is as it was{call}"] = torch.equal(total, totals[place.rank])
        near.append(_near(value, totals, case, place.rank))
    return {**seen, "besides": set.intersection(*near)}


def _total(case: Losses, rank: int, member: int, call: str) -> Tensor:
    """The sum of a rank's losses, whose mean is another one on each rank."""
    draw = cases.generator(case.seed, member, len(call))
    mean = (1 + 2 * rank + torch.rand((), dtype=torch.float64, generator=draw)) * case.scale
    return (mean * case.counts[rank]).to(case.dtype)


def _near(value: object, totals: list[Tensor], case: Losses, rank: int) -> set[str]:
    """What the value comes near to: of many numbers, which."""
    sums = [total.double().item() for total in totals]
    own = [total / max(count, 1) for total, count in zip(sums, case.counts, strict=True)]
    known = {
        "own mean": own[rank],
        "mean of means": sum(own) / len(own),
        "sum": sum(sums),
        "sum by ranks": sum(sums) / len(sums),
        "sum by own count": sum(sums) / max(case.counts[rank], 1),
    }
    close = 2e-2 if case.dtype is torch.bfloat16 else 1e-5
    if not isinstance(value, float):
        return set()
    if not case.counts[rank] and not math.isfinite(value):  # a division by 0
        return {"own mean", "sum by own count"}
    return {name for name, number in known.items() if math.isclose(value, number, rel_tol=close)}


def as_means(seen: dict) -> dict:
    """Plain floats; only after all calls, so that the ranks stay together."""
    for name, value in seen.items():
        if name.startswith("the mean") and not isinstance(value, float):
            raise malformed(value, "a plain float", "Call .item(), and return it on every rank.")
    return {n: float(value) if n.startswith("the mean") else value for n, value in seen.items()}


def is_near(what: str) -> Callable:
    """Is every value this number, where it is not right?"""
    return lambda seen, case: what in seen["besides"]


mean_over_ranks = Spec(
    todo="6.5",
    truth=wrapping.mean_over_ranks,
    layouts=cases.THREE,
    cases=losses,
    observe=means,
    form=as_means,
    independent=True,
    tell=lambda case: f"mean_over_ranks, where the ranks hold {list(case.counts)} items,",
    advice={"": "Add up all sums and all counts, and divide once."},
    hints=(
        "A mean of means is right only when all ranks hold equally many items.",
        "Put the sum and the count into one float64 tensor of two numbers, and all-reduce that.",
        "The mean is the sum of all sums divided by the sum of all counts. Return it as a float "
        "on every rank.",
    ),
    mistakes=[
        Mistake(
            patch("both = ", "total = total / max(count, 1); count = 1; both = "),
            "This is the mean of the ranks' means, which weighs a rank with few items like one "
            "with many.",
            "Add up sums and counts, and divide once.",
            fits=is_near("mean of means"),
        ),
        Mistake(
            patch(REDUCE, "pass"),
            "This is the rank's own mean.",
            "Call all_reduce before you divide.",
            fits=is_near("own mean"),
        ),
        Mistake(
            patch(REDUCE, "dist.all_reduce(both[0], group=group)"),
            "This is the sum of all ranks, divided by the rank's own count.",
            BOTH,
            fits=is_near("sum by own count"),
        ),
        Mistake(
            patch(MEAN, "both[0].item()"),
            "This is the sum of all items, not their mean.",
            DIVIDE,
            fits=is_near("sum"),
        ),
        Mistake(
            patch(MEAN, "(both[0] / dist.get_world_size(group)).item()"),
            "The sum is divided by the number of ranks.",
            DIVIDE,
            fits=is_near("sum by ranks"),
        ),
        *mistakes(
            """
            {MEAN} => float(int(both[0]) / both[1])
                The sum is cut to a whole number. | Keep it a float.
            {DOUBLE} => {FLOAT}
                The sums are added up in float32, which holds 7 digits. | {BOTH}
            {DOUBLE} => torch.stack([total, torch.full_like(total, count)])
            {MEAN} => (both[0].double() / both[1].double()).item()
                The sums are added up in the type of `total`, which may hold few digits. | {BOTH}
            {DOUBLE} => [total, torch.tensor(float(count))]
            {REDUCE} => [dist.all_reduce(part, group=group) for part in both]
                `total` itself is overwritten, so a second call would add up sums.
                | all_reduce works in place: give it a tensor of your own.
            """,
            globals(),
        ),
    ],
)
