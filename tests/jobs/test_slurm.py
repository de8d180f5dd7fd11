"""The job files on a real Slurm: accepted, run, signalled, queued again, and told what is wrong."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import train_ddp
from cluster import Cluster
from commands import ROOT, environment, flags, losses, make_clone, settings
from manyhands.gpu.jobs import flags as short_runs
from manyhands.ranks.lab import run_ranks

JOB_FILES = sorted(path.name for path in (ROOT / "sbatch").glob("*.sbatch"))
SHORT = {"batch": 6, "steps": 12}
LONG = {"layers": 2, "block": 32, "batch": 12, "steps": 240, "save_every": 20, "impl": "scratch"}
PAUSE_S = 0.04  # after each step of a job, so that something can happen to it before its end
ONE_RANK = {"RANKS": "1", "PYTHON": sys.executable}
ONE_GPU = "--gpus-per-node=1"  # several jobs fit on a node


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The course's folder, where training does not hurry: a wait costs no processor time."""
    clone = make_clone(tmp_path_factory.mktemp("clone"))
    path, line = clone / "scripts/manyhands/training/run.py", "        self.step += 1\n"
    text = path.read_text()
    assert text.count(line) == 1
    path.write_text(text.replace(line, f"{line}        time.sleep({PAUSE_S})\n"))
    return clone


@dataclass(frozen=True)
class Job:
    """A job that was submitted, and where it leaves its things."""

    id: str
    log_file: Path
    out: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def steps(self) -> int:
        path = self.out / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def state(self) -> str:
        return json.loads((self.out / "status.json").read_text())["state"]


def submit(
    slurm: Cluster, clone: Path, word: str, *options: str, ranks: int = 1, env: dict | None = None
) -> Job:
    """Submit a job file as a person does from the course's folder; options may hold flags."""
    ours = {"RANKS": str(ranks), "PYTHON": sys.executable, **(env or {})}
    names = [option for option in options if option.endswith(".sbatch")]
    words = options if names else (*options, f"sbatch/{word}.sbatch")
    job = slurm.sbatch(*words, cwd=clone, env=ours)
    return Job(job, clone / f"{word}-{job}.out", clone / "runs" / f"{word}-{job}")


def ddp(slurm: Cluster, clone: Path, *options: str, ranks: int = 1, **changes: object) -> Job:
    words = (*options, "sbatch/ddp.sbatch", *flags(clone, **changes))
    return submit(slurm, clone, "ddp", *words, ranks=ranks)


def undisturbed(clone: Path, out: Path, **changes: object) -> Path:
    """The same run on two ranks of a fork server, without any launcher."""
    config = train_ddp.Config(**settings(clone, out=str(out), **changes))
    run_ranks(train_ddp.main, 2, config, join=False, quiet=True, timeout_s=90)
    return out


def assert_same_weights(run: Path, calm: Path) -> None:
    assert losses(run) == losses(calm)
    assert (run / "model.pt").read_bytes() == (calm / "model.pt").read_bytes()


# ---- the files themselves ----------------------------------------------------------------------


def unread_lines(slurm: Cluster, path: Path) -> list[str]:
    """The lines of a job file that look like Slurm's, and that sbatch did not take as they stand.

    It lists what it took: `gpus-per-node       : 4`.
    """
    told = slurm.outcome("sbatch", "-v", "--test-only", path, cwd=path.parent).stderr
    taken = dict(re.findall(r"^sbatch: ([a-z-]+) +: (\S+)$", told, re.MULTILINE))
    unread = []
    for line in path.read_text().splitlines():
        if not re.match(r"\s*#\s*SBATCH", line):
            continue
        name, _, value = line.removeprefix("#SBATCH --").partition("=")
        # sbatch shortens "append", makes paths whole and says "requeue : requeue".
        if not taken.get(name, "-").endswith({"append": "a"}.get(value, value)):
            unread.append(line)
    return unread


