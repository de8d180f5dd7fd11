"""Batches: how they are dealt out, descent with them, how far they scatter, and momentum."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from manyhands.checks.engine import cases
from manyhands.checks.engine.spec import Spec
from manyhands.checks.engine.values import Malformed, kind, number, same, show
from manyhands.checks.gradient_descent.line import close, decimals, far, point
from manyhands.gradient_descent import descent


def generator(seed: int) -> Generator:
    """A generator of its own for each call."""
    return Generator().manual_seed(seed)


# ---- 1.4 ------------------------------------------------------------------------------------


class Deal(NamedTuple):
    """A call of `mini_batches`; the seed is its generator's."""

    num_samples: int
    batch: int
    seed: int


EPOCHS = 12
EPOCHS_OF_FOUR = 300  # one of the six ways is missing in these once in 10^23 times


def deals() -> list[Deal]:
    """Sizes that divide and others, a batch of one, of all, of more than all; few and many."""
    sizes = [(1, 1), (5, 1), (4, 9), (6, 6), (12, 4), (random.choice([17, 20, 23]), 6), (131, 50)]
    return [*(Deal(*size, cases.draw_seed()) for size in sizes), Deal(4, 2, cases.draw_seed())]


def epoch_of(answer: Callable, case: Deal, numbers: Generator) -> list[list[int]]:
    """The batches of one epoch as lists; it is left where it does not end."""
    batches = answer(case.num_samples, case.batch, numbers)
    hint = "Hand out each batch by `yield`: torch.randperm(...) cut into pieces."
    if isinstance(batches, Tensor) or not hasattr(batches, "__iter__"):
        raise Malformed(kind(batches), "The exercise asks for one batch after another.", hint)
    found = []
    for part in itertools.islice(batches, case.num_samples + 5):
        wanted = "Each batch is a tensor of sample numbers, of shape (batch,) and type int64."
        if not isinstance(part, Tensor):
            raise Malformed(f"{kind(part)} as a batch", wanted, hint)
        if part.dim() != 1 or part.dtype is not torch.int64:
            said = f"a tensor of shape {tuple(part.shape)} and type {part.dtype} as a batch"
            raise Malformed(said, wanted, hint)
        found.append(part.tolist())
    return found


