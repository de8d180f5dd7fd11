"""The language model that the text lessons train: a small causal Transformer on one process.

    inputs (B, T) --> tokens + positions (B, T, D) --> L blocks --> norm --> head --> (B, T, V)
    block:  x = x + attention(norm1(x));  x = x + mlp(norm2(x))

One dial sets its size: `layers` gives as many heads, and 32 numbers of width for each of them.
B sequences, T positions, D width, H heads, L layers, V vocabulary. Sources: Vaswani et al. 2017,
arXiv 1706.03762; norms first, and the first weights: GPT-2, Radford et al. 2019, section 2.3; head
and token embedding share their weights: Press and Wolf 2017, arXiv 1608.05859.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.ranks.failures import BadInput


class Attention(nn.Module):
    """Let each position read from itself and the positions before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        # The rows go head by head, each head's query, key and value together: a contiguous part
        # of the rows is then a number of whole heads, and can be one rank's share.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)  # (B, T, 3D)
        B, T, _ = qkv.shape
        qkv = qkv.view(B, T, -1, 3, self.head_width)  # (B, T, H, 3, D/H)
        q, k, v = qkv.transpose(1, 2).unbind(3)  # each (B, H, T, D/H)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, T, -1))  # (B, T, D)


class MLP(nn.Module):
    """Work on each position by itself, in four times the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))  # (B, T, D)


class Block(nn.Module):
    """One layer: attention, then MLP, each added to what it read."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.mlp = MLP(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))  # (B, T, D)


class Transformer(nn.Module):
    """Predict the next token at every position of a text."""

    def __init__(
        self,
        vocab_size: int,
        block: int,
        layers: int,
        heads: int | None = None,
        width: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        heads = layers if heads is None else heads
        width = 32 * layers if width is None else width
        if min(vocab_size, block, layers, heads, width) < 1 or width % heads:
            raise BadInput(
                f"no model with vocabulary {vocab_size}, block {block}, {layers} layer(s), {heads} "
                f"head(s), width {width}: all must be at least 1, and width a multiple of heads"
            )
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(block, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        for name, matrix in self.named_parameters():
            if matrix.dim() == 2:
                # What is added to x starts smaller, so that 2L sums do not outgrow the embedding.
                added = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(matrix, std=0.02 / (2 * layers) ** 0.5 if added else 0.02)

    def through(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Run one block; set to another function to run all of them in another way."""
        return layer(x)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the scores of each next token, (B, T, V), or the targets' mean loss in nats.

        `inputs` and `targets` are (B, T) int64: `targets[:, t]` follows `inputs[:, t]` in the text.
        """
        T = inputs.shape[1]
        block = self.positions.num_embeddings
        if T > block:
            raise BadInput(f"{T} tokens in a sequence, but the model was built for at most {block}")
        x = self.dropout(self.tokens(inputs) + self.positions.weight[:T])  # (B, T, D)
        for layer in self.blocks:
            x = self.through(layer, x)
        logits = self.head(self.norm(x))  # (B, T, V)
        if targets is None:
            return logits
        return token_loss(logits, targets)


def token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """The mean loss in nats of scores (B, T, V) for the targets (B, T), a scalar."""
    # Between 1 and 2 bfloat16 counts in steps of 0.008, which is too coarse for a loss.
    exact = torch.promote_types(scores.dtype, torch.float32)
    return F.cross_entropy(scores.flatten(0, 1).to(exact), targets.flatten())


def num_parameters(vocab_size: int, block: int, layers: int, width: int | None = None) -> int:
    """Return (V + T) D + L (12 D^2 + 2 D) + D: the head's weights are the embedding's."""
    width = 32 * layers if width is None else width
    return (vocab_size + block) * width + layers * (12 * width**2 + 2 * width) + width


def flops_per_token(vocab_size: int, block: int, layers: int, width: int | None = None) -> int:
    """Return the floating-point operations of one token's forward and backward matmuls.

    Forward takes 2 a weight of the blocks and the head, and 4 T D a layer for attention; backward
    takes twice that. By custom, what the causal mask hides counts, and what is recomputed does not.
    """
    width = 32 * layers if width is None else width
    return 3 * (layers * (24 * width**2 + 4 * block * width) + 2 * vocab_size * width)


@torch.no_grad()
def total_loss(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], device: torch.device | str
) -> tuple[Tensor, int]:
    """Return the sum of all tokens' losses (float64 scalar, nats), and the number of tokens.

    `model(inputs, targets)` returns a mean. Ranks can add their sums, and divide once.
    """
    was_training = model.training
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    num_tokens = 0
    for inputs, targets in batches:
        total += model(inputs.to(device), targets.to(device)).double() * targets.numel()
        num_tokens += targets.numel()
    model.train(was_training)
    return total, num_tokens


@torch.no_grad()
def generate(
    model: Transformer, tokens: Tensor, num_tokens: int, temperature: float = 1.0, seed: int = 1
) -> Tensor:
    """Let the model write: return `tokens` and the `num_tokens` that it draws after them.

    Each next token is drawn from the softmax of the last position's scores over the temperature:
    1 takes the model's own probabilities, less makes likely tokens likelier, and 0 always takes
    the likeliest. The model sees at most the last `block` tokens.

    Args:
        model: not a wrapper of it: `model.module` of a DDP.
        tokens: (T,) int64, at least one of them: the beginning.
        seed: of the draws, which leave torch's other random numbers alone.

    Returns:
        (T + num_tokens,) int64, on the CPU.
    """
    if not len(tokens) or num_tokens < 0 or temperature < 0:
        raise BadInput(
            f"cannot write {num_tokens} tokens after {len(tokens)} at temperature {temperature}: "
            "give at least one token to begin with, and no number below 0"
        )
    was_training = model.training
    model.eval()
    draws = torch.Generator().manual_seed(seed)
    device = model.tokens.weight.device
    block = model.positions.num_embeddings
    written = tokens.cpu()
    for _ in range(num_tokens):
        scores = model(written[None, -block:].to(device))[0, -1].cpu()  # (V,)
        if temperature == 0:
            chosen = scores.argmax(keepdim=True)
        else:
            chances = (scores / temperature).softmax(dim=0)
            chosen = torch.multinomial(chances, 1, generator=draws)
        written = torch.cat([written, chosen])
    model.train(was_training)
    return written
