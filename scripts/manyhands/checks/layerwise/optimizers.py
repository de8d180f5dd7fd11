"""8.2 to 8.5: LARS, LARC, LAMB and NovoGrad. How they are observed stands in steps.py."""

import torch

from manyhands.checks.engine.tables import mistakes
from manyhands.checks.layerwise.steps import Training, of_optimizer, training
from manyhands.layerwise import optimizers

RENAMED = "The weights do not change."
IN_PLACE = "Write weight.sub_(...): weight = weight - ... only gives the name to a new tensor."

# ---- 8.2 ------------------------------------------------------------------------------------

# With the defaults a step would hardly be seen.
SEEN = {"trust": 0.1, "weight_decay": 0.3, "eps": 0.01}
NO_DECAY = {"weight_decay": 0.0}


def lars_drawn() -> list[Training]:
    """Every option in both of its ways, beside weights and gradients that are special."""
    return [
        training(SEEN, {}, "single", rates=[0.5]),
        training({}, SEEN | {"momentum": 0.5}, rates=[0.5] * 3),
        training(SEEN, {"trust": 0.4, "weight_decay": 0.0}, "resumed"),
        training(SEEN | {"lr_inside": False}, {"momentum": 0.0}),
        training(SEEN, {"lr_inside": False}, "part"),
        training(SEEN | {"decay_in_ratio": "joint"}, {"decay_in_ratio": "none"}),
        training(SEEN, {"eps": 0.75}, "zeros"),
        training(SEEN | {"zero_norm": "stay"}, {"zero_norm": "no_decay"}, "zeros"),
        training(SEEN | {"zero_norm": "no_decay"}, {"zero_norm": "stay"}, "zeros first"),
        training(SEEN, {"lr_inside": False}, "large"),
        training(SEEN, NO_DECAY, "late"),
        training(SEEN, NO_DECAY, "two"),
        training(SEEN, {"lr_inside": False}, dtype=torch.float32),
    ]


SUM = 'options["weight_decay"] if options["decay_in_ratio"] == "sum" else 0.0'
GUARD = "where_not_zero(ratio, size, length, options)"
HALF_A_GUARD = "torch.where((size > 0) & (length > 0), {}, 1.0)"
ONE_FOR_BOTH = HALF_A_GUARD.format("ratio")
OWN_DECAY = "decay_of(size, length, options)"
SCALED = "weight.grad.add(weight * decay).mul(ratio)"
ADDED = 'scaled * options["lr"] if inside else scaled'
ZEROS = "where_not_zero gives what the option `zero_norm` asks for where a norm is 0."
PLACE = (
    "With lr_inside=True the buffer collects rate * ratio * (g + decay * w). Without it the buffer "
    "collects ratio * (g + decay * w), and the learning rate multiplies it when the weight moves."
)
BELOW = 'The denominator has decay * size only where decay_in_ratio is "sum".'
lars = of_optimizer(
    "8.2",
    optimizers.LARS,
    lars_drawn,
    "v = momentum * v + rate * ratio * (g + decay * w), and then w = w - v.",
    (
        "`ratio` returns trust * size / (length + decay * size + eps), where decay counts only if "
        'decay_in_ratio is "sum". `size` is the norm of the weight, and `length` that of the '
        "direction.",
        f"{ZEROS} In `update`, {OWN_DECAY} is the layer's weight decay. The momentum buffer of a "
        "weight belongs in self.state[weight].",
        f"{PLACE} Change buffer and weight in place, and return the ratio.",
    ),
    mistakes(
        """
        inside = options["lr_inside"] => inside = False :: The learning rate multiplies the whole
            momentum buffer, even where lr_inside is True. | {PLACE}
        inside = options["lr_inside"] => inside = True ::
            The learning rate goes into the momentum buffer, even where lr_inside is False.
        {SUM} => options["weight_decay"] ::
            The ratio divides by length + decay * size, whatever `decay_in_ratio` says. | {BELOW}
        {SUM} => 0.0 :: The ratio does not count the weight decay in its denominator.
        {SCALED} => weight.grad.mul(ratio) :: The step has no weight decay. | The ratio multiplies
            the sum g + decay * w, before the sum is added to the buffer.
        {SCALED} => weight.grad.mul(ratio).add(weight * decay) ::
            The ratio multiplies the gradient alone, and the weight decay is added unscaled.
        .mul(ratio) =>
        weight.sub_(buffer if inside else buffer * options["lr"]) => weight.sub_(ratio * (buffer if
            inside else buffer * options["lr"])) ::
            The ratio multiplies the whole momentum buffer, so it scales old gradients once more.
        {GUARD} => ratio :: The ratio is not replaced where a norm is 0. | {ZEROS}
        {GUARD} => {ONE_FOR_BOTH} ::
            Where a norm is 0 the ratio is always 1, even where zero_norm is "stay".
        {OWN_DECAY} => options["weight_decay"] :: Where a norm is 0 the weight decays, even where
            zero_norm is "no_decay". | Ask decay_of for the weight decay of a layer.
        + options["eps"] => ::
            The option `eps` is not used. | Add it to the denominator of the ratio.
        {OWN_DECAY} => torch.as_tensor({OWN_DECAY}).float() :: The weight decay passes through
            float32. torch.tensor(0.1) and torch.where(condition, 0.1, 0.0) make float32, even where
            the weights are float64. | decay_of keeps the precision of its norms.
        buffer.mul_(options["momentum"]).add_( => buffer = buffer * options["momentum"] + ( ::
            The new momentum buffer is not kept, so the next step begins with zeros again. | Change
            the buffer in place: mul_ and add_.
        {ADDED} => (1 - options["momentum"]) * ({ADDED}) ::
            The gradient enters the buffer with 1 - momentum before it, as in a running mean. | The
            buffer is momentum times the old one plus the whole scaled gradient.
        weight.sub_(buffer if => weight = weight - (buffer if :: {RENAMED} | {IN_PLACE}
    """,
        globals(),
    ),
)

