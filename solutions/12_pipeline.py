# ---
# manyhands: {title: Pipeline parallelism, goal: "Cut a model into stages by hand, run them by schedules that are data, equal to one process, and predict and measure the bubble", needs: [data_parallel, memory], job: {flags: "--steps 100 --layers 4 --block 32", loss: [1.28, 1.45]}}
# ---

# %% [markdown]
# # 12 Pipeline parallelism
#
# In data parallelism every rank computes all layers. With sharding, too: the weights come and go, but each
# rank computes all layers for its own samples. In this lesson the ranks share the *layers*: rank 0 has the
# first ones, rank 1 the next ones, and so on. Each rank's part of the model is a **stage**. The weights never
# travel. Instead the activations at the cuts travel forward, and their gradients travel back.
#
# ![Four micro-batches pass three stages: rank 0 works on micro-batch 2 while rank 1 works on 1 and rank 2 on 0; activations go to the next rank, gradients come back](figures/pipeline_stages.svg)
#
# There is a catch. Stage 1 has nothing to do until stage 0 is done, so with one batch only one rank works at
# a time. The remedy is to cut the batch into **micro-batches**, so that the stages work on different
# micro-batches at the same time. The time in which ranks still wait is the **bubble**. You will compute it,
# simulate it, and see it in a chart of your own run.

# %%
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.utils.checkpoint import checkpoint

from manyhands.checks import pipeline as check, score
from manyhands.collectives.trees import Group
from manyhands.data_parallel.replicas import average_gradients
from manyhands.instruments import figures
from manyhands.instruments.ledger import Ledger, traffic
from manyhands.instruments.live import Live, parts_of
from manyhands.jobs import watch
from manyhands.models.transformer import Transformer, num_parameters
from manyhands.pipeline import stages
from manyhands.pipeline.bubble import Span
from manyhands.pipeline.engine import LossFn
from manyhands.pipeline.schedules import Action, Schedule, in_words
from manyhands.pipeline.stages import Waiting, cut, layers_of, measure
from manyhands.pipeline.wiring import Mail, Tied, find_tied
from manyhands.ranks import lab
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
# layer with the norm and the head. `layers_of` makes this list. The layers share the model's parameters.

# %% show="true"
from manyhands.pipeline.stages import Embed, Head, layers_of

# %% [markdown]
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

# %% [markdown]
# The embedding only looks up rows of a table. The head multiplies with the whole vocabulary, so with a
# vocabulary of 8,000 it takes as long as several blocks together. (`measure` discards its first round, which
# is slow because the memory is new.)
#
# Now cut: `partition(costs, num_stages)` returns the bounds of the stages. Stage s has the layers from
# `bounds[s]` to `bounds[s + 1] - 1`. Of all possible cuts, `partition` chooses one whose *slowest* stage
# takes as little time as possible.

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
# ## 2. A stage's forward and backward
#
# How does a gradient pass a cut? Inside a stage autograd works as ever, but at a cut you have to do its work
# yourself:
#
# - forward: receive the activation, run the layers, send the output on.
# - backward: receive the gradient of the output, run autograd through the stage, send the gradient of the
#   *input* back.
#
# The sent tensor carries only numbers, without a graph, hence `detach`. The received tensor is new, so it
# must ask for a gradient (`requires_grad_`), or there is none to send back. In one process such a cut looks
# like this:
#
# ```python
# h = first(x)
# received = h.detach().requires_grad_()
# loss = second(received)
# torch.autograd.backward(loss)              # fills received.grad
# torch.autograd.backward(h, received.grad)  # goes on from there
# ```
#
# `Mail` carries the messages. We call the number of ranks p and the number of micro-batches m; stage s is on
# rank s modulo p. Each message has a number, its **tag**, and with gloo a receive takes only the message with
# its tag. NCCL ignores tags, so there only the order protects you. Shape and type (here float32) have to be
# known beforehand.

# %% show="true"
from manyhands.pipeline.wiring import Mail

# %% [markdown]
# What a rank does, and in which order, is **data**: a list of actions. `F2` is the forward of micro-batch 2
# and `B2` its backward. A **schedule** has such a list for each rank. The simplest schedule takes one
# micro-batch through all stages and back before it starts the next one.

# %% tags=["nbval-check-output"] show="true"
from manyhands.pipeline.schedules import naive

