"""Nobody else on the machine reaches into a check or a job: two users try, on their own network."""

import os
import re
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from commands import ROOT, environment
from manyhands.checks.engine.bench import lessons
from manyhands.checks.engine.exercise import judge
from manyhands.ranks import forkserver, peers, private
from manyhands.ranks.failures import MachineFault
from manyhands.ranks.lab import run_ranks
from stranger import FORK, USER, Stranger, scene

if not sys.platform.startswith("linux") or os.getuid() != 0:
    pytest.skip("to be two users takes root, on Linux", allow_module_level=True)

# What tempfile calls its files, and torchrun its logs: eight characters that nobody can guess.
# With other such names, but for a moment, Python tries whether the temporary folder can be written.
DRAWN = re.compile(r"(manyhands-|tmp|pymp-)[a-z0-9_]{8}|torch-shm-dir-\w{6}")


@pytest.fixture
def temp() -> Iterator[Path]:
    """A folder for temporary files, which all users share."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o1777)
        yield Path(folder)


def use(temp: Path) -> None:
    """Work there from now on, in this process and those that it starts."""
    os.environ["TMPDIR"] = str(temp)
    tempfile.tempdir = None
    os.chdir(temp)


def nothing_reached(stranger: Stranger, temp: Path, harm: Path) -> None:
    assert os.listdir(harm) == []
    assert not stranger.seen["joined"] and not stranger.seen["read"], stranger.seen
    assert set(stranger.seen["ports"]) <= {"127.0.0.1"} and stranger.seen["tried"]["ports"]
    names = stranger.seen["names"]
    probes = {one for one in names if re.fullmatch(r"[a-z0-9_]{8}", one) and names[one] < 3}
    assert names and all(map(DRAWN.fullmatch, names.keys() - probes)), names
    assert [entry.name for entry in os.scandir(temp) if entry.stat().st_uid != USER] == []


def checks(temp: Path, harm: Path) -> list[str]:
    """Verdicts on right answers, beside a stranger who says rubbish to every port."""
    use(temp)
    with Stranger(temp, harm) as stranger:
        found = []
        for word, todo in (("collectives", "4.2"), ("first_job", "0.2")):
            exercise = lessons()[word].exercises[todo]
            found.append(repr(judge(exercise, exercise.spec.truth)))
    forkserver.drop(forkserver.running())
    nothing_reached(stranger, temp, harm)
    return found


def test_a_stranger_reaches_nothing_of_a_check(temp, tmp_path):
    """Stores, gloo's ports, folders, a lock on the temporary one, planted modules, processes."""
    assert scene(checks, temp, tmp_path) == ["TODO 4.2 done", "TODO 0.2 done"]


JOB = """
import time
import torch.distributed as dist
from manyhands.ranks.runtime import distributed

end_s, told = time.monotonic() + 1.5, [False, False]
with distributed("cpu") as world:
    while not all(told):
        dist.all_gather_object(told, time.monotonic() > end_s)
        time.sleep(0.01)
    print(f"rank {world.rank} done")  # in one piece: both ranks write into one pipe
"""


def job(temp: Path, harm: Path, script: Path) -> tuple[int, str]:
    """A job on this machine, beside a stranger."""
    use(temp)
    words = [sys.executable, ROOT / "scripts" / "launch.py", script]
    with Stranger(temp, harm) as stranger:
        done = subprocess.run(
            words, env=environment(), capture_output=True, text=True, timeout=400, check=False
        )
    nothing_reached(stranger, temp, harm)
    return done.returncode, done.stdout + done.stderr


def test_a_stranger_reaches_nothing_of_a_job(temp, tmp_path):
    """Neither the store in which torchrun's agents share a pickle, nor that of the ranks."""
    (tmp_path / "harm").mkdir()
    (tmp_path / "job.py").write_text(JOB)
    code, said = scene(job, temp, tmp_path / "harm", tmp_path / "job.py")
    assert code == 0 and "rank 0 done" in said and "rank 1 done" in said, said


def gather() -> list:
    told = [None, None]
    dist.all_gather_object(told, dist.get_rank())
    return told


def posed(temp: Path, harm: Path) -> list[str]:
    """What becomes of calls while a stranger says the numbers of ranks to every port."""
    use(temp)
    found = []
    with Stranger(temp, harm, numbers=range(3)) as stranger:
        for _ in range(15):
            try:
                found.append(str(run_ranks(gather, 2, timeout_s=10, quiet=True)))
            except MachineFault as fault:
                found.append(str(fault))
    assert os.listdir(harm) == [] and not stranger.seen["peers"], stranger.seen
    return found


def test_a_stranger_who_poses_as_a_rank_is_found_out(temp, tmp_path):
    """He can be quicker than the rank; then the call ends, and says so."""
    for told in scene(posed, temp, tmp_path):
        assert told == "[[0, 1], [0, 1]]" or "another user of this machine" in told


def connect_as_a_stranger(port: int, hears: object) -> None:
    os.setuid(USER)
    with socket.socket() as one:
        one.connect(("127.0.0.1", port))
        hears.recv()


def test_a_connection_to_another_user_is_no_connection_to_a_rank():
    """Others may connect besides; what counts is who is listened to."""
    ours, its = FORK.Pipe()
    with socket.create_server(("127.0.0.1", 0)) as server, select.epoll() as epoll:
        peers.refuse_strangers(0)
        his = FORK.Process(target=connect_as_a_stranger, args=(server.getsockname()[1], its))
        his.start()
        server.settimeout(20)
        theirs, _ = server.accept()
        with theirs, socket.create_connection(server.getsockname()) as mine, server.accept()[0]:
            epoll.register(theirs.fileno(), select.EPOLLIN)
            epoll.register(mine.fileno(), select.EPOLLIN | select.EPOLLONESHOT)
            with pytest.raises(peers.Stranger, match="in the place of a rank"):
                peers.refuse_strangers(1)
            peers._known.clear()
            epoll.modify(mine.fileno(), select.EPOLLIN)
            peers.refuse_strangers(1)
            ours.send("end")
            his.join()


def test_a_room_is_open_to_its_user_alone_and_goes(tmp_path):
    with private.made_room() as room:
        assert room.stat().st_mode & 0o777 == 0o700 and room.stat().st_uid == os.getuid()
        (room / "store").touch()
    assert not room.exists()
    private.clear(tmp_path)  # what somebody has put into the variable is left alone
    assert tmp_path.exists()
