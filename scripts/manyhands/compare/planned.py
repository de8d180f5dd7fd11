"""What the planner says of the ways that `measure.compare` has measured on this machine.

It is told two numbers of the machine, FLOP/s and bytes/s of a rank, and that nothing else costs
time. It counts in numbers of 16 bits, these ranks in 32. Messages are made as long by half the
bandwidth. A parameter has as many bytes of state (2 of weight, 2 of gradient and 12 of AdamW; here
4, 4 and 8), so ways that cut all three alike need the same; but of activations it counts half.
"""

from collections.abc import Mapping

import psutil

from manyhands.planner.hardware import GPUS, LINK_SHARE
from manyhands.planner.memory import Layout, Training
from manyhands.planner.plans import Plan, price
from manyhands.planner.shape import ModelShape
from manyhands.tensor.cost import Link
from manyhands.ways.ready import Setting

NOTHING = 1e30  # bytes/s of what costs no time


def layouts(setting: Setting, ranks: int) -> dict[str, Layout]:
    """Way -> how it spreads a training over `ranks`; of those that cut all states alike."""
    share = setting.batch // ranks
    piece = setting.batch // setting.micro_batches
    pairs = ranks // 2
    return {
        "DDP": Layout(ranks, 1, 1, False, 0, share),
        "ZeRO-3": Layout(ranks, 1, 1, False, 3, share),
        "fully_shard": Layout(ranks, 1, 1, False, 3, share),
        "pipeline (1F1B)": Layout(1, ranks, 1, False, 0, piece),
        "tensor": Layout(1, 1, ranks, False, 0, setting.batch),
        "tensor + sequence": Layout(1, 1, ranks, True, 0, setting.batch),
        "FSDP x TP": Layout(pairs, 1, 2, False, 3, 2 * share),
        "PP x DP": Layout(pairs, 2, 1, False, 0, 2 * share // setting.micro_batches),
    }


def training_of(setting: Setting, ranks: int, flops_per_s: float, bytes_per_s: float) -> Training:
    """The training of `setting` on this machine, as the planner takes it."""
    width = 32 * setting.layers  # as Transformer has it
    shape = ModelShape(
        layers=setting.layers,
        hidden=width,
        heads=setting.layers,
        kv_heads=setting.layers,
        ffn=4 * width,
        vocab=setting.vocab,
        sequence=setting.block,
        gated=False,
        tied=True,
    )
    link = Link("gloo", bytes_per_s / 2 / LINK_SHARE, 0.0)
    rank = GPUS["H100-80GB"]._replace(
        name="a rank of this machine",
        memory_bytes=psutil.virtual_memory().total // ranks,
        flops_per_s=flops_per_s,
        matmul_share=1.0,
        attention_share=0.5,  # the ranks compute all scores, of which a causal model needs half
        memory_bytes_per_s=NOTHING,
        node=link,
        network=link,
        per_node=ranks,
    )
    return Training(shape, rank, ranks, setting.batch)


def beside(found: Mapping, training: Training) -> dict[str, tuple[Plan, int, float]]:
    """Way -> its plan, and the bytes (at the peak) and seconds of a step that were measured.

    Args:
        found: what `measure.compare` returned.
    """
    known = layouts(Setting(**found["setting"]), found["ranks"])
    return {
        way: (price(training, known[way]), seen["peak"], seen["median_s"])
        for way, seen in found["ways"].items()
        if way in known
    }
