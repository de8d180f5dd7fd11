"""The ways to train one model on n ranks, each wrapped and stepped as in its own lesson.

    way             what a rank holds                              its share of the global batch
    one process     everything, on rank 0; the others do nothing   all of it
    DDP             everything                                     1/n of the samples
    ZeRO-1, 2, 3    1/n of optimizer state, gradients, weights     1/n of the samples
    fully_shard     the same as ZeRO-3, by PyTorch                 1/n of the samples
    pipeline        some of the layers                             all of it, in micro-batches
    tensor          1/n of every matrix                            all of it
      + sequence    and 1/n of the positions between the layers    all of it

With 4 ranks or more, and an even number of them, two techniques on a mesh:

    FSDP x TP       1/n of every matrix                            2/n of the samples
    PP x DP         one of two stages                              2/n of them, in micro-batches

A new way is one function (a model, a setting) -> Ready, and one line in WAYS or in ON_A_MESH.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from manyhands.data_parallel.replicas import BucketedDDP, broadcast_state
from manyhands.fsdp import flat, fully_shard, units, zero
from manyhands.mesh.grid import coordinates, make_groups, share_of_data
from manyhands.mesh.training import MeshTraining
from manyhands.models.transformer import Transformer, token_loss
from manyhands.pipeline import engine, schedules, stages, wiring
from manyhands.ranks.runtime import BadInput
from manyhands.tensor.model import TensorParallel
from manyhands.tensor.sequence import TensorSequenceParallel

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Setting:
    """The one model and the one global batch that all ways train with.

    `batch` counts the sequences of a step over all ranks together; a pipeline cuts them into
    `micro_batches`.
    """

    layers: int = 4
    vocab: int = 256
    block: int = 32
    batch: int = 16
    micro_batches: int = 4
    seed: int = 1

    def check(self, ranks: int) -> None:
        """Refuse what some way could not train on so many ranks."""
        if min(self.layers, self.vocab, self.block, self.batch, self.micro_batches) < 1:
            raise BadInput(f"{self}: all sizes must be at least 1")
        if self.batch % ranks or self.batch % self.micro_batches:
            raise BadInput(
                f"--batch {self.batch} is shared by {ranks} rank(s) and cut into "
                f"{self.micro_batches} micro-batches: take a multiple of both numbers"
            )
        if self.block % ranks:
            raise BadInput(
                f"{self.block} positions cannot be shared by {ranks} ranks: take a multiple of "
                f"{ranks} as --block"
            )
        if self.layers < ranks:
            raise BadInput(
                f"{self.layers} heads cannot be shared by {ranks} ranks: take --layers {ranks} (it "
                "gives as many heads) or more"
            )
        if has_mesh(ranks) and self.batch % (ranks // 2 * self.micro_batches):
            raise BadInput(
                f"--batch {self.batch} is shared by {ranks // 2} pipelines of 2 ranks and cut into "
                f"{self.micro_batches} micro-batches: take a multiple of "
                f"{ranks // 2 * self.micro_batches}"
            )

    def build(self, device: torch.device) -> Transformer:
        """The same model with the same first weights on every rank."""
        torch.manual_seed(self.seed)
        return Transformer(self.vocab, self.block, self.layers).to(device)


class Ready(NamedTuple):
    """A way to train, set up on this rank."""

    model: nn.Module  # with this rank's parameters
    optimizer: object
    step: Callable[[Tensor, Tensor], Tensor] | None  # the global batch (B, T) -> loss; None: idle


Make = Callable[[Transformer, Setting], Ready]


def one_process(model: Transformer, setting: Setting) -> Ready:
    optimizer = adamw(model.parameters())
    is_first = dist.get_rank() == 0
    return Ready(model, optimizer, train_with(model, optimizer) if is_first else None)


def ddp(model: Transformer, setting: Setting) -> Ready:
    replica = BucketedDDP(model)
    optimizer = adamw(replica.parameters())
    return Ready(replica, optimizer, train_with(replica, optimizer, own_samples))


def sharded_optimizer(model: Transformer, setting: Setting, stage: int) -> Ready:
    """ZeRO stage 1 or 2: every block is a Flat, and so is all the rest."""
    broadcast_state(model)
    flats = [flat.Flat(params) for params in flat.units_of(model)]
    if stage == 2:
        zero.reduce_during_backward(flats)
    optimizer = zero.ShardedOptimizer(flats, adamw)
    return Ready(model, optimizer, train_with(model, optimizer, own_samples))


def fsdp(model: Transformer, setting: Setting) -> Ready:
    sharded = units.FSDP(model, list(model.blocks))
    optimizer = adamw(sharded.parameters())
    return Ready(sharded, optimizer, train_with(sharded, optimizer, own_samples))


def torch_fsdp(model: Transformer, setting: Setting) -> Ready:
    mesh = init_device_mesh(model.head.weight.device.type, (dist.get_world_size(),))
    sharded = fully_shard.torch_fsdp(model, list(model.blocks), mesh)
    optimizer = adamw(sharded.parameters())
    return Ready(sharded, optimizer, train_with(sharded, optimizer, own_samples))


def pipeline(model: Transformer, setting: Setting) -> Ready:
    """1F1B over stages that are cut by the FLOPs of their layers, so the cut is always the same."""
    n, rank, width = dist.get_world_size(), dist.get_rank(), 32 * setting.layers
    of_block = 24 * width**2 + 4 * setting.block * width  # of a token, forward
    costs = [0, *[of_block] * setting.layers, 2 * setting.vocab * width]
    every = stages.cut(stages.layers_of(model), stages.partition(costs, n))
    tied = [entry for entry in wiring.find_tied(every, n) if rank in entry[1]]
    own = every[rank]
    schedule = schedules.one_f_one_b(n, setting.micro_batches)
    shape = (setting.batch // setting.micro_batches, setting.block, width)
    runner = engine.Pipeline({rank: own}, schedule, token_loss, shape)
    optimizer = adamw(own.parameters())

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = runner.step(inputs, targets)
        wiring.sum_tied(tied)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Ready(own, optimizer, step)


def tensor(model: Transformer, setting: Setting, cut: type = TensorParallel) -> Ready:
    part = cut(model)
    optimizer = adamw(part.parameters())
    return Ready(part, optimizer, train_with(part, optimizer, finish=part.finish_gradients))


def mesh(model: Transformer, setting: Setting, sizes: Mapping[str, int], m: int) -> Ready:
    """Techniques on a mesh of these axes; each rank's share of the samples in m micro-batches."""
    training = MeshTraining(model, make_groups(sizes), m)
    share, num_shares = share_of_data(coordinates(dist.get_rank(), sizes), sizes)
    optimizer = adamw(training.parameters())

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        mine = (batch.chunk(num_shares)[share] for batch in (inputs, targets))
        loss = training.step(*mine)
        training.finish()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Ready(training.model, optimizer, step)


