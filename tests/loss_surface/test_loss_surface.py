"""Lesson 02: pictures of a loss against the loss itself, a full Hessian, and numbers by hand."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import Generator, nn

from manyhands.loss_surface.surface import (
    loss_at,
    random_direction,
    roughness,
    sharpness,
    slice_between,
    surface,
)
from manyhands.models.resnet import ResNet, use_batch_statistics
from manyhands.ranks.lab import run_ranks

GRID = [-1.0, -0.3, 0.0, 0.4, 1.1]  # 25 points: neither 2 nor 4 ranks divide them


def seeded(seed: int) -> Generator:
    return Generator().manual_seed(seed)


def net_and_loss(activation: type[nn.Module] = nn.ReLU):
    """A small network with three layers, and its loss on 32 samples."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, 9), activation(), nn.Linear(9, 7), activation(), nn.Linear(7, 3)
    )
    x, target = torch.randn(32, 6), torch.randint(3, (32,))
    return net, lambda: nn.functional.cross_entropy(net(x), target)


# ---- a step aside, and a line --------------------------------------------------------------------


def test_the_loss_aside_is_the_loss_of_a_moved_copy_and_nothing_stays():
    net, loss = net_and_loss()
    parameters = list(net.parameters())
    directions = [random_direction(parameters, seeded(seed)) for seed in (1, 2)]
    before = copy.deepcopy(net.state_dict())
    found = loss_at(loss, parameters, directions, (0.3, -0.7))
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    with torch.no_grad():
        for parameter, one, two in zip(parameters, *directions, strict=True):
            parameter += 0.3 * one - 0.7 * two
    assert math.isclose(found, loss().item(), rel_tol=1e-5)


def test_parameters_are_put_back_where_the_loss_fails():
    net, _ = net_and_loss()
    parameters = list(net.parameters())
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ZeroDivisionError):
        loss_at(lambda: 1 / 0, parameters, [random_direction(parameters, seeded(1))], [1e3])
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_a_line_goes_from_one_solution_to_the_other_and_beyond():
    net, loss = net_and_loss()
    end = [torch.randn_like(parameter) for parameter in net.parameters()]
    own = loss().item()
    start, half, there, twice = slice_between(loss, list(net.parameters()), end, [0, 0.5, 1, 2])
    assert start == own
    for share, found in ((0.5, half), (1, there), (2, twice)):
        other, other_loss = net_and_loss()
        with torch.no_grad():
            for parameter, goal in zip(other.parameters(), end, strict=True):
                parameter.lerp_(goal, share)
        assert math.isclose(found, other_loss().item(), rel_tol=1e-4)


# ---- directions ----------------------------------------------------------------------------------


def test_each_filter_of_a_direction_is_as_long_as_the_network_s():
    model = ResNet(num_blocks=1)
    direction = random_direction(list(model.parameters()), seeded(3))
    for parameter, part in zip(model.parameters(), direction, strict=True):
        assert part.shape == parameter.shape and not part.requires_grad
        if parameter.dim() < 2:
            assert not part.any()
            continue
        for own, drawn in zip(parameter, part, strict=True):
            assert torch.allclose(own.norm(), drawn.norm(), rtol=1e-5)
    again = random_direction(list(model.parameters()), seeded(3))
    assert all(torch.equal(one, other) for one, other in zip(direction, again, strict=True))


def test_a_filter_of_zeros_is_not_moved():
    parameter = torch.randn(3, 4)
    parameter[1] = 0
    (part,) = random_direction([parameter], seeded(0))
    assert not part[1].any() and part[0].all()


# ---- a surface by many ranks ---------------------------------------------------------------------


def surface_on_rank():
    net, loss = net_and_loss()
    parameters = list(net.parameters())
    directions = tuple(random_direction(parameters, seeded(seed)) for seed in (1, 2))
    group = None
    if dist.get_world_size() == 4:  # once more in a group of ranks 1 and 3
        group = dist.new_group([1, 3])
    calls = []

    def counted():
        calls.append(1)
        return loss()

    whole = surface(counted, parameters, directions, GRID)
    in_group = group is not None and dist.get_rank() in (1, 3)
    part = surface(loss, parameters, directions, GRID, group) if in_group else None
    return whole, part, len(calls), loss().item()


def test_any_number_of_ranks_gives_the_same_bits():
    ((truth, _, calls, loss),) = run_ranks(surface_on_rank, 1)
    assert truth.shape == (5, 5) and truth.dtype == torch.float64 and calls == 25
    assert truth[2, 2].item() == loss  # the point (0, 0)
    assert not torch.equal(truth, truth.T)
    for world_size in (2, 4):
        results = run_ranks(surface_on_rank, world_size)
        assert [calls for _, _, calls, _ in results] == {2: [13, 12], 4: [7, 6, 6, 6]}[world_size]
        for whole, *_ in results:
            assert torch.equal(whole, truth)
    assert all(torch.equal(results[rank][1], truth) for rank in (1, 3))


