"""What the checks of several lessons share: small models whose truth one process computes, a job of
two groups, and messages that are watched."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.checks import Wrong, ranks

# ---- a model with what goes wrong -----------------------------------------------------------


class Probe(nn.Module):
    """A frozen layer, a tied weight, float and integer buffers; built from torch's seed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(6, track_running_stats=True)
        self.norm.running_mean += torch.rand(6)
        self.norm.num_batches_tracked += torch.randint(100, (1,)).item()
        self.norm.eval()  # fixed statistics: a batch cut over ranks then computes what it did whole
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.frozen(self.embedding(tokens)))))  # (B, 11)

    def train(self, mode: bool = True) -> "Probe":
        super().train(mode)
        self.norm.eval()
        return self


def build(seed: int, kind: type[nn.Module] = Probe) -> nn.Module:
    """The model that torch's random numbers give from this seed on."""
    torch.manual_seed(seed)
    return kind()


def token_batch(seed: int, size: int = 12) -> Tensor:
    """Inputs and targets for a Probe. (2, B)"""
    return torch.randint(11, (2, size), generator=torch.Generator().manual_seed(seed))


def run_backward(model: nn.Module, batch: Tensor) -> None:
    """Forward, loss, and backward of a Probe; `batch` is (2, B)."""
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    """A copy of every parameter's gradient, by name; a tied parameter stands there once."""
    return {n: p.grad if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def close(a: dict, b: dict, factor: float = 1.0) -> bool:
    """Are all tensors of `a` those of `b`, times `factor`?"""

    def same(one: Tensor | None, other: Tensor | None) -> bool:
        if one is None or other is None:
            return one is other
        return torch.allclose(one.double(), other.double() * factor, atol=1e-5, rtol=1e-4)

    return all(same(a[name], value) for name, value in b.items())


# ---- a group of some ranks ------------------------------------------------------------------


def check_group(answer, in_pairs: Callable) -> None:
    """Four ranks in two groups, 0 1 and 2 3: each rank has to get what its own pair gives.

    Args:
        in_pairs: called on each rank as in_pairs(answer, group, float(rank), float(first)), `first`
            being the pair's first rank; returns the number that came out and the one wanted.
    """
    for rank, (value, wanted) in enumerate(ranks(_run_in_pairs, 4, answer, in_pairs)):
        if abs(value - wanted) > 1e-5:
            raise Wrong(
                f"with group = ranks {rank // 2 * 2} and {rank // 2 * 2 + 1}, rank {rank} gets "
                f"{value:g}, not {wanted:g}",
                "`group` is not passed on, so all ranks of the job take part",
                "give every dist call group=group; group_src=0 is a group's own first rank",
            )


def _run_in_pairs(answer, in_pairs: Callable) -> tuple[float, float]:
    pairs = dist.new_group([0, 1]), dist.new_group([2, 3])
    rank = dist.get_rank()
    return in_pairs(answer, pairs[rank // 2], float(rank), rank // 2 * 2.0)


# ---- messages that are watched --------------------------------------------------------------


class Watched:
    """A message on its way that writes down when somebody waits for it."""

    def __init__(self, work: dist.Work, log: list[str]) -> None:
        self.work, self.log = work, log

    def wait(self, *args: object) -> bool:
        """Wait, as torch's Work does."""
        self.log.append("waited")
        return self.work.wait(*args)

    def __getattr__(self, name: str) -> object:
        return getattr(self.work, name)


def waits() -> dict[int, dist.Work]:
    """The messages that this rank waits for, or asks about, from now on."""
    seen: dict[int, dist.Work] = {}  # they stay alive in here, so no two have one id

    def watched(original: Callable) -> Callable:
        def call(work, *args, **kwargs):
            seen[id(work)] = work
            return original(work, *args, **kwargs)

        return call

    for name in ("wait", "is_completed", "synchronize", "get_future"):
        setattr(dist.Work, name, watched(getattr(dist.Work, name)))
    return seen


def log_all_reduces(log: list[str], limit: int = 50) -> None:
    """Write down every all-reduce of this rank from now on, and every wait for one."""
    original = dist.all_reduce

    def all_reduce(*args, async_op=False, **kwargs):
        if sum("sent" in what for what in log) >= limit:
            raise RuntimeError(f"more than {limit} all-reduces in one backward")
        log.append("sent" if async_op else "sent and waited")
        work = original(*args, async_op=async_op, **kwargs)
        return Watched(work, log) if async_op else work

    dist.all_reduce = all_reduce
