"""Lesson 08: right answers of another shape than the course's, and wrong ones that are no slip."""

import math

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm

from manyhands.layerwise.optimizers import LAMB, LARC, LARS, NovoGrad

# ---- 8.1 ------------------------------------------------------------------------------------


def rates_of_numpy(step, lowest, highest, num_rates, worse=2.0):
    """The learning rates exist before the first step, and are cut afterwards."""
    rates = np.geomspace(lowest, highest, num_rates)
    losses = []
    for rate in rates:
        losses.append(step(rate))
        if not np.isfinite(losses[-1]) or losses[-1] / losses[0] > worse:
            break
    return rates[: len(losses)], np.array(losses)


def rates_that_grow(step, lowest, highest, num_rates, worse=2.0):
    """The learning rate is multiplied by the factor after each step."""
    rates, losses = (lowest,), (step(lowest),)
    factor = math.exp(math.log(highest / lowest) / (num_rates - 1))
    while len(rates) < num_rates and losses[-1] <= worse * losses[0] < math.inf:
        rates += (rates[-1] * factor,)
        losses += (step(rates[-1]),)
    return rates, losses


def rates_in_float32(step, lowest, highest, num_rates, worse=2.0):
    rates = torch.logspace(math.log10(lowest), math.log10(highest), num_rates)
    losses = torch.full((num_rates,), math.nan)
    for index, rate in enumerate(rates):
        losses[index] = loss = step(rate)
        if not losses[index].isfinite() or loss > worse * losses[0]:
            return rates[: index + 1], losses[: index + 1]
    return rates, losses


def rates_until_the_smoothed_loss_rises(step, lowest, highest, num_rates, worse=2.0):
    """As fastai once did: the losses are smoothed, and compared with the best."""
    rates, losses, mean = [], [], 0.0
    for index in range(num_rates):
        rates.append(lowest * (highest / lowest) ** (index / (num_rates - 1)))
        mean = 0.9 * mean + 0.1 * step(rates[-1])
        losses.append(mean / (1 - 0.9 ** (index + 1)))
        if losses[-1] > worse * min(losses):
            break
    return rates, losses


def rates_with_the_loss_after_the_step(step, lowest, highest, num_rates, worse=2.0):
    return rates_that_grow(lambda rate: (step(rate), step(rate))[1], lowest, highest, num_rates)


def rates_as_pairs(step, lowest, highest, num_rates, worse=2.0):
    return list(zip(*rates_that_grow(step, lowest, highest, num_rates, worse), strict=True))


def rates_one_by_one(step, lowest, highest, num_rates, worse=2.0):
    yield from zip(*rates_that_grow(step, lowest, highest, num_rates, worse), strict=True)


def rates_evenly_spaced(step, lowest, highest, num_rates, worse=2.0):
    rates, losses = torch.linspace(lowest, highest, num_rates, dtype=torch.float64).tolist(), []
    while len(losses) < num_rates and not (losses and not losses[-1] <= worse * losses[0] < 1e30):
        losses.append(step(rates[len(losses)]))
    return rates[: len(losses)], losses


# ---- 8.2 ------------------------------------------------------------------------------------


