# ---
# manyhands: {title: Data parallelism, minutes: 150, goal: "Build data parallelism from a parameter server to buckets that travel during backward, equal to one process, and count the bytes on every link", needs: [collectives], job: {flags: "--steps 100 --layers 2 --block 32 --batch 32", loss: [1.43, 1.68]}}
# ---

# %% [markdown]
# # 05 Data parallelism, by hand
#
# You have one model, one large data set, and several devices. How do the devices train the model
# together, so that the result is the one that a single device would have found, only sooner?
#
# ![A global batch of six samples is dealt out to two ranks; each runs forward and backward through the whole model, an all-reduce makes the mean of the gradients, and both take the same step, so their weights stay equal](figures/ddp_overview.svg)
#
# In **data parallelism** every device holds a copy of the whole model, a **replica**, and works on its
# own part of each batch. In **model parallelism** every device holds a part of the model, and the whole
# batch passes through all of them:
#
# | | data parallelism | model parallelism |
# |---|---|---|
# | each device holds | the whole model | a part of it |
# | each device sees | a part of the batch | the whole batch |
# | devices exchange | gradients | activations, and their gradients |
# | the benefit | less time per step | larger models fit |
# | the limit | the model must fit on one device | devices wait for each other |
#
# This lesson is about data parallelism; lessons 12 and 13 are about model parallelism. You build it
# four times, from a server to messages that travel during backward, and each time the result has to
# equal training in one process.

# %%
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.checks import data_parallel as check, score
from manyhands.data_parallel.loops import CHANGES, STEPS
from manyhands.data_parallel.replicas import Bucket
from manyhands.instruments import figures
from manyhands.instruments.ledger import Ledger, calls, traffic
from manyhands.jobs import watch
from manyhands.ranks import lab
from manyhands.ranks.lab import run_ranks

lab.warm_up()
print(
    f"torch {torch.__version__}, {os.cpu_count()} cores; the ranks of this notebook use CPU + gloo"
)

# %% [markdown]
# ## 1. One GPU, fifteen steps
#
# Which parts of training change when several devices share the work? First be clear about what one
# device does. Here are fifteen steps of the first batch, in shuffled order, from the start of the
# program to the moment at which control returns to the loop.

# %% tags=["nbval-check-output"]
for letter, step in STEPS.items():
    print(letter, step)

# %% [markdown]
# Put the steps in order. Return the letters as one string, such as `"ABC..."`.

# %% exercise="order_of_steps" todo="5.1" minutes=10 difficulty=1 points=1
from manyhands.data_parallel.loops import order_of_steps

# %% check="5.1" tags=["nbval-check-output"]
check.order_of_steps(order_of_steps)

# %% [markdown]
# Now several ranks train on the same batch. Most of the fifteen steps stay as they are, but four things
# change:

# %% tags=["nbval-check-output"]
for name, change in CHANGES.items():
    print(f"{name:6} {change}")

# %% [markdown]
# For each change, name the first of the fifteen steps that comes out differently, or that has to wait
# for a message. Where two answers can be defended, the check accepts both. Return a dictionary, such as
# `{"share": "A", ...}`.

# %% exercise="steps_that_change" todo="5.2" minutes=10 difficulty=2 points=1
from manyhands.data_parallel.loops import steps_that_change

# %% check="5.2" tags=["nbval-check-output"]
check.steps_that_change(steps_that_change)

# %% [markdown]
# ### When are the gradients averaged?
#
# Some slides say that gradients are averaged "at the end of the forward pass". Ask PyTorch: what is in
# `.grad` when forward has ended?

# %% tags=["nbval-check-output"]
layer = nn.Linear(3, 1)
loss = layer(torch.ones(2, 3)).mean()
print("after forward: ", layer.weight.grad)
loss.backward()
print("after backward:", layer.weight.grad.tolist())

# %% [markdown]
# After forward there is no gradient yet, so nothing can be averaged before backward has begun. The
# averaging happens during backward or after it, and section 6 shows both on a time line.

