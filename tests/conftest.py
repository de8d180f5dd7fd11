"""What holds for every test: one thread a process, nothing downloaded, GPU tests only on a GPU.

Tests of jobs take the fixture `slurm`, a real Slurm cluster. Without Slurm they are skipped, or
fail where MANYHANDS_SLURM is "required". MANYHANDS_SLURM_MODE sets the cluster's mode.

`--only pipeline` keeps the tests of one lesson or of another room, `--only fast` those marked
`fast`, which start neither ranks nor jobs. `--nightly` adds the tests marked `nightly`; it sets
MANYHANDS_NIGHTLY, for tests that then try more.
"""

import atexit
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

import selection
from units import lessons

if TYPE_CHECKING:
    from cluster import Cluster


# Else their assertions would not say what they saw.
pytest.register_assert_rewrite("parity", "replicas", "runs", "small_run", "states")

ROOT = Path(__file__).resolve().parents[1]

# The folders whose ranks are held to NCCL's rules, so that what passes on gloo is right on GPUs;
# so are those of every training script.
UNDER_RULES = set("collectives data_parallel ddp fsdp layerwise mesh pipeline tensor".split())
# These measure times, which the notes of a watched rank would change.
NOT_UNDER_RULES = ("test_a_race_takes_at_least", "test_the_bubble_is_that_of_the_formula")


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `make test ONLY=` and `make test NIGHTLY=1` pass on."""
    parser.addoption("--only", default="", help="a folder of tests, as a lesson's word; or fast")
    parser.addoption("--changed", action="store_true", help="take what has passed")
    parser.addoption("--nightly", action="store_true", help="also what is tried at night alone")


def pytest_configure(config: pytest.Config) -> None:
    """Set before torch is imported, and inherited by every process that a test starts."""
    if config.getoption("--nightly"):
        os.environ["MANYHANDS_NIGHTLY"] = "1"
    selection.register(config)
    # Thousands of ranks and hundreds of jobs import the course: compiled once it costs half.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Threads that spin while they wait for each other take the cores from other workers: beside
    # three busy loops a notebook of 40 s takes 165 s with spinning threads, and 50 s without.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if "MANYHANDS_PROGRESS" not in os.environ:  # what tests check is nobody's progress
        os.environ["MANYHANDS_PROGRESS"] = tempfile.mkdtemp(prefix="manyhands-progress-")
        atexit.register(shutil.rmtree, os.environ["MANYHANDS_PROGRESS"], ignore_errors=True)
    # What a test file has imported of these its ranks find loaded, with all that they import.
    scripts = sorted(path.stem for path in (ROOT / "scripts").glob("train_*.py"))
    os.environ.setdefault(
        "MANYHANDS_PRELOAD",
        " ".join([*scripts, "manyhands.training.report_figures", "sklearn.datasets", "s3fs"]),
    )
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts what ends in `&`
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, for many tests wait."""
    return len(psutil.Process().cpu_affinity()) + 1 if sys.platform == "linux" else os.cpu_count()


def belongs(item: pytest.Item, word: str) -> bool:
    """Does the test lie in the folder, or has it the lesson's name or number?"""
    number = lessons().get(word)
    if item.path.parent.name == word or number is None:
        return item.path.parent.name == word
    own = rf"\[{number}\.\d+|{number:02d}_{word}|(?<![a-z]){word}(?![a-z])"
    return re.search(own, item.nodeid.partition("::")[2]) is not None


def keep_only(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `--only` does not ask for."""
    only = config.getoption("--only")
    if not only:
        return
    folders = sorted({path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")})
    if only not in ("fast", *folders):
        raise pytest.UsageError(f"--only {only}: choose fast, or one of {', '.join(folders)}")
    if only == "fast":
        kept = [item for item in items if item.get_closest_marker("fast")]
    else:
        kept = [item for item in items if belongs(item, only)]
    keep(config, items, kept)


def keep(config: pytest.Config, items: list[pytest.Item], kept: list[pytest.Item]) -> None:
    """Deselect all items but `kept`."""
    wanted = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = kept


@pytest.hookimpl(tryfirst=True)  # pytest's workers look at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what is asked for. Skip tests marked `gpu` where torch sees no GPU, and say so.

    What uses the cluster runs in one of pytest's workers (--dist loadgroup), so that there is one.
    """
    for item in items:
        if "slurm" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group("slurm"))
    keep_only(config, items)
    if not config.getoption("--nightly"):
        keep(config, items, [one for one in items if not one.get_closest_marker("nightly")])
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a GPU and torch sees none here"))


@pytest.fixture(autouse=True)
def rules(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold the ranks of some folders' tests to NCCL's rules."""
    path = request.path
    is_held = path.parent.name in UNDER_RULES or path.stem.startswith("test_train_")
    if is_held and not request.node.name.startswith(NOT_UNDER_RULES):
        monkeypatch.setenv("MANYHANDS_RULES", "nccl")


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
    """A Slurm cluster of 3 nodes with 4 GPUs each, for all tests of a session."""
    from cluster import Cluster

    mode = os.environ.get("MANYHANDS_SLURM_MODE", "auto")
    with Cluster("-n", "3", "--mode", mode) as cluster:
        yield cluster
