"""The checkpoints of a run, sharded: any number of ranks can go on from them, on any store.

    Run --save(step)--> save_sharded --> step-00000100/   rank-00000.pt, rank-00001.pt, index.json
    Run <-load_newest-- load_sharded <-- the newest one of which every file is intact

They take the place of training.checkpoints.Checkpoints where `Run` is given them. What depends on
the number of ranks is not saved, or only used when that number is the same: the random numbers of
each rank.
Price: that of save_sharded; the disk holds the newest ones, the best, and one that is written.
"""

import json
import math
from collections.abc import Callable, Collection
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.checkpoint import folder as checkpoints
from manyhands.checkpoint.index import read_index
from manyhands.checkpoint.pieces import model_state, optimizer_state, set_groups
from manyhands.checkpoint.sharded import load_sharded, save_sharded
from manyhands.checkpoint.store import Store
from manyhands.fsdp.flat import Flat
from manyhands.fsdp.model import ShardedModel
from manyhands.ranks.runtime import BadInput, World, on_main
from manyhands.training.checkpoints import get_rng
from manyhands.training.storage import differences, read_lines, replace_file

NUM_KEPT = 3


class ShardedCheckpoints:
    """The checkpoints of one run, for one rank. Every rank calls each method."""

    def __init__(self, folder: Path, identity: dict, world: World, address: str = "") -> None:
        """Use the checkpoints in `folder`, or at `address` where one is given.

        Args:
            identity: settings that have to be equal for a checkpoint to fit; numbers and texts.
            address: for Store, such as s3://bucket/run.
        """
        self.address = address or str(folder)
        self.loss_file = folder.parent / "valid.jsonl"
        self.identity = identity
        self.world = world
        self.module: nn.Module | None = None
        self.optimizer: Optimizer | None = None
        self.flats: list[Flat] = []
        self.losses: dict[int, float] = {}  # on the validation data, by step; inf: not finite

    def of(self, model: nn.Module, optimizer: Optimizer | None, sharded: Collection[str]) -> None:
        """Save and load these from now on.

        Args:
            optimizer: rank 0 has the one whose state is saved; other ranks may have None.
            sharded: not needed: the model itself shows what is sharded.
        """
        del sharded
        self.flats = list(chain(*model.units)) if isinstance(model, ShardedModel) else []
        # A reference to the wrapper would keep DDP alive beyond the process group.
        self.module = model if self.flats else getattr(model, "module", model)
        self.optimizer = optimizer

    def save(self, step: int, epoch_rng: dict[str, Tensor]) -> None:
        """Write a checkpoint; it is whole when this returns on any rank.

        Args:
            epoch_rng: the random numbers with which this epoch began.

        Raises:
            BadInput: on every rank, when one of them cannot write.
        """
        rng = {"epoch": epoch_rng, "now": get_rng(self.world.device)}
        name = checkpoints.name_of(step)
        state = self._state(step, rng, self.optimizer)
        told(
            f"cannot save {name} (free some space; those before it are kept)",
            lambda: save_sharded(state, self._address_of(name)),
        )
        on_main(lambda: told("cannot clear away", self._remove_old))

    def best(self) -> str | None:
        """The name of the checkpoint with the lowest validation loss, the earliest of equals."""
        return next(iter(self._by_loss()), None)

    def read_losses(self, step: int) -> None:
        """Take up what a run has measured up to `step`; what comes after that is measured again."""
        lines = on_main(lambda: read_lines(self.loss_file))
        known = {line["step"]: line["valid_loss"] for line in lines if line["step"] <= step}
        self.losses = {at: math.inf if loss is None else loss for at, loss in known.items()}

    def add_loss(self, step: int, loss: float) -> None:
        """Write down the validation loss of the checkpoint of `step`."""
        self.losses[step] = loss if math.isfinite(loss) else math.inf
        lines = [
            json.dumps({"step": at, "valid_loss": None if math.isinf(known) else known}) + "\n"
            for at, known in sorted(self.losses.items())
        ]
        on_main(lambda: replace_file(self.loss_file, "".join(lines).encode()))

    # ---- back from the disk --------------------------------------------------------------------

    def load_newest(self) -> tuple[int, dict] | None:
        """Load the newest intact checkpoint, and say which damaged ones are newer.

        Returns:
            Its step, and this rank's random numbers, which are empty where another number of ranks
            has saved them; None where there is no checkpoint.

        Raises:
            BadInput: on every rank, when none of the checkpoints is intact, or the newest intact
                one does not fit.
        """
        for name in told("cannot save there", lambda: checkpoints.clear(self.address)):
            self.world.print(
                f"{self._address_of(name)} had no index.json and was removed: a run that ends "
                "while it saves leaves such a folder"
            )
        name, problems = told("cannot read", lambda: checkpoints.newest_intact(self.address))
        if name is None and problems:
            raise BadInput(
                f"{problems[0]}; no other checkpoint in {self.address} is intact: name a new "
                "--out to begin anew"
            )
        for problem in problems:
            kept = on_main(self._set_newest_aside)
            self.world.print(
                f"{problem}; that checkpoint is kept as {kept}, and the run goes on from {name}"
            )
        return None if name is None else self._load(name, self.optimizer)

    def load_best(self) -> int:
        """Load the weights with the lowest validation loss on every rank; returns their step.

        Raises:
            BadInput: on every rank, when no checkpoint with a validation loss can be loaded.
        """
        problems = []
        for name in on_main(self._by_loss):
            try:
                return self._load(name, None)[0]
            except BadInput as problem:
                problems.append(f"{problem}; ")
        raise BadInput(f"{''.join(problems)}no checkpoint with a validation loss can be loaded")

    # ---- parts ---------------------------------------------------------------------------------

    def _load(self, name: str, optimizer: Optimizer | None) -> tuple[int, dict]:
        """Load a checkpoint into the model and, if given, the optimizer."""
        address = self._address_of(name)
        about = on_main(lambda: told("cannot read", lambda: read_index(Store(address))["values"]))
        theirs = {at[9:]: value for at, value in about.items() if at.startswith("identity/")}
        if found := differences(theirs, self.identity):
            raise BadInput(f"{address} was saved with {found}: name a new --out, or its settings")
        rng = {"epoch": get_rng(self.world.device), "now": get_rng(self.world.device)}
        state = self._state(0, rng, optimizer)
        keep = ("ranks/",) if optimizer is self.optimizer else ("ranks/", "optimizer/")
        loaded = told("cannot load", lambda: load_sharded(state, address, keep=keep))
        if optimizer is not None:
            set_groups(optimizer, loaded["optimizer"]["groups"])
        if about["num_ranks"] != self.world.world_size:
            # Other ranks' random numbers would be drawn twice, and the run's first ones again.
            torch.manual_seed(self.world.data_seed * 1_000_003 + loaded["step"])
            rng = {}
        return loaded["step"], rng

    def _state(self, step: int, rng: dict, optimizer: Optimizer | None) -> dict:
        return {
            "identity": self.identity,
            "step": step,
            "num_ranks": self.world.world_size,
            "model": model_state(self.module, self.flats),
            "optimizer": optimizer_state(optimizer, self.flats) if optimizer else {},
            "ranks": {str(self.world.rank): {"rng": rng}},
        }

    def _address_of(self, name: str) -> str:
        return f"{self.address}/{name}"

    def _remove_old(self) -> None:
        names = checkpoints.complete(self.address)
        for name in checkpoints.to_remove(names, self.losses, NUM_KEPT):
            checkpoints.remove(self.address, name)

    def _set_newest_aside(self) -> str:
        return checkpoints.set_aside(self.address, checkpoints.complete(self.address)[-1])

    def _by_loss(self) -> list[str]:
        """The checkpoints that were validated, the best first."""
        known = [
            name
            for name in checkpoints.complete(self.address)
            if checkpoints.step_of(name) in self.losses
        ]
        return sorted(known, key=lambda name: self.losses[checkpoints.step_of(name)])


def told(words: str, action: Callable[[], object]) -> object:
    """The result of an action; what it refuses, as BadInput."""
    try:
        return action()
    except BadInput:
        raise
    except (ValueError, OSError) as problem:
        raise BadInput(f"{words}: {problem}") from None
