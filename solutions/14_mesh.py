# ---
# manyhands: {title: Meshes and plans, goal: "Combine data, pipeline and tensor parallelism on one mesh by hand, equal to one process, and plan a training on any number of GPUs before it runs", job: {flags: "--steps 100 --layers 2 --block 32 --micro-batches 2", loss: [1.53, 1.77]}}
# ---

# %% [markdown]
# # 14 Meshes and plans
#
# You have cut a training in three ways: by samples, by layers, and inside the matrices. Large models need all
# three at once, because each way stops paying somewhere. Which GPUs should do what? And can you know, before
# the job has run, how much memory it needs and how long a step takes?
#
# This lesson answers both questions. First you put the ranks into a **mesh**, a grid in which each axis stands
# for one technique, and train a Transformer on it by hand, with the losses and weights of one process, up to
# rounding. Then you plan: the formulas of lessons 09 to 13, added up, predict memory and time of every layout,
# and you compare the predictions with runs that others have published.
#
# The sections without "optional" in their heading, up to the job in section 10, are the core. Section 6 asks
# how a difference is recognised as rounding, and section 8 turns a guideline into a function. The sections
# after the job treat hybrid sharding, a time machine that replays a recorded step on 512 virtual ranks, and a
# comparison of all techniques on four ranks.

# %% jupyter={"source_hidden": true}
import itertools
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod, sqrt

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from manyhands.checks import mesh as check, score
from manyhands.collectives.trees import Group
from manyhands.compare import figures as compare_figures, measure
from manyhands.compare.planned import beside, training_of
from manyhands.data_parallel.replicas import average_gradients
from manyhands.fsdp.units import FSDP
from manyhands.instruments import figures
from manyhands.instruments.ledger import Ledger
from manyhands.jobs import watch
from manyhands.mesh import bench, figures as mesh_figures
from manyhands.mesh.clip import Parts
from manyhands.mesh.combine import Stage, shard_of
from manyhands.mesh.grid import DATA_AXES, Groups, Sizes
from manyhands.mesh.native import shard
from manyhands.mesh.parts import (
    bounds_of,
    cut_layers,
    cut_stages,
    holders,
    loss_of,
    mark_holders,
    units_in,
)
from manyhands.mesh.seeds import MOST_RANKS, PURPOSES
from manyhands.mesh.spread import add_pairs, add_up
from manyhands.mesh.training import MeshTraining
from manyhands.mesh.whole import whole_state
from manyhands.models.transformer import Transformer
from manyhands.pipeline.wiring import find_tied, sum_tied
from manyhands.planner.hardware import GIB, GPUS, group_link
from manyhands.ranks import lab
from manyhands.ranks.lab import run_ranks
from manyhands.tensor.dtensor import torch_tensor_parallel
from manyhands.tensor.model import TensorParallel
from manyhands.ways.ready import Setting
from manyhands.ways.registry import ways_for

lab.warm_up()
print(f"torch {torch.__version__}, {os.cpu_count()} cores; ranks use CPU + gloo")

# %% [markdown]
# ## 1. A mesh and its groups
#
# How do eight ranks share three techniques? Treat the three coordinates of a rank as the digits of its number.
# With two pipeline stages, two data-parallel shares and two tensor ranks, rank = (pp · 2 + dp) · 2 + tp. The
# figure shows this mesh. Ranks that are joined by a line form a group: they talk to each other, and each group
# knows nothing of the others. Ranks at the same place in the two blocks, such as 0 and 4, also form a group: a
# pipeline, along `pp`.

# %%
SIZES = {"pp": 2, "dp": 2, "tp": 2}  # the outermost axis first
figures.show(
    mesh_figures.mesh(SIZES), "Two blocks of 2 x 2 ranks; tp joins rows, dp joins columns."
)

# %% [markdown]
# Which axis goes where is not arbitrary. The last axis has consecutive ranks, so it lies inside a node.
# **Tensor parallelism** belongs there: with many tokens it sends most, and in our layers nothing hides its
# messages (lesson 13). **Data parallelism** comes next, because its messages can hide behind the computation. The
# **pipeline** is outermost: a cut sends only one activation and one gradient per micro-batch, so it can live with
# the slow links between nodes.
#
# Write both functions of the numbering. `coordinates` says where a rank stands, and `ranks_along` which ranks
# are in its group along an axis. `prod`, from `math`, multiplies the numbers of an iterable.

# %% exercise="coordinates ranks_along" todo="14.1" minutes=10 difficulty=2 points=2
from manyhands.mesh.grid import coordinates, ranks_along

# %% check="14.1" tags=["nbval-check-output"]
check.coordinates(coordinates, ranks_along)

# %% [markdown]
# Your functions work for any number of axes. Here are a few ranks of a larger mesh.

# %% tags=["nbval-check-output"]
if check.ready("14.1"):
    larger = {"pp": 4, "dp": 3, "tp": 2}
    for rank in (0, 11, 23):
        groups = {axis: ranks_along(axis, rank, larger) for axis in larger}
        print(f"rank {rank:2} stands at {coordinates(rank, larger)}, groups {groups}")

# %% [markdown]
# ### Every rank makes every group
#
# A group is made by `dist.new_group(ranks)`, and *all* ranks have to call it, also those that are not in the
# group. Why? Ranks recognise a group by counting their calls: the third call of one rank has to be the third
# call of all others. In the next cell rank 1 thinks that the group of ranks 0 and 2 does not concern it, and
# goes on to the group of ranks 0 and 1. Watch which line each rank waits in.


# %%
def one_rank_skips():
    if dist.get_rank() != 1:
        dist.new_group([0, 2])
    pair = dist.new_group([0, 1])  # the second call of rank 0, but the first of rank 1
    if dist.get_rank() < 2:
        dist.all_reduce(torch.ones(1), group=pair)
    return "through"


try:
    print(run_ranks(one_rank_skips, 3, timeout_s=1, rules=""))
except Exception as error:
    print(error)

# %% [markdown]
# Ranks 0 and 1 mean the same group, but each knows it under another number, so they wait for each other. Which
# lines hang can differ from run to run. Under NCCL the result can be worse, since groups of two ranks may be
# paired although their members differ. So the rule is simple: make all groups on all ranks, in the same order.

# %% exercise="make_groups" todo="14.2" minutes=10 difficulty=2 points=2
from manyhands.mesh.grid import make_groups

# %% check="14.2" tags=["nbval-check-output"]
check.make_groups(make_groups)

# %% [markdown]
# PyTorch's own is `init_device_mesh`. Are its groups yours?

# %% show="true"
from manyhands.mesh.grid import groups_of, torch_mesh


# %% tags=["nbval-check-output"]
def same_groups():
    mine, theirs = make_groups(SIZES), groups_of(torch_mesh(SIZES))
    ranks = dist.get_process_group_ranks
    return all(ranks(mine[axis]) == ranks(theirs[axis]) for axis in SIZES)


if check.ready("14.1", "14.2"):
    print("the same groups on every rank:", all(run_ranks(same_groups, 8)))

