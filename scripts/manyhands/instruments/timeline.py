"""Time lines: what this rank did when; also over a link that is made slow on purpose.

A rank records spans (rank, role, start_s, stop_s) and returns them; `figures.timeline` draws those
of all ranks. The clock is time.time(), which the ranks of one machine share.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

Span = tuple[int, str, float, float]  # rank, role, start_s, stop_s


class Timeline:
    """Collects the spans of the rank that makes it."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.spans: list[Span] = []
        self.link_free_s = 0.0

    @contextmanager
    def span(self, role: str) -> Iterator[None]:
        """Record what happens in the block under `role`, a name of figures.ROLE."""
        start_s = time.time()
        yield
        self.spans.append((self.rank, role, start_s, time.time()))

    def watch_all_reduces(self, bytes_per_s: float = float("inf"), latency_s: float = 0.0) -> None:
        """Record every all-reduce of this rank from now on, from its start to its last byte.

        Args:
            bytes_per_s: slows the link down. Messages pass one after the other; whoever waits for
                one sleeps until a link of this speed would have carried it. The computation goes
                on meanwhile, as it would beside a slow network.
            latency_s: what every message takes on top, however small.
        """
        original = dist.all_reduce

        def all_reduce(tensor: Tensor, *args, async_op: bool = False, **kwargs):
            start_s = time.time()
            work = original(tensor, *args, async_op=True, **kwargs)
            carried_s = latency_s + tensor.nbytes / bytes_per_s
            self.link_free_s = max(start_s, self.link_free_s) + carried_s
            message = Message(self, work, start_s, self.link_free_s)
            if async_op:
                return message
            message.wait()

        dist.all_reduce = all_reduce


class Message:
    """An all-reduce on its way; stands in for torch's Work."""

    def __init__(self, line: Timeline, work: dist.Work, start_s: float, arrives_s: float) -> None:
        self.line = line
        self.work = work
        self.start_s = start_s
        self.arrives_s = arrives_s
        self.done_s = 0.0
        # Called when the last byte is in, not when somebody asks for it.
        work.get_future().then(lambda _: setattr(self, "done_s", time.time()))

    def wait(self) -> bool:
        """Wait until the message is through, on the real link and on the slow one."""
        with self.line.span("idle"):
            self.work.wait()
            time.sleep(max(0.0, self.arrives_s - time.time()))
        stop_s = max(self.done_s or time.time(), self.arrives_s)
        self.line.spans.append((self.line.rank, "communication", self.start_s, stop_s))
        return True
