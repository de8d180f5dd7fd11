# ---
# manyhands: {title: Layer-wise optimizers, goal: "Write LARS, LARC, LAMB and NovoGrad from their papers, see what a rate of its own does for each layer, and keep them correct when layers are sharded", needs: [large_batch], job: {flags: "--seeds 2 --small-steps 160 --large-steps 30", loss: [0.01, 0.066]}}
# ---

# %% [markdown]
# # 08 Layer-wise optimizers
#
# With a large batch there are few steps, so each of them has to be long (lesson 07). The length of a step is
# limited by the layer that can bear the least: as soon as one layer is thrown off, the loss explodes, even if
# all other layers could have moved ten times as far. **Why should all layers share one learning rate?**
#
# The optimizers of this lesson give every layer a learning rate of its own. With such optimizers ResNet-50
# was trained with batches of 32,768 images, and BERT with batches of 65,536 sequences. You will write four of
# them from their papers, as optimizers that could be used anywhere, and you will see why two programs that
# both say "LARS" can train differently.
#
# ![In three layers the norms of weights and gradients differ by orders of magnitude, so one rate moves them by very different shares; a trust ratio moves each by the same share](figures/layerwise_ratio.svg)

# %%
import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.checks import layerwise as check, score
from manyhands.data import images
from manyhands.first_job.planning import my_share
from manyhands.instruments import figures
from manyhands.jobs import watch
from manyhands.large_batch.remedies import descend
from manyhands.large_batch.ties import ranked
from manyhands.layerwise.base import ZeroNorm
from manyhands.layerwise.norms import whole_norms
from manyhands.layerwise.training import Parts, Way, loss_of, network, train, ways
from manyhands.ranks import lab
from manyhands.ranks.lab import run_ranks
from manyhands.training import storage

lab.warm_up()
torch.set_num_threads(1)
data = images.load("embedded")
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
print(f"largest share / smallest share: {max(shares.values()) / min(shares.values()):.0f}")
assert max(shares.values()) > 10 * min(shares.values())

# %% [markdown]
# All layers have the same learning rate, and yet, measured by their own size, some layers move many times as
# far as others. If the learning rate were raised until the slowest layer moved well, the fastest would be
# thrown off.

# %% [markdown]
# ## 1. How high can one learning rate be?
#
# Before you build a better method, measure the limit of the plain one. The **learning-rate range test** is a
# single short training: the learning rate starts far too low and grows by a constant factor at every step,
# until the loss explodes (after Smith 2017, whose learning rate grows linearly). The useful learning rates lie where the loss falls fastest, well
# before it turns up. After the exercise the test runs with three batch sizes; watch whether a larger batch
# moves the explosion.

# %% exercise="range_test" todo="8.1" minutes=10 difficulty=1 points=1
from manyhands.layerwise.rates import range_test

# %% check="8.1" tags=["nbval-check-output"]
check.range_test(range_test)


# %%
def steps_of(batch, seed=1):
    """A step of plain gradient descent that takes its rate and gives its loss."""
    model = network(data, seed)
    draw = torch.Generator().manual_seed(seed)

    def step(rate):
        chosen = torch.randperm(len(data.train_inputs), generator=draw)[:batch]
        loss = loss_of(model, data.train_inputs[chosen], data.train_labels[chosen])
        descend(model, loss, rate)
        return loss.item()

    return step


if check.ready("8.1"):
    figure, ax = figures.new_figure()
    curves, explodes = {}, {}
    for batch in (32, 256, 1297):
        rates, losses = range_test(steps_of(batch), 0.01, 100.0, 60)
        curves[f"batch {batch}"] = (rates, losses)
        explodes[batch] = rates[-1]
        fell = min(range(len(losses)), key=losses.__getitem__)
        told = f"lowest loss {losses[fell]:.2f} at rate {rates[fell]:.2f}"
        print(f"batch {batch:4}: {told}, ended at rate {rates[-1]:.2f} with loss {losses[-1]:.2f}")
    figures.lines(ax, curves, "learning rate", "loss before the step")
    ax.set(xscale="log", ylim=(0, 5))
    figures.show(
        figure, "Range test: loss against rate for three batch sizes; it falls, then explodes."
    )
    assert max(explodes.values()) < 30 * min(explodes.values())

# %% [markdown]
# The batch grows by a factor of 40, but the learning rate at which the loss explodes hardly moves in
# comparison. Less noise does not help against the curvature of the loss, which limits the step here. The
# linear rule hit the same limit in lesson 07.

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
# and with all 1,297 images in one step. Watch two things in the maps: how much the ratios differ *between*
# layers, and in which direction they change *during* training.

# %%
NAMES = [name for name, _ in model.named_parameters()]


def ratios_of(optimizer, batch, rate, num_steps, **options):
    rows = []
    look = lambda model, one: rows.append([float(r) for r in one.ratios])  # noqa: E731
    reached = train(data, Way(optimizer, options, ()), batch, rate, num_steps, 1, look)
    return reached, list(zip(*rows, strict=True))


