"""When to save: the formulas, the account of a run's time, and runs that are really killed."""

import math
import random
from itertools import pairwise

import pytest

from manyhands.checkpoint import figures
from manyhands.checkpoint.goodput import Plan, events_of, lifetimes, note
from manyhands.checkpoint.interval import (
    Event,
    Spent,
    account,
    best_interval,
    expected_goodput,
    imagined,
    young_daly,
)
from manyhands.instruments.figures import png
from manyhands.programs import killed
from manyhands.ranks.failures import RankFailed
from manyhands.training.storage import stored


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1])
def test_young_and_daly_find_the_maximum_of_the_expected_goodput(ratio):
    """Daly's series is short: its relative error in tau stays below C/M, that of goodput far so."""
    save_s, mtbf_s = 1.0, 1 / ratio
    best_s = young_daly(save_s, mtbf_s)
    found = {s: expected_goodput(s, save_s, mtbf_s, 3.0) for s in _around(best_s)}
    true_s = max(found, key=found.get)
    assert abs(best_s / true_s - 1) < max(ratio / 10, 2e-3)  # the grid has steps of 0.1 %
    assert found[true_s] >= expected_goodput(best_s, save_s, mtbf_s, 3.0) > found[true_s] - 1e-5
    assert abs(math.sqrt(2 * save_s * mtbf_s) / true_s - 1) < math.sqrt(ratio)  # Young's alone


def _around(best_s: float) -> list[float]:
    return [best_s * (0.5 + part / 1000) for part in range(1001)]


def test_a_restart_moves_no_maximum_and_endless_segments_make_no_progress():
    with_restart = [expected_goodput(s, 2.0, 50.0, 9.0) for s in _around(14.0)]
    without = [expected_goodput(s, 2.0, 50.0) for s in _around(14.0)]
    assert with_restart.index(max(with_restart)) == without.index(max(without))
    assert expected_goodput(1e6, 1.0, 10.0) == 0.0


def test_the_published_figures_of_llama_3_give_an_interval_of_minutes():
    mtbf_s = 54 * 86400 / 419
    assert round(mtbf_s / 3600, 1) == 3.1
    assert best_interval(60.0, 16384 * mtbf_s, 16384, 1.0) == round(young_daly(60.0, mtbf_s))


def test_the_formula_is_the_mean_of_a_simulation():
    """10^5 segments; the tolerance is four standard errors of the drawn mean."""
    save_s, mtbf_s, restart_s, interval_s, count = 0.5, 10.0, 2.0, 6.0, 100_000
    draw = random.Random(5)
    times_s = []
    for _ in range(count):
        time_s = 0.0
        while (life_s := draw.expovariate(1 / mtbf_s)) < interval_s + save_s:
            time_s += life_s + restart_s
        times_s.append(time_s + interval_s + save_s)
    mean_s = math.fsum(times_s) / count
    variance = math.fsum((one - mean_s) ** 2 for one in times_s) / (count - 1)
    expected_s = interval_s / expected_goodput(interval_s, save_s, mtbf_s, restart_s)
    assert abs(mean_s - expected_s) < 4 * math.sqrt(variance / count)


def test_an_imagined_run_agrees_with_the_formula_and_its_account_is_complete():
    costs, interval, mtbf_s = (0.01, 0.03, 0.2), 15, 0.4
    spent = []
    for seed in range(60):
        events = imagined(lifetimes(mtbf_s, 1000, seed), 300, interval, *costs)
        spent.append(account(events))
        assert sum(spent[-1]) == pytest.approx(events[-1].time_s - events[0].time_s)
        assert spent[-1].useful == pytest.approx(300 * costs[0])
    goodput = sum(one.useful for one in spent) / sum(map(sum, spent))
    times_s = [sum(one) for one in spent]
    mean_s = sum(times_s) / len(times_s)
    spread = math.sqrt(sum((s - mean_s) ** 2 for s in times_s) / len(times_s)) / mean_s
    expected = expected_goodput(interval * costs[0], *costs[1:2], mtbf_s, costs[2])
    assert abs(goodput / expected - 1) < 4 * spread / math.sqrt(len(spent))
    with pytest.raises(ValueError, match="give it more lifetimes"):
        imagined([0.001] * 5, 300, 15, *costs)


def test_events_after_a_kill_are_left_out(tmp_path):
    for kind, step in [("resumed", 0), ("step", 1), ("killed", 0), ("step", 2), ("resumed", 0)]:
        note(str(tmp_path), kind, step)
    kinds = [event.kind for event in events_of(str(tmp_path))]
    assert kinds == ["resumed", "step", "killed", "resumed"]


def test_killed_runs_end_with_the_weights_of_an_undisturbed_one(tmp_path):
    """Real ranks, real kills: in a step, in a save (times are drawn), and one after the other."""
    undisturbed, _ = killed.survive(Plan(str(tmp_path / "calm"), 30, 30))
    lives = (0.1, 0.02, 0.07, 0.15)
    states, events = killed.survive(Plan(str(tmp_path / "killed"), 30, 4, 0.01, lives))
    assert states == undisturbed
    assert sum(event.kind == "killed" for event in events) == len(lives)
    assert sum(account(events)) == pytest.approx(events[-1].time_s - events[0].time_s)
    saved = 0  # every life begins with the newest complete checkpoint
    for before, event in pairwise(events):
        assert before.time_s <= event.time_s
        if event.kind == "resumed":
            assert event.step in (saved, saved + 4)  # its last words may be lost in the kill
        saved = event.step if event.kind in ("saved", "resumed") else saved


def test_a_rank_that_nobody_killed_is_an_error(tmp_path):
    with pytest.raises(RankFailed, match="ZeroDivisionError"):
        killed.survive(Plan(str(tmp_path), 8, interval=0))


def test_the_stored_run_is_right_and_near_the_formula(capsys):
    kept = stored("checkpoint", "goodput")
    runs = killed.runs_of(kept)
    costs = killed.paid(runs, kept["num_steps"])
    assert all(run.is_right for run in runs)
    assert costs.save_s > 0 and sum(run.num_kills for run in runs) > 100
    for group in figures.by_interval(runs).values():
        total = figures.total_of(group)
        assert isinstance(total, Spent) and 0 < total.goodput < 1
    picture = figures.goodput_by_interval(runs, costs, kept["mtbf_s"], kept["num_steps"])
    assert len(picture.axes) == 2 and png(picture)


def test_what_was_paid_is_what_the_events_say():
    events = [Event("resumed", 0, 0.0), Event("step", 1, 2.0), Event("saved", 1, 5.0)]
    run = killed.Run(1, 0, account(events), 0, 1, True)
    assert killed.paid([run], 1) == killed.Costs(2.0, 3.0, 0.0)
