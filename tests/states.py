"""What the tests of checkpoints share: states that ranks save and load, sound ones and others."""

import pytest
import torch
import torch.distributed as dist

from manyhands.checkpoint.asynchronous import AsyncSaver
from manyhands.ranks.failures import RankFailed
from manyhands.ranks.lab import run_ranks
from manyhands.saving import folder as checkpoints
from manyhands.saving.pieces import Piece
from manyhands.saving.sharded import load_sharded, save_sharded


def state_for(what=""):
    """A state in halves, or one that differs from it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    step, length = 12 // size, 12
    part, offset = torch.ones(step), step * rank
    if what == "gap" and rank == 1:
        part = part[:-1]
    if what == "overlap" and rank == 1:
        offset -= 1
    if what == "another shape":
        length = 13
        part = torch.ones(step + (rank == size - 1))
    if what == "another type":
        part = part.double()
    state = {"model": {"w": Piece(part, (offset,), (length,))}, "lr": 0.1}
    if what == "differs":
        state["lr"] = 0.1 * rank
    if what == "no number":
        state["lr"] = {1, 2}
    if what == "one rank's item" and rank == 1:
        state["lr"] = print
    if what == "module.":
        state["model"] = {f"module.{name}": piece for name, piece in state["model"].items()}
    if what == "more":
        state["model"]["v"] = torch.ones(2)
    return state


def save_state(folder, what=""):
    save_sharded(state_for(what), folder)


def load_state(folder, what=""):
    load_sharded(state_for(what), folder)


def refused(call, num_ranks, *args):
    """The one line that a refusal is; every rank has to leave, so the limit is short."""
    with pytest.raises(RankFailed) as found:
        run_ranks(call, num_ranks, *args, timeout_s=60)
    text = str(found.value)
    assert "Timed out" not in text and "did not end" not in text
    return text


def save_and_go_on(folder):
    """Values change as soon as save() returns, and training sends messages meanwhile."""
    rank, size = dist.get_rank(), dist.get_world_size()
    weights = torch.zeros(300_000)
    moments = torch.zeros(100_000)
    saver = AsyncSaver()
    addresses = []
    for step in range(1, 4):
        weights += 1
        moments -= 1
        state = {
            "w": weights,
            "m": Piece(moments, (rank * len(moments),), (size * len(moments),)),
            "step": step,
        }
        saver.save(state, f"{folder}/{checkpoints.name_of(step)}")
        addresses.append({name: buffer.data_ptr() for name, buffer in saver.buffers.items()})
        for _ in range(20):
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == size
            weights.add_(0)
    weights.fill_(77)
    saver.wait()
    assert addresses[0] == addresses[1] == addresses[2]  # buffers are used again
    return checkpoints.newest_intact(folder)
