"""The job of lesson 12: every schedule trains like one process, also after a kill."""

import gc
import json
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import train_pipeline
from manyhands.models.transformer import Transformer
from manyhands.pipeline import stages
from manyhands.ranks.failures import RankFailed
from manyhands.ranks.lab import run_ranks
from runs import (
    SAVING,
    THREE,
    TWO,
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

MINE = {"impl": "mine", **THREE}
STAGES = {"schedule": "1f1b", **THREE, **SAVING}
WAYS = [  # settings, ranks
    *(({"schedule": way, **THREE}, 3) for way in ("naive", "gpipe")),
    (STAGES, 3),
    ({"schedule": "interleaved", "micro_batches": 2, **TWO}, 2),
    ({"recompute": True, "stages": 2, **THREE}, 4),
    *(({"impl": "torch", "schedule": way, **THREE}, 2) for way in ("gpipe", "1f1b")),
    ({"impl": "torch", "schedule": "zero-bubble", "micro_batches": 2, **TWO}, 2),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(train_pipeline, tmp_path_factory.mktemp("runs"), keeps_best=False)


def test_your_functions_train_like_one_process(runs, tmp_path, capfd, monkeypatch):
    yours = "partition, Pipeline, sum_tied, gpipe, one_f_one_b, interleaved, make_grid"
    texts = assert_yours_train_like_one_process(runs, tmp_path, capfd, monkeypatch, yours, **MINE)
    assert "memory: at most " in texts[0]
    assert all("in the last step the ranks waited " in text for text in texts)
    assert_every_impl_is_tried(train_pipeline, [MINE, *(changes for changes, _ in WAYS)])


@pytest.mark.parametrize(("changes", "world_size"), WAYS)
def test_every_way_trains_like_one_process(runs, changes, world_size):
    assert_like_one_process(runs, changes, world_size)


@pytest.mark.parametrize("impl", ["scratch", "torch"])
def test_bfloat16_trains_nearly_like_float32(runs, impl):
    changes = {"impl": impl, "dtype": "bfloat16", **THREE}
    assert_nearly_same_training(runs.calm(2, **changes), runs.single(**changes))


@pytest.mark.parametrize(
    ("changes", "world_size", "victim"),
    [
        (STAGES, 3, 1),
        pytest.param({"stages": 2, **THREE, **SAVING}, 4, 3, marks=pytest.mark.nightly),
    ],
)
def test_a_killed_rank_goes_on_bit_for_bit(runs, tmp_path, changes, world_size, victim):
    """Stages: each rank has parts of its own."""
    assert_goes_on_after_a_kill(runs, tmp_path / "run", changes, world_size, victim)


@pytest.mark.nightly
def test_a_signal_in_the_validation_stops_all_ranks(runs, tmp_path):
    assert_a_signal_in_the_validation_stops_all_ranks(runs, tmp_path, THREE, 3)


def test_pytorch_s_1f1b_with_fewer_micro_batches_than_ranks_is_refused(runs, tmp_path):
    with pytest.raises(RankFailed, match="1F1B with 2 micro-batches on 3 ranks: take --micro-bat"):
        runs.train(3, tmp_path / "run", impl="torch", micro_batches=2)
    assert not (tmp_path / "run").exists()


def held_stages(path: Path) -> tuple[set[int], set[int]]:
    """Of a cut model: the layers whose parameters still live, and those of this rank's stages."""
    parts, model = train_pipeline.Parts(), Transformer(10, 8, 4)
    layers = stages.layers_of(model)
    refs = {i: [weakref.ref(p) for p in one.parameters()] for i, one in enumerate(layers)}
    pipe, replicas = parts.make_grid(3)
    own = range(dist.get_rank(), 3, 3)
    place = train_pipeline.Place(pipe, pipe, replicas, (0, 1), 3, own, 3)
    example = torch.zeros(2, 8, dtype=torch.long)
    kept = train_pipeline.take_stages(model, example, place, parts, path)
    start, stop = json.loads(path.read_text())["bounds"][own[0] :][:2]
    del model, layers
    gc.collect()
    held = {i for i, found in refs.items() if any(ref() is not None for ref in found)}
    assert kept
    return held, set(range(start, stop))


def test_a_rank_of_a_pipeline_holds_no_stage_of_others(tmp_path):
    for rank, (held, own) in enumerate(run_ranks(held_stages, 3, tmp_path / "stages.json")):
        assert held == (own if rank == 1 else own | {0, 5}), "embedding and head share a matrix"


def test_the_script_starts_by_itself(tmp_path):
    assert_starts_by_itself(train_pipeline, tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"impl": "mine"}, "mine/pipeline.py is not there: run check.keep()"),
        ({"device": "cuda"}, "--device cuda, but this node has 0 GPU(s) for 1 process(es)"),
        ({"stages": 2}, "--stages 2 does not fit 1 rank(s)"),
        ({"micro_batches": 4}, "batch 6 cannot be cut into 1 replica(s) x 4 micro-batches"),
        ({"micro_batches": 0}, "micro_batches is 0: take at least 1"),
        ({"schedule": "zero-bubble", **THREE}, "add --impl torch"),
        ({"schedule": "interleaved", **THREE}, "take 2 ranks or more"),
        ({"impl": "torch", "recompute": True}, "leave out --impl torch"),
    ],
)
def test_settings_that_cannot_be(runs, tmp_path, changes, words):
    assert words in refusal(train_pipeline, runs, tmp_path, **changes)
