# ---
# manyhands: {title: Checkpoints, goal: "Say what a run is made of, save it in shards and resume it exactly on any number of ranks, choose how often to save, and survive damage and failures", job: {flags: "--steps 100 --layers 2 --block 32", loss: [1.53, 1.77]}}
# ---

# %% [markdown]
# # 11 Checkpoints
#
# In March 2026 the author of a training program reported what a reboot had done to a run. The machine had
# stopped at step 25,671, and the run went on from its checkpoint of step 25,000. Weights and optimizer were
# restored. The place in the data was not in the checkpoint, so the loader began again with its first shard.
# For 25,000 steps the model read texts that it had read before, and its validation perplexity looked good:
# 251 at step 46,000. Then came the first texts that were really new, and the perplexity rose from 251 to
# 782. The model did not recover, and early stopping ended the run at step 62,000 of 155,000
# (https://github.com/paiml/entrenar/issues/294).
#
# Nothing had failed. No file was damaged, no error was raised, and the loss even looked better than before.
# **What does a run consist of, and how do you save all of it, so that nobody can tell that it was ever
# interrupted?**
#
# You build the answer in this lesson. First comes what has to be saved, item by item. Then come the files:
# a checkpoint that is either complete or absent, written in parts by all ranks at once, and loaded by
# another number of ranks than wrote it. At the end you save without making the training
# wait, and choose how often to save, from the cost of a save and the time between failures.
#
# ![Four ranks each hold three rows of w and all of b; each writes a file with its rows, rank 0 also b; when all have written, rank 0 writes the index](figures/checkpoint_sharded.svg)
#
# The picture shows a **sharded checkpoint**: every rank writes the part that it holds into a file of its
# own. Which rank writes b, which all ranks hold? And why does the index come last?
#
# Sections marked optional can wait: no section outside them needs what you write there.

# %%
import atexit
import copy
import math
import os
import pickle
import signal
import tempfile
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from math import prod
from pathlib import Path
from typing import IO, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from manyhands.checkpoint import figures as drawn
from manyhands.checkpoint.state import Patience
from manyhands.checks import checkpoint as check
from manyhands.collectives.trees import Group
from manyhands.data import images
from manyhands.fsdp.fully_shard import full_state
from manyhands.fsdp.units import FSDP
from manyhands.instruments import figures
from manyhands.jobs import watch as jobs
from manyhands.models.transformer import Transformer
from manyhands.programs import killed
from manyhands.ranks import lab
from manyhands.ranks.failures import RankFailed, RanksHung
from manyhands.ranks.lab import run_ranks
from manyhands.saving.agree import from_first, gather, rank_of, to_first, together
from manyhands.saving.fits import agreed, check_kinds, check_names, check_whole
from manyhands.saving.folder import complete, damage, name_of, remove, step_of
from manyhands.saving.index import (
    FORMAT,
    INDEX,
    describe,
    file_of,
    key_of,
    read_file,
    read_index,
    sealed,
)
from manyhands.saving.kept import aim, optimizer_state, set_groups
from manyhands.saving.names import flatten, kept_in, tensor_of, with_leaves
from manyhands.saving.pieces import model_state
from manyhands.saving.sharded import OWN, copy_common, for_the_disk
from manyhands.saving.store import Store
from manyhands.training.storage import stored

lab.warm_up()
torch.set_num_threads(1)
scratch = tempfile.TemporaryDirectory(prefix="checkpoints-")  # removed when the kernel ends
HERE = Path(scratch.name)
print(
    f"torch {torch.__version__}, {os.cpu_count()} cores; the ranks of this notebook use CPU + gloo"
)

# %% [markdown]
# ## 1. What a run is made of
#
# Composer, a library for training, once listed what its checkpoints hold, and the list has twelve items: the
# model, optimizers, schedulers, algorithms, callbacks, the gradient scaler, a timestamp, the seed of rank
# zero, metrics of training and of evaluation, the name of the run, and the state of the dataset. Why so many?
# Because every number that the next step depends on has to come back, and a step depends on more than
# weights.
#
# ### A place in the data
#
# Begin with the item that the story was about. A **sampler** gives a data loader the order of the samples.
# `Position` is a sampler that knows its place. The order of an epoch follows from the seed and the number of
# the epoch alone, so two numbers are enough to find any place again: the epoch, and how many of its samples
# the training has used.
#
# *Used* is not the same as *drawn*. A loader with worker processes fetches batches in advance, and if drawn
# samples were counted, those on their way would be skipped after a restart. So the training itself counts, by
# calling `advance` after each step.
#
# The whole order of an epoch is given, as `order()`. Write `__iter__`, which goes through what is left of it,
# then `advance`, and the two methods for the state. Loading goes to the place directly: to draw samples and
# throw them away until the place is reached would take longer the later the run was interrupted.

# %% exercise="Position.__iter__ Position.advance Position.state_dict Position.load_state_dict" todo="11.1" minutes=10 difficulty=2 points=2
from manyhands.checkpoint.state import Position

# %% check="11.1" tags=["nbval-check-output"]
check.Position(Position)

# %% [markdown]
# What does the mistake of the story do to the samples? The cell uses 600 of an epoch's 1,000
# samples, "restarts", and then uses as many samples as the epoch has left, once with the place
# restored and once without. How often is each sample used?


# %% tags=["nbval-check-output"]
def uses_of_samples(is_restored, num_samples=1000):
    before = Position(num_samples, seed=3)
    used = list(before)[:600]
    before.advance(600)
    after = Position(num_samples, seed=3)
    if is_restored:
        after.load_state_dict(before.state_dict())
    used += list(after)[:400]
    return Counter(Counter(used)[sample] for sample in range(num_samples))


if check.ready("11.1"):
    for is_restored in (True, False):
        uses = uses_of_samples(is_restored)
        print(
            f"place {'restored' if is_restored else 'lost    '}: "
            f"{uses[0]:3} samples never used, {uses[1]:4} once, {uses[2]:3} twice"
        )
        assert uses == ({1: 1000} if is_restored else {0: 400, 1: 200, 2: 400})

# %% [markdown]
# With the place lost, 400 samples are used twice and 400 not at all, in an epoch in which each should be used
# once. The loss on repeated samples is lower, which looks like progress.
#
# ### Twelve items
#
# `Training` is a small classifier of digits that has all that a long run has: AdamW and a learning rate that
# falls, dropout, a running average of the weights, early stopping, a gradient scaler, and metrics. Its parts
# are attributes of `run`: `model`, `optimizer`, `scheduler`, `average`, `patience`, `scaler`, and so on.

# %% show="true"
from manyhands.checkpoint.state import Training

# %% [markdown]
# Write its state. Composer's names are more general than this training: `algorithms` holds the running
# average (`run.average`), `callbacks` the early stopping (`run.patience`, with its numbers `best` and
# `waits`), `rank_zero_seed` the seed of the order (`run.position.seed`), and `dataset_state` the place in the
# data. What one rank alone has, its random numbers, stands in `ranks` under `self.rank`. Two points decide
# whether the state is right:
#
# - **A snapshot.** `model.state_dict()` returns the tensors that the training goes on changing, and not
#   copies of them. If you keep them until they are written, they hold later weights by then. So copy.
# - **Random numbers.** Dropout draws from torch's generator. Its state belongs to the run, and every rank has
#   one of its own. It is restored once, at loading. Restored within the training loop, it would make every
#   step drop the same units.

# %% exercise="TrainingState.state_dict TrainingState.load_state_dict" todo="11.2" minutes=20 difficulty=2 points=3
from manyhands.checkpoint.state import TrainingState

# %% check="11.2" tags=["nbval-check-output"]
check.TrainingState(TrainingState)

# %% [markdown]
# Now leave out one item at a time. A run of 30 steps is interrupted after 13, in the middle of an epoch. A
# new process would build everything anew, with another seed here, and load the state. For each item the
# output says how far the losses of a run that was resumed without this item differ from those of the run that
# was never interrupted. Which items will show, and which will not?


# %%
def make_run(seed):
    data = images.load("embedded")
    train = TensorDataset(data.train_inputs.flatten(1), data.train_labels)
    held_out = TensorDataset(data.test_inputs.flatten(1), data.test_labels)
    return Training(train, held_out, seed=seed)


def resumed_without(item, state, fresh):
    """Losses after a resume in which one item keeps what a new run has."""
    run = make_run(seed=1)
    TrainingState(run).load_state_dict(state | ({item: fresh[item]} if item else {}))
    return run.train(17)


if check.ready("11.2", "11.1"):
    undisturbed = make_run(seed=0)
    undisturbed.train(13)
    state = TrainingState(undisturbed).state_dict()
    expected = undisturbed.train(17)
    fresh = TrainingState(make_run(seed=1)).state_dict()
    assert resumed_without("", state, fresh) == expected, "all items: equal, bit for bit"
    off = {}
    for item in state:
        losses = resumed_without(item, state, fresh)
        pairs = zip(losses, expected, strict=False)
        off[item] = max(abs(a - b) for a, b in pairs)
        print(f"without {item:15} the losses differ by at most {off[item]:.3f}")
    silent = [item for item in state if off[item] == 0]
    print(f"no difference in these losses: {', '.join(silent)}")
    assert "dataset_state" not in silent and "ranks" not in silent and "run_name" in silent

