# ---
# manyhands: {title: DDP, goal: "Turn one-process training into data-parallel training with DDP, check every part against one process, and run it as a job", job: {flags: "--impl scratch --steps 200 --layers 2 --block 32 --batch 32", loss: [0.93, 1.25]}}
# ---

# %% [markdown]
# # 06 DDP: data parallelism as a real job
#
# You have a training program that works on one device, but it is too slow. Which of its lines have
# to change so that two devices can train the same model, and how do you know that the result is
# still right?
#
# ![A global batch of six samples is dealt out to two ranks; each runs forward and backward through the whole model, an all-reduce makes the mean of the gradients, and both take the same step, so their weights stay equal](figures/ddp_overview.svg)
#
# In **data parallelism** each process holds a whole copy of the model, a **replica**, and works on
# its own share of the batch. Before the optimizer steps, the processes average their gradients, so
# all of them take the same step and the replicas stay equal. Lesson 05 builds this averaging by
# hand. PyTorch's version is called `DistributedDataParallel`, or DDP for short.
#
# The averaging takes only one line of a program, and this lesson is about the other lines. You
# convert a real single-process program, part by part, until your own version trains on many
# processes, gives the same result as one process, runs as a job, and writes text.

# %%
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, Sampler

from manyhands.checks import ddp as check, score
from manyhands.data import corpus
from manyhands.data.corpus import Corpus
from manyhands.ddp import bench
from manyhands.instruments import figures
from manyhands.jobs import watch
from manyhands.jobs.submit import course_file
from manyhands.models.transformer import Transformer, generate, total_loss
from manyhands.ranks import lab
from manyhands.ranks.lab import run_ranks
from manyhands.ranks.runtime import World
from manyhands.training.checkpoints import ShardedCheckpoints
from manyhands.training.run import Run
from manyhands.training.schedule import learning_rate_at, set_learning_rate
from manyhands.training.settings import TrainConfig
from manyhands.training.storage import unwrapped

lab.warm_up()
print(
    f"torch {torch.__version__}, {os.cpu_count()} cores; the ranks of this notebook use CPU + gloo"
)

# %% [markdown]
# ## 1. The program of one process
#
# What is there to convert? Below is the whole training part of `scripts/train_single.py`. It trains a
# small Transformer to predict the next character of a text. `run` is the course's record of a
# training run: it knows the settings (`run.config`), hands out the batches of an epoch, records the
# loss of each step, keeps the weights with the lowest validation loss, and measures their loss on the
# test data once, at the end.
#
# Read the code with one question in mind: if two processes ran exactly these lines at the same time,
# where would they do something wrong, or do the same work twice? Write your list down before you go on.

# %% show="true"
from train_single import train_alone

# %% [markdown]
# Seven things have to change, and the table names the section that makes each change. In the end you put
# your parts together (TODO 6.8).
#
# | in one process | on many | section |
# |---|---|---|
# | there is only this process, on the only device | each process finds its place and its device, and joins the others | 2 |
# | the sampler yields every sample | each process reads its own share of the same shuffled order, in batches 1/N as large | 3 |
# | one seed for all random numbers | the same for the model and the order, another per rank for dropout | 4 |
# | `model` is the model | `model` is a replica whose gradients are averaged | 4 |
# | `mean_loss` has seen all validation data | each process has seen a share of it | 6 |
# | `torch.save` writes one file | one process writes, and the others wait until it has | 7 |
# | `python train_single.py` | one program per node starts the processes, and the nodes find each other | 8 |

# %% [markdown]
# ## 2. Processes that know their place
#
# How does a process learn which part of the work is its own? A process of a job is called a **rank**,
# and so is its number. The **world size** is the number of ranks.
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
# node, because its local rank is 1.
#
# Write `place`, which returns the answer as a `World(rank, local_rank, world_size, device)`.

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
# At the end each process has to call `dist.destroy_process_group()`, because a job that forgets this
# call can abort even after hours of good work. `@contextmanager` turns a function with one `yield`
# into something that a `with` block can use: the code before the `yield` runs when the block begins,
# and the code after it runs when the block ends.

# %% exercise="process_group" todo="6.2" minutes=10 difficulty=1 points=1
from manyhands.ranks.runtime import process_group

# %% check="6.2" tags=["nbval-check-output"]
check.process_group(process_group)

# %% [markdown]
# Do your two functions work together? `run_ranks(fn, 2)` starts two processes on this machine, with
# the variables that torchrun would set, and returns what `fn` returns in each. With `join=False` it
# leaves it to `fn` to join the process group. Each rank contributes its number plus 1 to a sum over
# both ranks, so the sum has to be 3 on both.


# %% tags=["nbval-check-output"]
def join_and_sum():
    world = place(os.environ, num_gpus=0)
    with process_group(world, 20):
        summed = torch.tensor(world.rank + 1.0)
        dist.all_reduce(summed)
    return f"rank {world.rank} of {world.world_size} on {world.device}: sum {summed.item():.0f}"


if check.ready("6.1", "6.2"):
    print("\n".join(run_ranks(join_and_sum, 2, join=False)))

# %% [markdown]
# You will meet an argument `group` in some exercises. It says which ranks take part, and `None` means
# all of them. A function that is given a group passes it on to every call, as `group=group`. Inside a
# group the ranks count from 0 again, so use `dist.get_rank(group)` and `dist.get_world_size(group)`.

# %% [markdown]
# ## 3. Every rank its own samples
#
# How do the ranks share the training data? If all ranks read the same samples, they compute the same
# gradient, and nothing is gained by the extra work. So in each epoch the samples are **shuffled** once,
# in the same way on all ranks, and then dealt out like cards.
#
# ![In each of two epochs ten samples are shuffled in another order and dealt out like cards to three ranks, which get 4, 3 and 3; the first six of the order are the first global batch, two from each rank](figures/ddp_sampler.svg)
#
# In PyTorch a **sampler** is an object that tells a `DataLoader` the numbers of the samples to read.
# Your sampler has to be
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
# Each line below shows the samples of one rank. In each epoch every number from 0 to 9 should appear
# exactly once, and the two epochs should have different orders.

# %%
if check.ready("6.3"):
    for epoch in range(2):
        for rank in range(3):
            sampler = ShardedSampler(10, rank, 3, seed=7)
            sampler.set_epoch(epoch)
            print(f"epoch {epoch}, rank {rank} reads", list(sampler))

# %% [markdown]
# Rank 0 reads four samples and the others read three. What happens if every rank simply goes through
# its own samples, one per step, and adds up a number over all ranks in each step, as DDP does with the
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
# same would happen in the fourth backward. So every rank has to take the **same number of steps**. To
# make sure of that, `run.batches` ends an epoch after `len(dataset) // config.batch` steps on every
# rank, and so leaves out the incomplete last batch.
#
# PyTorch's sampler, `torch.utils.data.DistributedSampler`, keeps the ranks' counts equal by
# **padding**, which means that it reads a few samples twice. This hardly matters in training, but it
# does matter for a validation loss, as section 6 shows.
#
# The program has three loaders, one each for training, validation and test. Only the training data is
# shuffled, so only its sampler needs `set_epoch`. For the other two a plain
# `range(rank, num_samples, world_size)` is enough as a sampler.

