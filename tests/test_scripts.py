"""The training scripts as a person starts them: on real ranks, with every --impl, or wrongly."""

import gc
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
import torch.distributed as dist

import train_checkpoint
import train_data_parallel
import train_ddp
import train_fsdp
import train_memory
import train_mesh
import train_pipeline
import train_tensor
from jobs import ROOT, contents, environment, flags, losses, make_clone, run, settings
from manyhands.checkpoint.index import sealed
from manyhands.ddp import program
from manyhands.jobs import mine
from manyhands.models.transformer import Transformer
from manyhands.pipeline import stages
from manyhands.ranks.failures import RankFailed
from manyhands.ranks.lab import run_ranks
from manyhands.training.run import Run
from manyhands.training.storage import read_json

SCRIPTS = {
    "ddp": train_ddp,
    "data_parallel": train_data_parallel,
    "memory": train_memory,
    "fsdp": train_fsdp,
    "checkpoint": train_checkpoint,
    "pipeline": train_pipeline,
    "tensor": train_tensor,
    "mesh": train_mesh,
}
THREE = {"micro_batches": 3}  # a batch of 6 can be cut into these
TWO = {"layers": 2}  # as many heads
JOBS = [  # a torchrun takes seconds; the other ways of all but ddp run on quicker ranks below
    *(("ddp", {"impl": impl}) for impl in ("mine", "scratch", "torch")),
    *(("data_parallel", {"impl": impl, "mine": True}) for impl in ("server", "overlapped")),
    ("memory", {"impl": "mine", "save": "checkpointing"}),
    ("fsdp", {"impl": "mine"}),
    ("checkpoint", {"impl": "mine"}),
    ("pipeline", {"impl": "mine", **THREE}),
    ("tensor", {"impl": "mine", **TWO}),
    ("mesh", {"impl": "mine", "clip": 100, **TWO, **THREE}),
]
WAYS = [  # lesson, settings, ranks
    *(("data_parallel", {"impl": impl}, 2) for impl in ("naive", "bucketed", "torch")),
    ("data_parallel", {"impl": "overlapped"}, 2),
    ("data_parallel", {"impl": "server"}, 3),
    *(("memory", {"save": save}, 2) for save in ("nothing", "checkpointing", "accumulation")),
    ("memory", {"impl": "torch", "save": "checkpointing"}, 1),
    *(("fsdp", {"impl": impl}, 2) for impl in ("zero1", "zero2", "zero3", "torch")),
    *(("fsdp", {"impl": impl, "mesh": "2x1"}, 2) for impl in ("zero3", "torch")),
    ("fsdp", {"impl": "torch", "offload": True}, 2),
    ("fsdp", {"impl": "zero3"}, 3),
    *(("checkpoint", {"impl": impl}, 2) for impl in ("scratch", "torch")),
    *(("pipeline", {"schedule": way, **THREE}, 3) for way in ("naive", "gpipe", "1f1b")),
    ("pipeline", {"schedule": "interleaved", "micro_batches": 2, **TWO}, 2),
    ("pipeline", {"recompute": True, "stages": 2, **THREE}, 4),
    *(("pipeline", {"impl": "torch", "schedule": way, **THREE}, 2) for way in ("gpipe", "1f1b")),
    ("pipeline", {"impl": "torch", "schedule": "zero-bubble", "micro_batches": 2, **TWO}, 2),
    *(("tensor", {"impl": impl, **TWO}, 2) for impl in ("scratch", "torch")),
    *(("tensor", {"impl": impl, "sequence": True, **TWO}, 2) for impl in ("scratch", "torch")),
    *(("tensor", {"impl": impl, "tensor": 2, **TWO}, 4) for impl in ("scratch", "torch")),
    *(("mesh", {"impl": impl, "dp": 2, **TWO, **THREE}, 4) for impl in ("scratch", "torch")),
    *(("mesh", {"impl": impl, "pp": 2, **TWO, **THREE}, 4) for impl in ("scratch", "torch")),
    ("mesh", {"dp": 6, "replicas": 2, "micro_batches": 1, "clip": 100.0}, 6),
]
KILLED = [  # the same, and a rank that is killed
    *(("data_parallel", {"impl": "server"}, 3, victim) for victim in (0, 1)),
    ("memory", {"save": "all"}, 2, 1),
    ("fsdp", {"impl": "zero1"}, 2, 1),
    ("fsdp", {"impl": "zero2"}, 3, 0),
    ("fsdp", {"impl": "zero3", "mesh": "2x2", "batch": 8}, 4, 3),
    ("fsdp", {"impl": "torch", "mesh": "2x2", "batch": 8}, 4, 2),
    ("fsdp", {"impl": "torch"}, 3, 1),
    ("checkpoint", {"impl": "scratch"}, 3, 1),
    ("checkpoint", {"impl": "torch"}, 2, 0),
    ("pipeline", {**THREE}, 3, 1),
    ("pipeline", {"stages": 2, **THREE}, 4, 3),
    ("tensor", {**TWO}, 2, 0),
    ("tensor", {"impl": "torch", "tensor": 2, "sequence": True, **TWO}, 4, 2),
    ("mesh", {"pp": 2, "dp": 2, "clip": 0.5, "micro_batches": 1}, 4, 1),
    ("mesh", {"impl": "torch", "dp": 2, "micro_batches": 1, **TWO}, 4, 2),
]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_clone(tmp_path_factory.mktemp("clone"))


