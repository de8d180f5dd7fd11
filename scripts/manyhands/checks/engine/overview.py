"""All lessons and their exercises: what is done, and what comes next. The start page shows it.

The exercises are read from the course's own notebooks, their state from the person's progress.
"""

import html
import json
import re
from dataclasses import dataclass
from pathlib import Path

from manyhands.checks.engine import exercise, progress
from manyhands.checks.engine.card import COLOURS
from manyhands.checks.engine.progress import Standing
from manyhands.training import places

NOTEBOOKS = Path(__file__).resolve().parents[4] / "notebooks"
CHECK = re.compile(r"check-(\d+)-(\d+)")
CALL = re.compile(r"check\.(\w+)\((\w+)")  # an exercise has its check's name, or its answer's


@dataclass(frozen=True)
class LessonState:
    """A lesson's exercises, in their order, with this person's standing."""

    file: str  # 06_ddp
    title: str
    exercises: dict[str, tuple[str, Standing]]  # number -> name and standing

    @property
    def left(self) -> list[str]:
        """The numbers of those that are neither done nor given."""
        return [
            todo for todo, (_, one) in self.exercises.items() if not (one.is_done or one.is_given)
        ]


def lessons(notebooks: Path = NOTEBOOKS) -> list[LessonState]:
    """All lessons in their order."""
    found = []
    for path in sorted(notebooks.glob("[0-9][0-9]_*.ipynb")):
        cells = json.loads(path.read_text("utf-8"))["cells"]
        standings = progress.standings(path.stem.partition("_")[2])
        exercises = {}
        for cell in cells:
            mark = CHECK.fullmatch(cell["metadata"].get("nbgrader", {}).get("grade_id", ""))
            call = CALL.search("".join(cell["source"]))
            if mark and call:
                name = call[2] if call[2] in standings else call[1]
                exercises[f"{mark[1]}.{mark[2]}"] = name, standings.get(name, Standing())
        title = "".join(cells[0]["source"]).partition("\n")[0].lstrip("# ")
        found.append(LessonState(path.stem, title, exercises))
    return found


class Overview:
    """What `show` displays: a table in a browser, a line a lesson elsewhere."""

    def __init__(self, found: list[LessonState]) -> None:
        self.lessons = found

    def next_step(self) -> str:
        """What somebody does next, in a sentence."""
        begun = [one for one in self.lessons if one.left and len(one.left) < len(one.exercises)]
        for lesson in begun[-1:] or [one for one in self.lessons if one.left][:1]:
            return f"Next: exercise {lesson.left[0]} in {lesson.title}."
        return "All exercises are done."

    def __repr__(self) -> str:
        lines = []
        for one in self.lessons:
            num_left = len(one.left)
            left = f"; left: {', '.join(one.left)}" if 0 < num_left < len(one.exercises) else ""
            done = len(one.exercises) - num_left
            lines.append(f"{one.title}: {done} of {len(one.exercises)}{left}")
        return "\n".join([*lines, f"{self.next_step()} {_where()}".rstrip()])

    def _repr_html_(self) -> str:
        rows = []
        for one in self.lessons:
            marks = " ".join(_mark(todo, *what) for todo, what in one.exercises.items())
            done = len(one.exercises) - len(one.left)
            link = f'<a href="{one.file}.ipynb">{html.escape(one.title)}</a>'
            cells = (link, f"{done}&nbsp;of&nbsp;{len(one.exercises)}", marks)
            look = ' style="text-align:left;vertical-align:top"'
            rows.append(f"<tr>{''.join(f'<td{look}>{cell}</td>' for cell in cells)}</tr>")
        told = f"<p><b>{html.escape(self.next_step())}</b> {html.escape(_where())}</p>"
        key = "<p>&#10003; done, &#9679; tried, &#9675; not tried, G the course's answer</p>"
        return f"{told}<table>{''.join(rows)}</table>{key}"


def _where() -> str:
    return f"What you do is noted in {places.progress()}." if progress.is_kept() else ""


def _mark(todo: str, name: str, one: Standing) -> str:
    """An exercise as its number, a sign and a colour."""
    state = "done" if one.is_done else "given" if one.is_given else "not yet" if one.tries else ""
    sign = {"done": "&#10003;", "given": "G", "not yet": "&#9679;", "": "&#9675;"}[state]
    words = f"{html.escape(name)}: {state or 'not tried'}, tries: {one.tries}"
    colour = f"rgb({COLOURS[state]})" if state else "inherit"
    return f'<span title="{words}" style="white-space:nowrap;color:{colour}">{sign} {todo}</span>'


def show() -> None:
    """Display the table; one line where progress cannot be read."""
    try:
        exercise.show(Overview(lessons()))
    except (OSError, places.NoPlace) as problem:
        print(f"what you have done cannot be read: {problem}")
