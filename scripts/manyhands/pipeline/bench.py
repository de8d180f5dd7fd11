"""Measures 1F1B by hand: against PyTorch's, and its idle share against the formula."""

import statistics
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from manyhands.instruments.benchmark import (
    Measure,
    Measured,
    Row,
    Shape,
    by_hand_over_native,
    fresh,
    spread,
)
from manyhands.instruments.timing import in_turn
from manyhands.pipeline import bubble, engine, schedules, stages, wiring
from manyhands.ranks import lab


def pipeline_ratio() -> list[Measured]:
    """A training step of 1F1B over PyTorch's, on the same two ranks."""
    return by_hand_over_native(
        time_pipeline, [(Shape(8, 1024, 64, 16), 8), (Shape(4, 65, 64, 16), 4)], "micro-batches"
    )


def time_pipeline(shape: Shape, m: int, num_rounds: int) -> list[list[float]]:
    """On a rank: times of forwards and backwards in 1F1B, by hand and by torch."""
    rank, p, steps = dist.get_rank(), dist.get_world_size(), []

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
            runner = engine.Pipeline(own, schedules.one_f_one_b(p, m), loss_fn, shapes)
            call = partial(runner.step, tokens, tokens)
        steps.append(partial(fresh, own[rank], call))
    in_turn(steps, 3)
    return in_turn(steps, num_rounds)


def bubble_gap() -> list[Measured]:
    """How far the idle share of 1F1B over stages that only wait is from the formula."""
    gaps, words = [], []
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
    rank, p = dist.get_rank(), dist.get_world_size()
    schedule, own = schedules.one_f_one_b(p, m), {rank: stages.Waiting(0.02, 0.04)}
    runner = engine.Pipeline(own, schedule, lambda out, _: out.mean(), (1, 4))
    rounds = []
    for _ in range(1 + num_rounds):
        dist.barrier()
        runner.step(torch.ones(m, 4), torch.ones(m, 4))
        rounds.append(list(runner.spans))
    return rounds[1:]  # the first one makes the connections


FILES = (
    "pipeline/engine.py",
    "pipeline/schedules.py",
    "pipeline/stages.py",
    "pipeline/wiring.py",
    "models/transformer.py",
)
MEASURES = (
    Measure(
        pipeline_ratio,
        (
            Row(
                "1F1B by hand / PyTorch's Schedule1F1B, time of a step, 2 ranks",
                "<= 1.05",
                "time / time",
            ),
        ),
        FILES,
    ),
    Measure(
        bubble_gap,
        (
            Row(
                "idle share of 1F1B over stages that only wait, from the formula, 4 and 8 ranks",
                "<= 0.03",
                "of the time",
            ),
        ),
        (*FILES, "pipeline/bubble.py"),
    ),
)
