"""Lightning and Accelerate train like DDP and resume; what each of them keeps is measured."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
import torch

import runs
import train_ddp
from commands import environment, flags, losses, make_clone, run, settings

SCRIPTS = ("lightning", "accelerate")
SAVE_EVERY = 5  # after a resume at step 5 or 15 the rest of an epoch of 17 steps is to do


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_clone(tmp_path_factory.mktemp("clone"))


def command(clone: Path, name: str, num_ranks: int, **changes: object) -> list[object]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = clone / "scripts" / f"train_{name}.py"
    changes = {"save-every": SAVE_EVERY, **changes}
    return [*torchrun, f"--nproc-per-node={num_ranks}", script, *flags(clone, **changes)]


def train(clone: Path, name: str, num_ranks: int, **changes: object) -> str:
    """Run a script to its end; returns what it printed."""
    code, printed, err = run(command(clone, name, num_ranks, **changes), clone)
    assert code == 0, err
    return printed


def stop_after(clone: Path, name: str, num_ranks: int, step: int, out: Path, number: int) -> None:
    """Send a signal to the ranks of a run, or kill them, when `step` has its line."""
    words = [str(word) for word in command(clone, name, num_ranks, out=out)]
    changed = {"env": environment(), "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, cwd=clone, start_new_session=True, text=True, **changed) as job:
        try:
            log, end_s = out / "metrics.jsonl", time.monotonic() + 240
            while not log.exists() or log.read_text().count("\n") < step:
                assert job.poll() is None and time.monotonic() < end_s, job.stderr.read()
                time.sleep(0.001)
            # torch starts each rank in a session of its own, which killpg does not reach.
            ranks = psutil.Process(job.pid).children(recursive=True)
            for process in ranks if number == signal.SIGKILL else []:
                process.kill()
            os.killpg(job.pid, number)
            job.communicate(timeout=60)
            _, alive = psutil.wait_procs(ranks, timeout=20)
            assert not alive
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def ddp(clone: Path) -> Path:
    """The run that the others have to agree with, on two ranks."""
    config = train_ddp.Config(**settings(clone, out=str(clone / "ddp"), save_every=SAVE_EVERY))
    runs.train(train_ddp, 2, config)
    return clone / "ddp"


def status(folder: Path) -> dict:
    return json.loads((folder / "status.json").read_text())


def assert_same(folder: Path, ddp: Path, bound: float = 1e-4) -> float:
    """The losses, the best validation loss and the best weights agree; returns the difference."""
    pairs = zip(losses(folder), losses(ddp), strict=True)
    largest = max(abs(one - other) for one, other in pairs)
    assert largest <= bound
    assert status(folder)["state"] == "finished"
    assert status(folder)["valid_loss"] == pytest.approx(status(ddp)["valid_loss"], abs=bound)
    ours, theirs = (torch.load(one / "model.pt", weights_only=True) for one in (folder, ddp))
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)
    return largest


@pytest.mark.parametrize("name", SCRIPTS)
def test_two_ranks_train_like_ddp(clone, ddp, tmp_path, name):
    printed = train(clone, name, 2, out=tmp_path / "run")
    assert "2 rank(s) on cpu" in printed and (tmp_path / "run/report.html").exists()
    largest = assert_same(tmp_path / "run", ddp)
    print(f"{name} {version(name)}: largest difference of a step's loss {largest:.1e} nats")
    lines = (clone / "scripts" / f"train_{name}.py").read_text().splitlines()
    assert len(lines) < 80


KILLED = [  # script, ranks before and after
    ("lightning", (2, 1)),
    ("accelerate", (1, 2)),
    *(
        pytest.param(name, ranks, marks=pytest.mark.nightly)
        for name, ranks in (
            ("lightning", (2, 2)),
            ("lightning", (1, 2)),
            ("accelerate", (2, 2)),
            ("accelerate", (2, 1)),
        )
    ),
]


@pytest.mark.parametrize(("name", "ranks"), KILLED)
def test_a_killed_run_goes_on_also_on_other_ranks(clone, ddp, tmp_path, name, ranks):
    before, after = ranks
    stop_after(clone, name, before, 12, tmp_path / "run", signal.SIGKILL)
    printed = train(clone, name, after, out=tmp_path / "run")
    resumed_at = int(printed.split("resumed ")[1].split(" at step ")[1].split()[0])
    assert resumed_at >= SAVE_EVERY and resumed_at % SAVE_EVERY == 0
    largest = assert_same(tmp_path / "run", ddp)
    print(f"{name}: {before} -> {after} ranks at step {resumed_at}: differs by {largest:.1e} nats")


# ---- the table of manyhands.checkpoint.frameworks ----------------------------------------------


def save_with_lightning(folder: Path, **changes: object) -> list[str]:
    """The names of the files that ModelCheckpoint leaves of 6 steps of a tiny model."""
    import lightning.pytorch as L

    class Line(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layer(batch).square().mean()

    save = L.callbacks.ModelCheckpoint(str(folder), every_n_train_steps=2, **changes)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(accelerator="cpu", devices=1, max_steps=6, callbacks=[save], **quiet)
    trainer.fit(Line(), torch.utils.data.DataLoader(torch.ones(6, 1)))
    return sorted(path.name for path in folder.iterdir())


def test_lightnings_cells_of_the_table(tmp_path):
    """Folder, interval, pattern, number to keep, overwriting: what the rows say."""
    every = save_with_lightning(tmp_path / "all", filename="{step:03d}", save_top_k=-1)
    assert every == ["step=002.ckpt", "step=004.ckpt", "step=006.ckpt"]
    newest = {"monitor": "step", "mode": "max", "save_top_k": 2, "filename": "{step}"}
    assert save_with_lightning(tmp_path / "two", **newest) == ["step=4.ckpt", "step=6.ckpt"]
    again = save_with_lightning(tmp_path / "two", **newest)
    assert "step=6-v1.ckpt" in again and "step=6.ckpt" in again


def test_accelerates_cells_of_the_table(tmp_path):
    """Folder, pattern, number to keep, overwriting, and which one is taken."""
    import accelerate
    from accelerate.utils import ProjectConfiguration

    naming = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = accelerate.Accelerator(cpu=True, project_config=naming)
    model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
    for number in range(3):
        torch.nn.init.constant_(model.weight, number)
        accelerator.save_state()
    folder = tmp_path / "checkpoints"
    assert sorted(one.name for one in folder.iterdir()) == ["checkpoint_1", "checkpoint_2"]
    accelerator.load_state(str(folder / "checkpoint_1"))
    assert model.weight.item() == 1
    accelerator.load_state()
    assert model.weight.item() == 2
    naming.iteration = 2
    with pytest.raises(ValueError, match="checkpoint_2 .2. already exists"):
        accelerator.save_state()
