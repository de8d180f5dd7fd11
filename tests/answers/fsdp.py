"""Answers to lesson 10: RIGHT ones differ in shape from the course's own; WRONG ones are no slip of
it, and come with words that the verdict must hold."""

import copy
from collections import Counter
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from manyhands.data_parallel.replicas import broadcast_state
from manyhands.fsdp import flat, zero
from manyhands.fsdp import fully_shard as wrapping
from manyhands.fsdp import units as fsdp
from manyhands.fsdp.flat import all_gather, reduce_scatter

RIGHT: dict[str, list] = {f"10.{number}": [] for number in range(1, 11)}
WRONG: dict[str, list] = {todo: [] for todo in RIGHT}


def right(todo):
    return lambda answer: RIGHT[todo].append(answer) or answer


def wrong(todo, words=""):
    return lambda answer: WRONG[todo].append((answer, words)) or answer


# ---- 10.1 Flat ------------------------------------------------------------------------------


@right("10.1")
class FlatByHand(flat.Flat):
    def __init__(self, params, group=None):
        self.params = [param for param in params]
        self.group, self.replicas = group, None
        self.n = n = dist.get_world_size(group)
        numbers = sum(param.numel() for param in self.params)
        size = (numbers + n - 1) // n
        first = self.params[0]
        self.whole = torch.zeros(n * size, dtype=first.dtype, device=first.device)
        self.padding = self.whole[numbers:].clone()
        torch.cat([p.data.reshape(-1) for p in self.params], out=self.whole[:numbers])
        self.show(self.whole)
        start = dist.get_rank(group) * size
        self.shard = nn.Parameter(self.whole[start : start + size], first.requires_grad)

    def reduce(self):
        whole = torch.zeros(self.whole.shape, dtype=self.shard.dtype)
        start = 0
        for param in self.params:
            if param.grad is not None:
                whole[start : start + param.numel()] = param.grad.flatten()
            param.grad = None
            start += param.numel()
        mine = self.shard.new_empty(self.shard.shape)
        reduce_scatter(mine, whole / self.n, self.group)
        if self.replicas is not None:
            dist.all_reduce(mine, group=self.replicas)
            mine /= dist.get_world_size(self.replicas)
        if self.shard.grad is None:
            self.shard.grad = torch.zeros_like(self.shard)
        self.shard.grad += mine


@right("10.1")
class FlatOfRows(flat.Flat):
    def reduce(self):
        rows = torch.zeros(self.num_ranks, *self.shard.shape, dtype=self.shard.dtype)
        for view, param in zip(self.views(rows.view(-1)), self.params, strict=True):
            if param.grad is not None:
                view.copy_(param.grad)
            param.grad = None
        mine = torch.empty_like(self.shard)
        reduce_scatter(mine, rows.flatten(), self.group)
        copies = 1
        if self.replicas is not None:
            copies = dist.get_world_size(self.replicas)
            dist.all_reduce(mine, group=self.replicas)
        mine.div_(self.num_ranks * copies)
        self.shard.grad = mine.add_(0 if self.shard.grad is None else self.shard.grad)


@wrong("10.1", "fills the whole that is there")
class FlatThatGathersIntoAnother(flat.Flat):
    def gather(self):
        self.whole = torch.empty_like(self.whole)
        return all_gather(self.whole, self.shard.detach().to(self.whole.dtype), self.group)


@wrong("10.1", "keeps no memory but its own")
class FlatThatKeepsAll(flat.Flat):
    def reduce(self):
        super().reduce()
        whole = self.shard.grad.repeat(self.num_ranks + 1)
        self.shard.grad = whole[: len(self.shard)]


# ---- 10.2 ShardedOptimizer ------------------------------------------------------------------


@right("10.2")
class OptimizerByHand(zero.ShardedOptimizer):
    def step(self):
        for one in self.flats:
            if any(param.grad is not None for param in one.params):
                one.reduce()
        self.optimizer.step()
        for one in self.flats:
            one.shard.grad = None
            one.gather().wait()


@right("10.2")
class OptimizerWithMap(zero.ShardedOptimizer):
    def step(self):
        whole = [one for one in self.flats if any(p.grad is not None for p in one.params)]
        list(map(flat.Flat.reduce, whole))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for work in list(map(flat.Flat.gather, self.flats)):
            work.wait()


@wrong("10.2", "messages")
class OptimizerThatBroadcasts(zero.ShardedOptimizer):
    def step(self):
        for one in self.flats:
            if any(param.grad is not None for param in one.params):
                one.reduce()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for one in self.flats:
            for rank, part in enumerate(one.whole.chunk(one.num_ranks)):
                dist.broadcast(part, group_src=rank, group=one.group)


