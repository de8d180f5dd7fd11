"""Checks of lesson 06. Truth is one process on all the data, or the statement in the docstring.

Each check runs the learner's code on ranks, brings home what was seen, and then compares it with
the mistakes that people make most, so that the verdict can name the one at hand.
"""

import contextlib
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

from manyhands.checks import Lesson, Wrong, ranks
from manyhands.runtime import World

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


# ---- a model with what goes wrong ----------------------------------------------------------


class Probe(nn.Module):
    """A frozen layer, a tied weight, float and integer buffers; built from torch's seed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(6, track_running_stats=True)
        self.norm.running_mean += torch.rand(6)
        self.norm.num_batches_tracked += torch.randint(100, (1,)).item()
        self.norm.eval()  # fixed statistics: a batch cut over ranks then computes what it did whole
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.norm(self.frozen(self.embedding(tokens)))))  # (B, 11)

    def train(self, mode: bool = True) -> "Probe":
        super().train(mode)
        self.norm.eval()
        return self


class Crossed(nn.Module):
    """Uses its layers in another order than it defines them, so gradients come in that order."""

    def __init__(self) -> None:
        super().__init__()
        self.used_last, self.used_first = nn.Linear(6, 11), nn.Embedding(11, 6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.used_last(self.used_first(tokens))  # (B, 11)


def _batch(seed: int, size: int = 12) -> torch.Tensor:
    return torch.randint(11, (2, size), generator=torch.Generator().manual_seed(seed))


def _backward(model: nn.Module, batch: torch.Tensor) -> None:
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()


def _build(seed: int, kind: type[nn.Module] = Probe) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def _gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: param.grad for name, param in model.named_parameters()}


def _close(a: dict, b: dict, factor: float = 1.0) -> bool:
    """Are all tensors of `a` those of `b`, times `factor`?"""
    return all(
        (a[name] is None) == (value is None)
        and (value is None or torch.allclose(a[name], value * factor, atol=1e-5, rtol=1e-4))
        for name, value in b.items()
    )


# ---- 6.4 ------------------------------------------------------------------------------------


@lesson.exercise(
    "6.4",
    "A model's state is its parameters and its buffers.",
    "dist.broadcast(tensor, src=0) overwrites `tensor` on every rank with rank 0's.",
    "A parameter wants no in-place change while autograd looks on: broadcast tensor.detach().",
)
def broadcast_state(answer) -> None:
    """Models from different seeds on 2 and 3 ranks: frozen, tied, buffers; in place."""
    for world_size in (2, 3):
        seed = random.randrange(10_000)
        wanted = {name: tensor.clone() for name, tensor in _build(seed).state_dict().items()}
        for rank, seen in enumerate(ranks(_state_after, world_size, answer, seed)):
            _compare_state(seen, wanted, _build(seed + rank).state_dict(), rank, world_size)
    _check_group(answer, _group_of_broadcast)


def _state_after(answer, seed: int) -> dict:
    model = _build(seed + dist.get_rank())
    before = {name: id(param) for name, param in model.named_parameters()}
    flags = {name: param.requires_grad for name, param in model.named_parameters()}
    answer(model)
    return {
        "state": model.state_dict(),
        "same objects": before == {name: id(param) for name, param in model.named_parameters()},
        "same flags": flags == {name: p.requires_grad for name, p in model.named_parameters()},
    }


def _compare_state(seen: dict, wanted: dict, own: dict, rank: int, world_size: int) -> None:
    state = seen["state"]
    wrong = [name for name in wanted if not torch.equal(state[name], wanted[name])]
    case = f"rank {rank} of {world_size}"
    if not seen["same objects"]:
        raise Wrong(
            f"{case}: the model holds new parameters",
            "an optimizer that was made before still updates the old ones",
            "overwrite in place: broadcast into the tensor, or copy_() into it",
        )
    if not seen["same flags"]:
        raise Wrong(f"{case}: requires_grad has changed", "", "broadcast tensor.detach() instead")
    if wrong:
        _name_wrong_state(wrong, wanted, own, rank, case)


def _name_wrong_state(wrong: list[str], wanted: dict, own: dict, rank: int, case: str) -> None:
    parts = ", ".join(wrong[:3])
    if rank == 0:
        raise Wrong(
            f"rank 0's own {parts} changed",
            "an average, a sum, or another rank's state was sent round",
            "all ranks take rank 0's values: dist.broadcast(..., src=0)",
        )
    if len(wrong) == len([n for n in wanted if not torch.equal(own[n], wanted[n])]):
        raise Wrong(
            f"{case} still has its own values",
            "the received values never reached the model (a copy was overwritten, or the name was "
            "bound to a new tensor)",
            "broadcast the tensor itself, or copy_() the result into it",
        )
    if all(name.startswith("norm.") and not name.endswith(("weight", "bias")) for name in wrong):
        raise Wrong(
            f"{case}: the buffers {parts} differ from rank 0's",
            "parameters() leaves out buffers, such as the running statistics of batch norm",
            "go through module.buffers() as well",
        )
    if all(name.startswith("frozen") for name in wrong):
        raise Wrong(
            f"{case}: the frozen {parts} differ from rank 0's",
            "frozen parameters need no gradient, but they are part of the model",
            "do not filter by requires_grad",
        )
    raise Wrong(f"{case}: {parts} differ from rank 0's", "", "all parameters and all buffers")


# ---- 6.5 ------------------------------------------------------------------------------------


@lesson.exercise(
    "6.5",
    "dist.all_reduce(tensor) leaves the sum over all ranks in `tensor`, on every rank.",
    "The mean is the sum divided by dist.get_world_size(group).",
    "Frozen parameters have .grad None: skip those.",
)
def average_gradients(answer) -> None:
    """Gradients of one batch cut over 2 and 3 ranks against one process on the whole batch."""
    for world_size in (2, 3):
        seed = random.randrange(10_000)
        model = _build(seed)
        _backward(model, _batch(seed))
        results = ranks(_average_seen, world_size, answer, seed)
        own = [result["own"] for result in results]
        truth = _gradients(model)
        for rank, seen in reversed(list(enumerate(results))):
            if rank and not _close(seen["grads"], truth) and _close(results[0]["grads"], truth):
                raise Wrong(
                    f"rank 0 of {world_size} holds the mean, rank {rank} does not",
                    "dist.reduce gives the sum to one rank only",
                    "all_reduce gives it to all",
                )
            _compare_gradients(seen, truth, own, rank)
    _check_group(answer, _group_of_average)


def _average_seen(answer, seed: int) -> dict:
    model = _build(seed)
    _backward(model, _batch(seed)[:, dist.get_rank() :: dist.get_world_size()])
    own = _copies(model)
    # Averaging equal weights changes nothing, so look at what is sent, not at what changes.
    names = {param.data_ptr(): name for name, param in model.named_parameters()}
    weights: list[str] = []
    original = dist.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        weights.extend([names[tensor.data_ptr()]] if tensor.data_ptr() in names else [])
        return original(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        answer(model)
    except (TypeError, AttributeError) as error:
        if "NoneType" in str(error):
            reason = (
                "a frozen parameter has .grad None: skip it; and all_reduce returns None: it works"
            )
            error.args = (f"{error} ({reason} in place)",)
        raise
    return {"grads": _gradients(model), "own": own, "weights": weights}


def _compare_gradients(seen: dict, truth: dict, own: list[dict], rank: int) -> None:
    """Raise Wrong with the mistake that these gradients show; `own` is each rank's before."""
    world_size, grads = len(own), seen["grads"]
    case = f"rank {rank} of {world_size}"
    if seen["weights"]:
        raise Wrong(
            f"{case}: {seen['weights'][0]} itself was all-reduced",
            "the weights were averaged, not the gradients",
            "all-reduce param.grad",
        )
    if _close(grads, truth):
        return
    filled = [name for name in truth if truth[name] is None and grads[name] is not None]
    if filled:
        raise Wrong(f"{case}: frozen {filled[0]} has got a gradient", "", "skip .grad None")
    raise _known_gradient(grads, truth, own, rank) or _known_factor(grads, truth, own, rank)


