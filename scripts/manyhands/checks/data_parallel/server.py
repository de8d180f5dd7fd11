"""Exercises 5.3 and 5.4: a worker and a parameter server, each in a job that answers from a script.

The other ranks are not there. A process group of our own writes down what is sent, and fills what
is received when somebody waits for it. So nothing can hang, and the order of all events is known.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from manyhands.checks.engine import cases
from manyhands.checks.engine.card import Wrong
from manyhands.checks.engine.spec import Spec
from manyhands.checks.engine.tables import reasons
from manyhands.data_parallel import loops

BY_GROUP = "Use group_dst= and group_src=: they count inside the group."
COLLECTIVES = (
    "allgather allgather_coalesced _allgather_base allreduce allreduce_coalesced alltoall "
    "alltoall_base barrier broadcast gather reduce reduce_scatter _reduce_scatter_base scatter"
).split()


class Work(dist.Work):
    """A message on its way. `arrive` is called when it is waited for."""

    def __init__(self, desk: "Desk", arrive, source: int = -1) -> None:
        super().__init__()
        self.desk, self.arrive, self.source = desk, arrive, source
        desk.talk.open_works.append(self)

    def wait(self, timeout: object = None) -> bool:
        """The message is through."""
        if self in self.desk.talk.open_works:
            self.desk.talk.open_works.remove(self)
            self.arrive()
        return True

    def is_completed(self) -> bool:
        """Never before somebody has waited."""
        return self not in self.desk.talk.open_works

    def _source_rank(self) -> int:
        return self.source


class Talk:
    """What one rank says and hears. `script` gives the vector of a partner, by its job rank."""

    def __init__(self, members: tuple[int, ...], script) -> None:
        self.members = members
        self.script = script
        self.open_works: list[Work] = []
        self.events: list[tuple[str, int]] = []  # "sent", "heard" or "step", and the partner
        self.sent: dict[int, Tensor] = {}
        self.said: list[str] = []  # each message in words
        self.unheard: list[int] = []


class Desk(dist.ProcessGroup):
    """A process group in which this rank talks to a script."""

    talk: Talk

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        whole = tuple(range(JOB_SIZE))
        self.members = whole if size == JOB_SIZE else self.talk.members

    def getBackendName(self) -> str:  # torch's own name
        """A name for torch."""
        return "desk"

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Work:
        """Write down the message."""
        partner = self._partner("sends", to, tensors[0])
        self.talk.sent[partner] = tensors[0].detach().clone()
        self.talk.events.append(("sent", partner))
        return Work(self, lambda: None)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Work:
        """Take the script's vector when it is waited for."""
        partner = self._partner("receives", source, tensors[0])
        return Work(self, lambda: self._hear(partner, tensors[0]), source)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        """Take the vector of any partner that was not heard yet."""
        source = self.talk.unheard[-1] if self.talk.unheard else 0
        return self.recv(tensors, source, tag)

    def _partner(self, verb: str, peer: int, tensor: Tensor) -> int:
        if not tensor.is_contiguous():
            raise ValueError("Tensors must be contiguous")
        if not 0 <= peer < len(self.members):
            why = f"The ranks of the group are 0 to {len(self.members) - 1}."
            raise Wrong(f"it {verb} a message, with rank {peer} of the group", why, BY_GROUP)
        through = f"ranks {list(self.members)}"
        kind = str(tensor.dtype).removeprefix("torch.")
        way = "to" if verb == "sends" else "from"
        partner = self.members[peer]
        words = f"{tensor.numel()} numbers of {kind} {way} rank {partner} of the job"
        self.talk.said.append(f"it {verb} {words}, through {through}")
        if way == "from" and peer in self.talk.unheard:
            self.talk.unheard.remove(peer)
        return partner

    def _hear(self, partner: int, tensor: Tensor) -> None:
        self.talk.events.append(("heard", partner))
        vector = self.talk.script(partner)
        with torch.no_grad():
            flat = tensor.view(-1)
            size = min(len(flat), len(vector))
            flat[:size] = vector[:size].to(flat.dtype)


def _refuse(name: str):
    def call(self: Desk, *args: object, **named: object) -> None:
        why = "A collective needs all ranks to take part, and a worker and its server are two."
        raise Wrong(
            f"it calls a collective ({name.strip('_')})", why, "Use dist.send and dist.recv."
        )

    return call


for _name in COLLECTIVES:
    setattr(Desk, _name, _refuse(_name))

JOB_SIZE = 4
BACKEND = "desk"


