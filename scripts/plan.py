"""Plan a training: every layout on some GPUs, what it needs and takes, and which one is best.

python scripts/plan.py --model llama3-405b --gpu H100-80GB --gpus 16384 --batch-tokens 16777216

python scripts/plan.py --model llama-13b --batch-sequences 2048 --dp 8 --pp 2 --tp 4 --explain

python scripts/plan.py --json runs.json     one row for each configuration in the file

python scripts/plan.py --published          how far it is from runs that others have published

Each layout has its memory and time by part, its utilisation and, for a number of training tokens,
GPU-hours, energy and cost. The planner adds up the formulas of the lessons. Its constants come from
data sheets and from measurements of single operations, a few are estimates, and none is fitted to a
run. Against 416 published step times it is within 20 % for 334, and too fast by 9 % in the median;
of 425 runs that ran it says of 422 that they fit, and of 8 that ran out of memory it sees 6.

A file holds an object, or a list of them, with the names of the flags (micro_batch or micro-batch).
Where a value is a list, every one of its members is taken: a grid. Flags count where the file says
nothing. Each row is one line of JSON. What cannot run has "fits": false, and "error" says why.
"""

import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from manyhands.planner import published, reasons
from manyhands.planner.hardware import GIB, GPUS, Gpu
from manyhands.planner.memory import Layout, Training
from manyhands.planner.plans import Plan, plans, price
from manyhands.planner.shape import MODELS, ModelShape
from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import command_line

FIELDS = "dp pp tp sp zero micro_batch grad_accumulation interleave recompute memory_gib step_s mfu"
FIELDS = (*FIELDS.split(), "tokens_per_s_per_gpu", "fits")


@dataclass(frozen=True)
class Config:
    """What is trained, on what, and how. A number that is 0 is taken from the model or the GPU."""

    file: Annotated[Path | None, tyro.conf.Positional] = None
    """JSON with one configuration or several; - reads standard input."""

    json: bool = False
    """Print a row of JSON for each plan; without a layout the `show` fastest that fit."""
    explain: bool = False
    """Say where each byte and each millisecond of the best or the given plan comes from."""
    published: bool = False
    """Hold the planner against runs that others published, by source and by data-parallel ranks."""
    show: int = 10
    """Plans to print; 0 prints all, also those that do not fit."""

    model: str = "llama3-8b"
    """A model by name; the next flags change or replace it."""
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    ffn: int = 0
    vocab: int = 0
    sequence: int = 0
    gated: Literal["", "yes", "no"] = ""
    """Has the MLP three matrices (SwiGLU)?"""
    tied: Literal["", "yes", "no"] = ""
    """Are embedding and head one matrix?"""

    batch_tokens: int = 4 * 2**20
    """Of a step, over all GPUs."""
    batch_sequences: int = 0
    """The same in sequences; it replaces batch_tokens."""

    gpu: str = "H100-80GB"
    """A GPU by name; the next flags change it."""
    gpus: int = 0
    """How many; 0 takes dp x pp x tp, or one node."""
    memory_gb: float = 0
    """Memory that programs see (1e9 bytes)."""
    tflops: float = 0
    """Peak of dense 16-bit products (1e12 FLOP/s)."""
    memory_gb_per_s: float = 0
    node_gb_per_s: float = 0
    """Bandwidth between GPUs of a node, one direction (1e9 bytes/s)."""
    network_gb_per_s: float = 0
    """Bandwidth between nodes per GPU, one direction (1e9 bytes/s)."""
    node_latency_us: float = 0
    network_latency_us: float = 0
    gpus_per_node: int = 0
    dollars_per_hour: float = 0
    watts: float = 0

    dtype: Literal["bfloat16", "float8"] = "bfloat16"
    """Of the blocks' matrix products."""
    gradients: Literal["bfloat16", "float32", "both"] = "bfloat16"
    """In which gradients are kept and summed; both: a micro-batch's in 16 bits, their sum in 32."""
    attention: Literal["fused", "flash1", "unfused"] = "fused"
    """Fused as FlashAttention-2, or as the first one; unfused keeps its scores."""
    kernels: Literal["eager", "fused"] = "eager"
    """Of what lies between the matrices: PyTorch's own under autocast, or fused ones (Megatron)."""
    loss: Literal["eager", "fused"] = "eager"
    """A fused loss keeps 4 bytes of a logit, PyTorch's 10."""

    dp: int = 0
    """A fixed layout: data-parallel ranks. Given one of dp, pp and tp, the others are 1, or what
    the GPUs leave for dp."""
    pp: int = 0
    tp: int = 0
    sp: bool = False
    """Sequence parallelism among the tensor ranks."""
    zero: Literal[0, 1, 2, 3] = 1
    """ZeRO stage; 3 is FSDP."""
    micro_batch: int = 1
    """Sequences."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Selective: scores of unfused attention, norms and activation functions."""
    interleave: int = 1
    """Stages on each rank of a pipeline."""

    budget_tokens: float = 0
    """Tokens of the whole training: adds days, GPU-hours, energy and money."""


