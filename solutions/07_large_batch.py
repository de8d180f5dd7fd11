# ---
# manyhands: {title: Large batches, goal: "Train with a batch far beyond the critical one, derive and test the rules for its learning rate, and find by runs with error bars which remedies work", needs: [batch_size], job: {flags: "--seeds 2 --epochs 6 --target 0.9", loss: [0.009, 0.023]}}
# ---

# %% [markdown]
# # 07 Large batches
#
# Eight times as many GPUs can process eight times as many images per second, but only if each of them has
# enough to do, so the global batch grows with the number of GPUs. Lesson 03 showed what happens then: beyond
# the critical batch, a larger batch no longer saves steps in proportion. This lesson starts where lesson 03
# ended, with a batch that is about ten times as large as the critical one, and asks **what can be done about
# it**.
#
# There are four levers, and every remedy in this lesson and the next pulls one of them:
#
# | lever (lesson 03) | remedies in this lesson | in lesson 08 |
# |---|---|---|
# | the learning rate | root rule, linear rule, gradual warm-up, longer training at the larger rate | range test |
# | the noise in the gradient | noise on each sample's loss, ghost batch norm | |
# | the batch itself | a batch that grows during training | |
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
from torch.autograd.function import FunctionCtx

from manyhands.checks import large_batch as check, score
from manyhands.data import images
from manyhands.first_job.planning import my_share
from manyhands.instruments import figures
from manyhands.instruments.ledger import Ledger
from manyhands.jobs import watch
from manyhands.large_batch import remedies
from manyhands.large_batch.norms import AnyBatchNorm
from manyhands.large_batch.rates import Setting
from manyhands.large_batch.remedies import REMEDIES, Parts, Remedy, Task, network
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
# plain stochastic gradient descent. The **reference** has 16 images in a step, and its rivals have 256. Every
# way of training sees each image 12 times, which takes 973 steps for the reference and 61 steps for a rival.
# In both cases the learning rate falls to a quarter after half of the epochs and again after three quarters
# of them.
#
# `compare` trains with each of the named ways and with three seeds; two ranks share the trainings.

# %%
TASK, SEEDS = Task(small=16, large=256, rate=0.2, epochs=12, target=0.95), (1, 2, 3)


def train_share(ways, parts):
    torch.set_num_threads(1)
    own = my_share([(n, s) for n in ways for s in SEEDS], dist.get_rank(), dist.get_world_size())
    found = []
    for name, seed in own:
        curve = []

        def look(seen, accuracy, model, curve=curve):
            curve.append((seen, accuracy))

        found.append((name, remedies.train(data, ways[name], TASK, seed, parts, look), curve))
    return found


def compare(ways, parts=remedies.COURSE):
    """Name -> the outcomes of all seeds, and name -> their curves."""
    outcomes, curves = {name: [] for name in ways}, {name: [] for name in ways}
    for share in run_ranks(train_share, 2, ways, parts, timeout_s=120):
        for name, outcome, curve in share:
            outcomes[name].append(outcome)
            curves[name].append(curve)
    return outcomes, curves


def report(outcomes):
    for name, found in outcomes.items():
        values = [one.accuracy for one in found]
        steps = [one.steps for one in found if one.steps]
        reached = f"{fmean(steps):4.0f} steps" if len(steps) == len(found) else "missed"
        spread = f"{fmean(values):6.1%} ({min(values):.1%} to {max(values):.1%})"
        print(f"{name:38} accuracy {spread:26} target: {reached}")


gap, gap_curves = compare({name: REMEDIES[name] for name in ("small batch", "large batch")})
report(gap)

# %% [markdown]
# The gap is huge, and most of it has a simple reason: the large batch takes sixteen times fewer steps, and
# its learning rate is the same, so its steps are no longer than before. If you had only the two accuracies,
# you might conclude that large batches make worse networks, but first of all they make *fewer steps*. A
# remedy has to achieve with 61 steps what the reference achieves with 973.

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
# if the gradients are alike. The linear rule keeps the distance per image and gives up the noise level. Which
# of the two matters more is a question for runs.

