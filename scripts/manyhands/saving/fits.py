"""What is refused, in one line: parts that make no whole, and a checkpoint that does not fit.

    save    ranks disagree on a value; parts of a tensor overlap, leave a gap, or stick out
    load    a name that only one side has; another shape or type; a number for a tensor

Price: linear in the number of boxes, so in ranks times tensors.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import product
from math import prod

from manyhands.saving.names import tensor_of
from manyhands.saving.pieces import Box, Piece

# What DDP and torch.compile put before names.
WRAPPER = re.compile(r"(?<![^./])(module|_orig_mod)\.")


# ---- to save -------------------------------------------------------------------------------------


def agreed(every: Sequence[Mapping]) -> dict:
    """One dict of all ranks' dicts.

    Raises:
        ValueError: two ranks have something else under one name.
    """
    agreed: dict[str, object] = {}
    for rank, known in enumerate(every):
        for name, value in known.items():
            first = agreed.setdefault(name, value)
            is_nan = value != value and first != first  # on both, so they agree
            if first != value and not is_nan:
                words = f"{name} is {value} on rank {rank} and {first} on one before it"
                raise ValueError(f"{words}: put what ranks do not share below ranks/<its number>")
    return agreed


def check_whole(writers: Mapping[tuple[str, Box], int], shapes: Mapping[str, Sequence]) -> None:
    """Refuse boxes that leave numbers out, hold some twice, or stick out of their tensor."""
    boxes: dict[str, list[Box]] = defaultdict(list)
    for name, box in writers:
        boxes[name].append(box)
    for name, shape in shapes.items():
        for box in boxes[name]:
            check_within(name, box, shape)
        if have_common(boxes[name], len(shape)):
            raise ValueError(f"the ranks' parts of {name} overlap")
        count = sum(prod(box.size) for box in boxes[name])
        if count != prod(shape):
            raise ValueError(f"the ranks' parts of {name} hold {count} numbers of {prod(shape)}")


def have_common(boxes: Sequence[Box], num_dims: int) -> bool:
    """Have any two of these boxes a number in common?

    The boxes' sides, drawn through the whole tensor, cut it into cells, and a box is made of whole
    cells. So it is enough to count each cell. Comparing all pairs of boxes would take hours where
    thousands of ranks hold a part of each tensor.
    """
    numbers = []  # of the side at each coordinate, for each dimension
    for dim in range(num_dims):
        sides = {box.offset[dim] for box in boxes}
        sides |= {box.offset[dim] + box.size[dim] for box in boxes}
        numbers.append({side: number for number, side in enumerate(sorted(sides))})
    seen = set()
    for offset, size in boxes:
        spans = [
            range(number[start], number[start + length])
            for number, start, length in zip(numbers, offset, size, strict=True)
        ]
        for cell in product(*spans):
            if cell in seen:
                return True
            seen.add(cell)
    return False


def check_within(name: str, box: Box, shape: Sequence[int]) -> None:
    """Refuse a box that sticks out of its tensor."""
    sides = list(zip(*box, shape, strict=True)) if len(box.offset) == len(shape) else [(1, 0, 0)]
    if any(start < 0 or start + length > limit for start, length, limit in sides):
        raise ValueError(f"a rank's part of {name} is not within its shape {tuple(shape)}")


# ---- to load -------------------------------------------------------------------------------------


def check_names(ours: set[str], theirs: set[str], keep: Sequence[str]) -> None:
    """Refuse names that only one side has, but for those that begin with one of `keep`."""
    only_ours, only_theirs = (
        sorted(name for name in names if not name.startswith(tuple(keep)))
        for names in (ours - theirs, theirs - ours)
    )
    for odd, others, words in (
        (only_ours, only_theirs, "is not in the checkpoint"),
        (only_theirs, only_ours, "is in the checkpoint only"),
    ):
        if not odd:
            continue
        more = f", and {len(odd) - 1} more" if len(odd) > 1 else ""
        reason = "it is another model or another run"
        bare = WRAPPER.sub("", odd[0])
        if other := next((name for name in others if WRAPPER.sub("", name) == bare), ""):
            where = "the checkpoint has" if odd is only_ours else "here is"
            reason = f"{where} {other}: save and load the module inside the wrapper"
        raise ValueError(f"{odd[0]} {words}{more}: {reason}")


def check_kinds(pieces: Mapping[str, Piece], values: Mapping, index: Mapping) -> None:
    """Refuse another shape or type, a piece that sticks out, and a number for a tensor.

    A name that the index lacks is left out.
    """
    for key, piece in pieces.items():
        name = tensor_of(key)
        if name in index["values"]:
            value = index["values"][name]
            raise ValueError(f"{name} is {value!r} in the checkpoint, and a tensor here")
        if name in index["tensors"]:
            check_kind(name, piece, index["tensors"][name])
    for name, value in values.items():
        if name in index["tensors"]:
            raise ValueError(f"{name} is a tensor in the checkpoint, and {value!r} here")


def check_kind(name: str, piece: Piece, stored: Mapping) -> None:
    """Refuse another shape or type, and a piece that sticks out of it."""
    theirs = [list(stored["shape"]), stored["dtype"]]
    ours = [list(piece.shape), str(piece.tensor.dtype)]
    if theirs != ours:
        raise ValueError(f"{name} has shape and type {theirs} in the checkpoint, and {ours} here")
    check_within(name, piece.box, piece.shape)
