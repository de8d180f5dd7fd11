"""A checkpoint of any training loads on any number of ranks, bit for bit, and the run goes on as if
nothing had been; what is damaged or does not fit is refused in one line; and it is there whole or
not at all."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import chain, pairwise, product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from manyhands.checkpoint.asynchronous import AsyncSaver
from manyhands.data_parallel.replicas import broadcast_state
from manyhands.fsdp import fully_shard, zero
from manyhands.fsdp.flat import Flat
from manyhands.fsdp.units import FSDP
from manyhands.ranks.lab import run_ranks
from manyhands.saving import folder as checkpoints
from manyhands.saving.agree import gather
from manyhands.saving.fits import check_names, check_whole, have_common
from manyhands.saving.index import damage
from manyhands.saving.kept import optimizer_state, set_groups
from manyhands.saving.names import flatten
from manyhands.saving.pieces import Box, Piece, model_state
from manyhands.saving.sharded import load_sharded, save_sharded
from manyhands.saving.store import Store
from manyhands.training.storage import differences
from states import load_state, refused, save_and_go_on, save_state

ROOT = Path(__file__).resolve().parents[2]
GLOBAL_BATCH = 24  # divides by 12
MORE_STEPS = 10
KINDS = ("ddp", "zero1", "zero2", "fsdp", "fsdp mesh", "torch", "torch mesh")
BOUND = {torch.float64: 1e-6, torch.float32: 1e-5}


class Small(nn.Module):
    """Sizes that no number of ranks divides, and a buffer that training changes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.second = nn.Sequential(nn.Linear(5, 11), nn.Tanh(), nn.Linear(11, 3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += 1
        return self.second(torch.relu(self.first(x)))


class Training:
    """One training of a kind on this number of ranks."""

    def __init__(self, kind, dtype, seed):
        torch.manual_seed(seed)
        module = Small().to(dtype)
        self.dtype, self.flats, self.done = dtype, [], 0
        size = dist.get_world_size()
        replicas = 2 if size == 4 else 1
        mesh = fully_shard.make_mesh(replicas, size // replicas) if "mesh" in kind else None
        if kind == "ddp":
            self.model = DistributedDataParallel(module)
        elif kind.startswith("zero"):
            broadcast_state(module)
            self.model = module
            self.flats = [Flat(part.parameters()) for part in (module.first, module.second)]
            if kind == "zero2":
                zero.reduce_during_backward(self.flats)
        elif kind.startswith("fsdp"):
            groups = {}
            if mesh:
                groups = {"replicas": mesh.get_group("replicate"), "group": mesh.get_group("shard")}
            self.model = FSDP(module, [module.second], **groups)
            self.flats = list(chain(*self.model.units))
        else:
            self.model = fully_shard.torch_fsdp(module, [module.second], mesh=mesh)
        make = lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-6)  # noqa: E731
        if kind.startswith("zero"):
            self.stepper = zero.ShardedOptimizer(self.flats, make)
            self.optimizer = self.stepper.optimizer
        else:
            self.stepper = self.optimizer = make(self.model.parameters())

    def step(self):
        """The mean loss of the global batch of this step; the learning rate changes, too."""
        rank, size = dist.get_rank(), dist.get_world_size()
        batch = torch.randn(
            GLOBAL_BATCH, 7, generator=torch.Generator().manual_seed(self.done), dtype=self.dtype
        )
        zero_grad = self.model if hasattr(self.model, "units") else self.stepper
        zero_grad.zero_grad()
        loss = self.model(batch[rank::size]).square().mean()
        loss.backward()
        self.stepper.step()
        self.done += 1
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.95
        total = loss.detach().double()
        dist.all_reduce(total)
        return total.item() / size

    def steps(self, num):
        return [self.step() for _ in range(num)]

    def state(self):
        model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        # ZeRO's weights are whole on every rank; only the optimizer's state is in shards.
        in_model = self.flats if hasattr(model, "units") else []
        return {
            "model": model_state(model, in_model),
            "optimizer": optimizer_state(self.optimizer, self.flats),
            "step": self.done,
            "ranks": {str(dist.get_rank()): {"rng": torch.get_rng_state()}},
        }

    def load(self, folder):
        loaded = load_sharded(self.state(), folder)
        set_groups(self.optimizer, loaded["optimizer"]["groups"])
        self.done = loaded["step"]

    def whole(self):
        """Every tensor of the state, whole: put together from all ranks' pieces."""
        pieces, values = flatten(self.state())
        every = gather({name: (p.box, p.shape, p.tensor) for name, p in pieces.items()})
        found = {}
        for boxes in every:
            for name, (box, shape, part) in boxes.items():
                if not name.startswith("ranks/"):
                    known = found.setdefault(name, torch.full(shape, -1, dtype=part.dtype))
                    known[box.within([0] * len(shape))] = part
        return found, values


def trained(kind, dtype, folder):
    """Save after three steps, and go on without a break."""
    training = Training(kind, dtype, seed=0)
    training.steps(3)
    save_sharded(training.state(), f"{folder}/three")
    at_save = training.whole()
    losses = training.steps(2 + MORE_STEPS)
    return at_save, losses, training.whole()


def resumed(kind, dtype, folder, name, num_steps, then=""):
    """Load into other weights; what was loaded, the losses from there, and what came of it."""
    training = Training(kind, dtype, seed=5)
    if kind == "ddp":
        # DDP puts the gradients in another order after its first step, and so sums of four ranks
        # are rounded otherwise in the first step of a program: here that is over before the load.
        training.step()
    training.load(f"{folder}/{name}")
    loaded = training.whole()
    losses = training.steps(num_steps)
    if then:
        save_sharded(training.state(), f"{folder}/{then}")
    return loaded, losses, training.whole()


def assert_same(found, wanted):
    assert found[1] == wanted[1]
    assert_equal(found[0], wanted[0], 0)


def assert_equal(found, wanted, bound):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=bound, atol=bound, msg=name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_four_ranks_then_two_then_three_equal_an_undisturbed_run(kind, dtype, tmp_path):
    folder = str(tmp_path)
    at_save, losses, at_end = run_ranks(trained, 4, kind, dtype, folder)[0]

    again = run_ranks(resumed, 4, kind, dtype, folder, "three", 2 + MORE_STEPS)[0]
    assert_same(again[0], at_save)
    assert again[1] == losses
    assert_same(again[2], at_end)

    on_two = run_ranks(resumed, 2, kind, dtype, folder, "three", 2, "five")[0]
    assert_same(on_two[0], at_save)
    on_three = run_ranks(resumed, 3, kind, dtype, folder, "five", MORE_STEPS)[0]
    assert_same(on_three[0], on_two[2])
    found = torch.tensor(on_two[1] + on_three[1])
    assert (found - torch.tensor(losses)).abs().max() < BOUND[dtype]
    assert_equal(on_three[2][0], at_end[0], BOUND[dtype])


# ---- what is on the disk -------------------------------------------------------------------------


def save_shared(folder):
    """A part of a large tensor, what all ranks hold, and what one rank has for itself."""
    rank = dist.get_rank()
    large = torch.arange(1_000_000.0)
    state = {
        "rows": Piece(large[10 * rank : 10 * rank + 10], (10 * rank,), (40,)),
        "table": torch.arange(1000.0),
        "name": "a run",
        "ranks": {str(rank): {"rng": torch.get_rng_state()}},
    }
    written = save_sharded(state, folder)
    loaded = load_sharded({**state, "table": torch.zeros(1000)}, folder)
    return written, loaded["table"].sum().item()


def test_a_box_is_written_once_and_a_view_writes_its_own_bytes(tmp_path):
    results = run_ranks(save_shared, 4, str(tmp_path))
    assert {total for _, total in results} == {499_500.0}
    index = json.loads((tmp_path / "index.json").read_text())
    pieces = index["tensors"]["rows"]["pieces"]
    assert [piece["offset"] for piece in pieces] == [[0], [10], [20], [30]]
    assert len(index["tensors"]["table"]["pieces"]) == 1
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("rank-*.pt"))]
    assert sizes == [written for written, _ in results]
    content = 40 * 4 + 1000 * 4 + 4 * torch.get_rng_state().numel()
    assert content < sum(sizes) < content + 4 * 3000  # and the names, in four zip files
    assert not list(tmp_path.glob("*.partial"))


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("gap", "the ranks' parts of model/w hold 11 numbers of 12"),
        ("overlap", "the ranks' parts of model/w overlap"),
        ("differs", "lr is 0.1 on rank 1 and 0.0 on one before it"),
        ("no number", "lr is a set: save numbers, texts and tensors"),
        ("one rank's item", "lr is a builtin_function_or_method"),
    ],
)
def test_states_that_cannot_be_saved(what, words, tmp_path):
    assert words in refused(save_state, 2, str(tmp_path), what)
    assert not (tmp_path / "index.json").exists()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("another shape", "model/w has shape and type [[12], 'torch.float32'] in the checkpoint"),
        ("another type", "and [[12], 'torch.float64'] here"),
        ("module.", "model/module.w is not in the checkpoint: the checkpoint has model/w"),
        ("more", "model/v is not in the checkpoint"),
        ("no number", "lr is a set"),
        ("one rank's item", "lr is a builtin_function_or_method"),
    ],
)
def test_states_that_do_not_fit(what, words, tmp_path):
    run_ranks(save_state, 2, str(tmp_path))
    assert words in refused(load_state, 2, str(tmp_path), what)
    run_ranks(load_state, 3, str(tmp_path))


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def swap(path):
    other = path.with_name("rank-00000.pt")
    first, second = path.read_bytes(), other.read_bytes()
    path.write_bytes(second)
    other.write_bytes(first)


