"""Train small networks on more and more images, each rank its own share, and fit a power law.

bash sbatch/first_job.sbatch                 on all GPUs of this machine, or 2 CPU ranks
RANKS=1 bash sbatch/first_job.sbatch         the same work for one rank
python scripts/train_first_job.py --data FOLDER --smallest 100      on MNIST's files

No rank needs anything of another until all are done. Each finished training is a line in the run's
folder, so a job that is stopped or killed goes on with those that are missing.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

import torch

from manyhands.data import images
from manyhands.first_job import planning, power_law
from manyhands.instruments.figures import measured_and_predicted, new_figure, png
from manyhands.jobs import mine
from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import World, command_line
from manyhands.training.report import write_report
from manyhands.training.tasks import WAIT_S, Kind, TaskConfig, TaskRun

TINY = {"": "--smallest 150 --networks 1"}  # its short runs: gpu/jobs.py


@dataclass(frozen=True)
class Config(TaskConfig):
    """What to train."""

    smallest: int = 20
    """Images in the smallest training; each size is twice the one before."""
    networks: int = 4
    """Networks of each size. They differ in their images and in their first weights."""
    impl: Literal["mine", "scratch"] = "scratch"
    """Whose fit_power_law: yours (mine/first_job.py) or the course's."""


class Parts(NamedTuple):
    """The exercise of lesson 00 that this job can use."""

    fit_power_law: Callable = power_law.fit_power_law


def curve(result: Mapping) -> tuple[float, int, str]:
    """The error of a training, the images that it looked at, and words."""
    size = result["size"]
    error = result["error"]
    words = f"networks trained; {size} images: error {error:.3f}"
    return error, power_law.BATCH * power_law.num_steps(size), words


KIND = Kind(
    name="first_job",
    noun="networks",
    identity=("data", "smallest", "networks", "seed"),
    key=("size", "seed"),
    loss_name="error",
    loss_unit="share of images",
    result_name="mean error with most images",
    tell=curve,
)


def main(config: Config) -> float:
    """Train all networks, write the report, and return the exponent of the power law."""
    torch.set_num_threads(1)  # more would only wait for each other: the tasks are small
    return mine.start("first_job", config, Parts, train, timeout_s=WAIT_S)


def train(config: Config, world: World, parts: Parts) -> float:
    data = images.load(config.data).to(world.device)
    world.print(data.note)
    tasks = list_tasks(config, len(data.train_inputs))

    def work(size: int, seed: int) -> dict:
        return {"error": train_one(data, size, seed)}

    with TaskRun(KIND, config, world, tasks, data) as run:
        results = run.do(tasks, work, planning.my_share)
        points = [(one["size"], one["error"]) for one in results]
        a, b = parts.fit_power_law(*zip(*(point for point in points if point[1]), strict=True))
        tell(world, run.folder, points, a, b)
        run.status["valid_loss"] = mean_errors(points)[tasks[-1][0]]
    if world.is_main:
        world.print(f"report: {write_report(run.folder)}")
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


def train_one(data: images.Images, size: int, seed: int) -> float:
    """Train a network on `size` images that the seed chooses; its error on the test images."""
    torch.manual_seed(seed)
    chosen = torch.randperm(len(data.train_inputs))[:size]
    inputs = data.train_inputs[chosen]
    labels = data.train_labels[chosen]
    model = power_law.train_on(inputs, labels, data.num_classes)
    return power_law.error_rate(model, data.test_inputs, data.test_labels)


def mean_errors(points: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Mean error of the networks of each size."""
    by_size: dict[int, list[float]] = {}
    for size, error in points:
        by_size.setdefault(size, []).append(error)
    return {size: fmean(errors) for size, errors in sorted(by_size.items())}


def tell(world: World, folder: Path, points: list[tuple[int, float]], a: float, b: float) -> None:
    """Print the table and the law, and draw both into power_law.png."""
    if not world.is_main:
        return
    means = mean_errors(points)
    for size, mean in means.items():
        errors = [error for other, error in points if other == size]
        print(f"{size:6,} images: error {mean:.3f} ({min(errors):.3f} to {max(errors):.3f})")
    print(f"error = {a:.3f} * size ** -{b:.3f}")
    figure, ax = new_figure()
    measured = {"error": tuple(zip(*points, strict=True))}
    fitted = {"error": (list(means), [a * size**-b for size in means])}
    measured_and_predicted(ax, measured, fitted, "images to train on", "error (share of images)")
    (folder / "power_law.png").write_bytes(png(figure))


if __name__ == "__main__":
    command_line(main, Config)
