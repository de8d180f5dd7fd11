"""A run's folder is whole whatever happens: killed, stopped, out of disk, or started wrongly."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from manyhands.instruments.meters import STEP_PHASES
from manyhands.ranks.lab import RankFailed, run_ranks
from manyhands.saving.folder import complete
from manyhands.saving.index import damage
from manyhands.saving.store import Store
from manyhands.training import checkpoints
from manyhands.training.checkpoints import ShardedCheckpoints
from manyhands.training.run import Run, save_once
from manyhands.training.schedule import learning_rate_at, set_learning_rate
from manyhands.training.settings import TrainConfig
from manyhands.training.storage import read_json, read_lines
from small_run import (
    Net,
    assert_same,
    data,
    limit_file_size,
    names,
    outcome,
    refused,
    status,
    train,
    world_here,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    """15 steps of 4 a epoch (10 batches in it), so runs cross the end of an epoch."""
    return TrainConfig(batch=4, steps=15, save_every=4, out=str(tmp_path / "run"))


@pytest.fixture
def undisturbed(config: TrainConfig, tmp_path: Path) -> TrainConfig:
    """The same run with nobody in its way, on two ranks."""
    calm = replace(config, out=str(tmp_path / "calm"))
    run_ranks(train, 2, calm, quiet=True)
    return calm


def test_learning_rate_rises_over_a_tenth_and_falls_to_a_tenth():
    config = TrainConfig(steps=100, learning_rate=2.0)
    rates = [learning_rate_at(step, config) for step in range(100)]
    assert rates[0] == pytest.approx(0.2) and rates[9] == pytest.approx(2.0)
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[-1] == pytest.approx(0.2)
    assert rates[10 + 44] == pytest.approx(1.1, abs=0.05)
    assert learning_rate_at(0, TrainConfig(steps=1, learning_rate=2.0)) == 2.0


def test_folder_of_a_finished_run(config):
    losses = run_ranks(train, 2, config, quiet=True)
    folder = Path(config.out)
    lines = read_lines(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 16))
    assert [line["epoch"] for line in lines] == [0] * 10 + [1] * 5
    assert losses[0] != losses[1]
    mean = [(a + b) / 2 for a, b in zip(*losses, strict=True)]
    assert [line["loss"] for line in lines] == pytest.approx(mean)
    for line in lines:
        assert line["step_s"] == pytest.approx(
            sum(line[f"{phase}_s"] for phase in STEP_PHASES), abs=1e-5
        )
        assert line["tokens_per_s"] == pytest.approx(4 * 64 / line["step_s"], rel=0.05)
        assert line["memory_bytes"] > 1e6
    inside = "checkpoints config.json metrics.jsonl model.pt nodes ranks status.json"
    assert names(folder) == inside.split()
    about = json.loads((folder / "config.json").read_text())
    assert about["job"]["scheduler"] == "none" and about["job"]["restarts"] == 0
    assert (about["loss_name"], about["loss_unit"]) == ("loss", "nats per token")
    assert [rank["device"] for rank in about["ranks"]] == ["cpu", "cpu"]
    assert names(folder / "nodes") == [f"{socket.gethostname()}.jsonl"]  # one rank's of each node
    assert names(folder / "checkpoints") == ["step-00000008", "step-00000012", "step-00000015"]
    for rank in range(2):
        assert read_lines(folder / "ranks" / f"rank-{rank:05d}.jsonl")[0].keys() == {
            *("time_s", "cpu", "gpu", "memory_bytes")
        }
    end = status(folder)
    assert (end["state"], end["step"], end["valid_loss"], end["floor"]) == (
        "finished",
        15,
        1.25,
        0.5,
    )
    index = read_json(folder / "checkpoints/step-00000015/index.json")
    saved = {name[6:] for name in index["tensors"] if name.startswith("model/")}
    assert saved == outcome(folder)[1].keys() == Net().state_dict().keys()


@pytest.mark.parametrize("victim", [0, 1])
def test_resume_after_kill_is_bit_exact(config, undisturbed, victim):
    kill_at = random.randint(1, 15)
    print("killed at step", kill_at)

    def event(rank: int, step: int) -> None:
        if (rank, step) == (victim, kill_at):
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankFailed):
        run_ranks(train, 2, config, event=event, quiet=True)
    assert not (Path(config.out) / "model.pt").exists()
    run_ranks(train, 2, config, quiet=True)
    assert_same(Path(config.out), Path(undisturbed.out))


def test_kill_at_any_moment_leaves_only_whole_checkpoints(config):
    """Save at every step, and pull the plug from a thread, which may strike inside a save."""
    config = replace(config, save_every=1, steps=60)
    calm = replace(config, out=config.out + "-calm")
    run_ranks(train, 1, calm, quiet=True)

    def train_briefly(delay_s: float) -> None:
        def pull(rank: int, step: int) -> None:
            if not threads:
                threads.append(threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)))
                threads[0].start()

        threads: list[threading.Timer] = []
        train(config, event=pull)

    kills = 0
    for _ in range(6):
        try:
            run_ranks(train_briefly, 1, random.uniform(0.005, 0.06), quiet=True)
            break  # the run was quicker than the last kill
        except RankFailed:
            kills += 1
        folder = Path(config.out) / "checkpoints"
        for name in complete(folder):
            assert damage(Store(folder / name)) == ""
            assert read_json(folder / name / "index.json")["values"]["step"] == int(name[5:])
    assert kills
    if status(Path(config.out))["state"] != "finished":
        run_ranks(train, 1, config, quiet=True)
    assert_same(Path(config.out), Path(calm.out))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_stops_all_after_the_step(config, undisturbed, number, capfd):
    def event(rank: int, step: int) -> None:
        if (rank, step) == (1, 6):
            os.kill(os.getpid(), number)

    assert run_ranks(train, 2, config, event=event) == [None, None]  # SystemExit(75)
    said = capfd.readouterr().out
    assert f"stopped by {number.name} at step 6, checkpoint saved; run the same command" in said
    assert status(Path(config.out))["state"] == "stopped"
    assert [line["step"] for line in read_lines(Path(config.out) / "metrics.jsonl")][-1] == 6
    run_ranks(train, 2, config)
    assert f"resumed {config.out} at step 6 of 15" in capfd.readouterr().out
    assert_same(Path(config.out), Path(undisturbed.out))


def test_a_signal_that_comes_again_ends_no_rank_that_stops(config, undisturbed):
    """Slurm and torchrun's agent both pass it on, to each rank at a time of its own."""

    def event(rank: int, step: int) -> None:
        if (rank, step) == (1, 6):
            os.kill(os.getpid(), signal.SIGUSR1)

    def stopped(config: TrainConfig) -> str:
        try:
            train(config, event=event)
        except SystemExit:
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)
            return "lives"

    assert run_ranks(stopped, 2, config, quiet=True) == ["lives", "lives"]
    run_ranks(train, 2, config, quiet=True)
    assert_same(Path(config.out), Path(undisturbed.out))


