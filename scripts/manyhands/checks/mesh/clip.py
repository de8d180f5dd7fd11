"""Spec of 14.4: one norm of a gradient whose parts are on many ranks, some on several."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from manyhands.checks.engine import cases
from manyhands.checks.engine.spec import Place, Spec
from manyhands.checks.engine.values import malformed, show
from manyhands.checks.tensor.common import costs_no_more
from manyhands.instruments.ledger import Ledger
from manyhands.mesh import clip

SHORT = (torch.float32,)
EVERY_TYPE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Gradient(NamedTuple):
    """How large the numbers of a gradient are, of which types, and what is special about it."""

    seed: int
    scale: float
    dtypes: tuple[torch.dtype, ...] = SHORT
    kind: str = "own and whole"


def gradients(n: int) -> list[Gradient]:
    """Parts of one rank, of some and of all; none at all; squares beyond a type; no number."""
    seeds = [cases.draw_seed() for _ in range(7)]
    return [
        Gradient(seeds[0], 1.0, kind="own"),
        Gradient(seeds[1], 1.0),
        Gradient(seeds[2], 300.0, EVERY_TYPE),
        Gradient(seeds[3], 1.0, kind="one rank has none"),
        Gradient(seeds[4], 1e25),
        Gradient(seeds[5], 1e-30, kind="nobody has any"),
        Gradient(seeds[6], 1e-30),
        Gradient(seeds[0], 1.0, kind="infinite"),
    ]


def parts_of(case: Gradient, place: Place) -> list[tuple[Tensor, int]]:
    """This rank's parts: more on each rank than on the one before; views, empty ones, numbers."""
    if case.kind == "nobody has any" or (case.kind == "one rank has none" and place.rank == 0):
        return []
    seed = case.seed + place.members[0]
    draw = cases.generator(seed, place.rank)
    parts = []
    for number in range(place.rank + 2):
        rows = torch.randn(3, 2 + number, generator=draw) * case.scale
        grad = [rows, rows.t(), rows[:, 1], rows[0, 0]][number % 4]
        parts.append((grad.to(case.dtypes[number % len(case.dtypes)]), 1))
    parts.append((torch.zeros(0), 1))
    if case.kind != "own":
        common = cases.generator(seed, 1000)
        parts.append((torch.randn(5, generator=common) * case.scale, place.n))
        couple = torch.randn(2, 4, generator=common) * case.scale
        if place.n > 2 and place.rank in (0, place.n - 1):
            parts.insert(1, (couple, 2))
    if case.kind == "infinite" and place.rank == place.n - 1:
        parts[0][0][0, 0] = -torch.inf
    return parts


def norm_seen(answer: Callable, case: Gradient, place: Place) -> dict:
    """The norm, its messages, and whether the gradients are as they were."""
    parts = parts_of(case, place)
    given = list(parts)
    before = [grad.clone() for grad, _ in parts]
    with Ledger() as ledger:
        norm = answer(given, **place.options)
    if not isinstance(norm, Tensor):
        raise malformed(norm, "a tensor without dimensions", "Return the tensor itself.")
    same_parts = len(given) == len(parts) and all(
        one[0] is other[0] and one[1] == other[1] for one, other in zip(given, parts, strict=False)
    )
    return {
        "the norm": norm.detach().clone(),
        "messages": len(ledger.entries),
        "bytes of them": sum(entry.nbytes for entry in ledger.entries),
        "the gradients are unchanged": same_parts
        and all(torch.equal(g, b) for (g, _), b in zip(parts, before, strict=True)),
    }


def say_norm(found: dict, wanted: dict) -> str:
    """The norm first, with its type where that is wrong; then what it cost."""
    one, other = found["the norm"], wanted["the norm"]
    if one.shape != other.shape:
        return f"gives a tensor of shape {tuple(one.shape)}, not a scalar, which has ()"
    if one.dtype != other.dtype:
        return f"gives a scalar in {one.dtype}, not in {other.dtype}"
    if not torch.allclose(one, other, rtol=1e-9, atol=0, equal_nan=True):
        digits = next((d for d in (6, 9, 12) if show(one.item(), d) != show(other.item(), d)), 17)
        return f"gives {show(one.item(), digits)}, not {show(other.item(), digits)}"
    if not found["the gradients are unchanged"]:
        return "changes the gradients or the list of parts"
    return (
        f"starts {found['messages']} messages of {found['bytes of them']} bytes together, and one "
        "of 8 is enough"
    )


NEAR = (
    "Only some digits are right: is a number on the way of a shorter type, or is a small one added?"
)


def facts_of(found: dict, wanted: dict, case: Gradient) -> str:
    """What can be said of a wrong norm by looking at it."""
    one, other = found["the norm"], wanted["the norm"]
    if one.shape == other.shape and not torch.allclose(one.double(), other, rtol=1e-9, atol=0):
        is_near = torch.allclose(one.double(), other, rtol=1e-5, atol=0)
        return NEAR if is_near else ""
    if not found["the gradients are unchanged"]:
        return "The caller still needs them as they were."
    return "One number has to travel, once."


