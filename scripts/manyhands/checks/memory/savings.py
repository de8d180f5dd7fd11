"""9.5 to 9.7: training in less memory.

What a model, a function or an optimizer meets is written down while the answer runs: which
activations autograd still keeps, which random numbers came, which gradients an optimizer saw.
"""

import contextlib
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from manyhands.checks.engine import cases
from manyhands.checks.engine.spec import Spec
from manyhands.checks.engine.values import malformed, number, tensor
from manyhands.checks.engine.watch import Watched
from manyhands.memory import savings


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that have a gradient."""
    return [param for param in model.parameters() if param.requires_grad]


# ---- 9.5 ------------------------------------------------------------------------------------


class Reader(nn.Module):
    """The mean loss of targets that belong to the last inputs of each row; a layer is frozen."""

    def __init__(self, draw: Generator) -> None:
        super().__init__()
        for name, size in {"frozen": (5, 5), "tokens": (7, 5), "head": (5, 7)}.items():
            weight = torch.randn(size, generator=draw, dtype=torch.float64)
            setattr(self, name, nn.Parameter(weight, requires_grad=name != "frozen"))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = torch.tanh(self.tokens[inputs[:, -targets.shape[1] :]] @ self.frozen)
        return 1e3 * F.cross_entropy((hidden @ self.head).flatten(0, 1), targets.flatten())


def cut(*shapes: tuple[int, int], prompt: int = 0, **watched: bool) -> tuple:
    """A model, and micro-batches of (rows, targets a row); a row begins with a prompt of inputs."""
    draw = cases.generator(cases.draw_seed())
    sizes = [((rows, prompt + num), (rows, num)) for rows, num in shapes]
    batches = [tuple(torch.randint(7, size, generator=draw) for size in two) for two in sizes]
    return Watched(Reader(draw), **watched), batches


def accumulated(answer: Callable, case: tuple) -> dict:
    """The loss, the gradients, and how the model was called."""
    case.model.fill()
    value = answer(*case)
    has_graph = getattr(value, "requires_grad", False)
    loss = {"the returned loss": number(value), "the returned loss has no graph": not has_graph}
    return case.model.facts() | loss


def tell_pieces(case: tuple) -> str:
    """The call, by the numbers of targets."""
    targets = ", ".join(str(targets.numel()) for _, targets in case.micro_batches)
    filled = ", and gradients from before" if case.model.filled else ""
    return f"accumulate with micro-batches of {targets} targets{filled},"


WEIGH = "Multiply each loss by targets.numel() / (the number of targets in all micro-batches)."
SHARE = "targets.numel() / num_targets"
LOSS = "loss = model(inputs, targets) * (targets.numel() / num_targets)"
BACK = "loss.backward()"
SUM = "torch.stack(losses).sum()"
accumulate = Spec(
    todo="9.5",
    truth=savings.accumulate,
    cases=lambda: [
        cut((3, 2), prompt=1),
        cut((2, 3), (2, 3)),
        cut((3, 2), filled=True, mode=False),
        cut((2, 5), (3, 2), (1, 7), (2, 1), prompt=3),
        cut((2, 3), (1, 6), (2, 4), filled=True, prompt=1, mode=False),
    ],
    observe=accumulated,
    tell=tell_pieces,
    advice={
        "": "Fill the .grad of trainable parameters, and change nothing else.",
        "calls of the model, by the size of the last argument": "Call it once for each of them.",
        "graphs of earlier calls that are alive when a forward begins": (
            "Call backward() inside the loop, on this micro-batch's loss."
        ),
        "the gradient of tokens": WEIGH,
        "the returned loss": "Return the sum of the weighted losses.",
    },
    reasons="""
        does not require grad and does not have :: Backward was called for a loss that has no graph.
            | Call backward() first, then detach what you keep.
        backward through the graph a second time :: Backward went through the graph of an earlier
            micro-batch again. | Call backward() of this micro-batch's own loss.
        missing 1 required positional argument: 'targets' ::
            This model computes its loss itself. | loss = model(inputs, targets)
        unsupported operand type(s) for /=: 'NoneType' ::
            A parameter may have no gradient, as a frozen one: then its .grad is None. | Weigh each
            loss before its backward(); then .grad needs no division.
        zero-dimensional tensor (at position 0) :: torch.cat joins vectors. | torch.stack
    """,
    hints=(
        "The loss that `model` returns is the mean over one micro-batch's targets. What part of "
        "the large batch's mean does it stand for?",
        "Count the targets of all micro-batches first: targets.numel(), not the rows. Then, for "
        "each micro-batch: forward, multiply the loss by its share of the targets, backward.",
        "backward() adds to .grad by itself and frees the activations. Keep each weighted loss "
        "with .detach(), and return their sum.",
    ),
    mistakes=r"""
        {SHARE} => 1 / len(micro_batches) :: This is the mean of the means, in which a target of a
            small micro-batch counts more. | {WEIGH}
        {LOSS} => loss = model(inputs, targets) ::
            This is the sum of the means, and each of them is the loss of a whole batch.
        {SHARE} => len(targets) / sum(len(t) for _, t in micro_batches) ::
            Losses are weighed by the number of rows, and rows differ in length.
        {SHARE} => inputs.numel() / sum(x.numel() for x, _ in micro_batches) ::
            Losses are weighed by the number of inputs, and some inputs have no target.
        {SHARE} => targets.numel() :: This is the sum of all targets' losses, not their mean.
        {LOSS} => model.zero_grad(); {LOSS} ::
            Only the last micro-batch's gradient is left: each one clears those before. | Add in
            every micro-batch, and leave zero_grad() to the caller.
        losses = [] => losses = []; model.zero_grad() ::
            What was in .grad before is lost, and the caller may have put it there to be added to.
        {SUM} => losses[-1] ::
            This is the weighted loss of the last micro-batch alone. | Return the sum of all.
        {SUM} => {SUM} / len(losses) ::
            The loss is divided by the number of micro-batches once more.
        loss.detach() => loss ::
            The returned loss still has its graph, which keeps memory. | Add up loss.detach().
        {BACK} => loss.backward(retain_graph=True)
        loss.detach() => loss ::
            The graph of each micro-batch is kept after backward. | Leave out retain_graph=True.
        {BACK}\n => \n
        return torch. => torch.stack(losses).sum().backward()\n    return torch.
        loss.detach() => loss :: All graphs are alive at once, which takes the memory of the large
            batch. | Call backward() inside the loop, on this micro-batch's loss.
        losses = [] => losses = []; model.train() ::
            The model was put into train mode. | Leave the mode to the caller.
        losses = [] => losses = []; model.eval() :: The model was put into eval mode.
    """,
    module=globals(),
)

# ---- 9.6 ------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A function with weights and random numbers."""

    def __init__(self, draw: Generator, num_params: int) -> None:
        super().__init__()
        matrices = torch.randn(num_params, 4, 4, generator=draw, dtype=torch.float64)
        self.weights = nn.ParameterList(nn.Parameter(matrix) for matrix in matrices)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x.sin() * torch.rand(x.shape)


