"""Run a function on several real ranks of this machine: from a notebook cell, a check or a test.

    kernel --- fork server (torch imported once) --- rank 0   run_ranks(fn, 2) -> [value, value]
                                                 '-- rank 1   joined by gloo over loopback

A rank is forked from a clean server, because a fork of a kernel that has used torch's threads can
hang, and a spawned process imports torch again (seconds). Ranks meet in a store that the caller
holds on a port the system picks. Every wait has a limit and nothing outlives the call.
Source: https://docs.python.org/3/library/multiprocessing.html#contexts-and-start-methods
"""

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection

import cloudpickle
import psutil

from manyhands.ranks.failures import (
    Failure,
    RankFailed,
    RanksHung,
    RanksInterrupted,
    is_echo,
    learner_frames,
    parse_stack,
)

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.nn.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "manyhands.ranks.lab",
)
GRACE_S = 0.5  # how long the other ranks may still report after one has failed or finished
PRINTED_BYTES = 100_000  # of each rank's output; the rest is counted, not shown


def run_ranks(
    fn: Callable,
    world_size: int,
    *args: object,
    timeout_s: float = 30,
    quiet: bool = False,
    join: bool = True,
    **kwargs: object,
) -> list:
    """Call `fn(*args, **kwargs)` on `world_size` CPU ranks and return each rank's value.

    Args:
        fn: any function, also one defined in a notebook cell. It may use `torch.distributed` at
            once: the ranks are joined by gloo before it starts.
        timeout_s: the limit in seconds; ranks still running then are named and ended.
        quiet: show nothing of what the ranks print.
        join: False leaves joining to `fn`: RANK, WORLD_SIZE, MASTER_ADDR ... are set as torchrun
            sets them, and no group exists yet.

    Raises:
        RankFailed: names the rank that failed first, with the learner's own lines.
        RanksHung: ranks did not end in time; names each and the line it waits in.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}: at least 1 rank is needed")
    blob = _pickle(fn, args, kwargs)
    ranks: list[_Rank] = []
    try:
        with _meeting_place(world_size) as environ:
            for rank in range(world_size):
                ranks.append(_start(rank, world_size, blob, environ, timeout_s, join))
            _wait(ranks, time.monotonic() + timeout_s, quiet)
            _raise_if_failed(ranks, timeout_s)
        return [cloudpickle.loads(rank.value) for rank in ranks]
    except KeyboardInterrupt:
        raise RanksInterrupted from None
    finally:
        _end(ranks)


def warm_up() -> None:
    """Start the fork server in the background, so that the first `run_ranks` is quick."""
    from multiprocessing import forkserver

    with _no_main_file():
        _context()
        forkserver.ensure_running()


@dataclass(eq=False)
class _Rank:
    """What the caller knows of one rank."""

    rank: int
    name: str  # before each line that it prints
    process: multiprocessing.Process
    control: connection.Connection  # its result; and the word to leave
    output: connection.Connection  # everything it prints, also from C++
    stack: connection.Connection  # where it stands, when asked by a signal
    value: bytes | None = None
    failure: Failure | None = None
    settled_s: float | None = None  # when it finished or failed
    left: bool = False
    unfinished_line: bytes = b""
    printed: int = 0
    tail: list[str] = field(default_factory=list)  # its last lines, for one that dies


def _context() -> multiprocessing.context.BaseContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    return context


def _pickle(fn: Callable, args: tuple, kwargs: dict) -> bytes:
    """The call as bytes; the module of `fn` travels along, unless it is the course's own."""
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    name = getattr(module, "__name__", "__main__")
    if name == "__main__" or name.split(".")[0] == "manyhands":
        return cloudpickle.dumps((fn, args, kwargs))
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps((fn, args, kwargs))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


@contextmanager
def _meeting_place(world_size: int) -> Iterator[dict[str, str]]:
    """A store on a free port of this machine, and the environment that leads ranks to it."""
    from torch.distributed import TCPStore

    # This process holds the store, as torchrun's agent does, so no rank has to pick a port.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    loopback = "lo" if sys.platform == "linux" else "lo0"
    yield {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback),
        "OMP_NUM_THREADS": "1",
    }
    del store


@contextmanager
def _no_main_file() -> Iterator[None]:
    """Hide the main script while ranks start, or multiprocessing would run it again in each."""
    main = sys.modules["__main__"]
    hidden = {name: main.__dict__.pop(name) for name in ("__file__",) if name in main.__dict__}
    spec, main.__spec__ = getattr(main, "__spec__", None), None
    try:
        yield
    finally:
        main.__dict__.update(hidden)
        main.__spec__ = spec


