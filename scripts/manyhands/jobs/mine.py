"""The learner's own functions as a file that a job can import: mine/<lesson>.py.

    notebook: def place(...), class BucketedDDP  --write-->  mine/ddp.py  --load-->  train_ddp.py

A notebook's functions live in its kernel, where no job can reach them. Their source is copied into
a file, together with the imports and helpers that they use, so that the job runs the same code.
`start` is how most training scripts begin: join the ranks, with the learner's functions or without.
"""

import ast
import builtins
import functools
import importlib.util
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from manyhands.jobs import alike, written
from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import distributed, first_line
from manyhands.training import places, storage


def write(lesson: str, answers: Mapping[str, object], folder: Path | None = None) -> Path:
    """Write the answers' source to `folder`/<lesson>.py, by default in mine/; returns the path.

    Raises:
        ValueError: an answer uses a value of the notebook that cannot be written down.
        NoPlace: the file cannot be written; one that was there stays as it was.
    """
    imports: set[str] = set()
    definitions: dict[str, str] = {}
    for name, answer in answers.items():
        _collect(name, answer, imports, definitions)
    title = f'"""Written by check.keep() in the {lesson} notebook: your own functions."""'
    text = (
        "\n\n\n".join([title + "\n\n" + "\n".join(sorted(imports)), *definitions.values()]) + "\n"
    )
    _refuse_another(text, lesson, answers)
    path = places.make(folder or places.mine()) / f"{lesson}.py"
    try:
        storage.replace_file(path, text.encode(), mode=0o644)  # whatever the umask: jobs run it
    except OSError as problem:
        raise places.NoPlace(path, problem) from None
    return path