# %% [markdown]
# ## 4. Replicas, kept equal by DDP
#
# How do the replicas become equal, and what keeps them so? In lesson 05 you build data parallelism
# by hand, up to the class `BucketedDDP`. (If you have not done it yet, go on all the same, because the
# course's version of the class is imported below.) In short:
#
# - At the start, rank 0's parameters and buffers are sent to all ranks, so the replicas are equal.
# - Each rank's loss is the mean over its share, and the shares have the same size, so the *mean* of
#   the ranks' gradients is the gradient of the whole batch. With equal gradients all ranks take
#   equal steps.
# - Gradients are packed into **buckets**, last layer first. A bucket is sent while backward is still
#   computing the gradients of earlier layers.
#
# PyTorch's class takes your model and returns one that is called in the same way. It has one argument that
# beginners often get wrong: `device_ids` is a list with the number of the one GPU that this process drives,
# and has to be `None` for a model on the CPU. The function below finds out on which device the model is.
# `bucket_cap_mb` is the size, in MiB ($2^{20}$ bytes), at which a bucket is full: DDP adds parameters until
# a bucket holds at least this much, so a bucket can be larger. (The buckets of `BucketedDDP` never exceed
# theirs, except for a single parameter that is larger.)

# %% show="true"
from manyhands.ddp.wrapping import torch_ddp

# %% [markdown]
# ### Is it the same training?
#
# The first thing to test is **parity with one process**: does training on several ranks find the same
# weights as one process? The cells below take ten steps of AdamW in one process on the whole batch, and
# on three ranks with a third of it each, both with `BucketedDDP` ("by hand") and with PyTorch's class.
# For each rank you see the largest difference between its weights and those of the single process.

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
def on_ranks(wrap, make=make_model):
    torch.manual_seed(dist.get_rank())  # each rank builds a different model before it is wrapped
    share = slice(dist.get_rank(), None, dist.get_world_size())
    return train_ten_steps(wrap(make()), share)


torch.manual_seed(0)
alone = train_ten_steps(make_model(), slice(None))
for name, wrap in (("by hand", BucketedDDP), ("PyTorch's", torch_ddp)):
    for weights in run_ranks(on_ranks, 3, wrap):
        difference = largest_difference(weights, alone)
        print(f"{name:9} largest difference from one process: {difference:.1e}")
        assert difference < 1e-5

# %% [markdown]
# The differences are due to rounding, because three ranks add up the same numbers in a different
# order. Note that each rank built a *different* model, from its own seed, before the model was wrapped.
# DDP hides that mistake, since it sends rank 0's weights to all ranks when it wraps the model. Sharded
# training (lesson 10) does not hide it. So use **the same seed for the model, and a different seed per
# rank for what must differ**, such as dropout. In the scripts `world.seed` is the same on all ranks, and
# it fixes the initial weights and the sampler's order. `world.data_seed` differs from rank to rank, and it
# drives the random numbers that a rank draws while it trains. Despite its name it must not order the data.
#
# ### When does it communicate?
#
# Some guides say that DDP synchronizes in `optimizer.step()`. The course's **ledger** records every
# collective that a block of code calls, so you can count them. Predict: in which of the four operations
# (wrapping, forward, backward, step) is something sent?


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


found = run_ranks(when_does_it_talk, 2)[0]
print(f"wrapping: {'some' if found['wrap'] else 'no'} broadcasts")
for name in ("forward", "backward", "step"):
    print(f"{name}: {found[name]} all-reduce(s)")

# %% [markdown]
# Wrapping sends rank 0's model, and backward averages the gradients. Nothing is sent in
# `optimizer.step()`, because each rank steps for itself.
#
# This model's gradients would fit into one bucket anyway. How many does DDP use for a larger model? The
# next one has eight layers of 263,168 bytes each, and buckets are full at 1 MiB (1,048,576 bytes). Four
# layers hold 1,052,672 bytes, a little more than that, and three hold less. Predict the number of
# all-reduces in the first step and in the second.


# %%
CAP_BYTES = 2**20


def buckets_of_two_steps():
    model = torch_ddp(nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]), bucket_mb=1)
    with Ledger() as ledger:
        for _ in range(2):
            model(torch.randn(4, 256)).sum().backward()
            yield [entry.nbytes for entry in ledger.entries if entry.op == "all_reduce"]
            ledger.entries.clear()


first, second = run_ranks(lambda: list(buckets_of_two_steps()), 2)[0]
for step, sizes in (("first", first), ("second", second)):
    print(f"{step} step: {len(sizes)} all-reduce(s) of {', '.join(f'{n:,}' for n in sizes)} bytes")
assert len(first) == 1 and len(second) == 2 and second[0] > CAP_BYTES

# %% [markdown]
# With its default options DDP uses a single bucket in its first backward, whatever the model's size, and
# packs the buckets anew after it, in the order in which the gradients arrived on rank 0. (Its second
# forward broadcasts that order to all ranks.) A bucket is closed once it holds *at least* the cap, so
# both buckets hold four layers. `BucketedDDP`, whose buckets of several parameters never exceed their
# size, would need three.

# %% [markdown]
# ## 5. Fewer messages, and layers that look at the batch (optional)
#
# When is the simple picture of one averaging per step not enough? Here are two cases. The first is
# **gradient accumulation**: if a batch is too large for the memory, you split it into
# **micro-batches**, run forward and backward on each, and step once. Every backward of a DDP model
# sends the gradients, so four micro-batches send four times as much as one batch would.
# `model.no_sync()` is a context in which gradients are only added up on each rank. The next backward
# outside it averages the sums.

# %% exercise="accumulate" todo="6.4" minutes=15 difficulty=2 points=2
from manyhands.ddp.wrapping import accumulate

# %% check="6.4" tags=["nbval-check-output"]
check.accumulate(accumulate)

# %% [markdown]
# How much does `no_sync` save, and what happens if only the backward is inside it? Each line below shows
# the number of all-reduces and their bytes over four micro-batches, and compares the gradients with
# those of the first line. Predict both numbers for the third line, `backward_inside`.


# %% tags=["nbval-check-output"]
def backward_inside(model, micro_batches, loss_fn):
    for number, (x, y) in enumerate(micro_batches, start=1):
        loss = loss_fn(model(x), y) / len(micro_batches)
        with nullcontext() if number == len(micro_batches) else model.no_sync():
            loss.backward()


def every_time(model, micro_batches, loss_fn):
    for x, y in micro_batches:
        (loss_fn(model(x), y) / len(micro_batches)).backward()


def messages_of(way):
    torch.manual_seed(0)
    model = torch_ddp(make_model())
    whole = torch.randn(4, 12, 8)[:, dist.get_rank() :: dist.get_world_size()]
    micro_batches = [(part, part.sum(1, keepdim=True)) for part in whole]
    with Ledger() as ledger:
        way(model, micro_batches, nn.functional.mse_loss)
    sent = [entry.nbytes for entry in ledger.entries if entry.op == "all_reduce"]
    return len(sent), sum(sent), [param.grad for param in model.parameters()]


if check.ready("6.4"):
    plain = run_ranks(messages_of, 2, every_time)[0][2]
    for way in (every_time, accumulate, backward_inside):
        number, nbytes, gradients = run_ranks(messages_of, 2, way)[0]
        is_equal = largest_difference(gradients, plain) < 1e-6
        print(
            f"{way.__name__:15} {number} all-reduce(s), {nbytes:,} bytes, "
            f"gradients {'equal' if is_equal else 'differ'}"
        )

