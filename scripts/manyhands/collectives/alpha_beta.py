"""What a collective costs: the latency-bandwidth model, also called the alpha-beta model.

    time of a message      ^            _--
                           |        _--      slope: beta, seconds per byte (1 / bandwidth)
                           |    _--
                    alpha  |_--              latency, the seconds that an empty message takes
                           +---------------> bytes

A message of s bytes takes alpha + beta s. A collective is a number of messages in a row, the
rounds; messages of different ranks in one round go at the same time. The model knows nothing of
the time for adding up, of ranks that share a link or a core, or of ranks that come late.

Source: Hockney 1994, "The communication challenge for MPP", Parallel Computing 20;
Thakur, Rabenseifner, Gropp 2005, https://doi.org/10.1177/1094342005051521.
"""

import math
from collections.abc import Sequence

import torch


def fit_alpha_beta(sizes_bytes: Sequence[float], times_s: Sequence[float]) -> tuple[float, float]:
    """The alpha (s) and beta (s per byte) that best fit the times of single messages.

    Times range from microseconds to seconds, so errors count relative to the measured time: the sum
    of ((alpha + beta size) / time - 1)^2 is the smallest possible.
    """
    sizes, times = torch.tensor([list(sizes_bytes), list(times_s)], dtype=torch.float64)
    columns = torch.stack([1 / times, sizes / times], dim=1)  # (messages, 2)
    alpha_s, beta_s_per_byte = torch.linalg.lstsq(columns, torch.ones_like(times)).solution.tolist()
    return alpha_s, beta_s_per_byte


def rounds_and_message(name: str, world_size: int, nbytes: float) -> tuple[int, float]:
    """How many messages in a row a collective needs, and how many bytes each of them has.

    Args:
        name: broadcast_naive, broadcast_tree, reduce_tree, gather, all_gather_ring,
            reduce_scatter_ring, all_reduce_naive, all_reduce_tree or all_reduce_ring.
        nbytes: size of the whole tensor; for gather, all_gather_ring and reduce_scatter_ring that
            of the n equal chunks together.
    """
    n = world_size
    base = n - 1 if name.endswith(("naive", "ring", "gather")) else math.ceil(math.log2(n))
    halves = 2 if name.startswith("all_reduce") else 1  # up and down, or scatter and gather
    in_chunks = name.endswith(("ring", "gather"))
    return halves * base, nbytes / n if in_chunks else nbytes


def predicted_s(
    name: str, world_size: int, nbytes: float, alpha_s: float, beta_s_per_byte: float
) -> float:
    """The time of a collective (s) by the model."""
    rounds, message_bytes = rounds_and_message(name, world_size, nbytes)
    return rounds * (alpha_s + beta_s_per_byte * message_bytes)


def ring_beats_tree_bytes(world_size: int, alpha_s: float, beta_s_per_byte: float) -> float:
    """The size (bytes) from which on all_reduce_ring is faster than all_reduce_tree; 0 for n <= 3.

    Both times are straight lines in the size. The ring has more messages, but smaller ones.
    """
    if world_size == 1:
        return 0.0
    more_rounds = (world_size - 1) - math.ceil(math.log2(world_size))
    fewer_bytes = math.ceil(math.log2(world_size)) - (world_size - 1) / world_size
    return alpha_s * more_rounds / (beta_s_per_byte * fewer_bytes)
