# ---
# manyhands: {title: A first job, goal: "Say why training is spread over many processors, tell rank, local rank and world size apart, and submit a job of your own, watch it, and read its report", job: {flags: "", loss: [0.022, 0.034]}}
# ---

# %% [markdown]
# # 00 A first job
#
# Why is training spread over many processors at all? When one program runs as many processes, how does each
# of them know who it is? And how does a program get to run on a machine that hundreds of people share?
#
# In this lesson you run a program on several processes, find out why nobody trains a large model on one
# device, let one process prepare data for all the others, measure how the error falls with more data, mend a
# job file, submit a job, watch it, and read in its report how much of the machine it wasted.

# %%
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.checks import first_job as check, score
from manyhands.data import images
from manyhands.first_job.history import TRAININGS, doubling_months
from manyhands.first_job.job_text import BROKEN
from manyhands.first_job.places import Place
from manyhands.first_job.power_law import BATCH
from manyhands.first_job.rehearsal import rehearse, run_here
from manyhands.first_job.site import SITE
from manyhands.instruments import figures
from manyhands.jobs import watch
from manyhands.jobs.submit import course_file
from manyhands.ranks import lab
from manyhands.ranks.failures import RankFailed
from manyhands.ranks.lab import run_ranks
from manyhands.ranks.failures import BadInput
from manyhands.training import storage

lab.warm_up()
num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
print(f"torch {torch.__version__}, {num_cores} cores; the ranks of this notebook use the CPU")

# %% [markdown]
# ## 1. Start four processes
#
# What happens when one program runs four times at once? Try it before any theory: `run_ranks(function, 4)`
# starts four processes, calls the function in each, and returns the list of the four results. In which order
# will the four lines appear, and will a second run of the cell print them in the same order?


# %%
def hello():
    print(f"hello from process {os.getpid()}")
    return os.getpid()


process_ids = run_ranks(hello, 4)
assert len(set(process_ids)) == 4 and os.getpid() not in process_ids

# %% [markdown]
# Each line begins with the number of the process that printed it, its **rank**, which `run_ranks` puts in
# front. All four ran the same code, and yet they are four separate processes: each has memory of its own, and
# a process number that the operating system gave it. Nothing makes one of them wait for another, so the order
# of the lines is up to the machine and may change with every run.
#
# Now give the processes work. Small networks learn to recognise the digit in a tiny picture, from 20 images,
# from 40, from 80 and so on, with four networks for each size. Their mistakes are counted on 500 test images
# that none of them has seen.

# %% tags=["nbval-check-output"]
data = images.load("embedded")
sizes = [20 * 2**k for k in range(7)]
tasks = [(size, seed) for size in sizes for seed in range(4)]
print(data.note)
print(f"{len(tasks)} training runs: {sizes} images, 4 networks each")

# %% show="true"
from manyhands.first_job.power_law import error_rate, num_steps, train_on

# %% [markdown]
# No training run needs anything from another one, which makes this the easiest kind of parallel program: the
# tasks are dealt out like cards, and each rank works out its own share without asking the others. In the
# function below, `world_size` is the number of processes.

# %% show="true"
from manyhands.first_job.planning import my_share

# %% [markdown]
# The next cell does all 28 training runs first with one process, then with two. How many times as fast will
# two processes be?

# %%
speedup = None  # your number

# %% answer="true"
speedup = 1.9


# %%
def train_share():
    torch.set_num_threads(1)
    results = []
    start = time.perf_counter()
    for size, seed in my_share(tasks, dist.get_rank(), dist.get_world_size()):
        torch.manual_seed(seed)
        chosen = torch.randperm(len(data.train_inputs))[:size]
        model = train_on(data.train_inputs[chosen], data.train_labels[chosen], data.num_classes)
        results.append((size, error_rate(model, data.test_inputs, data.test_labels)))
    return results, time.perf_counter() - start


(one_result,) = run_ranks(train_share, 1, timeout_s=120)
two_results = run_ranks(train_share, 2, timeout_s=120)
one_s, two_s = one_result[1], max(seconds for _, seconds in two_results)
score("speed-up of 2 processes", speedup, 2, one_s / two_s, word="ideal")
results = [result for share, _ in two_results for result in share]
assert sorted(results) == sorted(one_result[0])

# %% [markdown]
# The results are the same up to their order, because each training run has its own seed and it does not
# matter which process does it. If two cores are free, two processes need about half the time. If other
# programs use the cores too, the measured number may lie well below 2, or above 2 where they slowed down the
# first measurement more than the second.
#
# You have run a parallel program. The rest of this lesson asks why one would go to that trouble, how
# processes that do need each other are told apart, and how the same program runs on a large machine.

