"""Measures how much of the machine's best matrix product a training step reaches."""

import os
import statistics
from collections.abc import Callable

import psutil
import torch

from manyhands.instruments.benchmark import Measure, Measured, Row, Shape, make_step, ratios, spread
from manyhands.instruments.timing import in_turn
from manyhands.models.transformer import flops_per_token


def flops_share() -> list[Measured]:
    """FLOP/s of a training step over those of the machine's best matrix product."""
    shape, threads = Shape(9, 4096, 128, 8), num_cores()
    torch.set_num_threads(threads)
    tokens, width = shape.batch * shape.block, 32 * shape.layers
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
    a, b, out = torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)
    repeats = max(1, round(flops / (2 * m * k * n)))

    def work() -> None:
        for _ in range(repeats):
            torch.mm(a, b, out=out)

    return work, repeats * 2 * m * k * n


def num_cores() -> int:
    """The cores that this process may use."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())
    return min(len(allowed), psutil.cpu_count(logical=False) or len(allowed))


MEASURES = (
    Measure(
        flops_share,
        (
            Row(
                "training FLOP/s / matrix product FLOP/s, 10 M parameters",
                ">= 0.6",
                "FLOP/s / FLOP/s",
            ),
        ),
        ("models/transformer.py",),
    ),
)
