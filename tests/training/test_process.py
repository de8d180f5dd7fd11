"""Whether a run's process still lives, seen from the same machine and from another."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from manyhands.training import process
from manyhands.training.process import this_process, why_gone

SLURM = {"scheduler": "slurm", "id": "77"}
ELSEWHERE = {"host": "node9", "pid": 1, "pids": "pid:[1]", "start_s": 0.0}


def test_this_process_lives_and_an_older_one_with_its_number_does_not():
    here = this_process()
    assert here["host"] == socket.gethostname()
    assert why_gone(here, {}) == ""
    assert why_gone(here | {"start_s": here["start_s"] - 3600}, SLURM).endswith("is gone")


def test_a_process_that_has_ended_is_gone_also_before_its_parent_has_asked():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    start_s = psutil.Process(child.pid).create_time()
    told = this_process() | {"pid": child.pid, "start_s": start_s}
    assert why_gone(told, {}) == ""
    child.kill()
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert why_gone(told, {}) == f"its process {child.pid} is gone"
    child.wait()
    assert why_gone(told, {}) == f"its process {child.pid} is gone"


def test_what_cannot_be_seen_is_not_known():
    assert why_gone(ELSEWHERE, {"scheduler": "none"}) is None
    assert why_gone({}, {}) is None  # a run of before there were these words
    other_container = this_process() | {"pids": "pid:[1]", "pid": 999_999}
    assert why_gone(other_container, {}) is None


@pytest.mark.parametrize(
    ("record", "ping", "told"),
    [
        ("JobId=77 JobState=RUNNING", "is UP", ""),
        ("JobId=77 JobState=COMPLETING", "is UP", ""),
        ("JobId=77 JobState=PENDING", "is UP", "Slurm job 77 is pending"),
        ("JobId=77 JobState=NODE_FAIL", "is UP", "Slurm job 77 is node_fail"),
        ("", "is UP", "Slurm no longer knows job 77"),
        ("", "is DOWN", None),
    ],
)
def test_a_job_of_slurm_is_asked_for(monkeypatch, record, ping, told):
    def answer(*command: str) -> str:
        return ping if command == ("scontrol", "ping") else record

    monkeypatch.setattr(process, "ask_slurm", answer)
    monkeypatch.setattr("manyhands.instruments.meters.ask_slurm", answer)
    assert why_gone(ELSEWHERE, SLURM) == told


def test_no_slurm_to_ask(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert why_gone(ELSEWHERE, SLURM) is None