# %% [markdown]
# ## 2. Why one processor is not enough
#
# Training outgrows a single device in three ways: in **memory**, in **speed** and in **data**. Section 5 is
# about the third.
#
# **Memory.** A model's weights have to be stored somewhere while it is trained. The largest model of the
# Llama 3 family has 405 billion parameters. At 2 bytes per parameter, how many GPUs with 80 GB each does it
# take to hold the weights alone? (Training needs about eight times as much memory, as lesson 09 shows.)
#
# **Speed.** Training a Transformer takes about 6 floating-point operations (**FLOPs**) per parameter and
# per token of text: 2 in the forward pass and 4 in the backward pass. The same Llama model was trained on
# 15.6 trillion tokens.
#
# The product of 6, the parameters and the tokens is hard to read, so such work is often given in
# **PF/s-days**, where PF stands for petaFLOPs, $10^{15}$ FLOPs. One PF/s-day is the work that a machine with
# a speed of 1 PF/s does in a day.

# %% tags=["nbval-check-output"]
parameters = 405e9
print(f"{2 * parameters / 1e9:,.0f} GB of weights: {2 * parameters / 80e9:.1f} GPUs of 80 GB")
tokens = 15.6e12
flops = 6 * parameters * tokens
petaflops_days = flops / (1e15 * 24 * 3600)
print(f"{flops:.1e} FLOPs = {petaflops_days:,.0f} PF/s-days")

# %% [markdown]
# How many days does this work take on a given machine? A data sheet states the **peak** speed of a device.
# Real training reaches only a fraction of the peak, called the **utilisation**, which is often between 0.3
# and 0.5.

# %% show="true"
from manyhands.first_job.planning import days_on_devices

# %% [markdown]
# For 16-bit numbers the peak of NVIDIA's H100 SXM GPU is 989 TFLOP/s, or $989 \cdot 10^{12}$ FLOPs per
# second. (Its data sheet prints twice as much; section 3 says why.) The Llama 3 paper reports a utilisation
# of 0.43 on 8,192 of these GPUs, and of 0.41 and 0.38 on 16,384. Before you run the next cell, which assumes
# 0.40, predict: how many days does the largest model need on 16,384 GPUs, and how many **years** on one node
# with 8 of them?

# %%
days_on_16384, years_on_8 = None, None  # your numbers

# %% answer="true"
days_on_16384, years_on_8 = 70, 400

# %%
all_days = days_on_devices(petaflops_days, 16_384, 989, 0.40)
node_years = days_on_devices(petaflops_days, 8, 989, 0.40) / 365
print(f"16,384 GPUs: you said {days_on_16384}, the formula says {all_days:.0f} days")
print(f"8 GPUs:      you said {years_on_8}, the formula says {node_years:.0f} years")
assert 54 < all_days < 2 * 54

# %% [markdown]
# The paper describes a period of 54 days, which was only a part of that training run, so the formula gives
# the right order of magnitude.
#
# Training time matters even when nobody is in a hurry, because deep learning is an experimental science:
# you try, look, and try again. If an answer takes a day, you can ask five questions a week; if it takes ten
# minutes, you can ask thirty a day.
#
# **There are two ways to use many devices.** Either every device holds the whole model and works on its own
# part of the data. This is **data parallelism** (lessons 05 to 11), and it makes training faster. (In lesson 10
# a device holds the whole of each layer only while the layer computes.) Or the model is split, and each device
# computes a part of it. This is **model parallelism** (lessons 12 to 14), and it makes larger models possible.
# At the end of the course the two are combined.

# %% [markdown]
# ## 3. What data sheets promise (optional)
#
# ### Would a faster processor have been enough?
#
# The next figure shows how much compute well-known training runs took, from AlexNet, which won an image
# contest in 2012, to Llama 3. The numbers up to 2017 are estimates, which their authors hope are right within
# a factor of 2 or 3; the last three come from the papers on the models. The dashed line doubles every two
# years, as the number of transistors on a chip has long done (Moore's law).

# %%
figure, ax = figures.new_figure(width=8, height=3.8)
for one in TRAININGS:
    ax.plot(one.time, one.petaflops_days, "o", color=figures.BLUE)
    is_left = one.name in ("AlexNet", "VGG", "Neural Machine Translation", "PaLM", "Llama 3 405B")
    ax.annotate(
        one.name,
        (one.time, one.petaflops_days),
        (-7 if is_left else 7, -3),
        textcoords="offset points",
        ha="right" if is_left else "left",
        fontsize=8,
    )
