"""12.4, 12.7 and 12.9: schedules, which are data; 12.8: what a rank keeps of one."""

import itertools
import random
from typing import NamedTuple

from manyhands.checks.engine.spec import Spec
from manyhands.checks.engine.values import Malformed, integer, listing
from manyhands.pipeline import bubble, schedules
from manyhands.pipeline.schedules import Action, Schedule

# ---- the form of a schedule, and its words --------------------------------------------------

TRIPLES = "Write Action(kind, stage, microbatch) for each action."
EACH_RANK = "a list with a list of actions for each rank"
IN_ORDER = "Forwards, and backwards, of a stage go in the order of the micro-batches."
PRINT_IT = "Compare rank by rank: in_words(schedule) prints a line for each."
SEVERAL = "Give each rank a list of its own, and put these lists into one."


def is_action(value: object) -> bool:
    """Has it the three parts of an action, by place?"""
    return isinstance(value, tuple) and len(value) == 3 and value[0] in ("F", "B")


def as_action(value: object) -> Action:
    """An action; in_words and the engine ask for its parts by name, so a plain tuple is none."""
    seen = f"an action {value!r}"[:100]
    if is_action(value) and not all(hasattr(value, name) for name in Action._fields):
        why = "in_words and the engine read action.kind, action.stage and action.microbatch, "
        raise Malformed(
            f"{seen}, a plain tuple", f"{why}which a plain tuple does not have.", TRIPLES
        )
    if is_action(value):
        return Action(value.kind, integer(value.stage), integer(value.microbatch))
    why = "That is no action."
    if value is None or value == "..":
        why = "A schedule is an order without times, so empty time slots have no place in it."
    elif isinstance(value, str):
        why = "The engine asks an action for its kind, stage and micro-batch, and a text has none."
    elif isinstance(value, list | tuple) and value and all(map(is_action, value)):
        why = "The list of a rank is flat: its elements are actions, not pairs or lists of them."
    elif isinstance(value, list):
        why = "Actions are keys of dicts later, and a list cannot be one."
    raise Malformed(seen, why, TRIPLES)


def as_schedule(value: object) -> Schedule:
    """A list of lists of actions."""
    if isinstance(value, list | tuple) and value and all(map(is_action, value)):
        raise Malformed(f"one list of {len(value)} actions", f"Asked for is {EACH_RANK}.", SEVERAL)
    return listing(listing(as_action, "a list of actions for each rank"), EACH_RANK)(value)


def row(actions: list[Action], p: int) -> str:
    """The actions of a rank in words; with a letter where it has several stages."""
    letters = "abcdefgh" if any(action.stage >= p for action in actions) else [""] * 8
    words = [f"{kind}{i}{letters[stage // p % 8]}" for kind, stage, i in actions]
    return " ".join(words) or "nothing"


def action_words(action: Action) -> str:
    """One action in words."""
    return f"{action.kind}{action.microbatch} of stage {action.stage}"


def wrong_rank(found: Schedule, wanted: Schedule) -> int:
    """The first rank that differs."""
    pairs = zip(found, wanted, strict=True)
    return next(rank for rank, (mine, right) in enumerate(pairs) if mine != right)


def say_schedule(found: Schedule, wanted: Schedule) -> str:
    """The first rank that differs; its stages only where they alone differ."""
    p = len(wanted)
    if len(found) != p:
        return f"gives {len(found)} lists for {p} ranks"
    rank = wrong_rank(found, wanted)
    mine, right = row(found[rank], p), row(wanted[rank], p)
    if mine == right:
        pairs = zip(found[rank], wanted[rank], strict=True)
        mine, right = map(action_words, next(pair for pair in pairs if pair[0] != pair[1]))
    return f"gives rank {rank} {mine}, not {right}"