def same_norm(found: dict, wanted: dict, case: Gradient) -> bool:
    """Numbers of any size to 9 digits; messages may be fewer."""
    pair = found["the norm"], wanted["the norm"]
    if pair[0].shape != pair[1].shape or pair[0].dtype != pair[1].dtype:
        return False
    if not torch.allclose(*pair, rtol=1e-9, atol=0, equal_nan=True):
        return False
    return costs_no_more("messages", "bytes of them")(
        {**found, "the norm": None}, {**wanted, "the norm": None}, case
    )


def tell_gradient(case: Gradient) -> str:
    """A case in words."""
    size = "" if case.scale == 1 else f" of numbers around {case.scale:g}"
    types = "" if case.dtypes == SHORT else " in several types"
    held = {
        "own": "parts that are on one rank each",
        "own and whole": "parts that are on one rank each and parts that all ranks hold",
        "one rank has none": "parts, of which rank 0 of the group has none",
        "nobody has any": "no parts on any rank",
        "infinite": "parts with one number that is infinite",
    }[case.kind]
    return f"mesh_norm of {held}{size}{types}"


SQUARES = "torch.linalg.vector_norm(grad, dtype=torch.float64).square()"
DIVIDED = f"{SQUARES} / holders"
ONCE = "Divide the sum of a part's squares by its holders, and add up over the ranks."
REDUCE = "dist.all_reduce(total, group=group)"
ROOT = "First add up all squares over the ranks, and take the root last."
mesh_norm = Spec(
    todo="14.4",
    truth=clip.mesh_norm,
    layouts=cases.FOUR,
    cases=gradients,
    observe=norm_seen,
    same=same_norm,
    say=say_norm,
    tell=tell_gradient,
    facts=facts_of,
    advice={
        "": f"{ONCE} {ROOT}",
        "the gradients are unchanged": "double() of a gradient in float64 is the gradient itself: "
        "change neither that nor the list.",
        "messages": f"Add up this rank's squares first, and then {REDUCE}.",
        "bytes of them": f"Add up this rank's squares first, and then {REDUCE}.",
    },
    reasons="""
        list index out of range :: A rank may have no parts at all. | Start with torch.zeros((),
            dtype=torch.float64), whatever the parts are.
        expected a non-empty list :: A rank may have no parts at all. | Start with torch.zeros((),
            dtype=torch.float64), and add to it.
        must be Tensor, not ::
            Only a tensor can be sent. | Add up in a tensor: torch.zeros((), dtype=torch.float64).
    """,
    hints=(
        "Norms cannot be added up, but their squares can. Which squares would the sum over the "
        "ranks count twice?",
        "Numbers that h ranks hold come h times in that sum, so each of these ranks gives 1/h of "
        "their squares.",
        f"total += {DIVIDED} for each part, with total in float64; {REDUCE}; and return its root.",
    ),
    mistakes="""
        {DIVIDED} => {SQUARES} :: What several ranks hold is counted once for each of them. | {ONCE}
        {DIVIDED} => {SQUARES} * holders :: The squares are multiplied by their holders.
        {DIVIDED} => {SQUARES} / holders**2 :: The squares are divided by the square of the holders.
        {DIVIDED} => {SQUARES} // holders :: The squares are divided by // and lose their fraction.
        {SQUARES} / => torch.linalg.vector_norm(grad, dtype=torch.float64) / ::
            Norms are added up, and not their squares. | {ROOT}
        {DIVIDED} => {SQUARES} if holders == 1 else 0 ::
            Parts that several ranks hold are left out. | {ONCE}
        {SQUARES} => grad.square().sum() :: The numbers are squared in their own type, which may
            have few digits, and in which large squares become infinite. | Square and add up in
            float64: {SQUARES}, or grad.double().square().sum().
        {SQUARES} => grad.float().square().sum() :: The numbers are squared in float32, which has 7
            digits, and in which large squares become infinite.
        {REDUCE} => dist.all_reduce(total.sqrt_(), group=group); total.square_() ::
            The norms of the ranks are added up, and not their squares. | {ROOT}
        {REDUCE} => pass :: This is the norm of the rank's own parts. | {REDUCE}
        {REDUCE} => {REDUCE}; total.div_(dist.get_world_size(group)) ::
            The squares are averaged over the ranks. | {ONCE}
        {REDUCE} => dist.all_reduce(total, op=dist.ReduceOp.MAX, group=group) ::
            This is the largest norm of any rank. | all_reduce sums by itself, without an op.
        {REDUCE} => dist.all_reduce(total) ::
            The sum is taken over the whole job, and not over the group. | {REDUCE}
        total.sqrt() => total :: This is the square of the norm. | Take the root at the end.
        total.sqrt() => total.sqrt().float() ::
            The norm is not in float64. | Keep float64 to the end.
    """,
    module=globals(),
)
