"""Every way to train is assembled in one place, and PyTorch's ways train as one process does."""

import ast

import pytest

from commands import ROOT
from manyhands.compare.measure import compare
from manyhands.ranks.lab import run_ranks
from manyhands.ways.ready import Setting, one_process
from manyhands.ways.registry import native_for

WRAPS = set(
    "BucketedDDP DistributedDataParallel FSDP MeshTraining Pipeline ShardedOptimizer "
    "TensorParallel TensorSequenceParallel TorchMeshTraining torch_ddp torch_fsdp torch_pipeline "
    "torch_tensor_parallel".split()
)
SETTINGS = {
    2: Setting(layers=2, vocab=40, block=8, batch=8, micro_batches=4),
    3: Setting(layers=3, vocab=42, block=9, batch=12, micro_batches=4),
    4: Setting(layers=4, vocab=40, block=8, batch=16, micro_batches=4),
}


def called(path) -> set[str]:
    """The last words of the names that a file calls, but for the parts that a program is given."""
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    names = (ast.unparse(call.func) for call in calls)
    return {name.rpartition(".")[2] for name in names if not name.startswith("parts.")}


def test_outside_of_the_lessons_models_are_wrapped_in_one_room():
    """In programs/ stand whole programs of lessons, such as that of lesson 06."""
    lessons = {path.stem[3:] for path in (ROOT / "solutions").glob("[0-9][0-9]_*.py")}
    found = {}
    for path in sorted((ROOT / "scripts").rglob("*.py")):
        room = path.relative_to(ROOT / "scripts").parts[1:2]
        if not {*room} & {*lessons, "checks", "programs"} and (wraps := called(path) & WRAPS):
            found[path.relative_to(ROOT / "scripts").as_posix()] = wraps
    assert found and all(name.startswith("manyhands/ways/") for name in found), found
    places = [one for wraps in found.values() for one in wraps]
    assert sorted(places) == sorted({*places}), found


@pytest.mark.parametrize("ranks", SETTINGS)
def test_every_way_of_pytorch_trains_as_one_process_does(ranks):
    ways = {"one process": one_process, **native_for(ranks)}
    found = run_ranks(compare, ranks, SETTINGS[ranks], 1, ways=ways, timeout_s=100)[0]
    assert list(found["ways"]) == list(ways)
    for name, one in found["ways"].items():
        assert len(one["losses"]) == 4 and one["difference"] < 1e-5, name
