"""Checkpoints: a run's weights, optimizer and random numbers on the disk, and back.

    rank 0: state.pt ------+                             all ranks have written
    rank 0: rank-00000.pt -+--> step-00000100.partial/  ---------------------->  step-00000100/
    rank 1: rank-00001.pt -+                             os.replace

A resumed run goes on bit for bit. The newest checkpoint that every rank can load is taken; a newer
one that cannot be loaded is kept under another name, and the run says so. Beside the newest ones
stays the best: the one with the lowest validation loss.
Price: the size of weights and optimizer on the disk, at most four times, and one wait for the disk
a save.
"""

import json
import math
import os
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from manyhands.ranks.runtime import BadInput, World, first_line, on_main, together
from manyhands.training.storage import (
    FORMAT,
    differences,
    partial_name,
    read_lines,
    read_state,
    replace_file,
    write_state,
)

NUM_KEPT = 3
BROKEN = ".broken"  # behind the name of a checkpoint that could not be loaded


class Checkpoints:
    """The checkpoints of one run, for one rank. Every rank calls each method."""

    def __init__(self, folder: Path, identity: dict, world: World) -> None:
        """Use the checkpoints in `folder`; `identity` has to be equal for one of them to fit."""
        self.folder = folder
        self.identity = identity
        self.world = world
        self.module: nn.Module | None = None
        self.optimizer: Optimizer | None = None
        self.sharded: Collection[str] = ()
        self.losses: dict[int, float] = {}  # on the validation data, by step; inf: not finite

    def of(self, model: nn.Module, optimizer: Optimizer | None, sharded: Collection[str]) -> None:
        """Save and load these from now on.

        Args:
            optimizer: rank 0 has the one whose state is saved; other ranks may have None.
            sharded: "model", "optimizer" or both: of these each rank holds and saves its own part.
        """
        # A reference to the wrapper would keep DDP alive beyond the process group.
        self.module = model if "model" in sharded else getattr(model, "module", model)
        self.optimizer = optimizer
        self.sharded = sharded

    def save(self, step: int, epoch_rng: dict[str, Tensor]) -> None:
        """Write a checkpoint; it is whole when this returns on any rank.

        Args:
            epoch_rng: the random numbers with which this epoch began.

        Raises:
            BadInput: on every rank, when one of them cannot write.
        """
        final = self.folder / f"step-{step:08d}"
        shared = {"identity": self.identity, "step": step}
        own = {"rng": {"epoch": epoch_rng, "now": get_rng(self.world.device)}}
        for name, part in (("model", self.module), ("optimizer", self.optimizer)):
            state = local(part.state_dict()) if part else None
            place = own if name in self.sharded else shared
            place[name] = state
        try:
            together(lambda: write_checkpoint(final, self.world.rank, shared, own))
        except BadInput:
            if self.world.is_main:
                shutil.rmtree(partial_name(final), ignore_errors=True)
            raise
        on_main(lambda: publish(final, NUM_KEPT, self.best()))

    # ---- the best ------------------------------------------------------------------------------

    def best(self) -> Path | None:
        """The kept checkpoint with the lowest validation loss, the earliest of equals."""
        return next(iter(self._by_loss()), None)

    def read_losses(self, step: int) -> None:
        """Take up what a run has measured up to `step`; what comes after that is measured again."""
        lines = on_main(lambda: read_lines(self._loss_file))
        known = {line["step"]: line["valid_loss"] for line in lines if line["step"] <= step}
        self.losses = {at: math.inf if loss is None else loss for at, loss in known.items()}

    def add_loss(self, step: int, loss: float) -> None:
        """Write down the validation loss of the checkpoint of `step`."""
        self.losses[step] = loss if math.isfinite(loss) else math.inf
        lines = [
            json.dumps({"step": at, "valid_loss": None if math.isinf(known) else known}) + "\n"
            for at, known in sorted(self.losses.items())
        ]
        on_main(lambda: replace_file(self._loss_file, "".join(lines).encode()))

    def load_best(self) -> int:
        """Load the weights with the lowest validation loss on every rank; returns their step.

        Raises:
            BadInput: on every rank, when no checkpoint with a validation loss can be loaded.
        """
        found = on_main(self._by_loss)
        loaded = self._load_first(found, None, "the weights are taken from")
        return loaded[0]

    def _by_loss(self) -> list[Path]:
        """The checkpoints that were validated, the best first."""
        steps = {path: int(path.name.removeprefix("step-")) for path in _checkpoints(self.folder)}
        known = [path for path, step in steps.items() if step in self.losses]
        return sorted(known, key=lambda path: self.losses[steps[path]])

    @property
    def _loss_file(self) -> Path:
        return self.folder.parent / "valid.jsonl"

    # ---- back from the disk --------------------------------------------------------------------

    def load_newest(self) -> tuple[int, dict] | None:
        """Load the newest checkpoint that every rank can load, and say where an older one is taken.

        Returns:
            Its step and this rank's random numbers; None where there is no checkpoint.

        Raises:
            BadInput: on every rank, when there are checkpoints and none of them can be loaded.
        """
        found = on_main(lambda: whole_checkpoints(self.folder))
        if not found:
            return None
        return self._load_first(found[::-1], self.optimizer, "the run goes on from")

    def _load_first(
        self, found: Sequence[Path], optimizer: Optimizer | None, words: str
    ) -> tuple[int, dict]:
        """Load the first of `found` that every rank can load, and set those before it aside."""
        problems: list[str] = []
        for checkpoint in found:
            try:
                loaded = together(lambda checkpoint=checkpoint: self._load(checkpoint, optimizer))
            except BadInput as problem:
                problems.append(str(problem))
                continue
            for other, problem in zip(found, problems, strict=False):
                kept = on_main(lambda other=other: set_aside(other))
                self.world.print(
                    f"{problem}; that checkpoint is kept as {kept.name}, and {words} "
                    f"{checkpoint.name}"
                )
            return loaded[self.world.rank]
        raise BadInput(
            f"{problems[0]}; no other checkpoint in {self.folder} can be loaded: name a new "
            "--out to begin anew"
        )

    def _load(self, checkpoint: Path, optimizer: Optimizer | None) -> tuple[int, dict]:
        return load_checkpoint(checkpoint, self.world.rank, self.identity, self.module, optimizer)


