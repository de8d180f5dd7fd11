"""The jobs of many tasks: the same results on any number of ranks, and after a stop."""

import inspect
import json
import os
import shutil
import signal
import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import runs
import train_batch_size
import train_large_batch
import train_layerwise
import train_loss_surface
from commands import ROOT
from commands import run as run_command
from manyhands.batch_size import sweep
from manyhands.batch_size.problem import of_images
from manyhands.data import images
from manyhands.ranks.failures import BadInput, RankFailed
from manyhands.ranks.runtime import World
from manyhands.training import lock, storage, tasks
from manyhands.training.storage import read_json, read_lines

SCRIPTS = {
    "batch_size": train_batch_size,
    "loss_surface": train_loss_surface,
    "large_batch": train_large_batch,
    "layerwise": train_layerwise,
}
NUM_IMAGES = 130
SMALL = {
    "batch_size": {"rates": (0.4,), "networks": 1, "target": 0.5, "max_steps": 300},
    "loss_surface": {"networks": 1, "blocks": 1, "grid": 3, "images": 32, "epochs": 2},
    "large_batch": {"seeds": 2, "small": 4, "large": 16, "epochs": 2, "target": 0.5},
    "layerwise": {"seeds": 2, "tuning": 1, "small": 16, "small_steps": 4, "large_steps": 3},
}
NUM_TASKS = {"batch_size": 7, "loss_surface": 4, "large_batch": 28, "layerwise": 12}
PICTURES = {
    "batch_size": "batch_size.png",
    "loss_surface": "surfaces.png",
    "large_batch": "large_batch.png",
    "layerwise": "layerwise.png",
}
SHARES = {
    "batch_size": [4, 3],
    "loss_surface": [3, 1],
    "large_batch": [14, 14],
    "layerwise": [6, 6],
}
FREE = ("date", "ranks", "remake")  # what may differ between two runs of the same numbers


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A few digits as idx files: each rank would need a second to import scikit-learn."""
    folder, digits = tmp_path_factory.mktemp("data"), images.load("embedded")
    for name, inputs, labels in (
        ("train", digits.train_inputs, digits.train_labels),
        ("t10k", digits.test_inputs, digits.test_labels),
    ):
        pixels = (inputs[:NUM_IMAGES, 0] * 255).to(torch.uint8)
        for kind, part in (("images-idx3", pixels), ("labels-idx1", labels[:NUM_IMAGES])):
            part = part.to(torch.uint8)
            head = struct.pack(f">i{part.dim()}i", 8 << 8 | part.dim(), *part.shape)
            (folder / f"{name}-{kind}-ubyte").write_bytes(head + part.numpy().tobytes())
    return str(folder)


@pytest.fixture(scope="module")
def run(data: str):
    """Run a job's main on the ranks of a fork server; returns the numbers of result.json."""

    def run(
        word: str, out: Path, world_size: int, main=None, quiet=True, draws=False, **changes
    ) -> dict:
        given = {"data": data, "device": "cpu", "out": str(out), **SMALL[word], **changes}
        config = SCRIPTS[word].Config(**given)
        runs.train(SCRIPTS[word], world_size, config, main, draws, quiet)
        return numbers(out) if (out / "result.json").exists() else {}

    return run


def numbers(out: Path) -> dict:
    found = read_json(out / "result.json")
    for name, rows in found.get("outcomes", {}).items():
        found["outcomes"][name] = [row[:3] for row in rows]  # without the seconds
    return {name: value for name, value in found.items() if name not in FREE}


@pytest.fixture(scope="module", params=SCRIPTS)
def whole(request, run, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, dict]:
    """One of the jobs, on one rank, and what it found."""
    out = tmp_path_factory.mktemp("one") / "run"
    return request.param, out, run(request.param, out, 1, draws=True)


