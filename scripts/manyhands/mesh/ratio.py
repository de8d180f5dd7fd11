"""The one number: C/W, how many FLOPs a rank computes in the time in which it sends one byte.

    C  FLOP/s of a rank            backward   |## 4 N FLOPs for each token ##|
    W  bytes/s that it sends       messages   |== 2 (n-1)/n b N bytes =====|     hidden if shorter

Gradients of a step have one size, however many tokens the step has; the computing that hides them
grows with the tokens. So from some number of tokens per rank on, messages cost nothing. The model's
size N stands on both sides and cancels. What is left is C/W, with numbers of b = 2 bytes even in
its plain form: a data-parallel step hides its messages from C/W tokens per rank on.

For tensor parallelism the tokens cancel, and the width stays: lesson 13.

Left out: latencies, what a rank computes between products, and the last bucket of a step (or the
first unit of FSDP), which has nothing to hide behind.
Sources: The Ultra-Scale Playbook, 2025, https://huggingface.co/spaces/nanotron/ultrascale-playbook
(when data parallelism is hidden); tensor/cost.py.

N parameters, n ranks, b bytes per number, D width. What W is between nodes depends on where the
ranks of a group are: hardware.group_link.
"""

import math


def tokens_to_hide(
    flops_per_byte: float, num_ranks: int, bytes_per_number: int = 2, sharded: bool = False
) -> float:
    """Tokens per rank and step from which on data parallelism hides its messages.

    A ring sends (n-1)/n b bytes of each parameter for a gather or a reduce-scatter, and twice that
    for an all-reduce. Forward takes 2 FLOPs for each parameter and token, backward 4.

        replicas    all-reduce behind backward:                 2 (n-1)/n b / W = 4 tokens / C
        sharded     gather behind forward:                        (n-1)/n b / W = 2 tokens / C
                    gather and reduce-scatter behind backward:  2 (n-1)/n b / W = 4 tokens / C

    Each says tokens = (n-1)/n b/2 C/W. With b = 2 and many ranks this is C/W itself. FSDP sends
    half as much again as replicas do, but has half as much computing again to hide it behind.

    Args:
        flops_per_byte: C/W.
        sharded: the ranks are those of FSDP, and all of its passes have to be hidden.
    """
    ring_bytes = (num_ranks - 1) / num_ranks * bytes_per_number  # of a parameter
    passes = [(2 * ring_bytes, 4)]  # bytes, and FLOPs for each token that they hide behind
    if sharded:
        passes = [(ring_bytes, 2), (ring_bytes + ring_bytes, 4)]
    return max(nbytes / flops for nbytes, flops in passes) * flops_per_byte


def largest_tensor_degree(width: int, flops_per_byte: float, bytes_per_number: int = 2) -> int:
    """The most tensor ranks whose messages take no longer than their products; at least 1.

    Messages over products are (n-1) b C / (9 D W), by lesson 13, with long messages. This is 1 for
    n = 1 + 9 D / (b C/W).
    """
    return 1 + math.floor(9 * width / (bytes_per_number * flops_per_byte))


def step_s(
    forward_s: float, backward_s: float, messages_s: float, num_buckets: float = math.inf
) -> float:
    """Time of a data-parallel step whose messages go on beside its backward.

    With k equal buckets the first message begins when 1/k of backward is over, and the last one
    only at its end. So 1/k of the messages always shows, but it is still where messages take as
    long as backward that the time begins to grow.
    """
    hidden_s = backward_s + messages_s / num_buckets
    shown_s = messages_s + backward_s / num_buckets
    return forward_s + max(hidden_s, shown_s)
