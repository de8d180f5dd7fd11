"""A checkpoint of one mesh is loaded by other meshes and by one process: weights and moments are
equal bit for bit once they are gathered, by hand and by PyTorch."""

from itertools import product

import pytest
import torch
import torch.distributed as dist

from manyhands.mesh import native
from manyhands.mesh.boxes import boxes_of_run, mesh_state
from manyhands.mesh.grid import coordinates, make_groups, share_of_data, torch_mesh
from manyhands.mesh.training import MeshTraining
from manyhands.models.transformer import Transformer
from manyhands.ranks.lab import run_ranks
from manyhands.saving.names import flatten, tensor_of
from manyhands.saving.pieces import Box
from manyhands.saving.sharded import load_sharded, save_sharded

V, T, B = 13, 6, 8


def build(sizes, seed, is_torch, heads=4):
    torch.manual_seed(seed)
    model = Transformer(V if not is_torch else 12, T, 2, heads, 8 * heads)
    if is_torch:
        training = native.TorchMeshTraining(model, torch_mesh(sizes))
    else:
        training = MeshTraining(model, make_groups(sizes), 2)
    return training, torch.optim.AdamW(training.parameters(), lr=0.01, foreach=False)


def train(training, optimizer, sizes, steps):
    share, num_shares = share_of_data(coordinates(dist.get_rank(), sizes), sizes)
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        inputs, targets = torch.randint(12, (2, B, T), generator=draw)
        training.step(inputs[share::num_shares], targets[share::num_shares])
        training.finish()
        optimizer.step()
        training.zero_grad()


def whole(training, optimizer):
    """All tensors, put together on rank 0 from every rank's boxes; each number has to be there."""
    pieces, _ = flatten(mesh_state(training, optimizer))
    mine = [(tensor_of(key), p.box, p.shape, p.tensor.clone()) for key, p in pieces.items()]
    every = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, every)
    found = {}
    for name, box, shape, part in (one for some in every or [] for one in some):
        known = found.setdefault(name, torch.full(shape, torch.nan))
        known[box.within([0] * len(shape))] = part
    assert not any(tensor.isnan().any() for tensor in found.values())
    return found


def save(sizes, folder, is_torch, heads):
    training, optimizer = build(sizes, 0, is_torch, heads)
    train(training, optimizer, sizes, range(2))
    save_sharded(mesh_state(training, optimizer), folder)
    return whole(training, optimizer)


def load(sizes, folder, is_torch, heads):
    training, optimizer = build(sizes, 5, is_torch, heads)
    load_sharded(mesh_state(training, optimizer), folder)
    found = whole(training, optimizer)
    train(training, optimizer, sizes, range(2, 4))
    return found, whole(training, optimizer)


BY_HAND = {"pp": 2, "dp": 2, "tp": 2}
TO = [{"dp": 4}, {"pp": 2, "tp": 2}, {"dp": 1}, {"replicate": 2, "dp": 2}]
TORCH = {"dp": 2, "tp": 2}
TO_TORCH = [{"dp": 4}, {"tp": 4}, {"dp": 1}]


def ranks_of(sizes):
    return torch.tensor(list(sizes.values())).prod().item()


@pytest.mark.parametrize(
    ("saved", "others", "is_torch", "heads"),
    [(BY_HAND, TO, False, 4), (BY_HAND, TO, False, 3), (TORCH, TO_TORCH, True, 4)],
    ids=["by hand", "heads that do not divide", "PyTorch"],
)
def test_another_mesh_loads_it_bit_for_bit_and_goes_on(saved, others, is_torch, heads, tmp_path):
    folder = str(tmp_path)
    wanted = run_ranks(save, ranks_of(saved), saved, folder, is_torch, heads)[0]
    assert len([name for name in wanted if name.endswith("exp_avg_sq")]) == len(wanted) / 4
    after = []
    for sizes in others:
        found, later = run_ranks(load, ranks_of(sizes), sizes, folder, is_torch, heads)[0]
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        after.append(later)
    for later, name in product(after[1:], wanted):
        torch.testing.assert_close(later[name], after[0][name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shape", [(), (5,), (4, 3), (2, 3, 4)])
def test_a_run_of_numbers_is_made_of_boxes_in_the_order_of_memory(shape):
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    total = numbers.numel()
    for start, stop in product(range(total + 1), repeat=2):
        boxes = boxes_of_run(start, stop, shape)
        parts = [numbers[Box.within(box, [0] * len(shape))].flatten() for box in boxes]
        found = torch.cat(parts).tolist() if parts else []
        assert found == list(range(start, stop))
        assert len(boxes) <= 2 * len(shape) or not shape
