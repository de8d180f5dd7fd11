"""A notebook's kernel, forked from the tests' warm fork server, with a fork server of its own.

    worker of pytest -> its fork server --fork--> kernel <--socket-- the kernel's fork server
                                             `-----------fork-----------'

A kernel imports torch and more, and so does the server that starts its ranks: seconds for each
notebook, which say nothing about it. Nightly runs, and nbval at any time, start kernels as Jupyter
does, so that a notebook which lacks an import is found.
"""

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn
from unittest import mock

import psutil
from jupyter_client.provisioning import local_provisioner

from manyhands.ranks import forkserver, lab, private

SCRIPTS = str(Path(__file__).resolve().parents[1] / "scripts")
LIMIT_S = 3600.0
ENDED_S = 120.0  # after it was told to end, on a busy machine


@contextmanager
def warm() -> Iterator[None]:
    """Have Jupyter's client start its kernels in this way."""
    with mock.patch.object(local_provisioner, "launch_kernel", Kernel):
        yield


class Kernel:
    """What Jupyter's client sees of the kernel's process; as a Popen, which it would be."""

    stdin = stdout = stderr = None

    def __init__(self, words: list[str], env: dict[str, str], cwd: str, **_: object) -> None:
        server = forkserver.running()
        server.wait_ready(lambda: None)
        self.room = server.make_room()
        self.forked = forkserver.Forked(server)
        self.forked.wait_started(lambda: None)
        self.pid = self.forked.pid
        flags = words[words.index("ipykernel_launcher") + 1 :]
        call = lab._pickle(become_kernel, (flags, env, cwd, self.room), {})
        around = forkserver.surroundings("kernel")
        libraries = [path for path in around["sys_path"] if "/lib/python" in path]
        around["sys_path"] = ["", SCRIPTS, *libraries]  # and not the tests
        task = dict(os.environ), around, call, LIMIT_S, False
        self.forked.control.send(task)

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        self.forked.wait_ended(0)
        return self.forked.exit_code

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        if not self.forked.wait_ended(ENDED_S):
            raise TimeoutError(f"the kernel, process {self.pid}, has not ended in {ENDED_S:g} s")
        self.forked.close()
        private.clear(self.room)
        return self.forked.exit_code


# ---- in the forked process -----------------------------------------------------------------------


def become_kernel(flags: list[str], environ: dict, folder: str, room: Path) -> NoReturn:
    """What `python -m ipykernel_launcher` does, from where torch has been imported."""
    import numpy as np
    import torch

    server = fork_server(room)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    sys.argv = ["ipykernel_launcher"]
    forkserver._server = server
    torch.set_num_threads(os.cpu_count())
    torch.seed()  # the server's numbers go on alike in all that it forks
    np.random.seed()
    from ipykernel.kernelapp import IPKernelApp

    try:
        IPKernelApp.launch_instance(argv=flags)
    finally:
        os._exit(0)  # the lab's rank would wait for the word to leave


def fork_server(room: Path) -> forkserver.Server:
    """Fork a server that starts this process's ranks, while this process has no thread to lose."""
    ours, its = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        os.setsid()
        serving = forkserver._Serving(its, room)
        while True:
            serving.turn()
    its.close()
    server = forkserver.Server.__new__(forkserver.Server)
    server.room = room
    server.process = Child(pid)
    server.socket = ours
    server.wanted = forkserver.wanted_modules()
    server.owner = os.getpid()
    server.is_ready = False
    return server


class Child(psutil.Process):
    """A forked process, as a Popen."""

    def poll(self) -> int | None:
        """Its exit code, if it has ended: any."""
        ended = not self.is_running() or self.status() == psutil.STATUS_ZOMBIE
        return -signal.SIGKILL if ended else None
