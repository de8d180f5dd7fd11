"""What a learner hands over: a function or class, or two; its lines; what is still a stub."""

import inspect
import re
import sys
import types

from manyhands.checks.engine.card import Wrong
from manyhands.ranks.failures import Failure


class Pair:
    """Two functions or classes that are one exercise."""

    def __init__(self, first: object, second: object) -> None:
        self.parts = [first, second]

    def __call__(self, *args: object) -> list:
        """Return what both make of the arguments."""
        return [part(*args) for part in self.parts]


def parts_of(answer: object) -> list:
    """The answers of an exercise: two for a pair, else one."""
    return answer.parts if isinstance(answer, Pair) else [answer]


def lines_of(answer: object) -> set[tuple[str, int]]:
    """File and number of every line of a function, or of a class's methods."""
    if isinstance(answer, Pair):
        return set().union(*map(lines_of, answer.parts))
    kinds = answer.__mro__ if isinstance(answer, type) else ()
    parts = [_plain(part) for kind in kinds for part in vars(kind).values()] or [answer]
    codes = [inspect.unwrap(part).__code__ for part in parts if inspect.isfunction(part)]
    lines = set()
    while codes:
        code = codes.pop()
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        lines |= {(code.co_filename, line) for *_, line in code.co_lines()}
    return lines


def unwritten(answer: object) -> str:
    """What still raises NotImplementedError: methods of a class, or a function with more in it."""
    if isinstance(answer, Pair):
        left = [(getattr(part, "__name__", ""), unwritten(part)) for part in answer.parts]
        return "; ".join(f"{name}: {words}" for name, words in left if words)
    parts = vars(answer) if isinstance(answer, type) else {}
    if inspect.isfunction(answer) and "NotImplementedError" in answer.__code__.co_names:
        code, given = answer.__code__, len(inspect.signature(answer).parameters)
        if len(code.co_names) > 1 or code.co_nlocals > given:
            return "the line `raise NotImplementedError` still stands there: delete it"
    codes = {name: getattr(_plain(part), "__code__", None) for name, part in parts.items()}
    left = [n for n, c in codes.items() if c and "NotImplementedError" in c.co_names]
    if not left:
        return ""
    return f"{', '.join(left)} {'is' if len(left) == 1 else 'are'} still to be written"


def stub_of_another(failure: Failure, todo: str) -> str:
    """Words for a learner's function of an earlier TODO, if its stub ended the call."""
    other = re.fullmatch(r"TODO (\d+\.\d+)", failure.message)
    if not other or other[1] == todo or not failure.frames:
        return ""
    return f"your `{failure.frames[-1][2]}`, TODO {other[1]}, which is not written yet"


def _plain(part: object) -> object:
    """The function behind a static method; anything else as it is."""
    return getattr(part, "__func__", part)


# ---- graded work is the learner's own ---------------------------------------------------------


def refuse_the_course_s_own(answer: object, name: str) -> None:
    """Raise Wrong when a graded answer is, or just calls, the course's own function."""
    if any(_is_ours(value, name) for value in [answer, *_globals_used(answer)]):
        raise Wrong(
            f"{name} comes from the manyhands package",
            "graded work has to be written in the notebook",
            "write the body in the TODO cell; looking at the package to learn is fine",
        )


def _is_ours(value: object, name: str) -> bool:
    """Is this the package's function of that name, or a module of the package that holds it?"""
    if isinstance(value, types.ModuleType):
        return value.__name__.startswith("manyhands") and hasattr(value, name)
    module = getattr(value, "__module__", "") or ""
    return module.startswith("manyhands") and getattr(value, "__name__", "") == name


def _globals_used(answer: object) -> list[object]:
    """Every global, and every module imported inside, that the answer's code names."""
    functions = (
        [f for f in map(_plain, vars(answer).values()) if inspect.isfunction(f)]
        if isinstance(answer, type)
        else [inspect.unwrap(answer)]
    )
    found: list[object] = []
    for function in functions:
        codes = [function.__code__]
        while codes:
            code = codes.pop()
            codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
            names = [function.__globals__.get(name) for name in code.co_names]
            imported = [sys.modules.get(name) for name in code.co_names if "manyhands" in name]
            found += [value for value in [*names, *imported] if value is not None]
    return found
