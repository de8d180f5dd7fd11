"""The bubble of a pipeline: when each rank works and when it waits, from a schedule alone.

    rank 0   F0 F1 F2 F3 .. .. .. .. .. .. .. .. .. B0 B0 B1 B1 B2 B2 B3 B3
    rank 3   .. .. .. F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3 .. .. .. .. .. ..

GPipe with p = 4 ranks and m = 4 micro-batches; a backward takes two units of time. Each rank works
in 3 m of the 3 (m + p - 1) units, and waits in 3 (p - 1).

The same empty time is quoted in two ways. Of the ideal time, without a bubble, it is (p - 1)/m; of
the time that passes, (p - 1)/(m + p - 1). For p = 4 and m = 4 that is 75 % and 43 %: always say
which. With v stages per rank and m >= p, p - 1 becomes (p - 1)/v.

Price: simulating a schedule of A actions takes about A steps of Python; 64 ranks and 256
micro-batches take a quarter of a second with GPipe, half a second with 1F1B.
Source: Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2.
"""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from manyhands.pipeline.schedules import Action, Schedule

Span = tuple[Action, float, float]  # what, from when, to when


def needed(action: Action, num_stages: int) -> list[Action]:
    """What has to be done before `action`: its forward, and its neighbouring stage's action."""
    kind, stage, i = action
    if kind == "F":
        return [Action("F", stage - 1, i)] if stage > 0 else []
    behind = [Action("B", stage + 1, i)] if stage < num_stages - 1 else []
    return [Action("F", stage, i), *behind]


def unit_cost(action: Action) -> float:
    """A backward takes twice as long as a forward: it has two products where forward has one."""
    return 1 if action.kind == "F" else 2


def stuck(
    schedule: Schedule, spans: Sequence[Sequence[Span]], done: Mapping, num_stages: int
) -> str:
    """In words: the first rank that is not through, its next action, and what that waits for."""
    rank = next(r for r, actions in enumerate(schedule) if len(spans[r]) < len(actions))
    action = schedule[rank][len(spans[rank])]
    other = next(one for one in needed(action, num_stages) if one not in done)
    owner = next((r for r, actions in enumerate(schedule) if other in actions), None)
    where = "no rank has" if owner is None else f"rank {owner} has not done"
    words = [f"{kind}{i} of stage {stage}" for kind, stage, i in (action, other)]
    return f"rank {rank} waits at {words[0]} for {words[1]}, which {where}"


def simulate(schedule: Schedule, cost: Callable[[Action], float] = unit_cost) -> list[list[Span]]:
    """When each rank does what, if every action starts as soon as it can and messages take no time.

    An action starts when its rank is done with the action before it, and all that it needs
    (`needed`) is done. Time begins at 0.

    Args:
        schedule: for each rank the list of its actions, in order.
        cost: how long an action takes, in any unit.

    Returns:
        For each rank its actions in order, each as (action, start, stop).

    Raises:
        ValueError: a deadlock; the message names a rank, its action, and what that waits for.
    """
    num_stages = 1 + max(action.stage for actions in schedule for action in actions)
    spans: list[list[Span]] = [[] for _ in schedule]
    done: dict[Action, float] = {}  # and when
    while any(len(mine) < len(actions) for mine, actions in zip(spans, schedule, strict=True)):
        num_done = len(done)
        for mine, actions in zip(spans, schedule, strict=True):
            for action in actions[len(mine) :]:
                before = needed(action, num_stages)
                if any(other not in done for other in before):
                    break
                free = mine[-1][2] if mine else 0
                start = max([free, *(done[other] for other in before)])
                done[action] = start + cost(action)
                mine.append((action, start, done[action]))
        if len(done) == num_done:
            raise ValueError("deadlock: " + stuck(schedule, spans, done, num_stages))
    return spans


def idle_share(spans: Sequence[Sequence[Span]]) -> float:
    """The part of all ranks' time, from their first start to their last stop, in which they wait.

    Args:
        spans: for each rank its spans, each (action, start, stop), as in the charts.
    """
    every = [span for mine in spans for span in mine]
    total = max(stop for *_, stop in every) - min(start for _, start, _ in every)
    return 1 - sum(stop - start for _, start, stop in every) / (total * len(spans))


def bubble(p: int, m: int, v: int = 1) -> tuple[Fraction, Fraction]:
    """The bubble of GPipe, 1F1B, and interleaved where m >= p, with equal stages, by formula.

    Args:
        p: ranks.
        m: micro-batches.
        v: stages per rank.

    Returns:
        Idle time relative to the time of an ideal pipeline, and as a part of the time that passes;
        floats will do.
    """
    empty = Fraction(p - 1, v)
    return empty / m, empty / (m + empty)


def in_flight(actions: Sequence[Action]) -> int:
    """The most forwards of one rank that are done while their backward is still to come.

    Each keeps the activations of one micro-batch on one stage.
    """
    num, most = 0, 0
    for action in actions:
        num += 1 if action.kind == "F" else -1
        most = max(most, num)
    return most