def write_checkpoint(final: Path, rank: int, shared: dict, own: dict) -> None:
    """Write this rank's part of the checkpoint `final`, still under its partial name.

    Args:
        shared: what is the same on every rank ("identity", "step", "model", "optimizer"); rank 0
            writes it.
        own: what only this rank has ("rng", and those of "model" and "optimizer" that are shards).

    Raises:
        BadInput: the disk refuses.
    """
    partial = partial_name(final)
    try:
        partial.mkdir(exist_ok=True)
        if rank == 0:
            write_state({"format": FORMAT, **shared}, partial / "state.pt")
        write_state(own, partial / f"rank-{rank:05d}.pt")
    except OSError as problem:
        raise BadInput(
            f"rank {rank} cannot write {partial}: {problem}; free some space. The checkpoints "
            "before it are kept"
        ) from None


def publish(final: Path, num_kept: int, best: Path | None = None) -> None:
    """Give a checkpoint that every rank has written its name; keep the newest and the best."""
    _sync_folder(partial_name(final))
    os.replace(partial_name(final), final)
    _sync_folder(final.parent)
    for old in _checkpoints(final.parent)[:-num_kept]:
        if old == best:
            continue
        # Half a checkpoint must not look like a whole one, also while it is being deleted.
        os.replace(old, partial_name(old))
        shutil.rmtree(partial_name(old))


def whole_checkpoints(folder: Path) -> list[Path]:
    """Clear away what a killed process left in `folder`; returns the whole ones, oldest first."""
    for left in folder.glob("*.partial"):
        shutil.rmtree(left)
    return _checkpoints(folder)


def set_aside(checkpoint: Path) -> Path:
    """Rename a checkpoint, so that the run can save that step again; returns its new path."""
    kept = checkpoint.with_name(checkpoint.name + BROKEN)
    number = 2
    while kept.exists():
        kept = checkpoint.with_name(f"{checkpoint.name}{BROKEN}{number}")
        number += 1
    os.replace(checkpoint, kept)
    return kept


def load_checkpoint(
    checkpoint: Path, rank: int, identity: dict, model: nn.Module, optimizer: Optimizer | None
) -> tuple[int, dict]:
    """Set `model` and, if given, `optimizer`; returns the step and the random numbers of this rank.

    Raises:
        BadInput: a file cannot be read, or belongs to another run than `identity`, or to another
            model or optimizer.
    """
    shared = read_state(checkpoint / "state.pt", {"format", "identity", "step"})
    own = read_state(checkpoint / f"rank-{rank:05d}.pt", {"rng"})
    if shared["format"] != FORMAT:
        raise BadInput(f"{checkpoint} has another format ({shared['format']})")
    if found := differences(shared["identity"], identity):
        raise BadInput(f"{checkpoint} was saved with {found}")
    states = {**shared, **own}
    try:
        theirs = {name: list(tensor.shape) for name, tensor in states["model"].items()}
        ours = {name: list(tensor.shape) for name, tensor in local(model.state_dict()).items()}
        if found := differences(theirs, ours):
            raise BadInput(f"{checkpoint} holds another model, with {found}")
        load_local(model, optimizer, states)
    except BadInput:
        raise
    except (ValueError, TypeError, RuntimeError, KeyError, AttributeError) as problem:
        raise BadInput(f"{checkpoint} does not fit: {first_line(problem)}") from None
    return shared["step"], own["rng"]


def local(state: object) -> object:
    """A state_dict with this rank's own part in place of every DTensor."""
    return tree_map(lambda leaf: leaf.to_local() if is_dtensor(leaf) else leaf, state)


def is_dtensor(value: object) -> bool:
    """Is it a tensor of which every rank holds a part?"""
    return hasattr(value, "to_local")  # to import the class takes 0.6 s


def load_local(model: nn.Module, optimizer: Optimizer | None, states: dict) -> None:
    """Set `model` and, if given, `optimizer` to what `local` made of their states."""
    with torch.no_grad():
        for name, value in model.state_dict().items():
            local(value).copy_(states["model"][name])
    if optimizer is None:
        return
    state = states["optimizer"]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, values in state["state"].items():
        for name, value in values.items():
            if is_dtensor(params[number]) and value.dim() > 0:
                values[name] = _as_part_of(params[number], value)
    optimizer.load_state_dict(state)


def _as_part_of(param: Tensor, value: Tensor) -> Tensor:
    """The DTensor that is cut as `param` is, and of which this rank's part is `value`."""
    return type(param).from_local(
        value.to(param.to_local().device),
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def _checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in `folder`, oldest first."""
    return sorted(path for path in folder.glob("step-*") if not path.suffix)


def _sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` are on the disk, not only in the system's memory."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- random numbers ----------------------------------------------------------------------------


def get_rng(device: torch.device) -> dict[str, Tensor]:
    """Where torch's random numbers stand, on the CPU and on `device`."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_rng(states: dict[str, Tensor], device: torch.device) -> None:
    """Go on with the random numbers from where `get_rng` found them."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
