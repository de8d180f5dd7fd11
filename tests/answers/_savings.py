"""Answers to lesson 09, TODO 9.5 to 9.7, as students give them: RIGHT ones differ from the course's
own, and WRONG ones come with words that the verdict must hold. memory.py takes them in."""

import torch
from torch import nn

from manyhands.memory import savings
from manyhands.memory.savings import rng_states, set_rng_states

RIGHT: dict[str, list] = {
    "9.5": [savings.accumulate],
    "9.6": [savings.Checkpoint],
    "9.7": [savings.MasterWeights],
}
WRONG: dict[str, list] = {todo: [] for todo in RIGHT}


def right(todo):
    return lambda answer: RIGHT[todo].append(answer) or answer


def wrong(todo, words):
    return lambda answer: WRONG[todo].append((answer, words)) or answer


# ---- 9.5 accumulate -------------------------------------------------------------------------


@right("9.5")
def accumulate_floats(model, micro_batches):
    total = sum(y.numel() for _, y in micro_batches)
    mean = 0.0
    for x, y in micro_batches:
        loss = model(x, y)
        (loss * y.numel() / total).backward()
        mean += loss.item() * y.numel() / total
    return mean


@right("9.5")
def accumulate_beside(model, micro_batches):
    params = [param for param in model.parameters() if param.requires_grad]
    sums, losses, count = [torch.zeros_like(param) for param in params], 0, 0
    for x, y in micro_batches:
        loss = model(x, y) * y.numel()
        for total, grad in zip(sums, torch.autograd.grad(loss, params), strict=True):
            total += grad
        losses, count = losses + loss.detach(), count + y.numel()
    for param, total in zip(params, sums, strict=True):
        total /= count
        param.grad = total if param.grad is None else param.grad + total
    return losses / count


def accumulate_with(
    share=lambda y, batches: y.numel() / sum(t.numel() for _, t in batches),
    first=lambda model: None,
    inside=lambda model: None,
    last=lambda model, batches: None,
    keep=lambda loss, share: (loss * share).detach(),
    total=sum,
    **backward,
):
    """An accumulate in which one part can be another."""

    def answer(model, micro_batches):
        first(model)
        losses = []
        for x, y in micro_batches:
            inside(model)
            part = share(y, micro_batches)
            loss = model(x, y)
            (loss * part).backward(**backward)
            losses.append(keep(loss, part))
        last(model, micro_batches)
        return total(losses)

    return answer


def divide_gradients(model, batches):
    for param in model.parameters():
        if param.grad is not None:
            param.grad /= sum(y.numel() for _, y in batches)


def step(model, batches):
    torch.optim.SGD(model.parameters(), lr=0.1).step()


WRONG["9.5"] += [
    (accumulate_with(lambda y, batches: 1 / len(batches)), "the mean of the means"),
    (accumulate_with(lambda y, batches: 1), "the sum of the means"),
    (
        accumulate_with(lambda y, batches: len(y) / sum(len(t) for _, t in batches)),
        "weighed by the number of sequences",
    ),
    (accumulate_with(lambda y, batches: y.numel()), "not their mean"),
    (
        accumulate_with(last=lambda model, _: [p.grad.div_(2) for p in model.parameters()]),
        "a parameter may have no gradient",
    ),
    (
        accumulate_with(
            lambda y, batches: y.numel(),
            last=divide_gradients,
            keep=lambda loss, share: loss.detach(),
        ),
        "the sum of the means",
    ),
    (accumulate_with(first=nn.Module.zero_grad), "drops what is in .grad"),
    (accumulate_with(inside=nn.Module.zero_grad), "only the last one's counts"),
    (accumulate_with(last=lambda model, _: model.zero_grad()), ".grad is None"),
    (accumulate_with(last=step), "an optimizer stepped in here"),
    (accumulate_with(total=lambda losses: losses[-1]), "the last micro-batch's loss"),
    (
        accumulate_with(keep=lambda loss, _: loss.detach(), total=lambda losses: losses[-1]),
        "the last micro-batch's loss",
    ),
    (
        accumulate_with(
            keep=lambda loss, _: loss.detach(), total=lambda losses: torch.stack(losses).mean()
        ),
        "the mean of the means",
    ),
    (accumulate_with(keep=lambda loss, share: loss * share), "still has its graph"),
    (
        accumulate_with(keep=lambda loss, share: loss * share, retain_graph=True),
        "retain_graph=True keeps them",
    ),
    (accumulate_with(first=nn.Module.eval), "into eval mode"),
    (accumulate_with(total=lambda losses: None), "nothing is returned"),
]


