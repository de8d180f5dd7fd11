"""run_ranks: real ranks from any function, and what is told when they go wrong."""

import importlib
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from manyhands.checks.engine import attempt
from manyhands.ranks import forkserver, limits
from manyhands.ranks.failures import MachineFault, RankFailed, RanksHung
from manyhands.ranks.lab import run_ranks, warm_up


def ranks_alive(pid: int | None = None) -> list[psutil.Process]:
    """Rank processes below `pid` (this process): what its fork server has started."""
    servers = [child for child in psutil.Process(pid).children() if is_server(child)]
    return [rank for server in servers for rank in server.children(recursive=True)]


def is_server(process: psutil.Process) -> bool:
    """Is this a fork server? It leads a session of its own."""
    with suppress(psutil.Error):
        return os.getsid(process.pid) == process.pid and "forkserver" in str(process.cmdline())
    return False


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    assert ranks_alive() == []


def total(number):
    tensor = torch.tensor([float(number + dist.get_rank())])
    dist.all_reduce(tensor)
    return dist.get_rank(), tensor


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_values_come_back_by_rank(world_size):
    values = run_ranks(total, world_size, 10)
    wanted = 10.0 * world_size + sum(range(world_size))
    assert [rank for rank, _ in values] == list(range(world_size))
    assert all(tensor.item() == wanted for _, tensor in values)


def test_prints_carry_their_rank(capsys):
    def talk():
        print(f"hello from {dist.get_rank()}")
        os.write(1, b"and from C")

    run_ranks(talk, 2)
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == [
        "[rank 0] and from C",
        "[rank 0] hello from 0",
        "[rank 1] and from C",
        "[rank 1] hello from 1",
    ]


def test_100_mb_of_output_is_survived_and_cut(capsys):
    def shout():
        for _ in range(1000):
            sys.stdout.write("x" * 99_999 + "\n")
        return "done"

    assert run_ranks(shout, 2) == ["done", "done"]
    out = capsys.readouterr().out
    assert len(out) < 500_000
    assert "not shown" in out


def failure_of(fn, world_size=2, kind=RankFailed, **kwargs) -> str:
    with pytest.raises(kind) as caught:
        run_ranks(fn, world_size, quiet=True, **kwargs)
    return str(caught.value)


def test_the_first_failing_rank_is_named_with_the_learners_line_only():
    def fail_on_two():
        if dist.get_rank() == 2:
            raise ValueError("shape 3 is not 4")
        dist.barrier()

    told = failure_of(fail_on_two, 4)
    assert told.startswith("rank 2 of 4 failed first; ranks 0, 1 and 3 stopped with it")
    assert 'raise ValueError("shape 3 is not 4")' in told
    assert "/lab.py" not in told and "_live" not in told and "torch/" not in told


def test_every_hanging_rank_is_named_with_its_line():
    def both_send_first():
        tensor = torch.ones(1)
        other = 1 - dist.get_rank()
        dist.send(tensor, other)
        dist.recv(tensor, other)

    run_ranks(total, 1, 0)  # the server's start is not what is timed
    start = time.monotonic()
    told = failure_of(both_send_first, timeout_s=2)
    assert time.monotonic() - start < 10
    assert "ranks 0 and 1 still run" in told
    assert told.count("dist.send(tensor, other)") == 2


def test_a_collective_that_one_rank_skips_is_told_at_once():
    def only_rank_zero():
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))

    run_ranks(total, 1, 0)  # the server's start is not what is timed
    start = time.monotonic()
    told = failure_of(only_rank_zero, 3, timeout_s=30)
    assert time.monotonic() - start < 10
    assert "rank 0 of 3 lost its partner" in told
    assert "ranks 1 and 2 had already finished" in told


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "ended by SIGKILL"),
        (lambda: sys.exit(3), "called sys.exit(3)"),
        (lambda: os._exit(7), "exit code 7"),
    ],
)
def test_a_rank_that_leaves_is_told(end, words):
    def leave():
        if dist.get_rank() == 1:
            end()
        dist.barrier()

    told = failure_of(leave)
    assert "rank 1 of 2 failed first" in told and words in told
    assert run_ranks(total, 2, 0)[0][0] == 0  # a second call straight after


