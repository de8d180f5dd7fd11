"""Build each lesson's two notebooks, the course map and the paths, from the sources in solutions/.

    python scripts/build_notebooks.py            write what is out of date
    python scripts/build_notebooks.py --check    write nothing; exit 1 if something is out of date
    python scripts/build_notebooks.py --release FOLDER --only 06_ddp    for students: TEACHING.md

solutions/NN_word.py is plain Python in jupytext's percent format, and it opens with a header:

    # ---
    # manyhands: {title: ..., goal: ..., job: {flags: ...}}
    # ---

A lesson with a job file has a `job`: {flags: "--steps 60", loss: [2.1, 2.9]}, the flags with which
`make solutions` runs that file and, where it trains, the range for its validation loss. Ours are
the mean of 5 seeds on 2 CPU ranks, plus and minus 4 standard deviations.

What a cell's heading may hold, beside `tags=[...]`:

    exercise="f C.g" todo="6.3" minutes=15 difficulty=2 points=2
                    the cell is one `from manyhands.word.part import f, C`. It becomes the source of
                    f and C, and in notebooks/ the bodies named in `exercise` are emptied
    show="true"     the same with nothing emptied
    check="6.3"     the check of that exercise
    answer="true"   stands in solutions/ only

So an answer is written once, in the library that the training scripts run.

A section whose heading ends in " (optional)" is no part of the lesson's core. The minutes of the
course map are counted from the source, see scripts/manyhands/building/timetable.py. The header of
start.py holds the paths through the course; a path that takes longer than its hours is an error.
"""

import ast
import builtins
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from nbclient.exceptions import CellControlSignal, DeadKernelError
from nbformat import NotebookNode

from manyhands.building.notebook import kernel_environment, run_cells
from manyhands.building.source import PICTURE, Lesson, read_lesson
from manyhands.building.timetable import core_minutes, optional_minutes, path_row
from manyhands.jobs.written import global_names
from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import command_line

ROOT = Path(__file__).resolve().parents[1]
IN_EVERY_MODULE = set(dir(builtins)) | {"__name__", "__doc__", "__file__", "get_ipython"}
KERNEL = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
MACHINE_PATH = re.compile(r"/(?:home|Users|root|tmp|var/(?!lib/apt/)|private)/|[A-Z]:\\\\Users")
WIDGET = "application/vnd.jupyter.widget-view+json"
MAX_NOTEBOOK_BYTES = 1_500_000


@dataclass(frozen=True)
class Config:
    """Build the notebooks and the course map."""

    check: bool = False
    """Write nothing; exit 1 and name the files that are out of date."""
    execute: bool = False
    """Run the solution notebooks again, also those whose cells did not change."""
    only: str = ""
    """Build one source only, such as ddp or 06_ddp."""
    release: str = ""
    """Write only this: the TODO notebooks, with the pictures that they show, into this folder."""
    root: Path = ROOT
    """The folder that holds solutions/, notebooks/, scripts/ and the pages."""
    timeout_s: int = 300
    """The longest that one cell may run, in seconds."""


# ---------------------------------------------------------------- building a notebook


def build(lesson: Lesson, is_todo: bool) -> NotebookNode:
    """The lesson's notebook without outputs: the TODO version or the solution."""
    notebook = nbformat.v4.new_notebook(
        metadata={"kernelspec": KERNEL, "language_info": {"name": "python"}}
    )
    known = set(IN_EVERY_MODULE)
    for index, cell in enumerate(lesson.cells):
        heading = cell.metadata
        if heading.get("answer") and is_todo:
            continue
        new = NotebookNode(cell, id=f"{lesson.path.stem}-{index:03d}", metadata=NotebookNode())
        new.metadata.update({key: heading[key] for key in ("tags", "jupyter") if key in heading})
        if cell.cell_type == "markdown":
            new.source = link_figures(lesson, index, cell.source, is_todo)
        elif "exercise" in heading or "show" in heading:
            new.source = expand(lesson, index, is_todo)
        if cell.cell_type == "code":
            read, defined = global_names(TransformerManager().transform_cell(new.source))
            known |= defined
            if new.source != cell.source and (unknown := read - known):
                raise lesson.fault(index, f"no cell above defines {', '.join(sorted(unknown))}")
            add_grading(new, heading, lesson.points)
        notebook.cells.append(new)
    nbformat.validate(notebook)
    return notebook


