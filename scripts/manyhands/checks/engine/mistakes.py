"""Mistakes: changes of the course's own functions, each with a sentence and a hint.

A mistake is written once: as text that is replaced in the source of the truth, as a function around
the truth, or, where neither can say it, as another function; most stand in a table (tables.py).
`generic` has the slips that can be made in any function, such as a group that is not passed on.
"""

import ast
import copy
import functools
import inspect
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from manyhands.checks.engine.answer import Pair, parts_of

# ---- changes of the truth -------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """What makes a wrong answer of the truth: patches of its source, then functions around it."""

    patches: tuple[tuple[str, str], ...] = ()
    around: tuple[Callable, ...] = ()

    def __add__(self, other: "Change") -> "Change":
        return Change(self.patches + other.patches, self.around + other.around)

    def make(self, truth: object) -> object:
        """The wrong answer."""
        made = build(truth, self.sources(truth)) if self.patches else truth
        for wrap in self.around:
            made = wrap(made)
        return made

    def sources(self, truth: object) -> list[str]:
        """The patched source of each part; LookupError where a text does not stand there once."""
        sources = sources_of(truth)
        for old, new in self.patches:
            if sum(source.count(old) for source in sources) != 1:
                raise LookupError(f"{old!r} does not stand once in the source of {truth}")
            sources = [source.replace(old, new) for source in sources]
        return sources


TOGETHER = "Two mistakes together show this."


@dataclass(frozen=True)
class Mistake:
    """A wrong way, the sentence that names it, and what to try.

    Args:
        fits: (found, case) -> is this value of that way? Where many values are.
        ends: the ranks end, die or hang by it, and what is told of that is written elsewhere (a
            reason, the guard of messages, the lines in which ranks wait). Only the test runs it.
    """

    change: Change
    why: str
    hint: str = ""
    fits: Callable | None = None
    ends: bool = False

    def __add__(self, other: "Mistake") -> "Mistake":
        why = f"{TOGETHER} {self.why} And: {other.why}"
        return Mistake(self.change + other.change, why, self.hint)


def patch(*texts: str) -> Change:
    """Old and new text in turns; each old one stands once in the source of the truth."""
    return Change(patches=tuple(zip(texts[::2], texts[1::2], strict=True)))


def around(wrap: Callable) -> Change:
    """wrap(truth) is the wrong answer."""
    return Change(around=(wrap,))


def after(change: Callable) -> Change:
    """The right value, changed on its way out."""
    return around(lambda truth: lambda *args, **named: change(truth(*args, **named)))


def instead(answer: object) -> Change:
    """Another function, where a patch cannot say it."""
    return around(lambda truth: answer)


def sources_of(truth: object) -> list[str]:
    """The source of each part of the truth."""
    return [_source(part) for part in parts_of(truth)]


@functools.cache
def _source(part: object) -> str:
    return textwrap.dedent(inspect.getsource(part))


def build(truth: object, sources: Sequence[str]) -> object:
    """What the sources define, in the modules of the truth's parts."""
    parts = parts_of(truth)
    space = dict(vars(sys.modules[parts[0].__module__]))
    for part, source in zip(parts, sources, strict=True):
        exec(compile(source, f"<{part.__name__}>", "exec"), space)
    made = [space[part.__name__] for part in parts]
    return Pair(*made) if isinstance(truth, Pair) else made[0]


# ---- slips that any function can have -------------------------------------------------------

