"""Train one model in every way of the course, on the same batches, and compare what each costs.

torchrun --standalone --nproc-per-node=4 scripts/train_compare.py --layers 8 --batch 32
bash sbatch/compare.sbatch --steps 10       on all GPUs of this machine, or 2 CPU ranks

One process, DDP, ZeRO-1 to 3, fully_shard, a pipeline, cut matrices and, on 4 ranks or more, two of
these on a mesh: memory of a rank by part, bytes sent by collective, and time of a step. Every way's
losses have to be those of one process.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from manyhands.compare import figures, measure
from manyhands.data import corpus
from manyhands.instruments.figures import png
from manyhands.instruments.meters import machine
from manyhands.models.transformer import num_parameters
from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import World, command_line, distributed, on_main, together
from manyhands.training import lock
from manyhands.training.page import Card, Row, page
from manyhands.training.storage import open_folder, replace_file, write_json
from manyhands.ways.ready import Make, Setting
from manyhands.ways.registry import ON_A_MESH, WAYS, ways_for

TINY = {"": "--steps 3 {sizes}"}  # its short runs: gpu/jobs.py
FORMAT = "manyhands compare 1"
TIMEOUT_S = 600  # of a message; the largest models take a while in one process
CAPTION = (
    "Each part of the memory is given at its own highest moment, and the mark is the most that "
    "lived at one moment. Gathered are other ranks' weights, which are there for a while. Sent is "
    "what a ring needs at least; gloo makes a reduce-scatter from a whole all-reduce, and sends "
    "more. Time is that of the slowest rank."
)


@dataclass(frozen=True)
class Config:
    """What to compare."""

    data: str = "embedded"
    """What to train on: embedded, a known name such as wikitext-2, or a folder of text."""
    splits: str = ""
    """Which files of a folder are for what, where their names do not say it: joined, or
    train=PATTERN,valid=PATTERN,test=PATTERN."""
    vocab: int = 0
    """Tokens in the vocabulary; 0 takes the characters of the text."""
    block: int = 64
    """Length of a training sequence in tokens."""
    layers: int = 4
    """Size of the model: its layers, and with them its heads and its width."""
    batch: int = 16
    """Sequences in one step, over all ranks together."""
    micro_batches: int = 4
    """Pieces into which the pipeline cuts the batch."""
    steps: int = 10
    """Timed steps of each way, after three others that measure memory and messages."""
    only: str = ""
    """Compare one process only with the ways whose name holds this text."""
    seed: int = 1
    """Start of every random number."""
    device: str = "auto"
    """Where to train: auto, cpu or cuda."""
    out: str = ""
    """Folder of the run; empty takes the next free one in runs/."""


def main(config: Config) -> Path:
    """Measure, print the table, write the report; returns the run's folder."""
    if config.steps < 1:
        raise BadInput(f"--steps is {config.steps}: take at least 1")
    check_names(config.only, [*WAYS, *ON_A_MESH])
    with distributed(config.device, config.seed, TIMEOUT_S) as world:
        ways = choose_ways(config.only, world.world_size)
        data = corpus.load(config.data, config.block, config.vocab, splits=config.splits)
        world.print(data.note)
        sizes = (config.layers, data.tokenizer.vocab_size, config.block, config.batch)
        setting = Setting(*sizes, config.micro_batches, config.seed)
        setting.check(world.world_size)
        folder = make_folder(config, world)
        try:
            batches = take_batches(data, setting, measure.NUM_UNTIMED + config.steps, world)
            found = measure.compare(setting, config.steps, batches, ways, world.device)
            world.print(figures.table(found))
            if world.is_main:
                print(f"report: {write(folder, found, world)}")
        finally:
            lock.release(folder)
        return folder


def choose_ways(only: str, ranks: int) -> dict[str, Make]:
    """One process, with which the others are compared, and the ways whose name holds `only`."""
    ways = ways_for(ranks)
    first, *_ = ways
    return {name: ways[name] for name in [first, *check_names(only, ways, f" on {ranks} rank(s)")]}


def check_names(only: str, names: Iterable[str], where: str = "") -> list[str]:
    """The names, but for the first one, that hold `only`; BadInput where there is none."""
    _, *others = names
    chosen = [name for name in others if only.lower() in name.lower()]
    if not chosen:
        raise BadInput(f"--only {only!r} is in no name{where}: {', '.join(others)}")
    return chosen


def make_folder(config: Config, world: World) -> Path:
    """Make the folder, with what was measured and where in its `config.json`."""
    settings = asdict(config)
    about = {
        "format": FORMAT,
        "identity": settings | {"job": "compare", "ranks": world.world_size},
        "config": settings,
        "backend": world.backend,
        "torch": torch.__version__,
        "ranks": together(lambda: machine(world.device)),
    }
    return on_main(lambda: open_folder(config.out, "compare", about, ()))


def take_batches(
    data: corpus.Corpus, setting: Setting, count: int, world: World
) -> measure.Batches:
    """`count` global batches of the text, drawn in the same order on every rank."""
    draws = torch.Generator().manual_seed(setting.seed)
    order = torch.randint(len(data.train), (count, setting.batch), generator=draws).tolist()
    batches = []
    for numbers in order:
        inputs, targets = zip(*(data.train[number] for number in numbers), strict=True)
        pair = torch.stack(inputs), torch.stack(targets)
        batches.append(tuple(part.to(world.device) for part in pair))
    return batches


# ---- the result --------------------------------------------------------------------------------


def write(folder: Path, found: Mapping, world: World) -> Path:
    """Write `result.json`, the figure and the page; returns the page's path."""
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "device": machine(world.device).get("name", "CPU"),
    }
    write_json(folder / "result.json", about | found)
    picture = png(figures.draw(found))
    replace_file(folder / "report.png", picture)
    replace_file(folder / "report.html", html(folder, found, about, picture).encode())
    return folder / "report.html"


def html(folder: Path, found: Mapping, about: Mapping, picture: bytes) -> str:
    """The report: tiles, the figure, the table, and what they were measured on."""
    setting = found["setting"]
    size = num_parameters(setting["vocab"], setting["block"], setting["layers"])
    words, *warnings = figures.notes(found)
    head, units, *ways = figures.rows(found)
    names = [f"{name} ({unit})" if unit else name for name, unit in zip(head, units, strict=True)]
    return page(
        title=f"Run {folder.resolve().name}",
        lead=words,
        tiles={
            "ranks": Row(str(found["ranks"]), remark=about["device"]),
            "model": Row(f"{size / 1e6:.1f} M", "parameters"),
            "global batch": Row(str(setting["batch"]), f"sequences of {setting['block']} tokens"),
            "losses": Row("equal", "to those of one process"),
        },
        cards=[Card("Side by side", CAPTION, picture), Card(heads=names, lines=ways)],
        is_wide=True,
        warnings=warnings,
        tables={
            "The job": about | {"backend": found["backend"], "timed steps": found["steps"]},
            "Settings": setting,
        },
    )


if __name__ == "__main__":
    command_line(main, Config)