def deals_seen(answer: Callable, case: Deal) -> dict:
    """What holds for every right way to deal the samples out, over some epochs."""
    numbers = generator(case.seed)
    n = case.num_samples
    num_epochs = EPOCHS_OF_FOUR if (n, case.batch) == (4, 2) else EPOCHS
    epochs = [epoch_of(answer, case, numbers) for _ in range(num_epochs)]
    drawn = [Counter(itertools.chain(*epoch)) for epoch in epochs]
    seen = {
        "the sizes of the batches": [len(part) for part in epochs[0]],
        "all sample numbers are from 0 to num_samples - 1": all(
            set(counts) <= set(range(n)) for counts in drawn
        ),
        "no sample comes twice in an epoch": all(max(c.values(), default=0) < 2 for c in drawn),
        "every sample comes in every epoch": all(set(range(n)) <= set(c) for c in drawn),
        "the sizes are the same in every epoch": all(
            [*map(len, epoch)] == [*map(len, epochs[0])] for epoch in epochs
        ),
    }
    if n > 10:
        again = epoch_of(answer, case, generator(case.seed))
        other = epoch_of(answer, case, generator(case.seed + 1))
        seen["generators of the same seed give the same batches"] = again == epochs[0]
        seen["generators of two seeds give different batches"] = other != epochs[0]
        in_order = [*itertools.chain(*epochs[0])] == list(range(n))
        seen["the samples do not come in the order of their numbers"] = not in_order
        seen["the next epoch has other batches"] = epochs[1] != epochs[0]
    if num_epochs == EPOCHS_OF_FOUR:
        firsts = Counter(tuple(sorted(epoch[0])) for epoch in epochs if epoch)
        often = [pair for pair, times in firsts.items() if times >= num_epochs // 20]
        seen["pairs of samples, of the six there are, that come first in 300 epochs"] = len(often)
    return seen


def facts_of_a_deal(found: dict, wanted: dict, case: Deal) -> str:
    """What can be seen of the sizes."""
    sizes = found["the sizes of the batches"]
    if len(sizes) == case.num_samples + 5:
        return "An epoch has not ended after more batches than there are samples."
    if 0 in sizes:
        return "A batch is empty."
    return ""


def in_pieces(num_samples: int, batch: int, numbers: Generator) -> Iterator[Tensor]:
    """Shuffled batches of samples that are in order."""
    pieces = torch.arange(num_samples).split(batch)
    yield from (pieces[index] for index in torch.randperm(len(pieces), generator=numbers))


def within(num_samples: int, batch: int, numbers: Generator) -> Iterator[Tensor]:
    """Batches that follow one another, each shuffled."""
    for part in torch.arange(num_samples).split(batch):
        yield part[torch.randperm(len(part), generator=numbers)]


def windows(num_samples: int, batch: int, numbers: Generator) -> Iterator[Tensor]:
    """A batch from each place on."""
    order = torch.randperm(num_samples, generator=numbers)
    yield from (order[first : first + batch] for first in range(num_samples))


def new_orders(num_samples: int, batch: int, numbers: Generator) -> Iterator[Tensor]:
    """A new order for each batch."""
    for first in range(0, num_samples, batch):
        yield torch.randperm(num_samples, generator=numbers)[first : first + batch]


ORDER = "torch.randperm(num_samples, generator=generator)"
ONE_ORDER = f"Make one order for the whole epoch, {ORDER}, and cut it into pieces."
mini_batches = Spec(
    todo="1.4",
    truth=descent.mini_batches,
    cases=deals,
    observe=deals_seen,
    tell=lambda case: f"mini_batches({case.num_samples}, {case.batch}, generator)",
    facts=facts_of_a_deal,
    advice={"": ONE_ORDER},
    reasons="""
        randperm() received ::
            torch.randperm takes the generator by its name. | Write generator=generator.
    """,
    hints=(
        f"{ORDER} gives all sample numbers in a random order.",
        "Then cut the order: elements 0 to batch - 1, batch to 2 * batch - 1, and so on. A slice "
        "may go beyond the end.",
        "order.split(batch) gives the pieces, and `yield from` hands them out one by one.",
    ),
    mistakes="""
        {ORDER} => torch.randint(num_samples, (num_samples,), generator=generator) ::
            The samples are drawn with replacement. | {ONE_ORDER}
        {ORDER} => torch.arange(num_samples) :: The order is not random.
        {ORDER} => {ORDER}[: num_samples // batch * batch] ::
            The last, smaller batch is dropped. | Every sample comes once in an epoch.
        {ORDER} => {ORDER}.repeat(2)[: -(-num_samples // batch) * batch] ::
            The last batch is filled up with samples of others. | It may be smaller.
        {ORDER}.split(batch) => 2 * {ORDER}.split(batch) ::
            The batches are handed out twice. | One call is one epoch.
        generator=generator => generator=torch.Generator().manual_seed(0) :: The random numbers
            begin anew in each call, always from one seed. | Use `generator` as it is given.
        generator=generator => generator=torch.Generator().manual_seed(generator.initial_seed()) ::
            The random numbers begin anew in each call, with the seed of `generator`.
        , generator=generator => :: The order does not follow from `generator`. | {ONE_ORDER}
        {ORDER} => ({ORDER} + 1) :: The samples are numbered from 1. | The first sample is number 0.
        .split(batch) => .chunk(batch) ::
            `batch` is used as the number of batches. | It is the size of a batch.
        instead in_pieces :: The batches are shuffled, and not the samples. | {ONE_ORDER}
        instead within :: Each batch is only shuffled within itself.
        instead windows :: The next batch begins one number later, so batches overlap. |
        instead new_orders :: Each batch is cut from a new order. | {ONE_ORDER}
    """,
    module=globals(),
)

# ---- 1.5 ------------------------------------------------------------------------------------


class Batched(NamedTuple):
    """A call of `descend_in_batches`, without its step; the seed is its generator's."""

    start: Tensor
    x: Tensor
    y: Tensor
    batch: int
    num_steps: int
    seed: int


def batched() -> list[Batched]:
    """No step, less than an epoch, all samples, more than all, single samples, some epochs."""
    sizes = [(6, 2, 0), (7, 3, 2), (4, 4, 3), (3, 5, 4), (5, 1, 17), (7, 3, 13)]
    found = []
    for size, batch, num_steps in sizes:
        draw = cases.generator(cases.draw_seed())
        x, y = torch.randn(2, size, generator=draw)
        found.append(Batched(far(), x, y + 1, batch, num_steps, cases.draw_seed()))
    return found


class Recorder:
    """A step that writes down what it is given. It is not gradient descent: it has to be called."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, parameters: Tensor, slope: Tensor) -> Tensor:
        """Return new parameters, on a way of their own."""
        if len(self.calls) >= self.limit:
            raise RuntimeError(f"step was called more than {self.limit} times")
        new = 0.7 * parameters.detach() - 0.1 * slope.detach() + 0.3
        self.calls.append((parameters.detach().double(), slope.detach().double(), new.double()))
        return new


class Batches:
    """All batches that there can be, and which of them a gradient belongs to."""

    def __init__(self, case: Batched) -> None:
        self.case = case
        n = len(case.x)
        sizes = range(1, min(case.batch, n) + 1)
        drawn = [*itertools.chain(*(_multisets(n, k) for k in sizes)), tuple(range(n))]
        # The batch (2, 2) has the gradient of the batch (2,): only the shortest of such stays.
        self.all = [batch for batch in drawn if math.gcd(*Counter(batch).values()) == 1]
        counts = [[batch.count(sample) for sample in range(n)] for batch in self.all]
        self.counts = torch.tensor(counts, dtype=torch.float64)

    def behind(self, slope: Tensor, parameters: Tensor, summed: bool = False) -> tuple | None:
        """The batch whose gradient at these parameters this is, if there is one."""
        x, y = self.case.x.double(), self.case.y.double()
        error = parameters[0] * x + parameters[1] - y
        slopes = self.counts @ torch.stack([2 * error * x, 2 * error], dim=1)
        if not summed:
            slopes /= self.counts.sum(1, keepdim=True)
        distances = (slopes - slope).norm(dim=1)
        best = distances.argmin().item()
        scale = 0.1 + slopes[best].norm().item()
        return self.all[best] if distances[best] < 1e-4 * scale else None


def _multisets(n: int, size: int) -> Iterator[tuple]:
    return itertools.combinations_with_replacement(range(n), size)


def steps_seen(answer: Callable, case: Batched) -> dict:
    """What holds for every right way: steps, what they were given, and batches over epochs."""
    step = Recorder(6 * case.num_steps + 20)
    path = decimals(answer(*case[:5], step, generator(case.seed)))
    start = case.start.double()
    points = torch.stack([start, *(new for *_, new in step.calls)])
    calls = [(parameters.double(), slope) for parameters, slope, _ in step.calls]
    seen = {
        "the number of calls of step": len(calls),
        "the shape of the path": list(path.shape),
        "the path holds the start and what step has returned": same(path, points.float(), 1e-5),
        "step is given the newest parameters": all(
            same(given, here, 1e-5) for (given, _), here in zip(calls, points, strict=False)
        ),
    }
    batches = Batches(case)
    chosen = [batches.behind(slope, here) for (_, slope), here in zip(calls, points, strict=False)]
    n = len(case.x)
    per_epoch = math.ceil(n / case.batch)
    epochs = [chosen[at : at + per_epoch] for at in range(0, len(chosen), per_epoch)]
    all_known = None not in chosen
    sizes = [len(batch or ()) for batch in chosen]
    wanted = [case.batch] * (n // case.batch) + [n % case.batch] * (n % case.batch > 0)
    seen["step is given the gradient of a batch at the newest parameters"] = all_known
    seen["the batches have `batch` samples each, and the last of an epoch has the rest"] = all(
        size == wanted[index % per_epoch] for index, size in enumerate(sizes)
    )
    counts = [Counter(itertools.chain(*(batch or () for batch in epoch))) for epoch in epochs]
    whole = [c for c, epoch in zip(counts, epochs, strict=True) if len(epoch) == per_epoch]
    once = all(max(c.values(), default=0) == 1 for c in counts) and all(len(c) == n for c in whole)
    seen["in an epoch every sample comes once"] = once
    if case.num_steps > 10:
        seen["every epoch has an order of its own"] = epochs[0] != epochs[1] or epochs[1:2] == []
        paths = [
            decimals(answer(*case[:5], Recorder(10**4), generator(case.seed + more)))
            for more in (0, 1)
        ]
        seen["generators of the same seed give the same path"] = same(path, paths[0])
        seen["generators of two seeds give different paths"] = not same(path, paths[1])
    seen["besides"] = {
        "at the start": bool(calls) and all(batches.behind(slope, start) for _, slope in calls),
        "summed": all(batches.behind(slope, here, True) for here, slope in calls),
        "all samples": bool(chosen) and all(len(batch or ()) == n for batch in chosen),
        "single samples": all(size == 1 for size in sizes),
    }
    return seen


def facts_of_steps(found: dict, wanted: dict, case: Batched) -> str:
    """What can be seen of the path's shape."""
    if found["the shape of the path"] == [2] and case.num_steps:
        return "The result is a single point, and the exercise asks for the whole path."
    return ""


BATCHES = "mini_batches(len(x), batch, generator)"
SLOPE = "gradient(path[-1], x[chosen], y[chosen])"
INNER = "            if len(path) <= num_steps:"
NEW_EPOCH = f"For each epoch, call {BATCHES} once."
FILL = f"while True: yield from {BATCHES}"
descend_in_batches = Spec(
    todo="1.5",
    truth=descent.descend_in_batches,
    cases=batched,
    observe=steps_seen,
    tell=lambda case: (
        f"descend_in_batches(start={point(case.start)}, {len(case.x)} samples, "
        f"batch={case.batch}, num_steps={case.num_steps})"
    ),
    facts=facts_of_steps,
    advice={"": "Each step is path.append(step(path[-1], gradient of the batch at path[-1]))."},
    reasons="""
        step was called more :: num_steps counts steps, and there were many more. | End both loops
            once there are num_steps steps.
        StopIteration :: The batches of an epoch are used up. | Then a new epoch begins. {NEW_EPOCH}
    """,
    hints=(
        f"There are two loops: the outer one goes over epochs, and the inner one over {BATCHES}.",
        f"The inner loop computes {SLOPE}, hands path[-1] and this gradient to step, and appends "
        "what step returns.",
        "`while len(path) <= num_steps` is the outer loop. In the inner one the same condition "
        "ends an epoch early.",
    ),
    mistakes=r"""
        {INNER} =>             if True:
        while len(path) <= num_steps: => for _ in range(num_steps): ::
            num_steps is used as the number of epochs. | Look at len(path) in both loops.
        while len(path) <= num_steps: => if len(path) <= num_steps: ::
            The descent ends after one epoch. | A new epoch follows the last.
        {INNER} =>             if True: ::
            The last epoch runs to its end. | Leave the inner loop after num_steps steps.
        {SLOPE})) => {SLOPE}))\n                break ::
            Every batch is the first one of a new order. | {NEW_EPOCH}
        {BATCHES} => [torch.randint(len(x), (batch,), generator=generator)] ::
            The samples of a batch are drawn with replacement.
        in {BATCHES} => in batches
        path = [start] => path = [start]\n    batches = list({BATCHES}) ::
            All epochs take the same batches.
        {BATCHES} => mini_batches(batch, len(x), generator) ::
            `batch` and the number of samples have changed places.
        {BATCHES} => torch.randperm(len(x), generator=generator)[: len(x) // batch *
            batch].split(batch) if len(x) >= batch else {BATCHES} ::
            The last, smaller batch of an epoch is dropped.
        {SLOPE} => gradient(start, x[chosen], y[chosen]) ::
            The gradient is taken at the start. | Take it at path[-1].
        step(path[-1] => step(start :: Every step begins at the start. | Call step(path[-1], slope).
        {SLOPE} => gradient(path[-1], x, y) ::
            Each step uses the gradient of all samples. | Use x[chosen] and y[chosen].
        {SLOPE} => len(chosen) * {SLOPE} ::
            The gradient of a batch is a sum over its samples. | It is a mean: call gradient(...).
        step(path[-1], {SLOPE}) => path[-1] - 0.1 * {SLOPE} ::
            `step` is never called. | What step(path[-1], slope) returns is the next point.
        step(path[-1], {SLOPE}) => step({SLOPE}, path[-1]) ::
            The two arguments of step have changed places. | step(parameters, gradient).
    """,
    module=globals(),
)

# ---- 1.6 ------------------------------------------------------------------------------------


class Spread(NamedTuple):
    """A call of `gradient_variance`; the seed is that of the first generator."""

    parameters: Tensor
    x: Tensor
    y: Tensor
    batch: int
    repeats: int
    seed: int


CALLS = {1: 60, 2: 120}  # by repeats; that a value is in none of these comes once in 10^6 times


def spreads() -> list[Spread]:
    """Few samples and repeats, for which each draw gives a value of its own."""
    sizes = [(3, 1, 1), (2, 2, 1), (2, 3, 1), (3, 1, 2)]
    found = []
    for size, batch, repeats in sizes:
        x = torch.tensor([0.5, 0.8, 1.25])[:size]
        error = torch.tensor([-2.25, 0.25, 3.5])[:size] + torch.randint(0, 9, (size,)) / 64
        parameters = torch.tensor([random.randint(80, 120) / 8, random.randint(30, 50) / 8])
        y = parameters[0] * x + parameters[1] - error
        found.append(Spread(parameters, x, y, batch, repeats, cases.draw_seed()))
    return found


def distinct(found: list[float]) -> list[float]:
    """Each value once, in order; those that differ by rounding only are one."""
    kept: list[float] = []
    for value in sorted(found, key=lambda one: (math.isnan(one), one)):
        if not kept or not math.isclose(value, kept[-1], rel_tol=3e-4, abs_tol=1e-5):
            if not (math.isnan(value) and math.isnan(kept[-1] if kept else 0.0)):
                kept.append(value)
    return kept


def variances_seen(answer: Callable, case: Spread) -> dict:
    """All values that come out for many seeds; and is it the same for the same seed?"""
    found = [
        float(number(answer(*case[:5], generator(case.seed + index))))
        for index in range(CALLS[case.repeats])
    ]
    again = float(number(answer(*case[:5], generator(case.seed))))
    return {
        "the values": torch.tensor(distinct(found)),
        "the same seed gives the same value": same(again, found[0]),
    }


def spread_of_repeats(case: Spread) -> Tensor:
    """What the variance between the repeats can be, which for many of them is the same."""
    each = torch.stack(
        [descent.gradient(case.parameters, case.x[[k]], case.y[[k]]) for k in range(len(case.x))]
    )
    drawn = itertools.product(range(len(each)), repeat=case.batch * case.repeats)
    slopes = each[torch.tensor(list(drawn))].unflatten(1, (case.repeats, case.batch)).mean(2)
    return torch.tensor(distinct(slopes.var(dim=1).sum(-1).tolist()))


def is_right_spread(found: dict, wanted: dict, case: Spread) -> bool:
    """The distance from the gradient of all samples, or the unbiased variance of the repeats."""
    if same(found, wanted, 1e-3):
        return True
    if case.repeats == 1 and found["the values"].isnan().all():
        return True
    other = {**wanted, "the values": spread_of_repeats(case)}
    return case.repeats > 1 and same(found, other, 1e-3)


def say_values(found: dict, wanted: dict) -> str:
    """The values that come out and those that there are."""
    name, statement = wanted
    if found[statement] is not True:
        return f"gives two values for two generators of the same seed, as {show(found[name][:2])}"
    values, others = (point(part[name][:8]) for part in (found, wanted))
    if values == others:
        return f"gives {len(found[name])} different values, not {len(wanted[name])}"
    return f"gives the values {values} for many seeds, and draws of samples give {others}"


def facts_of_values(found: dict, wanted: dict, case: Spread) -> str:
    """What can be seen of the number of values."""
    if len(found["the values"]) == 1 and len(wanted["the values"]) > 1:
        return "The value does not depend on the seed of the generator."
    return ""


def mean_first(
    parameters: Tensor, x: Tensor, y: Tensor, batch: int, repeats: int, generator: Generator
) -> float:
    """The repeats are averaged, and then squared."""
    whole = descent.gradient(parameters, x, y)
    slopes = []
    for _ in range(repeats):
        chosen = torch.randint(len(x), (batch,), generator=generator)
        slopes.append(descent.gradient(parameters, x[chosen], y[chosen]) - whole)
    return torch.stack(slopes).mean(0).square().sum().item()


DRAW = "torch.randint(len(x), (batch,), generator=generator)"
LENGTH = ".square().sum()"
gradient_variance = Spec(
    todo="1.6",
    truth=descent.gradient_variance,
    cases=spreads,
    observe=variances_seen,
    same=is_right_spread,
    say=say_values,
    facts=facts_of_values,
    tell=lambda case: (
        f"gradient_variance({len(case.x)} samples, batch={case.batch}, repeats={case.repeats})"
    ),
    advice={"": "It is the mean over the repeats of (batch gradient - whole).square().sum()."},
    reasons="""
        randint() received ::
            torch.randint takes the size as a tuple, also where it is one number. | Write {DRAW}.
    """,
    hints=(
        f"A batch with replacement is {DRAW}.",
        "The gradient of the batch minus that of all samples is a vector. Its squared length is "
        "the sum of the squares of both parts.",
        "Collect this squared length for each repeat, and return the mean of them as a float.",
    ),
    mistakes="""
        - whole) => ) :: The squared length is that of the batch's gradient itself. | Subtract the
            gradient of all samples first.
        .mean().item() => .mean().sqrt().item() ::
            This is the standard deviation, the root of the variance. | Take no root.
        {LENGTH} => .norm() :: The length of the difference is not squared. | The squared length is
            the sum of the squares of both parts.
        {LENGTH} => .square().mean() :: The two parts are averaged.
        {LENGTH} => .sum().square() :: The two parts are added and then squared.
        {LENGTH} => .abs().sum() :: The absolute values of both parts are added.
        {LENGTH} => .square()[0] :: Only the part of w counts.
        {LENGTH} => .square()[1] :: Only the part of b counts.
        .mean().item() => .sum().item() ::
            This is the sum over the repeats. | Take the mean of the squared distances.
        .mean().item() => .mean().item() / batch ::
            This is divided by the batch size once more. | The gradient is a mean already.
        {DRAW} => torch.randperm(len(x), generator=generator)[:batch] ::
            The samples of a batch are drawn without replacement. | Use {DRAW}.
        (batch,) => (1,) :: Every batch has one sample, whatever `batch` is.
        generator=generator => generator=generator.manual_seed(1) ::
            The generator is seeded anew before each batch.
        , y[chosen] => , y[torch.randint(len(x), (batch,), generator=generator)] ::
            x and y come from different samples. | Draw once, and use x[chosen] and y[chosen].
        instead mean_first :: The repeats are averaged before they are squared. | The mean over the
            repeats comes last.
    """,
    module=globals(),
)

# ---- 1.7 ------------------------------------------------------------------------------------


class Walk(NamedTuple):
    """One walk with steps of a Momentum, or two that take turns, or a second one after a first."""

    rate: float
    momentum: float
    steppers: int
    one_after_the_other: bool
    seed: int


def walks() -> list[Walk]:
    """One stepper; two in turn; a second one after the first has ended; without momentum."""
    rate = random.randint(3, 20) / 64
    momentum = random.randint(38, 58) / 64
    return [
        Walk(rate, momentum, 1, False, cases.draw_seed()),
        Walk(rate, 0.0, 1, False, cases.draw_seed()),
        Walk(rate, momentum, 2, False, cases.draw_seed()),
        Walk(rate, momentum, 2, True, cases.draw_seed()),
    ]


def walks_seen(answer: Callable, case: Walk) -> dict:
    """The point after each call; and are the given tensors as they were?"""
    draw = cases.generator(case.seed)
    turns = [turn % case.steppers for turn in range(6 * case.steppers)]
    turns = sorted(turns) if case.one_after_the_other else turns
    steppers: dict[int, Callable] = {}
    if not case.one_after_the_other:
        steppers = {number: answer(case.rate, case.momentum) for number in range(case.steppers)}
    here = list(cases.values((case.steppers, 2), draw))
    seen = {}
    all_given = {"parameters": [], "numbers of the gradient": []}
    for index, turn in enumerate(turns, 1):
        slope = cases.values(2, draw)
        given = here[turn], slope.clone()  # the parameters are what the last call has returned
        all_given["parameters"].append((given[0], given[0].clone()))
        all_given["numbers of the gradient"].append((given[1], slope))
        if turn not in steppers:
            steppers[turn] = answer(case.rate, case.momentum)
        new = steppers[turn](*given)
        seen[f"call {index}"] = decimals(new)
        if seen[f"call {index}"].shape != (2,):
            said = f"a tensor of shape {tuple(new.shape)}"
            raise Malformed(said, "The new parameters are a tensor of shape (2,).")
        here[turn] = new
    unchanged = {
        f"the {name} that it is given stay as they were": all(torch.equal(*pair) for pair in pairs)
        for name, pairs in all_given.items()
    }
    return {**unchanged, **seen}


def tell_walk(case: Walk) -> str:
    """The class with its arguments, and how many take turns."""
    made = f"Momentum(rate={case.rate:.3g}, momentum={case.momentum:.3g})"
    if case.steppers == 1:
        return made
    how = "one after the other" if case.one_after_the_other else "in turn"
    return f"two of {made}, used {how},"


def say_walk(found: dict, wanted: dict) -> str:
    """The first call that differs."""
    for name, value in wanted.items():
        if name not in found or not close(found[name], value, None):
            if value is True:
                return f"breaks this rule: {name}"
            return f"gives {point(found[name])} in {name}, not {point(value)}"
    return "gives another number of points"


NEW = "self.momentum * self.velocity + slope"
RULE = "velocity = momentum * velocity + gradient, and then parameters - rate * velocity."
KEEP = "self.rate, self.momentum, self.velocity = rate, momentum, 0.0"
momentum = Spec(
    todo="1.7",
    truth=descent.Momentum,
    limit_s=15.0,  # an answer may import torch.optim
    cases=walks,
    observe=walks_seen,
    same=close,
    tell=tell_walk,
    say=say_walk,
    advice={
        "the numbers of the gradient that it is given stay as they were": (
            "velocity = gradient is another name for the same tensor: a = a + b makes a new tensor "
            "in place of it, and a += b changes it."
        ),
        "": RULE,
    },
    reasons="""
        object is not callable :: Momentum(rate, momentum) makes an object, and calling that with
            parameters and a gradient makes a step; what was called here cannot be called. | Hand
            over the class itself, and write its __call__(self, parameters, slope).
        takes no arguments :: Momentum(rate, momentum) makes an object, so the class needs an
            __init__ with both. | Write __init__(self, rate, momentum).
    """,
    hints=(
        "__init__ keeps the rate, the momentum and a velocity of 0 in self.",
        "__call__ first makes the new velocity from the old one and the gradient, and then the new "
        "parameters from the new velocity.",
        f"self.velocity = {NEW}; return parameters - self.rate * self.velocity. Write no += and no "
        "-=, which would change what was given.",
    ),
    mistakes="""
        {NEW} => slope :: This is plain gradient descent: earlier gradients do not count. | {RULE}
        parameters - self.rate => parameters + self.rate :: The step goes up.
        self.velocity = {NEW} => old = self.velocity; self.velocity = {NEW}
        self.rate * self.velocity => self.rate * old ::
            The step uses the velocity from before this gradient. | Make the new velocity first.
        self.rate * self.velocity => self.velocity ::
            The step is the velocity itself, without the rate. | Subtract rate * velocity.
        self.rate * self.velocity => self.rate * (slope + self.momentum * self.velocity) ::
            This is Nesterov's momentum. | {RULE}
        {NEW} => self.momentum * self.velocity + (1 - self.momentum) * slope ::
            The velocity is a running mean, with 1 - momentum before the gradient.
        {NEW} => (1 - self.momentum) * self.velocity + self.momentum * slope ::
            The old velocity counts 1 - momentum, and the gradient counts momentum.
        {NEW} => (1 - self.momentum) * self.velocity + slope ::
            The old velocity is multiplied by 1 - momentum.
        {NEW} => self.velocity + slope :: The old velocity counts in full, without momentum.
        {NEW} => self.velocity + self.momentum * slope ::
            The gradient is multiplied by momentum, and not the old velocity.
        {NEW} => self.momentum * (self.velocity + slope) ::
            Both the old velocity and the gradient are multiplied by momentum.
        {KEEP} => self.rate, self.momentum = rate, momentum; type(self).velocity = 0.0
        self.velocity = {NEW} => type(self).velocity = {NEW} ::
            All objects share one velocity. | Keep it in self, and make it in __init__.
        {KEEP} => self.rate, self.momentum = rate, momentum
        self.velocity = {NEW} => type(self).velocity = self.momentum * getattr(type(self),
            'velocity', 0.0) + slope ::
            All objects share one velocity, which a new object does not set to 0.
        parameters - self.rate * self.velocity => parameters.sub_(self.rate * self.velocity) ::
            The parameters are changed in place. | a = a - b makes a new tensor; a -= b does not.
    """,
    module=globals(),
)
