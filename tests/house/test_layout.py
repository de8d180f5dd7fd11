"""The plan of the house holds: addresses, layers, sizes, job files, and what pages name.

Each rule is a function from a course folder to a list of faults. The rules run on this course, and
then each on a small course with one fault in it, which it must name.
"""

import ast
import functools
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from units import lessons

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parents[2]

# Lessons that run in one process: they have no job and no script that torchrun starts.
WITHOUT_RANKS = {"gradient_descent"}

# The package's rooms that are no lesson, with their layer. A lesson's room is layer 3, and the
# programs in scripts/ are layer 5.
PLUMBING = {
    "ranks": 1,
    "instruments": 2,
    "data": 2,
    "models": 2,
    "saving": 2,
    "training": 2,
    "jobs": 2,
    "programs": 4,
    "checks": 4,
    "compare": 4,
    "planner": 4,
    "simulator": 4,
    "building": 4,
    "gpu": 4,
    "ways": 4,
}
LESSON_LAYER = 3
BENCH_LAYER = 4
FOR_LESSONS = ("saving",)  # rooms that lessons may import; they import no other room
# They use all below: they measure and draw what their room teaches.
BESIDE_CHECKS = ("bench.py", "figures.py")
PROGRAM_LAYER = 5
OTHER_JOBS = ("solution", "compare")  # jobs of no single lesson
OTHER_TESTS = {"house"}  # tests of no room: pages, packages, containers, the tests' own tools
MAX_ROOMS = 32
NUM_LESSONS = 17  # of the whole course; those that are still to come have their room counted

TOP_LEVEL = set(
    ".ci .github .gitignore CONTRIBUTING.md LICENSE Makefile README.md TEACHING.md bench.json "
    "bench.md constraints.txt environment.yml notebooks pyproject.toml sbatch scripts solutions "
    "tests".split()
)
MAX_README_BYTES = 9_000  # what a newcomer reads in five minutes; the other pages have the rest
MAX_LESSON_LINES = 250
MAX_LESSON_FUNCTION_LINES = 60
MAX_LINES = 700
LONG_FILE_LINES = 150  # longer ones are counted in the summary, and no fault
LONG_FUNCTION_LINES = 40
# Over MAX_LINES for now. Who makes one small enough takes it out of this list, which never grows.
TOO_LARGE = {
    "scripts/draw_diagrams.py",
}
# The home in the course's own image, /home/learner, is no machine's.
MACHINE = re.compile(
    r"(?:^|[^A-Za-z0-9_.~])/(?:work|root|home(?!/learner\b)|Users)/|(?:download\.pytorch|pypi|pythonhosted)\.org",
    re.MULTILINE,
)
FIXED_PORT = re.compile(
    r"(?:MASTER_PORT\W{1,5}|master[-_]port[= ]\"?|(?:localhost|127\.0\.0\.1|tcp://[\w.]+):)\d{4}"
)


def files(root: Path) -> list[Path]:
    """The files of the course: what git tracks or would add; all files where there is no git."""
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=root, capture_output=True, text=True
    )
    if listed.returncode == 0:
        return sorted(path for name in listed.stdout.split("\0") if (path := root / name).is_file())
    unwanted = {".git", ".venv", "__pycache__", ".pytest_cache", ".ruff_cache", "runs", "mine"}
    found = (path for path in root.rglob("*") if path.is_file())
    return sorted(path for path in found if not unwanted & set(path.relative_to(root).parts))


def texts(root: Path, *suffixes: str) -> Iterator[tuple[str, str]]:
    """Name and text of the files that end so; of all text files where no suffix is given."""
    for path in files(root):
        if path.name.endswith(suffixes or ("",)) and path.suffix != ".png":
            yield path.relative_to(root).as_posix(), path.read_text()


@functools.cache
def tree(text: str) -> ast.Module:
    """The syntax tree of a file with this text: four rules walk that of the whole course."""
    return ast.parse(text)


