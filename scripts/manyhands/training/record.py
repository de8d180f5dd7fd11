"""What a run's folder says: who was granted what, who was busy when, and what it cost.

    config.json   status.json   metrics.jsonl, valid.jsonl   ranks/*.jsonl   nodes/*.jsonl
         '-------------'--------------|--------------'--------------'
                                   Record --> lives, devices, Bill

A folder may hold only some of it: a run that has just begun, that was killed, or an older one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median

from manyhands.instruments.meters import SAMPLE_EVERY_S
from manyhands.ranks.failures import BadInput
from manyhands.training.process import why_gone
from manyhands.training.storage import FORMAT, read_json, read_lines

GAP_S = 5.0  # without any sample for longer than this, nothing was running

Series = list[tuple[float, float]]  # (time_s, value), by time
Span = tuple[float, float]  # (begin_s, end_s)


@dataclass(frozen=True)
class Device:
    """Something that was granted and can be busy: a GPU, the cores of a rank, cores of nobody."""

    host: str
    name: str
    rank: int | None  # who worked on it
    busy: Series  # from 0 to 1
    memory: Series  # bytes
    full_bytes: float  # its memory; 0 where not known
    num_cores: int = 0  # 0 for a GPU

    @property
    def is_gpu(self) -> bool:
        return self.num_cores == 0


@dataclass(frozen=True)
class Bill:
    """Device-hours: of GPUs, or of cores where no GPU was granted."""

    unit: str
    num_granted: int
    charged_h: float
    busy_h: float | None  # None where nothing was measured
    energy_kwh: float | None  # of the GPUs that told their power
    num_told: int


@dataclass(frozen=True)
class Record:
    """What a run's folder says."""

    about: dict  # config.json
    status: dict  # status.json, empty before the first step
    steps: list[dict]  # metrics.jsonl
    samples: list[list[dict]]  # of every rank
    nodes: dict[str, list[dict]]  # samples of every node, by host
    valid: Series  # validation loss of each checkpoint, by step

    @property
    def job(self) -> dict:
        """What the scheduler said; empty in older runs."""
        return self.about.get("job") or {}

    @property
    def ranks(self) -> list[dict]:
        """What `meters.machine` said on every rank."""
        return self.about["ranks"]

    @cached_property
    def why_gone(self) -> str | None:
        """Of a run that counts as running: why it is not; "" where it is, None where unknown."""
        if self.status.get("state") != "running":
            return ""
        return why_gone(self.status.get("process", {}), self.job)

    @cached_property
    def hosts(self) -> list[str]:
        """The nodes that have ranks."""
        return list(dict.fromkeys(rank["host"] for rank in self.ranks))

    @property
    def unit(self) -> str | None:
        """What the speed counts: tokens or images. None where there is no speed."""
        names = (name for name in (self.steps or [{}])[-1] if name.endswith("_per_s"))
        return next((name.removesuffix("_per_s") for name in names), None)

    def column(self, name: str) -> Series:
        """One quantity of metrics.jsonl over the steps that have it: (step, value)."""
        found = ((line["step"], line.get(name)) for line in self.steps)
        return [(step, value) for step, value in found if value is not None]

    def speed(self) -> float | None:
        """Median speed; the first tenth of the steps warms up and is left out."""
        speeds = [value for _, value in self.column(f"{self.unit}_per_s")]
        return median(speeds[len(speeds) // 10 :]) if speeds else None

    @cached_property
    def lives(self) -> list[Span]:
        """When something of this run was running, from first to last sample of each life."""
        times_s = sorted(row["time_s"] for rows in self._all_samples() for row in rows)
        starts_s = self.job.get("starts_s", [])
        spans: list[Span] = []
        for time_s in times_s:
            last_s = spans[-1][1] if spans else 0.0
            is_new = any(last_s < start_s <= time_s for start_s in starts_s)
            if time_s - last_s > GAP_S or is_new:
                spans.append((max(last_s, time_s - SAMPLE_EVERY_S), time_s))
            else:
                spans[-1] = (spans[-1][0], time_s)
        return spans

    @cached_property
    def paid(self) -> list[Span]:
        """The lives, each with the time until its first sample, when programs start."""
        ends_s = [end_s for _, end_s in self.lives]
        if ends_s and self.status.get("state") != "running":
            ends_s[-1] = max(ends_s[-1], self.status.get("time_s", 0.0))
        spans = []
        before_s = 0.0
        for (first_s, _), end_s in zip(self.lives, ends_s, strict=True):
            starts_s = [s for s in self.job.get("starts_s", []) if before_s <= s <= first_s]
            spans.append((min([first_s, *starts_s]), end_s))
            before_s = end_s
        return spans

    def granted(self, host: str, what: str) -> int:
        """`num_gpus` or `num_cores` that a node was granted."""
        return max(rank.get(what, 0) for rank in self.ranks if rank["host"] == host)

    @cached_property
    def devices(self) -> list[Device]:
        """Every granted device, node by node."""
        return [device for host in self.hosts for device in self._devices_of(host)]

    @cached_property
    def bill(self) -> Bill:
        """What was charged and what of it was busy."""
        gpus = sum(self.granted(host, "num_gpus") for host in self.hosts)
        granted = gpus or sum(self.granted(host, "num_cores") for host in self.hosts)
        charged_h = granted * sum(end_s - begin_s for begin_s, end_s in self.paid) / 3600
        devices = [device for device in self.devices if device.is_gpu == bool(gpus)]
        busy_s = [
            integral(device.busy, self.lives) * (device.num_cores or 1)
            for device in devices
            if device.busy
        ]
        watts = [power for host in self.nodes for power in self._gpu_series(host, "power_w")]
        told_ws = [integral(power, self.lives) for power in watts if power]
        return Bill(
            unit="GPU" if gpus else "core",
            num_granted=granted,
            charged_h=charged_h,
            busy_h=sum(busy_s) / 3600 if busy_s else None,
            energy_kwh=sum(told_ws) / 3.6e6 if told_ws else None,
            num_told=len(told_ws),
        )

    # ---- parts ---------------------------------------------------------------------------------

    def _all_samples(self) -> Iterator[list[dict]]:
        yield from self.samples
        yield from self.nodes.values()

    def _gpu_series(self, host: str, name: str, scale: float = 1.0) -> list[Series]:
        """One quantity of each granted GPU of a node."""
        rows = self.nodes.get(host, [])
        count = max((len(row.get("gpus", [])) for row in rows), default=0)
        series: list[Series] = [[] for _ in range(count)]
        for row in rows:
            for index, gpu in enumerate(row.get("gpus", [])):
                if gpu.get(name) is not None:
                    series[index].append((row["time_s"], gpu[name] * scale))
        return series

    def _devices_of(self, host: str) -> Iterator[Device]:
        """A node's GPUs, then the ranks on its cores, then cores of nobody."""
        ranks = {n: rank for n, rank in enumerate(self.ranks) if rank["host"] == host}
        num_gpus = self.granted(host, "num_gpus")
        busy = self._gpu_series(host, "percent", 0.01)
        memory = self._gpu_series(host, "memory_bytes")
        for index in range(num_gpus):
            owner = next((n for n, r in ranks.items() if r["device"] == f"cuda:{index}"), None)
            own = self.samples[owner] if owner is not None else []
            told = [sample for sample in own if sample["gpu"] is not None]
            yield Device(
                host,
                f"GPU {index}",
                owner,
                earlier([(s["time_s"], s["gpu"] / 100) for s in told], busy, index),
                earlier([(s["time_s"], s["memory_bytes"]) for s in own], memory, index),
                ranks[owner].get("memory_bytes", 0) if owner is not None else 0,
            )
        on_cores = {n: rank for n, rank in ranks.items() if not rank["device"].startswith("cuda")}
        for n, rank in on_cores.items():
            threads = rank.get("num_threads", 1)
            rows = self.samples[n]
            share = [(s["time_s"], s["cpu"] / threads) for s in rows]
            used = [(s["time_s"], s["memory_bytes"]) for s in rows]
            total = rank.get("memory_bytes", 0)
            yield Device(host, f"rank {n}", n, share, used, total, threads)
        spare = self.granted(host, "num_cores") - sum(
            rank.get("num_threads", 1) for rank in on_cores.values()
        )
        if spare > 0 and not num_gpus:
            yield Device(host, f"{spare} core{'s' if spare > 1 else ''}", None, [], [], 0, spare)


def read(folder: Path) -> Record:
    """Read what is there of a run, finished or not.

    Raises:
        BadInput: `folder` is not the folder of a run.
    """
    if not folder.is_dir():
        raise BadInput(
            f"there is no folder {folder}: name the folder of a run, such as runs/ddp-001"
        )
    if not (folder / "config.json").exists():
        raise BadInput(f"{folder} holds no config.json: name the folder of a run")
    about = read_json(folder / "config.json")
    if about.get("format") != FORMAT:
        raise BadInput(f"{folder} is not the folder of a run of this version ({FORMAT})")
    status = folder / "status.json"
    ranks = [folder / "ranks" / f"rank-{rank:05d}.jsonl" for rank in range(len(about["ranks"]))]
    nodes = sorted((folder / "nodes").glob("*.jsonl"))
    validated = read_lines(folder / "valid.jsonl")
    return Record(
        about=about,
        status=read_json(status) if status.exists() else {},
        steps=read_lines(folder / "metrics.jsonl"),
        samples=[read_lines(path) for path in ranks],
        nodes={path.stem: by_time(read_lines(path)) for path in nodes},
        valid=[
            (line["step"], line["valid_loss"])
            for line in validated
            if line["valid_loss"] is not None
        ],
    )


def by_time(rows: Iterable[dict]) -> list[dict]:
    """Samples in order: several processes may write into one node's file."""
    return sorted(rows, key=lambda row: row["time_s"])


def earlier(rank: Series, nodes: Sequence[Series], index: int) -> Series:
    """What a node saw of GPU `index`, and before that what the rank itself saw of its own.

    A run that goes on may have been on other nodes in the lives before.
    """
    node = nodes[index] if index < len(nodes) else []
    first_s = node[0][0] if node else float("inf")
    return [pair for pair in rank if pair[0] < first_s - SAMPLE_EVERY_S] + node


def split(series: Series, lives: Sequence[Span]) -> list[Series]:
    """The part of a series in each life."""
    parts = []
    place = 0
    for _, end_s in lives:
        stop = place
        while stop < len(series) and series[stop][0] <= end_s:
            stop += 1
        parts.append(series[place:stop])
        place = stop
    return parts


def integral(series: Series, lives: Sequence[Span]) -> float:
    """Sum of value times seconds. A sample tells of the time since the one before it."""
    total = 0.0
    for part in split(series, lives):
        if part:
            total += part[0][1] * SAMPLE_EVERY_S
        total += sum(value * (time_s - last_s) for (last_s, _), (time_s, value) in pairwise(part))
    return total


def mean_busy(device: Device, paid: Sequence[Span]) -> float:
    """Share of the time that was granted in which a device worked."""
    whole_s = sum(end_s - begin_s for begin_s, end_s in paid)
    return integral(device.busy, paid) / whole_s if whole_s else 0.0


def loss_words(record: Record) -> tuple[str, str]:
    """What the loss is called and its unit: "loss", "nats per token"."""
    return record.about.get("loss_name", "loss"), record.about.get("loss_unit", "")


def noun(record: Record) -> str:
    """What the run counts: steps, or tasks by their name."""
    return record.about.get("noun", "steps")


def scheduler_words(job: Mapping) -> str:
    """The scheduler's name of the job: "ddp, Slurm job 17, partition gpu"; empty without one."""
    if job.get("scheduler") != "slurm":
        return ""
    where = f", partition {job['partition']}" if job.get("partition") else ""
    return f"{job.get('name')}, Slurm job {job.get('id')}{where}"
