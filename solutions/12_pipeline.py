# ---
# manyhands: {title: Pipeline parallelism, goal: "Cut a model into stages by hand, run them by schedules that are data, equal to one process, and predict and measure the bubble", job: {flags: "--steps 100 --layers 4 --block 32", loss: [1.28, 1.45]}}
# ---

# %% [markdown]
# # 12 Pipeline parallelism
#
# In data parallelism every rank computes all layers. The same holds when the weights are sharded: they come
# and go, but each rank computes all layers for its own samples. In this lesson the *layers* are divided among
# the ranks: rank 0 has the first ones, rank 1 the next ones, and so on. Each rank's part of the model is a
# **stage**. The weights never travel. Instead the activations at the cuts travel forward, and their gradients
# travel back.
#
# ![Four micro-batches pass three stages: rank 0 works on micro-batch 2 while rank 1 works on 1 and rank 2 on 0; activations go to the next rank, gradients come back](figures/pipeline_stages.svg)
#
# There is a catch. Stage 1 has nothing to do until stage 0 is done, so with one batch only one rank works at
# a time. The remedy is to cut the batch into **micro-batches**, so that the stages work on different
# micro-batches at the same time. The time in which ranks still have to wait is called the **bubble**. You
# will predict it, see it in a chart of your own run, and find the number of micro-batches with which a step
# is fastest.
#
# Sections marked *optional* can wait for a second sitting: no core section needs their exercises. Where the
# job can use such an exercise, it takes the course's own function until yours is there. (The next cell is
# folded, since it holds mostly imports.)

# %% jupyter={"source_hidden": true}
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from manyhands.checks import pipeline as check, score
from manyhands.collectives.trees import Group, device_of
from manyhands.data_parallel.replicas import average_gradients
from manyhands.instruments import figures
from manyhands.instruments.ledger import Ledger, traffic
from manyhands.instruments.live import Live, parts_of
from manyhands.jobs import watch
from manyhands.models.transformer import Transformer
from manyhands.pipeline import bench, figures as draw, stages
from manyhands.pipeline.bubble import Span
from manyhands.pipeline.engine import Setup
from manyhands.pipeline.schedules import Action, Schedule, in_words
from manyhands.pipeline.stages import Waiting, cut, layers_of, measure
from manyhands.pipeline.wiring import Tied, find_tied
from manyhands.ranks import lab
from manyhands.ranks.failures import RanksHung, RuleBroken
from manyhands.ranks.lab import run_ranks

lab.warm_up()
torch.set_num_threads(1)  # as the ranks have, so that times can be compared
print(
    f"torch {torch.__version__}, {os.cpu_count()} cores; the ranks of this notebook use CPU + gloo"
)

# %% [markdown]
# ## 1. Cut a model into stages
#
# Our Transformer is a list of layers that run one after the other: the embedding, the blocks, and a last
# layer with the norm and the head. `layers_of` makes this list, and the layers share the model's parameters.
# A cut is given by **bounds**: stage s has the layers from `bounds[s]` to `bounds[s + 1] - 1`.
#
# A pipeline is as fast as its slowest stage, because all other stages wait for that one. So the stages should
# take equally long, which is not the same as having equally many layers. `measure` runs each layer forward
# and backward and returns its time. Guess first which layer takes longest.

# %%
torch.manual_seed(0)
large = Transformer(vocab_size=8000, block=32, layers=6, heads=4, width=128)
tokens = torch.randint(8000, (8, 32))
costs = measure(layers_of(large), tokens)
names = ["embedding", *(f"block {i}" for i in range(6)), "norm, head"]
for name, cost_s in zip(names, costs, strict=True):
    print(f"{name:10} {1e3 * cost_s:5.1f} ms")
halves = [1e3 * sum(costs[start:stop]) for start, stop in pairwise([0, 4, 8])]
print(f"two stages of four layers each: {halves[0]:.1f} and {halves[1]:.1f} ms")
assert halves[1] > 1.3 * halves[0]

# %% [markdown]
# The embedding only looks up rows of a table. The head multiplies with the whole vocabulary, so with a
# vocabulary of 8,000 it takes as long as several blocks together. Two stages of four layers each are
# therefore far from equal, and rank 0 would spend much of its time waiting for rank 1. (`measure`
# discards its first round, which is slow because the memory is new.) The models below have a vocabulary of
# 50, so for them stages with equal numbers of layers are good enough.
#
# ## 2. Cut by cost (optional)
#
# Where should a model be cut? `partition(costs, num_stages)` returns the bounds of the stages. Of all
# possible cuts, it chooses one whose *slowest* stage takes as little time as possible.

# %% exercise="partition" todo="12.1" minutes=20 difficulty=2 points=2
from manyhands.pipeline.stages import partition

# %% check="12.1" tags=["nbval-check-output"]
check.partition(partition)

# %%
if check.ready("12.1"):
    for how, bounds in (("equal number", [0, 4, 8]), ("by cost", partition(costs, 2))):
        parts = [1e3 * sum(costs[start:stop]) for start, stop in pairwise(bounds)]
        print(f"{how:12} bounds {bounds}: stages of {parts[0]:.1f} and {parts[1]:.1f} ms")

# %% [markdown]
# Cut by cost, the two stages take about equally long, although one has far more layers.
#
# ## 3. Forward and backward across a cut
#
# How does a gradient pass a cut? Inside a stage autograd works as usual, but at a cut you have to do its work
# yourself:
#
# - forward: receive the activation, run the layers, send the output on.
# - backward: receive the gradient of the output, run autograd through the stage, send the gradient of the
#   *input* back.
#
# The next cell does this in one process, for a model of two layers. A message carries only numbers and no
# graph, hence `detach`. The received tensor is new, so it must ask for a gradient (`requires_grad_`), or
# there would be none to send back. `torch.autograd.backward(h, grad)` starts a backward at h with a given
# gradient of h, as `loss.backward()` starts one at the loss. Watch the last line.

# %% tags=["nbval-check-output"]
torch.manual_seed(0)
first, second, x = nn.Linear(3, 4), nn.Linear(4, 1), torch.randn(5, 3)
second(first(x)).sum().backward()  # the model in one piece
whole = first.weight.grad.clone()
first.zero_grad()

h = first(x)
received = h.detach().requires_grad_()  # what the message would bring
loss = second(received).sum()
torch.autograd.backward(loss)  # fills received.grad, and stops there
assert first.weight.grad is None
torch.autograd.backward(h, received.grad)  # goes on from there
print("the gradient behind the cut is that of the uncut model:", first.weight.grad.equal(whole))

