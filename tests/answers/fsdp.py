"""Answers to lesson 10 as students give them: RIGHT ones differ from the course's own, and WRONG
ones come with words that the verdict must hold. Here is 10.5; the others stand in _flat.py and
_wrapping.py."""

from itertools import chain

import torch.distributed as dist
from torch import nn

from manyhands.fsdp import units as fsdp

from . import _flat, _wrapping

RIGHT: dict[str, list] = {"10.5": [fsdp.FSDP]}
WRONG: dict[str, list] = {"10.5": []}


def right(answer):
    RIGHT["10.5"].append(answer)
    return answer


def wrong(words):
    return lambda answer: WRONG["10.5"].append((answer, words)) or answer


# ---- 10.5 FSDP ------------------------------------------------------------------------------


@right
class InAnotherOrder(fsdp.FSDP):
    """Starts before it waits, frees before it reduces, and gathers what it does in lists."""

    def before_forward(self, index):
        if index == 0:
            [flat.free() for unit in self.units for flat in unit]
            self.is_backward = False
        coming = [] if self.is_backward else self.units[index + 1 : index + 2]
        for flat in chain(self.units[index], *coming):
            flat.start()
        [flat.wait() for flat in self.units[index]]

    def after_forward(self, index):
        if self.is_backward or index == 0 or not self.reshard:
            return
        [flat.free() for flat in self.units[index]]

    def before_backward(self, index):
        self.is_backward = True
        if 0 < index < len(self.units) - 1:
            [flat.free() for flat in self.units[index + 1] if not flat.shard.requires_grad]
        for flat in self.units[index] + self.units[index - 1]:
            flat.start()
        [flat.wait() for flat in self.units[index]]

    def after_backward(self, index):
        trainable = [flat for flat in self.units[index] if flat.shard.requires_grad]
        [flat.free() for flat in trainable]
        [flat.reduce() for flat in trainable]


@right
class WithAPhaseOfItsOwn(fsdp.FSDP):
    def before_forward(self, index):
        if index == 0:
            self.phase = "forward"
            for flat in sum(self.units, []):
                flat.free()
        for flat in self.units[index]:
            flat.start()
            flat.wait()
        if self.phase == "forward" and index != len(self.units) - 1:
            for flat in self.units[index + 1]:
                flat.start()

    def after_forward(self, index):
        if self.phase == "forward" and self.reshard and index:
            for flat in self.units[index]:
                flat.free()

    def before_backward(self, index):
        self.phase = "backward"
        super().before_backward(index)


def free(unit, trains=(True, False)):
    for flat in unit:
        if flat.shard.requires_grad in trains:
            flat.free()


def start(unit):
    for flat in unit:
        flat.start()


def wait(unit):
    for flat in unit:
        flat.wait()


def forward(reset=True, frees=chain, waits=wait, starts=None, asks=True, free_last=False):
    """An FSDP with another before_forward. `frees` and `starts` choose units, or flats of them."""
    starts = starts or (lambda units, index: chain(*units[index + 1 : index + 2]))

    class WithAnotherForward(fsdp.FSDP):
        def before_forward(self, index):
            if index == 0 and reset:
                self.is_backward = False
            if free_last:
                start(starts(self.units, index) if not self.is_backward else [])
            free(frees(*self.units) if index == 0 else [])
            waits(self.units[index])
            if not free_last and not (asks and self.is_backward):
                start(starts(self.units, index))

    return WithAnotherForward


def backward(starts=lambda units, index: units[index - 1]):
    """An FSDP with another before_backward, which never frees."""

    class WithAnotherBackward(fsdp.FSDP):
        def before_backward(self, index):
            self.is_backward = True
            wait(self.units[index])
            start(starts(self.units, index))

    return WithAnotherBackward


def nothing(*_):
    return []


WRONG["10.5"] += [
    (forward(waits=nothing, starts=nothing), "this unit computes now, with memory that is not"),
    (forward(starts=nothing), "while this one computes - start() the flats of unit index + 1"),
    (forward(starts=lambda units, index: units[index + 1]), "the last unit has no next one"),
    (forward(starts=lambda units, index: chain(*units[index:])), "5 units are whole at once"),
    (forward(reset=False, asks=False), "self.is_backward still stands from the last backward"),
    (forward(asks=False), "start none while self.is_backward is True"),
    (forward(reset=False), "self.is_backward still stands from the last backward"),
    (forward(frees=nothing), "those from before the optimizer's last step"),
    (forward(waits=start), "returns before the unit has come"),
    (forward(frees=lambda root, *_: root), "for index 0 free every flat of every unit"),
    (forward(free_last=True), "began to bring unit 1, and then freed it again"),
    (backward(nothing), "after the root comes the last unit, and nothing brings it"),
    (backward(lambda units, i: [] if i else units[-1]), "start() the flats of unit index - 1"),
    (backward(lambda units, i: units[(i + 1) % 5 if i else -1]), "goes from the last to the first"),
    (backward(lambda units, i: units[min(i + 1, 4)]), "goes from the last unit to the first"),
    (backward(lambda units, i: units[i + 1 if i else -1]), "the last unit has no next one"),
    (backward(), "nothing else frees them"),
    (
        backward(lambda units, i: units[i - 1] if dist.get_rank() == 0 else []),
        "step 1, rank 1: before_backward(0) leaves",
    ),
]


