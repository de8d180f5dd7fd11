"""Every technique by hand beside PyTorch's own: time and memory of a step, and equal losses.

Both sides begin with equal weights and see equal batches, on all GPUs of the machine, and compute
in bfloat16 on GPUs. They are timed in turn. With one GPU there is a world of one: nothing is sent
then, and what is compared is the work around the messages.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.gpu.measuring import Memory, Rows
from manyhands.gpu.scales import Scale, Shape
from manyhands.instruments.timing import median_s
from manyhands.ways.ready import Make, Ready, Setting, all_samples
from manyhands.ways.registry import NATIVE, WAYS

Step = Callable[[], Tensor]  # a step; returns its loss
FSDP_BATCH = 8  # sequences a rank
SEED = 1


def ddp(device: torch.device, scale: Scale) -> Rows:
    """BucketedDDP against DistributedDataParallel, each with autocast and fused AdamW."""
    return compare_training("DDP", device, scale)


def fsdp(device: torch.device, scale: Scale) -> Rows:
    """FSDP by hand against fully_shard; weights travel and compute in the scale's type."""
    return compare_training("ZeRO-3", device, scale)


def pipeline(device: torch.device, scale: Scale) -> Rows:
    """1F1B by hand against Schedule1F1B: forwards and backwards of two micro-batches a rank."""
    m = 2 * dist.get_world_size()
    size = max(1, scale.split.batch // 4)  # sequences of a micro-batch
    return compare_gradients("pipeline (1F1B)", device, scale, m * size, m)


def tensor(device: torch.device, scale: Scale) -> Rows:
    """TensorParallel against PyTorch's plan: forward and backward of a batch that all ranks see."""
    return compare_gradients("tensor", device, scale, scale.split.batch)


# ---- steps -------------------------------------------------------------------------------------


def setting_of(shape: Shape, batch: int, micro_batches: int = 1) -> Setting:
    """What the ways are told beside the model."""
    return Setting(shape.layers, shape.vocab, shape.block, batch, micro_batches, SEED)


def begin(shape: Shape, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model with the weights that all sides begin with."""
    torch.manual_seed(SEED)
    return shape.build(device, dtype)


def batch_of(shape: Shape, device: torch.device, batch: int) -> tuple[Tensor, Tensor]:
    """The same batch on every rank."""
    torch.manual_seed(SEED)
    return shape.tokens(device, batch)


def train_step(make: Make, shape: Shape, device: torch.device, **options: object) -> Step:
    """A step of a replica or of a sharded model with its own batch and fused AdamW."""
    return step_of(make(begin(shape, device), setting_of(shape, 0), **options), shape, device)


def step_of(ready: Ready, shape: Shape, device: torch.device) -> Step:
    """The same of what is set up: every rank takes the whole of one batch."""
    batch = batch_of(shape, device, min(FSDP_BATCH, shape.batch))
    return partial(ready._replace(share=all_samples).step, *batch)


def compare_training(name: str, device: torch.device, scale: Scale) -> Rows:
    """Both sides of a way that shares the samples, with an optimizer's step."""
    shape = scale.small
    makers = {
        side: partial(train_step, ways[name], shape, device, dtype=scale.dtype)
        for side, ways in (("by hand", WAYS), ("native", NATIVE))
    }
    return [compare(shape, device, scale, makers)]


def compare_gradients(
    name: str, device: torch.device, scale: Scale, batch: int, m: int = 1
) -> Rows:
    """Both sides of a way that cuts the model, up to its gradients."""
    shape = scale.split
    tokens = batch_of(shape, device, batch)

    def make(way: Make) -> Step:
        ready = way(begin(shape, device, scale.dtype), setting_of(shape, batch, m))
        return partial(cleared, ready.model, partial(ready.forward_backward, *tokens))

    makers = {"by hand": partial(make, WAYS[name]), "native": partial(make, NATIVE[name])}
    return [compare(shape, device, scale, makers)]


def cleared(module: nn.Module, call: Step) -> Tensor:
    """Call it, and drop the gradients that it left."""
    loss = call()
    module.zero_grad()
    return loss


def compare(
    shape: Shape, device: torch.device, scale: Scale, makers: dict[str, Callable[[], Step]]
) -> dict[str, object]:
    """The row of a technique: each side's first loss, rank 0's peak (bytes) and step time (s)."""
    row: dict[str, object] = {"model": shape.name, "ranks": dist.get_world_size()}
    steps = []
    for name, make in makers.items():
        with Memory(device) as gauge:
            steps.append(make())
            row[f"loss {name}"] = float(steps[-1]())
            gauge.begin_peak()  # from now on there is optimizer state
            steps[-1]()
            row[f"{name} peak_bytes"] = gauge.peak()
    times_s = median_s(steps, scale.steps, device)
    return row | {f"{name} (s)": time_s for name, time_s in zip(makers, times_s, strict=True)}
