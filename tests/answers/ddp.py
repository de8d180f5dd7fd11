"""Answers to lesson 06: RIGHT ones of other form than the course's own, and WRONG ones that are no
slip of it, with words that the verdict must hold."""

import os
import random
import re
import time
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset

from manyhands.data import corpus
from manyhands.data_parallel import replicas
from manyhands.ddp import wrapping
from manyhands.models.transformer import total_loss
from manyhands.programs import ddp
from manyhands.ranks import runtime
from manyhands.ranks.runtime import World
from manyhands.training import run, schedule
from manyhands.training import run as run_file

DDP = nn.parallel.DistributedDataParallel

# ---- 6.1 ------------------------------------------------------------------------------------


def place_step_by_step(environ, num_gpus):
    alone = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    rank, local, size, here = (int(environ.get(name, number)) for name, number in alone.items())
    device = torch.device("cuda", local) if here <= num_gpus else torch.device("cpu")
    return World(rank, local, size, device)


def place_asks_torch(environ, num_gpus):
    world = place_step_by_step(environ, num_gpus)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return World(world.rank, world.local_rank, world.world_size, device)


def place_in_a_namespace(environ, num_gpus):
    return SimpleNamespace(**vars(place_step_by_step(environ, num_gpus)))


def place_needs_torchrun(environ, num_gpus):
    int(environ["WORLD_SIZE"])
    return place_step_by_step(environ, num_gpus)


# ---- 6.2 ------------------------------------------------------------------------------------


class GroupAsAClass:
    def __init__(self, world, timeout_s=120):
        self.world, self.timeout_s = world, timeout_s

    def __enter__(self):
        limit = timedelta(seconds=self.timeout_s)  # torch picks gloo or NCCL
        size, rank = self.world.world_size, self.world.rank
        dist.init_process_group(timeout=limit, world_size=size, rank=rank)

    def __exit__(self, *_):
        dist.destroy_process_group()


@contextmanager
def group_with_a_barrier_at_its_end(world, timeout_s=120):
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    backend = "NCCL" if world.device.type == "cuda" else "GLOO"
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, None, limit, world.world_size, world.rank)
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


@contextmanager
def group_at_an_address(world, timeout_s=120):
    limit = timedelta(seconds=timeout_s)
    where = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, where, limit, world.world_size, world.rank)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def group_returns(world, timeout_s=120):
    dist.init_process_group(timeout=timedelta(seconds=timeout_s))
    return


# ---- 6.3 ------------------------------------------------------------------------------------


class SamplerWithPythonsRandom(corpus.ShardedSampler):
    def __iter__(self):
        order = list(range(self.num_samples))
        random.Random(f"{self.seed} {self.epoch}").shuffle(order)
        for position, index in enumerate(order):
            if position % self.world_size == self.rank:
                yield index

    def __len__(self):
        whole, rest = divmod(self.num_samples, self.world_size)
        return whole + (self.rank < rest)


class SamplerThatPicks(corpus.ShardedSampler):
    def __iter__(self):
        torch_s = RandomSampler(range(self.num_samples), generator=self._generator())
        return (index for place, index in enumerate(torch_s) if self._is_mine(place))

    def _generator(self):
        return torch.Generator().manual_seed(self.epoch + self.seed)

    def _is_mine(self, place):
        return place % self.world_size == self.rank


class SamplerThatRotates(corpus.ShardedSampler):
    def __iter__(self):
        start = 7 * (self.seed + self.epoch)
        order = [(start + i) % self.num_samples for i in range(self.num_samples)]
        return iter(order[self.rank :: self.world_size])


class SamplerThatKeepsItsOrder(SamplerWithPythonsRandom):
    def __iter__(self):
        self.kept = getattr(self, "kept", None) or list(super().__iter__())
        return iter(self.kept)


class SamplerReadOnce(SamplerWithPythonsRandom):
    def __iter__(self):
        if not hasattr(self, "left"):
            self.left = list(super().__iter__())
        while self.left:
            yield self.left.pop(0)


