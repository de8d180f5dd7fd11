# ---
# manyhands:
#   title: Start here
#   goal: Find your way and see that everything works
#   paths:
#   - name: One day
#     minutes: 360
#     lessons: ["00 to 1", "01 to 4", "03 to 3", "04 to 3", "05 to 4", "06 to 4", "07 to 3"]
#     goal: choose a batch size with reasons, train on several processors with gradients averaged
#       by hand and by DDP, and say what a large batch costs
#   - name: Two afternoons
#     minutes: 360
#     lessons: ["00 to 2", "04 to 6", "05 to 6", "06 to 7"]
#     goal: build the ring all-reduce and data parallelism, and convert a program to DDP; 04 ends
#       the first afternoon
#   - name: University module
#     minutes: 2100
#     lessons: ["00", "01", "02", "03", "04", "05", "06", "07", "08", "09", "10", "11", "12", "13"]
#     goal: all of the above, and train what does not fit on one processor; 14 weeks of 2.5 hours
# ---

# %% [markdown]
# # Many Hands: start here
#
# In this course you train neural networks on many processors, and you build every technique
# yourself. You need Python and PyTorch on one device. You need no GPU and no internet.
#
# ![Why, build, check, predict and measure, run as a job; a check answers not started, not yet or done, and the first two lead back to building](figures/lesson.svg)

# %% [markdown]
# ## Does everything work?
#
# Run the next cell: press Shift+Enter. It starts four processes on this machine, lets them add up
# their numbers, and prints what it found.

# %%
import os

import torch
import torch.distributed as dist

from manyhands.ranks.lab import run_ranks


def add_up():
    number = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(number)
    return number.item()


print(f"torch {torch.__version__}, {os.cpu_count()} cores, {torch.cuda.device_count()} GPUs")
print("four processes added 1 + 2 + 3 + 4 and got", run_ranks(add_up, 4))

# %% tags=["nbval-check-output"]
assert run_ranks(add_up, 4) == [10, 10, 10, 10]
print("everything works")

# %% [markdown]
# ## Where am I?
#
# The next cell lists all lessons with their exercises, shows which of them you have solved, and
# names the one that comes next. Run it whenever you come back. What you have solved is noted in a
# folder of your own, so it is still known when you have closed everything, and also after an
# update of the course.

# %%
from manyhands.checks.engine import overview

overview.show()

# %% [markdown]
# ## How a lesson works
#
# - A lesson is one notebook in this folder. Work through it from top to bottom.
# - A cell that says `TODO 6.3` is yours to write. The text under the function's name, its
#   docstring, is the task. The line `raise NotImplementedError` is what you replace.
# - The cell after it checks your answer on real processes. Green means done. Red names what was
#   seen and what to try. Amber means that you have not started; the notebook still runs on.
# - `check.hint("6.3")` gives one hint at a time. After two tries `check.give("6.3")` shows the
#   course's answer, and the rest of the lesson runs with it. Once your own answer is green,
#   `check.compare("6.3")` shows it beside the course's.
# - Before an experiment you write down a number that you expect. Being wrong there is how you
#   learn most.
#
# | lesson | what you build |
# |---|---|
# | [00_first_job](00_first_job.ipynb) | who is who in a parallel program, a first job, and what it used of what it got |
# | [01_gradient_descent](01_gradient_descent.ipynb) | descent on a line with all samples and with some, and the noise of a batch |
# | [02_loss_surface](02_loss_surface.ipynb) | pictures of a network's loss, by several ranks at once; flat and sharp minima |
# | [03_batch_size](03_batch_size.ipynb) | throughput, steps to a target, and the batch size from which on more does not help |
# | [04_collectives](04_collectives.ipynb) | broadcast, reduce, gather and the ring all-reduce, from send and receive |
# | [05_data_parallel](05_data_parallel.ipynb) | data parallelism by hand: a parameter server, all-reduce, buckets, overlap |
# | [06_ddp](06_ddp.ipynb) | a program of one process converted to DDP: samplers, evaluation, saving, two nodes |
# | [07_large_batch](07_large_batch.ipynb) | what a batch far too large costs, and fourteen ways to train compared, with error bars |
# | [08_layerwise](08_layerwise.ipynb) | LARS, LARC, LAMB and NovoGrad from their papers, also over shards |
# | [09_memory](09_memory.ipynb) | where the memory goes, to the byte, and three ways to need less |
# | [10_fsdp](10_fsdp.ipynb) | sharded optimizer, gradients and weights by hand, and fully_shard message by message |
# | [11_checkpoint](11_checkpoint.ipynb) | what a run is made of, saved in shards and resumed exactly, on any number of ranks |
# | [12_pipeline](12_pipeline.ipynb) | stages, schedules as data, GPipe and 1F1B by hand, and the bubble predicted and measured |
# | [13_tensor](13_tensor.ipynb) | matrices, heads and vocabulary cut over ranks, with and without sequence parallelism |
# | [14_mesh](14_mesh.ipynb) | all of these on one mesh, one norm, one number for a machine, and a plan before a job runs |
#
# More lessons are on their way; the list of all stands in the README.
