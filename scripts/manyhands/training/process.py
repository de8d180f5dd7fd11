"""Does the process that wrote a run's status still live? Whoever is killed cannot say so.

    status.json "process": host, pid, start  --on the same machine--> is that process there?
    config.json "job": Slurm's number        --on any other-------->  does Slurm still run it?

Price: a look at /proc, or one question to Slurm's controller.
"""

import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress

import psutil

from manyhands.instruments.meters import ask_slurm, slurm_record

SAME_START_S = 60.0  # clocks are adjusted; a process ID comes again later than that
AT_WORK = ("CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "COMPLETING")


def this_process() -> dict:
    """Where this process is found again: {"host", "pid", "pids", "start_s"}."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pids": _pid_namespace(),
        "start_s": psutil.Process().create_time(),
    }


def why_gone(process: Mapping, job: Mapping) -> str | None:
    """Why nothing of a run is running any more; "" when it is, None when that cannot be seen here.

    Args:
        process: what `this_process` said in the run's rank 0.
        job: what `meters.job` said there.
    """
    here = (socket.gethostname(), _pid_namespace())
    if (process.get("host"), process.get("pids")) == here:
        return "" if _is_there(process) else f"its process {process['pid']} is gone"
    if job.get("scheduler") != "slurm":
        return None
    found = re.match(r"\w+", slurm_record(job["id"]).get("JobState", ""))
    if found:
        return "" if found[0] in AT_WORK else f"Slurm job {job['id']} is {found[0].lower()}"
    answers = "is UP" in ask_slurm("scontrol", "ping")
    return f"Slurm no longer knows job {job['id']}" if answers else None


def _is_there(process: Mapping) -> bool:
    with suppress(psutil.Error):
        found = psutil.Process(process["pid"])
        is_same = abs(found.create_time() - process["start_s"]) < SAME_START_S
        return is_same and found.status() != psutil.STATUS_ZOMBIE
    return False


def _pid_namespace() -> str:
    """In which world of process IDs this is: two containers can have one host's name."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""
