# ---
# manyhands: {title: A first job, minutes: 60, goal: "Say why training is spread over many processors, tell rank, local rank and world size apart, and submit a job of your own, watch it, and read its report", job: {flags: "", loss: [0.022, 0.034]}}
# ---

# %% [markdown]
# # 00 A first job
#
# Why is training spread over many processors at all? When one program runs as many processes, how does each
# of them know who it is? And how does a program get to run on a machine that hundreds of people share?
#
# In this lesson you work out how long a large training run takes, run your first program on several
# processes, measure how the error falls with more data, submit a job, watch it, and read in its report how
# much of the machine it wasted.

# %%
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.checks import first_job as check, score
from manyhands.data import images
from manyhands.first_job.planning import SITE, Place
from manyhands.first_job.power_law import BATCH
from manyhands.instruments import figures
from manyhands.jobs import watch
from manyhands.ranks import lab
from manyhands.ranks.lab import run_ranks
from manyhands.training import storage

lab.warm_up()
num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
print(f"torch {torch.__version__}, {num_cores} cores; the ranks of this notebook use the CPU")

# %% [markdown]
# ## 1. Why one processor is not enough
#
# Training outgrows a single device in three ways: in **memory**, in **speed** and in **data**.
#
# **Memory.** A model's weights have to be stored somewhere while it is trained. The largest model of the
# Llama 3 family has 405 billion parameters. At 2 bytes per parameter, how many GPUs with 80 GB each does it
# take to hold the weights alone? (Training needs about eight times as much memory, as lesson 09 shows.)

# %% tags=["nbval-check-output"]
parameters = 405e9
print(f"{2 * parameters / 1e9:,.0f} GB of weights: {2 * parameters / 80e9:.1f} GPUs of 80 GB")

# %% [markdown]
# **Speed.** Training a Transformer takes about 6 floating-point operations (**FLOPs**) per parameter and
# per token of text: 2 in the forward pass and 4 in the backward pass. The same Llama model was trained on
# 15.6 trillion tokens.
#
# Their product is hard to read, so such work is often given in **PF/s-days**. One PF/s-day is what a
# machine that does $10^{15}$ FLOPs per second finishes in a day.

# %% tags=["nbval-check-output"]
tokens = 15.6e12
flops = 6 * parameters * tokens
petaflops_days = flops / (1e15 * 24 * 3600)
print(f"{flops:.1e} FLOPs = {petaflops_days:,.0f} PF/s-days")

# %% [markdown]
# How many days is that on a given machine? A data sheet states the **peak** speed of a device. Real
# training reaches only a fraction of the peak, called the **utilisation**, which is often between 0.3 and
# 0.5.

# %% exercise="days_on_devices" todo="0.1" minutes=5 difficulty=1 points=1
from manyhands.first_job.planning import days_on_devices

# %% check="0.1" tags=["nbval-check-output"]
check.days_on_devices(days_on_devices)

# %% [markdown]
# For 16-bit numbers the peak of NVIDIA's H100 is 989 TFLOP/s. (Its data sheet prints twice as much; the
# reason follows below.) The Llama 3 paper reports a utilisation of 0.43 on 8,192 of these GPUs, and of 0.41
# and 0.38 on 16,384. Before you run the next cell, which takes 0.40, predict: how many days does the
# largest model need on 16,384 GPUs, and how many **years** on one node with 8 of them?

# %%
days_on_16384, years_on_8 = None, None  # your numbers

# %% answer="true"
days_on_16384, years_on_8 = 70, 400

# %%
if check.ready("0.1"):
    all_days = days_on_devices(petaflops_days, 16_384, 989, 0.40)
    node_years = days_on_devices(petaflops_days, 8, 989, 0.40) / 365
    print(f"16,384 GPUs: you said {days_on_16384}, the formula says {all_days:.0f} days")
    print(f"8 GPUs:      you said {years_on_8}, the formula says {node_years:.0f} years")

