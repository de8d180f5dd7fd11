"""A clean process with torch imported, which forks a rank for each request of its caller.

    caller --- socket: a number and four descriptors for each rank -> server --fork--> rank
       ^------ pipe of each rank: its process id, later its exit code ---'

A server of our own, because multiprocessing's shares the terminal's process group: Ctrl-C, or Stop
in a notebook, ends it while it imports. This one leads a session of its own, says when it is ready,
adopts what its ranks leave behind and ends that, and ends itself when its caller is gone.
Source: https://man7.org/linux/man-pages/man2/PR_SET_CHILD_SUBREAPER.2const.html
"""

import ctypes
import gc
import importlib
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from multiprocessing.spawn import get_preparation_data
from pathlib import Path
from typing import NoReturn

import psutil

from manyhands.ranks import private

# What every rank needs, and what only some need: that takes as long again. An optimizer imports
# torch._dynamo when it is made, and so does the first call inside a mode of torch's dispatcher.
FIRST = ("torch", "torch.distributed", "manyhands.ranks.lab", "manyhands.ranks.runtime")
LATER = (
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.pipelining",
)
# More modules, by name, that the server imports as soon as its caller has them: up to 50 of them.
# Unlike those above they are not imported in idle time, so whoever does not use them pays nothing.
PRELOAD = "MANYHANDS_PRELOAD"
IDLE_S = 0.5  # without a request or a rank, after which one of the second list is imported
READY_S = 120.0  # a busy machine needs a minute to import torch
NUMBER = struct.Struct("q")
PR_SET_CHILD_SUBREAPER = 36


def wanted_modules() -> tuple[str, ...]:
    """What a server that starts now is ready to import, beside `FIRST`; a request counts in it."""
    return (*LATER, *os.environ.get(PRELOAD, "").split()[:50])


def surroundings(name: str) -> dict:
    """What a new process called `name` takes over from this one, for `spawn.prepare` there."""
    kept = ("name", "dir", "sys_path", "sys_argv")
    return {key: value for key, value in get_preparation_data(name).items() if key in kept}


class ServerGone(Exception):
    """The server, or a rank that it should have started, is gone."""


# ---- in the caller -------------------------------------------------------------------------


