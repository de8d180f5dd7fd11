"""What a pipeline needs around it: groups of ranks, tied weights; and PyTorch's own pipelines.

    4 ranks, 2 stages x 2 replicas:       stage 0   rank 0  rank 1   <- replicas of stage 0
                                            |         |       |
    a column is a pipeline,               stage 1   rank 2  rank 3   <- replicas of stage 1
    a row averages its gradients

Replicas of a stage have consecutive ranks, so they are on one node where a node holds them: they
share whole gradients. The pipelines go across nodes: a cut sends only activations.

Price: with d replicas a rank all-reduces its stage's gradients, 2 (d-1)/d x 4P/p bytes; of a tied
parameter of S bytes each rank but the first sends S bytes and receives S.
Sources: https://docs.pytorch.org/docs/stable/distributed.pipelining.html; Narayanan et al. 2021,
https://arxiv.org/abs/2104.04473, section 3; Qi et al. 2023, https://arxiv.org/abs/2401.10241.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from manyhands.collectives.trees import Group, device_of

Tied = list[tuple[nn.Parameter, list[int]]]  # and the ranks of a pipeline that use it
Channels = dict[tuple[str, int], Group]  # (kind of message, rank that sends) -> group


class Mail:
    """Messages between the stages of a pipeline; stage s is on rank s % p.

    NCCL has one queue for two ranks of a group, and no tags: whatever the messages are, the first
    that one rank sends must be the first that the other receives. So activations and gradients go
    through groups of their own, and with two ranks, which are each other's next and previous one,
    so do the two directions. Then all messages of a queue come in the order of the schedule.

    Args:
        p, m: ranks of the pipeline, and micro-batches.
        shape: of every message, (B/m, ...).
        dtype: of every message. Under autocast, that of what a stage returns.
        back: another group of the same ranks, for gradients; made here if not given. Then all ranks
            of the group must make their Mail at the same point.
        channels: those of another Mail of the same ranks, which has no message on its way while
            this one is used. Groups are opened once; with NCCL each takes memory of the GPU.
    """

    def __init__(
        self,
        p: int,
        m: int,
        shape: Sequence[int],
        device: torch.device | str = "cpu",
        back: Group = None,
        group: Group = None,
        dtype: torch.dtype = torch.float32,
        channels: Channels | None = None,
    ) -> None:
        self.p = p
        self.m = m
        self.shape = tuple(shape)
        self.dtype = dtype
        self.device = device
        self.channel: Channels = channels or {}
        if p > 1 and not self.channel:
            self.open_channels(group, another(group) if back is None else back)

    def open_channels(self, group: Group, back: Group) -> None:
        """Give each kind of message its group, and send one number through every channel.

        The first message of two ranks in a group makes a communicator on GPUs: both ranks have to
        come, and it may wait for all that a rank has started before. In the midst of a schedule
        that can be a message for which the other rank is not ready, so it is done here.
        """
        two_ways = self.p == 2
        for rank in range(self.p):
            turned = two_ways and rank == 1
            self.channel["F", rank] = another(group) if turned else group
            self.channel["B", (rank + 1) % self.p] = another(group) if turned else back
        mine = dist.get_rank(group)
        hello = torch.zeros(1, device=self.device)
        # All ranks go through the channels in one order, so no two wait for each other.
        for (kind, sender), channel in self.channel.items():
            receiver = (sender + (1 if kind == "F" else -1)) % self.p
            if mine == sender:
                dist.send(hello, group=channel, group_dst=receiver)
            elif mine == receiver:
                dist.recv(hello, group=channel, group_src=sender)

    def send(self, kind: str, tensor: Tensor | None, stage: int, i: int) -> dist.Work:
        """Start to send an activation ("F") or a gradient ("B") of micro-batch `i` to `stage`.

        Raises:
            ValueError: a tensor of another shape or type, which the receiver would misread.
        """
        if tensor is None:
            raise ValueError(
                f"stage {stage + 1} has no gradient for stage {stage}: what it returns does not "
                "depend on what it was given"
            )
        if tensor.shape != self.shape or tensor.dtype != self.dtype:
            raise ValueError(
                f"a message to stage {stage} has shape {tuple(tensor.shape)} and {tensor.dtype}, "
                f"but stage {stage} expects {self.shape} and {self.dtype}: give Pipeline the shape "
                "and dtype of what its stages return"
            )
        source = stage - 1 if kind == "F" else stage + 1
        where = {"group": self.channel[kind, source % self.p], "group_dst": stage % self.p}
        return dist.isend(tensor.contiguous(), **where, tag=stage * self.m + i)

    def receive(self, kind: str, stage: int, i: int) -> Tensor:
        """Wait for the activation ("F") or gradient ("B") of micro-batch `i` for `stage`."""
        source = stage - 1 if kind == "F" else stage + 1
        where = {"group": self.channel[kind, source % self.p], "group_src": source % self.p}
        tensor = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        # On gloo the tag says for which stage and micro-batch a message is. NCCL ignores tags:
        # there the order alone protects, which is why each channel goes one way.
        dist.recv(tensor, **where, tag=stage * self.m + i)
        return tensor


def another(group: Group) -> dist.ProcessGroup:
    """One more group of the same ranks; only these ranks call it."""
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, use_local_synchronization=True)


def make_grid(num_stages: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Arrange all N ranks as num_stages x N/num_stages; every rank calls it.

    Rank r has stage r // d of replica r % d, with d = N/num_stages.

    Returns:
        This rank's pipeline, in the order of its stages; and the replicas of its stage.

    Raises:
        ValueError: N is no multiple of num_stages.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size % num_stages:
        raise ValueError(f"{world_size} ranks cannot be shared evenly by {num_stages} stages")
    d = world_size // num_stages
    # Every rank makes every group, in the same order, also those that it is not in.
    pipelines = [dist.new_group(list(range(first, world_size, d))) for first in range(d)]
    rows = [dist.new_group(list(range(s * d, (s + 1) * d))) for s in range(num_stages)]
    return pipelines[rank % d], rows[rank // d]


def find_tied(stages: Sequence[nn.Module], p: int) -> Tied:
    """The parameters that stages of several ranks use, each with these ranks; stage s is on s % p.

    Needs all stages, so call it before a rank drops the stages of others.
    """
    users: dict[nn.Parameter, set[int]] = {}
    for stage, module in enumerate(stages):
        for param in module.parameters():
            users.setdefault(param, set()).add(stage % p)
    return [(param, sorted(ranks)) for param, ranks in users.items() if len(ranks) > 1]


def sum_tied(tied: Tied, group: Group = None) -> None:
    """Add up the gradients of each tied parameter over the ranks that use it.

    Call it once, after the last backward that adds to these gradients: at the end of all
    accumulation, and before the optimizer's step.

    `tied` is a list of (parameter, its ranks in the pipeline), as find_tied returns it. The first
    of these ranks takes the parts of the others, and sends the sum back. A rank that is not among
    them does nothing. They are ranks within `group`.
    The sum, not the mean: each rank has the part of the gradient that comes from its own use. A
    rank that has found no gradient adds zeros, and a frozen parameter has nothing to add.
    """
    rank = dist.get_rank(group)
    for param, (first, *others) in tied:
        if not param.requires_grad:
            continue
        if rank in (first, *others) and param.grad is None:
            param.grad = torch.zeros_like(param)
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


# ---- The same thing in PyTorch -------------------------------------------------------------


def torch_pipeline(
    stages: Mapping[int, nn.Module],
    num_stages: int,
    m: int,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    kind: str,
    group: Group = None,
) -> object:
    """PyTorch's schedule object for `m` micro-batches: each of `stages` as a PipelineStage.

    Args:
        stages: this rank's modules by the number of the stage.
        loss_fn: (output of the last stage, targets) -> mean loss over a micro-batch.
        kind: gpipe, 1f1b, interleaved or zero-bubble; the last two take a list of stages.
    """
    schedules = {
        "gpipe": pipelining.ScheduleGPipe,
        "1f1b": pipelining.Schedule1F1B,
        "interleaved": pipelining.ScheduleInterleaved1F1B,
        "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
    }
    device = device_of((p for module in stages.values() for p in module.parameters()), group)
    parts = [
        pipelining.PipelineStage(module, index, num_stages, device, group=group)
        for index, module in stages.items()
    ]
    several = kind in ("interleaved", "zero-bubble")
    return schedules[kind](parts if several else parts[0], m, loss_fn=loss_fn)
