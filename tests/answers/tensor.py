"""Lesson 13: right answers of another shape than the course's, and wrong ones that are no slip."""

from collections import Counter
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from packaging.version import Version
from torch import nn
from torch.autograd import Function
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from manyhands.checks.engine.answer import Pair
from manyhands.fsdp.flat import all_gather, reduce_scatter
from manyhands.memory.savings import rng_states, set_rng_states
from manyhands.tensor import dtensor, model, sequence
from manyhands.tensor.layers import (
    ColumnLinear,
    CopyToRanks,
    RowLinear,
    SumOverRanks,
    my_part,
    my_range,
)
from manyhands.tensor.vocabulary import VocabEmbedding, vocab_cross_entropy

f_ = CopyToRanks.apply
g_ = SumOverRanks.apply
# In torch 2.11 a matrix refuses a DTensor whose positions are cut, where 2.13 gathers them.
GATHERS_BY_ITSELF = Version(torch.__version__) >= Version("2.13")

# ---- 13.1 to 13.4: regions, parts, layers ---------------------------------------------------


def function(forward, backward):
    """A Function; forward(x, group) and backward(grad, group)."""

    class Region(Function):
        @staticmethod
        def forward(ctx, x, group=None):
            ctx.kept = group
            return forward(x, group)

        @staticmethod
        def backward(ctx, grad):
            return backward(grad, ctx.kept), None

    return Region


def gathered(x, group):
    parts = [torch.empty_like(x.contiguous()) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.stack(parts).sum(0)


def in_two_steps(x, group):
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, op=dist.ReduceOp.SUM, group=group, async_op=True).wait()
    return total


def read_too_early(x, group):
    total = x.clone()
    work = dist.all_reduce(total, group=group, async_op=True)
    result = total + 0
    work.wait()
    return result


class KeepsNoGroup(CopyToRanks):
    @staticmethod
    def forward(ctx, x, group=None):
        return x.view_as(x)


class ColumnsByEinsum(nn.Module):
    def __init__(self, linear, unit=1, enter=f_, group=None):
        super().__init__()
        mine = my_range(linear.out_features, unit, group)
        rows = slice(mine.start, mine.stop)
        self.enter, self.group = enter, group
        self.weight = nn.Parameter(linear.weight[rows].detach().clone())
        bias = None if linear.bias is None else nn.Parameter(linear.bias[rows].detach().clone())
        self.register_parameter("bias", bias)

    def forward(self, x):
        found = torch.einsum("btd,fd->btf", self.enter(x, self.group), self.weight)
        return found if self.bias is None else found + self.bias


class ColumnsOfALinear(nn.Linear):
    def __init__(self, linear, unit=1, enter=f_, group=None):
        mine = my_range(linear.out_features, unit, group)
        has_bias, rows = linear.bias is not None, slice(mine.start, mine.stop)
        super().__init__(linear.in_features, len(mine), has_bias, dtype=linear.weight.dtype)
        self.enter, self.group = enter, group
        with torch.no_grad():
            self.weight.copy_(linear.weight[rows])
            if has_bias:
                self.bias.copy_(linear.bias[rows])

    def forward(self, x):
        return super().forward(self.enter(x, self.group))


class RowsByMatmul(nn.Module):
    def __init__(self, linear, unit=1, leave=g_, group=None):
        super().__init__()
        mine = my_range(linear.in_features, unit, group)
        self.leave, self.group = leave, group
        self.weight = nn.Parameter(linear.weight.data[:, mine.start : mine.stop].clone())
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())

    def forward(self, x):
        found = self.leave(x @ self.weight.t(), self.group)
        return found if self.bias is None else found + self.bias


class WithoutSuper(ColumnLinear):
    def __init__(self, linear, unit=1, enter=f_, group=None):
        self.weight = my_part(linear.weight, 0, unit, group)


class BiasOnRank0(RowLinear):
    def forward(self, x):
        bias = self.bias if dist.get_rank(self.group) == 0 else None
        return self.leave(F.linear(x, self.weight, bias), self.group)


def cut_by_names(block, enter=f_, leave=g_, group=None):
    width = block.attention.head_width
    cuts = {
        "attention.qkv": lambda linear: ColumnLinear(linear, 3 * width, enter, group),
        "attention.out": lambda linear: RowLinear(linear, unit=width, leave=leave, group=group),
        "mlp.up": lambda linear: ColumnLinear(linear, enter=enter, group=group),
        "mlp.down": lambda linear: RowLinear(linear, leave=leave, group=group),
    }
    for name, cut in cuts.items():
        parent, child = name.split(".")
        setattr(block.get_submodule(parent), child, cut(block.get_submodule(name)))


def cut_and_return(block, enter=f_, leave=g_, group=None):
    model.cut_block(block, enter, leave, group)
    return block


