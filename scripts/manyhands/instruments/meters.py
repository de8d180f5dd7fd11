"""Meters of a run: what was granted and what of it is idle, where a step's time goes, how busy a
process and its node are.

    step | data | forward | backward | communication | optimizer | other |   Stopwatch, by marks
    rank |....... twice a second .......|   ranks/rank-00000.jsonl           Sampler
    node |....... twice a second .......|   nodes/<host>.jsonl               of local rank 0

Price: on a GPU one wait for the device a step; a sample is a line of about 90 bytes, and 80 more
for each GPU. `bench.py --only cost` measures both.
"""

import json
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from tqdm import tqdm

from manyhands.instruments.gpus import Gpus, visible_gpus
from manyhands.ranks.runtime import World

SAMPLE_EVERY_S = 0.5
STEP_PHASES = ("data", "forward", "backward", "communication", "optimizer", "other")
PHASES = (*STEP_PHASES, "checkpoint", "validation")  # what follows a step is no part of it
SCONTROL_S = 5.0  # how long Slurm may take to answer

# ---- what was granted --------------------------------------------------------------------------


def memory_bytes(device: torch.device) -> int:
    """Memory in use: resident of the process, or the most that tensors took on the GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return psutil.Process().memory_info().rss


def reset_peaks(device: torch.device) -> None:
    """Let `memory_bytes` of a GPU begin anew with what tensors take now; nothing on a CPU.

    Called when a model has been sharded. Every rank has built the whole of it before, and this
    moment of set-up would otherwise be the peak of the run and hide what sharding saves.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def slurm_environ() -> Mapping[str, str]:
    """The variables of this batch job; none where SLURM_* may be those of another job.

    A JupyterHub session can be a Slurm job. Only launch.sh knows, and sets MANYHANDS_BATCH.
    """
    return os.environ if os.environ.get("MANYHANDS_BATCH") == "1" else {}


def machine(device: torch.device) -> dict:
    """Where this process lives, and what was granted to it there."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = max(1, int(min(cores, quota_of_cores())))
    slurm = slurm_environ()
    gpus = (torch.cuda.device_count(), len(visible_gpus() or ()))
    about = {
        "host": socket.gethostname(),
        "device": str(device),
        "num_gpus": max(*gpus, int(slurm.get("SLURM_GPUS_ON_NODE", 0))),
        "num_cores": min(cores, int(slurm.get("SLURM_CPUS_ON_NODE", cores))),
        "num_threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,  # of the device
    }
    if device.type == "cuda":
        about["memory_bytes"] = torch.cuda.get_device_properties(device).total_memory
        about["name"] = torch.cuda.get_device_name(device)
    return about


def quota_of_cores(root: Path = Path("/")) -> float:
    """How many cores a control group lets this process use; infinite without such a limit.

    A container on a machine of 64 cores sees them all, but may be stopped as soon as it has used so
    much of them in a tenth of a second. Its own group or any above it may say so: in cpu.max, or in
    cpu.cfs_quota_us of version 1. Source: https://docs.kernel.org/admin-guide/cgroup-v2.html.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # no Linux
        return math.inf
    limits = [math.inf]
    for line in lines:
        _, kinds, group = line.split(":", 2)
        if kinds and "cpu" not in kinds.split(","):
            continue
        place = root / "sys/fs/cgroup" / ("cpu" if kinds else "")
        # In a container the path may be that of the host, and the mount its own group.
        for folder in (place, *(place / part for part in above(group))):
            with suppress(OSError, ValueError):  # not there, or "max"
                limits.append(cores_in(folder))
    return min(limits)


def above(group: str) -> Iterator[str]:
    """The paths of a control group and of all above it: "a/b", "a"."""
    parts = [part for part in group.split("/") if part]
    return ("/".join(parts[:end]) for end in range(len(parts), 0, -1))


def cores_in(folder: Path) -> float:
    """The limit that one control group sets; ValueError where it sets none."""
    if (folder / "cpu.max").exists():
        quota, period = map(int, (folder / "cpu.max").read_text().split())
    else:
        quota, period = (
            int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period")
        )
    if quota <= 0 or period <= 0:
        raise ValueError("no limit")
    return quota / period


