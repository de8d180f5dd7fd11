"""Train with SGD, AdamW and four layer-wise optimizers, with a small batch and a large one.

bash sbatch/layerwise.sbatch                       on all GPUs of this machine, or 2 CPU ranks
sbatch --array=1-6 sbatch/layerwise.sbatch         a job for each optimizer
python scripts/train_layerwise.py --data mnist --large 4096

Each optimizer is tuned on validation images at each batch size, and judged on the test images. An
optimizer and a batch are a task for one rank. What is done is kept in the run's folder, so a job
that is stopped or killed goes on with the rest. In an array, each job also looks at what the others
have done.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import torch

from manyhands.data import images
from manyhands.first_job.planning import my_share
from manyhands.instruments.figures import png
from manyhands.jobs import mine
from manyhands.large_batch.ties import ranked
from manyhands.layerwise.comparison import Outcome, compared, is_inside, table
from manyhands.layerwise.figures import accuracies_drawn
from manyhands.layerwise.training import Parts, Split, split, ways
from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import World, command_line
from manyhands.training.report import write_report
from manyhands.training.tasks import WAIT_S, Kind, TaskConfig, TaskRun, at_least_one

TINY = {"": "--seeds 2 --small-steps 10 --large-steps 4 --optimizer 1"}
NAMES = list(ways(Parts()))


@dataclass(frozen=True)
class Config(TaskConfig):
    """What to train."""

    optimizer: int = 0
    """Train with this optimizer only, by its place in the list, from 1; 0 takes all."""
    seeds: int = 5
    """Trainings with each optimizer and batch, at the best rate."""
    tuning: int = 2
    """Trainings with each rate that is tried, on seeds of their own."""
    small: int = 32
    """Images in a step with the small batch."""
    large: int = 0
    """Images in a step with the large one; 0 takes all images that there are to train on."""
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
    return 1 - mean, result["images"], f"optimizers tuned and judged; {words}"


KIND = Kind(
    name="layerwise",
    noun="settings",
    identity=(
        "data",
        "optimizer",
        "seeds",
        "tuning",
        "small",
        "large",
        "small_steps",
        "large_steps",
        "seed",
    ),
    key=("optimizer", "batch"),
    loss_name="mean error",
    loss_unit="on the test images",
    result_name="least mean error",
    tell=curve,
)


def main(config: Config) -> dict | None:
    """Train all, and write the report; rank 0 returns the numbers of `result.json`."""
    torch.set_num_threads(1)  # more would only wait for each other: the tasks are small
    return mine.start("layerwise", config, Parts, compare, timeout_s=WAIT_S)


def compare(config: Config, world: World, parts: Parts) -> dict | None:
    data = split(images.load(config.data).to(world.device))
    world.print(data.note)
    tasks = list_tasks(config, len(data.train_inputs))

    def work(name: str, batch: int) -> dict:
        is_small = batch == config.small
        num_steps = config.small_steps if is_small else config.large_steps
        way = ways(parts)[name]
        first = way.first[0 if is_small else 1]
        seeds = range(config.seed, config.seed + config.seeds)
        found = compared(data, way, batch, first, num_steps, config.tuning, seeds)
        trainings = len(found.tried) * config.tuning + config.seeds
        return found._asdict() | {"images": batch * num_steps * trainings}

    with TaskRun(KIND, config, world, tasks, data) as run:
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


def list_tasks(config: Config, num_images: int) -> list[tuple[str, int]]:
    """Optimizer and batch of every task."""
    if not 0 <= config.optimizer <= len(NAMES):
        raise BadInput(f"--optimizer {config.optimizer}: there are {len(NAMES)}; 0 takes them all")
    large = config.large or num_images
    if not 1 <= config.small < large <= num_images:
        raise BadInput(
            f"--small {config.small} --large {large}: the large batch is larger than the small "
            f"one, and the data holds {num_images:,} images"
        )
    at_least_one(config, "small_steps", "large_steps", "tuning")
    if config.seeds < 2:
        raise BadInput(f"--seeds {config.seeds}: take at least 2, to see what chance does")
    names = [NAMES[config.optimizer - 1]] if config.optimizer else NAMES
    return [(name, batch) for batch in (config.small, large) for name in names]


def evaluate(run: TaskRun, data: Split, results: Sequence[dict]) -> dict:
    """On rank 0: for each batch who is better than whom, and who ties; a figure."""
    outcomes: dict[int, dict[str, Outcome]] = {}
    for one in results:
        found = Outcome(*(one[name] for name in Outcome._fields))
        outcomes.setdefault(one["batch"], {})[one["optimizer"]] = found
    outcomes = dict(sorted(outcomes.items()))
    classes = {}
    for batch, found in outcomes.items():
        classes[batch] = ranked({name: one.accuracies for name, one in found.items()})
        for line in table(found, classes[batch]):
            print(f"batch {batch:6,}, {line}")
        assert all(map(is_inside, found.values())), "a best rate at the end of its grid"
    errors = [1 - fmean(one.accuracies) for found in outcomes.values() for one in found.values()]
    run.status["valid_loss"] = round(min(errors), 5)
    numbers = {"data": data.note, "classes": classes}
    numbers["all"] = [[r["optimizer"], r["batch"], r["rate"], r["accuracies"]] for r in results]
    numbers["tried"] = [[r["optimizer"], r["batch"], r["tried"]] for r in results]
    names = list(next(iter(outcomes.values())))
    figure = accuracies_drawn(outcomes)
    (run.folder / "layerwise.png").write_bytes(png(figure))
    print(f"figure: {run.folder / 'layerwise.png'}")
    run.write_result(numbers, leave_out=["optimizer"] if len(names) > 1 else [])
    return numbers


if __name__ == "__main__":
    command_line(main, Config)
