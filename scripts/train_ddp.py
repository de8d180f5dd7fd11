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
from manyhands.runtime import World, command_line, distributed
from manyhands.transformer import Transformer, flops_per_token, total_loss
from report import write_report


@dataclass(frozen=True)
class Config(TrainConfig):
    """Settings of the run."""

    impl: Literal["mine", "scratch", "torch"] = "torch"
    """Whose data parallelism: yours (mine/ddp.py), the course's by hand, or PyTorch's."""


class Parts(NamedTuple):
    """What data parallelism adds to the loop of one process."""

    ShardedSampler: Callable = corpus.ShardedSampler
    BucketedDDP: Callable = ddp.BucketedDDP
    mean_over_ranks: Callable = ddp.mean_over_ranks
    save_once: Callable = save_once


def choose_parts(impl: str, world: World) -> Parts:
    """The parts asked for; where `mine` lacks one, the course's own takes its place."""
    if impl == "torch":
        return Parts(ShardedSampler=corpus.torch_sampler, BucketedDDP=ddp.torch_ddp)
    if impl == "scratch":
        return Parts()
    found = mine.load("ddp", Parts._fields)
    others = [name for name in Parts._fields if name not in found]
    world.print(f"yours: {', '.join(found)}; the course's: {', '.join(others) or 'none'}")
    return Parts(**found)


def main(config: Config) -> float:
    """Train, write the report, and return the validation loss in nats per token."""
    with distributed(config.device, config.seed) as world:
        return train(config, world)


def train(config: Config, world: World) -> float:
    parts = choose_parts(config.impl, world)
    # Data
    data = corpus.load(config.data, config.block, config.vocab)
    world.print(data.note)
    vocab_size = data.tokenizer.vocab_size
    flops = flops_per_token(vocab_size, config.block, config.layers)
    run = Run(config, world, "ddp", flops_per_token=flops, floor=data.entropy_floor)
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
