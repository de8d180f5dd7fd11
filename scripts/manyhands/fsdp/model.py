"""The part of FSDP that knows PyTorch's hooks: who calls what when a unit runs.

    forward of a unit     before_forward(index)   | the unit computes | after_forward(index)
    backward of a unit    before_backward(index)  | its gradients     | after_backward(index)

`ShardedModel` makes the Flats of each unit and calls these four methods of its subclass. Rarer
matters are settled here, so that the subclass need not know of them: frozen parameters, which have
no gradient that could say when they are done with; activation checkpointing, which runs the forward
of a unit again in the middle of backward; and a second loss with a backward of its own, which may
reach only some of a unit's parameters: what they got is reduced when that backward ends.

What an optimizer gets are shards, vectors in which a rank holds some numbers of several parameters:

    p.dim() >= 2      is true of no shard: to decay matrices and not biases, keep them `apart`
    GradScaler        of PyTorch would look for overflows in a rank's own shards: see shards.py
    clip_grad_norm_   of PyTorch takes the norm of a rank's own shards: see clip.py

Source: Zhao et al. 2023, "PyTorch FSDP", https://arxiv.org/abs/2304.11277, sections 3 and 4.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from numbers import Number
from types import NoneType

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map

from manyhands.collectives.trees import Group
from manyhands.data_parallel.replicas import broadcast_state
from manyhands.fsdp.flat import ShardedFlat, make_flats
from manyhands.fsdp.meta import Draw, materialise


class ShardedModel(nn.Module):
    """A module in shards, with hooks around the forward and backward of each unit.

    A subclass has the four methods, and in `make_flat` the class of its Flats.

    Args:
        module: equal weights are not needed; those of the group's rank 0 count.
        units: modules inside it, in the order of their forward calls. A parameter that two of them
            share belongs to the root unit, as does all the rest. What is frozen now stays frozen.
        dtype: to send weights and to compute in: inputs of a unit are cast to it, too. Gradients
            are summed in the parameters' type.
        reshard: free a unit after its forward; False keeps it whole until its backward.
        replicas: group of the ranks that hold the same shard in other copies of the model.
        draw: draw(name, tensor without memory) gives the first values of a parameter, the same on
            all ranks; for a module on the meta device, which has none. Its buffers get no memory.
        apart: apart(name, parameter) is equal for parameters that may share a shard; see shards_of.
    """

    make_flat: Callable[..., ShardedFlat]

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[nn.Module],
        dtype: torch.dtype | None = None,
        reshard: bool = True,
        replicas: Group = None,
        group: Group = None,
        draw: Draw | None = None,
        apart: Callable[[str, nn.Parameter], Hashable] | None = None,
    ) -> None:
        super().__init__()
        self.hidden, self.reshard = (module,), reshard  # in a tuple: only shards are parameters
        self.dtype = dtype
        self.is_backward = False  # a backward has begun since the last forward
        self.will_finish = False  # finish_backward is to be called
        if draw is None:
            if any(param.is_meta for param in module.parameters()):
                raise ValueError("the module is on the meta device: say by draw= how it begins")
            broadcast_state(module, group)  # also the buffers; then from replica 0 to the others
            if replicas is not None:
                broadcast_state(module, replicas)
        uses = Counter(param for unit in units for param in unit.parameters())
        shares = [[p for p in unit.parameters() if uses[p] == 1] for unit in units]
        root = [param for param in module.parameters() if uses[param] != 1]

        def make(params: list[nn.Parameter]) -> ShardedFlat:
            return self.make_flat(params, dtype, replicas, group)

        self.units: list[list[ShardedFlat]] = []
        for params in [root, *shares]:
            if draw is not None:  # a unit gets its memory here, and keeps only a shard of it
                params = materialise(module, params, draw)
            names = {param: name for name, param in module.named_parameters()}
            key = None if apart is None else lambda p, names=names: apart(names[p], p)
            self.units.append(make_flats(params, make, key))
        self.trainable = [[f for f in unit if f.shard.requires_grad] for unit in self.units]
        frozen = [f for unit in self.units for f in unit if not f.shard.requires_grad]
        self.frozen = tuple(chain(*(flat.params for flat in frozen)))
        self.shards = nn.ParameterList(flat.shard for flat in chain(*self.units))
        # By unit, the parameters that got a gradient: since its last reduction, since forward.
        self.ready: list[set[nn.Parameter]] = [set() for _ in self.units]
        self.reached: list[set[nn.Parameter]] = [set() for _ in self.units]
        for index, part in enumerate([module, *units]):
            watch(self, index, part)

    @property
    def module(self) -> nn.Module:
        return self.hidden[0]

    def forward(self, *args: object, **kwargs: object) -> object:
        sizes = [sum(len(flat.params) for flat in part) for part in self.trainable]
        units = [i for i, size in enumerate(sizes) if 0 < len(self.reached[i]) < size]
        if units:
            raise ValueError(
                f"in units {units} a parameter got no gradient: use it, or freeze it before "
                "wrapping"
            )
        for params in self.reached:
            params.clear()
        if any(param.requires_grad for param in self.frozen):
            raise ValueError(
                "a parameter that was frozen when the model was wrapped requires a gradient now, "
                "and no shard would get it: unfreeze it before wrapping"
            )
        return self.module(*args, **kwargs)

    def train(self, mode: bool = True) -> "ShardedModel":
        self.module.train(mode)
        return super().train(mode)

    def shards_of(self, value: Hashable) -> list[nn.Parameter]:
        """The shards of the parameters of which apart(name, parameter) is `value`."""
        return [flat.shard for flat in chain(*self.units) if flat.key == value]

    def begin_backward(self) -> None:
        """At the first call in a backward: make the root whole, and have the end of it noted.

        The root is freed when all its gradients are there, and a second backward may need it.
        """
        self.is_backward = True
        if not self.will_finish:
            self.will_finish = True
            Variable._execution_engine.queue_callback(self.finish_backward)
            for flat in self.units[0]:
                flat.wait()

    def finish_backward(self) -> None:
        """Reduce the units of which this backward has reached some parameters only.

        A unit that was on its way and that it has not reached is freed: a gather that nobody waits
        for would go on while the optimizer writes into the shards.
        """
        self.will_finish = False
        for flat in chain(*self.units):
            if flat.coming is not None:
                flat.free()
        for index, params in enumerate(self.ready):
            if params:
                params.clear()
                self.after_backward(index)

    def cast(self, value: object) -> object:
        """A tensor of numbers with a fraction in the type to compute in; all else as it is."""
        is_cast = self.dtype is not None and isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self.dtype) if is_cast else value

    def free_frozen(self, index: int) -> None:
        """Free frozen parameters of the units whose backward is over when that of `index` begins.

        Until then they stay, because an earlier layer of their unit may still need them.
        """
        for unit in self.units[index + 1 :] if index > 0 else []:  # that of the root is the first
            for flat in unit:
                if not flat.shard.requires_grad:
                    flat.free()


def watch(model: ShardedModel, index: int, part: nn.Module) -> None:
    """Call the four methods of the subclass around forward and backward of unit `index`."""

    def before_forward(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if index == 0:
            model.is_backward = model.will_finish = False
        if model.is_backward:  # activation checkpointing runs this forward again
            for flat in model.units[index]:
                flat.wait()
        else:
            model.before_forward(index)
        return tree_map(model.cast, (args, kwargs))

    def after_forward(_: nn.Module, __: tuple, output: object) -> None:
        if asked := [tensor for tensor in tensors_in(output) if tensor.requires_grad]:
            # Called when the first gradient of an output is there.
            register_multi_grad_hook(asked, before_backward, mode="any")
        if not model.is_backward:
            model.after_forward(index)

    def before_backward(_: Tensor) -> None:
        model.begin_backward()
        model.before_backward(index)
        model.free_frozen(index)

    def after_gradient(param: nn.Parameter) -> None:
        model.reached[index].add(param)
        model.ready[index].add(param)
        if len(model.ready[index]) == len(params):
            model.ready[index].clear()
            model.after_backward(index)

    part.register_forward_pre_hook(before_forward, with_kwargs=True)
    part.register_forward_hook(after_forward)
    params = [param for flat in model.trainable[index] for param in flat.params]
    for param in params:
        param.register_post_accumulate_grad_hook(after_gradient)


def tensors_in(output: object) -> list[Tensor]:
    """The tensors that a unit returns: alone, in lists, dictionaries, dataclasses, or objects.

    Raises:
        ValueError: an object, and no tensor. Backward would reach tensors that nobody has found
            before anybody has gathered the weights.
    """
    leaves = tree_leaves(output)
    found = [tensor for leaf in leaves for tensor in tensors_of(leaf)]
    unknown = [leaf for leaf in leaves if not isinstance(leaf, Tensor | NoneType | Number | str)]
    if unknown and not found and torch.is_grad_enabled():
        raise ValueError(
            f"a unit returns an object of {type(unknown[0]).__name__}, and no tensor is found in "
            "it: return tensors, alone or in lists, dictionaries or dataclasses"
        )
    return found


def tensors_of(leaf: object) -> list[Tensor]:
    """A tensor itself; of a dataclass what its fields hold, of another object its attributes."""
    if isinstance(leaf, Tensor):
        return [leaf]
    if is_dataclass(leaf):
        values = [getattr(leaf, field.name) for field in fields(leaf)]
        return [tensor for value in tree_leaves(values) for tensor in tensors_of(value)]
    values = tree_leaves(list(getattr(leaf, "__dict__", {}).values()))
    return [value for value in values if isinstance(value, Tensor)]
