"""Saving without waiting for the disk: copy the state, go on training, write in a thread.

    save(state):  wait for the save before | copy into buffers |  return --> the next steps
    thread:                                     write, fsync, agree with the other ranks, index

Training stands still for the copy, which memory makes at some GB/s, and not for the disk. The copy
is what keeps later steps out of the checkpoint: the optimizer writes into the same weights while
the thread writes them to the disk.

Price for a rank that holds S bytes of the state: S bytes of memory for the buffers, which are kept
and used again, and while the file is written a second copy of S/N. The disk has to be done before
the next save, or that one waits.
Source: PyTorch's async_save does the same,
https://docs.pytorch.org/tutorials/recipes/distributed_async_checkpoint_recipe.html.
"""

import atexit
import threading
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.checkpoint.pieces import Piece, flatten, with_leaves
from manyhands.checkpoint.sharded import save_sharded
from manyhands.collectives.trees import Group


class AsyncSaver:
    """Saves sharded checkpoints while training goes on; at most one is on its way.

    Every rank of `group` makes one, and calls save() and wait() in the same order.
    """

    def __init__(self, pin: bool = False, group: Group = None) -> None:
        """Prepare buffers, which the first save makes, and a process group for the commits.

        The ranks that save have to agree when all have written, and they do so while training sends
        messages of its own. In one group the two would mix: collectives are matched by the order
        of their calls, which a thread leaves to chance, and a wait for the disk would stand in
        NCCL's queue before the next gradients. So the thread has a gloo group of the same ranks.

        Args:
            pin: copy from a GPU into page-locked memory, which is faster and takes it from others.
        """
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD) if in_group() else None
        self.group = dist.new_group(ranks, backend="gloo") if ranks else None
        self.pin = pin and torch.cuda.is_available()
        self.buffers: dict[str, Tensor] = {}
        self.thread: threading.Thread | None = None
        self.problem: BaseException | None = None
        last_wait = weakref.WeakMethod(self.join)
        atexit.register(lambda: (join := last_wait()) and join())

    def save(self, state: Mapping, folder: str | Path) -> None:
        """Start to save `state` as it is now, and return when it is copied.

        Args:
            state: as for save_sharded; it may change as soon as this returns.
            folder: as for save_sharded.

        Raises:
            ValueError: the save before this one has failed. That comes first; then nothing is
                started.
        """
        self.wait()
        copied = self.copy(state)
        self.thread = threading.Thread(target=self.write, args=(copied, folder), daemon=True)
        self.thread.start()

    def wait(self) -> None:
        """Return when the last save is complete, at once where none is on its way.

        Raises:
            ValueError: it has failed; told once.
        """
        self.join()
        problem, self.problem = self.problem, None
        if problem is not None:
            raise problem

    def join(self) -> None:
        """Wait for the thread, whatever came of it."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def copy(self, state: Mapping) -> Mapping:
        """`state` with all tensors copied into the buffers of their names."""
        pieces, values = flatten(state)
        return with_leaves(
            state,
            {name: self.copied(name, piece) for name, piece in pieces.items()} | values,
        )

    def copied(self, name: str, piece: Piece) -> Piece:
        """`piece` with a copy of its numbers, in the buffer that belongs to this name."""
        tensor = piece.tensor.detach()
        buffer = self.buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.pin)
            self.buffers[name] = buffer
        buffer.copy_(tensor)
        return replace(piece, tensor=buffer)

    def write(self, state: Mapping, folder: str | Path) -> None:
        """Write and commit; in the thread, so an error is kept for the next save() or wait()."""
        try:
            save_sharded(state, folder, self.group)
        except Exception as problem:  # whatever it is, the training must hear of it
            self.problem = problem


def in_group() -> bool:
    """Is this process one rank of several?"""
    return dist.is_initialized()
