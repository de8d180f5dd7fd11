"""Rounds worked out from recorded messages: true for rings, trees and wrong algorithms."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist

from manyhands.collectives.ring import all_gather_ring, all_reduce_ring, reduce_scatter_ring
from manyhands.collectives.trees import all_reduce_naive, all_reduce_tree, broadcast_tree
from manyhands.instruments.ledger import Entry, Ledger
from manyhands.instruments.replay import marked_input, record, replay
from manyhands.ranks.failures import BadInput
from manyhands.ranks.lab import run_ranks

pytestmark = pytest.mark.fast


def everything(num_ranks):
    whole = frozenset(range(num_ranks))
    return {rank: {chunk: whole for chunk in range(num_ranks)} for rank in range(num_ranks)}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("fn", [all_reduce_ring, all_reduce_tree, all_reduce_naive])
def test_an_all_reduce_ends_with_all_numbers_everywhere(fn, num_ranks):
    entries, results = zip(*run_ranks(record, num_ranks, fn), strict=True)
    states = replay(entries)
    assert states == replay(entries, results)  # the messages alone tell as much
    start, end = states[0], states[-1]
    assert start.messages == []
    for rank in range(num_ranks):
        assert start.held[rank] == {chunk: frozenset({rank}) for chunk in range(num_ranks)}
    assert end.held == everything(num_ranks)
    num_chunks = sum(len(entry.content) for mine in entries for entry in mine if entry.content)
    assert sum(len(state.messages) for state in states) == num_chunks


def test_the_ring_goes_round_chunk_by_chunk():
    states = replay(*zip(*run_ranks(record, 4, all_reduce_ring), strict=True))
    assert len(states) == 1 + 6
    for step, state in enumerate(states[1:]):
        for message in state.messages:
            assert message.receiver == (message.sender + 1) % 4
            assert message.chunk == (message.sender - step - 1) % 4
            assert len(message.ranks) == min(step + 1, 4)
        assert sorted(message.sender for message in state.messages) == [0, 1, 2, 3]
    assert all(states[3].held[rank][rank] == frozenset(range(4)) for rank in range(4))
    assert states[1].held[0] == {0: {0}, 1: {0}, 2: {0, 3}, 3: {0}}


def zeroes(tensor):
    tensor.zero_()


def ring_halves(tensor):
    chunks = tensor.tensor_split(dist.get_world_size())
    reduce_scatter_ring(chunks)
    for rank, chunk in enumerate(chunks):
        if rank != dist.get_rank():
            chunk.zero_()
    all_gather_ring(chunks)


def from_anybody(tensor):
    """Rank 0 adds up whatever comes first, and sends the sum back."""
    others = range(1, dist.get_world_size())
    if dist.get_rank() == 0:
        coming = torch.empty_like(tensor)
        for _ in others:
            dist.recv(coming)
            tensor += coming
        for other in others:
            dist.send(tensor, other)
    else:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)


def test_a_receive_from_anybody_takes_what_was_sent_first():
    states = replay(*zip(*run_ranks(record, 3, from_anybody), strict=True))
    assert len(states) == 1 + 4 and states[-1].held == everything(3)
    assert states[1].held[0] == {chunk: {0, 1} for chunk in range(3)}


def test_what_ranks_do_between_messages_shows_in_the_end():
    assert replay(*zip(*run_ranks(record, 3, ring_halves), strict=True))[-1].held == everything(3)
    assert replay(*zip(*run_ranks(record, 1, zeroes), strict=True))[-1].held == {0: {0: set()}}
    states = replay(*zip(*run_ranks(record, 3, broadcast_tree), strict=True))
    assert states[-1].held == {rank: {chunk: {0} for chunk in range(3)} for rank in range(3)}


def receives_and_forgets(tensor):
    """Sends its chunk 0 on before it reads what came; the second time it sends what came."""
    rank, arrived = dist.get_rank(), tensor.clone()
    if rank == 0:
        dist.send(tensor[:1], dst=1)
    elif rank == 1:
        dist.send(tensor[:1], dst=2)
        dist.recv(arrived[:1], src=0)
        dist.send(tensor[:1], dst=2)  # unchanged: what came was not added
        dist.send(arrived[:1], dst=2)
    else:
        for _ in range(3):
            dist.recv(arrived[:1], src=1)


def test_a_message_counts_when_it_is_received_and_as_it_is_used():
    entries, results = zip(*run_ranks(record, 3, receives_and_forgets), strict=True)
    states = replay(entries)
    assert [state.held[1][0] for state in states] == [{1}, {1}, {1}, {0}]
    assert [message.ranks for message in states[-1].messages] == [{0}]
    end = replay(entries, results)[-1]
    assert end.held[1][0] == {1} and end.held[2][0] == {2}  # both threw away what came


def receives_late(tensor):
    """Rank 0's message is there in round 1, but rank 1 sends twice before it reads it."""
    if dist.get_rank() == 0:
        dist.send(tensor[:1], dst=1)
    elif dist.get_rank() == 1:
        dist.send(tensor[:1], dst=2)
        dist.send(tensor[:1], dst=2)
        other = tensor[:1].clone()
        dist.recv(other, src=0)
        tensor[:1] += other
    else:
        dist.recv(tensor[:1], src=1)
        dist.recv(tensor[:1], src=1)


