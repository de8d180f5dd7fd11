"""Run a function on several real ranks of this machine: from a notebook cell, a check or a test.

    kernel --- fork server (torch imported once) --- rank 0   run_ranks(fn, 2) -> [value, value]
                                                 '-- rank 1   joined by gloo over loopback

A rank is forked from a clean server, because a fork of a kernel that has used torch's threads can
hang, and a spawned process imports torch again (seconds). Ranks meet in a folder that no other user
can open (private.py). Every wait has a limit and nothing outlives the call. Stop and
Ctrl-C are noted, and acted on where ranks can be ended in an orderly way: within a moment, but for
the import of torch, which would be left in halves.
"""

import copyreg
import ctypes
import faulthandler
import importlib
import os
import select
import signal
import socket
import sys
import sysconfig
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import connection, spawn
from pathlib import Path
from typing import NoReturn

import cloudpickle

from manyhands.ranks import forkserver, private
from manyhands.ranks.failures import (
    Failure,
    MachineFault,
    RankFailed,
    RanksHung,
    RanksInterrupted,
    RuleBroken,
    first_to_fail,
    learner_frames,
    parse_stack,
)
from manyhands.ranks.interrupts import Interrupts, noted
from manyhands.ranks.limits import CAP, Clock

GRACE_S = 0.5  # how long the other ranks may still report after one has failed or finished
ANSWER_S = 10.0  # how long a rank that hangs may take to say where; a busy machine makes it late
LAST_FRAME = (b" in <module>\n", b"  ...\n")  # faulthandler's outermost frame, or its hundredth
INSTALLED = tuple(sysconfig.get_path(kind) for kind in ("purelib", "platlib", "stdlib"))
PRINTED_BYTES = 100_000  # of each rank's output; the rest is counted, not shown


