"""Every item of items.md is still taught where the table says."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "items.md"
NUM_ITEMS = {"S1": 27, "S2": 32, "S3": 13, "S4": 31, "E": 30}
HEADING = re.compile(r"# #+ (?:\d+\. )?(?P<name>.*?)(?: \(optional\))?")


def items() -> list[tuple[str, ...]]:
    """The table's rows: item, subject, lesson, heading, words."""
    lines = [line for line in TABLE.read_text().splitlines() if re.match(r"\| [SE]\d", line)]
    return [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines]


def sections(word: str) -> dict[str, str]:
    """A lesson's text below each of its headings, as one line."""
    (path,) = (ROOT / "solutions").glob("start.py" if word == "start" else f"[0-9][0-9]_{word}.py")
    found: dict[str, list[str]] = {}
    name = ""
    for line in path.read_text().splitlines():
        if match := HEADING.fullmatch(line):
            name = match["name"]
        found.setdefault(name, []).append(line.removeprefix("# "))
    return {name: " ".join(lines) for name, lines in found.items()}


def faults(rows: list[tuple[str, ...]]) -> list[str]:
    """For each item that is not taught at its address, one line."""
    found = []
    for item, subject, word, heading, words in rows:
        text = sections(word).get(heading)
        if text is None:
            found.append(f"{item} ({subject}): {word} has no heading {heading!r}")
        elif words.lower() not in text.lower():
            found.append(f"{item} ({subject}): {words!r} is gone below {heading!r} in {word}")
    return found


def test_each_item_stands_under_its_heading():
    assert faults(items()) == []


def test_no_item_is_missing_or_there_twice():
    wanted = [
        f"{group}{number:02}" if group == "E" else f"{group}.{number:02}"
        for group, count in NUM_ITEMS.items()
        for number in range(1, count + 1)
    ]
    assert [row[0] for row in items()] == wanted


@pytest.mark.parametrize("column, wrong", [(3, "A heading of nobody"), (4, "words of nobody")])
def test_what_is_gone_is_named(column, wrong):
    row = list(items()[0])
    row[column] = wrong
    (fault,) = faults([tuple(row)])
    assert wrong in fault and row[0] in fault
