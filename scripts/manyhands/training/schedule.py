"""The schedule of the learning rate: up over the first tenth of the steps, then down to a tenth."""

import math

from torch.optim import Optimizer

from manyhands.training.settings import TrainConfig


def learning_rate_at(step: int, config: TrainConfig) -> float:
    """Learning rate of step 0, 1, ...: linear warm-up over a tenth, then a cosine down to 10%."""
    warmup = max(1, config.steps // 10)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - 1 - warmup)
    return config.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """Give every parameter group of the optimizer this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