# ---- 8.3 ------------------------------------------------------------------------------------


def larc_drawn() -> list[Training]:
    """Some layers are clipped and others are not; with a norm of 0 the rate stays below 1."""
    seen = {"trust": 0.2, "weight_decay": 0.3, "eps": 0.01}
    return [
        training(seen, {}, "single", rates=[0.25]),
        training({}, {"trust": 0.3, "momentum": 0.5}, rates=[0.5] * 3),
        training(seen, {"trust": 0.05, "weight_decay": 0.0}, "resumed"),
        training(seen, {"trust": 0.1, "lr_inside": True}, lr=2.0),
        training(seen, {"trust": 0.1}, "part"),
        training(seen, {"trust": 0.1}, rates=[0.5, 0.25, 0.0]),
        training(seen | {"decay_in_ratio": "joint"}, {"decay_in_ratio": "none"}, lr=1.0),
        training(seen, {"zero_norm": "one", "eps": 0.75}, "zeros"),
        training(seen | {"zero_norm": "stay"}, {"zero_norm": "no_decay"}, "zeros"),
        training(seen | {"zero_norm": "one"}, {"zero_norm": "stay"}, "zeros first"),
        training(seen, {"trust": 0.01}, "large"),
        training(seen, {"trust": 0.1, "weight_decay": 0.0}, "late"),
        training(seen, {"trust": 0.1, "weight_decay": 0.0}, "two"),
        training(seen, {"trust": 0.1}, dtype=torch.float32),
    ]