def test_handlers_come_back(config):
    before = signal.getsignal(signal.SIGTERM)
    seen = []
    train(config, event=lambda *_: seen.append(signal.getsignal(signal.SIGTERM)))
    assert signal.getsignal(signal.SIGTERM) == before != seen[0]


def test_shuffling_loader_resumes_too(config):
    """A loader that shuffles draws its order from the same random numbers as dropout does."""

    def stop(rank: int, step: int) -> None:
        if step == 13:
            os.kill(os.getpid(), signal.SIGTERM)

    calm = replace(config, out=config.out + "-calm")
    run_ranks(train, 1, calm, shuffle=True, join=False, quiet=True)
    run_ranks(train, 1, config, event=stop, shuffle=True, join=False, quiet=True)
    assert status(Path(config.out))["step"] == 13
    run_ranks(train, 1, config, shuffle=True, join=False, quiet=True)
    assert_same(Path(config.out), Path(calm.out))


@pytest.mark.parametrize("victim", [0, 1])
def test_full_disk_while_saving_is_one_line_on_every_rank(config, victim):
    def event(rank: int, step: int) -> None:
        if (rank, step) == (victim, 6):
            limit_file_size(3000)  # room for the metrics of step 7 and 8, not for a checkpoint

    messages = run_ranks(refused, 2, config, event=event, quiet=True)
    assert messages[0] == messages[1]
    assert f"cannot save: rank {victim}: " in messages[0] and "File too large" in messages[0]
    assert "\n" not in messages[0]
    assert names(Path(config.out) / "checkpoints") == ["step-00000004"]
    assert status(Path(config.out))["state"] == "failed"
    assert run_ranks(refused, 2, config, quiet=True) == ["accepted"] * 2


def test_full_disk_between_checkpoints_is_one_line_on_every_rank(config):
    def event(rank: int, step: int) -> None:
        if (rank, step) == (0, 5):
            limit_file_size(10)

    messages = run_ranks(refused, 2, config, event=event, quiet=True)
    assert messages[0] == messages[1]
    assert "cannot write" in messages[0] and "metrics.jsonl" in messages[0]


