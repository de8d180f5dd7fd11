"""Train the language model in a pipeline: each rank has some of its layers, replicas if you like.

torchrun --standalone --nproc-per-node=4 scripts/train_pipeline.py --stages 2 --schedule gpipe
bash sbatch/pipeline.sbatch --impl mine     with your own functions in it
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.utils.data import DataLoader, Dataset

from manyhands.data import corpus
from manyhands.data_parallel.replicas import average_gradients
from manyhands.ddp import wrapping
from manyhands.fsdp.clip import clip_grad_norm
from manyhands.instruments.live import Live, parts_of
from manyhands.instruments.meters import Stopwatch, reset_peaks
from manyhands.jobs import mine
from manyhands.models.transformer import Transformer
from manyhands.pipeline import bubble, schedules, stages, wiring
from manyhands.pipeline import engine as pipeline
from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import World, command_line, on_main
from manyhands.training import storage
from manyhands.training.report import finish
from manyhands.training.run import Run
from manyhands.training.schedule import learning_rate_at, set_learning_rate
from manyhands.training.settings import TrainConfig
from manyhands.ways import job
from manyhands.ways.job import open_run, shape_of
from manyhands.ways.pipeline import Native, Parts, make_engine
from manyhands.ways.pipeline import take_stages as take

TINY = {  # its short runs: gpu/jobs.py
    "": "{text} --micro-batches {pieces}",
    "torch": "{text} --micro-batches {pieces} --impl torch",
}
SEVERAL = ("interleaved", "zero-bubble")  # two stages a rank


@dataclass(frozen=True)
class Config(TrainConfig):
    """Settings of the run."""

    impl: Literal["mine", "scratch", "torch"] = "scratch"
    """Who runs the pipeline: your own functions, the course's by hand, or PyTorch."""
    schedule: Literal["naive", "gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    """The order of forwards and backwards; zero-bubble is PyTorch's only."""
    stages: int = 0
    """Ranks in a pipeline; 0 takes all. With fewer, the ranks hold replicas of the pipeline."""
    micro_batches: int = 4
    """Pieces into which a pipeline's share of the batch is cut."""
    recompute: bool = False
    """Keep only inputs and outputs of stages, and compute forward twice; not for torch."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """To multiply matrices in; weights, their gradients and messages stay float32."""
    clip: float = 0.0
    """Most that the norm of the gradient over all stages may be; 0 does not clip."""


class Place(NamedTuple):
    """This rank's pipeline, the replicas of its stage, and which stages of how many it has."""

    pipe: dist.ProcessGroup
    back: dist.ProcessGroup  # the same ranks; gradients go through it
    replicas: dist.ProcessGroup
    share: tuple[int, int]  # of the data: the number of the replica, and how many there are
    ranks: int  # of the pipeline
    stages: range
    num_stages: int


def main(config: Config) -> float:
    """Train, write the report, and return the validation loss in nats per token."""
    if config.impl != "torch" and config.schedule == "zero-bubble":
        raise BadInput("--schedule zero-bubble is PyTorch's: add --impl torch, or take another")
    if config.impl == "torch" and (config.recompute or config.schedule == "naive"):
        raise BadInput("--recompute and --schedule naive are by hand: leave out --impl torch")
    job.check_micro_batches(config.micro_batches)
    job.check_clip(config.clip)
    return mine.start("pipeline", config, Parts, train)


def train(config: Config, world: World, parts: Parts) -> float:
    # Data
    place = find_place(config, world, parts)
    data = corpus.load_for(config)
    world.print(data.note)
    shape = shape_of(config, data)
    num_shares = place.share[1]
    run = open_run(config, world, "pipeline", data, num_shares=num_shares)
    batch = config.batch // num_shares
    size = batch // config.micro_batches
    sampler = corpus.ShardedSampler(len(data.train), *place.share, config.seed)
    loader = DataLoader(data.train, batch, sampler=sampler, drop_last=True)

    # Model
    path = run.folder / "stages.json"
    example = data.train[0][0].expand(size, -1)
    own, tied = take_stages(
        Transformer(*shape).to(world.device), example, place, parts, path, config.dtype
    )
    model = nn.ModuleList(own.values())
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, fused=True)
    engine = engine_of(config, parts, own, size, place, run.stopwatch)
    plan = schedule_words(config, size, place)
    world.print(f"schedule: {plan}")
    live = Live(parts_of(model, optimizer), device=world.device)

    # Training
    run.resume(model, optimizer, sharded=["model", "optimizer"])
    reset_peaks(world.device)  # the whole model, which each rank built first, is set-up
    for epoch in run.epochs(loader):
        sampler.set_epoch(epoch)
        for inputs, targets in run.batches(loader):
            set_learning_rate(optimizer, learning_rate_at(run.step, config))
            with live.at_first():
                loss = engine.step(inputs, targets)
                parts.sum_tied(tied, place.pipe)
                average_gradients(model, place.replicas)
                if config.clip:
                    clip_gradients(model, tied, config.clip, place.pipe)
                optimizer.step()
                model.zero_grad()
            run.log(loss)

    # Result
    notes = {"schedule": plan, "waiting": waiting_words(engine, config, place, world.device)}
    valid_loss = mean_loss(run, config, data.valid, batch, own, place)
    whole = gather(own, place, Transformer(*shape), path)
    return finish(run, whole, valid_loss, live, notes)


