"""What a unit depends on, and what is run again: on small courses, with pytest itself."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import passed
import selection
import units

ROOT = Path(__file__).resolve().parents[2]

FILES = {
    "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["scripts", "tests"]\n'
    'testpaths = ["tests"]\nmarkers = ["nightly: at night"]\n',
    "tests/helper.py": "WORD = 'ddp'\n",
    "tests/test_one.py": """
        import subprocess
        import pytest
        from manyhands.first import one

        def test_value():
            assert one() in (1, 3)

        @pytest.mark.parametrize("word", ["a", "b"])
        def test_words(word):
            assert word in "ab"
    """,
    "tests/test_two.py": """
        import pytest

        def test_value():
            from manyhands.second import two
            assert two() == 2

        @pytest.mark.skip(reason="for want of a GPU")
        def test_gpu():
            pass

        @pytest.mark.nightly
        def test_at_night():
            pass
    """,
    "scripts/manyhands/__init__.py": "",
    "scripts/manyhands/first.py": '"""Like scripts/other.py."""\ndef one():\n    return 1\n',
    "scripts/manyhands/second.py": "def two():\n    return 2\n",
}
CONFTEST = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
import selection

def pytest_addoption(parser):
    parser.addoption("--changed", action="store_true")
    parser.addoption("--nightly", action="store_true")

def pytest_configure(config):
    selection.register(config)

def pytest_collection_modifyitems(config, items):
    if not config.getoption("--nightly"):
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
"""


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


@pytest.fixture
def course(tmp_path: Path) -> Path:
    root = tmp_path / "course"
    write(root, FILES | {"tests/conftest.py": CONFTEST})
    return root


# ---- what a unit depends on -------------------------------------------------------------------

