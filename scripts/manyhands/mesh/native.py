"""The same mesh by PyTorch: parallelize_module, pipelining and fully_shard, one inside the other.

    mesh = torch_mesh({"pp": 2, "dp": 2, "tp": 2})
    parallelize_module(model, mesh["tp"], plan)       first: matrices become DTensors on tp
    PipelineStage(this rank's layers, group of pp)
    fully_shard(block, mesh=mesh["dp"])               last: DTensors on ("dp", "tp")

A matrix is then cut over two axes of the mesh: ("_StridedShard(0)", "Shard(0)") says that its rows
were cut over tp first and then, within each part, over dp. Norms and positions are on dp only, so
they are DTensors of another mesh, and what takes a list of tensors has to be called once for each.

Price: as in combine.py, but with a pipeline a unit is gathered once a step and its gradient, kept
whole until the last micro-batch, is reduced once. reshard_after_forward=False is needed there.
Sources: https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html;
https://github.com/pytorch/torchtitan, whose order it is.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from manyhands.mesh.grid import groups_of
from manyhands.mesh.parts import bounds_of, cut_stages, names_in
from manyhands.mesh.training import Accumulate, OnMesh
from manyhands.mesh.whole import quiet
from manyhands.pipeline.stages import layers_of
from manyhands.pipeline.wiring import find_tied, sum_tied, torch_pipeline
from manyhands.tensor.dtensor import torch_tensor_parallel


def torch_shard_and_cut(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP x TP in place: the plan of lesson 13 over mesh["tp"], fully_shard over mesh["dp"].

    Each block is a unit. Weights have to be equal on all ranks. Train it inside loss_parallel().
    """
    torch_tensor_parallel(model, mesh["tp"])
    return shard(model, list(model.blocks), mesh)


def shard(
    model: nn.Module, units: list[nn.Module], mesh: DeviceMesh, reshard: bool | None = None
) -> nn.Module:
    """fully_shard over the axis dp or shard, with replicas where there is an axis replicate.

    Without an axis for shards nothing is done.
    """
    axes = [axis for axis in ("replicate", "dp", "shard") if axis in mesh.mesh_dim_names]
    if axes in ([], ["replicate"]):
        return model
    where = mesh[tuple(axes)] if len(axes) > 1 else mesh[axes[0]]
    for unit in units:
        fully_shard(unit, mesh=where, reshard_after_forward=reshard)
    return fully_shard(model, mesh=where, reshard_after_forward=reshard)


class TorchMeshTraining(OnMesh):
    """MeshTraining by PyTorch, with the same methods. Sizes that are cut have to divide evenly.

    AdamW takes its parameters with foreach=False: they are tensors of several meshes.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, micro_batches: int = 1) -> None:
        super().__init__(model, groups_of(mesh), micro_batches)
        if "tp" in mesh.mesh_dim_names:
            torch_tensor_parallel(model, mesh["tp"])
        if self.num_stages == 1:
            self.tied = []
            self.model = shard(model, list(model.blocks), mesh)
            return
        layers = layers_of(model)
        rank = dist.get_rank(self.groups["pp"])
        stages = cut_stages(layers, bounds_of(layers, self.num_stages))
        tied = [ranks for _, ranks in find_tied(stages, self.num_stages) if rank in ranks]
        own = stages[rank]
        blocks = [layer for layer in own if layer in set(model.blocks)]
        self.model = shard(own, blocks, mesh, reshard=False)  # its parameters are new ones now
        names = names_in(own, self.num_blocks)
        shared = names.get("tokens.weight", names.get("head.weight"))  # the only one in two stages
        self.tied = [(shared, ranks) for ranks in tied]

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        # Inside it, cross_entropy takes scores that are cut by the vocabulary.
        with loss_parallel():
            return super().step(inputs, targets)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with loss_parallel():
            return super().forward(inputs, targets)

    def make_engine(self, inputs: Tensor, m: int) -> object:
        if self.num_stages == 1:
            return Accumulate(lambda x, y: plain(self.model(x, y)), m)
        if not torch.is_grad_enabled():
            return self.pipeline(inputs, m, loss_of_scores)
        return TorchPipeline(self.model, self.num_stages, m, self.groups["pp"])

    def finish(self) -> None:
        """Make the gradients those of the mean loss over all samples: once, after the last step."""
        for param in self.parameters():
            if isinstance(param.grad, DTensor) and param.grad.placements != param.placements:
                # Without fully_shard a gradient may lie over tp in another way than its matrix.
                param.grad = param.grad.redistribute(placements=param.placements)
        tied = [(Local(param.grad), ranks) for param, ranks in self.tied if param.requires_grad]
        sum_tied(tied, self.groups["pp"])
        if "dp" in self.groups or "replicate" not in self.groups:
            return
        group = self.groups["replicate"]
        for param in self.parameters():
            part = Local(param.grad).grad
            dist.all_reduce(part, group=group)
            part /= dist.get_world_size(group)

    def named_weights(self) -> dict[str, nn.Parameter]:
        """The parameters of this rank's layers by their names in the whole; DTensors."""
        if self.num_stages == 1:
            return dict(self.model.named_parameters())
        return names_in(self.model, self.num_blocks)