if check.ready("8.2"):
    figure, axes = figures.new_figure(9, 3.2, cols=2)
    for ax, batch, rate in zip(axes, (32, 1297), (1.0, 3.0), strict=True):
        reached, rows = ratios_of(LARS, batch, rate, 80, trust=0.02)
        figures.heat_map(ax, rows, NAMES, "step", "trust ratio")
        ax.set_title(f"LARS, batch {batch:,}", fontsize=10)
        print(f"batch {batch:5,}: accuracy {reached:.1%} after 80 steps; ", end="")
        middle = [sorted(row)[len(row) // 2] for row in rows]
        print(f"median ratios from {min(middle):.4f} to {max(middle):.4f} over the layers")
        assert max(middle) > 3 * min(middle)
    figures.show(
        figure, "Trust ratio by layer and step with LARS, for batch 32 and for all images."
    )

# %% [markdown]
# The typical ratios of the layers differ by more than a factor of three, so no single learning rate could
# have done the same. In the right panel the ratios grow: this training comes close to a loss of zero, its
# gradients become short, and a step of LARS stays as long as before. That is why LARS needs a schedule that
# lowers the learning rate. In the left panel the loss is still far from zero at the end, and the gradients do
# not become shorter. The two trainings differ in learning rate and in the number of images seen as well, so
# the panels do not show what the batch size alone does.

# %% [markdown]
# ## 3. LARC: the same, with a ceiling
#
# ### Is there a minimum in LARS?
#
# A slide that is often shown gives LARS with $\min(\gamma, \text{ratio})$ in its formula, but the paper's
# algorithm has no minimum. The formula with the minimum belongs to **LARC**, which NVIDIA published as part
# of its library apex. In LARC the layer's learning rate is $\tau \|w\| / (\|g\| + \beta \|w\|)$ *instead of*
# the global one, and never above it. So in LARS the global learning rate multiplies the ratio, whereas in
# LARC it is a ceiling.

# %% exercise="LARC.ratio" todo="8.3" minutes=10 difficulty=2 points=1
from manyhands.layerwise.optimizers import LARC

# %% check="8.3" tags=["nbval-check-output"]
check.LARC(LARC)

# %% [markdown]
# Does the minimum matter? Two trajectories settle the question. Both optimizers get the same start, the same
# data and the same trust coefficient, and each runs with two learning rates, one four times as high as the
# other. Before you run the cell: if you double the learning rate of LARC again and again, what happens to its
# steps in the end?


# %%
def distances(kind, rate):
    """How far all weights together are from the start, after each of 60 steps."""
    start = torch.cat([layer.detach().flatten() for layer in network(data, 1).parameters()])
    found = []

    def look(model, optimizer):
        now = torch.cat([layer.detach().flatten() for layer in model.parameters()])
        found.append((now - start).norm().item())

    way = Way(kind, {"trust": 0.02, "weight_decay": 0.0}, ())
    train(data, way, 256, rate, 60, 1, look)
    return found


if check.ready("8.2", "8.3"):
    figure, ax = figures.new_figure()
    series = {}
    for name, kind in (("LARS", LARS), ("LARC", LARC)):
        for rate in (0.5, 2.0):
            series[f"{name}, rate {rate:g}"] = (list(range(1, 61)), distances(kind, rate))
    figures.lines(ax, series, "step", "distance from the start")
    figures.show(
        figure, "Distance from the start by step: LARS follows the rate, LARC hardly does."
    )
    of_lars, of_larc = (
        abs(series[f"{name}, rate 2"][1][-1] / series[f"{name}, rate 0.5"][1][-1] - 1)
        for name in ("LARS", "LARC")
    )
    print(f"from rate 0.5 to rate 2 the distance grows by {of_lars:.0%} with LARS", end="")
    print(f" and by {of_larc:.0%} with LARC")
    assert of_lars > 2 * of_larc

# %% [markdown]
# The formula with the minimum is LARC's, and the minimum does matter. A learning rate that is four times as
# high makes a step of LARS from the same weights four times as long; the distance after 60 steps grows less,
# because the path bends. In LARC the higher rate only lifts a ceiling, and once no layer touches the ceiling,
# doubling the rate changes nothing. Whoever copies a learning rate from a LARS recipe into a LARC program, or
# the other way round, trains with a different step length altogether.

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
# 1,297. Every optimizer gets its own best learning rate from a grid, because otherwise the table would only
# compare how lucky the learning rates were. The small batch gets 240 steps and the large one 40. Two ranks
# share the settings. Which of the six would you expect to lose least with the large batch?

# %%
SEEDS, STEPS = (1, 2), {32: 240, 1297: 40}


def settings_share(every):
    torch.set_num_threads(1)
    tasks = [(n, batch, rate) for n, way in every.items() for batch in STEPS for rate in way.rates]
    own = my_share(tasks, dist.get_rank(), dist.get_world_size())
    return [
        (name, batch, rate, [train(data, every[name], batch, rate, STEPS[batch], s) for s in SEEDS])
        for name, batch, rate in own
    ]


if check.ready("8.2", "8.3", "8.4", "8.5"):
    every = ways(Parts(LARS, LARC, LAMB, NovoGrad))
    best = {batch: {} for batch in STEPS}
    for share in run_ranks(settings_share, 2, every, timeout_s=150):
        for name, batch, rate, values in share:
            if fmean(values) > fmean(best[batch].get(name, (0, [0]))[1]):
                best[batch][name] = (rate, values)
    for batch, found in best.items():
        classes = ranked({name: values for name, (_, values) in found.items()})
        for number, group in enumerate(classes, 1):
            for name in group:
                rate, values = found[name]
                spread = f"{fmean(values):.1%} ({min(values):.1%} to {max(values):.1%})"
                print(f"batch {batch:5,}, rank {number}: {name:9} {spread} at rate {rate:g}")
    names = list(every)
    figure, ax = figures.new_figure(8, 3.2)
    groups = {
        f"batch {batch:,}, {STEPS[batch]} steps": [100 * fmean(found[n][1]) for n in names]
        for batch, found in best.items()
    }
    figures.bars(ax, groups, names, "accuracy (%)")
    figures.show(figure, "Accuracy of six optimizers at their best rates, small and large batch.")
    lost = {}
    for batch, found in best.items():
        means = {name: fmean(values) for name, (_, values) in found.items()}
        lost[batch] = max(means.values()) - means["SGD"]
        told = f"SGD is {lost[batch]:.1%} behind the best, LARS {max(means.values()) - means['LARS']:.1%}"
        print(f"batch {batch:5,}: {told}")
    assert lost[1297] > 2 * lost[32] and means["LARS"] > means["SGD"]
    if best[1297]["LARC"][0] == max(every["LARC"].rates):
        print(
            "LARC's best rate is the highest of its grid: a ceiling that no layer reaches any more"
        )

# %% [markdown]
# With the small batch, plain SGD is not far behind the best of the others. With the large batch this gap is
# several times as wide, and **LARS**, which is the same SGD with a trust ratio, closes most of it. This
# observation made the layer-wise methods known. But look at **AdamW** too, which is among the best here with
# both batches. A later study came to a similar result for ResNet-50 and BERT (Nado et al. 2021): carefully
# tuned standard optimizers matched LARS and LAMB. The order of optimizers that share a rank is a question of
# seeds.
#
# Does the result carry over to a larger task? The job of this lesson ran the same comparison on MNIST, with
# three seeds, 1,500 steps for the small batch, and 60 steps for a batch of 16,384. In the output, `=` marks a
# tie:

# %%
stored = storage.stored("layerwise", "mnist")
print(stored["data"])
for batch, classes in stored["classes"].items():
    print(f"batch {int(batch):6,}: {' > '.join(' = '.join(group) for group in classes)}")

# %% [markdown]
# There the methods with a trust ratio do win with the large batch: LAMB, LARS and LARC are ahead of AdamW by
# more than the seeds explain, and SGD is last. With the small batch AdamW is first and LARS is no better than
# SGD. So none of the six optimizers is the best in general, but some of them are better when there are few
# steps.
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
# step on, the ratio is tiny because the norm of the bias is still small, so a layer that starts at 0 learns
# slowly under LARS. That is why many recipes exclude biases and norms from the trust ratio altogether, by
# putting them into a parameter group of their own.

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
# into DTensors, tensors that know how they are sharded, and from a DTensor `whole_norms` can tell the group
# of ranks. The next cell trains a model of two layers with LAMB, under `fully_shard` on two ranks and then on
# one process.


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
# The job repeats the comparison with your optimizers. On a cluster
# `sbatch --array=1-6 sbatch/layerwise.sbatch` starts one job per optimizer.

# %%
if check.ready("8.2", "8.3", "8.4", "8.5"):
    check.keep()
    small_run = "--seeds 2 --small-steps 160 --large-steps 30".split()
    folder = watch.run("../sbatch/layerwise.sbatch", "--impl", "mine", *small_run)

# %%
check.summary()

# %% [markdown]
# ## Recap
#
# You can now
#
# - find the range of useful rates with a single short training,
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
# the layer's norm, so take trust 0.01 and a learning rate that is so high that the ceiling is never reached.
# </details>
#
# <details><summary>Under fully_shard, somebody computes the trust ratio from `param.to_local()` and `grad.to_local()`. The loss still falls. How would you notice?</summary>
#
# The ratios differ between ranks, and the trained weights depend on the number of ranks. Compare either with
# a run on one process.
# </details>
#
# **Sources**: You et al. 2017, https://arxiv.org/abs/1708.03888 (LARS); NVIDIA apex,
# https://github.com/NVIDIA/apex (LARC); You et al. 2020, https://arxiv.org/abs/1904.00962 (LAMB); Ginsburg et al.
# 2019, https://arxiv.org/abs/1905.11286 (NovoGrad); Smith 2017, https://arxiv.org/abs/1506.01186 (range test);
# Nado et al. 2021, https://arxiv.org/abs/2102.06356 (tuned baselines).