# %% [markdown]
# The first backward ends at the cut, and the second one takes up where it ended.
#
# ### Messages
#
# We call the number of ranks p and the number of micro-batches m; stage s is on rank s modulo p. `Mail`
# carries the messages between stages, and you need two of its methods:
#
# - `self.mail.send(kind, tensor, stage, i)` starts to send the tensor of micro-batch i to `stage`. It returns
#   a *work* at once, whose `wait()` returns when the message has been sent. `kind` is `"F"` for an activation
#   and `"B"` for a gradient.
# - `self.mail.receive(kind, stage, i)` waits for the tensor of micro-batch i that is meant for `stage`, and
#   returns it.
#
# The shape and the type of a message (here float32) have to be known beforehand, because the receiver
# allocates the memory for it. Section 11 shows what can go wrong with messages on GPUs, and how `Mail`
# prevents it.
#
# ### A schedule is data
#
# What a rank does, and in which order, is a list of actions. `F2` is the forward of micro-batch 2 and `B2`
# its backward. A **schedule** has such a list for each rank. The simplest schedule takes one micro-batch
# through all stages and back before it starts the next one.

# %% show="true"
from manyhands.pipeline.schedules import naive

# %% tags=["nbval-check-output"]
print(in_words(naive(3, 2)))

# %% [markdown]
# A schedule fixes only the order. *When* an action runs follows from the messages, because a rank waits for
# the tensors that it needs.
#
# ### The engine
#
# The engine runs one action after another. `Pipeline(stages, schedule, loss_fn, shape)` makes it from a
# dictionary of this rank's modules by the number of their stage, the schedule of all ranks, the loss
# function, and the shape of a message. Half of the engine is given, in two classes. The first, `Setup` (in
# `scripts/manyhands/pipeline/engine.py`), prepares what your methods find in `self`:
#
# | in `self` | what it is |
# |---|---|
# | `p`, `m`, `last` | ranks, micro-batches, and the number of the last stage |
# | `inputs[i]`, `targets[i]` | micro-batch i of the batch, for the first and for the last stage |
# | `run(stage, x)` | the output of a stage; with `recompute=True` it uses lesson 09's `checkpoint` |
# | `loss_fn(out, targets)` | the mean loss of a micro-batch |
# | `mail` | see above |
# | `saved[stage, i]` | what a forward leaves for its backward: (input, output, work of its send) |
# | `sends`, `losses` | two lists: the works of the gradients' sends, and the losses, detached |
#
# The second class, `Engine`, is the loop. After the last action it waits for all sends and shares the loss,
# which only the last stage knows, but which all ranks need, to log it or to decide when to stop.

# %% show="true"
from manyhands.pipeline.engine import Engine

# %% [markdown]
# Write the two kinds of action:
#
# - `forward(stage, i)`: the input of micro-batch i is `self.inputs[i]` on stage 0, otherwise it comes by
#   mail. On the last stage, compute the loss as well. Divide it by m, because the mean over the batch is the
#   mean of the micro-batches' means, and the gradients of m parts add up in `.grad`.
# - `backward(stage, i)`: run autograd from the gradient of the output to the gradient of the input, and send
# the latter back, except on stage 0. Also wait for the work of the forward's send (the last stage has
# none). That takes no time, because the gradient of what was sent has already come back; the wait only
# completes the send.
#
# Compute inside `with self.span(Action("F", stage, i)):`, which records when this rank computes. Receive
# before this block, so that waiting does not count as work.

# %% exercise="Pipeline.forward Pipeline.backward" todo="12.2" minutes=40 difficulty=3 points=3
from manyhands.pipeline.engine import Pipeline

# %% check="12.2" tags=["nbval-check-output"]
check.Pipeline(Pipeline)

# %% [markdown]
# ### Is it the same training?
#
# We compare five steps of AdamW on three stages with four micro-batches against one process with the whole
# batch. Watch the largest difference between a weight of the pipeline and the same weight of the one process:
# rounding alone keeps it far below 1e-5.

# %%
V, T, L, D, B = 50, 16, 6, 64, 16  # vocabulary, tokens, blocks, width, sequences in a batch
ADAMW = {"lr": 3e-4, "eps": 1e-6}  # the rounding of a gradient that is nearly 0 decides no step


def batches(num=5):
    generator = torch.Generator().manual_seed(4)
    return torch.randint(V, (num, 2, B, T), generator=generator)


def make_layers(tie=False):
    torch.manual_seed(0)
    model = Transformer(V, T, L, heads=2, width=D)
    if not tie:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return layers_of(model)


def token_loss(scores, targets):
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


def one_process(tie):
    layers = nn.Sequential(*make_layers(tie))
    optimizer = torch.optim.AdamW(layers.parameters(), **ADAMW)
    for inputs, targets in batches():
        optimizer.zero_grad()
        token_loss(layers(inputs), targets).backward()
        optimizer.step()
    return [[param.detach() for param in layer.parameters()] for layer in layers]


WEIGHTS = {tie: one_process(tie) for tie in (False, True)}


