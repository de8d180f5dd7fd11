"""12.2: the engine's forward and backward, each action looked at by itself.

A probe stands in for the mail: what a rank receives is drawn, and what it sends is written down. So
no wrong message can hang the others, and the first action that differs is told. Only share_loss,
which is given, talks to other ranks.
"""

import time
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.checks.engine import cases
from manyhands.checks.engine.card import Wrong
from manyhands.checks.engine.spec import Place, Spec
from manyhands.checks.engine.values import difference, malformed, same
from manyhands.pipeline import engine, schedules
from manyhands.pipeline.schedules import Action, Schedule

T, D, TOKENS = 3, 4, 7
SIZE = 2  # samples in a micro-batch


class Step(NamedTuple):
    """One engine. `before`: gradients of an earlier step stand in .grad and add up."""

    seed: int
    kind: str
    m: int
    num_steps: int = 1
    recompute: bool = False
    dropout: float = 0.0
    before: bool = False


def engines(n: int) -> list[Step]:
    """One micro-batch; gradients from before, two steps; several stages; recompute; validation."""
    seed = cases.draw_seed()
    return [
        Step(seed, "gpipe", 1),
        Step(seed + 1, "gpipe", 3, num_steps=2, before=True),
        Step(seed + 2, "interleaved" if n > 1 else "one_f_one_b", n + n % 2),
        Step(seed + 3, "one_f_one_b", 3, recompute=True, dropout=0.5),
        Step(seed + 4, "forwards", 2),
    ]


def make_schedule(case: Step, p: int) -> Schedule:
    """The actions of all ranks."""
    return getattr(schedules, case.kind)(p, case.m)


class Stage(nn.Module):
    """An embedding on the first stage, a linear layer on others; one weight is frozen.

    Notes when it computes, in which mode, and refers to its last output without holding it.
    """

    def __init__(self, is_first: bool, dropout: float) -> None:
        super().__init__()
        self.layer = nn.Embedding(TOKENS, D) if is_first else nn.Linear(D, D)
        self.scale = nn.Parameter(1 + torch.rand(D), requires_grad=False)
        self.dropout = nn.Dropout(dropout)
        self.times: list[tuple[str, float]] = []
        self.modes: set[bool] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.times.append(("F", time.time()))
        self.modes.add(self.training)
        out = self.dropout(torch.tanh(self.layer(x) * self.scale))  # (B, T, D)
        if out.requires_grad:
            out.register_hook(lambda grad: self.times.append(("B", time.time())))
        self.output = weakref.ref(out)
        return out

    def flat_grad(self) -> Tensor:
        """All gradients in a row; zeros where there is none."""
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters()]
        return torch.cat([grad.flatten() for grad in grads])


def loss_fn(out: Tensor, targets: Tensor) -> Tensor:
    """A mean that is negative, and not the same with its arguments the other way round."""
    return (out * (targets + out)).mean() - 5


class Sent:
    """Stands for the work of a send; notes in which action it is waited for."""

    def __init__(self, probe: "Probe") -> None:
        self.probe = probe
        self.action = probe.action
        self.is_waited = False

    def wait(self, *args: object) -> bool:
        """Note it. Only the forward's send is known to have arrived, in its own backward."""
        now = self.probe.action
        is_own_backward = self.action.kind == "F" and now == self.action._replace(kind="B")
        if now is not None and not is_own_backward:
            self.probe.waits_early = True
        self.is_waited = True
        return True

    def is_completed(self) -> bool:
        """Nobody can rely on that."""
        return False


class Probe:
    """In place of the mail of an engine."""

    def __init__(self, mail: object, seed: int) -> None:
        self.mail = mail
        self.seed = seed
        self.sent: list[Sent] = []
        self.outputs: dict[tuple[int, int], Callable] = {}
        self.begin(None)

    def begin(self, action: Action | None) -> None:
        """Before an action."""
        self.action = action
        self.receives: list[str] = []
        self.sends: list[str] = []
        self.values: list[Tensor | None] = []
        self.has_graph = False
        self.waits_early = False
        self.came_s = 0.0
        self.work: Sent | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self.mail, name)

    def send(self, kind: str, tensor: Tensor, stage: int, i: int) -> Sent:
        """Write a message down."""
        self.sends.append(f"{kind} for stage {stage}, micro-batch {i}")
        is_tensor = isinstance(tensor, Tensor)
        self.values.append(tensor.detach().clone() if is_tensor else None)
        self.has_graph |= is_tensor and tensor.requires_grad
        self.work = Sent(self)
        self.sent.append(self.work)
        return self.work

    def receive(self, kind: str, stage: int, i: int) -> Tensor:
        """A drawn tensor."""
        self.receives.append(f"{kind} for stage {stage}, micro-batch {i}")
        time.sleep(1e-4)
        numbers = [self.seed, kind == "F", *(one for one in (stage, i) if isinstance(one, int))]
        self.came_s = time.time()
        return torch.randn(SIZE, T, D, generator=cases.generator(*numbers))


