"""Checks of lesson 12 without messages: 12.1 and 12.4 to 12.9. pipeline.py takes them in.

A schedule is data, so it is compared action by action. What common mistakes would give for the same
numbers of ranks and micro-batches is computed as well, and tells which of them was made; of others
the course's simulation says what they would cost. Times of a learner's `simulate` are judged by
themselves: does each action start when its rank is free and all that it needs is done?
"""

import itertools
import operator
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from manyhands.checks import Lesson, Wrong
from manyhands.checks.shared import Reasons, alone, number
from manyhands.pipeline import bubble as truth
from manyhands.pipeline import schedules, stages
from manyhands.pipeline.schedules import Action, Schedule

part = Lesson("pipeline")

Words = tuple[str, str, str]  # seen, smell, hint
Mistakes = Iterable[tuple[object, str, str]]  # what it would give, what it smells of, what to try


def _named(found: object, mistakes: Mistakes, *otherwise: str) -> tuple[str, ...]:
    return next((why for wrong, *why in mistakes if found == wrong), otherwise)


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-9 * max(1, abs(other))


def _numbers(values: Iterable[float]) -> str:
    return ", ".join(f"{float(value):.4g}" for value in values)


def _kind(value: object) -> str:
    """What a value is, for people."""
    if value is None:
        return "None"
    return "a generator" if hasattr(value, "__next__") else f"a {type(value).__name__}"


def _no_list(value: object, advice: str) -> tuple[str, str]:
    if value is None:
        return "nothing is returned", advice
    smell = "a generator can be read only once" if hasattr(value, "__next__") else ""
    return smell, advice


OTHER_ERROR = "the docstring asks for a ValueError, and callers catch only that"


class Ending(NamedTuple):
    """The error that ended a call which has to end with one."""

    error: str
    message: str


def _ended(error: Exception) -> Ending:
    if isinstance(error, NotImplementedError):
        raise error
    name = "ValueError" if isinstance(error, ValueError) else type(error).__name__
    return Ending(name, " ".join(str(error).split())[:200])


def _look_at_ending(found: object, call: str, smell: str, hint: str) -> None:
    if not isinstance(found, Ending):
        raise Wrong(f"{call} raises nothing", smell, hint)
    if found.error != "ValueError":
        message = f": {found.message}" if found.message else ""
        raise Wrong(f"{call} raises {found.error}{message}", OTHER_ERROR, hint)


# ---- 12.1 -----------------------------------------------------------------------------------


class Cut(NamedTuple):
    """The arguments of one call of `partition`."""

    costs: list[float]
    num_stages: int


BOUNDS = "return num_stages + 1 numbers: 0 first, len(costs) last"
EMPTY = ("a stage without layers", "each bound is at least one more than the bound before it")
PARTITION_REASONS: Reasons = {
    "recursion": ("the recursion does not end", "one stage, or no layer left, is its end"),
    "list index out of range": ("", "bounds go from 0 to len(costs), costs to len(costs) - 1"),
}


@part.exercise(
    "12.1",
    "Where may the last stage begin? For each place, the layers before it are cut into one stage "
    "less: the same question, only smaller.",
    "best[k]: the slowest stage and the bounds if the first k layers make up the stages so far. "
    "With one stage that is (sum(costs[:k]), [0, k]).",
    "One more stage: for each k try all cuts before it, max(slowest of best[cut], "
    "sum(costs[cut:k])), and keep the smallest. Or, for few layers: try all "
    "itertools.combinations(range(1, len(costs)), num_stages - 1). Refuse too few layers first.",
)
def partition(answer) -> None:
    """Draws on which each wrong way is slower; an expensive head; 1 stage; too few layers."""
    drawn = _revealing_cases()
    cases = [
        *drawn,
        Cut([random.randint(1, 9) for _ in range(5)], 5),
        Cut([random.randint(1, 9) for _ in range(4)], 1),
        Cut([1.0, 2.0], 3),
    ]
    seen = []
    for found in alone(answer, cases, _tell_cut, PARTITION_REASONS, _run_partition):
        seen.append(found)
        if len(seen) == len(drawn):
            _look_at_all(drawn, seen)
        if len(seen) > len(drawn):
            _look_at_bounds(found, *cases[len(seen) - 1])


def _look_at_all(drawn: Sequence[Cut], seen: Sequence) -> None:
    """Name the wrong way that all of these bounds were found in, or else what is wrong first."""
    pairs = list(zip(drawn, seen, strict=True))
    slower = [(found, *case) for case, found in pairs if _is_cut_too_slowly(found, *case)]
    for fits, *why in _wrong_ways():
        if slower and all(fits(found, *case) for case, found in pairs):
            raise Wrong(_told_slower(*slower[0]), *why)
    for case, found in pairs:
        _look_at_bounds(found, *case)


def _are_bounds(found: object, costs: list[float], num_stages: int) -> bool:
    if isinstance(found, str) or len(found) != num_stages + 1 or found != sorted(set(found)):
        return False
    return (found[0], found[-1]) == (0, len(costs))


def _run_partition(answer, costs: list[float], num_stages: int) -> object:
    try:
        value = answer(costs, num_stages)
    except Exception as error:
        if len(costs) < num_stages:
            return _ended(error)
        raise
    try:
        return [operator.index(bound) for bound in value]
    except TypeError:
        return repr(value)[:100]


def _tell_cut(costs: Sequence[float], num_stages: int) -> str:
    return f"partition([{_numbers(costs)}], {num_stages})"


def _look_at_bounds(found: object, costs: list[float], num_stages: int) -> None:
    num, said = len(costs), f"{_tell_cut(costs, num_stages)} gives {found}"
    if num < num_stages:
        hint = "raise ValueError if len(costs) < num_stages"
        call = said if isinstance(found, list | str) else _tell_cut(costs, num_stages)
        return _look_at_ending(found, call, "each stage has a layer", hint)
    if isinstance(found, str):
        smell = "the layers of each stage" if found.startswith("[[") else "no list of whole numbers"
        raise Wrong(said, "nothing is returned" if found == "None" else smell, BOUNDS)
    if not _are_bounds(found, costs, num_stages):
        raise Wrong(said, *_why_no_bounds(found, num, num_stages))
    if _is_slower(found, costs, num_stages):
        advice = "compare max(sum(costs[a:b]) for each stage) over all ways to cut"
        raise Wrong(_told_slower(found, costs, num_stages), "", advice)


def _is_cut_too_slowly(found: object, costs: list[float], num_stages: int) -> bool:
    return _are_bounds(found, costs, num_stages) and _is_slower(found, costs, num_stages)


def _is_slower(bounds: list[int], costs: list[float], num_stages: int) -> bool:
    return max(_stage_costs(costs, bounds)) > (1 + 1e-9) * _best(costs, num_stages)


def _best(costs: list[float], num_stages: int) -> float:
    return max(_stage_costs(costs, stages.partition(costs, num_stages)))


