# ---
# manyhands: {title: A first job, minutes: 60, goal: "Say why training is spread out, tell rank, local rank and world size apart, and submit, watch and read a job of your own", job: {flags: "", loss: [0.022, 0.034]}}
# ---

# %% [markdown]
# # 00 A first job
#
# Why is training spread over many processors at all? Who is who, when one program runs as many
# processes? And how does a program get to run on a machine that it shares with hundreds of people?
#
# In an hour you will have worked out how long a large training takes, run your first program on
# several processes, measured how the error falls with more data, and submitted a job, watched it,
# and read in its report what it wasted.

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
# Three things outgrow a single device: **memory**, **speed** and **data**.
#
# **Memory.** A model's weights have to lie somewhere while it is trained. The largest model of the
# Llama 3 family has 405 billion parameters. With 2 bytes for each of them, how many GPUs of 80 GB
# does it take to hold the weights alone? (Training needs about eight times as much; lesson 09 counts
# it.)

# %% tags=["nbval-check-output"]
parameters = 405e9
print(f"{2 * parameters / 1e9:,.0f} GB of weights: {2 * parameters / 80e9:.1f} GPUs of 80 GB")

# %% [markdown]
# **Speed.** Training a Transformer takes about 6 floating-point operations (**FLOPs**) for each
# parameter and each token of text: 2 in forward, 4 in backward. The same model read 15.6 trillion
# tokens.
#
# Such numbers are long, so people count in **PF/s-days**. One is the work of a machine that does
# $10^{15}$ FLOPs in each second, for a day.

# %% tags=["nbval-check-output"]
tokens = 15.6e12
flops = 6 * parameters * tokens
petaflops_days = flops / (1e15 * 24 * 3600)
print(f"{flops:.1e} FLOPs = {petaflops_days:,.0f} PF/s-days")

# %% [markdown]
# How many days is that on a given machine? A data sheet says what a device reaches at its **peak**.
# A training reaches a part of it, the **utilisation**, often 0.3 to 0.5.

# %% exercise="days_on_devices" todo="0.1" minutes=5 difficulty=1 points=1
from manyhands.first_job.planning import days_on_devices

# %% check="0.1" tags=["nbval-check-output"]
check.days_on_devices(days_on_devices)

# %% [markdown]
# The data sheet of NVIDIA's H100 says 989 TFLOP/s for numbers of 16 bits. The Llama 3 paper reports
# a utilisation of 0.38 to 0.43 on 16,384 of them. Before you run the next cell: how many days does
# the largest model need on these, and how many **years** on one node with 8?

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
# The paper looks closely at 54 days of that training, which were not all of it. So the formula has
# the right size.
#
# Time to train matters even where nobody is in a hurry, because deep learning is an experimental
# science: you try, look, and try again. Whoever waits a day for an answer asks five questions a
# week; whoever waits ten minutes asks thirty a day.
#
# ### The slides disagree: 30 days, or 300?
#
# Another course's slides say that 1000 PF/s-days are "about 30 days" on one DGX H100, a node with 8
# GPUs, since it does 32 PF/s; and that the fastest computer of November 2009 did 2 PF/s. Is
# that how long your training would take?

# %% tags=["nbval-check-output"]
if check.ready("0.1"):
    slide = days_on_devices(1000, 8, 4000, 1.0)  # 8 x 4000 TFLOP/s = 32 PF/s
    yours = days_on_devices(1000, 8, 989, 0.40)
    print(f"32 PF/s, all of it:           {slide:.0f} days")
    print(f"16 bits, dense, 40% of peak: {yours:.0f} days")

# %% [markdown]
# The 32 PF/s are a peak, for numbers of 8 bits, when half of all weights are zero in a given pattern
# ("with sparsity", says the data sheet). With 16 bits and without such zeros the peak is a quarter of
# that, and a training reaches less than half of it. The computer of 2009 was measured, with 64 bits.
#
# Ask of every such figure: how many bits? With zeros, or dense? Peak, or measured?
#
# **Two ways out.** Either every device holds the whole model and works on its own part of the data:
# **data parallelism**, lessons 05 to 11, which is faster. Or the model is cut and each device holds
# a part of it: **model parallelism**, lessons 12 to 14, which is larger. At the end they are
# combined.

