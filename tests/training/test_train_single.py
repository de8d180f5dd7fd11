"""The script that trains in one process: what it trains, and all that it and its kin refuse."""

import json
import resource
import shutil
import subprocess
from pathlib import Path

import pytest

import train_single
from commands import flags
from manyhands.saving.index import sealed
from manyhands.training.storage import read_json
from runs import Runs, assert_starts_by_itself, assert_whole, refusal, start, train


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(train_single, tmp_path_factory.mktemp("runs"))


@pytest.fixture
def refuse(runs: Runs, tmp_path: Path):
    """Run the script, which has to refuse: returns its one line."""

    def refuse(env: dict | None = None, file_bytes: int = 0, **changes) -> str:
        return refusal(train_single, runs, tmp_path, env, file_bytes, **changes)

    return refuse


def test_one_process_leaves_a_whole_folder(runs, tmp_path):
    train(train_single, 1, runs.config(tmp_path / "run"), draws=True)
    assert_whole(tmp_path / "run", num_ranks=1, pictures=5)


def test_the_script_starts_by_itself(tmp_path):
    assert_starts_by_itself(train_single, tmp_path)


# ---- bad input: exit code 2, one line, and nothing touched -------------------------------------

SETTINGS = [
    ({"data": "wikitext-2"}, "scripts/prepare_data.py --data wikitext-2"),
    ({"data": "no-such-data"}, "'no-such-data': no such folder or file, nor one of"),
    ({"block": 5000}, "--block 5000 is too long: the train text of text holds"),
    ({"block": 0}, "--block is 0"),
    ({"batch": 107}, "holds only 106 blocks"),
    *(({"batch": size}, f"batch is {size}: take at least 1") for size in (0, -6)),
    *(({"steps": count}, f"steps is {count}: take at least 1") for count in (0, -1)),
    ({"save_every": 0}, "save_every is 0: take at least 1"),
    ({"valid_tokens": -1}, "valid_tokens is -1: take 0 for all"),
    *(({"layers": layers}, "layer") for layers in (0, -1)),
    *(({"vocab": vocab}, f"--vocab is {vocab}") for vocab in (5, -1)),
    ({"learning_rate": 0}, "learning_rate is 0.0"),
    ({"learning_rate": "nan"}, "learning_rate is nan"),
    ({"seed": 1 << 70}, "seed"),
    ({"device": "gpu"}, "--device is 'gpu': choose auto, cpu or cuda"),
    ({"device": "cuda"}, "--device cuda, but this node has 0 GPU(s) for 1 process(es)"),
]


@pytest.mark.parametrize(("changes", "words"), SETTINGS)
def test_settings_that_cannot_be(refuse, tmp_path, changes, words):
    assert words in refuse(env={"XDG_CACHE_HOME": str(tmp_path)}, **changes)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("", b"", "no .txt file among the 0 entries"),
        ("a.txt", b"", "empty. Give a --data that holds text"),
        ("a.txt", b"text\0\1\2", "its byte 4 is zero"),
        ("a.txt", b"text\xff\xfe", "is no UTF-8 text, see its byte 4"),
        ("a.txt", b"short", "is too long"),
    ],
)
def test_data_that_is_no_text(refuse, tmp_path, name, content, words):
    (tmp_path / "data").mkdir()
    if name:
        (tmp_path / "data" / name).write_bytes(content)
    assert words in refuse(data=tmp_path / "data")


# ---- ... of a run that is there, and of a disk -------------------------------------------------


@pytest.fixture(scope="module")
def stopped(runs: Runs) -> Path:
    """A run of one process, as a power cut after the checkpoint of step 5 leaves it."""
    folder = runs.folder / "run"
    words = flags(runs.folder, out="run", steps=10, save_every=5)
    code, _, errors = start(train_single, words, runs.folder)
    assert code == 0, errors
    shutil.rmtree(folder / "checkpoints" / "step-00000010")
    for name in ("status.json", "model.pt"):
        (folder / name).unlink()
    return folder


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def rename_job(path: Path) -> None:
    index = read_json(path)
    del index["sha256"]
    index["values"]["identity/job"] = "other"
    path.write_text(json.dumps(sealed(index)))


SPOILT = [
    ({}, "rank-00000.pt", cut, "rank-00000.pt has "),
    ({}, "rank-00000.pt", Path.unlink, "rank-00000.pt is missing"),
    ({}, "rank-00000.pt", lambda path: path.write_bytes(b""), "rank-00000.pt has 0 of "),
    ({}, "index.json", cut, "index.json is missing or damaged"),
    ({}, "index.json", rename_job, "was saved with job=other, not single"),
    ({"layers": 2}, "", None, "holds a run with layers=1, not 2"),
    ({"steps": 50}, "", None, "holds a run with steps=10, not 50"),
    ({"vocab": 300}, "", None, "holds a run with vocab=0, not 300"),
]


@pytest.mark.parametrize(("changes", "name", "spoil", "words"), SPOILT)
def test_checkpoint_that_cannot_go_on(refuse, stopped, tmp_path, changes, name, spoil, words):
    shutil.copytree(stopped, tmp_path / "run")
    if spoil:
        spoil(tmp_path / "run" / "checkpoints" / "step-00000005" / name)
    assert words in refuse(**{"steps": 10, "save_every": 5, **changes})


def test_folder_that_is_no_run(refuse, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.tex").write_text("three years of work")
    assert "holds files but no run" in refuse(out=tmp_path / "notes")
    assert "is a file" in refuse(out=tmp_path / "notes" / "thesis.tex")
    assert "Not a directory" in refuse(out=tmp_path / "notes" / "thesis.tex" / "run")


def test_full_disk_at_a_checkpoint_and_at_the_start(refuse, runs, tmp_path):
    """No file may grow beyond a limit: the kernel then refuses as it does on a full disk."""
    line = refuse(file_bytes=5000, save_every=1)
    assert "cannot save" in line and "File too large" in line
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    assert "File too large" in refuse(file_bytes=500, out=tmp_path / "other")
    again = flags(runs.folder, out="run", save_every=1)
    assert start(train_single, again, tmp_path)[0] == 0
    assert_whole(tmp_path / "run", num_ranks=1, pictures=5)


def test_full_disk_that_is_really_full(refuse, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
        reason = mounted.stderr.strip() if mounted.returncode else ""
    except FileNotFoundError as error:
        reason = str(error)
    if reason:
        pytest.skip(f"a full disk needs root and the right to mount: {reason}")
    try:
        line = refuse(file_bytes=resource.RLIM_INFINITY, out=disk / "run", save_every=1)
        assert "cannot save" in line and "No space left on device" in line
        assert not list((disk / "run" / "checkpoints").iterdir())
    finally:
        subprocess.run(["umount", str(disk)], check=True)
