"""11.7: saves that go on while training goes on, on a disk that waits until it is told to write."""

import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

from manyhands.checkpoint import asynchronous as course
from manyhands.checks.engine import cases
from manyhands.checks.engine.spec import Spec
from manyhands.saving import sharded
from manyhands.saving.sharded import load_sharded
from manyhands.saving.store import Store

LOOK_S = 0.05
LOOKS = 10  # at a trainer that waits in save(), until it is believed to wait for its thread
LOOKS_LONG = 60  # at one that stays there and does something else: a busy machine is slow
WAITING = {"join", "wait", "wait_for", "acquire"}  # calls of threading
FULL = "No space left on device"
WAIT_S = 0.05  # for which the disk still writes when wait() is called


class Saves(NamedTuple):
    """A training that saves some times; in one of them the disk is full."""

    seed: int
    num_saves: int
    full_at: int  # 0: never


def trainings() -> list[Saves]:
    """One save; several; one that fails in the middle and one that fails at the end."""
    seed = cases.draw_seed()
    return [Saves(seed, 1, 0), Saves(seed, 3, 0), Saves(seed, 3, 2), Saves(seed, 2, 2)]


class Gate:
    """A disk that takes and writes a save when it is told to, and notes how many it has at once.

    A save's thread reads the tensors when it copies them or hands them to the disk. If it came to
    that before the training goes on, tensors that nobody has copied would look right. So both wait.
    """

    def __init__(self, full_at: int) -> None:
        self.full_at = full_at
        self.released = 0  # the newest save that the disk may write
        self.changed = threading.Condition()
        self.trainer = threading.current_thread()
        self.step = 0  # of the newest save() that the trainer has called
        self.in_save = False  # where the trainer is; outside of save() everything waits for it
        self.lock = threading.Lock()
        self.at_work: set[str] = set()  # addresses of saves that the disk has
        self.most = 0
        self.finished = 0
        self.groups: list[object] = []  # in which save_sharded was called

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """The trainer is in its call of save()."""
        self.step, self.in_save = step, True
        try:
            yield
        finally:
            self.in_save = False

    def take(self, store: Store) -> None:
        """Begin to work at a save; waits for its release."""
        with self.lock:
            self.at_work.add(store.address)
            self.most = max(self.most, len(self.at_work))
        step = int(store.address.rpartition("-")[2])
        if not self.is_released(step):
            self.release(step)  # a save() that waits for its thread must end

    def write(self, store: Store, real: Callable, name: str, fill: Callable) -> object:
        """Called instead of Store.write."""
        self.take(store)
        try:
            if self.full_at and store.address.endswith(f"step-{self.full_at}"):
                raise OSError(28, FULL)
            return real(store, name, fill)
        finally:
            with self.lock:
                self.at_work.discard(store.address)
                self.finished += 1

    def is_released(self, step: int) -> bool:
        """Wait for it, in vain where save() itself waits for this thread."""
        looks = waits = 0
        with self.changed:
            while threading.current_thread() is not self.trainer:
                if self.changed.wait_for(lambda: self.released >= step, LOOK_S):
                    return True
                looks = looks + 1 if self.in_save else 0
                waits = waits + 1 if self.in_save and self.trainer_waits() else 0
                if waits >= LOOKS or looks >= LOOKS_LONG:
                    break
        return False

    def trainer_waits(self) -> bool:
        """Is the trainer in a call that waits for a thread, and not for a new one to begin?"""
        frame = sys._current_frames().get(self.trainer.ident)
        calls = set()
        while frame is not None:
            if frame.f_code.co_filename == threading.__file__:
                calls.add(frame.f_code.co_name)
            frame = frame.f_back
        return bool(calls & WAITING) and "start" not in calls

    def release(self, step: int) -> None:
        """Let the disk write all saves up to that of `step`."""
        with self.changed:
            self.released = max(self.released, step)
            self.changed.notify_all()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Every Store, and every copy that a thread makes, goes through this gate."""
        gate, write, remove, copy = self, Store.write, Store.remove, course.Background.copy
        join, agree = threading.Thread.join, sharded.together

        def take_and_remove(self: Store, *args: object) -> object:
            gate.take(self)  # the first that save_sharded asks of a disk
            return remove(self, *args)

        def copy_when_released(self: object, state: Mapping) -> Mapping:
            gate.is_released(gate.step)
            return copy(self, state)

        def join_on_a_slow_disk(self: threading.Thread, timeout: float | None = None) -> None:
            join(self, timeout if timeout is None else 0.0)  # the disk is slower than any limit

        def agree_in(action: Callable, group: object = None) -> object:
            gate.groups.append(group)
            return agree(action, group)

        with (
            mock.patch.object(threading.Thread, "join", join_on_a_slow_disk),
            mock.patch.object(sharded, "together", agree_in),
            mock.patch.object(Store, "write", lambda self, *args: gate.write(self, write, *args)),
            mock.patch.object(Store, "remove", take_and_remove),
            mock.patch.object(course.Background, "copy", copy_when_released),
        ):
            yield


def saves_seen(answer: type, case: Saves) -> dict:
    """What is in each checkpoint, which calls raise, and what save() waits for."""
    folder = Path(tempfile.mkdtemp(prefix=f"manyhands-{case.seed}-"))
    before = set(threading.enumerate())
    gate = Gate(case.full_at)
    try:
        with gate.closed():
            try:
                saver = answer()
                saver.group = object()  # without other ranks nothing is sent through it
                seen = _train(saver, case, folder, gate)
                # A save_sharded that stands in the learner's notebook is not seen.
                seen["save_sharded is given self.group"] = set(gate.groups) <= {saver.group}
            finally:
                gate.release(case.num_saves)
            for thread in set(threading.enumerate()) - before:
                thread.join()  # so that none writes into the next case
        for step in range(1, case.num_saves + 1):
            seen[f"checkpoint {step}"] = content(folder / f"step-{step}")
        return seen
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _train(saver: object, case: Saves, folder: Path, gate: Gate) -> dict:
    draw = cases.generator(case.seed)
    state = zeros()
    for tensor in state["model"].values():
        tensor += cases.values(tensor.shape, draw).to(tensor.dtype)
    seen: dict = {}
    places: list[dict] = []
    for step in range(1, case.num_saves + 1):
        state["step"] = step
        for tensor in state["model"].values():
            tensor += 1  # in place, as an optimizer does
        # the disk goes on with the last save while this one may wait for it
        timer = threading.Timer(0.05, gate.release, [step - 1])
        if step > 1:
            timer.start()
        with gate.saving(step):
            save = partial(saver.save, state, folder / f"step-{step}")
            seen[f"save {step} raises"] = error_of(save)
        if step == 1:
            seen["save returns before the disk has written"] = gate.finished == 0
        else:
            timer.join()
        places.append({n: b.data_ptr() for n, b in getattr(saver, "buffers", {}).items()})
    for tensor in state["model"].values():
        tensor.fill_(-99)
    late = threading.Timer(WAIT_S, gate.release, [case.num_saves])
    late.start()
    seen["the first wait raises"] = error_of(saver.wait)
    numbers = range(1, case.num_saves + 1)
    started = max((n for n in numbers if seen[f"save {n} raises"] == "nothing"), default=0)
    all_written = gate.released >= started and not gate.at_work
    seen["wait returns when the disk has written"] = all_written
    seen["the second wait raises"] = error_of(saver.wait)
    seen["at most one write is on its way"] = gate.most == 1
    seen["every save uses the buffers of the first"] = all(one == places[0] for one in places)
    return seen


def error_of(call: Callable) -> str:
    """What a call raises, in a word."""
    try:
        call()
    except (ValueError, OSError) as problem:
        return "that the disk is full" if FULL in str(problem) else f"{problem}"
    return "nothing"


def content(folder: Path) -> object:
    """The tensors and values of a checkpoint; a word where it is not complete."""
    with suppress(ValueError):
        return flat(load_sharded(zeros(), folder))
    return "not complete"


def zeros() -> dict:
    """A state of several types; of one tensor the elements do not lie side by side."""
    model = {"w": torch.zeros(6), "t": torch.zeros(2, 3, dtype=torch.float64).t()}
    return {"model": model | {"n": torch.zeros(4, dtype=torch.int64)}, "step": 0}


def flat(state: Mapping) -> dict:
    """One dict."""
    return {**state["model"], "step": state["step"]}


FIRST = "save() calls self.wait() before anything else."
COPY = "Copy every tensor with self.copy(state) before the thread starts."
THREAD = "threading.Thread(target=self.write, args=(copied, folder), daemon=True), then start()."
ONCE = "Take the problem away before raising it, so that the next wait() does not raise it again."
LIVE = "The thread writes the tensors that training goes on to change."
DEAF = "Nobody hears that a save has failed."
KEPT = "write() keeps every Exception in self.problem, and wait() raises it."
async_saver = Spec(
    todo="11.7",
    truth=course.AsyncSaver,
    cases=trainings,
    observe=saves_seen,
    tell=lambda case: f"AsyncSaver in a training with {case.num_saves} saves",
    independent=True,
    mistake_s=4.0,
    advice={
        "save returns before the disk has written": THREAD,
        "at most one write is on its way": FIRST,
        "": "Who may change the tensors while the thread writes, and who hears of its error?",
    },
    hints=(
        "Four things come in this order: wait for the save before, copy, start a thread, return.",
        f"{COPY} {THREAD}",
        "An error in a thread is printed and then lost. write() keeps it in self.problem; wait() "
        f"joins the thread, and raises it. {ONCE}",
    ),
    mistakes=r"""
        self.wait()\n        copied => copied ::
            The next save starts while the one before is still being written. | {FIRST}
        copied = self.copy(state) => copied = state :: {LIVE} | {COPY}
        self.wait()\n        copied = self.copy(state) => copied = self.copy(state); self.wait() ::
            The buffers are overwritten while the save before is still written from them. | {FIRST}
        copied = self.copy(state) => copied = state
        save_sharded(state => save_sharded(self.copy(state) ::
            The thread makes the copy, when training has gone on. | {COPY}
        self.buffers[name].copy_(tensor) => tensor ::
            {LIVE} | Return the buffer with the numbers of `tensor`.
        self.thread.start() => self.thread.run() ::
            run() writes in the training itself, which waits for the disk. | {THREAD}
        self.thread.start() => self.thread.start(); self.thread.join() ::
            The training waits for its thread.
        if problem is not None: => if False: :: {DEAF} | {KEPT}
        self.problem = problem => raise :: {DEAF}
        except Exception as problem: => except ZeroDivisionError as problem: :: {DEAF}
        problem, self.problem = self.problem, None => problem = self.problem ::
            The error of one save comes out again and again. | {ONCE}
        if name not in self.buffers: => if True: ::
            Every save makes new buffers. | Keep each under its name in self.buffers.
    """,
    module=globals(),
)