first, last = TRAININGS[0], TRAININGS[-1]
years = last.time - first.time
by_moore = [first.petaflops_days, first.petaflops_days * 2 ** (years / 2)]
ax.plot([first.time, last.time], by_moore, "--", color=figures.BLACK, label="twice every 2 years")
ax.set(yscale="log", xlim=(2011.5, 2025.5))
figures.label(ax, "year", "training compute (PF/s-days)", legend=True)
figures.show(figure, "Training compute from 2012 to 2024 grew far faster than Moore's law.")

# %% tags=["nbval-check-output"]
alphago = next(one for one in TRAININGS if one.name == "AlphaGo Zero")
print(f"2012 to 2017: doubled every {doubling_months(first, alphago):.1f} months")
print(f"2017 to 2024: doubled every {doubling_months(alphago, last):.1f} months")
growth = last.petaflops_days / first.petaflops_days
of_one_gpu = 989 / 1.58
print(f"all in all {growth:,.0f} times; the peak of one GPU grew {of_one_gpu:,.0f} times")
print(f"left for more GPUs, longer runs and better use: {growth / of_one_gpu:,.0f} times")
assert growth > 2 ** (years / 2) and growth / of_one_gpu > of_one_gpu

# %% [markdown]
# The first two lines compare the ends of a period only. Fitted to all runs up to 2017, the doubling time is 3.4
# months (Amodei and Hernandez 2018).
#
# AlexNet was trained on two GTX 580 GPUs, whose peak is 1.58 TFLOP/s each, in five to six days. A single GPU
# has become several hundred times as fast since then, partly by computing with fewer bits, but the training
# runs have grown far more. Most of the rest came from using more devices at once: Llama 3 ran on 16,384 GPUs,
# which is 8,192 times as many as AlexNet. How so many devices can train one model is what this course is
# about.
#
# ### Would that take 30 days, or 300?
#
# A slide that is often shown says that a training run of 1000 PF/s-days takes "about 30 days" on one DGX
# H100, a node with 8 GPUs, because such a node does 32 PF/s. It adds that the fastest computer of November
# 2009 did 2 PF/s. Can you expect about 30 days for a training run of your own?

# %% tags=["nbval-check-output"]
slide = days_on_devices(1000, 8, 4000, 1.0)  # 8 x 4000 TFLOP/s = 32 PF/s
yours = days_on_devices(1000, 8, 989, 0.40)
print(f"32 PF/s, all of it:           {slide:.0f} days")
print(f"16 bits, dense, 40% of peak: {yours:.0f} days")
assert 9 < yours / slide < 11

# %% [markdown]
# The two answers differ by a factor of ten, because the 32 PF/s are a peak that holds only for 8-bit
# numbers and for weights of which half are zero in a prescribed pattern (the data sheet says "with
# sparsity"). With 16 bits and dense weights the peak is a quarter of that, and training reaches less than
# half of this quarter. The speed of 2009, by contrast, was measured (1.76 PF/s), and with 64-bit numbers.
#
# So ask about every such figure: how many bits? Sparse or dense? Peak or measured? About a connection, ask
# whether the figure counts one direction or both together. The table does this for a DGX H100, in which
# **NVLink** is the fast connection between the GPUs of a node:
#
# | part | as data sheets count it | what one GPU gets in one direction |
# |---|---|---:|
# | memory of a GPU | 80 GB; 640 GB in all 8 GPUs | 3,350 GB/s, to read or write |
# | NVLink to the other GPUs of the node | 18 links, 900 GB/s in both directions; 4 switches, 7,200 GB/s for all 8 GPUs | 450 GB/s |
# | network to other nodes | 8 adapters of 400 Gbit/s, one per GPU (2 more serve storage) | 50 GB/s |
# | memory of the node | 2,000 GB | |
#
# How long does it take to move 2 GB, the gradients of a model with a billion parameters at 2 bytes each?

# %% tags=["nbval-check-output"]
for what, gigabytes_per_s in (("own memory", 3350), ("NVLink", 450), ("network", 50)):
    print(f"2 GB over {what:10} {1000 * 2 / gigabytes_per_s:5.1f} ms")

# %% [markdown]
# Each step away from the processor is seven to nine times slower than the one before. That is why it will
# matter so much in this course which processes share a node, and how many bytes they send.

# %% [markdown]
# ## 4. Who is who: rank, local rank, world size
#
# The processes of section 1 needed nothing from each other. Processes that train one model together do need
# each other, so each of them has to know its own place. Four terms describe it:
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
# It matters which ranks share a node, because the GPUs inside a node are joined by much faster links: in a
# DGX H100 each GPU can send 450 GB/s to the other GPUs of its node, and 50 GB/s to other nodes.
#
# Each rank knows only its own part of the picture, and stores it in a named tuple:
# `Place(rank, host, local_rank, device)`. Let the ranks draw the whole map together.

# %% exercise="device_map" todo="0.1" minutes=10 difficulty=2 points=2
from manyhands.first_job.places import device_map

