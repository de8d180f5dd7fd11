"""Checks of lesson 05. Truth is one process on the whole batch, or the statement in the docstring.

Each check runs the learner's code on ranks, brings home what was seen, and then compares it with
the mistakes that people make most, so that the verdict can name the one at hand. AdamW hides a
factor in its gradients almost wholly, so gradients are compared at the step, and weights after it.
"""

import random
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from manyhands.checks import Lesson, Wrong, place, ranks, told
from manyhands.checks.shared import (
    Probe,
    build,
    check_group,
    close,
    gradients_of,
    log_all_reduces,
    run_backward,
    token_batch,
    waits,
)
from manyhands.data_parallel.loops import CHANGES, STEPS
from manyhands.data_parallel.replicas import make_buckets
from manyhands.instruments.ledger import Entry, Ledger, calls
from manyhands.ranks.failures import RankFailed, RanksHung, where

lesson = Lesson("data_parallel")
hint, summary, ready, keep = lesson.hint, lesson.summary, lesson.ready, lesson.keep


# ---- what goes wrong on a rank --------------------------------------------------------------

Reasons = dict[str, tuple[str, str]]  # words of an error -> what it smells of, what to try
REASONS: Reasons = {
    "two ranks called the same collective with tensors of different": (
        "the ranks send their tensors in different order (a set has none), or other tensors",
        "go through one list, in the same order on every rank",
    ),
    "expected a non-empty list of Tensors": (
        "there was nothing to pack: a generator can be gone through only once",
        "make it a list: [... for param in ...]",
    ),
    "can't be cast to the desired output type": (
        "pack puts tensors of one type into a vector; here are several types",
        "one message for each tensor, or one vector for each type",
    ),
    "requires grad is being used in an in-place": (
        "autograd does not let a parameter be changed under its eyes",
        "write into param.detach(), or inside `with torch.no_grad():`",
    ),
    "'NoneType' object has no attribute 'split'": (
        "all_reduce works in place and returns None",
        "unpack the vector that was all-reduced",
    ),
}


class Refused(Exception):
    """Stops a rank at a call that nobody would answer; holds seen, smell and hint."""


def _stop(*told: str) -> None:
    raise Refused(" | ".join(told))


def _run(fn: Callable, world_size: int, answer, *args: object, **options: object) -> list:
    """`ranks`; a failure on a rank is told with this lesson's reasons, `reasons` before others."""
    reasons = {**options.pop("reasons", {}), **REASONS}
    try:
        results = ranks(fn, world_size, answer, *args, **options)
    except RankFailed as failed:
        if failed.failure.error == "NotImplementedError":
            raise
        raise Wrong(*_explained(failed, answer, reasons)) from None
    if None in [result if result is None else 0 for result in results]:
        raise Wrong("a rank left by sys.exit()", "", "let the function end, or return")
    return results


def _explained(failed: RankFailed, answer, reasons: Reasons) -> tuple[str, str, str]:
    if failed.failure.error == "Refused":
        seen, smell, advice = failed.failure.message.split(" | ")
        return seen + place(failed.failure, answer), smell, advice
    seen, smell, advice = told(failed, answer)
    if isinstance(failed, RanksHung):
        lines = [where(stack[-1]) for stack in failed.stacks.values() if stack]
        if failed.world_size == 1:
            smell, advice = "a loop without an end", "what ends it?"
        elif lines and not failed.finished and all("recv(" in line for line in lines):
            smell = "all ranks wait to receive, so nobody gets to send"
            advice = "start the send first (dist.isend), then receive, then wait"
        return seen, smell, advice
    known = [why for words, why in reasons.items() if words in failed.failure.message]
    return (seen, *known[0]) if known else (seen, smell, advice)


# ---- 5.1 ------------------------------------------------------------------------------------

ORDER = (  # a step, one that has to come later, and why; all other orders are free
    ("E", "L", "weights have to be there before they can be copied"),
    ("E", "B", "the program has to start before it can read"),
    ("B", "O", "what is decoded has to be read first"),
    ("O", "J", "a batch is stacked from samples that are decoded"),
    ("J", "F", "one copy moves the whole batch, so it has to be stacked first"),
    ("F", "I", "the GPU computes with what is in its own memory"),
    ("L", "I", "forward computes on the GPU, with weights in GPU memory"),
    ("I", "M", "forward goes from the first layer to the last"),
    ("M", "A", "the loss compares the last layer's output with the targets"),
    ("A", "G", "backward starts from the loss"),
    ("G", "K", "backward reaches the last layer first: the chain rule starts at the loss"),
    ("K", "C", "the optimizer steps when all gradients are there"),
    ("C", "H", "AdamW makes the step out of its moments, so it updates them first"),
    ("A", "D", "a loss has to be computed before it can be copied"),
    ("H", "N", "the next batch comes after the step"),
    ("D", "N", "this batch's loss is copied before the loop goes on"),
)


@lesson.exercise(
    "5.1",
    "Start with the program (E) and end with control going back to the loop (N).",
    "Four groups: get the batch to the GPU (B, O, J, F); forward and loss; backward; optimizer. "
    "Two copies stand beside them: that of the weights, and that of the loss.",
    "Backward runs through the layers in the opposite order of forward. The weights may go to the "
    "GPU at any time before forward, the loss to the CPU at any time after it is computed.",
)
def order_of_steps(answer) -> None:
    """All 15 letters, and no step before one that it needs."""
    (given,) = _run(_given, 1, answer, join=False)
    if not isinstance(given, str | list | tuple):
        raise Wrong(f"you returned {given!r}", "", 'return the 15 letters as one text: "E..."')
    for letter in given:
        if letter not in STEPS:
            small = isinstance(letter, str) and letter.upper() in STEPS
            smell = "the letters are capital letters" if small else "each entry is one letter"
            raise Wrong(f"{letter!r} is none of the 15 steps", smell, f"take {''.join(STEPS)}")
    for letter, text in STEPS.items():
        if (count := list(given).count(letter)) != 1:
            told = "is missing" if count == 0 else f"stands there {count} times"
            raise Wrong(f"step {letter} ({text}) {told}", "", "use each of the 15 letters once")
    place = {letter: index for index, letter in enumerate(given)}
    for first, later, reason in ORDER:
        if place[first] > place[later]:
            raise Wrong(
                f"you put {later} ({STEPS[later]}) before {first} ({STEPS[first]})",
                reason,
                "ask of each step what it needs, and which step makes that",
            )


def _given(answer) -> object:
    return answer()


# ---- 5.2 ------------------------------------------------------------------------------------

LURES = {  # of a change: wrong steps -> what they smell of; the steps left out are right
    "share": {
        "OJFI": "a rank that drops samples after reading them has still read the whole batch",
        "EL": "every rank holds the whole model; only the samples are dealt out",
        "N": "the next batch is another one; this batch's samples are touched long before",
        "MAGKCHD": "by then each rank has already computed with its samples",
    },
    "equal": {
        "E": "that is when the weights come to differ; which step has to wait until they are equal",
        "BOJF": "samples can be read before the weights are equal",
        "MAGKCHDN": "by then the first layer has already computed with unequal weights",
    },
    "mean": {
        "GK": "a message may start there, but backward does not wait for it; who has to, first",
        "ELBOJFIMA": "at that point there is no gradient yet",
        "H": "by then the moments are already made from this rank's own gradients",
        "DN": "the mean is needed by the step of the optimizer",
    },
    "once": {
        "A": "each rank still computes the loss of its own samples, and waits for nobody",
        "ELBOJFIM": "at that point there is no loss yet",
        "GKCHN": "that step needs no printed loss; each rank's own loss is enough for it",
    },
}