def _start(rank: int, world_size: int, blob: bytes, environ: dict, timeout_s: float, join: bool):
    context = _context()
    control, its_control = context.Pipe()
    output, its_output = context.Pipe(duplex=False)
    stack, its_stack = context.Pipe(duplex=False)
    environ = {**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    process = context.Process(
        target=_live,
        args=(blob, environ, its_control, its_output, its_stack, timeout_s, join),
        name=f"rank {rank} of {world_size}",
    )
    with _no_main_file():
        process.start()
    for mine in (its_control, its_output, its_stack):
        mine.close()
    os.set_blocking(output.fileno(), False)
    name = "" if world_size == 1 and not join else f"[rank {rank}] "  # alone there are no ranks
    return _Rank(rank, name, process, control, output, stack)


# ---- in the rank ---------------------------------------------------------------------------


def _live(blob, environ, control, output, stack, timeout_s: float, join: bool) -> None:
    """A rank's whole life: join, call, report, wait for the word to leave."""
    os.setsid()  # a process group of its own, so that its children end with it
    _redirect(output)
    faulthandler.register(signal.SIGUSR2, file=stack.fileno(), all_threads=False)
    os.environ.clear()
    os.environ.update(environ)
    import torch
    import torch.distributed as dist

    from manyhands.ranks.runtime import end_with_parent

    end_with_parent(multiprocessing.parent_process().join)  # the kernel, not the fork server
    torch.set_num_threads(1)
    try:
        fn, args, kwargs = cloudpickle.loads(blob)
        if join:
            dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s + 60))
        message = ("value", _dumps(fn(*args, **kwargs)))
    except SystemExit as error:
        message = ("value", _dumps(None))
        if error.code not in (None, 0):
            message = ("failure", Failure.of(error))
    except BaseException as error:
        message = ("failure", Failure.of(error))
    sys.stdout.flush()
    control.send(message)
    # Partners may still be reading from this rank, so it stays until the caller says otherwise.
    control.poll(timeout_s + 60)
    os._exit(0)  # no tidy end of the process group: with a DDP model alive that can hang


def _dumps(value: object) -> bytes:
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


def _wait(ranks: list[_Rank], deadline_s: float, quiet: bool) -> None:
    """Pass on output and collect results until all is settled or the limit is reached."""
    while True:
        running = [rank for rank in ranks if rank.settled_s is None]
        failed_s = [rank.settled_s for rank in ranks if rank.failure]
        now = time.monotonic()
        if not running or now > deadline_s or (failed_s and now > min(failed_s) + GRACE_S):
            return
        for rank in ranks:
            if rank.value is not None and not rank.left and now > rank.settled_s + GRACE_S:
                _let_go(rank)
        sources = {rank.control: rank for rank in running} | {r.output: r for r in running}
        for source in connection.wait(list(sources), timeout=0.05):
            _read_output(sources[source], quiet)
            if source is sources[source].control:
                _read_result(sources[source], quiet)


def _let_go(rank: _Rank) -> None:
    with suppress(OSError):  # it may have died meanwhile
        rank.control.send("leave")
    rank.left = True


def _read_result(rank: _Rank, quiet: bool) -> None:
    try:
        kind, content = rank.control.recv()
    except (EOFError, ConnectionResetError):
        rank.process.join(1)
        _read_output(rank, quiet)
        kind, content = "failure", Failure.of_death(rank.process.exitcode, rank.tail)
    _read_output(rank, quiet)
    if rank.unfinished_line:
        _print_lines(rank, [rank.unfinished_line], quiet)
    rank.settled_s = time.monotonic()
    if kind == "value":
        rank.value = content
    else:
        rank.failure = content


def _read_output(rank: _Rank, quiet: bool) -> None:
    """Print the whole lines that wait in the pipe, each with its rank."""
    while True:
        try:
            data = os.read(rank.output.fileno(), 1 << 16)
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


def _raise_if_failed(ranks: list[_Rank], timeout_s: float) -> None:
    """Raise the one error that tells a learner most."""
    failed = [rank for rank in ranks if rank.failure]
    running = [rank for rank in ranks if rank.settled_s is None]
    finished = [rank.rank for rank in ranks if rank.value is not None]
    if failed:
        # A rank that lost its partner is an echo of the partner's fault, however early it spoke.
        first = min(failed, key=lambda rank: (is_echo(rank.failure), rank.failure.time_s))
        raise RankFailed(first.rank, len(ranks), first.failure, finished)
    if running:
        before_s, start_s = [_processor_s(rank) for rank in running], time.monotonic()
        stacks = {rank.rank: _stack(rank) for rank in running}
        least_s = 0.1 * (time.monotonic() - start_s)  # others may need the processor, too
        computing = [
            rank.rank
            for rank, before in zip(running, before_s, strict=True)
            if _processor_s(rank) - before > least_s
        ]
        raise RanksHung(stacks, len(ranks), finished, timeout_s, computing)


def _processor_s(rank: _Rank) -> float:
    """Seconds of processor time that a rank has used so far; 0 for one that is gone."""
    with suppress(psutil.Error):
        return sum(psutil.Process(rank.process.pid).cpu_times()[:2])
    return 0.0


def _stack(rank: _Rank) -> list[tuple[str, int, str]]:
    """The learner's frames of a rank that hangs, innermost last."""
    with suppress(ProcessLookupError):
        os.kill(rank.process.pid, signal.SIGUSR2)
    text = b""
    while rank.stack.poll(0.3):
        chunk = os.read(rank.stack.fileno(), 1 << 16)
        text += chunk
        if not chunk:
            break
    return learner_frames(parse_stack(text.decode(errors="replace")))


def _end(ranks: list[_Rank]) -> None:
    """Leave nothing behind: end every rank with all that it started."""
    for rank in ranks:
        try:
            os.killpg(rank.process.pid, signal.SIGKILL)
        except ProcessLookupError:  # not yet, or no longer, the head of a group
            rank.process.kill()
    for rank in ranks:
        rank.process.join(5)
        for pipe in (rank.control, rank.output, rank.stack):
            pipe.close()