# %% tags=["nbval-check-output"]
print(in_words(naive(3, 2)))

# %% [markdown]
# A schedule fixes only the order. *When* an action runs follows from the messages, because a rank waits for
# the tensors that it needs.
#
# The engine below runs one action after another. Write its two halves, and `share_loss`:
#
# - `forward(stage, i)`: the input of micro-batch `i` comes from `self.inputs` on stage 0, otherwise by mail.
#   On the last stage the loss follows. Divide it by m, because the mean over the batch is the mean of the
#   micro-batches' means, and the gradients of m parts add up in `.grad`. With `self.recompute` the module
#   runs under `checkpoint(module, x, use_reentrant=False)` (lesson 09). Compute inside
#   `with self.span(Action("F", stage, i))`, which records the times, and wait for mail outside of it.
# - `backward(stage, i)`: from the gradient of the output to the gradient of the input. Also wait for the work
#   of the forward's send, which is done by then: its gradient has come back.
# - `share_loss()`: only the last stage knows the loss, but all ranks need it, to log it or to decide when to
#   stop. Return a tensor, not a Python number.

# %% exercise="Pipeline.forward Pipeline.backward Pipeline.share_loss" todo="12.2" minutes=30 difficulty=3 points=3
from manyhands.pipeline.engine import Pipeline

# %% check="12.2" tags=["nbval-check-output"]
check.Pipeline(Pipeline)

# %% [markdown]
# ### Is it the same training?
#
# We compare ten steps of AdamW on three stages with four micro-batches against one process with the whole
# batch. Watch the largest difference between a weight here and the same weight there: rounding alone leaves
# it far below 1e-5.

# %%
V, T, L, D, B = 50, 16, 6, 64, 16
ADAMW = {"lr": 3e-4, "eps": 1e-6}  # the rounding of a gradient that is nearly 0 decides no step


def batches(num=10):
    generator = torch.Generator().manual_seed(4)
    return torch.randint(V, (num, 2, B, T), generator=generator)


def make_layers(tie=True):
    torch.manual_seed(0)
    model = Transformer(V, T, L, heads=2, width=D)
    if not tie:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return layers_of(model)


def token_loss(scores, targets):
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def one_process(tie=True):
    layers = nn.Sequential(*make_layers(tie))
    optimizer = torch.optim.AdamW(layers.parameters(), **ADAMW)
    for inputs, targets in batches():
        optimizer.zero_grad()
        token_loss(layers(inputs), targets).backward()
        optimizer.step()
    return [[param.detach() for param in layer.parameters()] for layer in layers]


WEIGHTS = {tie: one_process(tie) for tie in (False, True)}


