"""Answers tried on ranks: what each call shows there, written down as plain data.

    steps x answers --> ranks --> an outcome for each rank --> a row for each step

    outcome    what one call shows on one rank
    row      the outcomes of all ranks in one step

Each outcome is written to a file as soon as it is there, so that nothing is lost where a later call
hangs or ends its process. Before each call the random numbers of the process start alike, and after
it the states that a call can leave behind are looked at and put back.
"""

import copy
import faulthandler
import hashlib
import os
import pickle
import random
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist

from manyhands.checks.engine.card import Wrong
from manyhands.checks.engine.mistakes import Change
from manyhands.checks.engine.spec import Place, Spec, Step
from manyhands.checks.engine.values import Malformed, same
from manyhands.checks.engine.wire import End, Wire, lost
from manyhands.ranks.failures import Failure, RankFailed
from manyhands.ranks.lab import run_ranks

PARTED_S = 0.5  # how long all others must have slept before a rank that failed leaves them


@dataclass(frozen=True)
class Outcome:
    """What one call shows on one rank.

    `kind` says what `data` is: "value", plain data; "raised", the names of the error's classes and
    its message; "explained", what was seen, why and a hint; "lost", what became of a message.
    """

    kind: str
    data: object
    frames: tuple = ()  # of an error: the learner's lines, innermost last
    changed: tuple[str, ...] = ()  # what the call left changed besides

    @property
    def failure(self) -> Failure:
        """The error of an outcome that was raised."""
        names, message = self.data
        return Failure(names[0], message, list(self.frames), 0.0)


StepOutcomes = list[Outcome]  # of one step, one for each rank


# ---- on the ranks ---------------------------------------------------------------------------


def _work(spec: Spec, jobs: list[tuple[object, Step]], cases: dict, folder: str) -> None:
    """Every job in turn on this rank; ends where the ranks part."""
    me = dist.get_rank() if spec.layouts else 0
    _move_to(Path(folder, f"files-{me}"))
    places = _places(spec, me)
    meeting = Meeting(folder) if spec.layouts else None
    made: tuple = (None, None)
    with Path(folder, str(me)).open("ab") as log, open(os.devnull, "w") as nowhere:
        for answer, step in jobs:
            if made[0] is not answer:  # a Change is carried out once
                made = answer, _make(spec, answer)
            if isinstance(answer, Change):  # a mistake that hangs ends here, and others go on
                faulthandler.dump_traceback_later(spec.mistake_s, exit=True, file=nowhere)
            place = places[step[0]] if spec.layouts else None
            seed = 1000 * step[0] + 100 * step[1] + me
            wire = Wire(place, spec) if place else None  # keeps messages alive until all have met
            case = spec.case(cases, step, me)
            outcome, ends, error = _outcome(spec, made[1], case, place, wire, seed)
            one_sided = meeting.wait(ends, error) if meeting else ""
            if one_sided and outcome.kind == "value":
                outcome = Outcome("lost", one_sided)
            pickle.dump(outcome, log)
            log.flush()
            if one_sided:
                break
        faulthandler.cancel_dump_traceback_later()


def _move_to(folder: Path) -> None:
    """Work in a new folder, which goes when the ranks have gone.

    What a wrong answer writes under a relative name would otherwise stay beside the notebook.
    Modules beside the notebook can still be imported, since the process of a rank is given
    sys.path with whole paths.
    """
    folder.mkdir()
    os.chdir(folder)


def _make(spec: Spec, answer: object) -> object:
    """An answer as it is; a change carried out. Two changes at once may not fit together."""
    if not isinstance(answer, Change):
        return answer
    try:
        return answer.make(spec.truth)
    except (AttributeError, LookupError, SyntaxError, TypeError) as error:
        message = f"this change cannot be made: {error}"

        def unmade(*args: object, **named: object) -> None:
            raise LookupError(message)

        return unmade


def _places(spec: Spec, me: int) -> list[Place]:
    places = []
    for number, layout in enumerate(spec.layouts):
        groups = [dist.new_group(list(members)) if number else None for members in layout]
        mine = spec.group(number, me)
        places.append(Place(groups[layout.index(mine)], mine, mine.index(me)))
    return places