def load(
    lesson: str, names: Iterable[str], folder: Path | None = None, needed: bool = True
) -> dict[str, Callable]:
    """Import <lesson>.py of `folder`, by default mine/; returns those of `names` that it defines.

    Raises:
        BadInput: the file does not run, or is another user's; or, where one is `needed`, it is
            absent or defines none.
    """
    tried = [one / f"{lesson}.py" for one in ([folder] if folder else places.with_mine())]
    path = next((one for one in tried if one.is_file()), None)
    if path is None:
        if not needed:
            return {}
        raise BadInput(
            f"{tried[0]} is not there: run check.keep() in the {lesson} notebook, which writes "
            "it, and start the job in that notebook's folder, or without your own functions"
        )
    if path.stat().st_uid not in (os.getuid(), 0):  # this process is about to run what it holds
        raise BadInput(f"{path} belongs to another user of this machine: only your own is run")
    shown = f"{path.parent.name}/{path.name}"
    spec = importlib.util.spec_from_file_location(f"mine_{lesson}", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        own = [frame.lineno for frame in inspect.trace() if frame.filename == str(path)]
        line = own[-1] if own else getattr(error, "lineno", None)
        where = f", line {line}" if line else ""
        raise BadInput(
            f"{shown} does not run ({type(error).__name__}: {first_line(error)}{where}): mend it "
            "in the notebook and run check.keep() again"
        ) from error
    found = {name: getattr(module, name, None) for name in names}
    found = {name: value for name, value in found.items() if callable(value)}
    if needed and not found:
        raise BadInput(
            f"{shown} defines none of {', '.join(names)}: run check.keep() in the notebook"
        )
    return found


def start(
    lesson: str, config: object, parts: type, train: Callable, timeout_s: float = 120
) -> object:
    """Join the ranks, and return what train(config, world, parts) returns on each.

    Args:
        config: has `impl`, and the learner's own functions are used where that is "mine".
        parts: a named tuple of the exercises that the job can use, the course's own as defaults.
    """
    is_mine = config.impl == "mine"
    yours = load(lesson, parts._fields) if is_mine else {}
    with distributed(config.device, config.seed, timeout_s) as world:
        if is_mine:
            world.print(in_words(yours))
        return train(config, world, parts(**yours))


def in_words(found: Mapping[str, Callable]) -> str:
    """One line that says which functions of a job are the learner's."""
    own = [name for name, part in found.items() if "manyhands." not in str(part.__module__)]
    return f"yours: {', '.join(own) or 'none'}; the course's: all else"


# ---- the text of the file ----------------------------------------------------------------------


def _collect(name: str, value: object, imports: set[str], definitions: dict[str, str]) -> None:
    """Add the source of `value`, and of all that it names, helpers first."""
    if name in definitions:
        return
    source = written.source_of(name, value)
    definitions[name] = ""  # holds its place while its helpers are looked at
    known = _globals_of(value, source)
    read, defined = written.global_names(source)
    set_inside = {one for n in ast.walk(ast.parse(source)) for one in getattr(n, "names", [])}
    for other in sorted(read - defined):
        if isinstance(known.get(other), types.ModuleType):
            _import_module(other, known[other], source, imports)
        elif other in known or hasattr(builtins, other):
            _add(other, known, imports, definitions, name)
        elif other not in set_inside:  # by `global`
            raise ValueError(
                f"{name} uses {other!r}, which the notebook does not have: run the cell that makes "
                f"it, or write {name} without it, and then its check"
            )
    del definitions[name]
    definitions[name] = source


def _globals_of(value: object, source: str) -> dict[str, object]:
    """The global names that a value's source sees, also where a decorator is from elsewhere."""
    if isinstance(value, type):
        return vars(sys.modules[value.__module__])
    whole = compile(source, "", "exec", dont_inherit=True)
    codes = {alike.operations(code) for code in alike.inner_codes(whole)}
    made = [f for f in written.functions_of(value) if alike.operations(f.__code__) in codes]
    return made[0].__globals__ if made else vars(sys.modules["__main__"])


def _import_module(name: str, module: types.ModuleType, source: str, imports: set[str]) -> None:
    """Import a module under its name, and those below it that a piece of source reads."""
    whole = module.__name__
    imports.add(f"import {whole}" + (f" as {name}" if name != whole else ""))
    imports |= {f"import {one}" for one in written.submodules_read(source, name, whole)}


def _add(
    name: str,
    known: Mapping[str, object],
    imports: set[str],
    definitions: dict[str, str],
    user: str,
) -> None:
    """Make `name` known in the file: by an import, by its source, or by its value."""
    value = known.get(name, vars(builtins).get(name))
    if _is_python_s(name, value):
        return
    is_code = inspect.isroutine(value) or isinstance(value, type)
    homes = _homes_of(name, value)
    is_value = not is_code and _is_literal(value)
    if is_value:  # so small a value can stand in any module; take it from the course's alone
        homes = [home for home in homes if home[0].startswith("manyhands.")]
    if homes:
        home, origin = homes[0]
        imports.add(f"from {home} import {origin}" + (f" as {name}" if name != origin else ""))
    elif is_value:
        definitions[name] = f"{name} = {value!r}"
    elif _has_source(value):
        _collect(name, value, imports, definitions)
    else:
        raise ValueError(
            f"{user} uses {name!r} from the notebook, a {type(value).__name__}: a job cannot know "
            "it. Make it inside the function, or pass it as an argument"
        )


def _is_python_s(name: str, value: object) -> bool:
    """Is this a name that every Python process has, with what it has there?"""
    if not hasattr(builtins, name):
        return False
    if type(value).__module__.startswith("IPython."):  # its exit and quit
        return True
    plain = vars(builtins)[name]
    is_plain = value is plain or getattr(value, "__wrapped__", None) is plain  # IPython wraps open
    return is_plain and not str(getattr(value, "__module__", "")).startswith("IPython.")


def _homes_of(name: str, value: object) -> list[tuple[str, str]]:
    """The modules that hold this very value, and under which name; its own module first."""
    own = getattr(value, "__module__", None)
    names = dict.fromkeys((getattr(value, "__name__", name), name))
    found = []
    for home, module in list(sys.modules.items()):
        if home == "builtins" or home.startswith("__"):  # as __main__, the notebook
            continue
        space = getattr(module, "__dict__", {})
        found += [(home, one) for one in names if space.get(one, names) is value]
    return sorted(found, key=lambda at: (at[0] != own, "._" in f".{at[0]}", at[0].count("."), at))


def _has_source(value: object) -> bool:
    """Is this made by a statement that can stand in a file: code, or the name of a type?"""
    if typing.get_origin(value):  # as of Callable[[Tensor], Tensor]
        return True
    if isinstance(value, types.MethodType | types.BuiltinFunctionType):
        return False
    is_code = inspect.isroutine(value) or isinstance(value, type)
    return is_code or isinstance(value, functools.partial) or hasattr(value, "__wrapped__")


def _is_literal(value: object) -> bool:
    try:
        return ast.literal_eval(repr(value)) == value
    except (ValueError, SyntaxError):
        return False


def _refuse_another(text: str, lesson: str, answers: Mapping[str, object]) -> None:
    """Run the text as a job will, and hold what it makes against what was checked.

    Raises:
        ValueError: it does not run by itself, or makes something else.
    """
    remedy = "define it with `def` in a cell of its own, run that cell and its check"
    space = {"__name__": next(iter(answers.values())).__module__}
    try:
        exec(compile(text, f"mine/{lesson}.py", "exec", dont_inherit=True), space)
    except Exception as error:
        raise ValueError(
            f"{', '.join(answers)} cannot run outside the notebook ({type(error).__name__}: "
            f"{first_line(error)}): write what it needs into the function, and run its check again"
        ) from None
    for name, answer in answers.items():
        if other := alike.difference(name, space.get(name), answer, with_globals=True):
            told = name if other == name else f"{name}, or rather {other},"
            raise ValueError(
                f"{told} is no longer what its text says: {remedy}, before check.keep()"
            )
