"""Measure collectives, by hand and PyTorch's own: bandwidth against size.

torchrun --standalone --nproc-per-node=4 scripts/bench_collectives.py --only all_reduce
bash sbatch/collectives.sbatch              on all GPUs of this machine, or 2 CPU ranks
python scripts/bench_collectives.py         one rank: nothing is sent, but memory is copied

A time is that of the slowest rank, and the median of the repeats. Two bandwidths follow from it:

    algorithm bandwidth   size / time: how soon a tensor is through
    bus bandwidth         the bytes that a link has to carry at least / time: to be compared with
                          the rate of the links, whatever the collective and the number of ranks

Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import psutil
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor

from manyhands.collectives import alpha_beta, ring, trees
from manyhands.instruments.figures import BLACK, GREY, legend_below, lines, new_figure, png
from manyhands.instruments.meters import machine, scaled
from manyhands.instruments.timing import median_s
from manyhands.jobs import mine
from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import World, command_line, distributed, on_main, together
from manyhands.training import lock
from manyhands.training.storage import open_folder, replace_file

TINY = {"": "--max-mb 4 --repeats 3"}  # its short runs: gpu/jobs.py
BY_HAND = {
    "broadcast": ("broadcast_naive", "broadcast_tree"),
    "reduce": ("reduce_tree",),
    "gather": ("gather",),
    "all_gather": ("all_gather_ring",),
    "reduce_scatter": ("reduce_scatter_ring",),
    "all_reduce": ("all_reduce_naive", "all_reduce_tree", "all_reduce_ring"),
}
IN_CHUNKS = ("gather", "all_gather", "reduce_scatter")  # a size is that of all chunks together
COPY = "memory copy"
CURVES = ("naive", "tree", "ring", "native")
HEAD = f"{'':<20}{'size':>10}{'time':>13}{'algorithm':>13}{'bus':>13}{'predicted':>13}"
ROUND_TRIPS = 4
FORMAT = "manyhands collectives 1"


@dataclass(frozen=True)
class Config:
    """What to measure."""

    impl: Literal["mine", "scratch", "torch"] = "scratch"
    """By hand: with your functions (mine/collectives.py), the course's, or none."""
    only: str = ""
    """Measure only the collectives whose name holds this text."""
    max_mb: float = 0
    """The largest tensor (10^6 bytes); 0 takes 16 on CPUs and 256 on GPUs."""
    repeats: int = 15
    """Calls of each function at each size."""
    device: str = "auto"
    """auto, cpu or cuda."""
    out: str = ""
    """Folder for the figures; empty takes the next free one, runs/collectives-001 and so on."""


class Parts(NamedTuple):
    """The functions of lesson 04 that are measured, and the fit of the model."""

    broadcast_naive: Callable = trees.broadcast_naive
    broadcast_tree: Callable = trees.broadcast_tree
    reduce_tree: Callable = trees.reduce_tree
    gather: Callable = trees.gather
    all_gather_ring: Callable = ring.all_gather_ring
    reduce_scatter_ring: Callable = ring.reduce_scatter_ring
    all_reduce_naive: Callable = trees.all_reduce_naive
    all_reduce_tree: Callable = trees.all_reduce_tree
    all_reduce_ring: Callable = ring.all_reduce_ring
    fit_alpha_beta: Callable = alpha_beta.fit_alpha_beta


@dataclass(frozen=True)
class Row:
    """One function at one size."""

    kind: str
    name: str
    nbytes: int
    time_s: float
    algorithm_bytes_per_s: float
    bus_bytes_per_s: float
    predicted_s: float | None  # by the model, for functions by hand


def main(config: Config) -> Path:
    """Measure, print the table, draw the figure; returns the folder with both."""
    if not (config.max_mb == 0 or 0.001 <= config.max_mb < math.inf):
        raise BadInput(f"--max-mb is {config.max_mb}: take at least 0.001, which is 1 kB")
    if config.repeats < 1:
        raise BadInput(f"--repeats is {config.repeats}: take at least 1")
    if not any(config.only in kind for kind in BY_HAND):
        raise BadInput(f"--only {config.only!r} is in no name: {', '.join(BY_HAND)}")
    yours = mine.load("collectives", Parts._fields) if config.impl == "mine" else {}
    with distributed(config.device) as world:
        if config.impl == "mine":
            world.print(mine.in_words(yours))
        sizes_bytes = choose_sizes(config, world)
        folder = make_folder(config, world)
        try:
            measure(config, world, Parts(**yours), sizes_bytes, folder)
        finally:
            lock.release(folder)
        return folder


