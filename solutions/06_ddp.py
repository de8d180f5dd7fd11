# ---
# manyhands: {title: DDP, minutes: 120, goal: "Turn one-process training into data-parallel training with DDP, check every part against one process, and run it as a job", needs: [data_parallel], job: {flags: "--impl scratch --steps 200 --layers 2 --block 32 --batch 32", loss: [0.93, 1.25]}}
# ---

# %% [markdown]
# # 06 DDP: data parallelism as a real job
#
# You have a training loop that works on one device, but it is too slow. How do two devices work on
# the same model, and how do you know that the result is still right?
#
# ![A global batch of six samples is dealt out to two ranks; each runs forward and backward through the whole model, an all-reduce makes the mean of the gradients, and both take the same step, so their weights stay equal](figures/ddp_overview.svg)
#
# The idea is called **data parallelism**. Each process holds a whole copy of the model, a
# **replica**, and works on its own share of the batch. Before the optimizer steps, the processes
# average their gradients, so all take the same step and the replicas stay equal.
#
# PyTorch's version is called `DistributedDataParallel`, or DDP for short. Lesson 05 takes it apart.
# This lesson puts it to work: you write everything that a real job needs around it, and at the end
# the job trains a language model with your code.

# %%
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Sampler

from manyhands.checks import ddp as check, score
from manyhands.instruments import figures
from manyhands.jobs import watch
from manyhands.ranks import lab
from manyhands.ranks.lab import run_ranks
from manyhands.ranks.runtime import World

lab.warm_up()
print(
    f"torch {torch.__version__}, {os.cpu_count()} cores; the ranks of this notebook use CPU + gloo"
)

# %% [markdown]
# ## 1. Processes that know their place
#
# How does a process learn which part of the work is its own? A **rank** is one process of a job,
# and also its number. The **world size** is the number of ranks. `run_ranks(fn, 4)` starts four
# processes on this machine, calls `fn` in each, and returns the four results as a list.
#
# You will see four lines. Their order may change from run to run, because no rank waits for
# another.


# %%
def hello():
    print(f"I am rank {dist.get_rank()} of {dist.get_world_size()}, process {os.getpid()}")
    return dist.get_rank() ** 2


run_ranks(hello, 4)

# %% [markdown]
# The processes share no memory, so each has its own copy of every variable. Here rank 0 changes
# `number`, and you will see that neither rank 1 nor the notebook notices.

# %% tags=["nbval-check-output"]
number = 5


def change():
    global number
    if dist.get_rank() == 0:
        number = 99
    return number


print(run_ranks(change, 2), "and in the notebook:", number)

# %% [markdown]
# Ranks talk only through messages. A **collective** is a message pattern in which all ranks take
# part. Two are enough for this lesson:
#
# - `dist.broadcast(tensor, src=0)`: rank 0's values overwrite `tensor` on every rank.
# - `dist.all_reduce(tensor)`: `tensor` becomes, on every rank, the sum over all ranks.
#
# Both change `tensor` in place. Every rank has to call them, in the same order.
#
# You will meet an argument `group` in this lesson. It names the ranks that take part; `None` means
# all. A function that is given a group passes it on to every call, as `group=group`. Inside a group
# the ranks count from 0 again: use `dist.get_rank(group)`, `dist.get_world_size(group)`, and
# `dist.broadcast(tensor, group=group, group_src=0)`, which sends from the group's first rank.


# %% tags=["nbval-check-output"]
def two_collectives():
    mine = torch.tensor([dist.get_rank() + 1.0])
    sent, summed = mine.clone(), mine.clone()
    dist.broadcast(sent, src=0)
    dist.all_reduce(summed)
    return mine.item(), sent.item(), summed.item()


for rank, (mine, sent, summed) in enumerate(run_ranks(two_collectives, 3)):
    print(f"rank {rank} had {mine:.0f}; after broadcast {sent:.0f}, after all_reduce {summed:.0f}")

# %% [markdown]
# What if one rank forgets to call a collective? Then the others wait for it. Outside this notebook
# they would wait for minutes. Here the wait has a short limit, and the message says which rank
# waits, and in which line.


# %%
def only_rank_0():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))


try:
    run_ranks(only_rank_0, 2)
except RuntimeError as error:
    print(error)

