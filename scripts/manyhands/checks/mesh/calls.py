"""One call of a function of numbers, and the words for it."""

from collections.abc import Callable
from typing import NamedTuple

from manyhands.checks.engine.values import number, show


def called(answer: Callable, case: NamedTuple) -> object:
    """One call; an argument that is None is left out, so that its default holds."""
    optional = case._field_defaults
    given = case._asdict()
    named = {name: given[name] for name in optional if given[name] is not None}
    return answer(*(value for name, value in given.items() if name not in optional), **named)


def in_words(name: str) -> Callable:
    """The words for a call, such as f(width=1024, ratio=2_000)."""

    def words(value: object) -> str:
        return f"{value:_}" if type(value) is int else show(value, 8)

    def tell(case: NamedTuple) -> str:
        given = [f"{n}={words(v)}" for n, v in case._asdict().items() if v is not None]
        return f"{name}({', '.join(given)})"

    return tell


def number_or_none(value: object) -> float | None:
    """A number, or None: where an error is asked for, that is not the wrong kind of a number."""
    return None if value is None else number(value)
