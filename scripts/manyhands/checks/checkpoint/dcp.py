"""11.8: the state of a training for PyTorch's own checkpoints, saved and loaded on real ranks."""

import copy
import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from manyhands.checkpoint import dcp as course
from manyhands.checkpoint.state import Position
from manyhands.checks.engine import cases
from manyhands.checks.engine.spec import Place, Spec
from manyhands.checks.engine.values import Malformed, malformed
from manyhands.fsdp.fully_shard import torch_fsdp

# ---- what is saved -------------------------------------------------------------------------------

PARTS = {2: ((0, 1), (2, 3)), 3: ((0, 1, 2), (3,)), 4: ((0, 1, 2, 3),)}
NUM_SAMPLES = 24
BATCH = 12


class Resume(NamedTuple):
    """Four ranks take a state, and `num_ranks` others load it; the rest load it by themselves."""

    seed: int
    saved: str  # "DDP" or "FSDP"
    loaded: str
    num_ranks: int
    on_disk: bool = True  # by dcp.save and dcp.load; else as a copy in memory


def resumes(n: int) -> list[Resume]:
    """A copy in memory; shards for fewer ranks, twice; a replica that is loaded into shards."""
    seed = cases.draw_seed()
    return [
        Resume(seed, "DDP", "DDP", 4, on_disk=False),
        Resume(seed, "FSDP", "FSDP", 2),
        Resume(seed, "DDP", "FSDP", 3),
    ]


class Net(nn.Module):
    """A frozen layer and a buffer among others; no size is a multiple of the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 7)
        self.frozen = nn.Linear(7, 5).requires_grad_(False)
        self.leave = nn.Linear(5, 3)
        self.register_buffer("shift", torch.rand(5))

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs (B, 6) to outputs (B, 3)."""
        return self.leave(torch.tanh(self.frozen(torch.tanh(self.enter(inputs))) + self.shift))


@functools.cache
def group_of(num_ranks: int) -> dist.ProcessGroup:
    """The group of this rank where the ranks are divided into PARTS."""
    groups = {part: dist.new_group(list(part)) for part in PARTS[num_ranks]}
    return next(group for part, group in groups.items() if dist.get_rank() in part)


class Run:
    """A training on a group: `kind` of a model, AdamW with two groups, and a place in the data."""

    def __init__(self, seed: int, kind: str, num_ranks: int) -> None:
        self.group = group_of(num_ranks)
        net = cases.build(seed, Net).double()
        if kind == "DDP":
            self.model = DistributedDataParallel(net, process_group=self.group)
        else:
            mesh = DeviceMesh.from_group(self.group, "cpu")
            self.model = torch_fsdp(net, [], mesh)
        params = [param for param in self.model.parameters() if param.requires_grad]
        groups = [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.0}]
        self.optimizer: Optimizer = torch.optim.AdamW(groups, lr=1e-2)
        self.place = Position(NUM_SAMPLES)

    def train(self, num_steps: int) -> list[float]:
        """This rank's losses; the learning rate falls from step to step."""
        rank, world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        losses = []
        for _ in range(num_steps):
            draw = cases.generator(self.place.epoch, self.place.position)
            inputs = torch.randn(BATCH, 6, generator=draw, dtype=torch.float64)
            loss = self.model(inputs[rank::world_size]).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            for settings in self.optimizer.param_groups:
                settings["lr"] *= 0.8
            self.place.advance(BATCH)
            losses.append(loss.item())
        return losses

    def app(self, answer: Callable) -> object:
        """The learner's object around all three."""
        return answer(self.model, self.optimizer, self.place)


# ---- what is seen --------------------------------------------------------------------------------


