"""A Transformer as layers that are cut over tensor ranks and can be put into pipeline stages.

    layers   [tokens + positions] [block] [block] ... [norm, head]     each a rank's 1/N over tp
    stages   |------- 0 --------------------| |------- 1 ---------|    lesson 12 cuts them

Between layers an activation (B, T, D) is whole on every tensor rank. So each tensor rank of a stage
sends its own copy to the same tensor rank of the next stage: N times what is needed. Megatron-LM
sends 1/N from each, and gathers it over tp on arrival.

A parameter is marked with the number of ranks that hold the very same numbers. What tensor
parallelism cuts is on one rank only, norms and positions are whole on all N. The mark keeps apart
in FSDP's vectors what has to be counted apart: see clip.py.

B sequences, T positions, D width, V vocabulary, N tensor ranks.
Source: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, sections 3 and 4.1.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.collectives.trees import Group
from manyhands.pipeline.stages import Embed, Head, cut, layers_of, partition
from manyhands.tensor.model import CutTransformer
from manyhands.tensor.vocabulary import vocab_cross_entropy


class VocabHead(nn.Module):
    """The scores of this rank's tokens: x (B, T, D) to (B, T, V/N), with the embedding's matrix."""

    def __init__(self, model: CutTransformer) -> None:
        super().__init__()
        self.enter, self.group = model.enter, model.group
        self.weight = model.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.enter(x, self.group), self.weight)


def cut_layers(model: CutTransformer) -> list[nn.Module]:
    """A cut Transformer as layers: inputs (B, T) to this rank's scores (B, T, V/N).

    `model` gets a head of its own for this, with the same matrix as its embedding.
    """
    model.head = VocabHead(model)
    return layers_of(model)


def loss_of(mine: range, group: Group = None) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss for the last stage: scores (B, T, V/N) and targets (B, T) to the mean in nats.

    Args:
        mine: this rank's part of the vocabulary.
        group: the tensor ranks, which hold the other parts.
    """

    def loss(scores: Tensor, targets: Tensor) -> Tensor:
        return vocab_cross_entropy(scores.flatten(0, 1), targets.flatten(), mine, group)

    return loss


def bounds_of(layers: list[nn.Module], num_stages: int) -> list[int]:
    """Where to cut layers into stages of equal work, by the number of their weights.

    A layer multiplies each token by every weight, but for the embedding, which looks a row up.

    Raises:
        ValueError: fewer layers than stages.
    """
    weights = [sum(param.numel() for param in layer.parameters()) for layer in layers]
    return partition([0, *weights[1:]], num_stages)


def cut_stages(layers: list[nn.Module], bounds: list[int]) -> list[nn.Sequential]:
    """The stages between `bounds`; a stage's `first` is the number of its first layer."""
    stages = cut(layers, bounds)
    for stage, first in zip(stages, bounds, strict=False):
        stage.first = first
    return stages


def units_in(stage: nn.Sequential) -> list[nn.Module]:
    """FSDP's units of a stage, in the order of their forward: blocks, and both large matrices.

    The matrix of the embedding, which is also that of the head, is a unit of its own where only one
    of them is in the stage. So its vector has the same layout in the first and in the last stage,
    and shards of its gradient can be added up like the whole.
    """
    units = []
    for layer in stage:
        part = layer.tokens if isinstance(layer, Embed) else layer
        units.append(layer.head if isinstance(layer, Head) else part)
    return units


def names_in(stage: nn.Sequential, num_blocks: int) -> dict[str, nn.Parameter]:
    """A stage's parameters by the names that they have in the whole Transformer."""
    found = {}
    for number, layer in enumerate(stage, start=stage.first):
        prefix = f"blocks.{number - 1}." if 1 <= number <= num_blocks else ""
        found |= {f"{prefix}{name}": param for name, param in layer.named_parameters()}
    return found


def mark_holders(model: nn.Module, ranks: int) -> None:
    """Mark all parameters as held by so many times more ranks.

    Called before a model is cut over them: what is cut becomes a new parameter without a mark, and
    what stays whole on every rank keeps it.
    """
    for param in model.parameters():
        param.holders = ranks * holders(param)


def holders(param: nn.Parameter) -> int:
    """How many ranks hold the very same numbers, beside replicas; 1 where nobody marked it."""
    return getattr(param, "holders", 1)
