"""11.5: what two boxes of one tensor have in common."""

import random
from collections.abc import Callable

from manyhands.checks.engine.spec import Call, Spec
from manyhands.checks.engine.values import kind
from manyhands.saving import pieces
from manyhands.saving.pieces import Box


def box(*sides: tuple[int, int]) -> Box:
    """The box with a (start, length) for each dimension."""
    return Box(tuple(start for start, _ in sides), tuple(length for _, length in sides))


def pairs() -> list[Call]:
    """Boxes that share a part, touch, lie in one another, or miss each other in one dimension."""
    a, b = random.randint(1, 9), random.randint(1, 9)
    return [
        (box((a, 4)), box((a + 3, 5))),
        (box((a + 3, 5)), box((a, 4))),
        (box((a, 9)), box((a + 2, 3))),
        (box((a, 3)), box((a + 3, 2))),
        (box((a, 5), (b, 6)), box((a + 2, 7), (b - 1, 3))),
        (box((a, 5), (b, 6)), box((a + 1, 2), (b + 8, 3))),
        (box((a, 5), (b, 6)), box((a + 7, 2), (b + 1, 3))),
        (box((0, 4), (b, 3), (0, 7)), box((0, 4), (b + 1, 1), (2, 9))),
        (box((a, 6)), box((a + 2, 0))),
        (box(), box()),
    ]


def common_seen(answer: Callable, case: Call) -> object:
    """The box as offset and size."""
    found = answer(*case)
    if found is None:
        return "nothing in common"
    if not isinstance(found, tuple) or len(found) != 2:
        return f"{kind(found)}, and not a Box"
    if any(isinstance(one, list) for one in found):
        return "lists in a Box, and not tuples"
    return {"offset": tuple(found[0]), "size": tuple(found[1])}


STARTS = "The part in common begins at the larger of the two offsets, dimension by dimension."
ENDS = "It ends at the smaller of the two ends, and an end is offset + size."
overlap = Spec(
    todo="11.5",
    truth=pieces.overlap,
    cases=pairs,
    observe=common_seen,
    advice={"": f"{STARTS} {ENDS} A Box holds two tuples."},
    hints=(
        "Take one dimension first: two stretches of a line. Where does what they share begin, and "
        "where does it end?",
        f"{STARTS} {ENDS}",
        "The size is end - start in each dimension. If any side is 0 or less, return None. A "
        "scalar has no side at all, so two boxes of it have Box((), ()) in common.",
    ),
    mistakes="""
        max(offset, other) => min(offset, other) ::
            The part begins at the smaller offset, where only one of the boxes is. | {STARTS}
        max(offset, other) => offset :: The part begins where the first box does.
        max(offset, other) => other :: The part begins where the second box does.
        min(offset + size, other + length) => max(offset + size, other + length) ::
            The part ends at the larger end, where only one of the boxes is. | {ENDS}
        min(offset + size, other + length) => min(size, length) :: The sizes are taken for ends.
        min(offset + size, other + length) => offset + size ::
            The part ends where the first box does.
        Box(starts, size) => Box(starts, ends) ::
            The box is given its end in the place of its size. | The size is end - start.
        Box(starts, size) => Box(tuple(s - o for s, o in zip(starts, first.offset)), size) ::
            The offset counts from the first box, and not from the whole tensor. | {STARTS}
        length <= 0 for => length < 0 for :: A box without any number in it is returned where two
            boxes touch. | Where a side is 0 or less there is nothing in common: return None.
        any(length <= 0 => all(length <= 0 ::
            Boxes that miss each other in one dimension are said to share something.
        None if any(length <= 0 for length in size) else Box(starts, size) => Box(starts, size) ::
            Boxes that share no number give a box and not None.
        return None if any( => return None if not size or any( ::
            Two boxes of a scalar are said to share nothing. | A scalar has no side that is 0.
    """,
    module=globals(),
)
