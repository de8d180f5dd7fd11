"""Answers to 13.5 to 13.9 and 13.13 as students give them; answers/tensor.py takes them in."""

import time
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from manyhands.checks import Pair
from manyhands.data_parallel.replicas import pack, unpack
from manyhands.fsdp.flat import all_gather, reduce_scatter
from manyhands.memory.savings import rng_states, set_rng_states
from manyhands.tensor import dtensor, sequence, vocabulary
from manyhands.tensor.layers import SumOverRanks, my_part, my_range

RIGHT: dict[str, list] = {
    "13.5": [vocabulary.VocabEmbedding],
    "13.6": [vocabulary.vocab_cross_entropy],
    "13.7": [Pair(sequence.GatherSequence, sequence.ScatterSequence)],
    "13.8": [sequence.sum_gradients],
    "13.9": [sequence.OwnRandom],
    "13.13": [dtensor.plan],
}
WRONG: dict[str, list] = {todo: [] for todo in RIGHT}


def right(todo):
    return lambda answer: RIGHT[todo].append(answer) or answer


def wrong(todo, words):
    return lambda answer: WRONG[todo].append((answer, words)) or answer


def total(tensor, group, op=dist.ReduceOp.SUM):
    tensor = tensor.clone()
    dist.all_reduce(tensor, op=op, group=group)
    return tensor


# ---- 13.5 VocabEmbedding --------------------------------------------------------------------


class MyEmbedding(nn.Module):
    def __init__(self, embedding, leave=SumOverRanks.apply, group=None):
        super().__init__()
        self.leave, self.group = leave, group
        self.mine = my_range(embedding.num_embeddings, 1, group)
        self.weight = my_part(embedding.weight, 0, 1, group)

    def forward(self, inputs):
        is_mine = (inputs >= self.mine.start) & (inputs < self.mine.stop)
        rows = self.weight[(inputs - self.mine.start).masked_fill(~is_mine, 0)]
        return self.leave(rows.masked_fill(~is_mine[..., None], 0.0), self.group)


RIGHT["13.5"].append(MyEmbedding)


@right("13.5")
class OneHot(MyEmbedding):
    def forward(self, inputs):
        mask = inputs[..., None] == torch.tensor(list(self.mine))
        return self.leave(mask.float() @ self.weight, self.group)


@right("13.5")
class Clamped(MyEmbedding):
    def forward(self, inputs):
        rows = (inputs - self.mine.start).clamp(0, len(self.mine) - 1)
        mask = (rows + self.mine.start == inputs).float().unsqueeze(-1)
        return self.leave(F.embedding(rows, self.weight) * mask, group=self.group)


def embedding_with(init=None, forward=None):
    """An embedding that is written otherwise in one place."""

    class Mine(MyEmbedding):
        def __init__(self, embedding, leave=SumOverRanks.apply, group=None):
            super().__init__(embedding, leave, group)
            if init:
                init(self, embedding, group)

        def forward(self, inputs):
            is_mine = (inputs >= self.mine.start) & (inputs < self.mine.stop)
            return (forward or masked)(self, inputs, is_mine)

    return Mine


def rows_of(self, inputs, is_mine):
    rows = F.embedding(torch.where(is_mine, inputs - self.mine.start, 0), self.weight)
    return rows * is_mine.unsqueeze(-1)


def masked(self, inputs, is_mine):
    return self.leave(rows_of(self, inputs, is_mine), self.group)


def unmasked(self, inputs, is_mine):
    rows = torch.where(is_mine, inputs - self.mine.start, 0)
    return self.leave(F.embedding(rows, self.weight), self.group)


def clamped(self, inputs, is_mine):
    rows = (inputs - self.mine.start).clamp(0, len(self.mine) - 1)
    return self.leave(F.embedding(rows, self.weight), self.group)


def late_mask(self, inputs, is_mine):
    rows = F.embedding(inputs - self.mine.start, self.weight)
    return self.leave(rows * is_mine.unsqueeze(-1), self.group)


def past_the_end(self, inputs, is_mine):
    is_mine = (inputs >= self.mine.start) & (inputs <= self.mine.stop)
    return self.leave(rows_of(self, inputs, is_mine), self.group)


def past_the_end_clamped(self, inputs, is_mine):
    is_mine = (inputs >= self.mine.start) & (inputs <= self.mine.stop)
    rows = (inputs - self.mine.start).clamp(0, len(self.mine) - 1)
    return self.leave(F.embedding(rows, self.weight) * is_mine.unsqueeze(-1), self.group)


def not_shifted(self, inputs, is_mine):
    rows = torch.where(is_mine, inputs, 0) % len(self.mine)
    return self.leave(F.embedding(rows, self.weight) * is_mine.unsqueeze(-1), self.group)