# %% [markdown]
# With all items the resumed losses equal the undisturbed ones bit for bit. Some items change the losses as soon
# as they are forgotten, and none of them raises an error. The items that the last line lists make no difference
# to these few losses, but they have another use: a lost count of early stopping stops too late, an average of
# the weights that begins anew is a worse model, a metric gives a wrong mean of this epoch, and without the name
# the run writes somewhere else. So the mistake shows later, or only in a report, which makes it harder to find.

# %% [markdown]
# ## 2. Complete or absent
#
# ### Every rank calls
#
# A model that is sharded over ranks can be saved as one file: gather the weights on rank 0, and rank 0 writes
# them. `full_state` of lesson 10 gathers. In many programs the call to save stands below `if rank == 0`. What
# happens when the gathering stands there as well?


# %%
V, T, L, B = 50, 16, 2, 12
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def build(seed=0):
    """A model that is sharded by hand, and its optimizer."""
    torch.manual_seed(seed)
    model = Transformer(V, T, L)
    model = FSDP(model, list(model.blocks))
    return model, ADAMW(model.parameters())


def save_on_rank_0():
    model, _ = build()
    if dist.get_rank() == 0:
        torch.save(full_state(model), HERE / "full.pt")


try:
    run_ranks(save_on_rank_0, 2, timeout_s=3)
except (RanksHung, RankFailed) as found:
    print(f"{type(found).__name__}: rank 0 waits in full_state, or was left alone there")

# %% [markdown]
# Rank 0 waits for parts that nobody sends. Here it usually learns of that soon, because rank 1 has ended.
# Where rank 1 goes on training, its next collectives are taken for those of `full_state`, and the ranks get
# wrong numbers, fail, or hang. Whatever gathers is a collective, so **every rank calls it**, and only the
# writing stands below `if rank == 0`.
#
# The full file has a second price. Rank 0 has to hold the whole state at once, 12 bytes per parameter with
# AdamW's two moments, which is just what sharding was meant to avoid. All other ranks wait while it writes.
# Section 3 does better. First comes a question that a single file has as well.
#
# ### Killed while it writes
#
# A job can be killed at any moment, and a large file takes a while to write. In the next cell a process
# overwrites its old checkpoint and is killed after 1 MB of the new one. What is left?


# %%
class Killed:
    """A file whose process is killed in the middle of a write."""

    def __init__(self, file, limit):
        self.file, self.left = file, limit

    def write(self, block):
        self.file.write(block[: self.left])
        self.left -= len(block)
        if self.left <= 0:
            self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return len(block)

    def flush(self):
        self.file.flush()


def overwrite(path, limit):
    with open(path, "wb") as file:
        torch.save({"w": torch.ones(1_000_000)}, Killed(file, limit))


def state_of_file(path):
    """What a reader finds in a checkpoint's file."""
    try:
        return f"a checkpoint whose weights are {torch.load(path, weights_only=True)['w'][0]:.0f}"
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError):
        return f"{path.stat().st_size:,} bytes that torch.load cannot read"


# %% tags=["nbval-check-output"]
path = HERE / "run.pt"
torch.save({"w": torch.zeros(1_000_000)}, path)
print("before:", state_of_file(path))
try:
    run_ranks(overwrite, 1, path, 1_000_000, join=False)
except RankFailed:
    print("after: ", state_of_file(path))

# %% [markdown]
# Both checkpoints are lost, the new one and the one that was fine. So a file is never overwritten in place.
# The new content goes into a file of another name beside the old one, and then takes over the name.
# `os.replace` does this in one step of the file system: at every moment the name stands for the old file or
# for the new one, never for a part.
#
# One more point concerns the power supply. When `write` returns, the bytes may be in the system's memory
# only. `os.fsync(file.fileno())` waits until they are on the disk. Without it the new name could reach the
# disk before the contents do. The name itself is kept in the folder, which needs an `fsync` of its own.
#
# Write it. `fill` writes the content into a file that you open. If `fill` fails, for example because the disk
# is full, the old file stays and the half of the new one is removed, since a full disk needs the room.
# `PARTIAL` is what the other name ends in, and `sync_folder` waits for the names of a folder.

# %% show="true"
from manyhands.saving.store import PARTIAL, sync_folder

# %% exercise="write_whole" todo="11.3" minutes=10 difficulty=2 points=2
from manyhands.saving.store import write_whole

# %% check="11.3" tags=["nbval-check-output"]
check.write_whole(write_whole)

# %% [markdown]
# The same process is killed at the same place, and this time your function writes. Which weights will be
# there?


# %%
def overwrite_whole(path, limit):
    write_whole(path, lambda file: torch.save({"w": torch.ones(1_000_000)}, Killed(file, limit)))


# %% tags=["nbval-check-output"]
if check.ready("11.3"):
    torch.save({"w": torch.zeros(1_000_000)}, path)
    print("before:", state_of_file(path))
    try:
        run_ranks(overwrite_whole, 1, path, 1_000_000, join=False)
    except RankFailed:
        print("after: ", state_of_file(path))
    assert torch.load(path, weights_only=True)["w"].sum() == 0

# %% [markdown]
# The old checkpoint is untouched. Beside it lies a part of the new one under its other name, which no reader
# looks for, and the next save overwrites it.

# %% [markdown]
# ## 3. Every rank writes its part
#
# How can a state be saved that no rank could hold whole? Each rank writes the parts that it holds, all ranks
# at the same time, and a small file says where everything is. Two words are needed for that:
#
# - A **box** is a part of a tensor with straight sides: its offset in the tensor, and its size in each
#   dimension.
# - A **piece** is a box together with the memory in which this rank holds it.

# %% show="true"
from manyhands.saving.pieces import Box, Piece

# %% [markdown]
# Boxes describe any kind of sharding. In your FSDP of lesson 10 a unit is one long vector and each rank's
# shard is a box of it. `fully_shard` cuts each weight by rows. A tensor that is not sharded is one box,
# which every rank holds. `model_state` and `optimizer_state` find the pieces of a model and of its
# optimizer, and this is what four ranks hold of the first moment of one unit in AdamW, after a step:


# %% tags=["nbval-check-output"]
def state_of(model, optimizer, step):
    """All that a run of this notebook has to save, in pieces."""
    flats = list(chain(*model.units))
    return {
        "model": model_state(model, flats),
        "optimizer": optimizer_state(optimizer, flats),
        "step": step,
    }


def boxes_on_rank():
    model, optimizer = build()
    model(*torch.randint(V, (2, B, T))).backward()
    optimizer.step()
    pieces, values = flatten(state_of(model, optimizer, 1))
    return {name: piece.box for name, piece in pieces.items()}, values


every_box, (values, *_) = zip(*run_ranks(boxes_on_rank, 4), strict=True)
name = next(name for name, box in every_box[0].items() if name.endswith("exp_avg"))
for rank, boxes in enumerate(every_box):
    print(f"rank {rank}: {name} from {boxes[name].offset[0]:,}, {boxes[name].size[0]:,} numbers")
print(f"{len(every_box[0])} pieces per rank, {len(values)} plain values, such as step")

# %% [markdown]
# ### Who writes what?
#
# If all ranks hold the same box, it is enough that one of them writes it. It should not always be rank 0,
# because all ranks wait for the one that has most to write. So go through the boxes in order, and give each
# to the rank that has least to write so far, among the ranks that hold it.

# %% exercise="plan" todo="11.4" minutes=10 difficulty=2 points=2
from manyhands.saving.sharded import plan

# %% check="11.4" tags=["nbval-check-output"]
check.plan(plan)

# %% [markdown]
# Does it balance? The cell takes the weights of a model on four ranks in two ways: sharded, where each box
# has one holder, and as DDP holds them, where all ranks hold everything. (Under DDP the tied matrix has
# two names and is written twice, which makes the sum a little larger.)


# %%
def megabytes(every_box):
    """MB of float32 that each rank writes by the plan."""
    writes = Counter()
    for (name, box), rank in plan(every_box).items():
        writes[rank] += 4 * prod(box.size) / 1e6 if name.startswith("model") else 0
    return [writes[rank] for rank in range(len(every_box))]


def boxes_of_ddp():
    pieces, _ = flatten({"model": model_state(Transformer(V, T, L))})
    return {name: piece.box for name, piece in pieces.items()}


# %% tags=["nbval-check-output"]
if check.ready("11.4"):
    for words, boxes in (("sharded", every_box), ("DDP", run_ranks(boxes_of_ddp, 4))):
        each = megabytes(boxes)
        print(f"{words:8}", "  ".join(f"{one:.3f} MB" for one in each))
        assert max(each) < 0.4 * sum(each)