def _outcome(
    spec: Spec,
    answer: object,
    case: object,
    place: Place | None,
    wire: Wire | None,
    seed: int,
) -> tuple[Outcome, list, Exception | None]:
    """One outcome; the ends of its messages; and the error, if the call raised one."""
    given = copy.deepcopy(case)
    _seed(seed)
    before = states()
    error: Exception | None = None
    try:
        if wire:
            with wire:
                data = spec.observe(answer, given, place)
        else:
            data = spec.observe(answer, given)
        outcome = Outcome("value", spec.form(data))
    except Malformed as bad:
        seen, why, hint = bad.args
        outcome = Outcome("explained", (f"gives {seen}", why, hint))
    except Wrong as wrong:
        error = wrong
        outcome = Outcome("explained", (wrong.seen, wrong.why, wrong.hint))
    except Exception as raised:
        if type(raised) is NotImplementedError and re.match(r"TODO|$", str(raised)):
            raise  # the learner's own stub; torch raises this error, too, and says why
        error = raised
        failure = Failure.from_exception(raised)
        names = tuple(one.__name__ for one in type(raised).__mro__[:-2])
        outcome = Outcome("raised", (names, failure.message), tuple(failure.frames))
    after = states()
    _restore(before)
    ends = wire.ends if wire else []
    if outcome.kind != "value":
        return outcome, ends, error
    return _side_effects(spec, outcome, given, case, before, after, wire), ends, None


def _side_effects(spec, outcome: Outcome, given, case, before: dict, after: dict, wire) -> Outcome:
    """Write down what the call changed besides; the truth may change the same."""
    changed = [name for name in before if before[name] != after[name]]
    names = getattr(case, "_fields", ())
    pairs = zip(names, given, case, strict=True) if names else [("case", given, case)]
    changed += [f"`{name}`" for name, now, was in pairs if not unchanged(now, was)]
    if wire and wire.unwaited:
        changed.append(UNWAITED)
    may = {*spec.may_change, *(f"`{name}`" for name in spec.may_change)}
    left = tuple(name for name in changed if name not in may)
    return Outcome("value", outcome.data, changed=left)


UNWAITED = "a message on its way"


def unchanged(now: object, was: object) -> bool:
    """Is an argument as it was? Of tensors also whether they want a gradient, and the gradient."""
    if isinstance(now, torch.Tensor) and isinstance(was, torch.Tensor):
        alike = now.requires_grad == was.requires_grad and same(now, was, 1e-15)
        return alike and (not was.is_leaf or unchanged(now.grad, was.grad))
    if isinstance(now, torch.nn.Module) and isinstance(was, torch.nn.Module):
        return now.training == was.training and unchanged(now.state_dict(), was.state_dict())
    if isinstance(now, dict) and isinstance(was, dict):
        return now.keys() == was.keys() and all(unchanged(now[k], v) for k, v in was.items())
    if isinstance(now, list | tuple) and isinstance(was, list | tuple):
        pairs = zip(now, was, strict=False)
        return len(now) == len(was) and all(unchanged(a, b) for a, b in pairs)
    if type(was).__eq__ is object.__eq__:  # it says nothing of its content
        return True
    try:
        return bool(now == was)
    except (RuntimeError, ValueError):  # a comparison that gives many values
        return True


# ---- states of a process that a call can leave behind ---------------------------------------


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.random.default_generator.manual_seed(seed)


def states() -> dict[str, object]:
    """What a call of an answer may leave changed, by the names that a learner reads."""
    return {
        "torch's random numbers": hashlib.md5(torch.get_rng_state().numpy()).hexdigest(),
        "NumPy's random numbers": hashlib.md5(np.random.get_state()[1].tobytes()).hexdigest(),
        "Python's random numbers": hash(random.getstate()),
        "torch's default type": torch.get_default_dtype(),
        "whether torch records gradients": torch.is_grad_enabled(),
        "torch's anomaly detection": torch.is_anomaly_enabled(),
        "the environment variables": _environment(),
        "the working folder": os.getcwd(),
    }


def _environment() -> dict[str, str]:
    """The variables, but for the folder that torch chooses where first an optimizer steps."""
    return {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}


def _restore(before: dict[str, object]) -> None:
    torch.set_default_dtype(before["torch's default type"])
    torch.set_grad_enabled(before["whether torch records gradients"])
    torch.autograd.set_detect_anomaly(before["torch's anomaly detection"])
    if _environment() != before["the environment variables"]:
        os.environ.clear()
        os.environ.update(before["the environment variables"])
    os.chdir(before["the working folder"])


# ---- do the ranks still walk together? ------------------------------------------------------