def test_a_value_that_cannot_travel_is_told():
    assert "cannot be sent back" in failure_of(lambda: threading.Lock())


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return 2 * grad


def test_a_class_with_a_backward_that_is_differentiated_once_travels():
    def run():
        x = torch.ones(2, requires_grad=True)
        Doubled.apply(x).sum().backward()
        return x.grad.tolist()

    assert run_ranks(run, 2) == [[2.0, 2.0]] * 2


def test_children_of_a_rank_end_with_it():
    def start_a_child():
        return subprocess.Popen(["sleep", "60"]).pid

    for pid in run_ranks(start_a_child, 2):
        deadline = time.monotonic() + 5
        while psutil.pid_exists(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"


def test_four_warm_ranks_start_quickly():
    warm_up()
    run_ranks(total, 4, 0)
    took = []
    for _ in range(5):
        start = time.monotonic()
        run_ranks(total, 4, 0)
        took.append(time.monotonic() - start)
    print(f"4 warm ranks: best {min(took):.3f} s of {took}")
    assert min(took) < 5  # far above the goal of 0.5 s, which `make bench` measures


def start_kernel(tmp_path, first="pass"):
    """A process that stands for a notebook kernel, with ranks that wait for 60 s.

    Rank 0 runs the statement `first` before.
    """
    script = tmp_path / "kernel.py"
    script.write_text(
        textwrap.dedent(f"""
        import time
        from manyhands.ranks.lab import run_ranks

        def wait():
            import test_lab
            import torch.distributed as dist
            if dist.get_rank() == 0:
                {first}
            print("waiting", flush=True)
            time.sleep(60)

        try:
            run_ranks(wait, 2, timeout_s=60)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            print(run_ranks(lambda: 5, 2), flush=True)
        """)
    )
    own = Path(__file__).parent  # a rank imports this file
    search = os.pathsep.join([str(own.parents[1] / "scripts"), str(own)])
    kernel = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": search},
    )
    assert "waiting" in kernel.stdout.readline()
    assert "waiting" in kernel.stdout.readline()
    return kernel, psutil.Process(kernel.pid).children(recursive=True)


def test_an_interrupt_ends_the_ranks_and_the_next_call_works(tmp_path):
    kernel, _ = start_kernel(tmp_path)
    assert len(ranks_alive(kernel.pid)) == 2
    kernel.send_signal(signal.SIGINT)
    out, _ = kernel.communicate(timeout=20)
    assert out.splitlines() == ["interrupted", "[5, 5]"]


# ---- Stop at any moment ----------------------------------------------------------------------

FIRST_CALL = """
    import time
    from manyhands.ranks.lab import run_ranks

    def rank_of():
        import torch.distributed as dist
        return dist.get_rank()

    try:
        print("begins", flush=True)
        begin_s = time.monotonic()
        run_ranks(rank_of, 2)
        print(time.monotonic() - begin_s, flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print("stopped", flush=True)
    print(run_ranks(rank_of, 2), flush=True)
"""


def stopped_after(script, seconds) -> tuple[str, str]:
    """What a fresh process prints that gets SIGINT, with its group, as a notebook's Stop sends."""
    kernel = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert kernel.stdout.readline() == "begins\n"
    if seconds is None:  # after the first call
        print("first call", kernel.stdout.readline())
    else:
        time.sleep(seconds)
    children = psutil.Process(kernel.pid).children(recursive=True)
    os.killpg(kernel.pid, signal.SIGINT)
    out, err = kernel.communicate(timeout=180)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert [process for process in alive if process.status() != "zombie"] == []
    return out, err