def test_the_folder_of_a_finished_job(whole):
    word, out, found = whole
    status = read_json(out / "status.json")
    assert (status["state"], status["step"]) == ("finished", NUM_TASKS[word])
    assert len(tasks.read_results(out)) == NUM_TASKS[word]
    lines = read_lines(out / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, NUM_TASKS[word] + 1))
    has_loss = [SCRIPTS[word].KIND.tell(one)[0] is not None for one in tasks.read_results(out)]
    assert ["loss" in line for line in lines] == has_loss
    page = (out / "report.html").read_text()
    assert f"{NUM_TASKS[word]} of {NUM_TASKS[word]}" in page
    assert SCRIPTS[word].KIND.noun in page and SCRIPTS[word].KIND.result_name in page
    assert "validation" not in page and "not a finite" not in page and "<img" in page
    result = read_json(out / "result.json")
    assert result["remake"].startswith(f"RANKS=1 bash sbatch/{word}.sbatch --")
    assert result["device"] == "CPU" and result["ranks"] == 1
    assert (out / PICTURES[word]).stat().st_size > 8000
    assert (out / "result.json").stat().st_size < 150_000
    if word == "batch_size":
        means = [one["mean"] for one in found["batches"]]
        assert means[0] > 3 * means[-1] and found["num_trainings"] == NUM_TASKS[word]
        assert 1 < found["critical_batch"] < 200 and 1 < found["noise_scale"] < 200
    elif word == "large_batch":
        assert sorted(sum(found["classes"], [])) == sorted(train_large_batch.NAMES)
        assert {len(rows) for rows in found["outcomes"].values()} == {2}
    elif word == "layerwise":
        assert list(found["classes"]) == ["16", "98"]  # 32 of 130 images are for validation
        assert sorted(sum(found["classes"]["98"], [])) == sorted(train_layerwise.NAMES)
        best = {(name, batch): rate for name, batch, rate, _ in found["all"]}
        for name, batch, tried in found["tried"]:
            assert tried[0][0] < best[name, batch] < tried[-1][0]
    else:
        assert [one["kind"] for one in found["networks"]] == ["skip", "plain"]
        assert all(one["losses"][1][1] == one["center"] for one in found["networks"])
        assert found["networks"][0]["center"] < found["networks"][0]["highest"]
        assert found["distances"] == [-1, 0, 1]


def test_any_number_of_ranks_finds_the_same(whole, run, tmp_path):
    word, _, found = whole
    assert run(word, tmp_path / "run", 2) == found
    own = [len(read_lines(file)) for file in sorted((tmp_path / "run/results").iterdir())]
    assert own == SHARES[word]


KILLED, STOPPED = (signal.SIGKILL, 1), (signal.SIGTERM, 3)


@pytest.mark.parametrize(
    ("whole", "number", "at"),
    [
        ("batch_size", *KILLED),
        pytest.param("batch_size", *STOPPED, marks=pytest.mark.nightly),
        ("loss_surface", *KILLED),
        ("loss_surface", *STOPPED),
        pytest.param("large_batch", *KILLED, marks=pytest.mark.nightly),
        ("large_batch", *STOPPED),
        ("layerwise", *KILLED),
        pytest.param("layerwise", *STOPPED, marks=pytest.mark.nightly),
    ],
    indirect=["whole"],
)
def test_a_job_goes_on_after_a_stop_or_a_kill(whole, run, tmp_path, number, at):
    """Rank 0 gets the signal when it sees so many results; that of a surface is the third."""
    word, _, found = whole
    out, main = tmp_path / "run", SCRIPTS[word].main

    def disturbed(config: object) -> None:
        add = tasks.Curve.add

        def add_and_signal(curve: tasks.Curve, *result: object) -> None:
            add(curve, *result)
            if curve.count >= at:
                os.kill(os.getpid(), number)

        tasks.Curve.add = add_and_signal
        try:
            main(config)
        except SystemExit as stop:
            assert stop.code == 75

    if number == signal.SIGKILL:
        with pytest.raises(RankFailed):
            run(word, out, 2, main=disturbed)
    else:
        run(word, out, 2, main=disturbed)
        assert read_json(out / "status.json")["state"] == "stopped"
    before = tasks.read_results(out)
    assert 0 < len(before) < NUM_TASKS[word]
    assert run(word, out, 3 if word == "loss_surface" else 1) == found
    after = tasks.read_results(out)
    assert len(after) == NUM_TASKS[word] and all(line in after for line in before)


# ---- a learner's own functions -----------------------------------------------------------------