def facts_of_schedule(found: Schedule, wanted: Schedule, case: tuple) -> str:
    """What is wrong with the first rank that differs, or what the schedule costs."""
    if len(found) != len(wanted):
        return "The list has an entry for each rank."
    rank = wrong_rank(found, wanted)
    mine, right = found[rank], wanted[rank]
    if foreign := [action for action in mine if action not in right]:
        stages = sorted({action.stage for action in right})
        m = 1 + max(action.microbatch for action in right)
        words = f"{action_words(foreign[0])} is no action of rank {rank}: "
        return f"{words}it has stages {stages} and micro-batches 0 to {m - 1}."
    if twice := [action for action in mine if mine.count(action) > 1]:
        return f"{action_words(twice[0])} is done {mine.count(twice[0])} times."
    if missing := [action for action in right if action not in mine]:
        return f"{action_words(missing[0])} is never done; {len(missing)} actions are missing."
    for action in mine:
        if mine.index(action._replace(kind="F")) > mine.index(action):
            return f"{action_words(action)} comes before its forward, and needs what that keeps."
    for kind, stage in sorted({action[:2] for action in right}):
        order = [action for action in mine if action[:2] == (kind, stage)]
        late = next((b for a, b in itertools.pairwise(order) if b.microbatch < a.microbatch), None)
        if late:
            return f"{action_words(late)} comes too late. {IN_ORDER} {consequence(found, wanted)}"
    return consequence(found, wanted)


def consequence(found: Schedule, wanted: Schedule) -> str:
    """How long a schedule takes and how much it keeps, against the wanted one."""
    try:
        spans = [bubble.simulate(schedule) for schedule in (found, wanted)]
    except ValueError as deadlock:
        return f"This order ends in a {deadlock}."
    took, asked = (max(stop for mine in ranks for *_, stop in mine) for ranks in spans)
    kept, least = (max(map(bubble.in_flight, schedule)) for schedule in (found, wanted))
    time = "as long as it should" if took == asked else f"{took} units of time, not {asked},"
    keeps = "as many micro-batches" if kept == least else f"{kept} micro-batches, not {least}"
    return f"This order takes {time} and keeps {keeps} at most."


class Shape(NamedTuple):
    """One call: p ranks, m micro-batches, and v stages a rank where that is asked for."""

    p: int
    m: int
    v: int | None = None


def schedule_of(answer: object, case: Shape) -> object:
    """Call the answer with those numbers that the case has."""
    return answer(*[number for number in case if number is not None])


def tell(name: str) -> object:
    """The words for a call."""
    return lambda case: f"{name}({', '.join(str(number) for number in case if number is not None)})"


# ---- 12.4 -----------------------------------------------------------------------------------


def gpipe_shapes() -> list[Shape]:
    """One micro-batch, one rank, fewer micro-batches than ranks, more, many."""
    p = random.randint(3, 5)
    return [Shape(2, 1), Shape(1, 3), Shape(p + 1, p - 1), Shape(p, p + 2), Shape(7, 20)]


ALL_FORWARDS = "First come all forwards, then all backwards: two loops, one after the other."
FEWER = "A number of micro-batches is refused for which the schedule exists."
KINDS = 'for kind in "FB" for i in range(m)]'
A_NEW = "Action(kind, rank, i)"
gpipe = Spec(
    todo="12.4",
    truth=schedules.gpipe,
    cases=gpipe_shapes,
    observe=schedule_of,
    tell=tell("gpipe"),
    form=as_schedule,
    say=say_schedule,
    facts=facts_of_schedule,
    advice={"": PRINT_IT},
    hints=(
        "All ranks do the same in the same order; only their stage differs.",
        "For one rank, write Action('F', rank, i) for i in range(m), and then the same with 'B'.",
        "Return a list of p such lists, one for each rank in range(p).",
    ),
    mistakes=r"""
        {KINDS} => {KINDS}\n    kinds[m:] = kinds[: m - 1 : -1] ::
            The backwards go from the last micro-batch to the first, and the docstring asks for the
            order of the micro-batches. | {IN_ORDER}
        {KINDS} => for i in range(m) for kind in "FB"] ::
            This is `naive`: F and B take turns, so one rank works at a time. | {ALL_FORWARDS}
        {KINDS} => for kind in "F" for i in range(m)] :: These are only the forwards.
        {KINDS} => {KINDS}\n    if m < p: raise ValueError :: {FEWER} | Refuse nothing.
        {A_NEW} => Action(kind, 0, i) :: Every rank has stage 0. | Rank r has stage r.
        {A_NEW} => Action(kind, rank + 1, i) :: Stages are counted from 1. | range(n) begins with 0.
        {A_NEW} => Action(kind, rank, i + 1) :: Micro-batches are counted from 1.
        {A_NEW} => Action(kind, i, rank) :: Stage and micro-batch have changed places. | {TRIPLES}
        after lambda schedule: [*schedule[:-1], schedule[-1][len(schedule[-1]) // 2:]] ::
            The last rank has no forwards, although it computes its stage as all others do. | What
            is sent to the last rank is only its input: all ranks have the same 2m actions.
        instead schedules.one_f_one_b :: This is 1F1B. | {ALL_FORWARDS}
    """,
    module=globals(),
)

