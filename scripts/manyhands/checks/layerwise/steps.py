"""What 8.2 to 8.5 have in common: an optimizer is stepped, and its weights are observed.

The cases differ in their options, and in what `kind` says of the weights and gradients.
"""

import copy
import random
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from manyhands.checks.engine import cases
from manyhands.checks.engine.mistakes import Mistake
from manyhands.checks.engine.spec import Spec
from manyhands.checks.engine.tables import reasons
from manyhands.checks.engine.values import difference, same

Weights = dict[str, nn.Parameter]

# Both matrices have one shape, (3, 4), so that nothing can be kept by the shape of a weight.
SHAPES = {"vector": (4,), "matrix": (3, 4), "transposed matrix": (4, 3), "block": (2, 3, 2)}
NUM_FIRST = 2  # of these are in the first group of parameters
WORDS = {
    "plain": "",
    "single": "one weight tensor",
    "large": "large weights",
    "zeros": "a vector of zeros and a transposed matrix whose second gradient is zero",
    "zeros first": "a vector of zeros and a transposed matrix whose first gradient is zero",
    "late": "a vector that has no gradient before step 3 and a block that has none in step 2",
    "two": "two optimizers that take turns",
    "short": "weights of several numbers in bfloat16",
    "part": "weights that are parts of larger ones, of which other ranks hold the rest",
    "resumed": "a new optimizer that loads the state_dict of the first one after step 2",
}
ABSENT = {("vector", 1), ("vector", 2), ("block", 2)}  # gradients, by step, where kind is "late"
AT_ZERO = {"zeros": 2, "zeros first": 1}  # the step in which a gradient is zero
RESUMED_AT = 3  # the first step of the new optimizer, where kind is "resumed"


class Training(NamedTuple):
    """Some steps of an optimizer. Its second group has half the lr, and options of its own."""

    seed: int
    options: dict
    second: dict
    rates: list[float]  # the learning rate of each step
    kind: str = "plain"  # one of WORDS
    dtype: torch.dtype = torch.float64


def training(
    options: Mapping, second: Mapping, kind: str = "plain", *, lr: float = 0.3, **more: object
) -> Training:
    """A case with learning rates that vary from step to step, by default four of them."""
    rates = more.pop("rates", None) or [lr * random.randint(*of) / 8 for of in RANGES]
    return Training(cases.draw_seed(), dict(options), dict(second), rates, kind, **more)


RANGES = ((3, 4), (7, 8), (5, 6), (10, 12))  # of each step's learning rate, in eighths


def weights_of(case: Training, draw: Generator) -> Weights:
    """Weight tensors of which each has a norm of its own; one is not contiguous."""
    found = {}
    for index, (name, shape) in enumerate(SHAPES.items()):
        weight = torch.randn(shape, generator=draw, dtype=torch.float64) * 2.0 ** (2 * index - 2)
        weight *= 1e5 if case.kind == "large" else 1.0
        if case.kind in AT_ZERO and name == "vector":
            weight.zero_()
        weight = weight.to(case.dtype)
        found[name] = nn.Parameter(weight.t() if name.startswith("transposed") else weight)
    return {"vector": found["vector"]} if case.kind == "single" else found


def give_gradients(weights: Weights, case: Training, step: int, draw: Generator) -> None:
    """New gradients, in the memory of the old ones, as backward writes them after zero_grad."""
    for name, weight in weights.items():
        gradient = torch.randn(weight.shape, generator=draw, dtype=torch.float64) / 2
        if name.startswith("transposed") and AT_ZERO.get(case.kind) == step:
            gradient.zero_()
        if case.kind == "late" and (name, step) in ABSENT:
            weight.grad = None
        elif weight.grad is None:
            weight.grad = gradient.to(case.dtype)
        else:
            weight.grad.copy_(gradient)