# %% check="0.1" tags=["nbval-check-output"]
check.device_map(device_map)


# %% [markdown]
# Now try your function on four real processes of this machine. The cell prints rank 0's map and checks that
# the other three are equal to it.


# %%
def who_is_there():
    return device_map(os.environ, torch.cuda.device_count(), "this machine")


if check.ready("0.1"):
    maps = run_ranks(who_is_there, 4)
    for place in maps[0]:
        print(f"rank {place.rank} of 4: {place.host}, local {place.local_rank}, {place.device}")
    assert all(other == maps[0] for other in maps)

# %% [markdown]
# All four ranks hold the same map, although each of them knew only its own line of it, so they have
# communicated. Operations in which all ranks exchange data are called **collectives**, and lesson 04 builds
# them. On GPUs they are carried by a library called NCCL (NVIDIA Collective Communications Library), on CPUs
# by one called Gloo.
#
# ### Is `if local_rank == 0` enough?
#
# Four processes that all download the same data set fetch it four times, and all write the same file at the
# same time. So only one of them should download. A slide on input and output therefore builds the data set
# inside `if local_rank == 0`. What happens on the other ranks? Predict, then run such code on two ranks.


# %%
def as_on_the_slide():
    if int(os.environ["LOCAL_RANK"]) == 0:
        time.sleep(0.2)  # the download
        dataset = [3, 1, 4, 1, 5]
    return len(dataset)


try:
    run_ranks(as_on_the_slide, 2, quiet=True)
except RankFailed as failed:
    print(failed)

# %% [markdown]
# Rank 1 skips the `if` and then uses a name that only rank 0 has defined (an `UnboundLocalError` is a kind of
# `NameError`). Letting every rank read the data after the `if` would not be enough either: rank 1 would then
# read while rank 0 is still downloading, because nothing makes rank 1 wait. The ranks have to meet in
# between. A meeting of all ranks is called a **barrier**. Every collective in which each rank waits for data
# from all the others acts as a barrier as well, and `all_gather_object` is such a collective.
#
# Two more questions have to be answered before you write your own function:
#
# - **How many folders are there?** If all nodes see one shared folder, one rank of the whole job prepares the
#   data. If each node has a disk of its own, one rank on every node has to.
# - **What if preparing fails?** Perhaps a disk is full, or a server does not answer. If the rank that
#   prepares the data raises its error and leaves, the launcher ends the job, and the other ranks can say no
#   more than that they have lost a connection. If it catches its error and goes on without coming to the
#   barrier, the others wait there until a timeout, which is 30 minutes with Gloo by default. So the bad news
#   has to travel too: every rank has to raise an error that names the cause.

# %% exercise="prepare_once" todo="0.2" minutes=20 difficulty=3 points=3
from manyhands.first_job.places import prepare_once

# %% check="0.2" tags=["nbval-check-output"]
check.prepare_once(prepare_once)

# %% [markdown]
# What do four real ranks do when the disk is full? With nothing but a barrier, three of them would not know
# why the job ended. With your function, each of them names the cause.


# %%
def with_a_full_disk():
    def prepare():
        raise OSError("no space left on the disk")

    place = Place(dist.get_rank(), "this machine", int(os.environ["LOCAL_RANK"]), "cpu")
    start = time.perf_counter()
    try:
        return prepare_once(prepare, lambda: "the data", place, is_shared=True)
    except Exception as error:
        return f"{error} (after {time.perf_counter() - start:.1f} s)"


if check.ready("0.2"):
    for rank, told in enumerate(run_ranks(with_a_full_disk, 4)):
        print(f"rank {rank}: {told}")

# %% [markdown]
# The rank whose `prepare()` failed raised the error that says what is wrong, and so did the other three, at
# once. An error that all ranks raise ends the job, and the next one in the queue gets its GPUs.
#
# ### And if nobody has prepared anything?
#
# Most compute nodes have no internet access, so a job cannot download its data at all: somebody has to do
# that beforehand, where there is internet. What should a job say when it finds no data? This is what a job of
# this course says when it is asked for MNIST, a larger set of digits, and finds an empty folder:

# %%
with tempfile.TemporaryDirectory() as nothing, mock.patch.dict(os.environ, XDG_CACHE_HOME=nothing):
    try:
        images.load("mnist")
    except BadInput as refusal:
        print(refusal)

# %% [markdown]
# This one line says what is missing, which command fetches it, and where to run that command. The data then
# lies in a folder of yours that every node sees, and the same job finds it the next time it runs.

