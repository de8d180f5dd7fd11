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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

from manyhands.data_parallel import replicas
from manyhands.ddp import wrapping
from manyhands.fsdp import fully_shard, units
from manyhands.gpu.measuring import Memory, Rows
from manyhands.gpu.scales import Scale, Shape
from manyhands.instruments.timing import median_s
from manyhands.models.transformer import token_loss
from manyhands.pipeline import engine, schedules, stages, wiring
from manyhands.tensor import dtensor, model

Step = Callable[[], Tensor | None]  # a step; returns its loss where the rank knows it
FSDP_BATCH = 8  # sequences a rank
SEED = 1


def ddp(device: torch.device, scale: Scale) -> Rows:
    """BucketedDDP against DistributedDataParallel, each with autocast and fused AdamW."""
    wraps = {"by hand": replicas.BucketedDDP, "native": wrapping.torch_ddp}
    shape = scale.small

    def make(wrap: Callable) -> Step:
        wrapped = wrap(begin(shape, device))
        return train_step(wrapped, shape, device, autocast=scale.dtype)

    return [compare(shape, device, scale, {name: partial(make, wraps[name]) for name in wraps})]


def fsdp(device: torch.device, scale: Scale) -> Rows:
    """FSDP by hand against fully_shard; weights travel and compute in the scale's type."""
    shape = scale.small

    def by_hand() -> Step:
        whole = begin(shape, device)
        wrapped = units.FSDP(whole, list(whole.blocks), dtype=scale.dtype)
        return train_step(wrapped, shape, device)

    def native() -> Step:
        wrapped = shard(begin(shape, device), device, scale)
        return train_step(wrapped, shape, device)

    return [compare(shape, device, scale, {"by hand": by_hand, "native": native})]


def pipeline(device: torch.device, scale: Scale) -> Rows:
    """1F1B by hand against Schedule1F1B: forwards and backwards of two micro-batches a rank."""
    shape, rank, p = scale.split, dist.get_rank(), dist.get_world_size()
    m = 2 * p
    size = max(1, shape.batch // 4)  # sequences of a micro-batch
    inputs, targets = batch_of(shape, device, m * size)

    def own() -> dict[int, nn.Module]:
        layers = stages.layers_of(begin(shape, device, scale.dtype))
        return {rank: stages.cut(layers, stages.partition([1.0] * len(layers), p))[rank]}

    def by_hand() -> Step:
        mine = own()
        sizes = size, shape.block, shape.width
        schedule = schedules.one_f_one_b(p, m)
        runner = engine.Pipeline(mine, schedule, token_loss, sizes, dtype=scale.dtype)
        return partial(cleared, mine[rank], partial(runner.step, inputs, targets))

    def native() -> Step:
        mine = own()
        schedule = wiring.torch_pipeline(mine, p, m, token_loss, "1f1b")

        def run() -> Tensor | None:
            losses: list[Tensor] = []
            given = [inputs] if rank == 0 else []
            wanted = {"target": targets, "losses": losses} if rank == p - 1 else {}
            schedule.step(*given, **wanted)
            return torch.stack(losses).mean().detach() if losses else None

        return partial(cleared, mine[rank], run)

    return [compare(shape, device, scale, {"by hand": by_hand, "native": native})]


def tensor(device: torch.device, scale: Scale) -> Rows:
    """TensorParallel against PyTorch's plan: forward and backward of a batch that all ranks see."""
    shape = scale.split
    inputs, targets = batch_of(shape, device, shape.batch)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    def by_hand() -> Step:
        split = model.TensorParallel(begin(shape, device, scale.dtype))

        def run() -> Tensor:
            loss = split(inputs, targets)
            loss.backward()
            split.finish_gradients()
            return loss.detach()

        return partial(cleared, split, run)

    def native() -> Step:
        split = dtensor.torch_tensor_parallel(begin(shape, device, scale.dtype), mesh)

        def run() -> Tensor:
            with loss_parallel():
                loss = split(inputs, targets).full_tensor()
                loss.backward()
            return loss.detach()

        return partial(cleared, split, run)

    return [compare(shape, device, scale, {"by hand": by_hand, "native": native})]


# ---- steps -------------------------------------------------------------------------------------


def begin(shape: Shape, device: torch.device, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model with the weights that all sides begin with."""
    torch.manual_seed(SEED)
    return shape.build(device, dtype)


def batch_of(shape: Shape, device: torch.device, batch: int) -> tuple[Tensor, Tensor]:
    """The same batch on every rank."""
    torch.manual_seed(SEED)
    return shape.tokens(device, batch)


def shard(whole: nn.Module, device: torch.device, scale: Scale, offload: bool = False) -> nn.Module:
    """PyTorch's fully_shard, block by block, over all ranks."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    dtype = scale.dtype
    return fully_shard.torch_fsdp(whole, list(whole.blocks), mesh, dtype=dtype, offload=offload)


def train_step(
    wrapped: nn.Module,
    shape: Shape,
    device: torch.device,
    autocast: torch.dtype | None = None,
) -> Step:
    """A step of a replica or of a sharded model with its own batch and fused AdamW."""
    optimizer = torch.optim.AdamW(wrapped.parameters(), fused=True)
    inputs, targets = batch_of(shape, device, min(FSDP_BATCH, shape.batch))

    def step() -> Tensor:
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            loss = wrapped(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def cleared(module: nn.Module, call: Step) -> Tensor | None:
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
            row[f"loss {name}"] = told(steps[-1]())
            gauge.begin_peak()  # from now on there is optimizer state
            steps[-1]()
            row[f"{name} peak_bytes"] = gauge.peak()
    times_s = median_s(steps, scale.steps, device)
    return row | {f"{name} (s)": time_s for name, time_s in zip(makers, times_s, strict=True)}


def told(loss: Tensor | None) -> float:
    """The loss of the last rank that knows one, on all ranks."""
    losses: list = [None] * dist.get_world_size()
    dist.all_gather_object(losses, None if loss is None else float(loss))
    return [one for one in losses if one is not None][-1]
