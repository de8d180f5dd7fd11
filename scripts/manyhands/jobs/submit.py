"""Jobs: hand a job file to Slurm or to this machine, ask how it stands, and stop it.

    submit --> runs/ddp-001/       the run's folder, chosen here and given to the job as --out
               runs/ddp-001.log    all that the job prints

With Slurm a job goes to the queue and outlives this process. Without it the job runs on this
machine and ends with this process.
Source: https://slurm.schedmd.com/sbatch.html, https://slurm.schedmd.com/scancel.html
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from manyhands.instruments.meters import duration, seconds_of
from manyhands.ranks.failures import BadInput, OneLine
from manyhands.ranks.runtime import END_WITH_PARENT
from manyhands.training import places, storage

ANSWER_S = 5  # what a controller of Slurm may take to answer
# What belongs to this session, which can be a job itself, and would mislead or leak to another.
OF_THIS_SESSION = ("SLURM_", "SBATCH_", "SRUN_", "CUDA_VISIBLE_DEVICES", "TMPDIR")
OF_THIS_SESSION += ("JUPYTERHUB_", "JPY_", "MANYHANDS_BATCH", END_WITH_PARENT)
STAY_HERE = ("MANYHANDS_LOCAL", "NBGRADER_EXECUTION")  # marking a class must not fill a queue
STATES = dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"), ("queued", ""))
STATES |= dict.fromkeys(("FAILED", "BOOT_FAIL", "DEADLINE", "REVOKED"), ("failed", ""))
STATES |= {
    "COMPLETED": ("finished", ""),
    "CANCELLED": ("cancelled", "somebody took it out of the queue"),
    "TIMEOUT": ("failed", "its time limit was reached"),
    "OUT_OF_MEMORY": ("failed", "it took more memory than it was granted"),
    "NODE_FAIL": ("failed", "a node was lost"),
    "PREEMPTED": ("failed", "it had to make room for another job"),
}
REASONS = {
    "None": "Slurm has not looked at it yet",
    "Resources": "it is next, and waits until enough nodes are free",
    "Priority": "jobs with a higher priority go first",
    "BeginTime": "it begins again in a moment",
    "ReqNodeNotAvail": "nodes that it needs are down or reserved",
    "Dependency": "it waits for another job",
    "JobHeldUser": "it is held until scontrol release",
    "JobHeldAdmin": "an administrator holds it",
}


class JobRefused(OneLine, BadInput):
    """The job cannot be submitted like this."""


@dataclass(frozen=True)
class State:
    """How a job stands."""

    word: str  # queued, running, finished, stopped (with a checkpoint), failed or cancelled
    why: str = ""  # where it runs, why it waits, or why it failed
    time_s: float = 0  # how long it has been running
    limit_s: float | None = None  # the time it asked for
    code: int = 0  # its exit code

    @property
    def ended(self) -> bool:
        return self.word not in ("queued", "running")

    def __str__(self) -> str:
        joint = " " if self.why.startswith("on ") else ": "
        place = f"{self.word}{joint}{self.why}" if self.why else self.word
        asked = f" of {duration(self.limit_s, 0)}" if self.limit_s else ""
        return place if self.word == "queued" else f"{place}, {duration(self.time_s, 0)}{asked}"


@dataclass
class Job:
    """A job that was submitted. One of Slurm's can be looked at anew with Job(out, id="1234")."""

    out: Path  # the run's folder
    id: str | None = None  # in Slurm
    process: subprocess.Popen | None = None  # on this machine
    state: State = State("queued", REASONS["None"])
    begun_s: float = field(default_factory=time.monotonic)
    asked_s: float = float("-inf")  # when Slurm was asked last
    ends_soon: bool = False
    log_begin: int = 0  # bytes of the log that a life before this one wrote

    def __str__(self) -> str:
        return f"{self.out.name}, job {self.id}" if self.id else self.out.name

    @property
    def log(self) -> Path:
        """What the job prints; it lies beside the run's folder."""
        return self.out.with_name(self.out.name + ".log")

    def status(self) -> dict:
        """What the run has written of itself; empty before it trains."""
        path = self.out / "status.json"
        return storage.read_json(path) if path.exists() else {}

    def poll(self) -> State:
        """How the job stands now, or stood when Slurm was last asked."""
        if self.state.ended:
            return self.state
        if self.process is not None:
            code = self.process.poll()
            time_s = time.monotonic() - self.begun_s
            word = "running" if code is None else "failed" if code else "finished"
            self.state = State(word, "on this machine", time_s, code=code or 0)
        elif time.monotonic() - self.asked_s >= self._pause_s():
            self.state = _ask_slurm(self) or self.state
            self.asked_s = time.monotonic()
        # A run that was asked to stop ends with 0 here, and with 75 where Slurm would call 0 done.
        if self.state.word in ("finished", "failed") and self.status().get("state") == "stopped":
            self.state = replace(self.state, word="stopped")
        return self.state

    def _pause_s(self) -> float:
        """A controller serves many people: ask it more rarely the longer a job takes."""
        if self.ends_soon or self.status().get("state", "running") != "running":
            return 1
        return min(15, max(1, (time.monotonic() - self.begun_s) / 20))

    def wait(self, limit_s: float) -> bool:
        """Wait for the end, but not longer than `limit_s`; tells whether the job has ended."""
        deadline_s = time.monotonic() + limit_s
        while not self.poll().ended and time.monotonic() < deadline_s:
            time.sleep(0.1)
        return self.state.ended

    def ask_to_stop(self) -> None:
        """Send the signal at which a training saves a checkpoint and ends."""
        self.ends_soon = True
        if self.process is not None:
            _signal_group(self.process.pid, signal.SIGTERM)
        elif self.state.word == "running" and self.status():
            slurm("scancel", "--signal=TERM", self.id)  # to the ranks, not to the job file
        else:
            slurm("scancel", self.id)  # it does not train yet

    def kill(self) -> None:
        """End the job at once, with all that it has started."""
        if self.process is None:
            slurm("scancel", self.id)
            return
        with suppress(psutil.NoSuchProcess):
            started = psutil.Process(self.process.pid).children(recursive=True)
            _signal_group(self.process.pid, signal.SIGKILL)
            for process in started:  # a rank can lead a group of its own
                with suppress(psutil.NoSuchProcess):
                    process.kill()


