# ---
# manyhands: {title: Batch size, goal: "Measure throughput the right way, find how many steps each batch size needs to reach a target, and predict from gradients alone where larger batches stop helping", job: {flags: "--networks 1 --rates 0.2 0.4 0.8 --target 0.9 --max-steps 600", loss: [20, 52]}}
# ---

# %% [markdown]
# # 03 Batch size
#
# With more processors you can train on more samples in the same time, so each step can use a larger batch.
# Does that make training faster?
#
# The answer has two halves. **How many samples per second** does a batch size allow? And **how many steps**
# does training need with it? The first answer depends on the machine, and the second on the task. In this
# lesson you measure both, and then you predict, from gradients alone, the largest batch that is worth its
# price.
#
# ![The batch size sets how many images per second the machine trains on, and how many steps the task needs to reach its target; both together give the time to the target](figures/batch_size_halves.svg)

# %%
import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.batch_size.figures import (
    errors_by_epoch,
    powers_of_two,
    sweeps,
    throughput_curve,
    trade_off,
)
from manyhands.batch_size.problem import of_images
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
data = of_images(images.load("embedded"))
print(f"torch {torch.__version__}; everything here runs on the CPU")
print(data.note)

# %% [markdown]
# The task is lesson 00's: which digit does a picture show? The network is a small **multilayer perceptron**
# (MLP) with one hidden layer of 32 units, and it is trained by plain stochastic gradient descent. A
# `Training` object holds the data and the network: `step()` trains on the next batch, and `accuracy()` gives
# the share of the 324 **validation** images that are classified correctly. These images were taken out of the
# training images, because this lesson chooses learning rates and stopping points by the accuracy on them. An
# accuracy that was used for a choice looks better than it is, so the 500 test images stay untouched for an
# honest measurement.

# %% tags=["nbval-check-output"]
training = Training(data, batch=32, rate=0.4, seed=1)
print(f"before the first step {training.accuracy():.0%} of the images are classified correctly")
for _ in range(200):
    training.step()
print(f"after 200 steps {training.accuracy():.0%}")

# %% [markdown]
# ## 1. How many samples per second?
#
# The **throughput** is the number of samples that the machine trains on per second. It looks easy to measure:
# read the clock, train, and read the clock again. But three things make such numbers wrong:
#
# - The first steps are slow, because memory is being allocated and libraries are being loaded. So **warm
#   up** first.
# - On a GPU a call returns at once, while the GPU still works. So wait for the GPU, **synchronise**, before
#   you look at the clock. But synchronise only then, because a wait after every step would keep the CPU from
#   preparing the next step while the GPU computes, and the measured throughput would be too low. That is why
#   a **block** of several steps is timed as a whole.
# - Now and then another program uses the machine, and a single slow step is enough to raise the mean time. So
#   time several blocks and take the **median**, which is barely affected by one slow block.

# %% exercise="throughput" todo="3.1" minutes=10 difficulty=2 points=2
from manyhands.batch_size.scaling import throughput

# %% check="3.1" tags=["nbval-check-output"]
check.throughput(throughput)

# %% [markdown]
# Now measure the throughput for batch sizes from 1 to 8192. On a CPU there is nothing to synchronise with. The
# cell below warms up for half a second. Then it measures all sizes in turn, eight times over, every other time
# in reverse, so that a machine that is busy for a while does not spoil one size alone. Of the eight turns of a
# size it keeps the fastest, because other programs can slow a turn down but never speed it up.
#
# The yardstick is the shortest step of all. A step with a single image has the least work, so it cannot truly
# take longer than that one, even if it was measured so. If every step were as short, the throughput would
# grow by a factor of 256 from batch 1 to batch 256: this is the **ideal**. What will the factor really be?

# %%
gain = None  # your number

# %% answer="true"
gain = 60


# %%
batches = [2**k for k in range(14)]
more = data._replace(  # the same images again and again, so that there are enough for a batch
    train_inputs=data.train_inputs.repeat(9, 1, 1, 1), train_labels=data.train_labels.repeat(9)
)
counts = {"warm_up": 2, "blocks": 3, "steps": 3}

