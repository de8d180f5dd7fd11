"""A whole Transformer cut over ranks by hand; and who gets which data, and which messages pass.

    inputs --> embedding | norm | attention | norm | MLP | ... | norm | head --> loss
                V/N rows  whole   H/N heads   whole  F/N                V/N scores

Price of a step with L blocks: the embedding, every attention and every MLP all-reduce (B, T, D)
forward; every attention, every MLP and the head backward: 2 (2L + 1) times. The loss adds 2 small
all-reduces. Norms and positions are whole on every rank.
Source: Shoeybi et al. 2019, "Megatron-LM", https://arxiv.org/abs/1909.08053, section 3.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.collectives.trees import Group
from manyhands.data_parallel.replicas import broadcast_state
from manyhands.tensor.layers import ColumnLinear, CopyToRanks, Region, RowLinear, SumOverRanks
from manyhands.tensor.replaced import refuse_untied
from manyhands.tensor.vocabulary import VocabEmbedding, vocab_cross_entropy


def cut_block(
    block: nn.Module,
    enter: Region = CopyToRanks.apply,
    leave: Region = SumOverRanks.apply,
    group: Group = None,
) -> None:
    """Cut the attention and the MLP of a Transformer's block over the ranks, in place.

    Heads stay whole: each has 3 * head_width rows of `qkv`, and head_width columns of `out`.

    Args:
        enter: lets x into the cut layers.
        leave: sums the ranks' parts.
    """
    attention, mlp, width = block.attention, block.mlp, block.attention.head_width
    attention.qkv = ColumnLinear(attention.qkv, 3 * width, enter, group)
    attention.out = RowLinear(attention.out, width, leave, group)
    mlp.up = ColumnLinear(mlp.up, 1, enter, group)
    mlp.down = RowLinear(mlp.down, 1, leave, group)


class CutTransformer(nn.Module):
    """The parts of a Transformer, of which this rank has 1/N of every matrix but the positions'.

    All ranks start from rank 0's weights. The head has no matrix of its own: it uses that of
    `tokens`.
    """

    def __init__(
        self,
        model: nn.Module,
        enter: Region = CopyToRanks.apply,
        leave: Region = SumOverRanks.apply,
        group: Group = None,
    ) -> None:
        """Cut the model: its blocks are changed in place.

        Args:
            enter: lets x into the cut layers.
            leave: sums the ranks' parts.
        """
        super().__init__()
        refuse_untied(model)
        broadcast_state(model, group)
        self.enter, self.group = enter, group
        self.tokens = VocabEmbedding(model.tokens, leave, group)
        self.positions, self.dropout, self.norm = model.positions, model.dropout, model.norm
        self.blocks = model.blocks
        for block in self.blocks:
            cut_block(block, enter, leave, group)

    def finish_gradients(self) -> None:
        """Call after backward. Here every gradient is complete by then, so this does nothing."""


class TensorParallel(CutTransformer):
    """A Transformer cut over ranks that are all given the same batch; each gets its loss."""

    def through_blocks(self, inputs: Tensor) -> Tensor:
        """Return what the last block gives for inputs (B, T): a tensor (B, T, D) on every rank.

        The embeddings of tokens and positions are added and dropped out; then come the blocks.
        """
        x = self.dropout(self.tokens(inputs) + self.positions.weight[: inputs.shape[1]])
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss in nats of (B, T) targets, a scalar, the same on every rank.

        After the blocks come the norm, self.enter, and the scores: a linear layer whose matrix is
        the part of the embedding that this rank has.
        """
        x = self.enter(self.norm(self.through_blocks(inputs)), self.group)  # (B, T, D)
        scores = F.linear(x, self.tokens.weight).flatten(0, 1)  # (B T, V/N)
        return vocab_cross_entropy(scores, targets.flatten(), self.tokens.mine, self.group)


def whole_state(model: CutTransformer, like: nn.Module) -> dict[str, Tensor]:
    """The whole weights by the names of `like`, a Transformer of this size, on the CPU of rank 0.

    {} on other ranks. Every rank of the group calls it.
    """
    state = {}
    is_first = dist.get_rank(model.group) == 0
    for name, whole in like.named_parameters():
        part = model.get_parameter(name).detach().cpu()
        sizes = zip(part.shape, whole.shape, strict=True)
        cut = [dim for dim, (mine, all_) in enumerate(sizes) if mine != all_]
        parts = [None] * dist.get_world_size(model.group) if is_first else None
        dist.gather_object(part, parts, group=model.group, group_dst=0)
        if parts:
            state[name] = torch.cat(parts, cut[0]) if cut else part
    return state | {"head.weight": state["tokens.weight"]} if is_first else {}


def data_place(rank: int, world_size: int, tensor_ranks: int) -> tuple[int, int]:
    """Which share of the data a rank trains on: (number of the share, number of shares).

    Each `tensor_ranks` consecutive ranks hold one model, and so have to see the same batch.

    Raises:
        ValueError: the ranks cannot be put into groups of this size.
    """
    if world_size % tensor_ranks:
        raise ValueError(f"{world_size} ranks cannot be put into groups of {tensor_ranks}")
    return rank // tensor_ranks, world_size // tensor_ranks


def calls_per_step(num_blocks: int, sequence: bool = False) -> dict[str, int]:
    """Collectives of a forward and backward of TensorParallel.

    Args:
        sequence: of TensorSequenceParallel, with its `finish_gradients`.

    Returns:
        How often the program calls all_reduce, all_gather and reduce_scatter; 0 for none.
    """
    each_way = 2 * num_blocks + 1  # forward the embedding is the 1, backward the head
    if sequence:
        return {"all_reduce": 2 + 1, "all_gather": 2 * each_way, "reduce_scatter": 2 * each_way}
    return {"all_reduce": 2 + 2 * each_way, "all_gather": 0, "reduce_scatter": 0}
