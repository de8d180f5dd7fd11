"""Parameters as one vector, cut into one shard a rank: what ZeRO and FSDP are made of.

    Flat      | a.weight | a.bias | b.weight |0|   one vector, padded to a multiple of n = 3
              |  rank 0  |  rank 1  |  rank 2  |   a rank's shard: the part that it steps

    Flat: the whole stays, the shard is a part of it.    ShardedFlat: the whole comes and goes.

Price for P parameters of 4 bytes: a gather or a reduction sends (n-1)/n x 4P bytes from each rank.
Sources: Rajbhandari et al. 2020, "ZeRO", https://arxiv.org/abs/1910.02054, section 5; Zhao et al.
2023, "PyTorch FSDP", https://arxiv.org/abs/2304.11277, section 3.2 (FlatParameter).
"""

from collections.abc import Callable, Hashable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.collectives.trees import Group
from manyhands.data_parallel.replicas import pack, sum_type
from manyhands.fsdp.guard import guard
from manyhands.fsdp.shards import mark_shard


def all_gather(whole: Tensor, shard: Tensor, group: Group = None) -> dist.Work:
    """Start to fill `whole` (N x S,) with every rank's `shard` (S,), in the order of the ranks."""
    # Renamed in torch 2.13.
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(whole, shard, group=group, async_op=True)


def reduce_scatter(shard: Tensor, whole: Tensor, group: Group = None) -> None:
    """Fill rank r's `shard` (S,) with the sum of all ranks' part r of their `whole` (N x S,).

    It waits for the sum. With NCCL the computing stream waits, so on a GPU, too, backward stops for
    each reduction, and for the all-reduce over replicas; fully_shard has its own stream for them.
    """
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    call(shard, whole, group=group)


class Views:
    """Parameters that are views of one vector, `whole`: what is written into one is in the other.

    A subclass sets params, padding, shard and group.
    """

    def views(self, vector: Tensor) -> list[Tensor]:
        """Parts of a vector (padded P,) in the shapes of the parameters, in their order."""
        *parts, _ = vector.split([*(param.numel() for param in self.params), len(self.padding)])
        return [part.view(param.shape) for part, param in zip(parts, self.params, strict=True)]

    def show(self, whole: Tensor) -> None:
        """Make the parameters views of `whole` (padded P,)."""
        self.whole = whole
        for param, view in zip(self.params, self.views(whole), strict=True):
            param.data = view

    def gather(self) -> dist.Work:
        """Start to fill `whole` from all ranks' shards; done when the returned work is waited for.

        The shards are sent in the type of `whole`, which may be a shorter one.
        """
        return all_gather(self.whole, self.shard.detach().to(self.whole.dtype), self.group)


class Flat(Views):
    """Parameters of a model as one vector, of which this rank owns one of N equal shards."""

    def __init__(self, params: Iterable[nn.Parameter], group: Group = None) -> None:
        """Build the vector, show it to the parameters, and make this rank's shard.

        The parameters are equal on all ranks, of one type, and either all trainable or all frozen.
        Sets self.params (a list), group, num_ranks, replicas (None), padding (a tensor), and

            whole: (padded P,), the parameters one behind the other, then zeros up to a multiple of
                N. The parameters are views of it.
            shard: this rank's part of `whole`, (padded P/N,): a view of it, as a parameter for an
                optimizer, which requires a gradient if the parameters do.
        """
        self.params, self.group, self.replicas = list(params), group, None
        self.num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        padding = -sum(param.numel() for param in self.params) % self.num_ranks
        self.padding = self.params[0].detach().new_zeros(padding)
        self.whole = pack([*self.params, self.padding])
        self.show(self.whole)
        mine = self.whole.chunk(self.num_ranks)[rank]
        self.shard = nn.Parameter(mine, requires_grad=self.params[0].requires_grad)

    def reduce(self) -> None:
        """Turn the parameters' gradients into `shard.grad`, (padded P/N,), and drop them.

        `shard.grad` becomes the mean, over the ranks and over `replicas` if that is a group, of
        this rank's part of the gradients, in the type of `shard`. If it held something already,
        the mean is added to that. Each parameter's own .grad is None afterwards; a parameter
        without one counts as zeros. For shards of 16 bits the sum is taken in float32.
        """
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
        whole = pack([*grads, self.padding.to(grads[0].dtype)]).to(sum_type(self.shard.dtype))
        del grads  # the next lines free the gradients before the reduce-scatter needs room
        for param in self.params:
            param.grad = None
        mine = torch.empty_like(self.shard, dtype=whole.dtype)
        reduce_scatter(mine, whole, self.group)
        num_ranks = self.num_ranks
        if self.replicas is not None:
            dist.all_reduce(mine, group=self.replicas)
            num_ranks *= dist.get_world_size(self.replicas)
        mine /= num_ranks
        mine = mine.to(self.shard.dtype)
        self.shard.grad = mine if self.shard.grad is None else self.shard.grad + mine


