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
from torch.autograd.function import FunctionCtx


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
    def backward(ctx: FunctionCtx, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of x: each x moves the mean and the variance of all ranks."""
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

    In training every rank of the group calls it, also one whose batch is empty. The gradients of
    its weight and bias are those of this rank's batch, as all others that DDP averages.

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
        if not self.training and self.running_mean is not None:
            return super().forward(x)
        x_hat, mean, variance, count = NormOverRanks.apply(x, self.eps, self.group)
        if self.training and self.track_running_stats:
            self._keep(mean, variance, count)
        if not self.affine:
            return x_hat
        return x_hat * _per_channel(self.weight, x) + _per_channel(self.bias, x)

    @torch.no_grad()
    def _keep(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Move the running statistics; they estimate, so the variance divides by count - 1."""
        self.num_batches_tracked += 1
        share = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, float(share))
        self.running_var.lerp_(variance * count / (count - 1).clamp(min=1), float(share))


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


def convert(model: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Replace every batch norm of a model by one over all ranks, with the same weights."""
    for name, child in model.named_children():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            options = {"eps": child.eps, "momentum": child.momentum, "affine": child.affine}
            options["track_running_stats"] = child.track_running_stats
            synced = SyncBatchNorm(child.num_features, **options, group=group)
            synced.to(next(iter(child.state_dict().values()), torch.empty(0)))
            synced.load_state_dict(child.state_dict())
            setattr(model, name, synced.train(child.training))
        else:
            convert(child, group)
    return model
