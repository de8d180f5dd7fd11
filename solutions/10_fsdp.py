# ---
# manyhands: {title: FSDP, goal: "Cut optimizer state, gradients and weights into shards by hand, equal to one process, and use fully_shard knowing each of its messages", job: {flags: "--steps 100 --layers 2 --block 32", loss: [1.53, 1.77]}}
# ---

# %% [markdown]
# # 10 Sharded data parallelism
#
# In data parallelism every rank holds the same things: the whole model, its gradients and the optimizer's
# state. Lesson 09 counted them: 16 bytes per parameter with Adam in float32, on every rank. With n ranks
# there are n copies, and all but one of them are redundant.
#
# Can training do without them? It can, if each number is kept on one rank only. This is **ZeRO**, the "zero
# redundancy optimizer". You build its three stages: stage 1 shards the optimizer state, stage 2 also the
# gradients, stage 3 also the weights. In stage 3 a layer's weights are put together on every rank just before
# the layer computes, and dropped right after it.
#
# ![A step with a root and two units on one rank: in forward each unit is gathered while the one before it computes, and freed after it has computed; in backward unit 2 and then unit 1 are gathered again, compute, are freed, and are reduced; the root stays whole until the end](figures/fsdp_unit.svg)
#
# PyTorch calls stage 3 **FSDP**, fully sharded data parallelism, and its function for this stage is
# `fully_shard`. You will use it, too, and in an optional section you predict its messages.
#
# The picture shows a step of FSDP on one rank. A **unit** is a part of the model whose weights are gathered
# and freed together, usually one block. The **root** is the unit of all that is in no block: the embeddings,
# the last norm and the head. When is a unit's memory taken, and when is it given back?
#
# Sections marked optional can wait: no section outside them needs what you write there.

# %%
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_map

from manyhands.checks import fsdp as check, score
from manyhands.collectives.trees import Group, device_of
from manyhands.data_parallel import replicas
from manyhands.data_parallel.replicas import broadcast_state, pack, sum_type
from manyhands.fsdp import bench, figures as pictures
from manyhands.fsdp.flat import make_flats
from manyhands.fsdp.fully_shard import full_state
from manyhands.fsdp.guard import guard
from manyhands.fsdp.meta import Draw
from manyhands.fsdp.model import ShardedModel, tensors_in
from manyhands.fsdp.shards import mark_shard
from manyhands.instruments import figures, timing
from manyhands.instruments.ledger import Ledger, calls
from manyhands.instruments.live import Live, parts_of
from manyhands.jobs import watch as jobs
from manyhands.models.transformer import Transformer, num_parameters
from manyhands.ranks import lab
from manyhands.ranks.failures import RankFailed
from manyhands.ranks.lab import run_ranks

lab.warm_up()
print(
    f"torch {torch.__version__}, {os.cpu_count()} cores; the ranks of this notebook use CPU + gloo"
)

# %% [markdown]
# ## 1. A vector and its shards
#
# How can parameters of all sizes be divided evenly? Lay them one behind the other in one vector, append zeros
# until its length is a multiple of the number of ranks, and divide that. Rank r owns part r, its **shard**.
#
# Two collectives of lesson 04 lead from shards to the whole vector and back:
#
# - **all-gather**: from every rank's shard to the whole, on all ranks. It is used for weights.
# - **reduce-scatter**: from every rank's whole to their sum, one shard on each rank. It is used for
#   gradients.
#
# PyTorch renamed both functions in version 2.13, so the next cell puts each of them under one name.

# %% show="true"
from manyhands.fsdp.flat import all_gather, reduce_scatter

# %% [markdown]
# The model computes with parameters of many shapes, but the collectives want one vector. `Views` makes the
# parameters **views** of the vector: the model computes with them as before, and when the vector changes, the
# model has new weights without any copying back. `gather` fills the vector from all ranks' shards.

# %% show="true"
from manyhands.fsdp.flat import Views

# %% [markdown]
# You write two methods of `Flat`, with `pack` from lesson 05, which copies tensors into one vector:
#
# - `__init__` builds the padded vector `whole`, shows it to the parameters, and makes `shard` from this
#   rank's part.
# - `reduce` turns the gradients into `shard.grad`, their mean over the ranks.
#
# `self.replicas` is usually `None`. If it is a group of ranks, the reduced shard is averaged over this second
# group as well. Section 9 (optional) makes use of that.

# %% exercise="Flat.__init__ Flat.reduce" todo="10.1" minutes=25 difficulty=2 points=3
from manyhands.fsdp.flat import Flat

# %% check="10.1" tags=["nbval-check-output"]
check.Flat(Flat)


# %% [markdown]
# Here is a small `Flat` on three ranks. Its seven numbers are padded to nine, three numbers for
# each rank. Which rank owns the padding?


# %% tags=["nbval-check-output"]
def look_at_shards():
    layer = nn.Linear(3, 2, bias=False)
    layer.bias = nn.Parameter(torch.tensor([9.0]))
    with torch.no_grad():
        layer.weight.copy_(torch.arange(1.0, 7.0).view(2, 3))
    flat = Flat(layer.parameters())
    return flat.whole.tolist(), flat.shard.tolist()


if check.ready("10.1"):
    for rank, (whole, mine) in enumerate(run_ranks(look_at_shards, 3)):
        print(f"rank {rank}: whole {whole}, shard {mine}")

# %% [markdown]
# ### The training to compare with
#
# Whatever you build in this lesson has to train as one process does. So here is one process: ten steps of
# AdamW with the whole batch. Your ranks will each take a share of the same batches, and at the end every
# weight is compared with the same weight here.
#
# AdamW divides each gradient by its usual size, plus `eps`. So where a gradient is nearly 0, its last,
# rounded digits would decide the step, and they differ from processor to processor. A larger `eps` keeps this
# effect out of the comparison.

# %%
V, T, L, D, B = 50, 16, 3, 96, 8
ADAMW = partial(torch.optim.AdamW, lr=3e-4, eps=1e-6)