# %% [markdown]
# Your function sends a quarter of the bytes for the same gradients. The third way saves nothing,
# although its backward is inside `no_sync`, because DDP decides in the *forward* whether the next
# backward will send. (There is no error, so only counting reveals it.)
#
# The second case is **batch normalization**, which subtracts the mean of the batch and divides by its
# standard deviation. On a rank "the batch" is the rank's share. So a model with such a layer computes
# something different on three ranks than on one, and averaging the gradients cannot correct this.
# `SyncBatchNorm` computes the mean and the standard deviation over all ranks. PyTorch's class needs a
# GPU, while the one that lesson 07 builds works on CPUs as well. Predict which of the two lines below
# equals one process.

# %%
from manyhands.large_batch.norms import convert


def with_norm():
    first = nn.Linear(8, 32, bias=False)  # the norm would take a bias away again
    return nn.Sequential(first, nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 1))


torch.manual_seed(0)
alone_with_norm = train_ten_steps(with_norm(), slice(None))
for name, make in (("of the share", with_norm), ("of all ranks", lambda: convert(with_norm()))):
    weights = run_ranks(on_ranks, 3, torch_ddp, make)[0]
    difference = largest_difference(weights, alone_with_norm)
    print(f"statistics {name}: largest difference from one process {difference:.1e}")
    assert (difference < 1e-5) == (name == "of all ranks")

# %% [markdown]
# If each rank uses the statistics of its own share, it trains a different function, so parity with one
# process is lost, by many orders of magnitude more than rounding. With the statistics of all ranks parity
# is back, at the price of three more all-reduces per normalization layer and step with this class.
# (PyTorch's `SyncBatchNorm` sends one all-gather and one all-reduce.) Whether local statistics hurt
# depends on the share: the fewer samples it has, the noisier their mean, and the mean of a single sample
# says nothing at all. (Evaluation uses running statistics. They are those of rank 0, because DDP copies
# them to the other ranks before the first forward, and before each one after a forward whose backward
# averages gradients, so not after one within `no_sync()` or `torch.no_grad()`.) Transformers use
# LayerNorm, which normalizes each position by itself and so has no such problem.

# %% [markdown]
# ## 6. A validation loss that does not depend on the number of ranks
#
# Each rank can evaluate its share of the validation data. How do you combine the results? Two shortcuts
# look harmless: to average the means of the batches and then those of the ranks, and to let the sampler
# pad.
#
# ![Rank 0 has 2 items with mean loss 5 and rank 1 has 50 items with mean loss 1; the mean of the means is 3.00, but both sums divided by both counts are 60 / 52 = 1.15](figures/ddp_evaluation.svg)
#
# One way is always right: every rank contributes its **sum** and its **count**. Add up both over
# all ranks, and divide once.

# %% exercise="mean_over_ranks" todo="6.5" minutes=8 difficulty=1 points=1
from manyhands.ddp.wrapping import mean_over_ranks

# %% check="6.5" tags=["nbval-check-output"]
check.mean_over_ranks(mean_over_ranks)

# %% [markdown]
# ### Is a mean of means good enough?
#
# Here are 1001 losses with one outlier, in batches of 64. Many scripts combine both shortcuts: the
# sampler pads, and then they take the mean over each batch, over the batches, and over the ranks.
# Predict: does this shortcut give the same value for 1, 2, 4 and 8 ranks?

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
# The result of the shortcut depends on the number of ranks, so it cannot be used to compare two runs on
# different numbers of GPUs. Even on one rank it is wrong, because the last batch is smaller but has
# the same weight as the others. Sum and count give the exact mean on any number of ranks.

# %% [markdown]
# ## 7. Print once, save once
#
# Who prints, and who saves? Every rank runs every line, so a `print` appears once per rank, and a
# `torch.save` becomes a race of all ranks for the same file.
#
# So only rank 0 should print and save. This leaves two traps:
#
# - The other ranks do not wait for rank 0. If one of them opens the file, the file may not be there
#   yet. The cure is `dist.barrier()`, which returns only when all ranks have reached it.
# - If the job is killed while it writes, half a file is left, and the older one is lost. So write
#   the file under another name first. Then `os.replace(new, old)` puts the new file in the old one's
#   place in a single operation.
#
# A wrapped model keeps the model that you gave it in `.module`, and `unwrapped(model)` returns that one,
# or `model` itself where nothing wraps it. Save its `state_dict()`, so that a program that knows nothing
# of DDP can load it. (A bare `getattr(model, "module", model)` would lose the rest of a model that happens
# to call one of its own parts `module`.)

# %% exercise="save_once" todo="6.6" minutes=15 difficulty=2 points=2
from manyhands.training.run import save_once

# %% check="6.6" tags=["nbval-check-output"]
check.save_once(save_once)

# %% [markdown]
# ## 8. Two nodes (optional)
#
# On two nodes, one torchrun, called an **agent**, runs on each. How do the two find each other? Their
# meeting is called the **rendezvous**, and for its place they are given the address of one node, the
# head node, and a port. A **port** is a number from 1 to 65535 that says which program on a computer a
# message is for.
#
# ![The torchrun agents of two nodes, gpu07 and gpu08, meet at port 24711 of gpu07 for job 4711; a table says what each of the six arguments of torchrun tells them](figures/ddp_rendezvous.svg)
#
# Write the function that returns these six arguments, each as one string, such as `--nnodes=2`. The check
# tries several jobs, on head nodes and on others, with small job IDs and very large ones.

# %% exercise="rendezvous_arguments" todo="6.7" minutes=15 difficulty=2 points=2
from manyhands.ranks.runtime import rendezvous_arguments

# %% check="6.7" tags=["nbval-check-output"]
check.rendezvous_arguments(rendezvous_arguments)

# %% [markdown]
# ### Which argument is the meeting place?
#
# Some slides call `rdzv_id` the "central point" where the agents meet, and use one fixed port for all
# jobs. You can try both on one machine, because with the `c10d` backend the agents meet at a
# `TCPStore`, which is a small server that keeps values under names. Below, the agents of two jobs with
# different ids first use the same store. Then a second store is opened at the address of the first.
# Predict what each line prints.

# %% tags=["nbval-check-output"]
meeting_place = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
for job_id in ("4711", "4712"):
    agents = dist.PrefixStore(job_id, meeting_place)  # an id is the beginning of a name
    print(f"job {job_id}, same endpoint: agent number", agents.add("agents", 1))
agents = dist.PrefixStore("4711", meeting_place)
print("job 4711, same endpoint: agent number", agents.add("agents", 1))
try:
    dist.TCPStore("127.0.0.1", meeting_place.port, is_master=True, wait_for_workers=False)
except RuntimeError as error:
    told = "address already in use" in str(error).lower() or "EADDRINUSE" in str(error)
    print("a second server at the same port:", "the address is in use" if told else error)

# %% [markdown]
# Jobs 4711 and 4712 use the same store without seeing each other, since each counts only its own agents,
# while the second agent of 4711 finds the first. So the **endpoint**, which is an address with a port, is
# the place where agents meet, and the id only distinguishes the jobs that meet there. The last line shows
# what happens to two jobs with the same fixed port on one node if each says `is_host=1`, as yours do: the
# second cannot open its meeting place. (Without `is_host`, torchrun would use the first job's store, which
# ends with that job.) That is why your port follows from the job id. (Two ids can still lead to the same
# port, since there are only 10,000 ports here. For two jobs on one node that is unlikely, and the second
# job would stop with such a message.)
#
# Jobs collide in the same way if you set `CUDA_VISIBLE_DEVICES=0,1` by hand on a cluster that does not hide
# the GPUs of other jobs. The variable says which of the node's GPUs a process sees, and in what order, and
# the process numbers these from 0. The cell below computes which GPUs the ranks of two jobs get on a node
# with four GPUs: once with that line in both job files, and once with the values that **Slurm** would set.
# (Slurm is the program that assigns nodes and GPUs to jobs on most clusters.)


