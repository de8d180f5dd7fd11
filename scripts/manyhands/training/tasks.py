"""A job of many tasks that need nothing of one another: its folder, its shares, its end.

    tasks -- share(missing, rank, world_size) --> each rank does its own --> a line for each result

    runs/first_job-001/results/rank-00000.jsonl   what rank 0 has done, a line a task
                       and what the folder of any run holds: see run.py

A task is a tuple, its result a dict, which is written down at once. So a job that is stopped or
killed goes on with what is missing, on any number of ranks. Price: one message at the end.
"""

import json
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import torch

from manyhands.data.corpus import fingerprint
from manyhands.instruments.meters import Sampler, idle_words, job, machine
from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import StopSignals, World, on_main, stop_code, together
from manyhands.ranks.streams import keep_output
from manyhands.training.storage import (
    FORMAT,
    job_before,
    open_folder,
    read_json,
    read_lines,
    replace_file,
    with_data_of,
    write_end,
    write_status,
)

WAIT_S = 24 * 3600  # for ranks with longer tasks; of one that is dead the launcher knows at once
Share = Callable[[Sequence[tuple], int, int], Iterable[tuple]]


class Kind(NamedTuple):
    """What a job is called, and what it says of its tasks."""

    name: str
    noun: str  # what the tasks are called
    identity: tuple[str, ...]  # settings that have to be equal for a run to go on
    key: tuple[str, ...]  # names of the parts of a task
    loss_name: str  # what the curve shows
    loss_unit: str
    result_name: str  # what the status of a finished run holds as valid_loss
    tell: Callable[[dict], tuple[float | None, int, str]]  # a result's loss, its images, in words


@dataclass(frozen=True)
class TaskConfig:
    """Settings that every such job has."""

    data: str = "embedded"
    """embedded, mnist, fashion-mnist, or a folder with idx files."""
    seed: int = 1
    """Start of every random number."""
    device: str = "auto"
    """Where to train: auto, cpu or cuda."""
    out: str = ""
    """Folder of the run; empty takes the next free one in runs/. An unfinished run goes on."""


