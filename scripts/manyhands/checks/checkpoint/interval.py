"""11.9 and 11.10: how often to save, and where the time of a run went."""

import random
from itertools import pairwise
from typing import NamedTuple

from manyhands.checkpoint import interval as truth
from manyhands.checkpoint.interval import Event, Spent
from manyhands.checks.engine.answer import Pair
from manyhands.checks.engine.spec import Spec
from manyhands.checks.engine.values import integer, number, record

# ---- 11.9 -----------------------------------------------------------------------------------

SERIES = "(1 + x / 3 + x**2 / 9) - save_s"
ROOT = "math.sqrt(2 * save_s * mtbf_s)"
NEAREST = "round() takes the nearest whole number; max(1, ...) leaves at least one step."


class Saving(NamedTuple):
    """One call of both functions."""

    save_s: float
    mtbf_s: float  # for young_daly
    node_mtbf_s: float
    num_nodes: int
    step_s: float


def a_saving(save_s: float, mtbf_s: float, num_nodes: int, steps: float) -> Saving:
    """A job whose best interval is this many steps, of which a fraction may be left."""
    best_s = truth.young_daly(save_s, mtbf_s)
    other_s = mtbf_s * random.uniform(0.6, 1.6)
    return Saving(save_s, other_s, mtbf_s * num_nodes, num_nodes, best_s / steps)


def savings() -> list[Saving]:
    """Rare and frequent failures, one node and many, fractions of steps, saves longer than M."""
    save_s = random.uniform(5.0, 60.0)
    day_s = random.uniform(60_000.0, 100_000.0)
    hour_s = random.uniform(1_000.0, 4_000.0)
    nodes = random.randint(70, 900)
    steps = random.randint(20, 90)
    long_s = random.uniform(3.0, 5.0) * hour_s
    return [
        a_saving(save_s, day_s, 1, steps + 0.1),
        a_saving(save_s, hour_s, nodes, steps + 0.7),
        a_saving(save_s, hour_s, nodes + 3, steps + 0.3),
        a_saving(save_s, hour_s, 2, 0.2),
        # At the limit for young_daly only: dividing by the nodes in another way rounds elsewhere.
        a_saving(2 * hour_s, 1.7 * hour_s, nodes, steps + 0.2)._replace(mtbf_s=hour_s),
        Saving(1.5 * hour_s, hour_s, 3 * hour_s, 3, hour_s / (steps + 0.3)),
        Saving(long_s, hour_s, 5 * hour_s, 5, hour_s / (steps + 0.6)),
        Saving(0.0, hour_s, day_s, nodes, 1.0),
    ]


def both_intervals(answer: Pair, case: Saving) -> dict:
    """The seconds and the steps."""
    young_daly, best_interval = answer.parts
    steps = best_interval(case.save_s, case.node_mtbf_s, case.num_nodes, case.step_s)
    seconds = young_daly(case.save_s, case.mtbf_s)
    return {"young_daly": float(number(seconds)), "best_interval": integer(steps)}


def tell_saving(case: Saving) -> str:
    """Both calls, in words."""
    return (
        f"young_daly({case.save_s:.6g}, {case.mtbf_s:.6g}), and best_interval({case.save_s:.6g}, "
        f"{case.node_mtbf_s:.6g}, {case.num_nodes}, {case.step_s:.6g}):"
    )


