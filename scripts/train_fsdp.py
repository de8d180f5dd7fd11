"""Train the language model sharded: every rank keeps its part of optimizer, gradients and weights.

torchrun --standalone --nproc-per-node=4 scripts/train_fsdp.py --impl zero3 --mesh 2x2
bash sbatch/fsdp.sbatch --impl mine         with your own functions in it
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset

from manyhands.data import corpus
from manyhands.ddp import wrapping as ddp
from manyhands.fsdp import fully_shard, meta
from manyhands.fsdp.meta import Draw
from manyhands.instruments.live import Live, parts_of
from manyhands.instruments.meters import reset_peaks
from manyhands.jobs import mine
from manyhands.models.transformer import Transformer, total_loss
from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import World, command_line, distributed
from manyhands.training.report import finish
from manyhands.training.run import Run
from manyhands.training.schedule import learning_rate_at, set_learning_rate
from manyhands.training.settings import TrainConfig
from manyhands.ways import fsdp as ways
from manyhands.ways.fsdp import Parts
from manyhands.ways.job import open_run, shape_of

TINY = {  # its short runs: gpu/jobs.py
    "": "{text} --impl zero3",
    "torch": "{text} --impl torch --dtype bfloat16 --offload",
}
SHARDED = {"zero1": ["optimizer"], "zero2": ["optimizer"]}  # of a checkpoint; the rest: all of it


@dataclass(frozen=True)
class Config(TrainConfig):
    """Settings of the run."""

    impl: Literal["mine", "zero1", "zero2", "zero3", "torch"] = "zero3"
    """What is sharded, by hand: the optimizer; gradients, too; weights, too. Or fully_shard."""
    mesh: str = ""
    """Replicas x shards, such as 2x2; empty shards over all ranks. For mine, zero3 and torch."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """To send weights and to compute in; bfloat16 for mine, zero3 and torch."""
    offload: bool = False
    """Keep shards and optimizer in the CPU's memory, and bring a unit when needed; for torch."""
    limit_mb: float = 0.0
    """Stop when a rank's tensors take more than so many MB, from the model's building on; 0 for no
    limit. Slow."""


HIGHEST = {  # what --impl mine trains with: the first of these parts that the learner has
    "FSDP": "zero3",
    "reduce_during_backward": "zero2",
    "ShardedOptimizer": "zero1",
    "Flat": "zero1",
    "torch_fsdp": "torch",
}


def main(config: Config) -> float:
    """Train, write the report, and return the validation loss in nats per token."""
    yours = mine.load("fsdp", Parts._fields) if config.impl == "mine" else {}
    impl = next((HIGHEST[name] for name in HIGHEST if name in yours), config.impl)
    if impl in SHARDED and (config.mesh or config.dtype != "float32"):
        raise BadInput(
            f"--impl {impl} keeps whole weights in float32 on one row of ranks: leave out --mesh "
            "and --dtype, or take --impl zero3 or torch"
        )
    if impl != "torch" and config.offload:
        raise BadInput(f"--impl {impl} does not offload: leave out --offload, or take --impl torch")
    with distributed(config.device, config.seed) as world:
        if config.impl == "mine":
            world.print(f"{mine.in_words(yours)}; trains as --impl {impl}")
        return train(config, world, impl, Parts(**yours))


def train(config: Config, world: World, impl: str, parts: Parts) -> float:
    # Data
    data = corpus.load_for(config)
    world.print(data.note)
    shape = shape_of(config, data)
    mesh = mesh_of(config, world, parts)
    run = open_run(config, world, "fsdp", data)
    batch = config.batch // world.world_size
    sampler = corpus.ShardedSampler(len(data.train), world.rank, world.world_size, config.seed)
    loader = DataLoader(data.train, batch, sampler=sampler, drop_last=True)

    # Model
    limit = int(config.limit_mb * 1e6) or None
    live = Live(dict, limit, device=world.device)  # not what is offloaded
    with live if limit else nullcontext():  # the limit holds from the first byte on
        model, optimizer = shard(config, impl, parts, shape, mesh, world)
    live.parts = parts_of(model, optimizer)

    # Training
    inner = getattr(optimizer, "optimizer", optimizer)  # the one whose state a checkpoint holds
    run.resume(model, inner, sharded=SHARDED.get(impl, ["model", "optimizer"]))
    reset_peaks(world.device)  # what it took to build the model is set-up
    for epoch in run.epochs(loader):
        sampler.set_epoch(epoch)
        for inputs, targets in run.batches(loader):
            set_learning_rate(optimizer, learning_rate_at(run.step, config))
            with live.at_first():
                loss = model(inputs, targets)
                loss.backward()
                optimizer.step()
                model.zero_grad()
            run.log(loss)

    # Result
    total, count = valid_total(run, model, data.valid, batch)
    valid_loss = ddp.mean_over_ranks(total, count)
    plain = model if impl in SHARDED else unshard(model, shape, world)
    return finish(run, plain, valid_loss, live)


