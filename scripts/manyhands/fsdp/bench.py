"""Measures FSDP by hand: against PyTorch's fully_shard, and what its prefetch hides."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

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
from manyhands.pipeline.stages import Waiting
from manyhands.ranks import lab
from manyhands.ways.fsdp import shard


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
    for native in (False, True):
        whole, tokens = shape.build()
        model = shard(whole, native)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        steps.append(make_step(model, tokens, optimizer))
        steps[-1]()  # from now on there is optimizer state
        with Live(parts_of(model, optimizer)) as live:
            steps[-1]()
        peaks.append(live.total)
    in_turn(steps, 3)
    return in_turn(steps, num_rounds), peaks


# ---- what prefetch hides: units that only wait, over a link that is slow on purpose ----------

NUM_BLOCKS = 4
FORWARD_S, BACKWARD_S = 0.020, 0.040  # of a block
MESSAGE_S = 0.015  # a gather, or a reduction, of a block's weights


class Span(NamedTuple):
    """What a unit did, or what the link did for it."""

    lane: str  # forward, backward, gather or reduce
    unit: int
    start_s: float
    stop_s: float


class Sleepers(nn.Module):
    """Blocks that only wait, and a root of two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.blocks = nn.ModuleList(Waiting(FORWARD_S, BACKWARD_S, 64) for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x.sum()


class Recorder:
    """Writes down the spans of a rank's blocks, and carries their messages over a slow link."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.since: dict[tuple[str, int], float] = {}
        self.link_free_s = 0.0

    def wrap(self, fsdp: Callable) -> nn.Module:
        """Sleepers in shards, whose steps are recorded from now on."""
        module = Sleepers()
        for unit, block in enumerate(module.blocks, 1):
            # Added before FSDP adds its own, so that it is called before the reduction.
            ended = partial(self.end, "backward", unit)
            block.weight.register_post_accumulate_grad_hook(lambda _, ended=ended: ended())
        model = fsdp(module, list(module.blocks))
        for unit, block in enumerate(module.blocks, 1):
            begun = partial(self.begin, "forward", unit)
            block.register_forward_pre_hook(lambda *_, begun=begun: begun())
            block.register_forward_hook(partial(self.computed, unit))
            for flat in model.units[unit]:
                flat.gather = partial(self.gather, unit, flat.gather)
                flat.reduce = partial(self.reduce, unit, flat.reduce)
        return model

    def begin(self, lane: str, unit: int) -> None:
        self.since[lane, unit] = time.perf_counter()

    def end(self, lane: str, unit: int) -> None:
        self.spans.append(Span(lane, unit, self.since[lane, unit], time.perf_counter()))

    def computed(self, unit: int, _: nn.Module, __: tuple, output: Tensor) -> None:
        self.end("forward", unit)
        # Added after FSDP's own, which waits for the weights.
        output.register_hook(lambda _: self.begin("backward", unit))

    def carry(self) -> tuple[float, float]:
        """When the link begins to carry a message that is sent now, and when it has arrived."""
        start_s = max(time.perf_counter(), self.link_free_s)
        self.link_free_s = start_s + MESSAGE_S
        return start_s, self.link_free_s

    def gather(self, unit: int, real: Callable) -> "SlowWork":
        work = real()
        start_s, arrives_s = self.carry()
        self.spans.append(Span("gather", unit, start_s, arrives_s))
        return SlowWork(work, arrives_s)

    def reduce(self, unit: int, real: Callable) -> None:
        start_s, arrives_s = self.carry()
        real()
        time.sleep(max(0.0, arrives_s - time.perf_counter()))
        self.spans.append(Span("reduce", unit, start_s, arrives_s))


class SlowWork(NamedTuple):
    """Stands in for torch's Work: done when the slow link would be."""

    work: dist.Work
    arrives_s: float

    def wait(self) -> None:
        self.work.wait()
        time.sleep(max(0.0, self.arrives_s - time.perf_counter()))


def record_steps(versions: Sequence[Callable], num_rounds: int = 5) -> list[list[Span]]:
    """On a rank: the spans of the fastest step of each version of FSDP, which take turns."""
    recorders = [Recorder() for _ in versions]
    models = [recorder.wrap(one) for recorder, one in zip(recorders, versions, strict=True)]
    found: list[list[list[Span]]] = [[] for _ in versions]
    for _ in range(num_rounds):
        for model, recorder, runs in zip(models, recorders, found, strict=True):
            recorder.spans = []
            dist.barrier()
            model(torch.ones(2)).backward()
            model.zero_grad()
            runs.append(recorder.spans)
    return [min(runs, key=length_s) for runs in found]


def num_overlapped(spans: Sequence[Span]) -> int:
    """How many gathers are on the link while a block computes."""
    computing = [span for span in spans if span.lane in ("forward", "backward")]
    gathers = [span for span in spans if span.lane == "gather"]
    return sum(
        any(gather.start_s < one.stop_s and one.start_s < gather.stop_s for one in computing)
        for gather in gathers
    )


def length_s(spans: Sequence[Span]) -> float:
    """Seconds from the first start to the last stop."""
    return max(span.stop_s for span in spans) - min(span.start_s for span in spans)


MEASURES = (
    Measure(
        zero3_ratios,
        (
            Row(
                "FSDP by hand / PyTorch's fully_shard, time of a step, 2 ranks",
                "<= 1.0",
                "time / time",
            ),
            Row("the same, peak bytes of tensors on a rank", "<= 1.02", "bytes / bytes"),
        ),
        ("fsdp/*.py", "models/transformer.py", "instruments/live.py", "ways/fsdp.py"),
    ),
)
