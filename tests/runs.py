"""What the tests of training scripts share: runs on warm ranks, one of each, and what they hold.

The script is always an argument, so that a test file's own imports say which script it needs.
A report takes longer to draw than its run to train: the ranks draw none unless a test asks for it.
"""

import inspect
import json
import os
import random
import resource
import runpy
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import get_args, get_type_hints

import pytest
import torch

import train_single
from commands import contents, environment, flags, losses, run, settings, write_text
from manyhands.jobs import mine
from manyhands.ranks.failures import RankFailed
from manyhands.ranks.lab import run_ranks
from manyhands.training import report_figures
from manyhands.training.run import Run

THREE = {"micro_batches": 3}  # a batch of 6 can be cut into these
TWO = {"layers": 2}  # as many heads
SAVING = {"steps": 28, "save_every": 6}  # over the end of an epoch, with several saves
LIKE_SINGLE = ("layers", "batch", "steps", "save_every")  # of one process, which has them, too


def write_report_without_pictures(main: Callable, config: object) -> object:
    """In a rank: call `main`, whose report has all its words and numbers, and no picture."""
    report_figures.cards, report_figures.slide = lambda record: {}, lambda *_: b""
    return main(config)


def train(
    script: ModuleType,
    world_size: int,
    config: object,
    main: Callable | None = None,
    draws: bool = False,
    quiet: bool = True,
) -> list:
    """Run a script's `main`, or another one, on the ranks of a fork server."""
    main = main or script.main
    call = [main, config] if draws else [write_report_without_pictures, main, config]
    fn, *given = call
    return run_ranks(fn, world_size, *given, join=False, quiet=quiet, timeout_s=60)


def told_to_stop(step: int, main: Callable) -> Callable:
    """A `main` whose rank 0 gets SIGTERM before the end of step `step`."""

    def told(config: object) -> None:
        log = Run.log

        def log_and_signal(run: Run, loss: object) -> None:
            if run.step == step - 1 and run.world.is_main:
                os.kill(os.getpid(), signal.SIGTERM)
            log(run, loss)

        Run.log = log_and_signal
        main(config)

    return told


class Runs:
    """The runs of one script on a short text. Those with nothing in their way are made once.

    `keeps_best`: does the script validate at every checkpoint, and not only at the end?
    """

    singles: dict[str, Path] = {}  # of train_single.py, for the tests of all scripts

    def __init__(self, script: ModuleType, folder: Path, keeps_best: bool = True) -> None:
        self.script, self.folder, self.keeps_best = script, folder, keeps_best
        self.found: dict[str, Path] = {}
        write_text(folder)

    def config(self, out: Path, **changes: object) -> object:
        """The script's settings for a run of a second."""
        return self.script.Config(**settings(self.folder, out=str(out), **changes))

    def train(self, world_size: int, out: Path, main: Callable | None = None, **changes) -> Path:
        """Train, on ranks of a fork server; returns the run's folder."""
        train(self.script, world_size, self.config(out, **changes), main)
        return out

    def calm(self, world_size: int, **changes: object) -> Path:
        """A whole run that nothing happens to."""
        key = f"{world_size} {sorted(changes.items())}"
        if key not in self.found:
            out = self.train(world_size, self.folder / f"calm-{len(self.found)}", **changes)
            assert_whole(out, world_size, changes.get("steps", 20))
            self.found[key] = out
        return self.found[key]

    def single(self, **changes: object) -> Path:
        """The run of one process, which the others have to agree with."""
        own = {name: changes[name] for name in LIKE_SINGLE if name in changes}
        if not self.keeps_best:
            own.pop("save_every", None)
        key = str(sorted(own.items()))
        if key not in self.singles:
            out = self.folder / f"single-{len(self.singles)}"
            config = train_single.Config(**settings(self.folder, out=str(out), **own))
            train(train_single, 1, config)
            assert_whole(out, 1, own.get("steps", 20))
            self.singles[key] = out
        return self.singles[key]


def assert_whole(folder: Path, num_ranks: int, steps: int = 20, pictures: int = 0) -> None:
    """The folder of a finished run holds what it has to."""
    about = json.loads((folder / "config.json").read_text())
    assert about["config"]["steps"] == steps and len(about["ranks"]) == num_ranks
    assert len(losses(folder)) == steps == len((folder / "metrics.jsonl").open().readlines())
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    page = (folder / "report.html").read_text()
    assert page.count("<img") == pictures and "</html>" in page
    weights = torch.load(folder / "model.pt", weights_only=True)
    assert "tokens.weight" in weights and not any(name.startswith("module.") for name in weights)
    assert len(list((folder / "ranks").iterdir())) == num_ranks
    assert not list(folder.rglob("*.partial"))


