"""Train the language model in one process: the loop that every other script changes.

python scripts/train_single.py --data embedded --steps 300
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from manyhands.data import corpus
from manyhands.data.corpus import Corpus
from manyhands.models.transformer import Transformer, total_loss
from manyhands.ranks.runtime import alone, command_line
from manyhands.training.report import write_report
from manyhands.training.run import Run
from manyhands.training.schedule import learning_rate_at, set_learning_rate
from manyhands.training.settings import TrainConfig
from manyhands.ways.job import open_run, shape_of


@dataclass(frozen=True)
class Config(TrainConfig):
    """Settings of the run."""


def main(config: Config) -> float:
    """Train, test, write the report; return the best validation loss in nats per token."""
    world = alone(config.device, config.seed)
    data = corpus.load_for(config)
    world.print(data.note)
    run = open_run(config, world, "single", data)
    model = Transformer(*shape_of(config, data)).to(world.device)
    train_alone(run, model, data)
    run.finish()
    world.print(f"report: {write_report(run.folder)}")
    return run.valid_loss


def train_alone(run: Run, model: nn.Module, data: Corpus) -> None:
    """Train `model` on `data` in one process, test it, and save its best weights."""
    config, world = run.config, run.world

    # Data
    order = torch.Generator()
    sampler = RandomSampler(data.train, generator=order)
    loader = DataLoader(data.train, config.batch, sampler=sampler, drop_last=True)
    valid = DataLoader(data.valid, config.batch)
    test = DataLoader(data.test, config.batch)

    # Model
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, fused=True)

    def mean_loss(batches: Iterator) -> float:
        total, count = total_loss(model, batches, world.device)
        return (total / count).item()

    # Training
    run.resume(model, optimizer)
    run.keep_best(mean_loss, valid)
    for epoch in run.epochs(loader):
        order.manual_seed(config.seed + epoch)
        for inputs, targets in run.batches(loader):
            set_learning_rate(optimizer, learning_rate_at(run.step, config))
            loss = model(inputs, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss)

    # Result
    run.test(test, data.in_words)
    torch.save(model.state_dict(), run.folder / "model.pt")


if __name__ == "__main__":
    command_line(main, Config)
