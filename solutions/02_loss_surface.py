# ---
# manyhands: {title: Loss surfaces, goal: "Cut through the loss of real networks, draw it with several ranks at once, compare networks with and without skip connections, and say what flat and sharp minima do and do not tell", job: {flags: "--grid 5 --networks 2", loss: [0.01, 0.036]}}
# ---

# %% [markdown]
# # 02 Loss surfaces
#
# The loss of a line was a single bowl, and every way down led to the same place. Is the loss of a real
# network anything like that? And does it matter at which solution, that is with which weights, a training run
# ends?
#
# You cannot look at a surface over thousands of parameters, but you can cut through it along a line or a
# plane. Each point of such a picture is a whole network, and there are hundreds of points: a good reason to
# let several processors work on one result.

# %%
import copy
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from IPython.display import Image, display
from torch import Generator, Tensor, nn

from manyhands.checks import loss_surface as check, score
from manyhands.data import images
from manyhands.first_job.planning import my_share
from manyhands.first_job.power_law import error_rate, train_on
from manyhands.instruments import figures
from manyhands.jobs import watch
from manyhands.loss_surface.surface import Direction, Loss
from manyhands.models import resnet
from manyhands.ranks import lab
from manyhands.ranks.lab import run_ranks
from manyhands.training import storage

lab.warm_up()
torch.set_num_threads(1)
data = images.load("embedded")
print(f"torch {torch.__version__}; the ranks of this notebook use the CPU and gloo")
print(data.note)

# %% [markdown]
# ## 1. From a line to a network
#
# How does a network differ from a line? It has several layers with a nonlinear function between them, and
# many more parameters. Here is a small network, with one hidden layer of 64 units, trained for about a
# second on pictures of digits.

# %% tags=["nbval-check-output"]
torch.manual_seed(0)
network = train_on(data.train_inputs, data.train_labels, data.num_classes)
print(network)
print(f"{sum(p.numel() for p in network.parameters()):,} parameters; the line had 2")

# %% [markdown]
# In this lesson the **loss** is a function without arguments, which returns the loss of the network for the
# parameters that it has at that moment. The parameters are a list of tensors.


# %%
def loss_of(model, num_images=256):
    inputs, labels = data.train_inputs[:num_images], data.train_labels[:num_images]
    return lambda: nn.functional.cross_entropy(model(inputs), labels)


parameters = list(network.parameters())
loss = loss_of(network)
print(f"loss {loss().item():.4f}; shapes {[tuple(p.shape) for p in parameters]}")

# %% [markdown]
# The basic move is to go some distance away, measure the loss there, and come back. A **direction** is a
# list of tensors of the same shapes as the parameters. Come back exactly, because a picture is made of
# hundreds of such moves and rounding errors would add up.

# %% exercise="loss_at" todo="2.1" minutes=10 difficulty=2 points=2
from manyhands.loss_surface.surface import loss_at

# %% check="2.1" tags=["nbval-check-output"]
check.loss_at(loss_at)

# %% [markdown]
# The simplest cut is the straight line from one solution to another.

# %% exercise="slice_between" todo="2.2" minutes=5 difficulty=1 points=1
from manyhands.loss_surface.surface import slice_between

# %% check="2.2" tags=["nbval-check-output"]
check.slice_between(slice_between)

# %% [markdown]
# ### Not a bowl
#
# Take the trained network and list its 64 hidden units in another order, each with all its weights. The
# result is another point in the space of parameters but the very same function, because the units' outputs
# are only added up in another order.
#
# Now walk in a straight line from the one point to the other. If the loss were a bowl (**convex**, in
# mathematics), the loss half way would be **at most** that of the ends. What do you expect?

# %%
half_way = None  # your number: the loss half way, divided by the loss at the ends

# %% answer="true"
half_way = 5

# %%
with torch.no_grad():
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    weight, bias, head, head_bias = parameters
    shuffled = [weight[order], bias[order], head[:, order], head_bias.clone()]

