# ---
# manyhands: {title: Tensor parallelism, goal: "Cut the matrices of a Transformer over ranks by hand, equal to one process, count each message, and see where the cut pays", job: {flags: "--steps 100 --layers 2 --block 32", loss: [1.54, 1.76]}}
# ---

# %% [markdown]
# # 13 Tensor parallelism
#
# A pipeline cuts a model between its layers (lesson 12). Here we cut *inside* them: each rank holds a part
# of every large matrix, and all ranks work on the same tokens at the same time. There is no bubble, and a
# single layer that is too large for one device now fits. The price is communication in every layer, in
# forward and in backward. (Models are also cut for inference, where one GPU could not hold them. This
# course is about training, and inference is out of its scope.)
#
# ![An MLP cut over two ranks. Both ranks receive x; each multiplies it by its columns of A, applies gelu and multiplies the result by its rows of B; an all-reduce adds the two parts to y](figures/tensor_mlp.svg)
#
# The picture shows the trick: the first matrix is cut by columns and the second by rows, so nothing has to
# travel between the two.
#
# Sections 1 to 9, except section 8, are the core: you cut a whole Transformer, train it, and find out where
# the cut pays. The optional sections after them are for a second sitting. They treat data shares, sequence
# parallelism, PyTorch's own way, and the count and the times of the messages. (The exercises have fixed
# numbers, by which other lessons refer to them, so they do not come in order, and there is no 13.2.)

# %% jupyter={"source_hidden": true}
import os
import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
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
from manyhands.collectives.alpha_beta import predicted_s
from manyhands.collectives.trees import Group
from manyhands.compare import figures as compare_figures, measure
from manyhands.data_parallel.replicas import broadcast_state, pack, unpack
from manyhands.fsdp.flat import all_gather, reduce_scatter
from manyhands.instruments import figures
from manyhands.instruments.ledger import Ledger, calls
from manyhands.instruments.live import Live, parts_of
from manyhands.instruments.timing import slowest_rank
from manyhands.jobs import watch
from manyhands.memory.savings import rng_states, set_rng_states
from manyhands.models.transformer import MLP, Block, Transformer
from manyhands.ranks import lab
from manyhands.ranks.lab import run_ranks
from manyhands.tensor import bench, figures as tensor_figures
from manyhands.tensor.replaced import refuse_extras, refuse_strangers, refuse_untied
from manyhands.ways import registry
from manyhands.ways.ready import Setting
from manyhands.ways.tensor import Parts, tensor_parallel

lab.warm_up()
print(f"torch {torch.__version__}, {os.cpu_count()} cores; ranks use CPU + gloo")

# %% [markdown]
# ## 1. Two ways to cut a matrix
#
# How can two ranks share the work of y = x A? If A is cut by **columns**, each rank computes some columns of
# y, and side by side they make up y. If A is cut by **rows**, x has to be cut by columns to match, and each
# rank computes a term of full size, so the terms have to be added.

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
assert torch.allclose(by_columns, x @ A, atol=1e-6) and torch.allclose(by_rows, x @ A, atol=1e-6)

# %% [markdown]
# An MLP computes y = gelu(x A) B. Cut A by columns: each rank then has some columns of x A, final values and
# not terms of a sum, so it can apply gelu to them. They are exactly the input that a row slice of B needs. So
# the only communication is one sum at the end.
#
# ## 2. What backward needs: f and g
#
# At the end of the MLP each rank has one term of y, and an all-reduce adds the terms. The figure calls this
# all-reduce **g**. What is the *backward* of g? After g all ranks do the same work with the same y and get
# the same loss. They only repeat one computation, so its gradient counts once. And because y is a sum, the
# gradient of each term is that of y, unchanged, and no message is needed.
#
# At the beginning of the MLP every rank gets the same x. This step is **f**, and in forward it does nothing.
# But after f each rank does *different* work with x, so with N ranks the gradient of x is the sum of N
# contributions, of which each rank has only its own. That is why the backward of f is an all-reduce.
#
# The two are mirror images: f copies forward and sums backward, while g sums forward and copies backward.
# Write both as `autograd.Function`s, as in lesson 09. A tensor that you are given may be used elsewhere, so
# sum into a copy. Make this copy contiguous, because `all_reduce` adds numbers in the order in which they lie
# in memory. Autograd cannot see the messages in a `backward`, so the gradient of a gradient would be wrong;
# `@once_differentiable`, which is given, makes it an error.

# %% exercise="CopyToRanks.forward CopyToRanks.backward SumOverRanks.forward SumOverRanks.backward" todo="13.1" minutes=20 difficulty=2 points=2
from manyhands.tensor.layers import CopyToRanks, SumOverRanks

# %% check="13.1" tags=["nbval-check-output"]
check.CopyToRanks(CopyToRanks, SumOverRanks)

# %% [markdown]
# ## 3. Cut layers
#
# Which rank gets which part? Some groups of rows must not be cut apart: attention has heads, and a head must
# stay in one piece. So parts are counted in **units**, and a unit, such as the rows of one head, stays
# together. Where the units cannot be divided evenly, the first ranks get one more. The next cell gives you
# the helpers: `part_of` says which part is a rank's, `my_range` which is this rank's, and `my_part` copies it
# into a parameter. `Region` is the type of f and g when they are passed as functions: f is
# `CopyToRanks.apply`, through which x enters the cut layers, and is called as `enter(x, group)`; g is
# `SumOverRanks.apply`, which sums the ranks' parts and is called as `leave(part, group)`.