# %% [markdown]
# ### Should a larger batch have a smaller learning rate?
#
# A slide that is often shown says that a larger batch needs a *smaller* learning rate, in proportion to the
# batch. The two rules above say that it needs a larger one. To settle the question, the next cell sweeps the
# learning rate at batch 256 from $\eta / 16$ to $16 \, \eta$. Watch on which side of $\eta$ the best accuracy
# lies.

# %%
if check.ready("7.2"):
    factors = [2.0**power for power in range(-4, 5)]
    swept = {}
    for factor in factors:
        task = Task(TASK.small, TASK.large, TASK.rate * factor, TASK.epochs, TASK.target)
        swept[factor] = [remedies.train(data, Remedy(), task, seed).accuracy for seed in SEEDS]
        values = swept[factor]
        told = f"{fmean(values):.1%} ({min(values):.1%} to {max(values):.1%})"
        print(f"rate {task.rate:6.4f} = {factor:6.4g} times the reference's: accuracy {told}")
    best = max(factors, key=lambda factor: fmean(swept[factor]))
    print(f"best: {best:g} times the rate of the small batch")
    assert fmean(swept[1 / 16]) < fmean(swept[1]) < fmean(swept[best]) and best > 1

# %% [markdown]
# The smaller learning rates are far worse, because the steps are few already and now become shorter as well.
# So on these images the larger batch needs a larger learning rate. But the linear rule, 16 times the rate,
# asks for too much: a step must not be longer than the curvature of the loss allows, whatever the batch
# (lesson 01).
#
# The best rate of the sweep lies near the root rule's factor of 4, but that proves little, because the factor
# is counted from a learning rate of the small batch that was not tuned. In lesson 03, where every batch size
# got its best learning rate, the rate at batch 256 was only twice that at batch 16. What the sweep does show
# is that the linear rule is no longer valid at ten times the critical batch that lesson 03 measured.

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
    ways = ("root rule", "root rule, warm-up", "linear rule", "linear rule, warm-up")
    warm, _ = compare({name: REMEDIES[name] for name in ways}, own_parts(*RATES))
    report(warm)

# %% [markdown]
# On this network the warm-up does not help: neither rule reaches the target, with or without it. A warm-up
# removes damage that is done *early*. With the linear rule the damage goes on for as long as the learning
# rate stays high, because 3.2 is more than this loss can bear at any time. With the root rule there was
# little damage to remove, so the warm-up only makes some of the 61 steps shorter. Keep this result in mind
# until section 5, where the same warm-up and the same learning rate are used on a network that can profit
# from them.

# %% [markdown]
# ## 4. Does it help to put the noise back?
#
# According to one view, the noise of small batches is useful by itself, because it shakes the weights out of
# sharp minima (lesson 02). If so, a large batch lacks something that can be put back: multiply the loss of
# each sample by a random number $z \sim N(1, \sigma^2)$. The mean gradient stays the same. Where noise
# dominates the gradient, the covariance of the gradient is multiplied by $1 + \sigma^2$, so
# $\sigma^2 = M / m - 1$ gives a batch of $M$ the noise of a batch of $m$.

# %% exercise="noise_size noisy_mean" todo="7.4" minutes=15 difficulty=2 points=2
from manyhands.large_batch.noise import noise_size, noisy_mean

# %% check="7.4" tags=["nbval-check-output"]
check.noise_size(noise_size, noisy_mean)

# %% [markdown]
# Verify both claims on gradients of your own network: the mean is kept, and the covariance is restored. The
# loss of sample $n$ has gradient $g_n$, so the gradient of the noisy mean is the mean of $z_n g_n$. The cell
# draws 400 such gradients at batch 256, with the noise that makes up for the difference to batch 16. The cell
# after it trains with this noise and, for comparison, without.

# %%
if check.ready("7.1", "7.4"):
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
    print(f"variance at batch 256: {step_variance(single, 256, 1.0):.4f} without noise")
    print(f"                       {restored:.4f} with noise, and {wanted:.4f} at batch 16")
    assert mean_error < 6 * (wanted / 400) ** 0.5 and 0.6 < restored / wanted < 1.7

