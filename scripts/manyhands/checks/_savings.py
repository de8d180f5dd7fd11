"""Checks of lesson 09, second part: training in less memory. memory.py takes them in.

What a model, a function or an optimizer meets is written down while the learner's code runs: which
activations autograd still keeps, which random numbers came, which gradients an optimizer saw. So
most verdicts name what was seen, and need not guess it from a wrong number.
"""

import contextlib
import random
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from manyhands.checks import Lesson, Wrong
from manyhands.checks.shared import Reasons, alone, number

part = Lesson("memory")


class Box:
    """One tensor that autograd keeps; it dies with what keeps it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


class Graphs:
    """Which calls have left something for backward that still lives."""

    def __init__(self) -> None:
        self.calls: list[weakref.WeakSet] = []

    def watch(self) -> saved_tensors_hooks:
        """Note, as a `with` block around one call, what autograd keeps of it."""
        boxes = weakref.WeakSet()
        self.calls.append(boxes)

        def pack(tensor: Tensor) -> Box:
            box = Box(tensor)
            boxes.add(box)
            return box

        return saved_tensors_hooks(pack, lambda box: box.tensor)

    def alive(self) -> list[int]:
        """The calls, by number, that autograd still keeps something of."""
        return [index for index, boxes in enumerate(self.calls) if len(boxes)]


def _close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(
        one.double(), other.double(), rtol=1e-4, atol=1e-6
    )


def _gap(one: Tensor, other: Tensor) -> str:
    if one.shape != other.shape:
        return f"has shape {tuple(one.shape)}, not {tuple(other.shape)}"
    return f"is off by up to {(one.double() - other.double()).abs().max():.2g}"


def _seed() -> int:
    return random.randrange(10**6)


# ---- 9.5 ------------------------------------------------------------------------------------


class Reader(nn.Module):
    """A model with a frozen layer that writes down what lives whenever it is called."""

    def __init__(self, draw: Generator) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(7, 5, generator=draw))
        self.frozen = nn.Parameter(torch.randn(5, 5, generator=draw), requires_grad=False)
        self.head = nn.Parameter(torch.randn(5, 7, generator=draw))
        self.graphs, self.went_back = Graphs(), set()
        self.alive: list[list[bool]] = []  # at each call: earlier graphs; has backward used them?
        self.trains: list[bool] = []

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.alive.append([call in self.went_back for call in self.graphs.alive()])
        inputs = inputs[:, -targets.shape[1] :]  # a prompt before them has no targets
        self.trains.append(self.training)
        with self.graphs.watch():
            logits = torch.tanh(self.tokens[inputs] @ self.frozen) @ self.head
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        call = len(self.trains) - 1
        if loss.requires_grad:
            loss.register_hook(lambda grad: self.went_back.add(call))
        return loss


class Pieces(NamedTuple):
    """Micro-batches of (sequences, targets) each; is there something in .grad before?"""

    seed: int
    shapes: list[tuple[int, int]]
    filled: bool
    prompt: int = 0  # tokens at the start of each sequence that have no target

    def draw(self) -> tuple[Reader, list[tuple[Tensor, Tensor]], list[Tensor]]:
        """The model, the micro-batches, and what stands in .grad before (zeros for nothing)."""
        draw = Generator().manual_seed(self.seed)
        model = Reader(draw)
        batches = [
            tuple(torch.randint(7, (rows, n), generator=draw) for n in (self.prompt + num, num))
            for rows, num in self.shapes
        ]
        before = [torch.randn(p.shape, generator=draw) * self.filled for p in _trainable(model)]
        return model, batches, before


class Accumulated(NamedTuple):
    """What an answer returned and left behind."""

    value: object
    wants_grad: bool
    gradients: list[Tensor | None]
    frozen_has_none: bool
    weights_moved: bool
    batches_changed: bool
    trains: list[bool]  # at each call of the model, and at the end
    alive: list[list[bool]]


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def _run_accumulate(answer, *case) -> Accumulated:
    pieces = Pieces(*case)
    model, batches, before = pieces.draw()
    if pieces.filled:
        for param, gradient in zip(_trainable(model), before, strict=True):
            param.grad = gradient.clone()
    params, weights = _trainable(model), [p.detach().clone() for p in model.parameters()]
    given = [part.clone() for batch in batches for part in batch]
    value = answer(model, batches)
    wants = isinstance(value, Tensor) and value.requires_grad
    now = [part for batch in batches for part in batch]
    return Accumulated(
        value.detach().clone() if isinstance(value, Tensor) else value,
        wants,
        [param.grad for param in params],
        model.frozen.grad is None,
        not all(map(torch.equal, weights, model.parameters())),
        len(now) != len(given) or not all(map(torch.equal, now, given)),
        [*model.trains, model.training],
        model.alive,
    )


TO_WEIGH = "loss * (targets.numel() / number of targets in all micro-batches)"
DROPS = (
    "zero_grad() drops what is in .grad; the caller may have put it there, and asked to add",
    "leave zero_grad() to the caller",
)
PER_TARGET = (
    "each target of the large batch counts the same, whichever micro-batch it is in",
    f"weigh each loss before backward: {TO_WEIGH}",
)


ONLY_LAST = (
    "zero_grad() in the loop, or backward() after it: only the last one's counts",
    "add in every micro-batch; no zero_grad() in here",
)
DIVIDED = (
    "what was in .grad before is divided, too",
    "weigh each loss before its backward(); .grad then needs no division",
)


def _weightings(case: Pieces) -> Iterator[tuple[list[float], float, str, str]]:
    """Wrong weights of the micro-batches, of what was in .grad, what they smell of, what to try."""
    rows, targets = [s for s, _ in case.shapes], [s * tokens for s, tokens in case.shapes]
    inputs = [n + s * case.prompt for n, s in zip(targets, rows, strict=True)]
    pieces, num_rows, num_targets = len(rows), sum(rows), sum(targets)
    right = [n / num_targets for n in targets]
    yield right, 0, *DROPS
    if pieces == 1:
        return
    for weight in (right[-1], 1, 1 / pieces):
        for kept in (0, 1):
            yield [0.0] * (pieces - 1) + [weight], kept, *ONLY_LAST
    for weights, smell, advice in (
        ([1 / pieces] * pieces, "the mean of the means: a small micro-batch counts more", TO_WEIGH),
        ([1] * pieces, "the sum of the means, of which each is the loss of a batch", TO_WEIGH),
        (
            [n / num_rows for n in rows],
            "weighed by the number of sequences, but they differ in length, and targets count",
            f"{TO_WEIGH}, not len(targets)",
        ),
        (
            [n / sum(inputs) for n in inputs],
            "weighed by the number of inputs, but here some inputs have no target",
            TO_WEIGH,
        ),
        (targets, "the sum of all targets' losses, not their mean", "divide by their number"),
        ([r * r for r in right], "a micro-batch's share counts twice", "weigh once"),
        ([1 / num_targets] * pieces, "a mean is divided once more, by all targets", TO_WEIGH),
    ):
        for kept in (1, 0):
            yield weights, kept, smell, advice
    for weights, by in (([1] * pieces, pieces), (targets, num_targets)):
        yield [weight / by for weight in weights], 1 / by, *DIVIDED


def _tell_accumulate(*case) -> str:
    pieces = Pieces(*case)
    targets = ", ".join(str(sequences * tokens) for sequences, tokens in pieces.shapes)
    return f"accumulate(micro-batches of {targets} targets)"


@part.exercise(
    "9.5",
    "The loss that `model` returns is the mean of one micro-batch's targets. What part of the "
    "large batch's mean does it stand for?",
    "Count the targets of all micro-batches first: targets.numel(), not the sequences. Then, for "
    "each one: forward, multiply the loss by its share of the targets, backward.",
    "backward() adds to .grad by itself and gives the activations back. Keep each weighted loss "
    "with .detach(), and return their sum.",
)
def accumulate(answer) -> None:
    """The gradient and loss of one large batch, with one graph at a time."""
    cases = [
        Pieces(_seed(), [(3, 4), (1, 4), (2, 4)], False),
        Pieces(_seed(), [(2, 5), (3, 2), (1, 7), (2, 1)], False, 3),
        Pieces(_seed(), [(2, 3), (1, 6), (2, 4)], True),
        Pieces(_seed(), [(3, 2)], False),
    ]
    reasons: Reasons = {
        "does not require grad and does not have": (
            "the loss has no graph: .item(), .detach() or torch.no_grad() came before backward()",
            "backward() first, then detach what you keep",
        ),
        "backward through the graph a second time": (
            "backward() of a sum goes through the graphs of earlier micro-batches again",
            "backward() of this micro-batch's own loss",
        ),
        "takes 2 positional": ("", "model(inputs, targets) returns the loss itself"),
        "missing 1 required positional argument: 'targets'": (
            "this model computes its loss itself",
            "loss = model(inputs, targets)",
        ),
        "'NoneType'": (
            "a parameter may have no gradient, as a frozen one: then its .grad is None",
            DIVIDED[1],
        ),
        "zero-dimensional tensor (at position 0)": ("torch.cat joins vectors", "torch.stack"),
    }
    for case, seen in zip(
        cases, alone(answer, cases, _tell_accumulate, reasons, _run_accumulate), strict=False
    ):
        _compare_accumulated(case, seen)


def _compare_accumulated(case: Pieces, seen: Accumulated) -> None:
    call = _tell_accumulate(*case)
    model, batches, before = case.draw()
    _compare_run(call, len(batches), seen)
    _compare_left(call, seen)
    losses, gradients = [], []
    for batch in batches:
        loss = model(*batch)
        gradients.append(torch.autograd.grad(loss, _trainable(model)))
        losses.append(loss.item())
    targets = [batch[1].numel() for batch in batches]
    right = [n / sum(targets) for n in targets]

    def summed(weights: list[float], kept: float) -> Tensor:
        sums = [kept * old for old in before]
        for weight, piece in zip(weights, gradients, strict=True):
            sums = [part + weight * new for part, new in zip(sums, piece, strict=True)]
        return torch.cat([part.flatten() for part in sums])

    found, wanted = torch.cat([grad.flatten() for grad in seen.gradients]), summed(right, 1)
    wrong = list(_weightings(case))
    if not _close(found, wanted):
        why = [smell for weights, kept, *smell in wrong if _close(found, summed(weights, kept))]
        told = f"after {call} .grad {_gap(found, wanted)} from the large batch's gradient"
        raise Wrong(f"{told}{', added to what was there' * case.filled}", *(why or [PER_TARGET])[0])
    if seen.wants_grad:
        smell = "the returned loss still has its graph (requires_grad), which keeps memory"
        raise Wrong(f"{call} returned {seen.value}", smell, "add up loss.detach()")
    value = number(seen.value, f"what {call} returned")

    def mean(weights: list[float]) -> float:
        return sum(weight * loss for weight, loss in zip(weights, losses, strict=True))

    if abs(value - mean(right)) > 1e-5:
        names = [smell for weights, _, *smell in wrong[1:] if abs(mean(weights) - value) < 1e-5]
        if names and "zero_grad" in names[0][0]:
            names = [("that is the last micro-batch's loss", "add up the weighted losses of all")]
        otherwise = ("the gradients are right, but not the loss", "add up the weighted losses")
        told = f"{call} returned {value:.5g}, the large batch's loss is {mean(right):.5g}"
        raise Wrong(told, *(names or [otherwise])[0])


def _compare_run(call: str, pieces: int, seen: Accumulated) -> None:
    """What the model saw while the answer ran."""
    *calls, at_end = seen.trains
    for index, earlier in enumerate(seen.alive, 1):
        if not earlier:
            continue
        why = (
            "backward comes only after all losses: then all graphs live at once, and take the "
            "memory of the large batch",
            "call backward() inside the loop, on this micro-batch's loss",
        )
        if all(earlier):
            why = (
                "retain_graph=True keeps them after backward",
                "leave it out: each micro-batch has a graph of its own",
            )
        raise Wrong(
            f"in {call} forward {index} began while autograd still kept the activations of "
            f"{len(earlier)} earlier one(s)",
            *why,
        )
    if len(calls) != pieces:
        raise Wrong(
            f"{call} ran the model {len(calls)} times for {pieces} micro-batch(es)",
            "put together they take the memory of the large batch"
            if 0 < len(calls) < pieces
            else "",
            "one forward and one backward for each micro-batch",
        )
    if not all(calls) or not at_end:
        told = f"{call} put the model into eval mode"
        raise Wrong(told, "dropout is part of training", "leave out model.eval()")


ONLY_FILL = "fill the .grad of trainable parameters, and change nothing else; the caller steps"


def _compare_left(call: str, seen: Accumulated) -> None:
    """What the answer should have left alone."""
    for wrong, what, smell, advice in (
        (
            any(gradient is None for gradient in seen.gradients),
            "a parameter's .grad is None",
            "no backward(), or zero_grad() at the end",
            "loss.backward() for each micro-batch adds to .grad",
        ),
        (seen.weights_moved, "the weights are others", "an optimizer stepped in here", ONLY_FILL),
        (not seen.frozen_has_none, "a frozen parameter has a gradient", "", ONLY_FILL),
        (seen.batches_changed, "the micro-batches are others", "the caller needs them", ONLY_FILL),
    ):
        if wrong:
            raise Wrong(f"after {call} {what}", smell, advice)


# ---- 9.6 ------------------------------------------------------------------------------------


class Layer:
    """A function with weights and random numbers that writes down every call."""

    def __init__(self, draw: Generator, num_params: int) -> None:
        self.params = [nn.Parameter(torch.randn(4, 4, generator=draw)) for _ in range(num_params)]
        self.graphs, self.noise = Graphs(), []

    def __call__(self, x: Tensor) -> Tensor:
        if len(self.noise) == 8:  # two are right; a recursion has no end
            raise RecursionError("the function ran 8 times, and once more")
        with self.graphs.watch():
            for weight in self.params:
                x = torch.tanh(x @ weight)
            self.noise.append(torch.rand(x.shape))
            return x.sin() * self.noise[-1]


class Chain(NamedTuple):
    """Functions one after the other, with so many parameters each, on one input."""

    seed: int
    num_params: list[int]
    wants_grad: bool  # does the input come from an earlier layer?


class Trained(NamedTuple):
    """One forward and backward: what came out, and what the functions met."""

    result: object  # a tensor, or words of what else it is
    has_graph: bool
    forward_calls: list[int]
    kept: int
    noise: list[list[Tensor]]  # of each function, of each call
    between: Tensor  # random numbers after forward
    after: Tensor  # and after backward
    start: Tensor | None  # gradient of the earlier layer
    gradients: list[Tensor | None]
    input_wants_grad: bool
    saved: bool = True  # did autograd get the last function's input?
    circle: bool = False  # did the output outlive its last user?


def _train(apply: Callable, case: Chain, upstream: float | None = None) -> Trained:
    """Run forward and backward; an `upstream` number stands for the loss's own gradient."""
    draw = Generator().manual_seed(case.seed)
    layers = [Layer(draw, count) for count in case.num_params]
    first = torch.randn(3, 4, generator=draw, requires_grad=case.wants_grad)
    up = torch.randn(3, 4, generator=draw) * 3
    torch.manual_seed(case.seed)
    torch.rand(5)  # the random numbers are not at their start
    x = y = first.sin() if case.wants_grad else first
    for layer in layers:
        last, own = y.detach(), Graphs()
        # Hooks would give a saved parameter back as another tensor, without its .grad.
        with contextlib.nullcontext() if layer.params else own.watch():
            y = apply(layer, y, *layer.params)
        if not isinstance(y, Tensor):
            empty = torch.empty(0)
            return Trained(f"{y!r:.80}", False, [], 0, [], empty, empty, None, [], False)
    calls = [len(layer.noise) for layer in layers]
    kept = sum(bool(layer.graphs.alive()) for layer in layers)
    saved = not own.calls or any(torch.equal(box.tensor, last) for box in own.calls[0])
    between, value = torch.rand(3), y.detach().clone()
    if has_graph := y.requires_grad:
        y.backward(up if upstream is None else torch.full_like(up, upstream))
    output, input_wants_grad = weakref.ref(y), x.requires_grad
    del x, y
    return Trained(
        value,
        has_graph,
        calls,
        kept,
        [layer.noise for layer in layers],
        between,
        torch.rand(3),
        first.grad,
        [param.grad for layer in layers for param in layer.params],
        input_wants_grad,
        saved,
        output() is not None,
    )