def largest_difference(module, start, tie=False):
    """Between the layers of a stage, the first of which is layer `start`, and one process."""
    wanted = [param for layer in WEIGHTS[tie][start : start + len(module)] for param in layer]
    pairs = zip([param for layer in module for param in layer.parameters()], wanted, strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


# %%
def train_pipeline(make_schedule, p, m, tie=False, finish=None, v=1):
    """Largest difference of this rank's weights from those of one process."""
    rank, layers = dist.get_rank(), make_layers(tie)
    bounds = stages.partition([1.0] * len(layers), p * v)
    every = cut(layers, bounds)
    tied = find_tied(every, p)
    own = {stage: every[stage] for stage in range(rank, p * v, p)}
    pipe = Pipeline(own, make_schedule(p, m), token_loss, (B // m, T, D))
    params = [param for module in own.values() for param in module.parameters()]
    optimizer = torch.optim.AdamW(params, **ADAMW)
    for inputs, targets in batches():
        optimizer.zero_grad()
        pipe.step(inputs, targets)
        if finish:
            finish(tied)
        optimizer.step()
    return max(largest_difference(own[stage], bounds[stage], tie) for stage in own)


if check.ready("12.2"):
    off = max(run_ranks(train_pipeline, 3, naive, 3, 4))
    print(f"3 stages: the weights differ from one process by at most {off:.1e}")
    assert off < 1e-5

# %% [markdown]
# The difference is only rounding, so the training is the same.
#
# ### A weight in two places
#
# Now we change one thing. In the run above the head had a weight matrix of its own. In many Transformers the
# head and the embedding are one and the same matrix: their weights are **tied**. In a pipeline the embedding
# is on the first rank and the head on the last, so there are two copies of this matrix. What happens to them?

# %%
if check.ready("12.2"):
    off = max(run_ranks(train_pipeline, 3, naive, 3, 4, tie=True))
    print(f"3 stages, tied weights: off by at most {off:.1e}")
    assert off > 1e-4

# %% [markdown]
# Now the difference is far larger than rounding. Each copy gets only the part of the gradient that comes
# from its own use, so the two copies drift apart. Nothing warns you: no error is raised, and the losses are
# nearly those of the right training. The parts have to be added up after the last backward and before the
# optimizer's step. The job does so with the course's `sum_tied`, or with yours from the next section.
#
# ## 4. Add up the gradients of tied weights (optional)
#
# `find_tied` returns each parameter that stages on several ranks use, together with the list of these ranks.
# The course's `sum_tied` also takes a matrix that is frozen, or that one of the ranks did not use in this step;
# here neither occurs, so yours may leave that out.

# %% show="true"
from manyhands.pipeline.wiring import find_tied

# %% [markdown]
# Write `sum_tied` with `send` and `recv`. If a batch takes several calls of `step` (gradient accumulation,
# lesson 09), call `sum_tied` once, after the last of them: a second call would add sums to sums.

# %% exercise="sum_tied" todo="12.3" minutes=15 difficulty=2 points=2
from manyhands.pipeline.wiring import sum_tied

# %% check="12.3" tags=["nbval-check-output"]
check.sum_tied(sum_tied)

# %%
if check.ready("12.2", "12.3"):
    off = max(run_ranks(train_pipeline, 3, naive, 3, 4, tie=True, finish=sum_tied))
    print(f"3 stages, tied weights, summed: off by at most {off:.1e}")
    assert off < 1e-5

# %% [markdown]
# Now both copies receive the same gradient in every step. They also start equal, so they stay equal, and only
# rounding is left.
#
# ## 5. The bubble
#
# Who works when? The engine has recorded the start and the end of each action. To see the schedule itself, we
# take stages that compute nothing and only *wait*: 20 ms in forward and 40 ms in backward. Waiting needs no
# core, so four ranks can do it at the same time even on two cores, as four GPUs would compute. Do two ranks
# ever work at once?


# %%
def spans_of(make_schedule, p, m, v=1, forward_s=0.02):
    """When this rank computed what, in one step of stages that only wait."""
    own = {s: Waiting(forward_s / v, 2 * forward_s / v) for s in range(dist.get_rank(), p * v, p)}
    pipe = Pipeline(own, make_schedule(p, m), lambda out, _: out.mean(), (1, 4))
    for _ in range(2):  # the spans are those of the last step
        dist.barrier()
        pipe.step(torch.ones(m, 4), torch.ones(m, 4))
    return list(pipe.spans)


# %%
if check.ready("12.2"):
    found = run_ranks(spans_of, 4, naive, 4, 2)
    chart = draw.charts({"naive, 2 micro-batches": found})
    figures.show(chart, "Chart of four ranks: a micro-batch passes down and back, then the next.")
    in_order = sorted((start, stop) for spans in found for _, start, stop in spans)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(in_order))

# %% [markdown]
# They never do. The chart shows a staircase down and a staircase up, twice: at each moment one rank works and
# three wait. The share of the time in which ranks wait, the **idle share**, is therefore three quarters.
#
# ### Does a pipeline keep the GPUs busy?
#
# A slide that is often shown says that it does; others show one GPU at work while the rest wait, as you just
# saw. To keep all of them busy, a pipeline needs many micro-batches, and an order that starts the next one
# before the last one is back.
#
# **GPipe** is the simplest such order: all forwards, then all backwards. Ours takes the backwards in the
# order of the micro-batches, as PyTorch does; the paper takes the last micro-batch first. Make each entry an
# `Action(kind, stage, microbatch)`, not a plain tuple. The cell after the check
# compares one micro-batch with eight.

# %% exercise="gpipe" todo="12.4" minutes=5 difficulty=1 points=1
from manyhands.pipeline.schedules import gpipe

# %% check="12.4" tags=["nbval-check-output"]
check.gpipe(gpipe)

# %%
if check.ready("12.2", "12.4"):
    runs = {m: run_ranks(spans_of, 4, gpipe, 4, m) for m in (1, 8)}
    chart = draw.charts({f"GPipe, micro-batches: {m}": spans for m, spans in runs.items()})
    figures.show(chart, "Charts of GPipe: with one micro-batch mostly idle, with eight less so.")

# %% [markdown]
# Both kinds of picture are right, each for its own number of micro-batches. With one micro-batch most of the
# chart is grey. With eight a much smaller share of it is grey, though a bubble remains, and a busy machine
# adds gaps between the boxes. (Here each micro-batch takes the same time in both charts, so eight of them are
# eight times the work.)
#
# ## 6. Simulate it (optional)
#
# The schedule alone determines the bubble, so you can compute it without running anything. `simulate` works
# out when each action can start: as soon as its own rank is free *and* everything that it needs from another
# rank is done. Three helpers are given: `needed` lists those actions, `unit_cost` is a cost to begin with,
# and `stuck` writes the error message for a schedule in which no rank can go on.

# %% show="true"
from manyhands.pipeline.bubble import needed, stuck, unit_cost

# %% exercise="simulate" todo="12.5" minutes=25 difficulty=3 points=3
from manyhands.pipeline.bubble import simulate

# %% check="12.5" tags=["nbval-check-output"]
check.simulate(simulate)

# %% [markdown]
# The upper chart is simulated, with 20 ms for a forward and 40 ms for a backward. The lower one is your
# measured run. Compare their shapes; the slider shows what more micro-batches do.


# %%
def simulated(p, m):
    return simulate(gpipe(p, m), lambda action: 0.02 * unit_cost(action))


if check.ready("12.2", "12.4", "12.5"):
    both = {"GPipe, simulated": simulated(4, 8), "GPipe, measured": runs[8]}
    figures.show(draw.charts(both), "Charts: the simulated and the measured run look alike.")
    figures.show_sliders(
        lambda micro_batches: draw.charts({"GPipe, simulated": simulated(4, micro_batches)}),
        "the number of micro-batches",
        micro_batches=(1, 2, 4, 8, 16, 32),
    )

# %% [markdown]
# In the simulated run messages and Python take no time, so it is a lower bound: the measured run takes
# somewhat longer, and a lot longer on a busy machine.
#
# ## 7. Two formulas for one bubble
#
# How large is the bubble? Call the time of one micro-batch's forward and backward on a stage a **slot**. With
# p equal stages and m micro-batches a rank has m slots of work, and p - 1 slots are empty. The bubble is
# quoted relative to one of two times:
#
# - relative to the **ideal** time, the m slots, it is (p - 1) / m,
# - relative to the time that **passes**, the m + p - 1 slots, it is (p - 1) / (m + p - 1).
#
# For p = 4 and m = 4 the first is 75 % and the second 43 %. Both are in use: Narayanan et al. 2021 give the
# first, GPipe's authors the second. The number alone does not tell which one is meant, so always say it. If a
# rank has v stages instead of one, an empty slot is only 1/v as long, so p - 1 becomes (p - 1)/v, given at least
# p micro-batches; in the core of this lesson v is 1.
#
# Write both formulas, and `idle_share`, which computes the second one from a chart's times: for each rank a
# list of `Span`s, (action, start, stop).

# %% exercise="idle_share bubble" todo="12.6" minutes=10 difficulty=1 points=2
from manyhands.pipeline.bubble import bubble, idle_share

# %% check="12.6" tags=["nbval-check-output"]
check.bubble(idle_share, bubble)

# %% [markdown]
# Predict: 8 ranks run GPipe, and they may wait for at most a tenth of the time that passes. What is the
# smallest number of micro-batches with which they stay within this limit?

# %%
enough = None  # your number of micro-batches

# %% answer="true"
enough = 63

# %% tags=["nbval-check-output"]
if check.ready("12.6"):
    least = next(m for m in range(1, 100) if bubble(8, m)[1] < 0.1 + 1e-9)
    score("micro-batches", enough, 9 * (8 - 1), least)
    for p, m in ((4, 4), (4, 8), (8, 8), (8, 63), (64, 256)):
        of_ideal, of_total = map(float, bubble(p, m))
        print(f"p = {p:2}, m = {m:3}: {of_ideal:6.1%} of the ideal time, {of_total:5.1%} of all")

# %% [markdown]
# The share (p - 1) / (m + p - 1) is a tenth where m + p - 1 is ten times p - 1, that is, at m = 9 (p - 1). So
# the number of micro-batches has to grow with the number of ranks.
#
# Does a real run lose as much? The lines below are the two formulas, and the points are runs of GPipe on four
# stages that only wait, so they show what a machine with a core for each of the four ranks would show.

# %%
if check.ready("12.2", "12.4", "12.6"):
    shares = {m: idle_share(run_ranks(spans_of, 4, gpipe, 4, m)) for m in (1, 2, 4, 8)}
    figures.show(
        draw.bubble_by_micro_batches(4, shares),
        "Two curves that fall with micro-batches, and measured points near them.",
    )
    for m, share in shares.items():
        formula = float(bubble(4, m)[1])
        print(f"m = {m}: measured {share:.3f}, formula {formula:.3f} of the time that passes")
    assert shares[1] > shares[8]

# %% [markdown]
# The points usually lie on the lines or a little above them, because messages and Python take time as well,
# and they take more of it on a busy machine.
#
# ## 8. 1F1B: the same bubble, less memory
#
# GPipe keeps the activations of all m micro-batches until the backwards begin. So more micro-batches make a
# smaller bubble, but need more memory. **1F1B** (one forward, one backward) avoids this: it starts each
# backward as soon as it can. A rank begins with as many forwards as there are ranks after it, p - 1 -
# rank; from then on it alternates between one forward and one backward; at the end it does the backwards that
# are left.
#
# Before you write it, predict it: draw the chart for 3 ranks and 4 micro-batches on paper, one row per rank,
# with a backward twice as long as a forward. Then write down what each rank does. Which rank goes into its
# first backward with the fewest forwards done?

# %%
rank_0, rank_1, rank_2 = None, None, None  # your rows, such as "F0 B0 ..."

# %% answer="true"
rank_0 = "F0 F1 F2 B0 F3 B1 B2 B3"
rank_1 = "F0 F1 B0 F2 B1 F3 B2 B3"
rank_2 = "F0 B0 F1 B1 F2 B2 F3 B3"

# %% exercise="one_f_one_b" todo="12.7" minutes=15 difficulty=2 points=2
from manyhands.pipeline.schedules import one_f_one_b

# %% check="12.7" tags=["nbval-check-output"]
check.one_f_one_b(one_f_one_b)

# %%
if check.ready("12.2", "12.4", "12.7"):
    rows = in_words(one_f_one_b(3, 4)).splitlines()
    for row, said in zip(rows, (rank_0, rank_1, rank_2), strict=True):
        as_said = said and row.split()[2:] == said.split()
        print(row, " as you said" if as_said else f" you said {said or 'nothing'}")
    both = {"GPipe": runs[8], "1F1B": run_ranks(spans_of, 4, one_f_one_b, 4, 8)}
    figures.show(draw.charts(both), "Charts of GPipe and 1F1B: as long, in another order.")

# %% [markdown]
# The last rank turns round at once, and rank 0 waits longest for its first backward. The two charts are about
# equally long. 1F1B starts its backwards earlier, but p - 1 slots stay empty on each rank all the same. The
# difference lies in how much a rank has to keep.
#
# A micro-batch is **in flight** on a rank from its forward to its backward. In between, the rank keeps its
# activations. Count, in the list of a rank's actions, how many are in flight at most.

# %% exercise="in_flight" todo="12.8" minutes=5 difficulty=1 points=1
from manyhands.pipeline.bubble import in_flight

# %% check="12.8" tags=["nbval-check-output"]
check.in_flight(in_flight)

# %% tags=["nbval-check-output"]
if check.ready("12.4", "12.7", "12.8"):
    for name, make in (("GPipe", gpipe), ("1F1B", one_f_one_b)):
        for m in (4, 8, 32):
            counts = [in_flight(actions) for actions in make(4, m)]
            print(f"{name:5} 4 ranks, {m:2} micro-batches: in flight at most {counts}")
            assert counts == ([m] * 4 if name == "GPipe" else [4, 3, 2, 1])

# %% [markdown]
# In GPipe the number is m on every rank. In 1F1B rank r has at most p - r in flight, however large m is.
#
# Now in bytes: we measure the peak of rank 0's tensors on two ranks. All micro-batches have the same size
# here, so more of them make a larger batch. With `recompute` a rank keeps only the input and the output of
# its stage.


# %%
COUNTS = (1, 2, 4, 8)


def peaks_mb(make_schedule, recompute):
    rank, model = dist.get_rank(), Transformer(V, T, layers=2, heads=2, width=D)
    own, peaks = cut(layers_of(model), [0, 2, 4])[rank], []
    for m in COUNTS:
        shape = (4, T, D)
        pipe = Pipeline({rank: own}, make_schedule(2, m), token_loss, shape, recompute)
        inputs, targets = torch.randint(V, (2, 4 * m, T))
        own.zero_grad()
        with Live(parts_of(own)) as live:
            pipe.step(inputs, targets)
        peaks.append(live.total / 1e6)
    return peaks


if check.ready("12.2", "12.4", "12.7"):
    ways = {
        "GPipe": (gpipe, False),
        "GPipe, recomputed": (gpipe, True),
        "1F1B": (one_f_one_b, False),
        "1F1B, recomputed": (one_f_one_b, True),
    }
    peaks = {name: (COUNTS, run_ranks(peaks_mb, 2, *way)[0]) for name, way in ways.items()}
    figure, ax = figures.new_figure(7, 3.4)
    figures.lines(ax, peaks, "micro-batches of 4 sequences", "peak of rank 0's tensors (MB)")
    ax.set_ylim(bottom=0)
    figures.show(figure, "Lines: GPipe's peak grows with the micro-batches, 1F1B's hardly.")
    for name, (_, megabytes) in peaks.items():
        print(f"{name:17} {COUNTS[-1]} micro-batches: {megabytes[-1]:.1f} MB")
    assert peaks["1F1B"][1][-1] < 0.6 * peaks["GPipe"][1][-1]

# %% [markdown]
# GPipe's memory grows with every micro-batch, while 1F1B's is nearly constant once there are more than two
# micro-batches. (With one or two, rank 0 does all forwards before the first backward; the third forward runs
# when the gradients of the weights are already there.) So 1F1B can take as many micro-batches as a small
# bubble needs, and that is why it is used.
#
# With recomputation, both schedules keep only the input and the output of a stage for each micro-batch in
# flight. Those are small, so the two lines nearly coincide. What remains are the weights, their gradients,
# and the activations of one micro-batch at a time. The price is a second forward. Whatever forward changes is
# changed twice then: batch normalization would count each micro-batch double in its running statistics. (Our
# engine keeps the data of each output until its backward; Megatron-LM can free them once they have been sent.)
#
# Schedules change only the order of the work, so both should agree with one process up to rounding.

# %%
if check.ready("12.2", "12.4", "12.7"):
    for name, make, p, m in (("GPipe", gpipe, 2, 4), ("1F1B", one_f_one_b, 4, 8)):
        off = max(run_ranks(train_pipeline, p, make, p, m))
        print(f"{name:5} {p} stages, {m} micro-batches: off by at most {off:.1e}")
        assert off < 1e-5

# %% [markdown]
# ## 9. How many micro-batches?
#
# More micro-batches make a smaller bubble, so why not take as many as there are sequences? In the charts
# above every micro-batch had the same size. In training the *batch* is fixed, because it decides how the
# model learns (lesson 03), so m micro-batches have B / m sequences each. Smaller micro-batches mean smaller
# matrices, and a small matrix product uses a processor badly: the time of a micro-batch falls more slowly
# than its size. So there are two costs, and they move in opposite directions:
#
# - small m: a large bubble, (p - 1) / m of the ideal time,
# - large m: the same work in many small pieces, m times the time of one piece.
#
# Both can be known without running a pipeline: the bubble from the formula, the pieces by measuring. Let
# w(m) be the time that a stage needs for the whole batch in m pieces, without any message. Then a step
# should take w(m) (1 + (p - 1) / m). The next cell measures w(m) and predicts the best m from it, and then
# measures the step itself. The batch has 32 sequences, and there are two stages, one for each core. Which m
# do you expect to win?

# %%
if check.ready("12.2", "12.6", "12.7"):
    found = bench.sweep_micro_batches(Pipeline, one_f_one_b)
    guess = {m: work_s * (1 + bubble(2, m)[0]) for m, work_s in found.work_s.items()}
    figures.show(
        draw.sweep(found, 2),
        "A step's time against the number of micro-batches falls first and rises later.",
    )
    best, guessed = (min(times, key=times.get) for times in (found.step_s, guess))
    for m, step_s in found.step_s.items():
        work_ms, guess_ms = (1e3 * float(times[m]) for times in (found.work_s, guess))
        print(
            f"m = {m:2}: work {work_ms:4.0f} ms, with the bubble {guess_ms:4.0f} ms, "
            f"measured {1e3 * step_s:4.0f} ms"
        )
    extra = found.step_s[guessed] / found.step_s[best] - 1
    print(
        f"best m: predicted {guessed}, measured {best}; the predicted one takes {extra:.0%} longer"
    )

# %% [markdown]
# Read the columns from top to bottom. The work alone changes little while the pieces are large, and grows
# where they get small; the bubble is largest at m = 1, where each rank waits for half of the step. So their
# sum has its minimum in between, and both ends are expensive. For large m the measured step is usually
# above the prediction, because the prediction leaves out the messages and Python's work for each action,
# and both grow with m. (On a busy machine single points jump, and a step can even seem shorter than its
# work; then run the cell again.)
#
# On GPUs the same decision is made with other numbers: a GPU needs far larger matrices than a core before
# it is well used, so m cannot grow as far. There people take the smallest micro-batch that still keeps the
# GPU busy, often a single long sequence, and make the batch large enough for m to be several times p. If
# the batch cannot grow, smaller slots (section 12) shrink the bubble, and so do fewer stages with more
# replicas (section 14), though slowly. With N GPUs, d replicas, and a batch of B in micro-batches of b, m
# is B / (d b) and p is N / d, so (p - 1) / m = (N - d) b / B. For 64 GPUs, B = 512 and b = 1, going from 16
# stages to 4 takes it from 11.7 % to 9.4 %.
#
# ## 10. Where the rest of the time goes (optional)
#
# Where does the difference between the measured idle time and the formula come from? We take two ranks with
# one thread each and blocks of matrix products. The next cell prints four lines, and each step from one line
# to the next has a cause:
#
# 1. the formula: equal stages, equal micro-batches,
# 2. simulated with the mean time of each stage: the stages are not equal,
# 3. simulated with the measured time of each single action: no two runs of the same work take equally long,
# 4. measured: the rest are messages, and Python between the actions.

# %%
if check.ready("12.2", "12.5", "12.6", "12.7"):
    spans = bench.spans_of_work(Pipeline, one_f_one_b, 8)
    schedule = one_f_one_b(2, 8)
    own = {action: stop - start for mine in spans for action, start, stop in mine}
    means = {
        (kind, stage): statistics.fmean(own[Action(kind, stage, i)] for i in range(8))
        for kind in "FB"
        for stage in range(2)
    }
    by_means = simulate(schedule, lambda action: means[action[:2]])
    print(f"formula                          {float(bubble(2, 8)[1]):.3f}")
    print(f"with the mean time of each stage {idle_share(by_means):.3f}")
    print(f"with the time of each action     {idle_share(simulate(schedule, own.get)):.3f}")
    print(f"measured                         {idle_share(spans):.3f}")
    both = {"simulated with the mean time of each stage": by_means, "measured": spans}
    figures.show(draw.charts(both), "Charts of two ranks with real work: simulated, and measured.")

# %% [markdown]
# Each difference between two lines is one cause. Unequal stages and messages make ranks wait longer. Varying
# times can move the share either way: it can even fall below the formula if the actions at the ends of the
# step happen to be short. So the formula is exact only for equal times and free messages.
#
# Our engine begins to receive a tensor only when it needs it, after all earlier computation, so no message is
# hidden behind computation of the rank that receives it. A library can do better: Megatron's interleaved
# schedule sends and receives while it computes, and its plain 1F1B puts each send and the receive that comes
# next into one batch.
#
# ## 11. An order of messages that hangs (optional)
#
# In the middle of 1F1B, stage 0 has just done a forward and has an activation to send down, while stage 1 has
# just done a backward and has a gradient to send up. Suppose that both send first and receive afterwards,
# with the plain `dist.send`, which returns when the message has been taken. What happens?


# %%
def both_send_first():
    other = 1 - dist.get_rank()
    mine, theirs = torch.ones(4, T, D), torch.empty(4, T, D)
    dist.send(mine, other)
    dist.recv(theirs, other)


try:
    run_ranks(both_send_first, 2, timeout_s=2, rules="")
except RanksHung as hung:
    print(hung)

# %% [markdown]
# Each rank waits in its send for the other one's receive, and neither gets there: a **deadlock**. `Mail`
# avoids it by `isend`, which returns at once, so both ranks go on to their receives. With gloo that is
# enough. With NCCL, the backend for GPUs, it is not. There two ranks have one **queue** per group: messages
# between them are taken strictly in order, and tags (the numbers by which gloo tells messages apart) are
# ignored. If rank 0 has put a send into the queue and rank 1 has done so as well, each send waits for the
# receive that stands behind the other one's send, although no line of Python waits.
#
# You have no GPUs here, but the rules can be enforced: with `rules="nccl"`, `run_ranks` watches all messages
# and stops where they break a rule of NCCL. The next cell runs a step of 1F1B on two stages: first with all
# messages in one group, without and with these rules, and then as `Mail` does it by default, with a second
# group for the gradients. Which of the three pass?


# %%
def step_of_two_stages(is_one_group):
    rank = dist.get_rank()
    own = {rank: nn.Linear(D, D)}
    back = dist.group.WORLD if is_one_group else None
    pipe = Pipeline(own, one_f_one_b(2, 4), nn.functional.mse_loss, (1, D), back=back)
    x, y = torch.ones(2, 4, D)
    return pipe.step(x, y).item()


if check.ready("12.2", "12.7"):
    passed = []
    for rules, is_one_group in (("", True), ("nccl", True), ("nccl", False)):
        groups = "one group" if is_one_group else "a group for each kind"
        name = f"{rules or 'gloo'}, {groups}"
        try:
            losses = run_ranks(step_of_two_stages, 2, is_one_group, rules=rules)
            print(f"{name}: passes, loss {losses[0]:.3f}")
            passed.append(name)
        except RuleBroken as broken:
            print(f"{name}: {broken}")
    assert passed == ["gloo, one group", "nccl, a group for each kind"]

# %% [markdown]
# One group passes on gloo and would hang on GPUs, at least as soon as messages are too large for NCCL's
# buffers. With a group for each kind, all messages of a queue go the same way and in the order of the
# micro-batches, so the order alone is enough. (With interleaved stages on two ranks, section 12,
# activations go both ways, so there `Mail` also separates the directions.) The plain 1F1B of PyTorch and of
# Megatron-LM solves it differently: it puts the send and the receive into one batch
# (`dist.batch_isend_irecv`), which NCCL starts together.
#
# ## 12. Interleaved: smaller slots (optional)
#
# Can the bubble shrink without more micro-batches? Yes: give each rank v stages that are not neighbours:
# rank r has the stages r, r + p, r + 2p, ... A stage is then 1/v as long, and so is each empty slot, so the
# bubble is (p - 1) / v slots instead of p - 1, with at least p micro-batches. The price is more than v times
# as many messages, and more micro-batches in flight.
#
# The micro-batches go in max(1, m // p) groups of equal size. Where that is impossible (p = 4, m = 9), raise
# a `ValueError`. In schedules and charts a letter says which of a rank's stages is meant: `F0a` is the
# forward of micro-batch 0 on its first stage, `F0b` on its second. Here is the target for two ranks with two
# stages each and four micro-batches. From it and from the docstring, find the rule for the number of forwards
# at the beginning:
#
# ```text
# rank 0: F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a B2b B3b B2a B3a
# rank 1: F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a
# ```

# %% exercise="interleaved" todo="12.9" minutes=30 difficulty=3 points=3
from manyhands.pipeline.schedules import interleaved

# %% check="12.9" tags=["nbval-check-output"]
check.interleaved(interleaved)

# %%
if check.ready("12.2", "12.6", "12.7", "12.9"):
    words = {"one stage per rank": (one_f_one_b, 1), "two stages per rank": (interleaved, 2)}
    both = {
        name: run_ranks(spans_of, 4, make, 4, 4, v=v, forward_s=0.03)
        for name, (make, v) in words.items()
    }
    figures.show(
        draw.charts(both), "Charts of 1F1B and interleaved 1F1B: the second is shorter and fuller."
    )
    for (name, spans), v in zip(both.items(), (1, 2), strict=True):
        formula = float(bubble(4, 4, v)[1])
        print(f"{name}: idle {idle_share(spans):.1%}, formula {formula:.1%} of the time")

# %%
if check.ready("12.2", "12.9"):
    off = max(run_ranks(train_pipeline, 4, interleaved, 4, 4, v=2))
    print(f"interleaved, 4 ranks with 2 stages each: off by at most {off:.1e}")
    assert off < 1e-5

# %% [markdown]
# The second run usually has the smaller idle share, but it usually misses its formula by more: it has more
# than twice as many messages, and its slots are half as long, so each delay weighs more.
#
# ## 13. PyTorch's own, and zero bubble (optional)
#
# In `torch.distributed.pipelining` you wrap each of your modules in a
# `PipelineStage(module, index, num_stages, device, group=group)` (the device is that of the parameters). Each
# schedule is a class, made with (stage, m, loss_fn=loss_fn): `ScheduleGPipe`, `Schedule1F1B`,
# `ScheduleInterleaved1F1B`, `ScheduleInterleavedZeroBubble`. The classes with "Interleaved" in their name
# take a list of stages.
#
# ```python
# schedule.step(inputs)                            # on the rank of the first stage
# schedule.step(target=targets, losses=losses)     # on the rank of the last stage; losses is a list
# schedule.step()                                  # on all others
# ```

# %% exercise="torch_pipeline" todo="12.10" minutes=10 difficulty=1 points=1
from manyhands.pipeline.wiring import torch_pipeline

# %% check="12.10" tags=["nbval-check-output"]
check.torch_pipeline(torch_pipeline)


# %%
def train_torch(kind, p, m, v):
    """The same steps with PyTorch's schedule."""
    rank, layers = dist.get_rank(), make_layers()
    bounds = stages.partition([1.0] * len(layers), p * v)
    every = cut(layers, bounds)
    own = {s: every[s] for s in range(rank, p * v, p)}
    schedule = torch_pipeline(own, p * v, m, token_loss, kind)
    params = [param for module in own.values() for param in module.parameters()]
    optimizer = torch.optim.AdamW(params, **ADAMW)
    for inputs, targets in batches():
        optimizer.zero_grad()
        given = (inputs,) if rank == 0 else ()
        schedule.step(*given, **({"target": targets} if rank == p - 1 else {}))
        optimizer.step()
    return max(largest_difference(own[stage], bounds[stage]) for stage in own)


# %%
if check.ready("12.10"):
    for kind, v in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 2)):
        off = max(run_ranks(train_torch, 2, kind, 2, 4, v))
        print(f"PyTorch's {kind:12} off by at most {off:.1e}")
        assert off < 1e-5