# %%
def train_pipeline(make_schedule, p, m, tie=True, finish=None, v=1, recompute=False):
    """Largest difference of this rank's weights from those of one process, after ten steps."""
    rank, layers = dist.get_rank(), make_layers(tie)
    bounds = stages.partition([1.0] * len(layers), p * v)
    every = cut(layers, bounds)
    tied = find_tied(every, p)
    own = {stage: every[stage] for stage in range(rank, p * v, p)}
    pipe = Pipeline(own, make_schedule(p, m), token_loss, (B // m, T, D), recompute)
    params = [param for module in own.values() for param in module.parameters()]
    optimizer = torch.optim.AdamW(params, **ADAMW)
    for inputs, targets in batches():
        optimizer.zero_grad()
        pipe.step(inputs, targets)
        if finish:
            finish(tied)
        optimizer.step()
    off = 0.0
    for stage in own:
        for layer in range(bounds[stage], bounds[stage + 1]):
            pairs = zip(layers[layer].parameters(), WEIGHTS[tie][layer], strict=True)
            off = max([off, *((a - b).abs().max().item() for a, b in pairs)])
    return off


# %%
if check.ready("12.2"):
    off = max(run_ranks(train_pipeline, 3, naive, 3, 4, tie=False))
    print(f"3 stages: the weights differ from one process by at most {off:.1e}")
    assert off < 1e-5

# %% [markdown]
# The difference is only rounding, so the training is the same.
#
# ## 3. Weights that two stages share
#
# Why was there a `tie=False` in the last cell? In our Transformer, as in many others, the head and the
# embedding are one and the same matrix: their weights are **tied**. In a pipeline the embedding is on the
# first rank and the head on the last, so there are two copies of this matrix. What happens to them?

# %%
if check.ready("12.2"):
    off = max(run_ranks(train_pipeline, 3, naive, 3, 4))
    print(f"3 stages, tied weights: off by at most {off:.1e}")

# %% [markdown]
# Now the difference is far larger than rounding. Each copy gets only the part of the gradient that comes from
# its own use, so the two copies drift apart. Nothing warns you, since the loss still falls. That is why the
# parts have to be added up after backward. `find_tied` finds such parameters, each with the ranks that use
# it.

# %% show="true"
from manyhands.pipeline.wiring import find_tied

# %% [markdown]
# Write `sum_tied` with `send` and `recv`.

# %% exercise="sum_tied" todo="12.3" minutes=15 difficulty=2 points=2
from manyhands.pipeline.wiring import sum_tied

# %% check="12.3" tags=["nbval-check-output"]
check.sum_tied(sum_tied)

# %%
if check.ready("12.2", "12.3"):
    off = max(run_ranks(train_pipeline, 3, naive, 3, 4, finish=sum_tied))
    print(f"3 stages, tied weights, summed: off by at most {off:.1e}")
    assert off < 1e-5

# %% [markdown]
# ## 4. The bubble
#
# Who works when? The engine has recorded the start and the end of each action. To see the schedule itself, we
# take stages that compute nothing and only *wait*: 20 ms in forward and 40 ms in backward. Waiting needs no
# core, so four ranks can do it at the same time even on two cores, as four GPUs would compute. Do two ranks
# ever work at once?


# %%
def spans_of(make_schedule, p, m, forward_s=0.02, backward_s=0.04, v=1):
    """When this rank computed what, in one step of stages that only wait."""
    own = {s: Waiting(forward_s / v, backward_s / v) for s in range(dist.get_rank(), p * v, p)}
    pipe = Pipeline(own, make_schedule(p, m), lambda out, _: out.mean(), (1, 4))
    for _ in range(2):  # in the first step the connections are made
        dist.barrier()
        pipe.step(torch.ones(m, 4), torch.ones(m, 4))
    return list(pipe.spans)


# %%
if check.ready("12.2"):
    figure, ax = figures.new_figure(8, 2.4)
    figures.gantt(ax, run_ranks(spans_of, 4, naive, 4, 2))
    figures.show(figure, "Chart of four ranks: a micro-batch passes down and back, then the next.")

# %% [markdown]
# They never do. The chart shows a staircase down and a staircase up, twice: one rank works, and three wait.
#
# ### Does a pipeline keep the GPUs busy?
#
# A slide that is often shown says that it does; others show one GPU at work while the rest wait, as you just
# saw. To keep all of them busy, a pipeline needs many micro-batches, and an order that starts the next one
# before the last one is back.
#
# **GPipe** is the simplest such order: all forwards, then all backwards. Ours takes the backwards in the
# order of the micro-batches, as PyTorch does; the paper takes the last micro-batch first. Make each entry an
# `Action`, not a plain tuple. Then compare one micro-batch with eight (the time axes differ).

# %% exercise="gpipe" todo="12.4" minutes=5 difficulty=1 points=1
from manyhands.pipeline.schedules import gpipe

# %% check="12.4" tags=["nbval-check-output"]
check.gpipe(gpipe)

# %%
if check.ready("12.2", "12.4"):
    figure, axes = figures.new_figure(8, 4.6, rows=2)
    for ax, m in zip(axes, (1, 8), strict=True):
        figures.gantt(ax, run_ranks(spans_of, 4, gpipe, 4, m))
        ax.set_title(f"{m} micro-batch(es)", fontsize=10)
    figures.legend_below(figure, axes[1])
    figures.show(
        figure, "Charts of GPipe: with one micro-batch mostly idle, with eight mostly busy."
    )

# %% [markdown]
# Both pictures are right, each for its own number of micro-batches. With one, most of the chart is grey. With
# eight, much less of it is, though a bubble remains, and a busy machine adds gaps between the boxes.
#
# ### Simulate it
#
# The schedule alone determines the bubble, so you can compute it without running anything. `simulate` works
# out when each action can start: as soon as its own rank is free *and* everything that it needs from another
# rank is done. Three helpers are given; `stuck` writes the error message for a schedule in which no rank can
# go on.

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
def charts(p, m, measured=None):
    rows = [simulate(gpipe(p, m), lambda action: 0.02 * unit_cost(action))]
    rows += [measured] if measured else []
    figure, axes = figures.new_figure(8, 2.4 * len(rows), rows=len(rows))
    axes = axes if measured else [axes]
    for ax, spans, name in zip(axes, rows, ("simulated", "measured"), strict=False):
        figures.gantt(ax, spans)
        ax.set_title(f"GPipe, {p} ranks, {m} micro-batches, {name}", fontsize=10)
    figures.legend_below(figure, axes[-1])
    return figure


if check.ready("12.2", "12.4", "12.5"):
    measured = run_ranks(spans_of, 4, gpipe, 4, 8)
    figures.show(charts(4, 8, measured), "Charts: the simulated and the measured run look alike.")
    figures.show_sliders(
        lambda micro_batches: charts(4, micro_batches),
        "the number of micro-batches",
        micro_batches=(1, 2, 4, 8, 16, 32),
    )

# %% [markdown]
# ### Two formulas for one bubble
#
# Call the time of one micro-batch's forward and backward on a stage a **slot**. With p equal stages and m
# micro-batches a rank has m slots of work, and p - 1 slots are empty. The bubble is quoted relative to two
# times:
#
# - of the **ideal** time, the m slots: (p - 1) / m,
# - of the time that **passes**, the m + p - 1 slots: (p - 1) / (m + p - 1).
#
# For p = 4 and m = 4 the first gives 75 % and the second 43 %. Both are in use: Narayanan et al. 2021 give
# the first, GPipe's authors the second. The number alone does not tell, so always say which. With v stages
# per rank, an empty slot is only 1/v as long (section 7); until then, v is 1.
#
# Write both formulas, and `idle_share`, which computes the second one from a chart's times: for each rank a
# list of `Span`s, (action, start, stop).

# %% exercise="idle_share bubble" todo="12.6" minutes=10 difficulty=1 points=2
from manyhands.pipeline.bubble import bubble, idle_share

# %% check="12.6" tags=["nbval-check-output"]
check.bubble(idle_share, bubble)

# %% [markdown]
# Predict: 8 ranks run GPipe, and they may wait for at most a tenth of the time that passes. What is the
# smallest number of micro-batches for which that is so?

# %%
enough = None  # your number of micro-batches

# %% answer="true"
enough = 63

# %% tags=["nbval-check-output"]
if check.ready("12.4", "12.5", "12.6"):
    waits = {m: idle_share(simulate(gpipe(8, m))) for m in range(1, 100)}
    least = next(m for m, share in waits.items() if share < 0.1 + 1e-9)
    score("micro-batches", enough, 9 * (8 - 1), least)
    for p, m in ((4, 4), (4, 8), (8, 8), (8, 63), (64, 256)):
        of_ideal, of_total = bubble(p, m)
        simulated = idle_share(simulate(gpipe(p, m)))
        print(
            f"p = {p:2}, m = {m:3}: {float(of_ideal):6.1%} of the ideal time, "
            f"{float(of_total):5.1%} of the total; simulated {simulated:5.1%} of the total"
        )
        assert abs(simulated - of_total) < 1e-9

# %% [markdown]
# The share (p - 1) / (m + p - 1) is a tenth where m + p - 1 is ten times p - 1, that is, at m = 9 (p - 1). So
# the number of micro-batches has to grow with the number of ranks.

# %% [markdown]
# ## 5. 1F1B: the same bubble, less memory
#
# GPipe keeps the activations of all m micro-batches until the backwards begin. So more micro-batches make a
# smaller bubble, but need more memory. **1F1B** (one forward, one backward) avoids this: it starts each
# backward as soon as it can. A rank begins with as many forwards as there are ranks behind it; from then on
# it alternates between one forward and one backward. First draw its chart for 3 ranks and 4 micro-batches on
# paper.

# %% exercise="one_f_one_b" todo="12.7" minutes=20 difficulty=2 points=2
from manyhands.pipeline.schedules import one_f_one_b

# %% check="12.7" tags=["nbval-check-output"]
check.one_f_one_b(one_f_one_b)

# %% tags=["nbval-check-output"]
if check.ready("12.7"):
    print(in_words(one_f_one_b(4, 8)))

# %% [markdown]
# A micro-batch is **in flight** on a rank from its forward to its backward. In between, the rank keeps its
# activations.

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

# %% [markdown]
# In GPipe the number is m on every rank. In 1F1B it is at most p - rank, however large m is: rank 0 waits
# longest for its first backward, so it keeps most.
#
# Now in bytes: we measure the peak of rank 0's tensors on two ranks. All micro-batches have the same size
# here, so more of them make a larger batch. With `recompute` a rank keeps only the input and the output of
# its stage.


# %%
COUNTS = (1, 2, 4, 8)


def peaks_mb(make_schedule, recompute):
    rank, layers = dist.get_rank(), make_layers()
    own, peaks = cut(layers, [0, 4, 8])[rank], []
    for m in COUNTS:
        shape = (4, T, D)
        pipe = Pipeline({rank: own}, make_schedule(2, m), token_loss, shape, recompute)
        inputs, targets = torch.randint(V, (2, 4 * m, T))
        own.zero_grad()
        with Live(parts_of(own)) as live:
            pipe.step(inputs, targets)
        peaks.append(live.total / 1e6)
    return peaks


# %%
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

# %% [markdown]
# GPipe's memory grows with every micro-batch, while 1F1B's is constant from the third on. (With one or two
# micro-batches rank 0 does all forwards before the first backward; from the third on, the gradients of the
# weights are there already when a forward runs.) So 1F1B can take as many micro-batches as a small bubble
# needs, and that is why it is used.
#
# With recomputation, both schedules keep only the input and the output of a stage for each micro-batch in
# flight. Those are small, so the two lines nearly coincide. What remains are the weights, their gradients,
# and the activations of one micro-batch at a time. The price is a second forward. (Our engine keeps each
# output's data until its backward; Megatron-LM can free them once they are sent.)
#
# ### Still the same training?
#
# Schedules change only the order of the work, so both should agree with one process up to rounding.

# %%
if check.ready("12.2", "12.3", "12.4", "12.7"):
    for name, make in (("GPipe", gpipe), ("1F1B", one_f_one_b)):
        for p, m in ((2, 4), (4, 8)):
            off = max(run_ranks(train_pipeline, p, make, p, m, finish=sum_tied))
            print(f"{name:5} {p} stages, {m} micro-batches: off by at most {off:.1e}")
            assert off < 1e-5

# %% [markdown]
# ## 6. Measure the bubble
#
# Does a real run lose as much time as the formula says? We begin with the stages that only wait, as on a
# machine with a core for each of the four ranks. The lines are the two formulas, and the points are your runs
# (2 means 200 %).

# %%
if check.ready("12.2", "12.6", "12.7"):
    counts = (1, 2, 4, 8, 16)
    shares = [idle_share(run_ranks(spans_of, 4, one_f_one_b, 4, m)) for m in counts]
    measured = {
        "of the time that passes": (counts, shares),
        "of the ideal time": (counts, [share / (1 - share) for share in shares]),
    }
    fine = range(1, 17)
    formula = {
        "of the time that passes": (fine, [float(bubble(4, m)[1]) for m in fine]),
        "of the ideal time": (fine, [float(bubble(4, m)[0]) for m in fine]),
    }
    figure, ax = figures.new_figure(7, 3.6)
    names = ("micro-batches", "bubble of 1F1B on 4 ranks")
    figures.measured_and_predicted(ax, measured, formula, *names)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:g}")
    figures.show(
        figure, "Two curves that fall with micro-batches; the measured points lie on them."
    )
    for m, share in zip(counts, shares, strict=True):
        print(f"m = {m:2}: measured {share:.3f}, formula {float(bubble(4, m)[1]):.3f} of the total")

# %% [markdown]
# The points usually lie a little above the lines, because messages and Python take time as well, and they
# take more of it on a busy machine. And with eight ranks:

# %%
if check.ready("12.2", "12.6", "12.7"):
    share = idle_share(run_ranks(spans_of, 8, one_f_one_b, 8, 16))
    print(f"8 ranks, m = 16: measured {share:.3f}, formula {float(bubble(8, 16)[1]):.3f}")

# %% [markdown]
# Now with real work: two ranks with one thread each, and blocks of matrix products. Where does the difference
# between the measured idle time and the formula come from? The simulator takes it apart:
#
# 1. the formula: equal stages, equal micro-batches,
# 2. simulated with the mean time of each stage: the stages are not equal,
# 3. simulated with the measured time of each single action: no two runs of the same work take equally long,
# 4. measured: the rest are messages, and Python between the actions.


# %%
def real_spans(m=8, repeats=3):
    """This rank's spans in the quickest of some steps with real work."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = layers_of(Transformer(V, 64, 8, heads=4, width=256))
    own = {rank: cut(layers, [0, 5, 10])[rank]}
    pipe = Pipeline(own, one_f_one_b(2, m), token_loss, (4, 64, 256))
    inputs, targets = torch.randint(V, (2, 4 * m, 64))
    best = None
    for _ in range(repeats):
        dist.barrier()
        pipe.step(inputs, targets)
        ends = torch.tensor(pipe.spans[-1][2] - pipe.spans[0][1])
        dist.broadcast(ends, 0)  # rank 0 begins and ends a step
        if best is None or ends.item() < best[0]:
            best = ends.item(), list(pipe.spans)
    return best[1]


# %%
if check.ready("12.2", "12.5", "12.6", "12.7"):
    spans = run_ranks(real_spans, 2)
    schedule = one_f_one_b(2, 8)
    own = {action: stop - start for mine in spans for action, start, stop in mine}
    means = {
        (kind, stage): statistics.fmean(own[Action(kind, stage, i)] for i in range(8))
        for kind in "FB"
        for stage in range(2)
    }
    stages_of = idle_share(simulate(schedule, lambda action: means[action[:2]]))
    each = idle_share(simulate(schedule, own.get))
    total = idle_share(spans)
    print(f"formula                          {float(bubble(2, 8)[1]):.3f}")
    print(f"with the mean time of each stage {stages_of:.3f}")
    print(f"with the time of each action     {each:.3f}")
    print(f"measured                         {total:.3f}")
    figure, axes = figures.new_figure(8, 3.4, rows=2)
    figures.gantt(axes[0], simulate(schedule, lambda action: means[action[:2]]))
    axes[0].set_title("simulated with the mean time of each stage", fontsize=10)
    figures.gantt(axes[1], spans)
    axes[1].set_title("measured", fontsize=10)
    figures.legend_below(figure, axes[1])
    figures.show(figure, "Charts of two ranks with real work: simulated, and measured.")

# %% [markdown]
# Each difference between two lines is one cause. Unequal stages and messages make ranks wait longer; our
# engine begins to receive a tensor only when it needs it, so messages are not hidden behind computation.
# Varying times can move the share either way: it can even fall below the formula if the actions at the ends
# of the step happen to be short. So the formula is exact only for equal times and free messages.
#
# ## 7. Interleaved: smaller slots (optional)
#
# Can the bubble shrink without more micro-batches? Yes: give each rank v stages that are not neighbours: rank
# r has the stages r, r + p, r + 2p, ... A stage is then 1/v as long, and so is each empty slot, so the bubble
# is (p - 1) / v slots instead of p - 1. The price is v times as many messages, and more micro-batches in
# flight.
#
# The micro-batches go in max(1, m // p) groups of equal size. Where that is impossible (p = 4, m = 9), raise
# a `ValueError`.
#
# In words and charts a letter says which of a rank's stages is meant: `F0a` is the forward of micro-batch 0
# on its first stage, `F0b` on its second. (In the second chart the forwards are too short for labels.)

# %% exercise="interleaved" todo="12.9" minutes=30 difficulty=3 points=3
from manyhands.pipeline.schedules import interleaved

# %% check="12.9" tags=["nbval-check-output"]
check.interleaved(interleaved)

# %%
if check.ready("12.2", "12.5", "12.6", "12.7", "12.9"):
    figure, axes = figures.new_figure(8, 4.8, rows=2)
    for ax, make, v in zip(axes, (one_f_one_b, interleaved), (1, 2), strict=True):
        spans = run_ranks(spans_of, 4, make, 4, 8, v=v)
        figures.gantt(ax, spans)
        formula = float(bubble(4, 8, v)[1])
        words = f"{v} stage(s) a rank: idle {idle_share(spans):.1%}, formula {formula:.1%}"
        ax.set_title(words, fontsize=10)
    figures.legend_below(figure, axes[1])
    figures.show(figure, "Charts of 1F1B and interleaved 1F1B: the second is shorter and fuller.")

# %%
if check.ready("12.2", "12.3", "12.9"):
    off = max(run_ranks(train_pipeline, 4, interleaved, 4, 8, finish=sum_tied, v=2))
    print(f"interleaved, 4 ranks with 2 stages each: off by at most {off:.1e}")
    assert off < 1e-5

# %% [markdown]
# The second run usually has the smaller idle share, but it misses its formula by more, because it sends about
# twice as many messages.
#
# ## 8. PyTorch's own
#
# `torch.distributed.pipelining` has a `PipelineStage(module, index, num_stages, device, group=group)` around
# each of your modules (the device is that of the parameters), and a class for each schedule, called with
# (stage, m, loss_fn=loss_fn): `ScheduleGPipe`, `Schedule1F1B`, `ScheduleInterleaved1F1B`,
# `ScheduleInterleavedZeroBubble`. The classes with "Interleaved" in their name take a list of stages.
#
# The last one goes further. Backward has two products: one for the gradient of the input, which the stage
# before waits for, and one for the gradient of the weights, which nobody waits for. A **zero-bubble**
# schedule computes the first at once and puts the second where a rank would otherwise wait. Despite its name,
# this class only shrinks the bubble; Qi et al. 2023 also have schedules that nearly remove it.
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
    """The same ten steps with PyTorch's schedule."""
    rank, layers = dist.get_rank(), make_layers()
    bounds = stages.partition([1.0] * len(layers), p * v)
    every = cut(layers, bounds)
    tied, own = find_tied(every, p), {s: every[s] for s in range(rank, p * v, p)}
    schedule = torch_pipeline(own, p * v, m, token_loss, kind)
    params = [param for module in own.values() for param in module.parameters()]
    optimizer = torch.optim.AdamW(params, **ADAMW)
    for inputs, targets in batches():
        optimizer.zero_grad()
        given = (inputs,) if rank == 0 else ()
        schedule.step(*given, **({"target": targets} if rank == p - 1 else {}))
        sum_tied(tied)
        optimizer.step()
    off = 0.0
    for stage in own:
        for layer in range(bounds[stage], bounds[stage + 1]):
            pairs = zip(layers[layer].parameters(), WEIGHTS[True][layer], strict=True)
            off = max([off, *((a - b).abs().max().item() for a, b in pairs)])
    return off


# %%
if check.ready("12.3", "12.10"):
    for kind, v in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 2)):
        off = max(run_ranks(train_torch, 2, kind, 2, 4, v))
        print(f"PyTorch's {kind:12} off by at most {off:.1e}")
        assert off < 1e-5