NO_GROUP = (
    "`group` is not passed on in every call, so other ranks than those of the group take part."
)
USE_GROUP = (
    "Ask for dist.get_rank(group) and dist.get_world_size(group), and give every call group=group; "
    "group_src= and group_dst= count inside the group."
)
AFTER: dict[str, tuple[Callable, ...]] = {  # sentence: what is done to the right value
    "The order is reversed.": (lambda v: v[::-1], lambda v: v.flip(0)),
    "The first one is missing.": (lambda v: v[1:],),
    "The last one is missing.": (lambda v: v[:-1],),
    "The result is too large by one.": (lambda v: v + 1,),
    "The result is too small by one.": (lambda v: v - 1,),
    "The result is a percentage, and the exercise asks for a share.": (lambda v: 100 * v,),
    "The result is one minus the right share.": (lambda v: 1 - v,),
    "The result is the reciprocal of the right one.": (lambda v: 1 / v,),
    "The result is twice the right one.": (lambda v: 2 * v,),
    "The result is half the right one.": (lambda v: v / 2, lambda v: v // 2),
    "The result has the wrong sign.": (lambda v: -v,),
    "The result is rounded.": (
        lambda v: int(v),
        lambda v: math.ceil(v),
        lambda v: round(v),
        lambda v: round(v, 2),
    ),
    "The result has lost precision: it is not of the type of the input.": (
        lambda v: v.float() if v.dtype is torch.float64 else v.bfloat16().to(v.dtype),
    ),
}
LESS = "A comparison is off by its equal sign: < where <= is needed, or the other way round."
SIGN = "One slip gives this: + where - is needed, or the other way round."
DIVISION = "One slip gives this: // where / is needed, or the other way round."
TWISTS = {  # an operator -> the one that stands there by a slip, and a sentence for it
    ast.Lt: (ast.LtE, LESS),
    ast.LtE: (ast.Lt, LESS),
    ast.Gt: (ast.GtE, LESS),
    ast.GtE: (ast.Gt, LESS),
    ast.Add: (ast.Sub, SIGN),
    ast.Sub: (ast.Add, SIGN),
    ast.FloorDiv: (ast.Div, DIVISION),
    ast.Div: (ast.FloorDiv, DIVISION),
    ast.Eq: (ast.NotEq, "A condition is the wrong way round."),
    ast.NotEq: (ast.Eq, "A condition is the wrong way round."),
}
OFF_BY_ONE = "One number, bound or index is off by one."
IN_GROUP = (
    r"(?<=rank\()group(?=\))|(?<=size\()group(?=\))|, (?:group=)?(?:ctx\.|self\.)?group(?=\))"
)
ROOT_IN_GROUP = r"group_(src|dst)="


def generic(truth: object, talks: bool = False) -> list[Mistake]:
    """Slips that can be made in any function.

    Args:
        talks: does it send to other ranks? Then operators and numbers are not twisted, because most
            of these changes would leave ranks waiting for each other.
    """
    found = _of_values(truth)
    sources = sources_of(truth)
    if any("group" in source for source in sources):
        found += [Mistake(change, NO_GROUP, USE_GROUP) for change in _without_group(sources)]
    waits = r"(?<!\bself)\.wait\(\)"  # an object's own wait() is no message's
    found += [Mistake(c, NOT_WAITED, WAIT) for c in _without_lines(sources, waits)]
    if not talks:
        found += [Mistake(change, why) for change, why in _twisted(sources)]
    return found


NOT_WAITED = "A message is started and not waited for before its tensor is used."
WAIT = "Call wait() on what a call with async_op=True, isend or irecv returns."


def _of_values(truth: object) -> list[Mistake]:
    """The right value changed, no value, arguments that have changed places."""
    if not inspect.isfunction(truth):
        return []
    if truth.__annotations__.get("return") is None:
        nothing = Mistake(instead(lambda *args, **named: None), "Nothing has been done.")
        twice = Mistake(around(_twice), "The work is done twice.")
        return [nothing, twice, Mistake(around(_on_copies), ON_A_COPY)]
    found = [Mistake(after(fn), why) for why, fns in AFTER.items() for fn in fns]
    swapped = around(lambda t: lambda a, b, *rest, **named: t(b, a, *rest, **named))
    found.append(Mistake(swapped, "The first two arguments have changed places."))
    return found


ON_A_COPY = "What was given is unchanged: a copy, or a new tensor under the same name, was changed."


def _twice(truth: Callable) -> Callable:
    def twice(*args, **named):
        truth(*args, **named)
        return truth(*args, **named)

    return twice


def _on_copies(truth: Callable) -> Callable:
    def on_copies(*args, **named):
        tensors = (Tensor, list, torch.nn.Module)
        args = [copy.deepcopy(arg) if isinstance(arg, tensors) else arg for arg in args]
        truth(*args, **named)

    return on_copies


def _without_group(sources: list[str]) -> Iterator[Change]:
    """The group left out in one call, in all calls; a root counted over the whole job."""
    yield from _each_place(sources, IN_GROUP, "")
    bare = [re.sub(IN_GROUP, "", source) for source in sources]
    yield around(lambda truth: build(truth, bare))
    if any(re.search(ROOT_IN_GROUP, source) for source in sources):
        rooted = [re.sub(ROOT_IN_GROUP, r"\1=", source) for source in sources]
        yield around(lambda truth: build(truth, rooted))


def _without_lines(sources: list[str], pattern: str) -> Iterator[Change]:
    """Every statement with the pattern left out, one at a time."""
    for index, source in enumerate(sources):
        lines = source.splitlines()
        for number, line in enumerate(lines):
            if re.search(pattern, line) and not line.strip().startswith(("return", "if ", "for ")):
                indent = line[: len(line) - len(line.lstrip())]
                left = [*lines[:number], f"{indent}...", *lines[number + 1 :]]
                yield _with_source(sources, index, "\n".join(left) + "\n")


def _each_place(sources: list[str], pattern: str, new: str) -> Iterator[Change]:
    for index, source in enumerate(sources):
        for at in re.finditer(pattern, source):
            yield _with_source(sources, index, source[: at.start()] + new + source[at.end() :])


def _with_source(sources: list[str], index: int, source: str) -> Change:
    other = [*sources[:index], source, *sources[index + 1 :]]
    return around(lambda truth: build(truth, other))


def _twisted(sources: list[str]) -> Iterator[tuple[Change, str]]:
    """Each operator twisted, and each whole number one more or less."""
    for index, source in enumerate(sources):
        for number in range(len(list(ast.walk(ast.parse(source))))):
            for more in (1, -1):
                tree = ast.parse(source)
                why = _twist(list(ast.walk(tree))[number], more)
                if why:
                    yield _with_source(sources, index, ast.unparse(tree)), why


def _twist(node: ast.AST, more: int) -> str:
    """Change one node in place; the sentence for the change, or "" where there is none."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        node.value += more
        return OFF_BY_ONE
    if more < 0 or not isinstance(node, ast.Compare | ast.BinOp):
        return ""
    operator = node.ops[0] if isinstance(node, ast.Compare) else node.op
    if type(operator) not in TWISTS:
        return ""
    new, why = TWISTS[type(operator)]
    if isinstance(node, ast.Compare):
        node.ops[0] = new()
    else:
        node.op = new()
    return why
