# ---
# manyhands: {title: Tensor parallelism, goal: "Cut the matrices of a Transformer over ranks by hand, equal to one process, count each message, and see where the cut pays", needs: [data_parallel, fsdp], job: {flags: "--steps 100 --layers 2 --block 32", loss: [1.54, 1.76]}}
# ---

# %% [markdown]
# # 13 Tensor parallelism
#
# A pipeline cuts a model between its layers (lesson 12). Here we cut *inside* them: each rank holds a part of
# every matrix, and all ranks work on the same tokens at the same time. There is no bubble, and a single layer
# that is too large for one device now fits. The price is communication in every layer, forward and backward.
#
# ![An MLP cut over two ranks. Both ranks receive x; each multiplies it by its columns of A, applies gelu and multiplies the result by its rows of B; an all-reduce adds the two parts to y](figures/tensor_mlp.svg)
#
# The picture shows the trick: the first matrix is cut by columns and the second by rows, so nothing has to
# travel between the two.

# %%
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from manyhands.checks import score, tensor as check
from manyhands.collectives.trees import Group
from manyhands.data_parallel.replicas import broadcast_state, pack, unpack
from manyhands.fsdp.flat import all_gather, reduce_scatter
from manyhands.instruments import figures
from manyhands.instruments.ledger import Ledger, calls
from manyhands.instruments.live import Live, parts_of
from manyhands.jobs import watch
from manyhands.memory.savings import rng_states, set_rng_states
from manyhands.models.transformer import MLP, Block, Transformer
from manyhands.ranks import lab
from manyhands.ranks.lab import run_ranks

lab.warm_up()
print(
    f"torch {torch.__version__}, {os.cpu_count()} cores; the ranks of this notebook use CPU + gloo"
)

# %% [markdown]
# ## 1. Two ways to cut a matrix
#
# How can two ranks share y = x A? If A is cut by **columns**, each rank computes some columns of y, and side
# by side they make up y. If A is cut by **rows**, x has to be cut by columns to match, and each rank computes
# a term of full size, so the terms have to be added.

# %% tags=["nbval-check-output"]
torch.manual_seed(0)
x, A = torch.randn(3, 4), torch.randn(4, 6)
A0, A1 = A.chunk(2, dim=1)
by_columns = torch.cat([x @ A0, x @ A1], dim=1)
x0, x1 = x.chunk(2, dim=1)
top, bottom = A.chunk(2, dim=0)
by_rows = x0 @ top + x1 @ bottom
print("by columns, put together:", torch.allclose(by_columns, x @ A, atol=1e-6))
print("by rows, added up:       ", torch.allclose(by_rows, x @ A, atol=1e-6))

# %% [markdown]
# An MLP computes y = gelu(x A) B. Cut A by columns: each rank then has some columns of x A, final values and
# not terms of a sum, so it can apply gelu to them. They are exactly the input that a row slice of B needs. So
# the only communication is one sum at the end.
#
# (Cutting A by rows would not work, because gelu(a + b) is not gelu(a) + gelu(b).)
#
# ## 2. What backward needs: f and g
#
# At the end of the MLP each rank has one term of y, and an all-reduce adds the terms. The figure calls this
# all-reduce **g**. What is the *backward* of g? After g all ranks do the same work with the same y and get
# the same loss. All ranks repeat one computation, so its gradient counts once. And y is a sum, so each term's
# gradient is that of y, unchanged: no message is needed.
#
# At the beginning every rank gets the same x: this is **f**. In forward f does nothing. But after f each rank
# does *different* work with x, so the gradient of x is the sum of N contributions, of which each rank has
# only its own. That is why the backward of f is an all-reduce.
#
# The two are mirror images: f copies forward and sums backward, while g sums forward and copies backward.
# Write both as `autograd.Function`s, as in lesson 09. A tensor that you are given may be used elsewhere, so
# sum into a copy.

# %% exercise="CopyToRanks.forward CopyToRanks.backward SumOverRanks.forward SumOverRanks.backward" todo="13.1" minutes=20 difficulty=2 points=2
from manyhands.tensor.layers import CopyToRanks, SumOverRanks