def parsed(root: Path, *folders: str) -> Iterator[tuple[str, ast.Module]]:
    """Name and syntax tree of the Python files in these folders."""
    for name, text in texts(root, ".py"):
        if name.split("/")[0] in folders:
            yield name, tree(text)


# ---------------------------------------------------------------- the rules


def addresses(root: Path) -> list[str]:
    """Every lesson is at home in every folder, under the same word; nothing else is."""
    words, wanted = lessons(root), []
    for word, number in words.items():
        stem = f"{number:02d}_{word}"
        wanted += [f"notebooks/{stem}.ipynb", f"solutions/{stem}.ipynb"]
        wanted += [f"scripts/manyhands/{word}/__init__.py"]
        is_folder = (root / f"scripts/manyhands/checks/{word}/__init__.py").is_file()
        wanted += [f"scripts/manyhands/checks/{word}{'/__init__' if is_folder else ''}.py"]
        wanted += [f"tests/{word}/test_{word}.py"]
        if word not in WITHOUT_RANKS:
            is_bench = (root / f"scripts/bench_{word}.py").is_file()
            wanted += [f"scripts/{'bench' if is_bench else 'train'}_{word}.py"]
            wanted += [f"sbatch/{word}.sbatch"]
    homeless = {path.stem for path in (root / "sbatch").glob("*.sbatch")} - {*words, *OTHER_JOBS}
    homeless |= {path.stem for path in (root / "scripts/manyhands/checks").glob("[a-z]*.py")} - {
        *words,
        "shared",
    }
    return [f"{name} is missing" for name in wanted if not (root / name).is_file()] + [
        f"{word}: no lesson with a source in solutions/" for word in sorted(homeless)
    ]


def rooms(root: Path) -> list[str]:
    """The package is a few rooms: one a lesson, and those that all lessons stand on."""
    package, words = root / "scripts/manyhands", lessons(root)
    inside = [path.relative_to(package) for path in files(root) if path.is_relative_to(package)]
    ground = {path.name for path in inside if len(path.parts) == 1} - {"__init__.py"}
    found = {path.parts[0] for path in inside if len(path.parts) > 1}
    faults = [f"scripts/manyhands/{name}: a module stands in a room" for name in sorted(ground)]
    faults += [
        f"scripts/manyhands/{room}: neither a lesson with a source in solutions/ nor a room of "
        "PLUMBING with a layer"
        for room in sorted(found - set(words) - set(PLUMBING))
    ]
    num_rooms = len(found - set(words)) + max(NUM_LESSONS, len(words))
    if num_rooms > MAX_ROOMS:
        faults.append(f"{num_rooms} rooms with all lessons, over {MAX_ROOMS}")
    for room in sorted(found - {"checks"}):
        path = package / room / "__init__.py"
        text = path.read_text() if path.is_file() else ""
        body = ast.parse(text).body
        if len(body) != 1 or not ast.get_docstring(ast.parse(text)) or len(text.splitlines()) > 4:
            faults.append(
                f"scripts/manyhands/{room}/__init__.py: holds a docstring of 1 to 4 lines"
            )
    return faults


def rooms_of_tests(root: Path) -> list[str]:
    """A test file lies in the folder of the room that it tests, and no two have the same name.

    None is imported by another: what two of them need stands in tests/ itself.
    """
    known = {path.parent.name for path in (root / "scripts/manyhands").glob("*/__init__.py")}
    found = [path.relative_to(root) for path in files(root) if path.match("test_*.py")]
    found = [path for path in found if path.parts[0] == "tests"]
    faults = [
        f"{path}: a test lies in tests/<room>/, or in one of {sorted(OTHER_TESTS)}"
        for path in found
        if len(path.parts) != 3 or path.parts[1] not in known | OTHER_TESTS
    ]
    counts = Counter(path.name for path in found)
    faults += [f"{path}: another has this name" for path in found if counts[path.name] > 1]
    for name, tree in parsed(root, "tests"):
        named = (target.partition(".")[0] for target in imports(tree))
        faults += [f"{name}: imports {one}" for one in named if f"{one}.py" in counts]
    return faults


