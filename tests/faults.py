"""Faults that a person could have made: one small change of the code each, drawn with a seed.

Each operator looks at one node of the syntax tree and says what could stand there instead; nothing
else in the file changes. What no test could rightly notice is left alone: texts, messages, hints of
types, and limits of seconds.
"""

import ast
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOMS = tuple(
    "ranks data training checks/engine collectives data_parallel fsdp pipeline checkpoint "
    "mesh".split()
)
# Only `make bench` gets there, or they draw.
LEFT_ALONE = ("__init__.py", "bench.py", "figures.py", "report_figures.py")
COMPARED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "in": "not in"}
COMPARED |= {"not in": "in", "is": "is not", "is not": "is"}
SIGNS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
SIGNS |= {ast.In: "in", ast.NotIn: "not in", ast.Is: "is", ast.IsNot: "is not"}
TOLD = ("print", "warn", "warning", "info", "BadInput", "write_line")  # calls that only tell
Change = tuple[int, int, str]  # from, to, and what stands there instead


@dataclass(frozen=True)
class Fault:
    """A change of whole lines of one file; `line` is the first of them."""

    room: str
    file: str
    line: int
    operator: str
    before: str
    after: str

    def applied(self, text: str) -> str:
        """The file's text with the fault. LookupError where the lines are not there.

        Where they stand more than once, those nearest to `line` are meant.
        """
        lines, wanted = text.split("\n"), self.before.split("\n")
        places = range(len(lines) - len(wanted) + 1)
        found = [at for at in places if lines[at : at + len(wanted)] == wanted]
        if not found:
            raise LookupError(f"{self.file} has no such lines: {self.before}")
        at = min(found, key=lambda one: abs(one + 1 - self.line))
        return "\n".join([*lines[:at], *self.after.split("\n"), *lines[at + len(wanted) :]])


class Source:
    """A file's text and the places of its nodes in it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        lines = text.encode().splitlines(keepends=True)
        self.starts = [sum(map(len, lines[:number])) for number in range(len(lines) + 1)]
        self.bytes = text.encode()

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Where a node begins and ends, in bytes."""
        begin = self.starts[node.lineno - 1] + node.col_offset
        return begin, self.starts[node.end_lineno - 1] + node.end_col_offset

    def replaced(self, change: Change) -> str:
        begin, end, words = change
        return (self.bytes[:begin] + words.encode() + self.bytes[end:]).decode()

    def between(self, left: ast.AST, right: ast.AST, old: str, new: str) -> Iterator[Change]:
        """Another sign between two nodes, among brackets and spaces."""
        begin, end = self.span(left)[1], self.span(right)[0]
        gap = self.bytes[begin:end].decode()
        if gap.count(old) == 1 and "#" not in gap:
            yield begin, end, gap.replace(old, new)


# ---- operators ---------------------------------------------------------------------------------


