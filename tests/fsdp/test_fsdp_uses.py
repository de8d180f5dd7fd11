"""FSDP as people use it: two losses, units that return objects, groups of parameters, a scaler."""

import copy
import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from manyhands.fsdp import flat, fully_shard, zero
from manyhands.fsdp import units as fsdp
from manyhands.ranks.failures import RankFailed
from manyhands.ranks.lab import run_ranks
from parity import weights_of
from sharded import Blocks, adamw, data


class Auxiliary(nn.Module):
    """A second loss: of an output between the blocks, of a head, or of what a block has kept."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.last, self.head = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        hidden = self.kept = self.blocks[0](torch.tanh(self.first(x)))
        out = self.blocks[1](hidden)
        extra = self.head(out) if self.kind == "of a head" else hidden
        unused = 0 if self.kind == "of a head" else 0 * self.head(out)
        return self.last(out) + unused, None if self.kind == "kept" else extra


def auxiliary_losses(kind, wrap):
    """The weights after two steps in float64, each with two calls of backward."""
    torch.manual_seed(0)
    module = Auxiliary(kind).double()
    model = wrap(module)
    rank, size = (0, 1) if model is module else (dist.get_rank(), dist.get_world_size())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in torch.randn(2, 8, 4, dtype=torch.float64):
        x.requires_grad_()  # so that the weights of the first layer are needed in backward
        out, extra = model(x[rank::size])
        out.square().mean().backward(retain_graph=True)
        (module.kept if kind == "kept" else extra).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(module) if model is module else fully_shard.full_state(model)


@pytest.mark.parametrize("kind", ["of the output between", "of a head", "kept"])
def test_a_second_loss_with_a_backward_of_its_own_equals_one_process(kind):
    def sharded():
        return auxiliary_losses(kind, lambda module: fsdp.FSDP(module, list(module.blocks)))

    wanted = auxiliary_losses(kind, lambda module: module)
    for name, weight in run_ranks(sharded, 2)[0].items():
        torch.testing.assert_close(weight, wanted[name], rtol=0, atol=1e-12)


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    note: str = ""


class Kept:
    def __init__(self, hidden):
        self.hidden = hidden


class Hidden:
    def __init__(self, hidden):
        self.inner = Kept(hidden)


class Wraps(nn.Linear):
    """Returns what it computes in an object."""

    def __init__(self, kind):
        super().__init__(8, 8)
        self.kind = kind

    def forward(self, x):
        return self.kind((x if isinstance(x, torch.Tensor) else x.hidden) @ self.weight.T)


def gradient_through_objects(kind):
    torch.manual_seed(0)
    module = nn.Sequential(*[Wraps(kind) for _ in range(3)])
    model = fsdp.FSDP(module, list(module))
    x = torch.ones(2, 8, requires_grad=True)
    model(x).hidden.sum().backward()
    weights = fully_shard.full_state(model)
    product = weights["2.weight"] @ weights["1.weight"] @ weights["0.weight"] if weights else None
    return None if product is None else (x.grad - product.sum(0)).abs().max().item()


@pytest.mark.parametrize("kind", [Output, Kept])
def test_a_unit_may_return_a_dataclass_or_an_object(kind):
    assert run_ranks(gradient_through_objects, 2, kind)[0] < 1e-6


def test_a_unit_whose_tensors_are_not_found_is_told_in_forward():
    with pytest.raises(RankFailed, match="a unit returns an object of Hidden, and no tensor is"):
        run_ranks(gradient_through_objects, 2, Hidden)


def decayed_by_dim():
    torch.manual_seed(0)
    module = Blocks()
    apart = fsdp.FSDP(module, module.units(), apart=lambda name, param: param.dim() >= 2)
    matrices, vectors = apart.shards_of(True), apart.shards_of(False)
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = adamw(groups)
    for x, y in zip(*data()[:, :3, dist.get_rank() :: 2], strict=True):
        apart(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return fully_shard.full_state(apart)


def test_matrices_can_be_decayed_and_vectors_left():
    torch.manual_seed(0)
    model = Blocks()
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [[p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]]
    decays = zip(groups, (0.5, 0.0), strict=True)
    optimizer = adamw([{"params": some, "weight_decay": decay} for some, decay in decays])
    for x, y in zip(*data()[:, :3], strict=True):
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = run_ranks(decayed_by_dim, 2)[0]
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(found[name], weight, atol=1e-6, rtol=0)


def step_with_an_overflow(stage, make_scaler):
    """Only the shard of rank 0 has an infinite gradient: the scale, and whether weights moved."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4, bias=False))
    if stage == 3:
        model = fsdp.FSDP(module, list(module))
        optimizer, shards = torch.optim.SGD(model.parameters(), 1.0), list(model.parameters())
    else:
        model, flats = module, [flat.Flat(module.parameters())]
        optimizer = zero.ShardedOptimizer(flats, lambda shards: torch.optim.SGD(shards, 1.0))
        shards = [one.shard for one in flats]
    before = [shard.detach().clone() for shard in shards]
    scaler = make_scaler(device="cpu", init_scale=2.0)
    factor = torch.tensor([float("inf"), 1.0, 1.0, 1.0])
    scaler.scale((model(torch.ones(1, 4)) * factor).sum()).backward()
    if stage == 1:
        flats[0].reduce()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), all(map(torch.equal, before, shards))


@pytest.mark.parametrize("make_scaler", [torch.amp.GradScaler, ShardedGradScaler])
@pytest.mark.parametrize("stage", [1, 3])
def test_all_ranks_skip_a_step_in_which_one_has_an_overflow(stage, make_scaler):
    assert run_ranks(step_with_an_overflow, 2, stage, make_scaler) == [(1.0, True)] * 2


def scaled_steps(how):
    """Three steps with a scale, of one process or of shards: the weights and the scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    inputs = torch.randn(3, 4, 4)
    if how == "FSDP":
        model = fsdp.FSDP(model, [model[0]])
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.0)
    scaler = torch.amp.GradScaler(device="cpu", init_scale=64.0, growth_interval=2)
    for batch in inputs:
        if how == "FSDP":
            batch = batch.chunk(2)[dist.get_rank()]
        scaler.scale(model(batch).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    state = model.state_dict() if how == "one process" else fully_shard.full_state(model)
    return state, scaler.get_scale()


def test_scaled_steps_equal_one_process():
    wanted, scale = scaled_steps("one process")
    (found, first), (_, second) = run_ranks(scaled_steps, 2, "FSDP")
    assert first == second == scale == 128.0
    for name, weight in wanted.items():
        torch.testing.assert_close(found[name], weight, atol=1e-6, rtol=0)


def gradient_of_a_copy():
    model = fsdp.FSDP(nn.Sequential(nn.Linear(4, 2)), [])
    (copied,) = copy.deepcopy(list(model.parameters()))
    copied.square().sum().backward()
    return torch.equal(copied.grad, 2 * copied)


def test_a_copy_of_a_shard_has_a_gradient():
    assert run_ranks(gradient_of_a_copy, 2) == [True] * 2
