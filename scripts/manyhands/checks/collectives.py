"""Checks of lesson 04. Truth is one process that holds what all ranks held before.

A case is put to the learner's function on 4 and on 5 ranks and in groups of 1 to 4 ranks. Every
rank keeps a ledger of its messages. At home the values are compared first, then the messages.
"""

import functools
import inspect
import math
import pickle
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.checks import Lesson, Wrong, ranks, told
from manyhands.instruments.ledger import Entry, Ledger, rounds
from manyhands.ranks.failures import RankFailed, RanksHung, is_echo, name_ranks, where

lesson = Lesson("collectives")
hint, summary, ready, keep = lesson.hint, lesson.summary, lesson.ready, lesson.keep

OPS = {"sum": "sum", "avg": "average", "min": "minimum", "max": "maximum"}
IN_GROUP = (
    "ranks count inside the group, from 0: its rank 0 is not the rank 0 of the job",
    "dist.get_rank(group), dist.get_world_size(group), and group=group with group_dst= or "
    "group_src= in every call",
)
ITSELF = (
    "its own number was not left out; or it is not the number that was meant",
    "leave out the own number; and a place, counted from the root, is no rank: (place + root) % n",
)
MOST_MESSAGES = 100  # of a rank in one case
WHO_TO_WHOM = "write down for these ranks who sends to whom in each step; every send needs its recv"


# ---- a case, and what a rank does with it ----------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What the learner's function is given. Numbers are whole and small, so sums are exact."""

    text: str
    sizes: tuple[int, ...]  # elements: of the tensor, of each chunk, or of each rank's message
    dtype: torch.dtype = torch.float32
    form: str = "vector"  # vector, matrix, transposed, scalar, or a column of a matrix
    root: int = 0
    op: str = "sum"
    shift: int = 0  # rank r sends to r + shift
    piece_bytes: int = 4 << 20
    any_type: bool = False  # may a message have another type than the tensor?

    def __str__(self) -> str:
        parts = [self.text]
        parts += [f"root {self.root}"] * bool(self.root) + [f'op "{self.op}"'] * (self.op != "sum")
        return ", ".join(parts)

    def memory(self, seed: int, rank: int, n: int) -> Tensor:
        """All that the rank holds before the call."""
        size = sum(self.sizes)
        if self.shift:
            size = self.sizes[rank] + self.sizes[(rank - self.shift) % n]
        shape = (size, 3) if self.form == "column" else (size,)
        numbers = torch.Generator().manual_seed(10 * seed + rank)
        values = torch.randint(1, 50, shape, generator=numbers).to(self.dtype)
        return values + 2**58 if self.dtype is torch.int64 else values  # no float holds these

    def tensor(self, memory: Tensor) -> Tensor:
        """The view of `memory` that the function is given."""
        if self.form == "column":
            return memory[:, 1]
        if self.form == "scalar":
            return memory.view(())
        matrix = memory.view(2, -1) if self.form in ("matrix", "transposed") else memory
        return matrix.t() if self.form == "transposed" else matrix

    def chunks(self, memory: Tensor) -> list[Tensor]:
        """The views of `memory` that the function is given."""
        return list(self.tensor(memory).split(self.sizes))

    def options(self, *names: str) -> dict:
        """Arguments of the call, those left out that have their default."""
        return {n: getattr(self, n) for n in names if getattr(self, n) != getattr(Case, n)}


class Refused(Exception):
    """Raised on a rank: what was seen, the misconception and a hint, a line each."""


class Watch(Ledger):
    """A ledger that refuses what an exercise does not allow, and sees waits and writes as well."""

    def __init__(self, group: dist.ProcessGroup | None, case: Case) -> None:
        super().__init__()
        self.ranks, self.case = tuple(dist.get_process_group_ranks(group)), case
        self.may_wait = self.may_be_empty = True
        self.target: Tensor | None = None  # writes into its memory are events
        self.chunks: dict[int, int] = {}  # where a chunk starts in memory -> its number
        self.numbers: list[int | None] = []  # of the chunks sent and received
        self.events: list[str] = []  # send, recv, wait, write
        self.started: list = []  # kept, since a message whose work is dropped is dropped with it
        self.waited: dict[int, dist.Work] = {}

    def __enter__(self) -> "Watch":
        self.real = {name: getattr(dist.Work, name) for name in ("wait", "is_completed")}
        for name, function in self.real.items():
            setattr(dist.Work, name, self._watched(function))
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        for name, function in self.real.items():
            setattr(dist.Work, name, function)
        super().__exit__(*exc)

    def _watched(self, function: Callable) -> Callable:
        def watched(work: dist.Work, *args: object) -> bool:
            if not self.may_wait:
                both = {entry.op for entry in self.entries} == {"send", "recv"}
                raise Refused(
                    "it waits for a message\n"
                    + ("it shall return at once, so that the caller can work meanwhile" * both)
                    + ("every rank waits here, for partners that wait here as well" * (not both))
                    + "\nisend and irecv only start, and the caller waits; dist.send and dist.recv "
                    "wait themselves"
                )
            if result := function(work, *args):
                if id(work) not in self.waited:
                    self.events.append("wait")
                self.waited[id(work)] = work
            return result

        return watched

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # torch's own signature
        num_entries = len(self.entries)
        if func.name().startswith(("c10d::send", "c10d::recv")):
            self._judge(func.name()[6:10], args)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.entries) > num_entries:
            op = self.entries[-1].op
            if op not in ("send", "recv"):
                raise Refused(
                    f"you called dist.{op}\nit is PyTorch's own; here you build it\n"
                    "only send and recv, isend and irecv, or batch_isend_irecv"
                )
            self.events.append(op)
            self.started.append(result)
        elif self.target is not None and self._is_written(func, args, kwargs or {}):
            self.events.append("write")
        return result

    def _judge(self, op: str, args: tuple) -> None:
        """Refuse a message that gloo would answer with a hang, or with the end of the process."""
        (tensor,), group, *rest = args
        ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))
        if ranks != self.ranks:
            smell, try_this = IN_GROUP
            raise Refused(f"a {op} went through the group of all ranks\n{smell}\n{try_this}")
        if len(rest) < 2:
            raise Refused(
                "a recv names no sender\nit takes whatever comes first, from anybody\n"
                "name the sender: group_src="
            )
        rank, n, peer = ranks.index(dist.get_rank()), len(ranks), rest[0]
        verb = "sends to" if op == "send" else "receives from"
        if peer == rank:
            raise Refused(f"a rank {verb} itself\n{ITSELF[0]}\n{ITSELF[1]}")
        if not 0 <= peer < n:
            raise Refused(
                f"it {verb} rank {peer}, but the ranks of the group are 0 to {n - 1}\n"
                "after the last rank comes rank 0 again, and before rank 0 the last\n"
                "take it modulo n: % n; or leave out those that do not exist"
            )
        self._judge_tensor(op, tensor)

    def _judge_tensor(self, op: str, tensor: Tensor) -> None:
        wanted = self.case.dtype
        if tensor.dtype not in (wanted, torch.uint8) and not self.case.any_type:
            if tensor.itemsize != wanted.itemsize:
                raise Refused(
                    f"the {op} has a tensor of {tensor.dtype}, {tensor.itemsize} bytes an element; "
                    f"{wanted} has {wanted.itemsize}\nboth sides of a message must have one type; "
                    "torch.zeros and torch.empty make float32\ntorch.empty_like(vector) has the "
                    "type of `vector`"
                )
        if not tensor.numel() and not self.may_be_empty:
            raise Refused(
                f"one {op} has an empty piece\nthe partner does not wait for it: it cuts "
                "its own tensors, and no piece of theirs is empty\n"
                "start the receives and the sends each in a list of its own"
            )
        if len(self.entries) >= MOST_MESSAGES:
            raise Refused(
                f"it has started {MOST_MESSAGES} messages so far, and goes on\na loop without an "
                "end: what should end it never changes\nlook at the loop's condition: does each "
                "round change what it asks for?"
            )
        self.numbers.append(self.chunks.get(tensor.data_ptr()))

    def _is_written(self, func, args: tuple, kwargs: dict) -> bool:
        named = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
        written = [
            named.get(a.name)
            for a in func._schema.arguments
            if a.alias_info is not None and a.alias_info.is_write
        ]
        memory = self.target.untyped_storage().data_ptr()
        return any(
            isinstance(one, Tensor) and one.untyped_storage().data_ptr() == memory
            for one in written
        )


def _work(answer, call, cases: dict, seed: int, layouts: list, folder: str) -> list:
    """Every case in every layout on this rank; where one waits for nobody, the others stop."""
    me, seen = dist.get_rank(), []
    for layout in layouts:
        groups = [dist.new_group(list(g)) for g in layout] if len(layout) > 1 else [None]
        mine = next(i for i, members in enumerate(layout) if me in members)
        for number, case in enumerate(cases[len(layout[mine])]):
            if number < 2 and (dist.get_rank(groups[mine]) == case.root) == (number == 0):
                time.sleep(0.01)  # late: who does not wait for it sends on old values
            one, watch = _one_case(answer, call, case, seed, groups[mine], layout[mine])
            seen.append(one)
            with Path(folder, str(me)).open("ab") as kept:  # home needs it where a rank fails
                pickle.dump(one, kept)
            if not _all_here(len(seen)):
                return seen  # a rank hangs: whoever leaves now makes it say in which line
            del watch  # only here: with it go the works that nobody kept, and their messages
    return seen