class SamplerInASnake(SamplerWithPythonsRandom):
    def __iter__(self):
        order = list(corpus.ShardedSampler(self.num_samples, 0, 1, self.seed + self.epoch))
        for start in range(0, self.num_samples, self.world_size):
            row = order[start : start + self.world_size]
            if start // self.world_size % 2 and len(row) == self.world_size:
                row.reverse()
            yield from row[self.rank : self.rank + 1]


# ---- 6.4 ------------------------------------------------------------------------------------


def accumulate_but_the_last(model, micro_batches, loss_fn):
    *early, (inputs, targets) = micro_batches
    losses = []
    if early:
        with model.no_sync():
            for x, y in early:
                losses.append(loss_fn(model(x), y))
                losses[-1].div(len(micro_batches)).backward()
    losses.append(loss_fn(model(inputs), targets))
    (losses[-1] / len(micro_batches)).backward()
    return torch.stack(losses).mean().item()


def accumulate_with_a_stack(model, micro_batches, loss_fn):
    share = 1 / len(micro_batches)
    values = []
    for index in range(len(micro_batches)):
        with ExitStack() as stack:
            if index + 1 < len(micro_batches):
                stack.enter_context(model.no_sync())
            inputs, targets = micro_batches[index]
            loss = loss_fn(model(inputs), targets)
            loss.backward(torch.tensor(share))
        values.append(loss.item())
    return sum(values) / len(values)


def accumulate_as_one_batch(model, micro_batches, loss_fn):
    inputs = torch.cat([x for x, _ in micro_batches])
    targets = torch.cat([y for _, y in micro_batches])
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    return loss.item()


def accumulate_in_eval_mode(model, micro_batches, loss_fn):
    model.eval()
    return wrapping.accumulate(model, micro_batches, loss_fn)


def accumulate_and_keep_the_tensor(model, micro_batches, loss_fn):
    return torch.tensor(wrapping.accumulate(model, micro_batches, loss_fn))


# ---- 6.5 ------------------------------------------------------------------------------------


def mean_by_two_messages(total, count, group=None):
    total = total.clone().double()
    items = torch.tensor(count, dtype=torch.int64)
    dist.all_reduce(total, group=group)
    dist.all_reduce(items, group=group)
    return float(total / items)


def mean_by_gathering(total, count, group=None):
    pairs = [None] * dist.get_world_size(group)
    dist.all_gather_object(pairs, (total.item(), count), group=group)
    return sum(total for total, _ in pairs) / sum(count for _, count in pairs)


def mean_of_means(total, count, group=None):
    mean = total / max(count, 1)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=group)
    return mean.item()


def mean_on_rank_0(total, count, group=None):
    mean = mean_by_two_messages(total, count, group)
    if dist.get_rank(group) == 0:
        return mean


def mean_of_all_calls(total, count, group=None):
    mean_of_all_calls.sums = getattr(mean_of_all_calls, "sums", 0) + total.double()
    mean_of_all_calls.counts = getattr(mean_of_all_calls, "counts", 0) + count
    return mean_by_two_messages(mean_of_all_calls.sums, mean_of_all_calls.counts, group)


# ---- 6.6 ------------------------------------------------------------------------------------


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


def save_and_tell(module, path, group=None):
    alone = not dist.is_initialized()
    told = [None]
    if alone or dist.get_rank(group) == 0:
        state = (module.module if hasattr(module, "module") else module).state_dict()
        torch.save(state, f"{path}.{os.getpid()}")
        os.replace(f"{path}.{os.getpid()}", path)
        told = [os.path.getsize(path)]
        print(f"{path}: {told[0]} bytes")
    if not alone:
        dist.broadcast_object_list(told, group=group, group_src=0)


def save_plainly(module, path):
    torch.save(getattr(module, "module", module).state_dict(), f"{path}.new")
    os.replace(f"{path}.new", path)
    print(path, os.path.getsize(path))


def save_and_poll(module, path, group=None):
    if not dist.is_initialized() or dist.get_rank(group) == 0:
        save_plainly(module, path)
    while not os.path.exists(path):
        time.sleep(0.01)