def test_rows_go_along_the_first_direction():
    def corner():
        net, loss = net_and_loss()
        parameters = list(net.parameters())
        directions = tuple(random_direction(parameters, seeded(seed)) for seed in (1, 2))
        found = surface(loss, parameters, directions, [-1.0, 0.5])
        return found[0, 1].item(), loss_at(loss, parameters, directions, (-1.0, 0.5))

    found, wanted = run_ranks(corner, 1)[0]
    assert found == wanted


def test_fewer_points_than_ranks():
    def point():
        net, loss = net_and_loss()
        directions = tuple(random_direction(list(net.parameters()), seeded(s)) for s in (1, 2))
        return surface(loss, list(net.parameters()), directions, [0.0]).item(), loss().item()

    assert all(found == loss for found, loss in run_ranks(point, 3))


# ---- roughness -----------------------------------------------------------------------------------


def test_a_bowl_is_smooth_and_a_walk_by_hand_is_not():
    line = torch.linspace(-1, 1, 9, dtype=torch.float64)
    bowl = (line - 0.2).square() + 3 * (line[:, None] + 0.4).square()
    assert abs(roughness(bowl)) < 1e-12
    assert abs(roughness(line + line[:, None])) < 1e-12  # all downhill
    # Rows: 2 1 3 walks 3 of 3; 0 4 1 walks 7 of 1; 5 5 5 walks 0 of 0.
    # Columns: 2 0 5 walks 7 of 7; 1 4 5 walks 4 of 4; 3 1 5 walks 6 of 6. In all 27 of 21.
    by_hand = torch.tensor([[2.0, 1, 3], [0, 4, 1], [5, 5, 5]])
    assert math.isclose(roughness(by_hand), 27 / 21 - 1, rel_tol=1e-6)
    assert math.isclose(roughness(7 * by_hand - 3), roughness(by_hand), rel_tol=1e-5)


# ---- sharpness -----------------------------------------------------------------------------------


def full_hessian(net: nn.Module, loss) -> torch.Tensor:
    slope = nn.utils.parameters_to_vector(
        torch.autograd.grad(loss(), list(net.parameters()), create_graph=True)
    )
    rows = [
        torch.autograd.grad(s, list(net.parameters()), retain_graph=True, materialize_grads=True)
        for s in slope
    ]
    return torch.stack([nn.utils.parameters_to_vector(row) for row in rows])


def test_sharpness_is_the_eigenvalue_of_the_full_hessian():
    net, loss = net_and_loss(nn.Tanh)
    eigenvalues = torch.linalg.eigvalsh(full_hessian(net, loss))
    largest = max(eigenvalues.tolist(), key=abs)
    for sign in (1, -1):
        found = sharpness(lambda s=sign: s * loss(), list(net.parameters()), 300, seeded(5))
        assert math.isclose(found, sign * largest, rel_tol=1e-3), (found, largest)
    assert all(parameter.grad is None for parameter in net.parameters())


def test_rescaled_layers_are_the_same_network_but_sharper():
    """Dinh et al. 2017, https://arxiv.org/abs/1703.04933; filter norms: Li et al. 2018."""
    net, loss = net_and_loss()
    parameters = list(net.parameters())
    found = []
    for _ in range(2):
        one, two = (random_direction(parameters, seeded(seed)) for seed in (1, 2))
        line = [loss_at(loss, parameters, [one], [x]) for x in GRID]
        plane = [loss_at(loss, parameters, [one, two], [x, 0.7]) for x in GRID]
        found.append((loss().item(), line, plane, sharpness(loss, parameters, 100, seeded(7))))
        with torch.no_grad():  # powers of two: no rounding, so all is equal bit for bit
            for parameter in net[0].parameters():
                parameter *= 16
            net[2].weight /= 16
    before, after = found
    assert before[:3] == after[:3]
    assert after[3] > 10 * before[3] > 0


def test_skip_connections_do_not_hinder_any_of_it():
    torch.manual_seed(1)
    model, images, labels = ResNet(num_blocks=1, width=4), torch.randn(8, 1, 6, 6), torch.arange(8)
    use_batch_statistics(model)

    def loss():
        return nn.functional.cross_entropy(model(images), labels)

    parameters, own = list(model.parameters()), loss().item()
    directions = [random_direction(parameters, seeded(seed)) for seed in (1, 2)]
    assert loss_at(loss, parameters, directions, (0, 0)) == own
    assert loss_at(loss, parameters, directions, (0.5, 1)) != own
    assert loss().item() == own
