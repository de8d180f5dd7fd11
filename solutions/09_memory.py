# ---
# manyhands: {title: Memory, goal: "Say where the memory of training goes, part by part and rank by rank, predict it to the byte, and build ways to need less", job: {flags: "--steps 100 --layers 2 --block 32", loss: [1.53, 1.77]}}
# ---

# %% [markdown]
# # 09 Memory
#
# A model with 7 billion parameters has 14 GB of weights in bfloat16, and a GPU has 80 GB. Yet training this
# model on that GPU ends with "out of memory". Where do the other 66 GB go, and what can be done about it?
# Section 10 answers with numbers, computed by the functions that you write on the way.
#
# The memory of training has four parts. You know the **weights** and their **gradients**. The **optimizer
# state** is what the optimizer keeps for each parameter between steps; Adam keeps two numbers, its
# **moments**, which are running means of the gradient and of its square. The **activations** are the
# intermediate results that forward keeps because backward will need them.
#
# ![What each of three ranks holds in ZeRO stages 0 to 3: in stage 0 every rank holds everything; stage 1 shards the optimizer state, stage 2 also the gradients, stage 3 also the weights](figures/memory_stages.svg)
#
# The picture shows the way out for the first three parts. In lesson 05 every rank held all of them, although
# each part can be divided into **shards**, one for each rank. This method is **ZeRO**, the "zero redundancy
# optimizer"; lesson 10 builds its stages 1 to 3. Here you find out how much sharding saves, and what helps
# against the fourth part. Sections marked "optional" can wait for a second reading: the other sections do not
# need them.

# %%
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.checks import memory as check, score
from manyhands.data import corpus
from manyhands.data_parallel import replicas
from manyhands.fsdp import flat, fully_shard, units as fsdp, zero
from manyhands.instruments import figures
from manyhands.instruments.live import Live, parts_of
from manyhands.jobs import watch
from manyhands.memory import accounting, bench as work, figures as drawings
from manyhands.memory.savings import Uses
from manyhands.models.transformer import Block, Transformer, num_parameters, token_loss
from manyhands.ranks import lab
from manyhands.ranks.lab import run_ranks
from manyhands.training import storage

lab.warm_up()
torch.set_num_threads(1)
print(f"torch {torch.__version__}, {os.cpu_count()} cores; this notebook uses CPU + gloo")

# %% [markdown]
# ## 1. Bytes of one parameter
#
# How many bytes does one parameter cost? The answer depends on the **data types**: a float32 number takes 4
# bytes, a bfloat16 number takes 2. A common recipe, **mixed precision**, computes in bfloat16 and keeps a
# second copy of the weights in float32 for the optimizer. This copy, the **master weights**, is there because
# steps that are small beside a weight would be rounded away in bfloat16; section 9 shows how much that costs.
#
# Write the accounting as a function. It returns a `Recipe`, three numbers.

# %% show="true"
from manyhands.memory.accounting import Recipe

# %% exercise="recipe" todo="9.1" minutes=10 difficulty=1 points=1
from manyhands.memory.accounting import recipe

# %% check="9.1" tags=["nbval-check-output"]
check.recipe(recipe)

# %% [markdown]
# ### Does mixed precision take 12, 16 or 18 bytes per parameter?
#
# All three numbers are in use; the ZeRO paper, for example, counts 16. Look for them among these six recipes.

# %% tags=["nbval-check-output"]
fp32, bf16 = torch.float32, torch.bfloat16
WAYS = {  # weights, gradients, states, master copy
    "float32, Adam": (fp32, fp32, [fp32, fp32]),
    "float32, SGD without momentum": (fp32, fp32, []),
    "float32 weights, bfloat16 gradients and momentum": (fp32, bf16, [bf16, fp32]),
    "bfloat16 with float32 master": (bf16, bf16, [fp32, fp32], fp32),
    "the same, gradients in float32": (bf16, fp32, [fp32, fp32], fp32),
    "bfloat16 alone": (bf16, bf16, [bf16, bf16]),
}
if check.ready("9.1"):
    for name, way in WAYS.items():
        parts = recipe(*way)
        words = ", ".join(f"{part} {count}" for part, count in parts._asdict().items())
        print(f"{name:48} {sum(parts):2} bytes: {words}")
    assert [sum(recipe(*way)) for way in WAYS.values()] == [16, 8, 12, 16, 18, 8]

# %% [markdown]
# All three numbers are right, because each belongs to another recipe: the 12 is the third row, the 16 the
# fourth and the 18 the fifth. (The K = 12 of the ZeRO paper is yet another 12, the optimizer's share of the
# fourth row.) Some libraries keep the bfloat16 gradients of backward and also add them up in
# float32, which makes 2 + 2 + 4 + 12 = 20 bytes.
#
# With a master copy, mixed precision does not make these three parts smaller, even if the gradients have 2
# bytes: for that, the moments have to be kept in shorter numbers as well, or the recipe has to do without
# the master copy. What mixed precision saves is memory in the activations, and time. Sources: Rajbhandari et
# al. 2020 for the 16; Bekman, "Machine Learning Engineering Open Book", for the 18.

# %% [markdown]
# ## 2. Bytes of a rank
#
# How much does each of n ranks hold? In **stage 0** every rank holds everything. **Stage 1** gives each rank
# only one shard of the optimizer state, **stage 2** also only one shard of the gradients, and **stage 3**
# also only one shard of the weights.
#
# In this course's own version parameters are not sharded one by one (PyTorch's does that, section 12): all
# parameters of a layer are laid out in one long **vector**, and this vector is sharded. Shards must be
# equal in size, since the collectives used here move equal parts, so each vector is first **padded** with
# zeros up to a multiple of n. For example, two vectors of 5 and 3 numbers on 2 ranks become 6 and 4, and a
# rank's shards have 3 and 2 numbers. Adam also counts its steps, with one counter of 4 bytes for each
# vector that it steps. Your function counts all of these, to the byte.

# %% exercise="bytes_per_rank" todo="9.2" minutes=15 difficulty=2 points=2
from manyhands.memory.accounting import bytes_per_rank

# %% check="9.2" tags=["nbval-check-output"]
check.bytes_per_rank(bytes_per_rank)

# %% [markdown]
# For 7.5 billion parameters on 64 ranks, the ZeRO paper gives 120 GB in stage 0, then 31.4, 16.6 and 1.9 GB.
# What do you get?

# %% tags=["nbval-check-output"]
if check.ready("9.1", "9.2"):
    mixed = recipe(bf16, bf16, [fp32, fp32], fp32)
    gb = [sum(bytes_per_rank([7_500_000_000], mixed, stage, 64)) / 1e9 for stage in range(4)]
    for stage in range(4):
        print(f"stage {stage}: {gb[stage]:6.1f} GB")
    assert [round(one, 1) for one in gb] == [120, 31.4, 16.6, 1.9]

