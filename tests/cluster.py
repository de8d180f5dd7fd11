"""A real Slurm cluster for tests, thrown away after them. The script beside this file makes it."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

SCRIPT = Path(__file__).with_name("cluster.sh")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip")
INSTALL = "apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge iproute2"
# A test may itself run in a job of another cluster, or of this one.
INHERITED = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_")


def missing() -> str:
    """What is not installed here and how to get it, in one line; empty where all is there."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    absent = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return f"Slurm is not installed ({', '.join(absent)}): {INSTALL}" if absent else ""


class Cluster:
    """A cluster that is up from its making to `down`, or to the end of this process.

    Its commands run on the login node, where the file system is this machine's. They get this
    process's environment without what another job has set, and `env` on top of it.
    """

    def __init__(self, *options: str) -> None:
        """Start it; `options` are those of `up`, as "-n", "3". RuntimeError where it fails."""
        up = self._call("up", "--owner", str(os.getpid()), *options, timeout_s=120)
        if up.returncode:
            raise RuntimeError(up.stderr)
        self.dir = Path(up.stdout.strip())
        self.nodes = self._script("nodes").split()
        self.mode = (self.dir / "cluster.env").read_text().split()[0].removeprefix("MODE=")

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    # ---- commands ------------------------------------------------------------------------------

    def run(self, *command: object, **how: object) -> str:
        """Run a command; its standard output, stripped. RuntimeError where it fails.

        Args:
            how: cwd, env (on top of the environment) and timeout_s (60).
        """
        return self._script("run", *command, **how)

    def outcome(self, *command: object, **how: object) -> subprocess.CompletedProcess:
        """Run a command that may fail; its `returncode`, `stdout` and `stderr`."""
        return self._call("run", self.dir, *command, **how)

    def sbatch(self, *arguments: object, **how: object) -> str:
        """Submit a job; its number."""
        return self.run("sbatch", "--parsable", *arguments, **how)

    def wait(self, job: str, seconds: float = 120) -> str:
        """Wait until a job is over; its final state. RuntimeError after `seconds`."""
        return self._script("wait", job, int(seconds), timeout_s=seconds + 30)

    def state(self, job: str) -> str:
        """A job's state now, as PENDING; empty where there is no such job."""
        return self.outcome("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").stdout.strip()

    def until(
        self, condition: Callable[[], object], seconds: float = 60, every_s: float = 0.1
    ) -> object:
        """Wait until `condition()` is true and return its value. TimeoutError after `seconds`."""
        deadline_s = time.monotonic() + seconds
        while not (value := condition()):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not within {seconds} s:\n{self.run('squeue', '-t', 'all')}")
            time.sleep(every_s)
        return value

    # ---- nodes ---------------------------------------------------------------------------------

    def on(self, node: str, *command: object, **how: object) -> subprocess.CompletedProcess:
        """Run a command that may fail on a node, as if logged in there."""
        return self._call("on", self.dir, node, *command, **how)

    def crash(self, node: str) -> None:
        """Cut a node's power, and let Slurm know at once what else it sees after half a minute."""
        self._script("crash", node)
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=power")

    def boot(self, node: str, seconds: float = 30) -> None:
        """Switch a node on and wait until jobs can run there."""
        self._script("boot", node)
        self.until(lambda: self.node_state(node) in ("idle", "mixed", "allocated"), seconds)

    def node_state(self, node: str) -> str:
        """A node's state in Slurm's words, as idle or down."""
        return self.run("sinfo", "-h", "-p", "debug", "-n", node, "-o", "%T")

    def idle(self) -> int:
        """How many nodes have nothing to do."""
        return int(self.run("sinfo", "-h", "-p", "debug", "-t", "idle", "-o", "%D") or 0)

    # ---- the controller ------------------------------------------------------------------------

    def kill_controller(self) -> None:
        """Kill slurmctld; jobs go on, and Slurm's commands fail until it starts again."""
        self._script("_kill_controller")

    def start_controller(self, seconds: float = 60) -> None:
        """Start slurmctld again, from what it has written down, and wait until it answers."""
        self._script("_restart_controller")
        self.until(lambda: self.outcome("scontrol", "ping").returncode == 0, seconds)

    def down(self) -> None:
        """End the jobs, the daemons and the networks, and delete the folder."""
        self._script("down")

    # ---- the script ----------------------------------------------------------------------------

    def _script(self, action: str, *words: object, **how: object) -> str:
        done = self._call(action, self.dir, *words, **how)
        if done.returncode:
            said = f"{done.stdout}{done.stderr}"
            raise RuntimeError(f"{action} {words} ended with {done.returncode}:\n{said}")
        return done.stdout.strip()

    def _call(
        self,
        *words: object,
        cwd: str | Path | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float = 60,
    ) -> subprocess.CompletedProcess:
        ours = {name: value for name, value in os.environ.items() if not name.startswith(INHERITED)}
        return subprocess.run(
            [str(SCRIPT), *map(str, words)],
            cwd=cwd,
            env=ours | (env or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
