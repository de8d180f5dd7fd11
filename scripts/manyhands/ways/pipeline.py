"""A pipeline: every rank holds some of the layers, and all samples pass it in micro-batches."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.models.transformer import Transformer, token_loss
from manyhands.pipeline import engine, schedules, stages, wiring
from manyhands.ways.ready import Ready, Setting, adamw

Stages = dict[int, nn.Module]


class Parts(NamedTuple):
    """The exercises of lesson 12 that a job can use."""

    partition: Callable = stages.partition
    Pipeline: Callable = engine.Pipeline
    sum_tied: Callable = wiring.sum_tied
    gpipe: Callable = schedules.gpipe
    one_f_one_b: Callable = schedules.one_f_one_b
    interleaved: Callable = schedules.interleaved
    make_grid: Callable = wiring.make_grid


def take_stages(
    layers: Sequence[nn.Module], bounds: Sequence[int], group: dist.ProcessGroup | None = None
) -> tuple[Stages, wiring.Tied]:
    """This rank's stages by number, and its tied parameters: nothing that holds other stages.

    Stage s is on rank s % p of the `group`, which is a pipeline of p ranks.
    """
    rank, p = dist.get_rank(group), dist.get_world_size(group)
    every = stages.cut(layers, bounds)
    tied = [entry for entry in wiring.find_tied(every, p) if rank in entry[1]]
    return {stage: every[stage] for stage in range(rank, len(every), p)}, tied


def make_engine(
    own: Mapping[int, nn.Module],
    m: int,
    shape: Sequence[int],
    kind: str = "1f1b",
    native: bool = False,
    parts: Parts | None = None,
    group: dist.ProcessGroup | None = None,
    **options: object,
) -> "engine.Pipeline | Native":
    """What runs a step of `m` micro-batches over this rank's stages.

    Args:
        shape: of what goes from stage to stage for a micro-batch: (B/m, T, D).
        kind: naive, gpipe, 1f1b, interleaved or, natively, zero-bubble; forwards, to validate.
        native: by PyTorch's schedule.
        options: of the Pipeline by hand, such as recompute.
    """
    parts = parts or Parts()
    p, per_rank = dist.get_world_size(group), len(own)
    if native:
        return Native(own, p * per_rank, m, kind, group)
    if kind == "forwards":
        schedule = schedules.forwards(p, m, per_rank)
    else:
        makers = {"naive": schedules.naive, "gpipe": parts.gpipe, "1f1b": parts.one_f_one_b}
        schedule = makers.get(kind, parts.interleaved)(p, m)
    return parts.Pipeline(own, schedule, token_loss, shape, group=group, **options)


class Native:
    """PyTorch's schedule, called like Pipeline; it records no spans."""

    def __init__(
        self,
        own: Mapping[int, nn.Module],
        num_stages: int,
        m: int,
        kind: str,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.schedule = wiring.torch_pipeline(own, num_stages, m, token_loss, kind, group)
        self.own, self.last, self.group = own, num_stages - 1, group

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward of a batch; returns its mean loss on every rank."""
        losses: list[Tensor] = []
        given = [inputs] if 0 in self.own else []
        wanted = {"target": targets, "losses": losses} if self.last in self.own else {}
        self.schedule.step(*given, **wanted)
        loss = torch.stack(losses).mean() if losses else torch.zeros((), device=inputs.device)
        src = self.last % dist.get_world_size(self.group)
        dist.broadcast(loss, group=self.group, group_src=src)
        return loss


def flops_of_layers(model: Transformer) -> list[int]:
    """Of a token, forward, in each of stages.layers_of: by them the cut is always the same."""
    block, width = model.positions.weight.shape
    of_block = 24 * width**2 + 4 * block * width
    return [0, *[of_block] * len(model.blocks), 2 * model.head.weight.numel()]


def one_f_one_b(model: Transformer, setting: Setting, native: bool = False) -> Ready:
    """1F1B over a stage a rank, cut by the FLOPs of their layers."""
    bounds = stages.partition(flops_of_layers(model), dist.get_world_size())
    own, tied = take_stages(stages.layers_of(model), bounds)
    weight = model.positions.weight
    shape = (setting.batch // setting.micro_batches, *weight.shape)
    options = {} if native else {"dtype": weight.dtype}
    runner = make_engine(own, setting.micro_batches, shape, native=native, **options)
    stage = own[dist.get_rank()]

    def forward_backward(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = runner.step(inputs, targets)
        wiring.sum_tied(tied)
        return loss

    return Ready(stage, adamw(stage.parameters()), forward_backward)
