"""What a figure of `make bench` is made of: rows, the files that they measure, and their words.

What a ratio compares is timed in turn, A B B A, in the same processes, so that a machine that slows
down slows both. Values are medians. Each room has its rows in a file `bench.py`, as MEASURES.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from manyhands.instruments.timing import slowest_rank
from manyhands.models.transformer import Transformer, num_parameters
from manyhands.ranks import lab
from manyhands.ranks.failures import BadInput

SCRIPTS = Path(__file__).resolve().parents[2]
Measured = tuple[float, str]  # value and note


class CannotMeasure(Exception):
    """A row has no value, and the command fails: what is in the way."""


class Row(NamedTuple):
    """One figure: its name as bench.md shows it, its goal, its unit."""

    name: str
    goal: str
    unit: str


@dataclass(frozen=True)
class Measure:
    """Work that gives one row or several.

    Args:
        function: returns value and note, row by row; is given `data` where it `needs_data`.
        files: what is measured, as paths and patterns below the package. A figure that was taken
            with other contents of these files is of older code.
        needs_data: a folder with tinyshakespeare; without one the row keeps its earlier figure.
    """

    function: Callable[..., list[Measured]]
    rows: tuple[Row, ...]
    files: tuple[str, ...]
    needs_data: bool = False


@dataclass(frozen=True)
class Shape:
    """A Transformer and the batch of one rank."""

    layers: int
    vocab: int
    block: int
    batch: int

    def build(self) -> tuple[nn.Module, torch.Tensor]:
        """Return the model and (batch, block) random tokens."""
        model = Transformer(self.vocab, self.block, self.layers)
        return model, torch.randint(self.vocab, (self.batch, self.block))

    @property
    def words(self) -> str:
        """The shape and its size, for a note."""
        size = num_parameters(*self.sizes) / 1e6
        return f"{size:.1f} M parameters, {self.batch} x {self.block} tokens a rank"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Vocabulary, block and layers, in the order that a Transformer takes them."""
        return self.vocab, self.block, self.layers


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """The ratio of each round."""
    return [a / b for a, b in zip(above, below, strict=True)]


def spread(values: Sequence[float]) -> str:
    """Lowest and highest of the values and how many there are, for a note."""
    return f"{plain(min(values))} to {plain(max(values))}, {len(values)} repeats"


def plain(value: float) -> str:
    """A number for a person: 0.951, or 21,345."""
    return f"{value:,.{0 if abs(value) >= 100 else 3}f}"


def milliseconds(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f} ms"


def make_step(
    model: nn.Module, tokens: torch.Tensor, optimizer: Optimizer | None = None
) -> Callable[[], None]:
    """One training step: forward, backward, AdamW."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_hand_over_native(
    fn: Callable, sizes: Sequence[tuple], what: str, num_rounds: int = 24
) -> list[Measured]:
    """The ratio at the first of `sizes`; the note has all of them."""
    words, values = [], []
    for size, number in sizes:
        times_s = lab.run_ranks(fn, 2, size, number, num_rounds, timeout_s=400)
        by_hand, native = slowest_rank(times_s)
        values.append(ratios(by_hand, native))
        named = size.words if isinstance(size, Shape) else f"width {size}"
        words.append(
            f"{statistics.median(values[-1]):.3f} ({spread(values[-1])}) with {named}, {number} "
            f"{what}: by hand {milliseconds(by_hand)}, native {milliseconds(native)}"
        )
    return [(statistics.median(values[0]), "2 ranks x 1 thread; " + "; ".join(words))]


def fresh(module: nn.Module, call: Callable[[], object]) -> None:
    """Call it, and drop the gradients that it left."""
    call()
    module.zero_grad()


def run_python(*arguments: str, **environ: str) -> str:
    """Run Python on the course's modules; returns what it prints."""
    search = os.pathsep.join(filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": search} | environ,
        capture_output=True,
        text=True,
    )
    if done.returncode == 2:
        raise BadInput(done.stderr.strip().split("\n")[-1])
    if done.returncode:
        raise RuntimeError(f"python {' '.join(arguments)} failed:\n{done.stderr}")
    return done.stdout