def imports(tree: ast.Module) -> Iterator[str]:
    """Dotted names of all that a file imports; `from a import b` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module or '.'}.{alias.name}" for alias in node.names)


def layers(root: Path) -> list[str]:
    """Imports point down; a lesson imports torch, the standard library and earlier lessons.

    fsspec, which gives files by address, comes with torch.

    So does what every job saves with, which lessons may import as well. A room's bench.py measures
    it and figures.py draws it; they stand beside the checks. Programs import no other program: what
    two of them need stands in a room.
    """
    words, faults = lessons(root), []
    programs = {path.stem for path in (root / "scripts").glob("*.py")}
    for name, tree in parsed(root, "scripts"):
        parts = Path(name).parts[1:]
        is_program, own_room = len(parts) == 1, parts[1] if len(parts) > 2 else ""
        own = PROGRAM_LAYER if is_program else PLUMBING.get(own_room, LESSON_LAYER)
        own = BENCH_LAYER if parts[-1] in BESIDE_CHECKS and not is_program else own
        is_clean = own == LESSON_LAYER or own_room in FOR_LESSONS
        for target in imports(tree):
            package, _, rest = target.partition(".")
            room = rest.partition(".")[0]
            layer = PLUMBING.get(room, LESSON_LAYER)
            if package in programs:
                faults.append(f"{name}: imports the program {package}")
            elif package != "manyhands":
                known = package in sys.stdlib_module_names or package in ("torch", "fsspec")
                if is_clean and not known:
                    faults.append(f"{name}: a lesson imports {package}")
            elif own_room in FOR_LESSONS and room != own_room:
                faults.append(f"{name}: {own_room} imports {target}")
            elif own == LESSON_LAYER and layer != LESSON_LAYER and room not in FOR_LESSONS:
                faults.append(f"{name}: a lesson imports {target}")
            elif own == layer == LESSON_LAYER and words.get(room, 99) > words.get(own_room, 99):
                faults.append(f"{name}: imports the later lesson {room}")
            elif layer > own:
                faults.append(f"{name}: layer {own} imports {target}, layer {layer}")
    return faults


def circles(root: Path) -> list[str]:
    """No file imports itself by way of others; what is imported for types alone does not count."""
    trees = {
        name.removeprefix("scripts/").removesuffix(".py").replace("/", "."): tree
        for name, tree in parsed(root, "scripts")
    }
    trees = {module.removesuffix(".__init__"): tree for module, tree in trees.items()}
    graph = {}
    for module, tree in trees.items():
        tests = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
        types = [node for node in tests if ast.unparse(node.test) == "TYPE_CHECKING"]
        named = set(imports(tree)) - {target for node in types for target in imports(node)}
        found = {one if one in trees else one.rpartition(".")[0] for one in named}
        graph[module] = (found & set(trees)) - {module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [f"a circle: {' imports '.join(reversed(error.args[1]))}"]
    return []


def lengths(root: Path) -> Iterator[tuple[str, bool, int, list[tuple[str, int]]]]:
    """Of each module: its name, whether it is a lesson's, its lines, and its functions' lines."""
    words = lessons(root)
    for name, text in texts(root, ".py"):
        parts = name.split("/")
        if parts[0] in ("scripts", "tests"):
            is_lesson = parts[:2] == ["scripts", "manyhands"] and parts[2] in words
            functions = [
                (node.name, node.end_lineno - node.lineno + 1)
                for node in ast.walk(tree(text))
                if isinstance(node, ast.FunctionDef)
            ]
            yield name, is_lesson, len(text.splitlines()), functions


def sizes(root: Path) -> list[str]:
    """What a learner reads fits on a few pages, and no file needs a map."""
    faults, too_large = [], set()
    for name, is_lesson, num_lines, functions in lengths(root):
        if num_lines > MAX_LINES:
            too_large.add(name)
        limit = MAX_LESSON_LINES if is_lesson else MAX_LINES
        if num_lines > limit and name not in TOO_LARGE:
            faults.append(f"{name}: {num_lines} lines, over {limit}")
        for function, num_lines in functions:
            if is_lesson and num_lines > MAX_LESSON_FUNCTION_LINES:
                faults.append(f"{name}: {function} has {num_lines} lines")
    if root == ROOT:
        faults += [f"{name} is no longer too large" for name in sorted(TOO_LARGE - too_large)]
    return faults


def signatures(root: Path) -> list[str]:
    """Public functions say the types of what they take and give.

    A learner's `answer`, which the checks take, may be anything, and a mistake that stands among a
    lesson's checks as a function is written as a learner would write it.
    """
    faults = []
    for name, tree in parsed(root, "scripts"):
        if "/checks/" in name and "/engine/" not in name:
            continue
        bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
        for node in [one for body in bodies for one in body if isinstance(one, ast.FunctionDef)]:
            taken = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            untyped = [one.arg for one in taken if one.annotation is None]
            untyped = [one for one in untyped if one not in ("self", "cls", "answer")]
            if not node.name.startswith("_") and (untyped or node.returns is None):
                faults.append(f"{name}: {node.name} has no type for {untyped or 'its result'}")
    return faults


def ascii_code(root: Path) -> list[str]:
    """Code and comments are ASCII; a lesson's prose, which is comments in solutions/, need not."""
    faults = []
    for name, text in texts(root, ".py", ".sh", ".sbatch", "Makefile", ".toml", ".yml"):
        for number, line in enumerate(text.splitlines(), 1):
            is_prose = name.startswith("solutions/") and line.startswith("#")
            if not line.isascii() and not is_prose:
                faults.append(f"{name}:{number}: not ASCII")
    return faults


