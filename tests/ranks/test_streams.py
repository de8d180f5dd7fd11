"""Who reads what a process prints may go away, or never have been there."""

import json
import subprocess
from pathlib import Path

import pytest

from commands import ROOT, environment, flags, write_text


def shell(line: str, cwd: Path) -> subprocess.CompletedProcess:
    words = ["bash", "-o", "pipefail", "-c", line]
    return subprocess.run(
        words, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.parametrize(("closed", "told"), [("2>&-", True), (">&- 2>&- <&-", False)])
def test_a_script_runs_with_closed_descriptors(closed, told, tmp_path):
    plan = f"$PYTHON {ROOT}/scripts/plan.py --model llama-13b --gpus 8 --batch-sequences 64"
    done = shell(f"exec {plan} {closed}", tmp_path)
    assert done.returncode == 0 and ("plan" in done.stdout) == told and not done.stderr
    refused = shell(f"exec {plan} --tp 3 {closed}", tmp_path)
    assert refused.returncode == 2


def test_a_training_goes_on_when_its_reader_has_seen_enough(tmp_path):
    words = flags(write_text(tmp_path), out="run", steps=12)
    line = f"$PYTHON {ROOT}/scripts/train_single.py {' '.join(words)} 2>&1 | head -n 1"
    done = shell(line, tmp_path)
    assert (done.returncode, done.stdout.count("\n")) == (0, 1), done.stderr
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "finished"
    assert "test loss" in (tmp_path / "run" / "logs" / "rank-00000.log").read_text()
