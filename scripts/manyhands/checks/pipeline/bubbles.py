"""12.5: the times of a schedule; 12.6: the share of these times that is idle, and two formulas."""

import itertools
import random
import re
from typing import NamedTuple

from manyhands.checks.engine.answer import Pair
from manyhands.checks.engine.card import Wrong
from manyhands.checks.engine.mistakes import Mistake, around
from manyhands.checks.engine.spec import Spec
from manyhands.checks.engine.values import Malformed, listing, number, same, show
from manyhands.checks.pipeline.schedules import action_words, is_action
from manyhands.pipeline import bubble as truth
from manyhands.pipeline import schedules
from manyhands.pipeline.bubble import Span
from manyhands.pipeline.schedules import Action, Schedule

# ---- 12.5 -----------------------------------------------------------------------------------


class Cost(NamedTuple):
    """How long each action takes, from a table."""

    table: dict[Action, float]

    def __call__(self, action: Action) -> float:
        return self.table[action]


class Timed(NamedTuple):
    """One call of simulate; without a cost it takes its own.

    Args:
        name: for people.
        stuck: in a deadlock, the ranks that cannot go on.
    """

    schedule: Schedule
    cost: Cost | None
    name: str
    stuck: tuple[int, ...] = ()

    @property
    def undone(self) -> set[str]:
        """What a deadlock leaves undone on one rank or another, as F2; a message may name it."""
        done: set[Action] = set()
        num_stages = 1 + max(action.stage for mine in self.schedule for action in mine)
        for _ in range(sum(map(len, self.schedule))):
            for mine in self.schedule:
                action = next((one for one in mine if one not in done), None)
                if action and done.issuperset(truth.needed(action, num_stages)):
                    done.add(action)
        return {f"{one.kind}{one.microbatch}" for mine in self.schedule for one in {*mine} - done}


def drawn_costs(schedule: Schedule) -> Cost:
    """Quarters, which are exact as floats; no whole numbers alone."""
    return Cost({action: random.randint(5, 40) / 4 for mine in schedule for action in mine})


def timed() -> list[Timed]:
    """One rank, unit costs, drawn costs, several stages a rank, forwards only, many; deadlocks."""
    m = random.randint(3, 5)
    unit = [("gpipe(1, 2)", schedules.gpipe(1, 2)), (f"gpipe(2, {m})", schedules.gpipe(2, m))]
    drawn = [
        (f"forwards(3, {m})", schedules.forwards(3, m)),
        (f"gpipe(3, {m})", schedules.gpipe(3, m)),
        (f"one_f_one_b(4, {m + 1})", schedules.one_f_one_b(4, m + 1)),
        ("interleaved(2, 4, 2)", schedules.interleaved(2, 4, 2)),
        ("one_f_one_b(3, 150)", schedules.one_f_one_b(3, 150)),
    ]
    cases = [Timed(schedule, None, name) for name, schedule in unit]
    cases += [Timed(schedule, drawn_costs(schedule), name) for name, schedule in drawn]
    return [*cases, *deadlocks(m)]


def deadlocks(m: int) -> list[Timed]:
    """Of all ranks, of two, and with a rank that is done: the first, or one in the middle."""
    turned = schedules.gpipe(3, m)
    turned[2].insert(0, turned[2].pop(m))
    missing = schedules.gpipe(2, m)
    missing[0].remove(Action("F", 0, m - 1))
    last = [Action("B", 2, 1), Action("F", 2, 1)]
    middle = [[Action("F", 0, 1), Action("B", 0, 1)], [Action("F", 1, 1)], last]
    first = [[Action("F", 0, 1)], [Action("F", 1, 1), Action("B", 1, 1)], last]
    return [
        Timed(turned, None, "a schedule in which rank 2 begins with B0", (0, 1, 2)),
        Timed(missing, None, f"a schedule in which rank 0 has no F{m - 1}", (0, 1)),
        Timed(middle, None, "a deadlock with rank 1 done", (0, 2)),
        Timed(first, None, "a deadlock with rank 0 done", (1, 2)),
    ]


def times_of(answer: object, case: Timed) -> object:
    """The spans; where `stuck` says who is, whether the error tells it."""
    given = (case.schedule,) if case.cost is None else (case.schedule, case.cost)
    if not case.stuck:
        return as_spans(answer(*given))
    try:
        return as_spans(answer(*given))
    except ValueError as error:
        if not tells(str(error), case):
            raise Wrong(
                f"the message of the ValueError is {str(error)[:80]!r}",
                "It does not say who waits: the first rank and the first action that it names are "
                "not those of a rank that cannot go on.",
                ENDS,
            ) from None
        raise


