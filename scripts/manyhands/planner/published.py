"""Training runs that others published, and how far the planner is from each of them.

    stored_published.json   a row for each run: what was trained, how, on what; what was reported;
                            what the planner says of it

`python scripts/plan.py --published` prints the comparison. A test remakes the planner's numbers.

The constants in hardware.py and the counts in memory.py and step_time.py are the same for all
rows. These things differ by the software that ran, and they are properties of it, not of a row:

    pytorch        PyTorch's kernels and loss, gradients in bfloat16: FSDP, InternLM, torchtitan
    llm-foundry    the same, but with a loss that is fused
    megatron       kernels that are fused, unfused attention with dropout, float32 gradients

BLOOM's machine had one 100 Gb/s card for two GPUs, half of what an A100 node has.
"""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from manyhands.planner.hardware import GIB, GPUS, infiniband
from manyhands.planner.memory import Layout, Training
from manyhands.planner.plans import Plan, price
from manyhands.planner.shape import ModelShape

STORED = Path(__file__).with_name("stored_published.json")
SOFTWARE = {
    "pytorch": {},
    "llm-foundry": {"loss": "fused", "attention": "flash1"},
    "megatron": {"kernels": "fused", "attention": "unfused", "gradients": "float32"},
    "deepspeed bf16": {"kernels": "fused", "attention": "unfused", "gradients": "both"},
}
WITHIN = 0.2  # of a step's time
MANY = 10**9


class Band(NamedTuple):
    """Layouts with about the same number of data-parallel ranks."""

    name: str
    least: int
    most: int
    sharded: bool = False  # only those of ZeRO-3

    def has(self, layout: Layout) -> bool:
        """Is the layout one of them?"""
        return self.least <= layout.dp <= self.most and (not self.sharded or layout.zero == 3)


BANDS = (
    Band("1", 1, 1),
    Band("2 to 8", 2, 8),
    Band("9 to 64", 9, 64),
    Band("65 to 256", 65, 256),
    Band("257 on", 257, MANY),
    Band("257 on, ZeRO-3", 257, MANY, sharded=True),
)


class Run(NamedTuple):
    """A run as it was published."""

    source: str  # a key of the file's "sources"
    model: str
    gpu: str
    gpus: int
    shape: ModelShape
    sequences: int
    dtype: str
    layout: Layout
    software: str
    is_out_of_memory: bool
    step_s: float | None  # reported, or from the reported tokens or FLOPs per second
    memory_gib: float | None  # reported by PyTorch's allocator

    def plan(self) -> Plan:
        """What the planner says of it."""
        gpu = GPUS[self.gpu]
        if self.source == "BLOOM":
            gpu = gpu._replace(network=infiniband(6.25e9))
        options = SOFTWARE[self.software]
        training = Training(self.shape, gpu, self.gpus, self.sequences, self.dtype, **options)
        return price(training, self.layout)


def runs() -> list[Run]:
    """All stored runs."""
    found = []
    for row in json.loads(STORED.read_text())["rows"]:
        given = dict(zip(Run._fields, row, strict=False))
        *sizes, gated, tied = given["shape"]
        given["shape"] = ModelShape(*sizes, bool(gated), bool(tied))
        layout = Layout(*given["layout"])
        given["layout"] = layout._replace(sp=bool(layout.sp))
        given["is_out_of_memory"] = bool(given["is_out_of_memory"])
        found.append(Run(**given))
    return found


def predictions(found: Sequence[Run]) -> list[list[float | bool]]:
    """Of each run the planner's step (s), memory (GiB), and whether it fits."""
    plans = [run.plan() for run in found]
    return [
        [round(plan.step_s, 4), round(plan.memory_bytes / GIB, 2), int(plan.fits)] for plan in plans
    ]