# %% check="13.1" tags=["nbval-check-output"]
check.CopyToRanks(CopyToRanks, SumOverRanks)

# %% [markdown]
# ## 3. Cut layers
#
# Which rank gets which part? If the size does not divide evenly, the first ranks get one more. And some
# groups of rows must not be cut apart: attention has heads, and a head must stay in one piece. So parts are
# counted in **units**, and a unit, such as the rows of one head, stays together.

# %% exercise="my_range" todo="13.2" minutes=10 difficulty=2 points=1
from manyhands.tensor.layers import my_range

# %% check="13.2" tags=["nbval-check-output"]
check.my_range(my_range)

# %% tags=["nbval-check-output"]
if check.ready("13.2"):
    print("10 over 3 ranks:              ", run_ranks(lambda: my_range(10), 3))
    print("3 heads of 8 rows over 2 ranks:", run_ranks(lambda: my_range(24, 8), 2))

# %% show="true"
from manyhands.tensor.layers import Region, my_part

# %% [markdown]
# Now the two layers. `nn.Linear` stores its matrix transposed, as (out, in). So to cut A by *columns*, cut
# the *rows* of `weight`, and cut the bias in the same way.
#
# `enter` is the way into the cut layers, here f, and `leave` is the way out, here g. They are arguments
# because section 6 replaces them. `Region` is the type of both.
#
# In the row layer `leave` adds up all ranks' terms. The bias belongs to the sum, so add it once, after
# `leave`.

# %% exercise="ColumnLinear.__init__ ColumnLinear.forward RowLinear.__init__ RowLinear.forward" todo="13.3" minutes=20 difficulty=2 points=2
from manyhands.tensor.layers import ColumnLinear, RowLinear

# %% check="13.3" tags=["nbval-check-output"]
check.ColumnLinear(ColumnLinear, RowLinear)

# %% [markdown]
# Does an MLP on two ranks compute the same as the whole MLP? The next cells print how far the output and the
# gradient of x differ, and which messages were sent. Differences around 1e-6 or less are float32 rounding.


# %%
def cut_mlp():
    torch.manual_seed(0)
    mlp, x = MLP(64), torch.randn(2, 5, 64, requires_grad=True)
    y = mlp(x)
    y.square().sum().backward()
    expected, x.grad = x.grad, None
    mlp.up, mlp.down = ColumnLinear(mlp.up), RowLinear(mlp.down)
    with Ledger() as forward:
        again = mlp(x)
    with Ledger() as backward:
        again.square().sum().backward()
    off = [(again - y).abs().max().item(), (x.grad - expected).abs().max().item()]
    return off, dict(calls(forward.entries)), dict(calls(backward.entries))


# %%
if check.ready("13.1", "13.2", "13.3"):
    off, forward, backward = run_ranks(cut_mlp, 2)[0]
    print(f"output off by {off[0]:.1e}, gradient of x by {off[1]:.1e}")
    print(f"messages forward: {forward}, backward: {backward}")
    assert max(off) < 1e-4 and forward == backward == {"all_reduce": 1}

# %% [markdown]
# The results agree up to rounding, and two matrices together cost one all-reduce each way.
#
# ## 4. Attention: a rank has some of the heads
#
# Can attention be cut as cheaply? Its heads are independent: each has its own queries, keys and values. So
# give each rank some of the heads. `qkv` is cut by columns and `out` by rows, and again one all-reduce each
# way is enough.
#
# In our model the rows of `qkv` go head by head: 3 x head_width rows for the query, key and value of head 0,
# then those of head 1, and so on. The columns of `out` also go head by head, head_width each.
# `block.attention.head_width` is the width of a head. A checkpoint that stores all queries, then all keys,
# then all values would have to be reordered first, or a rank gets one head's queries with another's keys.

# %% exercise="cut_block" todo="13.4" minutes=10 difficulty=2 points=2
from manyhands.tensor.model import cut_block

# %% check="13.4" tags=["nbval-check-output"]
check.cut_block(cut_block)


# %%
def cut_a_block(heads):
    torch.manual_seed(0)
    block, x = Block(24 * heads, heads, dropout=0.0), torch.randn(2, 5, 24 * heads)
    y = block(x)
    cut_block(block)
    return (block(x) - y).abs().max().item(), block.attention.qkv.weight.shape[0] // 72