def not_shifted_at_all(self, inputs, is_mine):
    rows = F.embedding(torch.where(is_mine, inputs, 0), self.weight)
    return self.leave(rows * is_mine.unsqueeze(-1), self.group)


def in_place(self, inputs, is_mine):
    inputs -= self.mine.start
    inputs.masked_fill_(~is_mine, 0)
    return self.leave(F.embedding(inputs, self.weight) * is_mine.unsqueeze(-1), self.group)


def by_hand(self, inputs, is_mine):
    part = rows_of(self, inputs, is_mine)
    dist.all_reduce(part, group=self.group)
    return part


def not_used(self, inputs, is_mine):
    part = rows_of(self, inputs, is_mine)
    self.leave(part, self.group)
    return part


def halved(self, inputs, is_mine):
    part = self.leave(rows_of(self, inputs, is_mine), self.group)
    return part / dist.get_world_size(self.group)


def random_rows(self, embedding, group):
    self.weight = nn.Embedding(len(self.mine), embedding.embedding_dim).weight


def view_of_rows(self, embedding, group):
    self.weight = nn.Parameter(embedding.weight.detach()[self.mine.start : self.mine.stop])


def whole(self, embedding, group):
    self.weight = nn.Parameter(embedding.weight.detach().clone())


def frozen(self, embedding, group):
    rows = embedding.weight.detach()[self.mine.start : self.mine.stop].clone()
    self.table = nn.Embedding.from_pretrained(rows)
    self.weight = self.table.weight


def plain_tensor(self, embedding, group):
    del self.weight
    self.weight = embedding.weight.detach()[self.mine.start : self.mine.stop].clone()


def by_width(self, embedding, group):
    self.weight = my_part(embedding.weight, 1, 1, group)


def of_the_job(self, embedding, group):
    if group is not None:
        half = embedding.num_embeddings // 2
        self.mine = range(0, half) if dist.get_rank() == 1 else range(half, 7)
        rows = embedding.weight.detach()[self.mine.start : self.mine.stop]
        self.weight = nn.Parameter(rows.clone())


def keep_embedding(self, embedding, group):
    self.embedding = embedding


class OneArgument(MyEmbedding):
    def forward(self, inputs):
        is_mine = (inputs >= self.mine.start) & (inputs < self.mine.stop)
        return self.leave(rows_of(self, inputs, is_mine))


class Detached(MyEmbedding):
    def forward(self, inputs):
        return super().forward(inputs).detach()


class NoGrad(MyEmbedding):
    @torch.no_grad()
    def forward(self, inputs):
        return super().forward(inputs)


WRONG["13.5"] += [
    (NoGrad, "looked up under torch.no_grad()"),
    (embedding_with(forward=unmasked), "other ranks have these tokens, so their rows must be zero"),
    (embedding_with(forward=clamped), "other ranks have these tokens"),
    (embedding_with(forward=late_mask), "a mask on the rows is too late"),
    (embedding_with(forward=past_the_end), "the first token of the next rank"),
    (embedding_with(forward=past_the_end_clamped), "the first token of the next rank"),
    (embedding_with(forward=not_shifted), "the rows of a part from 0"),
    (embedding_with(forward=not_shifted_at_all), "the rows of a part from 0"),
    (embedding_with(forward=in_place), "inputs were changed"),
    (embedding_with(forward=by_hand), "sends a message of its own"),
    (embedding_with(forward=not_used), "what leave returns is not used"),
    (embedding_with(forward=halved), "not a mean"),
    (embedding_with(init=random_rows), "those of tokens"),
    (embedding_with(init=view_of_rows), "a view keeps the memory"),
    (embedding_with(init=whole), "that is the whole matrix"),
    (embedding_with(init=frozen), "from_pretrained freezes"),
    (embedding_with(init=plain_tensor), "only an nn.Parameter is trained"),
    (embedding_with(init=by_width), "those of tokens"),
    (embedding_with(init=of_the_job), "those of tokens"),
    (embedding_with(init=keep_embedding), "the whole embedding is still in the module"),
    (OneArgument, "without this group"),
    (Detached, "it was detached"),
]

# ---- 13.6 vocab_cross_entropy ---------------------------------------------------------------


def pieces(scores, targets, mine, group, largest=None):
    """The two parts of a rank, with the course's own maximum unless another one is given."""
    if largest is None:
        largest = total(scores.detach().amax(-1), group, dist.ReduceOp.MAX)
    shifted = scores - largest.unsqueeze(-1)
    is_mine = (targets >= mine.start) & (targets < mine.stop)
    columns = torch.where(is_mine, targets - mine.start, 0).unsqueeze(-1)
    return shifted.exp().sum(-1), shifted.gather(-1, columns).squeeze(-1) * is_mine


