"""11.2 and 11.1: the twelve items of a training state, and a place in the data."""

import copy
import hashlib
import io
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from manyhands.checkpoint import state as course
from manyhands.checks.engine import cases
from manyhands.checks.engine.card import Wrong
from manyhands.checks.engine.spec import Spec
from manyhands.checks.engine.values import malformed, same

# ---- 11.2 -----------------------------------------------------------------------------------

BATCH = 4
EPOCH = 3  # steps
AFTER = 5  # steps; among any five is an evaluation
STAY = "random numbers stay where they are on a rank that `ranks` does not have"


class Saved(NamedTuple):
    """One save: of a run with this seed, after so many steps."""

    seed: int
    num_steps: int


def runs() -> list[Saved]:
    """In the middle of an epoch; at the end of one, before any evaluation."""
    return [Saved(cases.draw_seed() % 1000, 3 * EPOCH - 2), Saved(7, EPOCH)]


def make(case: Saved, more: int = 0) -> course.Training:
    """The run of a case, before its first step; with `more` another one on the same data."""
    draw = cases.generator(case.seed)
    samples = [torch.randn(BATCH * EPOCH, 5, generator=draw), torch.arange(BATCH * EPOCH) % 10]
    data = TensorDataset(*samples)
    name = "another run" if more else "the first run"
    return course.Training(data, data, name, case.seed + more, BATCH, num_steps=20)


def items_of(run: course.Training) -> dict:
    """The items of a run, by what a reader knows them for."""
    moments = [value for one in run.optimizer.state.values() for value in one.values()]
    return {
        "the run's name": run.name,
        "the seed of the order": run.position.seed,
        "the place in the data": (run.position.epoch, run.position.position),
        "batches and samples so far": (run.timestamp["batch"], run.timestamp["samples"]),
        "seconds so far are at least those before": run.timestamp["seconds"] > 0,
        "evaluations without improvement": run.patience.waits,
        "the best loss that early stopping knows": run.patience.best,
        "the sum and count of this epoch's losses": tuple(run.train_metrics.values()),
        "the last loss and the best accuracy": tuple(run.eval_metrics.values()),
        "the loss scale": run.scaler.get_scale(),
        "steps since the loss scale grew": run.scaler.state_dict()["_growth_tracker"],
        "the weights": vector(run.model.state_dict().values()),
        "the optimizer's moments": vector(moments),
        "the average of the weights": vector(run.average.state_dict().values()),
        "the learning rate": run.optimizer.param_groups[0]["lr"],
        "the step of the schedule": run.scheduler.last_epoch,
        "the random numbers": drawn(),
    }


def vector(tensors: object) -> Tensor:
    """The numbers of all tensors in one."""
    return torch.cat([torch.zeros(0), *(one.detach().flatten().float() for one in tensors)])


def drawn() -> str:
    """Which random numbers come next, in a few letters."""
    return hashlib.md5(torch.get_rng_state().numpy().tobytes()).hexdigest()[:8]


def go_on(run: course.Training) -> dict:
    """The next steps, and what the run is after them."""
    steps = []
    for _ in range(AFTER):
        before = drawn()
        steps += [(run.train(1), run.optimizer.param_groups[0]["lr"], before)]
    losses, rates, random = zip(*steps, strict=True)
    seen = {"learning rates": list(rates), "losses": list(losses), "random numbers": list(random)}
    return {f"the next {AFTER} {name}": value for name, value in seen.items()}


def resumed(answer: Callable, case: Saved) -> dict:
    """Save, train on, load into another run, train on: what is there, and what comes next."""
    run = make(case)
    run.train(case.num_steps)
    run.patience.waits = 2
    state = answer(run).state_dict()
    if not isinstance(state, dict):
        raise malformed(state, "a dict", "Return a dict with the twelve names of the docstring.")
    snapshot = copy.deepcopy(state)
    ahead = go_on(run) | items_of(run)
    stays = unchanged(state, snapshot)
    other = make(case, 1000)
    other.train(1)
    given = through_a_file(state)
    kept = copy.deepcopy(given)
    answer(other).load_state_dict(given)
    seen = items_of(other)
    seen |= go_on(other)
    seen["what state_dict() returned stays as it is while the training goes on"] = stays
    seen["what load_state_dict() was given stays as it is while the training goes on"] = unchanged(
        given, kept
    )
    seen["all that follows is equal bit for bit"] = equal(ahead, seen | items_of(other))
    seen["the names in `ranks`"] = [*given.get("ranks", ())]
    given["ranks"] = dict(zip("1", given.get("ranks", {}).values(), strict=False))
    was = drawn()
    answer(other).load_state_dict(given)  # as a rank that there was not
    seen[STAY] = drawn() == was
    return seen


def unchanged(now: object, was: object) -> bool:
    """Are two states alike?"""
    return same(plain(now), plain(was))


