"""Train the language model with data parallelism: every rank takes its share of each batch.

torchrun --standalone --nproc-per-node=2 scripts/train_ddp.py --data embedded --steps 300
bash sbatch/ddp.sbatch --steps 300          the same on all GPUs of this machine, or 2 CPU ranks
python scripts/train_ddp.py                 one rank, without torchrun
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch.utils.data import DataLoader

from manyhands import corpus, ddp, mine
from manyhands.run import Run, TrainConfig, save_once
from manyhands.runtime import World, command_line, distributed, place, process_group
from manyhands.transformer import Transformer, flops_per_token, total_loss
from report import write_report


@dataclass(frozen=True)
class Config(TrainConfig):
    """Settings of the run."""

    impl: Literal["mine", "scratch", "torch"] = "torch"
    """Whose data parallelism: yours (mine/ddp.py), the course's by hand, or PyTorch's."""


class Parts(NamedTuple):
    """What data parallelism adds to the program of one process."""

    place: Callable = place
    process_group: Callable = process_group
    ShardedSampler: Callable = corpus.ShardedSampler
    BucketedDDP: Callable = ddp.BucketedDDP
    mean_over_ranks: Callable = ddp.mean_over_ranks
    save_once: Callable = save_once


def choose_parts(impl: str) -> Parts:
    """The parts asked for; where `mine` lacks one, the course's own takes its place."""
    if impl == "mine":
        return Parts(**mine.load("ddp", Parts._fields))
    if impl == "torch":
        return Parts(ShardedSampler=corpus.torch_sampler, BucketedDDP=ddp.torch_ddp)
    return Parts()


def main(config: Config) -> float:
    """Train, write the report, and return the validation loss in nats per token."""
    parts = choose_parts(config.impl)
    join = {"place": parts.place, "process_group": parts.process_group}
    with distributed(config.device, config.seed, **join) as world:
        if config.impl == "mine":
            yours = [
                name for name in Parts._fields if getattr(parts, name) != getattr(Parts(), name)
            ]
            world.print(f"yours: {', '.join(yours)}; the course's: all else")
        return train(config, world, parts)


def train(config: Config, world: World, parts: Parts) -> float:
    # Data
    data = corpus.load(config.data, config.block, config.vocab)
    world.print(data.note)
    vocab_size = data.tokenizer.vocab_size
    flops = flops_per_token(vocab_size, config.block, config.layers)
    run = Run(config, world, "ddp", len(data.train), flops, data.entropy_floor)
    batch = config.batch // world.world_size
    sampler = parts.ShardedSampler(len(data.train), world.rank, world.world_size, config.seed)
    loader = DataLoader(data.train, batch, sampler=sampler, drop_last=True)
    share = range(world.rank, len(data.valid), world.world_size)
    valid = DataLoader(data.valid, batch, sampler=share)

    # Model
    model = Transformer(vocab_size, config.block, config.layers).to(world.device)
    torch.manual_seed(world.data_seed)
    model = parts.BucketedDDP(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    # Training
    run.resume(model, optimizer)
    for epoch in run.epochs(loader):
        sampler.set_epoch(epoch)
        for inputs, targets in run.batches(loader):
            run.set_learning_rate(optimizer)
            loss = model(inputs, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss)

    # Result
    total, count = total_loss(model, valid, world.device)
    valid_loss = parts.mean_over_ranks(total, count)
    parts.save_once(model, run.folder / "model.pt")
    run.finish(valid_loss)
    if world.is_main:
        world.print(f"report: {write_report(run.folder)}")
    return valid_loss


if __name__ == "__main__":
    command_line(main, Config)