def save_whatever_happens(module, path, group=None):
    try:
        run.save_once(module, path, group)
    except Exception as error:
        print(error)


def save_zeros(module, path, group=None):
    if not dist.is_initialized() or dist.get_rank(group) == 0:
        state = getattr(module, "module", module).state_dict()
        torch.save({name: 0 * value for name, value in state.items()}, f"{path}.new")
        os.replace(f"{path}.new", path)
        print(path, os.path.getsize(path))
    if dist.is_initialized():
        dist.barrier(group)


def save_only_with_others(module, path, group=None):
    if dist.is_initialized():
        run.save_once(module, path, group)


# ---- 6.7 ------------------------------------------------------------------------------------


def arguments_as_pairs(num_nodes, processes_per_node, head_node, job_id, is_head):
    port = 20_000 + job_id % 10_000
    text = f"--nnodes {num_nodes} --nproc_per_node {processes_per_node} --rdzv_id {job_id} "
    text += f"--rdzv_backend c10d --rdzv_endpoint {head_node}:{port} "
    return (text + f"--rdzv_conf is_host={'true' if is_head else 'false'}").split()


def arguments_in_a_tuple(num_nodes, processes_per_node, head_node, job_id, is_head):
    host = f"{head_node}:{20_000 + job_id % 10_000}"
    named = {"nnodes": f"{num_nodes}:{num_nodes}", "nproc-per-node": processes_per_node}
    named |= {"rdzv-id": f"job{job_id}", "rdzv-backend": "c10d", "rdzv-endpoint": host}
    named["rdzv-conf"] = f"timeout=900,is_host={is_head}"
    return tuple(f"--{name}={value}" for name, value in named.items())


def arguments_with_a_node_rank(*call):
    return [*runtime.rendezvous_arguments(*call), f"--node-rank={0 if call[-1] else 1}"]


def arguments_with_another_port(nodes, processes, head, job_id, is_head):
    found = runtime.rendezvous_arguments(nodes, processes, head, job_id, is_head)
    return [*found[:4], f"--rdzv-endpoint={head}:{1024 + job_id % 60_000}", found[5]]


# ---- 6.8 ------------------------------------------------------------------------------------