@wrong("9.5", "then all graphs live at once")
def accumulate_then_back(model, micro_batches):
    total = sum(y.numel() for _, y in micro_batches)
    loss = sum(model(x, y) * (y.numel() / total) for x, y in micro_batches)
    loss.backward()
    return loss.detach()


@wrong("9.5", "ran the model 1 times for 3 micro-batch(es) - put together")
def accumulate_puts_together(model, micro_batches):
    loss = model(*(torch.cat(parts) for parts in zip(*micro_batches, strict=True)))
    loss.backward()
    return loss.item()


@wrong("9.5", "goes through the graphs of earlier")
def accumulate_running_sum(model, micro_batches):
    total = 0
    for x, y in micro_batches:
        total = total + model(x, y) / len(micro_batches)
        total.backward()
    return total


@wrong("9.5", "the loss has no graph")
def accumulate_detaches_first(model, micro_batches):
    for x, y in micro_batches:
        model(x, y).detach().backward()


@wrong("9.5", "this model computes its loss itself")
def accumulate_calls_cross_entropy(model, micro_batches):
    for x, y in micro_batches:
        nn.functional.cross_entropy(model(x), y).backward()


@wrong("9.5", "was in .grad before is divided, too")
def accumulate_divides_all(model, micro_batches):
    total = sum(y.numel() for _, y in micro_batches)
    loss = accumulate_with(lambda y, _: y.numel())(model, micro_batches)
    divide_gradients(model, micro_batches)
    return loss / total


@wrong("9.5", "a parameter may have no gradient, as a frozen one")
def accumulate_divides_frozen_ones(model, micro_batches):
    num, total = 0, 0
    for x, y in micro_batches:
        loss = model(x, y) * y.numel()
        loss.backward()
        num += y.numel()
        total += loss.detach()
    for param in model.parameters():
        param.grad /= num
    return total / num


@wrong("9.5", "weighed by the number of inputs")
def accumulate_counts_inputs(model, micro_batches):
    num, total = sum(x.numel() for x, _ in micro_batches), 0
    for x, y in micro_batches:
        loss = model(x, y) * x.numel() / num
        loss.backward()
        total += loss.detach()
    return total


@wrong("9.5", "the sum of the means")
def accumulate_forgets_to_weigh_backward(model, micro_batches):
    losses = []
    for x, y in micro_batches:
        loss = model(x, y)
        loss.backward()
        losses.append(loss.item() / len(micro_batches))
    return sum(losses)


# ---- 9.6 Checkpoint -------------------------------------------------------------------------


def keep_inputs(ctx, function, x, params):
    ctx.function, ctx.rng = function, rng_states(x.device)
    ctx.save_for_backward(x, *params)


def run_again(ctx, x):
    now = rng_states(x.device)
    set_rng_states(ctx.rng, x.device)
    with torch.enable_grad():
        result = ctx.function(x)
    set_rng_states(now, x.device)
    return result


def checkpoint(forward=None, backward=None):
    """A Checkpoint of one own method, or of two."""

    def usual(ctx, function, x, *params):
        keep_inputs(ctx, function, x, params)
        return function(x)

    parts = {"forward": staticmethod(forward or usual)}
    parts["backward"] = staticmethod(backward or savings.Checkpoint.backward)
    return type("Checkpoint", (torch.autograd.Function,), parts)


def back(prepare=lambda x: x.detach().requires_grad_(), run=run_again, give=None):
    """A backward in which one part can be another."""

    def usual(again, x, params, grad):
        return None, *torch.autograd.grad(again, (x, *params), grad)

    def backward(ctx, grad):
        x, *params = ctx.saved_tensors
        x = prepare(x)
        return (give or usual)(run(ctx, x), x, params, grad)

    return checkpoint(backward=backward)


def through_grad(again, x, params, grad):
    torch.autograd.backward(again, grad)
    return None, x.grad, *[None for _ in params]


def what_is_needed(again, x, params, grad):
    inputs = [tensor for tensor in (x, *params) if tensor.requires_grad]
    return None, *[None] * (not x.requires_grad), *torch.autograd.grad(again, inputs, grad)


RIGHT["9.6"] += [back(give=through_grad), back(prepare=lambda x: x, give=what_is_needed)]


