"""Runs the tests whose inputs have changed since they passed, longest first.

    units.py   the inputs of a unit, and its key          passed.py   what passed with which key

A test is taken as passed only if it passed with the same key; one that was skipped has not. With
`--changed`, files whose tests have all passed are not even imported. Without it nothing is taken,
and what passes is written down all the same. The process that the user started decides, and tells
pytest's workers.
"""

import re
import sqlite3
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

import units
from passed import Passed, WholeRun, default_path
from units import Course

EXERCISE = re.compile(r"test_checks\.py::.*\[(\d+\.\d+)")
NOTEBOOK = re.compile(r"test_notebooks\.py::test_a_(solution|todo)\w*\[([\w.]+)\]")
CHUNK_S = 30.0  # tests of one file that one worker runs in a row, for they share what they set up
WAITING = "slurm"  # the group of tests that mostly wait; it begins first


def unit_of(test: str, specs: dict[str, str]) -> str:
    """The unit of a test: the spec of its exercise, its notebook, or its file."""
    if (exercise := EXERCISE.search(test)) and exercise[1] in specs:
        return specs[exercise[1]]
    if notebook := NOTEBOOK.search(test):
        folder = {"solution": "solutions", "todo": "notebooks"}[notebook[1]]
        return f"{folder}/{notebook[2]}.ipynb"
    return test.partition("::")[0]


def plain(test: str) -> str:
    """A test's name without the group that xdist puts behind it."""
    return test.rsplit("@", 1)[0] if test.rfind("@") > test.rfind("]") else test


class Keys:
    """The keys of all units as the files are now."""

    def __init__(self, course: Course, nightly: bool) -> None:
        """Sums are taken here; keys when they are asked for."""
        self.course = course
        self.around = units.surroundings()
        self.specs = units.specs(course)
        self.nightly = nightly
        self._keys: dict[str, str] = {}
        self._files: dict[str, set[str]] = {}

    def files(self, unit: str) -> set[str]:
        """The unit's closure."""
        if unit not in self._files:
            self._files[unit] = units.unit_files(self.course, unit)
        return self._files[unit]

    def of_unit(self, unit: str, nightly: bool | None = None) -> str:
        """The unit's key; a nightly run tries more, and has keys of its own."""
        if unit not in self._keys:
            self._keys[unit] = units.key(self.course, self.files(unit), self.around)
        is_nightly = self.nightly if nightly is None else nightly
        return f"{self._keys[unit]}{' nightly' * is_nightly}"

    def of_test(self, test: str, nightly: bool | None = None) -> str:
        """The key of a test's unit."""
        return self.of_unit(unit_of(test, self.specs), nightly)


