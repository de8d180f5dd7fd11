# ---
# manyhands: {title: Gradient descent, goal: "Fit a line by gradient descent with all samples and with some, predict the learning rate at which it diverges, and measure how the noise of a step falls with the batch size"}
# ---

# %% [markdown]
# # 01 Gradient descent
#
# Every training run in this course, on one processor or on a thousand, repeats one step: look at some
# samples, work out in which direction the loss falls, and go a little way in that direction. How many
# samples should one step look at? That number is the **batch size**, and it matters because later the
# samples of a batch are spread over the processors.
#
# Here the model is a straight line. It has only two parameters, so you can see the whole loss and the path
# that you take through it.
#
# The gradient and the loop of gradient descent, which you know from PyTorch, are given. The first exercise,
# 1.3, asks when that loop fails.

# %%
from collections.abc import Callable, Iterator

import torch
from torch import Generator, Tensor

from manyhands.checks import gradient_descent as check, score
from manyhands.first_job.power_law import fit_power_law
from manyhands.instruments import figures
from manyhands.ranks import lab

lab.warm_up()
torch.set_num_threads(1)
print(f"torch {torch.__version__}, one process on the CPU, no data to fetch")

# %% [markdown]
# ## 1. A line and its loss
#
# What does the loss of a model look like? To see one, take 100 points around the line $y = 2x - 1$, with
# noise added. They are generated here with a fixed seed, so you know which line should come out.

# %% tags=["nbval-check-output"]
generator = torch.Generator().manual_seed(1)
x = 3 * torch.rand(100, generator=generator)
y = 2 * x - 1 + 0.5 * torch.randn(100, generator=generator)
print(f"{len(x)} samples, x from {x.min():.2f} to {x.max():.2f}")

# %% [markdown]
# The model is $w x + b$, and its two parameters are stored in a tensor `[w, b]`. The **loss** says how
# wrong a line is: here it is the mean of the squared errors.

# %% show="true"
from manyhands.gradient_descent.descent import mean_squared_error

# %% tags=["nbval-check-output"]
for line in ([0.0, 0.0], [2.0, -1.0], [2.0, 0.0]):
    print(
        f"w = {line[0]}, b = {line[1]:4}: loss {mean_squared_error(torch.tensor(line), x, y):.3f}"
    )

# %% [markdown]
# The true line has a loss of 0.28 and not 0, because no line goes through all the points. Since there are
# only two parameters, the loss can be computed for a whole grid of lines and drawn like a map. Look for the
# lowest point and for the shape around it.

# %%
ws, bs = torch.linspace(-1.5, 4.5, 121), torch.linspace(-4, 3, 121)
grid = torch.stack(torch.meshgrid(ws, bs, indexing="ij"), dim=-1)  # (121, 121, 2)
over_the_map = mean_squared_error(grid, x, y)
levels = [0.5 * 2**k for k in range(7)]
best = torch.linalg.lstsq(torch.stack([x, torch.ones(100)], dim=1), y[:, None]).solution[:, 0]


def draw_map(ax):
    figures.contours(ax, ws.tolist(), bs.tolist(), over_the_map.tolist(), levels, pale=True)
    ax.plot(*best, "*", color=figures.RED, markersize=10, label="lowest point")
    ax.set(xlim=(-1.5, 4.5), ylim=(-4, 3), aspect="equal")
    figures.label(ax, "w", "b")


figure, ax = figures.new_figure(5.2, 4.8)
draw_map(ax)
lines = ax.contour(ws, bs, over_the_map.T, levels, colors=figures.GREY, linewidths=0.5)
ax.clabel(lines, fmt="%g", fontsize=9, colors=figures.BLACK)
figures.label(ax, "w", "b", legend=True)
figures.show(
    figure, "The loss over w and b: one long, narrow valley, its lowest point near (2, -1)."
)

# %% [markdown]
# Darker is lower. The curves are **contours**, lines of equal loss, and the number on each is its loss: from
# one contour to the next the loss doubles. There is a single lowest point, marked by a star (here it was
# computed by least squares, which only so simple a model allows). It lies in a long valley, because a
# smaller $b$ can make up for most of a $w$ that is a little too large.

