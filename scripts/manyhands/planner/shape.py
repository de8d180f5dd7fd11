"""The shape of a Transformer: what a planner has to know of a model, and no weights.

    tokens --> embedding V x D | L blocks | norm | head D x V --> scores
    block      attention: D x (D + 2 K) and D x D     MLP: 2 (gated: 3) matrices D x F

A token takes 2 FLOPs per weight forward and 4 backward, and attention multiplies it with all S
positions of its sequence: 4 S D FLOPs forward, 8 backward. (A causal model needs half of them.
Utilisation counts all, so that it can be compared with published numbers.)

L layers, D width, H heads of D/H numbers, K numbers of all key heads, F inner width, V vocabulary,
S sequence. Sources: Chowdhery et al. 2022, "PaLM", https://arxiv.org/abs/2204.02311, appendix B
(what model FLOPs utilisation counts); sizes of the models: the papers and cards named beside them.
"""

from typing import NamedTuple


class ModelShape(NamedTuple):
    """Sizes of a Transformer; `gated` MLPs have a third matrix (SwiGLU)."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    sequence: int
    gated: bool = True
    tied: bool = False  # head and embedding are one matrix

    @property
    def kv_width(self) -> int:
        """Numbers of all keys of a token; as many of all values."""
        return self.kv_heads * self.hidden // self.heads

    @property
    def layer_parameters(self) -> int:
        """Weights of a block's matrices and two norms."""
        attention = self.hidden * (2 * self.hidden + 2 * self.kv_width)
        mlp = (3 if self.gated else 2) * self.hidden * self.ffn
        return attention + mlp + 2 * self.hidden

    @property
    def num_parameters(self) -> int:
        """All weights; positions, which most models no longer learn, are left out."""
        ends = (1 if self.tied else 2) * self.vocab * self.hidden
        return self.layers * self.layer_parameters + ends + self.hidden

    @property
    def flops_per_token(self) -> int:
        """Of forward and backward, as model FLOPs utilisation counts them: nothing computed twice,
        and attention to all positions."""
        matrices = self.layers * (self.layer_parameters - 2 * self.hidden)
        matrices += self.vocab * self.hidden
        return 6 * matrices + 12 * self.layers * self.hidden * self.sequence


# Llama: Touvron et al. 2023, https://arxiv.org/abs/2302.13971, table 2, and
# https://arxiv.org/abs/2307.09288; Llama 3: Grattafiori et al. 2024,
# https://arxiv.org/abs/2407.21783, table 3. GPT: Radford et al. 2019; Brown et al. 2020,
# https://arxiv.org/abs/2005.14165, table 2.1, with the padded vocabulary of Megatron-LM.
MODELS = {
    "gpt2-124m": ModelShape(12, 768, 12, 12, 3072, 50304, 1024, gated=False, tied=True),
    "gpt2-1.5b": ModelShape(48, 1600, 25, 25, 6400, 50304, 1024, gated=False, tied=True),
    "gpt3-175b": ModelShape(96, 12288, 96, 96, 49152, 51200, 2048, gated=False, tied=True),
    "llama-7b": ModelShape(32, 4096, 32, 32, 11008, 32000, 2048),
    "llama-13b": ModelShape(40, 5120, 40, 40, 13824, 32000, 2048),
    "llama-30b": ModelShape(60, 6656, 52, 52, 17920, 32000, 2048),
    "llama-65b": ModelShape(80, 8192, 64, 64, 22016, 32000, 2048),
    "llama2-70b": ModelShape(80, 8192, 64, 8, 28672, 32000, 4096),
    "llama3-8b": ModelShape(32, 4096, 32, 8, 14336, 128256, 8192),
    "llama3-70b": ModelShape(80, 8192, 64, 8, 28672, 128256, 8192),
    "llama3-405b": ModelShape(126, 16384, 128, 8, 53248, 128256, 8192),
}