def run_ranks(
    fn: Callable,
    world_size: int,
    *args: object,
    timeout_s: float = 30,
    quiet: bool = False,
    join: bool = True,
    rules: str | None = None,
    **kwargs: object,
) -> list:
    """Call `fn(*args, **kwargs)` on `world_size` CPU ranks and return each rank's value.

    Args:
        fn: any function, also one defined in a notebook cell. It may use `torch.distributed` at
            once: the ranks are joined by gloo before it starts.
        timeout_s: the limit in seconds, once for the time in which no rank computes (all wait or
            sleep) and once for the processor time of the rank that computes most, so that a busy
            machine makes nobody late. Ranks still running then are named and ended; 10 times the
            limit by the clock ends them in any case.
        quiet: show nothing of what the ranks print.
        join: False leaves joining to `fn`: RANK, WORLD_SIZE, MASTER_ADDR ... are set as torchrun
            sets them, and no group exists yet.
        rules: "nccl" holds the calls to NCCL's rules, and "nccl-serial" also tries the orders of a
            device that runs one communication at a time (rules.py); "" holds them to none, and None
            leaves it to the variable MANYHANDS_RULES.

    Raises:
        RuleBroken: a call breaks one of the rules asked for.
        RankFailed: names the rank that failed first, with the learner's own lines.
        RanksHung: ranks did not end in time; names each, its line, and whether it waits there.
        MachineFault: the ranks could not be started at a second try, or the server that holds them
            was ended.
        RanksInterrupted: Ctrl-C, or Stop in a notebook; no rank is left.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}: at least 1 rank is needed")
    blob = _pickle(fn, args, kwargs)
    changes = {} if rules is None else {"MANYHANDS_RULES": rules}
    with _interrupts_noted() as interrupts:
        for is_last in (False, True):
            server = forkserver.running()
            try:
                return _run(server, blob, world_size, timeout_s, quiet, join, changes, interrupts)
            except forkserver.ServerGone as problem:
                forkserver.drop(server)
                if is_last:
                    told = f"the process that starts ranks does not answer ({problem})"
                    raise MachineFault(told, world_size) from None
    raise AssertionError("not reached")


def _run(
    server: forkserver.Server,
    blob: bytes,
    world_size: int,
    timeout_s: float,
    quiet: bool,
    join: bool,
    changes: dict[str, str],
    interrupts: Interrupts,
) -> list:
    """One try of `run_ranks`; ServerGone where the ranks did not start."""
    import torch.distributed  # noqa: F401 (it takes seconds, in which the server does the same)

    server.wait_ready(interrupts.stop_if_any)
    ranks: list[_Rank] = []
    room = server.make_room()
    try:
        environ = _environment(world_size, room) | changes
        for rank in range(world_size):
            name = "" if world_size == 1 and not join else f"[rank {rank}] "  # alone: no name
            ranks.append(_Rank(rank, name, forkserver.Forked(server)))
        for rank in ranks:
            rank.process.wait_started(interrupts.stop_if_any)
            _give_task(rank, blob, environ, timeout_s, join)
        clock = _wait(ranks, timeout_s, quiet, server, interrupts)
        _raise_if_failed(ranks, clock)
        return [cloudpickle.loads(rank.value) for rank in ranks]
    finally:
        _end(ranks)
        private.clear(room)


def warm_up() -> None:
    """Start the fork server in the background, so that the first `run_ranks` is quick."""
    with _interrupts_noted():
        forkserver.running()


@dataclass(eq=False)
class _Rank:
    """What the caller knows of one rank."""

    rank: int
    name: str  # before each line that it prints
    process: forkserver.Forked
    value: bytes | None = None
    failure: Failure | None = None
    has_begun: bool = False  # to run the function
    is_joined: bool = True
    settled_s: float | None = None  # when it finished or failed
    left: bool = False
    unfinished_line: bytes = b""
    printed: int = 0
    tail: list[str] = field(default_factory=list)  # its last lines, for one that dies


@contextmanager
def _interrupts_noted() -> Iterator[Interrupts]:
    """Note SIGINT instead of raising KeyboardInterrupt; raise RanksInterrupted at the end."""
    try:
        with noted() as interrupts:
            yield interrupts
    finally:
        if interrupts.count:
            raise RanksInterrupted from None


def _pickle(fn: Callable, args: tuple, kwargs: dict) -> bytes:
    """The call as bytes; the module of `fn` travels along, unless it is installed."""
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    name = getattr(module, "__name__", "__main__")
    _send_modules_by_name()
    _list_functions_of_torch()
    is_installed = str(getattr(module, "__file__", "")).startswith(INSTALLED)
    if name == "__main__" or name.split(".")[0] == "manyhands" or is_installed:
        return cloudpickle.dumps((fn, args, kwargs))
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps((fn, args, kwargs))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _send_modules_by_name() -> None:
    """Let a module of a kind of its own travel as its name, as every plain module does.

    A function that names `dist` and any `.config` takes torch.distributed.config along, and torch
    makes its modules of settings instances of a class that nothing can pickle.
    """
    for module in list(sys.modules.values()):
        kind = type(module)
        if issubclass(kind, types.ModuleType) and kind is not types.ModuleType:
            copyreg.pickle(kind, lambda one: (importlib.import_module, (one.__name__,)))


def _list_functions_of_torch() -> None:
    """Let `torch._C._functions` travel by its name, in a process that has imported torch.

    Whatever torch's @once_differentiable wraps needs it. Torch does not list it among the modules,
    so it would travel by value, and what arrives could not be read.
    """
    if "torch" in sys.modules:
        sys.modules.setdefault("torch._C._functions", sys.modules["torch"]._C._functions)


def _environment(world_size: int, room: Path) -> dict[str, str]:
    """The variables of all ranks, which lead them to each other."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]  # for what knows nothing of the room
    return {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        private.ROOM: str(room),
        private.STORE: str(room / "store"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": private.LOOPBACK,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",  # with gloo, DeviceMesh would still take the GPUs it sees
    }


def _give_task(rank: _Rank, blob: bytes, environ: dict, timeout_s: float, join: bool) -> None:
    """Tell a new process what to run, and as which rank."""
    place = {"RANK": str(rank.rank), "LOCAL_RANK": str(rank.rank)}
    around = forkserver.surroundings(rank.name)
    task = (environ | place, around, blob, timeout_s, join)
    try:
        rank.process.control.send(task)
    except OSError as problem:
        raise forkserver.ServerGone(f"a rank ended before it began: {problem}") from None


# ---- in the rank ---------------------------------------------------------------------------


def live(
    control: connection.Connection, output: connection.Connection, stack: connection.Connection
) -> NoReturn:
    """A rank's whole life: hear the task, join, call, report, wait for the word to leave."""
    _redirect(output)
    faulthandler.register(signal.SIGUSR2, file=stack.fileno(), all_threads=False)
    environ, around, blob, timeout_s, join = control.recv()
    os.environ.clear()
    os.environ.update(environ)
    spawn.prepare(around)
    import torch

    from manyhands.ranks.matching import Breach
    from manyhands.ranks.rules import watching
    from manyhands.ranks.runtime import UNFINISHED, end_with_parent

    end_with_parent(parent_ends=lambda: _caller_is_gone(control))
    _list_functions_of_torch()
    torch.set_num_threads(1)
    longest_s = CAP * timeout_s + 60
    try:
        fn, args, kwargs = cloudpickle.loads(blob)
        message = _join(longest_s) if join else None
        if message is None:
            control.send(("begins", None))
            with watching(os.environ.get("MANYHANDS_RULES", "") if join else ""):
                value = fn(*args, **kwargs)
            message = ("value", _dumps(value))
    except SystemExit as error:
        message = ("value", _dumps(None))
        if error.code not in (None, 0, UNFINISHED):  # a run that was asked to stop has saved
            message = ("failure", Failure.from_exception(error))
    except BaseException as error:
        failure = Failure.from_exception(error)
        if isinstance(error, Breach):  # lines of several ranks; only the caller knows their text
            failure = replace(failure, message=error.told, frames=error.frames)
        message = ("failure", failure)
    sys.stdout.flush()
    control.send(message)
    # Partners may still be reading from this rank, so it stays until the caller says otherwise.
    control.poll(longest_s)
    os._exit(0)  # no tidy end of the process group: with a DDP model alive that can hang


def _join(timeout_s: float) -> tuple[str, Failure] | None:
    """Join the process group; what to report where that fails, which is no fault of `fn`."""
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    except Exception as error:
        return "not joined", Failure.from_exception(error)
    return None


def _caller_is_gone(control: connection.Connection) -> None:
    """Return when nobody holds the other end of `control` any more."""
    poller = select.poll()
    poller.register(control.fileno(), 0)  # reports only that the other end was closed
    poller.poll()


def _dumps(value: object) -> bytes:
    _send_modules_by_name()
    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"the rank returned a {type(value).__name__} that cannot be sent back ({error}): "
            "return numbers, text, or CPU tensors"
        ) from None


