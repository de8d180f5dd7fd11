"""10.6 to 10.10: PyTorch's own fully_shard, its options and its messages."""

import os
import random
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor

from manyhands.checks.engine import cases
from manyhands.checks.engine.card import Wrong
from manyhands.checks.engine.spec import Call, Place, Spec
from manyhands.checks.engine.values import integer, kind, malformed, record
from manyhands.fsdp import fully_shard as course
from manyhands.instruments.ledger import Ledger

# ---- 10.6 -----------------------------------------------------------------------------------


def steps() -> list[Call]:
    """No blocks; blocks that are freed and kept; one copy and several."""
    few, many = random.sample(range(3, 20), 2)
    copies = random.randint(3, 9)
    plain = [(0, True, 1), (0, False, copies), (few, True, 1), (many, False, 1)]
    return [*plain, (many, True, copies), (few, False, 2), (1000, True, 64)]


def as_counts(value: object) -> dict:
    """Three numbers by name; a Counter holds 0 where it has no name."""
    names = ["all_gather", "reduce_scatter", "all_reduce"]
    if isinstance(value, Counter):
        value = {name: value[name] for name in [*names, *value]}
    return record(names, integer)(value)


calls_per_step = Spec(
    todo="10.6",
    truth=course.calls_per_step,
    cases=steps,
    observe=lambda answer, case: answer(case[0], reshard=case.reshard, replicas=case.replicas),
    form=as_counts,
    independent=True,
    advice={"": "Go through forward and backward of one unit, and write down its messages."},
    hints=(
        "A unit is gathered before its forward. Is it still whole when its backward begins? Its "
        "gradients are made once.",
        "There are num_blocks + 1 units, because the root is one. Blocks that are freed after "
        "forward are gathered again; the root never is. Several replicas average once per unit.",
    ),
    mistakes="""
        units = num_blocks + 1 => units = num_blocks ::
            The root is left out. | The root is a unit, too: it holds embedding and head.
        again = num_blocks if reshard else 0 => again = num_blocks ::
            Blocks that are kept are gathered again. | Kept blocks stay whole until their backward.
        again = num_blocks if reshard else 0 => again = 0 ::
            Blocks that were freed are not gathered again. | Add the blocks again for backward.
        again = num_blocks if reshard else 0 => again = units if reshard else 0 ::
            The root is gathered twice, and it is never freed. | Gather only the blocks again.
        again = num_blocks if reshard else 0 => again = 0 if reshard else num_blocks ::
            `reshard` is taken the wrong way round. | True frees blocks, so they come again.
        "reduce_scatter": units => "reduce_scatter": units + again ::
            Gradients are reduced twice. | Weights are needed twice, but gradients are made once.
        "reduce_scatter": units => "reduce_scatter": units * replicas ::
            All replicas are counted. | A rank reduces inside its own copy of the model only.
        units if replicas > 1 else 0 => units ::
            A single copy of the model is averaged with nobody. | It is 0 where replicas is 1.
        units if replicas > 1 else 0 => 0 ::
            The replicas are never averaged. | Each unit's gradients are averaged over the copies.
        units if replicas > 1 else 0 => 1 if replicas > 1 else 0 ::
            All units are averaged in one call, but they are not ready at once. | One for each unit.
        units if replicas > 1 else 0 => units * (replicas - 1) :: There is one all_reduce for each
            other replica. | One all_reduce averages over all copies at once.
        units if replicas > 1 else 0 => units * replicas if replicas > 1 else 0 ::
            There is one all_reduce for each replica.
    """,
    module=globals(),
)

# ---- 10.7 -----------------------------------------------------------------------------------

WORLD = (((0, 1, 2, 3),),)


class Tiny(nn.Module):
    """Two blocks between an embedding and a head; no size is a multiple of the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)) for _ in range(2)
        )
        self.blocks[1][0].bias.requires_grad_(False)
        self.register_buffer("shift", torch.arange(6.0) / 6, persistent=False)
        self.head = nn.Linear(6, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token numbers (B) to scores (B, 11)."""
        x = self.embedding(tokens) + self.shift.to(self.embedding.weight.dtype)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Wrap(NamedTuple):
    """One call of torch_fsdp."""

    seed: int
    dims: int  # of the mesh
    options: dict


def wraps(n: int) -> list[Wrap]:
    """Every option, given and not given."""
    ways = [
        (1, {}),
        (1, {"reshard": True}),
        (2, {"reshard": False, "dtype": torch.bfloat16}),
        (2, {"offload": True}),
    ]
    return [Wrap(cases.draw_seed(), dims, options) for dims, options in ways]