if check.ready("3.1"):
    steps = {batch: Training(more, batch, 0.1, seed=1).step for batch in batches}
    start_s = time.perf_counter()
    while time.perf_counter() - start_s < 0.5:
        steps[1]()
    speed = dict.fromkeys(batches, 0.0)
    for order in 4 * (batches, batches[::-1]):
        for batch in order:
            of_turn = throughput(steps[batch], batch, **counts, synchronize=lambda: None)
            speed[batch] = max(speed[batch], of_turn)
    shortest_s = min(batch / speed[batch] for batch in batches)
    for batch in (1, 32, 256, 1024, 8192):
        step_us = 1e6 * batch / speed[batch]
        print(f"batch {batch:4}: {speed[batch]:9,.0f} images/s, a step takes {step_us:5.0f} us")
    score("gain of batch 256", gain, 256, speed[256] * shortest_s, word="ideal")
    assert all(speed[batch] <= 1.001 * batch / shortest_s for batch in batches)
    assert speed[8192] < 0.5 * 8192 / shortest_s, "the curve bends"

# %%
if check.ready("3.1"):
    figure, ax = figures.new_figure()
    throughput_curve(ax, speed, shortest_s)
    figures.show(
        figure, "Throughput against batch size: a rise that falls more and more below the ideal."
    )

# %% [markdown]
# At first a step with twice the batch takes hardly more time, because most of a small step is spent on
# starting operations. Then the processor fills up and the curve bends away from the ideal. In the end twice
# the batch takes about twice as long, and the throughput no longer grows, or even falls. (If your curve
# falls steeply in the middle, other programs used the core: only short steps fit between them.) A GPU has
# many more arithmetic units to fill than a CPU core, so its curve bends later, but it has the same shape.
#
# Once one processor is full, add a second one: with a batch of its own on each processor, the throughput
# grows with the number of processors, as far as the network between them allows. A climate study, for example,
# trained a network called Tiramisu on 5,300 GPUs, and their throughput was 79.0 % of 5,300 times that of one
# GPU. Another network, DeepLabv3+, ran on 27,360 GPUs with an efficiency of 90.7 % (Kurth et al. 2018). So, as
# far as images per second are concerned, the batch can grow almost without limit. Does a larger batch also
# save steps?

# %% [markdown]
# ## 2. How many steps to the target?
#
# How many steps does training take to reach a **target**, here 93 % of the validation images classified
# correctly? The accuracy jumps up and down from step to step, so one good evaluation may be luck. That is why
# the target counts as reached only after several good evaluations in a row. Their number is called the
# **patience**, and in this lesson it is 2.

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
# In this first try the large batches needed fewer steps but more images, and each batch size had a
# different learning rate. The learning rate matters as much as the batch size: the gradients of large
# batches have less noise (lesson 01), so they allow larger learning rates. If all batch sizes shared one
# learning rate, you would mostly measure how well it suits each of them. That is why each batch size gets
# **its own best learning rate** from a grid of learning rates, and each setting is tried with several
# random seeds.
#
# A learning rate counts as good only if **all** seeds reach the target with it, because a mean over the
# successful seeds alone would favour reckless learning rates.

# %% exercise="best_rate" todo="3.3" minutes=10 difficulty=1 points=1
from manyhands.batch_size.scaling import best_rate

# %% check="3.3" tags=["nbval-check-output"]
check.best_rate(best_rate)

# %% [markdown]
# Now run the sweep over 9 batch sizes, 6 learning rates and 3 seeds. Two ranks share the batch sizes by means
# of `my_share` from lesson 00. The function `tune` does what you would do by hand: it tries each learning
# rate with each seed, and it abandons a learning rate when a seed takes more than twice the steps of the best
# learning rate so far. It begins with the learning rate that was best for the rank's previous batch size, and
# goes on to those ever farther from it, so most bad ones are abandoned early and not all of the 162 training
# runs are needed.
#
# Predict before you start: by which factor do the steps shrink from batch 4 to batch 8, and by which from
# batch 64 to 128? (The cell calls a factor of 2 "ideal", because it would mean perfect scaling: twice the
# batch, half the steps.)

# %%
from_4_to_8, from_64_to_128 = None, None  # your numbers: steps before / steps after

# %% answer="true"
from_4_to_8, from_64_to_128 = 1.8, 1.2

