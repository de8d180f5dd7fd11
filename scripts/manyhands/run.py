"""A training run: its folder, its numbers, its checkpoints and its end.

The training loop stays in the script. It talks to a `Run`, which writes one folder:

    runs/ddp-001/config.json             settings, ranks and machines
                 status.json             running, stopped, finished or failed
                 metrics.jsonl           one line a step, by rank 0
                 ranks/rank-00000.jsonl  how busy each rank is, twice a second
                 checkpoints/step-00000100/state.pt        model and optimizer, by rank 0
                                           rank-00000.pt   random numbers, by each rank
                 model.pt                the final weights

A checkpoint is written to `step-00000100.partial` and renamed when every rank has said that its
part is on the disk, so a process killed at any moment leaves only whole ones. A resumed run goes
on bit for bit: weights, optimizer, random numbers and the place in the data.
Price: one all-reduce of 32 bytes a step, and one wait for the device a step.
"""

import json
import math
import os
import pickle
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from tqdm import tqdm

from manyhands.runtime import BadInput, World, first_line

FORMAT = "manyhands run 1"
KEPT_CHECKPOINTS = 3
SAMPLE_EVERY_S = 0.5
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
PHASES = ("data", "forward", "backward", "optimizer", "other")


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
    learning_rate: float = 1e-3
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
    """Save the weights of `model`, or of the module that it wraps, from rank 0 of `group` only.

    When this returns on any rank, the file at `path` is whole. Every rank of `group` must call it.

    Raises:
        BadInput: on every rank, when rank 0 cannot write the file.
    """
    path, error = Path(path), [None]
    if not dist.is_initialized() or dist.get_rank(group) == 0:
        try:
            partial = path.with_name(path.name + ".partial")
            _write_state(getattr(model, "module", model).state_dict(), partial)
            os.replace(partial, path)
        except OSError as problem:
            error = [f"cannot write {path}: {problem}"]
    if dist.is_initialized():
        # No rank gets past this line before rank 0 has written.
        dist.broadcast_object_list(error, group=group, group_src=0)
    if error[0]:
        raise BadInput(error[0])


class Stopwatch:
    """Splits the time of a step into PHASES; on a GPU with events, so that nothing has to wait."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.marks: list[tuple[str, float | torch.cuda.Event]] = []

    def mark(self, phase: str) -> None:
        """Say that `phase` begins now, and that the phase before it has ended."""
        if not self.cuda:
            self.marks.append((phase, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append((phase, event))

    def split(self) -> dict[str, float]:
        """Seconds of each phase since the last split; the last mark only ends the one before."""
        seconds = dict.fromkeys(PHASES, 0.0)
        if self.cuda and self.marks:
            self.marks[-1][1].synchronize()
        for (phase, start), (_, stop) in pairwise(self.marks):
            seconds[phase] += start.elapsed_time(stop) / 1e3 if self.cuda else stop - start
        self.marks.clear()
        return seconds


class Sampler:
    """Writes down how busy this process is, in a thread, until `stop` is called."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self.path, self.device = path, device
        self.error: str | None = None
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True, name="utilisation")
        self.thread.start()

    def stop(self) -> None:
        """Write the last sample and end the thread."""
        self.done.set()
        self.thread.join()

    def _run(self) -> None:
        try:
            with open(self.path, "ab", buffering=0) as file:
                while not self.done.is_set():
                    wall_s, cpu_s = time.perf_counter(), time.process_time()
                    self.done.wait(SAMPLE_EVERY_S)
                    wall_s = max(1e-9, time.perf_counter() - wall_s)
                    sample = {
                        "time_s": round(time.time(), 3),
                        "cpu": round((time.process_time() - cpu_s) / wall_s, 3),
                        "gpu": self._gpu_percent(),
                        "memory_bytes": memory_bytes(self.device),
                    }
                    file.write((json.dumps(sample) + "\n").encode())
        except OSError as problem:
            self.error = f"cannot write {self.path}: {problem}"

    def _gpu_percent(self) -> int | None:
        if self.device.type != "cuda":
            return None
        try:
            return torch.cuda.utilization(self.device)
        except Exception:  # NVML has errors of its own; a GPU cut in parts has no such number
            return None


