# ---
# manyhands: {title: Data parallelism, goal: "Build data parallelism by hand, from replicas that stay equal to buckets that travel during backward, equal to one process, and count the bytes on every link", job: {flags: "--steps 100 --layers 2 --block 32 --batch 32", loss: [1.43, 1.68]}}
# ---

# %% [markdown]
# # 05 Data parallelism, by hand
#
# You have one model, one large data set, and several devices. How can the devices train the model
# together and reach the result that a single device would have reached, only sooner?
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
# This lesson is about data parallelism; lessons 12 to 14 are about model parallelism. You build it
# step by step, up to messages that travel while backward is still computing, and at each stage the
# result has to equal that of training in one process. You can skip the sections marked optional,
# because no section outside them and no later lesson needs what you write there.

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
from manyhands.data_parallel.replicas import Bucket, pack, sum_type, unpack
from manyhands.instruments import figures
from manyhands.instruments.ledger import Ledger, calls, traffic
from manyhands.jobs import watch
from manyhands.ranks import lab
from manyhands.ranks.failures import RankFailed
from manyhands.ranks.lab import run_ranks
from manyhands.ranks.network import SlowNetwork

lab.warm_up()
print(
    f"torch {torch.__version__}, {os.cpu_count()} cores; the ranks of this notebook use CPU + gloo"
)

# %% [markdown]
# ## 1. One GPU, eight steps
#
# Which parts of training change when several devices share the work? To answer that, first be clear
# about what a single device does. Here are the eight steps that lead from the start of the program to
# the end of the first batch, in shuffled order.

# %% tags=["nbval-check-output"]
for letter, step in STEPS.items():
    print(letter, step)

# %% [markdown]
# Put the steps in order. Return the letters as one string, such as `"ABC..."`.

# %% exercise="order_of_steps" todo="5.1" minutes=4 difficulty=1 points=1
from manyhands.data_parallel.loops import order_of_steps

# %% check="5.1" tags=["nbval-check-output"]
check.order_of_steps(order_of_steps)

# %% [markdown]
# Now several ranks train on the same batch. Most of the eight steps stay as they are, but four things
# change:

# %% tags=["nbval-check-output"]
for name, change in CHANGES.items():
    print(f"{name:6} {change}")

# %% [markdown]
# For each change, name the first of the eight steps that has a different result, or that has to wait
# for a message. A change can fall between two steps: for example, the weights are made equal after the
# model is built and before it is used. In that case name the later of the two steps, because that is
# the one that waits. Return a dictionary, such as `{"share": "A", ...}`.

# %% exercise="steps_that_change" todo="5.2" minutes=5 difficulty=2 points=1
from manyhands.data_parallel.loops import steps_that_change

# %% check="5.2" tags=["nbval-check-output"]
check.steps_that_change(steps_that_change)

# %% [markdown]
# ### The same in fifteen parts
#
# The eight steps are the ones that the exercises need. Seen more closely, one training step of one GPU has
# fifteen parts, and several of them run at the same time. The table says who does each part, and what
# else can run meanwhile.
#
# | | part | done by | can overlap with |
# |---:|---|---|---|
# | 1 | the sampler chooses the samples of the batch | CPU | the GPU's work on earlier batches (7 to 13) |
# | 2 | the samples are read from storage | disk or network | the same |
# | 3 | they travel to the node's memory | network, bus | the same |
# | 4 | they are decoded and augmented | CPU, in workers | the same |
# | 5 | they are put together as one batch | CPU, in workers | the same |
# | 6 | the batch waits in a queue | memory | the same |
# | 7 | the batch is copied to GPU memory | bus | computing on the batch before, if the memory is pinned |
# | 8 | the CPU puts the operations of the step into the GPU's queue | CPU | the GPU's work on earlier operations |
# | 9 | forward computes the output and keeps activations | GPU | 1 to 6 for later batches |
# | 10 | the loss is computed | GPU | the same |
# | 11 | backward computes the gradients, from the last layer to the first | GPU | the same |
# | 12 | the optimizer updates its own state, such as a momentum | GPU | the same |
# | 13 | the optimizer writes new weights | GPU | the same |
# | 14 | the loss is copied to the CPU, which waits until the GPU has computed it | bus | 1 to 6, in workers |
# | 15 | control returns to the program, which may print and starts the next step | CPU | 1 to 6, in workers |
#
# With several GPUs every rank does all fifteen parts for its own share of the batch. In part 1 the ranks
# have to choose different samples, and between parts 11 and 12 stands a new part, the averaging of the
# gradients. It is done by the network, and most of it can overlap with part 11, as section 7 shows.

# %% [markdown]
# ### When are the gradients averaged?
#
# Some slides say that gradients are averaged "at the end of the forward pass". Ask PyTorch: what is in
# `.grad` when forward has ended?

# %% tags=["nbval-check-output"]
layer = nn.Linear(3, 1)
loss = layer(torch.ones(2, 3)).mean()
print("after forward: ", layer.weight.grad)
assert layer.weight.grad is None
loss.backward()
print("after backward:", layer.weight.grad.tolist())

# %% [markdown]
# After forward there is no gradient yet, so nothing can be averaged before backward has begun. The
# averaging happens during backward or after it, and section 7 shows both on a time line.
#
# ### The yardstick: one process
#
# The first question about any technique in this course is **parity with one process**: does the
# technique find the same weights? So here is the training with which every version below is compared:
# ten steps of AdamW in one process, each on a whole batch.


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