if check.ready("2.1", "2.2"):
    shares = [k / 20 for k in range(-5, 26)]
    walk = slice_between(loss, parameters, shuffled, shares)
    ends = walk[shares.index(0.0)]
    higher = walk[shares.index(0.5)] / ends
    print(f"half way / ends: you said {half_way}, a bowl allows at most 1, measured {higher:.2f}")
    figure, ax = figures.new_figure()
    xlabel = "position between one solution (0) and the other (1)"
    figures.lines(ax, {"loss": (shares, walk)}, xlabel, "training loss (nats)")
    figures.show(
        figure,
        "The loss between a network and its shuffled copy: a hill between the two solutions.",
    )

# %% [markdown]
# The straight line leads over a hill, several times as high as the ends. A bowl has no hill on any straight
# line, so the loss of this network is not convex. But the hill does not prove that the two solutions lie in
# separate valleys, since a way around it may exist. Garipov et al. (2018) and Draxler et al. (2018) looked
# for such ways between networks that were trained from different first weights, and found curves along
# which the loss stays nearly as low as at the ends. This is called **mode connectivity**. What is certain is
# that there are many solutions, since each order of the 64 units gives a copy of this one, more than
# $10^{89}$ in all.
#
# ### How is a good solution found all the same?
#
# Why does no hill stop the descent? One more cut gives a hint. Look for a hill on the line from the
# **first** weights of a network to its **trained** ones:

# %%
if check.ready("2.1", "2.2"):
    curves = {}
    for seed in range(3):
        torch.manual_seed(seed)
        trained = list(train_on(data.train_inputs, data.train_labels, 10).parameters())
        torch.manual_seed(seed)  # the same first weights again
        fresh = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        own = list(fresh.parameters())
        shares = [k / 20 for k in range(21)]
        curves[f"seed {seed}"] = (shares, slice_between(loss_of(fresh), own, trained, shares))
    figure, ax = figures.new_figure()
    xlabel = "position between the first weights (0) and the trained ones (1)"
    figures.lines(ax, curves, xlabel, "training loss (nats)")
    figures.show(figure, "Three slices from first to trained weights: all fall without a hill.")

# %% [markdown]
# All three curves go downhill all the way. The descent did not take the straight line, but nothing stood in
# its path there. So there can be a hill between two solutions and yet none between a start and **its own**
# solution. (Goodfellow et al. 2015 saw the same in larger networks, but it is no law.)

# %% [markdown]
# ## 2. The neighbourhood of a solution
#
# What does the loss look like around a solution? Choose two random directions, and draw the loss over the
# plane that they span. How long should a direction be? The weights of one layer may be ten times as large as
# those of another, so a step of the same length in both would hardly change the first and would wreck the
# second. That is why each **filter** (the weights that compute one output) is scaled on its own: distance 1
# moves a filter by a distance equal to its norm.

# %% exercise="random_direction" todo="2.3" minutes=15 difficulty=2 points=2
from manyhands.loss_surface.surface import random_direction

# %% check="2.3" tags=["nbval-check-output"]
check.random_direction(random_direction)

# %% [markdown]
# ### Deep networks, with skips and without
#
# The networks to compare have 30 layers with weights: 29 convolutions and a linear layer at the end. One kind
# has **skip connections**, which carry the input of each pair of convolutions past the pair and add it to the
# pair's output. In the other kind the skip connections are removed. All else is the same, even the first
# weights. A pair of convolutions, with or without a skip connection, is a **block**, and the course's
# `resnet.ResNet` is mostly a row of blocks:

# %% show="true"
from manyhands.models.resnet import Block

# %% [markdown]
# Train two networks of each kind, with two seeds, dealt out to two ranks as in lesson 00. This takes some
# ten seconds. Compare the errors.

# %%
kinds = [(skip, seed) for seed in (1, 2) for skip in (True, False)]
NAME = {True: "with skips", False: "without skips"}