def cut_norms(block, enter=f_, leave=g_, group=None):
    model.cut_block(block, enter, leave, group)
    block.norm1.weight = my_part(block.norm1.weight, 0, 1, group)


def cut_and_freeze(block, enter=f_, leave=g_, group=None):
    model.cut_block(block, enter, leave, group)
    block.norm2.requires_grad_(False)


# ---- 13.5, 13.6: the vocabulary -------------------------------------------------------------


class OneHot(VocabEmbedding):
    def forward(self, inputs):
        mask = inputs[..., None] == torch.tensor(list(self.mine))
        return self.leave(mask.float() @ self.weight, self.group)


class Clamped(VocabEmbedding):
    def forward(self, inputs):
        rows = (inputs - self.mine.start).clamp(0, len(self.mine) - 1)
        mask = (rows + self.mine.start == inputs).float().unsqueeze(-1)
        return self.leave(F.embedding(rows, self.weight) * mask, self.group)


class Frozen(VocabEmbedding):
    def __init__(self, embedding, leave=g_, group=None):
        super().__init__(embedding, leave, group)
        self.weight = nn.Embedding.from_pretrained(self.weight.detach()).weight


class OneArgument(VocabEmbedding):
    def forward(self, inputs):
        mask = inputs[..., None] == torch.tensor(list(self.mine))
        return self.leave(mask.float() @ self.weight)


def largest_of(scores, group):
    largest = scores.detach().max(-1).values
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest


def with_one_hot(scores, targets, mine, group=None):
    largest = largest_of(scores, group)
    hot = targets[:, None] == torch.tensor(list(mine))
    parts = torch.cat([(scores - largest[:, None]).exp().sum(-1), scores.where(hot, 0).sum(-1)])
    sums, chosen = SumOverRanks.apply(parts, group).chunk(2)
    return (sums.log() + largest - chosen).sum() / len(targets)


def all_reduce_itself(scores, targets, mine, group=None):
    shifted = scores - largest_of(scores, group).unsqueeze(-1)
    hot = targets[:, None] == torch.tensor(list(mine))
    parts = torch.stack([shifted.exp().sum(-1), shifted.where(hot, 0).sum(-1)])
    dist.all_reduce(parts, group=group)
    return (parts[0].log() - parts[1]).mean()


def a_pair(scores, targets, mine, group=None):
    return (scores - scores.detach().max(dim=-1)).sum()


def gathers_scores(scores, targets, mine, group=None):
    n = dist.get_world_size(group)
    wide = scores.new_full((n, len(targets), len(mine) + 1), 0.0)
    wide[dist.get_rank(group), :, : len(mine)] = scores
    full = SumOverRanks.apply(wide, group)
    return with_one_hot(scores, targets, mine, group) + 0 * full.sum()


# ---- 13.7 to 13.9: the sequence -------------------------------------------------------------


def classes(gather=sequence.gather_positions, add=sequence.sum_positions, gather_back=None):
    """Both classes over other functions."""
    return Pair(function(gather, gather_back or add), function(add, gather))


def lists_gather(x, group=None):
    parts = [torch.empty_like(x).contiguous() for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def transposed_sum(x, group=None):
    n = dist.get_world_size(group)
    if x.shape[1] % n != 0:
        raise ValueError(f"{x.shape[1]} % {n}")
    whole = x.transpose(0, 1).contiguous()
    part = torch.empty(len(whole) // n, *whole.shape[1:], dtype=x.dtype)
    reduce_scatter(part, whole, group)
    return part.transpose(0, 1)


def waited_apart(x, group=None):
    n = dist.get_world_size(group)
    whole = x.new_empty((n * len(x), *x.shape[1:]))
    work = all_gather(whole, x.contiguous(), group)
    parts = whole.chunk(n)
    work.wait()
    return torch.cat(parts, dim=1)


def of_the_work(x, group):
    whole = x.new_empty((dist.get_world_size(group) * len(x), *x.shape[1:]))
    return torch.cat(all_gather(whole, x.contiguous(), group).chunk(2), dim=1)


def padded(x, group):
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    whole = x.new_zeros(len(x), n * x.shape[1], x.shape[2])
    whole.chunk(n, dim=1)[rank].copy_(x)
    dist.all_reduce(whole, group=group)
    return whole


def flattened(params, group=None):
    grads = [p.grad for p in params if p.grad is not None]
    if not grads:
        return
    flat = torch._utils._flatten_dense_tensors(grads)
    dist.all_reduce(flat, group=group)
    for grad, part in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads), strict=True):
        grad.copy_(part)


def by_offsets(params, group=None):
    params = [param for param in params if param.grad is not None]
    if params:
        vector = torch.cat([param.grad.reshape(-1) for param in params])
        dist.all_reduce(vector, group=group, async_op=True).wait()
        end = 0
        for param in params:
            start, end = end, end + param.numel()
            param.grad[...] = vector[start:end].reshape(param.shape)


