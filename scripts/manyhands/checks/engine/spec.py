"""What an exercise is: all that its verdicts and its test are made of.

case      what one call is given; drawn anew for each verdict, the smallest first
layout    the job's ranks, divided into groups; an exercise without ranks has none
step      one case in one layout
"""

import functools
import inspect
import itertools
from collections import namedtuple
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist

from manyhands.checks.engine import tables
from manyhands.checks.engine.answer import parts_of
from manyhands.checks.engine.mistakes import Mistake
from manyhands.checks.engine.values import first_difference, same, show

Layout = tuple[tuple[int, ...], ...]  # groups of ranks of the job
Call = Any  # a case of arguments, each by the name of its parameter
Step = tuple[int, int]  # the layout's number, the case's number


class Place(NamedTuple):
    """This rank in its group of a layout."""

    group: dist.ProcessGroup | None  # None: all ranks of the job, and no `group` is given
    members: tuple[int, ...]  # ranks of the job
    rank: int  # in the group

    @property
    def n(self) -> int:
        """How many ranks the group has."""
        return len(self.members)

    @property
    def options(self) -> dict:
        """group=..., where there is one."""
        return {} if self.group is None else {"group": self.group}

    @property
    def job_rank(self) -> int:
        """This rank's number in the job: seeds made from it differ between groups."""
        return self.members[self.rank]


@dataclass
class Spec:
    """One exercise.

    Args:
        todo: its number, as "12.7".
        truth: the course's own function or class, itself tested elsewhere; a Pair of two where the
            exercise has two.
        cases: draws them, the smallest first; is given the size of a group where there are layouts.
            A plain tuple holds the arguments, and `case.x` is the one that the truth names x.
        observe: (answer, case), with layouts (answer, case, place) -> what the call shows, as plain
            data. In a dict, a part that is True or False is a statement, such as "x is unchanged";
            the part "besides" is not judged, and helps to tell mistakes apart. May raise Wrong.
        mistakes: those that readers make; slips that any function can have come by themselves, and
            so do two mistakes at once, but not where there are layouts. A table (see tables.py), or
            a list.
        hints: from a nudge to nearly the answer.
        layouts: the first has all ranks in one group, which is not given as `group`.
        form: brings what `observe` gives to plain data, or raises Malformed.
        same: (found, wanted, case) -> is this value right as well? Where many values are. Mistakes
            are compared without it, to the digits that `observe` or `form` leave.
        tell: the words for a case; by default the call with its arguments.
        say: (found, wanted) -> what is seen of a wrong value.
        facts: (found, wanted, case) -> a sentence that is true of this wrong value by looking at
            it, or "". It states no cause.
        advice: what to try: for a part, by its name; under "" for all others.
        reasons: words of an error -> sentence, and what to try; a table, or a dict.
        waits: a call in the line where a rank waits for ever -> sentence, and what to try.
        refusal: what to say where an error is asked for and nothing is raised.
        independent: is each part of a dict an answer by itself, as a mean and a variance are? Then
            a mistake is named as well when it is alike only in the first wrong part, in the order
            of the dict, and spoils no part that the answer has right.
        operations: of torch.distributed that may be called; none given: all.
        may_change: arguments (names of the case's fields) and states of the process (see trial.py)
            that the call may change.
        guards_group: refuse messages through another group than the one that is given?
        limit_s: how long the ranks may wait for one another.
        max_messages: of one rank in one call, beyond which it is ended.
        mistake_s: how long one call of a mistake may take; one that takes longer hangs.
        at_once: mistakes that a verdict tries together; few where each takes long.
        module: globals(), of which {NAME} in a table stands for a text.
    """

    todo: str
    truth: object
    cases: Callable
    mistakes: str | list[Mistake]
    hints: tuple[str, ...]
    observe: Callable = lambda answer, case: answer(*case)
    layouts: tuple[Layout, ...] = ()
    form: Callable = lambda value: value
    same: Callable = lambda found, wanted, case: same(found, wanted)
    tell: Callable | None = None
    say: Callable = first_difference
    facts: Callable = lambda found, wanted, case: ""
    advice: dict[str, str] = field(default_factory=dict)
    reasons: str | dict[str, tuple[str, str]] = field(default_factory=dict)
    waits: dict[str, tuple[str, str]] = field(default_factory=dict)
    refusal: tuple[str, str] = ("The docstring asks for an error here.", "")
    independent: bool = False
    operations: tuple[str, ...] = ()
    may_change: tuple[str, ...] = ()
    guards_group: bool = True
    limit_s: float = 6.0
    max_messages: int = 200
    mistake_s: float = 1.0
    at_once: int = 100
    module: InitVar[dict[str, object] | None] = None

    def __post_init__(self, module: dict[str, object] | None) -> None:
        if isinstance(self.mistakes, str):
            self.mistakes = tables.mistakes(self.mistakes, module or {})
        if isinstance(self.reasons, str):
            self.reasons = tables.reasons(self.reasons, module or {})

    @property
    def names(self) -> list[str]:
        """The names of what is written."""
        return [part.__name__ for part in parts_of(self.truth)]

    @property
    def size(self) -> int:
        """How many ranks."""
        return sum(map(len, self.layouts[0])) if self.layouts else 1

    def draw(self) -> dict[int, list]:
        """The cases for each size of a group; under 0 those without ranks."""
        if not self.layouts:
            return {0: [self._named(case) for case in self.cases()]}
        sizes = sorted({len(group) for layout in self.layouts for group in layout})
        return {n: [self._named(case) for case in self.cases(n)] for n in sizes}

    def _named(self, case: object) -> object:
        """A plain tuple of arguments gets the names of the truth's parameters."""
        if type(case) is not tuple or not case:
            return case
        return _arguments(parts_of(self.truth)[0], len(case))(*case)

    def steps(self, cases: dict[int, list]) -> list[Step]:
        """Every case in every layout."""
        num_cases = min(map(len, cases.values()))
        return list(itertools.product(range(max(1, len(self.layouts))), range(num_cases)))

    def case(self, cases: dict[int, list], step: Step, rank: int) -> object:
        """What this rank is given in a step."""
        size = len(self.group(step[0], rank)) if self.layouts else 0
        return cases[size][step[1]]

    def group(self, layout: int, rank: int) -> tuple[int, ...]:
        """The group of a rank of the job."""
        return next(members for members in self.layouts[layout] if rank in members)

    def words(self, step: Step, rank: int, case: object) -> str:
        """The call in a step on a rank, for people."""
        call = self.tell(case) if self.tell else _call(self.names[0], case)
        if not self.layouts:
            return call
        members = self.group(step[0], rank)
        if step[0]:
            place = members.index(rank)
            return f"with group = ranks {list(members)}, on its rank {place}: {call}"
        return f"on rank {rank} of {len(members)}: {call}"


@functools.cache
def _arguments(function: Callable, number: int) -> type[tuple]:
    """A named tuple of the first arguments of a function, with their defaults."""
    parameters = list(inspect.signature(function).parameters.values())[:number]
    defaults = [one.default for one in parameters if one.default is not one.empty]
    return namedtuple("Arguments", [one.name for one in parameters], defaults=defaults)


def _call(name: str, case: object) -> str:
    if hasattr(case, "_asdict"):
        return f"{name}({', '.join(f'{n}={show(v, 4)}' for n, v in case._asdict().items())})"
    values = case if isinstance(case, tuple) else (case,)
    return f"{name}({', '.join(show(value, 4) for value in values)})"