@wrong("free all only before the root")
class FreesAllEachTime(fsdp.FSDP):
    def before_forward(self, index):
        free(chain(*self.units) if not self.is_backward else [])
        super().before_forward(index)


@wrong("each forward adds one: memory as without shards")
class NeverFreesInForward(fsdp.FSDP):
    def after_forward(self, index):
        pass


@wrong("after backward all weights would be there again")
class ReducesOnly(fsdp.FSDP):
    def after_backward(self, index):
        for flat in self.units[index]:
            if flat.shard.requires_grad:
                flat.reduce()


@wrong("after_backward(4) leaves the shard without a gradient")
class FreesOnly(fsdp.FSDP):
    def after_backward(self, index):
        free(self.units[index])


@wrong("zeros travel for nothing")
class ReducesAll(fsdp.FSDP):
    def after_backward(self, index):
        for flat in self.units[index]:
            flat.reduce()
        free(self.units[index], (True,))


@wrong("may still need the frozen weights")
class FreesFrozenToo(fsdp.FSDP):
    def after_backward(self, index):
        for flat in self.units[index]:
            if flat.shard.requires_grad:
                flat.reduce()
            flat.free()


@wrong("backward begins with the root")
class FreesTheRoot(fsdp.FSDP):
    def after_forward(self, index):
        if self.reshard and not self.is_backward:
            free(self.units[index])


@wrong("reshard=False keeps a unit whole until its backward")
class IgnoresReshard(fsdp.FSDP):
    def after_forward(self, index):
        if index > 0 and not self.is_backward:
            free(self.units[index])


@wrong("free nothing while self.is_backward")
class FreesInBackward(fsdp.FSDP):
    def after_forward(self, index):
        if index > 0 and self.reshard:
            free(self.units[index])


@wrong("backward of this unit begins now, with memory that is not there")
class FreesBeforeItIsUsed(fsdp.FSDP):
    def before_backward(self, index):
        super().before_backward(index)
        if index > 0:
            free(self.units[index])


@wrong("units are whole at once: memory as without shards - start() only unit index - 1")
class StartsAllInBackward(fsdp.FSDP):
    def before_backward(self, index):
        super().before_backward(index)
        start(chain(*self.units[:index] if index else self.units))


@wrong("but self.is_backward is False - set it to True in before_backward")
class NeverSets(fsdp.FSDP):
    def before_backward(self, index):
        super().before_backward(index)
        self.is_backward = False


@wrong("nothing is hidden")
class WaitsForTheNextToo(fsdp.FSDP):
    def before_forward(self, index):
        super().before_forward(index)
        if index + 1 < len(self.units) and not self.is_backward:
            wait(self.units[index + 1])


@wrong("what is there already is sent once more")
class GathersTwice(fsdp.FSDP):
    def before_forward(self, index):
        super().before_forward(index)
        free(self.units[index])
        wait(self.units[index])


@wrong("a unit is a list of flats")
class TakesAUnitForAFlat(fsdp.FSDP):
    def before_forward(self, index):
        self.units[index].wait()


@wrong("the root's backward is the first: all the other units are still needed")
class FreesBehindTheRoot(fsdp.FSDP):
    def before_backward(self, index):
        super().before_backward(index)
        free(chain(*self.units[index + 1 :]) if index < len(self.units) - 1 else [], (False,))


@wrong("where self.reshard is True, free()")
class TurnsReshardRound(fsdp.FSDP):
    def after_forward(self, index):
        if index and not self.reshard and not self.is_backward:
            free(self.units[index])


@wrong("after_forward(1) calls reduce() - gradients of a unit are all there when after_backward")
class ReducesInForward(fsdp.FSDP):
    def after_forward(self, index):
        super().after_forward(index)
        for flat in self.units[index]:
            flat.reduce()


@wrong("but self.is_backward is False")
class SetsBackTooEarly(fsdp.FSDP):
    def after_backward(self, index):
        super().after_backward(index)
        self.is_backward = False


@wrong("that is no FSDP")
class PassesTheModuleOn(nn.Module):
    def __init__(self, module, units, **options):
        super().__init__()


RIGHT = _flat.RIGHT | RIGHT | _wrapping.RIGHT
WRONG = _flat.WRONG | WRONG | _wrapping.WRONG
