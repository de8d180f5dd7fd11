"""0.2: one rank of each folder prepares the data, and all ranks read it."""

import itertools
import os
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from manyhands.checks.engine import cases
from manyhands.checks.engine.card import Wrong
from manyhands.checks.engine.spec import Place as Seat
from manyhands.checks.engine.spec import Spec
from manyhands.first_job import places
from manyhands.first_job.places import Place
from manyhands.ranks import private

SLOW_S = 0.05  # how long the made-up data takes to prepare
PARTED_S = 0.5  # how long all that have not ended must sleep before they count as waiting
LOOK_S = 0.01
NUMBERS = itertools.count()  # a call of an answer has the same on all ranks


class Data(NamedTuple):
    """One call of prepare_once on every rank of a job of four processes."""

    processes: tuple[int, ...]  # on each node
    is_shared: bool
    errors: dict[int, Exception]  # of prepare(), by node; of node 0 where the folder is shared
    seed: int


def data_sets(n: int) -> list[Data]:
    """One folder for all and one per node, even and uneven nodes; errors of several kinds."""
    full, two = OSError("no space left on the disk"), KeyError("part two")

    def made(processes: tuple[int, ...], is_shared: bool, **errors: Exception) -> Data:
        by_node = {int(name.removeprefix("node")): error for name, error in errors.items()}
        return Data(processes, is_shared, by_node, cases.draw_seed())

    return [
        made((4,), True),
        made((2, 2), True),
        made((1, 3), False),
        made((2, 2), False),
        made((2, 2), True, node0=full),
        made((3, 1), False, node1=AssertionError()),  # an assert without a text
        made((1, 3), False, node0=two, node1=full),
    ]


def seat_of(case: Data, rank: int) -> tuple[int, Place]:
    """The node of a rank, and its place."""
    seats = [(node, local) for node, size in enumerate(case.processes) for local in range(size)]
    node, local = seats[rank]
    return node, Place(rank, f"node{node}", local, "cpu")


class Disk:
    """The folder that a rank reads, and how often each of its two functions was called there."""

    def __init__(self, folder: Path, case: Data, rank: int) -> None:
        node, self.place = seat_of(case, rank)
        self.case = case
        self.folder = folder
        self.error = case.errors.get(node)
        self.file = folder / ("shared" if case.is_shared else f"node{node}")
        self.calls = {"prepare": 0, "read": 0}
        (folder / f"process{rank}").write_text(str(os.getpid()))

    def prepare(self) -> None:
        """Write the data, slowly, or raise this node's error."""
        self.calls["prepare"] += 1
        time.sleep(SLOW_S)
        if self.error is not None:
            raise self.error
        self.file.write_text(f"data {self.case.seed}")

    def read(self) -> str:
        """The data, where it is there."""
        self.calls["read"] += 1
        if not self.file.exists():
            raise FileNotFoundError(f"there is no data on {self.place.host} yet")
        return self.file.read_text()

    def mark(self) -> None:
        """This rank has ended its call."""
        (self.folder / f"ended{self.place.rank}").touch()

    def others_end(self) -> bool:
        """Do all ranks end their calls? Not if those that are left only sleep, as in a message."""
        asleep_s = 0.0
        while asleep_s < PARTED_S:
            ranks = range(sum(self.case.processes))
            away = [rank for rank in ranks if not (self.folder / f"ended{rank}").exists()]
            if not away:
                return True
            time.sleep(LOOK_S)
            asleep_s = asleep_s + LOOK_S if all(map(self._sleeps, away)) else 0.0
        return False

    def _sleeps(self, rank: int) -> bool:
        try:
            process = int((self.folder / f"process{rank}").read_text() or 0)
            return psutil.Process(process).status() == psutil.STATUS_SLEEPING
        except (FileNotFoundError, psutil.NoSuchProcess):  # it has not begun, or is gone
            return False


def preparing_seen(answer: object, case: Data, seat: Seat) -> dict:
    """How often the two functions are called on this rank, and how the call ends."""
    folder = private.room() / f"data-{next(NUMBERS)}"  # of this call, for all its ranks
    folder.mkdir(exist_ok=True)
    disk = Disk(folder, case, seat.job_rank)
    if not case.errors:
        try:
            value = answer(disk.prepare, disk.read, disk.place, case.is_shared)
        finally:
            disk.mark()
        return _calls(disk) | {"the call returns": value}
    error = _error_of(answer, disk)
    disk.mark()
    if error is not None and not disk.others_end():
        raise Wrong(f"{_words(error)} is raised on rank {seat.job_rank}, while others still wait")
    seen = _calls(disk) | {"an error is raised on this rank": error is not None}
    if disk.error is not None and disk.calls["prepare"]:
        seen["the error says what prepare() said on this rank"] = str(disk.error) in str(error)
    return seen