@contextlib.contextmanager
def _sendable(answer: object) -> Iterator[None]:
    """Take off @once_differentiable: it holds a module of C, which cannot be sent to a rank."""
    backward = getattr(answer, "backward", None)
    once = getattr(backward, "__globals__", None) is vars(torch.autograd.function)
    if once := once and hasattr(backward, "__wrapped__"):
        answer.backward = staticmethod(backward.__wrapped__)
    try:
        yield
    finally:
        if once:
            answer.backward = staticmethod(backward)


def _plainly(function: Callable, x: Tensor, *params: nn.Parameter) -> Tensor:
    return function(x)


def _tell_checkpoint(*case) -> str:
    _, num_params, wants_grad = case
    chain = f"{len(num_params)} in a row" if len(num_params) > 1 else f"{num_params[0]} parameters"
    return f"Checkpoint.apply ({chain}, x with{'' if wants_grad else 'out'} a gradient)"


CHECKPOINT_REASONS: Reasons = {
    "RecursionError": (
        "a recursion: Checkpoint.apply calls forward, its graph calls backward, and so on",
        "run the function itself: function(x) in forward, ctx.function(x) in backward",
    ),
    ", got 1)": (
        "a list counts as one value, and so does None: nothing is returned, perhaps",
        "return a tuple: None for the function, x's gradient, one for each of params",
    ),
    "rng_states() missing": (
        "it takes the device, too",
        "rng_states(x.device), and set_rng_states(states, x.device)",
    ),
    "element 0 of tensors does not require grad": (
        "inside backward autograd records nothing, so the function's second run has no graph",
        "run it in `with torch.enable_grad():`, on an x that requires a gradient",
    ),
    "One of the differentiated Tensors does not require grad": (
        "x is asked for a gradient and does not require one: it came in without, or is detached",
        "x = x.detach().requires_grad_() before the second run",
    ),
    "Tensor at index 0": (
        "the second run used another x than the one whose gradient is asked for",
        "run ctx.function on the detached x that autograd.grad then gets",
    ),
    "have been used in the graph": (
        "the second run did not use these params: they are copies (detach), or the function is "
        "another call's: what is kept on the class, not on ctx, belongs to the last call",
        "detach x only; give autograd.grad the params as they were saved, and run ctx.function",
    ),
    "backward through the graph a second time": (
        "x still hangs on the earlier layers, and backward went on through them",
        "cut it off: x = x.detach().requires_grad_()",
    ),
    "grad can be implicitly created only for scalar": (
        "the result is no loss: backward starts from the gradient that comes in",
        "hand over `grad`: torch.autograd.grad(again, inputs, grad)",
    ),
    "returned an incorrect number of gradients": (
        "backward returns one entry for each argument of forward: function, x, every parameter",
        "None for the function comes first, then x's, then one for each of params",
    ),
    "returned a gradient different than None": (
        "the function is no tensor and has no gradient, but its place in the tuple counts",
        "return None first, for the function",
    ),
    "save_for_backward can only save": (
        "save_for_backward takes tensors only",
        "ctx.function = function and ctx.rng = ... for all that is no tensor",
    ),
    "positional argument": (
        "autograd hands over ctx first, then the arguments one by one",
        "forward(ctx, function, x, *params) and backward(ctx, grad)",
    ),
    "returned an invalid gradient": (
        "the gradients are not in the order of forward's arguments",
        "None, then x's, then one for each of params",
    ),
    "RNG state must be a torch.ByteTensor": (
        "rng_states returns a list of states",
        "set_rng_states(ctx.rng, x.device)",
    ),
    "not enough values to unpack": (
        "ctx.saved_tensors holds only what forward gave to save_for_backward",
        "ctx.save_for_backward(x, *params)",
    ),
}


