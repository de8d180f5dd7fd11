"""Train the language model in less memory: computing twice, in small pieces, with short numbers.

torchrun --standalone --nproc-per-node=2 scripts/train_memory.py --save all
bash sbatch/memory.sbatch --save checkpointing --impl mine      with your own functions in it
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from manyhands.data import corpus
from manyhands.data_parallel.replicas import average_gradients, broadcast_state
from manyhands.ddp import wrapping
from manyhands.instruments.live import Live, parts_of
from manyhands.jobs import mine
from manyhands.memory import savings
from manyhands.models.transformer import Transformer, total_loss
from manyhands.ranks.runtime import World, command_line
from manyhands.training.report import finish
from manyhands.training.schedule import learning_rate_at, set_learning_rate
from manyhands.training.settings import TrainConfig
from manyhands.ways.job import open_run, shape_of

TINY = {"": "{text}"}  # its short runs: gpu/jobs.py
NUM_PIECES = 4


@dataclass(frozen=True)
class Config(TrainConfig):
    """Settings of the run."""

    impl: Literal["mine", "scratch", "torch"] = "scratch"
    """Whose functions: yours (mine/memory.py), the course's, or PyTorch's checkpoint."""
    save: Literal["nothing", "autocast", "checkpointing", "accumulation", "all"] = "all"
    """How to save: bfloat16 numbers, blocks computed twice, batches in 4 pieces, or all three."""


class Parts(NamedTuple):
    """The exercises of lesson 09 that a job can use."""

    accumulate: Callable = savings.accumulate
    Checkpoint: type = savings.Checkpoint


def main(config: Config) -> float:
    """Train, test, write the report; return the best validation loss in nats per token."""
    return mine.start("memory", config, Parts, train)


def train(config: Config, world: World, parts: Parts) -> float:
    # Data
    data = corpus.load_for(config)
    world.print(data.note)
    run = open_run(config, world, "memory", data)
    sampler, loader, valid, test = make_loaders(data, config, world)

    # Model
    model = Transformer(*shape_of(config, data)).to(world.device)
    torch.manual_seed(world.data_seed)
    broadcast_state(model)
    loss_of, num_pieces = saving(config, model, parts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, fused=True)
    live = Live(parts_of(model, optimizer), device=world.device)

    def mean_loss(batches: Iterator) -> float:
        return wrapping.mean_over_ranks(*total_loss(model, batches, world.device))

    # Training
    run.resume(model, optimizer)
    run.keep_best(mean_loss, valid)
    for epoch in run.epochs(loader):
        sampler.set_epoch(epoch)
        for batch_of_rank in run.batches(loader):
            set_learning_rate(optimizer, learning_rate_at(run.step, config))
            pieces = list(zip(*(part.chunk(num_pieces) for part in batch_of_rank), strict=True))
            with live.at_first():
                loss = parts.accumulate(loss_of, pieces)
                average_gradients(model)
                optimizer.step()
                optimizer.zero_grad()
            run.log(torch.as_tensor(loss))

    # Result
    run.test(test, data.in_words)
    return finish(run, model, run.valid_loss, live)


def make_loaders(data: corpus.Corpus, config: Config, world: World) -> tuple:
    """This rank's sampler, and its batches for training, validation and test."""
    batch = config.batch // world.world_size
    sampler = corpus.ShardedSampler(len(data.train), world.rank, world.world_size, config.seed)
    loader = DataLoader(data.train, batch, sampler=sampler, drop_last=True)
    return sampler, loader, *corpus.held_out(data, batch, world.rank, world.world_size)


def saving(
    config: Config, model: Transformer, parts: Parts
) -> tuple[Callable[[Tensor, Tensor], Tensor], int]:
    """Set the model up as `--save` asks; returns the loss of a piece, and the number of pieces."""
    if config.save in ("checkpointing", "all"):
        again: Callable[[nn.Module, Tensor], Tensor] = partial(
            savings.checkpointed, rule=parts.Checkpoint
        )
        if config.impl == "torch":
            again = partial(checkpoint, use_reentrant=False)
        model.through = again
    is_short = config.save in ("autocast", "all")

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=is_short):
            return model(inputs, targets)

    return loss_of, NUM_PIECES if config.save in ("accumulation", "all") else 1


if __name__ == "__main__":
    command_line(main, Config)
