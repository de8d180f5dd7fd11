"""Sharded checkpoints: every rank writes its part, and any number of ranks can load them.

    rank 0 --> rank-00000.pt --+
    rank 1 --> rank-00001.pt --+--> all have written --> rank 0 --> index.json     the commit
    rank 2 --> rank-00002.pt --+

    index.json   files: bytes and SHA-256 of each      values: numbers and texts, by name
                 tensors: name -> shape, type, and its boxes: offset, size, file

A checkpoint without its index is incomplete and counts as none, so a process may be killed at any
moment. A box that several ranks hold is written once, by the one that has least to write so far.
Loading copies, for each of a rank's boxes, what it has in common with the stored ones.

Price for S bytes of state: S on the disk, S/N written by each of N ranks, and one wait for the
slowest. A rank that loads 1/N of the state reads the files that its boxes touch.
Source: the format is our own; Distributed Checkpoint of PyTorch plans, writes and commits alike,
https://docs.pytorch.org/docs/stable/distributed.checkpoint.html.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from manyhands.checkpoint.agree import gather, rank_of, together
from manyhands.checkpoint.index import (
    FORMAT,
    INDEX,
    agreed,
    check_kind,
    check_names,
    check_whole,
    describe,
    file_of,
    key_of,
    read_file,
    read_index,
    sealed,
)
from manyhands.checkpoint.pieces import Box, Piece, flatten, overlap, with_leaves
from manyhands.checkpoint.store import Store
from manyhands.collectives.trees import Group

OWN = "ranks/"  # names that begin so belong to one rank, as in {"ranks": {"3": ...}}


def save_sharded(state: Mapping, folder: str | Path, group: Group = None) -> int:
    """Save `state`, of which each rank holds its parts, in `folder`; returns the bytes written.

    Every rank of `group` calls it. When it returns on any rank, the checkpoint is whole.

    Args:
        state: nested; its leaves are tensors that all ranks hold whole and alike, Pieces, numbers,
            texts and None. What only one rank has stands below {"ranks": {its number: ...}}.
        folder: an address for Store. A checkpoint that is in it is lost once all ranks have read
            their states.

    Returns:
        The bytes that this rank has written.

    Raises:
        ValueError: on every rank, when the parts do not make a whole, values differ from rank to
            rank, or one rank cannot write.
    """
    pieces, values = together(lambda: flatten(state), group)
    store, rank = Store(folder), rank_of(group)
    together(lambda: rank or store.remove(INDEX), group)  # half new, half old must not count
    every_box = gather({name: piece.box for name, piece in pieces.items()}, group)
    shapes = agreed(gather({name: piece.shape for name, piece in pieces.items()}, group))
    types = agreed(gather({name: str(p.tensor.dtype) for name, p in pieces.items()}, group))
    values = agreed(gather(values, group))
    writers = plan(every_box)
    check_whole(writers, shapes)

    file = file_of(rank)
    mine = {
        key_of(name, piece.offset): for_the_disk(piece.tensor)
        for name, piece in pieces.items()
        if writers.get((name, piece.box)) == rank
    }
    written = together(lambda: store.write(file, lambda to: torch.save(mine, to)), group)
    sums = gather(written, group)
    index = {
        "format": FORMAT,
        "files": {file_of(other): sum_of_file for other, sum_of_file in enumerate(sums)},
        "values": values,
        "tensors": describe(writers, shapes, types),
    }
    together(lambda: rank or store.write_json(INDEX, sealed(index)), group)
    return written["bytes"]


def plan(every_box: Sequence[Mapping[str, Box]]) -> dict[tuple[str, Box], int]:
    """Which rank writes which box: each box once, by the holder with the least so far.

    Args:
        every_box: of each rank, name -> the box of that tensor which it holds. Some boxes are held
            by several ranks, and some names by few.

    Returns:
        (name, box) -> the rank that writes it: of those that hold it, the one that has the fewest
        numbers to write so far, the first of equals. Boxes come in the order of names, then of
        boxes. Boxes without numbers in them are left out.
    """
    holders = defaultdict(list)
    for rank, boxes in enumerate(every_box):
        for name, box in boxes.items():
            if prod(box.size) > 0:
                holders[name, box].append(rank)
    load = [0] * len(every_box)
    writers = {}
    for (name, box), ranks in sorted(holders.items()):
        writer = min(ranks, key=lambda rank: load[rank])
        load[writer] += prod(box.size)
        writers[name, box] = writer
    return writers


def load_sharded(
    state: Mapping, folder: str | Path, group: Group = None, keep: Sequence[str] = (OWN,)
) -> Mapping:
    """Load a checkpoint into the tensors of `state`, in place, whatever number of ranks saved it.

    Every rank of `group` calls it.

    Args:
        state: as for save_sharded, with boxes as this number of ranks holds them.
        keep: beginnings of names that may be missing on either side; what the checkpoint does not
            have stays as it is. By default what belongs to single ranks.

    Returns:
        `state` with the same tensors, and the checkpoint's numbers and texts.

    Raises:
        ValueError: on every rank, when the checkpoint is incomplete, or a file that one of them
            reads is damaged, or names, shapes or types are others. Some tensors may have been
            written to by then.
    """
    store = Store(folder)
    index = together(lambda: read_index(store), group)
    pieces, values = together(lambda: flatten(state), group)
    names = set().union(*gather({*pieces, *values}, group))

    def load() -> None:
        check_names(names, {*index["tensors"], *index["values"]}, keep)
        for name, piece in pieces.items():
            if name in index["tensors"]:
                check_kind(name, piece, index["tensors"][name])
        for file, wanted in parts_to_copy(pieces, index["tensors"]).items():
            stored = read_file(store, file, index["files"][file])
            for name, offset, common in wanted:
                part = stored[key_of(name, offset)]
                copy_common(pieces[name], part, Box(offset, tuple(part.shape)), common)

    together(load, group)
    return with_leaves(state, index["values"])


def parts_to_copy(
    pieces: Mapping[str, Piece], tensors: Mapping[str, Mapping]
) -> dict[str, list[tuple[str, tuple[int, ...], Box]]]:
    """What this rank has to copy: file -> [(name, offset of a stored box, what is in common)].

    Args:
        pieces: this rank's, by name. A name that the index lacks is left out.
        tensors: those of the index: name -> {"pieces": [{"offset", "size", "file"}, ...]}. Files
            that hold nothing for this rank are left out.
    """
    wanted = defaultdict(list)
    for name, piece in pieces.items():
        for stored in tensors[name]["pieces"] if name in tensors else []:
            box = Box(tuple(stored["offset"]), tuple(stored["size"]))
            if common := overlap(piece.box, box):
                wanted[stored["file"]].append((name, box.offset, common))
    return dict(wanted)


def copy_common(piece: Piece, part: Tensor, stored: Box, common: Box) -> None:
    """Copy what this rank's piece and a stored part have in common into the piece, in place."""
    with torch.no_grad():
        target = piece.tensor[common.within(piece.offset)]
        target.copy_(part[common.within(stored.offset)])


def for_the_disk(tensor: Tensor) -> Tensor:
    """A copy on the CPU: of a view, torch.save would write all the memory that it looks into."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
