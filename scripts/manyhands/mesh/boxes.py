"""A checkpoint of any mesh that any other mesh can load: where each part lies in the whole tensors.

    w of the whole     (8, 4)
    tp cuts            rows 4 to 7 on this rank            its own w, offset (4, 0)
    dp cuts            numbers 6 to 12 of those, in a row  Flat's shard, over unit's tensors
    boxes in w         (5, 2) 1 x 2 | (6, 0) 1 x 4 | (7, 0) 1 x 1

FSDP by hand cuts a unit's vector wherever a rank's share ends, which may be within a row. A run of
numbers of a matrix is at most three boxes: the end of a row, whole rows, the beginning of one. All
have the names of the whole model, whatever stage the rank has, so that save_sharded and
load_sharded need to know nothing of meshes.

Price: no memory, the pieces are views of the shards; one small message over tp.
Source: PyTorch's DTensor says the same by its placements,
https://docs.pytorch.org/docs/stable/distributed.tensor.html.
"""

from collections.abc import Callable
from functools import partial
from math import prod

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.fsdp.flat import Flat
from manyhands.fsdp.model import ShardedModel
from manyhands.mesh.training import OnMesh
from manyhands.saving.agree import gather
from manyhands.saving.kept import Kept, settings
from manyhands.saving.pieces import Box, Parts, Piece, is_dtensor, piece_of

TIED = {"head.weight": "tokens.weight"}  # one matrix under two names, in two stages
AsPiece = Callable[[Tensor], object]


def mesh_state(training: OnMesh, optimizer: Optimizer | None) -> dict:
    """The weights and what the optimizer keeps, for save_sharded and load_sharded.

    Every rank calls it. The names are those of the whole Transformer, also in the optimizer.
    Without an optimizer it is the weights alone.
    """
    weights = {TIED.get(name, name): one for name, one in training.named_weights().items()}
    offsets = offsets_over_tp(training, weights)
    flats = flats_of(training.model)
    model, state = {}, {}
    for name, param in weights.items():
        held, as_piece = param, piece_of
        if not is_dtensor(param):
            place = offsets[name], training.shapes[name]
            flat = flats.get(param)
            held = param if flat is None else flat.shard
            as_piece = partial(parts_of, param, flat, *place)
        model[name] = as_piece(held.detach())
        if optimizer is not None:
            state[name] = Kept(optimizer, held, partial(numbers_or, as_piece))
    if optimizer is None:
        return {"model": model}
    return {"model": model, "optimizer": {"state": state, "groups": settings(optimizer)}}


def numbers_or(as_piece: AsPiece, value: Tensor) -> object:
    """A single number that an optimizer keeps is whole; all else is cut as the parameter is."""
    return as_piece(value) if value.dim() else piece_of(value)


def offsets_over_tp(training: OnMesh, weights: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Where this rank's part of each tensor begins in the whole.

    The parts of the tensor ranks follow one another along the one dimension that is cut.
    """
    tp = training.groups["tp"]
    every = gather({name: tuple(part.shape) for name, part in weights.items()}, tp)
    before = every[: dist.get_rank(tp)]
    return {
        name: tuple(
            sum(other[name][dim] for other in before) if length != whole else 0
            for dim, (length, whole) in enumerate(
                zip(part.shape, training.shapes[name], strict=True)
            )
        )
        for name, part in weights.items()
    }


def flats_of(model: nn.Module) -> dict[Tensor, Flat]:
    """The Flat of each parameter that FSDP by hand has taken; {} for any other model."""
    units = model.units if isinstance(model, ShardedModel) else []
    return {param: flat for unit in units for flat in unit for param in flat.params}


def parts_of(
    param: Tensor,
    flat: Flat | None,
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    tensor: Tensor,
) -> Parts:
    """What this rank holds of one parameter, or of what an optimizer keeps for it.

    Args:
        param: this rank's part of it over tp, which lies at `offset` in the whole of `shape`.
        flat: in which it is, if in any.
        tensor: shaped as the parameter, or as the Flat's shard.

    Raises:
        ValueError: it has another shape, so nobody knows which numbers belong to which weights.
    """
    held = param if flat is None else flat.shard
    if tensor.shape != held.shape:
        raise ValueError(
            f"an optimizer keeps a tensor of shape {tuple(tensor.shape)} for weights of shape "
            f"{tuple(held.shape)}: it cannot be cut for another mesh"
        )
    if flat is None:
        return Parts([Piece(tensor, offset, shape)])
    begin = 0
    for other in flat.params:
        if other is param:
            break
        begin += other.numel()
    first = dist.get_rank(flat.group) * len(tensor)
    start, stop = max(begin, first), min(begin + param.numel(), first + len(tensor))
    at, pieces = start - first, []
    for box in boxes_of_run(start - begin, stop - begin, tuple(param.shape)):
        part = tensor[at : at + prod(box.size)].view(box.size)
        place = tuple(a + b for a, b in zip(box.offset, offset, strict=True))
        pieces.append(Piece(part, place, shape))
        at += part.numel()
    return Parts(pieces)


def boxes_of_run(start: int, stop: int, shape: tuple[int, ...]) -> list[Box]:
    """The boxes that numbers `start` to `stop` - 1 of a tensor make, in the order of memory."""
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    row = prod(shape[1:])
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)

    def in_row(number: int, begin: int, end: int) -> list[Box]:
        inner = boxes_of_run(begin, end, shape[1:])
        return [Box((number, *box.offset), (1, *box.size)) for box in inner]

    if first == last:
        return in_row(first, head, tail)
    boxes = in_row(first, head, row) if head else []
    first += head > 0
    if first < last:
        boxes.append(Box((first, *[0] * len(shape[1:])), (last - first, *shape[1:])))
    return boxes + in_row(last, 0, tail)
