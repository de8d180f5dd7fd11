"""A training run: its folder, its numbers, its checkpoints and its end.

The training loop stays in the script. It talks to a `Run`, which writes one folder:

    runs/ddp-001/config.json             settings, ranks and machines
                 status.json             running, stopped, finished or failed
                 metrics.jsonl           one line a step, by rank 0
                 logs/rank-00000.log     what each rank printed, where that is not a terminal
                 ranks/rank-00000.jsonl  how busy each rank is, twice a second
                 nodes/<host>.jsonl      how busy each node and its GPUs are, by local rank 0
                 checkpoints/step-00000100/state.pt        model and optimizer, by rank 0
                                           rank-00000.pt   random numbers and shards, by each rank
                 model.pt                the final weights, by `save_once`

A checkpoint gets its name when every rank has said that its part is on the disk, so a process
killed at any moment leaves only whole ones. A resumed run goes on bit for bit: weights, optimizer,
random numbers and the place in the data.
Price: one all-reduce of 40 bytes a step, and one wait for the device a step.
"""

import json
import math
import os
import shutil
import signal
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from manyhands.instruments.meters import (
    STEP_PHASES,
    Progress,
    Sampler,
    Stopwatch,
    idle_words,
    job,
    job_before,
    machine,
    memory_bytes,
)
from manyhands.ranks.runtime import (
    STOP_SIGNALS,
    BadInput,
    StopSignals,
    World,
    keep_output,
    together,
)
from manyhands.training import storage

KEPT_CHECKPOINTS = 3


@dataclass(frozen=True)
class TrainConfig:
    """Settings that every training script has."""

    data: str = "embedded"
    """What to train on: embedded, a known name such as wikitext-2, or a folder of text."""
    vocab: int = 0
    """Tokens in the vocabulary; 0 takes the characters of the text."""
    block: int = 64
    """Length of a training sequence in tokens."""
    layers: int = 4
    """Size of the model: its layers, and with them its heads and its width."""
    batch: int = 16
    """Sequences in one step, over all ranks together."""
    steps: int = 300
    """Optimizer steps to take."""
    learning_rate: float = 3e-3
    """Highest learning rate, reached after a tenth of the steps."""
    seed: int = 1
    """Start of every random number."""
    device: str = "auto"
    """Where to train: auto, cpu or cuda."""
    out: str = ""
    """Folder of the run; empty takes the next free one in runs/. An unfinished run goes on."""
    save_every: int = 100
    """Steps from one checkpoint to the next."""