@contextmanager
def only_by_mail(action: Action) -> object:
    """Refuse messages that an action sends by itself."""

    def refuse(name: str) -> Callable:
        def call(*args: object, **named: object) -> None:
            raise Wrong(
                f"{action_words(action)} calls dist.{name}",
                "A message without the tag of the mail can be taken for another one.",
                "Use self.mail.send and self.mail.receive.",
            )

        return call

    names = ("send", "isend", "recv", "irecv", "broadcast", "all_reduce", "barrier")
    with mock.patch.multiple(dist, **{name: refuse(name) for name in names}):
        yield


def action_words(action: Action) -> str:
    """An action in words."""
    return f"{action.kind}{action.microbatch} of stage {action.stage}"


def steps_seen(answer: type, case: Step, place: Place) -> dict:
    """Each action, and what a step gives."""
    schedule = make_schedule(case, place.n)
    last = max(action.stage for actions in schedule for action in actions)
    mine = sorted({action.stage for action in schedule[place.rank]})
    torch.manual_seed(case.seed)
    built = [Stage(stage == 0, case.dropout) for stage in range(last + 1)]
    stages = {stage: built[stage] for stage in mine}
    back = place.group or dist.group.WORLD  # no group is made: the probe takes all messages
    given = (stages, schedule, loss_fn, (SIZE, T, D), case.recompute, back)
    made = answer(*given, **place.options)
    if not all(hasattr(made, name) for name in ("forward", "backward", "step", "mail")):
        raise malformed(made, "an engine with forward, backward, step and mail", "Keep these.")
    probe = made.mail = Probe(made.mail, case.seed)
    for module in stages.values():
        for param in module.parameters():
            if case.before and param.requires_grad:
                param.grad = torch.ones_like(param)
    seen: dict = {}
    for name in ("forward", "backward"):
        setattr(made, name, watched(made, getattr(made, name), name[0].upper(), probe, seen, case))
    draw = cases.generator(case.seed, 9)
    for step in range(case.num_steps):
        probe.sent.clear()
        inputs = torch.randint(TOKENS, (SIZE * case.m, T), generator=draw)
        targets = torch.randn(SIZE * case.m, T, D, generator=draw)
        seen["step"] = step
        with torch.set_grad_enabled(case.kind != "forwards"):
            given = inputs if 0 in mine else None, targets if last in mine else None
            loss = made.step(*given)
        seen |= of_a_step(made, loss, probe, stages, seen.pop("step"), schedule[place.rank])
    return seen


def of_a_step(
    made: engine.Pipeline, loss: object, probe: Probe, stages: dict, step: int, actions: list
) -> dict:
    """What is left after a step."""
    if not isinstance(loss, Tensor):
        raise malformed(loss, "the loss as a scalar tensor", "The job calls methods of a tensor.")
    again = " of a second step" if step else ""
    modes = set().union(*(module.modes for module in stages.values()))
    return {
        f"the loss{again} has no graph": not loss.requires_grad,
        f"the shape of the loss{again}": list(loss.shape),
        f"the loss{again}": loss.detach().float().sum(),
        f"each action{again} has its span": [span[0] for span in made.spans] == actions,
        f"every send{again} was waited for": all(work.is_waited for work in probe.sent),
        f"the modules are in training mode{again}": modes == {True},
    }