# %% [markdown]
# The shards of a model are equally long, so the ranks write equally much. Under DDP the boxes are whole
# weights of different sizes, and the shares differ, but the rank with most to write still writes much less
# than one rank that writes everything.
#
# ### The index is the commit
#
# A checkpoint is now several files, and section 2's question comes back: what if the run is killed when
# three of four are written? Files in several places cannot be renamed in one step, and an object store
# cannot rename a folder. But one file can decide. `index.json` says which boxes are in which file, and it
# holds the size and the SHA-256 sum of each of them. It is written last, by rank 0, when all ranks have
# reported that their files are on the disk. A folder without an index is not a checkpoint.
#
# ![Three ranks write files at different speeds, and rank 0 writes the index when the slowest has finished; before that the older checkpoint counts](figures/checkpoint_commit.svg)
#
# A **SHA-256** sum is a number of 256 bits that is computed from all bytes of a file. If one bit changes, it
# becomes a different number, so a reader can tell that a file is the one that was written.

# %% show="true"
from manyhands.saving.sharded import divide, save_sharded


# %%
def train(model, optimizer, steps):
    """Losses of these steps; the batch of a step follows from its number."""
    rank, world_size, losses = dist.get_rank(), dist.get_world_size(), []
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        inputs, targets = torch.randint(V, (2, B, T), generator=draw)
        loss = model(inputs[rank::world_size], targets[rank::world_size])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total := loss.detach().clone())
        losses.append(total.item() / world_size)
    return losses


def train_and_save(folder, dies_at=None):
    """Save after step 3 and after step 6; a rank may be killed before its second save is whole."""
    model, optimizer = build()
    losses = train(model, optimizer, range(3))
    written = save_sharded(state_of(model, optimizer, 3), folder / name_of(3))
    losses += train(model, optimizer, range(3, 6))
    if dist.get_rank() == dies_at:
        os.kill(os.getpid(), signal.SIGKILL)
    save_sharded(state_of(model, optimizer, 6), folder / name_of(6))
    return written, losses + train(model, optimizer, range(6, 10))


# %% tags=["nbval-check-output"]
if check.ready("11.4"):
    outcomes = run_ranks(train_and_save, 4, HERE / "four")
    for path in sorted((HERE / "four" / name_of(3)).iterdir()):
        print(path.name)
    undisturbed = outcomes[0][1]
    try:
        run_ranks(train_and_save, 4, HERE / "killed", dies_at=2)
    except RankFailed as failed:
        print(f"\nrank {failed.rank} was killed before its second save")
    print(f"complete checkpoints: {', '.join(complete(HERE / 'killed'))}")
    assert complete(HERE / "killed") == [name_of(3)]

# %% [markdown]
# Rank 2 was killed before the ranks could agree on the second save, so nothing of step 6 was written. Had
# it been killed while it wrote its file, the folder of step 6 would hold files, but no index; either way only
# the checkpoint of step 3 counts.

# %% [markdown]
# ## 4. On another number of ranks
#
# After a failure there may be fewer nodes than before. Four ranks saved, and three are to go on. None of the
# three can read "its file", because nobody wrote one for it. This is called **resharding**.
#
# ![A vector of twelve numbers in four stored pieces of three; three ranks own four numbers each and copy 3 and 1, 2 and 2, 1 and 3 of them](figures/checkpoint_reshard.svg)
#
# Each rank looks at its own boxes. Whatever an own box and a stored box have in common is copied. The numbers
# at the arrows say how many that are. So the only geometry is the box that two boxes have in common. Along
# one side, it begins at the later of the two beginnings and ends at the earlier of the two ends.

# %% exercise="overlap" todo="11.5" minutes=5 difficulty=1 points=1
from manyhands.saving.pieces import overlap

# %% check="11.5" tags=["nbval-check-output"]
check.overlap(overlap)

# %% [markdown]
# With `overlap` a rank can plan what it reads: from which file, which stored box, and which part of it. Files
# that hold nothing for this rank are not opened, which matters when there are a thousand of them.

# %% exercise="parts_to_copy" todo="11.6" minutes=10 difficulty=2 points=2
from manyhands.saving.sharded import parts_to_copy

# %% check="11.6" tags=["nbval-check-output"]
check.parts_to_copy(parts_to_copy)

# %% [markdown]
# `load_sharded` uses your function. It reads into the tensors that the training already has, so loading needs
# no second model. And it refuses what does not fit: a name that only one side has, another shape, another
# type, a damaged file. `strict=False` of `load_state_dict` would let such names pass. If, for example, all
# names begin with `module.` on one side only, then nothing is loaded, and the run begins anew without a word.

# %% show="true"
from manyhands.saving.sharded import load_sharded

# %% [markdown]
# Now use it. The checkpoint that four ranks wrote after step 3 is loaded by 4, 2, 3 and 1 ranks, into models
# that were built with another seed. Each goes on to step 10 and compares its losses with those of the
# undisturbed run on four ranks. The batch of 12 can be divided by each of these numbers.


# %%
def load_and_train(folder):
    model, optimizer = build(seed=5)
    state = load_sharded(state_of(model, optimizer, 0), folder / name_of(3))
    set_groups(optimizer, state["optimizer"]["groups"])
    return train(model, optimizer, range(state["step"], 10))


if check.ready("11.5", "11.4", "11.6"):
    for num_ranks in (4, 2, 3, 1):
        losses = run_ranks(load_and_train, num_ranks, HERE / "four")[0]
        pairs = zip(losses, undisturbed[3:], strict=True)
        off = max(abs(a - b) for a, b in pairs)
        print(f"4 -> {num_ranks} ranks: the losses differ by at most {off:.1e}")
        assert off == 0 if num_ranks == 4 else off < 1e-5

# %% [markdown]
# On four ranks the losses are equal bit for bit. On another number they are equal to rounding only, although
# every loaded number is exact: the gradients of a batch are now summed in another order, and floating-point
# sums depend on the order.
#
# AdamW's state deserves a second look. It is created lazily, in the first step that has a gradient for a
# parameter, so a new optimizer has no tensors to load into. A load that only fills what it finds would skip
# the moments without a word. The usual remedy is a step with gradients of 0 and a learning rate of 0, which
# creates the state and changes no weight. But AdamW counts that step, and its corrections depend on the count:
# if a checkpoint is saved before the first step, or before a layer's first gradient, the run that goes on from
# it is another one. So `optimizer_state` saves only what is there. `load_sharded` has a stand-in with the same
# settings take that step on zeros, for each parameter of which the checkpoint has a state, and gives the
# optimizer the tensors when they are loaded. Section 7 meets the same trap in PyTorch's tool.
#
# And what cannot be resharded? What belongs to a rank by its nature, above all random numbers. A checkpoint of
# four ranks holds four states of the generator, and three ranks cannot continue four sequences. Such items
# stand below `ranks/` and are loaded where their rank exists. So with dropout, a run on another number of
# ranks draws other numbers: a run as good as the first one, but not the same.

# %% [markdown]
# ## 5. Which checkpoint to go back to
#
# A checkpoint that is complete can still be damaged later: by a failing disk, by a fault of the file
# system, by somebody who copied half of a folder. So a run should not go on from the *newest* checkpoint,
# but from the newest *intact* one, which is the newest whose files all have the sum that the index states.
# For the same reason more than one checkpoint is kept. With them stays the best one by validation loss,
# because the best model is often not the last one.

# %% show="true"
from manyhands.saving.folder import newest_intact, to_remove

# %% [markdown]
# The cell saves five checkpoints, keeps the two newest and the best, and then flips one bit in the newest.
# Its validation losses are made up.


# %%
def save_five(folder, losses):
    model, optimizer = build()
    for step in losses:
        train(model, optimizer, range(step - 1, step))
        save_sharded(state_of(model, optimizer, step), folder / name_of(step))
    dist.barrier()
    if dist.get_rank() == 0:
        for name in to_remove(complete(folder), losses, num_kept=2):
            remove(folder, name)


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# %% tags=["nbval-check-output"]
if check.ready("11.4"):
    folder = HERE / "kept"
    run_ranks(save_five, 2, folder, {1: 3.9, 2: 3.1, 3: 3.4, 4: 3.6, 5: 3.7})
    print(f"kept: {', '.join(complete(folder))}")
    flip_a_bit(folder / name_of(5) / "rank-00001.pt")
    name, (problem,) = run_ranks(newest_intact, 2, folder)[0]
    print(problem.replace(f"{folder}/", ""))
    print(f"newest intact: {name}")
    assert name == name_of(4)

# %% [markdown]
# The flipped bit was found, because every file is read and summed before the run goes on. That is the price
# of certainty: all files of the checkpoint are read once more at the start of a run.
#
# A checkpoint is removed in the opposite order of writing, its index first. A removal that is interrupted
# then leaves a folder without an index, and not one that promises files which are gone.