def plain(state: object) -> object:
    """A state without the classes that a dict can have."""
    if isinstance(state, dict):
        return {str(name): plain(value) for name, value in state.items()}
    return [plain(one) for one in state] if isinstance(state, list | tuple) else state


def equal(ahead: dict, seen: dict) -> bool:
    """Are all values of `ahead` in `seen`, to the last bit?"""
    pairs = [(value, seen[name]) for name, value in ahead.items()]
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def through_a_file(state: dict) -> dict:
    """What comes back from the disk."""
    file = io.BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, weights_only=True)
    except Exception as problem:  # pickle raises many kinds
        raise Wrong(
            "torch.load(..., weights_only=True) cannot read what state_dict() returns: "
            f"{str(problem).splitlines()[0][:120]}",
            "A checkpoint must be readable without running code from the file.",
            "Put in what .state_dict() returns, numbers and texts, and no objects.",
        ) from None


def tell_run(case: Saved) -> str:
    """Where in an epoch the run was saved."""
    step = case.num_steps % EPOCH
    place = f"after {step} of {EPOCH} steps of an epoch" if step else "at the end of an epoch"
    return f"a run that is saved {place} and loaded into another run"


def tell_random(found: object, wanted: object, case: Saved) -> str:
    """Does every step draw the same?"""
    name = f"the next {AFTER} random numbers"
    # The first of them comes before the first step.
    if isinstance(found, dict) and name in found and len(set(found[name][1:])) == 1:
        return "Every step after loading begins with the same random numbers."
    return ""


MODEL = 'run.model.load_state_dict(state["model"])'
OPTIMIZER = 'run.optimizer.load_state_dict(state["optimizers"][0])'
SCHEDULE = 'run.scheduler.load_state_dict(state["schedulers"][0])'
AVERAGE = 'run.average.load_state_dict(state["algorithms"]["average"])'
WAITS = 'run.patience.waits = state["callbacks"]["patience"]["waits"]'
training_state = Spec(
    todo="11.2",
    truth=course.TrainingState,
    cases=runs,
    observe=resumed,
    tell=tell_run,
    facts=tell_random,
    independent=True,
    may_change=("torch's random numbers",),
    limit_s=20.0,
    mistake_s=4.0,
    at_once=20,
    advice={
        STAY: 'Load random numbers only where self.rank is in state["ranks"].',
        "": "Compare the names in the docstring with what each of your two methods handles.",
    },
    reasons="""
        has no attribute 'state_dict' :: Not every item has a state_dict() of its own. |
            run.timestamp, run.train_metrics and run.eval_metrics are plain dicts, run.patience has
            the numbers best and waits, run.name is a text.
    """,
    hints=(
        "Model, optimizer, scheduler, average, scaler and position have state_dict() and "
        "load_state_dict(). Of run.patience keep best and waits, and the seed is "
        "run.position.seed. The dicts timestamp, train_metrics and eval_metrics go in as they are.",
        "All of these share memory with the training, so return copy.deepcopy(...) of the dict. "
        "An optimizer goes on in the tensors that it is given, so copy before loading as well.",
        'Last come the random numbers: "ranks": {self.rank: {"random": torch.get_rng_state()}}, '
        "and torch.set_rng_state on a rank whose name is in it.",
    ),
    mistakes="""
        {MODEL} => pass :: The weights are not restored (item 1). | {MODEL}
        {OPTIMIZER} => pass ::
            The optimizer is not restored (item 2): its moments belong to another run. | {OPTIMIZER}
        {SCHEDULE} => pass ::
            The schedule is not restored (item 3), so the learning rate jumps. | {SCHEDULE}
        {AVERAGE} => pass :: The average of the weights is not restored (item 4). | {AVERAGE}
        {WAITS} => pass :: Early stopping counts anew (item 5), so it stops too late. | {WAITS}
        run.scaler.load_state_dict(state["scaler"]) => pass ::
            The loss scale starts anew (item 6). | Restore run.scaler.
        run.timestamp = state["timestamp"] => pass :: The timestamp is not restored (item 7): the
            next evaluation comes at another step. | Restore run.timestamp.
        run.position.seed = state["rank_zero_seed"] => pass :: The seed is not restored (item 8), so
            the samples come in another order. | Restore run.position.seed.
        run.train_metrics = state["train_metrics"] => pass ::
            The mean loss of this epoch starts anew (item 9). | Restore run.train_metrics.
        run.eval_metrics = state["eval_metrics"] => pass ::
            The best accuracy so far is forgotten (item 10). | Restore run.eval_metrics.
        run.name = state["run_name"] => pass ::
            The run goes on under another name (item 11). | Restore run.name.
        run.position.load_state_dict(state["dataset_state"]) => pass :: The place in the data is not
            restored (item 12): samples come twice or never. | Restore run.position.
        if self.rank in state["ranks"]: => if False: ::
            The random numbers are not restored, so dropout drops others. | torch.set_rng_state(...)
        return copy.deepcopy(live) => return live :: The state refers to the tensors that the
            training changes, so this checkpoint changes with them. | return copy.deepcopy(...)
        state = copy.deepcopy(state) => pass :: The optimizer trains on in the tensors of `state`,
            so the checkpoint in memory changes. | Load copy.deepcopy(state).
    """,
    module=globals(),
)

