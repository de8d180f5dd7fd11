"""Measures C/W here, and from which batch on messages are hidden; records steps; times plans."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.instruments.benchmark import Measure, Measured, Row, spread
from manyhands.instruments.timeline import Timeline
from manyhands.instruments.timing import in_turn, slowest_rank
from manyhands.mesh.grid import make_groups
from manyhands.mesh.ratio import step_s, tokens_to_hide
from manyhands.mesh.training import MeshTraining
from manyhands.models.bench import matmuls
from manyhands.models.transformer import Transformer, flops_per_token
from manyhands.planner.hardware import GPUS
from manyhands.planner.memory import Training, in_flight_on_ends, layer_activations
from manyhands.planner.plans import plans
from manyhands.planner.shape import MODELS
from manyhands.planner.step_time import block_forward
from manyhands.ranks.lab import run_ranks
from manyhands.simulator.events import Program
from manyhands.simulator.recorder import Recorder
from manyhands.ways.data_parallel import replica

SHAPE = {"vocab_size": 64, "block": 16, "layers": 3, "heads": 4, "width": 192}
SIZES = SHAPE["vocab_size"], SHAPE["block"], SHAPE["layers"], SHAPE["width"]
MESSAGE_BYTES = 8_000_000


class Ratio(NamedTuple):
    """Of a rank, while the other one does the same."""

    product_flops_per_s: float  # of a large matrix product
    step_flops_per_s: float  # of forward and backward of a small Transformer
    bytes_per_s: float  # that it sends, while as many come in

    @property
    def flops_per_byte(self) -> float:
        """C/W, with the C that a training reaches."""
        return self.step_flops_per_s / self.bytes_per_s


def measure_ratio(num_rounds: int = 5) -> Ratio:
    """C and W of two ranks of one thread each on this machine: medians of the slower rank."""
    product_s, forward_backward_s, exchange_s = map(
        statistics.median, slowest_rank(run_ranks(_time_ratio, 2, num_rounds))
    )
    flops = 16 * SHAPE["block"] * flops_per_token(*SIZES)
    return Ratio(2 * 512**3 / product_s, flops / forward_backward_s, MESSAGE_BYTES / exchange_s)


def _time_ratio(num_rounds: int) -> list[list[float]]:
    torch.manual_seed(0)
    product, _ = matmuls(512, 512, 512, 1)
    model, tokens = Transformer(**SHAPE), torch.randint(SHAPE["vocab_size"], (16, SHAPE["block"]))
    out, back = torch.zeros(2, MESSAGE_BYTES // 4)
    works = [product, partial(_pass, model, tokens), partial(_exchange, out, back)]
    in_turn(works, 2)
    return in_turn(works, num_rounds)


def _pass(model: nn.Module, tokens: Tensor) -> None:
    """Forward and backward, without an optimizer: what hides messages, and no more."""
    model.zero_grad()
    model(tokens, tokens).backward()


def _exchange(out: Tensor, back: Tensor) -> None:
    """Each of two ranks sends to the other at the same time, as in a ring."""
    other = 1 - dist.get_rank()
    ops = [dist.P2POp(dist.isend, out, other), dist.P2POp(dist.irecv, back, other)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


# ---- programs for the time machine -------------------------------------------------------------


def record_step(
    sizes: Mapping[str, int],
    shape: Mapping[str, int] = SHAPE,
    batch: int = 8,
    micro_batches: int = 4,
    count_flops: bool = True,
) -> list[Program]:
    """What each rank of a mesh does in a step of training by hand: forward, backward, AdamW.

    Args:
        sizes: of the mesh, such as {"pp": 2, "dp": 2, "tp": 2}; that many ranks are started.
        shape: of the Transformer, as Transformer(**shape) takes it.
        batch: sequences of each replica, cut into `micro_batches`.
    """
    args = dict(sizes), dict(shape), batch, micro_batches, count_flops
    return run_ranks(_record_step, math.prod(sizes.values()), *args, timeout_s=120)


def _record_step(
    sizes: dict[str, int], shape: dict[str, int], batch: int, micro_batches: int, count_flops: bool
) -> Program:
    torch.manual_seed(0)
    groups = make_groups(sizes)
    training = MeshTraining(Transformer(**shape), groups, micro_batches)
    optimizer = torch.optim.AdamW(training.parameters())
    tokens = torch.randint(shape["vocab_size"], (batch, shape["block"]))

    def step() -> None:
        training.step(tokens, tokens)
        training.finish()
        optimizer.step()
        training.zero_grad()

    step()  # makes the engine and its channels
    with Recorder(groups, count_flops) as recorder:
        step()
    return recorder.events


# ---- from which batch on messages are hidden ---------------------------------------------------


class Crossing(NamedTuple):
    """Steps of two ranks, by tokens per rank; medians of the slower rank."""

    tokens: list[int]
    quick_s: list[float]  # as quick as this machine sends
    slow_s: list[float]  # on the network that is slow on purpose
    predicted_s: list[float]  # on that network, by ratio.step_s
    flops_per_byte: float  # C of the step with the middle batch, over W of that network
    predicted_tokens: float  # by tokens_to_hide
    measured_tokens: float  # with which backward takes as long as messages were seen to take


def crossing(
    batches: Sequence[int] = (8, 12, 16, 24, 32, 48),
    num_rounds: int = 4,
    bucket_mb: float = 1.2,
) -> Crossing:
    """Time data parallelism with and without a slow network, in turn, for several batches.

    The network's speed is chosen on the ranks, so that the middle batch is predicted to be the one
    that hides its messages.

    Args:
        batches: sequences per rank, in ascending order.
    """
    by_rank = run_ranks(_time_crossing, 2, list(batches), num_rounds, bucket_mb)
    bytes_per_s, nbytes, num_buckets = by_rank[0][0]
    times_s = slowest_rank([times for _, times in by_rank])
    quick, slow = times_s[: len(batches)], times_s[len(batches) :]
    # A round's pair of steps is compared, since the machine may be slower in the next round.
    growths = [
        statistics.median(one / other for one, other in zip(*pair, strict=True))
        for pair in zip(slow, quick, strict=True)
    ]
    quick_s = [statistics.median(one) for one in quick]
    tokens, middle = [SHAPE["block"] * batch for batch in batches], len(batches) // 2
    ratio = flops_per_token(*SIZES) * tokens[middle] / quick_s[middle] / bytes_per_s
    messages_s = nbytes / bytes_per_s
    slow_s = [one * growth for one, growth in zip(quick_s, growths, strict=True)]
    return Crossing(
        tokens,
        quick_s,
        slow_s,
        [step_s(one / 3, 2 / 3 * one, messages_s, num_buckets) for one in quick_s],
        ratio,
        tokens_to_hide(ratio, 2, bytes_per_number=4),
        where_they_cross(tokens, quick_s, slow_s[:middle], num_buckets),
    )


def where_they_cross(
    tokens: Sequence[int], quick_s: Sequence[float], waiting_s: Sequence[float], num_buckets: int
) -> float:
    """The tokens with which backward, two thirds of a quick step, takes as long as the messages.

    How long these take is seen from the steps of the smallest batches, `waiting_s`: there messages
    take the whole time, but for forward and the backward of the first bucket.
    """
    before = 1 / 3 + 2 / 3 / num_buckets
    seen_s = [slow - before * quick for slow, quick in zip(waiting_s, quick_s, strict=False)]
    wanted_s = 3 / 2 * statistics.median(seen_s)
    pairs = list(zip(tokens, quick_s, strict=True))
    for (first, low_s), (second, high_s) in zip(pairs, pairs[1:], strict=False):
        if low_s <= wanted_s <= high_s:
            return first + (second - first) * (wanted_s - low_s) / (high_s - low_s)
    last, most_s = pairs[-1]  # outside of what was measured: in proportion
    return last * wanted_s / most_s


def _time_crossing(
    batches: list[int], num_rounds: int, bucket_mb: float
) -> tuple[tuple[float, int, int], list[list[float]]]:
    """On a rank: the network's bytes/s, a step's bytes and messages; and the times of each work."""
    torch.manual_seed(0)
    model = replica(Transformer(**SHAPE), bucket_mb=bucket_mb)
    nbytes = sum(param.nbytes for param in model.parameters())
    data = [torch.randint(SHAPE["vocab_size"], (batch, SHAPE["block"])) for batch in batches]
    quick = dist.all_reduce
    steps = [partial(_step, quick, model, tokens) for tokens in data]
    in_turn(steps, 1)
    middle = steps[len(steps) // 2]
    middle_s = torch.tensor(statistics.median(in_turn([middle], 5)[0]))
    dist.all_reduce(middle_s, op=dist.ReduceOp.MAX)
    bytes_per_s = nbytes / (2 / 3 * middle_s.item())  # backward is two thirds of the step
    Timeline().watch_all_reduces(bytes_per_s)
    steps += [partial(_step, dist.all_reduce, model, tokens) for tokens in data]
    dist.all_reduce = quick
    in_turn(steps, 1)
    return (bytes_per_s, nbytes, len(model.buckets)), in_turn(steps, num_rounds)


def _step(all_reduce: Callable, model: nn.Module, tokens: Tensor) -> None:
    """A pass with one of the two networks."""
    before, dist.all_reduce = dist.all_reduce, all_reduce
    try:
        _pass(model, tokens)
    finally:
        dist.all_reduce = before


def plan_large() -> list[Measured]:
    """Seconds in which Llama 3 405B is planned on 16,384 GPUs, with no cost kept from before."""
    large = Training(MODELS["llama3-405b"], GPUS["H100-80GB"], 16384, 2048)
    num_plans = len(plans(large))

    def plan_anew() -> None:
        for kept in (layer_activations, in_flight_on_ends, block_forward):
            kept.cache_clear()
        plans(large)

    (times_s,) = in_turn([plan_anew], 5)
    return [(statistics.median(times_s), f"{spread(times_s)}; {num_plans:,} layouts")]


MEASURES = (
    Measure(
        plan_large,
        (Row("planning a 405 B model on 16,384 GPUs, without imports", "< 2", "s"),),
        tuple(
            f"planner/{name}.py"
            for name in ("hardware", "memory", "messages", "plans", "shape", "step_time")
        ),
    ),
)
