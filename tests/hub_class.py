"""A class on a hub without browsers: what its servers, kernels, checks and jobs need.

    python tests/hub.py --measure 1 5 20     a table for each number of students; what is over 20 is
                                             extrapolated, and says so

A student is a program that speaks with the hub as JupyterLab does: it logs in, starts a server and
a kernel, and runs cells. Memory is PSS, which counts what processes share once; cores are seconds
of processor time a second. What else the machine does slows the class, and is told beside it.
"""

import json
import os
import pwd
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import requests
import websocket

START_S = 300  # of a server, where a whole class begins
CELL_S = 600
IDLE_S = 15  # over which an idle class is watched
VERDICTS = 5  # of each student
THINK_S = 20  # a student's pause between two checks is up to so long
SOON_S = 10  # a verdict that comes later is late
JOB_MB = 1300  # memory of a job of two ranks and its kernel: is there room for one a student?
CLASS = 100  # students to extrapolate to
NOTEBOOK = "manyhands/04_collectives.ipynb"
FIRST_CELL = "from manyhands.checks import collectives as check\nfrom manyhands.jobs import watch"
CHECK = 'check.broadcast_naive(check.lesson.exercises["4.2"].spec.truth)'
JOB = """
import os
os.chdir(os.path.expanduser("~/manyhands"))
folder = watch.run("../sbatch/collectives.sbatch", "--only", "broadcast", "--max-mb", 0.01,
                   "--repeats", 3, ranks=2)
print("job ended")
"""


class Student:
    """One who is logged in; `run` runs a cell in his kernel."""

    def __init__(self, url: str, name: str, password: str) -> None:
        self.url, self.name, self.password = url, name, password
        self.session = requests.Session()
        self.statuses: list[int] = []  # that the hub answered instead of a server

    def log_in(self) -> float:
        """Give name and password, and wait for the server; seconds. TimeoutError."""
        begin_s = time.monotonic()
        self.session.get(f"{self.url}/hub/login", timeout=START_S)
        form = {"username": self.name, "password": self.password, "_xsrf": self._xsrf("/hub/")}
        home = f"{self.url}/user/{self.name}"
        self.session.post(f"{self.url}/hub/login", data=form, timeout=START_S)
        while True:
            page = self.session.get(f"{home}/lab", timeout=START_S)
            if page.status_code == 200 and f"/user/{self.name}/lab" in page.url:
                return time.monotonic() - begin_s
            if page.status_code >= 400:
                self.statuses.append(page.status_code)
            if time.monotonic() - begin_s > START_S:
                raise TimeoutError(f"{self.name} has no server: {page.status_code} {page.url}")
            time.sleep(1)

    def open(self) -> None:
        """Start a kernel, as for a notebook."""
        self.socket, (kernel, path) = None, self._new_session()
        cookies = "; ".join(
            f"{one.name}={one.value}" for one in self.session.cookies if path.startswith(one.path)
        )
        self.socket = websocket.create_connection(
            f"ws{self.url.removeprefix('http')}{path}api/kernels/{kernel}/channels",
            cookie=cookies,
            timeout=CELL_S,
        )

    def run(self, code: str) -> tuple[float, str]:
        """Run a cell; seconds until the kernel is idle again, and what was printed."""
        begin_s, number = time.monotonic(), uuid.uuid4().hex
        header = {"msg_id": number, "msg_type": "execute_request", "session": "student"}
        header |= {"username": self.name, "version": "5.3"}
        content = {"code": code, "silent": False, "store_history": True, "stop_on_error": True}
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content}
        self.socket.send(json.dumps(message | {"channel": "shell", "buffers": []}))
        said = []
        while True:
            told = self.socket.recv()
            if isinstance(told, bytes):  # with buffers, as a picture
                continue
            told = json.loads(told)
            if told["parent_header"].get("msg_id") != number:
                continue
            if told["msg_type"] in ("stream", "error", "display_data", "update_display_data"):
                said.append(json.dumps(told["content"]))
            if told["msg_type"] == "status" and told["content"]["execution_state"] == "idle":
                return time.monotonic() - begin_s, "".join(said)

    def _new_session(self) -> tuple[str, str]:
        path = f"/user/{self.name}/"
        asked = {"path": NOTEBOOK, "type": "notebook", "name": "", "kernel": {"name": "python3"}}
        answer = self.session.post(
            f"{self.url}{path}api/sessions",
            json=asked,
            headers={"X-XSRFToken": self._xsrf(path)},
            timeout=CELL_S,
        )
        answer.raise_for_status()
        return answer.json()["kernel"]["id"], path

    def _xsrf(self, path: str) -> str:
        return next(
            one.value for one in self.session.cookies if one.name == "_xsrf" and one.path == path
        )


# ---- what their processes take -----------------------------------------------------------------


def processes(names: list[str]) -> Iterator[psutil.Process]:
    """All processes of these users."""
    wanted = {pwd.getpwnam(name).pw_uid for name in names}
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            if one.uids().real in wanted:
                yield one


def memory_mb(names: list[str]) -> float:
    """What they hold in memory together."""
    total = 0
    for one in processes(names):
        with suppress(OSError):
            rollup = Path(f"/proc/{one.pid}/smaps_rollup").read_text()
            total += next(int(line.split()[1]) for line in rollup.splitlines() if "Pss:" in line)
    return total / 1024