@pytest.fixture(scope="module")
def single_of(clone: Path) -> Callable[[int], Path]:
    """The run of one process with so many layers, which the others have to agree with."""

    @cache
    def run_single(layers: int) -> Path:
        script, out = clone / "scripts" / "train_single.py", clone / f"single-{layers}"
        words = flags(clone, out=out, layers=layers)
        code, _, err = run([sys.executable, script, *words], clone)
        assert code == 0, err
        assert_whole(out, num_ranks=1)
        return out

    return run_single


@pytest.fixture(scope="module")
def single(single_of: Callable[[int], Path]) -> Path:
    return single_of(1)


def assert_whole(folder: Path, num_ranks: int, steps: int = 20) -> None:
    """The folder of a finished run holds what it has to."""
    about = json.loads((folder / "config.json").read_text())
    assert about["config"]["steps"] == steps and len(about["ranks"]) == num_ranks
    assert len(losses(folder)) == steps == len((folder / "metrics.jsonl").open().readlines())
    assert json.loads((folder / "status.json").read_text())["state"] == "finished"
    page = (folder / "report.html").read_text()
    assert page.count("<img") == 5 and "</html>" in page
    weights = torch.load(folder / "model.pt", weights_only=True)
    assert "tokens.weight" in weights and not any(name.startswith("module.") for name in weights)
    assert len(list((folder / "ranks").iterdir())) == num_ranks
    assert not list(folder.rglob("*.partial"))


def assert_same_training(folder: Path, other: Path) -> None:
    """Both runs saw the same batches and learned the same."""
    assert losses(folder) == pytest.approx(losses(other), abs=1e-4)
    valid, other_valid = (
        json.loads((one / "status.json").read_text())["valid_loss"] for one in (folder, other)
    )
    assert valid == pytest.approx(other_valid, abs=1e-4)


def write_mine(clone: Path) -> None:
    """Write mine/ as somebody does who has solved lessons 05 and 06."""
    lesson_06 = train_ddp.Parts(train=program.train)._asdict()
    del lesson_06["BucketedDDP"]
    mine.write("ddp", lesson_06, clone / "mine")
    for lesson in ("data_parallel", "memory", "fsdp", "checkpoint", "pipeline", "tensor", "mesh"):
        mine.write(lesson, SCRIPTS[lesson].Parts()._asdict(), clone / "mine")