# %% [markdown]
# ## 2. A parameter server
#
# How can several ranks train one set of weights? A parameter server is the easiest scheme to
# understand. One rank, the **server**, holds the weights and the optimizer. The others, the
# **workers**, compute gradients. In every step
#
# 1. each worker sends its gradients to the server,
# 2. the server averages them and takes the step,
# 3. the server sends the new weights back to every worker.
#
# A model has many parameters, and one message for each would be slow, so all of them travel as one
# vector. `pack` and `unpack`, which make such a vector and take it apart, are given.
#
# `dist.send(vector, group=group, group_dst=server)` sends to a rank of the group, and
# `dist.recv(vector, group=group, group_src=server)` waits for a message from that rank and writes it
# into `vector`. Both count ranks inside the group; `None` for the group means all ranks of the job.

# %% show="true"
from manyhands.data_parallel.replicas import pack, unpack

# %% exercise="worker_step" todo="5.3" minutes=10 difficulty=1 points=1
from manyhands.data_parallel.loops import worker_step

# %% check="5.3" tags=["nbval-check-output"]
check.worker_step(worker_step)

# %% [markdown]
# Now write the server's side, which calls `recv` for one worker after the other. The server has run no
# backward, so its parameters have no `.grad` yet: give them one.

# %% exercise="server_step" todo="5.4" minutes=15 difficulty=2 points=2
from manyhands.data_parallel.loops import server_step

# %% check="5.4" tags=["nbval-check-output"]
check.server_step(server_step)

# %% [markdown]
# ### Is it the same training?
#
# The first question about any technique of this course is **parity with one process**: does the
# technique find the same weights? Train ten steps of AdamW in one process on the whole batch, and with
# a server and three workers, each on a third of the batch. Watch the largest difference between a
# weight of a rank and the same weight of the single process.


# %%
def make_model():
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def make_batches(num_batches=10, batch=12):
    generator = torch.Generator().manual_seed(5)
    for _ in range(num_batches):
        inputs = torch.randn(batch, 8, generator=generator)
        yield inputs, inputs.sin().sum(1, keepdim=True)