# %% [markdown]
# All four agree with one process. They do not know of tied weights either, so a model with tied weights needs
# `sum_tied` here, too.
#
# ### Splitting backward
#
# What does "zero bubble" mean? The backward of a layer has two matrix products, one for the gradient of its
# input and one for the gradients of its weights. The stage before waits only for the first one, and nobody
# waits for the second. A **zero-bubble** schedule therefore computes the first part at once and puts the
# second where a rank would otherwise wait (Qi et al. 2023). The lower chart is PyTorch's own table for
# `ScheduleInterleavedZeroBubble` with one stage per rank, where forward, the backward for the input and the
# backward for the weights take one unit of time each. The upper chart is 1F1B in the same units. Which boxes
# fill the grey places?

# %%
spans = {"1F1B": bench.units_of_1f1b(4, 8), "zero-bubble": bench.slots_of_torch(4, 8)}
figures.show(
    draw.zero_bubble(*spans.values()),
    "Charts of 1F1B and of a zero-bubble schedule: the second ends earlier, and fills its waits.",
)
for name, mine in spans.items():
    print(f"{name:11} ends after {max(stop for row in mine for *_, stop in row)} units of time")
waits = [max(stop for row in mine for *_, stop in row) - 24 for mine in spans.values()]
assert waits == [9, 3]