YOURS = {
    "ddp": "place, process_group, ShardedSampler, mean_over_ranks, save_once, train",
    "server": "broadcast_state, worker_step, server_step",
    "overlapped": "BucketedDDP",
    "memory": "accumulate, Checkpoint",
    "fsdp": "Flat, ShardedOptimizer, reduce_during_backward, ShardedFlat, FSDP, torch_fsdp, "
    "make_mesh",
    "checkpoint": "samples_of_step",
    "pipeline": "partition, Pipeline, sum_tied, gpipe, one_f_one_b, interleaved, make_grid",
    "tensor": "TensorParallel, TensorSequenceParallel, data_place",
    "mesh": "coordinates, make_groups, shard_and_cut, mesh_norm, seed_of",
}


def test_every_training_script_has_a_job_that_starts_it_and_a_test():
    scripts = {path.stem for path in (ROOT / "scripts").glob("train_*.py")} - {"train_single"}
    # Those of many tasks have their tests in test_train_first_job.py and test_task_jobs.py.
    of_tasks = {"train_first_job", "train_loss_surface", "train_batch_size"}
    of_tasks |= {"train_large_batch", "train_layerwise", "train_compare"}
    # Those that need the extra `frameworks` are started by torchrun; tests in test_frameworks.py.
    of_frameworks = {"train_lightning", "train_accelerate"}
    assert scripts == {f"train_{lesson}" for lesson in SCRIPTS} | of_tasks | of_frameworks
    for script in scripts - of_frameworks:
        job = (ROOT / "sbatch" / f"{script.removeprefix('train_')}.sbatch").read_text()
        assert f' scripts/{script}.py "$@"' in job.splitlines()[-1]
    tried = [*JOBS, *((lesson, settings) for lesson, settings, _ in WAYS)]
    for lesson, script in SCRIPTS.items():
        impls = {settings.get("impl", "scratch") for word, settings in tried if word == lesson}
        assert impls == {*get_args(get_type_hints(script.Config)["impl"])}


@pytest.mark.parametrize(("lesson", "changes"), JOBS)
def test_job_on_two_ranks_trains_like_one_process(clone, single_of, tmp_path, lesson, changes):
    write_mine(clone)
    job = ["bash", clone / "sbatch" / f"{lesson}.sbatch"]
    held = environment(MANYHANDS_RULES="nccl")  # what passes is right on GPUs
    words = [*job, *flags(clone, out=tmp_path / "run", **changes)]
    code, out, err = run(words, tmp_path, env=held)
    assert code == 0, err
    assert "2 rank(s) on cpu" in out and f"report: {tmp_path}/run/report.html" in out
    if changes["impl"] == "mine" or "mine" in changes:
        yours = YOURS[lesson if changes["impl"] == "mine" else changes["impl"]]
        assert f"yours: {yours}; the course's: all else" in out
    assert ("memory: at most " in out) == (lesson not in ("ddp", "data_parallel"))
    page = (tmp_path / "run/report.html").read_text()
    for text in (out, page):
        assert ("in the last step the ranks waited " in text) == (lesson == "pipeline")
    assert all(line.startswith("step ") for line in err.splitlines()), err
    assert_whole(tmp_path / "run", num_ranks=2)
    assert_same_training(tmp_path / "run", single_of(changes.get("layers", 1)))


# ---- all ways of a lesson, on ranks of a fork server -------------------------------------------


def config_of(lesson: str, clone: Path, out: Path, **changes: object) -> object:
    return SCRIPTS[lesson].Config(**settings(clone, out=str(out), **changes))


def train(lesson: str, world_size: int, config: object, fn=None) -> list:
    fn = fn or SCRIPTS[lesson].main
    return run_ranks(fn, world_size, config, join=False, quiet=True, timeout_s=60)


@pytest.mark.parametrize(("lesson", "changes", "world_size"), WAYS)
def test_every_way_trains_like_one_process(clone, single_of, tmp_path, lesson, changes, world_size):
    train(lesson, world_size, config_of(lesson, clone, tmp_path / "run", **changes))
    assert_whole(tmp_path / "run", num_ranks=world_size)
    assert_same_training(tmp_path / "run", single_of(changes.get("layers", 1)))


