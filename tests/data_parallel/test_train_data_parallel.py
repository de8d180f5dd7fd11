"""The job of lesson 05: every way to share gradients trains like one process, also after a kill."""

import pytest

import train_data_parallel
from commands import flags
from manyhands.ranks.failures import RankFailed
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
    start,
)

SERVER = {"impl": "server", **SAVING}
WAYS = [  # settings, ranks
    *(({"impl": impl}, 2) for impl in ("naive", "bucketed", "overlapped", "torch")),
    (SERVER, 3),
]
YOURS = {
    "server": "broadcast_state, worker_step, server_step",
    "overlapped": "BucketedDDP",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(train_data_parallel, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("impl", YOURS)
def test_your_functions_train_like_one_process(runs, tmp_path, capfd, monkeypatch, impl):
    changes = {"impl": impl, "mine": True}
    assert_yours_train_like_one_process(runs, tmp_path, capfd, monkeypatch, YOURS[impl], **changes)
    assert_every_impl_is_tried(train_data_parallel, [changes for changes, _ in WAYS])


@pytest.mark.parametrize(("changes", "world_size"), WAYS)
def test_every_way_trains_like_one_process(runs, changes, world_size):
    assert_like_one_process(runs, changes, world_size)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_killed_rank_goes_on_bit_for_bit(runs, tmp_path, victim):
    """The server, which alone has the optimizer; or a worker."""
    assert_goes_on_after_a_kill(runs, tmp_path / "run", SERVER, 3, victim)


def test_a_signal_in_the_validation_stops_all_ranks(runs, tmp_path):
    assert_a_signal_in_the_validation_stops_all_ranks(runs, tmp_path, {"impl": "server"}, 3)


def test_server_needs_a_batch_that_its_workers_can_share(runs, tmp_path):
    """Six samples go to three workers, though not to four ranks; and five to no two workers."""
    runs.train(4, tmp_path / "run", impl="server", batch=6, steps=2)
    with pytest.raises(RankFailed, match="batch 5 cannot be shared evenly by 2 ranks"):
        runs.train(3, tmp_path / "other", impl="server", batch=5)
    assert not (tmp_path / "other").exists()


def test_the_script_starts_by_itself(tmp_path):
    assert_starts_by_itself(train_data_parallel, tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "cuda"}, "--device cuda, but this node has 0 GPU(s) for 1 process(es)"),
        ({"batch": 107}, "holds only 106 blocks"),
        ({"impl": "server"}, "--impl server on 1 rank is a server without workers"),
        ({"impl": "torch", "mine": True}, "--impl torch has no function of yours"),
    ],
)
def test_settings_that_cannot_be(runs, tmp_path, changes, words):
    assert words in refusal(train_data_parallel, runs, tmp_path, **changes)


def test_mine_without_a_file_or_without_what_is_needed(runs, tmp_path):
    line = refusal(train_data_parallel, runs, tmp_path, mine=True)
    assert "mine/data_parallel.py is not there: run check.keep() in the data_parallel no" in line
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/data_parallel.py").write_text("def average_gradients(module): pass")
    line = refusal(train_data_parallel, runs, tmp_path, mine=True, impl="bucketed")
    assert "mine/data_parallel.py defines none of broadcast_state, make_buckets: run" in line


def test_your_functions_are_what_trains(runs, tmp_path):
    speaking = "\ndef {0}(*what):\n    print('this is {0}')\n    return []\n"
    names = ("broadcast_state", "average_gradients", "make_buckets")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/data_parallel.py").write_text("".join(map(speaking.format, names)))
    said = {"naive": ["average_gradients"] * 2, "bucketed": ["make_buckets"]}
    for impl, calls in said.items():
        words = flags(runs.folder, impl=impl, mine=True, steps=2)
        code, out, err = start(train_data_parallel, words, tmp_path)
        assert code == 0, err
        lines = [line for line in out.splitlines() if line.startswith("this is ")]
        assert lines == [f"this is {name}" for name in ["broadcast_state", *calls]]
        assert f"yours: broadcast_state, {calls[0]}; the course's: all else\n" in out