def learning_rate_at(step: int, config: TrainConfig) -> float:
    """Learning rate of step 0, 1, ...: linear warm-up over a tenth, then a cosine down to 10%."""
    warmup = max(1, config.steps // 10)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.steps - 1 - warmup)
    return config.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def save_once(model: nn.Module, path: str | Path, group: dist.ProcessGroup | None = None) -> None:
    """Save the weights of `model`, or of the module it wraps, from rank 0 of `group` only.

    Rank 0 writes the state_dict to a second name first and moves it to `path` with os.replace, so
    that `path` holds the old file or the new one, never half of one. Then rank 0 prints one line
    with the path and the size in bytes. When this returns on any rank, the file is whole. Every
    rank of `group` calls it. Without a process group, the one process is rank 0.
    """
    path = Path(path)
    if not dist.is_initialized() or dist.get_rank(group) == 0:
        partial = path.with_name(path.name + ".partial")
        with open(partial, "wb") as file:
            torch.save(getattr(model, "module", model).state_dict(), file)
        os.replace(partial, path)
        print(f"saved {path} ({path.stat().st_size:,} bytes)")
    if dist.is_initialized():
        dist.barrier(group)


class Run:
    """One training run, from its folder to its last line. Every rank holds one.

    A run that is let go before it has finished or stopped has failed: `status.json` says so as
    soon as nothing holds the Run any more, or when the process ends in the ordinary way.
    """

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        name: str,
        num_samples: int,
        flops_per_token: float = 0.0,
        floor: float | None = None,
        tokens_per_step: int | None = None,
        num_shares: int | None = None,
    ) -> None:
        """Find or make the folder and write `config.json`.

        Args:
            num_samples: sequences in the training data.
            tokens_per_step: over all ranks; `batch * block` where not given.
            flops_per_token: forward and backward, for the report's FLOP/s.
            floor: the lowest loss any model can reach, in nats per token, where it is known.
            num_shares: ranks that share a batch evenly; all ranks where not given.

        Raises:
            BadInput: on every rank, when a setting or the folder cannot be used.
        """
        _check(config, num_shares or world.world_size, num_samples)
        self.config, self.world = config, world
        self.tokens_per_step = tokens_per_step or config.batch * config.block
        self.step = 0
        self.steps_per_epoch = 0
        self.module: nn.Module | None = None
        self.stopwatch = Stopwatch(world.device)
        self._unwritten: str | None = None  # a step's numbers that rank 0 could not write
        self._rng: dict | None = None  # of the checkpoint just loaded
        self._epoch_rng: dict = {}
        self._status = {"state": "running", "step": 0, "steps": config.steps}
        self._status |= {"valid_loss": None, "floor": floor}
        self._end: Callable[[], object] = lambda: None  # until `_start` there is nothing to end
        self._identity = _identity(config, world, name)
        self.folder = self._open_folder(name, flops_per_token)

    # ---- the loop ------------------------------------------------------------------------------

    def resume(
        self, model: nn.Module, optimizer: Optimizer | None, sharded: Collection[str] = ()
    ) -> None:
        """Load the newest checkpoint of this folder, if any, and watch the model from now on.

        Rank 0 has the optimizer whose state is saved; other ranks may have None.

        Args:
            sharded: "model", "optimizer" or both: of these each rank holds and saves its own part.

        Raises:
            BadInput: on every rank, when a checkpoint is there but cannot be used.
        """
        # A reference to the wrapper would keep DDP alive beyond the process group.
        self.module = model if "model" in sharded else getattr(model, "module", model)
        self.optimizer, self.sharded = optimizer, sharded
        self.stopwatch.watch(model, optimizer)
        newest = self._on_main(lambda: storage.newest_checkpoint(self.folder / "checkpoints"))
        if newest is not None:
            self._together(lambda: self._load(newest))
            self.world.print(f"resumed {self.folder} at step {self.step} of {self.config.steps}")

    def epochs(self, loader: DataLoader) -> Iterator[int]:
        """Yield the number of each epoch, from the checkpoint's on, until all steps are done."""
        assert self.module is not None, "call run.resume(model, optimizer) first"
        self.steps_per_epoch = len(loader.dataset) // self.config.batch
        self._together(self._start)
        while self.step < self.config.steps:
            yield self.step // self.steps_per_epoch

    def batches(self, loader: DataLoader) -> Iterator[tuple[Tensor, ...]]:
        """Yield the rest of this epoch's batches on the device, as many on every rank.

        They are empty where `loader` makes empty ones, on a rank that has no samples.
        """
        done = self.step % self.steps_per_epoch
        rng, self._rng = self._rng, None
        if rng:
            storage.set_rng(rng["epoch"] if done else rng["now"], self.world.device)
        self._epoch_rng = storage.get_rng(self.world.device)
        batches = iter(loader)
        for _ in range(done):
            next(batches)
        if rng and done:
            # The iterator has drawn random numbers again; the checkpoint's come after those.
            storage.set_rng(rng["now"], self.world.device)
        for _ in range(min(self.steps_per_epoch - done, self.config.steps - self.step)):
            batch, before = next(batches), self.step
            batch = tuple(part.to(self.world.device, non_blocking=True) for part in batch)
            self.stopwatch.mark("forward" if batch else "other")
            yield batch
            assert self.step == before + 1, "call run.log(loss) once for every batch"

    def set_learning_rate(self, optimizer: Optimizer | None) -> None:
        """Give every parameter group the learning rate of this step."""
        for group in optimizer.param_groups if optimizer else ():
            group["lr"] = learning_rate_at(self.step, self.config)

    def log(self, loss: Tensor | None) -> None:
        """End a step: write its line, save when it is time, stop when a signal asks for it.

        Args:
            loss: scalar, this rank's mean; None on a rank that has no samples. The line holds the
                mean over the ranks that have some.

        Raises:
            BadInput: on every rank, when one of them cannot write.
            SystemExit: with code 0 on every rank, when one of them got SIGTERM or SIGUSR1.
        """
        mean, stop_signal = self._share(loss)
        self.step += 1
        self._status["step"] = self.step
        self.stopwatch.mark("other")
        self._write_line(mean, self.stopwatch.split())
        at_end = self.step == self.config.steps
        if self.step % self.config.save_every == 0 or at_end or stop_signal:
            self.stopwatch.mark("checkpoint")
            self._save()
        if stop_signal and not at_end:
            self._stops.agreed = True
            self._close("stopped")
            again = "" if self.config.out else f" with --out {self.folder}"
            self.world.print(
                f"stopped by {stop_signal.name} at step {self.step}, checkpoint saved; "
                f"run the same command again{again} to go on"
            )
            raise SystemExit(0)
        self.stopwatch.mark("data")

    def finish(
        self,
        valid_loss: float | None = None,
        peak_bytes: dict[str, int] | None = None,
        notes: dict[str, str] | None = None,
    ) -> None:
        """Write down that the run is done.

        Args:
            peak_bytes: what rank 0's tensors took at their peak, by part, where that was counted.
            notes: more rows for the report, by name.

        Raises:
            BadInput: on every rank, when one of them cannot write.
        """
        assert self.step == self.config.steps, "call run.finish() after the last step"
        self._status["valid_loss"] = valid_loss
        if peak_bytes:
            self._status["peak_bytes"] = peak_bytes
        if notes:
            self._status["notes"] = notes
        self._close("finished")
        known = "" if valid_loss is None else f", validation loss {valid_loss:.4f}"
        floor = self._status["floor"]
        limit = "" if floor is None else f" (no model can go below {floor:.4f})"
        self.world.print(f"finished: {self.step} steps{known}{limit}, in {self.folder}")

    # ---- beginning and end ---------------------------------------------------------------------

    def _open_folder(self, name: str, flops_per_token: float) -> Path:
        """Make or accept the folder, with what `config.json` says."""
        about = {
            "format": storage.FORMAT,
            "identity": self._identity,
            "config": asdict(self.config),
            "backend": self.world.backend,
            "torch": torch.__version__,
            "tokens_per_step": self.tokens_per_step,
            "flops_per_token": flops_per_token,
            "loss_name": "loss (nats per token)",
            "floor": self._status["floor"],
            "ranks": self._together(lambda: machine(self.world.device)),
        }

        def make() -> tuple[Path, list[str]]:
            now = job(self.config.out)
            self._about = about | {"job": now}  # written by `_start`: a refused start is no life
            about["job"] = job_before(self.config.out) or now
            words = idle_words(about["ranks"], now["nodes"])
            return storage.open_folder(self.config.out, name, about), words

        folder, words = self._on_main(make)
        for line in words:
            self.world.print(line)
        return folder

    def _start(self) -> None:
        """Begin to train: metrics, progress, samples and stop signals, each with its end."""
        ends = ExitStack()  # nothing in it may hold this Run, or it would never be let go
        if self.world.is_main:
            spent_s = self._open_metrics()
            self._progress = Progress(self.step, self.config.steps)
            storage.write_json(self.folder / "config.json", self._about)
            storage.write_status(self.folder, self._status)
            ends.callback(storage.write_end, self.folder, self._status)  # the last to be called
            ends.callback(self._metrics.close)
            ends.callback(self._progress.bar.close)
            self._start_s = time.time() - spent_s
        keep_output(self.folder / "logs" / f"rank-{self.world.rank:05d}.log")
        self._sampler = Sampler.in_folder(self.folder, self.world)
        ends.callback(self._sampler.stop)
        self._stops = StopSignals()
        ends.callback(self._stops.let_go)
        self._end = weakref.finalize(self, ends.close)
        self.stopwatch.mark("data")

    def _close(self, state: str) -> None:
        """End the run in `state`; BadInput on every rank when that cannot be written."""
        self._status["state"] = state
        self._together(self._end)
        self._together(self._tell_unwritten)

    # ---- what the ranks agree on ---------------------------------------------------------------

    def _share(self, loss: Tensor | None) -> tuple[float, signal.Signals | None]:
        """Mean loss and the signal that some rank got; BadInput when some rank cannot write."""
        unwritten = self._unwritten or self._sampler.error
        flags = [loss is not None, *self._stops.came.values(), unwritten is not None]
        extras = [float(flag) for flag in flags]
        if self.world.world_size == 1:
            numbers = [loss.item(), *extras]
        else:
            mine = torch.tensor([0.0, *extras], dtype=torch.float64, device=self.world.device)
            mine[0] = 0.0 if loss is None else loss.detach()
            dist.all_reduce(mine)  # the sum over the ranks, the same on every rank
            numbers = mine.tolist()
        total, num_losses, *asked, num_failed = numbers
        if num_failed:
            self._together(self._tell_unwritten)
        signals = [number for number, flag in zip(STOP_SIGNALS, asked, strict=True) if flag]
        return total / num_losses, next(iter(signals), None)

    def _tell_unwritten(self) -> None:
        if problem := self._unwritten or self._sampler.error:
            raise BadInput(problem)

    def _together(self, work: Callable[[], object]) -> list:
        """`runtime.together`, which also ends this run where some rank cannot go on."""
        try:
            return together(work)
        except BadInput:
            self._end()
            raise

    def _on_main(self, work: Callable[[], object]) -> object:
        """Run `work` on rank 0; every rank gets its value, or the same BadInput."""
        return self._together(work if self.world.is_main else lambda: None)[0]

    # ---- metrics -------------------------------------------------------------------------------

    def _open_metrics(self) -> float:
        """On rank 0: drop the lines after this step. Returns the seconds trained so far."""
        path = self.folder / "metrics.jsonl"
        lines = [line for line in storage.read_lines(path) if line["step"] <= self.step]
        storage.replace_file(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
        self._metrics = open(path, "ab", buffering=0)
        return lines[-1]["time_s"] if lines else 0.0

    def _write_line(self, loss: float, seconds: dict[str, float]) -> None:
        """On rank 0: write and show the numbers of a step."""
        if not self.world.is_main:
            return
        step_s = sum(seconds[phase] for phase in STEP_PHASES)
        line = {
            "step": self.step,
            "epoch": (self.step - 1) // self.steps_per_epoch,
            "loss": loss if math.isfinite(loss) else None,
            "learning_rate": learning_rate_at(self.step - 1, self.config),
            "tokens_per_s": round(self.tokens_per_step / step_s, 1),
            "step_s": round(step_s, 6),
            **{f"{phase}_s": round(spent_s, 6) for phase, spent_s in seconds.items()},
            "memory_bytes": memory_bytes(self.world.device),
            "time_s": round(time.time() - self._start_s, 3),
        }
        try:
            self._metrics.write((json.dumps(line) + "\n").encode())
        except OSError as problem:
            self._unwritten = f"cannot write {self.folder / 'metrics.jsonl'}: {problem}"
        self._progress.show(self.step, f"loss {loss:.3f}, {line['tokens_per_s']:,.0f} tokens/s")

    # ---- checkpoints ---------------------------------------------------------------------------

    def _save(self) -> None:
        """Write a checkpoint of this step; on every rank it is whole, or BadInput is raised."""
        final = self.folder / "checkpoints" / f"step-{self.step:08d}"
        shared = {"identity": self._identity, "step": self.step}
        own = {"rng": {"epoch": self._epoch_rng, "now": storage.get_rng(self.world.device)}}
        for name, part in (("model", self.module), ("optimizer", self.optimizer)):
            state = storage.local(part.state_dict()) if part else None
            (own if name in self.sharded else shared)[name] = state
        try:
            self._together(lambda: storage.write_checkpoint(final, self.world.rank, shared, own))
        except BadInput:
            if self.world.is_main:
                shutil.rmtree(storage.partial_name(final), ignore_errors=True)
            raise
        self._on_main(lambda: storage.publish(final, KEPT_CHECKPOINTS))
        self._on_main(lambda: storage.write_status(self.folder, self._status))

    def _load(self, checkpoint: Path) -> None:
        """Set model, optimizer, step and random numbers from `checkpoint`."""
        self.step, self._rng = storage.load_checkpoint(
            checkpoint, self.world.rank, self._identity, self.module, self.optimizer
        )
        self._status["step"] = self.step


def _identity(config: TrainConfig, world: World, name: str) -> dict:
    """What has to be equal for a checkpoint to fit; where and how often it is saved has not."""
    settings = asdict(config)
    for free in ("out", "save_every", "device"):
        del settings[free]
    ours = {"job": name, "ranks": world.world_size, "device": world.device.type}
    return {**ours, **settings}


def _check(config: TrainConfig, num_shares: int, num_samples: int) -> None:
    """Refuse settings that no run can have."""
    for name in ("layers", "batch", "steps", "save_every"):
        if getattr(config, name) < 1:
            raise BadInput(f"{name} is {getattr(config, name)}: take at least 1")
    if config.batch % num_shares:
        raise BadInput(
            f"batch {config.batch} cannot be shared evenly by {num_shares} ranks: take a "
            f"multiple of {num_shares}"
        )
    if num_samples < config.batch:
        raise BadInput(
            f"batch {config.batch} but the training data holds only {num_samples} blocks of "
            f"{config.block}: take a smaller --batch or --block, or more data"
        )
    if not (math.isfinite(config.learning_rate) and config.learning_rate > 0):
        raise BadInput(f"learning_rate is {config.learning_rate}: take a number above 0")