# %% [markdown]
# Your function reproduces the paper's table. By the same recipe the 7 billion parameters of the introduction
# take 7e9 x 16 bytes = 112 GB, so 80 GB are not enough even before the first activation is kept.

# %% [markdown]
# ## 3. What forward keeps
#
# The fourth part, the activations, depends on the batch and not on the number of ranks. What does autograd
# keep? For each operation it keeps what the operation's gradient formula needs:
#
# - `y = x @ W`: the gradient of W is computed from `x`, so the **input** is kept.
# - GELU: its gradient needs the slope at the input, so the input is kept.
# - A norm keeps its input and two numbers per token, the mean and the scale.
# - Attention keeps queries, keys, values and its output. PyTorch runs attention as one **fused kernel**, one
#   piece of code for all its operations. The T x T scores of a sequence of T tokens, one for each pair of
#   tokens, are computed again in backward, and only one number per head and token is kept instead.
# - A sum `x + y` keeps nothing. Dropout has probability 0 here and keeps nothing; otherwise it keeps a mask
#   of the numbers that it dropped.
#
# If an operation has kept its own *output*, the next operation has this tensor as its input and keeps nothing
# new. For example, attention keeps its output, so the product `out` that follows adds nothing. A norm keeps
# only its input, so the product `qkv` that follows does add something.
#
# Here is what a block computes. `qkv` makes queries, keys and values in one product, and the output of `up`
# is four times as wide as the block's input. B is the number of sequences, D the width and H the number of
# heads:

# %%
import inspect

from manyhands.models.transformer import MLP, Attention

for part in (Block, Attention, MLP):
    print(inspect.getsource(part.forward))

# %% exercise="block_activations" todo="9.3" minutes=15 difficulty=2 points=2
from manyhands.memory.accounting import block_activations

# %% check="9.3" tags=["nbval-check-output"]
check.block_activations(block_activations)

# %% tags=["nbval-check-output"]
if check.ready("9.3"):
    kept = block_activations(tokens=1, width=64, heads=2)
    for name, nbytes in kept.items():
        print(f"{name:10} {nbytes:5} bytes per token")
    print(f"{'together':10} {sum(kept.values()):5} bytes per token: 4 x (16 D + H + 4)")

# %% [markdown]
# If a number takes 2 bytes, this is about 32 D bytes per token. The well-known formula of Korthikanti et al.,
# 34 s b h bytes per layer (s b tokens of width h), counts the same tensors and adds two dropout masks of one
# byte per number. So 32 such blocks with D = 4096 and H = 32, which is the shape of a model with about 7
# billion parameters, keep 4.2 MB per token, or 17 GB for one sequence of 4096 tokens.
#
# Is the formula right? PyTorch lets you check, because autograd passes every tensor that it keeps to hooks
# that you can set. The course's `accounting.saved_bytes(run, params)` calls `run()` inside such hooks and
# returns the bytes that autograd kept, without those of `params`. (In section 4 you can write it yourself.)
#
# Compare the prediction with the measurement, for one block and for a whole Transformer. Outside its blocks
# the Transformer keeps the input of the last norm and the input of the head, two numbers per token for that
# norm, and V numbers per token for the loss, where V is the size of the vocabulary.

# %% tags=["nbval-check-output"]
B, T, D, H, L, V = 8, 32, 64, 2, 3, 50
torch.manual_seed(0)
block, model = Block(D, H, 0.0), Transformer(V, T, L, H, D)
x, tokens = torch.randn(B, T, D, requires_grad=True), torch.randint(V, (B, T))
if check.ready("9.3"):
    of_block = sum(block_activations(B * T, D, H).values())
    of_model = L * of_block + 4 * B * T * (2 * D + 2 + V)
    measured = accounting.saved_bytes(partial(block, x), block.parameters())
    print(f"block: predicted {of_block:,}, measured {measured:,} bytes")
    assert measured == of_block
    measured = accounting.saved_bytes(partial(model, tokens, tokens), model.parameters())
    print(f"model: predicted {of_model:,}, measured {measured:,} bytes")
    assert measured == of_model + 8 * B * T + 4

# %% [markdown]
# The block agrees to the byte. The model keeps 2052 bytes more than predicted: the embedding keeps the token
# numbers, 8 bytes each, and the loss keeps one number.

# %% [markdown]
# ## 4. Count what autograd keeps (optional)
#
# How does one count what autograd keeps? Inside `torch.autograd.graph.saved_tensors_hooks(pack, unpack)`
# every tensor that autograd keeps is passed to your `pack`, and autograd keeps what `pack` returns in its
# place; `unpack` receives this object in backward. A `pack` that returns `tensor.detach()`, which shares the
# tensor's memory, changes nothing and sees everything. (If `pack` returned the tensor itself, the tensor
# might keep itself alive.)
#
# There are two traps: several tensors may be views of the same memory, and the weights are kept as well,
# although they would be there anyway. `tensor.untyped_storage()` is the memory behind a tensor; it has a
# `data_ptr()` and `nbytes()`.

# %% exercise="saved_bytes" todo="9.4" minutes=15 difficulty=2 points=2
from manyhands.memory.accounting import saved_bytes

# %% check="9.4" tags=["nbval-check-output"]
check.saved_bytes(saved_bytes)

# %% [markdown]
# ### What fused attention is worth
#
# Older attention computes all T x T scores and keeps them, which adds T numbers for each head and token. The
# next cell measures both kinds for longer and longer sequences, with your `saved_bytes`. The points are
# measured, and the lines are the formulas without and with the scores: which of them grows with T? Both axes
# are logarithmic.

# %%
if check.ready("9.3", "9.4"):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    lengths = [64, 128, 256, 512, 1024]
    kinds = {"fused": SDPBackend.FLASH_ATTENTION, "with scores": SDPBackend.MATH}
    kept, formulas = {name: [] for name in kinds}, {}
    for length in lengths:
        longer = torch.randn(2, length, D, requires_grad=True)
        for name, backend in kinds.items():
            with sdpa_kernel(backend):
                nbytes = saved_bytes(partial(block, longer), block.parameters())
            kept[name].append(nbytes / (2 * length))
    of_token = sum(block_activations(1, D, H).values())
    formulas["fused"] = [of_token for _ in lengths]
    formulas["with scores"] = [of_token + 4 * H * length for length in lengths]
    for name in kinds:
        assert all(abs(a / b - 1) < 0.01 for a, b in zip(kept[name], formulas[name], strict=True))
    figure = drawings.kept_against_length(lengths, kept, formulas)
    figures.show(figure, "Bytes kept per token against length: fused is level, scores grow with T.")
    growth = [2 * kept["with scores"][i + 1] / kept["with scores"][i] for i in (0, -2)]
    print(f"twice the length keeps {growth[0]:.1f} and {growth[1]:.1f} times the bytes with scores")

