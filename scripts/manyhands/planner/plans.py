"""The planner: every layout of a training on some GPUs, what it needs and takes, and which is best.

    model, batch, GPUs --> layouts dp x pp x tp x (sp, ZeRO, micro-batch, recompute, interleave)
                       --> memory (memory.py) and time (step_time.py) of each --> the fastest of
                           those that fit

It only adds up what the lessons have taught; nothing is measured, and no number is fitted to a run.
How far it is from runs that others published: stored_published.json, and lesson 14.

Price: about 50 microseconds per layout.
"""

from collections.abc import Iterator
from typing import NamedTuple

from manyhands.planner.hardware import CONTEXT_BYTES, GIB, POWER_USAGE
from manyhands.planner.memory import Layout, Training, memory_of, num_micro_batches
from manyhands.planner.step_time import time_of

RECOMPUTES = ("none", "selective", "full")
COMMUNICATION = ("tensor messages", "pipeline messages", "data messages")


class Plan(NamedTuple):
    """A layout with its price."""

    training: Training
    layout: Layout
    grad_accumulation: int  # micro-batches of a step on each replica
    memory: dict[str, int]  # bytes by part, on the fullest rank
    time: dict[str, float]  # seconds of a step by part

    @property
    def memory_bytes(self) -> int:
        """What PyTorch's allocator holds on the fullest rank."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Is there room for it beside the CUDA context and NCCL's buffers?"""
        return self.memory_bytes + CONTEXT_BYTES <= self.training.gpu.memory_bytes

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return sum(self.time.values())

    @property
    def tokens(self) -> int:
        """Of a step, over all GPUs."""
        return self.training.sequences * self.training.shape.sequence

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the share of the data sheet's 16-bit peak that the model's own
        FLOPs use. Recomputation does not count."""
        training = self.training
        peak = training.gpus * training.gpu.flops_per_s
        return self.tokens * training.shape.flops_per_token / (self.step_s * peak)

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Throughput of a GPU."""
        return self.tokens / self.step_s / self.training.gpus

    def row(self) -> dict[str, object]:
        """The plan as one row of a table."""
        found = {
            **self.layout._asdict(),
            "grad_accumulation": self.grad_accumulation,
            "memory_gib": round(self.memory_bytes / GIB, 3),
            "step_s": round(self.step_s, 6),
            "mfu": round(self.mfu, 5),
            "tokens_per_s_per_gpu": round(self.tokens_per_s_per_gpu, 3),
            "fits": self.fits,
        }
        return found

    def budget(self, tokens: float) -> dict[str, float]:
        """What a training on so many tokens takes: days, GPU-hours, energy (kWh) and dollars."""
        gpu = self.training.gpu
        seconds = tokens / self.tokens * self.step_s
        hours = seconds / 3600 * self.training.gpus
        return {
            "days": seconds / 86400,
            "gpu_hours": hours,
            "kwh": hours * gpu.watts / 1000 * POWER_USAGE,
            "dollars": hours * gpu.dollars_per_hour,
        }


def fault(training: Training, layout: Layout) -> str:
    """Why this layout cannot run on these GPUs, in a sentence; "" where it can."""
    shape = training.shape
    ranks = layout.dp * layout.pp * layout.tp
    if ranks != training.gpus:
        return f"dp x pp x tp is {ranks}, but there are {training.gpus} GPUs"
    if shape.heads % layout.tp or shape.kv_heads % min(layout.tp, shape.kv_heads):
        return f"{shape.heads} heads cannot be cut evenly over {layout.tp} tensor ranks"
    if layout.sp and (layout.tp == 1 or shape.sequence % layout.tp):
        return f"sp cuts {shape.sequence} positions over {layout.tp} tensor ranks: not evenly"
    if layout.pp * layout.interleave > shape.layers:
        return f"{layout.pp} x {layout.interleave} stages, but only {shape.layers} layers"
    if training.sequences % (layout.dp * layout.micro_batch):
        return (
            f"{training.sequences} sequences cannot be cut into dp {layout.dp} x micro-batches of "
            f"{layout.micro_batch}"
        )
    if layout.interleave > 1 and layout.pp == 1:
        return "interleave needs a pipeline: pp of 2 or more"
    if layout.interleave > 1 and num_micro_batches(training, layout) % layout.pp:
        return f"interleave needs a multiple of pp = {layout.pp} micro-batches"
    return ""


def price(training: Training, layout: Layout) -> Plan:
    """What a layout needs and takes.

    Raises:
        ValueError: it cannot run; the message says why.
    """
    if problem := fault(training, layout):
        raise ValueError(problem)
    m = num_micro_batches(training, layout)
    return Plan(training, layout, m, memory_of(training, layout), time_of(training, layout))


def divisors(number: int) -> list[int]:
    """All of them, in order."""
    return [one for one in range(1, number + 1) if number % one == 0]


def layouts(training: Training) -> Iterator[Layout]:
    """Every layout that can run; micro-batches and interleaving in powers of two."""
    shape = training.shape
    for tp in divisors(training.gpus):
        if tp > 2 * training.gpu.per_node or shape.heads % tp:
            continue
        for pp in divisors(training.gpus // tp):
            dp = training.gpus // tp // pp
            if pp > shape.layers or training.sequences % dp:
                continue
            yield from on_mesh(training, dp, pp, tp)


def on_mesh(training: Training, dp: int, pp: int, tp: int) -> Iterator[Layout]:
    """Every layout on one mesh."""
    share = training.sequences // dp
    micro_batches = [size for size in (1, 2, 4, 8, 16, 32) if share % size == 0]
    for size in micro_batches:
        parts = [1]
        if pp > 1 and share // size % pp == 0:
            most = training.shape.layers // pp
            parts += [v for v in (2, 4, 8) if v <= most]
        # In a pipeline ZeRO-2 and 3 keep all whole until a step's end, so they equal ZeRO-1.
        for zero in range((4 if pp == 1 else 2) if dp > 1 else 1):
            for sp in [False, True] if tp > 1 else [False]:
                for recompute in RECOMPUTES:
                    for v in parts:
                        layout = Layout(dp, pp, tp, sp, zero, size, recompute, v)
                        if not fault(training, layout):
                            yield layout


def plans(training: Training) -> list[Plan]:
    """All layouts with their prices: those that fit first, each kind from fast to slow."""
    found = [price(training, layout) for layout in layouts(training)]
    return sorted(found, key=lambda plan: (not plan.fits, plan.step_s))
