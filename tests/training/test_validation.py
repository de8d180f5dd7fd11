"""Validation shows how far it is and stops when it is asked to; the best checkpoint is tested."""

import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import runs
import train_ddp
import train_single
from commands import settings, write_text
from manyhands.ranks.failures import BadInput
from manyhands.ranks.lab import RankFailed, run_ranks
from manyhands.saving.index import sealed
from manyhands.training import run as run_module
from manyhands.training.checkpoints import ShardedCheckpoints
from manyhands.training.run import Run
from manyhands.training.settings import TrainConfig
from manyhands.training.storage import read_json, read_lines
from small_run import Net, cut_in_half, data, limit_file_size, names, status, world_here


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return TrainConfig(batch=4, steps=15, save_every=4, out=str(tmp_path / "run"))


def train_and_validate(
    config: TrainConfig, num_batches: tuple[int, ...] = (6, 5), event=None, pause_s: float = 0.0
) -> int:
    """Train, and validate on as many batches as this rank has. Returns how many it was given."""
    world = world_here()
    if pause_s:
        run_module.VALID_PAUSE_S = 0.0
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    run = Run(config, world, "tiny", num_samples=40, checkpoints=ShardedCheckpoints)
    run.resume(model, optimizer)
    loader = DataLoader(data(), config.batch // world.world_size)
    for _ in run.epochs(loader):
        for _ in run.batches(loader):
            run.log(torch.tensor(2.5))
    given = 0
    own = [data(4)[:]] * num_batches[world.rank]
    for inputs, targets in run.validation(own):
        assert inputs.shape == (4, 4) and targets.shape == (4, 1)
        given += 1
        time.sleep(pause_s)
        if event:
            event(world.rank, given)
    run.finish(valid_loss=1.5)
    return given


@pytest.mark.parametrize("num_batches", [(6, 5), (0, 3)])
def test_each_rank_validates_on_its_own_batches(config, num_batches, capfd):
    assert run_ranks(train_and_validate, 2, config, num_batches, pause_s=0.02) == [*num_batches]
    most = max(num_batches)
    said = capfd.readouterr()
    said = said.out + said.err
    assert f"validation batch 1 of {most}: " in said and said.count("validation batch") == most
    end = status(Path(config.out))
    assert end["state"] == "finished" and end["valid_loss"] == 1.5
    # Rank 0 measures, which may start while the others are at work.
    assert 0.02 * num_batches[0] < end["valid_s"] < 60


def test_a_run_that_diverges_says_so_at_once_and_at_its_end(tmp_path, capfd):
    words = settings(write_text(tmp_path), out=str(tmp_path / "run"), learning_rate=1e30)
    runs.train(train_single, 1, train_single.Config(**words), quiet=False)
    said = capfd.readouterr().out
    at = said.index("diverged: the loss of step ")
    assert at < said.index("validation loss after step 20: nan")
    ends = [line for line in said.splitlines() if "finished: " in line]
    assert len(ends) == 1 and "but diverged: the loss was not finite from step" in ends[0]
    assert "inf" not in ends[0].replace("finite", "").replace("finished", "")
    assert "not finite from step" in (tmp_path / "run" / "report.html").read_text()
    text = (tmp_path / "run" / "status.json").read_text()
    end = json.loads(text, parse_constant=pytest.fail)  # Infinity and NaN are no JSON
    assert end["valid_loss"] is None and end["state"] == "finished"


def test_a_quick_validation_says_nothing(config, capfd):
    train_and_validate(config)
    assert "validation batch" not in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_stops_the_validation_of_all(config, number, capfd):
    def event(rank: int, given: int) -> None:
        if (rank, given) == (1, 3):
            os.kill(os.getpid(), number)

    assert run_ranks(train_and_validate, 2, config, event=event) == [None, None]  # SystemExit(75)
    said = capfd.readouterr().out
    assert f"stopped by {number.name} before validation batch 4 of 6, all 15 steps are" in said
    assert status(Path(config.out))["state"] == "stopped"
    assert run_ranks(train_and_validate, 2, config) == [6, 5]
    assert f"resumed {config.out} at step 15 of 15" in capfd.readouterr().out
    assert status(Path(config.out))["state"] == "finished"


def test_an_interrupt_ends_the_validation(config):
    def interrupt(rank: int, given: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
        raise AssertionError("not interrupted")

    with pytest.raises(KeyboardInterrupt):
        train_and_validate(config, event=interrupt)
    assert status(Path(config.out))["state"] == "failed"
    assert train_and_validate(config) == 6  # a second start validates again


def test_a_full_disk_while_validating_is_one_line_on_every_rank(config):
    def refused_in_validation() -> str:
        def event(rank: int, given: int) -> None:
            if (rank, given) == (0, 1):
                limit_file_size(10)
                time.sleep(1.2)  # until the next sample

        try:
            train_and_validate(config, event=event)
        except BadInput as error:
            return str(error)
        return "accepted"

    messages = run_ranks(refused_in_validation, 2, quiet=True)
    assert messages[0] == messages[1] and "cannot write" in messages[0]


# ---- the best checkpoint -----------------------------------------------------------------------

LOSSES = {4: 3.0, 8: 1.0, 12: 2.0, 15: 1.5}  # by step: step 8 is the best


def train_and_keep_best(
    config: TrainConfig, by_step=LOSSES, event=None, keep: bool = True
) -> tuple[list[float], list[list[float]]]:
    """Train on shuffled data with dropout, with validation losses of our choice.

    Returns the losses of the training and the weights that were validated, then tested.
    """
    world = world_here()
    torch.manual_seed(config.seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    run = Run(config, world, "tiny", num_samples=40, checkpoints=ShardedCheckpoints)
    loader = DataLoader(data(), config.batch // world.world_size, shuffle=True)
    seen = []

    def measure(batches) -> float:
        if event:
            event(run.step)
        seen.append(model.layers[0].weight.flatten()[:3].tolist())
        for inputs, targets in batches:
            model(inputs, targets)  # in training mode, so that it draws random numbers
        return by_step[run.step]

    run.resume(model, optimizer)
    valid = DataLoader(data(8), 4, shuffle=True)
    if keep:
        run.keep_best(measure, valid)
    losses = []
    for _ in run.epochs(loader):
        for inputs, targets in run.batches(loader):
            loss = model(inputs, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            run.log(loss)
    if keep:
        assert run.test(valid, lambda loss: f"{loss} in words") == by_step[run.step]
    run.finish()
    return losses, seen


def kept(config: TrainConfig) -> list[str]:
    return names(Path(config.out) / "checkpoints")


def steps(*numbers: int) -> list[str]:
    return [f"step-{number:08d}" for number in numbers]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_best_checkpoint_is_kept_and_tested(config, world_size, capfd):
    long = replace(config, steps=24)
    by_step = {4: 1.0, 8: 3.0, 12: 2.0, 16: float("nan"), 20: 1.0, 24: 1.5}
    ((_, seen), *_) = run_ranks(train_and_keep_best, world_size, long, by_step)
    assert kept(long) == steps(4, 16, 20, 24)
    assert seen[-1] == seen[0] != seen[-2]  # the weights of step 4 were tested
    end = status(Path(long.out))
    assert (end["valid_loss"], end["test_loss"], end["test_step"]) == (1.0, 1.5, 4)
    said = capfd.readouterr().out
    assert "validation loss after step 12: 2.0000\n" in said
    assert "test loss 1.5000 (1.5 in words), from step 4\n" in said
    lines = (Path(long.out) / "valid.jsonl").read_text().splitlines()
    assert [json.loads(line)["valid_loss"] for line in lines] == [1.0, 3.0, 2.0, None, 1.0, 1.5]


def test_validation_changes_nothing_of_the_training(config, tmp_path):
    without = train_and_keep_best(replace(config, out=str(tmp_path / "calm")), keep=False)
    assert train_and_keep_best(config)[0] == without[0]


def test_a_run_that_ended_before_its_validation_validates_first(config, tmp_path):
    def kill(step: int) -> None:
        if step == 12:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankFailed):
        run_ranks(train_and_keep_best, 1, config, event=kill, quiet=True)
    assert kept(config) == steps(4, 8, 12)
    calm = replace(config, out=str(tmp_path / "calm"))
    _, seen = train_and_keep_best(config)
    _, all_seen = train_and_keep_best(calm)
    assert seen == all_seen[2:] and seen[-1] == all_seen[1]
    texts = [(Path(one.out) / "valid.jsonl").read_text() for one in (config, calm)]
    assert texts[0] == texts[1]
    assert status(Path(config.out))["test_step"] == status(Path(calm.out))["test_step"] == 8


def test_losses_of_steps_that_are_done_again_are_measured_again(config):
    def stop(step: int) -> None:
        if step == 15:
            os.kill(os.getpid(), signal.SIGTERM)

    run_ranks(train_and_keep_best, 1, config, event=stop, quiet=True)
    for number in (12, 15):
        shutil.rmtree(Path(config.out) / "checkpoints" / steps(number)[0])
    _, seen = train_and_keep_best(config, {12: 0.5, 15: 2.0})
    assert len(seen) == 3 and status(Path(config.out))["test_step"] == 12


def test_a_damaged_best_checkpoint_gives_way_to_the_next(config, capfd):
    def damage(step: int) -> None:
        state = Path(config.out) / "checkpoints" / steps(8)[0] / "rank-00000.pt"
        if step == 15 and state.exists():
            cut_in_half(state)

    train_and_keep_best(config, event=damage)
    said = capfd.readouterr().out
    assert "step-00000008/rank-00000.pt has " in said
    assert "kept as step-00000008.broken, and the weights are taken from step-00000015" in said
    assert status(Path(config.out))["test_step"] == 15


def test_a_whole_best_checkpoint_that_does_not_fit_stays_where_it_is(config, capfd):
    best = Path(config.out) / "checkpoints" / steps(8)[0]

    def rename(step: int) -> None:
        if step == 15:
            index = read_json(best / "index.json")
            del index["sha256"]
            index["values"]["identity/job"] = "other"
            (best / "index.json").write_text(json.dumps(sealed(index)))

    train_and_keep_best(config, event=rename)
    said = capfd.readouterr().out
    assert "step-00000008 was saved with job=other, not tiny" in said
    assert "; the weights are taken from step-00000015" in said and "is kept as" not in said
    assert best.exists() and status(Path(config.out))["test_step"] == 15


def test_one_two_and_four_ranks_choose_and_test_the_same_weights(tmp_path):
    (tmp_path / "text.txt").write_text("one boat and 2 more boats.\n" * 99)
    ends, rates = [], []
    for ranks in (1, 2, 4):
        out = tmp_path / f"run-{ranks}"
        small = {"block": 8, "layers": 1, "batch": 8, "steps": 4, "save_every": 2}
        config = train_ddp.Config(data=str(tmp_path / "text.txt"), out=str(out), **small)
        runs.train(train_ddp, ranks, config)
        ends.append(status(out))
        rates.append([line["valid_loss"] for line in read_lines(out / "valid.jsonl")])
    for end, rate in zip(ends, rates, strict=True):
        assert rate == pytest.approx(rates[0], abs=1e-4) and len(rate) == 2
        assert end["valid_loss"] == min(rate) and "bits per character" in end["test_words"]
        assert end["test_loss"] == pytest.approx(ends[0]["test_loss"], abs=1e-4)
        assert end["test_step"] == ends[0]["test_step"]
