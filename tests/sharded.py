"""What the tests of FSDP share: a model with what goes wrong for shards, and its data."""

import functools

import torch
from torch import nn

import parity

BATCH, STEPS, VOCAB = 12, 10, 40


class Blocks(nn.Module):
    """Small, with what goes wrong: uneven sizes, tied and frozen parameters, a buffer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.a = nn.Sequential(nn.Linear(16, 15), nn.ReLU(), nn.Linear(15, 16))
        self.b = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
        self.c = nn.Sequential(nn.Linear(16, 9), nn.ReLU(), nn.Linear(9, 16))
        self.head = nn.Linear(16, VOCAB, bias=False)
        self.head.weight = self.embedding.weight  # both in the root unit
        self.c[2].bias = self.a[2].bias  # in two units
        self.b.requires_grad_(False)  # a whole unit
        self.c[0].requires_grad_(False)  # the first layer of a unit
        self.register_buffer("scale", torch.rand(1))

    def units(self):
        return [self.a, self.b, self.c]

    def forward(self, tokens, targets):
        x = self.embedding(tokens)  # (B, 16)
        for unit in self.units():
            x = x + unit(x) * self.scale
        return nn.functional.cross_entropy(self.head(x), targets)


def data():
    return parity.tokens(VOCAB, 2, STEPS, BATCH, seed=5)


def text(rank=0, size=1):
    """Three batches for a language model, or a rank's part of them."""
    return parity.tokens(VOCAB, 3, 2, 8, 16, seed=3)[:, :, rank::size]


adamw = functools.partial(parity.adamw, lr=0.01, weight_decay=0.1)