def main(config: Config) -> None:
    if config.published:
        print(
            published.in_json()
            if config.json
            else f"{published.table()}\n\n{published.by_replicas()}"
        )
        return
    configurations = list(read(config))
    for one in configurations:
        if config.json:
            for row in rows(one, len(configurations) == 1):
                print(json.dumps(row))
        else:
            tell(one)


def read(config: Config) -> Iterator[Config]:
    """The configurations of the file, each on top of the flags; the flags alone without one."""
    if config.file is None:
        yield config
        return
    try:
        text = sys.stdin.read() if str(config.file) == "-" else config.file.read_text()
        found = json.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read {config.file}: {error}") from error
    except json.JSONDecodeError as error:
        raise BadInput(f"{config.file} is no JSON: {error}") from error
    for number, one in enumerate(found if isinstance(found, list) else [found], 1):
        if not isinstance(one, dict):
            raise BadInput(f"{config.file}: configuration {number} is no object: {one!r}")
        yield from grid(config, one, number)


def grid(config: Config, given: dict, number: int) -> Iterator[Config]:
    """One configuration for each combination of the values that are lists."""
    hints = {field.name: field.default for field in dataclasses.fields(Config)}
    values = {}
    for key, value in given.items():
        name = key.replace("-", "_")
        if name not in hints:
            raise BadInput(f"configuration {number}: no flag is called {key}: see --help")
        members = value if isinstance(value, list) else [value]
        values[name] = [as_flag(name, hints[name], member, number) for member in members]
    for chosen in itertools.product(*values.values()):
        yield dataclasses.replace(config, **dict(zip(values, chosen, strict=True)))


