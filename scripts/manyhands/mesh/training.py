"""A Transformer in training on a mesh of ranks, whatever axes the mesh has, by hand.

    training = MeshTraining(model, make_groups({"pp": 2, "dp": 2, "tp": 2}), micro_batches=4)
    optimizer = AdamW(training.parameters())
    loss = training.step(inputs, targets)     this rank's share of the samples, see share_of_data
    training.finish()
    optimizer.step()
    training.zero_grad()

Price: that of its parts, see combine.py; and a message of one number along each data axis, for the
loss.
"""

from collections.abc import Callable
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.collectives.trees import Group
from manyhands.data_parallel.replicas import broadcast_state
from manyhands.mesh.combine import Stage, finish_gradients, shard_and_cut, take_stage
from manyhands.mesh.grid import DATA_AXES, Groups
from manyhands.mesh.parts import holders, mark_holders, names_in
from manyhands.pipeline import schedules
from manyhands.pipeline.engine import LossFn, Pipeline
from manyhands.pipeline.wiring import Channels
from manyhands.tensor.model import TensorParallel


class Accumulate:
    """The engine of a mesh without a pipeline: micro-batches, one after the other.

    Args:
        model: model(inputs, targets) returns the mean loss.
        m: micro-batches of a step.
    """

    def __init__(self, model: Callable[[Tensor, Tensor], Tensor], m: int) -> None:
        self.model = model
        self.m = m

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a batch; its gradients add up in .grad where autograd is on."""
        if len(inputs) % self.m:
            raise ValueError(f"a batch of {len(inputs)} cannot be cut into {self.m} micro-batches")
        total = torch.zeros((), device=inputs.device)
        for x, y in zip(inputs.chunk(self.m), targets.chunk(self.m), strict=True):
            loss = self.model(x, y) / self.m
            if loss.requires_grad:
                loss.backward()
            total += loss.detach()
        return total


class OnMesh(nn.Module):
    """A model in training on a mesh, whoever cuts it. Every rank calls every method.

    A subclass sets `model`, and has make_engine, finish and named_weights. `shapes` has those of
    the whole weights, by name.
    """

    model: nn.Module

    def __init__(self, model: nn.Module, groups: Groups, micro_batches: int) -> None:
        super().__init__()
        for group in groups.values():  # from rank 0 along one axis, from these along the next
            broadcast_state(model, group)
        self.groups = with_all(groups)
        self.m = micro_batches
        self.shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
        self.width, self.num_blocks = model.positions.embedding_dim, len(model.blocks)
        self.num_stages = dist.get_world_size(self.groups["pp"])
        sizes = {axis: dist.get_world_size(group) for axis, group in self.groups.items()}
        self.num_shares = prod(sizes.get(axis, 1) for axis in DATA_AXES)
        self.engines: dict[tuple, object] = {}  # by what they are given
        self.channels: Channels | None = None  # of the first pipeline, for those that follow

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward of this rank's share (B, T), in micro-batches.

        Returns:
            The mean loss of the whole batch, the same on every rank of the mesh.
        """
        loss = self.engine(inputs, self.m).step(inputs, targets)
        return self.sum_over_data(loss) / self.num_shares

    def sum_over_data(self, number: Tensor) -> Tensor:
        """Replace a number by its sum over the ranks that have samples of their own; returns it.

        Not over pp and tp, whose ranks have the same samples.
        """
        for axis in DATA_AXES:
            if axis in self.groups:
                dist.all_reduce(number, group=self.groups[axis])
        return number

    @torch.no_grad()
    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of this rank's share, without gradients; B need be no multiple of m."""
        return self.engine(inputs, 1).step(inputs, targets)

    def engine(self, inputs: Tensor, m: int) -> object:
        """What runs a batch of this size in m micro-batches; forward only where autograd is off."""
        key = inputs.shape, m, torch.is_grad_enabled()
        if key not in self.engines:
            self.engines[key] = self.make_engine(inputs, m)
        return self.engines[key]

    def pipeline(self, inputs: Tensor, m: int, loss_fn: LossFn) -> Pipeline:
        """The pipeline by hand: 1F1B, or forwards only where autograd is off."""
        kind = schedules.one_f_one_b if torch.is_grad_enabled() else schedules.forwards
        pipe = self.groups["pp"]
        shape = (len(inputs) // m, inputs.shape[1], self.width)
        own = {dist.get_rank(pipe): self.model}
        dtype = next(self.model.parameters()).dtype
        schedule = kind(self.num_stages, m)
        engine = Pipeline(
            own, schedule, loss_fn, shape, group=pipe, dtype=dtype, channels=self.channels
        )
        self.channels = engine.mail.channel
        return engine


class MeshTraining(OnMesh):
    """A Transformer on a mesh, and its training step, by hand.

    Axes, of which any may be missing: pp (stages, by 1F1B), replicate (copies whose gradients are
    averaged), dp or shard (FSDP), tp (tensor parallelism). All ranks start from rank 0's weights.

    Args:
        model: a whole Transformer; it is used up.
        groups: those of make_groups, or groups_of(PyTorch's mesh).
        micro_batches: into which a rank's batch is cut.
        shard_and_cut: for a mesh of dp and tp that has no pipeline.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Groups,
        micro_batches: int = 1,
        shard_and_cut: Callable[[nn.Module, Groups], nn.Module] = shard_and_cut,
    ) -> None:
        super().__init__(model, groups, micro_batches)
        if self.num_stages > 1:
            self.stage = take_stage(model, self.groups)
        elif "dp" in self.groups:
            sharded = shard_and_cut(model, self.groups)
            self.stage = Stage(sharded, sharded.module, [], None)
        else:
            mark_holders(model, dist.get_world_size(self.groups["tp"]))
            part = TensorParallel(model, group=self.groups["tp"])
            self.stage = Stage(part, part, [], None)
        self.model = self.stage.model

    def make_engine(self, inputs: Tensor, m: int) -> Pipeline | Accumulate:
        if self.num_stages == 1:
            return Accumulate(self.model, m)
        return self.pipeline(inputs, m, self.stage.loss_fn)

    def finish(self) -> None:
        """Make the gradients those of the mean loss over all samples: once, after the last step."""
        finish_gradients(self.stage, self.groups)

    def gradients(self) -> list[tuple[Tensor, int]]:
        """Each gradient that this rank holds, and how many ranks of the mesh hold the same one."""
        copies = dist.get_world_size(self.groups["replicate"]) if "replicate" in self.groups else 1
        return [(p.grad, copies * holders(p)) for p in self.parameters() if p.grad is not None]

    def named_weights(self) -> dict[str, nn.Parameter]:
        """The parameters of this rank's layers, as they compute, by their names in the whole."""
        if self.num_stages == 1:
            return dict(self.stage.inner.named_parameters())
        return names_in(self.stage.inner, self.num_blocks)


def with_all(groups: Groups) -> dict[str, Group]:
    """`groups` with one for pp and tp in any case, and the name dp for an axis of shards."""
    named = {"dp" if axis == "shard" else axis: group for axis, group in groups.items()}
    missing = [axis for axis in ("pp", "tp") if axis not in named]
    # A group of this rank alone: only its own ranks have to make it.
    me = [dist.get_rank()]
    alone = {axis: dist.new_group(me, use_local_synchronization=True) for axis in missing}
    return named | alone
