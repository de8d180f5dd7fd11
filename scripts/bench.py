"""Measure this machine: one row a figure, with its goal, as a table and into bench.json.

python scripts/bench.py --data FOLDER        all rows; FOLDER holds tinyshakespeare
python scripts/bench.py --only "weak"        the rows whose name holds these letters

What a ratio compares is timed in turn, A B B A, in the same processes, so that a machine that slows
down slows both. Values are medians. Figures are worth keeping from an idle machine only: a note
says when other programs were busy.
"""

import io
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import ModuleInfo, iter_modules, walk_packages
from types import ModuleType

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.optim import Optimizer

import manyhands
from manyhands import checks
from manyhands.collectives import ring
from manyhands.data_parallel import replicas
from manyhands.ddp import wrapping as ddp
from manyhands.fsdp import fully_shard, units
from manyhands.instruments.live import Live, parts_of
from manyhands.instruments.meters import SAMPLE_EVERY_S, Sampler, Stopwatch
from manyhands.instruments.timing import in_turn, slowest_rank, time_s
from manyhands.models.transformer import Block, Transformer, flops_per_token, num_parameters
from manyhands.pipeline import bubble, schedules, stages, wiring
from manyhands.pipeline import engine as pipeline
from manyhands.ranks import lab
from manyhands.ranks.runtime import BadInput, command_line
from manyhands.tensor import dtensor
from manyhands.tensor import model as split_model
from manyhands.training.storage import read_json, read_lines

SCRIPTS = Path(__file__).resolve().parent
CHAR_RECIPE = ("--layers=4", "--block=64", "--batch=12", "--steps=300", "--learning-rate=3e-3")
CHAR_SEEDS = (1, 2, 3)
CHAR_TOKENS_PER_STEP = 12 * 64
CHAR_WARM_UP_STEPS = 20
CHAR_THREADS = "2"
IMPORT_ROUNDS = 8
RING_BYTES = 64_000_000
METER_TIMES = 10  # meters run that many times over, since once is less than the noise
BUSY_CORES = 0.5  # what other programs may use before a note says so


@dataclass(frozen=True)
class Config:
    """What to measure."""

    only: str = ""
    """Measure only the rows whose name holds this text."""
    out: str = "bench.json"
    """File for the figures; it is written anew, also by --only."""
    data: str = ""
    """Folder or file with tinyshakespeare, for the rows `char recipe ...`."""


@dataclass(frozen=True)
class Row:
    """One figure. Without a value, the note says why."""

    name: str
    value: float | None
    goal: str
    unit: str
    note: str


Measured = tuple[float | None, str]  # value and note


@dataclass(frozen=True)
class Measure:
    """Work that gives one row or several; `function` returns what it measured, row by row."""

    function: Callable[[Config], list[Measured]]
    rows: tuple[tuple[str, str, str], ...]  # name, goal, unit


@dataclass(frozen=True)
class Shape:
    """A Transformer and the batch of one rank."""

    layers: int
    vocab: int
    block: int
    batch: int

    def build(self) -> tuple[nn.Module, torch.Tensor]:
        """Return the model and (batch, block) random tokens."""
        model = Transformer(self.vocab, self.block, self.layers)
        return model, torch.randint(self.vocab, (self.batch, self.block))

    @property
    def words(self) -> str:
        """The shape and its size, for a note."""
        size = num_parameters(*self.sizes) / 1e6
        return f"{size:.1f} M parameters, {self.batch} x {self.block} tokens a rank"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Vocabulary, block and layers, in the order that a Transformer takes them."""
        return self.vocab, self.block, self.layers


# ---- measuring -------------------------------------------------------------------------------


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """The ratio of each round."""
    return [a / b for a, b in zip(above, below, strict=True)]


def spread(values: Sequence[float]) -> str:
    """Lowest and highest of the values and how many there are, for a note."""
    return f"{plain(min(values))} to {plain(max(values))}, {len(values)} repeats"


def plain(value: float) -> str:
    """A number for a person: 0.951, or 21,345."""
    return f"{value:,.{0 if abs(value) >= 100 else 3}f}"


def milliseconds(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f} ms"


def make_step(
    model: nn.Module, tokens: torch.Tensor, optimizer: Optimizer | None = None
) -> Callable[[], None]:
    """One training step: forward, backward, AdamW."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def num_cores() -> int:
    """The cores that this process may use."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())
    return min(len(allowed), psutil.cpu_count(logical=False) or len(allowed))


# ---- the rows --------------------------------------------------------------------------------


def ring_ratio(config: Config) -> list[Measured]:
    """An all-reduce by hand over gloo's own, on the same four ranks."""
    times_s = lab.run_ranks(time_ring, 4, RING_BYTES, 40, timeout_s=400)
    by_hand, native = slowest_rank(times_s)
    values = ratios(by_hand, native)
    note = f"4 ranks x 1 thread, {RING_BYTES / 1e6:.0f} MB of fp32, the slowest rank's time"
    times = f"by hand {milliseconds(by_hand)}, gloo {milliseconds(native)}"
    return [(statistics.median(values), f"{spread(values)}; {times}; {note}")]


