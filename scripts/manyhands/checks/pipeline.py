"""Checks of lesson 12. 12.1 and 12.4 to 12.9 stand in _schedules.py.

12.2 stands between the learner's engine and its mail. One process computes what every stage gets
and gives; so a wrong message is named before it is sent, and a message that nobody sends before
a rank waits for it. After each action it looks at what the action left behind.
"""

import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from manyhands.checks import Lesson, Wrong, _schedules
from manyhands.checks._schedules import (  # noqa: F401
    bubble,
    gpipe,
    in_flight,
    interleaved,
    one_f_one_b,
    partition,
    simulate,
)
from manyhands.checks._wrapping import Seen, in_ranks
from manyhands.checks.shared import Reasons, number, waits
from manyhands.collectives.trees import Group
from manyhands.instruments.ledger import NAMES, NO_CALLS, Entry, Ledger
from manyhands.pipeline import schedules
from manyhands.pipeline.schedules import Action, Schedule

lesson = Lesson("pipeline")
hint, summary, ready, keep = lesson.hint, lesson.summary, lesson.ready, lesson.keep

T, D, TOKENS = 3, 4, 7


# ---- a small model in stages, and what one process makes of it -------------------------------


class Stage(nn.Module):
    """An embedding on the first stage, a linear layer on others; notes when it computes."""

    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.layer = nn.Embedding(TOKENS, D) if is_first else nn.Linear(D, D)
        self.times: list[tuple[str, float]] = []
        self.ran_with_autograd = True

    def forward(self, x: Tensor) -> Tensor:
        self.times.append(("F", time.time()))
        self.ran_with_autograd = torch.is_grad_enabled()
        out = torch.tanh(self.layer(x))  # (B, T, D)
        if out.requires_grad:
            out.register_hook(lambda grad: self.times.append(("B", time.time())))
        return out


def _build(num_stages: int, seed: int) -> list[Stage]:
    torch.manual_seed(seed)
    return [Stage(stage == 0) for stage in range(num_stages)]