# %%
if check.ready("7.2", "7.3", "7.4"):
    names = ("root rule, warm-up", "gradient noise")
    noisy_outcomes, _ = compare(
        {name: REMEDIES[name] for name in names}, own_parts(*RATES, "noise_size", "noisy_mean")
    )
    report(noisy_outcomes)

# %% [markdown]
# The mean is kept up to the scatter of 400 draws and the covariance is restored, just as derived, but the
# accuracy is *worse*. Count the variance of a step to see why. Both rows use the root rule, and by TODO 7.1
# its learning rate, four times the old one, already gives a step of the large batch the variance that it had
# with the small batch. The added noise raises the variance of the gradient by a factor of 16 on top of that.
# So this comparison shows that far too much noise hurts, and it leaves open whether noise at the unchanged
# learning rate would help. The study that proposed the noise trained for far longer (Hoffer et al. 2017), and
# so will you in section 6.

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
for name, rows in found.items():
    moved = max(rows[3]) - min(rows[3])
    print(f"{name:12}: accuracy {rows[1][-1]:.1%}, the median input moves by {moved:.2f}")

# %% [markdown]
# With the norm the median input moves much less. It can hardly do otherwise, because the recorded input is
# the output of the norm. Whether that is what makes batch norm useful is disputed: Santurkar et al. (2018)
# added noise behind the norm, so that the inputs moved as much as before, and the network still trained as
# fast.
#
# Does the norm also allow a higher learning rate, as is often said, and does dropout still help beside it?
# The next table answers both questions for the small batch: it has three learning rates, each with and
# without the norm, and then dropout of 30 % with both.

# %%
reached = {}
for dropout in (0.0, 0.3):
    for norm in ("none", "batch"):
        for factor in (1, 4, 16) if not dropout else (1,):
            task = Task(TASK.small, TASK.large, factor * TASK.rate, 6, TASK.target)
            way = Remedy(is_small=True, norm=norm, dropout=dropout)
            values = [remedies.train(data, way, task, seed).accuracy for seed in SEEDS[:2]]
            reached[norm, dropout, factor] = fmean(values)
            told = f"accuracy {fmean(values):6.1%} ({min(values):.1%} to {max(values):.1%})"
            print(f"norm {norm:5}, dropout {dropout:.1f}, rate {task.rate:.1f}: {told}")
assert reached["batch", 0.0, 4] > reached["none", 0.0, 4] + 0.05

# %% [markdown]
# Without the norm, four times the learning rate is too much for this network. With the norm, four times the
# rate costs little or nothing, and only sixteen times the rate is too much. So the norm raises the highest
# usable learning rate, but there still is one. About dropout a table with six epochs can say little: dropout
# costs some accuracy here, with the norm and without. This agrees with the paper's advice to use less dropout
# beside a norm, but does not confirm it.

# %% [markdown]
# ### Which batch does the norm see?
#
# On several processors the word "batch" becomes ambiguous. In data parallelism each replica normalises only
# the images that it sees itself, so a global batch of 256 on 16 replicas is normalised in 16 **ghost
# batches** of 16. Ghost batches need no extra code and no message, and their noise can even help. On one
# process you get the same effect by splitting the batch before it is normalised. Write that version; the
# table after it repeats section 3's linear rule and warm-up, now with a norm.

# %% exercise="GhostBatchNorm.forward" todo="7.5" minutes=10 difficulty=2 points=1
from manyhands.large_batch.norms import GhostBatchNorm

# %% check="7.5" tags=["nbval-check-output"]
check.GhostBatchNorm(GhostBatchNorm)

# %%
if check.ready("7.2", "7.3", "7.5"):
    names = (
        "large batch, batch norm",
        "linear rule, warm-up, batch norm",
        "linear rule, warm-up, ghost batch norm",
    )
    normed, _ = compare({n: REMEDIES[n] for n in names}, own_parts(*RATES, "GhostBatchNorm"))
    report(normed)

