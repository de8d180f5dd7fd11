"""Checks of lesson 06. Truth is one process on all the data, or the statement in the docstring.

Each check runs the learner's code on ranks, brings home what was seen, and then compares it with
the mistakes that people make most, so that the verdict can name the one at hand.
"""

import contextlib
import inspect
import os
import random
import socket
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from manyhands.checks import Lesson, Wrong, ranks
from manyhands.checks.shared import (
    Probe,
    build,
    check_group,
    close,
    gradients_of,
    run_backward,
    token_batch,
)
from manyhands.ranks.runtime import World

lesson = Lesson("ddp")
hint, summary, ready, keep = lesson.hint, lesson.summary, lesson.ready, lesson.keep


# ---- 6.1 ------------------------------------------------------------------------------------


@lesson.exercise(
    "6.1",
    "The values in `environ` are text. `int(environ.get('RANK', 0))` reads one.",
    "Two questions decide the device: how many GPUs are here, and how many processes share them.",
    "torch.device(f'cuda:{local_rank}') when num_gpus >= LOCAL_WORLD_SIZE, else "
    "torch.device('cpu').",
)
def place(answer) -> None:
    """One process of several jobs: two nodes, one node, no GPU, too few GPUs, no torchrun."""
    local, node = random.randrange(1, 4), random.randrange(1, 3)
    second_node = {
        "RANK": str(4 * node + local),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": "12",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "node0",
    }
    one_node = {**second_node, "RANK": str(local), "WORLD_SIZE": "4"}
    three_a_node = {**second_node, "RANK": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
    for environ, num_gpus in [
        (one_node, 8),
        (second_node, 4),
        (three_a_node, 8),
        (second_node, 0),
        ({**one_node, "RANK": "1", "LOCAL_RANK": "1"}, 2),
        ({}, 1),
        ({}, 0),
    ]:
        (seen,) = ranks(_place_seen, 1, answer, environ, num_gpus, join=False)
        _compare_place(seen, environ, num_gpus)


def _place_seen(answer, environ: dict, num_gpus: int):
    torch.cuda.set_device = lambda *_: None  # may be called, and not every machine has GPUs
    os.environ.update(RANK="77", LOCAL_RANK="78", WORLD_SIZE="79")  # whoever reads these is seen
    try:
        world = answer(dict(environ), num_gpus)
    except KeyError as error:
        return f"KeyError {error}"
    names = ("rank", "local_rank", "world_size", "device")
    if not all(hasattr(world, name) for name in names):
        return f"{type(world).__name__} {world!r}"
    return {name: getattr(world, name) for name in names}


def _compare_place(seen, environ: dict, num_gpus: int) -> None:
    case = f"with {environ} and {num_gpus} GPU(s)" if environ else f"alone, with {num_gpus} GPU(s)"
    if isinstance(seen, str) and seen.startswith("KeyError"):
        raise Wrong(
            f"{case}: {seen}",
            "without torchrun the variables are not set",
            "give a default: environ.get('RANK', 0)",
        )
    if isinstance(seen, str):
        raise Wrong(f"{case} you returned {seen}", "the answer is one World", "return World(...)")
    wanted = {
        "rank": int(environ.get("RANK", 0)),
        "local_rank": int(environ.get("LOCAL_RANK", 0)),
        "world_size": int(environ.get("WORLD_SIZE", 1)),
    }
    for name, value in wanted.items():
        if seen[name] == value and type(seen[name]) is int:
            continue
        told = f"{case}: {name} is {seen[name]!r}, not {value}"
        if isinstance(seen[name], str):
            raise Wrong(told, "environment variables are text", "wrap it in int(...)")
        if str(seen[name]) == environ.get("LOCAL_WORLD_SIZE") and name == "world_size":
            raise Wrong(told, "that is the number of processes on this node", "read WORLD_SIZE")
        if environ and seen[name] == (name == "world_size"):
            raise Wrong(
                told,
                f"that is what you take where {name.upper()} is missing, but it is there",
                f"look at the spelling of {name.upper()}, and read it from `environ`",
            )
        if name in ("rank", "local_rank") and seen[name] in wanted.values():
            raise Wrong(
                told,
                "RANK counts over the whole job, LOCAL_RANK on this node only",
                f"{name} comes from {name.upper()}",
            )
        smell = "the values have to come from `environ`, not from os.environ"
        raise Wrong(told, smell, "read every variable from the argument `environ`")
    _compare_device(seen["device"], wanted, environ, num_gpus, case)


def _compare_device(device, wanted: dict, environ: dict, num_gpus: int, case: str) -> None:
    local_world_size = int(environ.get("LOCAL_WORLD_SIZE", 1))
    right = torch.device(f"cuda:{wanted['local_rank']}" if num_gpus >= local_world_size else "cpu")
    told = f"{case}: the device is {device!r}, not {right!r}"
    if isinstance(device, str):
        with contextlib.suppress(RuntimeError):
            device = torch.device(device)
        if device == right:
            raise Wrong(
                told, "the right device, but as a text", f"wrap it: torch.device('{right}')"
            )
    if device == right:
        return
    if not isinstance(device, torch.device):
        raise Wrong(told, "that is no device", "torch.device('cpu') is one")
    raise _why_device(told, device, right, wanted["rank"], num_gpus, local_world_size)


def _why_device(told: str, device, right, rank: int, num_gpus: int, local_world_size: int) -> Wrong:
    """The mistake behind a wrong device."""
    if right.type == "cpu" and num_gpus == 0:
        return Wrong(told, "there is no GPU on that node", "fall back to 'cpu' when num_gpus is 0")
    if right.type == "cpu":
        return Wrong(
            told,
            f"{local_world_size} processes cannot have one each of {num_gpus} GPUs, and a job that "
            "is half on GPUs and half on CPUs cannot talk: gloo or NCCL, not both",
            "compare num_gpus with LOCAL_WORLD_SIZE, not with this process's own rank",
        )
    if device.type == "cpu" and num_gpus == local_world_size:
        return Wrong(
            told,
            f"{num_gpus} GPUs are just enough for the {local_world_size} processes of this node",
            "num_gpus >= LOCAL_WORLD_SIZE; not >, and not WORLD_SIZE",
        )
    if device.type == "cpu":
        return Wrong(
            told,
            "num_gpus says how many GPUs that node has; only its own processes need one each",
            "do not ask torch.cuda; compare num_gpus with LOCAL_WORLD_SIZE",
        )
    if device.index == rank:
        return Wrong(
            told,
            "RANK is unique in the whole job, but GPUs are numbered on each node from 0",
            "use LOCAL_RANK",
        )
    if device.index not in (None, 0):
        return Wrong(told, "GPUs are numbered on each node from 0", "use LOCAL_RANK as it is")
    return Wrong(
        told, "all processes of the node would share one GPU", "name it: cuda:<local rank>"
    )


# ---- 6.2 ------------------------------------------------------------------------------------


@lesson.exercise(
    "6.2",
    "Three parts: dist.init_process_group(...), `yield`, dist.destroy_process_group().",
    "The part after `yield` has to run when the body raises, too: try ... finally.",
    "The backend is 'nccl' if world.device.type == 'cuda' else 'gloo'; "
    "the timeout is a timedelta(seconds=timeout_s).",
)
def process_group(answer) -> None:
    """Join and leave on 2 and 3 ranks, also when the body raises; the calls made for a GPU."""
    calls = ranks(_process_group_calls, 1, answer, join=False)[0]
    _compare_calls(calls)
    for world_size in (2, 3):
        for fails in (False, True):
            for seen in ranks(_process_group_seen, world_size, answer, fails, join=False):
                _compare_group(seen, world_size, fails)


def _process_group_calls(answer) -> dict:
    """What is asked of torch for a GPU, recorded only, since not every machine has GPUs."""
    calls: dict = {"destroyed": 0}

    def init(backend=None, init_method=None, timeout=None, world_size=-1, rank=-1, **kwargs):
        calls.update(backend=backend, init_method=init_method, timeout=timeout)
        calls.update(world_size=world_size, rank=rank)

    def destroy(group=None):
        calls["destroyed"] += 1

    dist.init_process_group, dist.destroy_process_group = init, destroy
    dist.barrier = torch.cuda.set_device = lambda *args, **kwargs: None
    manager = answer(World(5, 1, 8, torch.device("cuda:1")), timeout_s=37)
    if not hasattr(manager, "__enter__"):
        return {"manager": type(manager).__name__}
    with manager:
        calls["inside"] = calls["destroyed"] == 0 and "backend" in calls
    return calls


def _compare_calls(calls: dict) -> None:
    if "manager" in calls:
        raise Wrong(
            f"`with process_group(world):` got a {calls['manager']}",
            "a generator function with @contextmanager above it can be used in `with`",
            "keep the decorator, and `yield` once",
        )
    if "backend" not in calls:
        raise Wrong("init_process_group was never called", "", "call it before the yield")
    if not calls["inside"]:
        raise Wrong("the group was gone before the body ran", "", "destroy it after the yield")
    backend = calls["backend"]
    if backend is not None and "nccl" not in str(backend).lower():
        raise Wrong(
            f"for device cuda:1 the backend is {backend!r}",
            "gloo moves GPU data through the CPU",
            "'nccl' if world.device.type == 'cuda' else 'gloo'",
        )
    if isinstance(calls["init_method"], int):
        raise Wrong(
            "the rank was passed by its place, and landed in `init_method`",
            "init_process_group's second place is another one",
            "name them: rank=world.rank, world_size=world.world_size",
        )
    if not isinstance(calls["timeout"], timedelta | None):
        raise Wrong(
            f"timeout is {calls['timeout']!r}", "a number says no unit", "timedelta(seconds=...)"
        )
    if calls["timeout"] is None or abs(calls["timeout"].total_seconds() - 37) > 1e-6:
        raise Wrong(
            f"timeout_s=37 was asked for, init_process_group got {calls['timeout']}",
            "without it a lost partner is noticed after 10 or 30 minutes",
            "timeout=timedelta(seconds=timeout_s)",
        )
    if calls["rank"] not in (5, -1) or calls["world_size"] not in (8, -1):
        raise Wrong(
            f"rank 5 of 8 joined as rank {calls['rank']} of {calls['world_size']}",
            "a group needs the number that is unique in the whole job",
            "rank=world.rank, world_size=world.world_size",
        )


def _process_group_seen(answer, fails: bool) -> dict:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    seen = {"passed on": False}
    try:
        with answer(World(rank, rank, size, torch.device("cpu")), timeout_s=30):
            tensor = torch.tensor([1.0])
            dist.all_reduce(tensor)
            seen["inside"] = (dist.get_rank(), dist.get_world_size(), tensor.item())
            if fails:
                raise ArithmeticError("from the body")
    except ArithmeticError:
        seen["passed on"] = True
    seen["left"] = not dist.is_initialized()
    return seen


def _compare_group(seen: dict, world_size: int, fails: bool) -> None:
    if seen["inside"][1:] != (world_size, world_size):
        raise Wrong(f"a group of {world_size} has size {seen['inside'][1]}", "", "pass world_size")
    if not seen["left"] and not fails:
        raise Wrong(
            "after the block the process is still in the group",
            "nobody called destroy_process_group",
            "call it after the yield",
        )
    if fails and not seen["passed on"]:
        raise Wrong(
            "an error in the body did not come out of the block",
            "an `except` without `raise`, or a `return` in `finally`, swallows it",
            "use try ... finally and no except",
        )
    if not seen["left"]:
        raise Wrong(
            "when the body raises, the process stays in the group",
            "destroy_process_group stands after the yield, but not in a `finally`",
            "try: yield, finally: destroy",
        )


# ---- 6.3 ------------------------------------------------------------------------------------


@lesson.exercise(
    "6.3",
    "First shuffle all numbers in the same way on every rank, then take this rank's part.",
    "A generator of your own, `torch.Generator().manual_seed(self.seed + self.epoch)`, makes the "
    "same order on every rank and leaves torch's own random numbers alone.",
    "The part is a slice with a step: order[self.rank :: self.world_size].",
)
def ShardedSampler(answer) -> None:
    """The shares of 1 to 5 ranks, even and uneven, over several epochs and seeds."""
    for world_size in (2, 3, 5):
        for num_samples in (world_size * random.randrange(8, 15), random.randrange(41, 61), 4):
            seed = random.randrange(1000)
            (seen,) = ranks(_shares, 1, answer, num_samples, world_size, seed, join=False)
            _compare_shares(seen, num_samples, world_size)


def _shares(answer, num_samples: int, world_size: int, seed: int) -> dict:
    """Every rank's list in epochs 0 and 1, all made in one process."""

    def shares(size: int, epoch: int, seed: int = seed) -> list[list[int]]:
        samplers = [answer(num_samples, rank, size, seed=seed) for rank in range(size)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
        return [list(sampler) for sampler in samplers]

    state, pythons = torch.get_rng_state(), random.getstate()
    first = shares(world_size, 0)
    touched = not torch.equal(state, torch.get_rng_state()) or pythons != random.getstate()
    return {
        "epochs": [first, shares(world_size, 1)],
        "again": shares(world_size, 0),
        "other seed": [shares(world_size, epoch, seed + 1) for epoch in (0, 1)],
        "one": shares(1, 0)[0],
        "lengths": [len(answer(num_samples, rank, world_size)) for rank in range(world_size)],
        "touched": touched,
    }


def _compare_shares(seen: dict, num_samples: int, world_size: int) -> None:
    case = f"{num_samples} samples on {world_size} ranks"
    shares, later = seen["epochs"]
    flat = [index for share in shares for index in share]
    if not all(type(index) is int for index in flat):
        raise Wrong(
            f"{case}: an index is a {type(flat[0]).__name__}",
            "",
            "turn the tensor into a list: .tolist()",
        )
    _compare_cover(shares, flat, num_samples, case)
    if num_samples > 20:
        _compare_order(seen, shares, later, case, world_size)
    lengths = [len(share) for share in shares]
    if seen["lengths"] != lengths:
        raise Wrong(
            f"{case}: len() says {seen['lengths']}, but the ranks read {lengths}",
            "the counts differ by one when the ranks do not divide the samples",
            "count the numbers rank, rank + world_size, ... below num_samples",
        )


def _compare_cover(shares: list, flat: list[int], num_samples: int, case: str) -> None:
    """Disjoint and complete."""
    unknown = sorted(set(flat) - set(range(num_samples)))
    if unknown:
        raise Wrong(f"{case}: {unknown[:5]} are no sample numbers", "", "number from 0")
    missing = sorted(set(range(num_samples)) - set(flat))
    twice = sorted(index for index in set(flat) if flat.count(index) > 1)
    if twice and all(len(share) == num_samples for share in shares):
        raise Wrong(
            f"{case}: every rank reads all {num_samples}",
            "the order is shuffled, but not divided",
            "keep only every world_size-th number",
        )
    if twice and any(len(set(share)) < len(share) for share in shares) and missing:
        raise Wrong(
            f"{case}: one rank reads sample {twice[0]} twice, and nobody reads {missing[:5]}",
            "the numbers were drawn with repetition",
            "torch.randperm gives every number once",
        )
    if twice and missing:
        raise Wrong(
            f"{case}: samples {twice[:5]} are read twice and {missing[:5]} by no rank",
            "each rank cuts its part out of a different shuffle (a seed that depends on the rank?)",
            "shuffle with seed + epoch on every rank",
        )
    if twice:
        raise Wrong(
            f"{case}: samples {twice[:5]} are read more than once",
            "the list was padded so that all ranks get equally many; an average then counts "
            "some samples twice",
            "do not pad: the ranks' counts may differ by one",
        )
    if missing:
        raise Wrong(
            f"{case}: samples {missing[:5]} are read by no rank",
            "the rest of the division was dropped",
            "a slice with a step keeps it: order[rank::world_size]",
        )


def _compare_order(seen: dict, shares: list, later: list, case: str, world_size: int) -> None:
    """Shuffled, anew in each epoch, reproducibly, and in step with one process."""
    if seen["again"] != shares or seen["touched"]:
        raise Wrong(
            f"{case}: reading the same epoch twice gives two orders, or the shared random numbers "
            "of torch or Python were moved",
            "the shuffle takes random numbers that others use, too",
            "give torch.randperm a generator of its own",
        )
    if all(share == sorted(share) for share in shares):
        raise Wrong(f"{case}: every rank reads in rising order", "nothing was shuffled", "randperm")
    if shares == later:
        raise Wrong(
            f"{case}: epochs 0 and 1 have the same order",
            "self.epoch is not part of the seed",
            "seed the generator with self.seed + self.epoch",
        )
    if seen["other seed"][0] == shares:
        smell = "self.seed is not used"
        if seen["other seed"][1] != later:
            smell = "at epoch 0 the seed vanishes (a product of seed and epoch?)"
        raise Wrong(f"{case}: two seeds give the same order", smell, "self.seed + self.epoch")
    if [set(share) for share in shares] == [set(share) for share in later]:
        raise Wrong(
            f"{case}: each rank reads the same samples in every epoch",
            "the samples were divided first and shuffled afterwards",
            "shuffle all of them, then divide",
        )
    rounds = range(max(map(len, shares)))
    woven = [share[i] for i in rounds for share in shares if i < len(share)]
    if woven != seen["one"]:
        raise Wrong(
            f"{case}: the first batch of all ranks together is not the first batch of one process",
            "each rank takes one solid piece of the order",
            "deal the order out like cards: order[rank::world_size]",
        )


# ---- 6.4 ------------------------------------------------------------------------------------


@lesson.exercise(
    "6.4",
    "Call torch's DistributedDataParallel with the module, device_ids=... and bucket_cap_mb=...",
    "The module's own device says what to do: next(module.parameters()).device.",
    "device_ids is [device.index] where device.type is 'cuda', and None on the CPU; bucket_cap_mb "
    "counts in MB, as bucket_mb does.",
)
def torch_ddp(answer) -> None:
    """The calls for a module on GPU 3 and one on the CPU; then a real backward on 2 CPU ranks."""
    for seen in ranks(_ddp_calls, 2, answer)[::-1]:
        for kind in seen:
            _compare_wrapper(seen[kind], "on the CPU" if kind == "cpu" else "on cuda:3")
        _compare_ids(seen["cpu"]["ids"], seen["cuda"]["ids"])
        _compare_cap(seen["cuda"]["cap"], seen["cpu"]["cap"])
    seed = random.randrange(10_000)
    model = build(seed)
    run_backward(model, token_batch(seed))
    for rank, grads in enumerate(ranks(_ddp_gradients, 2, answer, seed)):
        if not close(grads, gradients_of(model)):
            raise Wrong(
                f"rank {rank} of 2: the gradients are not those of one process",
                "an option keeps torch from sending the state or the gradients round",
                "give device_ids and bucket_cap_mb, and leave all else as it is",
            )


class _OnGpu3(nn.Module):
    """A module whose one parameter says that it is on cuda:3, also where there is no GPU."""

    def __init__(self) -> None:
        super().__init__()
        with FakeTensorMode():
            self.weight = nn.Parameter(torch.empty(2, 2, device="cuda:3"))


def _ddp_calls(answer) -> dict:
    """What torch is asked for, recorded only: there may be no GPU here, and none is number 3."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # or torch would look for GPU 3 on a node with fewer
    cases = (("cpu", nn.Linear(2, 2), ()), ("cuda", _OnGpu3(), (7.5,)))
    calls: list[dict] = []
    signature = inspect.signature(nn.parallel.DistributedDataParallel.__init__)

    def init(self, *args, **kwargs):
        nn.Module.__init__(self)
        calls.append(signature.bind(self, *args, **kwargs).arguments)
        self.module = calls[-1]["module"]

    nn.parallel.DistributedDataParallel.__init__ = init
    nn.DataParallel.__init__ = lambda self, *args, **kwargs: nn.Module.__init__(self)
    nn.Module.to = nn.Module.cuda = lambda self, *args, **kwargs: self
    # As on a node with GPUs whose process has said which is its own.
    torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 8
    torch.cuda.current_device, torch.cuda.set_device = lambda: 3, lambda *_: None
    os.environ["LOCAL_RANK"] = "5"
    seen = {}
    for kind, module, given in cases:
        calls.clear()
        result = answer(module, *given)
        call = calls[-1] if calls else {}
        seen[kind] = {"ids": _plain(call.get("device_ids")), "cap": call.get("bucket_cap_mb")}
        seen[kind]["result"] = "the module itself" if result is module else type(result).__name__
        seen[kind]["is ddp"] = isinstance(result, nn.parallel.DistributedDataParallel)
        if not seen[kind]["is ddp"]:
            break
    return seen


def _plain(ids) -> object:
    """Device ids as numbers, where they can be: 1, torch.device('cuda:1') and 'cuda:1' are one."""
    if not isinstance(ids, list | tuple):
        return None if ids is None else repr(ids)
    return [i if isinstance(i, int) else torch.device(i).index for i in ids] or None


def _compare_wrapper(seen: dict, where: str) -> None:
    if seen["is ddp"]:
        return
    if seen["result"] == "DataParallel":
        smell = "DataParallel is one process with a thread a GPU, and has no ranks"
    elif seen["result"] == "the module itself":
        smell = "a bare module does not average: the wrapper does, during backward"
    else:
        smell = "the answer is torch's own class"
    raise Wrong(
        f"for a module {where} you return {seen['result']}",
        smell,
        "return DistributedDataParallel(module, ...)",
    )


def _compare_ids(on_cpu, on_gpu) -> None:
    if on_cpu is not None:
        raise Wrong(
            f"for a module on the CPU device_ids is {on_cpu}",
            "device_ids are numbers of GPUs; what counts is where the module is, not what the "
            "machine has",
            "None where next(module.parameters()).device.type is not 'cuda'",
        )
    if on_gpu == [3]:
        return
    smell = "DDP copies inputs to that GPU, so it has to be the one that holds the module"
    if on_gpu in ([0], [1]):
        smell = "that is 0 or this rank's number; the module is on another GPU. A rank counts over "
        smell += "the whole job, GPUs on each node"
    elif on_gpu == [5]:
        smell = "that is LOCAL_RANK; ask the module, which says where it is"
    elif isinstance(on_gpu, str):
        smell = "device_ids is a list"
    elif on_gpu and len(on_gpu) > 1:
        smell = "a process of DDP drives one GPU"
    elif on_gpu is None:
        smell = "without it the inputs are left where they are, and a batch on the CPU fails"
    raise Wrong(f"for a module on cuda:3 device_ids is {on_gpu}", smell, "[device.index]")


def _compare_cap(asked, default) -> None:
    told = f"torch_ddp(module, 7.5) asks torch for bucket_cap_mb={asked}"
    if asked is None:
        raise Wrong(told, "bucket_mb is not passed on: torch takes 25", "bucket_cap_mb=bucket_mb")
    if not 7 < asked < 8:
        smell = "torch counts in MB here, not in bytes" if asked > 1e5 else ""
        raise Wrong(told, smell, "bucket_cap_mb=bucket_mb")
    if default is not None and not 23 < default < 27:
        raise Wrong(f"torch_ddp(module) asks for {default} MB", "25 MB is the default", "bucket_mb")


def _ddp_gradients(answer, seed: int) -> dict:
    model = build(seed + dist.get_rank())
    run_backward(answer(model, 1e-4), token_batch(seed)[:, dist.get_rank() :: 2])
    return gradients_of(model)


# ---- 6.5 ------------------------------------------------------------------------------------


@lesson.exercise(
    "6.5",
    "A mean of means is right only when all ranks hold equally many items.",
    "Put the sum and the count into one float64 tensor of two numbers and all-reduce that.",
    "mean = all sums / all counts; return it as a float on every rank.",
)
def mean_over_ranks(answer) -> None:
    """Uneven counts, an outlier, an empty rank, a sum too long for float32; 1, 2 and 3 ranks."""
    for world_size in (2, 3, 1):
        counts = [random.randrange(20, 60) for _ in range(world_size)]
        counts[0] = 2  # few items with large losses: whoever weighs ranks equally is far off
        empty = [*counts[:-1], 0] if world_size == 3 else counts
        for case in (counts, empty):
            items = [torch.rand(count, dtype=torch.float64) + 1e8 for count in case]
            items[0] += 40
            _compare_mean(ranks(_mean_seen, world_size, answer, items), items)
    check_group(answer, _group_of_mean)


def _mean_seen(answer, items: list[torch.Tensor]):
    mine = items[dist.get_rank()]
    total = mine.sum()
    before = total.clone()
    value = answer(total, len(mine))
    return value, torch.equal(total, before)


def _compare_mean(results: list, items: list[torch.Tensor]) -> None:
    counts = [len(mine) for mine in items]
    truth = torch.cat(items).mean().item()
    means = [mine.mean().item() for mine in items]
    case = f"ranks with {counts} items"
    for rank, (value, untouched) in enumerate(results):
        if isinstance(value, torch.Tensor):
            raise Wrong(f"{case}: you return {value!r}", "the answer is a plain float", ".item()")
        if value is None:
            raise Wrong(f"{case}: rank {rank} returns None", "every rank needs the mean", "return")
        told = f"{case}: rank {rank} says {value:,.6f}, one process says {truth:,.6f}"
        if abs(value - truth) > 1e-6:
            raise Wrong(told, *_why_mean(value, items, counts, means, rank))
        if not untouched:
            raise Wrong(
                f"{case}: `total` itself has changed",
                "all_reduce overwrites its argument, so a second call would add up sums",
                "all-reduce a tensor of your own",
            )


def _why_mean(value: float, items: list, counts: list, means: list, rank: int) -> tuple[str, str]:
    def near(other: float) -> bool:
        return abs(value - other) < 1e-6 * max(1.0, abs(other))

    world_size, total = len(items), sum(mine.sum().item() for mine in items)
    truth = torch.cat(items).mean().item()
    if value != value:
        return "a rank without items divided 0 by 0", "divide only after the all-reduce"
    if near(total):
        return "that is the sum", "divide by the number of all items"
    if world_size > 1 and near(total / max(counts[rank], 1)):
        return "the sums were added up, the counts were not", "all-reduce both"
    if abs(value - sum(means) / world_size) < 1e-6:
        return (
            "that is the mean of the ranks' means: it weighs a rank with 2 items like one with 50",
            "add up sums and counts, then divide once",
        )
    if abs(value - means[rank]) < 1e-6 and world_size > 1:
        return "that is this rank's own mean", "all-reduce before you divide"
    cut = sum(int(mine.sum()) for mine in items) / sum(counts)
    if abs(value - cut) < 1e-6:
        return "a sum was cut to an integer", "keep it a float"
    if abs(value - truth) < 30:
        return "close, but rounded: float32 holds 7 digits", "add up in float64 (.double())"
    if any(near(total / number) for number in (world_size, *counts) if number):
        return "the sum was divided by something else than all items", "all-reduce the count, too"
    return "", "add up sums and counts, then divide once"


def _group_of_mean(answer, group, rank: float, first: float) -> tuple[float, float]:
    return answer(torch.tensor(rank), 1, group=group), first + 0.5


# ---- 6.6 ------------------------------------------------------------------------------------


@lesson.exercise(
    "6.6",
    "Only rank 0 writes and prints; every rank waits at a barrier after the `if`, not inside it.",
    "Write to another name first, then os.replace(partial, path): the file is old or new, never "
    "half.",
    "A DDP model keeps yours in `.module`; save getattr(model, 'module', model).state_dict().",
)
def save_once(answer) -> None:
    """Saves on 2 and 3 ranks, of a wrapped model, over an older file, and one that fails."""
    for world_size in (2, 3):
        with tempfile.TemporaryDirectory() as folder:
            results = ranks(_save_seen, world_size, answer, folder, quiet=True)
            _compare_saves(results)
    with tempfile.TemporaryDirectory() as folder:
        ranks(_save_alone, 1, answer, folder, quiet=True, join=False)
    for what, smell in (
        ("the disk filled up while saving", "the new file was written over the old one"),
        ("the job was killed just before the last step", "the old file was removed first"),
    ):
        with tempfile.TemporaryDirectory() as folder:
            (kept,) = ranks(_save_that_fails, 1, answer, folder, "disk" in what, quiet=True)
        if not kept:
            raise Wrong(
                f"{what}, and the older file was lost",
                smell,
                "write to a second name, then os.replace(partial, path) alone",
            )


class Wrapper(nn.Module):
    """Holds the model like DDP does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def _save_seen(answer, folder: str) -> dict:
    path, saves = Path(folder) / "model.pt", []
    original = torch.save

    def save(state, target, *args, **kwargs):
        time.sleep(0.2)  # a slow disk: who does not wait finds no file
        saves.append(str(target))
        return original(state, target, *args, **kwargs)

    torch.save = save
    printed = _Tee()
    with contextlib.redirect_stdout(printed):
        answer(Wrapper(build(3)), path)
    seen = {"saves": len(saves), "lines": printed.text.count("\n"), "exists": path.exists()}
    if seen["exists"]:
        try:
            state = torch.load(path, weights_only=True)
            seen["keys"] = list(state) if isinstance(state, dict) else type(state).__name__
        except Exception as error:
            seen["unreadable"] = f"{type(error).__name__}"
    dist.barrier()
    seen["left over"] = sorted(file.name for file in Path(folder).iterdir() if file != path)
    return seen


class _Tee:
    """A text stream that remembers what was printed."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        """Nothing is held back."""


def _compare_saves(results: list[dict]) -> None:
    world_size = len(results)
    writers = [rank for rank, seen in enumerate(results) if seen["saves"]]
    if not writers:
        raise Wrong("no rank called torch.save", "", "rank 0 saves the state_dict")
    if writers != [0]:
        raise Wrong(
            f"ranks {writers} of {world_size} write the same file",
            "every rank runs every line; two writers at once can leave a broken file",
            "if dist.get_rank(group) == 0:",
        )
    for rank, seen in enumerate(results):
        if not seen["exists"]:
            raise Wrong(
                f"rank {rank} returned while there was no file yet",
                "the other ranks did not wait for rank 0",
                "dist.barrier(group) after the `if`, on every rank",
            )
        if "unreadable" in seen or isinstance(seen["keys"], str):
            raise Wrong(
                f"rank {rank} cannot read the file with torch.load(..., weights_only=True) "
                f"({seen.get('unreadable') or seen['keys']})",
                "a whole model was pickled, or the file was not complete when the call returned",
                "save module.state_dict(), and wait at a barrier",
            )
        if any(key.startswith("module.") for key in seen["keys"]):
            raise Wrong(
                f"the file's names start with 'module.', like {seen['keys'][0]}",
                "the wrapper was saved; a program without DDP cannot load that",
                "save the state_dict of model.module",
            )
        if set(seen["keys"]) != set(Probe().state_dict()):
            raise Wrong(f"the file holds {seen['keys'][:3]}...", "", "save the whole state_dict()")
        if seen["left over"]:
            raise Wrong(f"left over: {seen['left over'][0]}", "", "os.replace moves the file")
    _compare_lines(results)


def _compare_lines(results: list[dict]) -> None:
    lines = [seen["lines"] for seen in results]
    if lines != [1] + [0] * (len(results) - 1):
        raise Wrong(
            f"the ranks printed {lines} lines; 1 line by rank 0 was asked for",
            "what every rank prints is read world_size times" if sum(lines[1:]) else "",
            "print inside the `if`, once, with the path and the size",
        )


def _save_alone(answer, folder: str) -> None:
    """Save where there is no process group at all."""
    answer(build(3), Path(folder) / "model.pt")


def _save_that_fails(answer, folder: str, disk_is_full: bool) -> bool:
    """Does the older file survive a save that breaks off: half-written, or before it is moved?"""
    path = Path(folder) / "model.pt"
    torch.save({"old": torch.ones(1)}, path)

    def save(state, target, *args, **kwargs):
        if hasattr(target, "write"):
            target.write(b"half a file")
        else:
            Path(target).write_bytes(b"half a file")
        raise OSError(28, "No space left on device")

    def move(*args, **kwargs):
        raise OSError(5, "killed here")

    if disk_is_full:
        torch.save = save
    else:
        os.replace = os.rename = move
    with contextlib.suppress(OSError):
        answer(build(3), path)
    try:
        return "old" in torch.load(path, weights_only=True)
    except Exception:
        return False


# ---- 6.7 ------------------------------------------------------------------------------------


@lesson.exercise(
    "6.7",
    "Six arguments: --nnodes, --nproc-per-node, --rdzv-id, --rdzv-backend, --rdzv-endpoint, "
    "--rdzv-conf. `torchrun --help` explains each.",
    "The endpoint is the same on all nodes: f'{head_node}:{port}', the port made from the job id.",
    "20000 + job_id % 20000 stays below 65536 however large the job id is.",
)
def rendezvous_arguments(answer) -> None:
    """The arguments of several jobs; then two agents that really meet with them."""
    job_id = 9_000_000 + random.randrange(1_000_000)
    (seen,) = ranks(_arguments_seen, 1, answer, job_id, join=False)
    _compare_arguments(seen, job_id)
    port_free = _job_with_a_free_port(job_id)
    workers = ranks(_agent, 2, answer, port_free, join=False, quiet=True, timeout_s=15)
    _compare_workers(workers)


def _arguments_seen(answer, job_id: int) -> dict:
    calls = {
        "head": (3, 4, "node17", job_id, True),
        "other": (3, 4, "node17", job_id, False),
        "next job": (3, 4, "node17", job_id + 1, True),
    }
    return {name: answer(*arguments) for name, arguments in calls.items()}


def _options(arguments: list[str]) -> dict[str, str]:
    """{'nnodes': '3', ...} from --nnodes=3, --nnodes 3, --rdzv_id 7 ..."""
    pairs = {}
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            pairs[name.replace("_", "-")] = value or following
    return pairs


def _compare_arguments(seen: dict, job_id: int) -> None:
    for arguments in seen.values():
        _compare_form(arguments)
    head, other, following = (_options(seen[name]) for name in ("head", "other", "next job"))
    told = "for 3 nodes with 4 processes each"
    if head.get("nnodes") not in ("3", "3:3"):
        raise Wrong(
            f"{told}: --nnodes is {head.get('nnodes')}",
            "without it torchrun starts a job of one node on every node",
            "--nnodes=<num_nodes>",
        )
    if head.get("nproc-per-node") != "4":
        raise Wrong(
            f"{told}: --nproc-per-node is {head.get('nproc-per-node')}",
            "an agent starts the processes of its own node only",
            "--nproc-per-node=<processes_per_node>",
        )
    if head.get("rdzv-backend") != "c10d":
        raise Wrong(f"--rdzv-backend is {head.get('rdzv-backend')}", "", "--rdzv-backend=c10d")
    if head.get("rdzv-id") != other.get("rdzv-id"):
        raise Wrong(
            f"--rdzv-id is {head.get('rdzv-id')} on one node, {other.get('rdzv-id')} on another",
            "agents with different ids wait for each other until the time-out",
            "--rdzv-id=<job_id>, which all nodes know",
        )
    if str(job_id) not in head.get("rdzv-id", ""):
        raise Wrong(f"job {job_id} has --rdzv-id {head.get('rdzv-id')}", "", "--rdzv-id=<job_id>")
    _compare_endpoints(head, other, following, job_id)


def _compare_form(arguments: object) -> None:
    """A list of words, each an option of torchrun's or its value, and nothing else."""
    if not isinstance(arguments, list | tuple) or not all(isinstance(a, str) for a in arguments):
        raise Wrong(f"you returned {arguments!r}", "", "return a list of texts")
    for word in arguments:
        if " " in word.strip():
            raise Wrong(f"one entry is {word!r}", "", "one entry a word, or join with =")
        if word == "torchrun" or word.endswith(".py"):
            raise Wrong(f"{word!r} is in the list", "that is the program", "only the six arguments")
    known = (
        "nnodes nproc-per-node rdzv-id rdzv-backend rdzv-endpoint rdzv-conf node-rank local-addr"
    )
    for name in set(_options(list(arguments))) - set(known.split()):
        raise Wrong(f"there is --{name}", "none of the six arguments has that name", known)


def _compare_endpoints(head: dict, other: dict, following: dict, job_id: int) -> None:
    endpoint = head.get("rdzv-endpoint", "")
    host, _, port = endpoint.rpartition(":")
    if host != "node17":
        raise Wrong(
            f"--rdzv-endpoint is {endpoint!r} on a job whose head is node17",
            "'localhost' is a different machine on every node" if "local" in host else "",
            "--rdzv-endpoint=<head_node>:<port>",
        )
    if endpoint != other.get("rdzv-endpoint"):
        raise Wrong(
            f"the nodes are sent to {endpoint} and {other.get('rdzv-endpoint')}",
            "a random port, or a node's own name, is not the same everywhere",
            "make the port from job_id",
        )
    if not port.isdigit():
        raise Wrong(f"the port is {port!r}", "that is no number", "f'{head_node}:{port}'")
    if not 1024 <= int(port) < 65536:
        raise Wrong(
            f"job {job_id} gets port {port!r}",
            "ports end at 65535 and start, for users, at 1024; job ids grow without limit",
            "20000 + job_id % 20000",
        )
    if endpoint == following.get("rdzv-endpoint"):
        raise Wrong(
            f"jobs {job_id} and {job_id + 1} both use port {port}",
            "two jobs that share a node would collide",
            "make the port from job_id",
        )
    hosts = [_options([f"--{o.get('rdzv-conf', '')}"]).get("is-host") for o in (head, other)]
    if (hosts[0] or "").lower() not in ("1", "true") or hosts[0] == hosts[1]:
        raise Wrong(
            f"--rdzv-conf is {head.get('rdzv-conf')!r} on the head and "
            f"{other.get('rdzv-conf')!r} elsewhere",
            "torchrun compares host names to find the head; with a name of the fast network "
            "(node17i) no node feels meant, or two do",
            "--rdzv-conf=is_host=1 on the head, =0 elsewhere",
        )


def _job_with_a_free_port(job_id: int) -> int:
    """A job id near this one whose port nobody on this machine uses."""
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", 20000 + job_id % 20000))
                return job_id
            except OSError:
                job_id += 1


def _agent(answer, job_id: int) -> list[dict]:
    """Be the torchrun agent of one of two nodes; its two workers report their environment."""
    from torch.distributed import run as torchrun

    node = int(os.environ["RANK"])
    for name in [n for n in os.environ if n.startswith(("TORCHELASTIC", "MASTER", "RANK"))]:
        del os.environ[name]
    with tempfile.TemporaryDirectory() as folder:
        worker = Path(folder) / "worker.py"
        worker.write_text(
            "import os, pathlib\n"
            "names = 'RANK LOCAL_RANK WORLD_SIZE'.split()\n"
            "text = ' '.join(os.environ[name] for name in names)\n"
            f"pathlib.Path({folder!r}, os.environ['LOCAL_RANK'] + '.txt').write_text(text)\n"
        )
        arguments = answer(2, 2, "127.0.0.1", job_id, node == 0)
        sys.argv[0] = "torchrun"
        torchrun.main([*arguments, "--local-addr=127.0.0.1", str(worker)])
        texts = [file.read_text() for file in sorted(Path(folder).glob("*.txt"))]
    return [dict(zip(("rank", "local", "world"), t.split(), strict=True)) for t in texts]


def _compare_workers(nodes: list[list[dict]]) -> None:
    found = sorted(int(worker["rank"]) for node in nodes for worker in node)
    worlds = {worker["world"] for node in nodes for worker in node}
    if found != [0, 1, 2, 3] or worlds != {"4"}:
        raise Wrong(
            f"two agents with 2 processes each gave ranks {found} in worlds of {sorted(worlds)}",
            "they did not become one job",
            "same --rdzv-id and --rdzv-endpoint on both, --nnodes=2",
        )