def job(before: Mapping | None = None) -> dict:
    """What the scheduler says of this job: {"scheduler", "id", "name", "partition", "nodes", ...}.

    What is not known is None. A run that is killed and started again has several lives: "starts_s"
    holds when each began, and "restarts" is how many there were before this one.

    Args:
        before: what this said when the same run was started last.
    """
    slurm = slurm_environ()
    before = before or {}
    found: dict[str, str] = {}
    nodes: list[str] = []
    if slurm:
        found = slurm_record(slurm["SLURM_JOB_ID"])
        nodes = ask_slurm("scontrol", "show", "hostnames", found.get("NodeList", "")).split()
    start_s = time_of(slurm.get("SLURM_JOB_START_TIME") or found.get("StartTime"))
    end_s = time_of(slurm.get("SLURM_JOB_END_TIME"))
    limit_s = end_s - start_s if start_s and end_s else seconds_of(found.get("TimeLimit", ""))
    starts_s = [*before.get("starts_s", []), start_s or time.time()]
    return {
        "scheduler": "slurm" if slurm else "none",
        "id": slurm.get("SLURM_JOB_ID"),
        "name": slurm.get("SLURM_JOB_NAME") or found.get("JobName"),
        "partition": found.get("Partition") or slurm.get("SLURM_JOB_PARTITION"),
        "nodes": nodes or [socket.gethostname()],
        "time_limit_s": limit_s,
        "restarts": max(int(slurm.get("SLURM_RESTART_COUNT", 0)), len(starts_s) - 1),
        "starts_s": starts_s,
    }


def slurm_record(job_id: str) -> dict[str, str]:
    """What Slurm has on record of a job: {"JobState": "RUNNING", ...}; {} without an answer."""
    told = ask_slurm("scontrol", "show", "job", job_id)
    # Where this ID is also that of an array, all jobs of the array are told.
    own = [one for one in told.split("\n\n") if one.startswith(f"JobId={job_id} ")]
    return dict(re.findall(r"(\w+)=(\S+)", own[0] if own else told))


def ask_slurm(*command: str) -> str:
    """What Slurm answers; nothing where it does not, or not in time."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SCONTROL_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def time_of(text: str | None) -> float | None:
    """Slurm's moments, as 1763751000 or 2026-11-21T20:07:00, in seconds; None for other words."""
    if text and text.isdigit():
        return float(text)
    try:
        return datetime.fromisoformat(text or "").timestamp()
    except ValueError:
        return None


def seconds_of(limit: str) -> float | None:
    """Slurm's time limits, as 1-02:30:00, in seconds; None for UNLIMITED and other words."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", limit)
    if not found:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def duration(time_s: float, num_digits: int = 1) -> str:
    """A time as people say it."""
    if time_s < 120:
        return f"{time_s:.{num_digits}f} s"
    minutes = round(time_s / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def scaled(value: float, unit: str) -> str:
    """A number with k, M, G, T or P before its unit."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} P{unit}"


def idle_words(ranks: Sequence[Mapping], nodes: Sequence[str] = ()) -> list[str]:
    """Say which granted devices no rank works on: a line a node, at most 4, then a count.

    Args:
        ranks: what `machine` said on every rank.
        nodes: the nodes of the job, where known.
    """
    hosts = list(dict.fromkeys(rank["host"] for rank in ranks))
    words = [_idle_on(host, [rank for rank in ranks if rank["host"] == host]) for host in hosts]
    short = {host.partition(".")[0] for host in hosts}
    if short & set(nodes):  # the scheduler and the nodes use the same names
        empty = [node for node in nodes if node.partition(".")[0] not in short]
        words += [f"{node} is granted and has no rank: ask for fewer nodes" for node in empty]
    words = [line for line in words if line]
    return words if len(words) <= 4 else [*words[:4], f"{len(words) - 4} more nodes likewise"]