@wrong("13.6", "3 messages, where 2 do - right, but each message has a latency of its own")
def in_three_messages(scores, targets, mine, group=None):
    sums, chosen = pieces(scores, targets, mine, group)
    sums, chosen = SumOverRanks.apply(sums, group), SumOverRanks.apply(chosen, group)
    return torch.mean(torch.log(sums) - chosen)


@wrong("13.6", "5 messages, where 2 do")
def with_gathered_numbers(scores, targets, mine, group=None):
    """Each rank's own logsumexp, put together by another logsumexp."""
    own = torch.logsumexp(scores, -1)
    largest = total(own.detach(), group, dist.ReduceOp.MAX)
    _, chosen = pieces(scores, targets, mine, group)
    shift = total(scores.detach().amax(-1), group, dist.ReduceOp.MAX)
    sums = SumOverRanks.apply((own - largest).exp(), group)
    return (sums.log() + largest - SumOverRanks.apply(chosen, group) - shift).mean()


@wrong("13.6", "torch.stack both of a rank's parts")
def raw_targets(scores, targets, mine, group=None):
    largest = total(scores.detach().max(-1).values, group, dist.ReduceOp.MAX)
    hot = (targets[:, None] == torch.tensor(list(mine))).to(scores.dtype)
    chosen = SumOverRanks.apply((scores * hot).sum(-1), group)
    sums = SumOverRanks.apply((scores - largest[:, None]).exp().sum(-1), group)
    return (sums.log() + largest - chosen).sum() / len(targets)


@right("13.6")
def with_one_hot(scores, targets, mine, group=None):
    largest = total(scores.detach().max(-1).values, group, dist.ReduceOp.MAX)
    hot = (targets[:, None] == torch.tensor(list(mine))).to(scores.dtype)
    parts = torch.cat([(scores - largest[:, None]).exp().sum(-1), (scores * hot).sum(-1)])
    sums, chosen = SumOverRanks.apply(parts, group).chunk(2)
    return (sums.log() + largest - chosen).sum() / len(targets)


@right("13.6")
def all_reduce_itself(scores, targets, mine, group=None):
    """Its backward passes the gradient on as it is, too, with a warning."""
    parts = torch.stack(pieces(scores, targets, mine, group))
    dist.all_reduce(parts, group=group)
    return (parts[0].log() - parts[1]).mean()


@wrong("13.6", "one largest score was taken for all tokens")
def one_maximum(scores, targets, mine, group=None):
    largest = total(scores.detach().max(), group, dist.ReduceOp.MAX).expand(len(scores))
    return loss_of(*pieces(scores, targets, mine, group, largest), group).mean()


