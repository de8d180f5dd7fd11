# ---
# manyhands: {title: Large batches, goal: "Train with a batch far beyond the critical one, derive and test the rules for its learning rate, and find by runs with error bars which remedies work", job: {flags: "--seeds 2 --epochs 4 --target 0.9", loss: [0.01, 0.03]}}
# ---

# %% [markdown]
# # 07 Large batches
#
# Eight times as many GPUs can process eight times as many images per second, but only if each of them has
# enough to do, so the global batch grows with the number of GPUs. Lesson 03 showed what happens then: beyond
# the critical batch, a larger batch no longer saves steps in proportion. This lesson starts where lesson 03
# ended, with a batch that is about ten times as large as the critical one of lesson 03's network, and asks
# **what can be done about it**.
#
# There are four levers, and every remedy in this lesson and the next pulls one of them:
#
# | lever (lesson 03) | remedies in this lesson | in lesson 08 |
# |---|---|---|
# | the learning rate | a tuned rate, root rule, linear rule, gradual warm-up | range test |
# | the noise in the gradient | noise on each sample's loss, ghost batch norm | |
# | the batch itself | a batch that grows during training, longer training | |
# | the learning algorithm | batch norm | LARS, LARC, LAMB, NovoGrad |
#
# The remedies are compared on the same images and with the same target accuracy, and unless a remedy's name
# says otherwise, with the same network and the same number of images. Each of them is trained several times
# with different seeds, because a single run cannot tell a remedy from luck.
#
# ![Sixteen times the batch leaves sixteen times fewer steps; four levers: the learning rate, the noise, the batch, the algorithm](figures/large_batch_levers.svg)

# %%
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, variance
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from manyhands.checks import large_batch as check, score
from manyhands.data import images
from manyhands.first_job.planning import my_share
from manyhands.instruments import figures
from manyhands.instruments.ledger import Ledger
from manyhands.jobs import watch
from manyhands.large_batch import remedies
from manyhands.large_batch.norms import AnyBatchNorm
from manyhands.large_batch.rates import Setting
from manyhands.large_batch.remedies import REMEDIES, Outcome, Parts, Remedy, Task, network
from manyhands.ranks import lab
from manyhands.ranks.lab import run_ranks
from manyhands.training import storage

lab.warm_up()
torch.set_num_threads(1)
data = images.load("embedded")
print(f"torch {torch.__version__}; everything here runs on the CPU, ranks talk through gloo")
print(data.note)

# %% [markdown]
# ## 1. How much does a large batch cost?
#
# The task is that of lesson 03, with a slightly larger network: two hidden layers of 64 units, trained by
# plain stochastic gradient descent. The **reference** has 16 images in a step and a learning rate of 0.4,
# which section 2 finds to be its best one. Unless its name says otherwise, a rival has 256 images in a step
# and sees each image 12 times, as the reference does. This takes 973 steps for the reference and 61 steps
# for a rival. In both cases the learning rate falls to a quarter after half of the epochs and again after
# three quarters of them.
#
# `compare` trains with each of the named ways and with three seeds; two ranks share the trainings.

# %%
TASK, SEEDS = Task(small=16, large=256, rate=0.4, epochs=12, target=0.95), (1, 2, 3)


def train_share(ways, parts, seeds):
    torch.set_num_threads(1)
    own = my_share([(n, s) for n in ways for s in seeds], dist.get_rank(), dist.get_world_size())
    found = []
    for name, seed in own:
        curve = []

        def look(seen, accuracy, model, curve=curve):
            curve.append((seen, accuracy))

        found.append((name, remedies.train(data, ways[name], TASK, seed, parts, look), curve))
    return found


def compare(ways, parts=remedies.COURSE, seeds=SEEDS):
    """Name -> the outcomes of all seeds, and name -> their curves."""
    outcomes, curves = {name: [] for name in ways}, {name: [] for name in ways}
    for share in run_ranks(train_share, 2, ways, parts, seeds, timeout_s=120):
        for name, outcome, curve in share:
            outcomes[name].append(outcome)
            curves[name].append(curve)
    return outcomes, curves


def report(outcomes):
    for name, found in outcomes.items():
        values = [one.accuracy for one in found]
        steps = [one.steps for one in found if one.steps]
        missed = len(found) - len(steps)
        reached = f"missed by {missed} of {len(found)}" if missed else f"{fmean(steps):4.0f} steps"
        spread = f"{fmean(values):6.1%} ({min(values):.1%} to {max(values):.1%})"
        print(f"{name:38} accuracy {spread:26} target: {reached}")


gap, gap_curves = compare({name: REMEDIES[name] for name in ("small batch", "large batch")})
report(gap)
best_large = max(one.accuracy for one in gap["large batch"])
assert best_large + 0.1 < min(one.accuracy for one in gap["small batch"])

# %% [markdown]
# The gap is large, and one reason for it is simple: the large batch takes sixteen times fewer steps, and at
# the same learning rate its steps are no longer than before. If you had only the two accuracies, you might
# conclude that large batches make worse networks, but first of all the large batch has trained for *fewer
# steps*. A remedy that keeps to the large batch and to the 12 epochs has to achieve with 61 steps what the
# reference achieves with 973. That this can be done is not obvious here, and section 5 will show it, with a
# network that is built differently.

# %% [markdown]
# ## 2. The square root, derived and tested
#
# How should the learning rate change when the batch grows? One answer starts from noise. The gradient of a
# batch is a mean over $M$ samples, so a step of stochastic gradient descent with learning rate $\eta$ has the
# covariance
#
# $$\operatorname{Cov}(\eta \, \bar g) = \frac{\eta^2}{M} V,$$
#
# where $V$ is the covariance of the gradients of single samples. If the batch becomes $k$ times as large and
# the noise of a step is to stay the same, then $\eta$ has to grow by $\sqrt{k}$. This argument leads to the
# **root rule** (Hoffer et al. 2017).
#
# Start with the formula. To compare settings, one number is enough: the trace of the covariance, which is the
# sum of the variances of all components of the step.