# %% [markdown]
# ## 6. Without waiting for the disk (optional)
#
# While a checkpoint is written, the training stands still, and a disk is slow. But what does the training
# have to wait for? Only for a copy: once the state is copied to other memory, the optimizer may change the
# original while a thread writes the copy. `AsyncSaver` does that, with four rules:
#
# - The copy is complete before `save` returns. Otherwise later steps would get into the checkpoint.
# - The buffers are kept and used again, because new memory is expensive, and no two saves are on their way at
#   once.
# - An error in the thread is raised at the next `save` or `wait`. A thread that dies in silence would leave a
#   run without checkpoints.
# - The ranks agree on the commit in a process group of their own. Collectives are matched by the order of
#   their calls, and the thread's calls would come at any time among those of the training.
#
# `Background` is given: it makes the process group, walks through the state, and waits for the last save when
# the program ends.

# %% show="true"
from manyhands.checkpoint.asynchronous import Background

# %% [markdown]
# Write the four methods that keep the rules.

# %% exercise="AsyncSaver.copied AsyncSaver.save AsyncSaver.write AsyncSaver.wait" todo="11.7" minutes=15 difficulty=2 points=3
from manyhands.checkpoint.asynchronous import AsyncSaver

# %% check="11.7" tags=["nbval-check-output"]
check.AsyncSaver(AsyncSaver)

# %% [markdown]
# How long does the training stand still? The cell saves a state of 16 MB per rank on two ranks, three times
# in each way, and prints the median. Between two saves the training has time, as it would have between
# checkpoints.


# %%
def stalls(folder):
    """Median seconds for which save_sharded, and then AsyncSaver.save, keep the training waiting."""
    rank = dist.get_rank()
    state = {"ranks": {str(rank): {"w": torch.randn(4_000_000)}}}
    saver = AsyncSaver()
    saver.save(state, folder / "warm-up")
    saver.wait()
    found = []
    for save in (save_sharded, saver.save):
        seconds = []
        for number in range(3):
            dist.barrier()
            start_s = time.perf_counter()
            save(state, folder / f"{len(found)}-{number}")
            seconds.append(time.perf_counter() - start_s)
            saver.wait()
        found.append(sorted(seconds)[1])
    return found


if check.ready("11.4", "11.7"):
    waits_s, copies_s = run_ranks(stalls, 2, HERE / "stalls")[0]
    print(f"save_sharded: {1e3 * waits_s:.1f} ms, AsyncSaver.save: {1e3 * copies_s:.1f} ms")
    print(f"the training stands still for {copies_s / waits_s:.0%} of the time")
    assert copies_s < waits_s

# %% [markdown]
# The second number is the time of a copy within memory; sums, writing, fsync and the commit happen beside the
# training. That is not free either: the thread needs a processor and the disk, and the buffers are a second
# copy of the state in memory. If the disk is not done before the next save, that save waits.

# %% [markdown]
# ## 7. PyTorch's own (optional)
#
# Is there a library that does all of this? There is: `torch.distributed.checkpoint`, DCP for short, plans what
# each rank writes, writes one file per rank, commits, and loads on any number of ranks, as your functions do. Its
# files have other names, and some of the work is left to you:
#
# | ours | DCP's | the difference |
# |---|---|---|
# | `rank-00002.pt` | `__2_0.distcp` | DCP puts its tensors one behind the other, each in the format of `torch.save` |
# | `index.json` | `.metadata` | both say which box is where, both are written last, and a folder without one is no checkpoint |
# | the index is removed before its folder is used again | the old `.metadata` stays until the new one is written | a job that is killed in between leaves old metadata with new files, so give every save a folder of its own |
# | SHA-256 of each file | nothing | a flipped bit in a tensor is loaded without a word |
# | JSON, and `weights_only=True` | pickle | loading can run code that somebody has put into the file, so load only what your own runs have saved |
# | `newest_intact`, `to_remove` | nothing | which folder to load and which ones to keep is left to your program |
#
# DCP recognizes a shard by its type, `DTensor`, which is what `fully_shard` makes of every weight. It takes a
# plain tensor for one that all ranks hold alike. The shards of our own FSDP are plain tensors, so DCP would keep
# those of one rank and lose the others. That is why this section shards with `fully_shard`.
#
# ### What does a bare state bring back?
#
# The obvious program saves what the model and the optimizer return as their state, and a new process loads into
# what its new model and optimizer return. In the next cells two ranks do that. Predict before you run them: of the
# weights, the moments of AdamW, the number of the step and the learning rate, which will be back?

# %%
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from manyhands.fsdp.fully_shard import torch_fsdp


def build_torch(seed=0):
    """The model of build, sharded by fully_shard."""
    torch.manual_seed(seed)
    model = Transformer(V, T, L)
    model = torch_fsdp(model, list(model.blocks))
    return model, ADAMW(model.parameters())


def save_bare(folder):
    model, optimizer = build_torch()
    train(model, optimizer, range(3))
    optimizer.param_groups[0]["lr"] = 5e-4  # as a schedule does
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    dcp.save(state, checkpoint_id=folder)
    return full_state(model), len(optimizer.state)


def load_bare(folder):
    model, optimizer = build_torch(seed=5)
    step = 0
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    dcp.load(state, checkpoint_id=folder)
    rate = optimizer.param_groups[0]["lr"]
    stored = state["optimizer"]["param_groups"][0]["lr"]
    return full_state(model), len(optimizer.state), (step, state["step"]), (rate, stored)


# %% tags=["nbval-check-output"]
saved, num_states = run_ranks(save_bare, 2, HERE / "bare")[0]
found, num_loaded, step, rate = run_ranks(load_bare, 2, HERE / "bare")[0]
num_equal = sum(torch.equal(found[name], saved[name]) for name in saved)
print(f"weights that are those of the checkpoint: {num_equal} of {len(saved)}")
print(f"weights whose moments were loaded: {num_loaded} of {num_states}")
print(f"step: {step[0]} in the program, {step[1]} in the dict that was given to dcp.load")
print(f"learning rate: {rate[0]} in the optimizer, {rate[1]} in that dict")
assert num_equal == len(saved) and num_loaded == 0 and step == (0, 3) and rate == (1e-3, 5e-4)

# %% [markdown]
# Only the weights are back, and there was no warning. (One of them has two names, since the first and the last
# layer share it, and the optimizer counts it once.) DCP fills the *tensors* that it finds in your dict, in place, and
# so it writes into the memory of the model. Two kinds of things escape it:
#
# - **State that does not exist yet.** A new AdamW has no moments, so its dict has no names for them, and DCP loads
#   only names that it is asked for. This run would go on with the right weights and with moments that begin at 0.
# - **Numbers.** A number cannot be filled in place. DCP puts the stored one into the dict, and there it stays until
#   your program takes it out. This holds for the step, and for the learning rate in the optimizer's settings.
#
# The third trap is names. DDP puts `module.` before the name of each weight of the model inside. What happens if
# weights are saved without that prefix and asked for with it?


# %% tags=["nbval-check-output"]
def load_under_other_names(folder):
    """Ask for the weights by the names that DDP gives them, strictly and not; what comes of it?"""
    model, _ = build_torch(seed=5)
    old = copy.deepcopy(model.state_dict())
    state = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    told = []
    for is_partial in (False, True):
        planner = dcp.DefaultLoadPlanner(allow_partial_load=is_partial)
        try:
            dcp.load({"model": state}, checkpoint_id=folder, planner=planner)
            new = model.state_dict()
            changed = sum(not torch.equal(new[n].to_local(), old[n].to_local()) for n in new)
            told.append(f"accepted, and {changed} of {len(new)} tensors are changed")
        except dcp.CheckpointException as refused:
            error, _ = refused.failures[dist.get_rank()]
            told.append(f"refused: {error}")
    return told


strict, partial_load = run_ranks(load_under_other_names, 2, HERE / "bare")[0]
print(f"dcp.load: {strict}")
print(f"dcp.load, allow_partial_load=True: {partial_load}")
assert strict.startswith("refused") and partial_load.startswith("accepted, and 0 of")
state = {f"module.{name}": tensor for name, tensor in saved.items()}
names = Transformer(V, T, L).load_state_dict(state, strict=False)
num_missing = len(names.missing_keys)
print(f"load_state_dict, strict=False: {num_missing} of {len(saved)} weights were not loaded")
assert num_missing == len(saved)

# %% [markdown]
# By default DCP refuses, and so does `load_state_dict`. With `allow_partial_load=True` or `strict=False`, both accept
# a checkpoint of which no name fits, load nothing, and the run begins anew. These options are meant for a model of
# which a part is new. If you need one of them, count how many names did match.
#
# ### Can `torch.load` read it?
#
# Some slides save a sharded model with DCP and load it with `torch.load`. Try: the cell hands `torch.load` the
# folder, and then the file of each rank.

# %% tags=["nbval-check-output"]
for path in (HERE / "bare", *sorted((HERE / "bare").glob("*.distcp"))):
    try:
        torch.load(path, weights_only=True)
        outcome = "can be read"
    except (OSError, RuntimeError) as refused:
        outcome = type(refused).__name__
    print(f"{path.name:13} {outcome}")
    assert outcome != "can be read"

