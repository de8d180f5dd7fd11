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
slowest. Rank 0 alone gathers what all ranks hold, some hundred bytes a box. A rank that loads 1/N
of the state reads the files that its boxes touch.
Source: the format is our own; Distributed Checkpoint of PyTorch plans, writes and commits alike,
https://docs.pytorch.org/docs/stable/distributed.checkpoint.html.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from manyhands.saving.agree import Group, from_first, rank_of, to_first, together
from manyhands.saving.fits import agreed, check_kinds, check_names, check_whole
from manyhands.saving.index import (
    FORMAT,
    INDEX,
    describe,
    file_of,
    key_of,
    read_file,
    read_index,
    sealed,
)
from manyhands.saving.kept import aim
from manyhands.saving.names import flatten, kept_in, tensor_of, with_leaves
from manyhands.saving.pieces import Box, Piece, overlap
from manyhands.saving.store import Store

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
    held = {key: (p.box, tuple(p.shape), str(p.tensor.dtype)) for key, p in pieces.items()}
    told = to_first((held, values), group)
    contents, tasks = together(lambda: ({}, []) if rank else divide(told), group)
    mine = set(from_first(tasks, group))

    def write() -> dict:
        parts = {
            key_of(tensor_of(key), piece.offset): for_the_disk(piece.tensor)
            for key, piece in pieces.items()
            if key in mine
        }
        return store.write(file_of(rank), lambda to: torch.save(parts, to))

    written = together(write, group)
    sums = to_first(written, group)
    files = {file_of(other): of_file for other, of_file in enumerate(sums)}
    index = {"format": FORMAT, "files": files, **contents}
    together(lambda: rank or store.write_json(INDEX, sealed(index)), group)
    return written["bytes"]


def divide(told: Sequence[tuple[Mapping, Mapping]]) -> tuple[dict, list[list[str]]]:
    """Who writes what, and what the index says of it; the first rank's work.

    Args:
        told: by every rank: key -> (box, shape, type) of its pieces, and its values.

    Returns:
        The index's values and tensors; for each rank the keys of the pieces that it writes.

    Raises:
        ValueError: the parts do not make a whole, or values differ from rank to rank.
    """
    shapes = agreed([{tensor_of(key): one[1] for key, one in held.items()} for held, _ in told])
    types = agreed([{tensor_of(key): one[2] for key, one in held.items()} for held, _ in told])
    values = agreed([values for _, values in told])
    planned = plan([{key: one[0] for key, one in held.items()} for held, _ in told])
    writers: dict[tuple[str, Box], int] = {}
    tasks: list[list[str]] = [[] for _ in told]
    for (key, box), rank in planned.items():
        if (tensor_of(key), box) not in writers:  # one box may have keys of two kinds
            writers[tensor_of(key), box] = rank
            tasks[rank].append(key)
    check_whole(writers, shapes)
    return {"values": values, "tensors": describe(writers, shapes, types)}, tasks


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
    stored = {*index["tensors"], *index["values"]}
    kept = kept_in(state)
    together(lambda: aim(kept, stored, keep), group)
    pieces, values = together(lambda: flatten(state), group)
    names = set().union(*to_first({*map(tensor_of, pieces), *values}, group))
    together(lambda: rank_of(group) or check_names(names, stored, keep), group)
    tensors = index["tensors"]

    def load() -> None:
        check_kinds(pieces, values, index)
        found = {key: tensors[name] for key in pieces if (name := tensor_of(key)) in tensors}
        for file, wanted in parts_to_copy(pieces, found).items():
            content = read_file(store, file, index["files"][file])
            for key, offset, common in wanted:
                part = content[key_of(tensor_of(key), offset)]
                copy_common(pieces[key], part, Box(offset, tuple(part.shape)), common)

    together(load, group)
    loaded = with_leaves(state, index["values"])
    for name, one in kept.items():
        one.give(name, index["values"])
    return loaded


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