def resumed_seen(answer: Callable, case: Resume, place: Place) -> dict:
    """What a state holds, and what is there after it was loaded into a new training."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these ranks compute on the CPU, wherever they are
    before = Run(case.seed, case.saved, 4)
    before.train(1)
    app = before.app(answer)
    app.state_dict()  # an earlier save
    before.train(2)  # into the second epoch
    seen = state_seen(app.state_dict())
    after = Run(case.seed + 1, case.loaded, case.num_ranks)
    loaded = after.app(answer)
    weights = [part_of(one) for one in after.model.parameters()]
    loaded.state_dict()
    same = map(torch.equal, weights, [part_of(one) for one in after.model.parameters()])
    seen["state_dict() of a new training leaves its weights unchanged"] = all(same)
    if not case.on_disk:
        loaded.load_state_dict(copy.deepcopy(app.state_dict()))
        return seen | run_seen(after, "")
    names = [tempfile.mkdtemp(prefix="manyhands-dcp-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names, src=0)
    try:
        course.save_dcp(app, names[0])
        for again in ("", ", loaded once more"):
            course.load_dcp(loaded, names[0], after.group)
            seen |= run_seen(after, again)
        dist.barrier()  # nobody reads any more
        return seen
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(names[0], ignore_errors=True)


def state_seen(state: object) -> dict:
    """Names and sizes in a state."""
    if not isinstance(state, dict):
        raise malformed(state, "a dict", KEYS)
    if set(state) != set(NAMES):
        seen = f"a dict of {', '.join(map(repr, state)) or 'nothing'}"
        raise Malformed(seen, f"The docstring asks for {', '.join(NAMES)}.", KEYS)
    model = state["model"]
    if not isinstance(model, dict):
        raise malformed(model, "a dict under 'model'", BOTH)
    return {
        "names in its model": sorted(map(str, model)),
        "numbers that this rank holds of its model": sum(
            part_of(one).numel() for one in model.values() if isinstance(one, Tensor)
        ),
    }


def run_seen(run: Run, again: str) -> dict:
    """The state of a run, looked at from outside, and its next losses."""
    params = dict(run.model.named_parameters())
    state = {
        f"place in the data{again}": run.place.state_dict(),
        f"learning rates{again}": [one["lr"] for one in run.optimizer.param_groups],
        f"this rank's part of the weights{again}": [part_of(one) for one in params.values()],
        f"this rank's part of the moments{again}": [
            {kind: part_of(value) for kind, value in sorted(run.optimizer.state[one].items())}
            for one in params.values()
            if one in run.optimizer.state
        ],
    }
    return state | {f"the next losses{again}": run.train(2)}


def part_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    found = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found.detach().clone()


# ---- the exercise --------------------------------------------------------------------------------


def tell(case: Resume) -> str:
    """The state's way in words."""
    if not case.on_disk:
        return f"a new AppState under {case.loaded}, loaded from a copy of another one's state,"
    words = f"saved under {case.saved} by 4 ranks, loaded under {case.loaded} by {case.num_ranks}"
    return f"an AppState, {words},"


