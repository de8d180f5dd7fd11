"""The vocabulary cut over ranks: each holds the embeddings and the scores of its own tokens.

    tokens   0 1 2 3 | 4 5 6 7        rank 0 looks up 0 to 3, rank 1 looks up 4 to 7; what a rank
             rank 0    rank 1         does not have is zero, and the sum over ranks is the embedding

The head has the same cut: a rank has the scores of its own tokens, (B, T, V/N). The loss needs the
sum of their exponentials and the score of each target: two numbers per token travel, not V.

Price: a rank holds 1/N of the largest matrix and of the scores. The embedding all-reduces 4BTD
bytes, the loss 3 x 4BT; gathering the scores would take 4BTV.
Source: Shoeybi et al. 2019, "Megatron-LM", https://arxiv.org/abs/1909.08053, section 3.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.collectives.trees import Group
from manyhands.tensor.layers import Region, SumOverRanks, my_part, my_range
from manyhands.tensor.replaced import refuse_extras, refuse_strangers


class VocabEmbedding(nn.Module):
    """An embedding cut by tokens: inputs (B, T) to embeddings (B, T, D) on every rank."""

    def __init__(
        self, embedding: nn.Embedding, leave: Region = SumOverRanks.apply, group: Group = None
    ) -> None:
        """Take this rank's rows, those of the tokens in the range `mine`: weight (V/N, D).

        `leave` sums the ranks' parts; it is called as leave(part, group).
        """
        super().__init__()
        refuse_extras(embedding, nn.Embedding)
        self.leave, self.group = leave, group
        self.mine = my_range(embedding.num_embeddings, 1, group)
        self.weight = my_part(embedding.weight, 0, 1, group)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the embeddings of all tokens, (B, T, D) on every rank."""
        refuse_strangers(inputs, self.mine, self.group)
        is_mine = (inputs >= self.mine.start) & (inputs < self.mine.stop)
        rows = torch.where(is_mine, inputs - self.mine.start, 0)
        part = F.embedding(rows, self.weight) * is_mine.unsqueeze(-1)
        return self.leave(part, self.group)


def vocab_cross_entropy(
    scores: Tensor, targets: Tensor, mine: range, group: Group = None
) -> Tensor:
    """The mean loss in nats, from scores that are cut over ranks; the same on every rank.

    A token's loss is log(sum of exp(scores)) - score of its target. The largest score of each token
    is subtracted from all of its scores first, or exp would overflow. Two all-reduces: the largest
    scores, and both sums in one.

    Args:
        scores: (tokens, V/N), those of the tokens in `mine`. Raise 16-bit scores to float32 first:
            they are too coarse for a loss.
        targets: (tokens,) int64, all of them on every rank. Each is a token of the vocabulary:
            none is left out, as torch's loss leaves out -100.
        mine: this rank's part of the vocabulary.
    """
    refuse_strangers(targets, mine, group)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    largest = scores.detach().amax(-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    scores = scores - largest.unsqueeze(-1)
    is_mine = (targets >= mine.start) & (targets < mine.stop)
    columns = torch.where(is_mine, targets - mine.start, 0).unsqueeze(-1)
    # No product with is_mine: a score may be -inf, and 0 times -inf is no number.
    of_target = torch.where(is_mine, scores.gather(-1, columns).squeeze(-1), 0)
    parts = torch.stack([scores.exp().sum(-1), of_target])  # (2, tokens)
    total, of_target = SumOverRanks.apply(parts, group)
    return (total.log() - of_target).mean()