def batches(num=10):
    generator = torch.Generator().manual_seed(4)
    return torch.randint(V, (num, 2, B, T), generator=generator)


def make_model(seed=0):
    torch.manual_seed(seed)
    return Transformer(V, T, L)


def one_process():
    model = make_model()
    optimizer = ADAMW(model.parameters())
    for inputs, targets in batches():
        optimizer.zero_grad()
        model(inputs, targets).backward()
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


WEIGHTS = one_process()


# %% [markdown]
# ## 2. Stage 1: shard the optimizer state (optional)
#
# How much can be saved without touching forward and backward? In stage 1 every rank still has all weights,
# and backward gives it the gradients of its own samples, as in lesson 05. Then, in place of the all-reduce:
#
# 1. Reduce-scatter the gradients, so that each rank has the mean for its own shard.
# 2. Step the shard. The optimizer knows only the shard, so its state is 1/n as large.
# 3. All-gather the new weights.
#
# On a ring this sends no more bytes than before, because an all-reduce *is* a reduce-scatter and an
# all-gather (lesson 04). But in the simple version that you write, neither call overlaps with computation.
# Both can be hidden: Megatron-LM, for example, gathers the new weights layer by layer during the next
# forward.

# %% exercise="ShardedOptimizer.step" todo="10.2" minutes=10 difficulty=2 points=2
from manyhands.fsdp.zero import ShardedOptimizer

# %% check="10.2" tags=["nbval-check-output"]
check.ShardedOptimizer(ShardedOptimizer)

# %% [markdown]
# Is it the same training? Four ranks each take a quarter of the batch. Each block is a unit of its own, and
# what is in no block forms the root. The cell prints the largest difference between a weight here and the
# same weight of one process.


# %%
def units_of(model):
    """The parameters of the root unit, and then of each block."""
    in_blocks = set(model.blocks.parameters())
    root = [param for param in model.parameters() if param not in in_blocks]
    return [root, *(list(block.parameters()) for block in model.blocks)]


def train_in_stage(stage):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = make_model()
    flats = [Flat(unit) for unit in units_of(model)]
    optimizer = ShardedOptimizer(flats, ADAMW)
    if stage == 2:
        reduce_during_backward(flats)
    for inputs, targets in batches()[:, :, rank::world_size]:
        model(inputs, targets).backward()
        optimizer.step()
    pairs = ((param, WEIGHTS[name]) for name, param in model.named_parameters())
    return max((a - b).abs().max().item() for a, b in pairs)


# %%
if check.ready("10.1", "10.2"):
    off = max(run_ranks(train_in_stage, 4, 1))
    print(f"stage 1: the weights differ from one process by at most {off:.1e}")
    assert off < 1e-5

# %% [markdown]
# ## 3. Stage 2: shard the gradients (optional)
#
# Stage 1 collects a whole set of gradients, 4 bytes per parameter, only to reduce them to shards. But
# backward produces them layer by layer. So divide the model into several Flats, one for each block, and
# reduce each one as soon as its last gradient has arrived. Its whole gradients are then dropped while
# backward continues.
#
# The hook for this is the one of lesson 05: `param.register_post_accumulate_grad_hook(fn)` calls `fn(param)`
# when `param.grad` has just been written. It works only for parameters with `requires_grad`; a frozen Flat
# has no gradients to reduce.

# %% exercise="reduce_during_backward" todo="10.3" minutes=15 difficulty=2 points=2
from manyhands.fsdp.zero import reduce_during_backward

# %% check="10.3" tags=["nbval-check-output"]
check.reduce_during_backward(reduce_during_backward)

# %%
if check.ready("10.1", "10.2", "10.3"):
    off = max(run_ranks(train_in_stage, 4, 2))
    print(f"stage 2: the weights differ from one process by at most {off:.1e}")
    assert off < 1e-5

# %% [markdown]
# ## 4. Stage 3: shard the weights
#
# Stages 1 and 2 shard the optimizer's state and the gradients, while every rank holds the whole weights. How
# can the weights, too, exist only while they are used? `ShardedFlat` is a `Flat` whose shard has memory of
# its own, so that the memory of `whole` can be given back.
#
# Giving it back has a catch. In forward, autograd keeps the weights for backward. They are views of `whole`,
# so if you dropped `whole`, autograd's views would keep the memory alive, and nothing would be gained. The
# way out is to leave the tensors where they are and to take away the *memory behind them*:
# `tensor.untyped_storage().resize_(0)` gives it back, and `resize_(number of bytes)` allocates new memory,
# which all views then see. The old contents are lost, so the weights have to be gathered again before
# anything reads them.
#
# Write `start`, `wait` and `free`. `self.coming` is the work of a gather in flight, or `None`.

# %% exercise="ShardedFlat.start ShardedFlat.wait ShardedFlat.free" todo="10.4" minutes=15 difficulty=2 points=2
from manyhands.fsdp.flat import ShardedFlat

# %% check="10.4" tags=["nbval-check-output"]
check.ShardedFlat(ShardedFlat)


# %% [markdown]
# Follow one layer through a step on two ranks. When does `whole` take memory?


# %% tags=["nbval-check-output"]
def life_of_a_layer():
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False)
    flat = ShardedFlat(layer.parameters())
    told = []

    def tell(when):
        told.append((when, flat.whole.untyped_storage().nbytes(), flat.shard.nbytes))

    tell("at rest")
    flat.wait()
    tell("gathered")
    loss = layer(torch.ones(1, 64)).sum()
    flat.free()
    tell("after forward")
    flat.wait()
    loss.backward()
    flat.reduce()
    flat.free()
    tell("after backward")
    return told


if check.ready("10.1", "10.4"):
    for when, whole_bytes, shard_bytes in run_ranks(life_of_a_layer, 2)[0]:
        print(f"{when:15} whole {whole_bytes:6,} bytes, shard {shard_bytes:5,} bytes")

# %% [markdown]
# ### Around forward and backward
#
# Now let all of this happen automatically. PyTorch calls **hooks** around the forward of a module, when the
# gradient of its output is there, and when a parameter's gradient is there. `watch` puts such hooks on one
# unit. They call four methods, which you will write: before and after the unit's forward, before and after
# its backward.