def as_flag(name: str, default: object, value: object, number: int) -> object:
    """A value of the file as the flag wants it; BadInput where its kind is another."""
    if name in ("gated", "tied") and isinstance(value, bool):
        return "yes" if value else "no"
    kind = type(default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind in (int, float) and is_number and math.isfinite(value) and value == kind(value):
        return kind(value)
    if kind in (bool, str) and isinstance(value, kind):
        return value
    raise BadInput(f"configuration {number}: {name} is {value!r}, not of type {kind.__name__}")


def training_of(config: Config) -> Training:
    """What is trained on what; BadInput where a name or a number cannot be."""
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise BadInput(f"--{name.replace('_', '-')} is {value}: take a number")
    if config.model not in MODELS:
        raise BadInput(f"no model is called {config.model}: take one of {', '.join(MODELS)}")
    if config.gpu not in GPUS:
        raise BadInput(f"no GPU is called {config.gpu}: take one of {', '.join(GPUS)}")
    shape = shape_of(config)
    sequences = config.batch_sequences or config.batch_tokens // shape.sequence
    mesh = max(1, config.dp) * max(1, config.pp) * max(1, config.tp)
    gpu = gpu_of(config)
    gpus = config.gpus or (mesh if config.dp else max(mesh, gpu.per_node))
    if min(sequences, gpus) < 1:
        raise BadInput(f"{sequences} sequences per step on {gpus} GPUs: both must be at least 1")
    return Training(
        shape,
        gpu,
        gpus,
        sequences,
        config.dtype,
        config.gradients,
        config.attention,
        config.kernels,
        config.loss,
    )


def shape_of(config: Config) -> ModelShape:
    """The named model with the sizes that are given in its place."""
    named = MODELS[config.model]
    sizes = {name: getattr(config, name) for name in ModelShape._fields[:7]}
    if sizes["heads"] and not sizes["kv_heads"]:
        sizes["kv_heads"] = sizes["heads"]
    changed = {name: size for name, size in sizes.items() if size}
    changed |= {
        name: getattr(config, name) == "yes" for name in ("gated", "tied") if getattr(config, name)
    }
    shape = named._replace(**changed)
    if min(shape[:7]) < 1 or shape.hidden % shape.heads:
        raise BadInput(f"{shape}: sizes are at least 1, and hidden is a multiple of heads")
    return shape


def gpu_of(config: Config) -> Gpu:
    """The named GPU with the numbers that are given in place of its own."""
    gpu = GPUS[config.gpu]
    node, network = gpu.node, gpu.network
    if config.node_gb_per_s:
        node = node._replace(bytes_per_s=1e9 * config.node_gb_per_s)
    if config.node_latency_us:
        node = node._replace(latency_s=1e-6 * config.node_latency_us)
    if config.network_gb_per_s:
        network = network._replace(bytes_per_s=1e9 * config.network_gb_per_s)
    if config.network_latency_us:
        network = network._replace(latency_s=1e-6 * config.network_latency_us)
    gpu = gpu._replace(
        node=node,
        network=network,
        memory_bytes=int(1e9 * config.memory_gb) or gpu.memory_bytes,
        memory_bytes_per_s=1e9 * config.memory_gb_per_s or gpu.memory_bytes_per_s,
        per_node=config.gpus_per_node or gpu.per_node,
        watts=config.watts or gpu.watts,
        dollars_per_hour=config.dollars_per_hour or gpu.dollars_per_hour,
    )
    if not config.tflops:
        return gpu
    faster = 1e12 * config.tflops / gpu.flops_per_s
    return gpu._replace(
        flops_per_s=1e12 * config.tflops, float8_flops_per_s=faster * gpu.float8_flops_per_s
    )


def layout_of(config: Config, training: Training) -> Layout | None:
    """The layout that is asked for; None where none of dp, pp and tp is given."""
    if not (config.dp or config.pp or config.tp):
        return None
    pp = config.pp or 1
    tp = config.tp or 1
    return Layout(
        config.dp or max(1, training.gpus // (pp * tp)),
        pp,
        tp,
        config.sp,
        config.zero,
        config.micro_batch,
        config.recompute,
        config.interleave,
    )


def rows(config: Config, is_only: bool) -> Iterator[dict]:
    """A row for the layout of a configuration, or one for each of its best plans."""
    try:
        training = training_of(config)
        layout = layout_of(config, training)
        found = [price(training, layout)] if layout else chosen(config, plans(training))
    except ValueError as error:
        if is_only:
            raise BadInput(str(error)) from error
        yield dict.fromkeys(FIELDS) | layout_fields(config) | {"fits": False, "error": str(error)}
        return
    for plan in found:
        yield plan.row() | money(plan, config)


def layout_fields(config: Config) -> dict[str, object]:
    """What a configuration says of its layout."""
    return {name: getattr(config, name) for name in Layout._fields}


def chosen(config: Config, found: list[Plan]) -> list[Plan]:
    """The plans to show, of those that planner.plans has sorted."""
    return found if config.show == 0 else [plan for plan in found if plan.fits][: config.show]


def money(plan: Plan, config: Config) -> dict[str, float]:
    """What the token budget takes, if there is one."""
    return plan.budget(config.budget_tokens) if config.budget_tokens else {}


def tell(config: Config) -> None:
    """Print plans for people."""
    training = training_of(config)
    layout = layout_of(config, training)
    try:
        found = [price(training, layout)] if layout else plans(training)
    except ValueError as error:
        raise BadInput(str(error)) from error
    shape, gpu = training.shape, training.gpu
    print(
        f"{shape.num_parameters / 1e9:.1f} billion parameters, {training.sequences:,} sequences of "
        f"{shape.sequence:,} tokens per step, {training.gpus:,} x {gpu.name} "
        f"({gpu.per_node} per node)"
    )
    if not layout:
        num_fit = sum(plan.fits for plan in found)
        print(f"{len(found):,} layouts can run, and {num_fit:,} fit. {reasons.why(found)}")
    shown = found if layout else chosen(config, found)
    for plan in shown:
        fits = "" if plan.fits else "  DOES NOT FIT"
        print(
            f"{plan.step_s:9.3f} s  {plan.mfu:6.1%}  {plan.memory_bytes / GIB:6.1f} GiB  "
            f"{reasons.layout_words(plan)}{fits}"
        )
        if budget := money(plan, config):
            print(
                f"           {budget['days']:,.1f} days, {budget['gpu_hours']:,.0f} GPU-hours, "
                f"{budget['kwh']:,.0f} kWh, {budget['dollars']:,.0f} dollars"
            )
    if config.explain and shown:
        print()
        print(reasons.explain(shown[0]))
    if shown:
        print()
        print(published.caution(shown[0].layout))


if __name__ == "__main__":
    command_line(main, Config)
