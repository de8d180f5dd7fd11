"""Wrong answers to lesson 08 that its checks once took for right."""

import torch
import torch.distributed as dist

from manyhands.layerwise.base import where_not_zero
from manyhands.layerwise.optimizers import LAMB, LARC, LARS, NovoGrad


class LARSOfALocalNorm(LARS):
    """The norms are those of this rank's part."""

    def update(self, weight, direction, size, length, options):
        return super().update(weight, direction, weight.norm(), direction.norm(), options)


def by_shape(kind):
    """What is kept for a weight is found by its shape."""

    class ByShape(kind):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.kept = {}

        def direction(self, weight, options):
            self.state[weight] = self.kept.setdefault(tuple(weight.shape), {})
            return super().direction(weight, options)

    return ByShape


def kept_elsewhere(kind):
    """What is kept for a weight stands in a dict of its own, and in no state_dict."""

    class KeptElsewhere(kind):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.kept = {}

        def direction(self, weight, options):
            self.state[weight] = self.kept.setdefault(weight, {})
            return super().direction(weight, options)

        def update(self, weight, *rest):
            ratio = super().update(weight, *rest)
            del self.state[weight]
            return ratio

    return KeptElsewhere


class LARCWithoutARate(LARC):
    """At a rate of 0 this is 0 / 0."""

    def ratio(self, size, length, options):
        decay = options["weight_decay"] * (options["decay_in_ratio"] == "sum")
        wanted = options["trust"] * size / (length + decay * size + options["eps"])
        ratio = wanted.clamp(max=options["lr"]) / options["lr"]
        return where_not_zero(ratio, size, length, options)


class LAMBOfALocalNorm(LAMB):
    """|w| is that of this rank's part."""

    def update(self, weight, direction, size, length, options):
        return super().update(weight, direction, weight.norm(), length, options)


class NovoGradOfALocalNorm(NovoGrad):
    """|g| is that of this rank's part."""

    def update(self, weight, direction, size, length, options):
        return super().update(weight, direction, size, weight.grad.norm(), options)


def norms_of_sent_shards(shards, group=None, order=2.0):
    """One message, in which the shards travel."""
    rows = [None] * dist.get_world_size(group)
    dist.all_gather_object(rows, [shard.contiguous() for shard in shards], group=group)
    wholes = (torch.cat([part.flatten() for part in parts]) for parts in zip(*rows, strict=True))
    return torch.stack([torch.linalg.vector_norm(whole.double(), order) for whole in wholes])


LOCAL = "measures the norms of whole weights"
ELSEWHERE = "goes wrong where a new optimizer goes on"
WRONG = {
    "8.2": [(LARSOfALocalNorm, LOCAL), (by_shape(LARS), ""), (kept_elsewhere(LARS), ELSEWHERE)],
    "8.3": [(LARCWithoutARate, "become nan or inf")],
    "8.4": [(LAMBOfALocalNorm, LOCAL), (by_shape(LAMB), ""), (kept_elsewhere(LAMB), ELSEWHERE)],
    "8.5": [
        (NovoGradOfALocalNorm, LOCAL),
        (by_shape(NovoGrad), ""),
        (kept_elsewhere(NovoGrad), ELSEWHERE),
    ],
    "8.6": [(norms_of_sent_shards, "norms travel, and no shards")],
}