@pytest.mark.parametrize(
    ("lesson", "changes"),
    [
        ("memory", {"save": "autocast"}),
        ("memory", {"save": "all"}),
        *(("fsdp", {"impl": impl, "dtype": "bfloat16"}) for impl in ("zero3", "torch")),
        *(("tensor", {"impl": i, "dtype": "bfloat16", **TWO}) for i in ("scratch", "torch")),
        *(("pipeline", {"impl": i, "dtype": "bfloat16", **THREE}) for i in ("scratch", "torch")),
    ],
)
def test_bfloat16_trains_nearly_like_float32(clone, single_of, tmp_path, lesson, changes):
    single = single_of(changes.get("layers", 1))
    train(lesson, 2, config_of(lesson, clone, tmp_path / "run", **changes))
    assert losses(tmp_path / "run") == pytest.approx(losses(single), abs=0.03)
    assert losses(tmp_path / "run") != pytest.approx(losses(single), abs=1e-5)


def test_server_needs_a_batch_that_its_workers_can_share(clone, tmp_path):
    """Six samples go to three workers, though not to four ranks; and five to no two workers."""
    small = {"impl": "server", "batch": 6, "steps": 2}
    train("data_parallel", 4, config_of("data_parallel", clone, tmp_path / "run", **small))
    other = config_of("data_parallel", clone, tmp_path / "other", impl="server", batch=5)
    with pytest.raises(RankFailed, match="batch 5 cannot be shared evenly by 2 ranks"):
        train("data_parallel", 3, other)
    assert not (tmp_path / "other").exists()


def test_pytorch_s_1f1b_with_fewer_micro_batches_than_ranks_is_refused(clone, tmp_path):
    few = {"impl": "torch", "micro_batches": 2}
    with pytest.raises(RankFailed, match="1F1B with 2 micro-batches on 3 ranks: take --micro-bat"):
        train("pipeline", 3, config_of("pipeline", clone, tmp_path / "run", **few))
    assert not (tmp_path / "run").exists()


def held_stages(path: Path) -> tuple[set[int], set[int]]:
    """Of a cut model: the layers whose parameters still live, and those of this rank's stages."""
    parts, model = train_pipeline.Parts(), Transformer(10, 8, 4)
    layers = stages.layers_of(model)
    refs = {i: [weakref.ref(p) for p in one.parameters()] for i, one in enumerate(layers)}
    pipe, replicas = parts.make_grid(3)
    own = range(dist.get_rank(), 3, 3)
    place = train_pipeline.Place(pipe, pipe, replicas, (0, 1), 3, own, 3)
    example = torch.zeros(2, 8, dtype=torch.long)
    kept = train_pipeline.take_stages(model, example, place, parts, path)
    start, stop = json.loads(path.read_text())["bounds"][own[0] :][:2]
    del model, layers
    gc.collect()
    held = {i for i, found in refs.items() if any(ref() is not None for ref in found)}
    assert kept
    return held, set(range(start, stop))


def test_a_rank_of_a_pipeline_holds_no_stage_of_others(tmp_path):
    for rank, (held, own) in enumerate(run_ranks(held_stages, 3, tmp_path / "stages.json")):
        assert held == (own if rank == 1 else own | {0, 5}), "embedding and head share a matrix"


