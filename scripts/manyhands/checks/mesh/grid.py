"""Specs of 14.1 and 14.2: where a rank stands in a mesh, who stands in line with it, and groups."""

import random
import zlib
from collections.abc import Callable, Mapping
from math import prod

import torch
import torch.distributed as dist

from manyhands.checks.engine.answer import Pair
from manyhands.checks.engine.spec import Call, Place, Spec
from manyhands.checks.engine.values import Malformed, integer, kind, listing, malformed, record
from manyhands.checks.mesh.common import say_first
from manyhands.mesh import grid

# ---- 14.1 -----------------------------------------------------------------------------------


def ranks_of_meshes() -> list[Call]:
    """One to four axes, of uneven sizes and of 1, with known names and others, in any order."""
    large = random.randint(5, 9)
    meshes = [
        ({"tp": 3}, (0, 2)),
        ({"dp": 2, "tp": 2}, (1, 2, 3)),
        ({"tp": 2, "dp": 3}, range(6)),
        ({"pp": 3, "dp": 2, "tp": 2}, range(12)),
        ({"shard": 2, "replicate": 3, "pp": 4}, (5, 10, 23)),
        ({"pp": 2, "replicate": 3, "shard": 1, "tp": 2}, (0, 4, 7, 11)),
        ({"one": 1, "a": 2, "other": 1}, (1,)),
        ({"rows": large, "columns": large + 1}, (large, large * large)),
        ({"pp": 3, "dp": 12, "cp": 2, "tp": 5}, (119, random.randrange(360))),
    ]
    return [(rank, sizes) for sizes, ranks in meshes for rank in ranks]


def places_seen(answer: Pair, case: Call) -> dict:
    """The rank's place, the order of its names, and the ranks along each axis."""
    coordinates, ranks_along = answer.parts
    place = coordinates(case.rank, case.sizes)
    seen = {
        "coordinates": record(list(case.sizes), integer)(place),
        "the names of coordinates, in order": list(place),
    }
    form = listing(integer, "a list of ranks")
    for axis in case.sizes:
        seen[f"ranks_along({axis!r})"] = form(ranks_along(axis, case.rank, case.sizes))
    return seen


DIVMOD = "divmod(rank, sizes[axis])"
DIGITS = "From the last axis to the first: divmod(rank, size) gives what is left, and the place."
STEP = "From one to the next there is a step of the product of the sizes of all axes behind it."
FIRST = "rank - step * coordinates(rank, sizes)[axis] is the first one."
LINE = "[first + step * number for number in range(sizes[axis])]"
INNER = "prod(sizes[inner] for inner in axes[axes.index(axis) + 1 :])"
FIRST_IN_LINE = "first = rank - step * coordinates(rank, sizes)[axis]"
places = Spec(
    todo="14.1",
    truth=Pair(grid.coordinates, grid.ranks_along),
    cases=ranks_of_meshes,
    observe=places_seen,
    independent=True,
    tell=lambda case: f"a call for rank {case.rank} of {case.sizes}",
    advice={
        "": f"{STEP} {FIRST}",
        "coordinates": DIGITS,
        "the names of coordinates, in order": "Return a dict with the names in `sizes`'s order.",
    },
    reasons="""
        'dict_keys' object is not reversible :: Keys are no list. | reversed(list(sizes))
        'dict_keys' object is not subscriptable :: Keys are no list. | list(sizes)
    """,
    hints=(
        "coordinates: with sizes of 10 these would be the digits of the rank. How do you get the "
        "last digit of a number, and what is left without it?",
        "ranks_along: one step along the last axis is the next rank. One step along the axis "
        "before it jumps over a whole line of the last one, and so on.",
        f"coordinates: {DIGITS} ranks_along: {STEP} Start at the rank less that step times its own "
        "place there.",
    ),
    mistakes="""
        for axis in reversed(list(sizes)): => for axis in list(sizes): :: coordinates: the first
            axis is counted first, and the last one should be the innermost. | {DIGITS}
        rank, place[axis] = {DIVMOD} => place[axis] = rank % sizes[axis] ::
            coordinates: the rank is not divided before the next axis takes its part.
        rank, place[axis] = {DIVMOD} => place[axis], rank = {DIVMOD} ::
            coordinates: the two results of divmod have changed places.
        place[axis] = {DIVMOD} => place[axis] = rank, rank //
            prod(list(sizes.values())[list(sizes).index(axis) + 1 :][:1]) % sizes[axis] ::
            coordinates: the rank is divided by the size of the next axis only, and not by those of
            all the axes behind it.
        return {axis: place[axis] for axis in sizes} => return place ::
            coordinates: the names come in the order in which they were computed, the last first. |
            {axis: place[axis] for axis in sizes}
        {INNER} => prod(sizes[inner] for inner in axes[axes.index(axis) :]) ::
            ranks_along: the step has the size of the axis itself in it. | {STEP}
        {INNER} => prod(sizes[inner] for inner in axes[: axes.index(axis)]) ::
            ranks_along: the step is that of the axes before this one.
        {INNER} => prod(sizes[inner] for inner in axes[axes.index(axis) + 1 :][:1]) ::
            ranks_along: the step is the size of the next axis only.
        {INNER} => 1 ::
            ranks_along: the ranks follow one another, as they do along the last axis only.
        {FIRST_IN_LINE} => first = rank ::
            ranks_along: the line begins with the rank itself. | {FIRST}
        {FIRST_IN_LINE} => first = 0 ::
            ranks_along: this is the line through rank 0, whatever rank is asked for.
        {FIRST_IN_LINE} => first = rank % step :: ranks_along: the line begins among the ranks of
            the first step of all, and so with a place of 0 in the axes before this one, too.
        {LINE} => sorted({LINE}, key=lambda other: other != rank) ::
            ranks_along: the rank itself comes first. | The ranks are in the axis's order.
        {LINE} => [other for other in {LINE} if other != rank] ::
            ranks_along: the rank itself is missing. | It is one of those in its line.
        {LINE} => [other for other in range(prod(sizes.values())) if coordinates(other, sizes)[axis]
            == coordinates(rank, sizes)[axis]] ::
            ranks_along: these are the ranks with the same number in this axis, and they differ in
            the other ones. | All but this axis has to be the same.
    """,
    module=globals(),
)