def train_in_pieces(run, model, data):
    """Solid pieces of the validation data, a batch sampler, the loss of both splits alike."""
    rank, size = run.world.rank, run.world.world_size
    torch.manual_seed(run.world.data_seed)
    whole = corpus.ShardedSampler(len(data.train), rank=rank, world_size=size, seed=run.config.seed)
    batches = BatchSampler(whole, run.config.batch // size, drop_last=False)
    loader = DataLoader(data.train, batch_sampler=batches)
    model = DDP(model)
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=run.config.learning_rate)

    def piece(part):
        first, stop = (len(part) * r // size for r in (rank, rank + 1))
        return DataLoader(Subset(part, range(first, stop)), batch_size=3)

    def over_all(batches):
        total, count = total_loss(model, batches, run.world.device)
        return wrapping.mean_over_ranks(total, count)

    run.resume(model, optimizer)
    run.keep_best(over_all, piece(data.valid))
    for epoch in run.epochs(loader):
        whole.set_epoch(epoch)
        for batch in run.batches(loader):
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = schedule.learning_rate_at(run.step, run.config)
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            run.log(loss.detach())
    run.test(piece(data.test), data.in_words)
    run_file.save_once(model.module, str(run.folder / "model.pt"))


def train_with_buckets_by_hand(run, model, data):
    """Lesson 05's class in place of torch's."""
    real = ddp.torch_ddp
    ddp.torch_ddp = replicas.BucketedDDP
    try:
        ddp.train(run, model, data)
    finally:
        ddp.torch_ddp = real


def train_one_process_on_each(run, model, data):
    """The program of one process, as it is."""
    config, world = run.config, run.world
    order = torch.Generator()
    sampler = RandomSampler(data.train, generator=order)
    loader = DataLoader(data.train, config.batch, sampler=sampler, drop_last=True)
    valid = DataLoader(data.valid, config.batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, fused=True)

    def mean_loss(batches):
        total, count = total_loss(model, batches, world.device)
        return (total / count).item()

    run.resume(model, optimizer)
    run.keep_best(mean_loss, valid)
    for epoch in run.epochs(loader):
        order.manual_seed(config.seed + epoch)
        for inputs, targets in run.batches(loader):
            schedule.set_learning_rate(optimizer, schedule.learning_rate_at(run.step, config))
            loss = model(inputs, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss)
    run.test(DataLoader(data.test, config.batch), data.in_words)
    torch.save(model.state_dict(), run.folder / "model.pt")


def train_saves_before_its_last_step(run, model, data):
    """All is right but for the file, which holds the weights of the beginning."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ddp.train(run, model, data)
    if run.world.rank == 0:
        torch.save(before, run.folder / "model.pt")


def place_with_one_node(environ, num_gpus):
    """A missing LOCAL_WORLD_SIZE is taken for the number of all processes."""
    environ = {"LOCAL_WORLD_SIZE": environ.get("WORLD_SIZE", "1"), **environ}
    return runtime.place(environ, num_gpus)


def place_by_all_or_none(environ, num_gpus):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return runtime.place(environ if all(name in environ for name in names) else {}, num_gpus)


@contextmanager
def group_on_this_machine(world, timeout_s=120):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    with runtime.process_group(world, timeout_s):
        yield


@contextmanager
def group_of_many_only(world, timeout_s=120):
    with runtime.process_group(world, timeout_s) if world.world_size > 1 else nullcontext():
        yield


class SamplerWithNumpysNumbers(corpus.ShardedSampler):
    def __iter__(self):
        order = np.random.default_rng(self.seed + self.epoch).permutation(self.num_samples)
        return iter(order[self.rank :: self.world_size].tolist())


def accumulate_by_torchs_flag(model, micro_batches, loss_fn):
    """The course's own BucketedDDP has no such flag."""
    total = 0.0
    for number, (inputs, targets) in enumerate(micro_batches, start=1):
        model.require_backward_grad_sync = number == len(micro_batches)
        loss = loss_fn(model(inputs), targets) / len(micro_batches)
        loss.backward()
        total += loss.item()
    return total


def accumulate_and_average_the_loss(model, micro_batches, loss_fn):
    return wrapping.mean_over_ranks(
        torch.tensor(wrapping.accumulate(model, micro_batches, loss_fn)), 1
    )


def mean_of_rounded_counts(total, count, group=None):
    both = torch.stack([total, torch.tensor(count, dtype=total.dtype)]).double()
    dist.all_reduce(both, group=group)
    return (both[0] / both[1]).item()


def save_of_a_wrapper(model, path, group=None):
    """Asks for the two classes that wrap."""
    is_wrapped = isinstance(model, DDP | replicas.BucketedDDP)
    run.save_once(model.module if is_wrapped else model, path, group)


def save_and_tell_too_early(model, path, group=None):
    if not dist.is_initialized() or dist.get_rank(group) == 0:
        partial = f"{path}.new"
        torch.save(getattr(model, "module", model).state_dict(), partial)
        print(f"saved {partial} ({os.path.getsize(partial)} bytes)")
        os.replace(partial, path)
    if dist.is_initialized():
        dist.barrier(group)


def arguments_without_a_port(num_nodes, processes_per_node, head_node, job_id, is_head):
    whole = runtime.rendezvous_arguments(num_nodes, processes_per_node, head_node, job_id, is_head)
    return [re.sub(r"(endpoint=.*):\d+", r"\1", word) for word in whole]


class Around:
    """A run whose answer does something else in one of its moments."""

    def __init__(self, run, **instead):
        self.__dict__.update(whole=run, instead=instead)

    def __getattr__(self, name):
        return self.instead.get(name, getattr(self.whole, name))

    def __setattr__(self, name, value):
        setattr(self.whole, name, value)


def train_with_barriers(run, model, data):
    assert dist.get_rank() == run.world.rank
    ddp.train(run, model, data)
    dist.barrier()


def train_saves_the_last_weights(run, model, data):
    kept = {}

    def test(*given):
        kept.update({name: value.clone() for name, value in model.state_dict().items()})
        run.test(*given)
        model.load_state_dict(kept)

    ddp.train(Around(run, test=test), model, data)


def train_in_eval_mode(run, model, data):
    def batches(loader):
        model.eval()
        yield from run.batches(loader)

    ddp.train(Around(run, batches=batches), model, data)


def train_with_clipping(run, model, data):
    def resume(wrapped, optimizer):
        run.resume(wrapped, optimizer)
        clip = torch.nn.utils.clip_grad_norm_
        step = optimizer.step
        optimizer.step = lambda: (clip(model.parameters(), 1.0), step())

    ddp.train(Around(run, resume=resume), model, data)


RIGHT: dict[str, list] = {
    "6.1": [runtime.place, place_step_by_step],
    "6.2": [runtime.process_group, GroupAsAClass, group_with_a_barrier_at_its_end],
    "6.3": [corpus.ShardedSampler, SamplerThatPicks],
    "6.4": [wrapping.accumulate, accumulate_but_the_last, accumulate_with_a_stack],
    "6.5": [wrapping.mean_over_ranks, mean_by_two_messages, mean_by_gathering],
    "6.6": [run.save_once, save_with_early_return, save_and_tell, save_of_a_wrapper],
    "6.7": [runtime.rendezvous_arguments, arguments_as_pairs, arguments_in_a_tuple],
    "6.8": [ddp.train, train_in_pieces, train_with_buckets_by_hand, train_with_barriers],
}
WRONG: dict[str, list] = {
    "6.1": [
        (place_asks_torch, "always the CPU"),
        (place_in_a_namespace, "asks for a World"),
        (place_needs_torchrun, "Without torchrun the variables are not set"),
        (place_with_one_node, "'cpu', not"),
        (place_by_all_or_none, "the table of the four variables"),
    ],
    "6.2": [
        (group_at_an_address, "torch reads MASTER_ADDR and MASTER_PORT"),
        (group_returns, "has to yield"),
        (group_on_this_machine, "MASTER_ADDR and MASTER_PORT stay"),
        (group_of_many_only, "also where the process is alone"),
    ],
    "6.3": [
        (SamplerWithPythonsRandom, "what RandomSampler does"),
        (SamplerThatRotates, "the samples are shuffled"),
        (SamplerThatKeepsItsOrder, ""),
        (SamplerReadOnce, "one object can be read twice"),
        (SamplerInASnake, "dealt out like cards"),
        (SamplerWithNumpysNumbers, "what RandomSampler does"),
    ],
    "6.4": [
        (accumulate_as_one_batch, "the sizes of the batches"),
        (accumulate_in_eval_mode, "training mode"),
        (accumulate_and_keep_the_tensor, "a plain float"),
        (accumulate_by_torchs_flag, "with BucketedDDP"),
        (accumulate_and_average_the_loss, "needs no message"),
    ],
    "6.5": [
        (mean_of_means, "mean of the ranks' means"),
        (mean_on_rank_0, "a plain float"),
        (mean_of_all_calls, "the mean of a second call"),
        (mean_of_rounded_counts, "the mean"),
    ],
    "6.6": [
        (save_and_poll, "meet in a message once the file is there"),
        (save_whatever_happens, "when the disk is full"),
        (save_zeros, "the file"),
        (save_only_with_others, "how often torch.save is called: 0"),
        (save_and_tell_too_early, "line has the path"),
    ],
    "6.7": [
        (arguments_with_a_node_rank, "other arguments: ['--node-rank']"),
        (arguments_with_another_port, "20000 + job_id % 10000"),
        (arguments_without_a_port, "the port of --rdzv-endpoint"),
    ],
    "6.8": [
        (train_one_process_on_each, "sequences per step on this rank"),
        (train_saves_before_its_last_step, "the weights in model.pt"),
        (train_saves_the_last_weights, "Save after it"),
        (train_in_eval_mode, "training mode in each step"),
        (train_with_clipping, "the gradients, step by step"),
    ],
}
