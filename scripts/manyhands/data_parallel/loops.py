"""Training loops of data parallelism: with a parameter server, and with an all-reduce.

    parameter server                     all-reduce
    worker 1 --gradient--> server        rank 0 <--gradients--> rank 1
    worker 2 --gradient--> server        every rank has an optimizer, and steps for itself
    worker 1 <--weights--- server
    worker 2 <--weights--- server        the optimizer is on the server only

Cost of a step for P parameters in fp32 and n workers: the server receives n x 4P bytes and sends
as many, 2n x 4P in all. In a ring of n ranks each sends 2 (n-1)/n x 4P bytes and receives as many.

Source: Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server",
https://www.usenix.org/conference/osdi14/technical-sessions/presentation/li_mu; Dean et al. 2012,
"Large Scale Distributed Deep Networks" (DistBelief), NIPS 25.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.data_parallel.replicas import (
    average_gradients,
    broadcast_state,
    pack,
    sum_type,
    unpack,
)

STEPS = {  # of one GPU, under letters that say nothing about their order
    "A": "forward computes the output and the loss",
    "B": "the loss is copied to the CPU, to be printed",
    "C": "the optimizer writes new weights",
    "D": "a model with random weights is built on the GPU",
    "E": "backward computes the gradients of the first layer",
    "F": "the batch is copied to GPU memory",
    "G": "the CPU reads the samples of this batch from the disk",
    "H": "backward computes the gradients of the last layer",
}
CHANGES = {  # what changes when several ranks train on the same batch
    "share": "each rank works on its own samples of the batch",
    "equal": "rank 0's weights are sent to all ranks, so that the replicas start equal",
    "mean": "the gradients of all ranks are averaged",
    "once": "the losses of all ranks are averaged, and one rank prints",
}


def order_of_steps() -> str:
    """The 8 letters of STEPS as one string, in the order in which one GPU trains its first batch.

    Where two steps do not depend on each other, either may come first.
    """
    return "DGFAHECB"


def steps_that_change() -> dict[str, str]:
    """For each change in CHANGES, the letter of the first step that it alters or delays.

    A change alters a step whose result is another one, and delays a step that has to wait for it.
    A step that could go on without waiting does not count.
    """
    return {"share": "G", "equal": "A", "mean": "C", "once": "B"}


def worker_step(module: nn.Module, server: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """After backward: send all gradients, packed, to the server, and take its new weights.

    One message each way, packed in the order of module.parameters() without the frozen ones.
    Every trainable parameter has a gradient, and all are of one type. `server` counts inside the
    group and need not be 0.
    """
    params = [param for param in module.parameters() if param.requires_grad]
    dist.send(pack([param.grad for param in params]), group=group, group_dst=server)
    weights = pack(params)
    dist.recv(weights, group=group, group_src=server)
    unpack(weights, params)


def server_step(
    module: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
) -> None:
    """Take the gradients of all other ranks, step with their mean, and send the new weights back.

    Called on the server, which may be any rank of the group and computes no gradient itself: with
    n workers the group has n+1 ranks. The messages are those of `worker_step`. Each call takes
    one step: before it, each trainable parameter's .grad is set to the mean, and nothing of the
    step before is left in it.
    """
    server, world_size = dist.get_rank(group), dist.get_world_size(group)
    workers = [rank for rank in range(world_size) if rank != server]
    params = [param for param in module.parameters() if param.requires_grad]
    total, arrived = torch.zeros_like(pack(params)), pack(params)
    total = total.to(sum_type(total.dtype))
    for worker in workers:
        dist.recv(arrived, group=group, group_src=worker)
        total += arrived
    for param in params:
        param.grad = torch.empty_like(param)
    unpack(total, [param.grad for param in params], len(workers))
    optimizer.step()
    for worker in workers:
        dist.send(pack(params), group=group, group_dst=worker)


def train_replicas(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    learning_rate: float,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """Train by all-reduce data parallelism with AdamW and the mean squared error.

    Before: the process group exists; the ranks' models may differ, and all start from rank 0's.
    For each batch of B samples (B is a multiple of N): take this rank's B/N samples (no two ranks
    the same, such as those numbered rank, rank + N, ...); forward; loss; backward; average the
    gradients; update. After: rank 0 returns the model's state_dict, its tensors on the CPU and
    without a graph, ready to be saved; the other ranks return {}.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    broadcast_state(model, group)
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate)
    for inputs, targets in batches:
        outputs = model(inputs[rank::world_size])  # (B/N, ...)
        loss = nn.functional.mse_loss(outputs, targets[rank::world_size])
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model, group=group)
        optimizer.step()
    return {name: value.cpu() for name, value in model.state_dict().items()} if rank == 0 else {}
