"""What cutting a block costs: the time of its messages against the time of its matrix products.

    a rank:  | products: 72 D^2 FLOPs a token, / N |     4 all-reduces of tokens x D numbers |

A block has 12 D^2 weights in four matrices, and forward and backward take 6 FLOPs of each weight
and token. Both times grow with the tokens, so with long messages the tokens cancel:

    messages / products  =  (N - 1) F b / (9 D W)        F FLOP/s, W bytes/s, b bytes per number

It leaves out what attention computes between its two matrices, which would make the products'
share larger, and assumes that no message is hidden behind a computation.

D width, N ranks. Source of the messages: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053;
of a collective's time: collectives/alpha_beta.py. Network cards of a group: NCCL builds a ring for
each of them ("channels"), so that all of a node's cards carry a share of every message.
"""

from typing import NamedTuple

from manyhands.collectives.alpha_beta import predicted_s


class Link(NamedTuple):
    """What joins the ranks."""

    name: str
    bytes_per_s: float  # that one rank sends, in one direction
    latency_s: float  # of a message that is empty


def between_nodes(node: Link, card: Link, in_node: int) -> Link:
    """What joins a group that has `in_node` GPUs in each of several nodes.

    Each GPU has a network card of its own. NCCL makes as many rings as the group has GPUs in a
    node, and each ring leaves the node by another card, so a message has the bandwidth of all these
    cards, but never more than that inside the node. Once every `in_node` hops a ring goes from node
    to node; all other hops are inside a node.

    Args:
        node: between the GPUs of a node.
        card: of one GPU's network card.
    """
    bytes_per_s = min(node.bytes_per_s, in_node * card.bytes_per_s)
    latency_s = (card.latency_s + (in_node - 1) * node.latency_s) / in_node
    cards = "1 card" if in_node == 1 else f"{in_node} cards"
    return Link(f"{card.name}, {cards}", bytes_per_s, latency_s)


def products_s(width: int, num_tokens: int, num_ranks: int, flops_per_s: float) -> float:
    """Time of a block's matrix products on each rank (s), forward and backward."""
    return 6 * 12 * width**2 * num_tokens / num_ranks / flops_per_s


def messages_s(
    width: int, num_tokens: int, num_ranks: int, link: Link, bytes_per_number: int = 2
) -> float:
    """Time of a block's four all-reduces (s), each by a ring of all ranks."""
    nbytes = bytes_per_number * num_tokens * width
    each_s = predicted_s("all_reduce_ring", num_ranks, nbytes, link.latency_s, 1 / link.bytes_per_s)
    return 4 * each_s


def narrowest(num_tokens: int, num_ranks: int, flops_per_s: float, link: Link) -> float:
    """The width from which on the messages take no longer than the products.

    Products take a D^2 and messages c + d D, so it is the positive root of a D^2 = c + d D.
    """
    a = products_s(1, num_tokens, num_ranks, flops_per_s)
    c = messages_s(0, num_tokens, num_ranks, link)
    d = messages_s(1, num_tokens, num_ranks, link) - c
    return (d + (d * d + 4 * a * c) ** 0.5) / (2 * a)
