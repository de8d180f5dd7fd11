"""Deferred initialisation: the whole model is never in the memory of any rank, not even at first.

    with torch.device("meta"):
        model = Transformer(...)              shapes and types, no memory
    FSDP(model, units, draw=draw)             for each unit: draw its weights, keep the shard, free

One process that draws the whole model has to get the same weights. There are two ways:

    draw_weight       each parameter from a generator of its own, seeded by the parameter's name
    record(build)     any model: run its constructor on the meta device, note the state of the
                      random numbers at each parameter's turn, and draw from that state later

Price at its peak: the shards that are done, 4P/n bytes in the end, and one unit twice: as it was
drawn and, while it is packed, as a vector. `fill`, for fully_shard, needs one parameter twice.
`record` draws all numbers once more, one parameter at a time.
Source: Zhao et al. 2023, "PyTorch FSDP", https://arxiv.org/abs/2304.11277, section 4.1.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

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


def record(
    build: Callable[[], nn.Module], device: torch.device | str = "cpu"
) -> tuple[nn.Module, Draw]:
    """Build a model on the meta device, and return it with a `draw` for its first values.

    These are bit for bit the numbers that `build()` would give it now on the CPU, moved to
    `device`, and torch's random numbers go on as if they had been drawn. All ranks need one seed.
    """
    with torch.device("meta"), FirstValues() as first:
        model = build()
    calls = {name: first.calls[param] for name, param in model.named_parameters()}

    def draw(name: str, like: Tensor) -> Tensor:
        func, args, state = calls[name]
        values = torch.empty(like.shape, dtype=like.dtype, device="cpu")
        return func(values, *args, **random_from(func, state)).to(device)

    return model, draw


class FirstValues(TorchDispatchMode):
    """Note which operator gave each parameter on the meta device its last values, and when.

    Random numbers are drawn into a tensor on the CPU, one parameter at a time, and dropped: the
    numbers of the parameters behind depend on how many were drawn before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Tensor, tuple] = {}  # parameter -> operator, arguments, state before it

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # torch's own signature
        if func not in FILLS or not args[0].is_meta:
            return func(*args, **(kwargs or {}))
        first, *others = args
        self.calls[first] = func, others, torch.get_rng_state()
        func(torch.empty(first.shape, dtype=first.dtype, device="cpu"), *others)
        return first


RANDOM = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)
FILLS = (*RANDOM, torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


def random_from(func: object, state: Tensor) -> Mapping[str, torch.Generator]:
    """The argument that lets a random operator begin at `state`; torch's own state stays."""
    return {"generator": torch.Generator().set_state(state)} if func in RANDOM else {}


@torch.no_grad()
def fill(sharded: nn.Module, draw: Draw, device: torch.device | str) -> None:
    """Give a model that fully_shard has sharded on the meta device memory for its shards, and fill.

    Args:
        device: where the shards belong, the CPU where they are offloaded.
    """
    sharded.to_empty(device=device)
    for name, param in sharded.named_parameters():
        whole = draw(name, param).to(device)
        # Every rank has drawn all of it, so none has to send the others their part.
        mine = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
        param.to_local().copy_(mine.to_local())