def _known_gradient(grads: dict, truth: dict, own: list[dict], rank: int) -> Wrong | None:
    """Gradients that somebody had before, or the largest of them."""
    world_size, case = len(own), f"rank {rank} of {len(own)}"
    number = f"{_norm(grads):.4f} against {_norm(truth):.4f} of one process"
    if _close(grads, own[rank]):
        only_0 = " (or only rank 0 got the result, as with dist.reduce)" if rank else ""
        return Wrong(
            f"{case} still has its own gradient (norm {number})",
            f"the average never reached param.grad: a new tensor was made and dropped{only_0}",
            "change it in place, or assign it to param.grad",
        )
    if _close(grads, own[0]):
        return Wrong(f"{case} holds rank 0's gradient", "a broadcast, no average", "all_reduce")
    if _close(grads, own[rank], 1 / world_size):
        return Wrong(
            f"{case} holds its own gradient / {world_size}",
            "nothing was added up on this rank: an async message is not through before wait()",
            "wait for the message before the gradient is used",
        )
    largest = {
        n: g if g is None else torch.stack([o[n] for o in own]).amax(0) for n, g in truth.items()
    }
    if _close(grads, largest):
        return Wrong(
            f"{case} holds the largest of the gradients", "ReduceOp.MAX", "the default, SUM"
        )
    return None


