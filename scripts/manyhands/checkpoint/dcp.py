"""The same with PyTorch: torch.distributed.checkpoint (DCP) saves and loads what ranks hold.

    dcp.save({"app": AppState}, folder)    each rank writes its parts; rank 0 writes .metadata
    dcp.load({"app": AppState}, folder)    each rank reads what its own parts have in common with
                                           the stored ones, in place, on any number of ranks

An object with state_dict() and load_state_dict(), a Stateful, is asked for its state by save; load
asks for it as well, fills the tensors of that state in place, and then hands the state back.

Price: as save_sharded; DCP keeps no sum of its files.
Source: https://docs.pytorch.org/tutorials/recipes/distributed_checkpoint_recipe.html.
"""

from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.optim import Optimizer

from manyhands.collectives.trees import Group


class AppState(Stateful):
    """Model, optimizer and progress of a training, as DCP takes and gives them.

    get_state_dict asks for both under names that do not depend on the wrapper: without the
    "module." of DDP, and with the optimizer's state by the name of its parameter. It also makes the
    state that an optimizer has only after its first step, so that there is something to load into.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, progress: Stateful) -> None:
        """Refer to all three; `progress` has the numbers, such as a Position."""
        self.model = model
        self.optimizer = optimizer
        self.progress = progress

    def state_dict(self) -> dict:
        """Return {"model", "optimizer", "progress"}; each rank calls it and has its own parts."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "progress": self.progress.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Hand on to all three what was loaded into the result of state_dict()."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.progress.load_state_dict(state["progress"])


def save_dcp(app: AppState, folder: str | Path, group: Group = None) -> None:
    """Save with DCP; every rank of `group` calls it."""
    dcp.save({"app": app}, checkpoint_id=str(folder), process_group=group)


def load_dcp(app: AppState, folder: str | Path, group: Group = None) -> None:
    """Load with DCP into `app`, on any number of ranks; every rank of `group` calls it.

    Raises:
        CheckpointException: a name is missing there, or a shape differs.
    """
    dcp.load({"app": app}, checkpoint_id=str(folder), process_group=group)