def clip_gradients(
    model: nn.Module, tied: wiring.Tied, max_norm: float, pipe: dist.ProcessGroup
) -> Tensor:
    """Clip by the norm over all stages, in which a parameter of two stages counts once.

    Call it after sum_tied, when all ranks that use a tied parameter hold the same gradient.
    """
    copies = [param for param in model.parameters() if is_copy(param, tied, pipe)]
    mine = [param for param in model.parameters() if not is_copy(param, tied, pipe)]
    norm = clip_grad_norm(mine, max_norm, [pipe])
    clip_grads_with_norm_(copies, max_norm, norm, foreach=False)
    return norm


def is_copy(param: nn.Parameter, tied: wiring.Tied, pipe: dist.ProcessGroup) -> bool:
    """Is it a parameter that an earlier rank of the pipeline holds, too?"""
    rank = dist.get_rank(pipe)
    return any(param is one and rank != ranks[0] for one, ranks in tied)


def find_place(config: Config, world: World, parts: Parts) -> Place:
    """Put the ranks into pipelines; BadInput where they or the batch do not fit."""
    ranks = config.stages or world.world_size
    m = config.micro_batches
    if ranks < 1 or world.world_size % ranks:
        raise BadInput(
            f"--stages {ranks} does not fit {world.world_size} rank(s): take a divisor of that"
        )
    d = world.world_size // ranks
    per_rank = 1 + (config.schedule in SEVERAL)
    if config.batch % (d * m):
        raise BadInput(
            f"batch {config.batch} cannot be cut into {d} replica(s) x {m} micro-batches: take a "
            f"multiple of {d * m}"
        )
    if config.layers + 2 < ranks * per_rank:
        raise BadInput(
            f"{ranks * per_rank} stages, but the model has only {config.layers + 2} layers with "
            f"embedding and head: take --layers {ranks * per_rank - 2} or more, or fewer ranks"
        )
    if per_rank > 1 and (ranks < 2 or m % max(1, m // ranks)):
        raise BadInput(
            f"--schedule {config.schedule} with {m} micro-batches on {ranks} rank(s): take 2 ranks "
            "or more, and a multiple of their number as --micro-batches"
        )
    if config.impl == "torch" and config.schedule == "1f1b":
        job.check_1f1b_of_pytorch(m, ranks, "ranks")
    pipe, replicas = parts.make_grid(ranks)
    back, _ = parts.make_grid(ranks)
    num_stages = ranks * per_rank
    own = range(dist.get_rank(pipe), num_stages, ranks)
    return Place(pipe, back, replicas, (dist.get_rank(replicas), d), ranks, own, num_stages)


def take_stages(
    whole: Transformer,
    example: Tensor,
    place: Place,
    parts: Parts,
    path: Path,
    dtype: str = "float32",
) -> tuple[dict[int, nn.Module], wiring.Tied]:
    """Cut by the measured time of each layer. A run that goes on keeps its cut.

    With dtype bfloat16 each layer multiplies in it. The sum to which layers add what they compute
    stays float32, so what a stage sends is float32 in both cases.

    Returns:
        This rank's stages by number, and its tied parameters: nothing that holds other stages.
    """
    layers = stages.layers_of(whole)
    device = next(whole.parameters()).device
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")
    for layer in layers:
        layer.forward = autocast(layer.forward)

    def choose() -> list[int]:
        if not path.is_file():
            costs_s = stages.measure(layers, example.to(device))
            bounds = parts.partition(costs_s, place.num_stages)
            storage.write_json(path, {"bounds": bounds, "costs_s": costs_s})
        told = storage.read_json(path)
        words = [
            f"{stop - start} of {1e3 * sum(told['costs_s'][start:stop]):.1f} ms"
            for start, stop in pairwise(told["bounds"])
        ]
        print(f"layers of each stage and their time for a micro-batch: {', '.join(words)}")
        return told["bounds"]

    return take(layers, on_main(choose), place.pipe)


def message_shape(config: Config, size: int) -> tuple[int, int, int]:
    """The shape of what goes from stage to stage for `size` samples."""
    return size, config.block, 32 * config.layers


def engine_of(
    config: Config,
    parts: Parts,
    own: Mapping[int, nn.Module],
    size: int,
    place: Place,
    stopwatch: Stopwatch,
) -> pipeline.Pipeline | Native:
    """What runs a training step over this rank's stages, with `size` samples a micro-batch."""
    m, shape, kind = config.micro_batches, message_shape(config, size), config.schedule
    if config.impl == "torch":
        return make_engine(own, m, shape, kind, native=True, group=place.pipe)
    options = {"recompute": config.recompute, "back": place.back}
    engine = make_engine(own, m, shape, kind, parts=parts, group=place.pipe, **options)
    return marked(engine, stopwatch)


def marked(engine: pipeline.Pipeline, stopwatch: Stopwatch) -> pipeline.Pipeline:
    """Have the engine tell the stopwatch of its actions; between them a rank waits for others."""
    span = engine.span

    @contextmanager
    def span_and_mark(action: schedules.Action) -> Iterator[None]:
        stopwatch.mark("forward" if action.kind == "F" else "backward")
        with span(action):
            yield
        stopwatch.mark("communication")

    engine.span = span_and_mark
    return engine


def schedule_words(config: Config, size: int, place: Place) -> str:
    """The schedule, and what one step of each pipeline is cut into."""
    d = place.share[1]
    return (
        f"{config.schedule}, {config.micro_batches} micro-batch(es) of {size} sequences on "
        f"{place.num_stages} stages of {place.ranks} rank(s)" + (f", {d} replicas" if d > 1 else "")
    )


def waiting_words(
    engine: pipeline.Pipeline | Native, config: Config, place: Place, device: torch.device
) -> str:
    """How much of the last step the ranks of a pipeline waited, beside the formula."""
    _, share = bubble.bubble(place.ranks, config.micro_batches, len(place.stages))
    formula = f"the bubble of equal stages is {float(share):.0%} of the time"
    if isinstance(engine, Native) or device.type != "cpu":
        return f"{formula}; no times are taken by PyTorch's schedules, and none on GPUs"
    if config.schedule == "naive":
        formula = f"naive stages idle {1 - 1 / place.ranks:.0%} of the time"
    if not engine.spans:  # a run that went on after its last step, to validate
        return f"{formula}; no step was left to measure"
    spans: list = [None] * place.ranks
    dist.all_gather_object(spans, engine.spans, group=place.pipe)
    return f"in the last step the ranks waited {bubble.idle_share(spans):.0%}; {formula}"


@torch.no_grad()
def mean_loss(
    run: Run,
    config: Config,
    valid: Dataset,
    batch: int,
    own: Mapping[int, nn.Module],
    place: Place,
) -> float:
    """The validation loss: forwards only, each replica of the pipeline with its share."""
    replica, d = place.share
    loader = DataLoader(valid, batch, sampler=range(replica, len(valid), d))
    engines: dict[int, pipeline.Pipeline] = {}  # by size: the last batch may be smaller
    channels = None  # of the first of them, for the others
    total = torch.zeros((), dtype=torch.float64, device=run.world.device)
    count = 0
    for inputs, targets in run.validation(loader):
        size = len(inputs)
        if size not in engines:
            options = {"group": place.pipe, "back": place.back, "channels": channels}
            shape = message_shape(config, size)
            engines[size] = make_engine(own, 1, shape, "forwards", **options)
            channels = engines[size].mail.channel
        loss = engines[size].step(inputs, targets)
        total += loss.double() * targets.numel()
        count += targets.numel()
    return wrapping.mean_over_ranks(total, count)


def gather(
    own: Mapping[int, nn.Module], place: Place, plain: Transformer, path: Path
) -> Transformer:
    """Set `plain` to the weights of the first pipeline, on rank 0; returns it on all ranks."""
    states: list | None = [None] * place.ranks if dist.get_rank() == 0 else None
    if place.share[0] == 0:
        weights = {stage: on_cpu(module) for stage, module in own.items()}
        dist.gather_object(weights, states, group=place.pipe, group_dst=0)
    if states:
        every = stages.cut(stages.layers_of(plain), storage.read_json(path)["bounds"])
        for state in states:
            for stage, tensors in state.items():
                every[stage].load_state_dict(tensors)
    return plain


def on_cpu(module: nn.Module) -> dict[str, Tensor]:
    """Its weights in the CPU's memory: a pickled tensor of a GPU is loaded to the same GPU."""
    return {name: tensor.cpu() for name, tensor in module.state_dict().items()}


if __name__ == "__main__":
    command_line(main, Config)