class Chain(NamedTuple):
    """Functions one after the other, with so many parameters each, on one input."""

    seed: int
    num_params: list[int]
    wants_grad: bool = True  # does the input come from an earlier layer?
    filled: bool = False  # do parameters have gradients from before?


def chains() -> list[Chain]:
    """No parameters; several; no gradient of x; autograd.grad, beside gradients from before."""
    return [
        Chain(cases.draw_seed(), [0]),
        Chain(cases.draw_seed(), [2]),
        Chain(cases.draw_seed(), [3], wants_grad=False),
        Chain(cases.draw_seed(), [1, 2], filled=True),
    ]


NOT_ON_CTX = "no tensor is kept on ctx itself but the random states"
UNRECORDED = "autograd records nothing while the function runs in forward"


def own_storages(kept: list[Tensor], x: Tensor) -> bool:
    """Is what autograd keeps the memory of x, and random states besides?"""
    numbers = [one for one in kept if one.dtype is not torch.uint8]
    places = {one.untyped_storage().data_ptr() for one in numbers}
    return places == {x.untyped_storage().data_ptr()}


def bare_context(y: Tensor) -> bool:
    """Are there no tensors of numbers among what a Function has set on its ctx, which is y's node?

    A tensor that is kept there is seen by nobody, and lives until backward. Random states are of
    type uint8.
    """
    kept = [one for one in tree_leaves(vars(y.grad_fn)) if isinstance(one, Tensor)]
    return all(one.dtype is torch.uint8 for one in kept)