def _redirect(output: connection.Connection) -> None:
    """Send all that this process prints, from Python or C++, into `output`."""
    for descriptor in (1, 2):
        os.dup2(output.fileno(), descriptor)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False, errors="replace")


# ---- in the caller -------------------------------------------------------------------------


def _wait(
    ranks: list[_Rank],
    timeout_s: float,
    quiet: bool,
    server: forkserver.Server,
    interrupts: Interrupts,
) -> Clock:
    """Pass on output and collect results until all is settled or the time is up.

    The time counts from where all ranks have joined: on a busy machine that takes long.
    """
    clock = Clock({}, timeout_s)
    has_begun = False
    while True:
        interrupts.stop_if_any()
        if not server.is_alive():
            raise MachineFault("the process that starts ranks was ended", len(ranks))
        running = [rank for rank in ranks if rank.settled_s is None]
        failed_s = [rank.settled_s for rank in ranks if rank.failure]
        now = time.monotonic()
        if not has_begun and all(rank.has_begun for rank in running):
            clock = Clock({rank.rank: rank.process.pid for rank in ranks}, timeout_s)
            has_begun = True
        if not running or has_begun and clock.is_up(rank.rank for rank in running):
            return clock
        if failed_s and now > min(failed_s) + GRACE_S:
            return clock
        if not has_begun and clock.wall_s > forkserver.READY_S:
            told = f"the ranks did not meet within {forkserver.READY_S:g} s"
            raise MachineFault(told, len(ranks))
        for rank in ranks:
            if rank.value is not None and not rank.left and now > rank.settled_s + GRACE_S:
                _let_go(rank)
        sources = {rank.process.control: rank for rank in running}
        sources |= {rank.process.output: rank for rank in running}
        for source in connection.wait(list(sources), timeout=0.05):
            _read_output(sources[source], quiet)
            if source is sources[source].process.control:
                _read_result(sources[source], quiet)


def _let_go(rank: _Rank) -> None:
    with suppress(OSError):  # it may have died meanwhile
        rank.process.control.send("leave")
    rank.left = True


def _read_result(rank: _Rank, quiet: bool) -> None:
    try:
        kind, content = rank.process.control.recv()
        if kind == "begins":
            rank.has_begun = True
            return
    except (EOFError, ConnectionResetError):
        known = rank.process.wait_ended(5)
        _read_output(rank, quiet)
        kind = "failure" if known else "not joined"
        content = Failure.of_death(rank.process.exit_code, rank.tail)
    _read_output(rank, quiet)
    if rank.unfinished_line:
        _print_lines(rank, [rank.unfinished_line], quiet)
    rank.settled_s = time.monotonic()
    if kind == "value":
        rank.value = content
    else:
        rank.failure = content
        rank.is_joined = kind != "not joined"