def computed_s(names: list[str]) -> float:
    """Seconds that they have computed, those that have ended included."""
    total = 0.0
    for one in processes(names):
        with suppress(psutil.Error):
            total += sum(one.cpu_times()[:4])
    return total


@dataclass
class Phase:
    """One thing that all students did at the same time."""

    name: str
    seconds: float = 0.0
    memory_mb: float = 0.0  # the most that was seen
    cores: float = 0.0
    each_s: list[float] = field(default_factory=list)


@contextmanager
def phase(name: str, names: list[str], found: list[Phase]) -> Iterator[Phase]:
    """Watch what the students' processes take while the block runs."""
    told, is_over = Phase(name), threading.Event()

    def watch() -> None:
        while True:
            told.memory_mb = max(told.memory_mb, memory_mb(names))
            if is_over.wait(1):
                return

    watcher = threading.Thread(target=watch)
    begin_s, computed = time.monotonic(), computed_s(names)
    watcher.start()
    try:
        yield told
    finally:
        is_over.set()
        watcher.join()
    told.seconds = time.monotonic() - begin_s
    told.cores = (computed_s(names) - computed) / told.seconds
    found.append(told)


# ---- a class -----------------------------------------------------------------------------------


def at_once(students: list[Student], act: Callable) -> list:
    """What `act` returns for each, all at the same time."""
    with ThreadPoolExecutor(len(students)) as pool:
        return list(pool.map(act, students))


def think_and_check(student: Student) -> list[float]:
    """Check an exercise again and again, as somebody who writes meanwhile; seconds of each."""
    found, pauses = [], random.Random(student.name)
    for _ in range(VERDICTS):
        time.sleep(pauses.uniform(0, THINK_S))
        seconds, said = student.run(CHECK)
        found.append(seconds)
        if "TODO 4.2 done" not in said:
            print(f"{student.name}, of a right answer: {said[:300]}", flush=True)
    return found


def hold(students: list[Student]) -> list[Phase]:
    """A class's hour in short: log in, open a lesson, check, wait, run a job."""
    names, found = [one.name for one in students], []
    with phase("log in, all at once", names, found) as now:
        now.each_s = at_once(students, Student.log_in)
    with phase("servers, idle", names, found):
        time.sleep(IDLE_S)
    with phase("a lesson's first cell", names, found) as now:
        at_once(students, Student.open)
        now.each_s = [seconds for seconds, _ in at_once(students, lambda one: one.run(FIRST_CELL))]
    with phase(f"{VERDICTS} checks each", names, found) as now:
        now.each_s = sum(at_once(students, think_and_check), [])
    with phase("kernels, idle", names, found):
        time.sleep(IDLE_S)
    if psutil.virtual_memory().available / 2**20 > JOB_MB * len(students):
        with phase("a job of 2 ranks each", names, found) as now:
            ran = at_once(students, lambda one: one.run(JOB))
            now.each_s = [seconds for seconds, said in ran if "job ended" in said]
    return found


HEAD = """| students | what | memory, MB | cores | seconds: median, 95th of 100, longest |
|---:|---|---:|---:|---:|"""


def rows(count: int, phases: list[Phase]) -> str:
    """A class's rows of the table."""
    lines = []
    for one in phases:
        lasts = sorted(one.each_s)
        places = (len(lasts) // 2, int(0.95 * (len(lasts) - 1)), -1)
        lasted = ", ".join(f"{lasts[place]:.1f}" for place in places) if lasts else ""
        lines.append(
            f"| {count} | {one.name} | {one.memory_mb:,.0f} | {one.cores:.2f} | {lasted} |"
        )
    return "\n".join(lines)


def extrapolated(found: dict[int, list[Phase]]) -> str:
    """The memory of a class of a hundred, on the line through the smallest and the largest."""
    few, many, lines = min(found), max(found), []
    of_few = {one.name: one.memory_mb for one in found[few]}
    for one in found[many]:
        if few != many and one.name in of_few:
            slope = (one.memory_mb - of_few[one.name]) / (many - few)
            total = one.memory_mb + slope * (CLASS - many)
            what = f"{CLASS}, extrapolated from {few} and {many}"
            lines.append(f"| {what} | {one.name} | {total:,.0f} | | |")
    return "\n".join(lines)


def measure(url: str, counts: list[int], names: list[str], password: Callable) -> None:
    """Print the table of classes of these sizes, one after another, each with its own students."""
    found, free = {}, list(names)
    for count in counts:
        now, free = free[:count], free[count:]
        students = [Student(url, name, password(name)) for name in now]
        load = os.getloadavg()[0]
        found[count] = hold(students)
        refused = {one.name: one.statuses for one in students if one.statuses}
        print(f"{count} students: refused for a time {refused or 'nobody'}; load before {load:.1f}")
        checks = next(one for one in found[count] if "checks" in one.name).each_s
        soon = sum(seconds <= SOON_S for seconds in checks)
        print(f"{soon} of {len(checks)} verdicts within {SOON_S} s")
        print(HEAD, rows(count, found[count]), sep="\n", flush=True)
        for one in processes(now):
            with suppress(psutil.Error):
                one.kill()
    print(extrapolated(found))
