"""What the notebook of lesson 06 measures.

    time_scaling   a step on 1, 2 and 4 ranks, in turn, so that a slow minute hits all of them
    train_nodes    a few steps on one or two nodes: one loop, four settings of it
    feed           a loop that waits for its data, and one that has workers to fetch it

A node is a rank of this machine here. Its link is the machine's own, or a slow one that is
modelled: instruments/timeline.py.
"""

import math
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from manyhands.data.corpus import Blocks, ShardedSampler
from manyhands.instruments.timeline import Span, Timeline
from manyhands.instruments.timing import in_turn, slowest_rank
from manyhands.models.transformer import Transformer
from manyhands.ranks.lab import run_ranks
from manyhands.ways.data_parallel import replica

# ---- scaling ---------------------------------------------------------------------------------


def time_scaling(
    sizes: tuple[int, ...] = (1, 2, 4), batch: int = 32, num_rounds: int = 5
) -> dict[str, dict[int, float]]:
    """Seconds of a step by kind of scaling and number of ranks: the quietest of several rounds.

    All settings are timed in turn on the same processes. Ranks that a setting does not need sleep
    in a barrier meanwhile.

    Args:
        batch: sequences of a step, over all ranks in strong scaling and per rank in weak scaling.
    """
    times_s = slowest_rank(run_ranks(_time_steps, max(sizes), sizes, batch, num_rounds))
    quietest = iter([min(rounds) for rounds in times_s])
    return {kind: {size: next(quietest) for size in sizes} for kind in ("strong", "weak")}


def _time_steps(sizes: tuple[int, ...], batch: int, num_rounds: int) -> list[list[float]]:
    groups = {size: dist.new_group(list(range(size))) for size in sizes}
    shares = [(size, batch // size) for size in sizes] + [(size, batch) for size in sizes]
    steps = [_step(groups[size], size, share) for size, share in shares]
    in_turn(steps, 2)  # torch packs its buckets anew after the first step
    return in_turn(steps, num_rounds)


def _step(group: dist.ProcessGroup, size: int, batch: int) -> Callable[[], object]:
    """One step of training on the first `size` ranks; nothing on the others."""
    if dist.get_rank() >= size:
        return int
    torch.manual_seed(0)
    model = Transformer(vocab_size=128, block=64, layers=2, heads=4, width=128)
    model = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(128, (batch, 65))

    def step() -> None:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


# ---- a second node that does not help --------------------------------------------------------


class Nodes(NamedTuple):
    """How a job trains: on how many nodes, with what batch and data on each, over which link."""

    num_nodes: int = 2
    batch: int = 4  # sequences that a node takes per step
    same_data: bool = False
    bytes_per_s: float = math.inf


SLOW_BYTES_PER_S = 10e6
JOBS = {
    "one node": Nodes(num_nodes=1),
    "two nodes": Nodes(),
    "A": Nodes(same_data=True),
    "B": Nodes(bytes_per_s=SLOW_BYTES_PER_S),
    "C": Nodes(batch=2),
}
CAUSES = {"A": "data", "B": "link", "C": "batch"}  # the notebook asks for them


class Trained(NamedTuple):
    """What the log of such a job shows."""

    losses: list[float]  # of each step, the mean over the nodes
    samples_per_step: int  # as the program counts them
    step_s: float  # of the slowest node, the median
    waiting: float  # share of the time in which the first node waits for messages


def train_nodes(job: Nodes, data: Blocks, vocab_size: int, num_steps: int = 30) -> Trained:
    """Train a small model for a few steps, and return what is seen from outside."""
    seen = run_ranks(_train, job.num_nodes, job, data, vocab_size, num_steps)
    slowest = [max(times) for times in zip(*(times for _, times, _ in seen), strict=True)]
    losses = [statistics.fmean(both) for both in zip(*(losses for losses, *_ in seen), strict=True)]
    times, waits = seen[0][1:]
    step_s = statistics.median(slowest)
    return Trained(losses, job.num_nodes * job.batch, step_s, sum(waits) / sum(times))


def small_model(vocab_size: int, block: int) -> Transformer:
    """What the nodes train: so small that a step takes milliseconds."""
    return Transformer(vocab_size, block, layers=2)


def _train(
    job: Nodes, data: Blocks, vocab_size: int, num_steps: int
) -> tuple[list[float], list[float], list[float]]:
    rank = 0 if job.same_data else dist.get_rank()
    size = 1 if job.same_data else job.num_nodes
    loader = DataLoader(data, job.batch, sampler=ShardedSampler(len(data), rank, size))
    line = Timeline()
    line.watch_all_reduces(job.bytes_per_s)
    torch.manual_seed(0)
    model = replica(small_model(vocab_size, data.block))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    losses: list[float] = []
    times: list[float] = []
    waits: list[float] = []
    for _, (inputs, targets) in zip(range(num_steps), loader, strict=False):
        start_s = time.perf_counter()
        line.spans.clear()
        loss = model(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times.append(time.perf_counter() - start_s)
        waits.append(sum(stop - start for _, role, start, stop in line.spans if role == "idle"))
    return losses, times[2:], waits[2:]  # without the first two steps, which warm up


# ---- a loop that waits for its data ----------------------------------------------------------


class SlowFiles(Dataset[Tensor]):
    """Samples that take a while to come, as small files from a busy file system do."""

    def __init__(self, num_samples: int, read_s: float, width: int) -> None:
        self.num_samples, self.read_s, self.width = num_samples, read_s, width

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.read_s)
        return torch.full((self.width,), index / self.num_samples)


def feed(num_workers: int, num_steps: int = 8, batch: int = 8, read_s: float = 3e-3) -> list[Span]:
    """On a rank: train on `SlowFiles` with so many workers; spans of data, compute and optimizer.

    The first batch, for which the workers start, is not among them.
    """
    torch.manual_seed(0)
    data = SlowFiles((num_steps + 1) * batch, read_s, width=512)
    loader = iter(DataLoader(data, batch, num_workers=num_workers))
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    next(loader)
    line = Timeline()
    for _ in range(num_steps):
        with line.span("data"):
            inputs = next(loader)
        with line.span("compute"):
            for _ in range(4):
                model(inputs).square().mean().backward()
        with line.span("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
    return line.spans
