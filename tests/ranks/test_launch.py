"""The launcher as Slurm, a person and bad luck treat it: signals, kills, two nodes, bad input."""

import fcntl
import json
import os
import pty
import random
import resource
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch

import runs
import train_ddp
from commands import contents, environment, flags, left_behind, losses, make_clone, run, settings
from launch import prepare_environment, take_share, torchrun_arguments
from manyhands.instruments.gpus import least_used
from manyhands.programs.elastic_run import until
from manyhands.ranks import private
from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import refuse_copies
from manyhands.saving.folder import complete

LONG = {"layers": 2, "block": 32, "batch": 12, "steps": 120, "impl": "scratch", "save_every": 7}
LONG |= {"learning_rate": 0.01}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_clone(tmp_path_factory.mktemp("clone"))


def undisturbed(clone: Path, out: Path, world_size: int = 2, **changes: object) -> Path:
    """The run that nothing happens to, on the ranks of a fork server: a second, not ten."""
    config = train_ddp.Config(**settings(clone, **{"out": str(out), **LONG, **changes}))
    runs.train(train_ddp, world_size, config)
    return out


def command(clone: Path, **changes: object) -> list[str]:
    script = clone / "scripts" / "train_ddp.py"
    return [sys.executable, str(clone / "scripts" / "launch.py"), str(script)] + flags(
        clone, **{**LONG, **changes}
    )


@contextmanager
def begun(clone: Path, out: Path, at_step: int) -> Iterator[subprocess.Popen]:
    """A job in the background that has just done `at_step`, and its processes as `.ranks`."""
    log = out.with_suffix(".log").open("ab")
    words = command(clone, out=out)
    job = subprocess.Popen(words, env=environment(), cwd=out.parent, stdout=log, stderr=log)
    try:
        deadline_s = time.monotonic() + 240  # a busy machine needs minutes to start
        while not (out / "metrics.jsonl").exists() or len(losses_so_far(out)) < at_step:
            assert job.poll() is None and time.monotonic() < deadline_s, read_log(out)
            time.sleep(0.002)
        job.ranks = psutil.Process(job.pid).children()
        yield job
        # Nothing of the job outlives it for more than a moment.
        _, alive = psutil.wait_procs(job.ranks, timeout=10)
        assert not alive and not left_behind(out)
    finally:
        for process in [*getattr(job, "ranks", []), job]:
            if process.poll() is None if process is job else process.is_running():
                process.kill()
        job.wait()
        log.close()


def losses_so_far(out: Path) -> list[str]:
    return (out / "metrics.jsonl").read_text().splitlines()


def read_log(out: Path) -> str:
    return out.with_suffix(".log").read_text()


def state(out: Path) -> str:
    return json.loads((out / "status.json").read_text())["state"]


def test_stopped_and_killed_job_ends_as_if_nothing_had_happened(clone, tmp_path):
    """The same command again and again: after SIGTERM, SIGUSR1, and kills of a rank and of all."""
    out, steps = tmp_path / "run", [random.randint(low, low + 9) for low in (5, 30, 55, 80)]
    print("disturbed at steps", steps)
    for number, step in zip(("SIGTERM", "SIGUSR1"), steps, strict=False):
        with begun(clone, out, step) as job:
            job.send_signal(getattr(signal, number))
            assert job.wait(30) == 75, read_log(out)
        assert state(out) == "stopped"
        assert f"stopped by {number} " in read_log(out)  # at a step, or in a validation
        assert "Traceback" not in read_log(out) and "terminate called" not in read_log(out)
    with begun(clone, out, steps[2]) as job:
        random.choice(job.ranks).kill()
        assert job.wait(30) == 1
    assert "SIGKILL" in read_log(out)
    with begun(clone, out, steps[3]) as job:
        job.kill()
    # A rank that sees its partner go before itself still writes that the run has failed.
    assert state(out) in ("running", "failed") and not (out / "model.pt").exists()
    code, said, err = run(command(clone, out=out), tmp_path)
    assert code == 0, err
    assert f"resumed {out} at step" in said

    calm = undisturbed(clone, tmp_path / "calm")
    assert len(losses(out)) == 120 and losses(out) == losses(calm)
    ours, theirs = (torch.load(one / "model.pt", weights_only=True) for one in (out, calm))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs) and len(ours) > 10
    assert (out / "model.pt").read_bytes() == (calm / "model.pt").read_bytes()