def assert_same_training(folder: Path, other: Path) -> None:
    """Both runs saw the same batches and learned the same."""
    assert losses(folder) == pytest.approx(losses(other), abs=1e-4)
    valid, other_valid = (status(one)["valid_loss"] for one in (folder, other))
    assert valid == pytest.approx(other_valid, abs=1e-4)


def assert_nearly_same_training(folder: Path, other: Path) -> None:
    """Both runs learned nearly the same: bfloat16 beside float32, which is not the same."""
    assert losses(folder) == pytest.approx(losses(other), abs=0.03)
    assert losses(folder) != pytest.approx(losses(other), abs=1e-5)


def assert_like_one_process(runs: Runs, changes: dict, world_size: int) -> None:
    """A way of the script trains as one process does."""
    assert_same_training(runs.calm(world_size, **changes), runs.single(**changes))


def assert_every_impl_is_tried(script: ModuleType, ways: list[dict]) -> None:
    """Every --impl of the script is in one of its tests' settings."""
    known = get_type_hints(script.Config)["impl"]
    default = inspect.signature(script.Config).parameters["impl"].default
    assert {way.get("impl", default) for way in ways} == {*get_args(known)}


def status(folder: Path) -> dict:
    """How a run stands."""
    return json.loads((folder / "status.json").read_text())


# ---- with a learner's own functions ------------------------------------------------------------


def assert_yours_train_like_one_process(
    runs: Runs,
    folder: Path,
    capfd: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    yours: str,
    **changes: object,
) -> tuple[str, str]:
    """The script with all functions of mine/ on two ranks, as torchrun would start it.

    This run's report is drawn. Returns what the ranks printed, and the report's page.
    """
    lesson = runs.script.__name__.removeprefix("train_")
    monkeypatch.setenv("MANYHANDS_MINE", str(folder / "mine"))
    mine.write(lesson, runs.script.Parts()._asdict(), folder / "mine")
    out = folder / "run"
    train(runs.script, 2, runs.config(out, **changes), draws=True, quiet=False)
    said = capfd.readouterr().out
    assert "2 rank(s) on cpu" in said and f"report: {out}/report.html" in said
    assert f"yours: {yours}; the course's: all else" in said
    assert "Warning" not in said and "Traceback" not in said
    assert_whole(out, num_ranks=2, pictures=5)
    assert_same_training(out, runs.single(**changes))
    return said, (out / "report.html").read_text()


def assert_job_trains_like_one_process(
    runs: Runs, clone: Path, folder: Path, yours: str, **changes: object
) -> str:
    """The job file starts torchrun with two ranks, from any folder; returns what they printed."""
    lesson = runs.script.__name__.removeprefix("train_")
    out = folder / "run"
    # What passes under these rules is right on GPUs; from another folder mine/ has to be named.
    held = environment(MANYHANDS_RULES="nccl", MANYHANDS_MINE=str(clone / "mine"))
    words = ["bash", clone / "sbatch" / f"{lesson}.sbatch", *flags(clone, out=out, **changes)]
    code, said, errors = run(words, folder, env=held)
    assert code == 0, errors
    assert "2 rank(s) on cpu" in said and f"report: {out}/report.html" in said
    assert (f"yours: {yours}; the course's: all else" in said) == bool(yours)
    assert all(line.startswith("step ") for line in errors.splitlines()), errors
    assert_whole(out, num_ranks=2, pictures=5)
    assert_same_training(out, runs.single(**changes))
    return said


# ---- killed, or told to stop -------------------------------------------------------------------


def assert_goes_on_after_a_kill(
    runs: Runs, out: Path, changes: dict, world_size: int, victim: int
) -> None:
    """A killed run goes on bit for bit, whatever its ranks keep of the state."""
    kill_at = random.randint(changes["save_every"] + 1, changes["steps"] - 6)
    print("killed after step", kill_at)
    calm, main = runs.calm(world_size, **changes), runs.script.main

    def kill() -> None:
        log = out / "metrics.jsonl"
        while not log.exists() or log.read_text().count("\n") < kill_at:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    def train_until_killed(config: object) -> None:
        if os.environ["RANK"] == str(victim):
            threading.Thread(target=kill, daemon=True).start()
        main(config)

    with pytest.raises(RankFailed):
        runs.train(world_size, out, train_until_killed, **changes)
    assert not (out / "model.pt").exists() and any((out / "checkpoints").iterdir())
    runs.train(world_size, out, **changes)
    assert len(losses(out)) == changes["steps"] and losses(out) == losses(calm)
    assert (out / "model.pt").read_bytes() == (calm / "model.pt").read_bytes()