def read_twice(params, group=None):
    if sum(param.grad is not None for param in params):
        sequence.sum_gradients(params, group)


def weights_summed(params, group=None):
    for param in params:
        dist.all_reduce(param.data, group=group)


class WithFork(sequence.OwnRandom):
    def __init__(self, seed, device="cpu", group=None):
        self.device = torch.device(device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 * seed + dist.get_rank(group))
            self.states = rng_states(self.device)

    @contextmanager
    def use(self):
        with torch.random.fork_rng(devices=[]):
            set_rng_states(self.states, self.device)
            try:
                yield self
            finally:
                self.states = rng_states(self.device)


class Numbered(sequence.OwnRandom):
    """Seeds anew in each block, from a count of the blocks."""

    def __init__(self, seed, device="cpu", group=None):
        self.base, self.count = 10_000 * seed + 1_000 * dist.get_rank(group), 0

    @contextmanager
    def use(self):
        before = torch.get_rng_state()
        self.count += 1
        torch.manual_seed(self.base + self.count)
        try:
            yield
        finally:
            torch.set_rng_state(before)


class WithoutDecorator(sequence.OwnRandom):
    def use(self):
        yield


class DrawsByRank(sequence.OwnRandom):
    def __init__(self, seed, device="cpu", group=None):
        super().__init__(seed, device, group)
        torch.rand(dist.get_rank(group))


# ---- 13.10 to 13.14: the model and its plan -------------------------------------------------


class InSteps(model.TensorParallel):
    def through_blocks(self, inputs):
        length = inputs.size(1)
        x = self.tokens(inputs) + self.positions(torch.arange(length))
        for block in [self.dropout, *self.blocks]:
            x = block(x)
        return x

    def forward(self, inputs, targets):
        x = self.enter(self.norm(self.through_blocks(inputs)), self.group)
        scores = (x @ self.tokens.weight.T).reshape(-1, len(self.tokens.mine))
        return vocab_cross_entropy(scores, targets.reshape(-1), self.tokens.mine, self.group)


class Sequential(model.TensorParallel):
    def through_blocks(self, inputs):
        places = self.positions.weight.narrow(0, 0, inputs.shape[1]).unsqueeze(0)
        return nn.Sequential(*self.blocks)(self.dropout(places + self.tokens(inputs)))


class ReturnsScores(model.TensorParallel):
    def forward(self, inputs, targets):
        return F.linear(self.tokens(inputs), self.tokens.weight)


class InEval(model.TensorParallel):
    def forward(self, inputs, targets):
        self.eval()
        return super().forward(inputs, targets)


class ByRange(sequence.TensorSequenceParallel):
    def through_blocks(self, inputs):
        mine = my_range(inputs.shape[1], 1, self.group)
        with self.random.use():
            x = self.dropout(self.tokens(inputs) + self.positions(torch.tensor(list(mine))))
            for block in self.blocks:
                x = block(x)
        return x


class ByNarrow(sequence.TensorSequenceParallel):
    def through_blocks(self, inputs):
        size = inputs.size(1) // dist.get_world_size(self.group)
        places = self.positions.weight.narrow(0, dist.get_rank(self.group) * size, size)
        with self.random.use():
            return nn.Sequential(self.dropout, *self.blocks)(self.tokens(inputs) + places)


class WholePlaces(sequence.TensorSequenceParallel):
    def through_blocks(self, inputs):
        with self.random.use():
            x = self.dropout(self.tokens(inputs) + self.positions.weight[: inputs.shape[1]])
        return nn.Sequential(*self.blocks)(x)


class BlockByBlock(sequence.TensorSequenceParallel):
    """Draws anew for each block, and so the same as the one before."""

    def through_blocks(self, inputs):
        n, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]].chunk(n)[rank]
        for block in [self.dropout, *self.blocks]:
            state = self.random.state
            with self.random.use():
                x = block(x)
            self.random.state = state
        return x


def place_by_divmod(rank, world_size, tensor_ranks):
    shares, left = divmod(world_size, tensor_ranks)
    if left:
        raise ValueError("some ranks are left")
    return divmod(rank, tensor_ranks)[0], shares


def place_by_table(rank, world_size, tensor_ranks):
    if world_size % tensor_ranks != 0:
        raise ValueError(f"{world_size} / {tensor_ranks}")
    groups = torch.arange(world_size).view(-1, tensor_ranks).tolist()
    return [next(i for i, ranks in enumerate(groups) if rank in ranks), len(groups)]


def calls_counted_one_by_one(num_blocks, sequence=False):
    found = Counter(all_reduce=2 + sequence)
    for _ in range(2 * num_blocks + 1):
        for _way in ("forward", "backward"):
            found.update(["all_gather", "reduce_scatter"] if sequence else ["all_reduce"])
    return found