def checkpoint_seen(answer: object, case: Chain) -> dict:
    """Forward and backward: what came out, what lived in between, and the random numbers."""
    apply = getattr(answer, "apply", answer)
    draw = cases.generator(case.seed)
    layers = [
        Watched(Layer(draw, count), filled=case.filled, most_calls=8) for count in case.num_params
    ]
    first = torch.randn(3, 4, generator=draw, dtype=torch.float64, requires_grad=case.wants_grad)
    up = torch.randn(3, 4, generator=draw, dtype=torch.float64) * 3
    for layer in layers:
        layer.fill()
    torch.manual_seed(case.seed)
    torch.rand(5)  # the random numbers are not at their start
    x = y = first.sin() if case.wants_grad else first
    kept: list[Tensor] = []
    only_x = True
    is_bare = True
    for layer in layers:
        last = y
        params = list(layer.parameters())
        kept.clear()
        # Hooks would give a saved parameter back as another tensor, without its .grad.
        hooks = saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one)
        with contextlib.nullcontext() if params else hooks:
            y = apply(layer, y, *params)
        if not isinstance(y, Tensor):
            raise malformed(y, "the tensor that the function gives", "forward returns function(x).")
        only_x = only_x and bool(params or own_storages(kept, last))
        is_bare = is_bare and (not y.requires_grad or bare_context(y))
    kept.clear()
    seen = {
        "calls of each function in forward": [len(layer.sizes) for layer in layers],
        "the result": tensor(y),
        "the result has a way back": y.requires_grad,
        "no activation inside the function is alive after forward": not any(
            layer.num_alive() for layer in layers
        ),
        UNRECORDED: not any(layer.recorded[0] for layer in layers if layer.recorded),
        "a random number after forward": torch.rand(1).item(),
    }
    params = [param for layer in layers for param in layer.parameters()]
    grads: list = [None] * (1 + len(params))
    if y.requires_grad and case.filled:  # autograd.grad asks a function for what it returns
        grads = [*torch.autograd.grad(y, [first, *params], up, allow_unused=True)]
        grads += [param.grad for param in params]  # as before
    elif y.requires_grad:
        y.backward(up)
        grads = [first.grad, *(param.grad for param in params)]
    seen |= {
        "calls of each function, with backward": [len(layer.sizes) for layer in layers],
        "the function draws the same random numbers in backward": all(
            torch.equal(layer.draws[0], layer.draws[-1]) for layer in layers
        ),
        "the gradient of x": grads[0],
        "the gradients of the parameters": grads[1:],
        "a random number after backward": torch.rand(1).item(),
        "the caller's x requires a gradient only if it did": x.requires_grad == case.wants_grad,
        "autograd keeps x itself, as it was given, and no other number": only_x,
        NOT_ON_CTX: is_bare,
    }
    output = weakref.ref(y)
    del x, y, last
    return seen | {"the result is freed when its last user is gone": output() is None}


def tell_chain(case: Chain) -> str:
    """The call of apply, and what its input is."""
    num = case.num_params
    of = f"{len(num)} functions in a row" if len(num) > 1 else f"{num[0]} parameters"
    return f"Checkpoint.apply ({of}, x with{'' if case.wants_grad else 'out'} a gradient)"