class Selection:
    """In the process that the user started: what is taken as passed, and what passes."""

    def __init__(self, config: pytest.Config, passed: Passed) -> None:
        self.passed = passed
        self.only_changed = config.getoption("--changed")
        self.keys = Keys(Course(config.rootpath, passed.named()), config.getoption("--nightly"))
        self.taken: dict[str, float] = {}  # test -> when it passed
        self.known: set[str] = set()  # all tests of the files that need not be imported
        self.unread: list[str] = []  # these files
        self.changed: dict[str, list[str]] = {}  # unit -> what has changed
        for file in units.test_files(self.keys.course):
            self._take(file)
        passed.note_named(self.keys.course.remembered)
        self.seconds = passed.seconds()
        self.start_s = time.monotonic()
        self.first_s: float | None = None  # when the first test had begun
        self.outcomes: dict[str, list[pytest.TestReport]] = {}
        self.groups: dict[str, str] = {}
        self.collected: dict[str, list[str]] = {}

    def _take(self, file: str) -> None:
        """Take what has passed of a file's tests."""
        tests = self.passed.collected(self.keys.of_unit(file))
        if tests is None or not self.only_changed:
            return
        done: dict[str, tuple[float, float]] = {}
        for unit in {unit_of(test, self.keys.specs) for test in tests}:
            done |= self.passed.tests(self.keys.of_unit(unit))
        taken = {test: done[test][0] for test in tests if test in done}
        self.taken |= taken
        if len(taken) == len(tests):
            self.unread.append(file)
            self.known |= {*tests}

    def for_workers(self) -> dict:
        """What a worker has to know."""
        return {"taken": [*self.taken], "unread": self.unread, "seconds": self.seconds}

    def note(self, report: pytest.TestReport) -> None:
        """A step of a test has ended."""
        self.first_s = self.first_s or time.monotonic()
        test = plain(report.nodeid)
        self.outcomes.setdefault(test, []).append(report)
        if test != report.nodeid:
            self.groups[test] = report.nodeid.rsplit("@", 1)[1]

    def write(self) -> None:
        """Write down what passed, unless its files have changed meanwhile."""
        now = Keys(Course(self.keys.course.root, self.keys.course.remembered), self.keys.nightly)
        same: dict[str, bool] = {}
        passed, failed = [], []
        for test, reports in self.outcomes.items():
            unit = unit_of(test, self.keys.specs)
            if unit not in same:
                same[unit] = now.of_unit(unit) == self.keys.of_unit(unit)
            keys = {self.keys.of_unit(unit), self.keys.of_unit(unit, nightly=False)}
            if len(reports) == 3 and all(one.outcome == "passed" for one in reports):
                seconds = sum(one.duration for one in reports)
                passed += [(key, test, seconds) for key in keys if same[unit]]
            elif any(one.failed for one in reports):
                failed += [(key, test) for key in keys]
        self.passed.add(passed)
        self.passed.drop(failed)
        files = {file: self.keys.of_unit(file) for file in self.collected}
        self.passed.note_collected({files[file]: tests for file, tests in self.collected.items()})
        ran = {unit_of(test, self.keys.specs) for _, test, _ in passed}
        sums = self.keys.course.sums
        self.passed.note_inputs(
            {unit: {path: sums[path] for path in self.keys.files(unit)} for unit in ran}
        )

    def write_run(self) -> None:
        """Write down how long a whole run took."""
        seconds = {
            test: sum(one.duration for one in reports) for test, reports in self.outcomes.items()
        }
        begun_s = (self.first_s or time.monotonic()) - self.start_s
        clock_s = time.monotonic() - self.start_s
        self.passed.note_run(WholeRun(begun_s, clock_s, seconds, self.groups))

    # ---- words ---------------------------------------------------------------------------------

    def header(self) -> str:
        """What this run tries, in a line."""
        night = "also containers, chaos, damage, other draws and all slips"
        if self.keys.nightly:
            return f"tests: all, {night}; nothing is taken as passed"
        if self.only_changed:
            return (
                "tests: those whose inputs have changed since they passed "
                f"(ALL=1: all; NIGHTLY=1: {night})"
            )
        return f"tests: all; nothing is taken as passed (NIGHTLY=1: {night})"

    def reasons(self, most: int = 8) -> list[str]:
        """Which files have changed since units passed, a line each, and how many units each."""
        counts: dict[str, int] = {}
        sums = self.keys.course.sums
        inputs = self.passed.inputs()
        for unit, old in inputs.items():
            if unit not in sums:
                continue
            new = {path: sums[path] for path in self.keys.files(unit)}
            for path in {path for path in {*old, *new} if old.get(path) != new.get(path)}:
                counts[path] = counts.get(path, 0) + 1
        ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        lines = [
            f"changed: {path} ({count} unit{'s' * (count > 1)})" for path, count in ordered[:most]
        ]
        return lines + [f"changed: {len(ordered) - most} more files"] * (len(ordered) > most)

    def summary(self) -> str:
        """What ran, and what was taken as passed, since when."""
        ran = {
            test
            for test, reports in self.outcomes.items()
            if any(one.when == "call" and not one.skipped or one.failed for one in reports)
        }
        of = {unit_of(test, self.keys.specs) for test in ran}
        told = f"tests: {len(ran)} ran, of {len(of)} units"
        taken = self.taken.keys() - self.outcomes.keys()
        if not taken:
            return f"{told}; none taken as passed"
        since = datetime.fromtimestamp(min(self.taken[test] for test in taken))
        return f"{told}; {len(taken)} taken as passed, the oldest on {since:%Y-%m-%d %H:%M}"


# ---- order ------------------------------------------------------------------------------------


def chunks(tests: Iterable[str], seconds: dict[str, float]) -> dict[str, tuple[float, str]]:
    """Test -> (-seconds, name) of its chunk: tests of a file that follow each other.

    Sorted by it, the group that mostly waits comes first, then the longest chunks.
    """
    totals: dict[str, float] = {}
    names: dict[str, str] = {}
    counts: dict[str, int] = {}
    for test in tests:
        file, takes_s = test.partition("::")[0], seconds.get(plain(test), 1.0)
        if test != plain(test):
            name, takes_s = test.rsplit("@", 1)[1], 1e6
        else:
            name = f"{file} {counts.setdefault(file, 0)}"
            if totals.get(name, 0.0) + takes_s > CHUNK_S and name in totals:
                counts[file] += 1
                name = f"{file} {counts[file]}"
        names[test] = name
        totals[name] = totals.get(name, 0.0) + takes_s
    return {test: (-totals[name], name) for test, name in names.items()}


