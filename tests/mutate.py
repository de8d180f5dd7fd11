"""Plant faults in the course's code, one at a time, and see whether the tests find them.

    python tests/mutate.py --seed 29 --faults 30 --of d46baa6      draw those in tests/faults.json
    python tests/mutate.py --apply 7                   its room's tests, in a copy with fault 7
    python tests/mutate.py --apply all --command "make test"
    python tests/mutate.py --apply 3,7 --against d46baa6      that commit's code with the same
                                                              faults, before that commit's tests
    python tests/mutate.py --apply 0                   no fault: do these tests pass at all?

A copy is a worktree of the last commit in a folder for temporary files, with an environment of its
own; the working tree is never touched. In a command {python} stands for the copy's Python, and
{tests} for the test files of the fault's room, those of its own module first. The first test that
fails ends it. A line for each fault is added to runs/faults.jsonl.
"""

import argparse
import ast
import functools
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import psutil

import faults
from faults import Fault

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_name("faults.json")
RECORD = ROOT / "runs" / "faults.jsonl"
COMMAND = "{python} -m pytest -x -q -p no:cacheprovider {tests}"
MAX_FILES = 5  # of a room's tests
NO_TESTS = 5  # pytest's exit code


# ---- the tests of a room -----------------------------------------------------------------------


@functools.cache
def imported(path: Path) -> set[str]:
    """The modules and names that a file imports, as manyhands.fsdp.flat."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def tests_of(fault: Fault, root: Path) -> list[str]:
    """Test files with the module's or the room's name, those that import it, then its neighbours.

    Of these those first that import least, for they test little else.
    """
    module = ".".join(Path(fault.file).with_suffix("").parts[1:])
    neighbours = f"{module.rpartition('.')[0]}."
    room = fault.room.rpartition("/")[2]
    names = [f"test_{name}" for name in (Path(fault.file).stem, room)]
    found = []
    for path in sorted((root / "tests").rglob("test_*.py")):
        ours = {name for name in imported(path) if name.startswith("manyhands.")}
        if path.stem in names:
            found.append((names.index(path.stem), 0, path))
        elif module in ours:
            found.append((len(names), len(ours), path))
        elif any(name.startswith(neighbours) for name in ours):
            found.append((len(names) + 1, len(ours), path))
    return [path.relative_to(root).as_posix() for *_, path in sorted(found)[:MAX_FILES]]


# ---- a copy ------------------------------------------------------------------------------------


def git(*words: object) -> str:
    done = subprocess.run(["git", *map(str, words)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"mutate.py: git {words[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """A folder with the files of a commit, thrown away afterwards."""
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as folder:
        copy = Path(folder) / "course"
        git("worktree", "add", "--detach", copy, commit)
        try:
            yield copy
        finally:
            git("worktree", "remove", "--force", copy)


def furnish(copy: Path) -> None:
    """Give a copy its .venv: this one's packages and programs, but its own `manyhands`."""
    venv = copy / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    # A folder that a .pth file names: the .pth files in it, as this course's own, do not count.
    lines = [copy / "scripts", sysconfig.get_path("purelib")]
    (packages / "course.pth").write_text("\n".join(map(str, lines)) + "\n")
    for program in Path(sysconfig.get_path("scripts")).iterdir():
        link = venv / "bin" / program.name
        if not link.exists():
            link.symlink_to(program)
    for part in ("", "-dev", "-frameworks"):  # so that make takes it as it is
        (venv / f"ready{part}").touch()


def end(process: subprocess.Popen) -> None:
    """Kill a command and all that it has started."""
    with suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def first_failure(said: str) -> str:
    """The line of a command's output that names what failed, or its last one."""
    lines = [line for line in said.splitlines() if line.strip()]
    named = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return (named or lines[-1:] or [""])[0][:200]


