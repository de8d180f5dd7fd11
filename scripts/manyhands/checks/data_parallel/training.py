"""Exercise 5.7: a whole training loop. AdamW hides a factor in its gradients almost wholly, so
gradients are compared as well as weights."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from manyhands.checks.engine import cases
from manyhands.checks.engine.spec import Place, Spec
from manyhands.checks.engine.values import Malformed, kind
from manyhands.data_parallel import loops

START = "Call broadcast_state(model, group) before the loop."
SHARE = "inputs[rank::world_size], and the targets in the same way; both numbers are the group's."
LOOP = "Forward, loss, zero_grad, backward, average_gradients(model, group), step."
END = "At the end rank 0 returns model.state_dict(), each tensor on the CPU; the others return {}."
AVERAGE = "average_gradients(model, group=group)"
CLEAR = "optimizer.zero_grad()"
BACK = "loss.backward()"
STEP = "optimizer.step()"
MADE = "torch.optim.AdamW(model.parameters(), learning_rate)"
STATE = "{name: value.cpu() for name, value in model.state_dict().items()}"
CLEARED = f"{CLEAR}\n        {BACK}"
LOSS = "mse_loss(outputs, targets[rank::world_size]"
AVERAGED = f"{AVERAGE}\n        {STEP}"


class Training(NamedTuple):
    """One call: batches of n x share samples each, and the learning rate."""

    shares: tuple[int, ...]  # of each batch, for one rank
    rate: float
    seed: int


def net() -> nn.Module:
    """A small network in float64 with a buffer; no two parameters have one shape."""
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    model.register_buffer("offset", torch.randn(5, dtype=torch.float64))
    return model


def trainings(n: int) -> list[Training]:
    """No batch, one, and several of different size."""
    return [
        Training((), 0.01, cases.draw_seed()),
        Training((2,), 0.02, cases.draw_seed()),
        Training((4, 1, 2), 0.05, cases.draw_seed()),
    ]


def batches_of(case: Training, n: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs (B, 3) and targets (B, 2), the same on all ranks of a group."""
    draw = cases.generator(case.seed, n)
    found = []
    for share in case.shares:
        inputs = torch.randn(n * share, 3, dtype=torch.float64, generator=draw)
        found.append((inputs, torch.stack([inputs.sum(1), inputs.prod(1)], 1) + 1))
    return found


def trained(answer, case: Training, place: Place) -> dict:
    """What the optimizer is given in each step, what comes back, and who read which samples."""
    batches = batches_of(case, place.n)
    given = [(inputs.clone(), targets.clone()) for inputs, targets in batches]
    model = cases.build(case.seed + 7 * place.rank, net)
    read: list[Tensor] = []
    model.register_forward_pre_hook(lambda _, args: read.append(args[0].detach().clone()))
    steps: list[dict] = []
    noted = register_optimizer_step_pre_hook(lambda optimizer, *_: steps.append(_note(optimizer)))
    try:
        back = answer(model, cases.read_once(given), case.rate, **place.options)
    finally:
        noted.remove()
    mine = [_places(part, batches) for part in read]
    everybody: list = [None] * place.n
    dist.all_gather_object(everybody, mine, group=place.group)
    return {
        **_read_seen(everybody, mine, case),
        **_steps_seen(steps, len(case.shares)),
        **_returned(back),
        "the model is in train mode, as it was": model.training,
        "requires_grad is as it was": all(p.requires_grad for p in model.parameters()),
        "the batches are as they were": all(
            torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
            for a, b in zip(given, batches, strict=True)
        ),
    }


def _note(optimizer: torch.optim.Optimizer) -> dict:
    """The parameters that an optimizer holds, told apart by their shapes, and their gradients."""
    held = {tuple(p.shape): p for group in optimizer.param_groups for p in group["params"]}
    wanted = [(shape, held[shape]) for shape in sorted(held) if held[shape].requires_grad]
    return {
        "optimizer": type(optimizer).__name__,
        "learning rate": float(optimizer.param_groups[0]["lr"]),
        "the weights": [param.detach().clone() for _, param in wanted],
        "the gradients": [p.grad if p.grad is None else p.grad.clone() for _, p in wanted],
    }


def _places(part: Tensor, batches: list) -> tuple[int, list[int]]:
    """The batch that a model's input comes from, and the samples' places in it; else -1."""
    for number, (inputs, _) in enumerate(batches):
        places = [(inputs == row).all(1).nonzero().flatten().tolist() for row in part]
        if all(places):
            return number, [place[0] for place in places]
    return -1, []


