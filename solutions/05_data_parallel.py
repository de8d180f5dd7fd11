# ---
# manyhands: {title: Data parallelism, minutes: 150, goal: "Build data parallelism from a parameter server to buckets that travel during backward, equal to one process, and count the bytes on every link", needs: [collectives], job: {flags: "--steps 100 --layers 2 --block 32 --batch 32", loss: [1.43, 1.68]}}
# ---

# %% [markdown]
# # 05 Data parallelism, by hand
#
# You have one model, one large data set, and several devices. How do they train the same model
# together, so that the result is the one that a single device would have found, only sooner?
#
# ![A global batch of six samples is dealt out to two ranks; each runs forward and backward through the whole model, an all-reduce makes the mean of the gradients, and both take the same step, so their weights stay equal](figures/ddp_overview.svg)
#
# In **data parallelism** every device holds the whole model, a **replica**, and works on its own part
# of each batch. In **model parallelism** every device holds a part of the model, and the whole batch
# passes through all of them:
#
# | | data parallelism | model parallelism |
# |---|---|---|
# | each device holds | the whole model | a part of it |
# | each device sees | a part of the batch | the whole batch |
# | what is exchanged | gradients | activations, and their gradients |
# | what becomes better | time | the size that fits |
# | what limits it | the model must fit on one device | devices wait for each other |
#
# This lesson is about the first; lessons 12 and 13 are about the second. You build it four times,
# each time faster, and each time you show that it equals training in one process.

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
# Before you spread training over many devices, be clear about what one device does. Here are fifteen
# steps of the first batch, from the start of the program to the moment at which control returns to
# the loop. They are shuffled.

# %% tags=["nbval-check-output"]
for letter, step in STEPS.items():
    print(letter, step)

# %% [markdown]
# Put them in order. Return the letters as one text, such as `"ABC..."`.

# %% exercise="order_of_steps" todo="5.1" minutes=10 difficulty=1 points=1
from manyhands.data_parallel.loops import order_of_steps

# %% check="5.1" tags=["nbval-check-output"]
check.order_of_steps(order_of_steps)

# %% [markdown]
# Now several ranks train the same batch. Most of the fifteen steps stay as they are. Four things
# change:

# %% tags=["nbval-check-output"]
for name, change in CHANGES.items():
    print(f"{name:6} {change}")

# %% [markdown]
# For each of them, name the first of the fifteen steps that comes out differently, or that has to
# wait for a message. Return a dictionary, such as `{"share": "A", ...}`.

# %% exercise="steps_that_change" todo="5.2" minutes=10 difficulty=2 points=1
from manyhands.data_parallel.loops import steps_that_change

# %% check="5.2" tags=["nbval-check-output"]
check.steps_that_change(steps_that_change)

# %% [markdown]
# ### The slides disagree: when are the gradients averaged?
#
# One lecture says that gradients are averaged "at the end of the forward pass". Ask PyTorch: what is
# in `.grad` when forward has ended?

# %% tags=["nbval-check-output"]
layer = nn.Linear(3, 1)
loss = layer(torch.ones(2, 3)).mean()
print("after forward: ", layer.weight.grad)
loss.backward()
print("after backward:", layer.weight.grad.tolist())

# %% [markdown]
# Nothing, after forward. There is nothing to average before backward has begun. Section 6 shows on a
# time line when it happens: during backward, or after it.

# %% [markdown]
# ## 2. A parameter server
#
# The oldest way is easy to see through. One rank, the **server**, holds the weights and the
# optimizer. The others, the **workers**, compute gradients. In every step
#
# 1. each worker sends its gradients to the server,
# 2. the server averages them and takes the step,
# 3. it sends the new weights back to every worker.
#
# A model has many parameters. One message for each would be slow, so all go as one vector. `pack`
# and `unpack` are given.
#
# `dist.send(vector, group=group, group_dst=server)` sends to a rank of the group, and
# `dist.recv(vector, group=group, group_src=server)` waits for a message from it and writes it into
# `vector`. Both count ranks inside the group; `None` for the group means all ranks of the job.

# %% show="true"
from manyhands.data_parallel.replicas import pack, unpack

# %% exercise="worker_step" todo="5.3" minutes=10 difficulty=1 points=1
from manyhands.data_parallel.loops import worker_step

# %% check="5.3" tags=["nbval-check-output"]
check.worker_step(worker_step)