# %% show="true"
from manyhands.tensor.layers import Region, my_part, my_range, part_of

# %% [markdown]
# Now the two layers. `nn.Linear` stores its matrix transposed, as (out, in). So to cut A by *columns*, cut
# the *rows* of `weight`, and cut the bias in the same way. `ColumnLinear.__init__`, which is given, does so.
#
# `enter` is the way into the cut layers, here f, and `leave` is the way out, here g. They are arguments, so
# that they can be replaced (section 11 does so). The bias of the row layer belongs to the sum, so add it
# once, after `leave`. `GatherFeatures` is given, too: it is for a column layer that no row layer follows, and
# with `gather_output` it joins the parts of the result on every rank.

# %% exercise="ColumnLinear.forward RowLinear.__init__ RowLinear.forward" todo="13.3" minutes=15 difficulty=2 points=2
from manyhands.tensor.layers import GatherFeatures, ColumnLinear, RowLinear

# %% check="13.3" tags=["nbval-check-output"]
check.ColumnLinear(ColumnLinear, RowLinear)

# %% [markdown]
# Does an MLP on two ranks compute the same as the whole MLP? The next cell prints how far the output and the
# gradient of x are from those of the whole MLP, and which messages were sent. Differences around 1e-6 or less
# are float32 rounding.


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


if check.ready("13.1", "13.3"):
    off, forward, backward = run_ranks(cut_mlp, 2)[0]
    print(f"output off by {off[0]:.1e}, gradient of x by {off[1]:.1e}")
    print(f"messages forward: {forward}, backward: {backward}")
    assert max(off) < 1e-4 and forward == backward == {"all_reduce": 1}

# %% [markdown]
# The results agree up to rounding, and the two matrices together cost one all-reduce in each direction.
#
# ## 4. Attention: a rank has some of the heads
#
# Can attention be cut as cheaply? Its heads are independent: each has its own queries, keys and values. So
# give each rank some of the heads. The layer `qkv`, which makes queries, keys and values, is cut by columns,
# and the layer `out`, which joins the heads, by rows. Again one all-reduce in each direction is enough.
#
# In our model the rows of `qkv` go head by head: 3 x head_width rows for the query, key and value of head 0,
# then those of head 1, and so on. The columns of `out` also go head by head, head_width each.
# `block.attention.head_width` is the width of a head.

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


if check.ready("13.1", "13.3", "13.4"):
    for heads, num_ranks in ((4, 2), (3, 2), (6, 4)):
        offs, have = zip(*run_ranks(cut_a_block, num_ranks, heads), strict=True)
        print(
            f"{heads} heads on {num_ranks} ranks: {list(have)} heads each, right: {max(offs) < 1e-5}"
        )
        assert max(offs) < 1e-5

# %% [markdown]
# The output is right even where the heads do not divide evenly.
#
# A warning, in case you load published weights: many checkpoints store all queries, then all keys, then all
# values in one matrix (GPT-2's do, in a matrix that is transposed). Half of its rows are then not half of
# the heads. The next cell cuts such a matrix of two heads over two ranks, first as it is stored and then
# with its rows reordered.

# %% tags=["nbval-check-output"]
names = ["q0", "q1", "k0", "k1", "v0", "v1"]  # the rows of head 0's query, of head 1's query, ...
as_stored = torch.arange(6)
by_heads = as_stored.view(3, 2, 1).transpose(0, 1).flatten()  # (q k v, heads, rows of each)
for what, order in (("as stored", as_stored), ("reordered", by_heads)):
    rank0, rank1 = ([names[i] for i in part] for part in order.chunk(2))
    print(f"{what}: rank 0 has {rank0}, rank 1 has {rank1}")

# %% [markdown]
# As stored, rank 0 would take head 1's query for a key and head 0's key for a value. Every shape would still
# fit, so no error would tell you. For a real matrix of shape (3D, D), where D is the width of the model, the
# same line reads `weight.view(3, heads, head_width, D).transpose(0, 1).reshape(3 * D, D)`. GPT-2's has the
# shape (D, 3D), which this line would accept without an error: take `weight.T` first.
#
# ## 5. The vocabulary
#
# The largest matrix is often that of the vocabulary. It has V rows, one for each token, and our model uses it
# twice, as embedding and as head. Cut it by rows, so that each rank has V/N of the tokens.
#
# **Embedding.** Each rank looks up the tokens that it has, and its part is zero for all others. `leave` sums
# the parts over the ranks, and the sum is the whole embedding.

# %% exercise="VocabEmbedding.forward" todo="13.5" minutes=10 difficulty=2 points=2
from manyhands.tensor.vocabulary import VocabEmbedding

# %% check="13.5" tags=["nbval-check-output"]
check.VocabEmbedding(VocabEmbedding)