def calls_by_formula(num_blocks, sequence=False):
    n = 4 * num_blocks + 2
    return {
        "reduce_scatter": n * sequence,
        "all_gather": n * sequence,
        "all_reduce": 3 if sequence else n + 2,
    }


def planned(change):
    """The course's plan, with another style for the names that end so."""

    def plan(num_blocks, sequence=False):
        between = Shard(1) if sequence else Replicate()
        styles = dtensor.plan(num_blocks, sequence)
        for name in styles:
            for end, make in change.items():
                if name.endswith(end):
                    styles[name] = make(between)
        return styles

    return plan


def inputs_by_hand(num_blocks, sequence=False):
    """x is gathered once for a whole attention or MLP."""
    between = Shard(1) if sequence else Replicate()
    styles = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(
            input_layouts=between, output_layouts=Shard(2), use_local_output=False
        ),
    }
    for i in range(num_blocks):
        for name, first, last in (("attention", "qkv", "out"), ("mlp", "up", "down")):
            styles[f"blocks.{i}.{name}"] = PrepareModuleInput(
                input_layouts=between, desired_input_layouts=Replicate()
            )
            styles[f"blocks.{i}.{name}.{first}"] = ColwiseParallel()
            styles[f"blocks.{i}.{name}.{last}"] = RowwiseParallel(output_layouts=between)
    if sequence:
        norms = [f"blocks.{i}.norm{k}" for i in range(num_blocks) for k in (1, 2)]
        styles |= {name: SequenceParallel() for name in [*norms, "norm"]}
        styles["dropout"] = PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Shard(1)
        )
    return styles


RIGHT = {
    "13.1": [
        Pair(function(lambda x, group: x, in_two_steps), function(gathered, lambda g, _: g)),
        Pair(
            function(lambda x, group: x.detach(), gathered),
            function(in_two_steps, lambda g, _: g.clone()),
        ),
    ],
    "13.3": [Pair(ColumnsByEinsum, RowsByMatmul), Pair(ColumnsOfALinear, RowLinear)],
    "13.4": [cut_by_names, cut_and_return],
    "13.5": [OneHot, Clamped],
    "13.6": [with_one_hot, all_reduce_itself],
    "13.7": [classes(lists_gather, transposed_sum), classes(waited_apart)],
    "13.8": [flattened, by_offsets],
    "13.9": [WithFork, Numbered],
    "13.10": [InSteps, Sequential],
    "13.11": [place_by_divmod, place_by_table],
    "13.12": [calls_counted_one_by_one, calls_by_formula],
    "13.13": [
        inputs_by_hand,
        *([planned({"qkv": lambda b: ColwiseParallel()})] if GATHERS_BY_ITSELF else []),
        planned({"head": lambda b: ColwiseParallel(input_layouts=b, use_local_output=False)}),
    ],
    "13.14": [ByRange, ByNarrow],
}
WRONG = {
    "13.1": [
        (Pair(KeepsNoGroup, SumOverRanks), "forward did not keep"),
        (Pair(CopyToRanks, function(read_too_early, lambda g, _: g)), "is nan, not"),
        (Pair(nn.Identity, nn.Identity), "a torch.autograd.Function"),
    ],
    "13.3": [
        (Pair(WithoutSuper, RowLinear), "before nn.Module was set up"),
        (Pair(ColumnLinear, BiasOnRank0), "the gradient of RowLinear.bias: None"),
    ],
    "13.4": [(cut_norms, "norm1.weight: shape"), (cut_and_freeze, "every parameter wants")],
    "13.5": [(Frozen, "weight wants a gradient"), (OneArgument, "missing 1 required")],
    "13.6": [(a_pair, "gives a pair"), (gathers_scores, "messages: 3")],
    "13.7": [
        (classes(of_the_work), "fills `whole` and returns a work"),
        (classes(padded), "no all-reduce is called"),
    ],
    "13.8": [(read_twice, "the gradients"), (weights_summed, "the gradients")],
    "13.9": [(WithoutDecorator, "has lost its decorator"), (DrawsByRank, "after __init__")],
    "13.10": [(ReturnsScores, "the loss: shape"), (InEval, "the loss: ")],
    "13.11": [(lambda rank, size, group: rank // group, "two whole numbers")],
    "13.12": [(lambda num_blocks, sequence=False: {}, "also where its value is 0")],
    "13.13": [
        (lambda num_blocks, sequence=False: {"mlp.up": ColwiseParallel()}, "has this name"),
        (lambda num_blocks, sequence=False: {"tokens": RowwiseParallel}, "A style is an object"),
        (planned({"qkv": lambda b: ColwiseParallel(input_layouts=(b,))}), ""),
    ],
    "13.14": [(WholePlaces, "must match"), (BlockByBlock, "what through_blocks gives")],
}
