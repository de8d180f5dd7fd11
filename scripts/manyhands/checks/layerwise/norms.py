"""8.6: the norms of whole tensors of which every rank holds a part."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from manyhands.checks.engine import cases
from manyhands.checks.engine.spec import Place, Spec
from manyhands.checks.engine.values import same, tensor
from manyhands.instruments.ledger import Ledger
from manyhands.layerwise import norms

LARGEST_BYTES = 2000  # of norms, however they are packed; the largest shard has more


class Shards(NamedTuple):
    """A call of `shard_norms`; each rank draws the numbers of its own parts."""

    seed: int
    tensors: list[tuple[str, torch.dtype, list[int]]]  # form, type, size of each rank's part
    order: float = 2.0


def shards(n: int) -> list[Shards]:
    """One tensor; empty parts and strided ones; the largest value; other types, and mixed ones."""
    full, half, double = torch.float32, torch.bfloat16, torch.float64
    three = [("matrix", full, 2), ("vector", full, 2), ("column", full, 1)]
    ways = [
        (three, 2.0),
        (three, math.inf),
        ([("transposed", double, 2), ("vector", double, 1)], 2.0),
        ([("vector", half, 1000), ("transposed", full, 2)], 2.0),
        ([("transposed", full, 2), ("column", half, 1)], math.inf),
    ]
    found = [Shards(cases.draw_seed(), [("vector", full, cases.uneven(n, empty=False))])]
    for tensors, order in ways:
        cut = [(form, kind, [m * size for size in cases.uneven(n)]) for form, kind, m in tensors]
        found.append(Shards(cases.draw_seed(), cut, order))
    return found


def norms_seen(answer: Callable, case: Shards, place: Place) -> dict:
    """The norms, as precise as the shards are; their shape and type; are the shards unchanged?"""
    draw = cases.generator(case.seed, place.job_rank)
    given, memories = [], []
    for form, kind, sizes in case.tensors:
        size = sizes[place.rank]
        shard, memory = cases.shaped(form if size else "empty", size, draw, kind)
        memory.div_(3)
        if case.order == math.inf and not given:
            memory.abs_().neg_()  # the largest absolute value is that of a negative number
        given.append(shard)
        memories.append(memory)
    before = [memory.clone() for memory in memories]
    order = {} if case.order == 2 else {"order": case.order}
    with Ledger() as wire:
        found = tensor(answer(list(given), **order, **place.options))
    kinds = [torch.promote_types(shard.dtype, torch.float32) for shard in given]
    return {
        "the norms": [one.to(k) for one, k in zip(found.flatten(), kinds, strict=False)],
        "the shape": list(found.shape),
        "the type": str(found.dtype),
        # all_gather_object makes two calls: it tells the sizes first.
        "all norms travel in one message": len(wire.entries) <= 2,
        "norms travel, and no shards": all(one.nbytes < LARGEST_BYTES for one in wire.entries),
        "`shards` are unchanged": all(map(torch.equal, memories, before)),
    }


def tell(case: Shards) -> str:
    """The call, and how the tensors are cut."""
    words = {"transposed": "transposed matrix", "column": "column of a matrix"}
    cuts = [f"a {words.get(f, f)} ({str(kind)[6:]}) in parts of {s}" for f, kind, s in case.tensors]
    order = ", order=math.inf" if case.order == math.inf else ""
    return f"shard_norms(shards{order}) with {'; '.join(cuts)} numbers"


def facts(found: dict, wanted: dict, case: Shards) -> str:
    """Are the norms right, or nearly so?"""
    pair = found["the norms"], wanted["the norms"]
    if same(*pair):
        return "The norms themselves are right."
    return "The norms are nearly right: digits are lost on the way." if same(*pair, 0.02) else ""


NORM = "torch.linalg.vector_norm(shard, dtype=torch.float64)"
LARGEST = "shard.abs().max()"
OP = "dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM"
REDUCE = f"dist.all_reduce(norms, {OP}, group=group)"
ROOT = "norms if largest else norms.sqrt()"
STEPS = "Square the norm of each part, add the squares over the ranks, and take the root last."
EMPTY = (
    "A rank's part of a tensor may be empty, and nothing is the largest of no numbers.",
    "Let an empty part count as 0: that changes no norm.",
)
shard_norms = Spec(
    todo="8.6",
    truth=norms.shard_norms,
    layouts=cases.THREE,
    cases=shards,
    observe=norms_seen,
    tell=tell,
    facts=facts,
    independent=True,
    advice={
        "": STEPS,
        "the shape": "Return one norm for each tensor: a vector of len(shards) numbers.",
        "the type": "Return the norms in float64.",
        "all norms travel in one message": "Put the tensors' numbers into one vector first.",
        "norms travel, and no shards": "Each rank sends one number for each tensor.",
        "`shards` are unchanged": "Use operations without a trailing underscore on the shards.",
    },
    reasons={
        "does not have an identity": EMPTY,
        "Expected reduction dim": EMPTY,
        "NoneType": (
            "all_reduce works in place, and returns None.",
            "Call it on a line of its own, and use the tensor afterwards.",
        ),
    },
    hints=(
        "A norm is the root of a sum, and only the sum can be put together from the ranks' parts. "
        "The largest value of the whole is the largest of the parts' largest values.",
        "Put one number for each tensor into a vector of float64: the sum of the squares of this "
        "rank's part, or its largest absolute value. An empty part gives 0.",
        "all_reduce that vector with dist.ReduceOp.SUM and take the root, or, where order is "
        "math.inf, with dist.ReduceOp.MAX and without a root.",
    ),
    mistakes="""
        {NORM}.square() => {NORM}
        {ROOT} => norms :: The norms of the parts are added, and not their squares. | {STEPS}
        {NORM}.square() => {NORM} :: The norms of the parts are not squared before they are added.
        {ROOT} => norms :: The root is missing: for order 2 these are the sums of the squares.
        {ROOT} => norms.sqrt() ::
            A root is taken for order math.inf as well. | The largest value needs no root.
        {OP} => dist.ReduceOp.MAX ::
            For order 2 only the largest part of each tensor counts. | {STEPS}
        {OP} => dist.ReduceOp.SUM ::
            For order math.inf the ranks' largest values are added. | Use dist.ReduceOp.MAX there.
        {ROOT} => norms if largest else (norms / dist.get_world_size(group)).sqrt() ::
            The sum of the squares is divided by the number of ranks. | {STEPS}
        order == math.inf => False ::
            The norm of order 2 is returned, whatever `order` is. | Ask whether order == math.inf.
        {LARGEST} => shard.max() :: For order math.inf the signs are kept, so a large negative
            number is overlooked. | Take the absolute values first.
        {NORM} => torch.linalg.norm(shard.double(), 2)
        {LARGEST} => torch.linalg.norm(shard.double(), math.inf) ::
            torch.linalg.norm computes another norm where a part is a matrix. |
            torch.linalg.vector_norm treats any tensor as one long vector.
        {REDUCE} => pass ::
            These are the norms of this rank's own parts. | Call all_reduce on every rank.
        {REDUCE} => dist.reduce(norms, group_dst=0, op={OP}, group=group) ::
            Only the first rank of the group has the norms. | Every rank needs them: all_reduce.
        {ROOT} => norms.max() if largest else norms.sum().sqrt() ::
            This is one norm of all tensors together. | Each tensor has a norm of its own.
        shard, dtype=torch.float64 => shard ::
            The norms of the parts are computed in the type of the shards, and digits are lost. |
            vector_norm(shard, dtype=torch.float64) adds the squares in float64.
        {ROOT} => (norms if largest else norms.sqrt()).float() ::
            The norms are returned in float32. | Return them in float64.
    """,
    module=globals(),
)
