"""Train to a target accuracy with each batch size and learning rate: how many steps does it take?

bash sbatch/batch_size.sbatch                      on all GPUs of this machine, or 2 CPU ranks
sbatch --array=0-9 sbatch/batch_size.sbatch        a job for each batch size
python scripts/train_batch_size.py --data mnist --model cnn --networks 1
python scripts/train_batch_size.py --model transformer --largest 256 --networks 1

Each pair of a batch size and a rate is a task for one rank. What is done is kept in the run's
folder, so a job that is stopped or killed goes on with the rest. In an array, each job also looks
at what the others have done; the last one draws the figure of all.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Literal, NamedTuple

import torch

from manyhands.batch_size import problem, scaling, sweep
from manyhands.batch_size.figures import unit
from manyhands.batch_size.problem import Problem
from manyhands.data import corpus, images
from manyhands.first_job.planning import my_share
from manyhands.first_job.power_law import fit_power_law
from manyhands.instruments.figures import new_figure, png, steps_by_batch
from manyhands.jobs import mine
from manyhands.models.transformer import Transformer
from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import World, command_line
from manyhands.training.report import write_report
from manyhands.training.tasks import WAIT_S, Kind, TaskConfig, TaskRun, at_least_one

TINY = {"": "--networks 1 --rates 0.4 --largest 64 --target 0.7 --max-steps 60"}
BATCHES = [2**power for power in range(11)]
SMALL = 8  # the batch sizes with which the noise scale is measured
LARGE = 32
ENOUGH = 3  # batch sizes, for a fit that can fail
BLOCK = 32  # characters of a sequence


@dataclass(frozen=True)
class Config(TaskConfig):
    """What to train."""

    data: str = "embedded"
    """embedded, a name that prepare_data.py knows, or a folder with idx files or with text."""
    splits: str = ""
    """Which files of a folder of text are for what, where their names do not say it: joined, or
    train=PATTERN,valid=PATTERN,test=PATTERN."""
    model: Literal["mlp", "cnn", "transformer"] = "mlp"
    """mlp or cnn for images; transformer for text, where a sample is a sequence of characters."""
    batch: int = 0
    """Train with this batch size only; 0 takes 1, 2, 4 ... up to --largest."""
    largest: int = 1024
    """The largest batch size, at most 1024."""
    rates: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
    """Learning rates to try with each batch size."""
    networks: int = 3
    """Networks for each batch size and rate. They differ in their first weights and batches."""
    target: float = 0.93
    """Accuracy on the validation data that ends a training."""
    max_steps: int = 4000
    """Steps after which a training has missed the target."""
    impl: Literal["mine", "scratch"] = "scratch"
    """Whose best_rate, fit_steps and noise_scale: yours (mine/batch_size.py) or the course's."""


class Parts(NamedTuple):
    """The exercises of lesson 03 that this job can use."""

    best_rate: Callable = scaling.best_rate
    fit_steps: Callable = scaling.fit_steps
    noise_scale: Callable = scaling.noise_scale


class Best(NamedTuple):
    """The best learning rate of a batch size."""

    batch: int
    rate: float
    mean: float  # steps to the target
    steps: list[int]  # of each network


def curve(result: Mapping) -> tuple[float | None, int, str]:
    """The mean steps of a task, the samples that it looked at, and words."""
    batch, rate, steps = (result[name] for name in ("batch", "rate", "steps"))
    reached = [count for count in steps if count is not None]
    mean = fmean(reached) if len(reached) == len(steps) else None
    words = "missed the target" if mean is None else f"{mean:.0f} steps"
    return mean, batch * sum(reached), f"settings tried; batch {batch}, rate {rate:g}: {words}"


KIND = Kind(
    name="batch_size",
    noun="settings",
    identity=(*"data model batch largest rates networks target max_steps seed".split(),),
    key=("batch", "rate"),
    loss_name="mean steps",
    loss_unit="to the target",
    result_name="fewest mean steps",
    tell=curve,
)


def main(config: Config) -> dict | None:
    """Train all, and write the report; rank 0 returns the numbers of `result.json`."""
    torch.set_num_threads(1)  # more would only wait for each other: the tasks are small
    return mine.start("batch_size", config, Parts, train, timeout_s=WAIT_S)


def train(config: Config, world: World, parts: Parts) -> dict | None:
    data = load(config).to(world.device)
    world.print(data.note)
    tasks = list_tasks(config, len(data.train_inputs))

    def work(batch: int, rate: float) -> dict:
        ways = (seeds(config), config.target, config.max_steps)
        return {"steps": sweep.tune(data, batch, (rate,), *ways)[rate]}

    with TaskRun(KIND, config, world, tasks, data) as run:
        results = run.do(tasks, work, my_share)
        numbers = None
        if world.is_main:
            if config.batch:
                found = run.with_siblings(results, "batch")
                num_sizes = len(sizes_for(config, len(data.train_inputs)))
                print(f"{len(found)} of {num_sizes} batch sizes are done", flush=True)
                results = [result for results in found.values() for result in results]
            numbers = evaluate(config, run, data, parts, results)
    if world.is_main:
        world.print(f"report: {write_report(run.folder)}")
    return numbers


def load(config: Config) -> Problem:
    """Read images for "mlp" and "cnn", text for "transformer"; BadInput where there are none."""
    if config.model != "transformer":
        return problem.of_images(images.load(config.data), config.model)
    text = corpus.load(config.data, BLOCK, valid_tokens=256 * BLOCK, splits=config.splits)
    return problem.of_text(text, partial(Transformer, text.tokenizer.vocab_size, BLOCK, layers=1))


def seeds(config: Config) -> list[int]:
    return [config.seed + number for number in range(config.networks)]


