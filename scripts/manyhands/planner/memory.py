"""The memory of one GPU, part by part, for a layout: lesson 09's formulas on the fullest rank.

    | weights | gradients | optimizer | activations | logits | gathered | allocator |

    first stage   keeps the activations of most micro-batches: min(p, m) of them
    last stage    keeps those of one, and the scores of the whole vocabulary

Both are counted and the larger one is the rank's need. Price of counting: microseconds.
Sources: lesson 09 and its sources (states and activations); lesson 12 (micro-batches in flight);
lesson 13 (what tensor parallelism cuts); Korthikanti et al. 2022,
https://arxiv.org/abs/2205.05198, sections 4 and 5 (activations, recomputation).
"""

from functools import lru_cache
from typing import Literal, NamedTuple

import torch

from manyhands.memory.accounting import Recipe, block_activations, bytes_per_rank, recipe
from manyhands.pipeline.bubble import in_flight
from manyhands.pipeline.schedules import interleaved, one_f_one_b
from manyhands.planner.hardware import FRAGMENTATION, Gpu
from manyhands.planner.shape import ModelShape

# Of a logit: in bfloat16, in float32, and its log-probability or gradient. A fused loss keeps the
# logit in bfloat16, and computes its gradient from that.
SCORE_BYTES = {"eager": 10, "fused": 4}
UNFUSED_BYTES = 5  # of each attention score: softmax and its dropout in 16 bits, and the mask


class Layout(NamedTuple):
    """How a training is spread over GPUs: dp x pp x tp of them."""

    dp: int
    pp: int
    tp: int
    sp: bool  # sequence parallelism among the tensor ranks
    zero: int  # stage 0 to 3; 3 is FSDP
    micro_batch: int  # sequences
    recompute: Literal["none", "selective", "full"] = "none"
    interleave: int = 1  # stages on each rank of a pipeline


class Training(NamedTuple):
    """What is trained, on what, and with which software; a layout says how."""

    shape: ModelShape
    gpu: Gpu
    gpus: int
    sequences: int  # of a global batch
    dtype: str = "bfloat16"  # of matrix products
    gradients: Literal["bfloat16", "float32", "both"] = "bfloat16"  # kept and summed in
    attention: Literal["fused", "flash1", "unfused"] = "fused"
    kernels: Literal["eager", "fused"] = "eager"  # of what lies between the matrices
    loss: Literal["eager", "fused"] = "eager"


def state_recipe(training: Training) -> Recipe:
    """Bytes per parameter with AdamW: 16-bit weights, gradients, float32 moments and master.

    With "both", gradients of a micro-batch are in 16 bits, and their sum is in float32.
    """
    kind = torch.bfloat16 if training.gradients == "bfloat16" else torch.float32
    found = recipe(torch.bfloat16, kind, [torch.float32] * 2, torch.float32)
    more = torch.bfloat16.itemsize if training.gradients == "both" else 0
    return found._replace(gradients=found.gradients + more)