# %% [markdown]
# PyTorch's schedules do not know of your tied weights either, so `sum_tied` has to be called here, too.
#
# ## 9. Pipelines beside each other
#
# With more ranks than stages, hold several copies of the pipeline and give each its share of the batch. This
# is data parallelism (lesson 05) with a pipeline in place of each rank. The ranks form a table:
#
# | | replica 0 | replica 1 |
# |---|---|---|
# | stage 0 | rank 0 | rank 1 |
# | stage 1 | rank 2 | rank 3 |
#
# A column is a pipeline. A row holds the same stage several times and averages its gradients. Replicas of a
# stage have neighbouring ranks, so that they are inside one node: they exchange whole gradients, while a cut
# sends only activations between nodes.
#
# `dist.new_group(ranks)` makes a group. All ranks of the job have to call it for every group, in the same
# order, even the ranks that are not in the group. So make all groups, and return the two that contain your
# rank.

# %% exercise="make_grid" todo="12.11" minutes=15 difficulty=2 points=2
from manyhands.pipeline.wiring import make_grid

# %% check="12.11" tags=["nbval-check-output"]
check.make_grid(make_grid)


# %%
def train_grid(p=2, m=4):
    pipe_group, row = make_grid(p)
    stage, replica, d = dist.get_rank(pipe_group), dist.get_rank(row), dist.get_world_size(row)
    layers = make_layers()
    every = cut(layers, [0, 4, 8])
    tied, own = find_tied(every, p), every[stage]
    shape = (B // d // m, T, D)
    pipe = Pipeline({stage: own}, one_f_one_b(p, m), token_loss, shape, group=pipe_group)
    optimizer = torch.optim.AdamW(own.parameters(), **ADAMW)
    for inputs, targets in batches():
        optimizer.zero_grad()
        pipe.step(inputs[replica::d], targets[replica::d])
        sum_tied(tied, pipe_group)
        average_gradients(own, row)
        optimizer.step()
    weights = [param for layer in WEIGHTS[True][4 * stage : 4 * stage + 4] for param in layer]
    pairs = zip(own.parameters(), weights, strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


# %%
if check.ready("12.2", "12.3", "12.7", "12.11"):
    off = max(run_ranks(train_grid, 4))
    print(f"2 stages x 2 replicas: off by at most {off:.1e}")
    assert off < 1e-5

# %% [markdown]
# ## 10. What travels, and when it pays
#
# Predict: how many bytes does a cut carry in a step, forward and back together? The activations of the whole
# batch are (B, T, D) in float32, here with B = 16 sequences of T = 16 tokens in width D = 64.

# %%
over_the_cut = None  # your number of bytes

# %% answer="true"
over_the_cut = 2 * 4 * B * T * D


# %%
def bytes_sent():
    rank = dist.get_rank()
    own = {rank: cut(make_layers(), [0, 4, 8])[rank]}
    pipe = Pipeline(own, one_f_one_b(2, 4), token_loss, (B // 4, T, D))
    inputs, targets = batches(1)[0]
    with Ledger() as ledger:
        pipe.step(inputs, targets)
    return ledger.entries


# %% tags=["nbval-check-output"]
if check.ready("12.2", "12.7"):
    entries = [entry for mine in run_ranks(bytes_sent, 2) for entry in mine]
    sent = sum(traffic(entries).values())
    score("bytes over the cut", over_the_cut, 2 * 4 * B * T * D, sent)
    print(f"an all-reduce of the gradients has {4 * num_parameters(V, T, L, D):,} bytes")

# %% [markdown]
# A cut carries far less here than an all-reduce. Its bytes grow with the number of tokens and with the width,
# whereas the gradients grow with the square of the width. So with wide layers and not too many tokens a cut
# is cheap, and only neighbours talk. That is why pipelines are put where the network is slow, between nodes.
# Across two nodes a pipeline lost about 14 % of its speed, and tensor parallelism, the subject of lesson 13,
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
# ## 11. Run it as a job
#
# The job measures the layers, cuts by your `partition`, and trains with your engine; by default it runs 1F1B
# with four micro-batches. In its report, "communication" is the time in which rank 0 waits for its
# neighbours, and the row "waiting" says which share of the last step all ranks spent waiting, beside the
# formula. Expect more than the formula: the stages of this small model are short, and the messages are not.

# %%
if check.ready("12.1", "12.2", "12.3", "12.4", "12.7", "12.11"):
    check.keep()
    watch.run(
        "../sbatch/pipeline.sbatch", "--impl", "mine", *"--steps 60 --layers 4 --block 32".split()
    )

# %%
check.summary()

# %% [markdown]
# ## Recap
#
# You can now
#
# - cut a model into stages by cost, and run their forwards and backwards by hand,
# - write schedules as data, and simulate and execute the same data,
# - say how large the bubble is, in both ways, and what adds to it on a real machine,
# - say what 1F1B saves compared with GPipe, and what interleaving saves in addition,
# - keep tied weights equal, and put pipelines beside each other.
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
# <details><summary>You double the width of the model and keep everything else. What happens to the bubble?</summary>
#
# Nothing, because p and m are the same. But the work of the matrix products grows fourfold and each message
# only twofold, so messages matter less.
#
# </details>
#
# **Sources.** GPipe: Huang et al. 2018, https://arxiv.org/abs/1811.06965. 1F1B and balanced stages:
# PipeDream, Harlap et al. 2018, https://arxiv.org/abs/1806.03377; it does not empty the pipeline between
# batches, and keeps several versions of the weights. 1F1B as here, and interleaved: Narayanan et al. 2021,
# https://arxiv.org/abs/2104.04473. Zero bubble: Qi et al. 2023, https://arxiv.org/abs/2401.10241. Freed
# outputs: Megatron-LM,
# https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/pipeline_parallel/schedules.py. AlexNet:
# Krizhevsky et al. 2012,
# https://papers.nips.cc/paper/4824-imagenet-classification-with-deep-convolutional-neural-networks. Speed
# across nodes: The Ultra-Scale Playbook, 2025, https://huggingface.co/spaces/nanotron/ultrascale-playbook.