# %% [markdown]
# ## 2. A parameter server (optional)
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
# vector. Two functions are given, and section 6 shows their code: `pack(tensors)` returns such a
# vector, and `unpack(vector, tensors, divisor)` writes it back into the tensors, divided by `divisor`,
# which is 1 if you leave it out.
#
# `dist.send(vector, group=group, group_dst=server)` sends to a rank of the group, and
# `dist.recv(vector, group=group, group_src=server)` waits for a message from that rank and writes it
# into `vector`. Both count ranks inside the group; `None` for the group means all ranks of the job.

# %% exercise="worker_step" todo="5.3" minutes=10 difficulty=1 points=1
from manyhands.data_parallel.loops import worker_step

# %% check="5.3" tags=["nbval-check-output"]
check.worker_step(worker_step)

# %% [markdown]
# Now write the server's side, which calls `recv` for one worker after the other. The server never runs
# backward, so its parameters have no `.grad` until you give them one.

# %% exercise="server_step" todo="5.4" minutes=15 difficulty=2 points=2
from manyhands.data_parallel.loops import server_step

# %% check="5.4" tags=["nbval-check-output"]
check.server_step(server_step)

# %% [markdown]
# ### Is it the same training?
#
# Train with one server and three workers, where each worker takes a third of the batch. Watch the
# largest difference between a weight of a rank and the same weight of the single process.


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
# The difference is rounding, because the server adds up the gradients in a different order from one
# process. So training with a server is the same training.

# %% [markdown]
# ## 3. No server: replicas that start equal and stay equal
#
# Is a server needed at all? No: if every rank has an optimizer of its own, then equal weights and equal
# gradients lead to equal steps. So the replicas have to start equal, and their gradients have to agree.
#
# ### Start equal
#
# If each rank builds its model from its own random numbers, the replicas differ from the start. One
# cure is to use the same seed everywhere. A safer cure is to let rank 0 send its model to all ranks,
# with `dist.broadcast(tensor, src=0)`, or in a group with `dist.broadcast(tensor, group=group,
# group_src=0)`. You built your own collectives in lesson 04; from here on you use PyTorch's.
#
# Two details matter. Autograd must not record the message, so send `tensor.detach()`, which shares the
# parameter's memory. And because a message is one piece of memory (lesson 04), a tensor whose elements
# do not lie side by side has to be sent as a contiguous copy, which is then copied back.
#
# A model's **state** is its parameters and its **buffers**. Buffers are tensors without a gradient that
# belong to the model, such as the running mean in a batch normalization layer. **Frozen** parameters,
# which are those with `requires_grad=False`, belong to the state as well.

# %% exercise="broadcast_state" todo="5.5" minutes=10 difficulty=1 points=1
from manyhands.data_parallel.replicas import broadcast_state

# %% check="5.5" tags=["nbval-check-output"]
check.broadcast_state(broadcast_state)

# %% [markdown]
# ### Stay equal
#
# Each rank's loss is the mean over its own share of the batch. Suppose a batch of $B$ samples with the
# gradients $g_i$ is dealt out to $N$ ranks, so that each gets $B/N$ samples. Then the gradient that one
# process would compute is the mean of the ranks' gradients:
#
# $$\frac{1}{B}\sum_{i=1}^{B} g_i \;=\; \frac{1}{N}\sum_{r=1}^{N}\Big(\frac{N}{B}\sum_{i \in \text{rank } r} g_i\Big)$$
#
# So the mean over ranks is not an approximation: except for rounding, it is the same gradient. But this
# needs two conditions. Every rank has to average over equally many items, which fails, for example, when
# each rank divides by its own number of tokens. And a sample's gradient must not depend on the rest of
# the batch, as it does with batch normalization, where each rank normalizes by the statistics of its own
# share (Goyal et al. 2017).
#
# `dist.all_reduce(tensor, group=group)` replaces the tensor by its sum over the ranks, so divide afterwards.
# Like a broadcast, it needs a contiguous tensor. The gradients here have 32 bits. In a type of 16 bits the sum
# may be too large where the mean is not, so the course's own function adds such gradients up in
# `sum_type(dtype)`, which is float32 for these types; PyTorch divides before it adds. Yours may leave that out.

# %% exercise="average_gradients" todo="5.6" minutes=8 difficulty=1 points=1
from manyhands.data_parallel.replicas import average_gradients

# %% check="5.6" tags=["nbval-check-output"]
check.average_gradients(average_gradients)

# %% [markdown]
# ## 4. The whole algorithm
#
# What does training without a server look like as a whole? You now have all its parts:
#
# 1. the ranks join a process group (already done when your function is called),
# 2. every rank builds a copy of the model, and rank 0's weights are sent to all,
# 3. every rank creates its optimizer,
# 4. for each batch, every rank takes its share,
# 5. forward,
# 6. the loss,
# 7. backward,
# 8. the gradients are averaged over all ranks,
# 9. every rank updates its weights,
#
# and so on from item 4 for the next batch. After training all replicas have equal weights, so you can take
# any of them, copy its weights to the CPU, and save them. The cell after the check tests parity again, on one
# to four ranks whose replicas are built from different seeds. Only rounding should remain.

# %% exercise="train_replicas" todo="5.7" minutes=15 difficulty=2 points=2
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
# ## 5. What is averaged, and over which link? (optional)
#
# ### Does data parallelism average the training data?
#
# Some slides say that data parallelism averages the training data, and that the optimizer runs on each
# micro-batch, by which they mean a rank's share of a batch. You can test both claims by counting.
# Predict: in ten batches, how many steps does the optimizer of one rank out of four take? And suppose
# two ranks hold one sample each, $x = 1$ and $x = -1$. What is the gradient of $(wx - 1)^2$ at $w = 1$
# if you average their gradients, and what is it if you average their samples first?