# %% [markdown]
# The other side. `recv` from one worker after the other. The server has had no backward, so the
# parameters have no `.grad` yet: give them one.

# %% exercise="server_step" todo="5.4" minutes=15 difficulty=2 points=2
from manyhands.data_parallel.loops import server_step

# %% check="5.4" tags=["nbval-check-output"]
check.server_step(server_step)

# %% [markdown]
# ### Is it the same training?
#
# The first question about any technique of this course: **parity with one process**. Train ten steps
# of AdamW in one process on the whole batch, and with a server and three workers, each on a third
# of the batch. You will see the largest difference between any two weights.


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
        print(f"rank {rank}: largest difference to one process {difference:.1e}")
        assert difference < 1e-5

# %% [markdown]
# The difference is rounding: sums in another order.

# %% [markdown]
# ## 3. No server: replicas that start equal and stay equal
#
# A server is not needed. If every rank has an optimizer of its own, then equal weights and equal
# gradients make equal steps. Two things are to be done.
#
# ### Start equal
#
# If each rank builds its model from its own random numbers, the replicas differ from the start.
# One cure: the same seed everywhere. A safer one: rank 0 sends its model to all, with
# `dist.broadcast(tensor, src=0)`, or in a group with `dist.broadcast(tensor, group=group,
# group_src=0)`. From here on you use PyTorch's collectives; lesson 04 built them.
#
# A model's **state** is its parameters and its **buffers**. Buffers are tensors without a gradient
# that belong to the model, such as the running mean of batch norm. Frozen parameters, those with
# `requires_grad=False`, belong to it as well.

# %% exercise="broadcast_state" todo="5.5" minutes=10 difficulty=1 points=1
from manyhands.data_parallel.replicas import broadcast_state

# %% check="5.5" tags=["nbval-check-output"]
check.broadcast_state(broadcast_state)

# %% [markdown]
# ### Stay equal
#
# Each rank's loss is the mean over its own share of the batch. Let a batch of $B$ samples be dealt
# out to $N$ ranks, $B/N$ each. The gradient of one process is the mean of the ranks' gradients:
#
# $$\frac{1}{B}\sum_{i=1}^{B} g_i \;=\; \frac{1}{N}\sum_{r=1}^{N}\Big(\frac{N}{B}\sum_{i \in \text{rank } r} g_i\Big)$$
#
# So the mean over ranks is not an approximation. It is the same gradient.

# %% exercise="average_gradients" todo="5.6" minutes=10 difficulty=1 points=1
from manyhands.data_parallel.replicas import average_gradients

# %% check="5.6" tags=["nbval-check-output"]
check.average_gradients(average_gradients)

# %% [markdown]
# ## 4. The whole algorithm
#
# Now you can write data-parallel training down, from the first step to the last:
#
# 1. the ranks join a process group (done, when your function is called),
# 2. every rank gets a copy of the model, and rank 0's weights go to all,
# 3. every rank makes its optimizer,
# 4. for each batch, every rank takes its share,
# 5. forward,
# 6. the loss,
# 7. backward,
# 8. the gradients are averaged over all ranks,
# 9. every rank updates its weights,
#
# and from 4 again. After training all replicas are equal: take any of them, copy its weights to the
# CPU, and save them.

# %% exercise="train_replicas" todo="5.7" minutes=20 difficulty=2 points=2
from manyhands.data_parallel.loops import train_replicas

# %% check="5.7" tags=["nbval-check-output"]
check.train_replicas(train_replicas)


# %%
def train_on_ranks():
    torch.manual_seed(dist.get_rank())  # replicas that start different; rank 0's has to win
    return list(train_replicas(make_model(), make_batches(), 0.01).values())


if check.ready("5.5", "5.6", "5.7"):
    for world_size in (1, 2, 3, 4):
        difference = largest_difference(run_ranks(train_on_ranks, world_size)[0], train_alone())
        print(f"{world_size} rank(s): largest difference to one process {difference:.1e}")
        assert difference < 1e-5

# %% [markdown]
# ## 5. Bytes on every link
#
# Is the server worse, and by how much? Count. The model has $P$ parameters in fp32, so its gradients
# are $4P$ bytes, and so are its weights.
#
# Predict, for 4 workers and 4P = 3360 bytes: how many bytes pass the server's link in a step, in and
# out together? And how many bytes does one of 4 ranks send, when the gradients are added up by the
# ring all-reduce of lesson 04? (There each rank sends 2 (n-1) chunks, and a chunk is 1/n of the
# whole.)

