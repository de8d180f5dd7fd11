"""Wrong answers to lesson 11 that its checks once took for right."""

import math
import os
import shutil
import tempfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import torch

from manyhands.checkpoint import dcp, pods, state
from manyhands.checkpoint.asynchronous import AsyncSaver
from manyhands.checkpoint.interval import account
from manyhands.saving import pieces, sharded, store

WRONG: dict[str, list] = defaultdict(list)


def wrong(todo, words=""):
    return lambda answer: WRONG[todo].append((answer, words)) or answer


def in_own_way(swap=os.replace, mode="wb", errors=BaseException, call=None, folder=None):
    """write_whole, but for one step."""

    def whole(path, fill):
        partial = f"{folder or os.path.dirname(path) or '.'}/{os.path.basename(path)}.partial"
        try:
            with open(partial, mode) as file:
                made = (call or (lambda fill, file: fill(file)))(fill, file)
                file.flush()
                if swap is not synced_late:
                    os.fsync(file.fileno())
            swap(partial, path)
        except errors:
            Path(partial).unlink(missing_ok=True)
            raise
        store.sync_folder(os.path.dirname(path))
        return made

    return whole


def synced_late(partial, path):
    os.replace(partial, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def unlinked_first(partial, path):
    Path(path).unlink(missing_ok=True)
    os.rename(partial, path)


def filled_again(fill, file):
    try:
        return fill(file)
    except OSError:
        file.seek(0)
        file.truncate()
        return fill(file)


def whole_without_care_at_fsync(path, fill):
    partial = f"{path}.partial"
    with open(partial, "wb") as file:
        try:
            made = fill(file)
        except BaseException:
            os.remove(partial)
            raise
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    store.sync_folder(os.path.dirname(path))
    return made


WRONG["11.3"] += [
    (in_own_way(swap=unlinked_first), "the old file stands there until the new one does"),
    (in_own_way(swap=synced_late), "on the disk before the file has its name"),
    (in_own_way(swap=shutil.move, folder=tempfile.gettempdir()), "comes from the same folder"),
    (in_own_way(mode="xb"), "FileExistsError"),
    (in_own_way(mode="ab"), "What a killed process has left"),
    (in_own_way(errors=Exception), "is stopped by Ctrl-C"),
    (in_own_way(errors=(OSError, KeyboardInterrupt)), "nothing is left beside the file"),
    (in_own_way(call=filled_again), "calls of `fill`: 2, not 1"),
    (whole_without_care_at_fsync, "finds out at fsync"),
]


@wrong("11.5", "lists in a Box")
def overlap_of_lists(first, second):
    found = pieces.overlap(first, second)
    return found and pieces.Box(*map(list, found))


@wrong("11.5", "nothing in common")
def overlap_where_the_second_begins(first, second):
    starts, sizes = [], []
    for a, n, b, m in zip(*first, *second, strict=True):
        if not a <= b < a + n:
            return None
        starts.append(b)
        sizes.append(min(a + n, b + m) - b)
    return pieces.Box(tuple(starts), tuple(sizes))


@wrong("11.6", "a list, not a tuple")
def parts_with_lists(held, tensors):
    found = sharded.parts_to_copy(held, tensors)
    return {file: [(n, list(at), common) for n, at, common in of] for file, of in found.items()}


@wrong("11.7", "save_sharded is given self.group")
class SaverOfAllRanks(AsyncSaver):
    def write(self, state, folder):
        try:
            sharded.save_sharded(state, folder)
        except Exception as problem:
            self.problem = problem


@wrong("11.7", "checkpoint 1")
class SaverInFloat32(AsyncSaver):
    def copied(self, name, tensor):
        return self.buffers.setdefault(name, torch.empty(tensor.shape)).copy_(tensor)


@wrong("11.7", "wait returns when the disk has written")
class ImpatientSaver(AsyncSaver):
    def join(self):
        if self.thread is not None:
            self.thread.join(0.5)


@wrong("11.1", "samples after loading")
class PositionOfALaterEpoch(state.Position):
    """A stored 0 counts for nothing."""

    def load_state_dict(self, given):
        self.epoch = given["epoch"] or self.epoch
        self.position = given["position"]


@wrong("11.1", "loading draws no sample")
class PositionThatDraws(state.Position):
    def load_state_dict(self, given):
        self.epoch, self.position = given["epoch"], 0
        drawing = iter(self)
        for _ in range(given["position"]):
            next(drawing)
        self.position = given["position"]


@wrong("11.2", "the best loss that early stopping knows")
class StateWithoutInfinity(state.TrainingState):
    """As for JSON, which has none."""

    def state_dict(self):
        found = super().state_dict()
        patience = found["callbacks"]["patience"]
        patience["best"] = 0.0 if math.isinf(patience["best"]) else patience["best"]
        return found


@wrong("11.8", "place in the data")
class AppWithAMemory(dcp.AppState):
    """Every save has the state of the first one."""

    def state_dict(self):
        if not hasattr(self, "first"):
            self.first = super().state_dict()
        return self.first


@wrong("11.8", "leaves its weights unchanged")
class AppThatSteps(dcp.AppState):
    """A step with gradients of 0 makes the state, and AdamW's decay changes the weights."""

    def state_dict(self):
        if not self.optimizer.state:
            for group in self.optimizer.param_groups:
                for param in group["params"]:
                    param.grad = torch.zeros_like(param)
            self.optimizer.step()
        return super().state_dict()


@wrong("11.10")
def account_without_a_way_back(events):
    """At each resume what is left counts as useful for ever."""
    useful = lost = 0.0
    steps = {}
    for before, event in pairwise(events):
        if event.kind == "step":
            steps[event.step] = event.time_s - before.time_s
        if event.kind == "resumed":
            useful += sum(s for step, s in steps.items() if step <= event.step)
            lost += sum(s for step, s in steps.items() if step > event.step)
            steps = {}
    found = account(events)
    whole = found.useful + found.again
    useful += sum(steps.values())
    return found._replace(useful=useful, again=whole - useful)


@wrong("11.10")
def account_of_the_last_of_each_step(events):
    """A step that was lost and is not done again still counts."""
    last = {}
    for before, event in pairwise(events):
        if event.kind == "step":
            last[event.step] = event.time_s - before.time_s
    found = account(events)
    useful = sum(last.values())
    return found._replace(useful=useful, again=found.useful + found.again - useful)


@wrong("11.12", "backoffLimit is 0")
def manifest_without_a_second_try():
    found = pods.mended_job()
    found[1]["spec"]["backoffLimit"] = 0
    return found


@wrong("11.12", "4 GiB are asked for")
def manifest_in_powers_of_ten():
    found = pods.mended_job()
    found[1]["spec"]["template"]["spec"]["volumes"][0]["emptyDir"]["sizeLimit"] = "4G"
    return found


@wrong("11.12", "BROKEN itself has been changed")
def manifest_in_place():
    for one, mended in zip(pods.BROKEN, pods.mended_job(), strict=True):
        one |= mended
    return pods.BROKEN


@wrong("11.1", "what was being drawn before the step goes on as it was")
class PositionThatLooksAgain(state.Position):
    """While the loop runs the training advances, and samples are skipped."""

    def __iter__(self):
        epoch, drawn, order = self.epoch, 0, self.order()
        while self.epoch == epoch and self.position + drawn < self.num_samples:
            yield order[self.position + drawn]
            drawn += 1
