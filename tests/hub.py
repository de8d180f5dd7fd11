"""A class on a real JupyterHub, in a real browser: `make hub`.

    python tests/hub.py            two students with a lesson each, and one who tries to reach into
                                   the other's work; a line a step, exit code 1 where one failed
    python tests/hub.py --checks   the part without hub and browser: checks by two users at once
    python tests/hub.py --tour     twenty students through all notebooks; --tour ddp: through one
    python tests/hub.py --measure 1 5 20     memory, cores and seconds of classes of these sizes
    python tests/hub.py --serve    the hub alone, until Enter is pressed

Pictures of what the students saw, and the hub's log, are left in runs/hub/.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import hub_class
import hub_scene
import side_by_side
from hub_scene import NAMESPACES, ROOT, password
from neighbour import Neighbour

LIMIT_S = 900  # slow is not wrong: a busy machine takes several times as long
INSIDE = "MANYHANDS_HUB_INSIDE"  # set in the namespaces: the folder for what was seen
STUDENTS = ["ann", "bob"]
TOURISTS = [f"tour{number:02d}" for number in range(20)]
NUM_CHECKS = {True: 50, False: 8}  # by both, with each umask; all where that is the whole test
UMASKS = (0o077, 0o000)
GREEN = re.compile(r"TODO \d+\.\d+ done")


@dataclass(frozen=True)
class Task:
    """What a student does in the browser."""

    notebook: str
    name: str  # of the exercise
    slip: tuple[str, str]  # makes its right answer wrong
    job: str  # run after check.keep()


TASKS = {
    "ann": Task(
        "04_collectives",
        "broadcast_naive",
        ("if other != root", "if other > root"),
        'watch.run("../sbatch/collectives.sbatch", "--impl", "mine", "--only", "broadcast", '
        '"--max-mb", 0.01, "--repeats", 3, ranks=2)',
    ),
    "bob": Task(
        "06_ddp",
        "place",
        ('"LOCAL_RANK"', '"RANK"'),
        'watch.run("../sbatch/ddp.sbatch", "--impl", "mine", "--steps", 20, ranks=2)',
    ),
}


def cells_of(folder: str, notebook: str) -> dict[str, str]:
    """Cell id -> source."""
    cells = json.loads((ROOT / folder / f"{notebook}.ipynb").read_text())["cells"]
    return {cell["id"]: "".join(cell["source"]) for cell in cells}


def answer_to(task: Task) -> str:
    """The cell with the course's own answer."""
    todo = cells_of("notebooks", task.notebook)
    name = next(n for n, s in todo.items() if re.search(rf"^(def|class) {task.name}\b", s, re.M))
    return cells_of("solutions", task.notebook)[name]


class Wrong(AssertionError):
    """A student did not see what he should."""


def expect(wanted: object, what: str, seen: str = "") -> None:
    """Raise Wrong where something is not as it should be."""
    if not wanted:
        raise Wrong(f"{what}; seen: {seen[:1000]!r}")


def work(user: str, url: str, seen: Path) -> None:
    """A student's evening, a line a step, and the next one; raises Wrong."""
    from browser import Lab, chromium

    task = TASKS[user]
    begin_s = time.monotonic()
    numbers = itertools.count(1)

    def done(step: str) -> None:
        print(f"{user}: {step}, {time.monotonic() - begin_s:.0f} s", flush=True)
        lab.picture(seen / f"{user}-{next(numbers)}.png")

    with chromium() as browser:
        lab = Lab(browser, url, user)
        lab.log_in(password(user))
        lab.open(task.notebook)
        done("logged in, and has opened the lesson")

        lab.run_all(LIMIT_S)
        check = lab.cell(f"check.{task.name}(")
        expect("not started" in lab.shown(check), "an untouched exercise is not started")
        errors = lab.page.locator(".jp-RenderedText[data-mime-type*='stderr']").all_inner_texts()
        errors = [one for one in errors if "hostname of the client" not in one]  # no DNS here
        expect(not errors, "nothing is printed as an error", str(errors))
        done("has run all of it, nothing done yet")

        right = answer_to(task)
        expect(task.slip[0] in right, f"the slip {task.slip[0]} is in the answer", right)
        todo = lab.cell(f"def {task.name}(")
        lab.write(todo, right.replace(*task.slip))
        lab.run(todo)
        said = lab.run(check)
        expect("not yet" in said and "Seen:" in said, "a wrong answer is not yet right", said)
        done("has a wrong answer")

        lab.write(todo, right)
        lab.run(todo)
        said = lab.run(check)
        expect(GREEN.search(said), "a right answer is done", said)
        done("has a right answer")

        job = lab.add_cell(check, f"check.keep()\nfolder = {task.job}\nprint(folder)")
        said = lab.run(job, LIMIT_S)
        expect("finished" in said, "the job comes to its end", said)
        expect(f"mine/{task.notebook[3:]}.py: {task.name}" in said, "the function is kept", said)
        done("has run a job with the function")

        lab.save()
        lab.log_out()
        lab.log_in(password(user))
        lab.open(task.notebook)
        shown = lab.shown(lab.cell(f"check.{task.name}("))
        expect(GREEN.search(shown), "what was done is still green", shown)
        lab.open("start")
        table = lab.run(lab.cell("overview.show()"))
        known = re.search(r"1\s+of\s", table) and "Next: " in table
        expect(known, "the start page knows it", table)
        done("has logged out and in again")
        (other,) = {*STUDENTS} - {user}
        status = lab.page.goto(f"{url}/user/{other}/lab").status
        expect(status == 403, f"the hub keeps {user} from the server of {other}", str(status))