def wrapped_seen(answer: Callable, case: Wrap, place: Place) -> dict:
    """The units that were made, with their options; messages and weights of a step."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these ranks compute on the CPU, wherever they are
    rank = dist.get_rank()
    module = cases.build(case.seed + rank, Tiny)
    sizes = (place.n,) if case.dims == 1 else (2, place.n // 2)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-case.dims :])
    made = answer(module, list(module.blocks), mesh=mesh, **case.options)
    if made is not module:
        raise Wrong(
            f"it gives {kind(made)} that is not the module that it was given",
            "fully_shard works in place: the caller's own module has to be sharded.",
            "Shard `module` itself, and return it.",
        )
    units = {n or "the root": p for n, p in module.named_modules() if isinstance(p, FSDPModule)}
    params = dict(module.named_parameters())
    plain = [name for name, param in params.items() if not isinstance(param, DTensor)]
    seen = {
        "units": sorted(units),
        "parameters that are not sharded": plain,
        "shape of the mesh of each parameter": {
            name: list(param.device_mesh.shape)
            for name, param in params.items()
            if isinstance(param, DTensor)
        },
        "types of the parameters": sorted({str(param.dtype) for param in params.values()}),
        "units that were given a CPUOffloadPolicy": options_of_units(
            units, lambda group: isinstance(group.offload_policy, CPUOffloadPolicy)
        ),
        "units that cast their inputs": options_of_units(
            units, lambda group: group.mp_policy.cast_forward_inputs
        ),
        "units that keep a part of their own between forward and backward": options_of_units(
            units, lambda group: group.post_forward_mesh_info not in (None, group.mesh_info)
        ),
    }
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.5)
    with Ledger() as ledger:
        cases.run_backward(module, cases.token_batch(case.seed)[:, rank :: place.n])
    optimizer.step()
    seen["messages of a step"] = sorted(f"{e.op} of {e.nbytes} bytes" for e in ledger.entries)
    if "dtype" not in case.options:
        seen["this rank's part of the weights after a step"] = [
            part_of(param) for param in params.values()
        ]
    return seen


def options_of_units(units: dict, holds: Callable) -> list[str]:
    """The units of which this holds."""
    groups = {name: unit._get_fsdp_state()._fsdp_param_group for name, unit in units.items()}
    return sorted(name for name, group in groups.items() if group is not None and holds(group))


def integerof(param: Tensor) -> Tensor:
    """All of a parameter."""
    found = param.full_tensor() if isinstance(param, DTensor) else param
    return found.detach().clone()


def part_of(param: Tensor) -> Tensor:
    """What this rank holds of a parameter."""
    found = param.to_local() if isinstance(param, DTensor) else param
    return found.detach().clone()


BOTH = "Give the units and the root the same mesh, mp_policy and offload_policy."
FIRST = "First fully_shard each of `units`, then the module itself."
POLICY = "MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)"
OWN = "fully_shard has other names for its options."
torch_fsdp = Spec(
    todo="10.7",
    truth=course.torch_fsdp,
    at_once=8,
    layouts=WORLD,
    cases=wraps,
    observe=wrapped_seen,
    limit_s=12,
    may_change=("the environment variables",),
    guards_group=False,
    tell=lambda case: f"torch_fsdp on a {case.dims}-D mesh, {case.options or 'no options'},",
    advice={
        "": BOTH,
        "units": FIRST,
        "parameters that are not sharded": "After the units call fully_shard(module).",
    },
    reasons="""
        Cannot access accelerator :: CPUOffloadPolicy pins memory by default, and here is no GPU. |
            CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        non-CPU accelerator :: This is the first FSDP, which needs a GPU. | fully_shard
        does not have a sharding strategy :: The parameters are sharded already, and a DTensor
            cannot be broadcast like this. | Make the weights equal first, then shard.
        must have the same dtype ::
            Two tensors that are multiplied or added have different types. | {BOTH}
        can only be applied to a module once :: A module was sharded twice. | Shard it once.
        unexpected keyword argument 'reshard' :: {OWN} | reshard_after_forward=reshard
        unexpected keyword argument 'dtype' :: {OWN} | mp_policy={POLICY}
        containers that do not :: A list of layers cannot be a unit. | {FIRST}
        got mixed :: Some parameters are sharded and others are not.
    """,
    hints=(
        "First make the weights those of rank 0: broadcast_state(module). Then call fully_shard "
        "for each of `units`, and for the module last.",
        "Collect what all calls have in common in one dict: mesh, mp_policy where there is a "
        "dtype, offload_policy where offload is True. reshard_after_forward is for the units only.",
        f"{POLICY}, and CPUOffloadPolicy(pin_memory=torch.cuda.is_available()).",
    ),
    mistakes=r"""
        for unit in units: => for unit in []: ::
            Only the root was sharded, so the whole model comes at once. | {FIRST}
        for unit in units: => for unit in units[1:]: :: The first unit was not sharded by itself.
        return fully_shard(module, **options) => return module ::
            What is in no unit is not sharded. | After the units call fully_shard(module).
        broadcast_state(module) => pass ::
            Each rank keeps its own weights. | broadcast_state(module) comes before fully_shard.
        broadcast_state(module) => [dist.broadcast(p.detach(), 0) for p in module.parameters() if
            p.requires_grad] ::
            Frozen parameters keep each rank's own values. | broadcast_state(module)
        "mesh": mesh => "mesh": None ::
            The mesh is ignored: without one, fully_shard shards over all ranks. | mesh=mesh
        (module, **options) => (module, **{**options, "mesh": None}) ::
            The root does not get the mesh. | {BOTH}
        reshard_after_forward=reshard => reshard_after_forward=bool(reshard) ::
            reshard=None keeps the units. | None leaves it to PyTorch: hand `reshard` over as it is.
        fully_shard(unit, reshard_after_forward=reshard, **options) => fully_shard(unit, **options)
            :: `reshard` does not reach the units. | reshard_after_forward=reshard
        fully_shard(module, **options) => fully_shard(module, reshard_after_forward=True, **options)
            ::
            The root is freed after forward, and gathered again at once. | Only units get `reshard`.
        if dtype is not None: => if False: ::
            `dtype` is ignored, so weights travel in float32. | mp_policy={POLICY}
        , reduce_dtype=torch.float32) => ) ::
            Gradients are summed in a type of two bytes. | reduce_dtype=torch.float32
        if offload: => if False: ::
            `offload` is ignored. | offload_policy=CPUOffloadPolicy(...) for the units and the root
        if offload: => if True: ::
            A CPUOffloadPolicy was given although `offload` is False. | Ask for `offload`.
        broadcast_state(module)\n => broadcast_state(module)\n    module.to(dtype)\n ::
            The parameters themselves changed their type, so the optimizer steps short ones. | Leave
            out module.to(dtype): param_dtype of the mp_policy is enough.
    """,
    module=globals(),
)

# ---- 10.8 -----------------------------------------------------------------------------------


def mesh_seen(answer: Callable, case: Call, place: Place) -> dict:
    """The table of the mesh, its names and its device."""
    named = {} if case.device_type is None else {"device_type": case.device_type}
    mesh = answer(case.replicas, case.shards, **named)
    if not isinstance(mesh, DeviceMesh):
        raise malformed(mesh, "a DeviceMesh", "Return what init_device_mesh returns.")
    names = None if mesh.mesh_dim_names is None else list(mesh.mesh_dim_names)
    return {"ranks": mesh.mesh.tolist(), "names": names, "device": mesh.device_type}


NAMES = 'mesh_dim_names=("replicate", "shard")'
make_mesh = Spec(
    todo="10.8",
    truth=course.make_mesh,
    layouts=WORLD,
    cases=lambda n: [
        (1, 4, "cpu"),
        (4, 1, "cpu"),
        (2, 2, None),
        (2, 2, "meta"),
    ],
    observe=mesh_seen,
    guards_group=False,
    independent=True,
    advice={
        "ranks": "init_device_mesh numbers the ranks row by row: (replicas, shards).",
        "names": NAMES,
        "device": "Hand `device_type` over as it is.",
    },
    reasons="""
        Mesh should not be bigger than default world size :: The product of the mesh's sizes is not
            the number of ranks. | There are two sizes: `replicas` rows of `shards` ranks.
        mesh_dim_names :: There is one name for each dimension. | {NAMES}
    """,
    hints=(
        "A mesh is a table of the ranks. fully_shard takes its first dimension for the copies, and "
        "its last one for the shards of a copy.",
        "Call init_device_mesh with the device's type, the two sizes in that order, and the names "
        "as mesh_dim_names.",
    ),
    mistakes="""
        (replicas, shards) => (shards, replicas) :: The sizes have changed places: a row is a
            replica, and its ranks hold the shards. | Give (replicas, shards).
        (replicas, shards), mesh_dim_names=names => (4,), mesh_dim_names=names[1:] ::
            This mesh has one dimension, so there are no replicas.
        ("replicate", "shard") => ("shard", "replicate") :: The names have changed places: rows are
            replicas, and a row's ranks hold shards. | {NAMES}
        , mesh_dim_names=names => :: The names are missing.
        init_device_mesh(device_type, => init_device_mesh("cpu", ::
            The kind of device is ignored. | Hand `device_type` over as it is.
        instead lambda replicas, shards, device_type='cpu': DeviceMesh(device_type,
            torch.arange(replicas * shards).view(shards, replicas).T, mesh_dim_names=('replicate',
            'shard')) :: The ranks of a row are not consecutive, so a row can lie on several nodes.
            | init_device_mesh numbers them row by row.
    """,
    module=globals(),
)

# ---- 10.9 -----------------------------------------------------------------------------------

OLD = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
KEEPS = "SHARD_GRAD_OP and ZERO2 keep the weights whole until backward, as ZeRO stage 2."
HYBRID = "HYBRID means several copies of the model, so the mesh has a row for each."


def as_options(value: object) -> dict:
    """True or False, and the number of dimensions."""
    found = record(["reshard", "mesh_dims"], lambda one: one)(value)
    if not isinstance(found["reshard"], bool):
        raise malformed(found["reshard"], "True or False under 'reshard'")
    dims = found["mesh_dims"]
    if isinstance(dims, float) and dims.is_integer():
        dims = int(dims)
    return {"reshard": found["reshard"], "mesh_dims": integer(dims)}


options_of = Spec(
    todo="10.9",
    truth=course.options_of,
    cases=lambda: [(old,) for old in OLD],
    form=as_options,
    independent=True,
    tell=lambda case: f"options_of({case[0]!r})",
    advice={"reshard": KEEPS, "mesh_dims": HYBRID},
    hints=(
        "Ask two questions: is a unit freed after forward? And are there several copies of the "
        "model?",
        "SHARD_GRAD_OP is ZeRO stage 2: weights stay whole until backward. HYBRID means copies, so "
        "there is a second dimension. _HYBRID_SHARD_ZERO2 is both.",
    ),
    mistakes="""
        not keeps => keeps ::
            `reshard` is the wrong way round: True frees a unit after forward. | {KEEPS}
        not keeps => True :: Every strategy frees its units after forward.
        strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2") => strategy == "SHARD_GRAD_OP" ::
            _HYBRID_SHARD_ZERO2 is taken to free its units.
        strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2") => strategy != "FULL_SHARD" ::
            HYBRID_SHARD is taken to keep its units whole.
        2 if "HYBRID" in strategy else 1 => 1 ::
            Every strategy has a mesh of one dimension. | {HYBRID}
        "HYBRID" in strategy => strategy == "HYBRID_SHARD" ::
            _HYBRID_SHARD_ZERO2 is taken for one copy of the model.
        2 if "HYBRID" in strategy else 1 => 2 :: Every strategy has a mesh of two dimensions.
    """,
    module=globals(),
)

# ---- 10.10 ----------------------------------------------------------------------------------

RATE = 0.05
BATCH = 12


class WithLoss(nn.Module):
    """Tiny with its loss, in float64. It writes down its samples, and the loss's own gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.tiny = Tiny().double()
        self.dropout = nn.Dropout(0.0)
        self.samples: list[list[int]] = []
        self.scales: list[float] = []
        self.modes: set[bool] = set()

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss; inputs (B, 2) are a token and the sample's number."""
        loss = nn.functional.cross_entropy(self.tiny(inputs[:, 0]), targets)
        if loss.requires_grad:
            self.samples.append(inputs[:, 1].tolist())
            self.modes.add(self.training)
            loss.register_hook(lambda grad: self.scales.append(grad.item()))
        return loss


class Training(NamedTuple):
    """One call of train_sharded."""

    seed: int
    num_batches: int


def trained_seen(answer: Callable, case: Training, place: Place) -> dict:
    """Who took which samples, the units, and the weights that come back."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    model = cases.build(case.seed + dist.get_rank(), WithLoss)
    numbers = torch.arange(BATCH)
    pairs = [cases.token_batch(case.seed + step, BATCH) for step in range(case.num_batches)]
    batches = [(torch.stack([tokens, numbers], 1), targets) for tokens, targets in pairs]
    state = answer(model, list(model.tiny.blocks), cases.read_once(batches), RATE)
    if not isinstance(state, dict):
        raise malformed(state, "a dict of whole weights", "return full_state(sharded)")
    everyone: list = [None] * place.n
    dist.all_gather_object(everyone, model.samples)
    is_full = all(sorted(sum(one, [])) == numbers.tolist() for one in zip(*everyone, strict=False))
    kinds = sorted({type(value).__name__ for value in state.values()})
    return {
        "calls of the model": len(model.samples),
        "each sample of each batch is on exactly one rank": is_full,
        "all ranks have equally many samples": len({len(b) for s in everyone for b in s}) == 1,
        "the model is in train mode": model.modes == {True},
        "the gradients of the loss": model.scales,
        "units": sorted(
            n or "the root" for n, p in model.named_modules() if isinstance(p, FSDPModule)
        ),
        "kinds of the values returned": kinds,
        "names of the values returned": sorted(state),
        "the values returned": {
            name: integerof(value) for name, value in sorted(state.items()) if kinds == ["Tensor"]
        },
    }


STEP = "optimizer.step()"
OPTIMIZER = "torch.optim.AdamW(sharded.parameters(), learning_rate)"
SHARD = "torch_fsdp(model, units)"
EARLY = OPTIMIZER.replace("sharded", "model")
SHARE = "inputs[rank::world_size], targets[rank::world_size]"
train_sharded = Spec(
    todo="10.10",
    truth=course.train_sharded,
    layouts=(((0, 1),),),
    at_once=5,
    cases=lambda n: [Training(cases.draw_seed(), num) for num in (1, 3)],
    observe=trained_seen,
    limit_s=12,
    may_change=("the environment variables",),
    guards_group=False,
    tell=lambda case: f"train_sharded with {case.num_batches} batches",
    advice={
        "": "Shard, make the optimizer, train, collect the weights: in this order.",
        "the gradients of the loss": "Call backward() of the loss as it is: AdamW hides a factor.",
        "each sample of each batch is on exactly one rank": SHARE,
    },
    reasons="""
        can't optimize a non-leaf :: The optimizer was given tensors that are no parameters. | First
            torch_fsdp, then AdamW over its parameters.
        has no attribute 'units' :: full_state got a model that is not sharded. | torch_fsdp
    """,
    hints=(
        "In this order: shard, make the optimizer, train, collect the weights.",
        "A rank's samples are inputs[rank::world_size], and targets sliced in the same way.",
        "full_state(sharded) has collectives in it: every rank calls it, and it returns {} itself "
        "on ranks other than 0.",
    ),
    mistakes=r"""
        {SHARE} => inputs, targets :: Every rank works on the whole batch. | {SHARE}
        {SHARE} => inputs[:: world_size], targets[:: world_size] ::
            All ranks work on the same samples.
        {SHARE} => inputs[rank::world_size], targets.flip(0)[rank::world_size] ::
            The targets belong to other samples than the inputs.
        sharded = {SHARD}\n    optimizer = {OPTIMIZER} => optimizer = {EARLY}\n    sharded = {SHARD}
            :: The optimizer was made before sharding, and holds parameters that the model has no
            more. | First torch_fsdp, then AdamW over its parameters.
        AdamW(sharded => Adam(sharded ::
            This is Adam, without weight decay. | The docstring asks for AdamW.
        AdamW(sharded => SGD(sharded :: This is SGD.
        learning_rate)\n => 1e-3)\n ::
            The learning rate is not the one that was given. | AdamW(..., learning_rate)
        optimizer.zero_grad() => pass ::
            The gradients of all batches add up. | Call zero_grad() in each step.
        {STEP} => optimizer.zero_grad(); {STEP} ::
            The gradients are cleared before the optimizer steps. | zero_grad() comes last.
        {STEP} => pass :: The optimizer never steps. | optimizer.step() after each backward.
        torch_fsdp(model, units) => torch_fsdp(model, []) ::
            Only the root is a unit, so all weights are whole at once. | torch_fsdp(model, units)
        return full_state(sharded) => return {name: param.full_tensor() for name, param in
            sharded.state_dict().items()} ::
            Every rank returns the whole weights. | full_state(sharded) gives {} on other ranks.
        .backward() => .div(world_size).backward() :: The loss is divided by the number of ranks,
            although gradients are averaged already. | Call backward() of the loss as it is.
    """,
    module=globals(),
)
