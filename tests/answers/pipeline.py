"""Answers to lesson 12 as students give them: RIGHT ones differ from the course's own, and WRONG
ones come with words that the verdict must hold. Here are those on ranks; the others stand in
_schedules.py."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from manyhands.pipeline import engine as pipeline
from manyhands.pipeline import wiring
from manyhands.pipeline.schedules import Action

from . import _schedules

RIGHT: dict[str, list] = {
    "12.2": [pipeline.Pipeline],
    "12.3": [wiring.sum_tied],
    "12.10": [wiring.torch_pipeline],
    "12.11": [wiring.make_grid],
}
WRONG: dict[str, list] = {todo: [] for todo in RIGHT}


def right(todo):
    return lambda answer: RIGHT[todo].append(answer) or answer


def wrong(todo, words):
    return lambda answer: WRONG[todo].append((answer, words)) or answer


# ---- 12.2 Pipeline --------------------------------------------------------------------------


class Parts(pipeline.Pipeline):
    """The engine in small parts, so that a mistake is one part."""

    def take(self, stage, i):
        return self.inputs[i] if stage == 0 else self.mail.receive("F", stage, i).requires_grad_()

    def compute(self, stage, x):
        module = self.stages[stage]
        return checkpoint(module, x, use_reentrant=False) if self.recompute else module(x)

    def loss(self, out, i):
        return self.loss_fn(out, self.targets[i]) / self.m

    def keep_loss(self, loss):
        self.losses.append(loss.detach())

    def pass_on(self, stage, i, x, out):
        if stage < self.last:
            return self.mail.send("F", out.detach(), stage + 1, i)
        return None

    def save(self, stage, i, *what):
        self.saved[stage, i] = what

    def forward(self, stage, i):
        x = self.take(stage, i)
        with self.span(Action("F", stage, i)):
            out = self.compute(stage, x)
            if stage == self.last:
                out = self.loss(out, i)
                self.keep_loss(out)
        self.save(stage, i, x, out, self.pass_on(stage, i, x, out))

    def load(self, stage, i):
        return self.saved.pop((stage, i))

    def take_gradient(self, stage, i):
        return None if stage == self.last else self.mail.receive("B", stage, i)

    def run_backward(self, stage, out, grad):
        torch.autograd.backward(out, grad)

    def send_back(self, stage, i, x, grad):
        if stage > 0:
            self.sends.append(self.mail.send("B", x.grad, stage - 1, i))

    def backward(self, stage, i):
        x, out, _ = self.load(stage, i)
        grad = self.take_gradient(stage, i)
        with self.span(Action("B", stage, i)):
            self.run_backward(stage, out, grad)
        self.send_back(stage, i, x, grad)


@right("12.2")
class PipelineWrittenOut(Parts):
    """Plain ifs, keyword calls, a list as what is saved, and an all-reduce of the loss."""

    def take(self, stage, i):
        if stage == 0:
            return self.inputs[i]
        x = self.mail.receive(kind="F", stage=stage, i=i)
        x.requires_grad = True
        return x

    def pass_on(self, stage, i, x, out):
        if stage == self.last:
            return None
        return self.mail.send(kind="F", tensor=out.detach().clone(), stage=stage + 1, i=i)

    def save(self, stage, i, *what):
        self.saved[(stage, i)] = list(what)

    def load(self, stage, i):
        what = self.saved[stage, i]
        del self.saved[stage, i]
        return what

    def run_backward(self, stage, out, grad):
        if stage == self.last:
            out.backward()
        else:
            out.backward(gradient=grad)

    def share_loss(self):
        total = torch.zeros(())
        for loss in self.losses:
            total += loss
        dist.all_reduce(total, group=self.group)
        return total


@right("12.2")
class PipelineWithASpanByHandAndAFloat(Parts):
    def keep_loss(self, loss):
        self.losses.append(loss.item())

    def forward(self, stage, i):
        x = self.take(stage, i)
        start_s = time.time()
        out = self.compute(stage, x)
        if stage == self.last:
            out = self.loss(out, i)
            self.keep_loss(out)
        self.spans.append((Action("F", stage, i), start_s, time.time()))
        self.save(stage, i, x, out, self.pass_on(stage, i, x, out))

    def run_backward(self, stage, out, grad):
        loss = out if stage == self.last else (out * grad).sum()
        loss.backward()

    def share_loss(self):
        box = [float(sum(self.losses))]
        src = dist.get_global_rank(self.group or dist.group.WORLD, self.last % self.p)
        dist.broadcast_object_list(box, src=src, group=self.group)
        return box[0]


def engine(words, base=Parts, **parts):
    """Add a wrong engine in which these methods are others."""
    WRONG["12.2"].append((type("MyPipeline", (base,), parts), words))


engine("is not divided by m", loss=lambda self, out, i: self.loss_fn(out, self.targets[i]))
engine("divided by p", loss=lambda self, out, i: self.loss_fn(out, self.targets[i]) / self.p)
engine(
    "targets of micro-batch 1",
    loss=lambda self, out, i: self.loss_fn(out, self.targets[0]) / self.m,
)
engine("has a graph", keep_loss=lambda self, loss: self.losses.append(loss))


def without_asking(self, stage, i):
    return self.inputs[i] if stage == 0 else self.mail.receive("F", stage, i)


def asking_always(self, stage, i):
    x = self.inputs[i] if stage == 0 else self.mail.receive("F", stage, i)
    return x.requires_grad_()


def from_the_stage_before(self, stage, i):
    return self.inputs[i] if stage == 0 else self.mail.receive("F", stage - 1, i)


def always_by_mail(self, stage, i):
    return self.mail.receive("F", stage, i).requires_grad_()


engine("asks for no gradient - what comes by mail has no history", take=without_asking)
engine("takes tokens, whole numbers", take=asking_always)
engine("addressed to the stage that takes it", take=from_the_stage_before)
engine("nobody sends to the first stage: rank 0 would wait", take=always_by_mail)


def send_input(self, stage, i, x, out):
    return self.mail.send("F", x.float(), stage + 1, i) if stage < self.last else None


def send_to(step):
    def pass_on(self, stage, i, x, out):
        if stage < self.last:
            return self.mail.send("F", out.detach(), stage + step, i)
        return None

    return pass_on


def send_always(self, stage, i, x, out):
    return self.mail.send("F", out.detach(), stage + 1, i)


def send_and_wait(self, stage, i, x, out):
    if stage < self.last:
        self.mail.send("F", out.detach(), stage + 1, i).wait()


def send_and_forget(self, stage, i, x, out):
    if stage < self.last:
        self.mail.send("F", out.detach(), stage + 1, i)


engine("sends something else than the activation", pass_on=send_input)
engine("here that is stage + 1", pass_on=send_to(-1))
engine("no stage behind the last", pass_on=send_always)
engine("waits until its own message is taken", pass_on=send_and_wait)
engine("saves None as the send", pass_on=send_and_forget)


def save_one(self, stage, i, *what):
    self.x = what


def save_a_copy_without_graph(self, stage, i, x, out, send):
    self.saved[stage, i] = x, out.detach(), send


engine("saved holds nothing", save=save_one, load=lambda self, stage, i: self.x)
engine("output without a graph", save=save_a_copy_without_graph)
engine("saved still holds it", load=lambda self, stage, i: self.saved[stage, i])


def load_the_last(self, stage, i):
    return self.saved.popitem()[1]


engine("was the last one taken, where another one is due?", load=load_the_last)


def wait_for_a_gradient(self, stage, i):
    return self.mail.receive("B", stage, i)


engine("nobody sends it a gradient: rank 2 would wait for ever", take_gradient=wait_for_a_gradient)
engine(
    "only a loss, one number, starts a backward by itself",
    run_backward=lambda self, stage, out, grad: out.backward(),
)
engine(
    "the gradient of out.sum()",
    run_backward=lambda self, stage, out, grad: out.sum().backward(),
)
engine(
    "backward has not run through the module",
    run_backward=lambda self, stage, out, grad: None,
)


def send_gradient(give, to=lambda stage: stage - 1, asks=lambda stage: stage > 0, keeps=True):
    def send_back(self, stage, i, x, grad):
        if asks(stage):
            send = self.mail.send("B", give(x, grad), to(stage), i)
            if keeps:
                self.sends.append(send)

    return send_back


class SendsTheGradientThatCame(Parts):
    def send_back(self, stage, i, x, grad):
        if stage > 0:
            grad = x.grad if grad is None else grad
            self.sends.append(self.mail.send("B", grad, stage - 1, i))


wrong("12.2", "that is the gradient of the output, as it came")(SendsTheGradientThatCame)
engine("here that is stage - 1", send_back=send_gradient(lambda x, g: x.grad, lambda s: s + 1))
engine(
    "nobody waits for its gradient",
    send_back=send_gradient(lambda x, grad: x.grad, asks=lambda stage: True),
)
engine("is not in self.sends", send_back=send_gradient(lambda x, grad: x.grad, keeps=False))
engine("would wait for its gradient for ever", send_back=lambda *args: None)
engine("forward ran 0 more times", compute=lambda self, stage, x: self.stages[stage](x))
engine(
    "forward ran 1 more times",
    compute=lambda self, stage, x: checkpoint(self.stages[stage], x, use_reentrant=False),
)


@wrong("12.2", "without a graph - the module ran without autograd")
class PlainReentrantCheckpoint(Parts):
    def compute(self, stage, x):
        module = self.stages[stage]
        return checkpoint(module, x, use_reentrant=True) if self.recompute else module(x)


@wrong("12.2", "self.spans has 0 entries")
class WithoutSpans(Parts):
    def forward(self, stage, i):
        x = self.take(stage, i)
        out = self.compute(stage, x)
        if stage == self.last:
            out = self.loss(out, i)
            self.keep_loss(out)
        self.save(stage, i, x, out, self.pass_on(stage, i, x, out))


@wrong("12.2", "holds its receive - waiting would count as work")
class ReceivesInsideTheSpan(Parts):
    def backward(self, stage, i):
        x, out, _ = self.load(stage, i)
        with self.span(Action("B", stage, i)):
            grad = self.take_gradient(stage, i)
            self.run_backward(stage, out, grad)
        self.send_back(stage, i, x, grad)


@wrong("12.2", "computes outside its span")
class ComputesOutsideTheSpan(Parts):
    def backward(self, stage, i):
        x, out, _ = self.load(stage, i)
        grad = self.take_gradient(stage, i)
        self.run_backward(stage, out, grad)
        with self.span(Action("B", stage, i)):
            self.send_back(stage, i, x, grad)


def share(send=lambda self, total: None, give=lambda self, total: total):
    def share_loss(self):
        total = sum(self.losses, torch.zeros(()))
        send(self, total)
        return give(self, total)

    return share_loss


def from_rank(src):
    return lambda self, total: dist.broadcast(total, group=self.group, group_src=src(self))


def on_the_last_rank(self, total):
    return total if dist.get_rank(self.group) == self.last % self.p else None


def mean_over_all(self, total):
    dist.all_reduce(total, group=self.group)
    total /= self.p


def src_of_the_job(self, total):
    dist.broadcast(total, src=self.last % self.p)


LAST = from_rank(lambda self: self.last % self.p)
engine("the zeros of a rank without the last stage went", share_loss=share(from_rank(lambda s: 0)))
engine("self.last % self.p - group_src", share_loss=share(from_rank(lambda self: self.last)))
engine("nothing was sent to this one", share_loss=share())
engine("the mean over the ranks", share_loss=share(mean_over_all))
engine("`group` is not passed on", share_loss=share(src_of_the_job))
engine("every rank gets the loss", share_loss=share(LAST, on_the_last_rank))
engine("divided by m before", share_loss=share(LAST, lambda self, total: total / self.m))


@wrong("12.2", "last micro-batch only")
class LossOfTheLastMicroBatch(Parts):
    def share_loss(self):
        total = self.losses[-1].clone() if self.losses else torch.zeros(())
        dist.broadcast(total, group=self.group, group_src=self.last % self.p)
        return total


# What a student gave after these.


@wrong("12.2", "waits until its own message is taken, that of B")
class WaitsForItsGradientsInBackward(Parts):
    def backward(self, stage, i):
        for work in self.sends:
            work.wait()
        self.sends.clear()
        super().backward(stage, i)


@right("12.2")
class WaitsForTheForwardsMessageAtOnce(Parts):
    def load(self, stage, i):
        x, out, send = self.saved.pop((stage, i))
        if send is not None:
            send.wait()
        return x, out, None


@right("12.2")
class SendsTheOutputItself(Parts):
    def pass_on(self, stage, i, x, out):
        return None if stage == self.last else self.mail.send("F", out, stage + 1, i)


@wrong("12.2", "keeps the graph - what was sent has it")
class KeepsTheOutputItself(SendsTheOutputItself):
    def save(self, stage, i, x, out, send):
        self.kept = [*getattr(self, "kept", []), out]
        super().save(stage, i, x, out, send)


@wrong("12.2", "the loss that is kept is not divided by m")
class KeepsTheWholeLoss(Parts):
    def keep_loss(self, loss):
        self.losses.append(loss.detach() * self.m)


@wrong("12.2", "is of 'F0' - a span is noted with its Action")
class NamesTheSpan(Parts):
    def span(self, action):
        return super().span(f"{action.kind}{action.microbatch}")


class OneStageOnly(Parts):
    def compute(self, stage, x):
        module = self.stages[0]
        return checkpoint(module, x, use_reentrant=False) if self.recompute else module(x)


def all_inputs(self, stage, i):
    return self.inputs if stage == 0 else self.mail.receive("F", stage, i).requires_grad_()


def first_by_rank(self, stage, i):
    if dist.get_rank(self.group) == 0:
        return self.inputs[i]
    return self.mail.receive("F", stage, i).requires_grad_()


def share_inside_an_if(self):
    total = sum(self.losses)
    if self.losses:
        dist.broadcast(total, group=self.group, group_src=self.last % self.p)
    return total


def share_in_one_dimension(self):
    total = sum(self.losses, torch.zeros(1))
    dist.broadcast(total, group=self.group, group_src=self.last % self.p)
    return total


def keep_among_sends(self, stage, i, x, out):
    if stage < self.last:
        self.sends.append(self.mail.send("F", out.detach(), stage + 1, i))


def send_without_mail(self, stage, i, x, out):
    if stage < self.last:
        dist.send(out.detach(), stage + 1)


wrong("12.2", "self.stages[stage]")(OneStageOnly)
engine("holds all m micro-batches - self.inputs[i]", take=all_inputs)
engine("got tokens: rank 0 may have other stages", take=first_by_rank)
engine("nothing was sent to this one", share_loss=lambda self: sum(self.losses))
engine("also by those that receive: not inside an `if`", share_loss=share_inside_an_if)
engine("a scalar has no dimensions", share_loss=share_in_one_dimension)
engine("self.sends is for backward's", pass_on=keep_among_sends)
engine("calls dist.send by itself", pass_on=send_without_mail)
engine(
    "only where self.recompute",
    compute=lambda self, stage, x: checkpoint(self.stages[stage], x, use_reentrant=False),
)


# ---- 12.3 sum_tied --------------------------------------------------------------------------


@right("12.3")
def sum_tied_with_all_parts_at_once(tied, group=None):
    rank = dist.get_rank(group)
    for param, ranks in tied:
        if rank not in ranks:
            continue
        first = ranks[0]
        if rank != first:
            dist.isend(param.grad, group=group, group_dst=first).wait()
            param.grad = torch.zeros_like(param.grad)
            dist.recv(param.grad, group=group, group_src=first)
            continue
        parts = [torch.empty_like(param) for _ in ranks[1:]]
        works = [
            dist.irecv(part, group=group, group_src=other)
            for part, other in zip(parts, ranks[1:], strict=True)
        ]
        for work in works:
            work.wait()
        param.grad = param.grad + sum(parts)
        for other in ranks[1:]:
            dist.isend(param.grad, group=group, group_dst=other).wait()


@right("12.3")
def sum_tied_everybody_to_everybody(tied, group=None):
    rank = dist.get_rank(group)
    for param, ranks in tied:
        if rank in ranks:
            own = param.grad.clone()
            others = [other for other in ranks if other != rank]
            works = [dist.isend(own, group=group, group_dst=other) for other in others]
            for other in others:
                part = torch.empty_like(own)
                dist.recv(part, group=group, group_src=other)
                param.grad += part
            for work in works:
                work.wait()


def summing(
    add=lambda param, part, num: param.grad.add_(part),
    end=lambda param, num: None,
    gives=lambda param: param.grad,
    back=lambda param, total: param.grad.copy_(total),
    options=lambda verb, rank, group: {"group": group, f"group_{verb}": rank},
    early=False,
    is_answered=True,
):
    """A sum_tied in which one part can be another."""

    def sum_tied(tied, group=None):
        rank = dist.get_rank(group)
        for param, (first, *others) in tied:
            if rank == first:
                for other in others:
                    part = torch.empty_like(param)
                    dist.recv(part, **options("src", other, group))
                    add(param, part.detach(), 1 + len(others))
                    if early:
                        dist.send(param.grad, **options("dst", other, group))
                end(param, 1 + len(others))
                for other in others * is_answered * (not early):
                    dist.send(param.grad, **options("dst", other, group))
            elif rank in others:
                dist.send(gives(param), **options("dst", first, group))
                if is_answered:
                    total = torch.empty_like(param)
                    dist.recv(total, **options("src", first, group))
                    back(param, total.detach())

    return sum_tied


def add_to_the_weight(param, part, num):
    param.data += part


def all_reduce_everywhere(tied, group=None):
    for param, _ in tied:
        dist.all_reduce(param.grad, group=group)


def all_reduce_where_there_is_one(tied, group=None):
    for param, _ in tied:
        if param.grad is not None:
            dist.all_reduce(param.grad, group=group)


def all_reduce_among_the_users(tied, group=None):
    rank = dist.get_rank(group)
    for param, ranks in tied:
        if rank in ranks:
            dist.all_reduce(param.grad, group=dist.new_group(ranks))


def send_first(tied, group=None):
    rank = dist.get_rank(group)
    for param, ranks in tied:
        if rank in ranks:
            others = [other for other in ranks if other != rank]
            own = param.grad.clone()
            for other in others:
                dist.send(own, group=group, group_dst=other)
            for other in others:
                part = torch.empty_like(own)
                dist.recv(part, group=group, group_src=other)
                param.grad += part


def every_rank_is_a_user(tied, group=None):
    rank = dist.get_rank(group)
    for param, (first, *others) in tied:
        if rank == first:
            for other in others:
                part = torch.empty_like(param.grad)
                dist.recv(part, group=group, group_src=other)
                param.grad += part
            for other in others:
                dist.send(param.grad, group=group, group_dst=other)
        else:
            dist.send(param.grad, group=group, group_dst=first)
            dist.recv(param.grad, group=group, group_src=first)


WRONG["12.3"] += [
    (summing(end=lambda param, num: param.grad.div_(num)), "the mean: but each use has a part"),
    (summing(is_answered=False), "the sum never came back"),
    (summing(add=lambda param, part, num: param.grad.copy_(part)), "replaced by the part of rank"),
    (summing(back=lambda param, total: param.grad.add_(total)), "a part is in the sum twice"),
    (summing(early=True), "sent back before all parts had come"),
    (summing(add=add_to_the_weight), "the weights are others"),
    (summing(gives=lambda param: param.detach()), "what came is a weight"),
    (summing(options=lambda verb, rank, group: {"group": group, verb: rank}), "count"),
    (summing(options=lambda verb, rank, group: {verb: rank}), "share no parameter"),
    (all_reduce_everywhere, "have no such gradient"),
    (all_reduce_where_there_is_one, "others have no such gradient, and do nothing"),
    (send_first, "all of these send first"),
    (every_rank_is_a_user, "have no such gradient"),
    (lambda tied, group=None: None, "nothing was sent, or nothing added"),
    (lambda tied, group=None: tied, "nothing was sent, or nothing added"),
]


# What a student gave after these.


def begin_and_forget(tied, group=None):
    rank = dist.get_rank(group)
    for param, (first, *others) in tied:
        if rank == first:
            for other in others:
                part = torch.empty_like(param.grad)
                dist.recv(part, group=group, group_src=other)
                param.grad += part
            for other in others:
                dist.send(param.grad, group=group, group_dst=other)
        elif rank in others:
            dist.isend(param.grad, group=group, group_dst=first)
            dist.recv(param.grad, group=group, group_src=first)


def all_receive_first(tied, group=None):
    rank = dist.get_rank(group)
    for param, (first, *others) in tied:
        if rank == first:
            for other in others:
                part = torch.empty_like(param.grad)
                dist.recv(part, group=group, group_src=other)
                param.grad += part
            for other in others:
                dist.send(param.grad, group=group, group_dst=other)
        elif rank in others:
            dist.recv(param.grad, group=group, group_src=first)
            dist.send(param.grad, group=group, group_dst=first)


def rank_of_the_job(tied, group=None):
    rank = dist.get_rank()
    for param, (first, *others) in tied:
        if rank == first:
            for other in others:
                part = torch.empty_like(param.grad)
                dist.recv(part, group=group, group_src=other)
                param.grad += part
            for other in others:
                dist.send(param.grad, group=group, group_dst=other)
        elif rank in others:
            dist.send(param.grad, group=group, group_dst=first)
            dist.recv(param.grad, group=group, group_src=first)


def zeros_where_there_is_none(tied, group=None):
    for param, ranks in tied:
        part = param.grad if dist.get_rank(group) in ranks else torch.zeros_like(param)
        dist.all_reduce(part, group=group)


def the_first_parameter(tied, group=None):
    wiring.sum_tied(tied[:1], group)


def two_ranks_of_each(tied, group=None):
    wiring.sum_tied([(param, ranks[:2]) for param, ranks in tied], group)


WRONG["12.3"] += [
    (begin_and_forget, "isend and irecv only begin"),
    (all_receive_first, "both wait to receive"),
    (the_first_parameter, "parameters before it were summed"),
    (two_ranks_of_each, "was left out: two or more ranks may use a parameter"),
    (rank_of_the_job, "get_rank() counts over the whole job"),
    (zeros_where_there_is_none, "zeros of theirs would cost a message"),
]


# ---- 12.10 torch_pipeline -------------------------------------------------------------------


@right("12.10")
def torch_pipeline_written_out(stages, num_stages, m, loss_fn, kind, group=None):
    parts = []
    for number in sorted(stages):
        where = next(stages[number].parameters()).device
        parts.append(
            pipelining.PipelineStage(stages[number], number, num_stages, where, group=group)
        )
    if kind == "gpipe":
        return pipelining.ScheduleGPipe(parts[0], n_microbatches=m, loss_fn=loss_fn)
    if kind == "1f1b":
        return pipelining.Schedule1F1B(parts[0], n_microbatches=m, loss_fn=loss_fn)
    if kind == "interleaved":
        return pipelining.ScheduleInterleaved1F1B(parts, n_microbatches=m, loss_fn=loss_fn)
    return pipelining.ScheduleInterleavedZeroBubble(parts, n_microbatches=m, loss_fn=loss_fn)


NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
}


def torch_with(
    index=lambda number, place, group: number,
    count=lambda num_stages, group: num_stages,
    group_of=lambda group: group,
    name=lambda kind: NAMES[kind],
    given=lambda kind, parts: parts if kind in ("interleaved", "zero-bubble") else parts[0],
    m_of=lambda m: m,
    loss=lambda loss_fn: loss_fn,
    where="cpu",
    **options,
):
    """A torch_pipeline in which one part can be another."""

    def torch_pipeline(stages, num_stages, m, loss_fn, kind, group=None):
        parts = [
            pipelining.PipelineStage(
                module,
                index(number, place, group),
                count(num_stages, group),
                torch.device(where),
                group=group_of(group),
            )
            for place, (number, module) in enumerate(stages.items())
        ]
        schedule = getattr(pipelining, f"Schedule{name(kind)}")
        return schedule(given(kind, parts), m_of(m), loss_fn=loss(loss_fn), **options)

    return torch_pipeline


def without_m(stages, num_stages, m, loss_fn, kind, group=None):
    number, module = next(iter(stages.items()))
    stage = pipelining.PipelineStage(module, number, num_stages, "cpu", group=group)
    return pipelining.ScheduleGPipe(stage, loss_fn=loss_fn)


def several_in_one(stages, num_stages, m, loss_fn, kind, group=None):
    stage = nn.Sequential(*stages.values())
    stage = pipelining.PipelineStage(stage, 0, num_stages, torch.device("cpu"), group=group)
    return pipelining.ScheduleGPipe(stage, m, loss_fn=loss_fn)


def number_of_its_own(stages, num_stages, m, loss_fn, kind, group=None):
    return torch_with(count=lambda n, group: len(stages))(
        stages, num_stages, m, loss_fn, kind, group
    )


def class_not_called(stages, num_stages, m, loss_fn, kind, group=None):
    return getattr(pipelining, f"Schedule{NAMES[kind]}")


def mean_taken_twice(stages, num_stages, m, loss_fn, kind, group=None):
    return wiring.torch_pipeline(
        stages, num_stages, m, lambda out, y: loss_fn(out, y) / m, kind, group
    )


RIGHT["12.10"].append(torch_with())
WRONG["12.10"] += [
    (number_of_its_own, "num_stages counts the stages of the whole model"),
    (torch_with(given=lambda kind, parts: parts), "not a list - the one that was made"),
    (class_not_called, "that is the class; a schedule is made by calling it"),
    (mean_taken_twice, "the loss was divided by m twice"),
    (torch_with(scale_grads=False), "times as large: the sum over micro-batches"),
    (torch_with(where="cuda"), "the device is that of the parameters"),
]
WRONG["12.10"] += [
    (torch_with(given=lambda kind, parts: parts), "gpipe and 1f1b take one PipelineStage"),
    (torch_with(given=lambda kind, parts: parts[0]), "zero-bubble take a list"),
    (torch_with(index=lambda n, place, group: dist.get_rank(group)), "number of the stage"),
    (torch_with(index=lambda n, place, group: place), "number of the stage"),
    (torch_with(count=lambda n, group: dist.get_world_size(group)), "not the ranks"),
    (torch_with(group_of=lambda group: None), "`group` is not passed on"),
    (torch_with(loss=lambda loss_fn: None), "the schedule has no loss_fn"),
    (torch_with(name=lambda kind: "1F1B", given=lambda kind, parts: parts[0]), '"gpipe" is Sch'),
    (torch_with(m_of=lambda m: 1), "hand over m, 5"),
    (torch_with(m_of=lambda m: 2 * m), "10 micro-batches"),
    (torch_with(scale_grads=False), "leave scale_grads on"),
    (without_m, "the number of micro-batches"),
    (several_in_one, "number of the stage"),
]


# ---- 12.11 make_grid ------------------------------------------------------------------------


@right("12.11")
def grid_of_a_mesh(num_stages):
    world_size = dist.get_world_size()
    if world_size % num_stages != 0:
        raise ValueError(f"{world_size} ranks, {num_stages} stages")
    mesh = init_device_mesh("cpu", (num_stages, world_size // num_stages))
    return mesh.get_group(0), mesh.get_group(1)


@right("12.11")
def grid_in_one_loop(num_stages):
    rank, n = dist.get_rank(), dist.get_world_size()
    d, rest = divmod(n, num_stages)
    if rest:
        raise ValueError("uneven")
    grid = torch.arange(n).view(num_stages, d)
    found = []
    for lists in (grid.t().tolist(), grid.tolist()):
        for ranks in lists:
            group = dist.new_group(ranks)
            if rank in ranks:
                found.append(group)
    return found


@right("12.11")
def grid_where_members_meet(num_stages):
    rank, n = dist.get_rank(), dist.get_world_size()
    if n % num_stages:
        raise ValueError("uneven")
    d = n // num_stages
    lists = range(rank % d, n, d), range(rank // d * d, rank // d * d + d)
    return tuple(dist.new_group(list(ranks), use_local_synchronization=True) for ranks in lists)


def grid_with(
    asks=True,
    d_of=lambda n, num_stages: n // num_stages,
    columns=lambda n, d: [range(first, n, d) for first in range(d)],
    rows=lambda n, d: [range(first, first + d) for first in range(0, n, d)],
    make=lambda ranks: dist.new_group(list(ranks)),
    pick=lambda groups, lists, rank: next(
        g for g, r in zip(groups, lists, strict=True) if rank in r
    ),
    back=lambda pipe, row: (pipe, row),
):
    """A make_grid in which one part can be another."""

    def make_grid(num_stages):
        rank, n = dist.get_rank(), dist.get_world_size()
        if asks and n % num_stages:
            raise ValueError("uneven")
        d = d_of(n, num_stages)
        columns_, rows_ = columns(n, d), rows(n, d)
        pipes = [make(ranks) for ranks in columns_]
        lines = [make(ranks) for ranks in rows_]
        return back(pick(pipes, columns_, rank), pick(lines, rows_, rank))

    return make_grid


def only_its_own(num_stages):
    rank, n = dist.get_rank(), dist.get_world_size()
    if n % num_stages:
        raise ValueError("uneven")
    d = n // num_stages
    pipe = dist.new_group(list(range(rank % d, n, d)))
    return pipe, dist.new_group(list(range(rank // d * d, rank // d * d + d)))


def only_where_it_is_in(ranks):
    return dist.new_group(list(ranks)) if dist.get_rank() in ranks else None


def raised_on_rank_0(num_stages):
    rank, n = dist.get_rank(), dist.get_world_size()
    if n % num_stages and rank == 0:
        raise ValueError("uneven")
    d = max(1, n // num_stages)
    pipes = [dist.new_group(list(range(first, n, d))) for first in range(d)]
    rows = [dist.new_group(list(range(s, min(n, s + d)))) for s in range(0, n, d)]
    return pipes[rank % d], rows[rank // d]


def stages_as_replicas(num_stages):
    rank, n = dist.get_rank(), dist.get_world_size()
    if n % num_stages:
        raise ValueError("uneven")
    d = num_stages
    pipes = [dist.new_group(list(range(first, n, d))) for first in range(d)]
    rows = [dist.new_group(list(range(s * d, (s + 1) * d))) for s in range(num_stages)]
    return pipes[rank % d], rows[rank // d]


RIGHT["12.11"].append(grid_with())
WRONG["12.11"] += [
    (raised_on_rank_0, "and only some ranks say so"),
    (stages_as_replicas, "with d = num_stages too many are listed"),
    (grid_with(d_of=lambda n, num_stages: n / num_stages), "a / b is a float"),
]
WRONG["12.11"] += [
    (only_its_own, "new_group is called by all ranks"),
    (grid_with(make=only_where_it_is_in), "new_group is called by all ranks"),
    (grid_with(back=lambda pipe, row: (row, pipe)), "the two are swapped"),
    (grid_with(d_of=lambda n, num_stages: num_stages), "d = N // num_stages"),
    (grid_with(asks=False), "4 is no multiple of 3"),
    (grid_with(make=list), "these are ranks"),
    (grid_with(pick=lambda groups, lists, rank: groups[-1]), "gets no group from new_group"),
    (grid_with(pick=lambda groups, lists, rank: groups[0]), "gets no group from new_group"),
    (grid_with(back=lambda pipe, row: pipe), "two groups"),
    (grid_with(back=lambda pipe, row: None), "returns None"),
    (
        grid_with(rows=lambda n, d: [range(first, n, d) for first in range(d)]),
        "rank r has stage r // d of replica r % d",
    ),
    (grid_with(rows=lambda n, d: [range(n)]), "row [0, 1, 2, 3]"),
    (
        grid_with(
            columns=lambda n, d: [range(first, first + n // d) for first in range(0, n, n // d)],
            rows=lambda n, d: [range(first, n, n // d) for first in range(n // d)],
        ),
        "or consecutive ranks are a pipeline",
    ),
]


RIGHT = _schedules.RIGHT | RIGHT
WRONG = _schedules.WRONG | WRONG
