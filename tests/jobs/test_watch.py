"""Jobs that are submitted and watched: on this machine, in a real kernel, on a Slurm cluster."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from jupyter_client.manager import start_new_kernel

from commands import ROOT, environment, flags, left_behind, losses, make_clone
from manyhands.instruments.figures import new_figure, png
from manyhands.jobs import watch
from manyhands.jobs.submit import Job, JobRefused, State, course_file, submit
from manyhands.jobs.watch import JobFailed, JobStopped, JobTooLong

# A job in bash that writes what a run writes, until it is told to stop or has taken all its steps.
RUN = r"""
while [ $# -gt 0 ]; do [ "$1" = --out ] && out=$2; shift; done
state() { echo "{\"state\": \"$1\", \"steps\": $steps}" > "$out/status.json"; }
trap 'mkdir -p "$out/checkpoints/step-00000007"; touch "$_/index.json"; state stopped; exit 0' TERM
mkdir -p "$out/logs"
echo '{"floor": null, "loss_name": "loss", "loss_unit": "nats per image"}' > "$out/config.json"
state running
for step in $(seq $steps); do
    echo "{\"step\": $step, \"loss\": 2.$step, \"images_per_s\": 1234.5}" >> "$out/metrics.jsonl"
    : > "$out/logs/rank-00001.log"
    for rank in 0 2 3 4 5; do
        echo "<script>step $step of rank $rank</script>" >> "$out/logs/rank-0000$rank.log"
    done
    sleep 0.05
done
state finished
cp report.png "$out"
"""
# Says where the job is, then sleeps; a child leads a group of its own, as torchrun's ranks do.
SLEEP_S = f"300.{os.getpid()}"  # tells its processes from those of other workers
STUBBORN = f"""
trap 'echo "not yet"' TERM
setsid sleep {SLEEP_S} &
echo begun
while true; do sleep 0.1; done
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to submit from."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_clone(tmp_path_factory.mktemp("clone"))


def job_file(text: str, name: str = "little") -> Path:
    path = Path(f"{name}.sbatch").resolve()
    path.write_text(f"#!/bin/bash\n{text}\n")
    return path


def tiny(clone: Path, **changes: object) -> list[str]:
    return [str(clone / "sbatch" / "ddp.sbatch"), *flags(clone, **changes)]


def interrupt_when(condition: Callable[[], object], *pauses_s: float) -> None:
    """Send this process what a stop button sends, as soon as the condition holds.

    Args:
        pauses_s: where it is sent again, the seconds before each.
    """

    def wait() -> None:
        deadline_s = time.monotonic() + 120
        while not condition():
            if time.monotonic() > deadline_s:
                return  # another test may run by now
            time.sleep(0.02)
        for pause_s in (0, *pauses_s):
            time.sleep(pause_s)
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait, daemon=True).start()


def num_steps(out: Path) -> int:
    path = out / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def left(folder: Path) -> list[str]:
    """What is left of a job; it may take a moment to end."""
    deadline_s = time.monotonic() + 10
    while left_behind(folder) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return left_behind(folder)


# ---- on this machine ---------------------------------------------------------------------------


def test_an_interrupted_job_is_saved_and_goes_on_to_its_end(folder, clone, capsys):
    out = Path("runs/ddp-001")
    words = tiny(clone, steps=120)
    interrupt_when(lambda: num_steps(out) > 5)
    with pytest.raises(JobStopped, match=r"Saved: step (\d+) of 120.*out=\"runs/ddp-001\"") as stop:
        watch.run(*words, ranks=2, local=True)
    step = int(str(stop.value).split("step ")[1].split()[0])
    assert 5 < step < 120 and stop.value._render_traceback_() == [str(stop.value)]
    assert json.loads((out / "status.json").read_text())["state"] == "stopped"
    assert left(folder) + left(clone) == []
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "ddp-001: running on this machine, 0 s"
    assert said[-1].startswith("ddp-001: stopped on this machine")
    assert sum("stopped by SIGTERM at step" in line for line in said) == 1
    assert sum(line.startswith("device: 2 rank(s) on cpu") for line in said) == 1

    assert watch.run(*words, ranks=2, local=True, out=out) == out
    said = capsys.readouterr().out
    assert f"resumed {out} at step {step} of 120" in said
    assert said.count("device: 2 rank(s) on cpu") == 1 and "stopped" not in said
    assert said.splitlines()[-1].startswith("ddp-001: finished on this machine")
    assert len(losses(out)) == 120 and (out / "report.html").is_file()
    assert Path("runs/ddp-001.log").read_text().count("device: ") == 2
    assert sorted(path.name for path in Path("runs").iterdir()) == ["ddp-001", "ddp-001.log"]