# ---- submitting --------------------------------------------------------------------------------


def submit(
    job_file: str | Path,
    *flags: object,
    nodes: int | None = None,
    ranks: int | None = None,
    gpus: int | None = None,
    out: str | Path | None = None,
    local: bool | None = None,
) -> Job:
    """Start a job file of the course with the script's `flags`, and do not wait for it.

    It runs with this Python. Its output goes to a file beside its folder, as runs/ddp-001.log.

    Args:
        nodes: how many, where the job file's own number is not wanted.
        ranks: ranks a node; one a GPU, or 2, where not given.
        gpus: GPUs a node to ask Slurm for, where the job file's or the site's number is not wanted.
        out: folder of the run; a free one in runs/ (training/places.py) where not given. A run
            that was stopped goes on in its folder.
        local: True runs the job on this machine, also where there is a Slurm; so does a variable
            MANYHANDS_LOCAL in the environment.

    Raises:
        JobRefused: neither Slurm nor this machine can run such a job.
    """
    path = course_file(job_file)
    words = [str(flag) for flag in flags]
    local = _stays_here() if local is None else local
    _check(path, words, nodes, ranks, local)
    job = Job(Path(out) if out else storage.next_free(places.runs(), path.stem))
    job.log_begin = job.log.stat().st_size if job.log.exists() else 0
    words += ["--out", str(job.out)]
    environ = {"PYTHON": sys.executable} | ({"RANKS": str(ranks)} if ranks else {})
    if local:
        job.process = _start_here(path, words, job.log, environ)
        job.state = State("running", "on this machine")
    else:
        asked = {"--nodes": nodes, "--gpus-per-node": gpus}
        options = [f"{name}={number}" for name, number in asked.items() if number is not None]
        _queue(job, path, words, options, environ)
    return job


def course_file(path: str | Path) -> Path:
    """`path`, or the course's own file of that folder and name where `path` leads nowhere.

    A notebook that was handed out alone stands in no clone of the course, so "../sbatch/ddp.sbatch"
    is not there; the installed course is a clone (`pip install -e .`) and has the file.
    """
    path = Path(path)
    own = Path(__file__).resolve().parents[3] / path.parent.name / path.name
    return own if own.is_file() and not path.exists() else path


def _queue(job: Job, path: Path, words: list[str], options: list[str], environ: dict) -> None:
    """Hand the job to Slurm; where that is refused nothing is left of it."""
    job.log.parent.mkdir(parents=True, exist_ok=True)  # else Slurm ends the job without a word
    log = str(job.log.resolve()).replace("%", "%%")  # sbatch reads % as the start of a pattern
    options = [f"--output={log}", "--open-mode=append", *options]
    try:
        job.id = sbatch(path, *words, options=options, environ=environ)
    except JobRefused:
        remove_if_empty(job.out)
        raise


def _stays_here() -> bool:
    return any(map(os.environ.get, STAY_HERE)) or not slurm_answers()


def _check(path: Path, words: list[str], nodes: int | None, ranks: int | None, local: bool) -> None:
    """Refuse what no scheduler need be asked about."""
    if not path.is_file():
        there = ", ".join(sorted(one.name for one in path.parent.glob("*.sbatch"))) or "none"
        raise JobRefused(f"there is no job file {path}; job files in {path.parent}: {there}")
    if any(word.split("=")[0] == "--out" for word in words):
        raise JobRefused('--out is among the flags: give the folder as out="..." instead')
    for name, number in (("nodes", nodes), ("ranks", ranks)):
        if number is not None and number < 1:
            raise JobRefused(f"{name} is {number}: take at least 1")
    if local and (nodes or 1) > 1:
        raise JobRefused(f"nodes={nodes} needs Slurm, and this job runs without: leave nodes out")