def train_networks():
    torch.set_num_threads(1)
    trained = {}
    for skip, seed in my_share(kinds, dist.get_rank(), dist.get_world_size()):
        torch.manual_seed(seed)
        model = resnet.ResNet(num_blocks=14, skip=skip)
        resnet.train(model, data.train_inputs, data.train_labels)
        trained[skip, seed] = model.eval()
    return trained


networks = {}
for share in run_ranks(train_networks, 2, timeout_s=150):
    networks |= share


def skips_first(item):
    (skip, seed), _ = item
    return not skip, seed


for (skip, seed), model in sorted(networks.items(), key=skips_first):
    wrong = error_rate(model, data.test_inputs, data.test_labels)
    print(f"{NAME[skip]:13} seed {seed}: {wrong:.1%} of the test images are misclassified")

# %% [markdown]
# The networks without skips are much harder to train: the same recipe leaves them far behind. Does the
# surface show why?
#
# (One detail: these networks have batch norms, which normalise by a mean and a variance and keep running
# averages of both during training. Away from the solution those averages are wrong, so from here on each norm
# uses the batch at hand.)

# %%
for model in networks.values():
    resnet.use_batch_statistics(model)

# %% [markdown]
# ### One picture, several ranks
#
# A picture of 11 x 11 points takes 121 losses. They are independent: point (3, 5) does not have to wait for
# point (3, 4). So the points can be dealt out. Each rank computes the losses of its own points, and at the
# end the ranks put their results together.
#
# ![Nine points of a plane are dealt out to two ranks; each rank has a table with its own losses, and zeros for those of the other; an all-reduce adds up both tables, and then both ranks have all nine losses](figures/loss_surface_grid.svg)
#
# How can the results be put together? Each rank has a table with zeros wherever another rank is at work, so
# the sum of all tables is the whole picture. `dist.all_reduce(table)` adds up the tables of all ranks, and
# afterwards each rank holds the sum. (Lesson 04 builds this function. Like every collective, it has to be
# called by **all** ranks; if one is missing, the others wait for it.)
#
# `my_share(tasks, rank, world_size)` from lesson 00 gives a rank's share of a list. The argument `group`
# names the ranks that take part; pass it on to `dist.get_rank`, `dist.get_world_size` and
# `dist.all_reduce`. If it is `None`, all ranks take part.

# %% exercise="surface" todo="2.4" minutes=15 difficulty=3 points=3
from manyhands.loss_surface.surface import surface

# %% check="2.4" tags=["nbval-check-output"]
check.surface(surface)


# %% [markdown]
# Draw one network's picture with one rank, and then with two. How many times as fast will two ranks be?

# %%
speedup = None  # your number

# %% answer="true"
speedup = 1.9

# %%
grid = [k / 5 for k in range(-5, 6)]


def picture(models, num_images=256, at=grid):
    torch.set_num_threads(1)
    dist.barrier()  # all start to measure at the same time
    start, losses = time.perf_counter(), {}
    for kind, model in models.items():
        own, generator = list(model.parameters()), torch.Generator().manual_seed(0)
        directions = random_direction(own, generator), random_direction(own, generator)
        losses[kind] = surface(loss_of(model, num_images), own, directions, at)
    return losses, time.perf_counter() - start


if check.ready("2.1", "2.3", "2.4"):
    first = (True, 1)
    only = {first: networks[first]}
    ((one, one_s),) = run_ranks(picture, 1, only, timeout_s=120)
    (two, two_s), _ = run_ranks(picture, 2, only, timeout_s=120)
    score("speed-up of 2 ranks", speedup, 2, one_s / two_s, word="ideal")
    assert torch.equal(one[first], two[first])
    assert one[first][5, 5].item() == loss_of(networks[first])().item()
    print("both pictures are equal bit for bit, and the point in the middle is the trained loss")

# %% [markdown]
# The work is cut into nearly equal parts and there is only one message at the end, so two ranks take about
# half the time, if two cores are free for them. (A number above 2 means that something else slowed down the
# single rank.) Checking that the numbers are the same, bit for bit, is worth a line of code, because this is
# the first test of everything that you will make parallel.
#
# Now draw the other pictures. How deep is the valley around each kind of network?

