"""Exercise 6.8: the program of one process, turned into that of many.

The answer's own sampler, wrapper, mean and save have exercises of their own. Here they are the
course's, so that a verdict speaks of this function only.
"""

import inspect
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from manyhands.checks.engine import cases
from manyhands.checks.engine.card import Wrong
from manyhands.checks.engine.spec import Place, Spec
from manyhands.data.corpus import ShardedSampler
from manyhands.ddp.wrapping import mean_over_ranks, torch_ddp
from manyhands.programs import ddp
from manyhands.ranks.runtime import World
from manyhands.training import run as training
from manyhands.training.settings import TrainConfig

PARTS = {
    "ShardedSampler": ShardedSampler,
    "torch_ddp": torch_ddp,
    "mean_over_ranks": mean_over_ranks,
    "save_once": training.save_once,
}
TOKENS = 4  # of a sequence
EPOCHS = 2
SHARPNESS = 20  # of the model's scores: its gradients are longer than 1, where many clip them


class Program(NamedTuple):
    """One run: a batch and numbers of sequences that the ranks do not all share evenly."""

    batch: int
    num_train: int
    num_valid: int
    num_test: int
    seed: int


def programs(n: int) -> list[Program]:
    """Two epochs, whose last batch is incomplete; uneven validation and test data."""
    drawn = [random.randint(1, 3) for _ in range(2)]
    return [
        Program(2 * n, 6 * n + 1, 2 * n + 1, 3 * n + 1, cases.draw_seed() % 1000),
        Program(n * (2 + drawn[0]), 40 * n + drawn[0], 9 * n - 1, 7 * n - 1, drawn[1]),
    ]


class Sequences(Dataset):
    """Tokens of which the first is the sequence's number."""

    def __init__(self, num: int, first: int, seed: int) -> None:
        self.num, self.first = num, first
        draw = cases.generator(seed, first)
        self.rest = torch.randint(300, (num, TOKENS), generator=draw)

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.num:
            raise IndexError(f"sequence {index} of {self.num}")
        number = torch.tensor([index])
        return torch.cat([number, self.rest[index, 1:]]), self.rest[index] % 7