# %% show="true"
from manyhands.fsdp.model import watch

# %% [markdown]
# The class `ShardedModel`, in `scripts/manyhands/fsdp/model.py`, makes the Flats of all units, calls `watch`
# for each, and takes care of three special cases: frozen parameters, units that run again in backward because
# of activation checkpointing (lesson 09), and a second loss whose own backward reaches only some parameters of
# a unit. Your `FSDP` is a `ShardedModel` with four methods, in which two rules matter:
#
# - **Prefetch.** While a unit computes, the next one should be on its way, which hides its gather behind the
#   computation. The next one is, in the order of forward, the unit after it during forward, and the unit
#   before it during backward. `start` begins a gather, and `wait` waits for it.
# - **The root stays.** The head, which is in the root, is used last in forward and first in backward, so the
#   root is not freed in between. Backward begins with the head, goes on with the last unit, and after unit 1
#   only the root's embedding is left, which was never freed. So unit 1 has nothing to start.
#
# Units are numbered in the order of forward, and the root is unit 0. `self.units[index]` is the list of a
# unit's Flats, usually only one, and `self.trainable[index]` holds those of them that get gradients. Before
# the root's forward free everything, because weights still gathered may date from before the last optimizer
# step.

# %% exercise="FSDP.before_forward FSDP.after_forward FSDP.before_backward FSDP.after_backward" todo="10.5" minutes=30 difficulty=3 points=4
from manyhands.fsdp.units import FSDP

# %% check="10.5" tags=["nbval-check-output"]
check.FSDP(FSDP)

# %% [markdown]
# The training loop is that of one process, and the shards are the only parameters that an optimizer sees.
# Between steps the model's own parameters have no memory behind them. Many operations of PyTorch would read them
# all the same, and the process would end with a segmentation fault, so `guard`, which you saw in `ShardedFlat`,
# turns such a read into an error, also where a gather is still on its way. `full_state` collects the weights
# from the shards, on rank 0.
#
# An optimizer sees vectors, and no longer sees which numbers form a matrix. So a rule that many training
# scripts use, weight decay for parameters with `p.dim() >= 2` only, would decay nothing here. With
# `FSDP(..., apart=lambda name, param: param.dim() >= 2)` matrices and vectors get shards of their own, and
# `model.shards_of(True)` lists those of the matrices.


