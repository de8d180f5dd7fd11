"""The ledger sees every call and its bytes: one's own, and those that PyTorch makes for itself."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from manyhands.collectives.ring import all_reduce_ring, start_exchange
from manyhands.collectives.trees import all_reduce_tree, broadcast_naive, gather
from manyhands.data_parallel.replicas import BucketedDDP
from manyhands.ddp.wrapping import torch_ddp
from manyhands.instruments.ledger import Entry, Ledger, calls, rounds, traffic
from manyhands.ranks.lab import run_ranks

N = 3  # ranks
WHOLE_BYTES = 4 * 4 * N  # a chunk of 4 numbers a rank, in float32


def record(work, **settings):
    """The entries of a piece of work. A deprecated name would be an error."""
    with warnings.catch_warnings(), Ledger(**settings) as ledger:
        warnings.simplefilter("error")
        work()
    return ledger.entries


def brief(entries):
    return [(entry.op, entry.nbytes) for entry in entries]


# ---- PyTorch's own collectives -----------------------------------------------------------------


def native_calls():
    whole = torch.ones(4 * N)
    chunks, chunk = list(whole.chunk(N)), torch.ones(4)
    # torch 2.13 has new names for these two.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    at_root = chunks if dist.get_rank() == 0 else None
    works = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_reduce, later": lambda: dist.all_reduce(whole, async_op=True).wait(),
        "all_reduce, two as one": lambda: coalesced(whole, chunk),
        "all_gather": lambda: dist.all_gather(chunks, chunk),
        "all_gather, one tensor": lambda: all_gather(whole, chunk),
        "reduce_scatter": lambda: dist.reduce_scatter(chunk, chunks),
        "reduce_scatter, one tensor": lambda: reduce_scatter(chunk, whole),
        "all_to_all": lambda: dist.all_to_all(list(torch.ones(4 * N).chunk(N)), chunks),
        "all_to_all, one tensor": lambda: dist.all_to_all_single(torch.ones(4 * N), whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "reduce": lambda: dist.reduce(whole, 1),
        "gather": lambda: dist.gather(chunk, at_root),
        "scatter": lambda: dist.scatter(chunk, at_root),
    }
    found = {name: record_if_there(work) for name, work in works.items()}
    return found, calls(record(dist.barrier))


def record_if_there(work):
    """The entries of a collective in brief; None where this torch's gloo has no such collective."""
    try:
        return brief(record(work))
    except RuntimeError as error:
        if "gloo does not support" not in str(error):
            raise
        return None


def coalesced(*tensors):
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)


def test_native_collectives_are_one_entry_each_with_the_bytes_of_the_whole(record_property):
    for rank, (found, barrier) in enumerate(run_ranks(native_calls, N)):
        for name, entries in found.items():
            op = name.split(",")[0]
            if entries is None and op == "all_to_all":  # torch 2.11 has none
                words = f"not tested: the gloo of torch {torch.__version__} has no {op}"
                record_property("summary", words)
                continue
            wanted = WHOLE_BYTES + 16 * (name == "all_reduce, two as one")
            if rank and op in ("gather", "scatter"):
                wanted = 16  # only the root has them all
            assert entries == [(op, wanted)], (rank, name)
        assert barrier == {"barrier": 1}


def functional_calls():
    import torch.distributed._functional_collectives as functional

    group, whole = dist.group.WORLD, torch.ones(4 * N)
    bits = torch.ones(4 * N, dtype=torch.int32)
    all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
    reduce_scatter = (
        getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
    )
    works = {
        **{
            f"all_reduce {op}": lambda op=op: functional.all_reduce(whole, op, group).sum()
            for op in ("sum", "avg", "min", "max", "product")
        },
        "all_reduce band": lambda: functional.all_reduce(bits, "band", group).sum(),
        "all_gather": lambda: all_gather(torch.ones(4), 0, group).sum(),
        "reduce_scatter": lambda: reduce_scatter(whole, "sum", 0, group).sum(),
        "all_to_all": lambda: functional.all_to_all_single(whole, None, None, group).sum(),
        "broadcast": lambda: functional.broadcast(whole, 0, group).sum(),
    }
    return {name: record(work) for name, work in works.items()}


