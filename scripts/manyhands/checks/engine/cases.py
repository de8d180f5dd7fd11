"""Unfriendly cases that every exercise can draw from, so that none forgets them.

layouts       all ranks, one rank alone, groups that are not the whole job
tensors       negative and large numbers, strided, transposed, empty, without dimensions
parts         uneven and empty ones
Probe         a model with a frozen, a tied and an unused parameter, and buffers
"""

import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

# Every layout begins with the whole job; then groups, in which a rank's number is another one.
TWO = (((0, 1),), ((0,), (1,)))
THREE = (((0, 1, 2),), ((0,), (1, 2)))
FOUR = (((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0,), (1, 2, 3)))
FORMS = ("vector", "matrix", "transposed", "column", "scalar", "empty")
FALSY = (0, "", None, False, ())


def draw_seed() -> int:
    """A number from which every rank can draw the same."""
    return random.randrange(1 << 30)


def generator(*numbers: int) -> torch.Generator:
    """Random numbers that follow from these numbers, such as a case's seed and a rank."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % (1 << 62)
    return torch.Generator().manual_seed(seed)


def values(
    size: int | Sequence[int], draw: torch.Generator, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Whole numbers from -50 to 50, exact in every type: sums of a few do not depend on order."""
    shape = (size,) if isinstance(size, int) else tuple(size)
    return torch.randint(-50, 51, shape, generator=draw).to(dtype)


def shaped(
    form: str, size: int, draw: torch.Generator, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """A tensor of a form, and the memory that it is a view of; in that nothing else may change.

    Args:
        form: one of FORMS; of a column, of every second element and of a transposed matrix the
            elements do not lie side by side.
        size: number of elements; even for matrices.
    """
    if form == "column":
        memory = values((size, 3), draw, dtype)
        return memory[:, 1], memory
    if form == "scalar":
        memory = values(1, draw, dtype)
        return memory.view(()), memory
    if form == "empty":
        memory = values(0, draw, dtype)
        return memory, memory
    memory = values(size, draw, dtype)
    if form == "matrix":
        return memory.view(2, -1), memory
    if form == "transposed":
        return memory.view(2, -1).t(), memory
    return memory, memory


def uneven(num_parts: int, empty: bool = True) -> list[int]:
    """Sizes of parts of which no two neighbours are equal, the largest not first; one is empty."""
    sizes = [random.randint(1, 3) + 3 * (index % 2) for index in range(num_parts)]
    if empty and num_parts > 1:
        sizes[random.randrange(num_parts)] = 0
    return sizes


def read_once(items: Sequence) -> Iterator:
    """An iterable that can be read once, as a generator or a file."""
    yield from items


class Probe(nn.Module):
    """A frozen layer, a tied weight, an unused parameter, float and integer buffers, dropout.

    Built from torch's seed. The loss does not depend on how a batch is divided: the statistics of
    the norm are fixed, and dropout is 0 unless a case raises it.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(6, track_running_stats=True)
        self.norm.running_mean += torch.rand(6)
        self.norm.num_batches_tracked += torch.randint(100, (1,)).item()
        self.norm.eval()
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Token numbers (B) to scores (B, 11)."""
        hidden = torch.tanh(self.norm(self.frozen(self.embedding(tokens))))
        return self.head(self.dropout(hidden))

    def train(self, mode: bool = True) -> "Probe":
        """The norm keeps its fixed statistics in both modes."""
        super().train(mode)
        self.norm.eval()
        return self


def build(seed: int, kind: type[nn.Module] = Probe) -> nn.Module:
    """The model that torch's random numbers give from this seed on."""
    torch.manual_seed(seed)
    return kind()


def token_batch(seed: int, size: int = 12) -> Tensor:
    """Inputs and targets for a Probe. (2, B)"""
    return torch.randint(11, (2, size), generator=torch.Generator().manual_seed(seed))


def run_backward(model: nn.Module, batch: Tensor) -> None:
    """Forward, loss and backward of a Probe; `batch` is (2, B)."""
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    """A copy of every parameter's gradient, by name; a tied parameter stands there once."""
    return {n: p.grad if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
