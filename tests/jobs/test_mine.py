"""The learner's functions reach a job as they stand in the notebook, or one line says why not."""

import json
import linecache
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

from manyhands.jobs import mine, written
from manyhands.jobs.alike import difference
from manyhands.ranks.failures import BadInput
from manyhands.ranks.runtime import first_line

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
from manyhands.jobs import mine, written
from manyhands.jobs.alike import difference

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
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What a notebook of four cells wrote, and what it printed."""
    folder = tmp_path_factory.mktemp("notebook")
    cells = [nbformat.v4.new_code_cell(code) for code in (HELPERS, ANSWERS, REDEFINED, USE)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(folder)}}).execute()
    return folder / "mine", "".join(output["text"] for output in notebook.cells[-1].outputs)


def test_functions_of_a_notebook_run_outside_it(kept):
    names = ["Wrapped", "average", "joined", "recursive", "paired", "Mean", "absent"]
    found = mine.load("demo", names, kept[0])
    assert list(found) == names[:-1]
    wrapped = found["Wrapped"]()
    assert wrapped.weight.tolist() == [2.0, 2.0, 2.0] and wrapped.start == 4
    assert wrapped.shared() == 2 and wrapped.kind().__name__ == "OrderedDict"
    # The last definition counts, as in the notebook itself.
    assert wrapped.total == 600.0
    assert found["average"]([1, 2, 3]) == ("logged", 200.0)
    assert found["joined"]() is False and found["recursive"](3) == 18
    assert found["paired"]() == (3, 3, "mark") and found["Mean"].__name__ == "Average"


def test_file_holds_what_is_used_and_no_more(kept):
    text = (kept[0] / "demo.py").read_text()
    assert text.count("def double") == 1 and "LAYER" not in text and "shared_layer" not in text
    assert "\nfrom collections import OrderedDict as Ordered\n" in text
    assert "\nimport torch.distributed as dist\n" in text and "SCALE = 3\n" in text


def test_value_that_no_job_can_know_is_named_and_nothing_is_written(kept):
    (line,) = [line for line in kept[1].splitlines() if line.startswith("refused: ")]
    assert "shared_layer uses 'LAYER' from the notebook, a Tensor" in line
    assert "files: ['demo.py']" in kept[1]


OPTIMIZER = """
import torch

class Slow(torch.optim.SGD):
    def {method}(self, closure=None):
        return {rate} * 1