@pytest.mark.parametrize("name", JOB_FILES)
def test_slurm_reads_and_accepts_a_job_file(slurm, tmp_path, name):
    path = ROOT / "sbatch" / name
    assert unread_lines(slurm, path) == []
    for num_nodes in (1, 2):
        slurm.run("sbatch", "--test-only", f"--nodes={num_nodes}", path)
    assert slurm.outcome("sbatch", "--test-only", "--nodes=4", path).returncode  # of 3 nodes


BROKEN = {
    "# SBATCH --nodes=2": "#SBATCH --nodes=2",
    "#SBATCH--nodes=2": "#SBATCH --nodes=2",
    " #SBATCH --nodes=2": "#SBATCH --nodes=2",
    "hostname\n#SBATCH --nodes=2": "#SBATCH --nodes=2",
    "#SBATCH --nodes=2\n#SBATCH --nodes=1": "#SBATCH --nodes=2",
}


@pytest.mark.parametrize("line", BROKEN)
def test_a_line_that_slurm_does_not_read_is_seen(slurm, tmp_path, line):
    path = tmp_path / "job.sbatch"
    path.write_text(f"#!/bin/bash\n{BROKEN[line]}\n")
    assert unread_lines(slurm, path) == []
    path.write_text(f"#!/bin/bash\n{line}\n")
    assert [one.strip() for one in unread_lines(slurm, path)] == [line.split("\n")[-1].strip()] or (
        unread_lines(slurm, path) == [line.split("\n")[0]]
    )