@part.exercise(
    "9.6",
    "forward: keep the function and rng_states(x.device) on ctx, and the tensors with "
    "ctx.save_for_backward; then run the function. When has the random state to be read?",
    "backward: run the function again inside torch.enable_grad(), on x.detach().requires_grad_(), "
    "with the kept random state. Read the present state before, and put it back after.",
    "torch.autograd.grad(again, (x, *params), grad) gives all gradients. Return None for the "
    "function before them.",
)
def Checkpoint(answer) -> None:
    """The same numbers as the plain function, with nothing of it kept in between."""
    cases = [
        Chain(_seed(), [2], True),
        Chain(_seed(), [3], False),
        Chain(_seed(), [2, 2], True),
        Chain(_seed(), [0], True),
    ]

    def run(answer, *case) -> Trained:
        return _train(getattr(answer, "apply", answer), Chain(*case))

    with _sendable(answer):
        seen = alone(answer, cases, _tell_checkpoint, CHECKPOINT_REASONS, run)
        for case, found in zip(cases, seen, strict=False):
            plain = _train(_plainly, case)
            _compare_forward(case, found, plain)
            _compare_backward(case, found, plain)
            _compare_kept(_tell_checkpoint(*case), found)


def _compare_kept(call: str, seen: Trained) -> None:
    """How it keeps things, where all numbers are right."""
    if seen.circle:
        raise Wrong(
            f"after backward of {call} and `del result` the result is still in memory",
            "ctx keeps the result, and the result keeps ctx: a circle",
            "keep no result on ctx; backward computes it again",
        )
    if not seen.saved:
        raise Wrong(
            f"{call} kept x where autograd does not see it, as in ctx.x = x",
            "save_for_backward: only then autograd can count it, free it, and see changes in place",
            "ctx.save_for_backward(x, *params)",
        )