class Plain(torch.optim.Optimizer):
    """An optimizer that owes nothing to the course's base class. `usual`: its default options."""

    usual: dict

    def __init__(self, params, lr, **options):
        super().__init__(params, {"lr": lr, **self.usual, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.move(weight, weight.grad, self.state[weight], **group)


LARS_USUAL = {"momentum": 0.9, "weight_decay": 0.0005, "trust": 0.001, "eps": 0.0}
LARS_USUAL |= {"lr_inside": True, "decay_in_ratio": "sum", "zero_norm": "one"}


def trust_ratio(weight, grad, weight_decay, trust, eps, decay_in_ratio, zero_norm, **_):
    """The ratio and the decay as numbers, from norms in the type of the weight."""
    above = weight.norm().item()
    if decay_in_ratio == "joint":
        grad = grad + weight_decay * weight
    below = grad.norm().item()
    if above == 0 or below == 0:
        return float(zero_norm != "stay"), weight_decay * (zero_norm != "no_decay")
    more = weight_decay * above if decay_in_ratio == "sum" else 0
    return trust * above / (below + more + eps), weight_decay


class PlainLARS(Plain):
    """Norms of its own, as numbers of Python."""

    usual = LARS_USUAL

    def move(self, weight, grad, state, lr, momentum, lr_inside, **options):
        ratio, decay = trust_ratio(weight, grad, **options)
        step = ratio * (grad + decay * weight)
        inner, outer = (lr, 1) if lr_inside else (1, lr)
        state["v"] = momentum * state.get("v", 0) + inner * step
        weight.add_(state["v"], alpha=-outer)


class LARSWithoutState(LARS):
    """New tensors in each step; the velocity points the other way, under another name."""

    def update(self, weight, direction, size, length, options):
        ratio = self.ratio(size, length, options)
        if options["zero_norm"] == "no_decay" and 0 in (size, length):
            step = ratio * weight.grad
        else:
            step = ratio * (weight.grad + options["weight_decay"] * weight)
        own = self.state[weight]
        old = own["velocity"] if "velocity" in own else torch.zeros_like(weight)
        if options["lr_inside"]:
            own["velocity"] = options["momentum"] * old - options["lr"] * step
            weight.copy_(weight + own["velocity"])
        else:
            own["velocity"] = options["momentum"] * old - step
            weight.copy_(weight + options["lr"] * own["velocity"])
        return float(ratio)

    def ratio(self, size, length, options):
        below = length + options["eps"]
        if options["decay_in_ratio"] == "sum":
            below = below + options["weight_decay"] * size
        if size * length == 0:
            return torch.tensor(0.0 if options["zero_norm"] == "stay" else 1.0)
        return size.div(below).mul(options["trust"])


class LARSOfLists(PlainLARS):
    """All weights of a group move in a few calls; everything is computed in float64."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            short = [weight.double() for weight in weights]
            grads = [weight.grad.double() for weight in weights]
            options = {k: v for k, v in group.items() if k in LARS_USUAL}
            pairs = zip(short, grads, strict=True)
            ratios, decays = zip(*(trust_ratio(*pair, **options) for pair in pairs), strict=True)
            steps = torch._foreach_add(grads, torch._foreach_mul(short, list(decays)))
            inner = [ratio * (group["lr"] if group["lr_inside"] else 1) for ratio in ratios]
            torch._foreach_mul_(steps, inner)
            moved = [self.state[w].setdefault("m", torch.zeros_like(w).double()) for w in weights]
            torch._foreach_mul_(moved, group["momentum"])
            torch._foreach_add_(moved, steps)
            outer = 1 if group["lr_inside"] else group["lr"]
            torch._foreach_copy_(weights, torch._foreach_sub(short, moved, alpha=outer))


class LARSOfTimm(PlainLARS):
    """The learning rate after the momentum, and no ratio without weight decay."""

    def move(self, weight, grad, state, lr_inside, **options):
        if options["weight_decay"] == 0:
            options["trust"], options["decay_in_ratio"] = grad.norm() / weight.norm(), "none"
        super().move(weight, grad, state, lr_inside=False, **options)


class LARSWithTheRateOutside(PlainLARS):
    """torch's SGD on scaled gradients: equal only while the learning rate is constant."""

    def move(self, weight, grad, state, lr_inside, **options):
        super().move(weight, grad, state, lr_inside=False, **options)


class LARSOfTheWholeModel(LARS):
    """One ratio for all layers."""

    def ratio(self, size, length, options):
        weights = [w for g in self.param_groups for w in g["params"] if w.grad is not None]
        norms = [
            torch.cat([t.flatten() for t in ts]).double().norm()
            for ts in (weights, [w.grad for w in weights])
        ]
        return super().ratio(*norms, options)


class LARSOfMatricesOnly(PlainLARS):
    """As in pytorch_optimizer, where vectors have neither a ratio nor a decay."""

    def move(self, weight, grad, state, **options):
        if weight.dim() == 1:
            options |= {"weight_decay": 0, "decay_in_ratio": "none"}
            options |= {"trust": grad.norm().item() / weight.norm().item() if weight.any() else 1}
        super().move(weight, grad, state, **options)


class LARSWithAShortBuffer(LARSWithoutState):
    """The state takes a quarter of the memory."""

    def update(self, weight, *rest):
        ratio = super().update(weight, *rest)
        self.state[weight]["velocity"] = self.state[weight]["velocity"].bfloat16()
        return ratio


class LARSWithOneBuffer(LARS):
    """The buffers stand in a dict by their shape, and the dict belongs to the class."""

    buffers: dict = {}

    def update(self, weight, direction, size, length, options):
        self.state[weight] = self.buffers.setdefault(weight.shape, {})
        return super().update(weight, direction, size, length, options)


# ---- 8.3 ------------------------------------------------------------------------------------


class LARCOfLARS(LARSWithoutState):
    """The ratio of one's own LARS, divided and clipped."""

    def __init__(self, params, lr, weight_decay=0.0, trust=0.02, eps=1e-8, **options):
        options = {"lr_inside": False, "zero_norm": "no_decay", **options}
        super().__init__(params, lr, weight_decay=weight_decay, trust=trust, eps=eps, **options)

    def ratio(self, size, length, options):
        ratio = super().ratio(size, length, options).item()
        return ratio / options["lr"] if ratio < options["lr"] else 1.0


class LARCByHand(LARC):
    def ratio(self, size, length, options):
        if size == 0 or length == 0:
            return torch.zeros_like(size) if options["zero_norm"] == "stay" else size.new_ones(())
        below = length + options["eps"]
        if options["decay_in_ratio"] == "sum":
            below += options["weight_decay"] * size
        wanted = options["trust"] * size / below
        return wanted / options["lr"] if wanted < options["lr"] else torch.ones_like(size)


class PlainLARC(PlainLARS):
    """As apex: the gradient is scaled before the momentum, here a copy of it."""

    usual = LARS_USUAL | {"weight_decay": 0.0, "trust": 0.02, "eps": 1e-8}
    usual |= {"lr_inside": False, "zero_norm": "no_decay"}

    def move(self, weight, grad, state, lr, momentum, lr_inside, **options):
        ratio, decay = trust_ratio(weight, grad, **options)
        grad = self.scaled(grad, weight, self.factor(ratio, lr), decay)
        buffer = state.setdefault("buffer", torch.zeros_like(weight))
        buffer.mul_(momentum).add_(grad * lr if lr_inside else grad)
        weight.sub_(buffer * (1 if lr_inside else lr))

    def factor(self, ratio, lr):
        return 1.0 if ratio >= lr else ratio / lr

    def scaled(self, grad, weight, ratio, decay):
        return (grad + decay * weight) * ratio


class LARCInPlace(PlainLARC):
    """As apex itself: the gradient is overwritten."""

    def scaled(self, grad, weight, ratio, decay):
        return grad.add_(weight, alpha=decay).mul_(ratio)


class LARCThatDecaysTwice(PlainLARC):
    """The SGD that comes after the scaling still has its own weight decay."""

    def scaled(self, grad, weight, ratio, decay):
        return (grad + decay * weight) * ratio + decay * weight


class LARCWithoutAClip(PlainLARC):
    """apex's option clip=False: the rate multiplies the ratio."""

    def factor(self, ratio, lr):
        return ratio


class LARCThatClipsTheStep(LARC):
    """What is limited is the distance, and not the learning rate."""

    def ratio(self, size, length, options):
        return super().ratio(size, length, options).clamp(max=options["lr"] / length.item())


# ---- 8.4 ------------------------------------------------------------------------------------


class LAMBOnMoments(LAMB):
    """The sums of Adam without their weights 1 - beta, which are multiplied in at the end."""

    def direction(self, weight, options):
        beta1, beta2 = options["betas"]
        own = self.state[weight]
        own["t"] = t = own.get("t", 0) + 1
        own["m"] = beta1 * own.get("m", 0) + weight.grad
        own["v"] = beta2 * own.get("v", 0) + weight.grad**2
        mean, square = (1 - beta1) * own["m"], (1 - beta2) * own["v"]
        if options["bias_correction"]:
            mean, square = mean / (1 - beta1**t), square / (1 - beta2**t)
        direction = mean / (torch.sqrt(square) + options["eps"])
        return direction + weight * options["weight_decay"] * (options["decay_in_ratio"] == "joint")

    def update(self, weight, direction, size, length, options):
        ratio = torch.full_like(size, options["zero_norm"] != "stay")
        if size > 0 and length > 0:
            ratio = torch.minimum(size, size.new_tensor(options["clamp"] or math.inf)) / length
        step = ratio * direction
        if options["decay_in_ratio"] == "none":
            step = step + options["weight_decay"] * weight
        weight -= options["lr"] * step
        return ratio


class PlainLAMB(Plain):
    """Adam's direction with numbers of Python, and norms in the type of the weight."""

    usual = {"betas": (0.9, 0.999), "weight_decay": 0.01, "eps": 1e-6, "bias_correction": True}
    usual |= {"clamp": None, "decay_in_ratio": "joint", "zero_norm": "one"}

    def move(self, weight, grad, state, lr, betas, weight_decay, eps, bias_correction, **options):
        if not state:
            state |= {"step": 0, "m": torch.zeros_like(weight), "v": torch.zeros_like(weight)}
        state["step"] += 1
        state["m"].mul_(betas[0]).add_(grad, alpha=1 - betas[0])
        state["v"].lerp_(grad.square(), 1 - betas[1])
        c1, c2 = (1 - b ** state["step"] if bias_correction else 1.0 for b in betas)
        update = (state["m"] / c1).div_((state["v"] / c2).sqrt_().add_(eps))
        inside, outside = (
            (weight_decay, 0) if options["decay_in_ratio"] == "joint" else (0, weight_decay)
        )
        update.add_(weight, alpha=inside)
        ratio = self.ratio_of(weight, update, weight_decay, **options)
        weight.mul_(1 - lr * outside).add_(update, alpha=-lr * self.rate_of(c1, c2) * ratio)

    def ratio_of(self, weight, update, weight_decay, clamp, zero_norm, **_):
        above, below = weight.norm().item(), update.norm().item()
        if above and below:
            return min(above, clamp or math.inf) / below
        return float(zero_norm != "stay")

    def rate_of(self, c1, c2):
        return 1.0


class LAMBInDouble(PlainLAMB):
    """Weights of float32 are updated in float64."""

    def move(self, weight, grad, state, **options):
        long = weight.double()
        super().move(long, grad.double(), state, **options)
        weight.copy_(long)


class LAMBOfTorchOptimizer(PlainLAMB):
    """No bias correction, and |w| is at most 10."""

    usual = PlainLAMB.usual | {"bias_correction": False, "clamp": 10.0}


class LAMBThatCorrectsTheRate(PlainLAMB):
    """The bias correction multiplies the learning rate, after the ratio."""

    def move(self, weight, grad, state, betas, bias_correction, **options):
        step = state.get("step", 0) + 1
        if bias_correction:
            options["lr"] *= math.sqrt(1 - betas[1] ** step) / (1 - betas[0] ** step)
        super().move(weight, grad, state, betas=betas, bias_correction=False, **options)


class LAMBOfNvidia(PlainLAMB):
    """Without weight decay there is no ratio."""

    def ratio_of(self, weight, update, weight_decay, **options):
        return super().ratio_of(weight, update, weight_decay, **options) if weight_decay else 1.0


class LAMBWithOneCount(LAMBOnMoments):
    """The steps are counted by the optimizer, so a weight that comes late is not corrected."""

    count = 0

    def step(self, closure=None):
        self.count += 1
        return super().step(closure)

    def direction(self, weight, options):
        self.state[weight]["t"] = self.count - 1
        return super().direction(weight, options)


class LAMBWithOneRatio(PlainLAMB):
    """The norms of all layers together give one ratio."""

    def ratio_of(self, weight, update, weight_decay, **options):
        every = torch.cat([one.flatten() for one in self.param_groups[0]["params"]])
        return super().ratio_of(every, update, weight_decay, **options)


# ---- 8.5 ------------------------------------------------------------------------------------


class NovoGradOfNumbers(NovoGrad):
    """The average is a number of Python; the momentum is a new tensor in each step."""

    def update(self, weight, direction, size, length, options):
        own = self.state[weight]
        square = float(length) ** 2
        if self.begins(own) and options["first_square"] == "whole":
            own["average"] = square
        else:
            beta = options["betas"][1]
            own["average"] = beta * own.get("average", 0.0) + (1 - beta) * square
        scale = 1 / (math.sqrt(own["average"]) + options["eps"])
        step = weight.grad * scale + options["weight_decay"] * weight
        share = 1 - options["betas"][0] if options["averaging"] else 1
        own["m"] = options["betas"][0] * own.get("m", torch.zeros_like(weight)) + share * step
        weight.copy_(weight - options["lr"] * own["m"])
        return scale

    def begins(self, own):
        """Has no gradient been other than 0 so far?"""
        return not own.get("average")


class NovoGradOfTheFirstGradient(NovoGradOfNumbers):
    """The average begins with the first gradient, also where that is 0."""

    def begins(self, own):
        return "average" not in own


class PlainNovoGrad(Plain):
    """As timm's, with norms of its own, and an average of a chosen type."""

    usual = {"betas": (0.95, 0.98), "weight_decay": 0.001, "eps": 1e-8}
    usual |= {"first_square": "whole", "averaging": False}
    dtype = torch.float64

    def move(self, weight, grad, state, lr, betas, weight_decay, eps, first_square, averaging, **_):
        if not state:
            state["avg"] = torch.zeros([], dtype=self.dtype)
            state["buf"] = torch.zeros_like(weight)
        square = grad.double().pow(2).sum()
        if first_square == "whole" and not state["avg"]:
            state["avg"].copy_(square)
        else:
            state["avg"].mul_(betas[1]).add_(square, alpha=1 - betas[1])
        step = grad.div(state["avg"].sqrt().add(eps)).add(weight, alpha=weight_decay)
        state["buf"].mul_(betas[0]).add_(step.mul_(1 - betas[0]) if averaging else step)
        weight.add_(state["buf"], alpha=-lr)


class NovoGradOfJasper(PlainNovoGrad):
    """The average is made with torch's default type."""

    dtype = torch.float32


class NovoGradAsAdam(PlainNovoGrad):
    """Both averages begin with 0 and are corrected, as in Adam."""

    def move(self, weight, grad, state, betas, lr, first_square, averaging, **options):
        state["step"] = step = state.get("step", 0) + 1
        if step == 1:
            state["avg"], state["buf"] = torch.zeros([]).double(), torch.zeros_like(weight)
        c1, c2 = (1 - beta**step for beta in betas)
        options |= {"betas": betas, "lr": lr * math.sqrt(c2) / c1, "first_square": "average"}
        super().move(weight, grad, state, averaging=True, **options)


class NovoGradWithAShortAverage(PlainNovoGrad):
    """The average is of the weight's type, also where that is bfloat16."""

    def move(self, weight, grad, state, **options):
        self.dtype = weight.dtype
        super().move(weight, grad, state, **options)


class NovoGradOfTheWholeModel(NovoGradOfNumbers):
    """One norm of all gradients together."""

    def update(self, weight, direction, size, length, options):
        every = [
            w.grad.flatten() for g in self.param_groups for w in g["params"] if w.grad is not None
        ]
        return super().update(weight, direction, size, torch.cat(every).double().norm(), options)


class NovoGradWithACorrectedRate(NovoGradOfNumbers):
    """As in pytorch_optimizer: the learning rate is multiplied by the root of 1 - beta2^t."""

    def update(self, weight, direction, size, length, options):
        own = self.state[weight]
        own["t"] = own.get("t", 0) + 1
        rate = options["lr"] * math.sqrt(1 - options["betas"][1] ** own["t"])
        return super().update(weight, direction, size, length, options | {"lr": rate})


# ---- 8.6 ------------------------------------------------------------------------------------


def norms_gathered(shards, group=None, order=2.0):
    """Every rank has the norms of all parts, and takes the norm of them."""
    own = torch.zeros(len(shards), dtype=torch.float64)
    for index, shard in enumerate(shards):
        if shard.numel():
            own[index] = torch.linalg.vector_norm(shard.double(), order)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    return torch.linalg.vector_norm(torch.stack(everyone), order, dim=0)


def norms_one_by_one(shards, group=None, order=2.0):
    """A message for each tensor; all of them are on their way together."""
    op = dist.ReduceOp.MAX if order == math.inf else dist.ReduceOp.SUM
    norms = torch.zeros(len(shards), dtype=torch.float64)
    works = []
    for norm, shard in zip(norms, shards, strict=True):
        numbers = shard.double().flatten()
        norm += (
            max(map(abs, numbers.tolist()), default=0) if order == math.inf else (numbers @ numbers)
        )
        works.append(dist.all_reduce(norm, op, group=group, async_op=True))
    for work in works:
        work.wait()
    return norms if order == math.inf else norms**0.5


def norms_in_enough_digits(shards, group=None, order=2.0):
    """Computed in float32, but for shards of float64, and sent as objects."""
    kinds = [torch.promote_types(shard.dtype, torch.float32) for shard in shards]
    own = [shard.to(kind).pow(2).sum().item() for kind, shard in zip(kinds, shards, strict=True)]
    if order == math.inf:
        own = [torch.cat([s.flatten(), s.new_zeros(1)]).abs().max().item() for s in shards]
    rows = [None] * dist.get_world_size(group)
    dist.all_gather_object(rows, own, group=group)
    if order == math.inf:
        return torch.tensor([max(column) for column in zip(*rows, strict=True)]).double()
    return torch.tensor([math.sqrt(sum(c)) for c in zip(*rows, strict=True)], dtype=torch.float64)


def norms_of_gathered_shards(shards, group=None, order=2.0):
    """As if all parts of a tensor were of one size."""
    norms = []
    for shard in shards:
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, shard.contiguous(), group=group)
        norms.append(torch.linalg.vector_norm(torch.cat(parts).double(), order))
    return torch.stack(norms)


def norms_where_there_is_something(shards, group=None, order=2.0):
    """A rank whose part of the first tensor is empty sends no message."""
    norms = torch.stack([shard.double().square().sum() for shard in shards])
    if shards[0].numel():
        dist.all_reduce(norms, group=group)
    return norms.sqrt()


def norms_of_absolute_values(shards, group=None, order=2.0):
    """The sums of the absolute values, as if order were 1."""
    norms = torch.stack([shard.double().abs().sum() for shard in shards])
    dist.all_reduce(norms, group=group)
    return norms


def norms_as_numbers(shards, group=None, order=2.0):
    return norms_gathered(shards, group, order).tolist()


def norm_of_all(shards, group=None, order=2.0):
    """What the clipping of gradients needs: one number, and that of this rank alone."""
    return get_total_norm(shards, order)


RIGHT = {
    "8.1": [rates_of_numpy, rates_that_grow, rates_in_float32],
    "8.2": [PlainLARS, LARSWithoutState, LARSOfLists],
    "8.3": [LARCOfLARS, LARCByHand, PlainLARC],
    "8.4": [LAMBOnMoments, PlainLAMB, LAMBInDouble],
    "8.5": [NovoGradOfNumbers, PlainNovoGrad],
    "8.6": [norms_gathered, norms_in_enough_digits],
}
WRONG = {
    "8.1": [
        (rates_until_the_smoothed_loss_rises, "matches none of the mistakes"),
        (rates_with_the_loss_after_the_step, ""),
        (rates_as_pairs, "two lists"),
        (rates_one_by_one, "a generator"),
        (rates_evenly_spaced, "grow by equal amounts"),
    ],
    "8.2": [
        (LARSOfTimm, ""),
        (LARSWithTheRateOutside, "multiplies the whole momentum buffer"),
        (LARSOfTheWholeModel, ""),
        (LARSOfMatricesOnly, ""),
        (LARSWithAShortBuffer, "the state is as precise as the weights"),
        (LARSWithOneBuffer, ""),
    ],
    "8.3": [
        (LARCInPlace, "the gradients are unchanged"),
        (LARCThatDecaysTwice, ""),
        (LARCWithoutAClip, "This is the ratio of LARS"),
        (LARCThatClipsTheStep, ""),
    ],
    "8.4": [
        (LAMBOfTorchOptimizer, ""),
        (LAMBThatCorrectsTheRate, ""),
        (LAMBOfNvidia, ""),
        (LAMBWithOneCount, "nothing else comes back"),
        (LAMBWithOneRatio, ""),
    ],
    "8.5": [
        (NovoGradOfJasper, "float32"),
        (NovoGradAsAdam, ""),
        (NovoGradWithAShortAverage, "float32 at least"),
        (NovoGradOfTheWholeModel, ""),
        (NovoGradOfTheFirstGradient, "whose first gradient is zero"),
        (NovoGradWithACorrectedRate, ""),
    ],
    "8.6": [
        (norms_of_gathered_shards, ""),
        (norms_where_there_is_something, "never ended"),
        (norms_of_absolute_values, "matches none of the mistakes"),
        (norms_as_numbers, "The exercise asks for a tensor"),
        (norm_of_all, ""),
        (norms_one_by_one, "all norms travel in one message"),
    ],
}
