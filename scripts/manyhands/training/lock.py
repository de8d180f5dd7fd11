"""One writer a folder: a run's folder is locked as long as the process that writes it lives.

    runs/ddp-001/.lock   locked by the kernel, which unlocks it however the process ends; holds who

The lock is POSIX's (fcntl), because children of the process do not inherit it and because it works
over NFS; where a file system has no locks, nothing is checked. A node that has crashed may leave
its lock on a server for a while, so a job that Slurm has queued again goes on in spite of its own.
Source: https://man7.org/linux/man-pages/man2/F_SETLK.2const.html
"""

import errno
import fcntl
import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from manyhands.ranks.failures import BadInput

NAME = ".lock"
_held: dict[Path, BinaryIO] = {}  # to close one of these files is to unlock its folder


def hold(folder: Path) -> None:
    """Make `folder` and lock it until `release` or the end of this process.

    Raises:
        BadInput: another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder.resolve() / NAME
    if path in _held and _is_same_file(_held[path], path):
        return  # a second open and close of the file would unlock it
    file = open(path, "a+b", buffering=0)  # nothing is left to be written when it is closed
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        if problem.errno in (errno.EACCES, errno.EAGAIN):
            owner = _owner(file)
            if not _is_earlier_life(owner):
                file.close()
                who = f"process {owner.get('pid', '?')} on {owner.get('host', 'another node')}"
                raise BadInput(
                    f"--out {folder} is in use by {who}: wait until it has ended, or name a new "
                    "folder"
                ) from None
    if not _is_same_file(file, path):  # who held it has deleted it meanwhile
        file.close()
        hold(folder)
        return
    with suppress(OSError):  # on a full disk the lock holds, too
        file.truncate(0)
        file.write(
            json.dumps({"host": socket.gethostname(), "pid": os.getpid(), **_job()}).encode()
        )
    _held[path] = file


def release(folder: Path) -> None:
    """Let other processes write into `folder`, and leave no file of the lock in it."""
    path = folder.resolve() / NAME
    file = _held.pop(path, None)
    if file is not None:
        if _is_same_file(file, path):
            path.unlink()
        file.close()


def _is_same_file(file: BinaryIO, path: Path) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False  # the folder was deleted


def _owner(file: BinaryIO) -> dict:
    with suppress(OSError, ValueError):
        file.seek(0)
        found = json.loads(file.read())
        return found if isinstance(found, dict) else {}
    return {}


def _job() -> dict[str, str]:
    """Slurm's number of this job, and how often it has queued again."""
    names = {"job": "SLURM_JOB_ID", "restart": "SLURM_RESTART_COUNT"}
    return {key: os.environ[name] for key, name in names.items() if name in os.environ}


def _is_earlier_life(owner: dict) -> bool:
    """Was the owner this same job before Slurm ended it and queued it again?"""
    now = _job()
    same_job = "job" in now and owner.get("job") == now["job"]
    return same_job and owner.get("restart", "0") != now.get("restart", "0")