def _calls(disk: Disk) -> dict:
    return {f"calls of {name}() on this rank": count for name, count in disk.calls.items()}


def _words(error: Exception) -> str:
    return f"{type(error).__name__} ({error})"


def _error_of(answer: object, disk: Disk) -> Exception | None:
    try:
        answer(disk.prepare, disk.read, disk.place, disk.case.is_shared)
    except NotImplementedError:
        raise
    except Exception as error:
        return error
    return None


def words_of(case: Data) -> str:
    """The call, for people."""
    where = "one folder for all nodes" if case.is_shared else "a disk on each node"
    nodes = " and ".join(map(str, case.processes))
    fails = [f", prepare() raises {error!r} on node {node}" for node, error in case.errors.items()]
    return f"prepare_once with {nodes} processes per node, {where}{''.join(fails)}"


CHOSEN = "place.rank == 0 if is_shared else place.local_rank == 0"
GATHER = "dist.all_gather_object(problems, problem)  # ends only when every rank has called it\n"
EACH_FOLDER = "One call per folder: rank 0 for a shared one, local rank 0 of each node otherwise."
ALL_WAIT = "All ranks meet after prepare() and before read(): a collective outside the `if`."
NEWS = "Catch every exception, send repr(error) to all ranks, and let every rank raise one."
RAISE = "raise RuntimeError(problem or told)  # each rank its own problem, where it has one\n"
LOOP = f"for told in problems:\n        if told:\n            {RAISE}"
prepare_once = Spec(
    todo="0.2",
    truth=places.prepare_once,
    layouts=(((0, 1, 2, 3),),),
    cases=data_sets,
    observe=preparing_seen,
    tell=words_of,
    advice={
        "": f"{ALL_WAIT} They meet also where prepare() fails.",
        "calls of prepare() on this rank": EACH_FOLDER,
        "calls of read() on this rank": "Every rank calls read() itself, once.",
        "the call returns": "Return what read() returns.",
        "an error is raised on this rank": NEWS,
        "the error says what prepare() said on this rank": NEWS,
    },
    reasons="""
        no data on :: A rank reads before the data is prepared. | {ALL_WAIT}
        cannot access local variable :: The name is set on the ranks that prepare, and the other
            ranks use it as well. | Prepare inside the `if`; wait and read outside of it.
    """,
    hints=(
        "First decide who prepares: with one folder for all nodes rank 0, with a disk per node "
        "each rank whose place.local_rank is 0.",
        "Then all ranks have to meet. dist.all_gather_object(problems, problem) is a meeting, too: "
        "it returns only when every rank has called it.",
        "Put try: prepare() except Exception as error: problem = repr(error) inside the `if`: an "
        "assert may have no text, and then str(error) is empty. After the meeting every rank looks "
        "through `problems`, and raises RuntimeError if one is not empty. Then return read().",
    ),
    mistakes=r"""
        {CHOSEN} => True ::
            Every rank prepares, so ranks write the same file at the same time. | {EACH_FOLDER}
        {CHOSEN} => place.rank == 0 ::
            Only rank 0 prepares, and the disks of the other nodes stay empty.
        {CHOSEN} => place.local_rank == 0 ::
            One rank of each node prepares, also where all nodes share one folder.
        {CHOSEN} => place.local_rank == 0 if is_shared else place.rank == 0 ::
            The two kinds of folder have changed places.
        {GATHER} => problems = [problem]\n ::
            Nothing makes the other ranks wait until the data is there. | {ALL_WAIT}
        return read() => return read() if prepares else None ::
            Only the ranks that prepare read the data. | Every rank calls read().
        return read() => read()\n    return read() :: The data is read twice. | Call read() once.
        {LOOP} => pass\n ::
            An error of prepare() is dropped, and the ranks go on without data. | {NEWS}
        for told in problems: => for told in [problem]: ::
            The error is raised on the rank where it happened, and the others go on without data.
        RuntimeError(problem or told) => RuntimeError("no data") ::
            Nobody learns why preparing the data has failed.
        RuntimeError(problem or told) => RuntimeError(told) ::
            Where prepare() fails on two nodes, one of them tells what the other one's said.
        f"rank {place.rank} could not prepare the data: {error!r}" => str(error) ::
            An exception without a text, as an assert raises, passes for success. | Send
            repr(error).
        except Exception as error: => except OSError as error: ::
            ! The rank whose prepare() fails leaves, and the others wait for it.
    """,
    module=globals(),
)