# %% tags=["nbval-check-output"]
if check.ready("13.1", "13.2", "13.3", "13.4"):
    for heads, num_ranks in ((4, 2), (3, 2), (6, 4)):
        offs, have = zip(*run_ranks(cut_a_block, num_ranks, heads), strict=True)
        print(
            f"{heads} heads on {num_ranks} ranks: {list(have)} heads each, right: {max(offs) < 1e-5}"
        )

# %% [markdown]
# The output is right even where the heads do not divide evenly.
#
# ## 5. The vocabulary
#
# The largest matrix is often that of the vocabulary. It has V rows, one for each token, and is used twice, as
# embedding and as head. Cut it by rows, so that each rank has V/N of the tokens.
#
# **Embedding.** Each rank looks up the tokens that it has, and its part is zero for all others. The sum over
# the ranks, `leave`, is the whole embedding.

# %% exercise="VocabEmbedding.__init__ VocabEmbedding.forward" todo="13.5" minutes=15 difficulty=2 points=2
from manyhands.tensor.vocabulary import VocabEmbedding

# %% check="13.5" tags=["nbval-check-output"]
check.VocabEmbedding(VocabEmbedding)

# %% [markdown]
# **Head and loss.** With the same cut, each rank computes the scores of its own tokens, (B, T, V/N).
# Gathering all scores would cost 4BTV bytes: for 8 sequences of 2,048 tokens and a vocabulary of 128,000 this
# is 8.4 GB. But the loss of a token needs less:
#
# log(sum over all tokens of exp(score)) - score of the target.
#
# Each rank has a part of the sum, and one rank has the target's score. So only two numbers per token travel,
# and not V. A third number has to travel first, the largest score. It is subtracted from all scores, because
# exp of a large number overflows, and all ranks have to subtract the *same* number.
#
# For both sums use your g, `SumOverRanks`, because autograd then handles the backward. The largest score is
# only a shift and needs no gradient: `detach` it.

# %% exercise="vocab_cross_entropy" todo="13.6" minutes=25 difficulty=3 points=3
from manyhands.tensor.vocabulary import vocab_cross_entropy

# %% check="13.6" tags=["nbval-check-output"]
check.vocab_cross_entropy(vocab_cross_entropy)

# %% [markdown]
# ## 6. Sequence parallelism
#
# Between the cut layers are norms, dropouts and additions. All ranks apply them to all positions: N times the
# same work, and N copies of what backward needs. Can these be cut, too? An all-reduce is a reduce-scatter and
# an all-gather (lesson 04), so separate the two:
#
# - Out of the cut layers goes a **reduce-scatter**: each rank gets the sum, but only for its own T/N
#   positions.
# - Norm, dropout and addition work on these positions.
# - Into the next cut layers goes an **all-gather** of the positions.
#
# A ring sends as many bytes as before (section 9 has an exception), while the memory kept between the layers
# falls to 1/N.
#
# These two are mirror images as well: what is gathered forward is reduce-scattered backward, and vice versa.
# Write `gather_positions` and `sum_positions` first; they are at the end of the cell. The collectives of
# lesson 10 work on the *first* dimension, but positions are the second. `all_gather(whole, part, group)` only
# starts the transfer, so `.wait()` for it; `reduce_scatter(part, whole, group)` returns when it is done.

# %% exercise="gather_positions sum_positions GatherSequence.forward GatherSequence.backward ScatterSequence.forward ScatterSequence.backward" todo="13.7" minutes=20 difficulty=2 points=3
from manyhands.tensor.sequence import (
    GatherSequence,
    ScatterSequence,
    gather_positions,
    sum_positions,
)

# %% check="13.7" tags=["nbval-check-output"]
check.GatherSequence(GatherSequence, ScatterSequence)

# %% [markdown]
# There is a consequence for the norms, whose weights every rank has whole. Before, each rank saw all
# positions, so all got the same gradient. Now each sees only its own positions and gets only a *part* of the
# gradient, so these parts have to be added up after backward.

# %% exercise="sum_gradients" todo="13.8" minutes=10 difficulty=1 points=1
from manyhands.tensor.sequence import sum_gradients