def _idle_on(host: str, ranks: Sequence[Mapping]) -> str:
    """The same for one node; empty where all is in use."""
    granted = max(rank["num_gpus"] for rank in ranks)
    used = len({rank["device"] for rank in ranks if rank["device"].startswith("cuda")})
    if used < granted:
        have = "has" if granted - used == 1 else "have"
        start = f"start {granted} ranks (RANKS={granted})" if used else "train on GPUs"
        return (
            f"{granted - used} of the {granted} GPUs granted on {host} {have} no rank: "
            f"{start} or ask for {used or 'none'}"
        )
    cores = max(rank["num_cores"] for rank in ranks)
    busy = sum(rank.get("num_threads", 1) for rank in ranks)
    if granted or 2 * busy > cores:
        return ""
    have = "has" if cores - busy == 1 else "have"
    return (
        f"{cores - busy} of the {cores} cores granted on {host} {have} no rank: start "
        f"{cores} ranks (RANKS={cores}), give each more threads (OMP_NUM_THREADS) or ask for {busy}"
    )


# ---- the time of a step ------------------------------------------------------------------------


class Stopwatch:
    """Splits the time of a step into PHASES; on a GPU with events, so that nothing has to wait.

    "communication" is what is not hidden behind backward: from this rank's last gradient to the
    optimizer. It is only watched where there are several ranks. Messages on which forward or
    backward themselves wait, such as the gathers of FSDP and the sums of tensor parallelism, are
    not split off: their time counts as forward or backward.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.marks: list[tuple[str, float | torch.cuda.Event]] = []

    def watch(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Mark forward, backward, communication and optimizer from outside, with hooks."""
        model.register_forward_pre_hook(lambda *_: self.mark("forward"), prepend=True)
        model.register_forward_hook(lambda *_: self.mark("backward"))
        if not isinstance(optimizer, Optimizer):
            return
        optimizer.register_step_pre_hook(lambda *_: self.mark("optimizer"))
        optimizer.register_step_post_hook(lambda *_: self.mark("other"))
        if dist.is_initialized() and dist.get_world_size() > 1:
            for param in model.parameters():
                if param.requires_grad:
                    # Not after it is accumulated: a wrapper's own hook may wait there for others.
                    param.register_hook(self._mark_gradient)

    def mark(self, phase: str) -> None:
        """Say that `phase` begins now, and that the phase before it has ended."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((phase, event))
        else:
            self.marks.append((phase, time.perf_counter()))

    @contextmanager
    def all_as(self, phase: str) -> Iterator[None]:
        """Count all that happens inside as `phase`, also what the hooks would mark."""
        self.mark(phase)
        num_marks = len(self.marks)
        yield
        del self.marks[num_marks:]

    def _mark_gradient(self, _: torch.Tensor) -> None:
        """Communication begins with the last gradient: each takes the place of the one before."""
        begun = bool(self.marks) and self.marks[-1][0] == "communication"
        if begun and self.cuda:
            self.marks[-1][1].record()
            return
        if begun:
            self.marks.pop()
        self.mark("communication")

    def split(self) -> dict[str, float]:
        """Seconds of each phase since the last split, which goes on from the last mark."""
        seconds = dict.fromkeys(PHASES, 0.0)
        if self.cuda and self.marks:
            self.marks[-1][1].synchronize()
        for (phase, start), (_, stop) in pairwise(self.marks):
            seconds[phase] += start.elapsed_time(stop) / 1e3 if self.cuda else stop - start
        del self.marks[:-1]
        return seconds


# ---- how busy it all is ------------------------------------------------------------------------


class Sampler:
    """Writes down how busy this process and its node are, in a thread, until `stop` is called."""

    def __init__(
        self,
        path: Path,
        device: torch.device,
        node_path: Path | None = None,
        every_s: float = SAMPLE_EVERY_S,
    ) -> None:
        """Begin to sample.

        Args:
            path: file of the rank; lines are added to it.
            node_path: file of the node; one rank of each node gives it.
        """
        self.path = path
        self.node_path = node_path
        self.device = device
        self.every_s = every_s
        self.error: str | None = None
        self.done = threading.Event()
        needs_gpus = node_path is not None or device.type == "cuda"
        self.gpus = Gpus(machine(device)["num_gpus"] if needs_gpus else 0)
        self.thread = threading.Thread(target=self._run, daemon=True, name="utilisation")
        self.thread.start()

    @classmethod
    def in_folder(cls, folder: Path, world: World) -> "Sampler":
        """Sample into a run's folder; local rank 0 also samples the node."""
        node_path = None
        if world.local_rank == 0:
            (folder / "nodes").mkdir(exist_ok=True)
            node_path = folder / "nodes" / f"{socket.gethostname()}.jsonl"
        return cls(folder / "ranks" / f"rank-{world.rank:05d}.jsonl", world.device, node_path)

    def stop(self) -> None:
        """Write the last sample and end the thread."""
        self.done.set()
        self.thread.join()

    def _run(self) -> None:
        try:
            with ExitStack() as stack:
                paths = [path for path in (self.path, self.node_path) if path is not None]
                files = [stack.enter_context(open(path, "ab", buffering=0)) for path in paths]
                while not self.done.is_set():
                    for file, sample in zip(files, self._samples(), strict=False):
                        file.write((json.dumps(sample) + "\n").encode())
        except OSError as problem:
            self.error = f"cannot write {problem.filename or self.path}: {problem}"

    def _samples(self) -> list[dict]:
        """Wait, then tell of this process and of its node; `cpu` counts cores, `gpu` is percent."""
        wall_s = time.perf_counter()
        own_s = time.process_time()
        all_s = busy_s()
        self.done.wait(self.every_s)
        wall_s = max(1e-9, time.perf_counter() - wall_s)
        now = {"time_s": round(time.time(), 3)}
        rank = now | {
            "cpu": round((time.process_time() - own_s) / wall_s, 3),
            "gpu": None,
            "memory_bytes": memory_bytes(self.device),
        }
        if self.device.type == "cuda":
            rank["gpu"] = self.gpus.sample(self.device.index or 0)["percent"]
        if self.node_path is None:
            return [rank]
        memory = psutil.virtual_memory()
        node = now | {
            "cpu": round((busy_s() - all_s) / wall_s, 3),
            "memory_bytes": memory.total - memory.available,
            "gpus": [self.gpus.sample(index) for index in range(self.gpus.num_granted)],
        }
        return [rank, node]


