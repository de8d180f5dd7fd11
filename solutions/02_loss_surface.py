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
# many more parameters. Here is a small network, with one hidden layer of 64 units, trained on pictures of
# digits.

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
    assert higher > 2, "a hill lies between the two solutions"
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
        fall = slice_between(loss_of(fresh), own, trained, shares)
        assert fall == sorted(fall, reverse=True), "no hill on the way down"
        curves[f"seed {seed}"] = (shares, fall)
    figure, ax = figures.new_figure()
    xlabel = "position between the first weights (0) and the trained ones (1)"
    figures.lines(ax, curves, xlabel, "training loss (nats)")
    figures.show(figure, "Three slices from first to trained weights: all fall without a hill.")

# %% [markdown]
# All three curves go downhill all the way. The descent did not take the straight line, but no hill would
# have stopped it there. So there can be a hill between two solutions and yet none between a start and **its
# own** solution. (Goodfellow et al. 2015 saw the same in larger networks, but it is no law.)

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
# The networks to compare have 29 convolutions, each followed by a norm, and a linear layer at the end. One
# kind has **skip connections**, which carry the input of each pair of convolutions past the pair and add it
# to the pair's output. In the other kind the skip connections are removed. All else is the same, even the
# first weights. A pair of convolutions, with or without a skip connection, is a **block**, and the course's
# `resnet.ResNet` is mostly a row of blocks:

# %% show="true"
from manyhands.models.resnet import Block

# %% [markdown]
# Train a network of each kind, from the same first weights, each on a rank of its own. Compare the errors.

# %%
NAME = {True: "with skips", False: "without skips"}


def train_networks():
    torch.set_num_threads(1)
    trained = {}
    for skip in my_share([True, False], dist.get_rank(), dist.get_world_size()):
        torch.manual_seed(1)
        model = resnet.ResNet(num_blocks=14, skip=skip)
        resnet.train(model, data.train_inputs, data.train_labels)
        trained[skip] = model.eval()
        print(f"the network {NAME[skip]} is trained")
    return trained


with_skips, without = run_ranks(train_networks, 2, timeout_s=150)
networks = with_skips | without
wrong = {
    skip: error_rate(model, data.test_inputs, data.test_labels) for skip, model in networks.items()
}
for skip, share in wrong.items():
    print(f"{NAME[skip]:13} {share:.1%} of the test images are misclassified")
assert wrong[False] > 2 * wrong[True]

# %% [markdown]
# The network without skips is much harder to train: the same recipe leaves it far behind. Does the surface
# show why?
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


def picture(models, num_images=128, at=grid, plane=0):
    torch.set_num_threads(1)
    dist.barrier()  # all start to measure at the same time
    start, losses = time.perf_counter(), {}
    for kind, model in models.items():
        own, generator = list(model.parameters()), torch.Generator().manual_seed(plane)
        directions = random_direction(own, generator), random_direction(own, generator)
        losses[kind] = surface(loss_of(model, num_images), own, directions, at)
    return losses, time.perf_counter() - start


if check.ready("2.1", "2.3", "2.4"):
    only = {True: networks[True]}
    ((one, one_s),) = run_ranks(picture, 1, only, timeout_s=120)
    (two, two_s), _ = run_ranks(picture, 2, only, timeout_s=120)
    score("speed-up of 2 ranks", speedup, 2, one_s / two_s, word="ideal")
    assert torch.equal(one[True], two[True])
    assert one[True][5, 5].item() == loss_of(networks[True], 128)().item()
    print("both pictures are equal bit for bit, and the point in the middle is the trained loss")

# %% [markdown]
# The work is cut into nearly equal parts and there is only one all-reduce at the end, so two ranks take
# about half the time, if two cores are free for them. (A number above 2 means that something else slowed
# down the single rank.) Checking that the numbers are the same, bit for bit, is worth a line of code,
# because this is the first test of everything that you will make parallel.
#
# Now draw the picture of the network without skips. How deep is the valley around each of the two?

