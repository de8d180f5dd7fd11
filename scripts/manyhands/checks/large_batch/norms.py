"""7.6: batch norm over the batches of all ranks, forward and backward."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from manyhands.checks.engine import cases
from manyhands.checks.engine.spec import Place, Spec
from manyhands.checks.engine.values import malformed, tensor
from manyhands.checks.large_batch.ghosts import turned
from manyhands.instruments.ledger import Ledger, calls
from manyhands.large_batch import norms


class Rows(NamedTuple):
    """Two calls of `apply`, and then the backward of both; each rank draws its own samples.

    Args:
        sizes: samples of each rank.
        shape: of one sample. (C, ...)
        centre: of the numbers; where it is far from 0, only the digits are judged.
        off: by how much the digits may be off there.
    """

    seed: int
    sizes: list[int]
    shape: tuple[int, ...]
    eps: float
    dtype: torch.dtype = torch.float64
    centre: float = 0.0
    off: float = 0.0
    is_turned: bool = False


CALLS = (" of the first call", " of the second call")
ONE_MESSAGE = "backward makes no more than one all-reduce"
FAR = " has enough digits, although x is far from 0"


def rows(n: int) -> list[Rows]:
    """Uneven batches, empty ones, strided ones with pixels; far from 0 in both types."""
    kinds: list[tuple] = [
        (False, (2,), 1e-5),
        (True, (3, 2, 2), 0.3, torch.float64, 0.0, 0.0, True),
        (True, (2, 3), 1e-5, torch.float32, 1e4, 0.1),
        (True, (4,), 1e-5, torch.float64, 1e4, 1e-6),
    ]
    found = []
    for may_be_empty, *more in kinds:
        sizes = [size and size + 1 for size in cases.uneven(n, empty=may_be_empty)]
        found.append(Rows(cases.draw_seed(), sizes, *more))
    return found


def batch_of(case: Rows, place: Place, rank: int, call: int) -> tuple[Tensor, Tensor]:
    """The samples of a rank of the group, and the gradients that their results will get."""
    draw = cases.generator(case.seed, place.members[rank], call)
    shape = (2, case.sizes[rank], *case.shape)
    x, grad = torch.randn(shape, generator=draw, dtype=torch.float64)
    spread = 0.5 if case.centre else 3.0
    x = case.centre + spread * (x + rank + 1)
    pair = [(turned(one) if case.is_turned else one).to(case.dtype) for one in (x, grad)]
    return pair[0], pair[1]


def norm_seen(answer: Callable, case: Rows, place: Place) -> dict:
    """Of two calls, both forward and then both backward, what they give and leave unchanged."""
    if isinstance(answer, type) and not issubclass(answer, Function):
        raise malformed(answer, "a torch.autograd.Function")
    seen, given = {}, []
    for call, of in enumerate(CALLS):
        own, grad = batch_of(case, place, place.rank, call)
        leaf = own.clone(memory_format=torch.preserve_format).requires_grad_()
        x = leaf * 1  # no leaf, as between two layers
        found = answer_of(getattr(answer, "apply", answer)(x, case.eps, place.group))
        seen |= {f"{name}{of}": tensor(found[name]) for name in ("mean", "variance")}
        seen[f"the count{of}"] = tensor(found["count"]).double()
        seen[f"x_hat{of}"] = tensor(found["x_hat"])  # last, because it follows from the others
        seen[f"x is unchanged by forward{of}"] = torch.equal(x.detach(), own)
        given.append((leaf, found["x_hat"], grad))
    for of, (leaf, x_hat, grad) in zip(CALLS, given, strict=True):
        before = grad.clone()
        with Ledger() as wire:
            if isinstance(x_hat, Tensor) and x_hat.requires_grad:
                x_hat.backward(grad)
        seen[f"the gradient of x{of}"] = leaf.grad
        seen[f"the given gradient is unchanged by backward{of}"] = torch.equal(grad, before)
        seen[f"{ONE_MESSAGE}{of}"] = calls(wire.entries)["all_reduce"] <= 1
    return far_seen(seen, case, place) if case.centre else seen


def answer_of(found: object) -> dict:
    """The four results by their names."""
    wanted = "the four tensors x_hat, mean, variance and count"
    if not isinstance(found, tuple | list) or len(found) != 4:
        raise malformed(found, wanted, "Return x_hat, mean, variance, count.")
    if not isinstance(found[3], Tensor):
        raise malformed(found[3], "a tensor as the count", "Use the last of the summed numbers.")
    return dict(zip(("x_hat", "mean", "variance", "count"), found, strict=True))


def far_seen(seen: dict, case: Rows, place: Place) -> dict:
    """The same where rounding counts: which results are near enough to those of one process."""
    told = {}
    for call, of in enumerate(CALLS):
        pairs = [batch_of(case, place, rank, call) for rank in range(place.n)]
        x, grad = (torch.cat(parts).double() for parts in zip(*pairs, strict=True))
        x.requires_grad_()
        x_hat = F.batch_norm(x, None, None, training=True, eps=case.eps)
        (of_x,) = torch.autograd.grad(x_hat, x, grad)
        axes = [axis for axis in range(x.dim()) if axis != 1]
        wanted = {"mean": x.mean(axes), "variance": x.var(axes, correction=0)}
        for name, whole in (("x_hat", x_hat), ("the gradient of x", of_x)):
            wanted[name] = whole.split(case.sizes)[place.rank]
        for name, value in wanted.items():
            found = seen[f"{name}{of}"]
            told[f"the type of {name}{of}"] = str(getattr(found, "dtype", None))
            told[f"{name}{of}{FAR}"] = is_near(found, value.detach(), case.off)
        told[f"the count{of}"] = seen[f"the count{of}"]
    return told


def is_near(found: Tensor | None, wanted: Tensor, off: float) -> bool:
    """Are all numbers off by so much at most?"""
    if found is None or found.shape != wanted.shape:
        return False
    return bool(((found.double() - wanted).abs() <= off).all())


def tell_rows(case: Rows) -> str:
    """The calls, in words."""
    shape = "".join(f", {size}" for size in case.shape)
    far = f", in {str(case.dtype)[6:]} and near {case.centre:,.0f}" if case.centre else ""
    return (
        f"NormOverRanks.apply(x, {case.eps:g}, group), with {case.sizes} samples on the ranks, so "
        f"that x is (samples{shape}){far},"
    )


SQUARES = "dist.all_reduce(squares, group=group)"
BACK = "dist.all_reduce(sums, group=ctx.group)"
MEAN = "mean = sums[:-1] / count"
CENTRED = "squares = centred.square().sum(axes)"
GRAD = "grad - of_grad - x_hat * of_product"
ADD = "Add up sums and counts over the ranks, and divide only then."
WEIGH = f"A mean of the ranks' means has to be weighed by their counts. {ADD}"
AVERAGED = (
    "own_mean = x.mean(axes); mean = own_mean.clone(); dist.all_reduce(mean, group=group); "
    "mean /= dist.get_world_size(group)"
)
DIFFERENCES = "Sum the squared differences from the mean of all ranks, and all_reduce these sums."
FORMULA = "The gradient of x is scale * (grad - mean(grad) - x_hat * mean(grad * x_hat))."
EMPTY = (
    "A rank's batch may be empty, and such a batch has no mean and no variance of its own.",
    f"Sums over an empty batch are 0. {ADD}",
)
OF_PARTS = {
    "x_hat": "Subtract the mean of all ranks and multiply by (variance + eps).rsqrt().",
    "mean": WEIGH,
    "variance": DIFFERENCES,
    "the count": "Count x.numel() // x.shape[1] numbers on each rank, and return their sum.",
    "the gradient of x": FORMULA,
    ONE_MESSAGE: "Join both sums with torch.cat, and all_reduce them together.",
}
over_ranks = Spec(
    todo="7.6",
    truth=norms.NormOverRanks,
    layouts=cases.THREE,
    cases=rows,
    observe=norm_seen,
    tell=tell_rows,
    advice={
        "": ADD,
        **{f"{name}{of}": text for name, text in OF_PARTS.items() for of in CALLS},
        **{f"{name}{of}{FAR}": text for name, text in OF_PARTS.items() for of in CALLS},
    },
    reasons={
        "returned an incorrect number of gradients": (
            "backward returns an entry for each argument of forward after ctx.",
            "Return the gradient of x, and None for eps and for the group.",
        ),
        "save_for_backward can only save": (
            "save_for_backward takes only tensors, and a group is none.",
            "Keep the group as an attribute: write ctx.group = group.",
        ),
        "'NoneType' object": (
            "all_reduce works in place, and returns None.",
            "Call it on a line of its own, and use the tensor afterwards.",
        ),
        "'NormOverRanksBackward' object has no attribute": (
            "backward asks ctx for something that forward did not keep there.",
            "Write ctx.group = group in forward, and use save_for_backward for tensors.",
        ),
        "not enough values to unpack": (
            "ctx.saved_tensors holds only what forward gave to save_for_backward.",
            "Call ctx.save_for_backward with all tensors that backward needs.",
        ),
        "view size is not compatible": (
            "x and its gradient may be strided, and then view cannot join their dimensions.",
            "Sum over several dimensions at once, as in x.sum(axes), or use reshape.",
        ),
        "must match the size of tensor": (
            "A vector of one number per channel does not fit a tensor (B, C, ...).",
            "Use _per_channel(vector, x), which makes it (1, C, 1, ...).",
        ),
        "more than 1 value per channel": EMPTY,
        "Expected reduction dim": EMPTY,
    },
    hints=(
        "forward: one all_reduce adds the sums and the count of all ranks, which gives the mean. "
        "A second one adds the squared differences from that mean, which gives the variance.",
        "backward: every x moves the mean and the variance of all ranks. So the formula needs the "
        "mean of grad and the mean of grad * x_hat, both over the batches of all ranks.",
        "Sum over all axes but 1, and join the sums and the count with torch.cat. In backward "
        "all_reduce torch.cat([grad.sum(axes), (grad * x_hat).sum(axes)]) and divide it by the "
        f"count. {FORMULA}",
    ),
    mistakes="""
        dist.all_reduce(sums, group=group) => pass
        {SQUARES} => pass
        {BACK} => pass :: Each rank normalises by the statistics of its own batch. | {ADD}
        {MEAN} => {AVERAGED}
        {CENTRED} => squares = (x - _per_channel(own_mean, x)).square().sum(axes) / own_count
        variance = squares / count => variance = squares / dist.get_world_size(group) ::
            The ranks' means and variances are averaged, although their batches differ in size.
        {MEAN} => {AVERAGED} ::
            The ranks' means are averaged, although their batches differ in size. | {WEIGH}
        {CENTRED} => squares = x.var(axes, correction=0)
        variance = squares / count => variance = squares / dist.get_world_size(group) ::
            The ranks' own variances are averaged. That ignores the size of their batches, and the
            differences between their means. | {DIFFERENCES}
        {CENTRED} => squares = x.var(axes, correction=0)
        {SQUARES} => pass
        variance = squares / count => variance = squares ::
            The variance is that of this rank's batch alone.
        {CENTRED} => squares = (x - _per_channel(x.mean(axes), x)).square().sum(axes) ::
            The differences are taken from each rank's own mean, so the variance lacks the
            differences between the ranks.
        {CENTRED} => squares = x.square().sum(axes)
        variance = squares / count => variance = squares / count - mean.square() ::
            The square of the mean is subtracted from the mean of the squares, which leaves no
            correct digits far from 0.
        squares / count => squares / (count - 1) ::
            The variance is divided by count - 1. | Divide by the count: the batch is all there is.
        (variance + eps).rsqrt() => 1 / (variance.sqrt() + eps) ::
            eps is added to the standard deviation. | Add eps to the variance, under the root.
        {GRAD} => grad ::
            The mean and the variance are treated as constants in backward. | {FORMULA}
        {GRAD} => grad - of_grad :: backward lacks the part of the variance.
        {BACK} => pass :: backward adds up the gradients of this rank only. | Both means are taken
            over the batches of all ranks: all_reduce the two sums.
        sums / count).chunk => sums / max(1, grad.numel() // grad.shape[1])).chunk ::
            backward divides the sums of all ranks by the count of this rank.
        * _per_channel(scale, grad), None, None => , None, None ::
            backward does not multiply by the scale. | {FORMULA}
        ctx.save_for_backward(x_hat, scale, count) => NormOverRanks.kept = x_hat, scale, count
        ctx.saved_tensors => NormOverRanks.kept :: Tensors that are kept on the class belong to the
            last call only. | Keep the tensors on ctx, which belongs to one call.
    """,
    module=globals(),
)
