"""The cells of a notebook run in a kernel of their own, with this clone's library."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets.config import Config as TraitConfig


def kernel_environment(root: Path, folder: str) -> dict[str, str]:
    """The environment of a kernel that runs a solution of the course in `root`.

    It finds this clone's library, writes nothing to the person's own progress/ and IPython folder
    but to `folder`, and starts its jobs on this machine.
    """
    search = [str(root.resolve() / "scripts"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, search)),
        "IPYTHONDIR": f"{folder}/ipython",
        "MANYHANDS_PROGRESS": f"{folder}/progress",
        "MANYHANDS_LOCAL": "1",
    }


def run_cells(
    notebook: NotebookNode,
    cwd: Path,
    environment: Mapping[str, str],
    timeout_s: int,
    on_cell: Callable | None = None,
) -> None:
    """Run all cells of `notebook` in a new kernel; its outputs are written into it.

    Args:
        on_cell: is called as on_cell(cell=..., cell_index=...) when a cell begins.

    Raises:
        CellControlSignal: a cell failed, or ran too long.
        DeadKernelError: the kernel ended.
    """
    client = NotebookClient(
        notebook,
        timeout=timeout_s,
        kernel_name="python3",
        resources={"metadata": {"path": str(cwd)}},
        record_timing=False,
        on_cell_execute=on_cell,
        config=TraitConfig({"KernelManager": {"transport_encryption": "auto"}}),
    )
    client.execute(env=environment)