def train_alone():
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for inputs, targets in make_batches():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def largest_difference(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


# %%
def train_with_server():
    rank, num_workers = dist.get_rank(), dist.get_world_size() - 1  # rank 0 is the server
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for inputs, targets in make_batches():
        if rank == 0:
            server_step(model, optimizer)
        else:
            mine = slice(rank - 1, None, num_workers)
            model.zero_grad()
            nn.functional.mse_loss(model(inputs[mine]), targets[mine]).backward()
            worker_step(model)
    return [param.detach() for param in model.parameters()]


if check.ready("5.3", "5.4"):
    alone = train_alone()
    for rank, weights in enumerate(run_ranks(train_with_server, 4)):
        difference = largest_difference(weights, alone)
        print(f"rank {rank}: largest difference from one process {difference:.1e}")
        assert difference < 1e-5

# %% [markdown]
# The difference is rounding: the server adds up the gradients in another order than one process does.
# It is the same training.

# %% [markdown]
# ## 3. No server: replicas that start equal and stay equal
#
# Is a server needed at all? No: if every rank has an optimizer of its own, then equal weights and equal
# gradients make equal steps. So two things remain to be done.
#
# ### Start equal
#
# If each rank builds its model from its own random numbers, the replicas differ from the start. One
# cure is the same seed everywhere. A safer one is that rank 0 sends its model to all ranks, with
# `dist.broadcast(tensor, src=0)`, or in a group with `dist.broadcast(tensor, group=group,
# group_src=0)`. From here on you use PyTorch's collectives; you built your own in lesson 04.
#
# Two details matter. Autograd must not record the message, so send `tensor.detach()`, which shares the
# parameter's memory. And a message is one piece of memory (lesson 04), so a tensor whose elements do
# not lie side by side is sent as a contiguous copy, and copied back.
#
# A model's **state** is its parameters and its **buffers**. Buffers are tensors without a gradient that
# belong to the model, such as the running mean of batch norm. Frozen parameters, those with
# `requires_grad=False`, belong to the state as well.

# %% exercise="broadcast_state" todo="5.5" minutes=10 difficulty=1 points=1
from manyhands.data_parallel.replicas import broadcast_state

# %% check="5.5" tags=["nbval-check-output"]
check.broadcast_state(broadcast_state)

# %% [markdown]
# ### Stay equal
#
# Each rank's loss is the mean over its own share of the batch. Let a batch of $B$ samples with the
# gradients $g_i$ be dealt out to $N$ ranks, $B/N$ samples each. Then the gradient of one process is the
# mean of the ranks' gradients:
#
# $$\frac{1}{B}\sum_{i=1}^{B} g_i \;=\; \frac{1}{N}\sum_{r=1}^{N}\Big(\frac{N}{B}\sum_{i \in \text{rank } r} g_i\Big)$$
#
# So the mean over ranks is not an approximation: except for rounding, it is the same gradient. But this
# holds only if every rank averages over equally many items, which is not so when each rank divides by
# its own number of tokens. And a sample's gradient must not depend on the rest of the batch, as it does
# with batch norm, where each rank normalizes by the statistics of its own share (Goyal et al. 2017).
#
# An all-reduce, too, needs a tensor in one piece.

# %% exercise="average_gradients" todo="5.6" minutes=10 difficulty=1 points=1
from manyhands.data_parallel.replicas import average_gradients

# %% check="5.6" tags=["nbval-check-output"]
check.average_gradients(average_gradients)

# %% [markdown]
# ## 4. The whole algorithm
#
# What does training without a server look like as a whole? You now have all its parts:
#
# 1. the ranks join a process group (already done when your function is called),
# 2. every rank gets a copy of the model, and rank 0's weights go to all,
# 3. every rank creates its optimizer,
# 4. for each batch, every rank takes its share,
# 5. forward,
# 6. the loss,
# 7. backward,
# 8. the gradients are averaged over all ranks,
# 9. every rank updates its weights,
#
# and from 4 again. After training all replicas are equal, so take any of them, copy its weights to the
# CPU, and save them. The cell after the check tests parity again, on one to four ranks whose replicas
# start from different seeds. Only rounding should remain.

# %% exercise="train_replicas" todo="5.7" minutes=20 difficulty=2 points=2
from manyhands.data_parallel.loops import train_replicas

# %% check="5.7" tags=["nbval-check-output"]
check.train_replicas(train_replicas)


# %%
def train_on_ranks():
    torch.manual_seed(dist.get_rank())  # replicas that start out different; rank 0's has to win
    return list(train_replicas(make_model(), make_batches(), 0.01).values())


if check.ready("5.5", "5.6", "5.7"):
    for world_size in (1, 2, 3, 4):
        difference = largest_difference(run_ranks(train_on_ranks, world_size)[0], train_alone())
        print(f"{world_size} rank(s): largest difference from one process {difference:.1e}")
        assert difference < 1e-5

# %% [markdown]
# ## 5. Bytes on every link
#
# Does a server move more bytes than an all-reduce, and how many more? Count them. The model has $P$
# parameters in fp32, so its gradients take $4P$ bytes, and so do its weights.
#
# Predict, for 4 workers and 4P = 3360 bytes: how many bytes pass the server's link in a step, in and
# out together? And how many bytes does one of 4 ranks send when the ring all-reduce of lesson 04 adds
# up the gradients? (There each rank sends 2 (n-1) chunks, and a chunk is 1/n of the whole.)

# %%
server_link_bytes, ring_sent_bytes = None, None  # your numbers

# %% answer="true"
server_link_bytes, ring_sent_bytes = 2 * 4 * 3360, 5040  # 2 n x 4P; 2 (n-1)/n x 4P

# %%
from manyhands.collectives.ring import all_reduce_ring  # of lesson 04


class Numbers(nn.Module):
    """A model of 840 parameters, which take 3360 bytes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(840))
        self.weight.grad = torch.ones(840)


def one_server_step():
    model = Numbers()
    with Ledger() as ledger:
        if dist.get_rank() == 0:
            server_step(model, torch.optim.AdamW(model.parameters()))
        else:
            worker_step(model)
    return ledger.entries


def one_ring_step():
    model = Numbers()
    with Ledger() as ledger:
        all_reduce_ring(model.weight.grad)
    return ledger.entries


def bytes_by_rank(results):
    """What each rank sends and receives: [(sent, received), ...]."""
    links = traffic(entry for entries in results for entry in entries)
    return [
        (
            sum(b for (s, _), b in links.items() if s == r),
            sum(b for (_, d), b in links.items() if d == r),
        )
        for r in range(len(results))
    ]


# %% tags=["nbval-check-output"]
if check.ready("5.3", "5.4"):
    by_server = sum(bytes_by_rank(run_ranks(one_server_step, 1 + 4))[0])
    by_ring = bytes_by_rank(run_ranks(one_ring_step, 4))[0][0]
    score("server's link, 4 workers", server_link_bytes, 2 * 4 * 3360, by_server, "bytes")
    score("sent by a rank of 4 in a ring", ring_sent_bytes, 2 * 3 / 4 * 3360, by_ring, "bytes")

# %% [markdown]
# ![On the left four workers send gradients to a server and get weights back, so that all traffic passes the server's link; on the right the same ranks form a ring, where every link carries the same small share](figures/data_parallel_server.svg)
#
# To compare the two, count both in one unit: the bytes in and out of the busiest rank together. With 8
# workers a server moves $64P$, and each of 8 ranks in a ring moves $14P$. Now do so for n = 2 to 8, and
# watch which number keeps growing. (The cell starts 14 groups of ranks, and takes some seconds.)

# %%
if check.ready("5.3", "5.4"):
    counts = range(2, 9)
    busiest = {
        "server": [max(map(sum, bytes_by_rank(run_ranks(one_server_step, n + 1)))) for n in counts],
        "ring": [max(map(sum, bytes_by_rank(run_ranks(one_ring_step, n)))) for n in counts],
    }
    for n, server, ring in zip(counts, busiest["server"], busiest["ring"], strict=True):
        print(f"n = {n}: server {server / 3360:5.2f} x 4P, ring {ring / 3360:5.2f} x 4P")
        assert server == 2 * n * 3360 and ring == 2 * (2 * (n - 1) * 3360) // n

# %%
if check.ready("5.3", "5.4"):
    figure, ax = figures.new_figure(width=5.5)
    series = {
        name: (list(counts), [count / 3360 for count in values]) for name, values in busiest.items()
    }
    figures.lines(ax, series, "workers or ranks", "bytes at the busiest rank / 4P")
    figures.show(figure, "Bytes in and out at the busiest rank, for a server and for a ring.")

# %% [markdown]
# The server's line grows with every worker: with 8 it has to move 16 times the model in every step. In
# a ring no rank moves more than four times the model, two in and two out, however many there are.
#
# ### Is the traffic of an all-reduce one times the weights?
#
# Some slides say that the traffic of an all-reduce is "1x weights", and that of a server 2x. Your
# ledger says that in a ring every rank *sends* $2(n-1)/n$ times the gradients, nearly 2x for large n,
# and receives as many. A worker of a parameter server sends 1x and receives 1x, which is less. The
# ring's gain is at the **busiest link**, because there the server moves $2n$ times the model.

# %% [markdown]
# ## 6. Hiding the messages
#
# How can the averaging become faster? `average_gradients` waits for backward to end, and then sends one
# message for each parameter. This is slow for two reasons:
#
# - Every message has a fixed cost, however small it is, and a model has hundreds of parameters.
# - Nothing is computed while messages travel.
#
# ### Fewer messages: buckets
#
# To send fewer messages, pack parameters into **buckets**, and send each bucket as one message.
# Backward reaches the *last* layer first, so the buckets are filled from the last layer on; the next
# section makes use of this order. `make_buckets` is given. Read the buckets of a small model.

# %% show="true"
from manyhands.data_parallel.replicas import make_buckets

# %%
model = make_model()
names = {param: name for name, param in model.named_parameters()}
for number, bucket in enumerate(make_buckets(model.parameters(), bucket_bytes=300)):
    print(f"bucket {number}: {[names[p] for p in bucket]}, {sum(p.nbytes for p in bucket)} bytes")

# %% exercise="average_buckets" todo="5.8" minutes=10 difficulty=1 points=1
from manyhands.data_parallel.replicas import average_buckets

# %% check="5.8" tags=["nbval-check-output"]
check.average_buckets(average_buckets)

# %% [markdown]
# ### During backward: overlap
#
# The gradients of the last layer are ready while backward still computes those of earlier layers. So a
# bucket can be sent as soon as its last gradient is ready.
#
# ![The gradients of six layers fill three buckets from the last layer on; the all-reduce of a full bucket runs while backward computes earlier layers, so the step comes sooner than in the naive version below, where every message waits for the end of backward](figures/data_parallel_buckets.svg)
#
# You need two tools:
#
# - A **hook** is a function that PyTorch calls for you.
#   `param.register_post_accumulate_grad_hook(fn)` makes PyTorch call `fn(param)` each time `param.grad`
#   has just been written.
# - `work = dist.all_reduce(flat, async_op=True)` starts a message and returns at once.
#   `work.wait()` returns when the message is through. Until then, do not touch `flat`.
#
# Three short methods are yours:
#
# - `_on_grad_ready(param)` is the hook. It counts the gradients, and decides when to start a bucket and
#   when to finish.
# - `_start(index)` packs the bucket's gradients into one flat tensor and sends it.
# - `_finish()` waits, divides, and unpacks.
#
# All-reduces are matched by the order of the calls, so every rank has to start the buckets in the order
# of their index. A bucket that is full too early waits until those before it have started.
#
# The rest is given. The hook of the last gradient calls `_finish`, so the waiting happens at the end of
# `loss.backward()`, which returns with averaged gradients. The training loop does not change at all.

# %% exercise="BucketedDDP._on_grad_ready BucketedDDP._start BucketedDDP._finish" todo="5.9" minutes=35 difficulty=3 points=3
from manyhands.data_parallel.replicas import BucketedDDP

# %% check="5.9" tags=["nbval-check-output"]
check.BucketedDDP(BucketedDDP)

# %% [markdown]
# ### Predict: how many messages, how many bytes?
#
# The model below has 8 layers, and each has a weight of 256 x 256 and a bias of 256, in fp32 (4 bytes
# per number). `average_gradients` sends one message per parameter tensor. Buckets are at most 1 MB
# (10^6 bytes). Write down what you expect, then run the cells below.

# %%
messages_by_parameter = None  # your number: messages per step with average_gradients
messages_by_bucket = None  # your number: messages per step with buckets of 1 MB
total_bytes = None  # your number: bytes of all gradients together

# %% answer="true"
messages_by_parameter, messages_by_bucket, total_bytes = 16, 3, 8 * (256 * 256 + 256) * 4


# %%
def eight_layers(width=256):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(8)])


def wrap(how, model, bucket_mb):
    """The model to call, and what to do after backward."""
    if how == "overlapped":
        return BucketedDDP(model, bucket_mb), lambda: None
    if how == "bucketed":
        buckets = make_buckets(model.parameters(), int(bucket_mb * 1e6))
        return model, lambda: average_buckets(buckets)
    return model, lambda: average_gradients(model)


def collectives_of_a_step(how):
    model, after_backward = wrap(how, eight_layers(), bucket_mb=1)
    with Ledger() as ledger:
        model(torch.randn(4, 256)).sum().backward()
        after_backward()
    return calls(ledger.entries)["all_reduce"], sum(entry.nbytes for entry in ledger.entries)


# %% tags=["nbval-check-output"]
HOW = ("naive", "bucketed", "overlapped")
if check.ready("5.6", "5.8", "5.9"):
    layer_bytes = (256 * 256 + 256) * 4
    counted = {how: run_ranks(collectives_of_a_step, 2, how)[0] for how in HOW}
    num_buckets = -(-8 // (10**6 // layer_bytes))  # rounded up
    score("messages, one per parameter", messages_by_parameter, 2 * 8, counted["naive"][0])
    score("messages, one per bucket", messages_by_bucket, num_buckets, counted["overlapped"][0])
    score("gradient bytes", total_bytes, 8 * layer_bytes, counted["overlapped"][1], "bytes")
    assert counted["bucketed"] == counted["overlapped"]

# %% [markdown]
# Three layers fit into a bucket of 1 MB, so eight layers need three buckets. The number of bytes stays
# the same: buckets save waiting, not traffic.

# %% [markdown]
# ### Look: the time line of your own ranks
#
# How much waiting do buckets and overlap remove? Two ranks on one machine have a very fast link, but
# their messages use the same cores as backward. A network between computers is slower, but carries
# messages while the cores compute. So the next cells simulate a link of 200 MB/s, plus 1 ms per
# message: a rank that waits for a message sleeps for as long as the simulated link would take. Backward
# and your code are real. Buckets hold two layers here (2.1 MB).
#
# Watch the time from the end of backward to the end of the step. The link needs 42 ms for the model's
# 8.4 MB, so this time is at least 58 ms with 16 messages, 46 ms with 4 buckets, and with overlap that
# of the last bucket, 11.5 ms.

# %%
from manyhands.instruments.timeline import Timeline


def record(how, bytes_per_s, latency_s):
    model, after_backward = wrap(how, eight_layers(512), bucket_mb=2.2)
    inputs = torch.randn(512, 512)
    model(inputs).sum().backward()  # the first step also warms up
    after_backward()
    line = Timeline()
    line.watch_all_reduces(bytes_per_s, latency_s)
    model.zero_grad()
    dist.barrier()
    with line.span("forward"):
        loss = model(inputs).sum()
    with line.span("backward"):
        loss.backward()
    after_backward()
    return line.spans


# %%
def end_ms(spans):
    return 1e3 * (max(stop for *_, stop in spans) - min(start for _, _, start, _ in spans))


if check.ready("5.6", "5.8", "5.9"):
    figure, axes = figures.new_figure(height=7.2, rows=3)
    shown = {}
    for ax, how in zip(axes, HOW, strict=True):
        runs = [run_ranks(record, 2, how, 200e6, 1e-3) for _ in range(3)]
        runs = [[span for spans in run for span in spans] for run in runs]
        shown[how] = sorted(runs, key=end_ms)[1]  # the median of three
        figures.timeline(ax, sorted(shown[how], key=lambda span: span[1] == "idle"))
        ax.set_title(f"{how}: {end_ms(shown[how]):.0f} ms", fontsize=10)
    longest = max(map(end_ms, shown.values()))
    for ax in axes:
        ax.set_xlim(0, 1.02 * longest)
    figures.legend_below(figure, axes[0])
    figures.show(figure, "Time lines of two ranks: naive, bucketed and overlapped messages.")

# %% [markdown]
# Each rank has two lanes: its work above, its messages below. Grey means that the rank waits. In the
# first two panels every message comes after backward. Buckets make the messages fewer, so their fixed
# cost is paid less often. In the third panel most messages should lie under backward. The last bucket
# is always left over: the gradients of the first layer are ready last, so nothing is left to hide their
# message behind.
#
# Forward and backward vary from run to run, so the totals do, too. If the overlapped version is not the
# fastest, the machine was probably busy: run the cell again.

# %% [markdown]
# ### And without the slow link?
#
# Measure a whole step on two ranks of this machine as it is, and beside it PyTorch's own
# `DistributedDataParallel`. Predict first: will overlap help when the ranks and the messages share the
# same cores?

# %%
from manyhands.ddp.wrapping import torch_ddp


def step_times(repeats=9):
    """Median time of a step (s) by version; the versions take turns."""
    versions = {how: wrap(how, eight_layers(512), bucket_mb=2.2) for how in HOW}
    versions["PyTorch's"] = torch_ddp(eight_layers(512), bucket_mb=2.2), lambda: None
    inputs, times = torch.randn(128, 512), {how: [] for how in versions}
    for _ in range(repeats + 2):
        for how, (model, after_backward) in versions.items():
            dist.barrier()
            start = time.perf_counter()
            model(inputs).sum().backward()
            after_backward()
            times[how].append(time.perf_counter() - start)
    return {how: sorted(values[2:])[repeats // 2] for how, values in times.items()}


if check.ready("5.6", "5.8", "5.9"):
    for how, seconds in run_ranks(step_times, 2)[0].items():
        print(f"{how:10} {1e3 * seconds:6.1f} ms per step")

# %% [markdown]
# Buckets usually help here, too, because fewer messages cost less. Overlap usually adds little, because
# the messages need the same cores as backward, and whether your version or PyTorch's is faster changes
# from run to run. On a cluster the network card carries the messages, as in the time line above.

# %% [markdown]
# ## 7. One slow rank
#
# What does one slow rank cost the others? All ranks have to be in the all-reduce before any of them can
# leave it. Let one of three ranks be slower by 100 ms per step. Predict how long a step takes on the
# *fast* ranks, whose own work takes about 20 ms.

# %%
fast_rank_ms = None  # your number

# %% answer="true"
fast_rank_ms = 120


# %%
def step_with_a_straggler(delay_s, steps=5):
    """This rank's median step time, and the part of it that is work (s)."""
    model, whole, work = make_model(), [], []
    for inputs, _ in make_batches(steps):
        dist.barrier()
        start = time.perf_counter()
        model(inputs).sum().backward()
        time.sleep(0.02)  # the work of a step
        if dist.get_rank() == 2:
            time.sleep(delay_s)
        work.append(time.perf_counter() - start)
        average_gradients(model)
        whole.append(time.perf_counter() - start)
    return sorted(whole)[steps // 2], sorted(work)[steps // 2]


if check.ready("5.6"):
    slowed = {delay_s: run_ranks(step_with_a_straggler, 3, delay_s) for delay_s in (0.0, 0.1)}
    for delay_s, results in slowed.items():
        for rank, (whole_s, work_s) in enumerate(results):
            print(
                f"rank 2 late by {1e3 * delay_s:3.0f} ms: rank {rank} works {1e3 * work_s:4.0f} ms, "
                f"its step takes {1e3 * whole_s:4.0f} ms"
            )
    score(
        "step of a fast rank", fast_rank_ms, 120, round(1e3 * slowed[0.1][0][0]), "ms", "at least"
    )
    assert slowed[0.1][0][0] > 0.1

# %% [markdown]
# One slow rank, a **straggler**, makes all of them slow: the step takes as long as that of the slowest.
# (The all-reduces themselves add some time to the 120 ms; the lines without a delay show how much.) A
# GPU that runs hot, a shared node, or samples of very different lengths are enough. So when a large job
# is slow, first look for the rank that does *not* wait.

# %% [markdown]
# ## 8. Run it as a job, with your functions in it
#
# The next cell writes your functions to `mine/data_parallel.py`, and trains a small language model with
# your `BucketedDDP` on real processes: one for each GPU of the job, or two without GPUs. The cell shows
# the loss while the job runs, and the report at the end. There the loss should start near 3.6, which is
# ln 36, a guess among 36 characters, and fall well below 3. The stop button stops the job, after a
# checkpoint. The files are in the folder `runs` beside this notebook. In the log, the line `yours: ...`
# names the functions that the script calls; your other functions work inside them.
#
# In a terminal, in the course's folder, the job is `bash sbatch/data_parallel.sbatch --mine --impl
# overlapped`; without the other options of the cell it trains longer. `naive`, `bucketed` and `server`
# (on two processes: one server, one worker) use your other functions.

# %%
if check.ready("5.5", "5.6", "5.8", "5.9"):
    check.keep()
    watch.run(
        *("../sbatch/data_parallel.sbatch", "--mine", "--impl", "overlapped"),
        *("--steps", 40, "--layers", 2, "--block", 32),
    )

# %%
check.summary()

# %% [markdown]
# ## Recap
#
# You can now
#
# - name what changes when one training loop becomes many, and what does not,
# - build data parallelism with a server and without one, and show that it equals one process,
# - count the bytes on every link, and say where the bottleneck is,
# - put messages into buckets and hide them behind backward,
# - say why one slow rank slows all.
#
# **Questions**
#
# <details><summary>A parameter server has 100 workers and a model of 1 GB, and its link carries 10 GB/s each way. How long does a step take at least?</summary>
#
# 20 s: 100 GB have to come in, which takes 10 s, and only then can the new weights go out, which is
# another 100 GB. DistBelief (Dean et al. 2012) splits the parameters over many server machines, so that
# no single link carries them all, and its workers do not wait for each other.
# </details>
#
# <details><summary>Why are buckets filled from the last layer on, and not from the first?</summary>
#
# Backward computes the last layer's gradients first. A bucket with the first layer in it is complete
# only at the very end, so there is nothing left to hide its message behind.
# </details>
#
# <details><summary>Rank 1 has 5 samples of a batch and rank 0 has 7. Is the mean of the two gradients right?</summary>
#
# No. Each gradient is a mean over its own samples, so each of rank 1's samples would count 7/5 as much
# as one of rank 0's. Either give all ranks equally many samples, or weight each gradient by its rank's
# share.
# </details>
#
# **Sources**: Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server",
# OSDI; Dean et al. 2012, "Large Scale Distributed Deep Networks", NIPS 25; Li et al. 2020, "PyTorch
# Distributed", https://arxiv.org/abs/2006.15704; Goyal et al. 2017, "Accurate, Large Minibatch SGD",
# https://arxiv.org/abs/1706.02677; Patarasuk and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002.