# %% [markdown]
# ## 2. The gradient
#
# How do you find the way down without a map, which nobody has for a real model? At any point you can
# compute the **gradient**: the derivatives of the loss with respect to each parameter. It points in the
# direction in which the loss grows fastest. For the mean of $(w x + b - y)^2$ the chain rule gives both
# derivatives in one line.

# %% show="true"
from manyhands.gradient_descent.descent import gradient

# %% [markdown]
# PyTorch's **autograd** computes the same gradient from the loss alone. Compare the two:

# %% tags=["nbval-check-output"]
parameters = torch.tensor([0.0, 0.0], requires_grad=True)
mean_squared_error(parameters, x, y).backward()
by_hand = gradient(torch.tensor([0.0, 0.0]), x, y)
for way, (by_w, by_b) in {"autograd": parameters.grad, "by hand": by_hand}.items():
    print(f"{way:8}  dL/dw = {by_w:.3f}, dL/db = {by_b:.3f}")
assert torch.allclose(by_hand, parameters.grad)

# %% [markdown]
# Both are negative at $w = b = 0$, so the loss falls when either parameter grows. At the lowest point both
# are zero. Read the function once more: what do two derivatives of zero say about the errors $w x + b - y$ of
# the best line? And is the mean error zero at the true line, $w = 2$ and $b = -1$, as well?

# %%
mean_error = None  # your number: the mean error of the best line

# %% answer="true"
mean_error = 0

# %%
for name, (w, b) in {"best line": best, "true line": torch.tensor([2.0, -1.0])}.items():
    error = w * x + b - y
    assert (name == "best line") == (abs(error.mean()) < 1e-4)
    print(f"{name}: mean error {error.mean():+.4f}, mean of error * x {(error * x).mean():+.4f}")
print(f"you said {mean_error} for the mean error of the best line")

# %% [markdown]
# The two numbers printed for each line are half of the two derivatives, so at the best line both are zero, up
# to rounding: its errors cancel, and they also cancel when each is weighted by its $x$. At the true line
# neither is zero, because the noise in these 100 points does not cancel exactly. Gradient descent finds the
# best line for the samples that it is given, not the true line.

# %% [markdown]
# ## 3. Gradient descent
#
# How does the gradient lead to the lowest point? Go against it, a little at a time. The **learning rate**
# sets how far: each step subtracts the learning rate times the gradient. In the code of this lesson it is
# called `rate`. At the lowest point the gradient is zero, so the descent stops when the norm of the gradient
# is small enough, and in any case after a given number of steps.

# %% show="true"
from manyhands.gradient_descent.descent import descend

# %% tags=["nbval-check-output"]
start = torch.tensor([-1.0, 2.0])
path = descend(start, x, y, rate=0.1, tolerance=1e-3, max_steps=2200)
w, b = path[-1].tolist()
assert mean_squared_error(path[-1], x, y) < mean_squared_error(torch.tensor([2.0, -1.0]), x, y)
print(
    f"{len(path) - 1} steps to w = {w:.2f}, b = {b:.2f}, loss {mean_squared_error(path[-1], x, y):.3f}"
)

# %% [markdown]
# The descent ends at the best line, whose loss is a little below that of the true one.
#
# ### When is it time to stop?
#
# Look at the condition for stopping. Many programs have another one: they stop when a **step** has become
# shorter than the tolerance, since then hardly anything moves. A step is the learning rate times the
# gradient, so this rule compares the gradient with the tolerance divided by the learning rate. Predict: with
# a learning rate of 0.01 and a tolerance of 0.001, how many times as large as the tolerance is the gradient
# when this rule stops?

# %%
times = None  # your number

# %% answer="true"
times = 100

# %%
away = {}
for rate in (0.1, 0.01):
    path = descend(start, x, y, rate, tolerance=1e-3 / rate, max_steps=2200)
    away[rate] = (path[-1] - best).norm().item()
    told = f"stops after {len(path) - 1} steps, {away[rate]:.3f} from the lowest point"
    print(f"learning rate {rate:4}: {told}")
assert away[0.01] > 5 * away[0.1]
score("gradient / tolerance", times, 100, gradient(path[-1], x, y).norm().item() / 1e-3)

