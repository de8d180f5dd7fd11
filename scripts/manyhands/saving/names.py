"""A training state as names, pieces and plain values: what a sharded checkpoint is made of.

    {"model": {"w": w}, "step": 7}    --flatten-->    {"model/w": Piece}, {"step": 7}

Two items that would get one name are refused, because one of them would be lost. Where a rank holds
several pieces of one tensor, each has a key: the name of the tensor and the offset of the piece.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from manyhands.saving.kept import PLAIN, Kept
from manyhands.saving.pieces import Parts, Piece, piece_of

Visit = Callable[[tuple, object], object]
AT = " @ "  # in a key, between the name of a tensor and the offset of one of several pieces


def flatten(state: object) -> tuple[dict[str, Piece], dict[str, object]]:
    """The pieces and the plain values of a nested state, by names such as "model/head.weight".

    What an optimizer has not made yet is left out.

    Raises:
        ValueError: an item is neither a tensor, nor a Piece, a number, a text or None; or it is a
            tensor that cannot be saved in boxes; or two items would have the same name.
    """
    pieces: dict[str, Piece] = {}
    values: dict[str, object] = {}
    places: dict[str, tuple] = {}

    def note(place: tuple, leaf: object) -> None:
        name = name_of(place)
        if name in places:
            raise ValueError(
                f"{_in_words(places[name])} and {_in_words(place)} would both be called {name}: "
                "rename one of them"
            )
        places[name] = place
        if isinstance(leaf, Parts):
            pieces.update({key_at(name, part.offset): part for part in leaf})
        elif isinstance(leaf, Tensor | Piece):
            pieces[name] = leaf if isinstance(leaf, Piece) else piece_of(leaf)
        elif isinstance(leaf, PLAIN):
            values[name] = leaf
        else:
            kind = type(leaf).__name__
            raise ValueError(f"{name} is a {kind}: save numbers, texts and tensors")

    _walk(state, note)
    for key, piece in pieces.items():
        _refuse_odd(key, piece.tensor)
    return pieces, values


def _in_words(place: Sequence) -> str:
    return "".join(f"[{key!r}]" for key in place)


def _refuse_odd(key: str, tensor: Tensor) -> None:
    if tensor.is_meta:
        raise ValueError(f"{key} is on the meta device: give it memory and numbers first")
    if tensor.layout != torch.strided:
        raise ValueError(f"{key} is a sparse tensor: save its to_dense(), or indices and values")


def with_leaves(state: object, leaves: Mapping[str, object]) -> object:
    """`state` once more, with what `leaves` has for names in it in the place of its own."""

    def exchange(place: tuple, leaf: object) -> object:
        name = name_of(place)
        if isinstance(leaf, Parts):
            return Parts(leaves.get(key_at(name, part.offset), part) for part in leaf)
        return leaves.get(name, leaf)

    return _walk(state, exchange)


def kept_in(state: object) -> dict[str, Kept]:
    """What optimizers keep, by names such as "optimizer/state/0"."""
    found: dict[str, Kept] = {}

    def note(place: tuple, item: object) -> None:
        if isinstance(item, Kept):
            found[name_of(place)] = item

    _walk(state, note, open_kept=False)
    return found


def name_of(place: Sequence) -> str:
    """The name of the item at these keys."""
    return "/".join(map(str, place))


def key_at(name: str, offset: Sequence[int]) -> str:
    """The key of one of several pieces: "model/w @ 3,0"."""
    return f"{name}{AT}{','.join(map(str, offset))}"


def tensor_of(key: str) -> str:
    """The name of the tensor of a key."""
    return key.partition(AT)[0]


def _walk(
    state: object,
    visit: Callable[[tuple, object], object],
    place: tuple = (),
    open_kept: bool = True,
) -> object:
    """`state` once more, with what visit(keys, leaf) returns in the place of each leaf."""

    def go(key: object, value: object) -> object:
        return _walk(value, visit, (*place, key), open_kept)

    if isinstance(state, Kept) and open_kept:
        state = state.items()
    if isinstance(state, Mapping):
        return {key: go(key, value) for key, value in state.items()}
    if isinstance(state, list | tuple) and not isinstance(state, Parts):
        items = [go(number, value) for number, value in enumerate(state)]
        return type(state)(*items) if hasattr(state, "_fields") else type(state)(items)
    return visit(place, state)