# %% check="13.8" tags=["nbval-check-output"]
check.sum_gradients(sum_gradients)

# %% [markdown]
# ### Dropout: the same on all ranks, or different?
#
# Dropout draws random numbers. Where every rank has a *copy* of x, all ranks must drop the same elements, or
# the copies are no longer equal. Where each rank has a *part* of x, each must draw its own numbers, or the
# same pattern repeats in all parts. So a rank needs two streams of random numbers: a common one, and one of
# its own. Below, two ranks draw from both: compare their masks.

# %% exercise="OwnRandom.__init__ OwnRandom.use" todo="13.9" minutes=15 difficulty=2 points=2
from manyhands.tensor.sequence import OwnRandom

# %% check="13.9" tags=["nbval-check-output"]
check.OwnRandom(OwnRandom)


# %%
def draw():
    torch.manual_seed(1)
    own = OwnRandom(seed=1)
    common = F.dropout(torch.ones(8)).bool().int().tolist()
    with own.use():
        mine = F.dropout(torch.ones(8)).bool().int().tolist()
    return common, mine


# %% tags=["nbval-check-output"]
if check.ready("13.9"):
    for rank, (common, mine) in enumerate(run_ranks(draw, 2)):
        print(f"rank {rank}: common {common}, its own {mine}")

# %% [markdown]
# The common masks are equal, and the ranks' own masks differ.
#
# ## 7. The whole model
#
# `TensorParallel` takes a Transformer apart: the embedding, all blocks, and the head, which shares its matrix
# with the embedding. Write its forward.
#
# The head is cut by columns, like a `ColumnLinear`, so x passes through `self.enter` before it. The scores,
# flattened to (B T, V/N), go to `vocab_cross_entropy` together with `self.tokens.mine`.

# %% exercise="TensorParallel.forward" todo="13.10" minutes=15 difficulty=2 points=2
from manyhands.tensor.model import TensorParallel

# %% check="13.10" tags=["nbval-check-output"]
check.TensorParallel(TensorParallel)

# %% [markdown]
# ### Is it the same training?
#
# The next cells take ten steps of AdamW on 2 and 4 ranks, with and without sequence parallelism. Up to
# rounding, the losses and the weights must be equal to those of one process. And what every rank holds whole,
# norms and positions, must stay equal on all ranks to the last bit.

# %%
V, T, L, D, B = 50, 16, 3, 96, 8
PARTS = ("13.1", "13.2", "13.3", "13.4", "13.5", "13.6", "13.10")


def batches(num=10):
    generator = torch.Generator().manual_seed(4)
    return torch.randint(V, (num, 2, B, T), generator=generator)


def make_model(dropout=0.0, heads=4):
    torch.manual_seed(0)
    return Transformer(V, T, L, heads=heads, width=D, dropout=dropout)


def train(model, data, finish=lambda: None, learning_rate=3e-4):
    # with this eps the rounding of a gradient that is nearly 0 decides no step
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, eps=1e-6)
    losses = []
    for inputs, targets in data:
        optimizer.zero_grad()
        loss = model(inputs, targets)
        loss.backward()
        finish()
        optimizer.step()
        losses.append(loss.item())
    return losses


TRUTH = {dropout: (model := make_model(dropout), train(model, batches())) for dropout in (0.0, 0.1)}


# %%
def train_cut(sequence=False, dropout=0.0):
    """How far losses and matrices are from one process; and the whole parameters, as bytes."""
    model = TensorParallel(make_model(dropout), sequence)
    losses = train(model, batches(), model.finish_gradients)
    whole, truth = TRUTH[dropout]
    loss_off = max(abs(a - b) for a, b in zip(losses, truth, strict=True))
    pairs = [(model.tokens.weight, whole.tokens.weight, model.tokens.mine, 0)]
    for ours, theirs in zip(model.blocks, whole.blocks, strict=True):
        pairs += [(ours.mlp.up.weight, theirs.mlp.up.weight, my_range(4 * D), 0)]
        pairs += [(ours.mlp.down.weight, theirs.mlp.down.weight, my_range(4 * D), 1)]
    weight_off = 0.0
    for part, weight, mine, dim in pairs:
        expected = weight.narrow(dim, mine.start, len(mine))
        weight_off = max(weight_off, (part - expected).abs().max().item())
    copies = [model.positions.weight, model.norm.weight, model.blocks[0].norm1.weight]
    return loss_off, weight_off, pack(copies).numpy().tobytes()