# %% [markdown]
# With the smaller learning rate the descent stops **farther** from the lowest point, and only because its
# steps are short. That is why `descend` looks at the gradient instead. The same mistake is easy to make by
# eye: with a very low learning rate the loss curve of a training run is nearly flat, and the run looks as
# if it had arrived.
#
# ### How fast may you go?
#
# A larger learning rate needs fewer steps, but only up to a point. Try some learning rates, and watch the
# number of steps.

# %%
num_steps = {}
for rate in (0.01, 0.03, 0.1, 0.25, 0.3):
    path = descend(start, x, y, rate, tolerance=1e-3, max_steps=2200)
    num_steps[rate] = len(path) - 1
    print(f"learning rate {rate:4}: {num_steps[rate]:4} steps, w = {path[-1, 0]:.3f}")
assert 9 < num_steps[0.01] / num_steps[0.1] < 11
assert not path[-1].isfinite().all(), "a learning rate of 0.3 diverges"

# %% [markdown]
# Up to 0.25, ten times the learning rate needs about a tenth of the steps. But with 0.3 the descent never
# arrives: after some steps the numbers are too large for a float (`nan` means "not a number"). The descent
# **diverges**. Where is the limit?
#
# In one dimension the limit is easy to find. Near its lowest point a loss looks like a parabola,
# $\frac{h}{2} d^2$, where $d$ is the distance to that point and $h$ is the second derivative. Its gradient
# is $h d$, so a step with the learning rate $r$ turns the distance $d$ into $d - r h d = (1 - r h) d$. If
# $r h$ is above 2, the new point is farther away than the old one, on the other side, and each step makes
# the distance larger.
#
# With two parameters there are two such directions, along the valley and across it. The second derivatives
# of the loss form a matrix, the **Hessian**. Its **eigenvectors** are the two directions, and its
# **eigenvalues** are the two values of $h$. The steepest direction, with the largest $h$, sets the limit.

# %% exercise="largest_rate" todo="1.3" minutes=10 difficulty=2 points=2
from manyhands.gradient_descent.descent import largest_rate

# %% check="1.3" tags=["nbval-check-output"]
check.largest_rate(largest_rate)

# %% [markdown]
# The Hessian of this loss contains none of $w$, $b$ and $y$. The loss is a parabola in every
# direction, and the second derivatives of a parabola are the same everywhere, so $w$ and $b$ do not
# appear. And $y$ is only subtracted from the prediction: it moves the parabola, but does not change
# its shape.
#
# Now test learning rates 2 % below and 2 % above your limit. Below it, the distance to the lowest point
# should shrink. Above it, each step should multiply the distance across the valley by $|1 - r h|$, which is
# more than 1. Predict: how large is this factor 2 % above the limit?

# %%
growth = None  # your number

# %% answer="true"
growth = abs(1 - 1.02 * 2)

# %%
if check.ready("1.3"):
    limit = largest_rate(x)
    print(f"largest learning rate {limit:.4f}")
    for share in (0.98, 1.02):
        path = descend(start, x, y, share * limit, 0.0, 300)
        away = (path - best).norm(dim=1).tolist()
        print(
            f"{share} of the limit: distance {away[0]:.2f} at the start, {away[300]:.3g} after 300 steps"
        )
        assert (away[300] < away[0]) == (share < 1)
    measured = (away[300] / away[200]) ** 0.01
    score("growth per step", growth, 1.04, measured)
    assert abs(measured - 1.04) < 0.005

# %% [markdown]
# The limit is where the formula says it is. (The growth is measured over the last 100 steps, because at the
# beginning the distance **along** the valley counts too, and that distance shrinks.)
#
# This limit is why learning rates need so much care. The steepest direction caps the learning rate, so the
# way along the flattest direction takes many steps: the longer the valley, the more. The **condition
# number** of the Hessian, its largest eigenvalue divided by its smallest, tells how long it is. In a long
# valley, and with a learning rate of nine tenths of the limit, the steps to a given tolerance are about
# proportional to this number. (Still closer to the limit the steep direction is the slow one.) For a
# real network nobody writes down the Hessian, but lesson 02 finds its largest eigenvalue.

