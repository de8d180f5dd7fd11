"""Fully sharded data parallelism, ZeRO stage 3: weights, gradients and optimizer state are all 1/n.

    forward    gather unit 1 | compute 1, free 1 | compute 2, free 2 | ...   a unit: a layer whose
                 start to gather unit 2 ^ ... 3 ^                            weights come together
    backward   gather unit 2 | compute 2, free 2, reduce-scatter its gradients | ... 1 ...

The root unit holds what is in no other: embedding, last norm, head. It stays whole from forward to
the end of backward. Price for P parameters in fp32 with AdamW: 16 P/n bytes a rank; the whole
weights of the root and of two more units (one computes, the next one comes); and the gradients of
one, besides those of the root, which wait for the embedding's at the end of backward. Units are
gathered twice and reduced once: 3 (n-1)/n x 4P bytes on the wire, where an all-reduce sends
2 (n-1)/n x 4P.

Source: Zhao et al. 2023, "PyTorch FSDP", https://arxiv.org/abs/2304.11277, section 3.
"""

from itertools import chain

from manyhands.fsdp.flat import ShardedFlat
from manyhands.fsdp.model import ShardedModel


class FSDP(ShardedModel):
    """Keep 1/N of weights, gradients and optimizer state; a unit is whole only while it computes.

    `loss.backward()` leaves mean gradients in the shards, which are this module's parameters.
    `units[index]` lists a unit's Flats, `trainable[index]` those of them that get gradients.
    """

    make_flat = ShardedFlat

    def before_forward(self, index: int) -> None:
        """Make unit `index` whole, and start the next one. Before the root's forward, free all."""
        if index == 0:  # weights still gathered may date from before the last step
            for flat in chain(*self.units):
                flat.free()
        for flat in self.units[index]:
            flat.wait()
        if index + 1 < len(self.units):
            for flat in self.units[index + 1]:
                flat.start()

    def after_forward(self, index: int) -> None:
        """If `self.reshard`, free unit `index`, which backward gathers again; the root stays."""
        if index > 0 and self.reshard:
            for flat in self.units[index]:
                flat.free()

    def before_backward(self, index: int) -> None:
        """Make unit `index` whole, and start the one before it; for the root, the last unit."""
        for flat in self.units[index]:
            flat.wait()
        if index != 1:  # before unit 1 comes the root, whose backward began first
            for flat in self.units[index - 1]:
                flat.start()

    def after_backward(self, index: int) -> None:
        """All gradients of unit `index` are there: free its trainable Flats, then reduce them.

        Each is freed first, so that its whole weights and the room for its reduction never exist
        at the same time.
        """
        for flat in self.trainable[index]:
            flat.free()
            flat.reduce()
