"""What a layer-wise optimizer refuses when it is made: options that cannot be, and mixed layers.

    LARS(params, lr=1.0, decay_in_ratio="sums")    "sums" would pass for the last of the choices
    LARS(model.parameters(), ...)  of an FSDP      one shard, one ratio, but several layers

Both would train without an error, with another formula than the one that was asked for.
Source: https://docs.pytorch.org/docs/stable/optim.html (options by parameter group).
"""

from collections.abc import Iterable
from typing import Literal, get_args, get_origin

from torch import nn

NOT_NEGATIVE = ("lr", "weight_decay", "eps", "trust", "momentum")


def refuse_options(kind: type, options: dict) -> None:
    """Refuse a misspelt choice, and a number out of its range.

    Args:
        kind: the optimizer. The annotations of its constructor say what may be chosen, as in
            `zero_norm: Literal["one", "stay"]`.
        options: of a parameter group, by their names.

    Raises:
        ValueError: in one line, with the option's name and value.
    """
    for name, annotation in kind.__init__.__annotations__.items():
        allowed = get_args(annotation) if get_origin(annotation) is Literal else ()
        if name in options and allowed and options[name] not in allowed:
            choices = ", ".join(repr(one) for one in allowed)
            raise ValueError(f"{name} is {options[name]!r}: take one of {choices}")
    for name in NOT_NEGATIVE:
        if not options.get(name, 0) >= 0:
            raise ValueError(f"{name} is {options[name]}: it must not be negative")
    betas = options.get("betas", (0.0, 0.0))
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas is {betas}: take two numbers of at least 0 and below 1")
    clamp = options.get("clamp")
    if clamp is not None and not clamp > 0:
        raise ValueError(f"clamp is {clamp}: take a positive number, or None for no limit")


def refuse_flats(params: Iterable[nn.Parameter]) -> None:
    """Refuse a shard in which several layers lie one behind the other.

    Raises:
        ValueError: a shard of lesson 10, whose FSDP and ZeRO mark it with its `num_layers`.
    """
    for param in params:
        if (count := getattr(param, "num_layers", 1)) > 1:
            raise ValueError(
                f"a shard holds parts of {count} layers, and each layer has a ratio of its own: "
                "shard the model with fully_shard, which keeps layers apart"
            )
