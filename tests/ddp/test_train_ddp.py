"""The main job, as torchrun starts it and with a learner's own functions; and what it refuses."""

import socket
import sys
from pathlib import Path

import pytest

import train_ddp
from commands import flags, make_clone, run
from manyhands.jobs import mine
from manyhands.programs import ddp
from runs import (
    Runs,
    assert_a_signal_in_the_validation_stops_all_ranks,
    assert_every_impl_is_tried,
    assert_job_trains_like_one_process,
    assert_same_training,
    assert_whole,
    refusal,
    start,
)
from units import lessons

YOURS = {
    "mine": "place, process_group, ShardedSampler, mean_over_ranks, save_once, train",
    "scratch": "",
    "torch": "",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(train_ddp, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with mine/ as somebody has it who has solved lesson 06."""
    folder = make_clone(tmp_path_factory.mktemp("clone"))
    answers = train_ddp.Parts(train=ddp.train)._asdict()
    del answers["BucketedDDP"]
    mine.write("ddp", answers, folder / "mine")
    return folder


def test_the_jobs_of_lessons_05_and_06_import_no_later_lesson():
    program = "import train_single, train_data_parallel, train_ddp, sys; print(*sys.modules)"
    command = [sys.executable, "-c", program]
    code, out, err = run(command, Path(train_ddp.__file__).parent)
    assert code == 0, err
    rooms = {name.split(".")[1] for name in out.split() if name.startswith("manyhands.")}
    later = {word for word, number in lessons().items() if number > 6}
    assert "ddp" in rooms and not rooms & later


@pytest.mark.parametrize("impl", YOURS)
def test_job_on_two_ranks_trains_like_one_process(clone, runs, tmp_path, impl):
    assert_job_trains_like_one_process(runs, clone, tmp_path, YOURS[impl], impl=impl)
    assert_every_impl_is_tried(train_ddp, [{"impl": impl} for impl in YOURS])


def test_plain_torchrun_from_another_folder(clone, runs, tmp_path):
    torchrun = Path(sys.executable).with_name("torchrun")
    command = [torchrun, "--standalone", "--nproc-per-node=3", clone / "scripts" / "train_ddp.py"]
    code, _, err = run([*command, *flags(clone)], tmp_path)
    assert code == 0, err
    assert_whole(tmp_path / "runs" / "ddp-001", num_ranks=3, pictures=5)
    assert_same_training(tmp_path / "runs" / "ddp-001", runs.single())


@pytest.mark.nightly
def test_a_signal_in_the_validation_stops_all_ranks(runs, tmp_path):
    assert_a_signal_in_the_validation_stops_all_ranks(runs, tmp_path, {}, 2)


# ---- bad input: exit code 2, one line, and nothing touched -------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "cuda"}, "--device cuda, but this node has 0 GPU(s) for 1 process(es)"),
        ({"batch": 107}, "holds only 106 blocks"),
        *(({name: 0}, f"{name} is 0: take at least 1") for name in ("batch", "steps")),
        ({"data": "no-such-data"}, "'no-such-data': no such folder or file"),
    ],
)
def test_settings_that_cannot_be(runs, tmp_path, changes, words):
    assert words in refusal(train_ddp, runs, tmp_path, **changes)


def test_words_that_are_no_flags(tmp_path):
    for wrong in (["--stepz", "3"], ["--steps", "ten"], ["--impl", "yours"], ["--steps"]):
        code, out, err = start(train_ddp, wrong, tmp_path)
        assert code == 2 and "Traceback" not in out + err and wrong[0] in err
    assert not list(tmp_path.iterdir())


def test_half_an_environment(runs, tmp_path):
    line = refusal(train_ddp, runs, tmp_path, env={"WORLD_SIZE": "2"})
    assert "RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set: start this script" in line


HAND = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


def test_port_in_use(runs, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        env = HAND | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        line = refusal(train_ddp, runs, tmp_path, env=env)
    assert f"cannot meet the other ranks at 127.0.0.1:{port}" in line and "MASTER_PORT" in line


# ---- a learner's files -------------------------------------------------------------------------

BROKEN = {
    "def BucketedDDP(:": "does not run (SyntaxError: invalid syntax",
    "import no_such_module": "does not run (ModuleNotFoundError: No module named",
    "x = 1\n1 / 0": "does not run (ZeroDivisionError: division by zero, line 2)",
    "raise SystemExit(0)": "does not run (SystemExit: 0, line 1)",
    "raise ValueError('a\\nb')": "does not run (ValueError: a, line 1)",
    "import json\njson.loads('[')": "Expecting value: line 1 column 2 (char 1), line 2)",
    "\0": "cannot contain null bytes): mend it",
    "x = 1": "defines none of",
}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """The folder mine/ of a course, empty."""
    (tmp_path / "mine").mkdir()
    return tmp_path / "mine"


def test_impl_mine_without_a_file_or_with_a_broken_one(runs, tmp_path, own):
    line = refusal(train_ddp, runs, tmp_path, impl="mine")
    assert "mine/ddp.py is not there: run check.keep()" in line
    for text, words in BROKEN.items():
        (own / "ddp.py").write_text(text)
        assert words in refusal(train_ddp, runs, tmp_path, impl="mine")
    (own / "ddp.py").write_text("def place(): pass")
    (own / "data_parallel.py").write_text("x = ")
    line = refusal(train_ddp, runs, tmp_path, impl="mine")
    assert "mine/data_parallel.py does not run (Synt" in line


SPEAKING = """
class {name}:
    def __new__(cls, module):
        print("this is {name} of {file}")
        return module
"""
KEPT = "def mean_over_ranks(total, count):\n    return float(total) / float(count)\n"


@pytest.mark.parametrize("file", ["data_parallel", "ddp"])
def test_impl_mine_of_lesson_06_wraps_with(runs, tmp_path, own, file):
    (own / "ddp.py").write_text(KEPT)
    with open(own / f"{file}.py", "a") as answers:
        answers.write(SPEAKING.format(name="BucketedDDP", file=file))
    code, out, err = start(train_ddp, flags(runs.folder, impl="mine", steps=1), tmp_path)
    assert code == 0, err
    said = [line for line in out.splitlines() if line.startswith("this is ")]
    assert said == [f"this is BucketedDDP of {file}"]
    yours = next(line for line in out.splitlines() if line.startswith("yours: "))
    assert "BucketedDDP" in yours and "mean_over_ranks" in yours
