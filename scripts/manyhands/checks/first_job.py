"""Checks of lesson 00. Truth is arithmetic, real ranks, or what Slurm and bash make of a text.

Each check runs the learner's code on ranks, brings home what it gave, and then compares it with
the mistakes that people make most, so that the verdict can name the one at hand.
"""

import difflib
import itertools
import math
import os
import random
import re
import shlex
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean, linear_regression, stdev
from typing import NamedTuple

import torch
import torch.distributed as dist

from manyhands.checks import Lesson, Wrong, ranks, told
from manyhands.checks.shared import Reasons, alone, because, number
from manyhands.first_job import planning
from manyhands.first_job.planning import Place
from manyhands.ranks.failures import RankFailed

lesson = Lesson("first_job")
hint, summary, ready, keep = lesson.hint, lesson.summary, lesson.ready, lesson.keep


# ---- what a call gives ------------------------------------------------------------------------


def _pair(value: object, what: str, names: tuple[str, str]) -> tuple[float, float]:
    shown, value = value, value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, tuple | list) or len(value) != 2:
        smell = "nothing is returned" if value is None else "two numbers are asked for"
        raise Wrong(f"{what} gives {shown!r}"[:200], smell, f"return {names[0]}, {names[1]}")
    one, other = (number(part, f"{what}: {name}") for part, name in zip(value, names, strict=True))
    return one, other


def _near(value: float, wanted: float) -> bool:
    return math.isclose(value, wanted, rel_tol=1e-5)


def _is_rounded(value: float, wanted: float) -> bool:
    """Up or down to a whole number, or to some decimals."""
    whole = {math.floor(wanted), math.ceil(wanted)}
    return value in whole or any(math.isclose(value, round(wanted, n)) for n in range(5))


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


Mistakes = Iterable[tuple[float, str, str]]  # what it would give, what it smells of, what to try


def _named(value: float, mistakes: Mistakes, otherwise: str) -> tuple[str, str]:
    """Smell and hint of the mistake that gives this value."""
    for wrong, smell, advice in mistakes:
        if _near(value, wrong):
            return smell, advice
    return "", otherwise


# ---- 0.1 ------------------------------------------------------------------------------------


@lesson.exercise(
    "0.1",
    "First the speed of the whole machine: devices, times the peak of one, times the share of it "
    "that is reached.",
    "Work in PF/s-days divided by a speed in PF/s gives days; nothing has to be turned into hours.",
    "One PF/s is 1000 TFLOP/s: petaflops = num_devices * peak_tflops / 1000 * utilisation.",
)
def days_on_devices(answer) -> None:
    """Trainings of several sizes, on one device and on thousands; some take less than a day."""
    cases = [
        (
            round(random.uniform(500, 5000), 1),
            random.choice([8, 64, 96, 512]),
            random.choice([125, 312, 989]),
            round(random.uniform(0.21, 0.47), 3),
        ),
        (3640, 1024, 312, 0.45),
        (round(random.uniform(1, 9), 2), 1, 67, round(random.uniform(0.5, 0.9), 2)),
        (1.0, random.randrange(200, 900), 2250, 0.95),
    ]
    for case, value in zip(cases, alone(answer, cases, _tell_days, {}), strict=True):
        _compare_days(value, *case)


def _tell_days(*case: object) -> str:
    return f"days_on_devices{case}"


def _compare_days(
    value: object, work: float, num_devices: int, peak: float, utilisation: float
) -> None:
    case = _tell_days(work, num_devices, peak, utilisation)
    value = number(value, case)
    wanted = work / (num_devices * peak / 1000 * utilisation)
    if _near(value, wanted):
        return
    ratio = value / wanted
    mistakes = [
        (
            utilisation,
            "`utilisation` is left out: no training reaches the peak",
            "multiply the speed by it",
        ),
        (
            utilisation**2,
            "a lower utilisation makes the training shorter there",
            "it makes the machine slower: multiply the speed by it, not the days",
        ),
        (utilisation / (1 - utilisation), "1 - utilisation is what is lost", "take utilisation"),
        (100, "`utilisation` is a share from 0 to 1, not a percentage", "do not divide it by 100"),
        (num_devices, "the devices are left out", "they work at the same time: multiply the speed"),
        (num_devices**2, "more devices make the training longer there", "divide by num_devices"),
        (1 / wanted**2, "that is days turned over", "work divided by speed"),
        (1.024, "a factor of 1024: prefixes of speeds count in 1000", "TFLOP/s / 1000 = PF/s"),
        (
            (peak / 1000 * utilisation) ** 2,
            "a / b * c is (a / b) * c",
            "put the whole speed in brackets: work / (...)",
        ),
    ]
    smell, advice = _named(ratio, mistakes, "the speed of all devices in PF/s, then work / speed")
    if not smell and _is_rounded(value, wanted):
        smell, advice = "the days were rounded", "return the number as it is, with / and not //"
    seen = f"{case} is {value:,.6g}, not {wanted:,.6g}"
    raise Wrong(seen, *(_of_units(ratio) or (smell, advice)))


def _of_units(ratio: float) -> tuple[str, str] | None:
    """The mistake behind a factor that is made of powers of ten and of times."""
    tens = {10.0 ** (sign * power) for sign in (1, -1) for power in (0, 3, 6, 12, 15)}
    times = {1.0} | {float(x) ** sign for x in (24, 60, 1440, 3600, 86400) for sign in (1, -1)}
    for ten, time in itertools.product(sorted(tens, key=lambda x: abs(math.log(x))), times):
        if ten * time == 1 or not _near(ratio, ten * time):
            continue
        thousand = (
            f"a factor of {max(ten, 1 / ten):,.0f}: peak_tflops counts 1e12 operations in a "
            "second, a PF/s 1e15"
        )
        days = (
            f"a factor of {max(time, 1 / time):,.0f}: a PF/s-day is already the work of a whole "
            "day, so work / speed gives days"
        )
        parts = [text for text, factor in ((thousand, ten), (days, time)) if factor != 1]
        advice = "TFLOP/s / 1000 = PF/s" if ten != 1 else "no hours and no seconds are needed"
        return "; and ".join(parts), advice
    return None


# ---- 0.2 ------------------------------------------------------------------------------------


class Node(NamedTuple):
    """A node of a job that the check makes up."""

    host: str
    num_processes: int
    num_gpus: int

    def __str__(self) -> str:
        processes = f"{self.num_processes} process{'es' * (self.num_processes != 1)}"
        return f"{self.host} ({processes}, {self.num_gpus} GPU{'s' * (self.num_gpus != 1)})"


AS_TEXT = "environment variables are text", "wrap them: int(environ['LOCAL_WORLD_SIZE'])"
GATHER = "dist.all_gather_object(places, mine, group=group)"
MAP_REASONS: Reasons = {
    "Can't pickle": (
        "a class that is written in a notebook or a function is not known on the other ranks",
        "from manyhands.first_job.planning import Place",
    ),
    "list assignment index out of range": (
        "the list is shorter than the group has ranks",
        "[None] * dist.get_world_size(group)",
    ),
    "'int' and 'str'": AS_TEXT,
    "'str' and 'int'": AS_TEXT,
    "missing 1 required positional argument: 'obj'": (
        "all_gather_object needs a list to fill, and what this rank sends",
        GATHER,
    ),
    "does not support item assignment": ("the list to fill comes first, then what is sent", GATHER),
    "`tensor_list`": ("all_gather sends tensors, and a Place is none", GATHER),
    "NOT be specified on non-dest": ("gather_object fills a list on one rank only", GATHER),
    "not part of group": (
        "src or dst, 0 if it is not given, counts over the whole job, and that rank is not in the "
        "group (and gather_object fills a list on one rank only)",
        f"{GATHER} needs neither",
    ),
    "process group twice": ("the ranks have met already", "leave out init_process_group"),
}


@lesson.exercise(
    "0.2",
    "Each rank first makes its own Place, from `environ`, num_gpus and host. The values in "
    "`environ` are text: int(environ['RANK']) reads one.",
    "The device is f'cuda:{local_rank}' if num_gpus >= LOCAL_WORLD_SIZE, else 'cpu'. A node counts "
    "its own GPUs from 0.",
    "places = [None] * dist.get_world_size(group); dist.all_gather_object(places, mine, "
    "group=group); then return places.",
)
def device_map(answer) -> None:
    """Four ranks as several jobs: even and uneven nodes, spare GPUs, too few, none; two groups."""
    names = random.sample(range(10, 99), 2)
    one, two = (f"g{number}" for number in sorted(names, reverse=True))  # not in the ranks' order
    jobs = [
        [Node(one, 2, 2), Node(two, 2, 2)],
        [Node(one, 1, 1), Node(two, 3, 3)],
        [Node(one, 2, 4), Node(two, 2, 8)],
        [Node(one, 4, 4)],
        [Node(one, 4, random.randrange(1, 4))],
        [Node(one, 2, 0), Node(two, 2, 2)],
    ]
    try:
        results = ranks(_maps_seen, 4, answer, jobs)
    except RankFailed as failed:
        if failed.failure.error == "NotImplementedError":
            raise
        raise because(failed.failure, MAP_REASONS, *told(failed, answer)) from None
    if None in results:
        raise Wrong("a rank left by sys.exit()", "", "let the function end, or return")
    _compare_devices([maps for seen in results for maps in seen["jobs"]])
    for job, maps in zip(jobs, zip(*(seen["jobs"] for seen in results), strict=True), strict=True):
        _compare_maps(list(maps), job)
    _compare_pairs([seen["pair"] for seen in results], jobs[0])