@contextmanager
def begun_on_a_terminal(words: list[str], out: Path) -> Iterator[tuple[subprocess.Popen, int]]:
    """A job that has just begun to train, and the terminal that it was started from."""
    terminal, side = pty.openpty()
    os.set_blocking(terminal, False)

    def has_begun() -> bool:
        with suppress(OSError):  # nothing to read, or nobody writes
            os.read(terminal, 1 << 16)
        return (out / "metrics.jsonl").exists() and len(losses_so_far(out)) > 5

    job = subprocess.Popen(
        words,
        env=environment(),
        cwd=out.parent,
        stdin=side,
        stdout=side,
        stderr=out.with_suffix(".log").open("ab"),
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(side)
    try:
        until(has_begun, 240)
        yield job, terminal
    finally:
        for process in [*psutil.Process(job.pid).children(), job] if job.poll() is None else []:
            process.kill()
        job.wait()


def test_a_job_under_nohup_outlives_its_terminal(clone, tmp_path):
    out, long = tmp_path / "run", {**LONG, "impl": "torch", "steps": 150}
    words = ["nohup", "bash", str(clone / "sbatch" / "ddp.sbatch"), *flags(clone, out=out, **long)]
    with begun_on_a_terminal(words, out) as (job, terminal):
        os.close(terminal)  # the kernel sends SIGHUP
        assert job.wait(240) == 0, read_log(out)
    assert state(out) == "finished" and len(losses_so_far(out)) == 150


def test_a_job_whose_terminal_is_closed_saves_and_says_so(clone, tmp_path):
    """Its standard output is gone with the terminal; its standard error is a file."""
    out = tmp_path / "run"
    words = command(clone, out=out, steps=100_000, save_every=100_000)
    with begun_on_a_terminal(words, out) as (job, terminal):
        os.close(terminal)
        assert job.wait(150) == 129, read_log(out)  # saving takes a while on a busy machine
    assert state(out) == "stopped" and complete(out / "checkpoints")
    assert "stopped by SIGHUP at step" in (out / "logs" / "rank-00000.log").read_text()
    assert "launch.py: the terminal was closed (SIGHUP" in read_log(out)
    assert "Traceback" not in read_log(out)


SLOW_TO_START = """
import os, time
open(f"pid-{os.environ['RANK']}", "w").write(str(os.getpid()))
while not os.path.exists("killed"):
    time.sleep(0.01)
from manyhands.ranks.runtime import distributed
with distributed("cpu"):
    time.sleep(600)
"""


def test_ranks_whose_launcher_goes_while_they_import_torch_go_too(clone, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW_TO_START)
    words = [sys.executable, str(clone / "scripts" / "launch.py"), "slow.py"]
    environ = environment(PYTHONPATH=str(clone / "scripts"))
    with subprocess.Popen(words, env=environ, cwd=tmp_path) as job:
        until(lambda: len(list(tmp_path.glob("pid-*"))) == 2, 240)
        ranks = psutil.Process(job.pid).children()
        job.kill()
    (tmp_path / "killed").touch()
    _, alive = psutil.wait_procs(ranks, timeout=120)  # a busy machine needs minutes for torch
    for rank in alive:
        rank.kill()
    assert len(ranks) == 2 and not alive


def test_a_store_whose_folder_is_gone_says_so_and_does_not_wait(tmp_path, monkeypatch):
    monkeypatch.setenv(private.STORE, str(tmp_path / "gone" / "store"))
    monkeypatch.setenv("MASTER_PORT", "0")
    with pytest.raises(torch.distributed.DistNetworkError, match="gone is gone"):
        private.store()


STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("changes", "has_ranks", "words"),
    [
        ({}, True, "RANKS=4 PYTHON=.* sbatch --nodes=2 .*sbatch/ddp.sbatch --steps 3"),
        (
            {"SLURM_STEP_NUM_NODES": "1"},
            True,
            f"RANKS=8 srun -n1 --cpus-per-task=8 {sys.executable} .*/launch.py .* --steps 3",
        ),
        ({}, False, f"srun --ntasks=1 {sys.executable} .*/scripts/train_ddp.py --steps 3"),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"}, True, None),
        ({"RANK": "0"}, True, None),  # torchrun's
    ],
)
def test_one_of_several_copies_in_a_step_is_refused(changes, has_ranks, words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/course/scripts/train_ddp.py", "--steps", "3"])
    if words is None:
        refuse_copies(STEP | changes, has_ranks)
        return
    with pytest.raises(BadInput, match=f"8 copies .* the right command is: {words}"):
        refuse_copies(STEP | changes, has_ranks)
    with pytest.raises(SystemExit) as silent:
        refuse_copies(STEP | changes | {"SLURM_PROCID": "3"}, has_ranks)
    assert silent.value.code == 2


def test_a_job_outside_a_step_is_no_copy():
    refuse_copies({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, True)  # a batch script, or salloc
    refuse_copies({}, True)


@pytest.mark.nightly
def test_a_machine_whose_name_cannot_be_looked_up_trains(clone, tmp_path):
    """As laptops in a VPN and some containers are: on one machine all meet on its loopback."""
    named = ["unshare", "--uts", "bash", "-c", 'hostname no-such-name-zz && "$@"', "-"]
    if run([*named, "true"], tmp_path)[0]:
        pytest.skip("only root can give a name to a part of this machine")
    code, said, errors = run([*named, *command(clone, out="run", steps=3)], tmp_path)
    assert code == 0 and "finished: 3 steps" in said, errors
    env = environment(PYTHONPATH=str(clone / "scripts"), GLOO_SOCKET_IFNAME="ib0")
    ranks = "from manyhands.ranks.lab import run_ranks; print(run_ranks(lambda n: n, 2, 7))"
    told = run([*named, sys.executable, "-c", ranks], tmp_path, env=env)
    assert told == (0, "[7, 7]\n", "")


# ---- what a shell says -------------------------------------------------------------------------


def test_a_job_file_finds_its_own_folder_whatever_cdpath_says(clone, tmp_path):
    (tmp_path / "sbatch").mkdir()
    (tmp_path / "sbatch" / "site.sh").write_text("echo of another clone; exit 1\n")
    stand_in = tmp_path / "python"
    stand_in.write_text("#!/bin/bash\necho $*\n")
    stand_in.chmod(0o755)
    for places in (".", str(tmp_path)):
        env = environment(CDPATH=places, PYTHON=str(stand_in))
        told = run(["bash", "sbatch/ddp.sbatch", "--steps", 3], clone, env=env)
        words = f"{clone}/scripts/launch.py {clone}/scripts/train_ddp.py --steps 3\n"
        assert told == (0, words, "")
        _, said, errors = run(["bash", "sbatch/check_site.sh"], clone, env=env)
        assert "there is no sbatch/site.env: cp" in said and not errors


@pytest.mark.parametrize("job", ["ddp.sbatch", "solution.sbatch"])
def test_a_job_takes_no_other_python_than_the_courses_or_the_one_named(clone, tmp_path, job):
    (tmp_path / "python3").symlink_to(sys.executable)
    path = f"{tmp_path}:{os.environ['PATH']}"
    for named, words in (
        ({}, "no "),
        ({"PYTHON": "/gone/python"}, "PYTHON names what is not there: no /gone/python: "),
    ):
        env = {k: v for k, v in environment(PATH=path).items() if k != "PYTHON"} | named
        code, said, errors = run(["bash", f"sbatch/{job}", "--steps", 3], clone, env=env)
        assert (code, said, errors.count("\n")) == (2, "", 1), errors
        assert errors.startswith(words) and "run make install" in errors


# ---- two nodes ---------------------------------------------------------------------------------


def node(rank: int, job_id: int) -> dict[str, str]:
    """What Slurm and launch.sh set on a node of two, with both nodes on this machine."""
    named = {"SLURM_JOB_ID": str(job_id), "SLURM_NODEID": str(rank), "HEAD_NODE": "127.0.0.1"}
    return environment(**named, NODES="2", RANKS="1", GLOO_SOCKET_IFNAME="lo")


def job_with_port(port: int) -> int:
    """A job number as large as a busy cluster's whose agents meet at `port`."""
    return 9_000_000 + (port - 20_000 - 9_000_000) % 10_000


def port_below_30000() -> socket.socket:
    """A free port where jobs meet, held until the socket is closed."""
    while True:
        try:
            return socket.create_server(("127.0.0.1", random.randint(20_000, 29_999)))
        except OSError:  # somebody has it
            continue


def test_two_nodes_train_like_one(clone, tmp_path):
    with port_below_30000() as held:
        job_id = job_with_port(held.getsockname()[1])
    short = {"steps": 12, "impl": "torch", "layers": 1, "block": 16}
    agents = [
        subprocess.Popen(
            command(clone, out=tmp_path / "run", **short),
            env=node(rank, job_id),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (1, 0)
    ]
    try:
        ends = [agent.communicate(timeout=90) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], ends
    # Either agent may have got rank 0; it alone prints.
    assert sorted("2 rank(s) on cpu" in out for out, _ in ends) == [False, True]
    assert "" in [out for out, _ in ends]
    calm = undisturbed(clone, tmp_path / "calm", **short)
    assert losses(tmp_path / "run") == pytest.approx(losses(calm), abs=1e-6)
    assert not left_behind(tmp_path)


# ---- what the ranks get, and what is kept of them ----------------------------------------------


def test_number_of_ranks():
    """A rank a GPU, else two, or one where only one core was granted; RANKS decides."""
    for environ, num_gpus, num_cores, ranks in (
        ({}, 3, 16, 3),
        ({}, 0, 16, 2),
        ({}, 0, 1, 1),
        ({"RANKS": "5"}, 4, 1, 5),
    ):
        words = torchrun_arguments(environ, num_gpus, num_cores)
        assert words == ["--nnodes=1", f"--nproc-per-node={ranks}"]


def test_caches_of_a_batch_job_lie_on_the_node(tmp_path, monkeypatch):
    """In the job's room: code that lies there is run."""
    monkeypatch.setattr(os, "environ", {"NCCL_SOCKET_IFNAME": "ib0", "TRITON_CACHE_DIR": "mine"})
    prepare_environment(3, one_node=True, room=tmp_path)
    assert os.environ.pop("GLOO_SOCKET_IFNAME").startswith("lo") and "ib0" not in str(os.environ)
    assert os.environ[private.STORE] == str(tmp_path / "store")
    assert os.environ[private.ROOM] == str(tmp_path) and "MPLCONFIGDIR" not in os.environ
    os.environ["MANYHANDS_BATCH"] = "1"
    prepare_environment(3, one_node=False, room=tmp_path)
    assert "GLOO_SOCKET_IFNAME" not in os.environ and os.environ["TRITON_CACHE_DIR"] == "mine"
    assert os.environ["MPLCONFIGDIR"] == str(tmp_path / "mplconfigdir")
    assert private.STORE not in os.environ and os.environ["OMP_NUM_THREADS"] == "3"


TALKER = """
import sys
from dataclasses import dataclass
from pathlib import Path
import torch
from manyhands.ranks.runtime import command_line, distributed
from manyhands.ranks.streams import keep_output

@dataclass(frozen=True)
class Config:
    out: str = ""

def main(config: Config) -> None:
    with distributed("cpu") as world:
        print("early", world.rank)
        keep_output(Path(config.out) / f"rank-{world.rank:05d}.log")
        print("no end", end="", file=sys.stderr)
        torch.distributed.barrier()
        raise ValueError(f"fault of {world.rank}") if world.rank else SystemExit(0)

if __name__ == "__main__":
    command_line(main, Config)
"""


def test_each_rank_keeps_what_it_prints(clone, tmp_path):
    """Also what came before its file, and its traceback; the job's own output has all of it."""
    script = clone / "scripts" / "talk.py"
    script.write_text(TALKER)
    words = [sys.executable, clone / "scripts" / "launch.py", script, "--out", tmp_path / "logs"]
    paths = [tmp_path / "logs" / f"rank-0000{rank}.log" for rank in (0, 1)]
    paths[0].parent.mkdir()
    for path in paths:
        path.write_text("of an earlier life\n")
    code, out, err = run(words, tmp_path)
    assert code == 1 and "early 0\n" in out and "early 1\n" in out
    assert err.count("no end") == 2 and "ValueError: fault of 1" in err
    first, second = (path.read_text() for path in paths)
    assert first.startswith("of an earlier life\n") and second.startswith("of an earlier life\n")
    assert first.count("early 0\nno end") == 1 and "early 1" not in first
    assert second.count("early 1\nno end") == 1 and "device: " in first
    assert second.count("\nValueError: fault of 1\n") == 1


# ---- bad input, on two ranks: exit code 2, one line, and nothing touched -----------------------


def refuse(clone: Path, cwd: Path, env: dict | None = None, **changes: object) -> str:
    """Start a job that has to refuse; returns its one line."""
    before = contents(cwd)
    words = command(clone, **{"out": "run", **changes})
    code, out, err = run(words, cwd, env=env or environment())
    assert (code, err.count("\n"), "Traceback" in out + err) == (2, 1, False), out + err
    assert contents(cwd) == before and not left_behind(cwd)
    return err


def test_batch_that_cannot_be_divided(clone, tmp_path):
    line = refuse(clone, tmp_path, batch=7)
    assert line.startswith("train_ddp.py: batch 7 cannot be") and "by 2 ranks" in line


def test_mine_without_a_file(clone, tmp_path):
    assert "mine/ddp.py is not there: run check.keep()" in refuse(clone, tmp_path, impl="mine")


@pytest.mark.nightly
def test_checkpoint_of_another_number_of_ranks(clone, tmp_path):
    """In one process: test_resume.py."""
    undisturbed(clone, tmp_path / "run", world_size=1, steps=3)
    (tmp_path / "run" / "status.json").unlink()
    assert "holds a run with ranks=1, not 2" in refuse(clone, tmp_path, steps=3)


@pytest.mark.nightly
def test_full_disk(clone, tmp_path):
    """The limit on a file's size is the kernel's "no" that needs no root; both ranks meet it.

    In every run test_run.py has ranks meet it, and test_train_single.py a command.
    """
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, limit[1]))  # inherited by the job
    try:
        code, out, err = run(command(clone, out="run", save_every=3), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert (code, err.count("\n"), "Traceback" in out + err) == (2, 1, False), out + err
    assert "cannot save" in err and "File too large" in err
    assert not left_behind(tmp_path)


def test_ranks_that_are_no_number(clone, tmp_path):
    line = refuse(clone, tmp_path, env=environment(RANKS="abc"))
    assert line == "launch.py: RANKS is 'abc': give the number of ranks a node, 1 or more\n"
    for ranks in ("0", "-1", "1.5", ""):
        with pytest.raises(BadInput, match=f"RANKS is {ranks!r}"):
            torchrun_arguments({"RANKS": ranks}, num_gpus=0)


def test_a_share_of_the_gpus_is_those_that_are_used_least():
    used = [70, 0, None, 20]
    for count, names in ((0, []), (1, ["1"]), (2, ["1", "3"]), (3, ["0", "1", "3"]), (9, None)):
        assert least_used([*"0123"], used, count) == (names if names is not None else [*"0123"])
    for environ in ({}, {"MANYHANDS_GPUS": "2", "MANYHANDS_BATCH": "1"}):  # Slurm has granted some
        before = dict(environ)
        take_share(environ)
        assert environ == before
    for share in ("two", "-1", ""):
        with pytest.raises(BadInput, match=f"MANYHANDS_GPUS is {share!r}: give the number of GPUs"):
            take_share({"MANYHANDS_GPUS": share})


def test_no_script(clone, tmp_path):
    words = [sys.executable, clone / "scripts" / "launch.py", "scripts/train_dpp.py"]
    code, out, err = run(words, tmp_path)
    assert (code, out, err.count("\n")) == (2, "", 1) and "no script scripts/train_dpp.py" in err


def test_meeting_port_in_use(clone, tmp_path):
    with port_below_30000() as held:
        port = held.getsockname()[1]
        line = refuse(clone, tmp_path, env=node(0, job_with_port(port)))
    assert "the nodes did not meet" in line and f"127.0.0.1:{port}" in line
