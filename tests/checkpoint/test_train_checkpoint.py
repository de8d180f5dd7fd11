"""The job of lesson 11 trains like one process; on ranks whose number changes: test_elastic.py."""

import pytest

import train_checkpoint
from runs import (
    SAVING,
    Runs,
    assert_a_signal_in_the_validation_stops_all_ranks,
    assert_every_impl_is_tried,
    assert_goes_on_after_a_kill,
    assert_like_one_process,
    assert_starts_by_itself,
    assert_yours_train_like_one_process,
    refusal,
)

MINE = {"impl": "mine"}
WAYS = [{"impl": "scratch"}, {"impl": "torch"}]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(train_checkpoint, tmp_path_factory.mktemp("runs"))


def test_your_functions_train_like_one_process(runs, tmp_path, capfd, monkeypatch):
    yours = "samples_of_step"
    said, _ = assert_yours_train_like_one_process(runs, tmp_path, capfd, monkeypatch, yours, **MINE)
    assert "memory: at most " in said
    assert_every_impl_is_tried(train_checkpoint, [MINE, *WAYS])


@pytest.mark.parametrize("changes", WAYS)
def test_every_way_trains_like_one_process(runs, changes):
    assert_like_one_process(runs, changes, 2)


@pytest.mark.nightly
@pytest.mark.parametrize(("impl", "world_size", "victim"), [("scratch", 3, 1), ("torch", 2, 0)])
def test_a_killed_rank_goes_on_bit_for_bit(runs, tmp_path, impl, world_size, victim):
    changes = {"impl": impl, **SAVING}
    assert_goes_on_after_a_kill(runs, tmp_path / "run", changes, world_size, victim)


@pytest.mark.nightly
def test_a_signal_in_the_validation_stops_all_ranks(runs, tmp_path):
    assert_a_signal_in_the_validation_stops_all_ranks(runs, tmp_path, {}, 3)


def test_the_script_starts_by_itself(tmp_path):
    assert_starts_by_itself(train_checkpoint, tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"impl": "mine"}, "mine/checkpoint.py is not there: run check.keep()"),
        ({"device": "cuda"}, "--device cuda, but this node has 0 GPU(s) for 1 process(es)"),
    ],
)
def test_settings_that_cannot_be(runs, tmp_path, changes, words):
    assert words in refusal(train_checkpoint, runs, tmp_path, **changes)
