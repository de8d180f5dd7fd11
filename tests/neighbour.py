"""A student who tries to reach into the work of another one on the same machine.

    with Neighbour("bob") as bob:       a process of bob's, for as long as the block runs
        ...
    bob.reached                         what he has read, signalled or joined of others: nothing

He reads homes, processes and the temporary folder, where he lays traps and holds a lock, joins
sockets, stores and kernels, and asks other students' servers and the hub for what is theirs, with
his own token too. Ranks are attacked more closely in tests/stranger.py.
"""

import fcntl
import http.client
import multiprocessing
import os
import pickle
import pwd
import re
import socket
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import zmq

from stranger import PLANTED, Harm, keys_of

FORK = multiprocessing.get_context("fork")
PAUSE_S = 2.0  # between his rounds; he is a neighbour, not a load
LISTENS = "0A"  # in /proc/net/tcp
HUB = 8081  # JupyterHub's own port, on loopback
SECRET = re.compile(
    rb"(?i)--[a-z-]*(?:token|secret|password|key)[= ]\S{16,}|\b\w*(?:token|key)=\S{16,}"
)


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
        self.students = {one.pw_uid for one in pwd.getpwall() if one.pw_gid == who.pw_gid}
        self.traps = Path(tempfile.mkdtemp(prefix="traps-"))
        self.traps.chmod(0o777)
        self.ear = zmq.Context().socket(zmq.SUB)
        self.ear.subscribe(b"")
        self.heard: set[int] = set()
        found: set[str] = set()
        lock = self._lay_traps()
        kinds = (self._files, self._processes, self._sockets, self._servers)
        kinds += (self._stores, self._kernels, self._hub)
        while not control.poll(PAUSE_S):
            for kind in kinds:
                with suppress(OSError, psutil.Error):  # what he looks at goes away
                    found |= set(kind())
        found |= {f"{path.name} in a trap" for path in self.traps.iterdir()}
        os.close(lock)
        control.send((sorted(found), self.tried))

    def _count(self, kind: str) -> None:
        self.tried[kind] = self.tried.get(kind, 0) + 1

    def _lay_traps(self) -> int:
        """What he puts into the temporary folder before others come; a lock on it, which he holds.

        Modules that a Python would import which was started there, and under names that can be
        guessed folders and links, which lead what is written there to him.
        """
        self._count("traps")
        temp = Path(tempfile.gettempdir())
        for name in PLANTED:
            code = f"open({str(self.traps / name)!r}, 'a').close()\nraise SystemExit\n"
            (temp / f"{name}.py").write_text(code)
        others = [one.pw_name for one in pwd.getpwall() if self._is_a_student(one.pw_uid)]
        for name in ("manyhands", "manyhands-0", *(f"torchinductor_{one}" for one in others)):
            (temp / name).symlink_to(self.traps)
        for name in ("manyhands.lock", "manyhands.json"):
            (temp / name).symlink_to(self.traps / name)
        lock = os.open(temp, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return lock

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
                    for how in ("rb", "ab"):
                        with suppress(OSError):
                            open(path, how).close()
                            yield f"file {path}, opened with {how}"

    def _processes(self) -> Iterator[str]:
        """Command lines with secrets of anybody's; variables of students, open files, signals."""
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                words = Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ")
                if told := SECRET.search(words):
                    yield f"a secret on a command line: {told.group().decode()}"
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

    def _stores(self) -> Iterator[str]:
        """Stores in which ranks or torchrun's agents meet; a pickle in each of their keys."""
        for port in self._ports():
            self._count("stores")
            for key in keys_of(port, pickle.dumps(Harm(self.traps))):
                yield f"a store with the key {key}"

    def _kernels(self) -> Iterator[str]:
        """What kernels tell those who see the notebook."""
        for port in self._ports():
            self._count("kernels")
            if port not in self.heard:
                self.heard.add(port)
                self.ear.connect(f"tcp://127.0.0.1:{port}")
        while self.ear.poll(100):
            yield f"a kernel's {self.ear.recv_multipart()[0][:40]}"

    def _hub(self) -> Iterator[str]:
        """The hub's word on other students, and their servers, by the token of his own server."""
        tokens = set()
        for one in psutil.process_iter():
            with suppress(psutil.Error):  # also of his own: one that root has started
                if one.uids().real == self.uid:
                    tokens |= {one.environ().get("JUPYTERHUB_API_TOKEN")} - {None}
        others = [one.pw_name for one in pwd.getpwall() if self._is_a_student(one.pw_uid)]
        for token in tokens:
            if _asked(token, "GET", "user") != 200:  # his own name, which it must tell
                continue
            for other in others:
                self._count("hub")
                for how, what in (("GET", ""), ("POST", "/servers/own"), ("POST", "/tokens")):
                    if _asked(token, how, f"users/{other}{what}") < 400:
                        yield f"{how} of {what or 'the page'} of {other}, at the hub"

    def _ports(self) -> list[int]:
        """Those on which processes of other students listen."""
        ports = []
        for name in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == LISTENS and self._is_a_student(int(words[7])):
                    ports.append(int(words[1].rpartition(":")[2], 16))
        return ports

    def _is_a_student(self, uid: int) -> bool:
        return uid != self.uid and uid in self.students


def _asked(token: str, how: str, what: str) -> int:
    """The status with which the hub answers who has this token."""
    one = http.client.HTTPConnection("127.0.0.1", HUB, timeout=5)
    one.request(how, f"/hub/api/{what}", headers={"Authorization": f"token {token}"})
    return one.getresponse().status
