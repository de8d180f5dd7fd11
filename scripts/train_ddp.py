"""Train the language model with data parallelism: every rank takes its share of each batch.

torchrun --standalone --nproc-per-node=2 scripts/train_ddp.py --data embedded --steps 300
bash sbatch/ddp.sbatch --steps 300          the same on all GPUs of this machine, or 2 CPU ranks
python scripts/train_ddp.py                 one rank, without torchrun
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Literal, NamedTuple

from manyhands.data import corpus
from manyhands.data_parallel import replicas
from manyhands.ddp import wrapping
from manyhands.jobs import mine
from manyhands.models.transformer import Transformer
from manyhands.programs import ddp
from manyhands.ranks.runtime import World, command_line, distributed, place, process_group
from manyhands.training.report import write_report
from manyhands.training.run import save_once
from manyhands.training.settings import TrainConfig
from manyhands.ways.job import open_run, shape_of

TINY = {"": "{text} --impl scratch", "torch": "{text} --impl torch"}  # its short runs: gpu/jobs.py


@dataclass(frozen=True)
class Config(TrainConfig):
    """Settings of the run."""

    impl: Literal["mine", "scratch", "torch"] = "torch"
    """Whose parts: yours (mine/ddp.py, mine/data_parallel.py), the course's, or PyTorch's."""


class Parts(NamedTuple):
    """What data parallelism adds to the program of one process."""

    place: Callable = place
    process_group: Callable = process_group
    ShardedSampler: Callable = corpus.ShardedSampler
    BucketedDDP: Callable = replicas.BucketedDDP
    mean_over_ranks: Callable = wrapping.mean_over_ranks
    save_once: Callable = save_once
    train: Callable | None = None  # the learner's own program, which has its own parts in it


def learners_parts() -> dict[str, Callable]:
    """The learner's parts of lesson 06; without a program, also BucketedDDP of lesson 05."""
    found = mine.load("ddp", Parts._fields)
    if "train" not in found:
        found |= mine.load("data_parallel", ["BucketedDDP"], needed=False)
    return found


def with_parts(parts: Parts) -> Callable:
    """The course's program, with `parts` under the names that it calls."""
    names = parts._asdict() | {"torch_ddp": parts.BucketedDDP}
    return FunctionType(ddp.train.__code__, vars(ddp) | names)


def main(config: Config) -> float:
    """Train, test, write the report; return the best validation loss in nats per token."""
    yours = learners_parts() if config.impl == "mine" else {}
    parts = Parts(**yours)  # what the learner has not written, the course has
    if config.impl == "torch":
        parts = Parts(ShardedSampler=corpus.torch_sampler, BucketedDDP=wrapping.torch_ddp)
    join = {"place": parts.place, "process_group": parts.process_group}
    with distributed(config.device, config.seed, **join) as world:
        if config.impl == "mine":
            world.print(mine.in_words(yours))
        return train(config, world, parts)


def train(config: Config, world: World, parts: Parts) -> float:
    data = corpus.of(config)
    world.print(data.note)
    run = open_run(config, world, "ddp", data)
    model = Transformer(*shape_of(config, data)).to(world.device)
    run_program = parts.train or with_parts(parts)
    run_program(run, model, data)
    run.finish()
    if world.is_main:
        world.print(f"report: {write_report(run.folder)}")
    return run.valid_loss


if __name__ == "__main__":
    command_line(main, Config)