@wrong("9.6", "save_for_backward: only then autograd can count it, free it")
class CheckpointWithAttributes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, x, *params):
        ctx.x, ctx.params, ctx.function = x, params, function
        ctx.state = torch.get_rng_state()
        return function(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.x.clone().detach()
        x.requires_grad = True
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            y = ctx.function(x)
        return (None,) + torch.autograd.grad([y], [x, *ctx.params], [grad])


@right("9.6")
class CheckpointOnce(savings.Checkpoint):
    __module__ = "__main__"  # so it is sent to a rank as a notebook's class is: by value
    backward = staticmethod(
        torch.autograd.function.once_differentiable(savings.Checkpoint.backward)
    )


@right("9.6")
class CheckpointInTwoParts(torch.autograd.Function):
    @staticmethod
    def forward(function, x, *params):
        CheckpointInTwoParts.rng = rng_states(x.device)
        return function(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        keep_inputs(ctx, *inputs[:2], inputs[2:])
        ctx.rng = CheckpointInTwoParts.rng

    backward = staticmethod(savings.Checkpoint.backward)


@wrong("9.6", "ctx.function(x) in backward")
class CheckpointOfACheckpoint(savings.Checkpoint):
    @staticmethod
    def backward(ctx, grad):
        x, *params = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            again = CheckpointOfACheckpoint.apply(ctx.function, x, *params)
        return None, *torch.autograd.grad(again, (x, *params), grad)


@wrong("9.6", "function(x) in forward")
class CheckpointInForward(savings.Checkpoint):
    @staticmethod
    def forward(ctx, function, x, *params):
        return CheckpointInForward.apply(function, x, *params)


def run_without_a_graph(ctx, x):
    now = rng_states(x.device)
    set_rng_states(ctx.rng, x.device)
    result = ctx.function(x)
    set_rng_states(now, x.device)
    return result


def run_with_new_numbers(ctx, x):
    with torch.enable_grad():
        return ctx.function(x)


def run_from_the_seed(ctx, x):
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(torch.initial_seed())
        return ctx.function(x)


def run_and_leave(ctx, x):
    set_rng_states(ctx.rng, x.device)
    with torch.enable_grad():
        return ctx.function(x)


def run_on_another(ctx, x):
    return run_again(ctx, x.detach().clone().requires_grad_())


def grads(again, x, params, grad):
    return torch.autograd.grad(again, (x, *params), grad)


def counts_twice(again, x, params, grad):
    torch.autograd.backward(again, grad)
    return None, x.grad, *[param.grad.clone() for param in params]


def in_other_order(again, x, params, grad):
    first, *others = grads(again, x, params, grad)
    return None, *others, first


def with_ones(again, x, params, grad):
    return None, *grads(again, x, params, torch.ones_like(grad))


def only_x(again, x, params, grad):
    return None, grads(again, x, params, grad)[0], *[None for _ in params]


def of_copies(again, x, params, grad):
    return grads(again, x, [param.detach().requires_grad_() for param in params], grad)


def run_without_a_device(ctx, x):
    set_rng_states(ctx.rng)
    return run_again(ctx, x)


def number_instead_of_none(again, x, params, grad):
    return grad, *grads(again, x, params, grad)


WRONG["9.6"] += [
    (back(run=run_without_a_graph), "inside backward autograd records nothing"),
    (back(run=run_with_new_numbers), "dropout would drop others"),
    (back(run=run_from_the_seed), "dropout would drop others"),
    (back(run=run_and_leave), "left them there"),
    (back(prepare=lambda x: x), "does not require one"),
    (back(prepare=lambda x: x.requires_grad_()), "changed the caller's own tensor"),
    (back(prepare=lambda x: x, give=through_grad), "x still hangs on the earlier layers"),
    (back(run=run_on_another), "the second run used another x"),
    (back(give=of_copies), "they are copies (detach)"),
    (back(run=run_without_a_device), "it takes the device, too"),
    (back(give=lambda *args: [None, *grads(*args)]), "a list counts as one value"),
    (back(give=lambda *args: None), "nothing is returned"),
    (
        back(give=lambda again, x, params, grad: (None, grad, *[None] * len(params))),
        "it is `grad` unchanged",
    ),
    (back(give=grads), "None for the function comes first"),
    (back(give=counts_twice), "it counts twice"),
    (back(give=in_other_order), "the gradients are not in the order"),
    (back(give=with_ones), "as if it were 1 everywhere"),
    (back(give=only_x), "parameter 0 has no gradient"),
    (back(give=number_instead_of_none), "the function is no tensor"),
    (
        back(give=lambda again, x, ps, _: (None, *torch.autograd.grad(again, (x, *ps)))),
        "hand over `grad`",
    ),
    (
        back(give=lambda again, x, ps, grad: (None, torch.autograd.grad(again, x, grad)[0])),
        "one entry for each argument of forward",
    ),
]


@wrong("9.6", "recorded a graph and kept it")
class CheckpointThatKeepsTheGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, x, *params):
        with torch.enable_grad():
            ctx.x, ctx.params = x.detach().requires_grad_(), params
            ctx.result = function(ctx.x)
        return ctx.result.detach()

    @staticmethod
    def backward(ctx, grad):
        return None, *torch.autograd.grad(ctx.result, (ctx.x, *ctx.params), grad)


def forward_after(ctx, function, x, *params):
    result = function(x)
    keep_inputs(ctx, function, x, params)
    return result


def forward_that_keeps_the_result(ctx, function, x, *params):
    keep_inputs(ctx, function, x, params)
    ctx.result = function(x)
    return ctx.result


def forward_that_saves_nothing(ctx, function, x, *params):
    ctx.function, ctx.rng = function, rng_states(x.device)
    return function(x)


def forward_twice(ctx, function, x, *params):
    keep_inputs(ctx, function, x, params)
    ctx.shape = function(x).shape
    return function(x)


def forward_that_seeds(ctx, function, x, *params):
    torch.manual_seed(0)
    keep_inputs(ctx, function, x, params)
    return function(x)


def forward_without_result(ctx, function, x, *params):
    keep_inputs(ctx, function, x, params)


def forward_that_saves_all(ctx, function, x, *params):
    ctx.save_for_backward(function, x, *params)
    return function(x)


def forward_with_a_graph(ctx, function, x, *params):
    keep_inputs(ctx, function, x, params)
    with torch.enable_grad():
        return function(x)


WRONG["9.6"] += [
    (checkpoint(forward_after), "read rng_states before function(x)"),
    (checkpoint(forward_that_keeps_the_result), "the result keeps ctx: a circle"),
    (checkpoint(forward_that_saves_nothing), "what forward gave to save_for_backward"),
    (checkpoint(forward_twice), "ran the function 2 times in forward"),
    (checkpoint(forward_that_seeds), "forward changed the random numbers"),
    (checkpoint(forward_without_result), "returned None"),
    (checkpoint(forward_that_saves_all), "takes tensors only"),
]


class Kept:
    pass


@wrong("9.6", "keep it on ctx")
class CheckpointWithAGlobal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, x, *params):
        Kept.function, Kept.rng = function, rng_states(x.device)
        Kept.saved_tensors = x, *params
        return function(x)

    @staticmethod
    def backward(ctx, grad):
        return savings.Checkpoint.backward(Kept, grad)


