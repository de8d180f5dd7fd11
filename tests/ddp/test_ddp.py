"""PyTorch's DDP equals one process, as the one by hand does; a mean over ranks is exact."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from manyhands.data import corpus
from manyhands.ddp import bench, wrapping
from manyhands.instruments.ledger import Ledger, calls
from manyhands.ranks.lab import run_ranks
from replicas import assert_equal_to, assert_sums_are_averaged, train_on_rank, truth


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


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_accumulated_gradients_are_those_of_one_batch_and_are_sent_once(world_size):
    def gradients(num_parts):
        torch.manual_seed(0)
        model = wrapping.torch_ddp(nn.Linear(4, 1))
        whole = torch.randn(6, 12, 4)[:, dist.get_rank() :: dist.get_world_size()]
        parts = [(part, part.sum(1, keepdim=True)) for part in whole.flatten(0, 1).chunk(num_parts)]
        with Ledger() as ledger:
            loss = wrapping.accumulate(model, parts, nn.functional.mse_loss)
        return loss, model.module.weight.grad, calls(ledger.entries)["all_reduce"]

    for one, six in zip(
        run_ranks(gradients, world_size, 1), run_ranks(gradients, world_size, 6), strict=True
    ):
        assert one[0] == pytest.approx(six[0], rel=1e-5)
        torch.testing.assert_close(one[1], six[1])
        assert one[2] == six[2] == 1


def test_each_useless_second_node_shows_what_the_notebook_says():
    text = corpus.write(corpus.grammar(), "train", 20_000)
    tokenizer = corpus.Characters("".join(sorted(set(text))))
    data = corpus.Blocks(torch.tensor(tokenizer.encode(text)), 16)
    seen = {
        name: bench.train_nodes(job, data, tokenizer.vocab_size, num_steps=8)
        for name, job in bench.JOBS.items()
    }
    cause = {cause: seen[name] for name, cause in bench.CAUSES.items()}
    alone, healthy = seen["one node"], seen["two nodes"]
    assert cause["data"].losses == alone.losses
    assert cause["data"].samples_per_step == 2 * alone.samples_per_step
    assert cause["batch"].losses == pytest.approx(alone.losses, abs=1e-4)
    assert cause["batch"].samples_per_step == alone.samples_per_step
    assert cause["link"].losses == healthy.losses != pytest.approx(alone.losses, abs=1e-3)
    carried_s = 4 * sum(p.numel() for p in bench.small_model(tokenizer.vocab_size, 16).parameters())
    carried_s /= bench.SLOW_BYTES_PER_S
    assert cause["link"].step_s > carried_s


def test_scaling_is_timed_for_each_number_of_ranks():
    found = bench.time_scaling(sizes=(1, 2), batch=2, num_rounds=2)
    assert {kind: list(times) for kind, times in found.items()} == {
        "strong": [1, 2],
        "weak": [1, 2],
    }
    assert all(seconds > 0 for times in found.values() for seconds in times.values())


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_a_fed_loop_is_waiting_or_computing(num_workers):
    spans = run_ranks(bench.feed, 1, num_workers, 3)[0]
    assert [role for _, role, *_ in spans] == 3 * ["data", "compute", "optimizer"]
    waited = [stop - start for _, role, start, stop in spans if role == "data"]
    assert num_workers or min(waited) > 8 * 3e-3