def test_save_once_returns_on_every_rank_when_the_file_is_whole(tmp_path, capfd):
    path = tmp_path / "weights.pt"

    def save(path: Path) -> bool:
        torch.manual_seed(0)
        model = nn.Linear(500, 500)
        save_once(DistributedDataParallel(model), path)
        return torch.equal(torch.load(path, weights_only=True)["weight"], model.weight)

    assert run_ranks(save, 2, path) == [True, True]
    said = capfd.readouterr().out
    assert said.count("saved") == 1 and f"{path} ({path.stat().st_size:,} bytes)" in said
    assert names(tmp_path) == ["weights.pt"]


def test_save_once_keeps_the_old_file_when_the_disk_is_full(tmp_path):
    path = tmp_path / "weights.pt"
    save_once(nn.Linear(2, 2), path)
    old = path.read_bytes()

    def save_on_full_disk(path: Path) -> str:
        limit_file_size(3000)
        try:
            save_once(nn.Linear(500, 500), path)
        except (OSError, RuntimeError) as error:
            return repr(error.__context__ or error)
        return "saved"

    (said,) = run_ranks(save_on_full_disk, 1, path, quiet=True)
    assert "OSError" in said and "File too large" in said
    assert path.read_bytes() == old


def test_a_steps_time_is_put_where_it_was_spent(config):
    def watched() -> list[dict]:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters())
        optimizer.register_step_pre_hook(lambda *_: time.sleep(0.03))
        run = Run(config, world_here(), "tiny", num_samples=40, checkpoints=ShardedCheckpoints)
        run.resume(model=model, optimizer=optimizer)
        model.sleep_s = 0.02
        loader = DataLoader(data(), config.batch, collate_fn=slow_collate)
        for _ in run.epochs(loader):
            for batch in run.batches(loader):
                time.sleep(0.03)
                model(*batch).backward()
                time.sleep(0.01)
                optimizer.step()
                run.log(torch.tensor(1.0))
        return read_lines(run.folder / "metrics.jsonl")

    def slow_collate(rows: list) -> list:
        time.sleep(0.04)
        return torch.utils.data.default_collate(rows)

    lines = run_ranks(watched, 1, join=False)[0]
    least = {"data_s": 0.04, "forward_s": 0.05, "backward_s": 0.01}
    for name, least_s in least.items():
        assert min(line[name] for line in lines) >= least_s
    # The hook that sleeps was registered before the watch, so its time lies before the optimizer.
    assert min(line["backward_s"] for line in lines) >= 0.04


def test_a_checkpoint_counts_in_the_line_after_it_and_not_in_the_step(config, monkeypatch):
    write = checkpoints.save_sharded

    def write_slowly(*args: object) -> None:
        time.sleep(0.2)
        write(*args)

    monkeypatch.setattr(checkpoints, "save_sharded", write_slowly)
    train(replace(config, steps=5, save_every=2))
    lines = read_lines(Path(config.out) / "metrics.jsonl")
    assert [line["checkpoint_s"] > 0.19 for line in lines] == [False, False, True, False, True]
    for line in lines:
        assert line["step_s"] == pytest.approx(
            sum(line[f"{phase}_s"] for phase in STEP_PHASES), abs=1e-5
        )
        assert line["tokens_per_s"] == pytest.approx(4 * 64 / line["step_s"], rel=0.05)
    counted_s = sum(line["step_s"] + line["checkpoint_s"] for line in lines)
    assert counted_s == pytest.approx(lines[-1]["time_s"], abs=0.1)  # no time is lost


def test_a_run_that_goes_on_counts_its_restarts_and_adds_to_its_samples(config):
    def stop(rank: int, step: int) -> None:
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    run_ranks(train, 1, config, event=stop, quiet=True)
    (node,) = (Path(config.out) / "nodes").iterdir()
    before = [node.read_text(), (Path(config.out) / "ranks" / "rank-00000.jsonl").read_text()]
    train(config)
    about = json.loads((Path(config.out) / "config.json").read_text())
    assert about["job"]["restarts"] == 1 and len(about["job"]["starts_s"]) == 2
    after = [node.read_text(), (Path(config.out) / "ranks" / "rank-00000.jsonl").read_text()]
    for old, new in zip(before, after, strict=True):
        assert old and new.startswith(old) and len(new) > len(old)


def test_granted_gpus_without_a_rank_are_told_at_the_start(config, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    train(replace(config, steps=1))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("idle: ")]
    assert line.startswith("idle: 4 of the 4 GPUs granted on ") and "have no rank" in line