def _known_factor(grads: dict, truth: dict, own: list[dict], rank: int) -> Wrong:
    """The truth times a number, or the truth in a few parameters only."""
    world_size, case = len(own), f"rank {rank} of {len(own)}"
    number = f"{_norm(grads):.4f} against {_norm(truth):.4f} of one process"
    for factor, smell, try_this in (
        (world_size, "the sum over the ranks", "divide by the world size"),
        (1 / world_size, "the mean divided by the world size once more", "divide once"),
        (world_size / 12, "a sum divided by the batch", "divide by the number of ranks"),
    ):
        if _close(grads, truth, factor):
            return Wrong(f"{case}: the gradient's norm is {number}", f"that is {smell}", try_this)
    right = [name for name in truth if _close({name: grads[name]}, {name: truth[name]})]
    left = [name for name in truth if name not in right]
    if right != [name for name in truth if truth[name] is None] and left:
        return Wrong(
            f"{case}: {left[0]} is not averaged, but {len(right)} others are",
            "a loop that ends early, or takes some kinds of parameters only",
            "go through all of module.parameters()",
        )
    return Wrong(f"{case}: the gradient's norm is {number}", "not the mean over the ranks", "")


def _norm(grads: dict) -> float:
    return sum(float(grad.pow(2).sum()) for grad in grads.values() if grad is not None) ** 0.5


# ---- 6.6 ------------------------------------------------------------------------------------


@lesson.exercise(
    "6.6",
    "_on_grad_ready: count the parameter in; as long as the next bucket in order is full, start "
    "it. When all have started, finish.",
    "_start: torch.cat(the flattened gradients, out=self.flats[index]), then all-reduce that with "
    "async_op=True, and keep the work in self.in_flight.",
    "_finish: work.wait() first, then flat.split([p.numel() for p in bucket]); each part, divided "
    "by the world size, goes into its .grad. At the end clear in_flight, set the counts to 0.",
)
def BucketedDDP(answer) -> None:
    """Two steps on 2 and 3 ranks against one process; what is sent, when, and who waits when."""
    for kind, world_size, bucket_mb in (
        (Probe, 2, 1e-4),
        (Probe, 3, 25),
        (Crossed, 2, 1e-4),
    ):
        seed = random.randrange(10_000)
        model, truths = _build(seed, kind), []
        for step in range(2):
            model.zero_grad()
            _backward(model, _batch(seed + step))
            truths.append(_copies(model))
        results = ranks(_bucketed_seen, world_size, answer, kind, seed, bucket_mb)
        for rank, seen in enumerate(results):
            for step, truth in enumerate(truths):
                own = [result["steps"][step]["own"] for result in results]
                _compare_step(seen, step, truth, own, rank, kind)
            _compare_messages(seen, rank, overlaps=kind is Probe)
    _compare_no_sync(ranks(_no_sync_seen, 2, answer))
    _check_group(answer, _group_of_ddp)