@wrong("13.6", "max(dim=-1) gives a pair")
def a_pair(scores, targets, mine, group=None):
    largest = scores.detach().max(dim=-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return loss_of(*pieces(scores, targets, mine, group, largest), group).mean()


@wrong("13.6", "max(dim=-1) gives a pair")
def a_pair_subtracted(scores, targets, mine, group=None):
    return (scores - scores.detach().max(dim=-1)).sum()


@wrong("13.6", "log2 counts bits")
def in_bits(scores, targets, mine, group=None):
    sums, chosen = pieces(scores, targets, mine, group)
    sums, chosen = SumOverRanks.apply(torch.stack([sums, chosen]), group)
    return (sums.log2() - chosen).mean()


@wrong("13.6", "the sign is turned")
def sign_turned(scores, targets, mine, group=None):
    return -loss_of(*pieces(scores, targets, mine, group), group).mean()


def loss_of(sums, chosen, group):
    sums, chosen = SumOverRanks.apply(torch.stack([sums, chosen]), group)
    return sums.log() - chosen


@wrong("13.6", "was not subtracted")
def no_maximum(scores, targets, mine, group=None):
    zeros = torch.zeros(len(targets), dtype=scores.dtype)
    return loss_of(*pieces(scores, targets, mine, group, zeros), group).mean()


@wrong("13.6", "each rank subtracted its own largest score")
def own_maximum(scores, targets, mine, group=None):
    largest = scores.detach().amax(-1)
    return loss_of(*pieces(scores, targets, mine, group, largest), group).mean()


@wrong("13.6", "was not subtracted")
def sum_of_maxima(scores, targets, mine, group=None):
    largest = total(scores.detach().amax(-1), group)
    return loss_of(*pieces(scores, targets, mine, group, largest), group).mean()


@wrong("13.6", "a gradient goes through the maximum")
def with_gradient_of_maximum(scores, targets, mine, group=None):
    own = scores.amax(-1)
    largest = own + (total(own.detach(), group, dist.ReduceOp.MAX) - own.detach())
    return loss_of(*pieces(scores, targets, mine, group, largest), group).mean()


@wrong("13.6", "targets of other ranks are counted as well")
def without_mask(scores, targets, mine, group=None):
    sums, _ = pieces(scores, targets, mine, group)
    shifted = scores - total(scores.detach().amax(-1), group, dist.ReduceOp.MAX)[:, None]
    columns = (targets - mine.start).clamp(0, len(mine) - 1)[:, None]
    return loss_of(sums, shifted.gather(-1, columns)[:, 0], group).mean()


@wrong("13.6", "have no column in this part")
def with_others_columns(scores, targets, mine, group=None):
    sums, _ = pieces(scores, targets, mine, group)
    is_mine = (targets >= mine.start) & (targets < mine.stop)
    chosen = scores.gather(-1, (targets - mine.start)[:, None])[:, 0] * is_mine
    return loss_of(sums, chosen, group).mean()


@wrong("13.6", "no division by the ranks")
def mean_over_ranks(scores, targets, mine, group=None):
    loss = loss_of(*pieces(scores, targets, mine, group), group).mean()
    return loss / dist.get_world_size(group)


@wrong("13.6", "that is the sum over the tokens")
def summed(scores, targets, mine, group=None):
    return loss_of(*pieces(scores, targets, mine, group), group).sum()


@wrong("13.6", "has shape (7,), not ()")
def each_token(scores, targets, mine, group=None):
    return loss_of(*pieces(scores, targets, mine, group), group)


@wrong("13.6", "bytes a token were moved; 12 are enough")
def gathers_scores(scores, targets, mine, group=None):
    n = dist.get_world_size(group)
    wide = torch.zeros(len(targets), 40, dtype=scores.dtype)
    wide[:, mine.start : mine.stop] = scores
    wide[:, 31:] = -torch.inf
    full = SumOverRanks.apply(wide, group)
    vocab = {7: 7, 31: 31, 8: 8}[len(targets)]
    return F.cross_entropy(full[:, :vocab], targets) * (n / n)


class SumBothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return total(x, group)

    @staticmethod
    def backward(ctx, grad):
        return total(grad, ctx.group), None


@wrong("13.6", "backward passes the gradient on as it is")
def summed_both_ways(scores, targets, mine, group=None):
    sums, chosen = pieces(scores, targets, mine, group)
    return (SumBothWays.apply(sums, group).log() - SumBothWays.apply(chosen, group)).mean()


@wrong("13.6", "only one of the two sums has a gradient")
def half_a_gradient(scores, targets, mine, group=None):
    sums, chosen = pieces(scores, targets, mine, group)
    return (SumOverRanks.apply(sums, group).log() - total(chosen.detach(), group)).mean()


@wrong("13.6", "it was detached")
def no_gradient(scores, targets, mine, group=None):
    sums, chosen = pieces(scores.detach(), targets, mine, group)
    return (total(sums, group).log() - total(chosen, group)).mean()


@wrong("13.6", "log(a) + log(b) is not log(a + b)")
def log_first(scores, targets, mine, group=None):
    sums, chosen = pieces(scores, targets, mine, group)
    return (SumOverRanks.apply(sums.log(), group) - SumOverRanks.apply(chosen, group)).mean()


@wrong("13.6", "only this rank's part was summed")
def own_sum(scores, targets, mine, group=None):
    sums, chosen = pieces(scores, targets, mine, group)
    return (sums.log() - SumOverRanks.apply(chosen, group)).mean()


@wrong("13.6", "not from the target's score")
def shift_of_one_side(scores, targets, mine, group=None):
    sums, _ = pieces(scores, targets, mine, group)
    zeros = torch.zeros(len(targets), dtype=scores.dtype)
    _, chosen = pieces(scores, targets, mine, group, zeros)
    return loss_of(sums, chosen, group).mean()


@wrong("13.6", "rank * columns is not the first token")
def even_parts(scores, targets, mine, group=None):
    start = dist.get_rank(group) * scores.shape[1]
    there = range(start, start + scores.shape[1])
    return loss_of(*pieces(scores, targets, there, group), group).mean()


@wrong("13.6", "changed in place")
def in_place_scores(scores, targets, mine, group=None):
    scores -= total(scores.detach().amax(-1), group, dist.ReduceOp.MAX)[:, None]
    zeros = torch.zeros(len(targets), dtype=scores.dtype)
    return loss_of(*pieces(scores, targets, mine, group, zeros), group).mean()


@wrong("13.6", "`group` is not passed on")
def of_all_ranks(scores, targets, mine, group=None):
    return vocabulary.vocab_cross_entropy(scores, targets, mine)


@wrong("13.6", "the loss is a float")
def a_float(scores, targets, mine, group=None):
    return loss_of(*pieces(scores, targets, mine, group), group).mean().item()


# ---- 13.7 GatherSequence, ScatterSequence ---------------------------------------------------


def classes(gather=sequence.gather_positions, add=sequence.sum_positions, **given):
    """Both classes over other functions; `given` replaces one of the four directions."""
    ways = {"gather_back": add, "scatter_back": gather, "gather": gather, "scatter": add} | given

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group=None):
            ctx.group = group
            return ways["gather"](x, group)

        @staticmethod
        def backward(ctx, grad):
            return ways["gather_back"](grad, ctx.group), None

    class Scatter(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group=None):
            ctx.group = group
            return ways["scatter"](x, group)

        @staticmethod
        def backward(ctx, grad):
            return ways["scatter_back"](grad, ctx.group), None

    return Pair(Gather, Scatter)


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