# %% [markdown]
# ### Which rank, which GPU?
#
# A cluster has **nodes**: computers with a few GPUs each. Usually one process drives one GPU. A
# program called `torchrun` runs once on every node and starts the processes there. It tells each
# process its place through **environment variables**, which are named strings that a process
# inherits from the one that starts it.
#
# ![On two nodes with four GPUs each, one torchrun agent per node starts four processes, ranks 0 to 3 and ranks 4 to 7 of a world of 8; both nodes have local ranks 0 to 3, and both agents meet at a port of node 0](figures/ddp_ranks.svg)
#
# | variable | meaning | rank 5 in the picture |
# |---|---|---|
# | `RANK` | number in the whole job | `"5"` |
# | `LOCAL_RANK` | number on its node | `"1"` |
# | `WORLD_SIZE` | processes in the whole job | `"8"` |
# | `LOCAL_WORLD_SIZE` | processes on this node | `"4"` |
#
# Each node numbers its GPUs from 0. That is why a process has two numbers: rank 5 uses GPU 1 of its
# node.
#
# Write `place`. A `World` holds the answer: `World(rank, local_rank, world_size, device)`.

# %% exercise="place" todo="6.1" minutes=10 difficulty=1 points=1
from manyhands.ranks.runtime import place

# %% check="6.1" tags=["nbval-check-output"]
check.place(place)

# %% [markdown]
# ### Joining and leaving
#
# The processes of a job form a **process group**. To join it, each process calls
# `dist.init_process_group(backend, rank=..., world_size=..., timeout=...)`. The **backend** is the
# library that carries the messages: NCCL (NVIDIA Collective Communications Library) between GPUs,
# gloo between CPUs. The processes find each other at the address in the variables `MASTER_ADDR` and
# `MASTER_PORT`, which torchrun sets and torch reads.
#
# At the end each process calls `dist.destroy_process_group()`, because a job that forgets this call
# can still abort after hours of good work. `@contextmanager` turns a function with one `yield` into
# something for a `with` block: the code before the `yield` runs first, and the code after it runs
# last.

# %% exercise="process_group" todo="6.2" minutes=10 difficulty=1 points=1
from manyhands.ranks.runtime import process_group

# %% check="6.2" tags=["nbval-check-output"]
check.process_group(process_group)

# %% [markdown]
# ### Would this setup run?
#
# Setup code is often copied from a slide. The `setup()` below returns three values, but its caller
# unpacks four. A second slip is `lru_cache`, written above a function without its `@`. What do you
# expect to see?

# %% tags=["nbval-check-output"]
from functools import lru_cache


def setup():
    return "rank", "local rank", "device"


try:
    rank, local_rank, world_size, device = setup()
except ValueError as error:
    print("four names for three values:", error)

reads = []
lru_cache(maxsize=1)


def read_without():
    reads.append("without @")


@lru_cache(maxsize=1)
def read_with():
    reads.append("with @")


for _ in range(3):
    read_without()
    read_with()
print({kind: reads.count(kind) for kind in ("without @", "with @")})

# %% [markdown]
# The setup fails at its first call. The missing `@` is worse because nothing fails: the line makes
# a cache and throws it away, and the function below it is called every time. In a job you would
# find such slips only after waiting in the queue, so run your setup on your own machine first.

# %% [markdown]
# ## 2. Every rank its own samples
#
# How do the ranks share out the training data? If all ranks read the same samples, they compute the
# same gradient: twice the work, and nothing gained. So in each epoch the samples are **shuffled**
# once, in the same way on all ranks, and then dealt out like cards.
#
# ![In each of two epochs ten samples are shuffled in another order and dealt out like cards to three ranks, which get 4, 3 and 3; the first six of the order are the first global batch, two from each rank](figures/ddp_sampler.svg)
#
# In PyTorch a **sampler** is an object that a `DataLoader` asks for the numbers of the samples to
# read. Yours has to be
#
# - **disjoint**: no sample is read by two ranks,
# - **complete**: every sample is read by some rank,
# - **new in each epoch**: `set_epoch` changes the order, in the same way on all ranks,
# - **in step with one process**: the first batches of all ranks together are the first batch that
#   one process would have read. Only then can you compare the two runs.

# %% exercise="ShardedSampler.__iter__ ShardedSampler.__len__" todo="6.3" minutes=15 difficulty=2 points=2
from manyhands.data.corpus import ShardedSampler

# %% check="6.3" tags=["nbval-check-output"]
check.ShardedSampler(ShardedSampler)

# %% [markdown]
# Each line below is one rank. In each epoch every number from 0 to 9 should appear exactly once,
# and the two epochs should have different orders.

# %%
if check.ready("6.3"):
    for epoch in range(2):
        for rank in range(3):
            sampler = ShardedSampler(10, rank, 3, seed=7)
            sampler.set_epoch(epoch)
            print(f"epoch {epoch}, rank {rank} reads", list(sampler))

# %% [markdown]
# Rank 0 reads four samples and the others three. What happens if every rank simply goes through its
# own samples, one per step, and averages a number with the other ranks in each step, as DDP averages
# gradients? Predict which rank is left waiting, and in which step.