def mesh_of(config: Config, world: World, parts: Parts) -> DeviceMesh | None:
    """The mesh that the setting asks for, or None."""
    if not config.mesh:
        return None
    replicas, _, shards = config.mesh.partition("x")
    if not (replicas.isdigit() and shards.isdigit()):
        raise BadInput(f"--mesh is {config.mesh}: give replicas x shards, such as 2x2")
    if int(replicas) * int(shards) != world.world_size:
        raise BadInput(
            f"--mesh {config.mesh} has {int(replicas) * int(shards)} places, but there are "
            f"{world.world_size} ranks: start as many, or take another mesh"
        )
    return parts.make_mesh(int(replicas), int(shards), world.device.type)


def first_model(
    impl: str, parts: Parts, shape: tuple[int, int, int], world: World
) -> tuple[Transformer, Draw | None]:
    """The model without memory, and a function that draws its weights; or with memory, and None.

    Stages 1 and 2 keep whole weights, and your torch_fsdp sends rank 0's weights to all ranks.
    """
    is_your_torch_fsdp = impl == "torch" and parts.torch_fsdp is not fully_shard.torch_fsdp
    if impl in SHARDED or is_your_torch_fsdp:
        return Transformer(*shape).to(world.device), None
    return meta.record(partial(Transformer, *shape), world.device)


def shard(
    config: Config,
    impl: str,
    parts: Parts,
    shape: tuple[int, int, int],
    mesh: DeviceMesh | None,
    world: World,
) -> tuple[nn.Module, object]:
    """Build the model in shards, block by block, and make the optimizer of this rank's shards."""
    model, draw = first_model(impl, parts, shape, world)
    torch.manual_seed(world.data_seed)
    adamw = partial(torch.optim.AdamW, lr=config.learning_rate, fused=True)
    if impl in SHARDED:
        return model, ways.shard_optimizer(model, int(impl[-1]), adamw, parts)
    dtype = None if config.dtype == "float32" else getattr(torch, config.dtype)
    is_native = impl == "torch"
    where = {"mesh": mesh, "offload": config.offload, "draw": draw, "device": world.device}
    model = ways.shard(model, is_native, dtype=dtype, parts=parts, **where)
    return model, adamw(model.parameters())


def unshard(sharded: nn.Module, shape: tuple[int, int, int], world: World) -> nn.Module:
    """The model with the weights of all shards, on the CPU of rank 0; elsewhere without memory."""
    state = fully_shard.full_state(sharded)
    with torch.device("cpu" if world.is_main else "meta"):
        plain = Transformer(*shape)
    if world.is_main:
        plain.load_state_dict(state)
    return plain


def valid_total(run: Run, model: nn.Module, valid: Dataset, batch: int) -> tuple[Tensor, int]:
    """Sum and number of this rank's validation losses; every rank calls the model as often."""
    world = run.world
    share = range(world.rank, len(valid), world.world_size)
    loader = DataLoader(valid, batch, sampler=share)
    total, count = total_loss(model, run.validation(loader), world.device)
    most = math.ceil(math.ceil(len(valid) / world.world_size) / batch)
    if len(loader) < most:  # all ranks must gather, also one whose share is done
        total_loss(model, [[part[None] for part in valid[0]]], world.device)
    return total, count


if __name__ == "__main__":
    command_line(main, Config)
