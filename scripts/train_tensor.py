"""Train the language model with every matrix cut over ranks, and replicas of that if you like.

torchrun --standalone --nproc-per-node=4 scripts/train_tensor.py --tensor 2 --sequence
bash sbatch/tensor.sbatch --impl mine       with your own functions in it
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.utils import clip_grads_with_norm_
from torch.utils.data import DataLoader

from manyhands.checkpoint.checkpoints import ShardedCheckpoints
from manyhands.checkpoint.pieces import is_dtensor
from manyhands.data import corpus
from manyhands.ddp import wrapping
from manyhands.fsdp.clip import clip_grad_norm
from manyhands.instruments.live import Live, parts_of
from manyhands.instruments.meters import reset_peaks
from manyhands.jobs import mine
from manyhands.layerwise.norms import added_up, whole_norms
from manyhands.models.transformer import Transformer, flops_per_token, total_loss
from manyhands.ranks.runtime import BadInput, World, command_line
from manyhands.tensor import dtensor, sequence
from manyhands.tensor import model as split_model
from manyhands.training.report import finish
from manyhands.training.run import Run, TrainConfig, learning_rate_at, set_learning_rate

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


class Parts(NamedTuple):
    """The exercises of lesson 13 that a job can use."""

    TensorParallel: Callable = split_model.TensorParallel
    TensorSequenceParallel: Callable = sequence.TensorSequenceParallel
    data_place: Callable = split_model.data_place


def main(config: Config) -> float:
    """Train, test, write the report; return the best validation loss in nats per token."""
    if not config.clip >= 0:
        raise BadInput(f"clip is {config.clip}: take a positive norm, or 0 for no limit")
    # Inside it cross_entropy takes scores that are cut by the vocabulary, as DTensors.
    with loss_parallel() if config.impl == "torch" else nullcontext():
        return mine.start("tensor", config, Parts, train)


def train(config: Config, world: World, parts: Parts) -> float:
    # Data
    data = corpus.of(config)
    world.print(data.note)
    shape = (data.tokenizer.vocab_size, config.block, config.layers)
    ranks = ranks_of_a_model(config, world, shape[0])
    share, num_shares = parts.data_place(world.rank, world.world_size, ranks)
    run = Run(
        config,
        world,
        "tensor",
        num_samples=len(data.train),
        checkpoints=ShardedCheckpoints,
        flops_per_token=flops_per_token(*shape),
        floor=data.entropy_floor,
        data_sha256=data.sha256,
        num_shares=num_shares,
    )
    batch = config.batch // num_shares
    sampler = corpus.ShardedSampler(len(data.train), share, num_shares, config.seed)
    loader = DataLoader(data.train, batch, sampler=sampler, drop_last=True)
    valid, test = corpus.held_out(data, batch, share, num_shares)

    # Model
    mesh = init_device_mesh(world.device.type, (num_shares, ranks), mesh_dim_names=MESH)
    whole = Transformer(*shape).to(world.device)
    before = set(whole.parameters())
    model = cut(config, parts, whole, mesh)
    del whole
    copies = [param for param in model.parameters() if param in before]  # on every tensor rank
    # For PyTorch's plan, not fused: that takes no mixture of DTensors and plain tensors.
    adamw = {"foreach": False} if config.impl == "torch" else {"fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, **adamw)
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


class Native(nn.Module):
    """PyTorch's cut model, called like TensorParallel."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss as a plain scalar."""
        return self.module(inputs, targets).full_tensor()

    def finish_gradients(self) -> None:
        """Do nothing: DTensor sums the gradients of norms when the optimizer's step reads them."""


def ranks_of_a_model(config: Config, world: World, vocab_size: int) -> int:
    """How many ranks hold one model; BadInput where the sizes cannot be cut for them."""
    ranks = config.tensor or world.world_size
    if ranks < 1 or world.world_size % ranks:
        raise BadInput(f"--tensor {ranks} does not fit {world.world_size} rank(s): take a divisor")
    if config.sequence and config.block % ranks:
        raise BadInput(
            f"--sequence with --block {config.block} on {ranks} ranks: take a multiple of {ranks}"
        )
    if config.layers < ranks:
        raise BadInput(
            f"{config.layers} heads cannot be shared by {ranks} ranks: take --layers {ranks} (it "
            "gives as many heads), or a smaller --tensor"
        )
    if config.impl == "torch" and (vocab_size % ranks or config.layers % ranks):
        raise BadInput(
            f"PyTorch's plan cuts evenly, but {vocab_size} tokens and {config.layers} heads are "
            f"not both multiples of {ranks}: take --impl scratch, or fit --vocab and --layers"
        )
    return ranks


def cut(config: Config, parts: Parts, model: Transformer, mesh: DeviceMesh) -> nn.Module:
    """Cut the model over the ranks of this rank's row of the mesh."""
    group = mesh.get_group("tensor")
    if config.impl == "torch":
        model = Native(dtensor.torch_tensor_parallel(model, mesh["tensor"], config.sequence))
    elif config.sequence:
        model = parts.TensorSequenceParallel(model, config.seed, group=group)
    else:
        model = parts.TensorParallel(model, group=group)
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