@contextmanager
def _job(talk: Talk, me: int, whole: bool) -> Iterator[dict]:
    """A job of four ranks, of which this process is `me`; the options for the answer."""
    Desk.talk = talk
    if BACKEND not in dist.Backend.backend_list:
        make = lambda store, rank, size, timeout: Desk(rank, size)  # noqa: E731
        dist.Backend.register_backend(BACKEND, make, devices=["cpu"])
    dist.init_process_group(BACKEND, rank=me, world_size=JOB_SIZE, store=FakeStore())
    try:
        group = None if whole else dist.new_group(list(talk.members), backend=BACKEND)
        yield {} if group is None else {"group": group}
    finally:
        dist.destroy_process_group()


class Step(NamedTuple):
    """A few steps of one rank of a job. `server` and `me` count in the group."""

    members: tuple[int, ...]
    server: int
    me: int
    seed: int
    dtype: torch.dtype = torch.float64


def model_of(case: Step) -> nn.Module:
    """A Probe in one type; where the server is not rank 0, with gradients left from before."""
    model = cases.build(case.seed).to(case.dtype)
    for param in trainable(model) if case.server else ():
        param.grad = torch.full_like(param, 7)
    return model


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen."""
    return [param for param in model.parameters() if param.requires_grad]


def numbers(case: Step, *what: int) -> Tensor:
    """A vector of all trainable numbers, drawn from what it is for."""
    size = sum(param.numel() for param in trainable(cases.build(case.seed)))
    return cases.values(size, cases.generator(case.seed, *what), case.dtype)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all parameters and buffers."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def say_step(case: Step) -> str:
    """A case in words."""
    kind = str(case.dtype).removeprefix("torch.")
    where = f"rank {case.me} of the group of ranks {list(case.members)}"
    if len(case.members) == JOB_SIZE:
        where = f"rank {case.me} of {JOB_SIZE}"
    return f"on {where}, with server {case.server} and a model in {kind},"


# ---- 5.3 ------------------------------------------------------------------------------------

PARAMS = "[param for param in module.parameters() if param.requires_grad]"
SENDS = "dist.send(pack([param.grad for param in params]), group=group, group_dst=server)"
TAKES = "dist.recv(weights, group=group, group_src=server)"
UNPACKS = "unpack(weights, params)"
PACKS = "pack([param.grad for param in params])"
LATER = "Call wait() on what isend and irecv return, before the vector is read or dropped."


def worker_steps() -> list[Step]:
    """The server is rank 0 or another one; the group is the whole job, and parts of it."""
    seeds = [cases.draw_seed() for _ in range(4)]
    return [
        Step((0, 3), 0, 1, seeds[0]),
        Step((0, 1, 2, 3), 2, 0, seeds[1], torch.float32),
        Step((1, 2, 3), 1, 2, seeds[2]),
        Step((1, 2, 3), 2, 0, seeds[3], torch.bfloat16),
    ]


def worked(answer, case: Step) -> dict:
    """What a worker says and hears in two steps, and its weights after each."""
    model = model_of(case)
    model.frozen.weight.grad = torch.ones_like(model.frozen.weight)  # from when it has trained
    objects = [id(param) for param in model.parameters()]
    flags = [param.requires_grad for param in model.parameters()]
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    seen: dict = {}
    for step in (1, 2):
        talk = Talk(case.members, lambda partner, step=step: numbers(case, 1, partner, step))
        _set_gradients(model, numbers(case, 0, case.me, step))
        with _job(talk, case.members[case.me], len(case.members) == JOB_SIZE) as options:
            first = () if case.server == 0 else (case.server,)
            answer(model, *first, **options)
        when = f" in step {step}"
        ops = [op for op, _ in talk.events]
        early = "heard" in ops and "sent" not in ops[: ops.index("heard")]
        seen.update(_counted(talk, when))
        seen[f"the gradients are sent before it waits for weights{when}"] = not early
        server = case.members[case.server]
        seen[f"what the server is sent{when}"] = talk.sent.get(server)
        seen[f"every message is waited for{when}"] = not talk.open_works
        seen[f"the weights{when}"] = state_of(model)
    return {
        **seen,
        "the model has the same parameters": objects == [id(p) for p in model.parameters()],
        "requires_grad is as it was": flags == [p.requires_grad for p in model.parameters()],
        "the buffers are as they were": all(
            torch.equal(tensor, buffers[name]) for name, tensor in model.named_buffers()
        ),
    }


def _counted(talk: Talk, when: str) -> dict:
    """How many messages there are, and each in words."""
    said = sorted(talk.said, reverse=True)
    num_sent = len([words for words in said if words.startswith("it sends")])
    return {
        f"how many messages it sends{when}": num_sent,
        f"how many messages it receives{when}": len(said) - num_sent,
        f"messages{when}": said,
    }


def _set_gradients(model: nn.Module, vector: Tensor) -> None:
    params = trainable(model)
    parts = vector.split([param.numel() for param in params])
    for param, part in zip(params, parts, strict=True):
        param.grad = part.view(param.shape).clone()


REASONS = reasons(
    """
    Tensors must be contiguous :: A message is sent from one piece of memory, and the elements of
        this tensor do not lie side by side. | Send pack(...) of the tensors.
    is not registered :: A group of None stands for the whole job, and torch cannot look its ranks
        up. | Use group_dst=server and group_src=server, which need no such number.
