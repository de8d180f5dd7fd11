"""7.5: batch norm in which every few samples have statistics of their own."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from manyhands.checks.engine import cases
from manyhands.checks.engine.spec import Spec
from manyhands.checks.engine.values import malformed, tensor
from manyhands.large_batch import norms


def turned(x: Tensor) -> Tensor:
    """The same numbers in another order in memory, so that they do not lie side by side."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


class Ghosts(NamedTuple):
    """Two steps of training and one in eval mode.

    Args:
        sizes: samples in each of the three.
        shape: of one sample. (C, ...)
    """

    seed: int
    ghost: int
    sizes: tuple[int, int, int]
    shape: tuple[int, ...]
    options: dict


def ghosts() -> list[Ghosts]:
    """Whole ghost batches; some left over, and fewer than one; every option; a strided input."""
    kinds = [
        (3, (6, 6, 2), (2,), {}),
        (2, (7, 1, 3), (3, 2, 2), {}),
        (3, (5, 2, 4), (4,), {"momentum": 0.3, "eps": 0.2}),
        (2, (6, 5, 3), (3, 4), {"momentum": None, "affine": False}),
        (4, (6, 3, 7), (2, 3), {"track_running_stats": False}),
    ]
    return [Ghosts(cases.draw_seed(), *kind) for kind in kinds]


def ghosts_seen(answer: Callable, case: Ghosts) -> dict:
    """Results, gradients and running statistics."""
    draw = cases.generator(case.seed)
    norm = answer(case.shape[0], case.ghost, **case.options)
    if not isinstance(norm, nn.Module):
        raise malformed(norm, "an nn.Module", "Keep the line `class GhostBatchNorm(...)`.")
    norm = norm.double().train()
    for param in norm.parameters():
        nn.init.normal_(param, mean=1, generator=draw)
    seen = {}
    for step, size in enumerate(case.sizes[:2], 1):
        of = f" in training step {step}"
        seen |= {f"{name}{of}": value for name, value in one_step(norm, case, size, draw).items()}
        seen |= {f"{name}{of}": value for name, value in statistics_of(norm).items()}
    before = statistics_of(norm)
    norm.eval()
    x = shifted_normal(draw, case.sizes[2], *case.shape)
    seen["the result in eval mode"] = tensor(norm(x))
    after = statistics_of(norm)
    is_same = all(torch.equal(after[name], value) for name, value in before.items())
    return seen | {"eval mode leaves the running statistics unchanged": is_same}


def shifted_normal(draw: Generator, *shape: int) -> Tensor:
    """Numbers whose mean is not 0."""
    return 2 + 3 * torch.randn(shape, generator=draw, dtype=torch.float64)


def one_step(norm: nn.Module, case: Ghosts, size: int, draw: Generator) -> dict:
    """Forward and backward."""
    leaf = turned(shifted_normal(draw, size, *case.shape)).requires_grad_()
    given = leaf * 1
    before = given.detach().clone()
    found = norm(given)
    out = tensor(found)
    wanted = [leaf, *norm.parameters()]
    gradients: tuple = (None,) * len(wanted)
    if found.requires_grad and found.shape == leaf.shape:
        gradients = torch.autograd.grad(
            found, wanted, turned(shifted_normal(draw, *found.shape)), allow_unused=True
        )
    return {
        "the result": out,
        "the gradient of x": gradients[0],
        "the gradients of weight and bias": list(gradients[1:]),
        "x is unchanged": torch.equal(given.detach(), before),
    }


def statistics_of(norm: nn.Module) -> dict[str, Tensor]:
    """The running statistics, copied."""
    return {name: buffer.detach().clone() for name, buffer in norm.named_buffers()}


def tell_ghosts(case: Ghosts) -> str:
    """The calls, in words."""
    options = "".join(f", {name}={value}" for name, value in case.options.items())
    first, second, last = case.sizes
    return (
        f"GhostBatchNorm({case.shape[0]}, ghost={case.ghost}{options}), trained with batches of "
        f"{first} and {second} samples of shape {case.shape} and then in eval mode with {last},"
    )