RIGHT = {
    "batch_size": """
def best_rate(steps):
    means = {rate: sum(s) / len(s) for rate, s in steps.items() if None not in s}
    return min(means.items(), key=lambda item: item[1]) if means else None
""",
    "loss_surface": """
def roughness(losses):
    up_and_down = needed = 0.0
    for walk in [*losses, *losses.T]:
        up_and_down += (walk[1:] - walk[:-1]).abs().sum()
        needed += walk[0] + walk[-1] - 2 * walk.min()
    return up_and_down / needed - 1
""",
    "large_batch": """
def scaled_rate(rate, factor, rule):
    return rate * {"none": 1, "root": factor**0.5, "linear": factor}[rule]
""",
    "layerwise": """
from manyhands.layerwise import optimizers

class LARS(optimizers.LARS):
    pass
""",
}
USED = {
    "batch_size": "best_rate",
    "loss_surface": "roughness",
    "large_batch": "scaled_rate",
    "layerwise": "LARS",
}
REFUSED = [
    ("batch_size", "def best_rate(steps): return 0.3, 7", "best_rate gave (0.3, 7)"),
    ("batch_size", "def fit_steps(batches, steps): return 5.0", "fit_steps gave 5.0"),
    ("batch_size", "def noise_scale(*given): return -3.0", "noise_scale gave (-3.0,)"),
    (
        "loss_surface",
        "import torch\ndef random_direction(parameters, generator):\n"
        "    return [torch.randn(p.shape) for p in parameters]",
        "random_direction gave other numbers on rank 1 than on rank 0",
    ),
    (
        "loss_surface",
        "import torch\nimport torch.distributed as dist\n"
        "def surface(loss, parameters, directions, grid, group=None):\n"
        "    return torch.ones(len(grid), len(grid)) * (1 + dist.get_rank())",
        "surface gave other numbers on rank 1 than on rank 0",
    ),
    (
        "loss_surface",
        "import torch\ndef surface(*given): return torch.zeros(3, 3)",
        "surface gave 9 of 9 points without a loss above 0",
    ),
    ("loss_surface", "def roughness(losses): return None", "roughness gave None"),
    ("large_batch", "def ranked(values): return [['root rule']]", "ranked gave [['root rule']]"),
    ("large_batch", "def ranked(values): return None", "ranked gave None"),
]


@pytest.fixture
def write_mine(tmp_path, monkeypatch):
    """Write a learner's file to where the ranks look for it."""
    monkeypatch.setenv("MANYHANDS_MINE", str(tmp_path / "mine"))

    def write(word: str, text: str) -> None:
        (tmp_path / "mine").mkdir(exist_ok=True)
        (tmp_path / "mine" / f"{word}.py").write_text(text)

    return write


def test_own_functions_are_used(whole, run, tmp_path, write_mine, capfd):
    word, _, found = whole
    write_mine(word, RIGHT[word])
    assert run(word, tmp_path / "run", 1, quiet=False, impl="mine") == found
    assert f"yours: {USED[word]};" in capfd.readouterr().out


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained")


@pytest.mark.parametrize(("word", "text", "words"), REFUSED)
def test_own_functions_that_cannot_be_right_are_named(trained, run, write_mine, word, text, words):
    """What is trained is kept: each takes up the run that the one before has left."""
    write_mine(word, text)
    with pytest.raises(RankFailed) as failed:
        run(word, trained / word, 2 if "rank 1" in words else 1, impl="mine")
    assert f"BadInput: {words}" in str(failed.value), str(failed.value)
    assert read_json(trained / word / "status.json")["state"] == "failed"


