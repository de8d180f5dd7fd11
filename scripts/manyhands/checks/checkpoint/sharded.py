"""11.4 and 11.6: who writes which box, and what a rank has to copy."""

import itertools
import random
from collections.abc import Callable
from math import prod
from typing import NamedTuple

import torch

from manyhands.checks.checkpoint.boxes import box
from manyhands.checks.engine.spec import Call, Spec
from manyhands.checks.engine.values import kind
from manyhands.saving import sharded
from manyhands.saving.pieces import Box, Piece

# ---- 11.4 ----------------------------------------------------------------------------------------


def states() -> list[Call]:
    """Shards, a tensor that all hold, replicas of shards, one rank's own, empty boxes, scalars."""
    rows = [box((4 * rank, 4), (0, 3)) for rank in range(3)]
    own = [{"w": row, "table": box((0, 10))} for row in rows]
    replicas = [{"w": rows[rank % 2], "b": rows[rank % 2], "step": box()} for rank in range(4)]
    several = {name: box((0, size)) for name, size in zip("edcba", (7, 5, 3, 2, 2), strict=True)}
    odd = [{"w": box((0, 5))}, {"w": box((5, 5)), "rng/1": box((0, 9))}, {"w": box((10, 0))}]
    sizes = {"a": 1, "b": 9, "c": 1, "d": 1}
    wide = {"a": box((0, 2), (0, 9)), "b": box((0, 12), (0, 1)), "c": box((0, 5))}
    return [
        (own,),
        ([{"w": row} for row in rows[::-1]],),
        (replicas,),
        ([several] * 2,),
        ([wide] * 2,),
        ([{n: box((0, s)) for n, s in sizes.items()}] * 3,),
        ([{"t": box((0, 20)), "v": box((0, 4))}, {"v": box((0, 4))}, {"t": box((0, 20))}],),
        (odd,),
    ]


def plan_seen(answer: Callable, case: Call) -> dict:
    """Which rank writes what, in order, and how many numbers each."""
    found = answer([dict(boxes) for boxes in case.every_box])
    if not isinstance(found, dict):
        return {"what is returned": kind(found)}
    load = [0] * len(case.every_box)
    for (_, one), rank in found.items():
        load[rank] += prod(one.size)
    return {
        "names that are written": [name for name, _ in found],
        "boxes in order": [f"{name} at {tuple(one.offset)}" for name, one in found],
        "the writer of each box": {
            f"{name} at {tuple(one.offset)} of size {tuple(one.size)}": rank
            for (name, one), rank in found.items()
        },
        "numbers that each rank writes": load,
    }


ONCE = "Collect for each (name, box) the list of the ranks that hold it; it has one entry then."
FEWEST = "Of the ranks that hold the box, take the one with the fewest numbers so far."
ALWAYS_FIRST = "The first holder writes every box that several hold, and others wait for it."
IN_ORDER = "Go through sorted(holders.items())."
COUNT = "Add prod(box.size), the number of numbers, to the writer's load."
plan = Spec(
    todo="11.4",
    truth=sharded.plan,
    cases=states,
    observe=plan_seen,
    tell=lambda case: f"plan of {len(case.every_box)} ranks that hold {_held(case)}",
    independent=True,
    advice={"": FEWEST, "names that are written": IN_ORDER, "boxes in order": IN_ORDER},
    reasons="""
        unhashable :: A list is no key. | (name, box) is one: a Box is a tuple.
        arg is an empty sequence :: A box that no rank holds was asked for. | {ONCE}
    """,
    hints=(
        "Three steps: find the holders of each box, go through the boxes in order, and choose a "
        "writer for each.",
        f"{ONCE} Leave out boxes of which prod(box.size) is 0.",
        "Keep a list `load` with a number for each rank. min(ranks, key=lambda rank: load[rank]) "
        f"is the first of those with the least. {COUNT}",
    ),
    mistakes="""
        min(ranks, key=lambda rank: load[rank]) => ranks[0] :: {ALWAYS_FIRST} | {FEWEST}
        load[writer] += prod(box.size) => pass :: {ALWAYS_FIRST}
        min(ranks, key=lambda rank: load[rank]) => ranks[-1] ::
            The last holder writes every box that several hold.
        min(ranks, key= => min(range(len(load)), key= ::
            A rank is told to write a box that it does not hold.
        min(ranks, key=lambda rank: load[rank]) => min(ranks[::-1], key=lambda rank: load[rank]) ::
            Of ranks with equally little to write the last is taken. | The docstring says the first.
        min(ranks, key=lambda rank: load[rank]) => ranks[len(writers) % len(ranks)] ::
            The holders take turns, whatever the size of what they write. | {FEWEST}
        load[writer] += prod(box.size) => load[writer] += sum(box.size) ::
            The sides of a box are added, and not multiplied. | {COUNT}
        load[writer] += prod(box.size) => load[writer] += 1 ::
            Boxes are counted, and not the numbers in them.
        if prod(box.size) > 0: => if True: ::
            Boxes without numbers are written. | Leave out boxes of which prod(box.size) is 0.
        sorted(holders.items()) => holders.items() ::
            The boxes come in the order in which the ranks name them. | sorted(holders.items())
        sorted(holders.items()) => sorted(holders.items(), key=lambda one: one[0][1]) ::
            The boxes come in the order of boxes first.
        sorted(holders.items()) => sorted(holders.items(), key=lambda one: one[0][0]) ::
            Boxes of one name come in the order of the ranks that hold them.
    """,
    module=globals(),
)


def _held(case: Call) -> str:
    names = sorted(set(itertools.chain(*case.every_box)))
    return ", ".join(names)


# ---- 11.6 ----------------------------------------------------------------------------------------