def _compare_devices(maps: list) -> None:
    """Does any of all maps hold another device than the CPU?"""
    places = [place for found in maps if isinstance(found, list) for place in found]
    if places and all(place[0] != 77 and place[3:] == ("cpu",) for place in places):
        raise Wrong(
            "the device is 'cpu' in all jobs, also on nodes with a GPU for each process",
            "num_gpus does not decide; torch.cuda and os.environ know this machine, not the node",
            "compare num_gpus with LOCAL_WORLD_SIZE",
        )


def _places(job: list[Node]) -> list[tuple[Place, Node]]:
    """The truth: where each rank runs, and its node."""
    found = []
    for node in job:
        for local in range(node.num_processes):
            device = f"cuda:{local}" if node.num_gpus >= node.num_processes else "cpu"
            found.append((Place(len(found), node.host, local, device), node))
    return found


def _maps_seen(answer, jobs: list[list[Node]]) -> dict:
    rank, names = dist.get_rank(), ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    os.environ.update(dict.fromkeys(names, "77"))  # whoever reads these is seen
    pairs = dist.new_group([0, 1]), dist.new_group([2, 3])

    def call(job: list[Node], **options) -> object:
        place, node = _places(job)[rank]
        values = (rank, place.local_rank, node.num_processes, 4)
        environ = {name: str(value) for name, value in zip(names, values, strict=True)}
        return _plain(answer(environ, node.num_gpus, node.host, **options))

    return {"jobs": [call(job) for job in jobs], "pair": call(jobs[0], group=pairs[rank // 2])}


def _plain(found: object) -> object:
    """A list of places as tuples; what is no list, or no place, as text."""

    def form(value: object) -> str:
        kind, text = type(value).__name__, repr(value)
        return text[:120] if text.startswith(kind) or value is None else f"{kind} {text}"[:120]

    def fields(value: object) -> object:
        whole = all(hasattr(value, name) for name in Place._fields)
        return tuple(getattr(value, name) for name in Place._fields) if whole else form(value)

    return [fields(value) for value in found] if isinstance(found, list) else form(found)


def _compare_maps(maps: list, job: list[Node]) -> None:
    """What the four ranks returned, against the truth."""
    truth = _places(job)
    wanted = [tuple(place) for place, _ in truth]
    case = f"on {' and '.join(str(node) for node in job)}"
    if maps[0] != "None" and maps[1:] == ["None"] * 3:
        raise Wrong(
            f"{case}: rank 0 has the list, ranks 1, 2 and 3 return None",
            "every rank is asked for the map",
            "all_gather_object gives it to all; return it outside of any `if`",
        )
    for rank, found in enumerate(maps):
        at = f"{case}: rank {rank}"
        _compare_form(found, at, 4)
        host = truth[rank][0].host
        if len(job) > 1 and [place[1] for place in found] == [host] * 4:
            raise Wrong(
                f"{at} has all ranks on its own node {host}",
                "a rank knows its own environment only; nothing of the others was sent to it",
                GATHER,
            )
        if found != wanted and Counter(map(repr, found)) == Counter(map(repr, wanted)):
            raise Wrong(
                f"{at} returns the places in the order of ranks {[place[0] for place in found]}",
                "the list was sorted by something else than the rank",
                "all_gather_object puts them in the order of the ranks; leave them so",
            )
        for place, (right, node) in zip(found, truth, strict=True):
            if place != tuple(right) or type(place[0]) is not int or type(place[2]) is not int:
                raise _why_place(place, right, node, at)


def _compare_form(found: object, at: str, num_ranks: int) -> None:
    if found == "None":
        raise Wrong(
            f"{at} returns None",
            "all_gather_object fills the list that it is given, and itself returns None; print "
            "returns None as well",
            "end with `return places`",
        )
    if not isinstance(found, list):
        raise Wrong(f"{at} returns a {found}", "", "return the list of Places")
    if len(found) == 1:
        raise Wrong(
            f"{at} returns its own place alone",
            "a rank knows its own environment only",
            GATHER,
        )
    if "None" in found:
        raise Wrong(
            f"{at} returns a list of {len(found)} with None in it; the group has {num_ranks} ranks",
            "the list was never filled, or has more elements than there are ranks",
            "[None] * dist.get_world_size(group), then all_gather_object",
        )
    if len(found) != num_ranks:
        raise Wrong(f"{at} returns {len(found)} places of {num_ranks} ranks", "", "one a rank")
    if strange := [place for place in found if isinstance(place, str)]:
        raise Wrong(
            f"{at} returns a list with a {strange[0]}",
            "the elements are Places, whose parts have names",
            "Place(rank, host, local_rank, device)",
        )


def _why_place(place: tuple, right: Place, node: Node, at: str) -> Wrong:
    """The mistake behind a place that is not the right one."""
    rank, host, local_rank, device = place
    seen = f"{at} has rank {right.rank} as {Place(*place)!r}, not {right!r}"
    if not isinstance(host, str) or isinstance(device, int):
        smell = "the parts of a Place are in the order rank, host, local_rank, device"
        return Wrong(seen, smell, "name them: Place(rank=..., host=..., local_rank=..., ...)")
    if isinstance(rank, str) or isinstance(local_rank, str):
        return Wrong(seen, "environment variables are text", "wrap them in int(...)")
    if 77 in (rank, local_rank) or str(device) == "cuda:77":
        smell = "the values come from os.environ, not from `environ`"
        return Wrong(seen, smell, "read every variable from the argument `environ`")
    if host != right.host:
        smell = f"the name of this rank's node is given, it is {right.host}"
        return Wrong(seen, smell, "take `host` as it is")
    if rank != right.rank:
        smell = "RANK counts over the whole job, LOCAL_RANK on this node only"
        return Wrong(seen, smell, "the first part is int(environ['RANK'])")
    if local_rank != right.local_rank:
        smell = (
            "LOCAL_RANK is the number on this node; it does not follow from RANK where nodes have "
            "unequal numbers of processes or more GPUs than processes"
        )
        return Wrong(seen, smell, "the third part is int(environ['LOCAL_RANK'])")
    return Wrong(seen, *_why_device(device, right, node))


def _why_device(device: object, right: Place, node: Node) -> tuple[str, str]:
    if not isinstance(device, str):
        text = f"'{right.device}'"
        return "the device is asked for as a text", f"{text}, not torch.device({text})"
    if right.device == "cpu" and node.num_gpus == 0:
        return "there is no GPU on that node", "'cpu' where num_gpus is less than LOCAL_WORLD_SIZE"
    if right.device == "cpu":
        return (
            f"{node.num_processes} processes cannot have a GPU each there: num_gpus is "
            f"{node.num_gpus}",
            "compare num_gpus with LOCAL_WORLD_SIZE",
        )
    if device == f"cuda:{right.rank}":
        return (
            f"RANK is unique in the whole job, but each node counts its own GPUs from 0: on the "
            f"node of rank {right.rank} the processes have cuda:0 to cuda:{node.num_processes - 1}",
            "use LOCAL_RANK",
        )
    if device == "cpu" and node.num_gpus == node.num_processes:
        return (
            f"{node.num_gpus} GPUs are just enough for the {node.num_processes} processes there",
            "num_gpus >= LOCAL_WORLD_SIZE; not >, and not WORLD_SIZE",
        )
    if device == "cpu":
        return (
            f"{node.num_gpus} GPUs are more than enough for the {node.num_processes} processes "
            "there",
            "num_gpus >= LOCAL_WORLD_SIZE; not ==, and no GPUs of other nodes",
        )
    if device in ("cuda", "cuda:0"):
        return "all processes of the node would share one GPU", "f'cuda:{local_rank}'"
    if not re.fullmatch(r"cuda:\d+", device):
        return "torch's name of a GPU is cuda, a colon, and its number", "f'cuda:{local_rank}'"
    return "GPUs are numbered on each node from 0", "use LOCAL_RANK as it is"


def _compare_pairs(maps: list, job: list[Node]) -> None:
    """What each rank returned when it was given the group of its own pair."""
    truth = [tuple(place) for place, _ in _places(job)]
    for rank, found in enumerate(maps):
        first = rank // 2 * 2
        wanted = truth[first : first + 2]
        if found == wanted:
            continue
        at = f"with group = ranks {first} and {first + 1}: rank {rank}"
        if isinstance(found, list) and len(found) == 4 and "None" not in found:
            raise Wrong(
                f"{at} returns {len(found)} places, not 2",
                "`group` is not passed on, so all ranks of the job take part",
                "give all_gather_object and get_world_size the group",
            )
        _compare_form(found, at, 2)
        raise Wrong(
            f"{at} returns ranks {[place[0] for place in found]}, not {[p[0] for p in wanted]}",
            "a Place holds the number in the whole job, not the number in the group",
            "the first part is int(environ['RANK'])",
        )


# ---- 0.3 ------------------------------------------------------------------------------------

SHARE_REASONS: Reasons = {
    "slice step cannot be zero": (
        "rank and world_size have changed places: the step is how far apart a rank's tasks are",
        "tasks[start :: step] begins at `start` and takes every step-th",
    ),
    "modulo by zero": (
        "rank and world_size have changed places: rank 0 divides by 0",
        "a task at position i belongs to rank i % world_size",
    ),
    "index out of range": (
        "a position beyond the end: some ranks have fewer tasks than others, or none",
        "range(rank, len(tasks), world_size) ends in time, and so does a slice",
    ),
    "lower bound": (
        "torch.arange must not begin beyond its end, as it does for a rank without tasks",
        "range(rank, len(tasks), world_size) is empty then",
    ),
}


@lesson.exercise(
    "0.3",
    "Think of dealing cards: the first task goes to rank 0, the next to rank 1, and after the last "
    "rank it is rank 0's turn again.",
    "A slice with a step does it: tasks[start :: step].",
)
def my_share(answer) -> None:
    """Tasks that do and do not divide evenly, fewer than ranks, none, on 1 to 7 ranks."""
    pairs = [(20 * 2**size, seed) for size in range(random.randrange(4, 8)) for seed in range(3)]
    words = [f"file-{random.randrange(3)}" for _ in range(random.randrange(13, 18))]  # some twice
    jobs = [
        (pairs, random.randrange(2, 4)),
        (words, 4),
        (tuple(pairs), 5),
        (range(100, 123), 3),
        (words[:3], 7),
        (pairs, 1),
        ([], 2),
    ]
    cases = [(tasks, rank, size) for tasks, size in jobs for rank in range(size)]
    found = alone(
        answer, cases, _tell_share, SHARE_REASONS, lambda answer, *case: _share(answer(*case))
    )
    for tasks, world_size in jobs:
        _compare_shares(list(itertools.islice(found, world_size)), tasks, world_size)


def _tell_share(tasks, rank: int, world_size: int) -> str:
    return f"my_share({len(tasks)} tasks, rank={rank}, world_size={world_size})"


def _share(value: object) -> list | str:
    """A list as it is; what is none, in words."""
    if isinstance(value, list):
        return value
    plain = value is None or isinstance(value, tuple | str | int | float)
    return f"{value!r}"[:60] if plain else f"a {type(value).__name__}"


def _compare_shares(shares: list, tasks, world_size: int) -> None:
    wanted = [list(tasks[rank::world_size]) for rank in range(world_size)]
    case = f"{len(tasks)} tasks on {world_size} ranks"
    for rank, share in enumerate(shares):
        if isinstance(share, str):
            smell = "nothing is returned" if share == "None" else "a list is asked for"
            advice = "list(...) makes one; one task, or none, is a list, too"
            raise Wrong(f"{case}: rank {rank} returns {share}", smell, advice)
        kind = type(tasks[0]) if tasks else int
        if strange := [part for part in share if not isinstance(part, kind | int)]:
            seen = f"{case}: rank {rank} gets a {type(strange[0]).__name__} in its list"
            smell = f"a task is a {kind.__name__} here; is there a list in the list, or an array?"
            raise Wrong(seen, smell, "the tasks themselves: tasks[rank::world_size]")
    if shares == wanted:
        return
    rank = next(rank for rank in range(world_size) if shares[rank] != wanted[rank])
    seen = f"{case}: rank {rank} gets {_short(shares[rank])}, not {_short(wanted[rank])}"
    raise Wrong(seen, *_why_share(shares, wanted, list(tasks), world_size))


def _short(share: list) -> str:
    return f"{str(share[:4])[:-1]}, ... {len(share)} in all]" if len(share) > 5 else str(share)


def _why_share(shares: list, wanted: list, tasks: list, world_size: int) -> tuple[str, str]:
    """The mistake behind shares that are not the right ones."""
    all_in = [task for share in shares for task in share]
    missing, extra = Counter(tasks) - Counter(all_in), Counter(all_in) - Counter(tasks)
    if extra and all(isinstance(task, int) for task in all_in) and not isinstance(tasks[0], int):
        return "those are positions in the list, not the tasks there", "return the tasks themselves"
    for slip, smell, advice in _slips_of_shares(tasks, world_size):
        if shares == [slip(rank) for rank in range(world_size)]:
            return smell, advice
    if world_size > 1 and not missing and not extra and all_in == tasks:
        return (
            "solid pieces: where later tasks take longer, the last rank gets all the long ones",
            "deal them out like cards",
        )
    if [sorted(map(repr, s)) for s in shares] == [sorted(map(repr, s)) for s in wanted]:
        return "the order within the share is another one", "keep the order of the list"
    if sorted(map(repr, shares)) == sorted(map(repr, wanted)):
        return "the right shares, but to other ranks", "rank 0 begins at position 0"
    positions = "the positions are rank, rank + world_size, rank + 2 * world_size ..."
    if extra:
        task = next(iter(extra))
        padded = not missing and len({len(share) for share in shares}) == 1
        return (
            f"{task!r} is done {_times(all_in.count(task))} in all, and stands "
            f"{_times(tasks.count(task))} in the list",
            "do not pad the shares to equal length" if padded else positions,
        )
    return (ONCE, BY_POSITION) if missing and len(set(tasks)) < len(tasks) else ("", positions)


ONCE = "some tasks of that list are equal; .index, a set or a dict knows only one of them"
BY_POSITION = "go by the position in the list"


def _slips_of_shares(t: list, n: int) -> Iterable[tuple[Callable, str, str]]:
    """Mistakes: what each would give rank r of n of the tasks t, what it smells of, what to try."""
    each = len(t) // n
    dropped = "the rest of the division was dropped", "a slice with a step keeps it"
    steps = "two colons make steps: tasks[start :: step]"
    yield lambda r: t, "every rank does everything: nothing was shared out", steps
    yield lambda r: [one for one in t if t.index(one) % n == r], ONCE, BY_POSITION
    yield lambda r: t[r:n], "one colon: that is one piece, from rank up to world_size", steps
    yield lambda r: sorted(t)[r::n], "the tasks were sorted", "keep the order of the list"
    yield lambda r: t[r * n :][:n], "// makes solid pieces", "position % world_size"
    yield lambda r: t[r : r + each], "these pieces overlap: each begins one task later", steps
    yield lambda r: t[r + 1 :: n], "the first task is done by nobody", "positions count from 0"
    if len(t) % n:
        yield lambda r: t[r : each * n : n], *dropped
        yield lambda r: t[r * each :][:each], *dropped
    yield lambda r: t[r::n][:3], "some ranks have more than three tasks", "up to the list's end"
    for step in {1, 2, n - 1, n + 1} - {0}:
        smell = f"the step is {step}, and there are {n} ranks"
        yield lambda r, step=step: t[r::step], smell, "a rank's tasks lie world_size apart"


# ---- 0.4 ------------------------------------------------------------------------------------

FIT_REASONS: Reasons = {
    "must be Tensor": ("torch.log takes a tensor, not a list", "torch.tensor(sizes).log()"),
    "must be real number": (
        "math.log takes one number, not a list",
        "[math.log(size) for size in sizes], or torch.tensor(sizes).log()",
    ),
    "division by zero": (
        "two networks of one size: no slope can be taken between them",
        "fit one line through all points",
    ),
    "math domain error": ("a logarithm was taken twice, or of a slope", "log of sizes and errors"),
}


@lesson.exercise(
    "0.4",
    "Take the logarithm of all sizes and of all errors. Then a straight line has to be fitted.",
    "The least squares line y = intercept + slope * x: slope = sum((x - mean x) * (y - mean y)) / "
    "sum((x - mean x)**2), intercept = mean y - slope * mean x.",
    "log(error) = log(a) - b log(size): so b = -slope and a = exp(intercept).",
)
def fit_power_law(answer) -> None:
    """Exact curves, falling and rising, two points; and scattered ones with sizes that repeat."""
    exact = _curve(random.uniform(3, 8), random.uniform(0.2, 0.8), [320, 20, 5000, 80, 1250])
    cases = [
        exact,
        _curve(random.uniform(0.02, 0.1), -random.uniform(0.1, 0.4), (10, 100, 2000)),
        _curve(random.uniform(20, 90), random.uniform(1.1, 1.6), [1000, 1e6]),
        _scattered(),
        _scattered(),
    ]
    values = alone(answer, cases, _tell_fit, FIT_REASONS)
    for (sizes, errors), found in zip(cases, values, strict=True):
        _compare_fit(found, list(sizes), list(errors))


def _tell_fit(sizes, errors) -> str:
    return f"fit_power_law({len(sizes)} sizes, {len(errors)} errors)"


def _curve(a: float, b: float, sizes) -> tuple:
    return sizes, type(sizes)(a * size**-b for size in sizes)


def _scattered() -> tuple[list, list]:
    """Networks of which several have one size, and far enough from a line to tell fits apart."""
    a, b = random.uniform(1, 4), random.uniform(0.3, 0.6)
    sizes = [size for size in (20, 40, 80, 160, 320, 640) for _ in range(random.randrange(2, 5))]
    random.shuffle(sizes)
    while True:
        errors = [a * size**-b * math.exp(random.gauss(0, 0.4)) for size in sizes]
        fits = [(*_fit(sizes, errors), "", ""), *_other_fits(sizes, errors)]
        if not any(
            one[2] != other[2] and _agree(one[:2], other[:2], 0.01)
            for one, other in itertools.combinations(fits, 2)
        ):
            return sizes, errors


def _fit(sizes: list, errors: list) -> tuple[float, float]:
    slope, intercept = linear_regression(_logs(sizes), _logs(errors))
    return math.exp(intercept), -slope


def _logs(values: list) -> list[float]:
    return [math.log(value) for value in values]


def _agree(one: tuple, other: tuple, tolerance: float = 1e-3) -> bool:
    """Within what 32 bits reach."""
    return all(
        math.isclose(x, y, rel_tol=tolerance, abs_tol=1e-6) for x, y in zip(one, other, strict=True)
    )


def _other_fits(sizes: list, errors: list) -> list[tuple[float, float, str, str]]:
    """a and b of fits that are not the one asked for, with the mistake and a hint."""
    by_size: dict = {}
    for size, error in zip(sizes, errors, strict=True):
        by_size.setdefault(size, []).append(error)
    last = _fit(list(by_size), [found[-1] for found in by_size.values()])
    means = _fit(list(by_size), [fmean(found) for found in by_size.values()])
    low, high = min(by_size), max(by_size)
    ends = _fit([low, high], [by_size[low][0], by_size[high][0]])
    pairs = [[0, end] for end in (1, -1) if sizes[0] != sizes[end]]
    chosen = [_fit([sizes[i] for i in pair], [errors[i] for i in pair]) for pair in pairs]
    all_count = "every network counts: a size may come more than once"
    every = "give the line every pair of size and error"
    two = "a line through two of the points lets chance decide"
    whole = "least squares over all points"
    square = "the squares are to be summed of distances in log(error), where a factor 2 is as far"
    return [
        (*last, all_count, every + "; a dict keeps the last one of a size"),
        (*means, all_count, every + ", without averaging first"),
        *[(*fit, two, whole) for fit in (ends, *chosen)],
        (*_curve_fit(sizes, errors), square, "fit a straight line to the logarithms"),
    ]


def _curve_fit(sizes: list, errors: list) -> tuple[float, float]:
    """The curve with the least squares in the error itself, by Gauss-Newton steps."""
    a, b = _fit(sizes, errors)
    for _ in range(50):
        rows = torch.tensor([[s**-b, -a * math.log(s) * s**-b] for s in sizes]).double()
        rest = torch.tensor([e - a * s**-b for s, e in zip(sizes, errors, strict=True)]).double()
        change = torch.linalg.lstsq(rows, rest[:, None]).solution[:, 0].tolist()
        a, b = a + 0.5 * change[0], b + 0.5 * change[1]
    return a, b


def _compare_fit(found: object, sizes: list, errors: list) -> None:
    case = f"for {len(sizes)} networks of sizes {min(sizes):g} to {max(sizes):g}"
    got = _pair(found, case, ("a", "b"))
    a, b = _fit(sizes, errors)
    if _agree(got, (a, b)):
        return
    seen = f"{case}: a, b = {got[0]:.5g}, {got[1]:.5g}, not {a:.5g}, {b:.5g}"
    for *fit, smell, advice in _slips(a, b, sizes, errors):
        if _agree(got, tuple(fit)):
            raise Wrong(seen, smell, advice)
    if len(set(sizes)) < len(sizes):
        for *fit, smell, advice in _other_fits(sizes, errors):
            if _agree(got, tuple(fit)):
                raise Wrong(seen, smell, advice)
    advice = "log(error) = log(a) - b log(size): b = -slope, a = exp(intercept)"
    if _is_rounded(got[0], a) and _is_rounded(got[1], b):
        raise Wrong(seen, "a and b were rounded", "return them as they are")
    if not got[0] > 0:
        raise Wrong(seen, "a is the error at size 1, which is above 0", advice)
    points = list(zip(sizes, errors, strict=True))
    far, least = (
        sum((math.log(e) - math.log(one) + other * math.log(s)) ** 2 for s, e in points)
        for one, other in (got, (a, b))
    )
    if far - least < len(points) * (0.2 if least < 1e-9 else 0.01) ** 2:
        smell = "close, but not yet the least: a search by small steps has not arrived"
        raise Wrong(seen, smell, "many more steps, or the formula of the least squares line")
    if least < 1e-9 and math.isclose(got[1], b, rel_tol=1e-3):
        raise Wrong(seen, "the slope is right, but the line lies too high or too low", advice)
    smell = f"its squared distances in log(error) sum to {far:.3g}; the least possible is "
    raise Wrong(seen, f"{smell}{round(least, 9):.3g}", advice)


def _slips_of_slope(x: list, y: list, b: float) -> list[tuple[float, float, str, str]]:
    """A line through the middle of the points, with a wrong slope."""
    ratio, n = stdev(y) / stdev(x), len(x)
    far = "std(y) / std(x) leaves out how far y goes with x", "sum((x - mean x) * (y - mean y))"
    uneven = "of one mean n numbers are counted, of the other n - 1", "sums on both sides"
    slopes = [(ratio, far), (-ratio, far), (-b * (n - 1) / n, uneven), (-b * n / (n - 1), uneven)]
    return [(math.exp(fmean(y) - slope * fmean(x)), -slope, *why) for slope, why in slopes]


def _slips(a: float, b: float, sizes: list, errors: list) -> list[tuple[float, float, str, str]]:
    """The right line, read in a wrong way; or a line through other axes."""
    x, y = _logs(sizes), _logs(errors)
    turned, shift = linear_regression(y, x)
    half, above = linear_regression(sizes, y)
    flat, level = linear_regression(x, errors)
    origin = sum(p * q for p, q in zip(x, y, strict=True)) / sum(p * p for p in x)
    sign = "error = a * size ** -b: a curve that falls has a positive b"
    base = "what was taken with one logarithm was undone with another"
    logged = "that is the logarithm of a"
    undo = "undo it: a = exp(intercept), with log the natural one"
    both = "both axes are logarithmic"
    raw, start = linear_regression(sizes, errors)
    given = "slope and intercept have changed places"
    found = [
        *_slips_of_slope(x, y, b),
        *[(one, -raw, "no logarithm was taken", both) for one in (start, math.exp(start))],
        (math.exp(-b), -math.log(a), given, "np.polyfit gives the slope first"),
        (-b, math.log(a), "those are slope and intercept", "a = exp(intercept), b = -slope"),
        (b, a, "a and b have changed places", "return a, b"),
        (a, abs(b), "b may be negative, where the error grows with the size", "b = -slope"),
        (a, 1 / b, "that is 1 / b: x and y have changed places", "x is log(size)"),
        (a, -b, sign, "b = -slope"),
        (math.exp(shift), -turned, "x and y have changed places", "x is log(size), y log(error)"),
        (math.exp(above), -half, both, "take the logarithm of the sizes as well"),
        (level, -flat, both, "take the logarithm of the errors as well"),
        (1.0, -origin, "a line through the origin has no room for a", "fit an intercept, too"),
        (1 / a, b, "the intercept has the wrong sign", "a = exp(+intercept)"),
    ]
    for factor, power in ((1.0, math.e), (math.log(10), 10.0), (math.log(2), 2.0)):
        one = math.log(a) / factor  # the intercept where this logarithm was taken
        for other in (math.e, 10.0, 2.0):
            if other != power:
                found += [(other**one, sb, base, undo) for sb in (b, -b)]
        found += [(one, sb, logged, undo) for sb in (b, -b)]
    return found


# ---- 0.5 ------------------------------------------------------------------------------------


class Request(NamedTuple):
    """The arguments of job_file."""

    name: str
    nodes: int
    gpus_per_node: int
    minutes: int
    command: str

    def __str__(self) -> str:
        return f"job_file({self.name!r}, {self.nodes}, {self.gpus_per_node}, {self.minutes}, ...)"


@lesson.exercise(
    "0.5",
    "The first line is #!/bin/bash. Then come lines such as #SBATCH --nodes=2, from the very "
    "beginning of the line. The command is the last line.",
    "Six of them: --job-name, --nodes, --ntasks-per-node=1, --gpus-per-node, --time, --output.",
    "Slurm reads --time=90 as minutes, 90:00 as minutes and seconds, and 01:30:00 as hours, "
    "minutes and seconds.",
    'Begin with f"""#!/bin/bash and let every line start at the margin: what stands between the '
    "quotes is the file, spaces and line breaks as well.",
)
def job_file(answer) -> None:
    """The texts of several jobs, read as sbatch reads them; and by sbatch, where there is one."""
    torchrun = "srun torchrun --nnodes=$SLURM_NNODES --nproc-per-node=gpu train.py"
    requests = [
        Request("first_job", 2, 4, random.randrange(62, 110), torchrun),
        Request("big-1", random.randrange(3, 9), 8, 60 * random.randrange(25, 30), "bash run.sh"),
        Request("try", 1, 1, random.randrange(5, 50), "python -c \"print(f'{1 + 1:%}')\""),
        Request("weekend", 2, 1, 60 * random.randrange(2, 20) + 5, "exec bash launch.sh a.py b"),
    ]
    texts = list(alone(answer, requests, lambda *case: str(Request(*case)), {}))
    for request, text in zip(requests, texts, strict=True):
        if not isinstance(text, str):
            smell = "the text was printed or written, not returned" if text is None else ""
            raise Wrong(f"{request} returns {text!r}"[:200], smell, "return the text of the file")
        _compare_job(text, request)
    _ask_slurm(texts[0], requests[0])


def _compare_job(text: str, request: Request) -> None:
    _compare_start(text, request)
    if left := re.search(r"\{(name|nodes|gpus_per_node|minutes|command)\b[^}\n]*\}", text):
        raise Wrong(
            f"{request}: the text still holds {left[0]}",
            "a text without f in front keeps the braces",
            'put an f before the quotes: f"""...',
        )
    options, ignored = read_directives(text)
    for wrong in (_of_nodes, _of_gpus, _of_time, _of_names):
        for name, seen, smell, advice in wrong(options, request):
            lost = [reason for line, *reason in ignored if name in line]
            where = f"{request}: {seen}" + (f", though a line holds {name}" if lost else "")
            raise Wrong(where, *(lost[0] if lost else (smell, advice)))
    _compare_command(text, request)


def _compare_start(text: str, request: Request) -> None:
    first = text.split("\n")[0]
    if "\r" in text:
        raise Wrong(f"{request}: lines end with \\r\\n", "sbatch refuses that", "end them with \\n")
    if first.startswith("#!") and "SBATCH" in first:
        seen = f"{request}: all stands in one line, {first[:60]!r}..."
        raise Wrong(seen, "nothing breaks the lines", "'\\n'.join(lines), with one \\ only")
    if first.startswith("#!") and "bash" in first:
        return
    if first.startswith("#!"):
        raise Wrong(f"{request}: the first line is {first!r}", "", "bash is asked for: #!/bin/bash")
    if text.lstrip().startswith("#!"):
        raise Wrong(
            f"{request}: the first line is {first!r}, and sbatch refuses the file: 'This does not "
            "look like a batch script'",
            "all that stands between the quotes belongs to the file, also the line break and the "
            "spaces before #!",
            'start right behind the quotes: """#!/bin/bash',
        )
    raise Wrong(
        f"{request}: the first line is {first!r}, and sbatch refuses the file",
        "the first line says which program reads the rest",
        "#!/bin/bash",
    )


# What sbatch takes, in 22.05 and later: options with a value, and those with none or with one that
# may follow a =.
VALUED = """account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment
constraint container container-id core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task
deadline delay-boot dependency distribution error exclude export export-file extra extra-node-info
gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint input
job-name kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu
mem-per-gpu mincpus network nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu
ntasks-per-node ntasks-per-socket open-mode output partition power prefer priority profile qos
reservation segment signal sockets-per-node switches tasks-per-node thread-spec threads-per-core
time time-min tmp tres-bind tres-per-task uid wait-all-nodes wckey wrap""".split()
PLAIN = """contiguous exclusive get-user-env hold ignore-pbs nice no-kill no-requeue oom-kill-step
overcommit oversubscribe parsable propagate quiet reboot requeue spread-job stepmgr test-only
use-min-nodes verbose wait""".split()
SHORT = dict(
    zip(
        "aAbcCdDeFGiJLmMnNopqStwxBHkOQsvW",
        "array account begin cpus-per-task constraint dependency chdir error nodefile gpus input "
        "job-name licenses distribution clusters ntasks nodes output partition qos core-spec time "
        "nodelist exclude extra-node-info hold no-kill overcommit quiet oversubscribe verbose "
        "wait".split(),
        strict=True,
    )
)


PLACEHOLDER = "<...> stands for something: for Slurm %x is the job's name and %j its number"


def read_directives(text: str) -> tuple[dict[str, str], list[tuple[str, str, str]]]:
    """What sbatch reads in a job file: long names and values of its options, the last one of each.

    Also returns the lines that look like options but are none to sbatch: line, smell, hint.

    Raises:
        Wrong: sbatch refuses a line.
    """
    options: dict[str, str] = {}
    ignored: list[tuple[str, str, str]] = []
    command = ""
    for line in text.split("\n"):
        if line.startswith("#SBATCH") and not command:
            options |= _options_of(line)
        elif re.match(r"[\s#]*SBATCH\b", line, re.IGNORECASE):
            ignored.append((line, *_why_ignored(line, command)))
        elif line.strip() and not line.lstrip().startswith("#"):
            command = command or line.strip()
    return options, ignored


def _why_ignored(line: str, command: str) -> tuple[str, str]:
    if line.startswith("#SBATCH"):
        return (
            f"Slurm stops reading at the first command, which is {command!r}",
            "put all #SBATCH lines before it",
        )
    if line.startswith((" ", "\t")):
        return (
            f"{line.split('=')[0]!r} begins with a space, so Slurm takes it for a comment",
            "#SBATCH begins the line; no indentation inside the quotes",
        )
    word = re.match(r"[#\s]*\w+", line)[0]
    what = "a comment" if "#" in word else "no option"
    return f"{word!r} is {what} to Slurm", "it is #SBATCH: one #, no space, capital letters"


def _options_of(line: str) -> dict[str, str]:
    """The options on one #SBATCH line, as getopt takes them apart."""
    try:  # a \\ at the end is nothing to sbatch, and the next line a command
        words = shlex.split(line.removeprefix("#SBATCH").removesuffix("\\"), comments=True)
    except ValueError:
        raise Wrong(f"{line!r}: a quote is not closed", "", "close it, or leave it out") from None
    options = {}
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = _long_name(name, line)
        elif word.startswith("-") and word[1:].partition("=")[0] in VALUED:
            smell = f"after one dash the letter {word[1]} alone is the option"
            raise Wrong(f"sbatch refuses {line!r}", smell, f"two dashes: -{word}")
        elif word[:1] == "-" and word[1:2] in SHORT:
            name, equals, value = SHORT[word[1]], word[2:], word[2:]
            if name in PLAIN and value:  # several letters behind one -
                words.insert(0, f"-{value}")
        else:
            smell = "spaces around = split an option in two" if "=" in line else ""
            smell = PLACEHOLDER if "<" in line else smell
            seen = f"sbatch refuses {line!r}: {word!r} is no option"
            raise Wrong(seen, smell, "--name=value, in one piece")
        if name in VALUED and not equals:
            value = words.pop(0) if words else ""
        if name in VALUED and value in ("", "="):
            smell = "an option is one piece, without spaces around ="
            raise Wrong(f"sbatch refuses {line!r}: --{name} has no value", smell, "--name=value")
        options[name] = value
    return options


def _long_name(name: str, line: str) -> str:
    """The option that a long name, or its beginning, stands for."""
    known = [*VALUED, *PLAIN]
    meant = [one for one in known if one.startswith(name)]
    if name in known or len(meant) == 1:
        name = name if name in known else meant[0]
        return "ntasks-per-node" if name == "tasks-per-node" else name
    near = difflib.get_close_matches(name, known, 1, 0.5)
    advice = f"--{near[0]}" if near else "look it up with: man sbatch"
    raise Wrong(f"sbatch refuses {line!r}: it has no option --{name}", "a misspelt name", advice)


Fault = tuple[str, str, str, str]  # the option, what is seen, what it smells of, what to try


def _count(value: str, name: str) -> int:
    """A whole number, also behind a type such as h100:4."""
    if "$" in value:
        raise Wrong(
            f"sbatch reads --{name}={value} as it stands",
            "#SBATCH lines are read by Slurm, which knows no variables of the shell",
            "let Python put the number in",
        )
    if not re.fullmatch(r"(?:[\w.-]+:)*\d+", value):
        raise Wrong(f"sbatch refuses --{name}={value}", "that is no number", "a whole number")
    return int(value.rpartition(":")[2])


def _of_nodes(options: dict, request: Request) -> Iterable[Fault]:
    """Nodes, and tasks on each of them; Slurm's own default is one task a node."""
    per_node = _count(options.get("ntasks-per-node", "1"), "ntasks-per-node")
    all_tasks = _count(options["ntasks"], "ntasks") if "ntasks" in options else None
    nodes = options.get("nodes", str((all_tasks or 1) // max(per_node, 1)))
    low, dash, high = nodes.partition("-")
    if dash and low == high:
        nodes = low
    if nodes.partition("-")[1] and re.fullmatch(r"\d+-\d+", nodes):
        yield "--nodes", f"--nodes={nodes}", "Slurm may give any number of these", "one number"
    elif _count(nodes, "nodes") != request.nodes:
        said = f"--nodes={nodes}" if "nodes" in options else "--nodes is missing, so 1"
        yield "--nodes", f"{said}, not {request.nodes}", "", "--nodes={nodes}"
    if all_tasks is not None and all_tasks < request.nodes:
        smell = f"a node without a task is not given, so {all_tasks} of {request.nodes} are left"
        yield "--ntasks", f"--ntasks={all_tasks} counts over the whole job", smell, "leave it out"
    if all_tasks is not None and all_tasks != request.nodes:
        per_node = all_tasks / request.nodes
    if per_node == 0:
        yield "--ntasks", "no task a node is asked for", "", "--ntasks-per-node=1"
    if per_node != 1:
        yield (
            "--ntasks",
            f"Slurm would start {per_node:g} tasks on each of the {request.nodes} nodes, not 1",
            f"each task is a torchrun, and each torchrun starts a process for each of the "
            f"{request.gpus_per_node} GPUs: {per_node * request.gpus_per_node:g} processes a node",
            "--ntasks-per-node=1",
        )


def _of_gpus(options: dict, request: Request) -> Iterable[Fault]:
    wanted, nodes = request.gpus_per_node, request.nodes
    gres = [part for part in options.get("gres", "").split(",") if part.split(":")[0] == "gpu"]
    asked = {name: options[name] for name in ("gpus-per-node", "gpus-per-task") if name in options}
    asked |= {"gres": gres[0]} if gres else {}
    for name, value in asked.items():
        number = 1 if value == "gpu" else _count(value, name)
        smell = (
            f"{number} is what all {nodes} nodes have together" if number == wanted * nodes else ""
        )
        if number != wanted:
            seen = f"--{name}={value} asks for {number} on each node, not {wanted}"
            yield f"--{name}", seen, smell, "the GPUs of one node: --gpus-per-node={gpus_per_node}"
    if not asked and "gpus" in options:
        yield (
            "--gpus",
            f"--gpus={options['gpus']} counts over the whole job",
            "Slurm may spread them unevenly over the nodes",
            "--gpus-per-node={gpus_per_node}",
        )
    elif not asked:
        smell = "a job that asks for no GPU gets none"
        yield "--gpus-per-node", "no GPU is asked for", smell, "--gpus-per-node={gpus_per_node}"


def minutes_of(time: str) -> int | None:
    """Slurm's minutes of a --time; None where sbatch refuses it. Seconds are rounded up."""
    days, dash, rest = time.rpartition("-")
    parts = rest.split(":")
    if not all(re.fullmatch(r"\d+", part) for part in [*parts, *([days] if dash else [])]):
        return None
    if len(parts) > 3:
        return None
    numbers = [int(part) for part in parts]
    if dash:  # days-hours, days-hours:minutes, days-hours:minutes:seconds
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = numbers
    else:  # minutes, minutes:seconds
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    return math.ceil(int(days or 0) * 1440 + hours * 60 + minutes + seconds / 60)


def _of_time(options: dict, request: Request) -> Iterable[Fault]:
    form = "minutes, or hours:minutes:seconds with minutes // 60 and minutes % 60"
    if "time" not in options:
        smell = "without a limit the job gets the queue's own, and waits longer for its turn"
        yield "--time", "--time is missing", smell, form
        return
    time, wanted = options["time"], request.minutes
    got = minutes_of(time)
    if got is None:
        smell = "Slurm knows no letters and no decimals there"
        smell = smell if "$" not in time else "Slurm knows no variables of the shell there"
        yield "--time", f"sbatch refuses --time={time}", smell, form
    elif got != wanted:
        smell = ""
        if got == wanted * 60:
            smell = "that is as many hours"
            smell = smell if ":" in time else "that is seconds, but one number is minutes"
        elif got == 0:
            smell = "0 is no limit at all"
        elif time.count(":") == 1 and "-" not in time:
            smell = "two numbers are minutes and seconds"
        elif got == wanted // 60 * 60:
            smell = "the minutes beyond whole hours are lost"
        elif got == wanted % 60:
            smell = "the whole hours are lost"
        yield "--time", f"--time={time} is {got:,} minutes to Slurm, not {wanted:,}", smell, form


def _of_names(options: dict, request: Request) -> Iterable[Fault]:
    name, output = options.get("job-name", ""), options.get("output", "slurm-%j.out")
    if name != request.name:
        said = f"--job-name={name}" if name else "--job-name is missing"
        smell = "without it the job has the name of the file" if not name else ""
        yield "--job-name", f"{said}, not {request.name}", smell, "--job-name={name}"
    wanted = f"{request.name}-4711.out"
    if (written := file_name(output, name)) != wanted:
        smell = ""
        if "output" not in options:
            smell = "without --output the file is slurm-<number>.out, whatever job it was"
        elif "<" in output:
            smell = PLACEHOLDER
        elif "$" in output:
            smell = "Slurm knows no variables of the shell there; %j is the number"
        elif written.rpartition("/")[2] == wanted:
            smell = "Slurm makes no folders: where one is missing, the job ends without a word"
        elif "%%" in output:
            smell = "%% stands for the sign %; in an f-string % needs no doubling"
        yield (
            "--output",
            f"--output={output} makes job 4711 write to {written}, not {wanted}",
            smell,
            "--output=%x-%j.out",
        )
    if "error" in options and file_name(options["error"], name) != wanted:
        smell = "errors would go to another file"
        yield "--error", f"--error={options['error']}", smell, "leave it out: --output takes both"


def file_name(pattern: str, name: str) -> str:
    """The file that Slurm writes for a pattern, in job 4711."""
    values = {"x": name, "j": "4711", "A": "4711", "%": "%"}
    text = re.sub(r"%([xjA%])", lambda found: values[found[1]], pattern)
    return text.removeprefix("./")


def _compare_command(text: str, request: Request) -> None:
    body = [line.strip() for line in text.split("\n")]
    body = [line for line in body if line and not line.startswith("#")]
    command = request.command
    if body.count(command) == 1 and body[-1] == command:
        return
    near = [line for line in body if command in line]
    if not near:
        seen = f"no line holds the command {command!r}"
        raise Wrong(f"{request}: {seen}", "", "the last line is the command, as it is given")
    if len(near) > 1:
        raise Wrong(f"{request}: the command stands there {len(near)} times", "", "once")
    smell = ""
    if near[0] == command:
        smell = (
            "the job ends as its last command does: where training fails, it counts as completed"
        )
    elif near[0].endswith("&"):
        smell = "the job is over when its script ends, and & lets the script go on at once"
    elif near[0].startswith(("srun", "torchrun", "python", "bash")):
        smell = "the command is whole: it brings its own srun where it needs one"
    elif near[0].startswith("exec"):
        smell = "exec would do no harm, but what to run is for the caller to say"
    raise Wrong(
        f"{request}: the script is {'; '.join(body)}, and the command {command!r}"[:300],
        smell,
        "the last line is the command, as it is given",
    )


def _ask_slurm(text: str, request: Request) -> None:
    """Where Slurm answers, hear what it says of the file; a site may refuse any such job."""
    if not shutil.which("sbatch") or _asked("scontrol", "ping"):
        return
    refused = _test_only(text)
    if refused and not _test_only(planning.job_file(*request)):
        raise Wrong(
            f"{request}: sbatch --test-only refuses the file: {refused}",
            "a line that was not asked for, or one that this site does not know",
            "leave out what the docstring does not name",
        )


def _test_only(text: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.sbatch"
        path.write_text(text)
        return _asked("sbatch", "--test-only", str(path))


def _asked(*command: str) -> str:
    """Empty where Slurm agrees, else the first line of what it says."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=3)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return type(problem).__name__
    lines = (done.stderr.strip() or done.stdout.strip() or "no reason given").splitlines()
    return lines[0] if done.returncode else ""


# ---- 0.6 ------------------------------------------------------------------------------------

TRUTH = {
    "SBATCH_ACCOUNT": "class",
    "SBATCH_PARTITION": "gpu",
    "SBATCH_GPUS_PER_NODE": "4",
    "NCCL_SOCKET_IFNAME": "ib0",
    "HEAD_SUFFIX": "-ib",
}
MODULES = {"Python": "Python/3.12", "CUDA": "CUDA/12.8"}
LURES: dict[str, dict[str, tuple[str, str]]] = {  # of a variable: wrong values, smell and hint
    "SBATCH_ACCOUNT": {
        "home": ("that account may use the partition cpu only", "look at the column Partition"),
        "student": ("that is your own name; the time is charged to an account", "first column"),
        "gpu": ("that is a partition", "the account stands in the first column"),
    },
    "SBATCH_PARTITION": {
        "cpu": ("its GRES are (null): it has no GPU", "look at the column GRES"),
        "cpu*": ("it has no GPU; and the * only marks the default queue", "look at GRES"),
        "gpu*": ("no partition has a * in its name: sinfo marks the default with it", "gpu"),
        "gpu-test": ("it ends every job after 30 minutes", "look at the column TIMELIMIT"),
        "gpu,gpu-test": ("gpu-test ends every job after 30 minutes", "one queue: the longer one"),
    },
    "SBATCH_GPUS_PER_NODE": {
        "48": ("those are the GPUs of all 12 nodes of the partition", "of one node"),
        "12": ("that is the number of nodes", "the last part of gpu:h100:4"),
        "2": ("that is what a node of gpu-test has", "the last part of gpu:h100:4"),
        "gpu:h100:4": ("that is the form of --gres", "the number alone"),
        "100": ("h100 is the kind of GPU", "the number behind the last colon"),
        "h100": ("h100 is the kind of GPU", "the number behind the last colon"),
    },
    "NCCL_SOCKET_IFNAME": {
        "eth0": ("10 Gbit/s against 400: training would wait for gradients", "the fastest network"),
        "lo": ("a node's own loopback leads to no other node", "the fastest between nodes"),
        "InfiniBand": ("that is the kind of network, not its name on a node", "the first column"),
        "ib0,eth0": ("one network is asked for, the fastest", "ib0 alone"),
    },
    "HEAD_SUFFIX": {
        "ib": ("g14 and ib make g14ib, which is no node's name", "what stands between g14 and ib"),
        "ib0": ("that is the network's name on a node, not a name of the node", "see getent"),
        "i": ("the node is called g14-ib there", "see what getent answers"),
    },
}


@lesson.exercise(
    "0.6",
    "Read SITE from above: the queue needs GPUs and a day; the account has to be one that may use "
    "that queue; the number of GPUs is that of one node.",
    "A line is export NAME=value, without spaces around =. The last line is module load with two "
    "names from the list.",
    "The network is the one with 400 Gbit/s, and getent shows the node g14 by its name there: "
    "g14-ib.",
)
def site_file(answer) -> None:
    """The text, read by a bash that knows nothing else; its variables and what it loads."""
    reasons: Reasons = {
        "invalid syntax": ("shell lines are no Python", "put them in quotes and return the text"),
    }
    (seen,) = alone(
        answer, [()], lambda: "site_file()", reasons, lambda answer: _site_seen(answer())
    )
    if "form" in seen:
        smell = "a text is asked for, as it would stand in the file"
        smell = "it was printed or written, not returned" if seen["form"] == "None" else smell
        raise Wrong(f"site_file() returns {seen['form']}", smell, "return six lines in quotes")
    _compare_shell(seen)
    for name, wanted in TRUTH.items():
        _compare_variable(name, seen["variables"][name], wanted, seen["text"])
    for name in sorted(set(seen["others"]) - set(TRUTH)):
        raise Wrong(
            f"{name} is set as well",
            "an SBATCH_ variable overrules that line in every job file",
            "leave it out",
        )
    _compare_modules(seen["modules"])


READ_SITE = r"""
names=("$@")
module() { printf '%s\n' "$*" >>modules; }
ml() { module load "$@"; }
. ./site.env >/dev/null
for name in "${names[@]}"; do
    printf '%s\0%s\0%s\0%s\0' "$name" "${!name+set}" "${!name-}" "$(printenv "$name")"
done
printf 'others\0%s\0\0\0' "${!SBATCH_@}"
"""


def _site_seen(text: object) -> dict:
    """What a clean bash makes of the text."""
    if not isinstance(text, str):
        return {"form": f"{text!r}"[:120]}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "site.env").write_bytes(text.encode(errors="replace"))
        bash = shutil.which("bash") or "bash"
        command = [bash, "--noprofile", "--norc", "-c", READ_SITE, "bash", *TRUTH]
        environ = {"PATH": os.defpath, "USER": "student", "HOME": folder, "LC_ALL": "C"}
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=3,
            )
        except subprocess.TimeoutExpired:
            return {"text": text, "ended": False, "said": ""}
        modules = Path(folder, "modules")
        loaded = modules.read_text().splitlines() if modules.is_file() else []
    parts = done.stdout.decode(errors="replace").split("\0")
    rows = {parts[i]: parts[i + 1 : i + 4] for i in range(0, len(parts) - 3, 4)}
    return {
        "text": text,
        "ended": "others" in rows,
        "said": done.stderr.decode(errors="replace"),
        "others": rows.pop("others", [""])[0].split(),
        "variables": rows,
        "modules": loaded,
    }


def _compare_shell(seen: dict) -> None:
    """Was bash content with every line?"""
    if "\r" in seen["text"]:
        smell = "bash takes the \\r for a part of the value"
        raise Wrong("lines end with \\r\\n", smell, "end them with \\n")
    found = re.search(r"\./site\.env: (?:line (\d+): )?(.*)", seen["said"])
    if found:
        number, said = int(found[1] or 0), found[2].strip()
        line = seen["text"].split("\n")[number - 1].strip() if number else ""
        raise Wrong(f"bash, in line {number} ({line}): {said}"[:250], *_why_bash(line, said))
    if not seen["ended"]:
        smell = "the file ends the shell that reads it (exit?), or never ends"
        raise Wrong("bash did not come to the end of the file", smell, "only the six lines")


def _why_bash(line: str, said: str) -> tuple[str, str]:
    if re.match(r"(export\s+)?\w+(\s+=|=\s)", line):
        return "bash wants no space around =", "export NAME=value"
    if line.startswith(("setenv", "set ")):
        return "setenv belongs to another shell (csh)", "export NAME=value"
    if re.match(r"\w+\s*:", line):
        return "that is the form of a YAML file", "export NAME=value"
    if line.startswith(("$", ">")):
        return "the $ before a command is the prompt, not a part of it", "leave it out"
    if "syntax error" in said or "unexpected" in said:
        return "a quote or a bracket that is not closed, or one that bash reads", "NAME=value"
    if "command not found" in said or "No such file" in said:
        return "bash takes the first word for a program", "export NAME=value; module load NAME"
    return "", "export NAME=value, one a line"


def _compare_variable(name: str, row: list[str], wanted: str, text: str) -> None:
    is_set, value, exported = row
    if not is_set:
        near = difflib.get_close_matches(name, re.findall(r"(\w+)=", text), 1, 0.75)
        smell = f"there is {near[0]}" if near else ""
        if re.search(rf"^\s*set\s+{name}=", text, re.MULTILINE):
            smell = "`set` gives bash arguments, no variables"
        elif "#SBATCH" in text:
            smell = "#SBATCH lines are for job files; to bash they are comments"
        raise Wrong(f"{name} is not set", smell, f"export {name}=...")
    if value != exported:
        raise Wrong(
            f"{name} is {value!r} in the shell, but not for a program that it starts",
            "only exported variables are handed on to sbatch",
            f"export {name}={value}",
        )
    if value == wanted or _is_as_good(name, value):
        return
    smell, advice = LURES[name].get(value, ("", "look for it in SITE"))
    if not value:
        smell = "nothing stands right behind =: bash wants no space around it"
        advice = f"export {name}=value"
    elif name == "HEAD_SUFFIX" and value.endswith(wanted):
        smell, advice = "that is one node's whole name; it is added to each name", "only the ending"
    elif "#" in value:
        smell, advice = "a comment needs a space before #", f"export {name}={value.split('#')[0]}"
    elif re.search(r"\d+\.\d+\.\d+", value):
        smell, advice = "an address is another one on every node", "the network's name"
    elif not value.isascii():
        smell, advice = "a sign that is not on a keyboard, such as a curly quote", "type it anew"
    elif value.strip("\"' ") == wanted or value.lower() == wanted:
        smell, advice = "spaces, quotes and capital letters count", f"export {name}={wanted}"
    raise Wrong(f"{name} is {value!r}", smell, advice)


def _is_as_good(name: str, value: str) -> bool:
    """Values that Slurm and NCCL take for the same."""
    if name != "NCCL_SOCKET_IFNAME":
        return name == "SBATCH_GPUS_PER_NODE" and value == "h100:4"
    # NCCL takes beginnings of names, with = whole names, and with ^ those that it shall not take.
    names, whole = value.lstrip("^=").split(","), "=" in value
    found = {
        network
        for network in ("lo", "eth0", "ib0")
        if any(network == one if whole else one and network.startswith(one) for one in names)
    }
    return found == ({"lo", "eth0"} if value.startswith("^") else {"ib0"})


def _compare_modules(calls: list[str]) -> None:
    loaded: list[str] = []
    for call in calls:
        verb, *names = call.split()[:1] + call.split()[1:]
        if verb in ("load", "add", "try-load"):
            loaded += names
        elif verb in ("unload", "rm"):
            loaded = [name for name in loaded if name not in names]
        elif verb == "purge":
            loaded = []
    seen = f"loaded: {', '.join(loaded) or 'nothing'}"
    if calls and not loaded:
        verb = calls[-1]
        raise Wrong(f"`module {verb}` loads nothing", "module needs a verb", "module load NAME")
    for short, whole in MODULES.items():
        if not {short, whole} & set(loaded):
            near = [name for name in loaded if name.lower().startswith(short.lower())]
            smell = f"{near[0]} is not in the list that SITE shows" if near else ""
            raise Wrong(f"{seen}; {whole} is missing", smell, f"module load {' '.join(TO_LOAD)}")
    if strange := set(loaded) - set(MODULES) - set(MODULES.values()):
        raise Wrong(f"{seen}; there is no {min(strange)}", "", "see `module avail` in SITE")


TO_LOAD = tuple(MODULES.values())


# ---- 0.7 ------------------------------------------------------------------------------------

NO_MEAN = "a rank without samples, or a job without ranks, has no mean", "it is idle: count 0"
NO_TABLE = "ranks have unequal numbers of samples, so they make no table", "one mean for each rank"
HOURS_REASONS: Reasons = {
    "division by zero": NO_MEAN,
    "at least one data point": NO_MEAN,
    "expected sequence of length": NO_TABLE,
    "each tensor to be equal size": NO_TABLE,
    "inhomogeneous shape": NO_TABLE,
}


@lesson.exercise(
    "0.7",
    "Two numbers. The first does not depend on `busy` at all: the devices that were granted, times "
    "the hours.",
    "For the second take each rank's mean over its own samples; a rank that was busy half of the "
    "time used half of the hours.",
    "A device without a rank worked for 0 hours: add up the means of the ranks, and do not divide "
    "by their number.",
)
def device_hours(answer) -> None:
    """Jobs with idle devices and with none, uneven samples, a rank without samples, no rank."""

    def samples() -> list[float]:
        return [round(random.random(), 3) for _ in range(random.randrange(2, 9))]

    def seconds() -> int:
        return random.randrange(1000, 20000)

    three = [samples() + [0.9] * 5, samples(), [0.25]]
    cases = [
        (three, random.randrange(5, 9), seconds()),
        ([samples()], 4, seconds()),
        ([[1.0, 0.0, 0.7, 0.8], [0.6, 0.4, 0.1, 0.2]], 2, 3600),
        ([tuple(samples()), (), samples()], 4, seconds() + 0.5),
        ([[], [], samples()], 4, seconds()),
        ([], 8, seconds()),
    ]
    for case, found in zip(cases, alone(answer, cases, _tell_hours, HOURS_REASONS), strict=True):
        _compare_hours(found, *case)


def _tell_hours(busy, num_granted: int, seconds: float) -> str:
    return f"device_hours(samples of {len(busy)} ranks, {num_granted}, {seconds})"


def _compare_hours(found: object, busy: list, num_granted: int, seconds: float) -> None:
    hours, num_ranks = seconds / 3600, len(busy)
    case = f"{num_granted} devices for {seconds} s, {num_ranks} ranks"
    charged, used = _pair(found, case, ("charged", "used"))
    means = [fmean(samples) if samples else 0.0 for samples in busy]
    right = num_granted * hours, sum(means) * hours
    if _near(charged, right[1]) and _near(used, right[0]):
        seen = f"{case}: the numbers are {charged:.4g} and {used:.4g}"
        raise Wrong(seen, "they have changed places", "return charged, used")
    if not _near(charged, right[0]):
        mistakes = [
            (num_granted * seconds, "those are device-seconds", "seconds / 3600 are hours"),
            (num_granted * seconds / 60, "those are device-minutes", "seconds / 3600 are hours"),
            (num_ranks * hours, "charged is what was granted, with a rank or not", "num_granted"),
            (hours, "that is the time; each granted device is charged for it", "times num_granted"),
            (right[1], "charged is what was granted, idle or not", "num_granted * hours"),
            (num_granted * (seconds // 3600), "// keeps whole hours only", "seconds / 3600"),
        ]
        if _is_rounded(charged, right[0]):
            mistakes.append((charged, "it was rounded", "return it as it is"))
        seen = f"{case}: charged is {charged:,.5g}, not {right[0]:,.5g}"
        raise Wrong(seen, *_named(charged, mistakes, "num_granted * seconds / 3600"))
    if not _near(used, right[1]):
        seen = f"{case}: used is {used:,.5g}, not {right[1]:,.5g}"
        slips = _slips_of_use(busy, means, num_granted, hours)
        advice = "the mean of each rank's samples, summed over the ranks, times the hours"
        if _is_rounded(used, right[1]):
            slips.append((used, "it was rounded", "return it as it is"))
        smell = "that is the mean of nothing: a rank without samples is idle"
        raise Wrong(seen, *((smell, "0") if math.isnan(used) else _named(used, slips, advice)))


def _slips_of_use(busy: list, means: list, num_granted: int, hours: float) -> list:
    """What the mistakes would give for the hours in which a device worked."""
    flat = [sample for samples in busy for sample in samples]
    sampled = [mean for mean, samples in zip(means, busy, strict=True) if samples]
    if not flat:
        return []
    used, mean, alive = sum(means) * hours, fmean(means), fmean(sampled)
    spread = (
        "that is the mean of the ranks there are, taken for every granted device: a device "
        "without a rank worked for 0 hours"
    )
    weight = "all samples in one heap: a rank with more samples counts more there"
    each = "first the mean of each rank"
    empty = "a rank without samples counts as idle"
    return [
        (alive * len(busy) * hours, empty, "its mean is 0"),
        (used + (len(busy) - len(sampled)) * hours, empty, "its mean is 0, not 1"),
        (sum(max(one, default=0) for one in busy) * hours, "a rank's largest sample", each),
        (mean * num_granted * hours, spread, "sum(means) * hours"),
        (fmean(flat) * num_granted * hours, f"{spread}; and {weight}", each),
        (fmean(flat) * len(busy) * hours, weight, each),
        (fmean(flat) * hours, weight, each),
        (alive * num_granted * hours, f"{spread}; and {empty}", "sum(means) * hours"),
        (mean * hours, "that is one device's hours, the mean of the ranks", "sum, not mean"),
        (num_granted * hours - used, "that is what was idle", "the hours in which one worked"),
        (used * 3600, "those are device-seconds", "seconds / 3600 are hours"),
        (used / num_granted, "that is the mean of all devices", "the sum of their hours"),
        (used / (num_granted * hours), "that is a share, not hours", "times the hours"),
        (mean, "that is a share, not hours", "times the hours"),
        (sum(means), "those are devices, not hours", "times the hours"),
        (sum(flat) * hours, "samples were added up, not averaged", "divide by their number"),
        (len(busy) * hours, "a rank is not busy all the time", "look at its samples"),
        (used * 100, "percent were made of a share", "shares are from 0 to 1"),
    ]