# ---- 14.2 -----------------------------------------------------------------------------------

SIX = ((tuple(range(6)),),)


def meshes(n: int) -> list[Call]:
    """Both uneven grids of the job, a line, axes of 1 with other names; too few places and more."""
    return [
        ({"tp": 6},),
        ({"dp": 3, "tp": 2},),
        ({"tp": 2, "pp": 3},),
        ({"one": 1, "replicate": 2, "shard": 3},),
        ({"tp": 3},),
        ({"pp": 3, "dp": 2, "tp": 2},),
    ]


def groups_seen(answer: Callable, case: Call, place: Place) -> dict:
    """The ranks of this rank's groups, by axis in order; and whether each group is one."""
    groups = answer(case.sizes)
    bad = what_is_no_group(groups)
    seen: dict = {}
    if not bad:
        seen["the axes"] = ", ".join(groups)
        for axis, group in groups.items():
            seen[ranks_of(axis)] = dist.get_process_group_ranks(group)
    lines = {axis: grid.ranks_along(axis, place.rank, case.sizes) for axis in case.sizes}
    right = {ranks_of(axis): line for axis, line in lines.items()}
    is_right = prod(case.sizes.values()) == place.n and (
        seen == {"the axes": ", ".join(case.sizes)} | right
    )
    numbers = torch.zeros(1 + len(lines), dtype=torch.int64)
    if is_right:
        numbers[0] = 1
        names = [group.group_name for group in groups.values()]
        numbers[1:] = torch.tensor([zlib.crc32(name.encode()) for name in names])
    every = [torch.empty_like(numbers) for _ in range(place.n)]
    dist.all_gather(every, numbers)  # a rank that is right alone would wait for the others
    if bad:
        raise bad
    if not is_right:
        return seen
    can_send = all(one[0] for one in every)
    for index, (axis, line) in enumerate(lines.items(), start=1):
        total = sum(10**rank for rank in line)
        is_one = len({every[rank][index].item() for rank in line}) == 1
        seen[f"the ranks of a line along {axis!r} have one and the same group"] = (
            is_one or not can_send
        )
        if can_send and is_one:
            number = torch.tensor(10**place.rank)
            dist.all_reduce(number, group=groups[axis])
            total = number.item()
        if is_one or not can_send:
            seen[f"the sum over the group of {axis!r}"] = total
    return seen


def ranks_of(axis: str) -> str:
    """The name of what is seen of a group."""
    return f"the ranks of the group of {axis!r}"