def test_what_a_job_is_given(folder, capsys, monkeypatch):
    monkeypatch.setenv("MANYHANDS_BATCH", "1")  # of a job that this session may be
    text = 'echo "$RANKS $PYTHON $@ ${MANYHANDS_BATCH:-none}"'
    assert watch.run(job_file(text), "--steps", 3, ranks=3, local=True) == Path("runs/little-001")
    line = f"3 {sys.executable} --steps 3 --out runs/little-001 none"
    assert line in capsys.readouterr().out.splitlines()
    assert Path("runs/little-001.log").read_text() == line + "\n"


TABLE = "=" * 60 + "\nRoot Cause (first observed failure):\n[0]:\n  rank      : 1 (local_rank: 1)\n"


@pytest.mark.parametrize(
    ("text", "code", "lines"),
    [
        ("echo 'train.py: batch 7 is odd'; echo 'W1121 noise'; exit 2", 2, ["train.py: batch 7"]),
        ("for i in 1 2 3 4 5 6 7; do echo line $i; done; exit 3", 3, ["line 3", "line 4"]),
        (f"echo KeyError: 5; echo '{TABLE}'; echo 'srun: error'; exit 1", 1, ["KeyError: 5"]),
        (
            f"mkdir -p $2/logs; echo 'ValueError: first' > $2/logs/rank-00001.log; echo '{TABLE}'; "
            "exit 1",
            1,
            ["ValueError: first"],
        ),
    ],
)
def test_a_job_that_fails_says_why(folder, text, code, lines):
    with pytest.raises(JobFailed) as failed:
        watch.run(job_file(text), local=True)
    first, *rest = str(failed.value).splitlines()
    log = "runs/little-001.log"
    assert first == f"little-001 failed (exit code {code}); {log} ends with"
    assert [line[: len(want)] for line, want in zip(rest, lines, strict=False)] == lines
    assert len(rest) == (5 if code == 3 else 1)


def test_a_job_has_a_limit_and_one_that_ignores_it_is_killed(folder, monkeypatch):
    started_s = time.monotonic()
    monkeypatch.setattr(watch, "SAVE_S", 1)
    with pytest.raises(JobTooLong, match="still running on this machine, 1 s after limit_s=1. "):
        watch.run(job_file(STUBBORN), local=True, limit_s=1)
    assert "not yet" in Path("runs/little-001.log").read_text()  # it was asked first
    assert time.monotonic() - started_s < 10
    assert left(folder) == [] and not sleepers()


def sleepers() -> list[psutil.Process]:
    found = psutil.process_iter(["cmdline", "status"])
    return [one for one in found if one.info["cmdline"] == ["sleep", SLEEP_S]]


@pytest.mark.parametrize("pause_s", [0.5, 0.1, 0.003])
def test_a_second_interrupt_kills_at_once(folder, monkeypatch, pause_s):
    """Also one that comes with the first one, or while that is being answered."""
    monkeypatch.setattr(watch._Lines, "say", lambda *_: time.sleep(0.3))
    log = Path("runs/little-001.log")
    interrupt_when(lambda: log.exists() and "begun" in log.read_text(), pause_s)
    started_s = time.monotonic()
    with pytest.raises(JobStopped, match="interrupted. Nothing was saved"):
        watch.run(job_file(STUBBORN), local=True)
    assert time.monotonic() - started_s < watch.SAVE_S / 2
    assert left(folder) == [] and not sleepers()


def test_an_interrupt_before_there_is_a_run_is_not_called_finished(folder, capsys):
    log = Path("runs/little-001.log")
    interrupt_when(lambda: log.exists() and "begun" in log.read_text())
    with pytest.raises(JobStopped, match="interrupted. Nothing was saved"):
        watch.run(
            job_file("trap 'exit 0' TERM\necho begun\nwhile true; do sleep 0.1; done"), local=True
        )
    said = capsys.readouterr().out
    assert "cancelled" in said and "finished" not in said