""",
    globals(),
)

worker_step = Spec(
    todo="5.3",
    truth=loops.worker_step,
    cases=worker_steps,
    observe=worked,
    tell=lambda case: f"{say_step(case)} worker_step",
    independent=True,
    reasons=REASONS,
    advice={"": "Send pack(...) of the gradients, and receive into pack(...) of the parameters."},
    hints=(
        "There are two messages: one dist.send with the gradients, and then one dist.recv with "
        "the weights.",
        "pack([param.grad for param in params]) is the first, and pack(params) makes room for the "
        "second.",
        "Inside a group ranks count from 0: dist.send(..., group=group, group_dst=server). "
        "unpack(weights, params) copies what came into the model.",
    ),
    mistakes="""
        {PACKS} => pack(params) :: The weights are sent, not the gradients. | Send {PACKS}.
        {PACKS} => pack([param.grad for param in params[::-1]]) ::
            The gradients are packed in another order than that of module.parameters(). | {PARAMS}
        {PACKS} => pack([param.grad for param in params]) / (dist.get_world_size(group) - 1) ::
            The worker divides by the number of workers, and the mean is the server's to take. |
            Send the gradients as they are.
        {PARAMS} => list(module.parameters()) ::
            Frozen parameters are not left out. | {PARAMS}
        {UNPACKS} => [part.clone() for part in params] ::
            The new weights never reach the model. | Copy them into it: {UNPACKS}.
        {UNPACKS} => unpack(weights, params[::-1]) ::
            The new weights are unpacked in another order than that of module.parameters().
        {SENDS} => first = lambda: {SENDS}
        {TAKES} => {TAKES}; first() :: The worker waits for weights while the server still waits for
            its gradients. | Send first, then receive.
        dist.send( => dist.isend( :: A message is not waited for. | {LATER}
        {TAKES} => dist.irecv(weights, group=group, group_src=server) ::
            A message is not waited for.
        group_dst=server => dst=server
        group_src=server => src=server ::
            The server is counted over the whole job, not inside the group. | {BY_GROUP}
        group_dst=server => group_dst=0
        group_src=server => group_src=0 ::
            The partner is rank 0 of the group, which need not be the server.
    """,
    module=globals(),
)

# ---- 5.4 ------------------------------------------------------------------------------------

OTHERS = "[rank for rank in range(world_size) if rank != server]"
TOTAL = "total += arrived"
MEAN = "unpack(total, [param.grad for param in params], len(workers))"
HEARS = "dist.recv(arrived, group=group, group_src=worker)"
GIVES = "dist.send(pack(params), group=group, group_dst=worker)"
START = "torch.zeros_like(pack(params))"
CLEAR = "zero_grad belongs before the mean is written into the gradients, or after the step."
WAITS = "Receive from every worker first, then step once, then send."


def server_steps() -> list[Step]:
    """One worker, three and two; the server is the first of the group or another one."""
    seeds = [cases.draw_seed() for _ in range(3)]
    return [
        Step((0, 3), 0, 0, seeds[0]),
        Step((0, 1, 2, 3), 2, 2, seeds[1]),
        Step((1, 2, 3), 1, 1, seeds[2]),
    ]


def served(answer, case: Step) -> dict:
    """Who is heard before the optimizer steps, what it is given, and what each worker is sent."""
    model = model_of(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    workers = [rank for rank in range(len(case.members)) if rank != case.server]
    seen: dict = {}
    for step in (1, 2):
        talk = Talk(case.members, lambda partner, step=step: numbers(case, partner, step))
        talk.unheard = random.Random(case.seed).sample(workers, len(workers))
        given: list[dict] = []
        hooks = [
            optimizer.register_step_pre_hook(
                lambda *_, given=given: given.append(cases.gradients_of(model))
            ),
            optimizer.register_step_post_hook(
                lambda *_, talk=talk: talk.events.append(("step", -1))
            ),
        ]
        with _job(talk, case.members[case.server], len(case.members) == JOB_SIZE) as options:
            answer(model, optimizer, **options)
        for hook in hooks:
            hook.remove()
        seen.update(_served(talk, given, f" in step {step}"))
        seen[f"the server's own weights after step {step}"] = state_of(model)
    return seen


def _served(talk: Talk, given: list[dict], when: str) -> dict:
    steps = [index for index, event in enumerate(talk.events) if event[0] == "step"]
    first = steps[0] if steps else len(talk.events)
    heard = [rank for op, rank in talk.events[:first] if op == "heard"]
    early = [rank for op, rank in talk.events[:first] if op == "sent"]
    return {
        **_counted(talk, when),
        f"how often the optimizer that was given steps{when}": len(steps),
        f"workers that were heard before the step{when}": sorted(heard),
        f"workers that were sent weights before the step{when}": early,
        f"the gradients at the step{when}": given[0] if given else None,
        f"what the workers are sent{when}": {r: talk.sent[r] for r in sorted(talk.sent)},
        f"every message is waited for{when}": not talk.open_works,
    }


server_step = Spec(
    todo="5.4",
    truth=loops.server_step,
    cases=server_steps,
    observe=served,
    tell=lambda case: f"{say_step(case)} server_step",
    independent=True,
    advice={"": WAITS},
    hints=(
        "There are four parts: receive from each worker and add up; write the mean into the "
        "gradients; optimizer.step(); send the new weights to each worker.",
        "The workers are all ranks of the group but this one, dist.get_rank(group).",
        "Give each param a .grad of its own, torch.empty_like(param), and unpack(total, gradients, "
        "len(workers)) writes the mean into them.",
    ),
    mistakes=r"""
        {MEAN} => unpack(total, [param.grad for param in params]) :: The gradients are the sum over
            the workers, not their mean. | Divide once, by the number of workers.
        len(workers)) => world_size) ::
            The sum is divided by the size of the group, and the server is no worker.
        {TOTAL} => total.copy_(arrived) :: The gradients are those of the last worker alone,
            divided. | Add up what arrives, because a recv overwrites its tensor.
        {START} => pack(params) ::
            The sum starts from the weights, not from zeros. | Start from torch.zeros_like.
        param.grad = torch.empty_like(param) => param.grad = torch.zeros_like(param) if param.grad
            is None else param.grad
        {MEAN} => total += len(workers) * pack([p.grad for p in params]); {MEAN} ::
            What was in the gradients before is still in them. | Overwrite .grad in each step.
        optimizer.step() => optimizer.zero_grad(); optimizer.step() ::
            The gradients are cleared again before the step. | {CLEAR}
        optimizer.step() => pass :: The optimizer that was given does not step, and it has the
            moments of all steps before. | Call optimizer.step() once all gradients are in.
        {TOTAL} => {TOTAL}; optimizer.step()
        \n    optimizer.step() => ::
            The optimizer steps once for each worker, and one batch is one step. | {WAITS}
        {GIVES} => pass
        {TOTAL} => {TOTAL}; {GIVES} :: Weights are sent before the step.
        {MEAN} => {MEAN}\n    early = pack(params)
        pack(params), group=group, group_dst => early, group=group, group_dst :: The workers are
            sent the weights from before the step: pack copies. | Pack after the step.
        dist.send(pack(params) => dist.send(pack([param.grad for param in params]) :: The workers
            are sent the gradients, and they have no optimizer to use them. | Send pack(params).
        group_src=worker => src=worker
        group_dst=worker => dst=worker ::
            The workers are counted over the whole job, not inside the group. | {BY_GROUP}
        {OTHERS} => list(range(world_size)) ::
            The server is counted among the workers. | Leave out dist.get_rank(group).
        {OTHERS} => list(range(1, world_size)) ::
            The workers are taken to be ranks 1 and up, and the server need not be rank 0.
    """,
    reasons={
        **REASONS,
        "'NoneType' object has no attribute": (
            "A `param.grad` is None until something is put there.",
            "Write param.grad = torch.empty_like(param), for those that are not frozen.",
        ),
    },
    module=globals(),
)