# %% [markdown]
# ## 2. Who is who: rank, local rank, world size
#
# A parallel program is one program that is started many times. Each copy is a **process**. All run
# the same lines, so each has to ask: who am I?
#
# - The **world size** is the number of processes in the job.
# - The **rank** is the number of a process in the job, from 0 to world size - 1.
# - A **node** is one computer of the cluster. It has a few GPUs, often 4 or 8.
# - The **local rank** is the number of a process on its node, from 0. It chooses the GPU.
#
# ![Two nodes, node1 and node2, have two GPUs each with one process on every GPU, so the world size is 4; rank 3 is local rank 1 on node2, device cuda:1; thick fast links join the GPUs inside a node, a thin slow network joins the nodes](figures/first_job_map.svg)
#
# The launcher, `torchrun`, tells each process who it is, in variables of its environment: `RANK`,
# `LOCAL_RANK`, `WORLD_SIZE`, and `LOCAL_WORLD_SIZE`, the number of processes on this node.
#
# Inside a node GPUs are joined by fast links: in a DGX H100, 900 GB/s for each GPU. Between nodes
# there is a network: 50 GB/s for each GPU there (400 Gbit/s). So it matters which ranks share a
# node. Let the ranks draw the map themselves. Each knows its own line of it:
# `Place(rank, host, local_rank, device)`, a named tuple.
#
# Messages travel in a **group**: some of the ranks, or all of them, which is what `group=None` means.
# A function of this course takes the group as an argument and hands it on.

# %% exercise="device_map" todo="0.2" minutes=10 difficulty=2 points=2
from manyhands.first_job.planning import device_map

# %% check="0.2" tags=["nbval-check-output"]
check.device_map(device_map)


# %% [markdown]
# Now on four real processes of this machine. `run_ranks(function, 4)` starts four processes, calls
# the function in each, and returns a list with what each of them returned.


# %%
def who_is_there():
    return device_map(os.environ, torch.cuda.device_count(), "this machine")


if check.ready("0.2"):
    maps = run_ranks(who_is_there, 4)
    for place in maps[0]:
        print(f"rank {place.rank} of 4: {place.host}, local {place.local_rank}, {place.device}")
    assert all(other == maps[0] for other in maps)

# %% [markdown]
# All four hold the same map, though each knew only its own line: that is what communication is for.
# Messages that all ranks take part in are called **collectives**; lesson 04 builds them. On GPUs
# a library called NCCL carries them, on CPUs one called gloo. (NCCL is sometimes expanded to "NVIDIA
# Common Communications Library", also on slides. The word is *Collective*.)

# %% [markdown]
# ## 3. A first parallel program: how does the error fall with more data?
#
# The third reason is **data**. A larger set gives a better model. How much better?
#
# Measure it. The task: tell which digit a small picture shows. Train networks on 20 images, 40, 80
# and so on, four networks of each size, and count the mistakes on 500 images that no network has
# seen.

# %% tags=["nbval-check-output"]
data = images.load("embedded")
sizes = [20 * 2**k for k in range(7)]
tasks = [(size, seed) for size in sizes for seed in range(4)]
print(data.note)
print(f"{len(tasks)} trainings: {sizes} images, 4 networks each")

# %% show="true"
from manyhands.first_job.power_law import error_rate, num_steps, train_on

# %% [markdown]
# These 28 trainings have nothing to do with each other. That is the easiest kind of parallel
# program: deal the tasks out, and nobody has to wait for anybody. Each rank has to find its own
# share without asking, so that every task is done, and none is done twice.

# %% exercise="my_share" todo="0.3" minutes=5 difficulty=1 points=1
from manyhands.first_job.planning import my_share

# %% check="0.3" tags=["nbval-check-output"]
check.my_share(my_share)

# %% [markdown]
# The next cell does all trainings with one rank, and then with two, on two processes that share no
# memory. How many times faster will two be?

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
    score("speed-up of 2 ranks", speedup, 2, one_s / two_s)
    results = [result for share, _ in two_results for result in share]
    assert sorted(results) == sorted(one_result[0])

