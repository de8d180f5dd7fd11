"""The notebooks as readers, a class and CI run them; test_build_notebooks.py: how they are made."""

import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

import build_notebooks
import kernels

ROOT = Path(__file__).resolve().parents[2]
CELL_TIMEOUT_S = 300
NIGHTLY = bool(os.environ.get("MANYHANDS_NIGHTLY"))
pytestmark = pytest.mark.timeout(1200)  # a busy machine takes several times as long


def notebooks(folder: str) -> list[Path]:
    """The notebooks of a folder that have a source: lessons, and the page the course opens at."""
    sources = (ROOT / "solutions").glob("*.py")
    return sorted(ROOT / folder / f"{path.stem}.ipynb" for path in sources)


def environment(**changes: str) -> dict[str, str]:
    """What a kernel needs to import this clone's library, wherever it was installed from."""
    search = [str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
    here = {"MANYHANDS_LOCAL": "1"}  # where there is a Slurm, a test submits no job to it
    return os.environ | here | {"PYTHONPATH": os.pathsep.join(filter(None, search))} | changes


@pytest.fixture(autouse=True)
def mine_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the notebooks note of a learner is not written over somebody's own."""
    monkeypatch.setenv("MANYHANDS_MINE", str(tmp_path / "mine"))
    monkeypatch.setenv("MANYHANDS_PROGRESS", str(tmp_path / "progress"))


def output_text(cell: NotebookNode) -> str:
    """All that a cell shows as plain text."""
    outputs = cell.get("outputs", [])
    return "\n".join(one.get("text", one.get("data", {}).get("text/plain", "")) for one in outputs)


def checks(notebook: NotebookNode) -> dict[str, NotebookNode]:
    """TODO number -> the cell that checks it."""
    marked = ((cell, cell.metadata.get("nbgrader", {})) for cell in notebook.cells)
    return {
        mark["grade_id"].removeprefix("check-").replace("-", "."): cell
        for cell, mark in marked
        if mark.get("grade")
    }


def wrong_verdicts(notebook: NotebookNode) -> list[str]:
    """The checks of a TODO notebook that do not say that their exercise is not started."""
    return [
        f"{cell.id} says {output_text(cell)!r}"
        for number, cell in checks(notebook).items()
        if f"TODO {number} not started" not in output_text(cell)
    ]


def run_twice(notebook: NotebookNode, folder: Path, whole: bool = NIGHTLY) -> list[str]:
    """Run all cells in one kernel, then its checks once more; returns the verdicts that are wrong.

    Args:
        whole: run all cells once more.
    """
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=CELL_TIMEOUT_S, resources=resources)
    again = {cell.id for cell in (notebook.cells if whole else checks(notebook).values())}
    found = []
    with nullcontext() if NIGHTLY else kernels.warm(), client.setup_kernel(env=environment()):
        for turn in ({cell.id for cell in notebook.cells}, again):
            for index, cell in enumerate(notebook.cells):
                if cell.id in turn:
                    client.execute_cell(cell, index)
            found += wrong_verdicts(notebook)
    return found


def nbval(path: Path) -> subprocess.CompletedProcess[str]:
    """Run a notebook with nbval, which compares the cells tagged nbval-check-output.

    Its ranks, and those of its jobs, are held to NCCL's rules: what passes is right on GPUs.
    """
    command = [sys.executable, "-m", "pytest", "-p", "nbval.plugin", "-p", "pytest_timeout"]
    command += ["--nbval-lax", "--nbval-current-env", f"--nbval-cell-timeout={CELL_TIMEOUT_S}"]
    command += ["-p", "no:cacheprovider", str(path)]
    # All other plugins that are installed would take a second to import.
    env = environment(MANYHANDS_RULES="nccl", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    return subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True)


def test_the_committed_notebooks_are_built_from_their_sources() -> None:
    build_notebooks.main(build_notebooks.Config(check=True))


@pytest.mark.parametrize("path", notebooks("solutions"), ids=lambda path: path.stem)
def test_a_solution_runs_and_prints_what_it_printed(path: Path) -> None:
    if not any(cell.cell_type == "code" for cell in nbformat.read(path, as_version=4).cells):
        return  # nbval counts a page of words only as an error
    done = nbval(path)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize("path", notebooks("notebooks"), ids=lambda path: path.stem)
def test_a_todo_notebook_runs_twice_and_nothing_is_started(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert set(checks(notebook)) == set(re.findall(r'Error\("TODO ([\d.]+)"\)', code))
    assert run_twice(notebook, path.parent) == []


@pytest.mark.parametrize("path", notebooks("notebooks"), ids=lambda path: path.stem)
def test_a_todo_notebook_holds_no_output(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None, cell.id


# ---------------------------------------------------------------- these tests find faults


def sample(*sources: str) -> NotebookNode:
    """A notebook of code cells, the last one the check of TODO 6.1."""
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    cells[-1].metadata["nbgrader"] = {"grade": True, "grade_id": "check-6-1"}
    return nbformat.v4.new_notebook(cells=cells)


@pytest.mark.parametrize("whole", [False, True])
def test_a_second_run_that_differs_is_seen(tmp_path: Path, whole: bool) -> None:
    """A check is run twice, and what another cell keeps is seen where all are."""
    keep = "n = globals().get('n', 0) + 1"
    say = "print('TODO 6.1 not started' if n == 1 else 'TODO 6.1 done')"
    sources = (keep, say) if whole else (f"{keep}\n{say}",)
    (found,) = run_twice(sample(*sources), tmp_path, whole)
    assert "TODO 6.1 done" in found


def test_nbval_sees_an_error_and_a_changed_output(tmp_path: Path) -> None:
    path = tmp_path / "sample.ipynb"
    for source, expected in (("print(1)", 0), ("print(2)", 1), ("1 / 0", 1)):
        notebook = sample(source)
        notebook.cells[0].metadata["tags"] = ["nbval-check-output"]
        notebook.cells[0].outputs = [nbformat.v4.new_output("stream", text="1\n")]
        notebook.cells[0].execution_count = 1
        nbformat.write(notebook, path)
        assert nbval(path).returncode == expected, source
