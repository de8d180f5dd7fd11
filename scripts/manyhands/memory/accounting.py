"""Where the memory of training goes, in bytes a rank: predicted, and counted in autograd.

    weights | gradients | optimizer state | activations: what forward keeps for backward

    stage 0   every rank has all of it       1   the optimizer's state is cut into n shards
    stage 2   the gradients, too             3   the weights, too

    fp32 Adam:  4 + 4 + 8 = 16 bytes a parameter; in stage 3 on n ranks 16/n
    a block:    16 D + H + 4 numbers a token (D width, H heads), with fused attention

savings.py has ways to need less. live.Live counts what really lives on a rank.
Sources: Rajbhandari et al. 2020, "ZeRO", https://arxiv.org/abs/1910.02054, section 3; Korthikanti
et al. 2022, "Reducing Activation Recomputation", https://arxiv.org/abs/2205.05198, section 4.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Recipe(NamedTuple):
    """Bytes of each part: for one parameter, or for all that a rank holds."""

    weights: int
    gradients: int
    optimizer: int


def recipe(
    weights: torch.dtype,
    gradients: torch.dtype,
    states: Sequence[torch.dtype],
    master: torch.dtype | None = None,
) -> Recipe:
    """Bytes of one parameter, from the type in which each part is kept.

    Args:
        states: what the optimizer keeps for each parameter; Adam two running means, of the
            gradient and of its square.
        master: of the optimizer's own copy of the weights, where it has one.
    """
    kept = [*states, *([master] if master else [])]
    return Recipe(weights.itemsize, gradients.itemsize, sum(dtype.itemsize for dtype in kept))


def bytes_per_rank(sizes: Sequence[int], recipe: Recipe, stage: int, world_size: int) -> Recipe:
    """Bytes that each rank holds in ZeRO `stage` 0 (all of it) to 3.

    To be cut, parameters are laid into flat vectors, mostly one for each block of the model. Each
    vector is padded to a multiple of `world_size`, and every rank keeps one part of it. Sizes
    [5, 3] on 2 ranks: padded 6 and 4, so 5 numbers a rank in what is cut.

    What is not cut is whole on every rank: 8 numbers in stage 0. From stage 1 on the weights lie
    in the padded vectors, so they are 10; gradients have no padding before they are cut: 8.

    Args:
        sizes: numbers in each vector; in stage 0 in each parameter.
        recipe: bytes of one parameter. If the optimizer keeps anything, it counts its steps, too:
            4 bytes for each of `sizes`, on every rank and in every stage.
    """
    shard = sum(-(-size // world_size) for size in sizes)
    whole = sum(sizes) if stage == 0 else shard * world_size
    counters = 4 * len(sizes) if recipe.optimizer else 0
    return Recipe(
        recipe.weights * (shard if stage >= 3 else whole),
        recipe.gradients * (shard if stage >= 2 else sum(sizes)),
        recipe.optimizer * (shard if stage >= 1 else whole) + counters,
    )


def block_activations(tokens: int, width: int, heads: int, nbytes: int = 4) -> dict[str, int]:
    """Bytes that each operation of a Transformer block keeps for backward, by its name.

    The names: norm1, qkv, attention, out, norm2, up, gelu, down. A number takes `nbytes`. Each
    keeps the input that its gradient needs. Attention keeps queries, keys and values, its output,
    and one number a head and token; a norm keeps its input, and mean and scale of each token.
    Nothing counts twice: `out` has 0, as its input is the output that attention has kept. A norm
    does not keep its output.
    """
    per_token = {
        "norm1": width + 2,
        "qkv": width,
        "attention": 4 * width + heads,
        "out": 0,
        "norm2": width + 2,
        "up": width,
        "gelu": 4 * width,
        "down": 4 * width,
    }
    return {name: nbytes * tokens * numbers for name, numbers in per_token.items()}


def saved_bytes(run: Callable[[], Tensor], params: Iterable[nn.Parameter]) -> int:
    """Bytes of memory that autograd keeps for backward when `run()` computes, each counted once.

    The memory of `params` does not count: it would be there without autograd. A backward through
    the result still works.
    """
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # the tensor itself could keep itself alive

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()  # alive until the end, or memory might be given away twice
    own = {param.untyped_storage().data_ptr() for param in params}
    del result
    return sum(nbytes for pointer, nbytes in kept.items() if pointer not in own)