# %%
if check.ready(*PARTS, "13.7", "13.8", "13.9"):
    for num_ranks in (2, 4):
        for sequence in (False, True):
            losses, weights, copies = zip(*run_ranks(train_cut, num_ranks, sequence), strict=True)
            name = f"{num_ranks} ranks, {'with' if sequence else 'without'} sequence parallelism"
            print(f"{name}: losses off by {max(losses):.1e}, weights by {max(weights):.1e}")
            assert max(losses + weights) < 1e-5 and len(set(copies)) == 1

# %% [markdown]
# Differences below 1e-5 are rounding, so it is the same training. The same holds with dropout. Without
# sequence parallelism all ranks draw the same random numbers, so even the dropped elements are those of one
# process.

# %%
if check.ready(*PARTS):
    off = max(loss_off for loss_off, *_ in run_ranks(train_cut, 2, False, 0.1))
    print(f"2 ranks, dropout 0.1: losses off by {off:.1e}")
    assert off < 1e-5

# %% [markdown]
# ## 8. Which data?
#
# The ranks that hold one model together must see the **same batch**, because each computes a part of the
# answer for it. With more ranks there are several models, replicas, and each *model* gets its own share of
# the data, not each rank.
#
# Compute which share a rank gets. Ranks 0 ... k - 1 hold the first model, the next k ranks the second, and so
# on.

# %% exercise="data_place" todo="13.11" minutes=5 difficulty=1 points=1
from manyhands.tensor.model import data_place

# %% check="13.11" tags=["nbval-check-output"]
check.data_place(data_place)

# %% [markdown]
# ### May each rank of a model draw its own batches?
#
# A script that is often shown for tensor parallelism gives `DistributedSampler` the number of *all* ranks, so
# each rank of one model gets a different batch. Does that matter? Train both ways on two ranks, compare the
# losses on one batch that both know, and watch for an error.


# %%
def train_with(data_of_rank):
    model = TensorParallel(make_model())
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(V, (40, B, 1), generator=generator)
    texts = (tokens + torch.arange(T + 1)) % V  # each next token is one more
    mine = data_of_rank(texts)
    train(model, [(text[:, :-1], text[:, 1:]) for text in mine], learning_rate=3e-3)
    with torch.no_grad():
        return model(texts[0][:, :-1], texts[0][:, 1:]).item()


def one_batch_for_all(texts):
    share, num_shares = data_place(dist.get_rank(), dist.get_world_size(), 2)
    return texts[:, share::num_shares]


def other_batches(texts):
    return texts[
        torch.randperm(len(texts), generator=torch.Generator().manual_seed(dist.get_rank()))
    ]


# %%
if check.ready(*PARTS, "13.11"):
    for name, data in (("the same batch", one_batch_for_all), ("other batches", other_batches)):
        print(f"{name:15} loss after training {run_ranks(train_with, 2, data)[0]:.3f}")

# %% [markdown]
# With different batches the embedding mixes the sequences: each rank adds the rows of its own tokens for its
# own batch, so a position gets the tokens of both batches, of one, or of none. The loss mixes the targets in
# the same way. The model trains, but partly on nonsense, and on this easy text its loss ends clearly higher:
# in our run 0.20 instead of 0.08. No error tells you.
#
# ## 9. Count the messages
#
# Predict first: how many all-reduces are in one forward and backward of a model with L blocks? Count those of
# f and g in attention, MLP, embedding and head. The loss adds two: one for the largest scores, and one for
# both sums together. And what becomes of all these messages with sequence parallelism?

# %% exercise="calls_per_step" todo="13.12" minutes=10 difficulty=2 points=1
from manyhands.tensor.model import calls_per_step

# %% check="13.12" tags=["nbval-check-output"]
check.calls_per_step(calls_per_step)