# %% [markdown]
# Fused attention is level: a token costs the same in a sequence of any length. With scores the bytes per
# token grow with T. The line below the figure gives what doubling the length does to the memory of the whole
# sequence, at the left end of the figure and at its right end; the factor approaches 4 for still longer
# sequences. That is why long sequences were so expensive before 2022 (Dao et al., "FlashAttention",
# https://arxiv.org/abs/2205.14135).

# %% [markdown]
# ## 5. Prediction and measurement for every part
#
# Do the formulas hold in training? `Live` counts the bytes of all tensors that exist on a rank, part by part.
# It looks at the tensors themselves and not at the size of the process, so its numbers can be compared with a
# formula to the byte. Two ranks train for three steps in each stage; the code of stages 1 to 3 is lesson
# 10's.
#
# The first three parts are counted right after backward, the activations right after forward.


# %%
def sharded(stage, model):
    """The model and its optimizer in a ZeRO stage, and the sizes of the sharded vectors."""
    blocks, adamw = list(model.blocks), partial(torch.optim.AdamW, lr=1e-3)
    in_blocks = set(model.blocks.parameters())
    root = [param for param in model.parameters() if param not in in_blocks]
    units = [root, *(list(block.parameters()) for block in blocks)]
    sizes = [sum(param.numel() for param in unit) for unit in units]
    if stage == 0:
        return model, adamw(model.parameters()), [p.numel() for p in model.parameters()]
    if stage == 3:
        model = fsdp.FSDP(model, blocks)
        return model, adamw(model.parameters()), sizes
    flats = [flat.Flat(unit) for unit in units]
    if stage == 2:
        zero.reduce_during_backward(flats)
    return model, zero.ShardedOptimizer(flats, adamw), sizes


# %%
def weigh(stage):
    """Bytes by part on this rank, measured in the third step, and the sizes of the vectors."""
    torch.manual_seed(0)
    model, optimizer, sizes = sharded(stage, Transformer(V, T, L, H, D))
    inputs = torch.randint(V, (B, T))
    for _ in range(3):
        with Live(parts_of(model, optimizer)) as live:
            loss = model(inputs, inputs)
            activations = live.now()["other"]
            loss.backward()
            if stage == 0:
                replicas.average_gradients(model)
            measured = live.now() | {"activations": activations}
            optimizer.step()
        model.zero_grad()
    del measured["other"]
    return measured, sizes, live.total


# %% tags=["nbval-check-output"]
if check.ready("9.1", "9.2", "9.3"):
    bars, peaks = [], []
    for stage in range(4):
        measured, sizes, peak = run_ranks(weigh, 2, stage)[1]
        parts = bytes_per_rank(sizes, recipe(fp32, fp32, [fp32, fp32]), stage, 2)
        predicted = parts._asdict() | {"activations": of_model}
        for part, nbytes in predicted.items():
            print(f"stage {stage} {part:12} predicted {nbytes:9,}, measured {measured[part]:9,}")
            assert abs(measured[part] - nbytes) <= (0.01 * nbytes if part == "activations" else 0)
        bars += [(f"predicted\nstage {stage}", predicted), (f"measured\nstage {stage}", measured)]
        peaks.append(peak)

# %%
if check.ready("9.1", "9.2", "9.3"):
    figure, ax = figures.new_figure(8, 4)
    in_mb = [(name, {k: v / 1e6 for k, v in parts.items()}) for name, parts in bars]
    figures.stacked_bars(ax, in_mb, "MB per rank, 2 ranks", gap_every=2)
    figures.legend_below(figure, ax)
    in_words = ", ".join(f"{peak / 1e6:.2f}" for peak in peaks)
    print(f"most bytes that ever lived at the same time, stages 0 to 3: {in_words} MB")
    figures.show(figure, "Stacked bars of four parts in stages 0 to 3: predicted equals measured.")
    sums = [sum(parts.values()) for _, parts in bars[1::2]]  # of what was measured
    assert [peak < of_parts for peak, of_parts in zip(peaks, sums, strict=True)] == [1, 1, 1, 0]

# %% [markdown]
# Weights, gradients and optimizer state agree to the byte, and the activations to within one percent. The
# model is small here and the batch is not, so the activations are the largest part, and no stage makes them
# smaller. Compare the bars with the line above the figure, which gives the most bytes that existed at the
# same time. In stages 0 to 2 the bars are higher than this peak, but in stage 3 the bar is lower. Why?
#
# ### The parts do not peak together
#
# A step begins without gradients and ends without activations. The next figure shows all bytes that exist
# after each operation in one step of plain training. Where is the sum highest?


