"""12.1: where to cut a model into stages; each cut is right whose slowest stage is as fast."""

import itertools
import random
from collections.abc import Callable
from typing import NamedTuple

from manyhands.checks.engine.mistakes import Mistake, around, instead
from manyhands.checks.engine.spec import Spec
from manyhands.checks.engine.tables import mistakes
from manyhands.checks.engine.values import integer, listing, show
from manyhands.pipeline import stages

BOUNDS = "Return num_stages + 1 numbers: 0 first, then where each next stage begins, len(costs)."
EVERY_STAGE = "Each stage has at least one layer, so each bound is larger than the one before it."
SLOWEST = "The whole pipeline runs at the pace of its slowest stage, so compare whole cuts by that."


class Cut(NamedTuple):
    """One call of `partition`."""

    costs: list[float]
    num_stages: int


def cuts() -> list[Cut]:
    """One layer larger than all others, costs that each wrong way cuts badly, the extremes."""
    telling = [
        ([1.01, 3.36, 0.64, 2.82, 2.02, 0.57, 2.68, 0.48], 3),
        ([1.01, 4.55, 4.09, 0.99, 4.18, 4.91, 3.39, 1.95], 3),
        ([2.37, 0.38, 1.86, 3.23, 2.71, 0.6, 4.93, 4.01], 3),
        ([0.3, *[1.0] * 12, 2.43], 4),
    ]
    unit = random.uniform(0.5, 2)
    drawn = [Cut([round(cost * unit, 4) for cost in costs], p) for costs, p in telling]
    few = [random.randint(1, 9) for _ in range(5)]
    exact = [Cut([10, 1, 1], 3), Cut([1, 1, 10, 1], 3), Cut([3, 9, 5, 5, 7, 4], 4)]
    many = [Cut([random.uniform(0.3, 5) for _ in range(9)], 4), Cut([0.5] * 5 + [0.0] * 3, 4)]
    return [*exact, Cut(few, 1), Cut(few, 5), *drawn, *many, Cut([1.0, 2.0], 3)]


def stage_costs(costs: list[float], bounds: list[int]) -> list[float]:
    """The time of each stage."""
    return [sum(costs[start:stop]) for start, stop in itertools.pairwise(bounds)]


def are_bounds(found: list[int], case: Cut) -> bool:
    """Do these numbers cut all layers into that many stages, none of them empty?"""
    ends = found[:1] == [0] and found[-1:] == [len(case.costs)]
    return ends and found == sorted(set(found)) and len(found) == case.num_stages + 1


def as_good(found: list[int], wanted: list[int], case: Cut) -> bool:
    """Any bounds are right whose slowest stage is as fast."""
    if not are_bounds(found, case):
        return False
    slowest, least = (max(stage_costs(case.costs, bounds)) for bounds in (found, wanted))
    return slowest <= least * (1 + 1e-9)


def facts(found: list[int], wanted: list[int], case: Cut) -> str:
    """What can be seen of wrong bounds."""
    last = len(case.costs)
    if are_bounds(found, case):
        taken = stage_costs(case.costs, found)
        least = max(stage_costs(case.costs, wanted))
        return f"The stages take {show(taken, 4)}, and the slowest one can take {show(least, 4)}."
    if found[:1] != [0] or found[-1:] != [last]:
        return f"The first bound has to be 0 and the last one {last}, the number of layers."
    if len(found) != case.num_stages + 1:
        return f"{case.num_stages} stages have {case.num_stages + 1} bounds."
    return EVERY_STAGE


def equally(sizes: Callable) -> Mistake:
    """Stages of equally many layers, by one way to share the rest."""
    return Mistake(
        instead(lambda costs, n: [0, *itertools.accumulate(sizes(len(costs), n))]),
        "The stages have equally many layers, whatever these cost.",
        "Use `costs`: a head with a large vocabulary takes as long as several blocks.",
    )


def greedy(is_over: bool) -> Mistake:
    """A stage is closed when it holds its share, or before it would."""

    def fill(costs, num_stages):
        bounds = [0]
        mine = 0.0
        share = sum(costs) / num_stages
        for layer, cost in enumerate(costs):
            if not is_over and mine and mine + cost > share and len(bounds) < num_stages:
                bounds.append(layer)
                mine = 0.0
            mine += cost
            if is_over and mine >= share and len(bounds) < num_stages:
                bounds.append(layer + 1)
                mine = 0.0
        return [*bounds, len(costs)]

    words = "Each stage is filled up to its share of the total, and the last one gets what is left."
    return Mistake(instead(fill), words, SLOWEST)