# ---- settings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "changes", "words"),
    [
        ("batch_size", {"batch": 1298}, "--batch 1298: the data holds 1,297 samples"),
        ("batch_size", {"batch": -1}, "--batch -1: "),
        ("batch_size", {"rates": ()}, "take one or more numbers above 0"),
        ("batch_size", {"rates": (0.1, -0.1)}, "--rates 0.1 -0.1: take"),
        ("batch_size", {"rates": (0.1, float("nan"))}, "--rates 0.1 nan: take"),
        ("batch_size", {"rates": (0.1, 0.1)}, "name each of them once"),
        ("batch_size", {"target": 1.5}, "--target 1.5: an accuracy is above 0 and at most 1"),
        ("batch_size", {"max_steps": 0}, "--max-steps 0: take at least 1"),
        ("batch_size", {"networks": 0}, "--networks 0: take at least 1"),
        ("batch_size", {"largest": 0}, "--largest 0: take at least 1"),
        ("loss_surface", {"grid": 24}, "--grid 24: take an odd number, 3 or more"),
        ("loss_surface", {"grid": 1}, "--grid 1: take an odd number, 3 or more"),
        ("loss_surface", {"images": 1298}, "--images 1298: take at least 2 and at most the 1,297"),
        ("loss_surface", {"images": 1}, "--images 1: take at least 2"),
        ("loss_surface", {"span": 0.0}, "--span 0.0: take a number above 0"),
        ("loss_surface", {"epochs": 0}, "--epochs 0: take at least 1"),
        ("large_batch", {"remedy": 15}, "--remedy 15: there are 14; 0 takes all"),
        ("large_batch", {"small": 1}, "--small 1 --large 256: the large batch is a multiple"),
        ("large_batch", {"small": 24}, "--small 24 --large 256: the large batch is a multiple"),
        ("large_batch", {"large": 1312}, "and the data holds 1,297 images"),
        ("large_batch", {"rate": 0.0}, "--rate 0.0: an accuracy is above 0"),
        ("large_batch", {"epochs": 0}, "--epochs 0: take at least 1"),
        ("large_batch", {"seeds": 1}, "--seeds 1: take at least 2"),
        ("layerwise", {"optimizer": 7}, "--optimizer 7: there are 6; 0 takes them all"),
        ("layerwise", {"large": 1298}, "--large 1298: the large batch is larger than the small"),
        ("layerwise", {"small": 64, "large": 32}, "--small 64 --large 32: the large batch"),
        ("layerwise", {"large_steps": 0}, "--large-steps 0: take at least 1"),
        ("layerwise", {"seeds": 1}, "--seeds 1: take at least 2"),
        ("layerwise", {"tuning": 0}, "--tuning 0: take at least 1"),
    ],
)
def test_settings_that_cannot_be(word, changes, words):
    script = SCRIPTS[word]
    refuse = getattr(script, "list_tasks", None) or script.check
    refuse(script.Config(), 1297)
    with pytest.raises(BadInput) as refused:
        refuse(script.Config(**changes), 1297)
    assert words in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("word", "flags", "words"),
    [
        ("batch_size", ["--rates"], "take one or more numbers above 0"),
        ("loss_surface", ["--data", "nowhere"], "there is no folder nowhere"),
    ],
)
def test_what_cannot_be_is_one_line_and_nothing_is_written(tmp_path, data, word, flags, words):
    script = ROOT / "scripts" / f"train_{word}.py"
    code, out, err = run_command(
        [sys.executable, script, "--data", data, *flags, "--device", "cpu"], tmp_path
    )
    assert (code, err.count("\n")) == (2, 1) and words in err and "Traceback" not in out + err
    assert not list(tmp_path.iterdir())


def test_another_run_s_folder_is_not_touched(whole, run):
    word, out, _ = whole
    name = "seeds" if "seeds" in SMALL[word] else "networks"
    old = SMALL[word][name]
    with pytest.raises(RankFailed, match=f"holds a run with {name}={old}, not {old + 1}"):
        run(word, out, 1, **{name: old + 1})


def test_squares_on_the_way_are_those_of_replicas_and_of_the_whole_batch(data):
    """The training is that of the whole batch, and the squares are of its own gradients."""
    given, ways = of_images(images.load(data), "mlp"), (0.4, 3, 0.6, 200)
    small_squares, large_squares = sweep.squares_on_the_way(given, 8, 32, *ways)
    (num_steps,) = sweep.tune(given, 32, (0.4,), (3,), 0.6, 200)[0.4]
    later = (sweep.PATIENCE - 1) * sweep.steps_between(given, 32)  # until the target counts
    assert len(small_squares) == len(large_squares) == num_steps + later
    training = sweep.Training(given, 32, 0.4, 3)
    for small, large in list(zip(small_squares, large_squares, strict=True))[:3]:
        chosen = next(training.batches)
        pieces = [
            training.gradient(given.train_inputs[some], given.train_labels[some])
            for some in chosen.split(8)
        ]
        assert small == pytest.approx(sum(float(p @ p) for p in pieces) / 4, rel=1e-5)
        whole = training.gradient(given.train_inputs[chosen], given.train_labels[chosen])
        assert large == pytest.approx(float(whole @ whole), rel=1e-4)
        training.descend(whole)


def test_a_job_goes_on_with_the_same_images_only(data, tmp_path):
    """Wherever they lie: what is done already was found on those."""
    shutil.copytree(data, tmp_path / "data")
    config = train_large_batch.Config(data=data, out=str(tmp_path / "run"), remedy=1)

    def begin(where: str | Path) -> dict:
        """Open the run as a job does that has nothing to do."""
        images_there = images.load(str(where))
        changed = replace(config, data=str(where))
        world = World(0, 0, 1, torch.device("cpu"))
        run = tasks.TaskRun(train_large_batch.KIND, changed, world, [], images_there)
        lock.release(run.folder)
        return read_json(run.folder / "config.json")["identity"]

    assert begin(data) == begin(tmp_path / "data")
    labels = tmp_path / "data" / "train-labels-idx1-ubyte"
    labels.write_bytes(labels.read_bytes()[:-1] + b"\0")
    with pytest.raises(BadInput, match=r"other data, .* \(SHA-256 .* and this is .* new folder$"):
        begin(tmp_path / "data")