def _compare_forward(case: Chain, seen: Trained, plain: Trained) -> None:
    call = _tell_checkpoint(*case)
    if not isinstance(seen.result, Tensor):
        raise Wrong(f"{call} returned {seen.result}", "", "forward returns function(x)")
    if any(count != 1 for count in seen.forward_calls):
        raise Wrong(
            f"{call} ran the function {max(seen.forward_calls)} times in forward",
            "forward runs it once, backward once more",
            "return function(x)",
        )
    if not _close(seen.result, plain.result):
        same_noise = all(map(torch.equal, (n[0] for n in seen.noise), (n[0] for n in plain.noise)))
        raise Wrong(
            f"the result of {call} {_gap(seen.result, plain.result)} from function(x)",
            "" if same_noise else "forward changed the random numbers that the function gets",
            "return function(x) as it is; forward only reads the random state",
        )
    if not seen.has_graph:
        raise Wrong(
            f"the result of {call} requires no gradient",
            "it has no way back",
            "let Checkpoint be a torch.autograd.Function, with forward and backward",
        )
    if seen.kept:
        raise Wrong(
            f"after {call} the activations inside the function are still alive",
            "forward recorded a graph and kept it, so nothing is saved",
            "in forward no enable_grad(): keep x and the random state, and no result",
        )
    if not torch.equal(seen.between, plain.between):
        raise Wrong(
            f"after {call} other random numbers come than after function(x)",
            "forward set the random state",
            "forward only reads it: rng_states(x.device)",
        )


