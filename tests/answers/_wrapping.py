"""Answers to 10.6 to 10.9 as students give them; tests/answers/fsdp.py joins them."""

import copy
from collections import Counter
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from manyhands.data_parallel.replicas import broadcast_state
from manyhands.fsdp import fully_shard as wrapping

RIGHT: dict[str, list] = {
    "10.6": [wrapping.calls_per_step],
    "10.7": [wrapping.torch_fsdp],
    "10.8": [wrapping.make_mesh],
    "10.9": [wrapping.options_of],
    "10.10": [wrapping.train_sharded],
}
WRONG: dict[str, list] = {todo: [] for todo in RIGHT}


def right(todo):
    return lambda answer: RIGHT[todo].append(answer) or answer


def wrong(todo, words):
    return lambda answer: WRONG[todo].append((answer, words)) or answer


# ---- 10.6 calls_per_step --------------------------------------------------------------------


@right("10.6")
def calls_counted_one_by_one(num_blocks, reshard=True, replicas=1):
    found = Counter()
    for unit in range(num_blocks + 1):
        found["all_gather"] += 2 if reshard and unit > 0 else 1
        found["reduce_scatter"] += 1
        if replicas > 1:
            found["all_reduce"] += 1
    return found


def calls_with(gathers=None, reduces=None, averages=None):
    """A calls_per_step in which one count can be another: of units, blocks, reshard, replicas."""
    gathers = gathers or (lambda u, b, r, c: u + (b if r else 0))
    reduces = reduces or (lambda u, b, r, c: u)
    averages = averages or (lambda u, b, r, c: u if c > 1 else 0)

    def calls_per_step(num_blocks, reshard=True, replicas=1):
        given = num_blocks + 1, num_blocks, reshard, replicas
        counts = gathers(*given), reduces(*given), averages(*given)
        return dict(zip(("all_gather", "reduce_scatter", "all_reduce"), counts, strict=True))

    return calls_per_step


RIGHT["10.6"].append(calls_with(gathers=lambda u, b, r, c: 2 * u - 1 if r else u))
WRONG["10.6"] += [
    (calls_with(lambda u, b, r, c: 2 * u if r else u), "the root is counted twice"),
    (calls_with(lambda u, b, r, c: 2 * u), "the root is counted twice"),
    (calls_with(lambda u, b, r, c: 2 * b if r else b), "the root is a unit, too"),
    (calls_with(lambda u, b, r, c: u + b), "stay whole until their backward"),
    (calls_with(lambda u, b, r, c: u), "gathered again before its backward"),
    (calls_with(lambda u, b, r, c: u if r else u + b), "gathered again before its backward"),
    (calls_with(lambda u, b, r, c: u + b if r else u if b else 0), "not 1 - the root is a unit"),
    (calls_with(lambda u, b, r, c: u + b if r else 0), "needs its brackets"),
    (calls_with(reduces=lambda u, b, r, c: u * c), "inside its own copy of the model only"),
    (calls_with(lambda u, b, r, c: 12 * b + 4), "however many parameters it holds"),
    (calls_with(reduces=lambda u, b, r, c: 2 * u), "gradients are made once"),
    (calls_with(reduces=lambda u, b, r, c: u + b if r else u), "gradients are made once"),
    (calls_with(reduces=lambda u, b, r, c: b), "the root is a unit, too"),
    (calls_with(reduces=lambda u, b, r, c: 0), "have to reach the shards"),
    (calls_with(averages=lambda u, b, r, c: 0), "the rows have to be averaged as well"),
    (calls_with(averages=lambda u, b, r, c: int(c > 1)), "by itself, after its reduce_scatter"),
    (calls_with(averages=lambda u, b, r, c: u), "nobody to average with"),
    (calls_with(averages=lambda u, b, r, c: 1), "nobody to average with"),
    (calls_with(averages=lambda u, b, r, c: u * (c - 1)), "averages over all copies at once"),
    (calls_with(averages=lambda u, b, r, c: u * c * (c > 1)), "averages over all copies"),
    (calls_with(averages=lambda u, b, r, c: b * (c > 1)), "the root is a unit, too"),
    (calls_with(lambda u, b, r, c: dist.get_world_size() * u), "no message is needed"),
    (calls_with(lambda u, b, r, c: str(u)), "is a whole number"),
    (
        lambda num_blocks, reshard=True, replicas=1: (2 * num_blocks + 1, num_blocks + 1, 0),
        "a dict",
    ),
    (lambda num_blocks, reshard=True, replicas=1: {"gather": 7}, "use 'all_gather', 'reduce_sc"),
]


# ---- 10.7 torch_fsdp ------------------------------------------------------------------------


