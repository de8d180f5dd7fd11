"""Are two functions, classes or values the same as they were written, wherever that stands?

A cell that is run again makes its functions anew, and so does a file that is loaded. They do the
same where their compiled code agrees, and so do their defaults, what they enclose and, if asked
for, the global names that they read.
"""

import dis
import functools
import inspect
import types
from collections.abc import Iterator

# What a class holds beside what was written: where it stands, and what others note in it.
NOT_WRITTEN = {"__module__", "__firstlineno__", "__static_attributes__", "_backward_cls"}
MADE_OF = {
    property: ("fget", "fset", "fdel"),
    functools.partial: ("func", "args", "keywords"),
    types.MethodType: ("__func__", "__self__"),
}
ADDRESS = " at 0x"
STATE = dict | list | set  # where a function encloses one, its calls may have changed it
Parts = list[tuple[str, object, object]]


def difference(name: str, one: object, other: object, with_globals: bool = False) -> str:
    """The first part of `name` in which two values differ, by its name; empty where none does."""
    left: Parts = [(name, one, other)]
    seen = set()
    while left:
        name, one, other = left.pop()
        if one is other or (id(one), id(other)) in seen:
            continue
        seen.add((id(one), id(other)))
        parts = _parts(name, one, other, with_globals)
        if parts is None:
            return name
        left += parts
    return ""


def _parts(name: str, one: object, other: object, with_globals: bool) -> Parts | None:
    """What has to agree for two values to agree; None where they differ already."""
    if type(one).__name__ != type(other).__name__:
        return None
    if isinstance(one, type):
        bases = _parts_of_rows(one.__bases__, other.__bases__, [b.__name__ for b in one.__bases__])
        members = _parts_of_maps(name, _written(one), _written(other))
        return None if bases is None or members is None else bases + members
    if inspect.isfunction(one):
        return _parts_of_functions(name, one, other, with_globals)
    if isinstance(one, dict):
        return _parts_of_maps(name, one, other)
    if isinstance(one, list | tuple):
        return _parts_of_rows(one, other, [name] * len(one))
    for kind, attributes in MADE_OF.items():
        if isinstance(one, kind):
            return [(name, getattr(one, part), getattr(other, part)) for part in attributes]
    if hasattr(one, "__wrapped__"):
        return [(name, one.__wrapped__, other.__wrapped__)]
    return _parts_of_values(name, one, other)


def _written(kind: type) -> dict[str, object]:
    found = {name: member for name, member in vars(kind).items() if name not in NOT_WRITTEN}
    for name, member in list(found.items()):
        if getattr(member, "hooked", False):  # torch wraps an optimizer's step at its first use
            found[name] = member.__wrapped__
            bases = [inspect.unwrap(getattr(base, name, member)) for base in kind.__bases__]
            if inspect.unwrap(member) in bases:
                del found[name]
    return found


def _parts_of_maps(name: str, one: dict, other: dict) -> Parts | None:
    if one.keys() != other.keys():
        return None
    return [(f"{name}.{key}", value, other[key]) for key, value in one.items()]


def _parts_of_rows(one: tuple, other: tuple, names: list[str]) -> Parts | None:
    return list(zip(names, one, other, strict=True)) if len(one) == len(other) else None


def _parts_of_functions(
    name: str, one: types.FunctionType, other: types.FunctionType, with_globals: bool
) -> Parts | None:
    if operations(one.__code__) != operations(other.__code__):
        return None
    parts = [
        (f"a default of {name}", one.__defaults__, other.__defaults__),
        (f"a default of {name}", one.__kwdefaults__, other.__kwdefaults__),
    ]
    enclosed = one.__code__.co_freevars
    pairs = zip(one.__closure__ or (), other.__closure__ or (), strict=True)
    for key, cells in zip(enclosed, pairs, strict=True):
        values = [held(cell) for cell in cells]
        if not isinstance(values[0], STATE):
            parts.append((f"{key}, which {name} encloses", *values))
    if with_globals:
        spaces = one.__globals__, other.__globals__
        known = names_in(one.__code__) & spaces[0].keys() & spaces[1].keys()
        parts += [(key, spaces[0][key], spaces[1][key]) for key in sorted(known)]
    return parts


def held(cell: types.CellType) -> object:
    """What a function encloses in this cell."""
    try:
        return cell.cell_contents
    except ValueError:  # its name has no value yet
        return None


def _parts_of_values(name: str, one: object, other: object) -> Parts | None:
    """Of two plain values or instances; what shows an address instead of a value is let pass."""
    if isinstance(one, set | frozenset):
        return [] if one == other else None
    shown = repr(one), repr(other)
    if shown[0] != shown[1] and not all(ADDRESS in words for words in shown):
        return None
    return [(name, vars(one), vars(other))] if hasattr(one, "__dict__") else []


# ---- compiled code ---------------------------------------------------------------------------


@functools.lru_cache(maxsize=1000)
def operations(code: types.CodeType) -> tuple:
    """What a code object does, as a value that is equal for two that do the same.

    The compiler calls `module.function` in one of two ways, by whether the import stands in the
    same cell or file. They differ in a NULL on the stack, which is left out here, as are lines.
    """
    done: list[tuple] = []
    number_at = {}
    for step in dis.get_instructions(code):
        number_at[step.offset] = len(done)
        if step.opname not in ("PUSH_NULL", "EXTENDED_ARG", "NOP"):
            done.append((step.opname.replace("LOAD_METHOD", "LOAD_ATTR"), step.opcode, step.argval))
    steps = [
        (name, number_at[value] if opcode in JUMPS else _constant(value))
        for name, opcode, value in done
    ]
    shape = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    names = code.co_name, code.co_varnames, code.co_freevars, code.co_cellvars
    return *names, *shape, *steps


JUMPS = {*dis.hasjrel, *dis.hasjabs}


def _constant(value: object) -> object:
    """A constant with its type: 1, 1.0 and True are equal in Python."""
    return operations(value) if isinstance(value, types.CodeType) else repr(value)


def inner_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """All code objects that one holds, at any depth."""
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield const
            yield from inner_codes(const)


def names_in(code: types.CodeType) -> set[str]:
    """The names of globals and attributes that a code object and what it holds read."""
    return {name for one in (code, *inner_codes(code)) for name in one.co_names}
