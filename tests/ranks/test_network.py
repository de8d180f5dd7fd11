"""On the slow network messages are real and take the time of the model, no less.

Sleeping gives a lower bound that no busy machine can break. Upper bounds are wide, and hold for the
best of several tries.
"""

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from manyhands.collectives import ring, trees
from manyhands.collectives.alpha_beta import predicted_s
from manyhands.ranks.lab import run_ranks
from manyhands.ranks.network import PATCHED, SlowNetwork
from manyhands.ranks.rules import watching

LATENCY_S, BYTES_PER_S = 0.02, 400e3
NUMBERS = 2000  # 8000 bytes, which take as long as the latency
MESSAGE_S = LATENCY_S + 4 * NUMBERS / BYTES_PER_S
CHUNKS = ("gather", "all_gather_ring", "reduce_scatter_ring")
NAMES = (
    *("broadcast_naive", "broadcast_tree", "reduce_tree", "all_reduce_naive", "all_reduce_tree"),
    *("all_reduce_ring", *CHUNKS),
)


def tries(work, num_tries=3):
    """Start and end (s) of each try on this rank; the clock is the same for all ranks."""
    times_s = []
    with SlowNetwork(LATENCY_S, BYTES_PER_S):
        for _ in range(num_tries):
            dist.barrier()  # a collective of gloo's own: it is not slowed down
            start_s = time.monotonic()
            work()
            times_s.append((start_s, time.monotonic()))
    return times_s


def elapsed_s(times_s):
    """From the first start of any rank to the last end, try by try."""
    return [
        max(end_s for _, end_s in ranks) - min(start_s for start_s, _ in ranks)
        for ranks in zip(*times_s, strict=True)
    ]


def every_collective():
    tensor, chunks = torch.zeros(NUMBERS), list(torch.zeros(NUMBERS).chunk(dist.get_world_size()))
    functions = {name: getattr(trees, name, None) or getattr(ring, name) for name in NAMES}
    return [
        tries(partial(function, chunks if name in CHUNKS else tensor))
        for name, function in functions.items()
    ]


def test_collectives_take_the_time_of_the_model():
    best_s = {}
    for name, by_rank in zip(NAMES, zip(*run_ranks(every_collective, 4), strict=True), strict=True):
        times_s = elapsed_s(by_rank)
        wanted_s = predicted_s(name, 4, 4 * NUMBERS, LATENCY_S, 1 / BYTES_PER_S)
        best_s[name] = min(times_s)
        assert wanted_s <= best_s[name] < 2 * wanted_s + 0.3, (name, times_s, wanted_s)
    assert best_s["broadcast_tree"] < best_s["broadcast_naive"]
    assert best_s["all_reduce_tree"] < best_s["all_reduce_naive"]


def exchanges():
    """Three ranks; rank 2 only has a part in the last two."""
    rank = dist.get_rank()
    tensor, other = torch.zeros(NUMBERS), 1 - rank

    def there_and_back():
        if rank == 0:
            dist.send(tensor, other)
            dist.recv(tensor, other)
        elif rank == 1:
            dist.recv(tensor, other)
            dist.send(tensor, other)

    def both_at_once():
        if rank < 2:
            ring.exchange(tensor, other, torch.zeros(NUMBERS), other)

    def from_one():
        if rank > 0:
            dist.recv(tensor, 0)
        else:
            for work in [dist.isend(tensor, 1), dist.isend(tensor, 2)]:
                work.wait()

    def to_one():
        if rank > 0:
            dist.send(tensor, 0)
        else:
            for work in [dist.irecv(torch.zeros(NUMBERS), source) for source in (1, 2)]:
                work.wait()

    return [tries(work) for work in (there_and_back, both_at_once, from_one, to_one)]