def _read_seen(everybody: list, mine: list, case: Training) -> dict:
    """The samples of each batch, dealt out to the ranks, each once."""
    seen: dict = {
        "batches that the model is called with": [number for number, _ in mine],
        "samples that this rank reads": [len(places) for _, places in mine],
    }
    for number in range(len(case.shares)):
        read = [p for parts in everybody for at, places in parts if at == number for p in places]
        seen[f"samples of batch {number} that all ranks read, sorted"] = sorted(read)
    return seen


def _steps_seen(steps: list[dict], wanted: int) -> dict:
    seen: dict = {"number of steps": len(steps)}
    for number in range(wanted):
        step = steps[number] if number < len(steps) else {}
        for name in ("optimizer", "learning rate", "the weights", "the gradients"):
            seen[f"{name} at step {number + 1}"] = step.get(name)
    return seen


def _returned(back: object) -> dict:
    if not isinstance(back, dict) or not all(isinstance(v, Tensor) for v in back.values()):
        what = kind(back) if not isinstance(back, dict) else "a dict with other values than tensors"
        why = "Rank 0 returns a dict of tensors by name, and the other ranks return {}."
        raise Malformed(what, why, END)
    return {
        "names that come back": sorted(back),
        "weights that come back": [back[name].detach().clone() for name in sorted(back)],
        "what comes back is outside autograd": not any(v.requires_grad for v in back.values()),
    }


train_replicas = Spec(
    todo="5.7",
    truth=loops.train_replicas,
    layouts=cases.TWO,
    cases=trainings,
    observe=trained,
    independent=True,
    tell=lambda case: f"train_replicas with {len(case.shares)} batch(es)",
    advice={
        "samples that this rank reads": SHARE,
        "names that come back": END,
        "weights that come back": END,
        "": LOOP,
    },
    hints=(
        "Before the loop come broadcast_state(model, group), and then an AdamW over "
        "model.parameters().",
        "This rank's samples are inputs[rank::world_size], and the targets are cut in the same "
        "way; both numbers are those of the group.",
        "In the loop: forward, loss, zero_grad, backward, average_gradients(model, group), step. "
        "At the end rank 0 returns model.state_dict(), each tensor on the CPU, and the others "
        "return {}.",
    ),
    mistakes=r"""
        broadcast_state(model, group) => pass ::
            The replicas do not start with rank 0's weights. | {START}
        {AVERAGE} => pass :: The gradients are not averaged before the step. | {LOOP}
        {AVERAGED} => {STEP}\n        {AVERAGE} :: The gradients are averaged after the step.
        {CLEAR} => pass ::
            The gradients of the steps before are still in there: backward adds to .grad.
        {AVERAGE} => {AVERAGE}; {CLEAR} :: The gradients are cleared again before the step.
        {CLEARED} => {BACK}\n        {CLEAR} if len(optimizer.state) % 2 else None ::
            The gradients of the steps before are still in there: backward adds to .grad.
        inputs[rank::world_size] => inputs
        targets[rank::world_size] => targets ::
            Every rank computes the whole batch, so no work is shared. | {SHARE}
        targets[rank::world_size] => targets[rank * len(outputs) :][: len(outputs)] ::
            Inputs and targets are cut differently.
        {LOSS}) => {LOSS}, reduction="sum") ::
            The loss is a sum, and the mean was asked for. | Leave the reduction as it is.
        {AVERAGE} => {AVERAGE}; [p.grad.mul_(world_size) for p in model.parameters()] ::
            The gradients are sums over the ranks, not means. | average_gradients takes the mean.
        {MADE} => torch.optim.AdamW(model.parameters()) :: The learning rate is AdamW's own default.
            | Make torch.optim.AdamW(model.parameters(), learning_rate) once, before the loop.
        {MADE} => torch.optim.AdamW(model.parameters(), learning_rate * world_size) ::
            The learning rate is multiplied by the number of ranks, and the batch is the same as
            that of one process.
        {MADE} => torch.optim.SGD(model.parameters(), learning_rate) :: The optimizer is not AdamW.
        {STATE} if rank == 0 else {} => {STATE} ::
            Every rank returns the weights, and one copy is enough for a file. | {END}
        {STATE} if rank == 0 => {name: value.detach().cpu() for name, value in
            model.named_parameters()} if rank == 0 :: Parameters alone are no state: the buffers are
            missing. | Take the tensors from model.state_dict().
    """,
    module=globals(),
)