@right("10.7")
def fsdp_written_out(module, units, mesh=None, reshard=None, dtype=None, offload=False):
    broadcast_state(module)
    mp = MixedPrecisionPolicy(dtype, torch.float32) if dtype else MixedPrecisionPolicy()
    where = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
    for unit in reversed(units):
        fully_shard(
            unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=mp, offload_policy=where
        )
    fully_shard(module, mesh=mesh, mp_policy=mp, offload_policy=where)
    return module


@right("10.7")
def fsdp_with_a_root_that_is_kept(
    module, units, mesh=None, reshard=None, dtype=None, offload=False
):
    for param in module.parameters():
        dist.broadcast(param.detach(), src=0)
    options = {} if mesh is None else {"mesh": mesh}
    if dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for unit in units:
        if reshard is None:
            fully_shard(unit, **options)
        else:
            fully_shard(unit, reshard_after_forward=reshard, **options)
    return fully_shard(module, reshard_after_forward=False, **options)


def fsdp_with(
    broadcast=broadcast_state,
    units_of=lambda module, units: units,
    root=True,
    root_options=None,
    unit_options=None,
    policy=lambda dtype: MixedPrecisionPolicy(dtype, torch.float32),
    pin=False,
    to_dtype=False,
    back=lambda module: module,
    reshard_of=lambda reshard: reshard,
    **fixed,
):
    """A torch_fsdp in which one part can be another; `fixed` arguments stand for those given."""

    def torch_fsdp(module, units, mesh=None, reshard=None, dtype=None, offload=False):
        given = {"mesh": mesh, "reshard": reshard, "dtype": dtype, "offload": offload} | fixed
        broadcast(module)
        module.to(dtype if to_dtype else None)
        options = {"mesh": given["mesh"]}
        if given["dtype"] is not None:
            options["mp_policy"] = policy(given["dtype"])
        if given["offload"]:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=pin)
        for unit in units_of(module, units):
            options_here = options if unit_options is None else unit_options(options)
            kept = reshard_of(given["reshard"])
            fully_shard(unit, reshard_after_forward=kept, **options_here)
        if root:
            fully_shard(module, **(options if root_options is None else root_options(options)))
        return back(module)

    return torch_fsdp


def of_types(*kinds):
    return lambda module, units: [part for part in module.modules() if isinstance(part, kinds)]


def without(name):
    return lambda options: {key: value for key, value in options.items() if key != name}


def do_nothing(module):
    pass


WRONG["10.7"] += [
    (fsdp_with(units_of=of_types(nn.TransformerEncoderLayer)), "a test of types that matches noth"),
    (fsdp_with(units_of=of_types(nn.Linear)), "8 unit(s) were made, not 4"),
    (fsdp_with(units_of=lambda module, units: units[1:]), "blocks are left out"),
    (fsdp_with(root=False), "embedding.weight, head.weight, head.bias are whole on every rank"),
    (fsdp_with(broadcast=do_nothing), "the two replicas differ by up to"),
    (fsdp_with(mesh=None), "the mesh is ignored"),
    (fsdp_with(root_options=without("mesh")), "only some of the calls got the mesh"),
    (fsdp_with(reshard=None), "`reshard` does not reach the units"),
    (
        fsdp_with(root_options=lambda options: {**options, "reshard_after_forward": True}),
        "the root is freed after forward",
    ),
    (fsdp_with(dtype=None), "weights travel in float32"),
    (fsdp_with(policy=MixedPrecisionPolicy), "gradients are summed in bfloat16"),
    (
        fsdp_with(policy=lambda dtype: MixedPrecisionPolicy(dtype, *[torch.float32] * 2)),
        "output_dtype turns a result back",
    ),
    (fsdp_with(root_options=without("mp_policy")), "in some units weights travel in float32"),
    (fsdp_with(to_dtype=True), "became torch.bfloat16 - then the optimizer works in `dtype` too"),
    (fsdp_with(offload=True), "`offload` is False"),
    (fsdp_with(reshard_of=bool), "bool(None) is False"),
    (fsdp_with(units_of=lambda module, units: [list(units)]), "several blocks became one unit"),
    (fsdp_with(units_of=lambda module, units: module.children()), "can be no unit"),
    (
        fsdp_with(units_of=lambda module, units: units if dist.get_rank() == 0 else []),
        "every rank shards the same units",
    ),
    (fsdp_with(unit_options=without("mp_policy")), "the units and the root the same mp_policy"),
    (fsdp_with(offload=False), "`offload` is ignored"),
    (fsdp_with(root_options=without("offload_policy")), "reached the root - only some calls"),
    (fsdp_with(pin=True), "pin_memory=torch.cuda.is_available()"),
    (fsdp_with(back=do_nothing), "nothing is returned"),
    (lambda module, *_, **__: fully_shard(module, reshard=True), "reshard_after_forward=reshard"),
    (
        lambda module, units, **_: wrapping.torch_fsdp(copy.deepcopy(module), []),
        "the caller's own module has to be sharded",
    ),
    (lambda module, *_, **__: nn.parallel.DistributedDataParallel(module), "DDP keeps whole"),
    (lambda module, *_, **__: FullyShardedDataParallel(module), "that is the first FSDP"),
]


