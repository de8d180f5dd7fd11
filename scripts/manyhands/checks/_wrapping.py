"""Checks of 10.6 to 10.10: what fully_shard is told, and what it calls. fsdp.py joins them."""

import os
import random
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from manyhands.checks import Lesson, Wrong, ranks, told
from manyhands.checks.shared import Reasons, alone, because, build, run_backward, token_batch
from manyhands.fsdp import fully_shard as truth
from manyhands.instruments.ledger import Ledger, calls
from manyhands.ranks.failures import RankFailed

part = Lesson("fsdp")


class Seen(Exception):
    """Ends a rank with what is wrong: seen, smell and hint, one a line."""


def in_ranks(fn: Callable, world_size: int, answer, *args: object, reasons: Reasons) -> list:
    """`ranks`; a failure on a rank becomes a Wrong, with the exercise's reasons before others."""
    try:
        results = ranks(fn, world_size, answer, *args)
    except RankFailed as failed:
        failure = failed.failure
        if failure.error == "NotImplementedError" and failure.message.startswith("TODO"):
            raise
        if failure.error == "Seen":
            raise Wrong(*failure.message.split("\n")) from None
        raise because(failure, reasons, *told(failed, answer)) from None
    if None in results:
        raise Wrong("a rank left by sys.exit()", "", "let the function end, or return")
    return results


def _as_dict(found: object, keys: tuple[str, ...], said: str) -> Mapping:
    """`found`, if it is a dict of these keys; a Counter has 0 for those that are not there."""
    if not isinstance(found, Mapping):
        smell = "nothing is returned" if found is None else "the answer is a dict"
        wanted = ", ".join(f"{key!r}: ..." for key in keys)
        raise Wrong(f"{said} = {found!r}"[:200], smell, f"return {{{wanted}}}")
    if set(found) - set(keys) or (set(found) != set(keys) and not isinstance(found, Counter)):
        given, wanted = ", ".join(map(repr, found)), ", ".join(map(repr, keys))
        raise Wrong(f"{said} has the keys {given or 'of an empty dict'}", "", f"use {wanted}")
    return found


# ---- 10.6 -----------------------------------------------------------------------------------

OPS = ("all_gather", "reduce_scatter", "all_reduce")


@part.exercise(
    "10.6",
    "Count the units first: every block is one, and the root is one more.",
    "all_gather: each unit before its forward. A unit that was freed after forward has to be "
    "gathered again before its backward, and the root is not freed.",
    "reduce_scatter: each unit once, after its backward. all_reduce: each unit once more, but only "
    "where there are several copies of the model.",
)
def calls_per_step(answer) -> None:
    """Blocks freed and kept, one copy and several, and a root without blocks."""
    blocks, copies = random.sample(range(3, 20), 2), random.randint(3, 9)
    cases = [
        (blocks[0], True, 1),
        (blocks[1], False, 1),
        (blocks[1], True, copies),
        (blocks[0], False, 2),
        (0, True, 1),
        (0, False, copies),
    ]
    for case, found in zip(cases, alone(answer, cases, _call_said, {}, _count), strict=True):
        found = _as_dict(found, OPS, _call_said(*case))
        wanted = truth.calls_per_step(*case)
        for op in OPS:
            if found[op] != wanted[op]:
                seen = f"{_call_said(*case)}: {op} {found[op]!r} times, not {wanted[op]}"
                raise Wrong(seen, *_why_calls(op, found[op], *case))


def _call_said(num_blocks: int, reshard: bool, replicas: int) -> str:
    return f"calls_per_step({num_blocks}, reshard={reshard}, replicas={replicas})"


def _count(answer, num_blocks: int, reshard: bool, replicas: int) -> object:
    return answer(num_blocks, reshard=reshard, replicas=replicas)


ROOT = ("the root is a unit, too: it holds embedding and head", "units = num_blocks + 1")
NOBODY = ("one copy of the model has nobody to average with", "0 where replicas is 1")
EVERY = ("one all_reduce averages over all copies at once", "ask only: is there more than one?")