# %% [markdown]
# ## 5. How does the error fall with more data?
#
# The third reason for many processors is **data**: a model that is trained on more data is usually better.
# How much better? Section 1 has measured it already.
#
# When errors like these are plotted on two logarithmic axes, they often lie near a straight line. The error
# is then a **power law** of the number of images, $a \cdot \text{size}^{-b}$. Such lines have been found
# for translation, language models, images and speech (Hestness et al. 2017). Fit yours to the results of
# section 1, and look in the plot for sizes at which the points leave the line.

# %% exercise="fit_power_law" todo="0.3" minutes=10 difficulty=2 points=2
from manyhands.first_job.power_law import fit_power_law

# %% check="0.3" tags=["nbval-check-output"]
check.fit_power_law(fit_power_law)

# %%
if check.ready("0.3"):
    a, b = fit_power_law(*zip(*((size, error) for size, error in results if error), strict=True))
    print(f"error = {a:.2f} * size ** -{b:.2f}; twice the data: {1 - 2**-b:.0%} fewer mistakes")
    for size in sizes:
        errors = sorted(error for other, error in results if other == size)
        mean = sum(errors) / len(errors)
        beside = f"mean {mean / (a * size**-b) - 1:+.0%} from the line"
        print(f"{size:5} images: error {errors[0]:.3f} to {errors[-1]:.3f}, {beside}")
    most = [error for size, error in results if size == sizes[-1]]
    line = a * sizes[-1] ** -b
    at_or_above = sum(error >= line for error in most)
    print(f"{sizes[-1]:,} images: {at_or_above} of {len(most)} networks on or above the line")
    assert b > 0.3, "more data, fewer mistakes"
    print(f"to halve the error takes {2 ** (1 / b):.1f} times the data")
    print(f"for an error of 1% the line says {(a / 0.01) ** (1 / b):,.0f} images")

# %%
if check.ready("0.3"):
    figure, ax = figures.new_figure()
    measured = {"error": tuple(zip(*results, strict=True))}
    fitted = {"error": (sizes, [a * size**-b for size in sizes])}
    names = ("images to train on", "error (share of images)")
    figures.measured_and_predicted(ax, measured, fitted, *names)
    ax.get_legend().set_title("points: measured; line: fitted to them", {"size": 9})
    figures.show(figure, f"Error against data size on logarithmic axes: a line of slope -{b:.2f}.")

# %% [markdown]
# The points of one size scatter, because the four networks began with different weights and saw other
# images in another order. If most networks of the largest size lie on or above the line, as in our run, the
# line may not go on for ever.
#
# A straight line on these axes says two things. Progress can be **predicted**: small training runs tell you
# what a large one will reach before you pay for it. But progress is also **expensive**, as the last two lines
# above the figure say. Do not rely on the second of them, because it is extrapolated beyond the measured
# sizes, and every such line flattens in the end, at mistakes that no amount of data can correct. (With
# `--data mnist` or `--data FOLDER` the job of this lesson continues the line up to 40,960 images.)
#
# The best model size grows with the data as well, although more slowly: to reach the accuracy that experts
# had named as a goal in each of five fields, data sets would have to grow 33 to 971 times and models 6.6 to
# 456 times (Hestness et al. 2019). So the need for compute can be predicted, and it is large. More data,
# larger models and more experiments: that is why training is spread over many processors.

# %% [markdown]
# ## 6. Who should train the largest networks? (optional)
#
# With MNIST the measurement of section 5 takes longer, and it matters who trains what, because a network
# that sees more than about 3,200 images also takes more steps.
#
# The tasks are listed from the smallest to the largest: 12 sizes from 20 to 40,960 images, four networks of
# each. Four ranks can deal them out like cards, as `my_share` does, or cut the list into four solid pieces
# with 12 networks each. If the time of a network is proportional to its steps, how many times as fast as one
# rank are four ranks with solid pieces?

# %% show="true"
from manyhands.first_job.planning import solid_share

# %%
speedup_of_pieces = None  # your number

# %% answer="true"
speedup_of_pieces = 1.5

# %%
mnist_tasks = [(20 * 2**k, seed) for k in range(12) for seed in range(4)]
bounds = {}
for world_size in (4, 3):
    for name, share in (("like cards", my_share), ("solid pieces", solid_share)):
        shares = [share(mnist_tasks, rank, world_size) for rank in range(world_size)]
        steps = [sum(num_steps(size) for size, _ in own) for own in shares]
        bounds[world_size, name] = sum(steps) / max(steps)
        fast = f"at most {bounds[world_size, name]:.2f} times as fast"
        print(f"{world_size} ranks, {name:12}: {steps} steps, {fast}")
print(f"solid pieces, 4 ranks: you said {speedup_of_pieces}")
assert bounds[4, "like cards"] == 4 and bounds[4, "solid pieces"] < 1.5

