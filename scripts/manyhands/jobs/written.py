"""The text that made a function or class: a statement of a notebook's cell, or of a file.

A name can be defined many times in one session, and can be given to what was made under another.
So it is not the name that tells which text made a value, but the code that the text compiles to.
"""

import __future__

import ast
import functools
import inspect
import linecache
import re
import symtable
import sys
import types
from collections.abc import Iterator

from manyhands.jobs import alike


def source_of(name: str, value: object) -> str:
    """The source of `name`: the statement, and where it makes `value` under another name, two.

    Raises:
        ValueError: no statement that was run agrees with the value's compiled code.
    """
    functions = functions_of(value)
    own = ["".join(linecache.getlines(one.__code__.co_filename)) for one in functions]
    run = list(_texts_run(value))
    tries = [(own + run, [one.__code__ for one in functions])]
    if not inspect.isfunction(value) or "<locals>" in value.__qualname__:
        tries.append((run, []))  # made by a call, or with methods that are, as a dataclass's
    for texts, codes in tries:
        for wanted in dict.fromkeys((name, getattr(value, "__name__", name))):
            for text in texts:
                if source := _statement(wanted, text, codes):
                    return source if wanted == name else f"{source}\n\n\n{name} = {wanted}"
    raise ValueError(
        f"the source of {name!r} is not to be found: define it with `def` or `class` at the left "
        "margin of a cell, run that cell, and then its check"
    )


def functions_of(value: object) -> list[types.FunctionType]:
    """The functions that a function or class is made of: what it wraps, and its own methods."""
    found: list[types.FunctionType] = []
    left = list(vars(value).values()) if isinstance(value, type) else [value]
    while left:
        one = left.pop(0)
        parts = [held(one) for held in PARTS.get(type(one), ())]
        parts.append(getattr(one, "__dict__", {}).get("__wrapped__"))
        if inspect.isfunction(one) and one not in found:
            found.append(one)
            parts += [alike.held(cell) for cell in one.__closure__ or ()]
        left += [part for part in parts if inspect.isfunction(part) and part not in found]
    return found


PARTS = {
    property: (lambda one: one.fget,),
    staticmethod: (lambda one: one.__func__,),
    classmethod: (lambda one: one.__func__,),
}


def _texts_run(value: object) -> Iterator[str]:
    """All texts that this session has run, and that of the value's module."""
    # A notebook's cells as they were run; the last one that defines a name counts.
    yield from reversed(vars(sys.modules["__main__"]).get("In", []))
    if "get_ipython" in vars(sys.modules["__main__"]):  # `In` has no text below a cell's magic
        history = sys.modules["__main__"].get_ipython().history_manager
        yield from reversed(history.input_hist_raw)
    # Where cells are not numbered, and for a class without methods: what Python read of cells.
    cells = [entry for name, entry in linecache.cache.items() if "ipykernel_" in name]
    yield from ("".join(entry[2]) for entry in reversed(cells) if len(entry) > 2)
    module = sys.modules.get(getattr(value, "__module__", ""))
    yield "".join(linecache.getlines(getattr(module, "__file__", None) or ""))


def _statement(name: str, text: str, codes: list[types.CodeType]) -> str | None:
    """The last statement of a text that makes `name`, with one of these codes if there are any."""
    text = MAGIC.sub("", text)
    for node in reversed(_statements(text)):
        if name in _names_made(node) and (not codes or _holds_one(node, codes)):
            if getattr(node, "decorator_list", ()):
                node.lineno = min(mark.lineno for mark in node.decorator_list)
            return ast.get_source_segment(text, node)
    return None


MAGIC = re.compile(r"^[%!].*", re.MULTILINE)


@functools.lru_cache(maxsize=1000)
def _statements(text: str) -> list[ast.stmt]:
    try:
        return ast.parse(text).body
    except (SyntaxError, ValueError):  # a magic within a line, or a null byte
        return []


def _names_made(node: ast.stmt) -> list[str]:
    """The names that a statement defines or assigns."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _holds_one(node: ast.stmt, codes: list[types.CodeType]) -> bool:
    """Does this statement compile to one of these codes?"""
    inherited = codes[0].co_flags & FUTURES
    whole = compile(ast.Module([node], []), "", "exec", flags=inherited, dont_inherit=True)
    inner = {alike.operations(code) for code in alike.inner_codes(whole)}
    return any(alike.operations(code) in inner for code in codes)


FUTURES = __future__.annotations.compiler_flag  # a cell's `from __future__` counts for later ones


def global_names(source: str) -> tuple[set[str], set[str]]:
    """The global names that a piece of code reads, and those that it defines."""
    top = symtable.symtable(source, "cell", "exec")
    defined = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()}
    scopes = [top]
    read: set[str] = set()
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        for symbol in scope.get_symbols():
            if symbol.is_referenced() and (scope is top or symbol.is_global()):
                read.add(symbol.get_name())
    return read, defined


def submodules_read(source: str, name: str, module: str) -> set[str]:
    """The modules below `module`, known by `name`, that a piece of code reads as attributes."""
    chains = {ast.unparse(n) for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Attribute)}
    below = {module + one.removeprefix(name) for one in chains if one.startswith(f"{name}.")}
    return below & sys.modules.keys()