DAMAGES = {
    "cut": (lambda folder: cut(folder / "rank-00001.pt"), "bytes"),
    "flipped": (lambda folder: flip(folder / "rank-00001.pt"), "is damaged: its SHA-256"),
    "swapped": (lambda folder: swap(folder / "rank-00001.pt"), "rank-0000"),
    "missing": (lambda folder: (folder / "rank-00001.pt").unlink(), "rank-00001.pt is missing"),
    "index cut": (lambda folder: cut(folder / "index.json"), "index.json is missing or damaged"),
    "index's bit": (lambda folder: flip(folder / "index.json"), "index.json is "),
    "no index": (lambda folder: (folder / "index.json").unlink(), "index.json is missing"),
    "other index": (lambda folder: (folder / "index.json").write_text("[]"), "index.json is"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_found_and_the_checkpoint_before_is_taken(name, tmp_path):
    spoil, words = DAMAGES[name]
    older, newer = (str(tmp_path / checkpoints.name_of(step)) for step in (1, 2))
    run_ranks(save_state, 2, older)
    run_ranks(save_state, 2, newer)
    spoil(Path(newer))
    assert words in refused(load_state, 2, newer)
    assert words in damage(Store(newer))
    found = run_ranks(checkpoints.newest_intact, 3, str(tmp_path))
    assert {name for name, _ in found} == {"step-00000001"}
    run_ranks(load_state, 3, str(tmp_path / found[0][0]))


def save_what_torch_cannot_write(folder, what):
    """On rank 0, which writes it; the other one has nothing that is odd."""
    kinds = {
        "sparse": lambda: torch.eye(3).to_sparse(),
        "meta": lambda: torch.empty(3, device="meta"),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    }
    odd = kinds[what]()
    state = {"x": odd} if dist.get_rank() == 0 else {}
    save_sharded({**state, "y": torch.ones(2)}, folder)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("sparse", "rank 0: x is a sparse tensor"),
        ("meta", "rank 0: x is on the meta device"),
        ("nested", "rank 0: RuntimeError: "),
    ],
)
def test_a_writer_that_fails_in_any_way_ends_all_ranks(what, words, tmp_path):
    assert words in refused(save_what_torch_cannot_write, 2, str(tmp_path), what)