def forbidden_code(root: Path) -> list[str]:
    """No sys.path edits, no error swallowed whole, no pickle read without weights_only."""
    faults = []
    for name, tree in parsed(root, "scripts", "tests", "solutions"):
        for node in ast.walk(tree):
            text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            where = f"{name}:{getattr(node, 'lineno', 0)}"
            if text == "sys.path":
                faults.append(f"{where}: sys.path")
            if isinstance(node, ast.ExceptHandler) and isinstance(node.body[0], ast.Pass):
                faults.append(f"{where}: an error is swallowed")
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                safe = {one.arg: ast.unparse(one.value) for one in node.keywords}
                if safe.get("weights_only") != "True":
                    faults.append(f"{where}: torch.load without weights_only=True")
    return faults


def shell_cells(root: Path) -> list[str]:
    """No notebook launches with a shell: no checker sees such a launch fail."""
    faults = []
    for name, text in texts(root, ".ipynb"):
        for cell in json.loads(text)["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "code" and re.search(
                r"^\s*(?:!|%%?(?:bash|sh|system|script|run)\b)|get_ipython\(\)\.system|os\.system",
                source,
                re.MULTILINE,
            ):
                faults.append(f"{name}: cell {cell['id']} launches with a shell")
    return faults


def machine_traces(root: Path) -> list[str]:
    """No file names a path of the machine it was written on, a package host or a fixed port."""
    faults = []
    for name, text in texts(root):
        for rule, pattern in (("a machine's path or host", MACHINE), ("a fixed port", FIXED_PORT)):
            if found := pattern.search(text):
                line = text.count("\n", 0, found.start() + 1) + 1
                faults.append(f"{name}:{line}: {rule}: {found[0].strip()}")
    return faults


def strays(root: Path) -> list[str]:
    """The source root holds Python, runs that say how to make them anew and pages' templates."""
    made = ("__pycache__", ".egg-info")
    return [
        f"{path.relative_to(root)} does not belong in scripts/"
        for path in sorted((root / "scripts").rglob("*"))
        if path.is_file()
        and path.suffix not in (".py", ".html")
        and not (path.match("manyhands/*/stored_*.json") and json.loads(path.read_text())["remake"])
        and not any(word in str(path) for word in made)
    ]