# %% [markdown]
# **Head and loss.** With the same cut, each rank computes the scores of its own tokens, (B, T, V/N) for B
# sequences of T tokens. Gathering all scores would cost 4BTV bytes: for 8 sequences of 2,048 tokens and a
# vocabulary of 128,000 this is 8.4 GB. But the loss of a token needs less:
#
# log(sum over all tokens of exp(score)) - score of the target.
#
# Each rank has a part of the sum, and one rank has the target's score. So only two numbers per token have to
# travel, not V. A third number has to travel before them, the largest score. It is subtracted from all
# scores, because exp of a large number overflows, and all ranks have to subtract the *same* number.
#
# For both sums use your g, `SumOverRanks`, so that autograd handles the backward. The largest score is only a
# shift and needs no gradient: `detach` it. Select the target's score with `torch.where`, and not by a product
# with 0 and 1: the scores of tokens that may not come next are often set to -inf, and 0 times -inf is not 0.

# %% exercise="vocab_cross_entropy" todo="13.6" minutes=25 difficulty=3 points=3
from manyhands.tensor.vocabulary import vocab_cross_entropy

# %% check="13.6" tags=["nbval-check-output"]
check.vocab_cross_entropy(vocab_cross_entropy)

# %% [markdown]
# ## 6. A whole model, trained
#
# You now have every part of a Transformer: the embedding, the blocks, the head and the loss.
# `CutTransformer`, which is given, puts the cut parts into one module.

# %% show="true"
from manyhands.tensor.model import CutTransformer

# %% [markdown]
# Write what it computes. `through_blocks` goes from the tokens to the end of the last block. `forward` goes
# on to the loss: the head is cut by columns, like a `ColumnLinear`, so x passes through `self.enter` before
# it. The scores, flattened to (B T, V/N), go to `vocab_cross_entropy` together with `self.tokens.mine`, the
# range of tokens that this rank has.

# %% exercise="TensorParallel.through_blocks TensorParallel.forward" todo="13.10" minutes=10 difficulty=2 points=2
from manyhands.tensor.model import TensorParallel

# %% check="13.10" tags=["nbval-check-output"]
check.TensorParallel(TensorParallel)

# %% [markdown]
# ### Is it the same training?
#
# The next two cells take ten steps of AdamW on 2 and 4 ranks. Up to rounding, the losses and the weights must
# be equal to those of one process. And the parameters that every rank holds whole, those of the norms and the
# positions, must stay equal on all ranks to the last bit. The second line of each pair is a training with
# dropout. All ranks draw the same random numbers, so even the dropped elements should be those of one
# process.

# %%
V, T, L, D, B = 50, 16, 3, 96, 8
PARTS = ("13.1", "13.3", "13.4", "13.5", "13.6", "13.10")


def batches(num=10):
    generator = torch.Generator().manual_seed(4)
    return torch.randint(V, (num, 2, B, T), generator=generator)


def make_model(dropout=0.0):
    torch.manual_seed(0)
    return Transformer(V, T, L, heads=4, width=D, dropout=dropout)


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
def train_cut(kind, dropout=0.0):
    """How far losses and matrices are from one process; and the whole parameters, as bytes."""
    model = kind(make_model(dropout))
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


def train_each(kind, dropouts):
    return [train_cut(kind, dropout) for dropout in dropouts]


def compare_training(num_ranks, kind, dropouts):
    results = run_ranks(train_each, num_ranks, kind, dropouts)
    for dropout, of_ranks in zip(dropouts, zip(*results, strict=True), strict=True):
        losses, weights, copies = zip(*of_ranks, strict=True)
        name = f"{num_ranks} ranks, dropout {dropout}"
        print(f"{name}: losses off by {max(losses):.1e}, weights by {max(weights):.1e}")
        assert max(losses + weights) < 1e-5 and len(set(copies)) == 1


if check.ready(*PARTS):
    for num_ranks in (2, 4):
        compare_training(num_ranks, TensorParallel, (0.0, 0.1))

# %% [markdown]
# Differences below 1e-5 are rounding, so it is the same training, and a matrix that no rank holds whole has
# learned what it would have learned in one process.
#
# ## 7. Where the cut pays
#
# ### What a step sends
#
# Compare with lesson 12. A pipeline of two stages sends one activation forward and one gradient backward, so
# in a step each rank sends one tensor of B x T x D numbers. How many tensors of this size does each of *two*
# ranks send here, with L = 3 blocks? Count the all-reduces of f and g in attention, MLP, embedding and head,
# forward and backward; in a ring all-reduce on two ranks, each rank sends as many bytes as the whole tensor
# has. Write your number down, then let the ledger count.

# %%
times_as_many = None  # your number

# %% answer="true"
times_as_many = 14  # (2 L + 1) all-reduces each way


# %%
def two_stages(x, inner):
    """A step through a pipeline of two stages that hand over x, as lesson 12 cut it."""
    with Ledger() as ledger:
        if dist.get_rank() == 0:
            y = inner(x)
            dist.send(y.detach(), 1)
            dist.recv(grad := torch.empty_like(y), 1)
            y.backward(grad)
        else:
            dist.recv(given := torch.empty_like(x), 0)
            inner(given.requires_grad_()).sum().backward()
            dist.send(given.grad, 0)
    return sum(entry.nbytes for entry in ledger.entries if entry.op == "send")