NAMES = ("model", "optimizer", "progress")
KEYS = 'Return a dict with "model", "optimizer" and "progress".'
BOTH = "get_state_dict(self.model, self.optimizer) returns the states of both, for any wrapper."
BACK = (
    "set_state_dict(self.model, self.optimizer, model_state_dict=..., optim_state_dict=...) gives "
    "both back."
)
PROGRESS = 'self.progress.load_state_dict(state["progress"])'
IN_PLACE = "dcp.load fills tensors in place, which hides it, but this state is a copy."
LAZY = (
    "The optimizer has no state before its first step, so its state_dict() has no names that "
    "dcp.load could fill, and the moments begin anew."
)
PREFIX = 'Under DDP the names begin with "module.", and a model that is sharded has no such names.'
GET = "model, optimizer = get_state_dict(self.model, self.optimizer)"
SET = (
    "set_state_dict(\\n            self.model,\\n            self.optimizer,\\n"
    '            model_state_dict=state["model"],\\n'
    '            optim_state_dict=state["optimizer"],\\n        )'
)
OWN_MODEL = f"{GET}; model = self.model.state_dict()"
FROM = "from torch.distributed.checkpoint.state_dict import"
GET_MODEL = f"{FROM} get_model_state_dict; model = get_model_state_dict(self.model)"
OPTIONS = f"{FROM} StateDictOptions; whole = StateDictOptions(full_state_dict=True)"
GET_WHOLE = f"{OPTIONS}; {GET.replace('optimizer)', 'optimizer, options=whole)')}"
SET_WHOLE = f"{OPTIONS}; {SET.replace('self.optimizer,', 'self.optimizer, options=whole,')}"
SET_MODEL = f'{FROM} set_model_state_dict; set_model_state_dict(self.model, state["model"])'
SET_OPTIMIZER = (
    f"{FROM} set_optimizer_state_dict; "
    'set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])'
)
LOAD_OWN = 'self.optimizer.load_state_dict(state["optimizer"])'
LOAD_MODEL = 'self.model.load_state_dict(state["model"])'
app_state = Spec(
    todo="11.8",
    truth=course.AppState,
    layouts=(PARTS[4],),
    cases=resumes,
    observe=resumed_seen,
    tell=tell,
    at_once=6,
    limit_s=20,
    mistake_s=4.0,
    max_messages=5000,
    guards_group=False,
    may_change=("the environment variables",),
    advice={
        "": "Which of the three was not saved, or not given back?",
        "names in its model": BOTH,
    },
    reasons="""
        has no attribute 'module' :: Only DDP has a `module`; fully_shard wraps nothing. | {BOTH}
        object is not subscriptable :: dcp.save asks only the objects in its outermost dict for
            their state. | self.progress.state_dict()
        Missing key in checkpoint ::
            A name in the state to be loaded is not in the checkpoint. | {BOTH}
    """,
    hints=(
        f"{KEYS} {BOTH}",
        f"{BACK} dcp.load has filled the tensors in place, but numbers, such as the learning rate, "
        "stand in the dict only.",
        f"{PROGRESS} goes last.",
    ),
    mistakes="""
        {GET} => {OWN_MODEL}
        {SET} => {LOAD_MODEL}; {SET_OPTIMIZER} :: {PREFIX} | {BOTH}
        {GET} => {OWN_MODEL} :: {PREFIX}
        {GET} => {OWN_MODEL}
        {SET} => getattr(self.model, "module", self.model).load_state_dict(state["model"],
            strict=False); {SET_OPTIMIZER} :: With strict=False no name has to match, and with
            "module." on one side none does: the weights are those of the new model.
        {GET} => {GET_MODEL}; optimizer = self.optimizer.state_dict()
        {SET} => {SET_MODEL}; {LOAD_OWN} :: {LAZY}
        {GET} => model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        {SET} => {LOAD_MODEL}; {LOAD_OWN} :: {PREFIX} {LAZY}
        {GET} => {GET_MODEL}; optimizer = None
        {SET} => {SET_MODEL} :: The optimizer is not saved, so its moments begin anew.
        {SET} => {SET_MODEL} :: The optimizer is not given back: dcp.load fills its moments in
            place, which hides it, but no number, such as the learning rate. | {BACK}
        {SET} => {SET_OPTIMIZER} :: The model is not given back: {IN_PLACE}
        {SET} => pass :: Neither model nor optimizer is given back: {IN_PLACE}
        {PROGRESS} => pass :: The place in the data is not given back: dcp.load puts the stored
            numbers into the dict that state_dict() made, and not into the object. | {PROGRESS}
        self.progress.state_dict()} => self.progress.position}
        {PROGRESS} => self.progress.position = state["progress"] ::
            Only one number of the progress is kept. | self.progress.state_dict() has all of them.
        {GET} => {GET_WHOLE}
        {SET} => {SET_WHOLE} :: Every rank gathers the whole state, for which it may not have the
            memory. | Leave out full_state_dict=True: each rank saves its own parts.
    """,
    module=globals(),
)
