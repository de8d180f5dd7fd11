"""The learner's own functions as a file that a job can import: mine/<lesson>.py.

    notebook: def place(...), class BucketedDDP  --write-->  mine/ddp.py  --load-->  train_ddp.py

A notebook's functions live in its kernel, where no job can reach them. Their source is copied into
a file, together with the imports and helpers that they use, so that the job runs the same code.
`start` is how most training scripts begin: join the ranks, with the learner's functions or without.
"""

import ast
import builtins
import importlib.util
import inspect
import itertools
import linecache
import os
import symtable
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from manyhands.ranks.runtime import BadInput, distributed, first_line
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
    compile(text, f"mine/{lesson}.py", "exec")
    path = places.make(folder or places.mine()) / f"{lesson}.py"
    try:
        storage.replace_file(path, text.encode())
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


def source_of(name: str, value: object) -> str:
    """The source text of `name`, a function or class, also of one that a notebook cell defines."""
    code = _code_of(value)
    texts = ["".join(linecache.getlines(code.co_filename))] if code else []
    if value.__module__ == "__main__":
        # A notebook's cells as they were run; the last one that defines `name` counts.
        texts += reversed(vars(sys.modules["__main__"]).get("In", []))
        # Where cells are not numbered, and for a class without methods: what Python read of cells.
        cells = [entry for name, entry in linecache.cache.items() if "ipykernel_" in name]
        texts += ["".join(entry[2]) for entry in reversed(cells) if len(entry) > 2]
    for wanted, text in itertools.product((name, value.__name__), texts):
        if source := _definition(wanted, text):
            return source if wanted == name else f"{source}\n\n\n{name} = {wanted}"
    try:
        return inspect.cleandoc("\n" + inspect.getsource(value))
    except (OSError, TypeError):
        raise ValueError(
            f"the source of {name!r} is not to be found: define it with `def` or `class` in a "
            "cell without magics"
        ) from None


def _definition(name: str, text: str) -> str | None:
    """The last `def name` or `class name` of a text, or None; also where the text is no Python."""
    try:
        body = ast.parse(text).body
    except SyntaxError:  # a cell with a magic
        return None
    for node in reversed(body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            first = min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
            return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    return None


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


def _code_of(value: object) -> types.CodeType | None:
    functions = _functions_of(value)
    return functions[0].__code__ if functions else None


def _functions_of(value: object) -> list[types.FunctionType]:
    if not isinstance(value, type):
        return [inspect.unwrap(value)]
    members = [getattr(member, "fget", member) for member in vars(value).values()]
    members = [inspect.unwrap(member) for member in members if callable(member)]
    return [member for member in members if inspect.isfunction(member)]


def _collect(name: str, value: object, imports: set[str], definitions: dict[str, str]) -> None:
    """Add the source of `value`, and of all that it names, helpers first."""
    if name in definitions:
        return
    source = source_of(name, value)
    definitions[name] = ""  # holds its place while its helpers are looked at
    if isinstance(value, type):
        known = vars(sys.modules[value.__module__])
    else:
        known = inspect.unwrap(value).__globals__
    read, _ = global_names(source)
    for other in sorted(read - {name} - set(vars(builtins))):
        if other in known:
            _add(other, known[other], imports, definitions, name)
    del definitions[name]
    definitions[name] = source


def _add(
    name: str, value: object, imports: set[str], definitions: dict[str, str], user: str
) -> None:
    """Make `name` known in the file: by an import, by its source, or by its value."""
    if isinstance(value, types.ModuleType):
        imports.add(f"import {value.__name__}" + (f" as {name}" if name != value.__name__ else ""))
        return
    is_code = inspect.isroutine(value) or isinstance(value, type)
    if not is_code and (home := _package_module_with(name, value)):
        imports.add(f"from {home} import {name}")
        return
    module = getattr(value, "__module__", None)
    origin = getattr(value, "__name__", None)
    if origin and module and module != "__main__":
        imports.add(f"from {module} import {origin}" + (f" as {name}" if name != origin else ""))
        return
    if origin and (inspect.isfunction(value) or isinstance(value, type)):
        _collect(name, value, imports, definitions)
        return
    try:
        ast.literal_eval(repr(value))
    except (ValueError, SyntaxError):
        raise ValueError(
            f"{user} uses {name!r} from the notebook, a {type(value).__name__}: a job cannot know "
            "it. Make it inside the function, or pass it as an argument"
        ) from None
    definitions[name] = f"{name} = {value!r}"


def _package_module_with(name: str, value: object) -> str | None:
    """The module of this package that has a constant, such as a name for a type."""
    ours = [(one, m) for one, m in sys.modules.items() if one.startswith("manyhands.")]
    return next((one for one, module in ours if vars(module).get(name) is value), None)