def steps_seen(answer: Callable, case: Training) -> dict:
    """The weights after each step, what else must hold, and the last ratios, if they are kept."""
    draw = cases.generator(case.seed)
    runs: list[tuple[Weights, torch.optim.Optimizer]] = []
    for _ in range(2 if case.kind == "two" else 1):
        weights = weights_of(case, draw)
        params = list(weights.values())
        runs.append((weights, made(answer, params, case)))
    memory = places(runs)
    seen: dict = {}
    unchanged = True
    for step, rate in enumerate(case.rates, 1):
        after = seen[f"step {step}"] = {}
        if case.kind == "resumed" and step == RESUMED_AT:
            weights, first = runs[0]
            runs[0] = weights, made(answer, list(weights.values()), case)
            runs[0][1].load_state_dict(copy.deepcopy(first.state_dict()))
        for number, (weights, optimizer) in enumerate(runs):
            for index, options in enumerate(optimizer.param_groups):
                options["lr"] = rate / 2**index
            give_gradients(weights, case, step, draw)
            given = {name: copied(weight.grad) for name, weight in weights.items()}
            optimizer.step()
            for name, weight in weights.items():
                unchanged &= alike(weight.grad, given[name])
                after[name + number * " of the second optimizer"] = copied(weight)
    if case.dtype is torch.bfloat16:  # where the weights depend on the order of the operations
        return {"the weights": {}, LONG: all(is_long(optimizer) for _, optimizer in runs)}
    found = {
        PARTS if case.kind == "part" else "the weights": seen,
        "the gradients are unchanged": unchanged,
        "the weights are changed in place": memory == places(runs),
        "the state is as precise as the weights": all(is_precise(*run) for run in runs),
    }
    if case.kind == "part" and not hasattr(answer, "update"):
        del found[PARTS]  # without the course's base class an optimizer measures its own norms
    ratios = getattr(runs[-1][1], "ratios", None)
    return found | ({RATIOS: [exact(one, case) for one in ratios]} if ratios else {})


RATIOS = "the ratios of the last step"
PARTS = "the weights that are parts of larger ones"
LONG = "a number that is kept for a weight is float32 at least"


def is_long(optimizer: torch.optim.Optimizer) -> bool:
    """Are the single numbers in the state float32 or longer?"""
    kept = [one for state in optimizer.state.values() for one in state.values()]
    numbers = [one for one in kept if isinstance(one, Tensor) and one.numel() == 1]
    return all(one.itemsize >= 4 for one in numbers if one.is_floating_point())


def made(answer: Callable, params: list[nn.Parameter], case: Training) -> torch.optim.Optimizer:
    """The optimizer of a case, with both groups; the norms of a part are those of the whole."""
    groups = [{"params": params[:NUM_FIRST]}]
    groups += [{"params": params[NUM_FIRST:], **case.second}] if params[NUM_FIRST:] else []
    kind = part_of(answer) if case.kind == "part" and hasattr(answer, "update") else answer
    return kind(groups, lr=case.rates[0], **case.options)


def part_of(answer: type) -> type:
    """The optimizer where its weights are parts: the base class gives it the norms of the whole."""

    class OfParts(answer):
        def update(self, weight, direction, size, length, options):
            return super().update(weight, direction, 2 * size, 3 * length, options)

    return OfParts


def places(runs: list) -> list[int]:
    """Where in memory each weight begins."""
    return [weight.data_ptr() for weights, _ in runs for weight in weights.values()]


def copied(one: Tensor | None) -> Tensor | None:
    """A copy of a tensor, where there is one."""
    return None if one is None else one.detach().clone()


def alike(one: Tensor | None, other: Tensor | None) -> bool:
    """The same numbers, or none in both."""
    return one is other if one is None or other is None else torch.equal(one, other)


def exact(ratio: object, case: Training) -> object:
    """A ratio in the type of the weights; None stays None."""
    if isinstance(ratio, Tensor):
        return ratio.detach().to(case.dtype)
    return None if ratio is None else torch.tensor(float(ratio), dtype=case.dtype)


def is_precise(weights: Weights, optimizer: torch.optim.Optimizer) -> bool:
    """Has what is kept for a weight, element by element, at least the precision of the weight?"""
    for weight in weights.values():
        state = optimizer.state[weight] if weight in optimizer.state else {}
        kept = [one for one in state.values() if isinstance(one, Tensor)]
        for one in kept:
            if one.is_floating_point() and one.shape == weight.shape:
                if torch.promote_types(one.dtype, weight.dtype) is not one.dtype:
                    return False
    return True


def is_right(found: dict, wanted: dict, case: Training) -> bool:
    """The same; an answer that keeps no ratios, or has no `update`, is right as well."""
    may_lack = (RATIOS, PARTS)
    return same(
        found, {name: one for name, one in wanted.items() if name in found or name not in may_lack}
    )


def moved(shown: dict) -> dict:
    """The weights after each step."""
    return shown.get("the weights") or shown.get(PARTS, {})


def say(found: dict, wanted: dict) -> str:
    """The first weight that differs, or else the first other part."""
    for step, weights in moved(wanted).items() if moved(found) else ():
        for name, weight in weights.items():
            one = moved(found)[step][name]
            if not same(one, weight):
                return f"gives a wrong {name} after {step}: {difference(one, weight)}"
    for part, value in wanted.items():
        if value is True and found[part] is not True:
            return f"gives the right weights, but this does not hold: {part}"
    lists = [[bare(one) for one in part[RATIOS]] for part in (found, wanted)]
    return f"gives the right weights, but wrong ratios in the last step: {difference(*lists)}"


def bare(ratio: object) -> object:
    """A ratio as a number, if it is one."""
    return ratio.item() if isinstance(ratio, Tensor) and ratio.numel() == 1 else ratio


