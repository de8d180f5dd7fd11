"""Train the language model with data parallelism: every rank takes its share of each batch.

torchrun --standalone --nproc-per-node=2 scripts/train_ddp.py --data embedded --steps 300
bash sbatch/ddp.sbatch --steps 300          the same on all GPUs of this machine, or 2 CPU ranks
python scripts/train_ddp.py                 one rank, without torchrun
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import nn
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
    train: Callable | None = None  # where given, it takes the place of `fit` and uses its own parts


def learners_parts() -> dict[str, Callable]:
    """The learner's parts of lesson 06, and BucketedDDP of lesson 05 where it is there.

    A `train` of the learner's own wraps the model itself. Whoever has neither has torch_ddp, and
    trains with that.
    """
    found = mine.load("ddp", Parts._fields)
    if "train" not in found:
        found |= mine.load("data_parallel", ["BucketedDDP"], needed=False)
    if "BucketedDDP" in found:
        found.pop("torch_ddp", None)
    return found


def main(config: Config) -> float:
    """Train, test, write the report; return the best validation loss in nats per token."""
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
    model = Transformer(vocab_size, config.block, config.layers).to(world.device)
    if parts.train:
        parts.train(run, model, data)
    else:
        fit(run, model, data, parts)
    run.finish()
    if world.is_main:
        world.print(f"report: {write_report(run.folder)}")
    return run.valid_loss


def fit(run: Run, model: nn.Module, data: corpus.Corpus, parts: Parts) -> None:
    """Train `model` on all ranks, test it, and save its best weights once."""
    config, world = run.config, run.world

    # Data
    batch = config.batch // world.world_size
    sampler = parts.ShardedSampler(len(data.train), world.rank, world.world_size, config.seed)
    loader = DataLoader(data.train, batch, sampler=sampler, drop_last=True)
    valid, test = (
        DataLoader(part, batch, sampler=range(world.rank, len(part), world.world_size))
        for part in (data.valid, data.test)
    )

    # Model
    torch.manual_seed(world.data_seed)
    model = (parts.torch_ddp or parts.BucketedDDP)(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, fused=True)

    def mean_loss(batches: Iterator) -> float:
        return parts.mean_over_ranks(*total_loss(model, batches, world.device))

    # Training
    run.resume(model, optimizer)
    run.keep_best(mean_loss, valid)
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
    run.test(test, data.in_words)
    parts.save_once(model, run.folder / "model.pt")


if __name__ == "__main__":
    command_line(main, Config)
