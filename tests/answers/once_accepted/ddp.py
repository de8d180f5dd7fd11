"""Wrong answers to lesson 06 that its checks once took for right."""

from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from answers.ddp import Around
from manyhands.data import corpus
from manyhands.programs import ddp


@contextmanager
def group_of_the_environment(world, timeout_s=120):
    """Where a process is alone, nobody has set RANK."""
    dist.init_process_group(timeout=timedelta(seconds=timeout_s))
    try:
        yield
    finally:
        dist.destroy_process_group()


class SamplerOfOneGenerator(corpus.ShardedSampler):
    """An epoch that is read twice has two orders."""

    def __init__(self, num_samples, rank, world_size, seed=0):
        super().__init__(num_samples, rank, world_size, seed)
        self.generator = torch.Generator().manual_seed(seed)

    def set_epoch(self, epoch):
        self.epoch = epoch
        self.generator.manual_seed(self.seed + epoch)

    def __iter__(self):
        order = torch.randperm(self.num_samples, generator=self.generator)
        return iter(order[self.rank :: self.world_size].tolist())


class SamplerThatDrawsOn(corpus.ShardedSampler):
    """Epoch 3 is the fourth order that one generator draws."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.epoch + 1):
            order = torch.randperm(self.num_samples, generator=generator)
        return iter(order[self.rank :: self.world_size].tolist())


def train_with_one_dropout(run, model, data):
    """The random numbers are seeded in every epoch."""

    def epochs(loader):
        for epoch in run.epochs(loader):
            torch.manual_seed(run.world.data_seed)
            yield epoch

    ddp.train(Around(run, epochs=epochs), model, data)


WRONG = {
    "6.2": [(group_of_the_environment, "rank: -1, not 0")],
    "6.3": [
        (SamplerOfOneGenerator, "one object can be read twice"),
        (SamplerThatDrawsOn, "in epoch 1"),
    ],
    "6.8": [(train_with_one_dropout, "Seed once, before the first epoch")],
}