def job_files(root: Path) -> list[str]:
    """Shell files parse; Slurm sees every directive; the scripts they name are there."""
    faults = []
    named = {path.name for folder in ("scripts", "sbatch") for path in (root / folder).glob("*.*")}
    for name, text in texts(root, ".sh", ".sbatch", ".ci/run", ".ci/hub"):
        done = subprocess.run(["bash", "-n", str(root / name)], capture_output=True, text=True)
        if done.returncode:
            faults.append(f"{name}: {done.stderr.strip()}")
        is_code = False
        for line in text.splitlines():
            is_code = is_code or not (line.startswith("#") or not line.strip())
            if re.match(r"\s*#\s*SBATCH", line):
                if is_code or not re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", line):
                    faults.append(f"{name}: Slurm does not read, or not so: {line}")
                if re.search(r"--(?:account|partition|qos|reservation|nodelist)\b", line):
                    faults.append(f"{name}: a site's name belongs in site.env: {line}")
        for script in re.findall(r"[\w-]+\.(?:py|sh|sbatch)\b", text):
            if script not in named:
                faults.append(f"{name}: names {script}, which is not in scripts/ or sbatch/")
    return faults


def tree_of(page: str) -> Iterator[str]:
    """The paths in CONTRIBUTING.md's tree: a code block whose lines are `name   what it is for`,
    indented by two spaces a level."""
    _, _, rest = page.partition("<!-- tree -->\n```text\n")
    parents: list[str] = []
    for line in rest.partition("```")[0].splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        parents[depth:] = [name.rstrip("/")]
        yield "/".join(parents)


def page_tree(root: Path) -> list[str]:
    """The tree and the folder agree: all that is at the top is named, and so is every room."""
    named = list(tree_of((root / "CONTRIBUTING.md").read_text()))
    paths = [path.relative_to(root) for path in files(root)]
    top = {path.parts[0] for path in paths}
    package = Path("scripts/manyhands")
    inside = {path.parts[:3] for path in paths if path.is_relative_to(package) and path.parts[3:]}
    found = {Path(*parts).as_posix() for parts in inside if parts[2] not in lessons(root)}
    faults = [
        f"CONTRIBUTING.md's tree leaves out {name}" for name in sorted((top | found) - set(named))
    ]
    faults += [f"{name} has no place at the top" for name in sorted(top - TOP_LEVEL)]
    for path in named:
        pattern = placeholders(path)
        if ("*" in pattern and not lessons(root)) or list(root.glob(pattern)):
            continue
        faults.append(f"CONTRIBUTING.md's tree names {path}, which is not there")
    return faults


def placeholders(path: str) -> str:
    """A path with the words that stand for a lesson, <lesson>, NN_word or word, as a pattern."""
    return re.sub(r"<\w+>|NN_word|(?<![a-z])word(?![a-z])|NN", "*", path)


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}


def links(root: Path) -> list[str]:
    """Links to files of the course lead to a file, and to a heading that it has."""
    faults = []
    for name, text in texts(root, ".md", ".ipynb"):
        pages = [text]
        if name.endswith(".ipynb"):
            cells = json.loads(text)["cells"]
            pages = ["".join(one["source"]) for one in cells if one["cell_type"] == "markdown"]
        for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", "\n".join(pages)):
            path, _, heading = target.partition("#")
            page = (root / name).parent / path if path else root / name
            if "://" in target:
                continue
            if not page.exists():
                faults.append(f"{name}: a link to {path}, which is not there")
            elif heading and page.suffix == ".md" and heading not in anchors(page.read_text()):
                faults.append(f"{name}: a link to {target}, a heading that is not there")
    return faults