# %%
def train_fsdp(wrap):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = make_model(seed=rank)  # rank 0's weights count
    model = wrap(model, list(model.blocks))
    optimizer = ADAMW(model.parameters())
    for inputs, targets in batches()[:, :, rank::world_size]:
        model(inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    pairs = [(full, WEIGHTS.get(name, full)) for name, full in full_state(model).items()]
    return max([0.0, *((a - b).abs().max().item() for a, b in pairs)])


# %%
if check.ready("10.1", "10.4", "10.5"):
    off = max(run_ranks(train_fsdp, 4, FSDP))
    print(f"FSDP: the weights differ from one process by at most {off:.1e}")
    assert off < 1e-5

# %% [markdown]
# ### Look: the memory of a step
#
# What does stage 3 gain? The cell plots the bytes of all tensors on rank 0 of four, after every operation of
# a step, once in plain data parallelism, where everything is whole, and once in stage 3. The batch is small,
# so that the weights stand out.


# %%
def history(is_sharded):
    model = Transformer(V, T, layers=3, heads=4, width=128)
    if is_sharded:
        model = FSDP(model, list(model.blocks))
    optimizer, tokens = ADAMW(model.parameters(), foreach=False), batches(1)[0, 0, :1]
    for step in range(2):
        with Live(parts_of(model, optimizer), keep=step == 1) as live:
            model(tokens, tokens).backward()
            if not is_sharded:
                replicas.average_gradients(model)
            optimizer.step()
            model.zero_grad()
    return live.history


# %%
if check.ready("10.1", "10.4", "10.5"):
    roles = {"weights": "weights", "optimizer": "optimizer", "gradients": "gradients"}
    roles |= {"other": "activations"}
    figure, axes = figures.new_figure(8, 3.4, cols=2)
    ends = []
    for ax, name in zip(axes, ("all whole", "stage 3"), strict=True):
        steps = run_ranks(history, 4, name == "stage 3")[0]
        areas = {role: [now[part] / 1e6 for now in steps] for part, role in roles.items()}
        figures.stack(ax, range(len(steps)), areas, f"operations, {name}", "MB on rank 0")
        least = min(sum(now.values()) for now in steps) / 1e6
        most = max(sum(now.values()) for now in steps) / 1e6
        print(f"{name}: between {least:.1f} and {most:.1f} MB on rank 0")
        ends.append((least, most))
    highest = max(ax.get_ylim()[1] for ax in axes)
    for ax in axes:
        ax.set_ylim(0, highest)
    figures.legend_below(figure, axes[0])
    figures.show(
        figure,
        "Memory over a step: all whole, level weights and growing gradients; in stage 3 a plateau.",
    )
    (whole_least, whole_most), (least, most) = ends
    assert least < 0.3 * whole_least and most < 0.6 * whole_most

# %% [markdown]
# On the left all weights and Adam's state are there all the time, and backward adds a whole set of
# gradients. In stage 3 only a quarter of the weights and of Adam's state is there all the time. While
# forward and backward run, a plateau lies on top of it: the root, the block that computes, and the block on
# its way. It is one block lower where none is on its way, and lowest at the turn, where the last block has
# been freed and is gathered again. In backward the gradients of one block at a time (and all the while
# those of the root) are whole; they are reduced, and a quarter of them remains on the rank. When the step
# ends, only shards are left. The spikes in backward are copies of gradients that are packed into a vector;
# `Live` counts such temporary values with the activations.

# %% [markdown]
# ## 5. What prefetch hides (optional)
#
# How much time does prefetch save? Two ranks of one machine cannot show it, because their messages use the
# same cores as their computation. So the next cell replaces both: four blocks that only wait, for 20 ms in
# forward and 40 ms in backward, and a simulated link that needs 15 ms for each block's gather and for each
# reduction. Your own class decides when each gather starts. It is compared with a version that waits for each
# unit and starts no other.
#
# Every block is gathered twice in a step, which makes eight gathers. How many of them will cost no time with
# prefetch?

# %%
hidden_gathers = None  # your number

# %% answer="true"
hidden_gathers = 6


# %%
class WithoutPrefetch(FSDP):
    def before_forward(self, index):
        if index == 0:
            for flat in chain(*self.units):
                flat.free()
        for flat in self.units[index]:
            flat.wait()

    def before_backward(self, index):
        for flat in self.units[index]:
            flat.wait()


# %%
if check.ready("10.1", "10.4", "10.5"):
    without, prefetched = run_ranks(bench.record_steps, 2, (WithoutPrefetch, FSDP))[0]
    saved_s = bench.length_s(without) - bench.length_s(prefetched)
    score("gathers that are hidden", hidden_gathers, 6, saved_s / bench.MESSAGE_S)
    assert [bench.num_overlapped(spans) for spans in (without, prefetched)] == [0, 6]
    gather_ms = 1e3 * bench.MESSAGE_S
    print(
        f"prefetch makes the step {1e3 * saved_s:.0f} ms shorter; a gather takes {gather_ms:.0f} ms"
    )
    steps = {"without prefetch": without, "with prefetch": prefetched}
    figures.show(
        pictures.steps_of_a_rank(steps),
        "Time lines of one rank: with prefetch most gathers lie under the computation.",
    )

# %% [markdown]
# A box carries the number of its block; the root is left out. (`measured` is the saved time divided by 15
# ms, and other work on the machine moves it.) With prefetch all gathers but two lie under the computation
# of another block. The first gather of forward has nothing to hide behind. Nor has the first one of
# backward, because block 4 was freed after its forward and is needed again at once. (The root of this model
# computes nothing. In a Transformer the root's head has its backward first, and the gather can hide behind
# that.) `fully_shard` lets you choose for each unit whether it is freed, so the last block can be kept.
#
# Two costs remain. A gather that takes longer than the computation beside it is hidden only in part. And the
# reductions are not hidden at all, because `reduce` waits in the middle of backward. With NCCL it would not
# be different. A GPU works through queues of operations, its **streams**, and a reduce-scatter that is called
# like this holds up the stream that computes. Besides, a group of ranks carries its messages one after the
# other, as the simulated link does: if the gather that was prefetched for the block before is still under way,
# the reduction has to wait for it as well. `fully_shard` reduces on a stream of its own, while backward goes on
# with the block before.

# %% [markdown]
# ## 6. Predict the messages (optional)
#
# How many collectives does a rank call in one forward and backward? Write it as a function of the number of
# blocks.
#
# `reshard` (PyTorch: `reshard_after_forward`) says whether a block is freed after its forward. If it is not,
# backward finds it whole and needs no second gather. `replicas` is for section 9: where several ranks hold
# the same shard, each unit's reduced gradients are all-reduced among them.

# %% exercise="calls_per_step" todo="10.6" minutes=10 difficulty=2 points=2
from manyhands.fsdp.fully_shard import calls_per_step

# %% check="10.6" tags=["nbval-check-output"]
check.calls_per_step(calls_per_step)

# %% [markdown]
# And how many bytes? In a ring each rank sends (n-1)/n of the whole vector for a gather, and as much for a
# reduce-scatter. How many times as many bytes as the all-reduce of lesson 05 does FSDP send in a step?

# %%
times_as_much = None  # your number

# %% answer="true"
times_as_much = 1.5


# %%
def ledger_of(wrap):
    model = make_model()
    model = wrap(model, list(model.blocks))
    (inputs, targets), *_ = batches(1)
    with Ledger() as ledger:
        model(inputs, targets).backward()
    return calls(ledger.entries), sum(entry.nbytes for entry in ledger.entries)


# %% tags=["nbval-check-output"]
if check.ready("10.1", "10.4", "10.5", "10.6"):
    nbytes, sent = 4 * num_parameters(V, T, L, D), {}
    for name, reshard in (("freed after forward", True), ("kept until backward", False)):
        counted, total = run_ranks(ledger_of, 4, partial(FSDP, reshard=reshard))[0]
        print(f"{name}: {dict(counted)}, {total / nbytes:.2f} x the weights")
        expected = calls_per_step(L, reshard)
        assert all(counted[name] == count for name, count in expected.items())
        sent[reshard] = total / nbytes
    root = (V * D + T * D + D) / num_parameters(V, T, L, D)
    score("times an all-reduce", times_as_much, (3 - root) / 2, sent[True] / 2)
    assert abs(sent[True] - (3 - root)) < 0.01 and abs(sent[False] - 2) < 0.01

# %% [markdown]
# The ledger counts the whole vector in each call; in a ring of four a rank sends three quarters of that. An
# all-reduce counts as two, a reduce-scatter and a gather. The ratio is slightly below 1.5 because the root is
# gathered only once. This is the price of stage 3. If blocks are kept until backward, FSDP sends only as much
# as an all-reduce, but when forward ends, all weights are whole at the same time.

# %% [markdown]
# ## 7. PyTorch's own: fully_shard
#
# `fully_shard(module)` makes one unit of all parameters below `module` that no earlier call has taken, so it
# is called for each block first and then for the root. It changes the module in place: its parameters become
# **DTensors**, tensors that know which part of which larger tensor they are. An optimizer made *afterwards*
# gets the shards.
#
# Your function first gives all ranks the same weights, with `broadcast_state(module)` from lesson 05. Then it
# applies `fully_shard` to the blocks and the root, and passes these options on:
#
# - `mesh`: the ranks to shard over, as a `DeviceMesh`, or `None` for all ranks.
# - `reshard`: becomes `reshard_after_forward` of the blocks, which says whether a block is freed after its
#   forward.
# - `dtype`: calls for a `MixedPrecisionPolicy` that has it as `param_dtype` and reduces gradients in float32.
# - `offload`: calls for a `CPUOffloadPolicy`, which keeps the shards in the CPU's memory. Pinned memory, from
#   which copies to a GPU are faster, is used only where there is a GPU.

# %% exercise="torch_fsdp" todo="10.7" minutes=15 difficulty=2 points=2
from manyhands.fsdp.fully_shard import torch_fsdp

# %% check="10.7" tags=["nbval-check-output"]
check.torch_fsdp(torch_fsdp)

# %%
if check.ready("10.7"):
    off = max(run_ranks(train_fsdp, 4, torch_fsdp))
    print(f"torch_fsdp: the weights differ from one process by at most {off:.1e}")
    assert off < 1e-5

# %% [markdown]
# ## 8. What fully_shard does not tell you (optional)
#
# Does `fully_shard` send the same messages as your FSDP?

# %% tags=["nbval-check-output"]
if check.ready("10.6", "10.7"):
    for reshard in (True, False):
        counted, _ = run_ranks(ledger_of, 4, partial(torch_fsdp, reshard=reshard))[0]
        print(f"reshard_after_forward={reshard}: {dict(counted)}")
        assert all(counted[name] == n for name, n in calls_per_step(L, reshard).items())

# %% [markdown]
# The calls are the same as those of your FSDP, whether blocks are freed or kept.
#
# ### Does a loop over layer classes find every block?
#
# Some examples choose the units by class: they call `fully_shard` for every `nn.TransformerEncoderLayer`. But
# this lesson's model has a layer class of its own. What happens? The cell prints the number of units, the
# calls of a step, and the peak memory.


# %%
def wrap_by_class(model, _):
    broadcast_state(model)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            fully_shard(module)
    return fully_shard(model)


def one_step(wrap):
    """The number of units, the calls of a step, and the most bytes."""
    model = make_model()
    model = wrap(model, list(model.blocks))
    num_units = sum(isinstance(module, FSDPModule) for module in model.modules())
    optimizer, (inputs, targets) = ADAMW(model.parameters()), batches(1)[0]
    for _ in range(2):
        with Ledger() as ledger, Live(parts_of(model, optimizer)) as live:
            model(inputs[:1], targets[:1]).backward()
            optimizer.step()
        optimizer.zero_grad()
    return num_units, calls(ledger.entries), live.total


# %%
if check.ready("10.7"):
    peaks = []
    for name, wrap in (("by class", wrap_by_class), ("every block", torch_fsdp)):
        num_units, counted, peak = run_ranks(one_step, 4, wrap)[0]
        print(f"{name:12} {num_units} unit(s), {dict(counted)}, at most {peak:,} bytes")
        peaks.append(peak)
    assert peaks[0] > peaks[1]

# %% [markdown]
# There is no error, and the training is right, but the model is one single unit: during a step all weights
# and all gradients are whole at the same time, and only the optimizer state stays sharded. So count your
# units.
#
# ### The order matters: first shard, then make the optimizer
#
# What if the optimizer is made first? Watch the loss over three steps.


# %%
def optimizer_first():
    model = make_model()
    optimizer = ADAMW(model.parameters())
    model = torch_fsdp(model, list(model.blocks))
    (inputs, targets), *_ = batches(1)
    losses = []
    for _ in range(3):
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(loss.item(), 2))
    return losses