def comparison(source: Source, node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        sign = SIGNS[type(node.ops[0])]
        yield from source.between(node.left, node.comparators[0], sign, COMPARED[sign])


def sign(source: Source, node: ast.AST) -> Iterator[Change]:
    """+ for -, and - for +; not between texts or lists."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        parts = [type(one) for side in (node.left, node.right) for one in ast.walk(side)]
        texts = {ast.JoinedStr, ast.List, ast.ListComp, ast.Tuple}
        if not texts & set(parts) and not any(map(is_text, ast.walk(node))):
            old, new = ("+", "-") if isinstance(node.op, ast.Add) else ("-", "+")
            yield from source.between(node.left, node.right, old, new)


def one_more(source: Source, node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield *source.span(node), str(node.value + 1)


def no_not(source: Source, node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        begin = source.span(node)[0]
        yield begin, begin + len("not "), ""


def and_or(source: Source, node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.BoolOp) and len(node.values) == 2:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        yield from source.between(*node.values, old, new)


def no_argument(source: Source, node: ast.AST) -> Iterator[Change]:
    """A keyword's argument is left out, with the comma before it."""
    if isinstance(node, ast.Call):
        given = sorted([*node.args, *node.keywords], key=lambda one: source.span(one)[0])
        for before, one in zip([None, *given], given, strict=False):
            if isinstance(one, ast.keyword) and one.arg:
                begin = source.span(before if before is not None else node.func)[1]
                yield begin + (before is None), source.span(one)[1], ""


def no_statement(source: Source, node: ast.AST) -> Iterator[Change]:
    """A call for its effect is left out, or an addition to a variable."""
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if (is_call and not only_tells(node.value)) or isinstance(node, ast.AugAssign):
        yield *source.span(node), "pass"


def other_value(source: Source, node: ast.AST) -> Iterator[Change]:
    """None is returned, or the opposite of a condition."""
    if isinstance(node, ast.Return) and node.value is not None and not is_none(node.value):
        begin, end = source.span(node.value)
        if isinstance(node.value, ast.Compare | ast.BoolOp):
            yield begin, end, f"not ({source.bytes[begin:end].decode()})"
        else:
            yield begin, end, "None"


OPERATORS: dict[str, Callable[[Source, ast.AST], Iterator[Change]]] = {
    "comparison": comparison,
    "sign": sign,
    "one more": one_more,
    "no not": no_not,
    "and for or": and_or,
    "no argument": no_argument,
    "no statement": no_statement,
    "other value": other_value,
}


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def only_tells(call: ast.Call) -> bool:
    return getattr(call.func, "id", getattr(call.func, "attr", "")) in TOLD


# ---- the draw ----------------------------------------------------------------------------------


def is_left_alone(node: ast.AST) -> bool:
    """A part of the code whose faults no test could rightly notice."""
    if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert):
        return True
    if isinstance(node, ast.If):
        return getattr(node.test, "id", "") == "TYPE_CHECKING"
    if isinstance(node, ast.Call):
        return only_tells(node)
    if isinstance(node, ast.Assign):
        return any(getattr(target, "id", "").endswith("_S") for target in node.targets)
    return isinstance(node, ast.keyword) and (node.arg or "").endswith("_s")


def parts_of(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of code below `node`, without hints of types and what is left alone."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not is_left_alone(child):
                yield child
                yield from parts_of(child)


def changes_in(source: Source) -> dict[str, list[Change]]:
    """All that the operators find in a file, by operator."""
    found: dict[str, list[Change]] = {}
    for node in parts_of(source.tree):
        for name, operator in OPERATORS.items():
            for change in operator(source, node):
                found.setdefault(name, []).append(change)
    return found


def fault(room: str, file: str, source: Source, operator: str, change: Change) -> Fault | None:
    """The whole lines that differ; None where the result is no Python."""
    changed = source.replaced(change)
    try:
        compile(changed, file, "exec")
    except SyntaxError:
        return None
    first = source.bytes[: change[0]].count(b"\n")
    last = source.bytes[: change[1]].count(b"\n")
    old, new = source.text.split("\n"), changed.split("\n")
    after = new[first : len(new) - (len(old) - last - 1)]
    before = old[first : last + 1]
    return Fault(room, file, first + 1, operator, "\n".join(before), "\n".join(after))


def draw(root: Path, seed: int, num_faults: int) -> list[Fault]:
    """Faults in all rooms, as many in each, and each in another file while there are any.

    An operator is drawn first, so that constants, of which there are most, are not most of them.
    """
    if num_faults % len(ROOMS):
        raise ValueError(f"{num_faults} faults cannot be shared evenly by {len(ROOMS)} rooms")
    drawn: list[Fault] = []
    for room in ROOMS:
        chance = random.Random(f"{seed} {room}")
        folder = root / "scripts" / "manyhands" / room
        paths = [path for path in sorted(folder.glob("*.py")) if path.name not in LEFT_ALONE]
        chance.shuffle(paths)
        wanted = len(drawn) + num_faults // len(ROOMS)
        while len(drawn) < wanted:
            paths.append(path := paths.pop(0))
            source = Source(path.read_text())
            found = changes_in(source)
            operator = chance.choice(sorted(found) or [""])
            change = chance.choice(found.get(operator) or [None])
            if change is None:
                continue
            one = fault(room, str(path.relative_to(root)), source, operator, change)
            if one is not None and one not in drawn:
                drawn.append(one)
    return drawn
