"""Answers to lesson 06 as students give them: RIGHT ones differ from the course's own, and WRONG
ones come with words that the verdict must hold. A name is the exercise, then what is done."""

import os
import random
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from manyhands.data import corpus
from manyhands.data_parallel import replicas
from manyhands.ddp import wrapping
from manyhands.ranks import runtime
from manyhands.ranks.runtime import World
from manyhands.training import run

RIGHT: dict[str, list] = {
    "6.1": [runtime.place],
    "6.2": [runtime.process_group],
    "6.3": [corpus.ShardedSampler],
    "6.4": [wrapping.torch_ddp],
    "6.5": [wrapping.mean_over_ranks],
    "6.6": [run.save_once],
    "6.7": [runtime.rendezvous_arguments],
}
WRONG: dict[str, list] = {todo: [] for todo in RIGHT}


def right(todo):
    return lambda answer: RIGHT[todo].append(answer) or answer


def wrong(todo, words):
    return lambda answer: WRONG[todo].append((answer, words)) or answer


def world_of(environ, device, rank="RANK", local="LOCAL_RANK", size="WORLD_SIZE"):
    numbers = [int(environ.get(name, fallback)) for name, fallback in ((rank, 0), (local, 0))]
    return World(*numbers, int(environ.get(size, 1)), torch.device(device))


# ---- 6.1 place ------------------------------------------------------------------------------


@right("6.1")
def place_step_by_step(environ, num_gpus):
    if "RANK" not in environ:
        return World(0, 0, 1, torch.device("cuda", 0) if num_gpus else torch.device("cpu"))
    local = int(environ["LOCAL_RANK"])
    enough = int(environ["LOCAL_WORLD_SIZE"]) <= num_gpus
    device = torch.device("cuda", local) if enough else torch.device("cpu")
    return World(int(environ["RANK"]), local, int(environ["WORLD_SIZE"]), device)


@wrong("6.1", "use LOCAL_RANK")
def place_rank_modulo_gpus(environ, num_gpus):
    enough = num_gpus >= int(environ.get("LOCAL_WORLD_SIZE", 1))
    index = int(environ.get("RANK", 0)) % max(num_gpus, 1)
    return world_of(environ, f"cuda:{index}" if enough else "cpu")


@wrong("6.1", "as a text")
def place_device_as_text(environ, num_gpus):
    world = place_step_by_step(environ, num_gpus)
    return World(world.rank, world.local_rank, world.world_size, str(world.device))


@wrong("6.1", "num_gpus >= LOCAL_WORLD_SIZE")
def place_more_gpus_than_ranks(environ, num_gpus):
    enough = num_gpus > int(environ.get("LOCAL_WORLD_SIZE", 0))
    return world_of(environ, f"cuda:{environ.get('LOCAL_RANK', 0)}" if enough else "cpu")


@wrong("6.1", "look at the spelling of")
def place_misspelt(environ, num_gpus):
    return world_of(environ, place_step_by_step(environ, num_gpus).device, rank="RANKS")


@wrong("6.1", "use LOCAL_RANK")
def place_global_rank_as_gpu(environ, num_gpus):
    enough = num_gpus >= int(environ.get("LOCAL_WORLD_SIZE", 1))
    return world_of(environ, f"cuda:{environ.get('RANK', 0)}" if enough else "cpu")


@wrong("6.1", "share one GPU")
def place_everybody_on_gpu_0(environ, num_gpus):
    enough = num_gpus >= int(environ.get("LOCAL_WORLD_SIZE", 1))
    return world_of(environ, "cuda" if enough else "cpu")


@wrong("6.1", "environment variables are text")
def place_keeps_text(environ, num_gpus):
    world = place_step_by_step(environ, num_gpus)
    return World(environ.get("RANK", "0"), world.local_rank, world.world_size, world.device)


@wrong("6.1", "processes on this node")
def place_local_world_size(environ, num_gpus):
    device = place_step_by_step(environ, num_gpus).device
    return world_of(environ, device, size="LOCAL_WORLD_SIZE")


@wrong("6.1", "RANK counts over the whole job")
def place_rank_is_local(environ, num_gpus):
    return world_of(environ, place_step_by_step(environ, num_gpus).device, rank="LOCAL_RANK")


