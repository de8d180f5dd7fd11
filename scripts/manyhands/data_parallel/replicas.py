"""Data parallelism: every rank holds the whole model and sees its own share of each batch.

    samples 0 2 4 -> rank 0: forward, backward -> its gradient --+
                                                                 +-- mean --> one equal step
    samples 1 3 5 -> rank 1: forward, backward -> its gradient --+

Replicas start equal (`broadcast_state`) and take equal steps. Cost of a step for P parameters in
fp32: all-reduces of 4P bytes, 2 (n-1)/n x 4P bytes sent by each of n ranks in a ring; flat copies
of another 4P bytes. Gradients of 16 bits are added up in fp32, at the same price. loops.py has the
training loops, also that of a parameter server.

    average_gradients   after backward, one all-reduce per parameter: simple, nothing hidden
    average_buckets     after backward, one all-reduce per bucket: fewer messages
    BucketedDDP         during backward, one all-reduce per bucket: hidden behind the computation

BucketedDDP is a BucketSender, which starts the messages, and finishes them itself. It counts on a
gradient, in every backward and on every rank, of all parameters that were trainable when it was
made. PyTorch's DDP has the same limits:

    unused on every rank      nothing is averaged, and the next forward says so; a step that was
                              taken before it, such as the last of a training, lets replicas drift
    unused on one rank only   this rank never sends the parameter's bucket; the others wait for it
                              until it ends or the group's time limit has passed
    unfrozen after wrapping   it is in no bucket, so it is never averaged
    two losses, two backwards where they share layers, the second backward raises an error at the
                              first parameter that gets a second gradient

Source: Li et al. 2020, "PyTorch Distributed", https://arxiv.org/abs/2006.15704, sections 3-4.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

Bucket = list[nn.Parameter]


def broadcast_state(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite every parameter and buffer with those of the group's rank 0, in place.

    A message is one piece of memory. A tensor whose elements do not lie side by side, such as a
    column of a matrix, is sent as a contiguous copy, and copied back.
    """
    for tensor in [*module.parameters(), *module.buffers()]:
        whole = tensor.detach().contiguous()
        dist.broadcast(whole, group=group, group_src=0)
        tensor.detach().copy_(whole)