STATE = "Read rng_states(x.device) before function(x), and set it again before the second run."
GRAD = "torch.autograd.grad(again, (x, *params), grad) gives all gradients."
DETACH = "x = x.detach().requires_grad_()"
SAVE = "ctx.save_for_backward(x, *params)"
GRADS = "*torch.autograd.grad(again, (x, *params), grad, allow_unused=True)"
TWICE = (
    "torch.autograd.backward(again, grad); "
    "return None, x.grad, *[param.grad.clone() for param in params]"
)
RESULT = "return function(x)"
PUT_BACK = "Read the present state before the second run, and set it again after it."
checkpoint = Spec(
    todo="9.6",
    truth=savings.Checkpoint,
    cases=chains,
    observe=checkpoint_seen,
    tell=tell_chain,
    advice={
        "the function draws the same random numbers in backward": STATE,
        "a random number after backward": PUT_BACK,
        "autograd keeps x itself, as it was given, and no other number": f"Call {SAVE}.",
        UNRECORDED: "Leave torch.enable_grad() to backward: in forward it keeps what is dropped.",
        "the result is freed when its last user is gone": "Keep no result on ctx.",
        NOT_ON_CTX: f"Call {SAVE}, and compute everything else once more in backward.",
        "the gradients of the parameters": GRAD,
        "the gradient of x": GRAD,
    },
    reasons="""
        maximum recursion depth :: A call ends in the same call again, without end. | Run the
            function itself: function(x) in forward, ctx.function(x) in backward.
        rng_states() missing :: These two functions take the device, too. | rng_states(x.device),
            and set_rng_states(states, x.device)
        element 0 of tensors does not require grad ::
            In backward autograd records nothing by itself, so this result has no graph. | Run it
            inside `with torch.enable_grad():`, on an x that requires a gradient.
        One of the differentiated Tensors does not require grad ::
            A tensor whose gradient is asked for does not require one. | {DETACH}
        have been used in the graph ::
            A tensor whose gradient is asked for was not used in the second run. | Run ctx.function
            on the same detached x, and take the params as they were saved.
        backward through the graph a second time ::
            Backward went through a graph that had been used already. | {DETACH}
        grad can be implicitly created only for scalar ::
            The result is no loss: backward starts from the gradient that comes in. | {GRAD}
        returned an incorrect number of gradients ::
            backward returns one entry for each argument of forward. | Return a tuple: None for the
            function, x's gradient, and one for each of params.
        returned a gradient different than None :: The function is no tensor and has no gradient,
            but its place in the tuple counts. | Return None first, for the function.
        save_for_backward can only save :: save_for_backward takes tensors only. | ctx.function =
            function, and so for everything that is no tensor.
        RNG state must be a torch.ByteTensor ::
            rng_states returns a list of states. | set_rng_states(ctx.rng, x.device)
        not enough values to unpack ::
            ctx.saved_tensors holds only what forward gave to save_for_backward. | {SAVE}
    """,
    hints=(
        "forward: keep the function and rng_states(x.device) on ctx, and the tensors with "
        "ctx.save_for_backward; then run the function. When must the random state be read?",
        "backward: run the function again inside torch.enable_grad(), on "
        "x.detach().requires_grad_(), with the random state that was kept. Read the present state "
        "before, and put it back after.",
        f"{GRAD} Return None for the function before them.",
    ),
    mistakes="""
        {RESULT} => y = function(x); ctx.rng = rng_states(x.device); return y
        set_rng_states(ctx.rng, x.device) => ::
            The function draws other random numbers in backward than in forward. | {STATE}
        {RESULT} => y = function(x); ctx.rng = rng_states(x.device); return y ::
            The random state is read only after the function has run, so the second run differs.
        set_rng_states(now, x.device) => ::
            After backward old random numbers come again. | {PUT_BACK}
        {GRADS} => *torch.autograd.grad(again, (x, *params), torch.ones_like(grad)) ::
            The gradient that comes in is not used: as if it were 1 everywhere. | {GRAD}
        return None, {GRADS} => {TWICE} ::
            backward() has added to .grad already, and what is returned is added as well.
        return None, {GRADS} => return None, grad, *[None] * len(params) ::
            `grad` is returned as it came in, and the parameters have no gradient.
        {GRADS} => torch.autograd.grad(again, x, grad)[0], *[None] * len(params) ::
            No gradient of the parameters is returned.
        x = x.detach().requires_grad_() => x = x.requires_grad_() ::
            The caller's own x was made to require a gradient. | {DETACH}
        ctx.save_for_backward(x, *params) => ctx.save_for_backward(x.clone(), *params) ::
            What is kept is not just x as it was given, but a copy of it, or more. | {SAVE}
        ctx.save_for_backward(x, *params) => ctx.x = x; ctx.params = params
        x, *params = ctx.saved_tensors => x, params = ctx.x, ctx.params ::
            x is kept where autograd does not see it: it can neither count nor free it.
        {RESULT} => ctx.result = function(x); return ctx.result ::
            ctx keeps the result, and the result keeps ctx, so neither is freed. | Keep no result.
        {RESULT} => function(x); {RESULT} ::
            The function runs twice in forward. | Run it once, and return what it gives.
        ctx.function, ctx.rng = function, => Checkpoint.function, ctx.rng = function,
        ctx.function(x) => Checkpoint.function(x) :: What is kept on the class belongs to the last
            call only. | Keep it on ctx: each call has its own.
        ctx.function(x) => ctx.function(x.clone())
        {GRADS} => None, *torch.autograd.grad(again, params, grad) :: x has no gradient. | {GRAD}
    """,
    module=globals(),
)

