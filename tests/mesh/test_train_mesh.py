"""The job of lesson 14: meshes of all kinds train like one process, also after a kill."""

import math
from pathlib import Path

import pytest

import train_mesh
from commands import make_clone
from manyhands.jobs import mine
from runs import (
    THREE,
    TWO,
    Runs,
    assert_a_signal_in_the_validation_stops_all_ranks,
    assert_every_impl_is_tried,
    assert_goes_on_after_a_kill,
    assert_job_trains_like_one_process,
    assert_like_one_process,
    assert_same_training,
    assert_whole,
    losses,
    refusal,
    status,
    told_to_stop,
)

MINE = {"impl": "mine", "clip": 100, **TWO, **THREE}
FEW = {"steps": 8}  # a step of many small tensors on 4 ranks takes a second of processor time
WAYS = [  # settings, ranks
    *(({"impl": impl, "dp": 2, **TWO, **THREE, **FEW}, 4) for impl in ("scratch", "torch")),
    *(({"impl": impl, "pp": 2, **TWO, **THREE, **FEW}, 4) for impl in ("scratch", "torch")),
    ({"dp": 6, "replicas": 2, "micro_batches": 1, "clip": 100.0, **FEW}, 6),
]
SAVING = {"steps": 16, "save_every": 4}
STAGES_OF_SHARDS = {"pp": 2, "dp": 2, "clip": 0.5, "micro_batches": 1, **SAVING}
NATIVE = {"impl": "torch", "dp": 2, "micro_batches": 1, **TWO, **SAVING}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(train_mesh, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_clone(tmp_path_factory.mktemp("clone"))


def test_job_on_two_ranks_trains_like_one_process(clone, runs, tmp_path):
    mine.write("mesh", train_mesh.Parts()._asdict(), clone / "mine")
    yours = "coordinates, make_groups, shard_and_cut, mesh_norm, seed_of"
    said = assert_job_trains_like_one_process(runs, clone, tmp_path, yours, **MINE)
    assert "memory: at most " in said
    assert_every_impl_is_tried(train_mesh, [MINE, *(changes for changes, _ in WAYS)])


@pytest.mark.parametrize(("changes", "world_size"), WAYS)
def test_every_way_trains_like_one_process(runs, changes, world_size):
    assert_like_one_process(runs, changes, world_size)


@pytest.mark.parametrize(
    ("changes", "victim"),
    [(STAGES_OF_SHARDS, 1), pytest.param(NATIVE, 2, marks=pytest.mark.nightly)],
)
def test_a_killed_rank_goes_on_bit_for_bit(runs, tmp_path, changes, victim):
    """Shards of stages: each rank has parts of its own, and a share of the clipped norm."""
    assert_goes_on_after_a_kill(runs, tmp_path / "run", changes, 4, victim)


@pytest.mark.parametrize(
    ("impl", "mesh", "other"),
    [("scratch", {"pp": 2, "dp": 1, "tp": 1}, {"pp": 1, "dp": 2, "tp": 2})]
    + [("torch", {"pp": 1, "dp": 1, "tp": 2}, {"pp": 1, "dp": 2, "tp": 1})],
)
def test_another_mesh_goes_on_where_one_was_stopped(runs, tmp_path, impl, mesh, other):
    same = {"impl": impl, "micro_batches": 3, **TWO}
    stopped = told_to_stop(10, train_mesh.main)
    out = runs.train(math.prod(mesh.values()), tmp_path / "run", stopped, **mesh, **same)
    assert status(out)["state"] == "stopped" and len(losses(out)) == 10
    runs.train(math.prod(other.values()), out, **other, **same)
    assert_whole(out, math.prod(other.values()))
    assert_same_training(out, runs.single(**same))


def test_a_signal_in_the_validation_stops_all_ranks(runs, tmp_path):
    changes = {"pp": 2, "dp": 2, "micro_batches": 1}
    assert_a_signal_in_the_validation_stops_all_ranks(runs, tmp_path, changes, 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"impl": "mine"}, "mine/mesh.py is not there: run check.keep()"),
        ({"device": "cuda"}, "--device cuda, but this node has 0 GPU(s) for 1 process(es)"),
        ({"tp": 2}, "--pp 0 x --dp 0 x --tp 2 does not fit 1 rank(s): take sizes whose"),
    ],
)
def test_settings_that_cannot_be(runs, tmp_path, changes, words):
    assert words in refusal(train_mesh, runs, tmp_path, **changes)
