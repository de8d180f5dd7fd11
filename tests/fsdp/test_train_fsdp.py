"""The job of lesson 10: every way to shard trains like one process, also after a kill."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

import train_fsdp
from manyhands.fsdp import fully_shard
from manyhands.instruments.live import Live
from manyhands.models.transformer import Transformer
from manyhands.ranks.failures import RankFailed
from manyhands.ranks.lab import run_ranks
from manyhands.ranks.runtime import World
from runs import (
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


SHAPE = (40, 16, 8)  # vocabulary, block and layers: no unit is a large part of this model


def built(impl, yours=False):
    """The most bytes that live while a rank builds the job's model, and all its weights."""
    config = train_fsdp.Config(impl=impl)
    parts = train_fsdp.Parts(torch_fsdp=partial(fully_shard.torch_fsdp)) if yours else None
    world = World(dist.get_rank(), 0, dist.get_world_size(), torch.device("cpu"))
    torch.manual_seed(5)
    with Live(dict, device="cpu") as live:
        parts = parts or train_fsdp.Parts()
        model, _ = train_fsdp.shard(config, impl, parts, SHAPE, None, world)
    return live.total, torch.rand(1), fully_shard.full_state(model)


@pytest.mark.parametrize(
    ("impl", "yours", "is_deferred"),
    [("zero3", False, True), ("torch", False, True), ("torch", True, False)],
)
def test_no_rank_ever_holds_the_whole_model(impl, yours, is_deferred):
    torch.manual_seed(5)
    whole = Transformer(*SHAPE)
    nbytes = sum(param.nbytes for param in whole.parameters())
    results = run_ranks(built, 4, impl, yours)
    for name, weight in whole.state_dict().items():
        assert torch.equal(results[0][2][name], weight), name
    assert all((total < 0.6 * nbytes) == is_deferred for total, *_ in results)
    assert len({number.item() for _, number, _ in results}) == 4  # each rank's own data follow


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