@pytest.mark.parametrize("rules", ["", "nccl"])
def test_a_rank_carries_one_message_at_a_time_in_each_direction(rules):
    by_rank = run_ranks(exchanges, 3, rules=rules)
    there_and_back, both_at_once, from_one, to_one = map(elapsed_s, zip(*by_rank, strict=True))
    assert min(there_and_back + from_one + to_one) >= 2 * MESSAGE_S
    assert MESSAGE_S <= min(both_at_once) < 0.9 * min(there_and_back)


def in_the_background():
    """What a rank knows of a message before and after it has waited for it."""
    rank, tensor = dist.get_rank(), torch.full((3,), float(dist.get_rank()))
    with SlowNetwork(0.5, 1e9):
        work = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
        early = work.is_completed()
        work.wait()
        return early, work.is_completed(), tensor.tolist()


def test_a_message_travels_while_the_rank_goes_on():
    assert run_ranks(in_the_background, 2) == [(False, True, [0, 0, 0])] * 2


def results():
    """What every collective gives on the slow network, and at torch's own speed."""
    rank, n = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([0, 2])

    def work(function, in_chunks):
        tensor = torch.arange(4 * n) * (rank + 1)
        function(list(tensor.chunk(n)) if in_chunks else tensor)
        return tensor.tolist()

    def all_works():
        functions = {name: getattr(trees, name, None) or getattr(ring, name) for name in NAMES}
        found = {name: work(function, name in CHUNKS) for name, function in functions.items()}
        if rank != 1:
            found["pair"] = work(lambda tensor: ring.all_reduce_ring(tensor, "max", pair), False)
        return found

    quick = all_works()
    with SlowNetwork(1e-4, 1e9):
        return quick, all_works()


@pytest.mark.parametrize("rules", ["", "nccl"])
def test_results_are_those_of_the_quick_network(rules):
    for quick, slow in run_ranks(results, 3, rules=rules):
        assert slow == quick
        assert quick["all_reduce_ring"] == [6 * value for value in range(12)]


def functions():
    return [getattr(module, name) for module in (dist, dist.distributed_c10d) for name in PATCHED]


def left_as_it_was():
    before = functions()
    with SlowNetwork(1e-3, 1e9):
        during = functions()
        ring.all_reduce_ring(torch.ones(4))
    after = functions()
    try:
        with SlowNetwork(1e-3, 1e9):
            raise KeyError("of the person who uses it")
    except KeyError as error:
        words = str(error)
    ring.all_reduce_ring(torch.ones(4))
    changed = [now is not old for now, old in zip(during, before, strict=True)]
    return changed, after == before, functions() == before, words


def outside_and_inside():
    """Rules that are asked for on a slow network see the program's calls as well."""
    tensor = torch.full((2,), float(dist.get_rank()))
    with SlowNetwork(1e-4, 1e9):
        before = functions()
        with watching("nccl"):
            ring.all_reduce_ring(tensor)
            watched = functions()
        after = functions()
    changed = [now is not old for now, old in zip(watched, before, strict=True)]
    return changed, after == before, tensor.tolist()


def test_rules_can_be_asked_for_on_a_slow_network():
    assert run_ranks(outside_and_inside, 2, rules="") == [([True] * 8, True, [1.0, 1.0])] * 2


def test_torch_is_as_it_was_afterwards_also_after_an_exception():
    for changed, after, after_exception, words in run_ranks(left_as_it_was, 2):
        assert changed == [True] * 8 and after and after_exception
        assert words == "'of the person who uses it'"


@pytest.mark.parametrize("bytes_per_s", [1e4, 1e6])
def test_large_messages_take_longer_on_a_thin_network(bytes_per_s):
    def one_message():
        tensor, start_s = torch.zeros(500), time.monotonic()  # 2000 bytes
        with SlowNetwork(0, bytes_per_s):
            dist.send(tensor, 1) if dist.get_rank() == 0 else dist.recv(tensor, 0)
        return start_s, time.monotonic()

    (spent_s,) = elapsed_s([[times] for times in run_ranks(one_message, 2)])
    assert spent_s >= 2000 / bytes_per_s