class TorchPipeline:
    """PyTorch's 1F1B, called like Pipeline."""

    def __init__(self, stage: nn.Module, num_stages: int, m: int, group: dist.ProcessGroup) -> None:
        self.rank, self.last, self.group = dist.get_rank(group), num_stages - 1, group
        own = {self.rank: stage}
        self.schedule = torch_pipeline(own, num_stages, m, loss_of_scores, "1f1b", group)

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward of a batch; its mean loss on every rank."""
        losses: list[Tensor] = []
        given = [inputs.contiguous()] if self.rank == 0 else []
        wanted = {"target": targets.contiguous(), "losses": losses}
        self.schedule.step(*given, **(wanted if self.rank == self.last else {}))
        zero = torch.zeros((), device=inputs.device)
        loss = torch.stack(losses).mean().detach() if losses else zero
        dist.broadcast(loss, group=self.group, group_src=self.last)
        return loss


class Local:
    """This rank's part of a gradient, under the names that sum_tied asks for."""

    requires_grad = True

    def __init__(self, grad: Tensor) -> None:
        self.grad = grad.to_local() if isinstance(grad, DTensor) else grad


def plain(tensor: Tensor) -> Tensor:
    """The whole of a DTensor as a plain tensor; another tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loss_of_scores(scores: Tensor, targets: Tensor) -> Tensor:
    """The mean loss in nats of scores (B, T, V), which may be cut by the vocabulary."""
    exact = torch.promote_types(scores.dtype, torch.float32)
    return plain(F.cross_entropy(scores.flatten(0, 1).to(exact), targets.flatten()))


# ---- clipping ------------------------------------------------------------------------------------


def torch_norm(training: TorchMeshTraining) -> Tensor:
    """The norm of the whole gradient, a plain scalar, by get_total_norm.

    Of DTensors it takes the norm of the whole, but of those of one mesh only, and it does not know
    of other stages: their squares are added up over pp. A tied matrix counts on its first stage.
    """
    rank = dist.get_rank(training.groups["pp"])
    again = {param for param, ranks in training.tied if rank != ranks[0]}
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for param in training.parameters():
        if param.grad is not None and param not in again:
            mesh = getattr(param.grad, "device_mesh", None)
            by_mesh.setdefault(mesh, []).append(param.grad)
    with quiet():
        norms = [plain(get_total_norm(grads)) for grads in by_mesh.values()]
    total = torch.stack(norms).square().sum()
    dist.all_reduce(total, group=training.groups["pp"])
    return total.sqrt()


def torch_clip(training: TorchMeshTraining, max_norm: float) -> Tensor:
    """Scale all gradients in place, so that the norm of the whole is at most `max_norm`.

    After `training.finish()`. Returns the norm before it was clipped.
    """
    norm = torch_norm(training)
    clip_grads_with_norm_(training.parameters(), max_norm, norm, foreach=False)
    return norm