def _miscounts(blocks: int, replicas: int) -> dict[str, list[tuple]]:
    """For each operation: a wrong number of calls, its smell and its hint."""
    units = blocks + 1
    return {
        "all_gather": [
            (blocks, *ROOT),
            (2 * blocks, *ROOT),
            (2 * units, "the root is counted twice; it is not freed", "gather only blocks again"),
            (units, "a freed block is gathered again before its backward", "add the blocks again"),
            (units + blocks, "blocks kept stay whole until their backward", "ask for `reshard`"),
            (
                0,
                "does an `if` take in the whole sum?",
                "a + (b if reshard else 0) needs its brackets",
            ),
        ],
        "reduce_scatter": [
            (blocks, *ROOT),
            (0, "the mean gradients have to reach the shards", "one for each unit"),
        ],
        "all_reduce": [
            (0, "rows have only sums of their own: the rows have to be averaged as well", ""),
            (
                1,
                "the units are not ready at once",
                "average each by itself, after its reduce_scatter",
            ),
            (units * (replicas - 1), *EVERY),
            (units * replicas, *EVERY),
            (blocks, *ROOT),
            (2 * blocks + 1, "gradients are averaged once, in backward", "one for each unit"),
        ],
    }


def _why_calls(op: str, found: object, blocks: int, reshard: bool, replicas: int) -> tuple:
    """Smell and hint of the mistake that gives this number of calls."""
    units = blocks + 1
    known = [why for wrong, *why in _miscounts(blocks, replicas)[op] if found == wrong]
    if op == "all_reduce" and replicas == 1 and isinstance(found, int):
        return NOBODY
    if op == "reduce_scatter" and replicas > 1 and found == units * replicas:
        return "a rank reduces inside its own copy of the model only", "one for each unit"
    if not known and op == "reduce_scatter" and isinstance(found, int) and found > units:
        return "weights are needed twice, gradients are made once", "one for each unit"
    if not known and isinstance(found, float | str | Tensor | list | None):
        return "a number of calls is a whole number", "return three whole numbers"
    return known[0] if known else ("one unit is one call, however many parameters it holds", "")


# ---- 10.7 -----------------------------------------------------------------------------------

BLOCKS = ("blocks.0", "blocks.1", "blocks.2")
NUM_RANKS, RATE = 4, 0.5
WRAPS: list[tuple[int, int, dict]] = [  # dimensions of the mesh, steps, and what is asked for
    (2, 2, {"reshard": True}),
    (1, 1, {}),
    (1, 1, {"reshard": False, "dtype": torch.bfloat16}),
    (2, 1, {"offload": True}),
]
ROOT_FIRST = (
    "the root was sharded before its units: one call takes all parameters that are still free",
    "first fully_shard each of `units`, then the module itself",
)
UNLIKE = (
    "the ranks sharded, or called, different parts of the model in the same turn",
    "every rank shards the same units, and trains on a share of every batch",
)
OWN_NAMES = "fully_shard has its own names"
WRAPPING: Reasons = {
    "Cannot access accelerator": (
        "CPUOffloadPolicy pins memory by default, for faster copies to a GPU; here is none",
        "pin_memory=torch.cuda.is_available()",
    ),
    "Invariant encountered": ROOT_FIRST,
    "non-CPU accelerator": ("that is the first FSDP, and it wants a GPU", "call fully_shard"),
    "does not have a sharding strategy": (
        "the parameters are cut already, and a DTensor cannot be broadcast like this",
        "make the weights equal first, then shard",
    ),
    "must have the same dtype": (
        "some units compute in `dtype` and others do not, or output_dtype turns a result back",
        "give the units and the root the same mp_policy, with param_dtype and reduce_dtype only",
    ),
    "can only be applied to a module once": ("a module was sharded twice", "once for each"),
    "unexpected keyword argument 'reshard'": (OWN_NAMES, "reshard_after_forward=reshard"),
    "unexpected keyword argument 'dtype'": (OWN_NAMES, "mp_policy=MixedPrecisionPolicy(...)"),
    "different size or type": UNLIKE,
    "containers that do not": ("a list of layers can be no unit", "fully_shard each of `units`"),
    "got mixed": ("some parameters are cut and others are not", "shard the root as well"),
}