# %% [markdown]
# The results are the same, in another order: each training has its own seed, so it does not matter
# which rank does it. Two ranks need about half the time, where two cores are free for them.
#
# ### A power law
#
# When such errors are drawn on two logarithmic axes they often lie near a straight line. The error is
# then a **power law** of the number of images, $a \cdot \text{size}^{-b}$. People have found such
# lines for translation, language models, images and speech (Hestness et al. 2017). Fit yours.

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
# Read it: the points of one size spread, because the networks saw different images, and they lie
# around the line. A line on these axes says two things. Progress can be **predicted**: from small
# trainings you can tell what a large one will reach, before you pay for it. And it is **dear**:

# %%
if check.ready("0.3", "0.4"):
    print(f"to halve the error takes {2 ** (1 / b):.1f} times the data")
    print(f"for an error of 1% the line says {(a / 0.01) ** (1 / b):,.0f} images")

# %% [markdown]
# Do not trust the last number far: it lies outside what was measured, and every line ends somewhere,
# at mistakes that no data can mend. (With `--data FOLDER` and MNIST's files the job below
# draws the line up to 40,960 images.)
#
# The best size of a model grows as well, but more slowly than the data (same paper). So the need for
# compute can be foretold, and it is large. More data, larger models and more experiments: that is
# why training is spread out.

# %% [markdown]
# ## 4. Where a job runs
#
# Large machines are shared. You never start a program on their GPUs yourself. You write down what
# you need, hand it in, and wait. A program called **Slurm** decides who gets which nodes, and when.
#
# ![From your browser or terminal you reach the login node, where sbatch puts your job last of three in Slurm's queue, and from there jobs go to the compute nodes, which have GPUs but no internet; below, login node and compute nodes read and write one shared file system, into which prepare_data.py on the login node brings data from the internet](figures/first_job_cluster.svg)
#
# - The **login node** is where you arrive. It has internet, and it is for editing and submitting.
# - The **compute nodes** have the GPUs. Most of them have no internet. So data has to be fetched
#   before, on the login node: `python scripts/prepare_data.py`. A job of this course that finds no
#   data says so, and says what to run where. (One course has you put 75 lines into comments, run the
#   rest on the login node, and take the comments out again.)
# - All nodes read the same files. So one process writes what all know, such as a log: rank 0. Where
#   each node has a disk of its own, one process of each node unpacks the data there: local rank 0.
#
# Whoever goes from one node to several takes on three concerns: who gets which resources, the
# network between the nodes, and where the data lies.
#
# A **job file** is a shell script. Lines at its beginning that start with `#SBATCH` are read by
# Slurm. They are the form that you fill in. The rest is what runs. This is the job file of this
# lesson:

# %% tags=["nbval-check-output"]
print(Path("../sbatch/first_job.sbatch").read_text())

# %% [markdown]
# Time is written as hours:minutes:seconds. `%x` stands for the job's name, `%j` for its number. With
# `--signal` and `--requeue` a job saves before its time is over and queues again (lesson 11). The
# lines below the `#SBATCH` lines find `launch.sh`, which starts the processes.
#
# You hand the file in with `sbatch sbatch/first_job.sbatch`, see the queue with `squeue --me`, and
# take a job back with `scancel NUMBER`. Inside a job, `srun COMMAND` runs a command on all its nodes.
#
# `--ntasks-per-node=1` surprises many. Slurm can start one task for each GPU itself. With torchrun it
# must not: Slurm starts one torchrun on each node, and torchrun starts a process for each GPU. (One
# task a node is also what you get where a file does not say.)
#
# On several nodes the torchruns have to find each other. `launch.sh` hands them the name of the first
# node, a port, and the number of the job; in lesson 06 you write that yourself. Now write a job file.

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
# Whom is the time charged to? What is the queue with the GPUs called? That differs from centre to
# centre, so it stands in one file, `sbatch/site.env`, and in no job file. Here is a site that
# does not exist. Its answers look like those of many that do:

# %% tags=["nbval-check-output"]
print(SITE)

# %% [markdown]
# - `sbatch` reads variables whose names begin with `SBATCH_`. They win over the lines of a job file.
# - The nodes of a job meet under the name that the first node has in the fast network. If it differs
#   from its own name, the difference is the `HEAD_SUFFIX`.
# - The `*` marks the queue that you get when you name none. It is not part of the name.
# - **GRES** are a node's special devices: here the kind of GPU, and how many.
# - `=` in a shell file has no space around it, and `export` hands a variable on to `sbatch`.

# %% exercise="site_file" todo="0.6" minutes=10 difficulty=2 points=1
from manyhands.first_job.planning import site_file

