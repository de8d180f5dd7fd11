"""Measures data parallelism by hand: against PyTorch's DDP, and its weak scaling."""

import statistics

import torch
import torch.distributed as dist

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
from manyhands.instruments.timing import in_turn, slowest_rank
from manyhands.ranks import lab
from manyhands.ways.data_parallel import replica


def ddp_ratio() -> list[Measured]:
    """A step of BucketedDDP over a step of torch's, on the same two ranks."""
    words, values = [], []
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
    pairs = [(native, *shape.build()) for native in (False, True)]
    steps = [make_step(replica(model, native), x) for native, model, x in pairs]
    in_turn(steps, 4)  # torch packs its buckets anew after the first step
    return in_turn(steps, num_rounds)


def weak_scaling() -> list[Measured]:
    """A step of one rank alone over a step of two ranks, each with the batch of the one."""
    shape = Shape(6, 1024, 128, 16)
    times_s = lab.run_ranks(time_scaling, 2, shape, 15, timeout_s=400)
    alone, (_, both, silent) = times_s[0][0], slowest_rank(times_s)
    efficiency, machine = ratios(alone, both), ratios(alone, silent)
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
    alone, (model, tokens) = make_step(*shape.build()), shape.build()
    # Meanwhile the others sleep in the barrier of the next round.
    together = make_step(replica(model), tokens)
    works = [alone if dist.get_rank() == 0 else int, together]
    works.append(alone)  # all at once, but without a message
    in_turn(works, 2)
    return in_turn(works, num_rounds)


FILES = ("data_parallel/replicas.py", "models/transformer.py", "ways/data_parallel.py")
MEASURES = (
    Measure(
        ddp_ratio,
        (
            Row(
                "data parallelism by hand, overlapped / PyTorch's DDP, time of a step",
                "<= 1.05",
                "time / time",
            ),
        ),
        FILES,
    ),
    Measure(
        weak_scaling,
        (Row("weak scaling from 1 to 2 ranks", ">= 0.9", "time / time"),),
        FILES,
    ),
)
