"""An asynchronous call between its launch and its wait: its tensors must stay as they are."""

import ctypes
import sys
import zlib
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from manyhands.ranks.failures import MACHINERY, Frame
from manyhands.ranks.matching import Breach
from manyhands.ranks.notes import Notes


class Flight:
    """Tensors of an operation from its launch to its wait: they must stay as they are."""

    def __init__(
        self,
        rank: int,
        words: str,
        frame: Frame,
        ins: Sequence[Tensor],
        outs: Sequence[Tensor],
        by_copies: bool = False,
    ) -> None:
        """Note their state.

        Args:
            ins: only go in; `outs` come out, and may go in as well.
            by_copies: torch itself fills the outs by copies, which count as writes to them.
        """
        self.rank, self.words, self.frame = rank, words, frame
        filled = {tensor.untyped_storage().data_ptr() for tensor in outs}
        alone = [t for t in ins if t.untyped_storage().data_ptr() not in filled]
        self.checksums = [(tensor, _checksum(tensor)) for tensor in alone]
        # A write through any view of a tensor is counted in its version. Where the tensor is only
        # part of its memory, the write may have been to another part.
        wholes = [t for t in outs if t.untyped_storage().nbytes() == t.nbytes and not by_copies]
        self.versions = [(t, t._version) for t in wholes if not t.is_inference()]
        self.memory = [(tensor, tensor.untyped_storage().nbytes()) for tensor in [*ins, *outs]]

    def check(self, frame: Frame) -> None:
        """Raise Breach where the program has freed or written one of them meanwhile.

        Args:
            frame: where it waits.
        """
        told = ""
        if any(tensor.untyped_storage().nbytes() != nbytes for tensor, nbytes in self.memory):
            told = "the memory of its tensor was freed"
        elif any(_checksum(tensor) != checksum for tensor, checksum in self.checksums):
            told = "the tensor that it sends was written"
        elif any(tensor._version != version for tensor, version in self.versions):
            told = "the tensor that it fills was written"
        if told:
            raise Breach(
                f"in flight: between {self.words} on rank {self.rank} ({{}}) and its wait ({{}}) "
                f"{told}: a GPU may still read or fill it: wait first, or work on a copy",
                [self.frame, frame],
            )


def _checksum(tensor: Tensor) -> int:
    """Of the bytes of a contiguous tensor; without a call of torch's, which a ledger might see."""
    if tensor.device.type != "cpu" or not tensor.nbytes:
        return 0
    return zlib.crc32((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


class WatchedWork:
    """What an asynchronous call returns, with a wait that is noted."""

    def __init__(
        self, work: dist.Work, notes: Notes, launched: int, flight: Flight, keys: list[str]
    ) -> None:
        """Stand for `work`."""
        self._work, self._notes, self._launched = work, notes, launched
        self._flight, self._keys = flight, keys

    __class__ = property(lambda self: type(self._work))  # for isinstance(work, dist.Work)

    def wait(self, *args: object, **kwargs: object) -> object:
        """Wait, once it is certain that the partners have made their calls."""
        if self._flight:
            frame = line_of_program()
            self._flight.check(frame)
            words = f"wait() for {self._flight.words}"
            self._notes.wait(self._launched, words, frame, self._keys)
            self._flight = None
        return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> object:
        if name in ("get_future", "is_completed"):  # another way to wait
            self._notes.unawaited.pop(self._launched, None)
        return getattr(self._work, name)


def line_of_program() -> Frame:
    """The line of the program that made this call, below torch's and the course's machinery."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(MACHINERY):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