# %%
def ledger_of(sequence):
    model = TensorParallel(make_model(), sequence)
    inputs, targets = batches(1)[0]
    with Ledger() as ledger:
        model(inputs, targets).backward()
        model.finish_gradients()
    return calls(ledger.entries), sum(entry.nbytes for entry in ledger.entries)


# %% tags=["nbval-check-output"]
if check.ready(*PARTS, "13.7", "13.8", "13.9", "13.12"):
    for sequence in (False, True):
        counted, nbytes = run_ranks(ledger_of, 2, sequence)[0]
        expected = calls_per_step(L, sequence)
        assert all(counted[name] == n for name, n in expected.items()), f"not {dict(counted)}"
        print(f"{'with' if sequence else 'without'} sequence parallelism: {dict(counted)}")
        print(f"  {nbytes:,} bytes; 2 (2L + 1) activations are {2 * (2 * L + 1) * 4 * B * T * D:,}")

# %% [markdown]
# The ledger counts the whole tensor once per call. A ring all-reduce sends about twice that, and a gather or
# a reduce-scatter about once (lesson 04). So the doubled number with sequence parallelism is the same
# traffic. But gloo makes a reduce-scatter out of a whole all-reduce, so here the real traffic is about 1.5
# times as large.
#
# What does the count mean for a real model? A block all-reduces its activation four times per step, and here
# the block cannot continue until each all-reduce is done. (Megatron-LM hides the all-reduces of backward
# behind the computation of the weights' gradients.) So tensor parallelism needs the fastest network there is:
# the links inside a node. Across two nodes it lost about 43 % of its throughput, while a pipeline lost about
# 14 % (Ultra-Scale Playbook, 2025).
#
# ## 10. PyTorch's own: a plan
#
# In PyTorch you write down how each module is cut, and **DTensor** does the rest. A DTensor (distributed
# tensor) looks like the whole tensor, while each rank holds its part. `ColwiseParallel` and `RowwiseParallel`
# are the layers that you wrote. Each has a layout for its input and one for its output, set by
# `input_layouts=` and `output_layouts=`: `Replicate()` means whole on all ranks, `Shard(1)` cut by positions,
# and `Shard(-1)` cut by the last dimension. By default `ColwiseParallel` takes a whole input and returns
# `Shard(-1)`, and `RowwiseParallel` does the opposite.
#
# Write the plan, a dictionary from names such as `"blocks.0.mlp.up"` to styles. The activation between the
# layers is `Replicate()` without sequence parallelism and `Shard(1)` with it:
#
# - `tokens` is `RowwiseParallel` with a whole input. For an embedding this means rows of tokens.
# - `head` is `ColwiseParallel`. Its input is the activation between the layers. Its output stays cut by the
#   vocabulary, `Shard(-1)`, and stays a DTensor (`use_local_output=False`), so that `loss_parallel` can do
#   what your `vocab_cross_entropy` does.
# - Each block needs `attention.qkv`, `attention.out`, `mlp.up` and `mlp.down`.
# - With sequence parallelism all norms get `SequenceParallel()`. The activation also has to be cut by
#   positions once, at the beginning, after `dropout`: `PrepareModuleOutput(output_layouts=Replicate(),
#   desired_output_layouts=Shard(1))`.

# %% exercise="plan" todo="13.13" minutes=15 difficulty=2 points=2
from manyhands.tensor.dtensor import plan

# %% check="13.13" tags=["nbval-check-output"]
check.plan(plan)

# %% show="true"
from manyhands.tensor.dtensor import torch_tensor_parallel


# %%
def train_torch(sequence):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch_tensor_parallel(make_model(), mesh, sequence)
    # V = 50 can be cut over two ranks evenly; DTensor needs that
    losses, truth = [], TRUTH[0.0][1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, eps=1e-6)
    with loss_parallel(), Ledger() as ledger:
        for inputs, targets in batches():
            optimizer.zero_grad()
            loss = model(inputs, targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.full_tensor().item())
    off = max(abs(a - b) for a, b in zip(losses, truth, strict=True))
    return off, dict(calls(ledger.entries)), type(model.tokens.weight).__name__


# %%
if check.ready("13.13"):
    for sequence in (False, True):
        off, counted, kind = run_ranks(train_torch, 2, sequence)[0]
        print(f"{kind}s, sequence={sequence}: losses off by {off:.1e}; in 10 steps {counted}")
        assert off < 1e-5