# %%
RATES, SEEDS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6), (1, 2, 3)
sizes = [2**k for k in range(9)]


def sweep_share():
    torch.set_num_threads(1)
    tuned, guess = {}, RATES[0]
    for batch in my_share(sizes, dist.get_rank(), dist.get_world_size()):
        nearest = sorted(RATES, key=lambda rate: abs(math.log(rate / guess)))
        tuned[batch] = tune(data, batch, nearest, SEEDS, TARGET, 4000)
        guess, _ = best_rate(tuned[batch])
    return tuned


if check.ready("3.3"):
    found = {}
    for share in run_ranks(sweep_share, 2, timeout_s=150):
        found |= share
    best = {batch: best_rate(found[batch]) for batch in sizes}
    num_trainings = sum(len(seeds) for by_rate in found.values() for seeds in by_rate.values())
    print(f"the budget of this sweep: {num_trainings} training runs")
    for batch, (rate, mean) in best.items():
        steps = found[batch][rate]
        print(f"batch {batch:3}: {mean:6.0f} steps ({min(steps)} to {max(steps)}) at rate {rate}")
    score("from 4 to 8", from_4_to_8, 2, best[4][1] / best[8][1], word="ideal")
    score("from 64 to 128", from_64_to_128, 2, best[64][1] / best[128][1], word="ideal")
    assert best[1][1] / best[4][1] > 2 * best[64][1] / best[256][1]
    assert all(rate not in (RATES[0], RATES[-1]) for batch, (rate, _) in best.items() if batch > 1)

# %% [markdown]
# Look at the learning rates first. If the best one is at an end of the grid, a wider grid might contain a
# better one. Here this concerns batch 1 at most: its best learning rate may be the smallest of the grid, and
# then a still smaller one might save some steps.
#
# With the smallest batches, twice the batch needs about half the steps, so it takes the same number of
# images and, with enough processors, half the time. From batch 4 to 8 the factor may already fall short of
# 2, partly by chance. With the largest batches, twice the batch needs almost as many steps as before, and
# three seeds can hardly tell the remaining differences from chance. A simple formula covers both ends:
#
# $$\text{steps} = \text{least steps} \cdot \left(1 + \frac{\text{critical batch}}{\text{batch}}\right)$$
#
# For a huge batch this formula gives the **least steps**: the gradient has almost no noise left, but training
# still has to go all the way to the target. At the **critical batch** training takes twice the least steps.
#
# The least steps and the critical batch are all that this lesson needs to know about a task: section 5
# predicts the critical batch, and section 7 uses both numbers to choose how many processors to use. Now fit
# them to your sweep.

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
    assert -slope < -0.7 and 8 < critical < 64
    figure, ax = figures.new_figure(7, 4)
    figures.steps_by_batch(ax, results, least, critical)
    figures.show(
        figure, "Steps to the target against batch size, log-log: a slope of -1, then level."
    )

# %% [markdown]
# Read the figure from left to right. The green part shows almost **perfect scaling**: the slope is close to
# -1 (the formula itself has a slope of about -0.9 there). Then come **diminishing returns**, where more
# images in a step still help, but less than they cost. The orange part is the **plateau**, where a larger
# batch saves hardly anything. The borders between them, at a quarter of the critical batch and at four times
# the critical batch, are a convention: where the orange part begins, training still takes 1.25 times the
# least steps.
#
# The same three regimes were found for nine other pairs of networks and data, up to Transformers and ImageNet
# (Shallue et al. 2019). Only the position of the bend differs: it is at some tens of samples here, and at up
# to many thousands there.

# %% [markdown]
# ## 3. The same number of epochs
#
# Many people change the batch size and leave the number of **epochs** as it was. What happens then? Train
# for 4 epochs with different batches, each at its own best learning rate, and look at the error on the
# images that were trained on as well as on the validation images. If a large batch found solutions that
# generalise badly, its training error would be low and its validation error high. Is that what happens?

# %%
EPOCHS = 4


