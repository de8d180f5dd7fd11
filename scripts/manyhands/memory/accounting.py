"""Where the memory of training goes, in bytes per rank: predicted, and counted in autograd.

    weights | gradients | optimizer state | activations: what forward keeps for backward

    stage 0   every rank has all of it       1   the optimizer state is sharded over n ranks
    stage 2   the gradients as well          3   the weights as well

    fp32 Adam:  4 + 4 + 8 = 16 bytes per parameter; in stage 3 on n ranks 16/n
    a block:    16 D + H + 4 numbers per token (D width, H heads), with fused attention
    offload:    a step moves 8 bytes per parameter up to the GPU and 4 down; 16 lie on the CPU

savings.py has ways to need less. live.Live counts the tensors that really exist on a rank.
Sources: Rajbhandari et al. 2020, "ZeRO", https://arxiv.org/abs/1910.02054, section 3; Korthikanti
et al. 2022, "Reducing Activation Recomputation", https://arxiv.org/abs/2205.05198, section 4;
Ren et al. 2021, "ZeRO-Offload", https://arxiv.org/abs/2101.06840.
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
    """Return the bytes of one parameter, from the data type in which each part is kept.

    Args:
        states: the types of what the optimizer keeps for each parameter; Adam keeps two running
            means, one of the gradient and one of its square.
        master: the type of the optimizer's own copy of the weights, or None if it has no copy.
    """
    kept = [*states, *([master] if master else [])]
    return Recipe(weights.itemsize, gradients.itemsize, sum(dtype.itemsize for dtype in kept))


def bytes_per_rank(sizes: Sequence[int], recipe: Recipe, stage: int, world_size: int) -> Recipe:
    """Return the bytes that each rank holds in ZeRO `stage` 0 (everything) to 3.

    Before they are sharded, parameters are laid out in flat vectors, usually one for each block of
    the model. Each vector is padded to a multiple of `world_size`, and every rank keeps one shard
    of it. For example, sizes [5, 3] on 2 ranks are padded to 6 and 4, so a rank keeps 5 numbers of
    a part that is sharded.

    A part that is not sharded is whole on every rank. In stage 0 that is 8 numbers. From stage 1 on
    whole weights lie in the padded vectors, so they are 10 numbers; whole gradients are not padded,
    so they are 8.

    Args:
        sizes: how many numbers each vector has, or in stage 0 each parameter.
        recipe: bytes of one parameter. An optimizer that keeps anything is taken to count its
            steps, as Adam does: 4 bytes for each of `sizes`, on every rank and in every stage.
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
    """Return the bytes that each operation of a Transformer block keeps for backward, by its name.

    The names are norm1, qkv, attention, out, norm2, up, gelu and down. Each number takes `nbytes`
    bytes. An operation keeps the input that its gradient needs. Attention keeps queries, keys and
    values, its output, and one number per head and token; a norm keeps its input, and the mean and
    the scale of each token, but not its output. Nothing counts twice: `out` keeps 0 bytes, because
    attention has already kept the tensor that is its input.
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
    """Return the bytes of memory that autograd keeps for backward when `run()` computes.

    Memory that several tensors share counts once. The memory of `params` does not count, since it
    would be there without autograd. A backward through the result of `run()` still works.
    """
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # the tensor itself could keep itself alive

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()  # alive until the end, or new tensors might get the same memory
    own = {param.untyped_storage().data_ptr() for param in params}
    del result
    return sum(nbytes for pointer, nbytes in kept.items() if pointer not in own)


class Offload(NamedTuple):
    """How many blocks a rank leaves to the CPU, and the bytes that move in each step."""

    blocks: int
    up: int
    down: int


def offload(shards: Sequence[int], free: int) -> Offload:
    """Leave as few of the first blocks to the CPU as possible; count the bytes that a step moves.

    In ZeRO stage 3 a rank has one shard of every block: weights, gradients and Adam's two moments,
    all in float32. All four are on the GPU or, for an offloaded block, all four in the CPU's
    memory. Blocks are offloaded from the first one on, until the shards of all others fit into
    `free`. Backward needs the last blocks first, so they stay where they are.

    In every step the weights of an offloaded block go up to the GPU for forward, and again for
    backward. Its gradients come down once. Moments do not move, as the CPU runs the optimizer.

    Args:
        shards: how many numbers the rank's shard of each block has, in the order of forward.
        free: bytes that the shards on the GPU may take, and fill up. What a step brings up has room
            elsewhere.
    """
    numbers = range(len(shards) + 1)
    blocks = next(number for number in numbers if 16 * sum(shards[number:]) <= free)
    moved = sum(shards[:blocks])
    return Offload(blocks, up=2 * 4 * moved, down=4 * moved)
