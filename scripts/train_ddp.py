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

from manyhands.data import corpus
from manyhands.data_parallel import replicas
from manyhands.ddp import wrapping
from manyhands.jobs import mine
from manyhands.models.transformer import Transformer, flops_per_token, total_loss
from manyhands.ranks.runtime import World, command_line, distributed, place, process_group
from manyhands.training.report import write_report
from manyhands.training.run import (
    Run,
    TrainConfig,
    learning_rate_at,
    save_once,
    set_learning_rate,
)


@dataclass(frozen=True)
class Config(TrainConfig):
    """Settings of the run."""

    impl: Literal["mine", "scratch", "torch"] = "torch"
    """Whose parts: yours (mine/ddp.py, mine/data_parallel.py), the course's, or PyTorch's."""


class Parts(NamedTuple):
    """What data parallelism adds to the program of one process."""

    place: Callable = place
    process_group: Callable = process_group
    ShardedSampler: Callable = corpus.ShardedSampler
    BucketedDDP: Callable = replicas.BucketedDDP
    torch_ddp: Callable | None = None  # where given, it takes the place of BucketedDDP
    mean_over_ranks: Callable = wrapping.mean_over_ranks
    save_once: Callable = save_once


def learners_parts() -> dict[str, Callable]:
    """The learner's parts of lesson 06, and BucketedDDP of lesson 05 where it is there.

    Whoever has not been through lesson 05 has torch_ddp, and trains with that.
    """
    found = mine.load("ddp", Parts._fields)
    found |= mine.load("data_parallel", ["BucketedDDP"], needed=False)
    if "BucketedDDP" in found:
        found.pop("torch_ddp", None)
    return found


def main(config: Config) -> float:
    """Train, write the report, and return the validation loss in nats per token."""
    yours = learners_parts() if config.impl == "mine" else {}
    parts = Parts(**yours)  # what the learner has not written, the course has
    if config.impl == "torch":
        parts = Parts(ShardedSampler=corpus.torch_sampler, torch_ddp=wrapping.torch_ddp)
    join = {"place": parts.place, "process_group": parts.process_group}
    with distributed(config.device, config.seed, **join) as world:
        if config.impl == "mine":
            world.print(mine.in_words(yours))
        return train(config, world, parts)


def train(config: Config, world: World, parts: Parts) -> float:
    # Data
    data = corpus.load(config.data, config.block, config.vocab, config.valid_tokens)
    world.print(data.note)
    vocab_size = data.tokenizer.vocab_size
    run = Run(
        config,
        world,
        "ddp",
        num_samples=len(data.train),
        flops_per_token=flops_per_token(vocab_size, config.block, config.layers),
        floor=data.entropy_floor,
    )
    batch = config.batch // world.world_size
    sampler = parts.ShardedSampler(len(data.train), world.rank, world.world_size, config.seed)
    loader = DataLoader(data.train, batch, sampler=sampler, drop_last=True)
    share = range(world.rank, len(data.valid), world.world_size)
    valid = DataLoader(data.valid, batch, sampler=share)

    # Model
    model = Transformer(vocab_size, config.block, config.layers).to(world.device)
    torch.manual_seed(world.data_seed)
    model = (parts.torch_ddp or parts.BucketedDDP)(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, fused=True)

    # Training
    run.resume(model, optimizer)
    for epoch in run.epochs(loader):
        sampler.set_epoch(epoch)
        for inputs, targets in run.batches(loader):
            set_learning_rate(optimizer, learning_rate_at(run.step, config))
            loss = model(inputs, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss)

    # Result
    total, count = total_loss(model, run.validation(valid), world.device)
    valid_loss = parts.mean_over_ranks(total, count)
    parts.save_once(model, run.folder / "model.pt")
    run.finish(valid_loss)
    if world.is_main:
        world.print(f"report: {write_report(run.folder)}")
    return valid_loss


if __name__ == "__main__":
    command_line(main, Config)