def list_tasks(config: Config, num_samples: int) -> list[tuple[int, float]]:
    """Batch size and rate of every task, the smallest first."""
    rates = config.rates
    if not 0 <= config.batch <= num_samples or num_samples < LARGE:
        raise BadInput(
            f"--batch {config.batch}: the data holds {num_samples:,} samples for training; take at "
            f"most as many, and data with at least {LARGE}"
        )
    if not rates or not all(math.isfinite(rate) and rate > 0 for rate in rates):
        raise BadInput(f"--rates {' '.join(map(str, rates))}: take one or more numbers above 0")
    if len(set(rates)) < len(rates):
        raise BadInput(f"--rates {' '.join(map(str, rates))}: name each of them once")
    if not 0 < config.target <= 1:
        raise BadInput(f"--target {config.target}: an accuracy is above 0 and at most 1")
    at_least_one(config, "networks", "max_steps", "largest")
    batches = [config.batch] if config.batch else sizes_for(config, num_samples)
    return [(batch, rate) for batch in batches for rate in rates]


def sizes_for(config: Config, num_samples: int) -> list[int]:
    return [batch for batch in BATCHES if batch <= min(config.largest, num_samples)]


def evaluate(
    config: Config, run: TaskRun, data: Problem, parts: Parts, results: Sequence[dict]
) -> dict:
    """On rank 0: print and write what the trainings came to, and draw it where there is enough."""
    by_batch: dict[int, dict[float, list]] = {}
    for one in sorted(results, key=lambda one: one["batch"]):
        by_batch.setdefault(one["batch"], {})[one["rate"]] = one["steps"]
    found = [find_best(parts, batch, steps) for batch, steps in by_batch.items()]
    best = [one for one in found if one]
    num_trainings = sum(len(one["steps"]) for one in results)
    print(f"{num_trainings} trainings to {config.target:.0%}, {len(by_batch)} batch sizes")
    numbers = {"data": data.note, "target": config.target, "num_trainings": num_trainings}
    numbers["batches"] = [one._asdict() for one in best]
    numbers["all"] = [[one["batch"], one["rate"], one["steps"]] for one in results]
    run.status["valid_loss"] = min((one.mean for one in best), default=None)
    if len(best) >= ENOUGH:
        numbers |= predict(config, data, parts, best)
        figure, ax = new_figure(7, 3.8)
        fit = (numbers["least_steps"], numbers["critical_batch"], numbers["noise_scale"])
        steps_by_batch(ax, numbers["batches"], *fit)
        ax.set_xlabel(f"batch size ({unit(numbers)})")
        (run.folder / "batch_size.png").write_bytes(png(figure))
        print(f"figure: {run.folder / 'batch_size.png'}")
    else:
        print(f"no fit: that takes {ENOUGH} batch sizes that reach the target, not {len(best)}")
    run.write_result(numbers, leave_out=["batch"] if len(by_batch) > 1 else [])
    return numbers


def find_best(parts: Parts, batch: int, steps: dict[float, list]) -> Best | None:
    """The best rate of a batch size, in one line; None where no rate reached the target."""
    found = parts.best_rate(steps)
    if found is None:
        print(f"batch {batch:4}: no rate reached the target with every network")
        return None
    if not (
        isinstance(found, tuple) and len(found) == 2 and None not in steps.get(found[0], [None])
    ):
        raise BadInput(f"best_rate gave {found!r}: run its check in the notebook")
    best = Best(batch, found[0], round(float(found[1]), 2), steps[found[0]])
    told = f"{best.mean:6.0f} steps ({min(best.steps)} to {max(best.steps)})"
    print(f"batch {batch:4}: {told} at rate {best.rate:g}")
    return best


def predict(config: Config, data: Problem, parts: Parts, best: Sequence[Best]) -> dict:
    """The critical batch as the steps tell it, and the noise scale as gradients tell it."""
    fit = parts.fit_steps([one.batch for one in best], [one.mean for one in best])
    squares: tuple[list[float], list[float]] = ([], [])
    rate = min(best, key=lambda one: abs(one.batch - LARGE)).rate  # the best for such a batch
    for seed in seeds(config):
        ways = (SMALL, LARGE, rate, seed, config.target, config.max_steps)
        for kept, more in zip(squares, sweep.squares_on_the_way(data, *ways), strict=True):
            kept += more
    scale = parts.noise_scale(*squares, SMALL, LARGE)
    least, critical = positive("fit_steps", fit, 2)
    (noise,) = positive("noise_scale", (scale,), 1)
    print(f"steps = {least:.1f} * (1 + {critical:.1f} / batch): critical batch {critical:.1f}")
    print(f"noise scale {noise:.1f}, from gradients at batch sizes {SMALL} and {LARGE}")
    numbers = {"least_steps": least, "critical_batch": critical, "noise_scale": noise}
    perfect = [(one.batch, one.mean) for one in best if one.batch <= critical / 4]
    if len(perfect) > 1:
        _, exponent = fit_power_law(*zip(*perfect, strict=True))
        numbers["slope"] = round(-exponent, 3)
        print(f"slope up to a quarter of the critical batch: {-exponent:.2f}; perfect is -1")
    return numbers


def positive(name: str, values: object, count: int) -> list[float]:
    """`count` numbers above 0, rounded; BadInput, with the name of their function, for others."""
    try:
        numbers = [float(f"{float(value):.5g}") for value in values]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != count or not all(math.isfinite(one) and one > 0 for one in numbers):
        raise BadInput(
            f"{name} gave {values!r}, where {count} number(s) above 0 are needed: run its check in "
            "the notebook, or take more --networks"
        )
    return numbers


if __name__ == "__main__":
    command_line(main, Config)