def tells(message: str, case: Timed) -> bool:
    """Does a message name a rank that is stuck, or an action that is undone, before any other?"""
    ranks = [int(found) for found in re.findall(r"\brank\D{0,3}(\d+)", message)]
    plain = re.sub(
        r"\(?(?:kind=)?['\"]([FB])['\"], (?:stage=)?\d+, (?:microbatch=)?(\d+)", r" \1\2", message
    )
    actions = re.findall(r"\b[FB]\d+", plain)
    is_rank_right = not ranks or ranks[0] in case.stuck
    is_action_right = not actions or actions[0] in case.undone
    return bool(ranks or actions) and is_rank_right and is_action_right


TRIPLE = "Return for each rank a list of (action, start, stop)."


def as_span(value: object) -> Span:
    """An action and two numbers."""
    if not isinstance(value, tuple | list) or len(value) != 3 or not is_action(value[0]):
        raise Malformed(f"a span {value!r}"[:100], "A span is (action, start, stop).", TRIPLE)
    return Action(*value[0]), number(value[1]), number(value[2])


as_spans = listing(listing(as_span, "a list of spans"), "a list of spans for each rank")


def first_wrong(found: list, wanted: list) -> tuple[int, Span, Span] | None:
    """The wrong span that starts first, with its rank; None where the actions are others."""
    if list(map(doing, found)) != list(map(doing, wanted)):
        return None
    wrong = []
    for rank, (mine, right) in enumerate(zip(found, wanted, strict=True)):
        pairs = zip(mine, right, strict=True)
        wrong += [(rank, one, other) for one, other in pairs if not same(one[1:], other[1:])]
    return min(wrong, key=lambda pair: (pair[2][1], pair[0]))


def say_times(found: object, wanted: object) -> str:
    """The first wrong span."""
    if len(found) != len(wanted):
        return f"gives {len(found)} lists for {len(wanted)} ranks"
    first = first_wrong(found, wanted)
    if first is None:
        rank = next(r for r, mine in enumerate(found) if doing(mine) != doing(wanted[r]))
        return f"gives rank {rank} {doing(found[rank])}, not {doing(wanted[rank])}"
    rank, (action, *mine), (_, *right) = first
    seen, asked = (" to ".join(show(one, 6) for one in both) for both in (mine, right))
    return f"has rank {rank} do {action_words(action)} from {seen}, not from {asked}"


def doing(spans: list[Span]) -> str:
    """The actions of a rank, in words."""
    return " ".join(f"{a.kind}{a.microbatch}" for a, *_ in spans) or "nothing"


def facts_of_times(found: object, wanted: object, case: Timed) -> str:
    """What the first wrong span does not respect, by the times of the others."""
    first = first_wrong(found, wanted) if isinstance(found, list) else None
    if first is None:
        return ""
    rank, (action, start, stop), (_, right_start, right_stop) = first
    cost = right_stop - right_start
    if not same(stop - start, cost):
        return f"{action_words(action)} takes {show(cost)}, so it stops at start + {show(cost)}."
    mine = found[rank]
    index = next(i for i, span in enumerate(mine) if span[0] == action)
    if index and start < mine[index - 1][2] - 1e-9:
        return f"Until {show(mine[index - 1][2])} the rank does {action_words(mine[index - 1][0])}."
    num_stages = 1 + max(one.stage for actions in case.schedule for one in actions)
    stops = {span[0]: span[2] for spans in found for span in spans}
    for other in truth.needed(action, num_stages):
        if start < stops[other] - 1e-9:
            return f"It needs {action_words(other)}, which ends at {show(stops[other])}."
    return f"At {show(right_start)} the rank is free, and all that this action needs is done."