def layers_per_stage(training: Training, layout: Layout) -> int:
    """Blocks on a rank of the fullest stage."""
    return -(-training.shape.layers // layout.pp)


@lru_cache(maxsize=100_000)
def layer_activations(
    shape: ModelShape,
    micro_batch: int,
    tp: int,
    sp: bool,
    recompute: str,
    attention: str,
    kernels: str,
) -> int:
    """Bytes that a block keeps for backward of one micro-batch, on one of `tp` tensor ranks.

    The inputs of norms and of matrices cut by columns are whole on each tensor rank, unless `sp`
    cuts them by positions; all else belongs to the rank's own heads and columns.
    """
    tokens = micro_batch * shape.sequence
    cuts = tp if sp else 1
    if recompute == "full":
        return 2 * tokens * shape.hidden // cuts
    kept = block_activations(tokens, shape.hidden, shape.heads, 2)
    whole = kept["norm1"] + kept["qkv"] + kept["norm2"] + kept["up"]
    fewer_keys = 2 * (shape.hidden - shape.kv_width) * 2 * tokens
    inside = kept["attention"] - fewer_keys + kept["out"]
    # SiLU keeps the gate, and its product with the other half keeps both factors; where one kernel
    # does both, SiLU of the gate is computed again.
    factors = 1 + shape.gated * (2 if kernels == "eager" else 1)
    mlp = kept["gelu"] * factors + kept["down"]
    if recompute == "selective":  # what norms and activation functions give is computed again
        whole -= kept["qkv"] + kept["up"]
        mlp = kept["gelu"] * (1 + shape.gated)
    inside += mlp * shape.ffn / (4 * shape.hidden)
    if attention == "unfused" and recompute == "none":
        inside += UNFUSED_BYTES * tokens * shape.sequence * shape.heads
    return int(whole / cuts + inside / tp)


@lru_cache(maxsize=10_000)
def in_flight_on_ends(p: int, m: int, v: int) -> tuple[int, int]:
    """Micro-batches, or with v > 1 parts of them, whose activations the first and last rank keep.

    By lesson 12's schedules; more micro-batches than two per rank change nothing.
    """
    m = min(m, 2 * p)
    schedule = one_f_one_b(p, m) if v == 1 else interleaved(p, m, v)
    return in_flight(schedule[0]), in_flight(schedule[-1])


def stage_sizes(training: Training, layout: Layout, is_first: bool, is_last: bool) -> list[int]:
    """How many parameters each unit of a stage has on a tensor rank: blocks, then the ends."""
    shape = training.shape
    ends = is_first + (is_last and not (shape.tied and is_first))
    blocks = [shape.layer_parameters // layout.tp] * layers_per_stage(training, layout)
    return blocks + [shape.vocab * shape.hidden // layout.tp] * ends


def states(training: Training, layout: Layout, sizes: list[int]) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer state; and of what ZeRO-3 gathers for a while.

    In a pipeline, ZeRO-2 and 3 keep gradients whole until the last micro-batch, and ZeRO-3 gathers
    weights once per step: reduced or gathered for each micro-batch, they would be sent m times.
    torch.distributed.pipelining does the same.
    """
    stage = layout.zero
    whole = min(stage, 1) if layout.pp > 1 else stage
    kept = [bytes_per_rank([size], state_recipe(training), whole, layout.dp) for size in set(sizes)]
    counts = [sizes.count(size) for size in set(sizes)]
    found = {
        name: sum(getattr(one, name) * count for one, count in zip(kept, counts, strict=True))
        for name in Recipe._fields
    }
    found["gathered"] = 0
    if whole == 3:  # lesson 10: the root and two units are whole, and one unit's gradients
        units, root = sizes[:1], [size for size in sizes if size != sizes[0]]
        two = 2 * 2 * units[0] + state_recipe(training).gradients * max(sizes)
        found["gathered"] = two + 2 * sum(root)
    return found


def memory_of(training: Training, layout: Layout) -> dict[str, int]:
    """Bytes of each part on the rank that needs most; the last part is "allocator".

    The parts are weights, gradients, optimizer, gathered, activations, logits and allocator: what
    PyTorch's allocator holds beyond the tensors, because its blocks do not fit them exactly.
    """
    if layout.pp == 1:
        return rank_memory(training, layout, True, True)
    first = rank_memory(training, layout, True, False)
    last = rank_memory(training, layout, False, True)
    return max(first, last, key=lambda parts: sum(parts.values()))


def rank_memory(
    training: Training, layout: Layout, is_first: bool, is_last: bool
) -> dict[str, int]:
    """The parts of `memory_of` on a rank of the first stage, the last one, or the only one."""
    shape = training.shape
    p, v = layout.pp, layout.interleave
    m = num_micro_batches(training, layout)
    kept = kept_by_layer(training, layout, layout.recompute)
    layers = layers_per_stage(training, layout)
    alive = in_flight_on_ends(p, m, v)[0 if is_first else 1]
    parts = states(training, layout, stage_sizes(training, layout, is_first, is_last))
    parts["activations"] = alive * layers * kept // v
    if layout.recompute == "full":  # one block is computed again at a time, and keeps all
        parts["activations"] += kept_by_layer(training, layout, "none")
    logits = layout.micro_batch * shape.sequence * shape.vocab // layout.tp
    parts["logits"] = SCORE_BYTES[training.loss] * logits if is_last else 0
    changing = parts["activations"] + parts["logits"] + parts["gathered"]
    parts["allocator"] = int(FRAGMENTATION * changing)
    return parts


def kept_by_layer(training: Training, layout: Layout, recompute: str) -> int:
    """Bytes that a block keeps of one micro-batch with this way to recompute."""
    return layer_activations(
        training.shape,
        layout.micro_batch,
        layout.tp,
        layout.sp,
        recompute,
        training.attention,
        training.kernels,
    )


def num_micro_batches(training: Training, layout: Layout) -> int:
    """Micro-batches of a step on each replica: lesson 09's accumulation, lesson 12's m."""
    return training.sequences // (layout.dp * layout.micro_batch)
