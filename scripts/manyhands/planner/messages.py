"""The messages of a training step, by a ring's time: which ones there are, and which of them show.

    tensor      inside each block, never hidden     in a node where tp fits there
    data        weights and gradients, hidden behind forward and backward
    pipeline    between stages, waited for          across nodes

Ranks are placed as on the lesson's mesh: tp innermost, then dp, then pp. A group with k GPUs in
each node has the use of k network cards (hardware.group_link).

Sources: lesson 04 (a ring's time), 10 (what FSDP sends), 13 (four all-reduces per block).
"""

from typing import NamedTuple

from manyhands.collectives.alpha_beta import predicted_s
from manyhands.planner.hardware import LINK_SHARE, group_link
from manyhands.planner.memory import Layout, Training, num_micro_batches, stage_sizes
from manyhands.tensor.cost import Link, messages_s


def slowed(link: Link) -> Link:
    """A link as programs see it."""
    return link._replace(bytes_per_s=LINK_SHARE * link.bytes_per_s)


def tensor_link(training: Training, layout: Layout) -> Link:
    """Between tensor ranks, which are consecutive."""
    return slowed(group_link(training.gpu, layout.tp))


def data_link(training: Training, layout: Layout) -> Link:
    """Between the ranks of a data-parallel group, of which tensor ranks lie in between."""
    return slowed(group_link(training.gpu, layout.dp, stride=layout.tp))


def pipeline_link(training: Training, layout: Layout) -> Link:
    """Between neighbouring stages: whole data-parallel groups lie in between."""
    gpu = training.gpu
    crosses = layout.pp * layout.tp * layout.dp > gpu.per_node
    return slowed(gpu.network if crosses else gpu.node)


def tensor_messages_s(training: Training, layout: Layout) -> float:
    """Seconds of a block's messages, forward and backward of a micro-batch: lesson 13's four
    all-reduces, or as many gathers and reductions; two more where forward runs again."""
    if layout.tp == 1:
        return 0.0
    tokens = layout.micro_batch * training.shape.sequence
    four_s = messages_s(training.shape.hidden, tokens, layout.tp, tensor_link(training, layout))
    return four_s * (1.5 if layout.recompute == "full" else 1)


def pipeline_messages_s(training: Training, layout: Layout) -> float:
    """Seconds of the activations and gradients that a rank waits for, for one micro-batch.

    Each tensor rank sends its part of an activation, and the others gather it inside the node.
    """
    if layout.pp == 1:
        return 0.0
    link = pipeline_link(training, layout)
    tokens = layout.micro_batch * training.shape.sequence
    nbytes = 2 * tokens * training.shape.hidden / layout.tp
    return 2 * layout.interleave * (link.latency_s + nbytes / link.bytes_per_s)


class DataMessages(NamedTuple):
    """Seconds of one unit's messages among data-parallel ranks."""

    gather: float  # its weights
    reduce: float  # its gradients: scattered, or all-reduced in stage 0


def data_messages(training: Training, layout: Layout, unit_parameters: float) -> DataMessages:
    """Of a unit with so many parameters on each tensor rank; nothing for one rank."""
    if layout.dp == 1:
        return DataMessages(0.0, 0.0)
    link = data_link(training, layout)
    about = (link.latency_s, 1 / link.bytes_per_s)
    kind = "all_reduce_ring" if layout.zero == 0 else "reduce_scatter_ring"
    gradient_bytes = (2 if training.gradients == "bfloat16" else 4) * unit_parameters
    return DataMessages(
        predicted_s("all_gather_ring", layout.dp, 2 * unit_parameters, *about),
        predicted_s(kind, layout.dp, gradient_bytes, *about),
    )


def exposed_data_s(
    training: Training, layout: Layout, forward_s: float, backward_s: float
) -> float:
    """Seconds of a step in which data-parallel messages are waited for.

    Gradients travel behind the backward of the last micro-batch, weights behind the forward of the
    first one; in ZeRO-3 without a pipeline both behind each micro-batch. The message of the unit
    that comes last in backward, or first in forward, has nothing to hide behind.

    Args:
        forward_s, backward_s: of one micro-batch through all units of a rank.
    """
    sizes = stage_sizes(training, layout, True, layout.pp == 1)
    units = [data_messages(training, layout, size) for size in sizes]
    gather_s = sum(unit.gather for unit in units)
    reduce_s = sum(unit.reduce for unit in units)
    first = units[0]
    reduced = max(first.reduce, reduce_s + first.reduce - backward_s)
    if layout.zero == 0:
        return reduced
    gathered = max(first.gather, gather_s + first.gather - forward_s)
    if layout.zero < 3 or layout.pp > 1:
        many = num_micro_batches(training, layout) if layout.zero == 2 and layout.pp == 1 else 1
        return gathered + many * reduced
    back = max(first.reduce, gather_s + reduce_s + first.reduce - backward_s)
    return num_micro_batches(training, layout) * (gathered + back)
