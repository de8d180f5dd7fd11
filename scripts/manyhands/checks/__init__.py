"""Verdicts on a learner's function: done, not started, or not yet with the reason.

    check.place(place)  ->  run on real ranks beside the truth  ->  a card and one plain line

`engine/` judges. A file or folder for each lesson says what is asked, in which cases, and which
mistakes readers make.
"""

from collections.abc import Callable

from manyhands.checks.engine.words import place, raised
from manyhands.ranks.failures import RankFailed, RanksHung, is_echo, name_ranks, where
from manyhands.ranks.lab import run_ranks

LIMIT_S = 6.0


def score(
    what: str, predicted: float | None, formula: float, measured: float, unit: str = ""
) -> None:
    """Print the learner's prediction, what the formula says, and the measurement side by side."""

    def text(value: float) -> str:
        return f"{value:,.0f}" if float(value).is_integer() else f"{value:.3g}"

    try:
        yours = "no prediction" if predicted is None else f"you said {text(float(predicted))}"
    except (TypeError, ValueError):
        yours = f"you said {predicted!r}, which is no number"
    print(f"{what}: {yours}, expected {text(formula)}, measured {text(measured)} {unit}".rstrip())


# ---- what only the old checks use -----------------------------------------------------------

SAME_CALLS = "look for a collective inside an `if`, or a loop, that only some ranks enter"


def told(failed: RankFailed, answer: object = None) -> tuple[str, str, str]:
    """A failure on a rank as seen, smell, hint; the line named is one of the answer's own."""
    if isinstance(failed, RanksHung):
        return _told_of_a_hang(failed)
    if is_echo(failed.failure):
        at = place(failed.failure, answer)
        return (
            f"rank {failed.rank} waited{at} for a partner that had already finished",
            "not every rank makes the same calls",
            SAME_CALLS,
        )
    return raised(f"rank {failed.rank}", failed.failure, answer)


def _told_of_a_hang(failed: RanksHung) -> tuple[str, str, str]:
    """Ranks that stand at one line hang for other reasons than ranks that stand apart."""
    if len(failed.stacks) + len(failed.finished) == 1:
        lines = [f": it is still in{where(s[-1])[1:]}" for s in failed.stacks.values() if s]
        seen = f"a call never ended{''.join(lines)}"
        return seen, "a loop without an end", "see that its condition becomes false at some time"
    inside = {rank: where(stack[-1])[1:] for rank, stack in failed.stacks.items() if stack}
    lines = [
        f"rank {rank} {'computes' if rank in failed.computing else 'waits'} in{line}"
        for rank, line in inside.items()
    ]
    left = sorted({*failed.stacks, *failed.finished} - set(inside))
    if inside and left:  # also where it waits for the check's next case
        lines.append(f"{name_ranks(left)} {'has' if len(left) == 1 else 'have'} left the function")
    seen = f"the ranks never ended ({'; '.join(lines) or 'no line of yours is waiting'})"
    if any(rank in failed.computing for rank in inside):
        return (
            seen,
            "a loop without an end",
            "see that its condition becomes false at some time, on every rank",
        )
    if inside and left:
        return seen, "a hang: not every rank makes the same calls", SAME_CALLS
    if len({stack[-1][:2] for stack in failed.stacks.values() if stack}) <= 1:
        return (
            seen,
            "a hang, with every rank at the same line: a root (src) that is not the same on all "
            "ranks, or a message that nobody sends",
            "ask for that line what would have to happen for it to go on",
        )
    return seen, "a hang: not every rank makes the same calls in the same order", SAME_CALLS


def ranks(fn: Callable, world_size: int, *args: object, **options: object) -> list:
    """`run_ranks` with the limit of a check. A rank shows what the learner's code prints."""
    return run_ranks(fn, world_size, *args, **{"timeout_s": LIMIT_S, **options})
