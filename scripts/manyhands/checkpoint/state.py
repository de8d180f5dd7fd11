"""What a run is made of: the twelve items of a training state, and a place in the data.

    1 model       2 optimizers      3 schedulers      4 algorithms   (an average of the weights)
    5 callbacks   6 scaler          7 timestamp       8 rank zero's seed
    9 metrics of training          10 of evaluation  11 the run's name    12 place in the data
      and, for each rank, where its random numbers stand

A run that continues from all of these computes the numbers that it would have computed without the
interruption, bit for bit on the same machine. If an item is missing, training continues as well,
but as another run.

Price: a copy of model, optimizer and average: with AdamW 16 bytes per parameter in float32; the
other nine items are a few kilobytes.
Source: the State that Composer saves,
https://docs.mosaicml.com/projects/composer/en/stable/api_reference/generated/composer.State.html.
"""

import copy
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from manyhands.collectives.trees import Group
from manyhands.saving.agree import rank_of


class Position(Sampler[int]):
    """A sampler whose place is state: the samples of an epoch that have not been trained on yet.

    `epoch` and `position` say where the training stands: `position` samples of this epoch are
    behind it. A loader with worker processes draws samples ahead of the training, so drawing does
    not count: the training calls `advance` after each step.
    """

    def __init__(self, num_samples: int, seed: int = 0) -> None:
        self.num_samples = num_samples
        self.seed = seed
        self.epoch = 0
        self.position = 0

    def order(self) -> list[int]:
        """The order of all samples in this epoch; it follows from the seed and the epoch alone."""
        draw = torch.Generator().manual_seed(1_000_003 * self.seed + self.epoch)
        return torch.randperm(self.num_samples, generator=draw).tolist()

    def __iter__(self) -> Iterator[int]:
        """Return an iterator over what is left of this epoch; it changes nothing."""
        return iter(self.order()[self.position :])

    def __len__(self) -> int:
        return self.num_samples - self.position

    def advance(self, num_samples: int) -> None:
        """Count samples that were trained on; behind the last one the next epoch begins at 0."""
        self.position += num_samples
        if self.position >= self.num_samples:
            self.epoch += 1
            self.position = 0

    def state_dict(self) -> dict[str, int]:
        """Return {"epoch", "position"}; all else follows from the seed."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to the place that `state` names, directly: no sample is drawn on the way."""
        self.epoch = state["epoch"]
        self.position = state["position"]


# ---- a training that has all twelve --------------------------------------------------------------


class Patience:
    """Early stopping, a callback: how many evaluations in a row have not been better."""

    def __init__(self, limit: int = 5) -> None:
        self.limit = limit
        self.best = float("inf")
        self.waits = 0

    def note(self, loss: float) -> None:
        """Count an evaluation."""
        self.waits = 0 if loss < self.best else self.waits + 1
        self.best = min(self.best, loss)

    @property
    def is_over(self) -> bool:
        """Should the training stop?"""
        return self.waits >= self.limit


