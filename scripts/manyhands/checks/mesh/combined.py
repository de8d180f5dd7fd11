"""Spec of 14.3: a Transformer cut over one axis of a mesh, and sharded over another one."""

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.checks.engine import cases
from manyhands.checks.engine.spec import Place, Spec
from manyhands.checks.engine.values import Malformed, kind, malformed
from manyhands.checks.mesh.common import say_first
from manyhands.collectives.trees import Group
from manyhands.fsdp.units import FSDP
from manyhands.instruments.ledger import Ledger
from manyhands.mesh import combine
from manyhands.mesh.grid import coordinates, make_groups, share_of_data
from manyhands.mesh.parts import holders, mark_holders
from manyhands.models.transformer import Transformer
from manyhands.tensor.model import TensorParallel

WORLD = (((0, 1, 2, 3),),)
VOCAB, BLOCK, LAYERS, HEADS, WIDTH = 12, 5, 2, 4, 16


class Grid(NamedTuple):
    """One training on a mesh of four ranks."""

    seed: int
    sizes: dict[str, int]
    is_frozen: bool = False  # positions and a norm


def grids(n: int) -> list[Grid]:
    """Both axes, in both orders; replicas of shards and of tensor ranks; something frozen."""
    meshes = [
        {"dp": 2, "tp": 2},
        {"tp": 2, "replicate": 2, "dp": 1},
        {"replicate": 2, "dp": 2, "tp": 1},
    ]
    return [Grid(cases.draw_seed(), m, not number % 2) for number, m in enumerate(meshes)]


MADE: dict[tuple, Mapping[str, Group]] = {}  # a process makes the groups of a mesh once


def groups_of(sizes: dict[str, int]) -> dict[str, Group]:
    """This rank's groups; the same ones for every answer."""
    key = tuple(sizes.items())
    if key not in MADE:
        MADE[key] = make_groups(sizes)
    return dict(MADE[key])


def transformer(case: Grid) -> nn.Module:
    """A small model with weights that are not small."""
    made = cases.build(case.seed, lambda: Transformer(VOCAB, BLOCK, LAYERS, HEADS, WIDTH))
    with torch.no_grad():
        for param in made.parameters():
            param.copy_(torch.randn_like(param) * 0.3)
    if case.is_frozen:
        made.positions.requires_grad_(False)
        made.blocks[1].norm1.requires_grad_(False)
    return made.double()


def training_seen(answer: Callable, case: Grid, place: Place) -> dict:
    """What a rank holds, a step with SGD, the loss after it, and the messages by axis."""
    groups = groups_of(case.sizes)
    model = transformer(case)
    before = [weakref.ref(param) for param in model.blocks.parameters()]
    with Ledger() as making:
        sharded = answer(model, groups)
    if not isinstance(sharded, FSDP):
        raise not_fsdp(sharded)
    inside = sharded.module
    if not isinstance(inside, TensorParallel):
        raise Malformed(
            f"FSDP around {kind(inside)}",
            "FSDP has to wrap what TensorParallel has made.",
            'part = TensorParallel(model, group=groups["tp"]), and then FSDP(part, ...).',
        )
    del model
    seen: dict = {"units of FSDP": len(sharded.units) - 1}
    for index, unit in enumerate(sharded.units):
        name = "root" if index == 0 else f"unit {index}"
        seen[f"sizes of this rank's shards of the {name}"] = sorted(
            flat.shard.numel() for flat in unit
        )
    with Ledger() as ledger:
        seen |= step_seen(sharded, case)
    for index, unit in enumerate(sharded.units):
        name = "root" if index == 0 else f"unit {index}"
        seen[f"holders of the parts of the {name}"] = sorted(
            (flat.shard.numel(), holders(flat.shard)) for flat in unit
        )
    for axis, group in groups.items():
        ranks = tuple(dist.get_process_group_ranks(group))
        counts = Counter(e.op for e in ledger.entries if e.ranks == ranks)
        seen[f"messages along {axis}"] = dict(sorted(counts.items()))
    own = {tuple(dist.get_process_group_ranks(group)) for group in groups.values()}
    for flat in (flat for unit in sharded.units for flat in unit):
        flat.free()  # so that nothing is on its way
    seen["messages through other groups"] = sum(e.ranks not in own for e in ledger.entries)
    seen["all modules are in train"] = all(part.training for part in inside.modules())
    gc.collect(1)
    alive = [ref().untyped_storage().nbytes() for ref in before if ref() is not None]
    seen["the whole model is gone"] = not any(alive)
    seen["messages while it is made"] = len(making.entries)
    return seen


def not_fsdp(value: object) -> Malformed:
    """What to say of something else than FSDP."""
    if isinstance(value, TensorParallel):
        return Malformed(
            "a TensorParallel whose weights are not in shards",
            "FSDP has to wrap what TensorParallel has made.",
            'return FSDP(part, list(part.blocks), group=groups["dp"])',
        )
    return malformed(value, "an FSDP of lesson 10", "Return what FSDP(...) makes.")