# %% [markdown]
# The paper analyses a period of 54 days, which was only a part of that training run, so the formula gives
# the right order of magnitude.
#
# Training time matters even when nobody is in a hurry, because deep learning is an experimental science:
# you try, look, and try again. If an answer takes a day, you can ask five questions a week; if it takes ten
# minutes, you can ask thirty a day.
#
# ### Would that take 30 days, or 300?
#
# A slide that is often shown says that a training run of 1000 PF/s-days takes "about 30 days" on one DGX
# H100, a node with 8 GPUs, because such a node does 32 PF/s. It adds that the fastest computer of November
# 2009 did 2 PF/s. Is that how long your own training run would take?

# %% tags=["nbval-check-output"]
if check.ready("0.1"):
    slide = days_on_devices(1000, 8, 4000, 1.0)  # 8 x 4000 TFLOP/s = 32 PF/s
    yours = days_on_devices(1000, 8, 989, 0.40)
    print(f"32 PF/s, all of it:           {slide:.0f} days")
    print(f"16 bits, dense, 40% of peak: {yours:.0f} days")

# %% [markdown]
# The two answers differ by a factor of ten, because the 32 PF/s are a peak that holds only for 8-bit
# numbers and for weights of which half are zero in a prescribed pattern (the data sheet says "with
# sparsity"). With 16 bits and dense weights the peak is a quarter of that, and training reaches less than
# half of this quarter. The speed of 2009, by contrast, was measured, and with 64-bit numbers.
#
# So ask about every such figure: how many bits? Sparse or dense? Peak or measured?
#
# **Two ways out.** Either every device holds the whole model and works on its own part of the data. This is
# **data parallelism** (lessons 05 to 11), and it makes training faster. Or the model is split, and each
# device holds a part of it. This is **model parallelism** (lessons 12 to 14), and it makes larger models
# possible. At the end the two are combined.

# %% [markdown]
# ## 2. Who is who: rank, local rank, world size
#
# How do the copies of one program share the work? A parallel program is a single program that is started
# many times, and each copy is a **process**. All processes run the same lines, so each one first has to
# find out which of them it is. Four terms describe its place:
#
# - The **world size** is the number of processes in the job.
# - The **rank** is the number of a process within the job, from 0 to world size - 1.
# - A **node** is one computer of the cluster. It has a few GPUs, often 4 or 8.
# - The **local rank** is the number of a process on its own node, counted from 0. It determines which GPU
#   the process uses.
#
# ![Two nodes, node1 and node2, have two GPUs each with one process on every GPU, so the world size is 4; rank 3 is local rank 1 on node2, device cuda:1; thick fast links join the GPUs inside a node, a thin slow network joins the nodes](figures/first_job_map.svg)
#
# The launcher, `torchrun`, tells each process its place through environment variables: `RANK`,
# `LOCAL_RANK`, `WORLD_SIZE`, and `LOCAL_WORLD_SIZE`, which is the number of processes on this node.
#
# It matters which ranks share a node, because the GPUs inside a node are joined by much faster links. In a
# DGX H100, each GPU can send 450 GB/s to the other GPUs of its node (data sheets say 900, which counts both
# directions) but only 50 GB/s (400 Gbit/s) over the network to other nodes. So let the ranks draw a map of
# who runs where. Each rank knows only its own line: `Place(rank, host, local_rank, device)`, a named tuple.
#
# Messages travel within a **group** of ranks, so the functions of this course that communicate take the
# group as an argument and pass it on. For now it is always `group=None`, which means all ranks.

# %% exercise="device_map" todo="0.2" minutes=10 difficulty=2 points=2
from manyhands.first_job.planning import device_map

# %% check="0.2" tags=["nbval-check-output"]
check.device_map(device_map)


# %% [markdown]
# Now try your function on four real processes of this machine. `run_ranks(function, 4)` starts four
# processes, calls the function in each, and returns a list of the four results. The cell prints rank 0's
# map and checks that the other three are equal to it.


# %%
def who_is_there():
    return device_map(os.environ, torch.cuda.device_count(), "this machine")


if check.ready("0.2"):
    maps = run_ranks(who_is_there, 4)
    for place in maps[0]:
        print(f"rank {place.rank} of 4: {place.host}, local {place.local_rank}, {place.device}")
    assert all(other == maps[0] for other in maps)