def time_ring(nbytes: int, num_rounds: int) -> list[list[float]]:
    """On a rank: times of the ring by hand and of torch's all-reduce."""
    tensor = torch.zeros(nbytes // 4)  # a sum of zeros stays a number, however often it is taken
    works = [partial(ring.all_reduce_ring, tensor), partial(dist.all_reduce, tensor)]
    in_turn(works, 3)
    return in_turn(works, num_rounds)


def ddp_ratio(config: Config) -> list[Measured]:
    """A step of BucketedDDP over a step of torch's, on the same two ranks."""
    words = []
    values = []
    for shape in (Shape(8, 1024, 64, 4), Shape(4, 65, 64, 16)):
        times_s = lab.run_ranks(time_ddp, 2, shape, 24, timeout_s=400)
        by_hand, native = slowest_rank(times_s)
        values.append(ratios(by_hand, native))
        words.append(
            f"{statistics.median(values[-1]):.3f} ({spread(values[-1])}) with {shape.words}: by "
            f"hand {milliseconds(by_hand)}, native {milliseconds(native)}"
        )
    return [(statistics.median(values[0]), "2 ranks x 1 thread; " + "; ".join(words))]


def time_ddp(shape: Shape, num_rounds: int) -> list[list[float]]:
    """On a rank: times of a step with data parallelism by hand and by torch."""
    torch.manual_seed(dist.get_rank())
    steps = [
        make_step(wrap(model), x)
        for wrap in (replicas.BucketedDDP, ddp.torch_ddp)
        for model, x in [shape.build()]
    ]
    in_turn(steps, 4)  # torch packs its buckets anew after the first step
    return in_turn(steps, num_rounds)


def zero3_ratios(config: Config) -> list[Measured]:
    """Step time and peak memory of FSDP over those of fully_shard, on the same two ranks."""
    words = []
    values = []
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
    steps = []
    peaks = []
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


def pipeline_ratio(config: Config) -> list[Measured]:
    """A training step of 1F1B over PyTorch's, on the same two ranks."""
    return by_hand_over_native(
        time_pipeline, [(Shape(8, 1024, 64, 16), 8), (Shape(4, 65, 64, 16), 4)], "micro-batches"
    )


def time_pipeline(shape: Shape, m: int, num_rounds: int) -> list[list[float]]:
    """On a rank: times of forwards and backwards in 1F1B, by hand and by torch."""
    rank = dist.get_rank()
    p = dist.get_world_size()
    steps = []

    def loss_fn(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())

    for native in (False, True):
        model, tokens = shape.build()
        layers = stages.layers_of(model)
        own = {rank: stages.cut(layers, stages.partition([1.0] * len(layers), p))[rank]}
        if native:
            schedule = wiring.torch_pipeline(own, p, m, loss_fn, "1f1b")
            given = {
                0: partial(schedule.step, tokens),
                p - 1: partial(schedule.step, target=tokens),
            }
            call = given.get(rank, schedule.step)
        else:
            shapes = (shape.batch // m, shape.block, 32 * shape.layers)
            engine = pipeline.Pipeline(own, schedules.one_f_one_b(p, m), loss_fn, shapes)
            call = partial(engine.step, tokens, tokens)
        steps.append(partial(fresh, own[rank], call))
    in_turn(steps, 3)
    return in_turn(steps, num_rounds)


def bubble_gap(config: Config) -> list[Measured]:
    """How far the idle share of 1F1B over stages that only wait is from the formula."""
    gaps = []
    words = []
    for p, m in ((4, 8), (8, 16)):
        by_rank = lab.run_ranks(time_bubble, p, m, 7)
        shares = [bubble.idle_share(spans) for spans in zip(*by_rank, strict=True)]
        formula = float(bubble.bubble(p, m)[1])
        gaps.append(abs(statistics.median(shares) - formula))
        words.append(
            f"{p} ranks, {m} micro-batches: {statistics.median(shares):.3f} ({spread(shares)}), "
            f"formula {formula:.3f}"
        )
    return [(max(gaps), "20 ms forward, 40 ms backward; " + "; ".join(words))]


def time_bubble(m: int, num_rounds: int) -> list[list]:
    """On a rank: when it computed what, in each round."""
    rank = dist.get_rank()
    p = dist.get_world_size()
    schedule = schedules.one_f_one_b(p, m)
    own = {rank: stages.Waiting(0.02, 0.04)}
    engine = pipeline.Pipeline(own, schedule, lambda out, _: out.mean(), (1, 4))
    rounds = []
    for _ in range(1 + num_rounds):
        dist.barrier()
        engine.step(torch.ones(m, 4), torch.ones(m, 4))
        rounds.append(list(engine.spans))
    return rounds[1:]  # the first one makes the connections


def fresh(module: nn.Module, call: Callable[[], object]) -> None:
    """Call it, and drop the gradients that it left."""
    call()
    module.zero_grad()


def tensor_ratio(config: Config) -> list[Measured]:
    """Forward and backward of a block that is cut by hand over DTensor's, on the same two ranks."""
    return by_hand_over_native(time_tensor, [(512, 8), (128, 8)], "heads")


def time_tensor(width: int, heads: int, num_rounds: int) -> list[list[float]]:
    """On a rank: times of forward and backward of a block (4, 64, width), both ways."""
    x = torch.randn(4, 64, width)
    steps = []
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    styles = {
        name.removeprefix("blocks.0."): style
        for name, style in dtensor.plan(1).items()
        if name.startswith("blocks.0.")
    }
    for native in (False, True):
        block = Block(width, heads, 0.0)
        if native:
            block = parallelize_module(block, mesh, styles)
        else:
            split_model.cut_block(block)
        steps.append(partial(fresh, block, partial(forward_and_backward, block, x)))
    in_turn(steps, 3)
    return in_turn(steps, num_rounds)


def forward_and_backward(block: nn.Module, x: torch.Tensor) -> None:
    """Also the gradient of x: it is what travels to the layer before."""
    block(x.requires_grad_()).sum().backward()


def by_hand_over_native(
    fn: Callable, sizes: Sequence[tuple], what: str, num_rounds: int = 24
) -> list[Measured]:
    """The ratio at the first of `sizes`; the note has all of them."""
    words = []
    values = []
    for size, number in sizes:
        times_s = lab.run_ranks(fn, 2, size, number, num_rounds, timeout_s=400)
        by_hand, native = slowest_rank(times_s)
        values.append(ratios(by_hand, native))
        named = size.words if isinstance(size, Shape) else f"width {size}"
        words.append(
            f"{statistics.median(values[-1]):.3f} ({spread(values[-1])}) with {named}, {number} "
            f"{what}: by hand {milliseconds(by_hand)}, native {milliseconds(native)}"
        )
    return [(statistics.median(values[0]), "2 ranks x 1 thread; " + "; ".join(words))]


def weak_scaling(config: Config) -> list[Measured]:
    """A step of one rank alone over a step of two ranks, each with the batch of the one."""
    shape = Shape(6, 1024, 128, 16)
    times_s = lab.run_ranks(time_scaling, 2, shape, 15, timeout_s=400)
    alone = times_s[0][0]
    _, both, silent = slowest_rank(times_s)
    efficiency = ratios(alone, both)
    machine = ratios(alone, silent)
    return [
        (
            statistics.median(efficiency),
            f"{spread(efficiency)}; 1 rank alone {milliseconds(alone)}, 2 ranks with twice the "
            f"global batch {milliseconds(both)}; 1 thread a rank, {shape.words}, BucketedDDP. Two "
            f"ranks that send nothing reach {statistics.median(machine):.3f}: the machine's limit",
        )
    ]


def time_scaling(shape: Shape, num_rounds: int) -> list[list[float]]:
    """On a rank: times of a step that rank 0 takes alone, and of one that all take together."""
    torch.manual_seed(dist.get_rank())
    alone = make_step(*shape.build())
    model, tokens = shape.build()
    # Meanwhile the others sleep in the barrier of the next round.
    together = make_step(replicas.BucketedDDP(model), tokens)
    works = [alone if dist.get_rank() == 0 else int, together]
    works.append(alone)  # all at once, but without a message
    in_turn(works, 2)
    return in_turn(works, num_rounds)


def flops_share(config: Config) -> list[Measured]:
    """FLOP/s of a training step over those of the machine's best matrix product."""
    shape = Shape(9, 4096, 128, 8)
    threads = num_cores()
    torch.set_num_threads(threads)
    tokens = shape.batch * shape.block
    width = 32 * shape.layers
    step = make_step(*shape.build())
    step_flops = flops_per_token(*shape.sizes) * tokens
    products = {
        f"{m} x {k} x {n}": matmuls(m, k, n, step_flops / 4)
        for m, k, n in [(2048, 2048, 2048), (tokens, width, 4 * width)]
    }
    works = [step, *(work for work, _ in products.values())]
    in_turn(works, 2)
    step_s, *products_s = in_turn(works, 15)
    step_rates = [step_flops / t / 1e9 for t in step_s]
    rates = {
        name: [flops / t / 1e9 for t in times_s]
        for (name, (_, flops)), times_s in zip(products.items(), products_s, strict=True)
    }
    best = max(rates, key=lambda name: statistics.median(rates[name]))
    shares = ratios(step_rates, rates[best])
    others = ", ".join(f"{name} {statistics.median(rate):.0f}" for name, rate in rates.items())
    return [
        (
            statistics.median(shares),
            f"{spread(shares)}; step {statistics.median(step_rates):.0f} GFLOP/s, matmul {others} "
            f"(divided by {best}); fp32, {threads} threads, {shape.words}, vocabulary "
            f"{shape.vocab}; forward, backward, AdamW",
        )
    ]


def matmuls(m: int, k: int, n: int, flops: float) -> tuple[Callable[[], None], float]:
    """Work of about `flops` in products of (m, k) and (k, n), and what it takes exactly."""
    a = torch.randn(m, k)
    b = torch.randn(k, n)
    out = torch.empty(m, n)
    repeats = max(1, round(flops / (2 * m * k * n)))

    def work() -> None:
        for _ in range(repeats):
            torch.mm(a, b, out=out)

    return work, repeats * 2 * m * k * n


def meters_cost(config: Config) -> list[Measured]:
    """Training with samples of ranks and node over training without; and with stopwatches."""
    shape = Shape(4, 65, 64, 16)
    num_rounds = 30
    measured = []
    for fn, what in (
        (time_samples, f"6 steps, samples every {SAMPLE_EVERY_S / METER_TIMES:g} s"),
        (time_stopwatches, f"a step, {METER_TIMES} stopwatches on the model"),
    ):
        metered, plain_s = slowest_rank(lab.run_ranks(fn, 2, shape, num_rounds, timeout_s=400))
        values = [1 + (ratio - 1) / METER_TIMES for ratio in ratios(metered, plain_s)]
        times = f"{what} {milliseconds(metered)}, without {milliseconds(plain_s)}"
        note = f"{times}, and a tenth of the difference; 2 ranks x 1 thread, {shape.words}"
        measured.append((statistics.median(values), f"{spread(values)}; {note}"))
    return measured


def time_samples(shape: Shape, num_rounds: int) -> list[list[float]]:
    """On a rank: times of six steps with a sampler, and without."""
    step = make_step(*shape.build())
    cpu = torch.device("cpu")

    def train() -> None:
        for _ in range(6):
            step()

    def train_and_sample() -> None:
        node = Path(folder, "node") if dist.get_rank() == 0 else None
        sampler = Sampler(Path(folder, "rank"), cpu, node, SAMPLE_EVERY_S / METER_TIMES)
        train()
        sampler.stop()

    with tempfile.TemporaryDirectory() as folder:
        in_turn([train_and_sample, train], 2)
        return in_turn([train_and_sample, train], num_rounds)


def time_stopwatches(shape: Shape, num_rounds: int) -> list[list[float]]:
    """On a rank: times of a step that is watched many times over, and of one that is not."""
    works = []
    for num_watches in (METER_TIMES, 0):
        model, tokens = shape.build()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        watches = [Stopwatch(torch.device("cpu")) for _ in range(num_watches)]
        for watch in watches:
            watch.watch(model, optimizer)
        works.append(partial(watched_step, model, tokens, optimizer, watches))
    in_turn(works, 4)
    return in_turn(works, num_rounds)


def watched_step(
    model: nn.Module, tokens: torch.Tensor, optimizer: Optimizer, watches: Sequence[Stopwatch]
) -> None:
    """A training step as `Run` watches it."""
    for phase in ("data", "forward"):
        for watch in watches:
            watch.mark(phase)
    model(tokens, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    for watch in watches:
        watch.mark("other")
        watch.split()


def start_ranks(config: Config) -> list[Measured]:
    """Seconds of `run_ranks` with four ranks that exchange one number."""
    first_s = time_s(lambda: lab.run_ranks(add_ranks, 4))
    (times_s,) = in_turn([lambda: lab.run_ranks(add_ranks, 4)], 9)
    return [(statistics.median(times_s), f"{spread(times_s)}; first call {first_s:.2f} s")]


def add_ranks() -> float:
    """On a rank: the sum of all ranks' numbers."""
    number = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(number)
    return number.item()


def verdicts(config: Config) -> list[Measured]:
    """Seconds until a right answer is called done, over all checks."""
    exercises = {f"{one.todo} {one.name}": one for _, one in all_exercises()}
    answers = [answer_of(lesson, one.name) for lesson, one in all_exercises()]
    states: dict[str, set[str]] = {name: set() for name in exercises}

    def judge(name: str, answer: object) -> None:
        with redirect_stdout(io.StringIO()):  # what the answer prints on its ranks
            states[name].add(checks.judge(exercises[name], answer).state)

    lab.run_ranks(add_ranks, 2)
    works = [partial(judge, *pair) for pair in zip(exercises, answers, strict=True)]
    medians_s = [statistics.median(times_s) for times_s in in_turn(works, 3)]
    if refused := [name for name, seen in states.items() if seen != {"done"}]:
        return [(None, f"the course's own answer is not called done: {', '.join(refused)}")]
    slowest = sorted(zip(medians_s, exercises, strict=True), reverse=True)[:3]
    names = ", ".join(f"{name} {median_s:.2f} s" for median_s, name in slowest)
    note = f"{len(works)} checks, 3 repeats each; {min(medians_s):.2f} s to {max(medians_s):.2f} s"
    return [(statistics.median(medians_s), f"{note}; slowest: {names}")]


def all_exercises() -> list[tuple[checks.Lesson, checks.Exercise]]:
    """Every exercise of the course, with its lesson."""
    modules = [import_module(f"manyhands.checks.{found.name}") for found in modules_in(checks)]
    lessons = [module.lesson for module in modules if hasattr(module, "lesson")]
    return [(lesson, one) for lesson in lessons for one in lesson.exercises.values()]


def answer_of(lesson: checks.Lesson, name: str) -> object:
    """The course's own answer: what a module of its room defines as `name`, or else another's."""
    own_room = f"manyhands.{lesson.module}."
    names = sorted(course_modules(), key=lambda module: not module.startswith(own_room))
    for module in map(import_module, names):
        answer = getattr(module, name, None)
        if getattr(answer, "__module__", None) == module.__name__:
            return answer
    raise LookupError(f"no module of manyhands defines {name}, an exercise of {lesson.module}")


def course_modules() -> list[str]:
    """The dotted names of all modules in rooms but the checks."""
    found = walk_packages(manyhands.__path__, "manyhands.")
    names = [one.name for one in found if not one.ispkg]
    return sorted(name for name in names if not name.startswith("manyhands.checks."))


def modules_in(package: ModuleType) -> list[ModuleInfo]:
    """The modules of a package, by name."""
    return sorted(iter_modules(package.__path__), key=lambda found: found.name)


def imports(config: Config) -> list[Measured]:
    """Seconds to import the lessons, `runtime` and `lab`, beyond those of torch."""
    rooms = {lesson.module for lesson, _ in all_exercises()}
    names = [name.removeprefix("manyhands.") for name in course_modules()]
    lessons = [name for name in names if name.partition(".")[0] in rooms]
    lessons += ["ranks.lab", "ranks.runtime"]
    bare = "torch, torch.distributed"
    ours = f"{bare}, {', '.join(f'manyhands.{name}' for name in lessons)}"
    loaded: dict[str, tuple[float, int]] = {}
    pairs_s = []
    for number in range(IMPORT_ROUNDS):
        for names in (bare, ours)[:: -1 if number % 2 else 1]:
            loaded[names] = import_once(names)
        pairs_s.append((loaded[ours][0], loaded[bare][0]))
    beyond_s = [ours_s - bare_s for ours_s, bare_s in pairs_s[1:]]  # the first reads the disk
    torch_s = statistics.median(bare_s for _, bare_s in pairs_s[1:])
    more = loaded[ours][1] - loaded[bare][1]
    note = f"torch itself {torch_s:.2f} s; {len(lessons)} modules: {', '.join(lessons)}"
    return [
        (statistics.median(beyond_s), f"{spread(beyond_s)}; {note}; {more} more modules of torch")
    ]


def import_once(names: str) -> tuple[float, int]:
    """Import in a fresh interpreter: seconds, and how many modules of torch that loads."""
    code = (
        f"import sys, time; start_s = time.perf_counter(); import {names}; "
        "print(time.perf_counter() - start_s, sum(m.startswith('torch') for m in sys.modules))"
    )
    seconds, num_modules = run_python("-c", code).split()
    return float(seconds), int(num_modules)


def run_python(*arguments: str, **environ: str) -> str:
    """Run Python on the course's modules; returns what it prints."""
    search = os.pathsep.join(filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": search} | environ,
        capture_output=True,
        text=True,
    )
    if done.returncode == 2:
        raise BadInput(done.stderr.strip().split("\n")[-1])
    if done.returncode:
        raise RuntimeError(f"python {' '.join(arguments)} failed:\n{done.stderr}")
    return done.stdout


def char_recipe(config: Config) -> list[Measured]:
    """Validation loss and tokens/s of train_single.py with nanoGPT's small setting."""
    if not config.data:
        remedy = "python scripts/bench.py --only 'char recipe' --data FOLDER"
        return [(None, f"skipped: needs a folder with tinyshakespeare: {remedy}")] * 2
    losses = []
    rates = []
    for seed in CHAR_SEEDS:
        with tempfile.TemporaryDirectory() as folder:
            flags = (*CHAR_RECIPE, f"--data={config.data}", f"--seed={seed}", f"--out={folder}/run")
            script = str(SCRIPTS / "train_single.py")
            printed = run_python(script, *flags, "--device=cpu", OMP_NUM_THREADS=CHAR_THREADS)
            losses.append(read_json(Path(folder, "run", "status.json"))["valid_loss"])
            lines = read_lines(Path(folder, "run", "metrics.jsonl"))
        spent_s = lines[-1]["time_s"] - lines[CHAR_WARM_UP_STEPS - 1]["time_s"]
        rates.append(CHAR_TOKENS_PER_STEP * (len(lines) - CHAR_WARM_UP_STEPS) / spent_s)
    data = next(line for line in printed.splitlines() if line.startswith("data:"))
    recipe = f"train_single.py {' '.join(CHAR_RECIPE)}; {data}"
    loop = f"the loop with its checkpoints, without start-up; {CHAR_THREADS} threads"
    return [
        (statistics.median(losses), f"{spread(losses)}, by seed; {recipe}"),
        (statistics.median(rates), f"{spread(rates)}, by seed; {loop}; {recipe}"),
    ]


MEASURES = (
    Measure(ring_ratio, (("ring all-reduce by hand / native", "<= 1.25", "time / time"),)),
    Measure(
        ddp_ratio,
        (("data parallel overlapped by hand / native", "<= 1.05", "step time / step time"),),
    ),
    Measure(
        zero3_ratios,
        (
            ("zero-3 step by hand / native", "<= 1.3", "step time / step time"),
            ("zero-3 peak memory by hand / native", "<= 1.1", "bytes / bytes"),
        ),
    ),
    Measure(pipeline_ratio, (("1f1b by hand / native", "<= 1.05", "step time / step time"),)),
    Measure(bubble_gap, (("idle share of waiting stages - formula", "<= 0.03", "of the time"),)),
    Measure(
        tensor_ratio,
        (("tensor parallel by hand / native", "<= 1.05", "block time / block time"),),
    ),
    Measure(weak_scaling, (("weak scaling 1 to 2 ranks", ">= 0.9", "step time / step time"),)),
    Measure(flops_share, (("training flops / matmul flops", ">= 0.6", "FLOP/s / FLOP/s"),)),
    Measure(
        meters_cost,
        (
            ("samples cost / training", "<= 1.01", "time / time"),
            ("stopwatch cost / training", "<= 1.01", "step time / step time"),
        ),
    ),
    Measure(start_ranks, (("run_ranks 4 ranks warm", "< 0.5", "s"),)),
    Measure(verdicts, (("verdict median warm", "< 1", "s"),)),
    Measure(imports, (("import manyhands", "< 0.5", "s beyond torch's own"),)),
    Measure(
        char_recipe,
        (
            ("char recipe validation loss", "<= 2.41", "nats a character"),
            ("char recipe tokens/s", ">= 20000 on an idle machine", "tokens/s"),
        ),
    ),
)


# ---- the machine -----------------------------------------------------------------------------


def machine() -> dict[str, object]:
    """What these figures were taken on."""
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": num_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def own_cpu_s() -> float:
    """Seconds that this process and all that it started have spent on any core."""
    total_s = 0.0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # it may end just now
            times = process.cpu_times()
            total_s += times.user + times.system + times.children_user + times.children_system
    return total_s


def all_cpu_s() -> float:
    """Seconds that all programs of this machine have spent on any core."""
    times = psutil.cpu_times()._asdict()
    # Guests are counted under user already.
    return sum(
        times[kind] for kind in times if kind not in ("idle", "iowait", "guest", "guest_nice")
    )


def take(measure: Measure, config: Config) -> list[Row]:
    """Measure, and note where other programs had a part in it."""
    start_s = time.perf_counter()
    before_s = all_cpu_s() - own_cpu_s()
    measured = measure.function(config)
    others = (all_cpu_s() - own_cpu_s() - before_s) / (time.perf_counter() - start_s)
    busy = f"; BUSY: other programs used {others:.1f} cores" if others > BUSY_CORES else ""
    rows = []
    for (name, goal, unit), (value, note) in zip(measure.rows, measured, strict=True):
        if value is not None:
            value = round(value, 4)
            note = note + busy
        rows.append(Row(name, value, goal, unit, note))
    return rows


# ---- the table -------------------------------------------------------------------------------


def show(row: Row) -> None:
    """Print one row of the table, with its note below."""
    value = "-" if row.value is None else plain(row.value)
    print(f"{row.name:<42} {value:>8}   goal {row.goal}, {row.unit}")
    print(textwrap.indent(textwrap.fill(row.note, 92), " " * 4), flush=True)


def write(path: Path, about: dict[str, object], rows: Sequence[Row]) -> None:
    """Write the figures taken so far."""
    content = {"machine": about, "rows": [asdict(row) for row in rows]}
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as problem:
        raise BadInput(f"cannot write {path}: {problem.strerror}: choose another --out") from None


def main(config: Config) -> None:
    """Measure the rows asked for, print them, and write them down."""
    names = [name for measure in MEASURES for name, *_ in measure.rows]
    wanted = [name for name in names if config.only in name]
    if not wanted:
        raise BadInput(f"--only {config.only!r} is in no row's name: {', '.join(names)}")
    about = machine()
    rows = []
    path = Path(config.out)
    print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    write(path, about, rows)  # a path that cannot be written is known before the work
    for measure in MEASURES:
        if any(name in wanted for name, *_ in measure.rows):
            new = [row for row in take(measure, config) if row.name in wanted]
            for row in new:
                show(row)
            rows += new
            write(path, about, rows)


if __name__ == "__main__":
    command_line(main, Config)
