"""Train the language model on a mesh of ranks: FSDP x TP, pipelines of that, or replicas of it.

torchrun --standalone --nproc-per-node=8 scripts/train_mesh.py --pp 2 --dp 2 --tp 2
bash sbatch/mesh.sbatch --impl mine         with your own functions in it
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch.utils.data import DataLoader, Dataset

from manyhands.data import corpus
from manyhands.instruments.live import Live, parts_of
from manyhands.instruments.meters import reset_peaks
from manyhands.jobs import mine
from manyhands.mesh import clip, grid, native
from manyhands.mesh.boxes import mesh_state
from manyhands.mesh.training import OnMesh
from manyhands.mesh.whole import whole_state
from manyhands.models.transformer import Transformer
from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import World, command_line
from manyhands.training.report import finish
from manyhands.training.schedule import learning_rate_at, set_learning_rate
from manyhands.training.settings import TrainConfig
from manyhands.ways import job
from manyhands.ways.job import open_run, shape_of
from manyhands.ways.mesh import Parts, spread
from manyhands.ways.ready import adamw

TINY = {"": "{text}", "torch": "{text} --impl torch"}  # its short runs: gpu/jobs.py


@dataclass(frozen=True)
class Config(TrainConfig):
    """Settings of the run."""

    impl: Literal["mine", "scratch", "torch"] = "scratch"
    """Who combines the techniques: your own functions, the course's by hand, or PyTorch."""
    pp: int = 0
    """Stages of a pipeline; 0 takes what fits. pp x dp x tp is the number of ranks."""
    dp: int = 0
    """Ranks that share the samples, and shard the model among them; 0 takes what fits."""
    tp: int = 0
    """Ranks that cut each matrix; 0 takes what fits."""
    replicas: int = 1
    """Copies of the shards among the dp ranks; as many as dp: nothing is sharded."""
    micro_batches: int = 4
    """Pieces into which each rank's share of the batch is cut."""
    clip: float = 0.0
    """Most that the norm of the gradient may be; 0 does not clip."""


def main(config: Config) -> float:
    """Train, test, write the report; return the best validation loss in nats per token."""
    job.check_micro_batches(config.micro_batches)
    job.check_clip(config.clip)
    return mine.start("mesh", config, Parts, train)


def train(config: Config, world: World, parts: Parts) -> float:
    # Data
    sizes = sizes_of(config, world.world_size)
    data = corpus.load_for(config)
    world.print(data.note)
    shape = shape_of(config, data)
    check(config, sizes, shape[0])
    place = parts.coordinates(world.rank, sizes)
    share, num_shares = grid.share_of_data(place, sizes)
    axes = ["ranks", "pp", "dp", "tp", "replicas"]  # any mesh can load a checkpoint
    run = open_run(config, world, "mesh", data, num_shares=num_shares, may_differ=axes)
    batch = config.batch // num_shares
    # All ranks shuffle alike; then each takes its share.
    sampler = corpus.ShardedSampler(len(data.train), share, num_shares, config.seed)
    loader = DataLoader(data.train, batch, sampler=sampler, drop_last=True)
    valid, test = (
        equal_batches(part, batch, share, num_shares) for part in (data.valid, data.test)
    )

    # Model
    torch.manual_seed(parts.seed_of("weights", config.seed, place, sizes))
    is_native = config.impl == "torch"
    whole = Transformer(*shape).to(world.device)
    training = spread(whole, sizes, config.micro_batches, is_native, parts)
    torch.manual_seed(parts.seed_of("dropout", config.seed, place, sizes))
    optimizer = adamw(training.parameters(), config.learning_rate, is_mixed=is_native)
    world.print(f"mesh of {world.world_size} rank(s):\n{grid.drawn(sizes)}")
    live = Live(parts_of(training.model, optimizer), device=world.device)

    def valid_loss(batches: Iterator) -> float:
        return mean_loss(training, batches, world.device)

    # Training
    run.resume(training.model, optimizer, parts=partial(mesh_state, training))
    reset_peaks(world.device)  # the whole model, which each rank built first, is set-up
    run.keep_best(valid_loss, valid)
    for epoch in run.epochs(loader):
        sampler.set_epoch(epoch)
        for inputs, targets in run.batches(loader):
            set_learning_rate(optimizer, learning_rate_at(run.step, config))
            with live.at_first():
                loss = training.step(inputs, targets)
                training.finish()
                clip_gradients(config, parts, training)
                optimizer.step()
                training.zero_grad()
            run.log(loss)

    # Result
    run.test(test, data.in_words)
    plain = Transformer(*shape)
    state = whole_state(training, plain)
    if world.is_main:
        plain.load_state_dict(state)
    size = batch // config.micro_batches
    words = f"{in_words(sizes)}, {config.micro_batches} micro-batch(es) of {size} sequences"
    return finish(run, plain, run.valid_loss, live, {"mesh": words})


