"""Watch a job from a notebook cell: submit it, follow it to its end, see its report.

    run = submit (submit.py) + watch

    one display, drawn again at most once a second:  state and time, step, speed, loss so far,
                                                     the last lines of each rank

It needs no widget manager: the display is updated HTML, and a saved notebook holds its last state.
Outside a notebook the same is told in plain lines. The stop button stops the job, after a
checkpoint.
"""

import base64
import html
import json
import os
import re
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from manyhands.instruments import figures
from manyhands.jobs.submit import Job, remove_if_empty, submit
from manyhands.ranks.failures import OneLine
from manyhands.ranks.interrupts import Interrupts, noted
from manyhands.training import storage

SAVE_S = 45  # what a job may take to save and end; torchrun gives its ranks 30 s of it
KILL_S = 15
LOCAL_LIMIT_S = 300
SLURM_LIMIT_S = 3600
SHOWN_RANKS = 4
SHOWN_LINES = 12
LAST_LINES = 30
COLOURS = {"queued": "230,159,0", "running": "0,114,178", "finished": "0,158,115"}


class JobFailed(OneLine, RuntimeError):
    """The job ended with an error; the message holds its last lines."""


class JobTooLong(OneLine, TimeoutError):
    """The job was not done at the limit, and was stopped."""


class JobStopped(OneLine, KeyboardInterrupt):
    """The person at the keyboard stopped the job."""


def run(
    job_file: str | Path,
    *flags: object,
    nodes: int | None = None,
    ranks: int | None = None,
    out: str | Path | None = None,
    local: bool | None = None,
    limit_s: float | None = None,
) -> Path:
    """Submit a job and watch it to its end; `submit` and `watch` say what the arguments mean."""
    with noted() as interrupts:  # raised while the job starts, one would leave it alone
        job = submit(job_file, *flags, nodes=nodes, ranks=ranks, out=out, local=local)
        return _watch(job, limit_s, interrupts)


def watch(job: Job, limit_s: float | None = None) -> Path:
    """Show a job until it ends, then its report; returns the run's folder.

    An interrupt (the stop button) asks the job to save and end; a second one kills it.

    Args:
        limit_s: stop the job after so many seconds of watching; where not given, 300 on this
            machine and 3600 with Slurm, whose queue can be long.

    Raises:
        JobFailed: it ended with another exit code than 0.
        JobTooLong: it was not done at the limit.
        JobStopped: it was interrupted.
    """
    with noted() as interrupts:  # raised, a second one could come where nobody kills the job
        return _watch(job, limit_s, interrupts)


def _watch(job: Job, limit_s: float | None, interrupts: Interrupts) -> Path:
    """As `watch`; interrupts are those since the job was submitted."""
    limit_s = limit_s or (LOCAL_LIMIT_S if job.process else SLURM_LIMIT_S)
    screen = _Panel(job) if _in_notebook() else _Lines(job)
    error = JobFailed
    told = ""
    _follow(job, screen, limit_s, interrupts)
    if interrupts.count:
        error = JobStopped
        told = f"{job} was interrupted"
    elif not job.state.ended:
        error = JobTooLong
        told = f"{job} was still {job.state} after limit_s={limit_s:g}"
    if told:
        _stop(job, screen, interrupts)
        if job.state.word == "finished" and job.status().get("state") != "finished":
            job.state = replace(job.state, word="cancelled")  # it ended before there was a run
    screen.show(last=True)
    if told or job.state.word == "stopped":
        raise error(f"{told or job}. {_words_of_saved(job)}")
    if job.state.word != "finished":
        raise JobFailed(_words_of_failure(job))
    screen.show_report()
    return job.out


