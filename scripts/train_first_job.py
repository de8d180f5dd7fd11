"""Train small networks on more and more images, each rank its own share, and fit a power law.

bash sbatch/first_job.sbatch                 on all GPUs of this machine, or 2 CPU ranks
RANKS=1 bash sbatch/first_job.sbatch         the same work for one rank
python scripts/train_first_job.py --data FOLDER --smallest 100      on MNIST's files

No rank needs anything of another until all are done. Each finished training is a line in the run's
folder, so a job that is stopped or killed goes on with those that are missing.
"""

import json
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

import torch

from manyhands import first_job, images, mine, power_law
from manyhands.figures import measured_and_predicted, new_figure, png
from manyhands.meters import Sampler, idle_words, job, machine
from manyhands.run import STOP_SIGNALS
from manyhands.runtime import (
    BadInput,
    World,
    command_line,
    distributed,
    keep_output,
    on_main,
    together,
)
from manyhands.storage import FORMAT, open_folder, read_lines, replace_file, write_end, write_status
from report import write_report


@dataclass(frozen=True)
class Config:
    """What to train."""

    data: str = "embedded"
    """embedded (8 x 8 digits), or a folder with idx files, such as MNIST's."""
    smallest: int = 20
    """Images in the smallest training; each size is twice the one before."""
    networks: int = 4
    """Networks of each size. They differ in their images and in their first weights."""
    impl: Literal["mine", "scratch"] = "scratch"
    """Whose my_share and fit_power_law: yours (mine/first_job.py) or the course's."""
    seed: int = 1
    """Start of every random number."""
    device: str = "auto"
    """Where to train: auto, cpu or cuda."""
    out: str = ""
    """Folder of the run; empty takes the next free one in runs/. An unfinished run goes on."""


class Parts(NamedTuple):
    """The exercises of lesson 00 that this job can use."""

    my_share: Callable = first_job.my_share
    fit_power_law: Callable = power_law.fit_power_law


class Result(NamedTuple):
    """What one training came to."""

    size: int
    seed: int
    error: float  # share of the test images that were taken for something else


def main(config: Config) -> float:
    """Train all networks, write the report, and return the exponent of the power law."""
    yours = mine.load("first_job", Parts._fields) if config.impl == "mine" else {}
    torch.set_num_threads(1)  # more would only wait for each other: the networks are tiny
    with distributed(config.device, config.seed, timeout_s=600) as world:
        if config.impl == "mine":
            world.print(mine.in_words(yours))
        return train(config, world, Parts(**yours))


def train(config: Config, world: World, parts: Parts) -> float:
    data = images.load(config.data)
    world.print(data.note)
    tasks = list_tasks(config, len(data.train_inputs))
    folder = make_folder(config, world, len(tasks))
    status = {"state": "running", "step": 0, "steps": len(tasks), "valid_loss": None}
    if world.is_main:
        write_status(folder, status)
    keep_output(folder / "logs" / f"rank-{world.rank:05d}.log")
    sampler = Sampler.in_folder(folder, world)
    try:
        results = train_share(folder, data, tasks, world, parts)
        status["step"] = len(results)
        if status["step"] < len(tasks):
            status["state"] = "stopped"
            world.print(
                f"stopped after {len(results)} of {len(tasks)} networks; run the same command "
                f"again with --out {folder} to go on"
            )
            raise SystemExit(0)
        points = zip(*((r.size, r.error) for r in results if r.error), strict=True)
        a, b = parts.fit_power_law(*points)
        tell(world, folder, results, a, b)
        status |= {
            "state": "finished",
            "valid_loss": mean_errors(results)[max(r.size for r in results)],
        }
    finally:
        sampler.stop()
        if world.is_main:
            write_end(folder, status)
    if world.is_main:
        world.print(f"report: {write_report(folder)}")
    return b


def list_tasks(config: Config, num_images: int) -> list[tuple[int, int]]:
    """Size and seed of every training, the smallest first."""
    if not 2 <= config.smallest <= num_images // 2 or config.networks < 1:
        raise BadInput(
            f"--smallest {config.smallest} --networks {config.networks}: take at least 2 and at "
            f"most half of the {num_images:,} images, and at least 1 network"
        )
    sizes = [config.smallest]
    while 2 * sizes[-1] <= num_images:
        sizes.append(2 * sizes[-1])
    return [(size, config.seed + n) for size in sizes for n in range(config.networks)]


def make_folder(config: Config, world: World, num_tasks: int) -> Path:
    """Make or accept the folder of the run, with what `config.json` says."""
    settings = asdict(config)
    identity = {name: settings[name] for name in ("data", "smallest", "networks", "seed")}
    about = {
        "format": FORMAT,
        "identity": {"job": "first_job", **identity},
        "config": settings | {"steps": num_tasks},
        "loss_name": "error (share of images)",
        "backend": world.backend,
        "torch": torch.__version__,
        "floor": None,
        "ranks": together(lambda: machine(world.device)),
        "job": on_main(lambda: job(config.out)),
    }
    folder = on_main(lambda: open_folder(config.out, "first_job", about, ("ranks", "results")))
    for line in idle_words(about["ranks"], about["job"]["nodes"]):
        world.print(line)
    return folder


