"""`make solutions` on a small course, on this machine and on a cluster: what passes, what fails."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from threading import Timer

import nbformat
import pytest

import run_notebook
import run_solutions
from build_notebooks import ROOT
from commands import environment, left_behind, make_clone, run
from manyhands.building.source import read_lesson
from manyhands.jobs.submit import Job, State
from manyhands.ranks.failures import BadInput
from run_solutions import Config

DDP = "--impl scratch --data text --layers 1 --block 16 --batch 12 --steps 10 --device cpu"
# A job without ranks: it writes what a finished run writes, or ends as its flags say.
JOB = """\
#!/bin/bash
#SBATCH --job-name=quick
#SBATCH --nodes=1
[ "$1" = --end ] && { echo "quick.py: no luck" >&2; exit "$2"; }
mkdir -p "$4" && echo '{"state": "finished", "valid_loss": '"$2"'}' > "$4/status.json"
echo '{"format": "manyhands run 1", "config": {}, "ranks": []}' > "$4/config.json"
"""
LESSONS = {  # name -> `job` of the header, cells
    "06_ddp": (f'{{flags: "{DDP}", loss: [1, 4]}}', ["import manyhands", "assert manyhands"]),
    "07_loss": ('{flags: "--loss 2.5", loss: [1, 2]}', ["print('caf\\u00e9')"]),
    "08_broken": ('{flags: "--end 3"}', ["1", "{'a': 1}['lost']", "print('not reached')"]),
    "09_slow": ("", ["import time; time.sleep(100)"]),
}
QUICK = ("06_ddp", "07_loss", "08_broken")


def write_lesson(clone: Path, name: str) -> None:
    """A source with a header, and its notebook as `make notebooks` would leave it."""
    job, cells = LESSONS[name]
    header = f"manyhands: {{title: T, goal: G{f', job: {job}' if job else ''}}}"
    (clone / "solutions" / f"{name}.py").write_text(f"# ---\n# {header}\n# ---\n\n# %%\n1\n")
    notebook = nbformat.v4.new_notebook()
    for number, source in enumerate(cells):
        notebook.cells.append(nbformat.v4.new_code_cell(source, id=f"{name}-{number:03d}"))
    nbformat.write(notebook, clone / "solutions" / f"{name}.ipynb")
    word = name[3:]
    if job and not (clone / "sbatch" / f"{word}.sbatch").exists():
        (clone / "sbatch" / f"{word}.sbatch").write_text(JOB)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    make_clone(tmp_path)
    (tmp_path / "solutions").mkdir()
    for name in QUICK:
        write_lesson(tmp_path, name)
    return tmp_path


def test_every_lesson_with_a_job_file_says_how_to_test_it() -> None:
    for path in sorted((ROOT / "solutions").glob("[0-9][0-9]_*.py")):
        job = read_lesson(path, ROOT).meta.get("job")
        has_ranks = (ROOT / "sbatch" / f"{path.stem[3:]}.sbatch").exists()
        assert has_ranks == (job is not None), f"{path.name}: a job file needs a `job`"
        trains = (ROOT / "scripts" / f"train_{path.stem[3:]}.py").exists()
        assert trains == ("loss" in (job or {})), f"{path.name}: training has a range for the loss"


@pytest.mark.parametrize(
    "job",
    [
        "{flags: 3}",
        "{loss: [1, 2]}",
        '{flags: "", loss: [2, 1]}',
        '{flags: "", loss: [1]}',
        '{flags: "", losses: [1, 2]}',
        '"--steps 3"',
    ],
)
def test_a_job_in_the_header_that_is_misspelt_is_refused(clone: Path, job: str) -> None:
    source = clone / "solutions" / "07_loss.py"
    source.write_text(source.read_text().replace(LESSONS["07_loss"][0], job))
    with pytest.raises(BadInput, match=r"07_loss.py:1: the header's job is .*write it as"):
        read_lesson(source, clone)


def check_table(clone: Path, code: int, out: str, num_ranks: int) -> None:
    """The table of the three quick lessons says what passed, what failed, and why."""
    assert code == 1 and "Traceback" not in out, out
    rows = {row["lesson"]: row for row in read(clone / "runs/solutions/table.json")["rows"]}
    assert list(rows) == list(QUICK)
    good, loss, broken = rows.values()
    assert good["faults"] == [], out
    assert good["notebook"] == "pass" and good["job"] == "finished" and 1 < good["loss"] < 4
    assert re.fullmatch(r"\d+% of \d+ (cores|GPUs)", good["used"]) and good["job_s"] > 1
    about = read(clone / "runs/solutions/ddp-001/config.json")
    assert len(about["ranks"]) == num_ranks
    assert loss["notebook"] == "pass" and loss["job"] == "finished"
    assert loss["faults"] == [
        "job: loss 2.5000 is not in the range 1 to 2 (see runs/solutions/loss-001.log)"
    ]
    assert broken["notebook"] == "fail" and broken["job"] == "failed"
    first, second = broken["faults"]
    assert first.startswith("notebook: cell 08_broken-001: KeyError: 'lost' (see runs/solutions/")
    assert "exit code 3" in second and "quick.py: no luck (see runs/solutions/broken" in second

    told = (clone / "runs/solutions/table.txt").read_text()
    assert told in out and all(f"{name}, " in told for name in ("07_loss", "08_broken"))
    lines = {line.split()[0]: line.split() for line in told.splitlines() if line.strip()}
    assert [lines[name][-1] for name in QUICK] == ["pass", "fail", "fail"]
    page = (clone / "runs/solutions/08_broken.html").read_text()
    assert "KeyError" in page and "not reached" in page  # the cell that did not run, in words
    assert "caf\u00e9" in (clone / "runs/solutions/07_loss.html").read_text()


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def test_the_table_of_this_machine(clone: Path) -> None:
    before = {path: path.read_bytes() for path in (clone / "solutions").iterdir()}
    command = [sys.executable, clone / "scripts" / "run_solutions.py"]
    local = environment(MANYHANDS_LOCAL="1")
    code, out, err = run(command, clone.parent, 240, env=local)  # from any folder
    check_table(clone, code, out + err, num_ranks=2)
    assert {path: path.read_bytes() for path in (clone / "solutions").iterdir()} == before


def test_the_table_of_a_cluster(clone: Path, slurm) -> None:
    done = slurm.outcome(
        *(sys.executable, clone / "scripts" / "run_solutions.py", "--nodes", "2"),
        cwd=clone,
        env={"RANKS": "1"},
        timeout_s=240,
    )
    out = done.stdout + done.stderr
    check_table(clone, done.returncode, out, num_ranks=2)
    about = read(clone / "runs/solutions/ddp-001/config.json")
    assert len({rank["host"] for rank in about["ranks"]}) == (1 if slurm.mode == "ports" else 2)
    assert out.count(": job ") == 6 and " queued" in out and "2 failed, 4 finished" in out, out


@pytest.fixture
def here(clone: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The small course, with run_solutions.main in this process and on this machine."""
    monkeypatch.setattr(run_solutions, "ROOT", clone)
    monkeypatch.chdir(clone)
    monkeypatch.setenv("MANYHANDS_LOCAL", "1")
    return clone


