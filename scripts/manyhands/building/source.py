"""A lesson's source in solutions/, read and checked; build_notebooks.py tells its form."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jupytext
import yaml
from jupytext.config import JupytextConfiguration
from nbformat import NotebookNode

from manyhands.ranks.failures import BadInput

PICTURE = re.compile(r"!\[([^]]*)\]\(([^)]*)\)")  # what it shows, and its file
IN_HEADER = {"title", "goal", "job", "paths"}
HEADINGS = set("exercise todo minutes difficulty points show check answer tags jupyter".split())


@dataclass
class Lesson:
    """One source file, read: its header and its cells."""

    path: Path
    root: Path
    meta: dict[str, Any]
    cells: list[NotebookNode]
    lines: list[int]  # of each cell, the line in the source at which it begins
    points: dict[str, int] = field(default_factory=dict)  # todo number -> points

    @property
    def is_numbered(self) -> bool:
        """Is this a lesson, and not the page the course opens at?"""
        return self.path.stem != "start"

    def target(self, folder: str) -> Path:
        """The notebook that is built from this source into `folder`."""
        return self.root / folder / f"{self.path.stem}.ipynb"

    def fault(self, index: int, message: str) -> BadInput:
        """An error of a cell, with the file and the line at which the cell begins."""
        return BadInput(f"solutions/{self.path.name}:{self.lines[index]}: {message}")


def first_lines(text: str, num_cells: int) -> list[int]:
    """The line at which each of a source's cells begins; what stands above all headings is one."""
    marked = [number for number, line in enumerate(text.splitlines(), 1) if line.startswith("# %%")]
    return [1] * (num_cells - len(marked)) + marked


def read_lesson(path: Path, root: Path) -> Lesson:
    """Read one source and check its header, its cell headings and its exercise numbers."""
    settings = JupytextConfiguration(root_level_metadata_as_raw_cell=False)
    try:
        parsed = jupytext.read(path, fmt="py:percent", config=settings)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 2  # YAML counts from 0, below the line `# ---`
        raise BadInput(
            f"solutions/{path.name}:{line}: the header is no YAML: {error.problem}"
        ) from None
    meta = parsed.metadata.get("jupytext", {}).get("root_level_metadata", {}).get("manyhands", {})
    if missing := {"title", "goal"} - set(meta):
        raise BadInput(
            f"solutions/{path.name}:1: the header lacks {', '.join(sorted(missing))}; it opens "
            "with a block of comments between two lines `# ---`, see scripts/build_notebooks.py"
        )
    if unknown := set(meta) - IN_HEADER:
        raise BadInput(
            f"solutions/{path.name}:1: unknown in the header: {', '.join(sorted(unknown))}; it "
            f"holds {', '.join(sorted(IN_HEADER))}"
        )
    if "job" in meta:
        check_job(path, meta["job"])
    begins = first_lines(path.read_text(), len(parsed.cells))
    placed = [pair for pair in zip(parsed.cells, begins, strict=True) if pair[0].source.strip()]
    cells, lines = map(list, zip(*placed, strict=True)) if placed else ([], [])
    lesson = Lesson(path, root, dict(meta), cells, lines)
    for index, cell in enumerate(lesson.cells):
        cell.metadata.pop("lines_to_next_cell", None)  # jupytext's note on the source's spacing
        check_heading(lesson, index, dict(cell.metadata))
    check_pairs(lesson)
    return lesson


def check_pairs(lesson: Lesson) -> None:
    """Refuse an exercise without a check, a check without an exercise, and a second check."""
    headings = [cell.metadata for cell in lesson.cells]
    checks = [heading.get("check") for heading in headings]
    for index, heading in enumerate(headings):
        number = checks[index] or heading.get("todo")
        if number and (number not in lesson.points or checks.count(number) != 1):
            found = f"{checks.count(number)} checks of {number}"
            known = "" if number in lesson.points else " and no such exercise"
            raise lesson.fault(index, f"there are {found}{known}: each exercise has one check")


def check_job(path: Path, job: object) -> None:
    """Refuse a `job` of the header that is misspelt or has no flags, or a loss that is no range."""
    match job:
        case {"flags": str(), "loss": [int() | float() as low, int() | float() as high], **rest}:
            if low < high and not rest:
                return
        case {"flags": str(), **rest} if not rest:
            return
    raise BadInput(
        f"solutions/{path.name}:1: the header's job is {job!r}; write it as "
        'job: {flags: "--steps 60", loss: [2.1, 2.9]}, where loss can go'
    )


def check_heading(lesson: Lesson, index: int, heading: dict[str, Any]) -> None:
    """Refuse a heading that is misspelt or incomplete; note the exercise's number and points."""
    if unknown := set(heading) - HEADINGS:
        raise lesson.fault(index, f"unknown in the heading: {', '.join(sorted(unknown))}")
    if "exercise" not in heading:
        return
    number = heading.get("todo", "")
    difficulty = heading.get("difficulty")
    prefix = lesson.path.stem.partition("_")[0].lstrip("0") or "0"
    if not re.fullmatch(rf"{prefix}\.\d+", number) or number in lesson.points:
        raise lesson.fault(
            index, f'todo="{number}" must be "{prefix}.N" with an N not used before in this lesson'
        )
    if difficulty not in (1, 2, 3) or not isinstance(heading.get("minutes"), int):
        raise lesson.fault(index, f"TODO {number} needs minutes=N and difficulty=1, 2 or 3")
    lesson.points[number] = heading.get("points", 1)