ONE, TWO = torch.ones(2), torch.full((2,), 2.0)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": {"b": ONE}, "a/b": TWO}, "['a']['b'] and ['a/b'] would both be called a/b"),
        ({"at": {1: 10, "1": 20}}, "['at'][1] and ['at']['1'] would both be called at/1"),
        ({"a": [ONE], "a/0": 3}, "['a'][0] and ['a/0'] would both be called a/0"),
    ],
)
def test_two_items_of_one_name_are_refused(state, words, tmp_path):
    with pytest.raises(ValueError) as found:
        save_sharded(state, tmp_path)
    assert words in str(found.value)


@pytest.mark.parametrize(
    ("saved", "here", "words"),
    [
        (5, ONE, "w is 5 in the checkpoint, and a tensor here"),
        (ONE, 0, "w is a tensor in the checkpoint, and 0 here"),
        (TWO, Piece(ONE, (1,), (2,)), "a rank's part of w is not within its shape (2,)"),
        (TWO, Piece(ONE, (-1,), (2,)), "a rank's part of w is not within its shape (2,)"),
    ],
)
def test_another_kind_and_a_part_that_sticks_out_are_refused(saved, here, words, tmp_path):
    save_sharded({"w": saved}, tmp_path)
    with pytest.raises(ValueError) as found:
        load_sharded({"w": here}, tmp_path)
    assert words in str(found.value)


