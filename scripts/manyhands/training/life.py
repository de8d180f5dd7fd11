"""One start of a run, from its first step to its end, however it ends.

    begin  status.json: running
      |    logs/, ranks/ and nodes/ are written; SIGTERM, SIGUSR1, SIGHUP are noted, and not obeyed
      |    at each step all ranks agree: was one of them asked to stop, can one not write?
    close  status.json: finished or stopped
           failed, where nobody called close and the process ends in the ordinary way
           still running, where it was killed or the disk is full: then `why_gone` finds out

Price: one all-reduce of 48 bytes a step.
"""

import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.instruments.meters import Sampler
from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import STOP_SIGNALS, StopSignals, World, together
from manyhands.ranks.streams import keep_output
from manyhands.training import storage
from manyhands.training.metrics import Metrics


class Life:
    """What begins with the first step and has to end with the process. Every rank holds one.

    A life that is let go before it was closed has failed: `status.json` says so as soon as nothing
    holds it any more, or when the process ends in the ordinary way.
    """

    def __init__(self, world: World, status: dict) -> None:
        """Note where this rank is and what status.json will hold; nothing is written yet."""
        self.world = world
        self.status = status
        self._metrics: Metrics | None = None
        self._end: Callable[[], object] = lambda: None  # until `begin` there is nothing to end

    def begin(self, folder: Path, metrics: Metrics | None) -> None:
        """Begin to write samples and logs, and to note signals. Rank 0 gives its metrics."""
        ends = ExitStack()  # nothing in it may hold this Life, or it would never be let go
        self._metrics = metrics
        if self.world.is_main:
            storage.write_status(folder, self.status)
            ends.callback(storage.write_end, folder, self.status)  # the last to be called
            ends.callback(metrics.close)
        keep_output(folder / "logs" / f"rank-{self.world.rank:05d}.log")
        self._sampler = Sampler.in_folder(folder, self.world)
        ends.callback(self._sampler.stop)
        self._stops = StopSignals()
        ends.callback(self._stops.let_go)
        self._end = weakref.finalize(self, ends.close)

    def close(self, state: str) -> None:
        """End in `state`; BadInput on every rank when that cannot be written."""
        self.status["state"] = state
        if state == "stopped":
            self._stops.agreed = True
        with self.ends_on_bad_input():
            together(self._end)
            together(self._tell_unwritten)

    @contextmanager
    def ends_on_bad_input(self) -> Iterator[None]:
        """End the run where some rank cannot go on, before its one line is told."""
        try:
            yield
        except BadInput:
            self._end()
            raise

    def agree(self, loss: Tensor | None = None) -> tuple[float, signal.Signals | None]:
        """Mean loss over the ranks that have one, and the signal that some rank got.

        Raises:
            BadInput: on every rank, when one of them cannot write.
        """
        flags = [loss is not None, *self._stops.came.values(), self._unwritten() is not None]
        extras = [float(flag) for flag in flags]
        if self.world.world_size == 1:
            numbers = [0.0 if loss is None else loss.item(), *extras]
        else:
            mine = torch.tensor([0.0, *extras], dtype=torch.float64, device=self.world.device)
            mine[0] = 0.0 if loss is None else loss.detach()
            dist.all_reduce(mine)  # the sum over the ranks, the same on every rank
            numbers = mine.tolist()
        total, num_losses, *asked, num_failed = numbers
        if num_failed:
            with self.ends_on_bad_input():
                together(self._tell_unwritten)
        signals = [number for number, flag in zip(STOP_SIGNALS, asked, strict=True) if flag]
        return total / max(1.0, num_losses), next(iter(signals), None)

    def _unwritten(self) -> str | None:
        """What this rank could not write."""
        of_steps = self._metrics.error if self._metrics else None
        return of_steps or self._sampler.error

    def _tell_unwritten(self) -> None:
        if problem := self._unwritten():
            raise BadInput(problem)