CLIP = '(wanted / options["lr"]).clamp(max=1.0)'
LARC_GUARD = "where_not_zero(clipped, size, length, options)"
LARC_ONE = HALF_A_GUARD.format("clipped")
CEILING = (
    "`update` multiplies by the learning rate, so `ratio` returns min(wanted / rate, 1), and the "
    "layer moves with min(wanted, rate). Here wanted is the layer's trust ratio."
)
larc = of_optimizer(
    "8.3",
    optimizers.LARC,
    larc_drawn,
    f"{CEILING} The rest of the step is your LARS, so the check of 8.2 has to be green first.",
    (
        "Compute the trust ratio as LARS does. In LARC this is the learning rate that the layer "
        "should have, and options['lr'] is the most that it may have.",
        f"{CEILING} It is trust * size / (length + decay * size + eps).",
        f"clamp(max=1.0) takes the smaller one of a tensor and 1. At the end, {ZEROS}",
    ),
    mistakes(
        """
        .clamp(max=1.0) => :: The ratio is never clipped, so a layer may move faster than the
            learning rate allows. | {CEILING}
        {CLIP} => wanted ::
            This is the ratio of LARS, neither divided by the learning rate nor clipped.
        {CLIP} => wanted.clamp(max=1.0) ::
            The ratio is clipped at 1 without being divided by the learning rate first.
        {CLIP} => wanted.clamp(max=options["lr"]) ::
            The ratio is clipped at the learning rate, and `update` multiplies by it once more.
        {CLIP} => (wanted * options["lr"]).clamp(max=1.0) ::
            The ratio is multiplied by the learning rate, where it should be divided by it.
        .clamp(max=1.0) => .clamp(min=1.0) ::
            The larger one of the ratio and 1 is taken. | clamp(max=1.0) takes the smaller one.
        options["lr"] => self.defaults["lr"] :: The ratio uses the learning rate that the optimizer
            was made with, which neither a schedule nor a group's own options change. |
            options["lr"] is the learning rate of this step and this group.
        {SUM} => options["weight_decay"] ::
            The ratio divides by length + decay * size, whatever `decay_in_ratio` says. | {BELOW}
        {SUM} => 0.0 :: The ratio does not count the weight decay in its denominator.
        {LARC_GUARD} => clipped :: The ratio is not replaced where a norm is 0. | {ZEROS}
        {LARC_GUARD} => {LARC_ONE} ::
            Where a norm is 0 the ratio is always 1, even where zero_norm is "stay".
        + options["eps"] => ::
            The option `eps` is not used. | Add it to the denominator of the ratio.
        options["trust"] * size => torch.tensor(options["trust"]) * size ::
            The ratio passes through float32. torch.tensor(0.1) and torch.where(condition, 0.1, 0.0)
            make float32, even where the weights are float64. | Multiply the norms by numbers of
            Python, which are precise enough.
    """,
        globals(),
    ),
)

# ---- 8.4 ------------------------------------------------------------------------------------


def lamb_drawn() -> list[Training]:
    """Every option in both of its ways; averages that begin late, and at zero."""
    seen = {"weight_decay": 0.3, "betas": (0.8, 0.95), "eps": 0.01}
    apart = {"decay_in_ratio": "none"}
    return [
        training(seen, {}, "single", rates=[0.25]),
        training({}, {"betas": (0.7, 0.9)}, rates=[0.25] * 3),
        training(seen, {"eps": 0.5, "weight_decay": 0.0}, "resumed"),
        training(seen, {"decay_in_ratio": "none"}, "part"),
        training(seen | {"bias_correction": False}, {"bias_correction": True}),
        training(seen | apart, {"decay_in_ratio": "joint"}),
        training(seen | {"clamp": 0.75}, {"clamp": 3.0}),
        training(seen, NO_DECAY, "zeros"),
        training(seen | {"zero_norm": "stay"}, NO_DECAY, "zeros first"),
        training(seen, apart | {"zero_norm": "stay"}, "zeros first"),
        training(seen, apart, "large"),
        training(seen, apart, "late"),
        training(seen, {"bias_correction": False}, "two"),
        training(seen, apart, dtype=torch.float32),
    ]


