"""The job of lesson 13: matrices cut in every way train like one process."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

import train_tensor
from manyhands.models.transformer import Transformer
from manyhands.ranks.lab import run_ranks
from runs import (
    SAVING,
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

MINE = {"impl": "mine", "clip": 100.0, **TWO}
FEW = {"steps": 8}  # DTensors take their time, on 4 ranks more than on 2
WAYS = [  # settings, ranks
    (changes | {"impl": impl, **TWO}, world_size)
    for changes, world_size in (({}, 2), ({"sequence": True}, 2), ({"tensor": 2, **FEW}, 4))
    for impl in ("scratch", "torch")
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(train_tensor, tmp_path_factory.mktemp("runs"))


def test_your_functions_train_like_one_process(runs, tmp_path, capfd, monkeypatch):
    yours = "TensorParallel, TensorSequenceParallel, data_place"
    said, _ = assert_yours_train_like_one_process(runs, tmp_path, capfd, monkeypatch, yours, **MINE)
    assert "memory: at most " in said
    assert_every_impl_is_tried(train_tensor, [MINE, *(changes for changes, _ in WAYS)])


@pytest.mark.parametrize(("changes", "world_size"), WAYS)
def test_every_way_trains_like_one_process(runs, changes, world_size):
    assert_like_one_process(runs, changes, world_size)


@pytest.mark.parametrize("impl", ["scratch", "torch"])
def test_bfloat16_trains_nearly_like_float32(runs, impl):
    changes = {"impl": impl, "dtype": "bfloat16", **TWO, **FEW}
    assert_nearly_same_training(runs.calm(2, **changes), runs.single(**changes))


def a_batch():
    return torch.randint(8, (2, 3, 4), generator=torch.Generator().manual_seed(2))


def clipped(changes):
    config = train_tensor.Config(clip=0.1, **changes)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=train_tensor.MESH)
    torch.manual_seed(1)
    whole = Transformer(8, 4, 2)
    before = set(whole.parameters())
    with loss_parallel() if config.impl == "torch" else nullcontext():
        model = train_tensor.cut_over(config, train_tensor.Parts(), whole, mesh)
        model(*a_batch()).backward()
    model.finish_gradients()
    copies = [param for param in model.parameters() if param in before]
    train_tensor.clip_gradients(config, model, copies, mesh.get_group("tensor"))
    torch.optim.SGD(model.parameters(), 1.0, foreach=False).step()
    world = SimpleNamespace(is_main=dist.get_rank() == 0)
    return train_tensor.uncut(model, Transformer(8, 4, 2), world).state_dict()


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("impl", ["scratch", "torch"])
def test_gradients_are_clipped_by_the_norm_of_the_whole(impl, sequence):
    torch.manual_seed(1)
    model = Transformer(8, 4, 2)
    model(*a_batch()).backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.2
    torch.optim.SGD(model.parameters(), 1.0).step()
    found = run_ranks(clipped, 2, {"impl": impl, "sequence": sequence})[0]
    torch.testing.assert_close(found, model.state_dict(), rtol=1e-4, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("changes", "world_size", "victim"),
    [({}, 2, 0), ({"impl": "torch", "tensor": 2, "sequence": True}, 4, 2)],
)
def test_a_killed_rank_goes_on_bit_for_bit(runs, tmp_path, changes, world_size, victim):
    changes = changes | TWO | SAVING
    assert_goes_on_after_a_kill(runs, tmp_path / "run", changes, world_size, victim)


@pytest.mark.nightly
def test_a_signal_in_the_validation_stops_all_ranks(runs, tmp_path):
    assert_a_signal_in_the_validation_stops_all_ranks(runs, tmp_path, TWO, 2)


def test_the_script_starts_by_itself(tmp_path):
    assert_starts_by_itself(train_tensor, tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"impl": "mine"}, "mine/tensor.py is not there: run check.keep()"),
        ({"device": "cuda"}, "--device cuda, but this node has 0 GPU(s) for 1 process(es)"),
        ({"clip": -1.0}, "clip is -1.0: take a positive norm, or 0 for no limit"),
        ({"tensor": 2}, "--tensor 2 does not fit 1 rank(s)"),
    ],
)
def test_settings_that_cannot_be(runs, tmp_path, changes, words):
    assert words in refusal(train_tensor, runs, tmp_path, **changes)
