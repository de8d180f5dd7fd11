"""The time of a training step, part by part, for a layout: lessons 04, 12 and 13 added up.

    step = m micro-batches through the slowest stage | bubble | messages of data parallelism
           | optimizer

    a micro-batch:  products | memory traffic | attention | tensor messages | pipeline messages

A product of matrices takes its FLOPs at the rate that large products reach, and its matrices have
to come from memory and go there: both times are added, which is why small products are slower. All
between the products only moves memory. Messages of tensor parallelism and of pipelines are not
hidden, as in the lessons. Those of data parallelism travel while others compute; what is longer
than that shows.

The messages are counted in messages.py. Sources: lesson 12 (bubble); Narayanan et al. 2021,
https://arxiv.org/abs/2104.04473; Williams et al. 2009, "Roofline" (memory traffic).
"""

from functools import lru_cache
from typing import NamedTuple

from manyhands.pipeline.bubble import bubble
from manyhands.planner.hardware import FLASH1, MEMORY_SHARE, Gpu
from manyhands.planner.memory import (
    Layout,
    Training,
    layers_per_stage,
    num_micro_batches,
    stage_sizes,
)
from manyhands.planner.messages import exposed_data_s, pipeline_messages_s, tensor_messages_s
from manyhands.planner.shape import ModelShape

UPDATE_BYTES = 32  # AdamW per parameter: gradient read twice, master and two moments read, written
LOGIT_TRAFFIC = 30  # bytes per logit: written, cast, softmax; and the same again in backward


class Traffic(NamedTuple):
    """Bytes that the operations between the matrices move, forward, for each number."""

    norm: int
    add: int  # to the residual stream
    rotary: int
    activation: int  # for each column of the first matrix of the MLP


# Fused: one kernel reads its input once, in 16 bits, and writes its result. Eager: under autocast a
# norm casts to float32, works there and casts back; rotary positions do so as well; SiLU and its
# product are two kernels, which read and write apart.
TRAFFIC = {
    "eager": Traffic(norm=20, add=6, rotary=20, activation=5),
    "fused": Traffic(norm=4, add=6, rotary=4, activation=3),
}


class Costs(NamedTuple):
    """Seconds of one micro-batch on a rank, forward or backward."""

    products: float
    memory: float
    attention: float

    @property
    def total(self) -> float:
        """All of them: they run one after the other."""
        return sum(self)

    def times(self, factor: float) -> "Costs":
        """The same for several blocks."""
        return Costs(*(factor * part for part in self))

    def plus(self, other: "Costs") -> "Costs":
        """Both, one after the other."""
        return Costs(*(a + b for a, b in zip(self, other, strict=True)))


def product_flops_per_s(gpu: Gpu, dtype: str) -> float:
    """What large products reach of the data sheet's peak."""
    return gpu.float8_flops_per_s if dtype == "float8" else gpu.matmul_share * gpu.flops_per_s


def traffic_s(gpu: Gpu, nbytes: float) -> float:
    """Seconds in which a GPU reads and writes so many bytes of its own memory."""
    return nbytes / (MEMORY_SHARE * gpu.memory_bytes_per_s)