best_interval = Spec(
    todo="11.9",
    truth=Pair(truth.young_daly, truth.best_interval),
    cases=savings,
    observe=both_intervals,
    tell=tell_saving,
    independent=True,
    advice={
        "young_daly": "Compute x first, then Young's square root times the series, minus the save.",
        "best_interval": "Take the job's mean time between failures, then seconds, then steps.",
    },
    hints=(
        "young_daly is the docstring's formula, with one exception: where a save takes 2 mtbf_s "
        "or longer, the answer is mtbf_s.",
        "best_interval: if a node fails once in node_mtbf_s, then num_nodes of them have that many "
        "times as many failures. Call young_daly with the mean time between failures of the job.",
        "The seconds between two saves divided by step_s are steps. Round them to the nearest "
        "whole number, and take 1 where that would be 0.",
    ),
    mistakes="""
        {SERIES} => 1 :: This is Young's estimate without Daly's correction. | Multiply by 1 + x/3 +
            x^2/9, and subtract save_s.
        {SERIES} => (1 + x / 3 + x**2 / 9) ::
            The time of the save is not subtracted, so this is from one save's beginning to the next
            one's. | The interval is the work between two saves: subtract save_s.
        {ROOT} => math.sqrt(save_s * mtbf_s) ::
            The 2 under the square root is missing. | It is sqrt(2 save_s mtbf_s).
        {ROOT} => 2 * save_s * mtbf_s :: The square root is missing.
        if save_s >= 2 * mtbf_s: => if False: :: The series is used where a save takes 2 mtbf_s or
            longer, where it does not hold. | Return mtbf_s there.
        if save_s >= 2 * mtbf_s: => if save_s >= mtbf_s: :: mtbf_s is returned too early: the series
            holds as long as a save takes less than twice that time.
        math.sqrt(save_s / (2 * mtbf_s)) => math.sqrt(save_s / 2 * mtbf_s) ::
            x is the root of save_s / 2 times mtbf_s: / and * are taken from left to right. | x =
            sqrt(save_s / (2 mtbf_s))
        math.sqrt(save_s / (2 * mtbf_s)) => save_s / (2 * mtbf_s) :: x lacks its square root.
        node_mtbf_s / num_nodes) => node_mtbf_s) :: The number of nodes is not used. | The job ends
            when any node fails, so its mean time is node_mtbf_s / num_nodes.
        node_mtbf_s / num_nodes) => node_mtbf_s * num_nodes) :: More nodes make failures rarer here.
        young_daly(save_s, => young_daly(save_s / num_nodes, :: The save is divided by the number of
            nodes, but save_s is already the time for which the whole job stands still.
        max(1, round(interval_s / step_s)) => round(interval_s / step_s) :: Where a step takes
            longer than the interval there are 0 steps between two saves. | {NEAREST}
        round(interval_s / step_s) => round(interval_s) ::
            These are seconds, and steps are asked for. | Divide by step_s.
        round(interval_s / step_s) => int(interval_s / step_s) ::
            The fraction of a step is cut off. | {NEAREST}
        round(interval_s / step_s) => math.ceil(interval_s / step_s) ::
            The fraction of a step is always rounded up.
    """,
    module=globals(),
)

# ---- 11.10 -----------------------------------------------------------------------------------

LOST = "At each resumed, move the steps after event.step from the useful ones to `again`."
BELONGS = "The time between two events belongs to the second one."
MOVED = "again += sum(s for step, s in kept if step > event.step)"
KEPT = "kept = [(step, s) for step, s in kept if step <= event.step]"
EITHER = 'event.kind == "resumed" or before.kind == "killed"'


class Log(NamedTuple):
    """One call of account."""

    events: list[Event]


def log_of(text: str, start_s: float = 0.0) -> Log:
    """A log from words: a number is that step, s5 a save, r5 a resumed, k a kill; times drawn."""
    kinds = {"s": "saved", "r": "resumed", "k": "killed"}
    events = []
    time_s = start_s
    for word in text.split():
        kind = kinds.get(word[0], "step")
        step = int(word.lstrip("srk") or 0)
        events.append(Event(kind, step, time_s))
        time_s += random.randint(1, 80) / 8
    return Log(events)


def logs() -> list[Log]:
    """No kill; kills in a step, before any save, while restarting; a damaged checkpoint."""
    begin_s = float(random.randint(1, 50))
    return [
        log_of("r0 1 2 s2 3"),
        log_of("r0 1 2 s2 3 4 k r2 3 4 s4 5", begin_s),
        log_of("r0 1 2 3 k r0 1 2 k r0 1 2 3 4 s4", begin_s),
        log_of("r0 1 2 s2 3 4 s4 5 k r2 3 4 s4 5 6 s6"),
        log_of("r0 1 2 3 s3 4 k k r3 4 5 6 k k k r3 4 5 6 s6"),
        log_of("r40 41 42 s42 43 44 r42 43 44 s44 45", 1.7e5),
        log_of("r7 8 9 s9 10 11 s11 12 k r9 10 k r9 10 11 s11 12 13 k k r11 12 k r9 10", begin_s),
    ]


