"""A training run: its folder, its numbers, its checkpoints and its end.

The training loop stays in the script. It talks to a `Run`, which writes one folder:

    runs/ddp-001/config.json             settings, ranks and machines
                 status.json             running, stopped, finished or failed       life.py
                 metrics.jsonl           one line a step, by rank 0                 metrics.py
                 valid.jsonl             the validation loss of each checkpoint
                 logs/rank-00000.log     what each rank printed, where that is not a terminal
                 ranks/rank-00000.jsonl  how busy each rank is, twice a second
                 nodes/<host>.jsonl      how busy each node and its GPUs are, by local rank 0
                 checkpoints/step-00000100/rank-00000.pt   this rank's part of the state
                                           index.json      what is where; the commit
                 model.pt                the weights of the best checkpoint, by `save_once`

A checkpoint counts when its index is there, which is written when every rank has said that its part
is on the disk, so a process killed at any moment leaves only whole ones. A resumed run goes on bit
for bit: weights, optimizer, random numbers and the place in the data.
Price: one all-reduce of 48 bytes a step, and one wait for the device a step.
"""

import math
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from manyhands.instruments.meters import (
    Progress,
    Stopwatch,
    idle_words,
    job,
    machine,
    memory_bytes,
)
from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import World, on_main, stop_code, together, wait_for
from manyhands.training import lock, storage
from manyhands.training.life import Life
from manyhands.training.metrics import Metrics
from manyhands.training.random_state import get_rng, set_rng
from manyhands.training.settings import TrainConfig, check_settings
from manyhands.training.storage import unwrapped

VALID_PAUSE_S = 2.0  # between two lines of the validation's progress
Batches = Sequence[tuple[Tensor, ...]] | DataLoader


def save_once(model: nn.Module, path: str | Path, group: dist.ProcessGroup | None = None) -> None:
    """Save the weights of `model`, or of the module it wraps, from rank 0 of `group` only.

    Rank 0 writes the state_dict to a second name first and moves it to `path` with os.replace, so
    that `path` holds the old file or the new one, never half of one. Then rank 0 prints one line
    with the path and the size in bytes. When this returns on any rank, the file is whole. Every
    rank of `group` calls it. Where there is no process group (dist.is_initialized() is False), the
    one process is rank 0.
    """
    path = Path(path)
    if not dist.is_initialized() or dist.get_rank(group) == 0:
        partial = path.with_name(path.name + ".partial")
        with open(partial, "wb") as file:
            torch.save(unwrapped(model).state_dict(), file)
        os.replace(partial, path)
        print(f"saved {path} ({path.stat().st_size:,} bytes)")
    if dist.is_initialized():
        dist.barrier(group)