# %%
def history():
    torch.manual_seed(0)
    model, inputs = Transformer(V, T, L, H, D), torch.randint(V, (B, T))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for step in range(2):
        with Live(parts_of(model, optimizer), keep=step == 1) as live:
            model(inputs, inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
    return live.history


# %%
(steps,) = run_ranks(history, 1, join=False)
parts = {"weights": "weights", "optimizer": "optimizer", "gradients": "gradients"}
parts |= {"other": "activations"}
figure, ax = figures.new_figure()
areas = {role: [now[part] / 1e6 for now in steps] for part, role in parts.items()}
figures.stack(ax, range(len(steps)), areas, "operations since the step began", "MB of tensors")
figures.show(figure, "Bytes of each part over the operations of a step: a mountain of activations.")
highest = max(steps, key=lambda now: sum(now.values()))
assert highest["gradients"] < 0.1 * highest["weights"] < 0.1 * highest["other"]

# %% [markdown]
# Forward piles the activations up; backward frees them while it fills the gradients. (Temporary values are
# counted with the activations: the last bumps are the optimizer's.) So the peak is near the turn from forward
# to backward, where there are hardly any gradients yet. The bars of stages 0 to 2 add all gradients to all
# activations, so they are higher than the peak.
#
# In stage 3 whole layers are gathered for a moment, and no bar counts them. In a model of three layers, these
# gathered layers take more memory than stage 3 saves over stage 2; lesson 10 shows when they take it.

# %% [markdown]
# ## 6. Save: smaller pieces
#
# What if the activations of a large batch do not fit? Activations grow with the batch, so split the batch
# into **micro-batches**, run forward and backward for each of them, and let the gradients add up, since
# backward adds to `.grad` anyway. Then take one step. This is **gradient accumulation**.
#
# `model(inputs, targets)` returns the *mean* loss of its tokens. When micro-batches differ in size, the mean
# of their means is not the mean over all tokens. Make your function right for this case, too.

# %% exercise="accumulate" todo="9.5" minutes=10 difficulty=2 points=2
from manyhands.memory.savings import accumulate

# %% check="9.5" tags=["nbval-check-output"]
check.accumulate(accumulate)

# %% [markdown]
# How wrong is the mean of means? The next cell splits a batch of 24 sequences, evenly and unevenly, and
# prints the largest difference from the gradient of the whole batch, as a percentage of that gradient's
# largest entry.


# %%
def gradients(step):
    """All gradients as one vector, after step(model)."""
    torch.manual_seed(0)
    model = Transformer(V, T, L, H, D)
    step(model)
    return torch.cat([param.grad.flatten() for param in model.parameters()])


def mean_of_means(model, micro_batches):
    for inputs, targets in micro_batches:
        (model(inputs, targets) / len(micro_batches)).backward()


# %% tags=["nbval-check-output"]
if check.ready("9.5"):
    generator = torch.Generator().manual_seed(2)
    inputs, targets = torch.randint(V, (2, 24, T), generator=generator)
    whole = gradients(lambda model: model(inputs, targets).backward())
    for name, sizes in (("8 + 8 + 8", [8, 8, 8]), ("20 + 3 + 1", [20, 3, 1])):
        pieces = list(zip(inputs.split(sizes), targets.split(sizes), strict=True))
        for way in (mean_of_means, accumulate):
            off = (gradients(lambda m: way(m, pieces)) - whole).abs().max() / whole.abs().max()  # noqa: B023
            print(f"{name:10} {way.__name__:14} off by {off.item():.0%}")
            is_right = way is accumulate or name == "8 + 8 + 8"
            assert off < 1e-5 if is_right else off > 0.5

# %% [markdown]
# Equal pieces hide the mistake. Unequal pieces reveal it, because the last sequence alone counts as much as
# the first twenty together. Popular training libraries had this error until October 2024
# (https://github.com/huggingface/transformers/pull/34191). There the pieces had different numbers of padded
# positions, which the loss leaves out; the targets of this lesson have no padding, so `accumulate` may count
# all of them.

# %% [markdown]
# ## 7. Save: compute twice
#
# **Activation checkpointing** (which has nothing to do with the checkpoint files of lesson 05) drops a
# block's activations in forward and keeps only the block's input. Backward runs the block again just before
# it needs the activations. The price is a second forward, which is a third more work, since backward takes
# about twice the work of forward.
#
# Write it as an `autograd.Function`, with a forward and a backward of your own. You need to know three
# things:
#
# - Inside the `forward` of a Function autograd records nothing. The same is true inside `backward`, unless
#   you say `with torch.enable_grad():`.
# - `ctx` carries things from forward to backward: `ctx.save_for_backward(tensors)` and `ctx.saved_tensors`.
# - Dropout draws random numbers, and the second run must draw the same ones. `rng_states` and
#   `set_rng_states` are given for this.
#
# `torch.autograd.grad(output, inputs, grad)` returns the gradients of `inputs`, where `grad` is the gradient
# of `output`.

# %% show="true"
from manyhands.memory.savings import rng_states, set_rng_states

# %% exercise="Checkpoint.forward Checkpoint.backward" todo="9.6" minutes=20 difficulty=3 points=3
from manyhands.memory.savings import Checkpoint

# %% check="9.6" tags=["nbval-check-output"]
check.Checkpoint(Checkpoint)

# %% [markdown]
# `checkpointed(module, x)` applies your `Checkpoint` to a module. If forward ran under autocast, which you
# meet in the next section, the second run has to use autocast, too. Autograd asks a checkpoint only for the
# gradients of its arguments, so a weight that the module uses but does not own would get none; `Uses` turns
# that into an error. And whatever forward changes is changed twice: batch normalization counts each batch
# twice in its running statistics, with PyTorch's checkpoint as well.

# %% show="true"
from manyhands.memory.savings import checkpointed

# %% [markdown]
# Predict, then measure: 8 blocks of width 64 with 2 heads are checkpointed one by one. Autograd then keeps
# only the input of each block, D numbers per token, besides what is kept outside the blocks. By which factor
# do the kept bytes fall?

# %%
factor = None  # your number: kept without checkpoints / kept with them

# %% answer="true"
factor = 12


# %%
def deep(how):
    torch.manual_seed(0)
    model = Transformer(V, T, 8, H, D)
    if how is not None:
        model.through = how
    return model


def native(block, x):
    return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)


def one_step(model):
    model(tokens, tokens).backward()


# %%
if check.ready("9.6"):
    ways = {"plain": None, "Checkpoint": checkpointed, "PyTorch's": native}
    models = {name: deep(how) for name, how in ways.items()}
    kept = {
        name: accounting.saved_bytes(partial(model, tokens, tokens), model.parameters())
        for name, model in models.items()
    }
    around = 2 * D + 2 + V
    formula = (8 * (16 * D + H + 4) + around) / (8 * D + around)
    found = kept["plain"] / kept["Checkpoint"]
    score("times fewer bytes kept", factor, formula, found)
    assert abs(found / formula - 1) < 0.02
    for model in models.values():
        one_step(model)
    grads = {n: torch.cat([p.grad.flatten() for p in m.parameters()]) for n, m in models.items()}
    assert torch.allclose(grads["plain"], grads["Checkpoint"], atol=1e-6)

# %% [markdown]
# The kept bytes fall by an order of magnitude, as predicted, and the gradients are the same. Is a step a
# third slower? The next cell counts the operations of all matrix products but those inside attention, a
# number that is the same on every machine. It also measures the time of a step, which differs from machine
# to machine.

# %%
if check.ready("9.6"):
    costs = work.work_and_time({name: partial(one_step, model) for name, model in models.items()})
    flops, seconds = zip(*costs.values(), strict=True)
    for name, ops, spent_s in zip(costs, flops, seconds, strict=True):
        words = f"{ops / flops[0]:.2f} x the arithmetic, {spent_s / seconds[0]:.2f} x the time"
        print(f"{name:11} {words} ({1e3 * spent_s:.1f} ms a step)")
    assert 1.32 < flops[1] / flops[0] < 4 / 3 and flops[0] < flops[2] < flops[1]
    grown = [costs[1] / costs[0] - 1 for costs in (flops, seconds)]
    print(f"Checkpoint: {grown[0]:+.0%} arithmetic, {grown[1]:+.0%} time on this machine")

# %% [markdown]
# The arithmetic of the blocks grows by a third, as predicted, and the head, which is not checkpointed, adds
# no more. PyTorch's version computes less a second time, because it stops as soon as it has the last tensor
# that backward needs: here it leaves out the product `down`, whose output no gradient formula uses.
#
# The time can differ from the arithmetic. The matrices of this model are so small that Python's own work,
# such as the extra calls of each checkpoint, is a large part of a step, and PyTorch's version has more of it
# because it does more (nested calls, several inputs, early stops). Python's work does not grow with the
# matrices, so for large matrices the arithmetic predicts the time better.
#
# While backward differentiates a block, this block's own activations are in memory again. So the
# activations need at most about the kept bytes plus one block's activations.

