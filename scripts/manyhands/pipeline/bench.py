"""Measures 1F1B by hand: against PyTorch's, and its idle share against the formula.

And what the notebook of lesson 12 measures and looks up:

    sweep_micro_batches   a step of one batch in more and more micro-batches, beside the prediction
    spans_of_work         when two ranks with real work computed what
    units_of_1f1b         a chart of 1F1B, in units of time
    slots_of_torch        PyTorch's table of its zero-bubble schedule, as spans
"""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

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
from manyhands.models.transformer import Transformer, token_loss
from manyhands.pipeline import bubble, engine, schedules, stages, wiring
from manyhands.ranks.lab import run_ranks
from manyhands.ways.pipeline import one_f_one_b
from manyhands.ways.ready import Setting

# ---- what the notebook measures --------------------------------------------------------------

SHAPE = {"vocab_size": 50, "block": 32, "layers": 4, "heads": 4, "width": 128}


class Sweep(NamedTuple):
    """Seconds by number of micro-batches; both are those of the slower rank."""

    work_s: dict[int, float]  # forwards and backwards of a whole batch on one stage, no messages
    step_s: dict[int, float]  # a step in the pipeline


def sweep_micro_batches(
    engine_type: type,
    make_schedule: Callable,
    batch: int = 32,
    counts: Sequence[int] = (1, 2, 4, 8, 16),
    num_rounds: int = 3,
) -> Sweep:
    """Time a step of `batch` sequences on two stages, cut into each number of micro-batches.

    All is timed in turn on the same two processes, and the quietest round counts.
    """
    by_rank = run_ranks(_time_sweep, 2, engine_type, make_schedule, batch, counts, num_rounds)
    quietest = [max(map(min, ranks)) for ranks in zip(*by_rank, strict=True)]
    work_s, step_s = quietest[: len(counts)], quietest[len(counts) :]
    return Sweep(dict(zip(counts, work_s, strict=True)), dict(zip(counts, step_s, strict=True)))


def _time_sweep(
    engine_type: type,
    make_schedule: Callable,
    batch: int,
    counts: Sequence[int],
    num_rounds: int,
) -> list[list[float]]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    own = stages.cut(stages.layers_of(Transformer(**SHAPE)), [0, 3, 6])[rank]
    tokens = torch.randint(SHAPE["vocab_size"], (batch, SHAPE["block"]))
    works = [partial(_without_messages, own, rank, tokens.chunk(m)) for m in counts]
    for m in counts:
        shape = (batch // m, SHAPE["block"], SHAPE["width"])
        runner = engine_type({rank: own}, make_schedule(2, m), token_loss, shape)
        works.append(partial(runner.step, tokens, tokens))
    in_turn(works, 1)
    return in_turn(works, num_rounds)


def _without_messages(stage: nn.Module, rank: int, parts: Sequence[Tensor]) -> None:
    """Forward and backward of each micro-batch on one of two stages, with made-up messages."""
    for tokens in parts:
        if rank == 0:
            out = stage(tokens)
            out.backward(torch.ones_like(out))
        else:
            x = torch.ones(*tokens.shape, SHAPE["width"], requires_grad=True)
            token_loss(stage(x), tokens).backward()


def spans_of_work(engine_type: type, make_schedule: Callable, m: int = 8) -> list[list]:
    """Spans of two ranks with real work, in the quickest of three steps."""
    by_rank = run_ranks(_spans_of_steps, 2, engine_type, make_schedule, m, 3)
    rounds = zip(*by_rank, strict=True)
    return list(min(rounds, key=lambda spans: spans[0][-1][2] - spans[0][0][1]))


def _spans_of_steps(
    engine_type: type, make_schedule: Callable, m: int, num_rounds: int
) -> list[list]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = stages.layers_of(Transformer(50, 64, 4, heads=4, width=256))
    own = {rank: stages.cut(layers, [0, 3, 6])[rank]}
    runner = engine_type(own, make_schedule(2, m), token_loss, (4, 64, 256))
    inputs, targets = torch.randint(50, (2, 4 * m, 64))
    rounds = []
    for _ in range(1 + num_rounds):
        dist.barrier()
        runner.step(inputs, targets)
        rounds.append(list(runner.spans))
    return rounds[1:]  # the first one warms up


def units_of_1f1b(p: int, m: int) -> list[list]:
    """When each rank does what in 1F1B, in units of a forward; a backward takes two."""
    return bubble.simulate(schedules.one_f_one_b(p, m))


def slots_of_torch(p: int, m: int) -> list[list]:
    """When each rank does what in PyTorch's zero-bubble schedule with one stage per rank.

    An action of its table takes one unit of time: F a forward, I the half of a backward that gives
    the gradient of the input, W the half that gives the gradients of the weights.
    """
    table = run_ranks(_table_of_torch, p, p, m)[0]
    return [
        [(action, at, at + 1) for at, action in enumerate(row) if action is not None]
        for row in table
    ]


def _table_of_torch(p: int, m: int) -> list[list]:
    rank = dist.get_rank()
    stage = {rank: nn.Linear(1, 1)}
    order = wiring.torch_pipeline(stage, p, m, F.mse_loss, "zero-bubble").pipeline_order
    kinds = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    return [
        [
            one and (kinds[one.computation_type.name], one.stage_index, one.microbatch_index)
            for one in order[row]
        ]
        for row in range(p)
    ]


# ---- what `make bench` measures ----------------------------------------------------------------


def pipeline_ratio() -> list[Measured]:
    """A training step of 1F1B over PyTorch's, on the same two ranks."""
    return by_hand_over_native(
        time_pipeline, [(Shape(8, 1024, 64, 16), 8), (Shape(4, 65, 64, 16), 4)], "micro-batches"
    )


def time_pipeline(shape: Shape, m: int, num_rounds: int) -> list[list[float]]:
    """On a rank: times of forwards and backwards in 1F1B, by hand and by torch."""
    steps = []
    for native in (False, True):
        model, tokens = shape.build()
        setting = Setting(shape.layers, shape.vocab, shape.block, shape.batch, m)
        ready = one_f_one_b(model, setting, native)
        call = partial(ready.forward_backward, tokens, tokens)
        steps.append(partial(fresh, ready.model, call))
    in_turn(steps, 3)
    return in_turn(steps, num_rounds)


def bubble_gap() -> list[Measured]:
    """How far the idle share of 1F1B over stages that only wait is from the formula."""
    gaps, words = [], []
    for p, m in ((4, 8), (8, 16)):
        by_rank = run_ranks(time_bubble, p, m, 7)
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
    return rounds[1:]  # the first one warms up


FILES = (
    "pipeline/engine.py",
    "pipeline/schedules.py",
    "pipeline/stages.py",
    "pipeline/wiring.py",
    "models/transformer.py",
    "ways/pipeline.py",
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