class Tiny(nn.Module):
    """Three blocks between an embedding and a head; no size is a multiple of the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)) for _ in BLOCKS
        )
        self.head = nn.Linear(6, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)  # (B, 11)


@part.exercise(
    "10.7",
    "First make the weights those of rank 0: broadcast_state(module). Then call fully_shard for "
    "each of `units`, and for the module last.",
    "Collect what all calls have in common in one dict: mesh, mp_policy where there is a dtype, "
    "offload_policy where offload is True. The reshard_after_forward is for the units only.",
    "MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32), and "
    "CPUOffloadPolicy(pin_memory=torch.cuda.is_available()).",
)
def torch_fsdp(answer) -> None:
    """Four ways to shard three blocks on 4 ranks, each rank with other weights at first."""
    seed = random.randrange(10_000)
    results = in_ranks(_wrapped_seen, NUM_RANKS, answer, seed, reasons=WRAPPING)
    for number, (dims, num_steps, options) in enumerate(WRAPS):
        seen = [result[number] for result in results]
        case = f"{dims}-D mesh, {', '.join(f'{k}={v}' for k, v in options.items())}".rstrip(", ")
        _compare_units(seen[0], case)
        _compare_mesh(seen[0]["meshes"], dims, case)
        if seen[0]["kinds"] != ["torch.float32"]:
            raise Wrong(
                f"{case}: the parameters, of float32, became {', '.join(seen[0]['kinds'])}",
                "then the optimizer works in `dtype` too, and small steps are lost",
                "no module.to(dtype): param_dtype of the mp_policy leaves the shards as they are",
            )
        if "dtype" not in options:
            _compare_weights([rank["weights"] for rank in seen], seed, num_steps, case)
        _compare_wrapped_calls(seen[0]["calls"], dims, options, case)
        if "dtype" in options:
            _compare_types(seen[0]["bytes"], results[0][1]["bytes"], case)
        _compare_offload(seen[0]["offloads"], options.get("offload", False), case)


def _wrapped_seen(answer, seed: int) -> list[dict]:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these ranks compute on the CPU, wherever they are
    rank = dist.get_rank()
    meshes = {
        1: init_device_mesh("cpu", (NUM_RANKS,)),
        2: truth.make_mesh(2, NUM_RANKS // 2),
    }
    seen = []
    for dims, num_steps, options in WRAPS:
        module = build(seed + rank, Tiny)
        try:
            returned = answer(module, list(module.blocks), mesh=meshes[dims], **options)
        except Exception:
            if isinstance(module, FSDPModule) and not isinstance(module.blocks[0], FSDPModule):
                raise Seen("\n".join(("fully_shard(block) fails", *ROOT_FIRST))) from None
            raise
        seen.append({**_steps_seen(module, seed, num_steps), **_kinds_seen(module, returned)})
    return seen


def _steps_seen(module: nn.Module, seed: int, num_steps: int) -> dict:
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    for step in range(num_steps):
        optimizer.zero_grad()
        with Ledger() as ledger:
            run_backward(module, token_batch(seed + step)[:, dist.get_rank() :: NUM_RANKS])
        optimizer.step()
    return {
        "calls": calls(ledger.entries),
        "bytes": [(entry.op, entry.nbytes) for entry in ledger.entries],
        "weights": {name: _whole(param) for name, param in module.named_parameters()},
    }


def _whole(param: Tensor) -> Tensor:
    whole = param.full_tensor() if isinstance(param, DTensor) else param
    return whole.detach().clone()


def _kinds_seen(module: nn.Module, returned: object) -> dict:
    """What kinds of objects were made, in words and numbers that can be sent."""
    units = {name: part for name, part in module.named_modules() if isinstance(part, FSDPModule)}
    return {
        "returned": "itself" if returned is module else type(returned).__name__,
        "units": list(units),
        "kinds": sorted({str(param.dtype) for param in module.parameters()}),
        "plain": [n for n, p in module.named_parameters() if not isinstance(p, DTensor)],
        "meshes": {
            name: tuple(param.device_mesh.shape)
            for name, param in module.named_parameters()
            if isinstance(param, DTensor)
        },
        "offloads": {name: _offloads(unit) for name, unit in units.items()},
    }


def _offloads(unit: FSDPModule) -> bool:
    """Was this unit given a CPUOffloadPolicy? On a CPU there is no other trace of it."""
    group = unit._get_fsdp_state()._fsdp_param_group
    return group is not None and isinstance(group.offload_policy, CPUOffloadPolicy)


def _compare_units(seen: dict, case: str) -> None:
    units, plain, num_gathers = seen["units"], seen["plain"], seen["calls"]["all_gather"]
    told_units = f"{case}: {len(units)} unit(s) were made, not 4 (three blocks and the root)"
    if seen["returned"] != "itself":
        given = seen["returned"]
        if given == "DistributedDataParallel":
            smell = "DDP keeps whole weights, gradients and optimizer state on every rank"
        elif given == "NoneType":
            smell = "nothing is returned"
        else:
            smell = "fully_shard works in place: the caller's own module has to be sharded"
        raise Wrong(f"{case}: a {given} came back", smell, "shard `module` itself, and return it")
    if not units:
        raise Wrong(told_units, "nothing is sharded", "call fully_shard")
    if units == [""]:
        raise Wrong(
            f"{told_units}: {num_gathers} all_gather(s) a step bring the whole model at once",
            "one call makes one unit of all that is left; a test of types that matches nothing "
            "does the same",
            "call fully_shard for each of `units` before the root",
        )
    if "" not in units:
        raise Wrong(
            f"{told_units}: {', '.join(plain)} are whole on every rank",
            "what is in no unit is not sharded, and its gradients are not averaged",
            "after the blocks call fully_shard(module)",
        )
    if set(units) != {"", *BLOCKS}:
        found = ", ".join(unit or "the root" for unit in units)
        smell = "more units, more and smaller messages" if len(units) > 4 else "blocks are left out"
        raise Wrong(f"{told_units}: {found}", smell, "one for each of `units`, and the root")


def _compare_mesh(meshes: dict[str, tuple], dims: int, case: str) -> None:
    wanted = (NUM_RANKS,) if dims == 1 else (2, NUM_RANKS // 2)
    wrong = {name: shape for name, shape in meshes.items() if shape != wanted}
    if wrong:
        name, shape = next(iter(wrong.items()))
        smell = "the mesh is ignored: without one fully_shard cuts over all ranks"
        if len(wrong) < len(meshes):
            smell = "only some of the calls got the mesh"
        raise Wrong(
            f"{case}: {len(wrong)} of {len(meshes)} parameters, such as {name}, lie on a mesh of "
            f"{shape}, not {wanted}",
            smell,
            "give mesh=mesh to the units and to the root",
        )


def _compare_weights(weights: list[dict], seed: int, num_steps: int, case: str) -> None:
    model = build(seed, Tiny)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(num_steps):
        optimizer.zero_grad()
        run_backward(model, token_batch(seed + step))
        optimizer.step()
    one_process = {name: param.detach() for name, param in model.named_parameters()}
    off = max(_gap(rank, one_process) for rank in weights)
    rows = _gap(weights[0], weights[-1])
    if off < 1e-4:
        return
    seen = f"{case}: after {num_steps} step(s) the weights are up to {off:.2g} off"
    if rows > 1e-4:
        seen = f"{case}: after {num_steps} step(s) the two replicas differ by up to {rows:.2g}"
    raise Wrong(
        f"{seen}; each rank had built other weights",
        "fully_shard takes each rank's own weights as they are, and makes nothing equal",
        "broadcast_state(module) before the first fully_shard",
    )


def _gap(one: dict, other: dict) -> float:
    return max((one[name] - value).abs().max().item() for name, value in other.items())


def _compare_wrapped_calls(found: Counter, dims: int, options: dict, case: str) -> None:
    reshard = options.get("reshard") is not False
    wanted = truth.calls_per_step(len(BLOCKS), reshard, dims)
    gathers, expected = found["all_gather"], wanted["all_gather"]
    seen = f"{case}: {gathers} all_gathers in a step, not {expected}"
    if gathers == expected + 1:
        smell = "the root is freed after forward, and gathered again at once for backward"
        raise Wrong(seen, smell, "give reshard_after_forward to the units only")
    if found["reduce_scatter"] < wanted["reduce_scatter"]:
        smell = "several blocks became one unit, and come together"
        raise Wrong(seen, smell, "call fully_shard for each of `units` by itself")
    if gathers != expected and options.get("reshard") is None:
        smell = "reshard=None leaves it to PyTorch, which frees the units; here they were kept"
        raise Wrong(seen, smell, "hand `reshard` over as it is: bool(None) is False")
    if gathers != expected:
        smell = "`reshard` does not reach the units"
        raise Wrong(seen, smell, "reshard_after_forward=reshard for each unit")
    for op, count in wanted.items():
        if found[op] != count:
            raise Wrong(
                f"{case}: {found[op]} {op}s in a step, not {count}", "", "one for each unit"
            )


def _compare_types(entries: list[tuple], plain: list[tuple], case: str) -> None:
    """`plain` are the messages of the same model without a dtype."""
    sent, whole = (
        {op: max(nbytes for name, nbytes in some if name == op) for op in OPS[:2]}
        for some in (entries, plain)
    )
    told_bytes = "{}: the largest {} has {} bytes; in float32 it has {}"
    is_some = {entry for entry in entries if entry[0] == "all_gather"} - set(plain)
    if sent["all_gather"] == whole["all_gather"]:
        raise Wrong(
            told_bytes.format(case, "all_gather", sent["all_gather"], whole["all_gather"]),
            f"{'in some units' if is_some else '`dtype` is ignored:'} weights travel in float32",
            "mp_policy=MixedPrecisionPolicy(param_dtype=dtype, ...) for the units and the root",
        )
    if sent["reduce_scatter"] != whole["reduce_scatter"]:
        raise Wrong(
            told_bytes.format(
                case, "reduce_scatter", sent["reduce_scatter"], whole["reduce_scatter"]
            ),
            "gradients are summed in bfloat16, where small ones are lost; that is what happens if "
            "reduce_dtype is not given",
            "reduce_dtype=torch.float32",
        )


def _compare_offload(offloads: dict[str, bool], wanted: bool, case: str) -> None:
    if not wanted and any(offloads.values()):
        seen = f"{case}: a CPUOffloadPolicy was given, and `offload` is False"
        smell = "each step would wait for weights that come from the CPU's memory"
        raise Wrong(seen, smell, "offload_policy only where offload is True")
    wrong = [name or "the root" for name, is_there in offloads.items() if not is_there]
    if wanted and wrong:
        raise Wrong(
            f"{case}: no CPUOffloadPolicy reached {', '.join(wrong)}",
            "`offload` is ignored" if len(wrong) == len(offloads) else "only some calls got it",
            "offload_policy=CPUOffloadPolicy(...) for the units and for the root",
        )


# ---- 10.8 -----------------------------------------------------------------------------------

NAMES = ("replicate", "shard")
HOW = 'init_device_mesh(device_type, (replicas, shards), mesh_dim_names=("replicate", "shard"))'
DEVICE = ("the kind of device is the caller's to say", "hand `device_type` over as it is")
MESHING: Reasons = {
    "Mesh should not be bigger than default world size": (
        "the product of the mesh's sizes is not the number of ranks",
        "two sizes: replicas rows of shards ranks",
    ),
    **dict.fromkeys(("cuda", "CUDA", "NVIDIA"), DEVICE),
    "mesh_dim_names": ("there is one name for each dimension", 'two: "replicate" and "shard"'),
}


@part.exercise(
    "10.8",
    "A mesh is a table of the ranks. fully_shard takes its first dimension for the copies, and its "
    "last one for the shards of a copy.",
    "Call init_device_mesh with the device's type, the two sizes in that order, and the names as "
    "mesh_dim_names.",
)
def make_mesh(answer) -> None:
    """4 ranks as 1 x 4, 4 x 1 and 2 x 2, and another kind of device that every machine has."""
    shapes = [(1, 4, "cpu"), (4, 1, "cpu"), (2, 2, "cpu"), (2, 2, "meta")]
    seen = in_ranks(_meshes_seen, 4, answer, shapes, reasons=MESHING)[0]
    for (replicas, shards, device), (kind, table, names, found) in zip(shapes, seen, strict=True):
        said = f"make_mesh(replicas={replicas}, shards={shards}) on 4 ranks"
        wanted = torch.arange(4).view(replicas, shards).tolist()
        if kind != "DeviceMesh":
            smell = "nothing is returned" if kind == "NoneType" else "that is no mesh"
            raise Wrong(f"{said} returned a {kind}", smell, HOW)
        if table != wanted:
            raise Wrong(f"{said} is {table}, not {wanted}", *_why_mesh(table, replicas, shards))
        if names != NAMES:
            smell = "the names are missing" if not names else "the names are other ones"
            if names == NAMES[::-1]:
                smell = "the names are swapped: rows are replicas, and a row's ranks hold shards"
            raise Wrong(f"{said} has the names {names}", smell, f"mesh_dim_names={NAMES}")
        if found != device:
            raise Wrong(f"{said}, device_type={device!r} is a mesh of {found!r}", *DEVICE)


def _meshes_seen(answer, shapes: list[tuple]) -> list[tuple]:
    seen = []
    for replicas, shards, device in shapes:
        mesh = answer(replicas, shards, device_type=device)
        if not isinstance(mesh, DeviceMesh):
            return [(type(mesh).__name__, None, None, None)] * len(shapes)
        table = mesh.mesh.tolist()
        seen.append(("DeviceMesh", table, mesh.mesh_dim_names, mesh.device_type))
    return seen


def _why_mesh(table: list, replicas: int, shards: int) -> tuple[str, str]:
    shape = tuple(torch.tensor(table).shape)
    if len(shape) == 1:
        return "a 1-D mesh only shards: there are no replicas", "two sizes: (replicas, shards)"
    if shape == (shards, replicas) and shards != replicas:
        return "the sizes are swapped: replicas are the rows", "(replicas, shards)"
    if shape == (replicas, shards):
        smell = "the ranks of a row, which share one copy, are not consecutive: on other nodes"
        return smell, "init_device_mesh numbers them row by row"
    return "the sizes are other ones", "(replicas, shards)"


# ---- 10.9 -----------------------------------------------------------------------------------

OLD = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
KEYS = ("reshard", "mesh_dims")


@part.exercise(
    "10.9",
    "Two questions: is a unit freed after forward? And are there several copies of the model?",
    "SHARD_GRAD_OP is ZeRO stage 2: weights stay whole until backward. HYBRID means copies, so a "
    "second dimension. _HYBRID_SHARD_ZERO2 is both.",
)
def options_of(answer) -> None:
    """All four names."""
    for strategy, found in zip(
        OLD, alone(answer, [(old,) for old in OLD], "options_of({!r})".format, {}), strict=True
    ):
        said = f"options_of({strategy!r})"
        found = _as_dict(found, KEYS, said)
        for key, wanted in truth.options_of(strategy).items():
            if found[key] != wanted:
                seen = f"{said} says {key} = {found[key]!r}, not {wanted}"
                raise Wrong(seen, *_why_option(strategy, key, found[key]))


def _why_option(strategy: str, key: str, found: object) -> tuple[str, str]:
    if key == "mesh_dims":
        if not isinstance(found, int) or isinstance(found, bool):
            return "the number of dimensions is asked for", "1 or 2"
        if strategy.startswith("_") and found == 1:
            return (
                "its name begins with an underscore, and it is hybrid too",
                '"HYBRID" in strategy',
            )
        if "HYBRID" in strategy:
            return "hybrid: copies of the model, each cut into shards", "a row for each copy: 2-D"
        return "all ranks share one copy: there is nothing to replicate", "1-D"
    if found is None:
        return "None leaves it to PyTorch, which frees the units", "True or False"
    if not isinstance(found, bool):
        return "it is a yes or no", "True or False"
    if found:
        return (
            "SHARD_GRAD_OP and ZERO2 shard gradients and optimizer state, as ZeRO stage 2: whole "
            "weights stay from forward to backward",
            "False for these two",
        )
    return "it frees a unit after forward, and gathers it again", "True"


# ---- 10.10 ----------------------------------------------------------------------------------

LEARNING_RATE, NUM_BATCHES, BATCH = 0.05, 3, 12
STALE = (
    "the optimizer was made before sharding: it holds parameters that the model no longer has",
    "first torch_fsdp, then AdamW over its parameters",
)
CLEARED = (
    "the optimizer found no gradients: they were cleared after backward, or it steps before it",
    "backward, then step(), and zero_grad() last",
)
EARLY = ("these weights were collected before training", "full_state after the last step")
TRAINING: Reasons = {
    "can't optimize a non-leaf": STALE,
    "has no attribute 'units'": ("full_state got a model that is not sharded", "torch_fsdp first"),
    "different size or type": UNLIKE,
    "mixed torch.Tensor and DTensor": (
        "parameters and data of two kinds meet",
        "shard the whole model, and give it plain tensors",
    ),
}


class WithLoss(nn.Module):
    """Tiny with its loss. It writes down its samples, and the gradient that its loss gets."""

    def __init__(self) -> None:
        super().__init__()
        self.tiny, self.log, self.targets, self.scales = Tiny(), [], [], []
        self.start: list[float] | None = None  # a weight of the root, which is whole in forward

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(self.tiny(inputs[:, 0]), targets)
        if self.training and loss.requires_grad:
            self.log.append(inputs[:, 1].tolist())  # the number of each sample
            self.targets.append(targets.tolist())
            loss.register_hook(lambda grad: self.scales.append(grad.item()))
            bias = self.tiny.head.bias
            if self.start is None and not isinstance(bias, DTensor):
                self.start = bias.tolist()
        return loss


def _batches(seed: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs (B, 2): a token and the sample's number; targets (B,)."""
    pairs = [token_batch(seed + step, BATCH) for step in range(NUM_BATCHES)]
    numbers = torch.arange(BATCH)
    return [(torch.stack([tokens, numbers], dim=1), targets) for tokens, targets in pairs]


