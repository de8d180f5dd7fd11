"""Compares what units are said to depend on (units.py) with the files that they really open.

    python tests/opened.py                            all units, each in a pytest of its own
    python tests/opened.py tests/fsdp/test_flat.py 6.5     some: test files, exercises, notebooks

strace follows every process that a test starts: ranks, kernels, jobs, shells. A file that was
opened and is not in the closure is a fault: a change of it would run no test. Exit code 1 then.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import units
from selection import unit_of
from units import ROOT, Course

STRACE = ("strace", "-f", "-qq", "-y", "--seccomp-bpf", "-e", "trace=open,openat,execve")
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
TOGETHER = 2  # units at a time
# They decide what runs, and not what passes.
DECIDING = {"tests/units.py", "tests/passed.py", "tests/selection.py"}
LIMIT_S = 3600.0  # for a unit; ten times what the longest takes
OPENED = re.compile(r"^(\d+) +open(?:at)?\(.*?, (O_[A-Z_|]+).* = \d+<(/[^>]+)>")
STARTED = re.compile(r'^\d+ +execve\("([^"]+)".* = 0')
CACHED = re.compile(r"__pycache__/(\w+)\.cpython-\d+(?:\.opt-\d)?\.pyc$")
PLACES = re.compile(r"/((?:scripts|sbatch|solutions|notebooks|tests)/.*)$")


def tests_by_unit(course: Course) -> dict[str, list[str]]:
    """Unit -> its tests, as pytest finds them."""
    listed = subprocess.run(
        [*PYTEST, "--collect-only"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    specs, found = units.specs(course), defaultdict(list)
    for line in listed.stdout.splitlines():
        if "::" in line:
            found[unit_of(line, specs)].append(line)
    return found


def name_in(course: Course, path: str) -> str:
    """The course's file that lies at `path`, here or in a copy; "" where it is none."""
    path = CACHED.sub(r"\1.py", path)
    if path.startswith(f"{ROOT}/"):
        name = path.removeprefix(f"{ROOT}/")
    else:
        place = PLACES.search(path)
        name = place[1] if place else ""
    return name if name in course.sums else ""


def opened(course: Course, trace: Path, but_first: bool) -> set[str]:
    """The course's files that were read, and not only copied; `but_first`: not by pytest itself."""
    reads, first = Counter(), ""
    with trace.open(errors="replace") as lines:
        for line in lines:
            if started := STARTED.match(line):
                reads[name_in(course, started[1])] += 1
            elif found := OPENED.match(line):
                process, flags, path = found.groups()
                first = first or process
                if but_first and process == first:
                    continue
                copied = "O_CREAT" in flags and not path.startswith(f"{ROOT}/")
                reads[name_in(course, path)] += -1 if copied else 1
    return {name for name, count in reads.items() if name and count > 0}


def compare(course: Course, unit: str, tests: list[str]) -> tuple[str, bool]:
    """Run a unit's tests and compare; a line, and whether all is well."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        # The selection reads every file; without a folder to keep things in it does not begin.
        # Modules that ranks find loaded would not be opened.
        env = os.environ | {"XDG_CACHE_HOME": os.devnull, "MANYHANDS_PRELOAD": ""}
        done = subprocess.run(
            [*STRACE, "-o", trace, *PYTEST, *tests],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        # To find the exercises pytest imports the specs of all lessons.
        found = opened(course, trace, but_first=unit.startswith(units.CHECKS)) - DECIDING
    said = units.unit_files(course, unit)
    missing = sorted(found - said)
    last = done.stdout.strip().splitlines()[-1:]
    line = f"{unit}: {len(found)} opened, {len(said)} said, {''.join(last)}"
    return "\n  not said: ".join([line, *missing]), not missing and done.returncode == 0


def main() -> int:
    """Compare the units that are named, or all."""
    if shutil.which("strace") is None:
        print("opened.py needs strace: apt-get install strace", file=sys.stderr)
        return 2
    course = Course()
    specs, by_unit = units.specs(course), tests_by_unit(course)
    wanted = [specs.get(word, word) for word in sys.argv[1:]] or sorted(by_unit)
    if unknown := [word for word in wanted if word not in by_unit]:
        print(f"opened.py: no unit is called {', '.join(unknown)}", file=sys.stderr)
        return 2
    whole = [unit for unit in wanted if unit in units.WHOLE]
    wanted = [unit for unit in wanted if unit not in units.WHOLE]
    print("\n".join(f"{unit}: reads the whole course" for unit in whole))
    with ThreadPoolExecutor(TOGETHER) as pool:
        results = pool.map(lambda unit: compare(course, unit, by_unit[unit]), wanted)
        faults = 0
        for line, is_well in results:
            print(line, flush=True)
            faults += not is_well
    print(f"{len(wanted)} units compared, {faults} with a fault")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