def add_grading(cell: NotebookNode, heading: dict[str, Any], points: dict[str, int]) -> None:
    """Mark exercises and checks as nbgrader (metadata schema 3) wants them; leave other cells."""
    marks: dict[str, Any] = {"schema_version": 3, "task": False, "cell_type": "code"}
    if number := heading.get("todo"):
        marks |= {"grade": False, "solution": True, "locked": False}
        marks["grade_id"] = f"todo-{number.replace('.', '-')}"
    elif number := heading.get("check"):
        marks |= {"grade": True, "solution": False, "locked": True, "points": points[number]}
        marks["grade_id"] = f"check-{number.replace('.', '-')}"
    else:
        return
    cell.metadata["nbgrader"] = marks


def link_figures(lesson: Lesson, index: int, text: str, is_todo: bool) -> str:
    """Check every picture of a markdown cell; in solutions/ point the links at notebooks/."""
    if "<img" in text:
        raise lesson.fault(index, "write a picture as ![what it shows](figures/name.svg)")
    for alt, link in PICTURE.findall(text):
        if not alt.strip():
            raise lesson.fault(index, f"the picture {link} has no text that says what it shows")
        if not link.startswith("figures/") or not (lesson.root / "notebooks" / link).is_file():
            raise lesson.fault(index, f"there is no picture notebooks/{link}")
    return text if is_todo else text.replace("](figures/", "](../notebooks/figures/")


# ---------------------------------------------------------------- code from the library


def expand(lesson: Lesson, index: int, is_todo: bool) -> str:
    """The source of the names that the cell imports, under a line that states the exercise."""
    cell = lesson.cells[index]
    statements = ast.parse(cell.source).body
    if len(statements) != 1 or not isinstance(statements[0], ast.ImportFrom):
        raise lesson.fault(index, "this cell holds one `from module import name, name`")
    module = statements[0].module or ""
    heading = cell.metadata
    number = heading.get("todo")
    emptied = heading.get("exercise", "").split()
    imported = [alias.name for alias in statements[0].names]
    if lost := {dotted.partition(".")[0] for dotted in emptied} - set(imported):
        raise lesson.fault(index, f"the cell empties {sorted(lost)} but does not import it")
    parts = []
    try:
        for name in imported:
            source = library_source(lesson.root, module, name)
            for dotted in emptied:
                if dotted.partition(".")[0] == name:
                    stub = empty_body(source, dotted, number)
                    source = stub if is_todo else source
            parts.append(source)
    except BadInput as fault:
        raise lesson.fault(index, str(fault)) from None
    if number:
        minutes = heading["minutes"]
        difficulty = heading["difficulty"]
        parts[0] = f"# TODO {number} - {minutes} minutes - difficulty {difficulty} of 3\n{parts[0]}"
    return "\n\n\n".join(parts)


def library_source(root: Path, module: str, name: str) -> str:
    """The text of one function, class or constant of scripts/<module>.py."""
    path = root / "scripts" / f"{module.replace('.', '/')}.py"
    if not path.is_file():
        raise BadInput(f"there is no module {module} in scripts/")
    text = path.read_text()
    for node in ast.parse(text).body:
        targets = getattr(node, "targets", [getattr(node, "target", node)])
        if name in {getattr(target, "name", getattr(target, "id", None)) for target in targets}:
            decorators = [item.lineno for item in getattr(node, "decorator_list", [])]
            first = min([node.lineno, *decorators])
            return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    raise BadInput(f"{module} defines no {name}")


def empty_body(source: str, dotted: str, number: str) -> str:
    """`source` with the body at `dotted` (f or C.g) replaced by a TODO; its docstring stays."""
    node: Any = ast.Module(ast.parse(source).body, [])
    for part in dotted.split("."):
        found = [child for child in node.body if getattr(child, "name", None) == part]
        if len(found) != 1:
            raise BadInput(f"{dotted} stands {len(found)} times in the code; it must stand once")
        node = found[0]
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        raise BadInput(f"{dotted} is no function: name the methods to empty, as {dotted}.method")
    if not ast.get_docstring(node) or len(node.body) < 2:
        raise BadInput(f"{dotted} needs a docstring, which states the task, and a body")
    lines = source.splitlines()
    indent = " " * node.body[0].col_offset
    end = node.end_lineno
    while end < len(lines) and lines[end].startswith(f"{indent}#"):
        end += 1  # a comment below the last statement belongs to the answer
    lines[node.body[0].end_lineno : end] = [
        f"{indent}# TODO {number}: your code here",
        f'{indent}raise NotImplementedError("TODO {number}")',
    ]
    return "\n".join(lines)


