"""Answers to lesson 09: RIGHT ones differ in shape from the course's own; WRONG ones are no slip of
it, and come with words that the verdict must hold."""

import gc

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks

from manyhands.memory import savings
from manyhands.memory.accounting import Offload, Recipe
from manyhands.memory.savings import rng_states, set_rng_states

RIGHT: dict[str, list] = {f"9.{number}": [] for number in range(1, 9)}
WRONG: dict[str, list] = {todo: [] for todo in RIGHT}


def right(todo):
    return lambda answer: RIGHT[todo].append(answer) or answer


def wrong(todo, words=""):
    return lambda answer: WRONG[todo].append((answer, words)) or answer


# ---- 9.1 recipe -----------------------------------------------------------------------------


@right("9.1")
def recipe_of_bits(weights, gradients, states, master=None):
    optimizer = 0
    for dtype in states:
        optimizer += torch.finfo(dtype).bits // 8
    if master is not None:
        optimizer += torch.finfo(master).bits // 8
    return Recipe(weights.itemsize, gradients.itemsize, optimizer)


@right("9.1")
def recipe_of_tensors(weights, gradients, states, master=None):
    sizes = [torch.empty(1, dtype=d).element_size() for d in [weights, gradients, *states]]
    copy = master.itemsize if master else 0
    return Recipe(*torch.tensor([sizes[0], sizes[1], sum(sizes[2:]) + copy]))


@wrong("9.1", "Types that are not in this table may come")
def recipe_by_a_table(weights, gradients, states, master=None):
    size = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2, torch.float64: 8}
    kept = [*states, *([master] if master else [])]
    return Recipe(size[weights], size[gradients], sum(size[dtype] for dtype in kept))


@wrong("9.1", "optimizer: ")
def recipe_whose_copy_is_the_longer_one(weights, gradients, states, master=None):
    copy = master.itemsize if master and master.itemsize > weights.itemsize else 0
    return Recipe(weights.itemsize, gradients.itemsize, sum(d.itemsize for d in states) + copy)


# ---- 9.2 bytes_per_rank ---------------------------------------------------------------------


@right("9.2")
def bytes_by_padding(sizes, recipe, stage, world_size):
    w, g, o = recipe
    padded = [size + (-size) % world_size for size in sizes]
    shard = sum(padded) // world_size
    weights, gradients, states = sum(padded), sum(sizes), shard
    if stage == 0:
        weights = states = sum(sizes)
    if stage >= 2:
        gradients = shard
    if stage == 3:
        weights = shard
    optimizer = states * o
    if o > 0:
        optimizer += 4 * len(sizes)
    return Recipe(weights * w, gradients * g, optimizer)


@right("9.2")
def bytes_of_arrays(sizes, recipe, stage, world_size):
    shards = np.ceil(np.array(sizes) / world_size).astype(int)
    whole = np.array(sizes) if stage == 0 else shards * world_size
    cut = {"weights": 3, "gradients": 2, "optimizer": 1}
    full = {"weights": whole, "gradients": np.array(sizes), "optimizer": whole}
    found = {
        part: (shards if stage >= first else full[part]).sum() * getattr(recipe, part)
        for part, first in cut.items()
    }
    found["optimizer"] += 4 * len(sizes) * bool(recipe.optimizer)
    return Recipe(**found)


@wrong("9.2", "bytes_per_rank([")
def bytes_of_small_vectors_uncut(sizes, recipe, stage, world_size):
    large = [size for size in sizes if size >= world_size]
    small = [size for size in sizes if size < world_size]
    cut = bytes_by_padding(large, recipe, stage, world_size)
    whole = bytes_by_padding(small, recipe, 0, world_size)
    return Recipe(*(one + other for one, other in zip(cut, whole, strict=True)))


# ---- 9.3 block_activations ------------------------------------------------------------------


@right("9.3")
def block_line_by_line(tokens, width, heads, nbytes=4):
    number = tokens * nbytes
    kept = {"down": 4 * width * number, "gelu": 4 * width * number, "dropout": 0}
    kept["up"] = kept["qkv"] = width * number
    kept["norm1"] = width * number + 2 * number
    kept["norm2"] = kept["norm1"]
    kept["attention"] = 3 * width * number + width * number + heads * number
    kept["out"] = 0
    return kept


@right("9.3")
def block_of_tensors(tokens, width, heads, nbytes=4):
    D, names = width, "norm1 qkv attention out norm2 up gelu down".split()
    numbers = torch.tensor([D + 2, D, 4 * D + heads, 0, D + 2, D, 4 * D, 4 * D])
    return dict(zip(names, tokens * nbytes * numbers, strict=True))