# %%
def one_sample_per_step():
    for step, _ in enumerate(ShardedSampler(10, dist.get_rank(), 3), start=1):
        print(f"step {step}")
        dist.all_reduce(torch.ones(1))


if check.ready("6.3"):
    try:
        run_ranks(one_sample_per_step, 3, timeout_s=3)
    except RuntimeError as error:
        print(error)

# %% [markdown]
# Rank 0 begins a fourth step and waits for messages that the other ranks never send. With DDP the
# same happens in the fourth backward. So every rank has to take the **same number of steps**: the
# course's training scripts leave the incomplete last batch out.
#
# PyTorch's sampler, `torch.utils.data.DistributedSampler`, keeps the ranks' counts equal by
# **padding**: it reads a few samples twice. For training that hardly matters, but for a validation
# loss it does, as section 4 shows.
#
# In a training script there are up to three loaders: train, validation, test. Each rank reads its
# own share from each, and `shuffle=True` is removed, since the sampler decides the order. Only the
# training data is shuffled, so only its sampler needs `set_epoch`. For the other two a plain
# `range(rank, num_samples, world_size)` is enough.

# %% [markdown]
# ## 3. Replicas, kept equal by DDP
#
# How do the replicas become equal, and what keeps them so? In lesson 05 you build data parallelism
# by hand, up to the class `BucketedDDP`. (Not done yet? The course's version is imported below, so
# this lesson stands alone.) In short:
#
# - At the start, rank 0's parameters and buffers are sent to all ranks, so the replicas are equal.
# - Each rank's loss is the mean over its share, and the shares have the same size, so the *mean* of
#   the ranks' gradients is the gradient of the whole batch. With equal gradients all ranks take
#   equal steps.
# - Gradients are packed into **buckets**, last layer first. A bucket is sent while backward still
#   computes the gradients of earlier layers.
#
# PyTorch's class is `DistributedDataParallel`. It takes your model and returns one that is called
# in the same way. Two arguments matter here:
#
# - `device_ids`: a list with the number of the one GPU that this process drives. For a model on the
#   CPU it has to be `None`.
# - `bucket_cap_mb`: the largest size of a bucket, in MiB ($2^{20}$ bytes).
#
# To find out where the model is, ask `next(module.parameters()).device`. Such a device has a
# `type`, `"cpu"` or `"cuda"`, and an `index`, the number of the GPU.

# %% exercise="torch_ddp" todo="6.4" minutes=10 difficulty=1 points=1
from manyhands.ddp.wrapping import torch_ddp

# %% check="6.4" tags=["nbval-check-output"]
check.torch_ddp(torch_ddp)

# %% [markdown]
# ### Is it the same training?
#
# **Parity with one process** is the first thing to test: ten steps of AdamW in one process on the
# whole batch, and on three ranks with a third of it each, by hand and with PyTorch's class. For
# each rank you will see the largest difference between its weights and those of the single process.

# %%
from manyhands.data_parallel.replicas import BucketedDDP


