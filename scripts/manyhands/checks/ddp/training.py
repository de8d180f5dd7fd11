"""Exercises 6.4 and 6.5: gradients of several micro-batches, and a mean over uneven ranks."""

import math
import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyhands.checks.engine import cases
from manyhands.checks.engine.spec import Place, Spec
from manyhands.checks.engine.values import malformed
from manyhands.data_parallel.replicas import BucketedDDP
from manyhands.ddp import wrapping
from manyhands.instruments.ledger import Ledger

# ---- 6.4 ------------------------------------------------------------------------------------

MEAN_LOSS = "loss_fn(model(inputs), targets) / len(micro_batches)"
FORWARD = f"loss = {MEAN_LOSS}"
WITH = "with nullcontext() if is_last else model.no_sync():"
LATE = f"{FORWARD}\\n        {WITH}"
INSIDE = "Put forward and backward of all micro-batches but the last into `with model.no_sync():`."
DIVIDED = "Divide each loss by len(micro_batches) before its backward."
SENT = "how often gradients are sent"
SCALAR = 16  # bytes; the gradients have more
GRADS = "the gradients"


class Micro(NamedTuple):
    """Calls of accumulate with so many micro-batches of so many samples."""

    num: int
    size: int
    seed: int
    wrap: Callable[[nn.Module], nn.Module]


def micros(n: int) -> list[Micro]:
    """Two, one, and several micro-batches, of models wrapped by torch and by hand."""
    return [
        Micro(2, 3, cases.draw_seed(), wrapping.torch_ddp),
        Micro(1, 4, cases.draw_seed(), BucketedDDP),
        Micro(random.randint(3, 5), 2, cases.draw_seed(), BucketedDDP),
    ]