# %% tags=["nbval-check-output"]
if check.ready("10.7"):
    losses = run_ranks(optimizer_first, 2)[0]
    print("losses:", losses)
    assert len(set(losses)) == 1

# %% [markdown]
# The loss does not move, because the optimizer holds the old parameters, which the model no longer has.
# Nothing warns you.
#
# ### What is the norm of a gradient that nobody holds?
#
# Training scripts clip: if the norm of all gradients exceeds a limit, they are all scaled down to it. But
# under FSDP a rank holds only its shard of the gradients. The next cell takes the norm in three ways on two
# ranks, and compares each with that of one process on the whole batch. Which ways do you trust? Recall what
# squares of norms do when a vector is cut: they add up.

# %% show="true"
from manyhands.fsdp.clip import clip_grad_norm, sum_of_squares


# %%
def norm_of_shards(wrap, clip):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = make_model()
    model = wrap(model, list(model.blocks))
    inputs, targets = batches(1)[0, :, rank::world_size]
    model(inputs, targets).backward()
    norm = clip(model.parameters(), max_norm=1.0)
    return norm.full_tensor().item() if hasattr(norm, "full_tensor") else norm.item()


# %%
if check.ready("10.1", "10.4", "10.5", "10.7"):
    model = make_model()
    model(*batches(1)[0]).backward()
    whole = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    print(f"one process                            {whole:.4f}")
    torch_clip = nn.utils.clip_grad_norm_
    for name, wrap, clip, is_right in (
        ("your FSDP, clip_grad_norm_", FSDP, torch_clip, False),
        ("your FSDP, all-reduce of the squares", FSDP, clip_grad_norm, True),
        ("fully_shard, clip_grad_norm_", torch_fsdp, torch_clip, True),
    ):
        norms = run_ranks(norm_of_shards, 2, wrap, clip)
        print(f"{name:38} {' and '.join(f'{norm:.4f}' for norm in norms)}")
        assert is_right == (max(abs(norm - whole) for norm in norms) < 1e-5)

# %% [markdown]
# PyTorch's function takes the plain shards for the whole gradient: each rank gets the norm of its own part,
# so the ranks scale their shards differently, without any warning. The right norm needs one all-reduce of a
# single number. DTensors know that they are parts, so for `fully_shard` PyTorch's function does an all-reduce
# itself, of one number per parameter tensor.

# %% [markdown]
# ## 9. Two dimensions: shards and replicas (optional)
#
# FSDP gathers every layer's weights, which is quick inside a node and slow between nodes. Can the gathers
# stay inside a node? They can, if the model is sharded over the GPUs of one node only and every node holds a
# **replica** of the whole model. This is called **hybrid** sharding, or HSDP. The ranks form a table, a
# **mesh**, in which a row is one replica and the ranks of a column hold the same shard.
#
# | | shard 0 | shard 1 |
# |---|---|---|
# | replica 0 | rank 0 | rank 1 |
# | replica 1 | rank 2 | rank 3 |
#
# Gathers and reduce-scatters run in the rows, and each unit's reduced gradients are then averaged down the
# columns.