ROOT = '(square / of_square).sqrt() + options["eps"]'
COUNTED = 'size if options["clamp"] is None else size.clamp(max=options["clamp"])'
LAMB_GUARD = "where_not_zero(counted / length, size, length, options)"
LAMB_ONE = HALF_A_GUARD.format("counted / length")
IF_JOINT = 'if options["decay_in_ratio"] == "joint":'
IF_APART = 'if options["decay_in_ratio"] == "none":'
ADAM = "direction = (mean / (1 - beta1**t)) / ((square / (1 - beta2**t)).sqrt() + eps)"
DECAYS = (
    'With decay_in_ratio="joint" the decay is added to the direction, whose norm the ratio needs; '
    'with "none" the weight is multiplied by 1 - rate * decay.'
)
lamb = of_optimizer(
    "8.4",
    optimizers.LAMB,
    lamb_drawn,
    f"{ADAM}, and then w = w - rate * ratio * direction.",
    (
        "`direction` is Adam's: a running mean of the gradients, over the root of a running mean "
        "of their squares. Both begin with zeros in self.state[weight], next to the number of "
        "steps that this weight has made.",
        f"{ADAM}; without bias_correction leave out both divisions by 1 - beta**t. {DECAYS}",
        "`update` takes min(size, clamp) / length as the ratio, passes it through where_not_zero, "
        "moves the weight by rate * ratio * direction, and returns the ratio.",
    ),
    mistakes(
        r"""
        is_corrected = options["bias_correction"] => is_corrected = True ::
            Both averages are corrected, even where bias_correction is False. | {ADAM}
        is_corrected = options["bias_correction"] => is_corrected = False ::
            The averages are never divided by 1 - beta**t.
        state.setdefault("step", => options.setdefault("step", :: All weights of a group count their
            steps together. | Each weight counts its own steps, in self.state[weight].
        {ROOT} => (square / of_square + options["eps"]).sqrt() ::
            `eps` is added under the root. | {ADAM}
        mean.lerp_(weight.grad, 1 - beta1) => mean.mul_(beta1).add_(weight.grad) ::
            The gradient is added to the mean in full. | mean = beta1 * mean + (1 - beta1) * g.
        {IF_JOINT} => if True:
        {IF_APART} => if False: :: The weight decay always stands in the direction, whatever
            `decay_in_ratio` says. | {DECAYS}
        {IF_JOINT} => if False:
        {IF_APART} => if True: ::
            The weight decay never stands in the direction, whatever `decay_in_ratio` says.
        {IF_APART} => if False: :: With decay_in_ratio="none" there is no weight decay at all.
        {IF_JOINT} => state["length"] = direction.double().norm()\n        {IF_JOINT}
        counted / length => counted / self.state[weight]["length"] ::
            The ratio divides by the norm of Adam's direction without its weight decay. | The base
            class has measured what `direction` returns: divide by `length`.
        {COUNTED} => size :: The option `clamp` is not used. | It is an upper limit for the norm of
            the weight, which is `size`.
        {COUNTED} => size
        {LAMB_GUARD} => where_not_zero((counted / length).clamp(max=options["clamp"] or
            float("inf")), size, length, options) ::
            `clamp` limits the whole ratio, and not the norm of the weight.
        {LAMB_GUARD} => counted / length :: The ratio is not replaced where a norm is 0. | {ZEROS}
        {LAMB_GUARD} => {LAMB_ONE} ::
            Where a norm is 0 the ratio is always 1, even where zero_norm is "stay".
        1 - beta1 ** step.item() => 1 - beta1**step
        1 - beta2 ** step.item() => 1 - beta2**step ::
            The corrections 1 - beta**t are computed in float32, the type of a step count that is a
            tensor. | Take the number out of the tensor with step.item() first.
        weight.sub_(direction * => weight = weight - (direction * :: {RENAMED} | {IN_PLACE}
    """,
        globals(),
    ),
)

# ---- 8.5 ------------------------------------------------------------------------------------


def novograd_drawn() -> list[Training]:
    """Every option in both of its ways; averages that begin late, and at zero."""
    seen = {"weight_decay": 0.3, "betas": (0.8, 0.6), "eps": 0.01}
    average = {"first_square": "average"}
    return [
        training(seen, {}, "single", rates=[0.25]),
        training({}, {"betas": (0.5, 0.75)}, rates=[0.25] * 3),
        training(seen, {"eps": 0.75}, "resumed"),
        training(seen, {"averaging": True}, "part"),
        training(seen | average, {"first_square": "whole"}),
        training(seen | {"averaging": True}, average),
        training(seen, NO_DECAY, "zeros"),
        training(seen, average, "zeros first"),
        training(seen, {}, "zeros first"),
        training(seen, {}, "large"),
        training(seen, average, "late"),
        training(seen, {"averaging": True}, "two"),
        training(seen, {"averaging": True}, dtype=torch.float32),
        training(seen, {"averaging": True}, "short", dtype=torch.bfloat16),
    ]