def accumulated(answer, case: Micro, place: Place) -> dict:
    """Gradients, messages and losses of two calls, the second without zero_grad."""
    inner = cases.build(case.seed)
    model = case.wrap(inner)
    cases.run_backward(model, cases.token_batch(case.seed))  # torch packs its buckets anew
    model.zero_grad()
    used: list[str] = []
    silent = model.no_sync
    model.no_sync = lambda: used.append("no_sync") or silent()
    model.register_forward_pre_hook(lambda *_: used.append("forward"))
    seen: dict = {}
    for call in ("", " after a second call without zero_grad"):
        whole = cases.token_batch(case.seed + len(call), case.num * case.size * place.n)
        mine = whole[:, place.rank :: place.n].split(case.size, dim=1)
        parts = [(part[0], part[1]) for part in mine]
        sizes: list[int] = []

        def loss_fn(outputs: Tensor, targets: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(len(targets))
            return nn.functional.cross_entropy(outputs, targets)

        with Ledger() as ledger:
            loss = answer(model, parts, loss_fn)
        sums = [entry.nbytes for entry in ledger.entries if entry.op == "all_reduce"]
        seen[f"{GRADS}{call}"] = cases.gradients_of(inner)
        seen[f"{SENT}{call}"] = sum(nbytes > SCALAR for nbytes in sums)
        seen[f"nothing but gradients is sent{call}"] = min(sums, default=SCALAR + 1) > SCALAR
        seen[f"the sizes of the batches whose loss is taken{call}"] = sizes
        seen[f"the loss{call}"] = loss
    seen["the model is in training mode"] = model.training
    return {**seen, "besides": {what: used.count(what) for what in ("no_sync", "forward")}}


def as_floats(seen: dict) -> dict:
    """Plain floats for the losses; only after all calls, so that the ranks stay together."""
    for name, value in seen.items():
        if name.startswith("the loss") and not isinstance(value, float):
            raise malformed(value, "a plain float", "Call .item() on a loss.")
    return {n: torch.tensor(v) if n.startswith("the loss") else v for n, v in seen.items()}


accumulate = Spec(
    todo="6.4",
    truth=wrapping.accumulate,
    layouts=cases.TWO[:1],
    cases=micros,
    observe=accumulated,
    form=as_floats,
    independent=True,
    tell=lambda case: (
        f"accumulate over {case.num} micro-batch(es) of {case.size} with {case.wrap.__name__}"
    ),
    advice={
        GRADS: DIVIDED,
        SENT: INSIDE,
        "the loss": "Return this rank's own mean, as a plain float.",
        "nothing but gradients is sent": "The loss is this rank's own: it needs no message.",
        "": "Compare with one backward over the whole batch.",
    },
    hints=(
        "Gradients add up by themselves: each backward adds to .grad. So each loss has to be "
        "divided by the number of micro-batches.",
        INSIDE,
        "`with nullcontext() if is_last else model.no_sync():` chooses between a context that does "
        "nothing and one without messages; nullcontext is in contextlib.",
    ),
    mistakes=r"""
        {WITH} => with nullcontext(): :: The gradients are sent with every micro-batch. | {INSIDE}
        {WITH} => if True:
        {FORWARD} => {LATE}
        loss.backward() =>     loss.backward() :: Backward is inside no_sync, but the forward is
            not, and DDP decides in the forward whether to send.
        {WITH} => with model.no_sync(): ::
            Nothing is ever sent, so each rank keeps its own gradients. | The last one is outside.
        is_last = number == len(micro_batches) => is_last = number == 1 ::
            The first micro-batch is sent and not the last, so what the later ones add stays on its
            rank. | Send with the last one: by then all have been added.
        {MEAN_LOSS} => loss_fn(model(inputs), targets)
        return total => return total / len(micro_batches) :: The gradients are those of the sum of
            the micro-batches' losses, not of their mean. | {DIVIDED}
        {MEAN_LOSS} => loss_fn(model(inputs), targets) / len(micro_batches) / dist.get_world_size()
        return total => return total * dist.get_world_size() ::
            The gradients are divided by the number of ranks, and DDP has done so already.
        {WITH} => model.zero_grad()\n        {WITH} ::
            The gradients are cleared before each micro-batch, so only the last one counts. | Clear
            nothing here: the caller does that after its step.
        for number, => model.zero_grad()\n    for number, ::
            The gradients that were there are cleared. | Clear nothing here.
        total += loss.item() => total = loss.item() * len(micro_batches) ::
            The loss is that of the last micro-batch only. | Add up the divided losses.
        total += loss.item() => total += loss.item() * len(micro_batches) ::
            The loss is the sum of the micro-batches' losses, not their mean.
        model(inputs) => model.module(inputs) :: The model inside the wrapper is called, so DDP does
            not know of the forward. | Call `model` itself.
    """,
    module=globals(),
)

# ---- 6.5 ------------------------------------------------------------------------------------

BOTH = "Put the sum and the count into one float64 tensor, and all-reduce that."
REDUCE = "dist.all_reduce(both, group=group)"
DOUBLE = "torch.stack([total.double(), torch.full_like(total, count, dtype=torch.float64)])"
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
    # bfloat16 has no room for these counts: from 256 on it holds every second number only.
    empty = (*(301 + 1000 * rank for rank in range(n - 1)), 0) if n > 1 else (5,)
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
    mistakes="""
        both =  => total = total / max(count, 1); count = 1; both =
        fits is_near('mean of means') :: This is the mean of the ranks' means, which weighs a rank
            with few items like one with many. | Add up sums and counts, and divide once.
        {REDUCE} => pass
        fits is_near('own mean') ::
            This is the rank's own mean. | Call all_reduce before you divide.
        {REDUCE} => dist.all_reduce(both[0], group=group)
        fits is_near('sum by own count') ::
            This is the sum of all ranks, divided by the rank's own count. | {BOTH}
        {MEAN} => both[0].item()
        fits is_near('sum') :: This is the sum of all items, not their mean. | {DIVIDE}
        {MEAN} => (both[0] / dist.get_world_size(group)).item()
        fits is_near('sum by ranks') :: The sum is divided by the number of ranks.
        {MEAN} => float(int(both[0]) / both[1]) ::
            The sum is cut to a whole number. | Keep it a float.
        {DOUBLE} => torch.stack([total.float(), torch.full_like(total, count, dtype=torch.float32)])
            :: The sums are added up in float32, which holds 7 digits. | {BOTH}
        {DOUBLE} => torch.stack([total, torch.full_like(total, count)])
        {MEAN} => (both[0].double() / both[1].double()).item() ::
            The sums are added up in the type of `total`, which may hold few digits.
        {DOUBLE} => [total, torch.tensor(float(count))]
        {REDUCE} => [dist.all_reduce(part, group=group) for part in both] ::
            `total` itself is overwritten, so a second call would add up sums. | all_reduce works in
            place: give it a tensor of your own.
    """,
    module=globals(),
)