def _batch(num: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens (B, T), and what should come out, (B, T, D)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(TOKENS, (num, T), generator=generator)
    return tokens, 2 * torch.randn(num, T, D, generator=generator)


class Truth:
    """Of each (stage, micro-batch): input, output, their gradients, those of the parameters."""

    def __init__(self, num_stages: int, m: int, seed: int, inputs: Tensor, targets: Tensor):
        self.x, self.out, self.grad, self.grads, self.as_ones = {}, {}, {}, {}, {}
        self.targets, self.losses, stages = targets.chunk(m), [], _build(num_stages, seed)
        for i, x in enumerate(inputs.chunk(m)):
            for stage, module in enumerate(stages):
                self.x[stage, i] = x
                x = self.out[stage, i] = module(x)
            loss = nn.functional.mse_loss(x, self.targets[i]) / m
            self.losses.append(loss.item())
            for stage, module in enumerate(stages):
                of = [self.out[stage, i], *module.parameters()]
                self.grad[stage, i], *self.grads[stage, i] = torch.autograd.grad(
                    loss, of, retain_graph=True
                )
                self.as_ones[stage, i] = torch.autograd.grad(
                    self.out[stage, i].sum(), of[1:], retain_graph=True
                )
            # Of the input of the first stage, the tokens, there is no gradient.
            for stage in range(1, num_stages):
                ones = self.out[stage, i].sum()
                before = self.out[stage - 1, i]
                self.as_ones["x", stage, i] = torch.autograd.grad(ones, before, retain_graph=True)[
                    0
                ]


def _close(one: object, other: Tensor) -> bool:
    if not isinstance(one, Tensor) or one.shape != other.shape:
        return False
    return torch.allclose(one.detach().double(), other.detach().double(), atol=1e-6, rtol=1e-4)


def _named(found: Tensor, mistakes: list[tuple], *otherwise: str) -> tuple:
    """Smell and hint of the mistake that gives this value."""
    return next((why for value, *why in mistakes if _close(found, value)), otherwise)


def refuse(seen: str, smell: str = "", try_this: str = "") -> None:
    """End this rank with what is wrong."""
    raise Seen("\n".join([seen, smell, try_this]))


class Guard(Ledger):
    """A ledger that has each message judged before it starts."""

    def __init__(self, judge: Callable[[Entry], None]) -> None:
        super().__init__()
        self.judge = judge
        self.results: list[object] = []  # works: torch loses a message whose work is gone

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # torch's own signature
        name = func.name().split("::")[1].split(".")[0].rstrip("_")
        if func.namespace == "c10d" and name not in NO_CALLS:
            self.judge(self._entry(NAMES.get(name, name), args, None))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace == "c10d":
            self.results.append(result)
        return result


# ---- 12.2 -----------------------------------------------------------------------------------


class Sent:
    """The work of a send; in an action only one may be waited for: of a forward, in its backward.

    The gradient that has come is the answer to that one. Any other may still be on its way.
    """

    def __init__(self, work: dist.Work, walk: "Walk") -> None:
        self.work, self.walk, self.action = work, walk, walk.action

    def wait(self, *args: object) -> bool:
        """Wait, as torch's Work does."""
        now = self.walk.action
        if now and (self.action.kind == "B" or now != self.action._replace(kind="B")):
            own = "" if now == self.action else f", that of {self.action.kind}"
            own += f"{self.action.microbatch} of stage {self.action.stage}" if own else ""
            refuse(
                f"{self.walk.told} waits until its own message is taken{own}",
                "its partner may do the same at this time: then both wait for ever",
                "a forward keeps the work in self.saved, a backward in self.sends; `step` waits "
                "for self.sends at its end",
            )
        return self.work.wait(*args)

    def __getattr__(self, name: str) -> object:
        return getattr(self.work, name)


class Stages(dict):
    """The modules of a rank; another number than theirs is named."""

    def __missing__(self, key: object) -> None:
        smell = "the keys of self.stages are the numbers of this rank's stages"
        refuse(f"self.stages[{key!r}]: this rank has {list(self)}", smell, "self.stages[stage]")


WHAT = {"F": "the activation", "B": "the gradient"}


class Walk:
    """One engine's steps, action by action; also its mail."""

    def __init__(self, engine, mail, schedule: Schedule, group: Group, recompute: bool) -> None:
        self.engine, self.mail, self.recompute = engine, mail, recompute
        self.rank, self.p, self.group = dist.get_rank(group), len(schedule), group
        self.last = max(action.stage for actions in schedule for action in actions)
        self.action: Action | None = None
        self.trains = any(action.kind == "B" for action in schedule[0])

    def begin(self, truth: Truth) -> None:
        """Get ready for one step."""
        self.truth, self.done, self.num_spans, self.num_losses = truth, [], 0, 0
        self.is_mailing, self.with_graph = False, {}

    @property
    def told(self) -> str:
        """Where this rank stands, for people."""
        kind, stage, i = self.action
        return f"{kind}{i} of stage {stage} (of {self.last + 1}; rank {self.rank} of {self.p})"

    # ---- the mail ----

    def __getattr__(self, name: str) -> object:
        return getattr(self.mail, name)

    def send(self, kind: str, tensor: Tensor, stage: int, i: int) -> Sent:
        """Judge, then send."""
        self._judge_address("sends", kind, stage, i)
        self._judge_tensor(kind, tensor)
        if kind == "F" and tensor.requires_grad:
            self.with_graph[self.action[1:]] = weakref.ref(tensor)
        self.is_mailing = True
        self.sent = Sent(self.mail.send(kind, tensor, stage, i), self)
        self.is_mailing = False
        return self.sent

    def receive(self, kind: str, stage: int, i: int) -> Tensor:
        """Judge, then receive."""
        self._judge_address("takes", kind, stage, i)
        self.is_mailing = True
        self.came = self.mail.receive(kind, stage, i)
        self.is_mailing = False
        self.came_s = time.time()
        return self.came

    def _judge_call(self, entry: Entry) -> None:
        """Refuse what a forward or backward sends without its mail."""
        if not self.is_mailing:
            smell = "a message without the tag of the mail can be taken for another one"
            seen = f"{self.told} calls dist.{entry.op} by itself"
            refuse(seen, smell, "self.mail.send and self.mail.receive")

    def _judge_address(self, verb: str, kind: str, stage: int, i: int) -> None:
        """Refuse a message that nobody takes, or that nobody sends."""
        doing, own, micro = self.action
        way = f"{verb} {WHAT.get(kind, repr(kind))} of micro-batch {i}"
        seen = f"{self.told} {way} {'to' if verb == 'sends' else 'for'} stage {stage}"
        if kind != doing:
            smell = 'a forward sends and takes activations, "F"; a backward gradients, "B"'
            refuse(seen, smell, f'here it is "{doing}"')
        if own == (self.last if (verb == "sends") == (doing == "F") else 0):
            self._refuse_the_end(seen, verb, doing)
        step = {"F": 1, "B": -1}[kind] if verb == "sends" else 0
        if stage != own + step:
            smell = "a message is addressed to the stage that takes it"
            words = {0: "its own stage", 1: "stage + 1", -1: "stage - 1"}
            refuse(seen, smell, f"here that is {words[step]}, {own + step}")
        if i != micro:
            refuse(seen, "the number of the micro-batch is part of the address", f"here {micro}")
        if (self.sent if verb == "sends" else self.came) is not None:
            refuse(f"{seen} for the second time", "", "one message for each cut and action")

    def _refuse_the_end(self, seen: str, verb: str, doing: str) -> None:
        reasons = {
            ("sends", "F"): ("there is no stage behind the last", "send where stage < self.last"),
            ("sends", "B"): (
                "the input of the first stage is the batch: nobody waits for its gradient",
                "send where stage > 0",
            ),
            ("takes", "F"): (
                f"nobody sends to the first stage: rank {self.rank} would wait for ever",
                "its input is self.inputs[i]",
            ),
            ("takes", "B"): (
                "no stage is behind the last, so nobody sends it a gradient: rank "
                f"{self.rank} would wait for ever for rank {(self.last + 1) % self.p}",
                "the last stage starts from its loss",
            ),
        }
        refuse(seen, *reasons[verb, doing])

    def _judge_tensor(self, kind: str, tensor: object) -> None:
        _, stage, i = self.action
        truth = self.truth
        if tensor is None and kind == "B":
            ran = any(kind == "B" for kind, _ in self.times)
            smell = (
                "x is not what came by mail" if ran else "backward has not run through the module"
            )
            refuse(f"{self.told} sends None: x.grad is None", smell, "first backward, then x.grad")
        if not isinstance(tensor, Tensor):
            refuse(f"{self.told} sends {tensor!r:.100}", "a message is a tensor")
        others = [j for (s, j) in truth.x if s == stage and j != i]
        if kind == "F":
            wanted = truth.out[stage, i]
            mistakes = [(truth.x[stage, i], "that is the input of the stage", "send the output")]
            mistakes += [(truth.out[stage, j], *_of_another(j)) for j in others]
        else:
            wanted = truth.grad[stage - 1, i]
            own = truth.grad[stage, i]
            mistakes = [
                (own, "that is the gradient of the output, as it came", "send x.grad"),
                (truth.x[stage, i], "that is the input itself", "send x.grad"),
                (truth.out[stage, i], "that is the output", "send x.grad"),
                (truth.as_ones["x", stage, i], *NOT_USED),
                *[(truth.grad[stage - 1, j], *_of_another(j)) for j in others],
            ]
        if not _close(tensor, wanted):
            seen = f"{self.told} sends something else than {WHAT[kind]} of one process"
            if tensor.shape != wanted.shape:
                seen += f": shape {tuple(tensor.shape)}, not {tuple(wanted.shape)}"
            refuse(seen, *_named(tensor, mistakes, "", f"compare it for micro-batch {i}"))

    # ---- before and after an action ----

    def watch(self, method: Callable, after: Callable) -> Callable:
        """The learner's forward or backward, looked at when it is done."""

        def run(stage: int, i: int) -> None:
            kind = "F" if after == self._after_forward else "B"
            self.action = Action(kind, stage, i)
            self.sent = self.came = None
            self.came_s = 0.0
            self.times = self.engine.stages[stage].times
            self.times.clear()
            with Guard(self._judge_call):
                method(stage, i)
            after(stage, i)
            self._look_at_span()
            self.done.append(self.action)
            self.action = None

        return run

    def _after_forward(self, stage: int, i: int) -> None:
        if self.came is None and stage > 0:
            refuse(f"{self.told} took nothing from the mail", "", "self.mail.receive")
        if len(self.times) != 1:
            many = f"ran {len(self.times)} times" if self.times else "did not run"
            refuse(f"{self.told}: the module {many}", "", "self.stages[stage], once")
        if self.sent is None and stage < self.last:
            smell = f"rank {(stage + 1) % self.p} would wait for it for ever"
            refuse(f"{self.told} sent nothing", smell, "self.mail.send to the next stage")
        saved = self.engine.saved
        keys = ", ".join(map(str, saved)) or "nothing"
        if (stage, i) not in saved:
            smell = "the next micro-batch may come before this one goes back"
            refuse(f"after {self.told} saved holds {keys}", smell, "self.saved[stage, i] = ...")
        if not isinstance(saved[stage, i], tuple | list) or len(saved[stage, i]) != 3:
            smell = "`step` unpacks (input, output, work of the send or None)"
            refuse(f"{self.told} saves {type(saved[stage, i]).__name__}", smell, "three values")
        self._look_at_saved(*saved[stage, i])
        if stage == self.last:
            self._look_at_loss(saved[stage, i][1])

    def _look_at_saved(self, x: object, out: object, send: object) -> None:
        _, stage, i = self.action
        seen = f"{self.told} saves"
        if not _close(x, self.truth.x[stage, i]):
            smell = "not the input of this micro-batch"
            refuse(f"{seen} something else as x", smell, "saved is (input, output, send)")
        if stage > 0 and self.trains and not x.requires_grad:
            refuse(f"{seen} an input that asks for no gradient", *NO_GRADIENT)
        if self.trains and not (isinstance(out, Tensor) and out.requires_grad):
            why = "backward has no graph to go through", "detach what is sent, not `out`"
            if not self.engine.stages[stage].ran_with_autograd:
                why = NO_AUTOGRAD
            refuse(f"{seen} an output without a graph", *why)
        if send is not self.sent and any(work is self.sent for work in self.engine.sends):
            smell = (
                "self.sends is for backward's; there it and its activation stay to the step's end"
            )
            refuse(f"{seen} {send!r:.60} as the send", smell, "put it in self.saved[stage, i]")
        if send is not self.sent:
            smell = "torch may drop a message whose work nobody keeps, and `step` waits for it"
            refuse(f"{seen} {send!r:.60} as the send", smell, "keep what self.mail.send returns")

    def _look_at_loss(self, out: Tensor) -> None:
        _, stage, i = self.action
        losses, self.num_losses = self.engine.losses, self.num_losses + 1
        if len(losses) != self.num_losses:
            seen = f"{self.told}: self.losses has {len(losses)}, not {self.num_losses}"
            refuse(seen, "", "append the loss of each micro-batch")
        m = len(self.truth.losses)
        for what, value in (("the output", out), ("self.losses[-1]", losses[-1])):
            found, wanted = number(value, what) if _is_one(value) else None, self.truth.losses[i]
            if found is None or abs(found - wanted) > 1e-5:
                words = "no number" if found is None else f"{found:.4f}"
                undivided = "the loss is not divided by m: m gradients then add up to m times it"
                if value is not out:  # the output was right
                    undivided = "the loss that is kept is not divided by m, as the output is"
                table = [
                    (m, undivided),
                    (m / self.p, "that is divided by p, the ranks; m is the micro-batches"),
                    (1 / m, "that is divided by m twice"),
                ]
                near = (w for factor, w in table if found and abs(found - wanted * factor) < 1e-5)
                refuse(
                    f"{self.told}: {what} is {words}, not {wanted:.4f}",
                    next(near, ""),
                    "divide by self.m",
                )
        if isinstance(losses[-1], Tensor) and losses[-1].requires_grad:
            smell = "it keeps the whole graph, with all activations, until the step is over"
            refuse(f"{self.told}: self.losses[-1] has a graph", smell, "detach() it")

    def _after_backward(self, stage: int, i: int) -> None:
        engine = self.engine
        if stage < self.last and self.came is None:
            smell = "the gradient of the output comes by mail"
            refuse(f"{self.told} took nothing from the mail", smell, "self.mail.receive")
        waiting = [(s, j) for k, s, j in self.done if k == "F" and Action("B", s, j) != self.action]
        wanted = {key for key in waiting if Action("B", *key) not in self.done}
        if (stage, i) in engine.saved:
            smell = "saved still holds it: all activations stay until the step is over"
            refuse(f"{self.told} keeps the graph", smell, "self.saved.pop((stage, i))")
        if (sent := self.with_graph.pop((stage, i), None)) and sent() is not None:
            smell = "what was sent has it, and somebody still holds that"
            refuse(f"{self.told} keeps the graph", smell, "send out.detach()")
        if gone := wanted - set(engine.saved):
            smell = "another micro-batch was dropped"
            refuse(f"{self.told}: saved has lost {gone}", smell, "pop the key (stage, i)")
        self._look_at_gradients()
        if stage > 0 and self.sent is None:
            smell = f"rank {(stage - 1) % self.p} would wait for its gradient for ever"
            refuse(f"{self.told} sent nothing", smell, "self.mail.send to the stage before")
        if stage > 0 and not any(work is self.sent for work in engine.sends):
            smell = "torch may drop a message whose work nobody keeps, and `step` waits for it"
            refuse(f"{self.told}: its send is not in self.sends", smell, "self.sends.append(...)")
        again = sum(kind == "F" for kind, _ in self.times)
        if again != self.recompute:
            smell = "the argument `recompute` says whether forward runs again in backward"
            seen = f"recompute={self.recompute}: in {self.told} forward ran {again} more times"
            only = "" if self.recompute else ", only where self.recompute"
            refuse(seen, smell, f"checkpoint(module, x, use_reentrant=False) in forward{only}")

    def _look_at_gradients(self) -> None:
        _, stage, i = self.action
        grads = self.truth.grads
        done = [j for kind, s, j in self.done if kind == "B" and s == stage]
        before = [sum(grads[stage, j][n] for j in done) for n in range(len(grads[stage, i]))]
        for n, param in enumerate(self.engine.stages[stage].parameters()):
            found = torch.zeros_like(param) if param.grad is None else param.grad
            new, ones = grads[stage, i][n], self.truth.as_ones[stage, i][n]
            if not _close(found, before[n] + new):
                mistakes = [
                    (before[n] + torch.zeros_like(param), "this backward added nothing", ""),
                    (before[n] + ones, *NOT_USED),
                    (new, "the gradients of other micro-batches are gone", "let them add up"),
                    (before[n] + 2 * new, "backward ran twice", "once"),
                ]
                seen = f"after {self.told} the gradients are not those of one process"
                refuse(seen, *_named(found, mistakes, "", "torch.autograd.backward(out, grad)"))

    def _look_at_span(self) -> None:
        spans, self.num_spans = self.engine.spans, self.num_spans + 1
        try_this = f'with self.span(Action("{self.action.kind}", stage, i)): ...'
        if len(spans) != self.num_spans:
            seen = f"after {self.told} self.spans has {len(spans)} entries, not {self.num_spans}"
            refuse(seen, "", try_this)
        if spans[-1][0] != self.action:
            seen = f"after {self.told} the last of self.spans is of {spans[-1][0]!r:.80}"
            refuse(seen, "a span is noted with its Action: kind, stage, micro-batch", try_this)
        _, start_s, stop_s = spans[-1]
        if start_s < self.came_s:
            smell = "waiting would count as work, and the bubble would not be seen"
            refuse(f"the span of {self.told} holds its receive", smell, "receive before the span")
        if any(not start_s <= at_s <= stop_s for _, at_s in self.times):
            smell = "the time line would show this rank as idle"
            refuse(f"{self.told} computes outside its span", smell, "the module inside the span")

    # ---- the rest of a step ----

    def share_loss(self, method: Callable) -> Tensor:
        """Call the learner's share_loss, and judge what it gives."""
        members, said = tuple(dist.get_process_group_ranks(self.group)), f"rank {self.rank}"

        def judge(entry: Entry) -> None:
            if entry.ranks != members:
                groups = f"{list(entry.ranks)}, but the pipeline has ranks {list(members)}"
                smell = "`group` is not passed on"
                refuse(f"share_loss: {entry.op} over ranks {groups}", smell, "group=self.group")

        with Guard(judge) as guard:
            loss = method()
        case = f"share_loss on {said} of {self.p}, with the last stage on rank {self.last % self.p}"
        if loss is None:
            refuse(f"{case}, returns None", "every rank gets the loss", "return it on all ranks")
        if isinstance(loss, Tensor) and loss.shape:
            smell = "a scalar has no dimensions: its shape is ()"
            refuse(f"{case}, returns the shape {tuple(loss.shape)}", smell, "torch.zeros(())")
        try:
            found = number(loss, case)
        except Wrong as wrong:
            refuse(wrong.seen, wrong.smell, "a scalar")
        self._compare_loss(found, case, not guard.results)
        return loss

    def _compare_loss(self, found: float, case: str, is_silent: bool) -> None:
        wanted, m = sum(self.truth.losses), len(self.truth.losses)
        if is_silent and self.p > 1 and abs(found - wanted) > 1e-5 and abs(found) < 1e-5:
            refuse(
                f"{case}, returns {found:.4f}, not {wanted:.4f}, and calls no collective",
                "only the rank of the last stage has losses; nothing was sent to this one",
                "dist.broadcast is called by all ranks, also by those that receive: not inside "
                "an `if` that only some enter",
            )
        src = "the broadcast starts from rank self.last % self.p of the group"
        near = [
            (0.0, "the zeros of a rank without the last stage went to all", src),
            (wanted / self.p, "the mean over the ranks: only one of them has losses", src),
            (wanted / m, "the losses were divided by m before: here they add up", "their sum"),
            (self.truth.losses[-1], "the loss of the last micro-batch only", "the sum of all"),
            (wanted * self.p, "the loss was added once for each rank", src),
        ]
        if abs(found - wanted) > 1e-5:
            why = next((why for value, *why in near if abs(found - value) < 1e-5), ("", src))
            refuse(f"{case}, returns {found:.4f}, not {wanted:.4f}", *why)


def _of_another(i: int) -> tuple[str, str]:
    smell = f"that is of micro-batch {i}: was the last one taken, where another one is due?"
    return smell, "the argument `i` says which one"


def _is_one(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


NO_GRADIENT = (
    "what comes by mail has no history, so autograd makes no gradient for it unless it is asked",
    "receive(...).requires_grad_(), before it goes through the module",
)
NO_AUTOGRAD = (
    "the module ran without autograd: in torch.no_grad(), or in a reentrant checkpoint, which "
    "makes no graph for tokens",
    "checkpoint(module, x, use_reentrant=False)",
)
NOT_USED = (
    "that is the gradient of out.sum(): the one that came by mail was not used",
    "torch.autograd.backward(out, grad)",
)
TOKENS_IN = (
    "the first stage takes tokens, whole numbers, which have no gradient",
    "requires_grad_() only on what came by mail",
)
ROOT = ("the last stage is on rank self.last % self.p", "group_src=self.last % self.p")
PIPELINE: Reasons = {
    "implicitly created only for scalar": (
        "only a loss, one number, starts a backward by itself; other stages start from the "
        "gradient that came by mail",
        "torch.autograd.backward(out, grad)",
    ),
    "floating point and complex dtype can require gradients": TOKENS_IN,
    "require gradients": TOKENS_IN,
    "does not require grad and does not have a grad_fn": (
        "the output has no graph: was it detached, or computed with a reentrant checkpoint, which "
        "makes none for tokens?",
        "keep `out` itself; checkpoint(module, x, use_reentrant=False)",
    ),
    "backward through the graph a second time": ("backward ran twice through one output", "once"),
    "invalid root rank": ROOT,
    "is not part of group": ("src counts over the whole job", ROOT[1]),
    "must be Tensor, not tuple": ("self.inputs holds all m micro-batches", "self.inputs[i]"),
    "must have the same dtype": (
        "a stage that is not the first got tokens: rank 0 may have other stages, too",
        "ask for stage == 0, not for the rank",
    ),
    "'NoneType' object has no attribute": (
        "on the last stage nothing is sent, and on others x.grad is None without requires_grad_()",
        "look at what is None, and at `stage == self.last`",
    ),
    "KeyError": ("self.saved has the keys (stage, i)", "the same in forward and backward"),
    "has no attribute 'append'": ("self.saved is a dict", "self.saved[stage, i] = ..."),
    "list index out of range": (
        "only the first stage has self.inputs, and only the last self.targets",
        "ask for the stage first",
    ),
    "must match the size": ("are whole batch and micro-batch mixed?", "self.targets[i]"),
}


@lesson.exercise(
    "12.2",
    "forward: the input is self.inputs[i] on stage 0, else self.mail.receive('F', stage, i), which "
    "has to ask for a gradient. Receive before `with self.span(Action('F', stage, i))`.",
    "The last stage makes the loss / m from targets[i]; others send out.detach() to stage + 1. "
    "checkpoint(module, x, use_reentrant=False) is the module call with recompute.",
    "backward: pop what was saved, receive the gradient where stage < self.last, then "
    "torch.autograd.backward(out, grad) inside the span. Where stage > 0 send x.grad to stage - 1, "
    "and append the work to self.sends. share_loss: sum, then broadcast from rank self.last % p.",
)
def Pipeline(answer) -> None:
    """GPipe on 3 ranks; interleaved, 1F1B with recompute, on ranks 1 and 2 of 3; one rank."""
    seed = torch.randint(10_000, ()).item()
    in_ranks(_look_at_pipeline, 3, answer, seed, reasons=PIPELINE)


def _look_at_pipeline(answer, seed: int) -> bool:
    one, two = dist.new_group([0]), dist.new_group([1, 2])
    _steps(answer, schedules.gpipe(3, 5), None, seed, num_steps=2)
    if dist.get_rank() == 0:
        _steps(answer, schedules.gpipe(1, 3), one, seed + 1)
    else:
        _steps(answer, schedules.interleaved(2, 4, 2), two, seed + 1)
        _steps(answer, schedules.one_f_one_b(2, 5), two, seed + 2, recompute=True)
    with torch.no_grad():
        _steps(answer, schedules.forwards(3, 2), None, seed + 3)
    return True


def _steps(
    answer, schedule: Schedule, group: Group, seed: int, recompute: bool = False, num_steps: int = 1
) -> None:
    num_stages = 1 + max(action.stage for actions in schedule for action in actions)
    mine = sorted({action.stage for action in schedule[dist.get_rank(group)]})
    m = 1 + max(action.microbatch for action in schedule[0])
    built, current = _build(num_stages, seed), {}

    def loss_fn(out: Tensor, targets: Tensor) -> Tensor:
        _judge_loss(current["walk"], out, targets)
        return nn.functional.mse_loss(out, targets)

    stages = {stage: built[stage] for stage in mine}
    engine = answer(stages, schedule, loss_fn, (2, T, D), recompute, group=group)
    if not all(hasattr(engine, name) for name in ("forward", "backward", "step", "mail")):
        refuse(f"{type(engine).__name__} has no forward, backward, step or mail", "", "keep these")
    walk = current["walk"] = Walk(engine, engine.mail, schedule, group, recompute)
    engine.mail, engine.stages = walk, Stages(engine.stages)
    engine.forward = walk.watch(engine.forward, walk._after_forward)
    engine.backward = walk.watch(engine.backward, walk._after_backward)
    share_loss = engine.share_loss
    engine.share_loss = lambda: walk.share_loss(share_loss)
    for step in range(num_steps):
        for module in stages.values():
            module.zero_grad()
        inputs, targets = _batch(2 * m, seed + step)
        with torch.enable_grad():
            walk.begin(Truth(num_stages, m, seed, inputs, targets))
        engine.step(inputs if 0 in mine else None, targets if num_stages - 1 in mine else None)


def _judge_loss(walk: Walk, out: Tensor, targets: Tensor) -> None:
    _, stage, i = walk.action
    if stage != walk.last:
        refuse(f"{walk.told} calls loss_fn", "only the last stage has an output to judge")
    if not _close(targets, walk.truth.targets[i]):
        shapes = f"shape {tuple(getattr(targets, 'shape', ()))}"
        seen = f"{walk.told}: loss_fn is not given the targets of micro-batch {i}, but {shapes}"
        refuse(seen, "whole batch and micro-batch are mixed up", "self.targets[i]")
    if not _close(out, walk.truth.out[stage, i]):
        refuse(f"{walk.told}: loss_fn is not given the output of the stage", "", "loss_fn(out, y)")


# ---- 12.3 -----------------------------------------------------------------------------------

NO_USE = (
    "ranks that do not use the parameter have no such gradient: .grad is None there",
    "only the ranks listed in `tied` take part",
)
TIED: Reasons = {
    "'NoneType' object has no attribute": NO_USE,
    "Expected parameter `tensor`": NO_USE,
    "Invalid function argument": NO_USE,
    "must be Tensor, not NoneType": NO_USE,
    "is not part of group": (
        "the ranks in `tied` count inside the group; dst and src count over the whole job",
        "group_dst= and group_src=",
    ),
    "requires grad is being used in an in-place": (
        "the parameter itself was to be changed; what is added up is its gradient",
        "param.grad",
    ),
}


@lesson.exercise(
    "12.3",
    "For each parameter: is this rank the first of its ranks, another one of them, or none?",
    "The first receives from each of the others into an empty tensor, adds that to param.grad, and "
    "then sends param.grad to each of them.",
    "The others send param.grad to the first, and then receive the sum into param.grad. The ranks "
    "count inside the group: group_src= and group_dst=.",
)
def sum_tied(answer) -> None:
    """Parameters of two and of three ranks, among 4 and in a group of ranks 1, 2 and 3 of 4."""
    seed = torch.randint(10_000, ()).item()
    with tempfile.TemporaryDirectory() as folder:
        try:
            results = in_ranks(_look_at_tied, 4, answer, seed, folder, reasons=TIED)
        except Wrong as wrong:
            why = _why_stuck(Path(folder)) if "never ended" in wrong.seen else ()
            if not why:
                raise
            raise Wrong(wrong.seen, *why) from None
    for case, (lists, first) in enumerate(TIED_CASES):
        for index, ranks in enumerate(lists):
            parts = {rank: _tied_part(seed, index, rank) for rank in ranks}
            found = {rank: results[rank + first][case][index] for rank in ranks}
            for rank in ranks:  # the first of them first: others have what it sent
                group = f"a group of ranks {list(range(first, 4))}" if first else "4"
                said = f"rank {rank} of {group}, a parameter of ranks {ranks}:"
                _look_at_sum(said, found, parts, rank, index, _tied_part(seed, index, 9))


# Who uses each parameter, counted in the group; and the group's first rank in the job.
TIED_CASES = (([[0, 3], [1, 2], [0, 1, 3]], 0), ([[0, 2], [1, 2], [0, 1, 2]], 1))


def _tied_part(seed: int, index: int, whose: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 10 * index + whose)
    return torch.randn([(3, 2), (5,), (2, 2)][index], generator=generator)


def _why_stuck(folder: Path) -> tuple[str, ...]:
    """Smell and hint from the messages that each rank has begun; the last one did not end."""
    logs = {int(path.name): path.read_text().split() for path in folder.iterdir()}
    for rank, log in logs.items():
        op, peer = log[-1].split(":")
        theirs = logs.get(int(peer), ["none"])
        if op == "recv" and theirs[-1] == f"recv:{rank}":
            smell = f"ranks {rank} and {peer} of the job both wait to receive: neither has sent"
            return smell, "the first rank receives, the others send first"
        if op == "send" and f"recv:{peer}" in log and f"recv:{rank}" not in theirs:
            smell = f"rank {rank} of the job sends the sum back, and rank {peer} never receives it"
            return smell, "others first send their part, then receive the sum"
        if op == "send" and theirs[-1] == f"send:{rank}":
            smell = "all of these send first, and a send ends when its partner receives"
            return f"{smell}: they all wait", "let the first rank receive before it sends"
    return ()


def _look_at_tied(answer, seed: int, folder: str) -> list[list[Tensor | None]]:
    """The gradients that each case leaves on this rank; none where it is not in the group."""
    subgroup, found, path = dist.new_group([1, 2, 3]), [], Path(folder, str(dist.get_rank()))
    for group, (lists, first) in zip((None, subgroup), TIED_CASES, strict=True):
        inside = dist.get_rank() >= first
        found.append(_one_tied(answer, seed, group, lists, path) if inside else [])
    return found


def _one_tied(answer, seed: int, group: Group, lists: list, path: Path) -> list[Tensor | None]:
    rank, members = dist.get_rank(group), dist.get_process_group_ranks(group)
    params = [nn.Parameter(_tied_part(seed, index, 9)) for index in range(len(lists))]
    for index, param in enumerate(params):
        param.grad = _tied_part(seed, index, rank) if rank in lists[index] else None
    case = f"rank {rank} of {f'a group of ranks {members}' if group else '4'}"

    def judge(entry: Entry) -> None:
        _judge_tied(entry, members, lists, case)
        with path.open("a") as log:
            log.write(f"{entry.op}:{entry.peer}\n")

    tied = [(param, list(ranks)) for param, ranks in zip(params, lists, strict=True)]
    num_begun, num_waited = _call_tied(answer, tied, group, judge, case)
    if num_waited < num_begun:
        smell = "isend and irecv only begin, and torch may drop a message whose work nobody keeps"
        seen = f"{case}: {num_begun} messages were begun, and {num_waited} waited for"
        refuse(seen, smell, "work.wait(), or dist.send and dist.recv")
    for index, (param, ranks) in enumerate(zip(params, lists, strict=True)):
        said = f"{case}, a parameter of ranks {ranks}:"
        if not torch.equal(param, _tied_part(seed, index, 9)):
            refuse(f"{said} the weights are others", "only gradients are added", "param.grad")
        if rank not in ranks and param.grad is not None:
            refuse(f"{said} param.grad is no longer None", *NO_USE)
    return [param.grad for param in params]


def _call_tied(answer, tied: list, group: Group, judge: Callable, case: str) -> tuple[int, int]:
    """Call the answer; how many messages it began, and for how many it waited."""
    real, waited, in_job = dist.get_rank, waits(), []  # torch asks, too, but later

    def get_rank(group: Group = None) -> int:
        in_job.append(group is None)
        return real(group)

    dist.get_rank = get_rank
    try:
        with Guard(judge) as guard:
            answer(tied, group)
    except (Seen, TypeError, AttributeError, ValueError):
        if group is None or in_job[:1] != [True]:
            raise
        smell = "get_rank() counts over the whole job, and `tied` counts inside the group"
        seen = f"{case}, which is rank {real()} of the job: dist.get_rank() without the group"
        refuse(seen, smell, "dist.get_rank(group)")
    finally:
        dist.get_rank = real
    return len(guard.results), len(waited)


def _judge_tied(entry: Entry, members: list[int], lists: list, case: str) -> None:
    users = [[members[rank] for rank in ranks] for ranks in lists]
    if entry.op in ("send", "recv"):
        mine = {rank for ranks in users if entry.rank in ranks for rank in ranks} - {entry.rank}
        verb = {"send": "sends to", "recv": "receives from"}[entry.op]
        if entry.peer is not None and entry.peer not in mine:
            seen = f"{case}, which is rank {entry.rank} of the job, {verb} rank {entry.peer}"
            smell = "these two share no parameter: `tied` counts ranks inside the group"
            refuse(f"{seen} of the job", smell, "group_src= and group_dst=, with group=group")
    elif list(entry.ranks) not in users:
        seen = f"{case}: {entry.op} over ranks {list(entry.ranks)}; the users are ranks {users[0]}"
        smell = "others have no such gradient, and do nothing: zeros of theirs would cost a message"
        refuse(seen, smell, "send and receive between the ranks in `tied`")


def _look_at_sum(
    said: str, found: dict, parts: dict[int, Tensor], rank: int, index: int, weights: Tensor
) -> None:
    """Compare what one of the ranks has with the sum; `found` is what all of them have."""
    total, (first, *others) = sum(parts.values()), parts
    if _close(found[rank], total):
        return
    kept = [r for r in parts if _close(found[r], parts[r])]
    mistakes = [
        (parts[rank], *_why_own(kept, parts, rank, index)),
        (total / len(parts), "the mean: but each use has a part, and parts add up", "the sum"),
        *[(total + part, "a part is in the sum twice", "add each once") for part in parts.values()],
        *[
            (part, f"replaced by the part of rank {r}, not added", "param.grad += part")
            for r, part in parts.items()
        ],
        *[(parts[first] + parts[r], *_why_two(kept)) for r in others],
        (parts[first] + len(others) * weights, "what came is a weight", "send param.grad"),
        (total - parts[first], "the first rank's own part is missing", ""),
    ]
    seen = f"{said} the gradient is not the sum of the {len(parts)} parts"
    raise Wrong(seen, *_named(found[rank], mistakes, "", "compare the parts by hand"))


def _why_own(kept: list[int], parts: dict, rank: int, index: int) -> tuple[str, str]:
    if len(kept) == len(parts) and index:
        smell = "each of its ranks has its own part still, but parameters before it were summed"
        return smell, "a loop over all of `tied`"
    if len(kept) == len(parts):
        return "each of its ranks has its own part still: nothing was sent, or nothing added", ""
    if rank == next(iter(parts)):
        return "the first rank never adds what comes", "param.grad += part"
    return "the sum never came back: only the first rank has it", "the first sends it back"


def _why_two(kept: list[int]) -> tuple[str, str]:
    if kept:
        smell = f"rank {kept[0]} was left out: two or more ranks may use a parameter"
        return smell, "first, *others = ranks"
    return "sent back before all parts had come", "first receive all of them"


# ---- 12.10 ----------------------------------------------------------------------------------

KINDS: Mapping[str, type] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
}
ONE_STAGE = ("gpipe and 1f1b take one PipelineStage, not a list", "the one that was made")
STAGE_LIST = ("interleaved and zero-bubble take a list of PipelineStages", "[stage, ...]")
NUM_STAGES = (
    "num_stages counts the stages of the whole model; `stages` holds only those of this rank",
    "the argument num_stages",
)
TWICE = (
    "torch takes the mean over micro-batches itself: the loss was divided by m twice",
    "loss_fn=loss_fn",
)
OWN_DEVICE = ("the device is that of the parameters", "next(module.parameters()).device")
TORCH: Reasons = {
    "is out of range of 1": NUM_STAGES,  # no model here has so few stages
    "larger than number of stages 1": NUM_STAGES,
    "CUDA": OWN_DEVICE,
    "NVIDIA": OWN_DEVICE,
    "cuda": OWN_DEVICE,
    "'list' object has no attribute": ONE_STAGE,
    "'PipelineStage' object is not": STAGE_LIST,
    "object of type 'PipelineStage'": STAGE_LIST,
    "Stage index": (
        "the index is the number of the stage, and num_stages counts the stages, not the ranks",
        "PipelineStage(module, index, num_stages, device, group=group)",
    ),
    "Pipeline group size": ("`group` is not passed on: all ranks of the job", "group=group"),
    "num_stages": ("num_stages counts the stages, not the ranks", "the argument num_stages"),
    "'n_microbatches'": ("the schedule needs the number of micro-batches", "m, before loss_fn"),
    "no attribute 'parameters'": ("a PipelineStage takes one module", "stages[index]"),
    "KeyError": ("the names of `kind` stand in the docstring", "a dict of names and classes"),
}


@lesson.exercise(
    "12.10",
    "pipelining.PipelineStage(module, index, num_stages, device, group=group) for each entry of "
    "`stages`; its index is the number of the stage.",
    "ScheduleGPipe and Schedule1F1B take one PipelineStage, ScheduleInterleaved1F1B and "
    "ScheduleInterleavedZeroBubble a list.",
    "schedule(stage or list, m, loss_fn=loss_fn). The device is that of the parameters.",
)
def torch_pipeline(answer) -> None:
    """All four kinds: gpipe on 3 ranks, the others on ranks 1 and 2 of 3; one step each."""
    seed = torch.randint(10_000, ()).item()
    in_ranks(_look_at_torch, 3, answer, seed, reasons=TORCH)


def _look_at_torch(answer, seed: int) -> bool:
    pair = dist.new_group([1, 2])
    _torch_step(answer, "gpipe", None, 3, 5, seed)
    if dist.get_rank() > 0:
        for kind, num_stages, m in (("1f1b", 2, 3), ("interleaved", 4, 4), ("zero-bubble", 4, 2)):
            _torch_step(answer, kind, pair, num_stages, m, seed)
    return True


def _torch_step(answer, kind: str, group: Group, num_stages: int, m: int, seed: int) -> None:
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    mine = dict(list(enumerate(_build(num_stages, seed)))[rank::p])
    case = f'"{kind}", {num_stages} stages on {p} ranks, m = {m}, rank {rank}'
    loss_fn = nn.functional.mse_loss
    schedule = answer(mine, num_stages, m, loss_fn, kind, group)
    _look_at_schedule(schedule, case, kind, group, num_stages, m, list(mine))
    inputs, targets = _batch(2 * m, seed)
    losses: list[Tensor] = []
    is_last = num_stages - 1 in mine
    schedule.step(
        *([inputs] if 0 in mine else []),
        **({"target": targets, "losses": losses} if is_last else {}),
    )
    truth = Truth(num_stages, m, seed, inputs, targets)
    found = sum(loss.item() for loss in losses) / m
    if is_last and abs(found - sum(truth.losses)) > 1e-5:
        why = "is it loss_fn?", "loss_fn=loss_fn"
        if abs(found * m - sum(truth.losses)) < 1e-5:
            why = TWICE
        refuse(f"{case}: the mean loss is {found:.4f}, not {sum(truth.losses):.4f}", *why)
    for stage, module in mine.items():
        for n, param in enumerate(module.parameters()):
            wanted = sum(truth.grads[stage, i][n] for i in range(m))
            if not _close(param.grad, wanted):
                seen = f"{case}: gradients of stage {stage} are not those of one process"
                why = "are the modules given those of `stages`?", "stages[index]"
                if _close(param.grad, m * wanted):
                    why = f"{m} times as large: the sum over micro-batches", "leave scale_grads on"
                elif _close(m * param.grad, wanted):
                    why = TWICE
                refuse(seen, *why)


def _look_at_schedule(
    schedule: object, case: str, kind: str, group: Group, num_stages: int, m: int, mine: list[int]
) -> None:
    """Name what is set wrongly before the ranks hang on it."""
    wanted = KINDS[kind]
    if isinstance(schedule, type):
        smell = "that is the class; a schedule is made by calling it"
        refuse(f"{case}: the class {schedule.__name__} itself", smell, f"{schedule.__name__}(...)")
    if not isinstance(schedule, wanted):
        smell = "nothing is returned" if schedule is None else f'"{kind}" is {wanted.__name__}'
        refuse(f"{case}: a {type(schedule).__name__}", smell, "return the schedule of that kind")
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    if (found := sorted(stage.stage_index for stage in stages)) != mine:
        smell = "the index is the number of the stage, the key in `stages`; not that of the rank"
        refuse(f"{case}: stages {found}, not {mine}", smell, "for index, module in stages.items()")
    if (found := {stage.num_stages for stage in stages}) != {num_stages}:
        smell = "num_stages counts all stages of the model; a rank may have several"
        refuse(f"{case}: num_stages is {found.pop()}", smell, "the argument num_stages")
    members = dist.get_process_group_ranks(group)
    if any(dist.get_process_group_ranks(stage.group) != members for stage in stages):
        smell = "`group` is not passed on: its messages would go to other ranks"
        refuse(f"{case}: a stage does not have the group {members}", smell, "group=group")
    if schedule._n_microbatches != m:
        refuse(f"{case}: {schedule._n_microbatches} micro-batches", "", f"hand over m, {m}")
    if schedule._loss_fn is None:
        smell = "without loss_fn the last stage has no loss, and nothing starts the backward"
        refuse(f"{case}: the schedule has no loss_fn", smell, "loss_fn=loss_fn")


# ---- 12.11 ----------------------------------------------------------------------------------


@lesson.exercise(
    "12.11",
    "Write down the ranks of each pipeline for 4 ranks and 2 stages: 0 2 and 1 3. The replicas of "
    "a stage are 0 1 and 2 3.",
    "dist.new_group is called by all ranks for every group, in the same order, also for those that "
    "a rank is not in. Make all, keep two.",
    "With d = N // num_stages: pipeline k has the ranks k, k + d, k + 2d, ...; stage s has s * d "
    "to (s + 1) * d - 1. Rank r is in pipeline r % d, and has stage r // d.",
)
def make_grid(answer) -> None:
    """4 ranks as 4 x 1, 2 x 2 and 1 x 4; 3 and 8 stages are refused."""
    in_ranks(_look_at_grid, 4, answer, reasons=GRID)


GRID: Reasons = {
    "not part of group": ("this rank is not in that group", "pipelines[rank % d]"),
    "list index out of range": ("there are d pipelines and num_stages rows", "rank % d, rank // d"),
    "is out of range": (
        "the ranks of the job are 0 to N - 1; with d = num_stages too many are listed",
        "d = N // num_stages, the number of replicas",
    ),
    "'float' object cannot be": ("a / b is a float, also where it is whole", "N // num_stages"),
    "is not in": ("ranks count from 0 to N - 1", "range(first, world_size, d)"),
    "unpack": ("two groups are returned: a pipeline, and the replicas of a stage", ""),
}


def _look_at_grid(answer) -> bool:
    rank = dist.get_rank()
    for num_stages in (2, 4, 1):
        with Groups(f"make_grid({num_stages}) on 4 ranks") as groups:
            found = answer(num_stages)
            groups.end()
        _look_at_groups(found, groups.case, num_stages, rank)
    for num_stages in (3, 8):
        case = f"make_grid({num_stages}) on 4 ranks"
        with Groups(case, num_stages) as groups:
            try:
                found = answer(num_stages)
            except ValueError:
                groups.end("raises ValueError")
                continue
        seen = f"{case}: rank {rank} returns {type(found).__name__}"
        refuse(seen, f"4 is no multiple of {num_stages}", RAISE_FIRST)
    return True


RAISE_FIRST = "raise ValueError first, on every rank"


class Groups:
    """Compare each call of dist.new_group with that of the other ranks, before it is made."""

    def __init__(self, case: str, uneven: int = 0) -> None:
        """`uneven` stages are to be refused."""
        self.case, self.uneven, self.num_calls = case, uneven, 0
        self.rank, self.store = dist.get_rank(), dist.distributed_c10d._get_default_store()

    def __enter__(self) -> "Groups":
        self.real = dist.new_group

        def new_group(ranks=None, *args, **kwargs):
            if not kwargs.get("use_local_synchronization"):
                self._compare(f"makes {'all' if ranks is None else sorted(ranks)}")
            return self.real(ranks, *args, **kwargs)

        dist.new_group = new_group
        return self

    def __exit__(self, *exc: object) -> None:
        dist.new_group = self.real

    def end(self, how: str = "makes none") -> None:
        """No call follows on this rank."""
        self._compare(how)

    def _compare(self, mine: str) -> None:
        every = range(dist.get_world_size())
        keys = [f"{self.case} {rank} {self.num_calls}" for rank in every]
        self.num_calls += 1
        self.store.set(keys[self.rank], mine)
        with suppress(dist.DistStoreError):  # a rank hangs elsewhere: the limit tells that
            self.store.wait(keys, timedelta(seconds=2))
            theirs = [self.store.get(key).decode() for key in keys]
            other = next((rank for rank in every if theirs[rank] != theirs[0]), None)
            if other is not None:
                asks = f"rank 0 {theirs[0]}, rank {other} {theirs[other]}"
                seen = f"{self.case}: group number {self.num_calls}: {asks}"
                if self.uneven and any(text.startswith("raises") for text in theirs):
                    smell = f"4 is no multiple of {self.uneven}, and only some ranks say so"
                    refuse(f"{self.case}: {asks}", smell, RAISE_FIRST)
                smell = "new_group is called by all ranks, for every group, in the same order"
                refuse(seen, smell, "make all groups on all ranks, also where a rank is not in it")


def _look_at_groups(found: object, case: str, num_stages: int, rank: int) -> None:
    d = 4 // num_stages
    wanted = list(range(rank % d, 4, d)), list(range(rank // d * d, rank // d * d + d))
    said = f"{case}, rank {rank}:"
    if found is None:
        refuse(f"{said} it returns None", "", "return the pipeline, and the replicas")
    if not isinstance(found, tuple | list) or len(found) != 2:
        refuse(f"{said} it returns a {type(found).__name__}", "", "two groups")
    for name, group in zip(("pipeline", "row"), found, strict=True):
        if isinstance(group, list | tuple | range):
            refuse(f"{said} the {name} is {group}", "these are ranks", "dist.new_group(ranks)")
        if not isinstance(group, dist.ProcessGroup):
            smell = "a rank that is not in a group gets no group from new_group"
            refuse(f"{said} the {name} is no group of this rank", smell, "keep those it is in")
    lists = tuple(dist.get_process_group_ranks(group) for group in found)
    if lists == wanted[::-1]:
        smell, try_this = "d = N // num_stages is the number of replicas", "stages are not replicas"
        if d == num_stages:
            smell = "the two are swapped, or consecutive ranks are a pipeline: they are replicas"
            try_this = "rank r has stage r // d of replica r % d"
        refuse(f"{said} pipeline {lists[0]}, row {lists[1]}", smell, try_this)
    if lists != wanted:
        seen = f"{said} pipeline {lists[0]}, row {lists[1]}; not {wanted[0]} and {wanted[1]}"
        refuse(seen, "", "rank r has stage r // d of replica r % d")
    for group, ranks in zip(found, wanted, strict=True):
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=group)
        if total.item() != sum(ranks):
            refuse(f"{said} an all_reduce over {ranks} gives {total.item():g}, not {sum(ranks)}")


# In the order of the numbers, which is that of the summary.
lesson.exercises = dict(
    sorted(
        (_schedules.part.exercises | lesson.exercises).items(),
        key=lambda pair: int(pair[0].split(".")[1]),
    )
)