def watched(
    made: engine.Pipeline, method: Callable, kind: str, probe: Probe, seen: dict, case: Step
) -> Callable:
    """The learner's forward or backward, looked at when it is done."""

    outputs = probe.outputs

    def run(stage: int, i: int) -> None:
        nonlocal seen
        action = Action(kind, stage, i)
        module = made.stages[stage]
        module.times.clear()
        probe.begin(action)
        num_losses = len(made.losses)
        num_spans = len(made.spans)
        with only_by_mail(action):
            method(stage, i)
        name = action_words(action) + (" in a second step" if seen["step"] else "")
        seen[f"{name} receives"] = probe.receives
        seen[f"{name} runs the module forward, times"] = [k for k, _ in module.times].count("F")
        seen[f"{name} sends"] = probe.sends
        seen[f"{name}, the tensor that is sent"] = probe.values
        seen[f"{name}, what is sent has no graph"] = not probe.has_graph
        waits = f"{name} waits for no send whose receiver may not have come yet"
        seen[waits] = not probe.waits_early
        if kind == "F":
            seen |= of_a_forward(made, name, action, probe, made.losses[num_losses:], case)
            outputs[stage, i] = getattr(module, "output", lambda: None)
        else:
            dropped = (stage, i) not in made.saved
            # torch's checkpoint keeps it until Python's next search for garbage.
            is_gone = outputs.pop((stage, i))() is None or case.recompute
            seen[f"{name}: nobody holds the stage's output any longer"] = dropped and is_gone
            seen[f"{name}, the gradients of the stage"] = module.flat_grad()
            seen[f"{name} takes its micro-batch out of self.saved"] = dropped
            seen[f"{name} puts its send into self.sends"] = probe.work is None or any(
                work is probe.work for work in made.sends
            )
        seen |= of_a_span(name, action, made.spans[num_spans:], probe, module.times)
        probe.begin(None)

    return run


def of_a_forward(
    made: engine.Pipeline, name: str, action: Action, probe: Probe, losses: list, case: Step
) -> dict:
    """What a forward leaves for its backward, and the loss."""
    saved = made.saved.get(action[1:])
    is_triple = isinstance(saved, tuple | list) and len(saved) == 3
    x, out, send = saved if is_triple else (None, None, None)
    has_graph = isinstance(out, Tensor) and out.requires_grad
    wanted = case.kind != "forwards"
    values = [torch.as_tensor(loss).detach().float().sum() for loss in losses]
    bare = not any(isinstance(loss, Tensor) and loss.requires_grad for loss in losses)
    asks = action.stage == 0 or (isinstance(x, Tensor) and x.requires_grad)
    return {
        f"{name} leaves (input, output, send or None) in self.saved[stage, i]": is_triple,
        f"{name}, the saved input": x.detach().clone() if isinstance(x, Tensor) else None,
        f"{name}, the saved input asks for a gradient": asks,
        f"{name}, the saved output has its graph": has_graph or not wanted,
        f"{name}, the saved output": out.detach().clone() if isinstance(out, Tensor) else None,
        f"{name}, the saved send is its own": send is probe.work,
        f"{name}, what it adds to self.losses": values,
        f"{name}, self.losses has no graph": bare,
    }


def of_a_span(name: str, action: Action, spans: list, probe: Probe, times: list) -> dict:
    """Is there one span, with the computing inside and the receiving outside?"""
    is_own = len(spans) == 1 and spans[0][0] == action
    start_s, stop_s = spans[0][1:] if is_own else (0.0, float("inf"))
    return {
        f"{name} notes one span, of its own Action": is_own,
        f"{name} has received before its span begins": probe.came_s <= start_s or not is_own,
        f"{name} computes inside its span": all(start_s <= at <= stop_s for _, at in times),
    }


def facts_of_messages(found: dict, wanted: dict, case: Step) -> str:
    """What a wrong message would do to the other ranks."""
    name = next((name for name in wanted if not same(found.get(name), wanted[name])), "")
    if name.endswith(" sends"):
        if len(found[name]) < len(wanted[name]):
            return "The stage that needs this message would wait for it for ever."
        return "No stage receives a message with that address."
    if name.endswith(" receives"):
        if len(found[name]) < len(wanted[name]):
            return "What was sent to this stage is not received."
        return "No stage sends a message with that address, so this rank would wait for ever."
    return ""