READY = "max([free, *(done[other] for other in before)])"
DONE = "done[action] = start + cost(action)"
MINE = "mine.append((action, start, done[action]))"
NEEDS = "needed(action, num_stages)"
LAST = "An action starts when its rank is free and all that it needs is done, at the later of both."
ENDS = "After a round in which no rank could go on, raise ValueError with the words of `stuck`."
simulate = Spec(
    todo="12.5",
    truth=truth.simulate,
    cases=timed,
    observe=times_of,
    tell=lambda case: f"simulate of {case.name}{' with drawn costs' if case.cost else ''}",
    say=say_times,
    facts=facts_of_times,
    advice={"": LAST},
    refusal=("This schedule is a deadlock: no rank can go on.", ENDS),
    reasons="""
        KeyError: 'F' :: `cost` takes a whole action. | Call cost(action).
        KeyError: Action ::
            An action was looked up that is not done yet: ranks do not run one after the other. | Go
            on with a rank only while all that `needed` lists is done, then with the next one.
        argument: 'cost' :: `cost` has a default. | Keep cost=unit_cost in the signature.
    """,
    hints=(
        "Keep a dict that says when each action is done. An action starts at the largest of two: "
        "when its rank is done with the action before, and when each of "
        "needed(action, num_stages) is done.",
        "Go round the ranks again and again. With each one go on with its next actions while all "
        "that they need is in the dict.",
        "A round in which no rank could go on, although actions are left, is a deadlock: raise "
        "ValueError with a rank, its next action, and which of `needed` is not done.",
    ),
    mistakes="""
        {READY} => free ::
            An action starts when its rank is free, and it waits for no other stage. | {LAST}
        {NEEDS} => [one for one in {NEEDS} if action.kind == one.kind == "F"] ::
            Only forwards wait for what they need.
        {NEEDS} => [one for one in {NEEDS} if action.kind == "B"] ::
            Only backwards wait for what they need.
        {READY} => max([0, *(done[other] for other in before)]) ::
            An action does not wait for the action before it on its own rank.
        {READY} => max([1, free, *(done[other] for other in before)]) ::
            Time begins at 1 here. | The first action of rank 0 starts at 0.
        {READY} => round(max([free, *(done[other] for other in before)])) ::
            The starts are rounded. | Costs may be fractions: leave the times as they are.
        {DONE} => done[action] = start + unit_cost(action) ::
            The argument `cost` is not used. | Call cost(action).
        {MINE} => mine.append((action, start, cost(action))) ::
            The third number of a span is its duration, and it should be the time of its stop.
        {DONE} => done[action] = start
        free = mine[-1][2] if mine else 0 => free = mine[-1][2] if mine else 0
        {MINE} => mine.append((action, start, start + cost(action))) ::
            An action waits until what it needs has started, not until that has stopped.
        num_stages = 1 + max(action.stage for actions in schedule for action in actions) =>
            num_stages = len(schedule) :: The number of ranks was taken for the number of stages. |
            num_stages = 1 + the largest stage.
        raise ValueError("deadlock: " + stuck(schedule, spans, done, num_stages)) => break ::
            This schedule is a deadlock, and nothing is raised. | {ENDS}
        "deadlock: " + stuck(schedule, spans, done, num_stages) => "deadlock" ::
            The message names no rank that waits, and no action.
    """,
    module=globals(),
)


def one_at_a_time() -> Mistake:
    """Every action after the last stop of all ranks, in whatever order they are taken."""

    def fits(found: object, case: Timed) -> bool:
        if case.stuck or not isinstance(found, list):
            return False
        spans = sorted(span[1:] for mine in found for span in mine)
        return spans[0][0] == 0 and all(b[0] == a[1] for a, b in itertools.pairwise(spans))

    def wrap(simulate):
        def slow(schedule, cost=truth.unit_cost):
            spans = simulate(schedule, cost)
            now = 0
            places = [
                (rank, index) for rank, mine in enumerate(spans) for index in range(len(mine))
            ]
            for rank, index in sorted(places, key=lambda at: spans[at[0]][at[1]][1:]):
                action = spans[rank][index][0]
                spans[rank][index] = (action, now, now + cost(action))
                now += cost(action)
            return spans

        return slow

    words = "Only one rank works at a time: every action waits for the last stop of all ranks."
    return Mistake(around(wrap), words, "A rank is free when its own last action is done.", fits)


simulate.mistakes.append(one_at_a_time())

# ---- 12.6 -----------------------------------------------------------------------------------


class Idle(NamedTuple):
    """One call of both: spans for idle_share; p, m and v for bubble, v may be left out."""

    spans: list[list[Span]]
    p: int
    m: int
    v: int | None


def drawn_spans(begin: float, make: object, p: int, m: int) -> list[list[Span]]:
    """When a schedule runs at drawn costs, from a time on."""
    schedule = make(p, m)
    spans = truth.simulate(schedule, drawn_costs(schedule))
    return [[(action, begin + a, begin + b) for action, a, b in mine] for mine in spans]


def idles() -> list[Idle]:
    """Beginning at 0 and elsewhere, before 0 too; one rank; v from 1 to 4, and its default."""
    one, many = schedules.gpipe, schedules.one_f_one_b
    return [
        Idle(drawn_spans(0.0, one, 2, 2), 2, 2, None),
        Idle(drawn_spans(0.0, one, 1, 3), 1, 6, None),
        Idle(drawn_spans(random.randint(5, 50), many, 3, 5), random.randint(5, 8), 13, 1),
        Idle(drawn_spans(-random.randint(5, 50) / 2, one, 4, 3), 8, 9, 3),
        Idle(drawn_spans(1.7e5, many, 4, 6), 5, 8, 2),
        Idle(drawn_spans(3.0, one, 3, 4), 64, 2, 4),
    ]