def errors_of(batch, seed):
    """The training error and the validation error after each epoch."""
    training = Training(data, batch, best[batch][0], seed)
    errors = []
    for _ in range(EPOCHS):
        for _ in range(len(data.train_inputs) // batch):
            training.step()
        right = training.accuracy_on(data.train_inputs, data.train_labels)
        errors.append((1 - right, 1 - training.accuracy()))
    return errors


if check.ready("3.3"):
    epochs = list(range(1, EPOCHS + 1))
    train_curves, valid_curves = {}, {}
    for batch in (4, 16, 64, 256):
        errors = [errors_of(batch, seed) for seed in SEEDS]
        train = [fmean(one[epoch][0] for one in errors) for epoch in range(EPOCHS)]
        valid = [fmean(one[epoch][1] for one in errors) for epoch in range(EPOCHS)]
        train_curves[f"batch {batch}"] = (epochs, train)
        valid_curves[f"batch {batch}"] = (epochs, valid)
        num_steps = EPOCHS * (len(data.train_inputs) // batch)
        told = f"error {train[-1]:.3f} in training, {valid[-1]:.3f} in validation"
        needed = f"{num_steps:3} steps, where the target takes {best[batch][1]:.0f}"
        print(f"batch {batch:3}: {EPOCHS} epochs are {needed}: {told}")
    assert num_steps < 0.5 * best[batch][1], "batch 256 is far from its target"
    assert train_curves["batch 256"][1][-1] > 2 * train_curves["batch 4"][1][-1]
    assert valid_curves["batch 256"][1][-1] > 2 * valid_curves["batch 4"][1][-1]
    figure = errors_by_epoch(train_curves, valid_curves)
    figures.show(figure, "Training and validation error by epoch: both are higher for batch 256.")

# %% [markdown]
# "Large batches are less accurate", one often reads. Compare the two panels: where the validation error of a
# large batch is high, its training error is high as well. So the network has not learnt the wrong thing; it
# has not yet learnt enough, because in the same number of epochs a large batch takes fewer steps, and at some
# point too few: batch 256 gets only a fraction of the steps that it needs for the target. (Its error may even
# rise from one epoch to the next. The learning rate that is best for reaching the target is so high that the
# error jumps up and down for the first dozens of steps.) This is the simplest reason for the claim. With very
# large batches there can be another one: the training error is low, and yet the validation error is higher
# than with small batches (lesson 02 looks at the minima that such training ends in).
#
# There are four levers against the trouble with large batches, and later you will build a remedy for each:
#
# | lever | idea | where |
# |---|---|---|
# | learning rate | with fewer steps, each has to go further; less noise allows it, but not from the first step on | the rules and the warm-up: [lesson 07](07_large_batch.ipynb), TODO 7.1 to 7.3; the largest rate that works: [lesson 08](08_layerwise.ipynb), TODO 8.1 |
# | noise in the gradient | a large batch averages away the noise of a small one; put it back | noise on each sample's loss: TODO 7.4; ghost batch norm: TODO 7.5 |
# | batch size and length of training | start with a small batch and let it grow, or allow a large one more epochs | growing batch: TODO 7.7; longer training: lesson 07, section 6 |
# | learning algorithm | choose the step of each layer by its own weights and gradients | LARS, LARC, LAMB, NovoGrad: TODO 8.2 to 8.5 |

# %% [markdown]
# ## 4. Batch times replicas
#
# What is the batch size on several processors? Each processor trains a copy of the model, called a
# **replica**, on a batch of its own. The gradients of all replicas are averaged, and all replicas take the
# same step. Since the loss is a mean over images, the mean of the gradients of 4 batches of 8 is the gradient
# of one batch of 32. (Layers that mix the images of a batch, such as lesson 07's batch norm, are an
# exception.) So the batch size that determines the number of steps is the
#
# $$\text{global batch} = \text{batch} \times \text{replicas}$$
#
# Now write the averaging. `dist.all_reduce(tensor)` adds up the tensors of all ranks and overwrites each of
# them with the sum. (As in lesson 02, a `group` names the ranks that take part; pass it on.) Also return
# one more number, the mean of the squared lengths of the ranks' own gradients. Noise makes a gradient
# longer, so section 5 can work out from this number how much noise there is.
#
# The cell after the check runs the same training on 1, 2 and 4 ranks, each time with a global batch of 32.
# Will the number of steps change?

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
        print(f"{world_size} rank(s) with {own:2} images each: {told}")
    torch.testing.assert_close(runs[1][1][:20], runs[4][1][:20], rtol=1e-3, atol=1e-5)

# %% [markdown]
# The training is the same, whether one rank has all 32 images or four have 8 each. (Numbers added up in
# another order give a sum that differs in its last digits, so after many steps the runs may drift apart a
# little. Here training stops at the first good evaluation, without patience, so do not compare its steps with
# those of section 2.) Lesson 05 makes this method fast as well.

# %% [markdown]
# ## 5. Predict the critical batch
#
# The sweep was expensive, as its budget shows. Can the critical batch be predicted from far fewer training
# runs?
#
# In the plateau the gradient of a batch is nearly the **true gradient**, which is the mean over all samples,
# but with small batches it is mostly noise. So the bend should be where noise and true gradient are equally
# strong. In lesson 01 the noise of a batch had the variance $V / \text{batch}$, where $V$ is the mean squared
# distance of a single sample's gradient from the true one. This variance equals the squared length of the
# true gradient at
#
# $$\text{batch} = \frac{V}{|\text{true gradient}|^2}$$
#
# This number is the **noise scale**. The gradient of one batch shows neither $V$ nor the true gradient. But
# the squared lengths of gradients can be measured, and four ranks give you these at two batch sizes at
# almost no extra cost: for each rank's own 8 images, and for the mean over all 32.
#
# Derive the noise scale from these squared lengths, on paper first. The gradient of a batch is the true
# gradient plus noise, which is zero on average. What is the squared length of this sum, on average? How many
# unknowns does your answer have, and how many equations do two batch sizes give?

# %% exercise="noise_scale" todo="3.6" minutes=20 difficulty=3 points=2
from manyhands.batch_size.scaling import noise_scale

# %% check="3.6" tags=["nbval-check-output"]
check.noise_scale(noise_scale)

# %% [markdown] answer="true"
# **The derivation.** Call the true gradient $G$, and the gradient of a batch of $B$ samples $G + e$. Its
# squared length is $|G|^2 + 2\,G \cdot e + |e|^2$. The noise $e$ is zero on average, so the term in the
# middle vanishes on average, and the average of the last term is the variance $V / B$:
#
# $$\text{average of } |G + e|^2 = |G|^2 + \frac{V}{B}$$
#
# Let $m_b$ and $m_B$ be the mean squared lengths at the small batch $b$ and at the large one $B$. The two
# batch sizes give two equations with the unknowns $|G|^2$ and $V$. If you subtract one equation from the
# other, $|G|^2$ drops out. If you first multiply each by its batch size and then subtract, $V$ drops out:
#
# $$V = \frac{m_b - m_B}{1/b - 1/B} \qquad |G|^2 = \frac{B\,m_B - b\,m_b}{B - b}$$
#
# Both results are differences of noisy numbers, and the noise scale is their ratio. That is why the squared
# lengths of a whole training are averaged before anything is divided.

# %% [markdown]
# Now predict the critical batch from three training runs, each on four ranks, at the best learning rate for 32
# images. What will be the ratio of the noise scale to the critical batch of the sweep? An exact prediction
# would give 1.

# %%
factor = None  # your number

# %% answer="true"
factor = 1.5

# %%
if check.ready("3.3", "3.4", "3.5", "3.6"):
    rate, _ = best[32]
    section_4 = noise_scale(*runs[4], 8, 32)
    print(f"section 4's training, learning rate 0.4: noise scale {section_4:.0f}")
    small_squares, large_squares = [], []
    for seed in SEEDS:
        own_squares, mean_squares = run_ranks(train_on_ranks, 4, 32, rate, seed, timeout_s=60)[0]
        of_seed = noise_scale(own_squares, mean_squares, 8, 32)
        print(f"seed {seed}, learning rate {rate}: noise scale {of_seed:.0f}")
        small_squares += own_squares
        large_squares += mean_squares
    scale = noise_scale(small_squares, large_squares, 8, 32)
    assert rate == 0.4 or (section_4 > scale) == (rate > 0.4)
    print(f"noise scale {scale:.0f}, critical batch by the sweep {critical:.0f}")
    score("noise scale / critical batch", factor, 1, scale / critical)
    assert 1 / 4 < scale / critical < 4, "the right order of magnitude"
    figure, ax = figures.new_figure(7, 4)
    figures.steps_by_batch(ax, results, least, critical, scale)
    figures.show(figure, "Steps against batch size with the critical batch and the noise scale.")

# %% [markdown]
# Once the learning rate is known, three training runs give the order of magnitude of a number for which the
# sweep needed many times as many. The authors of the method use the noise scale to tell apart tasks whose
# largest useful batches differ by orders of magnitude (McCandlish et al. 2018). The prediction is rough,
# here usually within a factor of two or so, for three reasons. The noise scale changes during training, so
# one number cannot fit all of it. It depends on the learning rate, as the first line shows beside the next
# three if their learning rates differ: with larger steps, training bounces between the walls of the valley,
# where the gradient is long, and the noise scale comes out smaller. And noise in a steep direction of the
# loss does more harm than noise in a flat one, a difference that a single length cannot show. Still, the
# noise scale tells tens from thousands, and this is what you need to know before you ask for 64 GPUs.

# %% [markdown]
# ## 6. How long does it take?
#
# The time you wait is the number of steps times the time of a step, so here both halves of the lesson come
# together. On this one core, which batch size reaches the target in the shortest time?

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
    powers_of_two(ax, sizes)
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter("{x:g}")
    figures.show(
        figure, "Time to the target falls, then levels off or rises; time per epoch falls."
    )
    quickest = min(seconds, key=seconds.get)
    print(f"fastest: batch {quickest} with {seconds[quickest]:.3f} s; you said {fastest}")
    assert seconds[quickest] < 0.5 * seconds[1]

# %% [markdown]
# ### Does a shorter epoch mean faster training?
#
# "A larger batch takes less time for an epoch, so it trains faster": is this true? The first half of the
# sentence is, up to the bend of section 1, as the dashed line shows. But you do not wait for an epoch; you
# wait for the target. The time to the target, the solid line, falls only as long as a larger batch reduces
# the number of steps more than it lengthens each step; after that it levels off or rises. So two bends decide
# which batch is the fastest: the bend of the steps, which belongs to the task, and the bend of the
# throughput, which belongs to the machine. Of every speed-up, ask: to reach **what**?

# %% [markdown]
# ## 7. Time or money?
#
# On one processor, a larger batch ends up costing time. With many processors it saves time, and the question
# becomes what this costs. You **wait** for steps, and you **pay** for images: an image takes the same work
# whichever processor trains on it. How many images does the target take? Multiply the formula for the steps
# by the batch:
#
# $$\text{images} = \text{least images} \cdot \left(1 + \frac{\text{batch}}{\text{critical batch}}\right)
# \qquad \text{least images} = \text{least steps} \cdot \text{critical batch}$$
#
# This is the formula for the steps with the fraction turned over. A tiny batch needs the least images and a
# huge one the least steps. The critical batch needs twice the least steps and twice the least images, which
# is a fair compromise. How many times as many images does the target take with batch 256 as with batch 1?

# %%
more_images = None  # your number

# %% answer="true"
more_images = 10

# %%
if check.ready("3.3", "3.4"):
    used = {batch: steps * batch for batch, (_, steps) in best.items()}
    by_formula = (256 + critical) / (1 + critical)
    score("images, batch 256 / batch 1", more_images, by_formula, used[256] / used[1])
    assert used[256] > 4 * used[1]
    figure, ax = figures.new_figure(7, 4.4)
    trade_off(ax, results, least, critical)
    figures.show(
        figure, "Images against steps to the target: one falls only where the other rises."
    )

# %% [markdown]
# All the batch sizes lie near one curve. Begin at its right end, with batch 1. There the curve is nearly
# flat, because a larger batch saves many steps and costs only a few more images. At the critical batch the
# curve turns, and its left end is nearly upright: many more images save hardly any steps. Apart from chance,
# no batch size gets you below the curve. So the only question is which point on it you want, and the answer
# depends on whether you are short of money or of time. Someone who pays for processor hours stays at or below
# the critical batch. Someone with a deadline goes above it as far as the deadline demands, and no farther.
#
# This decision is the next exercise. Each processor has a batch of its own, a step takes as long with many
# processors as with one (lesson 05 comes close to this), and there is a time limit. What is the smallest
# number of processors that meets the limit? This number is also the cheapest, since every further processor
# enlarges the global batch and so adds to the images.

# %% exercise="fewest_processors" todo="3.7" minutes=15 difficulty=2 points=1
from manyhands.batch_size.scaling import fewest_processors

# %% check="3.7" tags=["nbval-check-output"]
check.fewest_processors(fewest_processors)

# %% [markdown]
# Now use it with your own numbers. Suppose that each processor is as fast as this one and has a batch of 8.
# No number of processors gets below the time of the least steps, so the time limits are given as multiples of
# it. Watch how many processor seconds it costs to come close to it.

# %%
if check.ready("3.1", "3.3", "3.4", "3.7"):
    step_s = 8 / speed[8]
    for limit in (4, 2, 1.25, 1.05, 0.95):
        limit_s = limit * least * step_s
        number = fewest_processors(least, critical, 8, step_s, limit_s)
        if number is None:
            print(f"{limit:4} times the time of the least steps: no number of processors will do")
            continue
        took_s = least * (1 + critical / (8 * number)) * step_s
        told = f"processors: {number:2}, {took_s:.3f} s, {number * took_s:.3f} processor seconds"
        print(f"{limit:4} times the time of the least steps: {told}")

# %% [markdown]
# Each further step towards the least time costs more than the one before. By the formula, the price of a
# limit of $a$ times the least time is about $a / (a - 1)$ times the least images. That is twice the least at
# $a = 2$, five times at 1.25, and 21 times at 1.05. (Your numbers may lie a little above this, because the
# number of processors is rounded up to a whole number.)

# %% [markdown]
# ## 8. Other models and other data
#
# Does all this hold with more seeds, larger batches, other models and other data? The job of this lesson runs
# such sweeps, and four of its runs are stored with the course: the network of this notebook with more seeds,
# the same kind of network on MNIST's larger images, a small convolutional network (a CNN, whose weights are
# used at many places of the image) on MNIST as well, and a Transformer on text, as in most later lessons. For
# the Transformer a sample is a sequence of 32 characters, and the accuracy is the share of next characters
# that it predicts correctly.
#
# (Shallue et al. also trained a CNN on Fashion-MNIST, pictures of clothes that have the same format and size
# as MNIST's digits. No run of it is stored here, because the data could not be fetched where the runs were
# made. With `--data fashion-mnist` the job makes the panel of the clothes, once `prepare_data.py` has fetched
# them.)
#
# Before you look: will the four curves bend at the same batch size, and does the noise scale predict where?

# %%
names = {
    "digits": "digits, MLP",
    "mnist": "MNIST, MLP",
    "cnn": "MNIST, CNN",
    "transformer": "text, Transformer",
}
stored = {}
for file, name in names.items():
    run = storage.stored("batch_size", file)
    bend, predicted = run["critical_batch"], run["noise_scale"]
    told = f"critical batch {bend:.0f}, noise scale {predicted:.0f}"
    runs_made = f"{run['num_trainings']} training runs"
    print(f"{name}, {runs_made}: least steps {run['least_steps']:.0f}, {told}")
    assert 1 / 2 < predicted / bend < 2
    stored[name] = run
assert sorted(stored.values(), key=lambda run: run["noise_scale"]) == sorted(
    stored.values(), key=lambda run: run["critical_batch"]
)
figures.show(sweeps(stored), "The stored sweeps of four models, each with fit and noise scale.")

# %% [markdown]
# All four curves have the same shape. On the left twice the batch takes about half the steps, then the curve
# bends, and on the right it is nearly level. (Only the end of the Transformer's slope is visible, because
# even batch 1 is not far from its bend.) But the curves bend at different batch sizes: at about 5 sequences,
# which are some 150 characters, at somewhat more than 20 digits, and at more than 40 of MNIST's images. The
# noise scale, which is computed from gradients alone, puts the four in the same order, and it is within a
# factor of two of each critical batch.
#
# Do not carry these numbers over to other training runs. A harder target is reached later, when the noise scale
# has grown, and with momentum the perfect scaling extends to larger batches than with plain gradient descent
# (Shallue et al. 2019). What you can carry over is the method: look at the noise of your own gradients.
#
# A sweep is only as good as its grid of learning rates, so look at the ends of the grid. In the three panels
# of images, the best learning rate of the smallest batch was the smallest of the grid; in the panel of text,
# the best learning rate of batches 4 and 64 was the largest. In these cases a wider grid might save some
# steps. (MNIST's panels begin at batch 2 and 4, because with smaller batches no learning rate of the grid
# reached the target within 2,500 steps.)

# %% [markdown]
# ## 9. Run it as a job
#
# Now run your own sweep: the job uses your `best_rate`, `fit_steps` and `noise_scale`. A sweep consists of
# many independent training runs, so on a cluster `sbatch --array=0-9 sbatch/batch_size.sbatch` splits it into ten
# jobs, one for each batch size. Here it is a single small job, with batch sizes up to 128, one network for each
# setting and a target of 90 %. A training that takes more than 600 steps counts as having missed the target.

# %%
if check.ready("3.3", "3.4", "3.6"):
    check.keep()
    flags = "--networks 1 --largest 128 --target 0.9 --rates 0.2 0.4 0.8 --max-steps 600".split()
    folder = watch.run("../sbatch/batch_size.sbatch", "--impl", "mine", *flags)

# %%
if check.ready("3.3", "3.4", "3.6"):
    own = storage.read_json(folder / "result.json")
    fit = (own["least_steps"], own["critical_batch"], own["noise_scale"])
    figure, ax = figures.new_figure(7, 4)
    figures.steps_by_batch(ax, own["batches"], *fit)
    figures.show(figure, "The job's sweep: steps against batch, with the fit and the noise scale.")

# %% [markdown]
# With a single network for each setting the points scatter, and so do the critical batch and the noise
# scale. The stored runs above used six networks for each setting (digits) and three (the others).

# %%
check.summary()

# %% [markdown]
# ## Recap
#
# You can now
#
# - measure throughput with a warm-up, synchronised blocks and a median,
# - compare batch sizes fairly, with a learning rate of its own for each, several seeds, a target and a stated
#   budget,
# - name the three regimes, and fit the critical batch,
# - say what the global batch is, and show that it does not matter on how many ranks it is spread,
# - predict the critical batch from the gradients of a single training on several ranks,
# - say what a larger batch costs in images, and choose the number of processors for a deadline.
#
# **Questions**
#
# <details><summary>The critical batch is 20, and you go from batch 10 on one GPU to 8 GPUs with batch 10 each. How many times fewer steps does the formula promise?</summary>
#
# The steps fall from 1 + 20/10 = 3 times the least steps to 1 + 20/80 = 1.25 times. So there are 2.4 times
# fewer of them, with 8 times the GPUs.
# </details>
#
# <details><summary>Somebody times 100 steps on a GPU without synchronising and gets 2 million images per second. What did they measure?</summary>
#
# They measured how fast the CPU can hand work to the GPU. The GPU was still working when the clock was
# read.
# </details>
#
# <details><summary>Your deadline is 1.5 times the time of the least steps. How many times the least images do you pay?</summary>
#
# 1 + critical/batch = 1.5, so the batch is twice the critical one, and 1 + batch/critical = 3. You pay for
# three times the least images.
# </details>
#
# <details><summary>Late in a training the gradient is short and the noise is as large as ever. What does that do to the critical batch?</summary>
#
# The critical batch grows, because it is V divided by a smaller squared length. So a larger batch makes
# sense later in training (lesson 07 lets the batch grow).
# </details>
#
# **Sources**: McCandlish et al. 2018, "An Empirical Model of Large-Batch Training",
# https://arxiv.org/abs/1812.06162 (section 2.3 has the trade-off between steps and images); Shallue et al.
# 2019, "Measuring the Effects of Data Parallelism on Neural Network Training",
# https://arxiv.org/abs/1811.03600; Kurth et al. 2018, "Exascale Deep Learning for Climate Analytics",
# https://doi.org/10.1109/SC.2018.00054 (P100 and V100 GPUs; the efficiency of the second in 32 bits).
