"""What each unit of the tests depends on, and a key that changes when any of it does.

    unit --roots--> files --names, imports--> files ...      the closure
                                                 |
    key = sha256(their contents, Python, installed packages, what the machine has)

A unit is a test file, the spec file of some exercises, or a notebook. The closure follows imports,
lazy ones too, and every text that names a file of the course: a job, a script, data. It takes a
file too many rather than one too few. What texts cannot show stands in BESIDES and in BLIND;
`python tests/opened.py` compares all of it with what the units open.
"""

import ast
import fnmatch
import hashlib
import json
import os
import re
import shutil
import site
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE_ROOTS = ("scripts", "tests")  # where `import x` looks for x

# Read by every test, whatever it imports.
ALWAYS = ("tests/conftest.py", "pyproject.toml")
# They read the whole course.
WHOLE = ("tests/house/test_layout.py",)
# Read, though nothing that is read names it.
BESIDES = {
    "tests/building/test_build_notebooks.py": ("solutions/*.py", "notebooks/*.ipynb", "[RT]*.md"),
    "tests/building/test_notebooks.py": ("solutions/*.*", "notebooks/*.ipynb", "*.md"),
    "tests/building/test_run_solutions.py": ("solutions/*.py",),
    "tests/house/test_items.py": ("solutions/*.py",),
    "tests/gpu/test_gpu.py": ("sbatch/*.sbatch", "scripts/train_*.py"),
    "tests/jobs/test_slurm.py": ("sbatch/*", ".ci/run"),
    "tests/instruments/test_bench.py": ("bench.json", "bench.md", "README.md"),
    "tests/checks/test_checks.py": ("tests/answers/*.py", "tests/answers/once_accepted/*.py"),
}
# Their patterns name files of all lessons, and their callers say which one: a notebook names its
# job, and the stored runs that it shows.
BLIND = (
    "tests/conftest.py",
    "scripts/manyhands/jobs/submit.py",
    "scripts/manyhands/training/tasks.py",
    "scripts/manyhands/training/storage.py",
    "scripts/manyhands/checks/engine/bench.py",
)
SUFFIXES = (".py", ".ipynb", ".sbatch", ".sh", ".json", ".svg", ".md", ".yml", ".yaml", ".toml")
SUFFIXES += (".txt", ".in", ".example", ".html")
NAME = re.compile(r"[\w./*\[\]{}-]+")
IMPORT = re.compile(r"\b(?:from|import) +([a-z_][\w.]*)(?: +import +\(?([\w, ]+))?")


# ---- what one file names ----------------------------------------------------------------------


def references(path: Path, text: str) -> list[str]:
    """What a file names: "import a.b", and names or patterns of files, as "train_*.py"."""
    if path.suffix == ".py":
        # The course's own sentences name files, too; what tests write they run.
        is_test = path.parts[0] == "tests"
        return sorted(_of_python(ast.parse(text), is_test))
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        sources = ["".join(cell["source"]) for cell in cells]
        return sorted({name for source in sources for name in _of_cell(source)})
    if path.suffix in (".sbatch", ".sh", ".yaml", ".yml") or not path.suffix:
        lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
        return sorted(_of_words("\n".join(lines)))
    return []


def _of_cell(source: str) -> set[str]:
    lines = ("" if line.startswith(("%", "!")) else line for line in source.splitlines())
    return _of_python(ast.parse("\n".join(lines)), has_commands=False)