def page_commands(root: Path) -> list[str]:
    """The pages for people name recipes that the Makefile has, and files that are there."""
    makefile = (root / "Makefile").read_text() if (root / "Makefile").is_file() else ""
    recipes = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    tops = "|".join(("scripts", "sbatch", "tests", "solutions", "notebooks"))
    faults = []
    for name, text in texts(root, ".md"):
        found = re.findall(r"```sh\n(.*?)```|`([^`\n]+)`", text, re.DOTALL)
        code = "\n".join(fenced or span for fenced, span in found)
        for recipe in re.findall(r"^(?:.*&& )?make (?:[A-Z]+=\S+ )*([a-z]+)", code, re.MULTILINE):
            if recipe not in recipes:
                faults.append(f"{name}: there is no recipe make {recipe}")
        for path in re.findall(rf"(?<![\w/.])((?:{tops})/[\w./<>-]+)", code):
            if path != "sbatch/site.env" and not list(root.glob(placeholders(path.rstrip("/.")))):
                faults.append(f"{name}: names {path}, which is not there")
    return faults


def readme_size(root: Path) -> list[str]:
    """README is what a newcomer reads; a page beside it has the rest."""
    size = len((root / "README.md").read_bytes())
    return [f"README.md: {size} bytes, over {MAX_README_BYTES}"] * (size > MAX_README_BYTES)


