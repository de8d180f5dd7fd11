"""Run a lesson's solution from top to bottom here, and leave a page to read and a verdict.

    bash sbatch/solution.sbatch 06_ddp      the same with sbatch, on a compute node

    runs/solutions/06_ddp.html     the notebook with all that it printed and drew
                   06_ddp.json     pass or fail, the time, and the cell that failed with its error

The notebook in solutions/ is only read. A job that one of its cells starts runs on this machine
too: a job that waited for another job in the queue might wait for ever.
"""

import re
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import nbformat
from nbclient.exceptions import CellControlSignal, DeadKernelError
from nbformat import NotebookNode
from tyro.conf import Positional

from manyhands.building.notebook import kernel_environment, run_cells
from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import command_line, end_with_caller, first_line
from manyhands.training.storage import replace_file, write_json

ROOT = Path(__file__).resolve().parents[1]
COLOUR = re.compile(r"\x1b\[[\d;]*m")


@dataclass(frozen=True)
class Config:
    """Run one solution; exit 1 if a cell fails."""

    lesson: Positional[str]
    """The name of its notebook in solutions/, such as 06_ddp."""
    out: str = ""
    """Path of the page and the verdict, without an ending; empty takes runs/solutions/LESSON."""
    timeout_s: int = 300
    """The longest that one cell may run, in seconds."""


def run(notebook: NotebookNode, cwd: Path, timeout_s: int) -> dict:
    """Run `notebook` from top to bottom; returns the verdict, the time and what failed."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
            cell.execution_count = None
    start_s = time.monotonic()
    found = {"verdict": "pass"}
    begun = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            environment = kernel_environment(ROOT, folder)
            run_cells(notebook, cwd, environment, timeout_s, lambda cell, **_: begun.append(cell))
        except (CellControlSignal, DeadKernelError, RuntimeError) as error:
            last = begun[-1] if begun else NotebookNode(id=None, outputs=[])
            words = in_one_line(last, error, timeout_s)
            found = {"verdict": "fail", "cell": last.id, "error": words}
    return {**found, "spent_s": round(time.monotonic() - start_s, 1)}


def in_one_line(cell: NotebookNode, error: Exception, timeout_s: int) -> str:
    """What went wrong in `cell`: the error that it shows, or the one that ended the notebook."""
    if isinstance(error, TimeoutError):
        return f"still running after {timeout_s} s"
    for output in cell.outputs:
        if output.output_type == "error":
            words = COLOUR.sub("", output.evalue).strip().split("\n")[0]
            return f"{output.ename}: {words}" if words else output.ename
    return first_line(error)


def page(notebook: NotebookNode, name: str, cwd: Path) -> bytes:
    """The notebook as one HTML file with its pictures; formulas are drawn where MathJax loads."""
    from nbconvert import HTMLExporter

    for cell in notebook.cells:  # nbconvert puts in only pictures that lie below its path
        if cell.cell_type == "markdown":
            cell.source = cell.source.replace("](../", "](")
    resources = {"metadata": {"name": name, "path": str(cwd.parent)}}
    return HTMLExporter(embed_images=True).from_notebook_node(notebook, resources)[0].encode()


def main(config: Config) -> None:
    """Run one solution, write its page and its verdict, and say it in a line."""
    end_with_caller()
    source = ROOT / "solutions" / f"{config.lesson}.ipynb"
    if not source.is_file():
        names = ", ".join(sorted(path.stem for path in source.parent.glob("*.ipynb"))) or "none"
        raise BadInput(f"there is no solutions/{source.name}; there is: {names}")
    out = Path(config.out or f"runs/solutions/{config.lesson}")
    out.parent.mkdir(parents=True, exist_ok=True)
    verdict_file = Path(f"{out}.json")
    page_file = Path(f"{out}.html")
    verdict_file.unlink(missing_ok=True)  # of an earlier run: it must not count for one cut short
    notebook = nbformat.read(source, as_version=4)
    result = {"lesson": config.lesson, **run(notebook, source.parent, config.timeout_s)}
    result |= {"host": socket.gethostname(), "python": sys.version.split()[0]}
    result |= {"torch": version("torch"), "time_s": time.time()}
    replace_file(page_file, page(notebook, config.lesson, source.parent))
    write_json(verdict_file, result)
    where = f": cell {result['cell']}: {result['error']}" if "error" in result else ""
    print(f"{result['verdict']}: {config.lesson}, {result['spent_s']:.0f} s, {page_file}{where}")
    raise SystemExit(int(result["verdict"] == "fail"))


if __name__ == "__main__":
    command_line(main, Config)
