"""A run whose loop and checkpoints belong to a framework, such as Lightning or Accelerate.

    the framework   the loop, the ranks' gradients, checkpoints
    FrameworkRun    folder and settings, a line a step, stop signals, the report

The frameworks are optional: `pip install -e .[frameworks]` installs them.
Price: that of a `Run`, one all-reduce of 48 bytes a step.
"""

import importlib
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from torch import nn
from torch.optim import Optimizer

from manyhands.data import corpus
from manyhands.models.transformer import Transformer, flops_per_token
from manyhands.ranks.runtime import World, distributed, on_main, together
from manyhands.training import storage
from manyhands.training.report import write_report
from manyhands.training.run import Run
from manyhands.training.settings import TrainConfig


@dataclass(frozen=True)
class Config(TrainConfig):
    """Settings of the run."""


def imported(name: str) -> ModuleType:
    """Import a framework; where it is missing, end with exit code 2 and one line from rank 0."""
    package = name.partition(".")[0]
    logging.getLogger(package).setLevel(logging.ERROR)  # of its hints, none is about this course
    warnings.filterwarnings("ignore", module=package)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if os.environ.get("RANK", "0") == "0":
            script = Path(sys.argv[0]).name
            remedy = "install the frameworks with: pip install -e .[frameworks]"
            print(f"{script}: the package {missing.name} is missing; {remedy}", file=sys.stderr)
        raise SystemExit(2) from None


class FrameworkRun(Run):
    """A `Run` that neither loops nor saves. It may be resumed on another number of ranks."""

    best_loss: float | None = None  # the lowest validation loss; set by who trains
    num_samples = 0

    def begin(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        """Begin to train after `step`; every rank calls it, and then `log` once for each step.

        Args:
            step: how many steps the checkpoint has, from which the framework goes on.
        """
        self.step = step
        self.steps_per_epoch = self.num_samples // self.config.batch
        self._status["step"] = step
        self._optimizer = optimizer
        self._asked: tuple[signal.Signals, str] | None = None
        self.stopwatch.watch(model, optimizer)
        together(self._start)
        if step:
            self.world.print(f"resumed {self.folder} at step {step} of {self.config.steps}")

    @property
    def is_last(self) -> bool:
        """Is this the last step, of the run or because a signal has asked some rank to stop?"""
        return self._asked is not None or self.step == self.config.steps

    @property
    def is_due(self) -> bool:
        """Does this step end with a validation and a checkpoint?"""
        return self.is_last or self._is_due

    def newest(self, pattern: str) -> str | None:
        """The checkpoint with the highest number in its name, if there is any."""
        found = on_main(lambda: [*map(str, (self.folder / "checkpoints").glob(pattern))])
        return max(found, key=lambda path: int(re.findall(r"\d+", path)[-1]), default=None)

    def end_if_asked(self) -> None:
        """End on every rank where a signal has asked for it; the framework has saved this step."""
        if self._asked:
            super()._stop(*self._asked)

    def _save(self) -> None:
        """Write how the run stands; the framework has saved the rest, or will."""
        with self._life.ends_on_bad_input():
            on_main(lambda: storage.write_status(self.folder, self._status))

    def _validate(self) -> None:
        """Nothing: the framework's loop validates, and its checkpoints keep the result."""

    def _stop(self, stop_signal: signal.Signals, where: str) -> None:
        """Remember it: the framework first validates and saves."""
        self._asked = stop_signal, where


@contextmanager
def started(config: Config, name: str) -> Iterator[tuple[FrameworkRun, corpus.Corpus, Transformer]]:
    """Join the ranks, load the data, build the model; at the end write the status and the report.

    Yields:
        The run, whose `best_loss` the block sets, the data, and the model, equal on all ranks.
    """
    with distributed(config.device, config.seed) as world:
        data = corpus.load_for(config)
        world.print(data.note)
        vocab_size = data.tokenizer.vocab_size
        run = FrameworkRun(
            config,
            world,
            name,
            num_samples=len(data.train),
            checkpoints=None,
            flops_per_token=flops_per_token(vocab_size, config.block, config.layers),
            floor=data.entropy_floor,
            data_sha256=data.sha256,
            may_differ=["ranks"],  # the frameworks' checkpoints are whole
        )
        run.num_samples = len(data.train)
        model = Transformer(vocab_size, config.block, config.layers).to(world.device)
        yield run, data, model
        run.finish(run.best_loss)
        if world.is_main:
            world.print(f"report: {write_report(run.folder)}")


class SamplerFrom(corpus.ShardedSampler):
    """This rank's samples, from the place in the data that follows from the step."""

    def __init__(self, step: Callable[[], int], run: FrameworkRun) -> None:
        """`step` tells how many steps are done whenever an iteration begins."""
        world = run.world
        super().__init__(run.num_samples, world.rank, world.world_size, run.config.seed)
        self.step = step
        self.steps_per_epoch = run.num_samples // run.config.batch
        self.batch = run.config.batch // world.world_size

    def __iter__(self) -> Iterator[int]:
        self.epoch, done = divmod(self.step(), self.steps_per_epoch)
        order = list(super().__iter__())
        return iter(order[done * self.batch :])


def lightning_ranks(world: World) -> dict[str, object]:
    """Lightning's words for the ranks that are there, and for a Trainer that prints nothing."""
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return {
        "accelerator": "gpu" if world.device.type == "cuda" else "cpu",
        "strategy": "ddp",
        "devices": devices,
        "num_nodes": world.world_size // devices,
        "use_distributed_sampler": False,  # the sampler already takes this rank's share
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