def _follow(
    job: Job, screen: "_Lines | _Panel", limit_s: float, interrupts: Interrupts, patience: int = 0
) -> None:
    """Show the job until it ends, or more interrupts came than `patience`, or for `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while not job.wait(0.2) and time.monotonic() < deadline_s and interrupts.count <= patience:
        screen.show()


def _stop(job: Job, screen: "_Lines | _Panel", interrupts: Interrupts) -> None:
    """Ask a job to save and end, and wait for that; a second interrupt kills it."""
    screen.say("stopping, as soon as it has saved; a second interrupt kills the job")
    patience = min(interrupts.count, 1)  # two at once are a first one and a second one
    for ask, limit_s in ((job.ask_to_stop, SAVE_S), (job.kill, KILL_S)):
        ask()
        _follow(job, screen, limit_s, interrupts, patience)
        patience += 1
        if job.state.ended:
            break
    if not job.log.exists():  # it has not begun
        remove_if_empty(job.out)
    screen.say("")


def _words_of_saved(job: Job) -> str:
    """What is saved of a run that did not come to its end, and how to go on."""
    saved = sorted((job.out / "checkpoints").glob("step-" + "[0-9]" * 8 + "/index.json"))
    status = job.status()
    if not job.state.ended:
        return f"It has not ended yet: try scancel {job.id}"
    if status.get("state") == "finished":
        return f"It had just finished, in {job.out}"
    step = int(saved[-1].parent.name[5:]) if saved else status.get("step", 0)
    if not step or not (saved or status.get("state") == "stopped"):
        return "Nothing was saved"
    step = f"step {step} of {status.get('steps')}"
    return f'Saved: {step}. To go on from there, run the same call with out="{job.out}"'


def _words_of_failure(job: Job) -> str:
    """What a job that failed says itself, from the rank that failed first where that is known."""
    code = job.state.code
    lines = tail(job.log, 4 * LAST_LINES, width=1000, begin=job.log_begin)
    first = re.search(r"Root Cause .*?\brank +: (\d+)", " ".join(lines))
    own = job.out / "logs" / f"rank-{int(first[1]):05d}.log" if first else job.log
    if own != job.log and own.is_file():
        lines = tail(own, LAST_LINES, width=1000)
    # torchrun ends with a table of exit codes below a line of ====, and Slurm with its own words.
    table = next((at for at, line in enumerate(lines) if line.startswith("=" * 20)), None)
    lines = [line for line in lines[:table] if not line.startswith(("srun: ", "slurmstepd"))]
    if code == 2:  # then a script has said in one line what is wrong
        lines = [line for line in lines if re.match(r"\w+\.(py|sh): ", line)][-1:] or lines
    why = f"exit code {code}" if code else job.state.why
    return "\n".join([f"{job} {job.state.word} ({why}); {job.log} ends with", *lines[-5:]])


# ---- what a run's files say --------------------------------------------------------------------


def tail(path: Path, num_lines: int, width: int = 110, begin: int = 0) -> list[str]:
    """The last lines of a log that say something, each of at most `width` characters."""
    if not path.is_file():
        return []
    with open(path, "rb") as file:
        file.seek(max(begin, path.stat().st_size - num_lines * 250))
        lines = file.read().decode(errors="replace").splitlines()
    lines = [re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", line) for line in lines]  # a terminal's colours
    lines = [line if len(line) <= width else line[: width - 3] + "..." for line in lines]
    return [line for line in lines if line.strip()][-num_lines:]


def _beginning(job: Job) -> str:
    """What a running job does before its first numbers; "" where it is not running."""
    if job.state.word != "running":
        return ""
    told = ""
    if job.log.is_file():
        with open(job.log, errors="replace") as log:
            log.seek(job.log_begin)
            told = log.read(10_000)
    if "device: " not in told:
        return "starting the ranks: each imports torch, which takes seconds, and waits for the rest"
    return "the ranks have met; they read the data and take their first step"


class _Metrics:
    """The steps of metrics.jsonl, read as they come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self.file = self.offset = 0
        self.last: dict = {}
        self.losses: list[tuple[int, float]] = []

    def read(self) -> bool:
        """Read the lines that are new, and tell whether there were any."""
        if not self.path.is_file():
            return False
        with open(self.path, "rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self.file:  # a run that goes on writes its file anew
                self._forget()
                self.file = inode
            file.seek(self.offset)
            whole = file.read().rpartition(b"\n")[0]
        self.offset += len(whole) + 1 if whole else 0
        for line in whole.splitlines():
            self.last = json.loads(line)
            if self.last.get("loss") is not None:
                self.losses.append((self.last["step"], self.last["loss"]))
        return bool(whole)

    def in_words(self, num_steps: int | None) -> str:
        """The newest step in one line; "" before the first."""
        if not self.last:
            return ""
        total = f" of {num_steps}" if num_steps else ""
        words = [f"{self._about().get('noun', 'step')} {self.last['step']}{total}"]
        if self.last.get("loss") is not None:
            words.append(f"{self._about().get('loss_name', 'loss')} {self.last['loss']:.3f}")
        speeds = {name[:-6]: value for name, value in self.last.items() if name.endswith("_per_s")}
        return ", ".join(words + [f"{value:,.0f} {unit}/s" for unit, value in speeds.items()])

    def _about(self) -> dict:
        return storage.read_json(self.path.with_name("config.json"))

    def curve(self) -> bytes:
        """The loss so far as a small picture of at most 200 points."""
        size = -(-len(self.losses) // 200)
        bins = [self.losses[at : at + size] for at in range(0, len(self.losses), size)]
        x = [b[-1][0] for b in bins]
        y = [fmean(loss for _, loss in b) for b in bins]
        figure, ax = figures.new_figure(5, 2.2)
        series = {"training": (x, y)}
        about = self._about()
        xlabel = f"{about['noun']} done" if "noun" in about else "step"
        unit = f" ({about['loss_unit']})" if about.get("loss_unit") else ""
        ylabel = about.get("loss_name", "loss") + unit
        figures.lines(ax, series, xlabel, ylabel, about.get("floor"))
        return figures.png(figure, dpi=80)


# ---- showing -----------------------------------------------------------------------------------


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class _Lines:
    """Outside a notebook: the job's state when it changes, and its output as it comes."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.said = ()
        self.offset = job.log_begin

    def show(self, last: bool = False) -> None:
        """Print what is new."""
        with suppress(FileNotFoundError), open(self.job.log, errors="replace") as log:
            log.seek(self.offset)
            print(log.read(), end="", flush=True)
            self.offset = log.tell()
        state = self.job.state
        if (state.word, state.why) != self.said:
            print(f"{self.job}: {state}", flush=True)
            self.said = (state.word, state.why)

    def say(self, words: str) -> None:
        """Print what is done about the job."""
        if words:
            print(f"{self.job}: {words}", flush=True)

    def show_report(self) -> None:
        """Nothing more: the job itself has printed where its report is."""


class _Panel:
    """In a notebook: one display that is drawn again."""

    def __init__(self, job: Job) -> None:
        from IPython.display import display

        self.job = job
        self.metrics = _Metrics(job.out / "metrics.jsonl")
        self.note = ""
        self.curve = b""
        self.next_s = 0.0
        self.handle = display(self._bundle(False), raw=True, display_id=True)

    def show(self, last: bool = False) -> None:
        """Draw again, unless that was done within the last second."""
        start_s = time.monotonic()
        if start_s < self.next_s and not last:
            return
        if self.metrics.read() and len(self.metrics.losses) > 1:
            self.curve = self.metrics.curve()
        self.handle.update(self._bundle(last), raw=True)
        # Drawing takes time from a job on the same machine: a tenth of it at most.
        self.next_s = time.monotonic() + max(1, 10 * (time.monotonic() - start_s))

    def say(self, words: str) -> None:
        """Show what is done about the job."""
        self.note = words
        self.show(last=True)

    def show_report(self) -> None:
        """Show the report's picture, where there is one, below the last state."""
        from IPython.display import Image, display

        if (path := self.job.out / "report.png").is_file():
            display(Image(path.read_bytes(), alt=f"The report of {self.job.out.name}"))

    def _words(self) -> list[str]:
        """The state in plain lines."""
        lines = [f"{self.job}: {self.job.state}", self.note]
        lines.append(self.metrics.in_words(self.job.status().get("steps")) or _beginning(self.job))
        page = self.job.out / "report.html"
        lines.append(f"report: {page}" if self.job.state.ended and page.is_file() else "")
        return [line for line in lines if line]

    def _logs(self, last: bool) -> dict[str, list[str]]:
        """Title -> last lines: of each rank where it has a log, else of the job."""
        ranks = sorted((self.job.out / "logs").glob("rank-*.log"))
        if not ranks or (last and not self.metrics.last):
            return {str(self.job.log): tail(self.job.log, LAST_LINES if last else SHOWN_LINES)}
        tails = {f"rank {int(one.stem[5:])}": tail(one, SHOWN_LINES) for one in ranks[:SHOWN_RANKS]}
        each = SHOWN_LINES // max(1, sum(map(bool, tails.values())))
        logs = {
            name if lines else f"{name}: nothing yet": lines[-each:]
            for name, lines in tails.items()
        }
        if len(ranks) > SHOWN_RANKS:
            logs[f"and {len(ranks) - SHOWN_RANKS} more ranks: {ranks[0].parent}"] = []
        return logs

    def _bundle(self, last: bool) -> dict[str, str]:
        """The display as HTML, and as text for readers that show none."""
        words = self._words()
        colour = COLOURS.get(self.job.state.word, "213,94,0")
        parts = [f'<div style="border-left:6px solid rgb({colour});padding:.2em .8em">']
        parts.append("<br>".join(map(html.escape, words)))
        # A finished run has its report: neither curve nor logs have more to say.
        if last and self.job.state.word == "finished" and self.metrics.last:
            return {"text/html": "".join([*parts, "</div>"]), "text/plain": "\n".join(words)}
        if self.curve:
            picture = base64.b64encode(self.curve).decode()
            look = 'alt="loss so far" style="display:block;max-width:100%;margin:.3em 0"'
            parts.append(f'<img {look} src="data:image/png;base64,{picture}">')
        for title, lines in self._logs(last).items():
            look = "margin:0;padding:0;white-space:pre-wrap;font-size:85%"
            text = html.escape("\n".join(lines))
            parts.append(f"<div><b>{html.escape(title)}</b></div>")
            parts.append(f'<pre style="{look}">{text}</pre>' if lines else "")
        return {"text/html": "".join([*parts, "</div>"]), "text/plain": "\n".join(words)}
