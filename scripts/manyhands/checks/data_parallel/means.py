"""Exercises 5.5 and 5.6: replicas that start equal, and gradients that are averaged."""

from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from manyhands.checks.engine import cases
from manyhands.checks.engine.spec import Place, Spec
from manyhands.checks.engine.tables import reasons
from manyhands.data_parallel import replicas
from manyhands.instruments.ledger import Ledger

REASONS = reasons(
    """
    two ranks called the same collective with tensors of different :: Two ranks send tensors of
        different size or type in the same call. | Go through one list, in the same order on every
        rank, and send each tensor in its own type. A set has no order.
    can't be cast to the desired output type :: pack puts tensors of one type into a vector, and
        here are several types. | Use one message for each tensor, or one vector for each type.
""",
    globals(),
)


ONE_PIECE = (
    "A tensor whose elements do not lie side by side was sent as if they did: on CPUs the message "
    "takes the memory from its first element on, without an error."
)


class Mixed(nn.Module):
    """Parameters of several types and forms, each drawn anew, and buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()

        def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            return nn.Parameter(torch.randint(-99, 100, shape).to(dtype))

        self.matrix = drawn(3, 4)
        self.turned = nn.Parameter(torch.randint(-99, 100, (4, 2)).float().t())
        self.number = drawn()
        self.wide = nn.Parameter(torch.rand(5, dtype=torch.float64))  # more digits than float32
        self.small = drawn(3, dtype=torch.bfloat16)
        self.frozen = drawn(6)
        self.frozen.requires_grad_(False)
        self.unused = drawn(2)
        self.norm = nn.LayerNorm(3)
        nn.init.uniform_(self.norm.weight)
        nn.init.uniform_(self.norm.bias)
        self.tied = self.matrix
        self.twin = nn.Linear(4, 3, bias=False)
        self.twin.weight = self.matrix  # tied across two modules
        self.register_buffer("mean", torch.rand(3))
        self.register_buffer("count", torch.randint(2**30, 2**40, ()))  # too long for float32
        self.register_buffer("mask", torch.randint(2, (4,)) == 1)
        self.register_buffer("column", torch.rand(3, 2)[:, 0])
        self.register_buffer("scratch", torch.rand(7), persistent=False)


class Replica(NamedTuple):
    """One call on models that differ by rank. `part`: which of their tensors are there."""

    seed: int
    part: str = "all"


class Autograd(Ledger):
    """Notes whether a message carries a tensor that autograd watches."""

    def __init__(self) -> None:
        super().__init__()
        self.watched = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # torch's own signature
        if func.namespace == "c10d" and torch.is_grad_enabled():
            tensors = [t for arg in args if isinstance(arg, list) for t in arg]
            self.watched |= any(isinstance(t, Tensor) and t.requires_grad for t in tensors)
        return super().__torch_dispatch__(func, types, args, kwargs)


def replica(seed: int, part: str) -> nn.Module:
    """A model with all kinds of tensors, or with some of them."""
    model = cases.build(seed, Mixed)
    if part == "one type":
        model = model.double()
    if part == "small":
        model = nn.Linear(2, 1)
        nn.init.constant_(model.weight, seed % 1000)
    if part == "buffers":
        for module in model.modules():
            module._parameters.clear()
    return model


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, also those that state_dict() leaves out."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def copies(tensors: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """What they hold now."""
    return {name: t if t is None else t.detach().clone() for name, t in tensors.items()}


def _order_of_a_set(model: nn.Module, rank: int):
    """A set's order is by chance; here it is another one on each rank."""
    places = {id(tensor): i for i, tensor in enumerate(tensors_of(model).values())}
    order = lambda t: abs(places.get(id(t), id(t)) - 15 * (rank % 2))  # noqa: E731
    return mock.patch.object(Tensor, "__hash__", order)


# ---- 5.5 ------------------------------------------------------------------------------------

ALL = "Go through module.parameters() and module.buffers()."
DETACHED = "Broadcast tensor.detach(): it shares the memory, and autograd does not watch it."
LIST = "[*module.parameters(), *module.buffers()]"
SEND = "dist.broadcast(whole, group=group, group_src=0)"
COPY = "tensor.detach().copy_(whole)"


def starts(n: int) -> list[Replica]:
    """A small model, one of all kinds of tensors, and one of buffers alone."""
    return [Replica(cases.draw_seed(), part) for part in ("small", "all", "buffers")]


