"""DCP and the save by hand: the same state, the same tensors; what DCP passes over in silence."""

import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel

from manyhands.checkpoint.dcp import AppState, load_dcp, save_dcp
from manyhands.checkpoint.state import Position
from manyhands.fsdp.fully_shard import torch_fsdp
from manyhands.ranks.lab import run_ranks
from manyhands.saving.agree import gather
from manyhands.saving.kept import optimizer_state, set_groups
from manyhands.saving.names import flatten
from manyhands.saving.pieces import model_state
from manyhands.saving.sharded import load_sharded, save_sharded


def build(kind, seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model = DistributedDataParallel(net) if kind == "ddp" else torch_fsdp(net, [net[0]])
    return model, torch.optim.AdamW(model.parameters(), 1e-2), Position(120, seed)


def steps(model, optimizer, place, count):
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    losses = []
    for _ in range(count):
        draw = torch.Generator().manual_seed(place.position)
        inputs = torch.randn(12, 7, generator=draw, dtype=torch.float64)
        loss = model(inputs[rank::num_ranks]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9  # a number that is no tensor
        place.advance(12)
        mean = loss.detach() / num_ranks
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def by_hand(model, optimizer, place):
    inner = getattr(model, "module", model)
    return {
        "model": model_state(inner),
        "optimizer": optimizer_state(optimizer),
        "place": place.state_dict(),
    }


def gathered(run):
    """Every tensor of a run whole, from the pieces of all ranks; every number."""
    pieces, values = flatten(by_hand(*run))
    whole = {}
    for held in gather({name: (one.box, one.shape, one.tensor) for name, one in pieces.items()}):
        for name, (box, shape, tensor) in held.items():
            target = whole.setdefault(name, torch.full(shape, torch.nan, dtype=tensor.dtype))
            target[box.within((0,) * len(shape))] = tensor
    return whole, values


def train_and_save(kind, folder):
    run = build(kind, 0)
    steps(*run, 3)
    app = AppState(*run)
    own_group = dist.new_group(backend="gloo")
    save_dcp(app, f"{folder}/dcp")
    save_sharded(by_hand(*run), f"{folder}/hand")
    saving = dcp.async_save({"app": app}, checkpoint_id=f"{folder}/async", process_group=own_group)
    state = gathered(run)
    losses = steps(*run, 10)  # while the thread saves
    saving.result()
    return state, losses, gathered(run)


def resume(kind, folder, way):
    run = build(kind, 5)
    if kind == "ddp" and dist.get_world_size() == 4:
        steps(*run, 1)  # DDP divides its buckets anew after its first step, and then sums as before
    if way == "hand":
        _, optimizer, place = run
        state = load_sharded(by_hand(*run), f"{folder}/hand")
        set_groups(optimizer, state["optimizer"]["groups"])
        place.load_state_dict(state["place"])
    else:
        app = AppState(*run)
        for _ in range(2):  # the second time into what the first has loaded
            load_dcp(app, f"{folder}/{way}")
    return gathered(run), steps(*run, 10), gathered(run)


def assert_equal(found, wanted):
    (tensors, values), (others, numbers) = found, wanted
    assert values == numbers
    torch.testing.assert_close(tensors, others, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("saved", "loaded"), [("fsdp", "fsdp"), ("ddp", "ddp"), ("ddp", "fsdp"), ("fsdp", "ddp")]
)
def test_both_ways_give_the_same_tensors_on_any_number_of_ranks(saved, loaded, tmp_path):
    state, losses, end = run_ranks(train_and_save, 4, saved, str(tmp_path))[0]
    for num_ranks in (4, 2, 3):
        for way in ("dcp", "hand", "async"):
            loaded_state, after, found = run_ranks(resume, num_ranks, loaded, str(tmp_path), way)[0]
            assert_equal(loaded_state, state)  # once gathered: the same bits
            if num_ranks == 4 and saved == loaded:
                assert after == losses
                assert_equal(found, end)
            torch.testing.assert_close(after, losses, rtol=0, atol=1e-6)
            torch.testing.assert_close(found[0], end[0], rtol=0, atol=1e-6)


# ---- what DCP says, and what it does not say -----------------------------------------------------


def save_both(folder):
    for kind in ("fsdp", "ddp"):
        run = build(kind, 0)
        steps(*run, 3)
        model, optimizer, place = run
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
        dcp.save(state, checkpoint_id=f"{folder}/{kind}")


def load_bare(folder):
    """Load what save_both has saved under FSDP, without AppState."""
    model, optimizer, _ = build("fsdp", 5)
    step = 0
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    before = model[0].weight.to_local().clone()
    dcp.load(state, checkpoint_id=f"{folder}/fsdp")
    rate = optimizer.param_groups[0]["lr"]
    stored = state["optimizer"]["param_groups"][0]["lr"]
    is_changed = not torch.equal(before, model[0].weight.to_local())
    return is_changed, len(state["optimizer"]["state"]), (step, state["step"]), (rate, stored)


def test_without_appstate_the_moments_and_the_numbers_stay_away(tmp_path):
    run_ranks(save_both, 2, str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        is_changed, num_moments, step, rate = run_ranks(load_bare, 2, str(tmp_path))[0]
    assert is_changed  # weights are filled in place
    assert num_moments == 0  # a new optimizer has no names to fill
    assert step == (0, 3) and rate == (1e-2, pytest.approx(1e-2 * 0.9**3))


class ModelOnly:
    """A Stateful of a model alone."""

    def __init__(self, model):
        self.state_dict, self.load_state_dict = model.state_dict, model.load_state_dict


def load_ddp_s_names(folder):
    model, *_ = build("fsdp", 5)
    names = {f"module.{name}": one for name, one in model.state_dict().items()}
    before = model[0].weight.to_local().clone()
    loose = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load({"model": names}, checkpoint_id=f"{folder}/fsdp", planner=loose)
    is_untouched = torch.equal(before, model[0].weight.to_local())
    try:
        load_dcp(ModelOnly(model), f"{folder}/ddp")
    except ValueError as problem:
        return is_untouched, str(problem)


def test_names_with_module_load_nothing_and_are_refused_by_default_in_one_line(tmp_path):
    run_ranks(save_both, 2, str(tmp_path))
    is_untouched, told = run_ranks(load_ddp_s_names, 2, str(tmp_path))[0]
    assert is_untouched
    assert told == "rank 0: RuntimeError: Missing key in checkpoint state_dict: app.0.weight."


def test_a_state_is_not_made_while_gradients_are_there():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    assert not get_state_dict(model, optimizer)[1]["state"]
    optimizer.zero_grad()
    assert len(get_state_dict(model, optimizer)[1]["state"]) == 2


def save_tensor(folder, value):
    dcp.save({"w": torch.full((1000,), value)}, checkpoint_id=folder)


def die_at_the_end(folder, value):
    """Everything is written but the metadata."""

    class Writer(dcp.FileSystemWriter):
        def finish(self, *args):
            raise OSError("the rank is killed here")

    with pytest.raises(dcp.CheckpointException):
        dcp.save({"w": torch.full((1000,), value)}, storage_writer=Writer(folder))


def load_tensor(folder):
    state = {"w": torch.zeros(1000)}
    dcp.load(state, checkpoint_id=folder)
    return state["w"]


def alone(action, *args):
    return run_ranks(action, 1, *args)[0]


def test_dcp_has_no_sums_and_overwrites_under_the_old_metadata(tmp_path):
    folder = tmp_path / "once"
    alone(save_tensor, str(folder), 1.0)
    assert sorted(path.name for path in folder.iterdir()) == [".metadata", "__0_0.distcp"]
    file = folder / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    ones = torch.ones(1000).numpy().tobytes()
    content[content.index(ones) + 4 * 10 + 2] ^= 1
    file.write_bytes(content)
    (off,) = torch.nonzero(alone(load_tensor, str(folder)) != 1)
    assert off.item() == 10  # a flipped bit is loaded without a word

    folder = tmp_path / "again"
    alone(save_tensor, str(folder), 1.0)
    alone(die_at_the_end, str(folder), 2.0)
    assert torch.equal(alone(load_tensor, str(folder)), torch.full((1000,), 2.0))

    folder = tmp_path / "new"
    alone(die_at_the_end, str(folder), 1.0)
    assert not (folder / ".metadata").exists()  # and so it does not count


def each_its_own(folder):
    own = {"w": torch.full((3,), float(dist.get_rank()))}
    dcp.save(own, checkpoint_id=folder)
    dcp.load(own, checkpoint_id=folder)
    return own["w"].tolist()


def test_dcp_takes_a_plain_tensor_for_one_that_all_ranks_hold_alike(tmp_path):
    first, second = run_ranks(each_its_own, 2, str(tmp_path / "own"))
    assert first == second  # the numbers of one of the two ranks are lost


class RunsCode:
    """What a stranger could put into a pickle."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def load_refused(folder):
    with pytest.raises(dcp.CheckpointException):
        load_tensor(folder)


def test_loading_with_dcp_runs_what_a_stranger_has_pickled(tmp_path):
    with open(tmp_path / ".metadata", "wb") as file:
        pickle.dump(RunsCode(tmp_path / "was here"), file)
    alone(load_refused, str(tmp_path))
    assert (tmp_path / "was here").exists()


def test_a_stager_that_is_kept_uses_its_buffers_again():
    state = {"w": torch.ones(10)}
    kept = DefaultStager(StagingOptions(False, False, False, False))
    first = kept.stage(state)["w"]
    state["w"] += 1
    assert kept.stage(state)["w"].data_ptr() == first.data_ptr() != state["w"].data_ptr()
    assert first.tolist() == [2] * 10


def load_nothing(folder):
    with pytest.raises(ValueError, match="rank 0: .*metadata"):
        load_dcp(ModelOnly(nn.Linear(2, 2)), folder)


def test_a_folder_without_metadata_is_refused(tmp_path):
    run_ranks(load_nothing, 2, str(tmp_path / "none"))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_torch_load_cannot_read_what_dcp_wrote(tmp_path):
    run_ranks(save_both, 2, str(tmp_path))
    for name in ("", "__0_0.distcp", "__1_0.distcp", ".metadata"):
        with pytest.raises((OSError, RuntimeError, pickle.UnpicklingError)):
            torch.load(tmp_path / "fsdp" / name, weights_only=True)
    dcp_to_torch_save(tmp_path / "fsdp", tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert state["model"]["0.weight"].shape == (5, 7) and state["step"] == 3