def cut_inside():
    model = TensorParallel(make_model())
    with Ledger() as ledger:
        model(*batches(1)[0]).backward()
    # a ring of two sends the tensor once; the loss adds two small all-reduces
    return calls(ledger.entries), sum(entry.nbytes for entry in ledger.entries)


if check.ready(*PARTS):
    stage = max(run_ranks(two_stages, 2, torch.randn(B, T, D), Block(D, 4, 0.0)))
    counted, inside = run_ranks(cut_inside, 2)[0]
    print(f"a step of the cut model: {dict(counted)}; the loss makes two of them")
    score("bytes per rank, cut inside / between layers", times_as_many, 4 * L + 2, inside / stage)
    assert counted == {"all_reduce": 4 * L + 4} and round(inside / stage) == 4 * L + 2

# %% [markdown]
# So each block costs four all-reduces. The embedding and the head add one each, and the loss adds two small
# ones. A block has to wait for each of its four, because the next layer needs the sum. (Megatron-LM hides
# those of backward behind the computation of the weights' gradients.)
#
# ### A calculator
#
# Do so many messages matter? That depends on how long they take *compared with the matrix products* between
# them. A block has 12 D² weights, and forward and backward take 6 operations per weight and token, of which a
# rank does 1/N. To these come four all-reduces, whose time you can predict since lesson 04.

# %% show="true"
from manyhands.tensor.cost import Link, between_nodes, messages_s, products_s

# %% [markdown]
# Without the latencies, both times are proportional to the number of tokens, which therefore cancels. With b
# bytes per number, F operations/s and W bytes/s, the ratio is
#
# $$\frac{\text{messages}}{\text{products}} = \frac{(N - 1)\, b\, F}{9\, D\, W}$$
#
# Twice the width halves this ratio, and twice the ranks more than double it, because the products of a rank
# shrink and its messages do not. Faster processors on the same network make it worse.
#
# **What is W?** The figure uses the data sheet of the H100 and its node, as lesson 00 quotes it: 989
# TFLOP/s for 16-bit numbers, 450 GB/s over NVLink inside the node, and for each GPU a network card with 50
# GB/s over InfiniBand to other nodes. How much of the network a group gets depends on where its ranks are.
# NCCL builds several rings through a group, and each ring leaves a node by another card, so a group with k
# GPUs in each node has the bandwidth of k cards. Sixteen ranks that fill two nodes have 8 · 50 = 400 GB/s,
# nearly as much as inside a node, while eight ranks in eight different nodes have 50 GB/s. `between_nodes`
# computes such a link. The latencies, 3.4 and 9.6 microseconds, are those that NCCL assumed, in the version
# cited below, when it chose between ring and tree. Real products and real links both stay below their data
# sheets, so the ratio is a first estimate.
#
# **Above the line at 1 a GPU spends more time on messages than on products.** Which widths cross the line in
# each of the three cases?

# %% tags=["nbval-check-output"]
from manyhands.tensor.cost import narrowest

H100 = 989e12  # FLOP/s, 16 bits, dense
NVLINK = Link("NVLink inside a node", bytes_per_s=450e9, latency_s=3.4e-6)
CARD = Link("InfiniBand", bytes_per_s=50e9, latency_s=9.6e-6)
WHOLE_NODES, ONE_IN_EACH = between_nodes(NVLINK, CARD, 8), between_nodes(NVLINK, CARD, 1)
figures.show(
    tensor_figures.messages_against_products(
        {NVLINK: (2, 4, 8), WHOLE_NODES: (16, 32, 64), ONE_IN_EACH: (2, 4, 8)}, H100
    ),
    "Message time over product time rises with the ranks; wider models lie lower, one card far higher.",
)


def ratio(width, num_ranks, link):
    """Messages over products of a block, for 8,192 tokens."""
    return messages_s(width, 8192, num_ranks, link) / products_s(width, 8192, num_ranks, H100)


for link, num_ranks in ((NVLINK, 2), (NVLINK, 8), (WHOLE_NODES, 16), (ONE_IN_EACH, 8)):
    least = narrowest(8192, num_ranks, H100, link)
    print(
        f"{num_ranks} ranks, {link.name}: messages are the shorter part from width {least:,.0f} on;"
    )
    share = ratio(16384, num_ranks, link)
    print(f"   at width 16,384 (Llama 3 405B) they take {share:.0%} of the products' time")

# %% [markdown]
# Inside a node eight GPUs can share a block from a width of about 4,000 on, that of models with 7 billion
# parameters. Two whole nodes need about 9,600, mostly because sixteen ranks leave each rank half of the products:
# their network is hardly slower than NVLink. Eight GPUs in eight different nodes would need about 31,000, nearly
# twice the width of Llama 3 405B. That is why the ranks of a tensor group are consecutive.
#
# (A ratio above 1 does not mean that one GPU would be faster. At a ratio of 1.9 eight ranks are still 8 / 2.9 =
# 2.8 times as fast as one. But they spend more than half of their time on messages, and other techniques may use
# the same GPUs better.)
#
# **Has anybody measured it?** The Ultra-Scale Playbook (2025) trained a model of 3 billion parameters with 8
# tensor ranks, in one node, and with 16, in two. The second node cost 43 % of the tokens per second and GPU. What
# does the calculator say? A rank's time for its share is proportional to 1 + ratio, and so the throughput of a
# GPU to 1 / (1 + ratio).