# %% [markdown]
# All four ranks hold the same map, although each of them knew only its own line of it: they have
# communicated. Messages in which all ranks of a group take part are called **collectives**, and lesson 04
# builds them. On GPUs they are carried by a library called NCCL (NVIDIA Collective Communications Library),
# on CPUs by one called Gloo.

# %% [markdown]
# ## 3. A first parallel program: how does the error fall with more data?
#
# The third reason for many processors is **data**: a model that is trained on more data is usually better.
# How much better?
#
# Measure it on a small task: recognise the digit in a tiny picture. Networks are trained on 20 images, on
# 40, on 80 and so on, four networks for each size, and their mistakes are counted on 500 test images that
# none of them has seen.

# %% tags=["nbval-check-output"]
data = images.load("embedded")
sizes = [20 * 2**k for k in range(7)]
tasks = [(size, seed) for size in sizes for seed in range(4)]
print(data.note)
print(f"{len(tasks)} training runs: {sizes} images, 4 networks each")

# %% show="true"
from manyhands.first_job.power_law import error_rate, num_steps, train_on

# %% [markdown]
# None of these 28 training runs needs anything from another one. This is the easiest kind of parallel
# program: deal the tasks out, and no process has to wait for another. Each rank has to work out its own
# share without asking, so that every task is done and none is done twice.

# %% exercise="my_share" todo="0.3" minutes=5 difficulty=1 points=1
from manyhands.first_job.planning import my_share

# %% check="0.3" tags=["nbval-check-output"]
check.my_share(my_share)

# %% [markdown]
# The next cell does all the training runs first with one rank, then with two, which are processes that
# share no memory. How many times as fast will two ranks be?

# %%
speedup = None  # your number

# %% answer="true"
speedup = 1.9


# %%
def train_share():
    torch.set_num_threads(1)
    results, start = [], time.perf_counter()
    for size, seed in my_share(tasks, dist.get_rank(), dist.get_world_size()):
        torch.manual_seed(seed)
        chosen = torch.randperm(len(data.train_inputs))[:size]
        model = train_on(data.train_inputs[chosen], data.train_labels[chosen], data.num_classes)
        results.append((size, error_rate(model, data.test_inputs, data.test_labels)))
    return results, time.perf_counter() - start


if check.ready("0.3"):
    (one_result,) = run_ranks(train_share, 1, timeout_s=120)
    two_results = run_ranks(train_share, 2, timeout_s=120)
    one_s, two_s = one_result[1], max(seconds for _, seconds in two_results)
    score("speed-up of 2 ranks", speedup, 2, one_s / two_s, word="ideal")
    results = [result for share, _ in two_results for result in share]
    assert sorted(results) == sorted(one_result[0])

# %% [markdown]
# The results are the same up to their order, because each training run has its own seed and it does not
# matter which rank does it. If two cores are free for them, two ranks need about half the time. If other
# programs use the cores too, the speed-up is smaller.
#
# ### Does the error follow a law?
#
# When errors like these are plotted on two logarithmic axes, they often lie near a straight line. The error
# is then a **power law** of the number of images, $a \cdot \text{size}^{-b}$. Such lines have been found
# for translation, language models, images and speech (Hestness et al. 2017). Fit yours, and look in the
# plot for sizes at which the points leave the line.

# %% exercise="fit_power_law" todo="0.4" minutes=10 difficulty=2 points=2
from manyhands.first_job.power_law import fit_power_law

# %% check="0.4" tags=["nbval-check-output"]
check.fit_power_law(fit_power_law)

# %%
if check.ready("0.3", "0.4"):
    a, b = fit_power_law(*zip(*((size, error) for size, error in results if error), strict=True))
    print(f"error = {a:.2f} * size ** -{b:.2f}; twice the data: {1 - 2**-b:.0%} fewer mistakes")
    for size in sizes:
        errors = sorted(error for other, error in results if other == size)
        print(f"{size:5} images: error {errors[0]:.3f} to {errors[-1]:.3f}")