def started(answer, case: Replica, place: Place) -> dict:
    """The tensors after the call, and whether they are still the same objects in one memory."""
    model = replica(case.seed + 1 + place.job_rank, case.part)
    for param in model.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    before = {name: (id(t), t.data_ptr(), t.requires_grad) for name, t in tensors_of(model).items()}
    with Autograd() as wire, _order_of_a_set(model, place.rank):
        answer(model, **place.options)
    after = tensors_of(model)
    return {
        **{f"the value of {name}": tensor for name, tensor in copies(after).items()},
        "the model holds the same tensors, in the same memory": all(
            before[name][:2] == (id(t), t.data_ptr()) for name, t in after.items()
        ),
        "requires_grad is as it was": all(
            before[n][2] == t.requires_grad for n, t in after.items()
        ),
        "the gradients are as they were": all(
            param.grad is None or bool((param.grad == 1).all()) for param in model.parameters()
        ),
        "no message carries a tensor that autograd watches": not wire.watched,
    }


def say_replica(name: str) -> Callable:
    """The words for a case."""
    words = {
        "small": "a small model",
        "all": "a model of all kinds of tensors",
        "one type": "a model of all kinds of tensors in float64",
        "buffers": "a model without parameters",
    }
    return lambda case: f"{name} of {words[case.part]}"


broadcast_state = Spec(
    todo="5.5",
    truth=replicas.broadcast_state,
    layouts=cases.THREE,
    cases=starts,
    observe=started,
    tell=say_replica("broadcast_state"),
    reasons=REASONS,
    advice={"no message carries a tensor that autograd watches": DETACHED, "": ALL},
    hints=(
        "A model's state is its parameters and its buffers.",
        "dist.broadcast(tensor, src=0) overwrites `tensor` on every rank with rank 0's. In a group "
        "the first rank is group_src=0.",
        "Autograd watches a parameter, and a message must not go past it: broadcast "
        "tensor.detach(), which shares the parameter's memory.",
    ),
    mistakes="""
        {LIST} => [*module.parameters()] ::
            The buffers stay different, such as the running statistics of batch norm. | {ALL}
        {LIST} => [*module.buffers()] :: The parameters stay different.
        {LIST} => [*(p for p in module.parameters() if p.requires_grad), *module.buffers()] ::
            The frozen parameters stay different. They need no gradient, but they are part of the
            model. | Do not filter by requires_grad.
        {LIST} => module.state_dict().values() :: Buffers that were registered with persistent=False
            stay different, and state_dict() leaves those out. | {ALL}
        {LIST} => [tensor for tensor in {LIST} if tensor.is_floating_point()] ::
            Only tensors of floating-point numbers are sent.
        {COPY} => pass :: A tensor whose elements do not lie side by side keeps its own values: the
            message went into a copy. | Copy the result back: {COPY}.
        whole = tensor.detach().contiguous() => whole = tensor.detach() ::
            {ONE_PIECE} | whole = tensor.detach().contiguous(), and copy the result back.
        whole = tensor.detach().contiguous() => whole = tensor.detach().clone()
        {COPY} => pass :: Every rank still has its own values: the message went into a copy. | Copy
            the result back: {COPY}.
        whole = tensor.detach().contiguous() => whole = tensor.contiguous() ::
            Autograd watches the tensor that is sent, and torch warns of that later. | {DETACHED}
        {COPY} => tensor.data = whole :: The tensors are in another memory than before, and what
            shared the old one is cut off. | Overwrite in place, with copy_().
        {SEND} => dist.all_reduce(whole, group=group) :: The ranks' values are added up, and rank
            0's were asked for. | dist.broadcast sends them.
        group_src=0 => group_src=dist.get_world_size(group) - 1 ::
            The values are those of the last rank. | group_src=0 names the first rank of the group.
        group_src=0 => src=0 ::
            The root is counted over the whole job, and that rank need not be in the group.
    """,
    module=globals(),
)

# ---- 5.6 ------------------------------------------------------------------------------------

SUMS = "dist.all_reduce(whole, group=group)"
MEAN = "whole / dist.get_world_size(group)"
PUT = f"param.grad.copy_({MEAN})"
WHOLE = "whole = param.grad.contiguous()"
SKIPS = "if param.grad is not None:"
ZEROS = "torch.zeros_like(param)"
IN_PLACE = "Change param.grad in place, or assign the mean to it."
DIVIDE = "Divide the sum by dist.get_world_size(group), on every rank."
ONCE = "Go through module.parameters(): it names each parameter once."