def _of_python(tree: ast.Module, has_commands: bool) -> set[str]:
    """`has_commands`: a text with spaces may be a command or a program, and no sentence."""
    found = set()
    docstrings = {id(one.body[0].value) for one in ast.walk(tree) if _has_docstring(one)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {f"import {alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"import {node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call):
            found |= _of_stored(node)
        text = "" if id(node) in docstrings else _text(node)
        if text and (has_commands or not re.search(r"\s", text.strip())):
            found |= _of_words(text)
    return found


def _has_docstring(node: ast.AST) -> bool:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None


def _text(node: ast.AST) -> str:
    """The text of a string, with * for what an f-string fills in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_piece, node.values))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _piece(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) else "*"


def _of_stored(call: ast.Call) -> set[str]:
    """A stored run is named by its lesson and a word."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name != "stored" or len(call.args) != 2:
        return set()
    lesson, word = map(_piece, call.args)
    return {f"{lesson}/stored_{word}.json"}


def _of_words(text: str) -> set[str]:
    """Files and modules that a text names: a program in a string, a command, a line of a job."""
    found = {word.strip(".") for word in NAME.findall(text)}
    found = {word for word in found if word.endswith(SUFFIXES) and not word.startswith("*.")}
    if "import" in text:
        for module, names in IMPORT.findall(text):
            found |= {f"import {module}.{name.strip()}" for name in (names or "x").split(",")}
    if "manyhands." in text:
        found |= {f"import {word}" for word in re.findall(r"manyhands\.[\w.*]+", text)}
    if re.fullmatch(r"answers\.\S+", text):
        found.add(f"import {text}")
    return found


# ---- the course -------------------------------------------------------------------------------


@dataclass
class Course:
    """The files of a course folder, their contents' sums, and what they name."""

    root: Path = ROOT
    remembered: dict[str, list[str]] = field(default_factory=dict)  # sum -> what the file names
    _edges: dict[str, set[str]] = field(default_factory=dict)

    @cached_property
    def sums(self) -> dict[str, str]:
        """Path -> sum, of every file that git tracks or would add; of all where git is not."""
        listed = subprocess.run(
            ["git", "ls-files", "-coz", "--exclude-standard"], cwd=self.root, capture_output=True
        )
        names = listed.stdout.decode().split("\0") if listed.returncode == 0 else self._walk()
        paths = {name: self.root / name for name in sorted(set(names)) if name}
        return {
            name: hashlib.sha256(path.read_bytes()).hexdigest()
            for name, path in paths.items()
            if path.is_file()
        }

    def _walk(self) -> Iterator[str]:
        for folder, folders, files in os.walk(self.root):
            folders[:] = [one for one in folders if not one.startswith((".venv", "__pycache__"))]
            for name in files:
                yield (Path(folder) / name).relative_to(self.root).as_posix()

    @cached_property
    def by_name(self) -> dict[str, list[str]]:
        """Last part of a path -> the paths."""
        found: dict[str, list[str]] = {}
        for path in self.sums:
            found.setdefault(path.rsplit("/", 1)[-1], []).append(path)
        return found

    @cached_property
    def modules(self) -> dict[str, str]:
        """Dotted name -> path, of every module below the source roots; nobody imports a test."""
        found = {}
        for path in self.sums:
            top, _, rest = path.partition("/")
            if top in SOURCE_ROOTS and rest.endswith(".py"):
                dotted = rest.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                found.setdefault(dotted, path)
        return found

    def named(self, path: str) -> list[str]:
        """What a file names, see `references`."""
        known = self.sums[path]
        if known not in self.remembered:
            try:
                text = (self.root / path).read_text()
                self.remembered[known] = references(Path(path), text)
            except (SyntaxError, ValueError):  # no text, or no Python: its own tests say so
                self.remembered[known] = []
        return self.remembered[known]

    def edges(self, path: str) -> set[str]:
        """The files that a file leads to."""
        if path not in self._edges:
            self._edges[path] = self._edges_of(path)
        return self._edges[path]

    def _edges_of(self, path: str) -> set[str]:
        found = set()
        for name in self.named(path):
            if name.startswith("import "):
                found |= self._imported(name.removeprefix("import "), path in BLIND)
            elif not ("*" in name and path in BLIND):
                found |= self._files(name, path)
        for pattern in BESIDES.get(path, ()):
            found |= set(fnmatch.filter(self.sums, pattern))
        return found - {path}

    def _imported(self, dotted: str, is_blind: bool) -> set[str]:
        """The module, or the one that holds the name; with its packages."""
        if "*" in dotted:
            matching = [] if is_blind else fnmatch.filter(self.modules, dotted)
            return {self.modules[name] for name in matching}
        parts = dotted.split(".")
        names = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        return {self.modules[name] for name in names if name in self.modules}

    def _files(self, name: str, path: str) -> set[str]:
        """The files of a name as it stands in `path`: whole, the end of a path, or a pattern."""
        last = name.rsplit("/", 1)[-1]
        if re.search(r"[*\[]", last):
            if not re.search(r"\w{3}", last.rsplit(".", 1)[0]) and not last.endswith(".sbatch"):
                return set()  # as *.json, which says nothing
            matching = fnmatch.filter(self.by_name, last)
            return {one for key in matching for one in self.by_name[key]}
        found = self.by_name.get(last, [])
        folder = path.rsplit("/", 1)[0]
        ends = name.lstrip("./")
        whole = [one for one in found if one == ends or one.endswith(f"/{ends}")]
        beside = [one for one in whole if one.rsplit("/", 1)[0] == folder]
        return set(beside or whole)

    def closure(self, roots: Iterable[str], but: Iterable[str] = ()) -> set[str]:
        """All files that the roots lead to; those of `but` count, and lead nowhere."""
        seen, but = set(), {*but}
        waiting = [path for path in roots if path in self.sums]
        while waiting:
            path = waiting.pop()
            if path in seen:
                continue
            seen.add(path)
            if path not in but:
                waiting += self.edges(path) - seen
        return seen


# ---- the units --------------------------------------------------------------------------------


CHECKS = "scripts/manyhands/checks"
JUDGING = ("tests/audit.py", f"{CHECKS}/engine/verdict.py", f"{CHECKS}/engine/lesson.py")
RUNNING = ("tests/building/test_notebooks.py",)


def unit_files(course: Course, unit: str) -> set[str]:
    """The closure of a unit: a test file, a spec file, or a notebook.

    What stands beside a spec or a notebook has units of its own.
    """
    if unit in WHOLE:
        return {*course.sums}
    lesson = unit.split("/")[3] if unit.startswith(f"{CHECKS}/") else ""
    if lesson:
        files = {f"tests/answers/{room}{lesson}.py" for room in ("", "once_accepted/")}
        shared = {*files & course.sums.keys(), *JUDGING, "tests/checks/test_checks.py"}
        but = {"tests/checks/test_checks.py", f"{CHECKS}/{lesson}/__init__.py"}
        found = course.closure({unit, *shared}, but)
    elif unit.endswith(".ipynb"):
        found = course.closure({unit, *RUNNING}, RUNNING)
    else:
        found = course.closure({unit})
    return found | {*ALWAYS} & course.sums.keys()


def lessons(root: Path = ROOT) -> dict[str, int]:
    """Word -> number of every lesson that has a source."""
    stems = (path.stem for path in (root / "solutions").glob("[0-9][0-9]_*.py"))
    return {stem[3:]: int(stem[:2]) for stem in stems}


def specs(course: Course) -> dict[str, str]:
    """Number of an exercise -> the file of its spec, which says the number."""
    numbers, found = lessons(course.root), {}
    for path in fnmatch.filter(course.sums, f"{CHECKS}/*/*.py"):
        number = numbers.get(path.split("/")[3], -1)
        for exercise in re.findall(rf'"({number}\.\d+)"', (course.root / path).read_text()):
            found[exercise] = path
    return found


def test_files(course: Course) -> list[str]:
    """The test files."""
    return [path for path in course.sums if re.fullmatch(r"tests/(\w+/)?test_\w+\.py", path)]


# ---- the key ----------------------------------------------------------------------------------


# Variables that change what a test tries.
VARIABLES = ("MANYHANDS_DRAW", "MANYHANDS_RULES", "MANYHANDS_SLURM_MODE")
# Programs that tests skip without -> the files that look for them.
TOOLS = {
    "slurmctld": ("tests/cluster.py", "tests/jobs/test_slurm.py"),
    "mmdebstrap": ("tests/house/test_containers.py",),
    "shellcheck": ("tests/jobs/test_slurm.py",),
    "unshare": ("tests/damage.py",),
    "mount": ("tests/checkpoint/test_checkpoint.py",),
}


def surroundings(environ: dict[str, str] = os.environ) -> list[str]:
    """What tests depend on besides the course's files, a line each."""
    # A folder's name is package and version, and to read it takes no seconds.
    packages = {
        one.name for path in site.getsitepackages() for one in Path(path).glob("*.dist-info")
    }
    return [
        sys.version,
        *sorted(packages),
        f"root: {os.geteuid() == 0}",
        f"nvidia-smi: {_installed('nvidia-smi', environ)}",
        *(f"{name}={environ.get(name, '')}" for name in VARIABLES),
        *outside(),
    ]


def _installed(tool: str, environ: dict[str, str] = os.environ) -> bool:
    return bool(shutil.which(tool, path=environ.get("PATH", "") + ":/usr/sbin:/sbin"))


def outside(root: Path = ROOT) -> list[str]:
    """The data that lies beside the course, where it does: names and sizes."""
    data = root.parent / "shared" / "data"
    files = sorted(path for path in data.rglob("*") if path.is_file())
    return [f"{path.relative_to(data)}: {path.stat().st_size}" for path in files]


def key(course: Course, files: Iterable[str], around: list[str]) -> str:
    """The key of these files in these surroundings; a tool counts for those that look for it."""
    files = sorted(files)
    tools = [tool for tool, seekers in TOOLS.items() if not {*seekers}.isdisjoint(files)]
    lines = [
        *around,
        *(f"{tool}: {_installed(tool)}" for tool in tools),
        *(f"{path} {course.sums[path]}" for path in files),
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
