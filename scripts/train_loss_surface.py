"""Train networks with and without skip connections, and map the loss around each of them.

bash sbatch/loss_surface.sbatch              on all GPUs of this machine, or 2 CPU ranks
RANKS=1 bash sbatch/loss_surface.sbatch      the same work for one rank
python scripts/train_loss_surface.py --data mnist --epochs 1

First each rank trains its share of the networks. Then all ranks together compute one surface after
the other. What is done is kept in the run's folder, so a job that is stopped or killed goes on with
the networks and surfaces that are missing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.data import images
from manyhands.first_job.planning import my_share
from manyhands.first_job.power_law import error_rate
from manyhands.instruments.figures import loss_surfaces, png
from manyhands.jobs import mine
from manyhands.loss_surface import surface as loss_surface
from manyhands.models import resnet
from manyhands.models.resnet import ResNet, use_batch_statistics
from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import World, command_line, together
from manyhands.training.report import write_report
from manyhands.training.storage import partial_name, read_state, write_state
from manyhands.training.tasks import WAIT_S, Kind, TaskConfig, TaskRun, at_least_one

TINY = {"": "--grid 3 --networks 1 --blocks 2 --epochs 1"}  # its short runs: gpu/jobs.py
KINDS = ("skip", "plain")
NAMES = {"skip": "with skips", "plain": "without skips"}
AT_ONCE = 1000  # images in one forward pass when testing


@dataclass(frozen=True)
class Config(TaskConfig):
    """What to train, and how much of the surface to map."""

    networks: int = 3
    """Networks with skip connections, and as many without. They differ in their seed."""
    blocks: int = 14
    """Blocks of two convolutions in each network."""
    grid: int = 25
    """Points on a side of a surface; an odd number, so that one is in the middle."""
    span: float = 1.0
    """How far to go in each direction; 1 is as far as the weights are long."""
    images: int = 256
    """Training images to compute the loss of."""
    epochs: int = 8
    """How often each network sees each training image."""
    impl: Literal["mine", "scratch"] = "scratch"
    """Whose random_direction, surface, roughness: yours (mine/loss_surface.py) or the course's."""


class Parts(NamedTuple):
    """The exercises of lesson 02 that this job can use."""

    random_direction: Callable = loss_surface.random_direction
    surface: Callable = loss_surface.surface
    roughness: Callable = loss_surface.roughness


def curve(result: Mapping) -> tuple[None, int, str]:
    """No loss, since two kinds of networks make no curve; the images looked at, and words."""
    which = f"{result['kind']}, seed {result['seed']}"
    if result["stage"] == "train":
        return (
            None,
            result["num_images"],
            f"done; network {which}: test error {result['error']:.3f}",
        )
    words = f"done; surface {which}: roughness {result['roughness']:.3f}"
    return None, result["num_images"], words


KIND = Kind(
    name="loss_surface",
    noun="networks and surfaces",
    identity=("data", "networks", "blocks", "grid", "span", "images", "epochs", "seed"),
    key=("stage", "kind", "seed"),
    loss_name="test error",
    loss_unit="share of images",
    result_name="mean test error with skips",
    tell=curve,
)


def main(config: Config) -> dict | None:
    """Train and map all, and write the report; rank 0 returns the numbers of `result.json`."""
    torch.set_num_threads(1)  # more would only wait for each other: the tasks are small
    return mine.start("loss_surface", config, Parts, train, timeout_s=WAIT_S)