# ---- 9.7 ------------------------------------------------------------------------------------

NUM_STEPS = 12
LATE = 3  # gradients of the last weight come from this step on
LR = 1e-3  # bfloat16 has steps of 1/128 between 1 and 2: a single step is rounded away


class Short(nn.Module):
    """Weights near 1 in bfloat16, one of them frozen; the last has no gradient at first."""

    def __init__(self, draw: Generator) -> None:
        super().__init__()
        sizes = {"frozen": (2,), "first": (3, 2), "second": (4,), "late": (5,)}
        for name, size in sizes.items():
            weight = (1 + torch.rand(size, generator=draw)).bfloat16()
            setattr(self, name, nn.Parameter(weight, requires_grad=name != "frozen"))


class Training(NamedTuple):
    """Steps with an optimizer; AdamW does not see a factor of gradients, SGD does."""

    seed: int
    kind: str  # of the optimizer


def spied(kind: str, log: list) -> type[torch.optim.Optimizer]:
    """An optimizer that writes down what it meets, after a closure has run."""
    base = getattr(torch.optim, kind)

    class Spied(base):
        def step(self, closure: Callable | None = None) -> None:
            with torch.enable_grad():
                if closure:
                    closure()
            params = [param for group in self.param_groups for param in group["params"]]
            gradients = [None if p.grad is None else p.grad.clone() for p in params]
            log.append((gradients, [group["lr"] for group in self.param_groups]))
            super().step()

    return Spied


def steps_seen(answer: type, case: Training) -> dict:
    """What the optimizer met, and what was left, of every step."""
    draw = cases.generator(case.seed)
    model = Short(draw)
    frozen = model.frozen.detach().clone()
    log: list = []
    made: list[torch.optim.Optimizer] = []

    def make_optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        more = {"momentum": 0.9} if case.kind == "SGD" else {"weight_decay": 0.5}
        made.append(spied(case.kind, log)(list(params), lr=LR, **more))
        return made[-1]

    master = answer(cases.read_once(list(model.parameters())), make_optimizer)
    params = trainable(model)
    given = [p for one in made for group in one.param_groups for p in group["params"]]
    seen = {
        "optimizers": len(made),
        "types of what the optimizer steps": [str(p.dtype) for p in given],
    }
    for step in range(NUM_STEPS):
        for index, param in enumerate(params):
            gradient = torch.randn(param.shape, generator=draw).bfloat16() + 1
            if index == 1:
                gradient *= 2.0**-30  # float16 has no numbers that small
            if index < 2 or step >= LATE:
                param.grad = gradient.to(param.dtype)
        log.clear()
        master.step()
        at = f"in step {step + 1}: "
        copies = [p for group in made[-1].param_groups for p in group["params"]] if made else []
        gradients = log[-1][0] if log else []
        seen[f"{at}steps of the optimizer"] = len(log)
        seen[f"{at}the gradients that it meets"] = [exact(one) for one in gradients]
        seen[f"{at}its learning rate"] = log[-1][1] if log else []
        seen[f"{at}the types of the parameters"] = [str(p.dtype) for p in params]
        seen[f"{at}the parameters"] = [exact(p) for p in params]
        seen[f"{at}the copies"] = [exact(p) for p in copies]
        seen[f"{at}parameters that keep a gradient"] = sum(p.grad is not None for p in params)
        seen[f"{at}copies that keep a gradient"] = sum(p.grad is not None for p in copies)
        seen[f"{at}the frozen parameter is unchanged"] = torch.equal(model.frozen, frozen)
    return seen | {"optimizers at the end": len(made)}