# %% [markdown]
# A job ends when its last rank ends. With solid pieces the last rank trains all the large networks, and the
# three others are idle for most of the time, although every rank has the same number of networks. Dealing
# like cards is perfect for 4 ranks only because there happen to be four networks of each size: with 3 ranks
# one of them gets two of the largest networks. Equal counts are not equal work.

# %% [markdown]
# ## 7. Where a job runs
#
# How do you get at the GPUs of a large machine? It is shared, so you never start a program on its GPUs
# yourself. You write down what you need, hand this request in, and wait, while a program called **Slurm**
# decides who gets which nodes, and when.
#
# ![From your browser or terminal you reach the login node, where sbatch puts your job last of three in Slurm's queue, and from there jobs go to the compute nodes, which have GPUs but no internet; below, login node and compute nodes read and write one shared file system, into which prepare_data.py on the login node brings data from the internet](figures/first_job_cluster.svg)
#
# The **login node** is where you arrive. It has internet access, and it is meant for editing, installing and
# submitting. The **compute nodes** have the GPUs. All nodes see the same **shared file system**, in which
# most sites give you several folders, and it matters what you put where:
#
# | folder | what belongs there | what to know |
# |---|---|---|
# | home | settings, a little code | a small **quota**, which is a limit on bytes and often on the number of files |
# | project | code, the Python environment, data sets, what the group keeps | a larger quota, shared by the group |
# | scratch | runs and their checkpoints | large and fast; files that nobody touches for some weeks are deleted |
# | a node's own disk (often `$TMPDIR`) | a copy of data that is read again and again | no other node sees it, and it is emptied when the job ends |
#
# Names and rules differ from site to site, so look yours up. The Python environment is installed once, on
# the login node, by `make install` in the course's folder: PyTorch alone is more than ten thousand files,
# which can be too many for a home folder. Most of what a job writes, such as its log, is known to all
# ranks, so rank 0 alone writes it.
#
# ### A job file, line by line
#
# A **job file** is a shell script whose first lines start with `#SBATCH`. Slurm reads these lines as a form
# that you fill in; the rest of the script is what runs. This is the job file of this lesson:

# %% tags=["nbval-check-output"]
print(course_file("../sbatch/first_job.sbatch").read_text())

# %% [markdown]
# - `--job-name` is what the queue shows.
# - `--nodes=1` asks for one node, and `--ntasks-per-node=1` says that `srun` starts a command once on each
#   node.
# - `--gpus-per-node=4` asks for four GPUs of each node, and `--cpus-per-task=16` for 16 CPUs for each task.
#   A CPU of Slurm is a core, or, if the site counts so, a hardware thread, of which a core often has two. On
#   most sites `srun` **binds** a task to its cores, so that it neither leaves them nor takes those of
#   others. (Since Slurm 22.05 `srun` no longer takes this number from the job file: `launch.sh` passes it on
#   in `SRUN_CPUS_PER_TASK`.)
# - `--time=00:20:00` is the limit in hours:minutes:seconds, after which the job is ended.
# - `--output=%x-%j.out` names the file for all that is printed: `%x` stands for the job's name and `%j` for
#   its number. Errors go to the same file unless `--error` names another one.
# - The last three let a job survive its time limit. `--signal=B:USR1@120` makes Slurm warn the job at
#   least 120 seconds before the end so that it can save its state, `--requeue` allows the job to go
#   back into the queue, and `--open-mode=append` makes the restarted job continue the same output
#   file (lesson 11).
#
# The lines below the `#SBATCH` lines find `launch.sh`, which starts the processes. `sbatch
# sbatch/first_job.sbatch` submits the job file, `squeue --me` shows your jobs in the queue, and `scancel
# NUMBER` cancels one of them.
#
# The line `--ntasks-per-node=1` surprises many people, because a node has several GPUs. There are two ways to
# get one process per GPU, and a file that mixes them starts too many:
#
# | | with torchrun, as in this course | with srun alone |
# |---|---|---|
# | tasks per node | 1 | as many as GPUs |
# | who starts the processes | srun starts one torchrun per node, which starts one process per GPU | srun |
# | where a process finds its rank | `RANK`, `LOCAL_RANK`, `WORLD_SIZE` | `SLURM_PROCID`, `SLURM_LOCALID`, `SLURM_NTASKS` |
# | which GPUs a process sees | all of its node; the local rank chooses | with `--gpus-per-task=1` only its own, which is then `cuda:0`; with `--gpu-bind=none` in addition all |
#
# On several nodes the torchrun processes also have to find each other. They meet at an address, which
# consists of the first node's name and a port. A job file can work out both, because Slurm sets variables
# such as `SLURM_JOB_NODELIST` and `SLURM_JOB_ID` for it:
#
# ```sh
# head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# port=$((20000 + SLURM_JOB_ID % 10000))
# ```
#
# ### Mend a job file
#
# Here is a job file of the kind that people pass on to each other. It is meant to run `train.py` in eight
# processes on two nodes with four GPUs each. None of its faults makes `sbatch` refuse it.