# ---- 11.1 -----------------------------------------------------------------------------------


class Walk(NamedTuple):
    """A way through the data: so many samples in each step, and then a state is taken."""

    num_samples: int
    seed: int
    steps: list[int]


def walks() -> list[Walk]:
    """At the beginning, in the first epoch, at its end, in the second, with a small last batch."""
    seed = cases.draw_seed() % 1000
    return [
        Walk(6, seed, []),
        Walk(8, seed, [3]),
        Walk(8, seed, [4, 4]),
        Walk(10, seed, [4, 4, 2, 4]),
        Walk(7, seed, [3, 3, 1, 3, 3]),
    ]


def walked(answer: Callable, case: Walk) -> dict:
    """The place, what is left of the epoch, and both once more after loading elsewhere."""
    position = answer(case.num_samples, case.seed)
    for num in case.steps:
        position.advance(num)
    state = position.state_dict()
    snapshot = copy.deepcopy(state)
    if not isinstance(state, dict):
        raise malformed(state, "a dict", 'Return {"epoch": ..., "position": ...}.')
    left = list(position)
    list(islice(iter(position), 3))  # a loader that draws ahead
    seen = {
        "the state": state,
        "samples that are left of the epoch": left,
        "drawing samples does not move the place": position.state_dict() == snapshot,
    }
    drawn: list[int] = []

    class Drawn(answer):
        def __iter__(self):
            for index in super().__iter__():
                drawn.append(index)
                yield index

    other = Drawn(case.num_samples, case.seed)
    for num in (case.num_samples, case.num_samples, 2):  # into the third epoch
        other.advance(num)
    other.load_state_dict(copy.deepcopy(state))
    seen["loading draws no sample"] = not drawn
    seen["samples after loading"] = list(other)
    seen["the state after loading"] = other.state_dict()
    drawing = iter(other)
    step = [index for index, _ in zip(drawing, range(2), strict=False)]
    other.advance(len(step))
    seen["the state one step later"] = other.state_dict()
    seen["samples one step later"] = list(other)
    seen["what was being drawn before the step goes on as it was"] = list(drawing)
    return seen


def tell_walk(case: Walk) -> str:
    """The way."""
    return f"Position({case.num_samples}, seed={case.seed}) after steps of {case.steps} samples"


LEFT = "return iter(self.order()[self.position :])"
COUNTED = (
    "for index in self.order()[self.position :]:\\n"
    "            self.position += 1\\n            yield index"
)
ENDS = "if self.position >= self.num_samples:"
position = Spec(
    todo="11.1",
    truth=course.Position,
    cases=walks,
    observe=walked,
    tell=tell_walk,
    independent=True,
    advice={
        "": "Write down epoch and position after each step of this way.",
        "loading draws no sample": "load_state_dict sets epoch and position, and nothing else.",
    },
    hints=(
        "self.order() gives all samples of the epoch in order. The first self.position of them "
        "are behind the training.",
        "advance adds to self.position. When all samples of the epoch are behind it, the place is "
        "position 0 of the next epoch, so that the state is never at the end of one.",
    ),
    mistakes=r"""
        {LEFT} => return iter(self.order()) ::
            The epoch begins anew, whatever the position is. | self.order()[self.position :]
        {LEFT} => return iter(self.order()[: self.position]) ::
            These samples are behind the training; the others are left.
        {LEFT} => return iter(range(self.position, self.num_samples)) ::
            The samples come without the epoch's order. | Take them from self.order().
        {LEFT} => return iter(torch.randperm(self.num_samples).tolist()[self.position :]) ::
            The order depends on torch's random numbers, so nobody finds it again. | self.order()
        {LEFT} => {COUNTED} :: Samples count when they are drawn, and a loader draws ahead of the
            training. | Only advance() moves self.position.
        self.position += num_samples => self.position += 1 ::
            Steps are counted, not samples. | self.position += num_samples
        {ENDS} => if self.position > self.num_samples: :: At the end of an epoch the place stays
            there, with nothing left. | position == num_samples is position 0 of the next epoch.
        {ENDS} => if False: :: No epoch ever ends.
        self.epoch += 1 => pass ::
            The epoch is not counted, so each has the same order. | self.epoch += 1
        self.epoch += 1\n            self.position = 0 => self.epoch += 1 ::
            The position does not begin at 0 in a new epoch. | self.position = 0
        self.epoch = state["epoch"] => pass :: The epoch is not restored, so the samples come in
            another epoch's order. | self.epoch = state["epoch"]
        self.position = state["position"] => pass :: The position is not restored, so the place is
            where this object stood before. | self.position = state["position"]
    """,
    module=globals(),
)