def _read_output(rank: _Rank, quiet: bool) -> None:
    """Print the whole lines that wait in the pipe, each with its rank."""
    while True:
        try:
            data = os.read(rank.process.output.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not data:
            return
        *lines, rank.unfinished_line = (rank.unfinished_line + data).split(b"\n")
        rank.unfinished_line = rank.unfinished_line[-PRINTED_BYTES:]
        _print_lines(rank, lines, quiet)


def _print_lines(rank: _Rank, lines: list[bytes], quiet: bool) -> None:
    if not lines:
        return
    rank.tail = [*rank.tail, *(line.decode(errors="replace") for line in lines[-20:])][-20:]
    before = rank.printed
    shown = []
    for line in lines:
        if rank.printed < PRINTED_BYTES:
            shown.append(f"{rank.name}{line.decode(errors='replace')}"[:2000])
        rank.printed += len(line) + 1
    if before < PRINTED_BYTES <= rank.printed:
        shown.append(f"{rank.name}... prints more than {PRINTED_BYTES:,} bytes: not shown")
    if shown and not quiet:
        print("\n".join(shown), flush=True)


def _raise_if_failed(ranks: list[_Rank], clock: Clock) -> None:
    """Raise the one error that tells a learner most."""
    failed = [rank for rank in ranks if rank.failure]
    running = [rank for rank in ranks if rank.settled_s is None]
    finished = [rank.rank for rank in ranks if rank.value is not None]
    strangers = [rank for rank in failed if rank.failure.error == "Stranger"]
    if strangers or failed and not any(rank.is_joined for rank in failed):
        raise MachineFault((strangers or failed)[0].failure.message, len(ranks))
    if failed:
        failures = {rank.rank: rank.failure for rank in failed}
        first = ranks[first_to_fail(failures, [rank.rank for rank in failed if rank.is_joined])]
        kind = RuleBroken if first.failure.error == "Breach" else RankFailed
        raise kind(first.rank, len(ranks), first.failure, finished)
    if running:
        limit_s = clock.limit_s
        if clock.waited_s >= limit_s:
            after = f"{limit_s:g} s"
        elif clock.computed_s >= limit_s:
            after = f"{limit_s:g} s of computing"
        else:
            after = f"{clock.wall_s:.0f} s, with {clock.computed_s:.0f} s of computing"
        computing = set(clock.computing)
        still = not computing and clock.still_s >= limit_s / 2
        starved = not still and clock.computed_s < limit_s and clock.is_starved
        stacks = {rank.rank: _stack(rank) for rank in running}
        raise RanksHung(stacks, len(ranks), finished, limit_s, computing, after, still, starved)


def _stack(rank: _Rank) -> list[tuple[str, int, str]]:
    """The learner's frames of a rank that hangs, innermost last."""
    with suppress(ProcessLookupError):
        _signal_first_thread(rank.process.pid, signal.SIGUSR2)
    text = b""
    end_s = time.monotonic() + ANSWER_S
    while not text.endswith(LAST_FRAME):
        left_s = end_s - time.monotonic()
        if left_s <= 0 or not rank.process.stack.poll(left_s):
            break
        chunk = os.read(rank.process.stack.fileno(), 1 << 16)
        text += chunk
        if not chunk:
            break
    return learner_frames(parse_stack(text.decode(errors="replace")))


def _signal_first_thread(pid: int, number: int) -> None:
    """Signal the thread that runs the learner's code: a process's signal may go to any other."""
    send = getattr(ctypes.CDLL(None), "tgkill", None)  # Linux with glibc 2.30 or later
    if send is None:
        os.kill(pid, number)
    else:
        send(pid, pid, number)


def _end(ranks: list[_Rank]) -> None:
    """Leave nothing behind: end every rank with all that it started."""
    end_s = time.monotonic() + 5
    for rank in ranks:
        with suppress(forkserver.ServerGone):
            rank.process.wait_started(lambda: None, limit_s=end_s - time.monotonic())
        rank.process.kill()
    for rank in ranks:
        rank.process.wait_ended(max(0.0, end_s - time.monotonic()))
        rank.process.close()