# %% [markdown]
# In both charts each rank has 24 units of work. 1F1B takes 9 units more, three empty slots of three units
# each. The split schedule takes only 3 more: at the end of the step each rank still has backwards for the
# weights to do. Rank 0 puts them where it would wait for the last gradients, and rank 3 does them last, so
# that the gradients for which the others wait leave earlier. What stays empty lies at the beginning. Rank 3
# cannot start before three forwards are done, and until its first gradient comes back, rank 0 could only
# begin more micro-batches, whose activations it would have to keep. (This table puts the gap before its
# fourth forward and not behind it, which makes no difference.) So despite its name this class only shrinks
# the bubble; Qi et al. also have schedules that nearly remove it, at the price of more memory or, with two
# stages per rank, of twice the messages.
#
# ## 14. Pipelines beside each other (optional)
#
# With more ranks than stages, you can have several copies of the pipeline and give each its share of the
# batch. This is data parallelism (lesson 05) with a pipeline in place of each rank. The ranks form a table:
#
# | | replica 0 | replica 1 |
# |---|---|---|
# | stage 0 | rank 0 | rank 1 |
# | stage 1 | rank 2 | rank 3 |
#
# A column is a pipeline. A row holds the same stage several times and averages its gradients. The replicas of
# a stage have neighbouring ranks, so that they lie inside one node, because they exchange whole gradients,
# while only the activations at the cuts have to go from node to node.
#
# `dist.new_group(ranks)` makes a group. All ranks of the job have to call it for every group, in the same
# order, even the ranks that are not in the group. So make all groups, and return the two that contain your
# rank.