def train_share(
    folder: Path, data: images.Images, tasks: list, world: World, parts: Parts
) -> list[Result]:
    """Train what is missing, each rank its share; every rank gets the results of all.

    A stop signal ends the share after the training that goes on. So that no rank waits for one
    that has stopped, all meet once, at the end.
    """
    stops: list[int] = []
    old = {number: signal.signal(number, lambda *a: stops.append(a[0])) for number in STOP_SIGNALS}
    found = on_main(lambda: [line for file in results_files(folder) for line in read_lines(file)])
    done = {(line["size"], line["seed"]): Result(**line) for line in found}
    missing = [task for task in tasks if task not in done]
    own, curve = [], Curve(folder) if world.is_main else None
    with open_results(folder, world.rank) as file:
        for size, seed in parts.my_share(missing, world.rank, world.world_size):
            own.append(train_one(data, size, seed, world.device))
            file.write(json.dumps(own[-1]._asdict()).encode() + b"\n")
            if curve:
                curve.add(own[-1])
            if stops:
                break
    everything = together(lambda: ([tuple(result) for result in own], len(stops)))
    for number, handler in old.items():
        signal.signal(number, handler)
    if curve and own:
        curve.add(own[-1])  # the others may have trained more since this rank's last
    done |= {task[:2]: Result(*task) for results, _ in everything for task in results}
    if len(done) < len(tasks) and not any(stopped for _, stopped in everything):
        raise BadInput(
            f"my_share gave {len(tasks) - len(done)} of the {len(tasks)} trainings to no rank"
        )
    return [done[task] for task in tasks if task in done]


def train_one(data: images.Images, size: int, seed: int, device: torch.device) -> Result:
    """Train a network on `size` images that the seed chooses."""
    torch.manual_seed(seed)
    chosen = torch.randperm(len(data.train_inputs))[:size]
    inputs, labels = (part[chosen].to(device) for part in (data.train_inputs, data.train_labels))
    model = power_law.train_on(inputs, labels, data.num_classes)
    test = (data.test_inputs.to(device), data.test_labels.to(device))
    return Result(size, seed, power_law.error_rate(model, *test))


class Curve:
    """On rank 0: a line in metrics.jsonl for each training of its own, counting those of all."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "metrics.jsonl"
        self.before_s = max([line["time_s"] for line in read_lines(self.path)], default=0.0)
        self.start_s = self.last_s = time.time()
        self.count, self.num_images = self._count()

    def add(self, result: Result) -> None:
        now, (count, num_images) = time.time(), self._count()
        if count == self.count:
            return
        spent_s = max(1e-6, now - self.last_s)
        line = {
            "step": count,
            "loss": result.error,
            "step_s": round(spent_s / max(1, count - self.count), 6),
            "images_per_s": round((num_images - self.num_images) / spent_s, 1),
            "time_s": round(self.before_s + now - self.start_s, 3),
        }
        self.last_s, self.count, self.num_images = now, count, num_images
        with open(self.path, "a") as file:
            print(json.dumps(line), file=file)
        print(
            f"{count} networks trained; {result.size} images: error {result.error:.3f}", flush=True
        )

    def _count(self) -> tuple[int, int]:
        """Trainings done by all ranks, and images that they looked at."""
        sizes = [line["size"] for file in results_files(self.folder) for line in read_lines(file)]
        return len(sizes), sum(power_law.BATCH * power_law.num_steps(size) for size in sizes)


def results_files(folder: Path) -> list[Path]:
    return sorted((folder / "results").glob("rank-*.jsonl"))


def open_results(folder: Path, rank: int) -> FileIO:
    """This rank's results, to go on after the last whole line."""
    path = folder / "results" / f"rank-{rank:05d}.jsonl"
    lines = [json.dumps(line).encode() + b"\n" for line in read_lines(path)]
    replace_file(path, b"".join(lines))
    return open(path, "ab", buffering=0)


def mean_errors(results: Iterable[Result]) -> dict[int, float]:
    """Mean error of the networks of each size."""
    by_size: dict[int, list[float]] = {}
    for result in results:
        by_size.setdefault(result.size, []).append(result.error)
    return {size: fmean(errors) for size, errors in sorted(by_size.items())}


def tell(world: World, folder: Path, results: list[Result], a: float, b: float) -> None:
    """Print the table and the law, and draw both into power_law.png."""
    if not world.is_main:
        return
    means = mean_errors(results)
    for size, mean in means.items():
        errors = [result.error for result in results if result.size == size]
        print(f"{size:6,} images: error {mean:.3f} ({min(errors):.3f} to {max(errors):.3f})")
    print(f"error = {a:.3f} * size ** -{b:.3f}")
    figure, ax = new_figure()
    measured = {"error": tuple(zip(*((r.size, r.error) for r in results), strict=True))}
    fitted = {"error": (list(means), [a * size**-b for size in means])}
    measured_and_predicted(ax, measured, fitted, "images to train on", "error (share of images)")
    (folder / "power_law.png").write_bytes(png(figure))


if __name__ == "__main__":
    command_line(main, Config)