class Meeting:
    """All ranks of the job meet after each step, over memory that they share.

    A message would do as well, but gloo takes milliseconds for one, and a verdict has hundreds of
    steps. Each rank has a row: its process, how many steps it has ended, and twice (for the steps
    of even and of odd number) the sends less the recvs that it saw, from each rank to each rank.
    """

    def __init__(self, folder: str) -> None:
        self.n = dist.get_world_size()
        self.me = dist.get_rank()
        self.num_steps = 0
        shape = (self.n, 2 + 2 * self.n * self.n)
        # As a plain array: each look at a memmap takes several times as long.
        self.rows = np.asarray(np.memmap(Path(folder, "meeting"), np.int64, "r+", shape=shape))
        self.rows[self.me, 0] = os.getpid()

    @staticmethod
    def prepare(folder: str, n: int) -> None:
        """Make the file, before the ranks start."""
        Path(folder, "meeting").write_bytes(bytes(8 * n * (2 + 2 * n * n)))

    def wait(self, ends: list[End], error: Exception | None) -> str:
        """Wait until all ranks have ended this step; words for a message that has one end only.

        A rank that raised an error raises it here where all others sleep in messages in which it
        no longer takes part; it never leaves others that compute, however slow the machine is.
        """
        first = 2 + self.n * self.n * (self.num_steps % 2)
        balance = self.rows[:, first : first + self.n * self.n].reshape(self.n, self.n, self.n)
        balance[self.me] = 0
        for op, source, target in ends:
            balance[self.me, source, target] += 1 if op == "send" else -1
        self.num_steps += 1
        self.rows[self.me, 1] = self.num_steps
        pause_s = 0.0
        asleep_s = 0.0
        while len(away := np.flatnonzero(self.rows[:, 1] < self.num_steps)):
            time.sleep(pause_s)  # of 0: lets the others have the processor
            pause_s = min(pause_s + 1e-5, 0.02)
            if error:
                asleep_s = asleep_s + pause_s if self._sleep(away) else 0.0
                if asleep_s > PARTED_S:
                    raise error
        return lost(balance.sum(0))

    def _sleep(self, ranks: np.ndarray) -> bool:
        with suppress(psutil.NoSuchProcess):
            pids = [int(self.rows[rank, 0]) for rank in ranks]
            return all(pid and psutil.Process(pid).status() == ASLEEP for pid in pids)
        return True


ASLEEP = psutil.STATUS_SLEEPING


# ---- at home --------------------------------------------------------------------------------


def try_answers(
    spec: Spec, answers: list, steps: list[Step], cases: dict, limit_s: float, quiet: bool = True
) -> tuple[list[StepOutcomes], RankFailed | None]:
    """What all answers show, one answer after the other; and the failure that ended them."""
    jobs = [(answer, step) for answer in answers for step in steps]
    failed = None
    with tempfile.TemporaryDirectory() as folder:
        Meeting.prepare(folder, spec.size)
        try:
            with sendable(answers):
                run_ranks(
                    _work,
                    spec.size,
                    spec,
                    jobs,
                    cases,
                    folder,
                    timeout_s=limit_s,
                    quiet=quiet,
                    join=bool(spec.layouts),
                    rules="",  # a verdict is the same wherever an answer is judged
                )
        except RankFailed as error:
            failed = error
        logs = [_kept(Path(folder, str(rank))) for rank in range(spec.size)]
    return [list(row) for row in zip(*logs, strict=False)], failed


@contextmanager
def sendable(answers: list) -> Iterator[None]:
    """Take off @once_differentiable: it holds a module of C, which cannot be sent to a rank."""
    wrapped = {}
    for answer in answers:
        backward = getattr(answer, "backward", None)
        is_torch_s = getattr(backward, "__globals__", None) is vars(torch.autograd.function)
        if isinstance(answer, type) and is_torch_s and hasattr(backward, "__wrapped__"):
            wrapped[answer] = backward
            answer.backward = staticmethod(backward.__wrapped__)
    try:
        yield
    finally:
        for answer, backward in wrapped.items():
            answer.backward = staticmethod(backward)


def _kept(path: Path) -> list[Outcome]:
    outcomes: list[Outcome] = []
    if path.is_file():
        with path.open("rb") as file, suppress(EOFError, pickle.UnpicklingError):
            while True:
                outcomes.append(pickle.load(file))
    return outcomes


def try_changes(
    spec: Spec, changes: list[Change], steps: list[Step], cases: dict, limit_s: float
) -> list[list[StepOutcomes]]:
    """What each change shows in the steps; where it ends or hangs the ranks, in the first at most.

    Fewer changes where the time did not suffice; the one that it ended in counts as hanging.
    """
    found: list[list[StepOutcomes]] = []
    until_s = time.monotonic() + limit_s
    while len(found) < len(changes) and time.monotonic() < until_s:
        left = changes[len(found) :]
        rows, failed = try_answers(spec, left, steps, cases, until_s - time.monotonic())
        found += [rows[at : at + len(steps)] for at in range(0, len(rows), len(steps))]
        if failed and len(rows) % len(steps) == 0:
            found.append([])  # the one that came next
    return found[: len(changes)]