# %%
if check.ready("2.1", "2.3", "2.4"):
    (other, _), _ = run_ranks(picture, 2, {False: networks[False]}, timeout_s=120)
    pictures = two | other
    assert pictures[False].min() > 10 * pictures[True].min()
    figure = figures.loss_surfaces({NAME[s]: pictures[s].tolist() for s in (True, False)}, grid)
    figures.show(
        figure, "Loss around two networks: a deep funnel with skips, a shallow dish without."
    )

# %% [markdown]
# Blue is low, yellow is high. In the upper row both networks share one logarithmic scale of colours, and each
# has contours of its own; the lower row shows
# the loss itself, with a scale of its own for each network. With skips there is a deep funnel. Without them
# there is only a shallow dish, because training stopped at a loss far above the funnel's bottom. (The corners
# come from the coarse grid: between two points the picture is a straight line.)
#
# One network of each kind is a hint, not a result. The job of this lesson takes more networks and a finer
# grid. Here is the result of one such job, stored with the course. Where on the finer grid is the loss smooth,
# and where is it rough?

# %%
stored = storage.stored("loss_surface", "networks")
errors_of = {}
for kind, name in (("skip", NAME[True]), ("plain", NAME[False])):
    errors = [one["error"] for one in stored["networks"] if one["kind"] == kind]
    errors_of[kind] = errors
    told = f"test error {sum(errors) / len(errors):.1%} ({min(errors):.1%} to {max(errors):.1%})"
    print(f"{name:13} {len(errors)} networks: {told}")
assert min(errors_of["plain"]) > max(errors_of["skip"])
first_of = {one["kind"]: one["losses"] for one in reversed(stored["networks"])}
both = {NAME[True]: first_of["skip"], NAME[False]: first_of["plain"]}
figure = figures.loss_surfaces(both, stored["distances"])
figures.show(figure, "The stored pictures: a smooth funnel, and a dish with bumps at its rim.")

# %% [markdown]
# What may you conclude? On these data, at this depth and with this recipe, the networks without skips ended
# at higher losses and with far more mistakes. In the stored picture the loss around such a network is smooth
# near the middle and has bumps farther out, at the rim. The pictures do **not** show that the bumps are the cause. They show two dimensions out of about 17,000, and
# a network that is trained longer ends at another place with other surroundings. Li et al. (2018), who
# introduced the filter-wise directions, saw the same change with 56 layers and more, and much less of it with
# 20.

# %% [markdown]
# ## 3. How rough is it? (optional)
#
# The lower row of the figure gives an impression of the bumps, but only numbers can be compared. Walk over
# the surface along a row or a column: in a single valley you only go down and then up, and every additional
# bump lengthens the path. **Roughness** says how much longer, measured on the loss itself and not on
# its logarithm.

# %% exercise="roughness" todo="2.5" minutes=10 difficulty=2 points=2
from manyhands.loss_surface.surface import roughness

# %% check="2.5" tags=["nbval-check-output"]
check.roughness(roughness)

# %% [markdown]
# Do the ranges of the two kinds overlap in the stored run? And how much does the roughness of a single network
# depend on the plane? The cell draws two more planes through your network without skips.

# %%
if check.ready("2.1", "2.3", "2.4", "2.5"):
    rough_of = {}
    for kind, name in (("skip", NAME[True]), ("plain", NAME[False])):
        of_kind = [one for one in stored["networks"] if one["kind"] == kind]
        rough = rough_of[kind] = [one["roughness"] for one in of_kind]
        inner = [roughness(torch.tensor(one["losses"])[8:23, 8:23]) for one in of_kind]
        told = f"{min(rough):.3f} to {max(rough):.3f}, in the inner half at most {max(inner):.3f}"
        print(f"{name:13} roughness of {len(rough)} stored networks: {told}")
        assert max(inner) < 0.01, "the bumps lie at the rim"
    assert min(rough_of["plain"]) > max(rough_of["skip"])
    planes = [pictures[False]]
    for plane in (1, 2):
        (more, _), _ = run_ranks(
            picture, 2, {False: networks[False]}, 128, grid, plane, timeout_s=120
        )
        planes.append(more[False])
    told = ", ".join(f"{roughness(losses):.3f}" for losses in planes)
    print(f"your network {NAME[True]}: {roughness(pictures[True]):.3f}")
    print(f"your network {NAME[False]}, on three planes: {told}")