def _one_case(answer, call, case: Case, seed: int, group, members: range) -> tuple:
    rank, n = dist.get_rank(group), len(members)
    memory = case.memory(seed, rank, n)
    with Watch(group, case) as watch:
        note = call(answer, memory, case, rank, n, {"group": group} if group else {}, watch)
    place = {job: index for index, job in enumerate(members)}
    entries = [replace(e, rank=rank, peer=place.get(e.peer)) for e in watch.entries]
    seen = {"memory": memory, "note": note, "entries": entries, "events": watch.events}
    seen |= {"numbers": watch.numbers, "unwaited": len(entries) - len(watch.waited)}
    return seen, watch


def _all_here(number: int) -> bool:
    """Have all ranks of the job ended this case? Otherwise its messages would meet the next's."""
    store, deadline_s = dist.distributed_c10d._get_default_store(), time.monotonic() + 2
    store.set(f"case {number} {dist.get_rank()}", "")
    everybody = [f"case {number} {rank}" for rank in range(dist.get_world_size())]
    while not store.check(everybody):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.001)
    return True


def _call_tensor(answer, memory, case, rank, n, options, watch, takes=()) -> None:
    answer(case.tensor(memory), **case.options(*takes), **options)


def _call_chunks(answer, memory, case, rank, n, options, watch, takes=()) -> list[int]:
    chunks = case.chunks(memory)
    given = list(chunks)
    watch.chunks = {chunk.data_ptr(): index for index, chunk in enumerate(chunks)}
    answer(given, **case.options(*takes), **options)
    return [r for r, chunk in enumerate(chunks) if len(given) != n or given[r] is not chunk]


# ---- home again: what was seen, in words -----------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """One case on all ranks of a group."""

    case: Case
    before: list[Tensor]
    seen: list[dict]

    @property
    def n(self) -> int:
        """How many ranks took part."""
        return len(self.seen)

    @property
    def told(self) -> str:
        """The case as a learner reads it."""
        return f"{self.n} rank{'s' * (self.n > 1)}, {self.case}"

    def messages(self, rank: int, op: str) -> list[Entry]:
        """The rank's messages of one direction, without empty ones: those may be left out."""
        return [e for e in self.seen[rank]["entries"] if e.op == op and e.nbytes]

    def tensors(self) -> list[Tensor]:
        """Each rank's tensor before the call."""
        return [self.case.tensor(memory) for memory in self.before]

    def exchanged(self, rank: int) -> tuple[Sequence[Tensor], Sequence[Tensor], Tensor]:
        """The rank's two tensors before and after, and what its source sent."""
        sizes, source = self.case.sizes, (rank - self.case.shift) % self.n
        before, after = (
            self.case.tensor(memory).split([sizes[rank], sizes[source]])
            for memory in (self.before[rank], self.seen[rank]["memory"])
        )
        return before, after, self.case.tensor(self.before[source])[: sizes[source]]

    def chunks(self, index: int) -> list[Tensor]:
        """Each rank's chunks[index] before the call."""
        return [self.case.chunks(memory)[index] for memory in self.before]


def _try(answer, call: Callable, cases: Callable, compare: Callable, alone: bool = True) -> None:
    """Put the cases to the answer on 4 ranks; then on 5, which are one job, then groups."""
    table, seed = {n: cases(n) for n in range(1, 6)}, random.randrange(100_000)
    layouts = [[range(5)], [range(2), range(2, 5)], [range(1), range(1, 5)]]
    for some in ([[range(4)]], layouts if alone else layouts[:2]):
        for outcome, group in _outcomes(answer, call, table, seed, some):
            try:
                compare(outcome)
                _compare_neighbours(outcome)
            except Wrong as wrong:
                if group and outcome.n > 1:
                    told_group = f"with group = {name_ranks(list(group))}: {wrong.seen}"
                    raise Wrong(told_group, *IN_GROUP) from None
                raise


def _outcomes(
    answer, call, cases: dict, seed: int, layouts: list
) -> Iterator[tuple[Outcome, range | None]]:
    """What was seen, case by case; where a rank failed, first what was seen before."""
    world_size = sum(map(len, layouts[0]))
    steps = [(layout, number) for layout in layouts for number in range(len(cases[4]))]
    failed, limit = None, len(steps)
    with tempfile.TemporaryDirectory() as folder:
        try:
            seen = ranks(_work, world_size, answer, call, cases, seed, layouts, folder)
        except RankFailed as failure:
            failed, seen = failure, [_kept(Path(folder, str(r))) for r in range(world_size)]
            limit = min(map(len, seen))
    for index, (layout, number) in enumerate(steps[:limit]):
        for members in layout:
            n = len(members)
            if any(len(seen[rank]) <= index for rank in members):
                raise Wrong(f"{n} ranks: a rank had not ended after 2 s", "", "try again")
            case = cases[n][number]
            before = [case.memory(seed, rank, n) for rank in range(n)]
            outcome = Outcome(case, before, [seen[rank][index] for rank in members])
            _compare_waits(outcome)
            yield outcome, members if len(layout) > 1 else None
    if failed:
        layout, number = steps[limit]
        raise _explained(failed, layout, cases, number) from None


def _kept(path: Path) -> list[dict]:
    """The cases that a rank had ended before it failed or was stopped."""
    seen = []
    if path.is_file():
        with path.open("rb") as file, suppress(EOFError, pickle.UnpicklingError):
            while True:
                seen.append(pickle.load(file))
    return seen


NO_OP = ("`op` is None: `group` stands where `op` belongs", "..., source, op, group)")
NO_DIMENSION = (
    "a tensor may have any number of dimensions; that of a loss has none",
    "`flat` makes a vector of it; +=, torch.minimum and torch.maximum take whole tensors",
)
WHOLE = ("a rank is a whole number: / makes a float", "a step is halved with //")
ERRORS = {  # words of an error -> what it smells of, what to try
    "zip() argument": (
        "what is sent and what is received may have different numbers of pieces",
        "start the receives and the sends each in a list of its own",
    ),
    "contiguous": (
        "a column of a matrix is not one piece of memory, and a message is",
        "inside `with flat(tensor) as vector:` send and receive `vector`",
    ),
    "destination rank should not be the same": ("a rank sends to itself: " + ITSELF[0], ITSELF[1]),
    "Boolean value of Tensor": (
        "Python's min, max and if take single numbers",
        "torch.minimum and torch.maximum compare element by element",
    ),
    "different size or type": (
        "a message differs in size, or in type, from the tensor that shall receive it",
        "both sides of a message take the same number of elements, of the same type",
    ),
    "send(): incompatible": WHOLE,
    "recv(): incompatible": WHOLE,
    "split_size can only be 0": (
        "a piece has at least one element, also where piece_bytes is less than an element",
        "max(1, piece_bytes // element_size)",
    ),
    "at least a 1-dimensional tensor": NO_DIMENSION,
    "len() of a 0-d tensor": NO_DIMENSION,
    "process group has not been initialized": (
        'combine does not know how many ranks there are: for "avg", too, it only adds',
        "whoever has the sum of all ranks divides, once",
    ),
    "op is None": NO_OP,
    "KeyError: None": NO_OP,
    "KeyError": ("your table has no such entry", "the docstring lists all names"),
    "LinAlgError": (
        "the sizes begin with 0, an empty message, and log(0) is no number",
        "a straight line through the sizes and the times themselves",
    ),
    "for /: 'int' and 'list'": (
        "a list cannot be divided",
        "times = torch.tensor(times_s, dtype=torch.float64)",
    ),
    "index out of range": (
        "there are fewer chunks than ranks, or an index that is not taken modulo n",
        "vector.tensor_split(n) gives n chunks always, chunk(n) does not; indices modulo n",
    ),
}


def _explained(failed: RankFailed, layout: list, cases: dict, number: int) -> Exception:
    """A failure on a rank, in terms of send and recv."""
    failure, frames = failed.failure, failed.failure.frames
    if failure.error == "NotImplementedError":
        return failed
    if isinstance(failed, RanksHung):
        seen, smell, try_this = _hung(failed)
    elif failure.error == "Refused":
        seen, smell, try_this = failure.message.split("\n")
        cell = [frame for frame in frames if frame[0] == frames[0][0]]  # not what it calls
        seen = f"rank {failed.rank}: {seen}" + (f" in {where(cell[-1]).strip()}" if cell else "")
    else:
        seen, smell, try_this = told(failed)
        seen = re.sub(r" <.*? at 0x\w+>| The following argument.*?(?= in line \d|$)", "", seen)
        error = f"{failure.error}: {failure.message}"
        known = [value for words, value in ERRORS.items() if words in error]
        if is_echo(failure):
            smell = "a message with one end only: a send without a recv, or a recv without a send"
            try_this = WHO_TO_WHOM
        elif known:
            smell, try_this = known[0]
    if not layout:
        return Wrong(seen, smell, try_this)
    members = next(members for members in layout if failed.rank in members)
    n = len(members)
    if len(layout) > 1 and n > 1:
        return Wrong(f"with group = {name_ranks(list(layout[-1]))} of 5: {seen}", *IN_GROUP)
    works = "; on 4 ranks it works" if n != 4 else ""
    told_case = f"{n} rank{'s' * (n > 1)}, {cases[n][number]}"
    return Wrong(f"{told_case}: {seen}{works}", smell, try_this)


def _alone(fn: Callable, *args: object, **options: float) -> object:
    """What one process without a group gives."""
    try:
        (value,) = ranks(fn, 1, *args, join=False, **options)
    except RankFailed as failed:
        raise _explained(failed, [], {}, 0) from None
    return value