# %%
if check.ready("2.1", "2.3", "2.4"):
    others = {kind: model for kind, model in networks.items() if kind != first}
    (pictures, _), _ = run_ranks(picture, 2, others, timeout_s=120)
    pictures |= two
    figure = figures.loss_surfaces({NAME[s]: pictures[s, 1].tolist() for s in (True, False)}, grid)
    figures.show(
        figure, "Loss around two networks: a deep funnel with skips, a shallow dish without."
    )

# %% [markdown]
# Blue is low, yellow is high. In the upper row both networks share one logarithmic scale; the lower row shows
# the loss itself, with a scale of its own for each network. With skips there is a deep funnel. Without them
# there is only a shallow dish, because training stopped at a loss far above the funnel's bottom. (The corners
# come from the coarse grid: between two points the picture is a straight line.)
#
# Two networks of each kind are a hint, not a result. The job of this lesson takes more networks and a finer
# grid. Here is the result of one such job, stored with the course. What does the finer grid show that yours
# did not?

# %%
stored = storage.stored("loss_surface", "networks")
for kind, name in (("skip", NAME[True]), ("plain", NAME[False])):
    errors = [one["error"] for one in stored["networks"] if one["kind"] == kind]
    told = f"test error {sum(errors) / len(errors):.1%} ({min(errors):.1%} to {max(errors):.1%})"
    print(f"{name:13} {len(errors)} networks: {told}")
first_of = {one["kind"]: one["losses"] for one in reversed(stored["networks"])}
both = {NAME[True]: first_of["skip"], NAME[False]: first_of["plain"]}
figure = figures.loss_surfaces(both, stored["distances"])
figures.show(figure, "The stored pictures on a finer grid: a smooth funnel, and a rougher dish.")

# %% [markdown]
# What may you conclude? On these data, at this depth and with this recipe, the networks without skips ended
# at higher losses and with far more mistakes, and on the finer grid the loss around them is clearly bumpy.
# The pictures do **not** show that the bumps are the cause. They show two dimensions out of about 17,000, and
# a network that is trained longer ends at another place with other surroundings. Li et al. (2018), who
# introduced the filter-wise directions, saw the same change with 56 layers and more, and much less of it with
# 20.

# %% [markdown]
# ## 3. How rough is it? (optional)
#
# The lower row of the figure gives an impression of the bumps, but only numbers can be compared. Walk over
# the surface along a row or a column: in a single valley you only go down and then up, and every further up
# and down makes the walk longer. **Roughness** says how much longer, measured on the loss itself and not on
# its logarithm.

# %% exercise="roughness" todo="2.5" minutes=10 difficulty=2 points=2
from manyhands.loss_surface.surface import roughness

# %% check="2.5" tags=["nbval-check-output"]
check.roughness(roughness)

# %% [markdown]
# Do the ranges of the two kinds overlap, in the stored run?

# %%
if check.ready("2.1", "2.3", "2.4", "2.5"):
    for (skip, seed), losses in sorted(pictures.items(), key=skips_first):
        lowest, highest = losses.min(), losses.max()
        told = f"roughness {roughness(losses):.3f}, loss {lowest:.3f} to {highest:.1f}"
        print(f"{NAME[skip]:13} seed {seed}: {told}")
    for kind, name in (("skip", NAME[True]), ("plain", NAME[False])):
        rough = [one["roughness"] for one in stored["networks"] if one["kind"] == kind]
        told = f"roughness {sum(rough) / len(rough):.3f} ({min(rough):.3f} to {max(rough):.3f})"
        print(f"{name:13} {len(rough)} stored networks: {told}")

# %% [markdown]
# In the stored run the surroundings of every network without skips are rougher than those of any network with
# skips. But how rough one network is depends on the plane through it. The stored run contains the networks of
# seeds 1 and 2 as well, drawn along other directions, and the roughness of a network without skips can differ
# there by more than a factor of two from yours. Compare kinds over several networks, and not two single
# pictures.

