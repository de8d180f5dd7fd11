"""What a run can go on from, and what it refuses in one line without touching anything."""

import json
import os
import shutil
import signal
import socket
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch.distributed as dist

import runs
import train_single
from commands import contents, settings, write_text
from manyhands.ranks.lab import RankFailed, run_ranks
from manyhands.saving.index import sealed
from manyhands.training import lock
from manyhands.training.settings import TrainConfig
from manyhands.training.storage import read_json
from small_run import assert_same, cut_in_half, names, refused, train


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> TrainConfig:
    """A run that was stopped after 6 of 15 steps, on one rank."""

    def stop(rank: int, step: int) -> None:
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    out = str(tmp_path_factory.mktemp("stopped") / "run")
    config = TrainConfig(batch=4, steps=15, save_every=4, out=out)
    run_ranks(train, 1, config, event=stop, quiet=True)
    return config


@pytest.fixture
def copy(stopped, tmp_path) -> TrainConfig:
    """A copy of the stopped run, to be spoilt."""
    shutil.copytree(stopped.out, tmp_path / "copy")
    return replace(stopped, out=str(tmp_path / "copy"))


def refuse_without_a_trace(config: TrainConfig, *words: str, **kwargs) -> None:
    before = contents(Path(config.out))
    message = refused(config, **kwargs)
    assert "\n" not in message
    for word in words:
        assert word in message
    assert contents(Path(config.out)) == before


def test_other_settings_are_refused(copy):
    refuse_without_a_trace(replace(copy, layers=2), "layers=4, not 2", "new folder")
    refuse_without_a_trace(replace(copy, steps=20, seed=2), "steps=15, not 20; seed=1, not 2")
    assert refused(replace(copy, save_every=3)) == "accepted"


def test_more_settings_of_a_subclass_count(copy):
    @dataclass(frozen=True)
    class Config(TrainConfig):
        impl: str = "torch"

    settings = {name: getattr(copy, name) for name in TrainConfig.__dataclass_fields__}
    refuse_without_a_trace(Config(**settings), "impl=None, not torch")


def test_a_run_goes_on_with_other_data_only_where_that_is_asked_for(copy, capsys):
    """What it has learned is of the data that it was begun with, wherever they lie by now."""
    words = ("embedded (SHA-256 aaaaaaaaaaaaaaaa...)", "elsewhere (SHA-256 bbbbbbbbbbbbbbbb...)")
    moved = replace(copy, data="elsewhere")
    refuse_without_a_trace(moved, *words, "--other-data", "new folder", sha256=64 * "b")
    (Path(copy.out) / "valid.jsonl").write_text('{"step": 4, "valid_loss": 0.1}\n')

    def interrupt(rank: int, step: int) -> None:
        raise KeyboardInterrupt

    for _ in range(2):  # a job that queued again has the same flags
        with pytest.raises(KeyboardInterrupt):
            train(replace(moved, other_data=True), sha256=64 * "b", event=interrupt)
    assert capsys.readouterr().out.count("all validation losses in") == 1
    assert not (Path(copy.out) / "valid.jsonl").exists()
    assert len([*Path(copy.out).glob("valid-aaaaaaaaaaaaaaaa.jsonl")]) == 1
    assert refused(moved) == "accepted"  # the first data, at another place


def test_ranks_that_read_different_data_are_refused(tmp_path):
    def train_on_its_own(config: TrainConfig) -> str:
        return refused(config, sha256=64 * "ab"[dist.get_rank()])

    config = TrainConfig(batch=4, steps=2, out=str(tmp_path / "run"))
    first, second = run_ranks(train_on_its_own, 2, config, quiet=True)
    assert first == second and "rank 1 has read other data than rank 0" in first
    assert not (tmp_path / "run").exists()