@pytest.mark.parametrize(
    ("words", "options", "told"),
    [
        (["nowhere.sbatch"], {}, r"no job file nowhere.sbatch; job files in .: little.sbatch"),
        (["little.sbatch", "--out=x"], {}, 'give the folder as out="..." instead'),
        (["little.sbatch"], {"nodes": 2}, "nodes=2 needs Slurm.*leave nodes out"),
        (["little.sbatch"], {"ranks": 0}, "ranks is 0: take at least 1"),
    ],
)
def test_what_cannot_be_submitted_is_told_in_one_line(folder, words, options, told):
    job_file("exit 0")
    with pytest.raises(JobRefused, match=told) as refused:
        submit(*words, local=True, **options)
    assert "\n" not in str(refused.value)
    assert [path.name for path in folder.iterdir()] == ["little.sbatch"]


def test_the_start_of_a_job_says_what_it_does(folder):
    job = Job(Path("runs/little-001"), state=State("running", "on this machine"))
    job.log.parent.mkdir()
    assert watch._beginning(job).startswith("starting the ranks: each imports torch")
    job.log.write_text("device: 2 rank(s) on cpu\n")
    assert watch._beginning(job).startswith("the ranks have met; they read the data")
    job.log_begin = job.log.stat().st_size  # a run that goes on has the log of its first life
    assert watch._beginning(job).startswith("starting the ranks")
    job.state = State("queued")
    assert watch._beginning(job) == ""


def test_a_notebook_that_was_handed_out_alone_finds_the_course_s_files(folder):
    clones = Path(__file__).resolve().parents[2]
    found = course_file("../sbatch/ddp.sbatch")
    assert found == clones / "sbatch" / "ddp.sbatch" and found.is_file()
    assert course_file("../scripts/train_ddp.py") == clones / "scripts" / "train_ddp.py"
    assert course_file("little.sbatch") == Path("little.sbatch")  # there is none anywhere
    Path("sbatch").mkdir()
    Path("sbatch/ddp.sbatch").touch()
    assert course_file("sbatch/ddp.sbatch") == Path("sbatch/ddp.sbatch")  # the nearer one


def test_a_job_ends_with_the_process_that_submitted_it(folder, clone):
    script = f"""
        import time
        from manyhands.jobs.submit import submit
        submit(*{tiny(clone, steps=100000)!r}, ranks=1, local=True)
        time.sleep(100)
    """
    words = [sys.executable, "-c", textwrap.dedent(script)]
    kernel = subprocess.Popen(words, env=environment(PYTHONPATH=str(ROOT / "scripts")))
    deadline_s = time.monotonic() + 120
    while num_steps(Path("runs/ddp-001")) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert num_steps(Path("runs/ddp-001")) >= 3 and left_behind(clone)
    kernel.kill()
    kernel.wait()
    assert left(clone) == []


# ---- in a notebook -----------------------------------------------------------------------------


class Kernel:
    """A real kernel; collects what a cell shows."""

    def __init__(self, folder: Path) -> None:
        env = environment(PYTHONPATH=str(ROOT / "scripts"))
        self.manager, self.client = start_new_kernel(
            kernel_name="python3", env=env, cwd=str(folder), extra_arguments=["--log-level=ERROR"]
        )

    def run(self, code: str, stop_when: Callable[[], object] = lambda: False) -> list[dict]:
        """The messages of a cell, in order; presses the stop button when it is time to."""
        sent, messages, stopped = self.client.execute(code), [], False
        deadline_s = time.monotonic() + 120
        while time.monotonic() < deadline_s:
            if not stopped and stop_when():
                stopped = True
                self.manager.interrupt_kernel()
            try:
                message = self.client.get_iopub_msg(timeout=0.1)
            except Exception as error:
                assert type(error).__name__ == "Empty", error
                continue
            if message["parent_header"].get("msg_id") != sent:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return messages
            messages.append({"kind": kind, **content})
        raise TimeoutError(messages)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    folder = tmp_path_factory.mktemp("notebook")
    one = Kernel(folder)
    one.folder = folder
    one.run("from manyhands.jobs import watch")
    (folder / "report.png").write_bytes(png(new_figure()[0]))
    yield one
    one.client.stop_channels()
    one.manager.shutdown_kernel(now=True)


def of(messages: list[dict], kind: str) -> list[dict]:
    return [message for message in messages if message["kind"] == kind]