# %% tags=["nbval-check-output"]
print(BROKEN)

# %% [markdown]
# What would it start? `rehearse(text, nodes, tasks_per_node)` runs a job file here, with stand-ins for `srun`
# and `torchrun` that only write down each start. Suppose that Slurm grants the nodes n12 and n31. Predict how
# many torchruns start in all, and on which nodes, first with the file as it is, and then with `srun` in front
# of `torchrun`.

# %% tags=["nbval-check-output"]
for name, text in (
    ("as it is", BROKEN),
    ("with srun", BROKEN.replace("torchrun", "srun torchrun")),
):
    starts = rehearse(text, ["n12", "n31"], tasks_per_node=4).starts
    nodes = " ".join(start.node for start in starts)
    print(f"{name}: {len(starts)} x torchrun, on {nodes}")
print("they look for one another at", starts[0].words[-2].partition("=")[2])

# %% [markdown]
# The file as it is starts one torchrun, on the first node, where two should meet; and it looks in vain for
# g07, a node of some earlier job for which the file was written. With `srun` there are eight torchruns, one
# for each of the four tasks on each node, and each of them is told to start four processes: 32 processes
# where eight were meant. They, too, would look for g07.
#
# Mend the file. Copy its text into your function and change it there. The check reads the `#SBATCH` lines as
# Slurm does, rehearses the rest on nodes of its own choice, and names the first fault that is left.

# %% exercise="mended_job" todo="0.4" minutes=18 difficulty=2 points=3
from manyhands.first_job.job_text import mended_job

# %% check="0.4" tags=["nbval-check-output"]
check.mended_job(mended_job)

# %% [markdown]
# Where do the processes of each job meet, and does the file really start eight processes that know who they
# are? The next cell rehearses your file for two job numbers. Then `run_here` runs the file with the real
# torchrun, which is started twice on this machine, once for each node. In place of `train.py` it starts a
# program that only prints its rank.

# %%
program = r"""
import os, sys
rank, world_size, local_rank = (os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
sys.stdout.write(f"rank {rank} of {world_size}, local rank {local_rank}\n")
"""
if check.ready("0.4"):
    for job_id in (4711, 4712):
        for start in rehearse(mended_job(), ["n12", "n31"], job_id=job_id).starts:
            print(f"job {job_id} on {start.node}: {' '.join(start.words)}")
    try:
        said = run_here(mended_job(), program, limit_s=120)
        print("\n".join(sorted(said.splitlines())))
    except TimeoutError as late:
        print(late)

# %% [markdown]
# Both nodes of a job meet at its first node, and the two jobs do not meet each other. In the real run the
# two torchruns found each other, and numbered the eight processes from 0 to 7, and those of each node from
# 0 to 3. (If the cell shows something else, this machine is very busy, or lacks what your file uses, such
# as the GPUs that `--nproc-per-node=gpu` counts.) In lesson 06 you write the arguments of torchrun
# yourself. The job files of this course leave all this to `launch.sh`.
#
# A job file of this course does not say two things: which account pays, and what the queue with the GPUs is
# called. Both differ from site to site, so they are kept in one file, `sbatch/site.env`. The README's section
# ["On a cluster"](../README.md#on-a-cluster) says how to write it, and section 9 lets you try it on an
# imaginary site.

# %% [markdown]
# ## 8. Submit, watch, read the report
#
# How much of the hardware that a job is granted does the job really use? The next cell writes your functions
# that passed their checks to `mine/first_job.py`, and submits this lesson's job, which repeats the training
# runs of section 1 as a program of its own and fits the line with your `fit_power_law`. Where there is Slurm,
# the job goes into the queue; otherwise it simply starts. `ranks=1` asks for a single process, **whatever the
# job was granted**.
#
# While the job runs you see its state, what the rank prints, and how many networks have been trained. Each
# point of the error plot is one network, and the points fall because later networks get more images. The stop
# button ends the job after the current training run, and all finished results are kept.

# %%
if check.ready("0.3"):
    check.keep()
    folder_of_one = watch.run("../sbatch/first_job.sbatch", "--impl", "mine", ranks=1)

# %% [markdown]
# The last figure above is the report. It gives the median speed of the training runs and the mean error of
# the networks with most images, while the line of numbers above it shows what the last training run
# reported, so the two differ. The same folder holds a longer version, `report.html`, and the fitted line,
# `power_law.png`. The head of the report says how many of the granted devices had no rank; in the figure
# they are hatched.
#
# Slurm charges for what was **granted**, whether or not it was used. Asking for four GPUs does not use four
# GPUs: here that takes four processes. This is a common waste on shared machines, and no error message
# tells you about it.
#
# So how much was used? Twice a second the job recorded how busy each rank's device was. (On a machine without
# GPUs this device is a CPU core.) Your function turns these samples into the hours charged and used.

