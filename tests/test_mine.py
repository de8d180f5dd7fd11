"""The learner's functions reach a job as they stand in the notebook, or one line says why not."""

import linecache
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from manyhands.checks.engine.answer import as_written
from manyhands.jobs import mine
from manyhands.ranks.runtime import BadInput

HELPERS = """
import functools
import math
import torch.distributed as dist
import torch.nn.functional as F
from collections import OrderedDict as Ordered
from dataclasses import dataclass
from typing import NamedTuple
import torch
from torch import nn

SCALE = 3
NAMES = {"first": [1, 2], "second": (None, True)}
LAYER = torch.ones(2)

def logged(function):
    @functools.wraps(function)
    def inner(*args):
        return ("logged", function(*args))
    return inner

def plainly(function):
    def inner(*args):
        return function(*args)
    return inner

def double(x):
    return SCALE * x - x

@dataclass
class Part:
    size: int = SCALE

class Pair(NamedTuple):
    left: Part
    right: int = SCALE

class Marks:
    word = "mark"

class Base(nn.Module):
    start = SCALE + 1

    def shared(self):
        return len(NAMES)
"""

ANSWERS = """
class Wrapped(Base):
    def __init__(self, size: int = SCALE):
        super().__init__()
        self.weight = nn.Parameter(F.relu(torch.full((size,), 1.0 * math.floor(2.5))))

    @property
    def total(self) -> float:
        return double(self.weight.sum().item())

    @staticmethod
    def kind() -> type:
        return Ordered

@logged
def average(x):
    local = [double(item) for item in x]
    return sum(local) / len(local)

@torch.no_grad()
def joined():
    return dist.is_initialized()

@plainly
def paired():
    return Pair(Part()).left.size, Pair(Part()).right, Marks.word

class Average:
    pass

def shared_layer():
    return LAYER + 1

def recursive(n):
    return n * recursive(n - 1) if n else SCALE
"""

REDEFINED = """
def double(x):
    return 100 * x
"""

USE = """
import sys
from pathlib import Path
from manyhands.jobs import mine

folder = Path("mine")
answers = {"Wrapped": Wrapped, "average": average, "joined": joined, "recursive": recursive}
answers |= {"paired": paired, "Mean": Average}
path = mine.write("demo", answers, folder)
print(path.read_text())
try:
    mine.write("other", {"shared_layer": shared_layer}, folder)
except ValueError as error:
    print("refused:", error)
print("files:", sorted(file.name for file in folder.iterdir()))
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What a notebook of four cells wrote, and what it printed."""
    folder = tmp_path_factory.mktemp("notebook")
    cells = [nbformat.v4.new_code_cell(code) for code in (HELPERS, ANSWERS, REDEFINED, USE)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(folder)}}).execute()
    return folder / "mine", "".join(output["text"] for output in notebook.cells[-1].outputs)


def test_functions_of_a_notebook_run_outside_it(written):
    names = ["Wrapped", "average", "joined", "recursive", "paired", "Mean", "absent"]
    found = mine.load("demo", names, written[0])
    assert list(found) == names[:-1]
    wrapped = found["Wrapped"]()
    assert wrapped.weight.tolist() == [2.0, 2.0, 2.0] and wrapped.start == 4
    assert wrapped.shared() == 2 and wrapped.kind().__name__ == "OrderedDict"
    # The last definition counts, as in the notebook itself.
    assert wrapped.total == 600.0
    assert found["average"]([1, 2, 3]) == ("logged", 200.0)
    assert found["joined"]() is False and found["recursive"](3) == 18
    assert found["paired"]() == (3, 3, "mark") and found["Mean"].__name__ == "Average"


def test_file_holds_what_is_used_and_no_more(written):
    text = (written[0] / "demo.py").read_text()
    assert text.count("def double") == 1 and "LAYER" not in text and "shared_layer" not in text
    assert "\nfrom collections import OrderedDict as Ordered\n" in text
    assert "\nimport torch.distributed as dist\n" in text and "SCALE = 3\n" in text


