"""0.1: which rank runs where."""

import os
import random
from typing import NamedTuple

from manyhands.checks.engine.spec import Place as Seat
from manyhands.checks.engine.spec import Spec
from manyhands.checks.engine.values import kind, malformed
from manyhands.first_job import places
from manyhands.first_job.places import Place

# ---- 0.1 ------------------------------------------------------------------------------------


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
GATHER = "dist.all_gather_object(places, mine)"
FILL = f"{GATHER}\n    return places"
DEVICE = 'f"cuda:{local_rank}" if has_gpu else "cpu"'
OWN_GPUS = "Each node counts its own GPUs from 0: use LOCAL_RANK."
device_map = Spec(
    todo="0.1",
    truth=places.device_map,
    layouts=(((0, 1, 2, 3),),),
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
    advice={"": "Print what each rank knows of itself before anything is gathered."},
    reasons="""
        Can't pickle :: The other ranks do not know a class that is written in a notebook or a
            function. | from manyhands.first_job.places import Place
        list assignment index out of range ::
            The list is shorter than the job has ranks. | places = [None] * dist.get_world_size()
        'int' and 'str' :: Environment variables are text. | int(environ['LOCAL_WORLD_SIZE'])
        'str' and 'int' :: Environment variables are text.
        missing 1 required positional argument: 'obj' ::
            all_gather_object takes a list to fill, and what this rank sends. | {GATHER}
        does not support item assignment :: The list to fill comes first.
        `tensor_list` :: all_gather sends tensors, and a Place is none.
        NOT be specified on non-dest :: gather_object fills a list on one rank only.
        process group twice :: The ranks have met already. | Leave out init_process_group.
    """,
    hints=(
        "Each rank first makes its own Place, from `environ`, num_gpus and host. The values in "
        "`environ` are text: int(environ['RANK']) reads one.",
        "The device is f'cuda:{local_rank}' if num_gpus >= LOCAL_WORLD_SIZE, else 'cpu'. A node "
        "counts its own GPUs from 0.",
        "places = [None] * dist.get_world_size(); dist.all_gather_object(places, mine); then "
        "return places.",
    ),
    mistakes=r"""
        {DEVICE} => "cuda:" + environ["RANK"] if has_gpu else "cpu" ::
            The device has the number of the rank in the job. | {OWN_GPUS}
        {LOCAL} => {RANK} % int(environ["LOCAL_WORLD_SIZE"]) :: LOCAL_RANK is computed from RANK,
            and it does not follow from it on uneven nodes. | Read LOCAL_RANK.
        {LOCAL} => {RANK} :: LOCAL_RANK is the number of the rank in the job here.
        {ENOUGH} => num_gpus > int(environ["LOCAL_WORLD_SIZE"]) :: Just enough GPUs count as too
            few. | Compare num_gpus with LOCAL_WORLD_SIZE: num_gpus >= LOCAL_WORLD_SIZE.
        {ENOUGH} => num_gpus == int(environ["LOCAL_WORLD_SIZE"]) ::
            More GPUs than processes count as too few.
        {ENOUGH} => num_gpus > 0 ::
            Any GPU is enough here, also where processes would have to share it.
        {ENOUGH} => local_rank < num_gpus :: Only some processes of a node get a GPU.
        {ENOUGH} => False :: The device is always "cpu".
        {DEVICE} => "cuda:0" if has_gpu else "cpu" ::
            All processes of a node would share one GPU. | {OWN_GPUS}
        {FILL} => return [mine] * dist.get_world_size() ::
            Every place is that of the rank itself: nothing of the others was sent. | Each rank
            gathers the places of all: all_gather_object fills the list on every rank.
        {FILL} => return [mine] :: The list holds the rank's own place alone.
        {FILL} => {GATHER}\n    return sorted(places, key=lambda place: place.host) ::
            The places are sorted by host. | all_gather_object keeps the order of the ranks.
        host, local_rank, device) => host[:4], local_rank, device) ::
            The name of the node is cut off. | Names of nodes begin alike: keep the whole name.
        host, local_rank, device) => host.split(".")[0], local_rank, device) ::
            The name of the node is cut off.
    """,
    module=globals(),
)