def train(config: Config, world: World, parts: Parts) -> dict | None:
    data = images.load(config.data).to(world.device)
    world.print(data.note)
    check(config, len(data.train_inputs))
    seeds = range(config.seed, config.seed + config.networks)
    tasks = [(stage, kind, n) for stage in ("train", "map") for n in seeds for kind in KINDS]
    half = len(tasks) // 2
    # Losses are put together on the CPU, also where the ranks' own group is one of GPUs.
    group = dist.new_group(backend="gloo")
    with TaskRun(KIND, config, world, tasks, data) as run:

        def train_it(_: str, kind: str, seed: int) -> dict:
            return train_one(config, data, kind, seed, network_file(run.folder, kind, seed))

        def map_it(_: str, kind: str, seed: int) -> dict:
            path = network_file(run.folder, kind, seed)
            return map_one(config, data, seed, load_network(config, data, kind, path), parts, group)

        networks = run.do(tasks[:half], train_it, my_share)
        surfaces = run.do(tasks[half:], map_it)
        with_skips = [one["error"] for one in networks if one["kind"] == "skip"]
        run.status["valid_loss"] = fmean(with_skips)
        numbers = tell(config, run, data, networks, surfaces) if world.is_main else None
    if world.is_main:
        world.print(f"report: {write_report(run.folder)}")
    return numbers


def check(config: Config, num_images: int) -> None:
    """Refuse settings that cannot be."""
    if num_images < resnet.BATCH:
        raise BadInput(f"the data holds {num_images} images for training; take {resnet.BATCH}")
    if not 2 <= config.images <= num_images:
        raise BadInput(
            f"--images {config.images}: take at least 2 and at most the {num_images:,} of the data"
        )
    if config.grid < 3 or config.grid % 2 == 0:
        raise BadInput(f"--grid {config.grid}: take an odd number, 3 or more")
    if not (math.isfinite(config.span) and config.span > 0):
        raise BadInput(f"--span {config.span}: take a number above 0")
    at_least_one(config, "networks", "blocks", "epochs")


# ---- training ----------------------------------------------------------------------------------


def network_file(folder: Path, kind: str, seed: int) -> Path:
    return folder / "networks" / f"{kind}-{seed}.pt"


def new_network(config: Config, data: images.Images, kind: str) -> ResNet:
    model = ResNet(data.num_classes, config.blocks, skip=kind == "skip")
    return model.to(data.train_inputs.device)


def train_one(config: Config, data: images.Images, kind: str, seed: int, path: Path) -> dict:
    """Train a network and save its weights; returns its error on the test images."""
    torch.manual_seed(seed)
    model = new_network(config, data, kind)
    resnet.train(model, data.train_inputs, data.train_labels, config.epochs)
    path.parent.mkdir(exist_ok=True)
    write_state(model.state_dict(), partial_name(path))
    partial_name(path).replace(path)
    model.eval()
    parts = zip(data.test_inputs.split(AT_ONCE), data.test_labels.split(AT_ONCE), strict=True)
    wrong = sum(error_rate(model, *part) * len(part[1]) for part in parts)
    num_images = config.epochs * len(data.train_inputs)
    return {"error": round(wrong / len(data.test_labels), 6), "num_images": num_images}


# ---- surfaces ----------------------------------------------------------------------------------


def load_network(config: Config, data: images.Images, kind: str, path: Path) -> ResNet:
    """A network as it was saved, ready to be moved around."""
    model = new_network(config, data, kind)
    names = set(model.state_dict())
    try:
        model.load_state_dict(read_state(path, names))
    except BadInput:
        raise BadInput(f"{path} cannot be read: name a new --out, to train it again") from None
    use_batch_statistics(model.eval())
    return model


def map_one(
    config: Config,
    data: images.Images,
    seed: int,
    model: nn.Module,
    parts: Parts,
    group: dist.ProcessGroup,
) -> dict:
    """Compute the surface around a network; every rank calls this, and all get the same."""
    inputs = data.train_inputs[: config.images]
    labels = data.train_labels[: config.images]
    parameters = list(model.parameters())
    generator = torch.Generator().manual_seed(seed)
    directions = tuple(new_direction(parameters, generator, parts) for _ in range(2))

    @torch.no_grad()
    def loss() -> Tensor:
        return nn.functional.cross_entropy(model(inputs), labels)

    losses = parts.surface(loss, parameters, directions, distances(config), group)
    same_everywhere("surface", lambda: check_surface(losses, config.grid))
    (rough,) = same_everywhere("roughness", lambda: [check_number(parts.roughness(losses))])
    middle = config.grid // 2
    return {
        "center": rounded(losses[middle, middle]),
        "highest": rounded(losses.max()),
        "roughness": rounded(rough),
        "losses": [[rounded(loss) for loss in row] for row in losses],
        "num_images": config.grid**2 * config.images,
    }