# %%
if check.ready("0.3", "0.4"):
    figure, ax = figures.new_figure()
    measured = {"error": tuple(zip(*results, strict=True))}
    fitted = {"error": (sizes, [a * size**-b for size in sizes])}
    names = ("images to train on", "error (share of images)")
    figures.measured_and_predicted(ax, measured, fitted, *names)
    ax.get_legend().set_title("points: measured; line: fitted to them", {"size": 9})
    figures.show(figure, f"Error against data size on logarithmic axes: a line of slope -{b:.2f}.")

# %% [markdown]
# The points of one size scatter around the line, because the four networks saw different images. At the
# largest size the points tend to lie on the line or above it, a hint that the line may not go on for ever.
#
# A straight line on these axes says two things. Progress can be **predicted**: small training runs tell you
# what a large one will reach before you pay for it. But progress is also **expensive**, as the next cell
# shows:

# %%
if check.ready("0.3", "0.4"):
    print(f"to halve the error takes {2 ** (1 / b):.1f} times the data")
    print(f"for an error of 1% the line says {(a / 0.01) ** (1 / b):,.0f} images")

# %% [markdown]
# Do not trust the second number far, because it is extrapolated beyond the measured sizes, and every such
# line flattens in the end, at mistakes that no amount of data can correct. (With `--data FOLDER` and the
# files of MNIST, a larger set of digits, the job below continues the line up to 40,960 images.)
#
# The best model size grows with the data as well, although more slowly (same paper). So the need for
# compute can be predicted, and it is large. More data, larger models and more experiments: that is why
# training is spread over many processors.

# %% [markdown]
# ## 4. Where a job runs
#
# How do you get at the GPUs of a large machine? It is shared, so you never start a program on its GPUs
# yourself. You write down what you need, hand this request in, and wait, while a program called **Slurm**
# decides who gets which nodes, and when.
#
# ![From your browser or terminal you reach the login node, where sbatch puts your job last of three in Slurm's queue, and from there jobs go to the compute nodes, which have GPUs but no internet; below, login node and compute nodes read and write one shared file system, into which prepare_data.py on the login node brings data from the internet](figures/first_job_cluster.svg)
#
# - The **login node** is where you arrive. It has internet access, and it is meant for editing and
#   submitting.
# - The **compute nodes** have the GPUs, but most of them have no internet access. So data has to be
#   downloaded beforehand, on the login node, with `python scripts/prepare_data.py`. A job of this course
#   that finds no data says so, and tells you which command to run where.
# - All nodes see the same **shared file system**. All ranks hold the same information, so only one of them,
#   rank 0, writes files such as the log. Some sites also give each node a disk of its own; there one
#   process per node, local rank 0, unpacks the data.
#
# So several nodes raise three new questions: who gets which resources, how fast the network is, and where
# the data is stored.
#
# A **job file** is a shell script whose first lines start with `#SBATCH`. Slurm reads these lines as a form
# that you fill in; the rest of the script is what runs. This is the job file of this lesson:

# %% tags=["nbval-check-output"]
print(Path("../sbatch/first_job.sbatch").read_text())

# %% [markdown]
# Time is written as hours:minutes:seconds. In the name of the output file, `%x` stands for the job's name
# and `%j` for its number. Three lines let a job survive its time limit: `--signal=B:USR1@120` makes Slurm
# warn the job 120 seconds before the end so that it can save its state, `--requeue` allows the job to go
# back into the queue, and `--open-mode=append` makes the restarted job continue the same output file
# (lesson 11). The lines below the `#SBATCH` lines find `launch.sh`, which starts the processes.
#
# `sbatch sbatch/first_job.sbatch` submits the job file, `squeue --me` shows your jobs in the queue, and
# `scancel NUMBER` cancels one of them. Inside a job, `srun COMMAND` runs a command on all its nodes.
#
# The line `--ntasks-per-node=1` surprises many people, because a node has several GPUs. Slurm could start
# one task per GPU itself, but with torchrun it must not: Slurm starts one torchrun on each node, and
# torchrun then starts one process per GPU. (One task per node is also Slurm's default.)
#
# On several nodes the torchrun processes have to find each other, so `launch.sh` gives them the name of the
# first node, a port, and the number of the job. In lesson 06 you will write that part yourself. Now write a
# job file.