class Guess(nn.Module):
    """A language model in two lines, so that hundreds of steps take no time."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(300, 5)
        self.head = nn.Linear(5, 7)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self.training:
            torch.rand(())  # as dropout draws
        scores = SHARPNESS * self.head(torch.tanh(self.tokens(inputs)))
        return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


class Watched:
    """Stands in for a Run: has what the program calls of it, and notes what it is given."""

    def __init__(
        self, config: TrainConfig, world: World, folder: Path, shares: dict, inner: nn.Module
    ) -> None:
        self.config, self.world, self.folder, self.shares = config, world, folder, shares
        self.inner = inner
        self.optimizer: torch.optim.Optimizer | None = None
        self.best: dict[str, Tensor] = {}
        self.last: dict[str, Tensor] = {}
        self.step = 0
        self.modes: set[bool] = set()
        self.slopes: list[Tensor] = []
        self.rates: list[float] = []
        self.read: list[list[int]] = []
        self.losses: list[float] = []
        self.seeds: list[int] = []
        self.draws: list[bytes] = []  # the state of torch's random numbers before each step
        self.found: dict = {}
        self.mean: Callable = float
        self.valid: object = None

    def resume(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        optimizer.register_step_pre_hook(lambda *_: self.slopes.append(self._slope()))

    def _slope(self) -> Tensor:
        """All gradients, one behind the other."""
        params = self.inner.parameters()
        return torch.cat([torch.zeros(1) if p.grad is None else p.grad.flatten() for p in params])

    def keep_best(self, mean: Callable, valid: DataLoader) -> None:
        if self.optimizer is None:
            raise Wrong("calls run.keep_best before run.resume", "", "Resume first: see Run.")
        self.mean, self.valid = mean, valid

    def epochs(self, loader: DataLoader) -> Iterator[int]:
        per_epoch = len(loader.dataset) // self.config.batch
        while self.step < self.config.steps:
            yield self.step // per_epoch

    def batches(self, loader: DataLoader) -> Iterator[tuple[Tensor, ...]]:
        batches = iter(loader)
        for _ in range(len(loader.dataset) // self.config.batch):
            batch = next(batches, None)
            if batch is None:
                raise Wrong(
                    f"gives this rank a loader of {len(loader)} batches for "
                    f"{len(loader.dataset) // self.config.batch} steps of an epoch",
                    "",
                    "A rank's batch is config.batch // world.world_size.",
                )
            self.read.append(batch[0][:, 0].tolist())
            self.seeds.append(torch.initial_seed())
            self.draws.append(torch.get_rng_state().numpy().tobytes())
            yield batch

    def log(self, loss: Tensor) -> None:
        self.losses.append(loss.item())
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        self.modes.add(self.inner.training)
        self.step += 1
        if self.step == self.config.steps // 2:
            self.best = self._weights()
        if self.step == self.config.steps:
            self.last = self._weights()
            self.found["the validation loss"] = self._evaluate("valid", self.valid)

    def _weights(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.inner.state_dict().items()}

    def test(self, test: DataLoader, words: Callable) -> None:
        self.inner.load_state_dict(self.best or self._weights())
        self.found["the test loss"] = self._evaluate("test", test)

    def _evaluate(self, split: str, loader: DataLoader) -> Tensor:
        numbers: list[int] = []

        def batches() -> Iterator[tuple[Tensor, ...]]:
            for batch in loader:
                numbers.extend(batch[0][:, 0].tolist())
                yield batch

        loss = torch.tensor(float(self.mean(batches())))
        is_share = len(numbers) <= self.shares[split]
        self.found[f"this rank reads at most its share of data.{split}"] = is_share
        return loss


def trained(answer, case: Program, place: Place) -> dict:
    """What a run on this rank reads, computes and saves."""
    steps = EPOCHS * (case.num_train // case.batch)
    config = TrainConfig(batch=case.batch, steps=steps, learning_rate=0.02, seed=case.seed)
    world = World(place.rank, place.rank, place.n, torch.device("cpu"), case.seed)
    data = SimpleNamespace(
        train=Sequences(case.num_train, 0, case.seed),
        valid=Sequences(case.num_valid, 1, case.seed),
        test=Sequences(case.num_test, 2, case.seed),
        in_words=str,
    )
    shares = {"valid": -(-case.num_valid // place.n), "test": -(-case.num_test // place.n)}
    model = cases.build(case.seed, Guess)
    space = inspect.unwrap(answer).__globals__
    own = {name: part for name, part in PARTS.items() if name in space}
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        run = Watched(config, world, Path(folder), shares, model)
        with mock.patch.dict(space, own):
            answer(run, model, data)
        files = {path.name: torch.load(path, weights_only=True) for path in _files(folder)}
    return {
        "how many steps are taken": run.step,
        "sequences per step on this rank": [len(batch) for batch in run.read],
        "the sequences that this rank reads, step by step": run.read,
        "the learning rates": torch.tensor(run.rates),
        "the gradients, step by step": run.slopes,
        "this rank's losses": torch.tensor(run.losses),
        **run.found,
        "torch's seed in training is world.data_seed": set(run.seeds) == {world.data_seed},
        "the model is in training mode in each step": run.modes == {True},
        "no step draws the random numbers of an earlier one": (
            len(set(run.draws)) == len(run.draws)
        ),
        "the files that this rank writes": ", ".join(files),
        "the weights in model.pt": files.get("model.pt"),
        "the weights after the last step": run.last,
    }


def _files(folder: str) -> list[Path]:
    return sorted(Path(folder).iterdir())


def say_program(case: Program) -> str:
    """A run in words."""
    return (
        f"train with config.batch={case.batch} and {case.num_train} / {case.num_valid} / "
        f"{case.num_test} sequences to train, validate and test on"
    )


SHARDED = "ShardedSampler(len(data.train), world.rank, world.world_size, config.seed)"
DIVIDE = "config.batch is the batch of all ranks: divide it by world.world_size."
DEAL = f"Use {SHARDED}."
MEAN = "return mean_over_ranks(*total_loss(model, batches, world.device))"
TOTAL = "total, count = total_loss(model, batches, world.device)"
SUM = "Hand sum and count of this rank to mean_over_ranks."
SAVE = 'save_once(model, run.folder / "model.pt")'

train = Spec(
    todo="6.8",
    truth=ddp.train,
    layouts=cases.TWO[:1],
    cases=programs,
    observe=trained,
    tell=say_program,
    independent=True,
    may_change=("torch's random numbers",),
    advice={
        "sequences per step on this rank": DIVIDE,
        "the sequences that this rank reads, step by step": DEAL,
        "the validation loss": SUM,
        "the test loss": SUM,
        "torch's seed in training is world.data_seed": (
            "Call torch.manual_seed(world.data_seed) before the loop."
        ),
        "no step draws the random numbers of an earlier one": (
            "Seed once, before the first epoch: else every epoch has the dropout of the first."
        ),
        "the files that this rank writes": f"Save with {SAVE}.",
        "the weights in model.pt": f"run.test loads the best weights. Save after it, with {SAVE}.",
        "the gradients, step by step": (
            "backward() of the wrapped model gives the mean over all ranks, and nothing else "
            "changes a gradient before optimizer.step()."
        ),
        "the model is in training mode in each step": "total_loss sees to the modes by itself.",
        "": "Go through train_alone line by line: which lines would be wrong on two ranks?",
    },
    hints=(
        "Begin with the whole body of train_alone, and ask of each line: may all ranks do the "
        "same here? In the loop itself only one line changes.",
        f"The batch is divided by world.world_size, the sampler is {SHARDED}, and "
        "sampler.set_epoch(epoch) takes the place of order.manual_seed.",
        "The validation and test loaders get sampler=range(world.rank, len(data.valid), "
        "world.world_size) and its like; the model is wrapped by torch_ddp; mean_loss returns "
        "mean_over_ranks(*total_loss(...)); save_once takes the place of torch.save.",
    ),
    mistakes="""
        batch = config.batch // world.world_size => batch = config.batch :: Each rank takes a whole
            config.batch, so the global batch has grown with the ranks. | {DIVIDE}
        {SHARDED} => ShardedSampler(len(data.train), 0, 1, config.seed) ::
            All ranks read the same sequences, so the others add nothing. | {DEAL}
        {SHARDED} => ShardedSampler(len(data.train), world.rank, world.world_size, world.data_seed)
            :: The ranks shuffle differently, so some sequences are read twice and others never.
        {SHARDED} => ShardedSampler(len(data.train), world.rank, world.world_size) ::
            The order does not follow from config.seed.
        sampler.set_epoch(epoch) => pass ::
            Every epoch has the same order. | Call sampler.set_epoch(epoch) before each epoch.
        torch_ddp(model) => model ::
            The gradients are not averaged over the ranks. | Wrap the model, model =
            torch_ddp(model), and call what comes back, so that it can average.
        lr=config.learning_rate => lr=config.learning_rate * world.world_size
        set_learning_rate(optimizer, learning_rate_at(run.step, config)) => pass ::
            The learning rate is multiplied by the number of ranks, but the batch has not grown. |
            Leave the learning rate as it was.
        {MEAN} => {TOTAL}; return (total / count).item() ::
            The loss is this rank's own, not that of all ranks. | {SUM}
        {MEAN} => {TOTAL}; return mean_over_ranks(total / count, 1) ::
            This is a mean of the ranks' means, which weighs ranks with few sequences too much.
        sampler=valid_share => sampler=None ::
            Each rank evaluates all of data.valid: the number is right, and the time is not shared.
            | sampler=range(world.rank, len(data.valid), world.world_size)
        sampler=test_share => sampler=None ::
            Each rank evaluates all of data.test: the number is right, and the time is not shared. |
            sampler=range(world.rank, len(data.test), world.world_size)
        torch.manual_seed(world.data_seed) => torch.manual_seed(config.seed) ::
            All ranks draw the same random numbers in training, such as the same dropout. |
            torch.manual_seed(world.data_seed)
        {SAVE} => torch.save(model.module.state_dict(), run.folder / "model.pt") ::
            Every rank writes model.pt. | {SAVE}
        {SAVE} => torch.save(model.state_dict(), run.folder / "model.pt") ::
            Every rank writes model.pt, and its names begin with 'module.'.
    """,
    module=globals(),
)