def measure(
    config: Config, world: World, parts: Parts, sizes_bytes: Sequence[int], folder: Path
) -> None:
    # Are the results right?
    kinds = [kind for kind in BY_HAND if config.only in kind and world.world_size > 1]
    for kind in kinds:
        check_results(kind, world, parts)

    # Model
    model = fit(config, world, parts, sizes_bytes)

    # Measuring
    rows = []
    for kind in [COPY, *kinds]:
        world.print(f"\n{HEAD}")
        for nbytes in sizes_bytes:
            tensor = torch.zeros(nbytes // 4, device=world.device)
            works = choose_works(kind, tensor, world, parts, config.impl != "torch")
            for name, time_s in time_works(works, world, config.repeats).items():
                rows.append(make_row(kind, name, nbytes, time_s, world, model))
                world.print(words(rows[-1]))

    # Result
    if world.is_main:
        write(folder, rows)
    world.print(f"\nnumbers: {folder}/results.jsonl, figure: {folder}/bandwidth.png")


# ---- before the measuring ----------------------------------------------------------------------


def choose_sizes(config: Config, world: World) -> list[int]:
    """Bytes of the tensors, from 1 kB on, each cut to chunks of equal size."""
    is_gpu = world.device.type == "cuda"
    n = world.world_size
    max_bytes = 1e6 * (config.max_mb or (256 if is_gpu else 16))
    # At worst rank 0 gathers all tensors, and on CPUs all ranks share one memory.
    needed = max_bytes * (n + 4 if is_gpu else 5 * n)
    free = torch.cuda.mem_get_info()[0] if is_gpu else psutil.virtual_memory().available
    if needed > free:
        raise BadInput(
            f"--max-mb {max_bytes / 1e6:g} needs up to {scaled(needed, 'B')} of memory for {n} "
            f"rank(s), and {scaled(free, 'B')} are free: take less"
        )
    steps = [first * 1000**power for power in (1, 2, 3, 4) for first in (1, 4, 16, 64, 250)]
    return [max(1, step // (4 * n)) * 4 * n for step in steps if step <= max_bytes]


def make_folder(config: Config, world: World) -> Path:
    """Make the folder, with what was measured and where in its `config.json`."""
    settings = asdict(config)
    about = {
        "format": FORMAT,
        "identity": settings | {"job": "collectives", "ranks": world.world_size},
        "config": settings,
        "backend": world.backend,
        "torch": torch.__version__,
        "ranks": together(lambda: machine(world.device)),
    }
    return on_main(lambda: open_folder(config.out, "collectives", about, ()))


def check_results(kind: str, world: World, parts: Parts) -> None:
    """Refuse functions by hand that do not give what torch's own gives."""

    def result(name: str) -> Tensor:
        tensor = torch.arange(4.0 * world.world_size, device=world.device) + world.rank
        choose_works(kind, tensor, world, parts)[name]()
        if kind in ("reduce", "gather") and not world.is_main:
            return tensor[:0]
        return tensor.chunk(world.world_size)[world.rank] if kind == "reduce_scatter" else tensor

    wanted = result(f"dist.{kind}")
    for name in BY_HAND[kind]:
        differs = torch.tensor(float(not torch.equal(result(name), wanted)), device=world.device)
        dist.all_reduce(differs)
        if differs:
            raise BadInput(
                f"{name} gives other numbers than dist.{kind}: mend it in the notebook and run "
                "check.keep() again, or take --impl scratch"
            )


def fit(
    config: Config, world: World, parts: Parts, sizes_bytes: Sequence[int]
) -> tuple[float, float] | None:
    """Alpha (s) and beta (s a byte) of a message from the first to the last rank and back.

    Where ranks are on several nodes, the message goes from one node to another.
    """
    if world.world_size == 1:
        world.print("one rank sends nothing: start several with torchrun, or take the job file")
        return None
    times_s = []
    for nbytes in sizes_bytes:
        tensor = torch.zeros(nbytes // 4, device=world.device)
        works = {"": partial(there_and_back, tensor, world)}
        times_s.append(time_works(works, world, config.repeats)[""] / (2 * ROUND_TRIPS))
    alpha_s, beta_s_per_byte = parts.fit_alpha_beta(sizes_bytes, times_s)
    world.print(
        f"model: a message takes {alpha_s * 1e6:.0f} us and {beta_s_per_byte * 1e12:.0f} us a MB"
    )
    return alpha_s, beta_s_per_byte


def there_and_back(tensor: Tensor, world: World) -> None:
    """Send a message from the first rank to the last and back, a few times."""
    last = world.world_size - 1
    for _ in range(ROUND_TRIPS):
        if world.rank == 0:
            dist.send(tensor, last)
            dist.recv(tensor, last)
        elif world.rank == last:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)


# ---- measuring ---------------------------------------------------------------------------------


def choose_works(
    kind: str, tensor: Tensor, world: World, parts: Parts, by_hand: bool = True
) -> dict[str, Callable[[], object]]:
    """Name -> a call that does the collective `kind` with `tensor`, in place."""
    chunks = list(tensor.chunk(world.world_size))
    own = chunks[world.rank]
    # torch 2.13 has new names for these two.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    native = {
        COPY: (torch.empty_like(tensor).copy_, tensor),
        "broadcast": (dist.broadcast, tensor, 0),
        "reduce": (dist.reduce, tensor, 0),
        "gather": (dist.gather, own, chunks if world.is_main else None),
        "all_gather": (all_gather, tensor, own),
        "reduce_scatter": (reduce_scatter, own, tensor),
        "all_reduce": (dist.all_reduce, tensor),
    }
    given = chunks if kind in IN_CHUNKS else tensor
    names = BY_HAND.get(kind, ()) if by_hand else ()
    works = {name: partial(getattr(parts, name), given) for name in names}
    return works | {COPY if kind == COPY else f"dist.{kind}": partial(*native[kind])}


def time_works(
    works: Mapping[str, Callable[[], object]], world: World, repeats: int
) -> dict[str, float]:
    """Name -> seconds of the slowest rank, the median of `repeats` calls."""

    return dict(zip(works, median_s(list(works.values()), repeats, world.device), strict=True))


def make_row(
    kind: str,
    name: str,
    nbytes: int,
    time_s: float,
    world: World,
    model: tuple[float, float] | None,
) -> Row:
    """Bandwidths and prediction of one measurement."""
    n = world.world_size
    factor = 2 if kind == "all_reduce" else 1
    if kind in IN_CHUNKS or kind == "all_reduce":
        factor *= (n - 1) / n  # no rank has to send its own part to itself
    predicted_s = None
    if model and name in Parts._fields:
        predicted_s = alpha_beta.predicted_s(name, n, nbytes, *model)
    return Row(kind, name, nbytes, time_s, nbytes / time_s, factor * nbytes / time_s, predicted_s)


# ---- the result --------------------------------------------------------------------------------


def words(row: Row) -> str:
    """A line of the table."""
    predicted = "" if row.predicted_s is None else f"{row.predicted_s * 1e3:.3f} ms"
    rates = (row.algorithm_bytes_per_s, row.bus_bytes_per_s)
    cells = [scaled(row.nbytes, "B"), f"{row.time_s * 1e3:.3f} ms"]
    cells += [scaled(rate, "B/s") for rate in rates] + [predicted]
    return f"{row.name:<20}{cells[0]:>10}{''.join(f'{cell:>13}' for cell in cells[1:])}".rstrip()


def draw(rows: Sequence[Row]) -> Figure:
    """Bus bandwidth against size, a panel for each collective, beside the memory's rate."""
    copies = [row for row in rows if row.kind == COPY]
    kinds = list(dict.fromkeys(row.kind for row in rows if row.kind != COPY)) or [COPY]
    num_cols = min(3, len(kinds))
    num_rows = math.ceil(len(kinds) / num_cols)
    figure, _ = new_figure(max(6, 1 + 2.8 * num_cols), 0.7 + 2.3 * num_rows, num_rows, num_cols)
    curves = [one for one in CURVES if any(curve(row) == one for row in rows)]
    for ax in figure.axes[len(kinds) :]:
        ax.remove()
    for ax, kind in zip(figure.axes, kinds, strict=True):
        found = [row for row in rows if row.kind == kind]
        series = {one: points([row for row in found if curve(row) == one]) for one in curves}
        lines(ax, series, "size (bytes)", "bus bandwidth (GB/s)")
        ax.plot(*points(copies), color=GREY, linestyle="--", linewidth=1.2, label=COPY)
        ax.set_title(kind, fontsize=10, color=BLACK)
        ax.set_xscale("log")
        ax.set_yscale("log")
    limits = [limit for ax in figure.axes for limit in ax.get_ylim()]
    for ax in figure.axes:
        ax.set_ylim(min(limits), max(limits))
    legend_below(figure, figure.axes[0])
    return figure


def curve(row: Row) -> str:
    """The algorithm, where it is one by hand."""
    if row.name not in Parts._fields:
        return COPY if row.kind == COPY else "native"
    return "naive" if row.name == "gather" else row.name.rpartition("_")[2]


def points(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """Sizes (bytes) and bus bandwidths (GB/s)."""
    return [row.nbytes for row in rows], [row.bus_bytes_per_s / 1e9 for row in rows]


def write(folder: Path, rows: Sequence[Row]) -> None:
    """Write the numbers and the figure."""
    text = "".join(json.dumps(asdict(row)) + "\n" for row in rows)
    replace_file(folder / "results.jsonl", text.encode())
    replace_file(folder / "bandwidth.png", png(draw(rows)))


if __name__ == "__main__":
    command_line(main, Config)
