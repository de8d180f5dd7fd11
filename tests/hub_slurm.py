"""The hub whose servers are jobs of Slurm, on a cluster made for it: `python tests/hub_slurm.py`.

The hub of sbatch/hub/slurm_config.py runs on the login node. A student without a browser logs in
there, gets a kernel on a compute node, has an exercise checked, and submits a job from it. All is
in namespaces of its own, as in tests/hub.py, and ends with this program.
"""

import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

import cluster
import hub_class
import hub_scene
from hub_scene import NAMESPACES, ROOT, password

INSIDE = "MANYHANDS_HUB_INSIDE"
STUDENT = "ann"
PORT = 8000  # of a network of the cluster's own
URL = f"http://login:{PORT}"
START_S = 120
WHERE = "import os; print(os.uname().nodename, os.environ['SLURM_JOB_NAME'])"


def evening() -> None:
    """On the login node: the student's way through; raises AssertionError."""
    begin_s = time.monotonic()

    def done(step: str) -> None:
        print(f"{STUDENT}: {step}, {time.monotonic() - begin_s:.0f} s", flush=True)

    one = hub_class.Student(URL, STUDENT, password(STUDENT))
    one.log_in()
    one.open()
    _, said = one.run(WHERE)
    assert "node" in said and "notebook" in said, said
    done("has a kernel in a job on a node")
    one.run(hub_class.FIRST_CELL)
    _, said = one.run(hub_class.CHECK)
    assert "TODO 4.2 done" in said, said
    done("has a right answer")
    _, said = one.run(hub_class.JOB)
    assert "job ended" in said, said
    done("has submitted a job from it, which ended")


def inside() -> None:
    """In the namespaces: the cluster, the hub on its login node, and the student."""
    folder, seen = hub_scene.set_scene([STUDENT], ROOT / "runs/hub")
    folder.chmod(0o700)
    environ = {"HUB_URL": f"http://0.0.0.0:{PORT}"}
    with cluster.Cluster("-n", "2") as slurm, open(seen / "slurm.log", "w") as log:
        words = [cluster.SCRIPT, "run", slurm.dir, Path(sys.prefix) / "bin/jupyterhub"]
        words += ["-f", ROOT / "sbatch/hub/slurm_config.py"]
        ours = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        hub = subprocess.Popen(
            [str(word) for word in words], cwd=folder, env=ours | environ, stdout=log, stderr=log
        )
        try:
            ask = ("curl", "-sf", "-o", "/dev/null", f"{URL}/hub/login")
            slurm.until(lambda: slurm.outcome(*ask).returncode == 0, START_S, every_s=1)
            print(slurm.run(sys.executable, __file__, "--student", timeout_s=1800))
            jobs = slurm.run("squeue", "-h", "-t", "all", "-o", "%j %u %T").splitlines()
            print("; ".join(jobs))
            assert {f"notebook {STUDENT} RUNNING", f"collectives {STUDENT} COMPLETED"} <= {*jobs}
        finally:
            hub.terminate()
            hub.wait(60)


def main() -> int:
    """Go into namespaces of our own, and act there."""
    if "--student" in sys.argv:
        evening()
        return 0
    if INSIDE in os.environ:
        try:
            inside()
        except Exception:
            traceback.print_exc()
            return 1
        return 0
    if reason := cluster.missing() or hub_scene.why_not(without_hub=True):
        print(f"hub_slurm.py: {reason}", file=sys.stderr)
        return 2
    (ROOT / "runs/hub").mkdir(parents=True, exist_ok=True)
    command = [*NAMESPACES, sys.executable, *sys.argv]
    return subprocess.run(command, env={**os.environ, INSIDE: "1"}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