# ---- 12.7 -----------------------------------------------------------------------------------


def one_f_one_b_shapes() -> list[Shape]:
    """One rank, one micro-batch, fewer than ranks, as many, more; beyond any small bound."""
    p = random.randint(3, 5)
    few = random.randint(2, p - 1)
    return [Shape(1, 3), Shape(4, 1), Shape(p + 1, few), Shape(p, p), Shape(p, p + 3), Shape(9, 21)]


BEHIND = "Rank r has p - 1 - r ranks behind it, and its first forwards keep them busy."
WARMUP = "min(p - 1 - rank, m)"
F_NEW = 'Action("F", rank, i)'
B_NEW = 'Action("B", rank, i)'
one_f_one_b = Spec(
    todo="12.7",
    truth=schedules.one_f_one_b,
    cases=one_f_one_b_shapes,
    observe=schedule_of,
    tell=tell("one_f_one_b"),
    form=as_schedule,
    say=say_schedule,
    facts=facts_of_schedule,
    advice={"": PRINT_IT},
    hints=(
        "Write the forwards and the backwards of a rank as two lists first. How many forwards come "
        "before the first pair of F and B? The last rank begins with none, rank 0 with p - 1.",
        "warmup = min(p - 1 - rank, m). Then come pairs: forwards[warmup] with backwards[0], "
        "forwards[warmup + 1] with backwards[1], and so on, as long as there are forwards.",
        "zip(forwards[warmup:], backwards) gives the pairs. What is left are "
        "backwards[m - warmup:], as many as the warm-up had forwards.",
    ),
    mistakes=r"""
        {WARMUP} => max(0, min(p - 2 - rank, m)) ::
            Each rank begins with one forward too few. | {BEHIND}
        {WARMUP} => min(p - rank, m) ::
            Each rank begins with one forward too many and keeps one micro-batch too many.
        {WARMUP} => min(p - 1, m) :: Every rank begins with the same number of forwards.
        {WARMUP} => min(p, m) :: Every rank begins with the same number of forwards, p or all.
        {WARMUP} => min(rank, m) ::
            The last rank begins with the most forwards, and it should begin with none.
        {WARMUP} => min(2 * (p - 1 - rank), m) ::
            Each rank begins with twice as many forwards as it needs.
        for action in pair => for action in pair[::-1] ::
            In each turn the backward comes before the forward. | F first, then B.
        , *backwards[m - warmup :] => ::
            The backwards after the last forward are missing. | backwards[m - warmup:] are left.
        zip(forwards[warmup:], backwards => zip(forwards[warmup:], backwards[warmup:]
        backwards[m - warmup :] => backwards[:warmup] :: A turn has F and B of the same micro-batch,
            so B0 comes too late. | The first turn is forwards[warmup] with backwards[0].
        schedule = [] => schedule = []\n    if m < p: return [[Action(k, r, i) for k in "FB" for i
            in range(m)] for r in range(p)] ::
            With few micro-batches this is GPipe. | The same rule holds for every m.
        schedule = [] => schedule = []\n    if m < p: raise ValueError ::
            {FEWER} | min(p - 1 - rank, m) forwards come first.
        {F_NEW} => Action("F", rank, i + 1)
        {B_NEW} => Action("B", rank, i + 1) ::
            Micro-batches are counted from 1. | range(m) begins with 0.
        {F_NEW} => Action("F", i, rank)
        {B_NEW} => Action("B", i, rank) :: Stage and micro-batch have changed places. | {TRIPLES}
        instead schedules.gpipe :: This is GPipe: all m micro-batches are kept. | {BEHIND}
        instead schedules.naive :: This is `naive`: no rank begins with forwards.
    """,
    module=globals(),
)

# ---- 12.8 -----------------------------------------------------------------------------------


class Walk(NamedTuple):
    """One call of in_flight."""

    actions: list[Action]