def busy_s() -> float:
    """Seconds that all programs of this machine have spent on any core."""
    times = psutil.cpu_times()._asdict()
    idle = ("idle", "iowait", "guest", "guest_nice")  # guests are counted under user already
    return sum(spent_s for kind, spent_s in times.items() if kind not in idle)


class Progress:
    """A bar on a terminal; elsewhere a plain line every tenth of the way, on standard error."""

    def __init__(self, first: int, total: int, noun: str = "step", pause_s: float = 0.0) -> None:
        """Begin at `first` of `total` steps, or whatever `noun` calls them.

        Args:
            pause_s: least time between two plain lines, so that what is quick says nothing.
        """
        self.first = first
        self.total = total
        self.noun = noun
        self.pause_s = pause_s
        self.start_s = self.said_s = time.perf_counter()
        # disable=None: no bar where standard error is not a terminal.
        self.bar = tqdm(total=total, initial=first, unit=noun, disable=None)

    def show(self, number: int, words: str = "") -> None:
        """Say that `number` is done, counted from 1, with what is worth knowing of it."""
        self.bar.set_postfix_str(words, refresh=False)
        self.bar.update()
        now_s = time.perf_counter()
        is_due = number % max(1, self.total // 10) == 0 or number == self.total
        if not self.bar.disable or not is_due or now_s - self.said_s < self.pause_s:
            return
        self.said_s = now_s
        left_s = (now_s - self.start_s) / (number - self.first) * (self.total - number)
        told = [words] if words else []
        told.append(f"{left_s:.0f} s left")
        place = f"{self.noun} {number} of {self.total}"
        print(f"{place}: {', '.join(told)}", file=sys.stderr, flush=True)