def _compare_backward(case: Chain, seen: Trained, plain: Trained) -> None:
    call = _tell_checkpoint(*case)
    calls = [len(noise) for noise in seen.noise]
    if any(count != 2 for count in calls):
        wrong = next(count for count in calls if count != 2)
        smell = (
            "forward once, backward once more"
            if len(calls) == 1
            else ("what is kept on the class, or in a global, belongs to the last call only")
        )
        raise Wrong(
            f"with backward, {call} ran a function {wrong} time(s), not 2",
            smell,
            "keep it on ctx, and run ctx.function in backward",
        )
    if not all(torch.equal(*noise) for noise in seen.noise):
        raise Wrong(
            f"in backward of {call} the function drew other random numbers than in forward",
            "so dropout would drop others: the state of before forward's run is not restored",
            "read rng_states before function(x); set_rng_states(ctx.rng, ...) before the second",
        )
    _compare_gradients(case, seen, plain)
    if not torch.equal(seen.after, plain.after):
        raise Wrong(
            f"after backward of {call} other random numbers come than without it",
            "backward went back in the random numbers, and left them there: old ones come again",
            "read the present state before the second run, and set it again after it",
        )
    if seen.input_wants_grad != case.wants_grad:
        raise Wrong(
            f"after backward of {call} the caller's x requires a gradient",
            "requires_grad_() changed the caller's own tensor",
            "x.detach() first",
        )


