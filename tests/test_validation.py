"""The validation after the last step: it shows how far it is, and stops when it is asked to."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from manyhands.ranks.lab import run_ranks
from manyhands.ranks.runtime import BadInput
from manyhands.training import run as run_module
from manyhands.training.run import Run, TrainConfig
from test_run import data, limit_file_size, status, world_here


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
    run = Run(config, world, "tiny", num_samples=40)
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


def test_a_quick_validation_says_nothing(config, capfd):
    train_and_validate(config)
    assert "validation batch" not in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_stops_the_validation_of_all(config, number, capfd):
    def event(rank: int, given: int) -> None:
        if (rank, given) == (1, 3):
            os.kill(os.getpid(), number)

    assert run_ranks(train_and_validate, 2, config, event=event) == [None, None]  # SystemExit(0)
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