"""


def test_an_optimizer_that_has_been_used_is_still_what_its_text_says():
    """torch puts a wrapper around the `step` of a class when its first instance is made."""

    def slow(method: str = "step", rate: int = 1) -> type:
        space: dict = {}
        exec(OPTIMIZER.format(method=method, rate=rate), space)
        return space["Slow"]

    for method in ("step", "other"):  # its own, and one that it inherits
        used = slow(method)
        used([torch.zeros(1, requires_grad=True)], lr=0.1)
        assert hasattr(vars(used).get("step", used.step), "hooked")
        assert not difference("Slow", used, slow(method))
        assert not difference("Slow", slow(method), used)
        assert difference("Slow", used, slow(method, 2)) == f"Slow.{method}"
    assert difference("Slow", slow(), slow("other"))


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
    found = written.source_of("Bytes", space["Bytes"])
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
    return [name for name in one if difference(name, one[name], other[name])]


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


# ---- forms of cells ------------------------------------------------------------------------------

EDITED = "def f(x):\n    return 'another text'"
FORMS = {  # cells as they are run, and what f(1) is in a job, or what the refusal says
    "a plain function": ([EDITED, "def f(x):\n    return x + 1"], 2),
    "a cell that is run again": (
        ["def f(x):\n    return x + 2", EDITED, "def f(x):\n    return x + 2"],
        3,
    ),
    "two of one name in a cell": (["def f(x):\n    return 0\ndef f(x):\n    return x + 3"], 4),
    "a type with a name": (
        [
            "from collections.abc import Callable\nStep = Callable[[int], int]",
            "def f(x, step: Step = abs):\n    return step(x) + 33",
        ],
        34,
    ),
    "a lambda": ([EDITED, "f = lambda x: x + 4"], 5),
    "an alias": ([EDITED, "def g(x):\n    return x + 5", "f = g"], 6),
    "an older object": (["def f(x):\n    return x + 6\nfirst = f", EDITED, "f = first"], 7),
    "a function of the same name in a class": (
        ["class A:\n    def f(self, x):\n        return 0", "def f(x):\n    return x + 7"],
        8,
    ),
    "a partial": (
        [
            EDITED,
            "import functools\ndef g(x, y):\n    return x + y",
            "f = functools.partial(g, y=8)",
        ],
        9,
    ),
    "a closure": (
        [EDITED, "def make(k):\n    def f(x):\n        return x + k\n    return f", "f = make(9)"],
        10,
    ),
    "a decorator with wraps": (
        [
            "import functools\ndef twice(g):\n    @functools.wraps(g)\n    def inner(x):\n"
            "        return 2 * g(x)\n    return inner",
            "@twice\ndef f(x):\n    return x + 4",
        ],
        10,
    ),
    "a decorator with an argument, on two lines": (
        [
            "def times(k):\n    def wrap(g):\n        return lambda x: k * g(x)\n    return wrap",
            "@times(\n    3)\ndef f(x):\n    return x + 4",
        ],
        15,
    ),
    "a cache": (["import functools\n@functools.lru_cache\ndef f(x):\n    return x + 11"], 12),
    "a class with a base": (
        [
            "class Base:\n    def __new__(cls, x):\n        return x + cls.k",
            "class f(Base):\n    k = 12",
        ],
        13,
    ),
    "a dataclass": (
        [
            "from dataclasses import dataclass",
            "@dataclass\nclass P:\n    a: int = 13",
            "def f(x):\n    return x + P().a",
        ],
        14,
    ),
    "a named tuple": (
        [
            "from collections import namedtuple\nQ = namedtuple('Q', 'a b')",
            "def f(x):\n    return x + Q(14, 0).a",
        ],
        15,
    ),
    "a name of Python's that the notebook has taken": (
        ["sum = lambda values: 16", "def f(x):\n    return sum([x])"],
        16,
    ),
    "a module below another": (
        ["import os.path, xml\nimport xml.dom", "def f(x):\n    return xml.dom.__name__"],
        "xml.dom",
    ),
    "a function without a module": (
        ["from torch import zeros", "def f(x):\n    return zeros(x).tolist()"],
        [0.0],
    ),
    "a magic": (["%%time\ndef f(x):\n    return x + 17"], 18),
    "a helper that was deleted": (
        ["def helper(x):\n    return x", "def f(x):\n    return helper(x)", "del helper"],
        "f uses 'helper', which the notebook does not have: run the cell that makes it",
    ),
    "a default that has another value now": (
        ["N = 3", "def f(x, n=N):\n    return x + n", "N = 4"],
        "f, or rather a default of f, is no longer what its text says",
    ),
    "a decorator that was changed since": (
        [
            "def twice(g):\n    return lambda x: 2 * g(x)",
            "@twice\ndef f(x):\n    return x",
            "def twice(g):\n    return lambda x: 3 * g(x)",
        ],
        "f is no longer what its text says: define it with `def` in a cell of its own",
    ),
    "a name that wraps itself": (
        ["def f(x):\n    return x", "import functools\nf = functools.partial(f)"],
        "f cannot run outside the notebook (NameError: name 'f' is not defined)",
    ),
    "a method of an object": (
        ["import logging\nlog = logging.getLogger('x').info", "def f(x):\n    log(x)"],
        "f uses 'log' from the notebook, a method: a job cannot know it",
    ),
    "the notebook itself": (
        ["def f(x):\n    return get_ipython()"],
        "f uses 'get_ipython' from the notebook, a method: a job cannot know it",
    ),
    "a function in an if": (
        ["if True:\n    def f(x):\n        return x - 40"],
        "the source of 'f' is not to be found: define it with `def` or `class` at the left margin",
    ),
    "text that is executed": (
        [EDITED, "exec('def f(x):\\n    return x - 41')"],
        "the source of 'f' is not to be found",
    ),
}
NOTEBOOK = """
import io, json, sys
from contextlib import redirect_stdout
from pathlib import Path
from IPython.core.interactiveshell import InteractiveShell
from manyhands.jobs import mine

shell = InteractiveShell.instance()
said = {}
for number, cells in enumerate(json.loads(sys.argv[1])):
    shell.reset(new_session=False)
    for cell in cells:
        with redirect_stdout(io.StringIO()):
            shell.run_cell(cell, store_history=True).raise_error()
    try:
        mine.write(f"form{number}", {"f": shell.user_ns["f"]}, Path("mine"))
    except ValueError as refused:
        said[number] = str(refused)
print(json.dumps(said))
"""
JOB = """
import json, sys
from pathlib import Path
from manyhands.jobs import mine

files = Path("mine").glob("*.py")
made = {f.stem: mine.load(f.stem, ["f"], Path("mine"))["f"](1) for f in files}
print(json.dumps(made))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Of each form: what f(1) is in a process that loads the file, or why none was written."""
    folder = tmp_path_factory.mktemp("forms")
    cells = json.dumps([cells for cells, _ in FORMS.values()])
    said, made = (
        json.loads(subprocess.check_output([sys.executable, "-c", *words], cwd=folder, timeout=200))
        for words in ((NOTEBOOK, cells), (JOB,))
    )
    return {
        form: made.get(f"form{number}", said.get(str(number))) for number, form in enumerate(FORMS)
    }


@pytest.mark.parametrize("form", FORMS)
def test_a_job_runs_what_the_check_has_seen_or_one_line_says_why_not(outcomes, form):
    wanted = FORMS[form][1]
    if isinstance(wanted, str) and outcomes[form] != wanted:
        assert wanted in outcomes[form] and "\n" not in outcomes[form]
    else:
        assert outcomes[form] == wanted


def test_nobody_else_can_change_what_jobs_run_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        path = mine.write("ddp", {"first_line": first_line}, tmp_path / "mine")
    finally:
        os.umask(before)
    assert [one.stat().st_mode & 0o022 for one in (path.parent, path)] == [0, 0]
