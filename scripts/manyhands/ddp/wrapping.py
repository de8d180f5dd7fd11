"""What data parallelism needs in a real job, beyond the averaging of gradients.

    rank 0: 2 losses, sum 10 --+
                               +-- all-reduce: sum 60, count 52 --> mean 1.15 on every rank
    rank 1: 50 losses, sum 50 -+

    mean_over_ranks   one number from all ranks' validation data: 16 bytes per rank
    torch_ddp         PyTorch's data parallelism; lesson 05's BucketedDDP is the same by hand

Cost of a step with either: see data_parallel/replicas.py.
Source: Li et al. 2020, "PyTorch Distributed", https://arxiv.org/abs/2006.15704.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


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
    """Wrap `module` in PyTorch's DDP, with buckets of at most `bucket_mb` MiB.

    `device_ids` is [number of the GPU] where the module is on a GPU, and None on the CPU; all other
    options keep torch's defaults. Beyond what `BucketedDDP` does, torch's class broadcasts rank 0's
    buffers before each forward, and can find unused parameters, which is off by default.
    """
    device = next(module.parameters()).device
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(module, device_ids=ids, bucket_cap_mb=bucket_mb)