class Reshard(NamedTuple):
    """This rank's pieces, and what an index says of tensors; `pieces` are boxes in their shapes."""

    boxes: dict[str, tuple[Box, tuple[int, ...]]]
    tensors: dict[str, dict]


def stored(shape: tuple[int, ...], *files: tuple[str, Box]) -> dict:
    """A tensor's part of the index; lists, as JSON has them."""
    return {
        "shape": list(shape),
        "dtype": "torch.float32",
        "pieces": [
            {"offset": list(one.offset), "size": list(one.size), "file": file}
            for file, one in files
        ],
    }


def reshardings() -> list[Reshard]:
    """Other numbers of ranks, two dimensions, several names in a file, nothing wanted."""
    a = random.randint(1, 3)
    four = [(f"rank-0000{rank}.pt", box((3 * rank, 3))) for rank in range(4)]
    grid = [
        (f"rank-0000{2 * row + col}.pt", box((4 * row, 4), (3 * col, 3)))
        for row in range(2)
        for col in range(2)
    ]
    vector, matrix = stored((12,), *four), stored((8, 6), *grid)
    scalar = stored((), ("rank-00002.pt", box()))
    return [
        Reshard({"w": (box((6, 6)), (12,))}, {"w": vector}),
        Reshard({"w": (box((4, 4)), (12,))}, {"w": vector}),
        Reshard({"w": (box((3 + a, 1)), (12,))}, {"w": vector}),
        Reshard({"m": (box((a, 5), (2, 2)), (8, 6))}, {"m": matrix}),
        Reshard(
            {"w": (box((0, 4)), (12,)), "step": (box(), ()), "m": (box((0, 8), (0, 3)), (8, 6))},
            {"m": matrix, "step": scalar, "v": vector, "w": vector},
        ),
        Reshard({"w": (box((12, 0)), (12,))}, {"w": vector}),
        Reshard({"new": (box((0, 2)), (2,)), "w": (box((0, 3)), (12,))}, {"w": vector}),
    ]


def copies_seen(answer: Callable, case: Reshard) -> dict:
    """For each file what is copied out of it."""
    held = {
        name: Piece(torch.zeros(one.size), one.offset, shape)
        for name, (one, shape) in case.boxes.items()
    }
    found = answer(held, case.tensors)
    if not isinstance(found, dict):
        return {"what is returned": kind(found)}
    seen = {"the files": sorted(found)}
    for file in sorted(found):
        seen[f"what is copied from {file}"] = sorted(  # in any order
            (name, offset_of(offset), tuple(map(tuple, common)))
            for name, offset, common in found[file]
        )
    return seen


def offset_of(offset: object) -> object:
    """An offset is part of a name, and a list can be none."""
    return ("a list, not a tuple",) if isinstance(offset, list) else tuple(offset)


def tell_reshard(case: Reshard) -> str:
    """The call in words."""
    words = [f"{name} at {one.offset} of size {one.size}" for name, (one, _) in case.boxes.items()]
    return f"parts_to_copy for a rank that holds {', '.join(words)}"


LISTS = 'The index comes from JSON, so make tuples of it: Box(tuple(stored["offset"]), ...).'
APPEND = 'wanted[stored["file"]].append('
IF_COMMON = "if common := overlap(piece.box, box):"
COMMON = "common = overlap(piece.box, box)"
TRIPLE = "An entry is (name, offset of the stored box, common box)."
parts_to_copy = Spec(
    todo="11.6",
    truth=sharded.parts_to_copy,
    cases=reshardings,
    observe=copies_seen,
    tell=tell_reshard,
    advice={"": f"Ask overlap(piece.box, stored box) for each pair. {TRIPLE}"},
    reasons="""
        KeyError :: A name or a file is asked for that is not there. | A piece may have a name that
            the index does not have: leave it out.
    """,
    hints=(
        "Compare each of this rank's pieces with every stored box of the same name.",
        f"{LISTS} overlap(piece.box, box) is what there is to copy, or None.",
        f"Collect in defaultdict(list), under the stored box's file. {TRIPLE}",
    ),
    mistakes=r"""
        overlap(piece.box, box) => box :: Whole stored boxes are copied, also those that this rank
            has no part of. | Ask overlap(piece.box, box).
        overlap(piece.box, box) => overlap(piece.box, box) and piece.box ::
            This rank's whole box is copied from every file. | overlap(...) says what is in common.
        (name, box.offset, common) => (name, piece.offset, common) :: The entry has the offset of
            this rank's piece, and no stored box has that name. | {TRIPLE}
        (name, box.offset, common) => (name, common.offset, common) ::
            The entry has the offset of the common part, and not that of the stored box.
        {APPEND} => wanted[stored["file"]].clear(); {APPEND} ::
            Only the last part from each file is kept. | A file may hold several parts: append.
        {APPEND} => wanted[name].append( ::
            The parts are collected by name, and not by file. | wanted[stored["file"]]
        {IF_COMMON} => {COMMON}\n            if True: ::
            Boxes that share nothing with this rank's are in the list. | overlap returns None there.
        {IF_COMMON} => wanted[stored["file"]]; {COMMON}\n            if common: ::
            Files that hold nothing for this rank are read, too. | Make a list only where needed.
        box = Box(tuple(stored["offset"]), tuple(stored["size"])) => box =
            Box(tuple(stored["size"]), tuple(stored["offset"])) ::
            Offset and size have changed places. | Box(offset, size)
        if name in tensors else [] => if name in tensors else [][0] ::
            A name that the checkpoint does not have raises an error. | Leave it out.
        tensors[name]["pieces"] if => tensors[name]["pieces"][:1] if ::
            Only the first stored box of a tensor is looked at. | Go through all of them.
    """,
    module=globals(),
)