def test_a_cell_shows_one_display_and_ends_with_the_report(kernel):
    (kernel.folder / "long.sbatch").write_text(f"steps=60\n{RUN}")
    started_s = time.monotonic()
    messages = kernel.run("watch.run('long.sbatch', local=True)")
    took_s = time.monotonic() - started_s
    panel, report = of(messages, "display_data")
    updates = [one["data"]["text/html"] for one in of(messages, "update_display_data")]
    ids = {one["transient"]["display_id"] for one in of(messages, "update_display_data")}
    assert ids == {panel["transient"]["display_id"]} and not of(messages, "error")
    assert 2 <= len(updates) <= took_s + 2  # at most one a second, and the last

    shown = updates[-2]
    assert "long-001: running on this machine" in shown
    assert "1,234 images/s" in shown and "step " in shown and "data:image/png;base64," in shown
    assert shown.count("<pre") == 3 and "and 2 more ranks: runs/long-001/logs" in shown
    assert "rank 1: nothing yet" in shown
    assert "&lt;script&gt;step" in shown and "<script" not in shown
    assert shown.count("of rank 0&lt;") == 4 and "rank 4&lt;" not in shown

    last = of(messages, "update_display_data")[-1]["data"]
    assert "<img" not in last["text/html"] and len(last["text/html"]) < 500
    assert last["text/plain"].splitlines()[0].startswith("long-001: finished on this machine")
    assert last["text/plain"].splitlines()[1] == "step 60 of 60, loss 2.600, 1,234 images/s"
    assert "image/png" in report["data"]
    assert of(messages, "execute_result")[0]["data"]["text/plain"] == "PosixPath('runs/long-001')"


def test_the_stop_button_stops_the_job_and_shows_no_traceback(kernel):
    (kernel.folder / "longer.sbatch").write_text(f"steps=2000\n{RUN}")
    out = kernel.folder / "runs" / "longer-001"
    messages = kernel.run("watch.run('longer.sbatch', local=True)", lambda: num_steps(out) > 5)
    (error,) = of(messages, "error")
    (line,) = error["traceback"]
    assert line.startswith("longer-001 was interrupted. Saved: step 7 of 2000. To go on")
    assert 'out="runs/longer-001"' in line and error["ename"] == "JobStopped"
    last = of(messages, "update_display_data")[-1]["data"]["text/plain"]
    assert "longer-001: stopped on this machine" in last and "stopping" not in last
    assert not left_behind(kernel.folder)
    (failed,) = of(kernel.run("watch.run('nowhere.sbatch', local=True)"), "error")
    assert len(failed["traceback"]) == 1 and "no job file" in failed["traceback"][0]


def test_a_job_without_metrics_ends_with_its_output(kernel):
    (kernel.folder / "table.sbatch").write_text("for i in $(seq 50); do echo row $i; done\n")
    messages = kernel.run("watch.run('table.sbatch', local=True)")
    last = of(messages, "update_display_data")[-1]["data"]["text/html"]
    assert "row 50" in last and "row 21\n" in last and "row 20\n" not in last and "<img" not in last
    (panel,) = of(messages, "display_data")


# ---- on a cluster ------------------------------------------------------------------------------

SESSION = """
import json, os, signal, sys, threading, time
from pathlib import Path
from manyhands.jobs import submit as jobs, watch

words, found = json.loads(sys.argv[1]), {}
site = Path(words[0]).with_name("site.env")
os.environ["SBATCH_PARTITION"] = "of-this-session"  # a site's words count, not the session's
block = Path(words[0]).with_name("block.sbatch")
block.write_text("#!/bin/bash\\nsleep 300\\n")
blocker = jobs.sbatch(block, options=["--nodes=3", "--gpus-per-node=4", "--output=/dev/null"])
job = jobs.submit(*words, nodes=2, ranks=1)
queued = jobs.submit(*words, nodes=2, ranks=1)
for name, one, why in (("queued", job, "it is next"), ("behind", queued, "1 waiting job")):
    deadline_s = time.monotonic() + 20
    while why not in str(one.poll()) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    found[name] = str(one.state)


def interrupt(when):
    def wait():
        while not when():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait, daemon=True).start()


started_s = time.monotonic()
interrupt(lambda: time.monotonic() - started_s > 1)
try:
    watch.watch(queued)
except watch.JobStopped as stopped:
    found["out of the queue"] = str(stopped)
found["its state"], found["its folder"] = queued.state.word, queued.out.exists()

site.write_text("export SBATCH_GPUS_PER_NODE=4\\n")
for name, gpus in (("site's GPUs", None), ("no GPUs", 0)):
    asked = jobs.submit(block, gpus=gpus)
    found[name] = jobs.slurm("squeue", "-h", "-j", asked.id, "-o", "%b")
    asked.kill()
site.write_text("export SBATCH_PARTITION=nowhere\\n")
try:
    jobs.submit(*words)
except jobs.JobRefused as refused:
    found["refused"] = str(refused)
site.unlink()

os.environ["MANYHANDS_LOCAL"] = "1"
found["local"] = str(watch.watch(jobs.submit(Path("here.sbatch"))))
del os.environ["MANYHANDS_LOCAL"]

jobs.slurm("scancel", blocker)
metrics = job.out / "metrics.jsonl"
interrupt(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 5)
try:
    watch.watch(job)
except watch.JobStopped as stopped:
    found["interrupted"] = str(stopped)
found["id"], found["end"] = job.id, str(job.state)
Path("found.json").write_text(json.dumps(found))
"""


