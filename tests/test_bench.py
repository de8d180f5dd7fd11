"""The bench measures what it says; no test here asserts a time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import bench
from manyhands import checks
from manyhands.instruments.ledger import Ledger, calls
from manyhands.ranks.lab import run_ranks
from manyhands.ranks.runtime import BadInput

SCRIPT = Path(bench.__file__)
ROW = {"name", "value", "goal", "unit", "note"}


def measured(config: bench.Config) -> dict:
    bench.main(config)
    return json.loads(Path(config.out).read_text())


def test_row_names_are_unique_and_complete():
    rows = [row for measure in bench.MEASURES for row in measure.rows]
    assert len({name for name, *_ in rows}) == len(rows) == 16
    assert all(name and goal and unit for name, goal, unit in rows)


def test_as_a_script_it_measures_one_row(tmp_path):
    out = tmp_path / "bench.json"
    flags = ["--only", "run_ranks", "--out", str(out)]
    done = subprocess.run([sys.executable, SCRIPT, *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    content = json.loads(out.read_text())
    (row,) = content["rows"]
    assert set(row) == ROW and row["name"] == "run_ranks 4 ranks warm"
    assert row["value"] > 0 and row["goal"] == "< 0.5" and "9 repeats" in row["note"]
    assert row["name"] in done.stdout and "load_average" in done.stdout
    wanted = {"cpu", "cores", "memory_bytes", "torch", "threads", "gpus", "load_average"}
    assert wanted <= set(content["machine"])


def test_import_row_counts_every_lesson(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(bench, "IMPORT_ROUNDS", 2)
    real = bench.import_once
    monkeypatch.setattr(bench, "import_once", lambda names: seen.append(names) or real(names))
    (row,) = measured(bench.Config(only="import", out=str(tmp_path / "b.json")))["rows"]
    assert set(row) == ROW and "1 repeats" in row["note"]
    bare, ours = sorted(set(seen), key=len)
    assert bare == "torch, torch.distributed" and seen.count(bare) == seen.count(ours) == 2
    for lesson, _ in bench.all_exercises():
        assert f"manyhands.{lesson.module}" in ours


def test_char_recipe_trains_for_real(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat.\n" * 500)
    small = ("--layers=1", "--block=16", "--batch=12", "--steps=24")
    monkeypatch.setattr(bench, "CHAR_RECIPE", small)
    monkeypatch.setattr(bench, "CHAR_SEEDS", (1,))
    config = bench.Config(only="char", out=str(tmp_path / "b.json"), data=str(text))
    loss, rate = measured(config)["rows"]
    assert 1 < loss["value"] < 2 and rate["value"] > 0  # the full recipe learns this text by heart
    assert "text.txt" in loss["note"] and "--steps=24" in rate["note"]


def test_char_recipe_says_how_to_get_its_data(tmp_path):
    rows = measured(bench.Config(only="char", out=str(tmp_path / "b.json")))["rows"]
    assert [row["value"] for row in rows] == [None, None]
    assert all("skipped" in row["note"] and "--data FOLDER" in row["note"] for row in rows)
    (row,) = measured(bench.Config(only="tokens/s", out=str(tmp_path / "b.json")))["rows"]
    assert row["name"] == "char recipe tokens/s"


def test_bad_input_is_one_line(tmp_path):
    with pytest.raises(BadInput, match="'nothing' is in no row's name: ring all-reduce .*, d.*"):
        bench.main(bench.Config(only="nothing", out=str(tmp_path / "b.json")))
    with pytest.raises(BadInput, match="cannot write .*choose another --out"):
        bench.main(bench.Config(only="char", out=str(tmp_path / "none" / "b.json")))
    missing = str(tmp_path / "missing")
    with pytest.raises(BadInput, match="no such folder or file"):
        bench.main(bench.Config(only="char", out=str(tmp_path / "b.json"), data=missing))


def test_works_are_timed_in_turn():
    order = []
    times_s = bench.in_turn([lambda: order.append("A"), lambda: order.append("B")], 3)
    assert "".join(order) == "ABBAAB"
    assert [len(work) for work in times_s] == [3, 3]


def test_slowest_rank_is_taken_round_by_round():
    rank_0, rank_1 = [[1.0, 5.0], [3.0, 3.0]], [[2.0, 4.0], [9.0, 1.0]]
    assert bench.slowest_rank([rank_0, rank_1]) == [[2.0, 5.0], [9.0, 3.0]]


@pytest.mark.parametrize(
    ("fn", "num_works"),
    [(bench.time_ddp, 2), (bench.time_scaling, 3), (bench.time_samples, 2)]
    + [(bench.time_stopwatches, 2)],
)
def test_steps_run_on_real_ranks(fn, num_works):
    times_s = run_ranks(fn, 2, bench.Shape(layers=1, vocab=9, block=4, batch=2), 3)
    assert all(len(works) == num_works for works in times_s)
    assert all(len(work) == 3 and min(work) > 0 for works in times_s for work in works)


@pytest.mark.parametrize(
    ("fn", "size", "number"),
    [(bench.time_pipeline, bench.Shape(1, 9, 4, 4), 2), (bench.time_tensor, 16, 2)],
)
def test_both_ways_of_model_parallelism_are_timed(fn, size, number):
    times_s = run_ranks(fn, 2, size, number, 3)
    assert all(len(works) == 2 for works in times_s)
    assert all(len(work) == 3 and min(work) > 0 for works in times_s for work in works)


def test_ring_row_times_both_on_the_same_four_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "RING_BYTES", 4_000)
    (row,) = measured(bench.Config(only="ring", out=str(tmp_path / "b.json")))["rows"]
    assert set(row) == ROW and row["name"] == "ring all-reduce by hand / native"
    assert row["value"] > 0 and row["goal"] == "<= 1.25" and "40 repeats" in row["note"]
    by_hand, native = run_ranks(bench.time_ring, 2, 4_000, 3)[0]
    assert len(by_hand) == len(native) == 3 and min(by_hand + native) > 0


def test_ring_row_compares_the_ring_with_gloos_own(monkeypatch):
    def calls_of_each():
        works = []
        bench.in_turn = lambda given, num_rounds: works.extend(given)
        bench.time_ring(4_000, 1)
        return [dict(ledger_calls(work)) for work in works[:2]]

    (by_hand, native), _ = run_ranks(calls_of_each, 2)
    assert by_hand == {"send": 2, "recv": 2} and native == {"all_reduce": 1}


def ledger_calls(work):
    with Ledger() as ledger:
        work()
    return calls(ledger.entries)


def test_cost_rows_tell_of_one_meter_where_many_were_timed(tmp_path, monkeypatch):
    times_s = {"time_samples": [[1.2] * 30, [1.0] * 30], "time_stopwatches": [[2.0] * 30] * 2}
    monkeypatch.setattr(bench.lab, "run_ranks", lambda fn, *_, **__: [times_s[fn.__name__]] * 2)
    samples, stopwatch = measured(bench.Config(only="cost", out=str(tmp_path / "b.json")))["rows"]
    assert samples["name"] == "samples cost / training" and samples["value"] == 1.02
    assert stopwatch["name"] == "stopwatch cost / training" and stopwatch["value"] == 1.0
    assert samples["goal"] == stopwatch["goal"] == "<= 1.01" and "30 repeats" in samples["note"]


def test_numbers_are_plain():
    assert bench.spread([21345.4, 0.95, 2.0]) == "0.950 to 21,345, 3 repeats"


def test_matmul_work_is_counted_exactly():
    work, flops = bench.matmuls(4, 5, 6, flops=1000)
    work()
    assert flops == 4 * 2 * 4 * 5 * 6  # 240 each; 1000 is nearest to four of them


def test_every_exercise_has_an_answer_where_it_is_defined():
    pairs = bench.all_exercises()
    assert pairs
    for lesson, exercise in pairs:
        answer = bench.answer_of(lesson, exercise.name)
        assert callable(answer) and answer.__name__ == exercise.name
        assert ".checks" not in answer.__module__
    for name in ("no_such_answer", "Tensor"):  # the lesson imports Tensor, it does not define it
        with pytest.raises(LookupError, match=f"defines {name}"):
            bench.answer_of(checks.Lesson("ddp"), name)


def test_a_refused_answer_gives_no_time(monkeypatch):
    lesson = checks.Lesson("ddp")

    @lesson.exercise("6.5")
    def average_gradients(answer) -> None:
        raise checks.Wrong("this check refuses all answers")

    pairs = [(lesson, one) for one in lesson.exercises.values()]
    monkeypatch.setattr(bench, "all_exercises", lambda: pairs)
    ((value, note),) = bench.verdicts(bench.Config())
    assert value is None and "6.5 average_gradients" in note