def gradients(n: int) -> list[Replica]:
    """A small model, and models of all kinds of tensors in one type."""
    return [Replica(cases.draw_seed(), part) for part in ("small", "one type", "one type")]


def with_gradients(case: Replica, rank: int) -> nn.Module:
    """A model with whole numbers as gradients, which differ by rank; an unused one has none."""
    model = replica(case.seed + rank, case.part)
    for number, (name, param) in enumerate(model.named_parameters()):
        if param.requires_grad and name != "unused":
            draw = cases.generator(case.seed, rank, number)
            grad = cases.values(param.numel() or 1, draw, param.dtype).view(param.shape)
            if name == "matrix" and rank % 2 == 0:
                grad = grad.t().contiguous().t()  # in another order than on the other ranks
            if name == "wide":
                grad = torch.stack([grad, grad], dim=1)[:, 0]  # a column of a matrix
            param.grad = grad
    return model


def averaged(answer, case: Replica, place: Place) -> dict:
    """The gradients after the call, the weights, and how much was sent."""
    model = with_gradients(case, place.job_rank)
    before = copies(tensors_of(model))
    num_bytes = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    with Autograd() as wire, _order_of_a_set(model, place.rank):
        answer(model, **place.options)
    sent = sum(entry.nbytes for entry in wire.entries if entry.op == "all_reduce")
    return {
        **_gradients_seen(model),
        "the weights and buffers are as they were": _are_same(tensors_of(model), before),
        "no more is all-reduced than the gradients": sent <= num_bytes,
        "no message carries a tensor that autograd watches": not wire.watched,
        "besides": sent,
    }


def _gradients_seen(model: nn.Module) -> dict:
    return {f"the gradient of {n}": grad for n, grad in cases.gradients_of(model).items()}


def _are_same(now: dict[str, Tensor], before: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, before[name]) for name, tensor in now.items())


average_gradients = Spec(
    todo="5.6",
    truth=replicas.average_gradients,
    layouts=cases.THREE,
    cases=gradients,
    observe=averaged,
    tell=say_replica("average_gradients"),
    advice={"": f"For each gradient that is not None: {WHOLE}, all_reduce, {PUT}."},
    hints=(
        "dist.all_reduce(tensor) leaves the sum over all ranks in `tensor`, on every rank.",
        "The mean is the sum divided by dist.get_world_size(group).",
        "Frozen and unused parameters have .grad None: skip those. A gradient whose elements do "
        "not lie side by side is sent as param.grad.contiguous(), and the mean is copied back.",
    ),
    mistakes=r"""
        {MEAN} => whole :: The gradients are sums over the ranks, not means. | {DIVIDE}
        {MEAN} => {MEAN} ** 2 :: The sum is divided by the number of ranks twice.
        {MEAN} => whole // dist.get_world_size(group) ::
            The means are rounded down to whole numbers. | Divide with /.
        {MEAN} => {MEAN} if dist.get_rank(group) == 0 else whole ::
            Rank 0 holds the mean, and the others hold the sum. | {DIVIDE}
        {WHOLE} => whole = param.grad ::
            {ONE_PIECE} | {WHOLE}, and copy the mean back: param.grad.copy_(...).
        {SUMS} => dist.reduce(whole, group=group, group_dst=0) :: Rank 0 holds the mean, and the
            others do not: dist.reduce gives the sum to one rank. | all_reduce gives it to all.
        {PUT} => pass :: The mean is not written to param.grad. It holds the sum, or what it held
            before where its elements do not lie side by side. | {IN_PLACE}
        {SUMS} => dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group) ::
            The largest of the gradients is taken, not the sum. | The default operation is SUM.
        {SUMS} => dist.all_reduce(param.detach(), group=group) ::
            The weights are summed up, not the gradients. | all_reduce param.grad.
        {SKIPS} => if param.requires_grad: :: A parameter that is frozen, or that was not used, has
            no gradient: its .grad is None. | {SKIPS}
        module.parameters() => [p for _, p in module.named_parameters(remove_duplicate=False)] ::
            The gradient of a tied parameter is averaged twice, which costs a message. | {ONCE}
        {SKIPS} => param.grad = {ZEROS} if param.grad is None else param.grad\n        if True: ::
            Parameters that had no gradient have one now. | {SKIPS}
    """,
    reasons=REASONS,
    module=globals(),
)