@wrong("10.7", "the root was sharded before its units")
def fsdp_from_the_root(module, units, mesh=None, reshard=None, dtype=None, offload=False):
    broadcast_state(module)
    fully_shard(module, mesh=mesh)
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    return module


@wrong("10.7", "cannot be broadcast like this")
def fsdp_broadcast_late(module, units, mesh=None, reshard=None, dtype=None, offload=False):
    for part in [*units, module]:
        fully_shard(part, mesh=mesh)
    broadcast_state(module)
    return module


# ---- 10.8 make_mesh -------------------------------------------------------------------------


@right("10.8")
def mesh_from_a_table(replicas, shards, device_type="cpu"):
    table = torch.arange(replicas * shards).reshape(replicas, shards)
    return DeviceMesh(device_type, table, mesh_dim_names=("replicate", "shard"))


def mesh_with(shape=lambda r, s: (r, s), names=("replicate", "shard"), kind=None):
    return lambda replicas, shards, device_type="cpu": init_device_mesh(
        kind or device_type, shape(replicas, shards), mesh_dim_names=names
    )


RIGHT["10.8"].append(mesh_with(names=["replicate", "shard"]))
WRONG["10.8"] += [
    (mesh_with(lambda r, s: (s, r)), "the sizes are swapped"),
    (mesh_with(names=("shard", "replicate")), "the names are swapped"),
    (mesh_with(lambda r, s: (s, r), ("shard", "replicate")), "the sizes are swapped"),
    (mesh_with(names=None), "the names are missing"),
    (mesh_with(names=("dp", "fsdp")), "the names are other ones"),
    (mesh_with(lambda r, s: (r * s,), ("shard",)), "a 1-D mesh only shards"),
    (mesh_with(lambda r, s: (r, s, 1), ("replicate", "shard", "x")), "the sizes are other ones"),
    (mesh_with(lambda r, s: (r, s * 2)), "the product of the mesh's sizes"),
    (mesh_with(kind="cpu"), "device_type='meta' is a mesh of 'cpu'"),
    (mesh_with(kind="cuda"), "hand `device_type` over as it is"),
    (mesh_with(names=("replicate",)), "one name for each dimension"),
    (lambda replicas, shards, device_type="cpu": (replicas, shards), "that is no mesh"),
]


@wrong("10.8", "are not consecutive")
def mesh_across_nodes(replicas, shards, device_type="cpu"):
    table = torch.arange(replicas * shards).reshape(shards, replicas).T
    return DeviceMesh(device_type, table, mesh_dim_names=("replicate", "shard"))


# ---- 10.9 options_of ------------------------------------------------------------------------

ALL = {
    "FULL_SHARD": {"reshard": True, "mesh_dims": 1},
    "SHARD_GRAD_OP": {"reshard": False, "mesh_dims": 1},
    "HYBRID_SHARD": {"reshard": True, "mesh_dims": 2},
    "_HYBRID_SHARD_ZERO2": {"reshard": False, "mesh_dims": 2},
}


def options_with(**others):
    """A table in which some entries are others."""
    return lambda strategy: others.get(strategy, ALL[strategy])


def option(reshard, mesh_dims):
    return {"reshard": reshard, "mesh_dims": mesh_dims}


RIGHT["10.9"] += [options_with(), options_with(FULL_SHARD=option(True, 1.0))]
WRONG["10.9"] += [
    (options_with(SHARD_GRAD_OP=option(True, 1)), "as ZeRO stage 2"),
    (options_with(FULL_SHARD=option(False, 1)), "it frees a unit after forward"),
    (options_with(HYBRID_SHARD=option(True, 1)), "a row for each copy"),
    (options_with(_HYBRID_SHARD_ZERO2=option(True, 2)), "as ZeRO stage 2"),
    (options_with(_HYBRID_SHARD_ZERO2=option(False, 1)), "begins with an underscore"),
    (options_with(FULL_SHARD=option(True, 2)), "there is nothing to replicate"),
    (options_with(FULL_SHARD=option(None, 1)), "None leaves it to PyTorch"),
    (options_with(HYBRID_SHARD=option("yes", 2)), "it is a yes or no"),
    (options_with(HYBRID_SHARD=option(True, (2, 2))), "the number of dimensions"),
    (options_with(FULL_SHARD=option(True, False)), "the number of dimensions is asked for"),
    (options_with(FULL_SHARD=(True, 1)), "the answer is a dict"),
    (options_with(FULL_SHARD={"reshard_after_forward": True}), "use 'reshard', 'mesh_dims'"),
    (lambda strategy: {"FULL_SHARD": ALL["FULL_SHARD"]}[strategy], "raised KeyError"),
]