@wrong("9.3", "gives norm1: ")
def block_of_short_or_long_numbers(tokens, width, heads, nbytes=4):
    return block_line_by_line(tokens, width, heads, 2 if nbytes == 2 else 4)


# ---- 9.4 saved_bytes ------------------------------------------------------------------------


@right("9.4")
def saved_with_storages_kept(run, params):
    own = {param.untyped_storage()._cdata for param in params}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    total = sum(storage.nbytes() for storage in kept.values())
    del result
    return torch.tensor(total)


@right("9.4")
def saved_with_a_list(run, params):
    tensors = []

    def pack(tensor):
        tensors.append(tensor)
        return len(tensors) - 1

    with saved_tensors_hooks(pack, tensors.__getitem__):
        result = run()
    total, seen = 0, [param.untyped_storage().data_ptr() for param in params]
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.append(storage.data_ptr())
            total += storage.size()
    del result
    return float(total)


@wrong("9.4", "matches none")
def saved_by_the_collector(run, params):
    before = {id(one) for one in gc.get_objects() if isinstance(one, torch.Tensor)}
    result = run()
    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    return sum(one.nbytes for one in tensors if id(one) not in before and one is not result)


@wrong("9.4", "raises RuntimeError: Trying to backward")
def saved_in_backward(run, params):
    own = {param.untyped_storage().data_ptr() for param in params}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
        if result.requires_grad:
            result.sum().backward()
    return sum(nbytes for place, nbytes in kept.items() if place not in own)


# ---- 9.5 accumulate -------------------------------------------------------------------------


@right("9.5")
def accumulate_floats(model, micro_batches):
    total = sum(y.numel() for _, y in micro_batches)
    mean = 0.0
    for x, y in micro_batches:
        loss = model(x, y)
        (loss * y.numel() / total).backward()
        mean += loss.item() * y.numel() / total
    return mean


@right("9.5")
def accumulate_beside(model, micro_batches):
    params = [param for param in model.parameters() if param.requires_grad]
    sums, losses, count = [torch.zeros_like(param) for param in params], 0, 0
    for x, y in micro_batches:
        loss = model(x, y) * y.numel()
        for total, grad in zip(sums, torch.autograd.grad(loss, params), strict=True):
            total += grad
        losses, count = losses + loss.detach(), count + y.numel()
    for param, total in zip(params, sums, strict=True):
        total /= count
        param.grad = total if param.grad is None else param.grad + total
    return losses / count


@wrong("9.5", "calls of the model, by the size of the last argument")
def accumulate_puts_together(model, micro_batches):
    loss = model(*(torch.cat(parts) for parts in zip(*micro_batches, strict=True)))
    loss.backward()
    return loss.item()


@wrong("9.5", "the gradient of tokens")
def accumulate_clipped(model, micro_batches):
    loss = savings.accumulate(model, micro_batches)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return loss


# ---- 9.6 Checkpoint -------------------------------------------------------------------------


def keep_inputs(ctx, function, x, params):
    ctx.function, ctx.rng = function, rng_states(x.device)
    ctx.save_for_backward(x, *params)


def run_again(ctx, x):
    now = rng_states(x.device)
    set_rng_states(ctx.rng, x.device)
    with torch.enable_grad():
        result = ctx.function(x)
    set_rng_states(now, x.device)
    return result


def checkpoint(forward=None, backward=None):
    """A Checkpoint of one own method, or of two."""

    def usual(ctx, function, x, *params):
        keep_inputs(ctx, function, x, params)
        return function(x)

    parts = {"forward": staticmethod(forward or usual)}
    parts["backward"] = staticmethod(backward or savings.Checkpoint.backward)
    return type("Checkpoint", (torch.autograd.Function,), parts)


def back(prepare=lambda x: x.detach().requires_grad_(), give=None):
    """A backward in which one part can be another."""

    def usual(again, x, params, grad):
        return None, *torch.autograd.grad(again, (x, *params), grad)

    def backward(ctx, grad):
        x, *params = ctx.saved_tensors
        x = prepare(x)
        return (give or usual)(run_again(ctx, x), x, params, grad)

    return checkpoint(backward=backward)


def what_is_needed(again, x, params, grad):
    inputs = [tensor for tensor in (x, *params) if tensor.requires_grad]
    return None, *[None] * (not x.requires_grad), *torch.autograd.grad(again, inputs, grad)


RIGHT["9.6"] += [back(), back(prepare=lambda x: x, give=what_is_needed)]


@right("9.6")
class CheckpointOnce(savings.Checkpoint):
    __module__ = "__main__"  # so it is sent to a rank as a notebook's class is: by value
    backward = staticmethod(
        torch.autograd.function.once_differentiable(savings.Checkpoint.backward)
    )


