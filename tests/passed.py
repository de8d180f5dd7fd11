"""What has passed, and with which key: a small database in the user's cache folder.

passed      key of a unit, test -> when, seconds
collected   key of a test file -> the tests in it
inputs      unit -> the sums of its files when it last passed, to say what has changed
named       sum of a file -> what it names, which takes seconds to find out
"""

import json
import os
import sqlite3
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

TABLES = """
create table if not exists passed (
    key text, test text, at real, seconds real, primary key (key, test));
create table if not exists collected (key text primary key, at real, tests text);
create table if not exists inputs (unit text primary key, sums text);
create table if not exists runs (at real primary key, run text);
create table if not exists named (sum text primary key, names text);
"""
KEPT_S = 90 * 24 * 3600.0  # what passed longer ago is run again
WAIT_S = 30.0  # for another run that writes


def default_path() -> Path:
    """Where the database lies. RuntimeError where there is no home."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "manyhands" / "tests.sqlite"


@dataclass(frozen=True)
class WholeRun:
    """A run in which nothing was taken as passed."""

    start_s: float  # by the clock, until the first test began
    clock_s: float  # all of it
    seconds: dict[str, float]  # of each test
    groups: dict[str, str]  # test -> its group, whose tests one worker runs


class Passed:
    """The database; every call is whole, so that two runs at once do not meet."""

    def __init__(self, path: Path) -> None:
        """Make it where there is none. OSError or sqlite3.Error where that cannot be."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        with self._open() as base:
            base.executescript(TABLES)
            old = time.time() - KEPT_S
            base.execute("delete from passed where at < ?", (old,))
            base.execute("delete from collected where at < ?", (old,))

    def _open(self) -> closing:
        return closing(sqlite3.connect(self.path, timeout=WAIT_S, isolation_level=None))

    def tests(self, key: str) -> dict[str, tuple[float, float]]:
        """Test -> when it passed and its seconds, of all that passed with this key."""
        with self._open() as base:
            rows = base.execute("select test, at, seconds from passed where key = ?", (key,))
            return {test: (at, seconds) for test, at, seconds in rows}

    def seconds(self) -> dict[str, float]:
        """Test -> the seconds that it took when it last passed, with whatever key."""
        with self._open() as base:
            return dict(base.execute("select test, seconds from passed order by at"))

    def add(self, rows: Iterable[tuple[str, str, float]]) -> None:
        """Write down (key, test, seconds) of tests that passed now."""
        now = time.time()
        with self._open() as base:
            many = [(key, test, now, seconds) for key, test, seconds in rows]
            base.execute("begin")
            base.executemany("insert or replace into passed values (?, ?, ?, ?)", many)
            base.execute("commit")

    def drop(self, rows: Iterable[tuple[str, str]]) -> None:
        """Forget (key, test) of tests that did not pass now."""
        with self._open() as base:
            base.executemany("delete from passed where key = ? and test = ?", list(rows))

    def collected(self, key: str) -> list[str] | None:
        """The tests of a file with this key; None where nobody has seen it yet."""
        with self._open() as base:
            row = base.execute("select tests from collected where key = ?", (key,)).fetchone()
            return json.loads(row[0]) if row else None

    def note_collected(self, found: dict[str, list[str]]) -> None:
        """Write down the tests of files, by their keys."""
        rows = [(key, time.time(), json.dumps(tests)) for key, tests in found.items()]
        with self._open() as base:
            base.executemany("insert or replace into collected values (?, ?, ?)", rows)

    def inputs(self) -> dict[str, dict[str, str]]:
        """Unit -> path -> sum, from when it last passed."""
        with self._open() as base:
            rows = base.execute("select unit, sums from inputs")
            return {unit: json.loads(sums) for unit, sums in rows}

    def note_inputs(self, inputs: dict[str, dict[str, str]]) -> None:
        """Write down units' files and their sums."""
        rows = [(unit, json.dumps(sums)) for unit, sums in inputs.items()]
        with self._open() as base:
            base.executemany("insert or replace into inputs values (?, ?)", rows)

    def note_run(self, run: WholeRun) -> None:
        """Write down a whole run; the newest is kept."""
        with self._open() as base:
            base.execute("delete from runs")
            base.execute("insert into runs values (?, ?)", (time.time(), json.dumps(asdict(run))))

    def last_whole_run(self) -> WholeRun | None:
        """The newest whole run; None where there was none."""
        with self._open() as base:
            row = base.execute("select run from runs order by at desc").fetchone()
            return WholeRun(**json.loads(row[0])) if row else None

    def named(self) -> dict[str, list[str]]:
        """Sum of a file -> what it names."""
        with self._open() as base:
            return {one: json.loads(names) for one, names in base.execute("select * from named")}

    def note_named(self, named: dict[str, list[str]]) -> None:
        """Keep what these files name, and forget all others."""
        with self._open() as base:
            base.execute("begin")
            base.execute("delete from named")
            rows = [(one, json.dumps(names)) for one, names in named.items()]
            base.executemany("insert into named values (?, ?)", rows)
            base.execute("commit")