# %% exercise="step_variance" todo="7.1" minutes=10 difficulty=1 points=1
from manyhands.large_batch.noise import step_variance

# %% check="7.1" tags=["nbval-check-output"]
check.step_variance(step_variance)

# %% [markdown]
# The rule itself is one line, and so is its rival, the **linear rule** (Goyal et al. 2017). The argument for
# it is that one step with a batch $k$ times as large replaces $k$ steps with the learning rate $\eta$, so it
# should use the learning rate $k \eta$.

# %% exercise="scaled_rate" todo="7.2" minutes=5 difficulty=1 points=1
from manyhands.large_batch.rates import scaled_rate

# %% check="7.2" tags=["nbval-check-output"]
check.scaled_rate(scaled_rate)

# %% [markdown]
# An argument is worth more when its prediction has been tested. The next cell takes the gradients of 600
# single images at the start of training, draws 300 batches of each size from them, and compares the variance
# of the 300 steps with the formula. Before you run it: by which factor does the variance of a step grow under
# the *linear* rule when the batch grows from 16 to 256?

# %%
growth = None  # your number

# %% answer="true"
growth = 16


# %%
def gradient_of(model, chosen):
    loss = nn.functional.cross_entropy(model(data.train_inputs[chosen]), data.train_labels[chosen])
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


if check.ready("7.1", "7.2"):
    torch.manual_seed(1)
    model = network(data, Remedy(), TASK, remedies.COURSE)
    single = torch.stack([gradient_of(model, [index]) for index in range(600)])
    sizes, measured, predicted = (16, 32, 64, 128, 256), {}, {}
    drawn = {}
    for size in sizes:
        means = [single[torch.randint(600, (size,))].mean(0) for _ in range(300)]
        drawn[size] = torch.stack(means).var(dim=0).sum().item()
    for rule, name in (("none", "same rate"), ("root", "root rule"), ("linear", "linear rule")):
        rates = [scaled_rate(TASK.rate, size / 16, rule) for size in sizes]
        pairs = list(zip(sizes, rates, strict=True))
        predicted[name] = (sizes, [step_variance(single, size, rate) for size, rate in pairs])
        measured[name] = (sizes, [rate**2 * drawn[size] for size, rate in pairs])
    factors = {name: values[-1] / values[0] for name, (_, values) in measured.items()}
    score("growth under the linear rule", growth, 16, factors["linear rule"])
    worst = max(
        abs(found / wanted - 1)
        for name in measured
        for found, wanted in zip(measured[name][1], predicted[name][1], strict=True)
    )
    assert worst < 0.25
    print(f"largest difference between a drawn variance and the formula: {worst:.0%}")
    figure, ax = figures.new_figure(7, 3.4)
    names = ("batch size (images)", "variance of a step")
    figures.measured_and_predicted(ax, measured, predicted, *names)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:g}")
    figures.show(figure, "Variance of a step against batch: falls, stays level, or rises, by rule.")

# %% [markdown]
# The drawn batches follow the formula. With the same learning rate the variance of a step falls as the batch
# grows, with the root rule it stays level, and with the linear rule it grows in proportion to the batch. If
# keeping the noise were all that mattered, the question would be settled in favour of the root rule. But
# sixteen times fewer steps, each only four times as long, cover about a quarter of the reference's distance
# if the gradients are alike. The linear rule keeps the distance per image, and with it the height of lesson
# 01's balance, and lets the variance of a single step grow. Which of the two matters more is a question for
# runs.

# %% [markdown]
# ### Should a larger batch have a smaller learning rate?
#
# Some lectures say that a larger batch needs a *smaller* learning rate, in proportion to the batch, and the two
# rules above say that it needs a larger one. To settle the question, both batch sizes have to be tuned with
# the same care. Otherwise the factor between their learning rates means little: next to a
# reference at half of its best rate, any factor comes out twice as large.
#
# The next cell therefore sweeps the learning rate at batch 16 *and* at batch 256, with three seeds that the
# ranking does not use. It then divides the best rate at 256 by the best rate at 16, once for the means and
# once for each seed. Compare the result with the factors of the lectures (1/16), the root rule (4) and the
# linear rule (16).

# %%
TUNING = (4, 5, 6)
LARGE_FACTORS = (1 / 16, 1 / 4, 1 / 2, 1, 2, 4, 16)


def sweep(way, factors):
    """Learning rate -> the accuracy with each seed."""
    found = {}
    for rate in (factor * TASK.rate for factor in factors):
        task = Task(TASK.small, TASK.large, rate, TASK.epochs, TASK.target)
        values = [remedies.train(data, way, task, seed).accuracy for seed in TUNING]
        found[rate] = values
        spread = f"{fmean(values):6.1%} ({min(values):.1%} to {max(values):.1%})"
        size = TASK.small if way.is_small else TASK.large
        print(f"batch {size:3}, learning rate {rate:5.3f}: accuracy {spread}")
    return found


at_small, at_large = sweep(Remedy(is_small=True), (1 / 2, 1, 2)), sweep(Remedy(), LARGE_FACTORS)
best_small = max(at_small, key=lambda rate: fmean(at_small[rate]))
best_large = max(at_large, key=lambda rate: fmean(at_large[rate]))
by_seed = []
for number in range(len(TUNING)):
    pair = [max(swept, key=lambda rate: swept[rate][number]) for swept in (at_large, at_small)]
    by_seed.append(f"{pair[0] / pair[1]:g}")
