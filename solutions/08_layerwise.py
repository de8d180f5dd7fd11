# ---
# manyhands: {title: Layer-wise optimizers, goal: "Write LARS, LARC, LAMB and NovoGrad from their papers, see what a rate of its own does for each layer, and keep them correct when layers are sharded", job: {flags: "--seeds 2 --tuning 1 --small-steps 60 --large-steps 20", loss: [0.051, 0.18]}}
# ---

# %% [markdown]
# # 08 Layer-wise optimizers
#
# With a large batch there are few steps, so each of them has to be long (lesson 07). The length of a step is
# limited by the layer that can bear the least: as soon as one layer is thrown off, the loss explodes, even if
# all other layers could have moved ten times as far. **Why should all layers share one learning rate?**
#
# The optimizers of this lesson give every layer a learning rate of its own. With such optimizers ResNet-50
# was trained with batches of 32,768 images, and BERT with batches of 65,536 sequences, or 32,768 where the
# sequences were long. You will write four of them, three from their papers and one that has none, as
# optimizers that could be used anywhere, and you will see why two programs that both say "LARS" can train
# differently.
#
# ![In three layers the norms of weights and gradients differ several times, so one rate moves them by very different shares; a trust ratio moves each by the same share](figures/layerwise_ratio.svg)

# %%
import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from manyhands.checks import layerwise as check, score
from manyhands.data import images
from manyhands.first_job.planning import my_share
from manyhands.instruments import figures
from manyhands.jobs import watch
from manyhands.large_batch.ties import ranked
from manyhands.layerwise.base import ZeroNorm
from manyhands.layerwise.comparison import compared, is_inside, table
from manyhands.layerwise.figures import accuracies_drawn
from manyhands.layerwise.norms import added_up, whole_norms
from manyhands.layerwise.options import refuse_flats, refuse_options
from manyhands.layerwise.training import Parts, Way, loss_of, network, split, train, ways
from manyhands.ranks import lab
from manyhands.ranks.lab import run_ranks
from manyhands.training import storage

lab.warm_up()
torch.set_num_threads(1)
data = split(images.load("embedded"))
print(f"torch {torch.__version__}; everything here runs on the CPU, ranks talk through gloo")
print(data.note)

# %% [markdown]
# In this lesson a **layer** is one parameter tensor: a matrix of weights or a vector of biases. Look at the
# layers of a small network before its first step. The last column says by which share of its own norm a layer
# would move in one step of plain gradient descent with a learning rate of 0.1.

# %%
model = network(data, seed=1)
loss_of(model, data.train_inputs, data.train_labels).backward()
shares = {}
for name, layer in model.named_parameters():
    shares[name] = (0.1 * layer.grad.norm() / layer.norm()).item()
    norms = f"|w| = {layer.norm():6.3f}   |g| = {layer.grad.norm():7.4f}"
    print(f"{name:10} {str(list(layer.shape)):10} {norms}   moves by {shares[name]:8.4%}")
matrices = [share for name, share in shares.items() if name.endswith("weight")]
for words, found in (("matrices", matrices), ("all layers", list(shares.values()))):
    print(f"{words}: largest share / smallest share = {max(found) / min(found):.1f}")
assert max(matrices) > 2 * min(matrices) and max(shares.values()) > 10 * min(shares.values())

# %% [markdown]
# All layers have the same learning rate, and yet, measured by their own size, some move much farther than
# others. Among the matrices the fastest moves more than twice as far as the slowest, and a bias with its small
# norm moves farther still. If the learning rate were raised until the slowest layer moved well, the fastest
# might be thrown off.

# %% [markdown]
# ## 1. How high can one learning rate be?
#
# Before you build a better method, measure the limit of the plain one. The **learning-rate range test** is
# a single short training: the learning rate starts too low and grows at every step, until the loss
# explodes. Smith, who proposed the test in 2015 (published in 2017), let the learning rate grow linearly
# and plotted the accuracy. The library fastai made popular the form that you will write, in which the
# learning rate grows by a constant factor and the test stops when the loss has become much too high. As a
# rule of thumb, the useful learning rates begin where the loss starts to fall, and end before it turns up.
#
# After the exercise, SGD with momentum takes the test with three batch sizes. Watch whether a larger batch
# moves the explosion to a higher learning rate.

