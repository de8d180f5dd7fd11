"""Run every lesson's solution, its notebook and its job, and make one table of what came out.

    make solutions                                    through Slurm where there is one, else here
    python scripts/run_solutions.py --only 06_ddp --nodes 2

    runs/solutions/table.txt, table.json              the table
                   06_ddp.html, 06_ddp.log            a notebook as a page, and what it said
                   ddp-001/report.html, ddp-001.log   a job's run, and what it printed

A job's flags and the range for its loss stand in the header of solutions/NN_word.py. The exit code
is 1 where something failed; below the table stands what it was, and which log to read.
"""

import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from manyhands.building.source import read_lesson
from manyhands.jobs import submit as jobs
from manyhands.jobs.watch import tail
from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import command_line
from manyhands.training import record
from manyhands.training.storage import next_free, read_json, replace_file, write_json

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("runs/solutions")
LATE_S = 60  # a network's file system may show a node's new file that late
HEAD = ("lesson", "notebook", "time", "job", "time", "used", "loss", "expected", "verdict")


@dataclass(frozen=True)
class Config:
    """Run the solutions and print the table."""

    only: str = ""
    """Run one lesson only, such as 06_ddp."""
    nodes: int = 0
    """Nodes for each job; 0 takes as many as its job file asks for. Needs Slurm."""
    limit_min: float = 240
    """The longest to wait for all of it, the queue included, in minutes. What is left is ended."""


@dataclass
class Part:
    """A lesson's notebook or job, on its way through the queue."""

    name: str
    job_file: Path
    words: Sequence[str]
    out: Path
    nodes: int | None = None
    gpus: int | None = None
    job: jobs.Job | None = None
    fault: str = ""  # why it was not submitted, or not waited for

    def submit(self, local: bool) -> None:
        """Hand it to Slurm, or start it here."""
        try:
            how = {"nodes": self.nodes, "gpus": self.gpus, "out": self.out, "local": local}
            self.job = jobs.submit(self.job_file, *self.words, **how)
        except jobs.JobRefused as refusal:
            self.fault = str(refusal)
            return
        print(f"{self.name}: {'started' if local else f'job {self.job.id}'}", flush=True)

    @property
    def is_over(self) -> bool:
        return bool(self.fault) or self.job.poll().ended

    @property
    def log(self) -> Path:
        return self.out.with_name(f"{self.out.name}.log")

    def end(self, why: str) -> None:
        """Take it out of the queue, or end it where it runs."""
        if self.job and not self.is_over:
            self.job.kill()
            self.fault = why
            print(f"{self.name}: ended", flush=True)

    def problem(self) -> str:
        """Why it did not come to a good end; empty where it did."""
        state = self.job.state if self.job else None
        if self.fault or state.word == "finished":
            return self.fault
        code = f" with exit code {state.code}" if state.code else ""
        why = f", {state.why}" if state.why else ""
        return f"{state.word}{code}{why}{last_words(self.log)}"

    def word(self) -> str:
        """How it stands, for the table."""
        if self.job is None:
            return "refused"
        return "ended" if self.fault else self.job.state.word


@dataclass
class Row:
    """A lesson in the table."""

    lesson: str
    notebook: str = "-"
    notebook_s: float | None = None
    job: str = "-"
    job_s: float | None = None
    used: str = "-"
    loss: float | None = None
    expected: list[float] | None = None
    faults: list[str] = field(default_factory=list)  # what failed, and the log to read

    def words(self) -> list[str]:
        """The row's cells."""
        times = ["-" if t is None else f"{t:.0f} s" for t in (self.notebook_s, self.job_s)]
        loss = "-" if self.loss is None else f"{self.loss:.4f}"
        expected = "{:g} to {:g}".format(*self.expected) if self.expected else "-"
        verdict = "fail" if self.faults else "pass"
        cells = [self.lesson, self.notebook, times[0], self.job, times[1]]
        return [*cells, self.used, loss, expected, verdict]


# ---- submitting and waiting --------------------------------------------------------------------


def parts_of(lesson: str, job: dict | None, nodes: int) -> list[Part]:
    """The notebook of a lesson and, where it has one, its job."""
    for ending in ("json", "html", "log"):  # of an earlier call
        (FOLDER / f"{lesson}.{ending}").unlink(missing_ok=True)
    sbatch = ROOT / "sbatch"
    word = lesson.partition("_")[2]
    page = FOLDER / lesson
    job_file = sbatch / "solution.sbatch"
    parts = [Part(f"{lesson}, notebook", job_file, [lesson], page, gpus=0)]  # its ranks use CPUs
    if job is not None:
        flags = shlex.split(job["flags"])
        out = next_free(FOLDER, word)
        parts.append(Part(f"{lesson}, job", sbatch / f"{word}.sbatch", flags, out, nodes or None))
    return parts


def run(parts: Sequence[Part], local: bool, limit_s: float) -> None:
    """Submit all parts and wait for them; on this machine one after the other.

    Whatever ends this, also the person at the keyboard, ends what was submitted.
    """
    deadline_s = time.monotonic() + limit_s
    why = f"ended: not done after {limit_s / 60:g} minutes"
    try:
        for part in parts:
            part.submit(local)
            if local:
                wait([part], deadline_s)
                part.end(why)
        wait(parts, deadline_s)
    finally:
        for part in parts:
            part.end(why)