def save_nan(folder):
    save_sharded({"best": float("nan"), "w": torch.ones(2)}, folder)
    return load_sharded({"best": 0.0, "w": torch.zeros(2)}, folder)["best"]


def test_a_common_number_may_be_nan(tmp_path):
    for best in run_ranks(save_nan, 2, str(tmp_path)):
        assert best != best
    settings = {"rate": float("nan"), "steps": 3}
    assert differences(settings, {"rate": float("nan"), "steps": 3}) == ""
    assert differences(settings, {"rate": 0.1, "steps": 3}) == "rate=nan, not 0.1"


OTHER = "it is another model or another run"


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ("a b", "a b c d", f"c is in the checkpoint only, and 1 more: {OTHER}"),
        ("a b c", "a", f"b is not in the checkpoint, and 1 more: {OTHER}"),
        ("m/b.w", "m/a.w", f"m/b.w is not in the checkpoint: {OTHER}"),
        (
            "m/module.a m/module.b",
            "m/a m/b",
            "m/module.a is not in the checkpoint, and 1 more: the checkpoint has m/a: save and "
            "load the module inside the wrapper",
        ),
        (
            "m/a m/b",
            "m/module.a m/module.b",
            "m/a is not in the checkpoint, and 1 more: the checkpoint has m/module.a: save and "
            "load the module inside the wrapper",
        ),
        ("m/module.a", "m/module.a m/module.b", f"m/module.b is in the checkpoint only: {OTHER}"),
        ("m/submodule.a", "m/suba", f"m/submodule.a is not in the checkpoint: {OTHER}"),
    ],
)
def test_names_that_one_side_has_are_told_with_their_reason(ours, theirs, words):
    with pytest.raises(ValueError) as found:
        check_names(set(ours.split()), set(theirs.split()), ["ranks/"])
    assert str(found.value) == words


def test_a_list_that_has_grown_and_a_named_tuple(tmp_path):
    save_sharded({"history": [{"loss": 2.0}, {"loss": 1.0}], "at": Box((3,), (4,))}, tmp_path)
    with pytest.raises(ValueError, match=f"history/0/loss is in the .* only, and 1 more: {OTHER}"):
        load_sharded({"history": [], "at": Box((0,), (0,))}, tmp_path)
    state = {"history": [{"loss": 0.0}] * 2, "at": Box((0,), (0,))}
    assert load_sharded(state, tmp_path)["at"] == Box((3,), (4,))


# ---- many ranks ----------------------------------------------------------------------------------