# %% [markdown]
# It can read none of them: the folder is no file, and a rank's file holds many tensors, one behind the other. What was
# saved with DCP is loaded with DCP, into a model that exists already, by any number of ranks, also by one. For a tool
# that needs a single file, `dcp_to_torch_save` of `torch.distributed.checkpoint.format_utils` writes one.
#
# ### A state that is complete
#
# The remedy for all three traps is one object that knows what belongs to the run. DCP calls it a `Stateful`: it has
# the methods `state_dict()` and `load_state_dict()`. `dcp.save({"app": app}, ...)` asks it for its state. `dcp.load`
# asks for the state as well, fills it, and hands it to `load_state_dict`, which can put every number where it
# belongs. DCP looks for such objects in the outermost dict only, so your methods have to call those of the parts.
#
# Two functions do the difficult part. `get_state_dict(model, optimizer)` returns the states of both, under
# names that do not depend on the wrapper. If the optimizer has no state yet, it makes one by a step with
# gradients of 0, which AdamW counts: so save after the first step. It does so only while no parameter has a
# gradient, so load before the first backward. `set_state_dict(model, optimizer, model_state_dict=...,
# optim_state_dict=...)` gives both back.

# %% exercise="AppState.state_dict AppState.load_state_dict" todo="11.8" minutes=10 difficulty=2 points=2
from manyhands.checkpoint.dcp import AppState

# %% check="11.8" tags=["nbval-check-output"]
check.AppState(AppState)

# %% [markdown]
# Is the result the same as by hand? Four ranks save the same state in both ways. DCP does so by `async_save`, its
# counterpart of `AsyncSaver`, so that the training can go on while a thread writes. Then 4, 2 and 3 ranks load
# either checkpoint into new models, compare all tensors, and go on.


# %%
def torch_state(model, optimizer, place):
    """The same state in pieces, for save_sharded."""
    parts = {"model": model_state(model), "optimizer": optimizer_state(optimizer)}
    return parts | {"place": place.state_dict()}


def save_both(folder):
    (model, optimizer), place = build_torch(), Position(1200)
    losses = train(model, optimizer, range(3))
    place.advance(3 * B)
    save_sharded(torch_state(model, optimizer, place), folder / "hand")
    app = AppState(model, optimizer, place)
    own = dist.new_group(backend="gloo")
    saving = dcp.async_save({"app": app}, checkpoint_id=folder / "dcp", process_group=own)
    losses += train(model, optimizer, range(3, 10))
    saving.result()  # waits for the thread, and raises its error
    return losses