def make_model():
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def train_ten_steps(model, part):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(5)
    for _ in range(10):
        inputs = torch.randn(12, 8, generator=generator)
        targets = inputs.sin().sum(1, keepdim=True)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs[part]), targets[part]).backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def largest_difference(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


# %%
def on_ranks(wrap, seed_by_rank):
    torch.manual_seed(dist.get_rank() if seed_by_rank else 0)
    share = slice(dist.get_rank(), None, dist.get_world_size())
    return train_ten_steps(wrap(make_model()), share)


if check.ready("6.4"):
    torch.manual_seed(0)
    alone = train_ten_steps(make_model(), slice(None))
    for name, wrap in (("by hand", BucketedDDP), ("PyTorch's", torch_ddp)):
        for weights in run_ranks(on_ranks, 3, wrap, True):
            difference = largest_difference(weights, alone)
            print(f"{name:9} largest difference to one process: {difference:.1e}")
            assert difference < 1e-5

# %% [markdown]
# The differences are rounding, since three ranks add up the same numbers in another order. So it is
# the same training. (Not with BatchNorm: it normalizes with the statistics of the batch, and each
# rank sees only its share. On GPUs `nn.SyncBatchNorm` takes them over all ranks.)
#
# ### When does DDP communicate?
#
# Some guides say that DDP synchronizes in `optimizer.step()`. A **ledger** records every collective
# that a block of code calls, so you can count. Predict: in which of the four operations (wrapping,
# forward, backward, step) is something sent?


# %% tags=["nbval-check-output"]
from manyhands.instruments.ledger import Ledger, calls


def when_does_it_talk():
    found = {}
    with Ledger() as ledger:
        model = torch_ddp(make_model())
        found["wrap"] = calls(ledger.entries)["broadcast"]
        optimizer = torch.optim.AdamW(model.parameters())
        for name, line in (
            ("forward", lambda: found.update(loss=model(torch.randn(4, 8)).sum())),
            ("backward", lambda: found.pop("loss").backward()),
            ("step", optimizer.step),
        ):
            ledger.entries.clear()
            line()
            found[name] = calls(ledger.entries)["all_reduce"]
    return found


if check.ready("6.4"):
    found = run_ranks(when_does_it_talk, 2)[0]
    print(f"wrapping: {'some' if found['wrap'] else 'no'} broadcasts")
    for name in ("forward", "backward", "step"):
        print(f"{name}: {found[name]} all-reduce(s)")

# %% [markdown]
# Wrapping sends rank 0's model, and backward averages the gradients. Nothing is sent in
# `optimizer.step()`, because each rank steps for itself. (One all-reduce is enough here because
# PyTorch's DDP uses a single bucket in its first backward, whatever the model's size. Then it packs
# the buckets anew, by `bucket_cap_mb` and in the order in which the gradients arrived.)
#
# So if you accumulate gradients over several micro-batches, every backward sends them. To send them
# once, run forward and backward of all micro-batches but the last inside `with model.no_sync():`.
# There the gradients only add up on each rank, and the next backward outside averages the sums.
#
# ### Does every rank need the same seed?
#
# Some slides seed each rank differently *before* the model is built. With DDP nothing goes wrong,
# and it is not obvious why. The cell below trains with and without the broadcast at the start. What
# will you see?


# %%
class NoBroadcast(BucketedDDP):
    """BucketedDDP, but every rank keeps the weights that it started with."""

    def __init__(self, module):
        mine = [param.detach().clone() for param in module.parameters()]
        super().__init__(module)
        for param, value in zip(module.parameters(), mine, strict=True):
            param.detach().copy_(value)


for wrap in (BucketedDDP, NoBroadcast):
    first, second = run_ranks(on_ranks, 2, wrap, True)
    print(f"{wrap.__name__:11}: replicas differ by {largest_difference(first, second):.2e}")

# %% [markdown]
# With the broadcast the replicas are equal to the last bit. Without it they take nearly the same
# steps from different starting points, so they stay apart. DDP hides the mistake, because it
# broadcasts rank 0's weights when it wraps the model. Sharded training (lesson 10) does not.
#
# So: **the same seed for the model, a different seed per rank for what must differ**, such as
# dropout. In the scripts `world.seed` is the first and `world.data_seed` the second.

# %% [markdown]
# ## 4. A validation loss that does not depend on the number of ranks
#
# Each rank can evaluate its share of the validation data. How do you put the results together? Two
# shortcuts look harmless: to average the batches' means and then the ranks' means, and to let the
# sampler pad.
#
# ![Rank 0 has 2 items with mean loss 5 and rank 1 has 50 items with mean loss 1; the mean of the means is 3.00, but both sums divided by both counts are 60 / 52 = 1.15](figures/ddp_evaluation.svg)
#
# One way is always right: every rank contributes its **sum** and its **count**. Add up both over
# all ranks, and divide once.

# %% exercise="mean_over_ranks" todo="6.5" minutes=10 difficulty=1 points=1
from manyhands.ddp.wrapping import mean_over_ranks

# %% check="6.5" tags=["nbval-check-output"]
check.mean_over_ranks(mean_over_ranks)

# %% [markdown]
# ### Is a mean of means good enough?
#
# Here are 1001 losses with one outlier, in batches of 64. The shortcut is common in scripts:
# padding sampler, mean over each batch, mean over batches, mean over ranks. Predict: does it give
# the same value for 1, 2, 4 and 8 ranks?

# %% tags=["nbval-check-output"]
torch.manual_seed(3)
losses = torch.rand(1001, dtype=torch.float64)
losses[1000] = 40.0


def shortcut(world_size):
    padded = torch.cat([losses, losses])[: -(-1001 // world_size) * world_size]
    shares = [padded[rank::world_size] for rank in range(world_size)]
    means = [torch.stack([batch.mean() for batch in share.split(64)]).mean() for share in shares]
    return torch.stack(means).mean().item()


def sum_and_count():
    share = losses[dist.get_rank() :: dist.get_world_size()]
    return mean_over_ranks(share.sum(), len(share))


if check.ready("6.5"):
    print("exact: ", f"{losses.mean():.6f}")
    for world_size in (1, 2, 4, 8):
        ours = run_ranks(sum_and_count, world_size)[0]
        print(
            f"{world_size} rank(s): shortcut {shortcut(world_size):.6f}, sum and count {ours:.6f}"
        )

# %% [markdown]
# The shortcut depends on the number of ranks, so with it two runs on different numbers of GPUs
# cannot be compared. Even on one rank it is off, because the last batch is smaller but weighs as
# much as the others. Sum and count give the exact mean on any number of ranks.

# %% [markdown]
# ## 5. Print once, save once
#
# Who prints, and who saves? Every rank runs every line, so a `print` appears once per rank, and a
# `torch.save` becomes a race of all ranks for the same file.
#
# So only rank 0 prints and saves. This leaves two traps:
#
# - The other ranks run on at once. If one of them opens the file, the file may not be there yet.
#   `dist.barrier()` returns only when all ranks have reached it.
# - If the job is killed while it writes, half a file is left, and the older one is lost. So write
#   under another name first; `os.replace(new, old)` then puts the new file in the old one's place
#   in a single operation.
#
# A wrapped model keeps the model that you gave it in `.module`. Save the `state_dict()` of
# `.module`, so that a program that knows nothing of DDP can load it.

# %% exercise="save_once" todo="6.6" minutes=15 difficulty=2 points=2
from manyhands.training.run import save_once

# %% check="6.6" tags=["nbval-check-output"]
check.save_once(save_once)

# %% [markdown]
# ## 6. The whole script, and what changed
#
# How much of a script has to change? `scripts/train_single.py` trains a small language model in one
# process, and `scripts/train_ddp.py` does the same on many. Below is the difference between their
# `train` functions, computed from the files: lines with `-` are removed, lines with `+` are added.
# Name the exercise behind each.

# %% tags=["nbval-check-output"]
import ast
import difflib


def body_of_train(script):
    text = Path(f"../scripts/{script}.py").read_text()
    train = next(n for n in ast.parse(text).body if getattr(n, "name", "") == "train")
    return ast.get_source_segment(text, train).splitlines()


changes = difflib.unified_diff(
    body_of_train("train_single"), body_of_train("train_ddp"), n=0, lineterm=""
)
print("\n".join(line for line in changes if not line.startswith(("---", "+++", "@@"))))

# %% [markdown]
# The loop itself, from `for epoch` to `run.log(loss)`, differs in one line: `set_epoch`. It can
# stay as it was because the gradients are averaged inside backward.
#
# ### Can the language model see the answer?
#
# If a Transformer that predicts the next word has no **causal mask**, each position may look at
# later positions, and so at the word it has to predict. Test a model for this mistake: change one
# later word, and see whether an earlier output moves.


# %% tags=["nbval-check-output"]
def looks_ahead(mask):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0).eval()
    words = torch.randn(1, 6, 16)
    changed = words.clone()
    changed[0, 4] = 0.0  # the word that position 3 has to predict
    before, after = layer(words, src_mask=mask), layer(changed, src_mask=mask)
    return not torch.allclose(before[0, :4], after[0, :4])


causal = nn.Transformer.generate_square_subsequent_mask(6)
print("without a mask, earlier outputs see the later word:", looks_ahead(None))
print("with a causal mask:", looks_ahead(causal))

# %% [markdown]
# Without the mask, training would reach a very low loss, but the model would have learned to copy.
# The course's own model is tested in this way for every position in `tests/test_transformer.py`.

# %% [markdown]
# ## 7. How much faster?
#
# What do you gain from more ranks? In **strong scaling** the global batch stays the same, so each
# rank gets less. In **weak scaling** each rank's batch stays the same, so the global batch grows.
# With $t_n$ the time of a step on $n$ ranks:
#
# | | strong | weak |
# |---|---|---|
# | speed-up | $S = t_1 / t_n$ | $S = n\, t_1 / t_n$ |
# | efficiency | $S / n$ | $S / n$ |
#
# The **Karp-Flatt** number asks which share of the work behaves as if it could not be divided:
# $e = \frac{1/S - 1/n}{1 - 1/n}$. If $e$ stays the same with more ranks, a fixed serial part is the
# limit. If $e$ grows, the overhead grows with the ranks. Above 1 it says that the ranks got in each
# other's way: more of them made the step slower. The formula assumes a fixed amount of work, so the
# cell below prints $e$ for strong scaling only.
#
# Predict the efficiency of strong scaling on 2 ranks and on 4, for your machine. How many cores
# does it have?

# %%
efficiency_2, efficiency_4 = None, None  # your predictions for strong scaling

# %% answer="true"
efficiency_2, efficiency_4 = 0.9, 0.45  # 4 ranks on 2 cores cannot be faster than 2

# %%
from manyhands.models.transformer import Transformer


def step_time(per_rank_batch, steps=12):
    torch.manual_seed(0)
    model = torch_ddp(Transformer(vocab_size=128, block=64, layers=2, heads=4, width=128))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(128, (per_rank_batch, 65))
    times = []
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    return sorted(times[2:])[len(times[2:]) // 2]  # the median, without the first two


def karp_flatt(speedup, ranks):
    return (1 / speedup - 1 / ranks) / (1 - 1 / ranks)


# %%
if check.ready("6.4"):
    scaling = {"strong": {}, "weak": {}}
    for world_size in (1, 2, 4):
        scaling["strong"][world_size] = max(run_ranks(step_time, world_size, 16 // world_size))
        scaling["weak"][world_size] = max(run_ranks(step_time, world_size, 16))
    for kind, times in scaling.items():
        for n, seconds in times.items():
            speedup = times[1] / seconds * (n if kind == "weak" else 1)
            is_strong = kind == "strong" and n > 1
            limit = f", Karp-Flatt {karp_flatt(speedup, n):.2f}" if is_strong else ""
            print(
                f"{kind:6} {n} rank(s): {1e3 * seconds:5.0f} ms per step, speed-up {speedup:.2f}, "
                f"efficiency {speedup / n:.2f}{limit}"
            )
    times = scaling["strong"]
    for n, said in ((2, efficiency_2), (4, efficiency_4)):
        score(
            f"strong efficiency, {n} ranks",
            said,
            min(n, os.cpu_count()) / n,
            times[1] / times[n] / n,
            word="ideal",
        )

# %%
if check.ready("6.4"):
    figure, ax = figures.new_figure(width=5.5)
    cores = os.cpu_count()
    series = {f"ideal, {cores} cores": ([1, 2, 4], [min(n, cores) for n in (1, 2, 4)])}
    for kind, times in scaling.items():
        gain = {n: times[1] / t * (n if kind == "weak" else 1) for n, t in times.items()}
        series[kind] = list(gain), list(gain.values())
    figures.lines(ax, series, "ranks", "speed-up (times one rank)")
    figures.show(
        figure, "Speed-up against the number of ranks for strong and weak scaling, with the ideal."
    )

# %% [markdown]
# The ideal value assumes one core for each rank and no time for messages. Ranks beyond the
# number of cores bring nothing, since they take turns, and $e$ grows. The measured efficiency is
# usually lower, because the all-reduce takes time. If two ranks with two cores are slower than one,
# other programs probably use the cores: measure again on a quiet machine.
#
# ### Does distributed training make a model better?
#
# Some slides promise better "model accuracy". One published series took 92 minutes on 1 GPU, 25 on
# 4 and 14 on 8 (a Transformer on WikiText-2, ten epochs; JSC course "Parallelize Training", 2026).
# The batch of each rank stayed the same, so the global batch grew from 512 to 2048 to 4096, and no
# loss was compared. First, the speed. Ten epochs are the same number of samples on any number of
# GPUs, so the work is fixed and Karp-Flatt can be used:

# %% tags=["nbval-check-output"]
for n, minutes in ((4, 25), (8, 14)):
    speedup = 92 / minutes
    print(
        f"{n} GPUs: speed-up {speedup:.2f}, efficiency {speedup / n:.2f}, "
        f"Karp-Flatt {karp_flatt(speedup, n):.3f}"
    )

# %% [markdown]
# The scaling is good, but flattered: with a larger global batch an epoch has fewer steps, and so
# fewer all-reduces, than in strong scaling. The times say nothing about the loss. So train the same
# model three times on the embedded text, a made-up language whose best possible loss is known:
#
# - on 1 rank with batch 16,
# - on 2 ranks with the *global* batch still 16, so 8 each,
# - on 2 ranks with the *per-rank* batch still 16, so 32 in all.
#
# The learning rate stays the same, and all three see the same number of samples. Predict: which
# curves coincide against samples? Which run has the lowest loss at the end? Which finishes first?

# %%
lowest_loss = None  # "first", "second" or "third", as in the list above
first_in_time = None

# %% answer="true"
lowest_loss, first_in_time = "first and second", "second or third"

# %%
from torch.utils.data import DataLoader

from manyhands.data import corpus


def train_share(global_batch, num_samples):
    data = corpus.load("embedded", block=64)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sampler = ShardedSampler(len(data.train), rank, world_size)
    loader = DataLoader(data.train, global_batch // world_size, sampler=sampler)
    torch.manual_seed(0)
    model = torch_ddp(Transformer(data.tokenizer.vocab_size, 64, layers=2, heads=4, width=128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    curve, start = [], time.perf_counter()
    for step, (inputs, targets) in enumerate(loader, 1):
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = mean_over_ranks(loss.detach() * len(inputs), len(inputs))
        curve.append((step * global_batch, time.perf_counter() - start, mean))
        if step * global_batch >= num_samples:
            return curve


# %%
WIDTH = 10  # steps that a smoothed value looks back on


def smooth(values):
    return torch.tensor(values).unfold(0, WIDTH, 1).mean(1).tolist()


if check.ready("6.3", "6.4", "6.5"):
    runs = {"1 rank, 16": (1, 16), "2 ranks, 16 in all": (2, 16), "2 ranks, 16 each": (2, 32)}
    curves = {name: run_ranks(train_share, n, batch, 1600)[0] for name, (n, batch) in runs.items()}
    for name, curve in curves.items():
        *_, seconds, _ = curve[-1]
        loss = smooth([point[2] for point in curve])[-1]
        print(f"{name:18} {len(curve)} steps, {seconds:.1f} s, loss {loss:.2f}")
    print(f"you said: lowest loss {lowest_loss}, first in time {first_in_time}")

# %%
if check.ready("6.3", "6.4", "6.5"):
    figure, axes = figures.new_figure(width=8, height=3.4, cols=2)
    for ax, axis, xlabel in ((axes[0], 0, "samples seen"), (axes[1], 1, "time (s)")):
        series = {
            name: ([point[axis] for point in curve][WIDTH - 1 :], smooth([p[2] for p in curve]))
            for name, curve in curves.items()
        }
        figures.lines(ax, series, xlabel, "training loss (nats per character)")
    figures.legend_below(figure, axes[0])
    figures.show(figure, "Training loss of three runs against samples seen and against time.")

# %%
if check.ready("6.3", "6.4", "6.5"):
    one, two = curves["1 rank, 16"], curves["2 ranks, 16 in all"]
    apart = max(abs(a[2] - b[2]) for a, b in zip(one, two, strict=True))
    print(f"same global batch, 1 and 2 ranks: losses differ by at most {apart:.1e}")
    assert apart < 0.02

# %% [markdown]
# At the same global batch the curves against samples lie on each other: it is the same training,
# done by two ranks. Against time, two ranks are ahead where each has a free core, though not twice
# as fast: the start of this section measured by how much.
#
# At the same per-rank batch the global batch doubles. The same number of samples is then half as
# many steps, and at the same learning rate the loss after them is *higher*. This run saves half of
# the all-reduces but computes just as much, so it may hardly finish earlier than the second.
#
# Distributed training can make training faster. It does not by itself make a model better. (Each
# curve is a single run. Lesson 07 measures over several seeds what a larger batch costs, and how to
# pay less.)

# %% [markdown]
# ## 8. Two nodes
#
# On two nodes, one torchrun runs on each. How do the two find each other? They agree on a meeting
# place, the **rendezvous**: the address of one node, the head node, and a port. A **port** is a
# number from 1 to 65535 that says which program on a computer a message is for, so two programs
# cannot listen on the same one.
#
# ![The torchrun agents of two nodes, gpu07 and gpu08, meet at port 24711 of gpu07 for job 4711; a table says what each of the six arguments of torchrun tells them](figures/ddp_rendezvous.svg)
#
# The check asks for the arguments of several jobs, on head nodes and on others, with small job IDs
# and very large ones.

# %% exercise="rendezvous_arguments" todo="6.7" minutes=15 difficulty=2 points=2
from manyhands.ranks.runtime import rendezvous_arguments

# %% check="6.7" tags=["nbval-check-output"]
check.rendezvous_arguments(rendezvous_arguments)

# %% [markdown]
# ### The job file
#
# On most clusters a program called **Slurm** assigns nodes to jobs. A job file asks for them in
# lines that start with `#SBATCH`. This is the file of this lesson:

# %% tags=["nbval-check-output"]
print(Path("../sbatch/ddp.sbatch").read_text())

# %% [markdown]
# - `--gpus-per-node=4`: Slurm sets `CUDA_VISIBLE_DEVICES` to the four GPUs that this job may use.
#   Inside the job they are numbered 0 to 3. Asking for four GPUs does not use four: one process
#   drives one GPU, so `launch.py` starts four.
# - `--ntasks-per-node=1`: Slurm starts one agent per node, and the agent starts the processes.
# - For two nodes only one number changes: `sbatch --nodes=2 sbatch/ddp.sbatch`. `launch.sh` looks
#   up the head node's name with `scontrol show hostnames`. Some sites append a suffix for the fast
#   network (`node17` becomes `node17i`); put that suffix in `HEAD_SUFFIX` in `sbatch/site.env`.
# - `scripts/launch.py` hands the result of `rendezvous_arguments` to torchrun. It uses the course's
#   version of the function, not yours.
#
# ### A library that does all this
#
# PyTorch Lightning wraps the same steps. What you wrote, in Lightning's words (not run here):
#
# | you wrote | Lightning |
# |---|---|
# | `place`, `process_group` | `Trainer(devices=4, num_nodes=2, strategy="ddp")` |
# | `ShardedSampler` | put in by the Trainer (`use_distributed_sampler=True`), as PyTorch's sampler |
# | `torch_ddp` | PyTorch's DDP, inside the strategy |
# | `mean_over_ranks` | `self.log("loss", ..., on_epoch=True, sync_dist=True)`: sum and count for an epoch, with padded samples; for a step, a mean of means |
# | `save_once` | `ModelCheckpoint`, on rank 0 |

# %% [markdown]
# ## 9. Run it as a job, with your functions in it
#
# Do your functions work outside this notebook? The next cell copies those that passed to
# `mine/ddp.py` and trains with them on real processes, started by `torchrun` as on a cluster: one
# for each GPU of the job, or usually two without GPUs. If the machine has Slurm, the job goes to
# its queue; `local=True` keeps it on this machine. In a terminal the command is
# `sbatch sbatch/ddp.sbatch --impl mine`, or `bash` in place of `sbatch`.
#
# The cell shows the job's step and loss, and at the end its report. The stop button stops the job
# after a checkpoint.
#
# The training script uses six of your functions: `place`, `process_group`, `ShardedSampler`,
# `torch_ddp`, `mean_over_ranks` and `save_once`. If `mine/data_parallel.py` of lesson 05 is there,
# your own `BucketedDDP` wraps the model in place of PyTorch's.

# %%
if check.ready("6.1", "6.2", "6.3", "6.4", "6.5", "6.6"):
    check.keep()
    watch.run(
        *("../sbatch/ddp.sbatch", "--impl", "mine"),
        *("--steps", 40, "--layers", 2, "--block", 32),
    )

# %% [markdown]
# Open the `report.html` that the cell named, in the folder `runs` beside this notebook. It shows
# the loss, the tokens per second, where the time went, and how busy each rank was. The floor in the
# loss figure is the entropy of the made-up language: on average, no model can do better on new
# text.
#
# To train on real text: `bash sbatch/ddp.sbatch --impl mine --data FOLDER`, where FOLDER holds
# `.txt` files.

# %%
check.summary()

# %% [markdown]
# ## Recap
#
# You can now
#
# - tell rank, local rank and world size apart, and join and leave a process group,
# - deal out data so that every sample is read once, in a new order in each epoch,
# - wrap a model so that its replicas stay equal, prove it against one process, and say when it
#   communicates,
# - evaluate, print and save so that the number of ranks does not show,
# - start a job on two nodes, and read its scaling.
#
# **Questions**
#
# <details><summary>Two ranks have gradients 2 and 4. What does each hold after DDP's backward, and why not 6?</summary>
#
# Each holds 3. Each rank's loss is a mean over its share, so the mean of the ranks' gradients is
# the gradient of the mean over the whole batch. With plain gradient descent, a sum would make the
# step N times as long.
# </details>
#
# <details><summary>You forget <code>set_epoch</code>. Does the program fail?</summary>
#
# No. But every epoch then has the same order, so the same batches come back, and each rank reads
# the same samples. Training still works, perhaps a little worse, and nothing tells you.
# </details>
#
# <details><summary>Rank 1 skips a batch because its loss is NaN. What happens?</summary>
#
# Rank 1 does not call backward, so the other ranks wait in their all-reduces: until rank 1's next
# batch, with which theirs is then averaged, or until the time-out. All ranks have to decide
# together, for example with an all-reduced flag.
# </details>
#
# <details><summary>Another course (JSC, "Parallelize Training") turns a script into DDP in 16 numbered steps. Where is each of them here?</summary>
#
# Imports and device, ranks, setup, per-rank seed (its 1-3): TODO 6.1 and 6.2, and section 3 on
# seeds. Three samplers passed to three loaders (4-7) and `set_epoch` (9): TODO 6.3. Wrapping the
# model (8): TODO 6.4. All-reduced losses (10): TODO 6.5. Printing and saving once (11, 12):
# TODO 6.6. Leaving the group (13): TODO 6.2. GPUs in the job file (14), address and port (15),
# torchrun under srun (16): TODO 6.7.
# </details>
#
# **Sources**: Li et al. 2020, "PyTorch Distributed", https://arxiv.org/abs/2006.15704; PyTorch
# documentation, torchrun, https://docs.pytorch.org/docs/stable/elastic/run.html, and
# DistributedDataParallel,
# https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html;
# Karp and Flatt 1990, "Measuring parallel processor performance", CACM 33(5).
