"""What the tests of parity share: the loop of one process, and what ranks have to equal."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


def tokens(vocab: int, *sizes: int, seed: int = 4) -> Tensor:
    """Numbers below `vocab` of this shape, the same on every rank."""
    return torch.randint(vocab, sizes, generator=torch.Generator().manual_seed(seed))


def adamw(params: Iterable, **options: float) -> torch.optim.AdamW:
    # With this eps the rounding of a gradient that is nearly 0 decides no step.
    return torch.optim.AdamW(params, **{"lr": 1e-3, "eps": 1e-6} | options)


def train(
    model: nn.Module,
    batches: Iterable,
    optimizer: torch.optim.Optimizer,
    before_step: Callable = lambda model: None,
) -> tuple[list[float], dict, dict]:
    """Losses, the last step's gradients, and the final weights, by name."""
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        losses.append(model(x, y))
        losses[-1].backward()
        before_step(model)
        optimizer.step()
    return [loss.item() for loss in losses], gradients_of(model), weights_of(model)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {name: param.grad.clone() for name, param in named if param.grad is not None}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def assert_near(found: object, wanted: object) -> None:
    """Numbers and tensors, or lists and dicts of them, are equal but for rounding."""
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def assert_mean_is_near(of_ranks: list[list[float]], losses: list[float]) -> None:
    """The ranks' losses, each of a part of the batch, have the mean that one process has."""
    assert_near(torch.tensor(of_ranks).mean(0), torch.tensor(losses))