def load_both(folder):
    tensors, losses = [], []
    for way in ("hand", "dcp"):
        (model, optimizer), place = build_torch(seed=5), Position(1200)
        if way == "dcp":
            dcp.load({"app": AppState(model, optimizer, place)}, checkpoint_id=folder / way)
        else:
            state = load_sharded(torch_state(model, optimizer, place), folder / way)
            set_groups(optimizer, state["optimizer"]["groups"])
            place.load_state_dict(state["place"])
        pieces, _ = flatten(torch_state(model, optimizer, place))
        tensors.append({name: piece.tensor.clone() for name, piece in pieces.items()})
        losses.append(train(model, optimizer, range(place.position // B, 10)))
    hand, own = tensors
    return sum(torch.equal(hand[name], own[name]) for name in hand), len(hand), losses


# %%
if check.ready("11.1", "11.5", "11.4", "11.6", "11.8"):
    # NCCL's rules are not watched here: the calls of DCP's thread would wait for the watch for ever.
    undisturbed_torch = run_ranks(save_both, 4, HERE / "both", rules="")[0]
    for num_ranks in (4, 2, 3):
        outcomes = run_ranks(load_both, num_ranks, HERE / "both")
        assert all(num_equal == num_tensors for num_equal, num_tensors, _ in outcomes)
        _, num_tensors, (by_hand, by_dcp) = outcomes[0]
        off = max(abs(a - b) for a, b in zip(by_dcp, undisturbed_torch[3:], strict=True))
        assert by_dcp == by_hand and (off == 0 if num_ranks == 4 else off < 1e-5)
        print(
            f"4 -> {num_ranks} ranks: on every rank all {num_tensors} tensors equal by hand and by DCP, "
            f"losses off by at most {off:.1e}"
        )

# %% [markdown]
# Both checkpoints hold the same state: every weight and every moment is equal bit for bit, on each of these numbers
# of ranks. The steps that were taken after `async_save` had returned are not in DCP's checkpoint, although they changed
# the same memory, or the losses would differ.
#
# So `async_save` has the parts of your `AsyncSaver`. It copies the state first, which its documentation calls
# *staging*, and then a thread writes the copy. In place of `wait` it returns a *future*, an object whose `result()`
# waits for the thread and raises its error; if nobody calls `result()`, nobody hears of the error. The other rules of
# section 6 are left to you. The thread uses the process group of the training unless you give it one of its own, as
# this cell does. `async_save` does not wait for the save before, so call the last `result()` first. And each save
# makes new buffers, unless you keep a stager (`torch.distributed.checkpoint.staging`) and pass it as `async_stager=`.

# %% [markdown]
# ## 8. When to save
#
# How often should a run save? Every save stops the training for a while, so rare saves look cheap. But a
# failure throws away everything since the last save, so rare saves lose more. Somewhere between the two lies
# an interval that wastes the least time.
#
# Call the time for which one save stops the training $C$, the work between two saves $\tau$, and the mean
# time between two failures of the job $M$ (its *MTBF*). Each $\tau$ of work pays $C$, which is a share
# $C/\tau$ of the time. A failure comes once per $M$ and loses, on average, half of what lies between two
# saves, a share of about $\tau / 2M$. The sum is smallest where both parts are equal, at
#
# $$\tau \approx \sqrt{2\,C\,M}.$$
#
# That is Young's estimate (1974). Daly (2006) corrected it for saves that are not short compared with $M$:
# with $x = \sqrt{C/2M}$, it becomes $\sqrt{2CM}\,(1 + x/3 + x^2/9) - C$, and simply $M$ where $C \ge 2M$.
#
# $M$ belongs to the job and not to a node. If one node fails once a year, then 365 of them, which fail
# independently, have a failure every day, and each failure stops all of them. So $M$ is the mean time of one
# node divided by the number of nodes.

# %% exercise="young_daly best_interval" todo="11.9" minutes=10 difficulty=1 points=2
from manyhands.checkpoint.interval import best_interval, young_daly

# %% check="11.9" tags=["nbval-check-output"]
check.best_interval(young_daly, best_interval)

# %% [markdown]
# ### A published run
#
# Meta's report on Llama 3 counts 466 interruptions in 54 days on 16,384 GPUs, of which 419 were unexpected
# (Grattafiori et al. 2024, https://arxiv.org/abs/2407.21783, section 3.3.4). That gives $M$. The report does not say
# what a save cost in these terms, so the two values of $C$ below are chosen, not published. Before you run
# the cell: if a save takes four times as long, how much longer should the interval be?

# %% tags=["nbval-check-output"]
if check.ready("11.9"):
    mtbf_s = 54 * 86400 / 419
    years = 16384 * mtbf_s / 86400 / 365
    print(
        f"one unexpected interruption every {mtbf_s / 3600:.1f} hours; one GPU: {years:.1f} years"
    )
    for save_s in (15, 60):
        minutes = young_daly(save_s, mtbf_s) / 60
        print(f"a save of {save_s} s (chosen): every {minutes:.0f} minutes")

# %% [markdown]
# A GPU that fails once in years gives a job that fails every few hours. (The line charges every interruption to a
# GPU. By the report, GPUs caused 58.7 % of them, so a GPU alone lasts longer still.) And because of the square
# root, a save that is four times as expensive asks for an interval that is only about twice as long.

# %% [markdown]
# ## 9. Kill it and count (optional)
#
# Does the formula hold for a run whose processes really die? Before we kill any, we need a number that can be
# measured and predicted.
#
# The *goodput* of a run is the share of all time that makes steps which are part of the final weights. Its
# expected value can be derived. A segment, $\tau$ of work and the save after it, takes $s = \tau + C$ and is
# tried again until no failure hits it. If the times between failures are exponential with mean $M$, a try
# survives with probability $e^{-s/M}$, so $e^{s/M} - 1$ tries fail on average. All tries together take
# $M(e^{s/M} - 1)$, and each failure adds $R$, the time to notice it, start again and load:
#
# $$\text{goodput} = \frac{\tau}{(M + R)\,(e^{(\tau + C)/M} - 1)}.$$
#
# The assumption is that a restart itself does not fail; Daly has $M e^{R/M}$ in place of $M + R$, because in
# his model it may. Note that $R$ is a factor of its own. A slow restart lowers the whole curve but does not
# move its maximum.

# %% show="true"
from manyhands.checkpoint.interval import expected_goodput

# %% [markdown]
# To compare the formula with a real run, we need to know where the time of the run went. Our ranks write a
# log of events, and the time between two events belongs to the second one. Write `account`, which splits the
# time into four causes. The trap is that a step is not useful because it was done: it is useful if the run
# never goes back behind it.

# %% show="true"
from manyhands.checkpoint.interval import Event, Spent

# %% exercise="account" todo="11.10" minutes=15 difficulty=2 points=3
from manyhands.checkpoint.interval import account

# %% check="11.10" tags=["nbval-check-output"]
check.account(account)

# %% [markdown]
# ### The loop, closed
#
# Now we close the loop. Two real ranks train a small sharded model and save it with your lesson's
# `save_sharded`, with all its waits for the disk. A rank is ended by SIGKILL at exponentially distributed
# times, in whatever it is doing; the other rank loses its partner; both are started again and resume from
# the newest intact checkpoint. First we measure $C$ and $R$ here, then choose $M = 10\,C$, which is far
# more failures than any cluster has, so that even a run of a few seconds meets some.
#
# Predict before you run: at a quarter of the Young-Daly interval, which cause takes the most time besides
# restarts? And at four times that interval?

# %%
if check.ready("11.9", "11.10"):
    costs = killed.rehearse()
    mtbf_s = 10 * costs.save_s
    # Two ranks, each of which fails half as often as the job.
    best = best_interval(costs.save_s, 2 * mtbf_s, 2, costs.step_s)
    intervals = sorted({max(1, round(factor * best)) for factor in (1 / 4, 1, 2, 4)})
    # The first twelve lifetimes of seed 10 average 0.97 M; those of seed 7 only 0.37 M.
    runs = killed.measure(intervals, 4 * best, mtbf_s, seeds=(10,))
    save_ms, restart_ms = 1e3 * costs.save_s, 1e3 * costs.restart_s
    print(f"a save: {save_ms:.0f} ms, a restart: {restart_ms:.0f} ms; Young-Daly: {best} steps")
    for run in runs:
        told = f"{run.num_kills} kills, goodput {run.spent.goodput:.0%}"
        print(f"every {run.interval:3} steps: {told}")
    assert all(run.is_right for run in runs)  # bit for bit the weights of a run that nobody killed

# %%
if check.ready("11.9", "11.10"):
    now = killed.paid(runs, 4 * best)
    alt = "Goodput of four intervals as points beside the formula's curve; time by cause."
    figures.show(drawn.goodput_by_interval(runs, now, mtbf_s, 4 * best), alt)
    shares = []
    for run in (runs[0], runs[-1]):
        saving, again = (part / sum(run.spent) for part in (run.spent.saving, run.spent.again))
        print(
            f"every {run.interval} steps: {saving:.0%} of the time saves, {again:.0%} is done again"
        )
        shares.append(saving)
    assert shares[0] > shares[1]

# %% [markdown]
# Every run ended with exactly the weights of the undisturbed one, however often it was killed; the cell
# asserts it. The curve and the dashed line take the mean costs of a step, a save and a restart in these
# runs, which differ from those of the rehearsal. The shaded range shows how much nine of ten such runs
# would differ if nothing but the moments of the kills changed. With so few kills that range is wide, so
# your four points need not lie in the order of the curve. To test a formula about expected values takes
# more kills, and therefore more minutes: the next figure is a stored run with more intervals and many draws
# of the kills.

# %%
kept = stored("checkpoint", "goodput")
many = killed.runs_of(kept)
now = killed.paid(many, kept["num_steps"])
alt = "As above with more intervals: the common goodput of many runs each beside the formula."
figures.show(drawn.goodput_by_interval(many, now, kept["mtbf_s"], kept["num_steps"]), alt)
gaps = []
for interval, group in drawn.by_interval(many).items():
    measured = drawn.total_of(group).goodput
    expected = expected_goodput(interval * now.step_s, now.save_s, kept["mtbf_s"], now.restart_s)
    gaps.append(abs(measured - expected))
num_kills, num_right = sum(run.num_kills for run in many), sum(run.is_right for run in many)
print(f"{num_kills} kills, {num_right} of {len(many)} runs right bit for bit")
print(f"points and formula: at most {100 * max(gaps):.1f} percentage points apart")
assert num_right == len(many) and max(gaps) < 0.05

# %% [markdown]
# Two things are worth keeping. First, where failures are rare, the maximum is flat. With a save of one minute
# and a failure every three hours, the best interval gives a goodput of 0.90 by the formula, and half or twice
# that interval gives 0.88. So an estimate of $M$ that is wrong by a factor of four, which changes the
# interval by a factor of two, does little harm. Where failures are frequent, the choice matters more: if $M$
# is only ten times $C$, the three numbers are 0.62, 0.57 and 0.56. (A restart takes no time in these
# examples.)
#
# Second, the two sides differ in kind. Saving too often costs a known share of the time; saving too rarely
# costs steps that are done again, and its share depends on luck, as the dashes of the single runs show. When
# in doubt, save a little too often, and make $C$ smaller: with an asynchronous save, $C$ is only the stall.

# %% [markdown]
# ## 10. Fewer ranks, then more (optional)
#
# Can a training go on while it waits for a replacement node? A sharded checkpoint can be loaded by any number
# of ranks, so the job may shrink to the nodes that are left and grow again later. This is called *elastic*
# training. `torchrun --nnodes=1:2 --max-restarts=9` is called on each node, where it starts an agent, and the
# agents are content with one node or two. When a rank dies, they end the remaining ranks and start new ones,
# up to nine times; the same happens when a node is lost or added. Each start is a new *life* of the run: it
# has its own number of ranks and begins with the newest intact checkpoint.
#
# The weights are not enough for that. Suppose four ranks were 100 steps into an epoch and two ranks take
# over. If each rank remembers its own place in its own list of samples, then the two lists that belonged to
# the lost ranks are forgotten, and the new division would repeat some samples and skip others. The cure is to
# make the batch of a step depend on nothing but the number of the step. The ranks then only decide how to
# share it, and the position in the data is one number that means the same for any number of ranks.
#
# Write that function. The number of ranks need not divide the batch.

# %% exercise="samples_of_step" todo="11.11" minutes=10 difficulty=2 points=2
from manyhands.checkpoint.elastic import samples_of_step

# %% check="11.11" tags=["nbval-check-output"]
check.samples_of_step(samples_of_step)

# %% [markdown]
# The next cell divides one step of 12 samples among four, two and five ranks. Look at the last column:
# sorted, it should be the same list three times.

# %%
if check.ready("11.11"):
    for world_size in (4, 2, 5):
        parts = [samples_of_step(100, rank, world_size, 5000, 12) for rank in range(world_size)]
        print(f"{world_size} ranks take {[len(part) for part in parts]}: {sorted(chain(*parts))}")

# %% [markdown]
# Five ranks have uneven shares, so the mean of their mean losses would give some samples more weight than
# others. A run that accepts such a number has to weight each rank's loss by its share; our job refuses it
# instead.
#
# Now the real thing, which takes minutes and was therefore run beforehand: two agents on one machine play two
# nodes with two ranks each. First a single rank is killed, then a whole node, and later a node is started
# again. In the figure, watch the number of ranks in each life, and how much work each kind of event costs.

# %%
elastic = stored("checkpoint", "elastic")
losses, calm, lives = (elastic[name] for name in ("losses", "calm", "lives"))
assert elastic["misused"] == ""  # every sample at most once in its epoch, and no step missing
assert [life["ranks"] for life in lives] == [4, 4, 2, 4]
lost = [before["stop"] - after["start"] for before, after in pairwise(lives)]
print(f"steps done again after each event: {lost}")
assert lost[-1] == 0 and min(lost[:-1]) > 0
figures.show(
    drawn.elastic_losses(losses, calm, lives, elastic["events"]),
    "Loss against step of an elastic and an undisturbed run; below, the steps of each life.",
)

# %%
apart = [abs(a - b) for a, b in zip(losses, calm, strict=True)]
for steps in (lives[1]["stop"], lives[2]["stop"], len(apart)):
    print(f"largest difference in the first {steps} steps: {max(apart[:steps]):.1e}")
assert max(apart[: lives[1]["stop"]]) < 1e-5 < max(apart)

# %% [markdown]
# The two kills cost the steps since the last checkpoint. The returning node costs no step, because the agents
# end the ranks by SIGTERM before they start more of them, and our run answers this signal with a checkpoint.
#
# What is exact, and what is not? The *samples* are exact: each rank noted what it took, and in the history
# that survives (of a step taken twice, the last time) each step has its twelve samples and none of them
# occurs twice in an epoch. The *sums* agree only to rounding, because other ranks add the same gradients in
# another order. The table shows what becomes of that: the difference from the undisturbed run on one rank is
# of the order of float32's last digit at first, and it grows over hundreds of steps. Lesson 06 saw the same
# between one process and two that nobody killed, where training amplifies rounding. That rounding explains all of the
# difference here is likely, but was not measured apart. *Random numbers* drawn on a rank, for example by dropout,
# our job does not carry over at all when the number of ranks changes; the ranks draw new ones. Our model has no
# dropout.

# %% [markdown]
# ## 11. What frameworks do (optional)
#
# Lightning, Accelerate and Composer are libraries that take parts of a training program over. Which parts, and
# which are left to you? The course has the program of lesson 06 in two more versions, `scripts/train_lightning.py`
# and `scripts/train_accelerate.py`. Both have fewer than 80 lines, train the same model on the same data, and are
# started in the same way:
#
# ```sh
# pip install -e '.[frameworks]'
# torchrun --standalone --nproc-per-node=2 scripts/train_lightning.py --data embedded --steps 300
# ```
#
# In Lightning you write a step and a validation as methods, and its `Trainer` owns the loop that calls them, the
# ranks, and the checkpoints. With Accelerate the loop stays yours. It wraps the model, the optimizer and the loader
# for the ranks that are there, and saves when you call `save_state`.
#
# Neither changes the mathematics: over the 20 steps of a test on two ranks, no loss differs from that of
# `train_ddp.py` by more than 1e-4. Nor does it after a run was killed and resumed by two ranks, by one in place
# of two, or by two in place of one (`pytest -s tests/training/test_frameworks.py` prints the differences). That works on
# other numbers of ranks because their checkpoints are whole: every rank holds all of the weights and of the
# optimizer's state, and rank 0 writes them. What they lack had to be added. Lightning's knows the number of
# the step, from which our sampler finds the place in the data. Accelerate's knows neither the step nor the
# best loss, so an object of ours is registered and saved with it. Without the packages, either script ends
# with one line that names the missing one, and exit code 2.

# %%
import importlib.util

from IPython.display import Markdown, display

from manyhands.checkpoint.frameworks import COMPOSER, ROWS

for name in ("lightning", "accelerate"):
    found = importlib.util.find_spec(name) is not None
    print(f"{name} is {'installed' if found else 'not installed; this notebook does not need it'}")

rows = [("", "Composer", "by hand", "Lightning", "Accelerate"), ("---",) * 5, *ROWS]
display(Markdown("\n".join(f"| {' | '.join(row)} |" for row in rows)))

# %% [markdown]
# Each row is a need that you have met in this lesson, and where each library keeps it. Most entries of Lightning and
# Accelerate are tested by running them. Composer's column is taken from the documentation of its `Trainer`
# (https://docs.mosaicml.com/projects/composer/en/latest/api_reference/generated/composer.Trainer.html), because its
# releases from 0.32 on refuse this course's PyTorch. The next cell says so in pip's own words. Without the bound on the
# version pip would go back as far as release 0.3.1.

# %%
print(f"{COMPOSER['remake']}\n    {COMPOSER['says']}   ({COMPOSER['date']})")

# %% [markdown]
# ### The whole object, or its state?
#
# Slides on saving often call `torch.save(model, path)` with a model that is wrapped for training. The next cell saves
# such a wrapper whole, and then the state of the model inside it. Which of the two files can be loaded with
# `torch.load(path)`?

# %% tags=["nbval-check-output"]
wrapped = AveragedModel(nn.Linear(3, 2))
torch.save(wrapped, HERE / "whole.pt")
torch.save(wrapped.module.state_dict(), HERE / "state.pt")
outcomes = {}
for name in ("whole.pt", "state.pt"):
    try:
        torch.load(HERE / name, weights_only=True)  # the default
        outcomes[name] = "loaded"
    except pickle.UnpicklingError:
        outcomes[name] = "refused"
    print(f"{name}: {outcomes[name]}")
assert outcomes == {"whole.pt": "refused", "state.pt": "loaded"}

# %% [markdown]
# The whole object is refused. A pickled object names the classes and functions that are needed to build it,
# and loading it would call them, whatever a stranger has put there. Since version 2.6, `torch.load`
# therefore accepts tensors and plain containers only. A state has another advantage as well: it does not
# contain the wrapper, so it fits the model alone, and the model inside any other wrapper.
#
# <details><summary>An example for Composer passes <code>train_data_loader=</code> to its Trainer. What is wrong?</summary>
#
# The argument is called `train_dataloader`. A wrong keyword raises a `TypeError` at once, which is the good case:
# compare it with a name in a checkpoint that is skipped without a word.
# </details>

# %% [markdown]
# ## 12. Containers and Kubernetes (optional)
#
# A checkpoint lets a run move to another machine, but only if that machine can also run the program. How does
# the program travel, with its Python and its hundred packages, and who starts it again when a machine is lost?
#
# An **image** is a file that holds a whole system of files: a small Linux, Python, PyTorch and the course. A
# **container** is a process that sees this file system as its own disk. On Linux it is an ordinary process of
# the machine's own kernel, so a container starts in about the time that a process does and computes at the same
# speed. An image is built once, by a list of commands, and then runs unchanged wherever its kind of processor
# and a suitable driver for the GPUs are found. The driver stays outside: it belongs to the kernel of the
# machine.
#
# Two programs are common. On laptops and in clouds it is Docker, whose list of commands is a `Dockerfile` (on
# macOS and Windows its containers run in a virtual machine with Linux). A daemon with root's rights starts its
# containers, so whoever may talk to that daemon is, in effect, root on the machine. Shared clusters therefore
# use Apptainer (formerly Singularity), which starts a container as an ordinary process of the user who called
# it: inside you are who you are outside, and you see your own home folder. Both can start from the same base
# image, and the course has a file for each of them. Their steps are the README's commands.

# %%
import yaml

from manyhands.checkpoint.pods import BROKEN, pods_of
from manyhands.jobs.submit import course_file

print(course_file("../sbatch/containers/Dockerfile").read_text())

# %% [markdown]
# Three things about it deserve attention. `USER` makes the steps below it, and later the training, run
# without root's rights, because root in a container is root for every folder that is mounted into it.
# There is no password and no token, because every layer of an image can be read by all who can fetch the
# image, even a file that a later step deletes. And `--shm-size` in the comment gives the container shared
# memory: by default it has 64 MB in `/dev/shm`, through which the workers of a data loader hand over their
# batches.
#
# ### A job in pods
#
# Kubernetes runs containers on many machines. Its unit is the **pod**: one container, or a few that
# belong together, with a network address and a host name of their own, placed on one node. A **Job** starts
# pods and replaces those that fail until enough of them have ended with exit code 0. A **Service** gives pods a
# name in the cluster's DNS, the directory that turns names into addresses. All three are written as YAML
# files, called **manifests**, and sent to Kubernetes' API server with `kubectl apply`.
#
# Training on several nodes asks for three things that a Job does not give by itself. All pods have to run at
# the same time, so `parallelism` has to equal `completions`. Each pod needs a number, so `completionMode` has
# to be `Indexed`: pod `i` then has the variable `JOB_COMPLETION_INDEX` and the host name *job name*`-i`. And
# every pod has to find pod 0, so there is a **headless** Service, one with `clusterIP: None`. An ordinary
# Service has one virtual address that leads to any of its pods, while a headless one has a DNS name for each
# pod, provided that the pod names this Service as its `subdomain`.
#
# From a Job and its Service, `pods_of` works out what each pod would be given. Before you run the
# cell, say which of the values have to differ between the two pods, and which have to be the same.

# %%
job_file = course_file("../sbatch/containers/job.yaml")
for pod in pods_of(list(yaml.safe_load_all(job_file.read_text()))):
    print(f"{pod.host}, known to the others as {pod.dns}")
    for name, value in sorted(pod.environ.items()):
        print(f"    {name}={value}")

# %% [markdown]
# Only the index differs. The number of nodes and the address at which all agents meet are the same, and that
# address is the name of pod 0. Under Slurm, `launch.sh` asks `scontrol` for the first node and takes the node's
# number from `SLURM_NODEID`. In a pod, `launch.py` reads the variables above, and from there on nothing differs:
# a test compares the arguments of torchrun, word for word. The index decides which agent opens the meeting place.
# torchrun numbers the ranks itself once all agents have met.
#
# What happens when a pod is lost? Its ranks fall silent, the ranks of all other pods fail because they wait for
# its messages, and so their pods fail as well. All ranks have to be started again, which is why the manifest says:
#
# | field | why |
# |---|---|
# | `restartPolicy: Never` | the failed pod is replaced by a new one, which may start on another node |
# | `backoffLimitPerIndex: 3` | one fault fails every pod once, so a limit for the whole Job would be used up faster the more nodes there are |
# | `maxFailedIndexes: 0` | training cannot go on without one of its nodes |
# | `podReplacementPolicy: Failed` | a new pod 0 has the name of the old one, and starts only when that has ended |
# | exit code 75 is ignored | the run was asked to stop and has saved, which is no fault |
# | a volume `runs` | all pods read and write the same checkpoints, and so do their successors |
#
# The fifth line hides a trap. When a node is taken out of service, its pods get SIGTERM. Our run then saves
# and ends in good order, and many programs end such a stop with exit code 0. A Job would take 0 for finished work,
# and would never start these pods again. Our run therefore ends with 75 unless it has reached its last step.
#
# ### Mend a manifest
#
# Here is a manifest with faults that are common. It is meant to train on two pods with four GPUs each.

# %% tags=["nbval-check-output"]
print(yaml.safe_dump_all(BROKEN, sort_keys=False))

# %% [markdown]
# Predict before you mend: how many pods would Kubernetes run at the same time, and could one find the other?
#
# The manifest is the list `BROKEN` of two nested dicts, as `yaml` reads them. Copy it and change the copy, or
# write both objects anew. The check compares them with the schemas that Kubernetes publishes. Then it works out
# the pods, and says what would happen.

# %% exercise="mended_job" todo="11.12" minutes=18 difficulty=2 points=3
from manyhands.checkpoint.pods import mended_job

# %% check="11.12" tags=["nbval-check-output"]
check.mended_job(mended_job)

# %% tags=["nbval-check-output"]
if check.ready("11.12"):
    before, after = pods_of(BROKEN), pods_of(mended_job())
    print(f"before: {len(before)} pod at a time, known to others as {before[0].dns or 'nothing'}")
    for pod in after:
        print(f"after: {pod.dns}: {' '.join(pod.command)}")

# %% [markdown]
# Even with the two faults mended that the API server refuses, the restart policy and the GPUs without a
# limit, the Job would have run one pod at a time, without a number and without a name, and torchrun would
# have ended at once, because a pod's name is no node rank. Most of the faults are silent: the API server
# refuses only what it can see to be wrong, and accepts the rest.
#
# ### Checkpoints in an object store
#
# The nodes of a cluster share a file system. Machines in a cloud often share only an *object store*, such
# as Amazon S3, which keeps whole files, called objects, under names in a *bucket*. The functions that save,
# load and find sharded checkpoints take an address in place of a folder: the job of section 13 saves in a
# bucket with `--store s3://bucket/run`. The package `s3fs` has to be installed for it (`pip install s3fs`),
# and it reads from the environment where the server is and who asks: `AWS_ENDPOINT_URL`,
# `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`.
#
# Most object stores have no rename. Whoever wants one copies the object to the new name and then removes
# the old one, so a kill in between leaves both. Checkpoints do not need one either, because an object
# appears when all of its upload has arrived, and is whole or absent like a renamed file. The commit of a
# checkpoint is the same as on a disk: the index, written last. What differs is that a killed process leaves
# the parts of its last upload behind. Nobody sees them as an object, but they are paid for until a rule of
# the bucket removes them.
#
# <details><summary>Some courses say that the nodes of a cluster are connected by fast internet and should save in cloud storage; others say that compute nodes have no internet at all. Who is right?</summary>
#
# Each of them, at some site. In a cloud, object storage is often the only storage that all nodes share. On many
# clusters only the login nodes reach the internet, and checkpoints go to a shared file system. So a program should
# take an address and leave the choice to whoever starts it.
# </details>
#
# ### What Kubernetes' own scheduler leaves open
#
# Slurm grants all nodes of a job at once. Kubernetes places pods one by one, so of two jobs that need the
# whole cluster each may get half of it, and both wait for ever. Starting all pods of a job together or none
# of them is called **gang scheduling**. Nor does the scheduler know by default which nodes share a fast
# switch, although a ring all-reduce is only as fast as its slowest link; choosing neighbours is called
# **topology-aware scheduling**. Two add-ons supply both. *Kueue* keeps Jobs suspended in a queue until the
# quota has room for all of their pods, and can tell Kubernetes' scheduler which neighbouring nodes to use.
# *Volcano* brings a scheduler of its own, which places groups of pods. Since version 1.35 Kubernetes also
# has gang scheduling of its own, at first switched off by default.
#
# A cluster is shared by way of **namespaces**. Names, including those of Services, are unique within one
# namespace; a *ResourceQuota* limits what it may use, such as its number of GPUs; roles decide who may start or
# read what in it; and a *NetworkPolicy* decides which pods may talk to each other. Without such a policy every
# pod can reach every other one, also across namespaces. This matters here, because the ports at which ranks meet ask for no password.
# All containers on a node share its kernel, so a namespace separates colleagues rather than
# enemies.
#
# Instead of writing the Service and the Job yourself you can leave them to *Kubeflow*. Its `TrainJob` names a
# program, a number of nodes and a runtime, and Kubeflow makes the indexed Job, the headless Service and
# torchrun's variables (`PET_NNODES`, `PET_NODE_RANK`, `PET_MASTER_ADDR`) of it. Many clusters still have its
# predecessor, the `PyTorchJob`. Both forms of the course's job are beside the manifest above, in `sbatch/containers/`.
#
# So a checkpoint saves the state of a run, an image the program, and a manifest says how many copies run, how they
# find each other, and what is done when one of them is lost.
#
# **Sources**: Kubernetes, "Job with Pod-to-Pod Communication",
# https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/; "Jobs",
# https://kubernetes.io/docs/concepts/workloads/controllers/job/; "Gang Scheduling",
# https://kubernetes.io/docs/concepts/scheduling-eviction/gang-scheduling/; "Job's Backoff Limit Per Index Goes
# GA" (2025), https://kubernetes.io/blog/2025/05/13/kubernetes-v1-33-jobs-backoff-limit-per-index-goes-ga;
# Kubeflow Trainer, pkg/runtime/framework/plugins/torch/torch.go in https://github.com/kubeflow/trainer, and for
# the PyTorchJob pkg/controller.v1/pytorch/envvar.go in https://github.com/kubeflow/training-operator; Kurtzer,
# Sochat and Bauer 2017, "Singularity: Scientific containers for mobility of compute", PLoS ONE 12(5),
# https://doi.org/10.1371/journal.pone.0177459; Kueue, https://kueue.sigs.k8s.io; Volcano, https://volcano.sh.

# %% [markdown]
# ## 13. Run it as a job
#
# The job trains a Transformer whose weights are sharded over all ranks. It saves a sharded checkpoint every
# few steps, keeps the newest three and the best, and goes on from the newest intact one when it is started
# again with the same `--out`, on any number of ranks that divides the batch. Here it runs with the course's
# functions. Of yours it can take `samples_of_step` (section 10): call `check.keep()`, and add `--impl mine`.
#
# The course's other jobs that save a training of the language model do it with the code of this lesson, except
# the two with a framework. Most of them
# resume only on the number of ranks that they began with: their order of samples depends on it, and the
# jobs of lessons 12 to 14 save each rank's parts as its own. This one takes `samples_of_step`, and its
# parts fit any number of ranks.

# %%
flags = "--steps 40 --layers 2 --block 32 --valid-tokens 8192"
folder = jobs.run("../sbatch/checkpoint.sbatch", *flags.split())

# %%
check.summary()

# %% [markdown]
# ## Recap
#
# You can now
#
# - list what a run is made of, and resume it bit for bit, in the middle of an epoch,
# - write a checkpoint that is complete or absent, in parts, by all ranks at once,
# - load it on another number of ranks, optimizer state included,
# - keep the newest and the best, and find the newest intact one after damage,
# - choose how often to save, from the cost of a save and the time between failures,
# - and say what a resume on another number of ranks keeps exactly, and what it cannot keep.
#
# **Questions**
#
# <details><summary>After a resume the validation loss is lower than before the interruption. Is that good news?</summary>
#
# Check the place in the data first. If the run reads again what it has read before, the loss on the repeated
# samples falls, and that can look like progress for as long as the repetition lasts.
# </details>
#
# <details><summary>A state of 1.2 TB is saved by 256 ranks. How much does one rank write, and what is the least that one rank of 192 reads?</summary>
#
# If nothing is replicated and the plan balances, each of the 256 ranks writes 4.7 GB. Each of the 192 ranks
# owns 6.25 GB, so it copies that much. It reads more, because `load_sharded` reads whole files to check their
# sums: a box of 6.25 GB is as long as 4/3 of a file and begins at a multiple of a third of one, so it touches
# two files, 9.4 GB, and reads them twice, once for the sums and once to load.
# </details>
#
# <details><summary>Why is the index written last, and removed first?</summary>
#
# A folder counts as a checkpoint if it has an index. Written last, the index appears when everything that it
# promises is on the disk. Removed first, it is gone before the first file that it promises. So an
# interruption at any moment leaves a whole checkpoint, or a folder that does not count.
# </details>
#
# <details><summary>An object store cannot rename. Is the commit still safe?</summary>
#
# Yes. An object appears under its name when its upload is complete, so a single object is whole or absent,
# as a renamed file is. What makes several objects one checkpoint is the index, and it comes last in both
# cases.
# </details>
#
# **Sources**: Young 1974, https://doi.org/10.1145/361147.361115; Daly 2006,
# https://doi.org/10.1016/j.future.2004.11.016; PyTorch's documentation of distributed checkpoints,
# https://docs.pytorch.org/docs/stable/distributed.checkpoint.html; rename(2), https://man7.org/linux/man-pages/man2/rename.2.html;
# fsync(2), https://man7.org/linux/man-pages/man2/fsync.2.html; Composer's documentation of its State,
# https://docs.mosaicml.com/projects/composer/en/stable/api_reference/generated/composer.State.html; the story
# of the opening, https://github.com/paiml/entrenar/issues/294.