# %% exercise="device_hours" todo="0.5" minutes=10 difficulty=2 points=1
from manyhands.first_job.planning import device_hours

# %% check="0.5" tags=["nbval-check-output"]
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
if check.ready("0.3", "0.5"):
    folder_of_many = watch.run("../sbatch/first_job.sbatch", "--impl", "mine", ranks=many)


# %%
def busy_ranks(folder):
    """The samples of each rank of a run: [[(time, busy cores), ...], ...]."""
    files = sorted((folder / "ranks").glob("rank-*.jsonl"))
    return [[(line["time_s"], line["cpu"]) for line in storage.read_lines(file)] for file in files]


if check.ready("0.3", "0.5"):
    granted = max(many, num_cores)
    shares = []
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
        shares.append(used / charged)
    if shares[1] < shares[0]:
        print("Other programs used the cores meanwhile: run both jobs again on a quiet machine.")

# %%
if check.ready("0.3", "0.5"):
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
# The printed "at most" assumes that every rank keeps one core busy from beginning to end, so it is an upper
# bound. The measured shares come near it on a quiet machine and stay well below it if other programs use
# the same cores, so compare the two jobs with each other. (The share in the job's own report is about the
# same. Under Slurm it is lower, since there it also counts the time in which the processes start.) With one
# rank the other cores get no work from this job from the first second to the last. On a quiet machine more
# ranks use more of the granted cores and finish the training sooner. (The whole job need not be much
# shorter here, because much of its time passes while the processes start.)
#
# On a node with four GPUs the picture is the same: a job that asks for all four and starts one rank uses at
# most a quarter of what it is charged for.


# %% [markdown]
# ## 9. What only your site knows (optional)
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
# - `module load` makes software that the site has installed, such as a version of CUDA, available in a shell.
# - A shell assignment has no spaces around `=`, and `export` makes the variable visible to `sbatch`.

# %% exercise="site_file" todo="0.6" minutes=10 difficulty=2 points=1
from manyhands.first_job.site import site_file

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

# %%
check.summary()

# %% [markdown]
# ## Recap
#
# You can now
#
# - estimate how long a training run takes on a machine, and say which figures of a data sheet to distrust,
# - tell rank, local rank and world size apart, and find out which rank runs where,
# - let one rank prepare data for all, so that nobody reads too early and nobody waits for ever,
# - deal out independent tasks, and say what unequal tasks do to the speed-up,
# - measure how the error falls with more data, and fit a power law to it,
# - find the faults of a job file, submit a job, watch it, and say how much of what it was granted it used.
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
# <details><summary>Eight processes run on two nodes. The data set is unpacked onto the disk of each node. How many of them call prepare(), and how many if it is unpacked into a folder that both nodes share?</summary>
#
# Two, the ranks with local rank 0. In a shared folder it is rank 0 alone: two ranks would write the same
# files at the same time.
# </details>
#
# <details><summary>A course asks its readers to comment out 75 lines of the training script, run the rest on the login node to download the data, and put the lines back. What can go wrong, and what would be better?</summary>
#
# The lines that were put back may not be those that were taken out, and then the program that trains is not
# the one that was tested. Each further data set means the same work again. A command of its own, here
# `python scripts/prepare_data.py --data NAME`, downloads the data and leaves the training script alone; the
# job that finds no data names this command.
# </details>
#
# **Sources**: Llama Team 2024, "The Llama 3 Herd of Models", https://arxiv.org/abs/2407.21783; Hestness et
# al. 2017, "Deep Learning Scaling is Predictable, Empirically", https://arxiv.org/abs/1712.00409; Kaplan et
# al. 2020, https://arxiv.org/abs/2001.08361 (6 FLOPs per parameter and token); NVIDIA, data sheets of H100
# and DGX H100, and https://docs.nvidia.com/dgx/dgxh100-user-guide/; TOP500,
# https://top500.org/lists/top500/2009/11/; Amodei and Hernandez 2018, "AI and Compute",
# https://openai.com/research/ai-and-compute (to 2017); Krizhevsky et al. 2012 (AlexNet); Brown et al. 2020,
# https://arxiv.org/abs/2005.14165 (GPT-3); Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311 (PaLM);
# Hestness et al. 2019, "Beyond Human-Level Accuracy", https://arxiv.org/abs/1909.01736; Slurm's documentation
# of sbatch and srun, https://slurm.schedmd.com/sbatch.html.