# %% exercise="make_mesh" todo="10.8" minutes=5 difficulty=1 points=1
from manyhands.fsdp.fully_shard import make_mesh

# %% check="10.8" tags=["nbval-check-output"]
check.make_mesh(make_mesh)

# %% [markdown]
# ### Does every rank need the same seed?
#
# Some slides give every rank a different seed before the model is built. DDP hides that, because it copies
# rank 0's weights. `fully_shard` takes the weights that each rank has. Train three steps on a 2 x 2 mesh,
# from equal and from unequal seeds, with bare `fully_shard` and with your function. By how much will the two
# replicas differ?


# %%
def replicas_apart(how, same_seed):
    rank = dist.get_rank()
    mesh = make_mesh(2, 2)
    model = make_model(seed=0 if same_seed else rank)
    if how == "fully_shard":
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
    else:
        torch_fsdp(model, list(model.blocks), mesh=mesh)
    optimizer = ADAMW(model.parameters())
    for inputs, targets in batches(3)[:, :, rank::4]:
        model(inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    mine = torch.cat([param.to_local().flatten() for param in model.parameters()]).detach()
    others = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(others, mine, group=mesh.get_group("replicate"))
    return (others[0] - others[1]).abs().max().item()


def all_ways():
    ways = [(how, same) for how in ("fully_shard", "torch_fsdp") for same in (True, False)]
    return {way: replicas_apart(*way) for way in ways}


# %% tags=["nbval-check-output"]
if check.ready("10.7", "10.8"):
    for (how, same_seed), apart in run_ranks(all_ways, 4)[0].items():
        print(f"{how:11} {'equal' if same_seed else 'unequal'} seeds: {apart:.2f} apart")
        assert (apart > 0.01) == ((how, same_seed) == ("fully_shard", False))

# %% [markdown]
# With unequal seeds bare `fully_shard` trains a patchwork: every rank took its shard from a different model,
# and the replicas stay different although their gradients are averaged. So build all ranks' weights from one
# seed, or send rank 0's weights to all, as your function does.
#
# ### Four names
#
# The first FSDP of PyTorch had five sharding strategies. `NO_SHARD` was plain data parallelism; you meet the
# other four in older code:
#
# - `FULL_SHARD`: everything is sharded, and weights are freed after forward.
# - `SHARD_GRAD_OP`: gradients and optimizer state are kept in shards. Weights are whole from forward to
#   backward.
# - `HYBRID_SHARD`: `FULL_SHARD` inside each node, with a replica on every node.
# - `_HYBRID_SHARD_ZERO2`: `SHARD_GRAD_OP` inside each node, with a replica on every node.
#
# Express each of the four by the options of `fully_shard`.

# %% exercise="options_of" todo="10.9" minutes=5 difficulty=1 points=1
from manyhands.fsdp.fully_shard import options_of

# %% check="10.9" tags=["nbval-check-output"]
check.options_of(options_of)

# %% tags=["nbval-check-output"]
if check.ready("10.9"):
    for name in ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        print(f"{name:20} {options_of(name)}")

# %% [markdown]
# ## 10. All of it together (optional)
#
# Write a complete sharded training with PyTorch's parts: shard, make the optimizer, train, and collect the
# whole weights at the end. Keep this order, and give each rank its own share of each batch. `full_state`
# calls collectives, so every rank has to call it.

# %% exercise="train_sharded" todo="10.10" minutes=15 difficulty=2 points=2
from manyhands.fsdp.fully_shard import train_sharded

# %% check="10.10" tags=["nbval-check-output"]
check.train_sharded(train_sharded)

# %% [markdown]
# ## 11. What it costs and what it saves (optional)
#
# Which stage is worth its price? The cell measures, on four ranks, the peak memory of a step, the bytes that it
# sends, and its time, for plain data parallelism, stages 1 to 3, hybrid sharding, and PyTorch's version. The
# model has 0.8 million parameters.
#
# Memory and bytes are counted, so they are the same on every machine. The bytes are those of section 6: of a
# gather or a reduce-scatter among n ranks each rank sends (n-1)/n of the vector, and of an all-reduce twice
# that. The times are measured in turn, several steps of each way, because the four ranks share the cores of one
# machine with whatever else runs there. Two ways whose ranges overlap are a tie.


# %%
def build(how):
    """A model and its optimizer, and what has to be done after backward."""
    model = Transformer(V, T, layers=4, heads=4, width=128)
    blocks = list(model.blocks)
    if how == "DDP":
        model = replicas.BucketedDDP(model)
    elif how in ("ZeRO-1", "ZeRO-2"):
        flats = [Flat(unit) for unit in units_of(model)]
        if how == "ZeRO-2":
            reduce_during_backward(flats)
        return model, ShardedOptimizer(flats, ADAMW)
    elif how == "hybrid":
        mesh = make_mesh(2, 2)
        groups = {"replicas": mesh.get_group("replicate"), "group": mesh.get_group("shard")}
        model = FSDP(model, blocks, **groups)
    else:
        model = (FSDP if how == "FSDP" else torch_fsdp)(model, blocks)
    return model, ADAMW(model.parameters())


def sent(entries):
    """The bytes that this rank sends for these calls, if each of them runs on a ring."""
    shares = [(len(entry.ranks) - 1) / len(entry.ranks) * entry.nbytes for entry in entries]
    twice = [1 + (entry.op == "all_reduce") for entry in entries]
    return sum(share * times for share, times in zip(shares, twice, strict=True))


def costs_of(names, num_rounds=7):
    """For each way: peak bytes of this rank, bytes that it sends in a step, and seconds of steps."""
    steps, counts = [], []
    inputs, targets = batches(1)[0, :, :1]
    for how in names:
        model, optimizer = build(how)

        def step(model=model, optimizer=optimizer):
            model(inputs, targets).backward()
            optimizer.step()
            model.zero_grad()

        step()
        with Ledger() as ledger, Live(parts_of(model, optimizer)) as live:
            step()
        steps.append(step)
        counts.append((live.total, sent(ledger.entries)))
    return counts, timing.in_turn(steps, num_rounds)


# %%
HOW = ("DDP", "ZeRO-1", "ZeRO-2", "FSDP", "hybrid", "torch")
if check.ready("10.1", "10.2", "10.3", "10.4", "10.5", "10.7", "10.8"):
    results = run_ranks(costs_of, 4, HOW)
    peaks, traffic = (dict(zip(HOW, one, strict=True)) for one in zip(*results[0][0], strict=True))
    slowest_s = timing.slowest_rank([found for _, found in results])
    times_s = dict(zip(HOW, slowest_s, strict=True))
    for how in HOW:
        low, *_, high = ms = sorted(1e3 * time_s for time_s in times_s[how])
        print(
            f"{how:7} {peaks[how] / 1e6:4.1f} MB at most, sends {traffic[how] / 1e6:.1f} MB per step, "
            f"{ms[len(ms) // 2]:.0f} ms ({low:.0f} to {high:.0f})"
        )
    falling = [peaks[how] for how in ("FSDP", "ZeRO-2", "ZeRO-1", "DDP")]
    assert falling == sorted(falling) and peaks["FSDP"] < peaks["hybrid"]
    times_ddp = {how: nbytes / traffic["DDP"] for how, nbytes in traffic.items()}
    assert all(abs(times_ddp[how] - 1) < 0.01 for how in ("ZeRO-1", "ZeRO-2"))
    assert all(1.45 < times_ddp[how] < 1.51 for how in ("FSDP", "torch"))
    assert 1.3 < times_ddp["hybrid"] < 1.36
    copies = 4 * num_parameters(V, T, 4, 128)
    print(
        f"{copies / 1e6:.1f} MB of DDP's peak are buffers into which BucketedDDP copies its gradients"
    )
    fastest_s, slowest_s = min(times_s["DDP"]), max(times_s["DDP"])
    ties = [
        how for how in HOW[1:] if min(times_s[how]) <= slowest_s and fastest_s <= max(times_s[how])
    ]
    print(f"ways whose times overlap with DDP's, a tie: {', '.join(ties) or 'none'}")

# %%
if check.ready("10.1", "10.2", "10.3", "10.4", "10.5", "10.7", "10.8"):
    in_mb = [{how: nbytes / 1e6 for how, nbytes in one.items()} for one in (peaks, traffic)]
    in_ms = {how: [1e3 * time_s for time_s in found] for how, found in times_s.items()}
    figures.show(
        pictures.costs(*in_mb, in_ms),
        "Rows: memory falls from DDP to FSDP, bytes sent rise; the times of a step overlap or not.",
    )

# %% [markdown]
# Memory falls with every stage, and most of all from DDP to stage 1, which drops three quarters of Adam's
# state and DDP's copies. Hybrid holds shards of half the model in place of a quarter, so it needs more than
# FSDP.
#
# The price is traffic. Stages 1 and 2 send as many bytes as DDP, because an all-reduce is a reduce-scatter and a
# gather. FSDP, by hand or PyTorch's, sends half as much again, because it gathers the blocks twice. Hybrid sends
# a third more than DDP: its gathers and reduce-scatters run among two ranks, where a rank sends only one half of
# a vector in place of three quarters, and the all-reduce over the replicas carries only shards.
#
# The times say less. The last line names the ways that this run cannot tell from DDP, and where ranges overlap,
# another run may order them differently. Even a clear difference is one between ranks that share the cores of
# one machine, so it need not hold on GPUs: gloo makes a reduce-scatter out of a whole all-reduce, so here the
# sharded ways send more than the table says, and NCCL does not; the reductions by hand and the gather of new
# weights make your rank wait, whereas DDP's messages, and those of `fully_shard` on a GPU, travel during
# backward; and PyTorch's version shards every parameter by itself, which takes many small copies that are cheap
# on a GPU.
#
# So FSDP needs a fast network. Where the network is slow, as between nodes with plain Ethernet, a pipeline
# may be better (lesson 12).

# %% [markdown]
# ## 12. A model that one rank cannot hold
#
# So far every model was first built whole, on every rank, and then sharded. So a model larger than a rank's
# memory would fail before the first step. How can it be built in shards?
#
# First build it on PyTorch's **meta** device, where tensors have shapes and types but no memory. Then give
# memory to one unit at a time, draw its first weights, keep this rank's shard of them, and free the rest. The
# FSDP paper calls this deferred initialization. `materialise` does it for one unit, and `ShardedModel` calls
# it when it is given `draw`, a function that returns the first values of a parameter by its name.
#
# To get the weights that one process would draw, in whatever order the units come, a rank must be able to draw
# each parameter without those before it. That is why `draw_weight` makes a random generator of its own for
# each parameter, seeded by the parameter's name.

# %% show="true"
from manyhands.fsdp.meta import draw_weight, materialise

# %% [markdown]
# The cell builds a model of eight blocks on four ranks, once whole first and once deferred, and measures a
# rank's peak memory meanwhile. With deferred initialization this peak should be at most a quarter of the
# model and two copies of one unit: as it was drawn, and as the vector into which it is packed.


# %%
def build_sharded(is_deferred):
    """FSDP of eight blocks."""
    draw = partial(draw_weight, layers=8)
    if is_deferred:
        with torch.device("meta"):
            model = Transformer(V, 8, layers=8, heads=2, width=64)
        return FSDP(model, list(model.blocks), draw=draw)
    model = Transformer(V, 8, layers=8, heads=2, width=64)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(draw(name, param))
    return FSDP(model, list(model.blocks))


def peak_of_building():
    """For each way: the most bytes of this rank, and on rank 0 the whole weights."""
    found = []
    for is_deferred in (False, True):
        with Live(dict, device="cpu") as live:  # what is on the meta device takes no memory
            sharded = build_sharded(is_deferred)
        found.append((live.total, full_state(sharded)))
    return found


# %% tags=["nbval-check-output"]
if check.ready("10.1", "10.4", "10.5"):
    (whole_first, weights), (deferred, others) = run_ranks(peak_of_building, 4)[0]
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())
    in_bytes = 4 * num_parameters(V, 8, 8, 64)
    one_block = 4 * (12 * 64**2 + 2 * 64)
    print(f"the model: {in_bytes / 1e6:.2f} MB, a block: {one_block / 1e6:.2f} MB")
    print(f"built whole first: {whole_first / 1e6:.2f} MB at most")
    print(f"deferred:          {deferred / 1e6:.2f} MB at most, and the same weights")
    assert deferred <= in_bytes / 4 + 2 * one_block < in_bytes < whole_first

