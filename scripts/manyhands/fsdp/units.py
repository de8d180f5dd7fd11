"""Fully sharded data parallelism, ZeRO stage 3: weights, gradients and optimizer state are all 1/n.

    forward    gather unit 1 | compute 1, free 1 | compute 2, free 2 | ...   a unit: a layer whose
                 start to gather unit 2 ^ ... 3 ^                            weights come together
    backward   gather unit 2 | compute 2, free 2, reduce-scatter its gradients | ... 1 ...

The root unit holds what is in no other: embedding, last norm, head. It stays whole from forward to
the end of backward. Price for P parameters in fp32 with AdamW: 16 P/n bytes a rank; the whole
weights of the root and of two more units (one computes, the next one comes), and the gradients of
one. Units are gathered twice and reduced once: 3 (n-1)/n x 4P bytes on the wire, where an
all-reduce sends 2 (n-1)/n x 4P.

Source: Zhao et al. 2023, "PyTorch FSDP", https://arxiv.org/abs/2304.11277, section 3.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map

from manyhands.collectives.trees import Group
from manyhands.data_parallel.replicas import broadcast_state
from manyhands.fsdp.flat import ShardedFlat, make_flats


class FSDP(nn.Module):
    """Keep 1/N of weights, gradients and optimizer state; a unit is whole only while it computes.

    `loss.backward()` leaves mean gradients in the shards, which are this module's parameters.

    Args:
        module: equal weights are not needed; those of the group's rank 0 count.
        units: modules inside it, in the order of their forward calls. A parameter that two of them
            share belongs to the root unit, as does all the rest.
        dtype: to send weights and to compute in: inputs of a unit are cast to it, too. Gradients
            are summed in the parameters' type.
        reshard: free a unit after its forward; False keeps it whole until its backward.
        replicas: group of the ranks that hold the same shard in other copies of the model.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[nn.Module],
        dtype: torch.dtype | None = None,
        reshard: bool = True,
        replicas: Group = None,
        group: Group = None,
    ) -> None:
        super().__init__()
        self.hidden, self.reshard = (module,), reshard  # in a tuple: only shards are parameters
        broadcast_state(module, group)  # also the buffers; then the same from replica 0 to the rest
        if replicas is not None:
            broadcast_state(module, replicas)
        uses = Counter(param for unit in units for param in unit.parameters())
        shares = [[p for p in unit.parameters() if uses[p] == 1] for unit in units]
        root = [param for param in module.parameters() if uses[param] != 1]
        self.units = [
            make_flats(params, lambda some: ShardedFlat(some, dtype, replicas, group))
            for params in [root, *shares]
        ]
        self.shards = nn.ParameterList(flat.shard for flat in chain(*self.units))
        self.dtype = dtype
        self.num_ready = [0] * len(self.units)  # gradients that are there, by unit
        self.is_backward = False
        for index, part in enumerate([module, *units]):
            self._watch(index, part)

    @property
    def module(self) -> nn.Module:
        return self.hidden[0]

    def forward(self, *args: object, **kwargs: object) -> object:
        if any(self.num_ready):
            units = [index for index, count in enumerate(self.num_ready) if count]
            raise ValueError(f"in units {units} a parameter got no gradient: use or freeze it")
        return self.module(*args, **kwargs)

    def train(self, mode: bool = True) -> "FSDP":
        self.module.train(mode)
        return super().train(mode)

    def cast(self, value: object) -> object:
        """A tensor of numbers with a fraction in the type to compute in; all else as it is."""
        is_cast = self.dtype is not None and isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self.dtype) if is_cast else value

    def _watch(self, index: int, part: nn.Module) -> None:
        """Call the four methods below around forward and backward of unit `index`."""

        def before_forward(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            self.before_forward(index)
            return tree_map(self.cast, (args, kwargs))

        def after_forward(_: nn.Module, __: tuple, output: object) -> None:
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            if asked := [tensor for tensor in tensors if tensor.requires_grad]:
                # Called when the first gradient of an output is there.
                register_multi_grad_hook(asked, lambda _: self.before_backward(index), mode="any")
            self.after_forward(index)

        def after_gradient(_: nn.Parameter) -> None:
            self.num_ready[index] += 1
            if self.num_ready[index] == len(trainable):
                self.num_ready[index] = 0
                self.after_backward(index)

        part.register_forward_pre_hook(before_forward, with_kwargs=True)
        part.register_forward_hook(after_forward)
        trainable = [p for flat in self.units[index] for p in flat.params if p.requires_grad]
        for param in trainable:
            param.register_post_accumulate_grad_hook(after_gradient)

    def before_forward(self, index: int) -> None:
        """Have unit `index` whole, and the next one on its way. Before the root: free all.

        A unit that backward runs again, by activation checkpointing, gets no next one.
        """
        if index == 0:  # what is left was not used since, and may be older than the last step
            self.is_backward = False
            for flat in chain(*self.units):
                flat.free()
        for flat in self.units[index]:
            flat.wait()
        if index + 1 < len(self.units) and not self.is_backward:
            for flat in self.units[index + 1]:
                flat.start()

    def after_forward(self, index: int) -> None:
        """Free a unit that backward can gather again; the root stays, and so do all in backward."""
        if index > 0 and self.reshard and not self.is_backward:
            for flat in self.units[index]:
                flat.free()

    def before_backward(self, index: int) -> None:
        """Have unit `index` whole, and the one before it on its way; after the root comes the last.

        Frozen parameters of the units after it, in the order of forward, are done with now, and are
        freed (for the root: none, its backward is the first).
        """
        self.is_backward = True
        for flat in self.units[index]:
            flat.wait()
        for flat in self.units[index - 1]:
            flat.start()
        for unit in self.units[index + 1 :] if index > 0 else []:
            for flat in unit:
                if not flat.shard.requires_grad:
                    flat.free()

    def after_backward(self, index: int) -> None:
        """All gradients of unit `index` are there: free its weights, then reduce to the shards.

        In this order there are never a unit's whole weights beside the room that a reduction takes.
        Its frozen parameters stay: an earlier layer of the unit may still need them.
        """
        for flat in self.units[index]:
            if flat.shard.requires_grad:
                flat.free()
                flat.reduce()