# %% [markdown]
# ## 8. Save: shorter numbers
#
# What do shorter numbers save, and what do they break? bfloat16 has float32's range, but only 8 binary digits
# of precision, which are 2 to 3 decimal digits. `torch.autocast` computes matrix products in bfloat16. GELU
# and attention work in bfloat16 as well, since they receive the results of matrix products. Norms, sums with
# float32 and the loss stay in float32. Which of the four types below are bfloat16?

# %% tags=["nbval-check-output"]
model = Transformer(V, T, L, H, D)
with torch.autocast("cpu", torch.bfloat16):
    hidden = model.blocks[0].attention.qkv(torch.randn(2, T, D))
    loss = model(tokens, tokens)
loss.backward()
print("output of a matrix product:", hidden.dtype)
print("weights:                   ", model.tokens.weight.dtype)
print("gradients:                 ", model.tokens.weight.grad.dtype)
print("loss:                      ", loss.dtype)

# %% [markdown]
# Weights and gradients stay in float32, so the first three parts are as large as before. The tensors that
# matrix products, GELU and attention keep are half as large, while the norms' inputs stay in float32. But the
# weights now have bfloat16 copies, which exist until backward has used them. What remains of the saving, for
# few tokens and for many?

# %% tags=["nbval-check-output"]
for batch in (1, 64):
    inputs = torch.randn(batch, T, D, requires_grad=True)
    full = accounting.saved_bytes(partial(block, inputs), block.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        half = accounting.saved_bytes(partial(block, inputs), block.parameters())
    print(f"{batch * T:5} tokens: {full:9,} bytes, with autocast {half:9,}: {half / full:.2f} x")
    assert half > full if batch == 1 else 0.5 < half / full < 0.65

# %% [markdown]
# With few tokens the copies of the weights take more than the shorter activations save. With many tokens the
# kept bytes fall to somewhat more than a half, mainly because the norms' inputs stay in float32.

# %% [markdown]
# ## 9. Why a master copy? (optional)
#
# What would be lost if weights, gradients and state were all bfloat16, so that every part is halved? Try
# small steps on a weight of 1:

# %% tags=["nbval-check-output"]
weight = torch.ones(1, dtype=torch.bfloat16)
for step in (0.01, 0.005, 0.002, 0.001):
    print(f"1 - {step} = {(weight - step).item()}")
assert (weight - 0.001).item() == 1

# %% [markdown]
# The nearest bfloat16 number below 1 is 0.99609375, so a step ends there or on a number further down. A step
# smaller than half of this distance is rounded away, as 0.001 is. In general a weight loses every step that
# is smaller than about 1/500 of the weight, and late in training many steps are that small. The remedy is to
# keep a copy of the weights in float32, let the optimizer step the copy, and round the result into the
# bfloat16 weight.

# %% exercise="MasterWeights.step" todo="9.7" minutes=15 difficulty=2 points=2
from manyhands.memory.savings import MasterWeights

# %% check="9.7" tags=["nbval-check-output"]
check.MasterWeights(MasterWeights)

# %% [markdown]
# Does this matter for the loss? Compare three trainings from the same start with the same batches: all in
# float32, all in bfloat16, and bfloat16 with master weights. (The last two round the start.)

# %%
data = corpus.load("embedded", 32)
print(data.note)


def losses(how, num_steps=300):
    torch.manual_seed(0)
    model = Transformer(data.tokenizer.vocab_size, 32, layers=1, width=64)
    model = model if how == "float32" else model.bfloat16()
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    has_master = how == "bfloat16 + master"
    make = MasterWeights if has_master else lambda params, adamw: adamw(params)
    optimizer, found = make(model.parameters(), adamw), []
    for number in range(num_steps):
        pairs = [data.train[index] for index in range(8 * number, 8 * number + 8)]
        loss = model(*(torch.stack(part) for part in zip(*pairs, strict=True)))
        loss.backward()
        optimizer.step()
        model.zero_grad()
        found.append(loss.item())
    return found


# %%
if check.ready("9.7"):
    curves = {how: losses(how) for how in ("float32", "bfloat16", "bfloat16 + master")}
    figure, ax = figures.new_figure()
    smooth = {
        how: (range(15, 300, 15), [sum(found[i - 15 : i + 15]) / 30 for i in range(15, 300, 15)])
        for how, found in curves.items()
    }
    figures.lines(ax, smooth, "step", "loss (nats per token)", data.entropy_floor)
    ax.set_title("one run each, seed 0; mean of 30 steps", fontsize=10)
    figures.show(figure, "Loss of three trainings: bfloat16 alone stays above the other two.")
    last = {how: sum(found[-60:]) / 60 for how, found in curves.items()}
    print(", ".join(f"{how} {loss:.3f}" for how, loss in last.items()))
    assert abs(last["bfloat16 + master"] - last["float32"]) < 0.5 * (
        last["bfloat16"] - last["float32"]
    )

# %% [markdown]
# bfloat16 alone falls behind, as the line below the figure says for the last 60 steps. It loses small steps of its
# weights, and its moments, which are bfloat16 as well, lose small changes in the same way. For example, AdamW
# multiplies the mean of the squares by 0.999 in each step, and this change is rounded away. With master
# weights and moments in float32 the curve is practically that of float32. (Each curve is one run with one
# seed, so differences of a few thousandths mean nothing.)
#
# After backward the price is 2 + 2 + 12 bytes per parameter. During its step `MasterWeights` holds the
# gradients in float32, so the price is then 2 + 4 + 12.

# %% [markdown]
# ## 10. How many GPUs for 7 billion parameters?
#
# Now the question of the introduction. Take 7 billion parameters in bfloat16 with a float32 master copy, 32
# blocks of width 4096 with 32 heads, a vocabulary of 32,000, and on each GPU one sequence of 4096 tokens,
# which is the smallest batch there is. The first three parts are 7e9 x 16 bytes = 112 GB, and stage 3 divides
# them by the number of GPUs. The activations are not divided, because every GPU has a sequence of its own.
#
# The memory of the activations depends on what is kept. Korthikanti et al. give 34 s b h + 5 a s^2 b bytes
# per layer, where a is the number of heads, for numbers of 2 bytes and a block with GELU and dropout. Its
# attention keeps the scores, as attention did before there were fused kernels. The second term is for the
# softmax of the scores, a dropout mask, and the result of that dropout; without dropout 2 a s^2 b remain of
# it, and with fused attention nothing. If every block is checkpointed, only 2 s b h bytes remain per layer,
# and the activations of one block at a time come on top. The next cell computes the four cases from your
# `block_activations`, which counts no dropout, and checks your function against the paper's first term. (Your
# function counts 2 bytes for every number. The numbers of the norms and the one per head are kept in float32,
# which adds less than 0.1 %.)
#
# Outside the blocks one part matters: the loss, which our model, like most training programs, computes in
# float32 from V scores per token. How much does it need? It is highest in backward, at the moment when the
# activations of all blocks are still there. So the next cell counts what the loss keeps after forward, and
# the most that lives until its backward has ended.

# %% tags=["nbval-check-output"]
num_tokens, vocab = 64, 32_000
head = nn.Linear(8, vocab, bias=False, dtype=torch.bfloat16)
targets = torch.randint(vocab, (1, num_tokens))
with Live(parts_of(head)) as live:
    loss = token_loss(head(torch.ones(1, num_tokens, 8, dtype=torch.bfloat16)), targets)
    kept = live.now()["other"]
    loss.backward()
per_score = [nbytes / (num_tokens * vocab) for nbytes in (kept, live.peak["other"])]
print(f"bytes per token and word: {per_score[0]:.1f} kept, {per_score[1]:.1f} at the peak")
assert [round(one) for one in per_score] == [4, 12]

# %% [markdown]
# The loss keeps 4 V bytes per token, the logarithms of the probabilities, but its backward has three such
# tensors at the same time: these logarithms, their gradient, and the gradient of the scores. That makes 12 V
# bytes per token, and `outside` in the next cell counts them. If every block is checkpointed, the loss and the
# one block that is computed again do not peak at the same time, so the larger of them counts.

# %% tags=["nbval-check-output"]
s, b, h, a, num_layers = 4096, 1, 4096, 32, 32
if check.ready("9.1", "9.2", "9.3"):
    of_layer = sum(block_activations(s * b, h, a, nbytes=2).values())
    masks = 2 * s * b * h  # of two dropouts, one byte per number
    assert of_layer + masks == 34 * s * b * h + 2 * s * b * (a + 4)
    outside = s * b * (2 * (2 * h + 2) + 12 * vocab)  # the last norm, the head and the loss
    peaks = {
        "checkpointed": num_layers * 2 * s * b * h + max(of_layer, outside),
        "fused attention": num_layers * of_layer + outside,
        "with scores": num_layers * (of_layer + 2 * a * s**2 * b) + outside,
        "scores + dropout": num_layers * (of_layer + masks + 5 * a * s**2 * b) + outside,
    }
    activations = {name: nbytes / 1e9 for name, nbytes in peaks.items()}
    print(f"of these, the loss takes {12 * s * b * vocab / 1e9:.1f} GB at its peak")
    for name, gb in activations.items():
        print(f"{name:16} {gb:6.1f} GB of activations on each GPU")

# %% [markdown]
# ### Predict: how many GPUs?
#
# How many GPUs of 80 GB are needed at least, in stage 3 with fused attention and no checkpoints, if 8 of the
# 80 GB have to stay free? (The end of this section says what for.) The table adds the three parts, in its
# first column, to each kind of activations.

# %%
num_gpus = None  # your number

# %% answer="true"
num_gpus = 3

# %% tags=["nbval-check-output"]
if check.ready("9.1", "9.2", "9.3"):
    mixed = recipe(bf16, bf16, [fp32, fp32], fp32)
    print("GB per GPU " + "".join(f"{name:>18}" for name in ("three parts", *activations)))
    enough = {}
    for num in range(1, 9):
        shards = sum(bytes_per_rank([7_000_000_000], mixed, 3, num)) / 1e9
        sums = {name: shards + gb for name, gb in activations.items()}
        fits = {name: num for name, gb in sums.items() if gb <= 72}
        enough = fits | enough  # the first number that fits stays
        print(f"{num} x 80 GB  " + "".join(f"{gb:18.1f}" for gb in (shards, *sums.values())))
    words = (f"{name} {enough.get(name, 'none up to 8')}" for name in activations)
    print("GPUs needed: " + ", ".join(words))
    assert enough == {"checkpointed": 2, "fused attention": 3, "with scores": 6}
    least = 112 / (72 - activations["fused attention"])  # GPUs, from 112 / n + activations = 72
    score("GPUs of 80 GB", num_gpus, int(least) + 1, enough["fused attention"])

# %% [markdown]
# One GPU is never enough, because the three parts alone take 112 GB. Two are enough if all blocks are
# checkpointed, three with fused attention, and six, by a hair, if attention keeps its scores. With scores
# and dropout no number of GPUs is enough: the activations of a single sequence take more than a GPU has,
# sharding does not make them smaller, and there is no batch of less than one sequence. That is why long
# sequences need fused attention or checkpoints, or blocks of which each GPU has a part only, as in lesson
# 13. With 8 GPUs and fused attention about half of the memory is left beside the margin, and a larger
# batch can use it.
#
# The loss grows with the vocabulary. With V = 128,256, as in Llama 3, it peaks at 6.3 GB for this one sequence,
# which would take most of the margin of 8 GB if it were forgotten. That is why libraries for
# large models offer a loss that works through the tokens or the words in pieces and never holds all the scores
# ("chunked" or "fused" cross-entropy).
#
# ### What else is on a GPU?
#
# The four parts are not all that a GPU holds, so a prediction needs a margin. The 8 GB above are such a
# margin, chosen by us; how much is needed differs from machine to machine. The margin covers:
#
# - **The CUDA context**, with the machine code of the kernels. The first CUDA call of a process takes 0.5 to
#   2 GB, depending on the GPU and on the version of PyTorch (Bekman, "Machine Learning Engineering Open
#   Book").
# - **NCCL's buffers**, through which messages pass. A process group has buffers of its own, so every further
#   group adds some. The size of one buffer is `NCCL_BUFFSIZE`, 4 MiB by default (NCCL's documentation,
#   "Environment Variables").
# - **The reserve of PyTorch's allocator.** It keeps freed memory for the next tensors of this process:
#   `torch.cuda.memory_reserved()` counts what it holds, `torch.cuda.memory_allocated()` what tensors use, and
#   `nvidia-smi` shows more than both, because it includes the context.
# - **Fragmentation.** Free memory helps only if one piece of it is large enough. Rajbhandari et al. saw runs
#   that were out of memory with over 30 % of it free ("ZeRO", section 3.2). The setting
#   `PYTORCH_ALLOC_CONF=expandable_segments:True` lets pieces grow, which makes that rarer.
# - **What lives for a moment**, such as the weights that stage 3 gathers: 7e9 / 32 x 2 bytes = 0.44 GB for
#   each block that is whole at the same time.
#
# Where there is a GPU, `make gpu ONLY=memory` measures this margin: its report compares the predicted bytes
# of a training step with the measured ones, with what the allocator holds, and with what is in use on the
# GPU.

# %% [markdown]
# ## 11. Save: leave it on the CPU (optional)
#
# A node often has more memory on its CPU side than on its GPUs. **CPU offload** keeps the shards and the
# optimizer state there, brings a block's weights to the GPU when they are needed, and takes the gradients
# back; the CPU runs the optimizer step. `fully_shard`, which lesson 10 introduces, offers offload as a
# policy. It also runs without a GPU, where it has nothing to save, so the next cell tests only that the
# losses are the same.


# %%
def three_steps(on_cpu):
    torch.manual_seed(0)
    model = Transformer(V, T, L, H, D)
    model = fully_shard.torch_fsdp(model, list(model.blocks), offload=on_cpu)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found, inputs = [], torch.arange(B * T).view(B, T) % V
    for _ in range(3):
        loss = model(inputs, inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


without, with_offload = (run_ranks(three_steps, 2, on_cpu)[0] for on_cpu in (False, True))
print("losses without", without, "and with offload", with_offload)
assert without == with_offload

# %% [markdown]
# The losses are equal, but a CPU cannot show what offload saves and costs, since nothing moves. Both can be
# computed. A GPU that has room for some of the blocks need not send all of them away, so first decide how many
# have to go:

# %% exercise="offload" todo="9.8" minutes=10 difficulty=1 points=1
from manyhands.memory.accounting import Offload, offload

# %% check="9.8" tags=["nbval-check-output"]
check.offload(offload)

# %% [markdown]
# Now take the 7 billion parameters of section 10, all in float32 (they are rounded to bfloat16 on the GPU),
# again with one sequence of 4096 tokens and fused attention on each GPU. One or two GPUs had no room for them.
# The last row offloads everything from eight GPUs, as `fully_shard`'s policy does when all units have it. Three
# times are compared, for GPUs that are in one node:
#
# - the way up: PCI Express 5 with 16 lanes carries 64 GB/s at most in each direction (PCI-SIG), and all GPUs
#   together get no more than the CPU's memory gives, which with eight channels of DDR5-4800 is
#   8 x 8 x 4.8 = 307 GB/s at most;
# - AdamW on the CPU, which reads four numbers of float32 from this memory for each parameter and writes three,
#   28 bytes;
# - the arithmetic of the GPU: 6 operations for each parameter and token, at 400e12 operations per second, which
#   is 40 % of what NVIDIA states for an H100 in bfloat16.

# %% tags=["nbval-check-output"]
if check.ready("9.1", "9.2", "9.3", "9.8"):
    room = int(1e9 * (72 - activations["fused attention"]))
    compute_s = 6 * 7e9 * 4096 / 400e12
    moves, up_s, adamw_s = {}, {}, {}
    for num, free in ((1, room), (2, room), (3, room), (8, 0)):
        shard = 7_000_000_000 // num_layers // num  # every block has 1/32 of the parameters here
        blocks, up, down = moves[num] = offload([shard] * num_layers, free)
        up_s[num] = max(up / 64e9, num * up / 307e9)
        adamw_s[num] = num * down / 4 * 28 / 307e9
        moved = f"{num} x 80 GB: {blocks:2} blocks on the CPU, {up / 1e9:4.1f} GB up a step"
        took = f"{up_s[num]:.2f} s, AdamW {adamw_s[num]:.2f} s, arithmetic {compute_s:.2f} s"
        print(f"{moved}: {took}")
    assert [moves[num].blocks > 0 for num in (1, 2, 3, 8)] == [True, True, False, True]
    assert up_s[1] > 0.8 * compute_s and up_s[2] < 0.2 * compute_s
    assert adamw_s[8] > compute_s > up_s[8]

# %% [markdown]
# With one GPU the weights take about as long on their way as the arithmetic, so even a way that overlaps all
# of it could hold the GPU up. With two GPUs few blocks have to go, and what they cost is small. Where everything
# is offloaded, as in the last row, neither the way nor AdamW takes longer when the batch grows, while the
# arithmetic does. So offload pays for large batches, or where the model fits in no other way. AdamW comes last,
# when all gradients are there, and more GPUs in the node do not make it shorter: it has the whole model to step,
# and here it takes longer than the arithmetic. The first two times are bounds from data sheets, and the third one
# assumes 40 %. How much is hidden, and how near the CPU comes to its memory's rate, only a run on a GPU can say.
# `make gpu ONLY=offload` trains the same model with and without offload, and its report shows the memory and the
# time per step of both runs. With a job of your own, run `sbatch sbatch/fsdp.sbatch --impl torch --offload`, and
# the same command without `--offload`; the row "tensors at their peak" of their reports counts only tensors on
# the GPU.
#
# It is also possible to move only the optimizer state, while the weights stay on the GPU. `MasterWeights` of
# section 9 comes close to that: if `__init__` made its copies with `.float().cpu()`, and `step` moved each
# gradient with `param.grad.to(master)`, the copies and the moments would be in the CPU's memory, 12 of the 16
# bytes per parameter, and `param.copy_(master)` would bring the new weights to the GPU (Ren et al.,
# "ZeRO-Offload", https://arxiv.org/abs/2101.06840).

# %% [markdown]
# ## 12. As many ranks as you like (optional)
#
# How much does each of 512 ranks hold? PyTorch has a **fake** process group: a single process acts as rank
# 0 of 512, and its messages go nowhere. The weights are on the **meta** device, where tensors have a shape
# but no memory. In this way PyTorch's own code shards a model of half a billion parameters, in about a
# second on an idle machine.


# %%
def shard_of_rank_0(world_size):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    start_s = time.perf_counter()
    with torch.device("meta"):
        model = Transformer(32_000, 1024, layers=24, heads=20, width=1280)
    for module in (*model.blocks, model):
        torch.distributed.fsdp.fully_shard(module)
    num = sum(param.to_local().numel() for param in model.parameters())
    spent_s = time.perf_counter() - start_s
    dist.destroy_process_group()
    return num, spent_s


# %%
worlds = [2**k for k in range(10)]
found = {n: run_ranks(shard_of_rank_0, 1, n, join=False)[0] for n in worlds}
total = num_parameters(32_000, 1024, 24, 1280)
for n in (1, 8, 512):
    print(f"{n:3} ranks: {16 * found[n][0] / 1e6:8.1f} MB on rank 0, found in {found[n][1]:.2f} s")

assert 1.05 < 512 * found[512][0] / total < 1.15

# %%
if check.ready("9.1", "9.2"):
    adam = recipe(fp32, fp32, [fp32, fp32])
    series = {
        f"stage {k}": (worlds, [sum(bytes_per_rank([total], adam, k, n)) / 1e9 for n in worlds])
        for k in range(4)
    }
    measured = {"fully_shard": (worlds, [16 * found[n][0] / 1e9 for n in worlds])}
    figure, ax = figures.new_figure(7, 4)
    names = ("ranks", "GB on rank 0, without activations")
    figures.measured_and_predicted(ax, measured, series, *names)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:g}")
    figures.show(figure, "Memory of rank 0 against ranks for four stages; points on stage 3.")

# %% [markdown]
# Stages 1 and 2 level off at the part that is not sharded, 8 and 4 bytes per parameter, while stage 3 keeps
# falling. At 512 ranks, rank 0 holds 9 % more than an equal share, because `fully_shard` splits each
# parameter by its rows, in pieces of equal size, rounded up. Of 1280 rows the first 426 of the 512 ranks have
# 3 each, the next has 2, and the last 85 have none.
#
# ### Does model parallelism take 16 N / GPUs bytes on each GPU?
#
# A slide that is often shown says so, for N parameters. If whole layers are placed on different GPUs, the
# division is not that even. Divide the model above into four pieces of 6 blocks, one for each GPU:

# %% tags=["nbval-check-output"]
with torch.device("meta"):
    model = Transformer(32_000, 1024, layers=24, heads=20, width=1280)
block_size = sum(param.numel() for param in model.blocks[0].parameters())
ends = {0: model.tokens.weight.numel() + model.positions.weight.numel()}
ends[3] = model.head.weight.numel() + model.norm.weight.numel()
for gpu in range(4):
    num = 6 * block_size + ends.get(gpu, 0)
    print(f"GPU {gpu}: {16 * num / 1e9:.2f} GB, {4 * num / total - 1:+.0%} beside 16 N / 4")

# %% [markdown]
# The first GPU also holds the embedding and the last one the head, which is a copy of the embedding on
# another GPU. So the sum is more than 16 N, and the largest piece decides whether the model fits.

# %% [markdown]
# ## 13. Run it as a job
#
# What do all savings achieve together, and what do they cost? The job trains the language model on two ranks
# and uses your `accumulate` and your `Checkpoint`. `--save all` means autocast, checkpoints, and each batch
# in four pieces. A second run uses none of the three.

# %%
if check.ready("9.5", "9.6"):
    check.keep()
    short = "--steps 20 --layers 2 --block 32 --batch 32 --valid-tokens 4096".split()
    saving = watch.run("../sbatch/memory.sbatch", "--impl", "mine", "--save", "all", *short)

# %%
if check.ready("9.5", "9.6"):
    plain = watch.run("../sbatch/memory.sbatch", "--impl", "scratch", "--save", "nothing", *short)

# %%
TIMES = ("forward_s", "backward_s", "communication_s", "tokens_per_s")
if check.ready("9.5", "9.6"):
    most, speed = {}, {}
    for name, folder in (("nothing", plain), ("all", saving)):
        peak = storage.read_json(folder / "status.json")["peak_bytes"]
        words = ", ".join(f"{part} {nbytes:,}" for part, nbytes in peak.items())
        most[name] = sum(peak.values())
        print(f"--save {name}: {most[name]:,} bytes at the peak ({words})")
        steps = storage.read_lines(folder / "metrics.jsonl")
        typical = {key: statistics.median(step[key] for step in steps) for key in TIMES}
        computing_s = typical["forward_s"] + typical["backward_s"]
        print(
            f"{'':>{7 + len(name)}} forward and backward {1e3 * computing_s:.0f} ms, "
            f"messages {1e3 * typical['communication_s']:.0f} ms of a typical step"
        )
        speed[name] = typical["tokens_per_s"]
    less, slower = most["all"] / most["nothing"], speed["all"] / speed["nothing"]
    print(f"with all three: {less:.2f} x the bytes, {slower:.2f} x the tokens/s of a typical step")
    assert 1 / 3 < less < 0.45

# %% [markdown]
# With all three the peak is a little more than a third of what it was, and its parts have changed: gradients
# accumulate from piece to piece, so from the second piece on they exist beside the highest activations.
#
# The price is speed, and the last line says how much of it on your machine. Forward and backward carry this
# price: every block is computed twice, small pieces use the cores less well, and many CPUs have no fast
# bfloat16 arithmetic. The messages are the same in both runs, one all-reduce for each gradient after the last
# piece, so where they take a large part of the step, the step slows down less than its computation does. On a
# GPU autocast usually makes training faster.
#
# The speed in a job's status is that of its last step; here it is the median of all steps. In the first two
# steps `Live` counts tensors, which makes them much slower than the others, also in the report's figures.
#
# On a CPU the report's "Memory of each device" is that of the whole process, most of which is PyTorch itself.
# The number above is in the report's row "tensors at their peak".

# %%
check.summary()

# %% [markdown]
# ## Recap
#
# You can now
#
# - say for any recipe and stage what each rank holds, to the byte, and prove it on real tensors,
# - count what forward keeps, operation by operation,
# - say how many GPUs a given model needs, and what a GPU holds besides tensors,
# - train a large batch in small pieces, so that the gradient is the same,
# - trade about a third more computation for several times less memory of activations,
# - say what autocast changes, and why weights, gradients and state do not shrink with it.
#
# **Questions**
#
# <details><summary>13 billion parameters, bfloat16 with float32 master, 16 GPUs. How much memory does each GPU need in stage 1, and how much in stage 3?</summary>
#
# Stage 1: 13e9 x (2 + 2 + 12/16) = 62 GB. Stage 3: 13e9 x 16/16 = 13 GB. Activations come on top of both.
# </details>
#
# <details><summary>Out of memory, and a smaller model is no option. You have one GPU. What do you try first?</summary>
#
# Micro-batches with accumulation: they cost little as long as a micro-batch is large enough to keep the GPU
# busy. Then checkpointing, at about a third more work. Only then offload to the CPU's memory (section 11),
# because its transfers cross a slow link in every step.
# </details>
#
# <details><summary>Why does accumulation not help against the optimizer state?</summary>
#
# Accumulation makes only the activations smaller, since fewer tokens pass through the model at a time.
# Weights, gradients and state have the size of the model, whatever the batch is.
# </details>
#
# **Sources**: Rajbhandari et al. 2020, "ZeRO", https://arxiv.org/abs/1910.02054; Korthikanti et al. 2022,
# "Reducing Activation Recomputation in Large Transformer Models", https://arxiv.org/abs/2205.05198; Chen et
# al. 2016, "Training Deep Nets with Sublinear Memory Cost", https://arxiv.org/abs/1604.06174; Micikevicius et
# al. 2018, "Mixed Precision Training", https://arxiv.org/abs/1710.03740; Bekman, "Machine Learning
# Engineering Open Book", https://github.com/stas00/ml-engineering.