def _hung(failed: RanksHung) -> tuple[str, str, str]:
    """Where the ranks wait, what for, and what to do."""
    waiting: dict[str, list[int]] = {}
    for rank, stack in failed.stacks.items():
        line = where(stack[-1]).strip() if stack else "a place outside your code"
        waiting.setdefault(line, []).append(rank)
    places = [f"{name_ranks(found)} in {line}" for line, found in waiting.items()]
    seen = f"no end; there wait {'; '.join(places)}"
    if not any(re.search(r"send|recv|wait|place outside", line) for line in waiting):
        return seen, "a loop without an end", "does each round change what the condition asks for?"
    if all(re.search(r"\bsend\(", line) for line in waiting):
        return (
            seen,
            "a hang: they all send, and a send ends only when the other side receives",
            "let one side receive first, or start both with isend and irecv and wait afterwards",
        )
    if all(re.search(r"\brecv\(", line) for line in waiting):
        return seen, "a hang: they all wait for a message that nobody sends", WHO_TO_WHOM
    return (
        seen,
        "a hang: these ranks wait for each other, for a message that nobody sends or receives, or "
        "a second time for the same work",
        WHO_TO_WHOM,
    )


def _compare_waits(outcome: Outcome) -> None:
    for rank, seen in enumerate(outcome.seen):
        if seen["unwaited"] > 0 and not isinstance(seen["note"], str):
            raise Wrong(
                f"{outcome.told}: rank {rank} started {len(seen['entries'])} messages, and "
                f"{seen['unwaited']} of them were never waited for",
                "isend and irecv only start: until wait() the data may not be there, and what is "
                "sent must not change",
                "call wait() on every work",
            )


def _truth(op: str, tensors: Sequence[Tensor]) -> Tensor:
    stacked = torch.stack(list(tensors))
    if op in ("min", "max"):
        return stacked.amin(0) if op == "min" else stacked.amax(0)
    total = stacked.sum(0, dtype=stacked.dtype)
    return total / len(tensors) if op == "avg" else total


def _same(value: Tensor, right: Tensor) -> bool:
    if not right.dtype.is_floating_point:
        return torch.equal(value, right)
    rtol = 1e-2 if right.dtype is torch.bfloat16 else 1e-5
    return torch.allclose(value.float(), right.float(), rtol=rtol)


def _weights(value: Tensor, inputs: Sequence[Tensor]) -> list[float] | None:
    """How often each rank's input is in `value`, where it is a sum of them."""
    if not value.dtype.is_floating_point or value.numel() <= len(inputs):
        return None
    columns = torch.stack([one.flatten().double() for one in inputs], dim=1)  # (elements, ranks)
    target = value.flatten().double()
    weights = torch.linalg.lstsq(columns, target).solution
    if not torch.allclose(columns @ weights, target, rtol=1e-3):
        return None
    return [round(weight, 4) + 0.0 for weight in weights.tolist()]


def _recognise(
    value: Tensor, right: Tensor, inputs: Sequence[Tensor], rank: int
) -> tuple[str, str]:
    """The kind of a wrong value, and what to call it; `inputs` are the ranks' own, before."""
    for other in [rank, *range(len(inputs))]:
        if _same(value, inputs[other]):
            own = "still holds what it held before"
            return ("own", own) if other == rank else ("rank", f"holds rank {other}'s numbers")
    for op, name in OPS.items():
        if not (op == "avg" and not value.dtype.is_floating_point):
            if _same(value, _truth(op, inputs)):
                return op, f"holds the {name}"
    weights = _weights(value, inputs)
    first = (value != right).flatten().nonzero()[0].item()
    a, b = value.flatten()[first].item(), right.flatten()[first].item()
    numbers = f"element {first} is {a}, not {b}"
    if weights is None:
        return "", f"holds wrong numbers: {numbers}"
    missing = [f"rank {r}'s" for r, weight in enumerate(weights) if weight == 0]
    if missing and set(weights) == {0.0, 1.0}:
        return "missing", f"holds the sum without {', '.join(missing)}"
    if len(set(weights)) == 1:
        return "factor", f"holds the sum times {weights[0]:g}"
    parts = [f"{w:g} x rank {r}'s" for r, w in enumerate(weights) if w]
    return "weights", f"holds {' + '.join(parts)} ({numbers})"


def _compare_sums(outcome: Outcome, rank: int, value: Tensor, inputs: list, name: str = "") -> None:
    """Is `value` the combination of `inputs`, or with which mistake?"""
    case, right = outcome.case, _truth(outcome.case.op, inputs)
    if _same(value, right):
        return
    kind, holds = _recognise(value, right, inputs, rank)
    seen = f"{outcome.told}: rank {rank}{name} {holds}, not the {OPS[case.op]} of all"
    if kind == "own":
        raise Wrong(
            seen,
            "nothing was combined into it: combine was not called, or not for this tensor (a name "
            "bound to a new one, a copy, another chunk), or too early",
            "combine(total, other, op) changes `total` in place; `flat` brings a copy back",
        )
    if kind == "sum" and case.op == "avg":
        raise Wrong(seen, 'for "avg", combine only adds', "divide by n once, at the end")
    if kind in OPS:
        raise Wrong(seen, "`op` is not looked at", "pass op on: combine(total, other, op)")
    if kind == "missing" or kind == "rank":
        raise Wrong(
            seen,
            "their part got lost: a rank passed its own on before the others' had come in, or what "
            "came in overwrote what was there",
            "receive into a tensor of its own, combine, and only then send on",
        )
    raise _why_weights(outcome, rank, kind, seen, _weights(value, inputs))


def _why_weights(outcome: Outcome, rank: int, kind: str, seen: str, weights) -> Wrong:
    if kind == "weights" and not weights[rank] and outcome.n > 2:
        return Wrong(
            seen,
            "its own part is gone: what came in was received over it",
            "receive into a tensor of its own: other = torch.empty_like(vector)",
        )
    if outcome.case.op == "avg" and kind in ("factor", "weights"):
        return Wrong(
            seen,
            "the division happens more than once, or at every hop",
            "add up as for a sum, and divide by n once, at the end",
        )
    if kind == "weights":
        return Wrong(
            seen,
            "parts of the sum were taken in more than once, or not at all",
            "each message is combined once; what is passed on must not be added again",
        )
    smell = (
        "whole numbers this large do not fit into a float" if "int64" in outcome.case.text else ""
    )
    return Wrong(seen, smell, "follow 2 ranks, then 3, on paper: who sends what in which step")


def _compare_neighbours(outcome: Outcome) -> None:
    """The other columns of the matrix belong to somebody else."""
    if outcome.case.form != "column":
        return
    for rank, seen in enumerate(outcome.seen):
        if not torch.equal(seen["memory"][:, ::2], outcome.before[rank][:, ::2]):
            raise Wrong(
                f"{outcome.told}: rank {rank}'s other columns have changed",
                "the column was taken for one piece of memory",
                "inside `with flat(tensor) as vector:` send and receive `vector`",
            )


def _compare_counts(
    outcome: Outcome, op: str, wanted: Sequence[int], smell: str, try_this: str
) -> None:
    """Does each rank send (or recv) as many messages as the docstring says?"""
    verb = "sends" if op == "send" else "receives"
    for rank, number in enumerate(wanted):
        peers = [str(entry.peer) for entry in outcome.messages(rank, op)]
        if len(peers) != number:
            listed = f" ({'to' if op == 'send' else 'from'} {', '.join(peers)})" if peers else ""
            raise Wrong(
                f"{outcome.told}: the values are right, but rank {rank} {verb} {len(peers)} "
                f"message{'s' * (len(peers) != 1)}{listed}, not {number}",
                smell,
                try_this,
            )


def _compare_message_bytes(outcome: Outcome, wanted: Sequence[int]) -> None:
    """Has each message the size that its sender's messages should have?"""
    for rank, nbytes in enumerate(wanted):
        for entry in outcome.messages(rank, "send"):
            if entry.nbytes != nbytes:
                raise Wrong(
                    f"{outcome.told}: the values are right, but rank {rank} sends a message of "
                    f"{entry.nbytes} bytes, not {nbytes}",
                    "more, or less, travels than is asked for",
                    "send the tensor, or the chunk, as it is",
                )


# ---- 4.1 -------------------------------------------------------------------------------------


@lesson.exercise(
    "4.1",
    "`total += other` changes `total` itself. `total = total + other` makes a new tensor, gives it "
    "the name `total`, and leaves the caller's as it was.",
    "torch.minimum and torch.maximum compare two tensors element by element; out= says where to.",
    '"sum" and "avg": total += other. "min": torch.minimum(total, other, out=total).',
)
def combine(answer) -> None:
    """All four ops on tensors of all types and forms; in place."""
    seed = random.randrange(100_000)
    forms = [
        Case("6 numbers", (6,)),
        Case("a column of a matrix", (5,), form="column"),
        Case("int64", (4,), torch.int64),
        Case("bfloat16", (4,), torch.bfloat16),
        Case("a tensor without dimensions", (1,), form="scalar"),
        Case("a matrix", (6,), form="transposed"),
        Case("an empty tensor", (0,)),
    ]
    try:
        _try_combine(answer, forms, seed)
    except Wrong as failed:  # also where a rank failed: a fault in plain numbers is told first
        with suppress(RankFailed):
            _try_combine(answer, forms[:1], seed, timeout_s=2)
        raise failed


def _try_combine(answer, forms: list[Case], seed: int, **options: float) -> None:
    cases = [replace(form, op=op) for form in forms for op in OPS]
    seen = _alone(_combined, answer, cases, seed, **options)
    for case, (memory, other, returned) in zip(cases, seen, strict=True):
        before = [case.memory(seed, rank, 1) for rank in range(2)]
        _compare_combined(case, memory, other, before, returned)


