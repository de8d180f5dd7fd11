"""What the checks of several lessons share: calls without ranks, small models whose truth one
process computes, a job of two groups, and messages that are watched."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from numbers import Real

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.checks import ranks
from manyhands.checks.engine.card import Wrong
from manyhands.checks.engine.words import place, raised
from manyhands.ranks.failures import Failure, RankFailed, RanksHung

# ---- calls without ranks, and why they fail -------------------------------------------------

Reasons = dict[str, tuple[str, str]]  # words of an error -> what it smells of, what to try


def because(failure: Failure, reasons: Reasons, seen: str, *otherwise: str) -> Wrong:
    """The exercise's own reasons for a failure come before others."""
    said = f"{failure.error}: {failure.message}"
    return Wrong(seen, *next((why for words, why in reasons.items() if words in said), otherwise))


def alone(
    answer,
    cases: list[tuple],
    tell: Callable,
    reasons: Reasons,
    run: Callable = lambda answer, *case: answer(*case),
) -> Iterator:
    """What the answer gives for each case, without ranks; its first failure comes in its turn.

    Args:
        tell: makes the words for one call of a case.
        run: calls the answer with a case, and makes of its value what can be sent and compared.
    """
    try:
        (seen,) = ranks(_run_all, 1, answer, cases, run, join=False)
    except RankFailed as failed:
        if isinstance(failed, RanksHung):
            at = place(failed.failure, answer)
            seen = f"a call never ended{f': it is still{at}' if at else ''}"
            raise Wrong(seen, "a loop without an end", "see what ends it, and when") from None
        if failed.failure.error == "NotImplementedError":
            raise
        raise Wrong(*raised("a call", failed.failure, answer)) from None
    if seen is None:
        raise Wrong("a call left by sys.exit()", "", "let the function end, or return")
    for case, (found, changed) in zip(cases, seen, strict=False):
        if isinstance(found, Failure):
            no_ranks = "the arguments hold all that is asked for; no message is needed"
            reasons = {"process group has not been": (no_ranks, "use the arguments"), **reasons}
            # Of an error in a call of torch, its list of all that could be given is left out.
            found = replace(found, message=found.message.split(", but expected one of")[0])
            raise because(found, reasons, *raised(tell(*case), found, answer))
        if changed:
            what, *why = changed
            raise Wrong(f"after {tell(*case)} the {what} is another one", *why)
        yield found


def _run_all(answer, cases: list[tuple], run: Callable) -> list[tuple]:
    """Each value, or the failure that ends it; and what to say of an argument that was changed."""
    seen = []
    for case in cases:
        given = copy.deepcopy(case)
        try:
            value = run(answer, *given)
        except Exception as error:
            if isinstance(error, NotImplementedError) and "implemented for" not in str(error):
                raise  # the learner's own; torch raises it for kinds of numbers, too
            return [*seen, (Failure.of(error), "")]
        seen.append((value, _changed(given, case)))
    return seen


def _changed(given: tuple, case: tuple) -> tuple[str, str, str] | None:
    """The first argument that is not as it was, what that smells of, what to try."""
    names = getattr(case, "_fields", [""] * len(case))
    for now, before, name in zip(given, case, names, strict=True):
        if same(now, before):
            continue
        what = f"{type(now).__name__.lower()}{f' `{name}`' if name else ''}"
        smell = f"the caller's {what} was changed, and the caller still needs it"
        if not isinstance(now, Tensor):
            return what, smell, "build a new list, with a slice or a comprehension"
        if torch.equal(now, before):
            return what, f"requires_grad_() changed the caller's {what}", "on a copy: clone() first"
        return what, smell, "a = a - b makes a new tensor; a -= b changes the old one"
    return None


def same(one: object, other: object) -> bool:
    """Are these equal? Of tensors also: does either want a gradient?"""
    if isinstance(one, Tensor):
        return one.requires_grad == other.requires_grad and torch.equal(one, other)
    return one == other


def number(value: object, what: str) -> float:
    """A number of Python, NumPy or torch as a float."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        smell = "nothing is returned" if value is None else "that is no number"
        raise Wrong(f"{what} is {value!r}"[:200], smell, "return the number itself")
    return float(value)


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
