"""The checkpoints of a run, sharded: any number of ranks can go on from them, on any store.

    Run --save(step)--> save_sharded --> step-00000100/   rank-00000.pt, rank-00001.pt, index.json
    Run <-load_newest-- load_sharded <-- the newest one of which every file is intact

Every job hands them to its `Run`. Weights and optimizer are saved in boxes that any number of ranks
can load, where the model shows what is sharded: FSDP's shards, DTensors, and what all ranks hold
whole. Parts whose place in the whole nobody knows, such as the stages of a pipeline, belong to
their rank, as its random numbers do, and fit the same number of ranks only.
Price: that of save_sharded; the disk holds the newest ones, the best, and one that is written.
"""

import json
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import World, on_main
from manyhands.saving import folder as checkpoints
from manyhands.saving.index import damage, read_index
from manyhands.saving.kept import optimizer_state, set_groups
from manyhands.saving.pieces import ShardedVector, is_dtensor, model_state, vectors_of
from manyhands.saving.sharded import load_sharded, save_sharded
from manyhands.saving.store import Store
from manyhands.training.random_state import get_rng
from manyhands.training.storage import differences, read_lines, replace_file, unwrapped

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
        self.vectors: list[ShardedVector] = []
        self.own: Collection[str] = ()
        self.parts: Callable[[Optimizer | None], dict] = self._parts
        self.losses: dict[int, float] = {}  # on the validation data, by step; inf: not finite

    def register(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        sharded: Collection[str] = (),
        parts: Callable[[Optimizer | None], dict] | None = None,
    ) -> None:
        """Save and load these from now on.

        Args:
            optimizer: rank 0 has the one whose state is saved; other ranks may have None.
            sharded: "model", "optimizer" or both: of these each rank holds its own part. Where the
                model does not show which part that is, the part belongs to the rank.
            parts: for a model that only its maker can take apart: parts(optimizer) returns this
                rank's pieces, {"model": ..., "optimizer": ...}, as mesh_state does; parts(None)
                those of the model alone.
        """
        self.parts = parts or self._parts
        self.vectors = vectors_of(model)
        has_boxes = bool(self.vectors) or any(map(is_dtensor, model.parameters()))
        self.own = () if has_boxes else sharded
        # A reference to the wrapper would keep DDP alive beyond the process group.
        self.module = model if self.vectors else unwrapped(model)
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
        advice = "; free some space" + ". The checkpoints before it are kept" * bool(self.losses)
        try:
            call_or_refuse(
                "cannot save", lambda: save_sharded(state, self._address_of(name)), advice
            )
        except BadInput:
            with suppress(BadInput):  # a store out of reach has been told already
                on_main(
                    lambda: call_or_refuse("cannot clear", lambda: Store(self.address).remove(name))
                )
            raise
        on_main(lambda: call_or_refuse("cannot clear away", self._remove_old))

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
        for name in call_or_refuse("cannot save there", lambda: checkpoints.clear(self.address)):
            self.world.print(
                f"{self._address_of(name)} had no index.json and was removed: a run that ends "
                "while it saves leaves such a folder"
            )
        name, problems = call_or_refuse(
            "cannot read", lambda: checkpoints.newest_intact(self.address)
        )
        if name is None and problems:
            raise BadInput(
                f"{problems[0]}; no other checkpoint in {self.address} can be loaded: name a new "
                "--out to begin anew"
            )
        newer = on_main(lambda: checkpoints.complete(self.address))[::-1][: len(problems)]
        self._set_aside(newer, problems, f"the run goes on from {name}")
        return None if name is None else self._load(name)

    def load_best(self) -> int:
        """Load the weights with the lowest validation loss on every rank; returns their step.

        Raises:
            BadInput: on every rank, when no checkpoint with a validation loss can be loaded.
        """
        found = on_main(self._by_loss)
        problems: list[str] = []
        for name in found:
            try:
                step, _ = self._load(name, weights_only=True)
            except BadInput as problem:
                problems.append(str(problem))
                continue
            self._set_aside(found, problems, f"the weights are taken from {name}")
            return step
        first = problems[0] if problems else "no checkpoint has a validation loss"
        raise BadInput(
            f"{first}; no other checkpoint in {self.address} can be loaded: name a new "
            "--out to begin anew"
        )

    # ---- parts ---------------------------------------------------------------------------------

    def _load(self, name: str, weights_only: bool = False) -> tuple[int, dict]:
        """Load a checkpoint into the model and the optimizer, or into the model alone."""
        optimizer = None if weights_only else self.optimizer
        address = self._address_of(name)
        about = on_main(
            lambda: call_or_refuse("cannot read", lambda: read_index(Store(address))["values"])
        )
        theirs = {at[9:]: value for at, value in about.items() if at.startswith("identity/")}
        if found := differences(theirs, self.identity):
            raise BadInput(f"{address} was saved with {found}: name a new --out, or its settings")
        rng = {"epoch": get_rng(self.world.device), "now": get_rng(self.world.device)}
        state = self._state(0, rng, optimizer)
        is_same = about["num_ranks"] == self.world.world_size
        keep = [] if is_same else ["ranks/"]
        if weights_only:
            ranks = range(self.world.world_size)
            keep += ["optimizer/", *(f"ranks/{rank}/optimizer/" for rank in ranks)]
        loaded = call_or_refuse(
            f"{address} does not fit",
            lambda: load_sharded(state, address, keep=keep),
            ": name a new --out to begin anew",
        )
        own = loaded["ranks"][str(self.world.rank)]
        if optimizer is not None:
            place = own if "optimizer" in self.own else loaded
            set_groups(optimizer, place["optimizer"]["groups"])
        if not is_same:
            # Other ranks' random numbers would be drawn twice, and the run's first ones again.
            torch.manual_seed(self.world.data_seed * 1_000_003 + loaded["step"])
            rng = {}
        return loaded["step"], rng

    def _state(self, step: int, rng: dict, optimizer: Optimizer | None) -> dict:
        parts = self.parts(optimizer)
        own = {name: part for name, part in parts.items() if name in self.own}
        shared = {name: part for name, part in parts.items() if name not in self.own}
        return {
            "identity": self.identity,
            "step": step,
            "num_ranks": self.world.world_size,
            **shared,
            "ranks": {str(self.world.rank): {"rng": rng, **own}},
        }

    def _parts(self, optimizer: Optimizer | None) -> dict[str, dict]:
        is_own = "model" in self.own
        parts: dict[str, dict] = {"model": model_state(self.module, self.vectors, is_own)}
        if optimizer is not None:
            parts["optimizer"] = optimizer_state(optimizer, self.vectors, "optimizer" in self.own)
        return parts

    def _address_of(self, name: str) -> str:
        return f"{self.address}/{name}"

    def _remove_old(self) -> None:
        names = checkpoints.complete(self.address)
        for name in checkpoints.to_remove(names, self.losses, NUM_KEPT):
            checkpoints.remove(self.address, name)

    def _set_aside(self, names: Sequence[str], problems: Sequence[str], words: str) -> None:
        """Keep those of these that are damaged under other names, and say so.

        One that is whole stays where it is: its store was out of reach, or it is of another run.
        """
        for name, problem in zip(names, problems, strict=False):
            store = Store(self._address_of(name))
            kept = ""
            if on_main(lambda store=store: call_or_refuse("cannot read", lambda: damage(store))):
                other = on_main(lambda name=name: checkpoints.set_aside(self.address, name))
                kept = f"that checkpoint is kept as {other}, and "
            self.world.print(f"{problem}; {kept}{words}")

    def _by_loss(self) -> list[str]:
        """The checkpoints that were validated, the best first."""
        known = [
            name
            for name in checkpoints.complete(self.address)
            if checkpoints.step_of(name) in self.losses
        ]
        return sorted(known, key=lambda name: self.losses[checkpoints.step_of(name)])


def call_or_refuse(words: str, action: Callable[[], object], advice: str = "") -> object:
    """Call `action`; its ValueError or OSError becomes a BadInput, with these words around it.

    Returns:
        What the action returns.
    """
    try:
        return action()
    except BadInput:
        raise
    except (ValueError, OSError) as problem:
        raise BadInput(f"{words}: {problem}{advice}") from None