def _combined(answer, cases: list[Case], seed: int) -> list[tuple]:
    seen = []
    for case in cases:
        memory, other = case.memory(seed, 0, 1), case.tensor(case.memory(seed, 1, 1))
        returned = answer(case.tensor(memory), other, case.op)
        seen.append((memory, other, isinstance(returned, Tensor)))
    return seen


def _compare_combined(
    case: Case, memory: Tensor, other: Tensor, before: list[Tensor], returned: bool
) -> None:
    _compare_neighbours(Outcome(case, before[:1], [{"memory": memory}]))
    value, inputs = case.tensor(memory), [case.tensor(one) for one in before]
    right = _truth("sum" if case.op == "avg" else case.op, inputs)
    if not torch.equal(other, inputs[1]):
        raise Wrong(f"{case}: `other` has changed", "", "only `total` may be written to")
    if _same(value, right):
        return
    kind, _ = _recognise(value, right, inputs, 0)
    index = (value != right).flatten().nonzero()[0].item()
    a, b, result, wanted = (one.flatten()[index].item() for one in (*inputs, value, right))
    seen = f'{case.text}: {a} and {b} became {result} with op "{case.op}", not {wanted}'
    if torch.allclose(value.double(), right.double()):
        raise Wrong(seen, "the last digits are lost: a float has 24 or 53 bits", "no float()")
    if case.op == "avg" and kind == "avg":
        raise Wrong(
            seen,
            "an average of averages is not the average of all: 3 ranks would count 1/4, 1/4, 1/2",
            'for "avg" only add; whoever has the sum of all ranks divides, once',
        )
    if kind == "own":
        raise Wrong(
            seen,
            ("you return the result, but " if returned else "")
            + f'the caller\'s `total` is as it was: a new tensor was made, or "{case.op}" left out',
            "write into `total`: +=, copy_(), or out=total",
        )
    if kind in OPS:
        raise Wrong(seen, f"that is the {OPS[kind]}", "one branch for each of the four ops")
    if (value == value.flatten()[0]).all():
        raise Wrong(
            seen,
            "all elements are the same: one tensor was reduced to a single number",
            "torch.minimum and torch.maximum take two tensors, element by element",
        )
    raise Wrong(seen, "", "+=, torch.minimum, torch.maximum, with out=total")


# ---- 4.2, 4.3 --------------------------------------------------------------------------------


def _rooted_cases(n: int, with_op: bool = False) -> list[Case]:
    """Vectors, a matrix, a column, an empty one; roots of all kinds."""
    forms = [
        Case("12 numbers", (12,), op="sum"),
        Case("12 numbers", (12,), root=n - 1, op="sum"),
        Case("9 numbers", (9,), op="avg"),
        Case("a matrix of int64", (6,), torch.int64, form="matrix", op="min"),
        Case("7 bfloat16", (7,), torch.bfloat16, op="max"),
        Case("a column of a matrix", (8,), form="column", op="avg"),
        Case("an empty tensor", (0,)),
    ]
    return [
        replace(
            case,
            op=case.op if with_op else "sum",
            root=case.root if number < 2 else random.randrange(n),
        )
        for number, case in enumerate(forms)
    ]


def _compare_broadcast(outcome: Outcome) -> None:
    case, inputs = outcome.case, outcome.tensors()
    for rank in [case.root, *range(outcome.n)]:
        value = case.tensor(outcome.seen[rank]["memory"])
        if _same(value, inputs[case.root]):
            continue
        kind, holds = _recognise(value, inputs[case.root], inputs, rank)
        seen = f"{outcome.told}: rank {rank} {holds}, not rank {case.root}'s values"
        if case.root and (kind == "rank" and "rank 0" in holds or rank == case.root):
            raise Wrong(seen, "rank 0 was taken for the root", "use the argument `root`")
        if kind == "own" and not outcome.messages(rank, "recv"):
            if outcome.n & (outcome.n - 1):
                raise Wrong(
                    f"{seen}; it receives nothing",
                    "the last round is missing: only on 2, 4, 8, ... ranks are all rounds full",
                    "ceil(log2 n) rounds",
                )
            raise Wrong(f"{seen}; it receives nothing", "nobody sends to it", WHO_TO_WHOM)
        if kind == "own":
            raise Wrong(
                seen,
                "the message never reached `tensor`: it was received into a copy",
                "receive into `vector` of `with flat(tensor) as vector:`, and wait inside",
            )
        raise Wrong(seen, "a rank passed on what it had before the message came", "receive first")


@lesson.exercise(
    "4.2",
    "Two roles: the root sends n-1 times, every other rank receives once.",
    "Inside `with flat(tensor) as vector:` send and receive `vector`. So a column works as well.",
    "The root: dist.send(vector, group=group, group_dst=other) for every other rank of "
    "range(n). The others: dist.recv(vector, group=group, group_src=root).",
)
def broadcast_naive(answer) -> None:
    """Values on all ranks; the root sends n-1 messages, everybody else receives one."""
    call = functools.partial(_call_tensor, takes=("root",))
    _try(answer, call, _rooted_cases, _compare_naive)


def _compare_naive(outcome: Outcome) -> None:
    _compare_broadcast(outcome)
    if sum(outcome.case.sizes):
        is_root = [rank == outcome.case.root for rank in range(outcome.n)]
        others = outcome.n - 1
        smell = "in this broadcast the root sends to each of the others itself, and to nobody twice"
        try_this = "the others only receive, once, from the root"
        _compare_counts(outcome, "send", [others * r for r in is_root], smell, try_this)
        _compare_counts(outcome, "recv", [1 - r for r in is_root], smell, try_this)
        _compare_message_bytes(outcome, [outcome.tensors()[0].nbytes] * outcome.n)


@lesson.exercise(
    "4.3",
    "place = (rank - root) % n makes any root place 0, and place p is rank (p + root) % n.",
    "In each round a place does one of three things: it sends to place + step, it receives from "
    "place - step, or it does nothing. Which one, follows from place, step and n.",
    "While step < n: if place < step, send, but only where place + step < n; else if "
    "place < 2 * step, receive. Then double step.",
)
def broadcast_tree(answer) -> None:
    """Values on all ranks; everybody receives once; ceil(log2 n) rounds and sends of the root."""
    _try(answer, functools.partial(_call_tensor, takes=("root",)), _rooted_cases, _compare_tree)


def _compare_tree(outcome: Outcome) -> None:
    _compare_broadcast(outcome)
    if not sum(outcome.case.sizes):
        return
    n, root = outcome.n, outcome.case.root
    receives = [int(rank != root) for rank in range(n)]
    _compare_counts(
        outcome,
        "recv",
        receives,
        "everybody but the root receives once",
        "a place receives in the round in which step <= place < 2 * step, and in no other",
    )
    _compare_rounds(outcome, root, "send")
    _compare_message_bytes(outcome, [outcome.tensors()[0].nbytes] * n)


def _compare_rounds(outcome: Outcome, root: int, op: str) -> None:
    """A tree: ceil(log2 n) rounds, and as many messages at the root."""
    n, depth = outcome.n, math.ceil(math.log2(outcome.n))
    num_at_root = len(outcome.messages(root, op))
    verb = "sends" if op == "send" else "receives"
    seen = f"{outcome.told}: the values are right, but the"
    try_this = "each round has a step of its own: 1, 2, 4, ...; in it, half of the places send"
    if num_at_root != depth:
        raise Wrong(
            f"{seen} root {verb} {num_at_root} message(s), not {depth} = ceil(log2 {n})",
            "one rank does the work of all" if num_at_root > depth else "a chain, not a tree",
            try_this,
        )
    everything = [one["entries"] for one in outcome.seen]
    if op == "recv":
        num_rounds = _rounds_up(outcome, root)
    else:
        num_rounds = len(rounds(everything))
    if num_rounds != depth:
        raise Wrong(
            f"{seen} messages take {num_rounds} rounds, not {depth} = ceil(log2 {n})",
            "some ranks wait while they could already work",
            try_this,
        )


def _rounds_up(outcome: Outcome, root: int) -> int:
    """How many messages in a row reach the root, where each rank takes the earliest first."""
    num_rounds = 0
    children = [r for r in range(outcome.n) for e in outcome.messages(r, "send") if e.peer == root]
    for ready in sorted(_rounds_up(outcome, child) for child in children):
        num_rounds = max(num_rounds, ready) + 1
    return num_rounds


# ---- 4.4 -------------------------------------------------------------------------------------


@lesson.exercise(
    "4.4",
    "It is broadcast_tree run backwards: the largest step first, and whoever received there sends "
    "here, and has then done its part.",
    "What comes in needs memory of its own: other = torch.empty_like(vector). Then "
    "combine(vector, other, op).",
    "Start at step = 1 << (n - 1).bit_length() and halve it first in each round; "
    "step <= place < 2 * step sends, place < step receives where place + step < n. After the "
    'rounds divide once, for "avg".',
)
def reduce_tree(answer) -> None:
    """The root's value for all ops; everybody else sends once; the root receives ceil(log2 n)."""
    cases = functools.partial(_rooted_cases, with_op=True)
    _try(answer, functools.partial(_call_tensor, takes=("op", "root")), cases, _compare_reduce)