def test_a_rank_without_samples_counts_neither_in_the_mean_nor_in_the_share(config):
    """Rank 0 has the optimizer and no samples, as a parameter server; a batch of 5 has 1 share."""
    config = replace(config, batch=5, steps=3, save_every=2)

    def train_beside_a_server() -> int:
        world, model = world_here(), nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters()) if world.is_main else None
        sizes = {"num_samples": 40, "num_shares": 1}
        run = Run(config, world, "tiny", **sizes, checkpoints=ShardedCheckpoints)
        loader = DataLoader(data(), 5)
        if world.is_main:
            loader = DataLoader(data(), batch_sampler=[()] * 8, collate_fn=tuple)
        run.resume(model, optimizer)
        num_samples = 0
        for _ in run.epochs(loader):
            for batch in run.batches(loader):
                num_samples += len(batch[0]) if batch else 0
                if optimizer:
                    set_learning_rate(optimizer, learning_rate_at(run.step, config))
                time.sleep(0.01)
                run.log(torch.tensor(2.5) if batch else None)
        return num_samples

    assert run_ranks(train_beside_a_server, 2, quiet=True) == [0, 15]
    lines = read_lines(Path(config.out) / "metrics.jsonl")
    assert [line["loss"] for line in lines] == [2.5] * 3
    # Rank 0, which writes the lines, has no forward: it waits for the others.
    assert all(line["forward_s"] < 0.005 and line["other_s"] > 0.009 for line in lines)
    index = read_json(Path(config.out) / "checkpoints/step-00000002/index.json")
    assert index["values"]["optimizer/groups/0/lr"] == learning_rate_at(1, config)


def test_free_folder_names_count_up(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        train(replace(config, out="", steps=1))
    assert names(tmp_path / "runs") == ["tiny-001", "tiny-002"]


def test_an_error_in_the_loop_is_a_failed_run(config):
    def event(rank: int, step: int) -> None:
        if step == 3:
            raise KeyError("a mistake in the script")

    try:
        train(config, event=event)
    except KeyError as error:
        assert status(Path(config.out))["state"] == "running"  # its frames still hold the Run
        traceback.clear_frames(error.__traceback__)  # as `command_line` does
    assert (status(Path(config.out))["state"], status(Path(config.out))["step"]) == ("failed", 2)
    assert not [thread for thread in threading.enumerate() if thread.name == "utilisation"]


def test_an_error_after_the_loop_is_a_failed_run(config, monkeypatch):
    def validate(run: Run, valid_loss: float) -> None:
        raise KeyError("a mistake in the validation")

    monkeypatch.setattr(Run, "finish", validate)
    with pytest.raises(KeyError):
        train(config)
    assert (status(Path(config.out))["state"], status(Path(config.out))["step"]) == ("failed", 15)
    monkeypatch.undo()
    assert refused(config) == "accepted"  # a second start validates again
    assert status(Path(config.out))["state"] == "finished"


def test_a_run_that_is_left_behind_has_failed_at_the_end_of_the_process(config):
    """As in a notebook, where the traceback of the last cell holds everything."""
    code = f"""
import torch
from manyhands.training.checkpoints import ShardedCheckpoints
from manyhands.training.run import Run
from manyhands.training.settings import TrainConfig
from manyhands.ranks.runtime import alone
from torch.utils.data import TensorDataset, DataLoader
config = TrainConfig(batch=4, steps=15, out={config.out!r})
checkpoints = {{"checkpoints": ShardedCheckpoints}}
run = Run(config, alone("cpu"), "tiny", num_samples=40, **checkpoints)
model = torch.nn.Linear(4, 1)
run.resume(model, torch.optim.SGD(model.parameters()))
epochs = run.epochs(DataLoader(TensorDataset(torch.randn(40, 4)), 4))
next(epochs)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT / "scripts")
    assert status(Path(config.out))["state"] == "failed"


def test_finish_on_a_full_disk_is_one_line_on_every_rank(config):
    def train_and_fill() -> str:
        original = Run.finish

        def finish(run: Run, valid_loss: float | None = None) -> None:
            if run.world.is_main:
                limit_file_size(10)
            original(run, valid_loss)

        Run.finish = finish
        return refused(config)

    messages = run_ranks(train_and_fill, 2, quiet=True)
    assert messages[0] == messages[1] and "File too large" in messages[0]
    assert status(Path(config.out))["state"] == "running"  # nothing more could be written


def test_a_disk_that_is_full_at_the_start_is_one_line_with_the_path(config):
    def start_on_full_disk() -> str:
        limit_file_size(10)
        return refused(config)

    messages = run_ranks(start_on_full_disk, 2, quiet=True)
    path = Path(config.out) / "config.json"
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"cannot write {path}: File too large; free some space")