def fsdp_and_tensor(model: Transformer, setting: Setting) -> Ready:
    return mesh(model, setting, {"dp": dist.get_world_size() // 2, "tp": 2}, 1)


def pipeline_and_replicas(model: Transformer, setting: Setting) -> Ready:
    sizes = {"pp": 2, "replicate": dist.get_world_size() // 2}
    return mesh(model, setting, sizes, setting.micro_batches)


WAYS: dict[str, Make] = {
    "one process": one_process,
    "DDP": ddp,
    "ZeRO-1": partial(sharded_optimizer, stage=1),
    "ZeRO-2": partial(sharded_optimizer, stage=2),
    "ZeRO-3": fsdp,
    "fully_shard": torch_fsdp,
    "pipeline (1F1B)": pipeline,
    "tensor": tensor,
    "tensor + sequence": partial(tensor, cut=TensorSequenceParallel),
}
ON_A_MESH: dict[str, Make] = {"FSDP x TP": fsdp_and_tensor, "PP x DP": pipeline_and_replicas}


def has_mesh(ranks: int) -> bool:
    """Can so many ranks be a mesh of two axes, of which one has 2?"""
    return ranks >= 4 and ranks % 2 == 0


def ways_for(ranks: int) -> dict[str, Make]:
    """The ways to train on so many ranks."""
    return WAYS | ON_A_MESH if has_mesh(ranks) else dict(WAYS)


# ---- what they share ---------------------------------------------------------------------------


def adamw(params: object) -> torch.optim.Optimizer:
    """The same optimizer for all ways."""
    return torch.optim.AdamW(params, lr=LEARNING_RATE, fused=True)


def own_samples(batch: Tensor) -> Tensor:
    """This rank's share of the global batch: (B, T) -> (B/n, T)."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def all_samples(batch: Tensor) -> Tensor:
    return batch


def train_with(
    model: nn.Module,
    optimizer: object,
    share: Callable[[Tensor], Tensor] = all_samples,
    finish: Callable[[], None] | None = None,
) -> Callable[[Tensor, Tensor], Tensor]:
    """A training step: forward and backward of this rank's share, and the optimizer's step.

    Args:
        share: takes the global batch and returns what this rank computes on.
        finish: what is left to do with the gradients after backward.
    """

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = model(share(inputs), share(targets))
        loss.backward()
        if finish:
            finish()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