def test_after_a_stop_at_any_moment_of_the_first_call_the_next_one_works(tmp_path):
    """MANYHANDS_STOPS=100 takes 100 moments."""
    script = tmp_path / "kernel.py"
    script.write_text(textwrap.dedent(FIRST_CALL))
    begin_s = time.monotonic()
    stopped_after(script, None)
    longest_s = (time.monotonic() - begin_s) * 0.7  # the second call is short
    rounds, red = int(os.environ.get("MANYHANDS_STOPS", 2)), []
    for number in range(rounds):
        moment_s = longest_s * (number + random.random()) / rounds
        out, err = stopped_after(script, moment_s)
        if not out.endswith("stopped\n[0, 1]\n") or err:
            red.append((moment_s, out, err))
            print(f"red: stopped after {moment_s:.3f} s: {out!r} {err}", flush=True)
    print(f"{rounds - len(red)} of {rounds} green, stopped within {longest_s:.1f} s")
    assert not red


def server_pid() -> int:
    """The process id of this process's fork server."""
    return next(c.pid for c in psutil.Process().children() if is_server(c))


def test_a_server_that_is_gone_is_started_again():
    run_ranks(total, 2, 0)
    pid = server_pid()
    os.kill(pid, signal.SIGKILL)
    assert [rank for rank, _ in run_ranks(total, 2, 0)] == [0, 1]
    assert not psutil.pid_exists(pid)


def test_a_server_that_does_not_answer_is_replaced(monkeypatch):
    monkeypatch.setenv(forkserver.PRELOAD, "")  # a new server would take seconds for it
    run_ranks(total, 2, 0)
    pid = server_pid()
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(forkserver.Forked.wait_started, "__defaults__", (10.0,))
    assert [rank for rank, _ in run_ranks(total, 2, 0)] == [0, 1]
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(("looks", "computes"), [((True, False), False), ((True, True), True)])
def test_a_thread_that_wakes_for_a_moment_does_not_compute(monkeypatch, looks, computes):
    clock = limits.Clock({0: os.getpid()}, 6.0)
    monkeypatch.setattr(limits.Clock, "_use", lambda self, rank: 0.0)
    left = iter(looks)
    monkeypatch.setattr(limits, "_can_run", lambda process: next(left))
    clock._used_s = {0: 0.0}
    clock._sampled_s -= limits.SAMPLE_S
    clock.is_up([0])
    assert (clock.waited_s == 0) == computes and clock.computing == ({0} if computes else set())


def test_what_a_rank_imports_late_the_next_ones_find_there(monkeypatch):
    name = forkserver.LATER[-1]
    monkeypatch.setenv(forkserver.PRELOAD, "")  # a script may import it as well
    monkeypatch.delitem(sys.modules, name, raising=False)
    forkserver.drop(forkserver.running())
    assert run_ranks(lambda: name in sys.modules, 2) == [False, False]
    run_ranks(lambda: importlib.import_module(name) and None, 1)
    assert run_ranks(lambda: name in sys.modules, 2) == [True, True]


def test_what_the_caller_has_of_the_modules_to_load_its_ranks_have(tmp_path, monkeypatch):
    """As many as there are scripts; none that the caller lacks, and none that cannot be loaded."""
    names = [f"loaded_before_{number}" for number in range(20)]
    for name in [*names, "broken"]:
        (tmp_path / f"{name}.py").write_text("1 / 0" if name == "broken" else "")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MANYHANDS_PRELOAD", " ".join([*names, "no_such_module", "broken"]))
    for name in [*names[1:], "no_such_module", "broken"]:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    forkserver.drop(forkserver.running())
    try:
        found = run_ranks(lambda: [name for name in names if name in sys.modules], 2)
        assert found == [names[1:]] * 2
    finally:
        forkserver.drop(forkserver.running())