def _compare_gradients(case: Chain, seen: Trained, plain: Trained) -> None:
    call, ones = _tell_checkpoint(*case), _train(_plainly, case, upstream=1.0)
    names = ["x", *(f"parameter {index}" for index in range(len(seen.gradients)))]
    found, wanted, with_ones = ([r.start, *r.gradients] for r in (seen, plain, ones))
    for name, new, truth, unscaled in zip(names, found, wanted, with_ones, strict=True):
        if truth is None:
            continue
        if new is None:
            raise Wrong(
                f"after backward of {call} {name} has no gradient",
                "backward returns None for it",
                "ask torch.autograd.grad for x and for every parameter",
            )
        if not _close(new, truth):
            smell, advice = "", "the same function, x, parameters and `grad`"
            if _close(new, unscaled):
                smell = "the gradient that comes in is not used: as if it were 1 everywhere"
                advice = "torch.autograd.grad(again, inputs, grad)"
            elif _close(new, 2 * truth):
                smell = "it counts twice: backward() has already added to .grad what is returned"
                advice = "use torch.autograd.grad, which only returns them"
            elif _close(new, truth * 0):
                smell = "it is zero"
            elif name == "x" and _close(
                new, _train(lambda f, x, *_: x + (f(x) - x).detach(), case).start
            ):
                smell = "it is `grad` unchanged: the gradient of the result, not of x"
                advice = "torch.autograd.grad(again, inputs, grad) goes back through the function"
            elif len(case.num_params) > 1:
                smell = "what is kept on the class, or in a global, belongs to the last call"
                advice = "keep it on ctx: each call has its own"
            raise Wrong(f"the gradient of {name} in {call} {_gap(new, truth)}", smell, advice)


# ---- 9.7 ------------------------------------------------------------------------------------


class Short(nn.Module):
    """Weights near 1 in bfloat16, one of them frozen; the last has no gradient at first."""

    def __init__(self, draw: Generator) -> None:
        super().__init__()
        sizes = {"first": 3, "frozen": 2, "second": 4, "late": 5}
        for name, size in sizes.items():
            weight = (1 + torch.rand(size, generator=draw)).bfloat16()
            setattr(self, name, nn.Parameter(weight, requires_grad=name != "frozen"))


class Step(NamedTuple):
    """What the optimizer met in one step, and what was left after it."""

    num_calls: int
    gradients: list[Tensor | None]  # of the copies, when the optimizer stepped
    before: list[Tensor]  # the copies then
    after: list[Tensor]  # the copies after the optimizer's step
    params: list[Tensor]
    num_gradients: tuple[int, int]  # left over: of the parameters, of the copies
    frozen: Tensor
    apart: bool  # are self.masters others than the copies that the optimizer steps?