LOSS = "self.loss_fn(out, self.targets[i]) / self.m"
SEND_B = 'self.mail.send("B", x.grad, stage - 1, i)'
TAKE_B = 'grad = None if stage == self.last else self.mail.receive("B", stage, i)\n'
SPAN_B = 'with self.span(Action("B", stage, i)):\n'
SAVED = "self.saved[stage, i] = x, out, send"
Pipeline = Spec(
    todo="12.2",
    truth=engine.Pipeline,
    layouts=cases.THREE,
    cases=engines,
    observe=steps_seen,
    tell=lambda case: f"a step of {case.kind} with m = {case.m}{', recompute' * case.recompute}",
    say=lambda found, wanted: difference(found, wanted),
    facts=facts_of_messages,
    limit_s=12.0,
    advice={"": "Look at that action alone: what comes in, what is computed, what goes out?"},
    hints=(
        "forward: the input is self.inputs[i] on stage 0, else self.mail.receive('F', stage, i), "
        "which has to ask for a gradient. Receive before `with self.span(Action('F', stage, i))`.",
        "Inside the span, out = self.run(stage, x); the last stage then makes the loss / m from "
        "targets[i] and keeps it without its graph in self.losses. Others send out.detach() to "
        "stage + 1. Keep (x, out, send) in self.saved[stage, i].",
        "backward: pop what was saved, receive the gradient where stage < self.last, then call "
        "torch.autograd.backward(out, grad) inside the span, and wait for the forward's send. "
        "Where stage > 0 send x.grad to stage - 1 and append the work to self.sends.",
    ),
    mistakes=r"""
        {LOSS} => self.loss_fn(out, self.targets[i]) :: The loss is not divided by m, so m gradients
            add up to m times that of the mean. | Divide by self.m, the number of micro-batches.
        {LOSS} => self.loss_fn(out, self.targets[i]) / self.p ::
            The loss is divided by the number of ranks.
        self.targets[i] => self.targets[0] ::
            Every micro-batch is compared with the targets of the first. | Use self.targets[i].
        self.losses.append(out.detach()) => self.losses.append(out) ::
            The kept losses hold their graphs, and with these all activations, until the step ends.
            | Keep the loss without its graph: detach().
        self.mail.receive("F", stage, i).requires_grad_() => self.mail.receive("F", stage, i) ::
            The saved input does not ask for a gradient, so autograd makes none for it. | Only a
            gradient that was asked for is there to be sent: x.requires_grad_() comes first.
        self.mail.send("F", out.detach(), stage + 1, i) => self.mail.send("F", out, stage + 1, i) ::
            The output is sent with its graph, and only numbers should travel. | Send out.detach().
        {SAVED} => {SAVED}\n        send and send.wait() ::
            forward waits until its message is taken; two ranks that do so can wait for each other.
            | Keep the work in self.saved: backward waits for it.
        if send: => if False: ::
            Nobody waits for the forward's send. | backward calls wait() on the saved work.
        self.saved.pop((stage, i)) => self.saved.popitem()[1] :: backward takes what was saved last,
            which is another micro-batch in some schedules. | The key is (stage, i).
        self.saved.pop((stage, i)) => self.saved[stage, i] ::
            What was saved stays, so all activations are kept to the end of the step. | Pop it.
        self.run(stage, x) => self.stages[stage](x) ::
            The module is called directly, so the argument `recompute` has no effect. |
            self.run(stage, x) calls it under checkpoint where that is asked for.
        {TAKE_B}        {SPAN_B} => {SPAN_B}            {TAKE_B} ::
            The gradient is received inside the span, so that waiting counts as work. | Receive
            before `with self.span(...)`, and compute inside of it.
        {SEND_B} => self.mail.send("B", x.grad if grad is None else grad, stage - 1, i) ::
            backward passes on the gradient of its output, as it came. | Send x.grad.
        self.sends.append({SEND_B}) => {SEND_B} :: Nobody keeps the work of the gradient's send, so
            the step cannot wait for it. | Append what self.mail.send returns to self.sends.
    """,
    reasons="""
        implicitly created only for scalar :: Only a loss, which is one number, starts a backward by
            itself. | torch.autograd.backward(out, grad) starts from the gradient that came by mail.
        require gradients :: The first stage takes tokens, which are whole numbers and have no
            gradient. | Call requires_grad_() only on what came by mail.
        does not require grad and does not have a grad_fn :: The output that backward got has no
            graph. | Keep `out` itself in self.saved, and detach only what is sent.
        backward through the graph a second time :: backward ran twice through one output. |
    """,
    module=globals(),
)
