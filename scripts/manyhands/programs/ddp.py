"""The program of lesson 06: the loop of train_single.py, turned into that of many ranks.

    train_alone                      train, on every rank
    RandomSampler                    ShardedSampler: this rank's samples
    the model                        the model in DDP: the mean of the ranks' gradients
    the loss over all of valid       each rank's share of valid, and the mean over ranks
    torch.save                       save_once

Price: DDP's, 2 (n-1)/n x 4P bytes sent by each rank and step for P parameters in float32.
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader

from manyhands.data.corpus import Corpus, ShardedSampler
from manyhands.ddp.wrapping import mean_over_ranks, torch_ddp
from manyhands.models.transformer import total_loss
from manyhands.training.run import Run, save_once
from manyhands.training.schedule import learning_rate_at, set_learning_rate


def train(run: Run, model: nn.Module, data: Corpus) -> None:
    """Train `model` on `data` on all ranks of `run.world`, test it, and save its best weights once.

    Every rank calls it, in the process group, with an equal model. The result is that of
    `train_alone`: config.batch is the batch of all ranks together and a multiple of their number,
    each rank's samples are those of `ShardedSampler` with seed config.seed, and each rank evaluates
    its own share of data.valid and of data.test. What a rank draws from torch's random numbers in
    training, such as dropout, follows from `world.data_seed`.
    """
    config, world = run.config, run.world

    # Data
    batch = config.batch // world.world_size
    sampler = ShardedSampler(len(data.train), world.rank, world.world_size, config.seed)
    loader = DataLoader(data.train, batch, sampler=sampler, drop_last=True)
    valid_share = range(world.rank, len(data.valid), world.world_size)
    valid = DataLoader(data.valid, batch, sampler=valid_share)
    test_share = range(world.rank, len(data.test), world.world_size)
    test = DataLoader(data.test, batch, sampler=test_share)

    # Model
    model = torch_ddp(model)
    torch.manual_seed(world.data_seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, fused=True)

    def mean_loss(batches: Iterator) -> float:
        return mean_over_ranks(*total_loss(model, batches, world.device))

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
    save_once(model, run.folder / "model.pt")