print(f"best learning rates: {best_small:g} at batch 16, {best_large:g} at batch 256; ", end="")
print(f"their ratio: {best_large / best_small:g} (seed by seed {', '.join(by_seed)})")
smaller = [fmean(at_large[factor * TASK.rate]) for factor in LARGE_FACTORS[:4]]
assert fmean(at_small[TASK.rate]) > fmean(at_small[best_small]) - 0.015  # the reference is tuned
assert smaller == sorted(smaller)
assert 1 <= best_large / best_small < 4
assert fmean(at_small[2 * TASK.rate]) < fmean(at_small[TASK.rate]) - 0.05

# %% [markdown]
# The smaller learning rates are far worse, because the steps are few already and now become shorter as well.
# So the larger batch does not need a smaller learning rate. But it does not bear a much larger one either. With
# both sides tuned the best rate at batch 256 was twice that at batch 16 in our run, and with some seeds it is
# no larger at all. The root rule asks for at least twice as much, the linear rule for at least eight times.
# Lesson 03 tuned every batch size on another network, and there too the best rate at batch 256 was twice that
# at batch 16. Next to a reference at 0.1, a quarter of its best rate, the same runs with the large batch
# would have shown a factor four times as large.
#
# Why do both rules ask for too much? They are arguments about noise and distance, and neither of them knows
# that a step must not be longer than the curvature of the loss allows (lesson 01). Small batches, whose
# steps are noisy, reach a limit even earlier: twice its learning rate costs the reference much of its
# accuracy. The large batch bears that rate, but not four times as much. So less noise gives a larger batch
# some room above, though far less than the rules ask for.
#
# One caution remains. To keep all images for training, no validation images are set aside here (lesson 03
# does that), so the rates are chosen by the accuracy on the test images. That flatters both sides, which is
# good enough to compare them, but not to publish the accuracy. From now on, **tuned rate** stands for twice
# the reference's learning rate.

# %% [markdown]
# ## 3. Does it help to raise the learning rate gradually?
#
# At the start of training the weights are random and the curvature of the loss can be large, so long steps do
# the most damage there. A **gradual warm-up** therefore begins with the reference's learning rate and raises
# it along a straight line to the scaled one. Then the usual schedule takes over.

# %% exercise="warmed_up_rate" todo="7.3" minutes=10 difficulty=2 points=1
from manyhands.large_batch.rates import warmed_up_rate

# %% check="7.3" tags=["nbval-check-output"]
check.warmed_up_rate(warmed_up_rate)

# %% [markdown]
# The figure shows the schedules of the linear rule with and without a warm-up, and the table shows the
# accuracies of both rules. Watch whether the warm-up helps, and which of the two rules it helps.

# %%
RATES = ["scaled_rate", "warmed_up_rate"]


def own_parts(*names):
    """The course's parts, with your functions of these names in their places."""
    return Parts()._replace(**{name: globals()[name] for name in names})


if check.ready("7.2", "7.3"):
    epochs, high = [step / 10 for step in range(120)], scaled_rate(TASK.rate, 16, "linear")
    schedules = {}
    for name, warm_up in (("linear rule", 0), ("linear rule, warm-up", 3)):
        values = [warmed_up_rate(e, TASK.rate, high, warm_up, (6, 9), 0.25) for e in epochs]
        schedules[name] = (epochs, values)
    figure, ax = figures.new_figure(7, 2.8)
    figures.lines(ax, schedules, "epoch", "learning rate")
    figures.show(figure, "The learning rate over 12 epochs, with and without a warm-up.")
    rules = ("root rule", "root rule, warm-up", "linear rule", "linear rule, warm-up")
    ways = ("tuned rate", *rules)
    warm, _ = compare({name: REMEDIES[name] for name in ways}, own_parts(*RATES))
    report(warm)
    of_ways = {name: fmean(one.accuracy for one in found) for name, found in warm.items()}
    assert max(of_ways[name] for name in rules) < min(of_ways["tuned rate"], TASK.target)

# %% [markdown]
# Neither rule reaches the target, with or without a warm-up, and twice the reference's rate is better than
# both. A warm-up removes damage that is done *early*. Here the damage goes on for as long as the learning
# rate stays high, because 1.6 and 6.4 seem too large for this loss after the warm-up as well, and so the
# warm-up saves nothing. Keep this result in mind until section 5, where the root rule and its warm-up are
# used again, on a network that can bear the learning rate.

# %% [markdown]
# ## 4. Does it help to put the noise back?
#
# According to one view, the noise of small batches is useful by itself, because it shakes the weights out of
# sharp minima (lesson 02). If so, a large batch lacks something that can be put back: multiply the loss of
# each sample by a random number $z \sim N(1, \sigma^2)$. The mean gradient stays the same. Where noise
# dominates the gradient, the covariance of the gradient is multiplied by $1 + \sigma^2$, so
# $\sigma^2 = M / m - 1$ gives a batch of $M$ the noise of a batch of $m$. (The exact
# covariance is $((1 + \sigma^2) V + \sigma^2 \bar g \bar g^T) / M$, and where noise dominates, the second term
# is small.)
#
# This is an alternative to the root rule. Both restore the variance of a step, one by longer steps and the
# other by noisier gradients, so the noise belongs to the *unchanged* learning rate. Used together, they would
# make the variance $M / m$ times too large.

# %% exercise="noise_size noisy_mean" todo="7.4" minutes=15 difficulty=2 points=2
from manyhands.large_batch.noise import noise_size, noisy_mean

# %% check="7.4" tags=["nbval-check-output"]
check.noise_size(noise_size, noisy_mean)