# ---- 10.3 reduce_during_backward ------------------------------------------------------------


@right("10.3")
def reduce_when_all_are_there(flats):
    def register(one):
        def hook(_):
            if all(param.grad is not None for param in one.params):
                one.reduce()

        for param in one.params:
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(hook)

    for one in flats:
        register(one)


@right("10.3")
def reduce_with_a_dict(flats):
    counts = {}

    def hook(param):
        one = owner[param]
        counts[id(one)] = (counts.get(id(one), 0) + 1) % len(one.params)
        if counts[id(one)] == 0:
            one.reduce()

    owner = {param: one for one in flats for param in one.params if param.requires_grad}
    for param in owner:
        param.register_post_accumulate_grad_hook(hook)


@wrong("10.3", "in the first backward")
def reduce_at_the_end(flats):
    def register(one):
        def hook(_):
            if all(param.grad is not None for param in one.params):
                Variable._execution_engine.queue_callback(one.reduce)

        for param in one.params:
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(hook)

    for one in flats:
        register(one)


# ---- 10.4 ShardedFlat -----------------------------------------------------------------------


@right("10.4")
class ShardedFlatByStorage(flat.ShardedFlat):
    def start(self):
        if self.is_whole:
            return
        size = self.whole.numel() * self.whole.element_size()
        self.whole.untyped_storage().resize_(size)
        self.coming = self.gather()

    def wait(self):
        if not self.is_whole:
            self.start()
        if self.coming:
            self.coming.wait()  # waiting twice is no harm

    def free(self):
        if self.coming:
            self.coming.wait()
        self.whole.untyped_storage().resize_(0)


@right("10.4")
class ShardedFlatThroughAParameter(flat.ShardedFlat):
    def free(self):
        if self.coming:
            self.coming.wait()
        self.params[0].untyped_storage().resize_(0)
        self.coming = None


@wrong("10.4", "makes a new tensor of `whole`")
class ShardedFlatOfNewTensors(flat.ShardedFlat):
    def start(self):
        if self.coming is None and not self.is_whole:
            self.show(torch.empty(self.whole.shape, dtype=self.whole.dtype))
            self.coming = self.gather()


# ---- 10.5 FSDP ------------------------------------------------------------------------------


@right("10.5")
class InAnotherOrder(fsdp.FSDP):
    """Starts before it waits, frees before it reduces, and gathers what it does in lists."""

    def before_forward(self, index):
        if index == 0:
            [one.free() for unit in self.units for one in unit]
        coming = self.units[index + 1 : index + 2]
        for one in chain(self.units[index], *coming):
            one.start()
        [one.wait() for one in self.units[index]]

    def after_forward(self, index):
        if index == 0 or not self.reshard:
            return
        [one.free() for one in self.units[index]]

    def before_backward(self, index):
        for one in self.units[index] + self.units[index - 1]:
            one.start()
        [one.wait() for one in self.units[index]]

    def after_backward(self, index):
        trainable = [one for one in self.units[index] if one.shard.requires_grad]
        [one.free() for one in trainable]
        [one.reduce() for one in trainable]


@right("10.5")
class WithAPhaseOfItsOwn(fsdp.FSDP):
    def before_forward(self, index):
        if index == 0:
            self.phase = "forward"
            for one in sum(self.units, []):
                one.free()
        for one in self.units[index]:
            one.start()
            one.wait()
        if self.phase == "forward" and index != len(self.units) - 1:
            for one in self.units[index + 1]:
                one.start()

    def after_forward(self, index):
        if self.phase == "forward" and self.reshard and index:
            for one in self.units[index]:
                one.free()

    def before_backward(self, index):
        self.phase = "backward"
        super().before_backward(index)


@wrong("10.5", "nobody has waited for it")
class OnlyStarts(fsdp.FSDP):
    def before_forward(self, index):
        super().before_forward(index)
        for one in self.units[index]:
            one.free()
            one.start()


@wrong("10.5", "on their way")
class WaitsForTheNextToo(fsdp.FSDP):
    def before_forward(self, index):
        super().before_forward(index)
        for one in chain(*self.units[index + 1 : index + 2]):
            one.wait()


@wrong("10.5", "an earlier layer of it may still need frozen weights")
class FreesFrozenToo(fsdp.FSDP):
    def after_backward(self, index):
        for one in self.units[index]:
            if one.shard.requires_grad:
                one.reduce()
            one.free()


