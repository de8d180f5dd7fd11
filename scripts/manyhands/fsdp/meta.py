"""Deferred initialisation: the whole model is never in the memory of any rank, not even at first.

    with torch.device("meta"):
        model = Transformer(...)              shapes and types, no memory
    FSDP(model, units, draw=draw)             for each unit: draw its weights, keep the shard, free

Each parameter is drawn from a generator of its own, so its numbers do not depend on what was drawn
before it: one process that draws the whole model gets the same weights.

Price at its peak: the shards that are done, 4P/n bytes in the end, and one unit twice: as it was
drawn and, while it is packed, as a vector.
Source: Zhao et al. 2023, "PyTorch FSDP", https://arxiv.org/abs/2304.11277, section 4.1.
"""

import zlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

Draw = Callable[[str, Tensor], Tensor]  # name and a tensor without memory -> first values


def materialise(model: nn.Module, params: Iterable[nn.Parameter], draw: Draw) -> list[nn.Parameter]:
    """Give some parameters of a model on the meta device memory and their first values.

    A tensor of the meta device cannot get memory, so a new parameter takes the place of each, in
    all places of the model where it stands: a tied one stays tied. Returns the new ones in order.

    Raises:
        ValueError: a parameter has memory already.
    """
    names = {param: name for name, param in model.named_parameters()}
    made = {}
    for param in params:
        if not param.is_meta:
            raise ValueError(
                f"{names[param]} has memory already: build the whole model under "
                'torch.device("meta"), or leave out draw'
            )
        made[param] = nn.Parameter(draw(names[param], param), param.requires_grad)
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if param in made:
                setattr(module, name, made[param])
    return list(made.values())


def draw_weight(name: str, like: Tensor, layers: int, seed: int = 0, device: str = "cpu") -> Tensor:
    """First values for the parameter `name` of a Transformer, spread as those that it draws itself.

    The numbers come from the CPU's generator, so they are the same on any device and any rank.
    """
    if like.dim() == 1:  # of a norm
        return torch.ones(like.shape, dtype=like.dtype, device=device)
    is_added = name.endswith(("out.weight", "down.weight"))
    std = 0.02 / (2 * layers) ** 0.5 if is_added else 0.02
    generator = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
    return torch.empty(like.shape, dtype=like.dtype).normal_(0, std, generator=generator).to(device)
