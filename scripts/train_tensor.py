"""Train the language model with every matrix cut over ranks, and replicas of that if you like.

torchrun --standalone --nproc-per-node=4 scripts/train_tensor.py --tensor 2 --sequence
bash sbatch/tensor.sbatch --impl mine       with your own functions in it
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.utils import clip_grads_with_norm_
from torch.utils.data import DataLoader

from manyhands.data import corpus
from manyhands.ddp import wrapping
from manyhands.fsdp.clip import clip_grad_norm
from manyhands.instruments.live import Live, parts_of
from manyhands.instruments.meters import reset_peaks
from manyhands.jobs import mine
from manyhands.layerwise.norms import added_up, whole_norms
from manyhands.models.transformer import Transformer, total_loss
from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import World, command_line
from manyhands.saving.pieces import is_dtensor
from manyhands.tensor import model as split_model
from manyhands.training.report import finish
from manyhands.training.schedule import learning_rate_at, set_learning_rate
from manyhands.training.settings import TrainConfig
from manyhands.ways import job
from manyhands.ways.job import open_run, shape_of
from manyhands.ways.ready import adamw
from manyhands.ways.tensor import Native, Parts, cut

TINY = {"": "{text}"}  # its short runs: gpu/jobs.py
MESH = ("replicate", "tensor")


@dataclass(frozen=True)
class Config(TrainConfig):
    """Settings of the run."""

    impl: Literal["mine", "scratch", "torch"] = "scratch"
    """Who cuts the model: your own functions, the course's by hand, or PyTorch's plan."""
    tensor: int = 0
    """Ranks that hold one model together; 0 takes all. With fewer, there are replicas of it."""
    sequence: bool = False
    """Between the cut layers, keep only each rank's part of the positions."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """To multiply matrices in; weights and their gradients stay float32."""
    clip: float = 0.0
    """Most that the norm of the gradient may be; 0 does not clip."""


def main(config: Config) -> float:
    """Train, test, write the report; return the best validation loss in nats per token."""
    job.check_clip(config.clip)
    # Inside it cross_entropy takes scores that are cut by the vocabulary, as DTensors.
    with loss_parallel() if config.impl == "torch" else nullcontext():
        return mine.start("tensor", config, Parts, train)


def train(config: Config, world: World, parts: Parts) -> float:
    # Data
    data = corpus.load_for(config)
    world.print(data.note)
    shape = shape_of(config, data)
    ranks = ranks_of_a_model(config, world, shape[0])
    share, num_shares = parts.data_place(world.rank, world.world_size, ranks)
    run = open_run(config, world, "tensor", data, num_shares=num_shares)
    batch = config.batch // num_shares
    sampler = corpus.ShardedSampler(len(data.train), share, num_shares, config.seed)
    loader = DataLoader(data.train, batch, sampler=sampler, drop_last=True)
    valid, test = corpus.held_out(data, batch, share, num_shares)

    # Model
    mesh = init_device_mesh(world.device.type, (num_shares, ranks), mesh_dim_names=MESH)
    whole = Transformer(*shape).to(world.device)
    before = set(whole.parameters())
    model = cut_over(config, parts, whole, mesh)
    del whole
    copies = [param for param in model.parameters() if param in before]  # on every tensor rank
    is_mixed = config.impl == "torch"
    optimizer = adamw(model.parameters(), config.learning_rate, is_mixed)
    live = Live(parts_of(model, optimizer), device=world.device)

    def mean_loss(batches: Iterator) -> float:
        return wrapping.mean_over_ranks(*total_loss(model, batches, world.device))

    # Training
    run.resume(model, optimizer, sharded=["model", "optimizer"])
    reset_peaks(world.device)  # the whole model, which each rank built first, is set-up
    run.keep_best(mean_loss, valid)
    for epoch in run.epochs(loader):
        sampler.set_epoch(epoch)
        for inputs, targets in run.batches(loader):
            set_learning_rate(optimizer, learning_rate_at(run.step, config))
            with live.at_first():
                loss = model(inputs, targets)
                loss.backward()
                model.finish_gradients()
                average_parts(model, mesh.get_group("replicate"))
                clip_gradients(config, model, copies, mesh.get_group("tensor"))
                optimizer.step()
                model.zero_grad()
            run.log(loss)

    # Result
    run.test(test, data.in_words)
    return finish(run, uncut(model, Transformer(*shape), world), run.valid_loss, live)


def ranks_of_a_model(config: Config, world: World, vocab_size: int) -> int:
    """How many ranks hold one model; BadInput where the sizes cannot be cut for them."""
    ranks = config.tensor or world.world_size
    if ranks < 1 or world.world_size % ranks:
        raise BadInput(f"--tensor {ranks} does not fit {world.world_size} rank(s): take a divisor")
    if config.sequence and config.block % ranks:
        raise BadInput(
            f"--sequence with --block {config.block} on {ranks} ranks: take a multiple of {ranks}"
        )
    job.check_heads(config.layers, ranks, "--tensor")
    if config.impl == "torch":
        job.check_even_cut(vocab_size, config.layers, ranks)
    return ranks


def cut_over(config: Config, parts: Parts, whole: Transformer, mesh: DeviceMesh) -> nn.Module:
    """Cut the model over the ranks of this rank's row of the mesh."""
    is_native = config.impl == "torch"
    model = cut(whole, is_native, config.sequence, mesh["tensor"], config.seed, parts)
    is_half = config.dtype == "bfloat16"
    autocast = torch.autocast(mesh.device_type, torch.bfloat16, enabled=is_half)
    model.forward = autocast(model.forward)
    return model


def average_parts(model: nn.Module, replicas: dist.ProcessGroup) -> None:
    """Replace each part of a gradient by its mean over the replicas of this part."""
    for param in model.parameters():
        part = param.grad.to_local() if is_dtensor(param.grad) else param.grad
        dist.all_reduce(part, group=replicas)
        part /= dist.get_world_size(replicas)


def clip_gradients(
    config: Config, model: nn.Module, copies: Sequence[nn.Parameter], group: dist.ProcessGroup
) -> None:
    """Scale all gradients, if that was asked for, by one norm of the whole.

    Args:
        copies: parameters that are whole on every rank of `group`: they count once. A DTensor
            knows by itself how it is cut.
    """
    if not config.clip:
        return
    params = [param for param in model.parameters() if param.grad is not None]
    if config.impl == "torch":
        for param in params:
            param.grad = added_up(param.grad)
        norm = torch.stack(whole_norms([param.grad for param in params])).norm()
        clip_grads_with_norm_(params, config.clip, norm, foreach=False)
    else:
        kept = set(copies)
        clip_grad_norm([one for one in params if one not in kept], config.clip, [group], copies)


def uncut(model: nn.Module, plain: nn.Module, world: World) -> nn.Module:
    """Set `plain` to the whole weights on rank 0; returns it on all ranks."""
    if isinstance(model, Native):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model.module, options=options)
    else:
        state = split_model.whole_state(model, plain)
    if world.is_main:
        plain.load_state_dict(state)
    return plain


if __name__ == "__main__":
    command_line(main, Config)