def test_a_text_that_was_edited_is_refused_and_begins_its_losses_anew(tmp_path):
    """A real job: its text loses a quarter between the parts of the run."""
    words = settings(write_text(tmp_path), out=str(tmp_path / "run"), save_every=5)
    config = train_single.Config(**words)
    runs.train(train_single, 1, config)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000020")
    (tmp_path / "run" / "status.json").unlink()
    text = tmp_path / "text" / "words.txt"
    text.write_text(text.read_text()[: len(text.read_text()) * 3 // 4] + "z")
    with pytest.raises(RankFailed, match=r"other data, .*text \(SHA-256 .*text \(SHA-256 "):
        runs.train(train_single, 1, config)
    runs.train(train_single, 1, replace(config, other_data=True))
    lines = (tmp_path / "run" / "valid.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [15, 20]


def test_another_number_of_ranks_is_refused(copy):
    messages = run_ranks(refused, 2, copy, quiet=True)
    assert messages[0] == messages[1] and "ranks=1, not 2" in messages[0]


def test_a_finished_run_is_refused(copy):
    assert refused(copy) == "accepted"
    refuse_without_a_trace(copy, "finished run of 15 steps", "new folder")


def test_a_folder_that_is_no_run_is_refused(copy):
    (Path(copy.out) / "config.json").unlink()
    refuse_without_a_trace(copy, "no run", "new or empty folder")
    refuse_without_a_trace(replace(copy, out=copy.out + "/status.json"), "is a file")
    for out in ("a::b", "s3://bucket/run"):  # libraries for files would read more in it than a name
        assert f"--out {Path(out)}: name a folder of this" in refused(replace(copy, out=out))
        assert not Path(out).exists()


def scramble(path: Path) -> None:
    """Damage every 97th byte, as a failing disk may."""
    content = bytearray(path.read_bytes())
    content[::97] = bytes(255 - byte for byte in content[::97])
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("rank-00000.pt", cut_in_half, "has "),
        ("rank-00000.pt", scramble, "is damaged: its SHA-256 is not the index's"),
        ("rank-00000.pt", Path.unlink, "is missing"),
        ("index.json", cut_in_half, "is missing or damaged"),
        ("index.json", scramble, "is missing or damaged"),
    ],
)
def test_a_checkpoint_that_cannot_be_loaded_is_kept_and_the_one_before_goes_on(
    copy, calm_alone, capfd, name, damage, words
):
    folder = Path(copy.out) / "checkpoints"
    damage(folder / "step-00000006" / name)
    damaged = contents(folder / "step-00000006")
    train(copy)
    said = capfd.readouterr().out.splitlines()
    (line,) = [line for line in said if " is kept as " in line]
    assert f"step-00000006/{name} {words}" in line
    assert line.endswith(
        "that checkpoint is kept as step-00000006.broken, and the run goes on from step-00000004"
    )
    assert f"resumed {copy.out} at step 4 of 15" in said
    kept = contents(folder / "step-00000006.broken")
    assert list(kept.values()) == list(damaged.values())
    assert names(folder)[1:] == ["step-00000008", "step-00000012", "step-00000015"]
    assert_same(Path(copy.out), Path(calm_alone.out))


@pytest.fixture(scope="module")
def calm_alone(tmp_path_factory) -> TrainConfig:
    """The same run on one rank with nobody in its way."""
    out = str(tmp_path_factory.mktemp("calm") / "run")
    config = TrainConfig(batch=4, steps=15, save_every=4, out=out)
    train(config)
    return config


def test_all_ranks_fall_back_where_one_cannot_load(tmp_path, capfd):
    config = TrainConfig(batch=4, steps=15, save_every=4, out=str(tmp_path / "run"))
    undisturbed = replace(config, out=str(tmp_path / "calm"))
    run_ranks(train, 2, undisturbed, quiet=True)

    def stop(rank: int, step: int) -> None:
        if step == 9:
            os.kill(os.getpid(), signal.SIGTERM)

    run_ranks(train, 2, config, event=stop, quiet=True)
    folder = Path(config.out) / "checkpoints"
    cut_in_half(folder / "step-00000009" / "rank-00001.pt")
    shutil.copytree(folder / "step-00000009", folder / "step-00000009.broken")  # kept before
    (folder / "step-00000008" / "rank-00000.pt").write_bytes(b"")
    run_ranks(train, 2, config)
    said = capfd.readouterr().out
    assert "step-00000009/rank-00001.pt has " in said
    assert "kept as step-00000009.broken2, and the run goes on from step-00000004" in said
    assert "step-00000008/rank-00000.pt has 0 of " in said
    assert f"resumed {config.out} at step 4 of 15" in said
    assert_same(Path(config.out), Path(undisturbed.out))


def test_without_any_checkpoint_that_loads_the_run_is_refused(copy):
    config = Path(copy.out) / "config.json"
    before = json.loads(config.read_text())["job"]
    for checkpoint in (Path(copy.out) / "checkpoints").iterdir():
        cut_in_half(checkpoint / "rank-00000.pt")
    damaged = contents(Path(copy.out) / "checkpoints")
    message = refused(copy)
    assert "step-00000006/rank-00000.pt has " in message and "\n" not in message
    assert "no other checkpoint in" in message and "name a new --out" in message
    assert json.loads(config.read_text())["job"] == before  # a refused start is no life
    assert contents(Path(copy.out) / "checkpoints") == damaged


def test_foreign_checkpoints_are_refused(copy):
    newest = Path(copy.out) / "checkpoints" / "step-00000006"
    shutil.rmtree(newest.with_name("step-00000004"))
    whole = read_json(newest / "index.json")
    del whole["sha256"]
    named = whole["values"] | {"identity/layers": 9}
    refuse_spoilt = [
        ([1], "missing or damaged"),
        ({**whole, "format": "other 7"}, "another format (other 7)"),
        ({**whole, "values": named}, "layers=9, not 4"),
        ({**whole, "tensors": {}}, "does not fit"),
    ]
    for index, words in refuse_spoilt:
        content = sealed(index) if isinstance(index, dict) else index
        (newest / "index.json").write_text(json.dumps(content))
        message = refused(copy)
        assert words in message and "new --out" in message and "\n" not in message
    (newest / "index.json").write_text(json.dumps(whole | {"step": 7}))
    assert "index.json is damaged" in refused(copy)
    (newest / "index.json").write_text(json.dumps(sealed(whole)))
    message = refused(copy, width=8)
    assert "layers.0.weight" in message and "[16, 4]" in message and "[8, 4]" in message


def test_settings_that_cannot_be(tmp_path):
    config = TrainConfig(batch=4, steps=15, save_every=4, out=str(tmp_path / "run"))
    assert "batch 64 but the training data holds only 40 blocks" in refused(
        replace(config, batch=64)
    )
    assert "steps is 0" in refused(replace(config, steps=0))
    assert "save_every is -1" in refused(replace(config, save_every=-1))
    uneven = run_ranks(refused, 2, replace(config, batch=5), quiet=True)
    assert uneven[0] == uneven[1] and "batch 5 cannot be shared evenly by 2 ranks" in uneven[0]
    assert "learning_rate is nan" in refused(replace(config, learning_rate=float("nan")))


def test_a_folder_has_one_writer(copy):
    lock.hold(Path(copy.out))
    message = run_ranks(refused, 1, copy, quiet=True)[0]
    host = socket.gethostname()
    assert f"--out {copy.out} is in use by process {os.getpid()} on {host}: wait until" in message
    assert (
        refused(replace(copy, layers=2)) != "accepted" == refused(copy)
    )  # its own is no hindrance
    copied = replace(copy, out=copy.out + "2")
    assert run_ranks(refused, 1, copied, quiet=True) == ["accepted"]


def test_the_end_of_a_run_or_of_its_process_unlocks_the_folder(copy):
    assert refused(copy) == "accepted"
    finished = Path(copy.out)
    assert "finished run" in run_ranks(refused, 1, copy, quiet=True)[0]
    run_ranks(lock.hold, 1, finished)
    lock.hold(finished)
    lock.release(finished)
    assert run_ranks(lock.hold, 1, finished) == [None]


def test_a_job_that_queued_again_does_not_wait_for_the_lock_of_its_earlier_life(copy, monkeypatch):
    folder = Path(copy.out)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    lock.hold(folder)

    def outcome_as(job: str, restart: str) -> str:
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_RESTART_COUNT", restart)
        return run_ranks(refused, 1, copy, quiet=True)[0]

    assert "is in use" in outcome_as("7", "0")
    assert "is in use" in outcome_as("8", "1")
    assert outcome_as("7", "1") == "accepted"
    lock.release(folder)
