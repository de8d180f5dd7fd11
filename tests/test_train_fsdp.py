"""The job of lesson 10: every way to shard trains like one process, also after a kill."""

import pytest

import train_fsdp
from manyhands.ranks.failures import RankFailed
from training import (
    SAVING,
    Runs,
    assert_a_signal_in_the_validation_stops_all_ranks,
    assert_every_impl_is_tried,
    assert_goes_on_after_a_kill,
    assert_like_one_process,
    assert_nearly_same_training,
    assert_starts_by_itself,
    assert_yours_train_like_one_process,
    refusal,
)

MINE = {"impl": "mine"}
FLATS = {"impl": "zero3", **SAVING}
DTENSORS = {"impl": "torch", **SAVING}
HSDP = {"impl": "zero3", "mesh": "2x2", "batch": 8, **SAVING}
WAYS = [  # settings, ranks
    *(({"impl": impl}, 2) for impl in ("zero1", "zero2", "zero3")),
    (DTENSORS, 2),
    *(({"impl": impl, "mesh": "2x1"}, 2) for impl in ("zero3", "torch")),
    ({"impl": "torch", "offload": True}, 2),
    (FLATS, 3),
    (HSDP, 4),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(train_fsdp, tmp_path_factory.mktemp("runs"), keeps_best=False)


def test_your_functions_train_like_one_process(runs, tmp_path, capfd, monkeypatch):
    yours = (
        "Flat, ShardedOptimizer, reduce_during_backward, ShardedFlat, FSDP, torch_fsdp, make_mesh"
    )
    said, _ = assert_yours_train_like_one_process(runs, tmp_path, capfd, monkeypatch, yours, **MINE)
    assert "memory: at most " in said
    assert_every_impl_is_tried(train_fsdp, [MINE, *(changes for changes, _ in WAYS)])


@pytest.mark.parametrize(("changes", "world_size"), WAYS)
def test_every_way_trains_like_one_process(runs, changes, world_size):
    assert_like_one_process(runs, changes, world_size)


@pytest.mark.parametrize("impl", ["zero3", "torch"])
def test_bfloat16_trains_nearly_like_float32(runs, impl):
    changes = {"impl": impl, "dtype": "bfloat16"}
    assert_nearly_same_training(runs.calm(2, **changes), runs.single(**changes))


@pytest.mark.parametrize(
    ("changes", "world_size", "victim"),
    [
        (FLATS, 3, 1),
        (DTENSORS, 2, 1),
        (HSDP, 4, 3),
        pytest.param({**SAVING, "impl": "zero1"}, 2, 1, marks=pytest.mark.nightly),
        pytest.param({**SAVING, "impl": "zero2"}, 3, 0, marks=pytest.mark.nightly),
        pytest.param({**DTENSORS, "mesh": "2x2", "batch": 8}, 4, 2, marks=pytest.mark.nightly),
        pytest.param(DTENSORS, 3, 1, marks=pytest.mark.nightly),
    ],
)
def test_a_killed_rank_goes_on_bit_for_bit(runs, tmp_path, changes, world_size, victim):
    """Also shards, of weights, gradients and optimizer, each in its rank's own file."""
    assert_goes_on_after_a_kill(runs, tmp_path / "run", changes, world_size, victim)


def test_a_signal_in_the_validation_stops_all_ranks(runs, tmp_path):
    assert_a_signal_in_the_validation_stops_all_ranks(runs, tmp_path, {"impl": "zero3"}, 3)


def test_a_limit_that_one_rank_passes_and_two_do_not(runs, tmp_path):
    config = {"impl": "zero3", "limit_mb": 0.3, "batch": 4, "steps": 4}
    with pytest.raises(RankFailed, match=r"[\d,]+ more than the limit of 300,000"):
        runs.train(1, tmp_path / "one", **config)
    runs.train(4, tmp_path / "four", **config)


def test_the_script_starts_by_itself(tmp_path):
    assert_starts_by_itself(train_fsdp, tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"impl": "mine"}, "mine/fsdp.py is not there: run check.keep()"),
        ({"device": "cuda"}, "--device cuda, but this node has 0 GPU(s) for 1 process(es)"),
    ],
)
def test_settings_that_cannot_be(runs, tmp_path, changes, words):
    assert words in refusal(train_fsdp, runs, tmp_path, **changes)
