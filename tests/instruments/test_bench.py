"""The bench measures what it says; no test here asserts a time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import bench
from manyhands.checks.engine import bench as verdict_bench
from manyhands.checks.engine.card import Wrong
from manyhands.collectives import bench as ring_bench
from manyhands.data_parallel import bench as ddp_bench
from manyhands.instruments import bench as meters_bench
from manyhands.instruments import benchmark
from manyhands.instruments.ledger import Ledger, calls
from manyhands.instruments.timing import in_turn, slowest_rank
from manyhands.models import bench as flops_bench
from manyhands.pipeline import bench as pipeline_bench
from manyhands.ranks.failures import BadInput
from manyhands.ranks.lab import run_ranks
from manyhands.tensor import bench as tensor_bench
from manyhands.training import bench as char_bench

SCRIPT = Path(bench.__file__)
ROOT = SCRIPT.parents[1]
ROW = {"value", "unit", "goal", "note", "date", "code", "machine"}


def measured(tmp_path: Path, **options) -> dict[str, dict]:
    config = bench.Config(out=str(tmp_path / "b.json"), **options)
    bench.main(config)
    return json.loads(Path(config.out).read_text())["rows"]


def test_row_names_are_unique_and_their_files_are_there():
    rows = [row for measure in bench.measures() for row in measure.rows]
    assert len({row.name for row in rows}) == len(rows) == 21
    assert all(row.name and row.unit and bench.words_of(row) for row in rows)
    assert all(len(bench.code_hash(measure)) == 12 for measure in bench.measures())


def test_as_a_script_it_measures_one_row(tmp_path):
    out = tmp_path / "bench.json"
    flags = ["--only", "starting 4 ranks", "--out", str(out)]
    done = subprocess.run([sys.executable, SCRIPT, *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ((name, row),) = json.loads(out.read_text())["rows"].items()
    assert set(row) == ROW and name == "starting 4 ranks from a notebook, warm"
    assert row["value"] > 0 and row["goal"] == "< 0.5" and "9 repeats" in row["note"]
    assert name in done.stdout
    assert {"cpu", "cores", "memory_gib", "torch", "gpus"} <= set(row["machine"])


def fake_rows(monkeypatch, value: float = 1.0, *, fails: bool = False) -> None:
    """Two rows of our own in place of all others; the second may fail."""

    def second() -> list:
        if fails:
            raise benchmark.CannotMeasure("the answer is refused")
        return [(2.0, "two")]

    files = ("collectives/ring.py",)
    one = benchmark.Measure(lambda: [(value, "one")], (benchmark.Row("one", "<= 1", "s"),), files)
    two = benchmark.Measure(second, (benchmark.Row("two", "< 3", "time / time"),), files)
    monkeypatch.setattr(bench, "measures", lambda: [one, two])


def test_a_row_keeps_its_figure_until_it_is_measured_again(tmp_path, monkeypatch):
    fake_rows(monkeypatch)
    assert measured(tmp_path)["one"]["value"] == 1.0
    fake_rows(monkeypatch, 5.0)
    rows = measured(tmp_path, only="two")
    assert rows["one"]["value"] == 1.0 and rows["two"]["value"] == 2.0
    assert measured(tmp_path, only="one")["one"]["value"] == 5.0


def test_a_row_that_cannot_be_measured_fails_the_command(tmp_path, monkeypatch):
    fake_rows(monkeypatch, fails=True)
    with pytest.raises(BadInput, match="could not be measured: two: the answer is refused"):
        measured(tmp_path)
    assert list(json.loads((tmp_path / "b.json").read_text())["rows"]) == ["one"]


def test_a_refused_answer_cannot_be_measured(monkeypatch):
    exercise = next(one for one in verdict_bench.exercises() if one.spec)

    def refuses(answer: object) -> None:
        raise Wrong("this check refuses all answers")

    monkeypatch.setattr(exercise, "check", refuses)
    monkeypatch.setattr(verdict_bench, "exercises", lambda: [exercise])
    with pytest.raises(benchmark.CannotMeasure, match=f"{exercise.todo} is not yet where done"):
        verdict_bench.verdicts()


def test_the_table_says_which_figures_are_of_older_code(tmp_path, monkeypatch, capsys):
    fake_rows(monkeypatch)
    measured(tmp_path)
    file = tmp_path / "b.json"
    page = tmp_path / "bench.md"
    for name in ("bench.md", "README.md"):
        (tmp_path / name).write_text("before\n<!-- measured -->\nold\n<!-- /measured -->\nafter\n")
    bench.main(bench.Config(out=str(file), table=True, pages=str(tmp_path)))
    text = page.read_text()
    assert text.startswith("before\n<!-- measured -->\nOn ") and text.endswith("-->\nafter\n")
    assert "| one | at most 1 s | 1.000 s |" in text and "| two | under 3 | 2.000 |" in text
    assert "older" not in text and "older code" not in capsys.readouterr().out
    content = json.loads(file.read_text())
    content["rows"]["one"]["code"] = "0" * 12
    file.write_text(json.dumps(content))
    bench.main(bench.Config(out=str(file), table=True, pages=str(tmp_path)))
    assert "| 1.000 s (older code) |" in page.read_text()
    assert "older code: one" in capsys.readouterr().out


def test_the_pages_show_the_figures_of_the_file():
    """Whether a figure is of older code changes with every commit, so that is not compared."""
    rows = bench.read(ROOT / "bench.json")
    assert all(name in rows for name in bench.IN_README.values())
    for page, wanted in bench.wanted_pages(ROOT, rows).items():
        have, wanted = (text.replace(" (older code)", "") for text in (page.read_text(), wanted))
        assert have == wanted, f"{page.name}: run scripts/bench.py --table"


def test_the_code_of_a_row_is_what_its_files_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "PACKAGE", tmp_path)
    measure = benchmark.Measure(list, (), ("a*.py",))
    with pytest.raises(ValueError, match=r"a\*\.py"):
        bench.code_hash(measure)
    (tmp_path / "a.py").write_text("1")
    first = bench.code_hash(measure)
    (tmp_path / "a.py").write_text("2")
    assert bench.code_hash(measure) != first


def test_import_row_counts_every_lesson(monkeypatch):
    seen = []
    monkeypatch.setattr(verdict_bench, "IMPORT_ROUNDS", 2)
    real = verdict_bench.import_once
    monkeypatch.setattr(verdict_bench, "import_once", lambda n: seen.append(n) or real(n))
    ((value, note),) = verdict_bench.imports()
    assert "1 repeats" in note
    bare, ours = sorted(set(seen), key=len)
    assert bare == "torch, torch.distributed" and seen.count(bare) == seen.count(ours) == 2
    for word in verdict_bench.lessons():
        assert f"manyhands.{word}." in ours


def test_char_recipe_trains_for_real(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat.\n" * 500)
    small = ("--layers=1", "--block=16", "--batch=12", "--steps=24")
    monkeypatch.setattr(char_bench, "CHAR_RECIPE", small)
    monkeypatch.setattr(char_bench, "CHAR_SEEDS", (1,))
    (loss, loss_note), (rate, rate_note) = char_bench.char_recipe(str(text))
    assert 1 < loss < 2 and rate > 0  # the full recipe learns this text by heart
    assert "text.txt" in loss_note and "--steps=24" in rate_note


def test_char_recipe_says_how_to_get_its_data(tmp_path, capsys):
    assert measured(tmp_path, only="nanoGPT") == {}
    assert "left out, since it needs --data FOLDER" in capsys.readouterr().out


def test_bad_input_is_one_line(tmp_path):
    with pytest.raises(BadInput, match="'nothing' is in no row's name: ring all-reduce .*, d.*"):
        measured(tmp_path, only="nothing")
    with pytest.raises(BadInput, match="cannot write .*choose another --out"):
        measured(tmp_path / "none", only="nanoGPT")
    with pytest.raises(BadInput, match="no such folder or file"):
        measured(tmp_path, only="nanoGPT", data=str(tmp_path / "missing"))


def test_works_are_timed_in_turn():
    order = []
    times_s = in_turn([lambda: order.append("A"), lambda: order.append("B")], 3)
    assert "".join(order) == "ABBAAB"
    assert [len(work) for work in times_s] == [3, 3]


def test_slowest_rank_is_taken_round_by_round():
    rank_0, rank_1 = [[1.0, 5.0], [3.0, 3.0]], [[2.0, 4.0], [9.0, 1.0]]
    assert slowest_rank([rank_0, rank_1]) == [[2.0, 5.0], [9.0, 3.0]]


@pytest.mark.parametrize(
    ("fn", "num_works"),
    [
        (ddp_bench.time_ddp, 2),
        (ddp_bench.time_scaling, 3),
        (meters_bench.time_samples, 2),
        (meters_bench.time_stopwatches, 2),
    ],
)
def test_steps_run_on_real_ranks(fn, num_works):
    times_s = run_ranks(fn, 2, benchmark.Shape(layers=1, vocab=9, block=4, batch=2), 3)
    assert all(len(works) == num_works for works in times_s)
    assert all(len(work) == 3 and min(work) > 0 for works in times_s for work in works)


@pytest.mark.parametrize(
    ("fn", "size", "number"),
    [
        (pipeline_bench.time_pipeline, benchmark.Shape(1, 9, 4, 4), 2),
        (tensor_bench.time_tensor, 16, 2),
    ],
)
def test_both_ways_of_model_parallelism_are_timed(fn, size, number):
    times_s = run_ranks(fn, 2, size, number, 3)
    assert all(len(works) == 2 for works in times_s)
    assert all(len(work) == 3 and min(work) > 0 for works in times_s for work in works)


def test_ring_row_times_both_on_the_same_four_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(ring_bench, "RING_BYTES", 4_000)
    ((name, row),) = measured(tmp_path, only="ring all-reduce").items()
    assert set(row) == ROW and name.startswith("ring all-reduce by hand / gloo's")
    assert row["value"] > 0 and row["goal"] == "<= 1.25" and "40 repeats" in row["note"]
    by_hand, native = run_ranks(ring_bench.time_ring, 2, 4_000, 3)[0]
    assert len(by_hand) == len(native) == 3 and min(by_hand + native) > 0


def test_ring_row_compares_the_ring_with_gloos_own():
    def calls_of_each():
        works = []
        ring_bench.in_turn = lambda given, num_rounds: works.extend(given)
        ring_bench.time_ring(4_000, 1)
        return [dict(ledger_calls(work)) for work in works[:2]]

    (by_hand, native), _ = run_ranks(calls_of_each, 2)
    assert by_hand == {"send": 2, "recv": 2} and native == {"all_reduce": 1}


def ledger_calls(work):
    with Ledger() as ledger:
        work()
    return calls(ledger.entries)


def test_cost_rows_tell_of_one_meter_where_many_were_timed(monkeypatch):
    times_s = {"time_samples": [[1.2] * 30, [1.0] * 30], "time_stopwatches": [[2.0] * 30] * 2}
    monkeypatch.setattr(
        meters_bench.lab, "run_ranks", lambda fn, *_, **__: [times_s[fn.__name__]] * 2
    )
    (samples, note), (stopwatch, _) = meters_bench.meters_cost()
    assert samples == pytest.approx(1.02) and stopwatch == 1.0 and "30 repeats" in note


def test_numbers_are_plain():
    assert benchmark.spread([21345.4, 0.95, 2.0]) == "0.950 to 21,345, 3 repeats"


def test_matmul_work_is_counted_exactly():
    work, flops = flops_bench.matmuls(4, 5, 6, flops=1000)
    work()
    assert flops == 4 * 2 * 4 * 5 * 6  # 240 each; 1000 is nearest to four of them
