"""Kill ranks and nodes of a training job on a Slurm cluster, and the cluster's controller, and see
that nothing is lost.

    python tests/chaos.py --kills 50 --seed 1

A job of two nodes trains on a cluster of four that the script makes for itself. At a random step
either a rank gets SIGKILL, so that the job fails and the same command is submitted again, or a
node loses its power, so that Slurm puts the job back into the queue and runs it on other nodes, or
the controller is killed and started again, of which the job must not take any notice. Every life
has to go on from the newest whole checkpoint, and the last one has to end with the weights, bit for
bit, of a job that nothing happened to.

Exit codes: 0, or 1 when something was lost or left.
"""

import argparse
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from cluster import Cluster, missing
from commands import flags, left_behind, losses, make_clone

SAVE_EVERY = 7
STEPS_A_KILL = 60  # on average, from one kill to the next
RANKS_A_NODE = 1
KINDS = ("rank", "node", "controller")
OVER = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")


class Lost(Exception):
    """What a kill has cost that it should not have."""


def expect(condition: object, words: str) -> None:
    if not condition:
        raise Lost(words)


class Run:
    """A run of the course's main job on two nodes, over all its lives."""

    def __init__(self, cluster: Cluster, clone: Path, name: str, steps: int) -> None:
        self.cluster, self.clone, self.steps = cluster, clone, steps
        self.out, self.log = clone / name, clone / f"{name}.log"
        self.submit()

    def submit(self) -> None:
        """Submit the command; after a death, the same again."""
        env = {"RANKS": str(RANKS_A_NODE), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
        what = flags(self.clone, out=self.out, steps=self.steps, save_every=SAVE_EVERY, block=32)
        job = ["--nodes=2", f"--output={self.log}", "sbatch/ddp.sbatch", *what]
        self.job = self.cluster.sbatch(*job, cwd=self.clone, env=env)

    def step(self) -> int:
        """The last step that was written down."""
        try:
            with open(self.out / "metrics.jsonl", "rb") as file:
                file.seek(max(0, file.seek(0, 2) - 2000))
                *whole, _ = file.read().split(b"\n")
        except FileNotFoundError:
            return 0
        return json.loads(whole[-1])["step"] if whole else 0

    def checkpoint(self) -> int:
        """The step of the newest whole checkpoint."""
        names = (path.parent.name for path in self.out.glob("checkpoints/step-*/index.json"))
        return max(int(name[5:]) for name in names if name[5:].isdigit())

    def resumed(self) -> list[int]:
        """Where each life but the first began, by the job's own words."""
        said = self.log.read_text() if self.log.exists() else ""
        return [int(step) for step in re.findall(r"resumed \S+ at step (\d+) of", said)]

    def processes(self) -> list[psutil.Process]:
        """All that the job has started, on all nodes."""
        found = psutil.process_iter(["cmdline", "environ"])
        return [process for process in found if str(self.out) in (process.info["cmdline"] or [])]

    def ranks(self) -> dict[str, psutil.Process]:
        """Rank -> process."""
        environs = ((process, process.info["environ"] or {}) for process in self.processes())
        return {own["RANK"]: process for process, own in environs if "RANK" in own}

    def nodes(self) -> list[str]:
        """Where the job runs."""
        listed = self.cluster.run("squeue", "-h", "-j", self.job, "-o", "%N")
        return self.cluster.run("scontrol", "show", "hostnames", listed).split()

    def wait_for_step(self, step: int, seconds: float = 180) -> None:
        """Wait until `step` is done; looks so often that few more are done by then."""
        deadline_s = time.monotonic() + seconds
        while self.step() < step:
            expect(time.monotonic() < deadline_s, f"no step {step} within {seconds} s")
            time.sleep(0.002)


def kill_the_controller(run: Run, step: int, number: int) -> None:
    """Kill Slurm's controller at `step`: the job goes on without it, and is known to the next."""
    run.wait_for_step(step)
    expect(run.step() < run.steps, "the run was done before the kill")
    job, lives, processes = run.job, len(run.resumed()), {one.pid for one in run.processes()}
    run.cluster.kill_controller()
    last = run.step()
    run.wait_for_step(last + 2)
    run.cluster.start_controller()
    run.cluster.until(lambda: run.cluster.state(job) == "RUNNING", 60)
    expect({one.pid for one in run.processes()} == processes, "the job's processes have changed")
    expect((run.job, len(run.resumed())) == (job, lives), "the job began a new life")
    print(
        f"{number:2d}. the controller killed after step {last} and started again: the job trained "
        f"on, at step {run.step()} now",
        flush=True,
    )


def strike(run: Run, kind: str, step: int, draw: random.Random) -> str:
    """At `step`, kill a random rank or a random node of the job; says which."""
    rank, process = draw.choice(sorted(run.ranks().items()))
    node = draw.choice(run.nodes())
    run.wait_for_step(step)
    expect(run.step() < run.steps, "the run was done before the kill")
    if kind == "rank":
        process.kill()
        return f"rank {rank}"
    run.cluster.crash(node)
    return node


def next_life(run: Run, kind: str) -> tuple[int, int]:
    """Wait until a life is over, see what it has left, and have the next one queue.

    Returns the last step of the old life and that of its newest checkpoint.
    """
    cluster = run.cluster
    _, alive = psutil.wait_procs(run.processes(), timeout=20)
    expect(not alive, f"{len(alive)} processes outlived the kill by 20 s")
    cluster.until(lambda: cluster.state(run.job) in (*OVER, "PENDING"), 30)
    last, saved = run.step(), run.checkpoint()
    # The line of a step is there before its checkpoint is.
    at_most = last % SAVE_EVERY or SAVE_EVERY
    expect(last - saved <= at_most, f"killed after step {last}, and step {saved} is the last saved")
    state = cluster.state(run.job)
    if state in OVER:
        expect(state in ("FAILED", "NODE_FAIL"), f"the job ended as {state}")
        run.submit()
    else:
        expect(kind == "node", "a job that lost a rank is in the queue again")
    return last, saved


def kill_once(run: Run, kind: str, step: int, draw: random.Random, number: int) -> float:
    """One kill and the life after it, in one line; the seconds until the job trained again."""
    lives = len(run.resumed()) + 1
    what = strike(run, kind, step, draw)
    killed_s = time.monotonic()
    old = (run.out / "metrics.jsonl").stat().st_ino
    job = run.job
    last, saved = next_life(run, kind)
    how = "submitted again" if run.job != job else "queued again by Slurm"
    run.cluster.until(lambda: len(run.resumed()) >= lives, 180)
    expect(len(run.resumed()) == lives, f"{len(run.resumed())} lives instead of {lives}")
    resumed = run.resumed()[-1]
    expect(resumed == saved, f"resumed at step {resumed}, but step {saved} was saved")
    # The new life begins with a new file.
    run.cluster.until(lambda: (run.out / "metrics.jsonl").stat().st_ino != old, 30)
    run.wait_for_step(saved + 1)
    seconds = time.monotonic() - killed_s
    print(
        f"{number:2d}. {what} killed after step {last}: {how}, resumed at step {resumed}, "
        f"training again after {seconds:.1f} s",
        flush=True,
    )
    if kind == "node":
        run.cluster.boot(what)
    return seconds


def finish(run: Run, calm: Run) -> None:
    """Wait for both runs to end, and compare them."""
    said = run.log.read_text()
    expect("Traceback" not in said, f"a traceback in the log:\n{said[-4000:]}")
    for one in (calm, run):
        state = one.cluster.wait(one.job, 120)
        expect(state == "COMPLETED", f"the job ended as {state}:\n{one.log.read_text()[-2000:]}")
        alive = left_behind(one.clone) if one is run else []
        expect(not alive, f"{len(alive)} processes left: {alive}")
    expect(losses(run.out) == losses(calm.out), "the losses differ from the undisturbed run's")
    ours, theirs = ((one.out / "model.pt").read_bytes() for one in (run, calm))
    expect(ours == theirs, "the final weights differ from the undisturbed run's")


def chaos(cluster: Cluster, clone: Path, num_kills: int, draw: random.Random) -> None:
    """The undisturbed run and the disturbed one, at the same time, and all kills."""
    steps = STEPS_A_KILL * (num_kills + 1)
    calm, run = (Run(cluster, clone, name, steps) for name in ("calm", "run"))
    kinds = [KINDS[number % len(KINDS)] for number in range(num_kills)]
    draw.shuffle(kinds)
    at = sorted(draw.sample(range(SAVE_EVERY + 1, steps - STEPS_A_KILL), num_kills))
    run.wait_for_step(1)
    seconds = []
    for number, (kind, step) in enumerate(zip(kinds, at, strict=True), start=1):
        step = max(step, run.step() + 1)
        if kind == "controller":
            kill_the_controller(run, step, number)
        else:
            seconds.append(kill_once(run, kind, step, draw, number))
    finish(run, calm)
    killed = ", ".join(
        f"{number} {kind}{'s' * (number > 1)}" for kind, number in sorted(Counter(kinds).items())
    )
    print(
        f"{num_kills} kills ({killed}): {len(seconds)} resumed "
        f"after {statistics.median(seconds):.1f} s (median) and {max(seconds):.1f} s (longest), "
        f"final weights bit-identical to the undisturbed run's, 0 steps lost beyond the last "
        f"checkpoint, 0 tracebacks, 0 processes left"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=random.randrange(1000))
    parser.add_argument("--mode", default="auto", help="of the cluster: netns, userns or ports")
    options = parser.parse_args()
    if reason := missing():
        print(reason, file=sys.stderr)
        return 1
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        clone = make_clone(Path(folder))
        with Cluster("-n", "4", "--mode", options.mode) as cluster:
            try:
                chaos(cluster, clone, options.kills, random.Random(options.seed))
            except (Lost, RuntimeError, TimeoutError) as problem:
                print(f"chaos: {problem}", file=sys.stderr)
                said = clone / "run.log"  # the clone goes, and with it what the job has said
                print(said.read_text()[-4000:] if said.exists() else "", file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