def test_functional_collectives_of_dtensor_are_seen_too():
    for rank, found in enumerate(run_ranks(functional_calls, N)):
        for name, entries in found.items():
            ranks = tuple(range(N))
            assert entries == [Entry(name.split()[0], rank, None, WHOLE_BYTES, ranks, None)], name


# ---- what DDP and FSDP call for themselves -----------------------------------------------------


def step(model, x):
    """The entries of the forward and of the backward pass."""
    losses = []
    return record(lambda: losses.append(model(x).sum())), record(lambda: losses[0].backward())


def data_parallel():
    """Four layers of 40.4 kB, in buckets of 100 kB."""
    found = {}
    for wrap in (torch_ddp, BucketedDDP):
        model = wrap(nn.Sequential(*(nn.Linear(100, 100) for _ in range(4))), 0.1)
        for _ in range(2):  # torch packs its buckets anew after the first step
            step(model, torch.ones(2, 100))
        found[wrap.__name__] = [brief(part) for part in step(model, torch.ones(2, 100))]
        del model
    return found


def test_data_parallel_calls_an_all_reduce_a_bucket_in_backward():
    for found in run_ranks(data_parallel, 2):
        for forward, backward in found.values():
            assert forward == []
            assert {op for op, _ in backward} == {"all_reduce"}
            assert sum(nbytes for _, nbytes in backward) == 4 * 4 * 10_100
            assert len(backward) == 2


def sharded(reshard):
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    for block in model[:2]:
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    return [brief(part) for part in step(model, torch.ones(3, 8))]


@pytest.mark.parametrize("reshard", [True, False])
def test_fully_shard_gathers_weights_and_scatters_gradients(reshard):
    """Two blocks of 72 numbers and a root of 18, in float32."""
    for forward, backward in run_ranks(sharded, 2, reshard):
        weights = [("all_gather", 72), ("all_gather", 288), ("all_gather", 288)]
        gradients = [("reduce_scatter", 72), ("reduce_scatter", 288), ("reduce_scatter", 288)]
        assert sorted(forward) == weights
        assert sorted(backward) == (weights if reshard else []) + gradients


# ---- messages ----------------------------------------------------------------------------------


def messages():
    """Within the group of ranks 1 and 2, from anybody, and with their content."""
    rank, tensor = dist.get_rank(), torch.tensor([[1.5, 2], [3, 4]])
    pair = dist.new_group([1, 2])

    def in_pair():
        if rank == 1:
            dist.send(tensor, group=pair, group_dst=1)
        elif rank == 2:
            dist.recv(tensor, group=pair, group_src=0)

    def from_anybody():
        if rank == 0:
            dist.recv(tensor)
            dist.recv(tensor)
        else:
            dist.send(tensor.to(torch.float32), 0)

    def other_types():
        if rank == 0:
            dist.send(torch.tensor([7, 8], dtype=torch.uint8), 1)
            dist.send(torch.tensor([0.5], dtype=torch.bfloat16), 1)
        elif rank == 1:
            dist.recv(torch.zeros(2, dtype=torch.uint8), 0)
            dist.recv(torch.zeros(1, dtype=torch.bfloat16), 0)

    return record(in_pair), record(from_anybody), record(other_types, keep=True)


def test_messages_name_the_ranks_of_the_job_and_their_content_where_it_is_kept():
    in_pair, from_anybody, others = zip(*run_ranks(messages, N), strict=True)
    group = (1, 2)
    assert list(in_pair) == [
        [],
        [Entry("send", 1, 2, 16, group, None)],
        [Entry("recv", 2, 1, 16, group, None)],
    ]
    assert traffic(sum(in_pair, [])) == {(1, 2): 16}
    everyone = (0, 1, 2)
    assert from_anybody[0] == [Entry("recv", 0, None, 16, everyone, None)] * 2
    assert [brief(found) for found in rounds(from_anybody)] == [[("send", 16)]] * 2
    assert traffic(sum(from_anybody, [])) == {(1, 0): 16, (2, 0): 16}
    assert others[0] == [
        Entry("send", 0, 1, 2, everyone, (7, 8)),
        Entry("send", 0, 1, 2, everyone, (0.5,)),
    ]
    assert [entry.content for entry in others[1]] == [None, None]