def checks_side_by_side(count: int) -> None:
    """What two users judge at once, also where what they make could be read or changed; raises."""
    for umask in UMASKS:
        begin_s = time.monotonic()
        found = side_by_side.faults(STUDENTS, count // len(STUDENTS), umask)
        expect(not found, f"all checks are done with umask {umask:03o}", "; ".join(found))
        passed_s = time.monotonic() - begin_s
        print(f"{count} checks by two users at once, umask {umask:03o}, {passed_s:.0f} s")


def class_of_two(url: str, seen: Path) -> None:
    """Both students at once in their browsers; raises Wrong."""
    with ThreadPoolExecutor() as pool:
        for one in [pool.submit(work, user, url, seen) for user in STUDENTS]:
            one.result()


@contextmanager
def watched(kinds: set[str]) -> Iterator[None]:
    """Bob tries to reach into ann's work meanwhile, in these ways at least; Wrong where he does."""
    with Neighbour("bob") as bob:
        yield
    print(f"bob tried to reach into ann's work: {bob.tried}; reached: {bob.reached or 'nothing'}")
    expect(not bob.reached, "nobody reaches another one's work", str(bob.reached))
    expect(kinds <= bob.tried.keys(), f"there was something to try of {kinds}", str(bob.tried))


def inside(seen: Path, config: argparse.Namespace) -> None:
    """In the namespaces: a hub, and what is done with it."""
    names = [f"s{number:03d}" for number in range(sum(config.measure))]
    names += STUDENTS if config.tour is None else TOURISTS
    folder, seen = hub_scene.set_scene(names, seen)
    if config.measure:
        with hub_scene.hub(folder, seen / "measure.log") as url:
            hub_class.measure(url, config.measure, names, password)
        return
    if config.tour is not None:
        from hub_tour import tour

        with hub_scene.hub(folder, seen / "tour.log") as url:
            found = tour(url, seen, TOURISTS, config.tour)
        expect(not found, "all students come through their notebooks", "; ".join(found))
        return
    if config.serve:
        with hub_scene.hub(folder, seen / "hub.log") as url:
            names = " and ".join(f"{name} ({password(name)})" for name in STUDENTS)
            input(f"{url} for {names}; Enter ends it\n")
        return
    kinds = {"traps", "homes and folders", "processes", "stores"}
    with watched(kinds if config.checks else kinds | {"servers", "kernels", "hub"}):
        checks_side_by_side(NUM_CHECKS[config.checks])
        if not config.checks:
            with hub_scene.hub(folder, seen / "hub.log") as url:
                class_of_two(url, seen)


def main() -> int:
    """Go into namespaces of our own, and act there."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--serve", action="store_true", help="only the hub, to look at it")
    parser.add_argument("--checks", action="store_true", help="only what takes no browser")
    parser.add_argument("--tour", nargs="?", const="", metavar="NOTEBOOK", help="all notebooks")
    parser.add_argument("--measure", type=int, nargs="+", default=[], metavar="STUDENTS")
    config = parser.parse_args()
    if INSIDE in os.environ:
        try:
            inside(Path(os.environ[INSIDE]), config)
        except Exception:
            traceback.print_exc()
            return 1
        return 0
    if reason := hub_scene.why_not(config.checks):
        print(f"make hub: {reason}", file=sys.stderr)
        return 2
    seen = ROOT / "runs/hub"
    seen.mkdir(parents=True, exist_ok=True)
    begin_s = time.monotonic()
    command = [*NAMESPACES, sys.executable, *sys.argv]
    code = subprocess.run(command, env={**os.environ, INSIDE: str(seen)}, check=False).returncode
    print(f"{'as it should be' if code == 0 else 'FAILED'}, {time.monotonic() - begin_s:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