def step_seen(sharded: nn.Module, case: Grid) -> dict:
    """Loss and gradients of a step with this rank's share of a batch, and the loss after it."""
    share, num_shares = share_of_data(coordinates(dist.get_rank(), case.sizes), case.sizes)
    tokens = torch.randint(VOCAB, (2, 4, BLOCK), generator=cases.generator(case.seed))
    inputs, targets = tokens[:, share::num_shares]
    loss = sharded(inputs, targets)
    if not isinstance(loss, Tensor):
        raise malformed(loss, "a model that returns its loss")
    loss.backward()
    seen = {"the loss": loss.item()}
    for index, unit in enumerate(sharded.units):
        name = "root" if index == 0 else f"unit {index}"
        grads = [flat.shard.grad for flat in unit]
        seen[f"the gradients of the shards of the {name}"] = [
            None if grad is None else grad.clone() for grad in grads
        ]
    torch.optim.SGD([p for p in sharded.parameters() if p.requires_grad], lr=0.3).step()
    with torch.no_grad():
        seen["the loss after a step with SGD"] = sharded(inputs, targets).item()
    return seen


def tell_grid(case: Grid) -> str:
    """A case in words."""
    of = " of a partly frozen model" if case.is_frozen else ""
    return f"shard_and_cut{of} on a mesh of {case.sizes}"


def shards_first(model: nn.Module, groups: Mapping[str, Group]) -> nn.Module:
    """FSDP around the whole model, which is cut after that."""
    mark_holders(model, dist.get_world_size(groups["tp"]))
    blocks = list(model.blocks)
    sharded = FSDP(model, blocks, replicas=groups.get("replicate"), group=groups["dp"])
    TensorParallel(model, group=groups["tp"])
    return sharded


MARK = 'mark_holders(model, dist.get_world_size(groups["tp"]))'
CUT = 'part = TensorParallel(model, group=groups["tp"])'
WRAP = 'FSDP(part, list(part.blocks), replicas=replicas, group=groups["dp"])'
REPLICAS = 'replicas = groups.get("replicate")'
OVER_DP = 'FSDP shards over the data axis: group=groups["dp"].'
OVER_TP = 'TensorParallel cuts over the tensor ranks: group=groups["tp"].'
shard_and_cut = Spec(
    todo="14.3",
    truth=combine.shard_and_cut,
    at_once=4,
    layouts=WORLD,
    cases=grids,
    observe=training_seen,
    guards_group=False,
    limit_s=12.0,
    mistake_s=2.5,
    tell=tell_grid,
    say=say_first,
    advice={
        "": "In turn: mark_holders, TensorParallel over tp, FSDP over dp.",
        "units of FSDP": "The units are list(part.blocks).",
        "the whole model is gone": "Keep no other name for a weight of `model`.",
    },
    reasons="""
        KeyError: 'replicate' ::
            A mesh may have no such axis. | groups.get("replicate") is None then.
        a sharded weight was used while :: A layer used a weight outside of the forward of its unit.
            | The units are list(part.blocks), and all else belongs to the root.
        has no attribute 'tokens' :: TensorParallel takes a Transformer. | Cut first.
    """,
    hints=(
        "TensorParallel cuts a model by the shapes of its matrices, and FSDP makes vectors of what "
        "it finds. Which of them has to come first?",
        "mark_holders takes the model and the number of tensor ranks, before anything is cut. "
        "TensorParallel takes the model and its group, FSDP the result with its blocks as units.",
        f"{MARK}; {CUT}; and return FSDP(part, list(part.blocks), "
        'replicas=groups.get("replicate"), group=groups["dp"]).',
    ),
    mistakes=r"""
        model, group=groups["tp"]) => model, group=groups["dp"])
        replicas, group=groups["dp"]) => replicas, group=groups["tp"]) ::
            The two groups have changed places. | {OVER_TP} {OVER_DP}
        {REPLICAS} => replicas = None ::
            Replicas of the shards are never averaged. | replicas=groups.get("replicate")
        , group=groups["dp"]) => ) ::
            FSDP shards over all ranks, of which some hold different parts of a matrix. | {OVER_DP}
        TensorParallel(model, group=groups["tp"]) => TensorParallel(model) ::
            The model is cut over all ranks, of which some have other samples. | {OVER_TP}
        {MARK} => pass :: The parameters are not marked, so what is whole on every tensor rank is
            counted like what is cut. | First {MARK}.
        {MARK} => mark_holders(model, dist.get_world_size()) ::
            The marks are the number of all ranks, and not of those that hold the same numbers.
        {MARK} => mark_holders(model, dist.get_world_size(groups["dp"])) ::
            The marks are the number of the ranks of dp, which hold different shards.
        {CUT} => {CUT}\n    {MARK} ::
            All is marked once more after the cut, and what is cut is on one rank only.
        {MARK} => pass
        {CUT} => {CUT}\n    mark_holders(part, dist.get_world_size(groups["tp"])) ::
            The mark comes after the cut, so it marks also what is cut.
        list(part.blocks) => [] :: FSDP has no units, so the whole model is gathered at once. | The
            units are list(part.blocks).
        list(part.blocks) => list(part.blocks)[1:] :: The first block is no unit.
        {REPLICAS} => replicas = groups["dp"] ::
            dp is taken for the replicas as well. | replicas=groups.get("replicate")
        instead shards_first :: FSDP comes first, and finds whole matrices that are cut after that.
            | First cut, then shard.
    """,
    module=globals(),
)