# ---------------------------------------------------------------- running a solution


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """The cells that run, in order."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def without_words(source: str) -> str:
    """The code of a cell without its comments and docstrings; a cell that is no Python stays."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                node.body[0] = ast.Pass()
    return ast.dump(tree)


def keep_outputs(notebook: NotebookNode, old: NotebookNode) -> bool:
    """Take over the outputs of an earlier build; False if it ran other code, or did not run.

    Other comments and docstrings are the same code, unless an output names a line of a cell.
    """
    new_cells = code_cells(notebook)
    old_cells = code_cells(old)
    if any(cell.execution_count is None for cell in old_cells):
        return False
    new = [cell.source for cell in new_cells]
    before = [cell.source for cell in old_cells]
    if new != before:
        names_lines = re.search(r"\bline \d", str([cell.outputs for cell in old_cells]))
        if names_lines or list(map(without_words, new)) != list(map(without_words, before)):
            return False
    for new, before in zip(new_cells, old_cells, strict=True):
        new.outputs = before.outputs
        new.execution_count = before.execution_count
    return True


def execute(notebook: NotebookNode, lesson: Lesson, timeout_s: int) -> None:
    """Run the solution in solutions/ with this clone's library, and check what it printed."""
    print(f"running: solutions/{lesson.path.name}", flush=True)
    metadata = dict(notebook.metadata)
    begun = [0]  # numbers of the cells that began, the last one at the end

    def begin(cell: NotebookNode, cell_index: int) -> None:
        begun.append(cell_index)

    with tempfile.TemporaryDirectory() as elsewhere:
        environment = kernel_environment(lesson.root, elsewhere)
        try:
            run_cells(notebook, lesson.path.parent, environment, timeout_s, begin)
        except (CellControlSignal, DeadKernelError) as error:
            print(error, file=sys.stderr)
            raise lesson.fault(begun[-1], "a cell failed, see above; nothing was written") from None
    notebook.metadata = NotebookNode(metadata)
    for output in [output for cell in code_cells(notebook) for output in cell.outputs]:
        output.get("data", {}).pop(WIDGET, None)  # a stored control shows an error: no kernel
        if output.output_type == "stream":  # an advice names this Python and this clone
            program = f"{sys.executable} {lesson.root.resolve()}/"
            output.text = output.text.replace(program, "python ")
    check_outputs(notebook, lesson)


def check_outputs(notebook: NotebookNode, lesson: Lesson) -> None:
    """Refuse outputs that name a path of this machine, or that are too large to read on the web."""
    for index, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", []):
            shown = {key: value for key, value in output.items() if key != "data"}
            shown |= {k: v for k, v in output.get("data", {}).items() if not k.startswith("image/")}
            if found := MACHINE_PATH.search(str(shown)):
                raise lesson.fault(index, f"its output holds a path of this machine ({found[0]}..)")
            if str(lesson.root.resolve()) in str(shown):
                raise lesson.fault(index, "its output holds the path of this clone")
    if (num_bytes := len(nbformat.writes(notebook))) > MAX_NOTEBOOK_BYTES:
        raise BadInput(
            f"solutions/{lesson.path.stem}.ipynb has {num_bytes:,} bytes, over "
            f"{MAX_NOTEBOOK_BYTES:,}: print less, or draw smaller figures"
        )


# ---------------------------------------------------------------- the files


def course_map(lessons: list[Lesson]) -> str:
    """README's table of lessons."""
    rows = ["| lesson | minutes | optional | after it you can |", "|---|---:|---:|---|"]
    for lesson in lessons:
        number = lesson.path.stem.partition("_")[0]
        link = f"[{number} {lesson.meta['title']}](notebooks/{lesson.path.stem}.ipynb)"
        more = f"+ {minutes}" if (minutes := optional_minutes(lesson)) else ""
        rows.append(f"| {link} | {core_minutes(lesson)} | {more} | {lesson.meta['goal']} |")
    return "\n".join(rows)