def _compare_reduce(outcome: Outcome) -> None:
    case, root, n = outcome.case, outcome.case.root, outcome.n
    value, inputs = case.tensor(outcome.seen[root]["memory"]), outcome.tensors()
    if root and _same(case.tensor(outcome.seen[0]["memory"]), _truth(case.op, inputs)):
        if not _same(value, _truth(case.op, inputs)):
            seen = f"{outcome.told}: the result is on rank 0, not on rank {root}"
            raise Wrong(seen, "rank 0 was taken for the root", "use the argument `root`")
    _compare_sums(outcome, root, value, inputs)
    if sum(case.sizes):
        sends = [int(rank != root) for rank in range(n)]
        smell = "everybody but the root sends once, and has then done its part"
        _compare_counts(outcome, "send", sends, smell, "after its send a rank does nothing more")
        _compare_rounds(outcome, root, "recv")
        _compare_message_bytes(outcome, [inputs[0].nbytes] * n)


# ---- 4.5 -------------------------------------------------------------------------------------


def _chunk_cases(n: int, rooted: bool = False, with_op: bool = False) -> list[Case]:
    """Equal chunks, unequal ones, empty ones."""

    def uneven(least: int) -> tuple[int, ...]:
        return tuple(random.randrange(least, 9) for _ in range(n))

    cases = [
        Case("equal chunks", (7,) * n),
        Case("equal chunks", (7,) * n, root=n - 1, op="avg"),
        Case("chunks of different sizes", tuple(range(2, n + 2)), op="avg"),
        Case("int64 in chunks of different sizes", uneven(1), torch.int64, op="min"),
        Case("bfloat16", uneven(1), torch.bfloat16, op="max"),
        Case("chunks of a column, scattered in memory", uneven(1), form="column"),
        Case("some chunks empty", (0, *uneven(0)[1:])),
    ]
    return [
        replace(
            case,
            op=case.op if with_op else "sum",
            root=0 if not rooted else case.root if number < 3 else random.randrange(n),
        )
        for number, case in enumerate(cases)
    ]


def _compare_gathered(outcome: Outcome, receivers: Sequence[int]) -> None:
    """Own chunks are as they were, and receivers have everybody's."""
    for rank, seen in enumerate(outcome.seen):
        after = outcome.case.chunks(seen["memory"])
        if not torch.equal(after[rank], outcome.chunks(rank)[rank]):
            raise Wrong(
                f"{outcome.told}: rank {rank}'s own chunks[{rank}] has changed",
                "it was received into, but it is what this rank has to give",
                "rank r's own chunk has the number r: send that one, and fill the others",
            )
        wrong = _not_gathered(outcome, rank)
        if rank in receivers and wrong:
            raise _why_not_gathered(outcome, rank, after, wrong)


def _not_gathered(outcome: Outcome, rank: int) -> list[int]:
    """The chunks of which the rank does not have what their owners gave."""
    after = outcome.case.chunks(outcome.seen[rank]["memory"])
    return [s for s in range(outcome.n) if not _same(after[s], outcome.chunks(s)[s])]


def _why_not_gathered(outcome: Outcome, rank: int, after: list[Tensor], wrong: list[int]) -> Wrong:
    index, n = wrong[0], outcome.n
    seen = f"{outcome.told}: rank {rank}'s chunks[{index}] {{}}, not what rank {index} has there"
    if outcome.seen[rank]["note"] and _same(after[index], outcome.chunks(index)[rank]):
        return Wrong(
            seen.format("still holds what it held before"),
            "the list got a new tensor, and the memory of the old one stays as it was",
            "receive into chunks[index], or copy_() into it",
        )
    found = [
        f"holds rank {s}'s chunks[{c}]"
        for s in [rank, *range(n)]
        for c in range(n)
        if len(after[index]) > 1 and torch.equal(after[index], outcome.chunks(c)[s])
    ]
    if found and outcome.case.form == "column":
        return Wrong(
            seen.format("still holds what it held before"),
            "it is not one piece of memory, so `flat` gives a copy and brings it back when its "
            "block ends: what came later, or in another copy, is lost",
            "inside `with flat(chunk) as vector:` receive `vector`, and wait",
        )
    if found == [] or f"rank {rank}'s chunks[{index}]" in found[0]:
        return Wrong(
            seen.format("still holds what it held before" if found else "holds wrong numbers"),
            "what comes in never reached it",
            "receive into chunks[index] itself, for every index but the own",
        )
    return Wrong(
        seen.format(found[0]),
        "a chunk went to the wrong place: the two sides of a message count differently",
        "what a rank receives in a step is what its partner sends in that step: the same index",
    )


@lesson.exercise(
    "4.5",
    "Two roles again: the root receives n-1 times, every other rank sends once.",
    "A rank sends chunks[rank]. The root receives from rank r straight into chunks[r].",
    "Root: for source, chunk in enumerate(chunks), leave out source == root, "
    "dist.recv(chunk, group=group, group_src=source). Others: "
    "dist.send(chunks[rank], group=group, group_dst=root).",
)
def gather(answer) -> None:
    """The root's chunks, equal, unequal and empty; everybody else sends its own, once."""
    cases = functools.partial(_chunk_cases, rooted=True)
    _try(answer, functools.partial(_call_chunks, takes=("root",)), cases, _compare_gather)


def _compare_gather(outcome: Outcome) -> None:
    root, n = outcome.case.root, outcome.n
    if root and _not_gathered(outcome, root) and not _not_gathered(outcome, 0):
        seen = f"{outcome.told}: the chunks are on rank 0, not on rank {root}"
        raise Wrong(seen, "rank 0 was taken for the root", "use the argument `root`")
    sent, taken = (len(outcome.messages(root, op)) for op in ("send", "recv"))
    if n > 2 and sent == n - 1 and not taken:
        raise Wrong(
            f"{outcome.told}: the root, rank {root}, sends {sent} messages and receives none",
            "the roles are swapped: the root is the one that gets all chunks",
            "root: recv from every other rank; the others: send chunks[rank] to the root",
        )
    _compare_gathered(outcome, [root])
    if min(outcome.case.sizes):
        sends = [int(rank != root) for rank in range(n)]
        smell = "everybody but the root sends its own chunk, once, and to the root"
        _compare_counts(outcome, "send", sends, smell, "the others need no chunk of anybody")
        _compare_counts(outcome, "recv", [(n - 1) * (1 - s) for s in sends], smell, "")
        item = outcome.before[0].element_size()
        _compare_message_bytes(outcome, [size * item for size in outcome.case.sizes])


# ---- 4.6 -------------------------------------------------------------------------------------


def _exchange_cases(n: int) -> list[Case]:
    """Rings of both directions, messages of different sizes, and large ones."""
    uneven = tuple(range(6, 6 + n))
    return [
        Case("rank r sends 6 numbers to r + 1", (6,) * n, shift=1),
        Case("rank r sends 6 numbers to r - 1", (6,) * n, shift=n - 1),
        Case("messages of different sizes", uneven, shift=1),
        Case("rank r sends int64 to r + 2", uneven, torch.int64, shift=2 if n > 2 else 1),
        Case("messages of 256 kB", (1 << 17,) * n, torch.bfloat16, shift=1),
    ]


@lesson.exercise(
    "4.6",
    "dist.isend and dist.irecv start a message and return a work at once. dist.send and dist.recv "
    "wait until it is through.",
    "Both of them take group= together with group_dst= or group_src=.",
    "dist.batch_isend_irecv takes a list of dist.P2POp(dist.isend, outgoing, group=group, "
    "group_peer=to) and the like, and returns the list of works.",
)
def start_exchange(answer) -> None:
    """Exchanges round a ring of 2 to 5 ranks; nothing waits inside; the works are all there."""
    _try(answer, _call_exchange, _exchange_cases, _compare_exchange, alone=False)


def _call_exchange(answer, memory, case, rank, n, options, watch) -> str:
    to, source = (rank + case.shift) % n, (rank - case.shift) % n
    outgoing, incoming = memory.split([case.sizes[rank], case.sizes[source]])
    watch.may_wait = False
    works = answer(outgoing, to, incoming, source, **options)
    watch.may_wait = True
    if inspect.isgenerator(works):
        raise Refused(
            "it starts nothing\na function with `yield` has not run yet when it returns\n"
            "return a list of the works"
        )
    if isinstance(works, list | tuple) and any(isinstance(one, dist.P2POp) for one in works):
        raise Refused(
            "it starts nothing\na P2POp is only an order form\n"
            "give the list to dist.batch_isend_irecv, and return the works that it returns"
        )
    found = sorted((entry.op, watch.ranks.index(entry.peer)) for entry in watch.entries)
    if found != [("recv", source), ("send", to)]:
        listed = [f"{op} {'from' if op == 'recv' else 'to'} {peer}" for op, peer in found]
        raise Refused(
            f"called with to={to} and source={source}, it starts {', '.join(listed) or 'nothing'}\n"
            "an exchange is one message out and one in\nisend to `to`, irecv from `source`"
        )
    if not isinstance(works, list | tuple) or not all(hasattr(work, "wait") for work in works):
        return f"a {type(works).__name__}, {works!r}"
    for work in works:
        work.wait()
    return f"{len(watch.waited)} of the 2 works" if len(watch.waited) < 2 else ""


def _compare_exchange(outcome: Outcome) -> None:
    for rank, seen in enumerate(outcome.seen):
        if seen["note"]:
            raise Wrong(
                f"{outcome.told}: rank {rank} returned {seen['note']}",
                "the caller has to wait for both messages, and can do so only with their works",
                "return the list of all works: those of isend and of irecv",
            )
        before, after, coming = outcome.exchanged(rank)
        if not _same(after[0], before[0]):
            raise Wrong(f"{outcome.told}: rank {rank}'s `outgoing` has changed", "", "only send it")
        if not _same(after[1], coming):
            raise Wrong(
                f"{outcome.told}: rank {rank}'s `incoming` is not what was sent to it",
                "it was received into another tensor, or something else was sent",
                "send `outgoing`, and receive into `incoming` itself",
            )


