"""The notebook builder, on a small lesson about a package of its own."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import nbformat
import pytest
import yaml
from nbclient import NotebookClient
from nbformat import NotebookNode

from build_notebooks import Config, build, main
from manyhands.building.source import read_lesson
from manyhands.ranks.failures import BadInput

pytestmark = pytest.mark.fast

LIBRARY = '''\
"""A module that a lesson draws from."""
import functools
import math

SCALE = 2


@functools.cache
def double(x: float, scale: float = SCALE) -> float:
    """Return `x` times `scale`."""
    # the secret: multiply
    return scale * math.floor(x)


class Counter:
    """Counts."""

    def __init__(self) -> None:
        self.num_calls = 0

    def add(self, n: int) -> int:
        """Add `n` and return the sum.

        Negative `n` counts down.
        """

        self.num_calls += n
        return self.num_calls
        # also secret

    def reset(self) -> None:
        self.num_calls = 0


def bare(x):
    return x


def hollow(x):
    """Nothing to do."""
'''
CHECK = '''\
import os


def check(number, function, *args):
    """The verdict on one call, as manyhands.checks gives it."""
    try:
        got = function(*args)
    except NotImplementedError:
        if "NBGRADER_EXECUTION" in os.environ:
            raise
        print(f"TODO {number} not started")
        return
    assert got == 4, f"TODO {number} not yet: {got}"
    print(f"TODO {number} done")
'''
HEADER = """\
# ---
# manyhands:
#   title: Sums
#   goal: "add: quickly"
# ---

"""
SOURCE = f"""\
{HEADER}
# %% [markdown]
# # Sums
# ![two numbers and their sum](figures/sum.svg)

# %%
import functools
import math

from tiny.check import check

# %% show="true"
from tiny.library import SCALE

# %% exercise="double" todo="6.1" minutes=5 difficulty=1
from tiny.library import double

# %% check="6.1"
check("6.1", double, 2)

# %% [markdown]
# ## 2. Counting (optional)

# %% exercise="Counter.add" todo="6.2" minutes=15 difficulty=2 points=3
from tiny.library import Counter

# %% check="6.2" tags=["nbval-check-output"]
check("6.2", Counter().add, 4)

# %% [markdown] answer="true"
# Addition is easy.

# %% answer="true"
assert double(3) == 6
"""


README = "a\n<!-- course map -->\n<!-- /course map -->\nb\n"
TEACHING = "a\n<!-- paths -->\n<!-- /paths -->\nb\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A course of one lesson, 06_sums, not built yet."""
    for folder in ("solutions", "notebooks/figures", "scripts/tiny"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "notebooks/figures/sum.svg").write_text("<svg/>")
    (tmp_path / "scripts/tiny/library.py").write_text(LIBRARY)
    (tmp_path / "scripts/tiny/check.py").write_text(CHECK)
    (tmp_path / "README.md").write_text(README)
    (tmp_path / "TEACHING.md").write_text(TEACHING)
    (tmp_path / "solutions/06_sums.py").write_text(SOURCE)
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    """Replace text that must be there."""
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def versions(root: Path) -> tuple[NotebookNode, NotebookNode]:
    """The TODO notebook and the solution, not executed."""
    lesson = read_lesson(root / "solutions/06_sums.py", root)
    return build(lesson, is_todo=True), build(lesson, is_todo=False)


def cell(notebook: NotebookNode, start: str) -> NotebookNode:
    """The one cell whose source starts with `start`."""
    (found,) = [one for one in notebook.cells if one.source.startswith(start)]
    return found


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_an_exercise_loses_its_body_and_nothing_else(root: Path) -> None:
    todo, solution = versions(root)
    assert cell(todo, "# TODO 6.1").source == dedent('''\
        # TODO 6.1 - 5 minutes - difficulty 1 of 3
        @functools.cache
        def double(x: float, scale: float = SCALE) -> float:
            """Return `x` times `scale`."""
            # TODO 6.1: your code here
            raise NotImplementedError("TODO 6.1")''')
    counter = cell(todo, "# TODO 6.2").source
    assert counter.endswith(
        '        """\n        # TODO 6.2: your code here\n'
        '        raise NotImplementedError("TODO 6.2")\n\n'
        "    def reset(self) -> None:\n        self.num_calls = 0"
    )
    assert "self.num_calls = 0" in counter and "Negative `n` counts down" in counter
    assert "secret: multiply" in cell(solution, "# TODO 6.1").source
    assert "self.num_calls += n" in cell(solution, "# TODO 6.2").source
    assert cell(todo, "SCALE").source == cell(solution, "SCALE").source == "SCALE = 2"


