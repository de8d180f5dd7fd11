"""Schedules of a pipeline: who computes which micro-batch when, as data; and what that costs.

    gpipe(2, 3)         rank 0   F0 F1 F2 .. .. B0 B1 B2       in time, with every box as long
                        rank 1   .. F0 F1 F2 B0 B1 B2 ..
    one_f_one_b(2, 3)   rank 0   F0 F1 .. B0 F2 B1 .. B2
                        rank 1   .. F0 B0 F1 B1 F2 B2 ..

A schedule is a list of actions for each of p ranks. It says an order, not a time: a rank does its
actions one by one, and waits before each one for what that needs from another rank. F3 is the
forward of micro-batch 3, B3 its backward. Stage s of p x v stages is on rank s % p.

Price: with m micro-batches and equal stages p - 1 time slots (of a forward and a backward) of
m + p - 1 are empty on every rank, the bubble; v stages per rank make them v times as short.
Activations are kept from F to B: of m micro-batches in GPipe, of at most p - rank in 1F1B.

Sources: Huang et al. 2018, "GPipe", https://arxiv.org/abs/1811.06965, section 2.3; Narayanan et
al. 2021, https://arxiv.org/abs/2104.04473, section 2.2 (1F1B, interleaved).
"""

from typing import NamedTuple


class Action(NamedTuple):
    """Forward ("F") or backward ("B") of one micro-batch on one stage."""

    kind: str
    stage: int
    microbatch: int


Schedule = list[list[Action]]  # of each rank, in order


def naive(p: int, m: int) -> Schedule:
    """One micro-batch at a time: it goes through all stages and back before the next one starts."""
    kinds = [(kind, i) for i in range(m) for kind in "FB"]
    return [[Action(kind, rank, i) for kind, i in kinds] for rank in range(p)]


def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards, both in the order of the micro-batches.

    Args:
        p: ranks, each with the stage of its own number.
        m: micro-batches.

    Returns:
        For each rank its 2m actions.
    """
    kinds = [(kind, i) for kind in "FB" for i in range(m)]
    return [[Action(kind, rank, i) for kind, i in kinds] for rank in range(p)]


def one_f_one_b(p: int, m: int) -> Schedule:
    """Each backward as soon as possible: p - 1 - rank forwards, then F and B in turns, the rest.

    Forwards and backwards are each in the order of the micro-batches. A rank begins with as many
    forwards as there are ranks after it, or with all m if m is smaller.

    Args:
        p: ranks, each with the stage of its own number.
        m: micro-batches.

    Returns:
        For each rank its 2m actions.
    """
    schedule = []
    for rank in range(p):
        forwards = [Action("F", rank, i) for i in range(m)]
        backwards = [Action("B", rank, i) for i in range(m)]
        warmup = min(p - 1 - rank, m)
        pairs = zip(forwards[warmup:], backwards, strict=False)
        turns = [action for pair in pairs for action in pair]
        schedule.append([*forwards[:warmup], *turns, *backwards[m - warmup :]])
    return schedule


def interleaved(p: int, m: int, v: int = 2) -> Schedule:
    """1F1B with v stages per rank: rank r has the stages r, r + p, r + 2p, ...

    The micro-batches go in max(1, m // p) groups of one size g, so g = p if p divides m: g
    forwards of a rank's first stage, g of its second, ..., then the next g micro-batches. Backwards
    go in the same order of micro-batches, and from the last stage to the first. As in 1F1B, a rank
    begins with some forwards, or all of them; then F and B in turns; then the rest. The last rank
    begins with those that come before the first forward of its last stage, and each rank with two
    more than the next rank: one for the way there and one for the way back.

    Raises:
        ValueError: the micro-batches cannot be put into max(1, m // p) groups of one size.
    """
    groups = max(1, m // p)
    if m % groups:
        raise ValueError(
            f"{m} micro-batches on {p} ranks cannot be put into {groups} equal groups: take a "
            f"multiple of {p}"
        )
    g, schedule = m // groups, []
    places = [(chunk, a * g + i) for a in range(groups) for chunk in range(v) for i in range(g)]
    for rank in range(p):
        forwards = [Action("F", chunk * p + rank, i) for chunk, i in places]
        backwards = [Action("B", (v - 1 - chunk) * p + rank, i) for chunk, i in places]
        warmup = min(2 * (p - 1 - rank) + (v - 1) * g, m * v)
        pairs = zip(forwards[warmup:], backwards, strict=False)
        turns = [action for pair in pairs for action in pair]
        schedule.append([*forwards[:warmup], *turns, *backwards[m * v - warmup :]])
    return schedule


def forwards(p: int, m: int, v: int = 1) -> Schedule:
    """Only the forwards, for a validation loss; rank r has the stages r, r + p, ..."""
    return [
        [Action("F", chunk * p + rank, i) for i in range(m) for chunk in range(v)]
        for rank in range(p)
    ]


def in_words(schedule: Schedule) -> str:
    """One line per rank; where a rank has several stages, a letter says which: F0a, F0b."""
    p = len(schedule)
    letter = "abcdefgh" if max(a.stage for actions in schedule for a in actions) >= p else [""] * p
    return "\n".join(
        f"rank {rank}: " + " ".join(f"{k}{i}{letter[stage // p]}" for k, stage, i in actions)
        for rank, actions in enumerate(schedule)
    )
