"""What holds for every test: one thread a process, nothing downloaded, GPU tests only on a GPU."""

import os

import pytest


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