@pytest.mark.parametrize(("lesson", "changes", "world_size", "victim"), KILLED)
def test_a_killed_rank_goes_on_bit_for_bit(clone, tmp_path, lesson, changes, world_size, victim):
    """Also shards, of weights, gradients and optimizer, each in its rank's own file."""
    out, kill_at = tmp_path / "run", random.randint(5, 30)
    print("killed after step", kill_at)
    main = SCRIPTS[lesson].main
    changes = {"steps": 40, "save_every": 4, **changes}  # each save may find a new best
    train(lesson, world_size, config_of(lesson, clone, tmp_path / "calm", **changes))

    def kill() -> None:
        log = out / "metrics.jsonl"
        while not log.exists() or log.read_text().count("\n") < kill_at:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    def train_until_killed(config: object) -> None:
        if os.environ["RANK"] == str(victim):
            threading.Thread(target=kill, daemon=True).start()
        main(config)

    config = config_of(lesson, clone, out, **changes)
    with pytest.raises(RankFailed):
        train(lesson, world_size, config, train_until_killed)
    assert not (out / "model.pt").exists() and any((out / "checkpoints").iterdir())
    train(lesson, world_size, config)
    calm = tmp_path / "calm"
    assert len(losses(out)) == 40 and losses(out) == losses(calm)
    assert (out / "model.pt").read_bytes() == (calm / "model.pt").read_bytes()


@pytest.mark.parametrize(
    ("lesson", "changes", "world_size"),
    [
        ("ddp", {}, 2),
        ("data_parallel", {"impl": "server"}, 3),
        ("fsdp", {"impl": "zero3"}, 3),
        ("checkpoint", {}, 3),
        ("pipeline", {**THREE}, 3),
        ("tensor", {**TWO}, 2),
        ("mesh", {"dp": 2, **TWO, **THREE}, 4),
    ],
)
def test_a_signal_in_the_validation_stops_all_ranks(clone, tmp_path, lesson, changes, world_size):
    """Also where every forward needs all ranks: they stop at the same batch, or would hang."""
    main = SCRIPTS[lesson].main

    def train_and_signal(config: object) -> None:
        validation = Run.validation

        def disturbed(run: Run, loader: object, *noun: str) -> Iterator:
            for batch in validation(run, loader, *noun):
                yield batch
                if run.world.rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)

        Run.validation = disturbed
        try:
            main(config)
        finally:
            Run.validation = validation

    out, text = tmp_path / "run", tmp_path / "words.txt"
    # Long enough for several batches to validate on.
    text.write_text(6 * (clone / "text" / "words.txt").read_text())
    changes = {**changes, "steps": 4, "data": str(text)}
    config = config_of(lesson, clone, out, **changes)
    train(lesson, world_size, config, train_and_signal)
    assert json.loads((out / "status.json").read_text())["state"] == "stopped"
    train(lesson, world_size, config)
    calm = config_of(lesson, clone, tmp_path / "calm", **changes)
    train(lesson, world_size, calm)
    ends = [json.loads((tmp_path / name / "status.json").read_text()) for name in ("run", "calm")]
    assert ends[0]["valid_loss"] == ends[1]["valid_loss"] > 0
    assert ends[0]["valid_s"] > 0


def test_a_limit_that_one_rank_passes_and_two_do_not(clone, tmp_path):
    config = {"impl": "zero3", "limit_mb": 0.3, "batch": 4, "steps": 4}
    with pytest.raises(RankFailed, match=r"[\d,]+ more than the limit of 300,000"):
        train("fsdp", 1, config_of("fsdp", clone, tmp_path / "one", **config))
    train("fsdp", 4, config_of("fsdp", clone, tmp_path / "four", **config))


def test_plain_torchrun_from_another_folder(clone, single, tmp_path):
    torchrun = Path(sys.executable).with_name("torchrun")
    start = [torchrun, "--standalone", "--nproc-per-node=3", clone / "scripts" / "train_ddp.py"]
    code, out, err = run([*start, *flags(clone)], tmp_path)
    assert code == 0, err
    assert_whole(tmp_path / "runs" / "ddp-001", num_ranks=3)
    assert_same_training(tmp_path / "runs" / "ddp-001", single)


# ---- bad input: exit code 2, one line, and nothing touched -------------------------------------

