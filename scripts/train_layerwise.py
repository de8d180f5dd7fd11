"""Train with SGD, AdamW and four layer-wise optimizers, with a small batch and a large one.

bash sbatch/layerwise.sbatch                       on all GPUs of this machine, or 2 CPU ranks
sbatch --array=1-6 sbatch/layerwise.sbatch         a job for each optimizer
python scripts/train_layerwise.py --data mnist --large 16384 --seeds 3

Each optimizer gets its own best rate out of a grid, at each batch size. An optimizer, a batch and a
rate are a task for one rank. What is done is kept in the run's folder, so a job that is stopped or
killed goes on with the rest. In an array, each job also looks at what the others have done.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import torch

from manyhands.data import images
from manyhands.first_job.planning import my_share
from manyhands.instruments.figures import bars, new_figure, png
from manyhands.jobs import mine
from manyhands.large_batch.ties import ranked
from manyhands.layerwise.training import Parts, train, ways
from manyhands.ranks.runtime import BadInput, World, command_line
from manyhands.training.report import write_report
from manyhands.training.tasks import WAIT_S, Kind, TaskConfig, TaskRun, at_least_one

NAMES = list(ways(Parts()))


@dataclass(frozen=True)
class Config(TaskConfig):
    """What to train."""

    optimizer: int = 0
    """Train with this optimizer only, by its place in the list, from 1; 0 takes all."""
    seeds: int = 3
    """Trainings with each optimizer, batch and rate."""
    small: int = 32
    """Images in a step with the small batch."""
    large: int = 0
    """Images in a step with the large one; 0 takes all images that there are."""
    small_steps: int = 320
    """Steps with the small batch."""
    large_steps: int = 40
    """Steps with the large one."""
    impl: Literal["mine", "scratch"] = "scratch"
    """Whose LARS, LARC, LAMB and NovoGrad: yours (mine/layerwise.py) or the course's."""


def curve(result: Mapping) -> tuple[float | None, int, str]:
    """The error of a task, the images that it looked at, and words."""
    mean = fmean(result["accuracies"])
    words = f"{result['optimizer']}, batch {result['batch']}, rate {result['rate']:g}: {mean:.1%}"
    return 1 - mean, result["images"], f"settings tried; {words}"


KIND = Kind(
    name="layerwise",
    noun="settings",
    identity=("data", "optimizer", "seeds", "small", "large", "small_steps", "large_steps", "seed"),
    key=("optimizer", "batch", "rate"),
    loss_name="mean error (on the test images)",
    result_name="least mean error",
    tell=curve,
)


def main(config: Config) -> dict | None:
    """Train all, and write the report; rank 0 returns the numbers of `result.json`."""
    torch.set_num_threads(1)  # more would only wait for each other: the tasks are small
    return mine.start("layerwise", config, Parts, compare, timeout_s=WAIT_S)


def compare(config: Config, world: World, parts: Parts) -> dict | None:
    data = images.load(config.data).to(world.device)
    world.print(data.note)
    tasks = list_tasks(config, len(data.train_inputs))

    def work(name: str, batch: int, rate: float) -> dict:
        num_steps = config.small_steps if batch == config.small else config.large_steps
        way = ways(parts)[name]
        seeds = range(config.seed, config.seed + config.seeds)
        found = [train(data, way, batch, rate, num_steps, seed) for seed in seeds]
        return {"accuracies": found, "images": batch * num_steps * config.seeds}

    with TaskRun(KIND, config, world, tasks) as run:
        results = run.do(tasks, work, my_share)
        numbers = None
        if world.is_main:
            if config.optimizer:
                found = run.with_siblings(results, "optimizer")
                print(f"{len(found)} of {len(NAMES)} optimizers are done", flush=True)
                results = [result for results in found.values() for result in results]
            numbers = evaluate(run, data, results)
    if world.is_main:
        world.print(f"report: {write_report(run.folder)}")
    return numbers


def list_tasks(config: Config, num_images: int) -> list[tuple[str, int, float]]:
    """Optimizer, batch and rate of every task."""
    if not 0 <= config.optimizer <= len(NAMES):
        raise BadInput(f"--optimizer {config.optimizer}: there are {len(NAMES)}; 0 takes them all")
    large = config.large or num_images
    if not 1 <= config.small < large <= num_images:
        raise BadInput(
            f"--small {config.small} --large {large}: the large batch is larger than the small "
            f"one, and the data holds {num_images:,} images"
        )
    at_least_one(config, "small_steps", "large_steps")
    if config.seeds < 2:
        raise BadInput(f"--seeds {config.seeds}: take at least 2, to see what chance does")
    names = [NAMES[config.optimizer - 1]] if config.optimizer else NAMES
    rates = {name: way.rates for name, way in ways(Parts()).items()}
    return [(n, batch, rate) for n in names for batch in (config.small, large) for rate in rates[n]]


def evaluate(run: TaskRun, data: images.Images, results: Sequence[dict]) -> dict:
    """On rank 0: the best rate of each optimizer and batch; who ties with whom; a figure."""
    best: dict[int, dict[str, dict]] = {}
    for one in results:
        of_batch = best.setdefault(one["batch"], {})
        old = of_batch.get(one["optimizer"])
        if old is None or fmean(one["accuracies"]) > fmean(old["accuracies"]):
            of_batch[one["optimizer"]] = one
    classes = {}
    for batch, found in sorted(best.items()):
        values = {name: one["accuracies"] for name, one in found.items()}
        classes[batch] = ranked(values)
        for number, group in enumerate(classes[batch], 1):
            for name in group:
                print(f"batch {batch:6,}, rank {number}: {words(found[name])}")
    errors = [1 - fmean(one["accuracies"]) for found in best.values() for one in found.values()]
    run.status["valid_loss"] = round(min(errors), 5)
    numbers = {"data": data.note, "classes": classes}
    numbers["all"] = [[r["optimizer"], r["batch"], r["rate"], r["accuracies"]] for r in results]
    figure, ax = new_figure(8, 3.4)
    names = list(next(iter(best.values())))
    groups = {
        f"batch {batch:,}": [100 * fmean(found[name]["accuracies"]) for name in names]
        for batch, found in sorted(best.items())
    }
    bars(ax, groups, names, "accuracy (%)")
    (run.folder / "layerwise.png").write_bytes(png(figure))
    print(f"figure: {run.folder / 'layerwise.png'}")
    run.write_result(numbers, leave_out=["optimizer"] if len(names) > 1 else [])
    return numbers


def words(best: Mapping) -> str:
    """An optimizer's accuracy at its best rate, with the range of its seeds."""
    values = best["accuracies"]
    spread = f"{fmean(values):.1%} ({min(values):.1%} to {max(values):.1%})"
    return f"{best['optimizer']:9} {spread} at rate {best['rate']:g}"


if __name__ == "__main__":
    command_line(main, Config)