# %% [markdown]
# ## 4. Some samples instead of all
#
# Does a step have to look at all samples? With 100 of them that costs little, but a language model is
# trained on trillions of tokens. The gradient of a **few samples drawn at random** is cheaper, and its
# expected value is the gradient of all samples, so on average it points in the right direction. This is
# **stochastic gradient descent**. The few samples are a **mini-batch**, or batch for short.
#
# Batches are usually drawn without replacement: shuffle all samples, deal them out in batches, and shuffle
# again when all of them have been used. One pass through all samples is an **epoch**.

# %% exercise="mini_batches" todo="1.4" minutes=5 difficulty=1 points=1
from manyhands.gradient_descent.descent import mini_batches

# %% check="1.4" tags=["nbval-check-output"]
check.mini_batches(mini_batches)

# %%
if check.ready("1.4"):
    for chosen in mini_batches(10, 4, torch.Generator().manual_seed(0)):
        print(chosen.tolist())

# %% [markdown]
# Each number comes exactly once, and the last batch is smaller. Now write the loop over batches. How a step
# is made from a gradient is left open: the step is passed in as a function, so that you can try another kind
# of step later without a new loop. The plain step is
#
# ```python
# def step(parameters, slope):  # the slope is the gradient of a batch
#     return parameters - 0.1 * slope
# ```

# %% exercise="descend_in_batches" todo="1.5" minutes=15 difficulty=2 points=3
from manyhands.gradient_descent.descent import descend_in_batches

# %% check="1.5" tags=["nbval-check-output"]
check.descend_in_batches(descend_in_batches)


# %% [markdown]
# How do the paths differ? Here are three descents from the same start, each with 60 steps and a learning
# rate of 0.1: with all 100 samples, with batches of 10, and with single samples.


# %%
def plain(rate):
    return lambda parameters, slope: parameters - rate * slope  # a step of this learning rate