WARM = '''
"""Runs scripts in forks of a process that has torch already: 0.2 s a run instead of 3 s."""
import json, os, resource, runpy, signal, sys
import train_data_parallel, train_ddp, train_fsdp, train_memory, train_mesh, train_pipeline
import train_single, train_tensor, tyro

for line in sys.stdin:
    job = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.chdir(job["cwd"])
        os.environ.clear()
        os.environ.update(job["env"])
        for number, name in ((0, os.devnull), (1, "out"), (2, "err")):
            mode = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            os.dup2(os.open(os.path.join(job["log"], name) if number else name, mode), number)
        if job["file_bytes"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_bytes"], job["file_bytes"]))
        signal.alarm(60)  # whoever hangs ends with SIGALRM
        sys.argv = job["argv"]
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
'''


class Warm:
    """Runs one script after the other, each in a process of its own."""

    def __init__(self, clone: Path, log: Path) -> None:
        self.clone, self.log = clone, log
        server = clone / "scripts" / "warm.py"
        server.write_text(WARM)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        command = [sys.executable, str(server)]
        self.process = subprocess.Popen(command, env=environment(), text=True, **pipes)

    def __call__(self, cwd: Path, argv: list, env: dict, file_bytes: int = 0) -> tuple:
        job = {"cwd": str(cwd), "argv": [str(word) for word in argv], "log": str(self.log)}
        job |= {"env": environment(**env), "file_bytes": file_bytes}
        print(json.dumps(job), file=self.process.stdin, flush=True)
        code = int(self.process.stdout.readline())
        return code, (self.log / "out").read_text(), (self.log / "err").read_text()


@pytest.fixture(scope="module")
def warm(clone: Path, tmp_path_factory: pytest.TempPathFactory):
    runner = Warm(clone, tmp_path_factory.mktemp("log"))
    yield runner
    runner.process.stdin.close()
    assert runner.process.wait(10) == 0


@pytest.fixture
def refuse(warm: Warm, clone: Path, tmp_path: Path):
    """Run a script that has to refuse: returns its one line."""

    def refuse(lesson: str, env: dict | None = None, file_bytes: int = 0, **changes) -> str:
        before = contents(tmp_path)
        argv = [clone / "scripts" / f"train_{lesson}.py"]
        argv += flags(clone, **{"out": "run", **changes})
        code, out, err = warm(tmp_path, argv, env or {}, file_bytes)
        assert (code, err.count("\n"), "Traceback" in out + err) == (2, 1, False), out + err
        assert err.startswith(f"train_{lesson}.py: ")
        if not file_bytes:
            assert contents(tmp_path) == before
        return err

    return refuse


HAND = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
SETTINGS = [
    ("pipeline", {"stages": 2}, "--stages 2 does not fit 1 rank(s)"),
    ("pipeline", {"micro_batches": 4}, "batch 6 cannot be cut into 1 replica(s) x 4 micro-batches"),
    ("pipeline", {"micro_batches": 0}, "micro_batches is 0: take at least 1"),
    ("pipeline", {"schedule": "zero-bubble", **THREE}, "add --impl torch"),
    ("pipeline", {"schedule": "interleaved", **THREE}, "take 2 ranks or more"),
    ("pipeline", {"impl": "torch", "recompute": True}, "leave out --impl torch"),
    ("tensor", {"tensor": 2}, "--tensor 2 does not fit 1 rank(s)"),
    ("mesh", {"tp": 2}, "--pp 0 x --dp 0 x --tp 2 does not fit 1 rank(s): take sizes whose"),
    ("single", {"data": "wikitext-2"}, "python scripts/prepare_data.py --data wikitext-2"),
    ("single", {"data": "no-such-data"}, "'no-such-data': no such folder or file, nor one of"),
    ("single", {"block": 5000}, "--block 5000 is too long: the train text of text holds"),
    ("single", {"block": 0}, "--block is 0"),
    *((job, {"batch": 107}, "holds only 106 blocks") for job in ("single", "ddp", "data_parallel")),
    *(("single", {"batch": size}, f"batch is {size}: take at least 1") for size in (0, -6)),
    *(("single", {"steps": count}, f"steps is {count}: take at least 1") for count in (0, -1)),
    ("single", {"save_every": 0}, "save_every is 0: take at least 1"),
    ("single", {"valid_tokens": -1}, "valid_tokens is -1: take 0 for all"),
    *(("single", {"layers": layers}, "layer") for layers in (0, -1)),
    *(("single", {"vocab": vocab}, f"--vocab is {vocab}") for vocab in (5, -1)),
    ("single", {"learning_rate": 0}, "learning_rate is 0.0"),
    ("single", {"learning_rate": "nan"}, "learning_rate is nan"),
    ("single", {"seed": 1 << 70}, "seed"),
    ("single", {"device": "gpu"}, "--device is 'gpu': choose auto, cpu or cuda"),
    *(("ddp", {name: 0}, f"{name} is 0: take at least 1") for name in ("batch", "steps")),
    ("ddp", {"data": "no-such-data"}, "'no-such-data': no such folder or file"),
    ("data_parallel", {"impl": "server"}, "--impl server on 1 rank is a server without workers"),
    ("data_parallel", {"impl": "torch", "mine": True}, "--impl torch has no function of yours"),
]


