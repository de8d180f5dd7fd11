"""Batch norm when the batch is divided: statistics of each part, or of the whole batch.

    one process    [x x x x x x x x]  one mean, one variance
    ghost          [x x x x][x x x x]  a mean and a variance for each part: noise, and no message
    synchronised   [x x x x]-[x x x x]  the parts' sums are added over the ranks: as one process

Data parallelism makes ghost batches by itself, because each replica normalises what it sees.
Price of synchronising: two all-reduces of C + 1 and C numbers per norm and forward pass, one of 2C
per backward pass, where C is the number of channels; each of them waits for the slowest rank.
Sources: Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167 (the norm and its gradient);
Hoffer et al. 2017, https://arxiv.org/abs/1705.08741 (ghost batches).
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable


class NormOverRanks(torch.autograd.Function):
    """Normalise each channel by its mean and variance over the batches of all ranks."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, eps: float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Normalised x, and what the running statistics need.

        Args:
            x: this rank's part of the batch, float32 or float64; it may be empty. (B/N, C, ...)

        Returns: x_hat (B/N, C, ...), and of the whole batch the mean (C,), the variance (C,), which
            divides by the count, and the count, a number without dimensions.
        """
        axes = [axis for axis in range(x.dim()) if axis != 1]
        own_count = x.new_full((1,), x.numel() // x.shape[1])
        sums = torch.cat([x.sum(axes), own_count])
        dist.all_reduce(sums, group=group)
        count = sums[-1]
        mean = sums[:-1] / count
        centred = x - _per_channel(mean, x)
        squares = centred.square().sum(axes)  # of differences: squares of x itself would cancel
        dist.all_reduce(squares, group=group)
        variance = squares / count
        scale = (variance + eps).rsqrt()
        x_hat = centred * _per_channel(scale, x)
        ctx.save_for_backward(x_hat, scale, count)
        ctx.group = group
        ctx.mark_non_differentiable(mean, variance, count)
        return x_hat, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of x, by one all-reduce: each x moves mean and variance of all ranks."""
        x_hat, scale, count = ctx.saved_tensors
        axes = [axis for axis in range(grad.dim()) if axis != 1]
        sums = torch.cat([grad.sum(axes), (grad * x_hat).sum(axes)])
        dist.all_reduce(sums, group=ctx.group)
        of_grad, of_product = (_per_channel(one, grad) for one in (sums / count).chunk(2))
        return (grad - of_grad - x_hat * of_product) * _per_channel(scale, grad), None, None


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    """(C,) as (1, C, 1, ...), to multiply a tensor (B, C, ...)."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


class AnyBatchNorm(nn.modules.batchnorm._BatchNorm):
    """torch's batch norm for inputs of any shape (B, C, ...)."""

    def _check_input_dim(self, x: Tensor) -> None:
        if x.dim() < 2:
            raise ValueError(f"a batch norm takes (B, C, ...), and was given {tuple(x.shape)}")


class SyncBatchNorm(AnyBatchNorm):
    """Batch norm over the batches of all ranks; in eval mode an ordinary batch norm.

    In training every rank of the group calls it, also one whose batch is empty. Where all are, the
    running statistics stay as they are. The gradients of its weight and bias are those of this
    rank's batch, as all others that DDP averages. 16-bit inputs are normalised in float32 and come
    out in their own type. In eval mode nothing is sent: without running statistics each rank then
    normalises by those of its own batch, as torch's class does.

    Args:
        as of nn.BatchNorm2d, and `group`: the ranks that share a batch.
    """

    def __init__(
        self, num_features: int, *args: object, group: dist.ProcessGroup | None = None, **named
    ) -> None:
        super().__init__(num_features, *args, **named)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """(B/N, C, ...) in and out."""
        self._check_input_dim(x)
        if not self.training:
            return super().forward(x)
        # In 16 bits a sum over a batch would have few correct digits, and large counts none.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        out, mean, variance, count = NormOverRanks.apply(wide, self.eps, self.group)
        if self.track_running_stats:
            self._keep(mean, variance, count)
        if self.weight is not None:
            out = out * _per_channel(self.weight, x)
        if self.bias is not None:
            out = out + _per_channel(self.bias, x)
        return out.to(x.dtype)

    @torch.no_grad()
    def _keep(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Move the running statistics; they estimate, so the variance divides by count - 1.

        In float64, because 1 / number of batches is not exact in the type of the statistics.
        """
        self.num_batches_tracked += count > 0
        share = self.momentum
        if share is None:
            share = 1 / self.num_batches_tracked.clamp(min=1).double()
        estimate = variance * count / (count - 1).clamp(min=1)
        for running, new in ((self.running_mean, mean), (self.running_var, estimate)):
            moved = running.double().lerp(new.double(), share)
            running.copy_(torch.where(count > 0, moved, running))


class GhostBatchNorm(AnyBatchNorm):
    """Batch norm in which every `ghost` samples have statistics of their own, in one process.

    The samples left over after the last whole ghost batch make a smaller one; torch refuses one
    that has a single value per channel. The running statistics move once for each of them. In eval
    mode it is an ordinary batch norm.

    Args:
        as of nn.BatchNorm2d, and `ghost`: samples that share statistics, at least 2.
    """

    def __init__(self, num_features: int, ghost: int, **named: object) -> None:
        super().__init__(num_features, **named)
        self.ghost = ghost

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, ...) in and out."""
        self._check_input_dim(x)
        if not self.training:
            return super().forward(x)
        parts = [super(GhostBatchNorm, self).forward(part) for part in x.split(self.ghost)]
        return torch.cat(parts)


PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, AnyBatchNorm)


def convert(model: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Turn every batch norm of a model into one over all ranks, in place; returns the model.

    Each norm stays the same object and only changes its class. So its parameters, its hooks, its
    mode and all names under which the model has it stay as well. Norms that are synchronised
    already are left as they are.

    Raises:
        ValueError: a norm of another class, such as a lazy one. Nothing has been changed then.
    """
    norms = {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm)
        and not isinstance(part, SyncBatchNorm | nn.SyncBatchNorm)
    }
    for name, norm in norms.items():
        if type(norm) not in PLAIN:
            where = f"the batch norm {name!r}" if name else "the model"
            raise ValueError(
                f"{where} is a {type(norm).__name__}, which may do more than a batch norm: replace "
                "it by a SyncBatchNorm yourself, and run a batch through a lazy one first"
            )
    for norm in norms.values():
        norm.__class__ = SyncBatchNorm
        norm.group = group
    return model