# %% [markdown]
# ## 2. Two techniques at once: FSDP and tensor parallelism
#
# Let four ranks be 2 x 2: tensor parallelism along `tp`, FSDP along `dp`. Each rank then holds a quarter of
# every matrix but the positions'. The classes of lessons 10 and 13 can be put one inside the other, but the
# order matters. Tensor parallelism cuts matrices by heads and columns, so it has to find them whole. FSDP
# flattens whatever parameters it is given into one long vector, keeps its shard and frees the rest. Which
# of the two must come first?
#
# `mark_holders(model, n)` notes on each parameter that n ranks hold it. What tensor parallelism cuts becomes a
# new parameter without that mark, so afterwards the mark is left on exactly those parameters that are whole on
# every tensor rank, the normalization weights and positions. Section 4 needs it.
#
# The two classes are `TensorParallel(model, group=...)` and `FSDP(model, units, replicas=..., group=...)`. The units
# are here the blocks. `replicas` is a group whose ranks have copies of the same shards, or None. A mesh has such a
# group only where one of its axes is called "replicate" (section 11), so your function has to look for it.

# %% exercise="shard_and_cut" todo="14.3" minutes=15 difficulty=2 points=2
from manyhands.mesh.combine import shard_and_cut

# %% check="14.3" tags=["nbval-check-output"]
check.shard_and_cut(shard_and_cut)

# %% [markdown]
# ### Is it the same training?
#
# The next cells train for four steps of AdamW on four ranks, and compare with one process: losses and weights.
# `MeshTraining`, which is given, calls your `shard_and_cut` on a mesh without a pipeline. Along `dp` each rank
# has its own samples, along `tp` both have the same ones. Differences below 1e-5 are rounding.

# %%
V, T, L, D, B = 48, 16, 2, 64, 8


def make_model():
    torch.manual_seed(0)
    return Transformer(V, T, L, heads=4, width=D)


def batches(num=4):
    generator = torch.Generator().manual_seed(4)
    return torch.randint(V, (num, 2, B, T), generator=generator)


def adamw(params, **options):
    # with this eps the rounding of a gradient that is nearly 0 decides no step
    return torch.optim.AdamW(params, 3e-4, eps=1e-6, **options)


def train_whole():
    model = make_model()
    optimizer, losses = adamw(model.parameters()), []
    for inputs, targets in batches():
        optimizer.zero_grad()
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in model.named_parameters()}


TRUTH = train_whole()


def train_on(sizes, micro_batches=1):
    """Losses, and on rank 0 how far the whole weights are from those of one process."""
    groups = make_groups(sizes)
    training = MeshTraining(make_model(), groups, micro_batches, shard_and_cut)
    optimizer, losses = adamw(training.parameters()), []
    place = coordinates(dist.get_rank(), sizes)
    for inputs, targets in batches():
        share = slice(place["dp"], None, sizes["dp"])
        losses.append(training.step(inputs[share], targets[share]).item())
        training.finish()
        optimizer.step()
        training.zero_grad()
    state = whole_state(training, make_model())
    held = sum(param.numel() for param in training.parameters())
    off = [(state[name] - value).abs().max().item() for name, value in TRUTH[1].items() if state]
    return losses, max(off, default=0.0), held


def compare_training(sizes, micro_batches=1):
    found = run_ranks(train_on, prod(sizes.values()), sizes, micro_batches, timeout_s=120)
    losses, weights, held = zip(*found, strict=True)
    loss_off = max(abs(a - b) for one in losses for a, b in zip(one, TRUTH[0], strict=True))
    whole = sum(value.numel() for value in TRUTH[1].values())
    print(f"{sizes}: losses off by {loss_off:.1e}, weights by {max(weights):.1e}")
    print(f"  a rank holds {max(held) / whole:.2f} of the parameters at most")
    assert loss_off < 1e-5 and max(weights) < 1e-5


GRID = ("14.1", "14.2", "14.3")
if check.ready(*GRID):
    compare_training({"dp": 2, "tp": 2})

# %% [markdown]
# It is the same training, and a rank holds about a quarter of the model.
#
# ## 3. Three techniques on eight ranks
#
# Now add the pipeline. Each stage is a tensor-parallel piece of the model, and inside its stage FSDP shards
# what is left. One detail takes care: embedding and head are one matrix, which lives on the first *and* on
# the last stage, so both find a part of its gradient, and the parts have to be added (lesson 12). With FSDP
# each rank has only a shard of either part. Shards can be added only if both stages shard the matrix in the
# same way, so it becomes an FSDP unit of its own on both. `take_stage`, which is given, does all this.

# %% show="true"
from manyhands.mesh.combine import finish_gradients, take_stage

# %%
if check.ready(*GRID):
    compare_training({"pp": 2, "dp": 2, "tp": 1}, micro_batches=2)
    compare_training(SIZES, micro_batches=2)

# %% [markdown]
# Pipeline and FSDP on four ranks, and all three on eight, give the losses and weights of one process. What
# does a gradient mean here? A loss is the mean over the samples of a micro-batch. So micro-batches *add*
# gradients divided by their number, data-parallel ranks take the *mean*, and tensor ranks, which hold parts of
# one sum, *add* inside their layers. Sums and means can be taken in any order, which is why each technique can
# do its own and need not know of the others.
#
# PyTorch combines its own classes in the same order. (The course's `TorchMeshTraining`, in
# `scripts/manyhands/mesh/native.py`, has about 60 lines; it is tested against one process in the
# same way.)

# %% show="true"
from manyhands.mesh.native import torch_shard_and_cut

# %% [markdown]
# ### Who talks to whom?
#
# The ledger of lesson 04 sees every message. The next cell counts those of one step on eight ranks and draws a
# square for each pair that talks. Collectives are counted as rings, in which each rank sends to the next.
# Before you run it: on which axis will most bytes travel, and on which the fewest?


# %%
def messages_of_a_step():
    training = MeshTraining(make_model(), make_groups(SIZES), 2, shard_and_cut)
    place = coordinates(dist.get_rank(), SIZES)
    inputs, targets = batches(1)[0][:, place["dp"] :: 2]
    training.step(inputs, targets)
    with Ledger() as ledger:
        training.step(inputs, targets)
        training.finish()
    return ledger.entries


if check.ready(*GRID):
    pairs = mesh_figures.pair_bytes(run_ranks(messages_of_a_step, 8, timeout_s=120), SIZES)
    figures.show(
        mesh_figures.who_talks(pairs, 8), "A matrix of the ranks: squares where they talk."
    )
    per_axis = Counter()
    for axis, nbytes in pairs.values():
        per_axis[axis] += nbytes / 8
    for axis, nbytes in per_axis.most_common():
        print(f"along {axis}: {nbytes / 1e3:,.0f} kB sent per rank and step")
    assert [axis for axis, _ in per_axis.most_common()] == ["dp", "tp", "pp"]

