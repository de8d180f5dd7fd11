"""What the tests of runs share: a training of a second, its folder, and what befalls it."""

import json
import resource
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import World
from manyhands.training.checkpoints import ShardedCheckpoints
from manyhands.training.run import Run, save_once
from manyhands.training.schedule import learning_rate_at, set_learning_rate
from manyhands.training.settings import TrainConfig
from manyhands.training.storage import read_lines


class Net(nn.Module):
    """Small, but with dropout, so that a wrong random state shows in the weights."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.5), nn.Linear(width, 1))
        self.sleep_s = 0.0

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        time.sleep(self.sleep_s)
        return ((self.layers(inputs) - targets) ** 2).mean()


def world_here() -> World:
    rank = dist.get_rank() if dist.is_initialized() else 0
    size = dist.get_world_size() if dist.is_initialized() else 1
    return World(rank, rank, size, torch.device("cpu"))


def data(num_blocks: int = 40) -> TensorDataset:
    inputs = torch.randn(num_blocks, 4, generator=torch.Generator().manual_seed(3))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def train(
    config: TrainConfig, event=None, width: int = 16, shuffle: bool = False, sha256: str = 64 * "a"
) -> list[float]:
    """Train as a script does. `event(rank, step)` is called before each log. Returns my losses."""
    world = world_here()
    torch.manual_seed(config.seed)
    model = Net(width)
    torch.manual_seed(world.data_seed)
    if world.world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    dataset = data()
    sampler = DistributedSampler(dataset, world.world_size, world.rank, drop_last=True)
    order = {"shuffle": True} if shuffle else {"sampler": sampler}
    sizes = {"num_samples": len(dataset), "flops_per_token": 100.0, "data_sha256": sha256}
    run = Run(config, world, "tiny", **sizes, checkpoints=ShardedCheckpoints, floor=0.5)
    loader = DataLoader(dataset, config.batch // world.world_size, drop_last=True, **order)
    run.resume(model=model, optimizer=optimizer)
    losses = []
    for epoch in run.epochs(loader):
        sampler.set_epoch(epoch)
        for inputs, targets in run.batches(loader):
            set_learning_rate(optimizer, learning_rate_at(run.step, config))
            loss = model(inputs, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if event:
                event(world.rank, run.step + 1)
            run.log(loss)
    save_once(model, run.folder / "model.pt")
    run.finish(valid_loss=1.25)
    return losses


def refused(config: TrainConfig, **kwargs) -> str:
    """The one line with which a run is refused."""
    try:
        train(config, **kwargs)
    except BadInput as error:
        return str(error)
    return "accepted"


def outcome(folder: Path) -> tuple[list, dict]:
    """Step numbers and losses of a finished run, and its weights."""
    rows = [(line["step"], line["loss"]) for line in read_lines(folder / "metrics.jsonl")]
    return rows, torch.load(folder / "model.pt", weights_only=True)


def assert_same(folder: Path, other: Path) -> None:
    (rows, weights), (other_rows, other_weights) = outcome(folder), outcome(other)
    assert rows == other_rows
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def status(folder: Path) -> dict:
    return json.loads((folder / "status.json").read_text())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def limit_file_size(num_bytes: int) -> None:
    """Make this process's disk full: no file of it can grow beyond `num_bytes`."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