# %%
num_steps, mean_of_gradients, gradient_of_the_mean = None, None, None  # your numbers

# %% answer="true"
num_steps, mean_of_gradients, gradient_of_the_mean = 10, 2, 0  # the two gradients are 0 and 4


# %%
from torch.optim.optimizer import register_optimizer_step_post_hook


def count_steps():
    steps = []
    register_optimizer_step_post_hook(lambda *_: steps.append("one more"))
    train_replicas(make_model(), make_batches(), 0.01)
    return len(steps)


def gradient(samples):
    weight = torch.ones((), requires_grad=True)
    ((weight * samples - 1) ** 2).mean().backward()
    return weight.grad.item()


samples = torch.tensor([1.0, -1.0])
by_gradients = (gradient(samples[:1]) + gradient(samples[1:])) / 2
if check.ready("5.5", "5.6", "5.7"):
    for counted in run_ranks(count_steps, 4):
        assert counted == 10
    score("steps of a rank's optimizer", num_steps, 10, counted)
score("mean of the gradients", mean_of_gradients, 2, by_gradients)
score("gradient of the mean sample", gradient_of_the_mean, 0, abs(gradient(samples.mean())))
assert gradient(samples) == by_gradients == 2 and gradient(samples.mean()) == 0

# %% [markdown]
# Every rank takes one step per batch, ten in all, like a single process. So the optimizer does not step
# for each micro-batch but waits for the mean gradient of all of them. And data parallelism averages
# gradients, not samples: the mean of the samples is $x = 0$, from which nothing can be learnt here.

# %% [markdown]
# ### Server or ring: bytes and time
#
# Does a server move more bytes than an all-reduce, and what does that cost? The model has $P$
# parameters in fp32, so its gradients take $4P$ bytes, and so do its weights.
#
# Predict, for 4 workers and 4P = 201,600 bytes: how many bytes pass through the server's link in a step,
# in and out together? And how many bytes does each of 4 ranks send when the ring all-reduce of lesson 04
# adds up the gradients? (In a ring each rank sends 2 (n-1) chunks, and a chunk is 1/n of the whole.)

# %%
server_link_bytes, ring_sent_bytes = None, None  # your numbers

# %% answer="true"
server_link_bytes, ring_sent_bytes = 2 * 4 * 201_600, 302_400  # 2 n x 4P; 2 (n-1)/n x 4P

# %%
from manyhands.collectives.ring import all_reduce_ring  # from lesson 04

MODEL_BYTES = 201_600  # of 50,400 parameters, which 2 to 8 ranks divide evenly


class Numbers(nn.Module):
    """A model that holds numbers, and a gradient for each."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(MODEL_BYTES // 4))
        self.weight.grad = torch.ones_like(self.weight)


def step_with_server(group):
    model = Numbers()
    if dist.get_rank(group) == 0:
        server_step(model, torch.optim.AdamW(model.parameters()), group)
    else:
        worker_step(model, 0, group)


def step_in_ring(group):
    all_reduce_ring(Numbers().weight.grad, "avg", group)


# %% [markdown]
# The next cells count the bytes, and measure the time of a step on a simulated network of 20 MB/s with 0.5
# ms of latency per message. The messages are real, but each is delayed for as long as such a network would
# take to carry it. Among nine ranks, each n from 2 to 8 is timed with a server and n workers, and with a
# ring of n ranks. Before you run the cells, predict the shape that both curves would have if only the
# network counted: which time grows by the same amount with every rank, and which one by less and less?

# %%
NETWORK = {"latency_s": 0.5e-3, "bytes_per_s": 20e6}


def step_seconds(step, group, repeats=3):
    """The fastest of a few steps (s), which all ranks of the group begin together."""
    times = []
    with SlowNetwork(**NETWORK):
        for _ in range(repeats):
            dist.barrier(group)
            start = time.perf_counter()
            step(group)
            times.append(time.perf_counter() - start)
    return min(times)


def compare_on_rank(counts):
    """For each scheme and n: this rank's messages, and the time of its step."""
    found = {}
    for n in counts:
        groups = {"server": dist.new_group(range(n + 1)), "ring": dist.new_group(range(n))}
        for name, step in (("server", step_with_server), ("ring", step_in_ring)):
            if dist.get_rank(groups[name]) >= 0:
                with Ledger() as ledger:
                    step(groups[name])
                found[name, n] = ledger.entries, step_seconds(step, groups[name])
    return found


# %%
def busiest_bytes(ranks):
    """The largest number of bytes that go in and out of one rank."""
    links = traffic(entry for entries, _ in ranks for entry in entries)
    return max(
        sum(nbytes for link, nbytes in links.items() if rank in link) for rank in range(len(ranks))
    )