@lesson.exercise(
    "5.2",
    "For each change ask: what does it need, and which step is the first to use what it makes?",
    "A change stands as late as it may: right before the first step that cannot do without it.",
    "Samples are first touched by B; weights are first used by forward; gradients are first used "
    "by the optimizer; the loss is used where it is printed.",
)
def steps_that_change(answer) -> None:
    """One letter for each of the four changes."""
    (given,) = _run(_given, 1, answer, join=False)
    if not isinstance(given, dict) or set(given) != set(CHANGES):
        raise Wrong(
            f"you returned {given!r}",
            "the answer is a dict with the four names of CHANGES",
            f"return {{{', '.join(f'{name!r}: ...' for name in CHANGES)}}}",
        )
    for name, letter in given.items():
        if not isinstance(letter, str) or letter not in STEPS:
            small = isinstance(letter, str) and letter.upper() in STEPS
            several = (
                "only the first of the steps" if isinstance(letter, str | list | tuple) else ""
            )
            smell = "the letters are capital letters" if small else several
            raise Wrong(f"{name!r} has {letter!r}", smell, "give one letter, such as 'E'")
        for letters, smell in LURES[name].items():
            if letter in letters:
                raise Wrong(
                    f"{name!r} ({CHANGES[name]}): not {letter} ({STEPS[letter]})",
                    smell,
                    "go through the 15 steps in order, and stop at the first that would come out "
                    "different, or that has to wait",
                )


# ---- messages with a parameter server -------------------------------------------------------


BY_GROUP = "use group_dst=... and group_src=..."
PLACES = (
    "server and workers are counted inside the group, and the server need not be 0; dst= and src= "
    "count over the whole job"
)


class Wire(Ledger):
    """A ledger that lets through what worker and server are to say to each other, and no more.

    Args:
        partners: numbers in the job of those that this rank may talk to.
        model: its trainable parameters together are one message.
        log: each call's name is added to it.
        sends_after: what has to be in `log` before this rank may send.
    """

    def __init__(
        self,
        partners: set[int],
        model: nn.Module,
        group: dist.ProcessGroup | None,
        log: list[str],
        sends_after: str = "",
    ) -> None:
        super().__init__()
        self.partners, self.model, self.log = partners, model, log
        self.sends_after, self.waited = sends_after, waits()
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.me = f"rank {dist.get_rank()} (of a group of ranks {list(self.ranks)})"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # torch's own signature
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.name().split("::")[1]
            op = next((op for op in ("send", "recv") if name.startswith(op)), name.rstrip("_"))
            self._look(self._entry(op, args, None))
            self.log.append(op)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _look(self, entry: Entry) -> None:
        """Stop here, before the call, since nobody may be there to answer it."""
        if entry.op not in ("send", "recv"):
            _stop(
                f"{self.me} calls {entry.op}",
                "a collective wants all ranks to take part; a worker and its server are two",
                "use dist.send and dist.recv",
            )
        does = "sends to" if entry.op == "send" else "receives from"
        if entry.ranks != self.ranks:
            _stop(
                f"{self.me} {does} a rank in the group {list(entry.ranks)}",
                "`group` is not passed on",
                "give every dist call group=group",
            )
        if entry.peer == dist.get_rank():
            seen = f"{self.me} {does} itself: rank {entry.peer}, not {sorted(self.partners)}"
            if len(self.ranks) < dist.get_world_size():
                _stop(seen, PLACES, f"{BY_GROUP}, and dist.get_rank(group)")
            _stop(seen, "the server is no worker", "leave out dist.get_rank(group)")
        if entry.peer is not None and entry.peer not in self.partners:
            _stop(
                f"{self.me} {does} rank {entry.peer} of the job, not {sorted(self.partners)}",
                PLACES,
                BY_GROUP,
            )
        if entry.op == "send" and self.sends_after and self.sends_after not in self.log:
            _stop(
                f"{self.me} sends weights, but the optimizer has not stepped",
                "the workers would go on with old weights; and it has to be the optimizer that is "
                "given, which holds the moments of all steps before",
                "optimizer.step() once all gradients are in, then send",
            )
        self._weigh(entry.nbytes, does)

    def _weigh(self, nbytes: int, does: str) -> None:
        params = list(self.model.parameters())
        trainable = [param.nbytes for param in params if param.requires_grad]
        if nbytes == sum(trainable):
            return
        smell, advice = "", "send and receive pack(...) of all trainable parameters"
        if nbytes in trainable:
            smell = "one message a parameter: each has its own waiting time"
        elif nbytes == 2 * sum(trainable):
            smell = "the numbers have become float64"
            advice = "keep the type of the parameters"
        elif nbytes == sum(param.nbytes for param in params):
            smell, advice = "frozen parameters travel along", "leave out those that need no grad"
        elif nbytes > sum(trainable):
            smell = "more travels than the trainable parameters, each once (frozen, tied, buffers?)"
        _stop(
            f"{self.me} {does} its partner {nbytes} bytes; the {len(trainable)} trainable "
            f"parameters together have {sum(trainable)}",
            smell,
            advice,
        )

    def count(self, num_each: int) -> None:
        """See that so many messages went out and came in, before the partner waits for more."""
        found = calls(self.entries)
        if self.entries and not self.waited:
            _stop(
                f"{self.me} waits for none of its messages",
                "isend and irecv return before the message is through",
                "keep what they return, and wait() before the vector is read or dropped",
            )
        for op, done in (("send", "sent"), ("recv", "received")):
            if found[op] != num_each:
                _stop(
                    f"{self.me} {done} {found[op]} message(s) in a step, not {num_each}",
                    "a worker sends its gradients once and receives weights once; the server does "
                    "so with each worker",
                    f"look for the missing dist.{op}" if found[op] < num_each else "once a step",
                )


TO_SERVER: Reasons = {
    "'NoneType' object has no attribute": (
        "frozen parameters have no gradient: their .grad is None",
        "leave them out: [p for p in module.parameters() if p.requires_grad]",
    ),
    "'int' object has no attribute": (
        "dist.recv fills the tensor that it is given, and returns the sender's number",
        "weights = pack(params), dist.recv(weights, ...), unpack(weights, params)",
    ),
    "should not be the same as the rank of the current": (PLACES, "use group_dst=server"),
    "not part of group": (PLACES, "use group_dst=server to send, group_src=server to receive"),
    "is not registered": (
        "a group of None stands for the whole job, and get_global_rank cannot look that up",
        "use group_dst=server and group_src=server, which need no such number",
    ),
}
TO_WORKERS: Reasons = {
    **TO_SERVER,
    "'NoneType' object has no attribute": (
        "a `param.grad` is None until something is put there",
        "param.grad = torch.empty_like(param), for those that are not frozen",
    ),
    "should not be the same as the rank of the current": (PLACES, "use group_dst=worker"),
    "not part of group": (PLACES, "use group_dst=worker to send, group_src=worker to receive"),
}


JOBS = (((0, 1, 2, 3), 2), ((1, 2, 3), 1), ((0, 3), 0))  # ranks of the job, and the server's


def _in_jobs(answer, seed: int, serve: Callable, work: Callable) -> list:
    """This rank's part in each of JOBS: `serve` or `work`, called with the group's own numbers."""
    seen = []
    for members, server in JOBS:
        group = dist.new_group(members) if len(members) < 4 else None
        if dist.get_rank() in members:
            act = serve if dist.get_rank() == server else work
            seen.append(act(answer, seed, members.index(server), group))
        else:
            seen.append(None)
    return seen


