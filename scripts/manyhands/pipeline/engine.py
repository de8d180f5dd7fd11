"""Pipeline parallelism: consecutive layers live on consecutive ranks, and activations travel.

    micro-batch 0, 1, ... --> stage 0 --activation--> stage 1 --activation--> stage 2 --> loss
                              rank 0 <--gradient----- rank 1 <--gradient----- rank 2

The engine does what a schedule (schedules.py) says, action by action: naive, GPipe, 1F1B and
interleaved are lists of actions, and one loop runs them all.

Price of a step: each cut sends every activation once forward and its gradient once back, 2 x 4BTD
bytes for B sequences of T tokens in width D, however large the stages are. Memory of a rank: the
activations of its micro-batches in flight, with `recompute` only the inputs and outputs of its
stages; and what it sends back, (B, ...) in all, until the step is over.

Source: Huang et al. 2018, "GPipe", https://arxiv.org/abs/1811.06965, section 2.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from manyhands.collectives.trees import Group, device_of
from manyhands.pipeline.bubble import Span
from manyhands.pipeline.schedules import Action, Schedule
from manyhands.pipeline.wiring import Channels, Mail

LossFn = Callable[[Tensor, Tensor], Tensor]


class Setup:
    """What a rank of a pipeline is given, and what it keeps in a step; stage s is on rank s % p.

    Args:
        stages: this rank's modules by the number of the stage.
        schedule: the actions of every rank of the group.
        loss_fn: (output of the last stage, targets) -> mean loss over a micro-batch.
        shape: of what goes from a stage to the next, for one micro-batch: (B/m, ...).
        recompute: keep only each stage's input, and run its forward again in backward. What forward
            changes is changed twice then: batch norm's statistics count each micro-batch double.
        back: another group of the same ranks, for gradients; Mail makes one if it is not given.
        dtype: of what goes from a stage to the next. Under autocast it may not be float32.
        channels: mail.channel of another engine of the same group, to open no more groups.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: Schedule,
        loss_fn: LossFn,
        shape: Sequence[int],
        recompute: bool = False,
        back: Group = None,
        group: Group = None,
        dtype: torch.dtype = torch.float32,
        channels: Channels | None = None,
    ) -> None:
        self.stages = dict(stages)
        self.loss_fn = loss_fn
        self.recompute = recompute
        self.group = group
        self.actions = schedule[dist.get_rank(group)]
        self.p = len(schedule)
        self.m = 1 + max(action.microbatch for action in self.actions)
        self.last = max(action.stage for actions in schedule for action in actions)
        params = (param for stage in self.stages.values() for param in stage.parameters())
        self.device = device_of(params, group)
        self.mail = Mail(self.p, self.m, shape, self.device, back, group, dtype, channels)
        self.saved: dict[tuple[int, int], tuple] = {}  # (stage, micro-batch) -> input, output, send
        self.sends: list[dist.Work] = []  # of gradients
        self.losses: list[Tensor] = []
        self.spans: list[Span] = []  # of the last step: when this rank computed what

    def cut(self, batch: Tensor | None) -> Sequence[Tensor]:
        """A batch as m micro-batches; none where the rank has no batch.

        Each has memory of its own, so that a first stage may change its input in place.
        """
        if batch is None:
            return []
        if len(batch) % self.m:
            raise ValueError(f"a batch of {len(batch)} cannot be cut into {self.m} micro-batches")
        return [part.clone() for part in batch.chunk(self.m)]

    def run(self, stage: int, x: Tensor) -> Tensor:
        """The output of `stage` for the input x; with `recompute` its activations are not kept.

        Raises:
            RuntimeError: the stage begins with an operation in place, which autograd forbids on an
                input that asks for a gradient.
        """
        module = self.stages[stage]
        try:
            if self.recompute:
                return checkpoint(module, x, use_reentrant=False)
            return module(x)
        except RuntimeError as error:
            if "in-place operation" not in str(error):
                raise
            raise RuntimeError(
                f"stage {stage} changes its input in place, but the stage before needs the "
                "gradient of that input: use the operation that returns a new tensor, such as "
                "nn.ReLU(inplace=False)"
            ) from error


class Engine(Setup):
    """Runs a schedule, one action after the other; `forward` and `backward` are in Pipeline."""

    def step(self, inputs: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        """Run all actions of this rank; gradients of the mean loss add up in `.grad`.

        Args:
            inputs: (B, ...), needed on the rank of the first stage only; B a multiple of m.
            targets: (B, ...), needed on the rank of the last stage only.

        Returns:
            The mean loss of the whole batch, on every rank.
        """
        self.inputs, self.targets = self.cut(inputs), self.cut(targets)
        self.spans.clear()
        self.losses.clear()
        for kind, stage, i in self.actions:
            if kind == "F":
                self.forward(stage, i)
            else:
                self.backward(stage, i)
        left = [send for *_, send in self.saved.values()]  # of forwards without a backward
        for work in filter(None, [*self.sends, *left]):
            work.wait()
        self.sends.clear()
        self.saved.clear()
        return self.share_loss()

    def share_loss(self) -> Tensor:
        """The batch's mean loss, a scalar, from the rank of the last stage to all of the group."""
        total = sum(self.losses, torch.zeros((), device=self.device)).float()
        dist.broadcast(total, group=self.group, group_src=self.last % self.p)
        return total

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        """Note when this rank computes, by the host's clock, which does not see a GPU at work."""
        start_s = time.time()
        yield
        self.spans.append((action, start_s, time.time()))


class Pipeline(Engine):
    """The engine with its two kinds of action."""

    def forward(self, stage: int, i: int) -> None:
        """Take micro-batch `i` through `stage`: from self.inputs or the mail, to the next stage.

        On the last stage (self.last) the output is the loss / m, so that the m gradients add up to
        that of the mean; it is kept in self.losses, too, without a graph. What `backward` needs,
        (input, output, work of the send or None), goes to self.saved[stage, i].
        """
        x = self.inputs[i] if stage == 0 else self.mail.receive("F", stage, i).requires_grad_()
        with self.span(Action("F", stage, i)):
            out = self.run(stage, x)
            if stage == self.last:
                out = self.loss_fn(out, self.targets[i]) / self.m
                self.losses.append(out.detach())
        send = None if stage == self.last else self.mail.send("F", out.detach(), stage + 1, i)
        self.saved[stage, i] = x, out, send

    def backward(self, stage: int, i: int) -> None:
        """Take micro-batch `i` back through `stage`, and send the gradient of its input back.

        The gradient of the output comes by mail; the last stage needs none. Drops what was saved
        for this micro-batch. The work of this send goes to self.sends: `step` waits for it.
        """
        x, out, send = self.saved.pop((stage, i))
        grad = None if stage == self.last else self.mail.receive("B", stage, i)
        with self.span(Action("B", stage, i)):
            if out.requires_grad:  # not so where the first stage is frozen
                torch.autograd.backward(out, grad)
        if send:
            send.wait()  # it has long arrived: its gradient came back
        if stage > 0:
            self.sends.append(self.mail.send("B", x.grad, stage - 1, i))