# %% exercise="range_test" todo="8.1" minutes=10 difficulty=1 points=1
from manyhands.layerwise.rates import range_test

# %% check="8.1" tags=["nbval-check-output"]
check.range_test(range_test)


# %%
def steps_of(batch, seed=1):
    """A step of SGD with momentum that takes its learning rate and gives its loss."""
    model = network(data, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    draw = torch.Generator().manual_seed(seed)

    def step(rate):
        optimizer.param_groups[0]["lr"] = rate
        chosen = torch.randperm(len(data.train_inputs), generator=draw)[:batch]
        optimizer.zero_grad()
        loss = loss_of(model, data.train_inputs[chosen], data.train_labels[chosen])
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def smoothed(losses, reach=4):
    """Means of up to nine neighbours: the loss of a small batch jumps from step to step."""
    return [fmean(losses[max(0, n - reach) : n + reach + 1]) for n, _ in enumerate(losses)]


all_images = len(data.train_inputs)
if check.ready("8.1"):
    figure, ax = figures.new_figure()
    curves, explodes = {}, {}
    for batch in (32, 256, all_images):
        rates, losses = range_test(steps_of(batch), 0.01, 3.0, 200)
        means = smoothed(losses)
        curves[f"batch {batch}"] = (rates, means)
        explodes[batch] = rates[-1]
        falls = next(n for n, mean in enumerate(means) if mean < 0.9 * losses[0])
        lowest = min(range(len(means)), key=means.__getitem__)
        print(f"batch {batch:4}: the loss begins to fall at {rates[falls]:.3f}", end="")
        print(f" and is lowest, {means[lowest]:.2f}, at {rates[lowest]:.3f}", end="")
        print(f"; the test ended at {rates[-1]:.3f} after {len(rates)} steps")
        assert means[lowest] < 0.7 * losses[0] and rates[falls] < rates[lowest] < rates[-1]
    figures.lines(ax, curves, "learning rate", "loss before the step, smoothed")
    ax.set(xscale="log", ylim=(0, 3))
    figures.show(
        figure, "Range test: with growing learning rate the loss is flat, falls, and explodes."
    )
    assert explodes[all_images] < 5 * explodes[32]

# %% [markdown]
# Each curve shows its range: the learning rates between the point at which the loss begins to fall and the
# point at which it is lowest. A test this short gives only the order of magnitude: at its low end the loss
# also needs time to fall, and its high end holds for the weights that the test has reached by then. (The
# best rates for SGD in section 6 can lie above this range, because they are peaks of a schedule.) The batch
# grows by a factor of 30, but the learning rate at which the loss explodes does not follow. With all images
# in each step there is no sampling noise left, so noise cannot be what limits the step here; the curvature
# of the loss can. The linear rule met the same limit in lesson 07.

# %% [markdown]
# ## 2. LARS: trust each layer as far as its own size
#
# **LARS** (layer-wise adaptive rate scaling, You et al. 2017) makes the length of a layer's step proportional
# to the norm of the layer's weights. Without momentum, the step is
#
# $$\Delta w = \eta \cdot \underbrace{\tau \, \frac{\|w\|}{\|g\| + \beta \|w\|}}_{\text{trust ratio}} \cdot (g + \beta w),$$
#
# with the learning rate $\eta$, the weight decay $\beta$, and the trust coefficient $\tau$. For small
# $\beta$, the length of the step is about $\eta \, \tau \, \|w\|$, whatever the length of the gradient. With
# momentum $m$, the algorithm of the paper reads
#
# $$v \leftarrow m \, v + \eta \cdot \text{ratio} \cdot (g + \beta w), \qquad w \leftarrow w - v.$$
#
# The paper does not say what to do with a layer whose norm is 0, such as biases that start at 0. By the
# formula such a layer would never move. Most implementations then use a ratio of 1, and so does
# `where_not_zero` by default.
#
# The base class `Layerwise` is given. It is an ordinary `torch.optim.Optimizer` which computes both norms of
# every layer and then calls your `update`.

# %% show="true"
from manyhands.layerwise.base import Layerwise, decay_of, where_not_zero

# %% [markdown]
# Write the ratio and the update. The dictionary `self.state[weight]` is for everything that has to be kept
# from step to step. `options` holds the settings of the parameter's group: `options["lr"]`,
# `options["momentum"]`, and so on.

# %% exercise="LARS.ratio LARS.update" todo="8.2" minutes=25 difficulty=2 points=3
from manyhands.layerwise.optimizers import LARS

# %% check="8.2" tags=["nbval-check-output"]
check.LARS(LARS)

# %% [markdown]
# The next cell trains with LARS and records the trust ratio of every layer at every step, with a batch of 32
# and with all training images in one step, at the same learning rate. Watch two things in the maps: how much
# the ratios differ *between* layers, and in which direction they change *during* training.

# %%
NAMES = [name for name, _ in model.named_parameters()]


def ratios_of(optimizer, batch, rate, num_steps, **options):
    """The ratios of every layer and the norm of the whole gradient, at each step."""
    rows, lengths = [], []

    def look(model, one):
        rows.append([float(ratio) for ratio in one.ratios])
        norms = torch.stack([layer.grad.norm() for layer in model.parameters()])
        lengths.append(norms.norm().item())

    reached = train(data, Way(optimizer, options), batch, rate, num_steps, 1, look)
    return reached, list(zip(*rows, strict=True)), lengths


def change(values):
    """The mean of the last eight divided by that of the first eight."""
    return fmean(values[-8:]) / fmean(values[:8])


if check.ready("8.2"):
    figure, axes = figures.new_figure(9, 3.2, cols=2)
    ratio_change, gradient_change, ends = {}, {}, []
    for ax, batch in zip(axes, (32, all_images), strict=True):
        reached, rows, lengths = ratios_of(LARS, batch, 2.0, 80, trust=0.02)
        figures.heat_map(ax, rows, NAMES, "step", "trust ratio")
        ax.set_title(f"LARS, batch {batch:,}", fontsize=10)
        middle = [sorted(row)[len(row) // 2] for row in rows]
        matrices = [fmean(at_step) for at_step in zip(*rows[::2], strict=True)]
        ratio_change[batch], gradient_change[batch] = change(matrices), change(lengths)
        ends += [ratio for row in rows for ratio in row]
        print(f"batch {batch:3}: accuracy {reached.test:.1%} after 80 steps; ", end="")
        print(f"median ratios from {min(middle):.3f} to {max(middle):.3f} over the layers")
        print(f"   from the first 8 steps to the last 8: gradient x {change(lengths):.2f}", end="")
        print(f", mean ratio of the matrices x {change(matrices):.2f}")
        assert max(middle) > 3 * min(middle)
    for ax in axes:  # one scale of colours for both
        ax.collections[0].set_clim(min(ends), max(ends))
    figures.show(
        figure, "Trust ratio by layer and step with LARS, for batch 32 and for all images."
    )
    assert gradient_change[32] > 3 and ratio_change[32] < 0.7
    assert gradient_change[all_images] < 0.8 and ratio_change[all_images] > 1.5

# %% [markdown]
# The typical ratios of the layers differ by more than a factor of three, so no single learning rate could
# have done the same. During training the ratios move against the gradients, by which they are divided. With
# the small batch the gradients are several times as long at the end as at the beginning, and the ratios
# have shrunk. With all images in each step the gradients have become shorter, and the ratios have grown.
# Shorter gradients would shorten the steps of SGD, but at the same learning rate those of LARS stay about
# the same share of the weights, and that is why LARS needs a schedule that lowers the learning rate. The
# two trainings make equally many steps, so the one with the larger batch has seen 30 times as many images;
# the panels do not separate that from the effect of noise.

# %% [markdown]
# ## 3. LARC: the same, with a ceiling
#
# ### Is there a minimum in LARS?
#
# Some accounts of LARS write $\min(\gamma, \text{ratio})$ in its formula, where $\gamma$ is the global learning
# rate, but the paper's algorithm has no minimum. The formula with the minimum belongs to **LARC**, which has
# no paper: NVIDIA published it in its version of the library Caffe, and later in apex. Both offer two variants,
# one that scales, as LARS does, and one that clips. Here LARC means the second one, which is apex's default.
# A layer moves with the learning rate
#
# $$\min\Big(\eta, \; \tau \, \frac{\|w\|}{\|g\| + \beta \|w\|}\Big).$$
#
# So in LARS the global learning rate $\eta$ multiplies the ratio, whereas in LARC it is a ceiling.

# %% exercise="LARC.ratio" todo="8.3" minutes=10 difficulty=2 points=1
from manyhands.layerwise.optimizers import LARC

# %% check="8.3" tags=["nbval-check-output"]
check.LARC(LARC)

# %% [markdown]
# Does the minimum matter? Both optimizers get the same start, the same data and the same trust coefficient, and
# each makes 60 steps with four learning rates. The cell also counts for which share of all layers and steps
# the ceiling of LARC decides. Before you run the cell: if you raise the learning rate of LARC again and again,
# what happens to its steps in the end?


# %%
def distance_and_share(kind, rate):
    """How far all weights are from the start after 60 steps, and how often the ceiling decided."""
    start = torch.cat([layer.detach().flatten() for layer in network(data, 1).parameters()])
    ends, touched = [], []

    def look(model, optimizer):
        ends[:] = [layer.detach().flatten() for layer in model.parameters()]
        touched.extend(ratio.item() == 1 for ratio in optimizer.ratios)

    way = Way(kind, {"trust": 0.02, "weight_decay": 0.0})
    train(data, way, 256, rate, 60, 1, look)
    return (torch.cat(ends) - start).norm().item(), fmean(touched)


if check.ready("8.2", "8.3"):
    rates = [0.5, 2.0, 8.0, 32.0]
    of_lars = [distance_and_share(LARS, rate)[0] for rate in rates]
    of_larc, shares = zip(*(distance_and_share(LARC, rate) for rate in rates), strict=True)
    figure, ax = figures.new_figure(6, 3)
    series = {"LARS": (rates, of_lars), "LARC": (rates, of_larc)}
    figures.lines(ax, series, "learning rate", "distance from the start")
    ax.set(xscale="log", yscale="log")
    figures.show(
        figure,
        "Distance after 60 steps by learning rate: it soars with LARS, and levels off with LARC.",
    )
    for rate, lars, larc, share in zip(rates, of_lars, of_larc, shares, strict=True):
        print(
            f"learning rate {rate:4g}: distance {lars:8.2f} with LARS, {larc:6.2f} with LARC",
            end="",
        )
        print(f", whose ceiling decides in {share:.0%} of layers and steps")
    assert shares[0] > 0.3 and shares[-1] < 0.1
    assert of_lars[-1] > 20 * of_lars[0] and of_larc[-1] < 4 * of_larc[0]

# %% [markdown]
# The formula with the minimum is LARC's, and the minimum does matter. In LARS a learning rate that is four
# times as high makes a step from the same weights four times as long, and so the highest rates throw the
# weights far away. In LARC the higher rate only lifts a ceiling. At the lowest learning rate the ceiling
# decides in about half of all layers and steps. At the highest it hardly ever decides, and then a still higher
# learning rate would change next to nothing. Whoever copies a learning rate from a LARS recipe into a LARC
# program, or the other way round, trains with a different step length altogether, unless the rate happens to
# be near 1.

# %% [markdown]
# ## 4. LAMB: the same idea on Adam
#
# Attention networks are usually trained with Adam rather than with SGD. Adam divides each weight's step by
# the typical size of that weight's own gradients. **LAMB** (You et al. 2020) takes Adam's direction $r$,
# which includes the weight decay, and scales it per layer:
#
# $$r = \frac{\hat m}{\sqrt{\hat v} + \epsilon} + \beta w, \qquad w \leftarrow w - \eta \, \frac{\|w\|}{\|r\|} \, r.$$
#
# The hats stand for the bias correction: the averages start at 0, so after $t$ steps they are divided by
# $1 - \beta_1^t$ and $1 - \beta_2^t$.

# %% exercise="LAMB.direction LAMB.update" todo="8.4" minutes=25 difficulty=3 points=3
from manyhands.layerwise.optimizers import LAMB

# %% check="8.4" tags=["nbval-check-output"]
check.LAMB(LAMB)

# %% [markdown]
# ## 5. NovoGrad: divide by the norm instead
#
# Adam keeps two averages for each weight, which is 8 bytes per parameter in float32 (lesson 09 counts them).
# **NovoGrad** (Ginsburg et al. 2019) keeps the second one per *layer*: an average of the squared norm of its
# gradient. Each gradient is divided by the root of that average, and momentum is applied to the result:
#
# $$v \leftarrow \beta_2 v + (1 - \beta_2) \|g\|^2, \qquad m \leftarrow \beta_1 m + \Big(\frac{g}{\sqrt v + \epsilon} + \beta w\Big), \qquad w \leftarrow w - \eta m.$$
#
# Mind the first step: $v$ begins with $\|g\|^2$ itself and not with the share $1 - \beta_2$ of it, so no bias
# correction is needed.

# %% exercise="NovoGrad.update" todo="8.5" minutes=15 difficulty=2 points=2
from manyhands.layerwise.optimizers import NovoGrad

# %% check="8.5" tags=["nbval-check-output"]
check.NovoGrad(NovoGrad)

# %% [markdown]
# How many bytes of state does each of the four keep for this network, in a float32 training? Predict the ratio of
# LAMB to NovoGrad.

# %%
factor = None  # your number

# %% answer="true"
factor = 2

# %%
if check.ready("8.2", "8.3", "8.4", "8.5"):
    nbytes = {}
    for kind in (LARS, LARC, LAMB, NovoGrad):
        model = network(data, seed=1)
        optimizer = kind(model.parameters(), lr=0.01)
        loss_of(model, data.train_inputs, data.train_labels).backward()
        optimizer.step()
        kept = [one for state in optimizer.state.values() for one in state.values()]
        nbytes[kind.__name__] = sum(one.nbytes for one in kept if isinstance(one, Tensor))
    count = sum(layer.numel() for layer in model.parameters())
    print(", ".join(f"{name} {size / count:.2f}" for name, size in nbytes.items()), end="")
    print(f" bytes per parameter, for {count:,} parameters")
    score("LAMB / NovoGrad", factor, 2, nbytes["LAMB"] / nbytes["NovoGrad"])

# %% [markdown]
# ## 6. Do layer-wise learning rates help?
#
# The comparison includes SGD with momentum, AdamW, and your four, with 32 images in a step and with all
# training images. Every optimizer gets its own best learning rate, because otherwise the table would only
# compare how lucky the learning rates were. Three rules keep the comparison fair:
#
# - Learning rates are chosen on **validation images**, which are set aside from the training images as in
#   lesson 03, and on seeds that serve only this purpose. The test images and five other seeds then judge.
# - The search tries learning rates by factors of two, and goes on until both neighbours of the best one have
#   been tried and are no better. A best rate at the end of a grid would mean that the grid was too short.
# - Two optimizers share a rank if the seeds cannot tell them apart, as in lesson 07.
#
# The small batch gets 120 steps and the large one 30. Two ranks share the work. Which of the six would you
# expect to lose least with the large batch?

# %%
SEEDS, STEPS = range(1, 6), {32: 120, all_images: 30}


def share_of_work(every):
    torch.set_num_threads(1)
    tasks = [(place, batch, name) for place, batch in enumerate(STEPS) for name in every]
    found = []
    for place, batch, name in my_share(tasks, dist.get_rank(), dist.get_world_size()):
        first = every[name].first[place]
        outcome = compared(data, every[name], batch, first, STEPS[batch], tuning=2, seeds=SEEDS)
        found.append((batch, name, outcome))
    return found


if check.ready("8.2", "8.3", "8.4", "8.5"):
    every = ways(Parts(LARS, LARC, LAMB, NovoGrad))
    shares = run_ranks(share_of_work, 2, every, timeout_s=200)
    found = {(batch, name): outcome for share in shares for batch, name, outcome in share}
    outcomes = {batch: {name: found[batch, name] for name in every} for batch in STEPS}
    behind = {}
    for batch, of_batch in outcomes.items():
        assert all(map(is_inside, of_batch.values()))  # no best rate at the end of its grid
        for line in table(of_batch, ranked({n: one.accuracies for n, one in of_batch.items()})):
            print(f"batch {batch:3}, {line}")
        means = {name: fmean(one.accuracies) for name, one in of_batch.items()}
        behind[batch] = {name: max(means.values()) - mean for name, mean in means.items()}
    figures.show(
        accuracies_drawn(outcomes),
        "Accuracy of six optimizers at their best rates: five seeds, small and large batch.",
    )
    small, large = behind.values()
    for name in ("SGD", "LARS", "AdamW"):
        print(f"{name:5} is behind the best by {small[name]:.1%} and by {large[name]:.1%}")
    assert large["SGD"] > 2 * small["SGD"] and large["LARS"] < 0.7 * large["SGD"]
    assert max(small["AdamW"], large["AdamW"]) < 0.05

# %% [markdown]
# With the small batch, plain SGD is not far behind the best of the others. With the large batch this gap is
# more than twice as wide, and **LARS**, which is SGD with the same momentum, here with the learning rate
# inside it, a trust ratio and a little weight decay, closes a large part of it. This observation made the
# layer-wise methods known. But look at
# **AdamW** too, which stays near the best with both batches. A later study came to a similar result for
# ResNet-50 and BERT (Nado et al. 2021): carefully tuned standard optimizers matched LARS and LAMB. The
# order of optimizers that share a rank is a question of seeds.
#
# The comparison has limits. Only the learning rate was tuned, whereas momentum, betas and weight decay were
# fixed at values that may suit some optimizers better than others. All data here are images. LAMB became known
# for training language models, and whether it is better than AdamW there is not tested here.
#
# Does the result carry over to a larger task? The job of this lesson made the same comparison on MNIST, with
# 500 steps for the small batch, and 40 steps for a batch of 4,096. In the output, `=` marks a tie:

# %%
stored = storage.stored("layerwise", "mnist")
print(stored["data"])
of_stored = {}
for name, batch, _, accuracies in stored["all"]:
    of_stored.setdefault(batch, {})[name] = accuracies
place = {}
for batch, accuracies in of_stored.items():
    classes = ranked(accuracies)
    place[batch] = {name: number for number, group in enumerate(classes, 1) for name in group}
    print(f"batch {batch:5,}: {' > '.join(' = '.join(group) for group in classes)}")
    means = {name: f"{fmean(values):.1%}" for name, values in accuracies.items()}
    print("            ", ", ".join(f"{name} {mean}" for name, mean in means.items()))
for _, _, tried in stored["tried"]:
    best = max(tried, key=lambda one: one[1])
    assert tried[0] < best < tried[-1]  # no best rate at the end of its grid
small, large = place.values()
assert small["AdamW"] == small["LAMB"] == 1 and small["LARS"] == small["SGD"]
assert large["LAMB"] == large["LARS"] == 1 < large["AdamW"] == large["LARC"]
assert large["SGD"] == max(large.values())

# %% [markdown]
# There the trust ratio pays with the large batch. LAMB and LARS come first; AdamW follows about one point
# behind, which is more than the seeds explain, and SGD is last by far. With the small batch AdamW and LAMB
# are first, and LARS is no better than SGD. So a trust ratio is no improvement in general, but here it
# helped with the large batch and its few steps.
#
# ## 7. What the name does not say
#
# Two programs that both call themselves LARS may train differently, because a paper leaves choices open. Your
# class takes these choices as arguments, and its defaults follow the paper where the paper decides. Two of
# the choices are worth a closer look.
#
# **Is the learning rate inside the momentum?** In the paper it is inside: each old contribution keeps the
# learning rate of its own time. In implementations that build on torch's SGD it is outside, so when the
# learning rate falls, old contributions shrink with it. As long as the learning rate is constant, the two
# variants are equal.

# %%
if check.ready("8.2"):
    ends = {}
    for inside in (True, False):
        for varies in (False, True):
            weight = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
            optimizer = LARS([weight], lr=0.1, trust=0.1, lr_inside=inside)
            for step in range(20):
                optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / 20) if varies else 0.1
                weight.grad = weight.detach() - 0.5
                optimizer.step()
            ends[inside, varies] = weight.detach()
    for varies, words in ((False, "constant rate"), (True, "falling rate")):
        difference = (ends[True, varies] - ends[False, varies]).abs().max().item()
        print(f"{words}: inside and outside differ by {difference:.1e} after 20 steps")
    assert torch.allclose(ends[True, False], ends[False, False], rtol=1e-12)
    assert not torch.allclose(ends[True, True], ends[False, True], rtol=1e-3)

# %% [markdown]
# With a constant learning rate only rounding separates the two variants, but with a falling one they end at
# different weights.
#
# **What happens to a layer with norm 0?** The formula taken literally gives such a layer a ratio of 0, so it
# never moves ("stay"). The alternatives are a ratio of 1 ("one"), and a ratio of 1 without weight decay
# ("no_decay"). Here is a bias that starts at 0, with each of the three choices.

# %%
if check.ready("8.2"):
    for choice in ("one", "no_decay", "stay"):
        bias = nn.Parameter(torch.zeros(3))
        optimizer = LARS([bias], lr=0.1, zero_norm=choice)
        for _ in range(10):
            bias.grad = bias.detach() - torch.tensor([1.0, 2.0, 3.0])
            optimizer.step()
        values = ", ".join(f"{value:.3f}" for value in bias.tolist())
        print(f"zero_norm={choice!r:10}: after 10 steps the bias is {values}")
    assert not bias.detach().any()

# %% [markdown]
# With "stay" the bias never moves. With a ratio of 1 it takes one ordinary step, which the momentum carries
# on for a while; "no_decay" gives the same, since a bias at 0 has no weight decay anyway. From the second
# step on the ratio is that of LARS, here about a thousandth of |w| / |g|, so after one step that was not
# scaled at all the layer hardly takes any more of its own. This is one reason to exclude biases and norms
# from the trust ratio altogether, as many recipes do: they put them into a parameter group of their own,
# which is trained by plain SGD.

# %% [markdown]
# ## 8. What changes when a layer is sharded?
#
# Under data parallelism every rank has whole layers, and nothing changes. With sharded parameters (lessons 10
# and 13) a rank holds only a part of a layer. The norm of this part is not the norm of the layer, so each
# rank would compute a different ratio. The parts of one layer would drift apart, and no error message would
# tell you.
#
# A norm over shards needs a message: the sums of squares are added over the ranks, and then the root is taken
# of the total. The maximum norm, which clipping and some diagnostics use, needs the largest value over all
# ranks. The parts may be uneven or even empty, because not every layer can be divided by the number of ranks.

# %% exercise="shard_norms" todo="8.6" minutes=15 difficulty=2 points=2
from manyhands.layerwise.norms import shard_norms

# %% check="8.6" tags=["nbval-check-output"]
check.shard_norms(shard_norms)

# %% [markdown]
# To see the difference, a layer of 10 x 4 weights is sharded by rows over 4 ranks, and LARS takes 5 steps,
# first with the norms of the whole layer and then with those of each rank's own rows. Compare the four ratios
# in each line.


# %%
def lars_on_rows(shares_norms):
    rank = dist.get_rank()
    draw = torch.Generator().manual_seed(3)
    weight, *gradients = torch.randn(6, 10, 4, generator=draw, dtype=torch.float64)
    own = nn.Parameter(weight.chunk(4)[rank].clone())
    group = dist.group.WORLD if shares_norms else None
    optimizer = LARS([own], lr=1.0, trust=0.1, group=group)
    for gradient in gradients:
        own.grad = gradient.chunk(4)[rank].clone()
        optimizer.step()
    return own.detach(), optimizer.ratios[0].item()


if check.ready("8.2", "8.6"):
    draw = torch.Generator().manual_seed(3)
    weight, *gradients = torch.randn(6, 10, 4, generator=draw, dtype=torch.float64)
    whole = nn.Parameter(weight.clone())
    optimizer = LARS([whole], lr=1.0, trust=0.1)
    for gradient in gradients:
        whole.grad = gradient.clone()
        optimizer.step()
    for shares_norms, words in ((True, "norms of the layer"), (False, "norms of the own rows")):
        parts = run_ranks(lars_on_rows, 4, shares_norms)
        joined = torch.cat([part for part, _ in parts])
        ratios = " ".join(f"{ratio:.4f}" for _, ratio in parts)
        difference = (joined - whole.detach()).abs().max().item()
        print(f"{words:22}: ratios {ratios}; differs from one process by {difference:.0e}")
        assert (difference < 1e-12) == shares_norms

# %% [markdown]
# With the norms of the layer all ranks use one ratio, and the result is that of one process up to rounding.
# With their own norms the ranks take steps of different lengths, and the weights come out wrong. If a program
# *logs* the right norm but scales by the wrong one, its logged curves look fine, so compare the weights and
# not the log.
#
# The base class calls `whole_norms`, which does all this for you. PyTorch's `fully_shard` turns parameters
# into DTensors, tensors that know how they are sharded, and from a DTensor `whole_norms` can tell the groups
# of ranks. There are two of them when tensor parallelism splits the layers as well (lesson 13), so that a
# matrix is sharded over both dimensions of a grid of ranks. The next cell trains a model of two linear
# modules with LAMB, under `fully_shard` on two ranks and also on one process.


# %%
def lamb_steps(model, inputs):
    optimizer = LAMB(model.parameters(), lr=0.05)
    for _ in range(5):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return [ratio.item() for ratio in optimizer.ratios]


def two_layers():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).double()


def fully_sharded():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = two_layers()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return lamb_steps(
        model, torch.arange(24.0, dtype=torch.float64).view(4, 6)[dist.get_rank() :: 2]
    )


if check.ready("8.4"):
    wanted = lamb_steps(two_layers(), torch.arange(24.0, dtype=torch.float64).view(4, 6))
    for rank, found in enumerate(run_ranks(fully_sharded, 2, timeout_s=60)):
        print(f"rank {rank}: last ratios", " ".join(f"{ratio:.6f}" for ratio in found))
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-6, atol=0)
    print("one process:       ", " ".join(f"{ratio:.6f}" for ratio in wanted))