@wrong("6.1", "not from os.environ")
def place_reads_os_environ(environ, num_gpus):
    return world_of(os.environ, place_step_by_step(environ, num_gpus).device)


@wrong("6.1", "variables are not set")
def place_needs_torchrun(environ, num_gpus):
    int(environ["RANK"])
    return place_step_by_step(environ, num_gpus)


@wrong("6.1", "do not ask torch.cuda")
def place_asks_torch(environ, num_gpus):
    return world_of(environ, "cuda" if torch.cuda.is_available() else "cpu")


@wrong("6.1", "half on GPUs and half on CPUs")
def place_some_on_gpus(environ, num_gpus):
    local = int(environ.get("LOCAL_RANK", 0))
    return world_of(environ, f"cuda:{local}" if local < num_gpus else "cpu")


@wrong("6.1", "fall back to 'cpu'")
def place_always_gpu(environ, num_gpus):
    return world_of(environ, f"cuda:{environ.get('LOCAL_RANK', 0)}")


@wrong("6.1", "the answer is one World")
def place_returns_a_tuple(environ, num_gpus):
    world = place_step_by_step(environ, num_gpus)
    return world.rank, world.local_rank, world.world_size, world.device


# ---- 6.2 process_group ----------------------------------------------------------------------


def join(world, timeout_s, **changes):
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    options = {"rank": world.rank, "world_size": world.world_size, "backend": backend}
    dist.init_process_group(**{**options, "timeout": timedelta(seconds=timeout_s), **changes})


@right("6.2")
class GroupAsAClass:
    def __init__(self, world, timeout_s=120):
        self.world, self.timeout_s = world, timeout_s

    def __enter__(self):
        # torch picks gloo or NCCL, rank and size come from the environment
        dist.init_process_group(timeout=timedelta(seconds=self.timeout_s))

    def __exit__(self, *_):
        dist.destroy_process_group()


@right("6.2")
@contextmanager
def group_in_capitals(world, timeout_s=120):
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    join(world, timeout_s, backend="NCCL" if world.device.type == "cuda" else "GLOO")
    try:
        yield
    finally:
        dist.barrier()
        dist.destroy_process_group()


@wrong("6.2", "a number says no unit")
@contextmanager
def group_timeout_as_a_number(world, timeout_s=120):
    join(world, timeout_s, timeout=timeout_s)
    try:
        yield
    finally:
        dist.destroy_process_group()


@wrong("6.2", "has to yield")
@contextmanager
def group_returns(world, timeout_s=120):
    join(world, timeout_s)
    return