def test_a_message_that_waits_is_not_there_yet():
    states = replay(*zip(*run_ranks(record, 3, receives_late), strict=True))
    assert [state.held[1][0] for state in states] == [{1}, {1}, {0, 1}]
    assert [state.held[2][0] for state in states] == [{2}, {1}, {1}]


def sends_twice(tensor):
    rank = dist.get_rank()
    for _ in range(2):
        if rank == 0:
            dist.send(tensor, dst=1)
        else:
            other = tensor.clone()
            dist.recv(other, src=0)
            tensor += other


def sends_rubbish(tensor, rubbish):
    if dist.get_rank() == 0:
        dist.send(torch.full_like(tensor, rubbish, dtype=torch.tensor(rubbish).dtype), dst=1)
    else:
        dist.recv(torch.zeros_like(tensor, dtype=torch.tensor(rubbish).dtype), src=0)


def test_a_wrong_sum_is_refused_in_one_line():
    entries, results = zip(*run_ranks(record, 2, sends_twice), strict=True)
    with pytest.raises(BadInput, match="^rank 1 ends with a chunk 0 .* rank 0's number .* 2 times"):
        replay(entries, results)
    for rubbish in (999, -1, 1 << 62, math.nan):
        entries, _ = zip(
            *run_ranks(record, 2, partial(sends_rubbish, rubbish=rubbish)), strict=True
        )
        with pytest.raises(BadInput, match="^rank 0 sends .* no sum of marked inputs") as refused:
            replay(entries)
        assert "\n" not in str(refused.value)
    mixed = (marked_input(0, 2)[0] + marked_input(1, 2)[1]).item()  # two chunks in one sum
    send, recv = Entry("send", 0, 1, 8, (0, 1), (mixed,)), Entry("recv", 1, 0, 8, (0, 1), None)
    with pytest.raises(BadInput, match="^rank 0 sends .* no sum of marked inputs"):
        replay([[send], [recv]])
    with pytest.raises(BadInput, match="ends with .* no sum of marked inputs of chunk 0"):
        replay([[], []], [marked_input(0, 2).flip(0).tolist(), marked_input(1, 2).tolist()])


def test_marks_need_few_ranks_and_kept_content():
    with pytest.raises(BadInput, match="1 to 8 ranks"):
        marked_input(0, 9)
    send, recv = Entry("send", 0, 1, 8, (0, 1), None), Entry("recv", 1, 0, 8, (0, 1), None)
    with pytest.raises(BadInput, match="keep=True"):
        replay([[send], [recv]])
    assert Ledger().keep is False