FLOAT32 = (
    "The numbers agree to about seven digits, which is the precision of float32: that is what "
    "torch.tensor(0.1), torch.zeros(()) and torch.where(condition, 0.1, 0.0) make."
)


ALL_KEPT = (
    "It goes wrong where a new optimizer goes on: the state_dict holds what stands in "
    "self.state[weight], and nothing else comes back."
)


def facts(found: dict, wanted: dict, case: Training) -> str:
    """What can be seen by looking at the weights."""
    right, wrong = moved(wanted), moved(found)
    ratios = found.get(RATIOS, [])
    pair = (wrong, ratios), (right, wanted[RATIOS] if ratios else [])
    if any(one is None for one in ratios):
        return "`update` has returned None."
    if case.dtype is torch.float64 and not same(*pair) and same(*pair, 1e-6):
        return FLOAT32
    if not wrong or same(wrong, right):
        return ""
    flat = [one for weights in wrong.values() for one in weights.values()]
    if not all(one.isfinite().all() for one in flat):
        return "The weights become nan or inf, as 0 / 0 and 1 / 0 do."
    begins = [f"step {step}" for step in range(1, RESUMED_AT)]
    if case.kind == "resumed" and all(same(wrong[step], right[step]) for step in begins):
        return ALL_KEPT
    if case.kind == "part":
        return "The base class measures the norms of whole weights: `size` and `length`."
    steps = list(right)
    first = wrong[steps[0]]
    if len(steps) > 1 and all(same(wrong[step], first) for step in steps):
        return "The weights are the same after every step."
    differ = {n for step in steps for n in right[step] if not same(wrong[step][n], right[step][n])}
    if len(right[steps[0]]) > 1 and len(differ) == 1:
        return f"Only the {differ.pop()} is wrong."
    if len(steps) > 1 and same(first, right[steps[0]]):
        return "The first step is right, and a later one is wrong."
    return ""


def tell(case: Training, name: str) -> str:
    """The call, how many steps there are, and what is special about the weights."""
    options = [f"{key}={value!r}" for key, value in case.options.items()]
    rates = " then ".join(f"{rate:.4g}" for rate in dict.fromkeys(case.rates))
    call = f"{name}({', '.join(['params', f'lr={rates}', *options])})"
    more = [WORDS[case.kind]] if WORDS[case.kind] else []
    if case.kind != "single":
        own = [f"{key}={value!r}" for key, value in case.second.items()]
        more.append(f"a second group with {', '.join(['half the lr', *own])}")
    steps = "step" if len(case.rates) == 1 else "steps"
    of = f" with {' and '.join(more)}" if more else ""
    kind = str(case.dtype).removeprefix("torch.")
    return f"{call} over {len(case.rates)} {steps} in {kind}{of}"


def of_optimizer(
    todo: str,
    truth: type,
    drawn: Callable[[], list[Training]],
    advice: str,
    hints: tuple[str, ...],
    listed: list[Mistake],
) -> Spec:
    """The spec of one of the four."""
    return Spec(
        todo=todo,
        truth=truth,
        cases=drawn,
        observe=steps_seen,
        same=is_right,
        tell=lambda case: tell(case, truth.__name__),
        say=say,
        facts=facts,
        independent=True,
        advice={
            "": advice,
            "the gradients are unchanged": "Use methods without a trailing underscore on the "
            "gradient: grad.add(...) makes a new tensor, and grad.add_(...) changes the gradient.",
            "the weights are changed in place": "Change the weight with sub_ or copy_, so that it "
            "stays in its memory, which other tensors may share.",
            "the state is as precise as the weights": "torch.zeros_like(weight) makes a tensor of "
            "the weight's shape and type.",
            RATIOS: "`update` returns the ratio that it has used.",
        },
        reasons=REASONS,
        hints=hints,
        mistakes=listed,
    )


REASONS = reasons(
    """
    requires grad is being used in an in-place :: Autograd does not let a weight be changed in place
        while it records. | Keep the base class's step, with its @torch.no_grad().
    'NoneType' object has no attribute 'double' :: `direction` returned None, and the norm of its
        result is needed next. | End `direction` with a return of the tensor.
    Boolean value of Tensor with more than one value :: An `if` was asked about a whole tensor,
        which has many answers. | Compare the norms `size` and `length`, which are single numbers.
    view size is not compatible :: A weight need not be contiguous, and then view() cannot flatten
        it. | Work on the weight in its own shape.
    KeyError :: In the first step self.state[weight] is still empty, and `options` has only the
        names that __init__ puts there. | self.state[weight].setdefault(name, value) stores a first
        value and returns it.
    has no attribute 'param_groups' ::
        The answer did not make an optimizer. | Hand over the class itself.
""",
    globals(),
)
