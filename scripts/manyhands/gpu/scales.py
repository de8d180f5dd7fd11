"""How large the parts of `make gpu` measure: FULL on a GPU, TINY to try them out on a CPU.

The two models of FULL are the smallest and the next size of GPT-2, with a vocabulary that is padded
to a multiple of 128, since matrix units compute in tiles.
Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", table 2.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from manyhands.models.transformer import Transformer, flops_per_token, num_parameters


@dataclass(frozen=True)
class Shape:
    """A Transformer and the batch of sequences that one rank trains on."""

    name: str
    layers: int
    heads: int
    width: int
    vocab: int
    block: int
    batch: int

    def build(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Transformer:
        """Make the model on `device`, with weights of this type; equal for equal seeds."""
        with device:
            sizes = self.vocab, self.block, self.layers, self.heads, self.width
            return Transformer(*sizes).to(dtype)

    def tokens(self, device: torch.device, batch: int = 0) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, each (batch, block) int64: random, and each the next one."""
        text = torch.randint(self.vocab, (batch or self.batch, self.block + 1), device=device)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    @property
    def num_parameters(self) -> int:
        return num_parameters(self.vocab, self.block, self.layers, self.width)

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations of a token's forward and backward, as MFU counts them."""
        return flops_per_token(self.vocab, self.block, self.layers, self.width)


@dataclass(frozen=True)
class Scale:
    """Models and repeats."""

    small: Shape
    large: Shape
    split: Shape  # cut over ranks, layer by layer or matrix by matrix
    dtype: torch.dtype  # in which the techniques compute that are compared
    matrix: int  # rows and columns of the largest matrix product
    steps: int  # that are timed; two come before them and do not count
    compiler: str  # backend of torch.compile
    max_mb: float  # of a tensor in the collectives


_SMALL = Shape("125 M", 12, 12, 768, vocab=50304, block=1024, batch=32)
_LARGE = Shape("350 M", 24, 16, 1024, vocab=50304, block=1024, batch=32)
FULL = Scale(
    small=_SMALL,
    large=_LARGE,
    split=replace(_LARGE, name="200 M", layers=12, batch=8),
    dtype=torch.bfloat16,
    matrix=8192,
    steps=20,
    compiler="inductor",
    max_mb=256,
)
_TINY = Shape("tiny", 2, 2, 16, vocab=64, block=16, batch=4)
TINY = Scale(
    small=_TINY,
    large=replace(_TINY, name="less tiny", layers=3),
    split=replace(_TINY, name="split", layers=4, batch=4),
    dtype=torch.bfloat16,
    matrix=64,
    steps=2,
    compiler="eager",
    max_mb=0.1,
)
