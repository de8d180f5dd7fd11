"""What the tests of scripts and jobs share: a clone to run in, flags, a tidy environment."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
OURS = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "SLURM_", "PYTHONPATH")
OURS += ("NODES", "HEAD_NODE", "GLOO_", "OMP_", "MANYHANDS_")


def make_clone(folder: Path) -> Path:
    """Copy the scripts and jobs to where a test may write to mine/, with a short text to learn."""
    unwanted = shutil.ignore_patterns("site.env", "*.egg-info")
    for name in ("scripts", "sbatch"):
        shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
    return write_text(folder)


def write_text(folder: Path) -> Path:
    """Write a short text to learn into folder/text."""
    (folder / "text").mkdir()
    draw = random.Random(3)
    words = " ".join("".join(draw.choices("abcdefgh", k=4)) for _ in range(380))
    # The end is unlike the rest, so that the ranks' means over the validation text differ.
    (folder / "text" / "words.txt").write_text(words[:1882] + "z" * 18)
    return folder


def settings(clone: Path, **changes: object) -> dict[str, object]:
    """The settings of a run of a second; it crosses the end of an epoch (17 steps)."""
    short = {"data": str(clone / "text"), "layers": 1, "block": 16, "batch": 6, "steps": 20}
    return short | {"device": "cpu", "learning_rate": 0.01} | changes


def flags(clone: Path, **changes: object) -> list[str]:
    """The same settings as words of a command; True is a flag without a value."""
    words = []
    for name, value in settings(clone, **changes).items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def environment(**changes: str) -> dict[str, str]:
    """This environment without what a job would set, and with `changes`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return kept | {"PYTHON": sys.executable, "RANKS": "2", "OMP_NUM_THREADS": "1"} | changes


def run(command: list[object], cwd: Path, timeout_s: float = 300, **kwargs) -> tuple[int, str, str]:
    """Run a command in `cwd`; returns its exit code, standard output and standard error."""
    kwargs.setdefault("env", environment())
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, timeout=timeout_s, capture_output=True, text=True, check=False, **kwargs
    )
    return done.returncode, done.stdout, done.stderr


def losses(folder: Path) -> list[float]:
    """The losses of a run, step by step."""
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").open()]


def contents(folder: Path) -> dict[str, bytes]:
    """Everything below `folder` but compiled code; a folder in it counts as empty."""
    found = sorted(one for one in folder.rglob("*") if "__pycache__" not in one.parts)
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in found}


def left_behind(folder: Path) -> list[str]:
    """Processes that have `folder` in their command line."""
    found = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [" ".join(words) for words in found if any(str(folder) in word for word in words)]