# ---- the rings -------------------------------------------------------------------------------


def _compare_ring(outcome: Outcome, number: int, nbytes: Callable[[int, int], int]) -> None:
    """Each rank sends `number` chunks to one neighbour; `nbytes(rank, direction)` in all."""
    n, case = outcome.n, outcome.case
    if n == 1:
        return
    told_right = f"{outcome.told}: the values are right, but rank"
    for rank in range(n):
        sends = outcome.messages(rank, "send")
        peers = sorted({entry.peer for entry in sends})
        ways = [way for way in (1, -1) if (rank + way) % n in peers]
        if not set(peers) <= {(rank + 1) % n, (rank - 1) % n}:
            raise Wrong(
                f"{told_right} {rank} sends to ranks {', '.join(map(str, peers))}",
                "that is no ring: a rank talks to its two neighbours only",
                "send to (rank + 1) % n, receive from (rank - 1) % n, in every step",
            )
        if min(case.sizes) and sum(case.sizes) >= n and len(sends) != number:
            smell = "a step too many, or too few, or one rank does the work of all"
            if len(sends) == number // (n - 1) * n:
                smell = "one step too many: after n-1 steps a chunk has been everywhere"
            raise Wrong(
                f"{told_right} {rank} sends {len(sends)} messages, not {number}",
                smell,
                "n-1 steps; in each, every rank sends one chunk and receives one",
            )
        total = sum(entry.nbytes for entry in sends)
        wanted = [nbytes(rank, way) for way in ways]
        if total not in [*wanted, 0]:
            raise Wrong(
                f"{told_right} {rank} sends {total} bytes, not {wanted[0]}",
                "more than one chunk travels in a step"
                if total > wanted[0]
                else "a chunk is missing",
                "one chunk a step: chunks[some index], never the whole",
            )


# ---- 4.7 -------------------------------------------------------------------------------------


@lesson.exercise(
    "4.7",
    "Follow chunk 0 on paper: in step 0 rank 0 sends it to rank 1, in step 1 rank 1 sends it to "
    "rank 2, and so on.",
    "So in step k rank r sends chunk r - k, and what comes in is chunk r - k - 1; all modulo n.",
    "for step in range(n - 1): exchange(chunks[(rank - step) % n], (rank + 1) % n, "
    "chunks[...], (rank - 1) % n, group)",
)
def all_gather_ring(answer) -> None:
    """All chunks on all ranks; n-1 messages a rank, all to one neighbour."""
    _try(answer, _call_chunks, _chunk_cases, _compare_all_gather)


def _compare_all_gather(outcome: Outcome) -> None:
    n, sizes, item = outcome.n, outcome.case.sizes, outcome.before[0].element_size()
    if min(sizes) and any(_not_gathered(outcome, rank) for rank in range(n)):
        _compare_passed_on(outcome)
    _compare_gathered(outcome, range(n))
    _compare_ring(outcome, n - 1, lambda rank, way: (sum(sizes) - sizes[(rank + way) % n]) * item)


def _compare_passed_on(outcome: Outcome) -> None:
    """Does what a rank sends arrive where it belongs, and had it come before it was sent?"""
    for rank, seen in enumerate(outcome.seen):
        pairs = list(zip(seen["entries"], seen["numbers"], strict=True))
        for receiver, other in enumerate(outcome.seen):
            theirs = zip(other["entries"], other["numbers"], strict=True)
            sent = [n for e, n in pairs if e.op == "send" and e.peer == receiver]
            taken = [n for e, n in theirs if e.op == "recv" and e.peer == rank]
            for step, (one, two) in enumerate(zip(sent, taken, strict=False)):
                if None not in (one, two) and one != two:
                    raise Wrong(
                        f"{outcome.told}: in step {step} rank {rank} sends its chunks[{one}], and "
                        f"rank {receiver} takes it in as chunks[{two}]",
                        "a chunk went to the wrong place: the two sides count differently",
                        "what comes in has the number that its sender has for it",
                    )
    for rank, seen in enumerate(outcome.seen):
        _compare_own_order(outcome, rank, seen["events"], iter(seen["numbers"]))


def _compare_own_order(outcome: Outcome, rank: int, events: list, numbers: Iterator) -> None:
    coming, here, sent = set(), {rank, None}, []
    for event in events:
        if event == "wait":
            here |= coming
        elif event == "recv":
            coming.add(next(numbers))
        else:
            sent.append(next(numbers))
            if sent[-1] not in here:
                early = "before it has waited for it" if sent[-1] in coming else "which never came"
                raise Wrong(
                    f"{outcome.told}: in step {len(sent) - 1} rank {rank} sends chunks[{sent[-1]}],"
                    f" {early}",
                    "a chunk is passed on when it has come, not before",
                    "first the own chunk, then always the one that came last; wait in every step",
                )
    if len(sent) > 1 and set(sent) == {rank}:
        raise Wrong(
            f"{outcome.told}: rank {rank} sends chunks[{rank}] {len(sent)} times, and no other",
            "only a neighbour's chunk has come: every step sends the rank's own chunk again",
            "send on what came last: the number of the chunk falls by one a step",
        )


# ---- 4.8 -------------------------------------------------------------------------------------


def _piece_cases(n: int) -> list[Case]:
    """One piece, several, unequal ones, pieces smaller than an element."""
    uneven = tuple(8 + rank % 2 for rank in range(n))  # 2 pieces, or 3
    return [
        Case("12 numbers", (12,) * n, shift=1),
        Case("12 numbers in pieces of 16 bytes", (12,) * n, shift=1, op="avg", piece_bytes=16),
        Case("8 and 9 numbers in pieces of 18 bytes", uneven, shift=1, piece_bytes=18),
        Case("int64 in pieces of 20 bytes", (7,) * n, torch.int64, shift=n - 1, piece_bytes=20),
        Case("5 numbers in pieces of 1 byte", (5,) * n, shift=1, op="max", piece_bytes=1),
        Case("a column of a matrix", uneven, form="column", shift=1, op="min", piece_bytes=16),
        Case("an empty tensor", (0,) * n, shift=1),
    ]


@lesson.exercise(
    "4.8",
    "size = max(1, piece_bytes // total.element_size()) elements make a piece; tensor.split(size) "
    "gives the pieces as views.",
    "First start to receive all pieces, into a tensor as large as `total`, and to send all pieces "
    "of `outgoing`; keep the works. There may be more of one than of the other.",
    "Then go through the pieces in order: wait for the receive of one, combine it into its part of "
    "`total`, go on. The later ones travel meanwhile. At the end wait for the sends.",
)
def exchange_and_combine(answer) -> None:
    """Values for all ops; number and size of the pieces; later ones travel while one is added."""
    _try(answer, _call_pieces, _piece_cases, _compare_pieces, alone=False)


def _call_pieces(answer, memory, case, rank, n, options, watch) -> None:
    to, source = (rank + case.shift) % n, (rank - case.shift) % n
    sizes, own = [case.sizes[rank], case.sizes[source]], memory.clone()
    outgoing, total = case.tensor(memory).split(sizes)[0], case.tensor(own).split(sizes)[1]
    watch.target, watch.may_be_empty = own, not sum(sizes)
    answer(outgoing, to, total, source, case.op, **options, **case.options("piece_bytes"))
    watch.target = None
    memory[sizes[0] :] = own[sizes[0] :]


