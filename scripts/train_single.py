"""Train the language model in one process: the loop that every other script changes.

python scripts/train_single.py --data embedded --steps 300
"""

from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, RandomSampler

from manyhands.data import corpus
from manyhands.models.transformer import Transformer, flops_per_token, total_loss
from manyhands.ranks.runtime import World, alone, command_line
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


def main(config: Config) -> float:
    """Train, write the report, and return the validation loss in nats per token."""
    return train(config, alone(config.device, config.seed))


def train(config: Config, world: World) -> float:
    # Data
    data = corpus.load(config.data, config.block, config.vocab, config.valid_tokens)
    world.print(data.note)
    vocab_size = data.tokenizer.vocab_size
    run = Run(
        config,
        world,
        "single",
        num_samples=len(data.train),
        flops_per_token=flops_per_token(vocab_size, config.block, config.layers),
        floor=data.entropy_floor,
    )
    batch = config.batch
    order = torch.Generator()
    sampler = RandomSampler(data.train, generator=order)
    loader = DataLoader(data.train, batch, sampler=sampler, drop_last=True)
    valid = DataLoader(data.valid, batch)

    # Model
    model = Transformer(vocab_size, config.block, config.layers).to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, fused=True)

    # Training
    run.resume(model, optimizer)
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
    total, count = total_loss(model, run.validation(valid), world.device)
    valid_loss = (total / count).item()
    save_once(model, run.folder / "model.pt")
    run.finish(valid_loss)
    if world.is_main:
        world.print(f"report: {write_report(run.folder)}")
    return valid_loss


if __name__ == "__main__":
    command_line(main, Config)