PARTS = "parts = [super(GhostBatchNorm, self).forward(part) for part in x.split(self.ghost)]"
PLAIN = "nn.functional.batch_norm(part, None, None, self.weight, self.bias, True, 0.0, self.eps)"
SPLIT = "x.split(self.ghost) gives parts of that many samples, and the rest as a last part."
BASE = "Call the base class's forward for each part: it also moves the running statistics."
CAT = "torch.cat(parts) joins the parts along the samples again."
SUPER = "In a comprehension, write super(GhostBatchNorm, self).forward(part)."
MOVES = {
    f"{name} in training step {step}": f"The running statistics move once per part. {BASE}"
    for name in ("running_mean", "running_var", "num_batches_tracked")
    for step in (1, 2)
}
ghost = Spec(
    todo="7.5",
    truth=norms.GhostBatchNorm,
    cases=ghosts,
    observe=ghosts_seen,
    tell=tell_ghosts,
    advice={
        "": f"{SPLIT} {BASE}",
        "the result in eval mode": "Do not split in eval mode.",
        **MOVES,
    },
    reasons="""
        maximum recursion depth :: forward calls itself again, without end. | Call the forward of
            the base class instead: super().forward(part).
        super(type, obj) ::
            A comprehension is a function of its own, in which super() finds no self. | {SUPER}
        super(): no arguments :: super() without arguments works only directly inside a method.
        more than 1 value per channel :: A part holds a single number for each channel, which has no
            variance. | {SPLIT} Check how many samples each of your parts has.
        stack expects each tensor to be equal size :: The last part may be smaller. | {CAT}
    """,
    hints=(
        "In training, cut the batch into parts of `ghost` samples and normalise each part as a "
        "batch of its own. In eval mode there is nothing to cut.",
        f"{SPLIT} {BASE}",
        f"{CAT} {SUPER}",
    ),
    mistakes="""
        {PARTS} => parts = [super().forward(x)] ::
            The whole batch shares one mean and one variance. | {SPLIT}
        x.split(self.ghost) => x.chunk(self.ghost) ::
            `ghost` is taken for the number of parts, and it is the size of each.
        x.split(self.ghost) => x.split(self.ghost)[: max(1, len(x) // self.ghost)] ::
            The samples that are left over are missing from the result. | Let the samples that are
            left over make a ghost batch of their own.
        x.split(self.ghost) => x.tensor_split(tuple(range(self.ghost, len(x) - self.ghost + 1,
            self.ghost))) :: The samples that are left over join the last whole ghost batch.
        x.split(self.ghost) => x.tensor_split(-(-len(x) // self.ghost)) ::
            The parts are made equally large, so some are smaller than `ghost`. | {SPLIT}
        {PARTS} => n = -(-len(x) // self.ghost); parts = [super(GhostBatchNorm,
            self).forward(x[i::n]) for i in range(n)] ::
            Every part takes samples from all over the batch, so they come out in another order.
        {PARTS} => parts = [{PLAIN} for part in x.split(self.ghost)] ::
            The running statistics never move. | {BASE}
        {PARTS} => super().forward(x); parts = [{PLAIN} for part in x.split(self.ghost)] ::
            The running statistics move once, by those of the whole batch.
        super(GhostBatchNorm, self).forward(part) => super(GhostBatchNorm,
            self).forward(part.detach()) ::
            x has no gradient: the parts are detached from it. | Normalise the parts of x itself.
        if not self.training => if False ::
            The batch is split in eval mode as well, which shows where there are no running
            statistics. | In eval mode, return super().forward(x) for the whole batch.
        torch.cat(parts) => torch.cat(parts, dim=1) ::
            The parts are joined along the channels. | {CAT}
        torch.cat(parts) => torch.stack(parts) :: The parts are stacked, which adds a dimension.
    """,
    module=globals(),
)