@right("9.6")
class CheckpointInTwoParts(torch.autograd.Function):
    @staticmethod
    def forward(function, x, *params):
        CheckpointInTwoParts.rng = rng_states(x.device)
        return function(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        keep_inputs(ctx, *inputs[:2], inputs[2:])
        ctx.rng = CheckpointInTwoParts.rng

    backward = staticmethod(savings.Checkpoint.backward)


@wrong("9.6", "is alive after forward")
class CheckpointThatKeepsTheGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, x, *params):
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.params = params
            ctx.result = function(ctx.x)
        return ctx.result.detach()

    @staticmethod
    def backward(ctx, grad):
        return None, *torch.autograd.grad(ctx.result, (ctx.x, *ctx.params), grad)


def forward_with_a_graph(ctx, function, x, *params):
    keep_inputs(ctx, function, x, params)
    with torch.enable_grad():
        result = function(x)
    return result.detach()


WRONG["9.6"].append((checkpoint(forward_with_a_graph), "records nothing while the function runs"))


def drops_gradients(again, x, params, grad):
    found = torch.autograd.grad(again, (x, *params), grad)
    for param in params:
        param.grad = None
    return None, *found


WRONG["9.6"].append((back(give=drops_gradients), "the gradients of the parameters"))


# ---- 9.7 MasterWeights ----------------------------------------------------------------------


@right("9.7")
class MasterWeightsByData(savings.MasterWeights):
    def step(self):
        for i, param in enumerate(self.params):
            if param.grad is not None:
                self.masters[i].grad = param.grad.float()
        self.optimizer.step()
        for param, master in zip(self.params, self.masters, strict=True):
            param.data = master.data.to(torch.bfloat16)
            param.grad = master.grad = None


@right("9.7")
class MasterWeightsAllAtOnce(savings.MasterWeights):
    @torch.no_grad()
    def step(self):
        pairs = [pair for pair in zip(self.params, self.masters, strict=True)]
        for param, master in pairs:
            if param.grad is not None:
                master.grad = torch.zeros_like(master)
                master.grad += param.grad
        self.optimizer.step()
        torch._foreach_copy_(self.params, self.masters)
        for tensor in (*self.params, *self.masters):
            tensor.grad = None


@right("9.7")
class MasterWeightsInAClosure(savings.MasterWeights):
    @torch.no_grad()
    def step(self):
        def closure():
            for param, master in zip(self.params, self.masters, strict=True):
                master.grad = None if param.grad is None else param.grad.float()

        self.optimizer.step(closure)
        for param, master in zip(self.params, self.masters, strict=True):
            param.copy_(master)
            param.grad = master.grad = None


@wrong("9.7", "steps of the optimizer: 0, not 1")
class MasterWeightsByHand(savings.MasterWeights):
    @torch.no_grad()
    def step(self):
        for param, master in zip(self.params, self.masters, strict=True):
            if param.grad is not None:
                master -= self.optimizer.param_groups[0]["lr"] * param.grad
            param.copy_(master)
            param.grad = None


@wrong("9.7", "its learning rate")
class MasterWeightsWithASchedule(savings.MasterWeights):
    def step(self):
        super().step()
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.99


# ---- 9.8 offload ----------------------------------------------------------------------------


@right("9.8")
def offload_from_behind(shards, free):
    kept = 0
    for shard in reversed(shards):
        if free < 16 * shard:
            break
        free -= 16 * shard
        kept += 1
    away = list(shards)[: len(shards) - kept]
    weights = 4 * sum(away)
    return Offload(len(away), down=weights, up=weights + weights)


@right("9.8")
def offload_by_search(shards, free):
    sizes = torch.tensor([0, *shards])
    stays = 16 * (sizes.sum() - sizes.cumsum(0))
    blocks = torch.nonzero(stays <= free)[0]
    return Offload(blocks, 8 * sizes[: blocks + 1].sum(), sizes[: blocks + 1].sum() * 4)


@wrong("9.8", "blocks: ")
def offload_by_the_mean(shards, free):
    kept = min(len(shards), free // (16 * sum(shards) // len(shards)))
    moved = sum(shards[: len(shards) - kept])
    return Offload(len(shards) - kept, 8 * moved, 4 * moved)


@wrong("9.8", "offload(")
def offload_one_at_least(shards, free):
    return offload_from_behind(shards, min(free, 16 * sum(shards) - 1))


@wrong("9.8", "up: ")
def offload_with_the_last_block_still_there(shards, free):
    found = offload_from_behind(shards, free)
    if found.blocks == len(shards):
        return found._replace(up=found.up - 4 * shards[-1])
    return found


@wrong("9.8", "Offload: three numbers")
def offload_without_names(shards, free):
    return tuple(offload_from_behind(shards, free))
