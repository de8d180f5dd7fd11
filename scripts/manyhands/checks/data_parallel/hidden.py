"""How much of its messages a BucketedDDP hides behind backward, beside the course's own.

    a model whose layers only sleep    so that backward takes as long on a busy machine
    a link that is slow on purpose     so that every message takes as long as it should
    rounds of three steps in turn      without messages; the course's; the learner's

Of the time that the messages take on the link, the part that does not make the step longer is
hidden. This costs no points: what 5.10 and 5.11 ask for is judged by the order of what happens.
"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from manyhands.checks.engine.card import Verdict
from manyhands.checks.engine.exercise import show
from manyhands.data_parallel import replicas
from manyhands.instruments.timeline import Timeline
from manyhands.pipeline.stages import Waiting
from manyhands.ranks import lab
from manyhands.ranks.failures import RankFailed

NUM_LAYERS = 8
LAYER_S = 15e-3  # of backward, per layer
LAYER_SIZE = 50_000  # numbers
BUCKET_MB = 0.4  # two layers
BYTES_PER_S = 25e6
LATENCY_S = 2e-3  # a message of one bucket takes 18 ms, and backward of one 30 ms
CARRIED_S = NUM_LAYERS / 2 * (LATENCY_S + BUCKET_MB * 1e6 / BYTES_PER_S)
BEST = 1 - 2 / NUM_LAYERS  # the last bucket has nothing left to hide behind
LEAST = 0.5  # of the course's own: below it the machine is too busy to tell
WIDEST = 0.4  # between the quarters of the rounds
SLOW = 0.15  # less than the course's own hides


class Shares(NamedTuple):
    """Parts of the messages' time that are hidden, one for each round."""

    course: list[float]
    mine: list[float]


def sleepers() -> nn.Module:
    """A model whose backward takes NUM_LAYERS x LAYER_S."""
    return nn.Sequential(*[Waiting(0.0, LAYER_S, LAYER_SIZE) for _ in range(NUM_LAYERS)])


def measure(answer: type, num_rounds: int = 7) -> Shares:
    """On a rank: a few rounds of three steps in turn, after one to warm up."""
    torch.set_num_threads(1)
    models = [
        sleepers(),
        replicas.BucketedDDP(sleepers(), BUCKET_MB),
        answer(sleepers(), BUCKET_MB),
    ]
    Timeline().watch_all_reduces(BYTES_PER_S, LATENCY_S)
    shares = Shares([], [])
    for number in range(num_rounds + 1):
        alone_s, course_s, mine_s = (timed(model) for model in models)
        if number:
            shares.course.append(1 - (course_s - alone_s) / CARRIED_S)
            shares.mine.append(1 - (mine_s - alone_s) / CARRIED_S)
    return shares


def timed(model: Callable) -> float:
    """Seconds of a backward that all ranks begin together."""
    loss = model(torch.zeros(1))
    dist.barrier()
    start_s = time.perf_counter()
    loss.backward()
    return time.perf_counter() - start_s


def verdict(shares: Shares) -> Verdict:
    """Fast, slow, or not to be told; words for people."""
    name = "BucketedDDP, its overlap"
    low, _, high = statistics.quantiles(shares.course, n=4)
    course = statistics.median(shares.course)
    mine = statistics.median(shares.mine)
    behind = statistics.median(a - b for a, b in zip(*shares, strict=True))
    if course < LEAST or high - low > WIDEST:
        seen = (
            f"even the course's own hides {course:.0%} of the messages' time at this moment, with "
            f"{low:.0%} to {high:.0%} in half of the rounds; a quiet machine hides {BEST:.0%}"
        )
        why = "The machine is too busy to tell. This says nothing about your answer."
        return Verdict("5.11", name, "not judged", seen, why, "Run the cell again.")
    both = f"it hides {max(0, mine):.0%} of the messages' time, and the course's hides {course:.0%}"
    if behind <= SLOW:
        return Verdict("5.11", name, "done", both)
    why = "Right but slow costs no points."
    hint = "What does a hook do besides counting, copying and starting, and where does it wait?"
    return Verdict("5.11", name, "done", f"right, but {both}", why, hint)


def measure_overlap(answer: type) -> None:
    """Measure how much of its messages `answer` hides on a slow link, and say so.

    A notebook calls this once 5.10 and 5.11 are done: then the answer is known to be right.
    """
    try:
        shares = lab.run_ranks(measure, 2, answer, timeout_s=60, rules="")[0]
    except RankFailed as failed:
        told = " ".join(str(failed).split())
        show(Verdict("5.11", "BucketedDDP, its overlap", "not judged", told))
        return
    show(verdict(shares))