def at_least_one(config: TaskConfig, *names: str) -> None:
    """Refuse settings that count something and are below 1."""
    for name in names:
        if getattr(config, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise BadInput(f"{flag} {getattr(config, name)}: take at least 1")


class TaskRun:
    """The run of such a job, on every rank: `with TaskRun(...) as run: run.do(...)`."""

    def __init__(
        self, kind: Kind, config: TaskConfig, world: World, tasks: Sequence[tuple], data: tuple
    ) -> None:
        """Make or accept the folder, or BadInput; `do` gets the tasks, at once or in parts.

        Args:
            data: what is trained on; a run goes on with tensors equal to those in it.
        """
        self.kind = kind
        self.config = config
        self.world = world
        self.tasks = tasks
        self.folder = self._open_folder(data)
        self.status = {"state": "running", "step": 0, "steps": len(tasks), "valid_loss": None}
        self.done: dict[tuple, dict] = {}  # results by task
        self._add(on_main(lambda: read_results(self.folder)))

    def __enter__(self) -> "TaskRun":
        if self.world.is_main:
            write_status(self.folder, self.status)
        keep_output(self.folder / "logs" / f"rank-{self.world.rank:05d}.log")
        self._sampler = Sampler.in_folder(self.folder, self.world)
        self._stops = StopSignals()
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        self._sampler.stop()
        if kind is None:
            self.status["state"] = "finished"
        if self.world.is_main:
            write_end(self.folder, self.status)
        self._stops.let_go()

    def do(
        self, tasks: Sequence[tuple], work: Callable[..., dict], share: Share | None = None
    ) -> list[dict]:
        """Do what is missing of these tasks; every rank gets the results of all, in their order.

        A stop signal ends the work after the task at hand. All ranks meet once, at the end.

        Args:
            work: called with the parts of a task; returns what it found, as JSON can hold it.
            share: chooses a rank's own tasks. Without it all ranks do each task together, and rank
                0 writes the result.

        Raises:
            SystemExit: on every rank, when a stop signal has left tasks undone; see `stop_code`.
            BadInput: on every rank, when `share` has left some out.
        """
        own = [task for task in tasks if task not in self.done]
        own = share(own, self.world.rank, self.world.world_size) if share else own
        curve = Curve(self.folder, self.kind) if self.world.is_main else None
        results = self._work(own, work, curve, alone=share is not None)
        everything = together(lambda: (results, self._stops.came_first))
        if curve and results:
            curve.add(results[-1], f"{self.kind.noun} done by all ranks")
        self._add(result for found, _ in everything for result in found)
        missing = sum(task not in self.done for task in tasks)
        asked = [number for _, number in everything if number]
        if missing and asked:
            self.status["state"] = "stopped"
            self._stops.agreed = True
            place = f"{self.status['step']} of {len(self.tasks)} {self.kind.noun}"
            again = f"run the same command again with --out {self.folder} to go on"
            self.world.print(f"stopped by {asked[0].name} after {place}; {again}")
            raise SystemExit(stop_code(asked[0]))
        if missing:
            raise BadInput(f"my_share gave {missing} of {len(tasks)} {self.kind.noun} to no rank")
        return [self.done[task] for task in tasks]

    def _work(
        self, own: Iterable[tuple], work: Callable, curve: "Curve | None", alone: bool
    ) -> list[dict]:
        """Do tasks until a stop signal comes; returns the results that this rank wrote down."""
        path = self.folder / "results" / f"rank-{self.world.rank:05d}.jsonl"
        whole = "".join(json.dumps(line) + "\n" for line in read_lines(path))
        replace_file(path, whole.encode())  # without half a line at its end
        results = []
        with open(path, "ab", buffering=0) as file:
            for task in own:
                stops = self._stops.came_first is not None
                if stops if alone else any(together(lambda stops=stops: stops)):
                    break
                line = json.dumps(dict(zip(self.kind.key, task, strict=True)) | work(*task))
                if alone or curve:
                    file.write(line.encode() + b"\n")
                    results.append(json.loads(line))  # the same as when it is read again
                if curve:
                    curve.add(results[-1])
        return results

    def _add(self, results: Iterable[dict]) -> None:
        self.done |= {tuple(one[name] for name in self.kind.key): one for one in results}
        self.status["step"] = sum(task in self.done for task in self.tasks)

    def _open_folder(self, data: tuple) -> Path:
        """Make or accept the folder of the run, with what `config.json` says."""
        settings = asdict(self.config)
        kind = self.kind
        tensors = [part for part in data if isinstance(part, torch.Tensor)]
        sha256 = on_main(lambda: fingerprint(*tensors))
        identity = {name: settings[name] for name in kind.identity} | {"data_sha256": sha256}
        about = {
            "format": FORMAT,
            "identity": {"job": kind.name} | identity,
            "config": settings | {"steps": len(self.tasks)},
            "backend": self.world.backend,
            "torch": torch.__version__,
            "noun": kind.noun,
            "loss_name": kind.loss_name,
            "loss_unit": kind.loss_unit,
            "result_name": kind.result_name,
            "floor": None,
            "ranks": together(lambda: machine(self.world.device)),
            "job": on_main(lambda: job(job_before(settings["out"]))),
        }
        about = json.loads(json.dumps(about))  # tuples become lists, as in a file that is read
        about["identity"] = on_main(lambda: with_data_of(settings["out"], about["identity"], False))
        for line in idle_words(about["ranks"], about["job"]["nodes"]):
            self.world.print(f"idle: {line}")
        inside = ("ranks", "results")
        return on_main(lambda: open_folder(settings["out"], kind.name, about, inside))

    def with_siblings(self, own: Sequence[dict], name: str) -> dict[object, list[dict]]:
        """The results of all jobs of this array that are done, by their setting `name`.

        The folder of number 4 of array 17 is NAME-17_4. Of two jobs that end at the same time at
        least one sees the other: each looks after its own results are written.
        """
        mine = getattr(self.config, name)
        array, bar, number = self.folder.resolve().name.rpartition("_")
        if not (bar and array and number.isdigit()):
            return {mine: list(own)}
        ours = read_json(self.folder / "config.json")["identity"]
        found = {}
        for path in self.folder.resolve().parent.glob(f"{array}_*/config.json"):
            theirs = read_json(path).get("identity", {})
            results = read_results(path.parent)
            if theirs | {name: mine} == ours and len(results) == len(own):
                found[theirs[name]] = results
        return dict(sorted(found.items()))

    def write_result(self, numbers: Mapping[str, object], leave_out: Sequence[str] = ()) -> None:
        """Write `result.json`: the numbers, and the command that makes them again."""
        words = [f"sbatch/{self.kind.name}.sbatch"]
        for one in fields(self.config):
            value = getattr(self.config, one.name)
            if value != one.default and one.name not in ("out", *leave_out):
                values = value if isinstance(value, tuple) else (value,)
                words += ["--" + one.name.replace("_", "-"), *map(str, values)]
        num_ranks = self.world.world_size
        about = {
            "remake": f"RANKS={num_ranks} bash {shlex.join(words)}",
            "date": time.strftime("%Y-%m-%d"),
            "torch": torch.__version__,
            "device": machine(self.world.device).get("name", "CPU"),
            "ranks": num_ranks,
        }
        lines = [f"  {json.dumps(name)}: {json.dumps(v)}" for name, v in (about | numbers).items()]
        text = "{\n" + ",\n".join(lines) + "\n}\n"
        replace_file(self.folder / "result.json", text.encode())


class Curve:
    """On rank 0: a line in metrics.jsonl for each task of its own, counting those of all."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        self.folder = folder
        self.path = folder / "metrics.jsonl"
        self.tell = kind.tell
        self.before_s = max([line["time_s"] for line in read_lines(self.path)], default=0.0)
        self.start_s = self.last_s = time.time()
        self.count, self.num_images = self._count()

    def add(self, result: dict, words: str | None = None) -> None:
        """Count what all have done, and say it of this rank's newest result, or in `words`."""
        now = time.time()
        count, num_images = self._count()
        if count == self.count:
            return
        loss, _, of_result = self.tell(result)
        spent_s = max(1e-6, now - self.last_s)
        line = {
            "step": count,
            **({} if loss is None else {"loss": loss}),
            "step_s": round(spent_s / max(1, count - self.count), 6),
            "images_per_s": round((num_images - self.num_images) / spent_s, 1),
            "time_s": round(self.before_s + now - self.start_s, 3),
        }
        self.last_s = now
        self.count = count
        self.num_images = num_images
        with open(self.path, "a") as file:
            print(json.dumps(line), file=file)
        print(f"{count} {words or of_result}", flush=True)

    def _count(self) -> tuple[int, int]:
        """Tasks done by all ranks, and the images that they looked at."""
        results = read_results(self.folder)
        return len(results), sum(self.tell(result)[1] for result in results)


def read_results(folder: Path) -> list[dict]:
    """The results of all ranks in the folder of a run, as far as they are there."""
    files = sorted((folder / "results").glob("rank-*.jsonl"))
    return [line for file in files for line in read_lines(file)]