def wait(parts: Sequence[Part], deadline_s: float) -> None:
    """Wait until all parts are over or the time is up; print how they stand when that changes."""
    told = ""
    while True:
        over = [part.is_over for part in parts]  # this looks at every job
        submitted = [part.job for part in parts if part.job and part.job.id]
        counts = Counter(job.state.word for job in submitted)
        now = ", ".join(f"{count} {word}" for word, count in sorted(counts.items()))
        if now != told:
            why = {job.state.why for job in submitted if job.state.word == "queued"}
            reason = f" ({min(why)})" if why else ""
            print(f"{time.strftime('%H:%M:%S')}  {now}{reason}", flush=True)
        if all(over) or time.monotonic() > deadline_s:
            return
        told = now
        time.sleep(0.2)


# ---- the table ---------------------------------------------------------------------------------


def row_of(lesson: str, job: dict | None, parts: Sequence[Part]) -> Row:
    """What came out of a lesson's notebook and job."""
    row = Row(lesson)
    add_notebook(row, parts[0])
    if job is not None:
        add_job(row, parts[1], job.get("loss"))
    return row


def add_notebook(row: Row, part: Part) -> None:
    """Read the verdict on a notebook."""
    path = part.out.with_name(f"{part.out.name}.json")
    problem = part.problem()
    end_s = time.monotonic() + (0 if problem else LATE_S)
    while not path.exists() and time.monotonic() < end_s:
        time.sleep(0.5)
    found = read_json(path) if path.exists() else {"verdict": "fail"}
    row.notebook = found["verdict"]
    row.notebook_s = found.get("spent_s")
    if "error" in found:
        problem = f"cell {found['cell']}: {found['error']}"
    elif row.notebook == "fail":
        problem = problem or f"it has left no verdict, {path}"
    if problem:
        row.faults.append(f"notebook: {problem} (see {part.log})")


def add_job(row: Row, part: Part, expected: list[float] | None) -> None:
    """Read how a job ended, what it used, and whether its loss is what it should be."""
    row.expected = expected
    problem = part.problem()
    row.job = part.word()
    row.job_s = part.job.state.time_s if part.job else None
    status = part.out / "status.json"
    if status.exists():
        row.loss = read_json(status).get("valid_loss")
        row.used = used(part.out)
    if not problem and expected:
        if row.loss is None:
            problem = "the run says no validation loss"
        elif not expected[0] <= row.loss <= expected[1]:
            problem = f"loss {row.loss:.4f} is not in the range {expected[0]:g} to {expected[1]:g}"
    if problem:
        row.faults.append(f"job: {problem} (see {part.log})")


def used(folder: Path) -> str:
    """How busy what a run was granted was, from its start to its end."""
    run = record.read(folder)
    bill = run.bill
    busy_h = bill.busy_h
    if bill.unit == "GPU" and not any(rank["device"].startswith("cuda") for rank in run.ranks):
        busy_h = 0.0  # no rank was on them
    if busy_h is None or not bill.charged_h:
        return "-"  # nobody has measured it
    return f"{busy_h / bill.charged_h:.0%} of {bill.num_granted} {bill.unit}s"


def last_words(log: Path) -> str:
    """The line of a log that tells most of why its job failed, after a colon."""
    lines = [line for line in tail(log, 60) if not line.startswith("srun:")]
    telling = [line for line in lines if re.search(r"Error: \S|\.(py|sh): \S", line)]
    return "".join(f": {line}" for line in (telling or lines)[-1:])


def table(rows: Sequence[Row]) -> str:
    """The rows under their heading, and below them what failed."""
    cells = [HEAD, *(row.words() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]
    faults = [f"{row.lesson}, {fault}" for row in rows for fault in row.faults]
    return "\n".join([*lines, *(["", *faults] if faults else [])])


def main(config: Config) -> None:
    """Run the solutions, print the table, and exit with 1 where one failed."""
    os.chdir(ROOT)  # where jobs are submitted, and runs/ lies
    sources = sorted(Path("solutions").glob("[0-9][0-9]_*.py"))
    chosen = [path for path in sources if config.only in ("", path.stem)]
    if not chosen:
        names = ", ".join(path.stem for path in sources) or "none"
        raise BadInput(f"there is no solutions/{config.only}.py; there is: {names}")
    local = bool(os.environ.get("MANYHANDS_LOCAL")) or not jobs.slurm_answers()
    if local and config.nodes > 1:
        raise BadInput(f"--nodes {config.nodes} needs a Slurm that answers here: leave it out")
    tested = {path.stem: read_lesson(path, ROOT).meta.get("job") for path in chosen}
    FOLDER.mkdir(parents=True, exist_ok=True)
    plan = {name: parts_of(name, job, config.nodes) for name, job in tested.items()}
    run([part for parts in plan.values() for part in parts], local, 60 * config.limit_min)
    rows = [row_of(name, tested[name], parts) for name, parts in plan.items()]
    text = table(rows)
    replace_file(FOLDER / "table.txt", f"{text}\n".encode())
    write_json(FOLDER / "table.json", {"time_s": time.time(), "rows": list(map(asdict, rows))})
    print(f"\n{text}\n\ntable: {FOLDER}/table.txt")
    raise SystemExit(int(any(row.faults for row in rows)))


if __name__ == "__main__":
    command_line(main, Config)