def test_what_cannot_be_run_is_refused(here: Path) -> None:
    with pytest.raises(BadInput, match="no solutions/99_lost.py; there is: 06_ddp, 07_loss, 08_b"):
        run_solutions.main(Config(only="99_lost"))
    with pytest.raises(BadInput, match="--nodes 2 needs a Slurm"):
        run_solutions.main(Config(nodes=2))
    assert not (here / "runs").exists()


def test_a_notebook_without_a_verdict_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_solutions, "LATE_S", 0.1)
    job = Job(tmp_path / "06_ddp", state=State("finished"))
    part = run_solutions.Part("06_ddp, notebook", Path(), [], job.out, job=job)
    row = run_solutions.row_of("06_ddp", None, [part])
    assert "left no verdict" in row.faults[0] and row.words()[-1] == "fail"


def test_a_limit_and_an_interrupt_end_what_runs(here: Path, capsys: pytest.CaptureFixture) -> None:
    write_lesson(here, "09_slow")
    with pytest.raises(SystemExit, match="1"):
        run_solutions.main(Config(only="09_slow", limit_min=0.05))
    assert "notebook: ended: not done after 0.05 minutes" in capsys.readouterr().out
    Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        run_solutions.main(Config(only="09_slow"))
    assert "09_slow, notebook: ended" in capsys.readouterr().out
    end_s = time.monotonic() + 10  # a kernel may take a moment to end
    while left_behind(here) and time.monotonic() < end_s:
        time.sleep(0.1)
    assert left_behind(here) == []


def test_ctrl_c_cancels_what_was_submitted(clone: Path, slurm) -> None:
    write_lesson(clone, "09_slow")
    script = """
        set -m  # else the background would not hear SIGINT
        "$0" scripts/run_solutions.py --only 09_slow & job=$!
        for _ in $(seq 300); do [ -n "$(squeue -h -n solution)" ] && break; sleep 0.1; done
        kill -INT $job
        wait $job
        echo "exit code $?"
    """
    done = slurm.outcome("bash", "-c", script, sys.executable, cwd=clone, timeout_s=120)
    assert "exit code 130" in done.stdout and "09_slow, notebook: ended" in done.stdout, done.stderr
    number = done.stdout.split("notebook: job ")[1].split()[0]
    slurm.until(lambda: slurm.state(number) == "CANCELLED", 20)


def test_a_kernel_that_dies_or_hangs_is_a_fault_with_its_cell() -> None:
    def verdict(*sources: str, timeout_s: int = 20) -> dict:
        cells = [nbformat.v4.new_code_cell(one, id=f"c{n}") for n, one in enumerate(sources)]
        return run_notebook.run(nbformat.v4.new_notebook(cells=cells), ROOT / "tests", timeout_s)

    dead = verdict("1", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert (dead["verdict"], dead["cell"], dead["error"]) == ("fail", "c1", "Kernel died")
    hung = verdict("import time; time.sleep(60)", "1", timeout_s=1)
    assert (hung["cell"], hung["error"]) == ("c0", "still running after 1 s")
    said = verdict("class E(Exception):\n  pass\nraise E('\\x1b[31mone\\ntwo')")
    assert (said["cell"], said["error"]) == ("c0", "E: one")