class Steps(NamedTuple):
    num_optimizers: int
    given: list[tuple]  # data type and shape of what the optimizer was given
    steps: list[Step]


NUM_STEPS, LATE = 20, 5  # gradients of the last weight come from step LATE on
LR = 1e-3  # bfloat16 has steps of 1/128 between 1 and 2: a single step is rounded away


def _gradients_at(step: int, seed: int, model: Short) -> list[Tensor | None]:
    draw = Generator().manual_seed(seed + 1 + step)
    found = [(1 + torch.randn(p.shape, generator=draw)).bfloat16() for p in _trainable(model)]
    found[1] *= 2.0**-30  # float16 has no numbers that small
    return [*found[:-1], found[-1] if step >= LATE else None]


def _adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LR, weight_decay=0.5)


def _run_master(answer, seed: int) -> Steps:
    model, optimizers, log, seen = Short(Generator().manual_seed(seed)), [], [], []

    def copies() -> list[Tensor]:
        return [p for group in optimizers[-1].param_groups for p in group["params"]]

    def copied(tensors: list[Tensor | None]) -> list[Tensor | None]:
        return [None if tensor is None else tensor.detach().clone() for tensor in tensors]

    def make_optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizers.append(_adamw(list(params)))
        optimizers[-1].register_step_pre_hook(
            lambda *_: log.append((copied([p.grad for p in copies()]), copied(copies())))
        )
        optimizers[-1].register_step_post_hook(lambda *_: log.append(copied(copies())))
        return optimizers[-1]

    master = answer(model.parameters(), make_optimizer)
    params = _trainable(model)
    given = [(p.dtype, tuple(p.shape)) for p in copies()] if optimizers else []
    for step in range(NUM_STEPS):
        for param, new in zip(params, _gradients_at(step, seed, model), strict=True):
            if new is not None:
                param.grad = new.to(param.dtype)
        log.clear()
        master.step()
        (gradients, before), after = log[-2:] if log else (([], []), [])
        left = tuple(sum(p.grad is not None for p in which) for which in (params, copies()))
        values, frozen = copied(params), model.frozen.detach().clone()
        own = {id(copy) for copy in getattr(master, "masters", copies())}
        apart = own.isdisjoint(map(id, copies()))
        seen.append(Step(len(log) // 2, gradients, before, after, values, left, frozen, apart))
    return Steps(len(optimizers), given, seen)


NEVER = "no step changes a parameter: `param = ...` only gives the name to another tensor"
SHORT = "the parameter's gradient is bfloat16, and its copy fp32", "param.grad.to(master.dtype)"
MASTER_REASONS: Reasons = {
    "data of a different type": SHORT,  # torch 2.11
    "to a tensor with grad_dtype": SHORT,
    "requires grad is being used in an in-place": (
        "autograd does not let a parameter be changed under its eyes",
        "keep the line @torch.no_grad() above step",
    ),
    "'NoneType' object has no attribute": (
        "a parameter may have no gradient: then .grad is None",
        "master.grad = None where param.grad is None",
    ),
}


@part.exercise(
    "9.7",
    "Three parts: gradients from the parameters to the copies, one step of the optimizer, weights "
    "from the copies to the parameters.",
    "The optimizer knows only self.masters, which are fp32: each needs its gradient, in fp32, "
    "before self.optimizer.step(). Where param.grad is None, so is master.grad.",
    "After the step param.copy_(master) rounds into the parameter's own memory. Set param.grad to "
    "None, and let self.optimizer.zero_grad() drop the copies' gradients.",
)
def MasterWeights(answer) -> None:
    """Steps, each too small for bfloat16, against an optimizer in fp32."""
    seed = _seed()
    tell = f"{NUM_STEPS} steps of MasterWeights"
    (seen,) = alone(answer, [(seed,)], lambda _: tell, MASTER_REASONS, _run_master)
    _compare_optimizer(seed, seen)
    model = Short(Generator().manual_seed(seed))
    copies = [param.detach().float() for param in _trainable(model)]
    never = all(map(_close, copies, seen.steps[-1].params))
    for index, step in enumerate(seen.steps):
        _compare_before(index, step, copies, _gradients_at(index, seed, model))
        _compare_after(index, step, model.frozen, never)
        copies = step.after


def _compare_optimizer(seed: int, seen: Steps) -> None:
    model = Short(Generator().manual_seed(seed))
    wanted = [(torch.float32, tuple(p.shape)) for p in _trainable(model)]
    if seen.num_optimizers != 1:
        raise Wrong(
            f"make_optimizer was called {seen.num_optimizers} times in {NUM_STEPS} steps",
            "a new optimizer has forgotten the moments of all steps before",
            "step self.optimizer, which __init__ has made",
        )
    if any(dtype != torch.float32 for dtype, _ in seen.given):
        raise Wrong(
            f"the optimizer was given parameters of {seen.given[0][0]}",
            "it steps the short weights themselves, and small steps vanish in rounding",
            "it gets self.masters; __init__ was right as it was given",
        )
    if seen.given != wanted:
        raise Wrong(
            f"the optimizer was given {len(seen.given)} tensors, not {len(wanted)}",
            "one copy for each trainable parameter",
            "leave __init__ as it was given",
        )


def _compare_before(index: int, step: Step, copies: list[Tensor], gradients: list) -> None:
    """What the optimizer met."""
    at = f"in step {index + 1}"
    if step.num_calls != 1:
        smell = "something else moves the weights" if step.num_calls == 0 else ""
        raise Wrong(
            f"{at} the optimizer of the fp32 copies stepped {step.num_calls} times",
            smell,
            "self.optimizer.step(), once",
        )
    if not all(map(torch.equal, copies, step.before)):
        raise Wrong(
            f"{at} the fp32 copies are no longer what they were after step {index}",
            "they were made anew from the rounded weights, so small steps are lost each time",
            "the copies are the weights that count: copy only from them to the parameters",
        )
    for number_, (new, given) in enumerate(zip(step.gradients, gradients, strict=True)):
        if given is None and new is not None:
            raise Wrong(
                f"{at} parameter {number_} has no gradient, but its copy has one",
                "zeros are a gradient, too: weight decay then moves it",
                "master.grad = None where param.grad is None",
            )
        if given is None:
            continue
        if new is None:
            smell = "only some of the copies get theirs"
            advice = "before the step: master.grad from param.grad, for each pair"
            if step.apart:
                smell = "self.masters are new tensors, but the optimizer still has the old ones"
                advice = "make the copies once, in __init__, and step those"
            elif all(gradient is None for gradient in step.gradients):
                smell = "without gradients the optimizer moves nothing"
            told = f"{at} the copy of parameter {number_} has no gradient when the optimizer steps"
            raise Wrong(told, smell, advice)
        _compare_gradient(f"{at} the gradient of copy {number_}", new, given)


def _compare_gradient(what: str, new: Tensor, given: Tensor) -> None:
    """What a copy got, and what its parameter had; both may be very small."""
    if not torch.allclose(new.double(), given.double(), rtol=1e-4, atol=0):
        smell, advice = "", "set master.grad anew in each step, with nothing added and no factor"
        if torch.equal(new, given.half().float()):
            smell = "float16 has no numbers that small, and makes them 0; bfloat16 and fp32 have"
            advice = "param.grad.to(master.dtype), with no half() between"
        raise Wrong(f"{what} {_gap(new, given)} from param.grad", smell, advice)


def _compare_after(index: int, step: Step, frozen: Tensor, never: bool) -> None:
    """What was left; `never`: the parameters are the same after all steps."""
    at = f"after step {index + 1}"
    of_params, of_copies = step.num_gradients
    for number_, (param, master) in enumerate(zip(step.params, step.after, strict=True)):
        if param.dtype != torch.bfloat16:
            raise Wrong(
                f"{at} parameter {number_} is {param.dtype}",
                "param.data = master turns the short weight into the long one",
                "param.copy_(master) rounds into the parameter's own memory",
            )
        if not torch.equal(param, master.bfloat16()):
            late = torch.equal(param, step.before[number_].bfloat16())
            told = f"{at} parameter {number_} is not its fp32 copy rounded to bfloat16"
            smell = NEVER if never else "copied before the optimizer's step" * late
            raise Wrong(told, smell, "after the optimizer's step: param.copy_(master) of each")
    for count, whose, how in (
        (of_params, "trainable parameters", "param.grad = None"),
        (of_copies, "fp32 copies", "self.optimizer.zero_grad()"),
    ):
        if count:
            told = f"of {len(step.params)} {whose}, {count} still have a gradient {at}"
            if never and count == of_params:
                raise Wrong(told, NEVER, "param.copy_(master), and param.grad = None of the same")
            raise Wrong(f"{told} (it may be zeros)", "it takes memory, or adds to the next", how)
    if not torch.equal(step.frozen, frozen):
        raise Wrong(f"{at} the frozen parameter is another one", "", "go through self.params only")