# ## 4. Flat and sharp
#
# How do you measure whether a minimum is flat or sharp? Lesson 01 found the steepest direction of a line's
# loss from its Hessian, the matrix of second derivatives. A network's Hessian has a row and a column for each
# parameter. For the network of section 1 that is $4810 \times 4810$, and the Hessian of a large model is too
# large to store. But its largest eigenvalue can be found without writing the matrix down: multiply a random
# vector by the Hessian again and again, and its direction turns to the steepest one (**power iteration**).
# Each product takes only the gradient of a gradient, which autograd can compute:
# `torch.autograd.grad(..., create_graph=True)` gives gradients that can be differentiated once more. At a
# minimum this largest eigenvalue is called the **sharpness**: it says how strongly the loss curves up in the
# steepest direction.

# %% exercise="sharpness" todo="2.6" minutes=15 difficulty=3 points=2
from manyhands.loss_surface.surface import sharpness

# %% check="2.6" tags=["nbval-check-output"]
check.sharpness(sharpness)

# %% [markdown]
# A claim that is often repeated goes back to Keskar et al. (2017): small batches end in flat minima, large
# batches in sharp ones, and flat minima are better on new data. (They call a minimum sharp if the loss
# rises high somewhere in a small box around it; an eigenvalue is easier to compute and means much the
# same.) Is that so? Train small networks with batches of 16 and with all 1,297 images at once, each with
# and without **weight decay**, which pulls all weights towards 0 in each step. Each of the four settings
# gets three seeds.


# %%
ALL = len(data.train_inputs)
LOSSES = (0.2, 0.1, 0.06, 0.04)  # on the way down, a copy is kept at each of them