# %% [markdown]
# Every square has one colour: ranks talk only along an axis, and in this step ranks that differ in two
# coordinates do not talk at all. Here most bytes travel along `dp`, for two reasons. A step has few tokens,
# so the activations of tensor parallelism are small beside the weights. And our FSDP is simple: inside a
# pipeline it reduces for every micro-batch, and gathers at least as often, while PyTorch's keeps its
# gradients whole until the end of the step. Along `pp` least travels, and so the pipeline can live with
# slow links.
#
# ## 4. One norm for the whole gradient
#
# Gradient clipping scales all gradients so that their common norm is at most c. On a mesh no rank knows that
# norm: each has shards of parts of a stage. Lesson 10 added up squares over one group. Here two more things
# matter. The parts lie on all three axes, so the sum goes over *all* ranks. And some numbers exist more than
# once: normalization weights and positions are equal on all tensor ranks, and a tied matrix is on two stages.
# Each number has to count once.
#
# So every gradient comes with its number of *holders*, the ranks that hold the very same numbers. If h ranks
# hold a number and each adds 1/h of its square, it counts once.

# %% exercise="mesh_norm" todo="14.4" minutes=10 difficulty=2 points=2
from manyhands.mesh.clip import mesh_norm

# %% check="14.4" tags=["nbval-check-output"]
check.mesh_norm(mesh_norm)


# %%
def norms_on_the_mesh():
    training = MeshTraining(make_model(), make_groups(SIZES), 2, shard_and_cut)
    place = coordinates(dist.get_rank(), SIZES)
    training.step(*batches(1)[0][:, place["dp"] :: 2])
    training.finish()
    parts = training.gradients()
    own = sum(grad.square().sum() for grad, _ in parts).sqrt().item()
    total = sum(grad.square().sum() for grad, _ in parts)
    dist.all_reduce(total)
    return own, total.sqrt().item(), mesh_norm(parts).item()


if check.ready(*GRID, "14.4"):
    model = make_model()
    model(*batches(1)[0]).backward()
    truth = nn.utils.get_total_norm([param.grad for param in model.parameters()]).item()
    own, plain, yours = zip(*run_ranks(norms_on_the_mesh, 8, timeout_s=120), strict=True)
    print(f"one process:               {truth:.6f}")
    print(f"each rank's own norm:      {min(own):.6f} to {max(own):.6f}")
    print(f"plain sum over all ranks:  {plain[0]:.6f}")
    print(
        f"yours:                     {yours[0]:.6f}, the same on all ranks: {len(set(yours)) == 1}"
    )
    assert abs(yours[0] / truth - 1) < 1e-5 and max(own) < truth < plain[0]

# %% [markdown]
# A rank's own norm is too small and differs from rank to rank: clipped by it, the parts of one gradient would
# be scaled differently, and nothing would raise an error. The plain sum counts the copies twice and comes out
# too large. Only the weighted sum is the norm of one process.
#
# ## 5. Which random numbers, and which means?
#
# Random numbers appear in three places, and each needs a different kind of agreement.
#
# - **Weights**: every rank builds the whole model and then cuts it, so all ranks must draw the same numbers.
# - **Data** (shuffling within a share, random changes of a sample): ranks with different samples must draw
#   different numbers, and the ranks of one model the same ones.
# - **Dropout**: between the cut layers every tensor rank has a copy of the same activation, so all must drop
#   the same elements; along `dp` and `pp` the activations are different, and the masks should be too. Where
#   each tensor rank has a part of its own, as with the attention of its own heads or with sequence
#   parallelism, its masks must differ as well: "own dropout".
#
# Write one function that gives the seed for a purpose and a place. `PURPOSES` is the tuple of the four names
# "weights", "data", "dropout" and "own dropout". `DATA_AXES` names the axes along which samples differ: "dp", or
# the axes "replicate" and "shard" of hybrid sharding (section 11). `MOST_RANKS` is the most ranks that a mesh may
# have.

# %% exercise="seed_of" todo="14.5" minutes=15 difficulty=2 points=2
from manyhands.mesh.seeds import seed_of

# %% check="14.5" tags=["nbval-check-output"]
check.seed_of(seed_of)

# %% [markdown]
# The table below is computed from your seeds, by comparing all ranks along each axis.

# %% tags=["nbval-check-output"]
if check.ready("14.5"):
    print(f"{'':12} {'pp':8} {'dp':8} tp")
    for what in PURPOSES:
        words = []
        for axis in SIZES:
            places = [dict.fromkeys(SIZES, 0) | {axis: number} for number in range(2)]
            seeds = {seed_of(what, 7, place, SIZES) for place in places}
            words.append("same" if len(seeds) == 1 else "differs")
        print(f"{what:12} {words[0]:8} {words[1]:8} {words[2]}")

# %% [markdown]
# The same question arises for **metrics**. Suppose each of the eight ranks reports a loss sum and a token count
# for its samples. Over which group should they be added? Only along `dp` are the samples different; the other
# ranks repeat the same numbers. The mean survives a sum over all ranks, since numerator and denominator are
# both four times too large, and that is why the mistake is easy to miss. Anything that is a *count* does not
# survive: tokens per second would be four times the truth.

