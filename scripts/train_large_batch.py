"""Train with a large batch and one remedy after another: which of them reaches the target?

bash sbatch/large_batch.sbatch                      on all GPUs of this machine, or 2 CPU ranks
sbatch --array=1-14 sbatch/large_batch.sbatch       a job for each remedy
python scripts/train_large_batch.py --data mnist --small 32 --large 1024 --seeds 5

Each pair of a remedy and a seed is a task for one rank. What is done is kept in the run's folder,
so a job that is stopped or killed goes on with the rest. In an array, each job also looks at what
the others have done; the last one ranks all remedies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import torch

from manyhands.data import images
from manyhands.first_job.planning import my_share
from manyhands.instruments.figures import png, remedies_compared
from manyhands.jobs import mine
from manyhands.large_batch.remedies import REMEDIES, Outcome, Parts, Task, train
from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import World, command_line
from manyhands.training.report import write_report
from manyhands.training.tasks import WAIT_S, Kind, TaskConfig, TaskRun, at_least_one

TINY = {"": "--seeds 2 --epochs 1 --remedy 1"}  # its short runs: gpu/jobs.py
NAMES = list(REMEDIES)


@dataclass(frozen=True)
class Config(TaskConfig):
    """What to train."""

    remedy: int = 0
    """Train with this remedy only, by its place in the list, from 1; 0 takes all."""
    seeds: int = 3
    """Trainings with each remedy. They differ in their first weights and their batches."""
    small: int = 16
    """Images in a step of the reference."""
    large: int = 256
    """Images in a step of the others."""
    rate: float = 0.4
    """Learning rate of the reference."""
    epochs: int = 12
    """The budget: how often each image is seen."""
    target: float = 0.95
    """Accuracy on the test images that ends the count of steps."""
    impl: Literal["mine", "scratch"] = "scratch"
    """Whose rates, noise, norm and ranking: yours (mine/large_batch.py) or the course's."""


def curve(result: Mapping) -> tuple[float | None, int, str]:
    """The error of a task, the images that it looked at, and words."""
    error = 1 - result["accuracy"]
    words = f"{result['accuracy']:.1%} of the test images"
    return error, result["budget"], f"trainings; {result['name']}, seed {result['seed']}: {words}"


KIND = Kind(
    name="large_batch",
    noun="trainings",
    identity=("data", "remedy", "seeds", "small", "large", "rate", "epochs", "target", "seed"),
    key=("name", "seed"),
    loss_name="error",
    loss_unit="on the test images",
    result_name="least mean error",
    tell=curve,
)


def main(config: Config) -> dict | None:
    """Train all, and write the report; rank 0 returns the numbers of `result.json`."""
    torch.set_num_threads(1)  # more would only wait for each other: the tasks are small
    return mine.start("large_batch", config, Parts, compare, timeout_s=WAIT_S)


def compare(config: Config, world: World, parts: Parts) -> dict | None:
    data = images.load(config.data).to(world.device)
    world.print(data.note)
    tasks = list_tasks(config, len(data.train_inputs))
    task = Task(config.small, config.large, config.rate, config.epochs, config.target)

    def work(name: str, seed: int) -> dict:
        outcome = train(data, REMEDIES[name], task, seed, parts)
        budget = config.epochs * len(data.train_inputs) * REMEDIES[name].longer
        return outcome._asdict() | {"budget": round(budget)}

    with TaskRun(KIND, config, world, tasks, data) as run:
        results = run.do(tasks, work, my_share)
        numbers = None
        if world.is_main:
            if config.remedy:
                found = run.with_siblings(results, "remedy")
                print(f"{len(found)} of {len(NAMES)} remedies are done", flush=True)
                results = [result for results in found.values() for result in results]
            numbers = evaluate(config, run, data, parts, results)
    if world.is_main:
        world.print(f"report: {write_report(run.folder)}")
    return numbers


def list_tasks(config: Config, num_images: int) -> list[tuple[str, int]]:
    """Name and seed of every task."""
    if not 0 <= config.remedy <= len(NAMES):
        raise BadInput(f"--remedy {config.remedy}: there are {len(NAMES)}; 0 takes all of them")
    if not 2 <= config.small < config.large <= num_images or config.large % config.small:
        raise BadInput(
            f"--small {config.small} --large {config.large}: the large batch is a multiple of the "
            f"small one, which is at least 2, and the data holds {num_images:,} images"
        )
    if not 0 < config.target <= 1 or not config.rate > 0:
        raise BadInput(
            f"--target {config.target} --rate {config.rate}: an accuracy is above 0 and at most 1, "
            "and a learning rate is above 0"
        )
    at_least_one(config, "epochs")
    if config.seeds < 2:
        raise BadInput(f"--seeds {config.seeds}: take at least 2, to see what chance does")
    names = [NAMES[config.remedy - 1]] if config.remedy else NAMES
    return [(name, config.seed + number) for name in names for number in range(config.seeds)]


def evaluate(
    config: Config, run: TaskRun, data: images.Images, parts: Parts, results: Sequence[dict]
) -> dict:
    """On rank 0: rank the remedies in a table and a figure, and write both."""
    by_name: dict[str, list[Outcome]] = {}
    for one in results:
        outcome = Outcome(*(one[field] for field in Outcome._fields))
        by_name.setdefault(one["name"], []).append(outcome)
    accuracies = {name: [one.accuracy for one in found] for name, found in by_name.items()}
    classes = parts.ranked(accuracies)
    check_classes(classes, by_name)
    print(table(classes, by_name))
    run.status["valid_loss"] = round(1 - max(map(fmean, accuracies.values())), 5)
    numbers = {
        "data": data.note,
        "target": config.target,
        "classes": classes,
        "outcomes": {name: [list(one) for one in found] for name, found in by_name.items()},
    }
    if len(by_name) > 1:
        figure = remedies_compared(numbers["outcomes"], classes, config.target)
        (run.folder / "large_batch.png").write_bytes(png(figure))
        print(f"figure: {run.folder / 'large_batch.png'}")
    run.write_result(numbers, leave_out=["remedy"] if len(by_name) > 1 else [])
    return numbers


def check_classes(classes: object, names: Mapping) -> None:
    """BadInput where somebody's `ranked` lost a name, or made one up."""
    try:
        found = sorted(name for group in classes for name in group)
    except TypeError:
        found = None
    if found != sorted(names):
        raise BadInput(f"ranked gave {classes!r}: run its check in the notebook")


def table(classes: Sequence[Sequence[str]], outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    """A line for each remedy: its class, its accuracy, and what the target took."""
    lines = [f"{'rank':>4}  {'remedy':38} {'accuracy':>24} {'steps':>7} {'images':>9} {'time':>8}"]
    for number, group in enumerate(classes, 1):
        for name in group:
            found = outcomes[name]
            values = [one.accuracy for one in found]
            spread = f"{fmean(values):.1%} ({min(values):.1%} to {max(values):.1%})"
            lines.append(f"{number:>4}  {name:38} {spread:>24} {words_of_target(found)}")
    return "\n".join(lines)


def words_of_target(found: Sequence[Outcome]) -> str:
    """Mean steps, images and seconds to the target; a miss where a seed did not reach it."""
    if any(one.steps is None for one in found):
        missed = sum(one.steps is None for one in found)
        return f"   missed by {missed} of {len(found)}"
    means = [fmean(values) for values in zip(*(one[1:] for one in found), strict=True)]
    return f"{means[0]:7,.0f} {means[1]:9,.0f} {means[2]:7.2f}s"


if __name__ == "__main__":
    command_line(main, Config)