# %% tags=["nbval-check-output"]
for link in (WHOLE_NODES, ONE_IN_EACH):
    losses = [1 - (1 + ratio(w, 8, NVLINK)) / (1 + ratio(w, 16, link)) for w in (3072, 4096)]
    words = " to ".join(f"{loss:.0%}" for loss in sorted(losses))
    print(f"16 ranks instead of 8, {link.name}: throughput of a GPU falls by {words}")
    # the published 43 %: products below their data sheet make the loss a little smaller
    assert (0.43 < min(losses) < max(losses) < 0.6) is (link is WHOLE_NODES)

# %% [markdown]
# With the cards of both nodes the calculator comes near to the measurement (for widths of 3,072 and 4,096,
# as models of 3 to 7 billion parameters have them). It predicts somewhat more than was lost. One likely
# reason is that real products stay further below their data sheet than it assumes: at 60 % of the 989
# TFLOP/s it predicts 41 % to 47 %. With one GPU in each of sixteen nodes the loss would have been about 90
# %.
#
# So the cut does not stop working at the border of a node, but it becomes expensive there, compared with what
# else the GPUs could do: between the same two nodes a pipeline lost about 14 % in the Playbook.
#
# ### Is tensor parallelism still used?
#
# Some slides say no, and cite Llama 3. Is that true? The paper's own table (Grattafiori et al. 2024, table 4)
# says into how many parts each kind of parallelism cuts the training; "context" cuts long sequences by their
# positions:
#
# | GPUs | tensor | context | pipeline | data | TFLOP/s per GPU |
# |---|---|---|---|---|---|
# | 8,192 | 8 | 1 | 16 | 64 | 430 |
# | 16,384 | 8 | 1 | 16 | 128 | 400 |
# | 16,384 | 8 | 16 | 16 | 8 | 380 |
#
# Every row has tensor parallelism over the 8 GPUs of one node, where messages take about a fifth of the products'
# time by the calculator.
# Pipelines run from node to node, and data parallelism uses many copies of the whole. Lesson 14 combines
# them.
#
# ## 8. All techniques side by side (optional)
#
# You have now built four ways to train on several processors. How do they compare on one model, with one
# global batch? The next cell trains the same small Transformer on two ranks in each way, with your
# `TensorParallel` among them. Before you run it, predict: which way sends the fewest bytes? Which keeps the
# fewest activations on a rank, and which the least optimizer state? In the table, "sent" is the least that a
# ring has to send, and "by gloo" is what gloo sends, which makes a reduce-scatter out of an all-reduce. (The
# row "tensor + sequence" is the course's own version of section 11.)

# %%
if check.ready(*PARTS):
    chosen = {name: way for name, way in registry.WAYS.items() if name != "fully_shard"}
    yours = {"tensor": partial(tensor_parallel, parts=Parts(TensorParallel=TensorParallel))}
    found = run_ranks(measure.compare, 2, Setting(), ways=chosen | yours, steps=3, timeout_s=120)[0]
    print(compare_figures.table(found))
    figures.show(compare_figures.draw(found), compare_figures.in_words(found))
    of_way = {name: way for name, way in found["ways"].items() if name != "one process"}
    sent = {name: sum(way["sent"].values()) for name, way in of_way.items()}
    kept = {name: way["parts"]["activations"] for name, way in of_way.items()}
    states = {name: way["parts"]["optimizer"] for name, way in of_way.items()}
    print(f"fewest bytes sent: {min(sent, key=sent.get)}, most: {max(sent, key=sent.get)}")
    print(f"fewest activations: {min(kept, key=kept.get)}, most: {max(kept, key=kept.get)}")
    halved = [name for name in states if states[name] < 0.6 * states["DDP"]]
    print(f"about half of DDP's optimizer state, or less: {', '.join(halved)}")
    assert sent["tensor"] > sent["DDP"] > sent["pipeline (1F1B)"]
    assert kept["tensor"] > kept["DDP"] > kept["pipeline (1F1B)"]

# %% [markdown]
# No way wins everywhere. On two ranks DDP sends each gradient once, however large the batch is, but keeps
# weights, gradients and optimizer state whole on every rank. ZeRO shards the optimizer state first and the
# weights last, and sharded weights have to be gathered for forward and for backward. The pipeline sends
# least, but has a bubble. Tensor parallelism halves weights, gradients and optimizer state without
# gathering any of them, but every rank works on *all* samples: the activations between the cut layers are
# whole on both ranks (section 11 cuts them), and the bytes sent grow with the tokens of a step. The times
# are those of two cores and a small model; on GPUs the same comparison is a job, `sbatch
# sbatch/compare.sbatch`.
#
# ## 9. Run it as a job
#
# The job trains with your `TensorParallel`, which calls your other functions, because they are saved in the
# same file. Here two ranks hold one model. In the report, the layers' messages count as forward and backward:
# "communication" begins only after a rank's last gradient. On GPUs, `--dtype bfloat16` multiplies in 16 bits.

# %%
if check.ready(*PARTS):
    check.keep()
    flags = "--steps 20 --layers 2 --block 32 --valid-tokens 8192"
    watch.run("../sbatch/tensor.sbatch", "--impl", "mine", *flags.split())

