"""What an optimizer keeps for each parameter, such as its momentum, as parts of a checkpoint.

    save    {"0": Kept}    what is there: nothing before the first step with a gradient for it
    load    {"0": Kept}    what the checkpoint has: made to be loaded into, then given to the
                           optimizer; where the checkpoint has nothing, the optimizer gets nothing

An optimizer makes its state in the first step that has a gradient for a parameter. So a parameter
without one so far has no state, and after a resume it has to begin as it would have without a
break. A step of the optimizer itself on gradients of 0 would make the state, but it would count as
a step: Adam's corrections depend on the count. Here a stand-in takes that step, on zeros.

Price: a save takes no memory. A load takes that of the state which is made, and three times that of
one parameter.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.saving.agree import first_line
from manyhands.saving.pieces import Piece, ShardedVector, piece_of

PLAIN = (bool, int, float, str, type(None))


class Kept:
    """What an optimizer keeps for one parameter.

    Args:
        as_piece: turns a tensor of this state into what a checkpoint holds of it.
    """

    def __init__(
        self, optimizer: Optimizer, param: Tensor, as_piece: Callable[[Tensor], object]
    ) -> None:
        self.optimizer, self.param, self.as_piece = optimizer, param, as_piece
        self.state = dict(optimizer.state.get(param, {}))

    def items(self) -> dict[str, object]:
        """The pieces and plain values by name; {} where nothing is there yet.

        Raises:
            ValueError: it is of another kind, such as the lists of LBFGS.
        """
        found = {}
        for name, value in self.state.items():
            if not isinstance(value, (Tensor, *PLAIN)):
                kinds = f"{type(self.optimizer).__name__} keeps a {type(value).__name__}"
                raise ValueError(
                    f"{kinds} called {name}, which a sharded checkpoint cannot hold: save its "
                    "state_dict() with torch.save, or take another optimizer"
                )
            found[name] = self.as_piece(value) if isinstance(value, Tensor) else value
        return found

    def give(self, name: str, values: Mapping[str, object]) -> None:
        """Hand the state to the optimizer, with the plain values that were loaded for `name`."""
        state = {key: values.get(f"{name}/{key}", value) for key, value in self.state.items()}
        if state:
            self.optimizer.state[self.param] = state
        else:
            self.optimizer.state.pop(self.param, None)


def aim(kept: Mapping[str, Kept], stored: Collection[str], keep: Sequence[str]) -> None:
    """Have in each what the checkpoint has: tensors to load into, or nothing.

    Args:
        stored: the names in the checkpoint.
        keep: beginnings of names; what the checkpoint does not have of these stays as it is.
    """
    has = {name.rpartition("/")[0] for name in stored}
    there = {one.param for name, one in kept.items() if name in has}
    made: dict[Tensor, dict] = {}
    for name, one in kept.items():
        if one.param in there and not one.state:
            if one.param not in made:
                made[one.param] = first_state(one.optimizer, one.param)
            one.state = made[one.param]
        elif one.param not in there and not name.startswith(tuple(keep)):
            one.state = {}


def first_state(optimizer: Optimizer, param: Tensor) -> dict[str, object]:
    """What the optimizer will make for `param` in its first step; the numbers mean nothing.

    Neither of them is changed: an optimizer with the same settings takes a step on zeros.

    Raises:
        ValueError: such a step fails.
    """
    kind = type(optimizer)
    zeros = nn.Parameter(torch.zeros_like(param), requires_grad=param.requires_grad)
    zeros.grad = torch.zeros_like(param)
    groups = [group for group in optimizer.param_groups if any(p is param for p in group["params"])]
    other = object.__new__(kind)
    other.__dict__ = optimizer.__dict__ | {
        "state": defaultdict(dict),
        "param_groups": [{**groups[0], "params": [zeros]}],
        "_optimizer_step_pre_hooks": OrderedDict(),
        "_optimizer_step_post_hooks": OrderedDict(),
    }
    try:
        kind.step(other)  # a scheduler puts another `step` into the optimizer itself
    except Exception as problem:  # whatever it needs, it needs more than a gradient
        raise ValueError(
            f"the state of {kind.__name__} cannot be made ahead of its first step, to load into: "
            f"{first_line(problem)}"
        ) from problem
    return dict(other.state[zeros])


def optimizer_state(
    optimizer: Optimizer, vectors: Sequence[ShardedVector] = (), is_own: bool = False
) -> dict:
    """What an optimizer keeps, by the number of its parameter, and its groups' settings.

    Nothing is changed by that. Where the state is the rank's own, its part of a DTensor counts as a
    whole.

    Raises:
        ValueError: it keeps something for no parameter of its own, which would be lost.
    """
    cut = {vector.shard: vector for vector in vectors}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if set(optimizer.state) - set(params):
        kind = type(optimizer).__name__
        raise ValueError(f"{kind} keeps a state that belongs to none of its parameters")

    def as_piece(param: Tensor, value: Tensor) -> Piece:
        return piece_of(value, cut.get(param) if value.dim() else None, is_own)

    state = {
        str(number): Kept(optimizer, param, partial(as_piece, param))
        for number, param in enumerate(params)
    }
    return {"state": state, "groups": settings(optimizer)}


def settings(optimizer: Optimizer) -> list[dict]:
    """The settings of each group, such as the learning rate."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def set_groups(optimizer: Optimizer, groups: Sequence[Mapping]) -> None:
    """Give the optimizer's groups the settings that a checkpoint had, such as the learning rate."""
    for group, known in zip(optimizer.param_groups, groups, strict=True):
        group.update(known)
