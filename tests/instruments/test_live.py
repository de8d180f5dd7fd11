"""The counter of live tensors: against sums by hand, torch's own counter, and real sharding."""

import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.fsdp.flat import Flat
from manyhands.fsdp.fully_shard import torch_fsdp
from manyhands.fsdp.units import FSDP
from manyhands.fsdp.zero import ShardedOptimizer, reduce_during_backward
from manyhands.instruments import live
from manyhands.instruments.live import Live, OverLimit, parts_of
from manyhands.memory import accounting
from manyhands.models.transformer import Transformer
from manyhands.ranks.lab import run_ranks


def nothing() -> live.Parts:
    return {}


def test_the_highest_of_a_program_counted_by_hand():
    with Live(nothing) as counted:
        a = torch.ones(100)  # 400
        b = a + 1  # 800
        del a  # 400
        c = torch.ones(50, dtype=torch.float64)  # 800
        d = torch.ones(10)  # 840, the most
        assert counted.now() == {"other": 840}
        del b, c
        e = torch.ones(20)
        assert counted.now() == {"other": 120}
    assert (counted.total, counted.peak) == (840, {"other": 840})
    assert d.numel() + e.numel() == 30  # both lived until here


def test_an_operator_s_own_result_counts_beside_its_arguments():
    with Live(nothing) as counted:
        a = torch.ones(100)
        a = a * 2  # both live at that moment
    assert counted.total == 800 and counted.now() == {"other": a.nbytes} == {"other": 400}


def test_shared_memory_counts_once_and_for_the_first_part_that_names_it():
    whole = torch.ones(64)
    parts = {"all": [whole], "half": [whole[:32]]}
    with Live(lambda: parts) as counted:
        views = [whole[:16], whole.view(8, 8), whole.detach()]
    assert counted.now() == {"all": 256, "half": 0, "other": 0}
    assert counted.total == 256 and len(views) == 3
    parts = {"half": [whole[:32]], "all": [whole]}
    assert counted.now() == {"half": 256, "all": 0, "other": 0}


def test_memory_that_is_resized_counts_with_its_size_of_now():
    with Live(nothing) as counted:
        a = torch.ones(100)
        a.untyped_storage().resize_(0)
        assert counted.now() == {"other": 0}
        a.untyped_storage().resize_(1000)
        torch.ones(1)
        assert counted.now() == {"other": 1000}
    assert counted.total == 1004


def test_what_autograd_keeps_counts_as_long_as_it_does():
    x = torch.ones(100, requires_grad=True)
    with Live(nothing) as counted:
        loss = x.exp().sin().sum()  # 400 for exp's result, which both keep; sin's own is given back
        assert counted.now() == {"other": 404}
        loss.backward()
        del loss
        assert counted.now() == {"other": x.grad.nbytes}


def test_a_tensor_that_is_gone_is_forgotten():
    with Live(nothing) as counted:
        a = torch.ones(3)
        ref = weakref.ref(a)
        del a
        assert ref() is None and not counted.storages


def test_a_limit_ends_it_with_the_numbers():
    weights = torch.ones(100)
    with pytest.raises(OverLimit) as caught, Live(lambda: {"weights": [weights]}, limit=1000):
        a = torch.ones(150)
        b = torch.ones(100)
    text = str(caught.value)
    assert "1,400 bytes of tensors, 400 more than the limit of 1,000" in text
    assert "(weights 400, other 1,000)" in text and "\n" not in text and "more ranks" in text
    assert a.numel() == 150 and "b" not in locals()
    with Live(lambda: {"weights": [weights]}, limit=400) as counted:
        pass
    assert counted.total == 400  # as many as the limit are not more


B, T, V, L, D, H = 3, 8, 24, 2, 16, 2


def language_model() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    return Transformer(V, T, L, H, D), torch.randint(V, (2, B, T))


def adamw(params) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def test_the_highest_is_that_of_torchs_own_counter():
    torchs = pytest.importorskip("torch.distributed._tools.mem_tracker").MemTracker()
    model, batch = language_model()
    optimizer = adamw(model.parameters())

    def step() -> None:
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # the optimizer makes its state in the first one
    with Live(parts_of(model, optimizer)) as counted:
        step()
    torchs.track_external(model, optimizer)
    with torchs:
        step()
    (snapshot,) = torchs.get_tracker_snapshot("peak").values()
    assert counted.total == snapshot["Total"] == sum(counted.peak.values())