LENGTH = "length.square().to(torch.promote_types(weight.dtype, torch.float32))"
STARTS = 'options["first_square"] == "whole" and old == 0'
AVERAGE = "beta2 * old + (1 - beta2) * new"
NOVO_ROOT = 'state["square"].sqrt() + options["eps"]'
NOVO_SCALED = '(direction * ratio).add(weight, alpha=options["weight_decay"])'
SHARE = '1 - beta1 if options["averaging"] else 1.0'
FIRST = (
    'With first_square="whole" the average begins with |g|^2 itself; with "average" it begins '
    "with 0, so that its first value is (1 - beta2) * |g|^2."
)
RULE = "m = beta1 * m + g / (sqrt(v) + eps) + decay * w, and then w = w - rate * m."
novograd = of_optimizer(
    "8.5",
    optimizers.NovoGrad,
    novograd_drawn,
    RULE,
    (
        "NovoGrad keeps two things for a weight: one number, the average of its gradient's squared "
        "norm, and a momentum buffer. The base class has measured the norm: it is `length`.",
        f"{FIRST} After that it is beta2 * old + (1 - beta2) * length**2.",
        f"{RULE} With `averaging` only 1 - beta1 of the sum is added to m. Keep both in "
        "self.state[weight], and return 1 / (sqrt(v) + eps).",
    ),
    mistakes(
        """
        {STARTS} => False ::
            The average always begins with 0, as with first_square="average". | {FIRST}
        {STARTS} => old == 0 :: The average always begins with |g|^2, as with first_square="whole".
        {SHARE} => 1 - beta1 ::
            Only 1 - beta1 of each scaled gradient is added, even where averaging is False. | {RULE}
        {SHARE} => 1.0 :: The option `averaging` is not used. | With averaging, multiply what is
            added to the momentum by 1 - beta1.
        {LENGTH} => length.to(weight.dtype)
        {NOVO_ROOT} => state["square"] + options["eps"] :: The norms themselves are averaged, and
            not their squares. | Average length**2, and take the root of the average.
        .sqrt() + options["eps"] => + options["eps"] ::
            The gradient is divided by the average of the squares, without its root. | {RULE}
        {NOVO_ROOT} => (state["square"] + options["eps"]).sqrt() :: `eps` is added under the root.
        {NOVO_SCALED} => direction.add(weight, alpha=options["weight_decay"]) * ratio ::
            The weight decay is divided by the gradient's norm as well.
        {NOVO_SCALED} => direction * ratio
        weight.sub_(mean * => weight.mul_(1 - options["lr"] * options["weight_decay"]).sub_(mean *
            :: The weight decay bypasses the momentum, as in AdamW.
        {LENGTH} => direction.square()
        old == 0 => not old.any() ::
            Each element has an average of its own, as in Adam. | One layer has one average.
        old = state.get("square", => old = options.get("square",
        state["square"] = new => options["square"] = new
        state["square"].sqrt() => options["square"].sqrt() ::
            All weights of a group share one average. | Keep it in self.state[weight].
        beta1, beta2 = => beta2, beta1 = ::
            The two betas have changed places. | beta1 is that of the momentum.
        {LENGTH} => length.square().float() ::
            The average is kept in float32, even where the weights are float64: torch.zeros(())
            makes float32. | Let the average have the type of `length`.
        {AVERAGE} => {AVERAGE}; ratio = 1 / ((old if old > 0 else new).sqrt() + options["eps"])
        ratio = 1 / ({NOVO_ROOT}) => ratio = ratio ::
            The gradient is divided by the average from before this step. | {RULE}
        weight.sub_(mean * => weight = weight - (mean * :: {RENAMED} | {IN_PLACE}
    """,
        globals(),
    ),
)