def test_a_machine_that_starts_no_ranks_is_no_fault_of_the_code(monkeypatch):
    def no_descriptors(*_):
        raise forkserver.ServerGone("Too many open files")

    monkeypatch.setattr(forkserver.Server, "fork", no_descriptors)
    told = failure_of(lambda: 1, kind=MachineFault)
    assert told == (
        "this machine could not run the 2 rank(s): the process that starts ranks does not answer "
        "(Too many open files). This says nothing about the code that they were to run; run it "
        "again"
    )
    monkeypatch.undo()
    assert run_ranks(lambda: 1, 2) == [1, 1]


def test_a_server_that_is_killed_amid_a_run_is_no_fault_of_the_code():
    def kill_the_server():
        if dist.get_rank() == 0:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)

    began_s = time.monotonic()
    failure_of(kill_the_server, kind=MachineFault)
    assert time.monotonic() - began_s < 20
    assert run_ranks(lambda: 1, 2) == [1, 1]


# ---- limits ----------------------------------------------------------------------------------


@contextmanager
def busy_machine(loops):
    """So many processes that compute all the time, for two minutes at most."""
    code = "import time; end = time.monotonic() + 120\nwhile time.monotonic() < end: pass"
    busy = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def compute(seconds):
    """Use a processor for so many seconds of it, however many others want it."""
    end_s = time.process_time() + seconds
    while time.process_time() < end_s:
        pass
    dist.barrier()
    return dist.get_rank()


def test_a_busy_machine_makes_no_right_code_late():
    """MANYHANDS_BUSY=30 takes 30 runs."""
    runs = int(os.environ.get("MANYHANDS_BUSY", 1))
    walls_s = []
    with busy_machine(4):
        for _ in range(runs):
            began_s = time.monotonic()
            assert run_ranks(compute, 2, 1.0, timeout_s=2.0) == [0, 1]
            walls_s.append(time.monotonic() - began_s)
    print(f"{runs} of {runs} done; by the clock {min(walls_s):.1f} to {max(walls_s):.1f} s")


def test_ranks_that_compute_for_ever_are_accused_of_nothing():
    def rank_1_loops():
        while dist.get_rank() == 1:
            pass
        dist.barrier()

    told = failure_of(rank_1_loops, timeout_s=1)
    assert re.match(r"no end after .* s of computing: ranks 0 and 1 still run\n", told)
    assert re.search(
        r"rank 0 waits in line \d+ of test_lab.py in rank_1_loops:  dist.barrier", told
    )
    assert "rank 1 computes in line" in told
    assert "usually" not in told and len(told.splitlines()) == 3


def test_a_rank_may_be_late_to_say_where_it_stands():
    def be_stopped_for_a_while():
        code = f"kill -STOP {os.getpid()}; sleep 3; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", code])
        time.sleep(60)

    told = failure_of(be_stopped_for_a_while, 1, timeout_s=1)
    assert "of test_lab.py in be_stopped_for_a_while:  " in told


def test_sleep_is_waiting_and_a_child_that_computes_is_not():
    def sleep_first():
        time.sleep(60)

    def wait_for_a_child():
        subprocess.run([sys.executable, "-c", "while True: pass"])

    told = failure_of(sleep_first, 1, timeout_s=1)
    assert told.startswith("no end after 1 s: rank 0 still runs\n  rank 0 waits in line")
    assert len(told.splitlines()) == 2
    told = failure_of(wait_for_a_child, 1, timeout_s=2)
    assert re.match(
        r"no end after .* s of computing: rank 0 still runs\n  rank 0 computes in", told
    )


def test_the_cap_ends_ranks_that_mostly_get_no_processor(monkeypatch):
    monkeypatch.setattr("manyhands.ranks.limits.CAP", 0.5)
    told = failure_of(compute, 2, seconds=60, timeout_s=2)
    assert re.match(r"no end after 1 s, with [01] s of computing: ranks 0 and 1 still run\n", told)
    assert "usually" not in told