def exact(one: Tensor | None) -> Tensor | None:
    """The same numbers in a type in which they are compared exactly."""
    return None if one is None else one.detach().double().clone()


ONCE = "Step self.optimizer, which __init__ has made, once."
FROM = "master.grad = None if param.grad is None else param.grad.to(master.dtype)"
STEP = "self.optimizer.step()"
ZERO = "self.optimizer.zero_grad()"
CLEAR = "param.grad = None\n"
TO = "param.grad.to(master.dtype)"
EACH = "strict=True):\n            "
ROUND = EACH + "param.copy_(master)"  # in step; load_state_dict has another line before it
master_weights = Spec(
    todo="9.7",
    truth=savings.MasterWeights,
    cases=lambda: [Training(cases.draw_seed(), kind) for kind in ("SGD", "AdamW")],
    observe=steps_seen,
    tell=lambda case: f"{NUM_STEPS} steps of MasterWeights with {case.kind}",
    advice={"": "Gradients to the copies, one step of the optimizer, the copies to the weights."},
    reasons="""
        data of a different type :: The gradient's type is not that of its copy. | {TO}
        to a tensor with grad_dtype :: The gradient's type is not that of its copy.
        requires grad is being used in an in-place :: Autograd does not let a parameter be changed
            in place while it records. | Keep the line @torch.no_grad() above step.
        'NoneType' object has no attribute ::
            A parameter may have no gradient: then its .grad is None. | {FROM}
    """,
    hints=(
        "There are three parts: gradients from the parameters to the copies, one step of the "
        "optimizer, and weights from the copies to the parameters.",
        "The optimizer knows only self.masters, which are fp32: each needs its gradient, in fp32, "
        "before self.optimizer.step(). Where param.grad is None, master.grad is None as well.",
        "After the step, param.copy_(master) rounds into the parameter's own memory. Set "
        "param.grad to None, and let self.optimizer.zero_grad() drop the copies' gradients.",
    ),
    mistakes=r"""
        {ROUND} => {EACH}param = master.bfloat16() ::
            The parameters do not change: `param = ...` only gives the name to another tensor. |
            After the optimizer's step, param.copy_(master) rounds into the parameter.
        {ROUND} => {EACH}param.data = master.data :: The parameters turn into fp32 tensors.
        {STEP} => [p.copy_(m) for p, m in zip(self.params, self.masters)]; {STEP}
        {ROUND} => {EACH}pass ::
            The copies are rounded into the parameters before the optimizer's step, not after it.
        {STEP} => [m.copy_(p) for p, m in zip(self.params, self.masters)]; {STEP} ::
            The copies are made anew from the rounded weights, so small steps are lost each time. |
            Copy only from the copies to the parameters.
        {TO} => param.grad.half().float() ::
            Gradients passed through float16, which has no numbers as small as bfloat16. | {TO}
        {FROM} => pass :: The optimizer steps without gradients. | {FROM}
        None if param.grad is None => torch.zeros_like(master) if param.grad is None ::
            A parameter without a gradient gives its copy zeros, and weight decay then moves it.
        {FROM} => master.grad = param.grad.float() if master is self.masters[0] else None ::
            Only the first copy gets its gradient.
        {CLEAR} => pass\n :: The parameters keep their gradients. | param.grad = None
        {ZERO} => pass ::
            The copies still have gradients after the step, and these take memory. | {ZERO}
        {STEP} => {STEP}; {STEP} :: The optimizer steps twice. | {ONCE}
        self.masters = [ => self.make = make_optimizer; self.masters = [
        {STEP} => self.optimizer = self.make(self.masters); {STEP} ::
            A new optimizer in each step has forgotten the moments of all steps before.
        make_optimizer(self.masters) => make_optimizer(self.params)
        {FROM} => pass
        {CLEAR} => pass\n
        {ROUND} => {EACH}pass :: The optimizer was given the short weights themselves, so small
            steps vanish in rounding. | It gets self.masters.
    """,
    module=globals(),
)