# %% check="0.6" tags=["nbval-check-output"]
check.site_file(site_file)

# %% [markdown]
# For your own site, copy `sbatch/site.env.example` to `sbatch/site.env`, fill it in, and let it be
# checked. Nothing is submitted:
#
# ```sh
# bash sbatch/check_site.sh
# source sbatch/site.env
# sbatch sbatch/first_job.sbatch
# ```

# %% [markdown]
# ## 5. Submit, watch, read the report
#
# The next cell writes your functions that passed to `mine/first_job.py` and submits this lesson's job
# with them in it: the trainings of section 3, as a program of their own. Where there is Slurm it
# goes into the queue; here it may just start. `ranks=1` asks for a single process, **whatever the
# job was granted**.
#
# You will see the state of the job, what the rank prints, and how many networks are trained. The curve
# shows the error of each network. It falls because later networks get more images. The stop button ends
# the job after the training that goes on; what is done is kept.

# %%
if check.ready("0.3", "0.4"):
    check.keep()
    folder_of_one = watch.run("../sbatch/first_job.sbatch", "--impl", "mine", ranks=1)

# %% [markdown]
# The last figure is the report; `report.html` in the same folder is longer, and `power_law.png` there
# is the fitted line. At the head of the report, and at the beginning of the job's log, stands which of
# the granted devices had no rank. In the figure they are hatched.
#
# Slurm charges for what was **granted**, used or not. Asking for four GPUs does not use four: that
# takes four processes. This is the most common waste on shared machines, and no error tells you.
#
# How much was used? The job wrote down twice a second how busy each rank's device was.

# %% exercise="device_hours" todo="0.7" minutes=10 difficulty=2 points=1
from manyhands.first_job.planning import device_hours

# %% check="0.7" tags=["nbval-check-output"]
check.device_hours(device_hours)

# %% [markdown]
# Now with a rank for each core, and beside the first. Predict: which share of the granted core-hours
# will each of the two jobs have used?

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
            f"{name}: share of {granted} granted cores", said, len(ranks) / granted, used / charged
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
# Each rank keeps about one core busy while it trains. One rank leaves the others idle from the first
# second to the last. More ranks use them, and the training is over sooner. (The whole job is not much
# shorter here: most of its seconds pass while the processes start.) On a node with four GPUs the
# picture is the same, with GPUs for cores. It is also why the first job of another course (JSC,
# "Parallelize Training") takes 1 h 32 min on one of the four GPUs that it asked for, and 25 min when
# all four have a rank.

# %%
check.summary()

# %% [markdown]
# ## Recap
#
# You can now
#
# - say how long a training takes on a machine, and which figures of a data sheet to distrust,
# - tell rank, local rank and world size apart, and find out which rank runs where,
# - deal out independent tasks to ranks,
# - measure and fit how the error falls with more data,
# - write a job file and a site file, submit a job, watch it, and say what it used of what it got.
#
# **Questions**
#
# <details><summary>Eight processes run on two nodes with four GPUs each. Which device does rank 6 use?</summary>
#
# It is local rank 2 of the second node: `cuda:2` there. `cuda:6` does not exist, because a node counts its
# own GPUs only.
# </details>
#
# <details><summary>A job asks for two nodes with four GPUs each for an hour, and one process runs for half an hour. What is charged?</summary>
#
# Slurm charges for the time until the job ends: 8 GPUs for half an hour are 4 GPU-hours. One GPU was used: 0.5
# GPU-hours.
# </details>
#
# <details><summary>Your job stops at once with "there is no data". The files are on the internet. What do you do?</summary>
#
# Fetch them on the login node, which has internet, into the shared file system, with
# `scripts/prepare_data.py`; then submit again. The job cannot do it.
# </details>
#
# **Sources**: Llama Team 2024, "The Llama 3 Herd of Models", https://arxiv.org/abs/2407.21783; Hestness
# et al. 2017, "Deep Learning Scaling is Predictable, Empirically", https://arxiv.org/abs/1712.00409;
# Kaplan et al. 2020, https://arxiv.org/abs/2001.08361 (6 FLOPs for each parameter and token); NVIDIA,
# data sheets of H100 and DGX H100; TOP500, https://top500.org/lists/top500/2009/11/; Slurm's
# documentation of sbatch, https://slurm.schedmd.com/sbatch.html.