def paths(lessons: list[Lesson]) -> str:
    """TEACHING.md's table of paths, as the header of the first page states them."""
    rows = ["| path | hours | lessons (minutes) | after it you can |", "|---|---:|---|---|"]
    for lesson in lessons:
        rows += [path_row(path, lessons) for path in lesson.meta.get("paths", [])]
    return "\n".join(rows)


def with_table(page: Path, name: str, table: str) -> str:
    """The page's text with what stands between the marks of `name` replaced."""
    before, start, rest = page.read_text().partition(f"<!-- {name} -->")
    _, end, after = rest.partition(f"<!-- /{name} -->")
    if not start or not end:
        raise BadInput(f"{page.name} needs a line <!-- {name} --> and below it <!-- /{name} -->")
    return f"{before}{start}\n{table}\n{end}{after}"


def wanted_pages(root: Path, lessons: list[Lesson]) -> Iterator[tuple[Path, str]]:
    """README with the course map, and TEACHING.md with the paths."""
    numbered = [lesson for lesson in lessons if lesson.is_numbered]
    readme, teaching = root / "README.md", root / "TEACHING.md"
    yield readme, with_table(readme, "course map", course_map(numbered))
    yield teaching, with_table(teaching, "paths", paths(lessons))


def add_outputs(notebook: NotebookNode, lesson: Lesson, config: Config) -> None:
    """Give a solution the outputs of its last build or, unless only checking, of a new run."""
    path = lesson.target("solutions")
    is_fresh = path.exists() and keep_outputs(notebook, nbformat.read(path, as_version=4))
    if not config.check and (config.execute or not is_fresh):
        execute(notebook, lesson, config.timeout_s)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new one, never a part."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text)
    os.replace(partial, path)


def names_of(path: Path) -> tuple[str, str]:
    """What a lesson can be called: 06_ddp or ddp."""
    return path.stem, path.stem.partition("_")[2]


def wanted_files(config: Config) -> Iterator[tuple[Path, str]]:
    """Every generated file and the text it should hold."""
    sources = sorted((config.root / "solutions").glob("*.py"))
    lessons = [read_lesson(path, config.root) for path in sources]
    chosen = [one for one in lessons if not config.only or config.only in names_of(one.path)]
    if config.only and not chosen:
        names = ", ".join(path.stem for path in sources) or "none"
        raise BadInput(f"there is no solutions/{config.only}.py; there is: {names}")
    for lesson in chosen:
        todo = build(lesson, is_todo=True)
        solution = build(lesson, is_todo=False)
        add_outputs(solution, lesson, config)
        yield lesson.target("notebooks"), f"{nbformat.writes(todo)}\n"
        yield lesson.target("solutions"), f"{nbformat.writes(solution)}\n"
    yield from wanted_pages(config.root, lessons)


def release(config: Config) -> None:
    """Write TODO notebooks and the pictures that they show into a folder that stands alone.

    The jobs that they start are found through the installed course, see jobs/submit.py.
    """
    folder = Path(config.release)
    for path, text in wanted_files(replace(config, check=True)):
        if path.parent.name != "notebooks":
            continue
        cells = nbformat.reads(text, as_version=4).cells
        written = [cell.source for cell in cells if cell.cell_type == "markdown"]
        for link in sorted({link for words in written for _, link in PICTURE.findall(words)}):
            (folder / link).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(config.root / "notebooks" / link, folder / link)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / path.name, text)
        print(f"released {folder / path.name}")


def strays(root: Path) -> list[Path]:
    """Notebooks that no source makes."""
    names = {path.stem for path in (root / "solutions").glob("*.py")}
    found = [*(root / "notebooks").glob("*.ipynb"), *(root / "solutions").glob("*.ipynb")]
    return sorted(path for path in found if path.stem not in names)


def main(config: Config) -> None:
    """Bring every generated file up to date, or only name those that are not."""
    if config.release:
        release(config)
        return
    is_stale = False
    for path, text in wanted_files(config):
        if path.exists() and path.read_text() == text:
            continue
        is_stale = True
        if not config.check:
            write_whole(path, text)
        print(f"{'out of date' if config.check else 'wrote'}: {path.relative_to(config.root)}")
    if found := strays(config.root):
        names = ", ".join(str(path.relative_to(config.root)) for path in found)
        raise BadInput(f"no source in solutions/ makes {names}: remove it")
    if config.check and is_stale:
        print("run: make notebooks")
        raise SystemExit(1)


if __name__ == "__main__":
    command_line(main, Config)