RULES = (
    addresses,
    rooms,
    rooms_of_tests,
    layers,
    circles,
    sizes,
    signatures,
    ascii_code,
    forbidden_code,
    shell_cells,
    machine_traces,
    strays,
    job_files,
    page_tree,
    links,
    page_commands,
    readme_size,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_course_follows(rule) -> None:
    faults = rule(ROOT)
    assert not faults, "\n".join(["", *faults])


def test_sizes_are_reported(record_property: Callable) -> None:
    """A line in the summary of the tests, see conftest.py; long is no fault."""
    found = list(lengths(ROOT))
    num_files = sum(num_lines > LONG_FILE_LINES for _, _, num_lines, _ in found)
    all_lines = [lines for _, _, _, functions in found for _, lines in functions]
    num_functions = sum(lines > LONG_FUNCTION_LINES for lines in all_lines)
    largest_lines, largest = max((num_lines, name) for name, _, num_lines, _ in found)
    record_property(
        "summary",
        f"{num_files} of {len(found)} files have over {LONG_FILE_LINES} lines (most: {largest}, "
        f"{largest_lines}), {num_functions} of {len(all_lines)} functions over "
        f"{LONG_FUNCTION_LINES} (most: {max(all_lines)}); {len(TOO_LARGE)} files over {MAX_LINES}",
    )


# ---------------------------------------------------------------- the rules find faults

TREE = """\
<!-- tree -->
```text
README.md   for readers
CONTRIBUTING.md   this
notebooks/  open these
  NN_<lesson>.ipynb   one a lesson
sbatch/     jobs
scripts/    code
  manyhands/  package
    <lesson>/     a lesson
    ranks/        processes
    saving/       what every job saves with
    checks/       verdicts
solutions/  answers
tests/      tests
```
"""
NOTEBOOK = '{"cells": [{"cell_type": "code", "id": "a", "source": ["x = 1\\n", "y = 2"]}]}'
SOUND = {
    "README.md": "# Ring\n\nSee [the tree](CONTRIBUTING.md#the-tree).\n",
    "CONTRIBUTING.md": "## The tree\n\n" + TREE,
    "notebooks/06_ring.ipynb": NOTEBOOK,
    "solutions/06_ring.ipynb": NOTEBOOK,
    "solutions/06_ring.py": "# caf\u00e9\n",
    "scripts/manyhands/__init__.py": "",
    "scripts/manyhands/ring/__init__.py": '"""Lesson 06."""\n',
    "scripts/manyhands/ring/hops.py": "import torch\n\n\ndef f(x: int) -> int:\n    return x\n",
    "scripts/manyhands/ring/sums.py": "from manyhands.ring import hops\n",
    "scripts/manyhands/ring/files.py": "from manyhands.saving import store\n",
    "scripts/manyhands/saving/__init__.py": '"""Saving."""\n',
    "scripts/manyhands/saving/store.py": "import fsspec\n",
    "scripts/manyhands/ranks/__init__.py": '"""Processes."""\n',
    "scripts/manyhands/ranks/runtime.py": "import os\n",
    "scripts/manyhands/checks/__init__.py": "from manyhands.ranks import runtime\n",
    "scripts/manyhands/checks/ring.py": "from manyhands.ring import hops\n",
    "scripts/train_ring.py": "from manyhands.ring.hops import f\n",
    "sbatch/ring.sbatch": "#!/bin/bash\n#SBATCH --nodes=2\nsrun python scripts/train_ring.py\n",
    "tests/ring/test_ring.py": "import torch\n\ntorch.load('x', weights_only=True)\n",
}
JOB = "sbatch/ring.sbatch"
LESSON = "scripts/manyhands/ring/hops.py"
ROOM = "scripts/manyhands/ring/__init__.py"
RANKS = "scripts/manyhands/ranks/runtime.py"
SAVING = "scripts/manyhands/saving/store.py"
RING_TEST = "tests/ring/test_ring.py"
LONG = "def f() -> None:\n" + "    x = 1\n" * 60

# rule, file, what stands in it (None: the file is missing), what the rule says
FAULTY = [
    (addresses, JOB, None, "sbatch/ring.sbatch is missing"),
    (addresses, RING_TEST, None, "tests/ring/test_ring.py is missing"),
    (addresses, "sbatch/stray.sbatch", "", "stray: no lesson"),
    (addresses, "scripts/manyhands/checks/stray.py", "", "stray: no lesson"),
    (rooms, "scripts/manyhands/stray.py", "", "stray.py: a module stands in a room"),
    (rooms, "scripts/manyhands/stray/a.py", "", "stray: neither a lesson"),
    (rooms, ROOM, "from manyhands.ring.hops import f\n", "ring/__init__.py: holds a docstring"),
    (rooms, ROOM, '"""Ring."""\n\nfrom manyhands.ring import hops\n', "holds a docstring"),
    (rooms, ROOM, '"""' + "Ring.\n" * 5 + '"""\n', "holds a docstring of 1 to 4 lines"),
    (rooms_of_tests, "tests/test_hops.py", "", "tests/test_hops.py: a test lies in"),
    (rooms_of_tests, "tests/rong/test_hops.py", "", "rong/test_hops.py: a test lies in"),
    (rooms_of_tests, "tests/ranks/test_ring.py", "", "test_ring.py: another has this name"),
    (rooms_of_tests, "tests/ranks/test_hops.py", "from test_ring import f", "imports test_ring"),
    (layers, LESSON, "import numpy\n", "a lesson imports numpy"),
    (layers, SAVING, "import numpy\n", "a lesson imports numpy"),
    (layers, SAVING, "from manyhands.ring import hops\n", "saving imports manyhands.ring.hops"),
    (layers, LESSON, "from manyhands import ranks\n", "a lesson imports manyhands.ranks"),
    (layers, LESSON, "from manyhands.ranks import runtime\n", "a lesson imports manyhands.ranks."),
    (layers, RANKS, "from manyhands.ring import hops\n", "layer 1 imports"),
    (layers, RANKS, "import manyhands.checks\n", "layer 4"),
    (layers, RANKS, "import train_ring\n", "imports the program train_ring"),
    (layers, "scripts/bench.py", "from train_ring import f\n", "imports the program train_ring"),
    (circles, LESSON, "import manyhands.ring.sums\n", "ring.hops imports manyhands.ring.sums"),
    (sizes, LESSON, "x = 1\n" * 251, "251 lines, over 250"),
    (sizes, LESSON, LONG, "f has 61 lines"),
    (sizes, "scripts/train_ring.py", "x = 1\n" * 701, "701 lines, over 700"),
    (sizes, RING_TEST, "x = 1\n" * 701, "701 lines, over 700"),
    (signatures, LESSON, "def f(x, y: int) -> None: ...", "f has no type for ['x']"),
    (signatures, LESSON, "class A:\n    def f(self): ...", "f has no type for its result"),
    (ascii_code, "scripts/train_ring.py", "# caf\u00e9\n", "scripts/train_ring.py:1: not ASCII"),
    (ascii_code, "solutions/06_ring.py", "x = '\u00e9'\n", "solutions/06_ring.py:1: not ASCII"),
    (forbidden_code, RING_TEST, "import sys\nsys.path.append('.')\n", ":2: sys.path"),
    (forbidden_code, LESSON, "try:\n    f()\nexcept OSError:\n    pass\n", "swallowed"),
    (forbidden_code, LESSON, "torch.load('x')\n", "torch.load without"),
    (shell_cells, "notebooks/06_ring.ipynb", NOTEBOOK.replace("y = 2", "!ls"), "cell a launches"),
    (shell_cells, "notebooks/06_ring.ipynb", NOTEBOOK.replace("x = 1", "%%bash"), "cell a"),
    (machine_traces, LESSON, "\nDATA = '/" + "home/me/data'\n", "hops.py:2: a machine's path"),
    (machine_traces, "README.md", "https://pypi." + "org/simple", "path or host"),
    (strays, "scripts/manyhands/ring/hops.py.orig", "x = 1\n", "does not belong in scripts/"),
    (machine_traces, JOB, "export MASTER_PORT" + "=29500\n", "a fixed port"),
    (job_files, JOB, "if true; then\n", "syntax error"),
    (job_files, JOB, "#!/bin/bash\n# SBATCH --nodes=2\n", "Slurm does not read"),
    (job_files, JOB, "#!/bin/bash\nset -e\n#SBATCH --nodes=2\n", "Slurm does not read"),
    (job_files, JOB, "#!/bin/bash\n#SBATCH --account=me\n", "site.env"),
    (job_files, JOB, "srun python scripts/train_rong.py\n", "names train_rong.py"),
    (page_tree, "setup.cfg", "", "tree leaves out setup.cfg"),
    (page_tree, "setup.cfg", "", "setup.cfg has no place at the top"),
    (page_tree, "scripts/manyhands/attic/a.py", "", "tree leaves out scripts/manyhands/attic"),
    (page_tree, "notebooks/06_ring.ipynb", None, "notebooks/NN_<lesson>.ipynb, which is not"),
    (links, "README.md", "[a](LICENCE)", "a link to LICENCE"),
    (links, "README.md", "[a](CONTRIBUTING.md#a-tree)", "a heading that is not there"),
    (page_commands, "README.md", "Type `make tea`.", "there is no recipe make tea"),
    (page_commands, "README.md", "```sh\nmake A=1 tea\n```", "there is no recipe make tea"),
    (page_commands, "README.md", "See `tests/test_rong.py`.", "tests/test_rong.py, which is not"),
    (readme_size, "README.md", "x" * 9_001, "9001 bytes, over 9000"),
]


def write(root: Path, contents: dict[str, str | None]) -> None:
    for name, text in contents.items():
        if text is not None:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_sound_course_has_no_fault(tmp_path: Path, rule) -> None:
    write(tmp_path, SOUND)
    assert rule(tmp_path) == []


@pytest.mark.parametrize(
    ("rule", "name", "text", "message"),
    FAULTY,
    ids=[f"{row[0].__name__}-{row[3]}" for row in FAULTY],
)
def test_a_fault_is_named(tmp_path: Path, rule, name: str, text: str | None, message: str) -> None:
    write(tmp_path, SOUND | {name: text})
    faults = rule(tmp_path)
    assert any(message in fault for fault in faults), faults


def test_later_lessons_and_too_many_rooms_are_named(tmp_path: Path, monkeypatch) -> None:
    later = {"solutions/07_late.py": "", "scripts/manyhands/late/a.py": ""}
    write(tmp_path, SOUND | later | {LESSON: "from manyhands.late import a\n"})
    assert any("imports the later lesson late" in fault for fault in layers(tmp_path))
    monkeypatch.setattr(sys.modules[__name__], "MAX_ROOMS", 19)
    assert "20 rooms with all lessons, over 19" in rooms(tmp_path)