WAYS = {  # a file that one.py or test_one.py names, and how
    "an import": ("scripts/manyhands/first.py", "import manyhands.new", "scripts/manyhands/new.py"),
    "a name of a module": (
        "tests/test_one.py",
        "from manyhands import new",
        "scripts/manyhands/new.py",
    ),
    "a lazy import": (
        "scripts/manyhands/first.py",
        "def f():\n    from manyhands.new import x",
        "scripts/manyhands/new.py",
    ),
    "a package on the way": (
        "tests/test_one.py",
        "import manyhands.room.deep",
        "scripts/manyhands/room/__init__.py",
    ),
    "a script by path": (
        "tests/test_one.py",
        "subprocess.run([ROOT / 'scripts' / 'train_new.py'])",
        "scripts/train_new.py",
    ),
    "a command": ("tests/test_one.py", "run('bash sbatch/new.sbatch --x')", "sbatch/new.sbatch"),
    "a pattern": (
        "tests/test_one.py",
        "for w in words: run(f'train_{w}.py')",
        "scripts/train_new.py",
    ),
    "a program in a text": (
        "tests/test_one.py",
        "P = '''\nimport os\nfrom manyhands import new\n'''",
        "scripts/manyhands/new.py",
    ),
    "data beside": (
        "scripts/manyhands/first.py",
        "Path(__file__).with_name('stored_new.json')",
        "scripts/manyhands/stored_new.json",
    ),
    "a stored run": (
        "tests/test_one.py",
        "storage.stored('room', 'new')",
        "scripts/manyhands/room/stored_new.json",
    ),
    "a module by its name": (
        "tests/test_one.py",
        "import_module(f'manyhands.{room}.bench')",
        "scripts/manyhands/room/bench.py",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_is_named_counts(course: Path, way: str) -> None:
    place, line, named = WAYS[way]
    write(course, {"scripts/manyhands/room/deep.py": "", named: "# new\n"})
    before = units.unit_files(units.Course(course), "tests/test_one.py")
    with (course / place).open("a") as file:
        file.write(line + "\n")
    after = units.unit_files(units.Course(course), "tests/test_one.py")
    assert named not in before and named in after
    assert named not in units.unit_files(units.Course(course), "tests/test_two.py")


def test_a_job_leads_to_its_script_and_a_comment_leads_nowhere(course: Path) -> None:
    job = "#SBATCH --x\n# as scripts/train_other.py\nbash launch.sh scripts/train_new.py\n"
    files = {"sbatch/new.sbatch": job, "sbatch/launch.sh": "true\n", "scripts/train_new.py": ""}
    write(course, {**files, "scripts/train_other.py": "", "scripts/other.py": ""})
    (course / "tests/test_one.py").write_text("JOB = 'new.sbatch'\nimport manyhands.first\n")
    found = units.unit_files(units.Course(course), "tests/test_one.py")
    assert {*files} <= found
    assert found.isdisjoint({"scripts/train_other.py", "scripts/other.py"})


def test_a_notebook_depends_on_what_its_cells_import_and_start(course: Path) -> None:
    sources = ["%matplotlib inline\nfrom manyhands import first", "run('../sbatch/new.sbatch')"]
    cells = [{"cell_type": "code", "source": [source]} for source in sources]
    write(course, {"sbatch/new.sbatch": "x", "tests/building/test_notebooks.py": "import other"})
    (course / "solutions").mkdir()
    (course / "solutions/01_x.ipynb").write_text(json.dumps({"cells": cells}))
    found = units.unit_files(units.Course(course), "solutions/01_x.ipynb")
    runner = "tests/building/test_notebooks.py"
    assert {"scripts/manyhands/first.py", "sbatch/new.sbatch", runner} <= found
    assert "scripts/manyhands/second.py" not in found


def test_a_lesson_s_spec_does_not_depend_on_other_lessons_specs() -> None:
    course = units.Course(ROOT)
    specs = units.specs(course)
    found = units.unit_files(course, specs["6.5"])
    assert specs["6.5"] in found and "tests/answers/ddp.py" in found
    assert "scripts/manyhands/ddp/wrapping.py" in found
    others = {path for path in specs.values() if path.split("/")[3] != "ddp"}
    assert found.isdisjoint(others)


def test_what_is_installed_and_what_the_machine_has_count(monkeypatch: pytest.MonkeyPatch) -> None:
    here = units.surroundings({"PATH": ""})
    assert any(line.startswith("torch-") for line in here)
    assert units.surroundings({"PATH": "", "MANYHANDS_DRAW": "7"}) != here
    monkeypatch.setattr(units.os, "geteuid", lambda: 12345)
    assert units.surroundings({"PATH": ""}) != here or "root: False" in here


def test_a_tool_counts_for_those_that_look_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    course = units.Course(ROOT)
    files = ("tests/house/test_containers.py", "tests/fsdp/test_flat.py")
    found = [units.unit_files(course, file) for file in files]
    before = [units.key(course, one, []) for one in found]
    monkeypatch.delitem(units.TOOLS, "mmdebstrap")
    after = [units.key(course, one, []) for one in found]
    assert before[0] != after[0] and before[1] == after[1]


def test_every_tool_that_a_test_looks_for_is_listed() -> None:
    asked = {
        (tool, file)
        for file in units.Course(ROOT).sums
        if file.startswith("tests/") and file.endswith(".py")
        for tool in re.findall(r'shutil\.which\("([\w-]+)"\)', (ROOT / file).read_text())
    }
    # opened.py is no test.
    missing = {(tool, file) for tool, file in asked if file not in units.TOOLS.get(tool, ())}
    assert asked and missing == {("strace", "tests/opened.py")}


# ---- what runs --------------------------------------------------------------------------------


def run(course: Path, *words: str) -> tuple[set[str], str]:
    """Run pytest in a course: the tests that ran, and what was printed."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:nbval", *words]
    env = {"PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(course.parent / "cache")}
    done = subprocess.run(command, cwd=course, env=env, capture_output=True, text=True)
    ran = set(re.findall(r"(\w+\.py::\S+) (?:PASSED|FAILED|SKIPPED)", done.stdout))
    ran |= {name for name in re.findall(r"(?:PASSED|FAILED|SKIPPED) tests/(\S+)", done.stdout)}
    return {re.sub(r"^tests/", "", name) for name in ran}, f"{done.stdout}{done.returncode}"


ONE = {"test_one.py::test_value", "test_one.py::test_words[a]", "test_one.py::test_words[b]"}
TWO = {"test_two.py::test_value"}
SKIPPED = {"test_two.py::test_gpu"}


def test_what_has_passed_is_not_run_again(course: Path) -> None:
    ran, said = run(course, "--changed")
    assert ran == ONE | TWO | SKIPPED and "none taken as passed" in said
    ran, said = run(course, "--changed")
    assert ran == SKIPPED and "4 taken as passed, the oldest on 20" in said and said.endswith("0")
    assert run(course)[0] == ONE | TWO | SKIPPED  # ALL=1
    (course / "scripts/manyhands/first.py").write_text("def one():\n    return 3\n")
    ran, said = run(course, "--changed")
    assert ran == ONE | SKIPPED and "changed: scripts/manyhands/first.py (1 unit)" in said


def test_a_test_that_failed_is_run_again_and_the_others_are_not(course: Path) -> None:
    (course / "scripts/manyhands/first.py").write_text("def one():\n    return 2\n")
    assert "FAILED tests/test_one.py::test_value" in run(course, "--changed")[1]
    assert run(course, "--changed")[0] == {"test_one.py::test_value"} | SKIPPED


def test_a_test_that_passed_and_now_fails_is_no_longer_taken(course: Path) -> None:
    outside = course.parent / "outside"
    text = f"from pathlib import Path\ndef test_x():\n    assert Path({str(outside)!r}).exists()\n"
    (course / "tests/test_three.py").write_text(text)
    outside.touch()
    run(course, "--changed")
    outside.unlink()
    assert "test_three.py::test_x" not in run(course, "--changed")[0]
    run(course)
    assert "test_three.py::test_x" in run(course, "--changed")[0]


def test_a_new_test_runs_and_a_night_is_another_matter(course: Path) -> None:
    run(course, "--changed")
    with (course / "tests/test_one.py").open("a") as file:
        file.write("def test_new(): pass\n")
    assert run(course, "--changed")[0] == ONE | SKIPPED | {"test_one.py::test_new"}
    night = {"test_two.py::test_at_night"}
    assert run(course, "--nightly")[0] == ONE | TWO | SKIPPED | night | {"test_one.py::test_new"}
    assert run(course, "--changed")[0] == SKIPPED


def test_a_file_that_changes_while_its_tests_run_has_not_passed(course: Path) -> None:
    path = course / "scripts/manyhands/second.py"
    line = f"\ndef test_edit():\n    open({str(path)!r}, 'a').write('# edited\\n')\n"
    with (course / "tests/test_two.py").open("a") as file:
        file.write(line)
    run(course, "--changed")
    assert TWO <= run(course, "--changed")[0]


def test_workers_run_the_same_and_nothing_is_lost(course: Path) -> None:
    ran, said = run(course, "--changed", "-n", "2", "--dist", "loadgroup")
    assert ran == ONE | TWO | SKIPPED and "tests: 4 ran, of 2 units" in said
    ran, said = run(course, "--changed", "-n", "2", "--dist", "loadgroup")
    assert ran == SKIPPED and "4 taken as passed" in said


GROUPED = """
    import os
    import pytest

    @pytest.mark.parametrize("number", range(6))
    @pytest.mark.xdist_group("slurm")
    def test_it(number):
        print(f"worker {os.environ['PYTEST_XDIST_WORKER']}")
"""


def test_what_waits_has_one_worker(course: Path) -> None:
    """The order that a worker runs in is the one that the first process knows."""
    write(course, {"tests/test_zero.py": GROUPED})
    said = run(course, "-n", "2", "--dist", "loadgroup", "-rA")[1]
    workers = re.findall(r"^worker (\w+)$", said, re.MULTILINE)
    assert len(workers) == 6 and len({*workers}) == 1


def test_a_cache_that_cannot_be_written_is_said_and_all_run(course: Path) -> None:
    (course.parent / "cache").write_text("a file")
    ran, said = run(course, "--changed")
    assert ran == ONE | TWO | SKIPPED and "cannot be kept" in said and "XDG_CACHE_HOME" in said


# ---- the order --------------------------------------------------------------------------------


def test_what_waits_comes_first_then_the_longest() -> None:
    seconds = {"a.py::1": 20.0, "a.py::2": 20.0, "b.py::1": 25.0, "c.py::s": 1.0}
    tests = [*(name for name in seconds if name != "c.py::s"), "c.py::s@slurm", "a.py::3"]
    place = selection.chunks(sorted(tests), seconds)
    order = sorted(tests, key=place.get)
    assert order == ["c.py::s@slurm", "b.py::1", "a.py::2", "a.py::3", "a.py::1"]
    assert place["a.py::2"] == place["a.py::3"] != place["a.py::1"]


def test_the_database_keeps_the_newest_and_forgets(tmp_path: Path) -> None:
    base = passed.Passed(tmp_path / "x.sqlite")
    base.add([("k", "t", 1.0), ("k", "u", 2.0)])
    base.add([("l", "t", 3.0)])
    base.drop([("k", "u")])
    assert set(base.tests("k")) == {"t"} and base.seconds()["t"] == 3.0
    assert base.collected("k") is None