class Training:
    """A small classifier with dropout, and all that a larger run has around it."""

    def __init__(
        self,
        data: TensorDataset,
        validation: TensorDataset,
        name: str = "digits",
        seed: int = 0,
        batch_size: int = 48,
        num_steps: int = 100,
    ) -> None:
        """Build everything anew; `data` holds inputs (B, F) and labels (B,) of 10 classes.

        Args:
            num_steps: over which the learning rate falls to 0.
        """
        torch.manual_seed(seed)
        features = data.tensors[0].shape[1]
        self.name = name
        self.data = data
        self.validation = validation
        self.batch_size = batch_size
        self.model = nn.Sequential(
            nn.Linear(features, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = CosineAnnealingLR(self.optimizer, num_steps)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.patience = Patience()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=8)
        self.timestamp = {"epoch": 0, "batch": 0, "samples": 0, "seconds": 0.0}
        self.train_metrics = {"loss_sum": 0.0, "count": 0}  # of this epoch
        self.eval_metrics = {"loss": float("inf"), "best_accuracy": 0.0}
        self.position = Position(len(data), seed)

    def train(self, num_steps: int) -> list[float]:
        """Take that many steps, fewer where early stopping ends them; returns their losses."""
        losses: list[float] = []
        while len(losses) < num_steps and not self.patience.is_over:
            # A loader draws a seed for its workers, by default from torch's own random numbers,
            # from which dropout draws as well. With a generator of its own it leaves them alone.
            loader = DataLoader(
                self.data, self.batch_size, sampler=self.position, generator=torch.Generator()
            )
            for inputs, labels in loader:  # what is left of this epoch
                losses.append(self.step(inputs, labels))
                if len(losses) == num_steps or self.patience.is_over:
                    break
        return losses

    def step(self, inputs: Tensor, labels: Tensor) -> float:
        """One step on (B, F) and (B,); returns its loss."""
        start_s = time.perf_counter()
        if self.position.position == 0:
            self.train_metrics = {"loss_sum": 0.0, "count": 0}
        with torch.autocast("cpu", dtype=torch.float16):
            loss = cross_entropy(self.model(inputs), labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.average.update_parameters(self.model)
        self.train_metrics["loss_sum"] += loss.item() * len(labels)
        self.train_metrics["count"] += len(labels)
        self.position.advance(len(labels))
        self.timestamp["epoch"] = self.position.epoch
        self.timestamp["batch"] += 1
        self.timestamp["samples"] += len(labels)
        if self.timestamp["batch"] % 5 == 0:
            self.evaluate()
        self.timestamp["seconds"] += time.perf_counter() - start_s
        return loss.item()

    @torch.no_grad()
    def evaluate(self) -> None:
        """Judge the average of the weights on the validation set."""
        inputs, labels = self.validation.tensors
        self.average.eval()
        scores = self.average(inputs)
        accuracy = (scores.argmax(1) == labels).double().mean().item()
        self.eval_metrics["loss"] = cross_entropy(scores, labels).item()
        self.eval_metrics["best_accuracy"] = max(self.eval_metrics["best_accuracy"], accuracy)
        self.patience.note(self.eval_metrics["loss"])


# ---- its state -----------------------------------------------------------------------------------


class TrainingState:
    """The state of a Training: taken by state_dict, given back by load_state_dict."""

    def __init__(self, run: Training, group: Group = None) -> None:
        self.run = run
        self.rank = str(rank_of(group))

    def state_dict(self) -> dict:
        """Return a snapshot of the run, which stays as it is while the training goes on.

        It consists of dicts, lists and tuples of tensors, numbers, texts and None. Its names:
        model, optimizers, schedulers, algorithms, callbacks, scaler, timestamp, rank_zero_seed,
        train_metrics, eval_metrics, run_name, dataset_state; and ranks, {self.rank: what this rank
        alone has}.
        """
        run = self.run
        live = {
            "model": run.model.state_dict(),
            "optimizers": [run.optimizer.state_dict()],
            "schedulers": [run.scheduler.state_dict()],
            "algorithms": {"average": run.average.state_dict()},
            "callbacks": {"patience": {"best": run.patience.best, "waits": run.patience.waits}},
            "scaler": run.scaler.state_dict(),
            "timestamp": run.timestamp,
            "rank_zero_seed": run.position.seed,
            "train_metrics": run.train_metrics,
            "eval_metrics": run.eval_metrics,
            "run_name": run.name,
            "dataset_state": run.position.state_dict(),
            "ranks": {self.rank: {"random": torch.get_rng_state()}},
        }
        return copy.deepcopy(live)  # the tensors above are those that the training changes

    def load_state_dict(self, state: dict) -> None:
        """Put the run where `state` was taken; `state` itself stays as it is.

        On a rank for which `state` has no random numbers, they stay where they are.
        """
        state = copy.deepcopy(state)  # an optimizer trains on in the very tensors that it is given
        run = self.run
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizers"][0])
        run.scheduler.load_state_dict(state["schedulers"][0])
        run.average.load_state_dict(state["algorithms"]["average"])
        run.patience.best = state["callbacks"]["patience"]["best"]
        run.patience.waits = state["callbacks"]["patience"]["waits"]
        run.scaler.load_state_dict(state["scaler"])
        run.timestamp = state["timestamp"]
        run.position.seed = state["rank_zero_seed"]
        run.train_metrics = state["train_metrics"]
        run.eval_metrics = state["eval_metrics"]
        run.name = state["run_name"]
        run.position.load_state_dict(state["dataset_state"])
        if self.rank in state["ranks"]:
            torch.set_rng_state(state["ranks"][self.rank]["random"])