class Longest(LoadScopeScheduling):
    """Hands out chunks in the order in which they were sorted."""

    def __init__(self, config: pytest.Config, log: object, seconds: dict[str, float]) -> None:
        super().__init__(config, log)
        self.seconds = seconds
        self.chunk_of: dict[str, tuple[float, str]] = {}

    def schedule(self) -> None:
        """As its parent does, which asks for the scope of each test."""
        if not self.chunk_of:
            self.config.option.loadscopereorder = False
            tests = next(iter(self.registered_collections.values()))
            self.chunk_of = chunks(sorted(tests), self.seconds)
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        return self.chunk_of[nodeid][1]


# ---- pytest's hooks ----------------------------------------------------------------------------


class Plugin:
    """Both in the process that the user started and in a worker."""

    def __init__(self, selection: Selection | None, told: dict) -> None:
        self.selection = selection  # of the first process
        self.taken = {*told["taken"]}
        self.unread = {*told["unread"]}
        self.seconds = told["seconds"]
        self.collected: dict[str, list[str]] = {}

    def pytest_report_header(self) -> list[str]:
        """Says in a line what this run tries, and what has changed."""
        if self.selection is None:
            return []
        lines = self.selection.reasons() if self.selection.only_changed else []
        return [self.selection.header(), *lines]

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        """A file whose tests have all passed is not imported."""
        if not collection_path.is_relative_to(config.rootpath):
            return None
        name = collection_path.relative_to(config.rootpath).as_posix()
        return True if name in self.unread else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Note what there is, leave out what is taken as passed, and sort."""
        nightly = config.getoption("--nightly")
        if config.args_source is config.ArgsSource.TESTPATHS:
            for item in items:
                if nightly or not item.get_closest_marker("nightly"):
                    self.collected.setdefault(item.nodeid.partition("::")[0], []).append(
                        item.nodeid
                    )
        kept = [item for item in items if item.nodeid not in self.taken]
        if len(kept) < len(items):
            out = [item for item in items if item.nodeid in self.taken]
            config.hook.pytest_deselected(items=out)
        items[:] = kept

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Longest first; xdist has put groups' names behind tests' names, and now numbers them."""
        place = chunks(sorted(item.nodeid for item in session.items), self.seconds)
        session.items.sort(key=lambda item: place[item.nodeid])

    def pytest_configure_node(self, node: object) -> None:
        """A worker starts."""
        node.workerinput["selection"] = self.selection.for_workers()

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: object) -> Longest:
        """Chunks, longest first."""
        return Longest(config, log, self.seconds)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A step of a test has ended; workers' reports come to the first process, too."""
        if self.selection:
            self.selection.note(report)

    def pytest_testnodedown(self, node: object) -> None:
        """A worker has ended, and says which tests there are."""
        output = getattr(node, "workeroutput", None) or {}
        self.selection.collected |= output.get("collected", {})

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Write down what passed. Nothing to run, since all has passed, is no fault."""
        if self.selection is None:
            session.config.workeroutput["collected"] = self.collected
            return
        self.selection.collected |= self.collected
        self.selection.write()
        config = session.config
        is_all = config.args_source is config.ArgsSource.TESTPATHS and not self.selection.taken
        if is_all and not any(config.getoption(name, "") for name in ("--only", "-k", "-m")):
            self.selection.write_run()
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.selection.taken:
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what ran, and what was taken as passed."""
        if self.selection:
            terminalreporter.write_line(self.selection.summary())


def register(config: pytest.Config) -> None:
    """Put the plugin to work; where nothing can be kept, all tests run, and a line says so."""
    if worker := getattr(config, "workerinput", None):
        if "selection" in worker:
            config.pluginmanager.register(Plugin(None, worker["selection"]), "selection")
        return
    try:
        selection = Selection(config, Passed(default_path()))
    except (OSError, RuntimeError, sqlite3.Error) as problem:
        print(f"tests: all, since what passed cannot be kept ({problem}): set XDG_CACHE_HOME")
        return
    config.pluginmanager.register(Plugin(selection, selection.for_workers()), "selection")