def in_order_of_cost() -> Mistake:
    """The best cut of the sorted costs; of several that are as good, each one is."""

    def fits(found: list[int], case: Cut) -> bool:
        other = Cut(sorted(case.costs), case.num_stages)
        return are_bounds(found, case) and as_good(found, stages.partition(*other), other)

    return Mistake(
        around(lambda truth: lambda costs, n: truth(sorted(costs), n)),
        "These are the bounds for sorted costs, so they belong to other layers.",
        "Layers run in the order of the model: leave `costs` in that order.",
        fits,
    )


def by_aim(words: str, aim: Callable) -> Mistake:
    """The best cut by another aim; of several that are equally good, each one is."""

    def all_cuts(case: Cut) -> list[list[int]]:
        n = len(case.costs)
        return [[0, *c, n] for c in itertools.combinations(range(1, n), case.num_stages - 1)]

    def best(costs, num_stages):
        if len(costs) < num_stages:
            raise ValueError("too few layers")
        ways = all_cuts(Cut(costs, num_stages))
        return min(ways, key=lambda bounds: aim(stage_costs(costs, bounds)))

    def fits(found: list[int], case: Cut) -> bool:
        if not are_bounds(found, case):
            return False
        least = min(aim(stage_costs(case.costs, bounds)) for bounds in all_cuts(case))
        return aim(stage_costs(case.costs, found)) <= least + 1e-9 * abs(least)

    sentence = f"Of all cuts this is the one with {words}, and that is another aim."
    return Mistake(instead(best), sentence, SLOWEST, fits)


BEST = "return best[len(costs)][1]"
partition = Spec(
    todo="12.1",
    truth=stages.partition,
    cases=cuts,
    form=listing(integer, "a list of bounds, which are whole numbers"),
    same=as_good,
    facts=facts,
    advice={"": SLOWEST},
    refusal=("Each stage has a layer.", "Raise ValueError if len(costs) < num_stages."),
    hints=(
        "Where may the last stage begin? For each place, the layers before it have to be cut into "
        "one stage less: that is the same question, only smaller.",
        "Let best[k] hold the slowest stage and the bounds if the first k layers make up the "
        "stages so far. With one stage it is (sum(costs[:k]), [0, k]).",
        "To add a stage, try for each k all cuts before it: the slowest stage is then "
        "max(slowest of best[cut], sum(costs[cut:k])), and the smallest of these stays. For few "
        "layers you can also try all itertools.combinations(range(1, len(costs)), num_stages - 1). "
        "Refuse too few layers first.",
    ),
    mistakes=[
        equally(lambda n, p: [n // p + (i < n % p) for i in range(p)]),
        equally(lambda n, p: [n // p] * (p - 1) + [n // p + n % p]),
        greedy(True),
        greedy(False),
        by_aim("the smallest sum of squares", lambda parts: sum(cost * cost for cost in parts)),
        by_aim("the smallest difference between stages", lambda p: max(p) - min(p)),
        by_aim("the slowest fastest stage", lambda parts: -min(parts)),
        in_order_of_cost(),
        *mistakes(
            """
                after lambda bounds: [y - x for x, y in itertools.pairwise(bounds)] ::
                    These are the sizes of the stages, not their bounds. | itertools.accumulate adds
                    them up, and 0 comes first.
                {BEST} => return best[len(costs)][1][:-1] + [len(costs) - 1] :: The last bound is
                    the number of the last layer, and the last stage ends behind it. | {BOUNDS}
                {BEST} => return best[len(costs)][1][1:-1] ::
                    The first bound, 0, is missing, and so is the last.
                if len(costs) < num_stages => if False
                {BEST} => return best[len(costs)][1] if best else [0, *range(1, len(costs) + 1)] ::
                    There are fewer layers than stages, and each stage needs one. | Raise ValueError
                    if len(costs) < num_stages.
            """,
            globals(),
        ),
    ],
)