def test_a_slurm_job_is_queued_watched_and_stopped_and_goes_on_from_another_job(slurm, folder):
    """The second half runs in a session that is itself a job, of one node and other numbers."""
    clone = make_clone(folder / "course")
    words = tiny(clone, steps=150)
    (folder / "session.py").write_text(SESSION)
    job_file("echo here > here.txt", "here")
    env = {"PYTHONPATH": str(ROOT / "scripts"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "session.py", json.dumps(words)]
    try:
        said = slurm.run(*command, cwd=folder, env=env, timeout_s=200)
    finally:
        slurm.run("scancel", "--name=block.sbatch")
    found = json.loads((folder / "found.json").read_text())
    assert found["queued"].startswith("queued: it is next, and waits until enough nodes are free")
    assert "jobs with a higher priority go first, 1 waiting job(s) before it" in found["behind"]
    assert found["out of the queue"].endswith("was interrupted. Nothing was saved")
    assert found["its state"] == "cancelled" and not found["its folder"]
    assert "gpu:4" in found["site's GPUs"] and "gpu:4" not in found["no GPUs"]
    assert found["refused"].startswith("Slurm refused ddp.sbatch: ")
    assert "nowhere" in found["refused"] and "check_site.sh" in found["refused"]
    assert found["local"] == "runs/here-001" and (folder / "here.txt").exists()
    assert "Saved: step" in found["interrupted"] and 'out="runs/ddp-001"' in found["interrupted"]
    assert "ddp-001, job" in found["interrupted"]
    assert found["end"].startswith("stopped on ") and "of 20 min" in found["end"]
    assert f"ddp-001, job {found['id']}: running on " in said
    assert slurm.state(found["id"]) == "FAILED"  # it ended by itself, and is not finished

    inner = "import json; from manyhands.jobs import watch\n"
    inner += f"words = json.loads({json.dumps(words)!r})\n"
    inner += "print(watch.run(*words, nodes=2, ranks=1, out='runs/ddp-001'))"
    (folder / "inner.py").write_text(inner)
    wrap = f"--wrap=srun --gpus-per-task=1 {sys.executable} inner.py"
    session = slurm.sbatch(
        "--gpus-per-node=3", "-n1", "-c3", "-o", "out", wrap, cwd=folder, env=env
    )
    assert slurm.wait(session, 120) == "COMPLETED", (folder / "out").read_text()
    said = (folder / "out").read_text()
    assert "resumed runs/ddp-001 at step" in said and said.splitlines()[-1] == "runs/ddp-001"
    about = json.loads((folder / "runs/ddp-001/config.json").read_text())
    hosts = {rank["host"] for rank in about["ranks"]}
    assert len(about["ranks"]) == 2 and len(hosts) == (1 if slurm.mode == "ports" else 2)
    assert len(losses(folder / "runs/ddp-001")) == 150
    assert slurm.run("squeue", "-h") == ""


def test_a_job_that_slurm_has_forgotten_is_known_by_its_folder(slurm, folder, monkeypatch):
    script = "from manyhands.jobs.submit import Job; from pathlib import Path; "
    script += "print(Job(Path('a'), id='4000000').poll().word, Job(Path('b'), id='4000000').poll())"
    (folder / "a").mkdir()
    (folder / "a" / "status.json").write_text('{"state": "finished"}')
    env = {"PYTHONPATH": str(ROOT / "scripts")}
    said = slurm.run(sys.executable, "-c", script, cwd=folder, env=env)
    assert said == "finished failed: Slurm no longer knows this job, 0 s"