def by_last_save(events: list[Event]) -> Spent:
    """A resume is thought to begin at the last save, whatever its event says."""
    told = []
    saved = events[0].step
    for event in events:
        saved = event.step if event.kind == "saved" else saved
        told.append(event._replace(step=saved) if event.kind == "resumed" else event)
    return truth.account(told)


def second_times(events: list[Event]) -> Spent:
    """A step is useful when it is done first, and done again when it is done a second time."""
    spent = dict.fromkeys(Spent._fields, 0.0)
    done = set()
    for before, event in pairwise(events):
        seconds = event.time_s - before.time_s
        if event.kind == "step":
            spent["again" if event.step in done else "useful"] += seconds
            done.add(event.step)
        elif event.kind == "saved":
            spent["saving"] += seconds
        else:
            is_restart = event.kind == "resumed" or before.kind == "killed"
            spent["restarting" if is_restart else "again"] += seconds
    return Spent(**spent)


def sum_of(found: dict, wanted: dict, case: Log) -> str:
    """Do the four causes add up to all time?"""
    log_s = case.events[-1].time_s - case.events[0].time_s
    found_s = sum(found.values())
    if abs(found_s - log_s) < 1e-6:
        return ""
    return f"The four add up to {found_s:g} s, and the log is {log_s:g} s long."


def tell_log(case: Log) -> str:
    """The events in words."""
    words = [
        f"{event.kind}{'' if event.kind == 'killed' else f' {event.step}'} at {event.time_s:g} s"
        for event in case.events
    ]
    return f"account of {', '.join(words)}:"


account = Spec(
    todo="11.10",
    truth=truth.account,
    cases=logs,
    form=record(Spent._fields),
    tell=tell_log,
    facts=sum_of,
    independent=True,
    advice={
        "": BELONGS,
        "useful": "Which steps are part of the final weights? Add up their seconds.",
        "saving": "Add up the seconds before each saved.",
        "again": "These are steps after the one that the run resumes from, and what a kill cuts.",
        "restarting": "From a killed to its resumed, with all kills between them.",
    },
    hints=(
        "Go through the events in pairs, before and event. The seconds between the two belong to "
        "event: to a step, a save, a restart, or to what a kill has cut short.",
        "Keep a list with the number and the seconds of every step that counts so far. A resumed "
        "at step n takes the steps after n out of it, and their seconds belong to `again`.",
        "A killed that follows a killed is a restart that failed: its seconds belong to "
        "`restarting`. Every other killed has cut a step or a save short: `again`.",
    ),
    mistakes=r"""
        {MOVED} => pass ::
            The steps that were lost are taken from the useful ones and charged to nothing. | {LOST}
        {KEPT} => pass :: The steps that were lost are charged, but they count as useful as well.
        {MOVED} => pass
        {KEPT} => pass :: Steps that were lost count as useful.
        step > event.step => step >= event.step
        step <= event.step => step < event.step :: The step that the checkpoint holds counts as
            lost, but it is part of the weights. | Only steps after event.step are lost.
        {EITHER} => event.kind == "resumed" :: A kill in the midst of a restart is charged to
            `again`. | Until the ranks have resumed, all time belongs to `restarting`.
        {EITHER} => before.kind == "killed" :: A restart that follows no kill, such as one at a time
            limit, is charged to `again`. | All time before a resumed belongs to `restarting`.
        else:\n            again += seconds => else:\n            pass ::
            What a kill cuts short is in no account. | It belongs to `again`.
        else:\n            again += seconds => else:\n            restarting += seconds ::
            What a kill cuts short is charged to the restart. | Until the kill, ranks worked: it
            belongs to `again`.
        saving += seconds => kept.append((event.step, seconds)) ::
            Saves count as useful steps. | The seconds before a saved belong to `saving`.
        event.time_s - before.time_s => event.time_s ::
            These are times on the clock. | {BELONGS} Subtract.
        return Spent(sum(s for _, s in kept), => return Spent(len(kept), ::
            Steps are counted, and seconds are asked for. | Add up the seconds of the steps.
        instead by_last_save :: Steps are taken for lost after the last save, but the run resumed
            from an older one. | The resumed event says from which step.
        instead second_times :: A step that is done a second time is charged, but the second one is
            part of the weights, and the first one was lost. | {LOST}
    """,
    module=globals(),
)
