"""Measures FSDP by hand against PyTorch's fully_shard: time and memory of a step."""

import statistics

import torch
import torch.distributed as dist

from manyhands.fsdp import fully_shard, units
from manyhands.instruments.benchmark import (
    Measure,
    Measured,
    Row,
    Shape,
    make_step,
    milliseconds,
    ratios,
    spread,
)
from manyhands.instruments.live import Live, parts_of
from manyhands.instruments.timing import in_turn, slowest_rank
from manyhands.ranks import lab


def zero3_ratios() -> list[Measured]:
    """Step time and peak memory of FSDP over those of fully_shard, on the same two ranks."""
    words, values = [], []
    for shape in (Shape(8, 1024, 64, 4), Shape(4, 65, 64, 16)):
        results = lab.run_ranks(measure_zero3, 2, shape, 24, timeout_s=400)
        by_hand, native = slowest_rank([times_s for times_s, _ in results])
        values.append(ratios(by_hand, native))
        peaks = [max(peak) for peak in zip(*(peaks for _, peaks in results), strict=True)]
        words.append(
            (
                f"{statistics.median(values[-1]):.3f} ({spread(values[-1])}) with {shape.words}: "
                f"by hand {milliseconds(by_hand)}, native {milliseconds(native)}",
                f"{peaks[0] / peaks[1]:.3f} with {shape.words}: by hand {peaks[0]:,} bytes, native "
                f"{peaks[1]:,}",
            )
        )
        if len(values) == 1:
            memory = peaks[0] / peaks[1]
    steps, bytes_ = zip(*words, strict=True)
    note = "2 ranks x 1 thread, every block a unit; "
    counted = "of all tensors that live, with the optimizer's state; "
    return [
        (statistics.median(values[0]), note + "; ".join(steps)),
        (memory, note + counted + "; ".join(bytes_)),
    ]


def measure_zero3(shape: Shape, num_rounds: int) -> tuple[list[list[float]], list[int]]:
    """On a rank: times of a step with FSDP by hand and by torch, and bytes at their peaks."""
    torch.manual_seed(dist.get_rank())
    steps, peaks = [], []
    for wrap in (units.FSDP, fully_shard.torch_fsdp):
        model, tokens = shape.build()
        model = wrap(model, list(model.blocks))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        steps.append(make_step(model, tokens, optimizer))
        steps[-1]()  # from now on there is optimizer state
        with Live(parts_of(model, optimizer)) as live:
            steps[-1]()
        peaks.append(live.total)
    in_turn(steps, 3)
    return in_turn(steps, num_rounds), peaks


MEASURES = (
    Measure(
        zero3_ratios,
        (
            Row(
                "FSDP by hand / PyTorch's fully_shard, time of a step, 2 ranks",
                "<= 1.3",
                "time / time",
            ),
            Row("the same, peak bytes of tensors on a rank", "<= 1.1", "bytes / bytes"),
        ),
        ("fsdp/*.py", "models/transformer.py", "instruments/live.py"),
    ),
)
