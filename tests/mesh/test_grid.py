"""A mesh's places and groups are those of PyTorch's mesh; seeds are the same where they must be."""

from itertools import product
from math import prod

import pytest
import torch
import torch.distributed as dist

from manyhands.mesh import seeds
from manyhands.mesh.grid import (
    coordinates,
    drawn,
    groups_of,
    make_groups,
    ranks_along,
    share_of_data,
    torch_mesh,
)
from manyhands.ranks.failures import RankFailed, RanksHung, RuleBroken
from manyhands.ranks.lab import run_ranks

MESHES = [
    {"pp": 2, "dp": 2, "tp": 2},
    {"replicate": 2, "shard": 4},
    {"pp": 2, "replicate": 3, "shard": 1, "tp": 2},
    {"tp": 5},
    {"dp": 3, "tp": 4},
    {},
]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_ranks_are_counted_like_digits_and_lines_hold_one_axis(sizes):
    places = [
        dict(zip(sizes, place, strict=True)) for place in product(*map(range, sizes.values()))
    ]
    assert [coordinates(rank, sizes) for rank in range(prod(sizes.values()))] == places
    for rank, axis in product(range(len(places)), sizes):
        line = ranks_along(axis, rank, sizes)
        assert [places[other][axis] for other in line] == list(range(sizes[axis]))
        assert rank in line
        assert all({**places[other], axis: 0} == {**places[rank], axis: 0} for other in line)


def test_only_data_parallel_axes_cut_the_batch():
    sizes = {"pp": 2, "replicate": 2, "shard": 3, "tp": 2}
    shares = [share_of_data(coordinates(rank, sizes), sizes) for rank in range(24)]
    assert [number for number, _ in shares] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5] * 2
    assert {num for _, num in shares} == {6}
    assert share_of_data({"pp": 1, "tp": 0}, {"pp": 2, "tp": 2}) == (0, 1)


def test_a_mesh_is_drawn():
    assert drawn({"pp": 2, "dp": 2, "tp": 2}) == (
        "      dp 0    dp 1\npp 0  0  1    2  3\npp 1  4  5    6  7\ntp along each row"
    )
    assert drawn({"tp": 3}) == "ranks  0  1  2\ntp along each row"
    lines = drawn({"pp": 2, "replicate": 2, "shard": 2, "tp": 2}).splitlines()
    assert lines[2].split() == "pp 0 replicate 1 4 5 6 7".split()


def ranks_of_groups(meshes):
    found = []
    for sizes in meshes:
        for groups in (make_groups(sizes), groups_of(torch_mesh(sizes))):
            found.append(
                {axis: dist.get_process_group_ranks(group) for axis, group in groups.items()}
            )
    return found


def test_groups_are_those_of_torch_s_mesh_and_carry_messages():
    meshes = [sizes for sizes in MESHES if prod(sizes.values()) == 8]
    for rank, found in enumerate(run_ranks(ranks_of_groups, 8, meshes)):
        for sizes, ours, torchs in zip(meshes, found[::2], found[1::2], strict=True):
            assert ours == torchs == {axis: ranks_along(axis, rank, sizes) for axis in sizes}
            assert list(ours) == list(sizes)


def sums_along():
    rank, found = dist.get_rank(), {}
    for axis, group in make_groups({"pp": 2, "dp": 1, "tp": 2}).items():
        number = torch.tensor([10.0**rank])
        dist.all_reduce(number, group=group)
        found[axis] = number.item()
    return found


def test_each_group_sums_over_its_own_axis():
    assert run_ranks(sums_along, 4) == [
        {"pp": 101.0, "dp": 1.0, "tp": 11.0},
        {"pp": 1010.0, "dp": 10.0, "tp": 11.0},
        {"pp": 101.0, "dp": 100.0, "tp": 1100.0},
        {"pp": 1010.0, "dp": 1000.0, "tp": 1100.0},
    ]


def test_a_mesh_of_another_size_is_refused():
    with pytest.raises(RankFailed, match="'tp': 2} has 4 places, but there are 2 ranks: take"):
        run_ranks(make_groups, 2, {"dp": 2, "tp": 2})


def leave_out(kind):
    sizes = {"dp": 2, "tp": 2}
    if kind == "one rank makes none" and dist.get_rank() == 3:
        dist.barrier()
    elif kind == "each makes its own":
        for axis in sizes:
            dist.new_group(ranks_along(axis, dist.get_rank(), sizes))
    else:
        make_groups(sizes)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("one rank makes none", "rank 0 waits in new_group .*rank 3 waits in barrier"),
        ("each makes its own", r"new_group of ranks \[\d, \d\].*every rank has to make the"),
    ],
)
def test_a_rank_that_does_not_make_every_group_is_told(kind, words):
    with pytest.raises(RuleBroken, match=words):
        run_ranks(leave_out, 4, kind, timeout_s=10)


def test_without_rules_the_others_wait_in_new_group_until_the_limit():
    with pytest.raises(RanksHung, match="rank 0 waits .* in make_groups:  group = dist.new_group"):
        run_ranks(leave_out, 4, "one rank makes none", timeout_s=1, rules="")


# ---- seeds -----------------------------------------------------------------------------------


def test_seeds_are_the_same_along_the_axes_that_the_table_says():
    assert seeds.table({"pp": 2, "replicate": 2, "dp": 2, "shard": 2, "tp": 2, "cp": 1}) == {
        "weights": dict.fromkeys(["pp", "replicate", "dp", "shard", "tp"], "same"),
        "data": {"pp": "same", "replicate": "differs", "dp": "differs", "shard": "differs"}
        | {"tp": "same"},
        "dropout": dict.fromkeys(["pp", "replicate", "dp", "shard"], "differs") | {"tp": "same"},
        "own dropout": dict.fromkeys(["pp", "replicate", "dp", "shard", "tp"], "differs"),
    }


AXES = {  # along which two ranks' seeds differ
    "weights": (),
    "data": ("replicate", "shard"),
    "dropout": ("pp", "replicate", "shard"),
    "own dropout": ("pp", "replicate", "shard", "tp"),
}


def test_no_two_purposes_or_places_have_a_seed_in_common_also_in_32_bits():
    sizes = {"pp": 3, "replicate": 2, "shard": 5, "tp": 4}
    places = [coordinates(rank, sizes) for rank in range(prod(sizes.values()))]
    found: dict[int, tuple] = {}
    for what, seed in product(AXES, (0, 1, 2, 3, 7, 1023)):
        for place in places:
            differs = (what, seed, tuple(place[axis] for axis in AXES[what]))
            number = seeds.seed_of(what, seed, place, sizes)
            assert found.setdefault(number % 2**32, differs) == differs
            assert 0 <= number < 2**63
    num = {what: prod(sizes[axis] for axis in axes) for what, axes in AXES.items()}
    assert len(found) == 6 * sum(num.values())
    assert seeds.seed_of("weights", 7, places[-1], sizes) == 7


def test_torch_keeps_32_bits_of_a_seed_on_the_cpu():
    draws = [torch.rand(4, generator=torch.Generator().manual_seed(s)) for s in (5, 5 + 2**32, 6)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