def new_direction(
    parameters: Sequence[Tensor], generator: torch.Generator, parts: Parts
) -> list[Tensor]:
    """A random direction, the same on all ranks, on the device of the parameters."""
    on_cpu = [parameter.detach().cpu() for parameter in parameters]
    torch.manual_seed(dist.get_rank())  # a function that does not use the generator is noticed
    direction = list(parts.random_direction(on_cpu, generator))

    def sums() -> list[float]:
        shapes = [getattr(part, "shape", None) for part in direction]
        if shapes != [parameter.shape for parameter in parameters]:
            raise BadInput(wrong("random_direction", "other shapes than those of the parameters"))
        return [part.double().sum().item() for part in direction]

    same_everywhere("random_direction", sums)
    device = parameters[0].device
    return [part.to(device) for part in direction]


def distances(config: Config) -> list[float]:
    """Where the points are, along both directions: as far left as right of the middle."""
    half = config.grid // 2
    return [config.span * (number - half) / half for number in range(config.grid)]


def check_surface(losses: object, grid: int) -> list[list[float]]:
    """The losses, if they are what a surface has to be."""
    if not isinstance(losses, Tensor) or losses.shape != (grid, grid):
        seen = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise BadInput(wrong("surface", f"{seen} where a tensor of {grid} x {grid} is needed"))
    if num_bad := (~(losses > 0) | losses.isinf()).sum().item():
        raise BadInput(wrong("surface", f"{num_bad} of {grid**2} points without a loss above 0"))
    return losses.tolist()


def check_number(value: object) -> float:
    """The roughness, if it is a number."""
    if not isinstance(value, float | int | Tensor) or not math.isfinite(value):
        raise BadInput(wrong("roughness", f"{value!r} where a number is needed"))
    return float(value)


def same_everywhere(name: str, work: Callable[[], list]) -> list:
    """What `work` gives, on every rank; BadInput where the ranks have got different values."""
    everyone = together(work)
    for rank, values in enumerate(everyone):
        if values != everyone[0]:
            raise BadInput(wrong(name, f"other numbers on rank {rank} than on rank 0"))
    return everyone[0]


def wrong(name: str, what: str) -> str:
    return f"{name} gave {what}: run its check in the notebook"


def rounded(value: object) -> float:
    return float(f"{float(value):.5g}")


# ---- results -----------------------------------------------------------------------------------


def tell(
    config: Config,
    run: TaskRun,
    data: images.Images,
    networks: Sequence[Mapping],
    surfaces: Sequence[Mapping],
) -> dict:
    """On rank 0: print the table, draw surfaces.png, and write result.json."""
    print("network        test error  loss in the middle  highest  roughness")
    kept = []
    for one, other in zip(networks, surfaces, strict=True):
        kept.append({name: one[name] for name in ("kind", "seed", "error")})
        kept[-1] |= {name: other[name] for name in ("center", "highest", "roughness", "losses")}
        print(
            f"{one['kind']:5} seed {one['seed']:<4} {one['error']:9.3f} {other['center']:19.3g} "
            f"{other['highest']:8.3g} {other['roughness']:10.3f}"
        )
    means = {}
    for kind in KINDS:
        rough = [one["roughness"] for one in kept if one["kind"] == kind]
        means[kind] = rounded(fmean(rough))
        print(f"{kind:5} roughness {means[kind]:.3f} ({min(rough):.3f} to {max(rough):.3f})")
    first = {NAMES[one["kind"]]: one["losses"] for one in kept[: len(KINDS)]}
    (run.folder / "surfaces.png").write_bytes(png(loss_surfaces(first, distances(config))))
    print(f"figure: {run.folder / 'surfaces.png'}")
    numbers = {"data": data.note, "distances": [rounded(one) for one in distances(config)]}
    numbers |= {"mean_roughness": means, "networks": kept}
    run.write_result(numbers)
    return numbers


if __name__ == "__main__":
    command_line(main, Config)
