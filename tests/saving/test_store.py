"""Checkpoints on an object store: a server that speaks S3, on this machine, and the same tests with
a folder. The server is moto's, the client s3fs; what goes over the wire is S3."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec
import psutil
import pytest
import torch
from torch import nn

import runs
import train_checkpoint
from commands import environment, flags, left_behind, losses, make_clone, run, settings
from manyhands.ranks.failures import RankFailed
from manyhands.ranks.lab import run_ranks
from manyhands.ranks.runtime import World
from manyhands.saving import folder as checkpoints
from manyhands.saving import remote
from manyhands.saving.index import INDEX, damage
from manyhands.saving.sharded import load_sharded, save_sharded
from manyhands.saving.store import Store
from manyhands.training.checkpoints import ShardedCheckpoints
from manyhands.training.random_state import get_rng
from states import load_state, refused, save_and_go_on, save_state, state_for

ROOT = Path(__file__).resolve().parents[2]
UNWANTED = ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "HTTP_PROXY", "http_proxy")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server that speaks S3; it ends with this process, whatever happens."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # not a line for each request
    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    yield "http://{}:{}".format(*moto.get_host_and_port())
    moto.stop()


@pytest.fixture
def s3(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a program that uses the server; ranks inherit it."""
    point_to(server, monkeypatch)