def average_gradients(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Replace every gradient by its mean over the ranks. Call after backward.

    The mean, not the sum: a rank's loss is already the mean over its B/N samples, so the mean of
    the N gradients is the gradient of the mean over all B. Parameters without a gradient (frozen
    ones) are skipped; a tied parameter is averaged once. The elements of a gradient need not lie
    side by side, and one rank may keep it transposed where another does not.
    """
    for param in module.parameters():
        if param.grad is not None:
            whole = param.grad.contiguous()
            whole = whole.to(sum_type(whole.dtype))
            dist.all_reduce(whole, group=group)
            param.grad.copy_(whole / dist.get_world_size(group))


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which gradients of `dtype` are added up: float32 for those of 16 bits.

    A sum over many ranks may be larger than the largest number of float16, which is 65,504, though
    the mean is not; and in bfloat16 each addition would round to 8 bits.
    """
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def pack(tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Copy tensors of one type into one vector, one after the other."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors], out=out)


def unpack(vector: Tensor, tensors: Sequence[Tensor], divisor: int = 1) -> None:
    """Write a packed vector, divided by `divisor`, back into the tensors."""
    parts = vector.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        torch.div(part.view_as(tensor), divisor, out=tensor.detach())


def make_buckets(params: Iterable[nn.Parameter], bucket_bytes: int) -> list[Bucket]:
    """Pack the trainable parameters, the last one first, into buckets of at most `bucket_bytes`.

    A bucket takes parameters until the next one does not fit, or is of another dtype; that one
    opens the next bucket. A parameter larger than `bucket_bytes` has a bucket of its own. Sizes
    are in bytes: `param.nbytes`. `params` may be a generator, which can be gone through only once.
    """
    buckets: list[Bucket] = []
    for param in reversed([param for param in params if param.requires_grad]):
        fits = buckets and sum(p.nbytes for p in buckets[-1]) + param.nbytes <= bucket_bytes
        if not fits or buckets[-1][0].dtype != param.dtype:
            buckets.append([])
        buckets[-1].append(param)
    return buckets


def average_buckets(buckets: Iterable[Bucket], group: dist.ProcessGroup | None = None) -> None:
    """Replace the gradients by their means over the ranks, after backward: a message per bucket."""
    for bucket in buckets:
        gradients = [param.grad for param in bucket]
        vector = pack(gradients).to(sum_type(gradients[0].dtype))
        dist.all_reduce(vector, group=group)
        unpack(vector, gradients, dist.get_world_size(group))


def watch_arrivals(module: nn.Module) -> list[str]:
    """Return a list to which every later backward appends names, as gradients become ready.

    A parameter's name, as named_parameters() gives it, is appended right after its .grad was
    written. Frozen parameters get no gradient, and torch refuses such a hook for them. The list
    is empty when it is returned.
    """
    arrived: list[str] = []
    for name, param in module.named_parameters():
        if param.requires_grad:
            # A default value is fixed now; a plain `name` would be looked up after the loop.
            param.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    return arrived


class BucketSender(nn.Module):
    """Send gradients during backward, bucket by bucket, while earlier layers still compute.

    Wraps `module` (B/N samples per rank) and copies rank 0's state to all. `bucket_mb` is the
    largest size of a bucket of several parameters, in 10^6 bytes.
    """

    def __init__(
        self, module: nn.Module, bucket_mb: float = 25.0, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__()
        self.module = module
        self.group = group
        self.sync = True
        broadcast_state(module, group)
        self.buckets = make_buckets(module.parameters(), int(bucket_mb * 1e6))
        # Room for a bucket's gradients, and for their sum.
        self.flats = [pack(bucket).to(sum_type(bucket[0].dtype)) for bucket in self.buckets]
        self.bucket_of = {p: i for i, bucket in enumerate(self.buckets) for p in bucket}
        self.num_ready = [0] * len(self.buckets)  # gradients that are ready, by bucket
        self.in_flight: list[dist.Work] = []  # one message per bucket, in bucket order
        self.seen: set[nn.Parameter] = set()  # those counted as ready, each of them once
        self.backward = -1  # number of the backward that gave the last of them
        for param in self.bucket_of:
            # The hook is given the parameter; its .grad has just been written.
            param.register_post_accumulate_grad_hook(self._note_once)
            param.register_post_accumulate_grad_hook(self._on_grad_ready)

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.module(*args, **kwargs)

    def _note_once(self, param: nn.Parameter) -> None:
        """Raise ValueError where `param` gets a second gradient before all of them are averaged.

        Counted twice, it would fill its bucket early; counted after the last bucket was sent, as
        where a second backward completes the first, it would not be sent at all.
        """
        backward = torch._C._current_graph_task_id()  # each call of backward has its own number
        if not any(self.num_ready) and backward != self.backward:
            self.seen.clear()
        if self.sync and param in self.seen:
            name = next(name for name, p in self.module.named_parameters() if p is param)
            raise ValueError(
                f"{name} got a second gradient before all parameters had their first, so their "
                "mean would be wrong: add the losses up and call backward once"
            )
        if self.sync:
            self.seen.add(param)
            self.backward = backward

    def _on_grad_ready(self, param: nn.Parameter) -> None:
        """Count `param` as ready, start each bucket that is full, and finish after the last bucket.

        Buckets start in order, 0 first, on every rank: messages are matched by their order. Calls
        _start with the index of each bucket, and _finish once, when all have started. _start adds
        one work to self.in_flight, and _finish resets the counts. Does nothing while self.sync is
        False.
        """
        if not self.sync:
            return
        self.num_ready[self.bucket_of[param]] += 1
        while len(self.in_flight) < len(self.buckets):
            index = len(self.in_flight)
            if self.num_ready[index] < len(self.buckets[index]):
                return
            self._start(index)
        self._finish()

    def _start(self, index: int) -> None:
        """Copy the gradients into self.flats[index], send it, and append its work to in_flight.

        The all-reduce adds up over self.group. Returns while the message is still on its way.
        """
        flat = pack([param.grad for param in self.buckets[index]], out=self.flats[index])
        self.in_flight.append(dist.all_reduce(flat, group=self.group, async_op=True))

    def _finish(self) -> None:
        """Called once all buckets have started. BucketedDDP waits for them here."""


class BucketedDDP(BucketSender):
    """Average gradients during backward: send them bucket by bucket, and wait at its end.

    `loss.backward()` returns with averaged gradients, so the training loop is that of one process.
    """

    def forward(self, *args: object, **kwargs: object) -> object:
        if any(self.num_ready):
            params = self.module.named_parameters()
            empty = [name for name, p in params if p in self.bucket_of and p not in self.seen]
            raise ValueError(
                f"the last backward gave no gradient to {empty}, so no rank's gradients were "
                "averaged: use these parameters or freeze them"
            )
        return super().forward(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only add up gradients in here; the next backward outside averages the sums."""
        self.sync = False
        try:
            yield
        finally:
            self.sync = True

    def _finish(self) -> None:
        """Wait for every bucket, write the means into the gradients, and reset the counts.

        The next backward finds in_flight empty, and num_ready 0 for each bucket.
        """
        world_size = dist.get_world_size(self.group)
        for bucket, flat, work in zip(self.buckets, self.flats, self.in_flight, strict=True):
            work.wait()
            unpack(flat, [param.grad for param in bucket], world_size)
        self.in_flight.clear()
        self.num_ready = [0] * len(self.buckets)