if check.ready("5.3", "5.4"):
    counts = list(range(2, 9))
    by_rank = run_ranks(compare_on_rank, 9, counts, timeout_s=60)
    link_bytes, step_ms = {}, {}
    for key in by_rank[0]:
        ranks = [found[key] for found in by_rank if key in found]
        link_bytes[key] = busiest_bytes(ranks)
        step_ms[key] = 1e3 * max(time_s for _, time_s in ranks)
    score("server's link, 4 workers", server_link_bytes, 8 * MODEL_BYTES, link_bytes["server", 4])
    sent = link_bytes["ring", 4] // 2  # the other half comes in
    score("sent by a rank of 4 in a ring", ring_sent_bytes, 6 * MODEL_BYTES // 4, sent, "bytes")

# %% [markdown]
# ![On the left four workers send gradients to a server and get weights back, so that all traffic passes the server's link; on the right the same ranks form a ring, where every link carries the same amount](figures/data_parallel_server.svg)
#
# To compare the two, count both in one unit: the bytes in and out of the busiest rank together. With 8
# workers a server moves $64P$ bytes, and each of 8 ranks in a ring moves $14P$. The time follows from the
# messages that have to pass one after the other. As in lesson 04, a message of $s$ bytes takes
# $\alpha + \beta s$, where $\alpha$ is the latency and $\beta$ is the time per byte, the inverse of the
# bandwidth. The server receives $n$ messages of $4P$ bytes and then sends $n$. A ring takes $2(n-1)$
# turns with a chunk of $4P/n$ bytes each, and in each turn all ranks send at once:
#
# $$t_\text{server} = 2n\Big(\alpha + 4P\beta\Big), \qquad
# t_\text{ring} = 2(n-1)\Big(\alpha + \frac{4P\beta}{n}\Big)$$


# %%
def formula_ms(name, n):
    alpha_s = NETWORK["latency_s"]
    beta_s = 1 / NETWORK["bytes_per_s"]
    if name == "server":
        return 1e3 * 2 * n * (alpha_s + beta_s * MODEL_BYTES)
    return 1e3 * 2 * (n - 1) * (alpha_s + beta_s * MODEL_BYTES / n)


if check.ready("5.3", "5.4"):
    for n in counts:
        for name, wanted in (("server", 2 * n), ("ring", 4 * (n - 1) / n)):
            moved, ms = link_bytes[name, n] / MODEL_BYTES, step_ms[name, n]
            told = f"{moved:5.2f} x 4P, {ms:5.0f} ms (formula {formula_ms(name, n):4.0f})"
            print(f"n = {n}: {name:6} {told}")
            assert moved == wanted and ms > 0.95 * formula_ms(name, n)
    times = step_ms["server", 8] / step_ms["ring", 8]
    ideal = formula_ms("server", 8) / formula_ms("ring", 8)
    print(
        f"With 8 workers the server takes {times:.1f} times as long; the formulas say {ideal:.1f}."
    )

# %%
if check.ready("5.3", "5.4"):
    figure, ax = figures.new_figure(width=5.5, height=3.6)
    names = ("server", "ring")
    measured = {name: (counts, [step_ms[name, n] for n in counts]) for name in names}
    predicted = {name: (counts, [formula_ms(name, n) for n in counts]) for name in names}
    figures.measured_and_predicted(ax, measured, predicted, "workers or ranks", "ms per step")
    ax.set(xscale="linear", yscale="linear", ylim=(0, None))
    figures.show(figure, "Time of a step on a slow network, for a server and for a ring.")

# %% [markdown]
# The server's time grows with every worker: with 8 workers the server has to move 16 times the model in
# every step, one message after the other. In a ring no rank moves more than four times the model, two in
# and two out, however many ranks there are, so for many ranks it is almost only the latency that still
# grows with n. Points usually lie above their line, because the formulas count only the network, while
# every message also takes time on the cores that all ranks share. In a ring all ranks work at once, so a
# machine with few cores slows the ring more than the server, and the measured gain is then smaller than the
# predicted one.
#
# ### Is the traffic of an all-reduce one times the weights?
#
# Some slides say that the traffic of an all-reduce is "1x weights", and that of a server 2x. Your ledger
# says that in a ring every rank *sends* $2(n-1)/n$ times the size of the gradients, nearly 2x for large n,
# and receives as much. A worker of a parameter server sends 1x and receives 1x, which is less for more than
# two ranks. The ring gains at the **busiest link**: that link is the server's, which carries $2n$ times the
# model.

# %% [markdown]
# ## 6. Fewer messages: buckets
#
# How can the averaging become faster? `average_gradients` is called when backward has ended, and then
# sends one message for each parameter tensor. This is slow for two reasons:
#
# - Every message has a fixed cost, however small it is, and a model has hundreds of parameter tensors.
# - Nothing is computed while messages travel.
#
# This section is about the first reason, and the next section is about the second. To send fewer
# messages, group the parameters into **buckets**, and send the gradients of each bucket as one message.
# The code below does so with buckets that are already made. As you read it, ask yourself what a rank
# holds after each line.

# %% show="true"
from manyhands.data_parallel.replicas import pack, unpack, average_buckets

# %% [markdown]
# Your function decides which parameters share a bucket. Backward reaches the *last* layer first, so
# bucket 0 starts with the last parameter: its gradients are then the first to be complete, and section 7
# makes use of that. And because all elements of a vector have the same data type, all parameters in a
# bucket need the same type, too.

# %% exercise="make_buckets" todo="5.8" minutes=10 difficulty=2 points=1
from manyhands.data_parallel.replicas import make_buckets

# %% check="5.8" tags=["nbval-check-output"]
check.make_buckets(make_buckets)

# %% [markdown]
# ## 7. Hiding the messages behind backward
#
# Why wait for the end of backward at all? The gradients of the last layer are ready while backward is
# still computing those of earlier layers, so a bucket can be sent as soon as its last gradient is ready.
#
# ![The gradients of six layers fill three buckets from the last layer on; the all-reduce of a full bucket runs while backward computes earlier layers, so the step comes sooner than in the naive version below, where every message waits for the end of backward](figures/data_parallel_buckets.svg)
#
# ### In which order do gradients arrive?
#
# A **hook** is a function that PyTorch calls for you. `param.register_post_accumulate_grad_hook(fn)`
# makes PyTorch call `fn(param)` each time `param.grad` has just been written. Use such hooks to record
# the order in which the gradients become ready.

# %% exercise="watch_arrivals" todo="5.9" minutes=8 difficulty=2 points=1
from manyhands.data_parallel.replicas import watch_arrivals

# %% check="5.9" tags=["nbval-check-output"]
check.watch_arrivals(watch_arrivals)

# %% [markdown]
# Now watch two models. The first uses its layers in the order in which it defines them, and the second
# defines them in a different order. For each model, predict the list of arrivals, and the buckets if a
# bucket holds at most 1,152 bytes.


# %%
class Crossed(nn.Module):
    """Defines its layers in another order than forward uses them."""

    def __init__(self):
        super().__init__()
        self.used_last = nn.Linear(32, 1)
        self.used_first = nn.Linear(8, 32)

    def forward(self, x):
        return self.used_last(torch.tanh(self.used_first(x)))


if check.ready("5.8", "5.9"):
    for model in (make_model(), Crossed()):
        arrived = watch_arrivals(model)
        model(torch.randn(4, 8)).sum().backward()
        names = {param: name for name, param in model.named_parameters()}
        buckets = [[names[p] for p in b] for b in make_buckets(model.parameters(), 1152)]
        print(f"arrive:  {arrived}\nbuckets: {buckets}")
        if isinstance(model, Crossed):
            assert arrived[0] in buckets[-1] and arrived[-1] in buckets[0]

# %% [markdown]
# Gradients come in reverse order of *use*, from the last layer that forward used to the first. In the
# first model this is the reverse order of definition as well, so bucket 0 is complete first. In the
# second model bucket 0 is complete last.
#
# Nothing forces all ranks to see the same order, either, because a model may choose its layers by the
# data. But messages are matched by the order of the calls: the first all-reduce of one rank meets the
# first of every other rank, whatever it contains. So all ranks have to agree on an order beforehand. The
# order that they all know is that of the buckets' numbers: bucket 0 starts first, then bucket 1, and so
# on. The number of a bucket is called its **index**, and a bucket is **full** when all its gradients are
# ready. A bucket that is full too early waits until those before it have started.
#
# ### Start a bucket when it is full
#
# `work = dist.all_reduce(flat, async_op=True)` starts an all-reduce of the vector `flat` and returns at
# once. `work.wait()` returns when the all-reduce is complete, or, with NCCL, makes the GPU's later work
# wait for it. Until then, do not touch `flat`.
#
# Two short methods are yours:
#
# - `_on_grad_ready(param)` is the hook. It counts the gradients, decides which buckets to start, and
#   calls `_finish` when all have started.
# - `_start(index)` packs the bucket's gradients into one flat tensor and sends it.
#
# The rest is given. For now `_finish` does nothing, so nobody waits for the messages yet. `self.sync` is
# False while gradients are only to be added up and not sent, and lesson 06 makes use of that.

# %% exercise="BucketSender._on_grad_ready BucketSender._start" todo="5.10" minutes=20 difficulty=3 points=2
from manyhands.data_parallel.replicas import BucketSender

# %% check="5.10" tags=["nbval-check-output"]
check.BucketSender(BucketSender)

# %% [markdown]
# ### Wait, and write back
#
# What is left is the end of backward: wait for the messages, and write the means into the gradients. The
# hook of the last gradient calls `_finish`, so the waiting happens inside `loss.backward()`, and when
# that returns, the gradients are averaged. So the training loop does not change at all. Two more methods
# are given: `forward` raises an error if a parameter got no gradient in the backward before it, and
# `no_sync` sets `self.sync` to False for a while. A third, `_note_once` of `BucketSender`, raises an error if a
# parameter gets a second gradient before all have had their first. That happens when two losses share layers
# and each has a backward of its own.

# %% exercise="BucketedDDP._finish" todo="5.11" minutes=10 difficulty=2 points=2
from manyhands.data_parallel.replicas import BucketedDDP

# %% check="5.11" tags=["nbval-check-output"]
check.BucketedDDP(BucketedDDP)

# %% [markdown]
# ### How much does yours hide?
#
# A correct answer can still be slow. The next cell measures how much of the messages' time your class
# hides on a simulated slow network, and how much the course's own class hides. The model's layers only
# sleep during backward. The last of its four buckets has nothing left to hide behind, so at best 75 % is
# hidden. A slow answer costs no points, and if the machine is too busy to tell, the cell says so.

# %%
if check.ready("5.10", "5.11"):
    check.measure_overlap(BucketedDDP)

# %% [markdown]
# ### Look: the time line of your own ranks
#
# How much waiting do buckets and overlap remove? (**Overlap** means that messages travel while backward
# computes.) Two ranks on one machine have a very fast link, but their messages use the same cores as
# backward. A network between computers is slower, but it carries messages while the cores compute. So
# the next cells simulate a link of 200 MB/s with 1 ms of latency per message: a rank that waits for a
# message sleeps for as long as the simulated link would take. Backward and your code are real. A bucket
# holds about two layers here (2.1 MB).
#
# Watch how long a rank waits in a step. The link needs 42 ms for the model's 8.4 MB, to which each
# message adds 1 ms: that makes 58 ms with 16 messages and 46 ms with 4 buckets. With overlap only the
# last bucket must be left over, which takes 11.5 ms; what else is left depends on how long backward
# takes. The three versions take turns, so that other work on this machine disturbs all of them alike, and
# for each the step with the median waiting of rank 0 is shown.

# %%
HOW = ("naive", "bucketed", "overlapped")


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


# %%
from manyhands.instruments.timeline import Timeline

LINK = {"bytes_per_s": 200e6, "latency_s": 1e-3}


def start_together():
    """Return on all ranks at the same moment, which rank 0 names."""
    start_s = torch.tensor(time.time() + 0.02, dtype=torch.float64)
    dist.broadcast(start_s, src=0)
    time.sleep(max(0.0, start_s.item() - time.time()))


def record(rounds=5):
    """This rank's spans by version, one list per round."""
    versions = {how: wrap(how, eight_layers(512), bucket_mb=2.2) for how in HOW}
    inputs = torch.randn(512, 512)
    found = {how: [] for how in HOW}
    real = dist.all_reduce
    for _ in range(rounds + 1):  # the first round warms up
        for how, (model, after_backward) in versions.items():
            model.zero_grad()
            line = Timeline()
            line.watch_all_reduces(**LINK)
            start_together()
            with line.span("forward"):
                loss = model(inputs).sum()
            with line.span("backward"):
                loss.backward()
            after_backward()
            dist.all_reduce = real  # without the slow link again
            found[how].append(line.spans)
    return {how: runs[1:] for how, runs in found.items()}


# %%
def end_ms(spans):
    return 1e3 * (max(stop for *_, stop in spans) - min(start for _, _, start, _ in spans))


def waiting_ms(spans):
    return 1e3 * sum(stop - start for r, role, start, stop in spans if (r, role) == (0, "idle"))


def sent_by_rank_0(spans):
    """How many messages rank 0 sends, and how many of them before it first waits for one."""
    starts = [start for r, role, start, _ in spans if (r, role) == (0, "communication")]
    first_wait = min(start for r, role, start, _ in spans if (r, role) == (0, "idle"))
    return len(starts), sum(start <= first_wait for start in starts)


if check.ready("5.6", "5.8", "5.11"):
    rank_0, rank_1 = run_ranks(record, 2)
    shown, waits_ms, link_ms, sent = {}, {}, {}, {}
    for how in HOW:
        runs = [one + other for one, other in zip(rank_0[how], rank_1[how], strict=True)]
        shown[how] = sorted(runs, key=waiting_ms)[len(runs) // 2]
        waits_ms[how] = waiting_ms(shown[how])
        messages, early = sent[how] = sent_by_rank_0(shown[how])
        model_s = 8 * (512 * 512 + 512) * 4 / LINK["bytes_per_s"]
        link_ms[how] = 1e3 * (messages * LINK["latency_s"] + model_s)
        print(f"{how:10} {messages:2} messages, {early} sent before the first wait: ", end="")
        print(f"link busy {link_ms[how]:.0f} ms, rank 0 waits {waits_ms[how]:.0f} ms")
    assert sent == {"naive": (16, 1), "bucketed": (4, 1), "overlapped": (4, 4)}
    by_buckets = waits_ms["naive"] - waits_ms["bucketed"]
    by_overlap = waits_ms["bucketed"] - waits_ms["overlapped"]
    if min(by_buckets, by_overlap) > 0:
        print(f"Buckets save {by_buckets:.0f} ms of waiting per step, and overlap saves ", end="")
        print(f"{by_overlap:.0f} ms more.")
    else:
        print("This machine was too busy to show what they save: run this cell again.")
    figure, axes = figures.new_figure(height=7.2, rows=3)
    longest = max(map(end_ms, shown.values()))
    for ax, (how, spans) in zip(axes, shown.items(), strict=True):
        figures.timeline(ax, sorted(spans, key=lambda span: span[1] == "idle"))
        ax.set_title(f"{how}: rank 0 waits {waits_ms[how]:.0f} ms", fontsize=10)
        ax.set_xlim(0, 1.02 * longest)
    figures.legend_below(figure, axes[0])
    figures.show(figure, "Time lines of two ranks: naive, bucketed and overlapped messages.")

# %% [markdown]
# Each rank has two lanes, with its work above and its messages below. Grey means that the rank waits, at
# times for longer than the link alone needs, because the other rank may be late. In the first two panels
# every message comes after backward, so the rank waits about as long as the link is busy, or longer if the
# other rank is late. With buckets there are fewer messages, so the fixed cost is paid less often: the link
# is busy for 12 ms less. In the third panel the messages lie under backward as far as it is long enough, and
# overlap can hide the 34.5 ms of three buckets. The last bucket is left over, because the gradients of the
# first layer are ready last. (If other programs delay a rank before it waits, less of that message is left
# to wait for.) So the link's own times let buckets save 12 ms, and overlap up to 34.5 ms where backward is
# long enough. What your run saved differs from that by the time for which one rank was late, or woke up
# late. Forward and backward are real work, whose length varies from run to run. That is why the cell
# compares the waiting and not the whole steps.

# %% [markdown]
# ## 8. Break it on purpose (optional)
#
# The contract of an all-reduce is short: every rank makes the same calls in the same order, and no rank
# touches a tensor whose message is on its way. What happens when a rank breaks this contract? Which rank
# waits, which gets an error, and what is wrong afterwards? All three experiments below end by themselves.
#
# ### Two ranks, two orders
#
# Four buckets of equal size hold the gradients 2, 20, 200 and 2000 on rank 0, and 4, 40, 400 and 4000 on
# rank 1. Rank 0 sends its buckets from first to last, and rank 1 from last to first. Predict the mean
# that rank 0 writes into bucket 0, where 3 would be right.

# %%
bucket_0_on_rank_0 = None  # your number

# %% answer="true"
bucket_0_on_rank_0 = 2001  # (2 + 4000) / 2


# %%
def in_two_orders(bucket_bytes):
    rank = dist.get_rank()
    model = eight_layers()
    buckets = make_buckets(model.parameters(), bucket_bytes)
    for index, bucket in enumerate(buckets):
        for param in bucket:
            param.grad = torch.full_like(param, 2 * (rank + 1) * 10.0**index)
    average_buckets(buckets if rank == 0 else buckets[::-1])
    return [bucket[0].grad[0].item() for bucket in buckets]


if check.ready("5.8"):
    two_layers = 2 * (256 * 256 + 256) * 4
    for rank, found in enumerate(run_ranks(in_two_orders, 2, two_layers)):
        print(f"rank {rank}: {found}, right: [3, 30, 300, 3000]")
        assert found[0] == (2001, 1002)[rank]
    score("bucket 0 on rank 0", bucket_0_on_rank_0, 2001, max(found[0], found[-1]))
    try:
        run_ranks(in_two_orders, 2, 3 * two_layers // 2, timeout_s=5, quiet=True)  # 3, 3, 2 layers
    except RankFailed as failed:
        print("Buckets of different size:", str(failed).splitlines()[-1])

# %% [markdown]
# With buckets of equal size there is no sign of the fault: no rank waits, no call raises an error, and the
# loss may even go down. But the gradients of the last layers are mixed with those of the first, and the
# two ranks now hold different means, so they drift apart. With buckets of different sizes you are lucky,
# because the messages do not fit together and gloo ends the process. This is why `_on_grad_ready` starts
# the buckets by index.
#
# ### Reading too early
#
# The class below looks at all four flat vectors when the last message has just started, before it waits
# for any of them. Predict which of the buckets do not yet hold the sum at that moment.


# %%
class ReadsTooEarly(BucketedDDP):
    """Looks at every 100th number before it waits; counts afterwards how many were right."""

    def _finish(self):
        early = [flat[::100].clone() for flat in self.flats]
        super()._finish()
        size = dist.get_world_size()
        means = [pack([param.grad for param in bucket])[::100] for bucket in self.buckets]
        pairs = zip(early, means, strict=True)
        self.right = [(one / size == mean).float().mean().item() for one, mean in pairs]


def read_too_early():
    model = ReadsTooEarly(eight_layers(1024), bucket_mb=8.5)
    model(torch.randn(256, 1024)).sum().backward()
    return model.right


if check.ready("5.8", "5.10", "5.11"):
    found = run_ranks(read_too_early, 2)
    for rank, right in enumerate(found):
        shares = [f"bucket {index} {share:.0%}" for index, share in enumerate(right)]
        print(f"rank {rank}, share of right numbers: {', '.join(shares)}")
    if min(map(min, found)) == 1:
        print("This time every message arrived before it was read. Run the cell again.")

# %% [markdown]
# There is no error here, either. A bucket is right if its message had arrived by then, which is most
# likely for the first buckets, while the last was sent just before it was read. A vector that is read too
# early holds this rank's own gradients, the sums, or a mixture, and the outcome changes from run to run.
# With a small model on a fast link the results may be right by chance for a long time. That is why the
# checks of this lesson use messages that never arrive before a rank waits for them.
#
# ### One message too few
#
# In the last experiment rank 1 leaves out its last bucket. Predict which rank notices.


# %%
def one_message_too_few():
    rank = dist.get_rank()
    model = eight_layers()
    buckets = make_buckets(model.parameters(), 2 * (256 * 256 + 256) * 4)
    model(torch.ones(1, 256)).sum().backward()
    average_buckets(buckets if rank == 0 else buckets[:-1])


if check.ready("5.8"):
    try:
        run_ranks(one_message_too_few, 2, timeout_s=5)
    except RankFailed as failed:
        print(failed)

# %% [markdown]
# The rank that did nothing wrong waits, while the one with the fault has gone on. In a training loop
# rank 1 would go on to the first message of the next step, which then meets rank 0's last message of this
# one. So when a job hangs, ask which rank is *not* at the line of code where the others wait.

# %% [markdown]
# ## 9. Counts, this machine, and one slow rank (optional)
#
# ### Predict: how many messages, how many bytes?
#
# The model below has 8 layers, and each has a weight of 256 x 256 and a bias of 256, in fp32 (4 bytes per
# number). `average_gradients` sends one message per parameter tensor. Buckets hold at most 1 MB, where our
# `bucket_mb` counts in units of 10^6 bytes. (PyTorch's `bucket_cap_mb` counts in MiB, which are 2^20
# bytes, and its DDP closes a bucket only once the bucket holds at least that much, so all its buckets but
# the last can be larger than the number says. If the number is left at its default of 25, the first bucket
# closes at 1 MiB already.) Write down what you expect, then run the cells below.

# %%
messages_by_parameter = None  # your number: messages per step with average_gradients
messages_by_bucket = None  # your number: messages per step with buckets of 1 MB
total_bytes = None  # your number: bytes of all gradients together

# %% answer="true"
messages_by_parameter, messages_by_bucket, total_bytes = 16, 3, 8 * (256 * 256 + 256) * 4


# %%
def collectives_of_a_step(how):
    model, after_backward = wrap(how, eight_layers(), bucket_mb=1)
    with Ledger() as ledger:
        model(torch.randn(4, 256)).sum().backward()
        after_backward()
    return calls(ledger.entries)["all_reduce"], sum(entry.nbytes for entry in ledger.entries)


# %% tags=["nbval-check-output"]
if check.ready("5.6", "5.8", "5.11"):
    layer_bytes = (256 * 256 + 256) * 4
    counted = {how: run_ranks(collectives_of_a_step, 2, how)[0] for how in HOW}
    num_buckets = -(-8 // (10**6 // layer_bytes))  # rounded up
    score("messages, one per parameter", messages_by_parameter, 2 * 8, counted["naive"][0])
    score("messages, one per bucket", messages_by_bucket, num_buckets, counted["overlapped"][0])
    score("gradient bytes", total_bytes, 8 * layer_bytes, counted["overlapped"][1], "bytes")
    assert counted["bucketed"] == counted["overlapped"] == (3, counted["naive"][1])

# %% [markdown]
# Three layers fit into a bucket of 1 MB, so eight layers need three buckets. The number of bytes stays
# the same, so buckets reduce the waiting but not the traffic.

# %% [markdown]
# ### Without the slow link
#
# What remains of the gain without the slow link? The next cell times forward, backward and averaging on
# two ranks of this machine as it is, for your three versions and for PyTorch's own
# `DistributedDataParallel`. Predict first: will overlap help when backward and the messages share the
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


if check.ready("5.6", "5.8", "5.11"):
    for how, seconds in run_ranks(step_times, 2)[0].items():
        print(f"{how:10} {1e3 * seconds:6.1f} ms per step")

# %% [markdown]
# Buckets usually help here, too, because fewer messages cost less. Overlap usually adds less than it did
# on the slow link, because the messages need the same cores as backward. Whether your version or
# PyTorch's is faster changes from run to run. On a cluster the network card carries the messages, so
# there the time line above is the better model.

# %% [markdown]
# ### One slow rank
#
# What does one slow rank cost the others? All ranks have to enter the all-reduce before any of them can
# leave it. Suppose one of three ranks is slower by 100 ms per step. Predict how long a step takes on the
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
# One slow rank, called a **straggler**, slows all the others, because every step takes as long as on the
# slowest rank. (The all-reduces themselves add some time to the 120 ms, and the lines without a delay
# show roughly how much.) A GPU that runs hot, a node shared with other jobs, or samples of very different
# lengths are enough to cause this. So when a large job is slow, first look for the rank that does *not*
# wait.

# %% [markdown]
# ## 10. Run it as a job, with your functions in it
#
# The next cell writes your functions to `mine/data_parallel.py`, and trains a small language model with
# your `BucketedDDP` on real processes: one for each GPU of the job, or usually two without. The cell shows
# the loss while the job runs, and a report at the end. In the report's figure the loss should start near
# 3.6, which is ln 36 and so a guess among 36 characters, and fall well below 3. The stop button saves a
# checkpoint and then stops the job. The job's files are in the folder `runs` beside this notebook. In its
# log, the line `yours: ...` names only what the script itself calls, here `BucketedDDP`. Your
# `BucketSender`, `make_buckets` and `broadcast_state` are used as well, because `BucketedDDP` is built on them.
#
# To start the job in a terminal, go to the course's folder and type `bash sbatch/data_parallel.sbatch
# --mine --impl overlapped`; without the other options of the cell it trains for longer. With `naive`,
# `bucketed` or `server` in place of `overlapped` it uses your other functions. (On two processes,
# `server` means one server and one worker.)

# %%
if check.ready("5.5", "5.8", "5.10", "5.11"):
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
# - name what changes when a training loop runs on many ranks, and what does not,
# - build data parallelism, and show that it finds the same weights as one process,
# - say in which order gradients arrive, and why messages start in the order of the buckets instead,
# - pack gradients into buckets, hide the messages behind backward, and measure how much is hidden,
# - and, from the optional sections, compare a server's link with a ring's, recognise three ways to
#   break the contract of an all-reduce, and say why one slow rank slows all the others.
#
# **Questions**
#
# <details><summary>A parameter server has 100 workers and a model of 1 GB, and its link carries 10 GB/s each way. How long does a step take at least?</summary>
#
# With the server of this lesson it takes at least 20 s: 100 GB have to come in, which takes 10 s, and only
# then do the new weights go out, which are another 100 GB. A server could send the new weights of a tensor as
# soon as its last gradient is there, and use both directions of the link at once; then 10 s is the least.
# DistBelief (Dean et al. 2012) splits the parameters among many server machines, so
# that no single link carries them all, and its workers do not wait for each other.
# </details>
#
# <details><summary>Why are buckets filled from the last layer on, and not from the first?</summary>
#
# Backward computes the last layer's gradients first, so a bucket of last layers can be sent early. A
# bucket that contains the first layer is complete only at the very end of backward, and then nothing is
# left to hide its message behind.
# </details>
#
# <details><summary>Rank 1 has 5 samples of a batch and rank 0 has 7. Is the mean of the two gradients right?</summary>
#
# No. Each gradient is a mean over its own samples, so each of rank 1's samples would count 7/5 as much
# as one of rank 0's. Either give all ranks equally many samples, or weight each gradient by its rank's
# share of the samples.
# </details>
#
# **Sources**: Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server",
# OSDI; Dean et al. 2012, "Large Scale Distributed Deep Networks", NIPS 25; Li et al. 2020, "PyTorch
# Distributed", https://arxiv.org/abs/2006.15704; Goyal et al. 2017, "Accurate, Large Minibatch SGD",
# https://arxiv.org/abs/1706.02677; Patarasuk and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002.
