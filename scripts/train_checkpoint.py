"""Train the language model sharded, on ranks whose number may change from one start to the next.

torchrun --standalone --nproc-per-node=4 scripts/train_checkpoint.py --batch 12 --out runs/mine
torchrun --standalone --nproc-per-node=3 scripts/train_checkpoint.py --batch 12 --out runs/mine
bash sbatch/checkpoint.sbatch --impl mine         with your own functions in it
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader

from manyhands.checkpoint import elastic
from manyhands.data import corpus
from manyhands.ddp.wrapping import mean_over_ranks
from manyhands.fsdp.fully_shard import full_state
from manyhands.instruments.live import Live, parts_of
from manyhands.jobs import mine
from manyhands.models.transformer import Transformer, total_loss
from manyhands.ranks.runtime import World, command_line, distributed, on_main, together
from manyhands.training.checkpoints import ShardedCheckpoints
from manyhands.training.report import finish
from manyhands.training.run import Run
from manyhands.training.schedule import learning_rate_at, set_learning_rate
from manyhands.training.settings import TrainConfig
from manyhands.ways.fsdp import shard
from manyhands.ways.job import open_run, shape_of

TINY = {"": "{text} --save-every 10", "torch": "{text} --save-every 10 --impl torch"}


@dataclass(frozen=True)
class Config(TrainConfig):
    """Settings of the run."""

    impl: Literal["mine", "scratch", "torch"] = "scratch"
    """Sharded by hand, also with your own functions of lesson 11 (mine), or by fully_shard."""
    store: str = ""
    """Where to save: a folder or an address such as s3://bucket/run; empty: in the run's folder."""


class Parts(NamedTuple):
    """The exercises of lesson 11 that a job can use."""

    samples_of_step: Callable = elastic.samples_of_step


def main(config: Config) -> float:
    """Train, write the report, and return the validation loss in nats per token."""
    yours = mine.load("checkpoint", Parts._fields) if config.impl == "mine" else {}
    with distributed(config.device, config.seed) as world:
        if config.impl == "mine":
            world.print(mine.in_words(yours))
        return train(config, world, Parts(**yours))


def train(config: Config, world: World, parts: Parts) -> float:
    # Data
    data = corpus.load_for(config)
    world.print(data.note)
    shape = shape_of(config, data)
    checkpoints = partial(ShardedCheckpoints, address=config.store)
    run = open_run(config, world, "checkpoint", data, checkpoints=checkpoints, may_differ=["ranks"])
    place = (world.rank, world.world_size)
    sampler = elastic.PlacedBatches(
        len(data.train), config.batch, *place, config.seed, parts.samples_of_step
    )
    loader = DataLoader(data.train, batch_sampler=sampler)
    valid, test = corpus.held_out(data, config.batch // world.world_size, *place)

    # Model
    model = shard(Transformer(*shape).to(world.device), native=config.impl == "torch")
    torch.manual_seed(world.data_seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, fused=True)
    live = Live(parts_of(model, optimizer), device=world.device)

    def mean_loss(batches: Iterator) -> float:
        share = list(batches)
        most = max(together(lambda: len(share)))
        total, count = total_loss(model, share, world.device)
        # All ranks must gather weights, also one whose share is done.
        spare = [part[None] for part in data.valid[0]]
        total_loss(model, [spare] * (most - len(share)), world.device)
        return mean_over_ranks(total, count)

    # Training
    run.resume(model, optimizer, sharded=["model", "optimizer"])
    run.keep_best(mean_loss, valid)
    notes = None
    for epoch in run.epochs(loader):
        sampler.set_epoch(epoch)
        notes = notes or take_notes(run)
        for inputs, targets in run.batches(loader):
            set_learning_rate(optimizer, learning_rate_at(run.step, config))
            with live.at_first():
                loss = model(inputs, targets)
                loss.backward()
                optimizer.step()
                model.zero_grad()
            notes.write(run.step, sampler.taken)
            run.log(loss)

    # Result
    run.test(test, data.in_words)
    return finish(run, unshard(model, Transformer(*shape), world), run.valid_loss, live)


def unshard(sharded: nn.Module, plain: nn.Module, world: World) -> nn.Module:
    """Set `plain`, on the CPU of rank 0, to the weights of all shards; returns it on all ranks."""
    state = full_state(sharded)
    if world.is_main:
        plain.load_state_dict(state)
    return plain


def take_notes(run: Run) -> elastic.Notes:
    """Where this rank notes its samples, in this life of the run."""
    folder = run.folder / "samples"
    life = on_main(lambda: elastic.num_lives(folder))
    return elastic.Notes(folder, life, run.world.rank, run.world.world_size)


if __name__ == "__main__":
    command_line(main, Config)