def drawn_walk(is_in_order: bool) -> Walk:
    """F and B of one stage, each B after its F; backwards in order, or the latest first."""
    waiting: list[int] = []
    actions: list[Action] = []
    num = 0
    while len(actions) < 20:
        if num < 10 and (not waiting or random.random() < 0.55):
            actions.append(Action("F", 2, num))
            waiting.append(num)
            num += 1
        else:
            actions.append(Action("B", 2, waiting.pop(0 if is_in_order else -1)))
    return Walk(actions)


def walks() -> list[Walk]:
    """From one in flight to forty; several stages on a rank; backwards in another order."""
    fixed = [
        schedules.naive(2, 3)[0],
        schedules.gpipe(2, 5)[1],
        schedules.one_f_one_b(4, 8)[1],
        schedules.interleaved(2, 4, 2)[0],
    ]
    return [*map(Walk, fixed), drawn_walk(True), drawn_walk(False), Walk(schedules.gpipe(1, 40)[0])]


def first_forwards(actions: list[Action]) -> int:
    """How many forwards come before the first backward."""
    return len(list(itertools.takewhile(lambda action: action.kind == "F", actions)))


def longest_row(actions: list[Action]) -> int:
    """The longest row of forwards."""
    kinds = itertools.groupby(action.kind for action in actions)
    return max(len(list(group)) for kind, group in kinds if kind == "F")


def apart(actions: list[Action]) -> int:
    """How many actions lie between a forward and its backward, at most."""
    at = {action: index for index, action in enumerate(actions)}
    return max(at[Action("B", *a[1:])] - index for a, index in at.items() if a.kind == "F")


def of_one_stage(actions: list[Action]) -> int:
    """The most on one stage."""
    stages = {action.stage for action in actions}
    return max(bubble.in_flight([a for a in actions if a.stage == stage]) for stage in stages)


def of_numbers(actions: list[Action]) -> int:
    """The most different numbers of micro-batches."""
    kept: set[int] = set()
    most = 0
    for kind, _, i in actions:
        (kept.add if kind == "F" else kept.discard)(i)
        most = max(most, len(kept))
    return most


ONE_ELSE = '1 if action.kind == "F" else -1'
LARGEST = "Keep a count, and separately the largest value that it has had."
in_flight = Spec(
    todo="12.8",
    truth=bubble.in_flight,
    cases=walks,
    tell=lambda case: f"in_flight of {shortened(case)}",
    form=integer,
    advice={"": "The answer is the largest number of F minus B on the way."},
    hints=(
        "Walk through the actions and keep a number: how many micro-batches are kept now?",
        "A forward adds one and a backward takes one away. What is asked for is the largest value "
        "that this number has on the way.",
    ),
    mistakes=r"""
        {ONE_ELSE} => 1 if action.kind == "F" else 0 :: All forwards are counted, also those whose
            backward is done. | A backward takes one away.
        {ONE_ELSE} => -1 if action.kind == "F" else 1 :: The result is 0, which is the count after
            the last action, not the largest one. | {LARGEST}
        most = max(most, num) => most = max(most, num)\n        return most ::
            This is the count after the first action. | Return after the loop.
        instead len :: This is the number of actions. | F adds one, B takes one away.
        instead lambda actions: max((action.microbatch for action in actions)) ::
            This is the largest number of a micro-batch, and these are counted from 0. |
            Micro-batches whose backward is done are not in flight.
        instead first_forwards ::
            This counts the forwards before the first backward, and more may follow. | {LARGEST}
        instead longest_row :: This is the longest row of forwards, and those before it may still be
            in flight. | A backward takes away one, not all.
        instead of_one_stage :: This is the most on one stage; a rank keeps the micro-batches of all
            its stages. | Count over all stages together.
        instead of_numbers :: A micro-batch that is in flight on two stages of the rank counts once
            here. | Each stage keeps activations of its own, so count stages and micro-batches.
        instead apart ::
            This is the largest distance between a forward and its backward. | {LARGEST}
    """,
    module=globals(),
)


def shortened(case: Walk) -> str:
    """The actions, or the first ones of many."""
    has_one_stage = len({action.stage for action in case.actions}) == 1
    words = row(case.actions, 99 if has_one_stage else 2)
    return words if len(words) < 80 else f"{words[:60]}... ({len(case.actions)} actions)"


# ---- 12.9 -----------------------------------------------------------------------------------