# %% tags=["nbval-check-output"]
def gpus_of(visible):
    """The node's own numbers of the GPUs that the ranks of one job use."""
    names = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [{**names, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(2)]
    return [visible[place(environ, len(visible)).device.index] for environ in ranks]


if check.ready("6.1"):
    for name, visible in (("by hand", ([0, 1], [0, 1])), ("by Slurm", ([0, 1], [2, 3]))):
        first, second = (gpus_of(one) for one in visible)
        print(f"set {name}: job 1 uses GPUs {first}, job 2 uses {second}", end="")
        print(f", so {len({*first} & {*second})} GPUs have two jobs")

# %% [markdown]
# ### The job file
#
# With Slurm you ask for nodes and GPUs in a job file, in the lines that start with `#SBATCH`. This is the
# job file of this lesson:

# %% tags=["nbval-check-output"]
print(course_file("../sbatch/ddp.sbatch").read_text())

# %% [markdown]
# - `--gpus-per-node=4`: Slurm sets `CUDA_VISIBLE_DEVICES` to the four GPUs that this job may use.
#   Inside the job they are numbered 0 to 3. To ask for four GPUs is not yet to use them: one process
#   drives one GPU, so `launch.py` starts four processes.
# - `--ntasks-per-node=1`: Slurm starts one agent per node, and the agent starts the processes.
# - For two nodes only one number changes: `sbatch --nodes=2 sbatch/ddp.sbatch`. `launch.sh` looks
#   up the head node's name with `scontrol show hostnames`. Some sites append a suffix for the fast
#   network (`node17` becomes `node17i`); put that suffix in `HEAD_SUFFIX` in `sbatch/site.env`.
# - `scripts/launch.py` hands the result of `rendezvous_arguments` to torchrun, if there are two or more
#   nodes. (On one node a file is the meeting place.) It uses the course's version of the function, not
#   yours.

# %% [markdown]
# ## 9. Your program
#
# Now convert the program of section 1. Start with a copy of its whole body, go through it line by line,
# and use `torch_ddp` and your own `ShardedSampler`, `mean_over_ranks` and `save_once`. `place` and
# `process_group` have done their work before `train` is called, so `run.world` is this rank's `World`,
# with `rank`, `world_size`, `seed` and `data_seed`. Use the wrapped model everywhere, also in `run.resume`,
# and call `torch.manual_seed(world.data_seed)` once, after wrapping. Some lines can stay as they are:
# `run.batches` gives all ranks equally many steps, `run.log` averages the loss over the ranks, and `run.test`
# puts the best weights back into the model before it tests them.
#
# The check runs your function on two ranks. It compares the samples that each rank reads, all losses,
# the weights and the saved file with those of the course's version.

# %% exercise="train" todo="6.8" minutes=20 difficulty=2 points=3
from manyhands.programs.ddp import train

# %% check="6.8" tags=["nbval-check-output"]
check.train(train)

# %% [markdown]
# Compare the two functions side by side. In the loop itself, from `for epoch` to `run.log(loss)`, only
# one line has changed. The rest can stay as it was because the gradients are averaged inside backward.
#
# ### Does it equal one process?
#
# Both programs train the same model on the same text for a few steps: `train_alone` in one process, and
# your `train` on two ranks, each with half of every batch. The text is generated by a grammar, so its
# lowest possible loss is known. Predict how far apart the two validation losses will be.

# %%
text = corpus.load("embedded", block=32, valid_tokens=8_000)
print(text.note)


def trial(program, folder):
    """Train for 20 steps on the ranks of this job; the losses that are measured at the end."""
    config = TrainConfig(batch=16, block=32, layers=2, steps=20, out=f"{folder}/run")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    world = World(rank, rank, world_size, torch.device("cpu"), config.seed)
    run = Run(config, world, "trial", num_samples=len(text.train), checkpoints=ShardedCheckpoints)
    torch.manual_seed(config.seed)
    program(run, Transformer(text.tokenizer.vocab_size, config.block, config.layers), text)
    run.finish()
    return run.valid_loss


def in_new_folder(program, world_size):
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(trial, world_size, program, folder, quiet=True, timeout_s=60)
        weights = torch.load(f"{folder}/run/model.pt", weights_only=True)
    return found[0], weights


if check.ready("6.3", "6.5", "6.6", "6.8"):
    loss_alone, weights_alone = in_new_folder(train_alone, 1)
    loss_both, weights_both = in_new_folder(train, 2)
    apart = largest_difference(weights_alone.values(), weights_both.values())
    print(f"validation loss: one process {loss_alone:.6f}, two ranks {loss_both:.6f}")
    print(f"largest difference between two weights of the saved files: {apart:.1e}")
    assert abs(loss_alone - loss_both) < 1e-3

# %% [markdown]
# Losses and weights agree except for rounding, so the program on two ranks does the same training as the
# program of one process. Repeat this test with every script that you convert: run a few steps, and
# compare one process with two.
#
# In a long run the two drift apart. Several ranks add up the same numbers in a different order, and each
# order rounds differently, in the seventh digit. Training amplifies such a difference: in a long run at a
# high learning rate it can grow by orders of magnitude. In float64, which rounds $2^{29}$ times more
# finely, the differences stay about as much smaller, which shows that rounding is the cause and the
# conversion is not to blame. (The test `test_more_ranks_differ_by_the_rounding_of_sums_only` in
# `tests/models/test_transformer.py` trains both ways.) But it is why the test above is a short one.

# %% [markdown]
# ## 10. Run it as a job, with your functions in it
#
# Does your program work outside this notebook? The next cell copies those of your functions that have
# passed their checks to `mine/ddp.py`. Then it trains with them on real processes, started by
# `torchrun` as on a cluster: one for each GPU of the job, or usually two without GPUs. If the machine
# has Slurm, the job goes to its queue, unless you add `local=True`, which keeps it on this machine. In a
# terminal the command is `sbatch sbatch/ddp.sbatch --impl mine`, or, without Slurm,
# `bash sbatch/ddp.sbatch --impl mine`.
#
# The cell shows the job's step and loss, and at the end its report. The stop button saves a checkpoint
# and then stops the job.

# %%
folder = None
if check.ready("6.1", "6.2", "6.3", "6.5", "6.6", "6.8"):
    check.keep()
    folder = watch.run(
        *("../sbatch/ddp.sbatch", "--impl", "mine"),
        *("--steps", 200, "--layers", 2, "--block", 32, "--batch", 32),
    )

# %% [markdown]
# Open the `report.html` that the cell named, in the folder `runs` beside this notebook. It shows
# the loss, the tokens per second, where the time went, and how busy each rank was. The floor in the
# loss figure is the entropy of the made-up language, and no model can have a lower expected loss on
# new text.
#
# ## 11. Let it write
#
# What has the model learnt? A language model computes a score for each possible next character, and the
# scores become probabilities. If you draw a character, append it to the text, and ask again, the model
# writes. The **temperature** divides the scores before the draw: at a temperature below 1 likely
# characters become even likelier, and at 0 the likeliest is always taken. The cell loads the weights
# that your `save_once` wrote, which also proves that a program without DDP can read them. The first
# lines are from the text that the model was trained on.
#
# Do not expect much, because this model has two layers and has been trained for only seconds. Look at
# what it got right (such as words, the shape of a sentence, a time of day) and what it did not.

# %%
if check.ready("6.8") and folder:
    writer = Transformer(text.tokenizer.vocab_size, block=32, layers=2)
    writer.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    print(text.tokenizer.decode(text.train.tokens[:180].tolist()))
    start = torch.tensor(text.tokenizer.encode("baker "))
    for temperature in (0.3, 0.8, 1.5):
        written = generate(writer, start, 150, temperature, seed=1)
        print(f"\n---- temperature {temperature}\n{text.tokenizer.decode(written.tolist())}")

# %% [markdown]
# At a low temperature the shape of a sentence can usually be recognized (who, a name, what, a number,
# things, a time), although many words are misspelt and the sense is missing. The higher the temperature,
# the worse the spelling, and at 1.5 little of that shape may be left. Two things are hard for any model of
# this kind: which name comes next is drawn at random, and after 32 characters the model can no longer
# see how its sentence began.
#
# The same job trains on real text with `--data FOLDER`, where FOLDER holds `.txt` files. Below is the
# stored result of such a run on a small part of WikiText-2, with a larger model and a vocabulary of
# 2,048 byte pairs (groups of characters) in place of single characters. Watch the two curves: from which
# step on does the model learn only what is true of its training text?

# %%
from manyhands.training.storage import stored

kept = stored("ddp", "wikitext")
figure, ax = figures.new_figure(width=5.5)
series = {"training": (kept["steps"], kept["losses"])}
series["validation"] = kept["valid_steps"], kept["valid_losses"]
figures.lines(ax, series, "step", "loss (nats per token)")
ax.axvline(kept["test_step"], color=figures.GREY, lw=1)
figures.show(figure, "Training and validation loss of the kept run; a line at the best step.")
print(f"best at step {kept['test_step']}: test loss {kept['test_loss']:.2f}, {kept['test_words']}")
print(f"written at temperature {kept['temperature']}:\n{kept['sample']}")

# %% [markdown]
# After the grey line the training loss goes on falling while the validation loss slowly rises: the model
# is learning this small text by heart. That is why `run.keep_best` measures the validation loss from
# time to time during training, and why the weights of the best step are the ones that are tested and
# saved. The text that the model writes has the punctuation and the headings of an encyclopedia, but no
# meaning. (The model was trained only on WikiText-2's small validation file, so its perplexity
# cannot be compared with published values.)


# %% [markdown]
# ## 12. Why is my second node useless?
#
# A job runs on two nodes, nothing fails, and yet training is no better or no faster than on one. Why?
# Below are three such jobs, A, B and C, beside a healthy job on two nodes and a job on one node. All
# run the same loop with the same model and learning rate for 30 steps, and each node is played by a
# rank of this machine. Each of the three has one of these faults:
#
# - `"batch"`: the global batch was not raised, so each node takes half of what one node took;
# - `"data"`: the sampler was forgotten, so both nodes read the same samples;
# - `"link"`: the link between the nodes is slow (simulated here, 10 MB/s).
#
# The table shows what a log shows: how many samples a step has according to the program, the time of a
# step, the samples per second that follow from these two, the share of the time spent waiting for
# messages, and the largest difference between the loss of a step and the loss of the same step on one
# node. Before you run the cell, write down which two columns would reveal each fault.

# %%
seen = {
    name: bench.train_nodes(job, text.train, text.tokenizer.vocab_size)
    for name, job in bench.JOBS.items()
}
one = seen["one node"]
print("           samples  time of  samples  waiting for   largest difference of")
print("job        per step per step per second messages      a loss from one node")
for name, job in seen.items():
    apart = max(abs(a - b) for a, b in zip(job.losses, one.losses, strict=True))
    print(
        f"{name:10} {job.samples_per_step:6}   {1e3 * job.step_s:4.0f} ms "
        f"{job.samples_per_step / job.step_s:8.0f} {job.waiting:10.0%} {apart:19.1e}"
    )

# %%
diagnosis = {"A": None, "B": None, "C": None}  # "batch", "data" or "link"

# %% answer="true"
diagnosis = {"A": "data", "B": "link", "C": "batch"}

# %%
for name, said in diagnosis.items():
    verdict = {True: "right", False: "look again"}[said == bench.CAUSES[name]]
    print(f"{name}: you said {said}: {verdict if said else 'no diagnosis yet'}")
healthy = seen["two nodes"]
slowed = seen["B"].step_s / healthy.step_s
print(f"B against the healthy job: the same losses, and a step takes {slowed:.1f} times as long")
assert seen["B"].losses == healthy.losses
assert seen["A"].losses == one.losses != healthy.losses
assert max(abs(a - b) for a, b in zip(seen["C"].losses, one.losses, strict=True)) < 1e-3

# %% [markdown]
# <details><summary>The diagnosis, once you have yours</summary>
#
# **A has the same data on both nodes.** It counts twice as many samples as one node, and yet every loss
# is that of one node to the last bit, because the mean of two equal gradients is that same gradient.
# This is the most expensive fault, because the log looks perfect. After "one epoch" the job has seen
# half of the data, twice. Only a comparison reveals this: print the sample numbers of each rank's
# first batch.
#
# **B has the slow link.** Its losses are those of the healthy job, step for step, but most of its time
# is spent waiting. More work per message helps (a larger batch per node, or fewer messages, as in
# section 5). So does the fast network, if the job has taken the slow one by mistake.
#
# **C has not raised the global batch.** A step has as many samples as on one node, and the losses are
# equal except for rounding, so the training is correct. (To divide the same batch among more ranks is
# called strong scaling; see section 13.) But half a batch per node leaves a GPU half empty, while the
# messages cost as much as before. Raise the batch per node until the GPU is full, and then choose the
# learning rate for the larger global batch (lessons 03 and 07).
# </details>
#
# The times depend on your machine and on what else runs there. The model is tiny, and two ranks may share
# few cores, so even the healthy job may process no more samples per second than one node. The losses do
# not vary from run to run, so they are the more reliable evidence.

# %% [markdown]
# ## 13. How much faster? (optional)
#
# What do you gain from more ranks? In **strong scaling** the global batch stays the same, so each
# rank gets less. In **weak scaling** each rank's batch stays the same, so the global batch grows.
# If $t_n$ is the time of a step on $n$ ranks, then the gain is:
#
# | | strong | weak |
# |---|---|---|
# | speed-up | $S = t_1 / t_n$ | $S = n\, t_1 / t_n$ |
# | efficiency | $S / n$ | $S / n$ |
#
# The **Karp-Flatt metric** estimates which share of the work behaves as if it could not be divided:
# $e = \frac{1/S - 1/n}{1 - 1/n}$. If $e$ stays the same with more ranks, a fixed serial part is the
# limit. If $e$ grows, the overhead grows with the number of ranks. If it is above 1, the ranks got in
# each other's way, so that a step took longer than on one rank. The formula assumes a fixed amount of
# work, so the cell below prints $e$ for strong scaling only.
#
# The six settings are timed in turn on the same processes, five times each, and the fastest time
# of each counts, because other work on the machine can only make a step slower. The two settings
# with one rank are the same work, so their difference shows how exact the times are, and the
# faster one counts as the time of one rank for both kinds. Predict the efficiency of strong
# scaling on 2 ranks and on 4 for your machine. (How many cores does it have?)

# %%
efficiency_2, efficiency_4 = None, None  # your predictions for strong scaling

# %% answer="true"
efficiency_2, efficiency_4 = 0.9, 0.45  # 4 ranks on 2 cores cannot be faster than 2


# %%
def karp_flatt(speedup, ranks):
    return (1 / speedup - 1 / ranks) / (1 - 1 / ranks)


cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
scaling = bench.time_scaling()
one_s = min(times[1] for times in scaling.values())
gains = {
    kind: {n: one_s / s * (n if kind == "weak" else 1) for n, s in times.items()}
    for kind, times in scaling.items()
}
for kind, times in scaling.items():
    for n, seconds in times.items():
        speedup = gains[kind][n]
        limit = f", Karp-Flatt {karp_flatt(speedup, n):.2f}" if kind == "strong" and n > 1 else ""
        print(
            f"{kind:6} {n} rank(s): {1e3 * seconds:5.0f} ms per step, speed-up {speedup:.2f}, "
            f"efficiency {speedup / n:.2f}{limit}"
        )
for n, said in ((2, efficiency_2), (4, efficiency_4)):
    name = f"strong efficiency, {n} ranks"
    score(name, said, min(n, cores) / n, gains["strong"][n] / n, word="ideal")

# %%
figure, ax = figures.new_figure(width=5.5)
series = {f"ideal, {cores} cores": ([1, 2, 4], [min(n, cores) for n in (1, 2, 4)])}
series |= {kind: (list(gain), list(gain.values())) for kind, gain in gains.items()}
figures.lines(ax, series, "ranks", "speed-up (times one rank)")
if cores < 4:
    ax.axvspan(cores + 0.1, 4, color=figures.LIGHT_GREY, alpha=0.5, lw=0, zorder=0)
    ax.text(4, 0.08, "more ranks than cores ", ha="right", size=9, color=figures.BLACK)
ax.set_ylim(0)
figures.show(
    figure, "Speed-up against the number of ranks for strong and weak scaling, with the ideal."
)
strong, weak = (gain[2] for gain in gains.values())
print(
    f"In the time of one rank, two did {strong:.2f} (strong) and {weak:.2f} (weak) times its work."
)
if cores >= 2 and min(strong, weak) < 1.2:
    print("That is little for two cores: other programs probably use them. Measure again later.")

# %% [markdown]
# The ideal value assumes that messages take no time and that every core does its full share of the work.
# If there are more ranks than cores (grey), the ranks take turns on the cores, so the results there say
# nothing about a cluster. If two ranks on two cores gain nothing, or seem to be more than twice as fast
# as one, other programs have probably used the cores while one of the settings was timed, so measure
# again on a quiet machine. In weak scaling each rank computes for longer per message, so on a cluster it
# usually comes nearer to the ideal than strong scaling. On two ranks of one machine the difference can
# be too small to see.
#
# ### Does distributed training make a model better?
#
# Some slides promise better "model accuracy". One published series of runs took 92 minutes on 1 GPU,
# 25 on 4 and 14 on 8 (a Transformer on WikiText-2, ten epochs; JSC course "Parallelize Training",
# 2026). The batch of each rank stayed the same, so the global batch grew from 512 to 2048 to 4096, and
# no losses were compared. Look at the speed first. Ten epochs are the same number of samples on any
# number of GPUs, so the work is fixed and the Karp-Flatt metric can be used:

# %% tags=["nbval-check-output"]
for n, minutes in ((4, 25), (8, 14)):
    speedup = 92 / minutes
    print(
        f"{n} GPUs: speed-up {speedup:.2f}, efficiency {speedup / n:.2f}, "
        f"Karp-Flatt {karp_flatt(speedup, n):.3f}"
    )

# %% [markdown]
# The scaling is good, but the comparison flatters it: with a larger global batch an epoch has fewer
# steps, and so fewer all-reduces, than in strong scaling. And the times say nothing about the loss. So
# train the same model three times on the same number of samples, with the same learning rate:
#
# - on 1 rank with batch 64,
# - on 2 ranks with the *global* batch still 64, so 32 each,
# - on 2 ranks with the *per-rank* batch still 64, so 128 in all.
#
# A batch of 64 gives a rank much more to compute per message than a few sequences would.
#
# Predict: which curves coincide when you plot the loss against the samples seen? Which run has the
# lowest loss at the end?

# %%
lowest_loss = None  # such as "first" or "first and second", as in the list above

# %% answer="true"
lowest_loss = "first and second"


# %%
def train_share(global_batch, num_samples):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sampler = ShardedSampler(len(text.train), rank, world_size)
    loader = DataLoader(text.train, global_batch // world_size, sampler=sampler)
    torch.manual_seed(0)
    model = torch_ddp(Transformer(text.tokenizer.vocab_size, 32, layers=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    curve = []
    start = time.perf_counter()
    for step, (inputs, targets) in enumerate(loader, 1):
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = mean_over_ranks(loss.detach() * len(inputs), len(inputs))
        curve.append((step * global_batch, time.perf_counter() - start, mean))
        if step * global_batch >= num_samples:
            return curve


def smooth(values, width=10):
    return torch.tensor(values).unfold(0, width, 1).mean(1).tolist()


# %%
if check.ready("6.3", "6.5"):
    runs = {"1 rank, 64": (1, 64), "2 ranks, 64 in all": (2, 64), "2 ranks, 64 each": (2, 128)}
    curves = {name: run_ranks(train_share, n, batch, 4096)[0] for name, (n, batch) in runs.items()}
    last = {name: smooth([point[2] for point in curve])[-1] for name, curve in curves.items()}
    for name, curve in curves.items():
        print(f"{name:18} {len(curve)} steps, {curve[-1][1]:.1f} s, loss {last[name]:.2f}")
    print(f"you said: lowest loss {lowest_loss}")
    first, second = (curves[name] for name in list(runs)[:2])
    apart = max(abs(a[2] - b[2]) for a, b in zip(first, second, strict=True))
    print(f"same global batch, 1 and 2 ranks: losses differ by at most {apart:.1e}")
    assert apart < 0.02
    assert last["2 ranks, 64 each"] > last["2 ranks, 64 in all"] + 0.05
    gain = first[-1][1] / second[-1][1]
    if gain > 1.1:
        print(f"Two ranks did the same training {gain:.1f} times as fast as one.")
    else:
        print(
            f"Speed-up {gain:.1f}: the second rank had no free core to itself. Measure again later."
        )

# %%
if check.ready("6.3", "6.5"):
    figure, axes = figures.new_figure(width=8, height=3.4, cols=2)
    for ax, axis, xlabel in ((axes[0], 0, "samples seen"), (axes[1], 1, "time (s)")):
        series = {
            name: ([point[axis] for point in curve][9:], smooth([point[2] for point in curve]))
            for name, curve in curves.items()
        }
        figures.lines(ax, series, xlabel, "training loss (nats per character)")
    figures.legend_below(figure, axes[0])
    figures.show(figure, "Training loss of three runs against samples seen and against time.")
    order = sorted(curves, key=lambda name: curves[name][-1][1])
    print(f"On this machine the runs finished in this order: {'; '.join(order)}.")

# %% [markdown]
# At the same global batch the curves against samples coincide, because it is the same training, done by
# one rank or by two. If each rank has a core of its own, two ranks finish it sooner, because each of them
# computes only half of every batch, and the messages and the small operations of a step cost less than
# that saves. Had the global batch been 4 instead of 64, they could have cost more.
#
# At the same per-rank batch the global batch doubles. The same number of samples then takes half as
# many steps, and with the same learning rate the loss after them is *higher*. So more ranks can make
# training faster, but they do not by themselves make a model better. (Each curve is a single run.
# Lesson 07 measures over several seeds what a larger batch costs, and how to reduce that cost.)

# %% [markdown]
# ## 14. What the loader does (optional)
#
# ### Is it fast enough?
#
# A fast model has to wait if its data comes slowly. How do you see that, and what helps? The loop below
# reads samples that take 3 ms each, as small files on a busy file system may, and trains a small model
# on batches of 8. With `num_workers=0` the process reads a batch itself, and only then computes. With
# more, other processes, the **workers**, read the next batches in the meantime, each a batch of its own.
#
# The cell first runs without workers, and prints the time $r$ for reading a batch and the time $c$ for
# computing on it. Before you run the cell after it, predict from these two times: what share of a step is
# spent waiting with 1 worker and with 2, and how many workers would be enough?


# %%
def times_ms(spans):
    """Per step: the time spent waiting for data, and the time of the rest."""
    steps = sum(role == "data" for _, role, *_ in spans)
    waiting = sum(stop - start for _, role, start, stop in spans if role == "data")
    whole = sum(stop - start for _, _, start, stop in spans)
    return 1e3 * waiting / steps, 1e3 * (whole - waiting) / steps


fed = {0: run_ranks(bench.feed, 1, 0)[0]}
read_ms, compute_ms = times_ms(fed[0])
print(f"reading {read_ms:.0f} ms per batch, computing {compute_ms:.0f} ms per batch")

# %% [markdown]
# With $w$ workers a batch arrives every $r/w$ on average. If the computing takes longer than that, the next
# batch should always be there; otherwise the loop waits for the rest, $r/w - c$, in each step. So the share
# spent waiting is $\max(0, r/w - c)$ divided by $\max(r/w, c)$, and $\lceil r/c \rceil$ workers are enough.

# %%
waits = {}
for workers in (0, 1, 2):
    fed[workers] = fed.get(workers) or run_ranks(bench.feed, 1, workers)[0]
    waiting_ms, rest_ms = times_ms(fed[workers])
    waits[workers] = waiting_ms / (waiting_ms + rest_ms)
    arrival_ms = read_ms / max(workers, 1)
    wait_ms = arrival_ms - compute_ms if workers else read_ms
    share = max(0, wait_ms) / (max(0, wait_ms) + compute_ms)
    print(f"num_workers={workers}: predicted {share:.0%} waiting, measured {waits[workers]:.0%}")
print(f"enough here: {math.ceil(read_ms / compute_ms)} worker(s)")
assert read_ms > 23  # eight samples of 3 ms
if waits[2] >= waits[0]:
    print("This machine is too busy to show what workers save: run both cells again.")

# %%
figure, axes = figures.new_figure(width=7.5, height=5.0, rows=3)
longest = max(1e3 * (spans[-1][3] - spans[0][2]) for spans in fed.values())
for ax, (workers, spans) in zip(axes, fed.items(), strict=True):
    figures.timeline(ax, spans)
    ax.set_title(f"num_workers={workers}", size=10, loc="left")
    ax.set_xlim(0, longest)
figures.legend_below(figure, axes[0])
figures.show(
    figure, "Three time lines of one rank: without workers it waits for data, then computes."
)

# %% [markdown]
# In the first time line orange and blue alternate, so a step takes the time for reading *plus* the time for
# computing. With workers the reading happens during the computing. One worker cannot read faster than the
# loop did, so it removes all of the waiting only if $r \le c$. The measured share is usually larger than
# the predicted one: in the first step nothing is computed while its batch is read, and in every step it
# takes some time to hand a batch over. Where workers and loop compete for the cores, both times change as
# well. Some practical rules about loaders:
#
# - Give each rank as many workers as the job has spare cores for it. For example, `--cpus-per-task=16`
#   with four ranks means four cores per rank: one for the rank and up to three for its workers. If
#   there are more workers than cores, they only take turns.
# - `pin_memory=True` keeps batches in memory from which a GPU can copy while the CPU goes on. It
#   needs a GPU, and `tensor.to(device, non_blocking=True)`, which `run.batches` uses.
# - Many small files are slow on every cluster, so pack the samples into a few large files.
#
# Text can waste computation in another way. If each sentence is one sample and all are filled up to the
# length of the longest, which is also called padding, how much of the computing is done on padding?

# %% tags=["nbval-check-output"]
lines = text.tokenizer.decode(text.train.tokens[:100_000].tolist()).splitlines()[:-1]
lengths = [len(line) for line in lines]
padded = 1 - sum(lengths) / (len(lengths) * max(lengths))
print(f"{len(lengths):,} sentences of {min(lengths)} to {max(lengths)} characters: ", end="")
print(f"{padded:.0%} of the padded positions hold nothing")

# %% [markdown]
# That share of the computing would be wasted, and real text, whose sentences differ more in length, would
# waste more. The course's `corpus.Blocks` cuts one long text into blocks of equal length instead, so no
# position is empty. The price is that a block may begin in the middle of a sentence.

# %% [markdown]
# ### Split once, or again in every epoch?
#
# Some courses split the data once, before the loop, so that each rank shuffles only its own share.
# Others, like your sampler, shuffle all of the data again in each epoch and then deal it out. Does the
# choice matter for the loss? On two ranks a step uses the mean gradient of both shares, so one process
# can imitate either way if half of each batch comes from each share. The cells below do so with images of
# small handwritten digits and five seeds for each way. Predict: is one of the two losses clearly lower?

# %%
from manyhands.data import images

digits = images.load("embedded")


def two_shares(is_split_once, draw, fixed):
    """The order of one epoch, as batches of 64: 32 samples of each rank."""
    whole = torch.randperm(len(fixed), generator=draw)
    if is_split_once:
        halves = [half[torch.randperm(len(half), generator=draw)] for half in fixed.chunk(2)]
    else:
        halves = whole.chunk(2)
    rows = zip(*(half.split(32) for half in halves), strict=True)
    return [torch.cat(row) for row in rows]


def test_loss(is_split_once, seed, epochs=6):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    draw = torch.Generator().manual_seed(seed)
    fixed = torch.randperm(len(digits.train_inputs) // 64 * 64, generator=draw)
    for _ in range(epochs):
        for batch in two_shares(is_split_once, draw, fixed):
            optimizer.zero_grad()
            outputs = model(digits.train_inputs[batch])
            nn.functional.cross_entropy(outputs, digits.train_labels[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        return nn.functional.cross_entropy(model(digits.test_inputs), digits.test_labels).item()


# %%
means = []
for name, is_split_once in (("split once", True), ("dealt out in each epoch", False)):
    found = torch.tensor([test_loss(is_split_once, seed) for seed in range(5)])
    means.append(found.mean().item())
    print(f"{name:24} test loss {means[-1]:.3f}, from {found.min():.3f} to {found.max():.3f}")
assert abs(means[0] - means[1]) < found.max() - found.min()

# %% [markdown]
# The two means differ by less than the results of single seeds do, so here the loss does not favour either
# way. In both ways each epoch uses each of its 1,280 samples once. But the choice has other consequences: a
# share that stays the same can be kept on the node's own disk, whereas dealing out the data anew gives the
# batches of one process, so the run can be checked against one process. It would be a different matter to
# split sorted data (say, one topic per file) once *and* without shuffling, because each rank would then see
# a different kind of data.

# %% [markdown]
# ## 15. Programs that run and are wrong (optional)
#
# A program that stops with an error is easy to mend, for example a `setup()` that returns three values to
# a caller with four names. Which faults leave no trace? Here are two, both from published teaching
# material, and each is found by a measurement. In the first, a function that reads a file is to be cached,
# but the `@` in front of `lru_cache` is missing. How often does each function read in three calls?


# %% tags=["nbval-check-output"]
reads = {"without @": 0, "with @": 0}

lru_cache(maxsize=1)


def read_without():
    reads["without @"] += 1


@lru_cache(maxsize=1)
def read_with():
    reads["with @"] += 1


for _ in range(3):
    read_without()
    read_with()
print(reads)
assert reads == {"without @": 3, "with @": 1}

# %% [markdown]
# Without the `@` the line makes a decorator and throws it away. Nothing is cached, and only the count
# shows it.
#
# The second fault is in a language model. In training, every position of a block predicts the token
# after it, and except for the last position that token stands in the same block, one position further on. So
# attention needs a **causal mask**, which hides all later positions. Below the same model is trained with the
# mask and without it. The grammar of the text is known, and no model that predicts can have an expected loss
# below its entropy. Predict the two losses. Then predict both for the last position alone, which has no later
# one.


# %%
class Reader(nn.Module):
    """One Transformer layer over blocks of 32 characters, with the given attention mask."""

    def __init__(self, mask):
        super().__init__()
        self.mask = mask
        self.tokens = nn.Embedding(text.tokenizer.vocab_size, 64)
        self.positions = nn.Parameter(torch.randn(32, 64))
        self.layer = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True)
        self.head = nn.Linear(64, text.tokenizer.vocab_size)

    def forward(self, inputs):
        return self.head(self.layer(self.tokens(inputs) + self.positions, self.mask))


def train_reader(mask, steps=250):
    torch.manual_seed(0)
    model = Reader(mask)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(text.train, 16, shuffle=True)
    for _, (inputs, targets) in zip(range(steps), loader, strict=False):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    return model.requires_grad_(False)


# %%
inputs, targets = next(iter(DataLoader(text.valid, 128)))
changed = inputs.clone()
changed[:, 20] = (changed[:, 20] + 1) % text.tokenizer.vocab_size
causal = nn.Transformer.generate_square_subsequent_mask(32)
print(f"entropy of the text: {text.entropy_floor:.2f} nats per character")
for name, mask in (("with", causal), ("without", None)):
    model = train_reader(mask)
    outputs = model(inputs)
    losses = nn.functional.cross_entropy(outputs.mT, targets, reduction="none").mean(0)
    moved = (model(changed) - outputs)[:, :20].abs().max().item()
    print(
        f"{name:7} mask: loss {losses.mean():.2f}, at the last position {losses[-1]:.2f}; ", end=""
    )
    print(f"position 20 changed, outputs before it move by {moved:.1g}")
    assert (losses.mean() < text.entropy_floor / 2) == (moved > 0.01) == (name == "without")
    assert name == "with" or losses[-1] > 5 * losses.mean()

# %% [markdown]
# Without the mask the loss falls far below what is possible, because the model does not predict the next
# token but copies it. At the last position, the only one that is used to write, there is nothing to copy,
# and the loss is many times higher than the mean. The training loss falls in the same way, so neither
# raises suspicion. Two tests reveal the leak: compare the loss with what is possible, and change a later
# token to see whether an earlier output moves. The course's own model passes the second for every position
# in `tests/models/test_transformer.py`.

# %%
check.summary()

# %% [markdown]
# ## Recap
#
# You can now
#
# - say which lines of a single-process program have to change, and why the loop hardly changes,
# - deal out data so that every sample is read once, in a new order in each epoch,
# - wrap a model so that its replicas stay equal, and check the result against one process,
# - evaluate, print and save in such a way that the result does not depend on the number of ranks,
# - find out from the losses and times in a log why more ranks do not help.
#
# **Questions**
#
# <details><summary>Two ranks have gradients 2 and 4. What does each hold after DDP's backward, and why not 6?</summary>
#
# Each holds 3. Each rank's loss is a mean over its share, so the mean of the ranks' gradients is
# the gradient of the mean loss over the whole batch. With plain gradient descent on N ranks, a sum
# would make the step N times as long.
# </details>
#
# <details><summary>You forget <code>set_epoch</code>. Does the program fail?</summary>
#
# No. But every epoch then has the same order, so the same batches come back, and each rank reads the
# same samples as in the epoch before. Training still works, perhaps a little worse, and nothing warns
# you.
# </details>
#
# <details><summary>Rank 1 skips a batch because its loss is NaN. What happens?</summary>
#
# Rank 1 does not call backward, so the other ranks wait in their all-reduces until the time-out, or until
# rank 1 reaches its next batch, whose gradients are then averaged with those of their current one. So all
# ranks have to decide together whether to skip a batch, for example by an all-reduce of a flag.
# </details>
#
# <details><summary>Two agents are started with the same <code>rdzv_id</code> and different endpoints. Do they meet?</summary>
#
# No. Each agent goes to the endpoint that it was given, and waits there until its time-out. The id only
# says to which of the jobs that meet at one endpoint an agent belongs.
# </details>
#
# <details><summary>What do PyTorch Lightning's arguments stand for?</summary>
#
# `Trainer(devices=4, num_nodes=2, strategy="ddp")` does the work of `place` and `process_group`. The
# Trainer puts PyTorch's sampler into your loaders (`use_distributed_sampler=True`) and wraps the model in
# DDP. `self.log("loss", ..., on_epoch=True, sync_dist=True)` is `mean_over_ranks` for an epoch, though
# with padded samples, and a mean of means for a single step. `ModelCheckpoint` saves once.
# (`scripts/train_lightning.py` is a whole training in Lightning.)
# </details>
#
# <details><summary>Another course (JSC, "Parallelize Training") turns a script into DDP in 16 numbered steps. Where is each of them here?</summary>
#
# Imports and device, ranks, setup, per-rank seed (its 1-3): TODO 6.1, 6.2 and 6.8. Three samplers
# passed to three loaders (4-7) and `set_epoch` (9): TODO 6.3 and 6.8. Wrapping the model (8): TODO
# 6.8. All-reduced losses (10): TODO 6.5. Printing and saving once (11, 12): TODO 6.6. Leaving the
# group (13): TODO 6.2. GPUs in the job file (14), address and port (15), torchrun under srun (16):
# TODO 6.7. (Its slides use the number 17 twice, for a second node and for FSDP, which is lesson 10 here.
# In this course one file holds each number, and both versions of a notebook are made from it.)
# </details>
#
# **Sources**: Li et al. 2020, "PyTorch Distributed", https://arxiv.org/abs/2006.15704; PyTorch
# documentation, torchrun, https://docs.pytorch.org/docs/stable/elastic/run.html, and
# DistributedDataParallel,
# https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html;
# Karp and Flatt 1990, "Measuring parallel processor performance", CACM 33(5); Jülich Supercomputing
# Centre, course "Parallelize Training", 2026 (slides): the times on 1, 4 and 8 GPUs.
