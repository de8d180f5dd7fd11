"""When to save: the interval between two checkpoints that wastes the least time.

    save   steps   save   steps   X                  X: a rank dies
    --C--|---tau---|--C--|--tau.. |--R--|---tau---   R: noticed, started again, loaded
                         '- lost -'                  all since the last save is done again

Saving costs C for each tau of work, so rare saves are cheap. A failure costs R and on average half
of what lies between two saves, so frequent saves lose little. With one failure per M of time the
share lost is about C/tau + (tau + C)/(2 M) + R/M, which is least at tau = sqrt(2 C M).

Price: none; these are formulas, and an account of times that a run has written down.
Sources: Young 1974, "A first order approximation to the optimum checkpoint interval",
https://doi.org/10.1145/361147.361115; Daly 2006, "A higher order estimate of the optimum checkpoint
interval for restart dumps", https://doi.org/10.1016/j.future.2004.11.016.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple


def young_daly(save_s: float, mtbf_s: float) -> float:
    """Seconds of work between two saves that waste the least time: Daly's estimate.

    With x = sqrt(save_s / (2 mtbf_s)) it is sqrt(2 save_s mtbf_s) (1 + x/3 + x^2/9) - save_s, of
    which the first factor is Young's estimate. Where a save takes 2 mtbf_s or longer, it is mtbf_s.

    Args:
        save_s: how long training stands still for one save.
        mtbf_s: the mean time between two failures of the job, in seconds.
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    x = math.sqrt(save_s / (2 * mtbf_s))
    return math.sqrt(2 * save_s * mtbf_s) * (1 + x / 3 + x**2 / 9) - save_s


def best_interval(save_s: float, node_mtbf_s: float, num_nodes: int, step_s: float) -> int:
    """Steps between two saves, by `young_daly`; the nearest whole number, and at least 1.

    Args:
        save_s: how long training stands still for one save.
        node_mtbf_s: the mean time between two failures of ONE node. Nodes fail independently, and
            the job ends when any of them does.
        num_nodes: of the job.
        step_s: how long a step takes.
    """
    interval_s = young_daly(save_s, node_mtbf_s / num_nodes)
    return max(1, round(interval_s / step_s))


def expected_goodput(
    interval_s: float, save_s: float, mtbf_s: float, restart_s: float = 0.0
) -> float:
    """The share of all time that makes steps which are kept, as an expected value.

    A segment is interval_s of steps and the save after it: s = interval_s + save_s. It is tried
    again until no failure hits it. Times between failures are exponential with mean M, and a
    restart itself does not fail. A try survives with probability e^(-s/M), so e^(s/M) - 1 tries
    fail; the tries together take M (e^(s/M) - 1), and every failure adds restart_s:

        interval_s / ((M + restart_s) (e^(s/M) - 1))

    The restart is a factor of its own, so it moves no maximum. Daly has M e^(restart_s/M) in its
    place, because there restarts fail as well; for restart_s << M the two are equal.
    """
    exponent = (interval_s + save_s) / mtbf_s
    if exponent > 700:  # e^700 is the largest that a float can hold, more or less
        return 0.0
    return interval_s / ((mtbf_s + restart_s) * math.expm1(exponent))


class Event(NamedTuple):
    """One line of a run's log.

    kind    "resumed"  the ranks have loaded `step` steps and begin; the first event of a run
            "step"     step number `step` is done
            "saved"    a checkpoint with `step` steps is complete
            "killed"   a rank is gone; `step` says nothing
    time_s  on one clock for all events
    """

    kind: str
    step: int
    time_s: float


class Spent(NamedTuple):
    """Seconds of a run by what they went for; together all of its time."""

    useful: float  # steps that are part of the final weights
    saving: float
    again: float  # steps that were lost, and steps and saves that were cut short
    restarting: float  # from a failure until the ranks have loaded

    @property
    def goodput(self) -> float:
        """The useful share of all time."""
        return self.useful / sum(self)


def account(events: Sequence[Event]) -> Spent:
    """Say where the time of a run went, from its log.

    The time between two events belongs to the second one: to a step, a save, a restart that ends in
    "resumed". What a kill cuts short is lost, and so are the steps after the one from which the run
    resumes, which need not be the last one that was saved. A kill that comes before the ranks have
    resumed from the kill before it is a part of the restart.

    Args:
        events: in order of time; the first is a "resumed", the last one no "killed".
    """
    saving = again = restarting = 0.0
    kept: list[tuple[int, float]] = []  # each step that is part of the weights, and its seconds
    for before, event in pairwise(events):
        seconds = event.time_s - before.time_s
        if event.kind == "step":
            kept.append((event.step, seconds))
        elif event.kind == "saved":
            saving += seconds
        elif event.kind == "resumed" or before.kind == "killed":
            restarting += seconds
        else:
            again += seconds
        if event.kind == "resumed":
            again += sum(s for step, s in kept if step > event.step)
            kept = [(step, s) for step, s in kept if step <= event.step]
    return Spent(sum(s for _, s in kept), saving, again, restarting)


def imagined(
    lifetimes_s: Iterable[float],
    num_steps: int,
    interval: int,
    step_s: float,
    save_s: float,
    restart_s: float = 0.0,
) -> list[Event]:
    """The log of a run that lives for these times, one after the other, without running it.

    Args:
        lifetimes_s: from a "resumed" to the next failure; more of them than are needed.
        num_steps: of the whole run, which saves after every `interval` steps and at its end.
    """
    now_s = 0.0
    saved = 0
    events = [Event("resumed", 0, now_s)]
    for lifetime_s in lifetimes_s:
        dies_s = now_s + lifetime_s
        step = saved
        while step < num_steps and now_s + step_s <= dies_s:
            step += 1
            now_s += step_s
            events.append(Event("step", step, now_s))
            if step % interval and step < num_steps:
                continue
            if now_s + save_s > dies_s:
                break
            now_s += save_s
            saved = step
            events.append(Event("saved", step, now_s))
        if saved == num_steps:
            return events
        now_s = dies_s + restart_s
        events += [Event("killed", step, dies_s), Event("resumed", saved, now_s)]
    raise ValueError(f"the run has not ended after {len(events)} events: give it more lifetimes")