# ---- an array ----------------------------------------------------------------------------------


def write_like(source: Path, folder: Path, **changes: object) -> None:
    """Write a run like that in `source`, but with other settings."""
    shutil.copytree(source, folder)
    about = read_json(folder / "config.json")
    about["identity"] |= changes
    (folder / "config.json").write_text(json.dumps(about))


def test_the_last_job_of_an_array_draws_the_whole(run, tmp_path, capfd):
    """Three of seven, in folders as launch.sh names them; another array's do not count."""
    for done, (number, batch) in enumerate([(6, 64), (3, 8), (5, 32)], start=1):
        out = tmp_path / f"batch_size-17_{number}"
        capfd.readouterr()
        run("batch_size", out, 1, quiet=False, batch=batch)
        said = capfd.readouterr().out
        assert f"{done} of 7 batch sizes are done\n" in said
        assert (out / "batch_size.png").exists() == (done == 3) == ("critical batch" in said)
        if done == 1:
            write_like(out, tmp_path / "batch_size-18_4", batch=16)
            write_like(out, tmp_path / "batch_size-17_4", batch=16, target=0.6)
            write_like(out, tmp_path / "batch_size-17_0", batch=1)
            for file in (tmp_path / "batch_size-17_0" / "results").iterdir():
                file.write_text("")  # it has only begun
    found = read_json(out / "result.json")
    assert [one["batch"] for one in found["batches"]] == [8, 32, 64]
    assert found["num_trainings"] == 3 and "--batch" not in found["remake"]
    assert "--batch 64" in read_json(tmp_path / "batch_size-17_6/result.json")["remake"]


def test_the_last_job_of_another_array_ranks_all(run, tmp_path, capfd):
    for done, number in enumerate((3, 1), start=1):
        out = tmp_path / f"large_batch-17_{number}"
        capfd.readouterr()
        run("large_batch", out, 1, quiet=False, remedy=number)
        assert f"{done} of 14 remedies are done\n" in capfd.readouterr().out
    found = read_json(out / "result.json")
    assert list(found["outcomes"]) == ["small batch", "tuned rate"]
    assert "--remedy" not in found["remake"] and (out / "large_batch.png").exists()


def test_all_settings_are_told():
    """A run may go on only with its own settings: all but where it runs and with whose code.

    Which file is for what shows in the hash of the data.
    """
    for script in SCRIPTS.values():
        names = set(inspect.signature(script.Config).parameters)
        assert names - set(script.KIND.identity) - {"splits"} == {"impl", "device", "out"}
        assert len(names) <= 13


def test_stored_runs_say_how_they_are_made_and_hold_what_the_lessons_draw(capsys):
    package = Path(storage.__file__).parents[1]
    # The planner's file holds runs of others: see test_planner.py.
    paths = sorted({*package.glob("*/stored_*.json")} - {*package.glob("planner/*")})
    names = [(path.parent.name, path.stem.removeprefix("stored_")) for path in paths]
    assert names == [
        ("batch_size", "cnn"),
        ("batch_size", "digits"),
        ("batch_size", "mnist"),
        ("batch_size", "transformer"),
        ("checkpoint", "elastic"),
        ("checkpoint", "goodput"),
        ("ddp", "wikitext"),
        ("large_batch", "mnist"),
        ("layerwise", "mnist"),
        ("loss_surface", "networks"),
    ]
    for path, (lesson, name) in zip(paths, names, strict=True):
        found = storage.stored(lesson, name)
        job = f"bash sbatch/{lesson}.sbatch"
        how = 'python -c "from manyhands.programs.' if lesson == "checkpoint" else job
        assert how in found["remake"] in capsys.readouterr().out
        assert path.stat().st_size < 150_000
    middle = len(found["distances"]) // 2
    for one in found["networks"]:
        assert one["losses"][middle][middle] == one["center"]
    skip, plain = (
        [one["roughness"] for one in found["networks"] if one["kind"] == kind]
        for kind in ("skip", "plain")
    )
    assert len(skip) == len(plain) == 5 and max(skip) < min(plain)