@wrong("6.2", "second place is another one")
@contextmanager
def group_by_position(world, timeout_s=120):
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group("nccl", world.rank, limit, world.world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@wrong("6.2", "nobody called destroy_process_group")
@contextmanager
def group_never_left(world, timeout_s=120):
    join(world, timeout_s)
    yield


@wrong("6.2", "not in a `finally`")
@contextmanager
def group_left_only_when_well(world, timeout_s=120):
    join(world, timeout_s)
    yield
    dist.destroy_process_group()


@wrong("6.2", "swallows it")
@contextmanager
def group_swallows(world, timeout_s=120):
    join(world, timeout_s)
    try:
        yield
    except Exception:
        print("something went wrong")
    finally:
        dist.destroy_process_group()


@wrong("6.2", "gloo moves GPU data")
@contextmanager
def group_always_gloo(world, timeout_s=120):
    join(world, timeout_s, backend="gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


@wrong("6.2", "noticed after 10 or 30 minutes")
@contextmanager
def group_without_a_limit(world, timeout_s=120):
    join(world, timeout_s, timeout=None)
    try:
        yield
    finally:
        dist.destroy_process_group()


@wrong("6.2", "unique in the whole job")
@contextmanager
def group_by_local_rank(world, timeout_s=120):
    join(world, timeout_s, rank=world.local_rank)
    try:
        yield
    finally:
        dist.destroy_process_group()


@wrong("6.2", "@contextmanager")
def group_is_no_manager(world, timeout_s=120):
    join(world, timeout_s)


@wrong("6.2", "gone before the body ran")
@contextmanager
def group_left_at_once(world, timeout_s=120):
    join(world, timeout_s)
    dist.destroy_process_group()
    yield


# ---- 6.3 ShardedSampler ---------------------------------------------------------------------


class Sampler:
    def __init__(self, num_samples, rank, world_size, seed=0):
        self.num_samples, self.rank, self.world_size = num_samples, rank, world_size
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def order(self, seed=None):
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch if seed is None else seed)
        return torch.randperm(self.num_samples, generator=generator).tolist()

    def __iter__(self):
        return iter(self.order()[self.rank :: self.world_size])

    def __len__(self):
        return len(range(self.rank, self.num_samples, self.world_size))


@right("6.3")
class SamplerWithPythonsRandom(Sampler):
    def __iter__(self):
        order = list(range(self.num_samples))
        random.Random(f"{self.seed} {self.epoch}").shuffle(order)
        for position, index in enumerate(order):
            if position % self.world_size == self.rank:
                yield index

    def __len__(self):
        whole, rest = divmod(self.num_samples, self.world_size)
        return whole + (self.rank < rest)


@wrong("6.3", "not divided")
class SamplerOfEverything(Sampler):
    def __iter__(self):
        return iter(self.order())

    def __len__(self):
        return self.num_samples


@wrong("6.3", "drawn with repetition")
class SamplerWithRepetition(Sampler):
    def order(self, seed=None):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randint(self.num_samples, (self.num_samples,), generator=generator).tolist()


@wrong("6.3", "at epoch 0 the seed vanishes")
class SamplerMultiplies(Sampler):
    def __iter__(self):
        return iter(self.order(self.seed * self.epoch)[self.rank :: self.world_size])


@wrong("6.3", "return iter(...)")
class SamplerOfAList(Sampler):
    def __iter__(self):
        return self.order()[self.rank :: self.world_size]


@wrong("6.3", "a different shuffle")
class SamplerSeededByRank(Sampler):
    def __iter__(self):
        return iter(self.order(self.seed + self.epoch + self.rank)[self.rank :: self.world_size])


@wrong("6.3", "padded")
class SamplerPadded(Sampler):
    def __iter__(self):
        order = self.order()
        order += order[: -len(order) % self.world_size]
        return iter(order[self.rank :: self.world_size])

    def __len__(self):
        return -(-self.num_samples // self.world_size)


@wrong("6.3", "rest of the division was dropped")
class SamplerDropsTheRest(Sampler):
    def __iter__(self):
        each = self.num_samples // self.world_size
        return iter(self.order()[self.rank :: self.world_size][:each])

    def __len__(self):
        return self.num_samples // self.world_size


@wrong("6.3", "self.epoch is not part of the seed")
class SamplerForgetsTheEpoch(Sampler):
    def __iter__(self):
        return iter(self.order(self.seed)[self.rank :: self.world_size])


@wrong("6.3", "nothing was shuffled")
class SamplerInOrder(Sampler):
    def __iter__(self):
        return iter(range(self.rank, self.num_samples, self.world_size))


@wrong("6.3", "divided first and shuffled afterwards")
class SamplerCutsFirst(Sampler):
    def __iter__(self):
        mine = list(range(self.rank, self.num_samples, self.world_size))
        random.Random(f"{self.seed} {self.epoch}").shuffle(mine)
        return iter(mine)


@wrong("6.3", "one solid piece")
class SamplerInPieces(Sampler):
    def __iter__(self):
        order, size = self.order(), self.num_samples
        start = self.rank * size // self.world_size
        return iter(order[start : (self.rank + 1) * size // self.world_size])

    def __len__(self):
        return len(list(iter(self)))


@wrong("6.3", "random numbers that others use")
class SamplerReseedsTorch(Sampler):
    def __iter__(self):
        torch.manual_seed(self.seed + self.epoch)
        return iter(torch.randperm(self.num_samples)[self.rank :: self.world_size].tolist())


@wrong("6.3", ".tolist()")
class SamplerOfTensors(Sampler):
    def __iter__(self):
        return iter(torch.tensor(self.order()[self.rank :: self.world_size]))


@wrong("6.3", "len() says")
class SamplerOfRoundedLength(Sampler):
    def __len__(self):
        return self.num_samples // self.world_size


@wrong("6.3", "self.seed is not used")
class SamplerWithoutSeed(Sampler):
    def __iter__(self):
        return iter(self.order(self.epoch)[self.rank :: self.world_size])


# ---- 6.4 torch_ddp --------------------------------------------------------------------------

DDP = nn.parallel.DistributedDataParallel


def device_of(module):
    return next(module.parameters()).device


@right("6.4")
def ddp_with_a_device_in_the_list(module, bucket_mb=25.0):
    device = device_of(module)
    if device.type == "cuda":
        return DDP(module, [device], device, bucket_cap_mb=bucket_mb)
    return DDP(module, bucket_cap_mb=bucket_mb)


@right("6.4")
def ddp_that_saves_memory(module, bucket_mb=25.0):
    first = next(module.parameters())
    ids = [torch.cuda.current_device()] if first.is_cuda else None
    options = {"bucket_cap_mb": bucket_mb, "gradient_as_bucket_view": True}
    return DDP(module.to(first.device), device_ids=ids, static_graph=True, **options)


@wrong("6.4", "A rank counts over the whole job")
def ddp_by_rank(module, bucket_mb=25.0):
    ids = [dist.get_rank()] if device_of(module).type == "cuda" else None
    return DDP(module, device_ids=ids, bucket_cap_mb=bucket_mb)


@wrong("6.4", "that is LOCAL_RANK")
def ddp_by_local_rank(module, bucket_mb=25.0):
    ids = [int(os.environ["LOCAL_RANK"])] if device_of(module).type == "cuda" else None
    return DDP(module, device_ids=ids, bucket_cap_mb=bucket_mb)


@wrong("6.4", "not what the machine has")
def ddp_that_asks_the_machine(module, bucket_mb=25.0):
    ids = [torch.cuda.current_device()] if torch.cuda.is_available() else None
    return DDP(module, device_ids=ids, bucket_cap_mb=bucket_mb)


@wrong("6.4", "device_ids are numbers of GPUs")
def ddp_with_ids_on_the_cpu(module, bucket_mb=25.0):
    return DDP(module, device_ids=[device_of(module).index or 0], bucket_cap_mb=bucket_mb)


@wrong("6.4", "a batch on the CPU fails")
def ddp_without_ids(module, bucket_mb=25.0):
    return DDP(module, bucket_cap_mb=bucket_mb)


@wrong("6.4", "a process of DDP drives one GPU")
def ddp_on_all_gpus(module, bucket_mb=25.0):
    on_gpu = device_of(module).type == "cuda"
    ids = list(range(torch.cuda.device_count())) if on_gpu else None
    return DDP(module, device_ids=ids, bucket_cap_mb=bucket_mb)


@wrong("6.4", "device_ids is a list")
def ddp_with_a_number(module, bucket_mb=25.0):
    return DDP(module, device_ids=device_of(module).index, bucket_cap_mb=bucket_mb)


@wrong("6.4", "bucket_mb is not passed on")
def ddp_of_25_mb(module, bucket_mb=25.0):
    device = device_of(module)
    return DDP(module, device_ids=[device.index] if device.type == "cuda" else None)


@wrong("6.4", "not in bytes")
def ddp_in_bytes(module, bucket_mb=25.0):
    device = device_of(module)
    ids = [device.index] if device.type == "cuda" else None
    return DDP(module, device_ids=ids, bucket_cap_mb=bucket_mb * 1e6)


@wrong("6.4", "you return the module itself")
def ddp_made_and_dropped(module, bucket_mb=25.0):
    wrapping.torch_ddp(module, bucket_mb)
    return module


@wrong("6.4", "you return the module itself")
def ddp_unwrapped(module, bucket_mb=25.0):
    return wrapping.torch_ddp(module, bucket_mb).module


@wrong("6.4", "has no ranks")
def ddp_is_data_parallel(module, bucket_mb=25.0):
    return nn.DataParallel(module)


@wrong("6.4", "the answer is torch's own class")
def ddp_by_hand(module, bucket_mb=25.0):
    return replicas.BucketedDDP(module, bucket_mb)


@wrong("6.4", "leave all else as it is")
def ddp_that_starts_unequal(module, bucket_mb=25.0):
    device = device_of(module)
    ids = [device.index] if device.type == "cuda" else None
    return DDP(module, device_ids=ids, bucket_cap_mb=bucket_mb, init_sync=False)


# ---- 6.5 mean_over_ranks --------------------------------------------------------------------


@right("6.5")
def mean_by_two_messages(total, count, group=None):
    total = total.clone().double()
    items = torch.tensor(count, dtype=torch.int64)
    dist.all_reduce(total, group=group)
    dist.all_reduce(items, group=group)
    return float(total / items)


@right("6.5")
def mean_by_gathering(total, count, group=None):
    pairs = [None] * dist.get_world_size(group)
    dist.all_gather_object(pairs, (total.item(), count), group=group)
    return sum(total for total, _ in pairs) / sum(count for _, count in pairs)


@wrong("6.5", "mean of the ranks' means")
def mean_of_means(total, count, group=None):
    mean = total / max(count, 1)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=group)
    return mean.item()


@wrong("6.5", "`group` is not passed on")
def mean_without_group(total, count, group=None):
    return mean_by_two_messages(total, count)


@wrong("6.5", "cut to an integer")
def mean_of_integers(total, count, group=None):
    both = torch.tensor([int(total), count])
    dist.all_reduce(both, group=group)
    return (both[0] / both[1].double()).item()


@wrong("6.5", "the counts were not")
def mean_forgets_counts(total, count, group=None):
    total = total.clone()
    dist.all_reduce(total, group=group)
    return (total / count).item() if count else float("nan")


@wrong("6.5", "this rank's own mean")
def mean_of_one_rank(total, count, group=None):
    return total.item() / max(count, 1)


@wrong("6.5", "float32 holds 7 digits")
def mean_in_float32(total, count, group=None):
    both = torch.tensor([total.item(), float(count)])
    dist.all_reduce(both, group=group)
    return (both[0] / both[1]).item()


@wrong("6.5", "`total` itself has changed")
def mean_overwrites(total, count, group=None):
    items = torch.tensor(float(count), dtype=torch.float64)
    dist.all_reduce(total, group=group)
    dist.all_reduce(items, group=group)
    return (total / items).item()


@wrong("6.5", "a plain float")
def mean_as_a_tensor(total, count, group=None):
    return torch.tensor(mean_by_two_messages(total, count, group))


@wrong("6.5", "returns None")
def mean_on_rank_0(total, count, group=None):
    mean = mean_by_two_messages(total, count, group)
    if dist.get_rank(group) == 0:
        return mean


@wrong("6.5", "not every rank makes the same calls")
def mean_skips_empty_ranks(total, count, group=None):
    return mean_by_two_messages(total, count, group) if count else 0.0


# ---- 6.6 save_once --------------------------------------------------------------------------


@right("6.6")
def save_with_early_return(module, path, group=None):
    if dist.is_initialized() and dist.get_rank(group) != 0:
        dist.barrier(group)
        return
    path = Path(path)
    new = path.with_name("new")
    torch.save(getattr(module, "module", module).state_dict(), new)
    new.rename(path)
    print("wrote", path, path.stat().st_size)
    if dist.is_initialized():
        dist.barrier(group)


def save_plainly(module, path):
    torch.save(getattr(module, "module", module).state_dict(), f"{path}.new")
    os.replace(f"{path}.new", path)


def wait(group=None):
    if dist.is_initialized():
        dist.barrier(group)


def is_first(group=None):
    return not dist.is_initialized() or dist.get_rank(group) == 0


@wrong("6.6", "write the same file")
def save_on_every_rank(module, path, group=None):
    torch.save(module.module.state_dict(), f"{path}.{os.getpid()}")
    os.replace(f"{path}.{os.getpid()}", path)
    wait(group)


@wrong("6.6", "did not wait for rank 0")
def save_without_barrier(module, path, group=None):
    if is_first(group):
        save_plainly(module, path)
        print("saved")


@wrong("6.6", "not every rank makes the same calls")
def save_barrier_inside(module, path, group=None):
    if is_first(group):
        save_plainly(module, path)
        print("saved")
        wait(group)


@wrong("6.6", "start with 'module.'")
def save_the_wrapper(module, path, group=None):
    if is_first(group):
        torch.save(module.state_dict(), f"{path}.new")
        os.replace(f"{path}.new", path)
        print("saved")
    wait(group)


@wrong("6.6", "a whole model was pickled")
def save_the_object(module, path, group=None):
    if is_first(group):
        torch.save(module, f"{path}.new")
        os.replace(f"{path}.new", path)
        print("saved")
    wait(group)


@wrong("6.6", "the older file was lost")
def save_in_place(module, path, group=None):
    if is_first(group):
        torch.save(getattr(module, "module", module).state_dict(), path)
        print("saved")
    wait(group)


@wrong("6.6", "1 line by rank 0 was asked for")
def save_and_all_print(module, path, group=None):
    if is_first(group):
        save_plainly(module, path)
    wait(group)
    print("saved")


@wrong("6.6", "the old file was removed first")
def save_removes_first(module, path, group=None):
    if is_first(group):
        torch.save(getattr(module, "module", module).state_dict(), f"{path}.new")
        if os.path.exists(path):
            os.remove(path)
        os.rename(f"{path}.new", path)
        print("saved")
    wait(group)


@wrong("6.6", "ask dist.is_initialized() first")
def save_needs_a_group(module, path, group=None):
    if dist.get_rank(group) == 0:
        save_plainly(module, path)
        print("saved")
    dist.barrier(group)


@wrong("6.6", "no rank called torch.save")
def save_nothing(module, path, group=None):
    wait(group)


# ---- 6.7 rendezvous_arguments ---------------------------------------------------------------


@right("6.7")
def arguments_as_pairs(num_nodes, processes_per_node, head_node, job_id, is_head):
    port = 1024 + job_id % 60000
    text = f"--nnodes {num_nodes} --nproc_per_node {processes_per_node} --rdzv_id {job_id} "
    text += f"--rdzv_backend c10d --rdzv_endpoint {head_node}:{port} "
    return (text + f"--rdzv_conf is_host={'true' if is_head else 'false'}").split()


def arguments_with(**changes):
    def answer(num_nodes, processes_per_node, head_node, job_id, is_head):
        call = (num_nodes, processes_per_node, head_node, job_id, is_head)
        options = dict(a[2:].split("=", 1) for a in runtime.rendezvous_arguments(*call))
        for name, change in changes.items():
            options[name.replace("_", "-")] = change(*call)
        return [f"--{name}={value}" for name, value in options.items() if value is not None]

    return answer


WRONG["6.7"] += [
    (
        arguments_with(rdzv_endpoint=lambda n, p, h, j, i: f"localhost:{20000 + j % 20000}"),
        "a different machine on every node",
    ),
    (arguments_with(nproc_per_node=lambda n, p, h, j, i: n * p), "of its own node only"),
    (arguments_with(nnodes=lambda *_: None), "a job of one node on every node"),
    (arguments_with(rdzv_id=lambda n, p, h, j, i: j + i), "agents with different ids"),
    (arguments_with(rdzv_endpoint=lambda n, p, h, j, i: f"{h}:29500"), "would collide"),
    (arguments_with(rdzv_endpoint=lambda n, p, h, j, i: f"{h}:{20000 + j}"), "end at 65535"),
    (
        arguments_with(rdzv_endpoint=lambda n, p, h, j, i: f"{h}:{20000 + j % 9 + i}"),
        "not the same everywhere",
    ),
    (arguments_with(rdzv_conf=lambda *_: None), "is_host=1 on the head"),
    (arguments_with(rdzv_backend=lambda *_: "static"), "--rdzv-backend=c10d"),
    (lambda *_: "--nnodes=2 --nproc-per-node=2", "return a list of texts"),
    (lambda *call: ["--nnodes 3", *runtime.rendezvous_arguments(*call)], "one entry a word"),
    (lambda *call: ["torchrun", *runtime.rendezvous_arguments(*call)], "that is the program"),
    (lambda *call: ["--nprocs=4", *runtime.rendezvous_arguments(*call)], "has that name"),
    (arguments_with(rdzv_endpoint=lambda n, p, h, j, i: f"{h}:port"), "is no number"),
]