# %% [markdown]
# In the stored run the surroundings of every network without skips are rougher than those of any network
# with skips, and nearly all of this roughness lies outside the inner half, near the rim of the picture. But
# the number belongs to a plane as well as to a network: on another plane the roughness of the same network
# may be half as large, or twice. So compare kinds over several networks or several planes, and never by two
# single pictures.

# %% [markdown]
# ## 4. Flat and sharp
#
# How do you measure whether a minimum is flat or sharp? Lesson 01 found the steepest direction of a line's
# loss from its Hessian, the matrix of second derivatives. A network's Hessian has a row and a column for each
# parameter. For the network of section 1 that is $4810 \times 4810$, and the Hessian of a large model is too
# large to store. But its largest eigenvalue can be found without writing the matrix down: multiply a random
# vector by the Hessian again and again, and it aligns with the direction of greatest curvature (**power
# iteration**). Each product takes only the gradient of a gradient, which autograd can compute:
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
# rises high somewhere in a small box around it. The largest eigenvalue, which is easier to compute, is
# another measure of the same idea.) Is that so? Train small networks with batches of 16 and with all 1,297
# images at once, each with and without **weight decay**, which pulls all weights towards 0 in each step.
# Each of the four settings gets three seeds. On the way down, a copy of each network is kept when its
# training loss, looked at every four steps, is first below 0.2, 0.13, 0.06 and 0.04. The networks with
# weight decay are trained only down to 0.13, because with this much decay the loss hardly falls any
# further.


# %%
ALL = len(data.train_inputs)
LOSSES = (0.2, 0.13, 0.06, 0.04)
EQUAL = 0.13  # the lowest of them that all four settings reach


