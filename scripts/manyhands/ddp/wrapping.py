"""What data parallelism needs in a real job, beyond the averaging of gradients.

    rank 0: 2 losses, sum 10 --+
                               +-- all-reduce: sum 60, count 52 --> mean 1.15 on every rank
    rank 1: 50 losses, sum 50 -+

    torch_ddp         PyTorch's data parallelism; lesson 05's BucketedDDP is the same by hand
    accumulate        the gradient of several micro-batches, sent once instead of once for each
    mean_over_ranks   one number from all ranks' validation data: 16 bytes per rank

Cost of a step: see data_parallel/replicas.py.
Source: Li et al. 2020, "PyTorch Distributed", https://arxiv.org/abs/2006.15704.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def accumulate(
    model: nn.Module, micro_batches: Sequence[tuple[Tensor, Tensor]], loss_fn: Callable
) -> float:
    """Run backward over all micro-batches, and send the gradients only once, with the last one.

    The gradients that are added to `.grad` are those of the mean loss over all micro-batches and
    all ranks. Nothing is sent for the micro-batches before the last one.

    Args:
        model: data-parallel. `model.no_sync()` is a context without messages.
        micro_batches: of this rank: (inputs, targets), all of the same size; at least one.
        loss_fn: loss_fn(outputs, targets) returns the mean loss of a micro-batch.

    Returns:
        This rank's mean loss over its micro-batches.
    """
    total = 0.0
    for number, (inputs, targets) in enumerate(micro_batches, start=1):
        is_last = number == len(micro_batches)
        with nullcontext() if is_last else model.no_sync():
            # DDP decides in the forward whether the backward will send.
            loss = loss_fn(model(inputs), targets) / len(micro_batches)
            loss.backward()
        total += loss.item()
    return total


def mean_over_ranks(total: Tensor, count: int, group: dist.ProcessGroup | None = None) -> float:
    """The mean over all items of all ranks, from each rank's sum `total` and its `count`.

    `total` is a scalar. It is added up in float64, which holds 15 digits. Ranks may hold different
    numbers of items, also none. Every rank returns the same float, and `total` stays as it was.
    """
    both = torch.stack([total.double(), torch.full_like(total, count, dtype=torch.float64)])  # (2,)
    dist.all_reduce(both, group=group)
    return (both[0] / both[1]).item()


# ---- The same thing in PyTorch ---------------------------------------------------------------


def torch_ddp(module: nn.Module, bucket_mb: float = 25.0) -> DistributedDataParallel:
    """Wrap `module` in PyTorch's DDP, which closes a bucket once it holds `bucket_mb` MiB or more.

    `device_ids` is [number of the GPU] where the module is on a GPU, and None on the CPU; all other
    options keep torch's defaults. Unlike `BucketedDDP`, torch's class broadcasts rank 0's buffers
    before the first forward, and before each one after a forward whose backward averages.
    """
    device = next(module.parameters()).device
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(module, device_ids=ids, bucket_cap_mb=bucket_mb)