# %% [markdown]
# This is the end of the core. The recap, at the end of the notebook, has questions about it.
#
# ## 10. Which data? (optional)
#
# The ranks that hold one model together must see the **same batch**, because each computes a part of the
# answer for it. With more ranks there are several copies of the model, the replicas, and each *replica* gets
# its own share of the data, not each rank. The job does so, for example, when `--tensor 2` cuts each replica
# over two of four ranks.
#
# Compute which share a rank gets. With k ranks per model, ranks 0 ... k - 1 hold the first one, the next k
# ranks the second, and so on.

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
    generator = torch.Generator().manual_seed(dist.get_rank())
    return texts[torch.randperm(len(texts), generator=generator)]


if check.ready(*PARTS, "13.11"):
    same, other = (run_ranks(train_with, 2, data)[0] for data in (one_batch_for_all, other_batches))
    print(f"loss after training: {same:.3f} with the same batch, {other:.3f} with other batches")
    print(f"other batches cost {other / same:.1f} times the loss, and nothing raised an error")
    assert other > 1.3 * same

# %% [markdown]
# With different batches the embedding mixes the sequences: each rank adds the rows of its own tokens for its
# own batch, so a position gets the tokens of both batches, of one, or of none. The loss mixes the targets in
# the same way. So the model trains partly on nonsense, and on this easy text it ends with a clearly higher
# loss.
#
# ## 11. Sequence parallelism (optional)
#
# Between the cut layers are norms, dropouts and additions. All ranks apply them to all positions, so the same
# work is done N times, and the tensors that backward needs are kept N times. Can these layers be cut, too? An
# all-reduce is a reduce-scatter and an all-gather (lesson 04), so separate the two:
#
# - Out of the cut layers goes a **reduce-scatter**: each rank gets the sum, but only for its own T/N
#   positions.
# - Norm, dropout and addition work on these positions.
# - Into the next cut layers goes an **all-gather** of the positions.
#
# A ring sends as many bytes as before, while the memory kept between the layers falls to 1/N. (gloo, the
# backend of this notebook, makes a reduce-scatter out of a whole all-reduce, so here 1.5 times as many bytes
# are sent. With NCCL, on GPUs, the number of bytes stays the same.)
#
# These two are mirror images as well: the backward of an all-gather is a reduce-scatter, and vice versa. The
# collectives of lesson 10 work on the *first* dimension, but positions are the second. `gather_positions`,
# which is given, shows how to deal with that. `all_gather(whole, part, group)` only starts the transfer,
# hence the `.wait()`; `reduce_scatter(part, whole, group)` returns when it is done.

# %% show="true"
from manyhands.tensor.sequence import gather_positions

# %% [markdown]
# Write `sum_positions`, at the end of the cell, first, and then both classes.

# %% exercise="sum_positions GatherSequence.forward GatherSequence.backward ScatterSequence.forward ScatterSequence.backward" todo="13.7" minutes=15 difficulty=2 points=3
from manyhands.tensor.sequence import GatherSequence, ScatterSequence, sum_positions

# %% check="13.7" tags=["nbval-check-output"]
check.GatherSequence(GatherSequence, ScatterSequence)

# %% [markdown]
# There is a consequence for the norms, whose weights every rank has whole. In sections 1 to 9 each rank saw
# all positions, so all got the same gradient. Now each rank sees only its own positions and gets only a
# *part* of the gradient, so `sum_gradients` has to add up these parts after backward.

# %% exercise="sum_gradients" todo="13.8" minutes=10 difficulty=1 points=1
from manyhands.tensor.sequence import sum_gradients

# %% check="13.8" tags=["nbval-check-output"]
check.sum_gradients(sum_gradients)

# %% [markdown]
# ### Dropout: the same on all ranks, or different?
#
# Dropout draws random numbers. Where every rank has a *copy* of x, all ranks must drop the same elements, or
# the copies are no longer equal. Where each rank has a *part* of x, each must draw its own numbers, or the
# same pattern would repeat in all parts. So a rank needs two streams of random numbers: a common one, and one
# of its own. Below, two ranks draw from both: compare their masks.

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


if check.ready("13.9"):
    masks = run_ranks(draw, 2)
    for rank, (common, mine) in enumerate(masks):
        print(f"rank {rank}: common {common}, its own {mine}")
    assert masks[0][0] == masks[1][0] and masks[0][1] != masks[1][1]

# %% [markdown]
# The common masks are equal, and the ranks' own masks differ.
#
# ### The whole model once more
#
# `TensorSequenceParallel` is your `TensorParallel` with other ways in and out of the cut layers. Two things
# are different inside. `self.tokens(inputs)` returns this rank's positions only, because its `leave` is a
# reduce-scatter, so you need the same part of the position embeddings. And dropout now works on a part of x,
# so everything up to the last block draws from `self.random`.

# %% exercise="TensorSequenceParallel.through_blocks" todo="13.14" minutes=10 difficulty=2 points=2
from manyhands.tensor.sequence import TensorSequenceParallel

# %% check="13.14" tags=["nbval-check-output"]
check.TensorSequenceParallel(TensorSequenceParallel)

# %%
SEQUENCE = ("13.7", "13.8", "13.9", "13.14")
if check.ready(*PARTS, *SEQUENCE):
    for num_ranks in (2, 4):
        compare_training(num_ranks, TensorSequenceParallel, (0.0,))

