"""What the tests of data parallelism share: one process's training, and that of its replicas."""

import torch
import torch.distributed as dist
from torch import nn

import parity
from manyhands.ranks.lab import run_ranks

BATCH, STEPS, VOCAB = 12, 10, 40


class Model(nn.Module):
    """Small, with what goes wrong: a tied and a frozen parameter, a buffer, two data types."""

    def __init__(self, narrow=torch.float64):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.frozen = nn.Linear(16, 16)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(16)
        self.wide = nn.Linear(16, 64)
        self.narrow = nn.Linear(64, 16, dtype=narrow)
        self.head = nn.Linear(16, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(1))

    def forward(self, tokens, targets):
        x = self.norm(self.frozen(self.embedding(tokens))) * self.scale  # (B, 16)
        x = x + self.narrow(torch.relu(self.wide(x)).to(self.narrow.weight.dtype)).float()
        return nn.functional.cross_entropy(self.head(x), targets)


def data():
    return parity.tokens(VOCAB, 2, STEPS, BATCH, seed=5)


def adamw(model):
    return parity.adamw(model.parameters(), lr=0.01, weight_decay=0.1)


def outcome(losses, model):
    """Losses, last gradients and final weights."""
    module = getattr(model, "module", model)
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return losses, parity.gradients_of(module), weights


def train(model, inputs, targets, after_backward=lambda model: None):
    """The loop of one process, with a place for the line that several ranks need."""
    batches = zip(inputs, targets, strict=True)
    return outcome(parity.train(model, batches, adamw(model), after_backward)[0], model)


def truth(**model):
    """One process on the whole batch, from the model that rank 0 builds."""
    torch.manual_seed(0)
    return train(Model(**model), *data())


def train_on_rank(wrap, after_backward=lambda model: None):
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # a forgotten broadcast would show
    return train(wrap(Model()), *data()[:, :, rank::size], after_backward)


def assert_equal_to(wanted, results):
    """Every rank's gradients and weights are those of one process, and bit-equal everywhere."""
    losses, grads, weights = wanted
    for rank_losses, rank_grads, rank_weights in results:
        parity.assert_near(rank_grads, grads)
        parity.assert_near(rank_weights, weights)
        assert all(torch.equal(rank_weights[name], results[0][2][name]) for name in weights)
        assert len(rank_losses) == STEPS
    parity.assert_mean_is_near([result[0] for result in results], losses)


def accumulate(wrap):
    """A rank's gradient after a backward inside no_sync(), and after the next one outside."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = wrap(nn.Linear(3, 1))
    x = torch.arange(12.0).reshape(4, 3)  # ranks take rows 0 2 and 1 3, one at a time
    with model.no_sync():
        model(x[rank]).backward()
    alone = model.module.weight.grad.clone()
    model(x[rank + 2]).backward()
    return alone, model.module.weight.grad


def assert_sums_are_averaged(wrap):
    (alone0, grad0), (alone1, grad1) = run_ranks(accumulate, 2, wrap)
    assert alone0.tolist() == [[0, 1, 2]] and alone1.tolist() == [[3, 4, 5]]
    assert grad0.tolist() == grad1.tolist() == [[9, 11, 13]]  # (rows 0+2 + rows 1+3) / 2