# %% tags=["nbval-check-output"]
tokens = [1000 + 500 * (rank // 2 % 2) for rank in range(8)]  # they differ by dp only
print("tokens over all ranks:", sum(tokens), "- along dp:", tokens[0] + tokens[2])

# %% [markdown]
# ## 6. How equal is equal? (optional)
#
# Differences of a few 1e-7 were called rounding above. How do you know? A parallel program adds the same
# numbers in another order, and floating-point sums depend on the order. The question is by how much they may
# differ, so that a tolerance can let every reordering pass and still catch a bug.
#
# Take n numbers of random sign and of size r. Their sum has a size of about r√n. When numbers are added **one
# by one**, the k-th partial sum has size r√k, and rounding changes it by a random amount, whose standard
# deviation is at most its size times eps/√12. (eps is the distance from 1 to the next number, 1.2e-7 in
# float32; a rounding error is uniform within half of it on both sides.) Random errors add up by their squares:
# r² eps² (1 + 2 + ... + n)/12 ≈ r² eps² n²/24. When numbers are added **in pairs**, pairs of pairs and so on,
# there are log2(n) levels, and each contributes r² eps² n/12. The **spread** of the sum is the root of that,
# divided by the size of the result, r√n.

# %% exercise="spread_of_sum" todo="14.6" minutes=15 difficulty=2 points=2
from manyhands.mesh.spread import spread_of_sum

# %% check="14.6" tags=["nbval-check-output"]
check.spread_of_sum(spread_of_sum)

# %%
from manyhands.mesh.spread import measured_spread, tolerance

if check.ready("14.6"):
    counts, kinds = [4, 16, 64, 256, 1024], {}
    for dtype in (torch.float32, torch.bfloat16):
        for in_pairs in (False, True):
            name = (
                f"{str(dtype).removeprefix('torch.')}, {'in pairs' if in_pairs else 'one by one'}"
            )
            kinds[name] = dtype, in_pairs
    seen = {name: [measured_spread(n, *kind) for n in counts] for name, kind in kinds.items()}
    said = {name: [spread_of_sum(n, *kind) for n in counts] for name, kind in kinds.items()}
    figures.show(
        mesh_figures.spreads(counts, seen, said), "Spread of sums: points lie below lines."
    )
    shares = [a / b for name in kinds for a, b in zip(seen[name], said[name], strict=True)]
    print(f"measured spreads are {min(shares):.2f} to {max(shares):.2f} of the predicted ones")
    assert 0.6 < min(shares) and max(shares) < 1.0

# %% [markdown]
# The prediction follows the measurements for both types and both orders of addition, over six orders of
# magnitude. It is about a third too large, because "eps times the size" is the worst case: numbers lie between
# one power of two and the next, and only at the power itself is the gap eps times the number. The root mean
# square of the gap, which is what counts for a standard deviation, is about 0.74 of that.
#
# Now choose a tolerance: six spreads of a difference of two such sums are practically never exceeded by
# chance. Does it catch a bug? Below a gradient, the sum over 1,024 samples, is computed in a thousand other
# orders, and once with a "bug": one sample of the 1,024 is left out.

# %%
if check.ready("14.6"):
    generator = torch.Generator().manual_seed(1)
    terms = torch.randn(1024, generator=generator)
    orders = torch.stack([terms[torch.randperm(1024, generator=generator)] for _ in range(1000)], 1)
    sums = add_up(orders)
    limit = tolerance(sqrt(1024), 1024, torch.float32)
    largest = (sums - sums[0]).abs().max().item()
    bug = (add_up(terms[:-1, None]) - sums[0]).abs().item()
    print(
        f"tolerance {limit:.1e}: reordered sums differ by up to {largest:.1e}, the bug by {bug:.1e}"
    )
    assert largest < limit < bug

# %% [markdown]
# Rounding and bug are orders of magnitude apart, so the exact factor, six or ten, does not matter. What
# matters is to know the order of magnitude: with bfloat16 the tolerance would be 65,000 times as large, and
# the same bug would hide in it. That is why parity is tested in float32.
#
# ## 7. One number for a machine: C/W
#
# When does data parallelism stall? Let C be the FLOP/s of a rank and W the bytes/s that it sends. A step's
# gradients have the same size however many tokens it computes, while the computation that hides them grows
# with the tokens. So there is a number of tokens per rank from which on the messages cost nothing. Derive it:
# backward takes 4 FLOPs per parameter and token, and a ring all-reduce of gradients of b bytes sends
# 2 (n − 1)/n · b bytes per parameter. For FSDP, forward (2 FLOPs) has to hide one gather of (n − 1)/n · b
# bytes, and backward a gather and a reduction.

# %% exercise="tokens_to_hide" todo="14.7" minutes=10 difficulty=2 points=2
from manyhands.mesh.ratio import tokens_to_hide

# %% check="14.7" tags=["nbval-check-output"]
check.tokens_to_hide(tokens_to_hide)

# %% [markdown]
# The model's size cancels. With many ranks and 2 bytes per number the answer is **C/W itself**, for replicas
# and for FSDP alike: as many tokens per rank as FLOPs fit into the time of one byte.
#
# The same number limits tensor parallelism. By lesson 13, messages take as long as products when
# (N − 1) · b · C / (9 D W) = 1. Which number of ranks N is that? Round down: with more ranks the messages take
# longer than the products. One rank is always possible.

# %% exercise="largest_tensor_degree" todo="14.8" minutes=5 difficulty=1 points=1
from manyhands.mesh.ratio import largest_tensor_degree

# %% check="14.8" tags=["nbval-check-output"]
check.largest_tensor_degree(largest_tensor_degree)

# %% tags=["nbval-check-output"]
if check.ready("14.7", "14.8"):
    for name in ("A100-80GB", "H100-80GB", "B200"):
        gpu = GPUS[name]
        in_node, whole, single = gpu.node, group_link(gpu, 64), group_link(gpu, 64, stride=8)
        for link in (in_node, whole, single):
            ratio = gpu.flops_per_s / link.bytes_per_s
            degree = largest_tensor_degree(8192, ratio)
            print(f"{name:9} {link.name:19} C/W {ratio:6,.0f}: ", end="")
            print(
                f"{tokens_to_hide(ratio, 64):6,.0f} tokens per rank, at width 8,192 tp up to {degree}"
            )
        assert 1.1 < in_node.bytes_per_s / whole.bytes_per_s < 2.3

# %% [markdown]
# These numbers come from data sheets. Programs reach neither C nor W, and the ratio of what they reach can
# be larger or smaller, so take the numbers as first estimates. W is that of a group, as in lesson 13: a
# group that fills its nodes uses all eight network cards of each. Inside a node one to two and a half
# thousand tokens per rank suffice to hide gradients, and between whole nodes 1.1 (H100) to 2.3 times (B200)
# as many. A well-known book has the same numbers for the H100: 990e12 / 450e9 = 2,200 tokens in a node and
# 990e12 / 400e9 = 2,475 beyond one (Austin et al. 2025, chapter on GPUs). With gradient accumulation the
# tokens of one micro-batch count: the messages of replicas travel beside the last one only, those of FSDP beside
# each.
#
# A group with a single GPU in each node has one card, and needs eight times as many tokens as one that fills its
# nodes. Data parallelism beside tp 8 has such groups. But its eight tensor ranks work on the same tokens, so for
# each GPU it is again the same number.
#
# Tensor parallelism keeps above half of its ideal speed as long as tp is at most the number printed. At
# width 8,192 that is so over the eight GPUs of a node. Over two nodes, which is tp 16, it is so on the A100
# alone, and on the H100 nearly. With a single GPU in each node three ranks are already too many for an
# H100. From generation to generation C has grown faster than W on every link: from the A100 to the B200 the
# ratio has become 2.4 times as large inside a node and 3.6 times between whole nodes.
#
# ### Yours
#
# The next cell measures C (a matrix product, and a training step) and W (two ranks that exchange messages)
# on this machine. Then it puts your ratio to the test: two ranks train with data parallelism on a network
# that is slowed down on purpose, so that the predicted crossing should lie among the batches tried. The
# time without the slow network is measured in the same run.

# %%
if check.ready("14.7"):
    here = bench.measure_ratio()
    print(f"C: {here.product_flops_per_s / 1e9:.0f} GFLOP/s in a product, ", end="")
    print(
        f"{here.step_flops_per_s / 1e9:.0f} in a training step; W: {here.bytes_per_s / 1e9:.2f} GB/s"
    )
    print(f"C/W of this machine: {here.flops_per_byte:.0f} FLOPs per byte")
    found = bench.crossing(batches=(8, 16, 24, 40), num_rounds=3)
    figures.show(
        mesh_figures.crossing(found),
        "The times with and without a slow network approach each other where messages become hidden.",
    )
    print(
        f"slow network, C/W {found.flops_per_byte:,.0f}: predicted {found.predicted_tokens:.0f} ",
        end="",
    )
    print(f"tokens per rank, seen at {found.measured_tokens:.0f}")

# %% [markdown]
# On an idle machine the messages take longer than backward left of the crossing, so a step lasts longer
# than without the slow network. Right of it they fit behind backward, and the points nearly meet. Where
# they do not, one reason is the last bucket of a step, which has nothing to hide behind. On a machine
# that is busy with other work they meet less, and the measured crossing moves as well.
#
# ## 8. Which technique when? (optional)
#
# A common guideline has five classes: small models on one GPU, medium ones with DDP, large ones with FSDP,
# massive ones with tensor or pipeline parallelism, extreme ones with FSDP and one of these two. What do the
# words mean? Write the guideline as a function, with numbers: N parameters need 16 N bytes of state, and
# half of a GPU's memory is left for activations.

# %% show="true"
from manyhands.mesh.choosing import CLASSES, STATE_BYTES

# %% exercise="approach" todo="14.9" minutes=10 difficulty=1 points=2
from manyhands.mesh.choosing import approach

# %% check="14.9" tags=["nbval-check-output"]
check.approach(approach)

# %% [markdown]
# **1,024 sequences on 2,048 GPUs.** Data parallelism gives each rank at least one sequence, so with twice as
# many GPUs as sequences half of the GPUs would be idle. Tensor parallelism is one way out, since its ranks
# share their samples. How many tensor ranks are needed?

# %% exercise="smallest_tensor_degree" todo="14.10" minutes=10 difficulty=1 points=1
from manyhands.mesh.choosing import smallest_tensor_degree

# %% check="14.10" tags=["nbval-check-output"]
check.smallest_tensor_degree(smallest_tensor_degree)

# %% [markdown]
# **A unit that does not fit.** With more ranks FSDP makes each rank's share of the state smaller, but not the
# units, because a unit is whole while it computes: at the peak a rank has the weights of two units and the
# gradients of one, and besides them the root (lesson 10), which is left out here. So there are models that FSDP
# cannot train on *any* number of GPUs. Write how many ranks a model needs, or None if no number of ranks is
# enough.

# %% exercise="ranks_to_fit" todo="14.11" minutes=10 difficulty=2 points=1
from manyhands.mesh.choosing import ranks_to_fit

# %% check="14.11" tags=["nbval-check-output"]
check.ranks_to_fit(ranks_to_fit)

# %% tags=["nbval-check-output"]
if check.ready("14.10", "14.11"):
    print("1,024 sequences on 2,048 GPUs need tp =", smallest_tensor_degree(1024, 2048))
    gpu_bytes = 80 * 10**9
    for name, unit in (
        ("units of 3.2 billion, a block each", 3.2e9),
        ("units of 25 billion", 25e9),
    ):
        ranks = ranks_to_fit(405 * 10**9, int(unit), gpu_bytes)
        words = "no number of GPUs will do" if ranks is None else f"{ranks} GPUs of 80 GB"
        print(f"FSDP of 405 billion parameters in {name}: {words}")

# %% [markdown]
# (These GPUs hold the state and the whole units, but no activations yet.) Tensor parallelism has a second benefit here:
# with tp = 2 each GPU keeps half of most activations of its sequences, and gathers half as many bytes for each
# unit. And where a unit does not fit, it has to be wrapped as several smaller units, or its matrices have to be
# cut, which makes each part a smaller unit.
#
# ## 9. Plan it
#
# Which layout is best for a given model on given GPUs? All formulas are there: bytes of state and
# activations (09), what FSDP gathers (10), bubble and micro-batches in flight (12), a ring's time (04), the
# messages of tensor parallelism (13). The **planner** adds them up for every layout, with the data sheet of a
# GPU and a dozen constants, such as the share of the data sheet that a large matrix product reaches. Others
# have measured most of them with programs that do nothing else, and a few are estimates, such as the 5 % that
# the allocator adds (`scripts/manyhands/planner/hardware.py` names the sources and says which is which). None is
# fitted to a training run.
#
# Let us plan Llama 3 405B on 16,384 H100 with 16 million tokens per step, and gradients kept in float32, as its
# authors did. Before you run it, write down your own layout: how many tensor ranks, how many stages?
#
# The planner's words: **exposed** communication is what no computation hides; **utilisation** is the share of
# the data sheet's FLOP/s that the model's own FLOPs use; `x 16` are micro-batches of a step on each replica;
# `sp` is sequence parallelism among the tensor ranks (lesson 13); **interleave** 4 gives each rank four short
# stages instead of a long one (lesson 12); **selective** recomputation repeats only norms and activation
# functions in backward, and attention where it is not fused, which need much memory and little time.

# %%
from manyhands.planner import figures as plan_figures, published, reasons
from manyhands.planner.memory import Layout, Training
from manyhands.planner.plans import plans, price
from manyhands.planner.shape import MODELS, ModelShape

your_tp, your_pp = None, None  # your numbers

# %% answer="true"
your_tp, your_pp = 8, 16

# %% tags=["nbval-check-output"]
LLAMA = Training(
    MODELS["llama3-405b"], GPUS["H100-80GB"], 16384, 2048, gradients="float32", kernels="fused"
)
found = plans(LLAMA)
best = found[0]
print(f"{len(found):,} layouts can run, {sum(plan.fits for plan in found):,} fit")
fastest = {}
for tp in (1, 2, 4, 8, 16):
    fitting = [plan.step_s for plan in found if plan.fits and plan.layout.tp == tp]
    fastest[tp] = min(fitting)
    print(f"tp {tp:2}: {len(fitting):3} fit, the fastest takes {fastest[tp]:5.2f} s per step")
assert min(fastest, key=fastest.get) == 8 and fastest[1] > 5 * fastest[8]
print(reasons.why(found))
print()
print(reasons.explain(best))

# %%
paper = price(LLAMA, Layout(128, 16, 8, True, 1, 1, "selective", 4))
smaller = plans(LLAMA._replace(gradients="bfloat16"))[0]
for what, yours in (("tp", your_tp), ("pp", your_pp)):
    theirs, planned = getattr(paper.layout, what), getattr(best.layout, what)
    print(f"{what}: you said {yours}, the paper has {theirs}, the planner {planned}")
print(
    f"the published mesh, by the planner with selective recomputation: utilisation {paper.mfu:.0%}"
)
print("the paper reports 41 %")
print("with 16-bit gradients the planner would take", reasons.layout_words(smaller))
fit = sum(plan.fits for plan in found) / len(found)
figures.show(
    plan_figures.plane(found, {"best plan": (best.memory_bytes / GIB, best.step_s)}),
    f"A cloud of plans over memory and time; {fit:.0%} of them fit.",
)
assert best.layout[:3] == paper.layout[:3] and abs(paper.mfu - 0.41) < 0.02

# %% [markdown]
# The planner finds the published mesh (Grattafiori et al. 2024, table 4: tp 8, pp 16, dp 128) and almost its
# utilisation. Is tensor parallelism needed for that? For this batch the planner says yes: without it the
# fastest layout that fits takes seven times as long, also because 2,048 sequences are too few for 16,384 GPUs
# with one sequence each. Between tp 8, in one node, and tp 16, over two, the difference is less than 2 %, which is
# less than the planner's error: longer messages stand against a shorter pipeline with a smaller bubble.
#
# How close was the decision? With gradients in 16 bits, 8 stages win: the bubble is smaller, and the memory
# that the gradients leave is enough for more layers per GPU. So the type of the gradients decides how many
# stages are best. There is a difference, too. The paper's authors could do without any recomputation, since
# they gave back memory early that the planner counts to the end of a step. (Their network is an Ethernet
# with the 400 Gb/s of the InfiniBand in the table.)
#
# ### Is the planner right?
#
# The next cell compares it with runs that others have published: 433 of them, from seven sources. "near"
# counts those whose step time is predicted within 20 %, "bias" is the median error (negative: the planner is
# too fast), "order" tells how far the planner puts runs into the same order of utilisation as they had (1: the
# same order, 0: no relation). The other columns are about memory: how many of the runs that ran fit by the
# planner, how many of those that ran out of memory (OOM) do not, and the predicted memory over the reported
# one, where a source reports it.

# %% tags=["nbval-check-output"]
print(published.table())
print()
print(published.by_replicas())
everything = published.compare(published.runs())
assert everything.near > 0.75 * everything.timed and everything.median_error < 0

# %% [markdown]
# Four in five step times are within 20 %. (Half of them are llm-foundry's, of which 194 of 212 are near; of
# the others it is 140 of 204.) The planner is too fast for three runs in four, and over all runs its median
# error is -9 %, since it leaves out stragglers, pauses between kernels, the reading of data, and messages
# that slow down the computation beside them. In two of the seven sources it does not know at all which run
# uses its GPUs better.
#
# How far off the planner is depends on the number of data-parallel ranks, as the second table shows: the more of
# them, the more it is too fast. With hundreds it is not reliable. Of the 21 runs with more than 256 only six are
# within 20 %, and the six of them that use ZeRO-3 took more than twice the predicted time in the median. (All
# six are DeepSpeed's of 2021, so part of that may be its software.) The planner knows rings without faults, on
# which nobody waits for a straggler, and so it recommends such layouts too often. The line that
# `scripts/plan.py` prints below its plans says how far off it was for runs with about as many replicas.
#
# Whether a training fits is right for 422 of the 425 runs that ran, and for six of the eight that ran out
# of memory. The other two are BLOOM runs. One is 2.5 GiB below the limit by the planner. The other, with
# 206 billion parameters, is far below it, but a count that refused it would also refuse a run of 195
# billion with twice the micro-batch, and that one ran in the same layout. Something is different there that
# the table does not tell. All rows can be remade by `python scripts/plan.py --published`.
#
# ### What if the network were slower?
#
# A plan is only best for a machine. Take Llama 3 8B on 64 GPUs of type H100. Find a bandwidth between nodes
# at which another mesh wins, and write it down, in GB/s per GPU. (The data sheet says 50.)

# %%
slow_gb_per_s = None  # your number

# %% answer="true"
slow_gb_per_s = 1.0


# %%
def best_with(gb_per_s):
    gpu = GPUS["H100-80GB"]
    gpu = gpu._replace(network=gpu.network._replace(bytes_per_s=1e9 * gb_per_s))
    return plans(Training(MODELS["llama3-8b"], gpu, 64, 128))


quick = best_with(50)
print("at 50 GB/s:", reasons.layout_words(quick[0]))
if slow_gb_per_s is None:
    print("no bandwidth yet: set slow_gb_per_s")
else:
    slow = best_with(slow_gb_per_s)
    print(f"at {slow_gb_per_s} GB/s:", reasons.layout_words(slow[0]))
    print(reasons.why(slow))
    verdict = "another mesh wins" if slow[0].layout[:3] != quick[0].layout[:3] else "still the same"
    print(verdict)

# %% [markdown]
# On a slow network, a mesh that sends fewer bytes between nodes can win although it is slower inside a node. If
# your notebook has widgets, you can now turn the
# knobs yourself: number of GPUs, bandwidth between nodes, global batch. The static figure above shows the same
# plane for the 405B model.


# %%
def what_if(gpus, network_gb_per_s, sequences):
    gpu = GPUS["H100-80GB"]
    gpu = gpu._replace(network=gpu.network._replace(bytes_per_s=1e9 * network_gb_per_s))
    found = plans(Training(MODELS["llama3-8b"], gpu, gpus, sequences))
    best = found[0]
    name = f"dp {best.layout.dp} pp {best.layout.pp} tp {best.layout.tp}"
    return plan_figures.plane(found, {name: (best.memory_bytes / GIB, best.step_s)})


figures.show_sliders(
    what_if,
    "plans of Llama 3 8B",
    gpus=[8, 16, 32, 64],
    network_gb_per_s=[50, 12.5, 3, 1],
    sequences=[64, 128, 256],
)

# %% [markdown]
# ## 10. Run it as a job
#
# The job trains on a mesh of all its ranks with your functions. Here two ranks form the smallest mesh, tp 2; on
# a cluster it takes two nodes of four GPUs, `sbatch sbatch/mesh.sbatch --pp 2 --dp 2 --tp 2`, with the stages on
# different nodes. Its log draws the mesh, and validation loss is averaged along `dp` only.

# %%
JOB = (*GRID, "14.4", "14.5")
if check.ready(*JOB):
    check.keep()
    flags = "--steps 20 --layers 2 --block 32 --micro-batches 2 --valid-tokens 8192"
    watch.run("../sbatch/mesh.sbatch", "--impl", "mine", *flags.split())

# %% [markdown]
# The log names your functions, draws the mesh, and gives at its end the loss on the test split, which has
# fallen from 3.6, the loss of a guess among 36 characters. This is the end of the core.
#
# ## 11. Hybrid sharding (optional)
#
# FSDP over hundreds of ranks gathers every unit across nodes, usually twice for each micro-batch. **Hybrid
# sharding** (HSDP) shards the model within a group of ranks, often a node, and keeps a replica in each such
# group. Gathers stay inside a replica. Only gradients travel between replicas, and each rank sends just
# those of its own shard. Write what a rank sends and keeps.

# %% exercise="hsdp_bytes" todo="14.12" minutes=10 difficulty=2 points=1
from manyhands.mesh.hsdp import hsdp_bytes

# %% check="14.12" tags=["nbval-check-output"]
check.hsdp_bytes(hsdp_bytes)

# %% tags=["nbval-check-output"]
if check.ready("14.12"):
    print("8 billion parameters on 64 GPUs, messages in bfloat16, GB per rank")
    print("replicas   in the shards   between replicas   kept")
    for replicas in (1, 2, 4, 8):
        one = hsdp_bytes(8 * 10**9, replicas, 64 // replicas, 2)
        sent, across = one["shard"] / 1e9, one["replicate"] / 1e9
        kept = hsdp_bytes(8 * 10**9, replicas, 64 // replicas)["kept"] / 1e9  # lesson 09's 16 bytes
        print(f"{replicas:8} {sent:12.1f} {across:18.2f} {kept:9.1f}")

# %% [markdown]
# More replicas hardly change what travels inside a copy, but with eight replicas of eight GPUs that traffic
# stays inside a node, while across nodes only a few gigabytes go. The price is memory: what a rank keeps grows
# with the number of replicas. So HSDP is a choice between memory and slow links.
#
# Can a formula for 64 GPUs be checked without 64 GPUs? PyTorch has a fake process group, which accepts every
# message and sends none, so that one process can be rank 0 of a mesh of any size. The gradients it computes
# are wrong. But PyTorch's own FSDP starts the same messages there, of the same sizes and in the same groups, as
# on 64 real ranks, and the ledger counts them. (`torch_hsdp_on_fake_ranks`, in
# `scripts/manyhands/mesh/hsdp.py`, is given.)

# %% tags=["nbval-check-output"]
from manyhands.mesh.hsdp import torch_hsdp_on_fake_ranks


def messages_of_rank_0(replicas, shards):
    def make_units():
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3)))
        return model, list(model)

    ones = torch.ones(4, 256)
    return torch_hsdp_on_fake_ranks(make_units, ones, replicas, shards, Ledger).entries


if check.ready("14.12"):
    for replicas in (2, 4, 8):
        sizes = {"replicate": replicas, "shard": 64 // replicas}
        entries = run_ranks(messages_of_rank_0, 1, *sizes.values(), join=False)
        sent = dict(mesh_figures.pair_bytes(entries, sizes).values())
        yours = hsdp_bytes(3 * 256**2, *sizes.values())
        for axis in ("shard", "replicate"):
            print(f"{sizes}, {axis}: PyTorch {sent[axis]:,.0f} bytes, yours {yours[axis]:,}")
            assert round(sent[axis]) == yours[axis]

# %% [markdown]
# Every byte is where your function says.
#
# ## 12. A time machine (optional)
#
# The planner is a formula. Is there an independent witness? Record what the training by hand *did* on eight
# ranks: how many FLOPs between two messages, and which message to whom. None of that depends on the machine. A
# virtual clock can then replay the same programs for any C and any network, and on more data-parallel ranks
# than you have: each of 512 virtual ranks runs the program of the recorded rank at its place.

# %%
from manyhands.simulator import figures as step_figures
from manyhands.simulator.clock import replay, summary
from manyhands.simulator.traffic import Machine
from manyhands.tensor.cost import Link

SMALL = {"vocab_size": 64, "block": 32, "layers": 4, "heads": 4, "width": 192}
C = 100e9  # FLOP/s of a rank: a small one, for a small model


def machine(gb_per_s, node_gb_per_s=10):
    """Links of a network of the first speed along pp and dp, and one of the second along tp."""
    network = Link("network", 1e9 * gb_per_s, 1e-6)
    return Machine(C, {"pp": network, "dp": network, "tp": Link("node", 1e9 * node_gb_per_s, 1e-6)})


programs = bench.record_step(SIZES, SMALL)
larger = {"pp": 2, "dp": 128, "tp": 2}
rows = {"as recorded": replay(programs, SIZES, machine(5))}
rows["the same program"] = replay(programs, SIZES, machine(5), larger)
rows["rank 4 half as fast"] = replay(programs, SIZES, machine(5), larger, {4: 2.0})
figures.show(
    step_figures.replays(rows, [0, 2, 4]), "Time lines of three ranks; a straggler delays all."
)
calm, delayed = (summary(row).step_s for row in list(rows.values())[1:])
assert delayed > 1.1 * calm

# %% [markdown]
# One slow rank of 512 delays everybody, although no message is sent to all: its data-parallel group, its tensor
# partner and its pipeline wait for it, and through them all others do. Now let the network change. The figure
# shows the time of a step and the share of exposed communication, on up to 512 ranks with the same number of
# tokens each, on a fast and on a slow network.

# %%
counts = [8, 32, 128, 512]
scaled = {
    f"{speed} GB/s": [
        summary(replay(programs, SIZES, machine(speed), {"pp": 2, "dp": n // 4, "tp": 2}))
        for n in counts
    ]
    for speed in (5, 1)
}
figures.show(step_figures.against_ranks(counts, scaled), "Step time and exposed share by ranks.")
for many in scaled.values():
    assert all(few.step_s < more.step_s for few, more in itertools.pairwise(many))

# %% [markdown]
# The tokens per rank stay the same, so without messages the curves would be flat. Why do they rise? A ring
# of n ranks sends (n − 1)/n of the bytes (lesson 04). From 8 ranks to 32, `dp` grows from 2 to 8 and this
# share from 1/2 to 7/8, which is the steep beginning of the slow network's curve. Afterwards the bytes
# hardly grow, but n − 1 latencies add up for each message, on both networks alike. At 512 ranks `dp` is
# 128, and every gather begins with 127 µs of them. Beside the long messages of a large model that is
# little; beside those of this small one it is much. With 1,024 data-parallel GPUs the latencies add up to 4
# to 10 ms for each gather, by those that NCCL assumed (lesson 13), and then they show in large models as
# well: a limit of plain FSDP, and one reason for hybrid sharding.
#
# ### Planner and clock
#
# Both take the time of one collective from lesson 04. All else, which messages there are and who waits for
# whom, the clock takes from the recording and the planner from its formulas. Do they agree? Give the planner
# the same C and the same links, and no other cost.


# %% tags=["nbval-check-output"]
def planned_s(sizes, micro_batches, gb_per_s):
    full = {axis: sizes.get(axis, 1) for axis in ("dp", "pp", "tp")}
    reached = 0.8  # LINK_SHARE: the planner believes that of a link
    gpu = GPUS["H100-80GB"]._replace(
        flops_per_s=C,
        matmul_share=1.0,
        attention_share=0.5,  # the recorder counts all scores, the planner the causal half
        memory_bytes_per_s=1e30,
        node=Link("node", 10e9 / reached, 1e-6),
        network=Link("network", 1e9 * gb_per_s / reached, 1e-6),
        per_node=full["tp"],
    )
    shape = ModelShape(4, 192, 4, 4, 768, 64, 32, gated=False, tied=True)
    training = Training(shape, gpu, prod(full.values()), 8 * full["dp"], gradients="float32")
    zero = 3 if full["dp"] > 1 else 0
    return price(training, Layout(*full.values(), False, zero, 8 // micro_batches)).step_s


for sizes, m in (({"dp": 2, "tp": 2}, 1), ({"pp": 4, "dp": 1, "tp": 1}, 8), (SIZES, 4)):
    recorded = programs if sizes == SIZES else bench.record_step(sizes, SMALL, micro_batches=m)
    for speed in (1000, 10, 1):
        links = {axis: link for axis, link in machine(speed).links.items() if axis in sizes}
        clock_s = summary(replay(recorded, sizes, Machine(C, links))).step_s
        plan_s = planned_s(sizes, m, speed)
        print(f"{sizes}, {speed:4} GB/s: clock {1e3 * clock_s:5.1f} ms, ", end="")
        print(f"planner {1e3 * plan_s:5.1f} ms, {plan_s / clock_s - 1:+.0%}")
        assert speed == 1 or abs(plan_s / clock_s - 1) < (0.15 if speed == 10 else 0.05)

# %% [markdown]
# While the network is fast they agree within a few per cent, bubble included, and within 15 % at 10 GB/s. At 1
# GB/s the planner is too fast for meshes with `dp`, by almost half where there are several micro-batches. It
# assumes that gradients are reduced once per step, beside backward, as PyTorch does, but our FSDP waits for
# each of its reductions and makes them for every micro-batch. The clock replays what the code really did. So a
# formula holds as far as its assumptions do, and a recording of the real code tells where that is.
#
# ## 13. All techniques on four ranks (optional)
#
# Lesson 13 compared the techniques on two ranks. Four ranks allow combinations: FSDP x TP and PP x DP.

# %%
if check.ready(*GRID):
    names = ("one process", "ZeRO-3", "tensor", "FSDP x TP", "PP x DP")
    chosen = {name: way for name, way in ways_for(4).items() if name in names}
    setting = Setting(vocab=128, block=16, micro_batches=2)
    found = run_ranks(measure.compare, 4, setting, ways=chosen, steps=1, timeout_s=120)[0]
    print(compare_figures.table(found))
    figures.show(compare_figures.draw(found), compare_figures.in_words(found))
    sent = {name: sum(way["sent"].values()) for name, way in found["ways"].items()}
    assert sent["PP x DP"] < sent["FSDP x TP"] < 0.6 * sent["ZeRO-3"]

# %% [markdown]
# FSDP x TP keeps about as little state as ZeRO-3 or tensor parallelism alone, and sends half of what ZeRO-3
# sends. Its gathers and reductions are a third of ZeRO-3's, because half of the model is shared by two
# ranks instead of the whole by four; the rest are tensor messages, between two ranks and of half of the
# samples. PP x DP keeps half of the model per rank, because its two pipelines are copies of each other, and
# sends least. On a machine with fewer cores than ranks every way can be slower than one process: what the
# techniques save there is memory.
#
# ### Your own runs in the plane
#
# Can the planner also say what *your* machine takes? Tell it C and W, measured once more, and that nothing else
# costs time. The next cell measures four ways on two ranks and puts them into the plane of all plans for the
# same model. Before you run it: should your runs need more or less than planned, of time and
# of memory?

# %%
if check.ready("14.7"):
    here = bench.measure_ratio(num_rounds=3)
    names = ("DDP", "ZeRO-3", "pipeline (1F1B)", "tensor")
    chosen = {name: way for name, way in ways_for(2).items() if name in names}
    setting = Setting(block=64)
    found = run_ranks(measure.compare, 2, setting, ways=chosen, steps=2, timeout_s=120)[0]
    training = training_of(setting, 2, here.step_flops_per_s, here.bytes_per_s)
    stars = {}
    for name, (plan, nbytes, seconds) in beside(found, training).items():
        stars[f"{name}, yours"] = nbytes / GIB, seconds
        print(
            f"{name:16} planned {plan.memory_bytes / 1e6:5.1f} MB, {1e3 * plan.step_s:5.1f} ms; ",
            end="",
        )
        print(f"yours {nbytes / 1e6:5.1f} MB, {1e3 * seconds:5.1f} ms")
        assert nbytes > plan.memory_bytes
    figures.show(
        plan_figures.plane(plans(training), stars), "Your four runs beside the cloud of plans."
    )

# %% [markdown]
# Your runs need more memory than planned, mostly because the planner counts activations in 16 bits and
# these ranks keep 32. Usually they also take longer, since the planner leaves out all that Python and the
# operating system do between two products. On an idle machine ZeRO-3 and tensor parallelism are the
# furthest from their plans, because they wait for several messages in each block, and the planner was told
# that messages have no latency. (If the machine was busy with other work for a part of the cell, the times
# say little.)
#
# ## Recap
#
# You can now
#
# - number the ranks of a mesh, make its groups, and say which technique belongs on which axis and why,
# - combine FSDP, tensor parallelism and a pipeline, equal to one process, with one norm for all gradients,
# - say which random numbers agree on which axis,
# - (optional) choose a tolerance that separates rounding from bugs,
# - tell from C/W when messages are hidden, and plan a training on any number of GPUs.
#
# **Questions**
#
# <details><summary>A mesh of nodes with 8 GPUs has pp 4, dp 8 and tp 8. A colleague places tp outermost "because it is the most important". What happens?</summary>
#
# Neighbours in a tensor group are then 32 ranks apart (pp · dp), so all eight are on different nodes. All
# four all-reduces of each block cross the network, each group by a single card per node, and in our layers
# nothing hides them: by the C/W of one card, eight tensor ranks wait nearly four times as long as they
# compute at width 8,192 on the H100.
#
# </details>
#
# <details><summary>On a mesh with tp 2 the training loss is right, but gradient clipping makes the weights of the normalization layers drift apart between the tensor ranks. What was forgotten?</summary>
#
# Each rank scaled by a norm of its own. The squares have to be added over all ranks before the root, with the
# copies counted once; then all ranks scale alike.
#
# </details>
#
# <details><summary>You double dp and keep the global batch, the micro-batch and the rest of the mesh. Which parts of the planner's step time do not halve?</summary>
#
# The bubble keeps its seconds: it lasts pp − 1 slots, however few micro-batches there are. Exposed messages of
# data parallelism do not shrink either, because they hide behind one micro-batch only (without a pipeline,
# ZeRO-3 waits in each micro-batch). And where every replica steps all of its parameters, which is without
# ZeRO, the optimizer's time stays as well.
#
# </details>

# %%
check.summary()

# %% [markdown]
# **Sources.** Meshes and 3-D parallelism: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473. Llama 3:
# Grattafiori et al. 2024, https://arxiv.org/abs/2407.21783. Clipping: Pascanu et al. 2013,
# https://arxiv.org/abs/1211.5063. Rounding: Higham 1993, SIAM J. Sci. Comput. 14. Five classes, 1,024
# sequences on 2,048 GPUs: NVIDIA's teaching kit on generative AI, lecture 9.1. C/W: The Ultra-Scale Playbook,
# 2025, https://huggingface.co/spaces/nanotron/ultrascale-playbook, and Austin et al. 2025, "How to Scale Your
# Model", https://jax-ml.github.io/scaling-book/gpus/. Published runs:
# `scripts/manyhands/planner/stored_published.json` names the source of each. PyTorch's meshes:
# https://docs.pytorch.org/tutorials/recipes/distributed_device_mesh.html.