def _compare_pieces(outcome: Outcome) -> None:
    n, case = outcome.n, outcome.case
    size = max(1, case.piece_bytes // outcome.before[0].element_size())
    for rank in range(n):
        before, after, coming = outcome.exchanged(rank)
        _compare_order(outcome, rank)
        _compare_pairs(outcome, rank, [math.ceil(len(part) / size) for part in before])
        if not torch.equal(after[0], before[0]):
            raise Wrong(f"{outcome.told}: rank {rank}'s `outgoing` has changed", "", "only send it")
        _compare_taken_in(outcome, rank, after[1], before[1], coming)
    for rank in range(n):
        _compare_num_pieces(outcome, rank, size)
        if case.form == "vector" and min(map(len, outcome.exchanged(rank)[0])) > size:
            _compare_overlap(outcome, rank)


def _compare_pairs(outcome: Outcome, rank: int, wanted: list[int]) -> None:
    """Have pieces been left out, since there are more of one kind than of the other?"""
    found = [len(outcome.messages(rank, op)) for op in ("send", "recv")]
    if found == [min(wanted)] * 2 != wanted:
        raise Wrong(
            f"{outcome.told}: rank {rank} sends {found[0]} and receives {found[1]} pieces, not "
            f"{wanted[0]} and {wanted[1]}",
            "what is sent and what is received have different numbers of pieces, and zip ends with "
            "the shorter list",
            "start the receives and the sends each in a list of its own",
        )


def _compare_taken_in(
    outcome: Outcome, rank: int, total: Tensor, own: Tensor, coming: Tensor
) -> None:
    op = "sum" if outcome.case.op == "avg" else outcome.case.op
    right = _truth(op, [own, coming])
    if _same(total, right):
        return
    seen = f"{outcome.told}: rank {rank}'s `total` "
    num_right = int((total == right).sum())
    if _same(total, own):
        raise Wrong(
            f"{seen}is as it was",
            "what came in was not combined, or into another tensor",
            "combine(part, other, op) for every piece, with part a view of `total`",
        )
    if _same(total, coming) or _same(total, _truth(op, [coming, coming])):
        raise Wrong(
            f"{seen}holds what came in, alone or with itself",
            "it was received straight into `total`, so its own numbers are lost",
            "receive into a tensor of its own and combine that",
        )
    if outcome.case.op == "avg" and _same(total, right / 2):
        smell = 'for "avg" every hop only adds; whoever has the sum of all divides'
        raise Wrong(f"{seen}holds the average of two", smell, "combine(part, other, op)")
    for other in set(OPS) - {op, "avg"}:
        if _same(total, _truth(other, [own, coming])):
            seen = f"{seen}holds the {OPS[other]}, not the {OPS[op]}"
            raise Wrong(seen, "`op` is not passed on", "combine(part, other, op)")
    if num_right > len(total) // 4:
        raise Wrong(
            f"{seen}is right in {num_right} of {len(total)} elements",
            "some pieces are missing: the last, shorter one, or all that share one piece of memory",
            "as many pieces as total.split(size) gives, each with its own part of the memory",
        )
    smell = "something else was sent, or what came in went to the wrong place"
    raise Wrong(f"{seen}holds wrong numbers", smell, "the pieces of both sides have the same order")


def _compare_order(outcome: Outcome, rank: int) -> None:
    """Nothing is combined before something has come."""
    events = outcome.seen[rank]["events"]
    if sum(outcome.case.sizes) and "write" in events:
        if "wait" not in events[: events.index("write")]:
            raise Wrong(
                f"{outcome.told}: rank {rank} combines before it has waited for anything",
                "the piece may not be there yet",
                "wait for the works of a piece, then combine it",
            )


def _compare_num_pieces(outcome: Outcome, rank: int, size: int) -> None:
    case, item = outcome.case, outcome.before[0].element_size()
    sends = outcome.messages(rank, "send")
    wanted = math.ceil(case.sizes[rank] / size)
    largest = max([entry.nbytes for entry in sends], default=0)
    if largest > size * item:
        raise Wrong(
            f"{outcome.told}: the values are right, but rank {rank} sends a message of "
            f"{largest} bytes; a piece has at most {size * item}, {size} whole elements",
            "the whole in one piece, or a size counted in elements where it is in bytes",
            "piece_bytes // element_size() elements make a piece",
        )
    if len(sends) != wanted:
        raise Wrong(
            f"{outcome.told}: the values are right, but rank {rank} sends {len(sends)} pieces, "
            f"not {wanted}",
            "more messages than needed, each with its own latency"
            if len(sends) > wanted
            else "fewer, larger messages: less of the adding is hidden",
            f"{case.sizes[rank]} elements in pieces of {size}",
        )


def _compare_overlap(outcome: Outcome, rank: int) -> None:
    events = outcome.seen[rank]["events"]
    if "write" not in events:
        return
    first = events.index("write")
    before, after = events[:first], events[first:]
    started = f"{outcome.told}: the values are right, but rank {rank}"
    if before.count("recv") < 2 or before.count("send") < 2:
        raise Wrong(
            f"{started} adds the first piece before the second is under way",
            "one piece after the other: while it adds, nothing travels",
            "start all exchanges first, then wait and combine piece by piece",
        )
    if "wait" not in after:
        raise Wrong(
            f"{started} waits for all pieces before it adds the first",
            "nothing is left to travel while it adds",
            "wait for one piece, combine it, then wait for the next",
        )


# ---- 4.9 -------------------------------------------------------------------------------------


@lesson.exercise(
    "4.9",
    "The sum for rank r ends at rank r, so n-1 steps earlier it started at rank r + 1: in step 0 "
    "rank r sends chunk r - 1.",
    "In step k rank r sends chunk r - k - 1, and takes what comes in into chunk r - k - 2; all "
    "modulo n.",
    "for step in range(n - 1): exchange_and_combine(chunks[(rank - step - 1) % n], "
    '(rank + 1) % n, chunks[...], (rank - 1) % n, op, group). Then, for "avg", divide.',
)
def reduce_scatter_ring(answer) -> None:
    """Each rank's own chunk for all ops; n-1 messages a rank, all to one neighbour."""
    cases = functools.partial(_chunk_cases, with_op=True)
    call = functools.partial(_call_chunks, takes=("op",))
    _try(answer, call, cases, _compare_reduce_scatter)


def _compare_reduce_scatter(outcome: Outcome) -> None:
    n, case = outcome.n, outcome.case
    sizes, item = case.sizes, outcome.before[0].element_size()
    for rank, seen in enumerate(outcome.seen):
        after = case.chunks(seen["memory"])
        complete = [c for c in range(n) if _same(after[c], _truth(case.op, outcome.chunks(c)))]
        if rank not in complete and len(complete) == 1 and sizes[complete[0]] > 1:
            raise Wrong(
                f"{outcome.told}: rank {rank} ends with chunks[{complete[0]}] complete, not with "
                f"chunks[{rank}]",
                "all indices are off by the same number",
                f"the last chunk that comes in, in step n-2 = {n - 2}, has to be chunks[rank]",
            )
        _compare_sums(outcome, rank, after[rank], outcome.chunks(rank), f"'s chunks[{rank}]")
    _compare_ring(outcome, n - 1, lambda rank, way: (sum(sizes) - sizes[rank]) * item)


# ---- 4.10 ------------------------------------------------------------------------------------


def _ring_cases(n: int) -> list[Case]:
    """Sizes that n divides, or not, or that are smaller than n; a matrix, a column, nothing."""
    cases = [
        Case(f"{6 * n} numbers", (6 * n,)),
        Case(f"{6 * n} numbers", (6 * n,), op="min"),
        Case(f"{6 * n + 1} numbers", (6 * n + 1,), op="avg"),
        Case(f"{n + 1} int64", (n + 1,), torch.int64, op="min"),
        Case(f"{max(1, n - 1)} bfloat16", (max(1, n - 1),), torch.bfloat16, op="max"),
        Case("a transposed matrix", (2 * n + 2,), form="transposed"),
        Case("a column of a matrix", (2 * n + 1,), form="column", op="avg"),
        Case("a tensor without dimensions", (1,), form="scalar"),
        Case("an empty tensor", (0,)),
    ]
    return [replace(case, any_type=True) for case in cases]


@lesson.exercise(
    "4.10",
    "Two calls do it: the ring that leaves every rank one finished chunk, then the ring that "
    "gives all chunks to all.",
    "vector.tensor_split(n) cuts into exactly n views, also where n does not divide the length.",
    "with flat(tensor) as vector: chunks = vector.tensor_split(n); reduce_scatter_ring(chunks, "
    "op, group); all_gather_ring(chunks, group)",
)
def all_reduce_ring(answer) -> None:
    """All ops, sizes and forms; 2(n-1) messages a rank, 2(n-1)/n of the bytes."""
    call = functools.partial(_call_tensor, takes=("op",))
    _try(answer, call, _ring_cases, _compare_all_reduce)


def _compare_all_reduce(outcome: Outcome) -> None:
    n, case, inputs = outcome.n, outcome.case, outcome.tensors()
    right = _truth(case.op, inputs)
    values = [case.tensor(seen["memory"]) for seen in outcome.seen]
    for rank, value in enumerate(values):
        pairs = zip(value.flatten().tensor_split(n), right.flatten().tensor_split(n), strict=True)
        finished = [index for index, pair in enumerate(pairs) if _same(*pair)]
        if len(finished) == 1 and right.numel() == 6 * n and n > 2:
            raise Wrong(
                f"{outcome.told}: rank {rank} has chunk {finished[0]} finished, and no other",
                "that is a reduce-scatter: the finished chunks have not gone round",
                "the all-gather starts with the chunk that the reduce-scatter left finished",
            )
        _compare_halves(outcome, rank, value, right)
        agreed = all(_same(other, value) for other in values)
        if case.op in ("sum", "avg") and agreed and not finished and not _weights(value, inputs):
            raise Wrong(
                f"{outcome.told}: all ranks agree, but on numbers that are not the "
                f"{OPS[case.op]} of all",
                "chunks that were not finished have gone round",
                "the all-gather starts with the chunk that the reduce-scatter left finished",
            )
        _compare_sums(outcome, rank, value, inputs)
    size, item = case.sizes[0], inputs[0].element_size()
    if size % n == 0 and case.form == "vector":
        _compare_ring(outcome, 2 * (n - 1), lambda rank, way: 2 * (n - 1) * size // n * item)


def _compare_halves(outcome: Outcome, rank: int, value: Tensor, right: Tensor) -> None:
    """Two slips with a form of their own: split for tensor_split, and the all-gather first."""
    n, own = outcome.n, outcome.tensors()[rank]
    if outcome.case.op != "sum" or right.numel() != 6 * n or _same(value, right):
        return
    if _same(value[: n * n], right[: n * n]) and _same(value[n * n :], own[n * n :]):
        raise Wrong(
            f"{outcome.told}: rank {rank} has the sum of all in the first {n * n} elements only",
            f"more than {n} chunks: split({n}) makes pieces of {n} elements",
            "vector.tensor_split(n) makes n pieces",
        )
    mine = slice(6 * rank, 6 * rank + 6)
    if _same(value[mine], n * own[mine]):
        raise Wrong(
            f"{outcome.told}: rank {rank}'s chunk {rank} holds its own numbers times {n}",
            "after an all-gather all ranks have the same, and then they add that up",
            "first reduce_scatter_ring, then all_gather_ring",
        )


# ---- 4.11 ------------------------------------------------------------------------------------


@lesson.exercise(
    "4.11",
    "alpha + beta * size = time, divided by the time: alpha * (1 / time) + beta * (size / time) = "
    "1. One such line for each message, and two unknowns.",
    "That is ordinary least squares with the columns 1 / time and size / time, and 1 on the right.",
    "torch.linalg.lstsq(columns, ones).solution, with float64: columns is (messages, 2).",
)
def fit_alpha_beta(answer) -> None:
    """Times that lie on a line; then noisy ones, where the weights decide."""
    sizes = [0, 8, 256, 4096, 65_536, 1 << 20, 1 << 23, 1 << 26]
    alpha, beta = random.uniform(2e-5, 2e-4), 1 / random.uniform(5e8, 5e9)
    exact = [alpha + beta * size for size in sizes]
    noisy = [t * f for t, f in zip(exact, (1.2, 0.9, 1.1, 0.8, 1.3, 0.8, 0.9, 1.2), strict=True)]
    seen = _alone(_fits_seen, answer, [(sizes, exact), (sizes, noisy)])
    for pair in seen:
        if isinstance(pair, str):
            raise Wrong(f"you returned {pair}", "", "return two numbers: alpha_s, beta_s_per_byte")
    _compare_exact_fit(*seen[0], alpha, beta)
    _compare_noisy_fit(*seen[1], sizes, noisy)


def _fits_seen(answer, cases: list) -> list:
    seen = []
    for sizes, times in cases:
        fit = answer(list(sizes), list(times))
        try:
            alpha, beta = (float(one) for one in fit)
            seen.append((alpha, beta))
        except (TypeError, ValueError):
            seen.append(repr(fit))
    return seen


def _compare_exact_fit(a: float, b: float, alpha: float, beta: float) -> None:
    def near(value: float, other: float) -> bool:
        return abs(value - other) <= 0.01 * abs(other)

    if near(a, alpha) and near(b, beta):
        return
    seen = (
        f"times that are exactly {alpha:.3g} s + {beta:.3g} s/byte * size: you say alpha = {a:.3g},"
        f" beta = {b:.3g}"
    )
    if near(b, alpha) and near(a, beta):
        raise Wrong(seen, "the two are swapped", "alpha, the time of an empty message, comes first")
    if near(b, 1 / beta):
        raise Wrong(seen, "that is the bandwidth, bytes a second", "beta is seconds a byte")
    for factor, unit in ((1e3, "milliseconds"), (1e6, "microseconds")):
        if near(a, alpha * factor):
            raise Wrong(seen, f"that is in {unit}", "times come in seconds and leave in seconds")
    if near(a, alpha):
        raise Wrong(seen, "alpha is right, beta is not", "beta belongs to the column size / time")
    if near(b, beta):
        raise Wrong(
            seen, "beta is right, alpha is not", "alpha is the time at size 0, not a measured one"
        )
    raise Wrong(
        seen,
        "the line does not go through the points",
        "least squares with a constant (alpha) and a slope (beta)",
    )


def _squares(sizes: list[int], times: list[float], a: float, b: float) -> float:
    return sum(((a + b * s) / t - 1) ** 2 for s, t in zip(sizes, times, strict=True))


def _compare_noisy_fit(a: float, b: float, sizes: list[int], times: list[float]) -> None:
    def fitted(power: float) -> tuple[float, float]:
        """Least squares, each line divided by time ** power."""
        s, t = torch.tensor([sizes, times], dtype=torch.float64)
        columns = torch.stack([1 / t**power, s / t**power], dim=1)
        return tuple(torch.linalg.lstsq(columns, t ** (1 - power)).solution.tolist())

    error = functools.partial(_squares, sizes, times)
    best = fitted(1)
    if error(a, b) <= 1.001 * error(*best):
        return
    seen = (
        f"noisy times: with your alpha = {a:.3g} s and beta = {b:.3g} s/byte the relative errors "
        f"square to {error(a, b):.3g}, the best fit ({best[0]:.3g}, {best[1]:.3g}) has "
        f"{error(*best):.3g}"
    )
    if error(a, b) > 0.9 * error(*fitted(0)) and abs(a / fitted(0)[0] - 1) < 0.01:
        raise Wrong(
            seen,
            "errors counted in seconds: the largest message decides alone, and alpha is noise",
            "divide each message's line by its time, so that each counts alike",
        )
    if any(abs(a / x - 1) < 0.01 and abs(b / y - 1) < 0.01 for x, y in map(fitted, (2, 0.5))):
        raise Wrong(
            seen,
            "weighted, but with the wrong power of the time",
            "the error itself is divided by the time; its square thus by the time squared",
        )
    if error(a, b) < 1.2 * error(*best):
        raise Wrong(
            seen,
            "close, but not the smallest: a search that has not reached the end",
            "no search is needed: torch.linalg.lstsq solves it at once",
        )
    raise Wrong(
        seen,
        "that is another line: through two of the points, or with other errors than the relative "
        "ones",
        "minimise the sum of ((alpha + beta * size) / time - 1) ** 2 over all messages",
    )


# ---- 4.12 ------------------------------------------------------------------------------------


@lesson.exercise(
    "4.12",
    "Three questions for each name: how many messages in a row (n-1, or ceil(log2 n)), once or "
    "twice over, and how large is each (all of it, or a chunk).",
    "An all-reduce is two halves: up and down a tree, to rank 0 and back, or scatter and gather.",
    "n-1 for names that end in naive, ring or gather, else math.ceil(math.log2(n)); times 2 where "
    "the name starts with all_reduce; nbytes / n for ring and gather, else nbytes.",
)
def rounds_and_message(answer) -> None:
    """All nine collectives on 1 to 9 ranks."""
    nbytes = 2520 * random.randrange(10, 99)
    seen = _alone(_prices_seen, answer, nbytes)
    for (name, n), pair in seen.items():
        call = f"rounds_and_message({name!r}, {n}, {nbytes})"
        if isinstance(pair, str):
            raise Wrong(f"{call} is {pair}", "", "return two numbers: rounds, bytes of a message")
        _compare_price(call, name, n, nbytes, *pair)


PRICES = {  # rounds with n-1 or ceil(log2 n), how often, and whether a message is one chunk
    "broadcast_naive": ("n-1", 1, False),
    "broadcast_tree": ("ceil(log2 n)", 1, False),
    "reduce_tree": ("ceil(log2 n)", 1, False),
    "gather": ("n-1", 1, True),
    "all_gather_ring": ("n-1", 1, True),
    "reduce_scatter_ring": ("n-1", 1, True),
    "all_reduce_naive": ("n-1", 2, False),
    "all_reduce_tree": ("ceil(log2 n)", 2, False),
    "all_reduce_ring": ("n-1", 2, True),
}


def _prices_seen(answer, nbytes: int) -> dict:
    seen = {}
    for n in (5, 8, 2, 3, 4, 6, 7, 9, 1):
        for name in PRICES:
            price = answer(name, n, nbytes)
            try:
                num_rounds, message = (float(one) for one in price)
                seen[name, n] = num_rounds, message
            except (TypeError, ValueError):
                seen[name, n] = repr(price)
    return seen


def _compare_price(
    call: str, name: str, n: int, nbytes: int, num_rounds: float, message: float
) -> None:
    text, times, in_chunks = PRICES[name]
    base = n - 1 if text == "n-1" else math.ceil(math.log2(n))
    right, right_message = times * base, nbytes / n if in_chunks else nbytes
    seen = f"{call} says {num_rounds:g} rounds of {message:g} bytes"
    if right and num_rounds == right_message and message == right:
        raise Wrong(seen, "the two are swapped", "first the number of rounds, then the bytes")
    if num_rounds != right:
        raise _why_rounds(seen, name, n, num_rounds, right)
    if right and not math.isclose(message, right_message, rel_tol=1e-6):
        smell = f"a message of {name} is {'one of n chunks' if in_chunks else 'the whole tensor'}"
        if math.isclose(message, right * right_message) or math.isclose(message, right * nbytes):
            smell = "that is the bytes of all rounds; asked is one message"
        elif in_chunks:
            smell = "a ring, and a gather, send chunks; the chunks together have that size"
        elif math.isclose(message, nbytes / n):
            smell = "nothing is cut into chunks here: every message is the whole tensor"
        raise Wrong(
            f"{seen}, not of {right_message:g}",
            smell,
            "nbytes / n for ring and gather, else nbytes",
        )


def _why_rounds(seen: str, name: str, n: int, num_rounds: float, right: int) -> Wrong:
    told_right, (text, times, _) = f"{seen}, not {right} rounds", PRICES[name]
    logs = [times * math.log2(n), times * int(math.log2(n))]
    if text != "n-1" and any(math.isclose(num_rounds, log) for log in logs):
        return Wrong(
            told_right,
            f"log2({n}) = {math.log2(n):.3g}: a round is whole, and the ranks that are left over "
            "need one more",
            "math.ceil(math.log2(n))",
        )
    if times == 2 and num_rounds * 2 == right:
        return Wrong(
            told_right,
            "that is one half: an all-reduce gathers the sum and gives it out again",
            "twice as many",
        )
    if text != "n-1" and num_rounds == times * n.bit_length():
        return Wrong(
            told_right,
            f"{n} is a power of 2, and {n}.bit_length() is one more than log2({n})",
            "math.ceil(math.log2(n)), or (n - 1).bit_length()",
        )
    if num_rounds == n * (n > 2) or num_rounds == times * n:
        return Wrong(told_right, "nobody sends to itself", "n-1 messages, not n")
    if num_rounds == times * (n - 1):
        return Wrong(told_right, "in a tree many send at the same time", "count rounds, not ranks")
    if num_rounds == times * math.ceil(math.log2(n)):
        return Wrong(told_right, "that is a tree", f"{name}: one message after the other")
    return Wrong(told_right, "", f"draw {name} for {n} ranks: {text} in a row, {times} x")
