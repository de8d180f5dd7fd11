"""Train one model in every way, on the same batches, and measure each on the way.

    step 0   the optimizer makes its state
    step 1   memory: weights, gradients, optimizer state, and what is kept for backward
    step 2   messages, by collective
    later    time: the ways take turns, so that a slow minute hits each of them

All these steps are one training, and its losses have to be those of one process.

The parts are those of lesson 09, each at its own highest moment: gradients are whole after
backward, when little of what forward has kept is left. "weights" are those that a rank has between
steps, and "gathered" are those of other ranks that it also holds for a while. So the parts may add
up to more than the peak, the most bytes of tensors that lived at one moment; the peak also counts
what is in no part, such as DDP's buckets and the logits' gradient.
"""

import statistics
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from manyhands.instruments.ledger import Entry, Ledger
from manyhands.instruments.live import Live, parts_of
from manyhands.instruments.timing import in_turn, slowest_rank
from manyhands.ranks.runtime import together, wait_for
from manyhands.ways.ready import Make, Ready, Setting
from manyhands.ways.registry import ways_for

PARTS = ("weights", "gradients", "optimizer", "activations", "gathered")  # as lesson 09 stacks them
TOLERANCE = 1e-4  # of a loss, in nats
SHORT_TOLERANCE = 1e-2  # the same where products are rounded to TF32, in timed steps on GPUs
BUSY = 1.3  # a median over the quietest time that speaks of a busy machine
NUM_UNTIMED = 3  # steps, for state, memory and messages
# What a rank sends of the bytes that the ledger counts, in units of (n-1)/n of them.
RING = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1}
GLOO = RING | {"reduce_scatter": 2}  # gloo makes it from a whole all-reduce

Batches = list[tuple[Tensor, Tensor]]


def compare(
    setting: Setting,
    steps: int = 5,
    batches: Batches | None = None,
    ways: Mapping[str, Make] | None = None,
    device: torch.device | str = "cpu",
) -> dict:
    """Measure all `ways` on the ranks that are joined; every rank calls it.

    Args:
        steps: timed steps of each way, after three others.
        batches: global batches (inputs, targets), each (B, T), one for each of the `steps` + 3
            steps; random tokens without it.
        ways: by name; all that so many ranks can take, without it.

    Returns:
        On every rank {"ranks", "backend", "setting", "steps", "is_busy", "ways"}. "ways" holds for
        each name "parts" (bytes by part) and "peak" (bytes) of the rank that holds most, "peaks" of
        all ranks, "calls" and "sent" by collective (of the rank that sends most: bytes that a ring
        sends at least), "sent_by_gloo" (bytes), "median_s", "quietest_s", "losses" and "difference"
        (the largest to one process).

    Raises:
        BadInput: some way cannot train this model on so many ranks.
        AssertionError: a way's losses are not those of one process.
    """
    device = torch.device(device)
    setting.check(dist.get_world_size())
    ways = ways or ways_for(dist.get_world_size())
    batches = batches or random_batches(setting, NUM_UNTIMED + steps, device)
    with exact_products():
        runs = {name: OneWay(make, setting, batches, device) for name, make in ways.items()}
        memory = {name: run.memory() for name, run in runs.items()}
        entries = {name: run.messages() for name, run in runs.items()}
    times_s = in_turn([run.timed for run in runs.values()], steps)
    losses = {name: [float(loss) for loss in run.losses] for name, run in runs.items()}
    by_rank = together(lambda: (memory, entries, times_s, losses))
    slowest_s = slowest_rank([of_rank[2] for of_rank in by_rank])
    found = {
        name: summary(
            [of_rank[0][name] for of_rank in by_rank],
            [of_rank[1][name] for of_rank in by_rank],
            of_way,
            [of_rank[3][name] for of_rank in by_rank],
        )
        for name, of_way in zip(runs, slowest_s, strict=True)
    }
    check_losses(found, is_exact=device.type == "cpu")
    spreads = [one["median_s"] / one["quietest_s"] for one in found.values()]
    return {
        "ranks": dist.get_world_size(),
        "backend": dist.get_backend(),
        "setting": vars(setting),
        "steps": steps,
        "is_busy": statistics.median(spreads) > BUSY,
        "ways": found,
    }