# %% exercise="job_file" todo="0.5" minutes=10 difficulty=2 points=2
from manyhands.first_job.planning import job_file

# %% check="0.5" tags=["nbval-check-output"]
check.job_file(job_file)

# %%
if check.ready("0.5"):
    print(job_file("test", 2, 4, 90, "srun torchrun train.py"))

# %% [markdown]
# ### What only your site knows
#
# Which account pays for the time? What is the queue with the GPUs called? (Slurm's word for a queue is
# *partition*.) The answers differ from one computing centre to the next, so they are kept in one file,
# `sbatch/site.env`, and in none of the job files. Here are the answers of an imaginary site, which look
# like those of many real ones:

# %% tags=["nbval-check-output"]
print(SITE)

# %% [markdown]
# - `sbatch` reads environment variables whose names begin with `SBATCH_`. They take precedence over the
#   `#SBATCH` lines of a job file.
# - The nodes of a job find each other by the name of the first node. Some sites append a suffix to a node's
#   name for the fast network (g14 becomes g14-ib); put that suffix in `HEAD_SUFFIX`.
# - The `*` marks the partition that you get if you name none. It is not part of the name.
# - **GRES** (generic resources) are the special devices of a node: here the kind of GPU, and how many of
#   them.
# - A shell assignment has no spaces around `=`, and `export` makes the variable visible to `sbatch`.

# %% exercise="site_file" todo="0.6" minutes=10 difficulty=2 points=1
from manyhands.first_job.planning import site_file

# %% check="0.6" tags=["nbval-check-output"]
check.site_file(site_file)

# %% [markdown]
# For your own site, copy `sbatch/site.env.example` to `sbatch/site.env`, fill it in, and have it checked.
# The check submits nothing:
#
# ```sh
# bash sbatch/check_site.sh
# source sbatch/site.env
# sbatch sbatch/first_job.sbatch
# ```

# %% [markdown]
# ## 5. Submit, watch, read the report
#
# How much of the hardware that a job was given does it use? The next cell writes your functions that passed
# their checks to `mine/first_job.py`, and submits this lesson's job, which uses them: the training runs of
# section 3, as a program of their own. Where there is Slurm, the job goes into the queue; otherwise it
# simply starts. `ranks=1` asks for a single process, **whatever the job was granted**.
#
# While the job runs you see its state, what the rank prints, and how many networks have been trained. The
# curve shows the error of each network, and it falls because later networks get more images. The stop
# button ends the job after the current training run, and all finished results are kept.

# %%
if check.ready("0.3", "0.4"):
    check.keep()
    folder_of_one = watch.run("../sbatch/first_job.sbatch", "--impl", "mine", ranks=1)

# %% [markdown]
# The last figure above is the report. The same folder holds a longer version, `report.html`, and the fitted
# line, `power_law.png`. The head of the report says which of the granted devices had no rank; in the figure
# they are hatched.
#
# Slurm charges for what was **granted**, whether or not it was used. Asking for four GPUs does not use four
# GPUs: that takes four processes. This is the most common waste on shared machines, and no error message
# tells you about it.
#
# So how much was used? Twice a second the job recorded how busy each rank's device was. Your function turns
# these samples into the hours charged and used.

# %% exercise="device_hours" todo="0.7" minutes=10 difficulty=2 points=1
from manyhands.first_job.planning import device_hours

# %% check="0.7" tags=["nbval-check-output"]
check.device_hours(device_hours)

# %% [markdown]
# The next cell runs the same job with one rank per core (at least two ranks, at most four), and the one
# after it compares the two jobs. Predict: what share of the granted core-hours will each of the two jobs
# have used?

# %%
used_by_one, used_by_all = None, None  # shares, from 0 to 1

# %% answer="true"
used_by_one, used_by_all = 1 / num_cores, 0.9

# %%
many = max(2, min(4, num_cores))
if check.ready("0.3", "0.4", "0.7"):
    folder_of_many = watch.run("../sbatch/first_job.sbatch", "--impl", "mine", ranks=many)