def what_is_no_group(groups: object) -> Malformed | None:
    """Words for what is no dict of process groups; None where it is one."""
    if not isinstance(groups, Mapping):
        return malformed(groups, "a dict: an axis's name -> this rank's group along it")
    others = [(axis, one) for axis, one in groups.items() if not isinstance(one, dist.ProcessGroup)]
    return not_a_group(*others[0]) if others else None


def not_a_group(axis: str, value: object) -> Malformed:
    """What to say of something else."""
    if value is dist.GroupMember.NON_GROUP_MEMBER:
        return Malformed(
            f"under {axis!r} what dist.new_group returns on a rank that is not in the group",
            "Every rank makes all groups, and keeps those that it is in itself.",
            "if rank in ranks: mine[axis] = group",
        )
    hint = "Keep what dist.new_group returns."
    return Malformed(f"{kind(value)} under {axis!r}", "It has to be a process group.", hint)


EVERY = "sorted({tuple(ranks_along(axis, other, sizes)) for other in range(places)})"
ALL_CALL = "All ranks call dist.new_group for all groups of all axes, in the same order."
KEEP = "if rank in ranks:\n                mine[axis] = group"
PLACES = "Compare the product of the sizes with dist.get_world_size(), and raise ValueError."
OWN = "mine[axis] = dist.new_group(ranks_along(axis, rank, sizes))"
make_groups = Spec(
    todo="14.2",
    truth=grid.make_groups,
    layouts=SIX,
    cases=meshes,
    observe=groups_seen,
    guards_group=False,
    max_messages=1000,
    tell=lambda case: f"make_groups({case.sizes})",
    say=say_first,
    advice={
        "": "For each axis: all lines of ranks_along, a group for each, and keep the own one.",
        "the axes": "Return a dict with every axis of `sizes`, in that order.",
    },
    refusal=("The mesh has not as many places as there are ranks.", PLACES),
    reasons="""
        the new group's world size should be ::
            A group of more ranks than there are: is the mesh larger than the job? | {PLACES}
        unhashable type: 'list' :: A list cannot be in a set. | tuple(ranks_along(...))
    """,
    waits={
        "dist.new_group(": (
            "A rank waits for others that do not make this group, or make another one first.",
            ALL_CALL,
        ),
    },
    hints=(
        "Along an axis every rank is in one line, and several ranks are in the same one. Collect "
        "all lines of the axis, each once, in an order that is the same on every rank.",
        "tuple(ranks_along(axis, other, sizes)) for every other rank, in a set, sorted. For each "
        "of these call dist.new_group(list(ranks)), whether this rank is in it or not.",
        "Keep the group where dist.get_rank() is in its ranks. Before all that, raise ValueError "
        "if prod(sizes.values()) is not dist.get_world_size().",
    ),
    mistakes=r"""
        if places != world_size: => if places > world_size: :: A mesh with fewer places than ranks
            is not refused, and some ranks are in no group. | {PLACES}
        raise ValueError( => raise RuntimeError( ::
            The error is of another kind than the docstring says. | raise ValueError(...)
        for axis in sizes: => for axis in reversed(list(sizes)): ::
            The axes come in reverse order. | Return them in the order of `sizes`.
        for axis in sizes: => for axis in list(sizes)[:-1]: ::
            The last axis has no group. | for axis in sizes:
        for axis in sizes: => for axis in [a for a in sizes if sizes[a] > 1]: ::
            An axis of size 1 has no group. | A group of a single rank is one as well.
        {KEEP} => mine[axis] = group :: Every rank keeps the group that was made last, whether it is
            in it or not. | if rank in ranks: mine[axis] = group
        {KEEP} => if rank in ranks:\n                mine[axis] = list(ranks) ::
            These are the ranks of the groups, and not the groups. | Keep what new_group returns.
        dist.new_group(list(ranks)) => dist.new_group() ::
            Each group has all ranks of the job. | dist.new_group(list(ranks))
        dist.new_group(list(ranks)) => dist.new_group(list(ranks)[:-1] or list(ranks)) ::
            The last rank of each line is not in its group.
        {EVERY} => [tuple(ranks_along(axis, rank, sizes))] ::
            ! Each rank makes its own groups only. | {ALL_CALL}
        {EVERY} => sorted({EVERY}, key=lambda line: rank not in line) ::
            ! Each rank makes its own group first, so the ranks make them in different orders.
    """,
    module=globals(),
)