# %% exercise="make_grid" todo="12.11" minutes=15 difficulty=2 points=2
from manyhands.pipeline.wiring import make_grid

# %% check="12.11" tags=["nbval-check-output"]
check.make_grid(make_grid)

# %% [markdown]
# ### Do the replicas synchronise their weights?
#
# Some overviews say of such a grid that its nodes "synchronize weights". We try both: average the gradients
# before each step of the optimizer, or average the weights after it. Each way keeps the replicas equal to
# each other. Does each way also equal one process?


# %%
def train_grid(what, p=2, m=4):
    """The largest difference from one process, and that of a replica from the replicas' mean."""
    pipe_group, row = make_grid(p)
    stage, replica, d = dist.get_rank(pipe_group), dist.get_rank(row), dist.get_world_size(row)
    own = cut(make_layers(), [0, 4, 8])[stage]
    shape = (B // d // m, T, D)
    pipe = Pipeline({stage: own}, one_f_one_b(p, m), token_loss, shape, group=pipe_group)
    optimizer = torch.optim.AdamW(own.parameters(), **ADAMW)
    for inputs, targets in batches():
        optimizer.zero_grad()
        pipe.step(inputs[replica::d], targets[replica::d])
        if what == "gradients":
            average_gradients(own, row)
        optimizer.step()
        if what == "weights":
            for param in own.parameters():
                dist.all_reduce(param.data, group=row)
                param.data /= d
    vector = nn.utils.parameters_to_vector(own.parameters()).detach()
    mean = vector.clone()
    dist.all_reduce(mean, group=row)
    return largest_difference(own, 4 * stage), (vector - mean / d).abs().max().item()


# %%
if check.ready("12.2", "12.7", "12.11"):
    for what in ("gradients", "weights", "nothing"):
        off, apart = map(max, zip(*run_ranks(train_grid, 4, what), strict=True))
        print(f"{what:9} averaged: {off:.1e} off one process, replicas {apart:.1e} off their mean")
        assert (off < 1e-5) == (what == "gradients")

# %% [markdown]
# So it is the gradients that have to be synchronised. They are averaged before the optimizer uses them, so
# all replicas take the step of one process, and their weights stay equal although no weight was ever sent.
# Averaged weights are equal, too, but they are the mean of two different AdamW steps, each taken with half
# of the batch, and that is another training.
#
# ## 15. What travels, and when it pays
#
# Predict: how many bytes does a cut carry in a step, forward and back together? The activations of the whole
# batch are (B, T, D) in float32, here with B = 16 sequences of T = 16 tokens in width D = 64.

# %%
over_the_cut = None  # your number of bytes

# %% answer="true"
over_the_cut = 2 * 4 * B * T * D


# %% tags=["nbval-check-output"]
def bytes_sent():
    rank = dist.get_rank()
    own = {rank: cut(make_layers(), [0, 4, 8])[rank]}
    pipe = Pipeline(own, one_f_one_b(2, 4), token_loss, (B // 4, T, D))
    inputs, targets = batches(1)[0]
    with Ledger() as ledger:
        pipe.step(inputs, targets)
    return ledger.entries


if check.ready("12.2", "12.7"):
    entries = [entry for mine in run_ranks(bytes_sent, 2) for entry in mine]
    sent = sum(traffic(entries).values())
    score("bytes over the cut", over_the_cut, 2 * 4 * B * T * D, sent)
    whole = 4 * sum(p.numel() for layer in make_layers() for p in layer.parameters())
    print(f"an all-reduce of the gradients has {whole:,} bytes")
    assert sent < whole / 4

# %% [markdown]
# A cut carries far less here than an all-reduce. Its bytes grow with the number of tokens and with the
# width, whereas the gradients grow with the square of the width. So with wide layers and not too many
# tokens a cut is cheap, and only neighbours exchange messages of this size (tied weights and the loss
# aside). That is why pipelines are used where the network is slow, between nodes. Across two nodes a
# pipeline lost about 14 % of its speed per GPU, and tensor parallelism, the subject of lesson 13,
# about 43 % (Ultra-Scale Playbook, 2025).
#
# But a pipeline cannot help with a single layer that is too large, and with few micro-batches it wastes time.
# GPipe's authors measured the second effect (Huang et al. 2018, table 2, a Transformer of 48 layers on 2, 4
# and 8 accelerators, throughput relative to 2 accelerators with one micro-batch):
#
# | micro-batches | 2 accelerators | 4 | 8 |
# |---|---|---|---|
# | 1 | 1 | 1.07 | 1.3 |
# | 4 | 1.7 | 3.2 | 4.8 |
# | 32 | 1.8 | 3.4 | 6.3 |
#
# The idea of splitting a network over devices is older. **AlexNet** (Krizhevsky et al. 2012) ran on two GPUs
# with 3 GB each, since it did not fit on one: each GPU had half of the feature maps of every layer, and they
# met only in some layers. That is no pipeline, because both GPUs worked on the same layer at the same time:
# AlexNet was split *inside* the layers, as in lesson 13. GPipe, six years later, cut *between* the layers and
# introduced micro-batches.
#
# ## 16. Run it as a job
#
# The job measures the layers, cuts the model so that the slowest stage is as fast as possible, and trains
# with your engine. By default it runs 1F1B with four micro-batches; its log and the row "schedule" of its
# report say so. In the report, "communication" is the time in which rank 0 waits for its neighbours, and the
# row "waiting" gives the idle share of all ranks in the last step, beside the formula. Expect more than the
# formula, because the stages of this small model compute little, so messages take a large part of the time.

# %%
if check.ready("12.2", "12.4", "12.7"):
    check.keep()
    flags = "--steps 20 --layers 4 --block 32 --valid-tokens 8192"
    watch.run("../sbatch/pipeline.sbatch", "--impl", "mine", *flags.split())

# %%
check.summary()

# %% [markdown]
# ## Recap
#
# You can now
#
# - cut a model into stages, and run their forwards and backwards by hand,
# - write schedules as data, and execute them,
# - say how large the bubble is, in both ways, and choose the number of micro-batches for a given batch,
# - say what 1F1B saves compared with GPipe, and what travels over a cut,
# - say why tied weights need care.
#
# In the optional sections you also balanced the stages, simulated schedules, found an order of messages that
# hangs, shrank the bubble by interleaving and by split backwards, and ran pipelines beside each other.
#
# **Questions**
#
# <details><summary>A paper with 16 stages and 64 micro-batches states a bubble of 23 %. Which formula did it use?</summary>
#
# (p - 1)/m = 15/64 = 23 %: relative to the ideal time. Relative to the time that passes, it would be
# 15/79 = 19 %.
#
# </details>
#
# <details><summary>Why can 1F1B take more micro-batches than GPipe on the same GPUs?</summary>
#
# In 1F1B a rank keeps the activations of at most p - rank micro-batches, however many there are. In GPipe it
# keeps all m.
#
# </details>
#
# <details><summary>Your batch has 64 sequences, your pipeline 4 stages, and m = 64 is slower than m = 16. Why?</summary>
#
# The bubble is smaller with 64 micro-batches (3/67 = 4 % of the time against 3/19 = 16 %), but each one is a
# single sequence: its matrices are small, and there are four times as many messages and actions.
#
# </details>
#
# <details><summary>You double the width of the model and keep everything else. What happens to the bubble?</summary>
#
# Nothing, because p and m are the same. But the work of the products with weights grows fourfold and each
# message only twofold, so messages matter less.
#
# </details>
#
# **Sources.** GPipe: Huang et al. 2018, https://arxiv.org/abs/1811.06965. 1F1B and balanced stages:
# PipeDream, Harlap et al. 2018, https://arxiv.org/abs/1806.03377; it does not empty the pipeline between
# batches, and keeps several versions of the weights. 1F1B as here, and interleaved: Narayanan et al. 2021,
# https://arxiv.org/abs/2104.04473. Zero bubble: Qi et al. 2023, https://arxiv.org/abs/2401.10241. Freed
# outputs: Megatron-LM,
# https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/pipeline_parallel/schedules.py. Messages during
# computation: https://docs.nvidia.com/nemo/megatron-bridge/latest/training/communication-overlap.html. AlexNet:
# Krizhevsky et al. 2012,
# https://papers.nips.cc/paper/4824-imagenet-classification-with-deep-convolutional-neural-networks. Speed
# across nodes: The Ultra-Scale Playbook, 2025, https://huggingface.co/spaces/nanotron/ultrascale-playbook.