# %% [markdown]
# Verify this on gradients of your own network: the mean is kept, and the covariance is restored. The loss of
# sample $n$ has gradient $g_n$, so the gradient of the noisy mean is the mean of $z_n g_n$. The cell draws 400
# such gradients at batch 256, with sigma chosen to match the noise of batch 16, and lists the variance of one
# *step* for five combinations of batch, learning rate and noise. The cell after it trains with this noise and
# without, at the same learning rate and with six seeds.

# %%
if check.ready("7.1", "7.2", "7.4"):
    sigma = noise_size(256, 16)
    draws = []
    for _ in range(400):
        chosen = torch.randint(600, (256,))
        weights = torch.ones(256, requires_grad=True)
        noisy_mean(weights, sigma).backward()  # the gradient of each loss is z / 256
        draws.append(weights.grad @ single[chosen])
    noisy = torch.stack(draws)
    true = single.mean(0)
    mean_error = (noisy.mean(0) - true).norm().item()
    restored = noisy.var(dim=0).sum().item()
    wanted = step_variance(single, 16, 1.0)
    print(f"sigma {sigma:.2f}")
    print(
        f"the mean gradient has norm {true.norm():.4f}; that of 400 draws is off by {mean_error:.4f}"
    )
    root = scaled_rate(TASK.rate, 16, "root")
    of_step = {
        "batch 16, same rate (the reference)": TASK.rate**2 * drawn[16],
        "batch 256, same rate": TASK.rate**2 * drawn[256],
        "batch 256, root rule": root**2 * drawn[256],
        "batch 256, same rate, noise": TASK.rate**2 * restored,
        "batch 256, root rule and noise": root**2 * restored,
    }
    for name, value in of_step.items():
        print(f"variance of a step, {name:36} {value:.4f}")
    assert mean_error < 6 * (wanted / 400) ** 0.5 and 0.6 < restored / wanted < 1.7
    reference, same, rooted, noised, both = of_step.values()
    assert same < reference / 10 and both > 8 * reference
    assert all(0.6 < one / reference < 1.7 for one in (rooted, noised))

# %%
if check.ready("7.4"):
    names = ("large batch", "gradient noise")
    with_noise, _ = compare(
        {name: REMEDIES[name] for name in names},
        own_parts("noise_size", "noisy_mean"),
        seeds=range(1, 7),
    )
    report(with_noise)
    begun = Task(TASK.small, TASK.large, TASK.rate, TASK.epochs / 16, TASK.target)
    first = [
        remedies.train(data, Remedy(is_small=True), begun, seed).accuracy for seed in range(1, 7)
    ]
    print(
        f"reference, a sixteenth of its steps: {fmean(first):.1%} ({min(first):.1%} to {max(first):.1%})"
    )
    plain, noisy_runs = ([one.accuracy for one in found] for found in with_noise.values())
    assert fmean(noisy_runs) < fmean(plain) + 0.03 and abs(fmean(noisy_runs) - fmean(first)) < 0.15

# %% [markdown]
# The mean is kept up to the scatter of 400 draws, and a step with noise has the variance of the reference's
# step, just as derived. Yet the noise brings no gain in accuracy, and in our runs it costs some. The table of
# variances says why. With this noise a step of 256 images is, in its mean and its variance, much like a
# step of the reference with 16 images. A training with noise should therefore resemble the reference that is
# trained for 61 steps only, and the last line confirms this: they are about equally good, although one of them
# processes sixteen times as many images.
#
# So on this network noise cannot make up for missing steps. Whether it makes *better* networks once there
# are enough steps is another question, on which these runs are silent. The study that proposed it trained
# for far longer (Hoffer et al. 2017), and section 6 trains longer, too, but without the noise.

# %% [markdown]
# ## 5. Can the network bear a higher learning rate? Batch norm
#
# **Batch norm** shifts and scales every channel of a layer to mean 0 and variance 1 over the batch, and then
# applies a learned scale and shift (Ioffe and Szegedy 2015). The idea was that the next layer then sees
# inputs whose distribution hardly moves while the layers below are learning. The original paper showed this
# effect by the 15th, 50th and 85th percentiles of one unit's input during training. The next cell records the
# same percentiles for one unit of your network, with and without the norm, with the small batch. Watch how
# far the three curves move.


# %%
def percentiles(norm):
    """The accuracy, and 15th, 50th, 85th percentile of a unit's input, four times an epoch."""
    rows = []

    def look(seen, accuracy, model):
        inputs = []
        last_relu = [layer for layer in model if isinstance(layer, nn.ReLU)][-1]
        handle = last_relu.register_forward_hook(lambda m, args, out: inputs.append(args[0]))
        model(data.train_inputs[:500])
        handle.remove()
        marks = torch.quantile(inputs[0][:, 0].detach(), torch.tensor([0.15, 0.5, 0.85]))
        rows.append((seen / len(data.train_inputs), accuracy, *marks.tolist()))

    remedies.train(data, Remedy(is_small=True, norm=norm), TASK, 1, look=look)
    return list(zip(*rows, strict=True))


figure, axes = figures.new_figure(9, 3.2, cols=3)
axes[2].sharey(axes[1])
found = {"without norm": percentiles("none"), "batch norm": percentiles("batch")}
accuracy_of = {name: (rows[0], rows[1]) for name, rows in found.items()}
figures.lines(axes[0], accuracy_of, "epoch", "accuracy")
for ax, (name, rows) in zip(axes[1:], found.items(), strict=True):
    marks = {"85 %": (rows[0], rows[4]), "50 %": (rows[0], rows[3]), "15 %": (rows[0], rows[2])}
    figures.lines(ax, marks, "epoch", "input of a unit")
    ax.set_title(name, fontsize=10)
