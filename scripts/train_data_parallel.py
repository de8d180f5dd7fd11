"""Train the language model with data parallelism by hand, in each of the ways of lesson 05.

torchrun --standalone --nproc-per-node=3 scripts/train_data_parallel.py --impl server
bash sbatch/data_parallel.sbatch --impl overlapped --mine     with your own functions in it
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from manyhands.data import corpus
from manyhands.data_parallel import loops, replicas
from manyhands.ddp import wrapping
from manyhands.jobs import mine
from manyhands.models.transformer import Transformer, total_loss
from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import World, command_line, distributed
from manyhands.training.report import write_report
from manyhands.training.run import save_once
from manyhands.training.schedule import learning_rate_at, set_learning_rate
from manyhands.training.settings import TrainConfig
from manyhands.ways.data_parallel import replica
from manyhands.ways.job import open_run, shape_of

TINY = {"": "{text}"}  # its short runs: gpu/jobs.py
BUCKET_BYTES = 25_000_000
EXERCISES = {  # of lesson 05, which each --impl is made of
    "server": ("broadcast_state", "worker_step", "server_step"),
    "naive": ("broadcast_state", "average_gradients"),
    "bucketed": ("broadcast_state", "make_buckets"),
    "overlapped": ("BucketedDDP",),
}


@dataclass(frozen=True)
class Config(TrainConfig):
    """Settings of the run."""

    impl: Literal["server", "naive", "bucketed", "overlapped", "torch"] = "overlapped"
    """Where gradients meet: at a server on rank 0; after or during backward; in PyTorch's DDP."""
    mine: bool = False
    """Train with your own functions of mine/data_parallel.py, where it has them."""


class Parts(NamedTuple):
    """The exercises of lesson 05 that a job can use."""

    broadcast_state: Callable = replicas.broadcast_state
    average_gradients: Callable = replicas.average_gradients
    make_buckets: Callable = replicas.make_buckets
    BucketedDDP: Callable = replicas.BucketedDDP
    worker_step: Callable = loops.worker_step
    server_step: Callable = loops.server_step


def main(config: Config) -> float:
    """Train, write the report, and return the validation loss in nats per token."""
    if config.mine and config.impl not in EXERCISES:
        raise BadInput(
            f"--impl {config.impl} has no function of yours: leave out --mine, or take one of "
            f"{', '.join(EXERCISES)}"
        )
    yours = mine.load("data_parallel", EXERCISES[config.impl]) if config.mine else {}
    with distributed(config.device, config.seed) as world:
        if config.impl == "server" and world.world_size == 1:
            raise BadInput(
                "--impl server on 1 rank is a server without workers: start 2 ranks or more with "
                "torchrun --nproc-per-node=2, or take another --impl"
            )
        if config.mine:
            world.print(mine.in_words(yours))
        return train(config, world, Parts(**yours))


def train(config: Config, world: World, parts: Parts) -> float:
    has_server = config.impl == "server"  # it is rank 0, and as a worker number -1
    worker = world.rank - has_server
    num_workers = world.world_size - has_server

    # Data
    data = corpus.load_for(config)
    world.print(data.note)
    run = open_run(config, world, "data_parallel", data, num_shares=num_workers)
    sampler, loader, valid, test = make_loaders(data, config, worker, num_workers)

    # Model
    model = Transformer(*shape_of(config, data)).to(world.device)
    torch.manual_seed(world.data_seed)
    model, buckets = replicate(config.impl, parts, model)
    optimizer = None
    if not has_server or world.is_main:
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, fused=True)

    def mean_loss(batches: Iterator) -> float:
        return wrapping.mean_over_ranks(*total_loss(model, batches, world.device))

    # Training
    run.resume(model, optimizer)
    run.keep_best(mean_loss, valid)
    for epoch in run.epochs(loader):
        sampler.set_epoch(epoch)
        for batch in run.batches(loader):
            if optimizer:
                set_learning_rate(optimizer, learning_rate_at(run.step, config))
            if batch:  # a server's is empty
                loss = model(*batch)
                loss.backward()
            update(config.impl, parts, model, optimizer, buckets)
            model.zero_grad()
            run.log(loss if batch else None)

    # Result
    run.test(test, data.in_words)
    save_once(model, run.folder / "model.pt")
    run.finish()
    if world.is_main:
        world.print(f"report: {write_report(run.folder)}")
    return run.valid_loss


def replicate(impl: str, parts: Parts, model: nn.Module) -> tuple[nn.Module, list]:
    """Make the ranks' models equal; returns the model, and its buckets for `update`."""
    if impl in ("overlapped", "torch"):
        return replica(model, impl == "torch", parts.BucketedDDP), []
    parts.broadcast_state(model)
    return model, parts.make_buckets(model.parameters(), BUCKET_BYTES) if impl == "bucketed" else []


def update(
    impl: str, parts: Parts, model: nn.Module, optimizer: Optimizer | None, buckets: list
) -> None:
    """After backward: bring the gradients together and step, so that all weights stay equal."""
    if impl == "naive":
        parts.average_gradients(model)
    elif impl == "bucketed":
        replicas.average_buckets(buckets)
    if impl != "server":
        optimizer.step()
    elif optimizer:
        parts.server_step(model, optimizer)
    else:
        parts.worker_step(model)


def make_loaders(data: corpus.Corpus, config: Config, worker: int, num_workers: int) -> tuple:
    """A worker's sampler, and its batches to train, validate and test on; a server's are empty."""
    sampler = corpus.ShardedSampler(len(data.train), worker, num_workers, config.seed)
    if worker < 0:
        empty = [()] * (len(data.train) // config.batch)
        return sampler, DataLoader(data.train, batch_sampler=empty, collate_fn=tuple), [], []
    batch = config.batch // num_workers
    loader = DataLoader(data.train, batch, sampler=sampler, drop_last=True)
    return sampler, loader, *corpus.held_out(data, batch, worker, num_workers)


if __name__ == "__main__":
    command_line(main, Config)