# ---- 10.10 train_sharded --------------------------------------------------------------------


def trained(
    shard=wrapping.torch_fsdp,
    before=None,
    make=torch.optim.AdamW,
    rate=None,
    share=lambda part: part[dist.get_rank() :: dist.get_world_size()],
    share_targets=None,
    scale=1,
    zero_grad=True,
    clear_first=False,
    collect=wrapping.full_state,
    drop_last=False,
    anew=False,
):
    """A training with one thing done in another way."""

    def train(model, units, batches, learning_rate):
        lr = rate or learning_rate
        optimizer = make(model.parameters(), lr=lr) if before else None
        sharded = shard(model, units)
        optimizer = optimizer or make(sharded.parameters(), lr=lr)
        for inputs, targets in list(batches)[: -1 if drop_last else None]:
            optimizer = make(sharded.parameters(), lr=lr) if anew else optimizer
            loss = sharded(share(inputs), (share_targets or share)(targets))
            (loss * scale).backward()
            optimizer.zero_grad() if clear_first else None
            optimizer.step()
            if zero_grad:
                optimizer.zero_grad()
        return collect(sharded)

    return train


def shard_as_it_is(model, units):
    for part in [*units, model]:
        fully_shard(part)
    return model


def block_share(part):
    size = len(part) // dist.get_world_size()
    return part[dist.get_rank() * size :][:size]


def gathered_by_hand(sharded):
    whole = {name: param.full_tensor().detach() for name, param in sharded.state_dict().items()}
    return whole if dist.get_rank() == 0 else {}


def gathered_everywhere(sharded):
    return {name: param.full_tensor().detach() for name, param in sharded.state_dict().items()}


def gathered_on_rank_0(sharded):
    return gathered_everywhere(sharded) if dist.get_rank() == 0 else {}


def trained_and_collected_early(model, units, batches, learning_rate):
    early = wrapping.full_state(wrapping.torch_fsdp(model, units))
    trained(shard=lambda model, units: model)(model, units, batches, learning_rate)
    return early


def trained_on_batches_of_its_own(model, units, batches, learning_rate):
    own = list(batches)[dist.get_rank() :: dist.get_world_size()]
    return wrapping.train_sharded(model, units, own, learning_rate)


RIGHT["10.10"] += [
    trained(share=block_share),
    trained(collect=gathered_by_hand),
]


WRONG["10.10"] += [
    (trained(before=True), "made before sharding"),
    (trained(share=lambda part: part), "each rank works on the whole batch"),
    (trained(share=lambda part: part[:3]), "the ranks work on the same samples"),
    (trained(zero_grad=False), "gradients of all batches add up"),
    (trained(rate=1e-3), "the learning rate is not the one given"),
    (trained(make=torch.optim.SGD), "this is SGD"),
    (trained(anew=True), "made anew in each step"),
    (trained(drop_last=True), "called the model [2, 2, 2, 2] times"),
    (trained(collect=lambda sharded: sharded.state_dict()), "returned a "),
    (trained(collect=lambda sharded: None), "returned a NoneType"),
    (trained(collect=gathered_everywhere), "rank 1 returned a dict"),
    (trained(shard=shard_as_it_is), "the start is not rank 0's"),
    (trained(clear_first=True), "they were cleared after backward"),
    (trained_and_collected_early, "weights were collected before training"),
    (trained(make=torch.optim.Adam), "Adam, or no weight_decay"),
    (trained(make=partial(torch.optim.AdamW, weight_decay=0.0)), "Adam, or no weight_decay"),
    (trained(share_targets=block_share), "targets that are not theirs"),
    (trained(scale=0.25), "the gradient of the loss is 0.25, not 1"),
    (
        trained(make=lambda *_, **__: SimpleNamespace(step=dict, zero_grad=dict)),
        "step() is never called",
    ),
    (trained(shard=lambda model, units: model), "got a model that is not sharded"),
    (trained_on_batches_of_its_own, "trains on a share of every batch"),
    (trained(shard=lambda model, units: wrapping.torch_fsdp(model, [])), "1 unit(s) were made"),
    (trained(collect=gathered_on_rank_0), "not every rank makes the same calls"),
]