# %%
server_link_bytes, ring_sent_bytes = None, None  # your numbers

# %% answer="true"
server_link_bytes, ring_sent_bytes = 2 * 4 * 3360, 5040  # 2 n x 4P; 2 (n-1)/n x 4P

# %%
from manyhands.collectives.ring import all_reduce_ring  # of lesson 04


class Numbers(nn.Module):
    """A model of 840 parameters, which is 3360 bytes."""

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
# ![On the left four workers send gradients to a server and get weights back, so that all traffic passes the server's link; on the right the same ranks in a ring, where every link carries the same small share](figures/data_parallel_server.svg)
#
# Now for n = 2 to 8, in the same unit: bytes at the busiest rank, in and out together. (This starts 14
# groups of ranks, and takes some seconds.)

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
# The server's line grows with every worker: with 8 it has to move 16 times the model in every step.
# In a ring no rank moves more than four times the model, two in and two out, however many there are.
#
# ### The slides disagree: is the traffic one times the weights?
#
# A deck says of the all-reduce that its traffic is "1x weights", and of the server that it is 2x.
# Your ledger says: in a ring every rank *sends* $2(n-1)/n$ times the gradients, nearly 2x, and
# receives as many. A worker of a parameter server sends 1x and receives 1x, which is less! The gain
# is somewhere else: at the **busiest link**. There the server moves $2n$ times the model.

# %% [markdown]
# ## 6. Hiding the messages
#
# `average_gradients` waits for backward to end, and then sends one message for each parameter. Two
# things are slow about that:
#
# - Every message has a fixed cost, however small it is. A model has hundreds of parameters.
# - Nothing is computed while messages travel.
#
# ### Fewer messages: buckets
#
# So pack parameters into **buckets**, and send a bucket as one message. Backward reaches the *last*
# layer first, so the buckets are filled from the last layer on; you will see in a minute what that
# is good for. `make_buckets` is given. Run it and read the buckets of a small model.

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
# The gradients of the last layer are ready while earlier layers still compute. So send a bucket as
# soon as its last gradient is ready.
#
# ![The gradients of six layers fill three buckets from the last layer on; the all-reduce of a full bucket runs while backward computes earlier layers, so the step comes sooner than in the naive version below, where every message waits for the end of backward](figures/data_parallel_buckets.svg)
#
# Two tools do it:
#
# - A **hook** is a function that PyTorch calls for you.
#   `param.register_post_accumulate_grad_hook(fn)` calls `fn(param)` each time `param.grad` has
#   just been written.
# - `work = dist.all_reduce(flat, async_op=True)` starts a message and returns at once.
#   `work.wait()` returns when it is through. Until then, do not read `flat`.
#
# Three short methods are yours:
#
# - `_on_grad_ready(param)` is the hook. It counts, and decides when to start and when to finish.
# - `_start(index)` packs the bucket's gradients into one flat tensor and sends it.
# - `_finish()` waits, divides, and unpacks.
#
# The rest is given. `loss.backward()` then returns with averaged gradients, so the training loop
# does not change at all.

# %% exercise="BucketedDDP._on_grad_ready BucketedDDP._start BucketedDDP._finish" todo="5.9" minutes=35 difficulty=3 points=3
from manyhands.data_parallel.replicas import BucketedDDP

# %% check="5.9" tags=["nbval-check-output"]
check.BucketedDDP(BucketedDDP)

# %% [markdown]
# ### Predict: how many messages, how many bytes?
#
# The model below has 8 layers, and each has a weight of 256 x 256 and a bias of 256, in fp32 (4
# bytes a number). `average_gradients` sends one message a parameter. Buckets are at most 1 MB
# (10^6 bytes). Write down what you expect, then run the next cell.

# %%
messages_by_parameter = None  # your number: messages a step with average_gradients
messages_by_bucket = None  # your number: messages a step with buckets of 1 MB
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
    score("messages, one a parameter", messages_by_parameter, 2 * 8, counted["naive"][0])
    score("messages, one a bucket", messages_by_bucket, num_buckets, counted["overlapped"][0])
    score("gradient bytes", total_bytes, 8 * layer_bytes, counted["overlapped"][1], "bytes")
    assert counted["bucketed"] == counted["overlapped"]