def both_of(answer: Pair, case: Idle) -> dict:
    """The idle share, and the two numbers of the bubble."""
    idle_share, formulas = answer.parts
    numbers = [one for one in case[1:] if one is not None]
    shares = listing(number, "two numbers")(formulas(*numbers))
    if len(shares) != 2:
        words = "The first is relative to the ideal time, the second to the time that passes."
        raise Malformed(f"{len(shares)} numbers", "bubble returns two numbers.", words)
    return {"idle_share": float(number(idle_share(case.spans))), "bubble": list(map(float, shares))}


def tell_both(case: Idle) -> str:
    """Both calls, in words."""
    stops = [stop for mine in case.spans for *_, stop in mine]
    starts = [start for mine in case.spans for _, start, _ in mine]
    times = f"{len(case.spans)} ranks with spans from {show(min(starts))} to {show(max(stops))}"
    numbers = ", ".join(str(one) for one in case[1:] if one is not None)
    return f"idle_share of {times}, and bubble({numbers}):"


WHOLE_TIME = "The time of all ranks is (last stop - first start) of the whole pipeline, times p."
EMPTY = "p - 1 empty slots, divided by v, come on top of m slots of work."
TOTAL = "max(stop for *_, stop in every) - min(start for _, start, _ in every)"
WORK = "sum(stop - start for _, start, stop in every)"
SHARE = "return 1 - sum(stop - start for _, start, stop in every) / (total * len(spans))"
BOTH = "return empty / m, empty / (m + empty)"
bubble = Spec(
    todo="12.6",
    truth=Pair(truth.idle_share, truth.bubble),
    cases=idles,
    observe=both_of,
    tell=tell_both,
    same=lambda found, wanted, case: same(found, wanted, 1e-8),
    independent=True,
    advice={"idle_share": WHOLE_TIME, "bubble": EMPTY},
    hints=(
        "idle_share: the time of all ranks is (last stop - first start) of the whole pipeline, "
        "times the number of ranks. How much of it lies inside spans?",
        "bubble: with v = 1 a pipeline without a bubble would take m, and p - 1 come on top. The "
        "same p - 1 are divided by m, and by m + p - 1.",
        "With v stages per rank, write (p - 1)/v for p - 1 in both.",
    ),
    mistakes="""
        {SHARE} => return {WORK} / (total * len(spans)) ::
            idle_share gives the part of the time in which ranks work. | Subtract that from 1.
        {SHARE} => return 1 - {WORK} / total ::
            All work is compared with the time of one rank. | {WHOLE_TIME}
        {TOTAL} => max(stop for *_, stop in every) ::
            The time before the first start counts as idle. | Subtract the first start.
        {SHARE} => return total * len(spans) - {WORK} ::
            idle_share gives a time, not a share. | {WHOLE_TIME}
        {SHARE} => return 1 - {WORK} / sum(max(s[2] for s in mine) - min(s[1] for s in mine) for
            mine in spans) :: Each rank counts from its own first start to its own last stop.
        {TOTAL} => spans[-1][-1][2] - spans[0][0][1] ::
            The last rank's stop is taken for the end, but other ranks have backwards left.
        {BOTH} => return empty / (m + empty), empty / m ::
            The two numbers of bubble have changed places. | The one of ideal time comes first.
        Fraction(p - 1, v) => Fraction(p, v) ::
            The formulas have p where p - 1 slots are empty. | {EMPTY}
        Fraction(p - 1, v) => (p - 1) // v ::
            (p - 1) // v drops the rest of the division. | Use / or Fraction(p - 1, v).
        Fraction(p - 1, v) => Fraction(p - 1) ::
            The argument v is not used: with v stages a rank an empty slot is v times as short.
        Fraction(p - 1, v) => Fraction((p - 1) * v) ::
            The bubble grows with v here, and it should shrink.
        {BOTH} => return empty / m, empty / m ::
            Both numbers are relative to the ideal time. | The second is divided by m + empty.
        {BOTH} => return empty / m, empty / (m + p - 1) ::
            In the second number v counts above the line and not below.
        {BOTH} => return empty / m, Fraction(p - 1) / (m + p - 1) ::
            v is left out of the second number.
    """,
    module=globals(),
)
