"""0.2: which rank runs where; 0.3: which tasks are a rank's own."""

import os
import random
from collections.abc import Sequence
from typing import NamedTuple

from manyhands.checks.engine import cases
from manyhands.checks.engine.mistakes import Mistake, instead, mistakes
from manyhands.checks.engine.spec import Place as Seat
from manyhands.checks.engine.spec import Spec
from manyhands.checks.engine.values import difference, kind, malformed
from manyhands.first_job import planning
from manyhands.first_job.planning import Place

# ---- 0.2 ------------------------------------------------------------------------------------


class Node(NamedTuple):
    """A node of a job that the check makes up."""

    host: str
    num_processes: int
    num_gpus: int


class Job(NamedTuple):
    """One call of device_map on every rank of a job of four processes."""

    nodes: list[Node]


def jobs(n: int) -> list[Job]:
    """Even and uneven nodes, spare GPUs, just enough, too few, none; names that begin alike."""
    one, two = (f"node-{number}.g" for number in sorted(random.sample(range(10, 99), 2))[::-1])
    few = random.randrange(1, 4)
    return [
        Job([Node(one, 2, 2), Node(two, 2, 2)]),
        Job([Node(one, 1, 1), Node(two, 3, 3)]),
        Job([Node(one, 2, 4), Node(two, 2, 8)]),
        Job([Node(one, 4, few)]),
        Job([Node(two, 2, 0), Node(one, 2, 2)]),
    ]