# %% [markdown]
# Three layers fit into a bucket of 1 MB, so eight layers need three buckets. The bytes are the
# same: buckets save waiting, not traffic.

# %% [markdown]
# ### Look: the time line of your own ranks
#
# Two ranks on one machine have a very fast link, and they share its cores with the messages. A
# network between computers is slower, but carries messages while the cores compute. To see that on
# one machine, the link is slowed down to 200 MB/s, with 1 ms for each message on top: who waits for
# a message sleeps until such a link would have brought it. That part is a model; backward and your
# code are real. Buckets hold two layers here (2.2 MB).

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
# Each rank has two lanes: its work above, its messages below. Grey means that the rank stands and
# waits. In the first two figures every message comes after backward, and the rank is idle all the
# while. Buckets make the messages fewer, so their fixed cost is paid less often. In the third figure
# most messages lie under backward. The last bucket is left over, always: the gradients of the first
# layer are ready last, so nothing is left to hide their message behind.

# %% [markdown]
# ### And without the slow link?
#
# Measure a whole step on two ranks of this machine as it is, and beside it PyTorch's own
# `DistributedDataParallel`. Predict first: will overlapping help, when the ranks and the messages
# share the same cores?

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
        print(f"{how:10} {1e3 * seconds:6.1f} ms a step")

# %% [markdown]
# Buckets help here, too: fewer messages cost less. Overlap adds little, and whether it or PyTorch's
# version is first changes from run to run. The messages need the same cores as backward, so there is
# not much to hide behind. On a cluster the network card carries them, as in the time line above.

# %% [markdown]
# ## 7. One slow rank
#
# All ranks have to be in the all-reduce before any of them can leave it. Let one of three ranks be
# slower, by 100 ms a step. Predict how long a step takes on the *fast* ranks, which need about 20 ms.

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
    score("step of a fast rank", fast_rank_ms, 120, round(1e3 * slowed[0.1][0][0]), "ms")
    assert slowed[0.1][0][0] > 0.1

# %% [markdown]
# One slow rank, a **straggler**, makes all of them slow: the step takes as long as that of the
# slowest. A GPU that runs hot, a shared node, or samples of very different lengths are enough. So
# when a large job is slow, first look for the rank that does *not* wait.

# %% [markdown]
# ## 8. Run it as a job, with your functions in it
#
# The next cell writes your functions to `mine/data_parallel.py`, and trains a small language model with
# your `BucketedDDP` on real processes: one for each GPU of the job, or two without GPUs. The cell
# shows its loss while it runs, and its report at the end. The stop button stops it, after a
# checkpoint. Its files are in the folder `runs` beside this notebook.
#
# In a terminal, in the course's folder, the job is `bash sbatch/data_parallel.sbatch --mine --impl
# overlapped`; without the other options of the cell it trains longer. `naive`, `bucketed` and
# `server` (on two processes: one server, one worker) use your other functions.

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
# - build data parallelism with a server and without one, and prove that it equals one process,
# - count the bytes on every link, and say where the bottleneck is,
# - put messages into buckets and hide them behind backward,
# - say why one slow rank slows all.
#
# **Questions**
#
# <details><summary>A parameter server with 100 workers and a model of 1 GB. Its link carries 10 GB/s each way. How long does a step take at least?</summary>
#
# 20 s: 100 GB have to come in, which takes 10 s, and only then can the new weights go out, another
# 100 GB. DistBelief (Dean et al. 2012) split the server over many machines for that reason, and let
# the workers run ahead of each other.
# </details>
#
# <details><summary>Why are buckets filled from the last layer on, and not from the first?</summary>
#
# Backward computes the last layer's gradients first. A bucket with the first layer in it is complete
# only at the very end, so there would be nothing to hide behind.
# </details>
#
# <details><summary>Rank 1 has 5 samples of a batch and rank 0 has 7. Is the mean of the two gradients right?</summary>
#
# No. Each gradient is a mean over its own samples, so rank 1's samples would weigh 7/5 as much. Either
# give all ranks equally many, or weigh each gradient by its rank's share.
# </details>
#
# **Sources**: Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server",
# OSDI; Dean et al. 2012, "Large Scale Distributed Deep Networks", NIPS 25; Li et al. 2020, "PyTorch
# Distributed", https://arxiv.org/abs/2006.15704; Patarasuk and Yuan 2009,
# https://doi.org/10.1016/j.jpdc.2008.09.002.