# %% [markdown]
# So no rank ever holds the whole model. `fully_shard` can do the same: after it has sharded a model on the
# meta device, `to_empty` gives memory to the shards only, and your code fills them. The job of section 13 builds
# its model in shards both ways (`record` and `fill` in `scripts/manyhands/fsdp/meta.py`).
#
# Now train it. `Live` can also enforce a limit, as a GPU does. With Adam a parameter takes 16 bytes; allow
# each rank only 8 bytes per parameter, from the first byte on. Can one rank train, and can four?


# %%
def train_within(limit):
    losses = []
    with Live(dict, limit=limit, device="cpu"):
        sharded = build_sharded(is_deferred=True)
        optimizer, tokens = ADAMW(sharded.parameters()), torch.arange(8)[None]
        for _ in range(3):
            loss = sharded(tokens, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(round(loss.item(), 2))
    return losses


# %% tags=["nbval-check-output"]
if check.ready("10.1", "10.4", "10.5"):
    limit = 8 * num_parameters(V, 8, 8, 64)
    for num_ranks in (1, 4):
        try:
            losses = run_ranks(train_within, num_ranks, limit)[0]
            print(f"{num_ranks} rank(s): losses {losses}")
            assert num_ranks == 4 and losses[-1] < losses[0]
        except RankFailed as failed:
            print(f"{num_ranks} rank(s): {failed.failure.message}")
            assert num_ranks == 1 and failed.failure.error == "OverLimit"

# %% [markdown]
# One rank fails, and four train. But part of the memory does not fall with the number of ranks: a rank must
# hold the root and two more units whole, the gradients of one unit, those of the root, and its own activations.
# The root's gradients are complete only when the embedding has its own at the end of backward, while the head's
# is there from the beginning. A head with V = 128,256 and D = 4096 has 0.5 billion numbers, so its whole gradient
# alone takes 2.1 GB in float32 during all of backward. Beyond that the layers themselves have to be split (lesson
# 13).

# %% [markdown]
# ## 13. Run it as a job
#
# The job trains with your own functions; with your `FSDP`, that is stage 3. Its model is built in shards,
# so no rank holds all of it while it is built; in a step the root and two units are whole, which are all there
# are with two blocks. At the end rank 0 collects the weights on its CPU. With `--limit-mb
# 8`, which the cell does not use, a rank would be stopped when its tensors take more than 8 MB, from the
# first weight on. The job's checkpoints hold a file for each rank, with that rank's shards. The report's
# row "tensors at their peak" counts as `Live` does, in the first two steps, which are slower for that
# reason. "Memory of each device" is the whole process, and most of that is PyTorch.

# %%
if check.ready("10.1", "10.4", "10.5"):
    check.keep()
    jobs.run("../sbatch/fsdp.sbatch", "--impl", "mine", *"--steps 40 --layers 2 --block 32".split())

# %%
check.summary()

# %% [markdown]
# ## Recap
#
# You can now
#
# - divide parameters into shards, and move between shards and whole,
# - build stage 3 of ZeRO by hand, equal to one process,
# - use `fully_shard` on blocks and root,
# - build a model in shards that no rank could hold whole,
# - and, from the optional sections, build stages 1 and 2, say which gathers prefetch hides and which
#   messages it cannot hide, predict the calls and bytes of a step, check what `fully_shard` made of your
#   model, shard over a mesh, and say what each stage costs.
#
# **Questions**
#
# <details><summary>A model of 40 blocks on 64 GPUs, fully sharded. How many all-gathers and reduce-scatters does a rank call in a step?</summary>
#
# There are 41 units. A rank calls 41 all-gathers in forward and 40 in backward, 81 in all, and 41
# reduce-scatters.
# </details>
#
# <details><summary>Four micro-batches are accumulated before each step. What does stage 3 do to the traffic, compared with DDP under no_sync?</summary>
#
# DDP sends gradients once, after the fourth: an all-reduce, which counts as two. For every micro-batch FSDP
# gathers the weights twice and reduces the gradients once: 8 + 4 = 12, six times as much. Keeping the weights
# until backward saves four of the gathers. With `set_requires_gradient_sync(False)` before all micro-batches
# but the last, `fully_shard` reduces only once, 8 + 1 = 9, at the price that each rank keeps whole gradients
# until then.
# </details>
#
# <details><summary>Somebody uses LAMB, which needs the norm of each weight matrix, with Flat. What goes wrong?</summary>
#
# The optimizer sees one long shard and not the matrices, so it takes the norm of the shard. `fully_shard`
# keeps the parameters apart, as DTensors, whose norm is that of the whole. Clipping only needs the norm of
# all gradients together, so one sum over the ranks mends it; LAMB needs a norm for each matrix, and `Flat`
# does not know where one ends.
# </details>
#
# **Sources**: Rajbhandari et al. 2020, "ZeRO", https://arxiv.org/abs/1910.02054; Zhao et al. 2023, "PyTorch
# FSDP", https://arxiv.org/abs/2304.11277; PyTorch's documentation of fully_shard,
# https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html; NVIDIA, "Communication Overlap",
# https://docs.nvidia.com/nemo/megatron-bridge/latest/training/communication-overlap.html.