RIGHT["13.7"].append(classes(lists_gather, transposed_sum))


def gather_into(x, group, how):
    n = dist.get_world_size(group)
    whole = x.new_empty((n * len(x), *x.shape[1:]))
    all_gather(whole, x.contiguous(), group).wait()
    return how(whole, n)


def not_waited(x, group):
    n = dist.get_world_size(group)
    whole = x.new_empty((n * len(x), *x.shape[1:]))
    all_gather(whole, x.contiguous(), group)
    return torch.cat(whole.chunk(n), dim=1)


def waited_too_late(x, group):
    n = dist.get_world_size(group)
    whole = x.new_empty((n * len(x), *x.shape[1:]))
    work = all_gather(whole, x.contiguous(), group)
    whole = torch.cat(whole.chunk(n), dim=1)
    work.wait()
    return whole


def never_read(x, group):
    whole = x.new_empty((dist.get_world_size(group) * len(x), *x.shape[1:]))
    all_gather(whole, x.contiguous(), group)
    return whole


def waited_apart(x, group=None):
    n = dist.get_world_size(group)
    whole = x.new_empty((n * len(x), *x.shape[1:]))
    work = all_gather(whole, x.contiguous(), group)
    parts = whole.chunk(n)
    work.wait()
    return torch.cat(parts, dim=1)


RIGHT["13.7"].append(classes(waited_apart))


def one_argument(x, group):
    return torch.cat(all_gather(x.contiguous(), group).chunk(dist.get_world_size(group)), dim=1)


def of_the_work(x, group):
    whole = x.new_empty((dist.get_world_size(group) * len(x), *x.shape[1:]))
    return torch.cat(all_gather(whole, x.contiguous(), group).chunk(2), dim=1)


def of_the_wait(x, group):
    whole = x.new_empty((dist.get_world_size(group) * len(x), *x.shape[1:]))
    return torch.cat(all_gather(whole, x.contiguous(), group).wait().chunk(2), dim=1)


def one_argument_sum(x, group):
    n = dist.get_world_size(group)
    if x.shape[1] % n:
        raise ValueError("uneven")
    return reduce_scatter(torch.cat(x.chunk(n, dim=1)).contiguous(), group)


def without_a_whole(x, group):
    return all_gather(x.contiguous(), group=group)


def own_slice(x, group):
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    return x.chunk(n, dim=1)[rank].clone()


def padded(x, group):
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    whole = x.new_zeros(len(x), n * x.shape[1], x.shape[2])
    whole.chunk(n, dim=1)[rank].copy_(x)
    return whole