def _share(step: int, seed: int, server: int, group: dist.ProcessGroup | None) -> Tensor:
    """This worker's share of the batch of 12: the server has none."""
    workers = [rank for rank in range(dist.get_world_size(group)) if rank != server]
    return token_batch(seed + step)[:, workers.index(dist.get_rank(group)) :: len(workers)]


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def _packed(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def _one_process(seed: int, num_steps: int) -> list[dict]:
    """Gradients at each step and the state after it, of one process on the whole batches."""
    model, steps = build(seed), []
    optimizer = _adamw(model)
    for step in range(num_steps):
        before = _state(model)
        optimizer.zero_grad()
        run_backward(model, token_batch(seed + step))
        steps.append({"grads": gradients_of(model), "before": before})
        optimizer.step()
        steps[-1]["after"] = _state(model)
    return steps


# ---- 5.3 ------------------------------------------------------------------------------------


@lesson.exercise(
    "5.3",
    "Two messages: one dist.send with the gradients, then one dist.recv with the weights.",
    "pack([param.grad for param in params]) is the first; pack(params) makes room for the second.",
    "Inside a group ranks count from 0: dist.send(..., group=group, group_dst=server), and "
    "unpack(weights, params) copies what came into the model.",
)
def worker_step(answer) -> None:
    """Two steps with a server of the check's own, which is not rank 0; 3, 2 and 1 workers."""
    seed = random.randrange(10_000)
    jobs = seed, _serve_for_workers, _work_as_learner
    results = _run(_in_jobs, 4, answer, *jobs, reasons=TO_SERVER)
    truths = _one_process(seed, 2)
    for job, (members, server) in enumerate(JOBS):
        others = [rank for rank in members if rank != server]
        for step, truth in enumerate(truths):
            for index, rank in enumerate(others):
                seen = results[rank][job][step]
                case = f"step {step + 1} with {len(others)} worker(s), rank {rank}"
                arrived = results[server][job][step]["arrived"][index]
                _compare_sent(arrived, seen, len(others), case)
                _compare_taken(seen["after"], truth, case)


def _work_as_learner(answer, seed: int, server: int, group) -> list[dict]:
    model, steps = build(seed), []
    server_in_job = dist.get_global_rank(group or dist.group.WORLD, server)
    flags = [param.requires_grad for param in model.parameters()]
    for step in range(2):
        model.zero_grad()
        run_backward(model, _share(step, seed, server, group))
        own, weights = gradients_of(model), _packed(_trainable(model))
        with Wire({server_in_job}, model, group, []) as wire:
            _refuse_to_wait_first(wire)
            answer(model, server) if group is None else answer(model, server, group=group)
        wire.count(1)
        if flags != [param.requires_grad for param in model.parameters()]:
            _stop(f"{wire.me}: requires_grad has changed", "", "leave it as it is")
        steps.append({"own": own, "weights": weights, "after": _state(model)})
    return steps


def _refuse_to_wait_first(wire: Wire) -> None:
    """Stop a worker that waits for weights while the server still waits for its gradients."""
    original = getattr(dist.recv, "original", dist.recv)

    def recv(*args, **kwargs):
        if not calls(wire.entries)["send"]:
            _stop(
                f"{wire.me} waits for weights before it has sent its gradients",
                "the server waits for those gradients, so both would wait for ever",
                "send first, then receive",
            )
        return original(*args, **kwargs)

    recv.original = original
    dist.recv = recv


def _serve_for_workers(_, seed: int, server: int, group) -> list[dict]:
    """Be a correct server that keeps what each worker sent."""
    model, steps = build(seed), []
    optimizer, params = _adamw(model), _trainable(model)
    workers = [rank for rank in range(dist.get_world_size(group)) if rank != server]
    for _ in range(2):
        arrived = [torch.empty_like(_packed(params)) for _ in workers]
        for worker, vector in zip(workers, arrived, strict=True):
            dist.recv(vector, group=group, group_src=worker)
        parts = torch.stack(arrived).mean(0).split([param.numel() for param in params])
        for param, part in zip(params, parts, strict=True):
            param.grad = part.view_as(param)
        optimizer.step()
        time.sleep(0.02)  # a late answer: who does not wait for it reads too early
        for worker in workers:
            dist.send(_packed(params), group=group, group_dst=worker)
        steps.append({"arrived": arrived})
    return steps


def _compare_sent(arrived: Tensor, seen: dict, num_workers: int, case: str) -> None:
    """What the server received is this worker's own gradient, in the order of the parameters."""
    own = [grad for grad in seen["own"].values() if grad is not None]
    wanted = _packed(own)
    if torch.allclose(arrived, wanted, atol=1e-6):
        return
    told = (
        f"{case} sent a vector of norm {arrived.norm():.4f}, its gradient has {wanted.norm():.4f}"
    )
    if torch.allclose(arrived, seen["weights"], atol=1e-6):
        raise Wrong(told, "the weights were sent, not the gradients", "pack param.grad")
    for factor in (num_workers, num_workers + 1, 1 / num_workers):
        if torch.allclose(arrived * factor, wanted, atol=1e-6):
            raise Wrong(told, "the mean is the server's to take", "send the gradient as it is")
    if torch.allclose(arrived.sort().values, wanted.sort().values, atol=1e-6):
        raise Wrong(
            f"{case} sent the right numbers in another order",
            "server and worker have to pack in the same order",
            "the order of module.parameters()",
        )
    smell = "it was cleared before it was sent" if not arrived.any() else ""
    raise Wrong(told, smell, "send pack([param.grad ...]) of this backward")


def _compare_taken(after: dict, truth: dict, case: str) -> None:
    """The weights after the step are those of one process."""
    if close(after, truth["after"]):
        return
    wrong = next(name for name in after if not close({0: after[name]}, {0: truth["after"][name]}))
    if close(after, truth["before"]):
        raise Wrong(
            f"{case} still has its old weights",
            "the new ones came into a tensor that is not the model's",
            "copy what came into the parameters: unpack(weights, params)",
        )
    if torch.isclose(after[wrong], truth["before"][wrong]).all():
        raise Wrong(f"{case}: {wrong} is still the old one", "", "unpack into all parameters")
    raise Wrong(
        f"{case}: {wrong} is not what the server sent",
        "another order than that of the server, a message that was read before it was through, or "
        "numbers that were changed on the way",
        "unpack(weights, params), with the params in the order of module.parameters()",
    )


# ---- 5.4 ------------------------------------------------------------------------------------

CLEARED = (
    "the gradients were cleared again before the step",
    "zero_grad belongs before backward or after the step; on a server, before the mean is written",
)


@lesson.exercise(
    "5.4",
    "Four parts: receive from each worker and add up; write the mean into the gradients; "
    "optimizer.step(); send the new weights to each worker.",
    "The workers are all ranks of the group but this one, dist.get_rank(group).",
    "Give each param a .grad of its own, torch.empty_like(param), and unpack(total, gradients, "
    "len(workers)) writes the mean into them.",
)
def server_step(answer) -> None:
    """Three steps with 3, 2 and 1 workers of the check's own; gradients, weights, and the order."""
    seed = random.randrange(10_000)
    jobs = seed, _serve_as_learner, _work_for_server
    results = _run(_in_jobs, 4, answer, *jobs, reasons=TO_WORKERS)
    truths = _one_process(seed, 3)
    for job, (members, server) in enumerate(JOBS):
        num_workers = len(members) - 1
        for step, truth in enumerate(truths):
            seen = results[server][job][step]
            case = f"step {step + 1} with {num_workers} worker(s)"
            own = [results[rank][job][step]["own"] for rank in members if rank != server]
            _compare_serving(seen["log"], num_workers, case)
            cleared = "clear" in seen["log"][: seen["log"].index("step")][-1:]
            if cleared and not _norm(seen["grads"]):
                raise Wrong(f"{case}: the optimizer got no gradient", *CLEARED)
            _compare_mean_of_workers(seen["grads"], truths[: step + 1], own, case)
            for rank in members:
                if rank != server:
                    _compare_given(results[rank][job][step]["arrived"], truth, rank, case)
            if not close(seen["after"], truth["after"]):
                raise Wrong(
                    f"{case}: the server's own weights are not those of one process",
                    "something besides optimizer.step() writes into the model",
                    "leave the weights to the optimizer",
                )


def _serve_as_learner(answer, seed: int, server: int, group) -> list[dict]:
    model = build(seed)
    optimizer = _adamw(model)
    return [_serve_once(answer, model, optimizer, group) for _ in range(3)]


def _serve_once(answer, model: nn.Module, optimizer: torch.optim.Optimizer, group) -> dict:
    workers = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
    log, grads = [], []
    wire = Wire(workers, model, group, log, sends_after="step")
    hooks = (
        optimizer.register_step_pre_hook(lambda *_: grads.append(gradients_of(model))),
        optimizer.register_step_post_hook(lambda *_: log.append("step")),
    )
    clear = optimizer.zero_grad
    optimizer.zero_grad = lambda *args, **kwargs: (log.append("clear"), clear(*args, **kwargs))[1]
    with wire:
        answer(model, optimizer) if group is None else answer(model, optimizer, group=group)
    wire.count(len(workers))
    for hook in hooks:
        hook.remove()
    del optimizer.zero_grad
    return {"log": log, "grads": grads[0] if grads else {}, "after": _state(model)}


def _work_for_server(_, seed: int, server: int, group) -> list[dict]:
    """Be a correct worker that keeps what the server sent; the first one is late."""
    model, steps = build(seed), []
    params = _trainable(model)
    for step in range(3):
        model.zero_grad()
        run_backward(model, _share(step, seed, server, group))
        time.sleep(0.02 * (dist.get_rank(group) == 0))
        dist.send(_packed([param.grad for param in params]), group=group, group_dst=server)
        arrived = torch.empty_like(_packed(params))
        dist.recv(arrived, group=group, group_src=server)
        nn.utils.vector_to_parameters(arrived, params)
        steps.append({"own": gradients_of(model), "arrived": arrived})
    return steps


def _compare_serving(log: list[str], num_workers: int, case: str) -> None:
    """All gradients in, one step, all weights out."""
    if (num_steps := log.count("step")) > 1:
        raise Wrong(
            f"{case}: the optimizer stepped {num_steps} times",
            "one batch is one step: its gradient is the mean over all workers",
            "add up the gradients of all workers first, then step once",
        )
    if "recv" in log[log.index("step") :]:
        raise Wrong(
            f"{case}: the optimizer stepped when {log[: log.index('step')].count('recv')} of "
            f"{num_workers} gradients were in",
            "the mean needs the gradients of all workers",
            "receive from every worker first",
        )


def _compare_mean_of_workers(grads: dict, truths: list[dict], own: list[dict], case: str) -> None:
    """The gradients that the optimizer was given."""
    truth, n = truths[-1]["grads"], len(own)
    if close(grads, truth):
        return
    told = (
        f"{case}: the optimizer got a gradient of norm {_norm(grads):.4f}, not {_norm(truth):.4f}"
    )
    if filled := [name for name in truth if truth[name] is None and grads[name] is not None]:
        raise Wrong(f"{case}: frozen {filled[0]} has got a gradient", "", "leave frozen ones out")
    if not _norm(grads):
        raise Wrong(told, "the sum never reached param.grad", "give each param a .grad first")
    for factor, smell in (
        (n, f"that is the sum over the {n} workers, not their mean"),
        (n / (n + 1), f"the sum was divided by {n + 1}: the server is no worker"),
        (1 / n, "divided twice"),
    ):
        if factor != 1 and close(grads, truth, factor):
            raise Wrong(told, smell, "divide once, by the number of workers")
    for one in (own[0], own[-1]):
        for factor in (1, 1 / n):
            if close(grads, one, factor):
                raise Wrong(
                    told,
                    "that is the gradient of one worker alone",
                    "add up what arrives: a recv overwrites its tensor",
                )
    if len(truths) > 1 and close(grads, _sum([t["grads"] for t in truths])):
        raise Wrong(
            told,
            "the gradients of the steps before are still in there",
            "start each step with an empty sum and overwrite .grad",
        )
    raise Wrong(
        told,
        "not the mean of what the workers sent (added to what a tensor held before, in another "
        "order than the workers pack, or read before it was through)",
        "start from zeros, add each worker's vector, and unpack the sum in the same order",
    )


def _sum(parts: list[dict]) -> dict:
    return {n: g if g is None else sum(part[n] for part in parts) for n, g in parts[0].items()}


def _compare_given(arrived: Tensor, truth: dict, rank: int, case: str) -> None:
    """What a worker received are the weights after the step."""
    names = [name for name, grad in truth["grads"].items() if grad is not None]

    def is_packed(values: dict) -> bool:
        wanted = _packed([values[name] for name in names])
        return torch.allclose(arrived, wanted, atol=1e-5, rtol=1e-4)

    if is_packed(truth["after"]):
        return
    smell, advice = "", "send pack(params) after the step, in the order of module.parameters()"
    if is_packed(truth["before"]):
        smell = "those are the weights from before the step: pack copies, so pack after the step"
    elif is_packed(truth["grads"]):
        smell = "those are the gradients; a worker has no optimizer to use them"
    raise Wrong(f"{case}: rank {rank} did not get the weights of one process", smell, advice)


# ---- 5.5 ------------------------------------------------------------------------------------


@lesson.exercise(
    "5.5",
    "A model's state is its parameters and its buffers.",
    "dist.broadcast(tensor, src=0) overwrites `tensor` on every rank with rank 0's.",
    "A parameter wants no in-place change while autograd looks on: broadcast tensor.detach().",
)
def broadcast_state(answer) -> None:
    """Models from different seeds on 2 and 3 ranks: frozen, tied, buffers; in place."""
    for world_size in (2, 3):
        seed = random.randrange(10_000)
        wanted = _whole_state(_with_a_table(seed))
        for rank, seen in enumerate(_run(_state_after, world_size, answer, seed)):
            own = _whole_state(_with_a_table(seed + rank))
            _compare_state(seen, wanted, own, rank, world_size)
    check_group(answer, _group_of_broadcast)


def _with_a_table(seed: int) -> nn.Module:
    model = build(seed)
    model.register_buffer("table", torch.rand(3), persistent=False)
    return model


def _whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers, also of those that state_dict() leaves out."""
    parts = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in parts}


def _state_after(answer, seed: int) -> dict:
    rank, model = dist.get_rank(), _with_a_table(seed + dist.get_rank())
    # The order of a set is by chance; here it is another one on each rank.
    places = {id(t): i for i, t in enumerate([*model.parameters(), *model.buffers()])}
    Tensor.__hash__ = lambda t: abs(places.get(id(t), id(t)) - 15 * (rank % 2))
    before = {name: id(param) for name, param in model.named_parameters()}
    flags = {name: param.requires_grad for name, param in model.named_parameters()}
    waited = waits()
    time.sleep(0.02 * (rank == 0))  # a late partner: who does not wait reads too early
    with Ledger() as ledger:
        answer(model)
    return {
        "state": _whole_state(model),
        "sent": len(ledger.entries),
        "not waited for": len(ledger.entries) > len(waited),
        "same objects": before == {name: id(param) for name, param in model.named_parameters()},
        "same flags": flags == {name: p.requires_grad for name, p in model.named_parameters()},
    }


def _compare_state(seen: dict, wanted: dict, own: dict, rank: int, world_size: int) -> None:
    state = seen["state"]
    wrong = [name for name in wanted if not torch.equal(state[name], wanted[name])]
    case = f"rank {rank} of {world_size}"
    if not seen["same objects"]:
        raise Wrong(
            f"{case}: the model holds new parameters",
            "an optimizer that was made before still updates the old ones",
            "overwrite in place: broadcast into the tensor, or copy_() into it",
        )
    if not seen["same flags"]:
        raise Wrong(f"{case}: requires_grad has changed", "", "broadcast tensor.detach() instead")
    if wrong:
        if seen["not waited for"] and rank:
            raise Wrong(
                f"{case}: {', '.join(wrong[:3])} differ from rank 0's",
                "a broadcast with async_op=True returns before the message is through",
                "keep what it returns, and wait() for it",
            )
        if not seen["sent"]:
            raise Wrong(f"{case} sent nothing", "", "dist.broadcast for every tensor")
        _name_wrong_state(wrong, wanted, own, rank, case)


def _name_wrong_state(wrong: list[str], wanted: dict, own: dict, rank: int, case: str) -> None:
    parts = ", ".join(wrong[:3])
    if wrong == ["table"]:
        raise Wrong(
            f"{case}: the buffer {parts} differs from rank 0's",
            "state_dict() leaves out buffers that were registered with persistent=False",
            "go through module.parameters() and module.buffers()",
        )
    if rank == 0:
        raise Wrong(
            f"rank 0's own {parts} changed",
            "an average, a sum, or another rank's state was sent round",
            "all ranks take rank 0's values: dist.broadcast(..., src=0)",
        )
    if len(wrong) == len([n for n in wanted if not torch.equal(own[n], wanted[n])]):
        raise Wrong(
            f"{case} still has its own values",
            "the received values never reached the model (a copy was overwritten, or the name was "
            "bound to a new tensor)",
            "broadcast the tensor itself, or copy_() the result into it",
        )
    if all(
        name.startswith("norm.") and not name.endswith(("weight", "bias"))
        for name in wrong
        if name != "table"
    ):
        raise Wrong(
            f"{case}: the buffers {parts} differ from rank 0's",
            "parameters() leaves out buffers, such as the running statistics of batch norm",
            "go through module.buffers() as well",
        )
    if all(name.startswith("frozen") for name in wrong):
        raise Wrong(
            f"{case}: the frozen {parts} differ from rank 0's",
            "frozen parameters need no gradient, but they are part of the model",
            "do not filter by requires_grad",
        )
    raise Wrong(f"{case}: {parts} differ from rank 0's", "", "all parameters and all buffers")


# ---- 5.6 ------------------------------------------------------------------------------------


@lesson.exercise(
    "5.6",
    "dist.all_reduce(tensor) leaves the sum over all ranks in `tensor`, on every rank.",
    "The mean is the sum divided by dist.get_world_size(group).",
    "Frozen parameters have .grad None: skip those.",
)
def average_gradients(answer) -> None:
    """Gradients of one batch cut over 2 and 3 ranks against one process on the whole batch."""
    for world_size in (2, 3):
        seed = random.randrange(10_000)
        model = build(seed)
        run_backward(model, token_batch(seed))
        results = _run(_average_seen, world_size, answer, seed, reasons=AVERAGING)
        own = [result["own"] for result in results]
        truth = gradients_of(model)
        for rank, seen in reversed(list(enumerate(results))):
            if rank and not close(seen["grads"], truth) and close(results[0]["grads"], truth):
                if close(seen["grads"], truth, world_size):
                    raise Wrong(
                        f"rank 0 of {world_size} holds the mean, rank {rank} the sum",
                        "all_reduce gives the sum to all ranks, and only rank 0 divided it",
                        "divide on every rank",
                    )
                raise Wrong(
                    f"rank 0 of {world_size} holds the mean, rank {rank} does not",
                    "dist.reduce gives the sum to one rank only",
                    "all_reduce gives it to all",
                )
            _compare_gradients(seen, truth, own, rank)
            shared = model.embedding.weight  # no other gradient has its size
            if (times := seen["sizes"].count(shared.nbytes)) > 1:
                raise Wrong(
                    f"rank {rank} of {world_size} all-reduces the embedding's gradient {times} "
                    "times: it is the output layer's weight as well",
                    "a mean of equal means changes nothing, but costs a message",
                    "module.parameters() names a tied parameter once",
                )
    check_group(answer, _group_of_average)


AVERAGING: Reasons = {
    "NoneType": (
        "a frozen parameter has .grad None: skip it; all_reduce returns None: it works in place",
        "if param.grad is not None: ...",
    ),
}


def _average_seen(answer, seed: int) -> dict:
    model = build(seed)
    run_backward(model, token_batch(seed)[:, dist.get_rank() :: dist.get_world_size()])
    own = gradients_of(model)
    params = dict(model.named_parameters())
    weights = _weights_sent(params)
    with Ledger() as ledger:
        answer(model)
    return {
        "grads": gradients_of(model),
        "own": own,
        "weights": weights,
        "params": params,
        "sent": len(ledger.entries),
        "sizes": [entry.nbytes for entry in ledger.entries if entry.op == "all_reduce"],
    }


def _weights_sent(vectors: dict[str, Tensor]) -> list[str]:
    """The names of those of these vectors that are given to an all-reduce from now on.

    Averaging equal weights changes nothing, so this looks at what is sent, not at what changes.
    """
    kept = {name: vector.detach().flatten().double().clone() for name, vector in vectors.items()}
    found, original = [], dist.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        numbers = tensor.detach().flatten().double()
        same = [n for n, vector in kept.items() if vector.any() and torch.equal(vector, numbers)]
        found.extend(same)
        return original(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    return found


def _compare_gradients(seen: dict, truth: dict, own: list[dict], rank: int) -> None:
    """Raise Wrong with the mistake that these gradients show; `own` is each rank's before."""
    world_size, grads = len(own), seen["grads"]
    case = f"rank {rank} of {world_size}"
    if seen["weights"]:
        raise Wrong(
            f"{case}: {seen['weights'][0]} itself was sent or overwritten",
            "the weights were averaged, or the average was written into them",
            "all-reduce param.grad, and write into param.grad",
        )
    if close(grads, truth):
        return
    weights = {n: w for n, w in seen["params"].items() if truth[n] is not None}
    if seen.get("packed") or close(grads, weights):
        raise Wrong(
            f"{case}: the weights were sent, not the gradients",
            "the parameters themselves were packed",
            "pack [param.grad for param in bucket]",
        )
    for name in truth:
        if truth[name] is None and grads[name] is not None:
            raise Wrong(f"{case}: frozen {name} has got a gradient", "", "skip .grad None")
        if truth[name] is not None and grads[name] is None:
            raise Wrong(f"{case}: {name} has no gradient any more", "", "leave the mean in .grad")
    if not seen.get("sent", 1) and close(grads, own[rank]):
        raise Wrong(
            f"{case} has sent nothing, and still has its own gradient",
            "no collective was called: is what the `if` asks ever true?",
            "dist.all_reduce each param.grad that is not None",
        )
    raise _known_gradient(grads, truth, own, rank) or _known_factor(grads, truth, own, rank)


def _known_gradient(grads: dict, truth: dict, own: list[dict], rank: int) -> Wrong | None:
    """Gradients that somebody had before, or the largest of them."""
    world_size, case = len(own), f"rank {rank} of {len(own)}"
    number = f"{_norm(grads):.4f} against {_norm(truth):.4f} of one process"
    if close(grads, own[rank]):
        only_0 = " (or only rank 0 got the result, as with dist.reduce)" if rank else ""
        return Wrong(
            f"{case} still has its own gradient (norm {number})",
            f"the average never reached param.grad: a new tensor was made and dropped{only_0}",
            "change it in place, or assign it to param.grad",
        )
    if close(grads, own[0]) or (rank and close(grads, own[0], 1 / world_size)):
        return Wrong(f"{case} holds rank 0's gradient", "a broadcast, no average", "all_reduce")
    if close(grads, own[rank], 1 / world_size):
        return Wrong(
            f"{case} holds its own gradient / {world_size}",
            "nothing was added up on this rank: an async message is not through before wait()",
            "wait for the message before the gradient is used",
        )
    largest = {
        n: g if g is None else torch.stack([o[n] for o in own]).amax(0) for n, g in truth.items()
    }
    if close(grads, largest):
        return Wrong(
            f"{case} holds the largest of the gradients", "ReduceOp.MAX", "the default, SUM"
        )
    return None


def _known_factor(grads: dict, truth: dict, own: list[dict], rank: int) -> Wrong:
    """The truth times a number, or the truth in a few parameters only."""
    world_size, case = len(own), f"rank {rank} of {len(own)}"
    number = f"{_norm(grads):.4f} against {_norm(truth):.4f} of one process"
    for factor, smell, try_this in (
        (world_size, "the sum over the ranks", "divide by the world size"),
        (1 / world_size, "the mean divided by the world size once more", "divide once"),
        (world_size / 12, "a sum divided by the batch", "divide by the number of ranks"),
    ):
        if close(grads, truth, factor):
            return Wrong(f"{case}: the gradient's norm is {number}", f"that is {smell}", try_this)
    if close(grads, {n: g if g is None else g.floor() for n, g in truth.items()}):
        return Wrong(f"{case}: the gradients are whole numbers", "// rounds down", "divide with /")
    divisors = [
        _divisor({n: grads[n]}, {n: g}, world_size) for n, g in truth.items() if g is not None
    ]
    if all(divisors):
        return Wrong(
            f"{case}: sums were divided by {' and '.join(map(str, sorted(set(divisors))))}",
            f"the mean over the ranks is the sum divided by {world_size}",
            "divide by dist.get_world_size(group)",
        )
    if torch.allclose(_sorted(grads), _sorted(truth), atol=1e-5):
        smell = (
            "the right numbers, but not in their places: packed in one order, unpacked in another"
        )
        return Wrong(f"{case}: {number}", smell, "pack and unpack the same list")
    right = [name for name in truth if close({name: grads[name]}, {name: truth[name]})]
    left = [name for name in truth if name not in right]
    if right != [name for name in truth if truth[name] is None] and left:
        return Wrong(
            f"{case}: {left[0]} is not averaged, but {len(right)} others are",
            "a loop that ends early, or takes some kinds of parameters only",
            "go through all of module.parameters()",
        )
    return Wrong(f"{case}: the gradient's norm is {number}", "not the mean over the ranks", "")


def _divisor(grads: dict, truth: dict, world_size: int) -> int:
    """By which whole number the sum over the ranks was divided; 0 if by none."""
    return next((k for k in range(1, 13) if close(grads, truth, world_size / k)), 0)


def _sorted(grads: dict) -> Tensor:
    return _packed([g.double() for g in grads.values() if g is not None]).sort().values


def _norm(grads: dict) -> float:
    return sum(float(grad.pow(2).sum()) for grad in grads.values() if grad is not None) ** 0.5


# ---- 5.7 ------------------------------------------------------------------------------------

LEARNING_RATE = 0.02


@lesson.exercise(
    "5.7",
    "Before the loop: broadcast_state(model, group), then an AdamW over model.parameters().",
    "This rank's samples are inputs[rank::world_size], and targets cut in the same way; both "
    "numbers are those of the group.",
    "In the loop: forward, loss, zero_grad, backward, average_gradients(model, group), step. At "
    "the end rank 0 returns model.state_dict(), each tensor on the CPU, the others {}.",
)
def train_replicas(answer) -> None:
    """Four batches on 3, 2 and 1 ranks from models that differ; shares, gradients, weights."""
    seed = random.randrange(10_000)
    truths = _train_alone(seed)
    results = _run(_replicas_seen, 3, answer, seed)
    for job, members in enumerate(((0, 1, 2), (1, 2), (0,))):
        case = f"on {len(members)} rank(s)"
        seen = [results[rank][job] for rank in members]
        _compare_shares(seen, case)
        stepped = [(rank, one["steps"]) for rank, one in enumerate(seen) if one["steps"]]
        for rank, steps in stepped:
            _compare_start(steps[0], truths[0], f"{case}, rank {rank}")
        if 0 < len(stepped) < len(seen):
            raise Wrong(
                f"{case}: only rank(s) {[rank for rank, _ in stepped]} took a step",
                "every rank updates its own weights; with equal gradients they stay equal",
                "optimizer.step() on every rank",
            )
        for rank, steps in stepped:
            _compare_training(steps, truths, f"{case}, rank {rank}", len(members))
        _compare_weights_of(seen, truths, case)


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def _regression(seed: int) -> list[tuple[Tensor, Tensor]]:
    """Four batches of 12 samples. [((12, 3), (12, 1)), ...]"""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(4, 12, 3, generator=generator)
    return list(zip(inputs, inputs.sum(-1, keepdim=True).sin() + 1, strict=True))


def _noting(model: nn.Module, steps: list[dict]) -> Callable:
    """A hook that writes down what an optimizer is given at each step.

    It may hold a copy of the model's parameters, which are told apart by their shapes.
    """

    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        groups = optimizer.param_groups
        held = {param.shape: param for group in groups for param in group["params"]}
        params = {n: held.get(param.shape, param) for n, param in model.named_parameters()}
        steps.append(
            {
                "rates": {group["lr"] for group in groups},
                "decay": max(group.get("weight_decay", 0) for group in groups),
                "kind": type(optimizer).__name__,
                "grads": {
                    n: p.grad if p.grad is None else p.grad.clone() for n, p in params.items()
                },
                "weights": {n: param.detach().clone() for n, param in params.items()},
            }
        )

    return note


def _train_alone(seed: int) -> list[dict]:
    """What one process gives its optimizer on the whole batches; last, what came out."""
    model, steps = build(seed, _net), []
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    note = _noting(model, steps)
    for inputs, targets in _regression(seed):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        note(optimizer)
        optimizer.step()
    return [*steps, {"weights": _state(model)}]


def _replicas_seen(answer, seed: int) -> list[dict | None]:
    """This rank's part in a job of all three ranks, in the pair 1 2, and alone as rank 0."""
    pair, single = dist.new_group([1, 2]), dist.new_group([0])
    seen = [_train_as_learner(answer, seed)]
    if dist.get_rank() == 0:
        return [*seen, None, _train_as_learner(answer, seed, group=single)]
    return [*seen, _train_as_learner(answer, seed, group=pair), None]


def _train_as_learner(answer, seed: int, **group: object) -> dict:
    batches, steps, rows = _regression(seed), [], []
    model = build(seed + 7 * dist.get_rank(group.get("group")), _net)
    model.register_forward_pre_hook(lambda _, args: rows.append(args[0].detach().clone()))
    noted = register_optimizer_step_pre_hook(_noting(model, steps))
    given = answer(model, iter(batches), LEARNING_RATE, **group)
    noted.remove()
    # Which samples went through the model: batch and place in it; -1 for what is in no batch.
    every = torch.cat([inputs for inputs, _ in batches])  # (48, 3)
    read = [(every == row).all(1) for part in rows for row in part.reshape(-1, 3)]
    places = [int(found.nonzero()[0]) if found.any() else -1 for found in read]
    if isinstance(given, dict):
        plain = all(isinstance(value, Tensor) for value in given.values())
        given = {name: v.detach().clone() for name, v in given.items()} if plain else repr(given)
    return {"given": given, "steps": steps, "read": places}


def _compare_shares(seen: list[dict], case: str) -> None:
    """Every sample went through the model on one rank, once, and the ranks took equally many."""
    reads = [one["read"] for one in seen]
    for rank, read in enumerate(reads):
        if not read:
            raise Wrong(f"{case}: rank {rank} never called model(...)", "", "model(inputs[...])")
        if -1 in read:
            raise Wrong(f"{case}: the model got inputs that are in no batch", "", "cut, no more")
    together = sorted(place for read in reads for place in read)
    if together == list(range(48)) and len({len(read) for read in reads}) == 1:
        return
    if len(reads) > 1 and all(sorted(read) == list(range(48)) for read in reads):
        raise Wrong(
            f"{case}: every rank computes the whole batch",
            "the result is right, but no work is shared: each rank does all of it",
            "inputs[rank::world_size], and the targets in the same way",
        )
    numbers = {place // 12 for place in together}
    if missing := [str(number + 1) for number in range(4) if number not in numbers]:
        raise Wrong(
            f"{case}: nobody reads batch {', '.join(missing)} of 4", "", "return after the loop"
        )
    twice = {f"{p % 12} of batch {p // 12 + 1}" for p in together if together.count(p) > 1}
    never = {f"{p % 12} of batch {p // 12 + 1}" for p in range(48) if p not in together}
    told = f"sample {min(twice)} is read twice" if twice else f"nobody reads sample {min(never)}"
    if not twice and not never:
        told = f"the ranks read {[len(read) for read in reads]} samples"
    raise Wrong(
        f"{case}: {told}",
        "the ranks' shares have to be disjoint, complete and equally large; a rank of the group "
        "counts from 0: dist.get_rank(group), dist.get_world_size(group)",
        "inputs[rank::world_size]",
    )


def _compare_start(step: dict, truth: dict, case: str) -> None:
    """The weights before the first step."""
    if not close(step["weights"], truth["weights"]):
        raise Wrong(
            f"{case} takes its first step from weights that are not rank 0's",
            "replicas that start different stay different, however equal their gradients are",
            "broadcast_state(model, group) before the loop",
        )


def _compare_training(steps: list[dict], truths: list[dict], case: str, world_size: int) -> None:
    """What the optimizer was given in each step."""
    for number, (step, truth) in enumerate(zip(steps, truths, strict=False), 1):
        told = f"{case}, step {number}: the optimizer got a gradient of norm "
        told += f"{_norm(step['grads']):.4f}, one process has {_norm(truth['grads']):.4f}"
        if not close(step["grads"], truth["grads"]):
            raise Wrong(told, *_why_gradient(step["grads"], truths[:number], world_size, number))
        if step["rates"] != {LEARNING_RATE} and step["kind"] == "AdamW":
            raise Wrong(
                f"{case}: the learning rate is {min(step['rates']):g}, not {LEARNING_RATE:g}",
                "that is AdamW's own default"
                if step["rates"] == {1e-3}
                else "the mean over the same batch is the same gradient: nothing is to be scaled",
                "AdamW(model.parameters(), learning_rate)",
            )
        if number < len(steps) and not close(steps[number]["weights"], truths[number]["weights"]):
            raise Wrong(
                f"{case}: after step {number} the weights are not those of one process",
                f"the gradient was right; the optimizer is {step['kind']} with weight_decay "
                f"{step['decay']:g}",
                "torch.optim.AdamW with its own defaults, made once, before the loop",
            )
    if len(steps) != len(truths) - 1:
        raise Wrong(f"{case}: {len(steps)} steps for {len(truths) - 1} batches", "", "one a batch")


def _why_gradient(grads: dict, truths: list[dict], world_size: int, step: int) -> tuple[str, str]:
    truth = truths[-1]["grads"]
    if not _norm(grads):
        return CLEARED
    if close(grads, truth, world_size):
        return "that is the sum over the ranks", "average_gradients takes the mean"
    if close(grads, truth, 12 / world_size):
        return "the loss is a sum over the samples, not their mean", "reduction='mean'"
    if close(grads, truth, 1 / world_size):
        return "the mean was divided once more", "the loss and average_gradients are both means"
    if step > 1:
        return (
            "the first step was right, so something is left from it: backward adds to .grad",
            "optimizer.zero_grad() once a step, before backward",
        )
    return (
        "this rank's own gradient, or that of another loss: the ranks' gradients are not averaged "
        "before the step, the group is not passed on, or inputs and targets are cut differently",
        "loss.backward(), then average_gradients(model, group), then optimizer.step()",
    )


def _compare_weights_of(seen: list[dict], truths: list[dict], case: str) -> None:
    """Rank 0's dict holds the trained weights; the others return {}."""
    wanted = truths[-1]["weights"]
    for rank, one in enumerate(seen):
        given = one["given"]
        if rank and given != {}:
            raise Wrong(
                f"{case}: rank {rank} does not return {{}}",
                "all ranks hold the same weights, and one copy is enough for a file",
                "return {} where dist.get_rank(group) is not 0",
            )
        if rank == 0 and (not isinstance(given, dict) or not given):
            raise Wrong(
                f"{case}: rank 0 of the group returns {' '.join(str(given).split())[:60]}",
                "its weights were asked for, as a dict of tensors by name",
                "{name: value.cpu() for name, value in model.state_dict().items()}",
            )
    given = seen[0]["given"]
    if set(given) != set(wanted):
        raise Wrong(
            f"{case}: the names are {sorted(given)[:4]}, not {sorted(wanted)}",
            "a wrapper's own state_dict has 'module.' before each name",
            "return the names of the model that was given",
        )
    if close(given, truths[0]["weights"]):
        raise Wrong(
            f"{case}: the weights that come back are those before the first step",
            "copied before training was over, or from another model than the one that was trained",
            "after the loop, return the state of the model whose parameters the optimizer has",
        )
    if not close(given, wanted):
        raise Wrong(
            f"{case}: the weights that come back are not those of one process after 4 batches",
            "copied before training was over, or updated with something else than AdamW",
            "return the state after the loop",
        )


# ---- 5.8 ------------------------------------------------------------------------------------


@lesson.exercise(
    "5.8",
    "For each bucket: pack its gradients, all-reduce the vector, unpack the mean.",
    "gradients = [param.grad for param in bucket] is what is packed, and what is unpacked into.",
    "unpack(vector, gradients, dist.get_world_size(group)) divides and writes back.",
)
def average_buckets(answer) -> None:
    """Two buckets of float32 and one of float64 on 2 and 3 ranks: means, messages, bytes."""
    for world_size in (2, 3):
        seed = random.randrange(10_000)
        model = build(seed, Mixed)
        run_backward(model, token_batch(seed))
        results = _run(_buckets_seen, world_size, answer, seed)
        own = [result["own"] for result in results]
        for rank, seen in reversed(list(enumerate(results))):
            _compare_buckets(seen, gradients_of(model), own, rank)
    check_group(answer, _group_of_buckets)


class Mixed(nn.Module):
    """One layer is float64, so its gradients cannot share a message with the others."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.narrow = nn.Linear(6, 6, bias=False, dtype=torch.float64)
        self.head = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 11))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.narrow(self.embedding(tokens).double()).float())  # (B, 11)


def _buckets_seen(answer, seed: int) -> dict:
    model = build(seed, Mixed)
    buckets = make_buckets(model.parameters(), 500)  # of 4, 1 and 1: no number of ranks
    run_backward(model, token_batch(seed)[:, dist.get_rank() :: dist.get_world_size()])
    own, before = gradients_of(model), _state(model)
    packed = _weights_sent({f"bucket {i}": _packed(bucket) for i, bucket in enumerate(buckets)})
    time.sleep(0.05 * (dist.get_rank() == 0))  # a late partner: who does not wait reads too early
    with Ledger() as ledger:
        answer(buckets)
    return {
        "grads": gradients_of(model),
        "own": own,
        "packed": packed,
        **_weights(model, before),
        "entries": [(entry.op, entry.nbytes) for entry in ledger.entries],
        "buckets": [sum(param.nbytes for param in bucket) for bucket in buckets],
    }


def _weights(model: nn.Module, before: dict) -> dict:
    """The parameters, and the names of those that are no longer what they were."""
    params = {name: param.detach() for name, param in model.named_parameters()}
    changed = [name for name, param in params.items() if not torch.equal(param, before[name])]
    return {"params": params, "weights": changed}


def _compare_buckets(seen: dict, truth: dict, own: list[dict], rank: int) -> None:
    ops, sizes = [op for op, _ in seen["entries"]], [nbytes for _, nbytes in seen["entries"]]
    wanted, case = seen["buckets"], f"rank {rank} of {len(own)}"
    told = f"{case}: {len(ops)} message(s) of {sizes} bytes; the buckets have {wanted} bytes"
    if not ops:
        raise Wrong(told, "nothing was sent", "one dist.all_reduce a bucket")
    if set(ops) == {"all_reduce"} and len(ops) > len(wanted):
        smell = "every message costs its own waiting time, so a bucket is sent whole, and once"
        raise Wrong(told, smell, "pack a bucket's gradients, then all-reduce the vector")
    if set(ops) == {"all_reduce"} and len(ops) < len(wanted):
        smell = "buckets were put together, or left out; a message has one type"
        raise Wrong(told, smell, "one all-reduce for each bucket")
    _compare_gradients(seen, truth, own, rank)
    if set(ops) == {"all_reduce"} and sorted(sizes) != sorted(wanted):
        raise Wrong(told, "the type was changed on the way", "keep each bucket's own type")


# ---- 5.9 ------------------------------------------------------------------------------------


@lesson.exercise(
    "5.9",
    "_on_grad_ready: count the parameter in; as long as the next bucket in order is full, start "
    "it. When all have started, finish.",
    "_start: pack(the bucket's gradients, out=self.flats[index]), then all-reduce that with "
    "async_op=True, and keep the work in self.in_flight.",
    "_finish: for each bucket work.wait() first, then unpack(flat, its gradients, world size). At "
    "the end clear in_flight, and set the counts to 0.",
)
def BucketedDDP(answer) -> None:
    """Two steps on 2 and 3 ranks against one process; what is sent, when, and who waits when."""
    for kind, world_size, bucket_mb in (
        (Probe, 2, 1e-4),
        (Probe, 3, 25),
        (Crossed, 2, 1e-4),
    ):
        seed = random.randrange(10_000)
        model, truths = build(seed, kind), []
        for step in range(2):
            model.zero_grad()
            run_backward(model, token_batch(seed + step))
            truths.append(gradients_of(model))
        results = _run(
            _bucketed_seen, world_size, answer, kind, seed, bucket_mb, reasons=OVERLAPPING
        )
        for rank, seen in enumerate(results):
            for step, truth in enumerate(truths):
                own = [result["steps"][step]["own"] for result in results]
                _compare_step(seen, step, truth, own, rank, kind)
            _compare_messages(seen, rank, overlaps=kind is Probe)
    _compare_no_sync([result["no_sync"] for result in results])
    check_group(answer, _group_of_ddp)


FINISHED_EARLY = (
    "_finish ran before all buckets had started",
    "finish when len(self.in_flight) == len(self.buckets)",
)
NOT_THERE = (
    "a gradient of this bucket is not there yet: the bucket was started too early",
    "start a bucket when num_ready[index] == len(buckets[index])",
)
OVERLAPPING: Reasons = {
    "'NoneType' object has no attribute 'detach'": NOT_THERE,
    "'NoneType' object has no attribute 'flatten'": NOT_THERE,
    "Boolean value of Tensor": (
        "`in` compares the numbers in tensors",
        "self.bucket_of[param] is the number of its bucket",
    ),
    "converted to an index": (
        "num_ready counts by bucket, not by parameter",
        "self.num_ready[self.bucket_of[param]]",
    ),
    "list index out of range": (
        "all buckets have started, and the loop goes on",
        "while len(self.in_flight) < len(self.buckets)",
    ),
    "zip() argument": FINISHED_EARLY,
    "all-reduces in one backward": (
        "the loop never moves on: it starts the same bucket again and again",
        "keep each work in self.in_flight; its length is the number of the next bucket",
    ),
}


class Crossed(nn.Module):
    """Uses its layers in another order than it defines them, so gradients come in that order."""

    def __init__(self) -> None:
        super().__init__()
        self.used_last, self.used_first = nn.Linear(6, 11), nn.Embedding(11, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.used_last(self.used_first(tokens))  # (B, 11)


def _bucketed_seen(answer, kind: type, seed: int, bucket_mb: float) -> dict:
    rank, size = dist.get_rank(), dist.get_world_size()
    if isinstance(answer, type) and issubclass(answer, nn.parallel.DistributedDataParallel):
        raise TypeError("this is torch's DistributedDataParallel; the exercise is to build it")
    log: list[str] = []
    inner, reference = build(seed + 7 * rank, kind), build(seed, kind)
    for param in inner.parameters():  # before the wrapper's own hooks, so these run first
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(lambda _: log.append("gradient"))
    model = answer(inner, bucket_mb=bucket_mb)
    log_all_reduces(log)
    steps = []
    for step in range(2):
        model.zero_grad()
        reference.zero_grad()
        batch = token_batch(seed + step)[:, rank::size]
        run_backward(reference, batch)
        time.sleep(0.05 * (rank == 0))  # a late partner: who does not wait reads too early
        raised = ""
        try:
            run_backward(model, batch)
        except Exception as error:
            if isinstance(error, NotImplementedError) or (step == 0 and kind is Probe):
                raise
            raised = f"{type(error).__name__}: {error}"
        steps.append({"grads": gradients_of(inner), "own": gradients_of(reference)})
        steps[-1].update(log=log[:], raised=raised, **_weights(inner, _state(reference)))
        log.clear()
    whole = kind is Crossed and not any(step["raised"] for step in steps)
    no_sync = _no_sync_seen(answer) if whole else {}  # in the same ranks, which saves their start
    return {"steps": steps, "num_buckets": len(model.buckets), "no_sync": no_sync}


def _compare_step(
    seen: dict, step: int, truth: dict, own: list[dict], rank: int, kind: type
) -> None:
    log = seen["steps"][step]["log"]
    try:
        if raised := seen["steps"][step]["raised"]:
            raise Wrong(f"rank {rank} raised {raised}")
        _compare_gradients(seen["steps"][step], truth, own, rank)
    except Wrong as wrong:
        told = f"step {step + 1}, {wrong.seen}"
        if found := _too_few_messages(seen["steps"], step, seen["num_buckets"]):
            reason = found
        elif kind is Crossed:
            reason = (
                "in a model that uses its first layer last, bucket 1 is full before bucket 0: the "
                "buckets did not start in order 0, 1, ..., or one that had to wait never started",
                "each time, start buckets in order as long as the next one is full",
            )
        elif "still has its own" in wrong.seen and "waited" in log:
            reason = (
                "the means are not copied back into param.grad",
                "split flat and copy_ each part into its gradient",
            )
        elif wrong.smell.startswith(("not the mean", "a loop that ends", "nothing was added")) or (
            "still has its own" in wrong.seen
        ):
            reason = (
                "read too early (is _finish called, and does it wait() before it copies?), a wrong "
                "divisor, or a mean in the wrong parameter",
                "after the last bucket has started: wait for each, then copy its parts back",
            )
        else:
            reason = wrong.smell, wrong.hint
        raise Wrong(told, *reason) from None


def _too_few_messages(steps: list[dict], step: int, num_buckets: int) -> tuple[str, str] | None:
    log, first = steps[step]["log"], steps[0]["log"]
    num_sent = sum("sent" in what for what in log)
    if not any("sent" in what for what in first):
        return "no all-reduce was ever called", "start every bucket that is full"
    if step == 1 and not num_sent:
        return (
            "the second backward sends nothing: the first one's counts still stand",
            "reset num_ready and clear in_flight in _finish",
        )
    early = "waited" in log and log[-1] != "waited"
    return FINISHED_EARLY if early and num_sent != num_buckets else None


def _compare_messages(seen: dict, rank: int, overlaps: bool) -> None:
    for log in (step["log"] for step in seen["steps"]):
        sent = [what for what in log if "sent" in what]
        if len(sent) != seen["num_buckets"]:
            raise Wrong(
                f"rank {rank} called all_reduce {len(sent)} times in a backward of "
                f"{seen['num_buckets']} bucket(s)",
                "every message costs its own waiting time, so a bucket is sent whole, and once",
                "one all-reduce a bucket, when its last gradient is ready",
            )
        if "sent and waited" in sent or (
            "waited" in log and "gradient" in log[log.index("waited") :]
        ):
            raise Wrong(
                f"rank {rank} waits for a message while gradients are still missing",
                "backward stands still until the message is through: nothing is hidden",
                "async_op=True, and wait only in _finish",
            )
        if overlaps and len(sent) > 1 and "gradient" not in log[log.index("sent") :]:
            raise Wrong(
                f"rank {rank} sends its first bucket after the last gradient is ready",
                "then no message travels while backward still computes",
                "start a bucket as soon as its own last gradient is ready",
            )


def _no_sync_seen(answer) -> dict:
    """A backward inside no_sync(), then one outside; rank r sees batches r and r + 2."""
    rank, log, raised = dist.get_rank(), [], ""
    model = answer(build(1), bucket_mb=1e-4)
    log_all_reduces(log)
    with model.no_sync():
        run_backward(model, token_batch(rank))
    inside = len(log)
    try:
        run_backward(model, token_batch(rank + 2))
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    return {"inside": inside, "raised": raised, "grads": gradients_of(model.module)}


def _compare_no_sync(results: list[dict]) -> None:
    reference = build(1)
    for number in range(4):
        run_backward(reference, token_batch(number))
    for rank, seen in enumerate(results):
        if seen["inside"]:
            raise Wrong(
                f"rank {rank}: a backward inside no_sync() sent {seen['inside']} message(s)",
                "self.sync says whether this backward shall average",
                "return at once from _on_grad_ready when self.sync is False",
            )
        if seen["raised"] or not close(seen["grads"], gradients_of(reference), 1 / 2):
            raise Wrong(
                f"rank {rank}: after a backward inside no_sync() the next one "
                + (f"raised {seen['raised']}" if seen["raised"] else "does not average the sums"),
                "a gradient inside no_sync() was counted",
                "look at self.sync before you count",
            )


# ---- the same in a group of some ranks ------------------------------------------------------


def _one_weight(value: float) -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, value)
    return layer


def _group_of_broadcast(answer, group, rank: float, first: float) -> tuple[float, float]:
    layer = _one_weight(rank)
    answer(layer, group=group)
    return layer.weight.item(), first


def _group_of_average(answer, group, rank: float, first: float) -> tuple[float, float]:
    layer = _one_weight(1)
    layer(torch.full((1, 1), rank)).backward()
    answer(layer, group=group)
    return layer.weight.grad.item(), first + 0.5


def _group_of_ddp(answer, group, rank: float, first: float) -> tuple[float, float]:
    model = answer(_one_weight(1), group=group)
    model(torch.full((1, 1), rank)).backward()
    return model.module.weight.grad.item(), first + 0.5


def _group_of_buckets(answer, group, rank: float, first: float) -> tuple[float, float]:
    layer = _one_weight(1)
    layer(torch.full((1, 1), rank)).backward()
    answer([[layer.weight]], group=group)
    return layer.weight.grad.item(), first + 0.5
