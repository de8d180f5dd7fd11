"""Measures what it costs to watch a training."""

import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

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
from manyhands.instruments.meters import SAMPLE_EVERY_S, Sampler, Stopwatch
from manyhands.instruments.timing import in_turn, slowest_rank
from manyhands.ranks import lab

METER_TIMES = 10  # meters run that many times over, since once is less than the noise


def meters_cost() -> list[Measured]:
    """Training with samples of ranks and node over training without; and with stopwatches."""
    shape, num_rounds = Shape(4, 65, 64, 16), 30
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
    step, cpu = make_step(*shape.build()), torch.device("cpu")

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


MEASURES = (
    Measure(
        meters_cost,
        (
            Row(
                "training with its samples of rank and node / without (each ten times over, a "
                "tenth of it)",
                "<= 1.01",
                "time / time",
            ),
            Row("a step with its stopwatch / without, in the same way", "<= 1.01", "time / time"),
        ),
        ("instruments/meters.py",),
    ),
)