def train_small(batch, decay, seed):
    """Copies of the network: {loss: (steps so far, copy)}; under "end" the trained network."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    rate, epochs = (0.05, 20) if batch == 16 else (0.1, 400)
    recipe = {"lr": rate, "momentum": 0.9, "weight_decay": decay}
    optimizer = torch.optim.SGD(model.parameters(), **recipe, foreach=True)
    copies, steps = {}, 0
    for _ in range(epochs):
        for chosen in torch.randperm(ALL).split(batch):
            output = model(data.train_inputs[chosen])
            nn.functional.cross_entropy(output, data.train_labels[chosen]).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if steps % 4 == 0 and LOSSES[-1] not in copies:
                with torch.no_grad():
                    now = loss_of(model, ALL)()
                for level in LOSSES:
                    if now < level and level not in copies:
                        copies[level] = steps, copy.deepcopy(model)
            if decay and EQUAL in copies:
                return copies
    return copies | {"end": (steps, model)}


recipes = [(b, decay, seed) for seed in range(3) for decay in (0.0, 0.005) for b in (16, ALL)]


def train_share():
    torch.set_num_threads(1)
    own = my_share(recipes, dist.get_rank(), dist.get_world_size())
    return {recipe: train_small(*recipe) for recipe in own}


small = {}
for share in run_ranks(train_share, 2, timeout_s=120):
    small |= share

# %% [markdown]
# First look at the ends of the training runs without weight decay. Which batch size will end in the sharper
# minimum? Compare the training losses in the table too.

# %%
ratio = None  # your number: sharpness with batch 1,297 / sharpness with batch 16

# %% answer="true"
ratio = 3


# %%
def about(model):
    own = list(model.parameters())
    return {
        "sharpness": sharpness(loss_of(model, ALL), own, 20, torch.Generator().manual_seed(0)),
        "training loss": loss_of(model, ALL)().item(),
        "test error": error_rate(model, data.test_inputs, data.test_labels),
    }


def about_three(batch, decay, level):
    """Each fact of the three networks of a setting: {name: (mean, smallest, largest)}."""
    three = [about(small[batch, decay, seed][level][1]) for seed in range(3)]
    values = {name: [fact[name] for fact in three] for name in three[0]}
    return {name: (sum(v) / len(v), min(v), max(v)) for name, v in values.items()}


def show_facts(setting, facts):
    told = [f"{name} {m:.3f} ({low:.3f} to {high:.3f})" for name, (m, low, high) in facts.items()]
    print(f"{setting}: {', '.join(told)}")


if check.ready("2.6"):
    ends = {batch: about_three(batch, 0.0, "end") for batch in (16, ALL)}
    for batch, facts in ends.items():
        show_facts(f"batch {batch:5,}", facts)
    at_the_ends = ends[ALL]["sharpness"][0] / ends[16]["sharpness"][0]
    print(f"sharpness, batch 1,297 / batch 16: you said {ratio}, measured {at_the_ends:.2f}")
    assert at_the_ends > 1.3
    assert ends[ALL]["training loss"][0] > 1.2 * ends[16]["training loss"][0]

# %% [markdown]
# The claim seems to hold: the networks of small batches end in much flatter places. But they took four times
# as many steps, so their training loss is lower as well. A lower loss alone makes a place flatter, because
# the curvature of cross-entropy vanishes as the probability of the right class approaches 1 (Cohen et
# al. 2021). So part of the factor says nothing about batches.
#
# ### At equal training loss
#
# A fair comparison takes copies of equal training loss. Predict the ratio of the two sharpnesses again, now
# at a training loss of 0.04:

# %%
at_equal_loss = None  # your number

# %% answer="true"
at_equal_loss = 2

# %%
if check.ready("2.6"):
    sharp, overlaps = {16: [], ALL: []}, 0
    for level in LOSSES:
        facts = {batch: about_three(batch, 0.0, level) for batch in (16, ALL)}
        for batch, values in sharp.items():
            values.append(facts[batch]["sharpness"][0])
        measured = sharp[ALL][-1] / sharp[16][-1]
        (a, a_low, a_high), (b, b_low, b_high) = (facts[n]["test error"] for n in (16, ALL))
        overlaps += a_low <= b_high and b_low <= a_high
        told = f"test errors batch 16 {a:.1%}, batch 1,297 {b:.1%}"
        print(f"loss {level:4}: {measured:.1f} times as sharp; {told}")
        assert measured > 1.1
    print(f"the ranges of the test errors overlap at {overlaps} of {len(LOSSES)} losses")
    print(f"at a loss of 0.04: you said {at_equal_loss}, measured {measured:.2f}")
    assert measured < at_the_ends
    assert all(values[-1] < 0.8 * values[0] for values in sharp.values())
    figure, ax = figures.new_figure(7, 3.4)
    curves = {f"batch {batch:,}": (LOSSES, values) for batch, values in sharp.items()}
    figures.lines(ax, curves, "training loss (nats)", "sharpness (mean of 3 seeds)")
    ax.set(xscale="log", ylim=(0, None), xticks=LOSSES)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.minorticks_off()
    ax.invert_xaxis()  # training goes from left to right
    figures.show(figure, "Sharpness falls with the training loss; larger batches stay sharper.")

# %% [markdown]
# Training goes from left to right, and on the whole both curves fall: for either batch size, a much lower
# loss goes with a flatter place. At equal loss the factor between the batch sizes is smaller than it was at
# the ends, but it does not disappear. This fits the claim of Keskar et al.: the noise of small batches
# leads to flatter places. (In lesson 01 the noise depended on the ratio of learning rate to batch size.
# Here this ratio is 40 times as large for the small batches.) But now look at the test errors. Where the
# ranges of the two batch sizes overlap, three seeds cannot tell which of the two makes fewer mistakes,
# although their sharpness clearly differs.
#
# ### What weight decay changes
#
# With weight decay the weights cannot grow until the loss is tiny, so a network with decay ends at a higher
# loss than one without. Again only copies of equal loss may be compared. Here are all four settings when
# their training loss first fell below 0.13. Will decay make a solution sharper or flatter?

# %%
if check.ready("2.6"):
    equal = {}
    for decay in (0.0, 0.005):
        for batch in (16, ALL):
            facts = equal[batch, decay] = about_three(batch, decay, EQUAL)
            steps = [small[batch, decay, seed][EQUAL][0] for seed in range(3)]
            told = f"batch {batch:5,}, decay {decay:5}, after {min(steps)} to {max(steps)} steps"
            show_facts(told, facts)
    assert equal[ALL, 0.005]["sharpness"][0] < equal[ALL, 0.0]["sharpness"][0]
    assert equal[ALL, 0.005]["test error"][0] < equal[ALL, 0.0]["test error"][0]
    assert equal[ALL, 0.005]["sharpness"][0] > 1.2 * equal[16, 0.005]["sharpness"][0]
    assert equal[ALL, 0.005]["test error"][0] < equal[16, 0.005]["test error"][0] + 0.01

# %% [markdown]
# With all images in a batch, the solutions with weight decay are flatter **and** make fewer mistakes than
# those without. (They also took several times as many steps to the same loss, so decay is not the only
# difference.) With batches of 16 the sharpness hardly changes in our run, and on average the mistakes
# become fewer all the same. And with weight decay, the solutions of large batches are again much sharper
# than those of small ones, without making more mistakes. So the flatter solutions were better where decay
# was compared, and no better where batch sizes were.
#
# The next figure shows the loss on the line from the small-batch copy (at 0) to the large-batch copy (at 1).
# In the titles, "apart" is the length of that line, in the same unit as the length of the weights.

# %%
if check.ready("2.1", "2.2"):
    shares = [k / 10 for k in range(-10, 21)]
    figure, axes = figures.new_figure(9, 3.4, cols=2)
    steeper = 0
    for ax, decay in zip(axes, (0.0, 0.005), strict=True):
        curves, apart = {}, []
        for seed in range(3):
            pair = [small[batch, decay, seed][EQUAL][1] for batch in (16, ALL)]
            ends = [list(model.parameters()) for model in pair]
            apart.append(
                sum((a - b).square().sum().item() for a, b in zip(*ends, strict=True)) ** 0.5
            )
            walk = slice_between(loss_of(pair[0], ALL), *ends, shares)
            curves[f"seed {seed}"] = (shares, walk)
            assert max(walk[10:21]) < 0.2, "no hill between the two"
            steeper += walk[-1] - walk[20] > walk[0] - walk[10]
        figures.lines(ax, curves, "batch 16 (0) to batch 1,297 (1)", "training loss (nats)")
        ax.set(ylim=(0, 0.5))
        ax.set_title(
            f"weight decay {decay}; {min(apart):.1f} to {max(apart):.1f} apart", fontsize=10
        )
    figures.legend_below(figure, axes[0])
    print(f"on {steeper} of 6 lines the loss rises more on the side of the large batch")
    figures.show(figure, "Loss between small-batch and large-batch copies, with and without decay.")

# %% [markdown]
# There is hardly any hill between the two, which began with the same first weights. (Between a network and
# its shuffled copy section 1 found one.) Compare the two sides beyond the copies: if sharpness showed in
# every direction, the loss would rise more on the side of the large batch on all six lines. (In our run it
# did on five.) But the sharpness is the curvature in the steepest direction, and a line is only one
# direction of 4,810.
#
# A plane shows more of the surroundings. Draw the plane of section 2 around one copy of each setting, with
# your own functions and the same random numbers for all four. Which of them will look flattest?

# %%
if check.ready("2.1", "2.3", "2.4"):
    four = {(b, decay): small[b, decay, 0][EQUAL][1] for decay in (0.0, 0.005) for b in (16, ALL)}
    fine = [k / 10 for k in range(-10, 11)]
    (around, _), _ = run_ranks(picture, 2, four, ALL, fine, timeout_s=120)
    low = {setting: (losses < 0.3).double().mean().item() for setting, losses in around.items()}
    assert all(low[16, decay] > low[ALL, decay] for decay in (0.0, 0.005))
    assert low[ALL, 0.005] > low[ALL, 0.0]
    lowest = min(losses.min().item() for losses in around.values())
    highest = max(losses.max().item() for losses in around.values())
    levels = figures.geometric(lowest, highest, 15)
    figure, axes = figures.new_figure(7, 6, rows=2, cols=2)
    for ax, ((batch, decay), losses) in zip(axes.flat, around.items(), strict=True):
        filled = figures.contours(ax, fine, fine, losses.tolist(), levels)
        ax.plot(0, 0, "x", color="white")
        share = f"{low[batch, decay]:.0%} of the plane below a loss of 0.3"
        ax.set_title(f"batch {batch:,}, weight decay {decay}\n{share}", fontsize=10)
        figures.label(ax, "along direction 1", "along direction 2")
        ax.set_aspect("equal")
        ax.label_outer()
    bar = figure.colorbar(filled, ax=axes, format="{x:.2g}")
    bar.set_label("training loss (nats)")
    figures.show(figure, "Loss around four solutions of equal training loss.")

# %% [markdown]
# The titles measure the width of each basin. In both rows the basin of the small batches is the wider one,
# and with all images in a batch, decay makes it wider. So the pictures agree with the sharpness, and like
# the sharpness they do not tell you which network makes fewer mistakes.
#
# ### Does the sharpness decide how good a solution is?
#
# This can be settled in two minutes. Multiply the first layer of a network by 8, its biases too, and divide
# the weights of the second layer by 8. A ReLU lets a positive factor through, so the function stays the same,
# bit for bit (8 is a power of two, so floats can be multiplied and divided by it exactly). Does the sharpness
# stay the same too?

# %%
if check.ready("2.1", "2.3", "2.6"):
    _, model = small[16, 0.0, 0]["end"]
    scaled = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    with torch.no_grad():
        for number, (new, old) in enumerate(
            zip(scaled.parameters(), model.parameters(), strict=True)
        ):
            new.copy_(old * [8, 8, 1 / 8, 1][number])
    assert torch.equal(model(data.test_inputs), scaled(data.test_inputs))
    sharp = {}
    for name, one in {"as trained": model, "rescaled": scaled}.items():
        own, generator = list(one.parameters()), torch.Generator().manual_seed(0)
        sharp[name] = sharpness(loss_of(one, ALL), own, 20, generator)
        direction = random_direction(own, torch.Generator().manual_seed(1))
        away = loss_at(loss_of(one, ALL), own, [direction], [0.5])
        print(f"{name:10}: sharpness {sharp[name]:8.3f}, loss at distance 0.5 {away:.4f}")
    assert sharp["rescaled"] > 5 * sharp["as trained"]

# %% [markdown]
# The function is the same and makes the same mistakes on every image, but its sharpness is many times as
# large. So the bare number cannot be what makes a solution good or bad (Dinh et al. 2017). The
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
# folder as `surfaces.png`.

# %%
if check.ready("2.1", "2.3", "2.4"):
    check.keep()
    small_run = "--grid 9 --networks 1 --blocks 8 --epochs 4 --images 128".split()
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