# %% [markdown]
# The losses agree up to rounding, and without sequence parallelism the ledger shows the large messages that
# you counted, 14 per step. It does not see what DTensor sends inside an operation: three small messages of
# `loss_parallel`, and with sequence parallelism the sums of the norms' gradients, which are sent during the
# optimizer's step. With it this plan also all-reduces the whole embedding and cuts it afterwards, so one
# all-reduce per step replaces a reduce-scatter.
#
# ## 11. Where the cut pays
#
# The work of a block grows with the square of its width, but a message grows only in proportion to the width.
# So narrow layers lose by the cut and wide ones gain. From which width on does the cut pay on this machine?
# The next cells time forward and backward of one block, for one rank with one thread and for two ranks with
# one thread each, by hand and with DTensor. Look for the width at which the lines cross.


# %%
def block_ms(width, how, repeats=7):
    """Median time of forward and backward of a block on (4, 32, width), in ms."""
    torch.manual_seed(0)
    block, x = Block(width, 4, 0.0), torch.randn(4, 32, width, requires_grad=True)
    if how == "by hand":
        cut_block(block)
    if how == "DTensor":
        parts = {name.removeprefix("blocks.0."): style for name, style in plan(1).items()}
        styles = {name: style for name, style in parts.items() if name.startswith(("att", "mlp"))}
        block = parallelize_module(block, init_device_mesh("cpu", (2,)), styles)
    times = []
    for _ in range(repeats):
        if dist.get_world_size() > 1:
            dist.barrier()
        start_s = time.perf_counter()
        block(x).sum().backward()
        times.append(1e3 * (time.perf_counter() - start_s))
    return statistics.median(times)


# %%
WIDTHS = (64, 128, 256, 512, 1024)
if check.ready("13.1", "13.2", "13.3", "13.4", "13.13"):
    ways = {"1 rank": (1, "whole"), "2 ranks, by hand": (2, "by hand")}
    ways |= {"2 ranks, native DTensor": (2, "DTensor")}
    times = {
        name: (WIDTHS, [max(run_ranks(block_ms, n, width, how)) for width in WIDTHS])
        for name, (n, how) in ways.items()
    }
    figure, ax = figures.new_figure(7, 3.6)
    figures.lines(ax, times, "width D", "forward and backward of a block (ms)")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_major_formatter("{x:g}")
    figures.show(
        figure, "Lines over the width: one rank, two ranks by hand, two ranks with DTensor."
    )
    whole, by_hand = times["1 rank"][1], times["2 ranks, by hand"][1]
    for width, one, two in zip(WIDTHS, whole, by_hand, strict=True):
        print(f"width {width:4}: 1 rank {one:6.1f} ms, 2 ranks {two:6.1f} ms: {one / two:.2f} x")

# %% [markdown]
# For a narrow block the four all-reduces cost more than the halved work saves: in our run two ranks were
# nearly four times slower at width 64. For a wide block the work dominates, so two ranks are faster: in our
# run 1.5 times at width 1024, with the crossing between 512 and 1024. Each point is one short run, so your
# crossing may differ. DTensor also works out in Python, for each operation, which message it needs. That
# takes about the same time for every width, so it matters least for wide layers; and on a GPU, where Python
# runs ahead of the device, it may not show at all.
#
# ### Is tensor parallelism still used?
#
# Some slides say that it is no longer used, and cite Llama 3. That paper's own table (Grattafiori et al.
# 2024, table 4) says over how many GPUs each dimension is cut; "context" means the positions of a long
# sequence:
#
# | GPUs | tensor | context | pipeline | data | sequence length | TFLOP/s per GPU |
# |---|---|---|---|---|---|---|
# | 8,192 | 8 | 1 | 16 | 64 | 8,192 | 430 |
# | 16,384 | 8 | 1 | 16 | 128 | 8,192 | 400 |
# | 16,384 | 8 | 16 | 16 | 8 | 131,072 | 380 |
#
# Every row has tensor parallelism over 8 GPUs, those of one node. So it was used where the links are fastest,
# together with a pipeline between the nodes and data parallelism around both. The next lesson combines them.
#
# ## 12. What it saves
#
# The next cell measures what a rank holds between forward and backward, where activations are at their peak:
# on one rank, and on two and four ranks, without and with sequence parallelism. Watch the activations.


