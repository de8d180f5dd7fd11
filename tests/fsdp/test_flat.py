"""Parameters as one vector: shards of any size, gathers, reductions, and memory that comes and goes
under autograd's feet."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from manyhands.fsdp.flat import Flat, ShardedFlat, make_flats
from manyhands.instruments.ledger import Ledger, calls
from manyhands.ranks.lab import run_ranks

SHAPES = {13: [(2, 4), (3,), (2, 1)], 12: [(2, 4), (4,)], 1: [(1,)]}


def params_of(numbers, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in SHAPES[numbers]]


def vector_of(tensors, num_ranks):
    vector = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return nn.functional.pad(vector, (0, -len(vector) % num_ranks))


def gradients_of(params, rank, seed=0):
    """Of this rank: the last parameter has none on rank 0."""
    generator = torch.Generator().manual_seed(10 * seed + rank)
    grads = [torch.randn(param.shape, generator=generator) for param in params]
    return [*grads[:-1], grads[-1] * (rank > 0)]


def give(params, rank, seed=0):
    for param, grad in zip(params, gradients_of(params, rank, seed), strict=True):
        param.grad = grad if grad.any() else None


def round_trip(numbers, pairs):
    """Shard, let every rank write into its own shard, gather; all sizes and addresses."""
    rank, group = dist.get_rank(), None
    if pairs:  # neither consecutive nor in the order of the job's ranks
        group = [dist.new_group([0, 3]), dist.new_group([1, 2])][rank in (1, 2)]
    params = params_of(numbers)
    wanted = vector_of(params, dist.get_world_size(group))
    flat = Flat(iter(params), group)
    assert torch.equal(flat.whole, wanted)
    assert flat.shard.numel() * dist.get_world_size(group) == len(wanted)
    with torch.no_grad():
        flat.shard += 1 + dist.get_rank(group)
    flat.gather().wait()
    steps = torch.arange(1, dist.get_world_size(group) + 1).repeat_interleave(len(flat.shard))
    torch.testing.assert_close(flat.whole, wanted + steps)
    for param in params:  # still views: the numbers that came are the model's
        assert param.untyped_storage().data_ptr() == flat.whole.untyped_storage().data_ptr()
    return torch.cat([param.detach().flatten() for param in params]), flat.whole


@pytest.mark.parametrize("numbers", SHAPES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_what_ranks_write_into_their_shards_reaches_all_parameters(numbers, world_size):
    for seen, whole in run_ranks(round_trip, world_size, numbers, False):
        assert torch.equal(seen, whole[: len(seen)])


def test_a_group_has_its_own_shards():
    results = run_ranks(round_trip, 4, 13, True)
    assert all(len(whole) == 14 for _, whole in results)


def reduced(numbers):
    params = params_of(numbers)
    flat = Flat(params)
    for seed in (1, 2):  # adds up, as param.grad does
        give(params, dist.get_rank(), seed)
        with Ledger() as ledger:
            flat.reduce()
    assert all(param.grad is None for param in params)
    assert calls(ledger.entries) == {"reduce_scatter": 1}
    assert flat.shard.grad.untyped_storage().nbytes() == flat.shard.nbytes
    return flat.shard.grad


@pytest.mark.parametrize("numbers", SHAPES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gradients_become_the_mean_of_all_ranks(numbers, world_size):
    params = params_of(numbers)
    found = torch.cat(run_ranks(reduced, world_size, numbers))
    ranks = [gradients_of(params, rank, seed) for seed in (1, 2) for rank in range(world_size)]
    wanted = sum(vector_of(grads, world_size) for grads in ranks) / world_size
    torch.testing.assert_close(found, wanted)


def reduced_with_replicas():
    rank = dist.get_rank()
    shards = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    params = params_of(13)
    flat = ShardedFlat(params, replicas=replicas, group=shards)
    flat.wait()
    give(params, rank)
    flat.reduce()
    return flat.shard.grad


def test_replicas_are_averaged_too():
    results = run_ranks(reduced_with_replicas, 4)
    params = params_of(13)
    wanted = sum(vector_of(gradients_of(params, rank), 2) for rank in range(4)) / 4
    for pair in (results[:2], results[2:]):
        torch.testing.assert_close(torch.cat(pair), wanted)


def test_types_and_frozen_parameters_get_vectors_of_their_own():
    sizes = run_ranks(kinds_of_flats, 2)
    assert sizes == [[("torch.float32", True, 14), ("torch.float64", True, 2),
                      ("torch.float32", False, 12)]] * 2  # fmt: skip


def kinds_of_flats():
    frozen = [param.requires_grad_(False) for param in params_of(12)]
    flats = make_flats([*params_of(13), *params_of(1, torch.float64), *frozen], Flat)
    return [(str(f.whole.dtype), f.shard.requires_grad, len(f.whole)) for f in flats]


def backward_without_memory(dtype):
    """A forward, the memory of the weights goes and comes, then a backward; three times."""
    params = params_of(12)
    flat, weight = ShardedFlat(params, dtype), params_of(12)[0].detach()
    kind = dtype or torch.float32
    assert flat.shard.dtype == torch.float32 and flat.whole.dtype == kind
    held = []
    for _ in range(3):
        held.append(flat.whole.untyped_storage().nbytes())
        flat.wait()
        held.append(flat.whole.untyped_storage().nbytes())
        x = torch.randn(3, 4, dtype=kind, requires_grad=True)
        y = x @ params[0].T  # autograd saves the weight
        flat.free()
        flat.start()
        flat.wait()
        y.sum().backward()
        torch.testing.assert_close(x.grad, torch.ones(3, 2, dtype=kind) @ weight.to(kind))
        params[0].grad = None
        flat.free()
        with torch.no_grad():
            flat.shard += 1  # the next gather has to bring this
        weight = weight + 1
    return held


@pytest.mark.parametrize(("dtype", "size"), [(None, 4), (torch.bfloat16, 2)])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_memory_goes_and_comes_under_autograd(dtype, size, world_size):
    for held in run_ranks(backward_without_memory, world_size, dtype):
        assert held == [0, 12 * size] * 3


def messages_of_a_flat():
    flat = ShardedFlat(params_of(13))
    with Ledger() as ledger:
        for name in ("start", "start", "wait", "wait", "start", "free", "wait"):
            getattr(flat, name)()
    return calls(ledger.entries)


def test_what_is_there_or_coming_is_not_gathered_again():
    assert run_ranks(messages_of_a_flat, 2) == [{"all_gather": 2}] * 2


def gradients_in_bfloat16():
    params = params_of(13)
    flat = ShardedFlat(params, torch.bfloat16)
    flat.wait()
    for param in params:
        param.grad = torch.full_like(param, 256 if dist.get_rank() == 0 else 1)
    flat.reduce()
    return flat.shard.grad


def test_gradients_of_16_bits_are_averaged_even_if_their_sum_is_too_large():
    def mean():
        flat = Flat(params_of(13, torch.float16))
        for param in flat.params:
            param.grad = torch.full_like(param, 40_000.0)
        flat.reduce()
        return flat.shard.grad

    for found in run_ranks(mean, 2):
        assert found.dtype == torch.float16 and found[0] == 40_000.0


def test_gradients_are_summed_in_the_type_of_the_shard():
    found = torch.cat(run_ranks(gradients_in_bfloat16, 2))
    assert found.dtype == torch.float32
    assert found[:13].tolist() == [128.5] * 13  # in bfloat16, 256 + 1 is 256