# %% [markdown]
# The last two rows use the same large batch, the same linear rule and the same warm-up that failed in section
# 3. Adding a norm made the difference: all three rows reach the target, in far fewer steps than the
# reference. The first row is the most striking one. It keeps the small batch's learning rate and has no
# warm-up, so here the norm alone makes up for the large batch, although the number of steps is as small as
# before. Whether ghost batches are better than whole ones cannot be told from these runs, because their
# ranges overlap.
#
# Ghost batches become a problem when each replica has very few images, as in the segmentation of large
# pictures, because the statistics of two images are mostly noise. Then the replicas have to share their
# statistics. That is **synchronised batch norm**, and it can be exact: its outputs, gradients and running
# statistics equal those of one process with the whole batch, up to rounding.
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
# Late in training the learning rate falls, because the noise of the steps has to shrink, and a larger batch
# shrinks the noise as well. So one can keep the learning rate and **let the batch grow where the rate would
# have fallen** (Smith et al. 2018). The batch starts small and ends large, when the noise scale is large too
# (lesson 03's last question).

# %% exercise="grown_batch" todo="7.7" minutes=15 difficulty=2 points=2
from manyhands.large_batch.rates import grown_batch

# %% check="7.7" tags=["nbval-check-output"]
check.grown_batch(grown_batch)

# %% [markdown]
# If the argument holds, the growing batch has the same error curve per image as the falling learning rate of
# the reference, with fewer steps. Watch for this in the left panel. The other way to pay is **longer
# training**: four times as many images, at the root rule's learning rate. The right panel enlarges the end of
# all curves.


# %%
def mean_curve(curves):
    """Images seen, and the error in percent, averaged over the seeds."""
    rows = list(zip(*curves, strict=False))
    return [row[0][0] for row in rows], [100 - 100 * fmean(a for _, a in row) for row in rows]


if check.ready("7.2", "7.3", "7.7"):
    names = ("growing batch", "root rule, warm-up", "longer training")
    paid, paid_curves = compare({n: REMEDIES[n] for n in names}, own_parts(*RATES, "grown_batch"))
    report(gap | paid)
    by_name = {name: mean_curve(curves) for name, curves in (gap_curves | paid_curves).items()}
    figure, axes = figures.new_figure(9, 3.6, cols=2)
    for ax, top, title in zip(axes, (100, 12), ("whole", "the end, enlarged"), strict=True):
        picked = {name: by_name[name] for name in ("small batch", *names)}
        figures.lines(ax, picked, "images seen", "error on the test images (%)")
        ax.set_ylim(0, top)
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
# The curves of the small and of the growing batch lie almost on top of each other, as the argument predicts.
# Per image, a growing batch is as good as a falling learning rate, and the whole training takes fewer steps.
# Little of this saving shows in the steps to the target, because the batch starts to grow only after half of
# the epochs, at about the time when the target is reached. Longer training at the root rule's learning rate
# reaches the target as well, whereas the same learning rate did not within the budget. So much of the gap
# between large and small batches here is a lack of steps. But longer training has its price, which the next
# section lists: four times as many images cost four times as much arithmetic.

# %% [markdown]
# ## 7. Which remedy is better, and which only had luckier seeds?
#
# Now rank the remedies. With three seeds each, two means practically always differ, so the question is
# whether they differ by more than chance would explain. The **standard error** of a mean is the standard
# deviation over the seeds, divided by the square root of their number. Two ways of training whose means
# differ by at most twice the standard error of the difference are called a tie. With three seeds each this is
# a mild test: by Student's t distribution with four degrees of freedom, two ways that are equally good miss
# the tie in about 12 of 100 comparisons. Among thirteen remedies some differences are therefore due to
# chance.

# %% exercise="is_tie ranked" todo="7.8" minutes=20 difficulty=2 points=2
from manyhands.large_batch.ties import is_tie, ranked

# %% check="7.8" tags=["nbval-check-output"]
check.is_tie(is_tie, ranked)