# %%
def held_mb(how):
    model = make_model()
    if how != "whole":
        model = TensorParallel(model, sequence=how == "sequence")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for _ in range(2):
        with Live(parts_of(model, optimizer)) as live:
            loss = model(*batches(1)[0])
            held = live.now()  # between forward and backward
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        del loss
    named = {"activations": held["other"], **{k: held[k] for k in ("weights", "optimizer")}}
    return {name: nbytes / 1e6 for name, nbytes in named.items()}


# %%
if check.ready(*PARTS, "13.7", "13.8", "13.9"):
    ways = {"1 rank": (1, "whole"), "2 ranks": (2, "tensor"), "2 ranks,\nsequence": (2, "sequence")}
    ways |= {"4 ranks": (4, "tensor"), "4 ranks,\nsequence": (4, "sequence")}
    bars = [(name, run_ranks(held_mb, n, how)[0]) for name, (n, how) in ways.items()]
    figure, ax = figures.new_figure(7, 3.6)
    figures.stacked_bars(ax, bars, "after forward (MB a rank)")
    figures.show(
        figure, "Bars: weights and optimizer shrink with ranks, activations most with both."
    )

# %% [markdown]
# Weights and optimizer state shrink to almost 1/N, because only norms and positions stay whole on all ranks.
# The activations inside the cut layers shrink as well, and sequence parallelism also cuts those between the
# layers. But even then the gathered inputs stay whole: each layer cut by columns keeps its whole input for
# the gradient of its weights. That is why the activations shrink to less than half on four ranks, but not to
# a quarter. (Megatron-LM keeps only a rank's own positions there, and gathers again in backward.)
#
# ## 13. Run it as a job
#
# The job trains with your `TensorParallel`, which calls your other functions, since they are in the same
# file. Here two ranks hold one model; with `--tensor 2` on four ranks there would be two, and your
# `data_place` would deal out the data. In the report, the layers' messages count as forward and backward:
# "communication" begins only after a rank's last gradient.

# %%
if check.ready(*PARTS, "13.11"):
    check.keep()
    watch.run(
        "../sbatch/tensor.sbatch", "--impl", "mine", *"--steps 60 --layers 2 --block 32".split()
    )

# %%
check.summary()

# %% [markdown]
# ## Recap
#
# You can now
#
# - cut a layer by columns or by rows, and say which messages forward and backward need,
# - cut attention by heads and the vocabulary by tokens, and compute the loss without gathering the scores,
# - keep norms and dropouts correct, copied or cut by positions,
# - count the collectives of a block, and say where the cut pays,
# - write the same as a plan for DTensor.
#
# **Questions**
#
# <details><summary>Why is the first matrix of an MLP cut by columns and the second by rows, and not the other way round?</summary>
#
# With columns first, each rank has final values of x A and can apply gelu to them. With rows first it would
# have terms of sums, and gelu of a sum is not the sum of gelus, so one more all-reduce would be needed.
#
# </details>
#
# <details><summary>On 4 ranks the loss is right, but after some steps the norms' weights differ between the ranks. What was forgotten?</summary>
#
# With sequence parallelism each rank's norms see only its own positions, so their gradients have to be added
# up after each backward.
#
# </details>
#
# <details><summary>A node has 8 GPUs with fast links. A model needs 16 GPUs to fit. Should tensor parallelism span all 16?</summary>
#
# Better to use it over the 8 GPUs of a node, with two pipeline stages on two nodes. Tensor parallelism sends
# four activations per block and waits for each, while a pipeline sends only two per cut.
#
# </details>
#
# **Sources.** f, g, heads and vocabulary: Megatron-LM, Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053.
# Sequence parallelism: Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198. Llama 3: Grattafiori et al.
# 2024, https://arxiv.org/abs/2407.21783. DTensor:
# https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html. Speed across nodes: The Ultra-Scale
# Playbook, 2025, https://huggingface.co/spaces/nanotron/ultrascale-playbook.