class ShardedFlat(Flat):
    """A Flat whose `whole`, in `dtype`, has memory only while it is used; the shard has its own."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        dtype: torch.dtype | None = None,
        replicas: Group = None,
        group: Group = None,
    ) -> None:
        super().__init__(params, group)
        self.replicas = replicas
        self.shard.data = self.shard.data.clone()  # it was a view of the whole
        self.show(self.whole.to(dtype or self.whole.dtype))
        self.coming: dist.Work | None = None
        guard(self.params, self)
        self.free()

    @property
    def is_whole(self) -> bool:
        """The memory is there; its contents may still be on their way."""
        return self.whole.untyped_storage().nbytes() > 0

    def start(self) -> None:
        """Allocate `whole.nbytes` and start to gather, unless it is there or on its way."""
        if not self.is_whole:
            self.whole.untyped_storage().resize_(self.whole.nbytes)
            self.coming = self.gather()

    def wait(self) -> None:
        """Return when the whole is there; starts the gather where nobody has."""
        self.start()
        if self.coming is not None:
            self.coming.wait()
            self.coming = None

    def free(self) -> None:
        """Give the memory back; starts no gather, but waits for one that still writes there."""
        if self.coming is not None:
            self.wait()
        # Autograd's saved weights are views of this storage: it stays, with 0 bytes.
        self.whole.untyped_storage().resize_(0)


def units_of(model: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters of the root unit, which are in no block of the model, and of each block."""
    in_blocks = set(model.blocks.parameters())
    root = [param for param in model.parameters() if param not in in_blocks]
    return [root, *(list(block.parameters()) for block in model.blocks)]


def make_flats(
    params: Iterable[nn.Parameter],
    make: Callable[[list], Flat],
    key_of: Callable[[nn.Parameter], Hashable] | None = None,
) -> list[Flat]:
    """One Flat, made by `make`, for each type, and for trainable and frozen parameters apart.

    Parameters for which key_of differs are kept apart as well, and a Flat's `key` is theirs.

    Parameters may be marked: `param.holders` ranks beyond this group hold the same numbers, as
    lesson 14 does it; it is 1 without a mark. Different marks are kept apart, and a Flat's shard
    gets that of its parameters. It is also marked as a Shard, see shards.py.
    """
    kinds: dict[tuple, list[nn.Parameter]] = {}
    for param in params:
        key = None if key_of is None else key_of(param)
        kind = param.dtype, param.requires_grad, key, getattr(param, "holders", 1)
        kinds.setdefault(kind, []).append(param)
    flats = []
    for (*_, key, holders), some in kinds.items():
        flats.append(make(some))
        flats[-1].key = key
        mark_shard(flats[-1].shard, len(some), flats[-1].group)
        if holders != 1:
            flats[-1].shard.holders = holders
    return flats