def test_answers_stand_in_the_solution_only(root: Path) -> None:
    todo, solution = (nbformat.writes(notebook) for notebook in versions(root))
    for secret in ("secret", "Addition is easy", "double(3)", "num_calls += n"):
        assert secret in solution and secret not in todo


def test_cells_keep_their_ids_and_only_the_metadata_they_need(root: Path) -> None:
    todo, solution = versions(root)
    assert {one.id for one in todo.cells} < {one.id for one in solution.cells}
    assert todo.cells[0].id == "06_sums-000"
    assert set(todo.metadata) == {"kernelspec", "language_info"}
    assert {key for one in solution.cells for key in one.metadata} == {"tags", "nbgrader"}
    marks = [one.metadata.nbgrader for one in todo.cells if "nbgrader" in one.metadata]
    assert [(one.grade_id, one.grade, one.solution, one.locked) for one in marks] == [
        ("todo-6-1", False, True, False),
        ("check-6-1", True, False, True),
        ("todo-6-2", False, True, False),
        ("check-6-2", True, False, True),
    ]
    assert [one.points for one in marks if one.grade] == [1, 3]


def test_a_docstring_is_run_anew_where_an_output_names_a_line(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(
        root / "solutions/06_sums.py", "assert double(3) == 6", 'print("rank 1, line 4 of Counter")'
    )
    main(Config(root=root))
    edit(root / "scripts/tiny/library.py", "counts down.", "counts\n        down.")
    capsys.readouterr()
    main(Config(root=root))
    assert "running: solutions/06_sums.py" in capsys.readouterr().out


def test_figures_are_linked_from_both_folders(root: Path) -> None:
    todo, solution = versions(root)
    assert "](figures/sum.svg)" in todo.cells[0].source
    assert "](../notebooks/figures/sum.svg)" in solution.cells[0].source


def test_build_check_and_rebuild(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The life of a lesson: stale, built, unchanged, reworded, changed, damaged."""
    before = snapshot(root)
    with pytest.raises(SystemExit) as stopped:
        main(Config(check=True, root=root))
    assert stopped.value.code == 1 and snapshot(root) == before
    out = capsys.readouterr().out
    for name in ("notebooks/06_sums.ipynb", "solutions/06_sums.ipynb", "README.md", "TEACHING.md"):
        assert f"out of date: {name}" in out

    main(Config(root=root))
    assert "running: solutions/06_sums.py" in capsys.readouterr().out
    solution = nbformat.read(root / "solutions/06_sums.ipynb", as_version=4)
    assert cell(solution, 'check("6.2"').outputs[0].text == "TODO 6.2 done\n"
    assert set(solution.metadata) == {"kernelspec", "language_info"}
    assert "| [06 Sums](notebooks/06_sums.ipynb) | 5 | + 15 | add: quickly |" in (
        (root / "README.md").read_text()
    )

    built = snapshot(root)
    main(Config(root=root))
    main(Config(check=True, root=root))
    assert snapshot(root) == built and capsys.readouterr().out == ""

    edit(root / "solutions/06_sums.py", "Addition is easy", "Addition is simple")
    main(Config(root=root))
    out = capsys.readouterr().out  # new words need no run, and the TODO version has not changed
    assert out == "wrote: solutions/06_sums.ipynb\n"
    main(Config(check=True, root=root))

    edit(root / "scripts/tiny/library.py", "counts down.", "counts\n        down.")
    main(Config(root=root))
    out = capsys.readouterr().out  # nor does a docstring, which stands in both
    assert out == "wrote: notebooks/06_sums.ipynb\nwrote: solutions/06_sums.ipynb\n"

    edit(root / "scripts/tiny/library.py", "return scale * math.floor(x)", "return x * scale")
    main(Config(root=root))
    out = capsys.readouterr().out
    assert "running" in out and "notebooks/06_sums.ipynb" not in out

    for name, old, new in (
        ("notebooks/06_sums.ipynb", "# Sums", "# Sumps"),
        ("solutions/06_sums.ipynb", '"execution_count": 1', '"execution_count": null'),
        ("README.md", "add: quickly", "add: slowly"),
    ):
        whole = (root / name).read_text()
        edit(root / name, old, new)
        with pytest.raises(SystemExit):
            main(Config(check=True, root=root))
        assert capsys.readouterr().out == f"out of date: {name}\nrun: make notebooks\n"
        (root / name).write_text(whole)


PATH = {"name": "A morning", "minutes": 6, "lessons": ["06"], "goal": "Add"}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "| A morning | 0.1 | 06 (5) | Add |"),
        ({"lessons": ["06 to 1"]}, "| A morning | 0.1 | 06 to section 1 (5) | Add |"),
        ({"lessons": ["06", "06"]}, "the path 'A morning' takes 10 minutes of 6"),
        ({"lessons": ["07"]}, "names lesson 07, which is not there"),
        ({"lessons": ["06 to 2"]}, "06 has no core section 2"),
    ],
)
def test_a_path_is_counted_from_the_cores(root: Path, change: dict, expected: str) -> None:
    """An optional section belongs to no path, and hours that do not suffice are an error."""
    edit(root / "solutions/06_sums.py", "# # Sums", "# # Sums\n# ## 1. Adding")
    header = yaml.safe_dump({"manyhands": {"title": "T", "goal": "G", "paths": [PATH | change]}})
    lines = [f"# {line}" for line in ["---", *header.splitlines(), "---"]]
    (root / "solutions/start.py").write_text("\n".join(lines) + "\n\n# %% [markdown]\n# # T\n")
    if expected.startswith("|"):
        main(Config(root=root))
        assert expected in (root / "TEACHING.md").read_text()
    else:
        with pytest.raises(BadInput, match=expected):
            main(Config(root=root))


def test_a_notebook_without_a_source_is_named(root: Path) -> None:
    (root / "solutions/06_sums.py").unlink()
    (root / "notebooks/07_gone.ipynb").write_text("{}")
    with pytest.raises(BadInput, match="makes notebooks/07_gone.ipynb: remove it"):
        main(Config(root=root))


def test_only_builds_one_lesson(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "solutions/07_next.py").write_text(HEADER + "# %% [markdown]\n# Next\n")
    main(Config(only="next", root=root))
    out = capsys.readouterr().out
    assert "solutions/07_next.ipynb" in out and "06_sums.ipynb" not in out
    with pytest.raises(BadInput, match="no solutions/99_lost.py; there is: 06_sums, 07_next"):
        main(Config(only="99_lost", root=root))


FAULTY = {
    "header": ("#   title: Sums\n", "", "the header lacks title"),
    "header's words": ("title: Sums\n", "title: Sums\n#   gaol: x\n", "in the header: gaol"),
    "heading": ('check="6.1"', 'chek="6.1"', "unknown in the heading: chek"),
    "number": ('todo="6.2"', 'todo="7.2"', 'todo="7.2" must be "6.N"'),
    "twice": ('todo="6.2"', 'todo="6.1"', "not used before"),
    "difficulty": ("difficulty=1", "difficulty=4", "TODO 6.1 needs minutes=N and difficulty"),
    "no check": ('# %% check="6.1"', "# %%", "each exercise has one check"),
    "two imports": ("import double\n", "import double\nimport os\n", "this cell holds one"),
    "no module": ("from tiny.library import double", "from tiny.no import double", "no module"),
    "no name": ("library import SCALE", "library import SCALES", "defines no SCALES"),
    "not imported": ('exercise="double"', 'exercise="triple"', "does not import it"),
    "class": ('exercise="Counter.add"', 'exercise="Counter"', "as Counter.method"),
    "no method": ("Counter.add", "Counter.sub", "Counter.sub stands 0 times"),
    "no docstring": ('"double" todo', '"bare" todo', "bare needs a docstring"),
    "no body": ('"double" todo', '"hollow" todo', "hollow needs a docstring"),
    "missing import": ("import math\n", "", "no cell above defines math"),
    "missing default": ('# %% show="true"', "# %%", "no cell above defines SCALE"),
    "no alt text": ("two numbers and their sum", " ", "no text that says what it shows"),
    "no picture": ("figures/sum.svg", "figures/som.svg", "no picture notebooks/figures/som.svg"),
    "html picture": ("![two numbers", "<img> ![two", "write a picture as"),
}


EXERCISE = 'exercise="double"'
# Of a fault whose new text does not stand in the cell that is named: what does.
BESIDE = {"no check": EXERCISE, "missing import": EXERCISE, "missing default": EXERCISE}
BESIDE["header's words"] = "# ---"
BESIDE["no alt text"] = "figures/sum.svg"
BESIDE |= {"twice": 'exercise="Counter.add"'}


def line_of(name: str, text: str) -> int:
    """The line at which the faulty cell of a source begins; 1 for a fault of the header."""
    above = text[: text.index(BESIDE.get(name, FAULTY[name][1])) + 1].splitlines()
    heads = [number for number, line in enumerate(above, 1) if line.startswith("#")]
    return max((one for one in heads if text.splitlines()[one - 1].startswith("# %%")), default=1)


def test_a_header_that_is_no_yaml_is_refused_at_its_line(root: Path) -> None:
    edit(root / "solutions/06_sums.py", "title: Sums", "title: Sums: all")
    with pytest.raises(BadInput, match=r"^solutions/06_sums\.py:3: the header is no YAML: [^\n]+$"):
        main(Config(root=root))


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_source_is_refused_in_one_line(root: Path, name: str) -> None:
    old, new, message = FAULTY[name]
    source = root / "solutions/06_sums.py"
    edit(source, old, new)
    if name in ("no docstring", "no body"):
        edit(source, "import double", f"import {new.split(chr(34))[1]}")
    if name == "missing default":
        edit(source, "from tiny.library import SCALE", "")
    before = snapshot(root)
    with pytest.raises(BadInput, match=re.escape(message)) as refused:
        main(Config(root=root))
    said = str(refused.value)
    assert (
        re.match(rf"solutions/06_sums\.py:{line_of(name, source.read_text())}: ", said)
        and "\n" not in said
    ), said
    assert snapshot(root) == before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("raise KeyError('lost')", "a cell failed"),
        ("print('/' + 'home/someone/data')", "a path of this machine"),
        ("import os; print(os.getcwd())", "path of this"),
        ("print('x' * 2_000_000)", "print less"),
    ],
)
def test_a_solution_with_a_bad_output_is_not_written(root: Path, line: str, message: str) -> None:
    (root / "solutions/06_sums.py").write_text(f"{HEADER}# %%\n{line}\n")
    with pytest.raises(BadInput, match=message):
        main(Config(root=root))
    assert not (root / "solutions/06_sums.ipynb").exists()
    assert not list(root.rglob("*.partial"))


def test_a_stored_solution_holds_no_control_that_needs_a_kernel(root: Path) -> None:
    line = "import ipywidgets; display(ipywidgets.IntSlider(description='knob'))"
    (root / "solutions/06_sums.py").write_text(f"{HEADER}# %%\n{line}\n")
    main(Config(root=root))
    solution = nbformat.read(root / "solutions/06_sums.ipynb", as_version=4)
    (output,) = solution.cells[-1].outputs
    assert list(output.data) == ["text/plain"]


def test_the_todo_notebook_runs_and_says_not_started(root: Path) -> None:
    todo, _ = versions(root)
    environment = {"PYTHONPATH": str(root / "scripts")}
    NotebookClient(todo, timeout=60).execute(env=environment)
    for number in ("6.1", "6.2"):
        assert cell(todo, f'check("{number}"').outputs[0].text == f"TODO {number} not started\n"


def nbgrader(course: Path, *arguments: str) -> str:
    """Run one nbgrader command in `course`, with the tiny package importable; returns its log."""
    environment = os.environ | {
        "PYTHONPATH": str(course.parent / "scripts"),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),  # alembic
        "HOME": str(course),  # no configuration of the person who runs the tests
    }
    done = subprocess.run(
        [sys.executable, "-m", "nbgrader", *arguments],
        cwd=course,
        env=environment,
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, f"nbgrader {' '.join(arguments)}:\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def hand_in(course: Path, student: str, answers: dict[str, str]) -> None:
    """Write a submission: the released notebook with some bodies filled in and checks tampered."""
    notebook = nbformat.read(course / "release/sums/06_sums.ipynb", as_version=4)
    for one in notebook.cells:
        for number, answer in answers.items():
            one.source = one.source.replace(f'raise NotImplementedError("TODO {number}")', answer)
        if one.source.startswith('check("6.2"'):
            one.source = "print('TODO 6.2 done')"
    path = course / "submitted" / student / "sums/06_sums.ipynb"
    path.parent.mkdir(parents=True)
    nbformat.write(notebook, path)


def test_nbgrader_releases_and_marks_the_todo_notebook(root: Path) -> None:
    """As TEACHING.md tells instructors; a tampered check is put back before marking."""
    course = root / "course"
    course.mkdir()
    todo, _ = versions(root)
    before = snapshot(root)
    main(Config(root=root, release=str(course / "source/sums")))
    assert {path: content for path, content in snapshot(root).items() if path in before} == before
    nbgrader(course, "generate_assignment", "sums", "--ClearSolutions.enabled=False")
    released = nbformat.read(course / "release/sums/06_sums.ipynb", as_version=4)
    assert [one.source for one in released.cells] == [one.source for one in todo.cells]
    inside = {path.name for path in (course / "release/sums").rglob("*") if path.is_file()}
    assert inside == {"06_sums.ipynb", "sum.svg"}, "its picture goes with it"

    right = {"6.1": "return x * scale", "6.2": "self.num_calls += n\n        return self.num_calls"}
    hand_in(course, "ada", right)
    hand_in(course, "bob", {"6.1": "return x * scale"})
    nbgrader(course, "autograde", "sums")
    nbgrader(course, "export")
    with (course / "grades.csv").open(newline="") as table:
        rows = {row["student_id"]: row for row in csv.DictReader(table)}
    assert {name: float(row["score"]) for name, row in rows.items()} == {"ada": 4, "bob": 1}
    assert float(rows["ada"]["max_score"]) == 4