def sizes_of(config: Config, ranks: int) -> dict[str, int]:
    """The axes of the mesh that have more than one rank; BadInput where the numbers do not fit."""
    sizes = {"tp": config.tp, "dp": config.dp, "pp": config.pp}
    if min(sizes.values()) < 0 or config.replicas < 1:
        raise BadInput("--pp, --dp and --tp are at least 1, or 0 for what fits; --replicas is 1 up")
    left, over = divmod(ranks, math.prod(size or 1 for size in sizes.values()))
    free = [axis for axis, size in sizes.items() if not size]
    if over or (left > 1 and not free):
        raise BadInput(
            f"--pp {config.pp} x --dp {config.dp} x --tp {config.tp} does not fit {ranks} rank(s): "
            f"take sizes whose product is {ranks}, or 0 for what fits"
        )
    for axis in free:  # 2 of each, as long as they last, and all others to data parallelism
        sizes[axis] = 1 if left % 2 else 2
        left //= sizes[axis]
    if free:
        sizes["dp" if "dp" in free else free[0]] *= left
    if sizes["dp"] % config.replicas:
        raise BadInput(
            f"--replicas {config.replicas} does not fit --dp {sizes['dp']}: take a divisor of that"
        )
    shards = sizes["dp"] // config.replicas
    full = {"pp": sizes["pp"], "replicate": config.replicas, "dp": shards, "tp": sizes["tp"]}
    return {axis: size for axis, size in full.items() if size > 1} or {"dp": 1}


def check(config: Config, sizes: Mapping[str, int], vocab_size: int) -> None:
    """BadInput where the model or the batch cannot be cut for this mesh."""
    pp, tp, m = sizes.get("pp", 1), sizes.get("tp", 1), config.micro_batches
    shares = sizes.get("replicate", 1) * sizes.get("dp", 1)
    if config.batch % (shares * m):
        raise BadInput(
            f"batch {config.batch} cannot be cut into {shares} share(s) x {m} micro-batches: take "
            f"a multiple of {shares * m}, or other --micro-batches"
        )
    job.check_heads(config.layers, tp, "--tp")
    if vocab_size < tp:
        raise BadInput(f"{vocab_size} tokens cannot be shared by {tp} ranks: take a smaller --tp")
    if config.layers + 2 < pp:
        raise BadInput(
            f"embedding, {config.layers} blocks and head cannot make {pp} stages: take --layers "
            f"{pp - 2} or more, or a smaller --pp"
        )
    if config.impl == "torch":
        job.check_even_cut(vocab_size, config.layers, tp)
        job.check_1f1b_of_pytorch(m, pp, "stages")


def clip_gradients(config: Config, parts: Parts, training: OnMesh) -> None:
    """Scale all gradients, if that was asked for, by one norm of the whole."""
    if not config.clip:
        return
    if config.impl == "torch":
        native.torch_clip(training, config.clip)
    else:
        clip.clip_on_mesh(training, config.clip, parts.mesh_norm)


def equal_batches(part: Dataset, batch: int, share: int, num_shares: int) -> list[tuple]:
    """The batches of this share, each with the number of its tokens; as many for every share.

    All shards have to gather for a batch of one of them. So a share that has a batch less gets one
    more that counts nothing.
    """
    loader = DataLoader(part, batch, sampler=range(share, len(part), num_shares))
    found = [(x, y, torch.tensor(y.numel())) for x, y in loader]
    most = math.ceil(math.ceil(len(part) / num_shares) / batch)
    if len(found) < most:
        x, y = part[0]
        found.append((x[None], y[None], torch.tensor(0)))
    return found


@torch.no_grad()
def mean_loss(training: OnMesh, batches: Iterator, device: torch.device) -> float:
    """The mean over all tokens of all shares' batches, the same on every rank of the mesh."""
    training.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # of losses, and of tokens
    for inputs, targets, num_tokens in batches:
        loss = training(inputs, targets)
        sums += torch.stack([loss.double() * num_tokens, num_tokens.double()])
    training.train()
    total, count = training.sum_over_data(sums)
    return (total / count).item()


def in_words(sizes: Mapping[str, int]) -> str:
    """The axes and their sizes: pp 2 x dp 2 x tp 2."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items())


if __name__ == "__main__":
    command_line(main, Config)