@lru_cache(maxsize=100_000)
def block_forward(
    shape: ModelShape,
    gpu: Gpu,
    dtype: str,
    attention: str,
    kernels: str,
    tokens: int,
    tp: int,
    sp: bool,
) -> Costs:
    """Forward of one block for `tokens`, on one of `tp` tensor ranks."""
    D, K, F = shape.hidden, shape.kv_width, shape.ffn
    columns = 2 * F if shape.gated else F  # of the first matrix of the MLP
    weights = shape.layer_parameters / tp
    in_and_out = 4 * D + (2 * D + 2 * K + columns + F) / tp  # numbers of each token
    moved = 2 * (weights + tokens * in_and_out)
    products = 2 * weights * tokens / product_flops_per_s(gpu, dtype) + traffic_s(gpu, moved)
    traffic = TRAFFIC[kernels]
    between = 2 * D * (traffic.norm + traffic.add)
    inside = traffic.activation * (columns if shape.gated else F)
    if shape.gated:
        inside += traffic.rotary * (D + K)
    moved = tokens * (between / (tp if sp else 1) + inside / tp)
    scores = tokens * shape.sequence * shape.heads / tp
    scored = 2 * shape.sequence * D * tokens / tp  # FLOPs, of the half that a causal model needs
    if attention != "unfused":
        slower = FLASH1 if attention == "flash1" else 1
        attention_s = scored / (slower * gpu.attention_share * gpu.flops_per_s)
    else:  # whole products; the scores are written, read and written by softmax and dropout, read
        attention_s = 2 * scored / product_flops_per_s(gpu, "bfloat16")
        attention_s += traffic_s(gpu, 13 * scores)
    return Costs(products, traffic_s(gpu, moved), attention_s)


def backward(forward: Costs, attention: str) -> Costs:
    """Backward from forward: two products for each one, and twice the traffic.

    Fused attention computes its scores again: five products where forward has two.
    """
    factor = 2 if attention == "unfused" else 2.5
    return Costs(2 * forward.products, 2 * forward.memory, factor * forward.attention)


def head(training: Training, tokens: int, tp: int) -> Costs:
    """Forward and backward of the head and the loss for `tokens`."""
    shape, gpu = training.shape, training.gpu
    weights = shape.vocab * shape.hidden / tp
    rate = product_flops_per_s(gpu, "bfloat16")  # also where blocks compute in float8
    moved = 6 * (weights + tokens * (shape.hidden + shape.vocab / tp))
    products = 6 * weights * tokens / rate + traffic_s(gpu, moved)
    return Costs(products, traffic_s(gpu, LOGIT_TRAFFIC * tokens * shape.vocab / tp), 0.0)


def time_of(training: Training, layout: Layout) -> dict[str, float]:
    """Seconds of a step by part: products, memory, attention, recomputation, tensor messages,
    pipeline messages, data messages, bubble and optimizer; they add up to the step."""
    shape, gpu = training.shape, training.gpu
    tokens = layout.micro_batch * shape.sequence
    m = num_micro_batches(training, layout)
    layers = layers_per_stage(training, layout)
    forward = block_forward(
        shape,
        gpu,
        training.dtype,
        training.attention,
        training.kernels,
        tokens,
        layout.tp,
        layout.sp,
    )
    back = backward(forward, training.attention)
    again_s = recomputed_s(forward, layout.recompute, training.attention)
    work = forward.plus(back).times(layers)
    ends = head(training, tokens, layout.tp)
    tensor_s = layers * tensor_messages_s(training, layout)
    pipeline_s = pipeline_messages_s(training, layout)
    slot_s = work.total + layers * again_s + tensor_s + pipeline_s
    empty, _ = bubble(layout.pp, m, layout.interleave)
    slowest = work.plus(ends)
    sizes = stage_sizes(training, layout, True, layout.pp == 1)
    shard = sum(sizes) / (layout.dp if layout.zero else 1)
    back_s = layers * (back.total + again_s) + tensor_s / 2
    return {
        "products": m * slowest.products,
        "memory": m * slowest.memory,
        "attention": m * slowest.attention,
        "recomputation": m * layers * again_s,
        "tensor messages": m * tensor_s,
        "pipeline messages": m * pipeline_s,
        "data messages": exposed_data_s(training, layout, layers * forward.total, back_s),
        "bubble": float(empty) * m * slot_s,
        "optimizer": traffic_s(gpu, UPDATE_BYTES * shard),
    }


def recomputed_s(forward: Costs, recompute: str, attention: str) -> float:
    """Seconds in which a block computes again in backward what it did not keep."""
    if recompute == "full":
        return forward.total
    if recompute == "selective":
        return forward.memory + (forward.attention if attention == "unfused" else 0.0)
    return 0.0
