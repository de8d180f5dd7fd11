"""A training state as names, values and pieces: what a sharded checkpoint is made of.

    {"model": {"w": w}, "step": 7}    --flatten-->    {"model/w": Piece}, {"step": 7}

    w, shape (6, 4)    rank 0 holds the box at offset (0, 0) of size (3, 4)
                       rank 1 holds the box at offset (3, 0) of size (3, 4)

A tensor that every rank holds whole is one box, held by all. Whatever shards a tensor, the disk
needs to know of it only where each rank's box lies. So a state can be saved by four ranks and
loaded by three: each copies what its own boxes have in common with the stored ones.

Price: no bytes; a Piece refers to the memory that the training uses.
Source: PyTorch's Distributed Checkpoint does the same (ChunkStorageMetadata),
https://docs.pytorch.org/docs/stable/distributed.checkpoint.html.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.fsdp.flat import Flat

PLAIN = (bool, int, float, str, type(None))


class Box(NamedTuple):
    """A part of a tensor with straight sides: where it begins and how long each side is."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    def within(self, offset: Sequence[int]) -> tuple[slice, ...]:
        """The slices that cut this box out of a tensor that itself begins at `offset`."""
        starts = [mine - theirs for mine, theirs in zip(self.offset, offset, strict=True)]
        return tuple(
            slice(start, start + length) for start, length in zip(starts, self.size, strict=True)
        )


@dataclass(frozen=True)
class Piece:
    """This rank's part of a larger tensor.

    Args:
        tensor: the part itself, in the memory that the training uses; loading writes into it.
        offset: where it begins in the whole, a number for each dimension.
        shape: of the whole.
    """

    tensor: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        return Box(self.offset, tuple(self.tensor.shape))


def overlap(first: Box, second: Box) -> Box | None:
    """The box that two boxes of one tensor have in common; None where they share no number.

    Boxes that only touch have nothing in common. Boxes of a scalar, which has no dimensions, have
    the scalar in common.
    """
    sides = list(zip(*first, *second, strict=True))
    starts = tuple(max(offset, other) for offset, _, other, _ in sides)
    ends = tuple(min(offset + size, other + length) for offset, size, other, length in sides)
    size = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return None if any(length <= 0 for length in size) else Box(starts, size)


# ---- what is held in parts, as pieces ------------------------------------------------------------


def whole(tensor: Tensor) -> Piece:
    """A tensor that this rank holds all of."""
    return Piece(tensor, (0,) * tensor.dim(), tuple(tensor.shape))


def of_flat(flat: Flat, part: Tensor) -> Piece:
    """`part`, (padded P/N,), of this rank's shard of a Flat, or of what an optimizer keeps for it.

    The padding at the end depends on the number of ranks, so it is no part of the state.
    """
    numel = flat.whole.numel() - len(flat.padding)
    offset = min(torch.distributed.get_rank(flat.group) * len(part), numel)
    return Piece(part[: min(len(part), numel - offset)], (offset,), (numel,))


def of_dtensor(tensor: Tensor) -> Piece:
    """This rank's part of a DTensor, as fully_shard and parallelize_module make them.

    Raises:
        ValueError: two dimensions of the mesh cut the same dimension of the tensor.
    """
    local, offset, cut = tensor.to_local(), [0] * tensor.dim(), set()
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        if not placement.is_shard() or placement.dim in cut:
            raise ValueError(f"a tensor with placements {tensor.placements} is not one box a rank")
        cut.add(placement.dim)
        length, ranks = tensor.shape[placement.dim], tensor.device_mesh.size(mesh_dim)
        place = tensor.device_mesh.get_local_rank(mesh_dim)
        offset[placement.dim] = min(place * -(-length // ranks), length)
    return Piece(local, tuple(offset), tuple(tensor.shape))


def is_dtensor(tensor: Tensor) -> bool:
    """Is it a tensor of which every rank holds a part?"""
    return hasattr(tensor, "to_local")  # to import the class takes 0.6 s


def model_state(
    model: nn.Module, flats: Sequence[Flat] = (), is_own: bool = False
) -> dict[str, Piece]:
    """The weights and buffers of a model by name, those in `flats` as this rank's parts.

    Where they are the rank's own, its part of a DTensor counts as a whole.
    """
    params = dict(model.named_parameters(remove_duplicate=False))
    cut = {flat.shard: flat for flat in flats}
    return {
        name: _piece(tensor.detach(), cut.get(params.get(name)), is_own)
        for name, tensor in model.state_dict().items()
    }


def optimizer_state(optimizer: Optimizer, flats: Sequence[Flat] = (), is_own: bool = False) -> dict:
    """What an optimizer keeps, by the number of its parameter, and its groups' settings."""
    fill(optimizer)
    cut = {flat.shard: flat for flat in flats}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    state = {
        str(number): {
            name: _piece(value, cut.get(param) if value.dim() else None, is_own)
            for name, value in optimizer.state[param].items()
        }
        for number, param in enumerate(params)
        if param in optimizer.state
    }
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    return {"state": state, "groups": groups}


def _piece(tensor: Tensor, flat: Flat | None, is_own: bool = False) -> Piece:
    if flat is not None:
        return of_flat(flat, tensor)
    if is_dtensor(tensor):
        return whole(tensor.to_local()) if is_own else of_dtensor(tensor)
    return whole(tensor)


def set_groups(optimizer: Optimizer, groups: Sequence[Mapping]) -> None:
    """Give the optimizer's groups the settings that a checkpoint had, such as the learning rate."""
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        group.update(settings)


def fill(optimizer: Optimizer) -> None:
    """Make the state that an optimizer makes in its first step, which it has not taken yet.

    Without it there would be nothing to load into. A step without gradients and at a learning rate
    of 0 leaves all weights as they are.
    """
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    trainable = [param for param in params if param.requires_grad]
    grads = [param.grad for param in trainable]
    for group in optimizer.param_groups:
        group["lr"] = rates[0] * 0
    for param in trainable:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for param, grad in zip(trainable, grads, strict=True):
        param.grad = grad


# ---- names ---------------------------------------------------------------------------------------


def flatten(state: object, name: str = "") -> tuple[dict[str, Piece], dict[str, object]]:
    """The pieces and the plain values of a nested state, by names such as "model/head.weight".

    Raises:
        ValueError: an item is neither a tensor, nor a Piece, a number, a text or None.
    """
    pieces: dict[str, Piece] = {}
    values: dict[str, object] = {}

    def note(name: str, leaf: object) -> None:
        if isinstance(leaf, Tensor | Piece):
            pieces[name] = leaf if isinstance(leaf, Piece) else _piece(leaf, None)
        elif isinstance(leaf, PLAIN):
            values[name] = leaf
        else:
            kind = type(leaf).__name__
            raise ValueError(f"{name} is a {kind}: save numbers, texts and tensors")

    _walk(state, name, note)
    return pieces, values


def with_leaves(state: object, leaves: Mapping[str, object]) -> object:
    """`state` once more, with what `leaves` has for names in it in the place of its own."""
    return _walk(state, "", lambda name, leaf: leaves.get(name, leaf))


def _walk(state: object, name: str, visit: Callable[[str, object], object]) -> object:
    """`state` once more, with what visit(name, leaf) returns in the place of each leaf."""
    if isinstance(state, Mapping):
        return {key: _walk(value, f"{name}/{key}", visit) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(
            _walk(value, f"{name}/{number}", visit) for number, value in enumerate(state)
        )
    return visit(name.removeprefix("/"), state)