# %% [markdown]
# Again it is the training of one process. (With dropout the numbers would differ: the ranks drop other
# elements than one process would, though on average the same share of them.)
#
# ### What it saves
#
# The next cell measures what a rank holds between forward and backward, near the peak of the activations:
# first on one rank, then on two and four ranks, without and with sequence parallelism. Watch the activations.


# %%
def held_mb(kind):
    model = make_model() if kind is None else kind(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for _ in range(2):
        with Live(parts_of(model, optimizer)) as live:
            loss = model(*batches(1)[0])
            held = live.now()  # between forward and backward
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        del loss
    named = {name: held[name] for name in ("weights", "optimizer")} | {"activations": held["other"]}
    return {name: nbytes / 1e6 for name, nbytes in named.items()}


if check.ready(*PARTS, *SEQUENCE):
    kinds = {"1 rank": (1, None), "2 ranks": (2, TensorParallel)}
    kinds |= {"2 ranks,\nsequence": (2, TensorSequenceParallel), "4 ranks": (4, TensorParallel)}
    kinds |= {"4 ranks,\nsequence": (4, TensorSequenceParallel)}
    bars = [(name, run_ranks(held_mb, n, kind)[0]) for name, (n, kind) in kinds.items()]
    figure, ax = figures.new_figure(7, 3.6)
    figures.stacked_bars(ax, bars, "MB per rank after forward")
    alt = "Bars: weights and optimizer shrink with ranks, activations most with both."
    figures.show(figure, alt)
    kept = []
    for name, parts in bars[1:]:
        shares = {part: parts[part] / bars[0][1][part] for part in parts}
        in_words = ", ".join(f"{part} {share:.2f}" for part, share in shares.items())
        print(f"{name.replace(chr(10), ' '):17} of one rank's: {in_words}")
        kept.append(shares["activations"])
    assert kept[1] < kept[0] and 0.25 < kept[3] < kept[2] < 0.5

# %% [markdown]
# Weights and optimizer state shrink to almost 1/N, because only norms and positions stay whole on all ranks.
# The activations inside the cut layers shrink as well, and sequence parallelism also cuts those between the
# layers. But even then the gathered inputs stay whole: each layer cut by columns keeps its whole input for
# the gradient of its weights. That is why on four ranks the activations shrink to less than half, but not to
# a quarter. (Megatron-LM keeps only a rank's own positions there, and gathers again in backward.)
#
# A question before you go on:
#
# <details><summary>On 4 ranks with sequence parallelism the loss is right, but after some steps the norms' weights differ between the ranks. What was forgotten?</summary>
#
# With sequence parallelism each rank's norms see only its own positions, so their gradients have to be added
# up after each backward.
#
# </details>
#
# ## 12. Count the messages, and time them (optional)
#
# How many collectives are in one forward and backward of a model with L blocks? You counted the all-reduces
# of f and g for L = 3 in section 7. The loss adds two: one for the largest scores, and one for both sums
# together. Now write the count for any L, also for sequence parallelism. What becomes of each of these
# messages there?

# %% exercise="calls_per_step" todo="13.12" minutes=10 difficulty=2 points=1
from manyhands.tensor.model import calls_per_step

# %% check="13.12" tags=["nbval-check-output"]
check.calls_per_step(calls_per_step)


# %%
def ledger_of(kind):
    model = kind(make_model())
    inputs, targets = batches(1)[0]
    with Ledger() as ledger:
        model(inputs, targets).backward()
        model.finish_gradients()
    return calls(ledger.entries), sum(entry.nbytes for entry in ledger.entries)


if check.ready(*PARTS, *SEQUENCE, "13.12"):
    counts = []
    for kind in (TensorParallel, TensorSequenceParallel):
        counted, nbytes = run_ranks(ledger_of, 2, kind)[0]
        expected = calls_per_step(L, kind is TensorSequenceParallel)
        assert all(counted[name] == n for name, n in expected.items()), f"not {dict(counted)}"
        print(f"{kind.__name__}: {dict(counted)}")
        print(f"  {nbytes:,} bytes; 2 (2L + 1) activations are {2 * (2 * L + 1) * 4 * B * T * D:,}")
        counts.append(nbytes)
    assert 1.9 < counts[1] / counts[0] < 2.1

# %% [markdown]
# The ledger counts the whole tensor once per call. For each of these bytes a ring all-reduce sends twice as
# much as an all-gather or a reduce-scatter (lesson 04). So the doubled number with sequence parallelism means
# the same traffic, except that gloo makes a reduce-scatter from a whole all-reduce, so that here it is 1.5
# times as much.
#
# ### And on this machine?
#
# The ranks of this notebook are CPU cores with gloo between them, neither H100 nor NVLink, but the rule is
# the same: wide blocks should gain from two ranks and narrow ones lose. The next cell times forward and
# backward of one block, on one rank and on two ranks in turn. The vertical bars hold the middle half of the
# rounds: where one crosses the line at 1, this machine is too noisy to decide.

# %%
if check.ready("13.1", "13.3", "13.4"):
    widths, gains = (64, 256, 1024), []
    for width in widths:
        times = slowest_rank(run_ranks(bench.time_cut, 2, cut_block, width, 7))
        gains.append([whole / cut for whole, cut in zip(*times, strict=True)])
        print(
            f"width {width:4}: two ranks are {statistics.median(gains[-1]):.2f} times as fast as one"
        )
    alt = "Two ranks' speed over one's, by width: it rises with the width."
    figures.show(tensor_figures.speed_up(widths, gains, 2), alt)
    assert statistics.median(gains[-1]) > statistics.median(gains[0])

# %% [markdown]
# A narrow block has little to compute between two messages, so the latency of the messages decides. In a wide
# block the products decide, and two ranks come closer to their limit, twice the speed of one rank.
#
# ## 13. PyTorch's own: a plan (optional)
#
# In PyTorch you write down how each module is cut, and **DTensor** does the rest. A DTensor (distributed
# tensor) looks like the whole tensor, while each rank holds its part. `ColwiseParallel` and `RowwiseParallel`
# are the layers that you wrote. These classes are called styles. Each has a layout for its input and one for
# its output, set by `input_layouts=` and `output_layouts=`: `Replicate()` means whole on all ranks,
# `Shard(1)` means cut by positions, and `Shard(-1)` means cut by the last dimension. By default
# `ColwiseParallel` takes a whole input and returns `Shard(-1)`, and `RowwiseParallel` does the opposite.
#
# Write the plan, a dictionary from names such as `"blocks.0.mlp.up"` to styles. The activation between the
# layers is `Replicate()` without sequence parallelism and `Shard(1)` with it. (Section 11 explains what that
# is for, but the plan does not need your functions from there.) The modules get these styles:
#
# - `tokens` is `RowwiseParallel` with a whole input. For an embedding this means rows of tokens.
# - `head` is `ColwiseParallel`. Its input is the activation between the layers. Its output stays cut by the
#   vocabulary, `Shard(-1)`, and stays a DTensor (`use_local_output=False`), so that `loss_parallel` can do
#   what your `vocab_cross_entropy` does.
# - Each block needs `attention.qkv`, `attention.out`, `mlp.up` and `mlp.down`.
# - With sequence parallelism all norms get `SequenceParallel()`. The activation also has to be cut by
#   positions once, at the beginning. The style for this belongs to the module `dropout`:
#   `PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))`.

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


if check.ready("13.13"):
    for sequence in (False, True):
        off, counted, kind = run_ranks(train_torch, 2, sequence)[0]
        print(f"{kind}s, sequence={sequence}: losses off by {off:.1e}; in 10 steps {counted}")
        assert off < 1e-5 and (sequence or counted == {"all_reduce": 10 * (4 * L + 2)})

# %% [markdown]
# The losses agree up to rounding, and without sequence parallelism the ledger shows the large messages that
# you counted, 14 per step. It does not see the messages that DTensor sends inside an operation: three small
# ones of `loss_parallel`, and with sequence parallelism the sums of the norms' gradients, during the
# optimizer's step. With sequence parallelism this plan also all-reduces the whole embedding and cuts it
# afterwards, so one all-reduce per step replaces a reduce-scatter.
#
# For each operation DTensor also has to look up, on the host, which messages it needs. That takes about the
# same time for every width, so it matters least for wide layers. On a GPU, where Python runs ahead of the
# device, it may not show at all.

# %% [markdown]
# ## Recap
#
# You can now
#
# - cut a layer by columns or by rows, and say which messages forward and backward need,
# - cut attention by heads and the vocabulary by tokens, and compute the loss without gathering the scores,
# - train a model that no rank holds whole, equal to one process,
# - set the time of a block's messages against that of its products, and say where the cut pays.
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
# <details><summary>A node has 8 GPUs with fast links. A model needs 16 GPUs to fit. Should tensor parallelism span all 16?</summary>
#
# Better to use it over the 8 GPUs of a node, with two pipeline stages on two nodes. Tensor parallelism sends
# four activations per block and waits for each, while a pipeline sends only two per cut.
#
# </details>
#
# <details><summary>From lessons 09 and 10: on two ranks ZeRO-3 and tensor parallelism both leave each rank half of the weights. You double the sequences of a step. Which of the two sends more bytes than before? Predict, then run section 8 again with <code>ways.Setting(batch=32)</code>.</summary>
#
# Tensor parallelism: it sends activations, which double with the tokens. ZeRO-3 gathers weights and reduces
# gradients, and neither depends on the batch. So ZeRO-3 suits many tokens per rank, and tensor parallelism
# suits few.
#
# </details>

# %%
check.summary()

# %% [markdown]
# **Sources.** f, g, heads and vocabulary: Megatron-LM, Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053.
# Sequence parallelism: Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198. Llama 3: Grattafiori et al.
# 2024, https://arxiv.org/abs/2407.21783. DTensor:
# https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html. Speed across nodes: The Ultra-Scale
# Playbook, 2025, https://huggingface.co/spaces/nanotron/ultrascale-playbook. H100: NVIDIA, data sheets of
# H100 and DGX H100. Latencies of a ring (`hwLat`, NVLink and network, "Simple"): NCCL,
# https://github.com/NVIDIA/nccl/blob/01afd20a77b5804e0ecf1042509dd9d20ebf9e93/src/graph/tuning.cc.