@pytest.mark.parametrize(("lesson", "changes", "words"), SETTINGS)
def test_settings_that_cannot_be(refuse, tmp_path, lesson, changes, words):
    assert words in refuse(lesson, env={"XDG_CACHE_HOME": str(tmp_path)}, **changes)


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
    assert words in refuse("single", data=tmp_path / "data")


def test_words_that_are_no_flags(warm, clone, tmp_path):
    script = clone / "scripts" / "train_ddp.py"
    for wrong in (["--stepz", "3"], ["--steps", "ten"], ["--impl", "yours"], ["--steps"]):
        code, out, err = warm(tmp_path, [script, *wrong], {})
        assert code == 2 and "Traceback" not in out + err and wrong[0] in err
    assert not list(tmp_path.iterdir())


def test_gpu_asked_for_where_there_is_none(refuse):
    for lesson in ("single", *SCRIPTS):
        line = refuse(lesson, env={"CUDA_VISIBLE_DEVICES": ""}, device="cuda")
        assert "--device cuda, but this node has 0 GPU(s) for 1 process(es)" in line


def test_half_an_environment(refuse):
    line = refuse("ddp", env={"WORLD_SIZE": "2"})
    assert "RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set: start this script" in line


def test_port_in_use(refuse):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = refuse("ddp", env=HAND | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    assert f"cannot meet the other ranks at 127.0.0.1:{port}" in line and "MASTER_PORT" in line


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
def folder_mine(clone: Path) -> Path:
    """The clone's mine/, empty."""
    shutil.rmtree(clone / "mine", ignore_errors=True)
    (clone / "mine").mkdir()
    return clone / "mine"


def test_impl_mine_without_a_file_or_with_a_broken_one(refuse, folder_mine):
    for lesson in ("ddp", "memory", "fsdp", "checkpoint", "pipeline", "tensor", "mesh"):
        line = refuse(lesson, impl="mine")
        assert f"mine/{lesson}.py is not there: run check.keep()" in line
    for text, words in BROKEN.items():
        (folder_mine / "ddp.py").write_text(text)
        assert words in refuse("ddp", impl="mine")
    (folder_mine / "ddp.py").write_text("def place(): pass")
    (folder_mine / "data_parallel.py").write_text("x = ")
    assert "mine/data_parallel.py does not run (Synt" in refuse("ddp", impl="mine")


def test_mine_of_lesson_05_without_a_file_or_without_what_is_needed(refuse, folder_mine):
    line = refuse("data_parallel", mine=True)
    assert "mine/data_parallel.py is not there: run check.keep() in the data_parallel no" in line
    (folder_mine / "data_parallel.py").write_text("def average_gradients(module): pass")
    line = refuse("data_parallel", mine=True, impl="bucketed")
    assert "mine/data_parallel.py defines none of broadcast_state, make_buckets: run" in line


SPEAKING = """
class {name}:
    def __new__(cls, module):
        print("this is {name} of {file}")
        return module
"""
KEPT = "def mean_over_ranks(total, count):\n    return float(total) / float(count)\n"


@pytest.mark.parametrize("file", ["data_parallel", "ddp"])
def test_impl_mine_of_lesson_06_wraps_with(warm, clone, folder_mine, tmp_path, file):
    (folder_mine / "ddp.py").write_text(KEPT)
    with open(folder_mine / f"{file}.py", "a") as answers:
        answers.write(SPEAKING.format(name="BucketedDDP", file=file))
    words = [clone / "scripts" / "train_ddp.py", *flags(clone, impl="mine", steps=1)]
    code, out, err = warm(tmp_path, words, {})
    assert code == 0, err
    said = [line for line in out.splitlines() if line.startswith("this is ")]
    assert said == [f"this is BucketedDDP of {file}"]
    yours = next(line for line in out.splitlines() if line.startswith("yours: "))
    assert "BucketedDDP" in yours and "mean_over_ranks" in yours


def test_mine_of_lesson_05_is_what_trains(warm, clone, folder_mine, tmp_path):
    speaking = "\ndef {0}(*what):\n    print('this is {0}')\n    return []\n"
    names = ("broadcast_state", "average_gradients", "make_buckets")
    (folder_mine / "data_parallel.py").write_text("".join(map(speaking.format, names)))
    said = {"naive": ["average_gradients"] * 2, "bucketed": ["make_buckets"]}
    for impl, calls in said.items():
        words = [clone / "scripts" / "train_data_parallel.py"]
        words += flags(clone, impl=impl, mine=True, steps=2)
        code, out, err = warm(tmp_path, words, {})
        assert code == 0, err
        lines = [line for line in out.splitlines() if line.startswith("this is ")]
        assert lines == [f"this is {name}" for name in ["broadcast_state", *calls]]
        assert f"yours: broadcast_state, {calls[0]}; the course's: all else\n" in out


# ---- ... of a run that is there, and of a disk -------------------------------------------------


@pytest.fixture(scope="module")
def stopped(warm: Warm, clone: Path) -> Path:
    """A run of one process, as a power cut after the checkpoint of step 5 leaves it."""
    folder = clone / "run"
    settings = flags(clone, out="run", steps=10, save_every=5)
    code, _, err = warm(clone, [clone / "scripts" / "train_single.py", *settings], {})
    assert code == 0, err
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
    assert words in refuse("single", **{"steps": 10, "save_every": 5, **changes})


def test_folder_that_is_no_run(refuse, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.tex").write_text("three years of work")
    assert "holds files but no run" in refuse("single", out=tmp_path / "notes")
    assert "is a file" in refuse("single", out=tmp_path / "notes" / "thesis.tex")
    assert "Not a directory" in refuse("single", out=tmp_path / "notes" / "thesis.tex" / "run")


def test_full_disk_at_a_checkpoint_and_at_the_start(refuse, warm, clone, tmp_path):
    """No file may grow beyond a limit: the kernel then refuses as it does on a full disk."""
    line = refuse("single", file_bytes=5000, save_every=1)
    assert "cannot save" in line and "File too large" in line
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    assert "File too large" in refuse("single", file_bytes=500, out=tmp_path / "other")
    again = [clone / "scripts" / "train_single.py", *flags(clone, out="run", save_every=1)]
    assert warm(tmp_path, again, {})[0] == 0
    assert_whole(tmp_path / "run", num_ranks=1)


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
        line = refuse("single", file_bytes=resource.RLIM_INFINITY, out=disk / "run", save_every=1)
        assert "cannot save" in line and "No space left on device" in line
        assert not list((disk / "run" / "checkpoints").iterdir())
    finally:
        subprocess.run(["umount", str(disk)], check=True)