def outcome(copy: Path, command: str, limit_s: float) -> dict:
    """Run a command in the copy: killed, survived, late or no tests, with seconds and words."""
    environ = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    environ |= {"PYTHONPATH": str(copy / "scripts"), "OMP_NUM_THREADS": "1"}
    start_s, said = time.monotonic(), ""
    with open(copy.parent / "said", "w+b") as file:
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=copy,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
            state = {0: "survived", NO_TESTS: "no tests"}.get(code, "killed")
        except subprocess.TimeoutExpired:
            state = "late"  # found as well, where the tests end in time without the fault
        finally:
            end(process)
        file.seek(0)
        said = file.read().decode(errors="replace")
    words = first_failure(said)
    return {"state": state, "seconds": round(time.monotonic() - start_s, 1), "said": words}


# ---- the command -------------------------------------------------------------------------------


def try_fault(number: int, listed: list[Fault], options: argparse.Namespace) -> dict:
    """Make one fault in a copy and run the tests there; fault 0 is none, with all rooms' tests."""
    row = {"fault": number, "commit": git("rev-parse", "--short", options.against or "HEAD")}
    with worktree(options.against or "HEAD") as copy:
        furnish(copy)
        chosen = listed if number == 0 else [listed[number - 1]]
        if number:
            path = copy / chosen[0].file
            try:
                path.write_text(chosen[0].applied(path.read_text()))
            except (LookupError, FileNotFoundError) as problem:
                return row | {"state": "absent", "seconds": 0.0, "said": str(problem)[:200]}
        tests = dict.fromkeys(name for one in chosen for name in tests_of(one, copy))
        if not tests and "{tests}" in options.command:
            return row | {"state": "no tests", "seconds": 0.0, "said": ""}
        command = options.command.replace("{python}", str(copy / ".venv" / "bin" / "python"))
        command = command.replace("{tests}", " ".join(tests))
        return row | {"command": options.command} | outcome(copy, command, options.limit_s)


def numbers_of(words: str, most: int) -> list[int]:
    """The numbers in "all" or in "3,7,11-14"."""
    if words == "all":
        return list(range(1, most + 1))
    numbers = []
    for word in words.split(","):
        first, _, last = word.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    if not all(0 <= number <= most for number in numbers):
        raise SystemExit(f"mutate.py: --apply {words}: the list has the faults 1 to {most}")
    return numbers


def draw_list(seed: int, num_faults: int, commit: str) -> None:
    """Write the list. It is drawn in a commit's code, so that it can be drawn again."""
    with worktree(commit) as copy:
        rows = [asdict(one) for one in faults.draw(copy, seed, num_faults)]
    about = {"seed": seed, "commit": git("rev-parse", "--short=7", commit), "faults": rows}
    LIST.write_text(json.dumps(about, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, help="draw the list anew with this seed")
    parser.add_argument("--faults", type=int, default=30, help="as many are drawn")
    parser.add_argument("--of", default="HEAD", help="the commit in whose code they are drawn")
    parser.add_argument("--apply", default="", help="numbers of faults to try, as 3,7-9; or all")
    parser.add_argument("--against", default="", help="a commit whose code and tests are taken")
    parser.add_argument("--command", default=COMMAND, help=f"by default {COMMAND}")
    parser.add_argument("--limit-s", type=float, default=600, help="seconds for each fault")
    options = parser.parse_args()
    if options.seed is not None:
        draw_list(options.seed, options.faults, options.of)
    listed = [Fault(**row) for row in json.loads(LIST.read_text())["faults"]]
    rows = []
    for number in numbers_of(options.apply, len(listed)) if options.apply else []:
        row = try_fault(number, listed, options)
        rows.append(row)
        where = f"{listed[number - 1].file}:{listed[number - 1].line}" if number else "none"
        print(
            f"{number:3} {row['state']:9} {row['seconds']:6} s  {where}  {row['said']}", flush=True
        )
        RECORD.parent.mkdir(exist_ok=True)
        with open(RECORD, "a") as file:
            file.write(json.dumps(row) + "\n")
    for number, one in enumerate(listed, start=1) if not options.apply else ():
        print(f"{number:3} {one.operator:12} {one.file}:{one.line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