@part.exercise(
    "10.10",
    "In this order: shard, make the optimizer, train, collect the weights.",
    "A rank's samples are inputs[rank::world_size], and targets cut in the same way.",
    "full_state(sharded) has collectives in it: every rank calls it, and it returns {} itself on "
    "ranks other than 0.",
)
def train_sharded(answer) -> None:
    """Three batches on 4 ranks, each rank with other weights at first."""
    seed = random.randrange(10_000)
    results = in_ranks(_trained_seen, NUM_RANKS, answer, seed, reasons=TRAINING)
    _compare_samples([result["log"] for result in results])
    for rank, result in enumerate(results):
        _look_at_loss(rank, result, seed)
    for rank, result in enumerate(results):
        _look_at_state(rank, result)
    _compare_trained(results[0], seed)
    units = results[0]["units"]
    if units != 4:
        seen = f"{units} unit(s) were made, not 4 (three blocks and the root)"
        raise Wrong(seen, "weights are whole on every rank for longer than needed", "torch_fsdp")


def _trained_seen(answer, seed: int) -> dict:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    model = build(seed + dist.get_rank(), WithLoss)
    steps: list[tuple[bool, bool]] = []  # of each step: are these the model's, with gradients?

    def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
        stepped = [param for group in optimizer.param_groups for param in group["params"]]
        own = {id(param) for param in model.parameters()}
        has_grad = any(param.grad is not None and param.grad.any() for param in stepped)
        steps.append((any(id(param) in own for param in stepped), has_grad))

    register_optimizer_step_pre_hook(look)
    found = answer(model, list(model.tiny.blocks), iter(_batches(seed)), LEARNING_RATE)
    kinds = {type(value).__name__ for value in found.values()} if isinstance(found, dict) else set()
    state = {name: value.detach() for name, value in found.items()} if kinds == {"Tensor"} else {}
    units = sum(isinstance(module, FSDPModule) for module in model.modules())
    about = "{}" if found == {} else f"a {type(found).__name__}"
    written = {name: getattr(model, name) for name in ("log", "targets", "scales", "start")}
    about_state = {"state": state, "kinds": kinds, "about": about, "units": units}
    return {**written, **about_state, "steps": steps}


