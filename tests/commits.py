"""How long `make test` takes after a commit: computed for many, and tried for one.

    python tests/commits.py --until d46baa6 --last 60     what each of these commits would run
    python tests/commits.py --replay 3975658              run it, and compare with the computed time

A commit runs the units whose closure holds a file that it changed. Their seconds are those of the
tests when they last passed; `make test ALL=1` gives all of them. Tests of a run overlap, so their
sum is divided by what it was divided by in the last whole run.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import units
from passed import Passed, default_path
from selection import unit_of
from units import ROOT, Course

# Where a file that is gone has its content today.
MOVED = {
    "scripts/manyhands/checkpoint/checkpoints.py": "scripts/manyhands/training/checkpoints.py",
    "scripts/manyhands/checkpoint/elastic_run.py": "scripts/manyhands/programs/elastic_run.py",
    "scripts/manyhands/checkpoint/program.py": "scripts/manyhands/programs/killed.py",
    "scripts/manyhands/ddp/program.py": "scripts/manyhands/programs/ddp.py",
    "scripts/manyhands/mesh/pictures.py": "scripts/manyhands/mesh/figures.py",
    "scripts/manyhands/mesh/plan_memory.py": "scripts/manyhands/planner/memory.py",
    "scripts/manyhands/mesh/plan_messages.py": "scripts/manyhands/planner/messages.py",
    "scripts/manyhands/mesh/plan_time.py": "scripts/manyhands/planner/step_time.py",
    "scripts/manyhands/mesh/plan_words.py": "scripts/manyhands/planner/reasons.py",
    "scripts/manyhands/mesh/planner.py": "scripts/manyhands/planner/plans.py",
    "tests/jobs.py": "tests/commands.py",
    "tests/training.py": "tests/runs.py",
}
# Files that have gone from one room to another under their own name.
for _old, _new, _names in (
    ("checkpoint", "saving", "agree fits folder index kept names pieces remote sharded store"),
    ("mesh", "planner", "hardware published shape"),
    ("mesh", "simulator", "clock events recorder traffic"),
    ("jobs", "building", "notebook source timetable"),
):
    for _name in _names.split():
        MOVED[f"scripts/manyhands/{_old}/{_name}.py"] = f"scripts/manyhands/{_new}/{_name}.py"
for _path in sorted((ROOT / "tests").glob("*/test_*.py")):  # once they all lay in tests/
    MOVED[f"tests/{_path.name}"] = _path.relative_to(ROOT).as_posix()
LAST = 60


def git(*words: str, cwd: Path = ROOT) -> str:
    """Run git; its standard output."""
    command = ["git", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True).stdout


def changed_files(commit: str) -> set[str]:
    """The files that a commit changed, by their paths of today; a merge by its first parent."""
    listed = git("diff-tree", "--no-commit-id", "--name-only", "-r", "-m", "--first-parent", commit)
    return {MOVED.get(path, path) for path in listed.splitlines()}


class Costs:
    """Seconds of units, from the runs that the database knows."""

    def __init__(self, passed: Passed, course: Course) -> None:
        """ValueError where no whole run is known."""
        self.whole = passed.last_whole_run()
        if self.whole is None:
            raise ValueError("no whole run is known: make test ALL=1")
        specs, self.by_unit = units.specs(course), defaultdict(float)
        self.in_a_group = defaultdict(float)  # seconds of a unit that one worker has to run
        for test, seconds in self.whole.seconds.items():
            self.by_unit[unit_of(test, specs)] += seconds
            if test in self.whole.groups:
                self.in_a_group[unit_of(test, specs)] += seconds
        total = sum(self.by_unit.values())
        self.overlap = total / max(1.0, self.whole.clock_s - self.whole.start_s)
        self.files = {unit: units.unit_files(course, unit) for unit in self.by_unit}

    def selected(self, changed: set[str]) -> list[str]:
        """The units that depend on these files."""
        return [unit for unit, files in self.files.items() if files & changed]

    def clock_s(self, selected: list[str]) -> float:
        """Seconds by the clock of a run of these units."""
        together_s = sum(self.by_unit[unit] for unit in selected) / self.overlap
        one_s = sum(self.in_a_group[unit] for unit in selected)
        return self.whole.start_s + max(together_s, one_s)


def table(costs: Costs, until: str, last: int) -> None:
    """Print a line a commit, then the quartiles."""
    commits = git("log", f"-{last}", "--format=%h %s", until).splitlines()
    minutes = []
    for line in commits:
        commit, _, words = line.partition(" ")
        selected = costs.selected(changed_files(commit))
        minutes.append(costs.clock_s(selected) / 60)
        print(f"{commit} {len(selected):4d} units {minutes[-1]:5.1f} min  {words[:60]}")
    print(f"all units: {costs.clock_s([*costs.by_unit]) / 60:.1f} min by the same formula")
    quarters = statistics.quantiles(minutes, n=4, method="inclusive")
    print(
        f"{len(minutes)} commits: a quarter at most {quarters[0]:.1f}, "
        f"half {quarters[1]:.1f}, three quarters {quarters[2]:.1f} min"
    )


def replay(costs: Costs, commit: str) -> None:
    """Change what a commit changed in a clone of today's course, and run what that asks for."""
    changed = {path for path in changed_files(commit) if (ROOT / path).is_file()}
    computed_s = costs.clock_s(costs.selected(changed))
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "course"
        git("clone", "--quiet", str(ROOT), str(clone))
        for path in changed:
            touch(clone / path)
        # The environment is this one's; what it has of the course comes from the clone.
        (clone / ".venv").symlink_to(ROOT / ".venv")
        start_s = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-p", "no:nbval", "-n", "auto"]
        command += ["--maxprocesses", "4", "--dist", "loadgroup", "--changed", "-q"]
        done = subprocess.run(command, cwd=clone, capture_output=True, text=True)
        took_s = time.monotonic() - start_s
    print(*(line for line in done.stdout.splitlines() if line.startswith("tests:")), sep="\n")
    print(done.stdout.strip().splitlines()[-1])
    print(
        f"{commit}: {took_s / 60:.1f} min, computed {computed_s / 60:.1f}: "
        f"ratio {took_s / computed_s:.2f}"
    )


def touch(path: Path) -> None:
    """Change a file without changing what it does."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        path.write_text(text + "\n")
    elif path.suffix == ".json":
        path.write_text(text + " ")
    elif path.suffix in (".py", ".sh", ".sbatch", ".toml", ".yml", ".yaml") or not path.suffix:
        path.write_text(text + "# \n")
    else:
        path.write_text(text + "\n")


def main() -> int:
    """Compute, or replay."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--until", default="HEAD", help="the newest of the commits")
    parser.add_argument("--last", type=int, default=LAST, help="how many")
    parser.add_argument("--replay", nargs="+", default=[], help="commits to run for real")
    words = parser.parse_args()
    try:
        passed = Passed(default_path())
        costs = Costs(passed, Course(ROOT, passed.named()))
    except (OSError, RuntimeError, ValueError) as problem:
        print(f"commits.py: {problem}", file=sys.stderr)
        return 2
    if words.replay:
        for commit in words.replay:
            replay(costs, commit)
    else:
        table(costs, words.until, words.last)
    return 0


if __name__ == "__main__":
    sys.exit(main())
