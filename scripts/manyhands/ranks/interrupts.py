"""The stop button, noted: an exception in the midst of starting or ending processes loses some."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from manyhands.ranks.failures import RanksInterrupted


class Interrupts:
    """How often SIGINT has come."""

    def __init__(self) -> None:
        self.count = 0

    def note(self, *_: object) -> None:
        """Handle the signal."""
        self.count += 1

    def stop_if_any(self) -> None:
        """Raise RanksInterrupted where it has come."""
        if self.count:
            raise RanksInterrupted


@contextmanager
def noted() -> Iterator[Interrupts]:
    """Count SIGINT in here, instead of raising KeyboardInterrupt wherever this process is.

    Only the main thread gets signals, and where they are ignored nothing changes.
    """
    interrupts = Interrupts()
    old = signal.getsignal(signal.SIGINT)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or old in (None, signal.SIG_IGN):
        yield interrupts
        return
    signal.signal(signal.SIGINT, interrupts.note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, old)
