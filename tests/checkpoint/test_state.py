"""The training state resumes bit for bit, also through a sharded checkpoint."""

import io
import tempfile
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from manyhands.checkpoint.state import Position, Training, TrainingState
from manyhands.data import images
from manyhands.ranks.runtime import World
from manyhands.saving.names import flatten
from manyhands.saving.pieces import vectors_of
from manyhands.saving.sharded import load_sharded, save_sharded
from manyhands.training.checkpoints import ShardedCheckpoints
from manyhands.training.run import save_once


def make(name="digits", seed=0):
    digits = images.load("embedded")
    data = TensorDataset(digits.train_inputs.flatten(1)[:480], digits.train_labels[:480])
    validation = TensorDataset(digits.test_inputs.flatten(1), digits.test_labels)
    return Training(data, validation, name, seed)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def facts(run):
    """Everything but the seconds, as plain data with tensors."""
    state = TrainingState(run).state_dict()
    state["timestamp"].pop("seconds")
    return state


def assert_equal(found, wanted):
    (found, values), (wanted, others) = flatten(found), flatten(wanted)
    assert values == others and found.keys() == wanted.keys()
    assert all(torch.equal(found[name].tensor, wanted[name].tensor) for name in wanted)


@pytest.mark.parametrize("num_steps", [13, 20])  # in the middle of an epoch of 10, and at its end
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit_also_twice(num_steps):
    run = make()
    run.train(num_steps)
    state = TrainingState(run).state_dict()
    losses = run.train(20)
    wanted = facts(run)
    found = []
    for steps in (7, 13):  # interrupted once more in between
        run = make("another", seed=5)
        TrainingState(run).load_state_dict(through_a_file(state))
        found += run.train(steps)
        state = TrainingState(run).state_dict()
    assert found == losses
    assert_equal(facts(run), wanted)


def test_the_state_goes_through_a_sharded_checkpoint():
    run = make()
    run.train(13)
    with tempfile.TemporaryDirectory() as folder:
        save_sharded(TrainingState(run).state_dict(), folder)
        wanted = run.train(5)
        other = make("another", seed=5)
        other.train(1)  # so that the optimizer has something to load into
        own = TrainingState(other)
        own.load_state_dict(load_sharded(own.state_dict(), folder))
    assert other.train(5) == wanted
    assert_equal(facts(other), facts(run))


class Counting(TensorDataset):
    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


def test_a_position_reads_no_sample_on_the_way_and_discarding_reads_all():
    counting = Counting(torch.arange(60))
    place = Position(60, seed=3)
    place.load_state_dict({"epoch": 0, "position": 40})
    direct = [batch.tolist() for (batch,) in DataLoader(counting, 10, sampler=place)]
    assert counting.reads == 20
    place = Position(60, seed=3)
    every = [batch.tolist() for (batch,) in DataLoader(counting, 10, sampler=place)]
    assert every[4:] == direct and counting.reads == 20 + 60


def test_worker_processes_that_draw_ahead_do_not_move_the_place():
    place = Position(60, seed=3)
    loader = DataLoader(TensorDataset(torch.arange(60)), 10, sampler=place, num_workers=1)
    batches = iter(loader)
    (first,) = next(batches)
    place.advance(len(first))
    assert place.state_dict() == {"epoch": 0, "position": 10}
    assert first.tolist() + list(place) == place.order()


class Net(nn.Module):
    """A model that calls one of its parts `module`."""

    def __init__(self):
        super().__init__()
        self.module, self.head = nn.Linear(2, 2), nn.Linear(2, 1)


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def test_a_checkpoint_unwraps_wrappers_and_no_model_with_a_part_called_module(tmp_path):
    inner, net = nn.Linear(2, 2), Net()
    world = World(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"))
    checkpoints = ShardedCheckpoints(tmp_path / "checkpoints", {}, world)
    for model, wanted in (
        (net, net),
        (Wrapper(inner), inner),
        (AveragedModel(inner), None),
        (inner, inner),
    ):
        checkpoints.register(model, None, ())
        assert checkpoints.module is (wanted or model.module)
        save_once(model, tmp_path / "model.pt")
        names = torch.load(tmp_path / "model.pt", weights_only=True).keys()
        assert names == (wanted or model.module).state_dict().keys()


def vector(shard):
    """What looks like a sharded vector."""
    return SimpleNamespace(whole=torch.zeros(4), shard=shard, padding=torch.zeros(0), group=None)


@pytest.mark.parametrize(
    "units",
    [64, [64, 32], [], [[1]], nn.ModuleList([nn.Linear(2, 2)]), [[vector(nn.Parameter())]]],
    ids=["a number", "numbers", "none", "no vector", "modules", "another model's"],
)
def test_a_model_with_units_of_another_kind_has_no_sharded_vectors(units):
    model = nn.Linear(2, 2)
    model.units = units
    assert vectors_of(model) == []


def test_a_model_with_its_parameters_in_vectors_has_them():
    model = nn.Linear(2, 2)
    one = vector(model.weight)
    model.units = [[one], []]
    assert vectors_of(model) == [one]
