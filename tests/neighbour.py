"""A student who tries to reach into the work of another one on the same machine.

    with Neighbour("bob") as bob:       a process of bob's, for as long as the block runs
        ...
    bob.reached                         what he has read, signalled or joined of others: nothing

He reads homes, processes and the temporary folder, joins sockets, and asks other students' servers
for their files. Stores and ranks are attacked in tests/stranger.py.
"""

import http.client
import multiprocessing
import os
import pwd
import socket
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

FORK = multiprocessing.get_context("fork")
PAUSE_S = 2.0  # between his rounds; he is a neighbour, not a load


class Neighbour:
    """Tries all the while; `reached` has what he got at, and `tried` how often, by kind."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reached: list[str] = []
        self.tried: dict[str, int] = {}

    def __enter__(self) -> "Neighbour":
        self.control, its = FORK.Pipe()
        self.process = FORK.Process(target=self._live, args=(its,))
        self.process.start()
        its.close()
        return self

    def __exit__(self, *_: object) -> None:
        self.control.send("end")
        self.reached, self.tried = self.control.recv()
        self.process.join(30)
        self.process.kill()

    def _live(self, control: Connection) -> None:
        who = pwd.getpwnam(self.name)
        os.initgroups(self.name, who.pw_gid)
        os.setgid(who.pw_gid)
        os.setuid(who.pw_uid)
        self.uid = who.pw_uid
        found: set[str] = set()
        while not control.poll(PAUSE_S):
            for kind in (self._files, self._processes, self._sockets, self._servers):
                with suppress(OSError, psutil.Error):  # what he looks at goes away
                    found |= set(kind())
        control.send((sorted(found), self.tried))

    def _count(self, kind: str) -> None:
        self.tried[kind] = self.tried.get(kind, 0) + 1

    def _files(self) -> Iterator[str]:
        """Files of other students, in homes and in the temporary folder."""
        for entry in [*os.scandir("/home"), *os.scandir(tempfile.gettempdir())]:
            if not self._is_a_student(entry.stat(follow_symlinks=False).st_uid):
                continue
            self._count("homes and folders")
            with suppress(OSError):
                os.listdir(entry)
                yield f"folder {entry.path}"
            for folder, _, names in os.walk(entry):
                for path in (Path(folder) / name for name in names):
                    with suppress(OSError):
                        path.read_bytes()
                        yield f"file {path}"

    def _processes(self) -> Iterator[str]:
        """Variables and open files of other students' processes, and signals to them."""
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                if not self._is_a_student(process.uids().real):
                    continue
                self._count("processes")
                with suppress(OSError):
                    yield f"variables of {Path(f'/proc/{process.pid}/environ').read_bytes()[:40]}"
                with suppress(OSError):
                    yield f"open files of {os.listdir(f'/proc/{process.pid}/fd')}"
                os.kill(process.pid, 0)
                yield f"a signal to {process.pid}"

    def _sockets(self) -> Iterator[str]:
        """Sockets with a name, in a folder or without one, that a student listens at."""
        for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
            parts = line.split(maxsplit=7)
            if len(parts) < 8 or parts[5] != "01":
                continue
            name = parts[7]
            owner = os.stat(name).st_uid if name.startswith("/") and os.path.exists(name) else None
            if owner is not None and not self._is_a_student(owner):
                continue
            self._count("sockets")
            with suppress(OSError), socket.socket(socket.AF_UNIX) as one:
                one.settimeout(0.2)
                one.connect(name.replace("@", "\0", 1))
                yield f"socket {name}"

    def _servers(self) -> Iterator[str]:
        """Files of other students, as their servers would send them to their browsers."""
        for where in psutil.net_connections("tcp"):
            if where.status != psutil.CONN_LISTEN:
                continue
            for other in (one.pw_name for one in pwd.getpwall() if self._is_a_student(one.pw_uid)):
                self._count("servers")
                with suppress(OSError, http.client.HTTPException):
                    one = http.client.HTTPConnection("127.0.0.1", where.laddr.port, timeout=0.5)
                    one.request("GET", f"/user/{other}/api/contents/manyhands")
                    if one.getresponse().status == 200:
                        yield f"the server of {other}"

    def _is_a_student(self, uid: int) -> bool:
        return uid >= 1000 and uid not in (self.uid, 65534)