def test_value_that_no_job_can_know_is_named_and_nothing_is_written(written):
    (line,) = [line for line in written[1].splitlines() if line.startswith("refused: ")]
    assert "shared_layer uses 'LAYER' from the notebook, a Tensor" in line
    assert "files: ['demo.py']" in written[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def f(:", "f.py does not run (SyntaxError"),
        ("import no_such_thing", "(ModuleNotFoundError: No module named 'no_such_thing', line 1)"),
        ("\nimport json\njson.loads('[')", ", line 3): mend it in the notebook"),
        ("raise ValueError('one\\ntwo')", "(ValueError: one, line 1)"),
        ("import sys\nsys.exit(0)", "(SystemExit: 0, line 2)"),
        ("\0", "cannot contain null bytes): mend it"),
        ("g = 1", "defines none of f, h: run check.keep() in the notebook"),
    ],
)
def test_broken_file_is_one_line(tmp_path, text, words):
    (tmp_path / "f.py").write_text(text)
    with pytest.raises(BadInput) as refused:
        mine.load("f", ("f", "h"), tmp_path)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_no_file_is_one_line(tmp_path):
    with pytest.raises(
        BadInput, match="/ddp.py is not there: run check.keep\\(\\) in the ddp noteb"
    ):
        mine.load("ddp", ("f",), tmp_path)


def test_file_that_is_not_needed_may_be_absent_or_lack_the_name_but_not_be_broken(tmp_path):
    assert mine.load("ddp", ("f",), tmp_path, needed=False) == {}
    (tmp_path / "ddp.py").write_text("g = 1")
    assert mine.load("ddp", ("f",), tmp_path, needed=False) == {}
    (tmp_path / "ddp.py").write_text("def f(:")
    with pytest.raises(BadInput, match=r"ddp.py does not run \(SyntaxError"):
        mine.load("ddp", ("f",), tmp_path, needed=False)


def test_only_functions_and_classes_count_as_defined(tmp_path):
    (tmp_path / "f.py").write_text("f = None\ng = 3\nclass h: pass")
    assert list(mine.load("f", "fgh", tmp_path)) == ["h"]


def test_class_without_methods_is_found_in_cells_that_are_not_numbered(monkeypatch):
    # nbval runs cells without a history: `In` stays empty, and Python's own cache has their text.
    text = "from typing import NamedTuple\n\nclass Bytes(NamedTuple):\n    weights: int = 4\n"
    space = {"__name__": "__main__"}
    exec(text, space)
    lines = text.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, "ipykernel_1/2.py", (len(text), None, lines, "2.py"))
    found = mine.source_of("Bytes", space["Bytes"])
    assert found == "class Bytes(NamedTuple):\n    weights: int = 4"


def test_words_name_the_learners_functions_and_no_imported_one(tmp_path):
    (tmp_path / "f.py").write_text("from manyhands.ranks.runtime import place\ndef f(): pass\n")
    found = mine.load("f", ("place", "f"), tmp_path)
    assert list(found) == ["place", "f"]
    assert mine.in_words(found) == "yours: f; the course's: all else"
    assert mine.in_words({"place": found["place"]}) == "yours: none; the course's: all else"


def test_an_answer_that_was_changed_after_its_check_is_not_done():
    mine_twice = (
        "def fit_alpha_beta(sizes_bytes, times_s):\n"
        "    import torch\n"
        "    sizes, times = torch.tensor([[*sizes_bytes], [*times_s]], dtype=torch.float64)\n"
        "    columns = torch.stack([1 / times, sizes / times], dim=1)\n"
        "    return torch.linalg.lstsq(columns, torch.ones_like(times)).solution\n"
        "check.fit_alpha_beta(fit_alpha_beta)"
    )
    course_s = "from manyhands.collectives.alpha_beta import fit_alpha_beta\n"
    ready = "print(check.ready('4.11'))"
    cells = [
        "from manyhands.checks import collectives as check",
        course_s + "check.fit_alpha_beta(fit_alpha_beta)",
        ready,
        "def fit_alpha_beta(sizes_bytes, times_s):\n    return 0.0, 0.0",
        ready + "\ncheck.keep()",
        course_s + ready,
        mine_twice,
        mine_twice.replace("check.fit_alpha_beta(fit_alpha_beta)", ready),
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    NotebookClient(notebook, timeout=60).execute()
    outputs = ["".join(o.get("text", "") for o in cell.outputs) for cell in notebook.cells]
    before, after, again, rerun = (outputs[i] for i in (2, 4, 5, 7))
    assert before == again == rerun == "True\n"
    assert "waits for TODO 4.11" in after and "changed since its check" in after
    assert "nothing to write" in after


WRITTEN = """
import functools

def plainly(function):
    return lambda *args: function(*args)

class Base:
    def __init__(self, size=2):
        self.size = size

def make():
    @plainly
    def decorated(x):
        return [x + 1 for _ in range(3)]

    class Answer(Base):
        kind = "sum"

        def __init__(self):
            super().__init__(size=3)

        @property
        def half(self):
            return self.size / 2

        @staticmethod
        def name():
            return "one"

    def plain(x, y=5):
        return x * y

    return {"decorated": decorated, "Answer": Answer, "plain": plain}
"""


def changes(text: str) -> list[str]:
    """The names that `changed` tells where the cell is run as it was, and then with this text."""
    namespaces: list[dict] = [{}, {}]
    for namespace, source in zip(namespaces, (WRITTEN, text), strict=True):
        exec(source, namespace)
    one, other = (namespace["make"]() for namespace in namespaces)
    return [name for name in one if as_written(one[name]) != as_written(other[name])]


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("", "", None),
        ("x + 1", "x + 2", "decorated"),
        ("x * y", "x + y", "plain"),
        ("y=5", "y=6", "plain"),
        ('"sum"', '"mean"', "Answer"),
        ("size / 2", "size // 2", "Answer"),
        ('"one"', '"two"', "Answer"),
        ("size=3", "size=4", "Answer"),
        ("Answer(Base)", "Answer(dict)", "Answer"),
    ],
)
def test_cell_that_is_run_again_counts_as_changed_only_where_it_was(old, new, name):
    assert changes(WRITTEN.replace(old, new) if old else WRITTEN) == ([name] if name else [])
