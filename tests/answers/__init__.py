"""Answers to the exercises: a file a lesson, with the tables RIGHT and WRONG.

once_accepted/ has wrong answers that a check has let through before it was mended.
"""

import importlib
from importlib.util import find_spec


def right(word: str) -> dict[str, list]:
    """Number -> right answers of a lesson."""
    return importlib.import_module(f"answers.{word}").RIGHT


def wrong(word: str, once_accepted: bool = True) -> dict[str, list]:
    """Number -> wrong answers of a lesson, each with words that its verdict must hold."""
    names = [f"answers.{word}", f"answers.once_accepted.{word}"]
    tables = [importlib.import_module(name).WRONG for name in names if find_spec(name)]
    found: dict[str, list] = {}
    for table in tables if once_accepted else tables[:1]:
        for todo, answers in table.items():
            found[todo] = [*found.get(todo, ()), *answers]
    return found