class Server:
    """The caller's side of a fork server."""

    def __init__(self) -> None:
        """Start it; it is ready some seconds later."""
        ours, its = socket.socketpair()
        self.room = private.make_room()  # which the server removes when it leaves
        code = (
            "from manyhands.ranks import forkserver; "
            f"forkserver.serve({its.fileno()}, {str(self.room)!r})"
        )
        where = os.pathsep.join(surroundings("server")["sys_path"])
        with its:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],  # -P: no module of the working folder
                stdin=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
                env=os.environ
                | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": where},
                start_new_session=True,
            )
        self.socket = ours
        self.wanted = wanted_modules()
        self.owner = os.getpid()
        self.is_ready = False

    def is_alive(self) -> bool:
        """Is it still there, and this process's own? A forked child must not use its parent's."""
        return self.owner == os.getpid() and self.process.poll() is None

    def wait_ready(self, pause: Callable[[], object]) -> None:
        """Wait until it can fork; calls `pause`, which may raise, many times a second.

        Raises:
            ServerGone: it ended, or was not ready within `READY_S`.
        """
        end_s = time.monotonic() + READY_S
        while not self.is_ready:
            pause()
            if time.monotonic() > end_s:
                raise ServerGone(f"torch was not imported within {READY_S:g} s")
            if select.select([self.socket], [], [], 0.05)[0]:
                try:
                    self.is_ready = bool(self.socket.recv(1))
                except OSError:
                    self.is_ready = False
                if not self.is_ready:
                    raise ServerGone(f"it ended with exit code {self._exit_code()}")

    def make_room(self) -> Path:
        """A new room for a job's ranks, in that of the server."""
        try:
            return private.make_room(self.room)
        except OSError as problem:  # temporary files are removed after some days
            raise ServerGone(f"no folder for the ranks: {problem}") from None

    def fork(self, status: Connection, control: Connection, *outputs: Connection) -> None:
        """Ask for a rank that gets `control` and `outputs`; `status` gets its process id."""
        # What this process has imported its ranks are about to need: a bit for each module.
        known = sum((name in sys.modules) << bit for bit, name in enumerate(self.wanted))
        descriptors = [one.fileno() for one in (status, control, *outputs)]
        try:
            socket.send_fds(self.socket, [NUMBER.pack(known)], descriptors)
        except OSError as problem:
            raise ServerGone(str(problem)) from None

    def stop(self) -> None:
        """End it with all its ranks."""
        self.socket.close()
        if self.owner == os.getpid():
            try:
                self.process.wait(3)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            private.clear(self.room)

    def _exit_code(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(1)
        return None


class Forked:
    """The caller's side of a process that the server forks."""

    def __init__(self, server: Server) -> None:
        """Ask `server` for one; `wait_started` says when it is there."""
        self.control, its_control = Pipe()  # its task and its result
        self.output, its_output = Pipe(duplex=False)  # everything it prints, also from C++
        self.stack, its_stack = Pipe(duplex=False)  # where it stands, when asked by a signal
        self._status, its_status = Pipe(duplex=False)
        os.set_blocking(self.output.fileno(), False)
        self.pid: int | None = None
        self.exit_code: int | None = None
        try:
            server.fork(its_status, its_control, its_output, its_stack)
        except ServerGone:
            self.close()
            raise
        finally:
            for one in (its_control, its_output, its_stack, its_status):
                one.close()

    def wait_started(self, pause: Callable[[], object], limit_s: float = READY_S) -> None:
        """Wait for its process id; ServerGone where there is none."""
        end_s = time.monotonic() + limit_s
        while self.pid is None:
            pause()
            if self._status.poll(0.02):
                self.pid = self._number()
                if self.pid is None:
                    raise ServerGone("it could not fork")
            elif time.monotonic() > end_s:
                raise ServerGone(f"no process was forked within {limit_s:g} s")

    def wait_ended(self, seconds: float) -> bool:
        """Wait until it has ended, with all that it left behind; then `exit_code` is known.

        False where it goes on, or where nobody knows since the server is gone.
        """
        if self.exit_code is None and self.pid is not None and self._status.poll(seconds):
            self.exit_code = self._number()
        return self.exit_code is not None

    def kill(self) -> None:
        """End it, and its process group."""
        if self.pid is None or self.wait_ended(0):
            return  # its number may already be another's
        with suppress(ProcessLookupError):
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:  # it does not lead a group yet
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the caller's ends of its pipes."""
        for one in (self.control, self.output, self.stack, self._status):
            one.close()

    def _number(self) -> int | None:
        data = os.read(self._status.fileno(), NUMBER.size)
        return NUMBER.unpack(data)[0] if len(data) == NUMBER.size else None


_server: Server | None = None
_lock = threading.Lock()


def running() -> Server:
    """This process's server, which is started where there is none."""
    global _server
    with _lock:
        if _server is None or not _server.is_alive():
            if _server:
                _server.stop()
            _server = Server()
        return _server


def drop(server: Server) -> None:
    """End a server that does not answer, so that `running` starts another."""
    global _server
    with _lock:
        if _server is server:
            _server = None
    server.stop()


# ---- in the server -------------------------------------------------------------------------


def serve(descriptor: int, room: str) -> NoReturn:
    """Load torch, then fork a rank for each request until the caller is gone."""
    adopt_orphans()
    for name in FIRST:
        importlib.import_module(name)
    gc.freeze()  # a rank's garbage collection would copy all these pages
    server = _Serving(socket.socket(fileno=descriptor), Path(room))
    while True:
        server.turn()


class _Needed:
    """Notes in a rank what it imports of `wanted`, so that the next ranks find it there.

    Where call follows call, as when a notebook runs all its cells, the server is never idle.
    """

    def __init__(self, wanted: tuple[str, ...], needed: mmap.mmap) -> None:
        self.wanted, self.needed = wanted, needed

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Finds nothing; the finders after it do."""
        if name in self.wanted:
            self.needed[self.wanted.index(name)] = 1


class _Serving:
    """The server's side: its requests, and the ranks that live."""

    def __init__(self, caller: socket.socket, room: Path) -> None:
        self.caller, self.room = caller, room
        self.ranks: dict[int, int] = {}  # process id -> descriptor for its exit code
        self.wanted = wanted_modules()
        self.missing = list(self.wanted)
        self.needed = mmap.mmap(-1, len(self.wanted))  # shared with the ranks: a byte for each
        self.wake, self.woken = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(self.woken, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing is woken
        signal.set_wakeup_fd(self.woken)
        with suppress(OSError):  # the caller may be gone already; `turn` will see it
            caller.send(b"r")

    def turn(self) -> None:
        """Wait for a request, for the end of a rank, or for time to load the rest."""
        is_idle = self.missing[:1] and self.missing[0] in LATER and not self.ranks
        ready = select.select([self.caller, self.wake], [], [], IDLE_S if is_idle else None)[0]
        if self.wake in ready:
            with suppress(BlockingIOError):
                os.read(self.wake, 1 << 16)
            self._reap()
        if self.caller in ready:
            self._answer()
        if not ready:
            self._load(self.missing[0])

    def _answer(self) -> None:
        try:
            request, descriptors, _, _ = socket.recv_fds(self.caller, NUMBER.size, 4)
        except OSError:
            request, descriptors = b"", []
        if not request:
            self._leave()
        (known,) = NUMBER.unpack(request)
        for bit, name in enumerate(self.wanted):
            if known >> bit & 1 or self.needed[bit]:
                self._load(name)
        status, *others = descriptors
        try:
            pid = os.fork()
        except OSError as problem:  # no memory, or too many processes
            print(f"cannot start a rank: {problem}", file=sys.stderr, flush=True)
            pid = None
        if pid == 0:
            self._become_rank(others, [status, *self.ranks.values()])
        for one in others:
            os.close(one)
        if pid is None:
            os.close(status)
            return
        self.ranks[pid] = status
        self._tell(status, pid)

    def _become_rank(self, descriptors: list[int], unused: list[int]) -> NoReturn:
        """In the new process: forget the server and live a rank's life."""
        try:
            os.setsid()  # a process group of its own, so that its children end with it
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.caller.close()
            for one in (self.wake, self.woken, *unused):
                os.close(one)
            adopt_orphans()  # what a rank's child leaves behind stays below the rank
            sys.meta_path.insert(0, _Needed(self.wanted, self.needed))
            control, output, stack = descriptors
            sys.modules["manyhands.ranks.lab"].live(
                Connection(control),
                Connection(output, readable=False),
                Connection(stack, readable=False),
            )
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)  # `live` does not return

    def _load(self, name: str) -> None:
        if name in self.missing:
            self.missing.remove(name)
            # An older torch may lack it. What else is wrong with it, a rank that needs it will say.
            with suppress(Exception):
                importlib.import_module(name)
            gc.freeze()

    def _reap(self) -> None:
        """Pass on the exit codes of ranks that have ended, when nothing of theirs is left."""
        ended = {}
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                if pid in self.ranks:
                    ended[pid] = os.waitstatus_to_exitcode(status)
        if not ended:
            return
        descriptors = [self.ranks.pop(pid) for pid in ended]
        self._end_orphans()
        for descriptor, code in zip(descriptors, ended.values(), strict=True):
            self._tell(descriptor, code)
            os.close(descriptor)

    def _end_orphans(self) -> None:
        """Kill what ended ranks have left, in whatever session; it is this process's child now."""
        end_s = time.monotonic() + 2  # a process that waits for a disk cannot be killed
        while (orphans := _children() - self.ranks.keys()) and time.monotonic() < end_s:
            for pid in orphans:
                with suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.002)

    def _tell(self, descriptor: int, number: int) -> None:
        with suppress(OSError):  # nobody may want to know any more
            os.write(descriptor, NUMBER.pack(number))

    def _leave(self) -> NoReturn:
        """End all ranks, and this process."""
        for pid in self.ranks:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self.ranks.clear()
        self._end_orphans()
        private.clear(self.room)
        os._exit(0)


def adopt_orphans() -> None:
    """On Linux, become the parent of all descendants whose own parent has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _children() -> set[int]:
    """Process ids of this process's children that have not been waited for."""
    me = os.getpid()
    listed = Path(f"/proc/{me}/task/{me}/children")
    if listed.exists():  # reading all of /proc takes milliseconds
        return set(map(int, listed.read_text().split()))
    return {child.pid for child in psutil.Process().children()}