def sum_flat(x, group):
    n = dist.get_world_size(group)
    if x.shape[1] % n:
        raise ValueError("uneven")
    part = x.new_empty((len(x), x.shape[1] // n, x.shape[2]))
    reduce_scatter(part, x.contiguous(), group)
    return part


def split_unasked(x, group):
    n = dist.get_world_size(group)
    whole = torch.cat([part.contiguous() for part in x.tensor_split(n, dim=1)])
    part = whole.new_empty((len(x), x.shape[1] // n, *x.shape[2:]))
    reduce_scatter(part, whole, group)
    return part


def transposed_unasked(x, group):
    n = dist.get_world_size(group)
    whole = x.transpose(0, 1).contiguous()
    part = torch.empty(len(whole) // n, *whole.shape[1:], dtype=x.dtype)
    reduce_scatter(part, whole, group)
    return part.transpose(0, 1)


def of_job_size(x, group):
    n = dist.get_world_size()
    whole = x.new_empty((n * len(x), *x.shape[1:]))
    all_gather(whole, x.contiguous(), group).wait()
    return torch.cat(whole.chunk(n), dim=1)


def sum_all(x, group):
    if x.shape[1] % dist.get_world_size(group):
        raise ValueError("uneven")
    return own_slice(total(x.contiguous(), group), group)


def stretched(x, group):
    return torch.cat([x] * dist.get_world_size(group), dim=1)


def mean_positions(x, group):
    return sequence.sum_positions(x, group) / dist.get_world_size(group)


class OneGradient(sequence.GatherSequence):
    @staticmethod
    def backward(ctx, grad):
        return sequence.sum_positions(grad, ctx.group)


class NoContext(sequence.GatherSequence):
    @staticmethod
    def forward(ctx, x, group=None):
        return sequence.gather_positions(x, group)


class GroupSaved(sequence.ScatterSequence):
    @staticmethod
    def forward(ctx, x, group=None):
        ctx.save_for_backward(group or "all")
        return sequence.sum_positions(x, group)


class SameWay(sequence.GatherSequence):
    @staticmethod
    def backward(ctx, grad):
        return sequence.gather_positions(grad, ctx.group), None


WRONG["13.7"] += [
    (classes(lambda x, g: gather_into(x, g, lambda w, n: w)), "along dimension 0, which is the b"),
    (
        classes(lambda x, g: gather_into(x, g, lambda w, n: w.view(len(x), -1, x.shape[2]))),
        "a view of the same numbers",
    ),
    (
        classes(lambda x, g: gather_into(x, g, lambda w, n: torch.cat(w.chunk(n)[::-1], 1))),
        "the ranks stand in the wrong order",
    ),
    (classes(lambda x, g: sequence.gather_positions(x)), "`group` is not passed on"),
    (classes(gather_back=own_slice), "this rank's own slice"),
    (classes(gather_back=mean_positions), "a sum is asked for, not a mean"),
    (classes(add=sum_flat), "a cut by dimension 0"),
    (classes(scatter=own_slice), "this rank's own slice"),
    (classes(scatter=mean_positions), "a sum is asked for, not a mean"),
    (classes(scatter=lambda x, g: total(x.contiguous(), g)), "all positions are there still"),
    (classes(scatter_back=padded), "other ranks' positions are missing"),
    (classes(scatter_back=stretched), "other ranks' positions are missing"),
    (classes(add=sum_all), "sends half of an all-reduce"),
    (classes(scatter=sum_all), "calls all_reduce of 144 bytes: they travel twice"),
    (classes(not_waited), "the whole is read before the all-gather was waited for"),
    (classes(waited_too_late), "the whole is read before the all-gather was waited for"),
    (classes(never_read), "only starts a message, and returns a work"),
    (classes(scatter_back=not_waited), "the whole is read before the all-gather was waited for"),
    (classes(one_argument), "all_gather(whole, shard, group) fills `whole`"),
    (classes(of_the_work), "all_gather(whole, shard, group) fills `whole`"),
    (classes(of_the_wait), "all_gather(whole, shard, group) fills `whole`"),
    (classes(without_a_whole), "all_gather(whole, shard, group) fills `whole`"),
    (classes(add=one_argument_sum), "reduce_scatter(shard, whole, group) fills `shard`"),
    (classes(gather=lambda x, g: total(padded(x, g), g)), "sends half of an all-reduce"),
    (classes(add=split_unasked), "RuntimeError in place of ValueError"),
    (classes(gather=of_job_size), "2 ranks share this"),
    (classes(add=transposed_unasked), "and yet a message is sent"),
    (Pair(OneGradient, sequence.ScatterSequence), "each wants a gradient"),
    (Pair(NoContext, sequence.ScatterSequence), "ctx.group = group"),
    (Pair(SameWay, sequence.ScatterSequence), "a gradient has the shape of x"),
    (Pair(sequence.GatherSequence, GroupSaved), "that is for tensors"),
    (Pair(sequence.GatherSequence, sequence.GatherSequence), "scatter forward has shape"),
]

# ---- 13.8 sum_gradients ---------------------------------------------------------------------


@right("13.8")
def flattened(params, group=None):
    grads = [p.grad for p in params if p.grad is not None]
    if not grads:
        return
    flat = torch._utils._flatten_dense_tensors(grads)
    dist.all_reduce(flat, group=group)
    for grad, part in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads), strict=True):
        grad.copy_(part)


def present(params):
    return [param.grad for param in params if param.grad is not None]


@wrong("13.8", "that is no mean")
def mean_of_gradients(params, group=None):
    grads = present(params)
    if grads:
        vector = total(pack(grads), group)
        unpack(vector, grads, dist.get_world_size(group))


@wrong("13.8", "3 all_reduce for 3 gradients")
def one_by_one(params, group=None):
    for grad in present(params):
        dist.all_reduce(grad, group=group)


@wrong("13.8", "frozen, or unused")
def with_frozen(params, group=None):
    grads = [param.grad for param in params]
    vector = total(pack(grads), group)
    unpack(vector, grads)


@wrong("13.8", "that is the weight")
def weights(params, group=None):
    grads = [param for param in params if param.grad is not None]
    if grads:
        vector = total(pack([param.grad for param in grads]), group)
        for param in grads:
            param.grad.copy_(param.detach())
        del vector


@wrong("13.8", "were not written back")
def not_written_back(params, group=None):
    grads = present(params)
    if grads:
        total(pack(grads), group)


@wrong("13.8", "`group` is not passed on")
def all_of_the_job(params, group=None):
    sequence.sum_gradients(params)


@wrong("13.8", "then there is nothing to send")
def nothing_to_send(params, group=None):
    grads = present(params)
    vector = pack(grads)
    dist.all_reduce(vector, group=group)
    unpack(vector, grads)


@wrong("13.8", "who holds the old one sees no sum")
def new_tensors(params, group=None):
    params = [param for param in params if param.grad is not None]
    if params:
        vector = total(pack([param.grad for param in params]), group)
        sizes = [param.numel() for param in params]
        for param, part in zip(params, vector.split(sizes), strict=True):
            param.grad = part.view_as(param)


@wrong("13.8", "let the frozen weight decay")
def zeros_for_frozen(params, group=None):
    params = list(params)
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    sequence.sum_gradients(params, group)


@wrong("13.8", "a weight was changed")
def steps_too(params, group=None):
    params = list(params)
    sequence.sum_gradients(params, group)
    for param in params:
        param.data += 1


@wrong("13.8", "weights were summed, not gradients")
def weights_summed(params, group=None):
    values = [param.data for param in params]
    vector = total(pack(values), group)
    unpack(vector, values)


@wrong("13.8", "the second reading finds nothing")
def read_twice(params, group=None):
    num = sum(param.numel() for param in params)
    vector = torch.cat([param.grad.flatten() for param in params if param.grad is not None])
    dist.all_reduce(vector[:num], group=group)


@wrong("13.8", "the second reading finds nothing")
def unpack_into_what_is_read(params, group=None):
    vector = total(pack(present(params)), group)
    unpack(vector, params)


@wrong("13.8", "the second reading finds nothing")
def written_in_a_second_loop(params, group=None):
    vector = total(pack(present(params)), group)
    for param, part in zip(params, vector, strict=False):
        param.grad.copy_(part)


@wrong("13.8", "written into the weights")
def unpack_into_weights(params, group=None):
    params = [param for param in params if param.grad is not None]
    vector = total(pack(present(params)), group)
    unpack(vector, params)


@wrong("13.8", "pack and unpack one list")
def unpack_into_all(params, group=None):
    params = list(params)
    vector = total(pack(present(params)), group)
    unpack(vector, params)


@wrong("13.8", "pack and unpack one list")
def other_order(params, group=None):
    grads = present(params)
    if grads:
        vector = total(pack(grads), group)
        unpack(vector, grads[::-1])


# ---- 13.9 OwnRandom -------------------------------------------------------------------------


@right("13.9")
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


@right("13.9")
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


def own_random(number=lambda seed, group: seed + 1 + dist.get_rank(group), back=True, use=None):
    """Seeded in another way, or with another `use`."""

    class Own(sequence.OwnRandom):
        def __init__(self, seed, device="cpu", group=None):
            self.device = torch.device(device)
            common = rng_states(self.device)
            torch.manual_seed(number(seed, group))
            self.states = rng_states(self.device)
            if back:
                set_rng_states(common, self.device)

    if use:
        Own.use = use
    return Own


@contextmanager
def never_back(self):
    set_rng_states(self.states, self.device)
    yield
    self.states = rng_states(self.device)


@contextmanager
def without_finally(self):
    common = rng_states(self.device)
    set_rng_states(self.states, self.device)
    yield
    self.states = rng_states(self.device)
    set_rng_states(common, self.device)


@contextmanager
def from_the_start(self):
    common = rng_states(self.device)
    set_rng_states(self.states, self.device)
    try:
        yield
    finally:
        set_rng_states(common, self.device)


@contextmanager
def lost_on_error(self):
    common = rng_states(self.device)
    set_rng_states(self.states, self.device)
    try:
        yield
        self.states = rng_states(self.device)
    finally:
        set_rng_states(common, self.device)


@contextmanager
def swallows(self):
    common = rng_states(self.device)
    set_rng_states(self.states, self.device)
    try:
        yield
    except KeyError as error:
        print(error)
    self.states = rng_states(self.device)
    set_rng_states(common, self.device)


@contextmanager
def generator_beside(self):
    self.generator = torch.Generator().manual_seed(dist.get_rank())
    yield self.generator


@contextmanager
def no_yield(self):
    set_rng_states(self.states, self.device)


def no_decorator(self):
    yield


WRONG["13.9"] += [
    (own_random(use=never_back), "after a block the common numbers are others"),
    (own_random(use=without_finally), "after an error in the block the common numbers are others"),
    (own_random(use=from_the_start), "each block starts at the same place"),
    (own_random(use=lost_on_error), "after an error the next block starts where that one had"),
    (own_random(use=swallows), "a KeyError in the block disappears"),
    (own_random(use=generator_beside), "in the block the common numbers are drawn"),
    (own_random(use=no_yield), "has to yield"),
    (own_random(use=no_decorator), "has lost its decorator"),
    (own_random(back=False), "__init__ leaves its own seed behind"),
    (own_random(lambda seed, group: seed), "the seed is the same on all ranks"),
    (own_random(lambda seed, group: time.time_ns()), "they depend on the time"),
    (own_random(lambda seed, group: seed + dist.get_rank()), "counts over the whole job"),
    (own_random(lambda seed, group: dist.get_rank(group)), "`seed` is not used"),
    (own_random(lambda seed, group: seed * dist.get_rank(group)), "a product with the rank is 0"),
    (
        own_random(lambda seed, group: seed + dist.get_rank(group)),
        "its own numbers are those after torch.manual_seed(seed)",
    ),
]

# ---- 13.13 plan -----------------------------------------------------------------------------


def planned(change, kept=lambda name: True):
    """The course's plan with changes: a name -> another style, or None to leave it out."""

    def plan(num_blocks, sequence=False):
        styles = dtensor.plan(num_blocks, sequence)
        between = Shard(1) if sequence else Replicate()
        for name in list(styles):
            for end, make in change.items():
                if name.endswith(end):
                    styles[name] = make(between)
        return {name: style for name, style in styles.items() if style and kept(name)}

    return plan


@right("13.13")
def by_hand_inputs(num_blocks, sequence=False):
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
            styles[f"blocks.{i}.norm1"] = SequenceParallel()
            styles[f"blocks.{i}.norm2"] = SequenceParallel()
    if sequence:
        styles["norm"] = SequenceParallel()
        styles["dropout"] = PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Shard(1)
        )
    return styles


RIGHT["13.13"].append(planned({"qkv": lambda b: ColwiseParallel()}))


@wrong("13.13", "no module has the name")
def without_blocks(num_blocks, sequence=False):
    return {"attention.qkv": ColwiseParallel(), "mlp.up": ColwiseParallel()}


@wrong("13.13", "a style is an object")
def a_class(num_blocks, sequence=False):
    return {"tokens": RowwiseParallel}


def unequal(name):
    return not name.startswith("blocks.") or name.startswith("blocks.0.")


SHORTER = {"head": lambda b: ColwiseParallel(input_layouts=b, use_local_output=False)}
RIGHT["13.13"].append(planned(SHORTER))
HEAD_LOCAL = {"head": lambda b: ColwiseParallel(input_layouts=b, output_layouts=Shard(-1))}
HEAD_WHOLE = {
    "head": lambda b: ColwiseParallel(
        input_layouts=b, output_layouts=Replicate(), use_local_output=False
    )
}
WRONG["13.13"] += [
    (planned({"up": lambda b: RowwiseParallel(output_layouts=b)}), "mlp.up is cut by input"),
    (planned({"down": lambda b: ColwiseParallel(input_layouts=b)}), "mlp.down is cut by output"),
    (planned({"tokens": lambda b: ColwiseParallel()}), "tokens is cut by output features"),
    (planned({"tokens": lambda b: RowwiseParallel()}), "input_layouts of tokens is Shard(-1)"),
    (planned(HEAD_LOCAL), "use_local_output of head is True"),
    (planned(HEAD_WHOLE), "output_layouts of head is"),
    (planned({"head": lambda b: None}), "head is not in the plan"),
    (
        planned(
            {
                "qkv": lambda b: RowwiseParallel(output_layouts=b),
                ".out": lambda b: ColwiseParallel(input_layouts=b),
            }
        ),
        "qkv is cut by input features",
    ),
    (planned({}, unequal), "blocks.1.attention.qkv is not in the plan"),
    (planned({".out": lambda b: RowwiseParallel()}), "output_layouts of blocks.0.attention.out"),
    (
        planned({"qkv": lambda b: ColwiseParallel(input_layouts=(b,))}),
        "input_layouts of blocks.0.attention.qkv",
    ),
    (planned({".norm2": lambda b: None}), "blocks.0.norm2 is not in the plan"),
    (planned({".mlp.down": lambda b: None}), "mlp.down is not in the plan"),
    (planned({}, lambda name: "norm" not in name), "norm1 is not in the plan"),
    (planned({}, lambda name: name != "norm"), "norm is not in the plan"),
    (planned({}, lambda name: name != "dropout"), "dropout is not in the plan"),
    (
        planned({"norm1": lambda b: SequenceParallel(sequence_dim=0)}),
        "sequence_sharding of blocks.0.norm1",
    ),
]