# %%
if check.ready("7.2", "7.3", "7.4", "7.5", "7.7", "7.8"):
    every = own_parts(*RATES, "noise_size", "noisy_mean", "GhostBatchNorm", "grown_batch")
    known = gap | warm | noisy_outcomes | normed | paid
    rest, _ = compare({n: REMEDIES[n] for n in REMEDIES if n not in known}, every)
    known |= rest
    classes = ranked({name: [one.accuracy for one in found] for name, found in known.items()})
    for number, names in enumerate(classes, 1):
        print(f"{number}: {'; '.join(names)}")
    rows = {name: [tuple(one) for one in found] for name, found in known.items()}
    figure = figures.remedies_compared(rows, classes, TASK.target)
    figures.show(figure, "Error, steps and images to the target for every remedy, with ranges.")

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
# In the ranking, look at what the leaders have in common: in our run all of them used batch norm. The three
# columns of the second table answer three different questions. **Steps** determine how long you wait if you
# have a processor for every part of the batch. **Images** determine what you pay, because each image costs
# the same amount of arithmetic. The **time here** is that of one core, which processes a large batch more
# efficiently than a small one. A remedy that halves the steps and doubles the images is worth it only to
# somebody in a hurry.
#
# Do these findings hold beyond our small data set? The job of this lesson was also run on MNIST's 60,000
# images, with batches of 32 and 1024 and five seeds:

# %%
stored = storage.stored("large_batch", "mnist")
figure = figures.remedies_compared(stored["outcomes"], stored["classes"], stored["target"])
figures.show(figure, "The stored comparison on MNIST: error, steps and images for every remedy.")
print(stored["data"])

# %% [markdown]
# Three of the findings hold there too: with batch norm, the linear rule and a warm-up, the large batch is as
# good as the small one without a norm; the growing batch equals the small batch; and the linear rule without
# a norm fails altogether. Others change. On MNIST **a higher learning rate without a warm-up hurts**: the
# large batch reaches 92 % with the rate unchanged and 83 % with the root rule, whose seeds lie far apart. The
# **warm-up helps** the root rule, with which every seed then reaches about 95 %. **Longer training** reaches
# the target with only one of its five seeds. And **batch norm alone** reaches it with four of five and stays
# one percentage point behind the small batch. A remedy that is useless on one task may help on another, so
# only an experiment can tell.
#
# ## 8. Run it as a job
#
# The job trains with every remedy, using your functions, and writes the table and the figure. On a cluster
# `sbatch --array=1-13 sbatch/large_batch.sbatch` starts one job per remedy, and the last one to finish ranks
# them all. The run here is a small one, with two seeds and half of the epochs.

# %%
if check.ready("7.2", "7.3", "7.4", "7.5", "7.7", "7.8"):
    check.keep()
    small_run = "--seeds 2 --epochs 6 --target 0.9".split()
    folder = watch.run("../sbatch/large_batch.sbatch", "--impl", "mine", *small_run)

# %%
check.summary()

# %% [markdown]
# ## Recap
#
# You can now
#
# - scale a learning rate by either rule, say what each of them keeps, and test it on your own gradients,
# - warm up a learning rate, grow a batch, and put noise back, and say when each of them helps,
# - normalise over ranks, forward and backward, equal to one process,
# - rank remedies by runs with error bars, and call a tie a tie,
# - separate what a remedy does to steps, to cost and to the final accuracy.
#
# **Questions**
#
# <details><summary>A colleague goes from 1 to 8 GPUs, keeps the batch per GPU, and sees the loss diverge in the first epoch with the linear rule. What do you suggest first, and what if that does not help?</summary>
#
# First suggest a warm-up of a few epochs, because the damage is done early. If the loss still diverges after
# the warm-up, the learning rate is too high for the network itself, so use the root rule or add a norm.
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
# https://arxiv.org/abs/1711.00489; Shallue et al. 2019, https://arxiv.org/abs/1811.03600; Santurkar et al. 2018,
# https://arxiv.org/abs/1805.11604.
