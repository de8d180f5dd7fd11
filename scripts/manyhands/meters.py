"""Meters of a run: where a step's time goes, how busy a process is, how far the training is.

    step   | data | forward | backward | optimizer | other |     Stopwatch, by marks
    rank   |..........|..........|..........|..........|         Sampler, twice a second

Price: on a GPU one wait for the device a step; a sample is a line of about 90 bytes.
"""

import json
import os
import socket
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.optim import Optimizer
from tqdm import tqdm

SAMPLE_EVERY_S = 0.5
PHASES = ("data", "forward", "backward", "optimizer", "other")


def memory_bytes(device: torch.device) -> int:
    """Memory in use: resident of the process, or the most that tensors took on the GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return psutil.Process().memory_info().rss


def machine(device: torch.device) -> dict:
    """Where this process lives, and what was granted to it there."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    granted = {"num_gpus": torch.cuda.device_count(), "num_cores": cores}
    return {"host": socket.gethostname(), "device": str(device), **granted}


class Stopwatch:
    """Splits the time of a step into PHASES; on a GPU with events, so that nothing has to wait."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.marks: list[tuple[str, float | torch.cuda.Event]] = []

    def watch(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Mark forward, backward and optimizer from outside, with hooks."""
        model.register_forward_pre_hook(lambda *_: self.mark("forward"), prepend=True)
        model.register_forward_hook(lambda *_: self.mark("backward"))
        if isinstance(optimizer, Optimizer):
            optimizer.register_step_pre_hook(lambda *_: self.mark("optimizer"))
            optimizer.register_step_post_hook(lambda *_: self.mark("other"))

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
                    file.write((json.dumps(self._sample()) + "\n").encode())
        except OSError as problem:
            self.error = f"cannot write {self.path}: {problem}"

    def _sample(self) -> dict:
        """Wait for the next sample; `cpu` counts cores, `gpu` is in percent."""
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        self.done.wait(SAMPLE_EVERY_S)
        wall_s = max(1e-9, time.perf_counter() - wall_s)
        return {
            "time_s": round(time.time(), 3),
            "cpu": round((time.process_time() - cpu_s) / wall_s, 3),
            "gpu": self._gpu_percent(),
            "memory_bytes": memory_bytes(self.device),
        }

    def _gpu_percent(self) -> int | None:
        if self.device.type != "cuda":
            return None
        try:
            return torch.cuda.utilization(self.device)
        except Exception:  # NVML has errors of its own; a GPU cut in parts has no such number
            return None


class Progress:
    """A bar on a terminal; elsewhere a plain line every tenth of the steps, on standard error."""

    def __init__(self, first_step: int, steps: int) -> None:
        self.first_step, self.steps, self.start_s = first_step, steps, time.perf_counter()
        # disable=None: no bar where standard error is not a terminal.
        self.bar = tqdm(total=steps, initial=first_step, unit="step", disable=None)

    def show(self, step: int, words: str) -> None:
        """Say that `step` is done, counted from 1, with what is worth knowing of it."""
        self.bar.set_postfix_str(words, refresh=False)
        self.bar.update()
        if self.bar.disable and (step % max(1, self.steps // 10) == 0 or step == self.steps):
            each_s = (time.perf_counter() - self.start_s) / (step - self.first_step)
            left_s = each_s * (self.steps - step)
            place = f"step {step} of {self.steps}"
            print(f"{place}: {words}, {left_s:.0f} s left", file=sys.stderr, flush=True)