@wrong("9.6", "belongs to the last call")
class CheckpointWithClassAttributes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, x, *params):
        ctx.save_for_backward(x, *params)
        ctx.rng = rng_states(x.device)
        CheckpointWithClassAttributes.function = function
        return function(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.function = CheckpointWithClassAttributes.function
        return savings.Checkpoint.backward(ctx, grad)


@wrong("9.6", "autograd hands over ctx first")
class CheckpointWithoutCtx(torch.autograd.Function):
    @staticmethod
    def forward(function, x, params):
        return function(x)


# ---- 9.7 MasterWeights ----------------------------------------------------------------------


@right("9.7")
class MasterWeightsByData(savings.MasterWeights):
    def step(self):
        for i, param in enumerate(self.params):
            if param.grad is not None:
                self.masters[i].grad = param.grad.float()
        self.optimizer.step()
        for param, master in zip(self.params, self.masters, strict=True):
            param.data = master.data.to(torch.bfloat16)
            param.grad = master.grad = None


@right("9.7")
class MasterWeightsAllAtOnce(savings.MasterWeights):
    @torch.no_grad()
    def step(self):
        pairs = [pair for pair in zip(self.params, self.masters, strict=True)]
        for param, master in pairs:
            if param.grad is not None:
                master.grad = torch.zeros_like(master)
                master.grad += param.grad
        self.optimizer.step()
        torch._foreach_copy_(self.params, self.masters)
        for tensor in (*self.params, *self.masters):
            tensor.grad = None


def masters_with(
    grad=lambda param, master: None if param.grad is None else param.grad.float(),
    first=lambda self: None,
    step=lambda self: self.optimizer.step(),
    clear=lambda self: self.optimizer.zero_grad(),
    clear_param=lambda param: setattr(param, "grad", None),
    back=lambda param, master: param.copy_(master),
    num_pairs=None,
    base=savings.MasterWeights,
):
    """A MasterWeights in which one part of `step` can be another."""

    class MasterWeights(base):
        @torch.no_grad()
        def step(self):
            first(self)
            pairs = list(zip(self.params, self.masters, strict=True))
            for param, master in pairs[:num_pairs]:
                master.grad = grad(param, master)
            step(self)
            clear(self)
            for param, master in pairs:
                clear_param(param)
                back(param, master)

    return MasterWeights


def zeros_for_none(param, master):
    return torch.zeros_like(master) if param.grad is None else param.grad.float()


def copy_weights_in(self):
    for param, master in zip(self.params, self.masters, strict=True):
        master.copy_(param)


def copy_weights_out(self):
    for param, master in zip(self.params, self.masters, strict=True):
        param.copy_(master)


def anew(self):
    self.masters = [nn.Parameter(param.detach().float()) for param in self.params]


def nothing(*args):
    return None


def make_data_long(param, master):
    param.data = master.data


def first_only(self):
    self.optimizer.zero_grad()
    self.params[0].copy_(self.masters[0])


class StepsTheShort(savings.MasterWeights):
    def __init__(self, params, make_optimizer):
        self.params = [param for param in params if param.requires_grad]
        self.optimizer = make_optimizer(self.params)

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


class KeepsTheMaker(savings.MasterWeights):
    def __init__(self, params, make_optimizer):
        self.make_optimizer = make_optimizer
        super().__init__(params, make_optimizer)


def step_of_a_new_one(self):
    self.optimizer = self.make_optimizer(self.masters)
    self.optimizer.step()


def step_by_hand(self):
    for param in self.params:
        if param.grad is not None:
            param -= 0.003 * param.grad


WRONG["9.7"] += [
    (StepsTheShort, "it steps the short weights themselves"),
    (masters_with(step=step_by_hand), "stepped 0 times"),
    (masters_with(back=nothing), "no step changes a parameter"),
    (masters_with(back=nothing, clear_param=nothing), "gives the name to another tensor"),
    (masters_with(first=copy_weights_out, back=nothing), "copied before the optimizer's step"),
    (masters_with(clear=first_only, back=nothing), "parameter 1 is not its fp32 copy rounded"),
    (masters_with(back=make_data_long), "turns the short weight into the long one"),
    (masters_with(first=copy_weights_in), "small steps are lost each time"),
    (masters_with(first=anew), "the optimizer still has the old ones"),
    (
        masters_with(grad=lambda p, _: None if p.grad is None else p.grad.half().float()),
        "float16 has no numbers that small",
    ),
    (masters_with(grad=nothing), "without gradients the optimizer moves nothing"),
    (masters_with(grad=zeros_for_none), "zeros are a gradient, too"),
    (masters_with(grad=lambda param, master: param.grad), "param.grad.to(master.dtype)"),
    (masters_with(grad=lambda param, master: param.grad.float()), "then .grad is None"),
    (masters_with(num_pairs=1), "only some of the copies get theirs"),
    (masters_with(clear=nothing), "of 3 fp32 copies, 2 still have a gradient"),
    (masters_with(clear_param=nothing), "of 3 trainable parameters, 2 still have"),
    (
        masters_with(step=step_of_a_new_one, base=KeepsTheMaker),
        "a new optimizer has forgotten the moments",
    ),
]


@wrong("9.7", "@torch.no_grad() above step")
class MasterWeightsUnderAutograd(savings.MasterWeights):
    def step(self):
        self.optimizer.step()
        for param, master in zip(self.params, self.masters, strict=True):
            param.copy_(master)


@wrong("9.7", "gives the name to another tensor")
class MasterWeightsThatRebinds(savings.MasterWeights):
    @torch.no_grad()
    def step(self):
        for param, master in zip(self.params, self.masters, strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        self.optimizer.step()
        for param, master in zip(self.params, self.masters, strict=True):
            param = master.bfloat16()
            param.grad = None
        self.optimizer.zero_grad()


@wrong("9.7", "something else moves the weights")
class MasterWeightsWithoutAStep(savings.MasterWeights):
    def step(self):
        pass