def _look_at_loss(rank: int, result: dict, seed: int) -> None:
    """A rank's own targets in each batch, and a loss whose gradient is 1."""
    for (_, targets), numbers, found in zip(
        _batches(seed), result["log"], result["targets"], strict=True
    ):
        if targets[numbers].tolist() != found:
            seen = f"rank {rank} took samples {numbers}, and targets that are not theirs"
            raise Wrong(seen, "a sample learns another one's target", "cut both in the same way")
    off = [scale for scale in result["scales"] if abs(scale - 1) > 1e-6]
    if off:
        raise Wrong(
            f"rank {rank}: the gradient of the loss is {off[0]:g}, not 1",
            "the gradients are averaged over the ranks already; AdamW hides the factor",
            "backward() of the loss as it is",
        )


def _compare_samples(logs: list[list[list[int]]]) -> None:
    """Every sample of every batch on one rank, all ranks as many."""
    for step in range(NUM_BATCHES):
        if any(len(log) != NUM_BATCHES for log in logs):
            counts = [len(log) for log in logs]
            seen = f"the ranks called the model {counts} times for {NUM_BATCHES} batches"
            raise Wrong(seen, "each batch is one forward on every rank", "one call a batch")
        shares = [log[step] for log in logs]
        if sorted(number for share in shares for number in share) == list(range(BATCH)):
            if len({len(share) for share in shares}) == 1:
                continue
        smell = "some samples are left out, or the shares are not equal"
        if shares[0] == shares[1]:
            smell = "the ranks work on the same samples"
        if len(shares[0]) == BATCH:
            smell = "each rank works on the whole batch"
        seen = f"of samples 0 to {BATCH - 1} rank 0 took {shares[0]}, rank 1 {shares[1]}"
        raise Wrong(seen, smell, "a rank takes every world_size-th sample, from its own rank on")