figures.show(figure, "Accuracy, and percentiles of a unit's input, with and without batch norm.")
moved = {name: max(rows[3]) - min(rows[3]) for name, rows in found.items()}
for name, rows in found.items():
    print(f"{name:12}: accuracy {rows[1][-1]:.1%}, the median input moves by {moved[name]:.2f}")
assert moved["batch norm"] < moved["without norm"] / 2

# %% [markdown]
# With the norm the median input moves much less. It can hardly do otherwise, because the recorded input is
# the output of the norm. Whether that is what makes batch norm useful is disputed: Santurkar et al. (2018)
# added noise behind the norm, so that the inputs moved as much as before, and the network still trained as
# fast.
#
# Does the norm also allow a higher learning rate, as is often said, and does dropout still help beside it?
# The next table answers both questions for the small batch, with the reference's learning rate, four times
# this rate and, with the norm, sixteen times this rate, and then with dropout of 30 %.

# %%
WAYS = [("none", 0.0, 1), ("none", 0.0, 4), ("none", 0.3, 1)]
WAYS += [("batch", 0.0, 1), ("batch", 0.0, 4), ("batch", 0.0, 16), ("batch", 0.3, 1)]
half = {}
for norm, dropout, factor in WAYS:
    task = Task(TASK.small, TASK.large, factor * TASK.rate, TASK.epochs // 2, TASK.target)
    way = Remedy(is_small=True, norm=norm, dropout=dropout)
    values = [remedies.train(data, way, task, seed).accuracy for seed in SEEDS[:2]]
    half[norm, dropout, factor] = fmean(values)
    spread = f"accuracy {fmean(values):6.1%} ({min(values):.1%} to {max(values):.1%})"
    print(f"norm {norm:5}, dropout {dropout:.1f}, learning rate {task.rate:.1f}: {spread}")
assert half["batch", 0.0, 4] > half["none", 0.0, 4] + 0.05
assert half["batch", 0.0, 4] > half["batch", 0.0, 1] - 0.03
assert half["batch", 0.0, 16] < half["batch", 0.0, 4] - 0.05

# %% [markdown]
# Without the norm, four times the learning rate is too much for this network. With the norm, four times the
# rate costs little or nothing, and only sixteen times the rate is too much. So the norm raises the highest
# usable learning rate, but there still is one. About dropout a table with six epochs and two seeds can say
# little: in our run it costs some accuracy, with the norm and without. This agrees with the paper's advice to use less dropout
# beside a norm, but does not confirm it.

# %% [markdown]
# ### Which batch does the norm see?
#
# On several processors the word "batch" becomes ambiguous. In data parallelism each replica normalises only
# the images that it sees itself, so a global batch of 256 on 16 replicas is normalised in 16 **ghost
# batches** of 16. Ghost batches need no extra code and no message for their statistics (DDP only copies rank
# 0's running statistics, lesson 06), and their noise can even help. On one process you get the same effect
# by splitting the batch before it is normalised. Write that version; the table after it trains with the
# large batch at the unchanged learning rate and then repeats section 3's root rule and warm-up, all three
# with a norm.

# %% exercise="GhostBatchNorm.forward" todo="7.5" minutes=10 difficulty=2 points=1
from manyhands.large_batch.norms import GhostBatchNorm

# %% check="7.5" tags=["nbval-check-output"]
check.GhostBatchNorm(GhostBatchNorm)

# %%
if check.ready("7.2", "7.3", "7.5"):
    names = (
        "large batch, batch norm",
        "root rule, warm-up, batch norm",
        "root rule, warm-up, ghost batch norm",
    )
    normed, _ = compare({n: REMEDIES[n] for n in names}, own_parts(*RATES, "GhostBatchNorm"))
    report(normed)
    steps_of_small = fmean(one.steps for one in gap["small batch"])
    for name in names:
        assert all(one.steps and one.steps < steps_of_small / 4 for one in normed[name])

# %% [markdown]
# The first row is the most striking result of this lesson. It has the large batch, the small batch's learning
# rate, no warm-up and the same 61 steps as the row that failed in section 1, and yet it reaches the target, in
# far fewer steps than the reference. Nothing but the norm was added. So the few steps were not by themselves
# the reason for the gap: they were too few *for the network without a norm*.
#
# The other two rows use the learning rate and the warm-up of section 3, where they failed without a norm, and
# with a norm they reach the target as well. Whether they are better than the first row, or ghost batches
# better than whole ones, is for the ranking in section 7 to say.
#
# Ghost batches become a problem when each replica has very few images, as in the segmentation of large
# pictures, because the statistics of two images are mostly noise. Then the replicas have to share their
# statistics. That is **synchronised batch norm**, and it can be exact: its outputs, gradients and running
# statistics equal those of one process with the whole batch, up to rounding. PyTorch has it ready-made, as
# `nn.SyncBatchNorm`, and `nn.SyncBatchNorm.convert_sync_batchnorm` puts it into a whole model.
#
# The forward pass is straightforward: the sum and the count over all ranks give the mean, and then the sum of
# squared differences from this mean gives the variance. Do not compute the variance as the mean of the
# squares less the square of the mean: for inputs far from 0 these two numbers are nearly equal, and their
# difference has few correct digits left, or none.
#
# The backward pass needs some thought. Let $\hat x$ be the normalised input and
# $s = 1 / \sqrt{\text{variance} + \epsilon}$. Each input moves the mean and the variance of *all* inputs, on
# all ranks, and so the gradient of the loss with respect to $x$ is
#
# $$\frac{\partial L}{\partial x} = s \left( g - \overline{g} - \hat x \; \overline{g \, \hat x} \right),$$
#
# where $g = \partial L / \partial \hat x$, and both bars are means over the whole batch. Both means come out
# of one all-reduce of $2 C$ numbers for $C$ channels.
#
# Autograd does not know that an all-reduce mixes the ranks' inputs, so you write both directions yourself, as
# the two static methods of a `torch.autograd.Function`. `forward` computes the outputs and keeps on `ctx` what
# the backward pass will need: tensors with `ctx.save_for_backward(...)`, from where `ctx.saved_tensors` gives
# them back, and everything else as an attribute, such as `ctx.group`. `backward` is given the gradient of each
# output and returns a gradient for each argument of `forward` after `ctx`, with None for arguments that have
# none. Outputs that are not to be differentiated, here the mean, the variance and the count, are named with
# `ctx.mark_non_differentiable(...)`. Autograd cannot see the all-reduce in `backward` either. A loss that
# contains a gradient would differentiate `backward` as if nothing were sent, and its own gradient would be
# wrong. `@once_differentiable`, which is given, turns this into an error.

# %% exercise="NormOverRanks.forward NormOverRanks.backward" todo="7.6" minutes=35 difficulty=3 points=4
from manyhands.large_batch.norms import NormOverRanks, _per_channel

# %% check="7.6" tags=["nbval-check-output"]
check.NormOverRanks(NormOverRanks)

# %% [markdown]
# The next cell compares the gradients of three ranks with 7, 1 and 8 images with those of one process that
# has all 16. First predict: how many bytes does one rank hand to all-reduce for one norm of 64 channels in
# float64, forward and backward together?

# %%
nbytes = None  # your number

# %% answer="true"
nbytes = (64 + 1 + 64 + 2 * 64) * 8


# %%
def synchronised():
    sizes = (7, 1, 8)
    draw = torch.Generator().manual_seed(5)
    x, weights = torch.randn(2, 16, 64, generator=draw, dtype=torch.float64)
    own = (x + 100).split(sizes)[dist.get_rank()].clone().requires_grad_()
    with Ledger() as ledger:
        out, *_ = NormOverRanks.apply(own, 1e-5, None)
        (out * weights.split(sizes)[dist.get_rank()]).sum().backward()
    return own.grad, sum(entry.nbytes for entry in ledger.entries)


if check.ready("7.6"):
    parts = run_ranks(synchronised, 3)
    draw = torch.Generator().manual_seed(5)
    x, weights = torch.randn(2, 16, 64, generator=draw, dtype=torch.float64)
    whole = (x + 100).requires_grad_()
    norm = nn.BatchNorm1d(64, affine=False).double()
    (norm(whole) * weights).sum().backward()
    joined = torch.cat([gradient for gradient, _ in parts])
    torch.testing.assert_close(joined, whole.grad, rtol=0, atol=1e-6)
    difference = (joined - whole.grad).abs().max().item()
    print(f"largest difference from one process's gradient: {difference:.0e}")
    score("all-reduce of one norm", nbytes, (64 + 1 + 64 + 2 * 64) * 8, parts[0][1], "bytes")

# %% [markdown]
# ## 6. Can you pay with something else? A growing batch, or longer training
#
# Late in training the learning rate falls, because the noise has to shrink, and a larger batch shrinks the
# noise as well. So one can keep the learning rate and **let the batch grow where the rate would have fallen**
# (Smith et al. 2018). The batch starts small and ends large, when the noise scale is large too (lesson 03's
# last question).
#
# By how much must the batch grow? Section 2 suggests one answer and Smith et al. give another, because they
# keep different quantities. The variance of **one step** is $\eta^2 V / M$, and a learning rate of a quarter
# divides it by 16. But at a quarter of the learning rate it also takes four times as many steps to travel
# equally far. Along a stretch where the gradient is about $\bar g$, a distance $d$ takes
# $d / (\eta \, |\bar g|)$ steps, and their variances add up to $d \, \eta V / (M \, |\bar g|)$. So the noise
# **per distance travelled** is proportional to $\eta / M$, and a learning rate of a quarter divides it only by
# 4, which a batch four times as large does as well. This is the quantity that Smith et al. keep, and the
# linear rule keeps it too, whereas the root rule keeps $\eta^2 / M$. A small learning rate makes the path of
# SGD resemble that of a stochastic differential equation, and to keep this equation while the batch grows
# takes the linear rule. The corresponding equation of Adam, which divides its steps by the size of the
# gradients, takes a root rule (Malladi et al. 2022). Both results are about small learning rates, and section
# 2 showed what happens to large ones.

# %% exercise="grown_batch" todo="7.7" minutes=15 difficulty=2 points=2
from manyhands.large_batch.rates import grown_batch

# %% check="7.7" tags=["nbval-check-output"]
check.grown_batch(grown_batch)

# %% [markdown]
# If the argument holds, the growing batch has the same error curve per image as the falling learning rate of
# the reference, with fewer steps. Watch for this in the left panel. The other way to pay is **longer
# training**: four times as many images, at the tuned rate. The right panel enlarges the end of those that
# come below 12 %.


# %%
def mean_curve(curves):
    """Images seen, and the error in percent, averaged over the seeds."""
    rows = list(zip(*curves, strict=False))
    return [row[0][0] for row in rows], [100 - 100 * fmean(a for _, a in row) for row in rows]


if check.ready("7.2", "7.3", "7.7"):
    names = ("growing batch", "tuned rate", "longer training")
    paid, paid_curves = compare({n: REMEDIES[n] for n in names}, own_parts(*RATES, "grown_batch"))
    report(gap | paid)
    mean = {name: fmean(one.accuracy for one in found) for name, found in (gap | paid).items()}
    assert abs(mean["growing batch"] - mean["small batch"]) < 0.015
    assert mean["longer training"] > mean["tuned rate"] + 0.05
    by_name = {name: mean_curve(curves) for name, curves in (gap_curves | paid_curves).items()}
    figure, axes = figures.new_figure(9, 3.6, cols=2)
    for ax, top, title in zip(axes, (100, 12), ("whole", "the end, enlarged"), strict=True):
        picked = {name: by_name[name] for name in ("small batch", *names)}
        figures.lines(ax, picked, "images seen", "error on the test images (%)")
        ax.set_ylim(0, top)
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.set_title(title, fontsize=10)
    figures.legend_below(figure, axes[0])
    figures.show(figure, "Error against images seen for four ways to train, whole and enlarged.")

# %%
if check.ready("7.7"):
    steps = {}
    for name in ("small batch", "growing batch"):
        steps[name] = len(list(remedies.settings(REMEDIES[name], TASK, 1297, remedies.COURSE)))
    print(f"steps in all: {steps['small batch']} with a falling rate, ", end="")
    print(f"{steps['growing batch']} with a growing batch")

# %% [markdown]
# In the first half of the epochs the small and the growing batch are the same training. In the second half
# their curves still lie almost on top of each other, as the argument predicts. Per image, a growing batch
# is as good as a falling learning rate, and the whole training takes fewer steps. Little or none of this
# saving shows in the steps to the target, because the batch starts to grow only after half of the epochs,
# when the target has often been reached already.
#
# Longer training at the tuned rate gains most of what the same learning rate lacked within the budget. So for
# this network, which has no norm, much of the gap between large and small batches is a lack of steps. But
# longer training has its price, which the next section lists: four times as many images cost four times as
# much arithmetic.

# %% [markdown]
# ## 7. Which remedy is better, and which only had luckier seeds?
#
# Now rank the remedies. With three seeds each, two means practically always differ, so the question is
# whether they differ by more than chance would explain. The **standard error** of a mean is the standard
# deviation over the seeds, divided by the square root of their number. Two ways of training whose means
# differ by at most $t$ times the standard error of the difference are called a tie. The factor $t$ depends on
# the number of seeds, because a standard deviation from few values is itself uncertain: Student's t
# distribution gives 4.30 for two seeds each, 2.78 for three, 2.31 for five, and 1.96 for very many. With
# these factors, which `student` gives up to six seeds each, two ways that are equally good miss the tie in 5
# of 100 comparisons. A fixed factor of 2 would let them miss it in 12 of 100 comparisons with three seeds,
# and in 18 with two.
#
# Two things follow. Fourteen remedies make 91 pairs, so some differences in the ranking may still be due to
# chance. And a tie does not say that two ways are equally good, only that these seeds cannot tell them apart.
# Nor does a lower class say that two ways differ: `ranked` compares a way with the first of the class above
# it only, and one whose seeds are far apart ties with ways of many classes.

# %% exercise="is_tie ranked" todo="7.8" minutes=20 difficulty=2 points=2
from manyhands.large_batch.ties import is_tie, ranked, STUDENT, student

# %% check="7.8" tags=["nbval-check-output"]
check.is_tie(is_tie, ranked)

# %%
if check.ready("7.2", "7.3", "7.4", "7.5", "7.7", "7.8"):
    every = own_parts(*RATES, "noise_size", "noisy_mean", "GhostBatchNorm", "grown_batch")
    known = gap | warm | normed | paid
    rest, _ = compare({n: REMEDIES[n] for n in REMEDIES if n not in known}, every)
    known |= rest
    classes = ranked({name: [one.accuracy for one in found] for name, found in known.items()})
    for number, names in enumerate(classes, 1):
        print(f"{number}: {'; '.join(names)}")
    rows = {name: [tuple(one) for one in found] for name, found in known.items()}
    figure = figures.remedies_compared(rows, classes, TASK.target)
    figures.show(figure, "Error, steps and images to the target for every remedy, with ranges.")
    mean = {name: fmean(one.accuracy for one in found) for name, found in known.items()}
    large = {name for name, way in REMEDIES.items() if not way.is_small and not way.grows}
    normed_ones = {name for name in large if REMEDIES[name].norm != "none"}
    others = {name for name in large - normed_ones if REMEDIES[name].longer == 1}
    assert max(mean[name] for name in others) < min(mean[name] for name in normed_ones) - 0.03

# %%
if check.ready("7.2", "7.3", "7.4", "7.5", "7.7", "7.8"):
    reached = {n: f for n, f in known.items() if all(one.steps is not None for one in f)}
    header = f"{'reached by all seeds':38} {'steps':>6} {'images':>8} {'time here':>10}"
    print(header)
    for name, found in sorted(reached.items(), key=lambda item: fmean(o.steps for o in item[1])):
        steps, seen, seconds = (
            fmean(values) for values in zip(*(o[1:] for o in found), strict=True)
        )
        print(f"{name:38} {steps:6.0f} {seen:8,.0f} {seconds:9.2f}s")

# %% [markdown]
# In the ranking, look for the large batches. Within the budget of twelve epochs, every one of them with a
# norm is better than every one without. The three columns of the second table answer three different
# questions. **Steps** determine how long you wait if you have a processor for every part of the batch.
# **Images** determine what you pay, because each image costs the same amount of arithmetic. The **time
# here** was taken on a core of this machine, which processes a large batch more efficiently than a small
# one; other programs disturb it, so where two ways take equally many steps of the same size, a difference
# between their times says nothing. A remedy that halves the steps and doubles the images is worth it only
# to somebody in a hurry.
#
# Do these findings hold beyond our small data set? The job of this lesson was also run on MNIST's 60,000
# images, with batches of 32 and 1024, six epochs and three seeds. Lesson 03 has a stored sweep on MNIST, with
# another network, and the best learning rates that it found for these two batches are the ones used here.

# %%
stored = storage.stored("large_batch", "mnist")
print(stored["data"])
mnist = {name: [Outcome(*row) for row in rows] for name, rows in stored["outcomes"].items()}
report(mnist)
figure = figures.remedies_compared(stored["outcomes"], stored["classes"], stored["target"])
figures.show(figure, "The stored comparison on MNIST: error, steps and images for every remedy.")
swept = storage.stored("batch_size", "mnist")
best = {row["batch"]: row["rate"] for row in swept["batches"]}
print(f"lesson 03's best learning rates: {best[32]:g} at batch 32, {best[1024]:g} at batch 1024")
assert best[32] == TASK.rate and best[1024] == TASK.tuned * TASK.rate

# %%
on_mnist = {name: fmean(one.accuracy for one in found) for name, found in mnist.items()}
class_of = {name: number for number, names in enumerate(stored["classes"]) for name in names}
order = ["gradient noise", "large batch", "tuned rate", "small batch"]
for worse, better in zip(order, order[1:], strict=False):
    assert on_mnist[worse] < on_mnist[better] and class_of[worse] > class_of[better]
rules = [name for name in mnist if REMEDIES[name].rule in ("root", "linear")]
no_norm = [one.accuracy for n in rules if REMEDIES[n].norm == "none" for one in mnist[n]]
assert max(no_norm) < min(one.accuracy for one in mnist["large batch"]) - 0.1
assert class_of["growing batch"] == class_of["small batch"] < class_of["large batch, batch norm"]
assert class_of["root rule, warm-up, batch norm"] == class_of["small batch"]
assert on_mnist["root rule, warm-up"] > on_mnist["root rule"] + 0.1
steps_of_small = fmean(one.steps for one in mnist["small batch"])
for name in mnist:
    if REMEDIES[name].norm != "none" and not REMEDIES[name].is_small:
        assert all(one.steps and one.steps < steps_of_small / 4 for one in mnist[name])
assert 0 < sum(one.steps is None for one in mnist["longer training"]) < len(SEEDS)

# %% [markdown]
# Most findings hold there as well. The run takes a factor of 2 between the two learning rates from lesson
# 03's sweep, although the batch now grows by a factor of 32. The tuned rate narrows the gap only a little,
# and the noise costs accuracy. Both rules do harm without a norm: not one of their trainings comes near the
# unchanged learning rate. The growing batch cannot be told from the small one. And every large batch with a
# norm reaches the target, in far fewer steps than the small batch needs. At the unchanged learning rate it
# ends about half a percentage point behind the small batch, and with the root rule and a warm-up it ends in
# the same class.
#
# Others change. On MNIST the warm-up may **help** the root rule: two of its three trainings no longer
# diverge, though they stay far below the unchanged learning rate, and three seeds are too few to be sure.
# And longer training reaches the target with only two of three seeds. A remedy that is useless on one task
# may help on another, so only an experiment can tell.
#
# ## 8. Run it as a job
#
# The job trains with every remedy, using your functions, and writes the table and the figure. On a cluster
# `sbatch --array=1-14 sbatch/large_batch.sbatch` starts one job per remedy, and the last one to finish ranks
# them all. The run here is a small one, with two seeds and a third of the epochs.

# %%
if check.ready("7.2", "7.3", "7.4", "7.5", "7.7", "7.8"):
    check.keep()
    small_run = "--seeds 2 --epochs 4 --target 0.9".split()
    folder = watch.run("../sbatch/large_batch.sbatch", "--impl", "mine", *small_run)

# %%
check.summary()

# %% [markdown]
# ## Recap
#
# You can now
#
# - scale a learning rate by either rule, say what each of them keeps, and test it on your own gradients,
# - compare a large batch with a small one that is tuned with the same care,
# - warm up a learning rate, grow a batch, and put noise back, and say what each of them can do,
# - normalise over ranks, forward and backward, equal to one process,
# - rank remedies by runs with error bars, and call a tie a tie,
# - separate what a remedy does to steps, to cost and to the final accuracy.
#
# **Questions**
#
# <details><summary>A colleague goes from 1 to 8 GPUs, keeps the batch per GPU, and sees the loss diverge in the first epoch with the linear rule. What do you suggest first, and what if that does not help?</summary>
#
# First suggest a warm-up of a few epochs, because the damage may be done early. If the loss still diverges
# after the warm-up, the learning rate is too high for the network itself, so tune it, from the old one
# upwards, or add a norm.
# </details>
#
# <details><summary>With 4 images per replica, a network with batch norm does badly on 64 GPUs. Too few steps, statistics of too few images, or gradients that are not averaged: how do you tell which it is?</summary>
#
# Synchronise the norm over groups of 8 replicas. If the accuracy recovers, the statistics were the cause. If
# it does not, train longer with the same batch: a recovery then points to too few steps. Gradients that are
# not averaged would leave the replicas with different weights, which a comparison of the sums of their
# weights shows at once.
# </details>
#
# <details><summary>Remedy A has accuracies 97.1, 97.4 and 97.6 %, remedy B has 97.3, 97.5 and 97.8 %. May you write that B is better?</summary>
#
# No. The means differ by 0.17, and the standard error of that difference is about 0.2.
# </details>
#
# **Sources**: Goyal et al. 2017, https://arxiv.org/abs/1706.02677; Hoffer et al. 2017,
# https://arxiv.org/abs/1705.08741; Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167; Smith et al. 2018,
# https://arxiv.org/abs/1711.00489; Malladi et al. 2022, https://arxiv.org/abs/2205.10287; Shallue et al. 2019, https://arxiv.org/abs/1811.03600; Santurkar et al. 2018,
# https://arxiv.org/abs/1805.11604.