def sbatch(
    job_file: Path,
    *words: str,
    options: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> str:
    """Hand a job file to Slurm, with sbatch/site.env and nothing of this session's own job.

    The job runs in the current folder; Slurm knows where its file lies, and so the course.

    Args:
        words: the job's own arguments; `options` are those of sbatch.
        environ: variables that the job gets besides this session's.

    Returns:
        The job's number.

    Raises:
        JobRefused: with Slurm's own words.
    """
    path = job_file.resolve()
    script = '[ ! -f "$0" ] || . "$0" >&2; exec sbatch "$@"'
    command = ["bash", "-c", script, path.parent / "site.env", "--parsable"]
    command += [f"--chdir={Path.cwd()}", *options, path, *words]
    how = {"cwd": path.parent.parent, "env": _environment() | (environ or {}), "timeout": 60}
    try:
        done = subprocess.run(command, capture_output=True, text=True, **how)
    except subprocess.TimeoutExpired:
        raise JobRefused("sbatch gave no answer in 60 s: try again, or take local=True") from None
    if done.returncode:
        said = [line.split("error: ")[-1] for line in done.stderr.splitlines() if "error: " in line]
        told = "; ".join(said) or done.stderr.strip() or f"exit code {done.returncode}"
        raise JobRefused(
            f"Slurm refused {path.name}: {told}. `bash sbatch/check_site.sh` in the course's "
            "folder says what to change"
        )
    return done.stdout.split()[-1].split(";")[0]


def _start_here(path: Path, words: list[str], log: Path, extra: dict) -> subprocess.Popen:
    """Start the job as a child that ends with this process."""
    environ = {**os.environ, **extra, "PYTHONUNBUFFERED": "1"}
    environ[END_WITH_PARENT] = str(os.getpid())
    environ.pop("MANYHANDS_BATCH", None)  # a batch job can hold this session, not this job
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as file:
        return subprocess.Popen(
            ["bash", path, *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,  # a notebook's stop button signals the kernel's whole group
        )


def remove_if_empty(folder: Path) -> None:
    """Remove the folder of a run that never was."""
    with suppress(OSError):
        folder.rmdir()


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        os.killpg(pid, number)


# ---- Slurm -------------------------------------------------------------------------------------


def slurm_answers() -> bool:
    """Is there a Slurm here whose controller answers within 5 s? Prints a line where it is mute."""
    if shutil.which("sbatch") is None:
        return False
    told = slurm("scontrol", "ping")  # nothing where Slurm is installed and not set up
    if told and "is UP" not in told:
        print("Slurm does not answer: the job runs on this machine.")
    return "is UP" in told


def slurm(*command: str) -> str:
    """What a command of Slurm prints: nothing where it fails, "mute" where it takes too long."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=ANSWER_S, env=_environment()
        ).stdout
    except subprocess.TimeoutExpired:
        return "mute"


def _environment() -> dict[str, str]:
    """This environment for a command of Slurm, without what belongs to this session alone."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(OF_THIS_SESSION)
    }
    return kept | {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}


def _ask_slurm(job: Job) -> State | None:
    """The job's state; None where Slurm gives no answer now."""
    told = dict(re.findall(r"(\S+?)=(\S*)", slurm("scontrol", "-o", "show", "job", job.id)))
    if "JobState" not in told:
        return _forgotten(job) if "is UP" in slurm("scontrol", "ping") else None
    word, why = STATES.get(told["JobState"], ("running", ""))
    code, _, number = told["ExitCode"].partition(":")
    if word == "queued":
        why = _why_queued(told)
    elif not why:
        why = f"ended by signal {number}" if int(number) else f"on {told['NodeList'][:60]}"
    time_s = seconds_of(told["RunTime"])
    limit_s = seconds_of(told["TimeLimit"])
    return State(word, why, time_s or 0, limit_s, int(code))


def _forgotten(job: Job) -> State:
    """Slurm keeps a job in mind for some minutes; later only the run's folder knows its end."""
    if job.status().get("state") in ("finished", "stopped"):
        return State("finished")
    return State("failed", "Slurm no longer knows this job")


def _why_queued(told: dict[str, str]) -> str:
    """Slurm's reason, the job's place in the queue and the expected start, in words."""
    reason = told["Reason"].partition(",")[0]
    words = [REASONS.get(reason, f"Slurm's reason is {reason}")]
    if told["Restarts"] != "0":
        words.insert(0, f"begun {told['Restarts']} time(s) before")
    order = ("-h", "-t", "PD", "-S", "-p,i", "-o", "%i", "-p", told["Partition"])
    queue = slurm("squeue", *order).split()
    if told["JobId"] in queue[1:]:
        words.append(f"{queue.index(told['JobId'])} waiting job(s) before it")
    if re.match(r"\d{4}-", told["StartTime"]):
        words.append(f"expected to start at {told['StartTime'].replace('T', ' ')}")
    return ", ".join(words)