def test_a_rank_that_gets_no_processor_is_starved_and_one_that_polls_is_not():
    core = {min(os.sched_getaffinity(0))}
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(5)]
    try:
        for process in busy:
            os.sched_setaffinity(process.pid, core)
        clock = limits.Clock({0: busy[0].pid}, 0.5)
        end_s = time.monotonic() + 3
        while time.monotonic() < end_s:
            clock.is_up([0])
            time.sleep(0.05)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert clock.lost_s > clock.computed_s > 0
    clock.computed_s, clock.lost_s = 6.0, 5.4  # of one that polls a tenth of a minute
    assert not clock.is_starved
    clock.computed_s, clock.lost_s = 3.0, 57.0
    assert clock.is_starved
    for starved in (True, False):
        assert attempt.is_a_fault(RanksHung({0: []}, 1, [], 6.0, starved=starved)) == starved


# ---- nothing outlives the call ---------------------------------------------------------------


def daemon(path):
    """Start a process as daemons do: forked twice, and in a session of its own."""
    code = (
        "import os, sys, time\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid()\n"
        "if os.fork(): os._exit(0)\n"
        "open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "time.sleep(60)"
    )
    subprocess.run([sys.executable, "-c", code, path], start_new_session=True)
    while not os.path.exists(path) or not open(path).read():
        time.sleep(0.01)


@pytest.mark.parametrize("way", ["returns", "hangs", "dies"])
def test_a_daemon_ends_with_the_rank_that_started_it(way, tmp_path):
    def start_daemon():
        path = str(tmp_path / str(dist.get_rank()))
        daemon(path)
        sleeper = subprocess.Popen(["sleep", "60"], start_new_session=True)
        (tmp_path / f"{dist.get_rank()}.child").write_text(str(sleeper.pid))
        if way == "dies" and dist.get_rank() == 1:
            os._exit(3)
        if way == "hangs":
            time.sleep(60)

    if way == "returns":
        run_ranks(start_daemon, 2)
    else:
        failure_of(start_daemon, timeout_s=3)
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(pids) == 4
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []


def test_nothing_outlives_a_kernel_that_is_killed_outright(tmp_path):
    path = tmp_path / "daemon"
    kernel, children = start_kernel(tmp_path, f"test_lab.daemon({str(path)!r})")
    assert len(children) >= 4  # the fork server, two ranks and the daemon of one of them
    pid = int(path.read_text())
    kernel.kill()
    kernel.communicate(timeout=20)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert [process for process in alive if process.status() != "zombie"] == []
    deadline_s = time.monotonic() + 10
    while psutil.pid_exists(pid) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)


def test_ranks_know_the_callers_folder_and_arguments(tmp_path, monkeypatch):
    run_ranks(total, 1, 0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--steps", "3"])
    (tmp_path / "helper.py").write_text("word = 'here'")
    monkeypatch.syspath_prepend(tmp_path)
    seen = run_ranks(lambda: (os.getcwd(), sys.argv, __import__("helper").word), 1)
    assert seen == [(str(tmp_path), ["train.py", "--steps", "3"], "here")]


def test_world_size_zero_is_refused():
    with pytest.raises(ValueError, match="at least 1 rank"):
        run_ranks(total, 0)


def test_a_network_that_this_machine_lacks_is_not_asked_for(monkeypatch):
    """site.env names the one between a cluster's nodes; these ranks meet on the loopback."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert run_ranks(dist.get_rank, 2) == [0, 1]


def test_ranks_see_no_gpu():
    """They talk by gloo, and PyTorch's DeviceMesh would move a model to any GPU that it sees."""

    def seen():
        return os.environ["CUDA_VISIBLE_DEVICES"], torch.cuda.device_count()

    assert run_ranks(seen, 2) == [("", 0)] * 2


def test_a_function_may_name_dist_and_any_config():
    def config_of(run):
        dist.barrier()
        return run.config, (lambda: (dist, run.config))

    run = SimpleNamespace(config=3)
    assert [value[0] for value in run_ranks(config_of, 2, run)] == [3, 3]