@wrong("10.5", "needs room beside them")
class ReducesFirst(fsdp.FSDP):
    def after_backward(self, index):
        for one in self.units[index]:
            if one.shard.requires_grad:
                one.reduce()
                one.free()


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


@right("10.6")
def calls_in_closed_form(num_blocks, reshard=True, replicas=1):
    gathers = 2 * num_blocks + 1 if reshard else num_blocks + 1
    averages = (num_blocks + 1) * (replicas > 1)
    return {
        "all_reduce": averages,
        "reduce_scatter": num_blocks + 1,
        "all_gather": gathers,
    }


@wrong("10.6", "all_gather: 4")
def calls_of_parameters(num_blocks, reshard=True, replicas=1):
    found = calls_in_closed_form(num_blocks, reshard, replicas)
    return found | {"all_gather": 12 * num_blocks + 4}


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


@wrong("10.7", "cannot be broadcast like this")
def fsdp_broadcast_late(module, units, mesh=None, reshard=None, dtype=None, offload=False):
    for part in [*units, module]:
        fully_shard(part, mesh=mesh)
    broadcast_state(module)
    return module


@wrong("10.7", "is not the module that it was given")
def fsdp_of_a_copy(module, units, mesh=None, reshard=None, dtype=None, offload=False):
    return wrapping.torch_fsdp(copy.deepcopy(module), [], mesh)


@wrong("10.7", "units: ")
def fsdp_of_every_linear(module, units, mesh=None, reshard=None, dtype=None, offload=False):
    linear = [part for part in module.modules() if isinstance(part, nn.Linear)]
    return wrapping.torch_fsdp(module, linear, mesh, reshard, dtype, offload)


# ---- 10.8 make_mesh -------------------------------------------------------------------------


@right("10.8")
def mesh_from_a_table(replicas, shards, device_type="cpu"):
    table = torch.arange(replicas * shards).reshape(replicas, shards)
    return DeviceMesh(device_type, table, mesh_dim_names=("replicate", "shard"))


@right("10.8")
def mesh_with_a_list_of_names(replicas, shards, device_type="cpu"):
    return init_device_mesh(device_type, [replicas, shards], mesh_dim_names=["replicate", "shard"])


@wrong("10.8", "is not the number of ranks")
def mesh_that_is_too_large(replicas, shards, device_type="cpu"):
    return init_device_mesh(device_type, (replicas, 2 * shards))


# ---- 10.9 options_of ------------------------------------------------------------------------

ALL = {
    "FULL_SHARD": {"reshard": True, "mesh_dims": 1},
    "SHARD_GRAD_OP": {"reshard": False, "mesh_dims": 1},
    "HYBRID_SHARD": {"reshard": True, "mesh_dims": 2},
    "_HYBRID_SHARD_ZERO2": {"reshard": False, "mesh_dims": 2},
}


@right("10.9")
def options_from_a_table(strategy):
    return ALL[strategy]


@right("10.9")
def options_from_words(strategy):
    dims = 1.0 + (strategy.count("HYBRID") > 0)
    return {"mesh_dims": dims, "reshard": not strategy.endswith(("GRAD_OP", "ZERO2"))}


@wrong("10.9", "gives None")
def options_with_none(strategy):
    return ALL[strategy] | {"reshard": None}


# ---- 10.10 train_sharded --------------------------------------------------------------------


def train_with(share, model, units, batches, rate, collect=wrapping.full_state, **options):
    sharded = wrapping.torch_fsdp(model, units)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=rate, **options)
    for inputs, targets in batches:
        optimizer.zero_grad()
        sharded(share(inputs), share(targets)).backward()
        optimizer.step()
    return collect(sharded)


def strided(part):
    return part[dist.get_rank() :: dist.get_world_size()]


@right("10.10")
def train_on_blocks(model, units, batches, learning_rate):
    def share(part):
        return part.chunk(dist.get_world_size())[dist.get_rank()]

    return train_with(share, model, units, batches, learning_rate)


@right("10.10")
def train_on_every_nth(model, units, batches, learning_rate):
    return train_with(strided, model, units, batches, learning_rate)


@wrong("10.10", "the values returned")
def train_with_amsgrad(model, units, batches, learning_rate):
    return train_with(strided, model, units, batches, learning_rate, amsgrad=True)


@wrong("10.10", "in train mode")
def train_in_eval(model, units, batches, learning_rate):
    return train_with(strided, model.eval(), units, batches, learning_rate)