def map_seen(answer: object, case: Job, seat: Seat) -> list:
    """What the answer makes of this rank's environment, GPUs and host."""
    nodes = [(node, local) for node in case.nodes for local in range(node.num_processes)]
    node, local = nodes[seat.job_rank]
    values = {"RANK": seat.job_rank, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": node.num_processes}
    environ = {name: str(value) for name, value in (values | {"WORLD_SIZE": 4}).items()}
    kept = dict(os.environ)
    os.environ.update(dict.fromkeys(environ, "77"))  # whoever reads these is seen
    try:
        return answer(environ, node.num_gpus, node.host, **seat.options)
    finally:
        os.environ.clear()
        os.environ.update(kept)


PARTS = "Place(rank, host, local_rank, device)"


def as_places(value: object) -> list[Place]:
    """A list of Places, whose parts have the right kinds."""
    if not isinstance(value, list):
        raise malformed(value, "the list of Places", "all_gather_object itself returns None.")
    kinds = (int, str, int, str)
    for one in value:
        if not all(hasattr(one, name) for name in Place._fields):
            raise malformed(one, "a Place in every element of the list", f"Make a {PARTS}.")
        for name, wanted in zip(Place._fields, kinds, strict=True):
            part = getattr(one, name)
            if type(part) is not wanted:
                hint = "Environment variables are text: int(environ['RANK']) reads a number."
                hint = hint if wanted is int else f"The order is {PARTS}."
                raise malformed(part, f"{kind(wanted())} as the {name} of a Place", hint)
    return [Place(*(getattr(one, name) for name in Place._fields)) for one in value]


def facts_of_map(found: list, wanted: list, case: Job) -> str:
    """What can be seen of a wrong map."""
    if sorted(found) == sorted(wanted):
        return "The places are those of the ranks, in another order."
    return ""


LOCAL = 'int(environ["LOCAL_RANK"])'
RANK = 'int(environ["RANK"])'
ENOUGH = 'num_gpus >= int(environ["LOCAL_WORLD_SIZE"])'
GATHER = "dist.all_gather_object(places, mine, group=group)"
FILL = f"{GATHER}\n    return places"
DEVICE = 'f"cuda:{local_rank}" if has_gpu else "cpu"'
OWN_GPUS = "Each node counts its own GPUs from 0: use LOCAL_RANK."
COMPARE = "Compare num_gpus with LOCAL_WORLD_SIZE: num_gpus >= LOCAL_WORLD_SIZE."
ONE_EACH = "Each rank gathers the places of all: all_gather_object fills the list on every rank."
device_map = Spec(
    todo="0.2",
    truth=planning.device_map,
    layouts=(((0, 1, 2, 3),), ((0, 1), (2, 3))),
    cases=jobs,
    observe=map_seen,
    form=as_places,
    facts=facts_of_map,
    may_change=("the environment variables",),
    tell=lambda case: (
        "device_map with "
        + " and ".join(
            f"{n.num_processes} processes, {n.num_gpus} GPUs on {n.host}" for n in case.nodes
        )
    ),
    say=lambda found, wanted: f"gives {difference(found, wanted)}",
    advice={"": "Print what each rank knows of itself before anything is gathered."},
    reasons={
        "Can't pickle": (
            "The other ranks do not know a class that is written in a notebook or a function.",
            "from manyhands.first_job.planning import Place",
        ),
        "list assignment index out of range": (
            "The list is shorter than the group has ranks.",
            "places = [None] * dist.get_world_size(group)",
        ),
        "'int' and 'str'": ("Environment variables are text.", "int(environ['LOCAL_WORLD_SIZE'])"),
        "'str' and 'int'": ("Environment variables are text.", "int(environ['LOCAL_WORLD_SIZE'])"),
        "missing 1 required positional argument: 'obj'": (
            "all_gather_object takes a list to fill, and what this rank sends.",
            GATHER,
        ),
        "does not support item assignment": ("The list to fill comes first.", GATHER),
        "`tensor_list`": ("all_gather sends tensors, and a Place is none.", GATHER),
        "NOT be specified on non-dest": ("gather_object fills a list on one rank only.", GATHER),
        "not part of group": ("src and dst count over the whole job.", GATHER),
        "process group twice": ("The ranks have met already.", "Leave out init_process_group."),
    },
    hints=(
        "Each rank first makes its own Place, from `environ`, num_gpus and host. The values in "
        "`environ` are text: int(environ['RANK']) reads one.",
        "The device is f'cuda:{local_rank}' if num_gpus >= LOCAL_WORLD_SIZE, else 'cpu'. A node "
        "counts its own GPUs from 0.",
        "places = [None] * dist.get_world_size(group); dist.all_gather_object(places, mine, "
        "group=group); then return places.",
    ),
    mistakes=mistakes(
        r"""
        {DEVICE} => "cuda:" + environ["RANK"] if has_gpu else "cpu"
            The device has the number of the rank in the job. | {OWN_GPUS}
        {LOCAL} => {RANK} % int(environ["LOCAL_WORLD_SIZE"])
            LOCAL_RANK is computed from RANK, and it does not follow from it on uneven nodes.
            | Read LOCAL_RANK.
        {LOCAL} => {RANK}
            LOCAL_RANK is the number of the rank in the job here. | Read LOCAL_RANK.
        {ENOUGH} => num_gpus > int(environ["LOCAL_WORLD_SIZE"])
            Just enough GPUs count as too few. | {COMPARE}
        {ENOUGH} => num_gpus == int(environ["LOCAL_WORLD_SIZE"])
            More GPUs than processes count as too few. | {COMPARE}
        {ENOUGH} => num_gpus > 0
            Any GPU is enough here, also where processes would have to share it. | {COMPARE}
        {ENOUGH} => local_rank < num_gpus
            Only some processes of a node get a GPU. | {COMPARE}
        {ENOUGH} => False
            The device is always "cpu". | {COMPARE}
        {DEVICE} => "cuda:0" if has_gpu else "cpu"
            All processes of a node would share one GPU. | {OWN_GPUS}
        {FILL} => return [mine] * dist.get_world_size(group)
            Every place is that of the rank itself: nothing of the others was sent. | {ONE_EACH}
        {FILL} => return [mine]
            The list holds the rank's own place alone. | {ONE_EACH}
        {FILL} => {GATHER}\n    return sorted(places, key=lambda place: place.host)
            The places are sorted by host. | all_gather_object keeps the order of the ranks.
        int(environ["RANK"]), host => dist.get_rank(group), host
            A Place holds the number in the group here, and it should be that in the whole job.
            | int(environ["RANK"])
        """,
        globals(),
    ),
)

# ---- 0.3 ------------------------------------------------------------------------------------


class Share(NamedTuple):
    """One call of my_share."""

    tasks: Sequence
    rank: int
    world_size: int


def shares() -> list[Share]:
    """All tasks, none, fewer than ranks, equal ones, falsy ones; lists, tuples and a range."""
    words = [f"file-{random.randrange(3)}" for _ in range(random.randrange(13, 18))]  # some twice
    pairs = [(20 * 2**size, seed) for size in range(5) for seed in range(3)]
    deals = [
        (["a", "b", "c", "d"], 2),
        ([], 2),
        (words[:3], 5),
        (list(cases.FALSY), 2),
        (pairs, 1),
        (words, 4),
        (tuple(pairs), 3),
        (range(100, 123), 7),
    ]
    return [Share(tasks, rank, size) for tasks, size in deals for rank in range(size)]


def share_seen(answer: object, case: Share) -> dict:
    """The share, and whether it is a list of its own."""
    found = answer(*case)
    if not isinstance(found, list):
        raise malformed(found, "a list", "list(...) makes one; one task, or none, is a list, too.")
    return {
        "the share": list(found),
        "the share is not the list `tasks` itself": found is not case[0],
    }


def pieces(round_up: bool) -> Mistake:
    """Solid pieces; with the rest shared by the first ranks or by the last."""

    def share(tasks, rank, world_size):
        size, rest = divmod(len(tasks), world_size)
        if round_up:
            size += rest > 0
            return list(tasks[rank * size : (rank + 1) * size])
        first = rank * size + min(rank, rest)
        return list(tasks[first : first + size + (rank < rest)])

    words = (
        "These are solid pieces: where later tasks take longer, the last rank gets the long ones."
    )
    return Mistake(instead(share), words, "Deal the tasks out like cards.")


def by_value(tasks: Sequence, rank: int, world_size: int) -> list:
    """Takes the first of equal tasks."""
    tasks = list(tasks)
    return [task for task in tasks if tasks.index(task) % world_size == rank]


def facts_of_share(found: dict, wanted: dict, case: Share) -> str:
    """What can be seen of a wrong share."""
    mine, right = found["the share"], wanted["the share"]
    if len(mine) == len(right) and sorted(map(repr, mine)) == sorted(map(repr, right)):
        return "These are the right tasks in another order."
    if len(mine) != len(right):
        return f"The share has {len(mine)} tasks, and it should have {len(right)}."
    return ""


SLICE = "tasks[rank::world_size]"
PAD = ": -len(tasks) % world_size"
STEP = "The positions are rank, rank + world_size, rank + 2 * world_size, and so on."
my_share = Spec(
    todo="0.3",
    truth=planning.my_share,
    cases=shares,
    observe=share_seen,
    tell=lambda case: (
        f"my_share({list(case.tasks)}, {case.rank}, {case.world_size})"
        if len(case.tasks) < 6
        else f"my_share({len(case.tasks)} tasks, {case.rank}, {case.world_size})"
    ),
    facts=facts_of_share,
    advice={"": STEP},
    reasons={
        "modulo by zero": ("A rank's number was divided by, and rank 0 has none.", STEP),
        "index out of range": (
            "A position lies beyond the end: some ranks have fewer tasks than others, or none.",
            "range(rank, len(tasks), world_size) ends in time, and so does a slice.",
        ),
        "lower bound": (
            "torch.arange must not begin beyond its end, as it does for a rank without tasks.",
            "range(rank, len(tasks), world_size) is empty then.",
        ),
        "process group has not been": (
            "There is no process group here: the arguments hold all that is asked for.",
            "Use rank and world_size.",
        ),
    },
    hints=(
        "Think of dealing cards: the first task goes to rank 0, the next to rank 1, and after the "
        "last rank it is rank 0's turn again.",
        "A slice with a step does it: tasks[start :: step].",
    ),
    mistakes=[
        pieces(True),
        pieces(False),
        Mistake(instead(by_value), "Equal tasks count as one here.", "Go by the position."),
        *mistakes(
            """
            list({SLICE}) => list(tasks[rank:world_size])
                This is one piece, from rank up to world_size. | Two colons make steps.
            {SLICE} => tasks[rank + 1::world_size]
                Nobody does the first task. | Positions count from 0.
            {SLICE} => tasks[world_size::rank]
                rank and world_size have changed places in the slice. | tasks[start :: step]
            {SLICE} => tasks[:len(tasks) // world_size * world_size][rank::world_size]
                The rest of the division is dropped. | A slice with a step keeps it.
            {SLICE} => tasks[rank::2]
                The step is always 2. | A rank's tasks lie world_size apart.
            list({SLICE}) => list(range(rank, len(tasks), world_size))
                These are positions in the list. | Return the tasks themselves.
            list({SLICE}) => [task for task in {SLICE} if task]
                Tasks such as 0 and "" are left out. | They are tasks like all others.
            list({SLICE}) => (list(tasks) + list(tasks[{PAD}]))[rank::world_size]
                The shares are padded to equal length, so some tasks are done twice. | {STEP}
            list({SLICE}) => tasks if world_size == 1 else list({SLICE})
                For one rank the caller's own list comes back. | list(...) makes a new one.
            list({SLICE}) => list(tasks)
                Every rank does everything. | {STEP}
            """,
            globals(),
        ),
    ],
)