def memory_bytes(device: torch.device) -> int:
    """Memory in use: resident of the process, or the most that tensors took on the GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return psutil.Process().memory_info().rss


class Run:
    """One training run, from its folder to its last line. Every rank holds one."""

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        name: str,
        tokens_per_step: int | None = None,
        flops_per_token: float = 0.0,
        floor: float | None = None,
    ) -> None:
        """Find or make the folder and write `config.json`.

        Args:
            tokens_per_step: over all ranks; `batch * block` where not given.
            flops_per_token: forward and backward, for the report's FLOP/s.
            floor: the lowest loss any model can reach, in nats per token, where it is known.

        Raises:
            BadInput: on every rank, when a setting or the folder cannot be used.
        """
        _check(config, world)
        self.config, self.world, self.name, self.floor = config, world, name, floor
        self.tokens_per_step = tokens_per_step or config.batch * config.block
        self.step = 0
        self.steps_per_epoch = 0
        self.module: nn.Module | None = None
        self.state = "new"
        self.error: str | None = None  # what this rank could not write, told to all at a step's end
        self.stop_flags = dict.fromkeys(STOP_SIGNALS, 0.0)
        self.stopwatch = Stopwatch(world.device)
        self._rng: dict | None = None  # of the checkpoint just loaded
        self._epoch_rng: dict = {}
        self._old_handlers: dict = {}
        self._sampler: Sampler | None = None
        self._metrics: IO[bytes] | None = None
        self._bar: tqdm | None = None
        about = self._about() | {"flops_per_token": flops_per_token}
        self.folder = Path(self._on_main(lambda: str(self._open_folder(about))))

    # ---- the loop ------------------------------------------------------------------------------

    def resume(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Load the newest checkpoint of this folder, if any, and watch the model from now on.

        Raises:
            BadInput: on every rank, when a checkpoint is there but cannot be used.
        """
        # A reference to the wrapper would keep DDP alive beyond the process group.
        self.module, self.optimizer = getattr(model, "module", model), optimizer
        self.watch(model, optimizer)
        newest = self._on_main(self._newest_checkpoint)
        if newest is not None:
            error = None
            try:
                self._load(Path(newest))
            except BadInput as problem:
                error = str(problem)
            self._raise_together(error)
        self._spent_s = self._on_main(self._open_metrics)
        if newest is not None:
            self.world.print(f"resumed {self.folder} at step {self.step} of {self.config.steps}")

    def watch(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Time forward, backward and optimizer from outside, with hooks."""
        mark = self.stopwatch.mark
        model.register_forward_pre_hook(lambda *_: mark("forward"), prepend=True)
        model.register_forward_hook(lambda *_: mark("backward"))
        if isinstance(optimizer, Optimizer):
            optimizer.register_step_pre_hook(lambda *_: mark("optimizer"))
            optimizer.register_step_post_hook(lambda *_: mark("other"))

    def epochs(self, loader: DataLoader) -> Iterator[int]:
        """Yield the number of each epoch, from the checkpoint's on, until all steps are done."""
        assert self.module is not None, "call run.resume(model=..., optimizer=...) first"
        self.steps_per_epoch = len(loader.dataset) // self.config.batch
        if self.steps_per_epoch == 0:
            raise BadInput(
                f"batch {self.config.batch} but the training data holds only "
                f"{len(loader.dataset)} blocks of {self.config.block}: take a smaller --batch or "
                "--block, or more data"
            )
        self._start()
        try:
            while self.step < self.config.steps:
                yield self.step // self.steps_per_epoch
        finally:
            # An error in the loop's body closes this generator before its time.
            if self.step < self.config.steps:
                self._close("failed")

    def batches(self, loader: DataLoader) -> Iterator[tuple[Tensor, ...]]:
        """Yield the rest of this epoch's batches on the device, as many on every rank."""
        done = self.step % self.steps_per_epoch
        rng, self._rng = self._rng, None
        if rng:
            _set_rng(rng["epoch"] if done else rng["now"], self.world.device)
        self._epoch_rng = _get_rng(self.world.device)
        batches = iter(loader)
        for _ in range(done):
            next(batches)
        if rng and done:
            # The iterator has drawn random numbers again; the checkpoint's come after those.
            _set_rng(rng["now"], self.world.device)
        for _ in range(min(self.steps_per_epoch - done, self.config.steps - self.step)):
            batch, before = next(batches), self.step
            batch = tuple(part.to(self.world.device, non_blocking=True) for part in batch)
            self.stopwatch.mark("forward")
            yield batch
            assert self.step == before + 1, "call run.log(loss) once for every batch"

    def set_learning_rate(self, optimizer: Optimizer) -> None:
        """Give every parameter group the learning rate of this step."""
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(self.step, self.config)

    def log(self, loss: Tensor) -> None:
        """End a step: write its line, save when it is time, stop when a signal asks for it.

        Args:
            loss: scalar, this rank's mean; the line holds the mean over the ranks.

        Raises:
            BadInput: on every rank, when one of them cannot write.
            SystemExit: with code 0 on every rank, when one of them got SIGTERM or SIGUSR1.
        """
        mean, stop_signal, failed = self._share(loss)
        if failed:
            self._raise_together(self.error)
        self.step += 1
        self.stopwatch.mark("other")
        self._write_line(mean, self.stopwatch.split())
        at_end = self.step == self.config.steps
        if self.step % self.config.save_every == 0 or at_end or stop_signal:
            self._save()
        if stop_signal and not at_end:
            self._close("stopped")
            again = "" if self.config.out else f" with --out {self.folder}"
            self.world.print(
                f"stopped by {stop_signal.name} at step {self.step}, checkpoint saved; "
                f"run the same command again{again} to go on"
            )
            raise SystemExit(0)
        self.stopwatch.mark("data")

    def finish(self, valid_loss: float | None = None) -> None:
        """Save the final weights as `model.pt`, and write down how the run ended."""
        save_once(self.module, self.folder / "model.pt")
        self._close("finished", valid_loss)
        known = "" if valid_loss is None else f", validation loss {valid_loss:.4f}"
        floor = "" if self.floor is None else f" (no model can go below {self.floor:.4f})"
        self.world.print(f"finished: {self.step} steps{known}{floor}, in {self.folder}")

    # ---- beginning and end ---------------------------------------------------------------------

    def _identity(self) -> dict:
        """What has to be equal for a checkpoint to fit; where and how often it is saved has not."""
        settings = asdict(self.config)
        for free in ("out", "save_every", "device"):
            del settings[free]
        ours = {"job": self.name, "ranks": self.world.world_size}
        return {**ours, "device": self.world.device.type, **settings}

    def _about(self) -> dict:
        """What `config.json` says; every rank has to call this, to name its machine."""
        return {
            "format": FORMAT,
            "identity": self._identity(),
            "config": asdict(self.config),
            "backend": self.world.backend,
            "torch": torch.__version__,
            "tokens_per_step": self.tokens_per_step,
            "floor": self.floor,
            "ranks": self._gather(_machine(self.world)),
        }

    def _open_folder(self, about: dict) -> Path:
        """On rank 0: make or accept the run's folder, and write `config.json` into it."""
        folder = Path(self.config.out) if self.config.out else _next_free(Path("runs"), self.name)
        if folder.exists() and not folder.is_dir():
            raise BadInput(f"--out {folder} is a file: name a folder")
        if (folder / "config.json").exists():
            self._accept(folder)
        elif folder.exists() and any(p.suffix != ".partial" for p in folder.iterdir()):
            raise BadInput(f"--out {folder} holds files but no run: name a new or empty folder")
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        (folder / "ranks").mkdir(exist_ok=True)
        _write_json(folder / "config.json", about)
        return folder

    def _accept(self, folder: Path) -> None:
        """Check that the run in `folder` is this one, and unfinished."""
        about = read_json(folder / "config.json")
        if about.get("format") != FORMAT:
            raise BadInput(f"--out {folder} holds another kind of run: name a new folder")
        differences = _differences(about.get("identity"), self._identity())
        if differences:
            raise BadInput(
                f"--out {folder} holds a run with {differences}: take its settings, or name a "
                "new folder"
            )
        status = folder / "status.json"
        if status.exists() and read_json(status).get("state") == "finished":
            raise BadInput(
                f"--out {folder} holds a finished run of {self.config.steps} steps: name a new "
                "folder, or delete this one"
            )

    def _start(self) -> None:
        """Begin to train: samples, metrics, progress and stop signals."""
        self.state = "running"
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._old_handlers[number] = signal.signal(number, self._on_signal)
        path = self.folder / "ranks" / f"rank-{self.world.rank:05d}.jsonl"
        self._sampler = Sampler(path, self.world.device)
        if self.world.is_main:
            if sys.stderr.isatty():
                self._bar = tqdm(total=self.config.steps, initial=self.step, unit="step")
            self._write_status()
        self._start_s = time.time() - self._spent_s
        self._first_step = self.step
        self.stopwatch.mark("data")

    def _close(self, state: str, valid_loss: float | None = None) -> None:
        """End the run in `state`; only the first call after the start counts."""
        if self.state != "running":
            return
        self.state = state
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: set by C code, now lost
        if self._sampler is not None:
            self._sampler.stop()
        if self._bar is not None:
            self._bar.close()
        if self.world.is_main:
            if self._metrics is not None:
                self._metrics.close()
            self._write_status(valid_loss)

    def _on_signal(self, number: int, frame: object) -> None:
        self.stop_flags[signal.Signals(number)] = 1.0

    def _write_status(self, valid_loss: float | None = None) -> None:
        status = {"state": self.state, "step": self.step, "steps": self.config.steps}
        status |= {"valid_loss": valid_loss, "floor": self.floor, "time_s": time.time()}
        try:
            _write_json(self.folder / "status.json", status)
        except OSError as problem:
            self.error = f"cannot write {self.folder / 'status.json'}: {problem}"

    # ---- what the ranks agree on ---------------------------------------------------------------

    def _share(self, loss: Tensor) -> tuple[float, signal.Signals | None, bool]:
        """Mean loss, the signal that some rank got, and whether some rank could not write."""
        if self._sampler.error:
            self.error = self._sampler.error
        extras = [*self.stop_flags.values(), float(self.error is not None)]
        if self.world.world_size == 1:
            numbers = [loss.item(), *extras]
        else:
            mine = torch.tensor([0.0, *extras], dtype=torch.float64, device=self.world.device)
            mine[0] = loss.detach()
            dist.all_reduce(mine)  # the sum over the ranks, the same on every rank
            numbers = mine.tolist()
        asked = [number for number, flag in zip(STOP_SIGNALS, numbers[1:], strict=False) if flag]
        return numbers[0] / self.world.world_size, next(iter(asked), None), numbers[-1] > 0

    def _gather(self, value: object) -> list:
        """Every rank's `value`, by rank, on every rank."""
        values = [value] * self.world.world_size
        if self.world.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def _raise_together(self, error: str | None) -> None:
        """Raise BadInput on every rank when one of them has an error."""
        errors = [found for found in self._gather(error) if found]
        if errors:
            self._close("failed")
            raise BadInput(errors[0])

    def _on_main(self, work: Callable[[], object]) -> object:
        """Run `work` on rank 0; every rank gets its value, or the same BadInput."""
        outcome: list = [None, None]
        if self.world.is_main:
            try:
                outcome[0] = work()
            except (BadInput, OSError) as problem:
                outcome[1] = str(problem)
        if self.world.world_size > 1:
            dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            self._close("failed")
            raise BadInput(outcome[1])
        return outcome[0]

    # ---- metrics -------------------------------------------------------------------------------

    def _write_line(self, loss: float, seconds: dict[str, float]) -> None:
        if not self.world.is_main:
            return
        step_s = sum(seconds.values())
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
            self.error = f"cannot write {self.folder / 'metrics.jsonl'}: {problem}"
        self._show(loss, line["tokens_per_s"], line["time_s"])

    def _show(self, loss: float, tokens_per_s: float, time_s: float) -> None:
        """Move the bar on a terminal; print a plain line every tenth of the steps elsewhere."""
        words = f"loss {loss:.3f}, {tokens_per_s:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.set_postfix_str(words, refresh=False)
            self._bar.update()
        elif self.step % max(1, self.config.steps // 10) == 0 or self.step == self.config.steps:
            each_s = (time_s - self._spent_s) / (self.step - self._first_step)
            left_s = each_s * (self.config.steps - self.step)
            place = f"step {self.step} of {self.config.steps}"
            print(f"{place}: {words}, {left_s:.0f} s left", file=sys.stderr, flush=True)

    def _open_metrics(self) -> float:
        """On rank 0: drop the lines after this step. Returns the seconds trained so far."""
        path = self.folder / "metrics.jsonl"
        lines = [line for line in read_lines(path) if line["step"] <= self.step]
        if path.exists():
            _replace(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
        self._metrics = open(path, "ab", buffering=0)
        return lines[-1]["time_s"] if lines else 0.0

    # ---- checkpoints ---------------------------------------------------------------------------

    def _save(self) -> None:
        """Write a checkpoint of this step; on every rank it is whole, or BadInput is raised."""
        final = self.folder / "checkpoints" / f"step-{self.step:08d}"
        partial = final.with_name(final.name + ".partial")
        shared = {"format": FORMAT, "identity": self._identity(), "step": self.step}
        shared |= {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        # What only this rank has goes into its own file; shards of a model would too.
        own = {"rng": {"epoch": self._epoch_rng, "now": _get_rng(self.world.device)}}
        error = None
        try:
            partial.mkdir(exist_ok=True)
            if self.world.is_main:
                _write_state(shared, partial / "state.pt")
            _write_state(own, partial / f"rank-{self.world.rank:05d}.pt")
        except OSError as problem:
            error = f"rank {self.world.rank} cannot write {partial}: {problem}; free some space"
        errors = [found for found in self._gather(error) if found]
        self._on_main(lambda: self._publish(partial, final, errors))

    def _publish(self, partial: Path, final: Path, errors: list[str]) -> None:
        """On rank 0: make a checkpoint count and drop the oldest, or drop what is left of it."""
        if errors:
            shutil.rmtree(partial, ignore_errors=True)
            raise BadInput(f"{errors[0]}. The checkpoints before it are kept")
        _sync_folder(partial)
        os.replace(partial, final)
        _sync_folder(final.parent)
        for old in _checkpoints(self.folder)[:-KEPT_CHECKPOINTS]:
            # Half a checkpoint must not look like a whole one, also while it is being deleted.
            doomed = old.with_name(old.name + ".partial")
            os.replace(old, doomed)
            shutil.rmtree(doomed)
        self._write_status()

    def _newest_checkpoint(self) -> str | None:
        """On rank 0: clear away what a killed process left, and name the newest whole one."""
        for left in (self.folder / "checkpoints").glob("*.partial"):
            shutil.rmtree(left)
        whole = _checkpoints(self.folder)
        return str(whole[-1]) if whole else None

    def _load(self, checkpoint: Path) -> None:
        """Set model, optimizer, step and random numbers from `checkpoint`."""
        shared = _read_state(checkpoint / "state.pt", {"format", "identity", "step", "model"})
        own = _read_state(checkpoint / f"rank-{self.world.rank:05d}.pt", {"rng"})
        remedy = f"delete {checkpoint}, or name a new --out"
        if shared["format"] != FORMAT:
            raise BadInput(f"{checkpoint} has another format ({shared['format']}): {remedy}")
        differences = _differences(shared["identity"], self._identity())
        if differences:
            raise BadInput(f"{checkpoint} was saved with {differences}: {remedy}")
        theirs = {name: list(t.shape) for name, t in shared["model"].items()}
        ours = {name: list(t.shape) for name, t in self.module.state_dict().items()}
        differences = _differences(theirs, ours)
        if differences:
            raise BadInput(f"{checkpoint} holds another model, with {differences}: {remedy}")
        try:
            self.module.load_state_dict(shared["model"])
            self.optimizer.load_state_dict(shared["optimizer"])
        except (ValueError, RuntimeError, KeyError) as problem:
            raise BadInput(f"{checkpoint} does not fit: {first_line(problem)}: {remedy}") from None
        self.step, self._rng = shared["step"], own["rng"]


# ---- helpers that know no run ------------------------------------------------------------------


def _check(config: TrainConfig, world: World) -> None:
    """Refuse settings that no run can have."""
    for name in ("batch", "steps", "save_every"):
        if getattr(config, name) < 1:
            raise BadInput(f"{name} is {getattr(config, name)}: take at least 1")
    if config.batch % world.world_size:
        raise BadInput(
            f"batch {config.batch} cannot be shared evenly by {world.world_size} ranks: take a "
            f"multiple of {world.world_size}"
        )
    if not (math.isfinite(config.learning_rate) and config.learning_rate > 0):
        raise BadInput(f"learning_rate is {config.learning_rate}: take a number above 0")


def _machine(world: World) -> dict:
    """Where this rank lives, and what was granted to it there."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    granted = {"num_gpus": torch.cuda.device_count(), "num_cores": cores}
    return {"host": socket.gethostname(), "device": str(world.device), **granted}


def _next_free(runs: Path, name: str) -> Path:
    """Make and return the first of `name`-001, `name`-002, ... that is not there yet."""
    runs.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        try:
            (runs / f"{name}-{number:03d}").mkdir()
            return runs / f"{name}-{number:03d}"
        except FileExistsError:  # also when another job was quicker
            number += 1


def _differences(theirs: object, ours: dict) -> str:
    """What differs, in words: "layers=4, not 2". Empty when nothing does."""
    if not isinstance(theirs, dict):
        return "settings that cannot be read"
    names = [name for name in {**ours, **theirs} if theirs.get(name) != ours.get(name)]
    words = [f"{name}={theirs.get(name)}, not {ours.get(name)}" for name in names[:3]]
    return "; ".join(words) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    return sorted(p for p in (folder / "checkpoints").glob("step-*") if p.suffix != ".partial")


def read_lines(path: Path) -> list[dict]:
    """The JSON objects of a file, one a line; a half-written last line is left out."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return []
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise BadInput(f"{path}, line {number}, is not JSON: delete that line") from None
    return rows


def read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text())
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise BadInput(f"{path} cannot be read as JSON: name a new folder, or delete this one")
    return value


def _write_json(path: Path, value: dict) -> None:
    _replace(path, (json.dumps(value, indent=2) + "\n").encode())


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that readers see the old or the new one, never half of it."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _write_state(state: dict, path: Path) -> None:
    """Save with torch and wait for the disk; a disk that refuses is an OSError."""
    with open(path, "wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as problem:
            # torch hides the disk's own words behind an error about its zip writer.
            cause = problem.__context__
            raise cause if isinstance(cause, OSError) else OSError(first_line(problem)) from None
        file.flush()
        os.fsync(file.fileno())


def _read_state(path: Path, names: set[str]) -> dict:
    """Load a file of a checkpoint on the CPU; it must hold `names`."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as problem:
        state, reason = None, first_line(problem)
    if not isinstance(state, dict) or not names <= state.keys():
        reason = "it is not a checkpoint of a run" if state is not None else reason
        raise BadInput(
            f"{path} cannot be read ({reason}): delete {path.parent} to go on from the one before"
        )
    return state


def _sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on the disk, not only in the system's memory."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _get_rng(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _set_rng(states: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
