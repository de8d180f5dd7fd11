"""The test cluster: nodes apart, GPUs to count, refusals, and nothing left of it."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from cluster import INSTALL, SCRIPT, Cluster

HELLO = "import socket, os; print(socket.gethostname(), os.environ['SLURM_PROCID'])"


def wrapped(*lines: str) -> str:
    return "--wrap=" + "\n".join(lines)


def traces(folder: Path) -> list[str]:
    """Processes that know this cluster's folder: by command line, environment or open file."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ", "open_files"]):
        words = process.info["cmdline"] or []
        known = [*words, *(process.info["environ"] or {}).values()]
        known += [file.path for file in process.info["open_files"] or []]
        if any(str(folder) in one for one in known):
            found.append(" ".join(words) or process.name())
    return found


def links() -> str:
    """The network cards of this machine."""
    return subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True).stdout


def assert_gone(folder: Path, links_before: str, seconds: float = 10) -> None:
    deadline_s = time.monotonic() + seconds
    while (left := traces(folder)) or folder.exists():
        assert time.monotonic() < deadline_s, left or folder
        time.sleep(0.1)
    assert links() == links_before


# ---- what jobs find ----------------------------------------------------------------------------


def test_two_nodes_say_hello(slurm, tmp_path):
    hello = wrapped(f'srun {sys.executable} -c "{HELLO}"')
    job = slurm.sbatch("-N2", "-o", "out", hello, cwd=tmp_path)
    assert slurm.wait(job) == "COMPLETED"
    hosts, ranks = zip(*(line.split() for line in (tmp_path / "out").open()), strict=True)
    assert sorted(ranks) == ["0", "1"]
    if slurm.mode == "ports":
        assert set(hosts) == {os.uname().nodename}
    else:
        assert sorted(hosts) == slurm.nodes[:2]


def test_gpus_are_counted_and_shared_out(slurm, tmp_path):
    """Two jobs on a node get different GPUs; a job of two nodes gets its number on each."""
    tell = wrapped("srun sh -c 'echo \"$CUDA_VISIBLE_DEVICES $SLURM_GPUS_ON_NODE\"; sleep 1'")
    asked = {"one": ["--gpus-per-node=1"], "three": ["--gpus-per-node=3"]}
    where = ["-w", slurm.nodes[0]]
    jobs = [slurm.sbatch("-o", name, *where, *asked[name], tell, cwd=tmp_path) for name in asked]
    jobs += [slurm.sbatch("-o", "eight", "-N2", "--gpus-per-node=4", tell, cwd=tmp_path)]
    assert [slurm.wait(job) for job in jobs] == ["COMPLETED"] * 3
    one, three, eight = ((tmp_path / name).read_text() for name in ("one", "three", "eight"))
    devices = one.split()[0].split(",") + three.split()[0].split(",")
    assert sorted(devices) == ["0", "1", "2", "3"]
    assert (one.split()[1], three.split()[1], eight) == ("1", "3", "0,1,2,3 4\n" * 2)