def nested():
    tensor = torch.ones(2)
    outer, inner = Ledger(), Ledger()
    with outer:
        dist.all_reduce(tensor)
        with inner:
            dist.all_reduce(tensor)
        tensor += 1  # no call of torch.distributed
    dist.all_reduce(tensor)
    try:
        with Ledger() as broken:
            raise KeyError
    except KeyError:
        dist.all_reduce(tensor)
    return [len(ledger.entries) for ledger in (outer, inner, broken)]


def test_ledgers_see_their_own_block_and_nothing_else():
    assert run_ranks(nested, 2) == [[2, 1, 0]] * 2


# ---- rounds ------------------------------------------------------------------------------------


def pairs(found):
    return [[(entry.rank, entry.peer) for entry in one] for one in found]


def in_rounds(collective, world_size, *args):
    return pairs(rounds(run_ranks(lambda: record(lambda: collective(*args)), world_size)))


def test_rounds_of_the_naive_of_the_tree_and_of_the_ring():
    tensor = torch.ones(8)
    assert in_rounds(broadcast_naive, 4, tensor) == [[(0, 1)], [(0, 2)], [(0, 3)]]
    # A rank can only take one message at a time, so these are rounds as well.
    assert in_rounds(gather, 4, list(tensor.chunk(4))) == [[(1, 0)], [(2, 0)], [(3, 0)]]
    up, down = [(2, 0), (3, 1)], [(0, 2), (1, 3)]
    assert in_rounds(all_reduce_tree, 4, tensor) == [up, [(1, 0)], [(0, 1)], down]
    # Rank 2 could send at once, but rank 0 asks for rank 4's first.
    assert in_rounds(all_reduce_tree, 5, tensor) == [
        *([(3, 1), (4, 0)], [(2, 0)], [(1, 0)]),
        *([(0, 1)], [(0, 2), (1, 3)], [(0, 4)]),
    ]
    around = [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert in_rounds(all_reduce_ring, 4, tensor) == [around] * 6


def all_receive_first(num_steps):
    """A ring in which every rank starts to receive before it sends."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for _ in range(num_steps):
        receiving = dist.irecv(torch.zeros(2), (rank - 1) % n)
        dist.send(torch.ones(2), (rank + 1) % n)
        receiving.wait()


def two_at_once():
    """Both neighbours' messages are on their way before any is waited for."""
    rank, n = dist.get_rank(), dist.get_world_size()
    around = (rank + 1) % n, (rank - 1) % n
    works = start_exchange(torch.ones(2), around[0], torch.zeros(2), around[1])
    works += start_exchange(torch.ones(2), around[1], torch.zeros(2), around[0])
    for work in works:
        work.wait()


def test_rounds_of_ranks_that_receive_first_or_have_several_messages_open():
    around = [(0, 1), (1, 2), (2, 0)]
    assert in_rounds(all_receive_first, 3, 2) == [around] * 2
    assert in_rounds(two_at_once, 3) == [around, [(0, 2), (1, 0), (2, 1)]]


def test_rounds_of_nothing_and_of_a_message_that_nobody_sends():
    assert rounds([]) == rounds([[], []]) == []
    ranks = (0, 1)
    only_all_reduce = [[Entry("all_reduce", rank, None, 4, ranks, None)] for rank in ranks]
    assert rounds(only_all_reduce) == []
    receive = Entry("recv", 0, 1, 4, ranks, None)
    with pytest.raises(ValueError, match="a rank receives a message that nobody sends"):
        rounds([[receive], []])
    send = Entry("send", 1, 0, 4, ranks, None)
    with pytest.raises(ValueError, match="that nobody sends"):
        rounds([[receive, receive], [send]])
    assert rounds([[receive], [send]]) == rounds([[], [send]]) == [[send]]