def test_shell_scripts_please_shellcheck():
    if shutil.which("shellcheck") is None:
        reason = "shellcheck is not installed: apt-get install -y shellcheck"
        (pytest.fail if os.environ.get("MANYHANDS_SLURM") == "required" else pytest.skip)(reason)
    paths = [*ROOT.glob("*/*.sh"), *ROOT.glob("*/*.sbatch"), *(ROOT / ".ci").glob("[hr]u[bn]")]
    assert len(paths) > 6
    done = subprocess.run(["shellcheck", *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# ---- jobs that nothing happens to --------------------------------------------------------------


@pytest.fixture(scope="module")
def calm_jobs(slurm: Cluster, clone: Path) -> dict[str, Job]:
    """Several at once: two of two nodes on the same nodes, as an array, and others."""
    first, second = slurm.nodes[:2]
    nodes = ("--nodes=2", f"--nodelist={first},{second}", "--gpus-per-node=2")
    empty = {"XDG_CACHE_HOME": str(clone / "empty")}
    no_data = ("sbatch/ddp.sbatch", "--data", "wikitext-2")
    found = {"array": ddp(slurm, clone, "--array=0-1", *nodes, **SHORT)}
    found["no data"] = submit(slurm, clone, "ddp", "--nodes=2", ONE_GPU, *no_data, env=empty)
    words = "--array=3-5 --output=%x-%A_%a.out".split()
    words += [ONE_GPU, "sbatch/batch_size.sbatch", *"--rates 0.4 --networks 1".split()]
    words += "--target 0.5 --device cpu --out runs/mine".split()
    found["batch sizes"] = submit(slurm, clone, "batch_size", *words)
    return found


def test_array_of_two_jobs_of_two_nodes_side_by_side(slurm, clone, calm_jobs, tmp_path):
    array = calm_jobs["array"]
    assert slurm.wait(array.id, 150) == "COMPLETED", [p.read_text() for p in clone.glob("*.out")]
    calm = undisturbed(clone, tmp_path / "calm", **SHORT)
    ran = slurm.run("scontrol", "-o", "show", "job", array.id)
    ids = re.findall(r"^JobId=(\d+) ArrayJobId=\d+ ArrayTaskId=(\d)", ran, re.MULTILINE)
    assert sorted(task for _, task in ids) == ["0", "1"]
    starts, ends = (re.findall(rf"{name}Time=(\S+)", ran) for name in ("Start", "End"))
    assert max(starts) < min(ends), "they ran one after the other"
    for number, task in ids:
        folder = clone / "runs" / f"ddp-{array.id}_{task}"
        job = Job(number, clone / f"ddp-{number}.out", folder)
        assert "2 rank(s) on cpu" in job.log and job.state() == "finished"
        assert f"job {number} is number {task} of array {array.id}" in job.log
        assert "frame #" not in job.log  # torch's words about the node that leaves first
        hosts = [
            rank["host"] for rank in json.loads((job.out / "config.json").read_text())["ranks"]
        ]
        if slurm.mode != "ports":
            assert hosts == slurm.nodes[:2]
        # Over the network as on one machine, up to the order in which gloo adds.
        assert losses(job.out) == pytest.approx(losses(calm), abs=1e-6)
        for rank in (0, 1):
            kept = (job.out / "logs" / f"rank-{rank:05d}.log").read_text()
            assert ("step 12 of 12" in kept) == (rank == 0)
        assert_idle_gpus_are_named(slurm, job.log)


def assert_idle_gpus_are_named(slurm: Cluster, log: str) -> None:
    """Two on each of two nodes; the head node tells of its own also before there are ranks."""
    first, second = map(re.escape, slurm.nodes[:2])
    if slurm.mode == "ports":
        first = second = r"\S+"
    if not torch.cuda.device_count():
        assert re.search(rf"2 GPU\(s\) were granted on {first}, but torch .* sees none", log)
    for node in (first, second):
        assert re.search(rf"^idle: 2 of the 2 GPUs granted on {node} have no rank", log, re.M)


def test_missing_data_is_one_line_and_exit_code_2(slurm, calm_jobs):
    job = calm_jobs["no data"]
    assert slurm.wait(job.id, 150) == "FAILED"
    assert "ExitCode=2:0" in slurm.run("scontrol", "show", "job", job.id)
    ours = [line for line in job.log.splitlines() if not line.startswith(("device:", "srun:"))]
    ours = [line for line in ours if not line.startswith(("slurmstepd", "launch.py:", "idle:"))]
    assert len(ours) == 1 and "Traceback" not in job.log, job.log
    assert "scripts/prepare_data.py --data wikitext-2` where there is internet" in ours[0]


def test_array_of_batch_sizes(slurm, clone, calm_jobs):
    """Each job has its batch size, its log and its folder; the last one sees what all have done."""
    array = calm_jobs["batch sizes"].id
    assert slurm.wait(array, 150) == "COMPLETED", [p.read_text() for p in clone.glob("*_?.out")]
    logs = [(clone / f"batch_size-{array}_{number}.out").read_text() for number in (3, 4, 5)]
    assert any("\n3 of 10 batch sizes are done\n" in log for log in logs), logs
    for number, batch in ((3, 8), (4, 16), (5, 32)):
        about = json.loads((clone / f"runs/mine_{number}/config.json").read_text())
        assert about["config"]["batch"] == batch
    assert not (clone / "runs/mine").exists()
    assert list(clone.glob("runs/mine_?/batch_size.png"))


def test_copies_that_srun_starts_do_not_train_one_by_one(slurm, clone, tmp_path):
    """They refuse, with the command that works."""
    words = [sys.executable, "scripts/train_ddp.py", *flags(clone, **SHORT | {"steps": 2})]
    out = ["--out", str(tmp_path / "run")]
    many = slurm.outcome("srun", "-N1", "-n2", *words, *out, cwd=clone, timeout_s=170)
    said = [line for line in many.stderr.splitlines() if not line.startswith("srun:")]
    assert many.returncode == 2 and len(said) == 1 and not (tmp_path / "run").exists(), many
    assert said[0] == (
        "train_ddp.py: srun started 2 copies of this script, and each would train alone, in the "
        f"same folder; the right command is: RANKS=2 srun -n1 --cpus-per-task=2 {sys.executable} "
        f"scripts/launch.py {shlex.join([*words[1:], *out])}"
    )
    _, right = said[0].split("the right command is: ")
    done = slurm.outcome("bash", "-c", right, cwd=clone, timeout_s=170)
    assert done.returncode == 0 and "2 rank(s) on cpu" in done.stdout, done


def test_a_folder_has_one_writer(slurm, clone, tmp_path):
    """Two steps on two nodes: the second to come is refused in one line.

    The first is a batch script with two tasks, which is one copy and not two.
    """
    words = [sys.executable, "scripts/train_ddp.py", "--out", str(tmp_path / "run")]
    words += flags(clone, **SHORT | {"steps": 100_000})
    command = " ".join(map(shlex.quote, words))
    job = slurm.sbatch("-N1", "-n2", "-o", tmp_path / "log", f"--wrap={command}", cwd=clone)
    slurm.until(lambda: (tmp_path / "run" / "status.json").exists())
    before = (tmp_path / "run" / "config.json").read_bytes()
    second = slurm.outcome("srun", "-N1", *words, cwd=clone, timeout_s=170)
    said = [line for line in second.stderr.splitlines() if not line.startswith("srun:")]
    assert second.returncode == 2 and len(said) == 1, second
    assert re.search(r"--out .*/run is in use by process \d+ on \w+: wait until", said[0])
    assert (tmp_path / "run" / "config.json").read_bytes() == before
    assert "1 rank(s) on cpu" in (tmp_path / "log").read_text()
    slurm.run("scancel", job)


# Jobs that train and that have tasks are tried above, one of each.
OTHER_JOBS = sorted({run.partition(" ")[0] for run in short_runs(2)} - {"ddp", "batch_size"})
OTHERS = [
    pytest.param(word, marks=() if word == "collectives" else pytest.mark.nightly)
    for word in OTHER_JOBS
]


@pytest.fixture(scope="module")
def other_jobs(request, slurm: Cluster, clone: Path) -> dict[str, Job]:
    """All that will be asked for, submitted at once."""
    asked = [item for item in request.session.items if "other_jobs" in item.fixturenames]
    submitted = {}
    for word in (item.callspec.params["word"] for item in asked):
        words = [*short_runs(2)[word].split(), "--device", "cpu"]
        submitted[word] = submit(
            slurm, clone, word, "--nodes=2", ONE_GPU, f"sbatch/{word}.sbatch", *words
        )
    return submitted


@pytest.mark.parametrize("word", OTHERS)
def test_other_jobs_on_two_nodes(slurm, other_jobs, word):
    """At a tiny size; each gets its folder by the job's name and number.

    Each run tries a job that measures; above, one that trains and one that has tasks.
    """
    job = other_jobs[word]
    assert slurm.wait(job.id, 150) == "COMPLETED", job.log
    assert "2 rank(s) on cpu" in job.log and (job.out / "config.json").exists()


def test_every_job_file_is_run():
    others = {"ddp.sbatch", "solution.sbatch", "batch_size.sbatch"}
    assert {f"{word}.sbatch" for word in OTHER_JOBS} == {*JOB_FILES} - others


# ---- jobs that something happens to ------------------------------------------------------------


@pytest.fixture(scope="module")
def calm(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed(clone, tmp_path_factory.mktemp("calm") / "run", **LONG)


def begun(slurm: Cluster, job: Job, step: int = 20) -> Job:
    """Wait until the job is in the midst of its run."""
    slurm.until(lambda: job.steps() >= step, 120)
    assert job.steps() < LONG["steps"], "it was too quick for this test"
    return job


def resumed(job: Job) -> list[int]:
    """The steps at which the job's lives but the first began."""
    found = re.findall(rf"^resumed runs/{job.out.name} at step (\d+)", job.log, re.MULTILINE)
    return [int(step) for step in found]


def next_life(slurm: Cluster, job: Job) -> int:
    """Wait until a job that was queued again goes on; the step at which it does.

    Slurm lets it begin after 9 s and no sooner, so that nothing of the old life is left.
    """
    before = len(resumed(job))
    over = ("FAILED", "CANCELLED", "TIMEOUT")
    slurm.until(lambda: len(resumed(job)) > before or slurm.state(job.id) in over, 120)
    steps = resumed(job)
    assert len(steps) == before + 1, f"{slurm.state(job.id)}:\n{job.log}"
    return steps[-1]


def again(job: Job) -> list[str]:
    """The words of the command that the job's log gives to go on with, after `sbatch`."""
    (found,) = re.findall(r"go on with: RANKS=1 PYTHON=\S+ sbatch (.*)", job.log)
    return found.split()


def nodes_of(slurm: Cluster, job: Job) -> list[str]:
    """Where it runs."""
    (nodes,) = slurm.run("squeue", "-h", "-o", "%N", "-j", job.id).split()
    return slurm.run("scontrol", "show", "hostnames", nodes).split()


def test_signal_before_the_limit_and_then_a_lost_node(slurm, clone, calm):
    """A job is signalled as --signal does it, queues again, loses a node, and is queued by Slurm.

    Of two others, one may not queue again, and a person's scancel is the end of the other.
    """
    job = ddp(slurm, clone, "--nodes=2", ONE_GPU, **LONG)
    kept = ddp(slurm, clone, ONE_GPU, "--no-requeue", **LONG)
    later = slurm.sbatch(f"--dependency=afterok:{kept.id}", "--wrap=true", cwd=clone)
    cancelled = ddp(slurm, clone, ONE_GPU, **LONG)
    slurm.run("scancel", "--batch", "--signal=USR1", begun(slurm, job).id)
    slurm.run("scancel", "--batch", "--signal=USR1", begun(slurm, kept).id)
    slurm.run("scancel", begun(slurm, cancelled).id)
    assert slurm.wait(cancelled.id) == "CANCELLED"
    assert slurm.wait(kept.id) == "FAILED"
    assert "ExitCode=75:0" in slurm.run("scontrol", "show", "job", kept.id)
    waits = "squeue", "-h", "-j", later, "-o", "%T %r"
    slurm.until(lambda: slurm.run(*waits) == "PENDING DependencyNeverSatisfied", 30)
    slurm.run("scancel", later)
    for one in (cancelled, kept):
        assert one.state() == "stopped" and "Traceback" not in one.log, one.log
        assert again(one)[-2:] == ["--out", f"runs/ddp-{one.id}"]
    assert f"launch.sh: job {kept.id} cannot queue again: Requested operation" in kept.log
    assert "Restarts=0" in slurm.run("scontrol", "show", "job", cancelled.id)

    first = next_life(slurm, job)
    line = f"launch.sh: job {job.id} queues again, to go on in runs/ddp-{job.id}"
    assert line in job.log and "stopped by SIGUSR1" in job.log and "Traceback" not in job.log
    begun(slurm, job, first + LONG["save_every"] + 5)
    assert nodes_of(slurm, job) == slurm.nodes[:2]
    slurm.crash(slurm.nodes[1])
    try:
        second = next_life(slurm, job)
        assert slurm.wait(job.id, 150) == "COMPLETED", job.log
    finally:
        slurm.boot(slurm.nodes[1])
    assert "Restarts=2" in slurm.run("scontrol", "show", "job", job.id)
    assert second > first and second % LONG["save_every"] == 0
    assert_same_weights(job.out, calm)


@pytest.mark.nightly
def test_requeue_in_mid_run(slurm, clone, calm):
    """As an administrator does it."""
    job = ddp(slurm, clone, ONE_GPU, ranks=2, **LONG)
    slurm.run("scontrol", "requeue", begun(slurm, job).id)
    assert slurm.wait(job.id, 150) == "COMPLETED", job.log
    assert len(resumed(job)) == 1 and "Traceback" not in job.log
    assert "Restarts=1" in slurm.run("scontrol", "show", "job", job.id)
    assert_same_weights(job.out, calm)


@pytest.mark.nightly
def test_lost_node(slurm, clone, calm):
    """A job that may be requeued goes on on other nodes; the other one names the command."""
    kept = ddp(slurm, clone, "--nodes=2", ONE_GPU, "--no-requeue", **LONG)
    requeued = ddp(slurm, clone, "--nodes=2", ONE_GPU, **LONG)
    for job in (kept, requeued):
        begun(slurm, job, 45)
    assert [nodes_of(slurm, job) for job in (kept, requeued)] == [slurm.nodes[:2]] * 2
    slurm.crash(slurm.nodes[1])
    try:
        assert slurm.wait(kept.id) == "NODE_FAIL"
        words = again(kept)
        assert words[-2:] == ["--out", f"runs/ddp-{kept.id}"]
        resubmitted = slurm.sbatch(ONE_GPU, *words, cwd=clone, env=ONE_RANK)
        for job, number in ((kept, resubmitted), (requeued, requeued.id)):
            log = clone / f"ddp-{number}.out"
            assert slurm.wait(number, 150) == "COMPLETED", log.read_text()
            (step,) = re.findall(rf"resumed runs/ddp-{job.id} at step (\d+)", log.read_text())
            assert int(step) >= 40 and int(step) % LONG["save_every"] == 0
            assert_same_weights(job.out, calm)
    finally:
        slurm.boot(slurm.nodes[1])


# ---- jobs from inside a job --------------------------------------------------------------------

STANDS_IN_FOR_PYTHON = """#!/bin/bash
env > "$HERE/told-${SLURM_JOB_ID:-here}-${SLURM_NODEID:-0}"
printf '%s\\n' "$@" > "$HERE/words-${SLURM_JOB_ID:-here}"
"""
OUTER = """#!/bin/bash
srun --ntasks=1 --mem=70 bash -c 'sbatch --parsable --nodes=2 --mem-per-cpu=50 \\
    sbatch/ddp.sbatch --steps 3 --out "a b" > inner'
bash sbatch/ddp.sbatch --steps 4
"""


def test_job_from_inside_a_job_gets_what_it_asks_for(slurm, clone, tmp_path):
    """As from a JupyterHub session that is a job of its own, with another geometry."""
    (tmp_path / "python").write_text(STANDS_IN_FOR_PYTHON)
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "outer.sbatch").write_text(OUTER)
    env = {"HERE": str(tmp_path), "PYTHON": str(tmp_path / "python")}
    shape = ("--ntasks=3", "--cpus-per-task=2", "--mem=600", "--gpus=1", "--time=3")
    outer = slurm.sbatch(
        *shape, "--hint=nomultithread", tmp_path / "outer.sbatch", cwd=clone, env=env
    )
    assert slurm.wait(outer) == "COMPLETED", (clone / f"slurm-{outer}.out").read_text()
    inner = (clone / "inner").read_text().strip()
    assert slurm.wait(inner) == "COMPLETED", (clone / f"ddp-{inner}.out").read_text()

    told = {path.name: variables(path) for path in tmp_path.glob("told-*")}
    assert sorted(told) == [f"told-{inner}-0", f"told-{inner}-1", "told-here-0"]
    local = told.pop("told-here-0")
    assert not [name for name in local if name.startswith("SLURM_") and name != "SLURM_CONF"]
    assert "MANYHANDS_BATCH" not in local
    assert (tmp_path / "words-here").read_text().splitlines()[1:] == [
        f"{clone}/scripts/train_ddp.py",
        "--steps",
        "4",
    ]
    head = re.search(r"BatchHost=(\S+)", slurm.run("scontrol", "show", "job", inner))[1]
    for number in (0, 1):
        ours = told[f"told-{inner}-{number}"]
        wanted = {"SLURM_NNODES": "2", "SLURM_NTASKS": "2", "SLURM_CPUS_PER_TASK": "16"}
        wanted |= {"SLURM_GPUS_ON_NODE": "4", "SLURM_RESTART_COUNT": "0", "NODES": "2"}
        wanted |= {"MANYHANDS_BATCH": "1", "HEAD_NODE": head, "HF_HUB_OFFLINE": "1"}
        assert {name: ours.get(name) for name in wanted} == wanted
        assert len(ours["CUDA_VISIBLE_DEVICES"].split(",")) == 4
    assert (tmp_path / f"words-{inner}").read_text().splitlines()[-2:] == ["--out", "a b"]


LEAVES_A_STATE = """#!/bin/bash
out=${@: -1}
mkdir -p "$out"
[ -z "$STATE" ] || echo "{\\"state\\": \\"$STATE\\"}" > "$out/status.json"
exit "$CODE"
"""


def test_unfinished_is_no_success_and_goes_on_with_all_that_sbatch_was_told(slurm, clone, tmp_path):
    """Submitted by its whole path from another folder; the second is refused before it begins."""
    (tmp_path / "python").write_text(LEAVES_A_STATE)
    (tmp_path / "python").chmod(0o755)
    env = {"PYTHON": str(tmp_path / "python"), "RANKS": "1"}
    asked = "--job-name=mine --time=00:05:00 --partition=debug --gpus-per-node=1".split()
    asked += ["--mem-per-cpu=60M", "--no-requeue"]
    words = [*asked, clone / "sbatch/ddp.sbatch", "--data", "a b/c.sbatch"]
    ends = [("stopped", 0, "75:0"), ("", 2, "2:0"), ("failed", 2, "2:0"), ("finished", 0, "0:0")]
    jobs = [
        slurm.sbatch(*words, cwd=tmp_path, env=env | {"STATE": state, "CODE": str(code)})
        for state, code, _ in ends
    ]
    later = slurm.sbatch(f"--dependency=afterok:{jobs[0]}", "--wrap=true", cwd=tmp_path)
    for number, (state, _, wanted) in zip(jobs, ends, strict=True):
        assert slurm.wait(number) == ("COMPLETED" if state == "finished" else "FAILED")
        assert f"ExitCode={wanted}" in slurm.run("scontrol", "show", "job", number)
        log = (tmp_path / f"mine-{number}.out").read_text()
        command = re.findall(r"^launch.sh: go on with: (.*)", log, re.MULTILINE)
        assert len(command) == (state in ("stopped", "failed")), log
        if command:
            assert command[0] == (
                f"cd {tmp_path} && RANKS=1 PYTHON={tmp_path}/python sbatch --nodes=1 "
                f"{' '.join(asked)} {clone}/sbatch/ddp.sbatch --data a\\ b/c.sbatch "
                f"--out runs/mine-{number}"
            )
    reason = "squeue", "-h", "-j", later, "-o", "%r"
    slurm.until(lambda: slurm.run(*reason) == "DependencyNeverSatisfied", 40)
    slurm.run("scancel", later)


def variables(path: Path) -> dict[str, str]:
    return dict(line.partition("=")[::2] for line in path.read_text().splitlines())


# ---- the site ----------------------------------------------------------------------------------


def check_site(slurm: Cluster, clone: Path, text: str, *job_files: str) -> tuple[int, list[str]]:
    """Write site.env and check it: exit code and lines."""
    (clone / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    settings_file = clone / "sbatch" / "site.env"
    settings_file.write_text(f"export PYTHON={sys.executable}\n{text}")
    before = slurm.run("squeue", "-h", "-t", "all", "-o", "%i")
    try:
        done = slurm.outcome("bash", "sbatch/check_site.sh", *job_files, cwd=clone)
    finally:
        settings_file.unlink()
    assert not done.stderr and slurm.run("squeue", "-h", "-t", "all", "-o", "%i") == before
    return done.returncode, done.stdout.splitlines()


def test_site_where_all_is_wrong(slurm, clone):
    code, lines = check_site(
        slurm,
        clone,
        "export SBATCH_PARTITION=gpus SBATCH_ACCOUNT=nobody SBATCH_GPUS_PER_NODE=8\n"
        "module load Nope/1\nexport GLOO_SOCKET_IFNAME=ib9 HEAD_SUFFIX=-fast\n",
    )
    problems = [line for line in lines if line.startswith("problem: ")]
    told = "\n".join(problems)
    assert code == 2 and lines[-1].startswith(f"{len(problems)} problem(s)")
    assert "there is no partition gpus: there are batch debug; correct SBATCH_PARTITION" in told
    assert "the account nobody is refused" in told and "correct SBATCH_ACCOUNT" in told
    assert "'module load Nope/1'" in told
    if Path("/etc/profile.d/modules.sh").exists():
        assert "Unable to locate a modulefile for 'Nope/1'" in told
    elif os.environ.get("MANYHANDS_SLURM") == "required":
        pytest.fail("environment-modules is not installed")
    assert re.search(r"GLOO_SOCKET_IFNAME is ib9, and .* it has .*\blo\b", told)
    assert f"no {slurm.nodes[0]}-fast is known here" in told
    assert re.search(r"Slurm would refuse.* ddp.sbatch.*it offers: 3 nodes .*gpu:h100:4", told)
    assert ("is made for CPUs" in told) == (not (torch.version.cuda or torch.version.hip))


def test_site_that_is_right(slurm, clone):
    text = "export SBATCH_PARTITION=batch SBATCH_ACCOUNT=course SBATCH_GPUS_PER_NODE=0\n"
    code, lines = check_site(slurm, clone, text + "export GLOO_SOCKET_IFNAME=lo\n")
    assert code == 0 and all(line.startswith("ok: ") for line in lines[:-1]), lines
    for name in ("partition batch", "account course", *JOB_FILES, "interface lo", "torch "):
        assert any(name in line for line in lines), name


def test_site_file_that_is_not_filled_in(slurm, clone):
    text = (ROOT / "sbatch" / "site.env.example").read_text()
    code, lines = check_site(slurm, clone, text + "export SBATCH_QOS = x\n", "sbatch/ddp.sbatch")
    told = "\n".join(line for line in lines if line.startswith("problem: "))
    assert code == 2 and "leaves SBATCH_ACCOUNT empty" in told
    assert "not a valid identifier" in told
    code, lines = check_site(slurm, clone, "export X='\n", "sbatch/none.sbatch")
    told = "\n".join(line for line in lines if line.startswith("problem: "))
    assert code == 2 and "site.env is no shell text" in told
    assert "no job file sbatch/none.sbatch; there are: batch_size.sbatch" in told


def test_a_job_that_could_not_open_its_log_is_told(slurm, clone):
    told = {
        "--job-name=a/b": "the job name a/b has a slash",
        "--output=logs/%j.out": "no folder logs here, and Slurm makes none.* mkdir -p logs",
        "-o /nowhere/%x.out": "the log goes to /nowhere/%x.out, but there is no folder /nowhere",
    }
    files = [clone / f"sbatch/log{number}.sbatch" for number in range(len(told))]
    for path, line in zip(files, told, strict=True):
        path.write_text(f"#!/bin/bash\n#SBATCH {line}\n")
    code, lines = check_site(slurm, clone, "", *(f"sbatch/{path.name}" for path in files))
    for path, words in zip(files, told.values(), strict=True):
        path.unlink()
        assert code == 2 and re.search(f"{path.name}: .*{words}", "\n".join(lines)), lines


def test_site_without_slurm(clone, tmp_path):
    """Also on a machine without Slurm, with nothing but the plainest commands."""
    for name in (
        "bash",
        "sed",
        "grep",
        "mktemp",
        "rm",
        "dirname",
        "sort",
        "paste",
        "timeout",
        "id",
    ):
        (tmp_path / name).symlink_to(shutil.which(name))
    env = environment(PYTHON=sys.executable) | {"PATH": str(tmp_path)}
    done = subprocess.run(
        ["bash", "sbatch/check_site.sh"], cwd=clone, env=env, capture_output=True, text=True
    )
    assert done.returncode == 2 and not done.stderr
    assert "problem: there is no sbatch on this machine" in done.stdout
    assert "problem: there is no sbatch/site.env: cp sbatch/site.env.example" in done.stdout


def test_a_python_that_is_not_there_is_one_problem(clone, tmp_path):
    for name in ("bash", "sed", "grep", "mktemp", "rm", "dirname", "sort", "paste"):
        (tmp_path / name).symlink_to(shutil.which(name))
    env = environment(PYTHON="/no/python") | {"PATH": str(tmp_path)}
    done = subprocess.run(
        ["bash", "sbatch/check_site.sh"], cwd=clone, env=env, capture_output=True, text=True
    )
    told = [line for line in done.stdout.splitlines() if "ython" in line]
    assert told == [
        "problem: PYTHON is /no/python, which is not there: correct or delete that line in site.env"
    ]