def sharded(stage: int | str) -> tuple[nn.Module, object, list[int]]:
    """A model, its optimizer, and the sizes of the vectors that are cut."""
    model, _ = language_model()
    blocks = list(model.blocks)
    inside = {param for block in blocks for param in block.parameters()}
    groups = [[p for p in model.parameters() if p not in inside]]
    groups += [list(block.parameters()) for block in blocks]
    sizes = [sum(param.numel() for param in group) for group in groups]
    if stage == 0:
        return model, adamw(model.parameters()), [param.numel() for param in model.parameters()]
    if stage == 3:
        wrapped = FSDP(model, blocks)
        return wrapped, adamw(wrapped.parameters()), sizes
    if stage == "torch":
        params = [param.numel() for param in model.parameters()]  # it cuts each by its rows
        wrapped = torch_fsdp(model, blocks)
        return wrapped, adamw(wrapped.parameters()), params
    flats = [Flat(group) for group in groups]
    if stage == 2:
        reduce_during_backward(flats)
    return model, ShardedOptimizer(flats, adamw), sizes


def measured_and_predicted(stage: int | str) -> tuple[dict, dict, int]:
    """Bytes after the backward of the second step, and those that the formula says."""
    model, optimizer, sizes = sharded(stage)
    _, batch = language_model()
    with Live(parts_of(model, optimizer)) as counted:
        for _ in range(2):
            optimizer.zero_grad() if stage in (0, 3, "torch") else None
            model(*batch).backward()
            after = counted.now()
            optimizer.step()
    fp32 = torch.float32
    recipe = accounting.recipe(fp32, fp32, [fp32, fp32])
    number = 3 if stage == "torch" else stage
    wanted = accounting.bytes_per_rank(sizes, recipe, number, dist.get_world_size())
    after.pop("other")
    return after, wanted._asdict(), counted.total


@pytest.mark.parametrize("stage", [0, 1, 2, 3, "torch"])
def test_what_a_rank_holds_is_what_the_formula_says(stage):
    for found, wanted, total in run_ranks(measured_and_predicted, 2, stage):
        assert found == wanted
        assert total > sum(found.values())


def test_padding_is_held_too():
    for found, wanted, _ in run_ranks(measured_and_predicted, 3, 3):
        assert found == wanted
        assert 3 * found["gradients"] > 4 * sum(p.numel() for p in language_model()[0].parameters())


def test_the_history_has_every_operator_and_its_highest_is_the_peak():
    with Live(lambda: {}, keep=True) as live:
        one = torch.zeros(10)
        two = one + 1
        del one
        three = two * 2
    totals = [sum(now.values()) for now in live.history]
    assert totals[-3:] == [40, 80, 80] and max(totals) == live.total == three.nbytes + two.nbytes


def test_only_tensors_on_the_device_that_is_watched_count():
    """Tensors on "meta" stand for those of a GPU, and CPU tensors for offloaded shards."""
    shard = torch.ones(100)
    fake = torch.ones(25, device="meta")
    parts = {"weights": [fake], "optimizer": [shard]}
    with Live(lambda: parts, device="meta", keep=True) as counted:
        on_cpu = shard * 2
        activation = fake + 1
        assert counted.now() == {"weights": 100, "optimizer": 0, "other": 100}
    assert counted.total == 200 and counted.history[-1] == counted.now()
    with Live(lambda: parts, device=torch.device("cpu")) as counted:
        on_cpu = shard * 2
        activation = fake + 1
        assert counted.now() == {"weights": 0, "optimizer": 400, "other": 400}
    with Live(lambda: parts) as counted:
        on_cpu = shard * 2
        activation = fake + 1
    assert counted.total == 1000 == on_cpu.nbytes + shard.nbytes + activation.nbytes + fake.nbytes


def test_a_gpu_s_number_does_not_matter_and_a_limit_holds_for_its_tensors_alone():
    assert Live(nothing, device="cuda:3").kind == Live(nothing, device="cuda").kind == "cuda"
    with Live(nothing, limit=100, device="meta"):
        offloaded = torch.ones(1000)
    with pytest.raises(OverLimit), Live(nothing, limit=100, device="meta"):
        torch.ones(1000, device="meta")
    assert offloaded.nbytes == 4000