TOO_MUCH = "node configuration is not available|can not be satisfied|Node count specification"
REFUSED = {
    "--gpus-per-node=5": TOO_MUCH,
    "--gpus-per-node=a100:1": TOO_MUCH,
    "--nodes=9": TOO_MUCH,
    "--cpus-per-task=33": TOO_MUCH,
    "--mem=900G": TOO_MUCH,
    "--partition=gpu-long": "invalid partition specified: gpu-long",
    "--account=wrong": "Invalid account",
    "--partition=batch --account=wrong": "Invalid account",
    "--partition=batch": "Invalid account",
    "--time=soon": "Invalid --time specification",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_a_request_that_cannot_be_met_is_refused(slurm, flags):
    done = slurm.outcome("sbatch", *flags.split(), "--wrap=true")
    assert done.returncode and re.search(REFUSED[flags], done.stderr)


def test_what_is_there_is_granted(slurm):
    """The requests above are refused for what they ask, not for how."""
    words = ["--gpus-per-node=h100:4", "--nodes=3", "--cpus-per-task=32", "--mem=480G", "--time=5"]
    for where in ([], ["--account=course"], ["--partition=batch", "--account=course"]):
        slurm.run("sbatch", "--test-only", *words, *where, "--wrap=true")


LISTEN = """
    import socket, sys, time
    server = socket.create_server((sys.argv[1], 0))
    print(server.getsockname()[1], flush=True)
    time.sleep(60)
"""
REACH = """
    import socket, sys
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5)
"""


def test_localhost_is_each_nodes_own(slurm, tmp_path):
    """A rendezvous at localhost fails, as on a real cluster; one at the node's name does not."""
    if slurm.mode == "ports":
        pytest.skip("in mode ports the nodes share one loopback")
    first, second = slurm.nodes[:2]
    for script, text in (("listen.py", LISTEN), ("reach.py", REACH)):
        (tmp_path / script).write_text(textwrap.dedent(text))

    def reach(node: str, host: str, port: str) -> str:
        return slurm.on(node, sys.executable, tmp_path / "reach.py", host, port).stderr

    for host in ("localhost", first):
        listen = wrapped(f"exec {sys.executable} listen.py {host}")
        job = slurm.sbatch("-w", first, "-o", host, listen, cwd=tmp_path)
        said = tmp_path / host
        port = slurm.until(lambda said=said: said.exists() and said.read_text().strip(), 20)
        assert reach(first, host, port) == ""
        refused = "ConnectionRefusedError" in reach(second, host, port)
        assert refused == (host == "localhost")
        slurm.run("scancel", job)


def test_a_node_without_power_comes_back(slurm, tmp_path):
    """Its job is put back and runs elsewhere; after `boot` the node takes jobs again."""
    victim = slurm.nodes[1]
    script = 'echo "life ${SLURM_RESTART_COUNT:-0}"; sleep 60'
    lives, flags = tmp_path / "lives", ["--requeue", "--open-mode=append", "-o", "lives"]
    job = slurm.sbatch("-w", victim, *flags, wrapped(script), cwd=tmp_path)
    slurm.until(lambda: lives.exists() and "life 0" in lives.read_text())
    slurm.crash(victim)
    assert slurm.node_state(victim) == "down" and slurm.idle() == 2
    slurm.until(lambda: slurm.state(job) == "PENDING", 10)
    slurm.boot(victim)
    slurm.until(lambda: "life 1" in lives.read_text(), 90)  # Slurm keeps a pause before it
    slurm.run("scancel", job)
    assert slurm.wait(job, 20) == "CANCELLED"
    slurm.until(lambda: slurm.idle() == 3, 20)


# ---- what is left ------------------------------------------------------------------------------


# A job that starts something in a session of its own, where Slurm does not find it so easily.
HIDING = wrapped("setsid sleep 300 & touch begun; srun sleep 300")


def test_two_clusters_at_once_and_nothing_left(slurm_installed, tmp_path):
    before = links()
    one, two = Cluster("-n", "1"), Cluster("-n", "2")
    assert one.run("srun", "echo", "one") == "one"
    assert two.run("srun", "-N2", "echo", "two") == "two\ntwo"
    one.sbatch(HIDING, cwd=tmp_path)
    one.until((tmp_path / "begun").exists, 20)
    for cluster in (one, two):
        assert len(traces(cluster.dir)) > 5
        cluster.down()
        assert_gone(cluster.dir, before, seconds=1)
        if cluster is one:
            assert two.run("srun", "-N2", "echo", "two") == "two\ntwo"


def test_mode_ports(slurm_installed, tmp_path):
    """Without any privilege: nodes side by side, each with its own daemon."""
    before = links()
    with Cluster("-n", "2", "--mode", "ports") as cluster:
        assert cluster.mode == "ports" and cluster.nodes == ["127.0.77.1", "127.0.77.2"]
        tell = wrapped("scontrol show hostnames", "srun sh -c 'echo $SLURMD_NODENAME'")
        job = cluster.sbatch("-N2", "--gpus-per-node=4", "-o", "out", tell, cwd=tmp_path)
        assert cluster.wait(job) == "COMPLETED"
        said = (tmp_path / "out").read_text().split()
        assert said[:2] == sorted(said[2:]) == cluster.nodes
        cluster.crash(cluster.nodes[1])
        assert (cluster.node_state(cluster.nodes[1]), cluster.idle()) == ("down", 1)
        cluster.boot(cluster.nodes[1])
        cluster.sbatch(HIDING, cwd=tmp_path)
        cluster.until((tmp_path / "begun").exists, 20)
    assert_gone(cluster.dir, before, seconds=1)


OWNER = """
    import sys, time
    from cluster import Cluster
    cluster = Cluster("-n", "1", "--mode", sys.argv[1])
    cluster.sbatch(sys.argv[2])
    print(cluster.dir, flush=True)
    time.sleep(300)
"""


@pytest.mark.parametrize("mode", ["auto", "ports"])
def test_nothing_left_when_the_owner_is_killed(slurm_installed, tmp_path, mode):
    before = links()
    words = [sys.executable, "-c", textwrap.dedent(OWNER), mode, HIDING]
    env = os.environ | {"PYTHONPATH": str(SCRIPT.parent)}
    with subprocess.Popen(words, env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as owner:
        folder = Path(owner.stdout.readline().strip())
        deadline_s = time.monotonic() + 20
        while not (tmp_path / "begun").exists() and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert len(traces(folder)) > 5
        owner.kill()
    try:
        assert_gone(folder, before)
    finally:
        if folder.exists():
            subprocess.run([SCRIPT, "down", folder], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_plain_user_gets_a_cluster_too(slurm_installed):
    """In user namespaces where the kernel has them, else in mode ports."""
    home = Path(tempfile.mkdtemp())  # pytest's folders are closed to others
    try:
        home.chmod(0o755)
        for path in (SCRIPT, SCRIPT.with_name("slurm.conf.in")):
            shutil.copy(path, home)
        script = (
            "D=$(./cluster.sh up -n 2) && ./cluster.sh run $D srun -N2 id -u; ./cluster.sh down $D"
        )
        words = [
            "setpriv",
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            "bash",
            "-c",
            script,
        ]
        done = subprocess.run(words, cwd=home, capture_output=True, text=True, timeout=60)
        assert done.stdout.split() == ["65534"] * 2, done.stderr
    finally:
        shutil.rmtree(home)


# ---- the fixture -------------------------------------------------------------------------------


def test_without_slurm_tests_are_skipped_or_fail_with_the_command(tmp_path):
    """The same fixture where a program is missing, on a machine's own terms and in CI."""
    shutil.copy(SCRIPT.with_name("conftest.py"), tmp_path)
    text = SCRIPT.with_name("cluster.py").read_text()
    (tmp_path / "cluster.py").write_text(text.replace('"slurmd"', '"no-slurmd"'))
    (tmp_path / "test_it.py").write_text("def test_it(slurm): ...\n")
    words = [sys.executable, "-m", "pytest", "-rA", "-p", "xdist.plugin", "test_it.py"]
    env = os.environ | {
        "PYTHONPATH": f"{tmp_path}:{SCRIPT.parent}",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    for wish, outcome in (("", "1 skipped"), ("required", "1 error")):
        env["MANYHANDS_SLURM"] = wish
        done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert outcome in done.stdout and done.returncode == (wish == "required")
        assert f"Slurm is not installed (no-slurmd): {INSTALL}" in done.stdout


GROUP = """
    import os, pathlib, pytest, time

    @pytest.mark.xdist_group("slurm")
    @pytest.mark.parametrize("number", range(3))
    def test_it(number):
        time.sleep(0.2)
        pathlib.Path(f"{os.getpid()}.pid").touch()
"""


def test_tests_of_a_group_have_one_worker(tmp_path):
    """Else each of pytest's workers would start a cluster, and nothing would tell."""
    for name in ("test_one.py", "test_two.py"):
        (tmp_path / name).write_text(textwrap.dedent(GROUP))
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:nbval"]
    words += ["-n", "2", "--dist", "loadgroup"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert "6 passed" in done.stdout, done.stdout
    assert len(list(tmp_path.glob("*.pid"))) == 1