def assert_a_signal_in_the_validation_stops_all_ranks(
    runs: Runs, folder: Path, changes: dict, world_size: int
) -> None:
    """Also where every forward needs all ranks: they stop at the same batch, or would hang."""
    main = runs.script.main

    def train_and_signal(config: object) -> None:
        validation = Run.validation

        def disturbed(run: Run, loader: object, *noun: str) -> Iterator:
            for batch in validation(run, loader, *noun):
                yield batch
                if run.world.rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)

        Run.validation = disturbed
        main(config)

    text = folder / "words.txt"
    # Long enough for several batches to validate on.
    text.write_text(3 * (runs.folder / "text" / "words.txt").read_text())
    changes = {**changes, "steps": 4, "data": str(text)}
    out = runs.train(world_size, folder / "run", train_and_signal, **changes)
    assert status(out)["state"] == "stopped"
    runs.train(world_size, out, **changes)
    calm = runs.train(world_size, folder / "calm", **changes)
    assert status(out)["valid_loss"] == status(calm)["valid_loss"] > 0
    assert status(out)["valid_s"] > 0


# ---- as a command ------------------------------------------------------------------------------


def assert_starts_by_itself(script: ModuleType, cwd: Path) -> None:
    """In a process that has imported nothing else, from any folder."""
    code, said, errors = run([sys.executable, script.__file__, "--help"], cwd)
    assert (code, errors) == (0, "") and "--save-every" in said
    assert " ".join(script.__doc__.split()[:5]) in " ".join(said.split())


def start(
    script: ModuleType, words: list[str], cwd: Path, env: dict | None = None, file_bytes: int = 0
) -> tuple[int, str, str]:
    """`python SCRIPT WORDS...` in a child of a rank, which has all imports: 0.2 s, not 3 s.

    Args:
        file_bytes: no file may grow beyond this; 0 is no limit.

    Returns:
        The exit code, standard output and standard error.
    """
    env = environment(CUDA_VISIBLE_DEVICES="", MANYHANDS_MINE=str(cwd / "mine"), **(env or {}))
    given = (script.__file__, words, str(cwd), env, file_bytes)
    return run_ranks(_in_a_child, 1, *given, join=False, quiet=True, timeout_s=60)[0]


def _in_a_child(path: str, words: list[str], cwd: str, env: dict, file_bytes: int) -> tuple:
    """In a rank: run a script as a process of its own, and wait for its end."""
    files = [tempfile.TemporaryFile("w+") for _ in range(2)]  # of what it prints
    pid, code = os.fork(), 70
    if pid == 0:
        try:
            os.chdir(cwd)
            os.environ.clear()
            os.environ.update(env)
            sys.argv = [path, *words]
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number, file in enumerate(files, 1):
                os.dup2(file.fileno(), number)
            sys.stdout = open(1, "w", closefd=False)
            sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)
            if file_bytes:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
            runpy.run_path(path, run_name="__main__")
        except SystemExit as stop:  # a word that is no flag
            code = stop.code
        finally:
            sys.stderr.flush()
            os._exit(code)  # a script ends by itself before this
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for file in files:
        file.seek(0)
    return code, *(file.read() for file in files)


def refusal(
    script: ModuleType,
    runs: Runs,
    cwd: Path,
    env: dict | None = None,
    file_bytes: int = 0,
    **changes: object,
) -> str:
    """Start a script that has to refuse; returns its one line. Nothing in `cwd` has changed."""
    before = contents(cwd)
    words = flags(runs.folder, **{"out": "run", **changes})
    code, said, errors = start(script, words, cwd, env, file_bytes)
    assert (code, errors.count("\n"), "Traceback" in said + errors) == (2, 1, False), said + errors
    assert errors.startswith(f"{script.__name__}.py: ")
    changed = {name for name, _ in contents(cwd).items() ^ before.items()}
    assert file_bytes or changed == set()
    return errors