def train_small(batch, decay, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    rate, epochs = (0.05, 20) if batch == 16 else (0.1, 400)
    recipe = {"lr": rate, "momentum": 0.9, "weight_decay": decay}
    optimizer = torch.optim.SGD(model.parameters(), **recipe, foreach=True)
    copies = {}
    for _ in range(epochs):
        for number, chosen in enumerate(torch.randperm(ALL).split(batch)):
            output = model(data.train_inputs[chosen])
            nn.functional.cross_entropy(output, data.train_labels[chosen]).backward()
            optimizer.step()
            optimizer.zero_grad()
            if number % 10 == 0 and len(copies) < len(LOSSES):
                with torch.no_grad():
                    now = loss_of(model, ALL)()
                for level in LOSSES:
                    if now < level and level not in copies:
                        copies[level] = copy.deepcopy(model)
    return model, copies


recipes = [(b, decay, seed) for seed in range(3) for decay in (0.0, 0.005) for b in (16, ALL)]


def train_share():
    torch.set_num_threads(1)
    own = my_share(recipes, dist.get_rank(), dist.get_world_size())
    return {recipe: train_small(*recipe) for recipe in own}


small, on_the_way = {}, {}
for share in run_ranks(train_share, 2, timeout_s=120):
    small |= {recipe: model for recipe, (model, _) in share.items()}
    on_the_way |= {recipe: copies for recipe, (_, copies) in share.items()}

# %% [markdown]
# Which batch size will end in the sharper minimum? Compare the training losses in the table too.

# %%
ratio = None  # your number: sharpness with batch 1,297 / sharpness with batch 16, no weight decay

# %% answer="true"
ratio = 3


# %%
def about(model):
    own = list(model.parameters())
    length = torch.cat([p.detach().flatten() for p in own]).norm().item()
    return {
        "sharpness": sharpness(loss_of(model, ALL), own, 20, torch.Generator().manual_seed(0)),
        "length of all weights": length,
        "training loss (nats)": loss_of(model, ALL)().item(),
        "test error": error_rate(model, data.test_inputs, data.test_labels),
    }


def about_three(models):
    three = [about(model) for model in models]
    return {name: [fact[name] for fact in three] for name in three[0]}


def mean(values):
    return sum(values) / len(values)


if check.ready("2.6"):
    found = {}
    for decay in (0.0, 0.005):
        for batch in (16, ALL):
            facts = about_three([small[batch, decay, seed] for seed in range(3)])
            found[batch, decay] = mean(facts["sharpness"])
            print(f"batch {batch}, weight decay {decay}")
            for name, values in facts.items():
                print(f"    {name:22} {mean(values):6.3f} ({min(values):.3f} to {max(values):.3f})")
    measured = found[ALL, 0.0] / found[16, 0.0]
    print(f"sharpness, batch 1,297 / batch 16: you said {ratio}, measured {measured:.2f}")

# %% [markdown]
# Without weight decay the claim seems to hold: the networks of small batches end in places with about a third
# of the sharpness, and make fewer mistakes. But they took four times as many steps, so their training loss is
# lower as well, about 0.01 against 0.03. A lower loss alone makes a place flatter, because the curvature of
# cross-entropy vanishes as the probability of the right class approaches 1 (Cohen et al. 2021). So part of
# the factor says nothing about batches.
#
# ### At equal training loss
#
# The training kept a copy of each network when its training loss fell below 0.2, 0.1, 0.06 and 0.04. Predict
# the ratio of the two sharpnesses again, now at a training loss of 0.04:

# %%
at_equal_loss = None  # your number

# %% answer="true"
at_equal_loss = 2

# %%
if check.ready("2.6"):
    sharp = {16: [], ALL: []}
    for level in LOSSES:
        told = []
        for batch in sharp:
            facts = about_three([on_the_way[batch, 0.0, seed][level] for seed in range(3)])
            sharp[batch].append(mean(facts["sharpness"]))
            told.append(f"batch {batch:5,} {mean(facts['test error']):.1%}")
        measured = sharp[ALL][-1] / sharp[16][-1]
        print(f"loss {level:4}: {measured:.1f} times as sharp; test errors {', '.join(told)}")
    print(f"at a loss of 0.04: you said {at_equal_loss}, measured {measured:.2f}")
    figure, ax = figures.new_figure(7, 3.4)
    curves = {f"batch {batch:,}": (LOSSES, values) for batch, values in sharp.items()}
    figures.lines(ax, curves, "training loss (nats)", "sharpness (mean of 3 seeds)")
    ax.set(xscale="log", ylim=(0, None), xticks=LOSSES)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.minorticks_off()
    ax.invert_xaxis()  # training goes from left to right
    figures.show(figure, "Sharpness falls with the training loss; larger batches stay sharper.")

# %% [markdown]
# Training goes from left to right, and both curves end well below where they began: for either batch size, a
# place with a lower loss is on the whole a flatter one. What remains at equal loss is a smaller factor,
# about 2. This fits the claim of Keskar et al.: the noise of small batches leads to flatter places. (In
# lesson 01 the noise depended on the ratio of learning rate to batch size. Here this ratio is 40 times as
# large for the small batches.) But look at the test errors at equal loss: the networks of large batches are
# about twice as sharp, and still make about as many mistakes as those of small batches, at some losses even a
# few fewer.
#
# ### What weight decay changes
#
# Weight decay is another way to equal losses, because with it the weights of a network cannot grow until the
# loss is tiny, whatever the batch size. The next figure shows the loss on the line from the small-batch
# solution (at 0) to the large-batch solution (at 1). In the titles, "apart" is the length of that line, in
# the same unit as the length of the weights. How high do the two solutions lie?

# %%
if check.ready("2.1", "2.2", "2.6"):
    shares = [k / 10 for k in range(-10, 21)]
    figure, axes = figures.new_figure(9, 3.4, cols=2)
    for ax, decay in zip(axes, (0.0, 0.005), strict=True):
        curves, apart = {}, []
        for seed in range(3):
            model, other = small[16, decay, seed], small[ALL, decay, seed]
            ends = list(model.parameters()), list(other.parameters())
            apart.append(
                sum((a - b).square().sum().item() for a, b in zip(*ends, strict=True)) ** 0.5
            )
            curves[f"seed {seed}"] = (shares, slice_between(loss_of(model, ALL), *ends, shares))
        figures.lines(ax, curves, "batch 16 (0) to batch 1,297 (1)", "training loss (nats)")
        ax.set(yscale="log", ylim=(5e-3, 5))
        ax.set_title(
            f"weight decay {decay}; {min(apart):.1f} to {max(apart):.1f} apart", fontsize=10
        )
    figures.legend_below(figure, axes[0])
    figures.show(
        figure, "Loss between small-batch and large-batch solutions, without and with decay."
    )

# %% [markdown]
# On the left, beyond the large-batch solution (to the right of 1), the loss rises faster than beyond the
# small-batch one. On the right, with weight decay, both solutions lie almost equally high, so here the two
# may be compared: the solution from large batches is the sharper one, and it again makes **fewer** mistakes.
# What decay does to the sharpness cannot be read from the table, although the small-batch solution has almost
# three times as much with decay as without. With decay its training loss is about ten times as high, and only
# places of equal loss can be compared.
#
# (Three warnings. On the left the large-batch solution is not quite a minimum, since the loss still falls
# towards the other one. On a logarithmic axis a wide curve need not be a flat one, so trust the table. And
# the test errors differ by a few images out of 500.)
#
# A line shows one direction only. Draw the plane of section 2 around one solution of each kind, with your
# own functions and the same random numbers for all four. Which of them looks flattest?

# %%
if check.ready("2.1", "2.3", "2.4"):
    four = {(batch, decay): small[batch, decay, 0] for decay in (0.0, 0.005) for batch in (16, ALL)}
    fine = [k / 10 for k in range(-10, 11)]
    (around, _), _ = run_ranks(picture, 2, four, ALL, fine, timeout_s=120)
    lowest = min(losses.min().item() for losses in around.values())
    highest = max(losses.max().item() for losses in around.values())
    levels = [lowest * (highest / lowest) ** (k / 14) for k in range(15)]
    figure, axes = figures.new_figure(8, 7, rows=2, cols=2)
    for ax, ((batch, decay), losses) in zip(axes.flat, around.items(), strict=True):
        filled = figures.contours(ax, fine, fine, losses.tolist(), levels)
        ax.plot(0, 0, "x", color="white")
        wrong = error_rate(four[batch, decay], data.test_inputs, data.test_labels)
        ax.set_title(f"batch {batch:,}, weight decay {decay}\ntest error {wrong:.1%}", fontsize=10)
        figures.label(ax, "along direction 1", "along direction 2")
        ax.set_aspect("equal")
        ax.label_outer()
    bar = figure.colorbar(filled, ax=axes, format="{x:.2g}")
    bar.set_label("training loss (nats)")
    figures.show(figure, "Loss around four solutions: two batch sizes, without and with decay.")

# %% [markdown]
# Compare the columns, and then the rows. The two batch sizes look much alike: their contours have nearly the
# same shape, and without weight decay the small-batch solution only lies deeper. Weight decay changes more,
# and the widest basin of all belongs to small batches with weight decay. In our run this network also makes
# the most mistakes, as its title says, but that refutes nothing: its loss is higher than without decay, it is
# one seed, and a few images of 500 decide.
#
# ### Does the sharpness decide how good a solution is?
#
# This can be settled in two minutes. Multiply the first layer of a network by 8, its biases too, and divide
# the weights of the second layer by 8. A ReLU lets a positive factor through, so the function stays the same,
# bit for bit (8 is a power of two, so floats can be multiplied and divided by it exactly). Does the sharpness
# stay the same too?

# %%
if check.ready("2.1", "2.3", "2.6"):
    model = small[16, 0.0, 0]
    scaled = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    with torch.no_grad():
        for number, (new, old) in enumerate(
            zip(scaled.parameters(), model.parameters(), strict=True)
        ):
            new.copy_(old * [8, 8, 1 / 8, 1][number])
    assert torch.equal(model(data.test_inputs), scaled(data.test_inputs))
    for name, one in {"as trained": model, "rescaled": scaled}.items():
        own, generator = list(one.parameters()), torch.Generator().manual_seed(0)
        sharp = sharpness(loss_of(one, ALL), own, 20, generator)
        direction = random_direction(own, torch.Generator().manual_seed(1))
        away = loss_at(loss_of(one, ALL), own, [direction], [0.5])
        print(f"{name:10}: sharpness {sharp:8.3f}, loss at distance 0.5 {away:.4f}")

# %% [markdown]
# The function is the same and makes the same mistakes on every image, but its sharpness is more than ten
# times as large. So the bare number cannot be what makes a solution good or bad (Dinh et al. 2017). The
# loss at distance 0.5 has not changed, because the filter-wise directions of section 2 grow and shrink with
# the filters: that is what they were made for. Whether flatness in some better sense explains anything is
# still debated, so be careful with the argument.

# %% [markdown]
# ## 5. Run it as a job
#
# The job trains networks of both kinds and draws their surfaces with your `random_direction` and `surface`
# (and `roughness`, if you have written it). All ranks work together on each picture. Here the job is small:
# it takes one network of each kind with 18 layers, half as many epochs, and a coarse grid. The command of the
# stored run in section 2 shows how to ask for more. The last cell shows the pictures, which are in the run's
# folder as `surfaces.png`. They are coarser than those above, since the grid has fewer points.

# %%
if check.ready("2.1", "2.3", "2.4"):
    check.keep()
    small_run = "--grid 5 --networks 1 --blocks 8 --epochs 4".split()
    folder = watch.run("../sbatch/loss_surface.sbatch", "--impl", "mine", *small_run)

# %%
if check.ready("2.1", "2.3", "2.4"):
    display(Image(folder / "surfaces.png", alt="The surfaces of both networks of this job"))

# %%
check.summary()

# %% [markdown]
# ## Recap
#
# You can now
#
# - cut through the loss of any network along lines and planes, and come back to the same bits,
# - show that a network's loss is not a bowl,
# - deal out the points of a picture to ranks, put them together, and check that the numbers are the same,
# - compute the largest eigenvalue of a Hessian that is too large to write down,
# - compare sharpness at equal training loss, and say what is doubtful about "flat minima are better".
#
# **Questions**
#
# <details><summary>A picture has 121 points and you use 4 ranks. How many points does the slowest rank compute, and which speed-up is the best possible?</summary>
#
# Since 121 = 4 · 30 + 1, one rank has 31 points. The best possible speed-up is 121 / 31 = 3.90.
# </details>
#
# <details><summary>One rank gets a wrong seed and draws other directions than the rest. What does the picture look like?</summary>
#
# With n ranks, every n-th point comes from another plane: a pattern of stripes or dots, most visible far
# from the middle, where the planes differ most. No error tells you, but a comparison with one rank does.
# </details>
#
# <details><summary>The sharpness of a solution is 40. What does lesson 01 say about the learning rate?</summary>
#
# Plain gradient descent with a learning rate above 2 / 40 = 0.05 would be thrown out of this minimum in the
# steepest direction.
# </details>
#
# **Sources**: Li et al. 2018, "Visualizing the Loss Landscape of Neural Nets",
# https://arxiv.org/abs/1712.09913; Goodfellow, Vinyals, Saxe 2015, https://arxiv.org/abs/1412.6544; Garipov
# et al. 2018, https://arxiv.org/abs/1802.10026, and Draxler et al. 2018, https://arxiv.org/abs/1803.00885;
# Keskar et al. 2017, "On Large-Batch Training for Deep Learning", https://arxiv.org/abs/1609.04836; Cohen
# et al. 2021, https://arxiv.org/abs/2103.00065; Dinh et al. 2017, "Sharp Minima Can Generalize For Deep
# Nets", https://arxiv.org/abs/1703.04933; He et al. 2015, https://arxiv.org/abs/1512.03385.