class OneWay:
    """A way in training on this rank: each call takes the next batch, and notes its loss."""

    def __init__(
        self, make: Make, setting: Setting, batches: Batches, device: torch.device
    ) -> None:
        self.ready: Ready = make(setting.build(device), setting)
        self.device = device
        self.batches = iter(batches)
        self.losses: list[Tensor] = []
        self.step()

    def step(self) -> None:
        batch = next(self.batches)
        if self.ready.forward_backward is not None:
            self.losses.append(self.ready.step(*batch))

    def timed(self) -> None:
        self.step()
        wait_for(self.device)

    def memory(self) -> dict:
        """Bytes of each part at its highest, and of all tensors at the peak, in one step."""
        if self.ready.forward_backward is None:
            self.step()
            return {"parts": dict.fromkeys(PARTS, 0), "peak": 0}
        parts = parts_of(self.ready.model, self.ready.optimizer)
        kept = Kept(lambda: parts()["weights"])
        with (
            Live(parts, keep=True, device=self.device) as live,
            saved_tensors_hooks(kept.pack, kept.unpack),
        ):
            self.step()
            weights = live.now()["weights"]
        most = {name: max(now[name] for now in live.history) for name in PARTS[:3]}
        more = {"activations": kept.peak, "gathered": most["weights"] - weights}
        return {"parts": most | {"weights": weights} | more, "peak": live.total}

    def messages(self) -> list[Entry]:
        with Ledger() as ledger:
            self.step()
        return ledger.entries


class Kept:
    """Bytes that autograd keeps for backward, at most; each memory counts once, weights do not."""

    def __init__(self, weights: Callable[[], Iterable[Tensor]]) -> None:
        self.weights = weights
        self.holders: Counter[int] = Counter()  # of each storage
        self.nbytes: dict[int, int] = {}
        self.peak = 0

    def pack(self, tensor: Tensor) -> "Holder":
        storage = storage_of(tensor)
        holder = Holder(tensor.detach())  # the tensor itself could keep itself alive
        if storage._cdata not in {storage_of(weight)._cdata for weight in self.weights()}:
            self.holders[storage._cdata] += 1
            self.nbytes[storage._cdata] = storage.nbytes()
            weakref.finalize(holder, self.drop, storage._cdata)
            self.peak = max(self.peak, sum(self.nbytes.values()))
        return holder

    def unpack(self, holder: "Holder") -> Tensor:
        return holder.tensor

    def drop(self, key: int) -> None:
        self.holders[key] -= 1
        if not self.holders[key]:
            del self.holders[key], self.nbytes[key]


class Holder:
    """What autograd keeps in place of a tensor; it dies when backward is through."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """The memory of a tensor; of a DTensor that of this rank's part."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


def random_batches(setting: Setting, count: int, device: torch.device) -> Batches:
    """The same random tokens on every rank: `count` pairs of (B, T)."""
    draws = torch.Generator().manual_seed(setting.seed)
    shape = (count, 2, setting.batch, setting.block)
    tokens = torch.randint(setting.vocab, shape, generator=draws).to(device)
    return [(inputs, targets) for inputs, targets in tokens]


def sent(entries: Iterable[Entry], factors: Mapping[str, int]) -> Counter[str]:
    """Bytes that this rank sends, by operation."""
    total: Counter[str] = Counter()
    for entry in entries:
        n = len(entry.ranks)
        if entry.op == "send":
            total["send"] += entry.nbytes
        elif entry.op in factors:
            total[entry.op] += factors[entry.op] * (n - 1) * entry.nbytes // n
    return total


def summary(
    memory: list[dict], entries: list[list[Entry]], times_s: list[float], losses: list[list[float]]
) -> dict:
    """What all ranks found out about one way; see `compare`."""
    most = max(memory, key=lambda one: sum(one["parts"].values()))
    by_ring = [sent(of_rank, RING) for of_rank in entries]
    busiest = max(range(len(entries)), key=lambda rank: by_ring[rank].total())
    trained = [of_rank for of_rank in losses if of_rank]  # idle ranks have none
    return {
        "parts": most["parts"],
        "peak": most["peak"],
        "peaks": [one["peak"] for one in memory if one["peak"]],
        "calls": dict(Counter(entry.op for entry in entries[busiest])),
        "sent": dict(by_ring[busiest]),
        "sent_by_gloo": max(sent(of_rank, GLOO).total() for of_rank in entries),
        "median_s": statistics.median(times_s),
        "quietest_s": min(times_s),
        "losses": [statistics.fmean(of_step) for of_step in zip(*trained, strict=True)],
    }


def check_losses(found: dict[str, dict], is_exact: bool) -> None:
    """Note how far each way's losses are from the first way's, and refuse more than rounding."""
    wanted = next(iter(found.values()))["losses"]
    for name, one in found.items():
        gaps = [abs(a - b) for a, b in zip(one["losses"], wanted, strict=True)]
        one["difference"] = max(gaps)
        timed = TOLERANCE if is_exact else SHORT_TOLERANCE
        is_equal = max(gaps[:NUM_UNTIMED]) < TOLERANCE and max(gaps) < timed
        assert is_equal, f"{name}: losses {one['losses']}, one process has {wanted}"


@contextmanager
def exact_products() -> Iterator[None]:
    """Multiply matrices in full float32 in here, also on GPUs: losses can then be compared."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
