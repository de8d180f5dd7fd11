r"""The two tables of an exercise, as text: its mistakes, and what words of an error mean.

    min(p - 1 - rank, m) => min(p - rank, m) :: Each rank begins with one forward too many. | Ask
        how many ranks are behind this one.
    not part of group :: src counts over the whole job. | group_src=0 names the group's first rank.

The grammar is the same for both, and everything else is refused:

    table     entries, one below the other; an indented line goes on with the one above it
    entry     what :: sentence | hint      the hint of the one above where it has no bar,
                                           none where nothing stands behind the bar
    what      of an error: words of its message
              of a mistake: changes of the truth, each on a line of its own
    change    old => new                   each text stands once in the source of the truth
              instead answer               another function, of an expression
              around wrap                  wrap(truth)
              after change                 change(the truth's value)
              fits test                    no change, but the test that Mistake.fits is

`:: ! sentence` marks a mistake that ends the ranks (see Mistake). {NAME} stands for a text of the
names that are given, \n in a change for a new line.
"""

import re
import textwrap
from collections.abc import Iterator

from manyhands.checks.engine.mistakes import Change, Mistake, after, around, instead, patch

FUNCTIONS = {"instead": instead, "around": around, "after": after}
Names = dict[str, object]  # a module's own: globals()


def mistakes(table: str, names: Names) -> list[Mistake]:
    """The mistakes of a table.

    Raises:
        ValueError: a line is not of the grammar.
    """
    found = []
    for lines, why, hint in _entries(table, names):
        fits = [eval(line[5:], names) for line in lines if line.startswith("fits ")]
        changes = [_change(line, names) for line in lines if not line.startswith("fits ")]
        change = sum(changes, Change())
        ends = why.startswith("! ")
        found.append(Mistake(change, why.removeprefix("! "), hint, *fits, ends=ends))
    return found


def reasons(table: str, names: Names) -> dict[str, tuple[str, str]]:
    """Words of an error -> a sentence, and what to try.

    Raises:
        ValueError: a line is not of the grammar.
    """
    entries = _entries(table, names)
    return {_filled("".join(words), names): (why, hint) for words, why, hint in entries}


def _entries(table: str, names: Names) -> Iterator[tuple[list[str], str, str]]:
    """What stands before `::` line by line, the sentence and the hint of each entry."""
    lines: list[str] = []
    hint = ""
    for line in _whole_lines(table):
        what, *told = line.removesuffix(" ::").split(" :: ")
        lines.append(what)
        if not told:
            continue
        why, bar, own = f"{_filled(told[0], names)} ".partition(" | ")
        if len(told) > 1 or " | " in own or not what.strip() or not why.strip():
            raise ValueError(f"not `what :: sentence | hint`: {line!r}")
        hint = own.strip() if bar else hint
        yield lines, why.strip(), hint
        lines = []
    if lines:
        raise ValueError(f"no sentence follows: {lines[-1]!r}")


def _whole_lines(table: str) -> list[str]:
    """The lines of a table, each with the indented ones below it."""
    lines: list[str] = []
    for line in textwrap.dedent(table).strip().splitlines():
        if not line.startswith(" "):
            lines.append(line)
        elif not line.startswith("    ") or not line.strip():
            raise ValueError(f"a line that goes on is indented by 4: {line!r}")
        else:
            lines[-1] += f" {line.strip()}"
    return lines


def _change(line: str, names: Names) -> Change:
    word, _, expression = line.partition(" ")
    if word in FUNCTIONS and " => " not in line:
        return FUNCTIONS[word](eval(expression, names))
    old, arrow, new = line.partition(" =>")
    if not arrow or not old or " => " in new:
        raise ValueError(f"not `old => new`: {line!r}")
    texts = (_filled(text, names).replace("\\n", "\n") for text in (old, new.removeprefix(" ")))
    return patch(*texts)


def _filled(text: str, names: Names) -> str:
    return re.sub(r"\{([A-Z][A-Z_0-9]*)\}", lambda at: str(names[at[1]]), text)
