"""The exercise that CONTRIBUTING.md follows from start to end is added to a copy of the course."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from build_notebooks import build
from manyhands.building.source import read_lesson

ROOT = Path(__file__).resolve().parents[2]
LESSON = "solutions/03_batch_size.py"
ABOVE = "check.fewest_processors(fewest_processors)\n"  # the last check before the new exercise
MOST_LINES = 120


def blocks() -> list[tuple[str, str]]:
    """File and text of each block of the section, in order."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    section = page.partition("## An exercise, from start to end\n")[2].partition("\n## ")[0]
    found = []
    for match in re.finditer(r"```python\n(.*?)```", section, re.DOTALL):
        named = re.findall(r"`((?:scripts|solutions|tests)/[\w/]+\.py)`", section[: match.start()])
        found.append((named[-1], match[1]))
    return found


def added(name: str, text: str, block: str) -> str:
    """A file's text with the block where the page says it belongs."""
    if name == LESSON:
        assert text.count(ABOVE) == 1
        return text.replace(ABOVE, f"{ABOVE}\n{block}")
    if block.startswith("RIGHT"):
        for head, line in re.findall(r"^(\w+ = {\n)(.*\n)", block, re.MULTILINE):
            assert text.count(head) == 1
            text = text.replace(head, head + line)
        return text
    body, mark, tables = text.partition("\n\nRIGHT = {")  # of answers; no other file has tables
    return f"{body}\n\n{block}{mark}{tables}"


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """A copy of the course with the exercise in it."""
    for name in ("scripts", "solutions", "tests"):
        left_out = shutil.ignore_patterns("*.ipynb", "__pycache__", "runs", "mine")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=left_out)
    shutil.copytree(ROOT / "notebooks/figures", tmp_path / "notebooks/figures")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name, block in blocks():
        path = tmp_path / name
        path.write_text(added(name, path.read_text(), block))
    return tmp_path


def test_the_exercise_of_the_page_can_be_tried(course: Path) -> None:
    """Its six places stand in both notebooks, and its check names what it should."""
    assert len({name for name, _ in blocks()}) == 6
    assert sum(block.count("\n") for _, block in blocks()) <= MOST_LINES
    path = course / "tests/batch_size/test_batch_size.py"
    names = "from manyhands.batch_size.scaling import (\n"
    path.write_text(path.read_text().replace(names, f"{names}    processor_seconds,\n"))
    lesson = read_lesson(course / LESSON, course)
    for is_todo in (True, False):
        cells = [cell.source for cell in build(lesson, is_todo).cells]
        (cell,) = [source for source in cells if source.startswith("# TODO 3.8")]
        assert ("NotImplementedError" in cell) is is_todo
    environ = {**os.environ, "PYTHONPATH": f"{course / 'scripts'}{os.pathsep}{course / 'tests'}"}
    tests = [
        "tests/checks/test_checks.py::test_an_exercise[3.8]",
        "tests/batch_size/test_batch_size.py",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:nbval", "-q", *tests, "-k", "3.8 or is_paid"],
        cwd=course,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr
