# ---
# manyhands: {title: Batch size, minutes: 75, goal: "Measure throughput the right way, find how many steps each batch size needs to reach a target, and predict from gradients alone where larger batches stop helping", job: {flags: "--networks 1 --rates 0.2 0.4 0.8 --target 0.9 --max-steps 600", loss: [32, 49]}}
# ---

# %% [markdown]
# # 03 Batch size
#
# With more processors you can look at more samples in the same time, so each step can have a larger batch.
# Does that make training faster?
#
# The answer has two halves. **How many samples per second** does a batch size allow? And **how many steps**
# does training need with it? The first half depends on the machine, the second on the task. In this lesson
# you measure both, and then you predict, from gradients alone, the largest batch that is worth its price.
#
# ![The batch size sets how many images per second the machine trains on, and how many steps the task needs to reach its target; both together give the time to the target](figures/batch_size_halves.svg)

# %%
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.batch_size.sweep import PATIENCE, Training, tune
from manyhands.checks import batch_size as check, score
from manyhands.data import images
from manyhands.first_job.planning import my_share
from manyhands.first_job.power_law import fit_power_law
from manyhands.instruments import figures
from manyhands.jobs import watch
from manyhands.ranks import lab
from manyhands.ranks.lab import run_ranks
from manyhands.training import storage

lab.warm_up()
torch.set_num_threads(1)
data = images.load("embedded")
print(f"torch {torch.__version__}; everything here runs on the CPU")
print(data.note)

# %% [markdown]
# The task is lesson 00's: which digit does a picture show? The network is small, with one hidden layer of
# 32 units, trained by plain stochastic gradient descent. `Training` holds all of it: `step()` trains on the
# next batch, and `accuracy()` gives the share of the 500 test images that are classified correctly.
# (Learning rates and stopping points are chosen by them, so strictly they are a **validation set**; an
# honest final accuracy would need other images.)

# %% tags=["nbval-check-output"]
training = Training(data, batch=32, rate=0.4, seed=1)
print(
    f"before the first step {training.accuracy():.0%} of the test images are classified correctly"
)
for _ in range(200):
    training.step()
print(f"after 200 steps {training.accuracy():.0%}")

# %% [markdown]
# ## 1. How many samples per second?
#
# The **throughput** is the number of samples that are trained on per second. It looks easy to measure: read
# the clock, train, read the clock again. Three things make such numbers wrong:
#
# - The first steps are slow, because memory is being allocated and libraries are being loaded. So **warm
#   up** first.
# - On a GPU a call returns at once while the GPU works on. So wait for the GPU, **synchronise**, before you
#   look at the clock.
# - Something else runs on the machine now and then, and a single slow step moves the mean. So take the
#   **median** of many steps, which is barely affected.
#
# (Synchronising after each step keeps the CPU from preparing the next one, so on a GPU the result is a
# little too low. Benchmarks therefore often time blocks of many steps.)

# %% exercise="throughput" todo="3.1" minutes=10 difficulty=2 points=2
from manyhands.batch_size.scaling import throughput

# %% check="3.1" tags=["nbval-check-output"]
check.throughput(throughput)

# %% [markdown]
# Now measure the throughput for batch sizes from 1 to 8192. On a CPU there is nothing to wait for. If each
# step took as long as one with a single image, batch 256 would have 256 times the throughput of batch
# 1. How many times will it really be?

# %%
gain = None  # your number

# %% answer="true"
gain = 60


# %%
def images_per_s(batch):
    more = data._replace(  # the same images again and again, so that there are enough for a batch
        train_inputs=data.train_inputs.repeat(7, 1, 1, 1), train_labels=data.train_labels.repeat(7)
    )
    training = Training(more, batch, 0.1, seed=1)
    return throughput(training.step, batch, 10, 40, lambda: None)


batches = [2**k for k in range(14)]
if check.ready("3.1"):
    speed = {batch: images_per_s(batch) for batch in batches}
    for batch in (1, 32, 256, 1024, 8192):
        step_us = 1e6 * batch / speed[batch]
        print(f"batch {batch:4}: {speed[batch]:9,.0f} images/s, a step takes {step_us:5.0f} us")
    score("gain of batch 256", gain, 256, speed[256] / speed[1], word="ideal")

# %%
if check.ready("3.1"):
    figure, ax = figures.new_figure()
    ideal = [speed[1] * batch for batch in batches]
    measured = {"images per second": (batches, list(speed.values()))}
    predicted = {"twice the batch, twice the images": (batches, ideal)}
    names = ("batch size (images)", "images per second")
    figures.measured_and_predicted(ax, measured, predicted, *names)
    figures.show(
        figure, "Throughput against batch size: a straight rise that bends and levels off."
    )

# %% [markdown]
# At first a batch of twice the size takes hardly more time, because most of a small step is spent on
# starting operations. Then the processor fills up and the curve bends, until twice the batch takes about
# twice as long and the throughput hardly grows. A GPU has more to fill than a CPU core, so its curve bends
# later, but it has the same shape.
#
# If one processor is full, take a second one: with a batch of its own on each processor, the throughput
# grows with the number of processors, as far as the network between them allows. So in images per second
# the batch can grow almost without limit. Does it also save steps?

# %% [markdown]
# ## 2. How many steps to the target?
#
# How many steps does training take to reach a **target**, here 93 % of the test images classified
# correctly? The accuracy jumps up and down from step to step, so one good evaluation may be luck. Ask for
# several in a row; their number is called the **patience**. In this lesson it is 2.

# %% exercise="steps_to_target" todo="3.2" minutes=15 difficulty=2 points=2
from manyhands.batch_size.scaling import steps_to_target

# %% check="3.2" tags=["nbval-check-output"]
check.steps_to_target(steps_to_target)

# %%
TARGET = 0.93
if check.ready("3.2"):
    for batch, rate in ((2, 0.1), (32, 0.4), (512, 0.8)):
        training = Training(data, batch, rate, seed=1)
        way = (training.step, training.accuracy, TARGET, PATIENCE, max(1, 16 // batch), 4000)
        steps = steps_to_target(*way)
        print(f"batch {batch:3}: {steps} steps, {steps * batch:,} images processed")

# %% [markdown]
# ### A fair comparison
#
# The learning rate matters as much as the batch size. The gradients of large batches have less noise
# (lesson 01), so they allow larger learning rates. With one learning rate for all you would only measure
# how well it suits each batch size. That is why each batch size gets **its own best learning rate** out of
# a grid, and each setting is tried with several seeds.
#
# A learning rate counts as good only if **all** seeds reach the target with it. A mean over the surviving
# seeds would favour reckless learning rates.

# %% exercise="best_rate" todo="3.3" minutes=10 difficulty=1 points=1
from manyhands.batch_size.scaling import best_rate

# %% check="3.3" tags=["nbval-check-output"]
check.best_rate(best_rate)

# %% [markdown]
# Now the sweep: 9 batch sizes, 6 learning rates, 3 seeds. Two ranks share the batch sizes, with `my_share`
# from lesson 00. `tune` does what you would do by hand: it tries each learning rate with each seed, and
# gives a rate up when a seed takes more than twice the steps of the best rate so far, so not all of the 162
# trainings are needed.
#
# Predict before you start: by which factor do the steps shrink from batch 4 to batch 8, and by which from
# batch 64 to 128? (The "ideal" 2 is perfect scaling: twice the batch, half the steps.)

# %%
from_4_to_8, from_64_to_128 = None, None  # your numbers: steps before / steps after

# %% answer="true"
from_4_to_8, from_64_to_128 = 1.8, 1.2

# %%
RATES, SEEDS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6), (1, 2, 3)
sizes = [2**k for k in range(9)]


def sweep_share():
    torch.set_num_threads(1)
    own = my_share(sizes, dist.get_rank(), dist.get_world_size())
    return {batch: tune(data, batch, RATES, SEEDS, TARGET, 4000) for batch in own}


if check.ready("3.3"):
    found = {}
    for share in run_ranks(sweep_share, 2, timeout_s=150):
        found |= share
    best = {batch: best_rate(found[batch]) for batch in sizes}
    num_trainings = sum(len(seeds) for by_rate in found.values() for seeds in by_rate.values())
    print(f"the budget of this sweep: {num_trainings} trainings")
    for batch, (rate, mean) in best.items():
        steps = found[batch][rate]
        print(f"batch {batch:3}: {mean:6.0f} steps ({min(steps)} to {max(steps)}) at rate {rate}")
    score("from 4 to 8", from_4_to_8, 2, best[4][1] / best[8][1], word="ideal")
    score("from 64 to 128", from_64_to_128, 2, best[64][1] / best[128][1], word="ideal")

# %% [markdown]
# Look at the learning rates first. If the best one stands at an end of the grid, a wider grid might hold a
# better one. Here none should stand there, except perhaps at batch 1, where the two smallest are about
# equally good.
#
# With small batches, twice the batch needs about half the steps: the same number of images, and with enough
# processors half the time. With large batches, twice the batch needs about as many steps as before; with
# three seeds, the differences are mostly chance. A simple formula covers both:
#
# $$\text{steps} = \text{least steps} \cdot \left(1 + \frac{\text{critical batch}}{\text{batch}}\right)$$
#
# For a huge batch this gives the **least steps**: the gradient has no noise left, but you still have to
# walk the way. At the **critical batch** training takes twice the least steps.
#
# Images cost work as well. Their number is steps times batch: least steps · (batch + critical batch). A
# tiny batch needs the fewest images, and the critical batch needs twice as many. So the critical batch is a
# fair compromise: twice the least steps, twice the least images.

# %% exercise="fit_steps" todo="3.4" minutes=15 difficulty=3 points=2
from manyhands.batch_size.scaling import fit_steps

# %% check="3.4" tags=["nbval-check-output"]
check.fit_steps(fit_steps)


# %%
if check.ready("3.3", "3.4"):
    results = [
        {"batch": batch, "mean": mean, "steps": found[batch][rate]}
        for batch, (rate, mean) in best.items()
    ]
    least, critical = fit_steps(sizes, [mean for _, mean in best.values()])
    print(f"least steps {least:.0f}, critical batch {critical:.0f}")
    small = [one for one in results if one["batch"] <= critical / 4]
    _, slope = fit_power_law([r["batch"] for r in small], [r["mean"] for r in small])
    print(f"slope up to a quarter of the critical batch: {-slope:.2f} (perfect would be -1)")
    figure, ax = figures.new_figure(7, 4)
    figures.steps_by_batch(ax, results, least, critical)
    figures.show(
        figure, "Steps to the target against batch size, log-log: a slope of -1, then level."
    )

# %% [markdown]
# Read the figure from left to right. The green part shows almost **perfect scaling**: the slope is close to
# -1 (the formula itself has about -0.9 there). Then come **diminishing returns**, where more images in a
# step still help, but less than they cost. The orange part is the **plateau**, where a larger batch saves
# hardly anything. The borders, a quarter of the critical batch and four times the critical batch, are a
# convention: where the orange part begins, training still takes 1.25 times the least steps.
#
# The same three regimes were found for nine other pairs of networks and data, up to Transformers and
# ImageNet (Shallue et al. 2019). What differs is where the bend is: at some tens of samples here, at up to
# many thousands there.

# %% [markdown]
# ## 3. The same number of epochs
#
# Many people change the batch size and leave the number of **epochs** as it was. What happens then? Train
# for 4 epochs with different batches, each at its own best learning rate.

# %%
if check.ready("3.3"):
    for batch in (4, 16, 64, 256):
        wrong = []
        for seed in SEEDS:
            training = Training(data, batch, best[batch][0], seed)
            for _ in range(4 * len(data.train_inputs) // batch):
                training.step()
            wrong.append(1 - training.accuracy())
        steps = 4 * len(data.train_inputs) // batch
        told = f"test error {fmean(wrong):.3f} ({min(wrong):.3f} to {max(wrong):.3f})"
        print(f"batch {batch:3}: 4 epochs are {steps:4} steps, {told}")

# %% [markdown]
# "Large batches are less accurate", one often reads. Here you see the simplest reason for this claim: in
# the same epochs large batches take fewer steps, and at some point too few. (There is more to it with very
# large batches, and there are remedies: lesson 07.)

# %% [markdown]
# ## 4. Batch times replicas
#
# What is the batch size on several processors? Each one, a **replica**, has a copy of the model and a batch
# of its own. Their gradients are averaged, and all take the same step. Since the loss is a mean over
# images, the mean of the gradients of 4 batches of 8 is the gradient of one batch of 32. (Layers that mix
# the images of a batch, such as lesson 07's batch norm, are an exception.) So what counts for the steps is
# the
#
# $$\text{global batch} = \text{batch} \times \text{replicas}$$
#
# Write the averaging. `dist.all_reduce(tensor)` adds up a tensor over all ranks, in place. (As in lesson
# 00, a `group` names the ranks that take part, and is passed on.) Also return one more number, the mean of
# the squared lengths of the ranks' own gradients: noise makes a gradient longer, and section 5 reads from
# this how much noise there is.
#
# Then the same training runs on 1, 2 and 4 ranks with a global batch of 32. Will anything change?

# %% exercise="average_over_ranks" todo="3.5" minutes=10 difficulty=2 points=2
from manyhands.batch_size.scaling import average_over_ranks

# %% check="3.5" tags=["nbval-check-output"]
check.average_over_ranks(average_over_ranks)


# %%
def train_on_ranks(batch, rate, seed):
    """Train to the target; each rank takes its part of every batch. Returns squared lengths."""
    torch.set_num_threads(1)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    training = Training(data, batch, rate, seed)  # same seed: same weights, same order everywhere
    own_squares, mean_squares, own_batch = [], [], batch // world_size
    while training.accuracy() < TARGET:
        chosen = next(training.batches)[rank * own_batch :][:own_batch]
        own = training.gradient(data.train_inputs[chosen], data.train_labels[chosen])
        mean, square = average_over_ranks(own)
        own_squares.append(square)
        mean_squares.append(mean.square().sum().item())
        training.descend(mean)
    return own_squares, mean_squares


if check.ready("3.5"):
    runs = {n: run_ranks(train_on_ranks, n, 32, 0.4, 1, timeout_s=60)[0] for n in (1, 2, 4)}
    for world_size, (_, squares) in runs.items():
        own = 32 // world_size
        told = f"{len(squares)} steps, squared length of the first mean gradient {squares[0]:.4f}"
        print(f"{world_size} ranks with {own:2} images each: {told}")
    torch.testing.assert_close(runs[1][1][:20], runs[4][1][:20], rtol=1e-3, atol=1e-5)

# %% [markdown]
# The training is the same, whether one rank has all 32 images or four have 8 each. (Sums in another order
# differ in the last digits, so after many steps the runs may part a little. Training stops here without
# patience, so do not compare its steps with section 2's.) Lesson 05 makes this method fast as well.

# %% [markdown]
# ## 5. Predict the critical batch
#
# The sweep was expensive: it took more than a hundred trainings. Can the critical batch be predicted from
# fewer?
#
# In the plateau the gradient of a batch is nearly the true gradient, but with small batches it is mostly
# noise. The bend should be where noise and gradient are equally strong. In lesson 01 the noise of a batch
# had the variance $V / \text{batch}$, where $V$ is the mean squared distance of a single sample's gradient
# from the true one. This variance equals the squared length of the true gradient at
#
# $$\text{batch} = \frac{V}{|\text{true gradient}|^2}$$
#
# This number is the **noise scale**. Nobody knows the true gradient, but two batch sizes are enough to work
# the noise scale out. And four ranks give you two batch sizes at almost no cost: each rank's own 8 images,
# and the mean over all 32.

# %% exercise="noise_scale" todo="3.6" minutes=15 difficulty=3 points=2
from manyhands.batch_size.scaling import noise_scale

# %% check="3.6" tags=["nbval-check-output"]
check.noise_scale(noise_scale)

# %% [markdown]
# Now predict the critical batch from three trainings, each on four ranks. By which factor will the noise
# scale be larger than the critical batch of the sweep, or smaller (then below 1)? An exact prediction would
# give 1.

# %%
factor = None  # your number

# %% answer="true"
factor = 1.5

# %%
if check.ready("3.3", "3.4", "3.5", "3.6"):
    small_squares, large_squares = [], []
    for seed in SEEDS:
        own_squares, mean_squares = run_ranks(train_on_ranks, 4, 32, 0.4, seed, timeout_s=60)[0]
        print(f"seed {seed}: noise scale {noise_scale(own_squares, mean_squares, 8, 32):.0f}")
        small_squares += own_squares
        large_squares += mean_squares
    scale = noise_scale(small_squares, large_squares, 8, 32)
    print(f"noise scale {scale:.0f}, critical batch by the sweep {critical:.0f}")
    score("noise scale / critical batch", factor, 1, scale / critical)
    figure, ax = figures.new_figure(7, 4)
    figures.steps_by_batch(ax, results, least, critical, scale)
    figures.show(figure, "Steps against batch size with the critical batch and the noise scale.")

# %% [markdown]
# Expect three trainings to come within a factor of about 2 of what took more than a hundred. The authors of
# the method use it to tell apart tasks whose largest useful batches differ by orders of magnitude
# (McCandlish et al. 2018). The prediction is rough because the noise scale grows during training, so one
# number cannot fit all of it, and because noise in a steep direction of the loss does more harm than in a
# flat one, which a single length cannot tell. Still it tells tens from thousands, and that is what you need
# before you ask for 64 GPUs.

# %% [markdown]
# ## 6. How long does it take?
#
# Steps times the time of a step is what you wait for, so here both halves of the lesson come together: on
# this one core, which batch is the fastest to the target?

# %%
fastest = None  # your number

# %% answer="true"
fastest = 64

# %%
if check.ready("3.1", "3.3"):
    seconds = {batch: best[batch][1] * batch / speed[batch] for batch in sizes}
    epoch_s = {batch: len(data.train_inputs) / speed[batch] for batch in sizes}
    figure, ax = figures.new_figure()
    series = {"time to the target": (sizes, list(seconds.values()))}
    series["time per epoch"] = (sizes, list(epoch_s.values()))
    figures.lines(ax, series, "batch size (images)", "time (s)")
    ax.set(xscale="log", yscale="log")
    figures.show(figure, "Time to the target falls and rises again; time per epoch only falls.")
    quickest = min(seconds, key=seconds.get)
    print(f"fastest: batch {quickest} with {seconds[quickest]:.3f} s; you said {fastest}")

# %% [markdown]
# ### Does a shorter epoch mean faster training?
#
# A slide that is often shown says: "A larger batch takes less time for an epoch, so it trains faster." The
# first half is right, as the dashed line shows. But an epoch is not what you wait for. The time to the
# target, the solid line, stops falling once a larger batch saves no more steps, and it rises where the
# steps also take longer. So two bends decide: that of the steps, which belongs to the task, and that of the
# throughput, which belongs to the machine. Ask of every speed-up: to reach **what**?

# %% [markdown]
# ## 7. A larger run
#
# Does all this hold with more seeds, larger batches and other data? The job of this lesson sweeps them,
# also with MNIST's 60,000 images. Two runs are stored with the course. Where do they bend, and does the
# noise scale predict it?

# %%
figure, axes = figures.new_figure(9, 4.2, cols=2)
for ax, name in zip(axes, ("digits", "mnist"), strict=True):
    stored = storage.stored("batch_size", name)
    critical_of, scale_of = stored["critical_batch"], stored["noise_scale"]
    figures.steps_by_batch(ax, stored["batches"], stored["least_steps"], critical_of, scale_of)
    ax.set_title(f"{name}, target {stored['target']:.0%}")
    told = f"slope in the green part {stored['slope']:.2f}, critical batch {critical_of:.0f}"
    print(f"{name}, {stored['num_trainings']} trainings: {told}, noise scale {scale_of:.0f}")
figures.show(figure, "The stored sweeps of the digits and of MNIST, with fit and noise scale.")

# %% [markdown]
# Both curves have the same shape, but their bends lie at different places. The noise scale says which of
# the two tasks can use the larger batch, and it is within a factor of two of both critical batches. (The
# points of MNIST begin at batch 4, since with smaller ones no learning rate reached the target within 2,500
# steps. From batch 128 on, its best learning rate was 0.8; with 1.6, the end of the grid, a training missed the
# target.)

# %% [markdown]
# ## 8. Run it as a job
#
# Run your own sweep: the job uses your `best_rate`, `fit_steps` and `noise_scale`. A sweep is many
# trainings that do not need each other, so on a cluster `sbatch --array=0-10 sbatch/batch_size.sbatch`
# makes eleven jobs of it, one for each batch size. Here it is a single small one, with one network for each
# setting and a target of 90 %, which a training has missed if it takes more than 600 steps.

# %%
if check.ready("3.3", "3.4", "3.6"):
    check.keep()
    small_sweep = "--networks 1 --target 0.9 --rates 0.2 0.4 0.8 --max-steps 600".split()
    folder = watch.run("../sbatch/batch_size.sbatch", "--impl", "mine", *small_sweep)

# %%
if check.ready("3.3", "3.4", "3.6"):
    own = storage.read_json(folder / "result.json")
    fit = (own["least_steps"], own["critical_batch"], own["noise_scale"])
    figure, ax = figures.new_figure(7, 4)
    figures.steps_by_batch(ax, own["batches"], *fit)
    figures.show(figure, "The job's sweep: steps against batch, with the fit and the noise scale.")

# %% [markdown]
# With a single network for each setting the points scatter, and so do the critical batch and the noise
# scale. The stored runs above used six networks for each setting (digits) and three (MNIST).

# %%
check.summary()

# %% [markdown]
# ## Recap
#
# You can now
#
# - measure throughput with warm-up, synchronisation and a median,
# - compare batch sizes fairly: a learning rate of its own for each, several seeds, a target, a stated
#   budget,
# - name the three regimes, and fit the critical batch,
# - say what the global batch is, and show on ranks that only this counts for the steps,
# - predict the critical batch from the gradients of a single training on several ranks.
#
# **Questions**
#
# <details><summary>The critical batch is 20, and you go from batch 10 on one GPU to 8 GPUs with batch 10 each. How many times fewer steps does the formula promise?</summary>
#
# They fall from 1 + 20/10 = 3 times the least steps to 1 + 20/80 = 1.25 times: 2.4 times fewer, with 8
# times the GPUs.
# </details>
#
# <details><summary>Somebody times 100 steps on a GPU without synchronising and gets 2 million images per second. What did they measure?</summary>
#
# They measured how fast the CPU can hand work to the GPU. The GPU was still working when the clock was
# read.
# </details>
#
# <details><summary>Late in a training the gradient is short and the noise is as large as ever. What does that do to the critical batch?</summary>
#
# The critical batch grows, because it is V divided by a smaller squared length. So a larger batch makes
# sense later in training (lesson 07 lets the batch grow).
# </details>
#
# **Sources**: McCandlish et al. 2018, "An Empirical Model of Large-Batch Training",
# https://arxiv.org/abs/1812.06162; Shallue et al. 2019, "Measuring the Effects of Data Parallelism on
# Neural Network Training", https://arxiv.org/abs/1811.03600.