def _bucketed_seen(answer, kind: type, seed: int, bucket_mb: float) -> dict:
    rank, size = dist.get_rank(), dist.get_world_size()
    if isinstance(answer, type) and issubclass(answer, nn.parallel.DistributedDataParallel):
        raise TypeError("this is torch's DistributedDataParallel; the exercise is to build it")
    log: list[str] = []
    inner, reference = _build(seed + 7 * rank, kind), _build(seed, kind)
    for param in inner.parameters():  # before the wrapper's own hooks, so these run first
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(lambda _: log.append("gradient"))
    model = answer(inner, bucket_mb=bucket_mb)
    _log_all_reduces(log)
    steps = []
    for step in range(2):
        model.zero_grad()
        reference.zero_grad()
        batch = _batch(seed + step)[:, rank::size]
        _backward(reference, batch)
        time.sleep(0.05 * (rank == 0))  # a late partner: who does not wait reads too early
        raised = ""
        try:
            _backward(model, batch)
        except Exception as error:
            if isinstance(error, NotImplementedError) or (step == 0 and kind is Probe):
                raise
            raised = f"{type(error).__name__}: {error}"
        steps.append({"grads": _copies(inner), "own": _copies(reference), "weights": []})
        steps[-1].update(log=log[:], raised=raised)
        log.clear()
    return {"steps": steps, "num_buckets": len(model.buckets)}


class Watched:
    """A message on its way that writes down when somebody waits for it."""

    def __init__(self, work: dist.Work, log: list[str]) -> None:
        self.work, self.log = work, log

    def wait(self, *args: object) -> bool:
        """Wait, as torch's Work does."""
        self.log.append("waited")
        return self.work.wait(*args)

    def __getattr__(self, name: str) -> object:
        return getattr(self.work, name)


def _log_all_reduces(log: list[str]) -> None:
    """Write down every all-reduce of this rank from now on, and every wait for one."""
    original = dist.all_reduce

    def all_reduce(*args, async_op=False, **kwargs):
        log.append("sent" if async_op else "sent and waited")
        work = original(*args, async_op=async_op, **kwargs)
        return Watched(work, log) if async_op else work

    dist.all_reduce = all_reduce