# %%
def busy_ranks(folder):
    """The samples of each rank of a run: [[(time, busy cores), ...], ...]."""
    files = sorted((folder / "ranks").glob("rank-*.jsonl"))
    return [[(line["time_s"], line["cpu"]) for line in storage.read_lines(file)] for file in files]


if check.ready("0.3", "0.4", "0.7"):
    granted = max(many, num_cores)
    jobs = {"1 rank": busy_ranks(folder_of_one), f"{many} ranks": busy_ranks(folder_of_many)}
    for (name, ranks), said in zip(jobs.items(), (used_by_one, used_by_all), strict=True):
        seconds = max(rank[-1][0] for rank in ranks) - min(rank[0][0] for rank in ranks)
        busy = [[min(1.0, cores) for _, cores in rank] for rank in ranks]
        charged, used = device_hours(busy, granted, seconds)
        score(
            f"{name}: share of {granted} granted cores",
            said,
            len(ranks) / granted,
            used / charged,
            word="at most",
        )

# %%
if check.ready("0.3", "0.4", "0.7"):
    figure, axes = figures.new_figure(width=8, height=3, cols=2)
    last_s = max(rank[-1][0] - rank[0][0] for ranks in jobs.values() for rank in ranks)
    for ax, (name, ranks) in zip(axes, jobs.items(), strict=True):
        start = min(rank[0][0] for rank in ranks)
        series = {
            f"rank {number}": ([time_s - start for time_s, _ in rank], [cores for _, cores in rank])
            for number, rank in enumerate(ranks)
        }
        figures.lines(ax, series, "time (s)", "busy cores")
        ax.set(xlim=(0, last_s), ylim=(0, 1.2))
        ax.set_title(f"{name}, {granted} cores granted")
    figures.show(figure, "Busy cores of each rank over time, for a job with 1 rank and with more.")

# %% [markdown]
# The formula's value assumes that every rank keeps one core busy from beginning to end, so it is an upper
# bound. The measured shares come near it on a quiet machine and stay well below it if other programs use
# the same cores, so compare the two jobs with each other. With one rank the other cores have no work from
# the first second to the last, while more ranks use more of the granted cores and finish the training
# sooner. (The whole job need not be much shorter here, because much of its time passes while the processes
# start.)
#
# On a node with four GPUs the picture is the same: a job that asks for all four and starts one rank uses at
# most a quarter of what it is charged for.

# %%
check.summary()

# %% [markdown]
# ## Recap
#
# You can now
#
# - estimate how long a training run takes on a machine, and say which figures of a data sheet to distrust,
# - tell rank, local rank and world size apart, and find out which rank runs where,
# - deal out independent tasks to ranks,
# - measure how the error falls with more data, and fit a power law to it,
# - write a job file and a site file, submit a job, watch it, and say how much of what it was granted it
#   used.
#
# **Questions**
#
# <details><summary>Eight processes run on two nodes with four GPUs each. Which device does rank 6 use?</summary>
#
# Rank 6 is local rank 2 of the second node, so it uses `cuda:2` there. `cuda:6` does not exist, because a
# node counts only its own GPUs.
# </details>
#
# <details><summary>A job asks for two nodes with four GPUs each for an hour, and its only process runs for half an hour. What is charged?</summary>
#
# Slurm charges for the time until the job ends: 8 GPUs for half an hour are 4 GPU-hours. Only one GPU was
# used, for 0.5 GPU-hours.
# </details>
#
# <details><summary>Your job stops at once with "there is no data". The files are on the internet. What do you do?</summary>
#
# You download them on the login node into the shared file system with `scripts/prepare_data.py`, and then
# submit the job again. The job cannot download them itself.
# </details>
#
# **Sources**: Llama Team 2024, "The Llama 3 Herd of Models", https://arxiv.org/abs/2407.21783; Hestness et
# al. 2017, "Deep Learning Scaling is Predictable, Empirically", https://arxiv.org/abs/1712.00409; Kaplan et
# al. 2020, https://arxiv.org/abs/2001.08361 (6 FLOPs per parameter and token); NVIDIA, data sheets of H100
# and DGX H100; TOP500, https://top500.org/lists/top500/2009/11/; Slurm's documentation of sbatch,
# https://slurm.schedmd.com/sbatch.html.
