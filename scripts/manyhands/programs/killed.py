"""Runs a training that is killed, at several intervals between saves, and accounts for its time.

    rehearse    what a step, a save and a restart cost on this machine
    measure     the same training at each interval: where its time went, and did it come out right
    paid        what steps, saves and restarts cost in these runs: for the formula's curve

Ranks are real processes of this machine, which SIGKILL ends at times drawn from a seed. The others
lose their partner and end too, and all are started again, as torchrun or a scheduler would do.
"""

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from manyhands.checkpoint.goodput import Plan, events_of, lifetimes, train
from manyhands.checkpoint.interval import Event, Spent, account, best_interval, imagined
from manyhands.ranks.failures import RankFailed
from manyhands.ranks.lab import run_ranks

STEP_S = 0.005
LIVES = 1000  # no run needs more
FACTORS = (0.25, 1, 2, 4)  # intervals, in units of the one that is predicted to be best
REMAKE = "python -c \"from manyhands.programs.killed import store; store('goodput.json')\""


class Costs(NamedTuple):
    """What a training costs, each the mean of several."""

    step_s: float
    save_s: float
    restart_s: float


class Run(NamedTuple):
    """One training at one interval."""

    interval: int  # steps
    seed: int
    spent: Spent
    num_kills: int
    num_saves: int
    is_right: bool  # its final state is an undisturbed run's, bit for bit


def survive(plan: Plan, num_ranks: int = 2) -> tuple[list[str], list[Event]]:
    """Start the ranks until they get through; returns the SHA-256 of their states, and the log.

    Raises:
        RankFailed: a rank has failed that nobody has killed.
    """
    Path(plan.folder).mkdir(parents=True, exist_ok=True)
    for life in range(len(plan.lifetimes_s) + 1):
        try:
            states = run_ranks(train, num_ranks, plan, life, quiet=True)
            return states, events_of(plan.folder)
        except RankFailed:
            if events_of(plan.folder)[-1].kind != "killed":
                raise
    raise AssertionError("the last life has no end")


def rehearse(where: str | Path = ".", num_ranks: int = 2) -> Costs:
    """Train for a second with three kills, and return what that cost.

    Args:
        where: a folder on the disk that is to be measured.
    """
    with TemporaryDirectory(dir=where) as folder:
        _, events = survive(Plan(folder, 80, 10, STEP_S, (0.2, 0.2, 0.2)), num_ranks)
    step_s, save_s, restart_s = (lengths_s(events, kind) for kind in ("step", "saved", "resumed"))
    later = restart_s[1:] or restart_s  # the first restart warms up
    return Costs(*map(statistics.fmean, (step_s, save_s, later)))


def lengths_s(events: Sequence[Event], kind: str) -> list[float]:
    """The seconds before each event of a kind."""
    return [b.time_s - a.time_s for a, b in pairwise(events) if b.kind == kind]


def measure(
    intervals: Sequence[int],
    num_steps: int,
    mtbf_s: float,
    seeds: Sequence[int] = (0,),
    where: str | Path = ".",
    num_ranks: int = 2,
) -> list[Run]:
    """Train at each interval, with kills drawn from each seed: the same lifetimes at all intervals.

    Args:
        mtbf_s: the mean time between two kills, counted while the ranks train.
    """
    with TemporaryDirectory(dir=where) as folder:
        undisturbed, _ = survive(Plan(folder, num_steps, num_steps), num_ranks)
    runs = []
    for seed in seeds:
        lives = lifetimes(mtbf_s, LIVES, seed)
        for interval in intervals:
            with TemporaryDirectory(dir=where) as folder:
                states, events = survive(
                    Plan(folder, num_steps, interval, STEP_S, lives), num_ranks
                )
            counts = [sum(one.kind == kind for one in events) for kind in ("killed", "saved")]
            runs.append(Run(interval, seed, account(events), *counts, states == undisturbed))
    return runs


def paid(runs: Sequence[Run], num_steps: int) -> Costs:
    """What a step, a save and a restart have cost in these runs, on average."""
    spent = [sum(seconds) for seconds in zip(*(run.spent for run in runs), strict=True)]
    num_kills = sum(run.num_kills for run in runs)
    num_saves = sum(run.num_saves for run in runs)
    restart_s = spent[3] / num_kills if num_kills else 0.0
    return Costs(spent[0] / (num_steps * len(runs)), spent[1] / num_saves, restart_s)


def by_chance(
    costs: Costs, interval: int, num_steps: int, mtbf_s: float, count: int = 100
) -> list[float]:
    """Goodputs of imagined runs that differ in nothing but their kills, in ascending order."""
    return sorted(
        account(imagined(lifetimes(mtbf_s, LIVES, seed), num_steps, interval, *costs)).goodput
        for seed in range(count)
    )


# ---- a run that takes minutes, and is kept -------------------------------------------------------


def store(path: str | Path, num_seeds: int = 12, where: str | Path = ".") -> None:
    """Measure seven intervals with many draws of the kills, and write the runs as JSON."""
    costs = rehearse(where)
    mtbf_s = 10 * costs.save_s
    best = best_interval(costs.save_s, mtbf_s, 1, costs.step_s)
    intervals = sorted(
        {max(1, round(best * factor)) for factor in (1 / 8, 1 / 4, 1 / 2, 1, 2, 3, 4)}
    )
    runs = measure(intervals, 8 * best, mtbf_s, range(num_seeds), where)
    about = {
        "remake": REMAKE,
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "device": "CPU",
        "ranks": 2,
        "note": "a busy machine: each interval has met the same kills, the curve takes paid costs",
        "num_steps": 8 * best,
        "mtbf_s": mtbf_s,
        "runs": [[run.interval, run.seed, list(run.spent), *run[3:]] for run in runs],
    }
    Path(path).write_text(json.dumps(about) + "\n")


def runs_of(stored: Mapping) -> list[Run]:
    """The runs that `store` has written."""
    return [
        Run(interval, seed, Spent(*spent), *rest) for interval, seed, spent, *rest in stored["runs"]
    ]