def _copies(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {n: g if g is None else g.clone() for n, g in _gradients(model).items()}


def _compare_step(
    seen: dict, step: int, truth: dict, own: list[dict], rank: int, kind: type
) -> None:
    log = seen["steps"][step]["log"]
    try:
        if raised := seen["steps"][step]["raised"]:
            raise Wrong(f"rank {rank} raised {raised}")
        _compare_gradients(seen["steps"][step], truth, own, rank)
    except Wrong as wrong:
        told = f"step {step + 1}, {wrong.seen}"
        if not any("sent" in what for what in seen["steps"][0]["log"]):
            reason = "no all-reduce was ever called", "start every bucket that is full"
        elif step == 1 and not any("sent" in what for what in log):
            reason = (
                "the second backward sends nothing: the first one's counts still stand",
                "reset num_ready and clear in_flight in _finish",
            )
        elif kind is Crossed:
            reason = (
                "in a model that uses its first layer last, bucket 1 is full before bucket 0: the "
                "buckets did not start in order 0, 1, ..., or one that had to wait never started",
                "each time, start buckets in order as long as the next one is full",
            )
        elif "still has its own" in wrong.seen and "waited" in log:
            reason = (
                "the means are not copied back into param.grad",
                "split flat and copy_ each part into its gradient",
            )
        elif wrong.smell.startswith(("not the mean", "a loop that ends", "nothing was added")) or (
            "still has its own" in wrong.seen
        ):
            reason = (
                "read too early (is _finish called, and does it wait() before it copies?), a wrong "
                "divisor, or a mean in the wrong parameter",
                "after the last bucket has started: wait for each, then copy its parts back",
            )
        else:
            reason = wrong.smell, wrong.hint
        raise Wrong(told, *reason) from None


def _compare_messages(seen: dict, rank: int, overlaps: bool) -> None:
    for log in (step["log"] for step in seen["steps"]):
        sent = [what for what in log if "sent" in what]
        if len(sent) != seen["num_buckets"]:
            raise Wrong(
                f"rank {rank} called all_reduce {len(sent)} times in a backward of "
                f"{seen['num_buckets']} bucket(s)",
                "every message costs its own waiting time, so a bucket is sent whole, and once",
                "one all-reduce a bucket, when its last gradient is ready",
            )
        if "sent and waited" in sent or (
            "waited" in log and "gradient" in log[log.index("waited") :]
        ):
            raise Wrong(
                f"rank {rank} waits for a message while gradients are still missing",
                "backward stands still until the message is through: nothing is hidden",
                "async_op=True, and wait only in _finish",
            )
        if overlaps and len(sent) > 1 and "gradient" not in log[log.index("sent") :]:
            raise Wrong(
                f"rank {rank} sends its first bucket after the last gradient is ready",
                "then no message travels while backward still computes",
                "start a bucket as soon as its own last gradient is ready",
            )


def _no_sync_seen(answer) -> dict:
    """A backward inside no_sync(), then one outside; rank r sees batches r and r + 2."""
    rank, log, raised = dist.get_rank(), [], ""
    model = answer(_build(1), bucket_mb=1e-4)
    _log_all_reduces(log)
    with model.no_sync():
        _backward(model, _batch(rank))
    inside = len(log)
    try:
        _backward(model, _batch(rank + 2))
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    return {"inside": inside, "raised": raised, "grads": _copies(model.module)}


def _compare_no_sync(results: list[dict]) -> None:
    reference = _build(1)
    for number in range(4):
        _backward(reference, _batch(number))
    for rank, seen in enumerate(results):
        if seen["inside"]:
            raise Wrong(
                f"rank {rank}: a backward inside no_sync() sent {seen['inside']} message(s)",
                "self.sync says whether this backward shall average",
                "return at once from _on_grad_ready when self.sync is False",
            )
        if seen["raised"] or not _close(seen["grads"], _gradients(reference), 1 / 2):
            raise Wrong(
                f"rank {rank}: after a backward inside no_sync() the next one "
                + (f"raised {seen['raised']}" if seen["raised"] else "does not average the sums"),
                "a gradient inside no_sync() was counted",
                "look at self.sync before you count",
            )


# ---- a group of some ranks -----------------------------------------------------------------


def _check_group(answer, in_pairs) -> None:
    """Four ranks in two groups: what `in_pairs` returns must be that of the rank's own pair."""
    for rank, (value, wanted) in enumerate(ranks(_run_in_pairs, 4, answer, in_pairs)):
        if abs(value - wanted) > 1e-5:
            raise Wrong(
                f"with group = ranks {rank // 2 * 2} and {rank // 2 * 2 + 1}, rank {rank} gets "
                f"{value:g}, not {wanted:g}",
                "`group` is not passed on, so all ranks of the job take part",
                "give every dist call group=group; group_src=0 is a group's own first rank",
            )


def _run_in_pairs(answer, in_pairs) -> tuple[float, float]:
    pairs = dist.new_group([0, 1]), dist.new_group([2, 3])
    rank = dist.get_rank()
    return in_pairs(answer, pairs[rank // 2], float(rank), rank // 2 * 2.0)


def _one_weight(value: float) -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, value)
    return layer


def _group_of_broadcast(answer, group, rank: float, first: float) -> tuple[float, float]:
    layer = _one_weight(rank)
    answer(layer, group=group)
    return layer.weight.item(), first


def _group_of_average(answer, group, rank: float, first: float) -> tuple[float, float]:
    layer = _one_weight(1)
    layer(torch.full((1, 1), rank)).backward()
    answer(layer, group=group)
    return layer.weight.grad.item(), first + 0.5


def _group_of_ddp(answer, group, rank: float, first: float) -> tuple[float, float]:
    model = answer(_one_weight(1), group=group)
    model(torch.full((1, 1), rank)).backward()
    return model.module.weight.grad.item(), first + 0.5


def _group_of_mean(answer, group, rank: float, first: float) -> tuple[float, float]:
    return answer(torch.tensor(rank), 1, group=group), first + 0.5


# ---- 6.7 ------------------------------------------------------------------------------------


@lesson.exercise(
    "6.7",
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
    _check_group(answer, _group_of_mean)


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


# ---- 6.8 ------------------------------------------------------------------------------------


@lesson.exercise(
    "6.8",
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
        answer(Wrapper(_build(3)), path)
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
    answer(_build(3), Path(folder) / "model.pt")


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
        answer(_build(3), path)
    try:
        return "old" in torch.load(path, weights_only=True)
    except Exception:
        return False


# ---- 6.9 ------------------------------------------------------------------------------------


@lesson.exercise(
    "6.9",
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
