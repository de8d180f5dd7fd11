"""The same with PyTorch: torch.distributed.checkpoint (DCP) saves and loads what ranks hold.

    dcp.save({"app": AppState}, folder)    each rank writes its parts; rank 0 writes .metadata
    dcp.load({"app": AppState}, folder)    each rank reads what its own parts have in common with
                                           the stored ones, in place, on any number of ranks

An object with state_dict() and load_state_dict(), a Stateful, is asked for its state by save; load
asks for it as well, fills the tensors of that state in place, puts the stored numbers into its
dicts, and hands the state back to the object.

Price: as save_sharded. DCP keeps no sums of its files, and it reads numbers and .metadata with
pickle, which runs what a stranger has put there: load only what your own runs have saved.
Source: https://docs.pytorch.org/tutorials/recipes/distributed_checkpoint_recipe.html.
"""

from collections.abc import Callable
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from manyhands.collectives.trees import Group


class AppState(Stateful):
    """Model, optimizer and progress of a training, as DCP takes them and gives them back."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, progress: Stateful) -> None:
        """Refer to all three; `progress` has the numbers, such as a Position."""
        self.model = model
        self.optimizer = optimizer
        self.progress = progress

    def state_dict(self) -> dict:
        """Return {"model", "optimizer", "progress"}, the state of each; every rank calls it.

        Its tensors are those that the training uses, on each rank that rank's own parts. Names do
        not depend on a wrapper: they are without the "module." of DDP. The optimizer's state is
        there also before the first step, so that dcp.load has something to load into.
        """
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "progress": self.progress.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Put all three where `state` says they were; every rank calls it.

        Args:
            state: a result of state_dict() that dcp.load has filled, or a copy of a result, whose
                tensors are not those of the training.
        """
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.progress.load_state_dict(state["progress"])


def save_dcp(app: Stateful, folder: str | Path, group: Group = None) -> None:
    """Save with DCP; every rank of `group` calls it.

    Raises:
        ValueError: on every rank, where one of them cannot write.
    """
    _with_one_line(lambda: dcp.save({"app": app}, checkpoint_id=str(folder), process_group=group))


def load_dcp(app: Stateful, folder: str | Path, group: Group = None) -> None:
    """Load with DCP into `app`, on any number of ranks; every rank of `group` calls it.

    Raises:
        ValueError: on every rank: `app` has a name that is not in the checkpoint, a shape differs,
            or there is no .metadata. A name that only the checkpoint has is passed over.
    """
    _with_one_line(lambda: dcp.load({"app": app}, checkpoint_id=str(folder), process_group=group))


def _with_one_line(call: Callable[[], object]) -> None:
    """Make one line of DCP's error, which is no Exception and holds the traceback of every rank."""
    try:
        call()
    except CheckpointException as problem:
        rank, (error, _) = min(problem.failures.items(), key=lambda item: item[0])
        words = " ".join(str(error).split())
        raise ValueError(f"rank {rank}: {type(error).__name__}: {words}") from None
