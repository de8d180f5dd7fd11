"""The job of lesson 00: the same results on any number of ranks, also after a stop or a kill."""

import json
import os
import signal
import sys
from pathlib import Path
from unittest import mock

import pytest

import runs
import train_first_job
from commands import ROOT
from commands import run as run_command
from manyhands.first_job import planning
from manyhands.jobs import mine
from manyhands.ranks.failures import RankFailed
from manyhands.ranks.lab import run_ranks
from manyhands.training import tasks
from manyhands.training.storage import read_json, read_lines

SMALL = {"smallest": 160, "networks": 2, "device": "cpu"}  # 4 sizes, 8 trainings


def run(out: Path, world_size: int, main=None, draws: bool = False, **changes: object) -> float:
    """Run the job's main on the ranks of a fork server; returns the exponent."""
    config = train_first_job.Config(out=str(out), **{**SMALL, **changes})
    return runs.train(train_first_job, world_size, config, main, draws, quiet=False)[0]


def results(folder: Path) -> list[tuple]:
    files = sorted((folder / "results").iterdir())
    return sorted(tuple(line.values()) for file in files for line in read_lines(file))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    folder = tmp_path_factory.mktemp("one") / "run"
    return folder, run(folder, 1)


def test_any_number_of_ranks_finds_the_same(whole, tmp_path, capfd):
    folder, exponent = whole
    assert [size for size, *_ in results(folder)] == [160, 160, 320, 320, 640, 640, 1280, 1280]
    assert exponent > 0.2 and results(folder)[0][2] > results(folder)[-1][2]
    assert run(tmp_path / "run", 3, draws=True) == exponent
    assert results(tmp_path / "run") == results(folder)
    shares = [len(read_lines(file)) for file in sorted((tmp_path / "run/results").iterdir())]
    assert shares == [3, 3, 2]
    status = read_json(tmp_path / "run/status.json")
    last = [error for size, _, error in results(folder) if size == 1280]
    assert (status["state"], status["step"]) == ("finished", 8)
    assert status["valid_loss"] == pytest.approx(sum(last) / 2)
    assert (tmp_path / "run/power_law.png").stat().st_size > 5000
    page = (tmp_path / "run/report.html").read_text()
    assert "share of images" in page and "8 of 8" in page and page.count("<img") > 2
    said = capfd.readouterr().out
    assert f"** -{exponent:.3f}" in said and "data: embedded digits, 1,297 images" in said


def test_what_is_there_is_not_trained_again(whole, tmp_path):
    """As after a kill: half of the lines are there, one of them is half written."""
    folder, exponent = whole
    left = tmp_path / "run"
    run(left, 2)
    (left / "status.json").unlink()
    files = sorted((left / "results").iterdir())
    files[0].write_bytes(files[0].read_bytes()[:-8])
    files[1].unlink()
    kept = files[0].read_bytes().splitlines()[:3]
    assert run(left, 3) == exponent
    assert results(left) == results(folder)
    assert files[0].read_bytes().splitlines()[:3] == kept


def test_a_stopped_job_goes_on(whole, tmp_path, capfd):
    """Rank 0 is told to stop when it has seen three results."""
    folder, exponent = whole
    out = tmp_path / "run"

    def train_until_told(config: train_first_job.Config) -> float:
        add = tasks.Curve.add

        def add_and_signal(curve: tasks.Curve, *result: object) -> None:
            add(curve, *result)
            if curve.count >= 3:
                os.kill(os.getpid(), signal.SIGTERM)

        tasks.Curve.add = add_and_signal
        return train_first_job.main(config)

    run(out, 2, main=train_until_told)
    stopped = read_json(out / "status.json")
    assert stopped["state"] == "stopped" and 3 <= stopped["step"] < 8
    said = capfd.readouterr().out
    assert f" after {stopped['step']} of 8 networks" in said and "Traceback" not in said
    assert len(results(out)) == stopped["step"]
    assert run(out, 2) == exponent and results(out) == results(folder)


def test_the_script_starts_by_itself(tmp_path):
    code, said, err = run_command([sys.executable, train_first_job.__file__, "--help"], tmp_path)
    assert (code, err) == (0, "") and "--networks" in said


def share_without_the_rest(tasks, rank, world_size):
    each = len(tasks) // world_size
    return tasks[rank * each : (rank + 1) * each]


def main_without_the_rest(config: train_first_job.Config) -> float:
    with mock.patch.object(planning, "my_share", share_without_the_rest):
        return train_first_job.main(config)


def test_a_share_that_leaves_some_out_is_told_and_the_rest_can_be_done_later(tmp_path):
    config = train_first_job.Config(out=str(tmp_path / "run"), **SMALL)
    with pytest.raises(RankFailed, match="my_share gave 2 of 8 networks to no rank"):
        run_ranks(main_without_the_rest, 3, config, join=False, timeout_s=60)
    assert run(tmp_path / "run", 3) > 0.2


def fit_power_law(sizes, errors):
    return 1.0, 0.25


def test_a_learner_s_own_fit_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("MANYHANDS_MINE", str(tmp_path / "mine"))
    mine.write("first_job", {"fit_power_law": fit_power_law}, tmp_path / "mine")
    assert run(tmp_path / "run", 2, impl="mine", smallest=640, networks=1) == 0.25


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"smallest": 1}, "--smallest 1 "),
        ({"smallest": 649}, "at most half of the 1,297 images"),
        ({"networks": 0}, "at least 1 network"),
        ({"data": "nowhere"}, "there is no folder nowhere"),
    ],
)
def test_settings_that_cannot_be(tmp_path, changes, words):
    with pytest.raises(RankFailed, match=words):
        run(tmp_path / "run", 2, **changes)
    assert not (tmp_path / "run").exists()


def test_another_job_s_folder_is_not_touched(whole, tmp_path):
    with pytest.raises(RankFailed, match="holds a run with networks=2, not 3"):
        run(whole[0], 2, networks=3)


@pytest.mark.nightly
def test_real_mnist(tmp_path):
    data = ROOT.parent / "shared/data/mnist"
    if not data.is_dir():
        pytest.skip("MNIST's files are not in ../shared/data/mnist")
    exponent = run(tmp_path / "run", 2, data=str(data), smallest=1280, networks=1)
    assert 0.2 < exponent < 0.8
    about = json.loads((tmp_path / "run/config.json").read_text())
    assert about["config"]["steps"] == 6
