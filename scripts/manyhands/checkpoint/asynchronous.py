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

from manyhands.collectives.trees import Group
from manyhands.saving.names import flatten, with_leaves
from manyhands.saving.sharded import save_sharded


class Background:
    """What a save in the background needs: buffers, a thread, and a process group of its own.

    The ranks that save have to agree when all have written, and they do so while training sends
    messages of its own. In one group the two would mix: collectives are matched by the order of
    their calls, which a thread leaves to chance, and a wait for the disk would stand in NCCL's
    queue before the next gradients. So the thread has a gloo group of the same ranks.
    """

    def __init__(self, pin: bool = False, group: Group = None) -> None:
        """Prepare the group and an empty place for buffers; every rank of `group` calls it.

        Args:
            pin: copy from a GPU into page-locked memory, which is faster and takes it from others.
        """
        self.group: Group = None
        if dist.is_initialized():
            ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
            self.group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        self.pin = pin and torch.cuda.is_available()
        self.buffers: dict[str, Tensor] = {}  # by name; made by the first save, then used again
        self.thread: threading.Thread | None = None
        self.problem: Exception | None = None  # of the thread, until somebody was told
        last_wait = weakref.WeakMethod(self.join)
        atexit.register(lambda: (join := last_wait()) and join())

    def join(self) -> None:
        """Return when the thread has ended, at once where there is none."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def copy(self, state: Mapping) -> Mapping:
        """`state` with all tensors copied into the buffers of their names."""
        pieces, values = flatten(state)
        copied = {
            name: replace(piece, tensor=self.copied(name, piece.tensor.detach()))
            for name, piece in pieces.items()
        }
        return with_leaves(state, copied | values)

    def copied(self, name: str, tensor: Tensor) -> Tensor:
        """The numbers of `tensor` in the buffer of this name; a subclass says how."""
        raise NotImplementedError


class AsyncSaver(Background):
    """Saves sharded checkpoints while training goes on; at most one is on its way.

    Every rank of the group makes one, and calls save() and wait() in the same order, wait() also
    before the program ends. Without that, a save in a folder is still finished; an upload to an
    object store needs threads, which Python does not start any more, and no checkpoint appears.
    """

    def copied(self, name: str, tensor: Tensor) -> Tensor:
        """Return a buffer with the numbers of `tensor`, the same buffer for a name every time.

        It is made in the first save, on the CPU, in the shape and type of `tensor`, and with
        pin_memory=self.pin.
        """
        if name not in self.buffers:
            self.buffers[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.pin)
        return self.buffers[name].copy_(tensor)

    def save(self, state: Mapping, folder: str | Path) -> None:
        """Start to save `state` as it is now, and return when it is copied (self.copy).

        Args:
            state: as for save_sharded; it may change as soon as this returns.
            folder: as for save_sharded.

        Raises:
            ValueError: the save before this one has failed. Then nothing is started.
        """
        self.wait()
        copied = self.copy(state)
        self.thread = threading.Thread(target=self.write, args=(copied, folder), daemon=True)
        self.thread.start()

    def write(self, state: Mapping, folder: str | Path) -> None:
        """Save with save_sharded and self.group, in the thread; keep an error in self.problem."""
        try:
            save_sharded(state, folder, self.group)
        except Exception as problem:  # whatever it is, the training must hear of it
            self.problem = problem

    def wait(self) -> None:
        """Return when the last save is complete (self.join), at once where none is on its way.

        Raises:
            ValueError, or what else write() has kept: the save has failed; told once.
        """
        self.join()
        problem, self.problem = self.problem, None
        if problem is not None:
            raise problem