def cut_up(shape, sizes):
    """The boxes of a grid over a tensor, each side cut into so many parts."""
    sides = []
    for length, parts in zip(shape, sizes, strict=True):
        share = -(-length // parts)
        starts = [min(share * part, length) for part in range(parts + 1)]
        sides.append(list(pairwise(starts)))
    for spans in product(*sides):
        starts, ends = zip(*spans, strict=True)
        yield Box(starts, tuple(b - a for a, b in zip(starts, ends, strict=True)))


@pytest.mark.parametrize("sizes", [(512, 1), (1, 512), (32, 16)])
def test_boxes_of_many_ranks_are_checked_in_linear_time(sizes):
    shape, boxes = (1024, 512), list(cut_up((1024, 512), sizes))
    check_whole({("w", box): 0 for box in boxes}, {"w": shape})
    assert not have_common(boxes, 2)
    with pytest.raises(ValueError, match="hold 523264 numbers of 524288|hold 52"):
        check_whole({("w", box): 0 for box in boxes[1:]}, {"w": shape})
    wider = Box(boxes[0].offset, (boxes[0].size[0] + 1, boxes[0].size[1]))
    far = Box((1023, 511), (1, 1))
    for spoilt in ([wider, *boxes[1:]], [*boxes, far]):
        if spoilt[0] == wider and sizes == (1, 512):
            continue  # it would stick out
        with pytest.raises(ValueError, match="the ranks' parts of w overlap"):
            check_whole({("w", box): 0 for box in spoilt}, {"w": shape})


# ---- complete or absent --------------------------------------------------------------------------


def save_large(folder, numbers):
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.ones(numbers // size)
    state = {"w": Piece(mine, (rank * len(mine),), (len(mine) * size,))}
    save_sharded(state, folder)


@pytest.fixture
def small_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if shutil.which("mount") is None:
        pytest.skip("a full disk needs mount")
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a full disk needs the right to mount: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_fills_up_loses_nothing(small_disk):
    name = checkpoints.name_of
    run_ranks(save_large, 2, str(small_disk / name(1)), 100_000)
    said = refused(save_large, 2, str(small_disk / name(2)), 200_000)
    assert "No space left on device" in said
    assert run_ranks(checkpoints.newest_intact, 2, str(small_disk))[0] == (name(1), [])
    run_ranks(checkpoints.clear, 2, str(small_disk))
    assert [path.name for path in small_disk.iterdir()] == [name(1)]
    run_ranks(save_large, 2, str(small_disk / name(2)), 100_000)


SAVER = """
import itertools, os, sys, torch
from manyhands.saving.sharded import save_sharded
for step in itertools.count(1):
    state = {"w": torch.full((200_000,), float(step)), "step": step}
    save_sharded(state, f"{sys.argv[1]}/step-{step % 2:08d}")
    print(step, flush=True)
"""


@pytest.mark.parametrize("delay_ms", [0, 3, 7, 11, 16, 22])
def test_a_kill_at_any_moment_leaves_complete_checkpoints_or_none(delay_ms, tmp_path):
    """Two folders in turn, so that an older checkpoint is being replaced, too."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    command = [sys.executable, "-c", SAVER, str(tmp_path)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        for _ in range(3):
            assert process.stdout.readline().strip()
        time.sleep(delay_ms / 1000)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    found = checkpoints.complete(tmp_path)
    assert found  # of two, one is not being written
    for name in found:
        assert damage(Store(tmp_path / name)) == ""
        state = load_sharded({"w": torch.zeros(200_000), "step": 0}, tmp_path / name)
        assert state["w"].unique().tolist() == [state["step"]]


# ---- without waiting for the disk ----------------------------------------------------------------


def test_asynchronous_saves_hold_the_values_of_their_step(tmp_path):
    found = run_ranks(save_and_go_on, 3, str(tmp_path))
    assert found == [("step-00000003", [])] * 3
    for step in (1, 2, 3):
        state = {"w": torch.zeros(300_000), "m": torch.zeros(300_000), "step": 0}
        state = load_sharded(state, tmp_path / checkpoints.name_of(step))
        assert state["step"] == step
        assert state["w"].unique().tolist() == [step]
        assert state["m"].unique().tolist() == [-step]


def save_on_a_full_disk(folder, call):
    rank = dist.get_rank()
    saver = AsyncSaver()
    state = {"w": torch.ones(100_000)}
    saver.save(state, f"{folder}/step-00000001")
    saver.wait()
    rows = torch.ones(200_000)
    state["more"] = Piece(rows, (rank * 200_000,), (400_000,))
    saver.save(state, f"{folder}/step-00000002")
    try:
        saver.wait() if call == "wait" else saver.save(state, f"{folder}/step-00000003")
    except ValueError as problem:
        saver.wait()  # told once
        return str(problem)
    return "nothing was raised"


@pytest.mark.parametrize("call", ["wait", "save"])
def test_an_error_of_the_thread_comes_out_at_the_next_call(call, small_disk):
    for said in run_ranks(save_on_a_full_disk, 2, str(small_disk), call):
        assert "No space left on device" in said and "\n" not in said
    assert checkpoints.complete(small_disk) == ["step-00000001"]


LEAVES = """
import sys, torch
from manyhands.checkpoint.asynchronous import AsyncSaver
AsyncSaver_ = AsyncSaver()
AsyncSaver_.save({"w": torch.ones(2_000_000)}, sys.argv[1])
"""


def test_a_program_that_ends_finishes_its_last_save(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    command = [sys.executable, "-c", LEAVES, str(tmp_path / "last")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert damage(Store(tmp_path / "last")) == ""


KILLED = """
import os, signal, sys, torch
from manyhands.saving import store
from manyhands.checkpoint.asynchronous import AsyncSaver
saver = AsyncSaver()
saver.save({"w": torch.ones(1000)}, sys.argv[1] + "/step-00000001")
saver.wait()
write = store.write_whole
def half(path, fill):  # the machine takes the process in the middle of a file, in the thread
    def fill_half(file):
        file.write(b"half a file")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    return write(path, fill_half)
store.write_whole = half
saver.save({"w": torch.ones(1000)}, sys.argv[1] + "/step-00000002")
saver.wait()
"""


def test_a_kill_in_mid_save_leaves_the_one_before(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    assert (tmp_path / "step-00000002").exists()
    assert checkpoints.newest_intact(tmp_path) == ("step-00000001", [])
    checkpoints.clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