def _told_slower(bounds: list[int], costs: list[float], num_stages: int) -> str:
    taken, best = _numbers(_stage_costs(costs, bounds)), _best(costs, num_stages)
    case = f"{_tell_cut(costs, num_stages)} gives {bounds}"
    return f"{case}: stages of {taken}; the slowest can be {best:.4g}"


def _why_no_bounds(found: list[int], num: int, num_stages: int) -> tuple[str, str]:
    if len(found) == num_stages and sum(found) == num and found[0] > 0:
        return "the sizes of the stages", "bounds: where each begins; itertools.accumulate adds up"
    if found[:1] != [0]:
        return "the first bound, 0, is missing", BOUNDS
    if found[-1] != num:
        smell = "bounds count layers, and the last stage ends behind the last layer"
        return (f"the end, {num}, is missing", BOUNDS) if found[-1] != num - 1 else (smell, BOUNDS)
    if found != sorted(set(found)):
        return EMPTY if found == sorted(found) else ("the bounds do not grow", BOUNDS)
    return f"{len(found) - 1} stages, not {num_stages}", BOUNDS


def _stage_costs(costs: Sequence[float], bounds: Sequence[int]) -> list[float]:
    return [sum(costs[start:stop]) for start, stop in itertools.pairwise(bounds)]


def _wrong_ways() -> Iterable[tuple[Callable, str, str]]:
    """Ways to cut that students take: whether found bounds (found, costs, num_stages) are of this
    way, the smell, the hint. Of several cuts that are as good by an aim, each one is."""
    layers = ("stages of equally many layers", "it is their time that counts: use costs")
    for sizes in (_larger_first, _larger_last, _rest_last):
        yield (
            lambda f, c, n, sizes=sizes: f == [0, *itertools.accumulate(sizes(len(c), n))],
            *layers,
        )
    yield lambda f, c, n: f == [round(stage * len(c) / n) for stage in range(n + 1)], *layers
    greedy = (
        "a stage is filled until it holds its share, and nobody looks at what is left for the last",
        "compare whole cuts, by their slowest stage",
    )
    for is_over in (True, False):
        yield lambda f, c, n, is_over=is_over: f == _greedy(c, n, is_over), *greedy
    aims: dict[str, Callable] = {
        "the sum of squares": lambda parts: sum(cost * cost for cost in parts),
        "the difference between stages": lambda parts: max(parts) - min(parts),
        "the fastest stage": lambda parts: -min(parts),
    }
    for words, aim in aims.items():
        smell = f"another aim: {words}"
        hint = "only the slowest sets the pace"
        yield lambda f, c, n, aim=aim: _has_least(f, c, n, aim), smell, hint
    smell = "the costs were sorted"
    for turn in (False, True):
        yield (
            lambda f, c, n, turn=turn: (
                _are_bounds(f, c, n) and not _is_slower(f, sorted(c, reverse=turn), n)
            ),
            smell,
            "layers run in the order of the model, so a stage has neighbours",
        )