def _look_at_state(rank: int, result: dict) -> None:
    about, kinds = result["about"], result["kinds"]
    if rank > 0 and about != "{}":
        smell = "only rank 0 needs the whole weights; elsewhere they would fill the memory"
        raise Wrong(f"rank {rank} returned {about}, not {{}}", smell, "full_state does it for you")
    if rank == 0 and kinds != {"Tensor"}:
        seen = f"rank 0 returned {about}" + (f" of {', '.join(sorted(kinds))}" if kinds else "")
        smell = "these are shards" if "DTensor" in kinds else "the whole weights are asked for"
        raise Wrong(seen, smell, "return full_state(sharded)")


def _compare_trained(result: dict, seed: int) -> None:
    """The weights of one process, or those of a mistake with a name."""
    state, steps = result["state"], result["steps"]
    train = partial(_train_alone, seed)
    wanted = train()
    if set(state) != set(wanted) or any(state[n].shape != wanted[n].shape for n in wanted):
        seen = f"rank 0 returned the names {', '.join(list(state)[:3])}, ..."
        raise Wrong(seen, "names and shapes are those of the model", "return full_state(sharded)")
    if _same(state, wanted):
        return
    decay = ("the weights do not shrink as with AdamW: Adam, or no weight_decay", "AdamW as it is")
    mistakes = {
        EARLY: train(num_batches=0),
        decay: train(torch.optim.Adam),
        ("gradients of all batches add up", "zero_grad() in each step"): train(zero_grad=False),
        ("the learning rate is not the one given", "AdamW(..., learning_rate)"): train(rate=1e-3),
        ("this is SGD", "the docstring asks for AdamW"): train(torch.optim.SGD),
        ("the optimizer is made anew in each step", "once, before the loop"): train(anew=True),
        ("the last batch is left out", "step after every batch"): train(
            num_batches=NUM_BATCHES - 1
        ),
    }
    off = max((state[name] - wanted[name]).abs().max().item() for name in wanted)
    seen = f"after {NUM_BATCHES} batches a weight is {off:.2g} off that of one process"
    named = [why for why, weights in mistakes.items() if _same(state, weights)]
    first = build(seed, WithLoss).tiny.head.bias
    if result["start"] is not None and result["start"] != first.tolist():
        smell = "the start is not rank 0's: fully_shard takes each rank's own weights"
        named = [(smell, "torch_fsdp makes them equal before it shards")]
    elif not steps:
        named = [("step() is never called", "after each backward")]
    elif not any(has_grad for _, has_grad in steps):
        named = [CLEARED] if any(is_own for is_own, _ in steps) else [STALE]
    otherwise = ("is the start rank 0's, and is each step taken once?", "compare with one process")
    raise Wrong(seen, *(named[0] if named else otherwise))


def _train_alone(
    seed: int,
    make: type = torch.optim.AdamW,
    rate: float = LEARNING_RATE,
    zero_grad: bool = True,
    anew: bool = False,
    num_batches: int = NUM_BATCHES,
) -> dict[str, Tensor]:
    model = build(seed, WithLoss)
    optimizer = make(model.parameters(), lr=rate)
    for inputs, targets in _batches(seed)[:num_batches]:
        optimizer = make(model.parameters(), lr=rate) if anew else optimizer
        model(inputs, targets).backward()
        optimizer.step()
        if zero_grad:
            optimizer.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items()}


def _same(state: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.allclose(state[name], other[name], atol=1e-4) for name in other)
