"""The job of lesson 09: each way to save memory trains like one process, also after a kill."""

import pytest

import train_memory
from runs import (
    SAVING,
    Runs,
    assert_every_impl_is_tried,
    assert_goes_on_after_a_kill,
    assert_like_one_process,
    assert_nearly_same_training,
    assert_starts_by_itself,
    assert_yours_train_like_one_process,
    refusal,
)

MINE = {"impl": "mine", "save": "checkpointing"}
ALL = {"save": "all", **SAVING}
WAYS = [  # settings, ranks
    *(({"save": save}, 2) for save in ("nothing", "checkpointing", "accumulation")),
    ({"impl": "torch", "save": "checkpointing"}, 1),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(train_memory, tmp_path_factory.mktemp("runs"))


def test_your_functions_train_like_one_process(runs, tmp_path, capfd, monkeypatch):
    yours = "accumulate, Checkpoint"
    said, _ = assert_yours_train_like_one_process(runs, tmp_path, capfd, monkeypatch, yours, **MINE)
    assert "memory: at most " in said
    assert_every_impl_is_tried(train_memory, [MINE, *(changes for changes, _ in WAYS)])


@pytest.mark.parametrize(("changes", "world_size"), WAYS)
def test_every_way_trains_like_one_process(runs, changes, world_size):
    assert_like_one_process(runs, changes, world_size)


@pytest.mark.parametrize("changes", [{"save": "autocast"}, ALL])
def test_bfloat16_trains_nearly_like_float32(runs, changes):
    assert_nearly_same_training(runs.calm(2, **changes), runs.single(**changes))


def test_a_killed_rank_goes_on_bit_for_bit(runs, tmp_path):
    """Replicas: every rank has the whole state."""
    assert_goes_on_after_a_kill(runs, tmp_path / "run", ALL, 2, victim=1)


def test_the_script_starts_by_itself(tmp_path):
    assert_starts_by_itself(train_memory, tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"impl": "mine"}, "mine/memory.py is not there: run check.keep()"),
        ({"device": "cuda"}, "--device cuda, but this node has 0 GPU(s) for 1 process(es)"),
    ],
)
def test_settings_that_cannot_be(runs, tmp_path, changes, words):
    assert words in refusal(train_memory, runs, tmp_path, **changes)