def walk(batch, num_steps, step, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return descend_in_batches(start, x, y, batch, num_steps, step, generator)


NAMES = {100: "all 100 samples", 10: "batches of 10", 1: "one sample"}


def draw_path(ax, path, batch):
    draw_map(ax)
    in_sight = (path.abs() < 1e3).all(dim=1).long().cumprod(dim=0).sum()  # until it is far away
    w, b = path[:in_sight].T.tolist()
    look = figures.style(NAMES[batch], [*NAMES].index(batch))
    ax.plot(w, b, **look | {"linestyle": "-", "markersize": 3, "linewidth": 0.8})
    ax.plot(*start, "o", color=figures.BLACK, markersize=6)


# %%
if check.ready("1.4", "1.5"):
    figure, axes = figures.new_figure(9, 3.6, cols=3)
    for ax, (batch, name) in zip(axes, NAMES.items(), strict=True):
        draw_path(ax, walk(batch, 60, plain(0.1)), batch)
        ax.set_title(name, fontsize=11)
    figures.show(
        figure,
        "The paths of 60 steps over the map of the loss: smooth with all samples, a little shaky with "
        "batches of 10, ragged with one sample.",
    )

# %% [markdown]
# With all samples the path is smooth. With batches of 10 it shakes but goes the same way. With single
# samples it jumps about and does not settle even near the lowest point, because each sample pulls towards a
# different line.
#
# But the three descents did not do the same amount of work: 60 steps with all samples look at 6,000
# samples, and 60 steps with single samples look at only 60. Compare them by the samples that they looked
# at: which of the three has the lowest loss after 100 samples, and which after 1,000?

# %%
after_100, after_1000 = None, None  # 100, 10 or 1: the batch size

# %% answer="true"
after_100, after_1000 = 1, 10

# %%
if check.ready("1.4", "1.5"):
    curves, found = {}, {}
    for batch, name in NAMES.items():
        paths = [walk(batch, 1000 // batch, plain(0.1), seed) for seed in range(10)]
        mean = torch.stack([mean_squared_error(path, x, y) for path in paths]).mean(dim=0)
        steps = range(0, len(mean), max(1, 50 // batch))  # not each of them: the line would blur
        curves[name] = ([batch * step for step in steps], mean[list(steps)].tolist())
        found[batch] = [mean[samples // batch].item() for samples in (100, 1000)]
    figure, ax = figures.new_figure()
    floor = mean_squared_error(best, x, y).item()
    figures.lines(ax, curves, "samples looked at", "loss (mean of 10 runs)", floor)
    ax.set(yscale="log", ylim=(0.25, 10))
    ax.set_yticks([0.3, 1, 3, 10], ["0.3", "1", "3", "10"])
    figures.show(figure, "The loss against the samples looked at, for three batch sizes.")
    for samples, said, which in ((100, after_100, 0), (1000, after_1000, 1)):
        losses_there = {batch: found[batch][which] for batch in NAMES}
        lowest = min(losses_there, key=losses_there.get)
        told = ", ".join(f"batch {batch}: {loss:.3f}" for batch, loss in losses_there.items())
        print(f"after {samples:4} samples {told}. Lowest: {lowest}, you said {said}")
    assert found[1][0] < found[10][0] < found[100][0]
    assert found[10][1] < found[1][1] < found[100][1]

# %% [markdown]
# The floor is the loss at the lowest point. Per sample looked at, small batches bring the loss down much
# faster at first, because they take many more steps. Later, the curve of single samples stays above the curve
# of batches of 10, because its steps keep jumping. (A smaller learning rate towards the end calms such steps,
# which is why most training runs let the learning rate fall.)
#
# So why would anyone use large batches? Because a processor works on the samples of a batch **at the same
# time**, and many processors can work on even more. What counts then is the number of steps, not the number
# of samples. Lesson 03 measures this trade-off.

# %% [markdown]
# ## 5. How noisy is a batch?
#
# By how much does the gradient of a batch differ from the gradient of all samples, and how does the
# difference depend on the batch size $M$? Take the squared distance between the two, averaged over many
# batches: this is the **variance** of the gradient.

# %% exercise="gradient_variance" todo="1.6" minutes=10 difficulty=2 points=2
from manyhands.gradient_descent.descent import gradient_variance

# %% check="1.6" tags=["nbval-check-output"]
check.gradient_variance(gradient_variance)

# %% [markdown]
# The mean of $M$ independent numbers has a variance $M$ times smaller than that of one number. If this rule
# holds here, the variance is $V / M$, where $V$ is the variance of a single sample's gradient. The next
# cell measures the variance at the start of the path and fits a power law with the function from lesson 00.
# Predict: what slope will the line have on two logarithmic axes? And by what factor does the variance fall
# from batch 4 to batch 64?

# %%
exponent, fall = None, None  # your numbers

# %% answer="true"
exponent, fall = -1, 16

# %%
if check.ready("1.6"):
    generator = torch.Generator().manual_seed(0)
    batches = [1, 2, 4, 8, 16, 32, 64]
    variances = [gradient_variance(start, x, y, M, 1000, generator) for M in batches]
    single = torch.stack([gradient(start, x[[i]], y[[i]]) for i in range(len(x))])
    V = (single - gradient(start, x, y)).square().sum(dim=1).mean().item()
    a, b = fit_power_law(batches, variances)
    print(f"variance of one sample's gradient: {V:.0f}; the line begins at {a:.0f}")
    score("slope", exponent, -1, -b)  # a power law is a * M ** -b
    score("variance of batch 4 / batch 64", fall, 16, variances[2] / variances[6])
    assert abs(b - 1) < 0.1


# %% [markdown]
# The slope is -1 up to measurement error, so twice the batch halves the variance.
#
# ### With replacement or without?
#
# Your function drew its batches **with** replacement: a sample could come twice. The rule $V / M$ holds for
# this case. But training draws **without** replacement, and then a batch of all 100 samples has no noise at
# all. For $M$ of $N$ samples the formula then has one more factor, $\frac{N - M}{N - 1}$. Where do the two
# curves separate?


# %%
def variance_without(batch, epochs):
    generator, whole = torch.Generator().manual_seed(1), gradient(start, x, y)
    batches = [c for _ in range(epochs) for c in mini_batches(len(x), batch, generator)]
    whole_batches = [chosen for chosen in batches if len(chosen) == batch]
    squares = [(gradient(start, x[c], y[c]) - whole).square().sum() for c in whole_batches]
    return torch.stack(squares).mean().item()


if check.ready("1.4", "1.6"):
    N, sizes = len(x), [1, 2, 4, 10, 20, 50, 80, 95]
    without = [variance_without(M, epochs=3 * M) for M in sizes]
    assert without[-1] < V / sizes[-1] / 4, "nearly all samples make nearly no noise"
    fine = range(1, 100)
    measured = {"without replacement": (sizes, without), "with replacement": (batches, variances)}
    predicted = {
        "with replacement": (fine, [V / M for M in fine]),
        "without replacement": (fine, [V / M * (N - M) / (N - 1) for M in fine]),
    }
    figure, ax = figures.new_figure()
    figures.measured_and_predicted(ax, measured, predicted, "batch size", "gradient variance")
    figures.show(
        figure,
        "Variance of the gradient against batch size: slope -1 with replacement, and a steep fall to 0 "
        "without replacement.",
    )

# %% [markdown]
# The points lie close to their curves, which separate only where a batch is a considerable part of the
# data. In a large data set every batch is a small part, so the difference does not matter.
#
# Keep this law in mind: **k times the batch, one k-th of the variance**. When $k$ processors average the
# gradients of $k$ batches, they compute the gradient of one batch that is $k$ times as large. Lessons 03
# and 07 ask whether you can turn the calmer steps into faster training.
#
# ### How low does the noise let you get?
#
# What happens if a descent **begins** at the lowest point? With all samples nothing happens, because the
# gradient there is zero. But the gradient of a batch is not zero there, so each step throws the parameters
# some way off. The farther off they are, the more strongly the slope pulls them back, and at some height
# above the lowest loss the two effects balance. A step with the learning rate $r$ adds about $r^2 V / M$ to
# the squared distance, and the pull of the slope takes away a share of it that is proportional to $r$. So the
# height should be proportional to $r V / M$. (For small learning rates the full calculation gives
# $r V / 4 M$, where $V$ is the variance of a single sample's gradient at the lowest point.)
#
# The next cell measures the mean height over many steps. To be close to drawing with replacement, it draws
# its batches from 1,000 samples, which are the same 100 points ten times. Predict two ratios: by what
# factor does the height change when the learning rate is halved? And when both the learning rate and the
# batch are four times as large?

# %%
halved, both_fourfold = None, None  # your numbers

# %% answer="true"
halved, both_fourfold = 0.5, 1

# %%
if check.ready("1.4", "1.5"):
    lowest = mean_squared_error(best, x, y)
    many_x, many_y = x.repeat(10), y.repeat(10)
    heights = {}
    for M, rate in ((1, 0.01), (1, 0.02), (2, 0.02), (2, 0.04), (4, 0.04), (4, 0.08)):
        generator = torch.Generator().manual_seed(0)
        path = descend_in_batches(best, many_x, many_y, M, 4000, plain(rate), generator)
        heights[M, rate] = (mean_squared_error(path[500:], x, y) - lowest).mean().item()
    by_rate, by_both = heights[1, 0.01] / heights[1, 0.02], heights[4, 0.04] / heights[1, 0.01]
    score("learning rate halved", halved, 0.5, by_rate)
    score("both four times", both_fourfold, 1, by_both)
    assert by_rate < 0.7 and 0.6 < by_both < 1.7
    at_best = torch.stack([gradient(best, x[[i]], y[[i]]) for i in range(len(x))])
    V_best = at_best.square().sum(dim=1).mean().item()
    measured = {
        f"batch {M}": ([rate / M, 2 * rate / M], [heights[M, rate], heights[M, 2 * rate]])
        for M, rate in ((1, 0.01), (2, 0.02), (4, 0.04))
    }
    predicted = {"r V / 4 M": ([0, 0.025], [0, V_best / 4 * 0.025])}
    figure, ax = figures.new_figure(7, 3.8)
    names = ("learning rate / batch size", "loss above the lowest")
    figures.measured_and_predicted(ax, measured, predicted, *names)
    ax.set(xscale="linear", yscale="linear", xlim=(0, 0.025), ylim=(0, 0.04))
    figures.show(figure, "The height of the balance is about proportional to the ratio.")

# %% [markdown]
# The height depends on the learning rate and the batch size mainly through their **ratio**. Two rules of
# large training runs follow from this. First, a lower learning rate towards the end of a run is a cheap way
# to get rid of noise. Second, if you make the batch $k$ times as large, you may make the learning rate $k$
# times as large and keep the balance at about the same height. This is the linear rule, which lesson 07
# tests. The figure also shows why the rule has to end somewhere: the point with the largest learning rate
# (batch 4, on the right) lies well above the line, because the closer the learning rate comes to the limit
# of section 3, the more a step overshoots and magnifies the noise.

# %% [markdown]
# ## 6. Momentum (optional)
#
# Can you get through a long valley faster? Plain descent crawls along the bottom, because the steep sides
# limit the learning rate. **Momentum** adds up the gradients of earlier steps. Along the valley these
# gradients all agree, so their sum grows; across the valley they soon change sign, so they largely cancel.

# %% exercise="Momentum.__init__ Momentum.__call__" todo="1.7" minutes=10 difficulty=2 points=1
from manyhands.gradient_descent.descent import Momentum

# %% check="1.7" tags=["nbval-check-output"]
check.Momentum(Momentum)

# %%
if check.ready("1.4", "1.5", "1.7"):
    arrived = {}
    for momentum in (0.0, 0.5, 0.8, 0.9, 0.95):
        path = walk(100, 1000, Momentum(0.1, momentum))
        near = (path - best).norm(dim=1) < 0.01
        arrived[momentum] = near.long().argmax().item()
        print(f"momentum {momentum:4}: {arrived[momentum]:3} steps until within 0.01")
    assert arrived[0.8] < arrived[0.0] / 2 and arrived[0.8] < arrived[0.95] / 2

# %% [markdown]
# Up to a point momentum saves most of the steps, because where the gradient stays the same, momentum $\mu$
# lengthens the steps until they are $1 / (1 - \mu)$ times as long: five times for 0.8. With too much
# momentum the path swings past the lowest point and back many times.
#
# If that is right, a learning rate of 0.02 with momentum 0.8 must get about as far along the valley as one
# of $0.02 / (1 - 0.8) = 0.1$ without. Compare the last two panels:

# %%
if check.ready("1.4", "1.5", "1.7"):
    figure, axes = figures.new_figure(9, 3.6, cols=3)
    for ax, (rate, momentum) in zip(axes, ((0.02, 0.0), (0.1, 0.0), (0.02, 0.8)), strict=True):
        draw_path(ax, walk(100, 60, Momentum(rate, momentum)), 100)
        ax.set_title(f"learning rate {rate}\nmomentum {momentum:g}", fontsize=10)
    figures.show(
        figure,
        "Three paths of 60 steps with all samples: a learning rate of 0.02 does not get far; 0.1, and "
        "0.02 with momentum 0.8, get near the lowest point.",
    )

# %% [markdown]
# The two paths do end at about the same place. The path with momentum swings across the valley at first,
# until the alternating gradients cancel, and then its steps along the valley grow as long as those of the
# learning rate 0.1.

# %% [markdown]
# ## 7. Turn the knobs
#
# How do the learning rate and the batch size act together? The rows are batch sizes and the columns
# learning rates, and each path has 60 steps. See what happens in the last column.

# %%
if check.ready("1.4", "1.5"):
    figure, axes = figures.new_figure(8, 9.2, rows=3, cols=3)
    for row, batch in zip(axes, NAMES, strict=True):
        for ax, rate in zip(row, (0.02, 0.1, 0.26), strict=True):
            draw_path(ax, walk(batch, 60, plain(rate)), batch)
            ax.set_title(f"{NAMES[batch]}, learning rate {rate}", fontsize=10)
            ax.label_outer()
    figures.show(
        figure, "Nine paths over the map of the loss: three batch sizes, three learning rates."
    )

# %% [markdown]
# Go column by column. In 60 steps a learning rate of 0.02 does not get far, and 0.1 gets near the lowest
# point. At 0.26, just below the limit, the path with all samples jumps from side to side and still gets
# there. With batches of 10 it jumps much farther, and with single samples it is thrown out of the picture,
# because a sample with a large $x$ has a steeper valley of its own and so a lower limit.
#
# How low is the limit of single samples?

# %% tags=["nbval-check-output"]
if check.ready("1.3"):
    limits = [largest_rate(x[[i]]) for i in range(len(x))]
    print(
        f"all samples {largest_rate(x):.3f}, single ones from {min(limits):.3f} to {max(limits):.3f}"
    )
    assert min(limits) > 0.1 and 0.4 < sum(limit < 0.26 for limit in limits) / len(x) < 0.5

# %% [markdown]
# The learning rate 0.1 lies just below the lowest of these limits, while 0.26 is above the limits of nearly
# half of the samples.
#
# Three more settings are worth a look. Before you run the cell, sketch each path:


# %%
def step_with(rate, momentum):
    return Momentum(rate, momentum) if momentum else plain(rate)


def draw_walk(ax, batch, rate, momentum=0.0):
    draw_path(ax, walk(batch, 60, step_with(rate, momentum)), batch)
    ax.set_title(f"batch {batch}, learning rate {rate}\nmomentum {momentum:g}", fontsize=10)


def one_walk(batch, rate, momentum=0.0):
    figure, ax = figures.new_figure(5.5, 4.2)
    draw_walk(ax, batch, rate, momentum)
    return figure


if check.ready("1.4", "1.5"):
    momenta = (0.0, 0.5, 0.8, 0.9, 0.95) if check.lesson.done("1.7") else (0.0,)
    figure, axes = figures.new_figure(9, 3.8, cols=3)
    for ax, setting in zip(axes, ((100, 0.27), (1, 0.05), (10, 0.02, momenta[-1])), strict=True):
        draw_walk(ax, *setting)
    figures.show(figure, "Three paths: above the limit, single samples, and much momentum.")

# %% [markdown]
# On the left the learning rate is above the limit, and the path leaves the picture. In the middle, single
# samples with a learning rate of 0.05 jump about half as far as they did with 0.1. On the right, if you have
# written `Momentum`, momentum 0.95 carries the path past the lowest point, and it swings around it. Where the
# notebook has widgets, you can now turn the knobs yourself:

# %%
if check.ready("1.4", "1.5"):
    rates = (0.1, 0.02, 0.05, 0.15, 0.2, 0.25, 0.26, 0.27, 0.3)
    knobs = {"batch": [*NAMES], "rate": rates, "momentum": momenta}
    figures.show_sliders(one_walk, "batch size, learning rate and momentum", **knobs)

# %%
check.summary()

# %% [markdown]
# ## Recap
#
# You can now
#
# - say what a zero gradient means for the errors of a line, and why a descent should not stop merely
#   because its steps are short,
# - predict the learning rate at which descent diverges: 2 divided by the Hessian's largest eigenvalue,
# - descend in batches that are drawn without replacement,
# - say how the noise of a step depends on the batch size, and measure it,
# - say how low the noise lets a descent get, from the learning rate and the batch size.
#
# **Questions**
#
# <details><summary>All your x are ten times as large as before. What happens to the largest learning rate?</summary>
#
# The mean of x² in the Hessian grows a hundredfold, and it makes up most of the largest eigenvalue. Here
# the largest learning rate becomes 78 times smaller. That is one reason why inputs are scaled before
# training.
# </details>
#
# <details><summary>Somebody uses the sum of the squared errors as the loss, not their mean. What changes when the batch gets twice as large?</summary>
#
# The gradient of the sum gets about twice as large too, so the same learning rate takes steps twice as
# long, and the descent may diverge. With the mean the gradient keeps its size, and only its noise changes.
# </details>
#
# <details><summary>By how much must the batch grow so that the gradient's typical error, not its square, is halved?</summary>
#
# The variance is the mean of the squared error. Half the error means a quarter of the variance, so the
# batch must be four times as large.
# </details>
#
# **Sources**: Bottou, Curtis, Nocedal 2018, "Optimization Methods for Large-Scale Machine Learning",
# https://arxiv.org/abs/1606.04838; Goh 2017, "Why Momentum Really Works",
# https://distill.pub/2017/momentum.
