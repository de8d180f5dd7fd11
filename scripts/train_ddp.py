"""Train the language model with data parallelism: every rank takes its share of each batch.

torchrun --standalone --nproc-per-node=2 scripts/train_ddp.py --data embedded --steps 300
bash sbatch/ddp.sbatch --steps 300          the same on all GPUs of this machine, or 2 CPU ranks
python scripts/train_ddp.py                 one rank, without torchrun
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader

from manyhands.data import corpus
from manyhands.data.corpus import Corpus
from manyhands.data_parallel import replicas
from manyhands.ddp import wrapping
from manyhands.jobs import mine
from manyhands.models.transformer import Transformer, total_loss
from manyhands.ranks.runtime import command_line, distributed, place, process_group
from manyhands.training.report import write_report
from manyhands.training.run import Run, save_once
from manyhands.training.schedule import learning_rate_at, set_learning_rate
from manyhands.training.settings import TrainConfig
from manyhands.ways.job import open_run, shape_of

TINY = {"": "{text} --impl scratch", "torch": "{text} --impl torch"}  # its short runs: gpu/jobs.py


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
    mean_over_ranks: Callable = wrapping.mean_over_ranks
    save_once: Callable = save_once
    train: Callable | None = None  # the learner's own program, which has its own parts in it


def learners_parts() -> dict[str, Callable]:
    """The learner's parts of lesson 06; without a program, also BucketedDDP of lesson 05."""
    found = mine.load("ddp", Parts._fields)
    if "train" not in found:
        found |= mine.load("data_parallel", ["BucketedDDP"], needed=False)
    return found


def main(config: Config) -> float:
    """Train, test, write the report; return the best validation loss in nats per token."""
    yours = learners_parts() if config.impl == "mine" else {}
    parts = Parts(**yours)  # what the learner has not written, the course has
    if config.impl == "torch":
        parts = Parts(ShardedSampler=corpus.torch_sampler, BucketedDDP=wrapping.torch_ddp)
    join = {"place": parts.place, "process_group": parts.process_group}
    with distributed(config.device, config.seed, **join) as world:
        if config.impl == "mine":
            world.print(mine.in_words(yours))
        data = corpus.load_for(config)
        world.print(data.note)
        run = open_run(config, world, "ddp", data)
        model = Transformer(*shape_of(config, data)).to(world.device)
        program = parts.train or partial(train, parts=parts)
        program(run, model, data)
        run.finish()
        if world.is_main:
            world.print(f"report: {write_report(run.folder)}")
        return run.valid_loss


def train(run: Run, model: nn.Module, data: Corpus, parts: Parts) -> None:
    """Train `model` on `data` on all ranks: the program of exercise 6.8, made of `parts`."""
    config, world = run.config, run.world

    # Data
    batch = config.batch // world.world_size
    sampler = parts.ShardedSampler(len(data.train), world.rank, world.world_size, config.seed)
    loader = DataLoader(data.train, batch, sampler=sampler, drop_last=True)
    valid, test = corpus.held_out(data, batch, world.rank, world.world_size)

    # Model
    model = parts.BucketedDDP(model)
    torch.manual_seed(world.data_seed)
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
