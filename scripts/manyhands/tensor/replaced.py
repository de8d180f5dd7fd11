"""What a cut layer cannot take over from the module that it replaces is refused when it is made.

    nn.Embedding(V, D, max_norm=1.0)   --> VocabEmbedding    would have no max_norm
    a subclass of nn.Linear with LoRA  --> ColumnLinear      would lose what its forward adds

Source: https://docs.pytorch.org/docs/stable/nn.html (what the modules and their hooks do).
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyhands.collectives.trees import Group

OPTIONS = {"padding_idx": None, "max_norm": None, "scale_grad_by_freq": False, "sparse": False}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def refuse_extras(module: nn.Module, kind: type[nn.Module]) -> None:
    """Refuse a module that does more than look up rows, or than multiply and add a bias.

    Args:
        kind: nn.Embedding or nn.Linear, of which only the weights are taken over.

    Raises:
        ValueError: in one line, another class, an option, a hook or a parametrization.
    """
    name = type(module).__name__
    if getattr(type(module), "forward", None) is not kind.forward:
        raise ValueError(f"a {name} cannot be cut like an nn.{kind.__name__}: give a plain one")
    for option, usual in OPTIONS.items():
        value = getattr(module, option, usual)
        if value != usual:
            raise ValueError(
                f"{option}={value} is lost when an nn.{kind.__name__} is cut: leave it out"
            )
    if hasattr(module, "parametrizations") or any(getattr(module, hooks) for hooks in HOOKS):
        raise ValueError(
            f"hooks and parametrizations are lost when an nn.{kind.__name__} is cut: add them to "
            "the cut layer"
        )


def refuse_untied(model: nn.Module) -> None:
    """Refuse a Transformer whose head has a matrix of its own, which nobody would use.

    Raises:
        ValueError: `model.head.weight` is not `model.tokens.weight`.
    """
    if model.head.weight is not model.tokens.weight:
        raise ValueError("the head has a matrix of its own: tie it to that of the tokens")


def refuse_strangers(ids: Tensor, mine: range, group: Group = None) -> None:
    """Refuse ids that are no tokens, such as -100, by which torch's loss ignores a target.

    A GPU refuses them by an assertion on the device, as torch does, so the host waits for nothing.

    Args:
        ids: the same on all ranks.
        mine: this rank's part of the vocabulary; that of the last rank ends where it ends.

    Raises:
        IndexError: on the CPU. Every rank refuses a negative id, the last one also too large ones.
    """
    is_token = ids >= 0
    if dist.get_rank(group) == dist.get_world_size(group) - 1:
        is_token &= ids < mine.stop
    words = "is no token of the vocabulary: leave such positions out"
    if ids.device.type != "cpu":
        torch._assert_async(is_token.all(), f"an id {words}")
    elif not is_token.all():
        raise IndexError(f"{ids[~is_token][0].item()} {words}")
