"""How long a lesson takes, counted from its source, and the paths that fit into given hours."""

import re
from dataclasses import dataclass
from typing import Any

from manyhands.building.source import PICTURE, Lesson
from manyhands.ranks.failures import BadInput

WORDS_PER_MINUTE = 150
MINUTES_PER_CELL = 1  # to read code that is given, predict what it prints, and look at the result
OPTIONAL = " (optional)"  # ends the heading of a section that a first reading may leave out


@dataclass
class Section:
    """A part of a lesson, from one `## ` heading to the next."""

    title: str
    minutes: float = 0.0

    @property
    def is_optional(self) -> bool:
        """May a first reading leave it out?"""
        return self.title.endswith(OPTIONAL)

    @property
    def number(self) -> int:
        """The N of `## N. Title`; 0 for the opening and for a section without a number."""
        found = re.match(r"(\d+)\.", self.title)
        return int(found[1]) if found else 0


def sections(lesson: Lesson) -> list[Section]:
    """The parts of a lesson in order, with the minutes of a learner who meets them first.

    The minutes are those of the exercises, as stated at each, of the text at 150 words per minute,
    and one for each other cell of code.
    """
    parts = [Section("")]
    for cell in lesson.cells:
        heading = cell.metadata
        if heading.get("answer") or "check" in heading:
            continue
        if cell.cell_type == "markdown":
            if found := re.search(r"^## (.+)$", cell.source, re.MULTILINE):
                parts.append(Section(found[1].strip()))
            words = PICTURE.sub("", cell.source).split()
            parts[-1].minutes += len(words) / WORDS_PER_MINUTE
        else:
            parts[-1].minutes += heading.get("minutes", MINUTES_PER_CELL)
    return parts


def total(parts: list[Section]) -> int:
    """The minutes of some sections, to the nearest five."""
    return 5 * round(sum(part.minutes for part in parts) / 5)


def core_minutes(lesson: Lesson) -> int:
    """The minutes of the sections that are not optional."""
    return total([part for part in sections(lesson) if not part.is_optional])


def optional_minutes(lesson: Lesson) -> int:
    """The minutes of the optional sections."""
    return total([part for part in sections(lesson) if part.is_optional])


def path_row(path: dict[str, Any], lessons: list[Lesson]) -> str:
    """A row of TEACHING.md's table of paths.

    A path is `{name: ..., minutes: 360, lessons: ["00 to 2", "04"], goal: ...}`, where "04" is a
    lesson's core and "00 to 2" what is core in its opening and sections 1 and 2. More minutes than
    the path has are an error.
    """
    by_number = {lesson.path.stem.partition("_")[0]: lesson for lesson in lessons}
    steps = []
    needed = 0
    for step in path["lessons"]:
        number, _, last = str(step).partition(" to ")
        if number not in by_number:
            raise BadInput(f"the path {path['name']!r} names lesson {number}, which is not there")
        parts = [part for part in sections(by_number[number]) if not part.is_optional]
        if last:
            ends = [index for index, part in enumerate(parts) if part.number == int(last)]
            if not ends:
                raise BadInput(f"the path {path['name']!r}: {number} has no core section {last}")
            parts = parts[: ends[0] + 1]
        needed += total(parts)
        steps.append(f"{number} {f'to section {last} ' if last else ''}({total(parts)})")
    if needed > path["minutes"]:
        raise BadInput(f"the path {path['name']!r} takes {needed} minutes of {path['minutes']}")
    hours = f"{path['minutes'] / 60:g}"
    return f"| {path['name']} | {hours} | {', '.join(steps)} | {path['goal']} |"