class Run:
    """One training run, from its folder to its last line. Every rank holds one."""

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        name: str,
        *,
        num_samples: int,
        checkpoints: Callable | None,
        flops_per_token: float = 0.0,
        floor: float | None = None,
        data_sha256: str = "",
        num_shares: int | None = None,
        may_differ: Collection[str] = (),
    ) -> None:
        """Find or make the folder and write `config.json`.

        Args:
            num_samples: sequences in the training data.
            checkpoints: makes what saves and loads, of a folder, the identity and the world; as
                training.checkpoints.ShardedCheckpoints does. None where a framework saves.
            flops_per_token: forward and backward, for the report's FLOP/s.
            floor: the lowest loss any model can reach, in nats per token, where it is known.
            data_sha256: of what is trained on. A run goes on with the same data only, unless
                `config.other_data` says otherwise.
            num_shares: ranks that share a batch evenly; all ranks where not given.
            may_differ: settings with which a checkpoint fits although they are other ones, such as
                "ranks", their number.

        Raises:
            BadInput: on every rank, when a setting or the folder cannot be used.
        """
        check_settings(config, num_shares or world.world_size, num_samples)
        self.config = config
        self.world = world
        self.step = 0
        self.steps_per_epoch = 0
        self.stopwatch = Stopwatch(world.device)
        self._diverged: int | None = None  # the first step whose loss was not finite
        self._measure: Callable | None = None  # set by `keep_best`, with the data it validates on
        self._valid: Batches = ()
        self._rng: dict | None = None  # of the checkpoint just loaded
        self._epoch_rng: dict = {}
        self._status = {"state": "running", "step": 0, "steps": config.steps}
        self._status |= {"valid_loss": None, "floor": floor}
        self._life = Life(world, self._status)
        identity = _identity(config, world, name) | {"data_sha256": data_sha256}
        for setting in may_differ:
            del identity[setting]
        _check_same(together(lambda: data_sha256))
        identity = on_main(lambda: storage.with_data_of(config.out, identity, config.other_data))
        self.folder = self._open_folder(name, identity, flops_per_token, data_sha256)
        if checkpoints is not None:
            self._checkpoints = checkpoints(self.folder / "checkpoints", identity, world)

    # ---- the loop ------------------------------------------------------------------------------

    def resume(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        sharded: Collection[str] = (),
        parts: Callable[[Optimizer | None], dict] | None = None,
    ) -> None:
        """Load the newest checkpoint of this folder, if any, and watch the model from now on.

        Rank 0 has the optimizer whose state is saved; other ranks may have None. A checkpoint that
        cannot be loaded is kept under another name, and the one before it is taken.

        Args:
            sharded: "model", "optimizer" or both: of these each rank holds and saves its own part.
            parts: returns this rank's pieces of the model and of the optimizer, where a checkpoint
                cannot find them by itself; see ShardedCheckpoints.

        Raises:
            BadInput: on every rank, when there are checkpoints but none of them can be used.
        """
        self._optimizer = optimizer
        self._checkpoints.register(model, optimizer, sharded, parts)
        self.stopwatch.watch(model, optimizer)
        try:
            loaded = self._checkpoints.load_newest()
        except BadInput:
            lock.release(self.folder)  # the run has not begun, so nothing else would
            raise
        if loaded is not None:
            self.step, self._rng = loaded
            self._status["step"] = self.step
            self.world.print(f"resumed {self.folder} at step {self.step} of {self.config.steps}")

    def keep_best(self, measure: Callable[[Iterator], float], valid: Batches) -> None:
        """Validate at every checkpoint, and keep the checkpoint with the lowest loss as well.

        Call it after `resume`. A validation changes nothing of the training: it draws no random
        numbers that the training would have drawn.

        Args:
            measure: called on every rank with an iterator over this rank's batches; returns the
                mean loss over the batches of all ranks, the same on every rank.
            valid: this rank's batches of the validation data.
        """
        self._measure = measure
        self._valid = valid
        self._checkpoints.read_losses(self.step)

    def epochs(self, loader: DataLoader) -> Iterator[int]:
        """Yield the number of each epoch, from the checkpoint's on, until all steps are done."""
        assert self._checkpoints.module is not None, "call run.resume(model, optimizer) first"
        self.steps_per_epoch = len(loader.dataset) // self.config.batch
        together(self._start)
        self._validate()  # where the run ended between a checkpoint and its validation
        while self.step < self.config.steps:
            yield self.step // self.steps_per_epoch

    def batches(self, loader: DataLoader) -> Iterator[tuple[Tensor, ...]]:
        """Yield the rest of this epoch's batches on the device, as many on every rank.

        They are empty where `loader` makes empty ones, on a rank that has no samples. A batch
        sampler with a method begin_at(number) is told where to begin; without one, the batches
        that were used before are loaded again and discarded.
        """
        done = self.step % self.steps_per_epoch
        rng = self._rng
        self._rng = None
        if rng:
            set_rng(rng["epoch"] if done else rng["now"], self.world.device)
        self._epoch_rng = get_rng(self.world.device)
        begin_at = getattr(loader.batch_sampler, "begin_at", None)
        if begin_at:
            begin_at(done)
        batches = iter(loader)
        for _ in range(0 if begin_at else done):
            next(batches)
        if rng and done:
            # The iterator has drawn random numbers again; the checkpoint's come after those.
            set_rng(rng["now"], self.world.device)
        for _ in range(min(self.steps_per_epoch - done, self.config.steps - self.step)):
            before = self.step
            batch = self._on_device(next(batches))
            self.stopwatch.mark("forward" if batch else "other")
            yield batch
            assert self.step == before + 1, "call run.log(loss) once for every batch"

    def log(self, loss: Tensor | None) -> None:
        """End a step: write its line, save when it is time, stop when a signal asks for it.

        Args:
            loss: scalar, this rank's mean; None on a rank that has no samples. The line holds the
                mean over the ranks that have some.

        Raises:
            BadInput: on every rank, when one of them cannot write.
            SystemExit: on every rank, when one of them was asked to stop; see `stop_code`.
        """
        mean, stop_signal = self._life.agree(loss)
        self.step += 1
        self._status["step"] = self.step
        self.stopwatch.mark("other")
        self._write_line(mean)
        if not math.isfinite(mean) and self._diverged is None:
            self._diverged = self.step
            remedy = "end it, and take a smaller --learning-rate"
            self.world.print(f"diverged: the loss of step {self.step} is {mean}; {remedy}")
        at_end = self.step == self.config.steps
        if self._is_due or stop_signal:
            self.stopwatch.mark("checkpoint")
            self._save()
        if stop_signal and not at_end:
            self._stop(stop_signal, f"at step {self.step}, checkpoint saved")
        self._validate()
        self.stopwatch.mark("data")

    # ---- validation and test -------------------------------------------------------------------

    @property
    def _is_due(self) -> bool:
        """Does this step end with a checkpoint, and with its validation?"""
        return self.step % self.config.save_every == 0 or self.step == self.config.steps

    def _validate(self) -> None:
        """Measure the validation loss of the checkpoint just saved, where that is still to do."""
        known = self._checkpoints.losses
        if not self._measure or not self.step or not self._is_due or self.step in known:
            return
        rng = get_rng(self.world.device)
        with self.stopwatch.all_as("validation"):  # the model's forwards are no part of a step
            loss = self._measure(self.validation(self._valid))
        set_rng(rng, self.world.device)
        with self._life.ends_on_bad_input():
            self._checkpoints.add_loss(self.step, loss)
        is_best = loss <= min(known.values())
        lowest = ", the lowest so far" if is_best and len(known) > 1 else ""
        self.world.print(f"validation loss after step {self.step}: {loss:.4f}{lowest}")

    def test(self, test: Batches, in_words: Callable[[float], str] = lambda loss: "") -> float:
        """Load the best checkpoint on every rank; returns its loss on the test data.

        Args:
            test: this rank's batches of the test data.
            in_words: says a loss in other units.
        """
        assert self._measure is not None, "call run.keep_best(measure, valid) before the training"
        with self._life.ends_on_bad_input():
            step = self._checkpoints.load_best()
        loss = self._measure(self.validation(test, "test"))
        self._status["valid_loss"] = self._checkpoints.losses[step]
        self._status["test_loss"] = loss
        self._status["test_step"] = step
        self._status["test_words"] = in_words(loss)
        return loss

    def validation(self, loader: Batches, noun: str = "validation") -> Iterator[tuple[Tensor, ...]]:
        """Yield this rank's batches of the validation data, on the device; tells how far it is.

        Ranks may have different numbers of batches, also none. Before each batch of the rank that
        has most, all ranks agree on whether to go on. So a rank that has one batch less, and whose
        model has to communicate, can call it once more afterwards.

        Raises:
            BadInput: on every rank, when one of them cannot write.
            SystemExit: on every rank, when one of them was asked to stop; see `stop_code`.
        """
        start_s = time.perf_counter()
        with self._life.ends_on_bad_input():
            most = max(together(lambda: len(loader)))
        progress = None
        if self.world.is_main:
            progress = Progress(0, most, f"{noun} batch", pause_s=VALID_PAUSE_S)
        batches = iter(loader)
        for number in range(1, most + 1):
            _, stop_signal = self._life.agree()
            if stop_signal:
                saved = f"all {self.step} steps are saved"
                self._stop(stop_signal, f"before {noun} batch {number} of {most}, {saved}")
            batch = next(batches, None)
            if batch is not None:
                yield self._on_device(batch)
            if progress:
                progress.show(number)
        if progress:
            progress.bar.close()
        wait_for(self.world.device)
        spent_s = self._status.get("valid_s", 0.0) + time.perf_counter() - start_s
        self._status["valid_s"] = round(spent_s, 3)

    # ---- the end -------------------------------------------------------------------------------

    @property
    def valid_loss(self) -> float | None:
        """The validation loss of the weights that `test` has loaded, or that `finish` was told."""
        return self._status["valid_loss"]

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
        if valid_loss is not None:
            self._status["valid_loss"] = valid_loss
        if peak_bytes:
            self._status["peak_bytes"] = peak_bytes
        diverged = ""
        if self._diverged is not None:
            diverged = f"the loss was not finite from step {self._diverged} on"
            notes = {**(notes or {}), "diverged": diverged}
        if notes:
            self._status["notes"] = notes
        self._life.close("finished")
        known = ""
        if self.valid_loss is not None and math.isfinite(self.valid_loss):
            known = f", validation loss {self.valid_loss:.4f}"
        floor = self._status["floor"]
        limit = "" if floor is None else f" (no model can go below {floor:.4f})"
        if diverged:
            limit = f", but diverged: {diverged}"
        self.world.print(f"finished: {self.step} steps{known}{limit}, in {self.folder}")
        if "test_loss" in self._status:
            self.world.print(test_words(self._status))

    def _stop(self, stop_signal: signal.Signals, where: str) -> NoReturn:
        """End on every rank, since one of them was asked to."""
        self._life.close("stopped")
        again = "" if self.config.out else f" with --out {self.folder}"
        self.world.print(
            f"stopped by {stop_signal.name} {where}; run the same command again{again} to go on"
        )
        raise SystemExit(stop_code(stop_signal))

    # ---- parts ---------------------------------------------------------------------------------

    def _open_folder(
        self, name: str, identity: dict, flops_per_token: float, data_sha256: str
    ) -> Path:
        """Make or accept the folder, with what `config.json` says."""
        about = {
            "format": storage.FORMAT,
            "identity": identity,
            "data_sha256": data_sha256,  # of this start, where the identity has the first one's
            "config": asdict(self.config),
            "backend": self.world.backend,
            "torch": torch.__version__,
            "tokens_per_step": self.config.batch * self.config.block,
            "flops_per_token": flops_per_token,
            "loss_name": "loss",
            "loss_unit": "nats per token",
            "floor": self._status["floor"],
            "ranks": together(lambda: machine(self.world.device)),
        }

        def make() -> tuple[Path, list[str]]:
            before = storage.job_before(self.config.out)
            now = job(before)
            self._about = about | {"job": now}  # written by `_start`: a refused start is no life
            about["job"] = before or now
            words = [f"idle: {line}" for line in idle_words(about["ranks"], now["nodes"])]
            known = storage.data_before(self.config.out)
            folder = storage.open_folder(self.config.out, name, about)
            if known not in (None, data_sha256) and (folder / "valid.jsonl").exists():
                os.replace(folder / "valid.jsonl", folder / f"valid-{known[:16]}.jsonl")
                words.append(
                    f"the data are others than before: all validation losses in {folder} "
                    "are measured anew"
                )
            return folder, words

        folder, words = on_main(make)
        for line in words:
            self.world.print(line)
        return folder

    def _start(self) -> None:
        """Begin to train: from here on there is something to end."""
        metrics = None
        if self.world.is_main:
            path = self.folder / "metrics.jsonl"
            tokens_per_step = self.config.batch * self.config.block
            metrics = Metrics(path, self.step, self.config.steps, tokens_per_step)
            storage.write_json(self.folder / "config.json", self._about)
        self._metrics = metrics
        self._life.begin(self.folder, metrics)
        self.stopwatch.mark("data")

    def _write_line(self, loss: float) -> None:
        """On rank 0: write and show the numbers of the step that has just ended."""
        seconds = self.stopwatch.split()
        if not self._metrics:
            return
        groups = self._optimizer.param_groups if self._optimizer else [{"lr": None}]
        self._metrics.write(
            step=self.step,
            epoch=(self.step - 1) // self.steps_per_epoch,
            loss=loss,
            learning_rate=groups[0]["lr"],
            seconds=seconds,
            memory_bytes=memory_bytes(self.world.device),
        )

    def _save(self) -> None:
        """Write a checkpoint of this step, or end the run with BadInput on every rank."""
        with self._life.ends_on_bad_input():
            self._checkpoints.save(self.step, self._epoch_rng)
            on_main(lambda: storage.write_status(self.folder, self._status))

    def _on_device(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(part.to(self.world.device, non_blocking=True) for part in batch)


def test_words(status: dict) -> str:
    """What the test came to: "test loss 2.0794 (perplexity 8.00, 3.000 bits per ...), from ..."."""
    other = f" ({status['test_words']})" if status.get("test_words") else ""
    return f"test loss {status['test_loss']:.4f}{other}, from step {status['test_step']}"


def _identity(config: TrainConfig, world: World, name: str) -> dict:
    """What has to be equal for a checkpoint to fit: all that changes the training."""
    settings = asdict(config)
    for free in ("out", "save_every", "device", "valid_tokens", "splits", "other_data"):
        del settings[free]
    ours = {"job": name, "ranks": world.world_size, "device": world.device.type}
    return {**ours, **settings}


def _check_same(hashes: Sequence[str]) -> None:
    """Refuse ranks that have read different data: a file that is not the same on every node."""
    others = [rank for rank, sha256 in enumerate(hashes) if sha256 != hashes[0]]
    if others:
        first, other = hashes[0][:16], hashes[others[0]][:16]
        raise BadInput(
            f"rank {others[0]} has read other data than rank 0, with SHA-256 {other}... and "
            f"{first}...: give every node the same files"
        )