def _larger_first(num: int, num_stages: int) -> list[int]:
    return [num // num_stages + (stage < num % num_stages) for stage in range(num_stages)]


def _larger_last(num: int, num_stages: int) -> list[int]:
    return _larger_first(num, num_stages)[::-1]


def _rest_last(num: int, num_stages: int) -> list[int]:
    size = num // num_stages
    return [size] * (num_stages - 1) + [num - size * (num_stages - 1)]


def _has_least(found: list[int], costs: Sequence[float], num_stages: int, aim: Callable) -> bool:
    """No cut has a smaller `aim` of the stages' costs than `found`, but for rounding."""
    if not _are_bounds(found, costs, num_stages):
        return False
    cuts = itertools.combinations(range(1, len(costs)), num_stages - 1)
    least = min(aim(_stage_costs(costs, [0, *cut, len(costs)])) for cut in cuts)
    return aim(_stage_costs(costs, found)) <= least + 1e-9 * abs(least)


def _greedy(costs: Sequence[float], num_stages: int, is_over: bool) -> list[int]:
    """Close a stage when it is over its share, or before it would be."""
    bounds, mine = [0], 0.0
    for layer, cost in enumerate(costs):
        has_place = len(bounds) < num_stages
        if not is_over and has_place and mine and mine + cost > sum(costs) / num_stages:
            bounds, mine = [*bounds, layer], 0.0
        mine += cost
        if is_over and has_place and mine >= sum(costs) / num_stages:
            bounds, mine = [*bounds, layer + 1], 0.0
    return [*bounds, len(costs)]


def _revealing_cases() -> list[Cut]:
    """Costs of which each wrong way cuts some too slowly, and no two ways cut all alike; in a unit
    of their own each time. The first model has an expensive head."""
    shapes = [
        ([0.3, *[1.0] * 12, 2.43], 4),
        ([1.01, 3.36, 0.64, 2.82, 2.02, 0.57, 2.68, 0.48], 3),
        ([1.01, 4.55, 4.09, 0.99, 4.18, 4.91, 3.39, 1.95], 3),
        ([2.37, 0.38, 1.86, 3.23, 2.71, 0.6, 4.93, 4.01], 3),
    ]
    unit = random.uniform(0.5, 2)
    cases = [Cut([round(cost * unit, 4) for cost in costs], p) for costs, p in shapes]
    return [*cases, Cut([round(random.uniform(0.3, 5), 2) for _ in range(9)], 4)]


# ---- schedules: 12.4, 12.7, 12.9 ------------------------------------------------------------

TRIPLES = "Action(kind, stage, microbatch) for each action"


def _is_action(value: object) -> bool:
    is_triple = isinstance(value, tuple) and len(value) == 3 and value[0] in ("F", "B")
    return is_triple and all(isinstance(one, int) for one in value[1:])


def _listed(answer, *case: int) -> Schedule | Words:
    """A schedule as lists of actions; of what is none, what was seen and why."""
    value = answer(*case)
    if not isinstance(value, list | tuple):
        return _kind(value), *_no_list(value, "return a list with a list of actions for each rank")
    if value and all(_is_action(one) for one in value):
        seen = f"one list of {len(value)} actions"
        if len({stage % case[0] for _, stage, _ in value}) > 1:
            return seen, "the actions of all ranks in one row", "begin a new list for each rank"
        return seen, "these are the actions of one rank", "a list for each rank, all in one list"
    for rank, mine in enumerate(value):
        if not isinstance(mine, list | tuple):
            seen = f"for rank {rank} {_kind(mine)}: {mine!r}"[:80]
            return seen, *_no_list(mine, "for each rank a list of its actions")
        strange = [one for one in mine if not _is_action(one)]
        if strange:
            seen = f"for rank {rank} an action {strange[0]!r}"[:120]
            return seen, *_why_no_action(strange[0])
    return [[Action(*one) for one in mine] for mine in value]


def _listed_for_any_m(answer, *case: int) -> Schedule | Words:
    """A schedule as `_listed`; where numbers that are allowed were refused, that."""
    p, m = case[:2]
    try:
        return _listed(answer, *case)
    except (ValueError, AssertionError) as error:
        if m % p == 0 or (m > p and len(case) == 2) or "zip()" in str(error):
            raise
        why = "fewer micro-batches than ranks are no mistake", "at most m forwards; refuse nothing"
        if m > p:
            num = m // p
            why = (
                f"{m} make {num} groups of {m // num}: no mistake",
                "refuse m % max(1, m // p) > 0",
            )
        return f"no schedule, but {type(error).__name__}: {error}"[:200], *why


def _why_no_action(value: object) -> tuple[str, str]:
    if value is None or value == "..":
        smell = "a schedule says an order, not a time: waiting follows from what an action needs"
        return smell, "leave the empty time slots out"
    if isinstance(value, str):
        return "words for people; the engine wants kind, stage and micro-batch", TRIPLES
    if isinstance(value, list | tuple) and value and all(_is_action(one) for one in value):
        return "pairs, or lists, inside a rank's list", "take them apart: one flat list for a rank"
    if isinstance(value, list):
        return "a list cannot be a key of a dict, and the engine uses actions so", TRIPLES
    if isinstance(value, tuple) and len(value) == 2:
        return "the stage is missing", TRIPLES
    if isinstance(value, tuple) and len(value) == 3 and isinstance(value[0], str):
        return 'the kind is "F" or "B"', TRIPLES
    return "that is no action", TRIPLES


def _row(actions: Sequence[Action], p: int) -> str:
    """The actions of one rank; with a letter where it has several stages."""
    letters = "abcdefgh" if any(action.stage >= p for action in actions) else [""] * 8
    return " ".join(f"{kind}{i}{letters[stage // p % 8]}" for kind, stage, i in actions)


def _shown(action: Action) -> str:
    return f"{action.kind}{action.microbatch} of stage {action.stage}"


def _compare(case: str, found: Schedule | Words, wanted: Schedule, mistakes: Mistakes) -> None:
    """Refuse another schedule than the wanted one."""
    if isinstance(found, tuple):
        seen, *why = found
        raise Wrong(f"{case} gives {seen}", *why)
    if found == wanted:
        return
    why, p = _named(found, mistakes), len(wanted)
    if len(found) != p:
        plural = "s" * (len(found) != 1)
        smell, hint = why or ("", "one list for each rank")
        raise Wrong(f"{case} gives {len(found)} list{plural} for {p} ranks", smell, hint)
    rank = next(rank for rank in range(p) if found[rank] != wanted[rank])
    mine, right = found[rank], wanted[rank]
    shown, asked = _row(mine, p) or "nothing", _row(right, p)
    if shown == asked:  # without their stages
        pair = next(pair for pair in zip(mine, right, strict=True) if pair[0] != pair[1])
        shown, asked = map(_shown, pair)
    said = f"{case}: rank {rank} has {shown}, not {asked}"
    raise Wrong(said, *(why or _why_other(rank, found, wanted)))


def _why_other(rank: int, found: Schedule, wanted: Schedule) -> tuple[str, str]:
    """What is wrong with the actions of a rank that no known mistake gives."""
    mine, right = found[rank], wanted[rank]
    own, m = {action.stage for action in right}, 1 + max(action.microbatch for action in right)
    for action in mine:
        if action.stage not in own:
            hint = f"rank {rank} has stage{'s' * (len(own) > 1)} {_numbers(sorted(own))}"
            return f"{_shown(action)} is no work of rank {rank}", hint
        if not 0 <= action.microbatch < m:
            smell = f"there is no micro-batch {action.microbatch}: {m} are numbered from 0"
            return smell, "no rank begins with more forwards than there are: min(..., m)"
    twice = [action for action, times in Counter(mine).items() if times > 1]
    if twice:
        return f"{_shown(twice[0])} is done {mine.count(twice[0])} times", "every action once"
    missing = [action for action in right if action not in mine]
    whole = {action[:2] for action in right} - {action[:2] for action in mine}
    if whole and len(own) > 1:
        never = ", ".join(f"no {kind} of stage {stage}" for kind, stage in sorted(whole))
        return f"{never}; rank {rank} has {len(own)} stages", "range(v) over a rank's stages"
    if missing:
        smell = f"{_shown(missing[0])} is never done, one of {len(missing)} that are missing"
        return smell, "every stage has a forward and a backward of every micro-batch"
    for action in mine:
        forward = action._replace(kind="F")
        if mine.index(forward) > mine.index(action):
            return f"{_shown(action)} comes before its forward", "a backward needs what F has kept"
    for kind, stage in itertools.product("FB", sorted(own)):
        order = [action for action in mine if (action.kind, action.stage) == (kind, stage)]
        late = next((b for a, b in itertools.pairwise(order) if b.microbatch < a.microbatch), None)
        if late:
            hint = "forwards, and backwards, of a stage go in the order of the micro-batches"
            return f"{_shown(late)} comes too late; {_consequence(found, wanted)}", hint
    first, asked = (next(i for i, a in enumerate(row) if a.kind == "B") for row in (mine, right))
    if first != asked:
        seen = f"{first} forwards before the first backward, not {asked}"
        hint = "count the warm-up again; the first F of the turns comes on top"
        return f"{seen}; {_consequence(found, wanted)}", hint
    return f"another order; {_consequence(found, wanted)}", "compare rank by rank: in_words prints"


def _consequence(found: Schedule, wanted: Schedule) -> str:
    """How long a schedule takes, and what it keeps, against the wanted one."""
    try:
        took, asked = (_total(schedule) for schedule in (found, wanted))
    except ValueError as deadlock:
        return str(deadlock)
    kept, least = (max(map(truth.in_flight, s)) for s in (found, wanted))
    time = "as long" if took == asked else f"{took} units of time, not {asked}"
    return f"it takes {time}, and keeps {'as much' if kept == least else f'{kept}, not {least}'}"


def _total(schedule: Schedule) -> float:
    return max(stop for mine in truth.simulate(schedule) for *_, stop in mine)


def _made(p: int, row: Callable[[int], Iterable[tuple]]) -> Schedule:
    """A schedule from a function rank -> its actions."""
    return [[Action(*action) for action in row(rank)] for rank in range(p)]


def _check_schedules(answer, name: str, cases: list[tuple], mistakes: Callable) -> None:
    """Compare a learner's schedules with the course's, for each case."""

    def tell(*case: int) -> str:
        return f"{name}({', '.join(map(str, case))})"

    for case, found in zip(cases, alone(answer, cases, tell, {}, _listed_for_any_m), strict=True):
        _compare(tell(*case), found, getattr(schedules, name)(*case), mistakes(*case))


@part.exercise(
    "12.4",
    "All ranks do the same in the same order; only the stage is another one.",
    "For one rank: Action('F', rank, i) for i in range(m), and then the same with 'B'.",
    "A list of p such lists, one for each rank in range(p).",
)
def gpipe(answer) -> None:
    """More micro-batches than ranks, and fewer; one rank; one micro-batch."""
    p = random.randint(3, 5)
    cases = [(p, p + random.randint(1, 3)), (p + 1, p - 1), (1, 3), (3, 1)]
    _check_schedules(answer, "gpipe", cases, _not_gpipe)


def _not_gpipe(p: int, m: int) -> Mistakes:
    right, order = schedules.gpipe(p, m), range(m)
    yield (
        [[*mine[:m], *mine[: m - 1 : -1]] for mine in right],
        "backwards from the last micro-batch to the first: it would run and take as long, but both "
        "are asked for in the order of the micro-batches",
        "the backwards begin with B0, too",
    )
    yield (
        schedules.naive(p, m),
        "F and B in turns: that is `naive`, where one rank works at a time",
        "all forwards first: two loops, one after the other",
    )
    yield _made(p, lambda rank: right[0]), "stage 0 on every rank", "rank r has stage r"
    yield schedules.gpipe(m, p), "p and m have changed places", "p ranks, m micro-batches"
    yield from _fields(right, p)
    yield schedules.one_f_one_b(p, m), "that is 1F1B", "all forwards come before any backward"
    yield [mine[:m] for mine in right], "only the forwards", "then m backwards"
    yield (
        [*right[:-1], right[-1][m:]],
        "the last rank computes its forward, too: what is sent to it is only its input",
        "the same 2m actions on every rank",
    )
    yield (
        _made(p, lambda rank: [*(("F", rank, i) for i in order[::-1]), *right[rank][m:]]),
        "the forwards begin with the last micro-batch",
        "range(m) counts up",
    )


def _fields(right: Schedule, p: int) -> Mistakes:
    """Mistakes within the three fields of an action."""
    for moved, words in (((1, 0), "stages"), ((0, 1), "micro-batches")):
        yield (
            [[Action(k, s + moved[0], i + moved[1]) for k, s, i in mine] for mine in right],
            f"{words} are counted from 1",
            "range(n) begins with 0",
        )
    yield (
        [[Action(k, i, s) for k, s, i in mine] for mine in right],
        "stage and micro-batch have changed places",
        TRIPLES,
    )
    yield right[::-1], "the ranks are in the wrong order", "the list begins with rank 0"


@part.exercise(
    "12.7",
    "Write the forwards and the backwards of a rank as two lists first. How many forwards come "
    "before the first pair of F and B? The last rank begins with none, rank 0 with p - 1.",
    "warmup = min(p - 1 - rank, m). Then pairs: forwards[warmup] with backwards[0], "
    "forwards[warmup + 1] with backwards[1], ..., as long as there are forwards.",
    "zip(forwards[warmup:], backwards) gives the pairs; take each apart. What is left are "
    "backwards[m - warmup:], as many as the warm-up.",
)
def one_f_one_b(answer) -> None:
    """Many micro-batches, as many as ranks, fewer than ranks, one rank."""
    p = random.randint(3, 5)
    cases = [
        (p, p + random.randint(2, 4)),
        (p, p),
        (p + 1, random.randint(2, p - 1)),
        (1, 3),
        (4, 1),
    ]
    _check_schedules(answer, "one_f_one_b", cases, _not_one_f_one_b)


def _turns(stage: int, m: int, warmup: int, kinds: str = "FB", rest: bool = True) -> list[Action]:
    """Some forwards, then F and B in turns, then the rest."""
    lists = {kind: [Action(kind, stage, i) for i in range(m)] for kind in "FB"}
    begin, lists["F"] = lists["F"][:warmup], lists["F"][warmup:]
    pairs = zip(*(lists[kind] for kind in kinds), strict=False)
    turns = [action for pair in pairs for action in pair]
    return [*begin, *turns, *lists["B"][len(turns) // 2 :][: None if rest else 0]]


def _wrong_warmups(right: Schedule, p: int, m: int) -> Mistakes:
    fewer = _made(p, lambda rank: _turns(rank, m, max(0, p - 2 - rank)))
    yield (
        fewer,
        f"one forward too few at the beginning: {_consequence(fewer, right)}",
        "p - 1 - rank ranks are behind this one",
    )
    yield (
        _made(p, lambda rank: _turns(rank, m, p - rank)),
        "one forward too many at the beginning: it runs, but every rank keeps one micro-batch more",
        "p - 1 - rank ranks are behind this one; the first F of the turns follows",
    )
    for count in (p, p - 1, 1):
        yield (
            _made(p, lambda rank, count=count: _turns(rank, m, count)),
            f"every rank begins with {min(count, m)} forwards before the turns",
            "a rank needs as many as there are ranks behind it, the last one none",
        )
    for more in (0, 1):
        yield (
            _made(p, lambda rank, more=more: _turns(rank, m, rank + more)),
            "turned round: the last rank begins with the most forwards, so the first has nothing "
            "to do until the gradient of each is back",
            "count the ranks behind, not those before",
        )
    yield (
        _made(p, lambda rank: _turns(rank, m, 2 * (p - 1 - rank))),
        "twice as many forwards at the beginning as are needed",
        "2 (p - 1 - rank) is for the interleaved schedule",
    )


def _not_one_f_one_b(p: int, m: int) -> Mistakes:
    right = schedules.one_f_one_b(p, m)
    yield (
        schedules.gpipe(p, m),
        "that is GPipe: all m are kept",
        "F and B in turns after p-1-rank F",
    )
    yield schedules.naive(p, m), "that is `naive`", "a rank begins with p - 1 - rank forwards more"
    yield from _wrong_warmups(right, p, m)
    yield (
        _made(p, lambda rank: _turns(rank, m, p - 1 - rank, "BF")),
        "B before F in the turns: the last rank would begin with B0, before its forward: deadlock",
        "each turn is a forward, and then a backward",
    )
    yield (
        _made(p, lambda rank: _turns(rank, m, p - 1 - rank, rest=False)),
        "the end is missing: as many backwards as there were forwards at the beginning",
        "after the last forward the rest of the backwards is still to be done",
    )
    yield schedules.one_f_one_b(m, p), "p and m have changed places", "p ranks, m micro-batches"
    yield _made(p, lambda rank: right[0]), "all ranks do what rank 0 does", "range(p): use rank"
    yield from _fields(right, p)


@part.exercise(
    "12.9",
    "As in 12.7: a list of forwards and a list of backwards for each rank, a warm-up, turns, the "
    "rest. Only the lists are longer: v stages of m micro-batches.",
    "The pairs (chunk, i) are the same on all ranks: for each group, for each chunk in range(v), "
    "for each micro-batch of the group. The forward of a pair is on stage chunk * p + rank.",
    "The backward of a pair is on stage (v - 1 - chunk) * p + rank. groups = max(1, m // p), "
    "g = m // groups, warmup = min(2 * (p - 1 - rank) + (v - 1) * g, m * v).",
)
def interleaved(answer) -> None:
    """2 and 3 stages a rank; fewer micro-batches than ranks; groups larger than p; a refusal."""
    p = random.randint(2, 4)
    cases = [(p, 2 * p, 2), (p + 1, 2 * p + 2, 3), (4, random.randint(2, 3), 2), (4, 10, 2)]
    cases += [(3, 6), (1, 3, 2), (p, 2 * p + 1, 2)]

    def tell(*case: int) -> str:
        return f"interleaved({', '.join(map(str, case))})"

    for case, found in zip(cases, alone(answer, cases, tell, {}, _run_interleaved), strict=True):
        if _cannot_group(*case):
            smell = f"{case[1]} micro-batches cannot be put into {case[1] // p} equal groups"
            _look_at_ending(found, tell(*case), smell, "raise ValueError, with m and p")
            continue
        _compare(tell(*case), found, schedules.interleaved(*case), _not_interleaved(*case))


def _cannot_group(p: int, m: int, v: int = 2) -> bool:
    return m % max(1, m // p) > 0


def _run_interleaved(answer, *case: int) -> object:
    if not _cannot_group(*case):
        return _listed_for_any_m(answer, *case)
    try:
        return _listed(answer, *case)
    except Exception as error:
        return _ended(error)


class Weave(NamedTuple):
    """An interleaved schedule with its parts done in other ways; as it stands the right one."""

    p: int
    m: int
    v: int
    size: int  # micro-batches in a group
    warmup: Callable[[int], int]  # rank -> forwards at the beginning
    stage: Callable[[int, int], int]  # rank, chunk -> stage
    places: Callable[[list], list] = list  # another order of (group, chunk, micro-batch)
    is_reversed: bool = True

    def schedule(self) -> Schedule:
        p, m, v = self[:3]
        every = [
            (first, chunk, i)
            for first in range(0, m, self.size)
            for chunk in range(v)
            for i in range(first, min(first + self.size, m))
        ]
        places = [place[1:] for place in self.places(every)]
        backs = [(v - 1 - chunk if self.is_reversed else chunk, i) for chunk, i in places]
        result = []
        for rank in range(p):
            fs, bs = (
                [Action(kind, self.stage(rank, chunk), i) for chunk, i in order]
                for kind, order in (("F", places), ("B", backs))
            )
            start = max(0, min(self.warmup(rank), m * v))
            turns = [a for pair in zip(fs[start:], bs, strict=False) for a in pair]
            result.append([*fs[:start], *turns, *bs[m * v - start :]])
        return result


def _not_interleaved(p: int, m: int, v: int = 2) -> Mistakes:
    g, right = m // max(1, m // p), schedules.interleaved(p, m, v)
    weave = Weave(
        p,
        m,
        v,
        g,
        lambda rank: 2 * (p - 1 - rank) + (v - 1) * g,
        lambda rank, chunk: chunk * p + rank,
    )
    for other, words, advice in _wrong_weaves(weave):
        wrong = other.schedule()
        yield wrong, f"{words}; {_consequence(wrong, right)}", advice
    yield schedules.one_f_one_b(p, m), "that is 1F1B, with one stage a rank", "v stages a rank"
    yield from _fields(right, p)


def _wrong_weaves(weave: Weave) -> Iterable[tuple[Weave, str, str]]:
    p, m, v, g = weave[:4]

    def grouped(size: int) -> Weave:
        return weave._replace(size=size, warmup=lambda rank: 2 * (p - 1 - rank) + (v - 1) * size)

    stage = weave._replace(stage=lambda rank, chunk: rank * v + chunk)
    yield stage, "neighbouring stages on one rank", "rank r has r, r + p, r + 2p, ..."
    for other in (grouped(m), weave._replace(size=m)):
        words = "no groups: all micro-batches of a stage first"
        yield other, words, "g micro-batches of each stage, then the next g"
    yield (
        weave._replace(is_reversed=False),
        "backwards from the first stage to the last",
        "backward chunk c is stage (v - 1 - c) * p + rank",
    )
    yield (
        weave._replace(places=lambda places: sorted(places, key=lambda place: place[2])),
        "each micro-batch through all stages of the rank at once",
        "g micro-batches of the first stage, then the same g of the second",
    )
    for other in (grouped(p), weave._replace(size=p)):
        yield other, f"groups of {p}, not of {g}", "g = m // max(1, m // p)"
    warmups: dict[str, Callable] = {
        "p - 1 - rank": lambda rank: p - 1 - rank,
        "2 (p - 1 - rank)": lambda rank: 2 * (p - 1 - rank),
        "p - 1 - rank + (v - 1) g": lambda rank: p - 1 - rank + (v - 1) * g,
        "2 (p - 1 - rank) + (v - 1) p": lambda rank: 2 * (p - 1 - rank) + (v - 1) * p,
        "one too many": lambda rank: 2 * (p - 1 - rank) + (v - 1) * g + 1,
    }
    hint = "2 * (p - 1 - rank) + (v - 1) * g, and not more than there are"
    for words, warmup in warmups.items():
        yield weave._replace(warmup=warmup), f"warm-up: {words}", hint


# ---- 12.5 -----------------------------------------------------------------------------------


class Cost(NamedTuple):
    """How long each action takes, from a table; it can be compared and sent to another process."""

    table: dict[Action, int]

    def __call__(self, action: Action) -> int:
        return self.table[action]


class Timed(NamedTuple):
    """The arguments of one call of `simulate`; without a cost it takes its own."""

    schedule: Schedule
    cost: Cost | None
    name: str  # of the schedule, for people


ARRIVES = "deadlock: no rank can go on"
SIMULATE_REASONS: Reasons = {
    "'str' object has no attribute": ("`cost` takes a whole action", "cost(action)"),
    "KeyError: 'F'": ("`cost` takes a whole action", "cost(action)"),
    "KeyError: Action": (
        "an action is looked up before it is done, since ranks do not run in the order of lists",
        "go on with a rank only while all that `needed` lists is done, then look at the next rank",
    ),
    "missing 1 required positional argument: 'cost'": ("", "cost=unit_cost in the signature"),
}


@part.exercise(
    "12.5",
    "Keep a dict: action -> when it is done. An action starts at the largest of: when its rank is "
    "done with the action before, and when each of needed(action, num_stages) is done.",
    "Go round the ranks again and again. On each go on with its next actions while all that they "
    "need is in the dict.",
    "A round in which no rank could go on, although actions are left, is a deadlock: raise "
    "ValueError with a rank, its next action, and which of `needed` is not done.",
)
def simulate(answer) -> None:
    """Random costs, several stages a rank, only forwards, the default cost, two deadlocks."""
    p, m = random.randint(3, 4), random.randint(3, 5)
    drawn = [
        ("gpipe", schedules.gpipe(p, m)),
        ("one_f_one_b", schedules.one_f_one_b(p, m + 1)),
        ("interleaved", schedules.interleaved(2, 4, 2)),
        ("forwards", schedules.forwards(3, 2)),
    ]
    cases = [Timed(schedule, _draw_costs(schedule), name) for name, schedule in drawn]
    cases.append(Timed(schedules.gpipe(2, m), None, "gpipe"))
    seen = alone(answer, cases, _tell_timed, SIMULATE_REASONS, _run_simulate)
    for case, found in zip(cases, seen, strict=True):
        _look_at_spans(found, *case)
    _look_at_deadlocks(answer, m)


def _draw_costs(schedule: Schedule) -> Cost:
    return Cost({action: random.randint(2, 9) for mine in schedule for action in mine})


def _tell_timed(schedule: Schedule, cost: Cost | None, name: str) -> str:
    m = 1 + max(action.microbatch for mine in schedule for action in mine)
    own = "" if cost is None else ", cost from a table"
    return f"simulate({name} of {len(schedule)} ranks, {m} micro-batches{own})"


def _run_simulate(answer, schedule: Schedule, cost: Cost | None, name: str) -> list | Words:
    """For each rank its spans as plain numbers; of what is none, what was seen and why."""
    value = answer(schedule) if cost is None else answer(schedule, cost)
    advice = "return for each rank a list of (action, start, stop)"
    if not isinstance(value, list | tuple):
        return _kind(value), *_no_list(value, advice)
    if len(value) != len(schedule):
        flat = len(value) == sum(map(len, schedule))
        return f"{len(value)} entries", "one list of all ranks" if flat else "", advice
    spans = []
    for rank, mine in enumerate(value):
        if not isinstance(mine, list | tuple):
            return f"for rank {rank} {_kind(mine)}", "", advice
        for span in mine:
            if not (isinstance(span, list | tuple) and len(span) == 3 and _is_action(span[0])):
                return f"for rank {rank} a span {span!r}"[:120], "", advice
        spans.append([(a, number(b, "a start"), number(e, "a stop")) for a, b, e in mine])
    return spans


def _look_at_spans(found: list | Words, schedule: Schedule, cost: Cost | None, name: str) -> None:
    case = _tell_timed(schedule, cost, name)
    if isinstance(found, tuple):
        seen, *why = found
        raise Wrong(f"{case} gives {seen}", *why)
    for rank, (mine, actions) in enumerate(zip(found, schedule, strict=True)):
        if [span[0] for span in mine] != actions:
            seen = f"{case}: rank {rank} did {_row([Action(*s[0]) for s in mine], len(schedule))}"
            same = sorted(span[0] for span in mine) == sorted(actions)
            smell = "the order of the schedule is another" if same else f"of {_row(actions, 99)}"
            raise Wrong(seen, smell, "every action of a rank once, in the order of its list")
    stops = {span[0]: span[2] for mine in found for span in mine}
    starts = {span[0]: span[1] for mine in found for span in mine}
    faults: list[tuple] = []
    for rank, actions in enumerate(schedule):
        before = None
        for action in actions:
            start, stop = starts[action], stops[action]
            fault = _fault(action, before, start, stop, stops, schedule, cost or truth.unit_cost)
            faults += [(start, rank, *fault)] if fault else []
            before = action
    if faults:
        _, rank, seen, smell, hint = min(faults)
        if smell == LATE:
            smell, hint = _why_late(found, schedule)
        elif _waits_for_starts(schedule, starts, stops):
            smell = "it waits until what it needs starts, not until it stops"
            hint = "keep for each action when it is done: start + cost(action)"
        raise Wrong(f"{case}: on rank {rank} {seen}", smell, hint)


def _waits_for_starts(schedule: Schedule, starts: dict, stops: dict) -> bool:
    """Does every action start as soon as its rank is free and what it needs has started?"""
    num_stages = 1 + max(action.stage for action in stops)
    for actions in schedule:
        for before, action in itertools.pairwise([None, *actions]):
            begun = (starts[other] for other in truth.needed(action, num_stages))
            if not _near(starts[action], max([stops.get(before, 0), *begun])):
                return False
    return True


LATE = "too late"


def _fault(
    action: Action,
    before: Action | None,
    start: float,
    stop: float,
    stops: dict[Action, float],
    schedule: Schedule,
    cost: Callable,
) -> Words | None:
    """What is wrong with the time of one action, by the times of the others."""
    num_stages = 1 + max(action.stage for mine in schedule for action in mine)
    free, said = stops.get(before, 0), f"{_shown(action)} starts at {start:g}"
    if not _near(stop - start, cost(action)):
        if _near(stop, cost(action)):
            return f"{said} and stops at {stop:g}", "the third number is a duration", "start + cost"
        seen = f"{said} and stops at {stop:g}, but it takes {cost(action)}"
        return seen, "`cost` says how long an action takes", "stop = start + cost(action)"
    if start < free - 1e-9:
        seen = f"{said}, but until {free:g} its rank does {_shown(before)}"
        return seen, "a rank does one action at a time", "start at the rank's last stop, or later"
    for other in truth.needed(action, num_stages):
        if start < stops[other] - 1e-9:
            seen = f"{said}, but {_shown(other)} ends only at {stops[other]:g}"
            smell = "it does not wait for what it needs" + (
                " from another stage" if other.stage != action.stage else ""
            )
            if action.stage < other.stage and action.stage >= len(schedule) - 1:
                smell, last = "the number of ranks was taken for the number of stages", num_stages
                return seen, smell, f"num_stages = 1 + the largest stage, here {last}"
            return seen, smell, "start = max(...) over all of needed(action, num_stages), too"
    earliest = max([free, *(stops[other] for other in truth.needed(action, num_stages))])
    if start > earliest + 1e-9:
        return f"{said}, but it could at {earliest:g}", LATE, ""
    return None


def _why_late(found: list, schedule: Schedule) -> tuple[str, str]:
    """Ranks that wait for more than they need."""
    spans = sorted(span[1:] for mine in found for span in mine)
    if all(_near(max(b, e), b) for (_, e), (b, _) in itertools.pairwise(spans)):
        return (
            "only one rank works at a time: the start is the last stop of all ranks",
            "a rank is free when its own last action is done",
        )
    starts = {span[1] for mine in found for span in mine}
    if len(starts) <= max(map(len, schedule)) * 2 and min(spans)[0] == 0:
        return (
            "all ranks go on together, in steps as long as the slowest action of each",
            "there is no common clock: an action starts when its own rank and its input are ready",
        )
    if min(spans)[0] > 0:
        return "time begins at 0", "the first action of rank 0 starts at 0"
    return "it waits for something that it does not need", "only its rank, and needed(action, ...)"


def _look_at_deadlocks(answer, m: int) -> None:
    """A backward first on the last rank; a forward that no rank has. Both have to be refused."""
    turned, missing = schedules.gpipe(3, m), schedules.gpipe(2, m)
    turned[2].insert(0, turned[2].pop(m))  # B0 before F0
    missing[0].remove(Action("F", 0, m - 1))
    words = ["where rank 2 has B0 before F0", f"where rank 0 has no F{m - 1}"]
    cases = [Timed(turned, None, words[0]), Timed(missing, None, words[1])]
    ends = "raise ValueError after a round in which no rank could go on"
    seen = alone(answer, cases, _tell_deadlock, {}, _run_deadlock)
    try:
        messages = list(seen)
    except Wrong as wrong:
        if "never ended" not in wrong.seen:
            raise
        smell = f"{ARRIVES}, as with a schedule {words[0]}, and the loop goes round for ever"
        raise Wrong(wrong.seen, smell, ends) from None
    for case, found in zip(cases, messages, strict=True):
        _look_at_ending(found, _tell_deadlock(*case), ARRIVES, ends)
        if not re.search(r"\b[FB]\d|[Aa]ction\W|'[FB]'|rank\D*\d", found.message):
            seen = f"{_tell_deadlock(*case)} raises ValueError: {found.message}"[:200]
            raise Wrong(seen, "that does not say who waits", "name the rank, its action, what for")


def _tell_deadlock(schedule: Schedule, cost: Cost | None, name: str) -> str:
    return f"simulate of a schedule {name}"


def _run_deadlock(answer, schedule: Schedule, *_: object) -> Ending | None:
    try:
        answer(schedule)
    except Exception as error:
        return _ended(error)
    return None


# ---- 12.6 -----------------------------------------------------------------------------------


@part.exercise(
    "12.6",
    "idle_share: the time of all ranks is (last stop - first start) of the whole pipeline, times "
    "the number of ranks. How much of it lies inside spans?",
    "bubble: with v = 1 a pipeline without a bubble would take m, and p - 1 come on top. The same "
    "p - 1 are divided by m, and by m + p - 1.",
    "With v stages a rank, write (p - 1)/v for p - 1 in both.",
    num_answers=2,
)
def bubble(answer) -> None:
    """Spans that begin at another time than 0; formulas for v from 1 to 3, and the default."""
    idle_share, formulas = answer.parts
    cases = [(_draw_spans(),) for _ in range(3)]
    for case, found in zip(cases, alone(idle_share, cases, _tell_spans, {}), strict=True):
        said, wanted = _tell_spans(*case), truth.idle_share(*case)
        found = number(found, said)
        if not _near(found, wanted):
            why = _nearest(found, _wrong_shares(*case), "", "idle time over the time of all ranks")
            raise Wrong(f"{said} is {found:.4g}, not {wanted:.4g}", *why)
    telling = random.choice([(8, 9, 3), (8, 11, 3), (6, 9, 4)])  # each mistake has its own numbers
    cases = [(random.randint(3, 8), random.randint(9, 20), 1), (4, 4), telling]
    cases += [(5, 8, 2), (1, 6), (4, 2)]
    for case, found in zip(
        cases, alone(formulas, cases, _tell_bubble, {}, _run_bubble), strict=True
    ):
        _look_at_formula(found, case)


def _draw_spans() -> list:
    """When a schedule runs at random costs, from a random time on; each mistake is seen."""
    while True:
        p, m, begin = random.randint(3, 4), random.randint(3, 6), random.randint(5, 50)
        schedule = random.choice((schedules.gpipe, schedules.one_f_one_b))(p, m)
        times = truth.simulate(schedule, _draw_costs(schedule))
        spans = [[(a, float(b + begin), float(e + begin)) for a, b, e in mine] for mine in times]
        if _is_clear(truth.idle_share(spans), _wrong_shares(spans)):
            return spans


def _is_clear(right: float, mistakes: Mistakes) -> bool:
    """Has each mistake its own number, and none the right one?"""
    smells: dict[float, str] = {round(right, 9): ""}
    return all(smells.setdefault(round(n, 9), smell) == smell for n, smell, _ in mistakes)


def _tell_spans(spans: list) -> str:
    every = [span for mine in spans for span in mine]
    begin, end = min(start for _, start, _ in every), max(stop for *_, stop in every)
    return f"idle_share of {len(spans)} ranks with spans from {begin:g} to {end:g}"


def _nearest(found: float, mistakes: Mistakes, *otherwise: str) -> tuple[str, ...]:
    return next((why for wrong, *why in mistakes if _near(found, wrong)), otherwise)


def _wrong_shares(spans: list) -> Mistakes:
    p, every = len(spans), [span for mine in spans for span in mine]
    begins, ends = [mine[0][1] for mine in spans], [mine[-1][2] for mine in spans]
    works = [sum(stop - start for _, start, stop in mine) for mine in spans]
    begin, end, work = min(begins), max(ends), sum(works)
    total, right = end - begin, 1 - work / ((end - begin) * p)
    only_one = ("of one rank only", "the work of all ranks, and the time of all ranks")
    yield work / (total * p), "that is the part in which ranks work", "1 minus that"
    yield right * 100, "that is in percent", "a share: from 0 to 1"
    yield right * p, "the idle parts of all ranks added up", "the mean over ranks: divide by p"
    yield 1 - work / total, "all work by the time of one rank", "p ranks have p times that time"
    for share in (1 - work / (end * p), 1 - work / end):
        yield share, "the time before the first start counts as idle", "last stop - first start"
    yield total * p - work, "that is a time, not a share", "divide by the time of all ranks"
    yield total * p / work - 1, "relative to the time of work", "of all the time that passes"
    for one in (*works, max(works)):
        yield 1 - one / total, *only_one
    own = [last - first for first, last in zip(begins, ends, strict=True)]
    smell = "each rank from its own first start to its own last stop: waiting at both ends is lost"
    whole = "the time of the whole pipeline counts for every rank"
    yield 1 - work / sum(own), smell, whole
    yield sum(1 - w / t for w, t in zip(works, own, strict=True)) / p, smell, whole
    yield (sum(own) - work) / (total * p), smell, whole
    smell = "the stop of the last rank, which ends first: the others have backwards left"
    yield 1 - work / ((ends[-1] - begin) * p), smell, "the largest stop of all ranks"
    yield 1 - work / sum(ends), "the last stops added up", "last stop - first start, p times"
    yield 1 - work / (sum(ends) - p * begin), "each rank up to its own last stop only", whole
    yield 1 - len(every) / (total * p), "spans are counted, not measured", "stop - start of each"


def _tell_bubble(*case: int) -> str:
    return f"bubble({', '.join(map(str, case))})"


def _run_bubble(answer, *case: int) -> tuple[float, ...] | str:
    """The numbers of the pair as floats; of anything else its form."""
    value = answer(*case)
    if not isinstance(value, list | tuple):
        return "None" if value is None else f"{value!r}"[:80]
    return tuple(number(one, "an entry of bubble(...)") for one in value)


def _look_at_formula(found: tuple[float, ...] | str, case: tuple) -> None:
    said, advice = f"{_tell_bubble(*case)} gives", "return two numbers: of ideal time, of all time"
    if isinstance(found, str) or len(found) != 2:
        smell = "nothing is returned" if found == "None" else "that is no pair"
        shown = found if isinstance(found, str) else f"{len(found)} numbers"
        raise Wrong(f"{said} {shown}", smell, advice)
    wanted = tuple(map(float, truth.bubble(*case)))

    def same(one: Sequence[float], other: Sequence[float]) -> bool:
        return all(map(_near, one, other))

    if same(found, wanted):
        return
    p, m, v = (*case, 1)[:3]
    table = _wrong_formulas(p, m, v, *wanted)
    why = next((why for wrong, *why in table if same(found, wrong)), ("", advice))
    raise Wrong(f"{said} {_numbers(found)}, not {_numbers(wanted)}", *why)


def _wrong_formulas(p: int, m: int, v: int, first: float, second: float) -> Mistakes:
    """What mistakes in the formula give; `first` and `second` are right."""
    ways: list[tuple] = [  # what stands for the empty time slots, and for the micro-batches
        (p / v, m, "p in place of p - 1", "on one rank nothing is empty"),
        ((p - 1) // v, m, "// drops the rest of (p - 1) / v", "Fraction(p - 1, v), or /"),
        ((p - 1) / v, m - 1, "m - 1 in place of m", "all m micro-batches are work"),
        (p - 1, m, "v is left out", "with v stages a rank the empty slots are v times as short"),
        ((p - 1) * v, m, "multiplied by v", "more stages a rank make the bubble smaller: divide"),
        (p / v - 1, m, "p / v - 1 in place of (p - 1) / v", "brackets first"),
        ((m - 1) / v, p, "p and m have changed places", "p ranks, m micro-batches"),
        (
            (p - 1) / (2 * v),
            m,
            "half of it",
            "p - 1 slots of F are empty, and p - 1 of B",
        ),
        (2 * (p - 1) / v, m, "twice as much", "of m + p - 1 time slots p - 1 are empty"),
    ]
    yield from (((e / n, e / (n + e) if n + e else 0), *why) for e, n, *why in ways if n)
    over = "bubble + work is the time that passes: divide by m + (p - 1) / v"
    yield from [
        ((second, first), "the two are swapped", "of ideal time first"),
        ((100 * first, 100 * second), "in percent", "shares, such as 3/11"),
        ((0, 0), "// drops the rest: a bubble is less than 1", "Fraction(p - 1, v), or /"),
        ((first, first), "the second is relative to work, too", over),
        ((second, second), "the first is of the time that passes, too", "without the bubble: m"),
        ((first, (p - 1) / v / (m + p - 1)), "v counts in the empty slots of both parts", over),
        ((first, (p - 1) / v / (m + p)), "m + p in place of m + p - 1", over),
        ((first, (p - 1) / (m + p - 1)), "v is left out of the second", over),
        ((first, 1 - second), "the second is the part in which ranks work", over),
    ]


# ---- 12.8 -----------------------------------------------------------------------------------


@part.exercise(
    "12.8",
    "Walk through the actions and keep a number: how many micro-batches are kept now?",
    "F adds one, B takes one away. What is asked for is the largest value on the way.",
)
def in_flight(answer) -> None:
    """Random walks; ranks of GPipe, 1F1B and an interleaved schedule; one micro-batch at a time."""
    cases = [(actions,) for actions in (_draw_walk(), _draw_walk())]
    cases += [(schedules.gpipe(2, 5)[1],), (schedules.one_f_one_b(4, 8)[1],)]
    cases += [(schedules.interleaved(2, 4, 2)[0],), (schedules.naive(2, 3)[0],)]
    for (actions,), found in zip(cases, alone(answer, cases, _tell_walk, {}), strict=True):
        found, wanted = number(found, _tell_walk(actions)), truth.in_flight(actions)
        if found != wanted:
            advice = "the largest number of F minus B so far"
            why = _nearest(found, _wrong_counts(actions), "", advice)
            raise Wrong(f"{_tell_walk(actions)} is {found:g}, not {wanted}", *why)


def _tell_walk(actions: list[Action]) -> str:
    p = 2 if len({action.stage for action in actions}) > 1 else 99
    return f"in_flight of {_row(actions, p)}"


def _draw_walk() -> list[Action]:
    """A legal order of F and B on one rank that gives each known mistake its own number."""
    while True:
        numbers, actions = {"F": 0, "B": 0}, []
        while len(actions) < 18:
            kept = numbers["F"] - numbers["B"]
            kind = "B" if kept and (numbers["F"] == 9 or random.random() < 0.45) else "F"
            actions.append(Action(kind, 2, numbers[kind]))
            numbers[kind] += 1
        if _is_clear(truth.in_flight(actions), _wrong_counts(actions)):
            return actions


def _wrong_counts(actions: list[Action]) -> Mistakes:
    if len({action.stage for action in actions}) > 1:
        flying, most = set(), 0
        for kind, _, i in actions:
            (flying.add if kind == "F" else flying.discard)(i)
            most = max(most, len(flying))
        yield most, "micro-batches are counted, not stages of them", "each stage keeps its own"
    kinds = [action.kind for action in actions]
    kept = list(itertools.accumulate({"F": 1, "B": -1}[kind] for kind in kinds))
    runs = [len(list(run)) for kind, run in itertools.groupby(kinds) if kind == "F"]
    yield len(kinds), "that is the number of actions", "F adds one, B (a capital) takes one away"
    yield kinds.count("F"), "all forwards, also those whose backward is done", "B takes one away"
    smell = "what is left at the end, or F and B turned round, or another letter than a capital F"
    yield kept[-1], smell, "the largest F - B so far"
    yield 1, "that is after the first action: `return` stands inside the loop", "return after it"
    at = {action: index for index, action in enumerate(actions)}
    apart = max(at[Action("B", *a[1:])] - index for a, index in at.items() if a.kind == "F")
    yield apart, "how many actions lie between an F and its B", "the largest F - B so far"
    for run in (runs[0], max(runs)):
        yield run, "a row of forwards", "a backward takes one away, not all, and then it goes on"
    yield max(kept) + 1, "one too many", "begin with 0"
    yield max(kept) - 1, "one too few: an F is looked at too late", "add first, then look"
    yield max(a.microbatch for a in actions), "the largest number of a micro-batch", "count F - B"
    yield sum(kept), "all values added up", "the largest of them"