def interleaved_shapes() -> list[Shape]:
    """Two and three stages a rank, few micro-batches, groups larger than p, what has no groups."""
    p = random.randint(2, 4)
    few = random.randint(2, 3)
    allowed = [Shape(2, 2, 2), Shape(1, 3, 2), Shape(3, 6), Shape(4, few, 2), Shape(p, 2 * p, 2)]
    larger = [Shape(p + 1, 2 * p + 2, 3), Shape(4, 10, 2), Shape(2, 4, 1), Shape(3, 33, 5)]
    return [*allowed, *larger, Shape(p, 2 * p + 1, 2), Shape(4, 9, 2), Shape(4, 11, 3)]


WARM = "2 * (p - 1 - rank) + (v - 1) * g"
PLACES = "[(chunk, a * g + i) for a in range(groups) for chunk in range(v) for i in range(g)]"
OF_P = "[(c, i) for a in range(0, m, p) for c in range(v) for i in range(a, min(a + p, m))]"
FORWARD_OF = "chunk * p + rank, i"
BACKWARD_OF = "(v - 1 - chunk) * p + rank, i"
RAISE = "Raise ValueError where m % max(1, m // p) is not 0."
interleaved = Spec(
    todo="12.9",
    truth=schedules.interleaved,
    cases=interleaved_shapes,
    observe=schedule_of,
    tell=tell("interleaved"),
    form=as_schedule,
    say=say_schedule,
    facts=facts_of_schedule,
    advice={"": PRINT_IT},
    refusal=("These micro-batches do not make max(1, m // p) groups of one size.", RAISE),
    hints=(
        "As in 12.7, a rank has a list of forwards, a list of backwards, a warm-up, turns, and the "
        "rest. Only the lists are longer: v stages of m micro-batches.",
        "The pairs (chunk, i) are the same on all ranks: for each group, for each chunk in "
        "range(v), for each micro-batch of the group. The forward of a pair is on stage "
        "chunk * p + rank.",
        "The backward of a pair is on stage (v - 1 - chunk) * p + rank. groups = max(1, m // p), "
        "g = m // groups, warmup = min(2 * (p - 1 - rank) + (v - 1) * g, m * v).",
    ),
    mistakes=r"""
        {FORWARD_OF} => rank * v + chunk, i
        {BACKWARD_OF} => rank * v + v - 1 - chunk, i ::
            Neighbouring stages are on one rank. | Rank r has stages r, r + p, r + 2p, ...
        {BACKWARD_OF} => {FORWARD_OF} :: The backwards go from the first stage to the last. | The
            backward of chunk c is on stage (v - 1 - c) * p + rank.
        for a in range(groups) for chunk in range(v) for i in range(g) => for a in range(groups) for
            i in range(g) for chunk in range(v) ::
            Each micro-batch passes all stages of the rank before the next one. | Take g
            micro-batches of a rank's first stage, the same g of its second, then the next g.
        g, schedule = m // groups, [] => groups, g, schedule = 1, m, [] ::
            There are no groups: all micro-batches pass the first stage first.
        {PLACES} => {OF_P} :: The groups have p micro-batches, not g. | g = m // max(1, m // p).
        {PLACES} => {OF_P}
        {WARM} => 2 * (p - 1 - rank) + (v - 1) * p ::
            The groups have p micro-batches, not g, and so has the warm-up.
        {WARM} => 2 * (p - 1 - rank) + (v - 1) * p ::
            The warm-up counts p micro-batches for each earlier stage, and it should count g.
        {WARM} => p - 1 - rank :: The warm-up is that of 1F1B. | The warm-up is {WARM}, or all
            forwards where there are not so many.
        {WARM} => 2 * (p - 1 - rank) ::
            The warm-up leaves out what the last rank does before its last stage.
        {WARM} => p - 1 - rank + (v - 1) * g ::
            The warm-up has one forward for each rank behind, and the way back needs one more.
        if m % groups => if m % p :: The function refuses what p does not divide, although it makes
            groups of one size. | {RAISE}
        if m % groups => if m < p or m % groups :: {FEWER}
        groups = max => v = 2\n    groups = max ::
            Every rank has two stages here, whatever v is. | Use range(v).
        instead lambda p, m, v=2: schedules.one_f_one_b(p, m) ::
            This is 1F1B with one stage on each rank. | A rank has v stages: r, r + p, r + 2p, ...
    """,
    module=globals(),
)