def point_to(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in UNWANTED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # it would go on to another server


@pytest.fixture
def bucket(s3: None) -> str:
    """A bucket of this test's own."""
    name = f"test-{uuid.uuid4().hex}"
    fsspec.filesystem("s3").mkdir(name)
    return name


@pytest.fixture(params=["folder", "s3"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where the checkpoints of a run go."""
    if request.param == "folder":
        return str(tmp_path / "run")
    return f"s3://{request.getfixturevalue('bucket')}/run"


# ---- all that a run does with its checkpoints ----------------------------------------------------


def test_two_ranks_save_and_three_load(address):
    run_ranks(save_state, 2, f"{address}/step-00000001")
    run_ranks(load_state, 3, f"{address}/step-00000001")
    assert checkpoints.complete(address) == ["step-00000001"]
    assert damage(Store(f"{address}/step-00000001")) == ""
    assert "another shape" not in refused(load_state, 2, f"{address}/step-00000002")


def spoil(store: Store, file: str, kind: str) -> None:
    """Damage a file of a checkpoint, below the feet of the code that wrote it."""
    path = f"{store.path}/{file}"
    content = bytearray(store.files.cat_file(path))
    if kind == "missing":
        store.files.rm_file(path)
        return
    if kind == "cut":
        del content[len(content) // 2 :]
    if kind == "flipped":
        content[len(content) // 2] ^= 1
    if kind == "swapped":
        content = store.files.cat_file(f"{store.path}/rank-00000.pt")
    store.files.pipe_file(path, bytes(content))


@pytest.mark.parametrize("kind", ["missing", "cut", "flipped", "swapped"])
def test_a_damaged_file_is_found_and_set_aside(kind, address):
    for step in (1, 2):
        run_ranks(save_state, 2, f"{address}/{checkpoints.name_of(step)}")
    spoil(Store(f"{address}/step-00000002"), "rank-00001.pt", kind)
    ((name, (problem,)), again) = run_ranks(checkpoints.newest_intact, 2, address)
    assert (name, [problem]) == again and name == "step-00000001"
    assert f"{address}/step-00000002/rank-00001.pt" in problem
    assert checkpoints.set_aside(address, "step-00000002") == "step-00000002.broken"
    assert Store(address).folders() == ["step-00000001", "step-00000002.broken"]
    assert checkpoints.complete(address) == ["step-00000001"]


def trained(address: str, folder: Path, num_steps: int, learning: bool = True) -> object:
    """Go on from the newest checkpoint, and save each step; what is there then, and the weights."""
    world = World(torch.distributed.get_rank(), 0, 2, torch.device("cpu"))
    saver = ShardedCheckpoints(folder / "checkpoints", {"layers": 1}, world, address)
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    saver.register(model, optimizer, ())
    first, _ = saver.load_newest() or (0, {})
    saver.read_losses(first)
    for step in range(first + 1, num_steps + 1):
        model(torch.full((1, 3), float(step))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        saver.add_loss(step, abs(step - 2) + 1.0)  # the second is the best
        saver.save(step, get_rng(world.device))
    return first, saver.best(), checkpoints.complete(address), model.weight.tolist()


def test_a_run_keeps_the_newest_and_the_best_and_goes_on(address, tmp_path, capfd):
    (tmp_path / "calm").mkdir()
    calm = run_ranks(trained, 2, str(tmp_path / "calm" / "checkpoints"), tmp_path / "calm", 8)[0]
    first, best, names, _ = run_ranks(trained, 2, address, tmp_path, 6)[0]
    kept = [checkpoints.name_of(step) for step in (2, 4, 5, 6)]
    assert (first, best, names) == (0, kept[0], kept)
    spoil(Store(f"{address}/step-00000006"), "rank-00000.pt", "flipped")
    capfd.readouterr()
    first, _, names, weights = run_ranks(trained, 2, address, tmp_path, 8)[0]
    assert (first, weights) == (5, calm[3])
    assert names == [checkpoints.name_of(step) for step in (2, 6, 7, 8)]
    assert "step-00000006.broken, and the run goes on from step-00000005" in capfd.readouterr().out
    checkpoints.remove(address, "step-00000008")
    assert checkpoints.complete(address)[-1] == "step-00000007"


def test_saves_in_the_background_hold_the_values_of_their_step(address):
    assert run_ranks(save_and_go_on, 2, address) == [("step-00000003", [])] * 2
    for step in (1, 2, 3):
        state = {"w": torch.zeros(300_000), "m": torch.zeros(200_000), "step": 0}
        state = load_sharded(state, f"{address}/{checkpoints.name_of(step)}")
        assert (state["step"], state["w"].unique().tolist()) == (step, [step])


LEAVES = """
import sys, torch
from manyhands.checkpoint.asynchronous import AsyncSaver
saver = AsyncSaver()
saver.save({"w": torch.ones(5_000_000)}, sys.argv[1])
"""


@pytest.mark.parametrize("last", ["", "saver.wait()"])
def test_a_program_waits_for_its_last_upload_or_has_none(last, address):
    """Python starts no threads at its end, and s3fs needs some; a folder does not."""
    command = [sys.executable, "-c", LEAVES + last, f"{address}/step-00000001"]
    own = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    done = subprocess.run(command, env=own, capture_output=True, text=True, check=False, timeout=90)
    assert (done.returncode, done.stderr) == (0, "")
    is_there = bool(last) or not address.startswith("s3://")
    assert checkpoints.newest_intact(address) == ("step-00000001" if is_there else None, [])


# ---- complete or absent --------------------------------------------------------------------------


def killed_before_the_index(folder: str) -> None:
    """All parts are written when rank 0 is killed."""

    def kill(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    Store.write_json = kill
    save_sharded(state_for(), folder)


def test_parts_without_an_index_are_no_checkpoint(address):
    run_ranks(save_state, 2, f"{address}/step-00000001")
    said = refused(killed_before_the_index, 2, f"{address}/step-00000002")
    assert "SIGKILL" in said
    parts = Store(f"{address}/step-00000002")
    assert parts.has("rank-00000.pt") and parts.has("rank-00001.pt") and not parts.has(INDEX)
    assert run_ranks(checkpoints.newest_intact, 2, address)[1] == ("step-00000001", [])
    assert checkpoints.incomplete(address) == ["step-00000002"]
    assert run_ranks(checkpoints.clear, 2, address) == [["step-00000002"]] * 2
    assert Store(address).folders() == ["step-00000001"]


KILLED_IN_A_FILE = """
import os, signal, sys
from manyhands.saving.store import Store
def fill(file):
    for _ in range(20):  # more than two parts of an upload
        file.write(bytes(1 << 20))
    os.kill(os.getpid(), signal.SIGKILL)
Store(sys.argv[1]).write("large", fill)
"""


def test_a_kill_in_a_file_leaves_the_one_before(address):
    store = Store(address)
    store.write("large", lambda file: file.write(b"old"))
    command = [sys.executable, "-c", KILLED_IN_A_FILE, address]
    own = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    done = subprocess.run(command, env=own, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert store.open("large").read() == b"old"


@pytest.mark.parametrize("size", [10, 20 << 20])
def test_a_file_that_fails_leaves_the_one_before(size, address):
    store = Store(address)
    store.write("file", lambda file: file.write(b"old"))

    def fill(file: object) -> None:
        file.write(bytes(size))
        raise RuntimeError("of the caller")

    with pytest.raises(RuntimeError, match="of the caller"):
        store.write("file", fill)
    assert store.open("file").read() == b"old"
    assert store.sums("file")["bytes"] == 3


def test_an_object_store_has_no_rename(bucket, monkeypatch):
    """It copies each file and removes the old one: a kill between the two leaves both names. This
    is why the commit is a file that appears, the index, and no new name."""
    address = f"s3://{bucket}/run"
    save_sharded({"w": torch.ones(3)}, f"{address}/step-00000001")
    store = Store(address)

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store.files, "rm", killed)
    with pytest.raises(KeyboardInterrupt):
        store.move("step-00000001", "renamed")
    assert store.folders() == ["renamed", "step-00000001"]


def test_what_another_process_writes_is_seen_at_once(address):
    save_sharded({"w": torch.ones(3)}, f"{address}/step-00000001")
    assert checkpoints.complete(address) == ["step-00000001"]
    run_ranks(save_state, 2, f"{address}/step-00000002")
    assert checkpoints.complete(address) == ["step-00000001", "step-00000002"]


# ---- stores that cannot be used ------------------------------------------------------------------


def save_there(address: str) -> None:
    save_sharded(state_for(), f"{address}/step-00000001")


def look_there(address: str) -> None:
    checkpoints.newest_intact(address)


def start_there(address: str) -> None:
    checkpoints.clear(address)


@pytest.fixture
def deaf() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def closed() -> str:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize("call", [save_there, look_there, start_there])
def test_a_store_that_is_not_there_is_told_in_one_line(call, closed, monkeypatch):
    point_to(closed, monkeypatch)
    said = refused(call, 2, "s3://bucket/run")
    assert "s3://bucket/run" in said and "Could not connect to the endpoint" in said


def test_a_store_that_never_answers_is_given_up(deaf, monkeypatch):
    point_to(deaf, monkeypatch)
    monkeypatch.setattr(remote, "ANSWER_S", 1)
    start_s = time.monotonic()
    with pytest.raises(ValueError, match="s3://bucket/run.*imeout") as found:
        checkpoints.newest_intact("s3://bucket/run")
    assert "\n" not in str(found.value)
    assert time.monotonic() - start_s >= remote.TRIES  # it was tried again


@pytest.mark.parametrize("call", [save_there, start_there])
def test_a_bucket_that_is_not_there_is_told_in_one_line(call, s3):
    said = refused(call, 2, "s3://no-such-bucket/run")
    assert "s3://no-such-bucket/run" in said and "bucket does not exist" in said


def test_a_store_out_of_reach_is_no_damage(bucket, closed, monkeypatch):
    """Else the newest checkpoint would be set aside because of a network."""
    address = f"s3://{bucket}/run"
    save_sharded({"w": torch.ones(3)}, f"{address}/step-00000001")
    store = Store(f"{address}/step-00000001")
    expected = store.sums("rank-00000.pt")
    assert store.sums("rank-00007.pt") is None
    point_to(closed, monkeypatch)
    for read in (Store.sums, Store.open, Store.has, Store.read_json):
        with pytest.raises(remote.Away, match="Could not connect"):
            read(Store(store.address), "rank-00000.pt")
    assert expected == store.sums("rank-00000.pt")  # by the connection of before


def test_an_address_that_nobody_knows(monkeypatch):
    for address in ("nothing://bucket", "s4://bucket/run"):
        with pytest.raises(ValueError, match=f"{address} cannot be opened: Protocol not known"):
            Store(address)


@pytest.mark.parametrize("name", ["a::b", "lr[0.1]", "a*b", "50%", "a#b", "a?b"])
def test_a_folder_may_have_any_name(name, tmp_path):
    store = Store(tmp_path / name)
    store.write("x/rank-00000.pt", lambda file: file.write(b"1"))
    assert (tmp_path / name / "x" / "rank-00000.pt").read_bytes() == b"1"
    assert store.folders() == ["x"] and store.has("x/rank-00000.pt")
    store.remove("x")
    assert store.folders() == []


# ---- the lesson's job ----------------------------------------------------------------------------


def command(clone: Path, out: Path, store: str, steps: int = 20) -> list[str]:
    scripts = [str(clone / "scripts" / name) for name in ("launch.py", "train_checkpoint.py")]
    given = flags(clone, out=out, store=store, steps=steps, save_every=5)
    return [sys.executable, *scripts, *given]


def train(clone: Path, out: Path, store: str) -> None:
    """The same run on the ranks of a fork server."""
    given = settings(clone, out=str(out), store=store, save_every=5)
    runs.train(train_checkpoint, 2, train_checkpoint.Config(**given))


def own_environment() -> dict[str, str]:
    return environment() | {name: os.environ[name] for name in os.environ if "AWS_" in name}


def kill_a_rank_after(step: int, process: subprocess.Popen, out: Path) -> None:
    """Kill rank 1 of a training as soon as a step is written down, and wait for its end."""
    deadline_s = time.monotonic() + 120
    while not (out / "metrics.jsonl").exists() or len(losses_so_far(out)) < step:
        assert process.poll() is None and time.monotonic() < deadline_s, process.communicate()
        time.sleep(0.01)
    found = psutil.Process(process.pid).children(recursive=True)
    ranks = {one.environ().get("RANK"): one for one in found if one.environ().get("RANK")}
    ranks["1"].kill()


def losses_so_far(out: Path) -> list[str]:
    return (out / "metrics.jsonl").read_text().split("\n")[:-1]


def test_the_job_is_killed_and_goes_on_from_the_store(bucket, tmp_path):
    clone, env = make_clone(tmp_path), own_environment()
    train(clone, tmp_path / "calm", "")
    out, store = tmp_path / "run", f"s3://{bucket}/run"
    words = command(clone, out, store)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=clone, env=env, **pipes) as process:
        kill_a_rank_after(7, process, out)
        _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "rank 0 ends, since it has lost another rank" in errors
    assert "Traceback" not in errors
    assert checkpoints.newest_intact(store) == ("step-00000005", [])
    assert not any((out / "checkpoints").iterdir())

    code, said, errors = run(words, clone, 180, env=env)
    assert code == 0, errors
    assert f"resumed {out} at step 5 of 20" in said
    assert losses(out) == losses(tmp_path / "calm")
    assert (out / "model.pt").read_bytes() == (tmp_path / "calm" / "model.pt").read_bytes()
    assert not left_behind(tmp_path)


def test_the_job_tells_at_its_start_that_it_cannot_save(closed, tmp_path, monkeypatch):
    point_to(closed, monkeypatch)
    clone = make_clone(tmp_path)
    words = command(clone, tmp_path / "run", "s3://no-such-bucket/run")
    code, said, errors = run(words, clone, 180, env=own_environment())
    told = [line for line in errors.split("\n") if line.startswith("train_checkpoint.py:")]
    assert code != 0 and len(told) == 1, errors
    assert told[0].startswith("train_checkpoint.py: cannot save there: rank 0: s3://no-such-bucket")
    assert "Could not connect" in told[0]
    assert "Traceback" not in said + errors
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


NO_BUCKET = "cannot save there: rank 0: s3://no-such-bucket.*The specified bucket does not exist"


def test_the_job_tells_at_its_start_that_there_is_no_such_bucket(s3, tmp_path):
    clone, out = make_clone(tmp_path), tmp_path / "run"
    with pytest.raises(RankFailed, match=NO_BUCKET):
        train(clone, out, "s3://no-such-bucket/run")
    assert not (out / "metrics.jsonl").exists()