class Comparison(NamedTuple):
    """The planner beside the runs of one source, or of all."""

    timed: int  # runs that ran, and whose time is known
    near: int  # of these, predicted within WITHIN
    median_error: float  # of the predicted step: the systematic bias; below 0 it is too fast
    rank_correlation: float  # of model FLOPs utilisation, by Spearman; nan for fewer than 3
    ran: int
    ran_right: int  # of these, those that fit by the planner
    out_of_memory: int
    out_right: int  # of these, those that do not fit by the planner
    median_memory: float  # predicted over reported; nan where none was reported


def compare(found: Sequence[Run]) -> Comparison:
    """Hold the planner against runs."""
    plans = [run.plan() for run in found]
    pairs = list(zip(found, plans, strict=True))
    timed = [(run, plan) for run, plan in pairs if run.step_s and not run.is_out_of_memory]
    errors = [plan.step_s / run.step_s - 1 for run, plan in timed]
    reported = [plan.mfu * plan.step_s / run.step_s for run, plan in timed]
    ran = [plan for run, plan in pairs if not run.is_out_of_memory]
    out = [plan for run, plan in pairs if run.is_out_of_memory]
    memory = [plan.memory_bytes / GIB / run.memory_gib for run, plan in pairs if run.memory_gib]
    return Comparison(
        len(timed),
        sum(abs(error) <= WITHIN for error in errors),
        statistics.median(errors) if errors else float("nan"),
        rank_correlation([plan.mfu for _, plan in timed], reported),
        len(ran),
        sum(plan.fits for plan in ran),
        len(out),
        sum(not plan.fits for plan in out),
        statistics.median(memory) if memory else float("nan"),
    )


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's: the correlation of the ranks, equal values sharing theirs."""
    if len(a) < 3:
        return float("nan")
    return statistics.correlation(ranks(a), ranks(b))


def ranks(values: Sequence[float]) -> list[float]:
    """The place of each value in order; equal ones have the mean of their places."""
    order = sorted(values)
    first = {value: place for place, value in reversed(list(enumerate(order)))}
    return [first[value] + (order.count(value) - 1) / 2 for value in values]


def table() -> str:
    """The comparison by source, as text."""
    found = runs()
    lines = [
        f"{'source':16} {'timed':>6} {'near':>5} {'bias':>6} {'order':>6}"
        f" {'ran':>5} {'right':>6} {'OOM':>4} {'right':>6} {'memory':>7}"
    ]
    for source in [*dict.fromkeys(run.source for run in found), "all"]:
        one = compare([run for run in found if source in (run.source, "all")])
        memory = "-" if math.isnan(one.median_memory) else f"{one.median_memory:.2f}"
        lines.append(
            f"{source:16} {one.timed:6} {one.near:5} {one.median_error:+6.0%}"
            f" {one.rank_correlation:6.3f} {one.ran:5} {one.ran_right:6} {one.out_of_memory:4}"
            f" {one.out_right:6} {memory:>7}"
        )
    return "\n".join(lines)


def by_replicas() -> str:
    """The comparison by the number of data-parallel ranks, as text."""
    lines = [f"{'dp':>15} {'timed':>6} {'near':>5} {'bias':>6}"]
    for band in BANDS:
        one = compare([run for run in runs() if band.has(run.layout)])
        lines.append(f"{band.name:>15} {one.timed:6} {one.near:5} {one.median_error:+6.0%}")
    return "\n".join(lines)


def caution(layout: Layout) -> str:
    """How far the planner is from published runs with about as many data-parallel ranks."""
    band = [band for band in BANDS if band.has(layout)][-1]
    one = compare([run for run in runs() if band.has(run.layout)])
    return (
        f"Of {one.timed} published runs with dp {band.name}, the time of {one.near} is planned "
        f"within {WITHIN:.0%}; the median error is {one.median_error:+.0%} (below 0: too fast)."
    )


def in_json() -> str:
    """The stored file with the planner's numbers made anew."""
    stored = json.loads(STORED.read_text())
    stored["predictions"] = predictions(runs())
    lists = {name: stored.pop(name) for name in ("rows", "predictions")}
    text = json.dumps(stored, indent=1).removesuffix("\n}")
    for name, rows in lists.items():
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        text += f',\n "{name}": [\n  {lines}\n ]'
    return text + "\n}"
