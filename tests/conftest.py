"""What holds for every test: one thread a process, nothing downloaded, GPU tests only on a GPU.

Tests of jobs take the fixture `slurm`, a real Slurm cluster. Without Slurm they are skipped, or
fail where MANYHANDS_SLURM is "required". MANYHANDS_SLURM_MODE sets the cluster's mode.
"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from cluster import Cluster


def pytest_configure() -> None:
    """Set before torch is imported, and inherited by every process that a test starts."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where torch sees no GPU, and say so."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a GPU and torch sees none here"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the lines that tests have recorded as "summary"."""
    for report in terminalreporter.getreports("passed"):
        for name, line in report.user_properties:
            if name == "summary" and report.when == "call":
                terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def slurm_installed() -> None:
    """Skip what needs Slurm where there is none, and say how to get it; or fail."""
    from cluster import missing

    if reason := missing():
        (pytest.fail if os.environ.get("MANYHANDS_SLURM") == "required" else pytest.skip)(reason)


@pytest.fixture(scope="session")
def slurm(slurm_installed: None) -> Iterator["Cluster"]:
    """A Slurm cluster of 3 nodes with 4 GPUs each, for all tests of one of pytest's workers."""
    from cluster import Cluster

    mode = os.environ.get("MANYHANDS_SLURM_MODE", "auto")
    with Cluster("-n", "3", "--mode", mode) as cluster:
        yield cluster
