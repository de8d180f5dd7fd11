"""PyTorch's DDP equals one process, as the one by hand does; a mean over ranks is exact."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from manyhands.ddp import wrapping
from manyhands.ranks.lab import run_ranks
from test_data_parallel import assert_equal_to, assert_sums_are_averaged, train_on_rank, truth


def native(bucket_mb):
    return lambda model: wrapping.torch_ddp(model, bucket_mb)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("bucket_mb", [0.001, 25])
def test_equal_to_one_process(bucket_mb, world_size):
    assert_equal_to(truth(), run_ranks(train_on_rank, world_size, native(bucket_mb)))


def test_no_sync_adds_up_and_the_next_backward_averages_the_sums():
    assert_sums_are_averaged(native(25))


def test_options_reach_torch():
    def options():
        model = wrapping.torch_ddp(nn.Linear(2, 2), 3.0)
        return model.device_ids, model.bucket_bytes_cap

    (device_ids, cap_bytes) = run_ranks(options, 1)[0]
    assert device_ids is None  # the module is on the CPU
    assert cap_bytes == 3 * 2**20  # torch's MB


@pytest.mark.gpu
def test_the_device_of_the_module_is_named():
    def device_ids():
        return wrapping.torch_ddp(nn.Linear(2, 2, device="cuda:0")).device_ids

    assert run_ranks(device_ids, 1) == [[0]]


def test_a_mean_in_a_subgroup_leaves_other_ranks_alone():
    def in_pairs():
        pair = dist.new_group([0, 1]), dist.new_group([2, 3])
        rank = dist.get_rank()
        return wrapping.mean_over_ranks(torch.tensor(float(rank)), 1, pair[rank // 2])

    assert run_ranks(in_pairs, 4) == [0.5, 0.5, 2.5, 2.5]


def test_the_mean_over_ranks_is_exact_for_uneven_counts():
    losses = torch.rand(1001, dtype=torch.float64)
    losses[7] = 100.0

    def share():
        mine = losses[dist.get_rank() :: dist.get_world_size()]
        mine = mine[:0] if dist.get_world_size() == 4 and dist.get_rank() == 3 else mine
        return wrapping.mean_over_ranks(mine.sum(), len(mine))

    for world_size in (1, 2, 3):
        for mean in run_ranks(share, world_size):
            assert mean == pytest.approx(losses.mean().item(), rel=1e-12)
    kept = torch.cat([losses[r::4] for r in range(3)])
    assert run_ranks(share, 4) == [pytest.approx(kept.mean().item(), rel=1e-12)] * 4