# %% [markdown]
# ## 9. Run it as a job
#
# The job repeats the comparison with your optimizers, here with so few steps and seeds that its ranking means
# little. On a cluster
# `sbatch --array=1-6 sbatch/layerwise.sbatch` starts one job per optimizer.

# %%
if check.ready("8.2", "8.3", "8.4", "8.5"):
    check.keep()
    small_run = "--seeds 2 --tuning 1 --small-steps 60 --large-steps 20".split()
    folder = watch.run("../sbatch/layerwise.sbatch", "--impl", "mine", *small_run)

# %%
check.summary()

# %% [markdown]
# ## Recap
#
# You can now
#
# - find the range of useful learning rates, up to its order of magnitude, with a single short training,
# - compare optimizers with learning rates that are chosen on other images and other seeds than those that judge,
# - write an optimizer from its paper, with its state, its groups and its closure,
# - say what LARS, LARC, LAMB and NovoGrad have in common and where they differ,
# - name the choices that a paper leaves open, and test what they change,
# - keep a layer-wise optimizer correct when its layers are sharded.
#
# **Questions**
#
# <details><summary>You double all weights of a layer that is followed by a norm, so that the network computes the same. What does that do to a step of LARS, and to one of SGD?</summary>
#
# The gradient is halved. So SGD moves the layer by half as much, and as a share of the doubled norm this is a
# quarter. LARS multiplies by the norm of the weights and divides by the norm of the gradient, so its step
# doubles with the layer, and as a share of the norm the step stays the same.
# </details>
#
# <details><summary>A LARS recipe says rate 10 with trust 0.001. Which rate do you take for LARC, if the weight decay is small?</summary>
#
# The step of LARS is 10 * 0.001 = 1 % of the layer's norm. The step of LARC is its trust coefficient times
# the layer's norm, so take trust 0.01 and a learning rate so high that the ceiling is never reached. (No
# layer may start at norm 0 then, because such a layer would move by that rate times its gradient.)
# </details>
#
# <details><summary>Under fully_shard, somebody computes the trust ratio from `param.to_local()` and `grad.to_local()`. The loss still falls. How would you notice?</summary>
#
# The ratios differ between ranks, and the trained weights depend on the number of ranks. Compare either with
# a run on one process.
# </details>
#
# **Sources**: You et al. 2017, https://arxiv.org/abs/1708.03888 (LARS); NVIDIA's Caffe,
# https://github.com/NVIDIA/caffe (`larc_policy`), and NVIDIA apex, https://github.com/NVIDIA/apex (LARC); You et
# al. 2020, https://arxiv.org/abs/1904.00962 (LAMB); Ginsburg et al. 2019, https://arxiv.org/abs/1905.11286
# (NovoGrad); Smith 2017, https://arxiv.org/abs/1506.01186 (range test, with linear growth); fastai,
# https://docs.fast.ai/callback.schedule.html (range test, with exponential growth); Nado et al. 2021,
# https://arxiv.org/abs/2102.06356 (tuned baselines).
